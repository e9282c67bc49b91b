"""Pruner against Algorithm 1 written out by hand (reference.py): weights, masks and λ after every single step."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import growprune as gp
from growprune.penalty import normalizes
from nets import MLP, TwoConvs, batch, seeded, train_step
from reference import Algorithm, Layer, Place, written

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


def reference(
    net: nn.Module, shape: tuple[int, ...], schedule: Any, layers: list[Layer], granularity: str
) -> Algorithm:
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
        (replace(GREG1, delta_lambda=0.001, tau=0.025, form="l1"), "filter", "filter"),
        (replace(GREG1, delta_lambda=0.001, tau=0.025, form="l1"), "weight", "filter"),
        (GREG1, "filter", "path"),
        (GREG2, "filter", "path"),
        (replace(GREG2, gamma=0.03), "filter", "path"),
    ],
    ids=["1-filter", "1-weight", "2-filter", "2-weight", "1-l1", "1-l1-weight", "1-path", "2-path", "2-gamma"],
)
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
    """To rounding (the worst of these runs is 7e-13; a λ kept in single precision is off by 2e-11 at once)."""
    for name, p in net.named_parameters():
        error = float((p.detach() - torch.tensor(expected[name], dtype=torch.double)).abs().max())
        assert error <= 1e-11, f"{name} is off by {error:.1e} {when}"


# Where the penalty lands in a loop. λ is constant here: 0.25 for the pruned, −0.125 for the kept.


@dataclass(frozen=True)
class Constant(gp.Schedule):
    """A schedule of one's own: λ never changes, groups are picked before `picks`."""

    picks: int = 0
    pruned: float = 0.25
    kept: float = -0.125
    length: int = 1000

    @property
    def total_steps(self) -> int:
        return self.length

    @property
    def pick_step(self) -> int:
        return self.picks

    def at(self, step: int) -> gp.Penalty:
        if step >= self.length:
            return gp.Penalty(gp.Phase.DONE, 0.0, 0.0)
        return gp.Penalty(gp.Phase.PUSH, self.pruned, self.kept)


RATIOS = {"fc1": 0.5, "fc2": 0.5}
X, Y = batch((8, 5), 3)


def factors_of(pruner: gp.Pruner) -> dict[str, Tensor]:
    """λ as it should lie over the two weights, read from the public masks and penalty."""
    penalty = pruner.penalty()
    result = {}
    for name in RATIOS:
        keep = pruner.masks()[name]
        shaped = keep.double() if keep.dim() == 2 else keep[:, None].double()
        result[f"{name}.weight"] = shaped * penalty.kept + (1 - shaped) * penalty.pruned
    return result


def pair(schedule: gp.Schedule | None = None, **options: Any) -> tuple[nn.Module, gp.Pruner]:
    net = seeded(MLP)
    return net, gp.Pruner(net, X, schedule or Constant(), ratios=RATIOS, **options)


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def assert_close(net: nn.Module, expected: dict[str, Tensor], rtol: float = 1e-13) -> None:
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=rtol, atol=1e-15, msg=lambda m, n=name: f"{n}: {m}")


def test_the_penalty_lands_after_clipping() -> None:
    net, pruner = pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pruner.attach(optimizer)
    F.cross_entropy(net(X), Y).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    factors, before = factors_of(pruner), values(net)
    expected = {
        n: w - 0.1 * (g + factors.get(n, 0.0) * w) for (n, w), g in zip(before.items(), gradients(net), strict=True)
    }
    assert 0.9e-3 < torch.cat([g.flatten() for g in gradients(net)]).norm() < 1.1e-3  # it was clipped
    optimizer.step()
    assert_close(net, expected)


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def test_the_penalty_lands_once_for_accumulated_gradients() -> None:
    net, pruner = pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pruner.attach(optimizer)
    for half in (slice(0, 4), slice(4, 8)):
        (F.cross_entropy(net(X[half]), Y[half]) / 2).backward()
    factors, before, slopes = factors_of(pruner), values(net), gradients(net)
    optimizer.step()
    expected = {n: w - 0.1 * (g + factors.get(n, 0.0) * w) for (n, w), g in zip(before.items(), slopes, strict=True)}
    assert_close(net, expected)
    assert pruner.step_count == 1


