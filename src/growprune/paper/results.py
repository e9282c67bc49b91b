"""Runs that were done, small enough for git: one JSON file each, from which every table and figure is made.

OUT/KEY.json        what a run came to: settings, accuracy after every epoch, last and best, time, device, versions,
                    and a hash of which filters went
OUT/base-NAME.json  the base network that all runs of that name began from: its hash, its accuracy
OUT/bases/          those networks, named by their hashes
OUT/runs/           the runs' own folders (checkpoints, networks, notes): needed only to go on with them
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from growprune.config import Config, differences
from growprune.errors import GrowpruneError
from growprune.paper.setting import Base, Scale, Setting, called
from growprune.report import mean
from growprune.run import CONFIG, MODEL, NOTES, RESULT, noted, read_json, read_notes
from growprune.storage import write_whole
from growprune.weights import digest

MOST_SEEDS = 10
"""Seeds that are looked for, however many were asked for this time: what was done once counts."""

HOW = ("precision", "layout", "compile", "kernels", "decode", "keep")
"""Options that say how it is computed, on which bits hang."""
LOCAL = ("weights", "data_dir", "device", "workers", "save_every", "tensorboard")
"""Options that say where a run was done, not what was done."""


@dataclass(frozen=True)
class Ground:
    """A base network to prune, and what is known of it."""

    file: Path
    facts: dict[str, Any]


@dataclass(frozen=True)
class Shelf:
    """Where results stand, and at which scale they are looked for."""

    out: Path
    scale: Scale

    def file(self, setting: Setting, seed: int) -> Path:
        return self.out / f"{setting.key(self.scale, seed)}.json"

    def folder(self, setting: Setting, seed: int) -> Path:
        return self.out / "runs" / setting.key(self.scale, seed)

    def training(self, base: Base) -> Path:
        return self.out / "runs" / f"base-{base.named(self.scale)}"

    def read(self, setting: Setting) -> tuple[list[dict[str, Any]], list[str]]:
        """The finished runs of a setting, and what is wrong with files that are none, or another's."""
        runs, complaints = [], []
        for seed in range(MOST_SEEDS):
            try:
                if (run := self.one(setting, seed)) is not None:
                    runs.append(run)
            except GrowpruneError as error:
                complaints.append(str(error))
        return runs, complaints

    def one(self, setting: Setting, seed: int) -> dict[str, Any] | None:
        """A finished run, if its file is there; an error if that is damaged, or another's."""
        file = self.file(setting, seed)
        return whole(file, setting.config(self.scale, seed, Path()), setting) if file.exists() else None

    def found(self, setting: Setting) -> Found:
        """What there is of a setting; files that are damaged are as if they were not there."""
        faithful = setting.key(self.scale, 0) == setting.key("paper", 0)
        return Found(tuple(self.read(setting)[0]), "paper" if faithful else self.scale)

    def damaged(self, settings: Iterable[Setting]) -> list[str]:
        """What is wrong with the files of these."""
        return [complaint for setting in settings for complaint in self.read(setting)[1]]

    def keep(self, setting: Setting, seed: int, ground: Ground, parallel: int) -> str:
        """Put a finished run on the shelf, if no other process has; what is there and no such run is not lost.

        If the run's notes are damaged the result lacks some of its course: then that, in words.
        """
        with suppress(GrowpruneError):
            if self.one(setting, seed) is not None:
                return ""
        folder, file = self.folder(setting, seed), self.file(setting, seed)
        facts = {"base": {key: ground.facts[key] for key in ("sha256", "accuracy")}, "parallel": parallel}
        result = slim(folder) | facts | course(folder, setting)
        if file.exists():
            file.replace(file.with_suffix(OLD))
        put(file, result)
        known = result["gone"] is not None or setting.granularity == "weight"
        if known and len(result["course"]) >= result["config"]["epochs"] and None not in noted(folder):
            return ""
        return f"{folder / NOTES}: damaged: {file.name} lacks some of the run's course, or which filters went"

    # -- base networks -----------------------------------------------------------------------------------------------

    def about(self, base: Base) -> Path:
        return self.out / f"base-{base.named(self.scale)}.json"

    def computed(self, base: Base) -> dict[str, Any]:
        """How a base network of before was computed, as far as it is an option."""
        if not self.about(base).exists():
            return {}
        try:
            config = base_facts(self.about(base))["config"]
        except GrowpruneError:  # whoever needs it will say so
            return {}
        return {key: config[key] for key in HOW if key in config}

    def ground(self, base: Base, again: Callable[[dict[str, Any]], bool] = lambda facts: False) -> Ground | None:
        """The base network, if it has been trained; runs that began from it cannot go with another. One that is gone is
        as if it had not been, if it can be trained `again`, to the same bits; if its training's folder is there, it is
        in that."""
        if not self.about(base).exists():
            return None
        facts = base_facts(self.about(base))
        file, trained = self.network(base, facts["sha256"]), self.training(base) / MODEL
        if not file.exists() and trained.exists() and digest(trained) == facts["sha256"]:
            write(file, trained.read_bytes())
        if not file.exists() and again(facts):
            return None
        if not file.exists() or digest(file) != facts["sha256"]:
            state = "has changed" if file.exists() else "is gone"
            raise GrowpruneError(
                f"{file}: the base network of the runs in {self.out} {state}: put it back, or give another --out"
            )
        return Ground(file, facts)

    def network(self, base: Base, sha256: str) -> Path:
        return self.out / "bases" / f"{base.named(self.scale)}-{sha256[:16]}.safetensors"

    def keep_base(self, base: Base, parallel: int = 1, images: str | None = None) -> None:
        """Put a base network on the shelf, under its hash; one that was lost and has been trained again, if it is the
        very same. `images` tells those that it was trained on from others (`reading.fingerprint`)."""
        folder, about = self.training(base), self.about(base)
        network = (folder / MODEL).read_bytes()
        sha256 = hashlib.sha256(network).hexdigest()
        if about.exists() and (lost := base_facts(about)["sha256"]) != sha256:
            raise GrowpruneError(
                f"{folder}: trained again, it is not the base network that the runs in {self.out} began from "
                f"({sha256[:16]}, not {lost[:16]}): give another --out, or delete that folder to train it once more"
            )
        facts = slim(folder)
        reached = facts["accuracy"]["final"]
        if base.weights and self.scale != "smoke" and reached < base.accuracy / 2:
            raise GrowpruneError(
                f"{base.weights}: right on {reached:.2f} % of these images, on ImageNet on {base.accuracy} %: are the "
                f"folders of {base.data} ImageNet's classes (n01440764 ...)? Put them right, then delete {folder}"
            )
        write(self.network(base, sha256), network)
        if about.exists():
            return
        notes = [note["accuracy"] for note in read_notes(folder)]
        known = {"sha256": sha256, "accuracy": facts["accuracy"]["final"], "course": notes, "parallel": parallel}
        put(about, facts | known | {"fingerprint": images})


