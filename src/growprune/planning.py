"""`growprune measure`: what a network costs, and what a plan would make of it, before any training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from growprune import models
from growprune.errors import GrowpruneError
from growprune.groups import build
from growprune.measurement import measure, speedup
from growprune.pruner import Pruner
from growprune.ratios import Ratios, Speedup, read, write
from growprune.running import switched
from growprune.schedule import OneShot


def plan(
    name: str,
    num_classes: int | None,
    shape: tuple[int, ...],
    ratios: str | None,
    times: float | None,
    coupled: bool = False,
) -> dict[str, Any]:
    """The network as it is and as it would be, measured: the filters are removed from fresh weights."""
    model = switched(network(name, num_classes), training=False)
    example = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    try:
        before = after = measure(model, example)
    except GrowpruneError as error:
        asked_for = f"--model {name} --input {'x'.join(map(str, shape))}"
        raise GrowpruneError(
            f"{asked_for}: {error}; give the shape of one of its inputs, as 3x32x32 (channels, height, width)"
        ) from error
    asked: Ratios = ratios if ratios is not None else 0.0 if times is None else Speedup(times)
    widths, skipped, stays = {}, {}, {}
    try:
        pruner = Pruner(model, example, schedule=OneShot(), ratios=asked, coupled=coupled)
        after = measure(pruner.compact(), example)
        widths = {layer: [len(kept), int(kept.sum())] for layer, kept in pruner.masks().items()}
        asked, skipped, stays = pruner.spec, pruner.skipped, pruner.stays
    except GrowpruneError:
        if ratios is not None or times is not None:  # without a plan, that nothing can be pruned is no error
            raise
        stays = build(model, example, coupled=coupled).stays
    return {
        "model": name,
        "input": list(shape),
        "ratios": write(read(asked)),
        "params": {"before": before.params, "after": after.params},
        "macs": {"before": before.macs, "after": after.macs},
        "speedup": speedup(before, after),
        "sparsity": 1 - after.params / before.params,
        "widths": widths,
        "skipped": skipped,
        "stays": stays,
    }


def network(name: str, num_classes: int | None) -> nn.Module:
    models.known(name)
    try:
        return models.create(name, num_classes)
    except TypeError as error:
        if "num_classes" not in str(error):
            raise
        what = f"{name} needs it" if num_classes is None else f"{name} takes no such number; leave it out"
        raise GrowpruneError(f"--num-classes: {what}") from error
