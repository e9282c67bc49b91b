"""Single operators between two layers: the channels go as the operator needs it, or stay and say why."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence
from torchvision.ops import roi_align

import growprune as gp
from growprune.grouping import trace
from growprune.proof import difference, masked

ROWS = torch.tensor([1, 0, 1])
BOXES = [torch.tensor([[0.0, 0.0, 5.0, 5.0]])] * 3
GRID = torch.rand(3, 4, 4, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1


class Between(nn.Module):
    """What an operator makes of a layer's 8 channels (of 6×6 pixels), with another layer behind that reads `width`."""

    def __init__(self, operator: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.stem, self.wide, self.last = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 8, 1), nn.Conv2d(width, 4, 1)
        self.head, self.operator = nn.Linear(4, 2), operator

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.operator(self.wide(self.stem(x)))).mean((2, 3)))  # type: ignore[no-any-return]


FREE: dict[str, Callable[[Tensor], Tensor]] = {
    "stack of one layer's": lambda h: torch.stack([h, h.flip(-1)], 2).sum(2),
    "index_add": lambda h: torch.zeros_like(h).index_add(0, ROWS, h),
    "index_add to what is there": lambda h: h.clone().index_add_(0, ROWS, h),
    "scatter_add": lambda h: h.new_zeros(h.shape).scatter_add(0, ROWS.view(-1, 1, 1, 1).expand_as(h), h),
    "grid_sample": lambda h: F.grid_sample(h, GRID, align_corners=False),
    "roi_align": lambda h: roi_align(h, BOXES, 3),
    "max_unpool": lambda h: F.max_unpool2d(*F.max_pool2d(h, 2, return_indices=True), 2),
    "nearest-exact": lambda h: F.interpolate(h, scale_factor=2, mode="nearest-exact"),
    "zeros_like": lambda h: torch.where(h > 0, h, torch.zeros_like(h)) + torch.ones_like(h),
    "cumsum": lambda h: h.cumsum(-1) + h.cummax(2)[0],
    "sort": lambda h: h.flatten(2).sort(-1)[0].unflatten(2, (6, 6)),
    "topk": lambda h: h.flatten(2).topk(4)[0].unflatten(2, (2, 2)),
    "median": lambda h: h.flatten(2).median(-1)[0][..., None, None] + torch.var_mean(h, (2, 3), keepdim=True)[1],
    "rot90": lambda h: h.rot90(1, (2, 3)),
}
PINNED: dict[str, tuple[Callable[[Tensor], Tensor], int, str]] = {
    "cumsum": (lambda h: h.cumsum(1), 8, "cumsum"),
    "topk": (lambda h: h.topk(4, 1)[0], 4, "topk"),
    "sort": (lambda h: h.sort(1)[0], 8, "sort"),
    "index_add": (lambda h: h.index_add(1, torch.arange(8), h), 8, "index_add"),
    "a place": (lambda h: F.grid_sample(h, h[:, :2].movedim(1, -1).tanh(), align_corners=False), 8, "slice"),
    "padded with its like": (lambda h: torch.cat([h, torch.zeros_like(h)], 1).sort(1)[0], 16, "sort"),
}


def agree(model: nn.Module, pruner: gp.Pruner, x: Any) -> None:
    """The smaller network computes what the masked one does, on an input that the proof has not seen."""
    gone = torch.cat([~mask for mask in pruner.masks().values()])
    assert difference(pruner.compact(fold=False), masked(model, pruner.groups, gone), x) < 1e-4


@pytest.mark.parametrize("name", FREE)
def test_channels_go_through(name: str) -> None:
    torch.manual_seed(0)
    model = Between(FREE[name], 8)
    pruner = gp.Pruner(model, torch.randn(3, 3, 6, 6), gp.OneShot(), ratios=0.5)
    assert (pruner.skipped, int(pruner.masks()["wide"].sum())) == ({}, 4)
    agree(model, pruner, torch.randn(3, 3, 6, 6))


@pytest.mark.parametrize("name", PINNED)
def test_channels_that_an_operator_needs_stay(name: str) -> None:
    torch.manual_seed(0)
    operator, width, why = PINNED[name]
    pruner = gp.Pruner(Between(operator, width), torch.randn(3, 3, 6, 6), gp.OneShot(), ratios=0.5)
    assert pruner.stays["wide"] == f"{why}() needs all of its channels"
    assert (pruner.skipped, int(pruner.masks()["last"].sum())) == ({}, 2)


