"""Real architectures: each family of torchvision's classifiers is traced whole, pruned, and proved on a small image."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models as zoo

import growprune as gp
from growprune.grouping import UNREACHED, build, trace
from growprune.groups import layer_name
from growprune.models import create

FAMILIES = {
    "convnext_tiny": (64, 18),
    "densenet121": (64, 119),
    "efficientnet_b0": (64, 34),
    "efficientnet_v2_s": (64, 69),
    "googlenet": (64, 56),
    "inception_v3": (96, 93),
    "mnasnet0_5": (64, 19),
    "mobilenet_v2": (64, 19),
    "mobilenet_v3_small": (64, 22),
    "regnet_x_400mf": (64, 32),
    "regnet_y_400mf": (64, 33),
    "resnet18": (64, 8),
    "resnext50_32x4d": (64, 16),
    "shufflenet_v2_x0_5": (64, 17),
    "squeezenet1_1": (64, 24),
    "swin_t": (64, 12),
    "swin_v2_t": (64, 24),
}
"""Image size, and how many layers can be pruned at least."""


def built(name: str, size: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return zoo.get_model(name, weights=None, num_classes=10, **extra).eval(), torch.randn(1, 3, size, size)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_pruned_and_proved(name: str) -> None:
    """No operator is unknown, no layer is given up on trial, and the smaller network passes its proof."""
    size, layers = FAMILIES[name]
    model, x = built(name, size)
    assert not trace(model, x).unknown
    pruner = gp.Pruner(model, x, gp.OneShot(), ratios=0.5)
    assert not pruner.skipped
    assert len(pruner.groups.layers) >= layers
    assert not set(pruner.stays) & {layer.name for layer in pruner.groups.layers}
    losing = {layer_name(s.tensor) for s in pruner.groups.of_role("filter")}
    stays = {layer for layer, why in pruner.stays.items() if why != UNREACHED}  # Inception's other head: few pixels
    assert losing | stays == set(pruner.groups.order)
    coupled = build(model, x, coupled=True)
    promised = {name for name, why in pruner.stays.items() if "the option coupled" in why}
    assert promised <= {layer_name(s.tensor) for s in coupled.of_role("filter")}
    small = pruner.compact()
    assert type(small) is type(model)
    assert gp.speedup(gp.measure(model, x), gp.measure(small, x)) > 1.15


def test_vision_transformer_loses_hidden_units_only() -> None:
    """Heads and the stream stay (layer norms mix the stream), the MLPs' hidden units go."""
    model = zoo.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=10).eval()
    nn.init.normal_(model.heads.head.weight)  # torchvision starts it at zero: any output would pass
    pruner = gp.Pruner(model, torch.randn(1, 3, 32, 32), gp.OneShot(), ratios=0.5)
    assert [layer.size for layer in pruner.groups.layers] == [64, 64]
    assert gp.sparsity(pruner.compact()) < 0.5


