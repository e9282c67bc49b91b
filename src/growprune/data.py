"""Image sets by name, and training data that lives on the device.

    load("cifar10") ─► Dataset ─► Resident: plan(seed, stage, epoch) ─► batch_of(rows) ─► normalized ─► the network

Small images stay on the device as bytes, padded once; shuffling, crop and flip are one gather there. Which image, crop
and flip stand at a place of an epoch is arithmetic on (seed, stage, epoch, place): the same on every machine, with
every version of torch, wherever a run is taken up again. Large images are a `Folder`, for `streaming` and `keeping`.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from growprune.cifar import KINDS, fetch, present, read_cifar, where_to_put
from growprune.config import IMAGENET, Scaling
from growprune.errors import GrowpruneError, nearest
from growprune.reading import HELD_OUT, Folder, Found, Part, Wanted, cores, picture, read_classes, read_pair

NAMES = ("digits", *KINDS)
SAMPLED = 1000  # images of a streamed set that its mean and deviation are taken from
"""Mean and deviation, a number for each channel."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and how they are shown to a network in training."""

    name: str
    train: Part | Folder
    test: Part | Folder
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # of the train part's values / 255, one a channel
    std: tuple[float, ...]
    pad: int  # zeros put around an image that is then cropped back, at random; 0: none
    flip: bool  # every other image mirrored, at random
    crop: bool = True  # of a large image a random part, brought to size; else its middle, as in testing

    def shape(self, resolution: int = 224) -> tuple[int, int, int]:
        """Of one image, C x H x W; a streamed one has the resolution it is streamed at."""
        if isinstance(self.train, Folder):
            return 3, resolution, resolution
        height, width, channels = self.train.x.shape[1:]
        return channels, height, width


def known(name: str) -> None:
    """Refuse, in one line, what is neither a set's name nor a folder. Reads nothing."""
    root = Path(name).expanduser()
    if name not in NAMES and not root.is_dir():
        what = "is a file; a folder is wanted" if root.exists() else f"no such image set{nearest(name, NAMES)}"
        raise GrowpruneError(f"data '{name}': {what} ({', '.join(NAMES)}, or the path of a folder)")


def load(
    name: str,
    data_dir: str | Path | None = None,
    *,
    download: bool = True,
    stream: bool | None = None,
    resolution: int = 224,
    scaled: Scaling | None = None,
) -> Dataset:
    """`digits`, `cifar10`, `cifar100`, or a folder's path.

    CIFAR is looked for in `data_dir` (by default ./data) and downloaded into it if it is not there. A folder holds
    train.npz and test.npz (as x, y, classes), CIFAR's python files, or train/<class>/ and val/<class>/ (or test/) with
    images. Those of one size up to 64 pixels a side are kept in memory, others are streamed; `stream` forces either.
    Images of several sizes that are forced into memory are brought to squares of `resolution` pixels. Mean and
    deviation are the training images' own, or as `scaled` says.
    """
    known(name)
    wanted = Wanted(stream, resolution)
    if name == "digits":
        return described(name, digits(), resolution, scaled, flip=False)
    if name in KINDS:
        return described(name, cifar(name, Path(data_dir or "data"), download, wanted), resolution, scaled)
    root = Path(name).expanduser()
    found = find([root], [], KINDS, wanted)
    if found is None:
        there = next((f"has {name}/, but no train/" for name in HELD_OUT if (root / name).is_dir()), "no images found")
        raise GrowpruneError(
            f"{root}: {there}; train/ and val/ (or test/) with class folders belong there, or train.npz and test.npz"
        )
    return described(root.resolve().name, found, resolution, scaled)


def described(name: str, found: Found, resolution: int, scaled: Scaling | None, flip: bool = True) -> Dataset:
    mean, std = scale(name, found.train, resolution, scaled)
    pad = min(found.train.x.shape[1:3]) // 8 if isinstance(found.train, Part) else 0
    return Dataset(name, found.train, found.test, found.classes, mean, std, pad, flip)


def scale(name: str, train: Part | Folder, resolution: int, scaled: Scaling | None) -> Scaling:
    """Mean and deviation of each channel, as `scaled` says or the images' own."""
    channels = train.x.shape[3] if isinstance(train, Part) else 3
    return fitting(name, scaled, channels) or statistics(train, resolution)


