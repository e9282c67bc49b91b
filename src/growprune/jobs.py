"""Running jobs: one alone or in many processes, or several in turn (`several`); and stopping them.

Ctrl-C, SIGTERM and a closed terminal end a run after its present step, saved. Threads, determinism, signals and the
working folder are put back afterwards (but for CUBLAS_WORKSPACE_CONFIG, which cuBLAS reads once).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from growprune import distributed, scales
from growprune.choosing import determinism
from growprune.config import Config
from growprune.distributed import World
from growprune.errors import ElsewhereError, GrowpruneError, StoppedError, told
from growprune.feeds import LARGE, Last
from growprune.measurement import measure, weight_sparsity
from growprune.outcome import environment
from growprune.reading import cores
from growprune.report.progress import Progress
from growprune.run import Folder
from growprune.streaming import undecodable
from growprune.train import Job

FINISHED = "finished before: nothing was done"


def run(
    config: Config,
    out: Path,
    quiet: bool = False,
    label: str = "",
    finished: Callable[[Path], None] = lambda folder: None,
    more: bool = False,
    last: Last | None = None,
) -> dict[str, Any]:
    """Do, or go on with, the run that `config` describes, in the folder `out`; returns what result.json says.

    `finished` hears of it, in the first process if there are several; the others wait for that. Whoever asks it to stop
    when there is nothing left to stop gets its result; where `more` runs follow, they are not begun, and find in `last`
    what this one had on the device.
    """
    device = usable(distributed.own(config.device))
    config = replace(config, device=device.partition(":")[0])
    world, device = distributed.join(device)
    try:
        with distributed.one_voice(world):
            result, late = one(config, out, device, world, quiet, label, last or Last())
            if world.first:
                finished(out)
            if distributed.from_first(world, more and late):
                raise StoppedError(0, late or signal.SIGINT)
            return result
    except StoppedError as stopped:
        if world.first:
            raise
        raise SystemExit(128 + stopped.signal) from None


def gathered(device: str) -> World:
    """This process's place among all, for what they look into before a run: what is wrong on one machine alone must not
    leave the others waiting."""
    return distributed.join(usable(distributed.own(device)))[0]


def one(
    config: Config, out: Path, device: str, world: World, quiet: bool, label: str, last: Last
) -> tuple[dict[str, Any], int | None]:
    """The result, and the signal that came too late to stop it."""
    folder = Folder.claim(out, config) if world.first else None
    try:
        finished: dict[str, Any] | None = distributed.from_first(world, folder.result if folder else None)
        if finished is not None:
            if folder is not None:
                folder.tidy()  # it may have been killed before it did
                with Progress(label, quiet) as progress:
                    progress.say(FINISHED)
            return finished, None
        jobs: list[Job] = []
        with (
            Progress(label, quiet or not world.first) as progress,
            surroundings(config, progress.say),
            at_home(folder, world, progress),
            heeding(jobs) as asked,
        ):
            if folder is not None:
                folder.images_there()
            last.makes_way(config)
            jobs.append(Job(config, folder, device, world, progress))
            for job, failure in together(jobs):
                last.images = job.images
                if failure is not None:
                    raise failure
        return jobs[0].result, asked[-1] if asked else None
    except Exception:
        if folder is not None:
            folder.abandon()
        raise
    finally:
        if folder is not None:
            folder.close()


def together(jobs: Iterable[Job], parallel: int = 1) -> Iterator[tuple[Job, Exception | None]]:
    """Advance up to `parallel` jobs in turn, a step each, every one on its own stream; gives each when it is done, or
    with what it failed of. When one is asked to stop, the others are stopped too, saved, before that is told."""
    waiting = iter(jobs)
    working: list[tuple[Job, Iterator[None]]] = []
    over = object()
    stopped: StoppedError | None = None
    while True:
        while stopped is None and len(working) < parallel and (job := next(waiting, None)) is not None:
            if job.stream is not None:  # the network was made on another one
                job.stream.wait_stream(torch.cuda.current_stream(job.device))
            working.append((job, job.work()))
            del job
        if not working:
            break
        ended = False
        for pair in list(working):
            failure: Exception | None = None
            try:
                with torch.cuda.stream(pair[0].stream):
                    if next(pair[1], over) is not over:
                        continue
            except StoppedError as error:
                if error.at_once:
                    raise
                stopped = stopped or error
                working.remove(pair)
                for other, _ in working:
                    other.stopping = True
                continue
            except Exception as error:
                if told(error) is None:
                    raise
                failure = error
            working.remove(pair)
            yield pair[0], failure
            del pair, failure
            ended = True
        if ended:
            gc.collect()  # what a caught exception still holds: its network and images, on the GPU
    if stopped is not None:
        raise stopped


@contextmanager
def at_home(folder: Folder | None, world: World, progress: Progress) -> Iterator[None]:
    """In the folder where the run was started: the paths and modules that it names are meant from there."""
    home: Path | None = distributed.from_first(world, folder.home if folder else None)
    if home is None or home == Path.cwd() or not home.is_dir():
        yield
        return
    progress.say(f"working in {home}, where the run was started")
    if folder is not None:
        folder.path = folder.path.resolve()
    sys.path.insert(0, str(home))
    try:
        with chdir(home):
            yield
    finally:
        sys.path.remove(str(home))


def threads(config: Config) -> int:
    """As many as were asked for; 0 is what OMP_NUM_THREADS says, where it does, else all cores. torchrun sets that
    variable to 1 by itself: there 0 is this process's share of the cores. Beside a GPU 0 is one: hardly more than
    an epoch's order is computed here, and threads that wait for the next one keep other runs off the cores."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    usual = int(said) if said.isdecimal() and not distributed.launched() else 0
    share = 1 if config.device.startswith("cuda") else max(1, cores() // distributed.neighbours())
    return config.threads or usual or share


@contextmanager
def surroundings(config: Config, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Threads, determinism and random numbers as the configuration has them, afterwards as before."""
    before = torch.get_num_threads()
    if config.threads > cores():
        say(f"--threads {config.threads}: more than the cores there are here ({cores()})")
    torch.set_num_threads(threads(config))
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        cuda = [torch.cuda.current_device()] if config.device.startswith("cuda") else []
        with determinism(config.deterministic), torch.random.fork_rng(devices=cuda):
            yield
    except RuntimeError as error:
        if config.deterministic and "deterministic" in str(error):
            raise GrowpruneError(f"--deterministic: {str(error).splitlines()[0]}") from error
        raise
    finally:
        torch.set_num_threads(before)


@contextmanager
def heeding(jobs: Sequence[Job]) -> Iterator[Sequence[int]]:
    """Ctrl-C and SIGTERM end the jobs at their next step, saved; at once where there is nothing to save, or the second
    time. Not so under torchrun, which sends on what the terminal has sent already, and where all must stop together.
    Gives the signals that came: the last may have found nothing more to stop."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        asked.append(number)
        for job in jobs:
            job.stopping = True
        patient = bool(jobs) and distributed.launched()
        settled = all(job.settled for job in jobs)
        if not patient and (len(asked) > 1 or settled):
            step = max((job.safe for job in jobs), default=0)
            raise StoppedError(step, number, at_once=True, lost=not settled)

    try:
        heard = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # the terminal is closed; nohup would have it ignored
            heard.append(signal.SIGHUP)
        before = {each: signal.signal(each, ask) for each in heard}
    except ValueError:  # not in the main thread, where signals are someone else's
        before = {}
    try:
        yield asked
    except StoppedError as stopped:
        raise StoppedError(stopped.step, asked[-1] if asked else signal.SIGINT, lost=stopped.lost) from None
    finally:
        for each, handler in before.items():
            signal.signal(each, signal.SIG_IGN if asked and distributed.launched() else handler)


def usable(name: str) -> str:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name if name.startswith(("cpu", "cuda")) else "none")
    except (RuntimeError, AssertionError) as error:
        if not name.startswith("cuda"):
            raise GrowpruneError(f"device: '{name}' cannot be used here; give auto, cpu or cuda") from error
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        there = f"no such GPU, there are {count} here; give cuda" if count else "no GPU that torch can use here; give"
        raise ElsewhereError(
            f"--device {name}: {there}{', ' if count else ' '}auto or cpu",
            "it was begun on a GPU, and here is none that torch can use; go on where there is one",
        ) from error
    return name


def tested(config: Config) -> dict[str, Any]:
    """`growprune eval`: what trained weights give on the test images."""
    device = usable(config.device)
    config = replace(config, device=device, decode="cpu" if undecodable(device) else config.decode)
    with Progress() as progress, surroundings(config, progress.say):
        job = Job(config, None, device)
        cost, accuracy = measure(job.net, job.images.example()), job.test(job.net, exact=True)
        with suppress(GrowpruneError):  # no training image is needed to test: that one is broken does not matter
            if doubt := scales.doubt(job.net, job.images, accuracy, min(LARGE, job.images.sizes["train"])):
                progress.say(doubt)
        return {
            "model": config.model,
            "weights": str(getattr(config, "weights", None)),
            "data": config.data,
            "images": job.images.sizes["test"],
            "accuracy": accuracy,
            "params": cost.params,
            "macs": cost.macs,
            "zeros": weight_sparsity(job.net),
            "environment": environment(job.device, 1),
        }
