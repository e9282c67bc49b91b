"""Our convolutions compute what torch's do: the kernels in Triton's interpreter, the padded one as it is.

The interpreter must be chosen before Triton is loaded, so this file is also a script that a process of its own runs; it
knows no bfloat16, so the kernels are given float32 here, and bfloat16 on a GPU (test_gpu_step.py).
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from growprune import convolutions
from growprune.convolutions import (
    VARIANTS,
    WIDEST,
    Aligned,
    FewChannels,
    best_of,
    block,
    candidates,
    convolve_tile,
    correlate_tile,
    faster,
    suits,
    swapped,
)

WIDTHS = [1, 3, 6, 16, 20, 33, 64]
CASES: dict[str, dict[str, Any]] = {
    "plain": {"shape": (2, 16, 8, 8), "filters": 16},
    "one pixel": {"shape": (1, 1, 1, 1), "filters": 1},
    "one row": {"shape": (3, 6, 1, 9), "filters": 3},
    "one column": {"shape": (2, 3, 7, 1), "filters": 20},
    "batch of one, odd sides": {"shape": (1, 20, 5, 7), "filters": 33},
    "more pixels than a program's": {"shape": (3, 3, 13, 11), "filters": 6},
    "a program's pixels exactly": {"shape": (4, 6, 8, 8), "filters": 16},
    "stem": {"shape": (2, 3, 9, 9), "filters": 64},
    "widest": {"shape": (2, 64, 6, 5), "filters": 64},
    "odd and wide": {"shape": (1, 33, 9, 4), "filters": 64},
    "pruned to one": {"shape": (2, 64, 5, 5), "filters": 1},
    "from one": {"shape": (2, 1, 6, 6), "filters": 64},
    "image contiguous": {"shape": (2, 6, 5, 7), "filters": 20, "x": "contiguous"},
    "weight channels last": {"shape": (2, 20, 6, 7), "filters": 16, "weight": "channels_last"},
    "weight with gaps": {"shape": (2, 6, 5, 6), "filters": 3, "weight": "gaps"},
    "input needs no gradient": {"shape": (2, 3, 7, 5), "filters": 16, "input": False},
    "more rows than a program's": {"shape": (2, 16, 19, 3), "filters": 16},
    "odd rows, two at a time": {"shape": (3, 12, 7, 5), "filters": 16},
    "more rows, wide": {"shape": (1, 33, 17, 3), "filters": 40},
    "more taps than a program's": {"shape": (1, 24, 9, 5), "filters": 32},
    "a program sums many tiles": {"shape": (9, 6, 9, 17), "filters": 20, "parts": 3},
    "a program sums many tiles, mirrored": {"shape": (9, 16, 17, 16), "filters": 3, "parts": 2},
    "more sums than are collected at once": {"shape": (67, 1, 1, 64), "filters": 1},
}
CHANCE = random.Random(0)
for _ in range(10):
    SHAPE = CHANCE.randint(1, 3), CHANCE.choice(WIDTHS), CHANCE.randint(1, 12), CHANCE.randint(1, 12)
    FILTERS, LAYOUT = CHANCE.choice(WIDTHS), CHANCE.choice(["contiguous", "channels_last"])
    CASES[f"random {SHAPE} to {FILTERS}, {LAYOUT}"] = {"shape": SHAPE, "filters": FILTERS, "weight": LAYOUT}
MOST = convolutions.PARTS
OPCHECK = "plain", "one pixel", "pruned to one", "weight channels last", "weight with gaps"


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "gaps":
        return torch.stack([x, x.flip(0)], 1)[:, 0]
    return x.contiguous(memory_format=getattr(torch, {"contiguous": "contiguous_format"}.get(layout, layout)))


def measured(name: str) -> dict[str, Any]:
    """One case, in the interpreter: how far off its three results are, and how they lie in memory."""
    case = CASES[name]
    torch.manual_seed(len(name))
    channels = case["shape"][1]
    convolutions.PARTS = case.get("parts", MOST)
    x = laid_out(torch.randn(case["shape"]), case.get("x", "channels_last")).requires_grad_(case.get("input", True))
    weight = laid_out(torch.randn(case["filters"], channels, 3, 3), case.get("weight", "contiguous")).requires_grad_()
    wanted = [t for t in (x, weight) if t.requires_grad]
    y = convolutions.convolve(x, weight)
    grad = torch.randn(y.shape)
    found = torch.autograd.grad(y, wanted, grad)
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in (x, weight)]
    right = F.conv2d(*exact, padding=1)
    rights = torch.autograd.grad(right, [t for t in exact if t.requires_grad], grad.double())
    result = {
        "errors": [off(a, b) for a, b in zip((y, *found), (right, *rights), strict=True)],
        "like": list(found[-1].stride()) == list(torch.empty_like(weight).stride()),
        "last": all(t.is_contiguous(memory_format=torch.channels_last) for t in (y, *found[:-1])),
    }
    if name in OPCHECK:
        result["checked"] = checked(x, weight, y)
    return result


def off(found: Tensor, right: Tensor) -> float:
    return float((found.detach() - right.detach()).abs().max() / right.detach().abs().max())


def checked(x: Tensor, weight: Tensor, y: Tensor) -> dict[str, str]:
    """torch's own examination of an operator: schema, autograd, shapes and strides of its fake."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    result = torch.library.opcheck(convolutions.convolve, (x, weight), test_utils=tests, raise_exception=False)
    for needs in (True, False):
        args = (y.detach(), x.detach(), weight.detach(), needs)
        more = torch.library.opcheck(convolutions.convolve_backward, args, test_utils=tests[::2], raise_exception=False)
        result |= {f"backward {key} {needs}": value for key, value in more.items()}
    return {key: str(value) for key, value in result.items()}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_the_convolution(interpreted: dict[str, dict[str, Any]], name: str) -> None:
    """Output, gradient of the input and of the weight against float64; sums of float32 round at 1e-7 or so."""
    found = interpreted[name]
    assert len(found["errors"]) == 2 + CASES[name].get("input", True)
    assert all(error < 1e-6 for error in found["errors"])
    assert found["like"], "the weight's gradient lies as the weight does, or the fused optimizer refuses it"
    assert found["last"]


