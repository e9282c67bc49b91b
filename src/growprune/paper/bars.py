"""The bars a reproduction is held to, and how what was run stands to each: met, missed, or not run yet.

All to two decimals, as tables have them, and of two methods only the seeds that both were run with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from growprune.paper.results import Found
from growprune.report import minus

NEAR, SHARE, BEHIND, FROM, LEAST = 0.3, 0.5, 0.1, 0.7, 0.01

Bar = Literal["accuracy", "gain", "order", "above"]

BARS: dict[Bar, tuple[str, str]] = {  # what is asked, and what it is to miss it
    "accuracy": (
        f"at the paper's settings, within {NEAR} points of the paper's mean, or above it",
        f"at the paper's settings more than {NEAR} below its mean",
    ),
    "gain": (
        f"GReg-1 above one-shot by at least half the paper's gain, at ratios of {FROM} and more",
        f"less than half the paper's gain, at ratios of {FROM} and more",
    ),
    "order": (f"GReg-2 not more than {BEHIND} below GReg-1", f"GReg-2 more than {BEHIND} below GReg-1"),
    "above": ("GReg-1 and GReg-2 above one-shot", "not above one-shot"),
}


@dataclass(frozen=True)
class Verdict:
    """How one cell of a table stands to a bar; `met` is None where runs are missing. What is not `asked` of a cell is
    shown and not judged."""

    bar: Bar
    row: str
    value: str
    met: bool | None
    asked: bool = True

    @property
    def mark(self) -> str:
        return " ✗" if self.met is False else ""

    @property
    def text(self) -> str:
        """As a table shows it."""
        return f"{minus(self.value)}{self.mark}"


def accuracy(row: str, found: Found, paper: float) -> Verdict:
    """Asked only of what was run at the paper's settings; small networks on digits have no part in it.

    >>> run = Found(({"accuracy": {"final": 89.0}},))
    >>> accuracy("r", run, 89.3).text, accuracy("r", run, 89.31).text, accuracy("r", Found(()), 89.3).met
    ('−0.30', '−0.31 ✗', None)
    >>> accuracy("r", Found(run.runs, "short"), 90.0).text, accuracy("r", Found(run.runs, "smoke"), 90.0).text
    ('−1.00', '')
    """
    asked = found.scale == "paper"
    if not found or found.scale == "smoke":
        return Verdict("accuracy", row, "", None, asked)
    distance = round(found.mean() - paper, 2)
    return Verdict("accuracy", row, f"{distance:+.2f}", distance >= -NEAR if asked else None, asked)


def difference(one: Found, other: Found) -> float | None:
    """How far the other is above the first, over the seeds that both have, from the same base network."""
    one, other = one.paired(other)
    return round(other.mean() - one.mean(), 2) if one else None


def judged(bar: Bar, row: str, found: Found, here: float | None, value: str, least: float) -> Verdict:
    """Small networks on digits are judged by none."""
    asked = found.scale != "smoke"
    return Verdict(bar, row, value, None if here is None or not asked else here >= least, asked)


def gain(row: str, once: Found, greg: Found, paper: float) -> Verdict:
    """The share of the paper's gain that was found."""
    here = difference(once, greg)
    least = max(LEAST, round(SHARE * paper, 4))
    value = "" if here is None or greg.scale == "smoke" else f"{here / paper:.2f}"
    return judged("gain", row, greg, here, value, least)


def order(row: str, greg1: Found, greg2: Found) -> Verdict:
    here = difference(greg1, greg2)
    return judged("order", row, greg2, here, "" if here is None else f"{here:+.2f}", -BEHIND)


def above(row: str, once: Found, greg: Found) -> Verdict:
    here = difference(once, greg)
    return judged("above", row, greg, here, "" if here is None else f"{here:+.2f}", LEAST)


def marked(found: Iterable[Verdict]) -> tuple[str, ...]:
    """What the mark means in a table of these; nothing where nothing was judged."""
    verdicts = list(found)
    held = {each.bar for each in verdicts if each.met is not None}
    words = [missed for bar, (_, missed) in BARS.items() if bar in held]
    shown = any(each.bar == "accuracy" and each.value and not each.asked for each in verdicts)
    but = " Accuracies at other settings (Ku = 1) are shown and not judged." if shown else ""
    return (f"✗ marks a missed bar: {', or '.join(words)}.{but}",) if words else ()
