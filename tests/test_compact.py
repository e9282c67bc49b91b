"""Removal: the small network is the masked one, of the user's own class, and its optimizer goes on."""

import copy
import functools
import io
import random
import warnings
from collections.abc import Callable, Iterable
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import growprune as gp
from growprune import proof
from growprune.compact import calibrate
from growprune.grouping import AT_ONCE
from growprune.models import create
from growprune.paper import table1
from growprune.paper.setting import Base
from strategies import AT_ONCE_OR_NONE, DEAD, Case, Links, Words, cases, conv, networks, randomize

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
ratios = st.sampled_from([0.2, 0.5, 0.8])


def law(test: Any) -> Any:
    """Of whatever network."""
    many = settings(deadline=None, max_examples=60, suppress_health_check=SLOW)
    return pytest.mark.filterwarnings(DEAD, AT_ONCE_OR_NONE)(many(test))


SHORT = gp.GReg1(delta_lambda=0.5, ku=1, ks=1)
IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def picked(case: Case, ratio: float, **more: Any) -> gp.Pruner:
    """A pruner that has picked at once; networks in which nothing can go are passed over."""
    try:
        return gp.Pruner(case.model, case.example, schedule=gp.OneShot(), ratios=ratio, **more)
    except gp.GrowpruneError as error:
        assume("no layer of this model can be pruned" not in str(error))
        raise


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def stray(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest number (or to one, if all are smaller)."""
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1.0))


def by_hand(model: nn.Module, links: Links, masks: dict[str, Tensor]) -> nn.Module:
    """The full network with hooks that zero removed channels at the door of every layer that reads them."""
    full = copy.deepcopy(model)
    for name, sources in links.reads.items():
        layer = full.get_submodule(name)
        keep = torch.cat([source.mask(masks) for source in sources])

        def zero(module: nn.Module, args: tuple[Tensor, ...], keep: Tensor = keep) -> tuple[Tensor, ...]:
            dim = args[0].dim() - 1 if isinstance(module, nn.Linear) else 1
            shape = [-1 if d == dim else 1 for d in range(args[0].dim())]
            return (args[0] * keep.view(shape), *args[1:])

        layer.register_forward_pre_hook(zero)
    return full


def outputs(model: nn.Module, x: Tensor, train: bool) -> Tensor:
    model = copy.deepcopy(model).train(train)  # a copy: in training mode a forward moves the running statistics
    return model(x).detach()


# -- the law: compact is masked ----------------------------------------------------------------------------------------


@law
@given(cases(), ratios)
def test_small_is_the_network_masked_by_hand(case: Case, ratio: float) -> None:
    assume(case.links is not None)
    pruner = picked(case, ratio)
    small = pruner.compact(fold=False)
    full = by_hand(case.model, case.links, pruner.masks())
    for train in (False, True):
        error = stray(outputs(small, case.example, train), outputs(full, case.example, train))
        assert error < 1e-5


@law
@given(cases())
def test_just_the_layers_that_may_go_are_found(case: Case) -> None:
    """Inner layers of every block, and none that an addition, a layer norm or the model's own code ties down."""
    assume(case.links is not None)
    try:
        pruner = gp.Pruner(case.model, case.example, schedule=gp.OneShot())
    except gp.GrowpruneError as refusal:
        assert not case.links.prunable or AT_ONCE in str(refusal)  # noqa: PT017 (it may be refused)
        return
    together = {name for name, why in pruner.stays.items() if why == AT_ONCE}  # by a group norm of one group
    assert set(pruner.masks()) == case.links.prunable - together
    assert not pruner.skipped


@law
@given(cases(), ratios, st.booleans())
def test_small_is_the_masked_network(case: Case, ratio: float, coupled: bool) -> None:
    pruner = picked(case, ratio, coupled=coupled)
    assert not pruner.skipped
    pruned = ~torch.cat(list(pruner.masks().values()))
    full = proof.masked(case.model, pruner.groups, pruned)
    small = pruner.compact(fold=False)
    for train in (False, True):
        error = stray(outputs(small, case.example, train), outputs(full, case.example, train))
        assert error < 1e-5
    if pruned.any():
        assert size(small) < size(case.model)
        assert gp.measure(small, case.example).macs < gp.measure(case.model, case.example).macs


@law
@given(cases(), ratios, st.booleans())
def test_small_trains(case: Case, ratio: float, coupled: bool) -> None:
    small = picked(case, ratio, coupled=coupled).compact().train()
    small(case.example).square().mean().backward()
    for name, p in small.named_parameters():
        assert p.is_leaf, name
        assert p.grad is not None, name
        assert p.grad.shape == p.shape
        assert torch.isfinite(p.grad).all(), name


@law
@given(cases(), ratios, st.booleans(), st.booleans())
def test_the_model_itself_is_left_alone(case: Case, ratio: float, coupled: bool, fold: bool) -> None:
    for i, module in enumerate(case.model.modules()):
        module.training = i % 3 != 0
    before = copy.deepcopy(case.model.state_dict())
    modes = [module.training for module in case.model.modules()]
    pruner = picked(case, ratio, coupled=coupled)
    small = pruner.compact(fold=fold)
    after = case.model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [module.training for module in case.model.modules()] == modes
    assert [module.training for module in small.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in case.model.modules())
    assert all(p.grad is None and p.requires_grad for p in case.model.parameters())
    own = {p.data_ptr() for p in case.model.parameters()}
    assert not any(p.data_ptr() in own for p in small.parameters())


@law
@given(cases(), ratios, st.booleans())
def test_folding_moves_biases_and_running_means_only(case: Case, ratio: float, coupled: bool) -> None:
    pruner = picked(case, ratio, coupled=coupled)
    plain, folded = (pruner.compact(fold=fold).state_dict() for fold in (False, True))
    assert all(name.endswith("bias") for name in set(folded) - set(plain)), "a layer without bias may be given one"
    for name, value in plain.items():
        assert folded[name].shape == value.shape
        if not name.endswith(("bias", "running_mean")):
            assert torch.equal(folded[name], value), name


@pytest.mark.filterwarnings(DEAD, AT_ONCE_OR_NONE)
@settings(deadline=None, max_examples=20, suppress_health_check=SLOW)
@given(networks(most=2), st.sampled_from([torch.bfloat16, torch.float64]))
def test_other_number_formats(case: Case, dtype: torch.dtype) -> None:
    """Rounding in sixteen bits must not be taken for a wrong cut."""
    model, example = case.model.to(dtype), case.example.to(dtype)
    pruner = picked(Case(model, example, None), 0.5)
    assert not pruner.skipped
    small = pruner.compact()
    assert {p.dtype for p in small.parameters()} == {dtype}
    assert small(example).dtype == dtype


# -- what chance might miss --------------------------------------------------------------------------------------------


class Mirror(nn.Module):
    """A weight that makes channels and, the other way round, reads them: what it made is what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.code = nn.Linear(6, 8)
        self.last = nn.Linear(6, 3)
        randomize(self, torch.Generator().manual_seed(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.code(F.relu(self.first(x)))) @ self.code.weight)


def test_a_weight_that_reads_what_it_makes() -> None:
    model, x = Mirror(), torch.randn(4, 5)
    pruner = gp.Pruner(model, x, schedule=gp.OneShot(), ratios={"code": 0.5})
    assert not pruner.skipped
    keep = pruner.masks()["code"]
    small = pruner.compact(fold=False)
    assert small.code.weight.shape == (4, 6)
    code = F.relu(model.code(F.relu(model.first(x)))) * keep
    assert stray(small(x), model.last(code @ model.code.weight)) < 1e-5


@pytest.mark.parametrize("coupled", [False, True])
def test_a_table_that_is_the_last_layer_too(coupled: bool) -> None:
    """Uncoupled, the stream that starts at the table stays; coupled, it goes with the table's columns."""
    model, x = Words(6, 4), torch.randint(0, 11, (4, 6))
    randomize(model, torch.Generator().manual_seed(0))
    pruner = gp.Pruner(model, x, schedule=gp.OneShot(), coupled=coupled)
    assert not pruner.skipped
    assert set(pruner.masks()) == ({"fc1", "fc2"} if coupled else {"fc1"})
    small = pruner.compact(fold=False)
    assert small.last.weight is small.table.weight
    assert (small.table.embedding_dim, small.last.in_features, small.fc1.out_features) == (3 if coupled else 6,) * 2 + (
        2,
    )
    keep = pruner.masks().get("fc2", torch.ones(6, dtype=torch.bool))
    hidden = F.relu(F.linear(model.table(x) * keep, model.fc1.weight, model.fc1.bias)) * pruner.masks()["fc1"]
    stream = model.table(x) + model.fc2(hidden)
    assert stray(small(x), model.last(stream * keep)) < 1e-5


def test_a_norm_without_tensors_knows_its_new_width() -> None:
    """It holds nothing that could be cut, yet warns when its width is not what it was told."""
    model = nn.Sequential(conv(3, 4), nn.ReLU(), conv(4, 8), nn.InstanceNorm2d(8), nn.ReLU(), conv(8, 2))
    small = gp.Pruner(model, IMAGE, schedule=gp.OneShot()).compact()
    assert small[2].out_channels == small[3].num_features == small[5].in_channels == 4


# -- scores of what goes together --------------------------------------------------------------------------------------


class Split(nn.Module):
    """A residual stream that one layer makes whole, and two others in halves of unlike size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 4)
        self.whole = conv(4, 8, 1, bias=False)
        self.left = conv(4, 3, 1, bias=False)
        self.right = conv(4, 5, 3, bias=False)
        self.head = conv(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.head(self.whole(x) + torch.cat([self.left(x), self.right(x)], 1))


def test_filters_tied_across_a_concatenation_are_scored_each_with_its_own() -> None:
    model = Split()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.rand(p.shape, generator=torch.Generator().manual_seed(i)) + 0.1)
        model.whole.weight[[1, 6]] = 0.01  # these two are least in the stream's both parts
        model.left.weight[1] = 0.01
        model.right.weight[3] = 0.01
    pruner = gp.Pruner(model, torch.randn(2, 3, 5, 5), schedule=gp.OneShot(), ratios={"whole": 0.25}, coupled=True)
    gone = (~pruner.masks()["whole"]).nonzero().flatten().tolist()
    small = pruner.compact()
    assert gone == [1, 6]
    assert (small.left.out_channels, small.right.out_channels, small.head.in_channels) == (2, 4, 6)


def test_least_filters_go() -> None:
    model = create("resnet20", width=8)
    pruner = gp.Pruner(model, IMAGE, schedule=gp.OneShot(), ratios=0.3)
    small = pruner.compact(fold=False)
    for name, mask in pruner.masks().items():
        norms = model.get_submodule(name).weight.abs().sum((1, 2, 3))
        least = norms.argsort()[: -(-3 * len(norms) // 10)]
        assert set((~mask).nonzero().flatten().tolist()) == set(least.tolist())
        assert torch.equal(small.get_submodule(name).weight, model.get_submodule(name).weight[mask])
        second = name.replace("conv1", "conv2")
        assert torch.equal(small.get_submodule(second).weight, model.get_submodule(second).weight[:, mask])


# -- the user's own class ----------------------------------------------------------------------------------------------


class Owned(nn.Module):
    """All that a user may have put into a module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = conv(3, 8, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = conv(8, 8)
        self.norm2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)
        self.unused = nn.Linear(5, 5)
        self.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("hidden", torch.arange(8.0), persistent=False)
        self.label = {"a": [1, 2]}

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        x = F.relu(self.norm1(self.conv1(x - self.mean)))
        x = F.relu(self.norm2(self.conv2(x))) * scale
        return self.fc(x.mean((2, 3)))

    def twice(self, x: Tensor) -> Tensor:
        return self(x) * 2


def owned() -> Owned:
    model = Owned()
    randomize(model, torch.Generator().manual_seed(0))
    return model


def test_the_users_class_survives() -> None:
    model = owned()
    model(IMAGE)
    model.norm1.eval()
    model.fc.bias.requires_grad_(False)
    model.conv2.bias.requires_grad_(False)
    before = int(model.calls)
    small = gp.Pruner(model, IMAGE, schedule=gp.OneShot()).compact()
    assert type(small) is Owned
    assert small.label == {"a": [1, 2]}
    assert small.conv2.out_channels == small.norm2.num_features == small.fc.in_features == 4
    assert (int(small.calls), int(model.calls)) == (before, before), "a trial run is not the user's"
    assert torch.equal(small.mean, model.mean)
    assert torch.equal(small.hidden, model.hidden)
    assert list(small.state_dict()) == list(model.state_dict())
    assert torch.equal(small.unused.weight, model.unused.weight)
    assert small.training
    assert not small.norm1.training
    assert small.norm2.training
    frozen = {name for name, p in small.named_parameters() if not p.requires_grad}
    assert frozen == {"fc.bias", "conv2.bias"}
    assert torch.allclose(small.eval().twice(IMAGE), small(IMAGE) * 2)
    assert torch.allclose(small(IMAGE, scale=1.0), small(IMAGE))


def test_hooks_fire_on_the_small_network() -> None:
    model, seen = owned(), []
    model.conv2.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    small = gp.Pruner(model, IMAGE, schedule=gp.OneShot()).compact()
    seen.clear()
    small(IMAGE)
    assert seen == [4]
    model(IMAGE)
    assert seen == [4, 8]


def test_a_hooks_keepsakes_can_be_trained_on() -> None:
    """A hook that keeps activations must not be left with tensors of inference mode."""
    model, kept = owned(), {}
    model.conv2.register_forward_hook(lambda module, args, out: kept.update(out=out))
    gp.Pruner(model, IMAGE, schedule=gp.OneShot()).compact()
    assert not any(t.is_inference() for t in kept.values())


class Fed(Owned):
    """A hook keeps a layer's output in the model, and the forward reads it there."""

    def __init__(self, way: str) -> None:
        super().__init__()
        kept = self.kept = {}
        conv2, self.probe = self.conv2, nn.Linear(8, 4)
        hooks: dict[str, Callable[..., None]] = {
            "dict": lambda module, args, out: kept.update(out=out),
            "default": lambda module, args, out, into=kept: into.update(out=out),
            "keyword": lambda module, args, out, *, into=kept: into.update(out=out),
            "partial": functools.partial(self.keep, kept),
            "model": lambda module, args, out: self.kept.update(out=out),
            "method": lambda module, args, out, keep=self.own: keep(out),
            "layer": lambda module, args, out: setattr(conv2, "kept", out),
        }
        inner = hooks.get(way, hooks["dict"])
        hooks["inner"] = lambda module, args, out: inner(module, args, out)
        self.conv2.register_forward_hook(hooks[way])

    @staticmethod
    def keep(into: dict[str, Tensor], module: nn.Module, args: Any, out: Tensor) -> None:
        into.update(out=out)

    def own(self, out: Tensor) -> None:
        self.kept.update(out=out)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = super().forward(x, scale)
        return x + self.probe((self.kept["out"] if self.kept else self.conv2.kept).mean((2, 3)))


@pytest.mark.parametrize("way", ["dict", "default", "keyword", "partial", "model", "method", "layer", "inner"])
def test_a_hook_that_holds_a_part_of_the_model_holds_the_copys(way: str) -> None:
    model = Fed(way).eval()
    model(IMAGE)
    before = [id(model.kept.get("out")), id(vars(model.conv2).get("kept"))]
    small = gp.Pruner(model, IMAGE, schedule=gp.OneShot()).compact(fold=False)
    assert small.conv2.out_channels == 4
    assert [id(model.kept.get("out")), id(vars(model.conv2).get("kept"))] == before
    image = torch.randn_like(IMAGE)
    fed = small.conv2(F.relu(small.norm1(small.conv1(image - small.mean)))).mean((2, 3))
    expected = Owned.forward(small, image) + small.probe(fed)
    model(torch.zeros_like(IMAGE))
    assert torch.allclose(small(image), expected, atol=1e-6)


def test_a_forward_put_in_its_classs_place_runs_the_copys_layers() -> None:
    model = owned()
    inner = model.forward
    model.forward = lambda x: 2 * inner(x)
    small = gp.Pruner(model, IMAGE, schedule=gp.OneShot()).compact(fold=False)
    assert small.conv2.out_channels == 4
    assert torch.equal(small(IMAGE), 2 * type(small).forward(small, IMAGE))


@pytest.mark.parametrize("bound", [False, True])
def test_what_a_hook_holds_of_the_users_stays_the_users(bound: bool) -> None:
    """What it counts too: such a variable is the same one in the copy's hook."""
    model, seen, runs = owned(), [], 0

    def watch(into: list[int], module: nn.Module, args: Any, out: Tensor) -> None:
        nonlocal runs
        runs += 1
        into.append(out.shape[1])

    hook = functools.partial(watch, seen) if bound else lambda *args: watch(seen, *args)
    model.conv2.register_forward_hook(hook)
    small = gp.Pruner(model, IMAGE, schedule=gp.OneShot()).compact()
    seen.clear()
    runs = 0
    small(IMAGE)
    model(IMAGE)
    assert seen == [4, 8]
    assert runs == 2


def test_a_model_that_keeps_an_activation_can_be_pruned() -> None:
    """Such a tensor hangs on a graph and cannot be copied as it is; attention maps are kept so."""

    class Keeping(Owned):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            self.seen = self.norm1(self.conv1(x))
            return super().forward(x, scale)

    model = Keeping()
    model(IMAGE).sum().backward()
    kept = model.seen
    small = gp.Pruner(model, IMAGE, schedule=gp.OneShot()).compact()
    assert small.conv2.out_channels == 4
    assert model.seen is kept


CHANCE: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": lambda x: F.dropout(x, 0.5, training=True),
    "numpy": lambda x: x + torch.from_numpy(numpy.random.randn(*x.shape)).to(x),
    "python": lambda x: x * random.random(),
}


