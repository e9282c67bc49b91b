"""Pruner against Algorithm 1 written out by hand (reference.py): weights, masks and λ after every single step."""

import copy
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import MLP, TwoConvs, batch, seeded, train_step
from reference import Algorithm, Layer, Place, written
from torch import nn

import growprune as gp

STEPS = 300
LR, MOMENTUM, DECAY = 0.02, 0.9, 5e-4
GREG1 = gp.GReg1(delta_lambda=0.02, tau=0.5, ku=7, ks=60)
GREG2 = gp.GReg2(delta_lambda=0.02, delta_lambda_pick=0.01, tau=0.5, tau_pick=0.1, ku=5, ks=80)

# By network: how to make it, the shape of a batch, ratios (first and second layer, and for single weights the last
# too), and by layer where else its filters are found.
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, float], dict[str, tuple[Place, ...]]]] = {
    "convs": (
        TwoConvs,
        (12, 2, 6, 6),
        {"conv1": 0.5, "conv2": 0.45},
        {
            "conv1": (Place("bn1.weight"), Place("bn1.bias"), Place("conv2.weight", dim=1)),
            "conv2": (Place("bn2.weight"), Place("bn2.bias"), Place("conv2.bias"), Place("fc.weight", 1, times=4)),
        },
    ),
    "mlp": (
        MLP,
        (8, 5),
        {"fc1": 0.5, "fc2": 0.7},
        {
            "fc1": (Place("fc1.bias"), Place("fc2.weight", dim=1)),
            "fc2": (Place("fc2.bias"), Place("fc3.weight", dim=1)),
        },
    ),
}


def gradient_of(net: nn.Module, shape: tuple[int, ...]) -> Callable[[dict[str, Any], int], dict[str, Any]]:
    """The loss gradient at weights given as nested lists; autograd is not what is tested here."""

    def gradient(weights: dict[str, Any], i: int) -> dict[str, Any]:
        own = {name: torch.tensor(value, dtype=torch.double, requires_grad=True) for name, value in weights.items()}
        x, y = batch(shape, 3, seed=i)
        loss = F.cross_entropy(torch.func.functional_call(net, own, (x,)), y)
        found = torch.autograd.grad(loss, list(own.values()))
        return {name: g.tolist() for name, g in zip(own, found, strict=True)}

    return gradient


def reference(net: nn.Module, shape: tuple[int, ...], schedule: Any, layers: list[Layer], granularity: str) -> Algorithm:
    greg2: Mapping[str, Fraction] = {}
    if isinstance(schedule, gp.GReg2):
        greg2 = {
            "delta_pick": written(schedule.delta_lambda_pick),
            "tau_pick": written(schedule.tau_pick),
            "gamma": written(DECAY if schedule.gamma is None else schedule.gamma),
        }
    return Algorithm(
        weights={name: p.tolist() for name, p in net.named_parameters()},
        gradient=gradient_of(copy.deepcopy(net), shape),
        layers=layers,
        delta=written(schedule.delta_lambda),
        tau=written(schedule.tau),
        ku=schedule.ku,
        ks=schedule.ks,
        granularity=granularity,
        form=schedule.form,
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        **greg2,
    )


@pytest.mark.parametrize("net_name", ["convs", "mlp"])
@pytest.mark.parametrize(
    ("schedule", "granularity", "scope"),
    [
        (GREG1, "filter", "filter"),
        (GREG1, "weight", "filter"),
        (GREG2, "filter", "filter"),
        (GREG2, "weight", "filter"),
        (gp.GReg1(delta_lambda=0.002, tau=0.05, ku=7, ks=60, form="l1"), "filter", "filter"),
        (gp.GReg1(delta_lambda=0.002, tau=0.05, ku=7, ks=60, form="l1"), "weight", "filter"),
        (GREG1, "filter", "path"),
        (GREG2, "filter", "path"),
        (gp.GReg2(delta_lambda=0.02, delta_lambda_pick=0.01, tau=0.5, tau_pick=0.1, ku=5, ks=80, gamma=0.03), "filter", "path"),
    ],
    ids=["1-filter", "1-weight", "2-filter", "2-weight", "1-l1", "1-l1-weight", "1-path", "2-path", "2-gamma"],
)  # fmt: skip
def test_every_step_is_the_papers(net_name: str, schedule: Any, granularity: Any, scope: Any) -> None:
    build, shape, ratios, paths = NETS[net_name]
    net = seeded(build)
    layers = [Layer(f"{n}.weight", r, paths[n] if scope == "path" else ()) for n, r in ratios.items()]
    expected = reference(net, shape, schedule, layers, granularity)
    pruner = gp.Pruner(net, batch(shape, 3)[0], schedule, ratios=ratios, granularity=granularity, scope=scope)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    pruner.attach(optimizer)
    phases: dict[str, int] = {}
    states = expected.run()
    state = next(states)
    for i in range(STEPS):
        # The algorithm sets λ at the start of an iteration; `penalty()` is what the NEXT step carries: the same.
        assert (pruner.step_count, pruner.phase.value) == (min(i, pruner.total_steps), state.phase)
        assert pruner.penalty().pruned == pytest.approx(float(state.pruned), rel=1e-15)
        assert pruner.penalty().kept == pytest.approx(float(state.kept), rel=1e-15)
        masks = {f"{name}.weight": mask.flatten().tolist() for name, mask in pruner.masks().items()}
        assert {name: masks[name] for name in state.masks} == state.masks, f"masks at step {i}"
        assert pruner.done == (state.phase == "done")
        phases[state.phase] = phases.get(state.phase, 0) + 1
        train_step(net, optimizer, *batch(shape, 3, seed=i))
        state = next(states)  # the reference updates its weights on the way to its next iteration
        assert_same(net, expected.weights, f"after step {i}")
    assert pruner.total_steps == sum(n for phase, n in phases.items() if phase != "done")
    assert phases["stabilize"] == schedule.ks
    assert set(phases) == {"push", "stabilize", "done"} | ({"pick"} if isinstance(schedule, gp.GReg2) else set())


def assert_same(net: nn.Module, expected: dict[str, Any], when: str) -> None:
    """To rounding, which 300 steps of training carry on: 1e-12 at first, some 1e-12 at the end."""
    for name, p in net.named_parameters():
        error = float((p - torch.tensor(expected[name], dtype=torch.double)).abs().max())
        assert error <= 1e-11, f"{name} is off by {error:.1e} {when}"
