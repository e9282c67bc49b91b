"""Several runs beside each other: what sets them apart, what each came to, and pictures.

Those that differ in nothing but their seed are one row, where each seed counts once.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from growprune.config import AMOUNTS, PICKING
from growprune.finished import Ran
from growprune.report import ACCURACIES, Fitted, document, html_figure, html_table, mean
from growprune.report.chart import Panel, Point, chart
from growprune.report.run import METHODS, percent, signed

FIRST = ("model", "data", "command", "schedule", *AMOUNTS, "criterion", "granularity", "scope")
"""Options that say most of a run, in the order in which they are told."""
TOLD = ("model", "data", "schedule", *AMOUNTS)
"""Of these the default is told too."""
WORDS = {"model": "{}", "data": "{}", "ratios": "ratios {}", "speedup": "speed-up {}×", "weights": "from {}"}
"""How an option is told, where not by its name."""
MANY = 16
"""Lines beyond which a picture shows nothing any more."""
CAPTIONS = {
    "speedup": "Accuracy on the test images after the last epoch against how many times fewer MACs; where a row has "
    "several runs their mean, and their standard deviation as a bar.",
    "courses": "Accuracy on the test images through fine-tuning, the mean of a row's runs.",
}


@dataclass(frozen=True)
class Lot:
    """A row: runs that differ in nothing but their seed."""

    runs: list[Ran]
    label: str
    repeats: int = 0  # of a seed that is there already: not counted

    def values(self, which: Callable[[Mapping[str, Any]], float | None]) -> list[float]:
        found = (which(run.result) for run in self.runs)
        return [value for value in found if value is not None]

    def accuracies(self, key: str) -> list[float]:
        return self.values(lambda result: result["accuracy"].get(key))

    @property
    def speedups(self) -> list[float]:
        return self.values(lambda result: result.get("speedup"))

    @property
    def pruned(self) -> bool:
        return "schedule" in self.runs[0].options


def lots(runs: Iterable[Ran]) -> list[Lot]:
    """The rows, each named by what sets it apart from the others; network by network, way by way, as they come."""
    found: dict[str, list[Ran]] = {}
    for run in runs:
        found.setdefault(repr(sorted(run.options.items())), []).append(run)
    found = in_order(found)
    telling = apart([each[0] for each in found.values()])
    named = [said(each[0], telling) for each in found.values()]
    result = []
    for each, label in zip(found.values(), named, strict=True):
        own: dict[Any, Ran] = {}
        for run in each:
            own.setdefault(run.config.get("seed"), run)
        runs = [*own.values()]
        result.append(Lot(runs, label or ("as usual" if any(named) else runs[0].name), len(each) - len(runs)))
    return result


def in_order(found: Mapping[str, list[Ran]]) -> dict[str, list[Ran]]:
    """Rows by network and set, then by schedule, each as they come first; then by how much goes."""
    firsts = [each[0].options for each in found.values()]
    places = [[repr([o.get(key) for key in keys]) for o in firsts] for keys in (("model", "data"), ("schedule",))]

    def place(number: int, key: str) -> tuple[int, int, float]:
        return (*(known.index(known[number]) for known in places), found[key][0].result.get("speedup") or 0.0)  # type: ignore[return-value]

    keys = [key for _, key in sorted(enumerate(found), key=lambda each: place(*each))]
    return {key: found[key] for key in keys}


def apart(runs: Sequence[Ran], but: Sequence[str] = ()) -> list[str]:
    """The options in which these differ, what says most first. Others tell nothing by being absent (steps of pushing,
    say), nor by being another in a run of another command, or of another network or set."""
    every = [run.options for run in runs]
    keys = dict.fromkeys([*FIRST, *(key for options in every for key in options)])
    found: dict[str, dict[str, set[str]]] = {key: {} for key in keys if key not in but}
    for run, options in zip(runs, every, strict=True):
        kind = repr([options.get(key) for key in ("command", "model", "data")])
        for key in found:
            if key in FIRST:
                found[key].setdefault("", set()).add(repr(options.get(key)))
            elif key in options:
                found[key].setdefault(kind, set()).add(repr(options[key]))
            elif key in PICKING and options.get("schedule") == "greg1":  # beside GReg-2 its own are to be told
                found[key].setdefault(kind, set()).add(repr(run.usual.get(key)))
    return [key for key, values in found.items() if any(len(each) > 1 for each in values.values())]


def said(run: Ran, keys: Iterable[str]) -> str:
    """A run's options in words, of these; what is as usual is left out.

    >>> config = {"command": "prune", "schedule": "greg1", "speedup": 2.5, "scope": "path", "ku": 10, "coupled": True}
    >>> said(Ran("", config, {}), config)
    'GReg-1, speed-up 2.5×, scope path, coupled'
    """
    words, options, usual = [], run.options, run.usual
    for key in keys:
        value = options.get(key)
        if value is None or (key not in TOLD and value == usual.get(key)):
            continue
        if key == "schedule":
            words.append(METHODS.get(KIND.get(str(value), ""), str(value)))
        elif key == "command":
            words += ["trained"] * (value == "train")
        elif isinstance(value, bool):
            words.append(key.replace("_", " ") if value else f"no {key.replace('_', ' ')}")
        else:
            shown = f"{value:g}" if isinstance(value, float) else value
            words.append(WORDS.get(key, f"{key.replace('_', ' ')} {{}}").format(shown))
    return ", ".join(words)


KIND = {"greg1": "GReg1", "greg2": "GReg2", "oneshot": "OneShot"}


# -- the table -------------------------------------------------------------------------------------------------------


def rows(found: Sequence[Lot]) -> list[tuple[str, ...]]:
    """The table, its head first; columns in which nobody has anything are left out."""
    smaller = any(lot.runs[0].config.get("granularity") == "weight" for lot in found)
    head = ["", "fewer MACs", "weights gone or zero" if smaller else "parameters gone"]
    head += [*(ACCURACIES[key] for key in LAST), "against base", "best"]
    table = [head]
    for lot in found:
        macs = lot.speedups if lot.pruned else []
        gone = [100 * value for value in lot.values(lambda result: result.get("sparsity")) if lot.pruned]
        row = [lot.label, mean(same(macs), unit="×"), percent(statistics.mean(gone)) if gone else ""]
        base, final = lot.accuracies("base"), lot.accuracies("final")
        row += [mean(same(base)), *(mean(lot.accuracies(key)) for key in LAST[1:])]
        row.append(signed(statistics.mean(final) - statistics.mean(base), 2) if base and final else "")
        table.append([*row, mean(lot.accuracies("best"))])
    filled = [column for column in range(len(head)) if column == 0 or any(row[column] for row in table[1:])]
    return [tuple(row[column] for column in filled) for row in table]


LAST = ("base", "before_removal", "after_removal", "final")


def same(values: list[float]) -> list[float]:
    """What all runs of a row have in common is one number."""
    return values if len(set(values)) > 1 else values[:1]


def shared(found: Sequence[Lot]) -> str:
    """What all runs have in common, of what says most."""
    runs = [run for lot in found for run in lot.runs]
    alike = [key for key in FIRST if all(run.options.get(key) == runs[0].options.get(key) for run in runs)]
    pair = [str(runs[0].options[key]) for key in ("model", "data") if key in alike]
    return ", ".join(filter(None, [" on ".join(pair), said(runs[0], [key for key in alike if key not in TOLD[:2]])]))


def title(found: Sequence[Lot]) -> str:
    number = sum(len(lot.runs) for lot in found)
    common = shared(found)
    return f"{number} run{'s' * (number != 1)}" + (f": {common}" if common else "")


def remarks(found: Sequence[Lot]) -> list[str]:
    runs = [run for lot in found for run in lot.runs]
    told = ["Accuracy on the test images, in percent; 'best' is picked on those same images: compare the last epoch's."]
    if any(lot.runs[1:] for lot in found):
        told.append("±: the standard deviation over the runs of a row (divided by n); in brackets how many they are.")
    if repeats := sum(lot.repeats for lot in found):
        told.append(f"{repeats} of a seed that is there already, not counted: of each seed the first one given is.")
    if found[1:]:
        told.append("Options that a row does not name have their defaults, or are the same in all.")
    pruned = [run for run in runs if "schedule" in run.options]
    pushed = [run for run in pruned if run.options["schedule"] != "oneshot"]
    every = alike(pruned)
    for who, some, keys in (
        ("pruned", pruned, every),
        ("pushed", pushed, [k for k in alike(pushed) if k not in every]),
    ):
        if some and (common := said(some[0], keys)):
            told.append(f"All that were {who}: {common}.")
    places = sorted({(run.result.get("environment") or {}).get("device_name", "?") for run in runs})
    if len(places) > 1:
        told.append(f"The runs were made on different devices: {', '.join(places)}.")
    return told


def alike(runs: Sequence[Ran]) -> list[str]:
    """Options that all of them have, besides those that the title tells."""
    first = runs[0].options if runs else {}
    return [key for key in first if key not in FIRST and all(run.options.get(key, ...) == first[key] for run in runs)]


def table(found: Sequence[Lot]) -> RenderableType:
    """For a terminal."""
    return Group(Text(title(found), style="bold"), Fitted(rows(found)), *(Text(f"{line}\n") for line in remarks(found)))


def to_json(found: Sequence[Lot]) -> dict[str, Any]:
    """All of it, for other programs: the rows, and every run's own result."""
    return {
        "rows": [
            {
                "label": lot.label,
                "runs": [run.name for run in lot.runs],
                "speedup": statistics.mean(lot.speedups) if lot.speedups else None,
                "accuracy": {
                    key: {"mean": statistics.mean(values), "deviation": statistics.pstdev(values), "runs": values}
                    for key in ACCURACIES
                    if (values := lot.accuracies(key))
                },
            }
            for lot in found
        ],
        "runs": {run.name: {**run.result, "config": run.config} for lot in found for run in lot.runs},
    }


