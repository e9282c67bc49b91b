"""A table set beside the paper's: what every module under `paper` gives, as text, Markdown or HTML."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from growprune.errors import GrowpruneError, nearest
from growprune.paper import bars
from growprune.paper.bars import Verdict
from growprune.paper.results import Found
from growprune.paper.setting import Setting
from growprune.report import minus
from growprune.report.chart import Panel, Point, chart

Look = Callable[[Setting], Found]
"""From a setting to what was run of it."""


FEW = 12
"""Rows that are all named where one is named that there is not."""


@dataclass(frozen=True)
class Row:
    """One line that can be run by itself, and its settings by column."""

    name: str  # for --only
    settings: tuple[Setting, ...]


@dataclass(frozen=True)
class Grid:
    """One table: a head and lines of cells, of `settings`; `remarks` say what one must know to read it."""

    title: str
    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper: its rows, and how what was run is set beside what was published."""

    name: str
    title: str
    rows: tuple[Row, ...]
    grids: Callable[[Look], list[Grid]]
    figures: Callable[[Look], dict[str, bytes]] = field(default=lambda look: {})
    verdicts: Callable[[Look], list[Verdict]] = field(default=lambda look: [])
    seeds: int = 1  # runs of each setting without which it is not whole

    def settings(self, only: Sequence[str] = ()) -> list[Setting]:
        """All there is to run, each once, in order; `only` of these rows."""
        known = [row.name for row in self.rows]
        for name in only:
            if name not in known:
                hint, there = nearest(name, known), f"there are {', '.join(known)}"
                listed = (f" ({there})" if hint else f"; {there}") if not hint or len(known) <= FEW else ""
                raise GrowpruneError(f"--only: {self.name} has no row '{name}'{hint}{listed}")
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
    title = [f"**{grid.title}**", ""] if grid.title else []
    lines = [*title, row_of(grid.head), row_of(["---"] * len(grid.head)), *map(row_of, grid.lines)]
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
    here = bars.difference(other, found)
    return "" if here is None else minus(f"{here:+.2f}")


def drop(start: float | None, end: float) -> str:
    return "" if start is None else minus(f"{start - end:.2f}")


def best(found: Found) -> str:
    return found.text("best") if found else ""


def here(name: str, found: Found, last: str) -> list[tuple[str, ...]]:
    """Lines of a table of methods: base, pruned, drop, and what the last column holds."""
    if not found:
        return [(f"{name}, here", "", "not run", "", "")]
    start = found.mean("base")
    return [
        (f"{name}, here: last epoch", f"{start:.2f}", found.text(), drop(start, found.mean()), last),
        (f"{name}, here: best epoch on the test set", "", found.text("best"), "", ""),
    ]


# -- one-shot against GReg-1 -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Versus:
    """A column in which the same filters go at once and by GReg-1: the settings of both, and the paper's numbers."""

    name: str  # of its row for --only
    ratio: float
    settings: tuple[Setting, Setting]
    speedup: float
    once: tuple[float, float]  # mean and deviation
    greg: tuple[float, float]
    sparsity: float | None = None  # parameters gone, in percent, if the paper says it
    alike: bool = True  # the paper's networks have the very widths of ours

    @property
    def gain(self) -> float:
        return round(self.greg[0] - self.once[0], 2)

    def near(self, look: Look) -> tuple[Verdict, Verdict]:
        once, greg = map(look, self.settings)
        return (
            bars.accuracy(f"{self.name} one-shot", once, self.once[0]),
            bars.accuracy(f"{self.name} GReg-1", greg, self.greg[0]),
        )

    def share(self, look: Look) -> Verdict:
        once, greg = map(look, self.settings)
        return bars.gain(self.name, once, greg, self.gain)

    def verdicts(self, look: Look) -> list[Verdict]:
        """Of the bars that are meant for this column."""
        near, share = self.near(look), self.share(look)
        return [*(near if self.alike else ()), *([share] if self.ratio >= bars.FROM else [])]


