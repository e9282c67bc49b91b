"""Which optimizer carries which pruner's penalty; and what trains past it, so that nothing is pushed.

A framework may wrap an optimizer, make it anew, or never step the one that a pruner was attached to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from growprune.errors import GrowpruneError, warn


class Pushes(Protocol):
    @property
    def done(self) -> bool: ...

    def _pushed(self) -> Mapping[Tensor, str]: ...


ATTACHED: WeakKeyDictionary[torch.optim.Optimizer, WeakSet[Any]] = WeakKeyDictionary()
"""By optimizer, the pruners whose hooks it runs."""

MISSED: WeakKeyDictionary[Pushes, int] = WeakKeyDictionary()
"""By pruner, how often in a row its parameters were stepped by another optimizer, until that was told."""


def within(given: Any) -> Any:
    """The optimizer itself, out of a wrapper around its step() (accelerate's, Lightning's)."""
    while isinstance(given, torch.optim.Optimizer) and not hooked(given):
        inner = getattr(given, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        given = inner
    return given


def hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Does it run hooks when it steps? torch marks the classes that do."""
    return bool(getattr(type(optimizer).step, "hooked", False))


class Turns:
    """Which of several optimizers, by number, have stepped in this step of the loop: it ends when all have, or, if one
    is left out, when another begins the next."""

    def __init__(self) -> None:
        self.stepped: set[int] = set()

    def begins(self, number: int) -> bool:
        """Before its step: is that one of the next turn?"""
        if number not in self.stepped:
            return False
        self.stepped.clear()
        return True

    def ends(self, number: int, of: int) -> bool:
        """After its step: was it the last of so many?"""
        self.stepped.add(number)
        if len(self.stepped) < of:
            return False
        self.stepped.clear()
        return True


def alone(optimizers: Iterable[torch.optim.Optimizer], both_push: Callable[[Any], list[str]]) -> None:
    """Refuse a second pruner of the same parameters on an optimizer: their penalties would add up."""
    others = {other for each in optimizers for other in ATTACHED.get(each, ())}
    if twice := [name for other in others for name in both_push(other)]:
        raise GrowpruneError(
            f"attach: another pruner that pushes '{twice[0]}' is attached to this optimizer: detach() that one, or "
            "make a new optimizer"
        )


def note(optimizer: torch.optim.Optimizer, pruner: Pushes) -> None:
    ATTACHED.setdefault(optimizer, WeakSet()).add(pruner)
    MISSED[pruner] = 0
    watch_every_optimizer()


def forget(optimizer: torch.optim.Optimizer, pruner: Pushes) -> None:
    ATTACHED.get(optimizer, WeakSet()).discard(pruner)


def before_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Tell, once, whoever trains what is to be pushed with an optimizer that carries no penalty.

    At the second step in a row: one alone may be an optimizer that steps the attached one within its own step.
    """
    for mine, pruners in list(ATTACHED.items()):
        for pruner in list(pruners):
            if pruner not in MISSED or pruner.done:
                continue
            if mine is optimizer:
                MISSED[pruner] = 0
            elif (name := held(optimizer, names := pruner._pushed())) is not None and not pushes(optimizer, names):
                MISSED[pruner] += 1
                if MISSED[pruner] == 2:
                    del MISSED[pruner]
                    warn(
                        f"'{name}' is trained by another optimizer ({type(optimizer).__name__}) than the one that the "
                        "pruner is attached to, so these steps push nothing: detach(), and attach() to this one"
                    )


def pushes(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> bool:
    """Does it carry the penalty of a pruner that is not done, of some of these parameters?"""
    return any(not each.done and not names.keys().isdisjoint(each._pushed()) for each in ATTACHED.get(optimizer, ()))


def held(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> str | None:
    """The first of these parameters that the optimizer holds, if it does."""
    return next((names[p] for group in optimizer.param_groups for p in group["params"] if p in names), None)


@cache
def watch_every_optimizer() -> None:
    """Once, when the first pruner is attached."""
    register_optimizer_step_pre_hook(torch.compiler.disable(before_any_step))


# -- after removal -------------------------------------------------------------------------------------------------


STILL_LARGE = (
    "this optimizer trains the smaller network since compact(), but no gradient has come to it: does the loop still "
    "call the larger one?"
)
SMALL_ALREADY = (
    "this optimizer trains the larger network, which is still pushed, but no gradient has come to it: does the loop "
    "call the smaller one already?"
)


def watch_left_behind(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Tell, once, whoever goes on with an optimizer that holds the larger network still, unless it pushes that anew."""
    larger, told = WeakIdKeyDictionary(dict.fromkeys(model.parameters())), False

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal told
        if told or ATTACHED.get(optimizer):
            return
        told = True
        if any(p in larger for group in optimizer.param_groups for p in group["params"]):
            warn(
                "this optimizer holds the parameters of before compact(): it does not train the smaller network; call "
                "compact(optimizer=...) with it, or make a new one"
            )

    optimizer.register_step_pre_hook(torch.compiler.disable(before_step))


def watch_idle(optimizers: Iterable[torch.optim.Optimizer], model: nn.Module, message: str) -> None:
    """Tell, once, whoever goes on with another network than the one that these optimizers train: at the second step in
    a row for which no gradient has come to it, if none ever did. (The first may be made to quiet a scheduler.)"""
    own, optimizers = WeakIdKeyDictionary(dict.fromkeys(model.parameters())), list(optimizers)
    idle, over = dict.fromkeys(range(len(optimizers)), 0), False

    def before_step(number: int, args: Any, kwargs: Any) -> None:
        nonlocal over
        if over:
            return
        held = [p for each in optimizers for group in each.param_groups for p in group["params"] if p in own]
        if any(p.grad is not None for p in held) or args[1:] or kwargs.get("closure"):
            over = True
            return
        idle[number] += 1
        if idle[number] > 1 and any(p.requires_grad for p in held):
            over = True
            warn(message)

    for number, each in enumerate(optimizers):
        each.register_step_pre_hook(
            torch.compiler.disable(lambda _, args, kwargs, number=number: before_step(number, args, kwargs))
        )
