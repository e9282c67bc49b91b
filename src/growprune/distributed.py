"""More than one process: what `torchrun` started, and what its processes must agree on.

    torchrun --nproc-per-node 8 -m growprune prune ...

Every process holds the whole network and its share of each batch; DistributedDataParallel averages the gradients. Batch
norm sees the whole batch (synchronised), so that a run gives the same on any number of processes, up to rounding. The
pruned filters are process 0's pick, handed to all. Process 0 alone writes.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from growprune.errors import GrowpruneError


@dataclass(frozen=True)
class World:
    """This process among all: `rank` of `size`; alone by default."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, batch: int) -> slice:
        """This process's part of a batch."""
        each = batch // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def check(self, name: str, batch: int) -> None:
        if batch % self.size:
            raise GrowpruneError(f"{name}: {batch} images cannot be shared evenly by {self.size} processes")


def join(device: str) -> tuple[World, str]:
    """Take one's place among the processes that torchrun started, and one's device; alone where it did not."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        return World(), device
    if device.startswith("cuda"):
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return World(dist.get_rank(), dist.get_world_size()), device


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def total(world: World, value: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if world.size > 1:
        dist.all_reduce(value)
    return value


def anyone(world: World, mine: bool, device: str) -> bool:
    """Does this hold in any process?"""
    if world.size == 1:
        return mine
    return bool(total(world, torch.tensor(float(mine), device=device)).item() > 0)


def from_first(world: World, what: Any) -> Any:
    """Process 0's value, in all of them (plain values and tensors on the CPU)."""
    if world.size == 1:
        return what
    box = [what]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def same_weights(world: World, model: nn.Module) -> None:
    """Process 0's parameters and buffers, in all of them."""
    if world.size > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)


def parallel(world: World, model: nn.Module, device: str) -> nn.Module:
    """The network for training: with the others' gradients, and batch norm over the whole batch. It shares its tensors
    with `model`, which stays what is tested, pruned and saved."""
    shared: dict[int, Any] = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    twin = copy.deepcopy(model, shared)
    if device.startswith("cuda"):
        twin = nn.SyncBatchNorm.convert_sync_batchnorm(twin)
        return DistributedDataParallel(twin, [torch.device(device)], broadcast_buffers=False)
    for module in twin.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = WholeBatchNorm
    return DistributedDataParallel(twin, broadcast_buffers=False)


class WholeBatchNorm(_BatchNorm):
    """Batch norm over all processes' images, on a CPU, where torch's SyncBatchNorm does not run."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        dims = [d for d in range(input.dim()) if d != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        count = input.numel() // input.shape[1] * dist.get_world_size()
        mean = all_reduce(input.sum(dims)) / count
        centred = input - mean.view(shape)
        variance = all_reduce(centred.square().sum(dims)) / count
        if self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                assert self.num_batches_tracked is not None
                self.num_batches_tracked.add_(1)
                factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean, factor)
                self.running_var.lerp_(variance * count / (count - 1), factor)
        out: Tensor = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out
