"""Appendix: five random picks of filters, each removed at once and by GReg-1."""

from __future__ import annotations

from growprune.paper.grid import Experiment, Grid, Look, Row, published
from growprune.paper.setting import RESNET56, VGG19, Base, Setting
from growprune.paper.table1 import ratios

PAPER: dict[Base, tuple[float, tuple[float, float], tuple[float, float]]] = {
    RESNET56: (0.9, (86.85, 0.43), (89.08, 0.23)),  # ratio, one-shot, GReg-1: means of five
    VGG19: (0.7, (65.04, 0.29), (66.79, 0.21)),
}


def pair(base: Base) -> tuple[Setting, Setting]:
    written = ratios(base, PAPER[base][0])
    return Setting(base, "oneshot", written, criterion="random"), Setting(base, "greg1", written, criterion="random")


def grids(look: Look) -> list[Grid]:
    result = []
    for base, (ratio, once, greg) in PAPER.items():
        found = [look(setting) for setting in pair(base)]
        width = max((len(each.runs) for each in found), default=0)
        lines = []
        for name, paper, each in zip(("one-shot", "GReg-1"), (once, greg), found, strict=True):
            singles = [f"{value:.2f}" for value in each.values("final")] if each else []
            lines.append((f"{name}, paper (five runs)", *[""] * width, published(*paper)))
            lines.append((f"{name}, here", *singles, *[""] * (width - len(singles)), each.text()))
        head = ("", *(f"pick {i + 1}" for i in range(width)), "mean")
        result.append(Grid(f"Random picks: {base.model} on {base.data}, ratio {ratio:g}", head, tuple(lines)))
    return result


EXPERIMENT = Experiment(
    "random",
    "five random picks: a pick a seed (--seeds 5)",
    tuple(Row(base.model, f"{base.model}, random filters", pair(base)) for base in PAPER),
    grids,
)
