"""Schedules: pure functions of the step that say what Algorithm 1's loop says."""

import copy
import dataclasses
import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import growprune as gp
from growprune import GReg1, GReg2, GrowpruneError, OneShot, Phase
from nets import MLP, batch, seeded, train_step
from reference import Algorithm, Layer, State, written

# The numbers of the paper.


def test_lengths_known_in_advance() -> None:
    assert GReg1().total_steps == 10 * 10_000 + 5_000
    assert (GReg2().pick_step, GReg2().total_steps) == (10_010, 114_000)
    assert GReg1.imagenet() == GReg1(ku=5, ks=40_000)
    assert GReg2.imagenet() == GReg2(ku=5, ks=40_000)
    assert (GReg1.cifar(), GReg2.cifar()) == (GReg1(), GReg2())
    assert GReg1.imagenet().total_steps == 5 * 10_000 + 40_000
    assert GReg2.imagenet().total_steps == 5 * 1_001 + 5 * 9_899 + 40_000
    assert OneShot().total_steps == 0


def test_greg1_at_its_boundaries() -> None:
    at = GReg1().at
    for step, phase, factor in [
        (0, Phase.PUSH, 0.0001),
        (9, Phase.PUSH, 0.0001),
        (10, Phase.PUSH, 0.0002),
        (99_989, Phase.PUSH, 0.9999),
        (99_990, Phase.PUSH, 1.0),
        (99_999, Phase.PUSH, 1.0),
        (100_000, Phase.STABILIZE, 1.0001),
        (104_999, Phase.STABILIZE, 1.0001),
    ]:
        assert at(step).phase is phase, step
        assert at(step).pruned == pytest.approx(factor, rel=1e-15), step
        assert at(step).kept == 0, step
    for step in (105_000, 10**9):
        assert at(step) == gp.Penalty(Phase.DONE, 0.0, 0.0)


def test_greg2_at_its_boundaries() -> None:
    at = GReg2(gamma=5e-4).at
    for step, phase, pruned, kept in [
        (0, Phase.PICK, 0.00001, 0.0),
        (10_009, Phase.PICK, 0.01001, 0.0),
        (10_010, Phase.PUSH, 0.01011, -5e-4),
        (10_019, Phase.PUSH, 0.01011, -5e-4),
        (10_020, Phase.PUSH, 0.01021, -5e-4),
        (108_999, Phase.PUSH, 0.99991, -5e-4),
        (109_000, Phase.STABILIZE, 1.00001, -5e-4),
        (113_999, Phase.STABILIZE, 1.00001, -5e-4),
    ]:
        assert at(step).phase is phase, step
        assert at(step).pruned == pytest.approx(pruned, rel=1e-14), step
        assert at(step).kept == kept, step
    assert at(114_000) == gp.Penalty(Phase.DONE, 0.0, 0.0)


def test_one_shot_is_over_before_it_begins() -> None:
    assert OneShot().at(0) == gp.Penalty(Phase.DONE, 0.0, 0.0)
    assert OneShot().pick_step == 0


# Algorithm 1's loop, for any parameters.

decimals = st.integers(1, 400).map(lambda n: n / 1000)
"""What people write: up to three digits after the point, so that λ meets τ exactly now and then."""
intervals, rests = st.integers(1, 4), st.integers(0, 5)


def simulated(schedule: GReg1 | GReg2) -> list[State]:
    """Every iteration of Algorithm 1 on one layer of two filters that nothing moves."""
    greg2: dict[str, Fraction] = {}
    if isinstance(schedule, GReg2):
        greg2 = {
            "delta_pick": written(schedule.delta_lambda_pick),
            "tau_pick": written(schedule.tau_pick),
            "gamma": written(schedule.gamma or 0.0),
        }
    algorithm = Algorithm(
        weights={"w": [[1.0], [2.0]]},
        gradient=lambda weights, i: {"w": [[0.0], [0.0]]},
        layers=[Layer("w", 0.5)],
        delta=written(schedule.delta_lambda),
        tau=written(schedule.tau),
        ku=schedule.ku,
        ks=schedule.ks,
        lr=0.0,
        **greg2,
    )
    return list(itertools.takewhile(lambda state: state.phase != "done", algorithm.run()))


