"""What came of an experiment, as far as it was run, set beside the paper: text, Markdown, JSON, and a page.

Files hold all of it; a terminal shows the tables of the rows that were asked for.
"""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from growprune.cifar import KINDS as CIFARS
from growprune.paper.bars import BARS, Verdict
from growprune.paper.grid import FEW, Experiment, Grid, markdown, to_json
from growprune.paper.lab import Lab
from growprune.paper.reproduce import missing
from growprune.paper.results import Found, base_facts
from growprune.paper.setting import Base, Scale, Setting, called
from growprune.report import Fitted, document, duration, html_figure, html_table, minus
from growprune.storage import write_whole

SMOKE = "Smoke run of small networks on digits, not the paper's: "
"""What every title at that scale begins with."""


def words(experiment: Experiment, scale: Scale) -> str:
    """How what was run stands to the paper's settings."""
    settings = experiment.settings()
    if scale == "smoke":
        said = "Small networks on small images: this shows that all works, and nothing else."
        scaled = "A batch or Ks that a row names is in proportion; grey images are not scaled by ImageNet's mean."
        return f"{said} {scaled}" if any(setting.other for setting in settings) else said
    changed: dict[str, None] = {}
    for setting in settings:
        if setting.schedule == "oneshot":
            continue
        here, paper = (setting.config(each, 0, Path()) for each in (scale, "paper"))
        changed |= {f"Ku = {here.ku}": None} if here.ku != paper.ku else {}
        changed |= {f"Ks = {here.ks:,} instead of {paper.ks:,}": None} if here.ks != paper.ks else {}
    said = f"{' and '.join(changed)}, everything else as the paper" if changed else "The paper's settings"
    named = any(setting.ku or setting.other or setting.base.mark or setting.scope != "filter" for setting in settings)
    return f"{said}{', apart from what each row names' if named else ''}."


@dataclass(frozen=True)
class Comparison:
    """An experiment as far as it was run at one scale; `missing` has the rows of which runs are not there, and in words
    which, `unasked` those that nobody asked for this time; `unread` says what is wrong with files that are none of its
    runs'; `runs` holds figures as numbers."""

    experiment: Experiment
    scale: Scale
    grids: list[Grid]
    figures: dict[str, bytes]
    missing: dict[str, str]
    unasked: list[str] = field(default_factory=list)
    runs: dict[str, list[dict[str, float | str]]] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def of(self, only: Sequence[str]) -> Comparison:
        """The part that these rows belong to; of all rows if none is named."""
        if not only:
            return self
        asked = set(self.experiment.settings(only))
        names = {setting.key(self.scale, 0).rpartition("-")[0] for setting in asked}
        return replace(
            self,
            runs={name: runs for name, runs in self.runs.items() if name in names},
            grids=[grid for grid in self.grids if not grid.settings or asked.intersection(grid.settings)],
            missing={row: words for row, words in self.missing.items() if row in only},
            unasked=[row for row in self.missing if row not in only],
        )

    @property
    def prefix(self) -> str:
        """Of every title: nobody must take small networks on digits for the paper's."""
        return SMOKE if self.scale == "smoke" else ""

    @property
    def file_name(self) -> str:
        """Without its ending. Tables of a folder of images have that one's name: two folders' lie side by side."""
        data = sorted({setting.base.data for setting in self.experiment.settings()} - {*CIFARS})
        folders = [] if self.scale == "smoke" else [called(each) for each in data]
        return "-".join([self.experiment.name, *folders, self.scale])

    @property
    def remarks(self) -> list[str]:
        made = made_on(str(run["made_on"]) for runs in self.runs.values() for run in runs)
        said = [words(self.experiment, self.scale), *self.notes, *made]
        said += [f"Not read: {damage}." for damage in self.unread]
        if self.missing:
            said.append(f"Not all of it was run; missing: {', '.join(self.missing.values())}.")
        if self.unasked:
            rows = ", ".join(self.unasked) if len(self.unasked) <= FEW else f"{len(self.unasked)} rows"
            said.append(f"Not asked for, and not all run: {rows}.")
        return said

    def shown(self) -> RenderableType:
        """For a terminal."""
        parts: list[RenderableType] = []
        for grid in self.grids:
            parts += [Text(grid.title, style="bold"), Fitted([grid.head, *grid.lines])]
            parts += [Text(f"{remark}\n") for remark in grid.remarks]
        return Group(*parts, *map(Text, self.remarks))

    def markdown(self) -> str:
        return "\n\n".join([*(markdown(grid) for grid in self.grids), *self.remarks]) + "\n"

    def to_json(self) -> dict[str, Any]:
        grids = [to_json(grid) for grid in self.grids]
        left = {"missing": list(self.missing), "unasked": self.unasked, "unread": self.unread}
        held = [asdict(verdict) for verdict in self.verdicts]
        here = {"name": self.experiment.name, "scale": self.scale}
        return {**here, "grids": grids, **left, "runs": self.runs, "verdicts": held}

    def html(self) -> str:
        parts = []
        for grid in self.grids:
            parts += [f"<h2>{html.escape(grid.title)}</h2>", html_table([grid.head, *grid.lines])]
            parts += [f"<p>{html.escape(remark)}</p>" for remark in grid.remarks]
        parts += [html_figure(name, blob, f"{self.prefix}{name}") for name, blob in self.figures.items()]
        parts += [f"<p>{html.escape(remark)}</p>" for remark in self.remarks]
        return document(f"growprune: {self.prefix}{self.experiment.title}, {self.scale} scale", parts)


