"""Channel identities: which slices of which parameters belong to one and the same channel.

The model runs once, as it is, on the example. Beside every activation travels a small integer tensor, its
*labels*: the channel that each element belongs to. A convolution's output carries the labels of its filters; a
batch norm ties its scale to the labels it meets; an addition ties two channels together; a view moves labels as
it moves data, because the same operator is run on them. What an operator does to labels stands in one table
(`rules.py`); an operator that no rule covers pins every channel it meets: such a channel stays, so the answer is
always safe. `grouping.py` runs this and turns the result into layers and filters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from growprune.counting import Macs
from growprune.running import tensors

NONE, FIXED, INPUT = 0, 1, 2
"""Labels that are no channel: of no account; never removable; the model's own input (never removable too)."""

Role = Literal["filter", "table", "read", "scale", "shift", "mean", "other"]
"""What a dimension of a tensor is to its channels: it makes them (a filter, an embedding table), reads them,
or rides along."""


@dataclass(frozen=True)
class Operation:
    """One call of a convolution or linear layer: the weight, and how often each weight is used (0 times if what is done
    with it does not count as a layer's work)."""

    weight: str
    positions: int
    reads_input: bool


@dataclass(frozen=True)
class Work:
    """MACs of a layer that no `Operation` tells of, since nothing cuts its weights; and the labels of what it makes: if
    it mixes positions, the channels that it takes in."""

    macs: int
    labels: Tensor


@dataclass
class Trace:
    """What one run of the model told: labels of every dimension of every tensor, and which labels are tied.

    `fixed`: labels that stay, and why each lot of them does. `returned`: how many numbers the model put out.
    """

    count: int = 3
    labels: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    roles: dict[tuple[str, int], Role] = field(default_factory=dict)
    read: set[tuple[str, int]] = field(default_factory=set)
    joins: list[Tensor] = field(default_factory=list)
    additions: list[Tensor] = field(default_factory=list)
    streams: list[tuple[Tensor, tuple[int, ...]]] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    grouped: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[str, str] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    norms: dict[str, str] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)
    fixed: list[tuple[Tensor, str]] = field(default_factory=list)
    returned: int = 0

    def components(self, additions: bool = True, fixed: bool = True) -> Tensor:
        """The class of every label, ties followed to their end (with or without those that additions made, and those to
        what stays)."""
        edges = [*self.joins, *(self.additions if additions else ())]
        every = torch.cat(edges, dim=1) if edges else torch.zeros(2, 0, dtype=torch.long)
        return connected(self.count, every if fixed else every[:, (every[0] != FIXED) & (every[1] != FIXED)])

    def reasons(self) -> Tensor:
        """For every label why it stays: the place in `fixed` of what was first told of it, or of a label tied to it;
        -1 if nothing was."""
        classes, first = self.components(fixed=False), torch.full((self.count,), -1)
        for place in reversed(range(len(self.fixed))):
            first[classes[self.fixed[place][0]]] = place
        return first[classes]


def connected(count: int, edges: Tensor) -> Tensor:
    """Connected components of a graph on `count` nodes: each node's smallest peer.

    >>> connected(5, torch.tensor([[1, 3], [2, 4]])).tolist()
    [0, 1, 1, 3, 3]
    """
    parent = torch.arange(count)
    while edges.numel():
        one, other = parent[edges]
        low = torch.minimum(one, other)
        for end in (one, other):
            parent.scatter_reduce_(0, end, low, "amin")
        while not torch.equal(parent, parent[parent]):
            parent = parent[parent]
        edges = edges[:, parent[edges[0]] != parent[edges[1]]]
    return parent


def compressed(labels: Tensor) -> Tensor:
    """The same labels with every dimension along which they do not vary shrunk to one."""
    for dim, size in enumerate(labels.shape):
        first = labels.narrow(dim, 0, min(1, size))
        if size > 1 and (labels.stride(dim) == 0 or bool((labels == first).all())):
            labels = first
    return labels


def varying(labels: Tensor) -> list[int]:
    return [dim for dim, size in enumerate(labels.shape) if size > 1]


CALLED = {"mkldnn_rnn_layer": "lstm", "linalg_vector_norm": "norm"}
"""Operators that nobody calls by torch's name."""


def needs_all(operator: str) -> str:
    """
    >>> needs_all("aten::split.Tensor"), needs_all("aten::add_.Tensor"), needs_all("aten::mkldnn_rnn_layer")
    ('split() needs all of its channels', 'it is added to what no layer makes', 'lstm() needs all of its channels')
    """
    name = operator.removeprefix("aten::").partition(".")[0].strip("_")
    name = CALLED.get(name, name)
    return "it is added to what no layer makes" if name == "add" else f"{name}() needs all of its channels"


Rule = Callable[["Tracer", Any, Sequence[Any], Mapping[str, Any], Any], None]


