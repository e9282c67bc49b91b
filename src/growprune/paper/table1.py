"""Table 1: the same filters removed at once and by GReg-1, over five ratios on two networks."""

from __future__ import annotations

from growprune.paper.grid import Grid, Look, Versus, contest, versus
from growprune.paper.setting import RESNET56, VGG19, Base, Setting

PAPER: dict[Base, dict[float, tuple[float, tuple[float, float], tuple[float, float]]]] = {
    RESNET56: {  # ratio: speed-up, one-shot, GReg-1
        0.5: (1.99, (92.97, 0.15), (93.06, 0.09)),
        0.7: (3.59, (91.88, 0.09), (92.23, 0.21)),
        0.9: (11.41, (87.34, 0.21), (89.49, 0.23)),
        0.925: (14.76, (87.31, 0.28), (88.39, 0.15)),
        0.95: (19.31, (82.79, 0.22), (85.97, 0.16)),
    },
    VGG19: {
        0.5: (3.60, (71.49, 0.14), (71.50, 0.12)),
        0.6: (5.41, (70.27, 0.12), (70.33, 0.12)),
        0.7: (8.84, (66.05, 0.04), (67.35, 0.15)),
        0.8: (17.30, (61.59, 0.03), (63.55, 0.29)),
        0.9: (44.22, (51.36, 0.11), (57.09, 0.03)),
    },
}

SPARSITY: dict[Base, tuple[float, ...]] = {  # parameters gone, in percent
    RESNET56: (49.82, 70.57, 90.39, 93.43, 95.19),
    VGG19: (74.87, 84.00, 90.98, 95.95, 98.96),
}


def ratios(base: Base, ratio: float) -> str:
    """As the paper writes them: the stem, or layer 0, stays."""
    return f"[0, {ratio}, {ratio}, {ratio}]" if base.model == RESNET56.model else f"[0:0, 1-15:{ratio}]"


def pair(base: Base, ratio: float) -> tuple[Setting, Setting]:
    return Setting(base, "oneshot", ratios(base, ratio)), Setting(base, "greg1", ratios(base, ratio))


def columns(base: Base) -> list[Versus]:
    return [
        Versus(f"{base.model}-{ratio:g}", ratio, pair(base, ratio), speedup, once, greg, sparsity)
        for (ratio, (speedup, once, greg)), sparsity in zip(PAPER[base].items(), SPARSITY[base], strict=True)
    ]


def grids(look: Look) -> list[Grid]:
    result = []
    for base in PAPER:
        found = [look(setting) for column in columns(base) for setting in column.settings]
        bases = {run["base"]["accuracy"] for each in found for run in each.runs}
        here = " and ".join(f"{value:.2f} % here" for value in sorted(bases)) or "no run here yet"
        title = f"Table 1: {base.model} on {base.data}; base network {base.accuracy} % in the paper, {here}"
        result.append(versus(title, "ratio", columns(base), look))
    return result


EXPERIMENT = contest("table1", "one-shot against GReg-1", [column for base in PAPER for column in columns(base)], grids)
