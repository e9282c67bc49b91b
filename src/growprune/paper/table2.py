"""Table 2: GReg-1 and GReg-2 beside other methods at one speed-up each, and beside what came after the paper."""

from __future__ import annotations

from growprune.paper.grid import Experiment, Grid, Look, Row, published
from growprune.paper.setting import RESNET56, VGG19, Base, Setting

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


def both(base: Base) -> tuple[Setting, Setting]:
    written = OURS[base][3]
    return Setting(base, "greg1", written, paper_scale=True), Setting(base, "greg2", written, paper_scale=True)


def grids(look: Look) -> list[Grid]:
    result = []
    for base, (speedup, greg1, greg2, _) in OURS.items():
        lines = [
            (name, "" if start is None else f"{start:.2f}", f"{end:.2f}", drop(start, end), f"{times:.2f}×")
            for name, start, end, times in OTHERS[base]
        ]
        for name, value, setting in zip(("GReg-1", "GReg-2"), (greg1, greg2), both(base), strict=True):
            lines.append(
                (
                    f"{name}, paper",
                    f"{base.accuracy:.2f}",
                    published(value),
                    drop(base.accuracy, value),
                    f"{speedup:.2f}×",
                )
            )
            found = look(setting)
            if not found:
                lines.append((f"{name}, here", "", "not run", "", ""))
                continue
            start, times = found.mean("base"), found.runs[0]["speedup"]
            lines.append((f"{name}, here", f"{start:.2f}", found.text(), drop(start, found.mean()), f"{times:.2f}×"))
            lines.append((f"{name}, here, best epoch on the test set", "", found.text("best"), "", ""))
        result.append(
            Grid(
                f"Table 2: {base.model} on {base.data}", ("method", "base", "pruned", "drop", "speed-up"), tuple(lines)
            )
        )
    return result


def drop(start: float | None, end: float) -> str:
    return "" if start is None else f"{start - end:.2f}"


EXPERIMENT = Experiment(
    "table2",
    "GReg-1 and GReg-2 beside other methods",
    tuple(
        Row(f"{base.model}-{setting.schedule}", f"{base.model}, {setting.schedule}", (setting,))
        for base in OURS
        for setting in both(base)
    ),
    grids,
)
