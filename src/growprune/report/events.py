"""A run's notes as TensorBoard events, for those who watch there. TensorBoard is loaded only when asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from growprune.errors import GrowpruneError

SCALARS = ("accuracy", "loss", "lr", "lambda", "ms")


class Events:
    """Writes each note's numbers into `folder`, on disk before `note` returns.

    After a resume `from_step` is the first step that will be noted again: what an earlier process wrote of it and of
    later ones is hidden.
    """

    def __init__(self, folder: Path, from_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise GrowpruneError("TensorBoard is not installed: pip install tensorboard") from error
        self.writer = SummaryWriter(log_dir=str(folder), purge_step=from_step)

    def note(self, record: Mapping[str, Any]) -> None:
        for tag, value in scalars(record).items():
            self.writer.add_scalar(tag, value, record["step"])
        self.writer.flush()  # a note is rare, and what a killed process still held would never be written again

    def close(self) -> None:
        self.writer.close()


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """A note's numbers by tag; what is null or not finite has none.

    >>> scalars({"accuracy": 93.4, "loss": None, "layers": {"conv1": {"kept": 0.2, "pruned": 0.1}}})
    {'accuracy': 93.4, 'separation/conv1/kept': 0.2, 'separation/conv1/pruned': 0.1}
    """
    found = {tag: record.get(tag) for tag in SCALARS}
    found["accuracy/before_removal"] = record.get("before")
    for layer, means in (record.get("layers") or {}).items():
        found |= {f"separation/{layer}/{which}": means[which] for which in ("kept", "pruned")}
    return {tag: float(value) for tag, value in found.items() if value is not None and math.isfinite(value)}
