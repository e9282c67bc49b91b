"""Convolutions that a training step may use in place of cuDNN's, where a trial shows that they are faster.

    few      3×3, up to 64 channels on either side: our kernels, which pad channels in registers
    aligned  any: channels filled up with zeros to multiples of eight, then cuDNN

Both compute what the layer computes, up to rounding. Odd widths are what pruning leaves: 1, 3 and 6 filters of 16, 32
and 64 at ratio 0.9. Activations are bfloat16 with channels last.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from growprune.running import in_mode

try:
    import triton

    from growprune import kernels
except ImportError:  # no Triton on this platform: its kernels are then never offered
    triton = kernels = None  # type: ignore[assignment]

WIDEST = 64
"""More channels than this are cuDNN's own ground."""


def suits(module: nn.Module) -> bool:
    """Can these kernels stand in for this layer?"""
    return (
        triton is not None
        and type(module) is nn.Conv2d
        and module.kernel_size == (3, 3)
        and module.stride == module.padding == module.dilation == (1, 1)
        and module.groups == 1
        and module.padding_mode == "zeros"
        and module.bias is None
        and module.weight.dtype == torch.float32
        and max(module.in_channels, module.out_channels) <= WIDEST
    )


def block(channels: int, least: int = 16) -> int:
    """The power of two that holds them, 16 at least: the tensor cores' own step (8 where they are columns)."""
    return max(least, 1 << (channels - 1).bit_length())


class Tile(NamedTuple):
    """What one program takes on, and how: all that is to be tuned."""

    columns: int  # of pixels, across images
    rows: int
    warps: int
    stages: int  # rows that are read ahead, and the one at hand
    step: int = 1  # rows at once (correlate)
    taps: int = 64  # most of 3 × channels in one program (correlate)


def convolve_tile(c: int, k: int) -> Tile:
    """Of a convolution from c channels to k. Two warps multiply out of registers; four, from 64 columns on, would out
    of shared memory (wgmma), which costs more than it brings where a product is as small as these."""
    if max(c, k) <= 16:
        return Tile(columns=64, rows=8, warps=2, stages=3)
    if max(c, k) <= 32:
        return Tile(columns=32, rows=8, warps=2, stages=3)
    if min(c, k) <= 32:
        return Tile(columns=32, rows=4, warps=2, stages=3)
    return Tile(columns=16, rows=8, warps=4, stages=3)


def correlate_tile(a: int, b: int) -> Tile:
    """Of a weight's gradient between a channels and b, a the fewer."""
    if b <= 16:
        return Tile(columns=64, rows=16, warps=2 if a <= 5 else 4, stages=3)
    return Tile(columns=64 if b <= 32 or a >= 32 else 32, rows=8, warps=4, stages=2, step=2)


PARTS = 512
"""Sums that the weight's gradient is made of, at most."""


def mirrored(strides: Sequence[int], mirror: bool) -> tuple[int, int, int]:
    """Where the first of nine weights lies, and the steps to the next row and column."""
    _, _, row, col = strides
    return (2 * row + 2 * col, -row, -col) if mirror else (0, row, col)


