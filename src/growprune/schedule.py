"""How the weights go: schedules as pure functions of the step count, `at(step) -> Penalty` (Algorithm 1).

The penalty ½λ‖w‖² of a pruned group grows by δλ every Ku steps until λ > τ, then holds for Ks steps to stabilise.
GReg-1 knows from the start which groups go. GReg-2 lets λ grow for all groups until λ > τ', picks then, and gives the
kept ones the negative penalty −γ so that they recover. Nothing here holds state: the same step gives the same answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, Literal

from growprune.errors import GrowpruneError

Form = Literal["l2", "l1"]


class Phase(StrEnum):
    """What happens to λ in a step: it grows for all groups, grows for the pruned ones, holds, or pruning is over."""

    PICK = "pick"
    PUSH = "push"
    STABILIZE = "stabilize"
    DONE = "done"


@dataclass(frozen=True)
class Penalty:
    """λ of the pruned and of the kept groups at one step."""

    phase: Phase
    pruned: float
    kept: float


OVER = Penalty(Phase.DONE, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a schedule of your own must say: how long it is, when groups are picked, and the penalty at each step.

    All of it follows from the step's number alone. `at(i)` gives λ in step i: `pruned` for what was picked (before the
    pick: for all groups), `kept` for what stays in the layers that lose something (0: left alone). A saved state is
    refused by a schedule whose fields hold other numbers or texts.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Squared(Schedule):
    ...     tau: float = 1.0
    ...     steps: int = 15_000
    ...
    ...     @property
    ...     def total_steps(self):
    ...         return self.steps
    ...
    ...     def at(self, step):
    ...         if step >= self.steps:
    ...             return OVER
    ...         return Penalty(Phase.PUSH, self.tau * (step / self.steps) ** 2, 0.0)
    >>> Squared().at(7500)
    Penalty(phase=<Phase.PUSH: 'push'>, pruned=0.25, kept=0.0)
    """

    form: Form = "l2"

    @property
    def total_steps(self) -> int:
        return 0

    @property
    def pick_step(self) -> int:
        """The step before which the criterion picks; 0: at once, before any training."""
        return 0

    def at(self, step: int) -> Penalty:
        return OVER


@dataclass(frozen=True, kw_only=True)
class OneShot(Schedule):
    """The baseline: pick and remove at once, no penalty.

    >>> OneShot().total_steps, OneShot().at(0).phase.value
    (0, 'done')
    """