class Steps(nn.Module):
    """Control flow that depends on the data: nothing that must be made static could follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bright = bool(x.mean() > -1e9)
        x = self.first(x)
        for layer in self.inner:
            if bright:
                x = torch.relu(layer(x))
        return self.last(x)


def test_data_dependent_control_flow_is_traced() -> None:
    pruner = gp.Pruner(Steps(), torch.randn(2, 6), gp.OneShot())
    assert [layer.name for layer in pruner.groups.layers] == [f"inner.{i}" for i in range(4)]
    assert pruner.compact().inner[3].weight.shape == (4, 4)


class Gated(nn.Module):
    """A hidden layer in equal parts that meet: by a gated unit of torch's own, a product, or a sum."""

    def __init__(self, way: str, parts: int, pixels: bool) -> None:
        super().__init__()
        make: Any = (lambda read, made: nn.Conv2d(read, made, 1)) if pixels else nn.Linear
        self.way, self.parts, self.dim = way, parts, 1 if pixels else -1
        self.stem, self.wide, self.head = make(3, 6), make(6, 24), make(24 // parts, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.stem(x))
        if self.way == "glu":
            x = F.glu(x, self.dim)
        else:
            x, *others = x.chunk(self.parts, self.dim)
            for other in others:
                x = F.silu(x) * other if self.way == "product" else x + other
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize(("way", "parts"), [("glu", 2), ("product", 2), ("product", 3), ("sum", 2), ("sum", 4)])
def test_equal_parts_lose_the_same_places(way: str, parts: int, pixels: bool) -> None:
    torch.manual_seed(0)
    model, x = Gated(way, parts, pixels), torch.randn(2, 3, 5, 5) if pixels else torch.randn(4, 3)
    pruner = gp.Pruner(model, x, gp.OneShot(), ratios=0.5)
    assert [(layer.name, layer.size) for layer in pruner.groups.layers] == [("wide", 24 // parts)]
    small, keep = pruner.compact(fold=False), pruner.masks()["wide"]
    assert int(keep.sum()) == 12 // parts
    assert torch.equal(small.wide.weight, model.wide.weight[keep.repeat(parts)])
    with torch.no_grad():
        for p in (model.wide.weight, model.wide.bias):
            p[~keep.repeat(parts)] = 0
    torch.testing.assert_close(small(x), model(x))


class Parted(nn.Module):
    """What `part` makes of a hidden layer's 8 channels (of 6×6 pixels) and of its input, with a convolution behind."""

    def __init__(self, part: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], width: int) -> None:
        super().__init__()
        self.stem, self.wide, self.last = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 8, 1), nn.Conv2d(width, 4, 1)
        self.head, self.part = nn.Linear(4, 2), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(self.last(self.part(self.wide(x), x)).mean((2, 3)))  # type: ignore[no-any-return]


def grey(x: torch.Tensor) -> torch.Tensor:
    """Eight times the mean of all channels: channels that are no layer's."""
    return x.mean(1, keepdim=True).expand(-1, 8, -1, -1)


PARTS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], int, str | None]] = {
    "over height": (lambda y, x: sum(y.chunk(2, 2), torch.zeros(())), 8, None),
    "gated over height": (lambda y, x: F.glu(y, 2), 8, None),
    "unequal": (lambda y, x: torch.cat([2 * part for part in y.chunk(3, 1)], 1), 8, "chunk"),
    "beside no layer's": (lambda y, x: torch.cat([grey(x), y], 1).chunk(2, 1)[1], 8, "chunk"),
    "before no layer's": (lambda y, x: torch.cat([y, grey(x)], 1).chunk(2, 1)[0], 8, "chunk"),
    "gated by no layer's": (lambda y, x: F.glu(torch.cat([y, grey(x)], 1), 1), 8, "glu"),
    "two dimensions": (lambda y, x: y.view(-1, 2, 4, 6, 6).transpose(1, 3).chunk(2, 2)[0][:, :, 0], 6, "view"),
    "gated, of two": (lambda y, x: F.glu(y.view(-1, 2, 4, 6, 6).transpose(1, 3), 2)[:, :, 0], 6, "view"),
}


@pytest.mark.parametrize("name", PARTS)
def test_which_parts_let_a_layer_go(name: str) -> None:
    """Along another dimension nothing is asked of the channels; what cannot be cut into equal parts again stays."""
    torch.manual_seed(0)
    part, width, why = PARTS[name]
    pruner = gp.Pruner(Parted(part, width), torch.randn(2, 3, 6, 6), gp.OneShot(), ratios=0.5)
    assert pruner.stays.get("wide") == (why and f"{why}() needs all of its channels")
    assert "last" not in pruner.stays
    assert pruner.skipped == {}
    pruner.compact()


