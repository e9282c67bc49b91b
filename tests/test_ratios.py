"""How much goes: both list syntaxes, counts, one global ratio, and speed-ups measured on the smaller network."""

import itertools
import math
import re
import tracemalloc
import warnings
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import growprune as gp
from growprune.models import VGG, CifarResNet
from growprune.ratios import ByName, Ranges, Ratios, Spec, Stages, Uniform, pruned_of, read, write
from nets import MLP, TwoConvs, batch, seeded

SMALL = torch.ones(1, 3, 8, 8)
"""An image for the small ResNets."""


def resnet(depth: int = 14, width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return CifarResNet(depth, width=width)


def plan(ratios: Ratios, net: nn.Module | None = None, example: Tensor = SMALL, **options: Any) -> gp.Pruner:
    return gp.Pruner(net or resnet(), example, gp.OneShot(), ratios=ratios, **options)


def lost(pruner: gp.Pruner) -> dict[str, int]:
    return {name: int((~mask).sum()) for name, mask in pruner.masks().items()}


def refused(action: Callable[[], Any], *names: str) -> None:
    """One line that says each of `names`."""
    with pytest.raises(gp.GrowpruneError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    for name in names:
        assert name in message, message


# Reading and writing.


@pytest.mark.parametrize(
    ("given_", "spec"),
    [
        (0.5, Uniform(0.5)),
        (0, Uniform(0.0)),
        ("0.5", Uniform(0.5)),
        ("[0, 0.5, 0.5, 0.5]", Stages((0.0, 0.5, 0.5, 0.5))),
        ("  [0,.75,.75,.32] ", Stages((0.0, 0.75, 0.75, 0.32))),
        ([0, 0.5], Stages((0.0, 0.5))),
        ((0, 0.5), Stages((0.0, 0.5))),
        ("[0:0, 1-15:0.7]", Ranges(((0, 0, 0.0), (1, 15, 0.7)))),
        ("[1 - 15 : 0.7, 0:0]", Ranges(((1, 15, 0.7), (0, 0, 0.0)))),
        ({"fc": 0.5, "conv": 0}, ByName((("fc", 0.5), ("conv", 0.0)))),
        (gp.Global(0.3), gp.Global(0.3)),
        (gp.Global(0.3, stem=True), gp.Global(0.3, None, True)),
        (gp.Speedup(2.5), gp.Speedup(2.5)),
    ],
)
def test_every_form_is_read(given_: Ratios, spec: Spec) -> None:
    assert read(given_) == spec


ratio = st.floats(0, 1, exclude_max=True, allow_subnormal=True)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+){0,3}", fullmatch=True)


@st.composite
def ranges(draw: st.DrawFn) -> Ranges:
    edges = sorted(draw(st.lists(st.integers(0, 200), min_size=2, max_size=12, unique=True)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    ends = [(a, draw(st.sampled_from([a, b])), draw(ratio)) for a, b in pairs]
    return Ranges(tuple(draw(st.permutations(ends))))


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        ratio.map(Uniform),
        st.lists(ratio, min_size=1, max_size=8).map(tuple).map(Stages),
        ranges(),
        st.dictionaries(NAMES, ratio, min_size=1, max_size=5).map(lambda found: ByName(tuple(found.items()))),
    )
)
def test_what_is_written_is_read_again(spec: Spec) -> None:
    assert read(write(spec)) == spec


@pytest.mark.parametrize(
    "text", ["{conv1: 0.5, 'layer1.0': 0.25}", '{"conv1":0.5,"layer1.0":.25}', "{conv1:0.5,layer1.0:0.25}"]
)
def test_names_and_their_ratios_can_be_given_as_text(text: str) -> None:
    """As Python and JSON write them, and without quotes."""
    assert read(text) == ByName((("conv1", 0.5), ("layer1.0", 0.25)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{conv1: 0.5", "has no closing }"),
        ("{conv1 0.5}", "cannot read 'conv1 0.5' in '{conv1 0.5}'; write 'name: ratio'"),
        ("{conv1: half}", "'half' is not a number"),
        ("{}", "'{}' has an empty place"),
        ("50%", "'50%' is not a number: give 0.5, '[0, 0.5, 0.5, 0.5]' by stage, '[0:0, 1-15:0.7]' by layer, or"),
        ("conv1=0.5", "or '{layer1.0.conv1: 0.5}' by name"),
    ],
)
def test_text_that_says_no_ratios(text: str, said: str) -> None:
    with pytest.raises(gp.GrowpruneError, match=re.escape(said)):
        read(text)


def test_a_layer_that_there_is_not_and_none_is_near_has_the_first_ones_listed() -> None:
    said = "has no layer 'nowhere'; ratios can be given for 'fc1' and 'fc2'"
    with pytest.raises(gp.GrowpruneError, match=said.replace(" and ", ", ")):
        gp.Pruner(seeded(MLP), torch.zeros(1, 5, dtype=torch.double), gp.OneShot(), ratios={"nowhere": 0.5})


def test_no_two_global_ratios_are_written_alike() -> None:
    """A report says it so, and a state is known by it."""
    asked = [gp.Global(0.5, at_most, stem) for at_most in (None, 0.5, 0.95) for stem in (False, True)]
    assert len({write(spec) for spec in asked}) == 6
    assert write(asked[-1]) == "global 0.5, 0.95 a layer at most, the stem too"


def test_lists_reach_the_layers_they_speak_of() -> None:
    """By stage: the first convolution of each block; by index: all layers from 0, in the order of execution."""
    by_stage = lost(plan("[0, 0.25, 0.5, 0.75]"))
    assert by_stage == {
        "layer1.0.conv1": 1,
        "layer1.1.conv1": 1,
        "layer2.0.conv1": 4,
        "layer2.1.conv1": 4,
        "layer3.0.conv1": 12,
        "layer3.1.conv1": 12,
    }
    assert lost(plan([0, 0.25, 0.5, 0.75])) == by_stage
    by_index = lost(plan("[0:0, 1:0.25, 3-5:0.5]"))
    assert by_index == {**dict.fromkeys(by_stage, 0), "layer1.0.conv1": 1, "layer1.1.conv1": 2, "layer2.0.conv1": 4}
    by_name = lost(plan({"layer2.1.conv1": 0.5, "conv1": 0.0}))
    assert by_name == {**dict.fromkeys(by_stage, 0), "layer2.1.conv1": 4}
    uniform = lost(plan(0.5, TwoConvs().double(), batch((2, 2, 6, 6), 3)[0]))
    assert uniform == {"conv2": 3}  # the stem is left alone
    weights = lost(plan(0.5, MLP().double(), batch((2, 5), 3)[0], granularity="weight"))
    assert weights == {"fc1": 0, "fc2": 21, "fc3": 9}


# Counting.


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(st.integers(0, 999).map(lambda n: n / 1000), st.integers(0, 10**7 - 1).map(lambda n: n / 10**7)),
    st.one_of(st.integers(1, 2048), st.integers(1, 10**8)),
)
@example(0.55, 100)
@example(0.28, 71_197_200)  # single weights of a large network: the product's rounding error exceeds 1e-9
def test_a_ratio_takes_the_least_whole_number_of_filters(r: float, size: int) -> None:
    """min(⌈r·N⌉, N − 1) exactly, r as it was written: 0.55 of 100 are 55, though 0.55·100 > 55 in binary."""
    assert pruned_of(r, size) == min(math.ceil(Fraction(repr(r)) * size), size - 1)


