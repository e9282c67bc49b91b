"""Appendix: how much the steps between two growths of λ (Ku) matter to GReg-1."""

from __future__ import annotations

from growprune.paper import bars
from growprune.paper.bars import Verdict
from growprune.paper.grid import Experiment, Grid, Look, Row, best, published, same_filters, warned
from growprune.paper.results import Found
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


def near(base: Base, look: Look) -> list[Verdict]:
    _, columns, _ = PAPER[base]
    return [
        bars.accuracy(f"{base.model} Ku = {ku}", look(setting(base, ku)), mean) for ku, (mean, _) in columns.items()
    ]


def grids(look: Look) -> list[Grid]:
    result = []
    for base, (ratio, columns, baseline) in PAPER.items():
        found, plain = [look(setting(base, ku)) for ku in columns], look(once(base))
        same = [same_filters(each, plain) for each in found]
        lines = (
            ("paper", *(published(*value) for value in columns.values()), published(*baseline)),
            ("here: last epoch", *(each.text() for each in found), plain.text()),
            ("here: best epoch on the test set", *map(best, found), best(plain)),
            ("here − paper", *(verdict.text for verdict in near(base, look)), beside(base, plain).text),
            ("the same filters as one-shot", *same, ""),
        )
        head = ("Ku", *map(str, columns), "one-shot")
        remarks = (*bars.marked([*near(base, look), beside(base, plain)]), *warned(same))
        title = f"Ku: GReg-1, {base.model} on {base.data}, ratio {ratio:g}"
        shown = (*(setting(base, ku) for ku in columns), once(base))
        result.append(Grid(title, head, lines, remarks, shown))
    return result


def beside(base: Base, plain: Found) -> Verdict:
    return bars.accuracy(f"{base.model} one-shot", plain, PAPER[base][2][0])


def verdicts(look: Look) -> list[Verdict]:
    return [verdict for base in PAPER for verdict in (*near(base, look), beside(base, look(once(base))))]


EXPERIMENT = Experiment(
    "ku",
    "sensitivity to Ku",
    tuple(
        Row(f"{base.model}-{ku}", (setting(base, ku), once(base)))
        for base, (_, columns, _) in PAPER.items()
        for ku in columns
    ),
    grids,
    verdicts=verdicts,
)
