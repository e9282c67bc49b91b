"""Tables for a terminal: a plan's cost, a test's outcome, a benchmark's figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

Result = Mapping[str, Any]


def table(*head: str) -> Table:
    """Words on the left, numbers on the right."""
    shown = Table(*head, box=box.SIMPLE_HEAD, show_header=any(head), pad_edge=False)
    for column in shown.columns[1:]:
        column.justify = "right"
    return shown


def bench_table(result: Result) -> Group:
    """Milliseconds a step by network."""
    made, models = result["environment"], result["models"]
    shown, found = table("", *models), list(models.values())
    shown.add_row("GReg-1, alone", *(f"{each['ms']:.2f} ms" for each in found), style="bold")
    shown.add_row("images a second", *(f"{each['images_per_second']:,.0f}" for each in found))
    shown.add_row("without the penalty", *(f"{each['ms_without_penalty']:.2f} ms" for each in found))
    shown.add_row("the penalty's share", *(share(each["penalty_share"]) for each in found))
    for count in sorted({count for each in found for count in each.get("ms_parallel", {})}):
        times = [each.get("ms_parallel", {}).get(count) for each in found]
        shown.add_row(f"{count} at once, each", *("" if ms is None else f"{ms:.2f} ms" for ms in times), style="bold")
    shown.add_row("pruned at 0.9, fine-tuning", *(f"{each['pruned']['ms']:.2f} ms" for each in found))
    shown.add_row("computed in", *(each["choice"].rpartition(":")[0] or each["choice"] for each in found))
    where = f"{made['device_name']}, torch {made['torch']}, {result['data']}, batch {result['batch']}"
    steps = f"{result['steps']} steps a measurement"
    return Group(
        Text("Time of a training step", style="bold"), Text(f"{where}, {steps}"), shown, *reading(result.get("loader"))
    )


def share(part: float) -> str:
    """
    >>> share(0.0123), share(-0.02)
    ('1.2 %', 'too little to measure')
    """
    return f"{100 * part:.1f} %" if part > 0 else "too little to measure"


def reading(loader: Result | None) -> list[Text]:
    """How fast large images come."""
    found = [(decode, loader[decode]) for decode in ("cpu", "gpu") if decode in loader] if loader else []
    return [
        Text(f"Large images: {speed:,.0f} a second, {loader['workers']} workers, decoded on the {decode.upper()}")
        for decode, speed in found
        if loader
    ]


def plan_table(result: Result) -> Group:
    """What a plan would give, or what there is."""
    nothing = all(full == left for full, left in result["widths"].values())
    head = f"{result['model']}, input {'x'.join(map(str, result['input']))}"
    if nothing:
        shown = table("", "")
        shown.add_row("parameters", f"{result['params']['before']:,}", style="bold")
        shown.add_row("MACs", f"{result['macs']['before']:,}", style="bold")
        for layer, (full, _) in result["widths"].items():
            shown.add_row(f"filters of {layer}", str(full))
    else:
        head += f", ratios {result['ratios']}"
        shown = table("", "before", "after", "factor")
        for label, key in (("parameters", "params"), ("MACs", "macs")):
            full, left = result[key]["before"], result[key]["after"]
            shown.add_row(label, f"{full:,}", f"{left:,}", f"{full / left:.2f}×", style="bold")
        for layer, (full, left) in result["widths"].items():
            shown.add_row(f"filters of {layer}", str(full), str(left), f"{full / left:.2f}×")
    left_alone = [Text(f"{layer} is left alone: {reason}") for layer, reason in result["skipped"].items()]
    return Group(Text(head, style="bold"), shown, *left_alone)


def eval_table(result: Result) -> Group:
    """What `growprune eval` found."""
    shown = table("", "")
    shown.add_row(f"accuracy on {result['images']:,} test images", f"{result['accuracy']:.2f} %", style="bold")
    shown.add_row("parameters", f"{result['params']:,}")
    shown.add_row("MACs an image", f"{result['macs']:,}")
    shown.add_row("zeros among the parameters", f"{100 * result['zeros']:.1f} %")
    return Group(Text(f"{result['model']} on {result['data']}", style="bold"), shown)