@given(st.integers(1, 999), st.integers(1, 999), st.integers(1, 100))
def test_a_ratio_that_was_computed_is_the_one_that_was_meant(n: int, m: int, hundreds: int) -> None:
    """n/1000 also as a difference or a multiple, which may be a little more: 1 - 0.7, np.linspace(0, 0.9, 10)[3]. And a
    share of so many, as 16/96."""
    size = 1000 * hundreds
    for ratio in (n / 1000, n * 0.001, n * 1e-4 * 10, (n + m) / 1000 - m / 1000, 1 - (1 - n / 1000)):
        assert pruned_of(ratio, size) == n * hundreds
        assert gp.Global(0.5, at_most=ratio).spared(size, "weight") == size - n * hundreds
    assert pruned_of(n / (n + m), n + m) == n


@pytest.mark.parametrize(
    "kind", [np.float16, *(partial(torch.tensor, dtype=t) for t in (torch.half, torch.bfloat16, torch.float8_e5m2))]
)
@pytest.mark.parametrize("form", [lambda r: r, lambda r: {"conv": r}, gp.Global, lambda r: gp.Global(0.5, at_most=r)])
def test_a_ratio_in_half_precision_is_refused(kind: Any, form: Any) -> None:
    """What was written cannot be told: 0.6875 is eleven of sixteen, and 0.688 in bfloat16."""
    refused(lambda: read(form(kind(0.9))), "ratios: ", "is in half precision", "give it as a Python number")


def test_a_ratio_in_single_precision_is_the_number_that_was_written_in_every_form() -> None:
    """0.55 there is a little more: of 100 filters 56 would go."""
    layers = [nn.Linear(3, 8), nn.Linear(8, 100), nn.Linear(100, 2)]
    for kind in (float, np.float32, torch.tensor):
        r, one = kind(0.55), torch.tensor(1) if kind is torch.tensor else 1
        same = (Uniform(r), Stages((r, r)), Ranges(((0, 3, r),)), ByName((("conv", r),)), gp.Global(r, at_most=r))
        found = [read(spec) for spec in (*same, gp.Global(0.5, at_most=one), gp.Speedup(kind(1.55)))]
        assert [repr(spec) for spec in found] == [
            "Uniform(ratio=0.55)",
            "Stages(ratios=(0.55, 0.55))",
            "Ranges(ranges=((0, 3, 0.55),))",
            "ByName(ratios=(('conv', 0.55),))",
            "Global(ratio=0.55, at_most=0.55, stem=False)",
            f"Global(ratio=0.5, at_most={'1.0' if kind is torch.tensor else '1'}, stem=False)",
            "Speedup(times=1.55, per='network')",
        ]
        assert plan(gp.Global(r), nn.Sequential(*layers), torch.ones(1, 3)).widths()["1"] == [100, 45]


def test_numbers_from_numpy_are_numbers() -> None:
    """As a sweep over np.linspace gives them; one from torch too."""
    half = np.float64(0.5)
    assert lost(plan(torch.tensor(0.5))) == lost(plan(half))
    assert {read(kind(0.55)) for kind in (float, np.float32, np.float64, torch.tensor)} == {read("0.55")}
    by_stage = [np.float64(0), half, half, half]
    for ratios in (half, gp.Global(half), {"layer1.0.conv1": half}, by_stage, gp.Speedup(half * 3.08)):
        assert sum(lost(plan(ratios)).values()) > 0


# What is refused.