def versus(title: str, corner: str, columns: Sequence[Versus], look: Look, remarks: tuple[str, ...] = ()) -> Grid:
    """The table that table 1 and OBD's have in common: a column a ratio."""
    found = [tuple(map(look, column.settings)) for column in columns]
    held = [column.verdicts(look) for column in columns]
    near, shares = [column.near(look) for column in columns], [column.share(look) for column in columns]

    def shown(verdicts: Iterable[Verdict], everywhere: bool = True) -> Iterator[str]:
        """With a mark only where the bar is meant; a share of next to nothing says nothing, and is shown only there."""
        for each, bar in zip(verdicts, held, strict=True):
            yield each.text if each in bar else minus(each.value) if everywhere else ""

    same = [same_filters(*pair) for pair in found]
    theirs = [f"{column.sparsity:.2f} %" for column in columns if column.sparsity is not None]
    gone = (("parameters gone, paper", *theirs), ("parameters gone, here", *(sparsity(*pair) for pair in found)))
    lines = (
        *(gone if theirs else ()),
        ("speed-up, paper", *(f"{column.speedup:.2f}×" for column in columns)),
        ("speed-up, here", *(speedup(*pair) for pair in found)),
        ("one-shot, paper", *(published(*column.once) for column in columns)),
        ("one-shot, here: last epoch", *(once.text() for once, _ in found)),
        ("GReg-1, paper", *(published(*column.greg) for column in columns)),
        ("GReg-1, here: last epoch", *(greg.text() for _, greg in found)),
        ("one-shot, here: best epoch on the test set", *(best(once) for once, _ in found)),
        ("GReg-1, here: best epoch on the test set", *(best(greg) for _, greg in found)),
        ("one-shot − paper", *shown(once for once, _ in near)),
        ("GReg-1 − paper", *shown(greg for _, greg in near)),
        ("gain, paper", *(minus(f"{column.gain:+.2f}") for column in columns)),
        ("gain, here", *(gain(greg, once) for once, greg in found)),
        ("gain here / gain paper", *shown(shares, everywhere=False)),
        ("the same filters removed", *same),
    )
    said = (*remarks, *bars.marked(each for column in held for each in column), *warned(same))
    head = (corner, *(f"{column.ratio:g}" for column in columns))
    return Grid(title, head, lines, said, tuple(setting for column in columns for setting in column.settings))


def contest(name: str, title: str, columns: Sequence[Versus], grids: Callable[[Look], list[Grid]]) -> Experiment:
    """An experiment whose rows are such columns."""
    return Experiment(
        name,
        title,
        tuple(Row(column.name, column.settings) for column in columns),
        grids,
        figures=lambda look: drawn(name, columns, look),
        verdicts=lambda look: [each for column in columns for each in column.verdicts(look)],
    )


def drawn(name: str, columns: Sequence[Versus], look: Look) -> dict[str, bytes]:
    """Accuracy against speed-up, a panel a network; nothing where nothing was run."""
    panels = []
    for base in dict.fromkeys(column.settings[0].base for column in columns):
        own = [column for column in columns if column.settings[0].base == base]
        once, greg = ([look(column.settings[which]) for column in own] for which in (0, 1))
        if not any((*once, *greg)):
            continue
        scale, title = greg[0].scale, f"{base.model} on {base.data}"
        shorter = " (Ku = 1)" if scale == "short" else ""
        theirs = {
            "GReg-1, paper": [(column.speedup, *column.greg) for column in own],
            "one-shot, paper": [(column.speedup, *column.once) for column in own],
        }
        if scale == "smoke":  # nothing that the paper's could be set beside
            title, theirs = f"smoke run: a small network on digits, for {base.model}", {}
        ours = {f"GReg-1, here{shorter}": [*map(point, greg)], "one-shot, here": [*map(point, once)]}
        panels.append(Panel(title, theirs, ours))
    return {name: chart(panels)} if panels else {}


def point(found: Found) -> Point | None:
    """Where its runs lie; a single one has no deviation."""
    return (mean_speedup(found), found.mean(), found.spread() if len(found.runs) > 1 else None) if found else None


def mean_speedup(*found: Found) -> float:
    """Over the seeds: a global ratio leaves the layers' widths to the criterion."""
    return statistics.mean(float(run["speedup"]) for each in found for run in each.runs)


def speedup(*found: Found) -> str:
    return f"{mean_speedup(*found):.2f}×" if any(found) else ""


def sparsity(*found: Found) -> str:
    values = [run["sparsity"] for each in found for run in each.runs]
    return f"{100 * sum(values) / len(values):.2f} %" if values else ""


def same_filters(one: Found, other: Found) -> str:
    """Whether both took the same filters from the same base network, seed by seed.

    >>> runs = ({"config": {"seed": 0}, "base": {"sha256": "f"}, "gone": gone} for gone in ("1", "2"))
    >>> a, b = (Found((run,)) for run in runs)
    >>> same_filters(a, a), same_filters(a, b), same_filters(a, Found(()))
    ('yes', 'NO', '')
    """
    pairs = [(a, b) for a in one.runs for b in other.runs if a["config"]["seed"] == b["config"]["seed"]]
    if any(a["base"]["sha256"] != b["base"]["sha256"] for a, b in pairs):
        return "NO: other base"
    if not all(a.get("gone") and b.get("gone") for a, b in pairs):
        return "not known"
    return ("yes" if all(a["gone"] == b["gone"] for a, b in pairs) else "NO") if pairs else ""


def warned(same: Sequence[str]) -> tuple[str, ...]:
    if not any(each.startswith("NO") for each in same):
        return ()
    return ("Warning: where it says NO the two methods did not remove the same filters: no fair comparison.",)
