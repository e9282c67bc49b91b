"""Large images, streamed from files: decoded and cropped by worker processes, copied to the device one batch ahead.

    order (here) ─► names and seeds ─► workers: read, decode, crop, flip ─► pinned memory ─► side stream ─► the network

The order tells a worker which file to read and the seed of its crop, so what stands at (epoch, step, place) does not
depend on how many workers or ranks there are, nor on where an epoch is entered. A worker keeps no list of files.
"""

from __future__ import annotations

import io
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, count, starmap
from typing import Literal, TypeVar

import torch
from torch import Tensor

from growprune.data import Dataset, Normal, Source, drawn, key_of, shuffled
from growprune.errors import GrowpruneError
from growprune.reading import Folder, cores, picture, unreadable
from growprune.workers import Batch, Sample, Workers

Device = torch.device | str
Decode = Literal["cpu", "gpu"]
Shown = Literal["random", "middle", "square"]
T = TypeVar("T")
RGB = 3  # torchvision.io.ImageReadMode.RGB.value


class Streamed(Source):
    """A set of class folders, as batches of uint8 images on the device (B x 3 x R x R, channels last in memory).

    `workers`: processes that decode; by default one for each core this process may use, 16 at most; 0: none.
    `decode="gpu"`: JPEGs are decoded and cropped on a CUDA device, by nvJPEG, whose pixels are not quite the CPU's.
    A script that uses workers needs the usual `if __name__ == "__main__":`, as they start from a clean process.
    """

    def __init__(
        self,
        dataset: Dataset,
        device: Device,
        batch: int,
        workers: int | None = None,
        resolution: int = 224,
        decode: Decode = "cpu",
        part: Shown | None = None,
    ) -> None:
        if not isinstance(dataset.train, Folder) or not isinstance(dataset.test, Folder):
            raise GrowpruneError(f"{dataset.name}: its images are in memory; load it with stream=True to stream them")
        super().__init__(dataset, batch)
        if workers is not None and workers < 0:
            raise GrowpruneError(f"workers: {workers} is less than 0")
        if decode == "gpu" and (why := undecodable(device)):
            raise GrowpruneError(f"--decode gpu: JPEGs cannot be decoded there ({why}); give cpu or auto")
        self._train, self._test = dataset.train, dataset.test
        self.device = torch.device(device)
        self.workers = default_workers() if workers is None else workers
        self.normalized = Normal(dataset, device)
        self._view = View(resolution, dataset.flip, part or ("random" if dataset.crop else "middle"))
        self._gpu = decode == "gpu"
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._workers = Workers(Reader(None if self._gpu else self._view), self.workers)

    def epoch(
        self, seed: int, stage: int, epoch: int, start: int = 0, rank: int = 0, world: int = 1, stop: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """An epoch's training batches from step `start` on, up to `stop`; of rank r of w, its B/w images of each."""
        order = self._order(seed, stage, epoch, self._places(rank, world), range(self.steps)[start:stop])
        return self._ahead(self._workers.read(order))

    def epochs(
        self, seed: int, stage: int, step: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of all epochs, one after the other without end, from a stage's step on. The workers go on to the
        next epoch while the last batches of this one are used."""
        places, whole = self._places(rank, world), range(self.steps)
        epoch, start = divmod(step, self.steps)
        orders = (
            self._order(seed, stage, each, places, whole[start if each == epoch else 0 :]) for each in count(epoch)
        )
        return self._ahead(self._workers.read(chain.from_iterable(orders)))

    def _places(self, rank: int, world: int) -> range:
        """The places of a batch that are this rank's."""
        if self.batch % world:
            raise GrowpruneError(f"a batch of {self.batch} cannot be shared evenly by {world} processes")
        share = self.batch // world
        return range(rank * share, (rank + 1) * share)

    def _order(self, seed: int, stage: int, epoch: int, places: range, steps: range) -> Iterator[list[Sample]]:
        """What is asked for in these steps of an epoch, batch by batch: these places of each."""
        key = key_of(seed, stage, epoch)
        order, seeds = shuffled(key, len(self._train)), drawn(key, 1, len(self._train))
        for step in steps:
            chosen = slice(step * self.batch + places.start, step * self.batch + places.stop)
            yield samples(self._train, order[chosen], seeds[chosen].tolist())

    def test(self, size: int | None = None, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """The test images in order (of rank r of w, every w-th from the r-th on), resized and cropped in the middle."""
        return self._each(self._test, None, torch.arange(rank, len(self._test), world), size or self.batch)

    def trained(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The training images in order, all of them, as a view without chance shows them."""
        return self._each(self._train, 0, torch.arange(len(self._train)), self.batch)

    def _each(self, folder: Folder, seed: int | None, mine: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        rows = (samples(folder, chosen, [seed] * len(chosen)) for chosen in mine.split(size))
        return self._ahead(self._workers.read(rows if len(mine) else ()))

    def images_per_second(self, seconds: float = 3.0) -> float:
        """How fast training batches come when nothing is done with them."""
        done, began = -max(1, self.workers), 0.0  # each worker's first batch is not counted: they start one by one
        for _ in self.epochs(0, 0):
            if done == 0:
                began = self._now()
            if done > 0 and done % max(1, self.workers) == 0 and self._now() - began >= seconds:  # they come in rounds
                break
            done += 1
        return done * self.batch / (self._now() - began)

    def close(self) -> None:
        """End the workers; the next batch starts new ones."""
        self._workers.close()

    def _now(self) -> float:
        if self._stream is not None:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _ahead(self, source: Iterator[tuple[list[Sample], Batch]]) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches on the device, the next one being copied on a side stream while this one is used."""
        sent = starmap(self._sent, source)
        for images, labels, copied in sent if self._stream is None else one_ahead(sent):
            if copied is not None:
                now = torch.cuda.current_stream(self.device)
                now.wait_event(copied)
                for tensor in (images, labels):
                    tensor.record_stream(now)  # or the side stream would reuse its memory too early
            yield images.permute(0, 3, 1, 2), labels

    def _sent(self, asked: list[Sample], batch: Batch) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            labels = torch.tensor([sample.label for sample in asked])
            images = self._decoded(asked, *batch) if self._gpu else batch[0]
            if self._stream is not None:
                labels, images = (t if t.is_cuda else t.pin_memory() for t in (labels, images))
            images, labels = (t.to(self.device, non_blocking=True) for t in (images, labels))
            return images, labels, self._stream.record_event() if self._stream is not None else None

    def _decoded(self, asked: list[Sample], data: Tensor, lengths: list[int]) -> Tensor:
        """Files' bytes, one after the other, as views of their images, made on the device."""
        torch.cuda.current_stream(self.device).synchronize()  # the decoder's own stream does not wait for this one
        files = data.split(lengths)
        jpegs = [i for i, file in enumerate(files) if file[:2].tolist() == [0xFF, 0xD8]]
        decoded = dict(zip(jpegs, decoded_there([files[i] for i in jpegs], self.device), strict=True))
        views = []
        for i, (file, sample) in enumerate(zip(files, asked, strict=True)):
            image = decoded.get(i)
            image = decoded_here(sample.file, file).to(self.device) if image is None else image
            views.append(self._view(image, sample.seed).permute(1, 2, 0))
        return torch.stack(views)


def samples(folder: Folder, chosen: Tensor, seeds: Sequence[int | None]) -> list[Sample]:
    labels = folder.y[chosen].tolist()
    return [Sample(folder.files[i], y, s) for i, y, s in zip(chosen.tolist(), labels, seeds, strict=True)]


def one_ahead(source: Iterable[T]) -> Iterator[T]:
    """Each item, but not before the next one was asked for.

    >>> list(one_ahead("abc"))
    ['a', 'b', 'c']
    """
    waiting: list[T] = []
    for item in source:
        waiting.append(item)
        if len(waiting) == 2:
            yield waiting.pop(0)
    yield from waiting


def default_workers() -> int:
    """The cores of this process, shared with the others that torchrun started on this machine."""
    return max(1, min(16, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


# -- one image -------------------------------------------------------------------------------------------------------


def around(size: int) -> int:
    """The shorter side that an image is brought to before its middle of this size is tested: 256 for 224."""
    return round(size * 256 / 224)


class View:
    """What the network sees of an image: in testing the middle; in training (`part`) a random part, also the middle, or
    the square around it, from which parts are cut later; and its mirror image, if there is `flip`."""

    def __init__(self, size: int, flip: bool, part: Shown = "random") -> None:
        try:
            from torchvision.transforms import v2
        except ImportError as error:
            raise GrowpruneError("streaming images needs torchvision: pip install torchvision") from error
        larger = v2.Resize(around(size), antialias=True)
        self._test = v2.Compose([larger, v2.CenterCrop(size)])
        crops = {
            "random": v2.RandomResizedCrop(size, antialias=True),
            "middle": self._test,
            "square": v2.Compose([larger, v2.CenterCrop(around(size))]),
        }
        self._train = v2.Compose([crops[part], v2.RandomHorizontalFlip()]) if flip else crops[part]

    def __call__(self, image: Tensor, seed: int | None) -> Tensor:
        if seed is None:
            return self._test(image)  # type: ignore[no-any-return]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self._train(image)  # type: ignore[no-any-return]


def decoded_there(files: list[Tensor], device: torch.device) -> list[Tensor | None]:
    """JPEGs decoded by the GPU; None for one of a kind that it does not know. For one such all fail: then it is asked
    one by one, so that an image does not depend on its neighbours."""
    try:
        return list(torch.ops.image.decode_jpegs_cuda(files, RGB, device)) if files else []
    except RuntimeError:
        return [None] if len(files) == 1 else [image for file in files for image in decoded_there([file], device)]


def decoded_here(file: str, data: Tensor) -> Tensor:
    """An image's bytes as uint8, 3 x H x W, by the CPU: by torchvision's operators where they know the format, which
    are the fastest, else by PIL. (The functions around those operators warn since torchvision 0.29.)"""
    import torchvision.io  # noqa: F401 (brings the operators)

    if hasattr(torch.ops.image, "decode_image"):
        try:
            image: Tensor = torch.ops.image.decode_image(data, RGB, False)
            if image.dtype == torch.uint8 and len(image) == 3 and image.dim() == 3:
                return image
        except RuntimeError:
            pass  # a format that only PIL knows, or a broken file, which PIL will name
    return torch.from_numpy(picture(file, io.BytesIO(data.numpy().tobytes()))).permute(2, 0, 1)


def bounded(data: Tensor) -> None:
    """Refuse, by its head alone, what has more pixels than PIL decodes: torchvision and the GPU have no limit."""
    from PIL import Image

    try:
        with warnings.catch_warnings():  # of half as many: these are decoded
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            Image.open(io.BytesIO(data.numpy().tobytes())).close()
    except Image.DecompressionBombError:
        raise
    except Exception:
        pass  # not known to PIL, or broken: who decodes it will say so


def undecodable(device: Device) -> str:
    """Why torchvision cannot decode JPEGs on this device; empty if it can."""
    from PIL import Image

    raw, device = io.BytesIO(), torch.device(device)
    Image.new("RGB", (16, 16)).save(raw, "JPEG")
    try:
        import torchvision.io  # noqa: F401 (brings the operators)

        if device.type != "cuda":
            raise RuntimeError(f"the device is {device.type}")
        torch.ops.image.decode_jpegs_cuda([torch.frombuffer(bytearray(raw.getvalue()), dtype=torch.uint8)], RGB, device)
    except (RuntimeError, AttributeError, ImportError) as error:
        return next(iter(str(error).splitlines()), "") or type(error).__name__
    return ""


# -- a batch --------------------------------------------------------------------------------------------------------


class Reader:
    """What a worker does: samples in, a batch out. Without a view, files come as their bytes."""

    def __init__(self, view: View | None) -> None:
        self.view = view

    def __call__(self, asked: list[Sample], note: Callable[[int], None]) -> Batch:
        made, lengths = [], []
        for place, sample in enumerate(asked):
            note(place)
            try:
                with open(sample.file, "rb") as file:
                    data = torch.frombuffer(bytearray(file.read()) or bytearray(1), dtype=torch.uint8)
                bounded(data)
                lengths.append(len(data))
                made.append(data if self.view is None else self._seen(sample, data))
            except GrowpruneError:
                raise
            except Exception as error:
                raise GrowpruneError(unreadable(sample.file, error)) from error
        return torch.cat(made) if self.view is None else torch.stack(made), lengths

    def _seen(self, sample: Sample, data: Tensor) -> Tensor:
        assert self.view is not None
        return self.view(decoded_here(sample.file, data), sample.seed).permute(1, 2, 0)
