"""Figure 1: under a penalty that grows for all filters alike, their norms come apart. And the appendix's for VGG19.

Row 1 draws each layer's normalised deviation (the standard deviation of its filters' L1 norms over their mean) against
λ, row 2 one layer's norms, over the largest, at some iterations. The run is GReg-2's picking, three times as long.

The paper's row 2 is of ResNet50 on ImageNet, where Ku is 5: λ is 0.03 at its last iteration, 15,000. On ResNet56 we
draw the layer of that name at the same iterations, and at 30,000, where λ has come as far. "VGG19 layer3" of the
appendix is the layer of index 3, as the paper counts them (from 0).

Five rows are ours: λ up to 0.3 with Ku = 1 on both networks, VGG19 as the authors trained it, and both with batch norm
fixed while they are pushed, as it was in the authors' code when they began (see `causes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from growprune.paper.causes import FIXED, theirs
from growprune.paper.grid import Experiment, Grid, Look, Row
from growprune.paper.results import Found
from growprune.paper.setting import RESNET56, VGG19, WATCHED_UNTIL, Base, Scale, Setting
from growprune.paper.table1 import ratios

Notes = list[dict[str, Any]]
LAYERS = {RESNET56.model: "layer2.3.conv1", VGG19.model: "features.10"}
ITERATIONS = (0, 10_000, 20_000, 30_000)
PICKED = 0.01 / WATCHED_UNTIL
"""Of a run's length, where GReg-2 picks; in the further runs λ is 0.1 there."""


@dataclass(frozen=True)
class Watch:
    """A run whose norms are drawn, row 2 of it at these iterations."""

    name: str
    setting: Setting
    steps: tuple[int, ...] = ITERATIONS
    remark: str = ""  # with a place for the last λ

    def label(self, scale: Scale) -> str:
        base, remark = self.setting.base, self.remark.format(self.setting.ceiling(scale))
        return f"{base.model} on {base.data}" + (f", {remark}" if remark else "")


def pushed(base: Base, **other: Any) -> Setting:
    return Setting(base, "greg2", ratios(base, 0.5), watched=LAYERS[base.model], paper_scale=True, **other)


WATCHES = (
    Watch("resnet56", pushed(RESNET56), (0, 5_000, 10_000, 15_000, 30_000)),
    Watch("vgg19", pushed(VGG19)),
    Watch("vgg19-base", pushed(theirs(VGG19)), remark="the authors' base network"),
    *(
        Watch(f"{base.model}-further", pushed(base, ku=1, until=0.3), remark="λ to {:g}, Ku = 1")
        for base in (RESNET56, VGG19)
    ),
    *(
        Watch(f"{base.model}-fixed", pushed(base, other=FIXED), remark="batch norm fixed while pushing")
        for base in (RESNET56, VGG19)
    ),
)


def nearest(notes: Notes, step: float) -> dict[str, Any]:
    return min(notes, key=lambda note: abs(note["step"] - step))


def notes_of(look: Look, watch: Watch) -> Notes:
    found = look(watch.setting)
    return found.runs[0]["separation"] if found else []


def mean_deviation(note: dict[str, Any]) -> float:
    return float(sum(note["spread"].values()) / len(note["spread"]))


def least_half(layer: Mapping[str, Any]) -> set[int]:
    """The filters of a layer, by its norms, that would go at ratio 0.5."""
    norms = layer["norms"]
    return set(sorted(range(len(norms)), key=norms.__getitem__)[: len(norms) // 2])


def untouched(config: Mapping[str, Any], steps: int) -> float:
    """The share of its norm that is left to a filter on which the penalty and weight decay act, and no loss."""
    norm, speed = 1.0, 0.0
    for step in range(steps):
        penalty = config["delta_lambda_pick"] * (step // config["ku"] + 1)
        speed = config["momentum"] * speed + (penalty + config["weight_decay"]) * norm
        norm -= config["prune_lr"] * speed
    return norm


def line(look: Look, watch: Watch) -> tuple[str, ...]:
    notes, label = notes_of(look, watch), watch.label(look(watch.setting).scale)
    if not notes:
        return (label, "not run", "", "", "", "", "")
    first, last = notes[0], notes[-1]
    picked = nearest(notes, last["step"] * PICKED)
    grown = sum(last["spread"][name] > first["spread"][name] for name in first["spread"])
    shares = [now / then for now, then in zip(picked["norms"], first["norms"], strict=True)]
    alone = untouched(look(watch.setting).runs[0]["config"], picked["step"])
    least = least_half(first)
    return (
        label,
        *(f"{mean_deviation(note):.3f}" for note in (first, picked, last)),
        f"{grown} of {len(first['spread'])}",
        f"{min(shares):.3f} to {max(shares):.3f} ({alone:.3f})",
        " and ".join(f"{len(least & least_half(note))}" for note in (picked, last)) + f" of {len(least)}",
    )


def grids(look: Look) -> list[Grid]:
    head = (
        "network", "mean deviation at λ = 0", "at a third of the last λ", "at the last", "layers in which it grew",
        "what filters have left of their norms at a third (without any loss)",
        "of the half with the least norms at λ = 0, how many still are in it at a third, and at the last",
    )  # fmt: skip
    plain = WATCHES[0].setting
    remarks = [
        f"The last λ is {plain.ceiling(look(plain).scale):g} if nothing else is said; GReg-2 picks at a third of that. "
        "The last two columns are of the layer that row 2 draws."
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
    title = f"{'smoke run, ' if found.scale == 'smoke' else ''}{watch.label(found.scale)}: a line a layer"
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
