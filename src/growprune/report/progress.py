"""Progress of runs on stderr: bars on a terminal, elsewhere a plain line now and then.

Runs side by side share one screen, so that they do not fight over it. There is no thread behind it: the calls of
`step` draw, a few times a second at most, and cost about a microsecond otherwise.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bars

from growprune.report import duration

DRAW_EVERY = 0.25
"""Seconds between two drawings on a terminal."""
LINE_EVERY = 10.0
"""Seconds between two plain lines, of all runs together; more in a long run, see `Progress.show`."""
FIELDS = ("penalty", "accuracy", "ms", "left")


class Stderr(Console):
    """A console whose reader may go away: rich would end the program then, and the run with it."""

    def on_broken_pipe(self) -> None:
        unread()
        self.quiet = True
        self.file = open(os.devnull, "w")  # noqa: SIM115 (it stays open as long as the console does)


def unread() -> None:
    """Nobody reads the error output any more. What is still to be flushed there when Python ends would make it fail."""
    with suppress(OSError, ValueError):  # it may be no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


class Screen:
    """One console, and what all progress on it shares: the live bars, if it is a terminal."""

    known: ClassVar[WeakValueDictionary[int, Screen]] = WeakValueDictionary()

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = console.is_terminal and not console.is_dumb_terminal
        self.bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),  # gives way first where it is narrow
            TaskProgressColumn(),
            *(TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in FIELDS),
            console=console,
            auto_refresh=False,
            redirect_stdout=False,  # results that are piped must not end on the terminal
            disable=not self.live,
        )
        self.users = 0
        self.next = -math.inf

    @classmethod
    def of(cls, console: Console | None) -> Screen:
        """The screen on this console; None: on stderr. It lives as long as somebody holds it."""
        key = 0 if console is None else id(console)
        screen = cls.known.get(key)
        if screen is None:
            screen = cls.known[key] = Screen(console or Stderr(stderr=True))
        return screen

    def enter(self) -> None:
        self.users += 1
        if self.users == 1:
            self.bars.start()

    def leave(self) -> None:
        self.users -= 1
        if self.users == 0:
            self.bars.stop()

    def draw(self, now: float, soon: bool = False) -> None:
        if soon or now >= self.next:
            self.next = now + DRAW_EVERY
            with self.unheard():
                self.bars.refresh()

    def print(self, line: str) -> None:
        with self.unheard():
            self.console.out(line, highlight=False)
            self.console.file.flush()

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Whoever read along may go away (`2>&1 | head`): the run goes on, unseen."""
        try:
            yield
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                unread()
            self.live, self.console.quiet = False, True


