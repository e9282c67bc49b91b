"""A speed-up to reach: filters go one by one, where the layer's ratio lags most, until the MACs are as asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.groups import Groups, why_none

WITHIN = 0.01
"""How near a speed-up must be to what was asked for."""
SMALL = 64
"""Layers of a network in which pairs of them are tried: in a larger one a filter is less."""
LAST_STAGE = 0.43
"""What the last stage loses of what the first does, the median over the paper's own lists
(ResNet34's, which leaves its last stage whole, aside)."""


class Cost:
    """The MACs that `measure` counts as a function of how many units each layer loses.

    A weight is used `positions` times a forward, so a layer costs positions × its number of weights, and each unit that
    goes takes its share of rows and columns away; of other work, its share of what that makes.
    """

    def __init__(self, groups: Groups, sizes: Mapping[str, torch.Size]) -> None:
        self.fixed = torch.tensor(
            [n * math.prod(sizes[w][2:]) for w, n in groups.positions.items()], dtype=torch.double
        )
        self.sides = [torch.tensor([sizes[w][d] for w in groups.positions], dtype=torch.double) for d in (0, 1)]
        self.lost = [torch.zeros(len(groups.positions), len(groups.layers), dtype=torch.double) for _ in (0, 1)]
        layer_of = groups.layer_of
        widths = torch.tensor([layer.size for layer in groups.layers], dtype=torch.double)
        row = {weight: i for i, weight in enumerate(groups.positions)}
        for s in groups.slices:
            if s.tensor in row and s.dim is not None:
                owned = layer_of[s.units[s.units >= 0]]
                self.lost[s.dim][row[s.tensor]] += torch.bincount(owned, minlength=len(widths)) / widths
        self.work = torch.tensor([macs for macs, _ in groups.work], dtype=torch.double)
        self.cut = torch.zeros(len(groups.work), len(groups.layers), dtype=torch.double)
        for i, (_, units) in enumerate(groups.work):
            owned = layer_of[units[units >= 0]]
            self.cut[i] = torch.bincount(owned, minlength=len(widths)) / widths / len(units)

    def __call__(self, lost: Tensor) -> float:
        """MACs left when layer l loses lost[l] units."""
        rows, columns = (side - share @ lost for side, share in zip(self.sides, self.lost, strict=True))
        return float((self.fixed * rows * columns).sum() + (self.work * (1 - self.cut @ lost)).sum())


def levels(size: int, multiple: int) -> list[int]:
    """How many may stay, from all downwards.

    >>> levels(20, 8), levels(8, 8), levels(4, 8), levels(4, 1)
    ([20, 16, 8], [8], [4], [4, 3, 2, 1])
    """
    return [size, *range((size - 1) // multiple * multiple, 0, -multiple)]


def solve(times: float, by_stage: bool, groups: Groups, sizes: Mapping[str, torch.Size], multiple: int) -> list[int]:
    """Remove filters one by one (or from one multiple to the next), always where the layer's ratio lags most, until the
    MACs are as asked."""
    if groups.granularity != "filter":
        raise GrowpruneError("speedup: only with granularity filter: zero weights alone save no MACs")
    pace = torch.ones(len(groups.layers), dtype=torch.double)
    if by_stage:
        if groups.stages < 2:
            raise GrowpruneError("ratios: Speedup(per='stage') needs a network with residual stages; this one has none")
        pace = torch.tensor([LAST_STAGE if layer.stage == groups.stages else 1.0 for layer in groups.layers]).double()
    cost = Cost(groups, sizes)
    multiples = groups.multiples(multiple)
    gone = [layer.size - torch.tensor(levels(layer.size, n)) for layer, n in multiples.items()]
    due = [
        (g[:-1] + g[1:]) / 2 / (layer.size * p) for g, layer, p in zip(gone, groups.layers, pace, strict=True)
    ]  # half-way between what is gone before a step and after it
    owner = torch.cat([torch.full((len(d),), i) for i, d in enumerate(due)])
    queue = torch.argsort(torch.cat(due), stable=True)
    owner = owner[queue]

    def steps(taken: int) -> list[int]:
        """How many steps each layer has made when so many are taken from the queue."""
        return [int(n) for n in torch.bincount(owner[:taken], minlength=len(gone))]

    def lost(steps: Sequence[int]) -> list[int]:
        return [int(g[n]) for g, n in zip(gone, steps, strict=True)]

    def reached(steps: Sequence[int]) -> float:
        return full / cost(torch.tensor(lost(steps)).double())

    def off(steps: Sequence[int]) -> float:
        return abs(reached(steps) / times - 1)

    full = cost(torch.zeros(len(gone)).double())
    low, high = 0, len(queue)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(steps(middle)) >= times else (middle + 1, high)
    best, *other = sorted((steps(n) for n in (low - 1, low) if n >= 0), key=off)
    for near in (best, *other):  # a single filter is much of a small network: perhaps another layer's fits better
        if off(best) > WITHIN:
            best = min(best, *beside(near, [len(g) - 1 for g in gone]), key=off)
    if off(best) > WITHIN:
        whole = f" in multiples of {multiple}" if multiple > 1 else ""
        most = reached(steps(len(queue)))
        why = why_none(groups.stays) if most < times and multiple == 1 else ""
        found = f"{reached(best):.3g}"
        way = f"; ask for {found}" if found != "1" else ""
        raise GrowpruneError(f"speedup: no ratio gives {times:g}x within 1 %{whole}: the nearest is {found}x{why}{way}")
    return lost(best)


def beside(steps: list[int], most: Sequence[int]) -> Iterator[list[int]]:
    """These, and what lies near them: a step more or less in one layer, or more in one and less in another.

    >>> list(beside([0, 1], [1, 1]))
    [[0, 1], [1, 1], [0, 0], [1, 0]]
    """
    yield steps
    more = [i for i, n in enumerate(steps) if n < most[i]]
    less = [i for i, n in enumerate(steps) if n]
    few = len(steps) <= SMALL
    for up, down in [*((i, None) for i in more), *((None, i) for i in less), *(product(more, less) if few else ())]:
        if up != down:
            yield [n + (i == up) - (i == down) for i, n in enumerate(steps)]