def launch_convolve(x: Tensor, weight: Tensor, flip: bool, tile: Tile | None = None) -> Tensor:
    """The convolution of x, or with `flip` the gradient of its input."""
    n, c, height, width = x.shape
    k = weight.shape[1 if flip else 0]
    outer, inner = (weight.stride(1), weight.stride(0)) if flip else weight.stride()[:2]
    start, row, col = mirrored(weight.stride(), flip)
    y = torch.empty((n, k, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    columns, rows, warps, stages, *_ = tile or convolve_tile(c, k)
    pieces = 1 if block(3 * c) < 3 * block(c) else 3
    kernels.convolve[(triton.cdiv(n * width, columns), triton.cdiv(height, rows))](
        x, weight, y, n, height, width, start, outer, inner, row, col, C=c, K=k, PIECES=pieces,
        BM=columns, BQ=block(3 * c // pieces), BK=block(k, 8), ROWS=rows, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def launch_correlate(x: Tensor, grad: Tensor, weight: Tensor, tile: Tile | None = None) -> Tensor:
    """The gradient of the weight, laid out as the weight is. Neighbours are read of the side that has fewer channels:
    what a pixel's left neighbour is to its gradient, the gradient's right neighbour is to the pixel."""
    n, c, height, width = x.shape
    k, size = grad.shape[1], weight.numel()
    strides = torch.empty_like(weight, device="meta").stride()  # those of the weight, unless it has gaps
    flip = k < c
    a, b = (grad, x) if flip else (x, grad)
    outer, inner = strides[:2] if flip else (strides[1], strides[0])
    start, row, col = mirrored(strides, flip)
    columns, rows, warps, stages, step, taps = tile or correlate_tile(min(c, k), max(c, k))
    across = triton.cdiv(n * width, columns)
    tiles = across * triton.cdiv(height, rows)
    parts, bq = min(tiles, PARTS), min(taps, block(3 * min(c, k)))
    sums = torch.empty((parts, size), dtype=torch.float32, device=x.device)
    kernels.correlate[(parts, triton.cdiv(3 * min(c, k), bq))](
        a, b, sums, n, height, width, tiles, across, size, start, outer, inner, row, col,
        A=min(c, k), B=max(c, k), BM=columns, BQ=bq, BB=block(max(c, k), 8), ROWS=rows, STEP=step,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    out = torch.empty(size, dtype=torch.float32, device=x.device)
    kernels.collect[(triton.cdiv(size, 32),)](sums, out, parts, size, BP=64, BS=32, num_warps=4)
    return out.as_strided(weight.shape, strides)


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("growprune::convolve", mutates_args=())
def convolve(x: Tensor, weight: Tensor) -> Tensor:
    return launch_convolve(last(x), weight, flip=False)


@torch.library.custom_op("growprune::convolve_backward", mutates_args=())
def convolve_backward(grad: Tensor, x: Tensor, weight: Tensor, needs_input: bool) -> tuple[Tensor, Tensor]:
    grad = last(grad)
    at_input = launch_convolve(grad, weight, flip=True) if needs_input else grad.new_empty(0)
    return at_input, launch_correlate(last(x), grad, weight)


@convolve.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    n, _, height, width = x.shape
    shape = (n, weight.shape[0], height, width)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@convolve_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, needs_input: bool) -> tuple[Tensor, Tensor]:
    at_input = torch.empty_like(x, memory_format=torch.channels_last) if needs_input else grad.new_empty(0)
    return at_input, torch.empty_like(weight)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
    x, weight = ctx.saved_tensors
    at_input, at_weight = convolve_backward(grad, x, weight, ctx.needs_input_grad[0])
    return (at_input if ctx.needs_input_grad[0] else None), at_weight


convolve.register_autograd(_backward, setup_context=_setup)


# -- in a network --------------------------------------------------------------------------------------------------


class FewChannels(nn.Conv2d):
    """A convolution by the kernels above, which count places in 32 bits."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() != 4 or input.numel() // self.in_channels * max(self.in_channels, self.out_channels) >= 2**31:
            return super().forward(input)
        out: Tensor = convolve(input.to(torch.bfloat16), self.weight)
        return out


class Aligned(nn.Conv2d):
    """A convolution whose channels are filled up with zeros to multiples of eight, which is what cuDNN is fast at."""

    def forward(self, input: Tensor) -> Tensor:
        more_in, more_out = -self.in_channels % 8, -self.out_channels % 8
        weight = F.pad(self.weight, (0, 0, 0, 0, 0, more_in, 0, more_out))
        out = F.conv2d(F.pad(input, (0, 0, 0, 0, 0, more_in)), weight, None, self.stride, self.padding, self.dilation)
        out = out[:, : self.out_channels]
        return out if self.bias is None else out + self.bias.view(1, -1, 1, 1).to(out.dtype)


VARIANTS: dict[str, type[nn.Conv2d]] = {"few": FewChannels, "aligned": Aligned}


@contextmanager
def swapped(model: nn.Module, variants: Mapping[str, str]) -> Iterator[None]:
    """Inside, the named layers compute by another kind of convolution: the same numbers, up to rounding."""
    modules = {model.get_submodule(name): VARIANTS[kind] for name, kind in variants.items()}
    try:
        for module, kind in modules.items():
            module.__class__ = kind
        yield
    finally:
        for module in modules:
            module.__class__ = nn.Conv2d


def candidates(module: nn.Conv2d) -> list[str]:
    plain = module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    odd = bool(module.in_channels % 8 or module.out_channels % 8) and module.in_channels > 3
    return [*(["few"] if suits(module) else []), *(["aligned"] if plain and odd else [])]


def easy(module: nn.Conv2d, shape: tuple[int, ...]) -> bool:
    """Is cuDNN at home with it? With 64 channels on either side we are faster on 8×8 pixels
    (results/bench/h200-convolutions.json), but not on ResNet34's 56×56, it seems (results/imagenette-first: 70 ms a
    step with ours in six layers, and PyTorch's deterministic algorithms, 30 without either)."""
    sides = module.in_channels, module.out_channels
    return min(sides) > WIDEST // 2 and not any(side % 8 for side in sides) and max(shape[2:]) > 8


def faster(model: nn.Module, example: Tensor, by_rule: bool = False) -> dict[str, str]:
    """By layer, the kind of convolution that is faster than cuDNN's on this input, forward and backward together;
    `by_rule`: not by the clock, but where cuDNN is mostly slow the first that works, which is so each time."""
    shapes = seen(model, example)
    keys: dict[str, tuple[Any, ...]] = {}
    layers: dict[tuple[Any, ...], nn.Conv2d] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Conv2d and name in shapes and not (by_rule and easy(module, shapes[name])):
            how = module.weight.shape, module.stride, module.padding, module.dilation, module.bias is None
            keys[name] = key = shapes[name], *how
            layers.setdefault(key, module)
    compile_all((module, key[0]) for key, module in layers.items())
    best = {key: best_of(module, key[0], by_rule) for key, module in layers.items()}
    return {name: best[key] for name, key in keys.items() if best[key]}


AT_ONCE = 8
"""Layers whose kernels are compiled at a time: each needs the memory of its activations meanwhile."""


def compile_all(layers: Iterable[tuple[nn.Conv2d, tuple[int, ...]]]) -> None:
    """Our kernels for these layers, several at a time: a width takes seconds, and a pruned network may have dozens.
    What fails here is left to the trial."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda layer: compile_one(*layer), [each for each in layers if suits(each[0])]))


def compile_one(module: nn.Conv2d, shape: tuple[int, ...]) -> None:
    """By running them once, not through autograd: that has one thread a device for all that goes backward."""
    (n, _, height, width), weight = shape, module.weight

    def some(channels: int) -> Tensor:
        return last(torch.zeros(n, channels, height, width, dtype=torch.bfloat16, device=weight.device))

    with suppress(Exception), torch.no_grad(), torch.cuda.device(weight.device):
        x = some(module.in_channels)
        launch_convolve(x, weight, flip=False)
        grad = some(module.out_channels)
        launch_convolve(grad, weight, flip=True)
        launch_correlate(x, grad, weight)


def best_of(module: nn.Conv2d, shape: tuple[int, ...], by_rule: bool) -> str:
    kinds = candidates(module)
    if by_rule:
        return next((kind for kind in kinds if attempt(module, shape, kind, by_rule) < math.inf), "")
    times = {kind: attempt(module, shape, kind) for kind in ("", *kinds)}
    return min(times, key=lambda kind: times[kind])


def attempt(module: nn.Conv2d, shape: tuple[int, ...], kind: str, by_rule: bool = False) -> float:
    """Its time, or infinity where it does not work: Triton needs a C compiler, and a GPU that is not too old. By rule
    a lack of memory, which hangs on what else runs, is no answer."""
    try:
        return layer_time(module, shape, kind)
    except Exception as error:
        if by_rule and isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        return math.inf


@torch.no_grad()
def seen(model: nn.Module, example: Tensor) -> dict[str, tuple[int, ...]]:
    """The shapes that convolutions get, from one forward pass (in eval mode, so that nothing changes)."""
    shapes: dict[str, tuple[int, ...]] = {}
    hooks = []

    def look(name: str, x: tuple[Tensor, ...]) -> None:
        if x and x[0].dim() == 4:
            shapes[name] = tuple(x[0].shape)

    for name, module in model.named_modules():
        if type(module) is nn.Conv2d and candidates(module):
            hooks.append(module.register_forward_pre_hook(lambda _, x, name=name: look(name, x)))
    try:
        with in_mode(model, training=False), torch.autocast(example.device.type, torch.bfloat16):
            model(example)
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def layer_time(module: nn.Conv2d, shape: tuple[int, ...], kind: str) -> float:
    """Seconds of a layer's forward and backward, captured as a CUDA graph so that only the device counts."""
    x = torch.randn(shape, device=module.weight.device).to(torch.bfloat16, memory_format=torch.channels_last)
    x.requires_grad_(shape[1] > 3 or not any(p.requires_grad for p in module.parameters()))
    wanted = [t for t in (x, *module.parameters()) if t.requires_grad]

    def run() -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False), swapped(module, {"": kind} if kind else {}):
            out = module(x)
        torch.autograd.grad(out, wanted, torch.ones_like(out))

    return graph_time(run)


def graph_time(run: Callable[[], None]) -> float:
    """Seconds of a call, as one of several that are captured together; the best of three rounds."""
    repeats, side = 10, torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / repeats)
    return min(times)
