"""Bad input: one line that names the thing, and nothing changed. Wrapped models: taken out, or refused by name."""

import copy
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import growprune as gp
from growprune.running import unsound


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3, padding=1)
        self.conv3 = nn.Conv2d(6, 4, 3, padding=1)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(x + self.conv3(F.relu(self.conv2(x))))
        return self.fc(x.mean((2, 3)))


X = torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(0))


def refused(*words: str, model: nn.Module | None = None, example: Any = X, **arguments: Any) -> str:
    """The Pruner refuses: one line, each word in it, and the model as it was."""
    model = Net() if model is None else model
    before = snapshot(model)
    message = error(lambda: gp.Pruner(model, example, **arguments), *words)
    assert_untouched(model, before)
    return message


def error(call: Callable[[], Any], *words: str) -> str:
    with pytest.raises(gp.GrowpruneError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message, message
    assert 10 < len(message) < 400, message
    for word in words:
        assert word in message, message
    return message


def snapshot(model: nn.Module) -> Any:
    values = {k: None if torch.nn.parameter.is_lazy(v) or v.is_meta else v.clone() for k, v in tensors(model)}
    return values, [m.training for m in model.modules()], [len(m._forward_hooks) for m in model.modules()]


def tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def assert_untouched(model: nn.Module, before: Any) -> None:
    values, modes, hooks = before
    assert [name for name, _ in tensors(model)] == list(values)
    for name, t in tensors(model):
        if values[name] is not None:
            assert torch.equal(t.nan_to_num(7.0), values[name].nan_to_num(7.0)), name
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_hooks) for m in model.modules()] == hooks


def test_the_network_here_is_fit_for_pruning() -> None:
    """So that what is refused below is refused for what is wrong with it."""
    assert list(gp.Pruner(Net(), X).masks()) == ["conv2"]


# -- ratios ------------------------------------------------------------------------------------------------------------


def test_a_named_layer_that_cannot_go_alone_says_why() -> None:
    refused("'conv3'", "the option coupled", ratios={"conv3": 0.5})
    refused("'fc'", "it makes what the model returns", ratios={"fc": 0.5})
    refused("'1.0.0'", "it is ignored", model=backbone(2), ratios={"1.0.0": 0.5}, ignore=["1.0.0"])
    refused("'conv3'", "go with those of 'conv1':", ratios={"conv3": 0.5}, coupled=True)
    for joined_first, names in ((True, "'a' and 'b'"), (False, "'c'")):
        model, why = Joined(joined_first), f"go with those of {names}:"
        refused(why, model=model, ratios={"c" if joined_first else "b": 0.5}, coupled=True)
    refused("the weight of '1' is that of '0'", model=Twice(), ratios={"1": 0.5})
    refused("'norm1' (BatchNorm2d)", "convolutions and linear layers do", ratios={"norm1": 0.5})
    refused("'1' (Sequential)", "name those inside it, as '1.0.0', '1.0.2'", model=backbone(2), ratios={"1": 0.5})


def test_what_is_no_choice() -> None:
    refused("coupled is True or False, not 'yes'", coupled="yes")
    for seed in ("a", 1.5, -1, True, None):
        refused("seed", repr(seed), seed=seed)
    error(lambda: gp.speedup(Net(), Net()), "measure(model, example)", "Net")


class Joined(nn.Module):
    """One layer's channels are added to those of two others, side by side; either comes first."""

    def __init__(self, joined_first: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 1)
        self.a, self.b, self.c = (nn.Conv2d(4, width, 1) for width in (4, 4, 8))
        self.last, self.joined_first = nn.Conv2d(8, 2, 1), joined_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.joined_first:
            x = torch.cat([self.a(x), self.b(x)], 1) + self.c(x)
        else:
            whole = self.c(x)
            x = whole + torch.cat([self.a(x), self.b(x)], 1)
        out: Tensor = self.last(x)
        return out


class Twice(nn.Sequential):
    """Two layers, one weight."""

    def __init__(self) -> None:
        super().__init__(*(nn.Conv2d(2, 2, 1) for _ in range(3)))
        self[1].weight = self[0].weight


