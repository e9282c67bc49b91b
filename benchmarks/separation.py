"""Do norms of filters come apart under a penalty that grows for all alike: with batch norm, and without?

    python benchmarks/separation.py [--seeds 3] [--out results/separation.json]

Five convolutions on handwritten digits, trained, then GReg-2's picking as figure 1 has it: λ from 0 to 0.03 in 30,000
steps at a learning rate of 1e-3. Twenty minutes on one CPU core. The file keeps, along λ, the accuracy, and of every
layer the mean L1 norm and its normalised deviation (the standard deviation over the mean).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from growprune.config import Prune, Train
from growprune.jobs import run
from growprune.run import read_notes

WIDTHS = (16, 16, 32, 32, 32)
SHARED: dict[str, Any] = {"data": "digits", "threads": 1}
TRAIN: dict[str, Any] = {"epochs": 100, "batch": 64, "lr": "cosine:0.05", "weight_decay": 5e-4}
PICK: dict[str, Any] = {
    "schedule": "greg2", "ratios": "0.5", "prune_batch": 64, "prune_lr": 1e-3, "ku": 10, "delta_lambda_pick": 1e-5,
    "tau_pick": 0.03, "tau": 0.030003, "ks": 0, "epochs": 0,
}  # fmt: skip


def convolutions(classes: int, normed: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for before, width in zip((1, *WIDTHS), WIDTHS, strict=False):
        layers.append(nn.Conv2d(before, width, 3, padding=1, bias=not normed))
        nn.init.kaiming_normal_(layers[-1].weight)  # type: ignore[arg-type]
        layers += [nn.BatchNorm2d(width), nn.ReLU()] if normed else [nn.ReLU()]
    layers.insert(len(layers) // 2, nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], classes))


def with_batch_norm(num_classes: int = 10) -> nn.Module:
    return convolutions(num_classes, normed=True)


def without(num_classes: int = 10) -> nn.Module:
    return convolutions(num_classes, normed=False)


def watched(model: str, seed: int) -> dict[str, Any]:
    """One network, trained and then pushed all over."""
    with tempfile.TemporaryDirectory() as folder:
        base, pushed = Path(folder, "base"), Path(folder, "pushed")
        made = {"model": f"separation:{model}", "seed": seed, **SHARED}
        run(Train(**made, **TRAIN), base)
        run(Prune(**made, weights=str(base), **PICK), pushed)
        notes = [note for note in read_notes(pushed) if note.get("layers")]
    return {"network": model, "seed": seed, "course": [shown(note) for note in notes]}


def shown(note: dict[str, Any]) -> dict[str, Any]:
    layers = note["layers"].values()
    return {
        "lambda": round(note["lambda"], 6),
        "accuracy": note["accuracy"],
        "deviation": [round(layer["spread"], 4) for layer in layers],
        "norm": [round(statistics.mean(layer["norms"]), 4) for layer in layers],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs = [watched(model.__name__, seed) for seed in range(args.seeds) for model in (with_batch_norm, without)]
    for one in runs:
        print(one["network"], one["seed"])
        for note in one["course"][:: len(one["course"]) // 6]:
            print(f"  λ {note['lambda']:.3f}: deviation {note['deviation']}, accuracy {note['accuracy']:.1f} %")
    if args.out:
        args.out.write_text(json.dumps({"benchmark": "separation", "train": TRAIN, "pick": PICK, "runs": runs}) + "\n")


if __name__ == "__main__":
    main()