@pytest.mark.parametrize("whose", CHANCE)
def test_a_forward_left_to_chance_can_be_pruned(whose: str) -> None:
    """Dropout that is on in evaluation too (Monte Carlo): the two runs of a comparison need the same chance."""

    class Chance(Owned):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(CHANCE[whose](x), scale)

    pruner = gp.Pruner(Chance(), IMAGE, schedule=gp.OneShot())
    assert not pruner.skipped
    assert pruner.compact().conv2.out_channels == 4


@pytest.mark.parametrize("first", [True, False])
def test_a_model_that_is_not_the_same_twice_is_told_so(first: bool) -> None:
    own = random.Random(0)

    class Wandering(Owned):
        wanders = first

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x, scale) + (own.random() if Wandering.wanders else 0.0)

    def prune() -> None:
        pruner = gp.Pruner(Wandering(), IMAGE, schedule=gp.OneShot())
        Wandering.wanders = True
        pruner.compact()

    with pytest.raises(gp.GrowpruneError, match=r"two runs of the model on the example differ by .* to chance"):
        prune()


def test_a_model_that_puts_out_nan_is_told_so() -> None:
    class Nan(Owned):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x, scale) / 0.0 * 0.0

    with pytest.raises(gp.GrowpruneError, match="puts out NaN"):
        gp.Pruner(Nan(), IMAGE, schedule=gp.OneShot())


def test_the_users_random_numbers_are_left_alone() -> None:
    model = owned()
    torch.manual_seed(0)
    before = torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state())
    gp.Pruner(model, IMAGE, schedule=gp.OneShot(), criterion="random").compact()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), repr(numpy.random.get_state())) == before[1:]


