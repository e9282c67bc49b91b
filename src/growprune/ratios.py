"""How much of each layer goes: the paper's list syntaxes, one number, names, one global ratio, or a speed-up to reach.

A specification is read once into one of the small classes below; `counts` turns it, for given groups, into the
number of units each layer loses. Of N units at ratio r, min(⌈r·N⌉, N − 1) go, so that a layer is never emptied. A unit
is one filter as a rule, or several that can only go together. If a multiple of some number has to stay, it is the
nearest that there is.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import torch

from growprune.errors import GrowpruneError, nearest, warn
from growprune.groups import Groups, Layer, layer_name, why_none
from growprune.schedule import is_number, is_real, is_whole
from growprune.solving import solve

AT_MOST = 0.95
"""`Global`: of a layer's filters, unless told otherwise (why: docs/method.md)."""


@dataclass(frozen=True)
class Uniform:
    """The same ratio in every layer (the stem excepted)."""

    ratio: float


@dataclass(frozen=True)
class Stages:
    """One ratio a residual stage, the stem first: "[0, 0.5, 0.5, 0.5]"."""

    ratios: tuple[float, ...]


@dataclass(frozen=True)
class Ranges:
    """Ratios by ranges of layer indices, from 0: "[0:0, 1-15:0.7]". Layers in no range are left alone."""

    ranges: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class ByName:
    """Ratios by layer name; other layers are left alone."""

    ratios: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Global:
    """One ratio of the filters of all layers together: the least scores anywhere go (the paper's OBD table).

    But no layer loses more than `at_most` of its own, and what it is spared is not taken elsewhere. By default that is
    95 % of its filters, or the ratio if that is more; of single weights, all but one. The stem takes part only with
    `stem=True`; one that belongs to a residual stream goes as the stream does.
    """

    ratio: float
    at_most: float | None = None
    stem: bool = False

    def spared(self, size: int, granularity: str) -> int:
        """How many of a layer's units stay, however low their scores.

        >>> [Global(0.7).spared(size, "filter") for size in (8, 20, 512)], Global(0.99).spared(200, "filter")
        ([1, 1, 26], 2)
        >>> Global(0.7).spared(200, "weight"), Global(0.7, at_most=0.5).spared(200, "weight")
        (1, 100)
        """
        usual = max(AT_MOST, self.ratio) if granularity == "filter" else 1.0
        most = written(usual if self.at_most is None else self.at_most)
        return max(size - math.floor((most + STRAY) * size), 1)


@dataclass(frozen=True)
class Speedup:
    """The ratio that divides the MACs by `times`: one for all layers, or (`per="stage"`) a gentler one for the last
    residual stage, as in the paper's own lists. Solved to the single filter, so layers may differ by one."""

    times: float
    per: Literal["network", "stage"] = "network"


Spec = Uniform | Stages | Ranges | ByName | Global | Speedup
Ratios = float | str | Sequence[float] | Mapping[str, float] | Spec


def read(ratios: Ratios) -> Spec:
    """A specification in any of its forms, checked.

    >>> read("[0, 0.5]"), read("[0:0, 1-15:0.7]")
    (Stages(ratios=(0.0, 0.5)), Ranges(ranges=((0, 0, 0.0), (1, 15, 0.7))))
    >>> read("{layer1.0.conv1: 0.5}")
    ByName(ratios=(('layer1.0.conv1', 0.5),))
    """
    spec: Spec
    if isinstance(ratios, str):
        spec = parse(ratios)
    elif is_single(ratios):
        spec = Uniform(number(ratios))
    elif isinstance(ratios, Mapping):
        spec = ByName(tuple((str(k), number(v)) for k, v in ratios.items()))
    elif isinstance(ratios, (list, tuple)):
        spec = Stages(tuple(number(r) for r in ratios))
    elif isinstance(ratios, (Uniform, Stages, Ranges, ByName, Global, Speedup)):
        spec = replace(ratios, **{name: plain(value) for name, value in vars(ratios).items()})
    else:
        raise GrowpruneError(f"ratios: cannot read {ratios!r}; give a number, a list, a dict, Global(r) or Speedup(x)")
    check(spec)
    return spec


FORMS = "give 0.5, '[0, 0.5, 0.5, 0.5]' by stage, '[0:0, 1-15:0.7]' by layer, or '{layer1.0.conv1: 0.5}' by name"


