"""Criteria against hand computation on tiny networks; scoring leaves the model as it was."""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import growprune as gp
from growprune.criteria import KNOWN, Criterion, find, scores
from growprune.grouping import build
from nets import MLP, TwoConvs, batch, seeded

X, Y = batch((6, 5), 3)
BATCHES = [batch((6, 5), 3, seed=seed) for seed in (1, 2)]


def scored(
    net: nn.Module, criterion: Any, example: Tensor = X, granularity: Any = "filter", seed: int = 0, **options: Any
) -> dict[str, Tensor]:
    """The score of every unit by layer, the stem's included."""
    groups = build(net, example, granularity, stem=True, **options)
    every = scores(groups, net, example, find(criterion), torch.Generator().manual_seed(seed))
    return {layer.name: every[layer.start : layer.stop] for layer in groups.layers}


def assert_scores(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name].double(), expected[name].double(), rtol=rtol, atol=1e-9)


def by_filter(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums over each row of the two weights whose filters may go."""
    return {name: values[f"{name}.weight"].flatten(1).sum(1) for name in ("fc1", "fc2")}


# Magnitudes.


def test_l1_and_l2_by_hand() -> None:
    net = seeded(MLP)
    with torch.no_grad():
        net.fc2.weight.zero_()
        net.fc2.weight[0] = torch.tensor([3.0, -4.0, 0, 0, 0, 0, 0])
        net.fc2.weight[1] = torch.tensor([-1.0, 1, 1, 1, 1, 1, 1])
        net.fc2.weight[2, 6] = -6.0
    assert scored(net, "l1")["fc2"].tolist() == [7, 7, 6, 0, 0, 0]
    assert scored(net, "l2")["fc2"].tolist() == pytest.approx([5, 7**0.5, 6, 0, 0, 0])
    assert scored(net, "l1", granularity="weight")["fc2"].tolist() == net.fc2.weight.detach().abs().flatten().tolist()
    assert scored(net, "l2", granularity="weight")["fc2"].tolist() == net.fc2.weight.detach().abs().flatten().tolist()
    assert list(scored(net, "l1", granularity="weight")) == ["fc1", "fc2", "fc3"]
    # The bias is not a filter's magnitude, nor are the weights that read it.
    with torch.no_grad():
        net.fc2.bias.fill_(100.0)
        net.fc3.weight.fill_(100.0)
    assert scored(net, "l1")["fc2"].tolist() == [7, 7, 6, 0, 0, 0]


def test_l1_of_convolutions_and_the_least_go() -> None:
    net, example = seeded(TwoConvs), batch((2, 2, 6, 6), 3)[0]
    norms = {name: net.get_submodule(name).weight.detach().abs().sum((1, 2, 3)) for name in ("conv1", "conv2")}
    assert_scores(scored(net, "l1", example), norms)
    pruner = gp.Pruner(net, example, gp.OneShot(), criterion="l1", ratios="[0-1:0.5]")
    for name, count in (("conv1", 2), ("conv2", 3)):
        least = sorted(range(len(norms[name])), key=lambda i: float(norms[name][i]))[:count]
        assert [i for i, keep in enumerate(pruner.masks()[name]) if not keep] == sorted(least)


def test_tied_filters_are_scored_together() -> None:
    """Filters that a residual addition ties go as one: their weights are summed over all of them."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            out: Tensor = self.last(x + self.inner(x))
            return out

    net = seeded(Residual)
    found = scored(net, "l1", batch((2, 4), 2)[0], coupled=True)
    expected = sum(layer.weight.detach().abs().sum(1) for layer in (net.first, net.inner))
    assert_scores(found, {"first": expected})


# Taylor.


class Stream(nn.Module):
    """What seven layers are added into, then one as wide as all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more = nn.Linear(4, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.wide, self.last = nn.Linear(16, 96), nn.Linear(96, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.more:
            x = x + layer(x)
        out: Tensor = self.last(torch.relu(self.wide(x)))
        return out


def alike(net: nn.Module) -> nn.Module:
    """Every filter's weights sum up to one, but for a thousandth more from each to the next."""
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name.endswith("weight"):
                sums = 1 + torch.arange(len(weight)) / 1000
                weight.copy_((sums / weight.shape[1]).view(-1, 1).expand_as(weight))
    return net


def test_layers_tied_together_are_compared_by_the_filter() -> None:
    """Filter 0 of the stream sums seven filters, and goes as soon as filter 0 of the wide layer, that sums one."""
    net, x = alike(Stream()), torch.rand(2, 4)
    for ratio, each in ((4 / 112, 2), (16 / 112, 8), (32 / 112, 16)):
        masks = gp.Pruner(net, x, gp.OneShot(), ratios=gp.Global(ratio, at_most=1.0), coupled=True).masks()
        gone = {name: (~mask).nonzero().flatten().tolist() for name, mask in masks.items()}
        assert gone == {"first": list(range(min(each, 15))), "wide": list(range(each))}
    raw = scored(net, "l1", x, coupled=True)["first"]
    torch.testing.assert_close(raw, 7 * (1 + torch.arange(16) / 1000))  # within the layer, as it is


class Uneven(nn.Module):
    """Of a layer's eight filters five have one other tied to each, three have two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some, self.others = nn.Linear(4, 8), nn.Linear(8, 5), nn.Linear(8, 3)
        self.again, self.last = nn.Linear(3, 3), nn.Linear(11, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        others = self.others(first)
        both = first + torch.cat([self.some(first), others], 1)
        out: Tensor = self.last(torch.relu(torch.cat([both, others + self.again(torch.relu(others))], 1)))
        return out


def test_in_a_layer_to_which_others_are_tied_in_part_units_are_compared_by_the_filter() -> None:
    net, x = alike(Uneven()), torch.rand(2, 4)
    with torch.no_grad():
        net.get_submodule("first").weight[5:] *= 0.5
    found = scored(net, "l1", x, coupled=True)["first"]
    place = torch.arange(8) / 1000
    expected = [*((2 + 2 * place[:5]) / 2), *((0.5 * (1 + place[5:]) + 2 * (1 + place[:3])) / 3)]
    torch.testing.assert_close(found, torch.stack(expected))
    masks = gp.Pruner(net, x, gp.OneShot(), ratios={"first": 0.3}, coupled=True).masks()
    assert masks["first"].tolist() == [True] * 5 + [False] * 3
    roots = scored(net, "l2", x, coupled=True)["first"]  # grows otherwise, and is left as it is
    sums = [getattr(net, name).weight.detach().square().sum(1) for name in ("first", "some", "others", "again")]
    torch.testing.assert_close(roots, (sums[0] + torch.cat([sums[1], sums[2] + sums[3]])).sqrt())


def slopes(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The mean loss gradient in evaluation mode."""
    net = copy.deepcopy(net).eval()
    total = sum(F.cross_entropy(net(x), y) for x, y in batches) / len(batches)
    found = torch.autograd.grad(total, list(net.parameters()))
    return dict(zip((name for name, _ in net.named_parameters()), found, strict=True))


def test_taylor_by_hand() -> None:
    net = seeded(MLP)
    products = {n: p.detach() * slopes(net, BATCHES)[n] for n, p in net.named_parameters()}
    assert_scores(scored(net, gp.Taylor(BATCHES)), {n: v.abs() for n, v in by_filter(products).items()}, rtol=1e-5)
    single = scored(net, gp.Taylor(BATCHES), granularity="weight")
    assert_scores(single, {n: products[f"{n}.weight"].abs().flatten() for n in ("fc1", "fc2", "fc3")}, rtol=1e-5)


def test_data_is_seen_in_evaluation_mode() -> None:
    """Batch norm uses its running statistics, as the network does where it is used."""
    net = seeded(TwoConvs)
    batches = [batch((6, 2, 6, 6), 3, seed=seed) for seed in (1, 2)]
    for x, _ in batches:
        net(3 * x + 1)  # running statistics that differ from these batches' own
    own = slopes(net, batches)
    products = {n: net.get_submodule(n).weight.detach() * own[f"{n}.weight"] for n in ("conv1", "conv2")}
    expected = {n: v.sum((1, 2, 3)).abs() for n, v in products.items()}
    assert_scores(scored(net, gp.Taylor(batches), batches[0][0]), expected, rtol=1e-5)


def test_taylor_is_the_change_of_the_loss_to_first_order() -> None:
    """Scale a filter's weights by 1 − ε: the loss changes by ε times its score."""
    net = seeded(MLP)
    found = scored(net, gp.Taylor([(X, Y)]))["fc2"]
    for j in range(6):
        changed = copy.deepcopy(net)
        with torch.no_grad():
            changed.fc2.weight[j] *= 1 - 1e-6
        with torch.no_grad():
            difference = float(F.cross_entropy(changed(X), Y) - F.cross_entropy(net(X), Y))
        assert abs(difference) / 1e-6 == pytest.approx(float(found[j]), rel=1e-3, abs=1e-8)


def test_taylor_takes_another_loss() -> None:
    net = seeded(MLP)
    target = torch.ones(6, 3, dtype=torch.double)
    loss = F.mse_loss(net(X), target)
    found = torch.autograd.grad(loss, net.fc2.weight)[0] * net.fc2.weight.detach()
    criterion = gp.Taylor([(X, target)], loss=F.mse_loss)
    torch.testing.assert_close(scored(net, criterion)["fc2"].double(), found.sum(1).abs(), rtol=1e-5, atol=1e-9)


# OBD.


def gauss_newton(net: nn.Module, x: Tensor, y: Tensor, loss: Any) -> Tensor:
    """Σ Jᵀ·(the loss's Hessian in the outputs)·J in all parameters, one after another, whole and by autograd."""
    shapes = {name: p.shape for name, p in net.named_parameters()}

    def outputs(every: Tensor) -> Tensor:
        parts = torch.split(every, [shape.numel() for shape in shapes.values()])
        own = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        out: Tensor = torch.func.functional_call(net, own, (x,))
        return out

    start = torch.cat([p.detach().flatten() for p in net.parameters()])
    at = outputs(start).detach()
    jacobian = torch.autograd.functional.jacobian(outputs, start).flatten(0, -2)
    bend = torch.autograd.functional.hessian(lambda out: loss(out, y), at).reshape(at.numel(), at.numel())
    full: Tensor = jacobian.T @ bend @ jacobian
    return full


def half_and_half(out: Tensor, y: Tensor) -> Tensor:
    """Some other loss: logistic in the first output, square in the second, and a bit of their product."""
    target = y.to(out.dtype)
    first = F.binary_cross_entropy_with_logits(out[:, 0], target)
    return first + (out[:, 1] - target).square().mean() + 0.1 * (out[:, 0] * out[:, 1]).mean()


LOSSES = {
    "cross-entropy": F.cross_entropy,
    "cross-entropy of one's own": nn.CrossEntropyLoss(),
    "label smoothing": nn.CrossEntropyLoss(label_smoothing=0.2),
    "another": half_and_half,
}


@pytest.mark.parametrize("probes", [1, 400])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_obd_estimates_the_diagonal_of_the_gauss_newton_curvature(loss: Any, probes: int) -> None:
    """Without bias, never below zero, and with the spread of a square: at most √2 of the value for a probe."""
    net = seeded(lambda: MLP((3, 4, 3, 2)))
    batches = [batch((5, 3), 2, seed=seed) for seed in (1, 2, 3)]
    found = gp.OBD(batches, loss=loss, probes=probes).collect(net, batches[0][0])
    assert list(found) == [name for name, _ in net.named_parameters()]
    exact = torch.stack([gauss_newton(net, x, y, loss).diagonal() for x, y in batches])
    flat = torch.cat([t.flatten() for t in found.values()])
    assert bool((flat >= 0).all())
    sigma = (2 * exact.square().mean(0) / (len(batches) * probes)).sqrt()
    off = (flat - exact.mean(0)) / sigma.clamp(min=1e-12)
    assert float(off.abs().max()) < 5
    assert 0.3 < float(off.square().mean().sqrt()) < 1.5
    expected = by_filter({n: 0.5 * found[n] * p.detach() ** 2 for n, p in net.named_parameters()})
    assert_scores(scored(net, gp.OBD(batches, loss=loss, probes=probes), batches[0][0]), expected, rtol=1e-5)


class Pixels(nn.Module):
    """An answer a pixel, in a dict or as it is."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.first, self.last, self.named = nn.Conv2d(1, 3, 1), nn.Conv2d(3, 2, 1), named

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        out = self.last(hidden)
        return {"hidden": hidden, "out": out, "note": "not a tensor"} if self.named else out


def test_obd_of_pixels_some_of_which_do_not_count() -> None:
    """The way by softmax and the way by each sample's whole Hessian see the same, also what the loss passes over; what
    an output is besides that the loss does not read changes nothing."""
    x = batch((4, 1, 2, 2), 2)[0]
    y = torch.tensor([0, 1, -100, 1, -100, 0, 1, 1] * 2).reshape(4, 2, 2)
    plain, named = seeded(lambda: Pixels(False)), seeded(lambda: Pixels(True))
    exact = gauss_newton(plain, x, y, F.cross_entropy).diagonal()
    ways = {
        "softmax": gp.OBD([(x, y)], probes=4000).collect(plain, x),
        "eigenvectors": gp.OBD([(x, y)], loss=lambda out, y: F.cross_entropy(out["out"], y), probes=4000).collect(
            named, x
        ),
    }
    for found in ways.values():
        flat = torch.cat([t.flatten() for t in found.values()])
        torch.testing.assert_close(flat, exact, rtol=0.12, atol=1e-9)


def test_obd_with_targets_that_are_probabilities() -> None:
    """The curvature of cross-entropy does not know its target: shares of classes and a class give the same."""
    net, (x, y) = seeded(MLP), BATCHES[0]
    whole = F.one_hot(y, 3).to(x.dtype)
    assert_scores(scored(net, gp.OBD([(x, whole)])), scored(net, gp.OBD([(x, y)])), rtol=1e-6)


@pytest.mark.parametrize("loss", [F.l1_loss, lambda out, y: out.mean()], ids=["l1", "mean"])
def test_obd_refuses_a_loss_that_does_not_bend(loss: Any) -> None:
    """All scores would be zero, and what goes a matter of order."""
    x, _ = BATCHES[0]
    with pytest.raises(gp.GrowpruneError, match="does not curve"):
        gp.OBD([(x, torch.ones(len(x), 3).double())], loss=loss).collect(seeded(MLP), x)


@pytest.mark.parametrize("loss", [F.nll_loss, nn.NLLLoss()], ids=["function", "module"])
def test_obd_after_a_log_softmax_is_that_of_cross_entropy(loss: Any) -> None:
    net, (x, y) = seeded(MLP), BATCHES[0]
    logged = nn.Sequential(net, nn.LogSoftmax(1))
    found = gp.OBD([(x, y)], loss=loss).collect(logged, x)
    expected = gp.OBD([(x, y)]).collect(net, x)
    for name, value in expected.items():
        torch.testing.assert_close(found[f"0.{name}"], value, rtol=1e-9, atol=1e-15)


def test_obd_counts_no_class_that_the_loss_passes_over() -> None:
    """By the loss's own number; a batch of nothing else counts nothing."""
    net, (x, y) = seeded(MLP), BATCHES[0]
    seven = torch.cat([y, torch.full_like(y, 7)])
    found = gp.OBD([(torch.cat([x, 2 * x]), seven)], loss=nn.CrossEntropyLoss(ignore_index=7), probes=3000).collect(
        net, x
    )
    exact = gauss_newton(net, x, y, F.cross_entropy).diagonal()
    torch.testing.assert_close(torch.cat([t.flatten() for t in found.values()]), exact, rtol=0.15, atol=1e-9)
    half = gp.OBD([(x, y), (x, torch.full_like(y, -100))]).collect(net, x)
    whole = gp.OBD([(x, y)]).collect(net, x)
    torch.testing.assert_close(2 * half["fc2.weight"], whole["fc2.weight"])


class Two(nn.Module):
    """Two outputs, and one that counts; what is last in the second bends downwards."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        out = self.fc2(torch.tanh(self.fc1(x)))
        return {"a": out[:, :1], "b": out[:, 1:3], "c": out[:, 3:], "n": torch.arange(len(x))}


def test_obd_of_several_outputs_one_of_which_bends_downwards() -> None:
    net, x = seeded(Two).double(), batch((5, 3), 2)[0]

    def loss(out: Any, y: Any) -> Tensor:
        up: Tensor = (out["a"].square().sum(1) + out["b"].pow(4).sum(1) + out["a"][:, 0] * out["b"][:, 0]).mean()
        return up - (out["c"].square()).mean()

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            return torch.cat([out["a"], out["b"], out["c"]], 1)

    at = Joined()(x).detach()
    jacobian = torch.autograd.functional.jacobian(
        lambda *own: torch.func.functional_call(
            Joined(), dict(zip(dict(Joined().named_parameters()), own, strict=True)), (x,)
        ),
        tuple(net.parameters()),
    )
    flat = torch.cat([j.flatten(2) for j in jacobian], 2)
    exact = torch.zeros(flat.shape[2], dtype=torch.double)
    for i in range(len(x)):
        parts = lambda o: loss({"a": o[None, :1], "b": o[None, 1:3], "c": o[None, 3:]}, None) / len(x)  # noqa: E731
        values, vectors = torch.linalg.eigh(torch.autograd.functional.hessian(parts, at[i]))
        bend = vectors @ values.clamp(min=0).diag() @ vectors.T
        exact += (flat[i].T @ bend @ flat[i]).diagonal()
    found = gp.OBD([(x, x)], loss=loss, probes=4000).collect(net, x)
    torch.testing.assert_close(torch.cat([t.flatten() for t in found.values()]), exact, rtol=0.2, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_obd_in_half_precision_does_not_vanish(dtype: torch.dtype) -> None:
    """A network that is very sure: squares of its gradients are below what half precision holds."""
    net = seeded(MLP).float()
    with torch.no_grad():
        net.fc3.weight.mul_(6)
    x, y = BATCHES[0][0].float(), BATCHES[0][1]
    exact = gp.OBD([(x, y)], probes=20).collect(net, x)
    found = gp.OBD([(x.to(dtype), y)], probes=20).collect(copy.deepcopy(net).to(dtype), x.to(dtype))
    for name, value in found.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, exact[name], rtol=0.3, atol=float(exact[name].max()) * 0.05)
    for loss in (half_and_half, nn.CrossEntropyLoss(weight=torch.ones(3))):
        gp.OBD([(x.to(dtype), y)], loss=lambda o, y, loss=loss: loss(o.float(), y)).collect(net.to(dtype), x.to(dtype))


def test_obd_in_half_precision_counts_many_pixels() -> None:
    """More than the largest number of float16."""
    net, x = seeded(lambda: Pixels(False)).half(), torch.ones(1, 1, 300, 300).half()
    found = gp.OBD([(x, torch.zeros(1, 300, 300, dtype=torch.long))]).collect(net, x)
    assert all(float(h.max()) > 0 for h in found.values())


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 5000)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x)


class Odd(Wide):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(out=self.fc(x))


ONES = torch.ones(3, 2)
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "too wide": (Wide(), gp.OBD([(ONES, ONES)], loss=lambda o, y: o.square().mean()), "4,096 outputs a sample at most"),
    "no tensor": (Odd(), gp.OBD([(ONES, ONES)], loss=lambda o, y: o.out.mean()), "no tensor to differentiate"),
    "samples last": (
        nn.Linear(2, 4),
        gp.OBD([(ONES, ONES)], loss=lambda o, y: o[:, :4].T.softmax(1).square().mean()),
        "samples",
    ),
    "root of a mean": (
        nn.Linear(2, 4),
        gp.OBD([(ONES, ONES)], loss=lambda o, y: o[:, :4].square().mean().sqrt()),
        "touch",
    ),
    "lengths": (
        Two(),
        gp.OBD([(torch.ones(3, 3), 0)], loss=lambda o, y: o["a"].square().mean() * o["b"][0].square().mean()),
        "touch",
    ),
    "no batch": (
        nn.Sequential(nn.Linear(2, 3), nn.Flatten(0)),
        gp.OBD([(torch.ones(1, 2), torch.tensor([1]))]),
        "1 dimensions",
    ),
    "classes": (nn.Linear(2, 3), gp.OBD([(ONES, torch.tensor([0, 1, 255]))]), "classes from 0 to 2"),
    "shape": (nn.Linear(2, 3), gp.OBD([(ONES, torch.tensor([0, 1]))]), "classes from 0 to 2"),
    "none": (
        nn.Linear(2, 3),
        gp.OBD([(ONES, torch.tensor([0, 1, 2]))], loss=nn.CrossEntropyLoss(reduction="none")),
        "one number",
    ),
    "a number": (nn.Linear(2, 3), gp.OBD(3), "pairs, not int"),  # type: ignore[arg-type]
    "triples": (nn.Linear(2, 3), gp.OBD([(ONES, ONES, ONES)]), "pairs"),  # type: ignore[list-item]
    "no loss": (nn.Linear(2, 3), gp.Taylor([(ONES, torch.tensor([0, 1, 2]))], loss="mse"), "TypeError"),  # type: ignore[arg-type]
    "dict": (
        Two(),
        gp.OBD([(torch.ones(3, 3), torch.tensor([0, 1, 2]))]),
        "give loss=, a function of output and target",
    ),
    "dict, Taylor": (Two(), gp.Taylor([(torch.ones(3, 3), torch.tensor([0, 1, 2]))]), "; give loss="),
    "five into two": (
        nn.Linear(2, 3),
        gp.Taylor([(torch.ones(3, 5), torch.tensor([0, 1, 2]))]),
        "cannot be multiplied",
    ),
    "five into two, OBD": (
        nn.Linear(2, 3),
        gp.OBD([(torch.ones(3, 5), torch.tensor([0, 1, 2]))]),
        "cannot be multiplied",
    ),
    "dict, alone": (Two(), gp.Taylor(), "give batches and a loss"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:without batches")
def test_criteria_refuse_in_one_line(case: str) -> None:
    net, criterion, word = REFUSED[case]
    with pytest.raises(gp.GrowpruneError) as found:
        criterion.collect(net, torch.ones(2, 3) if case == "dict, alone" else ONES)
    assert word in str(found.value)
    assert "\n" not in str(found.value)
    assert ("give loss=" in str(found.value)) == ("give loss=" in word)


def test_obd_is_seeded_and_more_probes_are_other_probes() -> None:
    net = seeded(MLP)
    first, again, other = (scored(net, gp.OBD(BATCHES, seed=seed))["fc2"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert not torch.allclose(first, scored(net, gp.OBD(BATCHES, probes=2))["fc2"])


@pytest.mark.parametrize("criterion", [gp.Taylor(BATCHES[:1]), gp.OBD(BATCHES[:1])], ids=["taylor", "obd"])
def test_a_parameter_that_takes_no_part_is_no_obstacle(criterion: Any) -> None:
    """As an auxiliary head that only training uses; it comes last, so that the random probes before it are the same."""
    net = seeded(MLP)
    expected = scored(net, criterion)
    net.spare = nn.Linear(2, 2).double()
    assert_scores(scored(net, criterion), expected)


# Chance, and functions of one's own.


@pytest.mark.parametrize("name", KNOWN)
def test_what_adds_scores_two_like_filters_twice_as_high(name: str) -> None:
    """Which is compared with other scores by the filter, and no other."""
    criterion, one = find(name), torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    once, twice = (criterion.score(w, w, torch.Generator().manual_seed(0)) for w in (one, one.repeat(1, 2)))
    assert criterion.adds == torch.allclose(twice, 2 * once)


def test_random_is_seeded() -> None:
    net = seeded(MLP)

    def masks(seed: int) -> list[Tensor]:
        ratios = {"fc1": 0.5, "fc2": 0.5, "fc3": 0.5}
        pruner = gp.Pruner(net, X, gp.OneShot(), "random", ratios, "weight", seed=seed)
        return list(pruner.masks().values())

    def equal(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    torch.manual_seed(1)
    first = masks(0)
    torch.manual_seed(2)  # the global generator has no say in it
    assert equal(masks(0), first)
    assert not equal(masks(1), first)
    before = torch.get_rng_state()
    masks(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_favours_nobody() -> None:
    """Over 400 seeds each of 6 filters goes about as often; layers are drawn independently."""
    net = seeded(MLP)
    groups = build(net, X, "filter", stem=True)
    times, same = torch.zeros(6), 0
    for seed in range(400):
        every = scores(groups, net, X, find("random"), torch.Generator().manual_seed(seed))
        first, second = every[:6], every[7:13]
        times[torch.argsort(second)[:3]] += 1
        same += int(torch.argmin(first) == torch.argmin(second))
    assert bool(((times > 150) & (times < 250)).all()), times
    assert same < 150


def test_a_users_function_sees_one_row_a_unit() -> None:
    net = seeded(MLP)
    seen = []

    def largest(weight: Tensor) -> Tensor:
        seen.append(tuple(weight.shape))
        return weight.abs().amax(1)

    pruner = gp.Pruner(net, X, gp.OneShot(), criterion=largest, ratios={"fc1": 0.5, "fc2": 0.5})
    assert seen == [(7, 5), (6, 7)]
    peak = net.fc2.weight.detach().abs().amax(1)
    assert float(peak[~pruner.masks()["fc2"]].max()) < float(peak[pruner.masks()["fc2"]].min())


class Wrong(Criterion):
    """A criterion class that forgets to reduce its rows."""

    def score(self, weight: Tensor, extra: Tensor | None, generator: torch.Generator) -> Tensor:
        return weight.abs()


@pytest.mark.parametrize(
    ("criterion", "names"),
    [
        (lambda w: w.abs().sum(), ("(7,)", "()")),
        (lambda w: w.abs(), ("(7,)", "(7, 5)")),
        (lambda w: w.abs().sum(1, keepdim=True), ("(7,)", "(7, 1)")),
        (lambda w: [1.0] * len(w), ("(7,)", "list")),
        (lambda w: w.sum(1) * float("nan"), ("NaN",)),
        (Wrong(), ("(7,)", "(7, 5)")),
        ("l3", ("'l3'", "l1", "taylor")),
        ("tailor", ("'tailor'", "did you mean 'taylor'?")),
        (7, ("7",)),
        (gp.Taylor([]), ("empty",)),
        (gp.OBD([]), ("empty",)),
    ],
)
def test_bad_criteria_are_refused(criterion: Any, names: tuple[str, ...]) -> None:
    with pytest.raises(gp.GrowpruneError) as caught:
        gp.Pruner(seeded(MLP), X, gp.OneShot(), criterion=criterion, ratios={"fc1": 0.5, "fc2": 0.5})
    assert "\n" not in str(caught.value)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize("probes", [0, -1])
def test_obd_needs_a_probe(probes: int) -> None:
    with pytest.raises(gp.GrowpruneError, match="probes"):
        scored(seeded(MLP), gp.OBD(BATCHES, probes=probes))


# Side effects.


def everything(net: nn.Module) -> list[Tensor]:
    state = [t.clone() for t in net.state_dict().values()]
    return state + [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("granularity", ["filter", "weight"])
@pytest.mark.parametrize("name", ["l1", "l2", "random", "taylor", "obd", "in place"])
def test_scoring_leaves_the_model_as_it_was(name: str, granularity: str, training: bool) -> None:
    """Weights, gradients, batch-norm statistics, modes and flags; also if a user's function works in place."""
    net = seeded(TwoConvs).train(training)
    batches = [batch((4, 2, 6, 6), 3, seed=seed) for seed in (1, 2)]
    special = {"taylor": gp.Taylor(batches), "obd": gp.OBD(batches), "in place": lambda w: w.abs_().sum(1)}
    criterion: Any = special.get(name, name)
    F.cross_entropy(net(batches[0][0]), batches[0][1]).backward()
    net.bn1.weight.requires_grad_(False)
    net.bn2.eval()
    before, modes = everything(net), [m.training for m in net.modules()]
    example = batches[0][0].clone()
    gp.Pruner(net, example, gp.OneShot(), criterion=criterion, ratios="[0-1:0.5]", granularity=granularity)
    for old, new in zip(before, everything(net), strict=True):
        assert torch.equal(old, new)
    assert [m.training for m in net.modules()] == modes
    assert [n for n, p in net.named_parameters() if not p.requires_grad] == ["bn1.weight"]
    assert torch.equal(example, batches[0][0])


@pytest.mark.parametrize("name", ["taylor", "obd"])
def test_without_batches_there_is_a_warning_and_the_models_own_answer(name: str) -> None:
    net = seeded(MLP)
    with pytest.warns(UserWarning, match="batches"):
        found = scored(net, name)
    own = net(X).argmax(1)
    with_data = {"taylor": gp.Taylor([(X, own)]), "obd": gp.OBD([(X, own)])}[name]
    assert_scores(found, scored(net, with_data))


def test_batches_may_come_from_a_generator_and_be_tuples_of_arguments() -> None:
    net = seeded(MLP)

    def batches() -> Iterator[tuple[Any, Tensor]]:
        for x, y in BATCHES:
            yield (x,), y

    assert_scores(scored(net, gp.Taylor(batches())), scored(net, gp.Taylor(BATCHES)))


@pytest.mark.parametrize("criterion", [gp.Taylor(BATCHES), gp.OBD(BATCHES)], ids=["taylor", "obd"])
def test_greg2_picks_by_any_criterion_at_its_pick(criterion: Any) -> None:
    """The scores are those of the weights at the pick, not at the start."""
    net = seeded(MLP)
    schedule = gp.GReg2(delta_lambda=0.5, delta_lambda_pick=0.25, tau=2.0, tau_pick=0.5, ku=2, ks=2)
    pruner = gp.Pruner(net, X, schedule, criterion=criterion, ratios={"fc1": 0.5, "fc2": 0.5})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pruner.attach(optimizer)
    for _ in range(schedule.pick_step):
        optimizer.zero_grad()
        F.cross_entropy(net(X), Y).backward()
        optimizer.step()
    expected = scored(net, criterion)
    for name, mask in pruner.masks().items():
        assert float(expected[name][~mask].max()) <= float(expected[name][mask].min())


@pytest.mark.parametrize("criterion", ["l1", "l2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half, torch.double])
def test_scores_have_more_digits_than_half_precision_and_keep_those_of_double(
    criterion: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2)).to(dtype)
    with torch.no_grad():
        if dtype == torch.double:  # filters that only the tenth digit tells apart
            model[2].weight.copy_(torch.ones(256, 64).double() + torch.randperm(256)[:, None] * 1e-10)
        else:
            model[2].weight.mul_(1e-3)  # whose squares are nothing in half precision
    weight = model[2].weight.detach().double()
    norms = weight.abs().sum(1) if criterion == "l1" else weight.square().sum(1)
    pruner = gp.Pruner(model, torch.randn(2, 8).to(dtype), gp.OneShot(), criterion, ratios={"2": 0.5})
    kept = pruner.masks()["2"]
    assert float(norms[~kept].max()) <= float(norms[kept].min()) * (1 + (1e-6 if dtype != torch.double else 0))


def test_parameters_that_are_whole_numbers_have_no_gradient() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.index = nn.Parameter(torch.arange(4), requires_grad=False)
            self.a, self.b, self.o = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.o(F.relu(self.b(F.relu(self.a(x)))))[:, self.index]

    batches = [(torch.randn(4, 5), torch.randint(0, 4, (4,)))]
    for criterion in (gp.Taylor(batches), gp.OBD(batches)):
        assert int((~gp.Pruner(Chosen(), batches[0][0], gp.OneShot(), criterion).masks()["b"]).sum()) == 8


class Language(nn.Module):
    """Word vectors, read by a layer and tied to what another makes."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, sparse=sparse)
        self.inner, self.made, self.out = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        return self.out(h + self.made(F.relu(self.inner(h))))


def test_word_vectors_that_go_with_filters_are_scored_and_pushed_with_them() -> None:
    torch.manual_seed(0)
    model, x = Language(), torch.randint(0, 20, (4,))
    with torch.no_grad():
        model.words.weight[:, :4] = 0.01  # the least columns, beside the larger rows of the layer
        model.made.weight[:4] *= 1.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = gp.Pruner(model, x, gp.GReg1(delta_lambda=0.5, tau=1, ku=1, ks=30), ratios={"made": 0.5}, coupled=True)
    assert (~pruner.masks()["made"]).nonzero().flatten().tolist() == [0, 1, 2, 3]
    model.words.weight.data[:, :4] = 1.0
    pruner.attach(optimizer)
    while not pruner.done:
        model.zero_grad()
        (model(x).square().mean() * 1e-6).backward()
        optimizer.step()
    assert float(model.words.weight[:, :4].detach().abs().max()) < 0.1
    assert float(model.words.weight[:, 4:].detach().abs().mean()) > 0.5


def test_the_penalty_reaches_word_vectors_whose_gradient_is_sparse() -> None:
    torch.manual_seed(0)
    model, x = Language(sparse=True), torch.tensor([1, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = gp.Pruner(model, x, gp.GReg1(delta_lambda=0.5, tau=1, ku=1, ks=0), ratios={"made": 0.5}, coupled=True)
    pruner.attach(optimizer)
    before, goes = model.words.weight.detach().clone(), ~pruner.masks()["made"]
    model.zero_grad()
    (model(x).sum() * 0).backward()
    assert model.words.weight.grad.is_sparse
    optimizer.step()
    after = model.words.weight.detach()
    torch.testing.assert_close(after[:, goes], before[:, goes] * (1 - 0.1 * 0.5))
    assert torch.equal(after[:, ~goes], before[:, ~goes])


@pytest.mark.parametrize("scope", ["filter", "path"])
def test_word_vectors_that_do_not_train_go_with_their_filters_unpushed(scope: Any) -> None:
    torch.manual_seed(0)
    model, x = Language(), torch.randint(0, 20, (4,))
    model.words.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    schedule = gp.GReg1(delta_lambda=0.5, tau=1, ku=1, ks=30)
    pruner = gp.Pruner(model, x, schedule, ratios={"made": 0.5}, coupled=True, scope=scope)
    pruner.attach(optimizer)
    before = model.words.weight.detach().clone()
    while not pruner.done:
        model.zero_grad()
        (model(x).square().mean() * 1e-6).backward()
        optimizer.step()
    goes = ~pruner.masks()["made"]
    assert torch.equal(model.words.weight, before)
    assert float(model.made.weight[goes].detach().abs().max()) < 0.1
    with pytest.warns(UserWarning, match="what goes in 'made' is still"):  # the vectors are
        assert pruner.compact().words.embedding_dim == 4