def luck(run: Mapping[str, Any]) -> tuple[int, str]:
    """What chance a run had: its seed, and the network that it began with."""
    return run["config"]["seed"], (run.get("base") or {}).get("sha256", "")


@dataclass(frozen=True)
class Found:
    """The runs of one setting that are done, and the scale that they come to: `paper` if they are as the paper's."""

    runs: tuple[dict[str, Any], ...]
    scale: Scale = "paper"

    def __bool__(self) -> bool:
        return bool(self.runs)

    def paired(self, other: Found) -> tuple[Found, Found]:
        """Of both only what has the same seeds, and began from the same network: one's luck must not be held against
        the other."""
        common = self.luck & other.luck
        one, two = (
            replace(each, runs=tuple(run for run in each.runs if luck(run) in common)) for each in (self, other)
        )
        return one, two

    @property
    def luck(self) -> frozenset[tuple[int, str]]:
        return frozenset(map(luck, self.runs))

    @property
    def seeds(self) -> set[int]:
        return {run["config"]["seed"] for run in self.runs}

    @property
    def precisions(self) -> set[str]:
        """In which it was fine-tuned, as far as it is known."""
        tuned = [(run.get("choices") or {}).get("finetune") or {} for run in self.runs]
        return {choice["precision"] for choice in tuned if "precision" in choice}

    def values(self, which: str) -> list[float]:
        return [run["accuracy"][which] for run in self.runs]

    def mean(self, which: str = "final") -> float:
        return statistics.mean(self.values(which))

    def spread(self, which: str = "final") -> float:
        """The standard deviation as the paper's tables have it, over the runs."""
        return statistics.pstdev(self.values(which))

    def text(self, which: str = "final") -> str:
        """The mean, the spread, and of how many runs.

        >>> Found(()).text(), Found(({"accuracy": {"final": 93.0}}, {"accuracy": {"final": 93.2}})).text()
        ('not run', '93.10 ± 0.10 (2)')
        """
        return mean(self.values(which)) or "not run"


AGAIN = "delete the folder, and it is run again"


def slim(folder: Path) -> dict[str, Any]:
    """A finished run without what only its folder needs."""
    kept = ("accuracy", "speedup", "sparsity", "params", "macs", "steps", "seconds", "images", "choices", "environment")
    result, config = read_json(folder / RESULT), read_json(folder / CONFIG)
    if lacking := [key for key in kept if key not in result]:
        raise GrowpruneError(f"{folder / RESULT}: not a run's result (no {lacking[0]}): {AGAIN}")
    config["data"] = called(config["data"])
    return {key: result[key] for key in kept} | {"config": {k: v for k, v in config.items() if k not in LOCAL}}


