"""What counts as a layer's work: exact numbers, and that speed-ups are planned by the same ones."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import growprune as gp
from growprune.asking import Measure
from growprune.grouping import trace
from growprune.planning import plan
from growprune.running import tensors
from growprune.solving import Cost

BATCH, TIME, IN, OUT = 2, 5, 8, 6
ROWS = BATCH * TIME
X = torch.randn(BATCH, TIME, IN)


class ByHand(nn.Module):
    """`run` with parameters of the shapes named."""

    def __init__(self, run: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        self.own = nn.ParameterList(torch.randn(*shape) / math.sqrt(shape[0]) for shape in shapes)

    def forward(self, *x: Tensor) -> Tensor:
        return self.run(*x, *self.own)


class Conv1D(nn.Module):
    """As in HuggingFace's GPT-2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.shape[:-1], self.weight.shape[1])
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(size)


class First(nn.Module):
    """The first of what a layer returns."""

    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, *x: Tensor) -> Tensor:
        out: Tensor = self.layer(*x * self.times)[0]
        return out


class Packed(nn.Module):
    """Sequences of five and three steps."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(nn.utils.rnn.pack_padded_sequence(x, [5, 3], batch_first=True))[0].data
        return out


class Stepped(nn.Module):
    """A cell, step by step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state, out = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            out.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(out, 1)