@pytest.mark.parametrize(
    ("ratios", "names"),
    [
        ("[0, 0.5]", ("[0.0, 0.5]", "2", "4 stages")),
        ([0, 0.5, 0.5, 0.5, 0.5], ("5", "4 stages")),
        ("[0-14:0.5]", ("14", "13")),
        ("[0-3:0.5, 3-5:0.2]", ("overlap", "0-3:0.5")),
        ("[5-3:0.5]", ("5-3:0.5",)),
        ("[1:1.0]", ("1.0",)),
        ("[1:0.5, 2]", ("'2'",)),
        ("[1:0.5, x:0.2]", ("x:0.2",)),
        ("[a, 0.5, 0.5, 0.5]", ("'a'",)),
        ("[0, 0.5, 0.5, 0.5", ("]",)),
        ("0.5]", ("'0.5]' is not a number",)),
        ("[0:]", ("'0:'",)),
        ("[]", ("empty",)),
        ("[ , ]", ()),
        ("[0,, 0.5, 0.5, 0.5]", ()),
        ("", ("ratios",)),
        ([], ("ratios",)),
        ({}, ("ratios",)),
        ("half", ("half",)),
        (1.0, ("1.0 is outside [0, 1)",)),
        (50, ("50.0 is outside [0, 1); for 50 % give 0.5",)),
        (gp.Global(torch.tensor(50)), ("50.0 is outside [0, 1); for 50 % give 0.5",)),  # type: ignore[arg-type]
        (torch.tensor(0.5, device="meta"), ("device='meta'", "is not a number")),
        (torch.tensor(0.5 + 1j), ("tensor(0.5000+1.j) is not a number",)),
        (gp.Speedup(torch.tensor(2.0, device="meta")), ("is not a number",)),  # type: ignore[arg-type]
        ("[0, 32.5, 0, 0]", ("for 32.5 % give 0.325",)),
        (gp.Global(70), ("for 70 % give 0.7",)),
        (torch.tensor([0.5]), ("tensor([0.5000])",)),
        (-0.1, ("-0.1",)),
        (float("nan"), ("nan",)),
        ("nan", ("nan",)),
        ([0, float("nan"), 0.5, 0.5], ("nan",)),
        (float("inf"), ("inf is outside",)),
        ("[0, inf, 0.5, 0.5]", ("inf is outside",)),
        ({1, 2}, ("cannot read {1, 2}",)),
        (True, ("True",)),
        ([False, 0.5, 0.5, 0.5], ("False",)),
        ({"layer1.0.conv1": False}, ("False",)),
        (None, ("None",)),
        ([0, None, 0.5, 0.5], ("None",)),
        ([0, "x", 0.5, 0.5], ("x",)),
        ({"layer1.0.conv1": None}, ("None",)),
        ({"layer1.0.con1": 0.5}, ("'layer1.0.con1'", "did you mean 'layer1.0.conv1'?")),
        ({"layer1.0.con1": 0.0}, ("'layer1.0.con1'", "did you mean 'layer1.0.conv1'?")),
        ({"layer1.0.conv2": 0.5}, ("'layer1.0.conv2'", "the option coupled")),
        ({"layer1.0.conv1": 1.5}, ("1.5",)),
        ("[2:0.5]", ("'layer1.0.conv2'", "the option coupled")),
        ("[0.5, 0.5, 0.5, 0.5]", ("stem",)),
        (gp.Global(1.0), ("1.0",)),
        (gp.Global(0.5, 1.5), ("at_most", "1.5")),
        (gp.Global(0.5, stem="yes"), ("stem", "yes")),  # type: ignore[arg-type]
        (gp.Global(0.5, float("nan")), ("at_most", "nan")),
        (gp.Global(float("nan")), ("nan",)),
        (gp.Global("0.5"), ("0.5",)),  # type: ignore[arg-type]
        (Ranges(()), ("ratios",)),
        (gp.Speedup(0.5), ("1 or more, not 0.5",)),
        (gp.Speedup(float("nan")), ("nan",)),
        (gp.Speedup(float("inf")), ("inf",)),
        (gp.Speedup("2"), ("2",)),  # type: ignore[arg-type]
        (gp.Speedup(2.0, per="layer"), ("layer",)),  # type: ignore[arg-type]
        (gp.Speedup(1e6), ("1e+06x", "nearest")),
    ],
    ids=repr,
)
def test_bad_ratios_are_refused_by_name(ratios: Any, names: tuple[str, ...]) -> None:
    refused(lambda: plan(ratios), *names)


@pytest.mark.parametrize("value", [1.0, 100.0, 150.0])
def test_what_no_percentage_would_be_is_not_taken_for_one(value: float) -> None:
    with pytest.raises(gp.GrowpruneError, match=rf"ratios: {value} is outside \[0, 1\)$"):
        read(value)


def test_refusals_that_depend_on_the_network() -> None:
    example, net = batch((2, 2, 6, 6), 3)[0], TwoConvs().double()
    refused(lambda: plan("[0, 0.5]", net, example), "no residual stages", "[0.0, 0.5]")
    refused(lambda: plan(gp.Speedup(1.5, per="stage"), net, example), "stage")
    refused(lambda: plan(gp.Speedup(1.5), net, example, granularity="weight"), "speedup: only with granularity filter")
    refused(lambda: plan({"fc": 0.5}, net, example), "'fc'")
    refused(lambda: plan(10**400, net, example), "ratios: 10", "is not a number")


def test_a_huge_range_costs_nothing_to_refuse() -> None:
    """A slip of the finger is refused by its number, not after filling the memory."""
    tracemalloc.start()
    try:
        refused(lambda: plan("[0-1000000:0.5]"), "1000000")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000


# One ratio over all layers.


def least_anywhere(score: dict[str, Tensor], asked: float, at_most: float | None) -> dict[str, Tensor]:
    """By hand: what stays when the least of all go, but each layer's best stay."""
    every = sorted((float(value), name, i) for name, values in score.items() for i, value in enumerate(values))
    going = {(name, i) for _, name, i in every[: min(math.ceil(Fraction(repr(asked)) * len(every)), len(every) - 1)]}
    for name, values in score.items():
        most = math.floor(Fraction(repr(max(0.95, asked) if at_most is None else at_most)) * len(values))
        going -= {(name, int(i)) for i in values.argsort()[min(most, len(values) - 1) :]}
    return {name: torch.tensor([(name, i) not in going for i in range(len(score[name]))]) for name in score}


@pytest.mark.parametrize("at_most", [None, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("asked", [0.0, 0.01, 0.3, 0.5, 0.77, 0.9, 0.97, 0.999])
@pytest.mark.parametrize("sign", [1, -1], ids=["l1", "negative"])
def test_global_takes_the_least_scores_anywhere_and_of_no_layer_too_many(
    asked: float, sign: int, at_most: float
) -> None:
    net = resnet()
    with torch.no_grad():
        net.get_submodule("layer1.0.conv1").weight.mul_(1e-3)  # alone, its scores would all go first
    pruner = plan(gp.Global(asked, at_most), net, criterion=lambda w: sign * w.abs().sum(1))
    masks = pruner.masks()
    assert sum(len(mask) for mask in masks.values()) == 2 * (4 + 8 + 16)
    score = {name: sign * net.get_submodule(name).weight.detach().abs().sum((1, 2, 3)) for name in masks}
    expected = least_anywhere(score, asked, at_most)
    assert {name: mask.tolist() for name, mask in masks.items()} == {n: m.tolist() for n, m in expected.items()}
    assert all(bool(mask.any()) for mask in masks.values())


def test_global_spares_a_twentieth_of_filters_unless_told() -> None:
    """Of the layers whose scores are the least: what they would lose beyond that is not taken elsewhere."""
    net = seeded(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 40, 1), nn.Conv2d(40, 40, 1), nn.Conv2d(40, 2, 1))
    )
    with torch.no_grad():
        net[1].weight.mul_(1e-3)
    example = batch((2, 3, 4, 4), 2)[0]
    assert list(lost(plan(gp.Global(0.5), net, example)).values()) == [38, 0]
    assert list(lost(plan(gp.Global(0.5, at_most=1.0), net, example)).values()) == [39, 0]


