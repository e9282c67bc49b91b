"""A training or pruning run as a table, as figures and as one HTML page: from its result and its notes alone.

What is null in them, or not there, is left out: a base network has no removal, single weights have no widths.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from growprune.report import (
    ACCURACIES,
    amount,
    costs,
    document,
    duration,
    html_figure,
    html_table,
    minus,
    text_table,
)

Result = Mapping[str, Any]
Note = Mapping[str, Any]
Rows = list[tuple[str, ...]]

METHODS = {"GReg1": "GReg-1", "GReg2": "GReg-2", "OneShot": "one-shot pruning"}
CAPTIONS = {
    "history": "Accuracy on the test images and mean training loss.",
    "penalty": "The penalty λ on the pruned, and the mean magnitude of the kept and the pruned weights: a thin line a "
    "layer, cut off at a millionth.",
    "widths": "Filters of each layer, before and after.",
}
PHASES = "The shading is the run's phases; where units are removed, a vertical line is what that costs."
HEADS = {
    "ms": "ms a step",
    "kernels": "layers with own kernels",
    "decode": "JPEGs decoded on",
    "cpu": "images a second by the CPU",
    "gpu": "by the GPU",
}
NONE = "–"


def table(result: Result) -> RenderableType:
    """The outcome for a terminal."""
    tables = [text_table(rows, label(result, "final")) for rows in (accuracies(result), sizes(result)) if rows[1:]]
    return Group(Text(headline(result), style="bold"), *tables, *(Text(f"{line}\n") for line in story(result)))


def figures(result: Result, notes: Sequence[Note]) -> dict[str, bytes]:
    """The figures that have something to show, as PNG, by name."""
    from growprune.report import figures as draw

    found = {
        "history": draw.history(notes, result["accuracy"].get("base")),
        "penalty": draw.penalty(notes),
        "widths": draw.widths(result["widths"]) if result.get("widths") else None,
    }
    return {name: png for name, png in found.items() if png is not None}


def page(result: Result, notes: Sequence[Note], drawn: Mapping[str, bytes] | None = None) -> str:
    """One HTML file that needs no other; `drawn`: the figures, if they were drawn already."""
    told = story(result)
    parts = [f'<p class="lead">{html.escape(told[0])}</p>', *(f"<p>{html.escape(line)}</p>" for line in told[1:])]
    parts += [html_table(rows) for rows in (accuracies(result), sizes(result)) if rows[1:]]
    drawn = figures(result, notes) if drawn is None else drawn
    told_below = CAPTIONS | ({"history": f"{CAPTIONS['history']} {PHASES}"} if result["schedule"] is not None else {})
    parts += [html_figure(name, png, told_below[name]) for name, png in drawn.items()]
    for title, rows in (
        ("Settings", settings(result)),
        ("Chosen on this machine", choices(result)),
        ("Environment", [("where it ran", ""), *((key, shown(v)) for key, v in result["environment"].items())]),
    ):
        if rows[1:]:
            parts += [f"<h2>{title}</h2>", html_table(rows, "facts")]
    parts += ["<h2>Repeat it</h2>", f"<p>{repeat(result)}</p>"]
    parts.append(f"<footer>growprune {html.escape(result['environment']['growprune'])}</footer>")
    return document(headline(result), parts)


# -- in words --------------------------------------------------------------------------------------------------------


def headline(result: Result) -> str:
    """What the run came to, in one line: "resnet56 on cifar10: 2.55× fewer MACs, 93.4 % → 93.1 %"."""
    accuracy = result["accuracy"]
    came = percent(accuracy["final"]) + (" accuracy" if accuracy["base"] is None else "")
    if accuracy["base"] is not None:
        came = f"{percent(accuracy['base'])} → {came}"
    return f"{result['model']} on {result['data']}: {', '.join([*gain(result), came])}"


def gain(result: Result) -> list[str]:
    if result["schedule"] is None:
        return []
    if result["granularity"] == "filter":
        return [f"{result['speedup']:.2f}× fewer MACs"]
    return [f"{percent(100 * result['sparsity'])} of the weights zero"]


def story(result: Result) -> list[str]:
    """What happened and what one must know to read the numbers, a paragraph each."""
    environment, images = result["environment"], result["images"]
    where = f"{result['steps']:,} steps in {duration(result['seconds'])} on {environment['device_name']}"
    where += f" ({environment['device']}{times(environment.get('world') or 1)}), seed {result['seed']}."
    caution = (
        f"Accuracy is measured on {images['test']:,} test images: one of them is {100 / images['test']:.2g} points. "
        f"'{ACCURACIES['best']}' is picked on those same images, so compare the last one."
    )
    if result["schedule"] is None:
        return [f"Trained on {images['train']:,} images. {where}", caution]
    return [f"{removed(result)} {course(result)}", f"{where} {caution}"]


def times(world: int) -> str:
    return f" × {world} processes" if world > 1 else ""


def removed(result: Result) -> str:
    """Who took what, chosen how."""
    name, widths = result["schedule"]["name"], result["widths"].values()
    what = f"{percent(100 * result['sparsity'])} of the weights"
    if widths:
        full, left = (sum(layer[i] for layer in widths) for i in (0, 1))
        units = "filters" if result["granularity"] == "filter" else "weights"
        what = f"{full - left:,} of {full:,} {units} in {sum(a != b for a, b in widths)} layers"
    how = [f"criterion {result['criterion']}", amount(result)]
    if name != "OneShot" and result["granularity"] == "filter":
        how.append(f"penalty on the {result['scope']}")
    if name != "OneShot" and result.get("prune_norm") == "fixed":
        how.append("batch norm fixed meanwhile")
    did = "removed" if result["granularity"] == "filter" else "set to zero"
    said = f"{METHODS.get(name, name)} {did} {what} ({', '.join(how)})."
    return said[0].upper() + said[1:]


HURTS = 5.0
"""Points that removal may cost before it is said how it costs less."""
HINT = "where batch norm follows, --scope path makes removal cost little"


def course(result: Result) -> str:
    """How accuracy went through removal and fine-tuning, as far as it was measured."""
    accuracy, epochs, said = result["accuracy"], result.get("epochs") or {}, []
    before, after, final = (accuracy[key] for key in ("before_removal", "after_removal", "final"))
    if before is not None and after is not None:
        same = percent(before) == percent(after)
        went = (
            f"left accuracy at {percent(after)}"
            if same
            else f"took accuracy from {percent(before)} to {percent(after)}"
        )
        pushed = result["schedule"]["name"] != "OneShot" and result["granularity"] == "filter"
        if pushed and result["scope"] == "filter" and before - after > HURTS:
            went += f" ({HINT})"
        said.append(f"removal itself {went}")
    if final is not None:
        count = epochs.get("finetune")
        tuned = f"fine-tuning for {count:g} epoch{'s' * (count != 1)}" if count else "the run"
        said.append(f"{tuned} ended at {percent(final)}{against(final, accuracy['base'])}")
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def against(final: float, base: float | None) -> str:
    """The distance from the base network in words.

    >>> against(93.1, 93.4), against(93.4, 93.4), against(93.4, None)
    (', 0.3 points below the base network', ', as the base network', '')
    """
    if base is None:
        return ""
    points = round(final - base, 2)
    if not points:
        return ", as the base network"
    return f", {abs(points):g} points {'below' if points < 0 else 'above'} the base network"


def repeat(result: Result) -> str:
    """HTML."""
    command = html.escape(str(result["command"]))
    return (
        "<code>config.json</code> beside this page holds every setting of the run; "
        f"<code>growprune {command} --config config.json --out NEW</code> runs it again. "
        "<code>growprune resume RUN</code>, RUN being this folder, finishes it from the last checkpoint if it was "
        "interrupted. <code>metrics.jsonl</code> and <code>result.json</code> hold the numbers shown here."
    )


# -- as tables, their head first -------------------------------------------------------------------------------------


def accuracies(result: Result) -> Rows:
    """Those that were measured, and how far each is from the base network's."""
    accuracy, digits = result["accuracy"], 2 if result["images"]["test"] >= 2_000 else 1
    base = accuracy["base"]
    rows: Rows = [("accuracy on the test images", "") + (("against base",) if base is not None else ())]
    for key in ACCURACIES:
        if (value := accuracy.get(key)) is not None:
            row = (label(result, key), percent(value, digits))
            apart = "" if key == "base" or base is None else signed(value - base, digits)
            rows.append((*row, apart) if base is not None else row)
    return rows


