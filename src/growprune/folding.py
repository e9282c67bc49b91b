"""What a vanished filter still sends onward goes into what follows: a bias, or the next batch norm's running mean.

The smaller network then computes what the pushed one did, as far as what filters send onward is the same everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from growprune.compact import kept_indices
from growprune.copying import copied
from growprune.groups import MAKERS, Groups, gone, owner
from growprune.running import call, fresh, leaves, switched, tensors, whole_operators


@dataclass
class Sent:
    """What one call of a layer adds to its output for the vanished channels that it reads, on average; and who takes
    that output in: norms by their running means, "" for anything else."""

    weight: str
    mean: Tensor
    readers: list[str] = field(default_factory=list)


CALLS = {
    **{f"conv{n}d": (0, 1, 1) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": (0, 1, 0) for n in (1, 2, 3)},
    "linear": (0, 1, 1),
    "addmm": (1, 2, 0),
}
"""Operators of layers: which arguments are the input and the weight, and along which dimension of the weight lie the
channels that are read."""


class Onward(TorchDispatchMode):
    """Watches the layers that read vanished channels, and notes what those channels add to their outputs."""

    def __init__(self, model: nn.Module, lost: Mapping[tuple[str, int], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {id(t): name for name, t in tensors(model).items()}
        self.lost = lost
        self.sent: list[Sent] = []
        self.made: dict[int, tuple[Tensor, Sent]] = {}  # by a call's output, which is kept so that its id stays its own
        self.normed: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind, mean = func._overloadpacket.__name__, ""
        if kind in ("batch_norm", "instance_norm") and args[3] is not None:
            mean = self.names.get(id(args[3]), "")
            self.normed[mean] += 1
        self.taken((args, kwargs), mean)
        out = func(*args, **kwargs)
        if kind in CALLS and all(kwargs.get(each, 1) == 1 for each in ("alpha", "beta")):  # addmm's
            self.note(func, kind, args, kwargs, out)
        return out

    def note(self, func: Any, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
        """What a layer's call adds to its output for vanished channels, if it reads any."""
        place, of, dim = CALLS[kind]
        x, weight = args[place], args[of]
        name = self.names.get(id(weight), "")
        if (name, dim) not in self.lost:
            return
        last = weight.dim() if kind.startswith("conv") else 2  # dimensions from the channels' on
        channels = x.dim() - last + 1
        shape = [1] * x.dim()
        shape[channels] = -1
        own = [x * self.lost[name, dim].to(x).view(shape), weight]
        alone = torch.mm(*own) if kind == "addmm" else func(*own, None, *args[3:], **kwargs)
        if alone.numel():  # a call on nothing (a detector that found no box) tells nothing
            self.sent.append(Sent(name, alone.movedim(channels, 0).reshape(alone.shape[channels], -1).mean(1)))
            self.made[id(out)] = out, self.sent[-1]

    def taken(self, values: Any, by: str) -> None:
        for t in leaves(values):
            if id(t) in self.made:
                self.made[id(t)][1].readers.append(by)

    def alone(self, sent: Sent) -> bool:
        """Does a norm take in what this call makes, and nobody else, and that norm nothing else?"""
        return len(sent.readers) == 1 and self.normed[sent.readers[0]] == 1 and sent.readers[0] != ""


@torch.no_grad()
def fold(
    model: nn.Module, small: nn.Module, groups: Groups, pruned: Tensor, example_input: Any, fixed_norm: bool = False
) -> None:
    """Put what vanished filters still send onward into `small`.

    A filter whose weights are zero sends act(β) onward, β its norm's shift (or its bias), if the norm's mean followed
    them to zero; if that was fixed at μ, act(β − γμ/σ). The model runs once with the pruned filters' weights at zero,
    so that every activation in between is its own; what the vanished channels then add to each reader's output (zero
    padding included) is averaged and folded: over its calls, if there are several, but where each call's output is
    taken in by a norm of its own. A weight that is read both ways round (tied autoencoders) is left alone.
    """
    ghost = switched(copied(model), training=False)
    vanished(ghost, groups, pruned, fixed_norm)
    watch = Onward(ghost, lost(groups, pruned))
    with whole_operators(ghost), watch:
        output = call(ghost, fresh(example_input))
    watch.taken(output, "")
    cuts, new = kept_indices(groups, pruned), tensors(small)
    made = {weight: 1 - dim for weight, dim in watch.lost}
    for weight in dict.fromkeys(sent.weight for sent in watch.sent):
        calls = [sent for sent in watch.sent if sent.weight == weight]
        for dim, indices in cuts.get(weight, ()):
            if dim == made[weight]:
                for each in calls:
                    each.mean = each.mean[indices.to(each.mean.device)]
        bias, normed = groups.biases.get(weight), all(map(watch.alone, calls))
        sent = torch.stack([each.mean for each in calls]).mean(0)
        if normed and (len(calls) > 1 or not bias):
            for each in calls:
                new[each.readers[0]].sub_(each.mean)
        elif bias:
            new[bias].add_(sent)
        elif weight not in groups.biases and bool(sent.any()):
            give_bias(small.get_submodule(owner(weight)), sent)


def lost(groups: Groups, pruned: Tensor) -> dict[tuple[str, int], Tensor]:
    """By weight, and its dimension along which channels are read: which of them vanish, where any does."""
    reads = {
        (s.tensor, s.dim): gone(pruned, groups.grouped.get(s.tensor, s.units))
        for s in groups.slices
        if s.read and s.dim is not None
    }
    both = {weight for weight, dim in reads if (weight, 1 - dim) in reads}
    return {key: units for key, units in reads.items() if key[0] not in both and bool(units.any())}


@torch.no_grad()
def vanished(ghost: nn.Module, groups: Groups, pruned: Tensor, fixed_norm: bool) -> None:
    """Set the pruned filters' weights to zero, and their running means, unless these were fixed, to what the layer then
    still sends, its bias. With the norm's scale at zero too it does not matter what else the norm takes in."""
    full = tensors(ghost)
    means = {s.tensor: gone(pruned, s.units).nonzero().flatten() for s in groups.slices if s.role == "mean"}
    followed = {owner(mean) for mean in means}
    for s in groups.of_role(*MAKERS) if fixed_norm else groups.of_role(*MAKERS, "scale", "mean"):
        if s.dim is not None and (s.role != "scale" or owner(s.tensor) in followed):
            there = gone(pruned, s.units).nonzero().flatten()
            full[s.tensor].index_fill_(s.dim, there.to(full[s.tensor].device), 0.0)
    for weight, mean in groups.norms.items() if not fixed_norm else ():
        bias = groups.biases.get(weight)
        if bias and mean in means:
            there = means[mean].to(full[mean].device)
            full[mean][there] = full[bias][there].to(full[mean].dtype)


BIASED = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
)  # fmt: skip


def give_bias(module: nn.Module, bias: Tensor) -> None:
    """A standard layer without bias gets one, to hold what its vanished channels sent; a user's own forward would not
    use it. It trains if the layer does."""
    if type(module).forward in {kind.forward for kind in BIASED}:
        trains = bool(module.weight.requires_grad)
        module.register_parameter("bias", nn.Parameter(bias.clone(), requires_grad=trains))