@pytest.mark.parametrize(
    "operator",
    [
        lambda h: torch.cat([h, torch.zeros_like(h)], 1),  # zeros as wide as a layer get narrower as it does
        lambda h: torch.stack([h, h * 2], 2).flatten(1, 2),  # each channel beside its double
    ],
)
def test_a_layers_channels_twice(operator: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Between(operator, 16)
    pruner = gp.Pruner(model, torch.randn(3, 3, 6, 6), gp.OneShot(), ratios=0.5)
    agree(model, pruner, torch.randn(3, 3, 6, 6))
    assert pruner.compact().last.weight.shape == (2, 8, 1, 1)


def test_a_pixels_channels_go_together() -> None:
    torch.manual_seed(0)
    model = Between(lambda h: F.pixel_shuffle(h, 2), 2)
    pruner = gp.Pruner(model, torch.randn(3, 3, 6, 6), gp.OneShot(), ratios=0.5)
    assert pruner.masks()["wide"].shape == (2,)
    agree(model, pruner, torch.randn(3, 3, 6, 6))
    assert pruner.compact().wide.weight.shape == (4, 6, 1, 1)


def test_what_is_stacked_of_two_layers_goes_when_coupled() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 8), nn.Linear(6, 8)
            self.last, self.head = nn.Linear(8, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = (torch.stack([self.a(x), self.b(x)]) * torch.tensor([0.3, 0.7]).view(2, 1, 1)).sum(0)
            return self.head(self.last(x))  # type: ignore[no-any-return]

    model, x = Two(), torch.randn(5, 3)
    assert "the option coupled" in gp.Pruner(model, x, gp.OneShot()).stays["a"]
    pruner = gp.Pruner(model, x, gp.OneShot(), coupled=True)
    agree(model, pruner, torch.randn(4, 3))
    assert pruner.compact().b.weight.shape == (4, 6)


def test_pooled_and_unpooled_channels_are_one() -> None:
    """As in SegNet: another layer's channels are put back where these had their maxima."""

    class Seg(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.down, self.up = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 8, 1), nn.Conv2d(8, 8, 1)
            self.last = nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x, places = F.max_pool2d(self.down(self.stem(x)), 2, return_indices=True)
            return self.last(F.max_unpool2d(self.up(x), places, 2))  # type: ignore[no-any-return]

    model, x = Seg(), torch.randn(2, 3, 6, 6)
    with pytest.raises(
        gp.GrowpruneError, match=r"2 each since it is added to what other layers make, .* the option coupled"
    ):
        gp.Pruner(model, x, gp.OneShot())
    pruner = gp.Pruner(model, x, gp.OneShot(), coupled=True)
    agree(model, pruner, torch.randn(2, 3, 6, 6))
    small = pruner.compact()
    assert (small.down.out_channels, small.up.in_channels, small.up.out_channels) == (4, 4, 4)


def test_places_are_no_channels_that_could_go() -> None:
    class Warp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.wide, self.last = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 8, 1), nn.Conv2d(8, 2, 1)
            self.places = nn.Conv2d(6, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            places = self.places(x).movedim(1, -1).tanh()
            return self.last(F.grid_sample(self.wide(x), places, align_corners=False))  # type: ignore[no-any-return]

    pruner = gp.Pruner(Warp(), torch.randn(2, 3, 6, 6), gp.OneShot())
    assert pruner.stays["places"] == "grid_sampler() needs all of its channels"
    assert pruner.compact().wide.out_channels == 4


def test_weights_that_autocast_copies_are_the_layers() -> None:
    class Low(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.net(x).float()  # type: ignore[no-any-return]

    pruner = gp.Pruner(Low(), torch.randn(1, 3, 8, 8), gp.OneShot())
    assert [(layer.name, layer.size) for layer in pruner.groups.layers] == [("net.2", 8)]
    assert pruner.compact().net[2].weight.shape == (4, 8, 3, 3)


def test_heads_of_queries_may_share_one_of_values() -> None:
    """Grouped-query attention, as in Llama: its own widths stay, what lies behind it goes."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.q, self.k, self.v = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            q, k, v = (part(x).view(2, 5, -1, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).reshape(2, 5, 16)
            return self.down(F.silu(self.up(x + y)))  # type: ignore[no-any-return]

    assert not trace(Grouped(), torch.randn(2, 5, 6)).unknown
    pruner = gp.Pruner(Grouped(), torch.randn(2, 5, 6), gp.OneShot())
    assert [(layer.name, layer.size) for layer in pruner.groups.layers] == [("up", 32)]
    assert pruner.skipped == {}
    pruner.compact()


class Conv1D(nn.Module):
    """As in transformers: a linear layer whose forward asks for the width that it keeps as a number."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


def test_the_linear_layer_of_gpt_2_knows_its_new_width() -> None:
    net = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), Conv1D(32, 16), nn.ReLU(), Conv1D(16, 32), nn.ReLU(), Conv1D(2, 16)
    )
    pruner = gp.Pruner(net, torch.randn(2, 5, 6), gp.OneShot())
    small = pruner.compact()
    assert [(each.nx, each.nf) for each in (small[2], small[4], small[6])] == [(16, 16), (16, 8), (8, 2)]
    assert pruner.skipped == {}


