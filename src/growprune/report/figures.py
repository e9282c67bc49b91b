"""Drawings of a run, from its notes (metrics.jsonl) and its result alone; each function gives a PNG.

Drawn on matplotlib's Agg canvas without pyplot: no window, no global state, nothing to close.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Note = Mapping[str, Any]

INK, PALE = "#222222", "#8a8a8a"
METHOD_COLOURS = ("#0b6e99", "#d1495b", "#e0a030", "#6a994e")
PHASE_COLOURS = {"train": "#d9d9d9", "push": "#f3b391", "stabilize": "#f7d9a8", "fine-tune": "#b5d3e7"}
KEPT, PRUNED = "#0b6e99", "#e58a6c"
FLOOR = 1e-6
"""Where the ratio of magnitudes is cut off: below, a filter is zero for all purposes."""


def course(notes: Sequence[Note]) -> bytes:
    """Held-out accuracy over the whole course, one line a method, and below which phase each was in."""
    figure = canvas(9.6, 5.4)
    top, strip = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1.15])
    base = [n for n in notes if n["method"] == "base"]
    methods = list(dict.fromkeys(n["method"] for n in notes if n["method"] != "base"))
    top.plot([n["step"] for n in base], [n["accuracy"] for n in base], color=PALE, lw=1.8, label="base network")
    ends = []
    for method, colour in zip(methods, METHOD_COLOURS, strict=False):
        own = [n for n in notes if n["method"] == method]
        top.plot([n["step"] for n in own], [n["accuracy"] for n in own], color=colour, lw=2, label=method)
        top.plot(own[-1]["step"], own[-1]["accuracy"], "o", color=colour, ms=5)
        ends.append((own[-1]["step"], own[-1]["accuracy"], colour))
    label_ends(top, ends)
    for name, first, last in spans(base + [n for n in notes if n["method"] == methods[0]]):
        top.axvspan(first, last, color=PHASE_COLOURS[name], alpha=0.28, lw=0)
    top.set(ylabel="accuracy on held-out images (%)", ylim=(0, 104))
    top.legend(loc="lower right", frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)
    top.grid(axis="y", color="#e5e5e5", lw=0.7)
    top.set_title("Accuracy over the whole course", loc="left", fontsize=12, fontweight="bold")
    for row, method in enumerate(methods):
        draw_phases(strip, row, base + [n for n in notes if n["method"] == method])
    strip.set(
        xlabel="training steps", ylim=(len(methods) - 0.45, -0.55), xlim=(0, max(n["step"] for n in notes) * 1.07)
    )
    strip.set_yticks(range(len(methods)), methods, fontsize=9)
    strip.tick_params(left=False)
    bare(top, strip)
    return png(figure)


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str]]) -> None:
    """The last value beside each line that goes to the end, below one that ends earlier; none over another."""
    last, beside = max(step for step, _, _ in ends), 200.0
    for step, value, colour in sorted(ends, key=lambda end: -end[1]):
        height, offset = value, (0, -15)
        if step == last:
            height = beside = min(value, beside - 5)
            offset = (21, 0)
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}
        axes.annotate(f"{value:.1f}", (step, height), xytext=offset, textcoords="offset points", color=colour,
                      ha="center", va="center", fontsize=9.5, fontweight="bold", bbox=box)  # fmt: skip


def spans(notes: Iterable[Note]) -> list[tuple[str, float, float]]:
    """Each phase's first and last step."""
    result: dict[str, tuple[float, float]] = {}
    last = 0.0
    for note in notes:
        if note["phase"] in PHASE_COLOURS:
            first, _ = result.get(note["phase"], (last, 0.0))
            result[note["phase"]] = (first, note["step"])
        last = note["step"]
    return [(name, first, end) for name, (first, end) in result.items()]


def draw_phases(axes: Axes, row: int, notes: Iterable[Note]) -> None:
    for name, first, last in spans(notes):
        axes.barh(row, last - first, left=first, height=0.74, color=PHASE_COLOURS[name], edgecolor="white", lw=1.2)
        axes.text((first + last) / 2, row, name, ha="center", va="center", fontsize=8, color=INK)


