"""What a proof compares: every output by its own size, whatever holds it; and that the smaller network can train."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import growprune as gp
from growprune.proof import apart, telling
from growprune.running import leaves

X = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))


@dataclass(slots=True)
class Slotted:
    logits: Tensor


@dataclass
class Outer:
    inner: Slotted
    itself: Any = None


class Plain:
    """What no library knows, as deep as it goes."""

    def __init__(self, value: Any) -> None:
        self.value = value


def circular(z: Tensor) -> Outer:
    result = Outer(Slotted(z))
    result.itself = result
    return result


LEGAL = torch.tensor([True] * 4 + [False])
OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda z: z,
    "masked": lambda z: z.masked_fill(~LEGAL, -1e9),
    "masked by the least": lambda z: z.masked_fill(~LEGAL, torch.finfo(torch.float).min),
    "masked for good": lambda z: z.masked_fill(~LEGAL, -torch.inf),
    "beside a large one": lambda z: {"policy": z, "value": 5e4 + z.detach().sum() * 0},
    "slots": Slotted,
    "nested": lambda z: Outer(Slotted(z)),
    "circular": circular,
    "objects": lambda z: Plain([Plain(z)]),
    "complex": lambda z: torch.complex(torch.ones_like(z), z),
}


class Counting(nn.Module):
    """Its numbers depend on how wide its hidden layer is."""

    def __init__(self, out: Callable[[Tensor], Any], counts: bool = True) -> None:
        super().__init__()
        self.out, self.counts = out, counts
        self.a, self.b, self.o = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.b(F.relu(self.a(x))))
        return self.out(self.o(h * (16 / h.shape[1] if self.counts else 1.0)))


@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_wrong_output_is_seen_whatever_holds_it(kind: str) -> None:
    torch.manual_seed(0)
    refused = pytest.raises(gp.GrowpruneError, match="no filter of 'b' can go: the output changes by")
    with refused, pytest.warns(UserWarning, match="1 layer stays"):
        gp.Pruner(Counting(OUTPUTS[kind]), X, gp.OneShot(), ratios={"b": 0.5})
    small = gp.Pruner(Counting(OUTPUTS[kind], counts=False), X, gp.OneShot(), ratios={"b": 0.5}).compact()
    assert small.b.out_features == 8


def test_an_output_of_no_numbers_proves_nothing_and_that_is_said() -> None:
    with pytest.warns(UserWarning, match="puts out no numbers on the example") as heard:
        gp.Pruner(Counting(lambda z: z[:0]), X, gp.GReg1(), ratios={"b": 0.5})
    assert len(heard) == 1


class Unbiased(nn.Module):
    """Zeros come out where zeros go in."""

    def __init__(self, zero: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.o = (nn.Conv2d(*s, 3, padding=1, bias=False) for s in ((3, 8), (8, 8), (8, 2)))
        if zero:  # as some heads begin
            nn.init.zeros_(self.o.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(F.relu(self.b(F.relu(self.a(x)))))
        return out


def test_an_example_that_shows_no_filter_proves_nothing_and_that_is_said() -> None:
    """Before the first step if there is one, and when filters are removed."""
    zeros, said = torch.zeros(1, 3, 6, 6), "the same on the example without any filter of the layers that lose some"
    pruner = gp.Pruner(Unbiased(), zeros, gp.OneShot())
    with pytest.warns(UserWarning, match=said):
        pruner.compact()
    with pytest.warns(UserWarning, match=said) as heard:
        gp.Pruner(Unbiased(), zeros, gp.GReg1())
    assert heard[0].filename == __file__
    with pytest.warns(UserWarning, match=said):  # which will lose some is not known yet
        gp.Pruner(Unbiased(), zeros, gp.GReg2(), ratios=gp.Global(0.5))


class Branches(nn.Module):
    """Two networks side by side, each with an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Unbiased(), Unbiased()

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [self.one(x), self.other(y)]


def test_what_an_example_shows_of_layers_that_stay_proves_nothing_of_those_that_go() -> None:
    example = torch.zeros(1, 3, 6, 6), torch.randn(1, 3, 6, 6)
    with pytest.warns(UserWarning, match="without any filter of the layers that lose some"):
        gp.Pruner(Branches(), example, gp.OneShot(), ratios={"one.b": 0.5}).compact()
    gp.Pruner(Branches(), example, gp.OneShot(), ratios={"other.b": 0.5}).compact()


class Needing(Unbiased):
    """Puts out the same whatever goes, and fails where nothing comes through."""

    def forward(self, x: Tensor) -> Tensor:
        if not bool((out := super().forward(x)).any()):
            raise ValueError("nothing comes through")
        return out.sign().abs()


def test_of_a_model_that_cannot_run_without_its_filters_nothing_is_said() -> None:
    gp.Pruner(Needing(), torch.rand(1, 3, 6, 6), gp.OneShot(), ratios={"b": 0.5}).compact()


class Rooted(nn.Module):
    """The root of what may have become negative."""

    offset = 100.0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(self.body(x) + self.offset)