def test_the_operators_are_what_they_say(interpreted: dict[str, dict[str, Any]]) -> None:
    seen = [found["checked"] for found in interpreted.values() if "checked" in found]
    assert len(seen) == len(OPCHECK)
    assert {result for each in seen for result in each.values()} == {"SUCCESS"}


# -- in a network ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    channels=st.integers(1, 12),
    filters=st.integers(1, 12),
    size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    bias=st.booleans(),
    last=st.booleans(),
)
def test_filling_up_channels_changes_nothing(
    channels: int, filters: int, size: tuple[int, int], bias: bool, last: bool, **how: Any
) -> None:
    layer = nn.Conv2d(channels, filters, how.pop("kernel"), bias=bias, **how).double()
    x = laid_out(torch.randn(2, channels, *size, dtype=torch.double), "channels_last" if last else "contiguous")
    x.requires_grad_()
    right = layer(x)
    grad = torch.randn_like(right)
    wanted = torch.autograd.grad(right, (x, *layer.parameters()), grad)
    with swapped(layer, {"": "aligned"}):
        assert type(layer) is Aligned
        found = layer(x)
    assert found.shape == right.shape
    for a, b in zip(
        (found, *torch.autograd.grad(found, (x, *layer.parameters()), grad)), (right, *wanted), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_what_the_kernels_cannot_count_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single images without a batch, and tensors of 2³¹ entries or more."""
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(convolutions, "convolve", lambda x, weight: seen.append(tuple(x.shape)))
    layer = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    x = torch.randn(3, 5, 5)
    with swapped(layer, {"": "few"}):
        assert torch.equal(layer(x), F.conv2d(x, layer.weight, padding=1))
        big = layer.to("meta")
        assert big(torch.empty(2**17, 3, 32, 32, device="meta")).shape == (2**17, 16, 32, 32)
        assert not seen
        big(torch.empty(2**17 - 1, 3, 32, 32, device="meta"))
    assert seen == [(2**17 - 1, 3, 32, 32)]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(nn.Sequential(nn.Conv2d(16, 5, 3, padding=1, bias=False)), nn.Conv2d(5, 7, 1))
        self.norm = nn.BatchNorm2d(7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.blocks(self.stem(x)))
        return out


def kinds(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules() if isinstance(module, nn.Conv2d)]


def test_layers_are_swapped_for_a_while() -> None:
    net = Nested()
    with swapped(net, {"stem": "few", "blocks.0.0": "aligned"}):
        assert kinds(net) == [FewChannels, Aligned, nn.Conv2d]
    assert kinds(net) == [nn.Conv2d] * 3
    with pytest.raises(KeyError), swapped(net, {"stem": "few", "blocks.1": "aligned"}):
        raise KeyError
    assert kinds(net) == [nn.Conv2d] * 3
    with swapped(net, {}):
        assert kinds(net) == [nn.Conv2d] * 3
    layer = nn.Conv2d(3, 3, 1)
    with swapped(layer, {"": "aligned"}):
        assert type(layer) is Aligned
    assert type(layer) is nn.Conv2d


@pytest.mark.parametrize(("variants", "error"), [({"stern": "few"}, AttributeError), ({"stem": "fast"}, KeyError)])
def test_an_unknown_layer_or_kind_swaps_nothing(variants: dict[str, str], error: type[Exception]) -> None:
    net = Nested()
    with pytest.raises(error), swapped(net, {"blocks.1": "aligned", **variants}):
        pass
    assert kinds(net) == [nn.Conv2d] * 3


class Own(nn.Conv2d):
    """Someone's own convolution, which may do anything."""


FITS: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "kernel_size": 3,
    "padding": 1,
    "bias": False,
}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "5x5": ({"kernel_size": 5}, []),
    "1x1": ({"kernel_size": 1}, []),
    "3x1": ({"kernel_size": (3, 1)}, []),
    "stride": ({"stride": 2}, []),
    "stride down": ({"stride": (2, 1)}, []),
    "no padding": ({"padding": 0}, []),
    "padding in words": ({"padding": "same", "out_channels": 5}, []),
    "padding of another kind": ({"padding_mode": "reflect", "out_channels": 5}, []),
    "dilation": ({"dilation": 2, "padding": 2}, []),
    "groups": ({"groups": 2, "out_channels": 6}, []),
    "bias": ({"bias": True}, []),
    "too wide": ({"in_channels": 72}, []),
    "too wide behind": ({"out_channels": 65}, ["aligned"]),
    "float64": ({"dtype": torch.double}, []),
    "odd, 5x5": ({"kernel_size": 5, "in_channels": 6}, ["aligned"]),
    "odd, bias": ({"bias": True, "out_channels": 3}, ["aligned"]),
    "odd, stride and dilation": ({"stride": 2, "dilation": 2, "out_channels": 3}, ["aligned"]),
    "image": ({"in_channels": 3, "kernel_size": 7}, []),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_the_kernels_cannot_do(name: str) -> None:
    change, others = REFUSED[name]
    layer = nn.Conv2d(**{**FITS, **change})
    assert not suits(layer)
    assert candidates(layer) == others