def separation(notes: Sequence[Note]) -> bytes:
    """How filters come apart as λ grows: every layer above, the filters of one layer below (figure 1 of the paper)."""
    notes = [n for n in notes if n.get("layers") and n["phase"] in ("start", "pick", "push")]
    notes = [n for n in notes if n["method"] == notes[0]["method"]]
    layers = list(notes[0]["layers"])
    figure = canvas(9.6, 6.4)
    halves: Any = figure.subfigures(2, 1, height_ratios=[1.15, 1])
    above, below = halves
    spread, ratio = above.subplots(1, 2)
    lambdas = [n["lambda"] for n in notes]
    shades = [(0.05, 0.25 + 0.5 * i / len(layers), 0.35 + 0.5 * i / len(layers)) for i in range(len(layers))]
    for layer, shade in zip(layers, shades, strict=True):
        found = [n["layers"][layer] for n in notes]
        spread.plot(lambdas, [f["spread"] for f in found], color=shade, lw=1.6, label=layer)
        ratio.plot(lambdas, [max(f["pruned"] / f["kept"], FLOOR) for f in found], color=shade, lw=1.6)
    spread.set(xlabel="penalty λ", ylabel="std / mean of the filters' L1 norms", ylim=(0, None), xlim=(0, None))
    ratio.set(xlabel="penalty λ", ylabel="mean |w|, pruned / kept", yscale="log", ylim=(FLOOR * 0.8, 2), xlim=(0, None))
    spread.set_title("The norms spread", loc="left", fontsize=11, fontweight="bold")
    ratio.set_title("Pruned against kept", loc="left", fontsize=11, fontweight="bold")
    spread.legend(fontsize=7.5, frameon=False, ncols=1 if len(layers) < 8 else 2)
    for axes in (spread, ratio):
        axes.grid(color="#e5e5e5", lw=0.7)
    bare(spread, ratio)
    draw_norms(below, notes, max(layers, key=lambda name: len(notes[0]["layers"][name]["norms"])))
    return png(figure)


def draw_norms(figure: Any, notes: Sequence[Note], layer: str) -> None:
    """One layer's norms, divided by the largest, at four values of λ; the filters in the order they start in."""
    top = notes[-1]["lambda"]
    shown = [min(notes, key=lambda n: abs(n["lambda"] - part * top)) for part in (0.0, 0.1, 0.3, 1.0)]
    start, pruned = notes[0]["layers"][layer]["norms"], set(notes[0]["layers"][layer]["gone"])
    order = sorted(range(len(start)), key=lambda i: -start[i])
    panels = figure.subplots(1, len(shown), sharey=True)
    for axes, note in zip(panels, shown, strict=True):
        norms = note["layers"][layer]["norms"]
        colours = [PRUNED if i in pruned else KEPT for i in order]
        axes.bar(range(len(order)), [norms[i] / max(norms) for i in order], color=colours, width=0.85)
        axes.set_title(f"λ = {note['lambda']:.2f}", fontsize=9.5)
        axes.set(xticks=[], ylim=(0, 1.05))
    panels[0].set_ylabel("L1 norm / largest")
    figure.supxlabel(f"the {len(order)} filters of {layer}: kept (blue), pruned (orange)", fontsize=9.5)
    bare(*panels)


def widths(layers: Mapping[str, Sequence[int]]) -> bytes:
    """Filters of each layer, before and after."""
    figure = canvas(7.2, 0.9 + 0.42 * len(layers))
    axes = figure.subplots()
    names = list(layers)
    before, after = ([layers[name][i] for name in names] for i in (0, 1))
    axes.barh(names, before, color="#d5e3ea", height=0.68, label="before")
    axes.barh(names, after, color=KEPT, height=0.68, label="after")
    for row, (full, left) in enumerate(zip(before, after, strict=True)):
        axes.text(full + max(before) * 0.012, row, f"{full} → {left}", va="center", fontsize=9, color=INK)
    axes.invert_yaxis()
    axes.set(xlabel="filters", xlim=(0, max(before) * 1.13))
    axes.set_title("Layer widths", loc="left", fontsize=12, fontweight="bold")
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    axes.tick_params(left=False)
    bare(axes)
    return png(figure)


# -- the canvas ------------------------------------------------------------------------------------------------------


def canvas(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def bare(*all_axes: Axes) -> None:
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9, color=PALE)


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