@pytest.mark.parametrize("ratios", [0.999, {"conv2": 0.9999}, gp.Global(0.99)])
@pytest.mark.parametrize("granularity", ["filter", "weight"])
def test_a_ratio_that_would_empty_a_layer_leaves_one(ratios: Any, granularity: str) -> None:
    pruner = gp.Pruner(Net(), X, schedule=gp.OneShot(), ratios=ratios, granularity=granularity)
    assert all(int(mask.sum()) >= 1 for mask in pruner.masks().values())
    assert int(pruner.masks()["conv2"].sum()) == 1 or isinstance(ratios, gp.Global)
    assert torch.isfinite(pruner.compact()(X)).all()


# -- choices -----------------------------------------------------------------------------------------------------------


def test_unknown_choices_name_what_there_is() -> None:
    refused("granularity", "'filters'", "weight", granularity="filters")
    refused("scope", "'all'", "path", scope="all")
    refused("schedule", "GReg1()", schedule="greg1")
    refused("schedule", "GReg1", schedule=gp.GReg1)
    refused("path", granularity="weight", scope="path")


def test_a_criterion_that_gives_no_score_a_row() -> None:
    refused("criterion", "(6,)", criterion=lambda weight: weight)
    refused("criterion", "float", criterion=lambda weight: 1.0)


def test_ignoring_what_is_not_there() -> None:
    refused("ignore", "'conv22'", "did you mean 'conv2'", ignore=["conv22"])
    refused("ignore", "Conv2d", ignore=[nn.Conv2d(1, 1, 1)])
    refused("ignore", ignore=[3])
    refused("ignore", ignore=3)


def test_one_name_need_not_be_in_a_list() -> None:
    model = Net()
    for ignore in ("conv2", model.conv2):
        error(lambda ignore=ignore: gp.Pruner(model, X, ignore=ignore), "no layer of this model can be pruned")


# -- the model and its example -----------------------------------------------------------------------------------------


def test_an_example_the_model_fails_on() -> None:
    for example in (torch.randn(2, 3, 6, 6), X.double(), None, (X, X), {"y": X}, "x", torch.randn(2, 7)):
        refused("example", example=example)


class Shouting(Net):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("first line\nsecond line\n" + "z" * 1000)


def test_a_long_error_of_the_models_own_is_cut_to_a_line() -> None:
    message = refused("example", "ValueError", "first line", model=Shouting())
    assert "second line" not in message


def test_an_interruption_is_not_taken_for_a_failing_model() -> None:
    class Interrupted(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gp.Pruner(Interrupted(), X)


def test_filters_of_a_network_whose_single_weights_were_pruned() -> None:
    """It is said why, and what to do; the other way round both can be had."""
    model, other = (nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1)) for _ in range(2))
    x = torch.zeros(1, 2, 8, 8)
    sparse = gp.Pruner(other, x, gp.OneShot(), granularity="weight").compact()
    error(lambda: gp.Pruner(sparse, x, gp.OneShot()), "single weights of '0' were, and are held at zero; prune filters")
    small = gp.Pruner(model, x, gp.OneShot(), ratios={"0": 0.5}).compact()
    both = gp.Pruner(small, x, gp.OneShot(), granularity="weight").compact()
    assert gp.measure(both, x).macs < gp.measure(model, x).macs


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(value: float) -> None:
    model = Net()
    with torch.no_grad():
        model.conv2.weight[1, 2, 0, 0] = value
    refused("'conv2.weight'", "NaN", model=model)
    model = Net()
    model.norm1.running_var[0] = value
    refused("'norm1.running_var'", model=model)


