"""Finished runs, read back: from their folders, or from the files that `growprune reproduce` keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from growprune.config import KINDS, Config, Train, folder, saying_nothing
from growprune.errors import GrowpruneError
from growprune.run import CONFIG, RESULT, read_config, read_json, read_notes
from growprune.schedule import is_number

APART = (
    "seed", "device", "threads", "layout", "compile", "kernels", "decode", "deterministic", "eval_every",
    *Config.HARMLESS,
)  # fmt: skip
"""Options that runs of one kind may differ in: chance, and where and how fast they are computed."""


@dataclass(frozen=True)
class Ran:
    """What a run was asked to do, and what it came to."""

    name: str
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    course: tuple[tuple[float, float], ...] = ()  # epochs of fine-tuning, and the accuracy at their ends

    @property
    def options(self) -> dict[str, Any]:
        """What can have made a difference; the network that it began with by its hash, if that is known. An option that
        there was not yet had its default. Large images are cropped otherwise where they were kept on the device: it
        counts what was done, not what --keep says."""
        silent = {*APART, *saying_nothing(self.config.get("schedule"))}
        known = {k: v for k, v in {**self.usual, **self.config}.items() if k not in silent}
        named = Train(**{key: self.config[key] for key in ("model", "data", "seed") if key in self.config})
        if known.get("weights") == str(folder("train", named)):  # trained with the same seed, as is usual
            known["weights"] = None
        if "keep" in known:
            images = (self.result.get("choices") or {}).get("images") or {}
            known["keep"] = "device" if images.get("keep") == "device" else "auto"
        base = (self.result.get("base") or {}).get("sha256")
        return known | ({"weights": base[:8]} if base else {})

    @property
    def usual(self) -> dict[str, Any]:
        """The defaults of its command's options."""
        kind = KINDS.get(str(self.config.get("command")))
        return {each.name: each.default for each in fields(kind)} if kind else {}


def collected(places: Sequence[Path], say: Callable[[str], None]) -> list[Ran]:
    """These runs, each once. What is not finished, or no run, is named and left out; alone it is refused."""
    found, seen = [], set()
    for place in places:
        if place.resolve() in seen:
            continue
        seen.add(place.resolve())
        try:
            run = read(place)
        except GrowpruneError as error:
            if not places[1:]:
                raise
            say(f"{error}; left out")
            continue
        if run is None:
            say(f"{place}: not finished, left out; go on with: growprune resume {place}")
        else:
            found.append(run)
    if not found:
        raise GrowpruneError("report: none of these is a finished run")
    return found


def read(place: Path) -> Ran | None:
    """A run; None if it is not finished."""
    if place.is_file() and place.name == RESULT and (place.parent / CONFIG).is_file():
        place = place.parent
    if place.is_file():
        found = whole(place)
        return Ran(place.stem, found["config"], found, tuple(enumerate(found.get("course") or (), 1)))
    config = read_config(place)
    if config.get("command") == "demo":
        raise GrowpruneError(f"{place}: a demo's folder, whose own report.html compares its ways of pruning")
    if not (place / RESULT).is_file():
        return None
    ends = [note for note in read_notes(place) if note.get("stage") == "finetune"]
    course: list[tuple[Any, Any]] = [(note.get("epoch"), note.get("accuracy")) for note in ends]
    numbers = tuple((epoch, value) for epoch, value in course if is_number(epoch) and is_number(value))
    return Ran(str(place), config, whole(place / RESULT, {"config": config}), numbers)


def whole(file: Path, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A result that says what is compared."""
    found = read_json(file) | dict(more or {})
    accuracy = found.get("accuracy")
    kinds: dict[str, Any] = {"config": dict, "accuracy": dict, "base": (dict, type(None))}
    shaped = all(isinstance(found.get(key), kind) for key, kind in kinds.items()) and "final" in (accuracy or {})
    numbers = [*(accuracy or {}).values(), found.get("speedup"), found.get("sparsity")] if shaped else []
    if not shaped or not all(value is None or is_number(value) for value in numbers):
        raise GrowpruneError(f"{file}: no run's result; give folders of runs, or files of runs that reproduce has kept")
    return found
