"""Tables for a terminal: a plan's cost, a test's outcome, a benchmark's figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from growprune.report import amount

Result = Mapping[str, Any]


def table(*head: str) -> Table:
    """Words on the left, numbers on the right."""
    shown = Table(*head, box=box.SIMPLE_HEAD, show_header=any(head), pad_edge=False)
    for column in shown.columns[1:]:
        column.justify = "right"
    return shown


def bench_table(result: Result) -> Group:
    """Milliseconds a step by network; or how it is fed."""
    if "fed" in result:
        return fed_table(result)
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
    return Group(Text("Time of a training step", style="bold"), Text(f"{where}, {steps}"), shown)


def share(part: float) -> str:
    """
    >>> share(0.0123), share(-0.02)
    ('1.2 %', 'too little to measure')
    """
    return f"{100 * part:.1f} %" if part > 0 else "too little to measure"


def fed_table(result: Result) -> Group:
    """Images a second by where they come from, a table for each network: of the step, of the loader, of both."""
    made, fed = result["environment"], result["fed"]
    workers = max(found["workers"] for found in fed.values())
    where = f"{made['device_name']}, torch {made['torch']}, workers: {workers}, batch {result['batch']}"
    return Group(
        Text("Does the loader keep the step fed?", style="bold"),
        Text(f"{where}, {result['steps']} steps a measurement"),
        Text(str(result["data"])),
        *(part for name, found in fed.items() for part in (Text(f"\n{name}"), fed_by(found))),
    )


SOURCES = {"cpu": "JPEGs on the CPU", "gpu": "JPEGs on the GPU", "kept": "kept on the GPU"}


def fed_by(found: Result) -> Table:
    columns = [found[source] for source in SOURCES if source in found]
    shown = table("images a second", *(label for source, label in SOURCES.items() if source in found))
    for label, key, style in (
        ("the step alone", "step", "bold"),
        ("the loader alone", "loader", ""),
        ("the step, so fed", "fed", "bold"),
    ):
        shown.add_row(label, *(f"{each[key]:,.0f}" for each in columns), style=style)
        if key != "step":
            shown.add_row("  of the step's rate", *(f"{100 * each[f'{key}_share']:.0f} %" for each in columns))
    return shown


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
        head += f", {amount(result['ratios'])}"
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
