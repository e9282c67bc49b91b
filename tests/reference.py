"""Algorithm 1 of the paper word for word, in plain Python: slow, and independent of growprune.

Weights are nested lists of floats, λ is a Fraction (so that `λ > τ` is exact), SGD with momentum and weight decay is
written out. Where the authors' code says more than the paper it is followed: GReg-2 grows by one δλ while it picks and
by another while it pushes. The one step that the loop does at λ > τ counts as the first of the Ks.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

Nested = Any
"""A float, or a list of these: a tensor as `tolist` gives it."""
Weights = dict[str, Nested]
Gradient = Callable[[Weights, int], Weights]
"""The loss gradient at these weights, on the batch of iteration i."""


def written(value: float) -> Fraction:
    """The number as its author wrote it: 1/10 for 0.1."""
    return Fraction(repr(value))


@dataclass(frozen=True)
class Place:
    """Along `dim` of `tensor`, `times` indices in a row belong to each filter (more than one after a flattening)."""

    tensor: str
    dim: int = 0
    times: int = 1


@dataclass
class Layer:
    """A layer to prune: its weight, its ratio, and (scope "path") where else its filters are found."""

    weight: str
    ratio: float
    path: tuple[Place, ...] = ()


@dataclass(frozen=True)
class State:
    """What the algorithm says of one iteration: λ in S^p and S^k, and which groups are kept, in each layer."""

    phase: str
    pruned: Fraction
    kept: Fraction
    masks: dict[str, list[bool]]


@dataclass
class Algorithm:
    """GReg-1, or GReg-2 where `tau_pick` is given. `run` yields before each iteration's weight update."""

    weights: Weights
    gradient: Gradient
    layers: list[Layer]
    delta: Fraction
    tau: Fraction
    ku: int
    ks: int
    delta_pick: Fraction | None = None
    tau_pick: Fraction | None = None
    gamma: Fraction = Fraction(0)
    granularity: str = "filter"
    form: str = "l2"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    velocity: dict[str, list[float]] = field(default_factory=dict)
    i: int = 0

    def run(self) -> Iterator[State]:
        """Lines 3 to 15; then plain training, for as long as one asks."""
        lambdas = {layer.weight: [Fraction(0)] * self.groups(layer) for layer in self.layers}
        kept: dict[str, set[int]] = {layer.weight: set() for layer in self.layers}
        if self.tau_pick is None:
            pruned = self.least_norms()
        else:
            pruned = {layer.weight: set(range(self.groups(layer))) for layer in self.layers}
        picked = self.tau_pick is None

        def largest() -> Fraction:
            return max(lambdas[name][j] for name in pruned for j in pruned[name])

        def state(phase: str) -> State:
            masks = {name: [j not in pruned[name] or not picked for j in range(len(lambdas[name]))] for name in pruned}
            rest = [lambdas[name][j] for name in kept for j in kept[name]]
            return State(phase, largest(), rest[0] if rest else Fraction(0), masks)

        while largest() <= self.tau:
            if self.i % self.ku == 0:
                if not picked and largest() > self.tau_pick:
                    pruned, picked = self.least_norms(), True
                    kept = {name: set(range(len(lambdas[name]))) - pruned[name] for name in pruned}
                for name in pruned:
                    for j in pruned[name]:
                        lambdas[name][j] += self.delta if picked else self.delta_pick
                    for j in kept[name]:
                        lambdas[name][j] = -self.gamma
                factors = self.factors(lambdas, pruned, kept)
                if largest() > self.tau:
                    break
            yield state("push" if picked else "pick")
            self.update(factors)
        for _ in range(self.ks):
            yield state("stabilize")
            self.update(factors)
        lambdas = {name: [Fraction(0)] * len(values) for name, values in lambdas.items()}
        factors = self.factors(lambdas, pruned, kept)
        while True:
            yield state("done")
            self.update(factors)

    # -- which groups ------------------------------------------------------------------------------------------

    def groups(self, layer: Layer) -> int:
        weight = self.weights[layer.weight]
        return len(weight) if self.granularity == "filter" else len(flat(weight))

    def least_norms(self) -> dict[str, set[int]]:
        """L1-norm sorting: of N groups the min(⌈r·N⌉, N − 1) least."""
        result = {}
        for layer in self.layers:
            weight = self.weights[layer.weight]
            members = weight if self.granularity == "filter" else flat(weight)
            norms = [sum(abs(w) for w in flat(member)) for member in members]
            count = min(math.ceil(written(layer.ratio) * len(norms)), len(norms) - 1)
            result[layer.weight] = set(sorted(range(len(norms)), key=lambda j: norms[j])[:count])
        return result

    # -- stochastic gradient descent, "where the regularization is enforced" ------------------------------------

    def update(self, factors: dict[str, list[float]]) -> None:
        gradients = self.gradient(self.weights, self.i)
        for name, weight in self.weights.items():
            shape, values, new = shape_of(weight), flat(weight), []
            slopes = flat(gradients[name])
            before = self.velocity.get(name)
            velocity = []
            for k, (w, g) in enumerate(zip(values, slopes, strict=True)):
                toward = w if self.form == "l2" else math.copysign(1.0, w) if w else 0.0
                g += factors[name][k] * toward
                g += self.weight_decay * w
                velocity.append(g if before is None else self.momentum * before[k] + g)
                new.append(w - self.lr * velocity[k])
            self.velocity[name] = velocity
            self.weights[name] = nested(new, shape)
        self.i += 1

    def factors(
        self, lambdas: dict[str, list[Fraction]], pruned: dict[str, set[int]], kept: dict[str, set[int]]
    ) -> dict[str, list[float]]:
        """λ of every single weight. One that two groups share is pruned if either is."""
        result = {name: [0.0] * len(flat(weight)) for name, weight in self.weights.items()}
        for members in (kept, pruned):  # the pruned last, over the kept
            for layer in self.layers:
                for place in (Place(layer.weight), *layer.path):
                    shape = shape_of(self.weights[place.tensor])
                    for k in range(len(result[place.tensor])):
                        j = k if self.granularity == "weight" else index(k, shape, place.dim) // place.times
                        if j in members[layer.weight]:
                            result[place.tensor][k] = float(lambdas[layer.weight][j])
        return result


# -- nested lists --------------------------------------------------------------------------------------------------


def flat(values: Nested) -> list[float]:
    return [x for value in values for x in flat(value)] if isinstance(values, list) else [values]


def shape_of(values: Nested) -> tuple[int, ...]:
    return (len(values), *shape_of(values[0])) if isinstance(values, list) else ()


def nested(values: list[float], shape: tuple[int, ...]) -> Nested:
    if not shape:
        return values[0]
    size = len(values) // shape[0]
    return [nested(values[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


def index(k: int, shape: tuple[int, ...], dim: int) -> int:
    """The index along `dim` of the k-th element in row order."""
    return k // math.prod(shape[dim + 1 :]) % shape[dim]
