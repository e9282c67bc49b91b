"""Proof by execution: the smaller network computes what the masked one computes, on the user's own example.

The tracer may be wrong about a model's code, and that code may have widths written into it. So nothing is believed: at
the start one unit of every layer is cut on trial, and at the end the smaller network is run beside the masked one. It
must also run in training mode, if the model does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from growprune.compact import cut
from growprune.copying import copied
from growprune.errors import GrowpruneError, line, warn
from growprune.groups import Groups, Layer, gone
from growprune.running import call, fresh, leaves, quietly, switched, tensors, to_train_on

TOLERANCE = {torch.double: 1e-9, torch.float: 1e-4, torch.half: 1e-2, torch.bfloat16: 5e-2}
"""How far, relative to the largest of an output, a compacted network may stray from its masked self: rounding, no more.
"""
ROUNDING = 1e-14
"""Differences that are less than this beside the largest number that differs are none, even with twice the digits."""

OR_SELECTS = (
    "or, if the model sorts or selects (top-k, NMS), so that rounding swaps what it picks: give another example, or "
    "trained weights"
)
"""What else may be the matter: an untrained detector's scores are all but equal."""


def tolerance(model: nn.Module) -> float:
    """By the coarsest number format in the model; a GPU's convolutions may be a few digits less exact (Winograd's)."""
    kinds = {p.dtype.to_real() for p in model.parameters() if p.is_floating_point() or p.is_complex()}
    on_gpu = any(p.is_cuda for p in model.parameters())
    return max([TOLERANCE.get(kind, 5e-2) for kind in kinds] + [2e-3 if on_gpu else 0.0])


@torch.no_grad()
def masked(model: nn.Module, groups: Groups, pruned: Tensor) -> nn.Module:
    """A full-size copy in which a pruned unit reads as zero wherever a layer takes it in: what `cut` must equal."""
    full = copied(model)
    old = tensors(full)
    for s in groups.slices:
        if s.dim is None:
            old[s.tensor].masked_fill_(gone(pruned, s.units).to(old[s.tensor].device), 0.0)
        elif s.read:
            lost = gone(pruned, s.units).nonzero().flatten()
            old[s.tensor].index_fill_(s.dim, lost.to(old[s.tensor].device), 0.0)
    return full


Pair = tuple[list[Tensor], list[Tensor]]
"""Two networks' outputs, in double precision."""


def outputs(small: nn.Module, full: nn.Module, example_input: Any) -> Pair:
    """What two networks put out in evaluation mode. A copy of `small` runs, so that what its forward counts or keeps is
    left alone."""
    trial = copied(small)
    outs: Pair = [], []
    for net, found in zip((trial, full), outs, strict=True):
        hooks = [m.register_forward_pre_hook(widen) for m in net.modules() if isinstance(m, _NormBase)]
        with quietly(net):
            made = leaves(call(switched(net, training=False), fresh(example_input)))
            found += [t.to(torch.cdouble if t.is_complex() else torch.double) for t in made]
        for hook in hooks:
            hook.remove()
    for ran, own in zip(trial.modules(), small.modules(), strict=True):
        if isinstance(own, _NormBase) and isinstance(ran, _NormBase):
            own.num_features = ran.num_features
    return outs


def difference(small: nn.Module, full: nn.Module, example_input: Any) -> float:
    """How far apart two networks are on the example."""
    return distance(*outputs(small, full, example_input))


def distance(those: Sequence[Tensor], these: Sequence[Tensor]) -> float:
    """The largest difference of two networks' outputs, each relative to the largest of its numbers that differ."""
    alike = [t.shape for t in those] == [t.shape for t in these]
    return apart(*(telling(those, these) if alike else (those, these)))


def apart(those: Sequence[Tensor], these: Sequence[Tensor], together: bool = False) -> float:
    """The largest difference of two networks' outputs, in double precision, each relative to its own largest number, or
    to that of all `together`; ∞ if their shapes differ, NaN if any of it is."""
    if [t.shape for t in those] != [t.shape for t in these]:
        return math.inf
    errors = [0.0]
    for x, y in zip(those, these, strict=True):
        off = torch.where(x == y, 0.0, (x - y).abs())  # an infinity is equal to itself: masked scores have some
        if off.numel():
            beside = largest(these) if together else largest([y])
            errors.append(float(off.max()) / (beside or largest([x]) or 1.0))
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def largest(outputs: Iterable[Tensor]) -> float:
    finite = (t[t.isfinite()] for t in outputs)
    return max((float(t.abs().max()) for t in finite if t.numel()), default=0.0)