def label(result: Result, key: str) -> str:
    return "trained" if key == "final" and result["schedule"] is None else ACCURACIES[key]


def sizes(result: Result) -> Rows:
    """What the network costs; before and after, where it was pruned."""
    if result["schedule"] is None:
        rows: Rows = [("cost", "")]
        rows += [
            (name, f"{result[key]['after']:,}") for name, key in (("parameters", "params"), ("MACs an image", "macs"))
        ]
        if latency := result["latency"]:
            rows.append((f"time of a forward pass, batch {latency['batch']}", f"{1e3 * latency['after']:.2f} ms"))
        return rows
    batch = f", time with batch {result['latency']['batch']}" if result["latency"] else ""
    rows = costs(result, f"cost{batch}")
    if result["granularity"] != "filter":
        rows.append(("weights at zero", "", percent(100 * result["sparsity"]), ""))
    return rows


def settings(result: Result) -> Rows:
    images, schedule = result["images"], result["schedule"]
    rows: Rows = [("setting", "")]
    rows += [("model", shown(result["model"])), ("data", shown(result["data"]))]
    rows.append(("images", f"{images['train']:,} to train on, {images['test']:,} to test on"))
    if schedule is not None:
        fields = ", ".join(f"{k} {shown(v)}" for k, v in schedule.items() if k != "name" and v is not None)
        rows.append(("schedule", METHODS.get(schedule["name"], schedule["name"]) + (f": {fields}" if fields else "")))
        rows += [(key, shown(result[key])) for key in ("criterion", "granularity", "scope", "ratios")]
    rows += [(f"epochs of {stage}", shown(n)) for stage, n in (result.get("epochs") or {}).items()]
    return [*rows, ("steps", f"{result['steps']:,}"), ("seed", shown(result["seed"]))]


def choices(result: Result) -> Rows:
    """What the measurement at the start picked, a row a stage; one for large images."""
    found = result.get("choices") or {}
    keys = list(dict.fromkeys(key for choice in found.values() for key in choice))
    head = ("stage", *(HEADS.get(key, key) for key in keys))
    return [head, *((stage, *(shown(choice.get(key)) for key in keys)) for stage, choice in found.items())]


def signed(value: float, digits: int) -> str:
    """
    >>> signed(-0.291, 2), signed(0.3, 1), signed(-0.04, 1)
    ('−0.29', '+0.3', '0.0')
    """
    rounded = round(value, digits)
    return minus(f"{rounded:+.{digits}f}") if rounded else f"{0:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    return NONE if value is None else f"{value:.{digits}f} %"


def shown(value: Any) -> str:
    """
    >>> shown(None), shown(True), shown(0.0001), shown(5.123), shown("bf16")
    ('–', 'yes', '0.0001', '5.123', 'bf16')
    """
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