def fitting(name: str, scaled: Scaling | None, channels: int) -> Scaling | None:
    """For each channel: one mean and deviation stand for all; ImageNet's say nothing of images that have no colours."""
    if scaled is None or (scaled == IMAGENET and channels != len(IMAGENET[0])):
        return None
    if len(scaled[0]) not in (1, channels):
        raise GrowpruneError(
            f"--normalize: {len(scaled[0])} means and deviations, but images of {name} have "
            f"{channels} channel{'s' * (channels > 1)}; give one for all, or {channels}"
        )
    mean, std = (part * (channels // len(part)) for part in scaled)
    return mean, std


def several_classes(name: str, dataset: Dataset) -> None:
    """Whoever trains needs them; one who only tests does not."""
    if len(dataset.classes) < 2:
        raise GrowpruneError(
            f"data '{name}': only one class, '{dataset.classes[0]}': there is nothing to tell apart; add the others"
        )


def digits() -> Found:
    """scikit-learn's 1,797 handwritten digits, 8×8, grey, 0 to 16. The first 1,200 train, in the file's order:
    neighbours in it are often by the same hand, so a random split would be too easy."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.tensor(bunch.images).to(torch.uint8).unsqueeze(3)
    y = torch.tensor(bunch.target, dtype=torch.int64)
    classes = tuple(str(i) for i in range(10))
    return Found(Path(), Part(x[:1200], y[:1200]), Part(x[1200:], y[1200:]), classes)


def cifar(name: str, data_dir: Path, may_download: bool, wanted: Wanted) -> Found:
    """In data_dir/<name>, in data_dir, or (python files) one level down; else downloaded."""
    data_dir = data_dir.expanduser()
    if data_dir.exists() and not data_dir.is_dir():
        raise GrowpruneError(f"{data_dir}: not a folder; {name} is kept in one")
    below = sorted(path for path in data_dir.glob("[!.]*") if path.is_dir()) if data_dir.is_dir() else []
    found = find([data_dir / name, data_dir], below, [name], wanted)
    if found is None and not may_download:
        raise GrowpruneError(f"{name}: not in {data_dir}/; {where_to_put(name, data_dir)}")
    found = found or fetch(name, data_dir)
    count, right = len(found.classes), 10 if name == "cifar10" else 100
    if count != right:
        raise GrowpruneError(f"{found.where}: a set of {count} classes, not {name}; name its folder, or another one")
    if isinstance(found.train, Part) and found.train.x.shape[1:] != (32, 32, 3):
        shape = "x".join(map(str, found.train.x.shape[1:]))
        raise GrowpruneError(f"{found.where}: images of {shape}, not {name}, whose are 32x32x3; name its folder")
    return found


def find(near: Sequence[Path], below: Sequence[Path], kinds: Iterable[str], wanted: Wanted) -> Found | None:
    """The first set there is: an `.npz` pair, else CIFAR's python files (also in `below`), else class folders."""
    for root in near:
        if any((root / f"{split}.npz").is_file() for split in ("train", "test")):
            return unstreamed(read_pair(root), wanted)
    inside = [(root, kind) for root in near for kind in KINDS.values()]
    inside += [(root / KINDS[name].folder, KINDS[name]) for root in (*near, *below) for name in kinds]
    for place, kind in inside:
        if present(place, kind):
            return unstreamed(read_cifar(place, kind), wanted)
    return next((read_classes(root, wanted) for root in near if (root / "train").is_dir()), None)


def unstreamed(found: Found, wanted: Wanted) -> Found:
    if wanted.stream:
        raise GrowpruneError(f"{found.where}: only class folders of images can be streamed; leave stream out")
    return found


# -- mean and deviation ----------------------------------------------------------------------------------------------


def statistics(part: Part | Folder, resolution: int) -> Scaling:
    """Mean and standard deviation of each channel's values / 255, from exact counts of the 256 values.

    Of a streamed set, every so many-th image counts, a thousand at most.
    """
    if isinstance(part, Part):
        counts = tally(part.x)
    else:
        chosen = part.files[:: math.ceil(len(part) / SAMPLED)]
        with ThreadPoolExecutor(min(8, cores())) as pool:
            images = pool.map(lambda file: tally(torch.from_numpy(picture(file, near=resolution))), chosen)
            counts = torch.stack(list(images)).sum(0)
    mean, std = [], []
    for channel in counts.tolist():
        n, total, squares = (sum(count * value**power for value, count in enumerate(channel)) for power in range(3))
        mean.append(total / n / 255)
        std.append(math.sqrt(n * squares - total**2) / n / 255 or 1.0)  # a constant channel becomes 0, not NaN
    return tuple(mean), tuple(std)


def tally(x: Tensor) -> Tensor:
    """How often each value occurs in each channel (the last dimension): C x 256."""
    return torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in x.unbind(-1)])