def test_global_takes_of_the_stem_if_told() -> None:
    """What is least there goes, and is really removed; a stem that a residual stream is tied to stays in any case."""
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1)))
    with torch.no_grad():
        net[0].weight[:3].mul_(1e-6)
        net[2].weight[5].mul_(1e-6)
    example = batch((2, 3, 4, 4), 2)[0]
    assert lost(plan(gp.Global(0.25), net, example)) == {"2": 2}
    pruner = plan(gp.Global(0.25, stem=True), net, example)
    assert {name: (~mask).nonzero().flatten().tolist() for name, mask in pruner.masks().items()} == {
        "0": [0, 1, 2], "2": [5],
    }  # fmt: skip
    assert [pruner.compact()[i].weight.shape[:2] for i in (0, 2, 3)] == [(5, 3), (7, 5), (2, 7)]
    for coupled in (False, True):  # with the stream, if at all
        tied = [lost(plan(gp.Global(0.5, stem=stem), coupled=coupled)) for stem in (False, True)]
        assert tied[0] == tied[1]


@pytest.mark.parametrize("stem", [False, True])
def test_global_over_single_weights(stem: bool) -> None:
    """Every layer takes part, the stem only if told, as with one ratio for each."""
    net = seeded(MLP)
    pruner = plan(gp.Global(0.6, stem=stem), net, batch((2, 5), 3)[0], granularity="weight")
    parts = ["fc1"] * stem + ["fc2", "fc3"]
    rest = torch.cat([net.get_submodule(name).weight.detach().flatten() for name in parts]).abs()
    assert bool(lost(pruner)["fc1"]) == stem
    assert sum(lost(pruner).values()) == math.ceil(Fraction("0.6") * len(rest))
    mask = torch.cat([pruner.masks()[name].flatten() for name in parts])
    assert float(rest[~mask].max()) < float(rest[mask].min())


def test_global_takes_nearly_all_of_a_layers_single_weights_unless_told() -> None:
    """A layer whose weights are the least of all; those of the stem do not count, however bad they are."""
    net = seeded(MLP)
    with torch.no_grad():
        net.fc2.weight.mul_(1e-3)
    x = batch((2, 5), 3)[0]
    size = net.fc2.weight.numel()
    assert lost(plan(gp.Global(0.7), net, x, granularity="weight"))["fc2"] == size - 1
    assert lost(plan(gp.Global(0.7, at_most=0.5), net, x, granularity="weight"))["fc2"] == size // 2
    endless = plan(gp.Global(0.7), net, x, granularity="weight", criterion=lambda w: w.abs().sum(1) * torch.inf)
    assert lost(endless)["fc1"] == 0


@pytest.mark.parametrize("ratios", [0.5, "0.1", gp.Global(0.1)])
def test_a_network_that_is_all_stem_is_not_left_whole_without_a_word(ratios: Ratios) -> None:
    net, example = nn.Linear(4, 3).double(), torch.ones(1, 4).double()
    refused(lambda: plan(ratios, net, example, granularity="weight"), "reads the model's input", "by name")
    for spec in (0.0, gp.Global(0.0)):
        assert sum(lost(plan(spec, net, example, granularity="weight")).values()) == 0
    for spec, gone in ((gp.Global(0.5, stem=True), 6), ("[0:0.5]", 6)):
        assert sum(lost(plan(spec, net, example, granularity="weight")).values()) == gone


def test_global_leaves_layers_alone_that_lose_nothing() -> None:
    """Also GReg-2, which shrinks them all while it picks: afterwards they have no -γ, and nobody counts them."""
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 1), *(nn.Conv2d(8, 8, 1) for _ in range(3)), nn.Conv2d(8, 2, 1)))
    with torch.no_grad():
        net[2].weight.mul_(1e-3)
    schedule = gp.GReg2(delta_lambda=0.1, delta_lambda_pick=0.1, tau_pick=0.25, tau=0.5, ku=1, ks=2, gamma=0.5)
    pruner = gp.Pruner(net, batch((2, 3, 4, 4), 2)[0], schedule, ratios=gp.Global(0.25))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pruner.attach(optimizer)
    sizes = []
    while not pruner.done:
        optimizer.zero_grad()
        net(batch((2, 3, 4, 4), 2)[0]).sum().mul(0).backward()
        optimizer.step()
        sizes.append([float(layer.weight.detach().norm()) for layer in net])
    picked = schedule.pick_step
    assert lost(pruner) == {"1": 0, "2": 6, "3": 0}
    assert sizes[picked - 1][1] < sizes[0][1]
    assert [sizes[-1][i] for i in (1, 3)] == [sizes[picked - 1][i] for i in (1, 3)]
    assert sizes[-1][2] < sizes[picked - 1][2]
    assert list(pruner.separation()) == ["2"]
    shown = r"Separation\(kept=[\d.e+-]+, pruned=[\d.e+-]+, spread=[\d.e+-]+, 8 norms\)"
    assert re.fullmatch(shown, repr(pruner.separation()["2"]))
    assert "6 of 24 filters go in 1 layer" in repr(pruner)


# What stays in multiples.


def wholes(size: int, multiple: int) -> list[int]:
    """By hand: how many may stay."""
    return [n for n in range(1, size + 1) if n % multiple == 0 or n == size]


def nearest_whole(stays: int, size: int, multiple: int, spared: int = 1) -> int:
    return min((n for n in wholes(size, multiple) if n >= spared), key=lambda n: (abs(n - stays), -n))


INPUT = torch.ones(1, 6).double()


def chain(*widths: int) -> nn.Module:
    return seeded(lambda: nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise([6, *widths, 5]))))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=2, max_size=4), st.floats(0, 0.99), st.integers(1, 12))
