"""Streamed images: what stands where depends on the seeds alone, and nothing that breaks makes it hang."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import growprune as gp
from growprune import feeds, jobs, models, run, streaming
from growprune.config import Prune, Train
from growprune.data import Folder, load
from growprune.distributed import World
from growprune.errors import GrowpruneError
from growprune.feeds import Images
from growprune.reading import picture
from growprune.run import read_notes
from growprune.streaming import Streamed
from growprune.train import Job
from growprune.workers import Worker
from pictures import SIZE, some, write
from runs import COMMAND, newest, until

Batches = list[tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("images")
    write(found)
    return found


@pytest.fixture
def made() -> Iterator[Any]:
    """Streamed, closed in the end."""
    open_ones: list[Streamed] = []

    def make(root: Path, batch: int = 4, workers: int = 0, **options: Any) -> Streamed:
        dataset = load(str(root), stream=True)
        open_ones.append(Streamed(dataset, options.pop("device", "cpu"), batch, workers, SIZE, **options))
        return open_ones[-1]

    yield make
    for streamed in open_ones:
        streamed.close()


def same(a: Batches, b: Batches) -> bool:
    pairs = list(zip(a, b, strict=True))
    return bool(pairs) and all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in pairs)


def process_of(streamed: Streamed) -> int:
    [worker] = streamed._workers._all
    return int(worker._process.pid or 0)


def ended(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_an_epoch_has_each_image_once_at_most(root: Path, made: Any) -> None:
    streamed = made(root)
    assert streamed.steps == 27 // 4
    epoch = list(streamed.epoch(0, 0, 0))
    assert [tuple(x.shape) for x, _ in epoch] == [(4, 3, SIZE, SIZE)] * 6
    assert all(x.dtype == torch.uint8 and x.is_contiguous(memory_format=torch.channels_last) for x, _ in epoch)
    labels = torch.cat([y for _, y in epoch])
    assert labels.dtype == torch.int64
    assert labels.bincount(minlength=3).max() <= 9
    assert len(torch.cat([x for x, _ in epoch]).flatten(1).unique(dim=0)) == 24


def test_chance_is_that_of_its_arguments(root: Path, made: Any) -> None:
    streamed = made(root)
    before = torch.get_rng_state()
    first = list(streamed.epoch(1, 2, 3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert same(list(streamed.epoch(1, 2, 3)), first)
    for other in ((0, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not same(list(streamed.epoch(*other)), first)


def test_workers_ranks_and_entry_change_nothing(root: Path, made: Any) -> None:
    alone, helped = made(root), made(root, workers=2)
    whole = list(alone.epoch(0, 1, 2))
    before = torch.get_rng_state()
    assert same(list(helped.epoch(0, 1, 2)), whole)
    assert torch.equal(torch.get_rng_state(), before)
    for streamed in (alone, helped):
        for start in (0, 2, 5):
            assert same(list(streamed.epoch(0, 1, 2, start=start)), whole[start:])
        assert not list(streamed.epoch(0, 1, 2, start=6))
        left = next(streamed.epoch(0, 1, 2))  # and the rest of it is never asked for
        assert same([left], whole[:1])
        ranks = [list(streamed.epoch(0, 1, 2, rank=rank, world=2)) for rank in range(2)]
        assert all(len(y) == 2 for rank in ranks for _, y in rank)
        together = [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in zip(ranks[0], ranks[1], strict=True)]
        assert same(together, whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_follow_each_other_from_any_step_on(root: Path, made: Any, workers: int) -> None:
    """Those of `epoch`, in its order, wherever they are entered; for each rank too."""
    streamed = made(root, workers=workers)
    for rank, world in ((0, 1), (1, 2)):
        whole = [batch for epoch in range(3) for batch in streamed.epoch(0, 1, epoch, rank=rank, world=world)]
        for step in (0, 4, 5, 6, 7, 12):
            found = list(itertools.islice(streamed.epochs(0, 1, step, rank, world), 18 - step))
            assert same(found, whole[step:])


def test_the_next_epoch_is_read_while_this_one_is_used(root: Path, made: Any) -> None:
    """The last batch but one of an epoch is handed out: its last and the next one's first are under way."""
    streamed = made(root, workers=1)
    epochs = streamed.epochs(0, 0, step=4)
    next(epochs)
    [worker] = streamed._workers._all
    last, first = worker._asked.values()
    assert [last] == list(streamed._order(0, 0, 0, range(4), range(5, 6)))
    assert [first] == list(streamed._order(0, 0, 1, range(4), range(1)))


