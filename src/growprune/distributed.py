"""More than one process: what `torchrun` started, and what its processes must agree on.

    torchrun --nproc-per-node 8 -m growprune prune ...

Every process holds the whole network and its share of each batch; DistributedDataParallel averages the gradients. Batch
norm sees the whole batch, so that a run gives the same on any number of processes, up to rounding. The pruned filters
are process 0's pick, handed to all. Process 0 alone writes, and an error is said once, by the process that has it.

What is agreed on the host goes by gloo; what is on a GPU goes by NCCL.
"""

from __future__ import annotations

import atexit
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from growprune.errors import GrowpruneError


@dataclass(frozen=True)
class World:
    """This process among all: `rank` of `size`, the `local`-th of its machine; alone by default."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, batch: int) -> slice:
        """This process's part of a batch."""
        each = batch // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def check(self, name: str, batch: int) -> None:
        if batch % self.size:
            near = max(1, round(batch / self.size)) * self.size
            raise GrowpruneError(
                f"{name}: {batch} images cannot be shared evenly by {self.size} processes; give {near}, or start "
                "another number of them"
            )


# -- coming together, and parting ------------------------------------------------------------------------------------

PATIENCE = 5.0
"""Seconds that a process with nothing to say lets the others finish: once one has ended, torchrun ends them all, in the
middle of a word too."""
HEAD_START = 0.5
"""Seconds that process 0, which knows the folder too, is ahead of others that have the same error to tell."""

_store: Any = None


def launched() -> bool:
    """Did torchrun start this process? It then passes signals on, and ends what outlasts its patience."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def first_of_machine() -> bool:
    """Is this the one of torchrun's processes on this machine that downloads for all of them?"""
    return os.environ.get("LOCAL_RANK", "0") == "0" or not launched()


def foremost() -> bool:
    """Is this the one of torchrun's processes that prints what came of it?"""
    return os.environ.get("RANK", "0") == "0"


def neighbours() -> int:
    """How many of the processes are on this machine, this one included."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launched() else 1


def processes() -> int:
    """How many there are, on all machines."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def several() -> bool:
    return processes() > 1


