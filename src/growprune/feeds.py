"""A run's images: what a training step is fed, what a network is tested on, what batch norm is estimated from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growprune import data, distributed, keeping
from growprune.config import Config, scaling
from growprune.data import Dataset, Normal, Resident
from growprune.distributed import World, first_here
from growprune.errors import GrowpruneError
from growprune.keeping import GB, Kept
from growprune.reading import Folder, Part, fingerprints
from growprune.streaming import Decode, Streamed, undecodable

ESTIMATION, BATCHES = 9, 10
"""Stage number and count of the batches that batch norm's statistics are estimated from, and criteria measured on."""
LARGE = 250
"""Large images at most in a batch that is tested: every worker holds some of these."""
COMFORT = 0.5
"""The share of a GPU's free memory that images may take where nobody asked for it: the network needs some too."""
TRIAL = 2.0
"""Seconds that each decoder is tried."""
BETTER = 1.25
"""How many times as fast the GPU must decode to be chosen: beside a step, which needs it too, it loses so much."""


class Images:
    """One image set on one device."""

    def __init__(self, config: Config, device: str, world: World) -> None:
        if config.decode == "gpu" and not device.startswith("cuda"):
            raise GrowpruneError("--decode gpu: needs a CUDA device; give cpu or auto")
        with first_here(world):
            found = data.load(
                config.data, config.data_dir, resolution=config.resolution, scaled=scaling(config.normalize)
            )
        self.dataset: Dataset = found if config.augment else replace(found, pad=0, flip=False, crop=False)
        self.config, self.device, self.world = config, device, world
        self.test = found.test.to(device) if isinstance(found.test, Part) else None
        self.normal = Normal(self.dataset, device)
        self.shape = found.shape(config.resolution)
        self.classes = len(found.classes)
        self.sizes = {"train": len(found.train), "test": len(found.test)}
        self.decode: Decode = "gpu" if config.decode == "gpu" else "cpu"
        self.large = isinstance(found.train, Folder)
        self.one_in = 1  # of how many test images, or batches of them, one is looked at
        self._copy: keeping.Copy | None = None
        self._source: Resident | Kept | Streamed | None = None

    def decide(self, choices: dict[str, Any], say: Callable[[str], None]) -> None:
        """Where large images stay, and what decodes JPEGs, if that is left to us: as it was chosen before, else as is
        best here. `choices` keeps it, for a run must not change over: no two ways give the same bits."""
        config, cuda = self.config, self.device.startswith("cuda")
        if not self.large or self._copy is not None:
            return
        made: dict[str, Any] = dict(choices.get("images", {}))
        keep: str = config.keep
        if cuda and keep == "auto":  # a run that began when there was no such choice streams
            made["keep"] = keep = made.get("keep", "files") if choices else self.placed(say)
        if keep == "device":
            made = {"keep": keep, "decode": self.decode}
            size = config.resolution
            self._copy = keeping.bring(self.dataset, self.device, size, self.workers, self.decode, say)
            self.test = self._copy.test
        elif config.decode == "auto" and cuda and not config.deterministic:  # where bits count, no clock decides
            if "decode" not in made:
                made |= distributed.from_first(self.world, self.tried(say))
            self.decode = made["decode"]
        if made:
            choices["images"] = made

    def placed(self, say: Callable[[str], None]) -> str:
        """On the device, if the images take half of its free memory at most, in every process, or are there already.
        Where bits count it is half of its memory: what others take of it must not decide."""
        asked = self.dataset, self.device, self.config.resolution
        need, room = keeping.needed(self.dataset, asked[2]), keeping.room(self.device, self.config.deterministic)
        fits = need <= COMFORT * room or keeping.present(*asked, self.decode)
        if not distributed.anyone(self.world, not fits):
            return "device"
        say(f"images are streamed: the device has {room / GB:.1f} GB, they would take {need / GB:.1f} GB of it")
        return "files"

    def tried(self, say: Callable[[str], None]) -> dict[str, Any]:
        """The decoder to take, and how many images a second come from either when nothing is done with them."""
        if why := undecodable(self.device):
            say(f"JPEGs are decoded on the CPU, as they cannot be on the GPU ({why})")
            return {"decode": "cpu"}
        found: dict[str, float] = {}
        for decode in ("cpu", "gpu"):
            source = self.streamed(self.config.batch // self.world.size, decode)
            found[decode] = source.images_per_second(TRIAL)
            source.close()
        best = "gpu" if found["gpu"] > BETTER * found["cpu"] else "cpu"
        pace = f"{found['cpu']:,.0f} images a second on the CPU, {found['gpu']:,.0f} on the GPU"
        say(f"JPEGs are decoded on the {best.upper()}: {pace}")
        return {"decode": best, **found}

    def streamed(self, batch: int, decode: Decode) -> Streamed:
        return Streamed(self.dataset, self.device, batch, self.workers, self.config.resolution, decode)

    @property
    def workers(self) -> int | None:
        return None if self.config.workers < 0 else self.config.workers

    def source(self, batch: int) -> Resident | Kept | Streamed:
        """The training images in batches of so many: all sizes share one copy on the device, or the same workers."""
        if self._source is None:
            if self._copy is not None:
                self._source = Kept(self.dataset, self._copy, batch, self.config.resolution)
            elif self.large:
                self._source = self.streamed(batch, self.decode)
            else:
                self._source = Resident(self.dataset, self.device, batch)
        return self._source.sized(batch)

    def feed(self, batch: int, stage: int) -> FromMemory | FromFiles:
        source = self.source(batch)
        if isinstance(source, Streamed):
            return FromFiles(source, self.config.seed, stage, self.world, self.device)
        return FromMemory(source, self.config.seed, stage, self.world, self.device)

    def tested(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the test images, normalised, with their labels."""
        size = min(size, LARGE) if self.large else size
        rank, step = self.world.rank, self.world.size * self.one_in
        if self.test is not None:
            every = data.batches(self.test, self.device, size)
            chosen: Iterator[tuple[Tensor, Tensor]] = islice(every, rank, None, step)
        else:
            source = self.source(self.config.batch)
            assert isinstance(source, Streamed)
            chosen = source.test(size, rank, step)
        for x, y in chosen:
            yield self.normal(x), y

    def sample(self, batch: int, count: int = BATCHES) -> Iterator[tuple[Tensor, Tensor]]:
        """Some training batches, normalised; always the same ones, in every process."""
        source = self.source(batch)
        if isinstance(source, Streamed):
            found = source.epoch(self.config.seed, ESTIMATION, 0, stop=count)
        else:
            plan = source.plan(self.config.seed, ESTIMATION, 0)[:count].to(self.device)
            found = (source.batch_of(rows) for rows in plan)
        for x, y in found:
            yield self.normal(x), y

    def fewer(self, enough: int) -> Images:
        """The same, but of a test set that is several times as large as that only a part, from all over it."""
        twin = copy.copy(self)
        twin.one_in = max(1, self.sizes["test"] // enough)
        return twin

    def scaled(self, normalize: str) -> Images:
        """The same images to test on, scaled in another way."""
        there, twin = self.dataset, copy.copy(self)
        mean, std = data.scale(there.name, there.train, self.config.resolution, scaling(normalize))
        twin.normal = Normal(replace(there, mean=mean, std=std), self.device)
        return twin

    def check(self) -> None:
        """Can anything be learnt from them?"""
        data.several_classes(self.config.data, self.dataset)

    def known(self) -> dict[str, Any]:
        """What tells these images from others."""
        facts = {**self.sizes, "shape": list(self.shape), "classes": list(self.dataset.classes)}
        if self.large:
            return facts | self.files
        mean = {} if self.config.normalize == "own" else {"own mean": self.mean}
        return facts | {"mean": list(self.dataset.mean)} | mean

    @cached_property
    def mean(self) -> list[float]:
        """Of small images themselves, however they are scaled."""
        return list(data.statistics(self.dataset.train, self.config.resolution)[0])

    @cached_property
    def files(self) -> dict[str, str]:
        """Of large images, which are not all looked at before they are shown: what their names and sizes come to. Of
        several processes the first one looks, which also writes it down."""
        found = fingerprints(Path(self.config.data)) if self.world.first else None
        return dict(zip(("names", "sizes"), found, strict=True)) if found else {}

    def recognized(self, then: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Refuse to go on with a run that began with others, of which `then` was known. A file may have been replaced
        (a broken image): that is told."""
        for key, now in self.known().items():
            if then.get(key, now) == now:
                continue
            if key == "sizes":
                say(f"{self.config.data}: files there have other sizes than when this run began; it goes on with these")
            else:
                how = "files of other names" if key == "names" else f"{key} was {then[key]}, is {now}"
                raise GrowpruneError(
                    f"data '{self.config.data}': not the images that this run began with: {how}; put them back, or "
                    "begin another run with --out"
                )

    def close(self) -> None:
        """End the processes that read; whoever asks for images again starts new ones."""
        if isinstance(self._source, Streamed):
            self._source.close()

    def example(self) -> Tensor:
        """Noise: on zeros a network without biases puts out zeros whatever its filters are."""
        return torch.randn(1, *self.shape, generator=torch.Generator().manual_seed(0)).to(self.device)


class Last:
    """The images of the run before: what it kept on the device is there for the next one, if that is of the same."""

    def __init__(self) -> None:
        self.images: Images | None = None

    def makes_way(self, config: Config) -> None:
        """Before the next run's are loaded: others go."""
        if self.images is not None and self.images.config.data != config.data:
            self.images = None


class FromMemory:
    """Batches made on the device from its own copy of the images."""

    def __init__(self, source: Resident | Kept, seed: int, stage: int, world: World, device: str) -> None:
        self.source, self.seed, self.stage, self.world = source, seed, stage, world
        self.epoch_steps, self.normalized = source.steps, source.normalized
        share = source.batch // world.size
        self.plan = torch.zeros((source.steps, share, source.columns), dtype=torch.int32, device=device)
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

    def rest(self) -> None:
        """Let the workers go; the next step that is prepared begins anew."""
        self.next, self.batches = -1, iter(())
        self.source.close()

    def __call__(self, count: Tensor) -> tuple[Tensor, Tensor]:
        assert self.x is not None
        assert self.y is not None
        return self.x, self.y
