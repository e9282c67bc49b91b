"""Ours, not the paper's: what moves the accuracy at ResNet56's ratio 0.9, when it is not the paper's.

The authors' published commands use a batch of 128 and Ks = 10k where the paper says 256 and 5k; they scale images by
ImageNet's mean and deviation; they compute in float32.
"""

from __future__ import annotations

from growprune.paper.grid import Experiment, Grid, Look, Row, gain
from growprune.paper.setting import RESNET56, Setting
from growprune.paper.table1 import ratios

RATIO = 0.9
WAYS: dict[str, tuple[tuple[str, int | float | str], ...]] = {
    "as the paper says": (),
    "batch 128, as in the authors' commands": (("batch", 128), ("prune_batch", 128)),
    "Ks = 10k, as in the authors' commands": (("ks", 10_000),),
    "ImageNet's mean and deviation": (("normalize", "imagenet"),),
    "float32": (("precision", "fp32"),),
}
NAMES = ("paper", "batch", "ks", "normalize", "fp32")


def pair(other: tuple[tuple[str, int | float | str], ...]) -> tuple[Setting, Setting]:
    """One-shot has no Ks."""
    plain = tuple((name, value) for name, value in other if name != "ks")
    written = ratios(RESNET56, RATIO)
    return Setting(RESNET56, "oneshot", written, other=plain), Setting(RESNET56, "greg1", written, other=other)


def grids(look: Look) -> list[Grid]:
    lines = []
    for name, other in WAYS.items():
        once, greg = (look(setting) for setting in pair(other))
        lines.append((name, once.text(), greg.text(), gain(greg, once)))
    head = ("", "one-shot", "GReg-1", "gain")
    return [Grid(f"Causes: resnet56 on cifar10, ratio {RATIO}", head, tuple(lines))]


EXPERIMENT = Experiment(
    "causes",
    "what moves the accuracy at ratio 0.9",
    tuple(Row(name, label, pair(other)) for name, (label, other) in zip(NAMES, WAYS.items(), strict=True)),
    grids,
)
