"""Ours, not the paper's: what moves the accuracy of ResNet56 at high ratios, when it is not the paper's.

The authors' published commands use a batch of 128 and Ks = 10k where the paper says 256 and 5k; they scale images by
ImageNet's mean and deviation and begin from a network trained in steps; they compute in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from growprune.paper.grid import Experiment, Grid, Look, Row, gain, published
from growprune.paper.setting import RESNET56, Base, Recipe, Setting
from growprune.paper.table1 import PAPER, ratios

RATIOS = (0.9, 0.925, 0.95)
THEIRS = Recipe(
    ku=10,
    short_ks=5000,
    train={"normalize": "imagenet", "batch": 128, "lr": "0:0.1,100:0.01,150:0.001", "warm_up": 0.0},
    prune={"normalize": "imagenet"},
)
AUTHORS = replace(RESNET56, epochs=200, recipe=THEIRS, mark="authors")
HALF = (("batch", 128), ("prune_batch", 128))


@dataclass(frozen=True)
class Way:
    """How a pair of runs differs from the paper's words."""

    name: str
    label: str
    other: tuple[tuple[str, int | float | str], ...] = ()
    base: Base = RESNET56


WAYS = (
    Way("paper", "as the paper says"),
    Way("batch", "batch 128, as in the authors' commands", HALF),
    Way("ks", "Ks = 10k, as in the authors' commands", (("ks", 10_000),)),
    Way("fp32", "float32", (("precision", "fp32"),)),
    Way("base", "the authors' base network and normalisation", base=AUTHORS),
    Way("authors", "all of the authors': batch, Ks, base network and normalisation", (*HALF, ("ks", 10_000)), AUTHORS),
)


def pair(way: Way, ratio: float) -> tuple[Setting, Setting]:
    """One-shot has no Ks."""
    plain = tuple((name, value) for name, value in way.other if name != "ks")
    written = ratios(RESNET56, ratio)
    return Setting(way.base, "oneshot", written, other=plain), Setting(way.base, "greg1", written, other=way.other)


def grid(ratio: float, look: Look) -> Grid:
    _, *theirs = PAPER[RESNET56][ratio]
    more = f"{theirs[1][0] - theirs[0][0]:+.2f}"
    lines = [("published", f"{RESNET56.accuracy:.2f}", *(published(*each) for each in theirs), more)]
    for way in WAYS:
        once, greg = (look(setting) for setting in pair(way, ratio))
        start = f"{(greg or once).mean('base'):.2f}" if greg or once else ""
        lines.append((way.label, start, once.text(), greg.text(), gain(greg, once)))
    head = ("", "base", "one-shot", "GReg-1", "gain")
    settings = tuple(setting for way in WAYS for setting in pair(way, ratio))
    return Grid(f"Causes: resnet56 on cifar10, ratio {ratio}", head, tuple(lines), settings=settings)


EXPERIMENT = Experiment(
    "causes",
    "what moves the accuracy at high ratios",
    tuple(Row(f"{way.name}-{ratio}", pair(way, ratio)) for ratio in RATIOS for way in WAYS),
    lambda look: [grid(ratio, look) for ratio in RATIOS],
)
