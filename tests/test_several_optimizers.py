"""A model that several optimizers train: the penalty reaches what each of them holds, and a step is counted once."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import growprune as gp
from nets import MLP, batch, seeded

X, Y = batch((8, 5), 3)
SCHEDULE = gp.GReg1(delta_lambda=0.1, tau=0.5, ku=2, ks=4)
RATIOS = {"fc1": 0.5, "fc2": 0.5}
Optimizers = list[torch.optim.Optimizer]


def apart(net: nn.Module) -> Optimizers:
    """Each layer by one of its own; they differ in weight decay."""
    return [
        torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9, weight_decay=decay)
        for layer, decay in zip(net.children(), (1e-3, 1e-2, 0.0), strict=True)
    ]


def together(net: nn.Module) -> Optimizers:
    groups = [
        {"params": list(layer.parameters()), "weight_decay": decay}
        for layer, decay in zip(net.children(), (1e-3, 1e-2, 0.0), strict=True)
    ]
    return [torch.optim.SGD(groups, lr=0.05, momentum=0.9)]


def backward(net: nn.Module) -> None:
    net.zero_grad()
    F.cross_entropy(net(X), Y).backward()


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("scope", ["filter", "path"])
@pytest.mark.parametrize(
    "schedule", [SCHEDULE, gp.GReg2(delta_lambda=0.1, delta_lambda_pick=0.1, tau=0.5, tau_pick=0.2, ku=2, ks=4)]
)
def test_three_do_what_one_does(schedule: Any, scope: Any) -> None:
    courses = []
    for way in (together, apart):
        net = seeded(MLP)
        pruner = gp.Pruner(net, X, schedule, ratios=RATIOS, scope=scope)
        optimizers, course = way(net), []
        pruner.attach(optimizers)
        while not pruner.done:
            backward(net)
            for each in optimizers:
                each.step()
            course.append((pruner.step_count, pruner.penalty(), values(net)))
        courses.append(course)
    assert len(courses[0]) == schedule.total_steps
    for one, three in zip(*courses, strict=True):
        assert one[:2] == three[:2]
        torch.testing.assert_close(one[2], three[2], rtol=0, atol=0)


def test_an_optimizer_left_out_now_and_then_holds_nothing_up() -> None:
    """The head's steps at every second turn only: a turn ends when another begins."""
    net = seeded(MLP)
    pruner = gp.Pruner(net, X, SCHEDULE, ratios=RATIOS)
    body, head = (torch.optim.SGD(ps, lr=0.05) for ps in ([*net.fc1.parameters(), *net.fc2.parameters()],
                                                        net.fc3.parameters()))  # fmt: skip
    pruner.attach([body, head])
    counts = []
    for turn in range(6):
        backward(net)
        body.step()
        if turn % 2:
            head.step()
        counts.append(pruner.step_count)
    assert counts == [0, 2, 2, 4, 4, 6]  # a turn without the head's step is counted when the next one begins


@pytest.mark.parametrize("order", ["attach first", "state first"])
def test_a_state_in_the_middle_of_a_turn_goes_on_there(order: str) -> None:
    """Of three, one is left out now and then."""
    counts: dict[bool, list[int]] = {True: [], False: []}
    for interrupted in (False, True):
        net = seeded(MLP)
        pruner, optimizers = gp.Pruner(net, X, SCHEDULE, ratios=RATIOS), apart(net)
        pruner.attach(optimizers)
        for turn in range(6):
            for number, each in enumerate(optimizers):
                if interrupted and (turn, number) == (3, 1):
                    state = pruner.state_dict()
                    pruner.detach()
                    pruner = gp.Pruner(net, X, SCHEDULE, ratios=RATIOS)
                    for what in (order, "attach" if order == "state first" else "state"):
                        if what.startswith("attach"):
                            pruner.attach(optimizers)
                        else:
                            pruner.load_state_dict(state)
                if turn % 3 or number != 2:
                    each.step()
            counts[interrupted].append(pruner.step_count)
    assert counts[True] == counts[False] == [0, 2, 3, 3, 5, 6]


def test_each_is_pushed_in_its_own_way() -> None:
    """AdamW's share is decoupled, SGD's stands in the gradient."""
    net = seeded(MLP)
    pruner = gp.Pruner(net, X, SCHEDULE, ratios=RATIOS)
    adam = torch.optim.AdamW(net.fc1.parameters(), lr=0.1, weight_decay=0.0)
    sgd = torch.optim.SGD([*net.fc2.parameters(), *net.fc3.parameters()], lr=0.1, momentum=0.9)
    pruner.attach([sgd, adam])
    before, goes = values(net), {name: ~mask for name, mask in pruner.masks().items()}
    for _ in range(2):
        net.zero_grad()
        (F.cross_entropy(net(X), Y) * 0).backward()
        adam.step()
        sgd.step()
    once = 1 - 0.1 * 0.1
    expected = {"fc1": once * once, "fc2": once * once - 0.1 * 0.9 * 0.1}  # SGD's second step has momentum
    for name, factor in expected.items():
        now, then = net.get_submodule(name).weight.detach(), before[f"{name}.weight"]
        torch.testing.assert_close(now[goes[name]], then[goes[name]] * factor)
        assert torch.equal(now[~goes[name]], then[~goes[name]])


