"""Our 3×3 convolutions against cuDNN's, pass by pass: as CUDA graphs, bfloat16, batch 256, alone and four at once.

    python benchmarks/convolutions.py [--tiles] [--out FILE]

The shapes are ResNet56's on CIFAR: whole (16, 32, 64 channels), and as ratios 0.9 and 0.7 leave them. Each pass by
itself: forward, the input's gradient, the weight's gradient with its sum. With --tiles also other tiles than those that
`growprune.convolutions` would take (*). Everything is first compiled and compared with float64, in processes side by
side; a pass that is wrong is told so and not timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

import growprune as gp
from growprune.convolutions import Tile, block, convolve_tile, correlate_tile, launch_convolve, launch_correlate

SHAPES = [
    (16, 16, 32), (32, 32, 16), (64, 64, 8), (16, 1, 32), (1, 16, 32), (32, 3, 16), (3, 32, 16), (64, 6, 8), (6, 64, 8),
    (16, 4, 32), (4, 16, 32), (32, 9, 16), (9, 32, 16), (64, 19, 8), (19, 64, 8),
]  # fmt: skip
PASSES = ("forward", "input", "weight")
IMAGES, REPEATS = 256, 10
CONVOLVE = {  # by the wider side
    16: [Tile(64, 8, 2, 3), Tile(64, 8, 2, 1), Tile(64, 4, 2, 3), Tile(64, 16, 2, 3)],
    32: [Tile(32, 8, 2, 3), Tile(32, 8, 2, 1), Tile(32, 4, 2, 3), Tile(64, 4, 2, 3)],
    64: [Tile(16, 8, 4, 3), Tile(32, 8, 8, 2), Tile(32, 4, 4, 2), Tile(32, 4, 2, 3)],
}
CORRELATE = {
    16: [Tile(64, 16, 4, 2, 2), Tile(64, 16, 4, 3), Tile(64, 8, 4, 2, 2), Tile(64, 16, 2, 3)],
    32: [Tile(64, 8, 4, 2, 2), Tile(64, 16, 4, 2, 2, 128), Tile(64, 4, 2, 3), Tile(32, 8, 2, 3)],
    64: [Tile(64, 8, 4, 2, 2), Tile(32, 8, 4, 3), Tile(32, 4, 4, 3), Tile(32, 8, 4, 2, 2)],
}

Case = tuple[Tensor, Tensor, Tensor]
Job = tuple[int, int, int, str, Tile | None]


def variants(c: int, k: int, what: str, tiles: bool) -> list[Tile | None]:
    """Of one pass: cuDNN (None), the tile that would be taken, and others."""
    table = CORRELATE if what == "weight" else CONVOLVE
    own = taken(c, k, what)
    return [None, own, *(tile for tile in table[block(max(c, k))] if tiles and tile != own)]


def taken(c: int, k: int, what: str) -> Tile:
    if what == "weight":
        return correlate_tile(min(c, k), max(c, k))
    return convolve_tile(c, k) if what == "forward" else convolve_tile(k, c)


def case(c: int, k: int, side: int) -> Case:
    generator = torch.Generator("cuda").manual_seed(c + k)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator).contiguous(memory_format=torch.channels_last)

    return draw(IMAGES, c, side, side).bfloat16(), draw(IMAGES, k, side, side).bfloat16(), draw(k, c, 3, 3) / 3


def runner(what: str, tile: Tile | None, x: Tensor, grad: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    if tile is not None:
        if what == "weight":
            return lambda: launch_correlate(x, grad, weight, tile)
        here, flip = (x, False) if what == "forward" else (grad, True)
        return lambda: launch_convolve(here, weight, flip, tile)
    low = weight.bfloat16()
    if what == "forward":
        return lambda: F.conv2d(x, low, padding=1)
    mask, which = ([True, False, False], 0) if what == "input" else ([False, True, False], 1)
    rest = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
    return lambda: torch.ops.aten.convolution_backward(grad, x, low, *rest)[which]  # type: ignore[no-any-return]


def exact(what: str, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """By torch in float64, of the weight as the kernels round it."""
    x, weight = x.double().requires_grad_(), weight.bfloat16().double().requires_grad_()
    y = F.conv2d(x, weight, padding=1)
    if what == "forward":
        return y.detach()
    return torch.autograd.grad(y, x if what == "input" else weight, grad.double())[0]


def error(job: Job) -> float:
    """Compile it and compare it: the largest error, in units of the largest number."""
    c, k, side, what, tile = job
    given = case(c, k, side)
    found, right = runner(what, tile, *given)(), exact(what, *given)
    return float((found.double() - right).abs().max() / right.abs().max())


def captured(run: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    return graph


def microseconds(graphs: Sequence[torch.cuda.CUDAGraph]) -> float:
    """Of one pass, with all graphs at once, each in its stream: the least of five rounds."""
    streams, times = [torch.cuda.Stream() for _ in graphs], []
    for _ in range(6):  # the first warms up
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000)  # the host launches in the meantime
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for stream, graph in zip(streams, graphs, strict=True):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                graph.replay()
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / REPEATS / len(graphs))
    return round(min(times[1:]), 2)


def measured(job: Job, wrong_by: float) -> dict[str, Any]:
    c, k, side, what, tile = job
    name = "cudnn" if tile is None else "/".join(map(str, tile))
    row = {"shape": f"{c}->{k}@{side}", "pass": what, "variant": name, "error": wrong_by}
    if wrong_by > 0.01:
        return row | {"wrong": True}
    graphs = [captured(runner(what, tile, *case(c, k, side))) for _ in range(4)]
    return row | {"alone": microseconds(graphs[:1]), "four": microseconds(graphs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true", help="other tiles too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    jobs: list[Job] = [
        (c, k, side, what, tile)
        for c, k, side in SHAPES
        for what in PASSES
        for tile in variants(c, k, what, args.tiles)
    ]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        errors = list(pool.map(error, jobs))
    rows = [measured(*each) for each in zip(jobs, errors, strict=True)]
    for row in rows:
        print(row, flush=True)
    result = {
        "benchmark": "convolutions",
        "unit": "microseconds; four at once: each",
        "tile": "/".join(Tile._fields),
        "rows": rows,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "growprune": gp.__version__,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
