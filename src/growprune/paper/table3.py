"""Table 3: acceleration on ImageNet, GReg-1 and GReg-2 beside other methods; one-shot pruning is ours to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from growprune.paper import bars, imagenet
from growprune.paper.bars import Verdict
from growprune.paper.grid import Experiment, Grid, Look, Row, drop, here, speedup
from growprune.paper.setting import Kind, Setting

SKIPPED = ",".join(f"layer{block}.conv1" for block in ("1.0", "2.0", "2.3", "3.0", "3.5"))
"""Blocks of ResNet34 that stay whole, as in L1 (pruned-B)."""


@dataclass(frozen=True)
class Level:
    """The rows of one network at one speed-up: what the paper got, and what others did (base, pruned, speed-up)."""

    network: str
    speedup: float
    ratios: str
    greg1: float
    greg2: float | None
    others: tuple[tuple[str, float, float, float], ...]
    ignore: str = ""


LEVELS = (
    Level("resnet34", 1.32, "[0, 0.5, 0.6, 0.4, 0]", 73.54, 73.61,
          (("L1 (pruned-B)", 73.23, 72.17, 1.32), ("Taylor-FO", 73.31, 72.83, 1.29)), SKIPPED),
    Level("resnet50", 1.49, "[0, 0.3, 0.3, 0.3, 0.14]", 76.27, None,
          (("ProvableFP", 76.13, 75.21, 1.43), ("AOFP", 75.34, 75.63, 1.49),
           ("GReg-2 from a base of 75.40, paper", 75.40, 76.13, 1.49))),
    Level("resnet50", 2.31, "[0, 0.6, 0.6, 0.6, 0.21]", 75.16, 75.36,
          (("IncReg", 75.60, 72.47, 2.00), ("SFP", 76.15, 74.61, 1.72), ("HRank", 76.15, 74.98, 1.78),
           ("Taylor-FO", 76.18, 74.50, 1.82), ("Factorized", 76.15, 74.55, 2.33), ("DCP", 76.01, 74.95, 2.25),
           ("CCP-AC", 76.15, 75.32, 2.18), ("C-SGD-50", 75.34, 74.54, 2.26), ("AOFP", 75.34, 75.11, 2.31),
           ("GReg-2 from a base of 75.40, paper", 75.40, 75.22, 2.31))),
    Level("resnet50", 2.56, "[0, 0.74, 0.74, 0.6, 0.21]", 74.85, 74.93, (("LFPC", 76.15, 74.46, 2.55),)),
    Level("resnet50", 3.06, "[0, 0.68, 0.68, 0.68, 0.5]", 73.75, 73.90,
          (("IncReg", 75.60, 71.07, 3.00), ("Taylor-FO", 76.18, 71.69, 3.05))),
)  # fmt: skip
WAYS: dict[str, Kind] = {"one-shot": "oneshot", "GReg-1": "greg1", "GReg-2": "greg2"}
FAST = 2.56
"""From here on up both methods are to be above one-shot."""


def settings(level: Level, images: str) -> dict[str, Setting]:
    base = imagenet.base(level.network, images)
    return {name: Setting(base, schedule, level.ratios, ignore=level.ignore) for name, schedule in WAYS.items()}


def grid(level: Level, images: str, look: Look) -> Grid:
    paper = imagenet.PUBLISHED[level.network][1]
    lines: list[tuple[str, ...]] = [
        (name, f"{start:.2f}", f"{end:.2f}", drop(start, end), f"{times:.2f}×")
        for name, start, end, times in level.others
    ]
    for name, end in (("GReg-1, paper", level.greg1), ("GReg-2, paper", level.greg2)):
        if end is not None:
            lines.append((name, f"{paper:.2f}", f"{end:.2f}", drop(paper, end), f"{level.speedup:.2f}×"))
    ways = settings(level, images)
    for name, setting in ways.items():
        found = look(setting)
        lines += here(name, found, speedup(found))
    title = f"Table 3: {level.network} at {level.speedup:.2f}×; {imagenet.title(map(look, ways.values()))}"
    head = ("method", "base", "pruned", "drop", "speed-up")
    judged = above(f"{level.network}-{level.speedup}", ways, look) if level.speedup >= FAST else []
    return Grid(title, head, tuple(lines), beside(judged), tuple(ways.values()))


def above(row: str, ways: Mapping[str, Setting], look: Look) -> list[Verdict]:
    """How GReg-1 and GReg-2 stand to one-shot."""
    once, *others = ways.items()
    return [bars.above(f"{row} {name}", look(once[1]), look(setting)) for name, setting in others]


def beside(judged: Sequence[Verdict]) -> tuple[str, ...]:
    """The same in words, under a table."""
    said = [f"{verdict.row.rpartition(' ')[2]} − one-shot: {verdict.text}." for verdict in judged if verdict.value]
    return *said, *bars.marked(judged)


def verdicts(images: str, look: Look) -> list[Verdict]:
    """Above one-shot where much is pruned; on ImageNet itself also the paper's accuracies."""
    found = []
    for level in LEVELS:
        row, ways = f"{level.network}-{level.speedup}", settings(level, images)
        found += above(row, ways, look) if level.speedup >= FAST else []
        for name, mean in (("GReg-1", level.greg1), ("GReg-2", level.greg2)):
            if mean is not None and imagenet.on_imagenet(ways[name], look(ways[name])):
                found.append(bars.accuracy(f"{row} {name}", look(ways[name]), mean))
    return found


def experiment(images: str) -> Experiment:
    return Experiment(
        "table3",
        "acceleration on ImageNet",
        tuple(Row(f"{level.network}-{level.speedup}", tuple(settings(level, images).values())) for level in LEVELS),
        lambda look: [grid(level, images, look) for level in LEVELS],
        verdicts=lambda look: verdicts(images, look),
    )