@example([16, 20], 0.5, 8)  # of 10, 8 is the nearest; 12 would be none
@example([5, 4], 0.5, 8)
def test_a_layer_keeps_the_multiple_that_is_nearest(widths: list[int], ratio: float, multiple: int) -> None:
    asked = {str(i): size - pruned_of(ratio, size) for i, size in enumerate(widths) if i}
    stay = {name: nearest_whole(n, widths[int(name)], multiple) for name, n in asked.items()}
    size = {name: widths[int(name)] for name in asked}
    if asked != size and stay == size:
        refused(lambda: plan(ratio, chain(*widths), INPUT, multiple=multiple), "multiple", str(multiple))
        return
    pruner = plan(ratio, chain(*widths), INPUT, multiple=multiple)
    found = {name: int(mask.sum()) for name, mask in pruner.masks().items() if name != "0"}
    assert found == stay
    small = pruner.compact()
    assert [small[int(name)].out_features for name in stay] == list(stay.values())


@settings(max_examples=25, deadline=None)
@given(st.floats(0.05, 0.95), st.sampled_from([2, 3, 4, 8]), st.sampled_from([None, 0.5, 0.8]), st.booleans())
def test_global_leaves_multiples_and_never_less_than_is_spared(
    asked: float, multiple: int, at_most: float | None, loud: bool
) -> None:
    net = resnet()
    with torch.no_grad():
        net.get_submodule("layer3.0.conv1").weight.mul_(1.0 if loud else 1e-3)
    spec = gp.Global(asked, at_most)
    plain = plan(spec, net).masks()
    least = {name: spec.spared(len(mask), "filter") for name, mask in plain.items()}
    kept = {name: nearest_whole(int(mask.sum()), len(mask), multiple, least[name]) for name, mask in plain.items()}
    if kept == {name: len(mask) for name, mask in plain.items()}:
        refused(lambda: plan(spec, net, multiple=multiple), "multiple", str(multiple))
        return
    for name, mask in plan(spec, net, multiple=multiple).masks().items():
        stays = nearest_whole(int(plain[name].sum()), len(mask), multiple, spec.spared(len(mask), "filter"))
        assert int(mask.sum()) == stays
        score = net.get_submodule(name).weight.detach().abs().sum((1, 2, 3))
        assert not bool((~mask).any()) or float(score[~mask].max()) <= float(score[mask].min())


def test_a_speed_up_in_multiples() -> None:
    """It is met by widths that are multiples, or the nearest is named."""
    torch.manual_seed(0)
    net, example = VGG(11), torch.randn(1, 3, 16, 16)
    for times in (1.3, 2.0, 4.0):
        pruner = plan(gp.Speedup(times), net, example, multiple=8)
        assert reached(pruner, net, example) == pytest.approx(times, rel=0.01)
        kept = [int(mask.sum()) for mask in pruner.masks().values()]
        assert all(n % 8 == 0 for n in kept)
        assert len({n / len(mask) for n, mask in zip(kept, pruner.masks().values(), strict=True)}) > 1
    narrow = chain(16, 16, 16)
    refused(lambda: plan(gp.Speedup(1.2), narrow, INPUT, multiple=8), "multiples of 8", "nearest is 1.")
    assert plan(gp.Speedup(1.2), chain(30, 30, 30), INPUT).counts is not None


@pytest.mark.parametrize("multiple", [16, 6])
@pytest.mark.parametrize("schedule", [gp.OneShot(), gp.GReg2()])
def test_global_in_multiples_that_leave_nothing_to_prune_is_refused(multiple: int, schedule: gp.Schedule) -> None:
    net = chain(6, 6, 6)
    refused(
        lambda: gp.Pruner(net, INPUT, schedule, ratios=gp.Global(0.3), multiple=multiple), "multiple", str(multiple)
    )


def test_global_that_rounding_leaves_whole_is_refused() -> None:
    refused(lambda: plan(gp.Global(0.05), chain(16, 16, 16), INPUT, multiple=8), "multiple", "8")
    assert plan(gp.Global(0.0), chain(16, 16, 16), INPUT, multiple=8).masks()


@pytest.mark.parametrize("multiple", [0, -8, 8.0, True, "8", None])
def test_a_multiple_is_a_whole_number(multiple: Any) -> None:
    refused(lambda: plan(0.5, multiple=multiple), "multiple", repr(multiple))


def test_single_weights_have_no_multiples() -> None:
    refused(lambda: plan(0.5, granularity="weight", multiple=8), "multiple is for filters")
    assert plan(0.5, granularity="weight", multiple=1).multiple == 1


def test_a_state_is_of_its_multiple() -> None:
    """What one global ratio takes is not known by number before it is picked."""

    def fresh(multiple: int) -> gp.Pruner:
        return plan(gp.Global(0.5), multiple=multiple)

    state = fresh(2).state_dict()
    fresh(2).load_state_dict(state)
    for other in (1, 4):
        refused(lambda other=other: fresh(other).load_state_dict(state), "another plan", "in multiples of 2")  # type: ignore[misc]
    assert fresh(1).state_dict()["plan"]["ratios"] == "global 0.5"


# Where several filters go together only.


class Tied(nn.Module):
    """One of its layers has a group norm: of its 64 filters eight go together. The other's go one by one."""

    def __init__(self, groups: int = 8) -> None:
        super().__init__()
        self.stem, self.tied, self.norm = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 64, 1), nn.GroupNorm(groups, 64)
        self.free, self.last = nn.Conv2d(64, 64, 1), nn.Conv2d(64, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.free(torch.relu(self.norm(self.tied(torch.relu(self.stem(x))))))))
        return out


IMAGE = batch((1, 3, 4, 4), 2)[0].float()


def test_widths_count_filters() -> None:
    pruner = plan(0.5, Tied(), IMAGE)
    assert [len(mask) for mask in pruner.masks().values()] == [8, 64]
    assert pruner.widths() == {"tied": [64, 32], "free": [64, 32]}
    assert "64 of 128 filters go in 2 layers" in repr(pruner)
    assert plan(0.5, MLP().double(), batch((2, 5), 3)[0], granularity="weight").widths()["fc2"] == [42, 21]


