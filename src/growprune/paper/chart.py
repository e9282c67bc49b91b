"""Accuracy against speed-up, ours beside the paper's: the picture of what table 1 and OBD's have in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Points = list[tuple[float, float, float]]
"""Speed-up, mean accuracy and its deviation over the runs."""


@dataclass(frozen=True)
class Panel:
    """One network: by method what the paper has, and what there is here."""

    title: str
    theirs: dict[str, Points]
    ours: dict[str, Points]


def chart(panels: Sequence[Panel]) -> bytes:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    from growprune.report.figures import METHOD_COLOURS, bare, canvas, png

    figure = canvas(5.2 * len(panels), 4.2)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for kind, style in ((panel.theirs, "paper"), (panel.ours, "here")):
            for (method, points), colour in zip(kind.items(), METHOD_COLOURS, strict=False):
                x, y, spread = zip(*points, strict=True) if points else ((), (), ())
                faint = style == "paper"
                axes.errorbar(
                    x, y, spread, label=f"{method}, {style}", color=colour, capsize=2, marker="o", markersize=5,
                    linestyle="--" if faint else "-", linewidth=1.1 if faint else 2, alpha=0.65 if faint else 1,
                    markerfacecolor="white" if faint else colour,
                )  # fmt: skip
        axes.set(xlabel="speed-up", ylabel="accuracy on the test set (%)", xscale="log")
        axes.xaxis.set_major_locator(LogLocator(base=2))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.grid(axis="y", color="#e5e5e5", lw=0.7)
        axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
        axes.legend(frameon=False, fontsize=9, loc="lower left")
        bare(axes)
    return png(figure)