@dataclass(frozen=True, kw_only=True)
class GReg1(Schedule):
    """GReg-1: the groups that the criterion picks at the start are pushed to zero.

        λ(i) = δλ · (⌊i / Ku⌋ + 1) until λ > τ, then the same λ for Ks steps: Ku·τ/δλ + Ks steps in all

    (Algorithm 1 leaves its loop after one step at λ > τ; that step is the first of the Ks.) `form="l1"` penalises
    λ‖w‖₁ instead. `stop_ratio`: pushing also ends once the mean magnitude of the kept weights is this many times that
    of the pruned ones in every layer (the authors' code: 1000). None, as in the paper: only λ > τ ends it.

    >>> GReg1().total_steps, GReg1().at(0).pruned, round(GReg1().at(104_999).pruned, 4)
    (105000, 0.0001, 1.0001)
    """

    delta_lambda: float = 1e-4
    tau: float = 1.0
    ku: int = 10
    ks: int = 5_000
    stop_ratio: float | None = None

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def cifar(cls) -> GReg1:
        """The paper's settings on CIFAR, which are the defaults."""
        return cls()

    @classmethod
    def imagenet(cls) -> GReg1:
        """The paper's settings on ImageNet."""
        return cls(ku=5, ks=40_000)

    @property
    def push_steps(self) -> int:
        return (increments(self.tau, self.delta_lambda) - 1) * self.ku

    @property
    def total_steps(self) -> int:
        return self.push_steps + self.ks

    def at(self, step: int) -> Penalty:
        if step >= self.total_steps:
            return OVER
        grown = min(step // self.ku + 1, increments(self.tau, self.delta_lambda))
        phase = Phase.PUSH if step < self.push_steps else Phase.STABILIZE
        return Penalty(phase, grown * self.delta_lambda, 0.0)


@dataclass(frozen=True, kw_only=True)
class GReg2(Schedule):
    """GReg-2: λ grows for every group until λ > τ'; the criterion picks then, when the magnitudes have separated.

        picking: λ(i) = δλ' · (⌊i / Ku⌋ + 1) for all groups, δλ' = 1e-5
        pushing: λ grows by δλ = 1e-4 for the picked groups, −γ for the kept ones; then Ks steps to stabilise

    `gamma` None: the optimizer's weight decay, which −γ then just cancels for the kept groups.

    >>> GReg2().pick_step, GReg2().total_steps, GReg2().at(0).pruned
    (10010, 114000, 1e-05)
    """

    delta_lambda: float = 1e-4
    delta_lambda_pick: float = 1e-5
    tau: float = 1.0
    tau_pick: float = 0.01
    ku: int = 10
    ks: int = 5_000
    gamma: float | None = None
    stop_ratio: float | None = None

    def __post_init__(self) -> None:
        check(self, "delta_lambda_pick", "tau_pick")
        if self.tau <= self.tau_pick:
            raise GrowpruneError(f"GReg2: tau ({self.tau}) must be above tau_pick ({self.tau_pick})")
        if self.form != "l2":
            raise GrowpruneError(
                "GReg2: form must be 'l2': its picking rests on a quadratic penalty (paper, section 3.3)"
            )

    @classmethod
    def cifar(cls) -> GReg2:
        """The paper's settings on CIFAR, which are the defaults."""
        return cls()

    @classmethod
    def imagenet(cls) -> GReg2:
        """The paper's settings on ImageNet."""
        return cls(ku=5, ks=40_000)

    @property
    def pick_step(self) -> int:
        return increments(self.tau_pick, self.delta_lambda_pick) * self.ku

    @property
    def picked_lambda(self) -> float:
        """λ when picking ends: the first value above τ'."""
        return increments(self.tau_pick, self.delta_lambda_pick) * self.delta_lambda_pick

    @property
    def push_steps(self) -> int:
        return (increments(self.tau - self.picked_lambda, self.delta_lambda) - 1) * self.ku

    @property
    def total_steps(self) -> int:
        return self.pick_step + self.push_steps + self.ks

    def at(self, step: int) -> Penalty:
        if step >= self.total_steps:
            return OVER
        if step < self.pick_step:
            return Penalty(Phase.PICK, (step // self.ku + 1) * self.delta_lambda_pick, 0.0)
        pushed = step - self.pick_step
        grown = min(pushed // self.ku + 1, increments(self.tau - self.picked_lambda, self.delta_lambda))
        phase = Phase.PUSH if pushed < self.push_steps else Phase.STABILIZE
        return Penalty(phase, self.picked_lambda + grown * self.delta_lambda, 0.0 - (self.gamma or 0.0))


@dataclass(frozen=True, kw_only=True)
class Ended(Schedule):
    """A schedule whose pushing was ended before step `end`, by the magnitude ratio: λ holds for Ks steps from there."""

    pushing: GReg1 | GReg2
    end: int

    @property
    def pick_step(self) -> int:
        return self.pushing.pick_step

    @property
    def total_steps(self) -> int:
        return self.end + self.pushing.ks

    def at(self, step: int) -> Penalty:
        if step < self.end:
            return self.pushing.at(step)
        if step >= self.total_steps:
            return OVER
        last = self.pushing.at(self.end - 1)
        return Penalty(Phase.STABILIZE, last.pruned, last.kept)


def increments(ceiling: float, delta: float) -> int:
    """The least n with n·delta > ceiling, rounding of the quotient forgiven.

    >>> increments(1.0, 1e-4), increments(0.3, 0.1), increments(-1.0, 0.1)
    (10001, 4, 1)
    """
    return max(0, math.floor(ceiling / delta * (1 + 1e-12) + 1e-9)) + 1


def check(schedule: GReg1 | GReg2, *more: str) -> None:
    """Refuse a field that makes no sense; `more` names further fields that must be positive."""
    kind = type(schedule).__name__
    plain_numbers(schedule)
    for name in ("delta_lambda", "tau", *more):
        if not (is_number(value := getattr(schedule, name)) and value > 0):
            raise GrowpruneError(f"{kind}: {name} must be a positive number, not {value!r}")
    if not schedule.tau < schedule.delta_lambda * 1e9:
        raise GrowpruneError(
            f"{kind}: tau ({schedule.tau}) is more than 1e9 times delta_lambda ({schedule.delta_lambda})"
        )
    for name, least in (("ku", 1), ("ks", 0)):
        value = getattr(schedule, name)
        if not is_whole(value) or value < least:
            raise GrowpruneError(f"{kind}: {name} must be a whole number, {least} or more, not {value!r}")
    if schedule.form not in ("l2", "l1"):
        raise GrowpruneError(f"{kind}: form must be 'l2' or 'l1', not {schedule.form!r}")
    ratio, gamma = schedule.stop_ratio, getattr(schedule, "gamma", None)
    if ratio is not None and not (is_number(ratio) and ratio > 1):
        raise GrowpruneError(f"{kind}: stop_ratio must be a number above 1, or None, not {ratio!r}")
    if gamma is not None and not (is_number(gamma) and gamma >= 0):
        raise GrowpruneError(
            f"{kind}: gamma must be 0 or more, or None for the optimizer's weight decay, not {gamma!r}"
        )


# -- numbers that users give, numpy's too ----------------------------------------------------------------------------


def is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """A finite number, and no bool; a whole number too long for a float does not count."""
    try:
        return is_real(value) and abs(float(value)) < 1e300  # type: ignore[arg-type]
    except OverflowError:
        return False


def plain_numbers(fields: Any) -> None:
    """Make numpy's numbers in a frozen dataclass Python's: what is saved of it is read again without numpy."""
    for name, value in vars(fields).items():
        if is_real(value):
            object.__setattr__(fields, name, plain(value))


def plain(value: Any) -> Any:
    """A field as a saved state holds it: numbers, texts, and lists of these; None for anything else.

    >>> plain((1, 0.5, "l2", True, None, len))
    [1, 0.5, 'l2', True, None, None]
    """
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    kind: Any = int if is_whole(value) else float if is_real(value) else None
    return kind(value) if kind else value if isinstance(value, (bool, str)) else None
