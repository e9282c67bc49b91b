"""A run's images: what a training step is fed, what a network is tested on, what batch norm is estimated from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from growprune import data
from growprune.config import Config
from growprune.data import Dataset, Normal, Resident
from growprune.distributed import World, first_here
from growprune.reading import Part
from growprune.streaming import Streamed

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ESTIMATION, BATCHES = 9, 10
"""Stage number and count of the batches that batch norm's statistics are estimated from, and criteria measured on."""
LARGE = 250
"""Large images at most in a batch that is tested: every worker holds some of these."""


class Images:
    """One image set on one device."""

    def __init__(self, config: Config, device: str, world: World) -> None:
        with first_here(world):
            found = data.load(config.data, config.data_dir, resolution=config.resolution)
        if config.normalize == "imagenet" and len(found.mean) == 3:
            found = replace(found, mean=IMAGENET[0], std=IMAGENET[1])
        self.dataset: Dataset = found if config.augment else replace(found, pad=0, flip=False)
        self.config, self.device, self.world = config, device, world
        self.test = found.test.to(device) if isinstance(found.test, Part) else None
        self.normal = Normal(self.dataset, device)
        self.shape = found.shape(config.resolution)
        self.classes = len(found.classes)
        self.sizes = {"train": len(found.train), "test": len(found.test)}
        self._source: Resident | Streamed | None = None

    def source(self, batch: int) -> Resident | Streamed:
        """The training images in batches of so many: all sizes share one copy on the device, or the same workers."""
        if self._source is None:
            workers = None if self.config.workers < 0 else self.config.workers
            self._source = (
                Streamed(self.dataset, self.device, batch, workers, self.config.resolution)
                if self.test is None
                else Resident(self.dataset, self.device, batch)
            )
        return self._source.sized(batch)

    def feed(self, batch: int, stage: int) -> FromMemory | FromFiles:
        source = self.source(batch)
        if isinstance(source, Resident):
            return FromMemory(source, self.config.seed, stage, self.world, self.device)
        return FromFiles(source, self.config.seed, stage, self.world, self.device)

    def tested(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the test images, normalised, with their labels."""
        if self.test is not None:
            every = data.batches(self.test, self.device, size)
            chosen: Iterator[tuple[Tensor, Tensor]] = islice(every, self.world.rank, None, self.world.size)
        else:
            source = self.source(self.config.batch)
            assert isinstance(source, Streamed)
            chosen = source.test(min(size, LARGE), self.world.rank, self.world.size)
        for x, y in chosen:
            yield self.normal(x), y

    def sample(self, batch: int, count: int = BATCHES) -> Iterator[tuple[Tensor, Tensor]]:
        """Some training batches, normalised; always the same ones, in every process."""
        source = self.source(batch)
        if isinstance(source, Resident):
            plan = source.plan(self.config.seed, ESTIMATION, 0)[:count].to(self.device)
            found: Iterator[tuple[Tensor, Tensor]] = (source.batch_of(rows) for rows in plan)
        else:
            found = source.epoch(self.config.seed, ESTIMATION, 0, stop=count)
        for x, y in found:
            yield self.normal(x), y

    def example(self) -> Tensor:
        return torch.zeros(1, *self.shape, device=self.device)


class FromMemory:
    """Batches made on the device from its own copy of the images."""

    def __init__(self, source: Resident, seed: int, stage: int, world: World, device: str) -> None:
        self.source, self.seed, self.stage, self.world = source, seed, stage, world
        self.epoch_steps, self.normalized = source.steps, source.normalized
        share = source.batch // world.size
        self.plan = torch.zeros((source.steps, share, 4), dtype=torch.int32, device=device)
        self.epoch = -1

    def prepare(self, step: int) -> None:
        epoch = step // self.epoch_steps
        if epoch != self.epoch:
            plan = self.source.plan(self.seed, self.stage, epoch)
            self.plan.copy_(plan[:, self.world.share(self.source.batch)], non_blocking=True)
            self.epoch = epoch

    def __call__(self, count: Tensor) -> tuple[Tensor, Tensor]:
        return self.source.batch_of(self.plan.index_select(0, count % self.epoch_steps)[0])


class FromFiles:
    """Batches decoded by worker processes, copied into one place on the device that a captured step reads."""

    def __init__(self, source: Streamed, seed: int, stage: int, world: World, device: str) -> None:
        self.source, self.seed, self.stage, self.world = source, seed, stage, world
        self.epoch_steps, self.normalized = source.steps, source.normalized
        self.next = -1  # the step that the next batch is for
        self.batches: Iterator[tuple[Tensor, Tensor]] = iter(())
        self.x: Tensor | None = None
        self.y: Tensor | None = None

    def prepare(self, step: int) -> None:
        if step == self.next - 1:
            return  # its batch is here
        if step != self.next:
            self.batches = self.source.epochs(self.seed, self.stage, step, self.world.rank, self.world.size)
        x, y = next(self.batches)
        if self.x is None or self.y is None:
            self.x, self.y = x.clone(), y.clone()
        else:
            self.x.copy_(x, non_blocking=True)
            self.y.copy_(y, non_blocking=True)
        self.next = step + 1

    def __call__(self, count: Tensor) -> tuple[Tensor, Tensor]:
        assert self.x is not None
        assert self.y is not None
        return self.x, self.y
