"""The one error a user can cause, a line that names the thing and the way out; and what stops a run."""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path


class GrowpruneError(ValueError):
    """Bad input, refused before anything was changed."""


class ElsewhereError(GrowpruneError):
    """Of a folder or device that is not to be had. `kept` says it to a run that has begun and can choose no other."""

    def __init__(self, new: str, kept: str) -> None:
        super().__init__(new)
        self.kept = kept


class StoppedError(BaseException):
    """Someone asked the run to stop: `step` is saved. `at_once`: from wherever it was, with no save of its own; `lost`:
    what was done since is gone.

    Like KeyboardInterrupt it is no Exception: what tries things out, and takes an exception for an answer, must not
    take this one.
    """

    def __init__(self, step: int, signal: int = 2, at_once: bool = False, lost: bool = False) -> None:
        how = f"at once, as saved at step {step}: what was done since is lost" if lost else f"at step {step}, all saved"
        super().__init__(f"stopped {how}")
        self.step, self.signal, self.at_once, self.lost = step, signal, at_once, lost


class EndedError(BaseException):
    """Someone ended the command, by this signal, where no run was going on."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"ended by signal {signal}")
        self.signal = signal


def told(error: BaseException) -> str | None:
    """What a user can do something about, in words; None for anything else, which is a defect of ours.

    >>> told(FileNotFoundError(2, "No such file or directory", "here")), told(KeyError("x"))
    ('here: No such file or directory', None)
    """
    if isinstance(error, GrowpruneError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which need not be loaded here
        return f"not enough memory on the GPU, a smaller batch needs less: {str(error).partition('. ')[0]}"
    return None


def warn(message: str) -> None:
    """At the user's own line: the nearest that is neither ours nor torch's."""
    homes = (Path(str(sys.modules[name].__file__)).parent for name in ("growprune", "torch") if name in sys.modules)
    inside, level, frame = tuple(f"{home}{os.sep}" for home in homes), 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """', did you mean X?' for the known name most like `name`, or nothing.

    >>> nearest("layer1.0.con1", ["layer1.0.conv1", "fc"])
    ", did you mean 'layer1.0.conv1'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f", did you mean '{close[0]}'?" if close else ""


def line(error: BaseException) -> str:
    """An error's message in one line of bearable length.

    >>> line(ValueError("first\\nsecond"))
    'first'
    """
    first = next(iter(str(error).splitlines()), "")
    return first if len(first) <= 200 else f"{first[:197]}..."