@pytest.mark.parametrize("kind", [torch.float, torch.double, torch.half, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_number_is_found_wherever_it_is(value: float, kind: torch.dtype) -> None:
    model = nn.Linear(37, 5, bias=False, dtype=kind)
    model.register_buffer("none", torch.zeros(0))  # that has no least number
    with torch.no_grad():
        model.weight.sign_().mul_(torch.finfo(kind).max)  # as large as can be, and sound
        assert unsound(model) is None
        for place in range(model.weight.numel()):
            good = model.weight.view(-1)[place].clone()
            model.weight.view(-1)[place] = value
            assert unsound(model) == "weight"
            model.weight.view(-1)[place] = good


class Masked(nn.Module):
    """Attention that looks back only, by a mask in a buffer, of minus infinities as everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.qkv, self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 12), nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.stem(x)).view(-1, 5, 3, 4).unbind(2)
        seen = (q @ k.transpose(1, 2) + self.mask).softmax(-1) @ v
        return self.down(torch.relu(self.up(seen)))  # type: ignore[no-any-return]


def test_a_mask_may_be_infinite_but_not_nan() -> None:
    model, x = Masked(), torch.randn(2, 5, 3)
    small = gp.Pruner(model, x, gp.OneShot(), ratios={"up": 0.5}).compact()
    assert small.up.out_features == 4
    assert torch.equal(small.mask, model.mask)
    model.mask[0, 0] = torch.nan
    refused("'mask'", "NaN", model=model, example=x)


def test_weights_that_became_no_numbers_in_training() -> None:
    model = Net()
    pruner = gp.Pruner(model, X, schedule=gp.OneShot())
    with torch.no_grad():
        model.fc.bias[0] = torch.nan
    error(pruner.compact, "'fc.bias'", "NaN")


def test_models_with_nothing_to_prune() -> None:
    refused("no parameters", model=nn.ReLU())
    refused("no convolution or linear layer", model=nn.BatchNorm2d(2))
    refused("no layer of this model can be pruned", model=nn.Sequential(nn.Conv2d(2, 3, 1)))
    refused("no layer of this model can be pruned", ignore=["conv2"])


def test_what_is_no_model() -> None:
    for model in (None, "resnet56", Net, lambda x: x):
        error(lambda model=model: gp.Pruner(model, X), "Module")


def test_a_model_that_cannot_be_copied() -> None:
    model = Net()
    model.lock = open(__file__)  # noqa: SIM115 (an open file is what cannot be copied)
    try:
        refused("copied", model=model)
    finally:
        model.lock.close()


def test_what_cannot_be_copied_is_named() -> None:
    model = Net()
    model.norm1.lock = threading.Lock()
    refused("for 'norm1.lock': TypeError", "lock", "take that off the model", model=model)
    del model.norm1.lock
    model.every = {"locks": [threading.Lock()]}
    refused("its attribute 'every'", model=model)


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_a_parameter_in_no_optimizer() -> None:
    model = Net()
    pruner = gp.Pruner(model, X)
    before = copy.deepcopy(pruner.state_dict())
    optimizer = torch.optim.SGD([model.fc.weight], lr=0.1)
    error(lambda: pruner.attach(optimizer), "'conv2.weight'", "or name 'conv2' in the option ignore")
    assert str(pruner.state_dict()) == str(before)
    optimizer.step()
    assert pruner.step_count == 0
    assert not optimizer._optimizer_step_pre_hooks
    pruner.attach(torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_optimizer_of_another_model() -> None:
    """As where a framework trains a copy: to add the parameter, or to ignore the layer, would be no way out."""
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    message = error(lambda: gp.Pruner(Net(), X).attach(optimizer), "'conv2.weight'", "any other parameter", "copy")
    assert "ignore" not in message


def test_what_is_no_optimizer() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for wrong in (None, "sgd", scheduler, model):
        error(lambda wrong=wrong: gp.Pruner(model, X).attach(wrong), "optimizer")
    Optimizer = type("Optimizer", (), {"__module__": "elsewhere"})  # noqa: N806
    error(lambda: gp.Pruner(model, X).attach(Optimizer()), "not elsewhere.Optimizer")


def test_removing_with_an_optimizer_of_another_model_is_refused() -> None:
    """It would train nothing of the small network, and nobody would notice."""
    model, other = Net(), torch.optim.SGD(Net().parameters(), lr=0.1)
    pruner = gp.Pruner(model, X, schedule=gp.OneShot())
    before = [id(p) for p in other.param_groups[0]["params"]]
    error(lambda: pruner.compact(optimizer=other), "optimizer")
    assert [id(p) for p in other.param_groups[0]["params"]] == before


def test_two_pruners_on_one_optimizer() -> None:
    """As when a notebook's cell is run again: the penalty would act twice. Of different layers they may share it."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = gp.Pruner(model, X, ratios={"conv2": 0.5})
    first.attach(optimizer)
    error(lambda: gp.Pruner(model, X).attach(optimizer), "another pruner", "'conv2.weight'", "detach()")
    gp.Pruner(model, X, schedule=gp.OneShot()).attach(optimizer)
    gp.Pruner(model, X, ratios={"conv3": 0.5}, granularity="weight").attach(optimizer)
    first.detach()
    gp.Pruner(model, X, ratios={"conv2": 0.5}).attach(optimizer)


@pytest.mark.parametrize(
    ("rate", "scope", "told"),
    [
        (1e-4, "filter", ["[6-9].% as large .* pushes further, scope path too where there is batch norm$"]),
        (0.175, "filter", ["11% as large"]),
        (0.15, "path", ["1.% as large as what stays: .* a longer schedule pushes further$"]),
        (0.2, "filter", []),
        (1.0, "filter", []),
    ],
)
def test_a_push_that_did_not_push_is_told(rate: float, scope: Any, told: list[str]) -> None:
    """The schedule is over, but with so small a learning rate nothing has moved, or not far enough. Pushed far: nothing
    to say."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    pruner = gp.Pruner(model, X, gp.GReg1(delta_lambda=0.1, ku=1, ks=5), ratios={"conv2": 0.5}, scope=scope)
    pruner.attach(optimizer)
    while not pruner.done:
        model.zero_grad()
        (model(X).sum() * 0).backward()
        optimizer.step()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        pruner.compact()
    assert len(heard) == len(told)
    assert all(re.search(f"'conv2' is still {text}", str(each.message)) for each, text in zip(heard, told, strict=True))


def test_an_optimizer_that_runs_no_hooks() -> None:
    """The loop would never end: no step is counted, nothing is pushed."""

    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

        def step(self, closure: Any = None) -> None:
            self.inner.step(closure)

    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    error(lambda: gp.Pruner(model, X).attach(Around(inner)), "Around", "no hooks", "wraps")
    pruner = gp.Pruner(model, X)
    pruner.attach(inner)
    torch.optim.lr_scheduler.StepLR(inner, 1)  # which wraps step() itself
    Around(inner).step()
    assert pruner.step_count == 1


def test_wrapped_optimizers_are_looked_through() -> None:
    """As accelerate's and Lightning's: they hold the optimizer as `.optimizer`, and step it."""

    class Around(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)
        state = property(lambda self: self.optimizer.state)

        def step(self, closure: Any = None) -> None:
            self.optimizer.step(closure)

    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.1)
    outer = Around(Around(inner))
    pruner = gp.Pruner(model, X, schedule=gp.GReg1(delta_lambda=0.1, ku=1, ks=5), ratios={"conv2": 0.5})
    pruner.attach(outer)
    before = model.conv2.weight.norm().item()
    while not pruner.done:
        model.zero_grad()
        (model(X).sum() * 0).backward()
        outer.step()
    assert model.conv2.weight.norm() < before
    small = pruner.compact(optimizer=outer)
    assert {id(p) for p in inner.param_groups[0]["params"]} == {id(p) for p in small.parameters()}
    outer.step()  # and it is not left behind


def steps(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[str]:
    """Step one after the other; what was warned of."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for optimizer in optimizers:
            model.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
    return [f"{each.message} {each.filename}" for each in heard]


def test_training_with_another_optimizer_is_told() -> None:
    """As when a framework makes its optimizer anew: nothing would be pushed, and nothing said until `compact`."""
    model, other = Net(), Net()
    mine, new, heads = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, model, model.fc))
    pruner = gp.Pruner(model, X)
    pruner.attach(mine)
    assert not steps(model, heads, heads, torch.optim.SGD(other.parameters(), lr=0.01), heads), "not what is pushed"
    assert not steps(model, new, mine, new, mine), "in turns, or one within the other"
    (told,) = steps(model, new, new, new, new)
    for word in ("'conv2.weight'", "SGD", "detach()", __file__):
        assert word in told
    pruner.detach()
    pruner.attach(mine)
    torch.optim.lr_scheduler.StepLR(new, 1)  # which wraps step() itself
    assert __file__ in steps(model, new, new, new)[0]
    assert not steps(model, mine, new, new), "once"
    pruner.detach()
    pruner.attach(new)
    assert len(steps(model, mine, mine)) == 1, "attached anew, it is told anew"