def test_layers_that_the_kernels_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "triton", object())
    for channels, filters in ((1, 1), (3, 16), (64, 64), (16, 24)):
        assert candidates(nn.Conv2d(**{**FITS, "in_channels": channels, "out_channels": filters}))[0] == "few"
    assert candidates(nn.Conv2d(**FITS)) == ["few"]
    assert candidates(nn.Conv2d(**{**FITS, "out_channels": 5})) == ["few", "aligned"]
    assert not suits(Own(**FITS))
    assert not suits(nn.Linear(3, 3))
    monkeypatch.setattr(convolutions, "triton", None)
    assert not suits(nn.Conv2d(**FITS)), "where there is no Triton"


def test_blocks_hold_the_channels() -> None:
    assert [block(n) for n in (1, 16, 17, 32, 33, 64, 144)] == [16, 16, 32, 32, 64, 64, 256]
    assert [block(n, 8) for n in (1, 8, 9, 64)] == [8, 8, 16, 64]


@pytest.mark.parametrize("a", range(1, WIDEST + 1, 3))
def test_a_tile_is_whole(a: int) -> None:
    """Rows that are taken together are of one program, and shared memory holds what is read ahead: 227 KB on Hopper, 99
    KB on consumer GPUs, of which something is left for the weights."""
    for b in range(a, WIDEST + 1):
        tile = correlate_tile(a, b)
        assert tile.rows % tile.step == 0
        taps = min(tile.taps, block(3 * a))
        assert 2 * tile.stages * tile.columns * (tile.step * taps + (tile.step + 2) * block(b, 8)) <= 99 * 1024
        for c, k in ((a, b), (b, a)):
            tile = convolve_tile(c, k)
            assert tile.step == 1
            assert 2 * tile.stages * tile.columns * min(block(3 * c), 3 * block(c)) <= 64 * 1024


