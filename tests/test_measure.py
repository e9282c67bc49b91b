import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from growprune import outcome
from growprune.errors import GrowpruneError
from growprune.measurement import Measurement, latency, measure, sparsity, speedup, weight_sparsity
from growprune.models import create

IMAGE = torch.randn(1, 3, 32, 32)


class Attention(nn.Module):
    """Linear layers on three-dimensional input, and products of activations, which are no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.out = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x)
        scores = torch.softmax(q @ q.transpose(1, 2), dim=-1)
        # Not contiguous: the case in which torch turns a linear layer into a batched product.
        mixed: Tensor = (scores @ q).transpose(1, 2).contiguous().transpose(1, 2)
        out: Tensor = self.out(mixed)
        return out


# The oracle: exact parameters, MACs to the digits printed.


@pytest.mark.parametrize(
    ("name", "classes", "params", "mega_macs"),
    [("resnet56", 10, 853_018, 125.49), ("vgg19", 100, 20_081_188, 398.18)],
)
def test_the_papers_cifar_networks(name: str, classes: int, params: int, mega_macs: float) -> None:
    cost = measure(create(name, classes), IMAGE)
    assert cost.params == params
    assert round(cost.macs / 1e6, 2) == mega_macs


@pytest.mark.parametrize(("name", "giga_macs"), [("resnet34", 3.664), ("resnet50", 4.089)])
def test_the_papers_imagenet_networks(name: str, giga_macs: float) -> None:
    pytest.importorskip("torchvision")
    cost = measure(create(f"torchvision:{name}"), torch.randn(1, 3, 224, 224))
    assert round(cost.macs / 1e9, 3) == giga_macs


# Laws.


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    dims = draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    groups = draw(st.integers(1, 3))
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dims}d")
    c_in, c_out = (groups * draw(st.integers(1, 3)) for _ in range(2))
    kernel = tuple(draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims)))
    conv = kind(
        c_in,
        c_out,
        kernel,
        stride=draw(st.integers(1, 2)),
        padding=draw(st.integers(0, 1)),
        dilation=draw(st.integers(1, 2)),
        groups=groups,
        bias=draw(st.booleans()),
    )
    return conv, torch.zeros(draw(st.integers(1, 3)), c_in, *[6] * dims)


@settings(deadline=None, max_examples=60)
@given(convolutions())
def test_every_convolution_counts_as_torchs_own_counter_has_it(case: tuple[nn.Module, Tensor]) -> None:
    conv, x = case
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        conv(x)
    cost = measure(conv, x)
    assert 2 * cost.macs == counter.get_total_flops()
    assert cost.uncounted == {}


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 4), min_size=0, max_size=3),
    inputs=st.integers(1, 5),
    outputs=st.integers(1, 5),
    bias=st.booleans(),
)
def test_a_linear_layer_is_inputs_times_outputs_times_rows(
    shape: list[int], inputs: int, outputs: int, bias: bool
) -> None:
    x = torch.zeros(*shape, inputs)
    cost = measure(nn.Linear(inputs, outputs, bias=bias), x)
    assert cost.macs == x.numel() * outputs
    assert cost.uncounted == {}


@settings(deadline=None, max_examples=10)
@given(batch=st.integers(1, 6))
def test_macs_grow_with_the_batch(batch: int) -> None:
    model = create("resnet20", width=2)
    one = measure(model, IMAGE)
    many = measure(model, IMAGE.expand(batch, -1, -1, -1))
    assert many.macs == batch * one.macs
    assert (many.params, many.uncounted) == (one.params, one.uncounted)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 40))
def test_sparsity_is_the_share_of_exact_zeros(zeros: int) -> None:
    model = nn.Linear(7, 5)
    values = torch.tensor([0.0] * zeros + [1e-30] * (40 - zeros))
    nn.utils.vector_to_parameters(values[torch.randperm(40)], model.parameters())
    assert sparsity(model) == zeros / 40


def test_sparsity_of_nothing_is_none() -> None:
    assert sparsity(nn.ReLU()) == 0.0


# What is counted where, and what is not.


def test_macs_by_layer_add_up() -> None:
    model = create("vgg11")
    cost = measure(model, IMAGE)
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert list(cost.per_layer) == layers
    assert cost.per_layer["features.0"] == 32 * 32 * 64 * 3 * 9
    assert cost.per_layer["classifier"] == 5120
    assert sum(cost.per_layer.values()) == cost.macs


def test_a_module_called_twice_counts_twice_and_its_parameters_once() -> None:
    layer = nn.Linear(4, 4)
    cost = measure(nn.Sequential(layer, layer), torch.zeros(1, 4))
    assert (cost.params, cost.macs, cost.per_layer) == (20, 32, {"0": 32})


def test_functional_layers_count_for_the_module_that_calls_them() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(1, 1, 1)
            self.filters = nn.Parameter(torch.ones(2, 1, 3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(self.first(x), self.filters, padding="same")

    cost = measure(nn.Sequential(Functional()), torch.ones(1, 1, 4, 4))
    assert cost.per_layer == {"0.first": 16, "0": 16 * 18}


def test_everything_else_that_computes_is_listed() -> None:
    cost = measure(create("resnet20"), IMAGE)
    assert cost.uncounted == {
        "_native_batch_norm_legit_no_training": 19,
        "relu": 19,
        "add": 9,
        "mean": 1,
    }


def test_products_of_activations_are_listed_and_linear_layers_are_not() -> None:
    cost = measure(Attention(), torch.randn(2, 5, 8))
    assert cost.per_layer == {"query": 2 * 5 * 64, "out": 2 * 5 * 32}
    assert cost.uncounted == {"bmm": 2, "_softmax": 1}


@pytest.mark.parametrize("frozen", [False, True])
def test_fused_attention_does_not_hide_its_linear_layers(frozen: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True).eval()
    layer.requires_grad_(not frozen)
    assert torch.backends.mha.get_fastpath_enabled()
    cost = measure(layer, torch.randn(3, 5, 8))
    assert cost.per_layer == {"self_attn": 15 * 4 * 64, "linear1": 15 * 128, "linear2": 15 * 128}
    assert any("attention" in name for name in cost.uncounted)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_product_with_a_parameter_counts_and_a_foreign_operator_is_listed() -> None:
    @torch.library.custom_op("growprune_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = twice(x @ self.weight).relu_()
            return out

    cost = measure(ByHand(), torch.ones(2, 4))
    assert (cost.params, cost.macs) == (12, 24)
    assert cost.uncounted == {"growprune_test::twice": 1, "relu": 1}


def test_moving_data_is_not_arithmetic() -> None:
    class Mover(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = F.pad(torch.cat([x, x.flip(1)], dim=1), (1, 1))[:, 1:].double()
            return torch.stack([x, x.roll(1, 0)]).permute(1, 0, 2).reshape(-1).contiguous().clone()

    assert measure(Mover(), torch.ones(2, 3)).uncounted == {}


# The forms of an example.


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.left(a) + self.right(b)
        return out


@pytest.mark.parametrize("form", [tuple, list, lambda pair: dict(zip("ba", reversed(pair), strict=True))])
def test_an_example_of_several_arguments(form) -> None:
    example = form((torch.ones(1, 2), torch.ones(1, 4)))
    assert measure(Sum(), example).per_layer == {"left": 6, "right": 12}
    assert latency(Sum(), example, repeats=1) > 0


def test_an_example_that_does_not_fit_gives_one_line() -> None:
    model = create("resnet20").train()
    with pytest.raises(GrowpruneError, match=r"^the model fails on the example: RuntimeError: ") as caught:
        measure(model, torch.ones(1, 5, 32, 32))
    assert "\n" not in str(caught.value)
    assert all(m.training for m in model.modules())
    assert measure(model, IMAGE).macs > 0  # hooks and switches are gone again


# The model comes back as it was.


class Restless(nn.Module):
    """Writes to its buffers in every mode, one in place and one anew, rolls dice, and keeps a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("absent", None)
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = self.mean + x.mean(0)
        if self.cache is None:
            self.cache = torch.ones(3) / 3
        out: Tensor = self.norm(self.linear(x + torch.rand_like(x))) * self.cache
        return out

    def eval(self) -> "Restless":
        raise AssertionError("a measurement must not call eval(), which may do more than set a mode")