@pytest.mark.parametrize("way", ["older", "newer", "whole"])
def test_proofs_are_in_full_precision_and_the_users_is_left_alone(way: str) -> None:
    """TF32 rounds wide layers and not narrow ones: a network and its smaller self would differ by it."""
    seen: set[str] = set()
    backends: Any = torch.backends
    kinds = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    kinds += [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]

    def precisions() -> list[str]:
        return [kind.fp32_precision for kind in kinds]

    class Watched(Owned):
        def forward(self, x: Tensor) -> Tensor:
            seen.update(precisions())
            assert way != "older" or not backends.cudnn.allow_tf32  # `cudnn.flags` refuses what does not agree
            return super().forward(x)

    before = precisions()
    try:
        if way == "older":
            torch.set_float32_matmul_precision("medium")
        elif way == "newer":
            backends.cuda.matmul.fp32_precision = "tf32"
        else:
            backends.fp32_precision = "tf32"
        given = precisions()
        assert given[:2] == ["tf32", "tf32"]
        gp.Pruner(Watched(), IMAGE, schedule=gp.OneShot()).compact()
        assert seen == {"ieee"}
        assert precisions() == given
        if way == "older":
            assert (torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32) == ("medium", True)
        elif way == "whole":
            backends.fp32_precision = "ieee"
            assert precisions() == ["ieee"] * len(kinds)  # what holds for all still does
    finally:
        backends.fp32_precision = "none"
        if way == "older":
            torch.set_float32_matmul_precision("highest")
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


def test_memory_format_and_dtype_survive() -> None:
    model = owned().double().to(memory_format=torch.channels_last)
    pruner = gp.Pruner(model, IMAGE.double(), schedule=gp.OneShot(), ratios={"conv1": 0.5, "conv2": 0.5})
    small = pruner.compact()
    assert {p.dtype for p in small.parameters()} == {torch.float64}
    for weight in (small.conv1.weight, small.conv2.weight):
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert not weight.is_contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_survives() -> None:
    model = owned().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(IMAGE.cuda()).sum().backward()
    optimizer.step()
    small = gp.Pruner(model, IMAGE.cuda(), schedule=gp.OneShot()).compact(optimizer)
    assert {t.device.type for t in [*small.parameters(), *small.buffers()]} == {"cuda"}
    assert {s["momentum_buffer"].device.type for s in optimizer.state.values()} == {"cuda"}


@pytest.mark.parametrize(
    "given_as",
    [lambda x: x, lambda x: (x,), lambda x: [x, 2.0], lambda x: {"x": x, "scale": 2.0}],
    ids=["tensor", "tuple", "list", "dict"],
)
def test_example_in_any_form(given_as: Callable[[Tensor], Any]) -> None:
    small = gp.Pruner(owned(), given_as(IMAGE), schedule=gp.OneShot()).compact()
    assert small.conv2.out_channels == 4


def linear_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))


def normed_convolutions() -> nn.Module:
    norms = nn.InstanceNorm1d(8), nn.InstanceNorm1d(6)
    return nn.Sequential(nn.Conv1d(3, 8, 3), norms[0], nn.Tanh(), nn.Conv1d(8, 6, 3), norms[1], nn.Conv1d(6, 2, 3))


@pytest.mark.parametrize(("make", "shape"), [(linear_layers, (3,)), (normed_convolutions, (3, 12))])
def test_an_example_without_a_batch(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, one = make(), torch.randn(shape)
    small = gp.Pruner(model, one, schedule=gp.OneShot()).compact()
    alike = gp.Pruner(model, one[None], schedule=gp.OneShot()).compact()
    assert [t.shape for t in small.parameters()] != [t.shape for t in model.parameters()]
    assert torch.allclose(small(one), alike(one[None])[0], atol=1e-6)


def test_an_example_with_an_empty_batch_folds_nothing() -> None:
    with pytest.warns(UserWarning, match="puts out no numbers on the example"):
        small = gp.Pruner(linear_layers(), torch.empty(0, 3), schedule=gp.OneShot()).compact()
    assert bool(torch.isfinite(small(torch.ones(1, 3))).all())


def test_a_small_network_can_be_pruned_again() -> None:
    first = gp.Pruner(owned(), IMAGE, schedule=gp.OneShot()).compact()
    second = gp.Pruner(first, IMAGE, schedule=gp.OneShot()).compact()
    assert second.conv2.out_channels == 2


# -- which layers ------------------------------------------------------------------------------------------------------


def test_default_rule_on_resnet20() -> None:
    pruner = gp.Pruner(create("resnet20"), IMAGE, schedule=gp.OneShot())
    assert list(pruner.masks()) == [f"layer{s}.{b}.conv1" for s in (1, 2, 3) for b in range(3)]
    small = pruner.compact()
    assert small.conv1.out_channels == 16
    assert [small.layer2[b].conv1.out_channels for b in range(3)] == [16] * 3
    assert [small.layer2[b].conv2.out_channels for b in range(3)] == [32] * 3
    assert small.linear.in_features == 64


def test_default_rule_on_torchvisions_resnets() -> None:
    models = pytest.importorskip("torchvision.models")
    image = torch.randn(1, 3, 32, 32)
    basic = gp.Pruner(models.resnet18(), image, schedule=gp.OneShot())
    assert list(basic.masks()) == [f"layer{s}.{b}.conv1" for s in (1, 2, 3, 4) for b in range(2)]
    small = basic.compact()
    assert small.layer2[0].downsample[0].out_channels == small.layer2[0].conv2.out_channels == 128
    bottleneck = gp.Pruner(models.resnet50(), image, schedule=gp.OneShot())
    blocks = [f"layer{s}.{b}" for s, n in ((1, 3), (2, 4), (3, 6), (4, 3)) for b in range(n)]
    assert list(bottleneck.masks()) == [f"{block}.conv{i}" for block in blocks for i in (1, 2)]


def test_coupled_filters_go_together() -> None:
    models = pytest.importorskip("torchvision.models")
    model, image = models.resnet18(), torch.randn(1, 3, 32, 32)
    pruner = gp.Pruner(model, image, schedule=gp.OneShot(), ratios=0.25, coupled=True)
    small = pruner.compact(fold=False)
    for stage, width in ((2, 96), (3, 192), (4, 384)):
        layer, old = small.get_submodule(f"layer{stage}"), model.get_submodule(f"layer{stage}")
        widths = [layer[0].conv2, layer[0].downsample[0], layer[1].conv2]
        assert [c.out_channels for c in widths] == [width] * 3
        assert layer[1].conv1.in_channels == width
        tied = sum(c.weight.abs().sum((1, 2, 3)) for c in (old[0].conv2, old[0].downsample[0], old[1].conv2))
        keep = tied.argsort()[old[0].conv2.out_channels - width :].sort().values
        assert torch.equal(
            layer[0].downsample[0].weight[:, 0], old[0].downsample[0].weight[keep][:, small_in(stage, model, small)]
        )
    assert small.fc.in_features == 384


def small_in(stage: int, model: nn.Module, small: nn.Module) -> int:
    """The first channel of the stage before that was kept, by its index in the full network."""
    before, after = (net.get_submodule(f"layer{stage - 1}")[1].bn2.weight for net in (model, small))
    if len(before) == len(after):
        return 0
    kept = small.get_submodule(f"layer{stage - 1}")[1].conv2.weight[0, 0]
    full = model.get_submodule(f"layer{stage - 1}")[1].conv2.weight
    return int((full == kept).all(-1).all(-1).any(1).nonzero()[0])


def test_a_stream_with_padded_shortcuts_goes_as_one() -> None:
    """Zero-padded shortcuts tie the stem to all three stages; the padding's own channels stay."""
    model = create("resnet20", width=8)
    pruner = gp.Pruner(model, IMAGE, schedule=gp.OneShot(), ratios={"conv1": 0.5}, coupled=True)
    assert list(pruner.masks()) == ["conv1", *(f"layer{s}.{b}.conv1" for s in (1, 2, 3) for b in range(3))]
    assert not pruner.skipped
    small = pruner.compact()
    assert small.conv1.out_channels == 4
    assert [small.get_submodule(f"layer{s}")[2].conv2.out_channels for s in (1, 2, 3)] == [4, 12, 28]
    assert small.linear.in_features == 28


@pytest.mark.parametrize("form", ["name", "prefix", "module", "both"])
def test_ignored_layers_stay(form: str) -> None:
    model = create("resnet20", width=8)
    ignore = {
        "name": ["layer1.0.conv1", "layer2.1.conv1"],
        "prefix": ["layer1", "layer3.2"],
        "module": [model.layer1, model.layer3[0].conv1],
        "both": [model.layer2, "layer1.0"],
    }[form]
    names = [m if isinstance(m, str) else next(n for n, own in model.named_modules() if own is m) for m in ignore]
    pruner = gp.Pruner(model, IMAGE, schedule=gp.OneShot(), ignore=ignore)
    assert pruner.masks()
    for layer in pruner.masks():
        assert not any(layer == name or layer.startswith(f"{name}.") for name in names)
    small = pruner.compact(fold=False)
    for name in names:
        for key, value in model.get_submodule(name).state_dict().items():
            assert torch.equal(small.get_submodule(name).state_dict()[key], value)


def test_what_an_ignored_layer_reads_stays() -> None:
    model = create("vgg11")
    pruner = gp.Pruner(model, IMAGE, schedule=gp.OneShot(), ignore=["features.8"])
    second, third = "features.4", "features.8"
    assert isinstance(model.get_submodule(second), nn.Conv2d)
    assert isinstance(model.get_submodule(third), nn.Conv2d)
    assert not {second, third} & set(pruner.masks())


# -- widths written into a model's code --------------------------------------------------------------------------------


class Written(nn.Module):
    """Its forward counts on two of its layers' widths; the third is free."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two, self.three = conv(3, 4), conv(4, 8), conv(8, 8), conv(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.one(F.relu(self.stem(x)))) / self.one.out_channels
        x = F.relu(self.two(x))
        assert x.shape[1] == 8
        return self.head(F.relu(self.three(x)).mean((2, 3)))


def test_layers_whose_width_the_code_counts_on_are_left_and_named() -> None:
    model = Written()
    randomize(model, torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="2 layers stay"):
        pruner = gp.Pruner(model, IMAGE, schedule=gp.OneShot())
    assert set(pruner.skipped) == {"one", "two"}
    assert set(pruner.masks()) == {"three"}
    assert pruner.compact().three.out_channels == 4


@pytest.mark.parametrize("how", ["strays", "fails"])
def test_a_removal_that_changes_the_network_is_refused(how: str) -> None:
    """One filter less is fine with this one, half of them less is not: no trial at the start can tell."""

    class Late(Owned):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            few = self.conv2.out_channels < 6
            if few and how == "fails":
                raise RuntimeError("too narrow\nfor me")
            return super().forward(x, scale) + (0.1 if few else 0.0)

    model = Late()
    randomize(model, torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = gp.Pruner(model, IMAGE, schedule=gp.OneShot())
    with pytest.raises(gp.GrowpruneError, match=how) as caught:
        pruner.compact(optimizer=optimizer)
    assert "\n" not in str(caught.value)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


class Touchy(Owned):
    """What it puts out hangs on the last digits, as what a detector selects does."""

    single, late = False, 0.0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        assert not (self.single and x.dtype == torch.double)
        x = torch.sin(super().forward(x, scale) * 1e6)
        return x + self.late * (8 - self.conv2.out_channels)


def touchy() -> Touchy:
    model = Touchy()
    randomize(model, torch.Generator().manual_seed(0))
    return model


def test_what_strays_by_rounding_alone_is_not_refused() -> None:
    pruner = gp.Pruner(touchy(), IMAGE, schedule=gp.OneShot())
    assert not pruner.skipped
    small = pruner.compact()
    assert small.conv2.out_channels == 4
    assert {t.dtype for t in small.parameters()} == {torch.float32}


@pytest.mark.parametrize(("late", "single"), [(0.01, False), (0.0, True)])
def test_what_strays_with_all_digits_is_refused(late: float, single: bool) -> None:
    """A width in what follows the last layer; or a forward that has no more digits to show."""
    model = touchy()
    pruner = gp.Pruner(model, IMAGE, schedule=gp.OneShot())
    model.late, model.single = late, single
    with pytest.raises(gp.GrowpruneError, match=r"strays .* by .* depend on a width, .* sorts or selects"):
        pruner.compact()


class Counting(nn.Sequential):
    """Its forward bears that one filter is missing, but not two."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        here = sum(layer.out_channels for layer in list(self)[1:3])
        return super().forward(x) + (here < 15)


def test_layers_that_fail_together_but_none_alone_are_told_so() -> None:
    with pytest.raises(
        gp.GrowpruneError, match=r"no layer fails alone, but together: .* the option ignore; or, if the model sorts"
    ):
        gp.Pruner(Counting(), IMAGE)
    assert set(gp.Pruner(Counting(), IMAGE, schedule=gp.OneShot(), ratios=0.1, ignore=["1"]).masks()) == {"2"}


# -- folding and calibration -------------------------------------------------------------------------------------------


class Valid(nn.Module):
    """Unpadded convolutions; with batch norm or biases or both; perhaps depthwise in the middle, perhaps gated."""

    def __init__(self, bias: bool, normed: bool, depthwise: bool, gated: bool, flat: bool, padding: int = 0) -> None:
        super().__init__()
        self.flat = flat
        self.conv1 = conv(3, 6, 3, bias, padding=padding)
        self.conv2 = conv(6, 6, 3, bias, padding=padding, groups=6 if depthwise else 1)
        self.conv3 = conv(6, 6, 1, bias, padding=0)
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) if normed else nn.Identity() for _ in range(3))
        self.squeeze = nn.Linear(6, 3) if gated else None
        self.excite = nn.Linear(3, 6) if gated else None
        self.fc = nn.Linear(6 * (7 - 4 + 4 * padding) ** 2 if flat else 6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norms[0](self.conv1(x)))
        x = F.relu(self.norms[1](self.conv2(x)))
        if self.squeeze is not None:
            x = x * self.excite(F.relu(self.squeeze(x.mean((2, 3))))).sigmoid()[:, :, None, None]
        x = F.gelu(self.norms[2](self.conv3(x)))
        return self.fc(x.flatten(1) if self.flat else x.mean((2, 3)))