def test_training_with_another_optimizer_may_be_meant() -> None:
    """Nothing is said where another pruner pushes, nor when there is nothing to push any more."""
    model = Net()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(2))
    old, new = (gp.Pruner(model, X, schedule=gp.GReg1(delta_lambda=0.5, ku=1, ks=0)) for _ in range(2))
    old.attach(first)
    new.attach(second)
    assert not steps(model, *[second] * new.total_steps)
    assert new.done
    new.detach()
    assert len(steps(model, second, second)) == 1
    steps(model, *[first] * old.total_steps)
    assert old.done
    assert not steps(model, second, second)
    third = gp.Pruner(model, X, schedule=gp.GReg1(delta_lambda=0.5, ku=1, ks=0))
    third.attach(first)
    steps(model, *[first] * third.total_steps)
    assert third.done
    assert not steps(model, second, second), "never told before"


def test_an_optimizer_that_pushes_something_else_is_told() -> None:
    """A pruner of other parameters, or one that is done, carries nothing of this one's."""
    model, other = Net(), Net()
    mine, both = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, other))
    both.add_param_group({"params": model.parameters()})
    pruner, theirs = (gp.Pruner(each, X, schedule=gp.GReg1(delta_lambda=0.5, ku=1, ks=0)) for each in (model, other))
    pruner.attach(mine)
    theirs.attach(both)
    assert len(steps(model, both, both)) == 1
    assert theirs.done == (theirs.total_steps <= 2)


