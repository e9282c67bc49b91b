"""What a step of table 3's rows takes on one GPU: of ResNet34 and ResNet50 while filters are pushed (batch 64), and of
every smaller network while it is fine-tuned (batch 256).

    python benchmarks/imagenet.py --images FOLDER [--steps 100] [--compile on] [--out results/bench/h200-imagenet.json]

The steps are the trainer's own, penalty, crops and flips included, with the folder's images kept on the device; what
the weights are does not matter to them. Two steps are also taken at an eighth of the batch, the share of each of eight
GPUs. `docs/tables.py` makes the cost of ImageNet of it, by the paper's schedule.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from growprune import models, storage
from growprune.bench import Bench, said, timed
from growprune.jobs import surroundings, usable
from growprune.outcome import environment
from growprune.paper import imagenet
from growprune.paper.cost import EIGHTHS, GPUS, STEPS, Kind, label
from growprune.paper.table3 import LEVELS, Level, settings
from growprune.train import Job


def measured(asked: Bench, level: Level, kind: Kind, share: int, weights: Path) -> dict[str, Any]:
    """One step, with a batch of 1/share."""
    plan = settings(level, asked.data)["GReg-1" if kind == "push" else "one-shot"].config("paper", 0, weights)
    plan = replace(
        plan, device=asked.device, keep="device", compile=asked.compile,
        batch=plan.batch // share, prune_batch=plan.prune_batch // share,
    )  # fmt: skip
    with surroundings(plan):
        job = Job(plan, None, asked.device, progress=said(asked))
        step = job.enter(job.stages[0], None)
        if kind == "tune":
            job.remove(job.stages[0])
            job.at = 1
            step = job.enter(job.stages[1], None)
        ms = statistics.median(timed([step], asked) for _ in range(3))
    return {"batch": plan.batch if kind == "tune" else plan.prune_batch, "ms": ms, "choice": str(step.choice)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True, help="a folder in ImageNet's layout")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", default="on", choices=("auto", "on", "off"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = usable(args.device)
    asked = Bench([], args.images, "data", device, 0, 1, args.steps, args.compile, say=print)
    by_name = {f"{level.network}-{level.speedup}": level for level in LEVELS}
    found: dict[str, dict[str, Any]] = {}
    todo = [*((*each, 1) for each in STEPS), *((*each, GPUS) for each in EIGHTHS)]
    with tempfile.TemporaryDirectory() as scratch:
        for kind, name, share in todo:
            level = by_name[name]
            weights = Path(scratch) / f"{level.network}.safetensors"
            if not weights.exists():
                storage.save(models.fresh(f"torchvision:{level.network}", imagenet.classes(args.images)), weights)
            row = found[label(kind, name, share)] = measured(asked, level, kind, share, weights)
            print(f"{label(kind, name, share)}: {row}", flush=True)
    result = {"steps": found, "environment": environment(device, 1), "repeats": args.steps}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
