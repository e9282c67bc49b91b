"""Image sets as they lie on disk: `.npz` pairs and folders of classes. What cannot be read is refused by name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from growprune.errors import GrowpruneError, line

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SMALL = 64  # images up to this many pixels a side are kept in memory, if all are of one size
HELD_OUT = ("val", "test")  # the first that is there


@dataclass(frozen=True, eq=False)
class Part:
    """One split, in memory."""

    x: Tensor  # uint8, N x H x W x C
    y: Tensor  # int64, N

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device | str) -> Part:
        """The same on the device; itself, if it is there already."""
        return Part(self.x.to(device), self.y.to(device))


@dataclass(frozen=True, eq=False)
class Folder:
    """One split as files, to be streamed: large images, or of many sizes."""

    files: tuple[str, ...]
    y: Tensor  # int64, N

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Found:
    """What was read, and where."""

    where: Path
    train: Part | Folder
    test: Part | Folder
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Wanted:
    """How class folders are to come: streamed, in memory, or (None) as their sizes suggest."""

    stream: bool | None = None
    resolution: int = 224


def checked(path: Path, x: Pixels, y: Any, classes: int) -> Part:
    """Images and labels as a part, if they fit each other."""
    import numpy as np

    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[3] not in (1, 3):
        raise GrowpruneError(f"{path}: x is {x.dtype} {x.shape}; images are uint8, N x H x W x 3 (or 1)")
    if not x.size:
        raise GrowpruneError(f"{path}: x is {x.shape}: no images")
    y = np.asarray(y)
    if y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
        raise GrowpruneError(f"{path}: y is {y.dtype} {y.shape}; labels are integers, one for each of {len(x)} images")
    if y.min() < 0 or y.max() >= classes:
        raise GrowpruneError(f"{path}: labels from {y.min()} to {y.max()}, but {classes} classes: 0 to {classes - 1}")
    return Part(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y.astype(np.int64)))


# -- .npz pairs ------------------------------------------------------------------------------------------------------


def read_pair(root: Path) -> Found:
    (train, classes), (test, others) = (read_npz(root / f"{split}.npz") for split in ("train", "test"))
    if classes != others:
        raise GrowpruneError(f"{root}: train.npz and test.npz name different classes")
    if train.x.shape[1:] != test.x.shape[1:]:
        shapes = [tuple(part.x.shape[1:]) for part in (train, test)]
        raise GrowpruneError(f"{root}: the images of train.npz are {shapes[0]}, those of test.npz {shapes[1]}")
    return Found(root, train, test, classes)


def read_npz(path: Path) -> tuple[Part, tuple[str, ...]]:
    """Arrays x (uint8, N x H x W x C), y (integers) and classes (names)."""
    import numpy as np

    keys = ("x", "y", "classes")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {key: arrays[key] for key in keys if key in arrays}
    except FileNotFoundError as error:
        raise GrowpruneError(f"{path}: not there; train.npz and test.npz come as a pair") from error
    except Exception as error:  # zip, zlib, struct and numpy each have their own for a damaged file
        raise GrowpruneError(f"{path}: damaged, or not an .npz of plain arrays: {line(error)}") from error
    for key in keys:
        if key not in found:
            raise GrowpruneError(f"{path}: lacks '{key}'; x, y and classes belong there")
    names = found["classes"]
    if names.dtype.kind != "U" or names.ndim != 1:
        raise GrowpruneError(f"{path}: classes is {names.dtype} {names.shape}; a list of names belongs there")
    return checked(path, found["x"], found["y"], len(names)), tuple(names.tolist())


# -- folders of classes ----------------------------------------------------------------------------------------------


def read_classes(root: Path, wanted: Wanted) -> Found:
    """root/train/<class>/ and root/val/<class>/ (or test/), with images at any depth below."""
    train, classes = listed(root / "train")
    held_out = held_out_of(root)
    if held_out is None:
        raise GrowpruneError(
            f"{root}: has train/, but no val/ or test/ with a folder for each class; put the images to test on there"
        )
    test, others = listed(held_out)
    for name in sorted(set(classes) ^ set(others)):
        has, lacks = ("train", held_out.name) if name in classes else (held_out.name, "train")
        raise GrowpruneError(
            f"{root}: class '{name}' is in {has}/ but not in {lacks}/; both need the same folders, with images in each"
        )
    if wanted.stream:
        return Found(root, train, test, classes)
    try:
        shape = picture(train.files[0]).shape
        if wanted.stream is None and max(shape) > SMALL:
            return Found(root, train, test, classes)
        return Found(root, in_memory(train, shape), in_memory(test, shape), classes)
    except MixedSizesError:
        if wanted.stream is None:
            return Found(root, train, test, classes)
    size = wanted.resolution
    return Found(root, in_memory(train, None, size), in_memory(test, None, size), classes)


def held_out_of(root: Path) -> Path | None:
    return next((root / name for name in HELD_OUT if subfolders(root / name)), None)


def fingerprint(root: Path) -> str | None:
    """Tells a set of class folders from any other, wherever it lies: by the names and sizes of its images. None has
    what is no such set."""
    return (fingerprints(root) or (None, None))[1]


def fingerprints(root: Path) -> tuple[str, str] | None:
    """By the names alone, and by the sizes too."""
    held_out, names, found = held_out_of(root), hashlib.sha256(), hashlib.sha256()
    if held_out is None or not subfolders(root / "train"):
        return None
    for split in (root / "train", held_out):
        for file in sorted(file for name in subfolders(split) for file in images_below(split / name)):
            with suppress(OSError):  # a link that leads nowhere: whoever reads it will say so
                name = os.path.relpath(file, split)
                names.update(os.fsencode(f"{name}\n"))
                found.update(os.fsencode(f"{name} {os.stat(file).st_size}\n"))
        names.update(b"\n")
        found.update(b"\n")
    return names.hexdigest()[:16], found.hexdigest()[:16]


def subfolders(root: Path) -> list[str]:
    """None where there is no such folder; one that may not be read is refused."""
    try:
        return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def listed(split: Path) -> tuple[Folder, tuple[str, ...]]:
    """A split's images and classes, by name. Hidden files and those that are no images do not count."""
    classes, files, labels = subfolders(split), list[str](), list[int]()
    if not classes:
        raise GrowpruneError(f"{split}: no folder in it; each class needs one, with its images")
    for label, name in enumerate(classes):
        own = sorted(images_below(split / name))
        if not own:
            raise GrowpruneError(f"{split / name}: no images in it ({' '.join(EXTENSIONS)}); add some, or remove it")
        files += own
        labels += [label] * len(own)
    return Folder(tuple(files), torch.tensor(labels)), tuple(classes)


