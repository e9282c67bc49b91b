"""Large images that stay on the device: decoded once, then cropped there in every step, without the host.

    files ─► workers, once: the square around the middle, 256 x 256 for 224 ─► the device: bytes
    plan(seed, stage, epoch) ─► batch_of(rows): a random part of the square, brought to size, mirrored ─► the network

What is tested are the very pixels that `streaming` tests. What is trained on is not: there, parts are cut from the
whole picture and made smaller with an antialiasing filter; here they are cut from the square and brought to size by
bilinear interpolation, which does without such a filter, as 256 to 224 is the most that anything is made smaller.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from growprune.data import Dataset, Normal, Source, fraction, key_of, shuffled, uniform
from growprune.errors import GrowpruneError
from growprune.reading import Folder, Part
from growprune.streaming import Decode, Streamed, around

READ = 32  # images that a worker reads at a time
PATIENCE = 10.0  # seconds of reading after which it is said how many there will be
SCALE = 0.08, 1.0  # of the square's area, as in torchvision's RandomResizedCrop
RATIO = 0.2876820724517809  # log 4/3: the logarithm of width / height is between minus and plus this
TRIES = 10  # to find a part that lies inside; else it is the whole
GB = 1e9


@dataclass(frozen=True, eq=False)
class Copy:
    """A set's images on one device: squares to train on, middles to test on."""

    train: Part
    test: Part


_here: WeakValueDictionary[Any, Copy] = WeakValueDictionary()
"""The copies that somebody uses: runs side by side share one."""


class Kept(Source):
    """A set of class folders in a device's memory; batches of uint8 images (B x 3 x R x R, channels last in memory) are
    made there by tensor operations alone."""

    columns = 6  # of a plan's rows

    def __init__(self, dataset: Dataset, copy: Copy, batch: int, resolution: int = 224) -> None:
        super().__init__(dataset, batch)
        self._labels, flat = copy.train.y, copy.train.x.flatten(1)
        self._side, device = copy.train.x.shape[1], flat.device
        self._squares = flat.view(torch.int64) if flat.shape[1] % 8 == 0 else flat  # eight bytes are copied at a time
        self.normalized = Normal(dataset, device)
        self._places = (torch.arange(resolution, device=device) + 0.5) / resolution

    def plan(self, seed: int, stage: int, epoch: int) -> Tensor:
        """An epoch's batches, on the CPU: int32, steps x batch x (index, top, left, height, width, flip). Each image
        occurs once at most, as in `Resident.plan`."""
        key, count = key_of(seed, stage, epoch), len(self._labels)
        flip = uniform(2 if self.dataset.flip else 1, key, 1, count)
        part = crops(key, count, self._side) if self.dataset.crop else whole(count, self._side)
        rows = torch.stack([shuffled(key, count), *part, flip], 1)
        return rows[: self.steps * self.batch].view(self.steps, self.batch, self.columns).int()

    def batch_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of a plan's rows, which are on the device."""
        index, top, left, height, width, flip = rows.unbind(1)
        side, size = self._side, len(self._places)
        squares = self._squares.index_select(0, index).view(torch.uint8).view(-1, side, side, 3).permute(0, 3, 1, 2)
        down, right = self._along(top, height), self._along(left, width)
        right = torch.where(flip.view(-1, 1) > 0, right.flip(1), right)
        grid = torch.stack([right.unsqueeze(1).expand(-1, size, -1), down.unsqueeze(2).expand(-1, -1, size)], 3)
        seen = F.grid_sample(squares + 0.5, grid, "bilinear", "border", align_corners=True)  # cut off, it is rounded
        return seen.to(torch.uint8, memory_format=torch.channels_last), self._labels.index_select(0, index)

    def _along(self, first: Tensor, length: Tensor) -> Tensor:
        """Where the pixels that are made lie in the square, along one side, B x R: -1 is the middle of its first pixel,
        1 that of its last. Nothing outside the part is looked at."""
        start, size = first.view(-1, 1).float(), length.view(-1, 1).float()
        pixel = (start - 0.5 + self._places * size).clamp(start, start + (size - 1))
        return pixel * (2 / (self._side - 1)) - 1


# -- chance ----------------------------------------------------------------------------------------------------------


