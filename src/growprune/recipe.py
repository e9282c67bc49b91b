"""From the words of a configuration to the parts of the method: schedule, criterion, ratios."""

from __future__ import annotations

from typing import Any

from torch import nn

from growprune import criteria
from growprune.config import Prune
from growprune.feeds import Images
from growprune.pruner import Pruner
from growprune.ratios import Global, Ratios, Speedup
from growprune.schedule import GReg1, GReg2, OneShot, Schedule


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


def ratios(config: Prune) -> Ratios:
    """How much of each layer goes."""
    if config.speedup is not None:
        return Speedup(config.speedup)
    if config.global_ratio is not None:
        return Global(config.global_ratio, stem=config.global_stem)
    return config.ratios or 0.0


def pruner(config: Prune, net: nn.Module, images: Images) -> Pruner:
    """All of it, on a network."""
    return Pruner(
        net, images.example(), schedule(config), criterion(config, images), ratios(config), config.granularity,
        config.scope, config.coupled, [name.strip() for name in config.ignore.split(",") if name.strip()], config.seed,
    )  # fmt: skip
