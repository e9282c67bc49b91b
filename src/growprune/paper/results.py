"""Runs that were done, small enough for git: one JSON file each, from which every table and figure is made.

OUT/SCALE/KEY.json     what a run came to: settings, accuracy after every epoch, last and best, time, device, versions
OUT/SCALE/runs/KEY/    the run's own folder (checkpoints, network, notes): needed only to go on with it
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from growprune.paper.setting import Scale, Setting
from growprune.run import MODEL, NOTES, read_json
from growprune.storage import write_whole


@dataclass(frozen=True)
class Shelf:
    """Where results stand, and at which scale they are looked for."""

    out: Path
    scale: Scale

    def file(self, setting: Setting, seed: int) -> Path:
        return self.out / f"{setting.key(self.scale, seed)}.json"

    def folder(self, setting: Setting, seed: int) -> Path:
        return self.out / "runs" / setting.key(self.scale, seed)

    def base(self, setting: Setting) -> Path:
        name = setting.base.name if self.scale != "smoke" else f"{setting.base.name}-smoke"
        return self.out / "runs" / f"base-{name}"

    def found(self, setting: Setting, seeds: int) -> Found:
        """What there is of a setting."""
        files = [(seed, self.file(setting, seed)) for seed in range(seeds)]
        done = [read_json(path) for _, path in files if path.exists()]
        return Found(tuple(done), tuple(seed for seed, path in files if not path.exists()))

    def keep(self, setting: Setting, seed: int, base: dict[str, Any]) -> dict[str, Any]:
        """Put a finished run on the shelf; what is there already stays."""
        folder, file = self.folder(setting, seed), self.file(setting, seed)
        if not file.exists():
            notes = [json.loads(text) for text in (folder / NOTES).read_bytes().splitlines()]
            write_whole(
                file, (json.dumps(slim(read_json(folder / "result.json"), notes, setting, base)) + "\n").encode()
            )
        return read_json(file)


@dataclass(frozen=True)
class Found:
    """The runs of one setting that are done, and the seeds that are missing."""

    runs: tuple[dict[str, Any], ...]
    missing: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.runs)

    def values(self, which: str) -> list[float]:
        return [run["accuracy"][which] for run in self.runs]

    def mean(self, which: str = "final") -> float:
        return statistics.mean(self.values(which))

    def spread(self, which: str = "final") -> float:
        """The standard deviation as the paper's tables have it, over the runs."""
        return statistics.pstdev(self.values(which))

    def text(self, which: str = "final") -> str:
        """
        >>> Found((), (0,)).text()
        'not run'
        """
        if not self.runs:
            return "not run"
        return f"{self.mean(which):.2f}" + (f" ± {self.spread(which):.2f}" if len(self.runs) > 1 else "")


def slim(
    result: dict[str, Any], notes: Sequence[dict[str, Any]], setting: Setting, base: dict[str, Any]
) -> dict[str, Any]:
    """A run without what only its folder needs."""
    tuned = [note for note in notes if note["stage"] == "finetune"]
    pushed = [note for note in notes if note["stage"] == "prune" and note["phase"] != "removal"]
    kept = ("accuracy", "speedup", "params", "macs", "sparsity", "seed", "steps", "seconds", "schedule", "criterion",
            "granularity", "scope", "ratios", "epochs", "model", "data", "environment", "choices")  # fmt: skip
    return {
        **{key: result[key] for key in kept},
        "base": base,
        "course": [note["accuracy"] for note in tuned],
        "pushing": [{key: note[key] for key in ("step", "lambda", "accuracy", "loss")} for note in pushed],
        "separation": separation(pushed) if setting.tau_pick is not None else None,
    }


def separation(notes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figure 1's data: the spread of every layer's norms as λ grows, and every filter's norm."""
    return [
        {
            "step": note["step"],
            "lambda": note["lambda"],
            "spread": {name: round(layer["spread"], 5) for name, layer in note["layers"].items()},
            "norms": {name: layer["norms"] for name, layer in note["layers"].items()},
        }
        for note in notes
    ]


def fingerprint(folder: Path) -> str:
    """A network's hash: by it runs say which base they started from."""
    return hashlib.sha256((folder / MODEL).read_bytes()).hexdigest()[:16]