class Progress:
    """The progress of one run, stage by stage; used with `with`.

    `label` tells runs side by side apart. `total`: the steps of all the run's stages, for the time left of the whole.
    """

    def __init__(
        self,
        label: str = "",
        quiet: bool = False,
        total: int | None = None,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label, self.total, self.clock = label, total, clock
        self.screen = None if quiet else Screen.of(console)
        self.stage = ""
        self.steps = self.done = self.begun = self.before = 0
        self.task: TaskID | None = None
        self.next = math.inf
        self.forget()

    def forget(self) -> None:
        """What one stage says of itself is not the next one's."""
        self.phase: str | None = None
        self.penalty: float | None = None
        self.accuracy: float | None = None
        self.loss: float | None = None
        self.ms: float | None = None
        self.spent, self.timed = 0.0, self.begun  # milliseconds of the steps up to `timed`, as given
        self.first: tuple[float, int] | None = None

    def __enter__(self) -> Progress:
        if self.screen:
            self.screen.enter()
            empty: dict[str, Any] = dict.fromkeys(FIELDS, "")
            self.task = self.screen.bars.add_task(self.label, total=None, visible=False, **empty)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self.stage:
            self.end(f"stopped after {self.done:,} of {self.steps:,} steps")
        if self.screen and self.task is not None:
            self.screen.bars.remove_task(self.task)
            self.screen.draw(self.clock(), soon=True)  # the others close ranks
            self.screen.leave()
            self.task = None

    def begin(self, stage: str, steps: int, done: int = 0, *, before: int | None = None) -> None:
        """A stage of `steps` begins, `done` of them in an earlier process.

        `before`: the steps of the stages before this one; if not given, of those that were begun here.
        """
        self.end()
        self.before = self.before + self.steps if before is None else before
        self.stage, self.steps, self.done, self.begun = stage, steps, done, done
        self.forget()
        self.started = self.clock()
        if self.screen:
            self.next = self.started if self.screen.live else self.started + self.interval(self.started)
            self.draw(self.started, soon=True)

    def step(
        self,
        done: int,
        *,
        phase: str | None = None,
        penalty: float | None = None,
        accuracy: float | None = None,
        loss: float | None = None,
        ms: float | None = None,
    ) -> None:
        """`done` steps of the stage are done. What is not given stays as last given."""
        self.done = done
        if phase is not None:
            self.phase = phase
        if penalty is not None:
            self.penalty = penalty
        if accuracy is not None:
            self.accuracy = accuracy
        if loss is not None:
            self.loss = loss
        if ms is not None:
            self.ms = ms
            self.spent, self.timed = self.spent + ms * (done - self.timed), done
        now = self.clock()
        if self.first is None:
            self.first = now, done
        if now >= self.next:
            self.show(now)

    def say(self, line: str) -> None:
        """A notice: above the bars, or as a plain line."""
        if self.screen:
            self.screen.print(f"{self.label}: {line}" if self.label else line)

    def end(self, line: str | None = None) -> None:
        """The stage is over: says `line`, or what the stage came to."""
        if not self.stage:
            return
        now = self.clock()
        took = f"{self.done:,} steps" + (f" ({self.done - self.begun:,} of them now)" if self.begun else "")
        self.say(
            f"{self.stage}: {line or ', '.join([took, *self.state(self.mean(now)), duration(now - self.started)])}"
        )
        self.stage, self.next = "", math.inf
        if self.screen and self.task is not None:
            self.screen.bars.update(self.task, visible=False)
            self.screen.draw(now, soon=True)

    # -- what is shown ----------------------------------------------------------------------------------------------

    def show(self, now: float) -> None:
        """Draw, or say, and set when to do so next."""
        assert self.screen
        self.next = now + self.interval(now)
        if self.screen.live:
            self.draw(now)
            return
        stage, whole = self.left(now)
        said = [f"{self.done:,} of {self.steps:,} steps", *self.state(self.step_ms(now))]
        said += [f"{duration(stage)} left{' in this stage' if whole is not None else ''}"] if stage is not None else []
        said += [f"{duration(whole)} left in all"] if whole is not None else []
        self.say(f"{self.name}: {', '.join(said)}")

    def interval(self, now: float) -> float:
        """Seconds to the next showing. Lines grow rarer: a stage of a night must not fill a log with thousands."""
        assert self.screen
        if self.screen.live:
            return DRAW_EVERY
        return max(LINE_EVERY * max(1, self.screen.users), (now - self.started) / 50)

    def draw(self, now: float, soon: bool = False) -> None:
        if self.screen and self.screen.live and self.task is not None:
            name = f"{self.label} {self.name}".strip()
            fields: dict[str, Any] = {
                "penalty": "" if self.penalty is None else f"λ {self.penalty:.4f}",
                "accuracy": "" if self.accuracy is None else f"{self.accuracy:.1f} %",
                "ms": "" if (ms := self.step_ms(now)) is None else f"{ms:.1f} ms",
                "left": ", all ".join(face(seconds) for seconds in self.left(now) if seconds is not None),
            }
            fields["left"] = f"left {fields['left']}" if fields["left"] else ""
            self.screen.bars.update(
                self.task, description=name, total=self.steps, completed=self.done, visible=True, **fields
            )
            self.screen.draw(now, soon)

    @property
    def name(self) -> str:
        return self.stage if self.phase in (None, self.stage) else f"{self.stage} {self.phase}"

    def state(self, ms: float | None) -> list[str]:
        """λ, accuracy, loss and step time, where known."""
        return [
            text.format(value)
            for text, value in (
                ("λ {:.4f}", self.penalty),
                ("accuracy {:.1f} %", self.accuracy),
                ("loss {:.4g}", self.loss),
                ("{:.1f} ms a step", ms),
            )
            if value is not None
        ]

    def step_ms(self, now: float) -> float | None:
        """Milliseconds a step: as given, or as seen from here."""
        pace = self.pace(now) if self.ms is None else None
        return self.ms if pace is None else 1e3 * pace

    def mean(self, now: float) -> float | None:
        """The same over all steps of the stage that were done here, not the last ones alone."""
        return self.spent / (self.timed - self.begun) if self.timed > self.begun else self.step_ms(now)

    def pace(self, now: float) -> float | None:
        """Seconds a step in this process, tests and saves included. Steps of an earlier one say nothing of it; nor
        does the first, which may compile: it counts only while there is no other."""
        if self.first is not None and self.done > self.first[1]:
            return (now - self.first[0]) / (self.done - self.first[1])
        return (now - self.started) / (self.done - self.begun) if self.done > self.begun else None

    def left(self, now: float) -> tuple[float | None, float | None]:
        """Seconds left of the stage and of the whole run, the later stages taken to be as fast; None: not known, or in
        the last stage the same."""
        pace, stage = self.pace(now), max(0, self.steps - self.done)
        if pace is None:
            return None, None
        whole = 0 if self.total is None else self.total - self.before - self.done
        return stage * pace, whole * pace if whole > stage else None


def face(seconds: float) -> str:
    """As a clock shows it.

    >>> face(75), face(3_725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