def test_weights_without_a_gradient_are_left_alone() -> None:
    """A step in which a layer took no part moves none of it, as with weight decay."""
    net, pruner = pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
    pruner.attach(optimizer)
    before = values(net)
    optimizer.step()
    assert_close(net, before)


# Loss scaling.


def scaled_run(
    optimizer_class: Any, options: dict[str, Any], scale: float | None, unscale: bool = False
) -> dict[str, Tensor]:
    """Five steps in single precision, under a GradScaler or without."""
    net = seeded(MLP).float()
    pruner = gp.Pruner(
        net,
        X.float(),
        gp.GReg2(delta_lambda=0.25, delta_lambda_pick=0.25, tau=1.0, tau_pick=0.25, ku=1, ks=3, gamma=0.125),
        ratios=RATIOS,
    )
    optimizer = optimizer_class(net.parameters(), lr=0.125, **options)
    pruner.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    for _ in range(5):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(net(X.float()), Y)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert pruner.step_count == 5
    return values(net)


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.5}),
        (torch.optim.SGD, {"momentum": 0.5, "fused": True}),
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.AdamW, {"fused": True, "weight_decay": 0.0}),
    ],
    ids=["sgd", "sgd-fused", "adam", "adam-fused", "adamw-fused"],
)
def test_a_loss_scale_does_not_touch_the_penalty(optimizer: Any, options: dict[str, Any], unscale: bool) -> None:
    """Scaling by a power of two is exact, so the weights must agree to the last bits."""
    plain = scaled_run(optimizer, options, None)
    scaled = scaled_run(optimizer, options, 2.0**12, unscale)
    for name, value in plain.items():
        torch.testing.assert_close(scaled[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_that_the_scaler_skips_moves_nothing(optimizer_class: Any, fused: bool) -> None:
    net = seeded(MLP).float()
    pruner = gp.Pruner(net, X.float(), Constant(), ratios=RATIOS)
    optimizer = optimizer_class(net.parameters(), lr=0.125, fused=fused)
    pruner.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    before = values(net)
    scaler.scale(F.cross_entropy(net(X.float()) * float("inf"), Y)).backward()
    scaler.step(optimizer)
    assert_close(net, before)


# Closures.

CLOSING = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1}),
]


@pytest.mark.parametrize(("optimizer_class", "options"), CLOSING, ids=["sgd", "adam", "adamw"])
@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_gives_what_an_ordinary_loop_gives(optimizer_class: Any, options: Any, keyword: bool) -> None:
    results = []
    for closed in (False, True):
        net, pruner = pair(GREG2)
        optimizer = optimizer_class(net.parameters(), **options)
        pruner.attach(optimizer)

        def closure(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(X), Y)
            loss.backward()
            return loss

        for _ in range(80):
            if not closed:
                closure()
                optimizer.step()
            elif keyword:
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)
            optimizer.zero_grad()  # gradients are gone between steps: nothing stale may stand in for them
        assert pruner.step_count == 80
        results.append(values(net))
    assert_close(net, results[0])


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("form", ["l2", "l1"])
def test_lbfgs_minimises_the_loss_with_the_penalty_in_it(line_search: str | None, form: Any) -> None:
    """The same as LBFGS on a loss to which ½Σλw² (or Σλ|w|) was added by hand."""
    results = []
    for by_hand in (False, True):
        net, pruner = pair(Constant(pruned=0.02, kept=0.0, form=form))
        factors = factors_of(pruner)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=8, line_search_fn=line_search)
        if not by_hand:
            pruner.attach(optimizer)

        def closure(net: nn.Module = net, by_hand: bool = by_hand, factors: Any = factors) -> Tensor:
            net.zero_grad()
            loss = F.cross_entropy(net(X), Y)
            own = dict(net.named_parameters())
            if by_hand:
                parts = [(f * (0.5 * own[n] ** 2 if form == "l2" else own[n].abs())).sum() for n, f in factors.items()]
                loss = loss + sum(parts)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        results.append(values(net))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)


