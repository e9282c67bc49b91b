"""`growprune measure`: what a network costs, and what a plan would make of it, before any training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from growprune import models
from growprune.asking import Measure, read_shape
from growprune.config import amounts
from growprune.errors import GrowpruneError
from growprune.grouping import build
from growprune.measurement import measure, speedup, weight_sparsity
from growprune.pruner import Pruner
from growprune.ratios import Ratios, read, write
from growprune.recipe import ignored, ratios
from growprune.run import as_measured
from growprune.running import switched
from growprune.schedule import OneShot
from growprune.weights import restore


def plan(asked: Measure) -> dict[str, Any]:
    """The network as it is and as it would be, measured: the filters are removed from it, whatever its weights are."""
    if asked.global_ratio is not None and asked.weights is None:
        raise GrowpruneError("--global-ratio: which filters are least hangs on the weights: give --weights")
    known = {"model": "resnet56", "input": "3x32x32"} | as_measured(asked.weights) | given(asked)
    name, shape = known["model"], read_shape(known["input"])
    model = switched(network(name, known.get("num_classes"), asked.weights), training=False)
    example = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    try:
        before = after = measure(model, example)
    except GrowpruneError as error:
        asked_for = f"--model {name} --input {'x'.join(map(str, shape))}"
        raise GrowpruneError(f"{asked_for}: {error}; {advice(model, shape)}") from error
    zeros = dict.fromkeys(("before", "after"), weight_sparsity(model))
    spec: Ratios = ratios(asked)
    widths, skipped, stays = {}, {}, {}
    try:
        pruner = Pruner(
            model,
            example,
            OneShot(),
            ratios=spec,
            coupled=asked.coupled,
            ignore=ignored(asked),
            multiple=asked.multiple,
        )
        smaller = pruner.compact()
        after, zeros["after"] = measure(smaller, example), weight_sparsity(smaller)
        widths = pruner.widths()
        spec, skipped, stays = pruner.spec, pruner.skipped, pruner.stays
    except GrowpruneError:
        if amounts(asked):  # without a plan, that nothing can be pruned is no error
            raise
        stays = build(model, example, coupled=asked.coupled, ignore=ignored(asked)).stays
    return {
        "model": name,
        "input": list(shape),
        "ratios": write(read(spec)),
        "multiple": asked.multiple,
        "params": {"before": before.params, "after": after.params},
        "macs": {"before": before.macs, "after": after.macs},
        "speedup": speedup(before, after),
        "sparsity": 1 - after.params / before.params,
        **({"zeros": zeros} if any(zeros.values()) else {}),
        "widths": widths,
        "skipped": skipped,
        "stays": stays,
    }


def advice(model: nn.Module, failed: tuple[int, ...]) -> str:
    """The shape to give instead of one that failed, as far as the first convolution tells.

    >>> advice(nn.Conv2d(1, 8, 3), (3, 28, 28))
    'its first convolution takes 1 channel: give --input 1x28x28'
    >>> advice(nn.Conv1d(2, 8, 3), (3, 32, 32))
    'its first convolution takes 2 channels: give --input 2x32'
    >>> advice(nn.Conv2d(3, 8, 64), (3, 32, 32))
    'give the shape of one of its inputs with --input (channels, height, width)'
    """
    first = next((each for each in model.modules() if isinstance(each, _ConvNd) and each.in_channels), None)
    if first is not None:
        sides = len(first.kernel_size)
        wanted = (first.in_channels, *(failed[1:] if len(failed) == 1 + sides else [SIDE] * sides))
        if wanted != failed:
            channels = f"{wanted[0]} channel{'s' * (wanted[0] != 1)}"
            return f"its first convolution takes {channels}: give --input {'x'.join(map(str, wanted))}"
    return "give the shape of one of its inputs with --input (channels, height, width)"


SIDE = 32
"""Of an image, where nothing is said of it."""


def given(asked: Measure) -> dict[str, Any]:
    """What is said of the network itself."""
    return {key: v for key in ("model", "input", "num_classes") if (v := getattr(asked, key)) is not None}


def network(name: str, classes: int | None, weights: str | None) -> nn.Module:
    models.known(name)
    if weights is not None:
        return restore(name, classes, weights)
    with models.in_one_line(name):
        try:
            return models.create(name, classes)
        except TypeError as error:
            if "num_classes" not in str(error):
                raise
            what = f"{name} needs it" if classes is None else f"{name} takes no such number; leave it out"
            raise GrowpruneError(f"--num-classes: {what}") from error