def compared(lab: Lab, experiment: Experiment) -> Comparison:
    """The comparison from what is on the shelf."""
    runs = {setting: lab.look(setting) for setting in experiment.settings()}
    shown = {setting.key(lab.scale, 0).rpartition("-")[0]: each for setting, each in runs.items() if each}
    grids = experiment.grids(lab.look)
    found = Comparison(
        experiment, lab.scale, grids, experiment.figures(lab.look), lacking(lab, experiment),
        runs={name: [numbers(run) for run in each.runs] for name, each in shown.items()},
        verdicts=experiment.verdicts(lab.look),
        notes=(*reading_aids(shown, grids), *beginnings(runs)),
        unread=tuple(lab.shelf.damaged(runs)),
    )  # fmt: skip
    return replace(found, grids=[replace(grid, title=f"{found.prefix}{grid.title}") for grid in grids])


def lacking(lab: Lab, experiment: Experiment) -> dict[str, str]:
    """The rows that are not whole; of those begun, what they lack."""
    seeds = lab.seeds or experiment.seeds
    undone: dict[Setting, list[int]] = {}
    for setting, seed in missing(lab, experiment):
        undone.setdefault(setting, []).append(seed)
    rows = {}
    for row in experiment.rows:
        todo = {setting: undone[setting] for setting in row.settings if setting in undone}
        if not todo:
            continue
        begun = sum(map(len, todo.values())) < seeds * len(row.settings)
        parts = [
            setting.schedule
            + (f" {setting.scope}" if setting.scope != "filter" else "")
            + (f" seed {', '.join(map(str, each))}" if len(each) < seeds else "")
            for setting, each in todo.items()
        ]
        rows[row.name] = f"{row.name} ({'; '.join(parts)})" if begun else row.name
    return rows


def numbers(run: Mapping[str, Any]) -> dict[str, float | str]:
    """What a program may want to compute with, accuracies in percent; and on what it was made."""
    accuracy = {key: run["accuracy"][key] for key in ("base", "before_removal", "after_removal", "best")}
    costs = {key: run[key] for key in ("speedup", "sparsity")}
    return {
        "seed": run["config"]["seed"],
        "last": run["accuracy"]["final"],
        **accuracy,
        **costs,
        "made_on": place(run),
    }


def reading_aids(runs: Mapping[str, Found], grids: Sequence[Grid]) -> tuple[str, ...]:
    """What one must know to read means and differences of these."""
    said = []
    if any(len(found.runs) > 1 for found in runs.values()):
        said.append("± is the deviation over so many runs as stand in brackets.")
    words = [word for grid in grids for word in (*grid.head, *(line[0] for line in grid.lines), *grid.remarks)]
    differ = any("gain" in word or "− one-shot" in word or "− GReg-1" in word for word in words)
    if differ and len({found.luck for found in runs.values()}) > 1:
        said.append("Differences between methods are over the seeds that both have, from the same base network.")
    if mixed := [name for name, found in runs.items() if len(found.precisions) > 1]:
        said.append(f"Means over runs of different precision: {', '.join(mixed)}.")
    return tuple(said)


def beginnings(runs: Mapping[Setting, Found]) -> list[str]:
    """Which base networks they began from, where those of one name are several: one was lost, and another trained."""
    there: dict[str, Counter[str]] = {}
    for setting, found in runs.items():
        hashes = (f"{run['base']['sha256'][:16]} ({run['base']['accuracy']:.2f} %)" for run in found.runs)
        there.setdefault(setting.base.name, Counter()).update(hashes)
    return [
        f"Runs of {name} began from {len(each)} base networks: "
        + ", ".join(f"{count} from {which}" for which, count in each.most_common())
        + "."
        for name, each in there.items()
        if len(each) > 1
    ]


