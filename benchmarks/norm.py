"""GReg-1 with batch norm's statistics of each batch, and with them fixed while the penalty grows: what is left of it?

    python benchmarks/norm.py [--seeds 3] [--jobs 2] [--out results/norm.json]

The five convolutions with batch norm of `separation.py` on handwritten digits, pruned at three ratios: at once, and by
GReg-1 at the short scale's length (λ to 1 in 10,000 steps, 5,000 more), then 120 epochs as on CIFAR. Twenty minutes
on two CPU cores. The file keeps each run's accuracies: before removal, after it, and after fine-tuning.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from separation import SHARED, TRAIN, arguments, keep, processes

from growprune.config import Prune, Train
from growprune.jobs import run

RATIOS = ("0.5", "0.75", "0.9")
PUSH: dict[str, Any] = {"batch": 64, "prune_batch": 64, "ku": 1}
WAYS: dict[str, dict[str, Any]] = {
    "one-shot": {"schedule": "oneshot"},
    "GReg-1": {"prune_norm": "batch"},
    "GReg-1, batch norm fixed": {"prune_norm": "fixed"},
}
Plan = tuple[str, int, str, str]
"""A folder for all runs, seed, ratio, way."""


def network(folder: str, seed: int) -> tuple[Path, dict[str, Any]]:
    return Path(folder, f"base {seed}"), {"model": "separation:with_batch_norm", "seed": seed, **SHARED}


def trained(plan: tuple[str, int]) -> None:
    base, made = network(*plan)
    run(Train(**made, **TRAIN), base, quiet=True)


def pruned(plan: Plan) -> dict[str, Any]:
    folder, seed, ratio, way = plan
    base, made = network(folder, seed)
    asked = Prune(**made, weights=str(base), ratios=ratio, **PUSH, **WAYS[way])
    result = run(asked, Path(folder, f"{seed} {ratio} {way}"), quiet=True)
    return {"seed": seed, "ratio": ratio, "way": way, "accuracy": result["accuracy"]}


def main() -> None:
    args = arguments(__doc__)
    seeds = range(args.seeds)
    with tempfile.TemporaryDirectory() as folder, processes(args.jobs) as pool:
        list(pool.map(trained, [(folder, seed) for seed in seeds]))
        plans = [(folder, seed, ratio, way) for ratio in RATIOS for way in WAYS for seed in seeds]
        runs = list(pool.map(pruned, plans))
    for ratio in RATIOS:
        for way in WAYS:
            these = [one["accuracy"] for one in runs if (one["ratio"], one["way"]) == (ratio, way)]
            before, after = (statistics.mean(each[f"{when}_removal"] for each in these) for when in ("before", "after"))
            finals = ", ".join(f"{each['final']:.2f}" for each in these)
            print(f"ratio {ratio}, {way}: {before:.2f} before removal, {after:.2f} after, in the end {finals}")
    keep(args.out, benchmark="norm", train=TRAIN, prune=PUSH, runs=runs)


if __name__ == "__main__":
    main()
