"""Which units go: a score for each, the least go first.

A criterion sees a layer as a matrix, one row a unit: all the weights of that filter (with those of filters tied to it),
or the one weight. L1 and L2 need the weights alone; Taylor and OBD first collect gradients or curvatures on data, as
tensors shaped like the parameters, laid out in the same rows. A plain function of the matrix is a criterion too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from growprune import curvature
from growprune.copying import copied
from growprune.curvature import Loss
from growprune.errors import GrowpruneError, line, nearest
from growprune.groups import MAKERS, Groups, Layer
from growprune.ratios import pruned_of, rounded
from growprune.running import call, exact, switched, tensors

Batches = Iterable[tuple[Any, Any]]


class Criterion:
    """Scores one layer; `collect` comes first, once, for criteria that need more than the weights.

    `adds`: the score is a sum over weights, so that a unit of several filters scores as much as they do together. To be
    compared with units of more or fewer filters it is divided by their number, in all layers that the unit is part of.
    """

    adds: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """What a saved state calls it."""
        return type(self).__name__

    def collect(self, model: nn.Module, example_input: Any) -> dict[str, Tensor]:
        """Tensors by parameter name, handed to `score` in the weights' layout; nothing by default."""
        return {}

    def score(self, weight: Tensor, extra: Tensor | None, generator: torch.Generator) -> Tensor:
        raise TypeError(f"{type(self).__name__} must say how it scores a layer: define score()")


class L1(Criterion):
    """Σ|w| (Li et al., 2017), the paper's criterion."""

    adds: ClassVar[bool] = True

    def score(self, weight: Tensor, extra: Tensor | None, generator: torch.Generator) -> Tensor:
        return weight.abs().sum(1)


class L2(Criterion):
    """√Σw²."""

    def score(self, weight: Tensor, extra: Tensor | None, generator: torch.Generator) -> Tensor:
        return weight.square().sum(1).sqrt()


class Random(Criterion):
    """A score by chance: any subset is as likely as any other."""

    def score(self, weight: Tensor, extra: Tensor | None, generator: torch.Generator) -> Tensor:
        return torch.rand(len(weight), generator=generator).to(weight.device)


@dataclass(frozen=True)
class Taylor(Criterion):
    """|Σ w·g|: the first-order change of the loss when the unit goes (Molchanov et al., 2017).

    `batches` gives (input, target) pairs; without it the model's own predictions on the example input are the targets.
    `loss` takes the model's output, whatever that is, and the target.
    """

    batches: Batches | None = None
    loss: Loss = F.cross_entropy
    adds: ClassVar[bool] = True

    def collect(self, model: nn.Module, example_input: Any) -> dict[str, Tensor]:
        return average(self, model, example_input, lambda net, x, y: gradients(self.loss(call(net, x), y), net))

    def score(self, weight: Tensor, extra: Tensor | None, generator: torch.Generator) -> Tensor:
        assert extra is not None
        return (weight * extra).sum(1).abs()


@dataclass(frozen=True)
class OBD(Criterion):
    """½Σ h·w²: the second-order change of the loss, with the diagonal h of its curvature (Optimal Brain Damage).

    `batches` as for Taylor. `loss` takes the model's output and the target and is a mean over samples, which come
    first in the outputs; it curves in them, so the model returns logits or log-probabilities, and not the loss itself.
    `probes` random estimates of h are made on every batch (`curvature`).
    """

    batches: Batches | None = None
    loss: Loss = F.cross_entropy
    probes: int = 1
    seed: int = 0
    adds: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.probes, int) or self.probes < 1:
            raise GrowpruneError(f"OBD: probes must be a whole number, 1 or more, not {self.probes!r}")

    def collect(self, model: nn.Module, example_input: Any) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def diagonal(net: nn.Module, x: Any, y: Any) -> dict[str, Tensor]:
            output = call(net, x)
            total: dict[str, Tensor] = {}
            for _ in range(self.probes):
                found = gradients(curvature.probe(self.loss, output, y, generator), net, retain_graph=True)
                for name, g in found.items():
                    total[name] = total.get(name, 0) + exact(g).square() / self.probes
            return total

        found = average(self, model, example_input, diagonal)
        if not any(bool(h.any()) for h in found.values()):
            raise GrowpruneError(
                "criterion: this loss does not curve in the model's outputs, so OBD cannot tell its filters apart: let "
                "the model return logits, and take cross-entropy, or use taylor"
            )
        return found

    def score(self, weight: Tensor, extra: Tensor | None, generator: torch.Generator) -> Tensor:
        assert extra is not None
        return 0.5 * (extra * weight.square()).sum(1)


