"""What table 3 costs on ImageNet: steps that were measured, times the paper's schedule.

A row's pruning is steps of the whole network at batch 64, the same for all rows of a network; its fine-tuning is 90
epochs of the smaller one at batch 256. `benchmarks/imagenet.py` measures them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from growprune.paper import imagenet
from growprune.paper.grid import Grid
from growprune.paper.table3 import LEVELS, Level, settings
from growprune.recipe import schedule

Kind = Literal["push", "tune"]
FIRST = {level.network: f"{level.network}-{level.speedup}" for level in reversed(LEVELS)}
STEPS: tuple[tuple[Kind, str], ...] = (
    *(("push", name) for name in FIRST.values()),
    *(("tune", f"{level.network}-{level.speedup}") for level in LEVELS),
)
"""The steps that rows are made of, by kind and row."""
EIGHTHS: tuple[tuple[Kind, str], ...] = (("push", FIRST["resnet50"]), ("tune", "resnet50-3.06"))
"""Those that are also measured at an eighth of the batch."""
GPUS = 8


def cost(steps: Mapping[str, Mapping[str, Any]], loader: Mapping[str, Any]) -> Grid:
    """Hours of GReg-1 by row; `steps` and `loader` are what benchmarks/imagenet.py and `growprune bench` measured."""
    share = {kind: slower(steps, kind, name) for kind, name in EIGHTHS}
    cores, decoded = loader["workers"], float(loader["cpu"]["fed"])
    plan = settings(LEVELS[0], "imagenet")["GReg-1"].config("paper", 0, Path())  # as long as any other row's
    number: dict[Kind, int] = {
        "push": schedule(plan).total_steps,
        "tune": int(plan.epochs * (imagenet.IMAGES // plan.batch)),
    }
    waited = {
        "push": number["push"] * plan.prune_batch / decoded,
        "tune": number["tune"] * plan.batch / decoded,
    }  # for images, if nothing else took time
    lines = []
    for level in LEVELS:
        took = {kind: number[kind] * milliseconds(steps, kind, level) / 1e3 for kind in number}
        fed = sum(max(took[kind], waited[kind]) for kind in took)
        eight = sum(took[kind] * share[kind] for kind in took) / GPUS
        times = (took["push"], took["tune"], sum(took.values()), fed, eight)
        lines.append((f"{level.network} {level.speedup:.2f}×", *map(hours, times)))
    head = (
        "", f"pruning, {number['push']:,} steps", f"fine-tuning, {number['tune']:,} steps", "both, one H200",
        f"the same, fed by {cores} cores", f"{GPUS} H200, estimated",
    )  # fmt: skip
    pushed, tuned = (f"{100 * each / GPUS:.0f} %" for each in share.values())
    remark = (
        f"Estimated: an eighth of the batch takes {pushed} of the whole batch's time while filters are pushed and "
        f"{tuned} in fine-tuning (ResNet50, measured on one GPU), gradients are exchanged meanwhile, images come as "
        "fast as they are taken."
    )
    return Grid("GReg-1 on ImageNet, hours", head, tuple(lines), (remark,))


def label(kind: Kind, row: str, share: int = 1) -> str:
    """A step's name among those measured."""
    return f"{kind} {row}" + (f" / {share}" if share > 1 else "")


def milliseconds(steps: Mapping[str, Mapping[str, Any]], kind: Kind, level: Level) -> float:
    row = FIRST[level.network] if kind == "push" else f"{level.network}-{level.speedup}"
    return float(steps[label(kind, row)]["ms"])


def slower(steps: Mapping[str, Mapping[str, Any]], kind: Kind, row: str) -> float:
    """How much longer an eighth of a batch takes than an eighth of the time."""
    return GPUS * float(steps[label(kind, row, GPUS)]["ms"]) / float(steps[label(kind, row)]["ms"])


def hours(seconds: float) -> str:
    """
    >>> hours(5400), hours(100_000)
    ('1.5', '28')
    """
    return f"{seconds / 3600:.1f}" if seconds < 36_000 else f"{seconds / 3600:.0f}"
