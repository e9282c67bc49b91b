"""The paper's tables and figures: one module each, with the runs it needs, the paper's numbers and the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from growprune.errors import GrowpruneError, nearest
from growprune.paper.grid import Experiment

OF_IMAGES = ("table3", "table4")
"""What is of ImageNet, or of what `--images` gives."""
NAMES = ("table1", "table2", "table3", "table4", "obd", "random", "ku", "figure1", "scopes", "causes")


def find(name: str, images: str = "data/imagenet") -> Experiment:
    """The experiment of that name; `images` is where ImageNet lies, or what stands for it."""
    if name not in NAMES:
        raise GrowpruneError(f"reproduce: no '{name}'{nearest(name, NAMES) or '; there are ' + ', '.join(NAMES)}")
    module = import_module(f"growprune.paper.{name}")
    found: Experiment = module.experiment(images) if hasattr(module, "experiment") else module.EXPERIMENT
    return found


def wanted(names: Sequence[str], images: str, rows: str | None) -> tuple[list[Experiment], list[str]]:
    """The experiments of these names, each once, and the rows that are asked for; refused if there are none such."""
    experiments = {name: find(name, images) for name in names}
    only = [row.strip() for row in (rows or "").split(",") if row.strip()]
    if rows is not None and not only:
        raise GrowpruneError("--only: names no row")
    if only and len(experiments) > 1:
        raise GrowpruneError(f"--only: the rows of one table; {', '.join(experiments)} are {len(experiments)}")
    for experiment in experiments.values():
        experiment.settings(only)
    return [*experiments.values()], only