def assert_simulated(schedule: GReg1 | GReg2) -> None:
    states = simulated(schedule)
    assert schedule.total_steps == len(states)
    for step, state in enumerate(states):
        said = schedule.at(step)
        assert said.phase.value == state.phase, step
        assert said.pruned == pytest.approx(float(state.pruned), rel=1e-12), step
        assert said.kept == float(state.kept), step
        assert (step >= schedule.pick_step) == (state.phase != "pick"), step
    assert schedule.at(len(states)) == gp.Penalty(Phase.DONE, 0.0, 0.0)


@settings(max_examples=60, deadline=None)
@given(decimals, decimals, intervals, rests)
def test_greg1_is_the_loop(delta: float, tau: float, ku: int, ks: int) -> None:
    assert_simulated(GReg1(delta_lambda=delta, tau=tau, ku=ku, ks=ks))


@st.composite
def greg2s(draw: st.DrawFn) -> GReg2:
    """With τ at or above the λ that picking ends with: below it, the paper's loop would end without a pick."""
    delta_pick, tau_pick = draw(decimals), draw(decimals)
    ends = (written(tau_pick) // written(delta_pick) + 1) * written(delta_pick)
    return GReg2(
        delta_lambda=draw(decimals),
        delta_lambda_pick=delta_pick,
        tau=float(ends + draw(st.integers(0, 300)) * Fraction(1, 1000)),
        tau_pick=tau_pick,
        ku=draw(intervals),
        ks=draw(rests),
        gamma=draw(st.sampled_from([0.0, 5e-4, 0.1])),
    )


@settings(max_examples=60, deadline=None)
@given(greg2s())
def test_greg2_is_the_loop(schedule: GReg2) -> None:
    assert_simulated(schedule)


@pytest.mark.parametrize("tau", [0.1, 0.2, 0.3, 0.6, 0.7, 1.0, 1.1])
@pytest.mark.parametrize("delta", [0.1, 0.05, 0.01, 0.7, 3.0])
def test_lambda_that_meets_tau_exactly_is_not_above_it(delta: float, tau: float) -> None:
    """Where binary rounding of τ/δλ goes either way."""
    assert_simulated(GReg1(delta_lambda=delta, tau=tau, ku=2, ks=3))
    pick = GReg2(delta_lambda=0.05, delta_lambda_pick=delta, tau=5.0, tau_pick=tau, ku=2, ks=3, gamma=0.0)
    assert_simulated(pick)


@settings(max_examples=40, deadline=None)
@given(st.one_of(st.builds(GReg1, delta_lambda=decimals, tau=decimals, ku=intervals, ks=rests), greg2s()))
def test_order_and_purity(schedule: GReg1 | GReg2) -> None:
    """Phases come in order, λ never falls while pruning lasts, and asking changes nothing."""
    steps = range(schedule.total_steps + 2)
    said = [schedule.at(step) for step in steps]
    order = list(Phase)
    assert [order.index(p.phase) for p in said] == sorted(order.index(p.phase) for p in said)
    grown = [p.pruned for p in said[: schedule.total_steps]]
    assert grown == sorted(grown)
    assert all(p > 0 for p in grown)
    assert [schedule.at(step) for step in reversed(steps)] == said[::-1]


def test_schedules_are_frozen() -> None:
    for schedule in (OneShot(), GReg1(), GReg2()):
        field = dataclasses.fields(schedule)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(schedule, field, "l1")


def test_a_pick_that_overshoots_tau_still_picks() -> None:
    """τ above τ' but below the first λ above τ': the paper's loop would never pick; ours picks and stabilises."""
    schedule = GReg2(delta_lambda=0.1, delta_lambda_pick=1.0, tau=0.6, tau_pick=0.5, ku=2, ks=3, gamma=0.0)
    assert (schedule.pick_step, schedule.total_steps) == (2, 5)
    assert [schedule.at(i).phase.value for i in range(6)] == ["pick", "pick", *["stabilize"] * 3, "done"]
    assert schedule.at(2).pruned >= schedule.at(1).pruned


# Bad values.


@pytest.mark.parametrize("cls", [GReg1, GReg2])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(f, v) for f in ("delta_lambda", "tau") for v in (0, -1.0, float("nan"), float("inf"), "0.1", None, True)],
        *[("ku", v) for v in (0, -1, 1.5, 10.0, True, "10", None)],
        *[("ks", v) for v in (-1, 1.5, False, "5000", None)],
        *[("stop_ratio", v) for v in (1.0, 0.5, -3.0, float("nan"), "1000")],
        ("form", "l3"),
        ("form", None),
    ],
)
def test_a_bad_value_is_named(cls: Any, field: str, value: Any) -> None:
    with pytest.raises(GrowpruneError) as caught:
        cls(**{field: value})
    message = str(caught.value)
    assert field in message
    assert cls.__name__ in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(f, v) for f in ("delta_lambda_pick", "tau_pick") for v in (0, -1e-5, float("nan"), float("inf"), "1")],
        *[("gamma", v) for v in (-1e-4, float("nan"), float("inf"), "5e-4")],
        ("tau_pick", 1.0),
        ("tau_pick", 2.0),
        ("form", "l1"),
    ],
)
def test_a_bad_value_of_greg2_is_named(field: str, value: Any) -> None:
    with pytest.raises(GrowpruneError, match=f"^GReg2: .*{field}[^\n]*$"):
        GReg2(**{field: value})