@pytest.mark.parametrize("both", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_what_a_recurrent_layer_takes_in_goes(kind: type[nn.RNNBase], both: bool) -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(8 * (1 + both), 2)
            self.read = kind(32, 8, 2, batch_first=True, bidirectional=both)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.read(torch.relu(self.b(torch.relu(self.a(x)))))[0][:, -1])  # type: ignore[no-any-return]

    model, x = Read(), torch.randn(2, 5, 6)
    pruner = gp.Pruner(model, x, gp.OneShot())
    assert ([layer.name for layer in pruner.groups.layers], pruner.skipped) == (["b"], {})
    agree(model, pruner, torch.randn(3, 7, 6))
    small = pruner.compact()
    assert (small.read.input_size, small.read.weight_ih_l0.shape[1], small.read.weight_ih_l1.shape[1]) == (
        16, 16, 8 * (1 + both),
    )  # fmt: skip
    assert len(small.read.all_weights[0][0]) == len(model.read.all_weights[0][0])
    small(x).sum().backward()
    fast = gp.Pruner(model, x, gp.OneShot(), ratios=gp.Speedup(1.2)).compact()
    assert gp.speedup(gp.measure(model, x), gp.measure(fast, x)) == pytest.approx(1.2, rel=0.03)


def test_the_state_that_a_recurrent_layer_begins_with_stays() -> None:
    class Begun(nn.Module):
        def __init__(self, packed: bool = False) -> None:
            super().__init__()
            self.a, self.begin, self.b = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 8)
            self.read, self.packed = nn.GRU(8, 4, batch_first=True), packed
            self.out = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            state, x = self.begin(x[:, 0])[None], self.b(x)
            x = pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True) if self.packed else x
            return self.out(self.read(x, state)[1][0])  # type: ignore[no-any-return]

    pruner = gp.Pruner(Begun(), torch.randn(2, 5, 6), gp.OneShot())
    packed = gp.Pruner(Begun(packed=True), torch.randn(2, 5, 6), gp.OneShot())
    assert (packed.skipped, packed.stays["begin"]) == ({}, "gru() needs all of its channels")
    assert pruner.stays["begin"] == "gru() needs all of its channels"
    assert pruner.compact().read.input_size == 4


class Rounded(nn.Conv2d):
    """Computes with its weights before it uses them, as training for a quantised network does."""

    def forward(self, x: Tensor) -> Tensor:
        step = self.weight.abs().amax() / 127
        return F.conv2d(x, (self.weight / step).round() * step, self.bias)


def normed() -> nn.Conv2d:
    return nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1))  # type: ignore[no-any-return]


def spectral() -> nn.Conv2d:
    return nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 1))  # type: ignore[no-any-return]


def normed_by_hook() -> nn.Conv2d:
    return nn.utils.weight_norm(nn.Conv2d(8, 8, 1))  # type: ignore[no-any-return]


