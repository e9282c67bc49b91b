"""Appendix: how much the steps between two growths of λ (Ku) matter to GReg-1."""

from __future__ import annotations

from growprune.paper.grid import Experiment, Grid, Look, Row, published
from growprune.paper.setting import RESNET56, VGG19, Base, Setting
from growprune.paper.table1 import ratios

PAPER: dict[Base, tuple[float, dict[int, tuple[float, float]], tuple[float, float]]] = {
    RESNET56: (
        0.9,
        {1: (89.40, 0.04), 5: (89.38, 0.13), 10: (89.49, 0.23), 15: (89.69, 0.05), 20: (89.62, 0.13)},
        (87.34, 0.21),
    ),
    VGG19: (
        0.7,
        {1: (67.22, 0.33), 5: (67.32, 0.24), 10: (67.35, 0.15), 15: (67.06, 0.40), 20: (66.93, 0.22)},
        (66.05, 0.04),
    ),
}


def setting(base: Base, ku: int) -> Setting:
    return Setting(base, "greg1", ratios(base, PAPER[base][0]), ku=ku)


def once(base: Base) -> Setting:
    return Setting(base, "oneshot", ratios(base, PAPER[base][0]))


def grids(look: Look) -> list[Grid]:
    result = []
    for base, (ratio, columns, baseline) in PAPER.items():
        lines = (
            ("paper", *(published(*value) for value in columns.values()), published(*baseline)),
            ("here", *(look(setting(base, ku)).text() for ku in columns), look(once(base)).text()),
        )
        head = ("Ku", *map(str, columns), "one-shot")
        result.append(Grid(f"Ku: GReg-1, {base.model} on {base.data}, ratio {ratio:g}", head, lines))
    return result


EXPERIMENT = Experiment(
    "ku",
    "sensitivity to Ku",
    tuple(
        Row(f"{base.model}-{ku}", f"{base.model}, Ku = {ku}", (setting(base, ku), once(base)))
        for base, (_, columns, _) in PAPER.items()
        for ku in columns
    ),
    grids,
)
