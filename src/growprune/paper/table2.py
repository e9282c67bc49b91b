"""Table 2: GReg-1 and GReg-2 beside other methods at one speed-up each, and beside what came after the paper."""

from __future__ import annotations

from growprune.paper import bars
from growprune.paper.bars import Verdict
from growprune.paper.grid import Experiment, Grid, Look, Row, drop, here
from growprune.paper.grid import speedup as times_of
from growprune.paper.setting import RESNET56, VGG19, Base, Setting
from growprune.report import minus

OURS: dict[Base, tuple[float, float, float, str]] = {  # speed-up, GReg-1, GReg-2, ratios
    RESNET56: (2.55, 93.18, 93.36, "[0, 0.75, 0.75, 0.32]"),
    VGG19: (8.84, 67.55, 67.75, "[0:0, 1-15:0.7]"),
}
OTHERS: dict[Base, tuple[tuple[str, float | None, float, float], ...]] = {  # method, base, pruned, speed-up
    RESNET56: (
        ("CP (2017)", 92.80, 91.80, 2.00),
        ("AMC (2018)", 92.80, 91.90, 2.00),
        ("SFP (2018)", 93.59, 93.36, 2.11),
        ("AFP (2018)", 93.93, 92.94, 2.56),
        ("C-SGD (2019)", 93.39, 93.44, 2.55),
        ("DepGraph (2023)", 93.53, 93.64, 2.57),
        ("TPP (2023)", None, 93.46, 1.99),
        ("TPP (2023)", None, 92.35, 3.59),
        ("TPP (2023)", None, 89.63, 11.4),
        ("L1, one-shot, cosine learning rate", 93.78, 93.74, 1.99),
    ),
    VGG19: (
        ("Kron-OBD (2019)", 73.34, 60.70, 5.73),
        ("Kron-OBS (2019)", 73.34, 60.66, 6.09),
        ("EigenDamage (2019)", 73.34, 65.18, 8.80),
        ("DepGraph (2023)", 73.50, 70.39, 8.92),
    ),
}
NAMES = ("GReg-1", "GReg-2")
REMARKS: dict[Base, tuple[str, ...]] = {
    RESNET56: ("What is dated 2023 came after the paper: DepGraph (CVPR), TPP (ICLR).",),
    VGG19: (
        "What is dated 2023 came after the paper: DepGraph (CVPR).",
        "The paper prints drops of 6.67 and 6.47 for its own rows; from its base of 74.02 they are 6.47 and 6.27.",
    ),
}


def both(base: Base) -> tuple[Setting, Setting]:
    written = OURS[base][3]
    return Setting(base, "greg1", written, paper_scale=True), Setting(base, "greg2", written, paper_scale=True)


HEAD = ("method", "base", "pruned", "drop", "speed-up", "pruned − paper")


def near(base: Base, look: Look) -> list[Verdict]:
    means = OURS[base][1:3]
    return [
        bars.accuracy(f"{base.model} {name}", look(setting), mean)
        for name, mean, setting in zip(NAMES, means, both(base), strict=True)
    ]


def order(base: Base, look: Look) -> Verdict:
    return bars.order(base.model, *map(look, both(base)))


def grid(base: Base, look: Look) -> Grid:
    speedup, *means, _ = OURS[base]
    lines: list[tuple[str, ...]] = [
        (name, "" if start is None else f"{start:.2f}", f"{end:.2f}", drop(start, end), f"{times:.2f}×", "")
        for name, start, end, times in OTHERS[base]
    ]
    for name, mean, setting, verdict in zip(NAMES, means, both(base), near(base, look), strict=True):
        start, end = f"{base.accuracy:.2f}", f"{mean:.2f}"
        lines.append((f"{name}, paper", start, end, drop(base.accuracy, mean), f"{speedup:.2f}×", ""))
        found = look(setting)
        first, *others = here(name, found, times_of(found))
        lines += [(*first, verdict.text), *((*other, "") for other in others)]
    return Grid(f"Table 2: {base.model} on {base.data}", HEAD, tuple(lines), remarks(base, look), both(base))


def remarks(base: Base, look: Look) -> tuple[str, ...]:
    found, (_, greg1, greg2, _) = order(base, look), OURS[base]
    said = [f"GReg-2 − GReg-1: {found.text or 'not run'} here, {minus(f'{greg2 - greg1:+.2f}')} in the paper."]
    return *said, *bars.marked([*near(base, look), found]), *REMARKS.get(base, ())


EXPERIMENT = Experiment(
    "table2",
    "GReg-1 and GReg-2 beside other methods",
    tuple(Row(f"{base.model}-{setting.schedule}", (setting,)) for base in OURS for setting in both(base)),
    lambda look: [grid(base, look) for base in OURS],
    verdicts=lambda look: [verdict for base in OURS for verdict in (*near(base, look), order(base, look))],
)