def test_a_line_search_counts_the_penalty_of_its_own_share() -> None:
    net = seeded(MLP)
    pruner = gp.Pruner(net, X, SCHEDULE, ratios=RATIOS)
    searching = torch.optim.LBFGS(net.fc1.parameters(), lr=0.1)
    pruner.attach([searching, torch.optim.SGD([*net.fc2.parameters(), *net.fc3.parameters()], lr=0.1)])

    def closure() -> Tensor:
        backward(net)
        return F.cross_entropy(net(X), Y).detach()

    goes = ~pruner.masks()["fc1"]
    expected = F.cross_entropy(net(X), Y).detach() + 0.5 * 0.1 * net.fc1.weight.detach()[goes].square().sum()
    torch.testing.assert_close(searching.step(closure), expected)


def test_what_two_hold_the_first_pushes() -> None:
    net = seeded(MLP)
    pruner = gp.Pruner(net, X, SCHEDULE, ratios=RATIOS)
    first = torch.optim.SGD([*net.fc1.parameters(), *net.fc2.parameters()], lr=0.1)
    second = torch.optim.SGD(net.parameters(), lr=0.0)
    pruner.attach([first, second])
    before, goes = net.fc1.weight.detach().clone(), ~pruner.masks()["fc1"]
    net.zero_grad()
    (F.cross_entropy(net(X), Y) * 0).backward()
    first.step()
    second.step()
    torch.testing.assert_close(net.fc1.weight.detach()[goes], before[goes] * (1 - 0.1 * 0.1))


def test_detached_all_are_their_old_selves() -> None:
    net = seeded(MLP)
    pruner = gp.Pruner(net, X, SCHEDULE, ratios=RATIOS)
    optimizers = apart(net)
    pruner.attach(iter(optimizers))
    backward(net)
    optimizers[0].step()
    pruner.detach()
    pruner.attach(optimizers)  # the turn that was begun is forgotten
    for each in optimizers:
        each.step()
    assert pruner.step_count == 1
    pruner.detach()
    before = values(net)
    net.zero_grad()
    for each in optimizers:
        each.state.clear()
        for group in each.param_groups:
            group["weight_decay"] = 0.0
        each.step()
    torch.testing.assert_close(values(net), before, rtol=0, atol=0)
    assert pruner.step_count == 1


def test_what_cannot_be_attached_is_told() -> None:
    net = seeded(MLP)
    pruner = gp.Pruner(net, X, SCHEDULE, ratios=RATIOS)
    with pytest.raises(
        gp.GrowpruneError, match="attach: give a torch optimizer, or several in a list; this one is empty"
    ):
        pruner.attach([])
    with pytest.raises(gp.GrowpruneError, match="attach: need a torch optimizer, not str"):
        pruner.attach(["SGD"])  # type: ignore[list-item]
    one, two, three = apart(net)
    with pytest.raises(gp.GrowpruneError, match=r"'fc2\.weight' is in no parameter group of these optimizers"):
        pruner.attach([one, three])
    with pytest.raises(gp.GrowpruneError, match=r"'fc1\.weight' is in no parameter group of this optimizer, .* a list"):
        pruner.attach(two)
    pruner.attach([one, two, two])
    for each in (two, one):
        each.step()
    assert pruner.step_count == 1


def test_all_that_were_attached_are_told_when_they_are_left_behind() -> None:
    net = seeded(MLP)
    optimizers = apart(net)
    pruner = gp.Pruner(net, X, gp.GReg1(delta_lambda=0.5, tau=0.5, ku=1, ks=0), ratios=RATIOS)
    pruner.attach(optimizers)
    for _ in range(pruner.total_steps):
        backward(net)
        for each in optimizers:
            each.step()
    with pytest.warns(UserWarning, match="as large as"):
        small = pruner.compact()
    backward(small)
    for each in optimizers:
        with pytest.warns(UserWarning, match=r"of before compact\(\)"):
            each.step()


# -- after removal -------------------------------------------------------------------------------------------------