@torch.no_grad()
def vanish(model: Valid, filters: Iterable[int], fixed: bool = False) -> None:
    """As after long training under the penalty: weights zero, the norm's mean that of the constant left over, if it was
    not fixed."""
    gone = list(filters)
    for layer, norm in zip((model.conv1, model.conv2, model.conv3), model.norms, strict=True):
        layer.weight[gone] = 0.0
        if isinstance(norm, nn.BatchNorm2d) and not fixed:
            norm.running_mean[gone] = 0.0 if layer.bias is None else layer.bias[gone]
    if model.excite is not None:
        model.excite.weight[gone] = 0.0


@settings(deadline=None, max_examples=40)
@given(*[st.booleans()] * 6, st.sets(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 100))
def test_folding_vanished_filters_changes_nothing(
    bias: bool, normed: bool, depthwise: bool, gated: bool, flat: bool, fixed: bool, filters: set[int], seed: int
) -> None:
    model = Valid(bias, normed, depthwise, gated, flat).eval()
    generator = torch.Generator().manual_seed(seed)
    randomize(model, generator)
    vanish(model, filters, fixed)
    x = torch.randn(4, 3, 7, 7, generator=generator)
    ratio = (len(filters) - 0.5) / 6
    pruner = gp.Pruner(model, x[:1], schedule=gp.OneShot(), ratios={"conv1": ratio, "conv3": ratio})
    assert all(set((~mask).nonzero().flatten().tolist()) <= filters for mask in pruner.masks().values())
    small = pruner.compact(fold=True, fixed_norm=fixed)
    assert size(small) < size(model)
    assert stray(small(x), model(x)) < 1e-4


def test_what_a_vanished_filter_sends_on_hangs_on_whether_its_norm_was_fixed() -> None:
    model = Valid(bias=False, normed=True, depthwise=False, gated=False, flat=False).eval()
    generator = torch.Generator().manual_seed(0)
    randomize(model, generator)
    vanish(model, (1, 4), fixed=True)
    x = torch.randn(4, 3, 7, 7, generator=generator)
    pruner = gp.Pruner(model, x[:1], schedule=gp.OneShot(), ratios={"conv1": 1 / 3, "conv3": 1 / 3})
    right, wrong = (stray(pruner.compact(fixed_norm=said)(x), model(x)) for said in (True, False))
    assert right < 1e-4 < 1e-2 < wrong


@settings(deadline=None, max_examples=20)
@given(st.booleans(), st.booleans(), st.integers(0, 100))
def test_folding_helps_where_padding_forbids_that_it_be_exact(bias: bool, gated: bool, seed: int) -> None:
    model = Valid(bias, True, False, gated, False, padding=1).eval()
    generator = torch.Generator().manual_seed(seed)
    randomize(model, generator)
    with torch.no_grad():
        for norm in model.norms:
            norm.bias += 1.0  # so that every vanished filter sends something on
    vanish(model, (1, 4))
    x = torch.randn(4, 3, 7, 7, generator=generator)
    pruner = gp.Pruner(model, x[:1], schedule=gp.OneShot(), ratios={"conv1": 1 / 3, "conv2": 1 / 3, "conv3": 1 / 3})
    folded, plain = (stray(pruner.compact(fold=fold)(x), model(x)) for fold in (True, False))
    assert folded < plain


@pytest.mark.parametrize("bias", [False, True])
def test_of_a_filter_that_has_not_vanished_its_mean_is_folded(bias: bool) -> None:
    """Batch norm makes every filter's mean its shift; without an activation, that is the mean of what it sends on."""
    generator = torch.Generator().manual_seed(0)
    layers = conv(3, 4, 1, bias), conv(4, 6, 1, bias), nn.BatchNorm2d(6), conv(6, 5, 1, bias), nn.BatchNorm2d(5)
    model = nn.Sequential(*layers, conv(5, 2, 1)).eval()
    randomize(model, generator)
    x = torch.randn(8, 3, 6, 6, generator=generator)
    model[2].running_mean.copy_(model[:2](x).mean((0, 2, 3)).detach())
    pruner = gp.Pruner(model, x, schedule=gp.OneShot(), ratios={"1": 0.5})
    folded, plain = (pruner.compact(fold=fold)(x).mean((0, 2, 3)) for fold in (True, False))
    assert stray(folded, model(x).mean((0, 2, 3))) < 1e-5
    assert stray(plain, model(x).mean((0, 2, 3))) > 1e-3


def test_calibration_estimates_batch_norm_anew() -> None:
    model = randomize(create("resnet20", width=8), torch.Generator().manual_seed(0))
    model.layer3.eval()
    model.bn1.num_batches_tracked.fill_(100)  # which are forgotten
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(4, 3, 16, 16, generator=generator), torch.zeros(4)) for _ in range(3)]
    pruner = gp.Pruner(model, IMAGE, schedule=gp.OneShot())
    small = pruner.compact(calibrate=batches)
    inputs = [small.conv1(x) for x, _ in batches]
    assert torch.allclose(small.bn1.running_mean, torch.stack([x.mean((0, 2, 3)) for x in inputs]).mean(0), atol=1e-6)
    assert torch.allclose(small.bn1.running_var, torch.stack([x.var((0, 2, 3)) for x in inputs]).mean(0), rtol=1e-4)
    assert small.bn1.momentum == model.bn1.momentum
    assert torch.equal(small.conv1.weight, model.conv1.weight)
    assert [m.training for m in small.modules()] == [m.training for m in model.modules()]


class Busy(Owned):
    """Its `train()` would start a training run, as ultralytics' does; `eval()` is `train(False)`."""

    def train(self, mode: bool = True) -> nn.Module:
        raise AssertionError("nobody asked for this")


def test_modes_are_switched_without_calling_the_models_own_train() -> None:
    model = Busy()
    modes = [module.training for module in model.modules()]
    with pytest.warns(UserWarning, match="without batches"):
        pruner = gp.Pruner(model, IMAGE, schedule=gp.OneShot(), criterion="taylor")
    small = pruner.compact(calibrate=[IMAGE])
    gp.measure(small, IMAGE)
    for net in (model, small):
        assert [module.training for module in net.modules()] == modes