def test_a_number_without_its_name_is_not_taken_for_another_field() -> None:
    """GReg1(1e-3): δλ comes first, as in the docs, or nothing may come without its name."""
    try:
        schedule = GReg1(1e-3)  # type: ignore[arg-type]
    except TypeError:
        return
    assert schedule == GReg1(delta_lambda=1e-3)


# The magnitude-ratio rule.

STOP = GReg1(delta_lambda=0.1, tau=50.0, ku=5, ks=20, stop_ratio=20.0)


def stopping(schedule: Any = STOP) -> tuple[nn.Module, torch.optim.Optimizer, gp.Pruner]:
    net = seeded(MLP)
    pruner = gp.Pruner(net, batch((8, 5), 3)[0], schedule, ratios={"fc1": 0.5, "fc2": 0.5})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, weight_decay=1e-3)
    pruner.attach(optimizer)
    return net, optimizer, pruner


def run(thing: tuple[nn.Module, torch.optim.Optimizer, gp.Pruner], steps: int | None = None) -> list[gp.Penalty]:
    """Train until done, or for some steps, and note the penalty that each step carried."""
    net, optimizer, pruner = thing
    said = []
    while not pruner.done and (steps is None or len(said) < steps):
        assert len(said) < 5_000
        said.append(pruner.penalty())
        train_step(net, optimizer, *batch((8, 5), 3, seed=pruner.step_count))
    return said


@pytest.mark.parametrize(
    "schedule",
    [
        STOP,
        GReg2(delta_lambda=0.1, delta_lambda_pick=0.1, tau=50.0, tau_pick=0.3, ku=5, ks=20, stop_ratio=20.0),
    ],
    ids=["greg1", "greg2"],
)
def test_a_large_magnitude_ratio_ends_pushing(schedule: Any) -> None:
    """Pushing ends where the rule, worked out by hand on a run without it, says; then Ks steps at one λ follow."""
    without = stopping(dataclasses.replace(schedule, stop_ratio=None))
    end, pushed = rule_by_hand(without, schedule.ku)
    thing = stopping(schedule)
    said = run(thing)
    assert said[:end] == pushed
    assert all(p.phase is not Phase.STABILIZE for p in pushed)
    rest = said[end:]
    assert {p.phase for p in rest} == {Phase.STABILIZE}
    assert len({p.pruned for p in rest}) == 1
    assert pushed[-1].pruned <= rest[0].pruned < pushed[-1].pruned + 1.01 * schedule.delta_lambda
    assert len(rest) == schedule.ks
    assert thing[2].step_count == thing[2].total_steps == len(said) < schedule.total_steps


