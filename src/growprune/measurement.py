"""What a network costs: parameters, multiply-accumulates (MACs), zeros, time.

Stands beside the flow: before pruning to plan a speed-up, after `compact` to report the one reached. A
measured model comes back as it was: train/eval modes, buffers and gradients.

MACs are those of layers (convolutions; linear, bilinear and recurrent layers; other products with a parameter, see
`counting`), for the example as given: use a batch of one for the usual count per image. `Measurement.uncounted`
lists every other operator that computed something, so that the reader sees what is left out. A zero weight still
counts: MACs fall when filters are removed, not when masked.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from growprune.counting import Macs, operator
from growprune.errors import GrowpruneError
from growprune.running import in_mode
from growprune.schedule import is_whole

Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Measurement:
    """The cost of one forward pass in eval mode.

    Attributes:
        params: number of parameters; a shared one counts once.
        macs: multiply-accumulates of layers.
        per_layer: the same MACs by the name of the module that ran them, in the order first run.
        uncounted: operators that did arithmetic and are not in `macs`, with the times they ran.
    """

    params: int
    macs: int
    per_layer: dict[str, int]
    uncounted: dict[str, int]


def measure(model: nn.Module, example_input: Example) -> Measurement:
    """Count parameters and MACs by running `model` once on `example_input`.

    The example is a tensor, a tuple or list of arguments, or a dict of keyword arguments, on the model's
    device. What runs in eval mode counts: an auxiliary head for training only is in `params`, not in `macs`.

    >>> measure(nn.Linear(10, 20), torch.zeros(1, 10)).macs
    200
    """
    model = _inner(model, compiled=True)
    with _left_as_found(model), _counting(model) as counter:
        _call(model, example_input)
    params = sum(parameter.numel() for parameter in model.parameters())
    return Measurement(params, counter.macs.total(), dict(counter.macs), dict(counter.uncounted))


def speedup(before: Measurement, after: Measurement) -> float:
    """How many times fewer MACs: the paper's speed-up."""
    for each in (before, after):
        if not isinstance(each, Measurement):
            raise GrowpruneError(
                f"speedup: takes what measure(model, example) gives, twice, not a {type(each).__name__}"
            )
    if after.macs == 0:
        raise GrowpruneError("no speed-up: the second model has no convolution or linear layer (0 MACs)")
    return before.macs / after.macs


@torch.no_grad()
def sparsity(model: nn.Module) -> float:
    """The share of parameters that are exactly zero."""
    _a_module(model)
    total = zeros = 0
    for parameter in model.parameters():
        total += parameter.numel()
        zeros += parameter.numel() - int(torch.count_nonzero(parameter))
    return zeros / total if total else 0.0


@torch.no_grad()
def weight_sparsity(model: nn.Module) -> float:
    """The same of convolutions' and linear layers' weights alone, as published sparsities count them."""
    every = (m.weight for m in model.modules() if isinstance(m, (_ConvNd, nn.Linear)))
    weights = {id(weight): weight for weight in every}.values()  # one that several layers share counts once
    zeros = sum(weight.numel() - int(torch.count_nonzero(weight)) for weight in weights)
    return zeros / max(1, sum(weight.numel() for weight in weights))


def latency(model: nn.Module, example_input: Example, *, repeats: int = 30, warmup: int = 5) -> float:
    """Seconds of one forward pass in eval mode: the median of `repeats`, after `warmup` passes.

    On CUDA it is the time between two events on the device; elsewhere the wall clock's. The example decides
    the batch size and the layout; an autocast around the call decides the precision.
    """
    for name, value, least in (("repeats", repeats, 1), ("warmup", warmup, 0)):
        if not is_whole(value) or value < least:
            raise GrowpruneError(f"latency: {name} must be a whole number, {least} or more, not {value!r}")
    model = _inner(model, compiled=False)
    with _left_as_found(model):
        for _ in range(warmup):
            _call(model, example_input)
        device = _cuda_device(model, example_input)
        with torch.cuda.device(device) if device is not None else nullcontext():
            clock = _cuda_seconds if device is not None else _wall_seconds
            return statistics.median(clock(lambda: _call(model, example_input)) for _ in range(repeats))