# -- which is faster ---------------------------------------------------------------------------------------------------

Times = dict[tuple[int, str], float]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Times], list[tuple[int, str]]]:
    """Times by (filters, kind) in place of a GPU's; a NaN is a kind that does not work there."""

    def install(times: Times) -> list[tuple[int, str]]:
        asked: list[tuple[int, str]] = []

        def layer_time(module: nn.Conv2d, shape: tuple[int, ...], kind: str) -> float:
            asked.append((module.out_channels, kind))
            if math.isnan(times[asked[-1]]):
                raise RuntimeError("Failed to find C compiler")
            return times[asked[-1]]

        monkeypatch.setattr(convolutions, "layer_time", layer_time)
        monkeypatch.setattr(convolutions, "triton", object())
        return asked

    return install


def test_the_faster_kind_is_found_by_layer(clock: Any) -> None:
    asked = clock(
        {(16, ""): 3, (16, "few"): 2, (5, ""): 3, (5, "few"): 4, (5, "aligned"): 1, (7, ""): 1, (7, "aligned"): 2}
    )
    net = Nested()
    assert faster(net, torch.zeros(2, 3, 8, 8)) == {"stem": "few", "blocks.0.0": "aligned"}
    assert len(asked) == 7
    assert kinds(net) == [nn.Conv2d] * 3


def test_layers_alike_are_tried_once(clock: Any) -> None:
    asked = clock({(6, ""): 2, (6, "few"): 1, (6, "aligned"): 3})
    net = nn.Sequential(*(nn.Conv2d(6, 6, 3, padding=1, bias=False) for _ in range(4)))
    assert faster(net, torch.zeros(1, 6, 4, 4)) == dict.fromkeys("0123", "few")
    assert len(asked) == 3


def test_a_kind_that_does_not_work_here_is_passed_over(clock: Any) -> None:
    layer = nn.Conv2d(16, 5, 3, padding=1, bias=False)
    clock({(5, ""): 3, (5, "few"): math.nan, (5, "aligned"): 2})
    assert best_of(layer, (1, 16, 8, 8), by_rule=False) == "aligned"
    assert best_of(layer, (1, 16, 8, 8), by_rule=True) == "aligned"
    clock(dict.fromkeys(((5, ""), (5, "few"), (5, "aligned")), math.nan))
    assert best_of(layer, (1, 16, 8, 8), by_rule=False) == ""
    assert best_of(layer, (1, 16, 8, 8), by_rule=True) == ""


def test_by_rule_the_clock_has_no_say(clock: Any) -> None:
    layer = nn.Conv2d(16, 5, 3, padding=1, bias=False)
    for few in (1, 5):
        clock({(5, ""): 3, (5, "few"): few, (5, "aligned"): 2})
        assert best_of(layer, (1, 16, 8, 8), by_rule=True) == "few"


