"""Appendix: five random picks of filters, each removed at once and by GReg-1."""

from __future__ import annotations

from growprune.paper import bars
from growprune.paper.bars import Verdict
from growprune.paper.grid import (
    Experiment,
    Grid,
    Look,
    Row,
    best,
    gain,
    published,
    same_filters,
    warned,
)
from growprune.paper.results import Found
from growprune.paper.setting import RESNET56, VGG19, Base, Setting
from growprune.paper.table1 import ratios

RATIO: dict[Base, float] = {RESNET56: 0.9, VGG19: 0.7}

Picks = tuple[tuple[float, ...], float, float]
"""Five accuracies, their mean and their deviation."""

PAPER: dict[Base, tuple[Picks, Picks]] = {  # one-shot, GReg-1
    RESNET56: (((87.57, 87.00, 86.27, 86.75, 86.67), 86.85, 0.43), ((89.26, 88.98, 88.78, 89.42, 88.96), 89.08, 0.23)),
    VGG19: (((64.56, 65.06, 65.07, 65.05, 65.48), 65.04, 0.29), ((66.63, 66.57, 66.80, 66.80, 67.16), 66.79, 0.21)),
}
NAMES = ("one-shot", "GReg-1")


def pair(base: Base) -> tuple[Setting, Setting]:
    written = ratios(base, RATIO[base])
    return Setting(base, "oneshot", written, criterion="random"), Setting(base, "greg1", written, criterion="random")


def near(base: Base, look: Look) -> list[Verdict]:
    return [
        bars.accuracy(f"{base.model} {name}", look(setting), paper[1])
        for name, paper, setting in zip(NAMES, PAPER[base], pair(base), strict=True)
    ]


def share(base: Base, look: Look) -> Verdict:
    once, greg = map(look, pair(base))
    return bars.gain(base.model, once, greg, round(PAPER[base][1][1] - PAPER[base][0][1], 2))


def single(found: Found, seed: int) -> Found:
    """Of one pick: a pick a seed."""
    return Found(tuple(run for run in found.runs if run["config"]["seed"] == seed))


def grid(base: Base, look: Look) -> Grid:
    found = [look(setting) for setting in pair(base)]
    most = max(run["config"]["seed"] for each in found for run in each.runs) + 1 if any(found) else 0
    picks = range(max(5, most))
    lines = []
    for name, (values, mean, spread), each in zip(NAMES, PAPER[base], found, strict=True):
        singles = [f"{value:.2f}" for value in values] + [""] * (len(picks) - len(values))
        here = [one.text() if (one := single(each, seed)) else "" for seed in picks]
        tops = [best(single(each, seed)) for seed in picks]
        lines.append((f"{name}, paper", *singles, published(mean, spread)))
        lines.append((f"{name}, here: last epoch", *here, each.text()))
        lines.append((f"{name}, here: best epoch on the test set", *tops, best(each)))
    once, greg = found
    pairs = [(single(once, seed), single(greg, seed)) for seed in picks]
    same = [same_filters(*each) for each in pairs]
    blank = [""] * len(picks)
    lines += [(f"{name} − paper", *blank, verdict.text) for name, verdict in zip(NAMES, near(base, look), strict=True)]
    lines.append(("gain, here", *(gain(b, a) for a, b in pairs), gain(greg, once)))
    lines.append(("gain here / gain paper", *blank, share(base, look).text))
    lines.append(("the same filters removed", *same, same_filters(once, greg)))
    head = ("", *(f"pick {seed + 1}" for seed in picks), "mean")
    title = f"Random picks: {base.model} on {base.data}, ratio {RATIO[base]:g}"
    remarks = (*bars.marked([*near(base, look), share(base, look)]), *warned(same))
    return Grid(title, head, tuple(lines), remarks, pair(base))


EXPERIMENT = Experiment(
    "random",
    "five random picks: a pick a seed",
    tuple(Row(base.model, pair(base)) for base in PAPER),
    lambda look: [grid(base, look) for base in PAPER],
    verdicts=lambda look: [verdict for base in PAPER for verdict in (*near(base, look), share(base, look))],
    seeds=5,
)
