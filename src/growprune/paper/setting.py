"""What the paper ran: its networks, its ways to prune them, and what these come to at three scales.

paper   the paper's own numbers                          overnight on one GPU
short   Ku = 1, everything else as the paper             an hour or two
smoke   small networks on small images, a few steps      minutes on a CPU; says that it works, nothing else
"""

from __future__ import annotations

import hashlib
import json
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
    tau_pick: float | None = None  # set: only to watch the magnitudes separate; nothing is removed or fine-tuned for
    paper_scale: bool = False  # at the paper's length even at the short scale

    def config(self, scale: Scale, seed: int, weights: Path, **more: Any) -> Prune:
        """The run it comes to."""
        if self.paper_scale and scale == "short":
            scale = "paper"
        options: dict[str, Any] = {
            key: getattr(self, key) for key in ("schedule", "ratios", "global_ratio", "criterion", "scope")
        }
        pushed = self.schedule != "oneshot"
        if self.ku is not None or (scale != "paper" and pushed):
            options["ku"] = self.ku if self.ku is not None else 1
        if scale == "smoke":
            options |= SMOKE
        if self.tau_pick is not None:
            scaled = self.tau_pick * (SMOKE["delta_lambda_pick"] / 1e-5 if scale == "smoke" else 1)
            options |= {"tau_pick": scaled, "tau": scaled * 1.0001, "ks": 0, "epochs": 0}
        base = self.base.config(scale)
        where: dict[str, Any] = {
            "model": base.model,
            "data": base.data,
            "seed": seed,
            "weights": str(weights),
            "threads": base.threads,
        }
        return Prune(**where, **options, **more)

    def key(self, scale: Scale, seed: int) -> str:
        """A name for its run: readable, and the same wherever the same run is asked for, at whatever scale."""
        config = self.config(scale, seed, Path()).to_json()
        mark = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
        amount = self.ratios if self.ratios is not None else f"global{self.global_ratio}"
        words = [self.base.name, self.schedule, self.criterion, amount, self.scope, f"s{seed}", mark]
        return "-".join("".join(c if c.isalnum() or c == "." else "_" for c in str(word)).strip("_") for word in words)


SMOKE: dict[str, Any] = {
    "epochs": 2, "batch": 64, "prune_batch": 64, "lr": "0:1e-2,1:1e-3", "prune_lr": 0.02,
    "delta_lambda": 0.1, "delta_lambda_pick": 0.002, "ks": 10,
}  # fmt: skip