def test_a_compiled_step_of_another_optimizer_is_told() -> None:
    model = Net()
    mine, other = (torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(2))
    pruner = gp.Pruner(model, X)
    pruner.attach(mine)
    step = torch.compile(other.step, backend="eager")
    model(X).square().mean().backward()
    step()
    with pytest.warns(UserWarning, match="these steps push nothing"):
        step()


@pytest.mark.parametrize(("past", "told"), [(2, 0), (3, 1)])
def test_training_on_after_the_push_is_told(past: int, told: int) -> None:
    """Nothing holds down any more what goes: where batch norm hides its size from the loss, it grows again."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pruner = gp.Pruner(model, X, schedule=gp.GReg1(delta_lambda=0.1, ku=1, ks=10), ratios={"conv2": 0.5})
    pruner.attach(optimizer)
    for _ in range(pruner.total_steps + past):
        model.zero_grad()
        (model(X).sum() * 0).backward()
        optimizer.step()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        pruner.compact()
    assert [f"{past} steps were made since" in str(each.message) for each in heard] == [True] * told
    size = pruner.separation()["conv2"]
    share = f"in 'conv2' what goes is {float(size.pruned / size.kept):.1%} as large"
    assert all(share in str(each.message) for each in heard), "and how large it is"


def test_what_was_hardly_pushed_is_told_however_late_and_after_going_on() -> None:
    """Steps past the end do not hide it, and a state knows of them."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    plan: dict[str, Any] = {"schedule": gp.GReg1(delta_lambda=0.1, ku=1, ks=10), "ratios": {"conv2": 0.5}}
    pruner = gp.Pruner(model, X, **plan)
    pruner.attach(optimizer)
    for _ in range(pruner.total_steps + 5):
        model.zero_grad()
        (model(X).sum() * 0).backward()
        optimizer.step()
    again = gp.Pruner(model, X, **plan)
    again.load_state_dict(pruner.state_dict())
    for each in (pruner, again):
        with pytest.warns(UserWarning, match="5 steps were made since.*a larger learning rate or a longer schedule"):
            each.compact()
    old = pruner.state_dict()
    del old["past"]
    again.load_state_dict(old)  # of before it was kept
    with pytest.warns(UserWarning, match="as large as what stays: removal may cost"):
        again.compact()


def heard(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in found]


def replaced(model: Net) -> None:
    model.conv2.weight = nn.Parameter(model.conv2.weight.detach().clone())


def frozen(model: Net) -> None:
    model.conv2.requires_grad_(False)