def masked_by_hook() -> nn.Conv2d:
    prune.l1_unstructured(layer := nn.Conv2d(8, 8, 1), "weight", amount=0.5)  # type: ignore[no-untyped-call]
    return layer


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", [normed, spectral, normed_by_hook, masked_by_hook, lambda: Rounded(8, 8, 1)])
def test_weights_that_are_computed_before_each_use_stay(make: Callable[[], nn.Conv2d], tmp_path: Path) -> None:
    """Their layer keeps all it has, the others need not; in training, in files, and in single weights."""

    def build() -> nn.Module:
        plain = (nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), make(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1))
        return nn.Sequential(*(each for layer in plain for each in (layer, nn.ReLU())))

    torch.manual_seed(0)
    model, x = build(), torch.randn(2, 3, 4, 4)
    pruner = gp.Pruner(model, x, gp.GReg1(ku=1, ks=2, delta_lambda=3.0, tau=6.0))
    assert [layer.name for layer in pruner.groups.layers] == ["6"]
    assert (pruner.skipped, pruner.stays["4"]) == ({}, "its weights are computed before each use")
    assert pruner.stays["2"] == "conv2d() needs all of its channels"
    pruner.attach(optimizer := torch.optim.SGD(model.parameters(), 0.1))
    while not pruner.done:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    gp.save(small := pruner.compact(optimizer=optimizer).eval(), tmp_path / "small.safetensors")
    assert torch.equal(gp.load(tmp_path / "small.safetensors", build).eval()(x), small(x))
    assert small[6].out_channels == 4
    weights = gp.Pruner(model, x, gp.OneShot(), granularity="weight")
    assert ("4" in weights.stays, "4" in weights.masks()) == (True, False)


def test_a_model_of_such_layers_alone_is_told_so() -> None:
    with pytest.raises(gp.GrowpruneError, match=r"2 stay .* its weights are computed before each use \(0, \.\.\.\)"):
        gp.Pruner(nn.Sequential(Rounded(3, 8, 1), Rounded(8, 2, 1)), torch.randn(1, 3, 4, 4), gp.OneShot())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scripted_activation_keeps_nothing_from_going(tmp_path: Path) -> None:
    def build() -> nn.Module:
        act = torch.jit.script(nn.Sequential(nn.ReLU()))
        return nn.Sequential(nn.Conv2d(3, 8, 1), act, nn.Conv2d(8, 8, 1), act, nn.Conv2d(8, 2, 1))

    x = torch.randn(1, 3, 4, 4)
    gp.save(small := gp.Pruner(build(), x, gp.OneShot()).compact(), tmp_path / "small.safetensors")
    assert small[2].out_channels == 4
    assert torch.equal(gp.load(tmp_path / "small.safetensors", build)(x), small(x))


def test_flattening_what_is_flat_is_nothing() -> None:
    net = nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4), nn.Linear(4, 2)
    )
    pruner = gp.Pruner(net, torch.randn(3, 6), gp.OneShot())
    assert [layer.name for layer in pruner.groups.layers] == ["2", "5"]


def test_a_detector_that_finds_nothing_is_traced() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 5, 1)

        def forward(self, x: Tensor) -> Any:
            rows = self.head(torch.relu(self.body(torch.relu(self.stem(x))))).flatten(2).transpose(1, 2)[0]
            found = rows[rows[:, 4] > 1e9, :4]
            return SimpleNamespace(rows=rows, found=torch.cat([found, found]))

    pruner = gp.Pruner(Detector(), torch.randn(1, 3, 8, 8), gp.OneShot())
    assert [layer.name for layer in pruner.groups.layers] == ["body"]
    pruner.compact()


def test_a_rule_that_fails_costs_a_layer_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise IndexError

    monkeypatch.setitem(__import__("growprune.rules").rules.RULES, "flip", fails)
    pruner = gp.Pruner(Between(lambda h: h.flip(-1), 8), torch.randn(3, 3, 6, 6), gp.OneShot(), ratios=0.5)
    assert pruner.stays["wide"] == "flip() needs all of its channels"
    assert [layer.name for layer in pruner.groups.layers] == ["last"]


