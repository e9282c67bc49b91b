"""What the paper ran: its networks, its ways to prune them, and what these come to at three scales.

paper   the paper's own numbers                          overnight on one GPU
short   Ku = 1, everything else as the paper             an hour or two
smoke   small networks on small images, a few steps      minutes on a CPU; says that it works, nothing else
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from growprune.config import Prune, Train

Scale = Literal["paper", "short", "smoke"]


@dataclass(frozen=True)
class Base:
    """A network to prune, and how it is trained here: with a cosine instead of the paper's steps."""

    model: str
    data: str
    epochs: int
    accuracy: float  # the paper's, in percent
    small: str  # what stands for it at smoke scale

    @property
    def name(self) -> str:
        return f"{self.model}-{self.data}"

    def named(self, scale: Scale) -> str:
        return f"smoke-{self.name}" if scale == "smoke" else self.name

    def config(self, scale: Scale, **more: Any) -> Train:
        if scale == "smoke":
            return Train(
                model=self.small, data="digits", epochs=4, batch=64, lr="cosine:0.1", warm_up=1.0, threads=1, **more
            )
        return Train(model=self.model, data=self.data, epochs=self.epochs, **more)


RESNET56 = Base("resnet56", "cifar10", 100, 93.36, "growprune.demo:network")
VGG19 = Base("vgg19", "cifar100", 200, 74.02, "growprune.paper.setting:small_vgg")


def small_vgg(num_classes: int = 10) -> nn.Module:
    """Sixteen convolutions as in VGG19, for grey images of 8×8 pixels."""
    widths = [8] * 4 + [12] * 6 + [16] * 6
    layers: list[nn.Module] = []
    for before, width in zip([1, *widths], widths, strict=False):
        layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes))


@dataclass(frozen=True)
class Setting:
    """One way to prune one network; what is None is the paper's, or the scale's."""

    base: Base
    schedule: Literal["oneshot", "greg1", "greg2"]
    ratios: str | None = None
    global_ratio: float | None = None
    criterion: Literal["l1", "obd", "random"] = "l1"
    scope: Literal["filter", "path"] = "filter"
    ku: int | None = None
    watched: str | None = None  # a layer whose norms are kept: GReg-2's picking goes on, then nothing is fine-tuned
    paper_scale: bool = False  # at the paper's length even at the short scale

    def at(self, scale: Scale) -> Scale:
        return "paper" if self.paper_scale and scale == "short" else scale

    def interval(self, scale: Scale) -> int | None:
        """Ku."""
        if self.schedule == "oneshot":
            return None
        return self.ku or (10 if self.at(scale) == "paper" else 1)

    def config(self, scale: Scale, seed: int, weights: Path, **more: Any) -> Prune:
        """The run it comes to."""
        scale = self.at(scale)
        options: dict[str, Any] = {
            key: getattr(self, key) for key in ("schedule", "ratios", "global_ratio", "criterion", "scope")
        }
        options |= {} if (ku := self.interval(scale)) is None else {"ku": ku}
        options |= SMOKE if scale == "smoke" else {}
        if self.watched is not None:
            ceiling = WATCHED_UNTIL * (SMOKE["delta_lambda_pick"] / 1e-5 if scale == "smoke" else 1)
            options |= {"tau_pick": ceiling, "tau": ceiling * 1.0001, "ks": 0, "epochs": 0}
        base = self.base.config(scale)
        where: dict[str, Any] = {"model": base.model, "data": base.data, "threads": base.threads}
        return Prune(seed=seed, weights=str(weights), **where, **options, **more)

    def key(self, scale: Scale, seed: int) -> str:
        """The name of its run, the same wherever the same run is asked for, at whatever scale.

        >>> Setting(RESNET56, "greg1", "[0, 0.9, 0.9, 0.9]").key("short", 0)
        'resnet56-cifar10-greg1-0_0.9_0.9_0.9-ku1-seed0'
        """
        amount = "_".join(re.findall(r"[\d.]+", self.ratios)) if self.ratios else f"global{self.global_ratio}"
        words = [self.base.named(scale), self.schedule, amount]
        words += [self.criterion] if self.criterion != "l1" else []
        words += [self.scope] if self.scope != "filter" else []
        words += [] if (ku := self.interval(scale)) is None else [f"ku{ku}"]
        words += ["watched"] if self.watched else []
        return "-".join([*words, f"seed{seed}"])


WATCHED_UNTIL = 0.03
"""λ up to which the paper's figure 1 is drawn: three times what GReg-2 picks at."""

SMOKE: dict[str, Any] = {
    "epochs": 2, "batch": 64, "prune_batch": 64, "lr": "0:1e-2,1:1e-3", "prune_lr": 0.02,
    "delta_lambda": 0.1, "delta_lambda_pick": 0.002, "ks": 10,
}  # fmt: skip
