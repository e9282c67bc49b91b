"""Image sets: what is read is what was written, what cannot be read is refused by name, and chance is arithmetic."""

from __future__ import annotations

import errno
import functools
import hashlib
import http.server
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import pictures
from growprune import data
from growprune.config import Train
from growprune.data import Dataset, Folder, Part, Resident, load
from growprune.demo import network
from growprune.distributed import World
from growprune.errors import GrowpruneError
from growprune.feeds import Images
from growprune.scales import doubt

CLASSES = [f"class{i}" for i in range(10)]


@contextmanager
def refused(*words: str) -> Any:
    """One line with all of these words in it."""
    with pytest.raises(GrowpruneError) as caught:
        yield
    said = str(caught.value)
    assert "\n" not in said
    for word in words:
        assert word in said, said


def some(count: int, height: int = 32, width: int = 32, channels: int = 3, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, channels), np.uint8)


def in_memory(x: np.ndarray[Any, Any], pad: int = 4, flip: bool = True) -> Dataset:
    part = Part(torch.from_numpy(x), torch.arange(len(x)))
    mean, std = data.statistics(part, 0)
    return Dataset("some", part, part, ("a",), mean, std, pad, flip)


# -- digits, and names -----------------------------------------------------------------------------------------------


def test_digits() -> None:
    from sklearn.datasets import load_digits

    found, source = load("digits"), load_digits()
    assert isinstance(found.train, Part)
    assert isinstance(found.test, Part)
    x, y = torch.cat([found.train.x, found.test.x]), torch.cat([found.train.y, found.test.y])
    assert (len(found.train), len(found.test)) == (1200, 597)
    assert (x.dtype, y.dtype, found.shape()) == (torch.uint8, torch.int64, (1, 8, 8))
    assert (x.squeeze(3).numpy() == source.images).all()
    assert (y.numpy() == source.target).all()
    assert (found.name, found.classes, found.pad, found.flip) == ("digits", tuple("0123456789"), 1, False)
    own = source.images[:1200] / 255
    np.testing.assert_allclose((found.mean[0], found.std[0]), (own.mean(), own.std()), rtol=1e-12)


def test_an_unknown_name_gets_the_nearest(tmp_path: Path) -> None:
    with refused("cifar11", "did you mean 'cifar1"):
        load("cifar11")
    with refused("nowhere/at/all", "path of a folder"):
        load("nowhere/at/all")
    (tmp_path / "file").write_text("")
    with refused("is a file"):
        load(str(tmp_path / "file"))
    with refused(tmp_path.name, "train.npz"):
        load(str(tmp_path))


