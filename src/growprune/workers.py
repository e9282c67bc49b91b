"""Processes that read batches of images some way ahead of those who want them.

They are not a DataLoader's: there, a worker that is killed can leave a lock behind, on which the loader waits for ever
(we saw it happen). Here each has a pipe of its own and shares no lock. When it dies its pipe ends, which says at once
who died, and over which file. When the main process dies, however suddenly, the pipes end too, and the workers leave.
Nothing else ends them: a signal to the whole group (Ctrl-C, `timeout`) is the main process's, which may still want
batches to come to its next step and save.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.resource_tracker
import multiprocessing.util
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count, cycle
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # with it, pipes hand over tensors in shared memory
from torch import Tensor

from growprune.errors import GrowpruneError, line


class Sample(NamedTuple):
    """What is asked of a worker: `seed` is that of the crop and flip, None for the view that is tested."""

    file: str
    label: int
    seed: int | None


Batch = tuple[Tensor, list[int]]  # images, B x R x R x 3; or files' bytes, one after the other, and how many of each
Reads = Callable[[list[Sample], Callable[[int], None]], Batch]  # the second argument hears which sample it is at
HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # by the main process: see `jobs.heeding`


class Workers:
    """Processes that read batches some way ahead, for any number of passes at a time."""

    def __init__(self, reader: Reads, number: int) -> None:
        self._reader, self._number = reader, number
        self._all: list[Worker] = []

    def read(self, rows: Iterable[list[Sample]]) -> Iterator[tuple[list[Sample], Batch]]:
        """The batches asked for, in order."""
        if not self._number:
            yield from ((asked, self._reader(asked, lambda _: None)) for asked in rows)
            return
        waiting: deque[tuple[Worker, int, list[Sample]]] = deque()
        ours: list[Worker] = []
        try:
            self._all = ours = self._all or [Worker(self._reader) for _ in range(self._number)]
            for worker, asked in zip(cycle(ours), rows, strict=False):
                waiting.append((worker, worker.ask(asked), asked))
                if len(waiting) > 2 * self._number:
                    yield self._next(waiting)
            while waiting:
                yield self._next(waiting)
        except DeadError as error:
            if self._all is ours:
                self.close()  # the next pass has new ones
            raise GrowpruneError(str(error)) from error
        finally:
            for worker, ticket, _ in waiting:
                worker.forget(ticket)

    def _next(self, waiting: deque[tuple[Worker, int, list[Sample]]]) -> tuple[list[Sample], Batch]:
        worker, ticket, asked = waiting[0]
        batch = worker.answer(ticket)
        waiting.popleft()
        return asked, batch

    def close(self) -> None:
        for worker in self._all:
            worker.pipe.close()
        for worker in self._all:
            worker.end()
        self._all = []


OUT = "too little memory, or shared memory? Try fewer workers (--workers)"


class DeadError(Exception):
    """A worker is no more."""


class Worker:
    """One process and the pipe to it. Questions have tickets; answers that nobody waits for yet are kept."""

    def __init__(self, reader: Reads) -> None:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context: Any = torch.multiprocessing.get_context(method)  # a process with threads and CUDA is not safe to copy
        if method == "forkserver":
            context.set_forkserver_preload(["torchvision.transforms.v2", "growprune.streaming"])
        try:
            self.pipe, theirs = context.Pipe()
            self._busy = context.RawArray("q", 2)  # the ticket, and the place in it of the image it reads; -1: none
            self._process = context.Process(target=serve, args=(theirs, reader, self._busy), daemon=True)
            # Before multiprocessing itself would end it at exit: by SIGTERM, and then wait for it.
            multiprocessing.util.Finalize(self, ended, (self.pipe, self._process), exitpriority=0)
            with undisturbed():
                self._process.start()
        except (EOFError, OSError) as error:
            why = line(error) or "what starts them has died"
            raise DeadError(f"no loader process could be started ({why}): {OUT}") from error
        theirs.close()
        self._tickets = count(1)
        self._asked: dict[int, list[Sample]] = {}
        self._answers: dict[int, Batch | str] = {}

    def ask(self, asked: list[Sample]) -> int:
        ticket = next(self._tickets)
        self._asked[ticket] = asked
        self._alive(self.pipe.send, (ticket, asked))
        return ticket

    def answer(self, ticket: int) -> Batch:
        while ticket not in self._answers:
            number, batch = self._alive(self.pipe.recv)
            if number in self._asked:
                self._answers[number] = batch
        self._asked.pop(ticket)
        found = self._answers.pop(ticket)
        if isinstance(found, str):
            raise GrowpruneError(found)
        return found

    def forget(self, ticket: int) -> None:
        self._asked.pop(ticket, None)
        self._answers.pop(ticket, None)

    def _alive(self, talk: Callable[..., Any], *args: Any) -> Any:
        try:
            return talk(*args)
        except (OSError, EOFError) as error:  # which one depends on what it was handing over
            self._process.join(5)
            if self._process.is_alive():
                raise
            ticket, place = self._busy
            asked = self._asked.get(ticket)
            when = f" while it read {asked[place].file}" if asked and place >= 0 else ""
            raise DeadError(f"a loader process died{when}: {OUT}") from error

    def end(self) -> None:
        """Its pipe is closed, so it ends after the batch it is at, or is made to."""
        self._process.join(3)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def ended(pipe: Any, process: Any) -> None:
    """Nobody wants anything of it any more; it holds nothing that could be lost."""
    pipe.close()
    if process.is_alive():
        process.kill()


@contextmanager
def undisturbed() -> Iterator[None]:
    """What is started in here, the server that forks workers too, is deaf to these signals from its first moment on.
    Here they are not lost: they come afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
    try:
        multiprocessing.resource_tracker.ensure_running()  # which, once it has begun, lets some of them through again
        signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(pipe: Any, reader: Reads, busy: Any) -> None:
    """A worker's life: it ends when the other end of the pipe does."""
    for each in HEEDED:  # also if the server that forked it was begun by others
        signal.signal(each, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        while True:
            ticket, asked = pipe.recv()
            busy[0] = ticket
            try:
                batch = reader(asked, lambda place: busy.__setitem__(1, place))
                busy[1] = -1
                pipe.send((ticket, batch))
            except GrowpruneError as error:
                pipe.send((ticket, str(error)))
            except RuntimeError as error:  # no room in shared memory, most likely
                pipe.send((ticket, f"a loader process failed: {line(error)}; try fewer workers (--workers)"))
    except (EOFError, OSError):
        pass
