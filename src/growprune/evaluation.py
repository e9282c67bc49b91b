"""How good a network is on a run's images, and how its filters stand."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from growprune import convolutions, distributed
from growprune.compact import calibrate
from growprune.config import CLASSES, Config
from growprune.errors import GrowpruneError, line
from growprune.feeds import Images
from growprune.pruner import Pruner
from growprune.running import all_digits, in_mode, switched

TEST_BATCH, VALUES = 1000, 2**24
"""Images tested at once; on a GPU, where small batches cost more to ask for than to compute, as many as have so many
values: 5,461 of CIFAR's."""


def accuracy(net: nn.Module, images: Images, kernels: Mapping[str, str] | None = None) -> float:
    """On the test images, in percent, over all processes: in float32, or with the `kernels` of a step in bfloat16 as
    that computes."""
    right, seen = (torch.zeros((), device=images.device, dtype=torch.double) for _ in range(2))
    low = kernels is not None
    cast = torch.autocast(images.device.partition(":")[0], torch.bfloat16, enabled=low)
    digits, kernelled = nullcontext() if low else all_digits(), convolutions.swapped(net, kernels or {})
    with in_mode(net, training=False), torch.no_grad(), digits, cast, kernelled:
        for x, y in images.tested(test_batch(images)):
            right += (net(x).argmax(1) == y).sum()
            seen += len(y)
    for count in (right, seen):
        distributed.total(images.world, count)
    return round(100 * float(right) / float(seen), 4)


def test_batch(images: Images) -> int:
    many = VALUES // math.prod(images.shape) // images.world.size
    return max(many, TEST_BATCH) if images.device.startswith("cuda") else TEST_BATCH


def estimated(net: nn.Module, images: Images, batch: int) -> nn.Module:
    """A copy with batch-norm statistics estimated anew: while filters shrink, the running ones lag behind."""
    twin = copy.deepcopy(net)
    calibrate(twin, [x for x, _ in images.sample(batch)])
    return twin


def norms(net: nn.Module) -> list[_BatchNorm]:
    """Every batch norm that has statistics."""
    return [module for module in net.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]


def fix_norms(net: nn.Module) -> int:
    """Put every batch norm that has statistics into eval mode, so that it keeps them; how many there are."""
    for norm in (found := norms(net)):
        norm.eval()
    return len(found)


@torch.no_grad()
def fits(net: nn.Module, images: Images, config: Config) -> None:
    """Does it take these images, and tell these classes apart? Better said now than after the first epoch."""
    twin, shape = switched(copy.deepcopy(net), training=False), "x".join(map(str, images.shape))
    what = f"images of {shape} ({config.data})"
    try:
        out = twin(images.example())
    except (RuntimeError, ValueError, AssertionError, IndexError) as error:
        known = ", such as growprune.demo:network for digits" if config.data == "digits" else ""
        first = next((each for each in net.modules() if isinstance(each, nn.Conv2d)), None)
        if first is not None and config.data not in CLASSES and (first.in_channels, images.shape[0]) == (1, 3):
            known = ", or grey images as train.npz and test.npz: picture files are read in colour"
        raise GrowpruneError(
            f"{config.model} does not take {what}: {line(error)}; give another --model{known}"
        ) from error
    if not isinstance(out, Tensor) or out.dim() != 2 or out.shape[1] < images.classes:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise GrowpruneError(f"{config.model} gives {got} for one image; {config.data} has {images.classes} classes")


def magnitudes(pruner: Pruner) -> dict[str, dict[str, Any]]:
    """How far kept and pruned units have come apart, by layer; None for what is not picked yet. Of filters also every
    one's L1 norm and which are to go."""
    result: dict[str, dict[str, Any]] = {}
    for name, found in pruner.separation().items():
        means = {"kept": float(found.kept), "pruned": float(found.pruned), "spread": float(found.spread)}
        result[name] = {key: value if math.isfinite(value) else None for key, value in means.items()}
        if pruner.groups.granularity == "filter":
            gone = (~pruner.masks()[name]).nonzero().flatten().tolist()
            result[name] |= {"norms": [float(f"{norm:.5g}") for norm in found.norms.tolist()], "gone": gone}
    return result
