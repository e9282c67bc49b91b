"""A deep copy of a user's model: also of what deepcopy does not copy, as activations, closures of hooks, partials."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from growprune.errors import GrowpruneError, line

DEEPLY_COPIED = torch.strided, torch.sparse_coo
"""Layouts of tensors that deepcopy knows."""


def copied(model: nn.Module) -> nn.Module:
    """A deep copy. Activations kept from the last forward hang on a graph and are copied without it; objects whose
    methods are hooks stay the user's own; parameters keep the attributes that were put on them."""
    kept = tree_leaves([{k: v for k, v in vars(m).items() if not k.startswith("_")} for m in model.modules()])
    memo: dict[int, Any] = {id(t): t.detach().clone() for t in kept if isinstance(t, Tensor) and not t.is_leaf}
    memo |= {id(t): t.detach().clone() for t in model.buffers() if t.layout not in DEEPLY_COPIED}
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            owner = getattr(hook, "__self__", None)
            if owner is not None and not isinstance(owner, nn.Module):
                memo[id(owner)] = owner
    tables = [table for module in model.modules() for table in functions(module)]
    partials = {id(f): f for table in tables for f in table.values() if isinstance(f, partial)}
    memo |= partials  # deepcopy would copy what they hold, whosever it is
    empty = [t for m in model.modules() for t in vars(m).values() if type(t) in (dict, OrderedDict) and not t]
    memo |= {id(table): type(table)() for table in empty}  # a module has a dozen, and deepcopy is slow with them
    known = dict(memo)
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise GrowpruneError(
            f"the model cannot be copied{uncopied(model, known)}: {type(error).__name__}: {line(error)}; take that off "
            "the model while it is pruned, or give it a __deepcopy__"
        ) from error
    for old, new in zip(model.parameters(), twin.parameters(), strict=True):
        vars(new).update(vars(old))
    memo = {key: value for key, value in memo.items() if key not in partials}
    for table in [table for module in twin.modules() for table in functions(module)]:
        table.update({key: moved(f, memo) for key, f in table.items() if isinstance(f, (FunctionType, partial))})
    return twin


def uncopied(model: nn.Module, memo: Mapping[int, Any]) -> str:
    """An attribute that cannot be copied, of the innermost module that has one; nothing if none is found."""
    for path, module in reversed(list(model.named_modules())):
        mine = {name: value for name, value in vars(module).items() if name not in nn.Module().__dict__}
        for name, value in {**mine, **module._parameters, **module._buffers}.items():
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                return f", for '{path}.{name}'" if path else f", for its attribute '{name}'"
    return ""


def functions(module: nn.Module) -> list[dict[Any, Any]]:
    """Where functions hang on a module: its hooks, and its attributes (a forward that was put in its class's place)."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return [*hooks, vars(module)]


def moved(value: Any, memo: dict[int, Any]) -> Any:
    """What stands for `value` in the copy that was made with this memo.

    Deepcopy takes a function for an atom, so that the copy's would read and write what the model's own holds of the
    model (in its closure, its defaults, its arguments if partial). What is no part of the model stays the user's.
    """
    if id(value) in memo:
        return memo[id(value)]
    memo[id(value)] = value  # meanwhile: a function may hold itself
    if all(moved(each, memo) is each for each in holds(value)):
        return value

    def here(each: Any) -> Any:
        return moved(each, memo)

    new: Any
    if isinstance(value, CellType):
        new = CellType(here(value.cell_contents))
    elif isinstance(value, MethodType):
        new = MethodType(value.__func__, here(value.__self__))
    elif isinstance(value, partial):
        new = partial(here(value.func), *map(here, value.args), **{k: here(v) for k, v in value.keywords.items()})
    else:
        cells, defaults = (tuple(map(here, each or ())) for each in (value.__closure__, value.__defaults__))
        new = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
        new.__kwdefaults__ = {k: here(v) for k, v in (value.__kwdefaults__ or {}).items()}
        vars(new).update(vars(value))
    memo[id(value)] = new
    return new


def holds(value: Any) -> list[Any]:
    """What a function holds, and a cell of its closure."""
    if isinstance(value, CellType):
        return [] if value == CellType() else [value.cell_contents]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        return [*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return []
