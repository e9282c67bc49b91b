"""Single weights held at exact zero while they train: in the module that was pruned, in its copies, and after loading.

A mask lies beside each such weight, as a buffer. A hook of the module sees to it that gradients are zero there, one of
every optimizer that steps leave weights and momenta so.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

MASK = "_growprune_held"
"""A held weight's mask is the buffer `weight_growprune_held` beside it; it is not part of the state dict."""

HELD: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Held weights and their masks, for the hook that runs after every optimizer's step."""

HOOKED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Those of them whose gradients pass through `zeroed`; a frozen one does when it trains again."""


def keep_zero(module: nn.Module, name: str, keep: Tensor) -> None:
    weight = module._parameters[name]
    assert weight is not None
    known, keep = dict(held(module)), keep.to(weight.device)
    if name in known:  # pruned before: what was zero stays zero
        keep = keep & known[name].to(weight.device)
    module.register_buffer(f"{name}{MASK}", keep, persistent=False)
    if not known:
        module.register_forward_pre_hook(Hold())
        module.register_load_state_dict_post_hook(rezero)
    rezero(module, None)


def held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The held weights of one module and their masks."""
    for name, mask in module._buffers.items():
        if name.endswith(MASK) and mask is not None and module._parameters.get(name.removesuffix(MASK)) is not None:
            yield name.removesuffix(MASK), mask


class Hold:
    """The hook of a module that holds weights at zero: it sees to it that gradients and steps leave them there.

    It runs before each forward, for the weights may be new ones. A module's copy, whose forward nobody need call (an
    attention reads its last layer's weight), has a copy of it, which holds the copy's weights from the start.
    """

    def __init__(self) -> None:
        self.weights: list[tuple[nn.Parameter, Tensor]] = []

    def __call__(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # by then they are held
            return
        every = [(module._parameters[name], mask) for name, mask in held(module)]
        self.weights = [(w, mask) for w, mask in every if isinstance(w, nn.Parameter)]  # torch.func puts tensors there
        self.arm()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.arm()

    @torch.no_grad()
    def arm(self) -> None:
        watch_every_optimizer()
        for weight, mask in self.weights:
            if weight.requires_grad and weight not in HOOKED:
                HOOKED[weight] = True
                weight.register_hook(partial(zeroed, weakref.ref(weight)))
            if HELD.get(weight) is not mask:
                HELD[weight] = mask
                weight.masked_fill_(~mask.to(weight.device), 0.0)


@torch.no_grad()
def rezero(module: nn.Module, _: Any) -> None:
    """After weights were loaded, which may be others than before (assign=True)."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, Hold):
            hook(module, None)
    for name, mask in held(module):
        weight: Any = module._parameters[name]
        weight.masked_fill_(~mask.to(weight.device), 0.0)


def zeroed(weight: Any, grad: Tensor) -> Tensor:
    mask = HELD.get(weight())
    return grad if mask is None else grad.masked_fill(~mask.to(grad.device), 0.0)


@torch.no_grad()
def after_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Held weights are zero after every step of any optimizer, and so is its state (momentum) for them."""
    if not HELD:
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            mask = HELD.get(p)
            if mask is not None:
                for t in (p, *optimizer.state.get(p, {}).values()):
                    if isinstance(t, Tensor) and t.shape == mask.shape:
                        t.masked_fill_(~mask.to(t.device), 0.0)


@cache
def watch_every_optimizer() -> None:
    """Once, when the first weight is held."""
    register_optimizer_step_post_hook(torch.compiler.disable(after_any_step))
