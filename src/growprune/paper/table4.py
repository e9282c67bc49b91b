"""Table 4: compression on ImageNet, single weights of ResNet50 at 82.7 %; one-shot pruning is ours to compare."""

from __future__ import annotations

from growprune.paper import bars, imagenet
from growprune.paper.bars import Verdict
from growprune.paper.grid import Experiment, Grid, Look, Row, drop, here
from growprune.paper.setting import Setting
from growprune.paper.table3 import WAYS, above, beside

RATIO = "0.827"
"""Of every convolution and the classifier, but not of the stem: 82.67 % of all weights."""
OTHERS = (
    ("GSM", 75.72, 74.30, 80.00),
    ("Variational Dropout", 76.69, 75.28, 80.00),
    ("DPF", 75.95, 74.55, 82.60),
    ("WoodFisher", 75.98, 75.20, 82.70),
    ("GReg-1, paper", 76.13, 75.45, 82.70),
    ("GReg-2, paper", 76.13, 75.27, 82.70),
)


def settings(images: str) -> dict[str, Setting]:
    base = imagenet.base("resnet50", images)
    return {name: Setting(base, schedule, RATIO, granularity="weight") for name, schedule in WAYS.items()}


def grids(images: str, look: Look) -> list[Grid]:
    lines: list[tuple[str, ...]] = [
        (name, f"{start:.2f}", f"{end:.2f}", drop(start, end), f"{gone:.2f} %") for name, start, end, gone in OTHERS
    ]
    ways = settings(images)
    for name, setting in ways.items():
        found = look(setting)
        lines += here(name, found, f"{100 * found.runs[0]['sparsity']:.2f} %" if found else "")
    title = f"Table 4: single weights of resnet50; {imagenet.title(map(look, ways.values()))}"
    head = ("method", "base", "pruned", "drop", "sparsity")
    return [Grid(title, head, tuple(lines), beside(above("resnet50", ways, look)), tuple(ways.values()))]


def verdicts(images: str, look: Look) -> list[Verdict]:
    ways, paper = settings(images), {name: end for name, _, end, _ in OTHERS}
    near = [
        bars.accuracy(name, look(ways[name]), paper[f"{name}, paper"])
        for name in ("GReg-1", "GReg-2")
        if imagenet.on_imagenet(ways[name], look(ways[name]))
    ]
    return [*above("resnet50", ways, look), *near]


def experiment(images: str) -> Experiment:
    return Experiment(
        "table4",
        "compression on ImageNet: single weights",
        tuple(Row(setting.schedule, (setting,)) for setting in settings(images).values()),
        lambda look: grids(images, look),
        verdicts=lambda look: verdicts(images, look),
    )
