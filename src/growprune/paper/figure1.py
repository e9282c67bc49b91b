"""Figure 1: under a penalty that grows for all filters alike, their norms come apart. And the appendix's for VGG19.

Row 1 draws each layer's normalised deviation (the standard deviation of its filters' L1 norms over their mean) against
λ, row 2 one layer's norms, over the largest, at some iterations. The run is GReg-2's picking, three times as long.

The paper's row 2 is of ResNet50 on ImageNet, where Ku is 5: λ is 0.03 at its last iteration, 15,000. On ResNet56 we
draw the layer of that name at the same iterations, and at 30,000, where λ has come as far. "VGG19 layer3" of the
appendix is the layer of index 3, as the paper counts them (from 0).

Ours are two more: λ ten times as large with Ku = 1, and VGG19 as the authors trained it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from growprune.paper.causes import theirs
from growprune.paper.grid import Experiment, Grid, Look, Row
from growprune.paper.results import Found
from growprune.paper.setting import RESNET56, VGG19, WATCHED_UNTIL, Base, Setting
from growprune.paper.table1 import ratios

Notes = list[dict[str, Any]]
LAYERS = {RESNET56: "layer2.3.conv1", VGG19: "features.10"}
PICKED = 1 / 3
"""Of a run's length, where GReg-2 would pick."""


@dataclass(frozen=True)
class Watch:
    """A run whose norms are drawn, row 2 of it at these iterations."""

    name: str
    setting: Setting
    steps: tuple[int, ...]
    remark: str = ""

    @property
    def label(self) -> str:
        base = self.setting.base
        return f"{base.model} on {base.data}" + (f", {self.remark}" if self.remark else "")


def watch(base: Base, network: Base | None = None, ku: int | None = None, until: float = WATCHED_UNTIL) -> Setting:
    return Setting(
        network or base, "greg2", ratios(base, 0.5), ku=ku, watched=LAYERS[base], until=until, paper_scale=True
    )


WATCHES = (
    Watch("resnet56", watch(RESNET56), (0, 5_000, 10_000, 15_000, 30_000)),
    Watch("vgg19", watch(VGG19), (0, 10_000, 20_000, 30_000)),
    Watch("vgg19-base", watch(VGG19, theirs(VGG19)), (0, 10_000, 20_000, 30_000), "the authors' base network"),
    *(
        Watch(f"{base.model}-further", watch(base, ku=1, until=0.3), (0, 10_000, 20_000, 30_000), "Ku = 1")
        for base in LAYERS
    ),
)


def nearest(notes: Notes, step: float) -> dict[str, Any]:
    return min(notes, key=lambda note: abs(note["step"] - step))


def notes_of(look: Look, watch: Watch) -> Notes:
    found = look(watch.setting)
    return found.runs[0]["separation"] if found else []


def mean_deviation(note: dict[str, Any]) -> float:
    return float(sum(note["spread"].values()) / len(note["spread"]))


def least_half(note: dict[str, Any]) -> set[int]:
    """The filters of the watched layer that would go at ratio 0.5."""
    norms = note["norms"]
    return set(sorted(range(len(norms)), key=norms.__getitem__)[: len(norms) // 2])


def line(look: Look, watch: Watch) -> tuple[str, ...]:
    notes = notes_of(look, watch)
    if not notes:
        return (watch.label, "not run", "", "", "", "")
    first, last = notes[0], notes[-1]
    picked = nearest(notes, last["step"] * PICKED)
    grown = sum(last["spread"][name] > first["spread"][name] for name in first["spread"])
    least = least_half(first)
    return (
        watch.label,
        *(f"{mean_deviation(note):.3f}" for note in (first, picked, last)),
        f"{grown} of {len(first['spread'])}",
        " and ".join(f"{len(least & least_half(note))}" for note in (picked, last)) + f" of {len(least)}",
    )


def grids(look: Look) -> list[Grid]:
    head = (
        "network", "mean deviation at λ = 0", "at a third of the last λ", "at the last", "layers in which it grew",
        "filters of the least half that still are, at a third and at the last",
    )  # fmt: skip
    remarks = [
        "The last λ is 0.03, three times that at which GReg-2 picks; with Ku = 1 it is 0.3. The filters are row 2's."
    ]
    if any(len(look(watch.setting).runs) > 1 for watch in WATCHES):
        remarks.append("Of several runs the first is shown.")
    lines = tuple(line(look, watch) for watch in WATCHES)
    return [Grid("Figure 1: normalised deviation of filter L1 norms", head, lines, tuple(remarks))]


def figures(look: Look) -> dict[str, bytes]:
    return {f"figure1-{watch.name}": picture(watch, look(watch.setting)) for watch in WATCHES if notes_of(look, watch)}


def picture(watch: Watch, found: Found) -> bytes:
    from growprune.report.figures import bare, canvas, png

    notes, layer = found.runs[0]["separation"], found.runs[0]["watched"]
    shorter = notes[-1]["step"] / 30_000  # at smoke scale
    figure = canvas(10.0, 5.6)
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.15, 1])  # type: ignore[misc]
    axes = top.subplots()
    for name in notes[0]["spread"]:
        axes.plot([n["lambda"] for n in notes], [n["spread"][name] for n in notes], lw=1, alpha=0.8)
    axes.set(xlabel="λ", ylabel="deviation of norms / mean")
    title = f"{'smoke run, ' if found.scale == 'smoke' else ''}{watch.label}: a line a layer"
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    bare(axes)
    places = bottom.subplots(1, len(watch.steps), sharey=True)
    places[0].set_ylabel("norm / largest")
    for place, step in zip(places, watch.steps, strict=True):
        note = nearest(notes, step * shorter)
        norms = note["norms"]
        place.bar(range(len(norms)), [norm / max(norms) for norm in norms], width=1.0, color="#0b6e99")
        place.set(title=f"iteration {note['step']:,}", xlabel=f"filters of {layer}", ylim=(0, 1))
        bare(place)
    return png(figure)


EXPERIMENT = Experiment(
    "figure1",
    "norms of filters as the penalty grows",
    tuple(Row(watch.name, (watch.setting,)) for watch in WATCHES),
    grids,
    figures,
)