def unheard(model: Net) -> None:
    """The loss goes past it."""
    model.conv2.register_forward_hook(lambda module, args, out: out.detach())


@pytest.mark.parametrize(
    ("mishap", "told"),
    [
        (replaced, "is not the tensor that was pushed any more: it was replaced since attach()"),
        (frozen, "had no gradient in 6 of 10 steps, and was not pushed in these: it is frozen by now"),
        (unheard, "had no gradient in 6 of 10 steps, and was not pushed in these: does the loss reach it?"),
    ],
)
@pytest.mark.parametrize("scope", ["filter", "path"])
def test_why_a_layer_was_not_pushed_is_told(mishap: Callable[[Net], None], told: str, scope: Any) -> None:
    """Not that a larger learning rate would do: what happened to it between two steps of the loop. Steps are counted
    once, in however many groups of the optimizer there are parameters under penalty."""
    model = Net()
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=1e-3)
    schedule = gp.GReg1(delta_lambda=0.2, ku=1, ks=5)
    pruner = gp.Pruner(model, X, schedule=schedule, ratios={"conv2": 0.5}, scope=scope)
    pruner.attach(optimizer)
    while not pruner.done:
        if pruner.step_count == 4:
            mishap(model)
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    assert heard(pruner.compact) == [f"compact: 'conv2.weight' {told}"]


def pushed(without: range, lr: float, schedule: gp.Schedule, second: int | None = None) -> list[str]:
    """What is told of a loop that makes no gradient at some steps, and attaches another optimizer at one."""
    torch.manual_seed(0)
    model = Net()
    pruner = gp.Pruner(model, X, schedule=schedule, ratios={"conv2": 0.5})
    pruner.attach(optimizer := torch.optim.SGD(model.parameters(), lr=lr))
    while not pruner.done:
        if pruner.step_count == second:
            pruner.detach()
            pruner.attach(optimizer := torch.optim.SGD(model.parameters(), lr=lr))
        optimizer.zero_grad()
        if pruner.step_count not in without:
            (model(X).sum() * 0).backward()
        optimizer.step()
    return heard(pruner.compact)


def test_gradients_that_were_missing_are_not_blamed_where_they_are_not_to_blame() -> None:
    short, hard = gp.GReg1(delta_lambda=0.2, ku=1, ks=5), gp.GReg1(delta_lambda=0.5, ku=1, ks=40)
    (told,) = pushed(range(6), 1e-3, short)
    assert "'conv2.weight' had no gradient in 6 of 10 steps" in told
    (told,) = pushed(range(5), 1e-3, short)  # in half of the steps it was pushed, only not far
    assert "the push has ended, but what goes in 'conv2' is still" in told
    assert not pushed(range(30), 0.2, hard), "the other steps were enough"


def test_steps_are_counted_anew_with_another_optimizer() -> None:
    (told,) = pushed(range(7, 10), 1e-3, gp.GReg1(delta_lambda=0.2, ku=1, ks=5), second=5)
    assert "'conv2.weight' had no gradient in 3 of 5 steps" in told