PRODUCTS: dict[str, tuple[ByHand, int]] = {
    "x @ W": (ByHand(lambda x, w: x @ w, (IN, OUT)), ROWS * IN * OUT),
    "x @ W.T": (ByHand(lambda x, w: x @ w.T, (OUT, IN)), ROWS * IN * OUT),
    "x @ W.T, by heads": (
        ByHand(lambda x, w: x.view(BATCH, TIME, 2, IN // 2).transpose(1, 2) @ w.T, (OUT, IN // 2)),
        2 * ROWS * IN // 2 * OUT,
    ),
    "W @ x": (ByHand(lambda x, w: w @ x, (7, TIME)), 7 * TIME * BATCH * IN),
    "x @ v": (ByHand(lambda x, w: x @ w, (IN,)), ROWS * IN),
    "mv": (ByHand(lambda x, w: torch.mv(w, x[0, 0]), (OUT, IN)), OUT * IN),
    "dot": (ByHand(lambda x, w: torch.dot(x[0, 0], w), (IN,)), IN),
    "mm": (ByHand(lambda x, w: torch.mm(x[0], w), (IN, OUT)), TIME * IN * OUT),
    "bmm": (ByHand(torch.bmm, (BATCH, IN, OUT)), ROWS * IN * OUT),
    "addmm": (ByHand(lambda x, b, w: torch.addmm(b, x[0], w), (OUT,), (IN, OUT)), TIME * IN * OUT),
    "addmm_": (ByHand(lambda x, w: x.new_zeros(TIME, OUT).addmm_(x[0], w), (IN, OUT)), TIME * IN * OUT),
    "addmv": (ByHand(lambda x, b, w: torch.addmv(b, w, x[0, 0]), (OUT,), (OUT, IN)), OUT * IN),
    "baddbmm": (ByHand(lambda x, b, w: torch.baddbmm(b, x, w), (BATCH, 1, OUT), (BATCH, IN, OUT)), ROWS * IN * OUT),
    "addbmm": (ByHand(lambda x, b, w: torch.addbmm(b, x, w), (TIME, OUT), (BATCH, IN, OUT)), ROWS * IN * OUT),
    "einsum": (ByHand(lambda x, w: torch.einsum("bti,oi->bto", x, w), (OUT, IN)), ROWS * IN * OUT),
    "einsum, weight first": (ByHand(lambda x, w: torch.einsum("io,bti->bto", w, x), (IN, OUT)), ROWS * IN * OUT),
    "einsum, by heads": (ByHand(lambda x, w: torch.einsum("bti,hio->bhto", x, w), (2, IN, 3)), ROWS * IN * 2 * 3),
    "tensordot": (ByHand(lambda x, w: torch.tensordot(x, w, 1), (IN, OUT)), ROWS * IN * OUT),
    "inner": (ByHand(torch.inner, (OUT, IN)), ROWS * IN * OUT),
    "two weights side by side": (ByHand(lambda x, *w: x @ torch.cat(w, 1), (IN, 2), (IN, 4)), ROWS * IN * OUT),
    "conv_tbc": (ByHand(lambda x, w, b: torch.conv_tbc(x, w, b, 1), (3, IN, OUT), (OUT,)), ROWS * 3 * IN * OUT),
    "a functional convolution": (
        ByHand(lambda x, w: F.conv1d(x.mT, w), (OUT, IN, 3)),
        BATCH * (TIME - 2) * 3 * IN * OUT,
    ),
}
"""Products with a parameter, by hand."""

BOTH = OUT * (IN + OUT)
"""Weights of the input's product and the hidden state's, for one gate."""
RECURRENT: dict[str, tuple[nn.Module, int]] = {
    "RNN": (nn.RNN(IN, OUT), ROWS * BOTH),
    "RNN, relu, 2 layers": (nn.RNN(IN, OUT, 2, nonlinearity="relu"), ROWS * (BOTH + 2 * OUT * OUT)),
    "GRU": (nn.GRU(IN, OUT), ROWS * 3 * BOTH),
    "GRU, 2 layers, both ways": (nn.GRU(IN, OUT, 2, bidirectional=True), ROWS * 2 * 3 * (BOTH + OUT * 3 * OUT)),
    "LSTM": (nn.LSTM(IN, OUT), ROWS * 4 * BOTH),
    "LSTM in float64": (nn.LSTM(IN, OUT).double(), ROWS * 4 * BOTH),
    "LSTM, no bias": (nn.LSTM(IN, OUT, bias=False, batch_first=True), ROWS * 4 * BOTH),
    "LSTM, 2 layers, both ways": (nn.LSTM(IN, OUT, 2, bidirectional=True), ROWS * 2 * 4 * (BOTH + OUT * 3 * OUT)),
    "LSTM with projections": (  # in float64: in float32 torch says that it has no fast kernel for them
        nn.LSTM(IN, OUT, proj_size=3).double(),
        ROWS * (4 * OUT * (IN + 3) + 3 * OUT),
    ),
    "LSTM with projections, 2 layers, both ways": (
        nn.LSTM(IN, OUT, 2, proj_size=3, bidirectional=True).double(),
        ROWS * 2 * (4 * OUT * (IN + 3) + 3 * OUT + 4 * OUT * (6 + 3) + 3 * OUT),
    ),
}


def cases() -> Iterator[Any]:
    """Name, network, example, MACs by layer."""
    for name, (layer, macs) in PRODUCTS.items():
        yield name, layer, X, {"layer": macs}
    for name, (recurrent, macs) in RECURRENT.items():
        yield name, First(recurrent), X.to(next(recurrent.parameters()).dtype), {"layer.layer": macs}
    yield "LSTM of one sequence", First(nn.LSTM(IN, OUT)), X[0], {"layer.layer": TIME * 4 * BOTH}
    for kind, gates in ((nn.LSTM, 4), (nn.GRU, 3)):
        yield f"{kind.__name__}, packed", Packed(kind(IN, OUT)), X, {"layer.layer": 8 * gates * BOTH}
    for cell, gates in ((nn.RNNCell, 1), (nn.GRUCell, 3), (nn.LSTMCell, 4)):
        yield cell.__name__, Stepped(cell(IN, OUT)), X, {"layer.cell": ROWS * gates * BOTH}
    yield "Conv1D of GPT-2", Conv1D(IN, OUT), X, {"layer": ROWS * IN * OUT}
    yield "Bilinear", nn.Bilinear(IN, 4, OUT), (X, X[..., :4]), {"layer": ROWS * IN * 4 * OUT}
    attention = nn.MultiheadAttention(IN, 2, batch_first=True)
    yield "attention", First(attention, 3), X, {"layer.layer": ROWS * 4 * IN * IN}
    short = X[:, :3]
    yield "attention across", First(attention), (X, short, short), {"layer.layer": (2 * ROWS + 2 * 6) * IN * IN}
    other = nn.MultiheadAttention(IN, 2, kdim=4, vdim=6, batch_first=True)
    macs = ROWS * IN * (IN + 4 + 6 + IN)
    yield "attention of other widths", First(other), (X, X[..., :4], X[..., :6]), {"layer.layer": macs}
    yield "Embedding", nn.Embedding(9, IN), torch.zeros(2, 5, dtype=torch.long), {}
    image = torch.randn(1, 4, 7, 7)
    yield "ConvTranspose", nn.ConvTranspose2d(4, 6, 3, stride=2), image, {"layer": 49 * 4 * 6 * 9}
    yield "ConvTranspose in groups", nn.ConvTranspose2d(4, 6, 3, groups=2), image, {"layer": 49 * 4 * 3 * 9}
    yield "convolution in groups", nn.Conv2d(4, 6, 3, groups=2), image, {"layer": 25 * 6 * 2 * 9}
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 6, 3))
    yield "weight norm", normed, image, {"layer": 25 * 6 * 4 * 9}