@pytest.mark.parametrize(
    ("channels", "filters", "size", "kind"),
    [
        (64, 64, 9, ""), (40, 40, 32, ""), (64, 64, 8, "few"), (32, 64, 9, "few"), (64, 32, 9, "few"),
        (64, 63, 9, "few"), (41, 64, 9, "few"), (44, 44, 9, "few"), (16, 16, 9, "few"),
    ],
)  # fmt: skip
def test_by_rule_cudnn_has_what_it_is_good_at(clock: Any, channels: int, filters: int, size: int, kind: str) -> None:
    net, x = nn.Sequential(nn.Conv2d(channels, filters, 3, padding=1, bias=False)), torch.zeros(1, channels, 8, size)
    clock({(filters, ""): 9, (filters, "few"): 1, (filters, "aligned"): 2})
    assert faster(net, x, by_rule=True) == ({"0": kind} if kind else {})
    assert faster(net, x) == {"0": "few"}, "by the clock anything may win"


def test_kernels_are_compiled_several_at_a_time(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every width once, before any is timed; one that cannot be is left to the trial."""
    asked = clock({(n, kind): 1 for n in (3, 5, 8) for kind in ("", "few", "aligned")})
    both = threading.Barrier(2)
    launched: list[tuple[Any, ...]] = []

    def convolve(x: Tensor, weight: Tensor, flip: bool) -> None:
        assert not asked
        assert not torch.is_grad_enabled()
        launched.append((tuple(x.shape), len(weight), flip))
        if not flip:
            both.wait(timeout=30)

    def correlate(x: Tensor, grad: Tensor, weight: Tensor) -> None:
        launched.append((tuple(x.shape), tuple(grad.shape)))
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(convolutions, "launch_convolve", convolve)
    monkeypatch.setattr(convolutions, "launch_correlate", correlate)
    devices: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: devices.append(device) or nullcontext())
    net = nn.ModuleList([nn.Conv2d(16, n, 3, padding=1, bias=False) for n in (3, 5, 3)])
    net.append(nn.Conv2d(100, 8, 3, padding=1, bias=False))
    monkeypatch.setattr(convolutions, "seen", lambda *_: {str(i): (1, 16, 8, 8) for i in range(4)})
    faster(net, torch.zeros(1, 16, 8, 8))
    x = (1, 16, 8, 8)
    expected = [each for n in (3, 5) for each in ((x, n, False), ((1, n, 8, 8), n, True), (x, (1, n, 8, 8)))]
    assert sorted(launched, key=str) == sorted(expected, key=str)
    assert devices == [torch.device("cpu")] * 2
    assert len(asked) == 8, "and then timed"


def test_layers_that_differ_are_tried_each(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size of their images, their stride, their bias."""
    asked = clock({(5, kind): 1 for kind in ("", "few", "aligned")})
    how: list[dict[str, Any]] = [{}, {}, {"stride": 2}, {"bias": True}, {}]
    net = nn.ModuleList([nn.Conv2d(16, 5, 3, **{"padding": 1, "bias": False, **each}) for each in how])
    sizes = {str(i): (1, 16, 8, 9 if i == 4 else 8) for i in range(5)}
    monkeypatch.setattr(convolutions, "seen", lambda *_: sizes)
    faster(net, torch.zeros(1, 16, 8, 8))
    assert len(asked) == 3 + 2 + 2 + 3


def test_looking_at_shapes_leaves_no_trace() -> None:
    net = Nested().train()
    net.blocks.eval()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    shapes = convolutions.seen(net, torch.randn(2, 3, 8, 6))
    assert shapes["blocks.0.0"] == (2, 16, 8, 6)
    assert shapes["blocks.1"] == (2, 5, 8, 6)
    with pytest.raises(RuntimeError):
        convolutions.seen(net, torch.randn(2, 4, 8, 6))
    assert [net.training, net.norm.training, net.blocks.training, net.blocks[0].training] == [True, True, False, False]
    assert not any(module._forward_pre_hooks for module in net.modules())
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


def test_every_kind_is_a_convolution() -> None:
    assert all(issubclass(kind, nn.Conv2d) for kind in VARIANTS.values())
    assert not any(vars(kind).get("__init__") for kind in VARIANTS.values()), "only what forward does is swapped"


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # memory that nobody has written to is NaN
    print(json.dumps({name: measured(name) for name in CASES}))
