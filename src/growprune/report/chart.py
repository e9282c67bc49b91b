"""Accuracy against speed-up, a line a method: of runs beside each other, or of ours beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from textwrap import fill

Point = tuple[float, float, float | None]
"""Speed-up, mean accuracy, and its deviation if there were several runs."""
MARKERS = "os^D"
MOST, WIDTH = 4, 60
"""Lines that a legend within the picture can name, and how many characters wide it is."""
NONE: Point = (math.nan, math.nan, None)
FAINT = {"linestyle": "--", "linewidth": 1.1, "alpha": 0.65, "markerfacecolor": "white"}  # others'
STRONG = {"linestyle": "-", "linewidth": 2.0}  # ours


@dataclass(frozen=True)
class Panel:
    """One network: by method others' lines, drawn faintly, and ours; None where nothing was run."""

    title: str
    theirs: Mapping[str, Sequence[Point | None]]
    ours: Mapping[str, Sequence[Point | None]]


def plain(text: str) -> str:
    """As it is, in lines of bearable length: matplotlib takes what stands between two dollars for mathematics."""
    return fill(text, WIDTH).replace("$", r"\$")


def chart(panels: Sequence[Panel]) -> bytes:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    from growprune.report.figures import METHOD_COLOURS, bare, canvas, png

    looks = [(colour, marker) for marker in MARKERS for colour in METHOD_COLOURS]
    named = [[plain(label) for label in (*panel.theirs, *panel.ours)] for panel in panels]
    beneath = 0.2 * max(sum(label.count("\n") + 1 for label in labels) for labels in named)
    below = max(map(len, named)) > MOST
    figure = canvas(5.2 * len(panels), 4.2 + beneath * below)
    heights = (4.2, beneath) if below else (4.2,)
    parts = figure.subplots(len(heights), len(panels), squeeze=False, height_ratios=heights)
    for axes, legend, panel in zip(parts[0], parts[-1], panels, strict=True):
        for lines, style in ((panel.theirs, FAINT), (panel.ours, STRONG)):
            for (label, points), (colour, marker) in zip(lines.items(), cycle(looks), strict=False):
                x, y, spread = zip(*(each or NONE for each in points), strict=True)
                width = [math.nan if each is None else each for each in spread]
                axes.errorbar(
                    x, y, width, label=plain(label), color=colour, capsize=2, marker=marker, markersize=5, **style
                )
        axes.set(xlabel="speed-up", ylabel="accuracy on the test set (%)", xscale="log")
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1, 1.5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.grid(axis="y", color="#e5e5e5", lw=0.7)
        every = (*panel.theirs.values(), *panel.ours.values())
        at = [point[0] for points in every for point in points if point is not None]
        if at and max(at) < 1.5 * min(at):
            axes.set_xlim(min(at) / 1.5, max(at) * 1.5)
        axes.set_title(plain(panel.title), loc="left", fontsize=11, fontweight="bold")
        legend.legend(
            *axes.get_legend_handles_labels(), frameon=False, fontsize=9, loc=f"{'upper' if below else 'lower'} left"
        )
        bare(axes)
        if below:
            legend.axis("off")
    return png(figure)
