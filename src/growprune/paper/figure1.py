"""Figure 1: under a penalty that grows for all filters alike, their norms come apart. And the appendix's for VGG19.

Row 1 draws each layer's normalised deviation (the standard deviation of its filters' L1 norms over their mean) against
λ, row 2 one layer's norms, over the largest, at some iterations. The run is GReg-2's picking, three times as long.

The paper's row 2 is of ResNet50 on ImageNet, where Ku is 5: λ is 0.03 at its last iteration, 15,000. On ResNet56 we
draw the layer of that name at the same iterations, and at 30,000, where λ has come as far. "VGG19 layer3" of the
appendix is the layer of index 3, as the paper counts them (from 0).
"""

from __future__ import annotations

from typing import Any

from growprune.paper.grid import Experiment, Grid, Look, Row
from growprune.paper.setting import RESNET56, VGG19, Base, Setting
from growprune.paper.table1 import ratios

WATCHED: dict[Base, tuple[str, tuple[int, ...]]] = {  # the layer of row 2, and its iterations
    RESNET56: ("layer2.3.conv1", (0, 5_000, 10_000, 15_000, 30_000)),
    VGG19: ("features.10", (0, 10_000, 20_000, 30_000)),
}


def watch(base: Base) -> Setting:
    return Setting(base, "greg2", ratios(base, 0.5), watched=WATCHED[base][0], paper_scale=True)


def nearest(notes: list[dict[str, Any]], step: float) -> dict[str, Any]:
    return min(notes, key=lambda note: abs(note["step"] - step))


def grids(look: Look) -> list[Grid]:
    lines = []
    for base in WATCHED:
        found = look(watch(base))
        if not found or not found.runs[0]["separation"]:
            lines.append((base.name, "not run", "", ""))
            continue
        notes = found.runs[0]["separation"]
        first, last = notes[0], notes[-1]
        grown = sum(last["spread"][name] > first["spread"][name] for name in first["spread"])
        means = [sum(note["spread"].values()) / len(note["spread"]) for note in (first, last)]
        lines.append((base.name, f"{means[0]:.3f}", f"{means[1]:.3f}", f"{grown} of {len(first['spread'])}"))
    head = ("network", "mean deviation at λ = 0", "at the end", "layers in which it grew")
    several = any(len(look(watch(base)).runs) > 1 for base in WATCHED)
    remarks = ("Of several runs the first is shown.",) if several else ()
    return [Grid("Figure 1: normalised deviation of filter L1 norms", head, tuple(lines), remarks)]


def figures(look: Look) -> dict[str, bytes]:
    from growprune.report.figures import bare, canvas, png

    result = {}
    for base, (_, steps) in WATCHED.items():
        found = look(watch(base))
        if not found or not found.runs[0]["separation"]:
            continue
        notes = found.runs[0]["separation"]
        scale = notes[-1]["step"] / 30_000  # shorter at smoke scale
        figure = canvas(10.0, 5.6)
        top, bottom = figure.subfigures(2, 1, height_ratios=[1.15, 1])  # type: ignore[misc]
        axes = top.subplots()
        for name in notes[0]["spread"]:
            axes.plot([n["lambda"] for n in notes], [n["spread"][name] for n in notes], lw=1, alpha=0.8)
        axes.set(xlabel="λ", ylabel="deviation of norms / mean")
        small = "smoke run, " if found.scale == "smoke" else ""
        title = f"{small}{base.model} on {base.data}: a line a layer"
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        bare(axes)
        chosen = found.runs[0]["watched"]
        places = bottom.subplots(1, len(steps), sharey=True)
        places[0].set_ylabel("norm / largest")
        for place, step in zip(places, steps, strict=True):
            note = nearest(notes, step * scale)
            norms = note["norms"]
            place.bar(range(len(norms)), [norm / max(norms) for norm in norms], width=1.0, color="#0b6e99")
            place.set(title=f"iteration {note['step']:,}", xlabel=f"filters of {chosen}", ylim=(0, 1))
            bare(place)
        result[f"figure1-{base.model}"] = png(figure)
    return result


EXPERIMENT = Experiment(
    "figure1",
    "weights separate as the penalty grows",
    tuple(Row(base.model, (watch(base),)) for base in WATCHED),
    grids,
    figures,
)
