"""What the penalty adds to a training step, as a ratio in one run: the same step with and without a pruner attached.

    python benchmarks/penalty.py [--device cpu|cuda] [--model resnet56] [--batch 256] [--scope filter|path] [--ku 1]
                                 [--rounds 12] [--steps 20] [--graph] [--out results/penalty/cpu.json]

Two identical networks train on the same random batch; blocks of steps alternate between them, so that whatever else the
machine does falls on both. `--graph` captures each whole step in one CUDA graph and replays it. Ku = 1 is the worst
case: λ changes at every step. `penalty_alone_ms` times the pruner's own part by itself, which a noisy machine
blurs less than the difference of two long steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import growprune as gp
from growprune import models


def trainer(args: argparse.Namespace, prune: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    """A function that does one training step (forward, backward, update), with the penalty in it or not."""
    torch.manual_seed(0)
    net = models.create(args.model, num_classes=10).to(args.device)
    x = torch.randn(args.batch, 3, 32, 32, device=args.device)
    y = torch.randint(0, 10, (args.batch,), device=args.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    pruner = None
    if prune:
        pruner = gp.Pruner(net, x[:1], gp.GReg1(ku=args.ku, tau=100.0), ratios=0.5, scope=args.scope)
        pruner.attach(optimizer)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    def hooks() -> None:
        """What the pruner adds to a step, by itself."""
        pruner._before_step(optimizer, (optimizer,), {})
        pruner.advance()

    return (captured(step, pruner) if args.graph else step), hooks


def captured(step: Callable[[], None], pruner: gp.Pruner | None) -> Callable[[], None]:
    """The step as one CUDA graph; the schedule advances outside it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(keep: Callable[[], None] = step) -> None:  # the graph works on the step's tensors: they must live on
        graph.replay()
        if pruner is not None:
            pruner.advance()

    return replay


def block(step: Callable[[], None], steps: int, device: str) -> float:
    """Milliseconds a step."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--scope", default="filter")
    parser.add_argument("--ku", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    plain, _ = trainer(args, prune=False)
    pushed, hooks = trainer(args, prune=True)
    for step in (plain, pushed):
        block(step, args.steps, args.device)
    times: list[tuple[float, float]] = []
    for i in range(args.rounds):
        order = (plain, pushed) if i % 2 == 0 else (pushed, plain)
        taken = {id(step): block(step, args.steps, args.device) for step in order}
        times.append((taken[id(plain)], taken[id(pushed)]))
    ratios = [b / a for a, b in times]
    alone = statistics.median(block(hooks, 20, args.device) for _ in range(9))
    result = {
        "benchmark": "penalty",
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "plain_ms": statistics.median(a for a, _ in times),
        "with_penalty_ms": statistics.median(b for _, b in times),
        "penalty_alone_ms": alone,
        "overhead": statistics.median(ratios) - 1,
        "overhead_rounds": [round(r - 1, 5) for r in ratios],
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "growprune": gp.__version__,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
