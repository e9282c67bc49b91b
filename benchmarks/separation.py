"""Do norms of filters come apart under a penalty that grows for all alike: with batch norm, with its statistics fixed
meanwhile, and without it?

    python benchmarks/separation.py [--seeds 3] [--jobs 2] [--out results/separation.json]

Five convolutions on handwritten digits, trained, then GReg-2's picking as figure 1 has it: λ from 0 to 0.03 in 30,000
steps at a learning rate of 1e-3. Twenty minutes on two CPU cores. Along λ the file keeps the accuracy, and of
every layer but the first, which is not pruned: the normalised deviation of its filters' L1 norms (the standard
deviation over the mean), the least and the greatest share that a filter still has of its norm, and how many of the half
with the least norms at λ = 0 are still in it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

import growprune as gp
from growprune.config import Prune, Train
from growprune.jobs import run
from growprune.paper.figure1 import least_half
from growprune.run import read_notes

WIDTHS = (16, 16, 32, 32, 32)
HALF = sum(WIDTHS[1:]) // 2
SHOWN = (0, 0.01, 0.015, 0.02, 0.025, 0.03)
SHARED: dict[str, Any] = {"data": "digits", "threads": 1}
TRAIN: dict[str, Any] = {"epochs": 100, "batch": 64, "lr": "cosine:0.05", "weight_decay": 5e-4}
PICK: dict[str, Any] = {
    "schedule": "greg2", "ratios": "0.5", "prune_batch": 64, "prune_lr": 1e-3, "ku": 10, "delta_lambda_pick": 1e-5,
    "tau_pick": 0.03, "tau": 0.030003, "ks": 0, "epochs": 0,
}  # fmt: skip


def convolutions(classes: int, normed: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for number, (before, width) in enumerate(zip((1, *WIDTHS), WIDTHS, strict=False)):
        convolution = nn.Conv2d(before, width, 3, padding=1, bias=not normed)
        nn.init.kaiming_normal_(convolution.weight)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()] if normed else [convolution, nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if number == 1 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], classes))


def with_batch_norm(num_classes: int = 10) -> nn.Module:
    return convolutions(num_classes, normed=True)


def without(num_classes: int = 10) -> nn.Module:
    return convolutions(num_classes, normed=False)


KINDS = {  # a network, and batch norm's statistics while it is pushed
    "with_batch_norm": (with_batch_norm, "batch"),
    "fixed_batch_norm": (with_batch_norm, "fixed"),
    "without": (without, "batch"),
}


def watched(job: tuple[str, int]) -> dict[str, Any]:
    """One network, trained and then pushed all over."""
    kind, seed = job
    model, norm = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        base, pushed = Path(folder, "base"), Path(folder, "pushed")
        made = {"model": f"separation:{model.__name__}", "seed": seed, **SHARED}
        run(Train(**made, **TRAIN), base, quiet=True)
        run(Prune(**made, weights=str(base), prune_norm=norm, **PICK), pushed, quiet=True)
        notes = [note for note in read_notes(pushed) if note.get("layers")]
    return {"network": kind, "seed": seed, "course": [shown(note, notes[0]) for note in notes]}


def shown(note: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    pairs = [(layer, first["layers"][name]) for name, layer in note["layers"].items()]
    shares = [[a / b for a, b in zip(now["norms"], then["norms"], strict=True)] for now, then in pairs]
    return {
        "lambda": round(note["lambda"], 6),
        "accuracy": note["accuracy"],
        "deviation": [round(layer["spread"], 4) for layer in note["layers"].values()],
        "share": [[round(min(each), 4), round(max(each), 4)] for each in shares],
        "least": [len(least_half(now) & least_half(then)) for now, then in pairs],
    }


# -- what `norm.py` has in common with it ------------------------------------------------------------------------------


def arguments(about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def processes(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))


def keep(out: Path | None, **found: Any) -> None:
    if out:
        versions = {"torch": torch.__version__, "growprune": gp.__version__}
        out.write_text(json.dumps(found | {"environment": versions}) + "\n")


def main() -> None:
    args = arguments(__doc__)
    jobs = [(kind, seed) for kind in KINDS for seed in range(args.seeds)]
    with processes(args.jobs) as pool:
        runs = list(pool.map(watched, jobs))
    for one in runs:
        print(f"{one['network']}, seed {one['seed']}: mean deviation, shares of the norm, least half that still is")
        for wanted in SHOWN:
            note = min(one["course"], key=lambda note: abs(note["lambda"] - wanted))
            low, high = (pick(share) for pick, share in zip((min, max), zip(*note["share"], strict=True), strict=True))
            mean = statistics.mean(note["deviation"])
            print(f"  λ {note['lambda']:.4f}: {mean:.3f}, {low:.3f} to {high:.3f}, {sum(note['least'])} of {HALF}")
    keep(args.out, benchmark="separation", train=TRAIN, pick=PICK, runs=runs)


if __name__ == "__main__":
    main()
