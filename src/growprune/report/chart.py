"""Accuracy against speed-up, a line a method: of runs beside each other, or of ours beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

Point = tuple[float, float, float | None]
"""Speed-up, mean accuracy, and its deviation if there were several runs."""
MARKERS = "os^D"
MOST = 4
"""Lines that a legend within the picture can name."""
NONE: Point = (math.nan, math.nan, None)
FAINT = {"linestyle": "--", "linewidth": 1.1, "alpha": 0.65, "markerfacecolor": "white"}  # others'
STRONG = {"linestyle": "-", "linewidth": 2.0}  # ours


@dataclass(frozen=True)
class Panel:
    """One network: by method others' lines, drawn faintly, and ours; None where nothing was run."""

    title: str
    theirs: Mapping[str, Sequence[Point | None]]
    ours: Mapping[str, Sequence[Point | None]]


def chart(panels: Sequence[Panel]) -> bytes:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    from growprune.report.figures import METHOD_COLOURS, bare, canvas, png

    looks = [(colour, marker) for marker in MARKERS for colour in METHOD_COLOURS]

    many = max(len(panel.theirs) + len(panel.ours) for panel in panels) > MOST
    figure = canvas(5.2 * len(panels), 4.2)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for lines, style in ((panel.theirs, FAINT), (panel.ours, STRONG)):
            for (label, points), (colour, marker) in zip(lines.items(), cycle(looks), strict=False):
                x, y, spread = zip(*(each or NONE for each in points), strict=True)
                width = [math.nan if each is None else each for each in spread]
                axes.errorbar(x, y, width, label=label, color=colour, capsize=2, marker=marker, markersize=5, **style)
        axes.set(xlabel="speed-up", ylabel="accuracy on the test set (%)", xscale="log")
        axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1, 1.5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.grid(axis="y", color="#e5e5e5", lw=0.7)
        axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
        if many:
            figure.legend(
                *axes.get_legend_handles_labels(), loc="outside lower left", ncols=1, frameon=False, fontsize=9
            )
        else:
            axes.legend(frameon=False, fontsize=9, loc="lower left")
        bare(axes)
    return png(figure)
