"""Tables for a terminal: a plan's cost, a test's outcome, a benchmark's figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table


def bench_table(result: Mapping[str, Any]) -> Table:
    """Milliseconds a step by network."""
    made = result["environment"]
    where = f"{made['device_name']}, torch {made['torch']}, batch {result['batch']}, {result['data']}"
    shown = Table("", *result["models"], title=f"A training step: {where}", title_justify="left", box=box.SIMPLE_HEAD)
    for column in shown.columns[1:]:
        column.justify = "right"
    found = list(result["models"].values())
    shown.add_row("GReg-1, alone", *(f"{each['ms']:.2f} ms" for each in found), style="bold")
    shown.add_row("images a second", *(f"{each['images_per_second']:,.0f}" for each in found))
    shown.add_row("without the penalty", *(f"{each['ms_without_penalty']:.2f} ms" for each in found))
    shown.add_row("the penalty's share", *(f"{100 * each['penalty_share']:.1f} %" for each in found))
    for count in sorted({count for each in found for count in each.get("ms_parallel", {})}):
        times = [each.get("ms_parallel", {}).get(count) for each in found]
        shown.add_row(f"{count} at once, each", *("" if ms is None else f"{ms:.2f} ms" for ms in times), style="bold")
    shown.add_row("pruned at 0.9, fine-tuning", *(f"{each['pruned']['ms']:.2f} ms" for each in found))
    shown.add_row("computed in", *(each["choice"].rpartition(":")[0] or each["choice"] for each in found))
    for decode in ("cpu", "gpu"):
        if decode in result.get("loader", {}):
            speed, workers = result["loader"][decode], result["loader"]["workers"]
            shown.add_row(f"large images, decoded on the {decode.upper()}, {workers} workers", f"{speed:,.0f} a second")
    return shown


def plan_table(result: Mapping[str, Any]) -> Table:
    """What a plan would give."""
    shown = Table("", "before", "after", "factor", title=f"{result['model']}, plan {result['ratios']}",
                  title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)  # fmt: skip
    for column in shown.columns[1:]:
        column.justify = "right"
    for label, key in (("parameters", "params"), ("MACs", "macs")):
        full, left = result[key]["before"], result[key]["after"]
        shown.add_row(label, f"{full:,}", f"{left:,}", f"{full / left:.2f}×", style="bold")
    for layer, (full, left) in result["widths"].items():
        shown.add_row(f"filters of {layer}", str(full), str(left), f"{full / left:.2f}×")
    for layer, reason in result["skipped"].items():
        shown.add_row(f"{layer}: left alone, {reason}")
    return shown


def test_table(result: Mapping[str, Any]) -> Table:
    """What `growprune eval` found."""
    shown = Table(
        title=f"{result['model']} on {result['data']}", title_justify="left", box=box.SIMPLE_HEAD, show_header=False
    )
    shown.add_row(f"accuracy on {result['images']:,} images", f"{result['accuracy']:.2f} %", style="bold")
    shown.add_row("parameters", f"{result['params']:,}")
    shown.add_row("MACs an image", f"{result['macs']:,}")
    shown.add_row("zeros among the parameters", f"{100 * result['sparsity']:.1f} %")
    return shown