def course(folder: Path, setting: Setting) -> dict[str, Any]:
    """How it went: accuracy at every epoch's end of fine-tuning, and while λ grew."""
    notes = read_notes(folder)
    wanted = {"step", "lambda", "loss", *(["layers"] if setting.watched else [])}
    pushed = [note for note in notes if note["stage"] == "prune" and note.keys() >= wanted]
    if setting.watched and not pushed:
        raise GrowpruneError(f"{folder / NOTES}: damaged: nothing is left to draw of: {AGAIN}")
    found: dict[str, Any] = {
        "course": [note["accuracy"] for note in notes if note["stage"] == "finetune"],
        "pushing": [{key: note[key] for key in ("step", "lambda", "accuracy", "loss")} for note in pushed],
        "gone": gone(notes),
    }
    if setting.watched is None:
        return found
    names = list(pushed[0]["layers"])
    watched = setting.watched if setting.watched in names else names[len(names) // 2]  # a smaller network's middle one
    return found | {"watched": watched, "separation": separation(pushed, watched)}


def gone(notes: Sequence[dict[str, Any]]) -> str | None:
    """Tells the filters that were removed from any others: a hash of their names, layer by layer."""
    for note in notes:
        if note["phase"] == "removal" and "gone" in note:
            return hashlib.sha256(json.dumps(note["gone"], sort_keys=True).encode()).hexdigest()[:16]
    return None


def separation(notes: Sequence[dict[str, Any]], watched: str) -> list[dict[str, Any]]:
    """Figure 1's data: the spread of every layer's norms as λ grows, and every filter's norm in one layer."""
    return [
        {
            "step": note["step"],
            "lambda": note["lambda"],
            "spread": {name: round(layer["spread"], 5) for name, layer in note["layers"].items()},
            "norms": note["layers"][watched]["norms"],
        }
        for note in notes
    ]


OLD = ".json.old"
"""Of a file that was damaged, or another run's, and is not in the way any more."""
SHAPE: dict[str, Any] = {
    "accuracy": dict.fromkeys(("base", "before_removal", "after_removal", "final", "best"), float),
    "base": {"sha256": str, "accuracy": float},
    "images": {"train": float},
    "environment": {"device": str},
    "config": {"seed": float, "epochs": float, "batch": float, "prune_batch": float, "data": str},
    **dict.fromkeys(("speedup", "sparsity", "steps", "seconds"), float),
    "course": [float],
}
"""What tables read of a result."""
SEPARATION: dict[str, Any] = {
    "watched": str, "separation": [{"step": float, "lambda": float, "spread": {}, "norms": [float]}]
}  # fmt: skip
"""And figure 1."""
BASE: dict[str, Any] = {
    "sha256": str, "accuracy": float, "seconds": float, "images": {"train": float}, "environment": {"device_name": str},
    "config": {"epochs": float, "lr": str, "batch": float},
}  # fmt: skip
"""And of a base network."""
FREE = {*LOCAL, "precision", "layout", "compile", "kernels", "deterministic", "threads", "decode", "keep"}
"""Options of which a run's name says nothing: where it was done, and how it was computed."""


def whole(file: Path, plan: Config, setting: Setting) -> dict[str, Any]:
    """A result, or a word on what is wrong with it."""
    found = run_facts(file, SHAPE | (SEPARATION if setting.watched else {}))
    planned = {**plan.to_json(), "data": called(plan.data)}
    for name, there, wanted in differences(found["config"], planned):
        if name not in FREE - {other for other, _ in setting.other}:
            raise GrowpruneError(f"{file}: another run's result ({name} {there}, not {wanted})")
    return found


def run_facts(file: Path, shape: Mapping[str, Any] = SHAPE) -> dict[str, Any]:
    return shaped(file, shape, "not a run's result (no {})")


def base_facts(file: Path) -> dict[str, Any]:
    try:
        return shaped(file, BASE, "not a base network's (no {})")
    except GrowpruneError as error:
        raise GrowpruneError(f"{error}: put it back, or give another --out") from None


def shaped(file: Path, shape: Mapping[str, Any], else_said: str) -> dict[str, Any]:
    """What a JSON file holds, if it is of this shape."""
    found = read_json(file)
    if (lacking := lacks(found, shape)) is not None:
        raise GrowpruneError(f"{file}: {else_said.format(lacking)}")
    return found


def lacks(found: Any, shape: Any) -> str | None:
    """The first thing that is not there, or not of its kind.

    >>> lacks({"a": {"b": 1}}, {"a": {"b": float}}), lacks({"a": {"b": "1"}}, {"a": {"b": float}})
    (None, 'a.b')
    """
    if shape is float:
        return None if isinstance(found, (int, float)) and math.isfinite(found) else ""
    if isinstance(shape, list):
        return "" if not isinstance(found, list) or any(lacks(each, shape[0]) is not None for each in found) else None
    if not isinstance(shape, Mapping):
        return None if isinstance(found, shape) else ""
    if not isinstance(found, Mapping):
        return ""
    for name, inner in shape.items():
        if (deeper := lacks(found.get(name), inner)) is not None:
            return f"{name}.{deeper}" if deeper else name
    return None


def put(file: Path, what: dict[str, Any]) -> None:
    write(file, (json.dumps(what) + "\n").encode())


def write(file: Path, what: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, what)
