"""What the README shows of all this: a row or two of each network, from tables 1 and 2."""

from __future__ import annotations

from growprune.paper import bars, table1, table2
from growprune.paper.grid import Grid, Look, speedup
from growprune.paper.setting import RESNET56, VGG19, Base, Setting

Methods = dict[str, tuple[Setting, float]]
"""Of each its setting, and the paper's mean."""
NAMES = ("one-shot", "GReg-1", "GReg-2")


def of_table1(base: Base, ratio: float) -> Methods:
    (once, greg), (_, theirs_once, theirs_greg) = table1.pair(base, ratio), table1.PAPER[base][ratio]
    return {"one-shot": (once, theirs_once[0]), "GReg-1": (greg, theirs_greg[0])}


def of_table2(base: Base) -> Methods:
    return dict(zip(table2.NAMES, zip(table2.both(base), table2.OURS[base][1:3], strict=True), strict=True))


ROWS: tuple[tuple[Base, Methods], ...] = (
    (RESNET56, of_table2(RESNET56)),
    (RESNET56, of_table1(RESNET56, 0.9)),
    (VGG19, of_table2(VGG19) | of_table1(VGG19, 0.7)),  # of the same ratios; table 1 has GReg-1's mean of three
)


def headline(look: Look) -> Grid:
    lines, held = [], []
    for base, methods in ROWS:
        cells = dict.fromkeys(NAMES, "")
        for name, (setting, mean) in methods.items():
            found = look(setting)
            verdict = bars.accuracy(name, found, mean)
            held.append(verdict)
            cells[name] = f"{found.text()} (paper {mean:.2f}){verdict.mark}"
        greg = look(methods["GReg-1"][0])
        start = f"{greg.mean('base'):.2f} (paper {base.accuracy:.2f})" if greg else ""
        lines.append((f"{base.model} on {base.data}", speedup(greg), start, *cells.values()))
    return Grid("", ("", "speed-up", "base network", *NAMES), tuple(lines), bars.marked(held))