@pytest.mark.parametrize("look", [measure, latency])
def test_nothing_of_the_model_changes(look) -> None:
    torch.manual_seed(0)
    model = Restless().train()
    model.norm.training = False
    model(torch.randn(4, 3)).sum().backward()
    model.cache = None
    before = copy.deepcopy(model.state_dict())
    identities = {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    dice = torch.get_rng_state()

    look(model, torch.randn(4, 3, generator=torch.Generator().manual_seed(1)))

    assert torch.equal(torch.get_rng_state(), dice)
    assert [m.training for m in model.modules()] == [True, True, False]
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())} == identities
    assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("look", [measure, latency])
def test_a_model_that_caches_tensors_can_still_be_trained(look) -> None:
    model = Restless()
    look(model, torch.randn(4, 3))
    assert model.cache is not None
    model(torch.randn(4, 3)).sum().backward()
    assert model.linear.weight.grad is not None


def test_wrappers_are_looked_through() -> None:
    model = create("resnet20", width=2)
    bare = measure(model, IMAGE)
    assert measure(nn.DataParallel(model), IMAGE) == bare
    assert measure(torch.compile(model, backend="eager"), IMAGE) == bare


# Speed-up and time.


def cost(macs: int) -> Measurement:
    return Measurement(params=1, macs=macs, per_layer={}, uncounted={})


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_speedup_is_the_ratio_of_macs(before: int, after: int) -> None:
    assert speedup(cost(before), cost(after)) == before / after
    assert speedup(cost(before), cost(before)) == 1.0