def telling(those: Sequence[Tensor], these: Sequence[Tensor]) -> Pair:
    """Of two networks' outputs what is not the same in both, which tells nothing of an output's size: −1e9 for what is
    masked, say, beside scores near 0."""
    none = ROUNDING * largest(y[x != y] for x, y in zip(those, these, strict=True))
    where = [~((x == y) | ((x - y).abs() <= none)) for x, y in zip(those, these, strict=True)]
    return [x[at] for x, at in zip(those, where, strict=True)], [y[at] for y, at in zip(these, where, strict=True)]


def strays(small: nn.Module, full: nn.Module, example_input: Any) -> float:
    """How far the smaller network strays from the masked one; within its tolerance that is rounding.

    What sorts or selects (top-k, a detector's NMS) turns over near-equals by rounding, and a difference of equals is
    nothing else. So what strays is run again with twice the digits: rounding is then gone, and whatever depends on a
    width is not. Where a forward, or a device, knows no double precision, outputs are compared all together.
    """
    found = outputs(small, full, example_input)
    error = distance(*found)
    if error <= tolerance(small):
        return error
    exact = tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, example_input)
    try:
        with Doubled():  # type: ignore[no-untyped-call]
            again = difference(copied(small).double(), copied(full).double(), exact)
    except Exception:
        again = error if error == math.inf else apart(*telling(*found), together=True)
    return again if again <= tolerance(small) else error


