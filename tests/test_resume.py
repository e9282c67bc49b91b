"""Stopping and going on: a state taken at any step continues bit for bit, and no other state is taken for it."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import growprune as gp
from growprune.schedule import Phase
from growprune.separation import StopRule


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 6, 3, bias=False)
        self.norm1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, width, 3)
        self.conv3 = nn.Conv2d(width, width, 1)
        self.fc = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return self.fc(F.relu(self.conv3(F.relu(self.conv2(x)))).mean((2, 3)))


EXAMPLE = torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(0))
ONE = gp.GReg1(delta_lambda=0.2, tau=1.0, ku=2, ks=3)
TWO = gp.GReg2(delta_lambda=0.2, delta_lambda_pick=0.1, tau=1.2, tau_pick=0.2, ku=2, ks=3)

PLANS: dict[str, dict[str, Any]] = {
    "greg1": {"schedule": ONE},
    "greg1 weight": {"schedule": ONE, "granularity": "weight"},
    "greg1 path": {"schedule": ONE, "scope": "path"},
    "greg1 l1": {"schedule": gp.GReg1(delta_lambda=0.02, tau=0.1, ku=2, ks=3, form="l1")},
    "greg1 random": {"schedule": ONE, "criterion": "random", "seed": 3},
    "greg1 stop": {"schedule": gp.GReg1(delta_lambda=2.0, tau=30.0, ku=2, ks=5, stop_ratio=2.0)},
    "greg2": {"schedule": TWO},
    "greg2 weight": {"schedule": TWO, "granularity": "weight"},
    "greg2 gamma": {"schedule": gp.GReg2(**{**vars(TWO), "gamma": 0.3})},
    "greg2 random": {"schedule": TWO, "criterion": "random", "seed": 3},
    "greg2 global": {"schedule": TWO, "ratios": gp.Global(0.4)},
    "greg2 global weight": {"schedule": TWO, "ratios": gp.Global(0.4), "granularity": "weight"},
    "greg2 stop": {"schedule": gp.GReg2(**{**vars(TWO), "delta_lambda": 2.0, "tau": 30.0, "ks": 5, "stop_ratio": 2.0})},
    "one shot": {"schedule": gp.OneShot(), "criterion": "random"},
}


class Run:
    """A model, its optimizer and its pruner, step by step; data follow from the step alone."""

    def __init__(self, plan: dict[str, Any], seed: int, kind: str = "sgd", width: int = 8, attach: bool = True) -> None:
        torch.manual_seed(seed)
        self.model = Net(width)
        groups = [{"params": list(self.model.parameters())[:3], "weight_decay": 0.01}]
        groups.append({"params": list(self.model.parameters())[3:], "weight_decay": 0.02})
        if kind == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.pruner = gp.Pruner(self.model, EXAMPLE, **plan)
        if attach:
            self.pruner.attach(self.optimizer)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(8, 2, 6, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """All of it through a file that holds no code."""
        file = io.BytesIO()
        parts = {"model": self.model, "optimizer": self.optimizer, "pruner": self.pruner}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.pruner.load_state_dict(state["pruner"])

    def finish(self, first: int) -> list[Any]:
        """To the end and two steps beyond; what was seen on the way."""
        seen, number, beyond = [], first, 2
        while beyond:
            beyond -= self.pruner.done
            seen.append((self.pruner.penalty(), self.pruner.step_count, self.pruner.total_steps))
            self.step(number)
            number += 1
        return seen


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    """Bit for bit, through dicts and lists."""
    if isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{i}]")
    elif isinstance(a, Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    else:
        assert a == b, where


@pytest.mark.filterwarnings("ignore:compact. the push has ended")  # such short ones do not push far
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("name", PLANS)
def test_going_on_from_every_step_is_not_having_stopped(name: str, kind: str) -> None:
    plan = PLANS[name]
    whole = Run(plan, seed=0, kind=kind)
    states, phases, number = [whole.state()], [whole.pruner.phase], 0
    while not whole.pruner.done:
        whole.step(number)
        number += 1
        states.append(whole.state())
        phases.append(whole.pruner.phase)
    expected = {Phase.PUSH, Phase.STABILIZE, Phase.DONE}
    if "greg2" in name:
        expected.add(Phase.PICK)
    assert set(phases) == (expected if name != "one shot" else {Phase.DONE})
    if "stop" in name:
        assert whole.pruner.total_steps < plan["schedule"].total_steps, "the ratio rule must have ended pushing"

    reference = Run(plan, seed=0, kind=kind)
    seen = reference.finish(0)
    last, masks = reference.state(), reference.pruner.masks()
    small = reference.pruner.compact()
    for first, state in enumerate(states):
        # Another seed: nothing of the fresh model's own weights or picks may be left over.
        again = Run(plan, seed=99, kind=kind, attach=first % 2 == 0)
        again.load(copy.deepcopy(state))
        if first % 2:
            again.pruner.attach(again.optimizer)
        assert_equal(again.finish(first), seen[first:], f"from step {first}")
        assert_equal(again.state(), last, f"from step {first}")
        assert_equal(again.pruner.masks(), masks)
        assert_equal(again.pruner.compact().state_dict(), small.state_dict())


def through_a_file(run: Run) -> Run:
    file = io.BytesIO()
    torch.save(run, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Run], Run]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda run: pickle.loads(pickle.dumps(run)),
    "torch.save": through_a_file,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["greg1 path", "greg1 weight", "greg2 gamma", "greg2 random", "greg2 stop"])
def test_a_copy_of_it_all_is_attached_to_nothing_and_goes_on_once_it_is(name: str, how: str) -> None:
    run = Run(PLANS[name], seed=0)
    for number in range(9):
        run.step(number)
    twin, idle = COPIES[how](run), COPIES[how](run)
    idle.step(9)
    assert idle.pruner.step_count == 9, "torch copies an optimizer without its hooks"
    twin.pruner.attach(twin.optimizer)
    assert_equal(twin.finish(9), run.finish(9))
    assert_equal(twin.state(), run.state())
    twin.pruner.detach()
    twin.pruner.attach(twin.optimizer)


@pytest.mark.parametrize("name", ["greg1 path", "greg1 weight"])
def test_a_copy_of_the_model_is_a_plain_one_and_the_pruner_does_not_know_it(name: str) -> None:
    """As weights are averaged: the network is pushed once a step, its copies not at all."""
    run, undisturbed, bare = Run(PLANS[name], seed=0), Run(PLANS[name], seed=0), Run(PLANS[name], seed=0, attach=False)
    run.step(0)
    twin = Run(PLANS[name], seed=1, attach=False)
    twin.model = copy.deepcopy(run.model)
    twin.optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.05)
    bare.model.load_state_dict(run.model.state_dict())
    bare.optimizer = torch.optim.SGD(bare.model.parameters(), lr=0.05)
    averaged = torch.optim.swa_utils.AveragedModel(run.model)
    for module in (*twin.model.modules(), *averaged.modules()):
        assert not {each for each, hooks in vars(module).items() if "hooks" in each and hooks}
    undisturbed.step(0)
    for number in range(1, 8):
        for each in (run, undisturbed, twin, bare):
            each.step(number)
        averaged.update_parameters(run.model)
    assert run.pruner.step_count == 8
    assert_equal(run.state(), undisturbed.state())
    assert_equal(twin.model.state_dict(), bare.model.state_dict())


def test_what_is_on_its_way_from_a_gpu_is_asked_for_anew_by_a_copy() -> None:
    rule = StopRule(2.0)
    rule.load(torch.tensor([3.0, 4.0]))
    rule.verdict = lambda: False  # what cannot be pickled
    assert (found := pickle.loads(pickle.dumps(rule)).verdict) is not None
    assert found()


def test_a_state_is_not_changed_by_what_comes_after() -> None:
    run = Run(PLANS["greg2 random"], seed=0)
    state = run.pruner.state_dict()
    before = copy.deepcopy(state)
    run.finish(0)
    assert_equal(state, before)


def test_a_state_is_not_tied_to_the_pruner_that_loaded_it() -> None:
    first = Run(PLANS["greg2 stop"], seed=0)
    for number in range(9):
        first.step(number)
    state = first.state()
    before = copy.deepcopy(state["pruner"])
    second = Run(PLANS["greg2 stop"], seed=1)
    second.load(state)
    second.finish(9)
    assert_equal(state["pruner"], before)


def test_loading_goes_back_too() -> None:
    """Also into a pruner that is further on, or done."""
    run = Run(PLANS["greg2 random"], seed=0)
    start = run.state()
    seen = run.finish(0)
    end = run.state()
    run.load(start)
    assert run.pruner.phase is Phase.PICK
    assert all(bool(mask.all()) for mask in run.pruner.masks().values())
    assert_equal(run.finish(0), seen)
    assert_equal(run.state(), end)


# -- states that do not fit --------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ratio": ({"ratios": 0.3}, {"ratios": 0.6}),
    "global ratio": ({"ratios": gp.Global(0.3)}, {"ratios": gp.Global(0.6)}),
    "of a layer": ({"ratios": gp.Global(0.5)}, {"ratios": gp.Global(0.5, at_most=0.6)}),
    "the stem": ({"ratios": gp.Global(0.5)}, {"ratios": gp.Global(0.5, stem=True)}),
    "global or not": ({"ratios": gp.Global(0.5)}, {"ratios": 0.5}),
    "schedule": ({"schedule": ONE}, {"schedule": TWO}),
    "one shot": ({"schedule": ONE}, {"schedule": gp.OneShot()}),
    "ku": ({}, {"schedule": gp.GReg2(**{**vars(TWO), "ku": 3})}),
    "ks": ({}, {"schedule": gp.GReg2(**{**vars(TWO), "ks": 4})}),
    "delta": ({}, {"schedule": gp.GReg2(**{**vars(TWO), "delta_lambda": 0.3})}),
    "tau": ({}, {"schedule": gp.GReg2(**{**vars(TWO), "tau": 2.0})}),
    "tau pick": ({}, {"schedule": gp.GReg2(**{**vars(TWO), "tau_pick": 0.4})}),
    "gamma": ({}, {"schedule": gp.GReg2(**{**vars(TWO), "gamma": 0.5})}),
    "stop ratio": ({}, {"schedule": gp.GReg2(**{**vars(TWO), "stop_ratio": 9.0})}),
    "form": ({"schedule": ONE}, {"schedule": gp.GReg1(**{**vars(ONE), "form": "l1"})}),
    "granularity": ({}, {"granularity": "weight"}),
    "scope": ({}, {"scope": "path"}),
    "ignored layer": ({}, {"ignore": ["fc"]}),
    "criterion": ({"criterion": "l1"}, {"criterion": "random"}),
}


def assert_refused(run: Run, state: Any) -> None:
    before = copy.deepcopy((run.pruner.state_dict(), run.pruner.penalty(), run.model.state_dict()))
    with pytest.raises(gp.GrowpruneError) as caught:
        run.pruner.load_state_dict(state)
    assert "\n" not in str(caught.value)
    assert_equal((run.pruner.state_dict(), run.pruner.penalty(), run.model.state_dict()), before)
    # and what it does from here on is what it would have done
    fresh = Run(run.plan, seed=1, width=run.model.fc.in_features)  # type: ignore[attr-defined]
    assert_equal(run.finish(0), fresh.finish(0))
    assert_equal(run.state(), fresh.state())


def planned(plan: dict[str, Any], seed: int = 1, width: int = 8) -> Run:
    run = Run(plan, seed, width=width)
    run.plan = plan  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("which", OTHERS)
@pytest.mark.parametrize("way", ["there", "back"])
def test_a_state_of_another_plan_is_refused(which: str, way: str) -> None:
    one, other = ({"schedule": TWO, **plan} for plan in OTHERS[which])
    if way == "back":
        one, other = other, one
    source = Run(one, seed=0)
    for number in range(3):
        source.step(number)
    assert_refused(planned(other), source.state()["pruner"])


def test_a_state_of_another_network_is_refused() -> None:
    source = Run(PLANS["greg1"], seed=0, width=10)
    assert_refused(planned(PLANS["greg1"]), source.state()["pruner"])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: {},
        lambda state: None,
        lambda state: [1, 2],
        lambda state: {"model": state},
        lambda state: {**state, "plan": None},
        lambda state: {**state, "step": "many"},
        lambda state: {**state, "step": -4},
        lambda state: {**state, "pruned": None},
        lambda state: {**state, "pruned": state["pruned"][:-1]},
        lambda state: {**state, "pruned": state["pruned"].float() * torch.nan},
        lambda state: {**state, "generator": torch.zeros(3, dtype=torch.uint8)},
        lambda state: {k: v for k, v in state.items() if k != "generator"},
    ],
    ids=[
        "empty", "None", "a list", "wrapped", "no plan", "step a word", "step negative", "no units", "a unit short",
        "units not flags", "generator short", "no generator",
    ],
)  # fmt: skip
def test_what_is_no_state_is_refused(spoil: Any) -> None:
    source = Run(PLANS["greg2"], seed=0)
    assert_refused(planned(PLANS["greg2"]), spoil(source.state()["pruner"]))
