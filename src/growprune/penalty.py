"""The penalty on the device: λ of every group, laid over the parameters it touches, added just before the update.

One flat buffer holds the factor of every touched slice; each parameter has a view of it that broadcasts over the
parameter (a filter's factor is one number). When λ changes, the buffer is refilled, three kernels whatever the number
of layers; at each step one foreach call adds factor·w to the gradients. Nothing reads a number back from the device, so
the step can be captured in a CUDA graph.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.groups import MAKERS, Groups, Slice, gone, owner
from growprune.schedule import GReg2, Penalty, Schedule

Scope = Literal["filter", "path"]
"""What the penalty touches: the filter's own weights (the paper), or the whole path: also its norm's scale and shift,
its bias, and what the next layers read of it."""


@dataclass(frozen=True)
class Penalized:
    """One parameter under penalty: its slices, and its stretch of the flat buffers."""

    name: str
    slices: tuple[Slice, ...]
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Share:
    """The parameters under penalty that one of the optimizers updates."""

    places: dict[int, int]  # by the parameter's index: in which of the optimizer's groups it is
    decoupled: bool


class Factors:
    """λ of every entry, and how it acts on an optimizer's step, or on the steps of several."""

    def __init__(self, model: nn.Module, groups: Groups, scope: Scope, active: Tensor) -> None:
        self.model = model
        self.parameters = penalized(model, groups, scope, active)
        size = self.parameters[-1].stop if self.parameters else 0
        self.owned = torch.zeros(size, dtype=torch.bool, device=active.device)
        self.layout(active, self.owned)
        self.pruned = self.owned.clone()  # until the pick, S^p is the full set
        own = dict(model.named_parameters())
        exact = any(own[p.name].dtype == torch.double for p in self.parameters)
        self.values = torch.zeros(size, device=active.device, dtype=torch.double if exact else torch.float)
        self.decay: Tensor | None = None
        self.form = "l2"
        self.weights: list[nn.Parameter] = []
        self.shares: dict[torch.optim.Optimizer, Share] = {}
        self.due: list[int] = []  # by weight, how many steps its optimizer made,
        self.missed: list[int] = []  # and in how many of them it had no gradient
        self.flat = self.views()

    def layout(self, units: Tensor, into: Tensor) -> None:
        """Spread one flag per unit over the flat buffer: an entry is set if its unit is, in any of its dimensions."""
        for p in self.parameters:
            flag = into[p.start : p.stop].view(p.shape)
            flag.zero_()
            for s in p.slices:
                shape = p.shape if s.dim is None else [-1 if d == s.dim else 1 for d in range(len(p.shape))]
                flag |= gone(units, s.units).view(shape)

    def set_pruned(self, units: Tensor, active: Tensor) -> None:
        """Push `units` from now on. Of the rest only `active`, the units of layers that lose some, are touched."""
        self.layout(active, self.owned)
        self.layout(units & active, self.pruned)

    def fill(self, penalty: Penalty) -> None:
        """λ into every entry: `pruned` for the pruned, `kept` for the rest of the layers that are pruned."""
        if penalty.kept and self.decay is not None:
            torch.mul(self.owned, self.decay, out=self.values)  # each parameter's own −γ
            self.values.neg_()
        else:
            self.values.copy_(self.owned)
            self.values.mul_(penalty.kept)
        self.values.masked_fill_(self.pruned, penalty.pruned)

    def views(self, scale: Tensor | None = None) -> list[Tensor]:
        values = self.values if scale is None else self.values * scale
        return [values[p.start : p.stop].view(p.shape) for p in self.parameters]

    def __getstate__(self) -> dict[str, Any]:
        """A copy is bound to no optimizer, and its views are of its own buffer: pickle would not keep them so."""
        return {**vars(self), "weights": [], "shares": {}, "flat": [], "due": [], "missed": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.flat = self.views()

    # -- optimizers ------------------------------------------------------------------------------------------------

    def bind(self, optimizers: Mapping[torch.optim.Optimizer, bool], schedule: Schedule) -> float:
        """Act on these optimizers (True: decoupled), which must hold every penalised parameter; returns their weight
        decay, the paper's γ."""
        held = {
            id(p): (optimizer, i)
            for optimizer in reversed([*optimizers])
            for i, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        own = dict(self.model.named_parameters())
        those = "these optimizers" if len(optimizers) > 1 else "this optimizer"
        if self.parameters and schedule.total_steps and not any(id(p) in held for p in own.values()):
            raise GrowpruneError(
                f"'{self.parameters[0].name}' is not in {those}, nor is any other parameter of the model: make "
                "the Pruner of the model that is trained, which may be a copy, or one made anew"
            )
        for p in self.parameters:
            if id(own[p.name]) not in held and schedule.total_steps:
                raise GrowpruneError(
                    f"'{p.name}' is in no parameter group of {those}, so the penalty cannot reach it: add it, give "
                    f"attach() a list with the optimizer that has it, or name '{owner(p.name)}' in the option ignore"
                )
        if not schedule.total_steps:
            return 0.0
        for optimizer, decoupled in optimizers.items():
            if decoupled and isinstance(optimizer, torch.optim.LBFGS):
                raise GrowpruneError("attach: LBFGS needs the penalty in its gradient: decoupled=False")
        self.form = schedule.form
        self.weights = [own[p.name] for p in self.parameters]
        self.due, self.missed = [0] * len(self.weights), [0] * len(self.weights)
        where = [held[id(w)] for w in self.weights]
        self.shares = {
            optimizer: Share({i: place for i, (its, place) in enumerate(where) if its is optimizer}, decoupled)
            for optimizer, decoupled in optimizers.items()
        }
        decays = [float(optimizer.param_groups[i].get("weight_decay", 0.0)) for optimizer, i in where]
        self.decay = None
        if isinstance(schedule, GReg2) and schedule.gamma is None and len(set(decays)) > 1:
            sizes = torch.tensor([p.stop - p.start for p in self.parameters])
            self.decay = torch.repeat_interleave(torch.tensor(decays), sizes).to(self.values)
        return max(decays, default=0.0)

    @torch.no_grad()
    def apply(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Just before the update. With a closure, gradients are made inside the step, so the penalty goes in there."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer itself
        if closure is None:
            self.act(optimizer)
            return None
        wrapped = self.around(closure, optimizer)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def around(self, closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
        shrunk, share = False, self.shares[optimizer]

        def closed() -> Any:
            nonlocal shrunk
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                if not shrunk:  # weights shrink once a step, gradients get their share at each evaluation
                    self.act(optimizer)
                shrunk = share.decoupled
                if isinstance(optimizer, torch.optim.LBFGS):  # its line search needs the penalty's value too
                    loss = loss + self.value(share)
            return loss

        return closed

    def to(self, device: torch.device) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        self.flat = self.views()

    def act(self, optimizer: Any) -> None:
        """One step's penalty, on gradients or weights. A fused optimizer under GradScaler unscales the gradients, and
        skips the step if one is infinite, inside its own kernel: so the penalty is scaled, or skipped, alike."""
        share = self.shares[optimizer]
        skipped, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if share.decoupled:
            scale = None if skipped is None else 1 - skipped
        factors = self.flat if scale is None else self.views(scale)
        for place in sorted(set(share.places.values())):
            group = optimizer.param_groups[place]
            pulled, shrunk = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
            for i, there in share.places.items():
                w = self.weights[i]
                self.due[i] += there == place
                self.missed[i] += there == place and w.grad is None
                if there == place and w.grad is not None:
                    # a gradient of a few rows (a sparse embedding's) has no room for the others' penalty
                    (shrunk if share.decoupled or w.grad.is_sparse else pulled).append((w, factors[i]))
            for way, live in ((self.pull, pulled), (self.shrink, shrunk)):
                if live:
                    way([w for w, _ in live], [f for _, f in live], group)

    def unpushed(self, large: bool) -> str | None:
        """A weight that was hardly pushed, and why; None if there is none. Missing gradients are a reason only if what
        goes is still `large`: if it is not, the steps that had one were enough."""
        own = dict(self.model.named_parameters())
        for p, w, due, missed in zip(self.parameters, self.weights, self.due, self.missed, strict=False):
            if own.get(p.name) is not w:
                return f"'{p.name}' is not the tensor that was pushed any more: it was replaced since attach()"
            if large and 2 * missed > due:
                why = "does the loss reach it?" if w.requires_grad else "it is frozen by now"
                return f"'{p.name}' had no gradient in {missed:,} of {due:,} steps, and was not pushed in these: {why}"
        return None

    def pull(self, weights: list[Tensor], factors: list[Tensor], group: dict[str, Any]) -> None:
        """g ← g + λ·w, or λ·sign(w): toward zero also where the optimizer climbs (`maximize`)."""
        moved = weights if self.form == "l2" else list(torch._foreach_sign(weights))
        grads = [w.grad for w in weights if w.grad is not None]
        torch._foreach_addcmul_(grads, moved, factors, value=-1.0 if group.get("maximize") else 1.0)

    def shrink(self, weights: list[Tensor], factors: list[Tensor], group: dict[str, Any]) -> None:
        """w ← w − lr·λ·w, or for L1 the step toward zero that stops there."""
        lr = group["lr"]
        steps = list(torch._foreach_mul(factors, lr.reshape(()) if isinstance(lr, Tensor) else lr))
        if self.form == "l2":
            torch._foreach_addcmul_(weights, weights, steps, value=-1.0)
        else:
            left = [(w.abs() - step).clamp_(min=0.0) for w, step in zip(weights, steps, strict=True)]
            torch._foreach_copy_(weights, [w.sign() * n for w, n in zip(weights, left, strict=True)])

    def value(self, share: Share) -> Tensor:
        """The penalty itself: ½Σλw², or Σλ|w|."""
        those = [(self.weights[i], self.flat[i]) for i in share.places]
        terms = [(0.5 * f * w.square() if self.form == "l2" else f * w.abs()).sum() for w, f in those]
        return torch.stack(terms).sum() if terms else torch.zeros(())


def penalized(model: nn.Module, groups: Groups, scope: Scope, active: Tensor) -> list[Penalized]:
    """The parameters in scope that belong to layers which lose something. Left out are frozen tables that are tied to
    filters: their columns go with the filters, unpushed."""
    path = scope == "path"
    roles = {*MAKERS, "scale", "shift"} if path else {*MAKERS}
    own = dict(model.named_parameters())
    chosen: dict[str, list[Slice]] = {}
    for s in groups.slices:
        frozen = s.role == "table" and s.tensor in own and not own[s.tensor].requires_grad
        within = (s.role in roles or (path and s.read)) and s.tensor in own and not frozen
        if within and bool(gone(active, s.units).any()):
            chosen.setdefault(s.tensor, []).append(s)
    result, start = [], 0
    for name, slices in chosen.items():
        sizes = own[name].shape
        dims = {s.dim for s in slices}
        shape = tuple(n if None in dims or d in dims else 1 for d, n in enumerate(sizes))
        result.append(Penalized(name, tuple(slices), shape, start, start + math.prod(shape)))
        start += math.prod(shape)
    return result


MECHANICS = ("fused", "capturable", "differentiable")
"""Options of an optimizer that say how it computes, not what."""


def normalizes(optimizer: torch.optim.Optimizer) -> bool:
    """Does this optimizer divide the gradient's size away? Tried out: does a tenfold gradient move a probe tenfold?"""
    if type(optimizer) in (torch.optim.SGD, torch.optim.LBFGS):
        return False
    moved = []
    try:
        for size in (1.0, 10.0):
            probe = nn.Parameter(torch.zeros(2, 2))
            known = inspect.signature(type(optimizer)).parameters
            given = {k: v for k, v in optimizer.defaults.items() if k in known and k not in MECHANICS}
            trial = type(optimizer)([probe], **{**given, "lr": 1e-3})
            probe.grad = torch.eye(2) * 0.01 * size
            for _ in range(8):  # some (RAdam) only begin to normalise after a few steps
                trial.step()
            moved.append(float(probe.detach().abs().max()))
    except Exception as error:
        kind = type(optimizer).__name__
        if isinstance(optimizer, (torch.optim.SGD, torch.optim.LBFGS)):  # a subclass: most likely as its parent
            return False
        raise GrowpruneError(
            f"attach: cannot tell whether {kind} normalises gradients: say decoupled=True or False"
        ) from error
    return not math.isclose(moved[1], 10 * moved[0], rel_tol=1e-3)
