"""A schedule for so many steps: does the README's rule for short ones push far enough?

    python benchmarks/budget.py [--seeds 3] [--jobs 2] [--out results/budget.json]

The demo's network on handwritten digits, trained for 400 steps, is pruned by GReg-1 in so many steps: λ grows at every
step to `tau` over 0.6 of them and holds for the rest, with tau = 0.0025 / lr for SGD with momentum 0.9 (lr 1e-2) and
0.02 / lr for AdamW (lr 1e-3). At a ratio of 0.8: filters with either scope, and single weights; nothing is fine-tuned.
The file has the accuracy before and after removal, and how large what goes is beside what stays, in the layer where it
is largest. Ten minutes of two CPU cores.
"""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from separation import arguments, keep, processes
from torch import Tensor, nn

import growprune as gp
from growprune import data
from growprune.demo import network

STEPS = (300, 1000, 2000)
REACH = {"SGD": (0.0025, 1e-2), "AdamW": (0.02, 1e-3)}
"""lr·τ, and lr."""
WAYS = (("filter", "filter"), ("filter", "path"), ("weight", "filter"))
RATIO, BATCH, BASE = 0.8, 64, 400
Plan = tuple[int, str, str, str, int]
"""Steps, optimizer, granularity, scope, seed."""


def schedule(steps: int, optimizer: str) -> gp.GReg1:
    reach, lr = REACH[optimizer]
    tau = reach / lr
    return gp.GReg1(delta_lambda=tau / (0.6 * steps), tau=tau, ku=1, ks=round(0.4 * steps))


def pixels(part: Any) -> tuple[Tensor, Tensor]:
    return (part.x.permute(0, 3, 1, 2).float() / 255 - 0.3) / 0.37, part.y.long()


def batches(x: Tensor, y: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(x), generator=generator).split(BATCH)[:-1]:
            yield x[rows], y[rows]


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    net.eval()
    right = (net(x).argmax(1) == y).double().mean()
    net.train()
    return round(100 * float(right), 2)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()


def pruned(plan: Plan) -> dict[str, Any]:
    steps, kind, granularity, scope, seed = plan
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    digits = data.load("digits")
    train, test = pixels(digits.train), pixels(digits.test)
    net, feed = network(), batches(*train, seed)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), 0.05, 0.9, weight_decay=5e-4)
    for i in range(BASE):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - i / BASE)
        step(net, optimizer, *next(feed))
    base = accuracy(net, *test)
    lr = REACH[kind][1]
    if kind == "SGD":
        optimizer = torch.optim.SGD(net.parameters(), lr, 0.9, weight_decay=5e-4)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr)
    pruner = gp.Pruner(
        net,
        train[0][:2],
        schedule(steps, kind),
        ratios=RATIO,
        granularity=granularity,
        scope=scope,  # type: ignore[arg-type]
    )
    pruner.attach(optimizer)
    while not pruner.done:
        step(net, optimizer, *next(feed))
    before = accuracy(net, *test)
    share = max(float(each.pruned / each.kept) for each in pruner.separation().values())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        small = pruner.compact(calibrate=[x for x, _ in itertools.islice(feed, 10)])
    found = {"steps": steps, "optimizer": kind, "granularity": granularity, "scope": scope, "seed": seed}
    after = {"base": base, "before_removal": before, "after_removal": accuracy(small, *test)}
    return found | {"accuracy": after, "share": round(share, 4), "warned": bool(told)}


def main() -> None:
    args = arguments(__doc__)
    ways = list(itertools.product(STEPS, REACH, WAYS))
    plans = [(steps, kind, *way, seed) for steps, kind, way in ways for seed in range(args.seeds)]
    with processes(args.jobs) as pool:
        runs = list(pool.map(pruned, plans))
    for steps, kind, (granularity, scope) in ways:
        wanted = (steps, kind, granularity, scope)
        these = [one for one in runs if (one["steps"], one["optimizer"], one["granularity"], one["scope"]) == wanted]
        base, before, after = (
            statistics.mean(one["accuracy"][when] for one in these) for when in these[0]["accuracy"]
        )  # fmt: skip
        largest = max(one["share"] for one in these)
        print(
            f"{steps} steps of {kind}, {granularity}, scope {scope}: {base:.1f}, {before:.1f} before removal, "
            f"{after:.1f} after; at most {largest:.3f}"
        )
    keep(args.out, benchmark="budget", reach=REACH, ratio=RATIO, runs=runs)


if __name__ == "__main__":
    main()