class Doubled(TorchDispatchMode):
    """What a forward turns into float32 by itself (`x.float() / 255`, of pixels) becomes double."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") == torch.float:
            kwargs = {**kwargs, "dtype": torch.double}
        return func(*args, **kwargs)


def untrainable(small: nn.Module, model: nn.Module, example_input: Any) -> Exception | None:
    """What the smaller network fails with in training mode, where the model does not: noise of a fixed width, say, that
    evaluation does not add. What training puts out is not compared, for chance may have a part in it."""
    for example in to_train_on(example_input):
        failure = fails(small, example, training=True)
        if failure is None or fails(model, example, training=True) is None:
            return failure
    return None


def fails(net: nn.Module, example_input: Any, training: bool) -> Exception | None:
    try:
        trial = copied(net)
        with quietly(trial):
            call(switched(trial, training), fresh(example_input))
    except Exception as failure:
        return failure
    return None


def widen(norm: Any, args: Any) -> None:
    """A norm without tensors (InstanceNorm as it comes) learns its width from what it meets."""
    if norm.weight is None and norm.running_mean is None and args:
        single = isinstance(norm, _InstanceNorm) and args[0].dim() == norm._get_no_batch_dim()
        norm.num_features = args[0].shape[0 if single else 1]


def prove(model: nn.Module, small: nn.Module, groups: Groups, pruned: Tensor, example_input: Any) -> None:
    """Run the smaller network beside the masked one; refuse it if it fails or strays."""
    try:
        error = strays(small, masked(model, groups, pruned), example_input)
    except Exception as failure:
        if (own := fails(model, example_input, training=False)) is not None:
            raise GrowpruneError(
                f"the model itself fails on the example: {line(own)}; has it, or its precision, changed?"
            ) from own
        raise GrowpruneError(
            f"the smaller network fails on the example: {line(failure)}; name the layer in the option ignore"
        ) from failure
    if (failed := untrainable(small, model, example_input)) is not None:
        raise GrowpruneError(
            f"the smaller network fails on the example in training mode: {line(failed)}; name the layer in the option "
            "ignore"
        ) from failed
    if not error <= tolerance(small):
        steady(model, example_input)
        seen = "in the shapes of its output" if error == math.inf else f"by {error:.1e} of an output's largest number"
        raise GrowpruneError(
            f"the smaller network strays from the masked one {seen}: its forward must depend on a width, then name "
            f"that layer in the option ignore; {OR_SELECTS}"
        )
    if not error and blind(model, groups, pruned, example_input):
        warn(
            "the model puts out the same on the example without any filter of the layers that lose some (zeros go in, "
            "say, or what they add is lost in rounding), so there is nothing to prove a removal by: give another "
            "example, or trained weights"
        )


def blind(model: nn.Module, groups: Groups, pruned: Tensor, example_input: Any) -> bool:
    """Does the example show nothing of any filter in the layers that lose some (or in all, where none is known to),
    whatever has not begun to train yet? Asked where the two networks agree to the last bit, which those that differ in
    width seldom do."""
    model, every = stirred(model, groups), torch.zeros(groups.units, dtype=torch.bool)
    for layer in [each for each in groups.layers if bool(pruned[each.start : each.stop].any())] or groups.layers:
        every[layer.start : layer.stop] = True
    try:
        found = outputs(model, masked(model, groups, every), example_input)
    except Exception:  # without them it cannot run
        return False
    return any(t.numel() for t in found[0]) and not distance(*found)


def steady(model: nn.Module, example_input: Any) -> None:
    """Refuse a model whose own output changes from run to run: no layer is to blame for that."""
    try:
        error = difference(model, copied(model), example_input)
    except Exception as failure:
        raise GrowpruneError(f"a copy of the model fails on the example: {line(failure)}") from failure
    if math.isnan(error):
        raise GrowpruneError("the model puts out NaN on the example, so no removal can be proved: give another example")
    if not error <= tolerance(model):
        raise GrowpruneError(
            f"two runs of the model on the example differ by {error:.1e} of an output's largest number, so no removal "
            "can be proved: turn off, in evaluation mode, what its forward leaves to chance, or to what it keeps "
            "elsewhere"
        )


@torch.no_grad()
def stirred(model: nn.Module, groups: Groups) -> nn.Module:
    """The model for a trial at the start: what goes into a head, a norm or a gate that starts at zero would not show.

    In a copy, every parameter that is all zeros is some positive number of usual size; what is only added stays zero.
    """
    added = {*groups.biases.values(), *(s.tensor for s in groups.of_role("shift"))}
    zeros = [name for name, p in model.named_parameters() if name not in added and not bool(p.any())]
    if not zeros:
        return model
    trial, generator = copied(model), torch.Generator().manual_seed(0)
    own = dict(trial.named_parameters())
    for name in zeros:
        fan_in = math.prod(own[name].shape[1:])
        own[name].copy_(torch.rand(own[name].shape, generator=generator) / max(1, fan_in) ** 0.5)
    return trial


def unprovable(model: nn.Module, found: Groups, example_input: Any) -> dict[str, str]:
    """Layers whose removal the model's own code does not survive, with the reason: tried out, one unit of each.

    All are tried at once; only if that fails, one by one.
    """
    if found.granularity == "weight":
        return {}
    model = stirred(model, found)

    def reason(layers: Iterable[Layer]) -> str | None:
        pruned = torch.zeros(found.units, dtype=torch.bool)
        for layer in layers:
            if layer.size > 1:
                pruned[layer.start] = True
        try:
            small = cut(model, found, pruned)
            error = strays(small, masked(model, found, pruned), example_input)
        except Exception as failure:
            return f"{type(failure).__name__}: {line(failure)}"
        if not error <= tolerance(small):
            return f"the output changes by {error:.1e}"
        failed = untrainable(small, model, example_input)
        return None if failed is None else f"in training {type(failed).__name__}: {line(failed)}"

    if reason(found.layers) is None:
        return {}
    steady(model, example_input)
    failing = {layer.name: why for layer in found.layers if (why := reason([layer])) is not None}
    together = reason([layer for layer in found.layers if layer.name not in failing])
    if together is not None:
        raise GrowpruneError(
            f"no layer fails alone, but together: {together}; name some of them in the option ignore; {OR_SELECTS}"
        )
    shown = ", ".join(f"'{name}' ({why})" for name, why in list(failing.items())[:3])
    stay = "1 layer stays: the model's own code fails without it"
    if len(failing) > 1:
        stay = f"{len(failing)} layers stay: the model's own code fails without them"
    warnings.warn(f"{stay}: {shown}", stacklevel=3)
    return failing