@pytest.mark.parametrize("how", ["never attached", "detached", "copied"])
def test_a_loop_on_a_pruner_that_is_attached_to_nothing_is_told_so_once(how: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = gp.Pruner(model, X, schedule=gp.GReg1(delta_lambda=0.5, ku=1, ks=1))
    if how != "never attached":
        pruner.attach(optimizer)
    if how == "detached":
        pruner.detach()
    if how == "copied":
        model, optimizer, pruner = copy.deepcopy((model, optimizer, pruner))
    assert heard(lambda: [pruner.done for _ in range(50)]) == [
        "this pruner is attached to no optimizer, so no step is counted and it is never done: attach() it"
    ]
    pruner.attach(optimizer)
    while not pruner.done:
        optimizer.step()


def test_a_twin_that_follows_by_states_is_not_told() -> None:
    """The pruner of averaged weights, say: attached to nothing, it goes on by loading, and is cut once an epoch."""
    model = Net()
    pruner, twin = (gp.Pruner(net, X, schedule=gp.GReg1(ks=50)) for net in (model, copy.deepcopy(model)))
    pruner.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(25):
        pruner.advance()
        twin.load_state_dict(pruner.state_dict())
        assert not twin.done
        (said,) = heard(twin.compact)
        assert "what was not pushed to zero yet is cut off" in said
    fresh = gp.Pruner(copy.deepcopy(model), X, schedule=gp.GReg1(ks=50))
    told = [each for _ in range(25) for each in heard(fresh.compact)]
    assert not any("attached" in each for each in told), "to cut often is not to wait in a loop"


def test_a_loop_that_attaches_is_told_nothing_of_the_time_before() -> None:
    model = Net()
    pruner, optimizer = gp.Pruner(model, X), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        assert not heard(lambda: [pruner.done for _ in range(6)])
        pruner.attach(optimizer)
        pruner.detach()


@pytest.mark.parametrize("schedule", [gp.GReg1(delta_lambda=0.5, ku=1, ks=1), gp.OneShot()])
@pytest.mark.filterwarnings("ignore:compact")
def test_one_that_is_done_may_be_asked_for_ever(schedule: gp.Schedule) -> None:
    """It is attached to nothing any more."""
    model = Net()
    pruner = gp.Pruner(model, X, schedule=schedule)
    pruner.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    while not pruner.done:
        pruner.advance()
    pruner.compact()
    assert not heard(lambda: [pruner.done for _ in range(50)])


def test_a_loop_that_counts_its_steps_itself_is_not_told() -> None:
    pruner = gp.Pruner(Net(), X)
    for _ in range(50):
        assert not pruner.done
        pruner.advance()


def test_attaching_twice() -> None:
    model = Net()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    pruner = gp.Pruner(model, X)
    pruner.attach(first)
    error(lambda: pruner.attach(first), "attached")
    error(lambda: pruner.attach(second), "attached")
    model(X).sum().backward()
    first.step()
    second.step()
    assert pruner.step_count == 1
    pruner.detach()
    pruner.attach(second)
    second.step()
    assert pruner.step_count == 2


@pytest.mark.parametrize("granularity", ["filter", "weight"])
def test_frozen_parameters(granularity: str) -> None:
    model = Net()
    model.conv2.weight.requires_grad_(False)
    refused("'conv2.weight'", "frozen", "'conv2'", model=model, granularity=granularity)
    gp.Pruner(model, X, schedule=gp.OneShot(), granularity=granularity)  # no penalty, so nothing to push
    model = Net()
    model.conv1.weight.requires_grad_(False)
    gp.Pruner(model, X)  # not one that goes


def test_frozen_after_the_pruner_was_made() -> None:
    model = Net()
    pruner = gp.Pruner(model, X)
    model.conv2.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    error(lambda: pruner.attach(optimizer), "'conv2.weight' is frozen", "name 'conv2' in the option ignore")
    model.conv2.requires_grad_(True)
    pruner.attach(optimizer)


def test_what_only_the_path_scope_pushes_may_be_frozen() -> None:
    model = Net()
    model.conv3.requires_grad_(False)  # it reads what conv2 makes
    refused("'conv3.weight' is frozen", "take scope filter", model=model, scope="path")
    gp.Pruner(model, X, scope="filter")
    model.conv2.weight.requires_grad_(False)
    refused("2 tensors are frozen", "name 'conv2', 'conv3' in the option ignore", model=model, scope="path")


def backbone(blocks: int) -> nn.Module:
    """A stem, blocks of two convolutions, and a head."""
    pairs = [nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)) for _ in range(blocks)]
    return nn.Sequential(nn.Conv2d(2, 4, 1), nn.Sequential(*pairs), nn.Conv2d(4, 2, 1))


def test_frozen_parameters_are_named_all_at_once() -> None:
    model = backbone(3)
    model[1].requires_grad_(False)
    refused("6 tensors are frozen", "name '1' in the option ignore", model=model)
    model[1][2].requires_grad_(True)
    refused("4 tensors are frozen", "name '1.0', '1.1' in the option ignore", model=model)
    left = gp.Pruner(model, X, ignore=["1.0", "1.1"])
    assert list(left.masks()) == ["1.2.0", "1.2.2"]
    many = backbone(6)
    for block in many[1]:
        block[0].requires_grad_(False)
    refused("name '1.0.0', '1.1.0', '1.2.0' and 3 more in the option ignore", model=many)
    refused("the whole model is frozen", model=backbone(1).requires_grad_(False))
    assert gp.Pruner(many, X, schedule=gp.OneShot()).compact()[1][0][0].out_channels == 2


