"""What a loop of one's own may get wrong, found by people who did: told in one line, before it costs anything."""

import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import growprune as gp

X = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16),
                         nn.ReLU(), nn.Conv2d(16, 3, 1), nn.Flatten(), nn.Linear(48, 3))  # fmt: skip


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(X).square().mean().backward()
    optimizer.step()


class Own(gp.Schedule):
    """Eight steps of what it is given."""

    def __init__(self, at: Callable[[int], Any], length: Any = 8) -> None:
        object.__setattr__(self, "own", at)
        object.__setattr__(self, "length", length)

    @property
    def total_steps(self) -> Any:
        return self.length

    def at(self, step: int) -> Any:
        return self.own(step)


@pytest.mark.parametrize(
    "wrong",
    [0.1, None, gp.Penalty(gp.Phase.PUSH, float("nan"), 0.0), gp.Penalty(gp.Phase.PUSH, "x", 0.0),  # type: ignore[arg-type]
     gp.Penalty("banana", 0.1, 0.0)],  # type: ignore[arg-type]
)  # fmt: skip
def test_a_penalty_that_is_none_does_not_reach_the_weights(wrong: Any) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pruner = gp.Pruner(model, X, Own(lambda i: wrong if i == 5 else gp.Penalty(gp.Phase.PUSH, 0.1, 0.0)))
    pruner.attach(optimizer)
    for _ in range(4):
        step(model, optimizer)
    with pytest.raises(
        gp.GrowpruneError, match=r"schedule: Own\.at\(5\) must give a Penalty of a Phase and two finite"
    ):
        step(model, optimizer)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("length", [float("inf"), 2.5, -1, True])
def test_a_length_is_a_whole_number(length: Any) -> None:
    with pytest.raises(gp.GrowpruneError, match="schedule: total_steps of Own must be a whole number, not"):
        gp.Pruner(net(), X, Own(lambda i: gp.Penalty(gp.Phase.PUSH, 0.1, 0.0), length))


def test_a_schedule_of_ones_own_is_told_from_another_by_what_it_holds() -> None:
    def of(length: int) -> gp.Pruner:
        return gp.Pruner(net(), X, Own(lambda i: gp.Penalty(gp.Phase.PUSH, 0.1, 0.0), length))

    of(8).load_state_dict(of(8).state_dict())
    with pytest.raises(gp.GrowpruneError, match="the state is of another plan: its schedule is"):
        of(8).load_state_dict(of(9).state_dict())

    def marked(marks: Any) -> gp.Pruner:
        schedule = Own(lambda i: gp.Penalty(gp.Phase.PUSH, 0.1, 0.0))
        object.__setattr__(schedule, "marks", marks)
        return gp.Pruner(net(), X, schedule)

    state = io.BytesIO()
    torch.save(marked((1, np.float64(0.5))).state_dict(), state)
    kept = torch.load(io.BytesIO(state.getvalue()), weights_only=True)
    marked([np.int64(1), 0.5]).load_state_dict(kept)
    with pytest.raises(gp.GrowpruneError, match="the state is of another plan: its schedule is"):
        marked((3, 0.5)).load_state_dict(kept)


@pytest.mark.parametrize("rate", [0.0, None])
def test_of_a_rate_that_is_still_to_come_nothing_is_said(rate: Any) -> None:
    """A schedule that warms up has it at 0; an optimizer of its own kind may have none."""
    model = net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    gp.Pruner(model, X.bfloat16(), gp.GReg1(), ratios={"3": 0.5}).attach(optimizer)


RULED = gp.GReg1(delta_lambda=0.1, ku=2, ks=5, stop_ratio=1e6)


