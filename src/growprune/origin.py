"""The network that a run begins with: fresh by the seed, or with trained weights; the same in every process.

And what can be refused before it is made.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from growprune import config as configs
from growprune import data, distributed, evaluation, models, ratios, recipe
from growprune.config import CLASSES, Config, Prune
from growprune.errors import GrowpruneError
from growprune.feeds import Images
from growprune.reading import subfolders
from growprune.run import CONFIG, Folder, read_json
from growprune.weights import restore, weights_file


def sensible(config: Config) -> None:
    """Refuse a plan that none could follow, whatever has been run before."""
    if isinstance(config, Prune):
        recipe.schedule(config)
        ratios.read(recipe.ratios(config))


def foresee(config: Config) -> None:
    """Refuse what cannot work before any image is read, or downloaded."""
    models.known(config.model)
    data.known(config.data)
    weights = getattr(config, "weights", None)
    if config.command == "prune" and weights == str(place := configs.folder("train", config)) and not place.exists():
        raise GrowpruneError(
            f"prune: no --weights given, and no network trained in {place}; train one (growprune train --model "
            f"{config.model} --data {config.data}), or give --weights"
        )
    if weights and distributed.first_of_machine():  # they may have to be downloaded
        weights_file(weights, config.model, classes(config.data))


def classes(name: str) -> int | None:
    """Of a set, as far as it can be told without reading it."""
    return CLASSES.get(name) or len(subfolders(Path(name) / "train")) or None


def network(config: Config, images: Images, folder: Folder | None) -> nn.Module:
    """On the images' device, with its weights; refused if it does not fit the images."""
    net = made(config, images, beginning(config, images, folder)).to(images.device)
    evaluation.fits(net, images, config)
    distributed.same_weights(images.world, net)
    return net


def made(config: Config, images: Images, weights: str | None = None) -> nn.Module:
    """The model as its function makes it, which may draw random numbers, or that with these weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        if not weights:
            return models.fresh(config.model, images.classes)
        with distributed.first_here(images.world):  # which may download them
            return restore(config.model, images.classes, weights)


def scaled_as(weights: str | None) -> str | None:
    """How the run that these weights are of scaled its images, where they are of one."""
    place = Path(weights or "")
    config = (place if place.is_dir() else place.parent) / CONFIG
    with suppress(GrowpruneError):
        return read_json(config).get("normalize") if weights else None
    return None


def beginning(config: Config, images: Images, folder: Folder | None) -> str | None:
    """Where the first weights lie: the run's own copy, for theirs may have changed or gone since it began."""
    weights: str | None = getattr(config, "weights", None)
    if not weights:
        return None
    kept: str | None = distributed.from_first(images.world, folder.base if folder else None)
    return kept if kept and Path(kept).is_file() else weights