def test_norms_that_training_keeps_fixed_are_estimated_anew_when_asked_for() -> None:
    class Fixed(Owned):
        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self.norm1.eval()
            return self

    model = Fixed().train()
    calibrate(model, [IMAGE])
    seen = model.conv1(IMAGE - model.mean).mean((0, 2, 3))
    assert torch.allclose(model.norm1.running_mean, seen, atol=1e-6)
    assert model.norm2.training
    assert not model.norm1.training


def test_calibration_on_nothing_is_refused() -> None:
    """Statistics of no batch would be mean zero and variance one: worse than the old ones."""
    pruner = gp.Pruner(create("resnet20", width=4), IMAGE, schedule=gp.OneShot())
    with pytest.raises(gp.GrowpruneError, match="calibrate"):
        pruner.compact(calibrate=[])


class Couple(nn.Module):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.c, self.side = conv(1, 6), nn.BatchNorm2d(6), conv(6, 4), nn.Linear(3, 4)

    def forward(self, image: Tensor, more: Tensor) -> Tensor:
        found: Tensor = self.c(self.bn(self.a(image)).relu()).mean((2, 3)) + self.side(more)
        return found


def test_calibration_takes_several_inputs() -> None:
    """As the example does: a tuple of arguments with a target beside it, or a dict of them."""
    example = torch.randn(2, 1, 6, 6), torch.randn(2, 3)
    batches = [(torch.randn(4, 1, 6, 6), torch.randn(4, 3)) for _ in range(3)]
    pruner = gp.Pruner(randomize(Couple(), torch.Generator()), example, schedule=gp.OneShot(), ratios={"a": 0.5})
    named = [dict(zip(("image", "more"), each, strict=True)) for each in batches]
    small = pruner.compact(calibrate=[(each, torch.zeros(4)) for each in batches])
    other = pruner.compact(calibrate=named)
    assert torch.equal(small.bn.running_mean, other.bn.running_mean)
    assert stray(small.bn.running_mean, torch.stack([small.a(x).mean((0, 2, 3)) for x, _ in batches]).mean(0)) < 1e-6
    with pytest.raises(gp.GrowpruneError, match=r"several inputs as a tuple; on one of these it fails: .*'more'"):
        pruner.compact(calibrate=batches)


# -- the optimizer goes on ---------------------------------------------------------------------------------------------


def test_an_averaged_copy_is_cut_like_its_network() -> None:
    """As docs/method.md has it: the twin removes the very filters that the first pruner picked, by other weights."""
    net = create("resnet20", 10)
    ema = torch.optim.swa_utils.AveragedModel(net)
    with torch.no_grad():
        for p in ema.module.parameters():
            p.add_(torch.randn_like(p))  # by its own norms it would pick others
    first, twin = (gp.Pruner(each, IMAGE, schedule=gp.OneShot()) for each in (net, ema))
    assert any(not torch.equal(a, b) for a, b in zip(first.masks().values(), twin.masks().values(), strict=True))
    twin.load_state_dict(first.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(first.masks().values(), twin.masks().values(), strict=True))
    small, small_ema = first.compact(), twin.compact(calibrate=[IMAGE])
    assert {n: t.shape for n, t in small.state_dict().items()} == {
        n: t.shape for n, t in small_ema.state_dict().items()
    }
    kept = first.masks()["layer1.0.conv1"]
    assert torch.equal(small_ema.layer1[0].conv1.weight, ema.module.layer1[0].conv1.weight[kept])


def pushed() -> tuple[nn.Module, gp.Pruner, torch.optim.Optimizer]:
    net = create("resnet20", 10)
    pruner, optimizer = gp.Pruner(net, IMAGE, schedule=SHORT), torch.optim.SGD(net.parameters(), lr=0.1)
    pruner.attach(optimizer)
    while not pruner.done:
        optimizer.step()
    return net, pruner, optimizer


HARDLY = pytest.mark.filterwarnings("ignore:compact. (the push has ended|.* had no gradient)")
"""These networks are not trained, so nothing is pushed."""


@HARDLY
def test_an_optimizer_left_behind_says_so_once() -> None:
    """It would train the larger network, which nobody looks at any more."""
    _, pruner, optimizer = pushed()
    pruner.compact()
    optimizer.register_step_pre_hook(lambda *_: None)  # hooks that come later are no obstacle
    with pytest.warns(UserWarning, match="before compact.*make a new one") as told:
        optimizer.step()
    assert told[0].filename == __file__
    optimizer.step()


@HARDLY
def test_an_optimizer_that_went_along_is_not_left_behind() -> None:
    """At once, at a second try, or by its owner's own hands."""
    for way in ("at once", "then", "by hand"):
        _, pruner, optimizer = pushed()
        small = pruner.compact(optimizer=optimizer if way == "at once" else None)
        if way == "then":
            pruner.compact(optimizer=optimizer)
        elif way == "by hand":
            optimizer.param_groups.clear()
            optimizer.add_param_group({"params": list(small.parameters())})
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.zeros_like(p)
        optimizer.step()


@HARDLY
def test_a_loop_that_goes_on_with_the_larger_network_is_told_so_once() -> None:
    net, pruner, optimizer = pushed()
    small = pruner.compact(optimizer=optimizer)
    net(IMAGE).sum().backward()
    optimizer.step()  # a single step without gradients may be made to quiet a scheduler
    with pytest.warns(UserWarning, match="no gradient has come to it: does the loop still call the larger one") as told:
        optimizer.step()
    assert told[0].filename == __file__
    optimizer.step()
    assert all(p.grad is None for p in small.parameters())
    other = torch.optim.SGD(small.parameters(), lr=0.1)
    first = gp.Pruner(small, IMAGE, gp.OneShot())
    first.compact(optimizer=other)  # handed over twice, with another hook behind; a frozen part; and all trains
    smaller = first.compact(optimizer=torch.optim.SGD(small.parameters(), lr=0.1))
    other = torch.optim.SGD(smaller.parameters(), lr=0.1)
    again = gp.Pruner(smaller, IMAGE, gp.OneShot()).compact(optimizer=other)
    other.register_step_pre_hook(lambda *_: None)
    again.conv1.requires_grad_(False)
    for _ in range(3):
        other.zero_grad()
        again(IMAGE).sum().backward()
        other.step()


def test_a_look_at_the_smaller_network_does_not_end_the_push() -> None:
    """`while not pruner.done` would never end."""
    net = create("resnet20", 10)
    pruner, optimizer = gp.Pruner(net, IMAGE, schedule=SHORT), torch.optim.SGD(net.parameters(), lr=0.1)
    pruner.attach(optimizer)
    optimizer.step()
    with pytest.warns(UserWarning, match="compact at step 1 of .* the larger network is still pushed$"):
        pruner.compact()
    for _ in range(pruner.total_steps - 1):
        net(IMAGE).sum().backward()
        optimizer.step()
    assert pruner.done
    longer = gp.GReg1(delta_lambda=0.1, tau=0.5, ku=1, ks=20)
    pruner, optimizer = gp.Pruner(net, IMAGE, schedule=longer), torch.optim.SGD(net.parameters(), lr=0.1)
    pruner.attach(optimizer)
    optimizer.step()
    with pytest.warns(UserWarning, match="the larger network is still pushed$"):
        small = pruner.compact()
    optimizer.zero_grad()
    small(IMAGE).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="which is still pushed, .* does the loop call the smaller one already"):
        optimizer.step()
    assert pruner.step_count == 3
    with pytest.warns(UserWarning, match="is cut off all the same$"):  # who hands the optimizer over has done with it
        small = pruner.compact(optimizer=optimizer)
    small(IMAGE).sum().backward()
    optimizer.step()
    assert pruner.step_count == 3


@HARDLY
def test_a_network_can_be_pruned_in_rounds_with_one_optimizer() -> None:
    net = create("resnet20", 10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        pruner = gp.Pruner(net, IMAGE, schedule=SHORT, ratios=0.2)
        pruner.attach(optimizer)
        while not pruner.done:
            optimizer.zero_grad()
            (net(IMAGE).sum() * 1e-3).backward()
            optimizer.step()
        net = pruner.compact(optimizer=optimizer)
    assert net.layer1[0].conv1.out_channels == 7


@HARDLY
def test_an_optimizer_that_pushes_on_is_not_left_behind() -> None:
    """A look at the smaller network, and on with the larger; then it is left behind for good."""
    net, pruner, optimizer = pushed()
    pruner.compact()
    again = gp.Pruner(net, IMAGE, schedule=SHORT)
    again.attach(optimizer)
    while not again.done:
        optimizer.step()
    again.compact()
    with pytest.warns(UserWarning, match="before compact"):
        optimizer.step()


class PreActivated(nn.Module):
    """What its second convolution reads of removed filters becomes a bias that it did not have."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = conv(1, 8), nn.Linear(8, 4)
        self.bn1, self.c1, self.bn2 = nn.BatchNorm2d(8), nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.c2, self.act = nn.Conv2d(12, 8, 3, padding=1, bias=False), nn.PReLU(8)
        nn.init.constant_(self.bn2.bias, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.act(self.c2(self.bn2(self.c1(self.bn1(x).relu())).relu()))
        found: Tensor = self.out(x.relu().mean((2, 3)))
        return found


def together(net: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(net.parameters())}]


def apart(net: nn.Module) -> list[dict[str, Any]]:
    """As many do it: vectors do not decay."""
    flat = [[p for p in net.parameters() if (p.dim() < 2) is thin] for thin in (False, True)]
    return [{"params": flat[0], "weight_decay": 0.1}, {"params": flat[1], "weight_decay": 0.0}]


@pytest.mark.parametrize("grouped", [together, apart])
def test_fine_tuning_goes_on_from_a_file_bit_for_bit(
    grouped: Callable[[nn.Module], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Also where folding gave a layer a bias, which the optimizer made anew then has among the others."""
    generator = torch.Generator().manual_seed(0)
    net = randomize(PreActivated(), generator)

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(8, 1, 6, 6, generator=generator)), torch.arange(8) % 4).backward()
            optimizer.step()

    optimizer = torch.optim.AdamW(grouped(net), lr=1e-2)
    train(net, optimizer, 1)
    pruner = gp.Pruner(net, torch.randn(2, 1, 6, 6, generator=generator), schedule=gp.OneShot(), ratios={"c1": 0.5})
    small = pruner.compact(optimizer=optimizer)
    assert net.c2.bias is None
    assert small.c2.bias is not None
    train(small, optimizer, 2)
    gp.save(small, tmp_path / "small")
    state = copy.deepcopy(optimizer.state_dict())

    loaded = gp.load(tmp_path / "small", PreActivated)
    again = torch.optim.AdamW(grouped(loaded), lr=1e-2)
    again.load_state_dict(state)
    assert [p.shape for g in again.param_groups for p in g["params"]] == [
        p.shape for g in optimizer.param_groups for p in g["params"]
    ]
    for each, its in ((small, optimizer), (loaded, again)):
        train(each.train(small.training), its, 3)
    for name, value in small.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


