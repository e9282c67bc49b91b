"""Appendix: table 1's comparison with OBD's criterion and one ratio over all layers together."""

from __future__ import annotations

from dataclasses import replace

from growprune.paper.grid import Grid, Look, Versus, contest, versus
from growprune.paper.setting import RESNET56, VGG19, Base, Setting

RATIOS = (0.7, 0.8, 0.9, 0.925, 0.95)
"""The paper says "from 0.7 to 0.95" and gives the speed-ups they came to; the three in between are our reading."""

PAPER: dict[Base, tuple[tuple[float, tuple[float, float], tuple[float, float]], ...]] = {  # speed-up, OBD, GReg-1
    RESNET56: (
        (2.15, (92.90, 0.05), (92.94, 0.12)),
        (3.00, (91.90, 0.04), (92.27, 0.14)),
        (4.86, (89.82, 0.11), (90.37, 0.17)),
        (5.80, (88.56, 0.11), (89.78, 0.06)),
        (6.87, (86.90, 0.03), (88.69, 0.06)),
    ),
    VGG19: (
        (1.92, (72.68, 0.08), (73.08, 0.11)),
        (2.96, (70.42, 0.16), (71.30, 0.28)),
        (5.89, (62.54, 0.13), (65.83, 0.13)),
        (7.69, (59.18, 0.32), (62.87, 0.20)),
        (11.75, (54.19, 0.57), (59.53, 0.10)),
    ),
}


def pair(base: Base, ratio: float) -> tuple[Setting, Setting]:
    """Of all layers, VGG19's first one too, as the paper's speed-ups show (docs/reproduction.md); ResNet56's is tied to
    its first stage, and stays."""
    once = Setting(base, "oneshot", global_ratio=ratio, global_stem=base == VGG19, criterion="obd")
    return once, replace(once, schedule="greg1")


def columns(base: Base) -> list[Versus]:
    return [
        Versus(f"{base.model}-{ratio:g}", ratio, pair(base, ratio), speedup, once, greg, alike=False)
        for ratio, (speedup, once, greg) in zip(RATIOS, PAPER[base], strict=True)
    ]


REMARK = "Columns need not be the same networks: the paper does not print its global ratios, only the speed-ups."


def grids(look: Look) -> list[Grid]:
    titles = {base: f"OBD's criterion: {base.model} on {base.data}" for base in PAPER}
    return [versus(titles[base], "global ratio (ours)", columns(base), look, (REMARK,)) for base in PAPER]


EXPERIMENT = contest(
    "obd", "the same comparison with OBD's criterion", [column for base in PAPER for column in columns(base)], grids
)