def parse(text: str) -> Spec:
    """The paper's two list syntaxes, names with their ratios, or a number."""
    body = text.strip()
    closing = {"[": "]", "{": "}"}.get(body[:1])
    if closing is None:
        try:
            return Uniform(number(body))
        except GrowpruneError as error:
            raise GrowpruneError(f"{error}: {FORMS}") from None
    if not body.endswith(closing):
        raise GrowpruneError(f"ratios: {text!r} has no closing {closing}")
    items = [item.strip() for item in body[1:-1].split(",")]
    if not all(items):
        raise GrowpruneError(f"ratios: {text!r} has an empty place")
    if closing == "}":
        return ByName(tuple(named(item, text) for item in items))
    if not any(":" in item for item in items):
        return Stages(tuple(number(item) for item in items))
    ranges = []
    for item in items:
        match = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?\s*:\s*(\S+)", item)
        if match is None:
            raise GrowpruneError(f"ratios: cannot read {item!r} in {text!r}; write 'index:ratio' or 'first-last:ratio'")
        first = int(match[1])
        ranges.append((first, int(match[2] or first), number(match[3])))
    return Ranges(tuple(ranges))


def named(item: str, text: str) -> tuple[str, float]:
    """A layer's name, in quotes or not, and its ratio."""
    name, colon, ratio = item.partition(":")
    if not colon:
        raise GrowpruneError(f"ratios: cannot read {item!r} in {text!r}; write 'name: ratio'")
    return name.strip().strip("\"'"), number(ratio.strip())


def number(value: object) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor on meta, or a complex one
        raise GrowpruneError(f"ratios: {value!r} is not a number") from None
    kind = str(getattr(value, "dtype", "")).rpartition(".")[2]
    if kind.startswith(("float16", "bfloat16", "float8")):
        raise GrowpruneError(
            f"ratios: {value!r} is in half precision or less, of two digits or three: give it as a Python number"
        )
    return float(f"{found:.7g}") if kind == "float32" else found  # 0.55 in single precision is a little more


def is_single(value: object) -> bool:
    return is_real(value) or (isinstance(value, torch.Tensor) and not value.dim())


def plain(value: Any) -> Any:
    """A field of a specification with Python's numbers for numpy's and torch's; whole ones (a range's ends) stay so."""
    if isinstance(value, (list, tuple)):
        return tuple(plain(each) for each in value)
    return int(value) if is_whole(value) else number(value) if is_single(value) else value


def write(spec: Spec) -> str:
    """The text of a specification; `read(write(spec)) == spec` for those that can be given as text."""
    if isinstance(spec, Uniform):
        return repr(spec.ratio)
    if isinstance(spec, Global):
        most = "" if spec.at_most is None else f", {spec.at_most!r} a layer at most"
        return f"global {spec.ratio!r}{most}{', the stem too' if spec.stem else ''}"
    if isinstance(spec, Stages):
        return "[" + ", ".join(repr(r) for r in spec.ratios) + "]"
    if isinstance(spec, Ranges):
        return "[" + ", ".join(f"{a}:{r!r}" if a == b else f"{a}-{b}:{r!r}" for a, b, r in spec.ranges) + "]"
    if isinstance(spec, ByName):
        return "{" + ", ".join(f"{k!r}: {r!r}" for k, r in spec.ratios) + "}"
    return f"{spec.times!r}x" + (" by stage" if spec.per == "stage" else "")


def check(spec: Spec) -> None:
    if isinstance(spec, Speedup):
        if not (is_number(spec.times) and spec.times >= 1):
            raise GrowpruneError(f"ratios: a speed-up must be a number, 1 or more, not {spec.times!r}")
        if spec.per not in ("network", "stage"):
            raise GrowpruneError(f"ratios: Speedup(per=...) is 'network' or 'stage', not {spec.per!r}")
        return
    values = values_of(spec)
    if not values:
        raise GrowpruneError("ratios: nothing is said of any layer")
    for value in values:
        if not (is_number(value) and 0 <= value < 1):
            share = f"; for {value:g} % give {value / 100:g}" if is_number(value) and 1 < value < 100 else ""
            raise GrowpruneError(f"ratios: {value!r} is outside [0, 1){share}")
    if isinstance(spec, Global) and not (spec.at_most is None or (is_number(spec.at_most) and 0 <= spec.at_most <= 1)):
        raise GrowpruneError(f"ratios: Global(at_most=...) is a number from 0 to 1, not {spec.at_most!r}")
    if isinstance(spec, Global) and not isinstance(spec.stem, bool):
        raise GrowpruneError(f"ratios: Global(stem=...) is True or False, not {spec.stem!r}")
    if isinstance(spec, Ranges):
        ends = [-1, *(end for a, b, _ in sorted(spec.ranges) for end in (a, b))]
        if any(a > b or (i % 2 == 0 and a == b) for i, (a, b) in enumerate(itertools.pairwise(ends))):
            raise GrowpruneError(f"ratios: the ranges of {write(spec)} overlap or run backwards")