@dataclass(frozen=True)
class Custom(Criterion):
    """A function of the user's own: a matrix, one row a unit, to one score a row."""

    function: Callable[[Tensor], Tensor]

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)

    def score(self, weight: Tensor, extra: Tensor | None, generator: torch.Generator) -> Tensor:
        return self.function(weight)


KNOWN: Mapping[str, type[Criterion]] = {"l1": L1, "l2": L2, "taylor": Taylor, "obd": OBD, "random": Random}


def find(criterion: str | Criterion | Callable[[Tensor], Tensor]) -> Criterion:
    """A criterion by name, as it is, or around a function."""
    if isinstance(criterion, Criterion):
        return criterion
    if isinstance(criterion, str):
        if criterion not in KNOWN:
            raise GrowpruneError(
                f"criterion: unknown '{criterion}'{nearest(criterion, KNOWN)} (known: {', '.join(KNOWN)})"
            )
        return KNOWN[criterion]()
    if isinstance(criterion, type):
        name = criterion.__name__
        raise GrowpruneError(f"criterion: {name} is a class: give what it makes, as {name}(...)")
    if callable(criterion):
        return Custom(criterion)
    raise GrowpruneError(f"criterion: {criterion!r} is neither a name nor a function")


# -- a layer as a matrix -------------------------------------------------------------------------------------------


class Rows:
    """Lays tensors shaped like the parameters out as one matrix a layer: a row a unit, its filters side by side.

    In float32 at least. The indices are made once and live on the device, so that laying out waits for nothing.
    `beside`: by a layer's first unit, how many filters lie in each row.
    """

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.single = {int(s.units.min()): s.tensor for s in groups.slices if s.dim is None}
        self.parts: dict[int, list[tuple[str, int, Tensor, Tensor]]] = {}
        self.beside: dict[int, Tensor] = {}
        starts = torch.tensor([layer.start for layer in groups.layers])
        for s in groups.of_role(*MAKERS):
            if s.dim is None:
                continue
            within = torch.searchsorted(starts, s.units[s.units >= 0], right=True) - 1
            for layer in (groups.layers[place] for place in torch.unique(within).tolist()):
                inside = (s.units >= layer.start) & (s.units < layer.stop)
                index = by_unit(inside.nonzero().flatten(), s.units[inside] - layer.start, layer.size)
                part = (s.tensor, s.dim, index.clamp(min=0).to(device), (index >= 0).to(device))
                self.parts.setdefault(layer.start, []).append(part)
                self.beside[layer.start] = (index >= 0).sum(1) + self.beside.get(layer.start, 0)

    def __call__(self, layer: Layer, values: Mapping[str, Tensor]) -> Tensor:
        if layer.start in self.single:
            return exact(values[self.single[layer.start]].detach()).reshape(-1, 1)
        found = []
        for tensor, dim, index, real in self.parts[layer.start]:
            rows = exact(values[tensor].detach()).movedim(dim, 0).flatten(1)[index]
            found.append((rows * real[:, :, None]).flatten(1))
        return torch.cat(found, dim=1)


def by_unit(indices: Tensor, units: Tensor, size: int) -> Tensor:
    """For each unit its indices, side by side; -1 fills up where a unit has fewer than others.

    >>> by_unit(torch.tensor([4, 5, 6]), torch.tensor([1, 0, 1]), 2).tolist()
    [[5, -1], [4, 6]]
    """
    times = torch.bincount(units, minlength=size)
    order = torch.argsort(units, stable=True)
    place = torch.arange(len(units)) - (times.cumsum(0) - times)[units[order]]
    result = torch.full((size, int(times.max())), -1)
    result[units[order], place] = indices[order]
    return result


@torch.no_grad()
def scores(
    groups: Groups,
    model: nn.Module,
    example_input: Any,
    criterion: Criterion,
    generator: torch.Generator,
    rows: Rows | None = None,
    across: bool = False,
) -> Tensor:
    """The score of every unit, on the model's device. One that adds is divided by the unit's number of filters: in
    layers whose units differ in it, or in all if scores are to be compared `across` layers."""
    values, rows = tensors(model), rows or Rows(groups, next(model.parameters()).device)
    with torch.enable_grad():
        extra = criterion.collect(model, example_input)
    result = []
    for layer in groups.layers:
        more = rows(layer, extra) if extra else None
        found = criterion.score(rows(layer, values).clone(), more, generator)
        if not isinstance(found, Tensor) or found.shape != (layer.size,):
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise GrowpruneError(f"criterion: need one score a row of '{layer.name}', shape ({layer.size},), not {got}")
        found, beside = exact(found), rows.beside.get(layer.start)
        if criterion.adds and beside is not None and (across or bool((beside != beside[0]).any())):
            found = found / beside.to(found.device)
        result.append(found)
    every = torch.cat(result)
    if bool(torch.isnan(every).any()):
        raise GrowpruneError("criterion: some scores are NaN, so what goes would be chance")
    return every