class Line(nn.Module):
    """Small enough to be cut by hand."""

    def __init__(self, a: int = 6, b: int = 7) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, a, 3, bias=False)
        self.norm1 = nn.BatchNorm2d(a)
        self.conv2 = nn.Conv2d(a, b, 3)
        self.fc = nn.Linear(b, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return self.fc(F.relu(self.conv2(x)).mean((2, 3)))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = torch.randn(8, 2, 7, 7, generator=generator), torch.randint(0, 3, (8,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def cut_by_hand(name: str, t: Tensor, one: Tensor, two: Tensor) -> Tensor:
    """A tensor of `Line`, or the optimizer's state beside it, without the filters that go (a side of 1 stays)."""
    sides = {
        "conv1.weight": (one, None), "norm1.weight": (one,), "norm1.bias": (one,),
        "norm1.running_mean": (one,), "norm1.running_var": (one,),
        "conv2.weight": (two, one), "conv2.bias": (two,), "fc.weight": (None, two),
    }.get(name, ())  # fmt: skip
    for dim, keep in enumerate(sides):
        if keep is not None and t.dim() > dim and t.shape[dim] == len(keep):
            t = t.index_select(dim, keep.nonzero().flatten())
    return t.clone()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_as_if_cut_by_hand(kind: str) -> None:
    torch.manual_seed(0)
    model = Line()
    randomize(model, torch.Generator().manual_seed(0))
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, 4, seed=1)
    states = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    pruner = gp.Pruner(model, torch.randn(2, 2, 7, 7), schedule=gp.OneShot(), ratios={"conv1": 0.4, "conv2": 0.5})
    small = pruner.compact(optimizer=optimizer, fold=False)
    one, two = pruner.masks()["conv1"], pruner.masks()["conv2"]

    hand = Line(int(one.sum()), int(two.sum()))
    hand.load_state_dict({name: cut_by_hand(name, t, one, two) for name, t in model.state_dict().items()})
    fresh = OPTIMIZERS[kind](hand.parameters())
    for name, p in hand.named_parameters():
        fresh.state[p] = {
            key: cut_by_hand(name, value, one, two) if isinstance(value, Tensor) else value
            for key, value in states[name].items()
        }

    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in small.parameters()}
    assert len(optimizer.state) == len(held)
    for (name, p), q in zip(small.named_parameters(), hand.parameters(), strict=True):
        assert list(optimizer.state[p]) == list(fresh.state[q])
        for key, value in fresh.state[q].items():
            mine = optimizer.state[p][key]
            assert torch.equal(mine, value) if isinstance(value, Tensor) else mine == value, (name, key)
    train(small, optimizer, 4, seed=2)
    train(hand, fresh, 4, seed=2)
    for (name, t), u in zip(small.state_dict().items(), hand.state_dict().values(), strict=True):
        assert torch.equal(t, u), name


def test_groups_schedulers_and_state_dicts_keep_working() -> None:
    model = Line()
    groups = [
        {"params": [model.conv1.weight], "lr": 0.2},
        {"params": list(model.parameters())[1:], "weight_decay": 0.01},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(model, optimizer, 2, seed=0)
    scheduler.step()
    small = gp.Pruner(model, torch.randn(2, 2, 7, 7), schedule=gp.OneShot()).compact(optimizer=optimizer)
    assert optimizer.param_groups[0]["params"][0] is small.conv1.weight
    before = small.conv1.weight.clone()
    train(small, optimizer, 1, seed=1)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.025])
    assert not torch.equal(small.conv1.weight, before)
    groups = [{"params": [small.conv1.weight]}, {"params": list(small.parameters())[1:]}]
    other = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(torch.equal(a["momentum_buffer"], other.state[p]["momentum_buffer"]) for p, a in optimizer.state.items())


def test_an_attached_optimizer_is_free_after_removal() -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = gp.Pruner(model, torch.randn(2, 2, 7, 7), schedule=gp.GReg1(delta_lambda=0.5, tau=1.0, ku=1, ks=100))
    pruner.attach(optimizer)
    train(model, optimizer, 3, seed=0)
    assert repr(pruner) == "Pruner(GReg1, 4 of 7 filters go in 1 layer, stabilize, step 3 of 102)"
    with pytest.warns(UserWarning, match="step 3 of 102"):
        small = pruner.compact(optimizer=optimizer)
    plain = copy.deepcopy(small)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    train(small, optimizer, 2, seed=1)
    train(plain, other, 2, seed=1)
    assert pruner.step_count == 3
    assert all(torch.equal(p, q) for p, q in zip(small.parameters(), plain.parameters(), strict=True))


def test_without_an_optimizer_none_is_touched() -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 1, seed=0)
    before = [id(p) for p in optimizer.param_groups[0]["params"]]
    gp.Pruner(model, torch.randn(2, 2, 7, 7), schedule=gp.OneShot()).compact()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == before == [id(p) for p in model.parameters()]


def test_an_optimizer_whose_state_has_no_such_shape_starts_anew() -> None:
    """LBFGS keeps all parameters in one flat vector; it must not end in an error of sizes in the middle of training."""
    model = Line()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    x = torch.randn(4, 2, 7, 7)

    def step(net: nn.Module) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    step(model)
    pruner = gp.Pruner(model, x, schedule=gp.OneShot())
    small = pruner.compact(optimizer=optimizer)
    step(small)


# -- single weights ----------------------------------------------------------------------------------------------------

SPARSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "sgd wd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
}


def sparse(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, ratio: float = 0.7) -> nn.Module:
    example = torch.randn(2, 2, 7, 7, generator=torch.Generator().manual_seed(0))
    pruner = gp.Pruner(model, example, schedule=gp.OneShot(), ratios=ratio, granularity="weight")
    return pruner.compact(optimizer=optimizer)


def zeros(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() == 0 for name, p in model.named_parameters() if p.dim() > 1}


def assert_still_zero(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Those that were zero are; those that were not still move."""
    now = zeros(model)
    assert sum(int(mask.sum()) for mask in before.values()) > 0
    for name, mask in before.items():
        assert torch.equal(now[name], mask), f"{name}: {int((now[name] != mask).sum())} of {int(mask.sum())} changed"


@pytest.mark.parametrize("kind", SPARSE)
def test_zeros_are_exact_and_stay(kind: str) -> None:
    model = Line()
    optimizer = SPARSE[kind](model.parameters())
    train(model, optimizer, 3, seed=0)
    dense = copy.deepcopy(model.state_dict())
    small = sparse(model, optimizer)
    assert small is model
    before = zeros(small)
    for name, p in small.named_parameters():
        kept = ~before.get(name, torch.zeros_like(p, dtype=torch.bool))
        assert torch.equal(p[kept], dense[name][kept])
    for name in ("conv2.weight", "fc.weight"):
        assert int(before[name].sum()) == -(-7 * before[name].numel() // 10)
        assert dense[name][before[name]].abs().max() <= dense[name][~before[name]].abs().min()
    for name, mask in before.items():
        state = optimizer.state[small.get_parameter(name)]
        for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            assert key not in state or not state[key][mask].any(), (name, key)
    train(small, optimizer, 5, seed=1)
    assert_still_zero(small, before)


class Aside(Line):
    """Reads the weights of layers that are never called, as attention reads its last layer's."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.conv2d(F.relu(self.conv1(x)), self.conv2.weight, self.conv2.bias))
        return F.linear(x.mean((2, 3)), self.fc.weight, self.fc.bias)


@pytest.mark.parametrize("build", [Line, Aside])
@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("through", ["fresh optimizer", "deepcopy", "save", "pickle", "second copy"])
def test_zeros_stay_through_copies_files_and_fresh_optimizers(
    kind: str, through: str, build: type[Line], tmp_path: Any
) -> None:
    small = sparse(build())
    before = zeros(small)
    if through == "deepcopy":
        small = copy.deepcopy(small)
    elif through == "second copy":
        train(small, SPARSE[kind](small.parameters()), 1, seed=3)
        small = copy.deepcopy(copy.deepcopy(small))
    elif through == "save":
        gp.save(small, tmp_path / "small.safetensors")
        small = copy.deepcopy(gp.load(tmp_path / "small.safetensors", build))
    elif through == "pickle":
        file = io.BytesIO()
        torch.save(small, file)
        file.seek(0)
        small = torch.load(file, weights_only=False)
    train(small, SPARSE[kind](small.parameters()), 5, seed=1)
    assert_still_zero(small, before)


@pytest.mark.parametrize("build", [Line, Aside])
@pytest.mark.parametrize("way", ["assigned", "assigned and compiled", "replaced", "pruned again"])
def test_zeros_stay_in_weights_that_took_others_places(way: str, build: type[Line]) -> None:
    small = sparse(build())
    if way.startswith("assigned"):
        small.load_state_dict({name: t.clone() for name, t in small.state_dict().items()}, assign=True)
    elif way == "replaced":
        small.conv1.weight = nn.Parameter(torch.randn_like(small.conv1.weight))
        small(torch.randn(2, 2, 7, 7))
    else:
        small = sparse(small, ratio=0.9)
    before = zeros(small)
    net = torch.compile(small, backend="eager") if "compiled" in way else small
    train(net, SPARSE["adam"](small.parameters()), 4, seed=1)
    assert_still_zero(small, before)
    share = {name: float(mask.float().mean()) for name, mask in before.items()}
    assert min(share[name] for name in ("conv2.weight", "fc.weight")) >= (0.85 if way == "pruned again" else 0.65)


def test_held_weights_are_no_hindrance_to_torch_func() -> None:
    small = sparse(Line()).eval()
    x, state = torch.randn(2, 2, 7, 7), {**dict(small.named_parameters()), **dict(small.named_buffers())}
    plain = {name: t.detach().clone() for name, t in state.items()}
    assert torch.equal(torch.func.functional_call(small, plain, (x,)), small(x))
    weights = {name: plain.pop(name) for name, _ in small.named_parameters()}
    grads = torch.func.grad(lambda w: torch.func.functional_call(small, {**plain, **w}, (x,)).square().mean())(weights)
    assert bool(grads["fc.weight"].any())
    before = zeros(small)
    train(small, SPARSE["sgd wd"](small.parameters()), 3, seed=1)
    assert_still_zero(small, before)


@pytest.mark.parametrize("through", ["itself", "deepcopy"])
def test_filters_of_layers_whose_single_weights_are_held_stay(through: str) -> None:
    """Those of others may go."""
    both = sparse(nn.Sequential(nn.Conv2d(2, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, 1)))
    x = torch.randn(2, 2, 4, 4)
    both = copy.deepcopy(both) if through == "deepcopy" else both
    with pytest.raises(gp.GrowpruneError, match="single weights of '0' were, and are held at zero; prune filters"):
        gp.Pruner(both, x, gp.OneShot(), ratios="[0-1:0.5]")
    more = [nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1)]
    tail = nn.Sequential(both, nn.ReLU(), *more)
    pruner = gp.Pruner(tail, x, gp.OneShot())
    assert list(pruner.masks()) == ["2", "4"]
    assert pruner.stays["0.2"] == "single weights of it are held at zero"
    assert pruner.compact()[2].out_channels == 4


