"""Pruner: the one class a training loop needs.

    pruner = Pruner(model, example_input, schedule=GReg1(), ratios=0.5)
    pruner.attach(optimizer)                  # every optimizer.step() now carries the penalty
    while not pruner.done: ...                # the loop as it was
    small = pruner.compact()

All the state there is lies in its `State`; everything else follows from that and the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from growprune import attached, checks, criteria, groups, holding, proof, separation
from growprune import compact as removal
from growprune import ratios as _ratios
from growprune.errors import GrowpruneError, warn
from growprune.folding import fold as fold_in
from growprune.grouping import build
from growprune.groups import Granularity, Groups
from growprune.penalty import Factors, Scope, normalizes
from growprune.running import tensors
from growprune.schedule import Ended, GReg1, GReg2, OneShot, Penalty, Phase, Schedule, plain
from growprune.separation import Separation, StopRule
from growprune.state import State

OURS = GReg1, GReg2, OneShot, Ended
"""Schedules whose penalties need no check."""
PATIENCE = 10
"""How often in a row a pruner that is attached to nothing is asked whether it is done before that is told."""


class Pruner:
    """Prunes `model` while its owner trains it.

    `example_input`: a tensor, a tuple or list of arguments, or a dict of keyword arguments; a batch of one will do.
    `schedule`: how they go: `GReg1()` unless told otherwise, `GReg2()`, `OneShot()`, or a `Schedule` of your own.
    `criterion`: which go: "l1", "l2", "taylor", "obd", "random", a `Criterion`, or a function of a layer's matrix (one
    row a unit) that gives a score a row; the least go.
    `ratios`: how much of each layer goes: a number for all but the stem, the paper's lists ("[0, 0.5, 0.5, 0.5]" by
    stage, "[0:0, 1-15:0.7]" by layer), a dict by name, `Global(r)` over all layers, or `Speedup(x)`.
    `granularity`: what goes: "filter", with all that hangs on it, or a single "weight".
    `scope`: what the penalty touches: a "filter" alone (the paper), or its whole "path" into the next layers.
    `coupled`: filters that an addition ties together go together; else they stay.
    `ignore`: layers never touched, by name or module, so that what they read stays too.
    `seed`: of what "random", or a criterion of your own, draws.
    `multiple`: a layer that loses filters keeps a multiple of this number (8, say: devices are slow at odd widths).

    Afterwards `skipped` says which layers the model's own code keeps from being pruned, and why; `stays` says so of all
    layers that cannot lose anything, whatever their ratio.
    """

    def __init__(
        self,
        model: nn.Module,
        example_input: Any,
        schedule: Schedule | None = None,
        criterion: str | criteria.Criterion | Callable[[Tensor], Tensor] = "l1",
        ratios: _ratios.Ratios = 0.5,
        granularity: Granularity = "filter",
        scope: Scope = "filter",
        coupled: bool = False,
        ignore: Iterable[str | nn.Module] = (),
        seed: int = 0,
        multiple: int = 1,
    ) -> None:
        checks.not_for_inference("Pruner")
        self.model = checks.unwrapped(model)
        checks.example(example_input)
        self.example_input = example_input
        self._asked = self.schedule = GReg1() if schedule is None else schedule
        self._gamma = 0.0
        self.criterion = criteria.find(criterion)
        self.spec = _ratios.read(ratios)
        self.scope: Scope = scope
        checks.choices(self.schedule, granularity, scope, coupled, seed, multiple)
        self.multiple = multiple = int(multiple)
        checks.weights(self.model)
        self.groups, self.skipped = self._found(granularity, coupled, ignore)
        self.stays = self.groups.stays
        checks.named(self.model, self.spec, self.groups)
        self._shapes = {name: t.shape for name, t in tensors(self.model).items()}
        self.counts = _ratios.counts(self.spec, self.groups, self._shapes, multiple)
        if self.counts is not None and not any(self.counts) and self.schedule.total_steps:
            warn(f"nothing goes by ratios {self._amount()}: {self.schedule.total_steps:,} steps would push nothing")
        self._optimizers: list[torch.optim.Optimizer] = []
        self._asked_idly = 0  # how often in a row `done`, attached to nothing
        self._hooks: list[Any] = []
        device = next(self.model.parameters()).device
        self._rows = criteria.Rows(self.groups, device)
        self._losing = self._may_lose()
        self._active = self._units_of(self._losing).to(device)
        stop = getattr(self._asked, "stop_ratio", None)
        rule = None if stop is None else StopRule(stop)
        self._state = State(self._active.clone(), torch.Generator().manual_seed(int(seed)), rule)
        self._factors = Factors(self.model, self.groups, scope, self._active)
        if self.schedule.pick_step == 0:
            self._pick()
        self._check_trainable()
        self._refresh()
        if granularity == "filter":
            checks.reached(self.model, self.groups, self._losing)
            if self.schedule.total_steps:
                self._try_plan()

    def _found(
        self, granularity: Granularity, coupled: bool, ignore: Iterable[str | nn.Module]
    ) -> tuple[Groups, dict[str, str]]:
        """What can go, and the layers that the model's own code keeps from it."""
        stem = _ratios.speaks_of_stem(self.spec)
        found = build(self.model, self.example_input, granularity, coupled, ignore, stem)
        skipped = proof.unprovable(self.model, found, self.example_input)
        if granularity == "filter" and not found.layers:
            checks.unheld(self.model)
        left = found.without(skipped)
        if skipped and not left.layers:
            name, why = next(iter(skipped.items()))
            raise GrowpruneError(f"no layer of this model can be pruned: without a filter of '{name}' it fails: {why}")
        return left, skipped

    def _try_plan(self) -> None:
        """Cut as many units as the plan says, on trial: better refused now than after the last step."""
        pruned = self._state.pruned
        if not self._state.picked:  # any so many
            counts = dict(zip(self.groups.layers, self.counts, strict=True)) if self.counts else {}
            pruned = criteria.least(torch.zeros(self.groups.units, device=pruned.device), counts)
        model = proof.stirred(self.model, self.groups)
        small = removal.cut(model, self.groups, pruned)
        proof.prove(model, small, self.groups, pruned, self.example_input)

    def __repr__(self) -> str:
        every, stay = (sum(numbers) for numbers in zip(*self.widths().values(), strict=True))
        lost = every - stay if self._state.picked else "?"
        what = "filters" if self.groups.granularity == "filter" else "weights"
        layers = f"{len(self._losing)} layer{'s' * (len(self._losing) != 1)}"
        return (
            f"Pruner({type(self._asked).__name__}, {lost} of {every} {what} go in {layers}, "
            f"{self.phase.value}, step {self.step_count} of {self.total_steps})"
        )

    # -- what a loop asks ----------------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """How many optimizer steps it has counted."""
        return self._state.step

    @property
    def total_steps(self) -> int:
        """How many optimizer steps it takes in all; known before the first."""
        return self.schedule.total_steps

    @property
    def phase(self) -> Phase:
        return self.penalty().phase

    @property
    def done(self) -> bool:
        """Has the schedule run its course, so that `compact` is due?"""
        if not self._over and not self._optimizers:
            self._asked_idly += 1
            if self._asked_idly == PATIENCE:
                warn("this pruner is attached to no optimizer, so no step is counted and it is never done: attach() it")
        return self._over

    @property
    def _over(self) -> bool:
        """`done`, asked by the pruner itself: no loop waits for it."""
        return self.step_count >= self.total_steps

    def penalty(self) -> Penalty:
        """The penalty that the next optimizer step carries."""
        found = self.schedule.at(self.step_count)
        return found if type(self.schedule) in OURS else checks.penalty(found, self.schedule, self.step_count)

    def masks(self) -> dict[str, Tensor]:
        """By layer, True for each unit that stays (shaped like the weight for single weights). Before GReg-2 has
        picked, all stay. What is tied to a layer (a depthwise convolution; other layers, if `coupled`) goes with it.
        A unit is one filter, or several that can only go together (a group norm's group): `widths` counts filters."""
        self._follow_device()
        keep = ~self._state.pruned if self._state.picked else torch.ones_like(self._state.pruned)
        result = {layer.name: keep[layer.start : layer.stop] for layer in self.groups.layers}
        if self.groups.granularity == "weight":
            for s in self.groups.slices:
                name = groups.layer_name(s.tensor)
                result[name] = result[name].view(s.units.shape)
        return result

    def widths(self) -> dict[str, list[int]]:
        """By layer, how many filters (or single weights) it has, and how many of them stay."""
        self._follow_device()
        pruned = self._state.pruned.cpu() if self._state.picked else torch.zeros(self.groups.units, dtype=torch.bool)
        made = self.groups.made()
        return {name: [len(units), int((~groups.gone(pruned, units)).sum())] for name, units in made.items()}

    # -- in the loop ---------------------------------------------------------------------------------------------

    def attach(
        self, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer], decoupled: bool | None = None
    ) -> None:
        """From now on every `optimizer.step()` carries the penalty. Where several train the model (Muon its matrices,
        AdamW the rest), a list of them: a step is counted when each has stepped.

        `decoupled` False: λ·w is added to the gradient just before the update. True: the weight itself shrinks by
        lr·λ, as AdamW decays weights. None: decoupled for optimizers that normalise gradients (Adam and its kin), which
        would divide the penalty away.
        """
        optimizers = checks.carriers(optimizer)
        if self._optimizers:
            raise GrowpruneError("this pruner is attached already; detach() it first")
        attached.alone(optimizers, self._both_push)
        self._check_trainable()  # once more: a layer may have been frozen since
        ways = {each: normalizes(each) if decoupled is None else decoupled for each in optimizers}
        self._gamma = self._factors.bind(ways, self._asked)
        checks.shrinks(self._factors.weights, ways, self._asked)
        self._optimizers, self._asked_idly = optimizers, 0
        for each in optimizers:
            attached.note(each, self)
        self._settle()
        # Kept out of compiled steps here and not where they are defined: that would load the compiler with the package.
        before, after = torch.compiler.disable(self._before_step), torch.compiler.disable(self._after_step)
        for each in optimizers:
            self._hooks += [each.register_step_pre_hook(before), each.register_step_post_hook(after)]

    def _check_trainable(self) -> None:
        if self.schedule.total_steps:
            checks.trainable(self.model, self.groups, [p.name for p in self._factors.parameters])

    def _both_push(self, other: Pruner) -> list[str]:
        """Parameters of the same model that another pruner, not done yet, would push too."""
        if other.model is not self.model or other._over or self._over:
            return []
        theirs = {parameter.name for parameter in other._factors.parameters}
        return [parameter.name for parameter in self._factors.parameters if parameter.name in theirs]

    def _pushed(self) -> dict[Tensor, str]:
        return dict(zip(self._factors.weights, (each.name for each in self._factors.parameters), strict=True))

    def detach(self) -> None:
        """Take the hooks off again."""
        for hook in self._hooks:
            hook.remove()
        for each in self._optimizers:
            attached.forget(each, self)
        self._hooks, self._optimizers = [], []
        self._state.turns.stepped.clear()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._state.turns.begins(self._optimizers.index(optimizer)):
            self.advance()
        if self._over:
            return None
        self._follow_device()
        return self._factors.apply(optimizer, args, kwargs)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        if self._state.turns.ends(self._optimizers.index(optimizer), len(self._optimizers)):
            self.advance()

    def advance(self) -> None:
        """Count one step and set the next one's penalty.

        `optimizer.step()` does this by itself; a loop that replays a captured CUDA graph calls it after each replay.
        Nothing here waits for the device.
        """
        self._asked_idly = 0
        if self._over:
            self._state.past += 1
            return
        self._follow_device()
        before = self.penalty()
        self._state.step += 1
        picks = not self._state.picked and self.step_count >= self.schedule.pick_step
        if picks:
            self._pick()
        self._watch_ratio()
        if picks or self.penalty() != before:
            self._refresh()

    def _settle(self) -> None:
        """The schedule as asked for, with γ known, and ended where the ratio rule ended it."""
        schedule = self._asked
        if isinstance(schedule, GReg2) and schedule.gamma is None:
            schedule = replace(schedule, gamma=self._gamma)
        if self._state.ended is not None and isinstance(schedule, (GReg1, GReg2)):
            schedule = Ended(form=schedule.form, pushing=schedule, end=self._state.ended)
        self.schedule = schedule
        self._refresh()

    def _follow_device(self) -> None:
        """The model may have moved since the pruner was made."""
        device = next(self.model.parameters()).device
        if self._active.device != device:
            self._active = self._active.to(device)
            self._state.to(device)
            self._factors.to(device)
            self._rows = criteria.Rows(self.groups, device)

    def _refresh(self) -> None:
        self._factors.fill(self.penalty())

    # -- which units go ------------------------------------------------------------------------------------------

    def _may_lose(self) -> list[groups.Layer]:
        """Layers that lose something; with one global ratio any may, the stem only if it says so."""
        if self.counts is None:
            return [layer for layer in self.groups.layers if not layer.stem or _ratios.speaks_of_stem(self.spec)]
        return [layer for layer, count in zip(self.groups.layers, self.counts, strict=True) if count]

    def _units_of(self, layers: list[groups.Layer]) -> Tensor:
        units = torch.zeros(self.groups.units, dtype=torch.bool)
        for layer in layers:
            units[layer.start : layer.stop] = True
        return units

    @torch.no_grad()
    def _pick(self) -> None:
        """Set S^p by the criterion: in each layer the least scores go (Algorithm 1, lines 4 and 8)."""
        state, counts, across = self._state, self.counts or (), isinstance(self.spec, _ratios.Global)
        scores = criteria.scores(
            self.groups, self.model, self.example_input, self.criterion, state.generator, self._rows, across
        )
        if isinstance(self.spec, _ratios.Global):
            filters, multiples = self.groups.filters(), self.groups.multiples(self.multiple)
            spared = {layer: self.spec.spared(layer.size, self.groups.granularity) for layer in self._losing}
            state.pruned.copy_(criteria.least_of_all(scores, filters, spared, self.spec.ratio, multiples))
            if self.multiple > 1 and self.spec.ratio > 0 and not bool(state.pruned.any()):
                raise _ratios.unmoved(self.multiple)
        else:
            state.pruned.copy_(criteria.least(scores, dict(zip(self.groups.layers, counts, strict=True))))
        state.picked = True
        self._take_up()
        if self.groups.granularity == "weight" and self.schedule.total_steps:
            state.began = torch.stack([each.pruned / each.kept for each in self.separation().values()])

    def _take_up(self) -> None:
        """What was picked is pushed from now on; layers that lose nothing are left alone altogether."""
        pruned = self._state.pruned
        there = pruned.cpu()  # before the pick: all that may go
        self._losing = [layer for layer in self._may_lose() if bool(there[layer.start : layer.stop].any())]
        self._active = self._units_of(self._losing).to(pruned.device)
        self._factors.set_pruned(pruned, self._active)

    # -- magnitudes ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def separation(self) -> dict[str, Separation]:
        """How far kept and pruned units have come apart, by layer that loses some; computed on the device."""
        self._follow_device()
        return separation.of(self._losing, self._rows, tensors(self.model), self._state.pruned)

    def _watch_ratio(self) -> None:
        """Every Ku steps: may pushing end already?"""
        schedule = self.schedule
        if self._state.rule is None or not isinstance(schedule, (GReg1, GReg2)) or self.phase is not Phase.PUSH:
            return
        if self.step_count % schedule.ku or not self._state.picked or not self._losing:
            return
        if self._state.rule.ends(self.separation):
            self._state.ended = self.step_count
            self._settle()

    # -- the end -------------------------------------------------------------------------------------------------

    def compact(
        self,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        fold: bool = True,
        calibrate: Iterable[Any] | None = None,
        fixed_norm: bool = False,
    ) -> nn.Module:
        """Remove what was pruned.

        Filters: a new, smaller module of the same class, proved on the example to compute what the masked one computes;
        the old one is left as it is. Single weights: the same module, with exact zeros that stay zero.

        `optimizer`: it, or each of several, goes on with the new parameters, its state cut alike. `fold`: what removed
        filters still send onward goes into what follows. `calibrate`: batches to estimate batch-norm statistics anew
        on. `fixed_norm`: batch norm was in eval mode while filters were pushed, which changes what they send onward.
        """
        checks.not_for_inference("compact")
        if not self._state.picked:
            raise GrowpruneError(
                f"nothing is picked yet: {type(self._asked).__name__} picks at step {self.schedule.pick_step}, this is "
                f"step {self.step_count}"
            )
        optimizers = checks.optimizers(optimizer, self.model)
        self._follow_device()
        checks.unchanged(self.model, self.groups, self._shapes)
        checks.weights(self.model)
        goes_on = not (self._over or self.groups.granularity == "weight" or {*optimizers} & {*self._optimizers})
        self._doubt(goes_on)
        pruned = self._state.pruned
        if self.groups.granularity == "weight":
            removal.hold(self.model, self.groups, pruned)
            for each in (*optimizers, *self._optimizers):
                holding.after_any_step(each, (), {})
            self.detach()
            return self.model
        small = removal.cut(self.model, self.groups, pruned)
        proof.prove(self.model, small, self.groups, pruned, self.example_input)
        if fold:
            fold_in(self.model, small, self.groups, pruned, self.example_input, fixed_norm)
        if calibrate is not None:
            removal.calibrate(small, calibrate)
        if optimizers:
            removal.follow(optimizers, self.model, small, self.groups, pruned)
            checks.left_out(small, optimizers)
            attached.watch_idle(optimizers, small, attached.STILL_LARGE)
        if goes_on:
            attached.watch_idle(self._optimizers, self.model, attached.SMALL_ALREADY)
            return small
        for each in self._optimizers:
            if each not in optimizers:
                attached.watch_left_behind(each, self.model)
        self.detach()
        return small

    def _doubt(self, goes_on: bool) -> None:
        """Tell if removal will cost accuracy that more pushing would have saved."""
        if not self._over:
            more = "; the larger network is still pushed" if goes_on and self._optimizers else ""
            warn(
                f"compact at step {self.step_count} of {self.total_steps}: what was not pushed to zero yet is cut off "
                f"all the same{more}"
            )
        elif self.total_steps:
            steps, past = self.total_steps, self._state.past
            began = () if self._state.began is None else self._state.began.tolist()
            told = began or self.groups.granularity == "filter"  # of single weights older states do not tell
            found = self.separation() if told else {}
            large = separation.doubtful(found, steps, 0, began) is not None
            why = self._factors.unpushed(large) or separation.doubtful(found, steps, past, began, self.scope == "path")
            if why is not None:
                warn(f"compact: {why}")

    # -- stopping and going on -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of it, to go on bit for bit in a fresh Pruner of the same arguments."""
        return self._state.saved(self._plan())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; a state of another network or plan is refused, nothing changed."""
        self._state.load(state, self._plan(), self._asked.total_steps)
        self._asked_idly = 0  # steps were counted, if by another
        self._take_up()
        self._settle()

    def _amount(self) -> str:
        whole = f", in multiples of {self.multiple}" if self.multiple > 1 else ""
        return _ratios.write(self.spec) + whole

    def __getstate__(self) -> dict[str, Any]:
        """A copy, by deepcopy or by pickle, is as far as this one and attached to nothing."""
        return {**vars(self), "_optimizers": [], "_hooks": []}

    def _plan(self) -> dict[str, Any]:
        """What must agree for a state to fit: the layers and what they lose, and the schedule as it was asked for."""
        return {
            "layers": [[layer.name, layer.size] for layer in self.groups.layers],
            "ratios": self._amount() if self.counts is None else self.counts,
            "criterion": self.criterion.name,
            "schedule": [type(self._asked).__name__, {key: plain(value) for key, value in vars(self._asked).items()}],
            "granularity": self.groups.granularity,
            "scope": self.scope,
        }