def test_no_more_is_read_than_asked_for(root: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed, asked = made(root, workers=1), []
    ask = Worker.ask
    monkeypatch.setattr(Worker, "ask", lambda worker, what: asked.append(what) or ask(worker, what))
    assert same(list(streamed.epoch(0, 0, 0, stop=2)), list(made(root).epoch(0, 0, 0))[:2])
    assert len(asked) == 2
    assert len(list(streamed.epoch(0, 0, 0, start=4, stop=100))) == 2


def test_batches_of_another_size_come_from_the_same_workers(root: Path, made: Any) -> None:
    streamed = made(root, workers=1)
    other = streamed.sized(5)
    assert (other.batch, other.steps, streamed.batch, streamed.steps) == (5, 5, 4, 6)
    assert same(list(other.epoch(0, 0, 0)), list(made(root, batch=5).epoch(0, 0, 0)))
    assert same(list(streamed.epoch(0, 0, 0)), list(made(root).epoch(0, 0, 0)))
    assert process_of(other) == process_of(streamed)
    with pytest.raises(GrowpruneError, match="no batch of 28 from 27 images"):
        streamed.sized(28)


def test_passes_do_not_disturb_each_other(root: Path, made: Any) -> None:
    streamed = made(root, workers=2)
    whole = list(streamed.epoch(0, 0, 0))
    epoch = streamed.epoch(0, 0, 0)
    begun = [next(epoch), next(epoch)]
    assert sum(len(y) for _, y in streamed.test()) == 15
    assert same([*begun, *epoch], whole)
    both = list(zip(streamed.epoch(0, 0, 0), streamed.epoch(0, 0, 1), strict=True))
    assert same([first for first, _ in both], whole)
    next(streamed.epoch(0, 0, 2))  # given up
    assert same([second for _, second in both], list(streamed.epoch(0, 0, 1)))
    assert not any(worker._answers or worker._asked for worker in streamed._workers._all)


def test_the_test_view_is_the_middle_in_order(root: Path, made: Any) -> None:
    from torchvision.transforms import v2

    streamed = made(root)
    test = list(streamed.test(size=4))
    assert [len(y) for _, y in test] == [4, 4, 4, 3]
    assert torch.cat([y for _, y in test]).tolist() == [0] * 5 + [1] * 5 + [2] * 5
    view = v2.Compose([v2.Resize(18, antialias=True), v2.CenterCrop(SIZE)])
    folder = load(str(root)).test
    assert isinstance(folder, Folder)
    for image, file in zip(torch.cat([x for x, _ in test]), folder.files, strict=True):
        by_pil = view(torch.from_numpy(picture(file)).permute(2, 0, 1))
        assert (image.int() - by_pil.int()).abs().max() <= 3  # two JPEG decoders may round differently
    shared = [list(streamed.test(size=2, rank=rank, world=2)) for rank in range(2)]
    assert [sum(len(y) for _, y in rank) for rank in shared] == [8, 7]
    assert torch.equal(shared[1][0][0][0], test[0][0][1])
    assert not list(streamed.test(rank=15, world=16))


def test_training_sees_random_parts_and_mirror_images(tmp_path: Path, made: Any) -> None:
    """A picture whose red rises to the right and green downwards shows what was cut out of it, and whether mirrored."""
    ramp = np.zeros((100, 100, 3), np.uint8)
    ramp[:, :, 0], ramp[:, :, 1] = np.arange(100) * 2, np.arange(100)[:, None] * 2
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(100):
                Image.fromarray(ramp).save(tmp_path / split / name / f"{i}.png")
    images = torch.cat([x for x, _ in made(tmp_path, batch=50).epoch(0, 0, 0)]).float()
    across = images[:, 0, 8, -1] - images[:, 0, 8, 0]
    down = images[:, 1, -1, 8] - images[:, 1, 0, 8]
    assert 70 < int((across < 0).sum()) < 130
    assert (down > 0).all()
    area = across.abs() * down / 200**2
    assert area.min() < 0.2
    assert area.max() > 0.6
    assert 0.35 < area.mean() < 0.6


def test_without_augmentation_training_sees_what_is_tested(root: Path, tmp_path: Path) -> None:
    """In another order, that is all."""
    for split in ("train", "test"):
        (tmp_path / split).symlink_to(root / "train")
    images = Images(Train(data=str(tmp_path), batch=27, workers=0, resolution=SIZE, augment=False), "cpu", World())
    [(trained, labels)], [(tested, expected)] = images.sample(27), images.tested(27)
    order, plain = (x.flatten(1).sum(1).argsort() for x in (trained, tested))
    assert torch.equal(trained[order], tested[plain])
    assert torch.equal(labels[order], expected[plain])
    assert not torch.equal(trained, tested)


def test_every_kind_of_file(tmp_path: Path, made: Any) -> None:
    write(tmp_path, each=5, ext="png")
    base = some(20, 20, 1)
    kinds = {
        "grey.png": base.convert("L"),
        "alpha.png": base.convert("RGBA"),
        "palette.png": base.quantize(8),
        "deep.png": Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20) * 160),
        "a.bmp": base,
        "a.webp": base,
        "cmyk.jpg": base.convert("CMYK"),
    }
    for name, image in kinds.items():
        image.save(tmp_path / "train" / "ant" / name)
        data = torch.frombuffer(bytearray((tmp_path / "train" / "ant" / name).read_bytes()), dtype=torch.uint8)
        found = streaming.decoded_here(name, data)
        expected = torch.from_numpy(picture(str(tmp_path / "train" / "ant" / name))).permute(2, 0, 1)
        assert found.dtype == torch.uint8
        assert (found.int() - expected.int()).abs().max() <= (8 if name == "cmyk.jpg" else 1), name
    assert len(list(made(tmp_path, batch=22).epoch(0, 0, 0))) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named(tmp_path: Path, made: Any, workers: int) -> None:
    write(tmp_path, each=5)
    streamed = made(tmp_path, batch=3, workers=workers)
    broken = tmp_path / "train" / "bee" / "3.jpg"
    whole = broken.read_bytes()
    for blob, said in (
        (whole[: len(whole) // 2], "broken"),
        (b"", "broken"),
        (b"no image", "broken"),
        (None, "No such"),
    ):
        if blob is None:
            broken.unlink()
        else:
            broken.write_bytes(blob)
        with pytest.raises(GrowpruneError) as caught:
            list(streamed.epoch(0, 0, 0))
        assert str(caught.value).startswith(f"{broken}: {said}")
        assert "\n" not in str(caught.value)
    broken.write_bytes(whole)
    assert len(list(streamed.epoch(0, 0, 0))) == 5


@pytest.mark.parametrize("there", [False, True], ids=["cpu", "gpu"])
def test_an_image_of_too_many_pixels_is_refused_whatever_decodes(
    root: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """By its head: torchvision and nvJPEG would unfold it."""
    samples = streaming.samples(load(str(root), stream=True).train, torch.arange(1), [None])
    with Image.open(samples[0].file) as image:
        pixels = image.width * image.height
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels // 2 - 1)
    with pytest.raises(GrowpruneError) as caught:
        streaming.Reader(None if there else streaming.View(SIZE, flip=False))(samples, lambda place: None)
    assert str(caught.value).startswith(f"{samples[0].file}: too large: Image size ({pixels} pixels) exceeds limit of ")


@pytest.mark.parametrize("wait", [0, 0.001, 0.01, 0.3])
def test_a_worker_that_dies_is_noticed(root: Path, made: Any, wait: float) -> None:
    """In the midst of its work, or at rest, with batches that it had still to hand over."""
    streamed = made(root, batch=1, workers=1)
    epoch = streamed.epoch(0, 0, 0)
    next(epoch)
    time.sleep(wait)
    os.kill(process_of(streamed), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(GrowpruneError) as caught:
        list(epoch)
    assert time.monotonic() - began < 20
    said = str(caught.value)
    assert said.startswith("a loader process died")
    assert said.endswith("Try fewer workers (--workers)")
    assert "\n" not in said
    if " while it read " in said:
        assert Path(said.split("read ")[1].split(": ")[0]).is_file()
    assert len(list(streamed.epoch(0, 0, 0))) == 27  # new workers


def test_a_worker_that_cannot_be_started_is_told(root: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the server that starts them is killed: not as the end of what is typed, for which EOFError is taken."""

    start, started = multiprocessing.process.BaseProcess.start, []

    def dead(process: Any) -> None:
        if started:
            raise EOFError
        started.append(start(process))

    streamed = made(root, batch=1, workers=2)
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.process.BaseProcess, "start", dead)
        with pytest.raises(GrowpruneError, match=r"^no loader process could be started \(.*Try fewer workers"):
            next(streamed.epoch(0, 0, 0))
    assert len(list(streamed.epoch(0, 0, 0))) == 27


def test_the_file_that_a_worker_died_over_is_named(tmp_path: Path, made: Any) -> None:
    """One that takes for ever: a pipe that nobody writes to."""
    write(tmp_path, each=5)
    streamed = made(tmp_path, batch=15, workers=1)
    slow = tmp_path / "train" / "cat" / "2.jpg"
    slow.unlink()
    os.mkfifo(slow)

    def kill() -> None:
        while True:
            try:
                held = os.open(slow, os.O_WRONLY | os.O_NONBLOCK)  # works as soon as somebody reads
            except OSError:
                time.sleep(0.05)
                continue
            os.kill(process_of(streamed), signal.SIGKILL)
            os.close(held)
            return

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(GrowpruneError) as caught:
        next(streamed.epoch(0, 0, 0))
    killer.join()
    assert str(caught.value).startswith(f"a loader process died while it read {slow}: ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_are_left_to_the_main_process(root: Path, made: Any, number: int) -> None:
    streamed = made(root, batch=1, workers=1)
    epoch = streamed.epoch(0, 0, 0)
    next(epoch)
    os.kill(process_of(streamed), number)
    assert len(list(epoch)) == 26


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_whole_group_stops_a_run_saved(root: Path, tmp_path: Path, number: int) -> None:
    """As a terminal or `timeout` sends it: whatever reads for the run, and the server that forks it, get it too."""
    run = tmp_path / "run"
    command = [*COMMAND, "train", "--model", "pictures:tiny", "--data", root, "--resolution", SIZE, "--batch", 9,
               "--workers", 2, "--epochs", 100_000, "--save-every", 1000, "--device", "cpu", "--threads", 1,
               "--out", run]  # fmt: skip
    with subprocess.Popen(
        list(map(str, command)), cwd=Path(__file__).parent, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # whatever started the tests may have it ignored
    ) as process:  # fmt: skip
        assert until(lambda: len(read_notes(run)) > 2, lambda: process.poll() is None)
        os.killpg(process.pid, number)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number, said
    assert "failed" not in said
    assert f"all saved; go on with: growprune resume {run}\n" in said
    assert newest(run).name > "step-000000000"


def test_who_starts_workers_is_deaf_from_the_first(root: Path) -> None:
    """Torch takes seconds to load there: a signal that comes meanwhile must not end it. The main process loses none."""
    code = f"""
if __name__ == "__main__":
    import os, signal
    from growprune.data import load
    from growprune.streaming import Streamed
    from growprune.workers import HEEDED, Worker
    heard = set()
    for number in HEEDED:
        signal.signal(number, lambda number, frame: heard.add(number))
    streamed = Streamed(load({str(root)!r}, stream=True), "cpu", 1, 1, 16)
    worker = Worker(streamed._workers._reader)
    for number in HEEDED:
        os.killpg(0, number)
    print(len(list(streamed.epoch(0, 0, 0))), heard == set(HEEDED), worker._process.is_alive())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, start_new_session=True
    )
    assert done.stdout.split() == ["27", "True", "True"], done
    assert done.returncode == 0
    assert not done.stderr


def test_workers_end_with_the_loader(root: Path, made: Any) -> None:
    streamed = made(root, workers=1)
    next(streamed.epoch(0, 0, 0))
    pid = process_of(streamed)
    os.kill(pid, 0)  # it is there
    process = streamed._workers._all[0]._process
    streamed.close()
    assert process.exitcode == 0
    assert ended(pid)


def reading(root: Path) -> str:
    """A program that has begun to read and tells its workers' numbers."""
    return f"""
if __name__ == "__main__":
    from growprune.data import load
    from growprune.streaming import Streamed
    streamed = Streamed(load({str(root)!r}, stream=True), "cpu", 1, 2, 16)
    next(streamed.epoch(0, 0, 0))
    print(*[worker._process.pid for worker in streamed._workers._all], flush=True)
"""


def test_workers_end_with_the_process(root: Path) -> None:
    """Killed at once, it cannot tell them to."""
    code = reading(root) + "    input()\n"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2
    assert all(map(ended, pids))


def test_a_process_ends_that_has_not_closed_them(root: Path) -> None:
    """They do not heed the signal by which multiprocessing would end them."""
    code = reading(root)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert not done.stderr
    assert all(ended(int(pid)) for pid in done.stdout.split())


def test_a_gpu_that_is_not_there_is_refused(root: Path, made: Any) -> None:
    with pytest.raises(
        GrowpruneError, match=r"--decode gpu: JPEGs cannot be decoded there \(the device is cpu\); give"
    ):
        made(root, decode="gpu")
    assert streaming.undecodable("cpu") == "the device is cpu"
    assert "\n" not in streaming.undecodable("cuda")  # whether there is one or not


def test_its_speed_is_measured(root: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers are done at almost the same time, every 0.8 s: whole rounds are counted, wherever the time is up."""
    streamed, clock = made(root, batch=9), [0.0]
    assert streamed.images_per_second(0.1) > 0

    def batches(_: object) -> Iterator[None]:
        each = max(1, streamed.workers)
        for number in itertools.count():
            round_ = 0.2 * each - 0.01 * (each - 1)
            clock[0] += 3.0 if number < each else round_ if number % each == 0 else 0.01
            yield None

    monkeypatch.setattr(streamed, "_ahead", batches)
    monkeypatch.setattr(streamed, "_now", lambda: clock[0])
    for workers in (0, 4):
        streamed.workers, before = workers, clock[0]
        assert streamed.images_per_second(5.615) == pytest.approx(9 / 0.2)
        assert clock[0] - before - 3 * max(1, workers) < 7.3


def test_who_reads_for_a_run_ends_with_it(root: Path, tmp_path: Path) -> None:
    """Without the help of the garbage collector, which may come late: a caught exception can hold a job for long."""
    gp.save(models.create("resnet20", 3), tmp_path / "net.safetensors")
    config = Prune(
        model="resnet20", data=str(root), weights=str(tmp_path / "net.safetensors"), schedule="oneshot", epochs=1,
        batch=4, prune_batch=4, workers=1, resolution=SIZE, device="cpu", threads=1,
    )  # fmt: skip
    before = set(multiprocessing.active_children())
    gc.disable()
    try:
        jobs.run(config, tmp_path / "run", quiet=True)
        assert set(multiprocessing.active_children()) <= before
    finally:
        gc.enable()


def test_what_cannot_be_streamed_is_refused(root: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GrowpruneError, match="no batch of 28 from 27 images"):
        made(root, batch=28)
    with pytest.raises(GrowpruneError, match="workers: -1"):
        made(root, workers=-1)
    with pytest.raises(GrowpruneError, match="in memory"):
        Streamed(load("digits"), "cpu", 4)
    with pytest.raises(GrowpruneError, match="batch of 4 cannot be shared evenly by 3"):
        made(root).epoch(0, 0, 0, world=3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert streaming.default_workers() == 1


# -- what decodes ----------------------------------------------------------------------------------------------------


class Told:
    """A source that is as fast as it is told to be; what was asked of it is written down."""

    paces: ClassVar[dict[str, float]] = {"cpu": 3000.4, "gpu": 5000.0}
    begun: ClassVar[list[Any]] = []

    def __init__(self, *given: Any) -> None:
        self.decode = given[-1]
        self.begun.append(given[1:])

    def images_per_second(self, seconds: float) -> float:
        return self.paces[self.decode]

    def close(self) -> None:
        self.begun.append("closed")


def images(root: Path, monkeypatch: pytest.MonkeyPatch, device: str = "cuda", **more: Any) -> Images:
    """As on a GPU, or what is taken for one."""
    asked = Train(data=str(root), batch=4, workers=3, resolution=SIZE, keep="files", **more)
    found = Images(asked, "cpu", World())
    monkeypatch.setattr(found, "device", device)
    monkeypatch.setattr(feeds, "Streamed", Told)
    monkeypatch.setattr(feeds, "undecodable", lambda _: "")
    Told.begun.clear()
    return found


@pytest.mark.parametrize("faster", ["cpu", "gpu"])
def test_the_faster_decoder_is_chosen_and_kept(root: Path, monkeypatch: pytest.MonkeyPatch, faster: str) -> None:
    """The GPU must be faster by a quarter: beside a step it loses that much."""
    monkeypatch.setattr(Told, "paces", {"cpu": 3000.4, "gpu": 5000.0 if faster == "gpu" else 3700.0})
    found, said, choices = images(root, monkeypatch), [], {}
    found.decide(choices, said.append)
    assert choices == {"images": {"decode": faster, **Told.paces}}
    [line] = said
    assert line.startswith(f"JPEGs are decoded on the {faster.upper()}: 3,000 images a second on the CPU, ")
    assert Told.begun == [("cuda", 4, 3, SIZE, "cpu"), "closed", ("cuda", 4, 3, SIZE, "gpu"), "closed"]
    assert found.decode == faster
    monkeypatch.setattr(Told, "paces", {})  # from now on nothing can be measured
    again = images(root, monkeypatch)
    again.decide(choices, said.append)
    assert again.decode == faster
    assert (Told.begun, len(said)) == ([], 1)


@pytest.mark.parametrize(
    ("device", "more", "decode"),
    [
        ("cpu", {}, "cpu"),
        ("cuda", {"deterministic": True}, "cpu"),
        ("cuda", {"decode": "cpu"}, "cpu"),
        ("cuda", {"decode": "gpu"}, "gpu"),
    ],
)
def test_nothing_is_measured_where_nothing_is_open(
    root: Path, monkeypatch: pytest.MonkeyPatch, device: str, more: dict[str, Any], decode: str
) -> None:
    asked = more.pop("decode", "auto")
    found = images(root, monkeypatch, device, **more)
    if asked != "auto":  # it takes a CUDA device to make the images so
        found.config, found.decode = replace(found.config, decode=asked), asked
    choices: dict[str, Any] = {}
    found.decide(choices, pytest.fail)
    assert (found.decode, choices, Told.begun) == (decode, {}, [])


def test_a_gpu_that_cannot_decode_is_said_and_remembered(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, said, choices = images(root, monkeypatch), [], {}
    monkeypatch.setattr(feeds, "undecodable", lambda _: "no nvJPEG")
    found.decide(choices, said.append)
    assert said == ["JPEGs are decoded on the CPU, as they cannot be on the GPU (no nvJPEG)"]
    assert (choices, found.decode, Told.begun) == ({"images": {"decode": "cpu"}}, "cpu", [])


def test_a_resumed_run_keeps_its_decoder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured once comes back with the checkpoint, as the step's own choices do."""
    measured = itertools.count(1)

    def tried(images: Images, choices: dict[str, Any], say: Any) -> None:
        if "images" not in choices:
            choices["images"] = {"decode": "cpu", "cpu": float(next(measured))}

    monkeypatch.setattr(Images, "decide", tried)
    config = Train(model="pictures:tiny", data=str(root), epochs=3, batch=9, save_every=0.0, workers=0, resolution=SIZE)
    for steps in (2, 3):  # the second of each two is not saved
        folder = run.Folder.claim(tmp_path / "run", config)
        job = Job(config, folder, "cpu")
        for _ in itertools.islice(job.work(), 2):
            pass
        folder.close()
        assert job.choices["images"] == {"decode": "cpu", "cpu": 1.0}
        assert job.done == steps
    assert next(measured) == 2


def test_gpu_without_a_gpu_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(GrowpruneError, match=r"^--decode gpu: needs a CUDA device; give cpu or auto$"):
        Images(Train(data=str(tmp_path / "nowhere"), decode="gpu"), "cpu", World())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_decoder_is_chosen_on_a_gpu(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "TRIAL", 0.2)
    asked = Train(data=str(root), batch=4, workers=1, resolution=SIZE, keep="files")
    found, said, choices = Images(asked, "cuda", World()), [], {}
    found.decide(choices, said.append)
    assert len(said) == 1
    chosen = choices["images"]
    assert found.decode == chosen["decode"]
    better = "gpu" in chosen and chosen["gpu"] > feeds.BETTER * chosen["cpu"]
    assert chosen["decode"] == ("gpu" if better else "cpu")
    x, y = next(found.sample(4, count=1))
    assert x.device.type == y.device.type == "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("decode", ["cpu", "gpu"])
def test_on_a_gpu(tmp_path: Path, made: Any, decode: str) -> None:
    """The GPU's decoder gives the CPU's pixels but for rounding, if pictures keep the colour of every pixel. JPEGs
    mostly keep one for four; each decoder fills in the others in its own way, and in pictures so small it shows."""
    write(tmp_path, subsampling=0, quality=95)
    if decode == "gpu" and (why := streaming.undecodable("cuda")):
        pytest.skip(why)
    here = list(made(tmp_path).epoch(0, 0, 0))
    there = made(tmp_path, workers=2, device="cuda", decode=decode)
    for _ in range(2):
        batches = []
        for x, y in there.epoch(0, 0, 0):
            torch.cuda._sleep(1_000_000)  # the next copy must not overwrite what is still being read
            batches.append((x.cpu(), y.cpu()))
        for (x, y), (u, v) in zip(batches, here, strict=True):
            assert torch.equal(y, v)
            assert (x.int() - u.int()).abs().float().mean() <= (0 if decode == "cpu" else 2)
    assert there.images_per_second(0.3) > 0


# -- the same images when a run goes on --------------------------------------------------------------------------------


def test_a_run_does_not_go_on_with_other_images(tmp_path: Path) -> None:
    """As many, of the same classes, are not enough; but one that was broken may have been replaced. Of runs that are
    older nothing is known."""
    write(tmp_path / "set")
    config, said = Train(model="resnet20", data=str(tmp_path / "set"), resolution=SIZE, device="cpu"), list[str]()

    def images() -> Images:
        return Images(config, "cpu", World())

    before = images().known()
    images().recognized(before, said.append)
    assert not said
    file, *_, other = sorted((tmp_path / "set" / "train").rglob("*.jpg"))
    file.write_bytes(other.read_bytes() + b" ")
    images().recognized(before, said.append)
    [line] = said
    assert line == f"{tmp_path / 'set'}: files there have other sizes than when this run began; it goes on with these"
    for name in ("zz.jpg", f"0{file.name}"):
        file = file.rename(file.with_name(name))
        with pytest.raises(GrowpruneError, match="not the images that this run began with: files of other names; put"):
            images().recognized(before, said.append)
    os.rename(tmp_path / "set", tmp_path / "moved")
    config = replace(config, data=str(tmp_path / "moved"))
    with pytest.raises(GrowpruneError, match="files of other names"):
        images().recognized(before, said.append)
    images().recognized({k: v for k, v in before.items() if k not in ("names", "sizes")}, said.append)
    assert len(said) == 1