@pytest.mark.parametrize("kind", ["sgd wd", "adam", "adamw"])
def test_zeros_stay_under_an_optimizer_nobody_mentioned(kind: str) -> None:
    """It has momentum from before, and gradients too: the promise is of the module, not of the optimizer."""
    model = Line()
    optimizer = SPARSE[kind](model.parameters())
    train(model, optimizer, 3, seed=0)
    small = sparse(model)
    before = zeros(small)
    train(small, optimizer, 3, seed=1)
    small(torch.randn(2, 2, 7, 7))
    assert_still_zero(small, before)


def test_gradients_of_zeros_are_zero() -> None:
    """Else they would count when gradients are clipped."""
    small = copy.deepcopy(sparse(Line()))
    small(torch.randn(4, 2, 7, 7)).square().mean().backward()
    for name, mask in zeros(small).items():
        assert not small.get_parameter(name).grad[mask].any()
        assert small.get_parameter(name).grad[~mask].any()


def test_gradients_from_before_do_not_move_zeros() -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 2, 7, 7)).square().mean().backward()
    small = sparse(model, optimizer)
    before = zeros(small)
    optimizer.step()
    assert_still_zero(small, before)


def test_dense_values_loaded_into_a_sparse_module_lose_the_same_weights() -> None:
    model = Line()
    dense = copy.deepcopy(model.state_dict())
    small = sparse(model)
    before = zeros(small)
    small.load_state_dict(dense)
    small(torch.randn(2, 2, 7, 7))
    assert_still_zero(small, before)


def test_the_state_dict_is_that_of_the_class() -> None:
    """No mask in it: a plain module of the same class must be able to load it."""
    small = sparse(Line())
    plain = Line()
    plain.load_state_dict(small.state_dict())
    assert {name: int(mask.sum()) for name, mask in zeros(plain).items()} == {
        "conv1.weight": 0,  # the stem
        "conv2.weight": 265,
        "fc.weight": 15,
    }


def test_a_shared_weight_is_held_wherever_it_hangs() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.fc = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3), nn.Linear(2, 3)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.two(F.relu(self.one(x))).mean((2, 3)))

    small = sparse(Pair(), ratio=0.5)
    before = zeros(small)
    assert small.one.weight is small.two.weight
    train(small, torch.optim.SGD(small.parameters(), lr=0.1, momentum=0.9), 3, seed=0)
    assert_still_zero(small, before)


class Blur(nn.Module):
    """A fixed convolution: its weight is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.full((8, 1, 3, 3), 1 / 9))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, groups=8)


def test_a_weight_that_is_a_buffer_has_no_single_weights_to_lose() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Blur(), nn.ReLU(), nn.Conv2d(8, 2, 3))
    pruner = gp.Pruner(model, IMAGE, schedule=gp.OneShot(), granularity="weight")
    assert pruner.stays == {"1.kernel": "its weight is a buffer, which nothing trains"}
    assert pruner.compact() is model
    assert int((model[3].weight == 0).sum()) == 72
    assert bool(model[1].kernel.all())


def test_two_weights_of_one_module_have_a_mask_each() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(6, 2, 3, 3)), nn.Parameter(torch.randn(3, 6))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.relu(F.conv2d(x, self.first)).mean((2, 3)), self.second)

    plan: Any = {"schedule": gp.OneShot(), "ratios": "[0-1:0.5]", "granularity": "weight"}
    pruner = gp.Pruner(Both(), torch.randn(2, 2, 7, 7), **plan)
    assert sorted(tuple(mask.shape) for mask in pruner.masks().values()) == [(3, 6), (6, 2, 3, 3)]
    small = pruner.compact()
    assert gp.sparsity(small) == 0.5


def test_attention_of_unlike_widths_has_a_mask_for_each_weight() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(8, 2, kdim=4, vdim=4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(x, x[..., :4], x[..., :4], need_weights=False)[0]

    pruner = gp.Pruner(Looks(), torch.randn(2, 5, 8), schedule=gp.OneShot(), granularity="weight")
    assert sum(mask.numel() for mask in pruner.masks().values()) == 64 + 32 + 32 + 64


# -- the counting oracle (ImageNet's networks: tests/test_paper.py) ----------------------------------------------------


@cache
def base(name: str, classes: int) -> tuple[nn.Module, gp.Measurement]:
    model = create(name, classes)
    return model, gp.measure(model, IMAGE[:1])


@cache
def pruned(name: str, classes: int, ratios: Any) -> gp.Measurement:
    pruner = gp.Pruner(base(name, classes)[0], IMAGE, schedule=gp.OneShot(), ratios=ratios)
    return gp.measure(pruner.compact(fold=False), IMAGE[:1])


def removed(name: str, classes: int, ratios: Any) -> tuple[str, str]:
    """Speed-up, and parameters removed in per cent, to two decimals."""
    before, after = base(name, classes)[1], pruned(name, classes, ratios)
    return f"{gp.speedup(before, after):.2f}", f"{100 * (1 - after.params / before.params):.2f}"


def rounded(value: float) -> Decimal:
    """To four decimals, then to three, halves up each time."""
    return Decimal(repr(value)).quantize(Decimal("1.0000"), ROUND_HALF_UP).quantize(Decimal("1.000"), ROUND_HALF_UP)


@pytest.mark.parametrize(
    ("ratios", "speedup", "params"),
    [
        (0.5, "1.99", "49.82"),
        (0.7, "3.59", "70.58"),
        (0.9, "11.58", "90.45"),
        (0.925, "15.20", "93.41"),
        (0.95, "19.85", "95.18"),
        ("[0, .75, .75, .32]", "2.55", None),
    ],
)
def test_oracle_resnet56(ratios: Any, speedup: str, params: str | None) -> None:
    times, lost = removed("resnet56", 10, ratios)
    assert times == speedup
    assert params is None or lost == params


@pytest.mark.parametrize(
    ("ratio", "speedup", "params"),
    [
        (0.5, "3.61", "74.87"),
        (0.6, "5.42", "84.00"),
        (0.7, "8.89", "90.98"),
        (0.8, "17.34", "95.95"),
        (0.9, "45.53", "98.96"),
    ],
)
def test_oracle_vgg19(ratio: float, speedup: str, params: str) -> None:
    assert removed("vgg19", 100, f"[0:0, 1-15:{ratio}]") == (speedup, params)


@pytest.mark.parametrize(
    ("network", "ratio"), [(network, ratio) for network, columns in table1.PAPER.items() for ratio in columns]
)
def test_table_1_prints_our_counts_rounded(network: Base, ratio: float) -> None:
    """Its figures are quotients of counts that were rounded before: millions of parameters, milliards of operations,
    two to a MAC."""
    name, classes = network.model, {"cifar10": 10, "cifar100": 100}[network.data]
    before, after = base(name, classes)[1], pruned(name, classes, table1.ratios(network, ratio))
    macs = rounded(2 * before.macs / 1e9) / rounded(2 * after.macs / 1e9)
    params = 100 * (1 - rounded(after.params / 1e6) / rounded(before.params / 1e6))
    column = list(table1.PAPER[network]).index(ratio)
    assert f"{macs:.2f}" == f"{table1.PAPER[network][ratio][0]:.2f}"
    assert f"{params:.2f}" == f"{table1.SPARSITY[network][column]:.2f}"


class Before(nn.Module):
    """Pre-activation: the second convolution has no bias, and no batch norm takes in its output directly."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.conv1, self.norm2 = nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.fc = nn.Conv2d(6, 4, 1, bias=False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return self.fc(x.mean((2, 3)))