def whole(schedule: gp.Schedule) -> tuple[gp.Pruner, dict[str, Any]]:
    """A fresh pruner, and the state of another of its plan after five steps."""
    model = net()
    first, fresh = (gp.Pruner(model, X, schedule, granularity="weight", ratios={"3": 0.5}) for _ in range(2))
    first.attach(optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        step(model, optimizer)
    return fresh, first.state_dict()


@pytest.mark.parametrize(
    ("key", "value"),
    [("ended", 10**9), ("ended", 6), ("ended", -1), ("ended", True), ("turn", [{}]), ("turn", [-1]), ("turn", ["0"]),
     ("began", torch.ones(2)), ("began", torch.tensor(1.0)), ("ratio", torch.ones(7)), ("past", -1), ("past", "junk"),
     ("step", 0.5), ("step", -1),
     ("generator", torch.zeros_like(torch.Generator().get_state()))],
    ids=lambda value: str(value)[:12],
)  # fmt: skip
def test_a_state_that_is_refused_has_changed_nothing(key: str, value: Any) -> None:
    """Each thing wrong by itself, in a state that is right otherwise."""
    pruner, state = whole(RULED)
    before = str(pruner.state_dict())
    with pytest.raises(gp.GrowpruneError, match=f"this is not a pruner's state: its '{key}' is"):
        pruner.load_state_dict(state | {key: value})
    assert str(pruner.state_dict()) == before
    assert pruner.total_steps == RULED.total_steps
    pruner.load_state_dict(state | {"ended": 5, "turn": [0]})
    assert str(pruner.state_dict()) != before
    assert pruner.total_steps == 5 + RULED.ks


def test_a_push_that_no_rule_ends_has_not_been_ended() -> None:
    pruner, state = whole(gp.GReg1(delta_lambda=0.1, ku=2, ks=5))
    with pytest.raises(gp.GrowpruneError, match="the state's push ended at step 3, by a ratio that this plan has not"):
        pruner.load_state_dict(state | {"ended": 3})
    assert pruner.step_count == 0
    with pytest.raises(gp.GrowpruneError, match="of another plan: its schedule"):  # if it has another schedule at all
        pruner.load_state_dict(whole(RULED)[1] | {"ended": 3})


def test_a_state_is_at_the_plans_last_step_at_most() -> None:
    pruner, state = whole(RULED)
    last = RULED.total_steps
    with pytest.raises(gp.GrowpruneError, match=f"the state is at step {last + 1}, the plan has {last}"):
        pruner.load_state_dict(state | {"step": last + 1})
    pruner.load_state_dict(state | {"step": last})
    assert pruner.done


def test_a_model_that_has_changed_since_is_named_for_what_it_is() -> None:
    model = net()
    pruner = gp.Pruner(model, X, gp.OneShot())
    weight_norm(model[3])
    with pytest.raises(
        gp.GrowpruneError, match=r"the model has changed since .*: '3\.weight' is no more; make the pruner"
    ):
        pruner.compact()
    model = net()
    pruner = gp.Pruner(model, X, gp.OneShot())
    model[6] = nn.Conv2d(16, 5, 1)
    with pytest.raises(gp.GrowpruneError, match=r"'6\.weight' has another shape, \(5, 16, 1, 1\)"):
        pruner.compact()
    model = net()
    pruner = gp.Pruner(model, X, gp.OneShot())
    model.double()
    with pytest.raises(gp.GrowpruneError, match=r"the model itself fails on the example: .*; has it, or its precision"):
        pruner.compact()


def test_statistics_that_are_nan_are_refused_before_the_optimizer_goes_along() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = gp.Pruner(model, X, gp.OneShot())
    with pytest.raises(gp.GrowpruneError, match=r"calibrate= '1\.running_mean' comes to NaN or infinite numbers"):
        pruner.compact(optimizer=optimizer, calibrate=[X * float("nan")])
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_inference_mode_makes_what_cannot_be_trained() -> None:
    model = net()
    pruner = gp.Pruner(model, X, gp.OneShot())
    with torch.inference_mode():
        with pytest.raises(gp.GrowpruneError, match=r"Pruner: what is made in .* cannot be trained"):
            gp.Pruner(model, X)
        with pytest.raises(
            gp.GrowpruneError, match=r"compact: what is made in torch\.inference_mode\(\) cannot be trained"
        ):
            pruner.compact()
    with torch.no_grad():
        small = pruner.compact()
    small(X).sum().backward()


@pytest.mark.parametrize(
    ("kind", "options", "moves"),
    [("AdamW", {}, False), ("SGD", {}, False), ("SGD", {"momentum": 0.9}, True), ("AdamW", {"lr": 0.01}, True)],
)
def test_half_precision_that_no_step_can_shrink_is_told(kind: str, options: dict[str, Any], moves: bool) -> None:
    """w·(1 − lr·λ) is rounded to w. What is told is what happens."""
    model = net().bfloat16()
    given = {"lr": 1e-3, "weight_decay": 0.0, **options}
    optimizer = getattr(torch.optim, kind)(model.parameters(), **given)
    pruner = gp.Pruner(model, X.bfloat16(), gp.GReg1(delta_lambda=0.01, tau=1.0, ku=1, ks=20), ratios={"3": 0.5})
    if moves:
        pruner.attach(optimizer)
    else:
        with pytest.warns(
            UserWarning, match=r"attach: weights in bfloat16 cannot shrink by lr·τ = 0\.001 of themselves"
        ):
            pruner.attach(optimizer)
    before, goes = model[3].weight.detach().clone(), ~pruner.masks()["3"]
    while not pruner.done:
        optimizer.zero_grad()
        (model(X.bfloat16()).sum() * 0).backward()
        optimizer.step()
    moved = (model[3].weight.detach()[goes] != before[goes]).float().mean()
    assert (float(moved) > 0.5) == moves
    if not moves:
        assert float(moved) == 0.0


def test_a_forward_that_changes_its_input_leaves_the_example_alone() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.sub_(x.mean()).mul_(2))

    x = X.clone()
    assert gp.Pruner(Centred(), x, gp.OneShot()).compact().net[3].out_channels == 8
    assert torch.equal(x, X)


