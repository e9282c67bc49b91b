"""`growprune reproduce`: do the runs that a table needs and are not done yet, then set it beside the paper's.

The base networks come first; then every run, several at a time on a GPU. Each finished run is put on the shelf at once;
an interrupted one goes on where it was. The table can be made at any time from what is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from growprune.errors import GrowpruneError, nearest
from growprune.jobs import run, side_by_side, usable
from growprune.paper.grid import Experiment, Grid, markdown, to_json
from growprune.paper.results import Found, Shelf, fingerprint
from growprune.paper.setting import Base, Scale, Setting
from growprune.report import document, duration, html_figure, html_table
from growprune.storage import write_whole


@dataclass(frozen=True)
class Lab:
    """Where and how runs are done."""

    out: Path
    scale: Scale = "short"
    seeds: int = 1
    parallel: int = 1
    data_dir: str = "data"
    device: str = "auto"
    deterministic: bool = False
    say: Callable[[str], None] = print

    @property
    def shelf(self) -> Shelf:
        return Shelf(self.out, self.scale)

    def look(self, setting: Setting) -> Found:
        return self.shelf.found(setting, self.seeds)

    @property
    def options(self) -> dict[str, Any]:
        return {"data_dir": self.data_dir, "device": self.device, "deterministic": self.deterministic}


def wanted(lab: Lab, experiment: Experiment, only: Sequence[str]) -> list[tuple[Setting, int]]:
    """The runs that are missing; the first seed of all settings comes before the second of any."""
    known = [row.name for row in experiment.rows]
    for name in only:
        if name not in known:
            raise GrowpruneError(f"--only: {experiment.name} has no row '{name}'{nearest(name, known)}")
    settings = experiment.settings(only)
    return [(each, seed) for seed in range(lab.seeds) for each in settings if not lab.shelf.file(each, seed).exists()]


def reproduce(lab: Lab, experiment: Experiment, only: Sequence[str] = ()) -> None:
    """Do what is missing."""
    missing = wanted(lab, experiment, only)
    lab.say(forecast(lab, missing))
    bases: dict[Base, dict[str, Any]] = {}
    for setting, _ in missing:
        if setting.base not in bases:
            bases[setting.base] = trained(lab, setting)
    plans = []
    for setting, seed in missing:
        folder = lab.shelf.folder(setting, seed)
        plans.append((setting.config(lab.scale, seed, lab.shelf.base(setting).resolve(), **lab.options), folder))
    by_folder = {folder: pair for (_, folder), pair in zip(plans, missing, strict=True)}

    def shelve(folder: Path) -> None:
        setting, seed = by_folder[folder]
        lab.shelf.keep(setting, seed, bases[setting.base])

    if plans and usable(lab.device) == "cuda" and lab.parallel > 1:
        side_by_side(plans, lab.parallel, finished=shelve)
    else:
        for config, folder in plans:
            run(config, folder, label=folder.name)
            shelve(folder)


def trained(lab: Lab, setting: Setting) -> dict[str, Any]:
    """The base network, trained once for all runs; its hash and accuracy."""
    folder = lab.shelf.base(setting)
    result = run(setting.base.config(lab.scale, **lab.options), folder, label=folder.name)
    return {"name": setting.base.name, "sha256": fingerprint(folder), "accuracy": result["accuracy"]["final"]}


GUESS = {"cuda": {"resnet56": 3.0, "vgg19": 2.2}, "cpu": {"resnet56": 1500.0, "vgg19": 2000.0}}
"""Milliseconds a step where nothing was measured yet: one H200 with four runs at once; two CPU cores."""


def forecast(lab: Lab, missing: Sequence[tuple[Setting, int]]) -> str:
    """How many runs, and about how long: by finished runs of the same network on the same device, else a guess."""
    if not missing:
        return "nothing is missing"
    device = usable(lab.device)
    seconds = 0.0
    for setting, seed in missing:
        config = setting.config(lab.scale, seed, Path(), **lab.options)
        steps = length(setting, config)
        pace = 20.0 if lab.scale == "smoke" else GUESS[device][setting.base.model]
        past = [run for path in lab.out.glob(f"{setting.base.name.replace('-', '_')}-*.json") if (run := read(path))]
        same = [r["seconds"] / r["steps"] * 1e3 for r in past if r["environment"]["device"] == device and r["steps"]]
        pace = sorted(same)[len(same) // 2] / max(1, lab.parallel) if same else pace
        seconds += steps * pace / 1e3
    return f"{len(missing)} runs to do, about {duration(seconds)} on this device"


def length(setting: Setting, config: Any) -> int:
    """Steps of a run: of the schedule, and of fine-tuning on 50,000 images (digits: 1,200)."""
    from growprune.recipe import schedule

    images = 1200 if config.data == "digits" else 50_000
    return schedule(config).total_steps + int(config.epochs) * (images // int(config.batch))


def read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "steps" in found else None


# -- what comes of it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """An experiment as far as it was run."""

    experiment: Experiment
    grids: list[Grid]
    figures: dict[str, bytes]
    missing: int

    def markdown(self) -> str:
        left = f"\n\n{self.missing} runs are still missing." if self.missing else ""
        return "\n\n".join(markdown(grid) for grid in self.grids) + left + "\n"

    def to_json(self) -> dict[str, Any]:
        return {"name": self.experiment.name, "grids": [to_json(grid) for grid in self.grids], "missing": self.missing}

    def html(self) -> str:
        parts = []
        for grid in self.grids:
            parts += [f"<h2>{grid.title}</h2>", html_table([grid.head, *grid.lines])]
            parts += [f"<p>{remark}</p>" for remark in grid.remarks]
        parts += [html_figure(name, blob, name) for name, blob in self.figures.items()]
        return document(f"growprune: {self.experiment.title}", parts)


def compared(lab: Lab, experiment: Experiment) -> Comparison:
    """The comparison from what is on the shelf."""
    return Comparison(
        experiment, experiment.grids(lab.look), experiment.figures(lab.look), len(wanted(lab, experiment, ()))
    )


def publish(comparison: Comparison, place: Path) -> None:
    """Write the comparison as Markdown, JSON and a page, with its figures."""
    place.mkdir(parents=True, exist_ok=True)
    name = comparison.experiment.name
    write_whole(place / f"{name}.md", comparison.markdown().encode())
    write_whole(place / f"{name}.html", comparison.html().encode())
    write_whole(place / f"{name}.table.json", (json.dumps(comparison.to_json(), indent=1) + "\n").encode())
    for figure, blob in comparison.figures.items():
        write_whole(place / f"{figure}.png", blob)
