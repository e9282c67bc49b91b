"""What the paper ran: its networks, its ways to prune them, and what these come to at three scales.

paper   the paper's own numbers                          overnight on one GPU
short   Ku = 1, everything else as the paper             an hour or two    (ImageNet's: Ks too)
smoke   small networks on small images, a few steps      minutes on a CPU; says that it works, nothing else

At smoke scale too a run differs from others as its row says: by numbers in proportion to smoke's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from growprune.config import Config, Prune, Train

Scale = Literal["paper", "short", "smoke"]
Kind = Literal["oneshot", "greg1", "greg2"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Recipe:
    """The paper's settings for one kind of images, where they are not the defaults of `growprune prune`."""

    ku: int
    short_ks: int  # at the short scale
    train: Mapping[str, Any] = field(default_factory=dict)
    prune: Mapping[str, Any] = field(default_factory=dict)


CIFAR = Recipe(ku=10, short_ks=5000)
IMAGENET = Recipe(
    ku=5,
    short_ks=4000,  # of 40,000, which are two passes over ImageNet, but 270 over a set of 9,469 images
    train={"weight_decay": 1e-4, "normalize": "imagenet", "lr": "cosine:0.1"},
    prune={
        "weight_decay": 1e-4, "normalize": "imagenet", "prune_batch": 64, "ks": 40_000, "epochs": 90,
        "lr": "0:1e-2,30:1e-3,60:1e-4,75:1e-5",
    },
)  # fmt: skip


@dataclass(frozen=True)
class Base:
    """A network to prune, and how it is come by: trained here, or with weights that torchvision publishes."""

    model: str
    data: str  # a name, or a folder
    epochs: int
    accuracy: float  # the paper's, in percent
    small: str  # what stands for it at smoke scale
    recipe: Recipe = field(default=CIFAR, compare=False)
    weights: str | None = None
    mark: str = ""  # tells it from another of the same network and images

    @property
    def name(self) -> str:
        """
        >>> RESNET56.name, Base("torchvision:resnet50", "/sets/imagenette", 0, 0.0, "").name
        ('resnet56-cifar10', 'resnet50-imagenette')
        """
        return "-".join(filter(None, (self.model.rpartition(":")[2], called(self.data), self.mark)))

    def named(self, scale: Scale) -> str:
        return f"smoke-{self.name}" if scale == "smoke" else self.name

    def config(self, scale: Scale, **more: Any) -> Train:
        """How it is trained: to the same bits each time, so that one that is lost can be trained again. With published
        weights for no epoch at all: they are tested and kept."""
        more["deterministic"] = True
        if scale == "smoke":
            small = {**SMOKE_BASE, **scaled(self.recipe.train, Train, SMOKE_BASE)}
            small["lr"] = shortened(small["lr"], small["epochs"] / self.epochs)
            return Train(model=self.small, data="digits", **small, **more)
        epochs = 0 if self.weights else self.epochs
        options = {**self.recipe.train, "weights": self.weights}
        return Train(model=self.model, data=self.data, epochs=epochs, **options, **more)


def called(data: str) -> str:
    """A set's name, or a folder's, wherever it lies: the folder one is in has one too."""
    return Path(data).absolute().name


RESNET56 = Base("resnet56", "cifar10", 100, 93.36, "growprune.demo:network")
VGG19 = Base("vgg19", "cifar100", 200, 74.02, "growprune.paper.setting:small_vgg")


def small_vgg(num_classes: int = 10) -> nn.Module:
    """Sixteen convolutions as in VGG19, for grey images of 8×8 pixels."""
    widths = [8] * 4 + [12] * 6 + [16] * 6
    layers: list[nn.Module] = []
    for before, width in zip([1, *widths], widths, strict=False):
        layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes))


WATCHED_UNTIL = 0.03
"""λ up to which we draw figure 1: where its iterations end (30,000 with Ku = 10), three times what GReg-2 picks at."""