def test_removal_before_gReg2_has_picked() -> None:  # noqa: N802 (that is its name)
    model = Net()
    before = snapshot(model)
    pruner = gp.Pruner(model, X, schedule=gp.GReg2())
    error(pruner.compact, "picks at step 10010", "step 0")
    assert all(bool(mask.all()) for mask in pruner.masks().values())
    assert_untouched(model, before)


# -- wrapped models ----------------------------------------------------------------------------------------------------


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_prunes(model: nn.Module, inner: nn.Module) -> None:
    """Trained through its wrapper under the penalty, the inner module is what comes out, smaller."""
    schedule = gp.GReg1(delta_lambda=3.0, tau=6.0, ku=1, ks=2)
    pruner = gp.Pruner(model, X, schedule=schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1)
    pruner.attach(optimizer)
    assert list(pruner.masks()) == ["conv2"]
    while not pruner.done:
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
    assert pruner.step_count == 4
    small = pruner.compact(optimizer=optimizer)
    assert type(small) is type(inner)
    assert small.conv2.out_channels == 3
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in small.parameters()}


def test_data_parallel() -> None:
    inner = Net()
    assert_prunes(nn.DataParallel(inner), inner)


def test_compiled() -> None:
    inner = Net()
    assert_prunes(torch.compile(inner, backend="eager"), inner)
    torch._dynamo.reset()


@pytest.mark.usefixtures("one_process")
def test_distributed() -> None:
    inner = Net()
    assert_prunes(nn.parallel.DistributedDataParallel(inner), inner)


@pytest.mark.usefixtures("one_process")
def test_distributed_around_compiled() -> None:
    inner = Net()
    assert_prunes(nn.parallel.DistributedDataParallel(torch.compile(inner, backend="eager")), inner)
    torch._dynamo.reset()


@pytest.mark.usefixtures("one_process")
def test_sharded_models_are_refused_by_name() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about sharding on one CPU
        sharded = fully_shard(Net(), mesh=dist.init_device_mesh("cpu", (1,)))
    error(lambda: gp.Pruner(sharded, X), "FSDP", "before")
    inside = nn.Sequential(nn.Conv2d(2, 2, 1), Net())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fully_shard(inside[1], mesh=dist.init_device_mesh("cpu", (1,)))
    error(lambda: gp.Pruner(inside, X), "FSDP", "'1'")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            old = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    except (RuntimeError, ValueError) as failure:
        pytest.skip(f"the older FSDP cannot be built here: {failure}")
    error(lambda: gp.Pruner(old, X), "FSDP")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_refused() -> None:
    scripted = torch.jit.script(Net().eval())
    error(lambda: gp.Pruner(scripted, X), "TorchScript")
    traced = torch.jit.trace(Net().eval(), X)
    error(lambda: gp.Pruner(traced, X), "TorchScript")
    error(lambda: gp.Pruner(nn.Sequential(nn.Conv2d(2, 2, 1), scripted), X), "TorchScript", "'1'")


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_are_refused() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1))
    error(lambda: gp.Pruner(model, X), "'0.weight'", "initialised")
    model(X)
    assert list(gp.Pruner(model, X, schedule=gp.OneShot()).masks()) == ["2"]


def test_a_model_on_two_devices_is_refused() -> None:
    model = Net()
    model.fc.to("meta")
    refused("several devices", "cpu", "meta", model=model)


def test_a_model_without_storage_is_refused() -> None:
    refused("meta", model=Net().to("meta"), example=X.to("meta"))


def test_an_example_on_another_device_is_refused() -> None:
    refused("example", example=X.to("meta"))


def test_an_activation_that_is_kept_is_not_what_cannot_be_copied() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept, self.box = nn.Linear(3, 2), torch.zeros(()), threading.Lock()

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.layer(x)
            return self.kept

    model, x = Keeps(), torch.randn(2, 3)
    model(x)
    error(lambda: gp.Pruner(model, x), "its attribute 'box'")
