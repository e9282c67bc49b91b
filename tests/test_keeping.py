"""Large images on the device: what is tested is what streaming tests, crops are torchvision's, a run keeps to it."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from growprune import cli, jobs, keeping, run, several
from growprune.config import Train
from growprune.data import Dataset, load
from growprune.distributed import World
from growprune.errors import GrowpruneError
from growprune.feeds import FromMemory, Images
from growprune.keeping import Copy, Kept
from growprune.paper import reproduce
from growprune.reading import Part
from growprune.streaming import Streamed, decoded_here
from growprune.train import Job
from pictures import SIZE, some, write

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch looks for it once, at the first matrix product

KEEP = ("device", "files")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("images")
    write(found)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Of a test's images, for the next one."""
    yield
    gc.collect()
    assert not keeping._here


def asked(root: Path, **more: Any) -> Train:
    return Train(**{"data": str(root), "batch": 4, "workers": 0, "resolution": SIZE, "keep": "device", **more})


def images(root: Path, device: str = "cpu", **more: Any) -> Images:
    """Read, and where they are to be."""
    found = Images(asked(root, **more), device, World())
    found.decide({}, lambda _: None)
    return found


def kept(x: Tensor, resolution: int, device: str = "cpu", **how: Any) -> Kept:
    """Of these squares (N x S x S x 3)."""
    part = Part(x, torch.arange(len(x)))
    usual: dict[str, Any] = {"pad": 0, "flip": True, "crop": True}
    dataset = Dataset("some", part, part, ("a",), (0.5,) * 3, (0.2,) * 3, **{**usual, **how})
    return Kept(dataset, Copy(part.to(device), part.to(device)), 2, resolution)


def noise(count: int, side: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8))


def file_of(path: Path) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resolution", [8, 16, 21, 28])  # 256/224 of them: 9, 18, 24, 32
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_tested_is_what_streaming_tests(root: Path, resolution: int, workers: int) -> None:
    """Bit for bit, in the same order and the same batches."""
    both = [list(images(root, keep=keep, resolution=resolution, workers=workers).tested(4)) for keep in KEEP]
    assert [len(y) for _, y in both[0]] == [4, 4, 4, 3]
    for (x, y), (u, v) in zip(*both, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)


def test_the_square_is_around_what_is_tested(root: Path) -> None:
    from torchvision.transforms import v2

    found = images(root)
    dataset = load(str(root))
    square = v2.Compose([v2.Resize(18, antialias=True), v2.CenterCrop(18)])
    assert found._copy is not None
    assert found._copy.train.x.shape == (27, 18, 18, 3)
    for file, here in zip(dataset.train.files, found._copy.train.x, strict=True):  # type: ignore[union-attr]
        assert torch.equal(square(decoded_here(file, file_of(Path(file)))).permute(1, 2, 0), here)
    assert torch.equal(found._copy.train.y, dataset.train.y)


def test_every_kind_of_file_is_read_as_streaming_reads_it(tmp_path: Path) -> None:
    """Grey, palette, CMYK, transparent, 16 bits; and one that says it lies on its side, which nobody heeds."""
    write(tmp_path, each=5)
    base, exif = some(40, 30, 1), Image.Exif()
    exif[0x0112] = 6
    for name, image, how in (
        ("grey.png", base.convert("L"), {}),
        ("palette.png", base.quantize(8), {}),
        ("alpha.png", base.convert("RGBA"), {}),
        ("deep.png", Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(40, 30) * 50), {}),
        ("grey.jpg", base.convert("L"), {}),
        ("cmyk.jpg", base.convert("CMYK"), {}),
        ("turned.jpg", base, {"exif": exif}),
        ("a.webp", base, {}),
    ):
        for split in ("train", "test"):
            image.save(tmp_path / split / "ant" / name, **how)
    found, streamed = (images(tmp_path, keep=keep, augment=False) for keep in KEEP)
    assert found.sizes == {"train": 23, "test": 11}
    for mine, theirs in ((found.tested(9), streamed.tested(9)), (found.sample(23), streamed.sample(23))):
        for (x, y), (u, v) in zip(mine, theirs, strict=True):
            assert torch.equal(x, u)
            assert torch.equal(y, v)
    turned = decoded_here("turned", file_of(tmp_path / "test" / "ant" / "turned.jpg"))
    assert turned.shape == (3, 40, 30)


