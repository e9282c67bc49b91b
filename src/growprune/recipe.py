"""From the words of a configuration to the parts of a run: stages, schedule, criterion, ratios, removal."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from growprune import config as configs
from growprune import criteria
from growprune.asking import Measure
from growprune.compact import calibrate
from growprune.config import Config, Prune
from growprune.errors import GrowpruneError
from growprune.feeds import Images
from growprune.pruner import Pruner
from growprune.ratios import Global, Ratios, Speedup
from growprune.schedule import GReg1, GReg2, OneShot, Schedule


@dataclass(frozen=True)
class Stage:
    """One stretch of training with its own optimizer; `number` tells its random numbers from the others'."""

    name: str
    number: int
    batch: int

    @property
    def option(self) -> str:
        return "--prune-batch" if self.name == "prune" else "--batch"

    def check(self, there: int) -> None:
        """Are there images enough for a batch?"""
        if self.batch > there:
            raise GrowpruneError(f"{self.option}: no batch of {self.batch} from {there} images; give a smaller one")


def stages(config: Config) -> list[Stage]:
    """What a run consists of."""
    if isinstance(config, Prune):
        return [Stage("prune", 1, config.prune_batch), Stage("finetune", 2, config.batch)]
    return [Stage("train", 0, config.batch)]


def rates(config: Config, stage: Stage, steps: int, epoch: int) -> list[float]:
    """A stage's learning rate at each of its steps, of which an epoch has so many."""
    if isinstance(config, Prune) and stage.name == "prune":
        return [config.prune_lr] * steps
    return configs.rates(config.lr, config.epochs, epoch, min(config.warm_up, config.epochs / 2))


def optimizer(config: Config, net: nn.Module, rates: Sequence[float], device: str) -> torch.optim.Optimizer:
    """On a GPU fused, with the learning rate where a captured step reads it."""
    cuda, first = device.startswith("cuda"), rates[0] if rates else 0.0
    return torch.optim.SGD(
        net.parameters(), torch.tensor(first, device=device) if cuda else first, config.momentum,
        weight_decay=config.weight_decay, nesterov=config.nesterov, fused=cuda,
    )  # fmt: skip


def schedule(config: Prune) -> Schedule:
    """How the filters go."""
    shared: dict[str, Any] = {name: getattr(config, name) for name in ("delta_lambda", "tau", "ku", "ks", "stop_ratio")}
    if config.schedule == "greg1":
        return GReg1(**shared)
    if config.schedule == "greg2":
        picking = {name: getattr(config, name) for name in ("delta_lambda_pick", "tau_pick", "gamma")}
        return GReg2(**shared, **picking)
    return OneShot()


def criterion(config: Prune, images: Images) -> str | criteria.Criterion:
    """Which go; those that measure on data get some training batches, the same in every process."""
    batch = min(config.prune_batch, images.sizes["train"])
    if config.criterion == "taylor":
        return criteria.Taylor(list(images.sample(batch)))
    if config.criterion == "obd":
        return criteria.OBD(list(images.sample(batch)), seed=config.seed)
    return config.criterion


def ratios(config: Prune | Measure) -> Ratios:
    """How much of each layer goes."""
    if config.speedup is not None:
        return Speedup(config.speedup)
    if config.global_ratio is not None:
        return Global(config.global_ratio, stem=config.global_stem)
    return config.ratios or 0.0


def ignored(config: Prune | Measure) -> list[str]:
    """Layers that are never touched."""
    return [name.strip() for name in config.ignore.split(",") if name.strip()]


def pruner(config: Prune, net: nn.Module, images: Images) -> Pruner:
    """All of it, on a network."""
    return Pruner(
        net, images.example(), schedule(config), criterion(config, images), ratios(config), config.granularity,
        config.scope, config.coupled, ignored(config), config.seed, config.multiple,
    )  # fmt: skip


def removed(pruner: Pruner, images: Images, batch: int, fixed: bool, say: Callable[[str], None]) -> nn.Module:
    """The smaller network in place of the pushed one, with batch-norm statistics estimated anew; not so if they were
    `fixed` while filters were pushed, for then the weights have come to fit them."""
    batches = None if fixed else [x for x, _ in images.sample(batch)]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        small = pruner.compact(calibrate=batches, fixed_norm=fixed)
    for each in heard:
        say(str(each.message))
    if pruner.groups.granularity == "weight" and batches is not None:
        calibrate(small, batches)
    return small