CASES = list(cases())


class Wrapped(nn.Module):
    """Gives a layer a name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *x: Tensor) -> Any:
        return self.layer(*x)


every_case = pytest.mark.parametrize(("name", "layer", "example", "macs"), CASES, ids=[case[0] for case in CASES])


@every_case
def test_the_macs_of_a_layer_by_its_name(name: str, layer: nn.Module, example: Any, macs: dict[str, int]) -> None:
    found = gp.measure(Wrapped(layer), example)
    assert found.per_layer == macs
    assert found.macs == sum(macs.values())
    products = {"mm", "bmm", "mv", "dot", "addmm", "mkldnn_rnn_layer", "_trilinear"} & set(found.uncounted)
    assert products == ({"bmm"} if "attention" in name else set())


@every_case
def test_the_tracer_counts_the_same(name: str, layer: nn.Module, example: Any, macs: dict[str, int]) -> None:
    assert planned(layer, example) == sum(macs.values())


def planned(net: nn.Module, example: Any) -> int:
    found, every = trace(net, example), tensors(net)
    layers = sum(each.positions * every[each.weight].numel() for each in found.operations)
    return layers + sum(each.macs for each in found.work)


def test_deformable_convolutions_count() -> None:
    ops = pytest.importorskip("torchvision.ops")
    offset = torch.zeros(1, 18, 5, 5)
    net = Wrapped(ops.DeformConv2d(4, 6, 3))
    example = (torch.randn(1, 4, 7, 7), offset)
    assert gp.measure(net, example).per_layer == {"layer": 25 * 6 * 4 * 9}
    assert planned(net, example) == 25 * 6 * 4 * 9


# Which products are layers.


def test_a_gpt2_block_counts_what_is_no_product_of_activations() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = Conv1D(IN, 3 * IN), Conv1D(IN, IN)
            self.up, self.down = Conv1D(IN, 4 * IN), Conv1D(4 * IN, IN)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).split(IN, dim=2)
            x = x + self.out(torch.softmax(q @ k.mT, -1) @ v)
            return x + self.down(F.gelu(self.up(x)))

    found = gp.measure(Block(), X)
    square = ROWS * IN * IN
    assert found.per_layer == {"qkv": 3 * square, "out": square, "up": 4 * square, "down": 4 * square}
    assert found.uncounted == {"bmm": 2, "_softmax": 1, "add": 2, "gelu": 1}
    assert planned(Block(), X) == found.macs


WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "masked": lambda x, w, m: x @ (w * m),
    "normalised": lambda x, w, m: x @ F.normalize(w, dim=0),
    "of two factors": lambda x, w, m: x @ (w @ m.T @ m),  # only the outer product is a layer
    "copied": lambda x, w, m: x @ w.double().float().contiguous().detach(),
    "expanded": lambda x, w, m: torch.bmm(x, w.expand(BATCH, -1, -1)),
    "of an activation's dtype": lambda x, w, m: x @ w.type_as(x),
    "of an activation's shape": lambda x, w, m: torch.bmm(x, w.expand_as(x[:, :IN].new_zeros(BATCH, IN, OUT))),
    "written into": lambda x, w, m: x @ w.clone().mul_(m),
}


@pytest.mark.parametrize("way", WEIGHTS)
def test_a_weight_computed_from_parameters_is_one(way: str) -> None:
    net = ByHand(WEIGHTS[way], (IN, OUT), (IN, OUT))
    found = gp.measure(net, X)
    assert found.macs == planned(net, X) == ROWS * IN * OUT
    assert found.uncounted.get("mm", 0) == (2 if way == "of two factors" else 0)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "both activations": lambda x, w: x @ x.mT,
    "a lookup": lambda x, w: x @ F.embedding(x[0, :, 0].long().clamp(0, 3), w).T,
    "what a linear layer makes": lambda x, w: x[0, :, :OUT] @ F.linear(w, w),
    "a state that is learned, then written": lambda x, w: x @ w.clone().add_(x[0, 0]).T,
    "a place in it written": lambda x, w: x @ first_row_written(w.clone(), x).T,
    "only its shape": lambda x, w: torch.zeros_like(w) @ x[0].mT,
}


def first_row_written(state: Tensor, x: Tensor) -> Tensor:
    state[0] = x[0, 0]
    return state


@pytest.mark.parametrize("way", ACTIVATIONS)
def test_what_an_activation_went_into_is_no_weight(way: str) -> None:
    net = ByHand(ACTIVATIONS[way], (OUT, IN))
    found = gp.measure(net, X.abs())
    linear = OUT * IN * OUT if "linear" in way else 0
    assert found.macs == planned(net, X.abs()) == linear
    assert found.uncounted["bmm" if way == "both activations" else "mm"] == 1


def test_a_buffer_is_a_weight_to_linear_alone() -> None:
    """A product with one may be of a table, or of a cache of activations."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(IN, IN))
            self.head = nn.Linear(IN, OUT)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(F.linear(x @ self.table, self.table))
            return out

    found = gp.measure(Fixed(), X)
    assert found.per_layer == {"": ROWS * IN * IN, "head": ROWS * IN * OUT}
    assert found.uncounted == {"mm": 1}
    assert planned(Fixed(), X) == found.macs


