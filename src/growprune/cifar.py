"""CIFAR-10 and CIFAR-100 in the files their authors publish, which are pickles, and where those are downloaded from.

A pickle can name any code to run. These are read by an unpickler that builds plain values only.
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from growprune.errors import GrowpruneError, line
from growprune.reading import Found, Part, checked

if TYPE_CHECKING:
    from growprune.reading import Pixels


@dataclass(frozen=True)
class Cifar:
    """How a set's files and their entries are called."""

    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: str
    names: str
    archive: str


KINDS = {
    "cifar10": Cifar(
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        "test_batch",
        "batches.meta",
        "labels",
        "label_names",
        "cifar-10-python.tar.gz",
    ),
    "cifar100": Cifar(
        "cifar-100-python",
        ("train",),
        "test",
        "meta",
        "fine_labels",
        "fine_label_names",
        "cifar-100-python.tar.gz",
    ),
}


class Kind:
    """Stands in for a dtype while unpickling."""

    def __init__(self, code: object = None, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Byte order and the like: bytes have none."""


class Array:
    """Stands in for an array while unpickling: numpy itself never sees what a file says of its insides."""

    state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def images(self) -> Pixels:
        """N x 32 x 32 x 3, of N rows of 3,072 bytes: a plane of red, of green, of blue."""
        import numpy as np

        _, shape, kind, by_column, data = self.state
        data = data.encode("latin1") if isinstance(data, str) else data  # Python 2 knew no other bytes
        if kind.code != "u1" or len(shape) != 2 or shape[1] != 3072 or len(data) != shape[0] * 3072:
            raise ValueError(f"its data is not N x 3072 bytes, but {kind.code} {shape} in {len(data)}")
        rows = np.frombuffer(data, np.uint8).reshape(shape, order="F" if by_column else "C")
        return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def rebuilt(*_: object) -> Array:
    return Array()


def encoded(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into a pickle that Python 2 can read."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding}")
    return text.encode("latin1")


class Plain(pickle.Unpickler):
    """Builds numbers, text, lists, dicts and stand-ins for arrays; nothing in a file can name code to run."""

    allowed: dict[tuple[str, str], Callable[..., Any]] = {  # noqa: RUF012 (never changed)
        ("numpy.core.multiarray", "_reconstruct"): rebuilt,
        ("numpy._core.multiarray", "_reconstruct"): rebuilt,
        ("numpy", "ndarray"): Array,
        ("numpy", "dtype"): Kind,
        ("_codecs", "encode"): encoded,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data needs")
        return self.allowed[module, name]


def unpickled(path: Path, *keys: str) -> list[Any]:
    """The entries `keys` of a pickled dict."""
    try:
        with path.open("rb") as file:
            found = Plain(file, encoding="latin1").load()
        return [found[key] for key in keys]
    except OSError as error:
        raise GrowpruneError(f"{path}: {error.strerror}; remove its folder to have it downloaded again") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise GrowpruneError(f"{path}: damaged, or not a CIFAR file: {line(error)}") from error


def present(place: Path, kind: Cifar) -> bool:
    """Does it look like the folder of these files? Whether all are there is seen when they are read."""
    return any((place / name).is_file() for name in (kind.train[0], kind.meta))


def read_cifar(place: Path, kind: Cifar) -> Found:
    names = unpickled(place / kind.meta, kind.names)[0]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise GrowpruneError(f"{place / kind.meta}: '{kind.names}' is not a list of names")
    train = [read_batch(place / name, kind, len(names)) for name in kind.train]
    joined = Part(torch.cat([part.x for part in train]), torch.cat([part.y for part in train]))
    return Found(place, joined, read_batch(place / kind.test, kind, len(names)), tuple(names))


def read_batch(path: Path, kind: Cifar, classes: int) -> Part:
    data, labels = unpickled(path, "data", kind.labels)
    try:
        images = data.images()
    except Exception as error:  # whatever stands where the array belongs
        raise GrowpruneError(f"{path}: damaged, or not a CIFAR file: {line(error)}") from error
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise GrowpruneError(f"{path}: '{kind.labels}' is not a list of whole numbers")
    return checked(path, images, labels, classes)


# -- the usual way to them -------------------------------------------------------------------------------------------


def fetch(name: str, data_dir: Path) -> Found:
    """Fetch the archive by torchvision, which checks its MD5, and unpack it; it appears whole or not at all.

    An archive that lies in `data_dir` already is used, if it is sound.
    """
    kind, way_out = KINDS[name], where_to_put(name, data_dir)
    try:
        from torchvision import datasets
    except ImportError as error:
        raise GrowpruneError(f"{name}: a download needs torchvision: pip install torchvision; or {way_out}") from error
    maker = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data_dir, prefix=f".{name}.") as beside:
            if (data_dir / kind.archive).is_file():
                shutil.copyfile(data_dir / kind.archive, Path(beside, kind.archive))
            datasets.utils.download_and_extract_archive(maker.url, beside, filename=kind.archive, md5=maker.tgz_md5)
            move(Path(beside, kind.folder), data_dir / kind.folder)
    except (OSError, RuntimeError) as error:  # no network, a full disk, a wrong checksum
        raise GrowpruneError(f"{name}: no download ({line(error)}); {way_out}") from error
    return read_cifar(data_dir / kind.folder, kind)


def move(folder: Path, to: Path) -> None:
    try:
        folder.rename(to)
    except OSError:  # another process was here first, with the same files
        if not all((to / entry.name).exists() for entry in folder.iterdir()):
            raise


def where_to_put(name: str, data_dir: Path) -> str:
    """The way out, for those without a network."""
    kind = KINDS[name]
    return f"put {kind.archive}, its folder {kind.folder}/, or train.npz and test.npz into {data_dir}/"
