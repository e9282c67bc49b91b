"""What is removed together: filters with everything that hangs on them, or single weights.

A *unit* is the smallest thing that can go: one filter with its bias, its norm's scale and shift and whatever the
next layers read of it; or one weight. A *layer* is a run of units, named after the convolution or linear layer that
makes them. A *slice* says, for one dimension of one tensor, which unit each index belongs to. All of pruning is then
index arithmetic on one boolean vector, `pruned[unit]`.

    grouping ─► groups ─► ratios, criteria, masks, penalty, compact
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from growprune.trace import Role

Granularity = Literal["filter", "weight"]
TIED = "it is tied to a layer that stays"
MAKERS: tuple[Role, Role] = "filter", "table"
"""What makes channels: a layer's filters, and an embedding's columns where these are tied to filters."""


@dataclass(frozen=True)
class Layer:
    """Units [start, stop), made by the layer `name`, in the order of execution.

    `stage` counts the network's residual stages from 1 (0: the stem; None: there are none); `index` counts all
    convolutions and linear layers from 0. `stem`: it reads the network's input.
    """

    name: str
    start: int
    stop: int
    index: int
    stage: int | None
    stem: bool

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Slice:
    """Index i along dimension `dim` of `tensor` belongs to unit units[i] (-1: none, it stays).

    `dim` None: every element is a unit of its own, `units` has the tensor's shape. `read`: a layer takes channels in
    along this dimension, whatever else it is to them.
    """

    tensor: str
    dim: int | None
    units: Tensor
    role: Role
    read: bool = False


@dataclass(frozen=True)
class Groups:
    """Layers, and the slices of every tensor that their units own.

    `grouped`: for each grouped convolution or group norm (by its weight) the units of the channels it takes in, from
    which its new number of groups follows. `norms`: the batch norm (by its running mean) that takes in a layer's output
    directly; `biases`: each layer's own bias. `positions`: how often one forward uses each weight of a layer. `order`:
    all layers, prunable or not. `stays`: those of them that lose nothing in any case, and why; and layers that did not
    run. `work`: MACs of layers whose weights are never cut, and the units of the channels that they make. `missed`:
    norms that did not run, others beside them did.
    """

    layers: tuple[Layer, ...]
    slices: tuple[Slice, ...]
    grouped: dict[str, Tensor]
    norms: dict[str, str]
    biases: dict[str, str]
    positions: dict[str, int]
    order: tuple[str, ...]
    granularity: Granularity
    stays: dict[str, str] = field(default_factory=dict)
    work: tuple[tuple[int, Tensor], ...] = ()
    missed: tuple[str, ...] = ()

    @property
    def units(self) -> int:
        return self.layers[-1].stop if self.layers else 0

    @property
    def stages(self) -> int:
        """How many residual stages there are, the stem (stage 0) not counted."""
        return max((layer.stage or 0 for layer in self.layers), default=0)

    def of_role(self, *roles: Role) -> tuple[Slice, ...]:
        return tuple(s for s in self.slices if s.role in roles)

    @property
    def layer_of(self) -> Tensor:
        """Which layer each unit belongs to, by its place among them."""
        return torch.cat([torch.full((layer.size,), i) for i, layer in enumerate(self.layers)])

    def made(self) -> dict[str, Tensor]:
        """By layer, which unit each of its filters (or single weights) belongs to, be it another layer's; -1: none."""
        last_first = sorted(self.of_role("filter"), key=lambda s: s.dim or 0, reverse=True)  # both ways: by the first
        found = {layer_name(s.tensor): s.units.flatten() for s in last_first}
        return {layer.name: found[layer.name] for layer in self.layers}

    def filters(self) -> Tensor:
        """How many of these layers' filters each unit has: one as a rule, more where a group norm or the like ties
        some, be it those of several layers that it takes in side by side."""
        if self.granularity == "weight":
            return torch.ones(1, dtype=torch.long).expand(self.units)
        owned = torch.cat([units[units >= 0] for units in self.made().values()])
        return torch.bincount(owned, minlength=self.units)

    def multiples(self, of: int) -> dict[Layer, int]:
        """For each layer, the least number of units whose channels are a multiple of `of`, wherever they lie.

        Channels of a unit that lie side by side count together, as all that a group norm ties. Those that lie apart,
        one in each equal part of an output or in each group of a convolution, are a multiple in each place. Where no
        number is sure to leave a multiple it is all units: such a layer stays whole.
        """
        if of == 1:
            return dict.fromkeys(self.layers, 1)
        beside, layer_of = [of] * len(self.layers), self.layer_of
        for s in self.slices:
            units, lengths = torch.unique_consecutive(s.units, return_counts=True)
            owned = units >= 0
            for i, length in set(zip(layer_of[units[owned]].tolist(), lengths[owned].tolist(), strict=True)):
                beside[i] = math.gcd(beside[i], length)
        whole, steps = self.uneven(of), (of // each for each in beside)
        return {layer: layer.size if layer in whole else n for layer, n in zip(self.layers, steps, strict=True)}

    def uneven(self, of: int) -> set[Layer]:
        """Layers with a weight whose filters go in lots of unequal size, or lie beside some that always stay: how many
        stay depends on which units do, unless each lot is a multiple by itself."""
        found, layer_of = set[Layer](), self.layer_of
        for s in self.of_role("filter"):
            owned = s.units[s.units >= 0]
            lots, owners = torch.bincount(owned, minlength=self.units), torch.unique(layer_of[owned]).tolist()
            layers = [self.layers[i] for i in owners]
            parts = [lots[layer.start : layer.stop] for layer in layers]
            even = all(bool((part == part[0]).all()) or not bool((part % of).any()) for part in parts)
            if not even or (len(s.units) - len(owned)) % of:
                found.update(layers)
        return found

    def without(self, names: Mapping[str, str]) -> Groups:
        """The same groups less some layers: their units stay, by the reasons given."""
        if not names:
            return self
        kept = [layer for layer in self.layers if layer.name not in names]
        renumber, start = torch.full((self.units + 1,), -1), 0
        layers = []
        for layer in kept:
            renumber[layer.start : layer.stop] = torch.arange(start, start + layer.size)
            layers.append(replace(layer, start=start, stop=start + layer.size))
            start += layer.size
        renumbered = (replace(s, units=renumber[s.units]) for s in self.slices)
        slices = tuple(s for s in renumbered if bool((s.units >= 0).any()))
        losing = {layer_name(s.tensor) for s in slices if s.role == "filter"}
        whole = {name: self.stays.get(name) or names.get(name, TIED) for name in self.order if name not in losing}
        whole |= {name: why for name, why in self.stays.items() if name not in self.order}
        grouped = {name: renumber[units] for name, units in self.grouped.items()}
        work = tuple((macs, renumber[units]) for macs, units in self.work)
        return replace(self, layers=tuple(layers), slices=slices, grouped=grouped, stays=whole, work=work)


def by_reason(stays: Mapping[str, str]) -> dict[str, list[str]]:
    """Layers that stay, by why."""
    result: dict[str, list[str]] = {}
    for layer, why in stays.items():
        result.setdefault(why, []).append(layer)
    return result


def why_none(stays: Mapping[str, str]) -> str:
    """
    >>> why_none({"a": "it reads", "b": "it makes", "c": "it reads"}), why_none({})
    (': 2 stay whole, each since it reads (a, ...), 1 since it makes (b)', '')
    """
    stay = " stay whole,", " stays whole"
    lots = [
        f"{len(layers)}{'' if i else stay[len(layers) == 1]}{' each' * (len(layers) > 1)} since {why} "
        f"({layers[0]}{', ...' if layers[1:] else ''})"
        for i, (why, layers) in enumerate(by_reason(stays).items())
    ]
    return f": {', '.join(lots)}" if lots else ""


def gone(pruned: Tensor, units: Tensor) -> Tensor:
    """pruned[units], and False where an index belongs to no unit."""
    return torch.cat([pruned, pruned.new_zeros(1)])[units.to(pruned.device)]


def owner(tensor: str) -> str:
    """The module that holds a tensor: 'layer1.0.conv1' of 'layer1.0.conv1.weight'."""
    return tensor.rpartition(".")[0]


def layer_name(tensor: str) -> str:
    """A layer is called by its module; a weight of another name, or of the model itself, by its own."""
    return owner(tensor) if tensor.endswith(".weight") else tensor