# Plans.


def hidden(draw: st.DrawFn, width: int) -> nn.Module:
    """A layer whose channels may go, maybe something that mixes positions, and a layer that reads them."""
    inner = draw(st.integers(16, 48))
    make, read = (draw(st.sampled_from([nn.Linear, Conv1D, matrix])) for _ in range(2))
    mixed = [ByHand(lambda x, w: w @ x, (TIME, TIME))] if draw(st.booleans()) else []
    return nn.Sequential(make(width, inner), nn.Tanh(), *mixed, read(inner, width))


def matrix(inputs: int, outputs: int) -> nn.Module:
    return ByHand(torch.matmul, (inputs, outputs))


OTHERS: tuple[Callable[[int], nn.Module], ...] = (
    lambda n: First(nn.LSTM(n, n, batch_first=True)),
    lambda n: First(nn.LSTM(n, n, 2, batch_first=True)),
    lambda n: First(nn.GRU(n, n, batch_first=True)),
    lambda n: First(nn.RNN(n, n, batch_first=True)),
    lambda n: Stepped(nn.LSTMCell(n, n)),
    lambda n: Stepped(nn.GRUCell(n, n)),
    lambda n: ByHand(lambda x, w: F.bilinear(x, x, w), (n, n, n)),
    lambda n: First(nn.MultiheadAttention(n, 1, batch_first=True), 3),
    lambda n: ByHand(lambda x, w: x @ w.T, (n, n)),
    lambda n: ByHand(lambda x, w: torch.einsum("bti,oi->bto", x, w), (n, n)),
    lambda n: ByHand(torch.bmm, (BATCH, n, n)),
)
"""Layers that nothing cuts, from n channels to n."""