def own(device: str) -> str:
    """This process's GPU, where each has one; it must touch no other, which would cost memory there."""
    if not several() or not device.startswith("cuda"):
        return device
    if neighbours() > torch.cuda.device_count():
        raise GrowpruneError(
            f"--nproc-per-node: {neighbours()} processes, but {torch.cuda.device_count()} GPUs on this machine; "
            "one a GPU is the most"
        )
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def join(device: str) -> tuple[World, str]:
    """Take one's place among the processes that torchrun started, and one's device; alone where it did not."""
    global _store
    if not several():
        return World(), device
    device, cuda = own(device), device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        store, rank, size = next(iter(rendezvous("env://")))
        _store = fresh(store, rank, size)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", store=_store, rank=rank, world_size=size,
            device_id=torch.device(device) if cuda else None,
        )  # fmt: skip
        atexit.register(leave)
    return World(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0"))), device


def fresh(store: Any, rank: int, size: int) -> Any:
    """The store as this start of the run sees it. torchrun keeps one through restarts, and with it the addresses and
    keys of processes that are gone; whoever took those for the new ones would wait in vain.

    Process 0 names the start, and knows that another has read the new name by an answer that only it can have given.
    """
    mine = name = secrets.token_hex(8)
    if rank == 0:
        store.set("growprune/start", name)
        for other in range(1, size):
            answer = store.get(f"growprune/{name}/{other}").decode()
            store.set(f"growprune/{name}/{other}/{answer}", "")
    while rank and not store.check([f"growprune/{name}/{rank}/{mine}"]):
        name = store.get("growprune/start").decode()
        store.set(f"growprune/{name}/{rank}", mine)
        time.sleep(0.02)
    return dist.PrefixStore(f"growprune/{name}", store)  # type: ignore[attr-defined]


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


_runs = count()


@contextmanager
def one_voice(world: World) -> Iterator[None]:
    """Whatever goes wrong in here is said by one process; the others exit without a word.

    A process that fails just ends: the others then lose touch with it, wherever they are, and end too.
    """
    if world.size == 1:
        yield
        return
    key = f"said/{next(_runs)}"
    try:
        yield
    except Exception as error:
        atexit.unregister(leave)  # with some of the processes gone, it might wait for them
        lost = out_of_touch(error)
        if not lost and not isinstance(error, (GrowpruneError, OSError)):
            raise
        time.sleep(0.0 if world.first else HEAD_START)
        if not speaks(key):
            time.sleep(PATIENCE)
            raise SystemExit(2) from None
        if not lost:
            raise
        raise GrowpruneError(
            f"process {world.rank} lost touch with another one, which ended or was killed; "
            "started again, the run goes on from its last checkpoint"
        ) from error


def out_of_touch(error: Exception) -> bool:
    """Did another process end in the middle of something that all do together?"""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def speaks(key: str) -> bool:
    """Is this the first process that has something to say?"""
    with suppress(RuntimeError):  # torchrun itself is gone
        return _store is None or _store.add(key, 1) == 1
    return True


@contextmanager
def first_here(world: World) -> Iterator[None]:
    """The first process of each machine does this alone (it may download), then the others."""
    if world.local:
        meet(world)
    yield
    if not world.local:
        meet(world)


# -- agreeing --------------------------------------------------------------------------------------------------------


def total(world: World, value: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if world.size > 1:
        dist.all_reduce(value)
    return value


def mean(world: World, value: Tensor) -> Tensor:
    return value if world.size == 1 else total(world, value.clone()) / world.size


def meet(world: World) -> None:
    """Go on when all are here."""
    total(world, torch.zeros(1))


def anyone(world: World, mine: bool) -> bool:
    """Does this hold in any process?"""
    return mine if world.size == 1 else bool(total(world, torch.tensor(float(mine))) > 0)


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
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            tensor.detach().copy_(whole)


# -- training together -----------------------------------------------------------------------------------------------


class Together(DistributedDataParallel):
    """A network in training: gradients are averaged over the processes, batch norm sees the whole batch."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with WholeBatch():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]


def parallel(model: nn.Module, device: str, loss: Callable[[nn.Module], Tensor]) -> nn.Module:
    """`model` for training in all processes; itself, not a copy, so that it stays what is tested, pruned and saved.

    `loss` is tried twice. First, to see whether every parameter has a gradient: searching for those without, as heads
    that are not used have none, costs time in every step. Second, as DistributedDataParallel lays its buckets out anew
    after the first step: sums over three processes or more would round differently in a run that was taken up again.
    """
    used = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss(model), used, allow_unused=True)
    where = [torch.device(device)] if device.startswith("cuda") else None
    with warnings.catch_warnings():  # of a name that is to change, and of gradients laid out unlike their weights
        warnings.simplefilter("ignore")
        together = Together(
            model, where, broadcast_buffers=False, find_unused_parameters=any(grad is None for grad in found)
        )
        loss(together).backward()
    for p in used:
        p.grad = None
    return together


class WholeBatch(TorchFunctionMode):
    """In here batch norm in training takes its statistics from all processes' images, whatever module asks for it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return whole_batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def whole_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.batch_norm over all processes' images."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    known = input, weight, bias, running_mean, running_var, eps, momentum
    if input.is_cuda:
        out: Tensor = SyncBatchNorm.apply(*known, dist.group.WORLD, dist.get_world_size())
    else:
        out = Normalized.apply(*known)
    return out


class Normalized(torch.autograd.Function):
    """Batch norm over all processes' images on a CPU, where torch's own SyncBatchNorm does not run.

    Sums are in double precision. Every process puts the same numbers together in the same order, so that their running
    statistics stay the same to the bit.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        eps: float,
        momentum: float,
    ) -> Tensor:
        x = input if input.dtype == torch.double else input.float()
        ctx.dims, ctx.shape = [d for d in range(x.dim()) if d != 1], [1, -1] + [1] * (x.dim() - 2)
        mean = x.mean(ctx.dims, dtype=torch.double)
        squares = (x - over(ctx, mean, x)).square().sum(ctx.dims, dtype=torch.double)
        mine = torch.stack([mean, squares, torch.full_like(mean, x.numel() // x.shape[1])])
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        means, squares, counts = torch.stack(every, 1)
        number = counts.sum(0)
        mean = (means * counts).sum(0) / number
        squares = (squares + counts * (means - mean).square()).sum(0)
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean), momentum)
            running_var.lerp_((squares / (number - 1)).to(running_var), momentum)
        scale = (squares / number + eps).rsqrt()
        centred = (x - over(ctx, mean, x)) * over(ctx, scale, x)
        ctx.affine = weight is not None, bias is not None
        ctx.save_for_backward(centred, scale, weight, number)
        out = centred if weight is None else centred * over(ctx, weight, x)
        return (out if bias is None else out + over(ctx, bias, x)).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        centred, scale, weight, number = ctx.saved_tensors
        grad = grads[0].to(centred.dtype)
        sums = torch.stack([(grad * each).sum(ctx.dims, dtype=torch.double) for each in (centred, torch.ones(()))])
        own = sums.to(centred.dtype, copy=True)  # a process's share: DistributedDataParallel averages these
        dist.all_reduce(sums)
        along, mean = sums / number
        moved = grad - over(ctx, mean, grad) - centred * over(ctx, along, grad)
        moved = moved * over(ctx, scale if weight is None else scale * weight, grad)
        return moved.to(grads[0].dtype), *(own[i] if ctx.affine[i] else None for i in range(2)), None, None, None, None


def over(ctx: Any, values: Tensor, x: Tensor) -> Tensor:
    """One number a channel, to be spread over x."""
    return values.to(x.dtype).view(ctx.shape)