class Hard(nn.Module):
    """A width written into the forward: no rule can see it, the trial does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3)
        self.fc = nn.Linear(8 * 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.c(self.b(self.a(x))).view(-1, 32))


def test_a_width_in_the_code_is_found_by_trial() -> None:
    with pytest.warns(UserWarning, match=r"1 layer stays.*'c'"):
        pruner = gp.Pruner(Hard(), torch.randn(1, 3, 8, 8), gp.OneShot())
    assert list(pruner.skipped) == ["c"]
    assert set(pruner.stays) == {"a", "c", "fc"}
    assert [layer.name for layer in pruner.groups.layers] == ["b"]
    pruner.compact()


class Counting(nn.Module):
    """Its forward counts channels, and what comes after starts at zero: a head, the norm that ends a block, a gate."""

    def __init__(self, zero: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.norm, self.head, self.gate = nn.BatchNorm2d(8), nn.Linear(8, 2), nn.Parameter(torch.ones(()))
        nn.init.zeros_(self.get_parameter(zero))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.a(x))
        inner = torch.relu(self.b(x))
        x = x + self.gate * self.norm(self.c(inner / inner.shape[1] ** 0.5))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("zero", ["head.weight", "norm.weight", "gate"])
def test_a_width_in_the_code_is_found_before_what_starts_at_zero_has_moved(zero: str) -> None:
    torch.manual_seed(0)
    model, x = Counting(zero).eval(), torch.randn(2, 3, 8, 8)
    with pytest.warns(UserWarning, match=r"1 layer stays.*'b'"):
        pruner = gp.Pruner(model, x, coupled=True)
    assert list(pruner.skipped) == ["b"]
    assert not bool(model.get_parameter(zero).any())


class Wide(Counting):
    """One filter less is fine with it, half of them less is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.b(torch.relu(self.a(x)))
        return self.head(self.c(inner * (1 if inner.shape[1] > 5 else 2)).mean((2, 3)))


def test_a_plan_is_tried_before_what_starts_at_zero_has_moved() -> None:
    with pytest.raises(gp.GrowpruneError, match="strays"):
        gp.Pruner(Wide("head.weight").eval(), torch.randn(2, 3, 8, 8))


class Everything(nn.Module):
    """A layer for each reason to stay whole, and two that lose filters."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("stem", "kept", "inner", "stream", "again", "padded", "split", "depthwise", "free"):
            groups = 8 if name == "depthwise" else 1
            width = 3 if name == "stem" else 2 if name == "padded" else 8
            setattr(self, name, nn.Conv2d(width, 8, 1, groups=groups))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.depthwise(self.stem(x))
        x = self.stream(self.inner(x))
        x = x + self.again(torch.relu(x))
        x = self.kept(x)
        x = torch.stack(self.split(x).chunk(2, 1)).sum(0)[:, :2]
        x = self.padded(x) + torch.ones(8, 1, 1)
        return self.head(self.free(x).mean((2, 3)))


def test_layers_that_stay_whole_say_why() -> None:
    model, x = Everything(), torch.randn(1, 3, 4, 4)
    pruner = gp.Pruner(model, x, gp.OneShot(), ignore=["kept"])
    assert [layer.name for layer in pruner.groups.layers] == ["inner", "free"]
    assert pruner.stays == {
        "stem": "it reads the input, and goes only by ratios in a list or by name, or a global one with the stem",
        "depthwise": "it is tied to a layer that stays",
        "stream": "what is ignored belongs to it, or reads it",
        "again": "what is ignored belongs to it, or reads it",
        "kept": "it is ignored",
        "split": "slice() needs all of its channels",
        "padded": "it is added to what no layer makes",
        "head": "it makes what the model returns",
    }
    tied = "it is added to what other layers make, and goes only with the option coupled"
    free = gp.Pruner(model, x, gp.OneShot())
    assert {name for name, why in free.stays.items() if why == tied} == {"stream", "again"}
    padded = gp.Pruner(create("resnet20", 10), torch.randn(1, 3, 32, 32), gp.OneShot())  # half of a shortcut is zeros
    assert padded.stays["layer2.0.conv2"] == tied
    coupled = gp.Pruner(model, x, gp.OneShot(), coupled=True, ratios={"stem": 0.5, "inner": 0.5})
    assert set(coupled.stays) == {"split", "padded", "head"}
    assert gp.Pruner(model, x, gp.OneShot(), granularity="weight").stays == {}
    assert set(gp.Pruner(model, x, gp.OneShot(), granularity="weight", ignore=["kept"]).stays) == {"kept"}


class Pretrained(nn.Module):
    """Two heads on the same features; the example runs one of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.c, self.b = nn.Linear(6, 16), nn.Linear(16, 10), nn.Linear(10, 12)
        self.head, self.project = nn.Linear(12, 3), nn.Sequential(nn.Linear(width, 10), nn.ReLU(), nn.Linear(10, 4))

    def forward(self, x: torch.Tensor, pretrain: bool = False) -> torch.Tensor:
        x = self.features(x)
        return self.project(x) if pretrain else self.head(x)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.b(torch.relu(self.c(torch.relu(self.a(x))))))


