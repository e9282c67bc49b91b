"""Large images, streamed from files: decoded and cropped by worker processes, copied to the device one batch ahead.

    order (here) ─► names and seeds ─► workers: read, decode, crop, flip ─► pinned memory ─► side stream ─► the network

The order tells a worker which file to read and the seed of its crop, so what stands at (epoch, step, place) does not
depend on how many workers or ranks there are, nor on where an epoch is entered. A worker keeps no list of files.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from growprune.data import Dataset, Normal, drawn, key_of, shuffled
from growprune.errors import GrowpruneError
from growprune.reading import Folder, cores, picture, unreadable

Device = torch.device | str
T = TypeVar("T")
RGB = 3  # torchvision.io.ImageReadMode.RGB.value


class Sample(NamedTuple):
    """What is asked of a worker: `seed` is that of the crop and flip, None for the view that is tested."""

    number: int
    file: str
    label: int
    seed: int | None


class Streamed:
    """A set of class folders, as batches of uint8 images on the device (B x 3 x R x R, channels last in memory).

    `workers`: processes that decode; by default one for each core this process may use, 16 at most; 0: none.
    `decode="gpu"`: JPEGs are decoded and cropped on a CUDA device, where torchvision can; `notify` hears if it cannot.
    A script that uses workers needs the usual `if __name__ == "__main__":`, as they start from a clean process.
    """

    def __init__(
        self,
        dataset: Dataset,
        device: Device,
        batch: int,
        workers: int | None = None,
        resolution: int = 224,
        decode: Literal["cpu", "gpu"] = "cpu",
        notify: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    ) -> None:
        if not isinstance(dataset.train, Folder) or not isinstance(dataset.test, Folder):
            raise GrowpruneError(f"{dataset.name}: its images are in memory; load it with stream=True to stream them")
        if not 0 < batch <= len(dataset.train):
            count = len(dataset.train)
            raise GrowpruneError(f"{dataset.name}: no batch of {batch} from {count} images; give a smaller one")
        if workers is not None and workers < 0:
            raise GrowpruneError(f"workers: {workers} is less than 0")
        self._train, self._test = dataset.train, dataset.test
        self.device, self.batch, self.steps = torch.device(device), batch, len(dataset.train) // batch
        self.workers = default_workers() if workers is None else workers
        self.normalized = Normal(dataset, device)
        self._view = View(resolution, dataset.flip)
        self._gpu = decode == "gpu" and decodes_jpeg(self.device, notify)
        self._feeds: dict[str, Feed] = {}
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def epoch(
        self, seed: int, stage: int, epoch: int, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """An epoch's training batches from step `start` on; of rank r of w, its B/w images of each."""
        if self.batch % world:
            raise GrowpruneError(f"a batch of {self.batch} cannot be shared evenly by {world} processes")
        key, share = key_of(seed, stage, epoch), self.batch // world
        order, seeds = shuffled(key, len(self._train)), drawn(key, 1, len(self._train))

        def rows() -> Iterator[list[Sample]]:
            for first in range(start * self.batch + rank * share, self.steps * self.batch, self.batch):
                chosen = slice(first, first + share)
                yield samples(self._train, order[chosen], seeds[chosen].tolist())

        return self._ahead(self._feed("train")(rows()))

    def test(self, size: int | None = None, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """The test images in order (of rank r of w, every w-th from the r-th on), resized and cropped in the middle."""
        mine = torch.arange(rank, len(self._test), world)
        rows = (samples(self._test, chosen, [None] * len(chosen)) for chosen in mine.split(size or self.batch))
        return self._ahead(self._feed("test")(rows if len(mine) else ()))

    def images_per_second(self, seconds: float = 3.0) -> float:
        """How fast training batches come when nothing is done with them."""
        round_of = max(1, self.workers)  # workers finish together at first, so only whole rounds are counted

        def endless() -> Iterator[tuple[Tensor, Tensor]]:
            for epoch in range(sys.maxsize):
                yield from self.epoch(0, 0, epoch)

        done, began = -round_of, 0.0
        for _ in endless():
            if done == 0:
                began = self._now()
            if done > 0 and done % round_of == 0 and self._now() - began >= seconds:
                break
            done += 1
        return done * self.batch / (self._now() - began)

    def close(self) -> None:
        """End the workers; the next batch starts new ones."""
        for feed in self._feeds.values():
            feed.close()

    def _now(self) -> float:
        if self._stream is not None:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _feed(self, name: str) -> Feed:
        """Training and testing have workers of their own: an epoch goes on after a test in its middle."""
        if name not in self._feeds:
            pinned = self.device.type == "cuda" and not self._gpu
            files = (self._train if name == "train" else self._test).files
            self._feeds[name] = Feed(files, None if self._gpu else self._view, self.workers, pinned)
        return self._feeds[name]

    def _ahead(self, source: Iterator[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches on the device, the next one being copied on a side stream while this one is used."""
        sent = map(self._sent, source)
        for images, labels, copied in sent if self._stream is None else one_ahead(sent):
            if copied is not None:
                now = torch.cuda.current_stream(self.device)
                now.wait_event(copied)
                for tensor in (images, labels):
                    tensor.record_stream(now)  # or the side stream would reuse its memory too early
            yield images.permute(0, 3, 1, 2), labels

    def _sent(self, batch: Any) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            images, labels = self._decoded(*batch) if self._gpu else batch
            images, labels = (t.to(self.device, non_blocking=True) for t in (images, labels))
            return images, labels, self._stream.record_event() if self._stream is not None else None

    def _decoded(self, data: Tensor, ends: list[int], asked: list[Sample]) -> tuple[Tensor, Tensor]:
        """Files' bytes, one after the other, as views of their images, made on the device."""
        torch.cuda.current_stream(self.device).synchronize()  # the decoder's own stream does not wait for this one
        files = [data[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        jpegs = [i for i, file in enumerate(files) if file[:2].tolist() == [0xFF, 0xD8]]
        try:
            on_gpu = torch.ops.image.decode_jpegs_cuda([files[i] for i in jpegs], RGB, self.device) if jpegs else []
            decoded = dict(zip(jpegs, on_gpu, strict=True))
        except RuntimeError:  # one of them is of a kind that the GPU does not know: none came back
            decoded = {}
        out = torch.empty(len(files), self._view.size, self._view.size, 3, dtype=torch.uint8, device=self.device)
        for i, (file, sample) in enumerate(zip(files, asked, strict=True)):
            image = decoded[i] if i in decoded else decoded_here(sample.file, file).to(self.device)
            out[i] = self._view(image, sample.seed).permute(1, 2, 0)
        return out, torch.tensor([sample.label for sample in asked])


def samples(folder: Folder, chosen: Tensor, seeds: list[int] | list[None]) -> list[Sample]:
    labels = folder.y[chosen].tolist()
    return [Sample(i, folder.files[i], y, s) for i, y, s in zip(chosen.tolist(), labels, seeds, strict=True)]


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


class View:
    """What the network sees of an image: in training a random part and its mirror image, in testing the middle."""

    def __init__(self, size: int, flip: bool) -> None:
        try:
            from torchvision.transforms import v2
        except ImportError as error:
            raise GrowpruneError("streaming images needs torchvision: pip install torchvision") from error
        self.size = size
        crop = v2.RandomResizedCrop(size, antialias=True)
        self._train = v2.Compose([crop, v2.RandomHorizontalFlip()]) if flip else crop
        self._test = v2.Compose([v2.Resize(round(size * 256 / 224), antialias=True), v2.CenterCrop(size)])

    def __call__(self, image: Tensor, seed: int | None) -> Tensor:
        if seed is None:
            return self._test(image)  # type: ignore[no-any-return]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self._train(image)  # type: ignore[no-any-return]


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


def decodes_jpeg(device: torch.device, notify: Callable[[str], None]) -> bool:
    """Can torchvision decode on this device? If not, it is said."""
    from PIL import Image

    raw = io.BytesIO()
    Image.new("RGB", (16, 16)).save(raw, "JPEG")
    try:
        import torchvision.io  # noqa: F401 (brings the operators)

        if device.type != "cuda":
            raise RuntimeError(f"the device is {device.type}")
        torch.ops.image.decode_jpegs_cuda([torch.frombuffer(bytearray(raw.getvalue()), dtype=torch.uint8)], RGB, device)
    except (RuntimeError, AttributeError, ImportError) as error:
        reason = next(iter(str(error).splitlines()), "")
        notify(f"JPEGs are decoded on the CPU: no decoder on the GPU ({reason})")
        return False
    return True


# -- workers ---------------------------------------------------------------------------------------------------------


class Reader(TorchDataset[Any]):
    """What a worker does: samples in, a batch out; or a line that says what is wrong with a file.

    Without a view, files come as their bytes. `at` tells the main process which image each worker is busy with.
    """

    def __init__(self, view: View | None, workers: int) -> None:
        self.view = view
        self.at = context().RawArray("q", 2 * workers) if workers else []  # each one's process id, and image's number

    def __getitems__(self, asked: list[Sample]) -> Any:
        files = []
        size = self.view.size if self.view else 0
        out = torch.empty(len(asked), size, size, 3, dtype=torch.uint8)
        for i, sample in enumerate(asked):
            self._note(sample.number)
            try:
                with open(sample.file, "rb") as file:
                    data = torch.frombuffer(bytearray(file.read()) or bytearray(1), dtype=torch.uint8)
                if self.view is None:
                    files.append(data)
                else:
                    out[i] = self.view(decoded_here(sample.file, data), sample.seed).permute(1, 2, 0)
            except GrowpruneError as error:
                return str(error)
            except Exception as error:  # an exception would reach the main process as a traceback in a text
                return unreadable(sample.file, error)
        if self.view is None:
            return torch.cat(files), torch.tensor([len(data) for data in files]).cumsum(0).tolist(), asked
        return out, torch.tensor([sample.label for sample in asked])

    def _note(self, number: int) -> None:
        worker = torch.utils.data.get_worker_info()
        if worker is not None:
            self.at[2 * worker.id], self.at[2 * worker.id + 1] = os.getpid(), number

    def busy(self) -> list[tuple[int, int]]:
        """Each worker's process id, and the number of the image it took up last."""
        return list(zip(self.at[::2], self.at[1::2], strict=True))


class Order:
    """The batches a loader asks for, set anew for each pass."""

    rows: Iterable[list[Sample]] = ()

    def __iter__(self) -> Iterator[list[Sample]]:
        return iter(self.rows)


class Feed:
    """A loader whose workers stay from one pass to the next. A new pass ends the one before."""

    def __init__(self, files: Sequence[str], view: View | None, workers: int, pinned: bool) -> None:
        self._files, self._workers, self._pinned = files, workers, pinned
        self._reader, self._order = Reader(view, workers), Order()
        self._loader: DataLoader[Any] | None = None

    def __call__(self, rows: Iterable[list[Sample]]) -> Iterator[Any]:
        self._order.rows = rows
        if self._loader is None:
            self._loader = self._made()
        try:
            for batch in self._loader:
                if isinstance(batch, str):
                    raise GrowpruneError(batch)
                yield batch
        except (RuntimeError, OSError, EOFError) as error:  # torch's word for a dead worker, or that of a broken pipe
            self.close()
            raise self._named(error) from error

    def close(self) -> None:
        """End the workers now: left to the garbage collector, torch waits five seconds for each of them."""
        iterator = getattr(self._loader, "_iterator", None)
        self._loader = None
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()

    def _made(self) -> DataLoader[Any]:
        several = {"persistent_workers": True, "multiprocessing_context": context(), "worker_init_fn": ignore_interrupt}
        return DataLoader(
            self._reader,
            batch_sampler=self._order,
            num_workers=self._workers,
            collate_fn=as_it_is,
            pin_memory=self._pinned,
            generator=torch.Generator(),  # or a pass would draw from the user's random numbers
            **(several if self._workers else {}),
        )

    def _named(self, error: Exception) -> Exception:
        """A worker's end as one line that names the file it was busy with; any other error as it is."""
        for _ in range(20 if self._workers else 0):
            for pid, number in self._reader.busy():
                if pid and gone(pid):
                    return died(f"while it read {self._files[number]}")
            time.sleep(0.05)  # its end may be known here before it is known everywhere
        return died("before it read a file") if "DataLoader worker" in str(error) else error


def died(when: str) -> GrowpruneError:
    return GrowpruneError(f"a loader process died {when}: too little memory, or shared memory? Try fewer workers")


def gone(pid: int) -> bool:
    """Is there no such process any more?"""
    if os.name != "posix":
        return False
    try:
        os.kill(pid, 0)  # asks, and does nothing
    except ProcessLookupError:
        return True
    return False


def context() -> Any:
    """Workers start from a clean process: one with threads and a CUDA device is not safe to copy. Their end is then
    seen where a batch is awaited, not by a signal in the midst of the caller's code."""
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    found = torch.multiprocessing.get_context(method)
    if method == "forkserver":
        found.set_forkserver_preload(["torchvision.transforms.v2", "growprune.streaming"])
    return found


def ignore_interrupt(_: int) -> None:
    """Ctrl-C is the main process's to handle: it may still want a batch before it leaves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def as_it_is(batch: T) -> T:
    return batch
