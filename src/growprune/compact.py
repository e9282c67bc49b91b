"""Physical removal: a smaller module of the same class, and what must follow it.

    cut     the module without the pruned units, every tensor narrowed, its own forward untouched
    follow  optimizers take the new parameters, their state narrowed alike
    hold    single weights: exact zeros that stay zero while training

What a vanished filter still sends onward is put into what follows by `folding`.
The model is never changed in place but by `hold`; `cut` works on a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

from growprune.copying import copied
from growprune.errors import GrowpruneError, line
from growprune.groups import Groups, gone, owner
from growprune.holding import keep_zero
from growprune.running import call, in_mode, quietly, tensors, unsound


def kept_indices(groups: Groups, pruned: Tensor) -> dict[str, list[tuple[int, Tensor]]]:
    """For each tensor that gets smaller: along which dimension, which indices stay."""
    result: dict[str, list[tuple[int, Tensor]]] = {}
    for s in groups.slices:
        lost = gone(pruned, s.units)
        if s.dim is not None and bool(lost.any()):
            result.setdefault(s.tensor, []).append((s.dim, (~lost).nonzero().flatten()))
    return result


def narrowed(t: Tensor, cuts: Sequence[tuple[int, Tensor]], sizes: Sequence[int]) -> Tensor:
    """`t` with only the kept indices, along every dimension in which it has the parameter's own size."""
    if t.dim() != len(sizes):
        return t
    channels_last = t.dim() == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)
    for dim, indices in cuts:
        if t.shape[dim] == sizes[dim]:
            t = t.index_select(dim, indices.to(t.device))
    return t.contiguous(memory_format=torch.channels_last) if channels_last else t


def places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Where each tensor hangs: a shared one in several places, all under its first name."""
    first: dict[int, str] = {id(t): name for name, t in tensors(model).items()}
    result: dict[str, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, t in [*module._parameters.items(), *module._buffers.items()]:
            if t is not None:
                result.setdefault(first[id(t)], []).append((module, name))
    return result


def put(where: Sequence[tuple[nn.Module, str]], old: Tensor, new: Tensor) -> None:
    """Hang a new tensor in every place where the old one hung."""
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
        vars(new).update(vars(old))
    for module, name in where:
        table: Any = module._parameters if name in module._parameters else module._buffers
        table[name] = new


BEFORE = "_growprune_before"
"""Where a smaller network keeps, by tensor, the shape that it had at full size, and the one that it was cut to."""


def shapes_before(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The full-size shapes of a smaller network's tensors, also where it is a part of the model; not of tensors whose
    shape has changed since they were cut."""
    now, found = tensors(model), dict[str, tuple[int, ...]]()
    for path, module in model.named_modules():
        for name, (full, cut) in vars(module).get(BEFORE, {}).items():
            name = f"{path}.{name}" if path else name
            if name in now and tuple(now[name].shape) == cut:
                found.setdefault(name, full)
    return found


@torch.no_grad()
def cut(model: nn.Module, groups: Groups, pruned: Tensor) -> nn.Module:
    """A copy of the model without the pruned units."""
    small = copied(model)
    old, where = tensors(small), places(small)
    full = {name: tuple(t.shape) for name, t in old.items()} | shapes_before(model)
    for name, cuts in kept_indices(groups, pruned).items():
        put(where[name], old[name], narrowed(old[name], cuts, old[name].shape))
        for module, _ in where[name]:
            refit(module)
    for name, units in groups.grouped.items():
        lost = gone(pruned, units)
        if bool(lost.any()):
            regroup(small.get_submodule(owner(name)), int((~lost).sum()), len(units))
    vars(small)[BEFORE] = {name: (full[name], tuple(t.shape)) for name, t in tensors(small).items()}
    return small


def refit(module: nn.Module) -> None:
    """Make a standard module's own numbers agree with the shapes of its tensors."""
    if isinstance(module, torch.jit.ScriptModule):  # an activation: one with parameters is refused
        return
    weight = module._parameters.get("weight")
    if isinstance(module, _ConvNd) and weight is not None:
        wide = weight.shape[1] * module.groups
        module.in_channels, module.out_channels = (
            (weight.shape[0], wide) if module.transposed else (wide, weight.shape[0])
        )
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _NormBase):
        sample = next((t for t in (weight, module.running_mean) if t is not None), None)
        module.num_features = module.num_features if sample is None else len(sample)
    elif isinstance(module, nn.GroupNorm) and weight is not None:
        module.num_channels = len(weight)
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = module.weight.shape[1]
    elif isinstance(module, nn.RNNBase):
        first = module._parameters["weight_ih_l0"]
        assert first is not None
        module.input_size = first.shape[1]
    elif weight is not None and weight.dim() == 2 and hasattr(module, "nf"):  # transformers' Conv1D: a linear layer
        vars(module).update(zip(("nx", "nf"), weight.shape, strict=True))


