"""A table set beside the paper's: what every module under `paper` gives, as text, Markdown or HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from growprune.paper.results import Found
from growprune.paper.setting import Setting

Look = Callable[[Setting], Found]
"""From a setting to what was run of it."""


@dataclass(frozen=True)
class Row:
    """One line that can be run by itself: a label, its settings by column, and the paper's numbers."""

    name: str  # for --only
    label: str
    settings: tuple[Setting, ...]


@dataclass(frozen=True)
class Grid:
    """One table: a head and lines of cells; `remarks` say what one must know to read it."""

    title: str
    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper: its rows, and how what was run is set beside what was published."""

    name: str
    title: str
    rows: tuple[Row, ...]
    grids: Callable[[Look], list[Grid]]
    figures: Callable[[Look], dict[str, bytes]] = field(default=lambda look: {})

    def settings(self, only: Sequence[str] = ()) -> list[Setting]:
        """All there is to run, each once, in order."""
        chosen = [row for row in self.rows if not only or row.name in only]
        return list(dict.fromkeys(setting for row in chosen for setting in row.settings))


def markdown(grid: Grid) -> str:
    """
    >>> print(markdown(Grid("T", ("a", "b"), (("1", "2"),))))
    **T**
    <BLANKLINE>
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    lines = [f"**{grid.title}**", "", row_of(grid.head), row_of(["---"] * len(grid.head)), *map(row_of, grid.lines)]
    return "\n".join([*lines, *(f"\n{remark}" for remark in grid.remarks)])


def row_of(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def to_json(grid: Grid) -> dict[str, Any]:
    return {"title": grid.title, "head": grid.head, "lines": grid.lines, "remarks": grid.remarks}


def published(mean: float, spread: float | None = None) -> str:
    """
    >>> published(93.06, 0.09), published(93.18)
    ('93.06 ± 0.09', '93.18')
    """
    return f"{mean:.2f}" + ("" if spread is None else f" ± {spread:.2f}")


def gain(found: Found, other: Found) -> str:
    return f"{found.mean() - other.mean():+.2f}" if found and other else ""