def least(scores: Tensor, counts: Mapping[Layer, int]) -> Tensor:
    """Which units go: in each layer as many as it says, those with the least scores.

    >>> least(torch.tensor([3.0, 1.0, 2.0]), {Layer("conv", 0, 3, 0, None, stem=False): 2}).tolist()
    [False, True, True]
    """
    gone = torch.zeros_like(scores, dtype=torch.bool)
    for layer, count in counts.items():
        gone[layer.start + torch.argsort(scores[layer.start : layer.stop], stable=True)[:count]] = True
    return gone


def least_of_all(
    scores: Tensor, filters: Tensor, spared: Mapping[Layer, int], ratio: float, multiples: Mapping[Layer, int]
) -> Tensor:
    """Which units go: those with the least scores in all layers of `spared` taken together, until `ratio` of their
    filters are gone; but each layer keeps its `spared` best, and loses more or fewer so that a multiple stays.

    >>> layers = Layer("first", 0, 2, 0, None, stem=False), Layer("second", 2, 4, 1, None, stem=False)
    >>> scores, ones = torch.tensor([1.0, 2.0, 4.0, 3.0]), dict.fromkeys(layers, 1)
    >>> least_of_all(scores, torch.ones(4), ones, 0.5, ones).tolist()
    [True, False, False, False]
    >>> least_of_all(scores, torch.tensor([1, 1, 8, 8]), ones, 0.5, ones).tolist()
    [True, False, False, True]
    """
    gone, among = (torch.zeros_like(scores, dtype=torch.bool) for _ in range(2))
    for layer in spared:
        among[layer.start : layer.stop] = True
    units = among.nonzero().flatten()
    units = units[torch.argsort(scores[units], stable=True)]
    reached = filters.to(scores.device)[units].cumsum(0)
    wanted = pruned_of(ratio, int(reached[-1:].sum()))
    gone[units[: int((reached < wanted).sum()) + 1]] = wanted > 0
    lost = {layer: min(int(gone[layer.start : layer.stop].sum()), layer.size - n) for layer, n in spared.items()}
    return least(scores, {layer: rounded(n, layer.size, multiples[layer], spared[layer]) for layer, n in lost.items()})


# -- data ----------------------------------------------------------------------------------------------------------


def gradients(loss: Tensor, model: nn.Module, retain_graph: bool = False) -> dict[str, Tensor]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [p for _, p in named], retain_graph=retain_graph, allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named, found, strict=True)}


def average(
    criterion: Taylor | OBD,
    model: nn.Module,
    example_input: Any,
    measured: Callable[[nn.Module, Any, Any], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """The mean of a measurement over batches, on a copy in evaluation mode: the model itself is not touched."""
    batches = criterion.batches
    net = switched(copied(model), training=False)
    for p in net.parameters():
        p.requires_grad_(p.is_floating_point() or p.is_complex())
    device = next(net.parameters()).device
    if batches is None:
        warnings.warn(
            "without batches this criterion measures on the example input and the model's own predictions there",
            stacklevel=2,
        )
        with torch.no_grad():
            own = call(net, example_input)
        if not isinstance(own, Tensor) or own.dim() < 2:
            raise GrowpruneError(
                "criterion: without batches the model must return a score a class; give batches and a loss"
            )
        batches = [(example_input, own.argmax(1))]
    if not isinstance(batches, Iterable):
        raise GrowpruneError(f"criterion: batches must give (input, target) pairs, not {type(batches).__name__}")
    total: dict[str, Tensor] = {}
    number = 0
    for pair in batches:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise GrowpruneError(f"criterion: batches must give (input, target) pairs, not {type(pair).__name__}")
        x, y = (t.to(device) if isinstance(t, Tensor) else t for t in pair)
        try:
            found = measured(net, x, y)
        except (GrowpruneError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            other = criterion.loss is F.cross_entropy and runs(net, x)
            way = "; give loss=, a function of output and target" if other else ""
            raise GrowpruneError(
                f"criterion: model and loss fail on a batch: {type(error).__name__}: {line(error)}{way}"
            ) from error
        for name, value in found.items():
            value = exact(value.detach())
            total[name] = total[name] + value if name in total else value
        number += 1
    if number == 0:
        raise GrowpruneError("criterion: its batches are empty")
    return {name: value / number for name, value in total.items()}


def runs(model: nn.Module, x: Any) -> bool:
    """Does the model itself run on a batch, so that it is the loss that fails?"""
    try:
        with torch.no_grad():
            call(model, x)
    except Exception:
        return False
    return True