def regroup(module: nn.Module, channels: int, before: int) -> None:
    """The number of groups that the channels left over fall into, their size unchanged or cut evenly."""
    if isinstance(module, _ConvNd):
        module.groups = channels // module.weight.shape[1]
        refit(module)
    elif isinstance(module, nn.GroupNorm):
        module.num_groups = module.num_groups * channels // before
        refit(module)
    else:
        raise GrowpruneError(
            f"a grouped layer inside {type(module).__name__} cannot be narrowed: name it in the option ignore"
        )


# -- the optimizer -------------------------------------------------------------------------------------------------


@torch.no_grad()
def follow(
    optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, small: nn.Module, groups: Groups, pruned: Tensor
) -> None:
    """Optimizers go on with `small`: its parameters replaced, their state (momentum) narrowed the same way."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    new, cuts = dict(small.named_parameters()), kept_indices(groups, pruned)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                name = name_of.get(id(p))
                if name is None:
                    continue
                group["params"][i] = new[name]
                if p in optimizer.state:
                    less, state = cuts.get(name, ()), optimizer.state.pop(p)
                    optimizer.state[new[name]] = {
                        key: narrowed(value, less, p.shape).clone() if isinstance(value, Tensor) else value
                        for key, value in state.items()
                    }
    for name in (each for each in new if each not in set(name_of.values())):  # a bias that folding gave
        take_in(optimizers, new, name)
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):  # one flat history of all parameters: it starts anew
            optimizer.state.clear()
            optimizer._params, optimizer._numel_cache = optimizer.param_groups[0]["params"], None


def take_in(optimizers: Sequence[torch.optim.Optimizer], named: Mapping[str, nn.Parameter], name: str) -> None:
    """A bias joins the group of vectors, if there is one, else its weight's; in the order of the model's parameters, so
    that an optimizer made for the network when it is loaded again can take this one's state."""
    order = {id(p): place for place, p in enumerate(named.values())}
    weight = named[f"{owner(name)}.weight"]
    own = next((each for each in optimizers for g in each.param_groups if any(p is weight for p in g["params"])), None)
    if own is None:  # the weight does not train here, nor does its bias
        return
    home = next(group for group in own.param_groups if any(p is weight for p in group["params"]))
    if not any(p.dim() < 2 for p in home["params"] if id(p) in order):
        every = [group for each in (own, *(o for o in optimizers if o is not own)) for group in each.param_groups]
        ours = (group for group in every if any(id(p) in order for p in group["params"]))
        vectors = next((group for group in ours if all(p.dim() < 2 for p in group["params"])), None)
        if vectors is None and isinstance(own, OF_MATRICES):
            return
        home = vectors or home
    later = [i for i, p in enumerate(home["params"]) if order.get(id(p), -1) > order[id(named[name])]]
    place = later[0] if later else len(home["params"])
    home["params"].insert(place, named[name])
    if "param_names" in home:  # an optimizer that was made of named parameters
        home["param_names"].insert(place, name)


OF_MATRICES = tuple(getattr(torch.optim, name) for name in ("Muon",) if hasattr(torch.optim, name))
"""Optimizers that step nothing else."""


def calibrate(model: nn.Module, batches: Iterable[Any]) -> None:
    """Estimate batch-norm statistics anew, as the mean over the batches; every module keeps its mode, and norms that no
    batch reaches keep their statistics.

    A batch is an input as the example is (a tensor, or a dict of them), or begins with one, as (input, target) does.
    """
    if not isinstance(batches, Iterable):
        raise GrowpruneError(f"compact: calibrate= takes batches to go through, not {batches!r}")
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    before = [[each.clone() for each in statistics(norm)] for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # all batches count alike
    number = 0
    with quietly(model), in_mode(model, training=True):  # where dropout draws random numbers
        for batch in batches:
            try:
                call(model, batch[0] if isinstance(batch, (tuple, list)) else batch)
            except Exception as error:
                raise GrowpruneError(
                    "compact: calibrate= needs batches that are inputs of the model, or (input, target) with several "
                    f"inputs as a tuple; on one of these it fails: {line(error)}"
                ) from error
            number += 1
    for norm, momentum, own in zip(norms, momenta, before, strict=True):
        norm.momentum = momentum
        if own and not bool(norm.num_batches_tracked):
            for now, then in zip(statistics(norm), own, strict=True):
                now.copy_(then)
    if not number:
        raise GrowpruneError("compact: calibrate= holds no batch")
    if (bad := unsound(model)) is not None:
        raise GrowpruneError(f"compact: with the batches of calibrate= '{bad}' comes to NaN or infinite numbers")


def statistics(norm: _BatchNorm) -> list[Tensor]:
    """The tensors that hold them; an empty list if it keeps none."""
    every = norm.running_mean, norm.running_var, norm.num_batches_tracked
    return [each for each in every if each is not None]


# -- single weights ------------------------------------------------------------------------------------------------


@torch.no_grad()
def hold(model: nn.Module, groups: Groups, pruned: Tensor) -> None:
    """Set pruned weights to exact zero, and keep them there: in this module, its copies, and after loading."""
    where = places(model)
    for s in groups.slices:
        keep = ~gone(pruned, s.units)
        for module, name in where[s.tensor]:
            keep_zero(module, name, keep)
