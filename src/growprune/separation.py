"""How far kept and pruned units have come apart: what the paper's figure 1 draws, computed on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from growprune.criteria import Rows
from growprune.groups import Layer


@dataclass(frozen=True)
class Separation:
    """One layer's magnitudes, as tensors on the device: figure 1 of the paper.

    `kept` and `pruned`: mean |w| of either set (NaN while it is empty); `spread`: the standard deviation of the units'
    L1 norms over their mean; `norms`: those norms, one a unit.
    """

    kept: Tensor
    pruned: Tensor
    spread: Tensor
    norms: Tensor

    def __repr__(self) -> str:
        sizes = (f"{name}={float(getattr(self, name)):.3g}" for name in ("kept", "pruned", "spread"))
        return f"Separation({', '.join(sizes)}, {len(self.norms)} norms)"


def of(layers: Iterable[Layer], rows: Rows, values: Mapping[str, Tensor], pruned: Tensor) -> dict[str, Separation]:
    """The separation of each layer, by its name."""
    result = {}
    for layer in layers:
        weight, gone = rows(layer, values).abs(), pruned[layer.start : layer.stop]
        norms, mean = weight.sum(1), weight.mean(1)
        kept_mean, pruned_mean = ((mean * part).sum() / part.sum() for part in (~gone, gone))
        result[layer.name] = Separation(kept_mean, pruned_mean, norms.std(correction=0) / norms.mean(), norms)
    return result


HARDLY = 0.1
"""Pruned units that are larger than this beside kept ones are told: in all three runs of results/budget.json where they
were, removing them cost more than 50 points."""


LATE = 0.1
"""Steps after the push, as a share of its own, in which what goes may have grown again."""


def doubtful(
    found: Mapping[str, Separation], steps: int, past: int, began: Iterable[float] = (), path: bool = False
) -> str | None:
    """A warning in words if, after a push of so many `steps`, pruned units of some layers are still large beside the
    kept ones; or if so many steps were made `past` its end that they may have grown again. `began`: by layer, how large
    they were when they were picked, since the least single weights are small beside the kept ones from the start.
    `path`: was their whole path pushed?"""
    shares = {name: float(layer.pruned / layer.kept) for name, layer in found.items()}
    first = dict(zip(found, began, strict=False))
    large = {name: share for name, share in shares.items() if share > HARDLY * min(1.0, first.get(name, 1.0))}
    late = f", and {past} steps were made since, in which it may have grown" if past > LATE * steps else ""
    if large:
        (name, share), *others = large.items()
        before = f" ({first[name]:.0%} when it was picked)" if name in first else ""
        return (
            f"the push has ended, but what goes in '{name}'{f' and {len(others)} more' if others else ''} is still "
            f"{share:.0%} as large as what stays{before}{late}: removal may cost accuracy; a larger learning rate or "
            f"a longer schedule pushes further{'' if path or first else ', scope path too where there is batch norm'}"
        )
    if late and shares:
        name = max(shares, key=lambda each: shares[each])
        return (
            f"the push has ended{late}: in '{name}' what goes is {shares[name]:.1%} as large as what stays; stop "
            "training when pruner.done"
        )
    return None


class StopRule:
    """The magnitude-ratio rule: pushing may end when every layer's kept/pruned ratio (a running mean) is large enough.

    It is asked every Ku steps and answers by what was measured one interval before, when the device has long finished
    it; so the answer depends on the step alone, and the loop need not wait.
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.ratio: Tensor | None = None
        self.verdict: Callable[[], bool] | None = None

    def ends(self, measured: Callable[[], Mapping[str, Separation]]) -> bool:
        if self.verdict is not None and self.verdict():
            return True
        ratio = torch.stack([s.kept / s.pruned for s in measured().values()]).nan_to_num(nan=torch.inf)
        self.load(ratio if self.ratio is None else 0.9 * self.ratio + 0.1 * ratio)
        return False

    def load(self, ratio: Tensor | None) -> None:
        """Go on from a running mean, or from the start."""
        self.ratio = ratio
        self.verdict = None if ratio is None else later((ratio > self.bound).all())

    def __getstate__(self) -> tuple[float, Tensor | None]:
        return self.bound, self.ratio  # a verdict that is on its way cannot be pickled

    def __setstate__(self, state: tuple[float, Tensor | None]) -> None:
        self.bound, ratio = state
        self.load(ratio)


def later(flag: Tensor) -> Callable[[], bool]:
    """A flag on its way from the device: asked for much later, it has long arrived, and nobody waits."""
    if not flag.is_cuda:
        return partial(bool, flag)
    host = torch.empty((), dtype=torch.bool, pin_memory=True)
    host.copy_(flag, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(flag.device))

    def read() -> bool:
        arrived.synchronize()
        return bool(host)

    return read