def test_a_layer_that_the_example_does_not_reach_is_told() -> None:
    model, x = Pretrained(12), torch.randn(2, 6)
    with pytest.warns(
        UserWarning, match=r"not reach 'project.0', .* as many channels as 'b' makes: .* 'b' in the option ignore"
    ):
        pruner = gp.Pruner(model, x, gp.OneShot())
    assert pruner.stays["project.0"] == "the example does not reach it"
    assert pruner.groups.order == ("a", "c", "b", "head")
    small = gp.Pruner(model, x, gp.OneShot(), ratios={"a": 0.5}, ignore=["b"]).compact()
    assert torch.equal(small(x, pretrain=True), small.project(small.features(x)))
    assert "project.2" in gp.Pruner(Pretrained(5), x, gp.OneShot()).stays  # it cannot read what goes: no warning
    assert "project.2" in gp.Pruner(model, x, gp.OneShot(), granularity="weight").stays


def test_a_layer_that_the_example_does_not_reach_stays_told_when_others_are_given_up() -> None:
    class Both(Hard):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Linear(5, 5)

    with pytest.warns(UserWarning, match="1 layer stays"):
        pruner = gp.Pruner(Both(), torch.randn(1, 3, 8, 8), gp.OneShot())
    assert pruner.stays["never"] == "the example does not reach it"


class Tied(nn.Module):
    """Its first layer gates the input, its second is also used as a number, its third is returned in training."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.b, self.c = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1)
        self.d, self.head, self.extra = nn.Conv2d(5, 6, 1), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.c(self.b(x * torch.sigmoid(self.gate(x))) * self.b.weight.norm())
        last = self.d(x).mean((2, 3))
        return (self.head(last), self.extra(last), x) if self.training else self.head(last)


def test_other_reasons_to_stay() -> None:
    stays = gp.Pruner(Tied(), torch.randn(2, 3, 4, 4), gp.OneShot()).stays
    assert stays == {
        "gate": "it is tied to the model's input",
        "b": "a tensor of it is used as a whole",
        "c": "it makes what the model returns",
        "head": "it makes what the model returns",
    }


def test_what_hangs_on_a_layer_given_up_on_trial_stays_too() -> None:
    class Hung(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1)
            self.dw, self.fc = nn.Conv2d(8, 8, 1, groups=8), nn.Linear(8 * 16, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.dw(self.c(self.b(self.a(x)))).view(-1, 128))

    with pytest.warns(UserWarning, match="1 layer stays"):
        pruner = gp.Pruner(Hung(), torch.randn(1, 3, 4, 4), gp.OneShot())
    assert list(pruner.skipped) == ["c"]
    assert pruner.stays["c"] == pruner.skipped["c"]
    assert pruner.stays["dw"] == "it is tied to a layer that stays"
    assert set(pruner.stays) == {"a", "c", "dw", "fc"}


def test_that_no_layer_can_go_is_said_with_the_reasons() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(gp.GrowpruneError, match=r"1 stays whole since it reads the input, .* \(0\), 1 since it makes"):
        gp.Pruner(model, torch.randn(1, 3, 2, 2), gp.OneShot())


def test_a_residual_stream_goes_as_one_when_coupled() -> None:
    """One ratio reaches the stream too, though the stem is part of it; a stem by itself stays."""
    x = torch.randn(1, 3, 32, 32)
    narrow = gp.Pruner(zoo.resnet18(num_classes=10), x, gp.OneShot(), ratios=0.5, coupled=True)
    assert "conv1" in narrow.groups.order
    small = narrow.compact()
    assert (small.conv1.out_channels, small.layer1[1].conv2.out_channels) == (32, 32)
    plain = gp.Pruner(zoo.vgg11_bn(num_classes=10).features, x, gp.OneShot(), ratios=0.5, coupled=True)
    assert "0" not in plain.masks()


def test_a_head_that_only_training_uses_is_cut_too() -> None:
    """GoogLeNet's auxiliary classifiers read what the trunk makes, but only in training."""
    torch.manual_seed(0)
    model = zoo.googlenet(weights=None, num_classes=10, aux_logits=True, init_weights=False)
    small = gp.Pruner(model, torch.randn(1, 3, 96, 96), gp.OneShot(), ratios=0.5).compact()
    out = small.train()(torch.randn(2, 3, 96, 96))
    assert [tuple(t.shape) for t in out] == [(2, 10)] * 3
