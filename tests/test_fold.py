"""What vanished filters still send onward: folded exactly where it is a constant, into a bias or a norm of its own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import growprune as gp
from strategies import randomize

GONE = slice(0, None, 2)


def stray(small: nn.Module, model: nn.Module, x: Tensor) -> float:
    """The largest relative error over all that it puts out."""
    with torch.no_grad():
        ours, theirs = small.eval()(x), model.eval()(x)
    pairs = [(ours, theirs)] if isinstance(ours, Tensor) else list(zip(ours, theirs, strict=True))
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def drawn(model: nn.Module) -> nn.Module:
    return randomize(model, torch.Generator().manual_seed(0)).eval()


def folded(model: nn.Module, x: Tensor, layer: str, **how: Any) -> nn.Module:
    pruner = gp.Pruner(model, x, gp.OneShot(), ratios={layer: 0.5})
    assert (~pruner.masks()[layer]).nonzero().flatten().tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    return pruner.compact(**how)


@pytest.mark.parametrize(
    "reader",
    [
        lambda: nn.Conv2d(16, 8, 1),
        lambda: nn.Conv2d(16, 8, 1, bias=False),
        lambda: nn.ConvTranspose2d(16, 8, 1),
        lambda: nn.ConvTranspose2d(16, 8, 1, bias=False),
    ],
)
def test_whatever_kind_of_layer_reads_them(reader: Any) -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    model = drawn(nn.Sequential(*head, reader(), nn.ReLU(), nn.Conv2d(8, 2, 1)))
    with torch.no_grad():
        model[2].weight[GONE] = 0
        model[3].running_mean[GONE] = 0
        model[3].bias.fill_(1.0)
    x = torch.randn(4, 3, 8, 8)
    folding, plain = (stray(folded(model, x, "2", fold=fold), model, x) for fold in (True, False))
    assert plain > 1e-2
    assert folding < 1e-5


class Turned(nn.Module):
    """A transformers' layer, the other way round than torch's; scaled besides, or not."""

    def __init__(self, **how: float) -> None:
        super().__init__()
        self.i, self.c, self.how = nn.Linear(6, 8), nn.Linear(8, 16), how
        self.weight, self.bias = nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, F.relu(self.c(F.relu(self.i(x)))), self.weight, **self.how)


def test_a_transformers_layer_the_other_way_round_reads_them_too() -> None:
    model, x = drawn(Turned()), torch.randn(4, 6)
    with torch.no_grad():
        model.c.weight[GONE] = 0
        model.c.bias[GONE] = 1.0
    assert stray(folded(model, x, "c"), model, x) < 1e-5
    assert stray(folded(model, x, "c", fold=False), model, x) > 1e-2


@pytest.mark.parametrize("how", [{"alpha": 2.0}, {"beta": 0.5}])
def test_a_product_that_is_scaled_besides_is_left_alone(how: dict[str, float]) -> None:
    """What its bias would have to be hangs on both numbers."""
    model = drawn(Turned(**how))
    small = gp.Pruner(model, torch.randn(4, 6), gp.OneShot(), ratios={"c": 0.5}).compact()
    assert torch.equal(small.bias, model.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ratios", [{"m": 0.5}, {"w": 0.5}, {"m": 0.5, "w": 0.5}])
def test_a_weight_that_is_read_both_ways_round_is_left_alone(ratios: dict[str, float], bias: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m, self.w, self.t = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 12, 1, bias=bias), nn.Conv2d(16, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            z = F.relu(self.w(F.softplus(self.m(x))))
            return self.t(F.conv_transpose2d(z, self.w.weight))

    x = torch.randn(2, 3, 8, 8)
    small = gp.Pruner(drawn(Tied()), x, gp.OneShot(), ratios=ratios).compact()
    assert (small.m.out_channels, small.w.out_channels) == (16 - 8 * ("m" in ratios), 12 - 6 * ("w" in ratios))
    assert small(x).shape == (2, 3, 6, 6)


class Levels(nn.Module):
    """One layer that reads two levels: each with a norm of its own, the second three times as large, or both with one,
    or with one beside it."""

    def __init__(self, kind: str, bias: bool) -> None:
        super().__init__()
        self.kind = kind
        self.i, self.c, self.shared = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1, bias=bias)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.o = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        h = F.relu(self.c(F.relu(self.i(x))))
        if self.kind == "beside":
            made = self.shared(h)
            return [self.o(F.relu(self.norms[0](made))), self.o(made)]
        norms = self.norms if self.kind == "own" else (self.norms[0], self.norms[0])
        levels = h, F.avg_pool2d(h, 2) * (3 if self.kind == "own" else 1)
        return [self.o(F.relu(norm(self.shared(level)))) for norm, level in zip(norms, levels, strict=True)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["own", "one", "beside"])
def test_a_norm_takes_it_only_if_it_is_the_layers_own(kind: str, bias: bool) -> None:
    model, x = drawn(Levels(kind, bias)), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        model.c.weight[GONE] = 0
        model.c.bias[GONE] = 1.0
    small = folded(model, x, "c")
    assert stray(small, model, x) < 1e-5
    kept = small.shared.bias is None if model.shared.bias is None else torch.equal(small.shared.bias, model.shared.bias)
    assert kept == (kind == "own")
    assert stray(folded(model, x, "c", fold=False), model, x) > 1e-2


def test_a_norm_does_not_take_what_the_model_puts_out_as_well() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.i, self.c, self.r = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1, bias=False)
            self.norm = nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> list[Tensor]:
            made = self.r(F.relu(self.c(F.relu(self.i(x)))))
            return [self.norm(made), made]

    model, x = drawn(Both()), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        model.c.weight[GONE] = 0
        model.c.bias[GONE] = 1.0
    small = folded(model, x, "c")
    assert small.r.bias is not None
    assert stray(small, model, x) < 1e-5


def test_two_layers_with_one_norm_each_have_a_bias() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.i, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 1)
            self.one, self.other = (nn.Conv2d(16, 8, 1, bias=False) for _ in range(2))
            self.norm, self.o = nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> list[Tensor]:
            h = F.relu(self.c(F.relu(self.i(x))))
            return [self.o(F.relu(self.norm(layer(h)))) for layer in (self.one, self.other)]

    model, x = drawn(Two()), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        model.c.weight[GONE] = 0
        model.c.bias[GONE] = 1.0
    small = folded(model, x, "c")
    assert stray(small, model, x) < 1e-5
    assert torch.equal(small.norm.running_mean, model.norm.running_mean)


def test_a_layer_called_several_times_gets_the_mean_of_what_was_sent() -> None:
    class Twice(nn.Module):
        """Two sizes of the same constant: a bias can only be right on average."""

        def __init__(self) -> None:
            super().__init__()
            self.i, self.c, self.r = nn.Linear(4, 8), nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> list[Tensor]:
            h = F.relu(self.c(F.relu(self.i(x))))
            return [self.r(h), self.r(3 * h)]

    model, x = drawn(Twice()), torch.randn(4, 4)
    with torch.no_grad():
        model.c.weight[GONE] = 0
        model.c.bias[GONE] = 1.0
        small = folded(model, x, "c")
        once = model.r.weight[:, GONE].sum(1)
        torch.testing.assert_close(small.r.bias, model.r.bias + 2 * once)


@pytest.mark.parametrize("kind", ["plain norm", "groups", "scale"])
def test_what_is_sent_onward_is_what_the_norm_makes_of_it(kind: str) -> None:
    """A norm without scale and shift whose mean has followed the bias; one that keeps no mean; a scale alone."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.rand(16, 1, 1) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    norm = {"plain norm": nn.BatchNorm2d(16, affine=False), "groups": nn.GroupNorm(8, 16), "scale": Scaled()}[kind]
    model = drawn(
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 16, 1), norm, nn.ReLU(), nn.Conv2d(16, 4, 1))
    )
    lost = torch.arange(16) // 2 % 2 == 0 if kind == "groups" else torch.arange(16) % 2 == 0
    with torch.no_grad():
        model[2].weight[lost] = 0
        model[2].bias.copy_(torch.linspace(0.5, 2.0, 16))
        if kind == "plain norm":
            norm.running_mean.copy_(model[2].bias)
            norm.running_var.fill_(1e-6)  # of what has all but vanished
    x = torch.randn(4, 3, 8, 8)
    pruner = gp.Pruner(model, x, gp.OneShot(), ratios={"2": 0.5})
    goes = ~pruner.masks()["2"]
    assert torch.equal(goes.repeat_interleave(16 // len(goes)), lost)
    assert stray(pruner.compact(), model, x) < 1e-4
