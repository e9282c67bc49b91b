"""What people see of a run: progress while it goes, then a table, figures and one HTML page.

Everything here reads a run's result and notes; nothing of torch is imported, and matplotlib only when drawing.
"""

from __future__ import annotations

import base64
import html
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

GREG, ONESHOT, LONGER = "GReg-1", "one-shot", "one-shot, longer"

ACCURACIES = {
    "base": "base network",
    "before_removal": "before removal",
    "after_removal": "after removal",
    "final": "fine-tuned",
    "best": "best on the way",
}


# -- the comparison, as text -----------------------------------------------------------------------------------------


def comparison(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Rows of the table of methods, its head first."""
    ways = {GREG: result, ONESHOT: result["baseline"]} | ({LONGER: result["longer"]} if "longer" in result else {})
    rows: list[tuple[str, ...]] = [("accuracy on held-out images", *ways)]
    for key, label in ACCURACIES.items():
        rows.append((label, *(f"{way['accuracy'][key]:.1f} %" for way in ways.values())))
    for key, label in (("prune", "steps of pruning"), ("finetune", "steps of fine-tuning")):
        rows.append((label, *(f"{way['phases'][key]:,}" for way in ways.values())))
    return rows


def costs(result: Mapping[str, Any], head: str = "cost, whichever the way") -> list[tuple[str, ...]]:
    """Rows of the table of costs, its head first."""
    params, macs, latency = result["params"], result["macs"], result["latency"]
    factor = params["before"] / params["after"]
    rows: list[tuple[str, ...]] = [
        (head, "before", "after", "factor"),
        ("parameters", f"{params['before']:,}", f"{params['after']:,}", f"{factor:.2f}×"),
        ("MACs an image", f"{macs['before']:,}", f"{macs['after']:,}", f"{result['speedup']:.2f}×"),
    ]
    if latency:
        times = (f"{1e3 * latency[k]:.2f} ms" for k in ("before", "after"))
        rows.append(("time of a forward pass", *times, f"{latency['ratio']:.2f}×"))
    return rows


def remarks(result: Mapping[str, Any]) -> list[str]:
    """What one must know to read the numbers."""
    schedule, images, layers = result["schedule"], result["images"], result["widths"].values()
    before, after = (sum(layer[i] for layer in layers) for i in (0, 1))
    whole = {"path": "the whole path of each pruned filter", "filter": "the weights of each pruned filter"}
    return [
        f"The same {before - after} of {before} filters went either way (least L1 norm, ratio {result['ratios']}), and "
        f"fine-tuning was the same, batch for batch. {GREG} also trains while it prunes; --longer adds one-shot "
        "pruning with as many steps in all.",
        f"Schedule, scaled to the demo: λ grows by {schedule['delta_lambda']:g} every {schedule['ku']} steps to "
        f"{schedule['tau']:g}, then holds for {schedule['ks']} (the paper: 0.0001 every 10 steps, then 5,000). The "
        f"penalty acts on {whole[result['scope']]} (scope '{result['scope']}'; the paper's is 'filter').",
        f"Data: {result['data']}, {images['train']:,} images to train on, {images['test']:,} held out; seed "
        f"{result['seed']}. One image is {100 / images['test']:.2f} points: differences below 1 point say little. "
        "While filters shrink, and at removal, batch norm's statistics are estimated anew for the test.",
        f"Forward passes: batch {result['latency']['batch']}, {result['environment']['device']}, "
        f"{result['environment']['threads']} thread.",
    ]


def table(result: Mapping[str, Any]) -> RenderableType:
    """The comparison for a terminal."""
    tables = (text_table(rows, ACCURACIES["final"]) for rows in (comparison(result), costs(result)))
    return Group(*tables, *(Text(f"{remark}\n") for remark in remarks(result)))


def amount(result: Mapping[str, Any]) -> str:
    """How much goes, as `ratios.write` has it, in words; older results know of no multiple.

    >>> [amount({"ratios": ratios}) for ratios in ("0.5", "2.5x", "2.5x by stage")]
    ['ratios 0.5', 'speed-up 2.5×', 'speed-up 2.5× by stage']
    >>> amount({"ratios": "0.5", "multiple": 1}), amount({"ratios": "0.5", "multiple": 8})
    ('ratios 0.5', 'ratios 0.5 in multiples of 8')
    """
    times = re.fullmatch(r"([\d.e+]+)x( by stage)?", result["ratios"])
    said = f"speed-up {times[1]}×{times[2] or ''}" if times else f"ratios {result['ratios']}"
    multiple = result.get("multiple") or 1
    return f"{said} in multiples of {multiple}" if multiple > 1 else said


def mean(values: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """The mean, and of several their deviation (divided by n) and how many they are.

    >>> mean([93.0]), mean([93.0, 93.2]), mean([2.5], 2, "×"), mean([])
    ('93.00', '93.10 ± 0.10 (2)', '2.50×', '')
    """
    if not values:
        return ""
    spread = f" ± {statistics.pstdev(values):.{digits}f} ({len(values)})" if values[1:] else ""
    return f"{statistics.mean(values):.{digits}f}{unit}{spread}"


def minus(number: str) -> str:
    """As people read it, in tables and words; what programs read keeps the hyphen.

    >>> minus("-0.29"), minus("+0.30")
    ('−0.29', '+0.30')
    """
    return number.replace("-", "−")


class Whole(Table):
    """A table that cuts no text: a terminal folds it, in a pipe or file lines are as long as they must be."""

    def __init__(self, *head: str) -> None:
        super().__init__(box=box.SIMPLE_HEAD, show_header=any(head), header_style="bold", pad_edge=False)
        for at, name in enumerate(head):
            self.add_column(Text(name), justify="right" if at else "left", overflow="fold")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not options.is_terminal:
            needed = self.__rich_measure__(console, options.update(width=UNBOUND)).maximum
            options = options.update(width=max(options.max_width, needed))
        yield from super().__rich_console__(console, options)


UNBOUND = 100_000
"""Characters in a line; rich needs a number."""


def text_table(rows: Sequence[tuple[str, ...]], strong: str = "") -> Whole:
    """Rows for a terminal, their head first; the row that begins with `strong` stands out. Cells are plain text."""
    shown = Whole(*rows[0])
    for row in rows[1:]:
        shown.add_row(*map(Text, row), style="bold" if row[0] == strong else "")
    return shown


@dataclass(frozen=True)
class Fitted:
    """Rows for a terminal, their head first, of any width: labels and heads are folded, cells are not. Columns that do
    not fit beside the labels follow in a table below, with the labels again."""

    rows: Sequence[tuple[str, ...]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        columns = list(zip(*self.rows, strict=True))
        widths = [max(map(len, [*head.split(), *cells])) for head, *cells in columns]
        left = room = options.max_width - min(LABELS, widths[0]) - EDGES
        parts: list[list[int]] = [[]]
        for number, width in list(enumerate(widths))[1:]:
            if parts[-1] and width + BETWEEN > left:
                parts.append([])
                left = room
            parts[-1].append(number)
            left -= width + BETWEEN
        for part in parts:
            shown = text_table([(row[0], *(row[number] for number in part)) for row in self.rows])
            for column, number in zip(shown.columns[1:], part, strict=True):
                column.width = widths[number]
            beside = sum(widths[number] + BETWEEN for number in part)
            shown.columns[0].max_width = max(widths[0], options.max_width - EDGES - beside)
            yield shown


LABELS, EDGES, BETWEEN = 24, 2, 3
"""Characters: what long labels have at least, a table's two edges, what stands before a column."""


DAYS = 100
"""Hours from which a time is told in days."""


def duration(seconds: float) -> str:
    """
    >>> duration(8.44), duration(59.97), duration(245), duration(11_130), duration(864_000)
    ('8.4 s', '1 min 00 s', '4 min 05 s', '3 h 05 min', '10 days')
    """
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < DAYS else f"{hours / 24:.0f} days"


# -- figures and the page --------------------------------------------------------------------------------------------

CAPTIONS = {
    "course": "Accuracy on the held-out images through training, pruning, removal (vertical drops) and fine-tuning. "
    "The shading is GReg-1's phases; the strip below shows everyone's.",
    "separation": "Under the growing penalty the filters that are to go shrink, and the kept ones take over. "
    "Top right: cut off at a millionth.",
    "widths": "The first convolution of each residual block loses filters; what residual additions tie together stays.",
}


def draw(result: Mapping[str, Any], notes: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """The figures of a run, as PNG, by name."""
    from growprune.report import figures

    return {
        "course": figures.course(notes),
        "separation": figures.separation(notes),
        "widths": figures.widths(result["widths"]),
    }


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2.5rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } table { border-collapse: collapse; margin: 1.2rem 0 }
th, td { padding: .3rem .9rem; text-align: right; border-bottom: 1px solid #e5e5e5 }
th:first-child, td:first-child { text-align: left; padding-left: 0 } th { border-color: #888 }
.facts th, .facts td { text-align: left; vertical-align: top; overflow-wrap: anywhere } h2 { font-size: 1.2rem }
.runs { display: block; overflow-x: auto } .runs td:not(:first-child) { white-space: nowrap }
.runs td:first-child { min-width: 14rem } .runs td, .runs th { padding-right: .4rem; padding-left: .4rem }
.lead { font-size: 1.1rem } code { background: #f3f3f3; padding: .1rem .3rem; border-radius: 3px }
figure { margin: 2rem 0 } img { max-width: 100%; height: auto } figcaption, footer { color: #666; font-size: .9rem }
"""


def page(result: Mapping[str, Any], figures: Mapping[str, bytes]) -> str:
    """One HTML file with the figures inside."""
    title = f"growprune demo: {result['speedup']:.1f}× fewer MACs"
    parts = [html_table(comparison(result)), html_table(costs(result))]
    parts += [f"<p>{html.escape(remark)}</p>" for remark in remarks(result)]
    parts += [html_figure(name, png, CAPTIONS[name]) for name, png in figures.items()]
    made = ", ".join(f"{key} {result['environment'][key]}" for key in ("growprune", "torch", "python", "device_name"))
    parts.append(f"<footer>{html.escape(made)}; {result['seconds']:.0f} s in all</footer>")
    return document(title, parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A whole HTML page of parts that are HTML already; the title is text, and is the heading too."""
    title = html.escape(title)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    body = "\n".join([f"<h1>{title}</h1>", *parts])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def html_figure(name: str, png: bytes, caption: str) -> str:
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<figure><img alt="{name}" src="{source}"><figcaption>{html.escape(caption)}</figcaption></figure>'


def html_table(rows: Sequence[tuple[str, ...]], kind: str = "") -> str:
    """Rows as HTML, their head first; of kind "facts", the cells are words, not numbers."""
    lines = []
    for index, row in enumerate(rows):
        tag = "td" if index else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return f"<table{f' class={kind}' if kind else ''}>\n" + "\n".join(lines) + "\n</table>"