def crops(key: int, count: int, side: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`count` random parts of a square: top, left, height, width, drawn as torchvision's RandomResizedCrop does.

    The area is uniform, the logarithm of width / height too; of ten draws the first counts that lies inside.
    """
    height, width, places = torch.full((count,), side), torch.full((count,), side), torch.arange(count)
    for number in range(TRIES):
        area = side**2 * (SCALE[0] + (SCALE[1] - SCALE[0]) * fraction(key, 4 + 2 * number, places))
        ratio = exp((2 * fraction(key, 5 + 2 * number, places) - 1) * RATIO)
        wide, high = (square.sqrt().round().long() for square in (area * ratio, area / ratio))
        inside = (wide <= side) & (high <= side)
        width[places[inside]], height[places[inside]] = wide[inside], high[inside]
        places = places[~inside]
    top, left = (uniform(side + 1 - n, key, what, count) for what, n in ((2, height), (3, width)))
    return top, left, height, width


def exp(x: Tensor) -> Tensor:
    """e to the x for small x, by its series: sums and products, which every machine rounds alike.

    >>> float(exp(torch.tensor(0.25, dtype=torch.double)) - math.exp(0.25))
    0.0
    """
    total = torch.ones_like(x)
    for n in range(14, 0, -1):
        total = total * x / n + 1
    return total


def whole(count: int, side: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    none, all_of_it = (torch.full((count,), n) for n in (0, side))
    return none, none, all_of_it, all_of_it


# -- onto the device -------------------------------------------------------------------------------------------------


def needed(dataset: Dataset, resolution: int) -> int:
    """Bytes that a set takes on a device."""
    side = around(resolution) if dataset.crop else resolution
    return 3 * (len(dataset.train) * side**2 + len(dataset.test) * resolution**2)


def room(device: str, in_all: bool = False) -> float:
    """Bytes that are free on a device, or that it has in all."""
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return total if in_all else free + unused
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(lines["MemTotal" if in_all else "MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):  # not Linux: we cannot know
        return math.inf


def known(dataset: Dataset, device: str, resolution: int, decode: Decode) -> Any:
    """What two copies have in common that are the same."""
    assert isinstance(dataset.train, Folder)
    assert isinstance(dataset.test, Folder)
    return dataset.train.files, dataset.test.files, dataset.crop, device, resolution, decode


def present(dataset: Dataset, device: str, resolution: int, decode: Decode) -> bool:
    """Is there a copy already, which another run uses?"""
    return known(dataset, device, resolution, decode) in _here


def bring(
    dataset: Dataset, device: str, resolution: int, workers: int | None, decode: Decode, say: Callable[[str], None]
) -> Copy:
    """All images of a set, read from their files onto the device; or the copy that is there. One that cannot be read is
    refused by name, before anything was trained."""
    key = known(dataset, device, resolution, decode)
    if (there := _here.get(key)) is not None:
        return there
    need, free = needed(dataset, resolution), room(device)
    out = (
        f"--keep device: the images take {need / GB:.1f} GB there, {free / GB:.1f} GB are free: make room, or begin a "
        "run with --keep files"
    )
    if need > free:
        raise GrowpruneError(out)
    progress = Reading(len(dataset.train) + len(dataset.test), need, say)
    part: Any = "square" if dataset.crop else "middle"
    plain, batch = replace(dataset, flip=False), min(READ, len(dataset.train))
    source = Streamed(plain, device, batch, workers, resolution, decode, part)
    try:
        train = filled(progress(source.trained()), dataset.train, device, out)
        copy = Copy(train, filled(progress(source.test()), dataset.test, device, out))
    finally:
        source.close()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)  # runs side by side each have a stream of their own
    progress.end()
    _here[key] = copy
    return copy


class Reading:
    """Says that images are being read, after a while how long it will take, and in the end how long it took."""

    def __init__(self, count: int, size: int, say: Callable[[str], None]) -> None:
        self.count, self.say, self.done, self.told = count, say, 0, False
        self.began = time.perf_counter()
        say(f"reading {count:,} images, to keep them on the device ({size / GB:.1f} GB)")

    def __call__(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in batches:
            yield x, y
            self.done += len(y)
            passed = time.perf_counter() - self.began
            if passed > PATIENCE and not self.told:
                self.told = True
                left = passed / self.done * (self.count - self.done)
                self.say(f"{self.done:,} of {self.count:,} images read, {left:.0f} s to go")

    def end(self) -> None:
        self.say(f"read in {time.perf_counter() - self.began:.0f} s")


def filled(batches: Iterator[tuple[Tensor, Tensor]], folder: Part | Folder, device: str, out: str) -> Part:
    """Batches in order as one part, written into its memory as they come."""
    x, at = None, 0
    for images, _ in batches:
        each = images.permute(0, 2, 3, 1)
        if x is None:
            try:
                x = torch.empty(len(folder), *each.shape[1:], dtype=torch.uint8, device=device)
            except RuntimeError as error:  # out of memory: others took it meanwhile
                raise GrowpruneError(out) from error
        x[at : at + len(each)] = each
        at += len(each)
    assert x is not None
    return Part(x, folder.y.to(device))