def head(*, vectors: bool) -> nn.Module:
    """The layer that reads what goes has no bias; where there are `vectors`, others have."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=vectors), nn.Softplus(), nn.Linear(8, 8, bias=vectors), nn.Softplus(),
                        nn.Linear(8, 4, bias=False), nn.Softplus(), nn.Linear(4, 2, bias=vectors))  # fmt: skip
    return net


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")


@needs_muon
def test_a_bias_that_folding_gives_joins_the_vectors_whoever_trains_them() -> None:
    net, x = head(vectors=True), torch.randn(4, 6)
    matrices = torch.optim.Muon([p for p in net.parameters() if p.dim() == 2], lr=0.01)
    vectors = torch.optim.AdamW([p for p in net.parameters() if p.dim() == 1], lr=0.01)
    small = gp.Pruner(net, x, gp.OneShot(), ratios={"2": 0.5}).compact(optimizer=[matrices, vectors])
    assert vectors.param_groups[0]["params"] == [small[0].bias, small[2].bias, small[4].bias, small[6].bias]
    before = small[4].bias.detach().clone()
    small(x).square().sum().backward()
    for each in (matrices, vectors):
        each.step()
    assert not torch.equal(small[4].bias, before)


@needs_muon
def test_where_nothing_trains_vectors_it_is_told() -> None:
    net, x = head(vectors=False), torch.randn(4, 6)
    matrices = torch.optim.Muon(net.parameters(), lr=0.01)
    with pytest.warns(UserWarning, match=r"none of the optimizers given holds '4\.bias'"):
        small = gp.Pruner(net, x, gp.OneShot(), ratios={"2": 0.5}).compact(optimizer=matrices)
    small(x).square().sum().backward()
    matrices.step()


def test_a_layer_that_does_not_train_gets_a_bias_that_does_not_either() -> None:
    net, x = head(vectors=True), torch.randn(4, 6)
    net[4].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    small = gp.Pruner(net, x, gp.OneShot(), ratios={"2": 0.5}).compact(optimizer=optimizer)  # and no warning
    assert small[4].bias is not None
    assert not small[4].bias.requires_grad


def test_none_of_several_is_changed_if_one_cannot_go_on() -> None:
    net, x = head(vectors=True), torch.randn(4, 6)
    one, other = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    pruner = gp.Pruner(net, x, gp.OneShot(), ratios={"2": 0.5})
    with pytest.raises(gp.GrowpruneError, match="holds no parameter of the model"):
        pruner.compact(optimizer=[one, other])
    assert one.param_groups[0]["params"] == list(net.parameters())
    small = pruner.compact(optimizer=[one, one])
    assert one.param_groups[0]["params"] == list(small.parameters())


def test_a_wrapped_optimizer_goes_on_too() -> None:
    """As accelerate's, which hands the real one's groups on and steps it within its own step."""

    class Wrapped(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults

        def step(self, closure: Any = None) -> Any:
            return self.optimizer.step(closure)

    net, x = head(vectors=True), torch.randn(4, 6)
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(x).sum().backward()
    inner.step()
    small = gp.Pruner(net, x, gp.OneShot(), ratios={"2": 0.5}).compact(optimizer=Wrapped(inner))
    assert inner.param_groups[0]["params"] == list(small.parameters())
    assert inner.state[small[2].weight]["momentum_buffer"].shape == (4, 8)


# -- numbers of numpy's ----------------------------------------------------------------------------------------------


def test_numpys_numbers_are_numbers() -> None:
    net = seeded(MLP)
    for given, plain in (
        (np.float32(0.5), 0.5),
        ({"fc2": np.float64(0.5)}, {"fc2": 0.5}),
        (gp.Global(np.float32(0.5)), gp.Global(0.5)),
        (gp.Global(np.int64(0)), gp.Global(0)),
    ):
        ours, theirs = (gp.Pruner(net, X, gp.OneShot(), ratios=each, seed=np.int64(3)) for each in (given, plain))
        assert {k: m.tolist() for k, m in ours.masks().items()} == {k: m.tolist() for k, m in theirs.masks().items()}
        assert ours.state_dict()["plan"] == theirs.state_dict()["plan"]
    spec = gp.Global(np.float32(0.5))
    gp.Pruner(net, X, gp.OneShot(), ratios=spec)
    assert type(spec.ratio) is np.float32  # the caller's is left as it is
    schedule = gp.GReg1(ku=np.int64(3), tau=np.float32(1), ks=np.int8(7), stop_ratio=np.float32(8))
    assert schedule == gp.GReg1(ku=3, tau=1.0, ks=7, stop_ratio=8.0)
    assert {type(value) for value in vars(schedule).values()} == {str, float, int}
    assert gp.latency(net, X, repeats=np.int64(1), warmup=np.int64(0)) > 0
    for wrong in (True, np.float32(2), math.nan):
        with pytest.raises(gp.GrowpruneError, match="repeats must be a whole number"):
            gp.latency(net, X, repeats=wrong)  # type: ignore[arg-type]
    with pytest.raises(gp.GrowpruneError, match=r"a speed-up must be a number, 1 or more, not 0\.5"):
        gp.Pruner(net, X, ratios=gp.Speedup(np.float32(0.5)))