@dataclass(frozen=True)
class Setting:
    """One way to prune one network; what is None is the paper's, or the scale's."""

    base: Base
    schedule: Kind
    ratios: str | None = None
    global_ratio: float | None = None
    global_stem: bool = False
    criterion: Literal["l1", "obd", "random"] = "l1"
    scope: Literal["filter", "path"] = "filter"
    granularity: Literal["filter", "weight"] = "filter"
    ignore: str = ""
    ku: int | None = None
    watched: str | None = None  # a layer whose norms are kept: GReg-2's picking goes on, then nothing is fine-tuned
    until: float = WATCHED_UNTIL  # λ to which it goes on then
    paper_scale: bool = False  # at the paper's length even at the short scale
    other: tuple[tuple[str, int | float | str], ...] = ()  # options of `growprune prune` that the paper has otherwise

    def at(self, scale: Scale) -> Scale:
        return "paper" if self.paper_scale and scale == "short" else scale

    def interval(self, scale: Scale) -> int | None:
        """Ku."""
        if self.schedule == "oneshot":
            return None
        return self.ku or (self.base.recipe.ku if self.at(scale) == "paper" else 1)

    def ceiling(self, scale: Scale) -> float:
        """λ to which the norms of one that is watched are kept; smoke's grows by larger steps."""
        return self.until * (10 if scale == "smoke" else 1)

    def others(self, scale: Scale) -> dict[str, Any]:
        if scale != "smoke":
            return dict(self.other)
        small = scaled(dict(self.other), Prune, SMOKE)
        rates = {"lr": shortened(small["lr"], SMOKE["epochs"] / Prune.epochs)} if "lr" in small else {}
        return small | rates

    def config(self, scale: Scale, seed: int, weights: Path, **more: Any) -> Prune:
        """The run it comes to; `more` are options that hold where it has none of its own."""
        scale = self.at(scale)
        own = ("schedule", "ratios", "global_ratio", "global_stem", "criterion", "scope", "granularity", "ignore")
        options: dict[str, Any] = {key: getattr(self, key) for key in own}
        options |= {**self.base.recipe.prune, **(SMOKE if scale == "smoke" else {})}
        if (ku := self.interval(scale)) is not None:
            options |= {"ku": ku} | ({"ks": self.base.recipe.short_ks} if scale == "short" else {})
        if self.watched is not None:
            ceiling = self.ceiling(scale)
            options |= {"tau_pick": ceiling, "tau": ceiling * 1.0001, "ks": 0, "epochs": 0}
        base = self.base.config(scale)
        where: dict[str, Any] = {"model": base.model, "data": base.data, "threads": base.threads}
        options |= {"ignore": ""} if scale == "smoke" else {}  # its network has no such layers
        return Prune(seed=seed, weights=str(weights), **{**more, **where, **options, **self.others(scale)})

    def key(self, scale: Scale, seed: int) -> str:
        """The name of its run, the same wherever the same run is asked for, at whatever scale.

        >>> Setting(RESNET56, "greg1", "[0, 0.9, 0.9, 0.9]").key("short", 0)
        'resnet56-cifar10-greg1-0_0.9_0.9_0.9-ku1-seed0'
        """
        amount = "_".join(re.findall(r"[\d.]+", self.ratios)) if self.ratios else f"global{self.global_ratio}"
        words = [self.base.named(scale), self.schedule, amount, *(["stem"] if self.global_stem else [])]
        words += [self.criterion] if self.criterion != "l1" else []
        words += [self.scope] if self.scope != "filter" else []
        words += [self.granularity] if self.granularity != "filter" else []
        words += [] if (ku := self.interval(scale)) is None else [f"ku{ku}"]
        words += ["watched"] if self.watched else []
        words += [f"until_{self.ceiling(scale):g}"] if self.until != WATCHED_UNTIL else []
        words += [re.sub("[:,]", "_", f"{name}_{value}") for name, value in self.others(scale).items()]
        return "-".join([*words, f"seed{seed}"])


SMOKE_BASE: dict[str, Any] = {"epochs": 4, "batch": 64, "lr": "cosine:0.1", "warm_up": 1.0, "threads": 1}
SMOKE: dict[str, Any] = {
    "epochs": 2, "batch": 64, "prune_batch": 64, "lr": "0:1e-2,1:1e-3", "prune_lr": 0.02,
    "delta_lambda": 0.1, "delta_lambda_pick": 0.002, "ks": 10,
}  # fmt: skip


def scaled(options: Mapping[str, Any], usual: type[Config], small: Mapping[str, Any]) -> dict[str, Any]:
    """Options at smoke scale: of what that has numbers of its own, these times value / usual; all else as it is.

    >>> scaled({"batch": 128, "ks": 10_000, "precision": "fp32"}, Prune, SMOKE)
    {'batch': 32, 'ks': 20, 'precision': 'fp32'}
    """
    return {
        key: type(small[key])(small[key] * value / getattr(usual, key))
        if key in small and not isinstance(value, str)
        else value
        for key, value in options.items()
    }


def shortened(rates: str, share: float) -> str:
    """Learning rates by epoch, of a training of that share of the epochs.

    >>> shortened("0:0.1,100:0.01,150:0.001", 0.02), shortened("cosine:0.2", 0.02)
    ('0:0.1,2:0.01,3:0.001', 'cosine:0.2')
    """
    return re.sub(r"(\d+):", lambda start: f"{round(int(start[1]) * share)}:", rates)