def rule_by_hand(thing: tuple[nn.Module, torch.optim.Optimizer, gp.Pruner], ku: int) -> tuple[int, list[gp.Penalty]]:
    """Every Ku steps the mean |w| of kept over pruned filters in each layer, averaged as 0.9·old + 0.1·new; pushing
    ends at the first such step at which the averages of the one before were all above 20."""
    said: list[gp.Penalty] = []
    means: list[float] = []
    while True:
        said += run(thing, 1)
        net, _, pruner = thing
        if len(said) % ku or pruner.phase is not Phase.PUSH:
            continue
        if means and min(means) > 20:
            return len(said), said
        ratios = []
        for name, keep in pruner.masks().items():
            size = net.get_submodule(name).weight.detach().abs().mean(1)
            ratios.append(float(size[keep].mean() / size[~keep].mean()))
        means = [0.9 * old + 0.1 * new for old, new in zip(means, ratios, strict=True)] if means else ratios


def test_the_ratio_rule_waits_for_every_layer() -> None:
    """A layer that does not separate holds the others back: kept weights as small as the pruned ones."""
    net, optimizer, pruner = stopping()
    net.fc2.weight.requires_grad_(False)
    before = pruner.step_count
    for i in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(batch((8, 5), 3)[0]), batch((8, 5), 3)[1]).backward()
        optimizer.step()
        assert pruner.phase is Phase.PUSH, i
    assert pruner.step_count == before + 200
    assert float(pruner.separation()["fc1"].kept / pruner.separation()["fc1"].pruned) > 20


def test_the_ratio_rule_gives_the_same_answer_every_time() -> None:
    assert run(stopping()) == run(stopping())


def test_the_ratio_rule_goes_on_from_a_saved_state() -> None:
    """Stopped anywhere, also after the rule has spoken, the resumed run says and does the same."""
    whole = stopping()
    said = run(whole)
    for stop in (3, 5, 7, len(said) - 22, len(said) - 20, len(said) - 19, len(said) - 1):
        first = stopping()
        assert run(first, stop) == said[:stop]
        again = stopping()
        for thing, old in zip(again, first, strict=True):
            thing.load_state_dict(old.state_dict())
        assert run(again) == said[stop:]
        for mine, its in zip(again[0].parameters(), whole[0].parameters(), strict=True):
            assert torch.equal(mine, its)


@pytest.mark.parametrize("ks", [0, 3])
def test_a_short_rest_after_the_ratio_rule_is_kept(ks: int) -> None:
    """Ks below Ku: steps already done do not count against it, nor does the count run past the total."""
    thing = stopping(dataclasses.replace(STOP, ks=ks))
    said = run(thing)
    assert sum(p.phase is Phase.STABILIZE for p in said) == ks
    assert thing[2].step_count == thing[2].total_steps


def test_a_pruner_taken_back_to_the_start_judges_anew() -> None:
    """The verdict of before is of a network that is no more."""

    def ended(pruner: gp.Pruner, optimizer: torch.optim.Optimizer) -> int:
        while pruner.phase is Phase.PUSH:
            optimizer.zero_grad()
            (pruner.model(torch.ones(1, 4)).square().mean() * 1e-6).backward()
            optimizer.step()
        return pruner.step_count

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = gp.Pruner(model, torch.ones(1, 4), GReg1(delta_lambda=0.1, tau=50.0, ku=1, ks=2, stop_ratio=5.0))
    start, weights = pruner.state_dict(), copy.deepcopy(model.state_dict())
    pruner.attach(optimizer)
    first = ended(pruner, optimizer)
    assert 2 < first < 500
    pruner.load_state_dict(start)
    model.load_state_dict(weights)
    assert ended(pruner, optimizer) == first


def test_where_nothing_goes_there_is_no_ratio_to_stop_at() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = gp.Pruner(model, torch.ones(1, 4), dataclasses.replace(STOP, ks=1), ratios=gp.Global(0.0))
    pruner.attach(optimizer)
    for _ in range(12):
        optimizer.step()
    assert pruner.step_count == 12


def test_a_schedule_that_never_picks_is_refused() -> None:
    class Late(OneShot):
        pick_step = 5

    with pytest.raises(GrowpruneError, match="schedule: Late picks at step 5, but ends at step 0"):
        gp.Pruner(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(1, 4), Late())