def test_no_speedup_over_nothing() -> None:
    with pytest.raises(GrowpruneError, match="0 MACs"):
        speedup(cost(1), cost(0))


def test_latency_is_the_median_after_the_warm_up(monkeypatch) -> None:
    """A model on a clock of its own: slow at first, then 1 to 20 seconds a pass, in any order."""
    passes = [100.0, 100.0, *random.Random(0).sample([1.0, 2.0, 3.0, 4.0, 20.0], 5)]
    now = 0.0

    class Timed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal now
            now += passes.pop(0)
            assert not torch.is_grad_enabled()
            return x

    monkeypatch.setattr("time.perf_counter", lambda: now)
    assert latency(Timed(), torch.ones(1), warmup=2, repeats=5) == 3.0
    assert passes == []


def test_latency_needs_a_repeat() -> None:
    with pytest.raises(GrowpruneError, match="repeats must be a whole number, 1 or more, not 0"):
        latency(nn.ReLU(), torch.ones(1), repeats=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_counts_are_the_same_and_time_is_the_devices() -> None:
    model = create("resnet20")
    on_cpu = measure(model, IMAGE)
    model.cuda()
    on_gpu = measure(model, IMAGE.cuda())
    assert (on_gpu.params, on_gpu.macs, on_gpu.per_layer) == (on_cpu.params, on_cpu.macs, on_cpu.per_layer)

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(20):
                x = x @ x
            return x

    # Launching 20 products takes well under a millisecond; doing them does not.
    small, large = (latency(Product(), torch.zeros(n, n, device="cuda"), repeats=5) for n in (512, 8192))
    assert large > 10 * small


def test_two_networks_are_timed_in_turns_by_their_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else the machine does hits one of them at a time, and only ever adds."""
    seconds = {"base": iter([5.0, 4.0, 9.0, 4.0, 4.0]), "net": iter([8.0, 2.0, 2.5, 2.0, 3.0])}
    order: list[str] = []

    def timed(which: Any, x: torch.Tensor, **how: int) -> float:
        order.append(which)
        return next(seconds[which])

    monkeypatch.setattr(outcome, "latency", timed)
    images: Any = SimpleNamespace(shape=(1, 8, 8))
    found = outcome.times("base", "net", images, "cpu")  # type: ignore[arg-type]
    assert found == {"before": 4.0, "after": 2.0, "ratio": 2.0, "batch": 16}
    assert order == ["base", "net"] * 5


@pytest.mark.parametrize("of", [sparsity, lambda it: measure(it, torch.ones(1)), lambda it: latency(it, 1)])
def test_what_is_no_network_is_not_measured(of: Callable[[Any], Any]) -> None:
    with pytest.raises(GrowpruneError, match=r"need a torch.nn.Module to measure, not NoneType"):
        of(None)


@pytest.mark.parametrize("given", [{"repeats": 2.5}, {"repeats": 0}, {"warmup": -1}])
def test_passes_are_counted_in_whole_numbers(given: dict[str, Any]) -> None:
    with pytest.raises(GrowpruneError, match="must be a whole number"):
        latency(nn.ReLU(), torch.ones(1), **given)


def test_a_weight_of_several_layers_counts_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[0].weight[:2] = 0
    assert weight_sparsity(model) == 8 / 24