def values_of(spec: Uniform | Stages | Ranges | ByName | Global) -> list[float]:
    if isinstance(spec, (Uniform, Global)):
        return [spec.ratio]
    if isinstance(spec, Stages):
        return list(spec.ratios)
    return [ratio for *_, ratio in (spec.ranges if isinstance(spec, Ranges) else spec.ratios)]


def speaks_of_stem(spec: Spec) -> bool:
    """Lists and names say what to do with the stem themselves, and `Global` may; the other forms leave it alone."""
    return spec.stem if isinstance(spec, Global) else isinstance(spec, (Stages, Ranges, ByName))


# -- numbers of units ----------------------------------------------------------------------------------------------


def pruned_of(ratio: float, size: int) -> int:
    """Of `size` filters at `ratio`, how many go.

    >>> [pruned_of(r, 16) for r in (0, 0.5, 0.9, 0.95)], pruned_of(0.55, 100), pruned_of(1 - 0.7, 10), pruned_of(0.9, 1)
    ([0, 8, 15, 15], 55, 3, 0)
    """
    return min(math.ceil((written(ratio) - STRAY) * size), size - 1)


STRAY = Fraction("5e-16")
"""How far a ratio that was computed may be from the one that was meant: 1 - 0.7 is a little more than 0.3."""


def written(ratio: float) -> Fraction:
    """The number as it is written: 0.55 of 100 are 55, though 0.55 is a little more in binary."""
    return Fraction(repr(float(ratio)))


def rounded(lost: int, size: int, multiple: int, spared: int = 1) -> int:
    """How many of `size` go instead of `lost`, so that the nearest multiple stays (of two equally near the larger), but
    not less than `spared`. All may stay whatever their number, and do where there is no such multiple.

    >>> [rounded(lost, 64, 8) for lost in (0, 3, 4, 5, 44, 63)], rounded(19, 20, 8), rounded(4, 5, 8), rounded(7, 20, 1)
    ([0, 0, 0, 8, 40, 56], 12, 0, 7)
    """
    stays = size - lost
    below = stays // multiple * multiple
    around = (size, *(n for n in (below + multiple, below) if spared <= n <= size))
    return size - min(around, key=lambda n: abs(n - stays))


def counts(spec: Spec, groups: Groups, sizes: Mapping[str, torch.Size], multiple: int = 1) -> list[int] | None:
    """How many units each layer loses; None where only the scores can tell (`Global`)."""
    if not groups.layers:
        raise GrowpruneError(f"no layer of this model can be pruned{why_none(groups.stays)}")
    spares = isinstance(spec, (Uniform, Global)) and spec.ratio > 0 and not speaks_of_stem(spec)
    if spares and all(layer.stem for layer in groups.layers):
        raise GrowpruneError(
            f"ratios: {write(spec)} spares what reads the model's input, and that do all layers here, as "
            f"'{groups.layers[0].name}': give ratios in a list or by name"
        )
    multiples = groups.multiples(multiple)
    if isinstance(spec, Global):
        due = (layer for layer in groups.layers if spec.ratio > 0 and (spec.stem or not layer.stem))
        tell_whole(groups, due, multiple)
        if spec.ratio > 0 and multiple > 1 and all(layer.size <= n for layer, n in multiples.items()):
            raise unmoved(multiple)  # whatever the scores will be
        return None
    if isinstance(spec, Speedup):
        tell_whole(groups, groups.layers, multiple)
        return solve(spec.times, spec.per == "stage", groups, sizes, multiple)
    wanted = [pruned_of(ratio, layer.size) for ratio, layer in zip(per_layer(spec, groups), groups.layers, strict=True)]
    tell_whole(groups, (layer for layer, lost in zip(groups.layers, wanted, strict=True) if lost), multiple)
    found = [rounded(lost, layer.size, n) for lost, (layer, n) in zip(wanted, multiples.items(), strict=True)]
    if any(wanted) and not any(found):
        raise unmoved(multiple)
    if multiple == 1 and (far := amiss(groups, per_layer(spec, groups), found)):
        warn(f"ratios: {far[0]}{f' (and so in {len(far) - 1} more layers)' if far[1:] else ''}")
    return found


AMISS = 0.25
"""By how much of a layer's filters the share that goes may miss its ratio; more is told."""


