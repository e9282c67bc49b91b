"""The bars a reproduction is held to, and how what was run stands to each: met, missed, or not run yet.

accuracy   within 0.3 points of the paper's mean, or above it
gain       GReg-1 above one-shot by at least half of what the paper gains, at ratios of 0.7 and more
order      GReg-2 not more than 0.1 below GReg-1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from growprune.paper.results import Found

NEAR, SHARE, BEHIND, FROM = 0.3, 0.5, 0.1, 0.7

Bar = Literal["accuracy", "gain", "order"]

BARS: dict[Bar, str] = {
    "accuracy": f"within {NEAR} points of the paper's mean, or above it",
    "gain": f"GReg-1 above one-shot by at least half the paper's gain, at ratios of {FROM} and more",
    "order": f"GReg-2 not more than {BEHIND} below GReg-1",
}


@dataclass(frozen=True)
class Verdict:
    """How one cell of a table stands to a bar; `met` is None where runs are missing."""

    bar: Bar
    row: str
    value: str
    met: bool | None

    @property
    def text(self) -> str:
        """As a table shows it."""
        return f"{self.value} ✗" if self.met is False else self.value


def accuracy(row: str, found: Found, paper: float) -> Verdict:
    """
    >>> run = Found(({"accuracy": {"final": 89.0}},))
    >>> accuracy("r", run, 89.3).text, accuracy("r", run, 89.31).text, accuracy("r", Found(()), 89.3).met
    ('-0.30', '-0.31 ✗', None)
    """
    if not found:
        return Verdict("accuracy", row, "", None)
    distance = round(found.mean() - paper, 2)
    return Verdict("accuracy", row, f"{distance:+.2f}", distance >= -NEAR)


def gain(row: str, once: Found, greg: Found, paper: float) -> Verdict:
    """The share of the paper's gain that was found."""
    if not (once and greg):
        return Verdict("gain", row, "", None)
    here = round(greg.mean() - once.mean(), 2)
    return Verdict("gain", row, f"{here / paper:.2f}", here > 0 and here >= round(SHARE * paper, 4))


def order(row: str, greg1: Found, greg2: Found) -> Verdict:
    if not (greg1 and greg2):
        return Verdict("order", row, "", None)
    distance = round(greg2.mean() - greg1.mean(), 2)
    return Verdict("order", row, f"{distance:+.2f}", distance >= -BEHIND)