@pytest.mark.parametrize(("ratio", "groups"), [(0.1, 2), ({"tied": 0.1, "free": 0.1}, 2), (0.2, 2), (0.9, 2), (0.6, 3)])
def test_another_share_than_was_asked_for_is_told(ratio: Any, groups: int) -> None:
    """Of two groups one goes or none. Not where it is rounded by less than a quarter of the layer."""
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 48, 1), nn.GroupNorm(groups, 48), nn.Conv2d(48, 5, 1))
    net = nn.Sequential(OrderedDict(zip(("stem", "tied", "norm", "free"), net, strict=True)))
    net.append(nn.Conv2d(5, 5, 1))
    asked = ratio["tied"] if isinstance(ratio, dict) else ratio
    if groups == 3:
        assert plan(ratio, net, IMAGE).widths()["tied"] == [48, 16]
        return
    told = f"^ratios: 'tied' loses 24 filters at once or none: 50% go, not {asked:.0%}$"
    with pytest.warns(UserWarning, match=told):
        assert plan(ratio, net, IMAGE).widths()["tied"] == [48, 24]


def test_another_share_that_hangs_on_which_filters_go_is_told() -> None:
    """Of 20 filters two of eight, eight and four."""
    net = Beside()
    told = "^ratios: 'first' loses 4 to 8 filters at once or none: 60% to 80% go, not 50%$"
    with pytest.warns(UserWarning, match=told):
        assert 20 - plan({"first": 0.5}, net, IMAGE).widths()["first"][1] in (12, 16)
    with pytest.warns(UserWarning, match=told.replace("60% to 80%", "20% to 40%").replace("50%", "10%")):
        plan({"first": 0.1}, net, IMAGE)
    plan({"first": 0.3, "second": 0.6}, net, IMAGE)  # 40 % at most, and 24 of 44


def test_another_share_is_of_all_filters_of_a_layer() -> None:
    """Two of three sixteens; twelve more are tied to the input, and stay."""
    told = "^ratios: 'wide' loses 16 filters at once or none: 53% go, not 80%$"
    with pytest.warns(UserWarning, match=told):
        pruner = plan({"wide": 0.8}, Behind(4), SIDE_BY_SIDE[1][1])
    assert pruner.widths()["wide"] == [60, 28]


def test_a_layer_whose_filters_go_only_all_at_once_stays() -> None:
    pruner = plan(0.5, Tied(1), IMAGE)
    assert pruner.widths() == {"free": [64, 32]}
    assert pruner.stays["tied"] == "its filters go only all at once, and something has to stay"
    refused(lambda: plan({"tied": 0.5}, Tied(1), IMAGE), "ratios", "'tied'", "all at once")
    single = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 1, 1), nn.Conv2d(1, 2, 1))
    assert plan({"0": 0.5}, single, IMAGE).stays["1"] == "it has one filter, which has to stay"


@pytest.mark.parametrize("least", ["tied", "free"])
def test_global_is_a_ratio_of_filters(least: str) -> None:
    """Those of the least L1 norms, whichever go together: of 128 filters 32, or 52 where they go one by one."""
    net = Tied()
    with torch.no_grad():
        for name in ("tied", "free"):
            norms = torch.linspace(1, 1.01, 64) * (0.9 if name == least else 1.0)
            weight = net.get_submodule(name).weight
            weight.copy_(norms.view(64, 1, 1, 1).expand_as(weight) / weight.shape[1])
    for ratio, gone in ((0.25, 32), (0.4, 56 if least == "tied" else 52)):
        pruner = plan(gp.Global(ratio), net, IMAGE)
        assert {name: full - stay for name, (full, stay) in pruner.widths().items() if stay < full} == {least: gone}


def test_global_compares_whole_units_by_a_function() -> None:
    """How that grows with what goes together nobody knows. The eighth unit of eight is spared, as the layer's last."""
    masks = plan(gp.Global(0.5), Tied(), IMAGE, criterion=lambda w: torch.arange(len(w)).float()).masks()
    assert [int((~mask).sum()) for mask in masks.values()] == [7, 7]


@pytest.mark.parametrize(
    "ratios", [0.3, gp.Global(0.3), gp.Speedup(4952 / 2952)], ids=["uniform", "global", "speed-up"]
)
@pytest.mark.parametrize(("groups", "stay"), [(4, 32), (8, 40), (16, 48)])
def test_multiples_are_of_filters(ratios: Any, groups: int, stay: int) -> None:
    """Sixteen filters that go together, or eight, are a multiple by themselves; of four and four two are."""
    net = Tied(groups)
    pruner = plan(ratios, net, IMAGE, multiple=8)
    small = pruner.compact()
    assert pruner.widths() == {"tied": [64, small.tied.out_channels], "free": [64, small.free.out_channels]}
    assert all(left % 8 == 0 for _, left in pruner.widths().values())
    if ratios == 0.3:
        assert small.tied.out_channels == stay
    elif isinstance(ratios, gp.Speedup):
        assert (small.tied.out_channels, small.free.out_channels) == (48, 48)