class Normal:
    """(x / 255 - mean) / std of each channel, as one multiply-add in float32."""

    def __init__(self, dataset: Dataset, device: torch.device | str) -> None:
        mean, std = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in (dataset.mean, dataset.std))
        self.scale = (1 / (255 * std)).float().to(device)
        self.shift = (-mean / std).float().to(device)

    def __call__(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.addcmul(self.shift, x, self.scale).to(dtype)


# -- chance ----------------------------------------------------------------------------------------------------------


def key_of(*numbers: int) -> int:
    """A stream of random numbers for each tuple of whole numbers.

    >>> key_of(0, 0, 0) == key_of(0, 0, 1)
    False
    """
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def drawn(key: int, what: int, count: int | Tensor) -> Tensor:
    """`count` random int64 of a stream, or those at these places of it, others for each `what`: SplitMix64, whose n-th
    number needs none before it."""
    golden, first, second = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
    places = count if isinstance(count, Tensor) else torch.arange(count)
    z = (places + 1 + (what << 40)) * golden + key
    z = (z ^ _right(z, 30)) * first
    z = (z ^ _right(z, 27)) * second
    return z ^ _right(z, 31)


def _right(z: Tensor, bits: int) -> Tensor:
    """A shift of 64 bits without a sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def uniform(limit: int | Tensor, key: int, what: int, count: int) -> Tensor:
    """Whole numbers from 0 to limit - 1, which may be another one for each."""
    return _right(drawn(key, what, count), 32) % limit


def fraction(key: int, what: int, count: int | Tensor) -> Tensor:
    """Numbers from 0 to below 1, in double precision."""
    return _right(drawn(key, what, count), 11).double() * 2.0**-53


def shuffled(key: int, count: int) -> Tensor:
    """0 to count - 1 in random order: sorted by a random number each."""
    return drawn(key, 0, count).argsort(stable=True)


# -- on the device ---------------------------------------------------------------------------------------------------


class Source:
    """A set's training images in batches of one size; an epoch's last, incomplete one is left out."""

    def __init__(self, dataset: Dataset, batch: int) -> None:
        images = len(dataset.train)
        if not 0 < batch <= images:
            raise GrowpruneError(f"{dataset.name}: no batch of {batch} from {images} images; give a smaller one")
        self.dataset, self.batch, self.steps = dataset, batch, images // batch

    def sized(self, batch: int) -> Self:
        """The same in batches of another size. Images on the device, or the processes that read them, are shared."""
        other = copy.copy(self)
        Source.__init__(other, self.dataset, batch)
        return other


class Resident(Source):
    """A training part on the device, padded once; batches are made there, without the host."""

    columns = 4  # of a plan's rows

    def __init__(self, dataset: Dataset, device: torch.device | str, batch: int) -> None:
        if isinstance(dataset.train, Folder):
            raise GrowpruneError(f"{dataset.name}: its images are files to be streamed; load it with stream=False")
        super().__init__(dataset, batch)
        count, height, width, self.channels = dataset.train.x.shape
        self.size = height, width
        self._count, self._pad, self._flip = count, dataset.pad, dataset.flip
        self.normalized = Normal(dataset, device)
        self._labels = dataset.train.y.to(device)
        padded = F.pad(dataset.train.x.to(device), (0, 0, *[dataset.pad] * 4))
        self._width = padded.shape[2]
        self._area = padded.shape[1] * padded.shape[2]
        self._pixels = padded.view(-1, self.channels)  # a row is a pixel, its channels side by side
        down, right = torch.arange(height).view(-1, 1) * self._width, torch.arange(width)
        both = torch.stack([down + right, down + right.flip(0)])
        self._offsets = both.view(2, -1).to(device)  # of a crop's pixels from its corner: as it is, mirrored

    def plan(self, seed: int, stage: int, epoch: int) -> Tensor:
        """An epoch's batches, on the CPU: int32, steps x batch x (index, top, left, flip). Each image occurs once at
        most; the last, incomplete batch is left out. Of rank r of w, a batch is rows r·B/w to (r+1)·B/w of a step."""
        key, count, places = key_of(seed, stage, epoch), self._count, 2 * self._pad + 1
        limits = (places, places, 2 if self._flip else 1)
        columns = [shuffled(key, count), *(uniform(n, key, what, count) for what, n in enumerate(limits, 1))]
        return torch.stack(columns, 1)[: self.steps * self.batch].view(self.steps, self.batch, 4).int()

    def batch_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images (uint8, B x C x H x W, channels last in memory) and labels of a plan's rows, which are on the device:
        each zero-padded, cropped at (top, left), mirrored where flip is 1. Tensor operations alone."""
        index, top, left, flip = rows.long().unbind(1)
        corner = left.add(top, alpha=self._width).add(index, alpha=self._area)
        pixels = corner.view(-1, 1) + self._offsets.index_select(0, flip)
        images = self._pixels.index_select(0, pixels.view(-1)).view(-1, *self.size, self.channels)
        return images.permute(0, 3, 1, 2), self._labels.index_select(0, index)


def batches(part: Part, device: torch.device | str, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A part in order, the last batch as large as what is left: uint8 images (B x C x H x W, channels last in memory)
    and labels. Give `part.to(device)`, kept by the caller, and nothing is copied."""
    here = part.to(device)
    for x, y in zip(here.x.split(size), here.y.split(size), strict=True):
        yield x.permute(0, 3, 1, 2), y