# Operators that make, move or pick data without computing on it. Views are known by their schema; whatever is
# neither is listed as uncounted, so one forgotten here costs a line in that list and hides nothing.
NO_ARITHMETIC = frozenset(
    """
    _local_scalar_dense _to_copy _unsafe_index _unsafe_view arange as_strided cat clone constant_pad_nd copy
    embedding empty empty_like empty_permuted empty_strided eye fill flip full full_like gather im2col index
    index_put index_select lift lift_fresh masked_fill masked_select new_empty new_empty_strided new_full
    new_ones new_zeros ones ones_like pixel_shuffle pixel_unshuffle rand randn reflection_pad1d
    reflection_pad2d reflection_pad3d repeat replication_pad1d replication_pad2d replication_pad3d resize roll
    scalar_tensor scatter select_scatter slice_scatter split_with_sizes_copy stack take tril triu where zero
    zeros zeros_like
    """.split()  # noqa: SIM905 (a list, one word a line, would be a page)
)


class _Counter(TorchDispatchMode):
    """Sees every operator of a forward pass; counts layers, takes composed operators apart and lists the rest."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {module: name for name, module in model.named_modules()}
        self.layers = Macs(model)
        self.running: list[str] = [""]
        self.macs: Counter[str] = Counter()
        self.uncounted: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = self.layers.formula(func, args)
        if formula is None and isinstance(func, torch._ops.OpOverload):
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if formula is not None:
            self.macs[self.running[-1]] += formula(out, args)
        elif not (getattr(func, "is_view", False) or operator(func) in NO_ARITHMETIC):
            self.uncounted[operator(func)] += 1
        self.layers.follow(func, args, kwargs, out)
        return out

    def enter(self, module: nn.Module, args: Any) -> None:
        if module in self.names:
            self.running.append(self.names[module])

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self.names:
            self.running.pop()


@contextmanager
def _counting(model: nn.Module) -> Iterator[_Counter]:
    """Count what runs inside, by module.

    Below autograd a linear layer arrives as one operator, whatever the shape of its input; above, it comes in
    pieces that look like attention's products. (Inference mode would show the same, but a model that caches
    tensors would keep inference tensors, and could not be trained any more.) The fused path of
    nn.MultiheadAttention is off, because it hides the linear layers inside.
    """
    counter = _Counter(model)
    fused_attention = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fused_attention)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(register_module_forward_pre_hook(counter.enter).remove)
        stack.callback(register_module_forward_hook(counter.leave, always_call=True).remove)
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        stack.enter_context(counter)
        yield counter


def _call(model: nn.Module, example_input: Example) -> Any:
    try:
        if isinstance(example_input, Mapping):
            return model(**example_input)
        if isinstance(example_input, tuple | list):
            return model(*example_input)
        return model(example_input)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise GrowpruneError(f"the model fails on the example: {type(error).__name__}: {reason}") from error


def _inner(model: nn.Module, compiled: bool) -> nn.Module:
    """The module inside DDP or DataParallel, whose forward would wait for others; or `compiled` by torch."""
    _a_module(model)
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return _inner(model.module, compiled)
    original = getattr(model, "_orig_mod", None)
    return _inner(original, compiled) if compiled and isinstance(original, nn.Module) else model


def _a_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise GrowpruneError(f"need a torch.nn.Module to measure, not {type(model).__name__}")


@contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients inside; outside, modes, buffers and random numbers as if nothing had run.

    The forward pass sees copies of the buffers, so whatever it writes is dropped.
    """
    modules = list(model.modules())
    buffers = [dict(module._buffers) for module in modules]
    copies = {buffer: buffer.clone() for buffer in model.buffers()}
    cuda = {p.device.index for p in model.parameters() if p.is_cuda}
    try:
        for module in modules:
            module._buffers.update({k: copies[b] for k, b in module._buffers.items() if b is not None})
        with in_mode(model, training=False), torch.no_grad(), torch.random.fork_rng(devices=cuda):
            yield
    finally:
        for module, own in zip(modules, buffers, strict=True):
            module._buffers.clear()
            module._buffers.update(own)


def _cuda_device(model: nn.Module, example_input: Example) -> torch.device | None:
    """The one it runs on, if it runs on such a device: events must be its own."""
    every = [*model.parameters(), *tree_leaves(example_input)]
    return next((t.device for t in every if isinstance(t, Tensor) and t.is_cuda), None)


def _wall_seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cuda_seconds(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