class Residual(nn.Module):
    """What the blocks make is added up, so that it stays as wide as it is."""

    def __init__(self, width: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(3, width), nn.ModuleList(blocks), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.head(x)
        return out


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    width = draw(st.integers(4, 10))
    torch.manual_seed(0)
    blocks = [hidden(draw, width) for _ in range(draw(st.integers(1, 3)))]
    blocks += [kind(width) for kind in draw(st.lists(st.sampled_from(OTHERS), max_size=3))]
    dtype = draw(st.sampled_from([torch.float, torch.double]))  # torch has another LSTM for each
    net = Residual(width, draw(st.permutations(blocks))).to(dtype)
    return net, torch.randn(BATCH, TIME, 3, dtype=dtype)


@settings(deadline=None, max_examples=40)
@given(networks(), st.floats(0.1, 0.9))
def test_a_plan_knows_the_macs_that_are_measured_after_it(case: tuple[nn.Module, Tensor], ratio: float) -> None:
    net, x = case
    pruner = gp.Pruner(net, x, gp.OneShot(), ratios=ratio)
    assert pruner.counts
    cost = Cost(pruner.groups, {name: t.shape for name, t in tensors(net).items()})
    after = gp.measure(pruner.compact(), x).macs
    assert cost(torch.zeros(len(pruner.counts)).double()) == pytest.approx(gp.measure(net, x).macs, abs=0.1)
    assert cost(torch.tensor(pruner.counts).double()) == pytest.approx(after, abs=0.1)


@settings(deadline=None, max_examples=40)
@given(networks(), st.floats(0, 0.9))
def test_a_speed_up_is_met_within_one_percent(case: tuple[nn.Module, Tensor], share: float) -> None:
    """One that the network can reach, of which `share` is asked for; or else the nearest is named."""
    net, x = case
    before = gp.measure(net, x)
    every = dict.fromkeys(gp.Pruner(net, x, gp.OneShot(), ratios=0.1).masks(), 0.9)
    most = gp.speedup(before, gp.measure(gp.Pruner(net, x, gp.OneShot(), ratios=every).compact(), x))
    times = 1 + share * (most - 1)

    def asked() -> gp.Pruner:
        return gp.Pruner(net, x, gp.OneShot(), ratios=gp.Speedup(times))

    try:
        pruner = asked()
    except gp.GrowpruneError:
        with pytest.raises(gp.GrowpruneError, match="within 1 %: the nearest is"):
            asked()
        return
    assert gp.speedup(before, gp.measure(pruner.compact(), x)) == pytest.approx(times, rel=0.0101)


def test_a_speed_up_of_a_network_most_of_whose_work_is_recurrent() -> None:
    """Planned as if the LSTM were nothing, 1.5 times came out as 1.29."""
    torch.manual_seed(0)
    net = Residual(
        8, [nn.Sequential(nn.Linear(8, 64), nn.Tanh(), Conv1D(64, 8)), First(nn.LSTM(8, 8, batch_first=True))]
    )
    x = torch.randn(BATCH, TIME, 3)
    pruner = gp.Pruner(net, x, gp.OneShot(), ratios=gp.Speedup(1.5))
    before, after = gp.measure(net, x), gp.measure(pruner.compact(), x)
    assert before.macs == ROWS * (3 * 8 + 2 * 8 * 64 + 4 * 2 * 8 * 8 + 8 * 2)
    assert gp.speedup(before, after) == pytest.approx(1.5, rel=0.01)


def recurrent() -> nn.Module:
    return First(nn.LSTM(IN, OUT))


def test_a_network_whose_layers_all_stay_is_measured_and_not_pruned() -> None:
    macs = TIME * 4 * BOTH
    found = plan(Measure(model="test_counting:recurrent", input=f"{TIME}x{IN}"))
    assert (found["macs"], found["speedup"]) == ({"before": macs, "after": macs}, 1.0)
    with pytest.raises(gp.GrowpruneError, match="no layer of this model can be pruned"):
        gp.Pruner(recurrent(), X, gp.OneShot(), ratios=0.5)