class Parts(nn.Module):
    """Two equal parts of one layer, gated; then a convolution in groups, so many of so many channels each."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.stem, self.both, self.mixed = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 128, 1), nn.Conv2d(64, 64, 1)
        self.grouped, self.last = nn.Conv2d(64, 64, 3, padding=1, groups=groups), nn.Conv2d(64, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mixed(torch.nn.functional.glu(self.both(torch.relu(self.stem(x))), 1))
        out: Tensor = self.last(torch.relu(self.grouped(torch.relu(h))))
        return out


@pytest.mark.parametrize(("groups", "in_all"), [(2, 32), (16, 40)])
def test_every_part_and_group_keeps_a_multiple(groups: int, in_all: int) -> None:
    """Of two groups of 32 each keeps 16. Groups of four go whole, and two of them are a multiple."""
    small = plan(0.4, Parts(groups), IMAGE, multiple=8).compact()
    assert (small.both.out_channels, small.mixed.in_channels) == (80, 40)
    assert (small.mixed.out_channels, small.grouped.out_channels) == (in_all, in_all)
    assert small.grouped.weight.shape[1] == (16 if groups == 2 else 4)


class Joined(nn.Module):
    """What a group norm ties is read beside three channels that nothing ties."""

    def __init__(self, filters: int, groups: int) -> None:
        super().__init__()
        self.tied, self.norm = nn.Conv2d(3, filters, 1), nn.GroupNorm(groups, filters)
        self.last = nn.Conv2d(filters + 3, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.cat([x, self.norm(self.tied(x))], 1))
        return out


@pytest.mark.parametrize(("filters", "groups", "stay"), [(64, 8, 40), (96, 16, 72)])
def test_a_multiple_of_what_lies_side_by_side(filters: int, groups: int, stay: int) -> None:
    """Eights are multiples by themselves; of sixes four at a time are."""
    assert plan("[0:0.3]", Joined(filters, groups), IMAGE, multiple=8).widths() == {"tied": [filters, stay]}


def test_a_global_ratio_takes_eight_that_go_together_where_they_are_a_multiple() -> None:
    pruner = plan(gp.Global(0.5, stem=True), Joined(64, 8), IMAGE, multiple=8)  # no more than eight units
    assert pruner.widths() == {"tied": [64, 32]}


def test_a_multiple_is_also_of_what_is_read() -> None:
    """A shuffle makes one channel of four filters: eight of these are read."""
    net = nn.Sequential(nn.Conv2d(3, 64, 1), nn.PixelShuffle(2), nn.Conv2d(16, 5, 1))
    small = plan("[0:0.4]", net, IMAGE, multiple=8).compact()
    assert (small[0].out_channels, small[2].in_channels) == (32, 8)


class Beside(nn.Module):
    """A group norm over two layers' filters side by side, 20 and 44: its third group has four of either."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 20, 1), nn.Conv2d(20, 20, 1), nn.Conv2d(20, 44, 1)
        self.norm, self.free, self.last = nn.GroupNorm(8, 64), nn.Conv2d(64, 32, 1), nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.first(torch.relu(self.stem(x))))
        both = torch.relu(self.norm(torch.cat([first, self.second(first)], 1)))
        out: Tensor = self.last(torch.relu(self.free(both)))
        return out


class Behind(nn.Module):
    """A group norm over the input, four channels, and 60 filters behind it."""

    def __init__(self, groups: int = 8) -> None:
        super().__init__()
        self.stem, self.wide, self.norm = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 60, 1), nn.GroupNorm(groups, 64)
        self.mixed, self.free, self.last = nn.Conv2d(64, 16, 1), nn.Conv2d(16, 32, 1), nn.Conv2d(32, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, self.wide(torch.relu(self.stem(x)))], 1)
        out: Tensor = self.last(torch.relu(self.free(torch.relu(self.mixed(torch.relu(self.norm(both)))))))
        return out


SIDE_BY_SIDE: list[Any] = [(Beside, IMAGE), (Behind, batch((1, 4, 4, 4), 2)[0].float())]


@pytest.mark.parametrize(("build", "image"), SIDE_BY_SIDE, ids=["two layers", "the input"])
@pytest.mark.parametrize("ratios", [0.5, 0.8, gp.Global(0.3), gp.Global(0.5)], ids=str)
def test_widths_are_those_of_the_smaller_network(build: Any, image: Tensor, ratios: Any) -> None:
    """Whoever's units a layer's filters belong to, and where they belong to none."""
    torch.manual_seed(0)
    net = build()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ratios: 'first' loses 4 to 8 filters at once")
        pruner = plan(ratios, net, image)
    small, widths = pruner.compact(), pruner.widths()
    assert widths == {n: [net.get_submodule(n).out_channels, small.get_submodule(n).out_channels] for n in widths}
    every, stay = (sum(each) for each in zip(*widths.values(), strict=True))
    assert f"{every - stay} of {every} filters go" in repr(pruner)


def test_a_global_ratio_counts_what_two_layers_lose_at_once() -> None:
    """Eight units of eight filters: the first goes, then the third, of four and four; together a fourth of them."""
    net = Beside()
    with torch.no_grad():
        for name, weight in (("first", 1.0), ("second", 2.0), ("free", 9.0)):
            net.get_submodule(name).weight.fill_(weight)
        net.first.weight[:8] = 0.5
    pruner = plan(gp.Global(16 / 96), net, IMAGE)
    assert pruner.widths() == {"first": [20, 4], "second": [44, 44], "free": [32, 32]}
    with torch.no_grad():
        net.first.weight[8:16] = 3.0
    pruner = plan(gp.Global(16 / 96), net, IMAGE)
    assert pruner.widths() == {"first": [20, 8], "second": [44, 40], "free": [32, 32]}


@pytest.mark.parametrize(("build", "image"), SIDE_BY_SIDE, ids=["two layers", "the input"])
@pytest.mark.parametrize("ratios", ["uniform", "global", "speed-up"])
def test_where_no_multiple_is_sure_layers_stay_whole(build: Any, image: Tensor, ratios: Any) -> None:
    """What a global ratio would take there is not taken elsewhere."""
    torch.manual_seed(0)
    net = build()
    with torch.no_grad():
        net.free.weight.mul_(0.1)
    who, lots, times = ("'first' and 1 more stay", 64, 1.44) if build is Beside else ("'wide' stays", 56, 1.16)
    spec = {"uniform": 0.5, "global": gp.Global(16 / (32 + lots)), "speed-up": gp.Speedup(times)}[ratios]
    with pytest.warns(UserWarning, match=f"^multiple: {who} whole: .* a multiple of 8 is not sure to stay") as told:
        pruner = plan(spec, net, image, multiple=8)
    assert len(told) == 1
    widths = pruner.widths()
    assert widths.pop("free") == [32, 16]
    assert all(every == stay for every, stay in widths.values())


@pytest.mark.parametrize(("build", "image"), SIDE_BY_SIDE, ids=["two layers", "the input"])
def test_only_of_layers_that_were_to_lose_some_it_is_told_that_they_stay_whole(build: Any, image: Tensor) -> None:
    for nothing in (0.0, gp.Global(0.0)):
        plan(nothing, build(), image, multiple=8)
    name = "first" if build is Beside else "wide"
    assert plan({"free": 0.5}, build(), image, multiple=8).widths()[name] == plan(0.0, build(), image).widths()[name]
    with pytest.warns(UserWarning, match=f"^multiple: '{name}' stays whole: "):
        plan({"free": 0.5, name: 0.5}, build(), image, multiple=8)


def test_multiples_beside_multiples() -> None:
    """Of four, what is tied to the input is one, and of two layers what each has of a group."""
    assert plan({"wide": 0.5}, Behind(), SIDE_BY_SIDE[1][1], multiple=4).widths()["wide"] == [60, 28]
    for ratio in (0.3, 0.5, 0.7):
        widths = plan(ratio, Beside(), IMAGE, multiple=4).widths()
        assert all(stay < every and stay % 4 == 0 for every, stay in widths.values())