def test_what_only_training_returns_stays() -> None:
    """It is computed in evaluation too, where nobody reads it: deep supervision, features for a loss."""

    class Supervised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
            self.aux, self.out = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Any:
            x = torch.relu(self.b(torch.relu(self.a(x))))
            aux, features = self.aux(x), torch.relu(self.c(x))
            return (self.out(features), aux, features) if self.training else self.out(features)

    pruner = gp.Pruner(Supervised(), torch.randn(1, 3, 4, 4), gp.OneShot())
    returned = "it makes what the model returns"
    assert {name: pruner.stays[name] for name in ("aux", "out", "c")} == dict.fromkeys(("aux", "out", "c"), returned)
    small = pruner.compact()
    assert [t.shape[1] for t in small.train()(torch.randn(2, 3, 4, 4))] == [4, 4, 8]
    assert small.b.out_channels == 4


def test_what_nobody_reads_stays() -> None:
    """Of what it is for nothing can be known: a model that cannot train on its input alone may return it there."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.aux, self.out = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 2)

        def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
            x = self.b(self.a(x))
            aux, out = self.aux(x), self.out(x)
            if self.training:
                assert targets is not None
                return F.cross_entropy(out, targets) + F.cross_entropy(aux, targets)
            return out

    pruner = gp.Pruner(Heads(), torch.randn(2, 3), gp.OneShot())
    assert pruner.stays["aux"] == "no layer reads what it makes"
    assert torch.isfinite(pruner.compact().train()(torch.randn(2, 3), torch.tensor([0, 1])))


def test_scores_that_are_masked_are_compared_as_others_are() -> None:
    """A token that cannot come has −∞; what differs elsewhere is seen all the same, and NaN is nothing's equal."""

    class Masked(nn.Module):
        def __init__(self, by: float, wide: bool = False) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 4)
            self.by, self.wide = by, wide

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(self.a(x))
            y = self.out(x) * (x.shape[1] if self.wide else 1)
            return y.masked_fill(torch.tensor([True, False, False, False]), self.by)

    x = torch.randn(2, 3)
    assert gp.Pruner(Masked(-torch.inf), x, gp.OneShot()).compact().b.out_features == 4
    said = "without a filter of 'b' it fails: the output changes by"
    with pytest.warns(UserWarning, match="1 layer stays"), pytest.raises(gp.GrowpruneError, match=said):
        gp.Pruner(Masked(-torch.inf, wide=True), x, gp.OneShot())
    with pytest.raises(gp.GrowpruneError, match="puts out NaN"):
        gp.Pruner(Masked(torch.nan), x, gp.OneShot())
    second = nn.ModuleDict({"first": Masked(0.0), "second": Masked(torch.nan)})
    second.forward = lambda x: [net(x) for net in second.values()]  # type: ignore[method-assign]
    with pytest.raises(gp.GrowpruneError, match="puts out NaN"):
        gp.Pruner(second, x, gp.OneShot())


def test_a_convolution_of_a_buffer_says_what_becomes_of_it() -> None:
    blur = nn.Conv2d(8, 8, 1, bias=False)
    kernel = blur.weight.data
    del blur.weight
    blur.register_buffer("weight", kernel)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), blur, nn.Conv2d(8, 2, 1))
    pruner = gp.Pruner(model, torch.randn(1, 3, 4, 4), gp.OneShot())
    assert ("2" in pruner.stays) != ("2" in pruner.masks())
    single = gp.Pruner(model, torch.randn(1, 3, 4, 4), gp.OneShot(), granularity="weight")
    assert single.stays["2"] == "its weight is a buffer, which nothing trains"


DRAWN: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x * torch.empty_like(x).bernoulli_(0.5) + torch.randn_like(x),
    lambda x: x + torch.randn(x.shape),
    lambda x: x * x.new_empty(1, x.shape[1]).bernoulli_(0.9),
)


def test_noise_of_training_keeps_nothing_from_going() -> None:
    """A dropout by hand; noise in evaluation does, for a narrower network draws other numbers."""

    class Noisy(nn.Module):
        def __init__(self, always: bool, drawn: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.a, self.b, self.c, self.always = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 4), always
            self.out, self.drawn = nn.Linear(4, 2), drawn

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(self.a(x))
            if self.training or self.always:
                x = self.drawn(x)
            return self.out(self.c(x))  # type: ignore[no-any-return]

    for drawn in DRAWN:
        free, kept = (gp.Pruner(Noisy(always, drawn), torch.randn(2, 3), gp.OneShot()) for always in (False, True))
        assert [layer.name for layer in free.groups.layers] == ["b", "c"]
        assert [layer.name for layer in kept.groups.layers] == ["c"]
        assert kept.skipped == {}
