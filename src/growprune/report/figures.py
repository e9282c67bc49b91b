"""Drawings of a run, from its notes (metrics.jsonl) and its result alone; each function gives a PNG.

Drawn on matplotlib's Agg canvas without pyplot: no window, no global state, nothing to close.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

Note = Mapping[str, Any]
Point = tuple[float, float]

INK, PALE = "#222222", "#8a8a8a"
METHOD_COLOURS = ("#0b6e99", "#d1495b", "#e0a030", "#6a994e")
PHASE_COLOURS = {
    "train": "#d9d9d9",
    "pick": "#d8c3dd",
    "push": "#f3b391",
    "stabilize": "#f7d9a8",
    "fine-tune": "#b5d3e7",
    "finetune": "#b5d3e7",
}
KEPT, PRUNED = "#0b6e99", "#e58a6c"
DROP = "#d1495b"
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


def draw_phases(axes: Axes, row: int, notes: Iterable[Note], above: bool = False) -> None:
    """A bar a phase, with its name; one too short for it has it above, or none."""
    found = spans(notes)
    whole = max((last for _, _, last in found), default=0.0)
    for name, first, last in found:
        axes.barh(row, last - first, left=first, height=0.74, color=PHASE_COLOURS[name], edgecolor="white", lw=1.2)
        fits = last - first > whole * 0.01 * len(name)
        if fits or above:
            axes.text((first + last) / 2, row if fits else row - 0.62, name, ha="center", va="center", fontsize=8)


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
    height = min(0.42, max(0.17, 9 / len(layers)))  # of a row, in inches: a deep network still fits a page
    size = 9 * min(1.0, height / 0.24)
    figure = canvas(7.2, 0.9 + height * len(layers))
    axes = figure.subplots()
    rows = range(len(layers))
    before, after = ([layer[i] for layer in layers.values()] for i in (0, 1))
    axes.barh(rows, before, color="#d5e3ea", height=0.68, label="before")
    axes.barh(rows, after, color=KEPT, height=0.68, label="after")
    for row, full, left in zip(rows, before, after, strict=True):
        axes.text(full + max(before) * 0.012, row, f"{full} → {left}", va="center", fontsize=size, color=INK)
    axes.set_yticks(rows, list(layers), parse_math=False)  # a name is no formula, even with a $ in it
    axes.set(xlabel="filters", xlim=(0, max(before) * 1.15), ylim=(len(layers) - 0.4, -0.6))
    axes.set_title("Layer widths", loc="left", fontsize=12, fontweight="bold")
    axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)
    axes.tick_params(left=False)
    bare(axes)
    axes.tick_params(axis="y", labelsize=size)
    return png(figure)


# -- one run ---------------------------------------------------------------------------------------------------------


def history(notes: Sequence[Note], base: float | None = None) -> bytes | None:
    """Accuracy and loss of one run over its steps, its phases shaded and named below, removal as a vertical drop.

    None where no note has either.
    """
    told = {"accuracy": points(with_drop(notes), "accuracy"), "loss": points(notes, "loss")}
    told = {key: found for key, found in told.items() if found}
    if not told:
        return None
    named = len(spans(notes)) > 1
    heights = [{"accuracy": 3.4, "loss": 1.7}[key] for key in told] + [0.6] * named
    figure = canvas(9.6, sum(heights) + 0.6)
    panels: list[Axes] = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights).flat)
    panels[0].set_title(f"{' and '.join(told)} over the run".capitalize(), loc="left", fontsize=12, fontweight="bold")
    for (key, found), axes in zip(told.items(), panels, strict=False):
        draw_accuracy(axes, found, notes, base) if key == "accuracy" else draw_loss(axes, found)
        shade(axes, notes)
    if named:
        draw_phases(panels[-1], 0, notes, above=True)
        panels[-1].set(ylim=(0.5, -0.85), yticks=[])
        panels[-1].spines["left"].set_visible(False)
    span(panels[-1], [step for found in told.values() for step, _ in found] + [0])
    bare(*panels)
    return png(figure)


def with_drop(notes: Iterable[Note]) -> Iterable[Note]:
    """At removal also the accuracy just before it, so that a line through the notes falls straight."""
    for note in notes:
        if note["phase"] == "removal":
            yield {**note, "accuracy": note.get("before")}
        yield note


def draw_accuracy(axes: Axes, found: Sequence[Point], notes: Iterable[Note], base: float | None) -> None:
    line(axes, found, KEPT, label="accuracy")
    if base is not None:
        axes.axhline(base, color=PALE, lw=1.2, ls="--", label=f"base network, {base:.1f} %")
    for note in notes:
        if note["phase"] == "removal" and known(note.get("before")) and known(note["accuracy"]):
            label = f"removal, {note['before']:.1f} → {note['accuracy']:.1f} %"
            axes.plot([note["step"]] * 2, [note["before"], note["accuracy"]], "o-", color=DROP, ms=4, lw=2, label=label)
    values = [value for _, value in found] + ([base] if base is not None else [])
    margin = max(1.0, 0.06 * (max(values) - min(values)))
    axes.set(ylabel="accuracy (%)", ylim=(max(0.0, min(values) - margin), max(values) + margin))
    label_ends(axes, [(*found[-1], KEPT)])
    axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)
    axes.grid(axis="y", color="#e5e5e5", lw=0.7)


def draw_loss(axes: Axes, found: Sequence[Point]) -> None:
    values = [value for _, value in found]
    line(axes, found, INK)
    if min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set(major_locator=LogLocator(subs=(1.0, 2.0, 5.0)), major_formatter="{x:g}", minor_formatter="")
    axes.set_ylabel("training loss")
    axes.grid(axis="y", color="#e5e5e5", lw=0.7)


def penalty(notes: Iterable[Note]) -> bytes | None:
    """λ over the steps, and below how kept and pruned magnitudes come apart; None where there is neither.

    A thin line a layer, a thick one for their median.
    """
    notes = [n for n in notes if n["stage"] == "prune"]
    lambdas, layers = points(notes, "lambda"), magnitudes(notes)
    pushed = any(value for _, value in lambdas)
    if not pushed and not any(len(found) > 1 for by_layer in layers.values() for found in by_layer.values()):
        return None  # magnitudes that are known once have not come apart yet
    heights = [1.7] * pushed + [3.2] * bool(layers)
    figure = canvas(9.6, sum(heights) + 0.6)
    panels: list[Axes] = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights).flat)
    panels[0].set_title("Under the growing penalty", loc="left", fontsize=12, fontweight="bold")
    if pushed:
        line(panels[0], lambdas, INK)
        panels[0].set(ylabel="penalty λ", ylim=(0, None))
    if layers:
        draw_magnitudes(panels[-1], layers)
    for axes in panels:
        shade(axes, notes)
        axes.grid(axis="y", color="#e5e5e5", lw=0.7)
    span(panels[-1], [n["step"] for n in notes])
    bare(*panels)
    return png(figure)


def magnitudes(notes: Iterable[Note]) -> dict[str, dict[str, list[Point]]]:
    """ "kept" and "pruned": by layer, its mean magnitude at each step where it has one, cut off at FLOOR."""
    result: dict[str, dict[str, list[Point]]] = {}
    for note in notes:
        for layer, found in (note.get("layers") or {}).items():
            for which in ("kept", "pruned"):
                if known(found[which]):
                    course = result.setdefault(which, {}).setdefault(layer, [])
                    course.append((note["step"], max(found[which], FLOOR)))
    return result


def draw_magnitudes(axes: Axes, layers: Mapping[str, Mapping[str, Sequence[Point]]]) -> None:
    for which, colour in (("kept", KEPT), ("pruned", PRUNED)):
        together: dict[float, list[float]] = {}
        for course_of_one in layers.get(which, {}).values():
            line(axes, course_of_one, colour, lw=0.8, alpha=0.35)
            for step, value in course_of_one:
                together.setdefault(step, []).append(value)
        if together:
            middle = [(step, statistics.median(values)) for step, values in together.items()]
            line(axes, middle, colour, lw=2.4, label=f"{which}, median of {len(layers[which])} layers")
    axes.set(ylabel="mean |w|", yscale="log")
    axes.legend(loc="lower left", frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)


# -- lines over steps ------------------------------------------------------------------------------------------------


def known(value: Any) -> bool:
    """A number, and a finite one."""
    return value is not None and math.isfinite(value)


def points(notes: Iterable[Note], key: str) -> list[Point]:
    """Steps and values of the notes that have one."""
    return [(n["step"], n[key]) for n in notes if known(n.get(key))]


def line(axes: Axes, found: Sequence[Point], colour: str, lw: float = 1.8, **how: Any) -> None:
    """A single point has no line: it is a dot."""
    steps, values = zip(*found, strict=True)
    axes.plot(steps, values, color=colour, lw=lw, marker="o" if len(found) == 1 else "", ms=4, **how)


def shade(axes: Axes, notes: Iterable[Note]) -> None:
    for name, first, last in spans(notes):
        axes.axvspan(first, last, color=PHASE_COLOURS[name], alpha=0.28, lw=0)


def span(axes: Axes, steps: Sequence[float]) -> None:
    """The steps there are, and room for the last value; under the lowest panel."""
    first, last = min(steps), max(steps)
    first = 0 if first == last else first
    axes.set(xlabel="training steps", xlim=(first, last + max(0.07 * (last - first), 1)))
    axes.xaxis.set(major_locator=MaxNLocator(8, integer=True), major_formatter="{x:,.0f}")


def courses(lines: Mapping[str, Sequence[Point]]) -> bytes:
    """Accuracy at the ends of epochs, a line a row of runs."""
    figure = canvas(8.5, 4.6)
    axes = figure.subplots()
    for place, (label, found) in enumerate(lines.items()):
        style = ("-", "--", ":", "-.")[place // len(METHOD_COLOURS) % 4]
        colour, shown = METHOD_COLOURS[place % len(METHOD_COLOURS)], label.replace("$", r"\$")
        line(axes, found, colour, 1.6, label=shown, linestyle=style)
    axes.set(xlabel="epochs of fine-tuning", ylabel="accuracy on the test set (%)")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.grid(axis="y", color="#e5e5e5", lw=0.7)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
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