def test_heavy_imports_wait() -> None:
    code = (
        "import sys, growprune.data, growprune.streaming;"
        "print([name for name in ('PIL', 'sklearn', 'torchvision', 'scipy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- .npz pairs ------------------------------------------------------------------------------------------------------


def write_pair(root: Path, classes: list[str] = CLASSES, x: np.ndarray[Any, Any] | None = None) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for seed, split in enumerate(("train", "test")):
        images = some(20 - 5 * seed, seed=seed) if x is None else x
        np.savez(root / f"{split}.npz", x=images, y=np.arange(len(images)) % len(classes), classes=np.array(classes))


@pytest.mark.parametrize("place", ["", "cifar10"])
def test_an_npz_pair(tmp_path: Path, place: str) -> None:
    write_pair(tmp_path / place)
    for found in (load("cifar10", tmp_path), load(str(tmp_path / place))):
        assert isinstance(found.train, Part)
        assert isinstance(found.test, Part)
        assert (found.train.x.numpy() == some(20)).all()
        assert (found.test.x.numpy() == some(15, seed=1)).all()
        assert found.test.y.tolist() == [i % 10 for i in range(15)]
        assert found.classes == tuple(CLASSES)
        assert (found.pad, found.flip, found.shape()) == (4, True, (3, 32, 32))
        values = some(20) / 255
        np.testing.assert_allclose(found.mean, values.mean((0, 1, 2)), rtol=1e-12)
        np.testing.assert_allclose(found.std, values.std((0, 1, 2)), rtol=1e-12)
    assert load("cifar10", tmp_path).name == "cifar10"
    assert load(str(tmp_path / place)).name == (place or tmp_path.name)


GOOD: dict[str, Any] = {"x": some(4), "y": np.arange(4), "classes": np.array(CLASSES)}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "floats": ({"x": some(4) / 255}, "float64"),
    "no channels": ({"x": some(4)[..., 0]}, "(4, 32, 32)"),
    "two channels": ({"x": some(4)[..., :2]}, "(4, 32, 32, 2)"),
    "no images": ({"x": some(0), "y": np.arange(0)}, "no images"),
    "too few labels": ({"y": np.arange(3)}, "(3,)"),
    "labels that are no numbers": ({"y": np.array(list("abcd"))}, "labels are integers"),
    "a label too high": ({"y": np.array([0, 1, 2, 10])}, "0 to 10"),
    "a label below zero": ({"y": np.array([0, 1, 2, -1])}, "-1"),
    "classes by number": ({"classes": np.arange(10)}, "names"),
    "objects": ({"y": np.array([0, 1, 2, {}], dtype=object)}, "plain arrays"),
    "no labels": ({"y": None}, "lacks 'y'"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_npz_is_refused(tmp_path: Path, what: str) -> None:
    write_pair(tmp_path)
    change, said = BAD[what]
    np.savez(tmp_path / "test.npz", **{k: v for k, v in {**GOOD, **change}.items() if v is not None})
    with refused("test.npz", said):
        load(str(tmp_path))


def test_a_damaged_pair_is_refused(tmp_path: Path) -> None:
    write_pair(tmp_path)
    whole = (tmp_path / "test.npz").read_bytes()
    for blob in (
        whole[: len(whole) // 2],
        b"",
        b"not a zip file",
        pickle.dumps([1]),
        whole[:5000] + b"!" + whole[5001:],
    ):
        (tmp_path / "test.npz").write_bytes(blob)
        with refused("test.npz", "damaged"):
            load(str(tmp_path))
    np.savez(tmp_path / "test.npz", **{**GOOD, "classes": np.array([*CLASSES[:9], "another"])})
    with refused("different classes"):
        load(str(tmp_path))
    np.savez(tmp_path / "test.npz", **{**GOOD, "x": some(4, 16, 16)})
    with refused("(32, 32, 3)", "(16, 16, 3)"):
        load(str(tmp_path))
    (tmp_path / "test.npz").unlink()
    with refused("test.npz", "pair"):
        load(str(tmp_path))


# -- CIFAR's python files --------------------------------------------------------------------------------------------


def rows(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2).reshape(len(x), -1))


def write_cifar10(root: Path) -> Path:
    place = root / "cifar-10-batches-py"
    place.mkdir(parents=True)
    (place / "batches.meta").write_bytes(pickle.dumps({"label_names": CLASSES}, protocol=2))
    for seed, name in enumerate(["test_batch", *(f"data_batch_{i}" for i in range(1, 6))]):
        batch = {
            "batch_label": name,
            "data": rows(some(4, seed=seed)),
            "labels": [seed, 1, 2, 9],
            "filenames": ["a"] * 4,
        }
        (place / name).write_bytes(pickle.dumps(batch, protocol=2))
    return place


def write_cifar100(root: Path) -> Path:
    place = root / "cifar-100-python"
    place.mkdir(parents=True)
    names = [f"fine{i}" for i in range(100)]
    (place / "meta").write_bytes(pickle.dumps({"fine_label_names": names, "coarse_label_names": ["a"]}, protocol=2))
    for seed, name in enumerate(["train", "test"]):
        batch = {"data": rows(some(3, seed=seed)), "fine_labels": [0, 50, 99], "coarse_labels": [0, 1, 2]}
        (place / name).write_bytes(pickle.dumps(batch, protocol=2))
    return place


@pytest.mark.parametrize("place", ["", "cifar10", "somewhere"])
def test_cifar10_python_files(tmp_path: Path, place: str) -> None:
    folder = write_cifar10(tmp_path / place)
    write_cifar100(tmp_path)
    for found in (load("cifar10", tmp_path), load("cifar10", folder), load(str(folder)), load(str(tmp_path / place))):
        assert isinstance(found.train, Part)
        assert isinstance(found.test, Part)
        assert (found.train.x.numpy() == np.concatenate([some(4, seed=i) for i in range(1, 6)])).all()
        assert found.train.y.tolist() == [label for i in range(1, 6) for label in (i, 1, 2, 9)]
        assert (found.test.x.numpy() == some(4)).all()
        assert found.classes == tuple(CLASSES)


def test_cifar100_python_files(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    found = load("cifar100", tmp_path) if write_cifar100(tmp_path) else None
    assert found is not None
    assert isinstance(found.train, Part)
    assert (found.train.x.numpy() == some(3)).all()
    assert found.train.y.tolist() == [0, 50, 99]
    assert found.classes[99] == "fine99"


def python2_pickle(x: np.ndarray[Any, Any], labels: list[int]) -> bytes:
    """Byte for byte as in the published files, which Python 2 wrote: text and bytes are one kind there."""
    data = rows(x).tobytes()
    return b"".join(
        [
            b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05(",
            *(b"K" + bytes([label]) for label in labels),
            b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09",
            b"(K\x01"
            + b"M"
            + struct.pack("<H", len(x))
            + b"M\x00\x0c\x86cnumpy\ndtype\nq\nU\x02u1K\x00K\x01\x87Rq\x0b",
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
            + struct.pack("<I", len(data))
            + data
            + b"tbu.",
        ]
    )


def test_files_as_python_2_wrote_them(tmp_path: Path) -> None:
    place = write_cifar10(tmp_path)
    (place / "test_batch").write_bytes(python2_pickle(some(4, seed=7), [3, 1, 4, 1]))
    found = load("cifar10", tmp_path)
    assert isinstance(found.test, Part)
    assert (found.test.x.numpy() == some(4, seed=7)).all()
    assert found.test.y.tolist() == [3, 1, 4, 1]


class Evil:
    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


@pytest.mark.parametrize("name", ["data_batch_1", "test_batch", "batches.meta"])
def test_a_pickle_cannot_run_code(tmp_path: Path, name: str) -> None:
    place, trace = write_cifar10(tmp_path), tmp_path / "trace"
    for call, *args in (
        (os.system, f"touch {trace}"),
        (os.mkdir, str(trace)),
        (eval, f"open({str(trace)!r}, 'w')"),
        (functools.partial, os.mkdir, str(trace)),
        (np.load, str(trace)),
    ):
        for protocol in (0, 2, 4):
            (place / name).write_bytes(pickle.dumps({"data": Evil(call, *args), "labels": [1]}, protocol=protocol))  # type: ignore[arg-type]
            with refused(name, "it asks for"):
                load("cifar10", tmp_path)
            assert not trace.exists()


def cifar_batch(**change: Any) -> bytes:
    return pickle.dumps({"data": rows(some(4)), "labels": [0, 1, 2, 3], **change}, protocol=2)


@pytest.mark.parametrize(
    "blob",
    [
        cifar_batch(data=rows(some(4))[:, :-1]),
        cifar_batch(data=rows(some(4)).astype(np.float32)),
        cifar_batch(data=rows(some(4)).view(np.int8)),
        cifar_batch(data=np.array([{}], dtype=object)),
        cifar_batch(data=[1, 2, 3]),
        cifar_batch(labels=[0, 1, 2, 10]),
        cifar_batch(labels=[0, 1, 2, -1]),
        cifar_batch(labels=[0, 1, 2]),
        cifar_batch(labels=[0, 1, 2, "3"]),
        cifar_batch(labels=[0, 1, 2, 2**70]),
        cifar_batch()[:-100],
        cifar_batch(data=None),
        pickle.dumps([1, 2]),
        pickle.dumps({"data": rows(some(4))}, protocol=2),
        b"",
        b"<html>not found</html>",
    ],
)
def test_a_bad_cifar_file_is_refused(tmp_path: Path, blob: bytes) -> None:
    (write_cifar10(tmp_path) / "data_batch_3").write_bytes(blob)
    with refused("data_batch_3"):
        load("cifar10", tmp_path)


def test_a_missing_cifar_file_is_named(tmp_path: Path) -> None:
    place = write_cifar10(tmp_path)
    (place / "data_batch_4").unlink()
    with refused("data_batch_4", "No such file"):
        load("cifar10", tmp_path)
    (place / "batches.meta").unlink()
    with refused("batches.meta", "No such file"):
        load("cifar10", tmp_path)


def test_another_set_under_this_name_is_refused(tmp_path: Path) -> None:
    write_pair(tmp_path / "npz", [f"c{i}" for i in range(100)])
    write_pair(tmp_path / "small", x=some(4, 16, 16))
    for place, name in (("npz", "cifar10"), ("small", "cifar10")):
        with refused(str(tmp_path / place), f"not {name}"):
            load(name, tmp_path / place)
    write_pair(tmp_path / "ten")
    with refused("10 classes", "not cifar100"):
        load("cifar100", tmp_path / "ten")
    with refused("100 classes", "not cifar10"):
        load("cifar10", write_cifar100(tmp_path))
    with refused("not a folder"):
        load("cifar10", tmp_path / "ten" / "train.npz")


# -- downloads -------------------------------------------------------------------------------------------------------


@pytest.fixture
def website(tmp_path: Path) -> Iterator[str]:
    """The address that serves tmp_path."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def offer(monkeypatch: pytest.MonkeyPatch, url: str, md5: str) -> None:
    from torchvision import datasets

    monkeypatch.setattr(datasets.CIFAR10, "url", f"{url}/cifar-10-python.tar.gz")
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", md5)


def packed(tmp_path: Path) -> Path:
    source = write_cifar10(tmp_path / "source")
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as file:
        file.add(source, source.name)
    return tmp_path / "cifar-10-python.tar.gz"


@pytest.mark.filterwarnings("ignore:Python 3.14 will, by default, filter:DeprecationWarning")
def test_a_download_arrives_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, website: str) -> None:
    archive, place = packed(tmp_path), tmp_path / "new" / "data"
    offer(monkeypatch, website, "0" * 32)
    with refused("cifar10: no download", "corrupted", str(place)):
        load("cifar10", place)
    assert not list(place.iterdir())
    offer(monkeypatch, website, hashlib.md5(archive.read_bytes()).hexdigest())
    with refused("cifar10: not in", "cifar-10-python.tar.gz", "cifar-10-batches-py/", "train.npz and test.npz"):
        load("cifar10", place, download=False)
    found = load("cifar10", place)
    assert isinstance(found.test, Part)
    assert (found.test.x.numpy() == some(4)).all()
    assert [path.name for path in place.iterdir()] == ["cifar-10-batches-py"]
    archive.unlink()
    assert len(load("cifar10", place).train) == 20  # no second download


@pytest.mark.filterwarnings("ignore:Python 3.14 will, by default, filter:DeprecationWarning")
def test_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, place = packed(tmp_path), tmp_path / "data"
    offer(monkeypatch, "http://127.0.0.1:9", hashlib.md5(archive.read_bytes()).hexdigest())
    with refused("cifar10: no download", "refused", "cifar-10-python.tar.gz", str(place)):
        load("cifar10", place)
    archive.rename(place / archive.name)
    assert len(load("cifar10", place).train) == 20


# -- folders of classes ----------------------------------------------------------------------------------------------


def write_folder(root: Path, size: tuple[int, int] = (20, 16), held_out: str = "test", ext: str = "png") -> None:
    for split in ("train", held_out):
        for k, name in enumerate(("cat", "dog")):
            place = root / split / name
            place.mkdir(parents=True)
            for i in range(3):
                Image.fromarray(some(1, *size, seed=10 * k + i)[0]).save(place / f"{i}.{ext}")


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_small_images_come_into_memory(tmp_path: Path, held_out: str) -> None:
    write_folder(tmp_path, held_out=held_out)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "train" / "cat" / ".hidden.png").write_text("no image")
    (tmp_path / "train" / ".thumbnails").mkdir()
    (tmp_path / "train" / "list.csv").write_text("")
    deeper = tmp_path / "train" / "dog" / "images"
    deeper.mkdir()
    (tmp_path / "train" / "dog" / "2.png").rename(deeper / "2.PNG")
    found = load(str(tmp_path))
    assert isinstance(found.train, Part)
    expected = np.concatenate([some(1, 20, 16, seed=10 * k + i) for k in range(2) for i in range(3)])
    assert (found.train.x.numpy() == expected).all()
    assert found.train.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert (found.classes, found.pad, found.flip) == (("cat", "dog"), 2, True)


def test_what_is_held_out_is_val_if_there_is_one(tmp_path: Path) -> None:
    """ImageNet's own test/ has no classes."""
    write_folder(tmp_path, held_out="val")
    (tmp_path / "test" / "unknown").mkdir(parents=True)
    Image.fromarray(some(1, 20, 16)[0]).save(tmp_path / "test" / "unknown" / "a.png")
    assert len(load(str(tmp_path)).test) == 6


def test_linked_folders_count_once(tmp_path: Path) -> None:
    """By whatever names; a link that leads back to where it lies ends there."""
    write_folder(tmp_path / "set")
    more = tmp_path / "more"
    more.mkdir()
    Image.fromarray(some(1, 20, 16)[0]).save(more / "x.png")
    cat = tmp_path / "set" / "train" / "cat"
    (cat / "linked").symlink_to(more)
    (cat / "again").symlink_to(more)
    (cat / "back").symlink_to(cat)
    assert load(str(tmp_path / "set")).train.y.tolist() == [0] * 4 + [1] * 3
    found = load(str(tmp_path / "set"), stream=True).train
    assert isinstance(found, Folder)
    assert [Path(file).parent.name for file in found.files].count("again") == 1  # the first by name, on any disk


def test_cifar10_as_class_folders(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for k, name in enumerate(CLASSES):
            (tmp_path / split / name).mkdir(parents=True)
            Image.fromarray(some(1, seed=k)[0]).save(tmp_path / split / name / "a.png")
    found = load("cifar10", tmp_path)
    assert isinstance(found.test, Part)
    assert (found.test.x.numpy() == np.concatenate([some(1, seed=k) for k in range(10)])).all()


def test_every_kind_of_image_becomes_rgb(tmp_path: Path) -> None:
    write_folder(tmp_path, (8, 8))
    base = Image.fromarray(some(1, 8, 8)[0])
    alpha = base.copy()
    alpha.putalpha(Image.fromarray(some(1, 8, 8)[0, :, :, 0]))
    palette = base.quantize(8)
    palette.info["transparency"] = bytes(range(8))
    deep = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1024)
    for name, image in {"a": base.convert("L"), "b": alpha, "c": palette, "d": deep}.items():
        image.save(tmp_path / "train" / "cat" / f"{name}.png")
    for ext in ("webp", "bmp"):
        base.save(tmp_path / "train" / "cat" / f"e.{ext}", lossless=True)
    found = load(str(tmp_path))
    assert isinstance(found.train, Part)
    grey, opaque, coloured, sixteen, bmp, webp = found.train.x[3:9].numpy()
    assert (grey == np.asarray(base.convert("L"))[:, :, None]).all()
    assert (opaque == np.asarray(base)).all()
    assert (coloured == np.asarray(base.quantize(8).convert("RGB"))).all()
    assert (sixteen == np.arange(64).reshape(8, 8, 1) * 4).all()
    assert (bmp == np.asarray(base)).all()
    assert (webp == np.asarray(base)).all()


def test_large_or_mixed_images_are_streamed_unless_forced(tmp_path: Path) -> None:
    write_folder(tmp_path / "small")
    write_folder(tmp_path / "large", (70, 60))
    write_folder(tmp_path / "mixed")
    Image.fromarray(some(1, 30, 40)[0]).save(tmp_path / "mixed" / "test" / "dog" / "2.png")
    for name, stream, kind in (
        ("small", None, Part),
        ("small", True, Folder),
        ("large", None, Folder),
        ("large", False, Part),
        ("mixed", None, Folder),
        ("mixed", False, Part),
    ):
        found = load(str(tmp_path / name), stream=stream, resolution=24)
        assert type(found.train) is type(found.test) is kind
        assert (len(found.train), found.train.y.tolist()) == (6, [0, 0, 0, 1, 1, 1])
        if isinstance(found.train, Folder):
            assert [Path(file).name for file in found.train.files] == ["0.png", "1.png", "2.png"] * 2
            assert (found.pad, found.shape(24)) == (0, (3, 24, 24))
        else:
            assert found.shape() == {"small": (3, 20, 16), "large": (3, 70, 60), "mixed": (3, 24, 24)}[name]
    own = np.stack([some(1, 70, 60, seed=10 * k + i)[0] for k in range(2) for i in range(3)]) / 255
    np.testing.assert_allclose(load(str(tmp_path / "large")).std, own.std((0, 1, 2)), rtol=1e-12)
    write_pair(tmp_path / "pair")
    with refused("only class folders"):
        load(str(tmp_path / "pair"), stream=True)


def test_only_files_are_images(tmp_path: Path) -> None:
    """A pipe would be waited for; a link that leads nowhere is an image that is missing, and named."""
    write_folder(tmp_path)
    cat = tmp_path / "train" / "cat"
    os.mkfifo(cat / "pipe.png")
    (cat / "again.png").symlink_to(cat / "pipe.png")
    (cat / "linked.png").symlink_to(cat / "0.png")
    (cat / "loop").symlink_to(cat / "loop")
    assert load(str(tmp_path)).train.y.tolist() == [0] * 4 + [1] * 3
    (cat / "nowhere.png").symlink_to(cat / "gone.png")
    with refused(f"{cat / 'nowhere.png'}: No such file or directory"):
        load(str(tmp_path))


def test_an_image_that_is_too_large_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with refused(
        f"{tmp_path / 'train' / 'cat' / '0.png'}: too large: Image size (320 pixels) exceeds limit of 200 pixels;"
    ):
        load(str(tmp_path))


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "test").rename(tmp_path / "elsewhere")
    with refused("no val/ or test/"):
        load(str(tmp_path))
    (tmp_path / "elsewhere").rename(tmp_path / "val")
    (tmp_path / "val" / "dog").rename(tmp_path / "val" / "wolf")
    with refused("'dog'", "in train/ but not in val/"):
        load(str(tmp_path))
    (tmp_path / "val" / "wolf").rename(tmp_path / "val" / "dog")
    broken = tmp_path / "val" / "dog" / "1.png"
    whole = broken.read_bytes()
    for blob in (whole[: len(whole) // 2], b"", b"no image"):
        broken.write_bytes(blob)
        with refused(str(broken), "broken"):
            load(str(tmp_path))
    for image in (tmp_path / "train" / "cat").iterdir():
        image.unlink()
    with refused(str(tmp_path / "train" / "cat"), "no images", ".jpeg"):
        load(str(tmp_path))
    (tmp_path / "other" / "train").mkdir(parents=True)
    with refused("no folder in it"):
        load(str(tmp_path / "other"))


@pytest.mark.parametrize("place", ["train", "val", "train/cat", "train/cat/more"])
def test_a_folder_that_may_not_be_read_is_not_taken_for_none(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path)
    (tmp_path / "test").rename(tmp_path / "val")
    (tmp_path / "train" / "cat" / "more").mkdir()
    assert load(str(tmp_path))
    scandir, closed = os.scandir, str(tmp_path / place)

    def forbidden(path: Any) -> Any:
        if os.fspath(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", closed)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", forbidden)
    with pytest.raises(PermissionError, match=f"Permission denied: '{closed}'"):
        load(str(tmp_path))


def test_what_images_are_scaled_by_is_not_measured_where_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder a thousand images would be decoded, at every run's begin. Grey ones need a number of their own."""
    pictures.write(tmp_path)
    config = Train(model="x", data=str(tmp_path), normalize="imagenet", device="cpu")
    measured: list[object] = []
    statistics = data.statistics
    monkeypatch.setattr(data, "statistics", lambda *given: measured.append(given) or statistics(*given))
    for name, count in ((str(tmp_path), 0), ("digits", 1)):
        images = Images(replace(config, data=name), "cpu", World())
        assert len(measured) == count
        assert (images.dataset.mean == (0.485, 0.456, 0.406)) == (not count)
    Images(replace(config, normalize="own"), "cpu", World())
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("normalize", "mean", "std"),
    [
        ("none", (0.0,), (1.0,)),
        ("0.5/0.25", (0.5,), (0.25,)),
        ("none", (0.0,) * 3, (1.0,) * 3),
        ("0.5/0.25", (0.5,) * 3, (0.25,) * 3),
        ("0.5,0.4,-1/0.25,0.3,2", (0.5, 0.4, -1.0), (0.25, 0.3, 2.0)),
    ],
)
def test_images_are_scaled_as_the_network_was_trained(
    tmp_path: Path, normalize: str, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    """What the network sees is (pixel / 255 - mean) / deviation, channel by channel."""
    pictures.write(tmp_path)
    data_ = "digits" if len(mean) == 1 else str(tmp_path)
    images = Images(Train(model="x", data=data_, normalize=normalize, device="cpu"), "cpu", World())
    assert (images.dataset.mean, images.dataset.std) == (mean, std)
    pixels = torch.full((1, len(mean), 2, 2), 51, dtype=torch.uint8)
    expected = torch.tensor([(0.2 - m) / s for m, s in zip(mean, std, strict=True)])
    torch.testing.assert_close(images.normal(pixels)[0, :, 0, 0], expected)


@pytest.mark.parametrize("normalize", ["own", "none", "0.5/0.5"])
def test_other_pixels_are_other_images_however_they_are_scaled(tmp_path: Path, normalize: str) -> None:
    def arrays(value: int) -> Images:
        for part in ("train", "test"):
            x = np.full((4, 8, 8, 3), 51, np.uint8)
            x[0, 0, 0] = value
            np.savez(tmp_path / f"{part}.npz", x=x, y=np.arange(4) % 2, classes=np.array(["a", "b"]))
        return Images(Train(model="x", data=str(tmp_path), normalize=normalize, device="cpu"), "cpu", World())

    first = arrays(51).known()
    arrays(51).recognized(first, print)
    with pytest.raises(GrowpruneError, match=r"not the images that this run began with: (own )?mean was"):
        arrays(52).recognized(first, print)


@pytest.mark.parametrize(
    ("anew", "usual", "said"),
    [
        (99.0, 60.0, "99.0 % with batch norm's statistics"),  # no usual scale is the one
        (65.0, 60.0, "60.0 % with --normalize own"),
        (45.0, 90.0, "90.0 % with --normalize own"),
        (45.0, 38.0, "45.0 % with batch norm's statistics"),
    ],
)
def test_a_usual_scale_is_named_where_it_may_be_the_one(
    monkeypatch: pytest.MonkeyPatch, anew: float, usual: float, said: str
) -> None:
    found = iter([anew, usual, 0.0, 0.0])
    monkeypatch.setattr("growprune.evaluation.accuracy", lambda *_: next(found))
    images = Images(Train(model="x", data="digits", normalize="none", device="cpu"), "cpu", World())
    asked = doubt(network(), images, 30.0, 64)
    assert asked is not None
    assert f"is right on 30.0 % of the test images, and on {said}" in asked


def test_as_many_means_as_there_are_channels() -> None:
    config = Train(model="x", data="digits", normalize="0.5,0.5,0.5/1,1,1", device="cpu")
    with pytest.raises(
        GrowpruneError, match="3 means and deviations, but images of digits have 1 channel; give one for"
    ):
        Images(config, "cpu", World())


@pytest.mark.parametrize("text", ["onw", "0.5", "0.5/0", "0.5,0.5/1", "0.5/-1", "a/b", "nan/1", "0.5/1/2", "/"])
def test_scales_that_cannot_be_read(text: str) -> None:
    with pytest.raises(GrowpruneError, match=r"^--normalize: .*; give own, imagenet, none, or means/deviations"):
        Train(normalize=text)


def test_the_example_is_the_same_noise_each_time() -> None:
    """On zeros a network without biases would show nothing of its filters, and removing some would be no proof."""
    images = Images(Train(model="x", data="digits", device="cpu"), "cpu", World())
    assert images.example().shape == (1, 1, 8, 8)
    assert float(images.example().std()) > 0.5
    assert torch.equal(images.example(), images.example())


def test_fewer_test_images_are_from_all_over_the_set() -> None:
    images = Images(Train(model="x", data="digits", device="cpu"), "cpu", World())
    whole = [y for _, y in images.tested(10)]
    few = images.fewer(images.sizes["test"] // 3)
    assert torch.equal(torch.cat([y for _, y in few.tested(10)]), torch.cat(whole[::3]))
    assert images.fewer(images.sizes["test"]).one_in == 1
    assert torch.equal(torch.cat([y for _, y in images.tested(10)]), torch.cat(whole))


def test_a_constant_channel_has_no_deviation() -> None:
    found = in_memory(np.full((4, 8, 8, 1), 51, np.uint8))
    assert (found.mean, found.std) == ((0.2,), (1.0,))


# -- chance ----------------------------------------------------------------------------------------------------------

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """As Vigna publishes it, for one state."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_random_numbers_are_splitmix64(key: int, what: int) -> None:
    expected = [splitmix64(key + (i + (what << 40)) * 0x9E3779B97F4A7C15) for i in range(1, 6)]
    assert [value & MASK for value in data.drawn(key, what, 5).tolist()] == expected


def test_the_plan_never_changes() -> None:
    """Golden: another shuffling would make published runs impossible to repeat, and resumed ones different."""
    resident = Resident(in_memory(some(50, 8, 8)), "cpu", 16)
    plan = resident.plan(1, 2, 3)
    assert (plan.shape, plan.dtype, plan.device.type) == ((3, 16, 4), torch.int32, "cpu")
    assert plan[0, :3].tolist() == [[27, 3, 6, 1], [34, 4, 0, 1], [8, 6, 3, 0]]
    assert plan[2, 15].tolist() == [31, 4, 7, 0]
    assert hashlib.sha256(plan.numpy().tobytes()).hexdigest()[:16] == "d553d38298e63c45"


def test_a_plan_depends_on_its_arguments_alone() -> None:
    resident = Resident(in_memory(some(50, 8, 8)), "cpu", 16)
    before = torch.get_rng_state()
    plan = resident.plan(1, 2, 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(resident.plan(1, 2, 3), plan)
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 4), (12, 0, 3), (2, 1, 3), (-1, 2, 3)):
        assert not torch.equal(resident.plan(*other)[..., 0], plan[..., 0])


def test_a_plan_is_a_fair_shuffle() -> None:
    count, pad = 50_000, 4
    resident = Resident(in_memory(np.zeros((count, 2, 2, 1), np.uint8), pad), "cpu", 256)
    index, top, left, flip = resident.plan(0, 0, 0).view(-1, 4).long().unbind(1)
    assert resident.steps == count // 256
    assert len(index.unique()) == resident.steps * 256
    assert index.min() >= 0
    assert index.max() < count
    cells = ((top * 9 + left) * 2 + flip).bincount(minlength=162).double()
    assert len(cells) == 162
    assert abs(chi_square(cells) - 161) < 5 * (2 * 161) ** 0.5
    halves = (index < count // 2).view(resident.steps, 256).double().mean(1)
    assert abs(halves - 0.5).max() < 0.15
    for a, b in ((index, top), (index, flip), (top, left), (left, flip), (index[1:], index[:-1])):
        assert abs(torch.corrcoef(torch.stack([a, b]).double())[0, 1]) < 0.02
    following = resident.plan(0, 0, 1).view(-1, 4)[:, 0].long()
    assert abs(torch.corrcoef(torch.stack([index, following]).double())[0, 1]) < 0.02


def chi_square(counts: torch.Tensor) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


def test_digits_are_shifted_and_never_mirrored() -> None:
    plan = Resident(load("digits"), "cpu", 64).plan(0, 0, 0)
    assert plan.shape == (18, 64, 4)
    assert plan[..., 3].unique().tolist() == [0]
    assert plan[..., 1].unique().tolist() == plan[..., 2].unique().tolist() == [0, 1, 2]


# -- on the device ---------------------------------------------------------------------------------------------------


def one_by_one(x: np.ndarray[Any, Any], pad: int, plan: list[list[int]]) -> np.ndarray[Any, Any]:
    """Zero-pad, crop, mirror: an image at a time."""
    found = []
    for index, top, left, flip in plan:
        padded = np.pad(x[index], ((pad, pad), (pad, pad), (0, 0)))
        crop = padded[top : top + x.shape[1], left : left + x.shape[2]]
        found.append((crop[:, ::-1] if flip else crop).transpose(2, 0, 1))
    return np.stack(found)


@given(st.data(), st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 3]), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_a_batch_is_what_is_done_one_by_one(
    draw: st.DataObject, height: int, width: int, channels: int, pad: int
) -> None:
    x = some(5, height, width, channels)
    place = st.integers(0, 2 * pad)
    plan = draw.draw(st.lists(st.tuples(st.integers(0, 4), place, place, st.integers(0, 1)).map(list), min_size=1))
    images, labels = Resident(in_memory(x, pad), "cpu", 2).batch_of(torch.tensor(plan, dtype=torch.int32))
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert (images.numpy() == one_by_one(x, pad, plan)).all()
    assert labels.tolist() == [row[0] for row in plan]
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_an_epoch_compiles_and_normalizes() -> None:
    x = some(20, 8, 8)
    found = in_memory(x, 1)
    resident = Resident(found, "cpu", 8)
    rows = resident.plan(0, 0, 0)[1]

    def whole(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = resident.batch_of(rows)
        return resident.normalized(images), labels

    images, labels = torch.compile(whole, fullgraph=True, backend="aot_eager")(rows)
    expected = (one_by_one(x, 1, rows.tolist()) / 255 - np.reshape(found.mean, (3, 1, 1))) / np.reshape(
        found.std, (3, 1, 1)
    )
    np.testing.assert_allclose(images.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert labels.tolist() == rows[:, 0].tolist()
    assert images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)
    half = resident.normalized(resident.batch_of(rows)[0], torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, images.bfloat16())


def test_evaluation_takes_all_in_order() -> None:
    part = Part(torch.from_numpy(some(10, 4, 4)), torch.arange(10))
    held = part.to("cpu")
    assert held.x.data_ptr() == part.x.data_ptr()
    found = list(data.batches(held, "cpu", 4))
    assert [len(y) for _, y in found] == [4, 4, 2]
    assert torch.equal(torch.cat([y for _, y in found]), part.y)
    assert torch.equal(torch.cat([x for x, _ in found]), part.x.permute(0, 3, 1, 2))
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _ in found)


def test_too_large_a_batch_is_refused(tmp_path: Path) -> None:
    for batch in (11, 0):
        with refused(f"no batch of {batch} from 10 images"):
            Resident(in_memory(some(10, 4, 4)), "cpu", batch)
    write_folder(tmp_path)
    with refused("streamed", "stream=False"):
        Resident(load(str(tmp_path), stream=True), "cpu", 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_batch_replays_in_a_cuda_graph() -> None:
    x = some(300)
    found = in_memory(x)
    resident, here = Resident(found, "cuda", 64), Resident(found, "cpu", 64)
    plan = resident.plan(0, 0, 0)
    rows = plan[0].cuda()
    for _ in range(2):  # warm, then recorded
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            images, labels = resident.batch_of(rows)
            normal = resident.normalized(images)
    for step in range(resident.steps):
        rows.copy_(plan[step])
        graph.replay()
        expected, right = here.batch_of(plan[step])
        assert torch.equal(images.cpu(), expected)
        assert torch.equal(labels.cpu(), right)
        torch.testing.assert_close(normal.cpu(), here.normalized(expected), rtol=1e-6, atol=1e-6)


def test_bytes_that_were_read_are_not_read_again() -> None:
    raw = io.BytesIO()
    Image.fromarray(some(1)[0]).save(raw, "PNG")
    from growprune.reading import picture

    assert (picture("nowhere.png", raw) == some(1)[0]).all()