def test_a_layer_without_bias_is_given_one_to_fold_into(tmp_path: Any) -> None:
    """Filters of exact zero send act(beta) onward; nothing is lost by removing them, and file and optimizer follow."""
    model = randomize(Before(), torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        model.conv1.weight[:3] = 0
        model.norm2.running_mean[:3] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    small = gp.Pruner(model, IMAGE, schedule=gp.OneShot(), ratios=0.5).compact(optimizer=optimizer)
    x = torch.randn(3, 3, 5, 5)
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-5)
    assert {id(p) for p in small.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
    gp.save(small, tmp_path / "a")
    assert torch.equal(gp.load(tmp_path / "a", Before).eval()(x), small(x))


def test_folding_knows_whose_bias_and_whose_norm() -> None:
    """A parameter that happens to be called bias is none; a norm behind an activation in place takes in that."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.one, self.norm1 = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6)
            self.two, self.act, self.norm2 = nn.Conv2d(6, 4, 1, bias=False), nn.ReLU(inplace=True), nn.BatchNorm2d(4)
            self.weight, self.bias = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm2(self.act(self.two(F.relu(self.norm1(self.one(F.relu(self.stem(x))))))))
            return F.linear(x.mean((2, 3)), self.weight) * self.bias

    model = randomize(Odd(), torch.Generator().manual_seed(0)).eval()
    pruner = gp.Pruner(model, IMAGE, schedule=gp.OneShot(), ratios={"one": 0.5, "two": 0.5})
    small = pruner.compact()
    kept = pruner.masks()["two"]
    assert torch.equal(small.bias, model.bias)
    assert torch.equal(small.norm2.running_mean, model.norm2.running_mean[kept])


def test_parameters_keep_what_was_put_on_them() -> None:
    model = owned()
    model.conv2.weight.no_decay = model.fc.bias.no_decay = True
    small = gp.Pruner(model, IMAGE, schedule=gp.OneShot()).compact()
    assert small.conv2.weight.no_decay
    assert small.fc.bias.no_decay


def test_the_users_cuda_seed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("reseeded"))
    gp.Pruner(owned(), IMAGE, schedule=gp.OneShot()).compact()


def test_autocast_around_it_changes_nothing() -> None:
    model = owned()
    plain = gp.Pruner(model, IMAGE, schedule=gp.OneShot()).masks()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = gp.Pruner(model, IMAGE, schedule=gp.OneShot())
        cast.compact()
    assert all(torch.equal(mask, cast.masks()[name]) for name, mask in plain.items())


def test_shapes_changed_in_place_and_weights_used_as_a_whole() -> None:
    """Neither has a rule: their channels stay, and the rest is pruned."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Conv2d(4, 4, 1) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.c(self.b(self.a(x))) * (1 + self.b.weight.abs().mean())
            return self.d(x).mean((2, 3), keepdim=True).squeeze_(-1)

    pruner = gp.Pruner(Plain(), torch.randn(1, 4, 3, 3), schedule=gp.OneShot())
    assert [layer.name for layer in pruner.groups.layers] == ["c"]


def test_holding_again_leaves_one_hook_of_each_kind() -> None:
    model = Line()
    for ratio in (0.3, 0.5, 0.7):
        sparse(model, ratio=ratio)
    assert len(model.conv2._forward_pre_hooks) == len(model.conv2._load_state_dict_post_hooks) == 1
    assert len(model.conv2.weight._backward_hooks) == 1


def test_a_compiled_optimizer_step_carries_the_penalty() -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = gp.Pruner(model, torch.randn(2, 2, 7, 7), gp.GReg1(delta_lambda=0.5, ku=1, ks=2))
    pruner.attach(optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    while not pruner.done:
        model(torch.randn(2, 2, 7, 7)).square().mean().backward()
        step()
    assert pruner.step_count == pruner.total_steps == 4


def test_statistics_are_estimated_alike_whatever_was_drawn_before() -> None:
    """Dropout is on while batch norm's statistics are estimated: a resumed run must draw what the whole one drew."""
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    found = []
    for seed in (1, 2):
        net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3), nn.BatchNorm1d(3))
        with torch.no_grad():
            net[1].weight.fill_(1.0)
            net[1].bias.zero_()
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        calibrate(net, [x])
        assert torch.equal(torch.get_rng_state(), state)
        found.append(net[2].running_mean)
    assert torch.equal(*found)
    assert not torch.equal(found[0], torch.zeros(3))


class Tasks(nn.Module):
    """A head and a norm for each task; one call takes one of them, or all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.heads = nn.ModuleList(nn.Sequential(nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8)) for _ in range(2))

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        features = F.relu(self.b(F.relu(self.a(x))))
        return torch.stack([h(features) for h in self.heads]) if task is None else self.heads[task](features)


def test_norms_that_no_batch_reaches_keep_their_statistics() -> None:
    model = Tasks()
    for _, norm in model.heads:
        norm.running_mean.fill_(3.0)
        norm.num_batches_tracked.fill_(9)
    pruner = gp.Pruner(model, torch.randn(1, 1, 8, 8), gp.OneShot())
    small = pruner.compact(fold=False, calibrate=[((torch.randn(16, 1, 8, 8), 0), None)])
    (_, reached), (_, other) = small.heads
    assert bool((reached.running_mean < 1).all())
    assert reached.num_batches_tracked == 1
    assert bool((other.running_mean == 3).all())
    assert other.num_batches_tracked == 9


def test_a_norm_beside_those_that_ran_is_told() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.o = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3), nn.Conv2d(16, 2, 1)
            self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))

        def forward(self, x: Tensor, task: int = 0) -> Tensor:
            return self.o(F.relu(self.norms[task](self.b(F.relu(self.a(x))))))

    with pytest.warns(UserWarning, match=r"does not reach 'norms\.1', .* as many channels as 'b' makes"):
        gp.Pruner(Chosen(), torch.randn(1, 1, 8, 8), gp.OneShot())


def test_several_optimizers_go_on_together_and_one_alone_is_told_what_it_leaves_out() -> None:
    def mixed() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        weight = model[2].weight
        rest = [p for p in model.parameters() if p is not weight]
        return model, [torch.optim.SGD([weight], lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.1)]

    def trained(net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        net.zero_grad()
        net(torch.randn(4, 6)).square().mean().backward()
        for each in optimizers:
            each.step()

    for which in (0, 1, 2):
        model, optimizers = mixed()
        pruner = gp.Pruner(model, torch.randn(1, 6), SHORT)
        pruner.attach(optimizers[0])
        while not pruner.done:
            trained(model, optimizers)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            small = pruner.compact(optimizer=optimizers if which == 2 else optimizers[which])
        told = [str(each.message) for each in caught if "none of the optimizers given" in str(each.message)]
        if which == 2:
            assert not told
            before = {name: p.clone() for name, p in small.named_parameters()}
            trained(small, optimizers)
            assert not any(torch.equal(p, before[name]) for name, p in small.named_parameters())
        else:
            assert len(told) == 1
            assert ("'0.weight' and 4 more" if which == 0 else "'2.weight':") in told[0]


@pytest.mark.parametrize("given", [7, "sgd", [torch.nn.ReLU()], torch.optim.lr_scheduler.StepLR])
def test_what_is_no_optimizer_is_refused_before_anything_is_cut(given: Any) -> None:
    with pytest.raises(gp.GrowpruneError, match="compact: optimizer= takes a torch optimizer, or several in a list"):
        gp.Pruner(owned(), IMAGE, gp.OneShot()).compact(optimizer=given)


def test_an_optimizer_of_named_parameters_knows_the_name_of_a_bias_it_is_given() -> None:
    model = randomize(Before(), torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        model.conv1.weight[:3] = 0
        model.norm2.running_mean[:3] = 0
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    small = gp.Pruner(model, IMAGE, schedule=gp.OneShot(), ratios=0.5).compact(optimizer=optimizer)
    (group,) = optimizer.param_groups
    named = dict(small.named_parameters())
    assert [id(named[name]) for name in group["param_names"]] == [id(p) for p in group["params"]]
    assert len(named) > len(dict(model.named_parameters()))


def test_single_weights_pruned_again_stay_zero_where_they_were() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    gp.Pruner(model, torch.randn(1, 6), gp.OneShot(), ratios={"2": 0.8}, granularity="weight").compact()
    first = model[2].weight == 0
    assert int(first.sum()) == 13
    gp.Pruner(model, torch.randn(1, 6), gp.OneShot(), "random", ratios={"2": 0.5}, granularity="weight").compact()
    second = model[2].weight == 0
    assert bool((second | ~first).all())
    assert int(second.sum()) > 13
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    assert torch.equal(model[2].weight == 0, second)


def test_a_held_weight_that_was_frozen_has_no_gradient_at_zeros_when_it_trains_again() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).requires_grad_(False)
    gp.Pruner(model, torch.randn(1, 6), gp.OneShot(), granularity="weight").compact()
    model(torch.randn(4, 6))
    model.requires_grad_(True)
    model(torch.randn(4, 6)).square().mean().backward()
    for layer in (model[0], model[2]):
        assert not bool(layer.weight.grad[layer.weight == 0].any())
        assert bool(layer.weight.grad.any())


def test_a_convolution_whose_weight_is_a_buffer_stays() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.o = nn.Conv2d(3, 8, 1), nn.Conv2d(6, 2, 1)
            self.register_buffer("filters", torch.randn(6, 8, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.o(F.conv2d(F.relu(self.a(x)), self.filters))

    pruner = gp.Pruner(Fixed(), torch.randn(1, 3, 4, 4), gp.OneShot(), ratios={"a": 0.5})
    assert pruner.stays["filters"] == "its weight is a buffer, which nothing trains"
    small = pruner.compact()
    assert (small.a.out_channels, tuple(small.filters.shape)) == (4, (6, 4, 1, 1))
    with pytest.raises(gp.GrowpruneError, match="no filter of 'filters' can go: its weight is a buffer"):
        gp.Pruner(Fixed(), torch.randn(1, 3, 4, 4), gp.OneShot(), ratios={"filters": 0.5})