@pytest.mark.parametrize("given", [None, "x", 3, [].__iter__()])
def test_an_example_that_is_none(given: Any) -> None:
    with pytest.raises(
        gp.GrowpruneError, match="example_input: give a tensor, a tuple of arguments or a dict of keyword"
    ):
        gp.Pruner(net(), given)


def test_a_class_is_no_criterion() -> None:
    with pytest.raises(
        gp.GrowpruneError, match=r"criterion: Taylor is a class: give what it makes, as Taylor\(\.\.\.\)"
    ):
        gp.Pruner(net(), X, criterion=gp.Taylor)  # type: ignore[arg-type]


@pytest.mark.parametrize("times", [1.5, 2.0, 2.5, 3.0, 4.0])
def test_a_small_network_comes_to_the_speed_up_too(times: float) -> None:
    """A single filter of it is more than one in a hundred; another layer's fits."""
    model = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
                          nn.Conv2d(64, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(64, 10))  # fmt: skip
    small = gp.Pruner(model, X, gp.OneShot(), ratios=gp.Speedup(times)).compact()
    assert abs(gp.speedup(gp.measure(model, X), gp.measure(small, X)) / times - 1) <= 0.01


def weights_pushed(tau: float, halfway: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """What is told when single weights go after 60 steps of λ = tau, with the state put through `halfway` at 30."""
    model, state = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 3)), None
    for until in (30, 60):
        pruner = gp.Pruner(model, X, gp.GReg1(delta_lambda=tau, tau=tau, ku=1, ks=59), granularity="weight")
        if state is not None:
            pruner.load_state_dict(halfway(state))
        pruner.attach(optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
        while pruner.step_count < until:
            step(model, optimizer)
        state = pruner.state_dict()
        if until == 30:
            pruner.detach()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pruner.compact()
    return " ".join(str(each.message) for each in told)


def test_single_weights_are_judged_by_what_they_were_when_they_were_picked() -> None:
    """The least of them are small from the start: half the size of the others says nothing."""

    def older(state: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in state.items() if key != "began"}

    assert re.search(r"still 3\d% as large as what stays \(3\d% when it was picked\)", weights_pushed(1e-9, dict))
    assert weights_pushed(1.0, dict) == weights_pushed(1e-9, older) == ""
    with pytest.raises(gp.GrowpruneError, match="this is not a pruner's state: its 'began' is 'junk'"):
        weights_pushed(1.0, lambda state: state | {"began": "junk"})


def test_what_is_no_pruners_state_is_told_by_what_it_lacks() -> None:
    pruner = gp.Pruner(net(), X, gp.GReg1(delta_lambda=0.1, ks=1))
    for given in ({}, net().state_dict()):
        with pytest.raises(gp.GrowpruneError, match="this is not a pruner's state: it has no 'plan'"):
            pruner.load_state_dict(dict(given))
    other = gp.Pruner(net(), X, gp.GReg1(delta_lambda=0.1, ks=1), ratios=0.25).state_dict()
    with pytest.raises(
        gp.GrowpruneError, match=r"of another plan: what goes of each layer is \[\d.*\], here it is \[\d"
    ):
        pruner.load_state_dict(other)