def test_what_puts_out_nan_by_the_time_of_removal_is_refused() -> None:
    """NaN is no more than any bound; nor is it less."""
    model = Rooted()
    pruner = gp.Pruner(model, X, gp.OneShot())
    model.offset = -100.0
    with pytest.raises(gp.GrowpruneError, match="puts out NaN on the example, so no removal can be proved"):
        pruner.compact()


class Scaled(nn.Module):
    """As ConvNeXt begins: what a block adds is next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.a, self.b, self.o = (nn.Linear(*s) for s in ((4, 8), (8, 16), (16, 8), (8, 2)))
        self.scale = nn.Parameter(torch.full((8,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.i(x)
        out: Tensor = self.o(x + self.scale * self.b(F.relu(self.a(x))))
        return out


def test_what_is_lost_in_rounding_asks_for_trained_weights() -> None:
    x = torch.randn(2, 4)
    gp.Pruner(Scaled(), x, gp.OneShot()).compact()
    with pytest.warns(UserWarning, match=r"lost in rounding\), .* another example, or trained weights"):
        gp.Pruner(Scaled().bfloat16(), x.bfloat16(), gp.OneShot()).compact()


@pytest.mark.parametrize("zero", [False, True])
def test_one_that_shows_some_is_no_matter_of_words(zero: bool) -> None:
    """Nor is it a head that has not begun to train; zeros show what a bias comes to."""
    gp.Pruner(Unbiased(zero), torch.randn(1, 3, 6, 6), gp.OneShot()).compact()
    biased = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1))
    gp.Pruner(biased, torch.zeros(1, 3, 6, 6), gp.OneShot()).compact()


def test_every_output_counts_by_its_own_size() -> None:
    large, small = torch.full((3,), 1e4, dtype=torch.double), torch.ones(2, dtype=torch.double)
    assert apart([large, small * 1.5], [large, small]) == 0.5
    assert apart([large + 1, small], [large, small]) == 1e-4
    assert apart([small], [large]) == float("inf")
    assert apart([], []) == 0.0
    nan = torch.tensor([float("nan")]).double()
    assert not apart([nan, small], [nan, small]) <= 1.0


def test_what_is_the_same_in_both_tells_nothing_and_rounding_is_none() -> None:
    here = torch.tensor([-1e9, 0.1, 0.2]).double()
    there = torch.tensor([-1e9, 0.3, 0.2]).double()
    (x,), (y,) = telling([there], [here])
    assert (x.tolist(), y.tolist()) == ([pytest.approx(0.3)], [pytest.approx(0.1)])
    (x,), (y,) = telling([here + 1e-6], [here])  # of 1e9 that is what double precision rounds
    assert not len(x)
    (x,), (y,) = telling([there * 1e-6], [here * 1e-6 - 1e3])  # nothing there is the same, and large
    assert len(x) == 3


class Pixels(nn.Module):
    """Makes float32 of what it takes in, whatever its weights are; what comes out second is zero but for rounding."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.eager = eager
        self.i, self.c, self.d, self.o = (nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3), nn.Conv2d(64, 48, 3),
                                          nn.Linear(48, 10))  # fmt: skip

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.i(x.float() / 255)
        if self.eager and h.dtype == torch.double:
            raise RuntimeError("no double precision here")
        y = self.o(self.d(self.c(h.relu()).relu()).relu().mean((2, 3)))
        return {"logits": y, "offset": (y - y.mean(1, keepdim=True)).mean(1)}


@pytest.mark.parametrize("eager", [False, True])
def test_what_is_zero_but_for_rounding_is_not_taken_for_a_difference(eager: bool) -> None:
    """Twice the digits tell; also of a forward that turns into float32 by itself. Where they cannot be had, all outputs
    are compared together."""
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randint(0, 255, (2, 3, 16, 16), dtype=torch.uint8)
        small = gp.Pruner(Pixels(eager), x, gp.OneShot()).compact()
        assert small.d.out_channels == 24


def test_a_forward_that_makes_float32_hides_nothing_behind_a_large_output() -> None:
    class Cast(Counting):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.float() / 255)

    torch.manual_seed(0)
    x = torch.randint(0, 255, (4, 10), dtype=torch.uint8)
    large = OUTPUTS["beside a large one"]
    with pytest.raises(gp.GrowpruneError, match="no filter of 'b'"), pytest.warns(UserWarning, match="1 layer stays"):
        gp.Pruner(Cast(large), x, gp.OneShot(), ratios={"b": 0.5})
    gp.Pruner(Cast(large, counts=False), x, gp.OneShot(), ratios={"b": 0.5}).compact()


@pytest.mark.parametrize("constant", [-1e9, 5e4])
def test_nor_does_one_that_cannot_run_in_double_behind_what_is_the_same_in_both(constant: float) -> None:
    class Single(Counting):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x @ torch.eye(10))

    torch.manual_seed(0)

    def out(z: Tensor) -> tuple[Tensor, Tensor]:
        return z, torch.full((3,), constant)

    with pytest.raises(gp.GrowpruneError, match="no filter of 'b'"), pytest.warns(UserWarning, match="1 layer stays"):
        gp.Pruner(Single(out), X, gp.OneShot(), ratios={"b": 0.5})
    gp.Pruner(Single(out, counts=False), X, gp.OneShot(), ratios={"b": 0.5}).compact()