def images_below(root: str | Path) -> Iterator[str]:
    """Linked folders too, but each place once: a link may lead back to where it lies. What is no file (a pipe, on which
    reading would wait) does not count; a link that leads nowhere does, and is named when it is read."""
    seen: set[str] = set()
    waiting = [os.fspath(root)]
    while waiting:
        place = waiting.pop()
        if (real := os.path.realpath(place)) in seen:
            continue
        seen.add(real)
        entries = sorted((e for e in os.scandir(place) if not e.name.startswith(".")), key=lambda entry: entry.name)
        waiting += reversed([entry.path for entry in entries if is_folder(entry)])
        yield from (entry.path for entry in entries if entry.name.lower().endswith(EXTENSIONS) and is_file(entry))


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def is_file(entry: os.DirEntry[str]) -> bool:
    return entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path))


class MixedSizesError(Exception):
    """Not all images are of one size."""


def in_memory(folder: Folder, shape: tuple[int, ...] | None, fit: int = 0) -> Part:
    """All images, decoded by a few threads: of one shape, or made to fit."""
    import numpy as np

    x = np.empty((len(folder), *(shape or (fit, fit, 3))), np.uint8)

    def fill(start: int) -> None:
        for i in range(start, min(start + 64, len(x))):
            image = picture(folder.files[i], fit=fit)
            if image.shape != x.shape[1:]:
                raise MixedSizesError(folder.files[i])
            x[i] = image

    pool = ThreadPoolExecutor(min(8, cores()))
    try:
        for _ in pool.map(fill, range(0, len(x), 64)):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
    return Part(torch.from_numpy(x), folder.y)


def picture(file: str, source: Any = None, fit: int = 0, near: int = 0) -> Pixels:
    """An image's pixels, H x W x 3. `fit`: its largest centred square, at that size. `near`: a large JPEG may come
    smaller, though no smaller than that, which is quick. `source`: its bytes, if they were read already."""
    from PIL import Image, ImageOps

    try:
        with Image.open(source or file) as image:
            if near:
                image.draft("RGB", (near, near))
            plain = rgb(image)
            if fit:
                plain = ImageOps.fit(plain, (fit, fit), Image.Resampling.BILINEAR)
    except Exception as error:  # each format has its own
        raise GrowpruneError(unreadable(file, error)) from error
    return pixels(plain)


def unreadable(file: str, error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    what = "broken, or not an image"
    if type(error).__name__ == "DecompressionBombError":  # PIL's, which need not be loaded here
        what = f"too large: {str(error).partition(',')[0]}"
    return f"{file}: {reason or f'{what}; replace it (or remove it, before a run begins)'}"


def rgb(image: Image.Image) -> Image.Image:
    """Grey, palette and transparent images as RGB; 16 bits a channel as 8."""
    if image.mode.startswith("I"):
        image = image.point(lambda value: value * (1 / 256)).convert("L")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def pixels(image: Image.Image) -> Pixels:
    import numpy as np

    return np.array(image, np.uint8)


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