def test_without_augmentation_batches_are_those_of_streaming(root: Path) -> None:
    """The middle of each, in the same order."""
    mine, theirs = (images(root, keep=keep, augment=False).feed(4, 1) for keep in KEEP)
    for step in (0, 3, 7):
        for feed in (mine, theirs):
            feed.prepare(step)
        for a, b in zip(mine(torch.tensor([step])), theirs(torch.tensor([step])), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_broken_image_is_refused_by_name_before_anything_is_trained(
    tmp_path: Path, workers: int, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("growprune.data.SAMPLED", 1)  # or its mean finds it already
    write(tmp_path / "images", each=6)
    broken = tmp_path / "images" / split / "bee" / "1.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    config = asked(tmp_path / "images", model="pictures:tiny", workers=workers, device="cpu")
    with pytest.raises(GrowpruneError) as caught:
        jobs.run(config, tmp_path / "run", quiet=True)
    assert str(caught.value) == f"{broken}: broken, or not an image; replace it (or remove it, before a run begins)"
    assert not (tmp_path / "run").exists()


def test_reading_is_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    Images(asked(root), "cpu", World()).decide({}, said.append)
    assert said == ["reading 42 images, to keep them on the device (0.0 GB)", "read in 0 s"]
    monkeypatch.setattr(keeping, "PATIENCE", 0.0)
    Images(asked(root), "cpu", World()).decide({}, said.append)
    assert said[2:] == [said[0], "27 of 42 images read, 0 s to go", said[1]]
    assert keeping.needed(load(str(root)), 224) == 3 * (27 * 256**2 + 15 * 224**2)
    assert keeping.needed(replace(load(str(root)), crop=False), 224) == 3 * 42 * 224**2


# -- a crop ------------------------------------------------------------------------------------------------------------


def test_a_crop_by_hand() -> None:
    """A square of 4 whose red is 40·row + 10·column: a part as it is, mirrored, made larger, and smaller."""
    x = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    x[1, :, :, 0] = 40 * torch.arange(4).view(-1, 1) + 10 * torch.arange(4)
    rows = [[1, 1, 2, 2, 2, 0], [1, 1, 2, 2, 2, 1], [1, 0, 0, 4, 4, 0]]
    images, labels = kept(x, 2).batch_of(torch.tensor(rows, dtype=torch.int32))
    assert (images.dtype, labels.tolist()) == (torch.uint8, [1, 1, 1])
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images[:, 0].tolist() == [[[60, 70], [100, 110]], [[70, 60], [110, 100]], [[25, 45], [105, 125]]]
    assert not images[:, 1:].any()
    larger, _ = kept(x, 4).batch_of(torch.tensor([[1, 1, 1, 2, 1, 0]], dtype=torch.int32))
    assert larger[0, 0].tolist() == [[50] * 4, [60] * 4, [80] * 4, [90] * 4]  # nothing of what lies beside the part


def test_crops_are_what_interpolate_makes_of_them() -> None:
    """One by one, by PyTorch's own; rounding to bytes may go either way where it is a close thing."""
    x, resolution = noise(5, 32), 28
    source = kept(x, resolution)
    rows = torch.cat([source.plan(0, 0, epoch).view(-1, 6) for epoch in range(20)])
    found, labels = source.batch_of(rows)
    assert torch.equal(labels, rows[:, 0].long())
    apart = []
    for image, (index, top, left, height, width, flip) in zip(found, rows.tolist(), strict=True):
        part = x[index, top : top + height, left : left + width].permute(2, 0, 1).float().unsqueeze(0)
        made = F.interpolate(part, (resolution, resolution), mode="bilinear", align_corners=False)[0]
        apart.append((image - (made.flip(2) if flip else made)).abs())
    assert torch.stack(apart).max() < 0.501
    assert rows[:, 5].unique().tolist() == [0, 1]


def test_crops_are_torchvisions() -> None:
    """Height, width and place against RandomResizedCrop's, by the greatest distance of their distributions (Kolmogorov
    and Smirnov's; one pair in a thousand that is the same is further apart than 1.95)."""
    from torchvision.transforms import RandomResizedCrop

    count, side = 20_000, 256
    torch.manual_seed(0)
    square = torch.empty(3, side, side)
    theirs = torch.tensor([RandomResizedCrop.get_params(square, [0.08, 1], [3 / 4, 4 / 3]) for _ in range(count)])
    mine = torch.stack(keeping.crops(7, count, side), 1)
    for name, a, b in zip(("top", "left", "height", "width"), mine.T, theirs.T, strict=True):
        at = torch.arange(side + 1)
        below = [torch.searchsorted(each.sort().values, at, right=True) / count for each in (a, b)]
        assert float((below[0] - below[1]).abs().max()) * math.sqrt(count / 2) < 1.95, name
    for each in (mine, theirs):
        top, left, height, width = each.T
        assert min(int(top.min()), int(left.min())) == 0
        assert int((top + height).max()) == int((left + width).max()) == side
        assert float((height * width).double().mean()) / side**2 == pytest.approx(0.5, abs=0.03)
        assert 0.74 < float((width / height).min()) < float((width / height).max()) < 1.36


def test_what_lies_outside_is_drawn_again_and_after_ten_times_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    first = keeping.crops(1, 5000, 256)
    monkeypatch.setattr(keeping, "TRIES", 1)
    once = keeping.crops(1, 5000, 256)
    whole = (once[2] == 256) & (once[3] == 256)
    assert 0.05 < float(whole.double().mean()) < 0.3
    assert not once[0][whole].any()
    for a, b in zip(first, once, strict=True):
        assert torch.equal(a[~whole], b[~whole])
    assert ((first[2] == 256) & (first[3] == 256)).sum() < 10


def test_a_plan_is_arithmetic() -> None:
    """These numbers are those of a few lines of plain Python with whole numbers and `math`."""
    plan = kept(noise(5, 256), 224).plan(1, 2, 3)
    assert (plan.dtype, plan.shape) == (torch.int32, (2, 2, 6))
    assert plan.view(4, 6).tolist() == GOLDEN
    x = torch.linspace(-keeping.RATIO, keeping.RATIO, 1001, dtype=torch.double)
    assert (keeping.exp(x) / x.exp() - 1).abs().max() < 1e-15
    assert math.log(4 / 3) == pytest.approx(keeping.RATIO, abs=1e-15)


GOLDEN = [[2, 33, 11, 221, 243, 1], [3, 0, 33, 215, 193, 0], [4, 19, 30, 228, 226, 1], [1, 27, 2, 166, 210, 1]]


def test_chance_is_that_of_its_arguments() -> None:
    source = kept(noise(40, 18), SIZE)
    plan, before = source.plan(0, 0, 0), torch.get_rng_state()
    assert torch.equal(plan, source.plan(0, 0, 0))
    for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert not torch.equal(plan, source.plan(*other))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(source.sized(5).plan(0, 0, 0).view(-1, 6), plan.view(-1, 6))
    assert sorted(plan[..., 0].flatten().tolist()) == list(range(40))
    assert not kept(noise(4, 18), SIZE, flip=False).plan(0, 0, 0)[..., 5].any()


# -- in a run ----------------------------------------------------------------------------------------------------------


def test_two_processes_share_a_batch(root: Path) -> None:
    whole = images(root).feed(4, 1)
    shares = [images(root) for _ in range(2)]
    for rank, share in enumerate(shares):
        share.world = World(rank, 2, rank)
    feeds = [share.feed(4, 1) for share in shares]
    for step in (0, 1, 9):
        for feed in (whole, *feeds):
            feed.prepare(step)
        parts = [feed(torch.tensor([step])) for feed in feeds]
        for together, alone in zip(zip(*parts, strict=True), whole(torch.tensor([step])), strict=True):
            assert torch.equal(torch.cat(together), alone)


def test_runs_share_one_copy(root: Path) -> None:
    first, second = images(root), images(root, batch=8)
    assert first.source(4)._squares.data_ptr() == second.source(8)._squares.data_ptr()  # type: ignore[union-attr]
    assert first.test is second.test
    other = images(root, augment=False)
    assert other.source(4)._side == SIZE  # type: ignore[union-attr]
    del first, second
    gc.collect()
    assert len(keeping._here) == 1


def net_of(job: Job) -> list[Tensor]:
    return [t.clone() for t in job.net.state_dict().values()]


def test_a_resumed_run_sees_the_same_batches(root: Path, tmp_path: Path) -> None:
    """Stopped after every other step, of which the first is saved: the weights of one that was not."""
    config = asked(root, model="pictures:wide", epochs=3, batch=9, save_every=0.0, device="cpu")
    whole = Job(config, None, "cpu")
    for _ in whole.work():
        pass
    for steps in range(8):
        folder = run.Folder.claim(tmp_path / "run", config)
        job = Job(config, folder, "cpu")
        for _ in itertools.islice(job.work(), 2):
            pass
        folder.close()
        assert job.choices["images"] == {"keep": "device", "decode": "cpu"}
        assert job.done == steps + 2
    assert isinstance(job.step and job.step.feed, FromMemory)
    assert all(map(torch.equal, net_of(job), net_of(whole)))


def growprune_says(*arguments: object) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        cli.main([str(each) for each in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code, out.getvalue(), err.getvalue()


def test_a_run_by_command(root: Path, tmp_path: Path) -> None:
    """Train, prune with batches of another size, and test: `eval` streams, and finds the accuracy that was found."""
    common = ["--model", "pictures:wide", "--data", root, "--device", "cpu", "--threads", 1, "--keep", "device",
              "--resolution", SIZE, "--epochs", 1, "--workers", 0, "--json"]  # fmt: skip
    assert growprune_says("train", *common, "--batch", 4, "--out", tmp_path / "base")[0] == 0
    code, out, _ = growprune_says(
        "prune", *common, "--weights", tmp_path / "base", "--batch", 5, "--prune-batch", 9, "--delta-lambda", 0.1,
        "--ku", 1, "--ks", 2, "--out", tmp_path / "run",
    )  # fmt: skip
    assert code == 0
    result = json.loads(out)
    assert result["choices"]["images"] == {"keep": "device", "decode": "cpu"}
    code, out, _ = growprune_says("eval", tmp_path / "run", "--workers", 0, "--json")
    assert code == 0
    assert json.loads(out)["accuracy"] == result["accuracy"]["final"]
    assert run.as_tested(tmp_path / "run")["decode"] == "cpu"


# -- where they stay ---------------------------------------------------------------------------------------------------


def test_a_device_without_room_is_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keeping.room("cpu", in_all=True) > keeping.room("cpu") > 0
    monkeypatch.setattr(keeping, "room", lambda *_: 1000)
    code, out, err = growprune_says(
        "train", "--model", "pictures:tiny", "--data", root, "--device", "cpu", "--keep", "device", "--batch", 4,
        "--resolution", SIZE, "--workers", 0, "--out", tmp_path / "run",
    )  # fmt: skip
    assert (code, out) == (2, "")
    room = "the images take 0.0 GB there, 0.0 GB are free: make room, or begin a run with --keep files"
    assert err == f"growprune: --keep device: {room}\n"


def placed(root: Path, monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any], **more: Any) -> tuple[Images, Any]:
    """What becomes of them on what is taken for a GPU; and what was said."""
    said: list[str] = []
    found = Images(asked(root, **{"keep": "auto", **more}), "cpu", World())
    copy = Copy(*[Part(torch.zeros(15, SIZE, SIZE, 3, dtype=torch.uint8), torch.zeros(15))] * 2)
    monkeypatch.setattr(keeping, "bring", lambda *_: copy)
    monkeypatch.setattr(found, "device", "cuda")
    monkeypatch.setattr(found, "tried", lambda _: {"decode": "gpu", "cpu": 1.0, "gpu": 2.0})
    found.decide(choices, said.append)
    return found, said


NEED = 3 * (27 * 18**2 + 15 * 16**2)


@pytest.mark.parametrize(("free", "total", "more", "where"), [
    (2 * NEED, 9 * NEED, {}, "device"),
    (2 * NEED - 1, 9 * NEED, {}, "files"),
    (0, 2 * NEED, {"deterministic": True}, "device"),
    (2 * NEED, 2 * NEED - 1, {"deterministic": True}, "files"),
    (2 * NEED, 2 * NEED, {"keep": "files"}, "files"),
    (0, 0, {"keep": "device"}, "device"),
])  # fmt: skip
def test_half_of_a_gpu_is_for_images(
    root: Path, monkeypatch: pytest.MonkeyPatch, free: int, total: int, more: dict[str, Any], where: str
) -> None:
    monkeypatch.setattr(keeping, "room", lambda device, in_all=False: total if in_all else free)
    choices: dict[str, Any] = {}
    found, said = placed(root, monkeypatch, choices, **more)
    assert (found._copy is not None) == (found.test is not None) == (where == "device")
    if where == "device":
        assert (choices, said) == ({"images": {"keep": "device", "decode": "cpu"}}, [])
    elif "keep" not in more:
        assert choices["images"]["keep"] == "files"
        assert said == ["images are streamed: the device has 0.0 GB, they would take 0.0 GB of it"]


def test_what_was_chosen_is_kept_to(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever room there is when a run is taken up again; one older than the choice streams, as it did."""
    for room, where in ((9 * NEED, "device"), (NEED, "files")):
        choices: dict[str, Any] = {}
        monkeypatch.setattr(keeping, "room", lambda *_, room=room: room)
        placed(root, monkeypatch, choices)
        monkeypatch.setattr(keeping, "room", lambda *_: pytest.fail("it is decided"))
        again, said = placed(root, monkeypatch, dict(choices))
        assert (again._copy is not None, said) == (where == "device", [])
    for older in ({"train": {}, "images": {"decode": "gpu"}}, {"train": {}}):
        found, said = placed(root, monkeypatch, older)
        assert (found._copy, found.decode, said) == (None, "gpu", [])


def test_images_that_are_there_fit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "room", lambda *_: NEED)
    monkeypatch.setattr(keeping, "present", lambda *_: True)
    assert placed(root, monkeypatch, {})[0]._copy is not None


def test_a_cpu_streams_unless_told(root: Path) -> None:
    found, choices = Images(asked(root, keep="auto"), "cpu", World()), {}
    found.decide(choices, pytest.fail)
    assert (found.test, choices) == (None, {})
    assert isinstance(found.source(4), Streamed)


def test_small_images_are_where_they_were() -> None:
    found, choices = Images(Train(data="digits", keep="device"), "cpu", World()), {}
    found.decide(choices, pytest.fail)
    assert choices == {}


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_makes_the_same_batches_in_a_graph_too() -> None:
    """Captured as eager, bit for bit; as the CPU's but for rounding, by one where it is a close thing."""
    x = noise(64, 256)
    there, here = kept(x, 224, "cuda").sized(32), kept(x, 224).sized(32)
    plan = there.plan(0, 0, 0)
    rows = plan[0].cuda()
    there.batch_of(rows)  # warm
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        images, labels = there.batch_of(rows)
    for step in range(2):
        rows.copy_(plan[step])
        graph.replay()
        eager, _ = there.batch_of(rows)
        assert torch.equal(images, eager)
        expected, right = here.batch_of(plan[step])
        assert torch.equal(labels.cpu(), right)
        apart = (images.cpu().int() - expected.int()).abs()
        assert int(apart.max()) <= 1
        assert float(apart.float().mean()) < 0.01
        assert images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_step_waits_for_the_device(root: Path) -> None:
    job = Job(asked(root, model="pictures:wide", epochs=9, batch=4, compile="off"), None, "cuda")
    step = job.enter(job.stages[0], None)
    assert step.graph is not None
    step(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(1, 6):  # an epoch has six
            step(number)
        step.feed(step.count)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    job.check()


def test_runs_one_after_another_read_their_images_once(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as they are the same ones: others take their place, and need not wait for it."""
    there: list[int] = []
    filled = keeping.filled
    monkeypatch.setattr(keeping, "filled", lambda *given: there.append(len(keeping._here)) or filled(*given))
    shutil.copytree(root, other := tmp_path / "other")
    plans = [asked(each, model="pictures:wide", epochs=1, seed=i) for i, each in enumerate((root, root, other, root))]
    several.side_by_side([(plan, tmp_path / f"run{i}") for i, plan in enumerate(plans)], 1, quiet=True)
    assert there == [0, 0] * 3, "train and test, of the first, the third and the fourth run"


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_one_command_reads_its_images_once(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_torchrun: bool
) -> None:
    """Of `reproduce`: base networks, then what is pruned; under torchrun one by one. Others let these go first."""
    there: list[int] = []
    filled = keeping.filled
    monkeypatch.setattr(keeping, "filled", lambda *given: there.append(len(keeping._here)) or filled(*given))
    monkeypatch.setattr(reproduce, "launched", lambda: by_torchrun)
    shutil.copytree(root, other := tmp_path / "other")
    lab, done = reproduce.Lab(tmp_path, device="cpu"), list[Path]()
    for turn, each in enumerate((root, root, other)):
        plans = [
            (asked(each, model="pictures:wide", epochs=1, seed=i), tmp_path / f"{turn}-{i}")
            for i in range(2 - turn // 2)
        ]
        assert reproduce.perform(lab, plans, done.append) == []
    assert [folder.name for folder in done] == ["0-0", "0-1", "1-0", "1-1", "2-0"]
    assert there == [0, 0] * 2, "train and test, of the first and the last run"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_keeps_what_fits_and_runs_side_by_side_share_it(root: Path, tmp_path: Path) -> None:
    """By `auto`; each gives what it gives alone."""
    fixed: dict[str, Any] = {
        "precision": "bf16", "layout": "channels_last", "compile": "off", "kernels": "off", "deterministic": True
    }  # fmt: skip
    configs = [
        asked(root, model="pictures:wide", epochs=2, batch=9, keep="auto", device="cuda", seed=seed, **fixed)
        for seed in range(3)
    ]
    alone = [jobs.run(config, tmp_path / f"alone{i}", quiet=True) for i, config in enumerate(configs)]
    read: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        trained = Streamed.trained
        patch.setattr(Streamed, "trained", lambda source: read.append(source) or trained(source))
        several.side_by_side([(config, tmp_path / f"beside{i}") for i, config in enumerate(configs)], 3, quiet=True)
    assert len(read) == 1
    for i, result in enumerate(alone):
        assert result["choices"]["images"] == {"keep": "device", "decode": "cpu"}
        each = [(tmp_path / f"{name}{i}" / "model.safetensors").read_bytes() for name in ("alone", "beside")]
        assert each[0] == each[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_tests_what_streaming_tests(root: Path) -> None:
    both = [list(images(root, "cuda", keep=keep, workers=2, decode="cpu").tested(4)) for keep in KEEP]
    for (x, y), (u, v) in zip(*both, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