def test_a_network_of_complex_numbers_is_proved_to_its_own_digits() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.o = (nn.Linear(*s, dtype=torch.cfloat) for s in ((10, 16), (16, 16), (16, 5)))

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x.to(torch.cfloat)).tanh()
            return self.o(self.b(h).tanh())

    torch.manual_seed(0)
    assert gp.Pruner(Waves(), X, gp.OneShot(), ratios={"b": 0.5}).compact().b.out_features == 8


def test_tensors_are_found_once_each() -> None:
    t, u = torch.ones(1), torch.zeros(2)
    assert [id(each) for each in leaves([circular(t), {"a": Plain((u, 3, "text", None))}])] == [id(t), id(u)]
    assert not list(leaves(Plain(nn.Linear(2, 2))))  # a network is no output
    deep: Any = t
    for _ in range(5000):
        deep = Plain(deep)
    assert [id(each) for each in leaves([Plain([deep, torch.nn.functional, F.relu]), u])] == [id(t), id(u)]


# -- training ----------------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """In training it adds noise of a width that is written into it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 3)
        self.norm, self.o = nn.BatchNorm2d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(F.relu(self.a(x)))
        if self.training:
            noise = torch.bernoulli(torch.full((len(x), 16, 1, 1), 0.9)) if self.kind == "drop" else None
            h = h + 0.1 * torch.randn(len(x), 16, 1, 1) if noise is None else h * noise / 0.9
        return self.o(F.relu(self.norm(self.c(F.relu(h)))).mean((2, 3)))


@pytest.mark.parametrize("kind", ["drop", "add"])
def test_a_network_that_could_not_train_is_no_plan(kind: str) -> None:
    x = torch.randn(1, 3, 7, 7)
    with pytest.warns(UserWarning, match="1 layer stays: .* 'b' \\(in training RuntimeError"):
        small = gp.Pruner(Noisy(kind), x, gp.OneShot(), ratios=0.5).compact()
    assert (small.b.out_channels, small.c.out_channels) == (16, 4)
    small.train()(torch.randn(4, 3, 7, 7))


def test_what_only_so_many_make_impossible_is_found_before_the_first_step() -> None:
    class Half(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            h = self.b(F.relu(self.a(x)))
            if self.training and h.shape[1] < 12:
                raise RuntimeError("too narrow to train")
            return self.o(F.relu(self.norm(self.c(F.relu(h)))).mean((2, 3)))

    with pytest.raises(gp.GrowpruneError, match="fails on the example in training mode: too narrow to train; name"):
        gp.Pruner(Half(""), torch.randn(1, 3, 7, 7), gp.GReg1(), ratios=0.5)


def test_a_network_that_does_not_train_on_the_example_at_all_is_proved_all_the_same() -> None:
    class Needy(Counting):
        def forward(self, x: Tensor) -> Any:
            if self.training:
                raise ValueError("training needs targets")
            return super().forward(x)

    small = gp.Pruner(Needy(OUTPUTS["plain"], counts=False), X, gp.OneShot(), ratios={"b": 0.5}).compact()
    assert small.b.out_features == 8


# -- examples ----------------------------------------------------------------------------------------------------------


def test_a_mapping_of_another_kind_is_a_dict_of_arguments() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.o = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 2, 1)

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.o(F.relu(self.b(F.relu(self.a(pixel_values)))))

    for kind in (dict, UserDict):
        pruner = gp.Pruner(Named(), kind(pixel_values=torch.randn(1, 3, 8, 8)), gp.OneShot())
        assert list(pruner.masks()) == ["b"]
        pruner.compact()


class Graph(nn.Module):
    def __init__(self, adjacency: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.a, self.b, self.o = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, adjacency: Tensor | None = None) -> Tensor:
        along = self.adjacency if adjacency is None else adjacency
        return self.o(F.relu(torch.sparse.mm(along, self.b(F.relu(torch.sparse.mm(along, self.a(x)))))))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("held", [True, False])
def test_a_graph_may_be_sparse(layout: str, held: bool) -> None:
    adjacency = torch.eye(10).to_sparse() if layout == "coo" else torch.eye(10).to_sparse_csr()
    x = torch.randn(10, 5)
    model, example = (Graph(adjacency), x) if held else (Graph(None), (x, adjacency))
    pruner = gp.Pruner(model, example, gp.OneShot())
    assert list(pruner.masks()) == ["b"]
    assert pruner.compact().b.out_features == 8


def test_nan_in_a_sparse_buffer_is_refused() -> None:
    bad = torch.eye(10).to_sparse() * float("nan")
    with pytest.raises(gp.GrowpruneError, match=r"'adjacency' holds NaN or .* diverged.* a lower learning rate$"):
        gp.Pruner(Graph(bad), torch.randn(10, 5))