class Tracer(TorchDispatchMode):
    """Runs operators as they come and hands each to its rule; the rules write into `trace`."""

    def __init__(self, model: nn.Module, rules: Callable[[Any], Rule | None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.rules = rules
        self.first = True  # a second run, in training mode, only ties what it meets
        self.operator = ""  # the one whose rule is at work
        self.macs = 0  # of it, if it is a layer
        self.noted = 0  # MACs so far, in operations and work
        self.layers = Macs(model)
        self.names = {id(t): name for name, t in tensors(model).items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule, formula, noted = self.rules(func), self.layers.formula(func, args), self.noted
        if rule is None and func._can_decompose():
            with self:
                out = func.decompose(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
            self.operator, self.macs = func.name(), formula(out, args) if formula else 0
            try:
                (rule or Tracer.give_up)(self, func, args, kwargs, out)
            except Exception:  # it met what it was not written for: as good as none
                self.give_up(func, args, kwargs, out)
        self.layers.follow(func, args, kwargs, out)
        if formula and self.first:
            self.note(formula(out, args) - (self.noted - noted), out)
        return out

    def note(self, macs: int, out: Any) -> None:
        """What no operation told of this layer, nor of the parts it was taken into."""
        if macs:
            made = next(t for t in tree_leaves(out) if isinstance(t, Tensor))
            self.work(macs, self.of(made).flatten())

    def work(self, macs: int, labels: Tensor) -> None:
        if self.first:
            self.trace.work.append(Work(macs, labels))
            self.noted += macs

    def operation(self, name: str, weight: Tensor, reads_input: bool) -> None:
        """The layer at work uses each of its weights as often as its MACs say."""
        if self.first:
            positions = self.macs // max(1, weight.numel())
            self.trace.operations.append(Operation(name, positions, reads_input))
            self.noted += positions * weight.numel()

    def give_up(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """No rule: whatever this operator touches stays."""
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(hasattr(t, "_labels") or self.name(t) is not None for t in inputs):
            self.trace.unknown[str(func)] += 1
        for t in inputs:
            self.pin(self.of(t))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.mark(t, torch.full((1,) * t.dim(), FIXED))

    # -- labels of tensors ---------------------------------------------------------------------------------------

    def name(self, t: Tensor | None) -> str | None:
        return None if t is None else self.names.get(id(t), getattr(t, "_name", None))

    def also(self, copy: Tensor, name: str) -> None:
        """A parameter's own value in another tensor, as where weights are cast to another dtype before their use."""
        copy._name = name  # type: ignore[attr-defined]

    def of(self, t: Tensor) -> Tensor:
        """The labels of a tensor, compressed, of the tensor's own rank; a constant's are FIXED."""
        if hasattr(t, "_labels"):
            labels: Tensor = t._labels
            return labels
        name, wide = self.name(t), [d for d, size in enumerate(t.shape) if size > 1]
        if name is not None and len(wide) == 1:
            shape = [1] * t.dim()
            shape[wide[0]] = -1
            return self.dimension(name, t, wide[0], "other").view(shape)
        if name is not None:
            self.trace.pinned.add(name)  # used as a whole, so it must stay whole
        return torch.full((1,) * t.dim(), FIXED)

    def mark(self, t: Tensor, labels: Tensor) -> None:
        vars(t).pop("_made_by", None)  # an operator in place makes another value of the same tensor
        t._labels = labels  # type: ignore[attr-defined]

    def dimension(self, name: str, t: Tensor, dim: int, role: Role) -> Tensor:
        """The labels of one dimension of a parameter or buffer: made at its first use, kept for all later ones."""
        key = (name, dim)
        if role == "read":  # a dimension may both make channels and read them: a tied embedding does
            self.trace.read.add(key)
        if key not in self.trace.labels:
            self.trace.labels[key] = torch.arange(self.trace.count, self.trace.count + t.shape[dim])
            self.trace.count += t.shape[dim]
            self.trace.roles[key] = role
        elif role == "filter" or self.trace.roles[key] == "other":
            self.trace.roles[key] = role
        return self.trace.labels[key]

    # -- ties between labels -------------------------------------------------------------------------------------

    def tie(self, a: Tensor, b: Tensor, by_addition: bool = False, why: str = "") -> None:
        """Channels a[i] and b[i] live and die together; `why`: if one of them stays."""
        a, b = torch.broadcast_tensors(a, b)
        a, b = a.flatten(), b.flatten()
        real = (a != NONE) & (b != NONE) & (a != b)
        if bool(real.any()):
            edges = torch.stack([a[real], b[real]])
            if edges.shape[1] > 1024:
                count = self.trace.count  # a pair as one number, which is much faster to sort
                once = torch.unique(edges[0] * count + edges[1])
                edges = torch.stack([once // count, once % count])
            (self.trace.additions if by_addition else self.trace.joins).append(edges)
            if bool((stays := (edges == FIXED).any(0)).any()):
                self.trace.fixed.append((edges[:, stays].amax(0), why or needs_all(self.operator)))

    def pin(self, labels: Tensor, why: str = "") -> None:
        """These channels stay."""
        self.tie(labels, torch.tensor(FIXED), why=why)

    def channels(self, t: Tensor, dim: int) -> Tensor:
        """The labels along `dim`, one an index; if they vary elsewhere too, the channels are pinned instead."""
        labels = self.of(t)
        if any(d != dim % t.dim() for d in varying(labels)):
            self.pin(labels)
            return torch.full((t.shape[dim],), FIXED)
        return labels.flatten().expand(t.shape[dim])