def place(run: Mapping[str, Any]) -> str:
    """
    >>> place({"environment": {"device_name": "NVIDIA H200", "torch": "2.11.0", "world": 8}})
    '8 × NVIDIA H200, torch 2.11.0, growprune not known'
    """
    there = run["environment"]
    device, torch, own = (there.get(key, "not known") for key in ("device_name", "torch", "growprune"))
    several = f"{there['world']} × " if there.get("world", 1) > 1 else ""
    return f"{several}{device}, torch {torch}, growprune {own}"


def made_on(places: Iterable[str]) -> list[str]:
    """On what devices, with which versions, the most frequent first; nothing of no runs.

    >>> made_on(["NVIDIA H200, torch 2.11.0", "x86_64, torch 2.14.1", "x86_64, torch 2.14.1"])
    ['2 runs on x86_64, torch 2.14.1; 1 run on NVIDIA H200, torch 2.11.0.']
    """
    each = [f"{count} run{'s' * (count > 1)} on {where}" for where, count in Counter(places).most_common()]
    return [f"{'; '.join(each)}."] if each else []


def publish(comparison: Comparison, place: Path) -> Path:
    """Write the comparison as Markdown, JSON and a page, with its figures; gives the page."""
    place.mkdir(parents=True, exist_ok=True)
    stem = comparison.file_name
    write_whole(place / f"{stem}.md", comparison.markdown().encode())
    write_whole(place / f"{stem}.json", (json.dumps(comparison.to_json(), indent=1) + "\n").encode())
    for figure, blob in comparison.figures.items():
        write_whole(place / f"{figure}-{comparison.scale}.png", blob)  # smoke must not take the place of paper
    write_whole(page := place / f"{stem}.html", comparison.html().encode())
    return page


# -- over all experiments --------------------------------------------------------------------------------------------


def bars_met(lab: Lab, experiments: Sequence[Experiment]) -> Grid:
    """How often each bar was met, and where it was missed."""
    lines, missed = [], []
    verdicts = [(each.name, verdict) for each in experiments for verdict in each.verdicts(lab.look)]
    for bar, (words, _) in BARS.items():
        asked = [(name, verdict) for name, verdict in verdicts if verdict.bar == bar and verdict.asked]
        counts = [sum(verdict.met is state for _, verdict in asked) for state in (True, False, None)]
        lines.append((words, str(len(asked)), *map(str, counts)))
        missed += [
            f"{name} {verdict.row} ({bar}: {minus(verdict.value)})" for name, verdict in asked if verdict.met is False
        ]
    remarks = (f"Missed: {'; '.join(missed)}.",) if missed else ()
    return Grid(f"Bars, {lab.scale} scale", ("bar", "asked of", "met", "missed", "not run"), tuple(lines), remarks)


def done_so_far(lab: Lab, experiments: Sequence[Experiment]) -> Grid:
    """What was run of each, and how it stands to the bars."""
    lines = []
    for each in experiments:
        wanted, undone = len(each.settings()) * (lab.seeds or each.seeds), len(missing(lab, each))
        met = [verdict.met for verdict in each.verdicts(lab.look)]
        stand = f"{met.count(True)} met, {met.count(False)} missed" if met else "none"
        lines.append((each.name, each.title, f"{wanted - undone} of {wanted}", stand))
    return Grid(f"Runs, {lab.scale} scale", ("name", "what", "runs done", "bars"), tuple(lines))


def bases_trained(lab: Lab, bases: Sequence[Base]) -> Grid:
    """The base networks that all runs began from."""
    lines = []
    for base in bases:
        about = lab.shelf.about(base)
        if not about.exists():
            lines.append((base.name, f"{base.accuracy:.2f} %", "not run", "", "", ""))
            continue
        facts = base_facts(about)
        how = f"{facts['config']['epochs']} epochs, {facts['config']['lr']}, batch {facts['config']['batch']}"
        where = f"{duration(facts['seconds'])} on {facts['environment']['device_name']}"
        accuracy = f"{facts['accuracy']:.2f} %"
        lines.append((base.name, f"{base.accuracy:.2f} %", accuracy, how, where, facts["sha256"][:16]))
    return Grid("Base networks", ("network", "paper", "here", "how", "time", "SHA-256"), tuple(lines))