def test_a_layer_that_reads_both_ways_round_is_counted_by_its_filters() -> None:
    """A weight and its transpose: the layer is the one that runs first."""

    class Tying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.code, self.last = nn.Linear(4, 12), nn.Linear(12, 8), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            code = torch.relu(self.code(torch.relu(self.stem(x))))
            out: Tensor = self.last(torch.relu(code @ self.code.weight))
            return out

    net = Tying()
    pruner = plan({"code": 0.5}, net, torch.ones(2, 4))
    assert pruner.widths()["code"] == [8, pruner.compact().code.out_features] == [8, 4]


# Speed-ups.


class Separable(nn.Module):
    """A depthwise convolution between two others, then a flattening."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 3, padding=1)
        self.depthwise = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.pointwise = nn.Conv2d(24, 40, 1)
        self.deep = nn.Conv2d(40, 32, 3, stride=2)
        self.fc = nn.Linear(32 * 9, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.pointwise(self.depthwise(torch.relu(self.first(x)))))
        out: Tensor = self.fc(torch.relu(self.deep(x)).flatten(1))
        return out


def reached(pruner: gp.Pruner, net: nn.Module, example: Tensor) -> float:
    """By running both networks, not by the formula that chose the numbers."""
    return gp.speedup(gp.measure(net, example), gp.measure(pruner.compact(fold=False), example))


@pytest.mark.parametrize(
    ("build", "size", "times", "per"),
    [
        (lambda: CifarResNet(20), 16, 1.5, "network"),
        (lambda: CifarResNet(20), 16, 3.0, "network"),
        (lambda: CifarResNet(20), 16, 2.0, "stage"),
        (lambda: CifarResNet(20), 16, 3.0, "stage"),
        (lambda: VGG(11), 16, 2.0, "network"),
        (lambda: VGG(11), 16, 8.0, "network"),
        (Separable, 8, 1.0, "network"),
        (Separable, 8, 1.3, "network"),
        (Separable, 8, 2.0, "network"),
    ],
)
def test_the_measured_speed_up_is_the_one_asked_for(build: Any, size: int, times: float, per: Any) -> None:
    torch.manual_seed(0)
    net, example = build(), torch.randn(1, 3, size, size)
    pruner = plan(gp.Speedup(times, per=per), net, example)
    assert reached(pruner, net, example) == pytest.approx(times, rel=0.01)


def test_coupled_filters_count_too() -> None:
    net, example = resnet(width=8), torch.randn(1, 3, 8, 8)
    pruner = plan(gp.Speedup(2.0), net, example, coupled=True)
    assert reached(pruner, net, example) == pytest.approx(2.0, rel=0.01)


def test_one_pace_for_all_layers_or_a_gentler_one_in_the_last_stage() -> None:
    """Each layer's ratio is the common one to the single filter; by stage, the last loses 0.45 of what others do."""
    net = CifarResNet(20)
    for per, gentler in (("network", 1.0), ("stage", 0.45)):
        pruner = plan(gp.Speedup(2.0, per=per), net, SMALL)  # type: ignore[arg-type]
        masks = pruner.masks()
        size = {name: len(mask) for name, mask in masks.items()}
        gone = lost(pruner)
        common = sum(gone[n] for n in gone if "layer1" in n) / sum(size[n] for n in gone if "layer1" in n)
        for name, count in gone.items():
            pace = gentler if "layer3" in name else 1.0
            assert abs(count - pace * common * size[name]) <= 1.5 + size[name] / 16, name


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.read = nn.Embedding(9, 6), nn.LSTM(6, 16, batch_first=True)
        self.middle, self.last = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.middle(self.read(self.table(words))[0][:, -1])))
        return out


@pytest.mark.parametrize("granularity", ["filter", "weight"])
def test_what_nothing_is_cut_from_is_named(granularity: Any) -> None:
    pruner = plan(0.5, Recurrent(), torch.zeros(2, 5).long(), granularity=granularity)
    why = "it is neither a convolution nor a linear layer"
    assert {name: pruner.stays.get(name) for name in ("table", "read")} == {"table": why, "read": why}
    assert "middle" not in pruner.stays


def test_a_speed_up_that_is_out_of_reach_says_what_stays() -> None:
    words = (
        "nearest is 1.",
        "stay whole, each since it is neither a convolution nor a linear layer (table, ...)",
        "; ask for 1.",
    )
    refused(lambda: plan(gp.Speedup(3.0), Recurrent(), torch.zeros(2, 5).long()), *words)


def test_a_speed_up_between_those_there_are_says_what_to_ask_for() -> None:
    """What stays is not to blame: more would be within reach."""
    net, example = nn.Sequential(*(nn.Linear(a, b) for a, b in ((4, 4), (4, 3), (3, 2)))), torch.ones(1, 4)
    with pytest.raises(
        gp.GrowpruneError, match=r"^speedup: no ratio gives 1.4x within 1 %: the nearest is (.*)x; ask for \1$"
    ) as found:
        plan(gp.Speedup(1.4), net, example)
    nearest = float(str(found.value).rpartition(" ")[2])
    assert reached(plan(gp.Speedup(nearest), net, example), net, example) == pytest.approx(nearest, rel=0.01)
    with pytest.raises(gp.GrowpruneError, match=r"the nearest is 1x$"):  # which nobody would ask for
        plan(gp.Speedup(1.02), net, example)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=2, max_size=4), st.floats(1, 8))
def test_a_speed_up_is_met_or_refused(widths: list[int], times: float) -> None:
    """Narrow networks have no ratio for every target: then the nearest is named, and met if asked for."""
    sizes = [6, *widths, 5]
    net = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    example = torch.ones(1, 6)
    try:
        pruner = plan(gp.Speedup(times), net, example)
    except gp.GrowpruneError as error:
        found = re.search(r"the nearest is ([\d.]+)x", str(error))
        assert found is not None
        times = float(found[1])
        pruner = plan(gp.Speedup(times), net, example)
    assert reached(pruner, net, example) == pytest.approx(times, rel=0.0101)