# -- pictures and the page -------------------------------------------------------------------------------------------


def figures(found: Sequence[Lot]) -> dict[str, bytes]:
    """Those that have something to show, as PNG."""
    from growprune.report.figures import courses

    drawn = {}
    if panels := [panel for panel in by_speedup(found) if len(panel.ours) <= MANY]:
        drawn["speedup"] = chart(panels)
    lines = {lot.label: averaged([run.course for run in lot.runs]) for lot in found}
    if 0 < len(lines := {label: line for label, line in lines.items() if len(line) > 1}) <= MANY:
        drawn["courses"] = courses(lines)
    return drawn


def by_speedup(found: Sequence[Lot]) -> list[Panel]:
    """A panel for each network and its images, a line for each way of pruning them at whatever ratio."""
    panels: dict[str, dict[str, list[Point]]] = {}
    fewer = [lot for lot in found if lot.accuracies("final") and lot.speedups and lot.speedups[0] > 1]
    telling = ["schedule", *apart([lot.runs[0] for lot in fewer], (*AMOUNTS, "model", "data", "schedule"))]
    for lot in fewer:
        options, final = lot.runs[0].options, lot.accuracies("final")
        spread = statistics.pstdev(final) if final[1:] else None
        point = (statistics.mean(lot.speedups), statistics.mean(final), spread)
        panel = panels.setdefault(f"{options['model']} on {options['data']}", {})
        panel.setdefault(said(lot.runs[0], telling), []).append(point)
    return [Panel(name, {}, {way: sorted(lines[way]) for way in lines}) for name, lines in panels.items()]


def averaged(courses: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """At the epochs' ends at which all were tested.

    >>> averaged([[(1.0, 80.0), (2.0, 90.0)], [(2.0, 92.0), (4.0, 94.0)]])
    [(2.0, 91.0)]
    """
    found = [dict(course) for course in courses]
    common = [epoch for epoch in found[0] if all(epoch in each for each in found)]
    return [(epoch, statistics.mean(each[epoch] for each in found)) for epoch in common]


def page(found: Sequence[Lot]) -> str:
    """One HTML file that needs no other."""
    parts = [html_table(rows(found), "runs"), *(f"<p>{html.escape(line)}</p>" for line in remarks(found))]
    parts += [html_figure(name, png, CAPTIONS[name]) for name, png in figures(found).items()]
    listed = [("row", "runs"), *((lot.label, ", ".join(run.name for run in lot.runs)) for lot in found)]
    parts += ["<h2>Which runs</h2>", html_table(listed, "facts")]
    return document(title(found), parts)
