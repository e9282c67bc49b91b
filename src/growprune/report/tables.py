"""Tables for a terminal: a plan's cost, a test's outcome, a benchmark's figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.text import Text

from growprune.groups import by_reason
from growprune.report import Whole, amount

Result = Mapping[str, Any]
SHOWN = 4
"""Names of layers in a line."""
ZEROS = "zeros among the weights"
"""Of convolutions and linear layers."""


def bench_table(result: Result) -> Group:
    """Milliseconds a step by network; or how it is fed."""
    if "fed" in result:
        return fed_table(result)
    made, models = result["environment"], result["models"]
    shown, found = Whole("", *models), list(models.values())
    shown.add_row("GReg-1, alone", *(f"{each['ms']:.2f} ms" for each in found), style="bold")
    shown.add_row("images a second", *(f"{each['images_per_second']:,.0f}" for each in found))
    shown.add_row("without the penalty", *(f"{each['ms_without_penalty']:.2f} ms" for each in found))
    shown.add_row("the penalty's share", *(share(each, result["steps"]) for each in found))
    for count in sorted({count for each in found for count in each.get("ms_parallel", {})}):
        times = [each.get("ms_parallel", {}).get(count) for each in found]
        shown.add_row(f"{count} at once, each", *("" if ms is None else f"{ms:.2f} ms" for ms in times), style="bold")
    shown.add_row("pruned at 0.9, fine-tuning", *(f"{each['pruned']['ms']:.2f} ms" for each in found))
    shown.add_row("computed in", *(each["choice"].rpartition(":")[0] or each["choice"] for each in found))
    where = f"{made['device_name']}, torch {made['torch']}, {result['data']}, batch {result['batch']}"
    steps = f"{result['steps']} steps a measurement"
    return Group(Text("Time of a training step", style="bold"), Text(f"{where}, {steps}"), shown)


MANY, SOME = 20, 3
"""Steps a measurement from which on a small difference, or a rate, is worth a word."""
APART = 0.02
"""How far the penalty's share may differ between the median of the rounds' ratios and the ratio of their medians."""


def share(found: Result, steps: int) -> str:
    """The penalty's, if it was measured well enough.

    >>> alone = {"ms": 100.0, "ms_without_penalty": 98.5, "penalty_share": 0.0123}
    >>> share(alone, 20), share({**alone, "penalty_share": -0.001}, 20), share(alone, 3)
    ('1.2 %', 'too little to measure', 'too few steps to tell')
    >>> share({**alone, "ms": 123.0, "penalty_share": -0.01}, 20)
    'too few steps to tell'
    """
    part, other = found["penalty_share"], 1 - found["ms_without_penalty"] / found["ms"]
    if steps < MANY or abs(part - other) > APART:
        return "too few steps to tell"
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
        *(part for name, found in fed.items() for part in (Text(f"\n{name}"), fed_by(found, result))),
    )


SOURCES = {"cpu": "JPEGs on the CPU", "gpu": "JPEGs on the GPU", "kept": "kept on the GPU"}


def fed_by(found: Result, result: Result) -> Whole:
    columns = [found[source] for source in SOURCES if source in found]
    shown = Whole("images a second", *(label for source, label in SOURCES.items() if source in found))
    for label, key, style in (
        ("the step alone", "step", "bold"),
        ("the loader alone", "loader", ""),
        ("the step, so fed", "fed", "bold"),
    ):
        shown.add_row(label, *(f"{each[key]:,.0f}" for each in columns), style=style)
        if key != "step":
            shown.add_row("  of the step's rate", *(of_step(each, key, result) for each in columns))
    return shown


def of_step(rates: Result, key: str, result: Result) -> str:
    """A rate beside the step's own. Of a loader that brings less than a batch a second few were seen; one ten times as
    fast as the step is no longer what counts.

    >>> rates, asked = {"step": 20.0, "loader": 100.0, "loader_share": 5.0}, {"steps": 3, "batch": 64}
    >>> of_step(rates, "loader", asked), of_step({**rates, "loader_share": 259.55}, "loader", asked)
    ('500 %', 'over 1000 %')
    >>> of_step({**rates, "loader": 63.0}, "loader", asked), of_step(rates, "loader", {**asked, "steps": 2})
    ('too few to tell', 'too few to tell')
    """
    if result["steps"] < SOME or (key == "loader" and rates[key] < result["batch"]):
        return "too few to tell"
    part = rates[f"{key}_share"]
    return f"{100 * part:.0f} %" if part <= 10 else "over 1000 %"


def plan_table(result: Result) -> Group:
    """What a plan would give, or what there is."""
    nothing = all(full == left for full, left in result["widths"].values())
    head = f"{result['model']}, input {'x'.join(map(str, result['input']))}"
    zeros = [f"{100 * share:.1f} %" for share in result.get("zeros", {}).values()]
    if nothing:
        shown = Whole("", "")
        shown.add_row("parameters", f"{result['params']['before']:,}", style="bold")
        shown.add_row("MACs", f"{result['macs']['before']:,}", style="bold")
        if zeros:
            shown.add_row(ZEROS, zeros[0], style="bold")
        for layer, (full, _) in result["widths"].items():
            shown.add_row(f"filters of {layer}", str(full))
    else:
        head += f", {amount(result)}"
        shown = Whole("", "before", "after", "factor")
        for label, key in (("parameters", "params"), ("MACs", "macs")):
            full, left = result[key]["before"], result[key]["after"]
            shown.add_row(label, f"{full:,}", f"{left:,}", f"{full / left:.2f}×", style="bold")
        if zeros:
            shown.add_row(ZEROS, *zeros, style="bold")
        for layer, (full, left) in result["widths"].items():
            shown.add_row(f"filters of {layer}", str(full), str(left), f"{full / left:.2f}×")
    left_alone = [Text(f"{layer} is left alone: {reason}") for layer, reason in result["skipped"].items()]
    return Group(Text(head, style="bold"), shown, *map(Text, whole(result)), *left_alone)


def whole(result: Result) -> Iterator[str]:
    """Layers that lose no filter whatever the ratios, by why.

    >>> stays = {"a": "?", "b": "it is ignored", "c": "it reads", "d": "it reads", "e": "it reads", "f": "it reads"}
    >>> list(whole({"skipped": {"a": "?"}, "stays": stays}))
    ['1 stays whole (it is ignored): b', '4 stay whole (each since it reads): c, d, e, f']
    >>> list(whole({"skipped": {}, "stays": dict.fromkeys("abcde", "it reads")}))
    ['5 stay whole (each since it reads): a, b, c, d and 1 more']
    """
    stays = {layer: why for layer, why in result["stays"].items() if layer not in result["skipped"]}
    for why, layers in by_reason(stays).items():
        shown = ", ".join(layers[:SHOWN]) + (f" and {len(layers) - SHOWN} more" if len(layers) > SHOWN else "")
        stay = "stays whole (" if len(layers) == 1 else "stay whole (each since "
        yield f"{len(layers)} {stay}{why}): {shown}"


def eval_table(result: Result) -> Group:
    """What `growprune eval` found."""
    shown = Whole("", "")
    shown.add_row(f"accuracy on {result['images']:,} test images", f"{result['accuracy']:.2f} %", style="bold")
    shown.add_row("parameters", f"{result['params']:,}")
    shown.add_row("MACs an image", f"{result['macs']:,}")
    shown.add_row(ZEROS, f"{100 * result['zeros']:.1f} %")
    return Group(Text(f"{result['model']} on {result['data']}", style="bold"), shown)


def export_table(result: Result) -> Group:
    """What `growprune export` wrote."""
    proof, time, scale = result["proof"], result["latency"], result["normalization"]
    batch, shape = result["batch"] or "N", "x".join(map(str, result["input"]))
    opset = f", opset {result['opset']}" if "opset" in result else ""
    shown = Whole("", "")
    shown.add_row("file", f"{result['format']}{opset}, {result['bytes'] / 1e6:,.2f} MB")
    shown.add_row("parameters", f"{result['params']:,}")
    shown.add_row("zeros among them", f"{100 * result['zeros']:.1f} %")
    shown.add_row("input", f"{result['type']}, {batch} x {shape}")
    for output in result["outputs"]:
        shown.add_row("output", f"{output['type']}, {' x '.join(map(str, (batch, *output['shape'])))}")
    if proof:
        sizes = " and ".join(map(str, proof["batches"]))
        off = f"off by {proof['difference']:.0e} of the largest output" if proof["difference"] else "the same bits"
        shown.add_row(f"run by {proof['by']}, batch {sizes}", off, style="bold")
    if time:
        shown.add_row("time on one thread, torch", f"{1e3 * time['torch']:.2f} ms")
        shown.add_row("  onnxruntime", f"{1e3 * time['onnxruntime']:.2f} ms, {time['ratio']:.2f}×")
    shown.add_row("expects", result["expects"])
    for name in ("mean", "std") if scale and not result["raw"] else ():
        shown.add_row(f"  {name}", ", ".join(f"{value:.4f}" for value in scale[name]))
    said = [] if proof else [Text(result["unproved"], style="bold")]
    return Group(Text(f"{result['model']} in {result['file']}", style="bold"), shown, *said)