def amiss(groups: Groups, ratios: Sequence[float], lost: Sequence[int]) -> list[str]:
    """One line for each layer that loses quite another share of its filters than was asked for, since they go several
    at once; or may lose it, where the share depends on which go."""
    if groups.granularity == "weight":
        return []
    found, made = [], groups.made()
    for layer, ratio, number in zip(groups.layers, ratios, lost, strict=True):
        own = made[layer.name]
        each = torch.bincount(own[own >= layer.start] - layer.start).sort().values
        least, most = int(each[0]), int(each[-1])
        shares = [int(some.sum()) / len(own) for some in (each[:number], each[layer.size - number :])]
        if most > 1 and max(abs(share - ratio) for share in shares) > AMISS:
            lots = f"{most} filters" if least == most else f"{least} to {most} filters"
            go = " to ".join(dict.fromkeys(f"{share:.0%}" for share in shares))
            found.append(f"'{layer.name}' loses {lots} at once or none: {go} go, not {ratio:.0%}")
    return found


def tell_whole(groups: Groups, asked: Iterable[Layer], multiple: int) -> None:
    """Tell which of the layers that were to lose some stay whole, since no multiple is sure to stay there."""
    uneven = groups.uneven(multiple) if multiple > 1 else ()
    if names := [layer.name for layer in asked if layer in uneven]:
        them = f"'{names[0]}' and {len(names) - 1} more stay" if names[1:] else f"'{names[0]}' stays"
        warn(
            f"multiple: {them} whole: filters there go in unequal lots, so a multiple of {multiple} is not sure to stay"
        )


def unmoved(multiple: int) -> GrowpruneError:
    """The error of a plan of which rounding to multiples leaves nothing."""
    return GrowpruneError(
        f"multiple: no layer loses any filter if a multiple of {multiple} has to stay: give a smaller one, or a larger "
        "ratio"
    )


def per_layer(spec: Uniform | Stages | Ranges | ByName, groups: Groups) -> list[float]:
    if isinstance(spec, Uniform):
        return [0.0 if layer.stem else spec.ratio for layer in groups.layers]
    if isinstance(spec, Stages):
        if groups.stages == 0:
            raise GrowpruneError(
                f"ratios: {write(spec)} is by stage, but this network has no residual stages; "
                f"write ranges of layers, as in '[0:0, 1-{len(groups.order) - 2}:0.5]'"
            )
        if len(spec.ratios) != groups.stages + 1:
            raise GrowpruneError(
                f"ratios: {write(spec)} has {len(spec.ratios)} entries, this network has "
                f"{groups.stages + 1} stages, the stem among them"
            )
        if spec.ratios[0] > 0 and not any(layer.stage == 0 for layer in groups.layers):
            raise GrowpruneError(
                "ratios: the stem of this network is tied to its first residual stage and cannot go alone: give it 0"
            )
        return [spec.ratios[layer.stage or 0] for layer in groups.layers]
    if isinstance(spec, Ranges):
        last = max(b for _, b, _ in spec.ranges)
        if last >= len(groups.order):
            raise GrowpruneError(
                f"ratios: {write(spec)} speaks of layer {last}, this network's last is {len(groups.order) - 1}"
            )
        for first, end, ratio in spec.ranges:
            if first == end and ratio > 0:
                prunable(groups.order[first], groups)
        return [next((r for a, b, r in spec.ranges if a <= layer.index <= b), 0.0) for layer in groups.layers]
    given = dict(spec.ratios)
    for name, ratio in given.items():
        if ratio > 0 or name not in groups.order:
            prunable(name, groups)
    return [given.get(layer.name, 0.0) for layer in groups.layers]


def prunable(name: str, groups: Groups) -> Layer:
    """The layer of that name, or an error that says why there is none."""
    for layer in groups.layers:
        if layer.name == name:
            return layer
    if (why := groups.stays.get(name)) is not None:
        raise GrowpruneError(f"ratios: no filter of '{name}' can go: {why}")
    if leaders := leads(name, groups):
        them = " and ".join(f"'{each}'" for each in leaders)
        raise GrowpruneError(f"ratios: the filters of '{name}' go with those of {them}: give ratios for these instead")
    first = ", ".join(f"'{layer.name}'" for layer in groups.layers[:3])
    more = f" and {len(groups.layers) - 3} more" if groups.layers[3:] else ""
    hint = nearest(name, groups.order) or f"; ratios can be given for {first}{more}"
    raise GrowpruneError(f"ratios: the model has no layer '{name}'{hint}")


def leads(name: str, groups: Groups) -> list[str]:
    """The layers that the filters of `name` go with, if they are tied to these (coupled=True)."""
    units = {int(i) for s in groups.of_role("filter") if layer_name(s.tensor) == name for i in s.units}
    return [layer.name for layer in groups.layers if not units.isdisjoint(range(layer.start, layer.stop))]
