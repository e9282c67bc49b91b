"""All the state that a pruner has, in one place: what it saves, and whether what is loaded fits.

Everything else it is made of follows from its arguments; what of these must agree is the state's `plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from growprune.attached import Turns
from growprune.checks import short
from growprune.errors import GrowpruneError, line
from growprune.schedule import is_whole
from growprune.separation import StopRule


@dataclass
class State:
    """Where a pruner stands."""

    pruned: Tensor  # by unit: does it go? before the pick, all that may
    generator: torch.Generator
    rule: StopRule | None
    step: int = 0
    past: int = 0  # steps since it was done
    turns: Turns = field(default_factory=Turns)
    picked: bool = False
    ended: int | None = None  # the step at which the ratio rule ended pushing
    began: Tensor | None = None  # of single weights, by layer: how large what goes was beside what stays when picked

    def to(self, device: torch.device) -> None:
        self.pruned = self.pruned.to(device)
        self.began = None if self.began is None else self.began.to(device)
        if self.rule is not None and self.rule.ratio is not None:
            self.rule.load(self.rule.ratio.to(device))

    def saved(self, plan: dict[str, Any]) -> dict[str, Any]:
        """In a dict of plain values and tensors, which `load` goes on from."""
        return {
            "plan": plan,
            "step": self.step,
            "past": self.past,
            "turn": sorted(self.turns.stepped),
            "picked": self.picked,
            "pruned": self.pruned.cpu().clone(),
            "ended": self.ended,
            "began": None if self.began is None else self.began.cpu().clone(),
            "ratio": None if self.rule is None or self.rule.ratio is None else self.rule.ratio.cpu().clone(),
            "generator": self.generator.get_state(),
        }

    def load(self, saved: dict[str, Any], plan: dict[str, Any], total_steps: int) -> None:
        """What was saved, if it is whole and of this plan; else it is refused, nothing changed."""
        saved = whole(saved, len(self.pruned))
        for key, mine in plan.items():
            if saved["plan"].get(key) != mine:
                what = SAID.get(key, f"its {key}")
                raise GrowpruneError(
                    f"the state is of another plan: {what} is {short(saved['plan'].get(key))}, here it is {short(mine)}"
                )
        if saved["step"] > total_steps:
            raise GrowpruneError(f"the state is at step {saved['step']}, the plan has {total_steps}")
        if saved["ended"] is not None and self.rule is None:
            raise GrowpruneError(f"the state's push ended at step {saved['ended']}, by a ratio that this plan has not")
        for key in ("began", "ratio"):
            fits(saved, key)
        self.step, self.picked, self.ended = int(saved["step"]), bool(saved["picked"]), saved["ended"]
        self.past, self.turns.stepped = int(saved["past"]), {*saved["turn"]}
        self.began = None if saved["began"] is None else saved["began"].to(self.pruned.device)
        self.pruned.copy_(saved["pruned"])
        self.generator.set_state(saved["generator"])
        if self.rule is not None:
            self.rule.load(None if saved["ratio"] is None else saved["ratio"].to(self.pruned.device))


SAID = {"ratios": "what goes of each layer", "layers": "what it can prune"}
"""Parts of a plan, in words where their names do not say what they hold."""
NEWER: dict[str, Any] = {"past": 0, "turn": [], "began": None}
"""What older states do not have."""


def wrong(key: str, what: object) -> GrowpruneError:
    return GrowpruneError(f"this is not a pruner's state: its '{key}' is {what}")


def fits(saved: dict[str, Any], key: str) -> None:
    """Has it one number for each layer that loses something?"""
    parts = saved["pruned"].split([size for _, size in saved["plan"]["layers"]])
    layers, given = sum(bool(part.any()) for part in parts), saved[key]
    if given is not None and given.shape != (layers,):
        raise wrong(key, f"{tuple(given.shape)}, not {(layers,)}")


def whole(given: Any, units: int) -> dict[str, Any]:
    """A pruner's state, if this is one: whole and of the right kinds, an older one with what it does not have."""
    if not isinstance(given, dict):
        raise GrowpruneError(f"this is not a pruner's state: need a dict, not {type(given).__name__}")
    kinds: dict[str, Any] = {
        "plan": dict, "step": int, "turn": list, "picked": bool, "pruned": Tensor, "ended": int | None,
        "began": Tensor | None, "ratio": Tensor | None, "generator": Tensor,
    }  # fmt: skip
    saved: dict[str, Any] = NEWER | given
    for key, kind in kinds.items():
        if key not in saved:
            raise GrowpruneError(f"this is not a pruner's state: it has no '{key}'")
        if not isinstance(saved[key], kind):
            raise wrong(key, short(saved[key]))
    step, ended = [saved["step"]], [] if saved["ended"] is None else [saved["ended"]]
    for key, numbers in {"step": step, "past": [saved["past"]], "turn": saved["turn"], "ended": ended}.items():
        if not all(is_whole(n) and n >= 0 for n in numbers) or (key == "ended" and numbers > step):
            raise wrong(key, short(saved[key]))
    generator = torch.Generator().get_state()
    for key, shape, kind in (("pruned", (units,), torch.bool), ("generator", generator.shape, generator.dtype)):
        if saved[key].shape != shape or saved[key].dtype != kind:
            raise wrong(key, f"{tuple(saved[key].shape)}, not {tuple(shape)}")
    try:
        torch.Generator().set_state(saved["generator"])
    except RuntimeError as error:
        raise wrong("generator", f"none: {line(error)}") from error
    return saved
