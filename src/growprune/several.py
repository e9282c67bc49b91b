"""Several runs on one device, side by side or one after another: one that fails keeps no other from its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from growprune.choosing import Measured
from growprune.config import Config
from growprune.errors import GrowpruneError, StoppedError, told
from growprune.feeds import Last
from growprune.jobs import FINISHED, heeding, surroundings, threads, together, usable
from growprune.report.progress import Progress
from growprune.run import Folder, busy
from growprune.train import Job


class SomeFailedError(GrowpruneError):
    """Runs that were not done, by name, and why; all others were."""

    def __init__(self, failures: Sequence[tuple[str, str]]) -> None:
        (name, why), *others = failures
        more = f"; {len(others)} more not done: {', '.join(other for other, _ in others)}" if others else ""
        super().__init__(f"{name}: {why}{more}")
        self.failures = tuple(failures)


def side_by_side(
    configs: Sequence[tuple[Config, Path]],
    parallel: int,
    quiet: bool = False,
    finished: Callable[[Path], None] = lambda folder: None,
    more: bool = False,
    last: Last | None = None,
) -> list[dict[str, Any]]:
    """Runs on one device, `parallel` at a time, each giving what it gives alone; `finished` hears of each. One that
    fails is told at once, and again in the end. Whoever asks them to stop when there is nothing left to stop gets the
    results; where `more` follows, it is not begun, and finds in `last` what these had on the device."""
    if not configs:
        return []
    if len({(usable(each.device), each.deterministic, each.threads) for each, _ in configs}) > 1:
        raise GrowpruneError("side by side, all runs need the same --device, --deterministic and --threads")
    several = Several(configs, usable(configs[0][0].device), quiet, finished, last or Last())
    with several.screens, surroundings(several.configs[0][0]), heeding(several.running) as several.asked:
        try:
            for job, failure in together(several.jobs(), parallel):
                several.end(job, failure)
                del job, failure  # with all that they hold on the GPU
        except Exception:
            for folder in several.folders.values():
                folder.abandon()
            raise
        finally:
            for folder in several.folders.values():
                folder.close()
    asked, failures = several.asked, several.failures
    if asked and (more or len(several.results.keys() | failures) < len(configs)):
        raise StoppedError(0, asked[-1])
    if failures:
        raise SomeFailedError([(configs[number][1].name, why) for number, why in failures.items()])
    return [several.results[number] for number in range(len(configs))]


class Several:
    """What is running, what is done, what has failed: by number."""

    def __init__(
        self,
        configs: Sequence[tuple[Config, Path]],
        device: str,
        quiet: bool,
        finished: Callable[[Path], None],
        last: Last,
    ) -> None:
        self.device, self.quiet, self.finished = device, quiet, finished
        self.configs = [(replace(each, device=device.partition(":")[0]), out) for each, out in configs]
        self.results: dict[int, dict[str, Any]] = {}
        self.failures: dict[int, str] = {}
        self.folders: dict[int, Folder] = {}  # held
        self.running: list[Job] = []
        self.numbers: dict[int, int] = {}
        self.measured: Measured = {}  # the same network need not be measured twice
        self.asked: Sequence[int] = ()
        self.last = last
        self.screens = ExitStack()

    def jobs(self) -> Iterator[Job]:
        for number in range(len(self.configs)):
            if self.asked:
                return
            if self.start(number):
                yield self.running[-1]

    def start(self, number: int) -> bool:
        """Is there something to do?"""
        config, out = self.configs[number]
        self.last.makes_way(config)
        progress = self.screens.enter_context(Progress(out.name, self.quiet))
        if self.device == "cpu":
            torch.set_num_threads(threads(config))  # one that was taken up again had those it began with
        try:
            folder = self.folders[number] = Folder.claim(out, config)
            if folder.result is None:
                job = Job(config, folder, self.device, progress=progress, measured=self.measured)
                self.numbers[id(job)] = number
                self.running.append(job)
                return True
            folder.tidy()  # it may have been killed before it did
            progress.say(FINISHED)
            self.done(number, folder.result, progress)
        except Exception as error:
            self.failed(number, progress, error)
        return False

    def end(self, job: Job, failure: Exception | None) -> None:
        number, self.last.images = self.numbers.pop(id(job)), job.images
        self.running.remove(job)
        if failure is None:
            try:
                self.done(number, job.result, job.progress)
            except Exception as error:
                failure = error
        if failure is not None:
            self.failed(number, job.progress, failure)

    def done(self, number: int, result: dict[str, Any], progress: Progress) -> None:
        self.finished(self.configs[number][1])
        self.results[number] = result
        self.folders.pop(number).close()
        progress.close()

    def failed(self, number: int, progress: Progress, error: Exception) -> None:
        why = told(error)
        if why is None:
            raise error
        self.failures[number] = why
        progress.end(f"failed after {progress.done:,} of {progress.steps:,} steps")
        elsewhere = why.startswith(busy(self.configs[number][1]))  # it has not failed: another process does it
        progress.say(why if elsewhere else f"failed: {why}")
        if number in self.folders:
            self.folders[number].abandon()
            self.folders.pop(number).close()
        progress.close()
