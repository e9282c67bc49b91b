"""Ours, not the paper's: the penalty on a filter's own weights, or on its whole path; one-shot beside both."""

from __future__ import annotations

from growprune.paper.grid import Experiment, Grid, Look, Row, best
from growprune.paper.results import Found
from growprune.paper.setting import RESNET56, Setting
from growprune.paper.table1 import ratios

RATIOS = (0.7, 0.9)
EPOCH = 40


def ways(ratio: float) -> dict[str, Setting]:
    written = ratios(RESNET56, ratio)
    return {
        "one-shot": Setting(RESNET56, "oneshot", written),
        "GReg-1, filter (the paper)": Setting(RESNET56, "greg1", written),
        "GReg-1, path (ours)": Setting(RESNET56, "greg1", written, scope="path"),
    }


def after(found: Found, epoch: int) -> str:
    """The mean at that epoch's end, as tables show it."""
    runs = [run for run in found.runs if len(run["course"]) >= epoch]
    then = Found(tuple({"accuracy": {"final": run["course"][epoch - 1]}} for run in runs))
    return then.text() if then else ""


def grids(look: Look) -> list[Grid]:
    result = []
    for ratio in RATIOS:
        lines = []
        for name, setting in ways(ratio).items():
            found = look(setting)
            removal = [found.text(which) if found else "" for which in ("before_removal", "after_removal")]
            lines.append((name, *removal, after(found, EPOCH), found.text(), best(found), str(len(found.runs))))
        head = ("", "before removal", "after removal", f"epoch {EPOCH}", "last epoch", "best on the test set", "runs")
        remark = "After removal, and before it where filters were pushed, with batch-norm statistics estimated anew."
        title = f"Scopes: resnet56 on cifar10, ratio {ratio:g}"
        result.append(Grid(title, head, tuple(lines), (remark,), tuple(ways(ratio).values())))
    return result


EXPERIMENT = Experiment(
    "scopes",
    "what the penalty touches: a filter's weights, or its whole path",
    tuple(Row(f"{ratio:g}", tuple(ways(ratio).values())) for ratio in RATIOS),
    grids,
    seeds=3,
)