# Every optimizer.

KIN = {"Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop"}
"""Those that divide the gradient's size away, so that a penalty in the gradient would be divided away too."""
PLAIN = {"ASGD", "SGD"}
ALL = sorted(KIN | PLAIN | {"LBFGS"})


def make(name: str, net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """No weight decay but ours; Muon takes matrices only."""
    cls = getattr(torch.optim, name)
    if "weight_decay" in inspect.signature(cls).parameters:
        options = {"weight_decay": 0.0, **options}
    members = [p for p in net.parameters() if p.dim() == 2] if name == "Muon" else list(net.parameters())
    optimizer: torch.optim.Optimizer = cls(members, **options)
    return optimizer


def test_no_optimizer_is_forgotten() -> None:
    known = {n for n in dir(torch.optim) if isinstance(getattr(torch.optim, n), type)} - {"Optimizer", "SparseAdam"}
    assert known == set(ALL)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("net_name", ["convs", "mlp"])
def test_every_optimizer_carries_the_penalty(name: str, net_name: str) -> None:
    """Under a large λ the pruned filters end much smaller than without it; the steps are counted."""
    if name == "Muon" and net_name == "convs":
        pytest.skip("Muon takes matrices only")
    build, shape, ratios, _ = NETS[net_name]
    x, y = batch(shape, 3)
    norms = []
    for penalised in (True, False):
        net = seeded(build)
        pruner = gp.Pruner(
            net,
            x,
            gp.GReg2(delta_lambda=0.5, delta_lambda_pick=0.25, tau=3.0, tau_pick=0.5, ku=1, ks=10, gamma=0.0),
            ratios=ratios,
        )
        optimizer = make(name, net, lr=0.05)
        if penalised:
            pruner.attach(optimizer)
        for _ in range(pruner.total_steps):

            def closure(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        if penalised:
            assert pruner.done
            keep = pruner.masks()  # the run without the penalty is judged by the same filters
        weights = values(net)
        assert all(bool(w.isfinite().all()) for w in weights.values())
        norms.append(sum(float(weights[f"{n}.weight"][~keep[n]].abs().sum()) for n in ratios))
    assert norms[0] < 0.8 * norms[1]


@pytest.mark.parametrize("name", sorted(KIN))
def test_adam_and_its_kin_shrink_the_weight_itself(name: str) -> None:
    """By default, whatever the gradient's history: with a zero gradient, w ← (1 − lr·λ)·w to the last bit."""
    net, pruner = pair()
    optimizer = make(name, net, lr=0.0625)
    pruner.attach(optimizer)
    factors, expected = factors_of(pruner), values(net)
    for _ in range(2):
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for n, f in factors.items():
        expected[n] = expected[n] * (1 - 0.0625 * f) * (1 - 0.0625 * f)
    assert_close(net, expected, rtol=1e-15)


def test_adam_is_known_as_such_before_its_warm_up() -> None:
    """With a learning rate of zero at first, no step tells what kind of optimizer it is."""
    net, pruner = pair()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.0)
    pruner.attach(optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    expected = {n: w * (1 - 0.25 * factors_of(pruner).get(n, 0.0)) for n, w in values(net).items()}
    zero_step(net, optimizer)
    assert_close(net, expected)


@pytest.mark.parametrize("name", sorted(PLAIN | {"LBFGS"}))
def test_plain_descent_has_the_penalty_in_its_gradient(name: str) -> None:
    """Seen in the gradient that the step leaves behind."""
    net, pruner = pair()
    optimizer = make(name, net, lr=0.0625)
    pruner.attach(optimizer)
    factors, before = factors_of(pruner), values(net)

    def closure() -> Tensor:
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        return torch.zeros(())

    if name == "LBFGS":
        optimizer.param_groups[0]["max_iter"] = 0
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    for n, p in net.named_parameters():
        torch.testing.assert_close(p.grad, factors.get(n, 0.0) * before[n], rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_the_penalty_can_be_forced_into_adams_gradient(name: str) -> None:
    """decoupled=False: the same as giving the optimizer the gradient g + λ·w by hand."""
    results = []
    for by_hand in (False, True):
        net, pruner = pair()
        optimizer = make(name, net, lr=0.01)
        factors = factors_of(pruner)
        if not by_hand:
            pruner.attach(optimizer, decoupled=False)
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(net(X), Y).backward()
            if by_hand:
                for n, p in net.named_parameters():
                    p.grad += factors.get(n, 0.0) * p.detach()
            optimizer.step()
        results.append(values(net))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("form", ["l2", "l1"])
def test_sgd_can_be_decoupled(form: Any) -> None:
    """The weight shrinks by lr·λ·w beside the gradient's step; for L1 by lr·λ, and stops at zero."""
    net, pruner = pair(Constant(pruned=0.5, kept=0.0, form=form))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    pruner.attach(optimizer, decoupled=True)
    factors, before = factors_of(pruner), values(net)
    F.cross_entropy(net(X), Y).backward()
    slopes = dict(zip(before, gradients(net), strict=True))
    optimizer.step()
    expected = {}
    for n, w in before.items():
        f = 0.125 * factors.get(n, torch.zeros(1, dtype=torch.double))
        shrunk = w - f * w if form == "l2" else w.sign() * (w.abs() - f).clamp(min=0)
        expected[n] = shrunk - 0.125 * slopes[n]
    assert form == "l2" or any(
        bool(((w.abs() < 0.0625) & (factors[n] > 0)).any()) for n, w in before.items() if n in factors
    )
    assert_close(net, expected)


def test_each_parameter_group_has_its_own_rate_and_decay() -> None:
    """Decoupled, each weight shrinks by its own group's lr; GReg-2's kept weights grow by their own group's decay."""
    net = seeded(MLP)
    schedule = gp.GReg2(delta_lambda=0.5, delta_lambda_pick=0.25, tau=2.0, tau_pick=0.25, ku=1, ks=5)
    pruner = gp.Pruner(net, X, schedule, ratios=RATIOS)
    groups = [
        {"params": [net.fc1.weight], "lr": 0.25, "weight_decay": 0.125},
        {"params": [net.fc2.weight], "lr": 0.0625, "weight_decay": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    pruner.attach(optimizer, decoupled=True)
    for _ in range(schedule.pick_step):
        zero_step(net, optimizer)
    before, keep = values(net), pruner.masks()
    zero_step(net, optimizer)
    for name, lr, decay in (("fc1.weight", 0.25, 0.125), ("fc2.weight", 0.0625, 0.5)):
        kept = keep[name.partition(".")[0]][:, None]
        # λ at the pick is 0.5, one more δλ makes 1; SGD's own decay comes on top.
        shrunk = before[name] * (1 - lr * torch.where(kept, -decay, 1.0))
        torch.testing.assert_close(dict(net.named_parameters())[name].detach(), shrunk * (1 - lr * decay))


def zero_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()


@pytest.mark.parametrize("reload", [False, True], ids=["scheduler", "after load_state_dict"])
def test_the_learning_rate_of_the_moment_counts(reload: bool) -> None:
    """Loading an optimizer's state replaces its groups: the new ones' rate counts."""
    net, pruner = pair()
    optimizer = torch.optim.Adam(net.parameters(), lr=1.0)
    pruner.attach(optimizer)
    if reload:
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.25
    factors, expected = factors_of(pruner), values(net)
    zero_step(net, optimizer)
    for n, f in factors.items():
        expected[n] = expected[n] * (1 - 0.25 * f)
    assert_close(net, expected)


def test_a_maximising_optimizer_is_pushed_to_zero_too() -> None:
    """`maximize` is about the loss; the penalty pulls toward zero as weight decay does."""
    net, pruner = pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25, maximize=True)
    pruner.attach(optimizer)
    factors, expected = factors_of(pruner), values(net)
    zero_step(net, optimizer)
    for n, f in factors.items():
        expected[n] = expected[n] * (1 - 0.25 * f)
    assert_close(net, expected)


def test_a_schedule_of_ones_own_may_pick_without_changing_its_penalty() -> None:
    """Until the pick all groups carry the pruned λ; from the pick on the kept ones carry theirs."""
    net, pruner = pair(Constant(picks=3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    pruner.attach(optimizer)
    for i in range(5):
        factors = factors_of(pruner) if i >= 3 else {f"{n}.weight": torch.tensor(0.25).double() for n in RATIOS}
        expected = {n: w * (1 - 0.25 * factors.get(n, 0.0)) for n, w in values(net).items()}
        assert all(bool(mask.all()) for mask in pruner.masks().values()) == (i < 3)
        zero_step(net, optimizer)
        assert_close(net, expected)


# Beginning and end.


def test_detached_and_done_the_optimizer_is_its_old_self() -> None:
    net, pruner = pair(Constant(length=2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    pruner.attach(optimizer)
    for _ in range(2):
        zero_step(net, optimizer)
    assert pruner.done
    assert (pruner.step_count, pruner.phase) == (2, gp.Phase.DONE)
    before = values(net)
    zero_step(net, optimizer)
    assert_close(net, before)
    assert pruner.step_count == 2
    net, pruner = pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    pruner.attach(optimizer)
    with pytest.raises(gp.GrowpruneError, match="detach"):
        pruner.attach(optimizer)
    pruner.detach()
    before = values(net)
    zero_step(net, optimizer)
    assert_close(net, before)
    assert pruner.step_count == 0


def test_one_shot_has_picked_and_is_done_at_once() -> None:
    net, pruner = pair(gp.OneShot())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    pruner.attach(optimizer)
    before = values(net)
    zero_step(net, optimizer)
    assert_close(net, before)
    assert pruner.done
    assert [int(mask.sum()) for mask in pruner.masks().values()] == [3, 3]


@pytest.mark.parametrize("granularity", ["filter", "weight"])
@pytest.mark.parametrize("schedule", [GREG1, GREG2])
def test_the_network_may_move_after_the_pruner_is_made(schedule: Any, granularity: Any) -> None:
    """To a device without data, where any number read back is an error; only the pick of GReg-2 (step 55) reads."""
    net = seeded(MLP)
    pruner = gp.Pruner(net, X, schedule, ratios={"fc1": 0.5, "fc2": 0.5}, granularity=granularity)
    net.to("meta")
    fc1 = {"params": list(net.fc1.parameters()), "weight_decay": 1e-4}  # decay by parameter: a buffer more to move
    rest = {"params": [p for name, p in net.named_parameters() if not name.startswith("fc1.")], "weight_decay": DECAY}
    optimizer = torch.optim.SGD([fc1, rest], lr=LR, momentum=MOMENTUM)
    pruner.attach(optimizer)
    assert (pruner._factors.decay is not None) == (schedule is GREG2)
    x, y = (t.to("meta") for t in (X, Y))
    for _ in range(54 if schedule is GREG2 else pruner.total_steps):
        train_step(net, optimizer, x, y)
    assert pruner.done == (schedule is GREG1)
    assert {t.device.type for t in vars(pruner._factors).values() if isinstance(t, Tensor)} == {"meta"}


def test_a_parameter_that_the_optimizer_lacks_is_named() -> None:
    net, pruner = pair()
    with pytest.raises(gp.GrowpruneError, match=r"^'fc2\.weight' .*$"):
        pruner.attach(torch.optim.SGD(net.fc1.parameters(), lr=0.25))


@pytest.mark.parametrize("ratios", [0.0, {"fc1": 0.0}])
@pytest.mark.parametrize("name", ["SGD", "Adam", "LBFGS"])
def test_a_plan_that_prunes_nothing_trains_as_without_it(ratios: Any, name: str) -> None:
    results = []
    for pruned in (True, False):
        net = seeded(MLP)
        optimizer = make(name, net, lr=0.05)
        if pruned:
            schedule = gp.GReg1(delta_lambda=0.1, tau=0.5, ku=2, ks=2, stop_ratio=1000.0)
            with pytest.warns(UserWarning, match=r"nothing goes by ratios .*: 12 steps would push nothing"):
                pruner = gp.Pruner(net, X, schedule, ratios=ratios)
            pruner.attach(optimizer)

        def closure(net: nn.Module = net) -> Tensor:
            net.zero_grad()
            loss = F.cross_entropy(net(X), Y)
            loss.backward()
            return loss

        for _ in range(15):
            optimizer.step(closure)
        results.append(values(net))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


# Stopping and going on.


@pytest.mark.parametrize("stop", [20, 54, 55, 56, 140, 229])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(stop: int) -> None:
    """Stops in every phase of GREG2, at the pick (step 55) and on either side of it; the random pick comes back too."""
    results = []
    for interrupted in (False, True):
        net, pruner = pair(GREG2, criterion="random", seed=3)
        optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        pruner.attach(optimizer)
        for i in range(pruner.total_steps + 5):
            if interrupted and i == stop:
                saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), pruner.state_dict()))
                net, pruner = pair(GREG2, criterion="random", seed=3)
                optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
                pruner.attach(optimizer)
                for thing, state in zip((net, optimizer, pruner), saved, strict=True):
                    thing.load_state_dict(state)
            train_step(net, optimizer, *batch((8, 5), 3, seed=i))
        assert pruner.done
        results.append((values(net), pruner.masks()))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_state_of_another_plan_is_refused() -> None:
    _, pruner = pair(GREG1)
    state = pruner.state_dict()
    for other in (GREG2, replace(GREG1, ku=3), replace(GREG1, tau=0.25)):
        _, mine = pair(other)
        with pytest.raises(gp.GrowpruneError, match=r"another plan"):
            mine.load_state_dict(state)
        assert mine.schedule == other


def test_a_learning_rate_may_be_a_tensor_of_one() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor([1e-2]), weight_decay=0.0)
    pruner = gp.Pruner(model, torch.ones(1, 4), gp.GReg1(delta_lambda=0.5, ku=1, ks=0))
    pruner.attach(optimizer)
    before, goes = model[2].weight.detach().clone(), ~pruner.masks()["2"]
    (model(torch.ones(1, 4)).sum() * 0).backward()
    optimizer.step()
    torch.testing.assert_close(model[2].weight.detach()[goes], before[goes] * (1 - 1e-2 * 0.5))


def test_an_sgd_of_another_kind_is_tried_out() -> None:
    class Lars(torch.optim.SGD):
        """Normalises each gradient before the step."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad /= p.grad.norm() + 1e-12
            return super().step(closure)

    class Own(torch.optim.SGD):
        """Made of something else, so that it cannot be tried."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__(model.parameters(), lr=0.1)

    model = nn.Linear(2, 2)
    assert normalizes(Lars(model.parameters(), lr=0.1))
    assert not normalizes(Own(model))
    assert not normalizes(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_pruners_copy_can_be_detached() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    pruner = gp.Pruner(model, torch.ones(1, 4))
    pruner.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    copy.deepcopy(pruner).detach()
    pruner.detach()
