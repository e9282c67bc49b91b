"""What disks and people do to a run's folder: it is full, read-only, in use, damaged, edited; and numbers go wrong.

Each is told in one line, what was there stays, and the run still ends with the bits of one that was left alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from growprune import GrowpruneError, checkpoint, data
from growprune.config import resolve
from growprune.run import Folder, read_config
from runs import Shop, contents, newest, outcome, steps, until

SHARED = ["--data", "images", "--threads", "1", "--batch", "300"]
TRAIN = ["train", "--model", "mynets:linear", *SHARED, "--epochs", "6", "--lr", "0.1"]
PRUNE = [
    "prune", "--model", "mynets:small", *SHARED, "--weights", "base", "--epochs", "2", "--lr", "0.05", "--prune-batch",
    "300", "--prune-lr", "0.05", "--delta-lambda", "0.1", "--tau", "0.5", "--ku", "1", "--ks", "3",
]  # fmt: skip
EVERY_STEP, NEVER = ["--save-every", "0"], ["--save-every", "1000"]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    made = Shop(tmp_path_factory.mktemp("shop"))
    made.done(*TRAIN, "--model", "mynets:small", "--out", "base")
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(shop: Shop) -> dict[str, dict[str, Any]]:
    """What each command gives if nobody interferes."""
    shop.done(*TRAIN, "--out", "alone-train")
    shop.done(*PRUNE, "--out", "alone-prune")
    return {name: outcome(shop.path / f"alone-{name}") for name in ("train", "prune")}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def half_done(shop: Shop, run: Path, *command: object, at: int = 5) -> None:
    """A run that was killed when it had saved so many steps or more, each of them."""
    process = shop.fork(*command, *EVERY_STEP, "--out", run, SLOW="0.02")
    assert until(lambda: steps(run)[-1:] >= [at], process.alive)
    process.kill(signal.SIGKILL)
    assert process.wait().code == -signal.SIGKILL
    for scrap in (run / "checkpoints").glob(".step-*"):
        shutil.rmtree(scrap)


# -- full disks ------------------------------------------------------------------------------------------------------


def test_no_room_for_a_checkpoint(shop: Shop, alone: dict[str, Any], run: Path) -> None:
    half_done(shop, run, *TRAIN)
    last, before = steps(run)[-1], contents(newest(run))
    line = shop.refused("resume", run, limit=4000)
    assert re.search(rf"step-0*{last + 1}: cannot save a checkpoint: File too large; the one of step {last} is", line)
    assert steps(run)[-1] == last
    assert contents(newest(run)) == before
    assert f"going on at step {last}\n" in shop.done("resume", run).err
    assert outcome(run) == alone["train"]


def test_no_room_from_the_start(shop: Shop, alone: dict[str, Any], run: Path) -> None:
    assert "cannot be written: File too large" in shop.refused(*TRAIN, "--out", run, limit=300)
    assert not run.exists()
    assert "there is no earlier one" in shop.refused(*TRAIN, "--out", run, limit=4000)
    shop.done(*TRAIN, "--out", run)
    assert outcome(run) == alone["train"]


def test_no_room_for_a_note(shop: Shop, run: Path) -> None:
    """Of a long training; the only checkpoint is the first one. What was written of the note is taken back."""
    long = [*TRAIN, *NEVER, "--epochs", "90"]
    line = shop.refused(*long, "--out", run, limit=10_000)
    assert "metrics.jsonl: cannot be written: " in line
    assert line.endswith(f"; what was saved is intact: growprune resume {run}")
    written = (run / "metrics.jsonl").read_text()
    assert 9_500 < len(written) < 10_000
    assert written.endswith("}\n")
    assert steps(run) == [0]
    shop.done("resume", run)
    shop.done(*long, "--out", run.with_name("alone"))
    assert outcome(run) == outcome(run.with_name("alone"))


@pytest.mark.parametrize(("name", "limit"), [("model.safetensors", 2_500), ("report.html", 20_000)])
def test_no_room_for_what_came_of_it(shop: Shop, alone: dict[str, Any], run: Path, name: str, limit: int) -> None:
    process = shop.fork(*TRAIN, *NEVER, "--out", run, SLOW="60")  # until it has its first checkpoint
    assert until(lambda: steps(run), process.alive)
    process.kill(signal.SIGKILL)
    process.wait()
    assert f"{name}: cannot be written: File too large" in shop.refused("resume", run, limit=limit)
    assert {path.name for path in run.iterdir()} >= {"checkpoints", "config.json", "metrics.jsonl"}
    assert not [path for path in run.iterdir() if path.name != ".lock" and path.name.startswith(".")]
    assert not (run / "result.json").exists()
    shop.done("resume", run)
    assert outcome(run) == alone["train"]


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[None]:
    if subprocess.run(["mount", *options, place], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.skipif(not shutil.which("mount"), reason="no mount here")
def test_a_full_disk_that_is_emptied(shop: Shop, alone: dict[str, Any], run: Path) -> None:
    disk = run.parent / "disk"
    disk.mkdir()
    with mounted(disk, "-t", "tmpfs", "-o", "size=400k", "tmpfs"):
        run, ballast = disk / "run", disk / "ballast"
        process = shop.fork(*TRAIN, *EVERY_STEP, "--out", run, SLOW="0.05")
        assert until(lambda: steps(run)[-1:] >= [3], process.alive)
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1024)):
                pass
        done = process.wait()
        assert done.code == 2, done
        told = (
            f"cannot save a checkpoint: No space left on device; the one of step {steps(run)[-1]} is intact",
            "metrics.jsonl: cannot be written: No space left on device; what was saved is intact",
        )
        assert any(why in done.line for why in told), done
        assert any(why in shop.refused("resume", run) for why in told)
        ballast.unlink()
        shop.done("resume", run)
        assert outcome(run) == alone["train"]


# -- folders that are not to be had ----------------------------------------------------------------------------------


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Root may write everywhere, but not where the disk itself is read-only."""
    if os.geteuid() == 0:
        with mounted(folder, "--bind", "-o", "ro", str(folder)):
            yield
        return
    folder.chmod(0o555)
    yield
    folder.chmod(0o755)


def test_a_read_only_folder(shop: Shop, alone: dict[str, Any], run: Path) -> None:
    half_done(shop, run, *TRAIN)
    before = contents(run)
    with read_only(run.parent) if os.geteuid() == 0 else read_only(run):
        for command, way_out in (
            ([*TRAIN, "--out", run], "name another folder with --out"),
            (["resume", run], "make it writable, or go on with a copy of it"),
        ):
            said = shop.refused(*command)
            assert re.search(rf": (Read-only file system|Permission denied); {way_out}$", said)
        assert contents(run) == before
    with read_only(run.parent):
        assert "name another folder with --out" in shop.refused(*TRAIN, "--out", run.parent / "other")
    shop.done("resume", run)
    assert outcome(run) == alone["train"]
    with read_only(run.parent) if os.geteuid() == 0 else read_only(run):  # finished: it is only told
        assert json.loads(shop.done("resume", run, "--json").out) == json.loads((run / "result.json").read_text())
        assert "Report: " in shop.done("resume", run).out


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--lr", "0.2"], "holds a run with --lr 0.1, not 0.2"),
        (["--seed", "1"], "holds a run with --seed 0, not 1"),
        (["--no-augment"], "holds a run with --augment True, not False"),
    ],
)
def test_other_options_are_refused_by_name(
    shop: Shop, alone: dict[str, Any], run: Path, more: list[str], named: str
) -> None:
    half_done(shop, run, *TRAIN)
    before = contents(run)
    line = shop.refused(*TRAIN, *EVERY_STEP, *more, "--out", run)
    assert named in line
    assert "name another folder with --out" in line
    assert contents(run) == before
    assert "holds a run of 'train'" in shop.refused(*PRUNE, "--out", run)
    assert contents(run) == before
    shop.done(*TRAIN, "--save-every", "7", "--workers", "1", "--data-dir", "elsewhere", "--out", run)  # harmless ones
    assert outcome(run) == alone["train"]


@pytest.mark.parametrize("when", ["after the kill", "while it ran"])
def test_an_edited_configuration_is_refused_by_name(shop: Shop, alone: dict[str, Any], run: Path, when: str) -> None:
    """The checkpoint remembers what it was made with."""
    config = run / "config.json"

    def edit() -> None:
        config.write_text(json.dumps({**json.loads(config.read_text()), "lr": "0.2"}))

    if when == "while it ran":
        process = shop.fork(*TRAIN, *EVERY_STEP, "--out", run, SLOW="0.05")
        assert until(lambda: steps(run)[-1:] >= [2], process.alive)
        edit()
        assert until(lambda: steps(run)[-1:] >= [6], process.alive)
        process.kill(signal.SIGKILL)
        process.wait()
    else:
        half_done(shop, run, *TRAIN)
        edit()
    assert "holds a run with --lr 0.1, not 0.2" in shop.refused("resume", run)
    config.write_text(json.dumps({**json.loads(config.read_text()), "lr": "0.1"}))
    shop.done("resume", run)
    assert outcome(run) == alone["train"]


def test_a_finished_run_says_it_again(shop: Shop, alone: dict[str, Any], run: Path) -> None:
    first = shop.done(*TRAIN, "--out", run)
    before = contents(run)
    assert shop.done("resume", run).out == shop.done(*TRAIN, "--out", run).out == first.out
    assert shop.done("resume", run, "--json").out == (run / "result.json").read_text()
    assert contents(run) == before
    assert outcome(run) == alone["train"]


def test_the_same_command_again_goes_on(shop: Shop, alone: dict[str, Any], run: Path) -> None:
    half_done(shop, run, *TRAIN)
    assert f"going on at step {steps(run)[-1]}" in shop.done(*TRAIN, *EVERY_STEP, "--out", run).err
    assert outcome(run) == alone["train"]


# -- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    blob = bytearray(path.read_bytes())
    blob[len(blob) // 2] ^= 1
    path.write_bytes(blob)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit of the tensors": lambda folder: flip(folder / "state.safetensors"),
    "a flipped bit of the structure": lambda folder: flip(folder / "state.json"),
    "a file cut short": lambda folder: os.truncate(folder / "state.safetensors", 100),
    "a file missing": lambda folder: (folder / "manifest.json").unlink(),
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()] and None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_of_a_damaged_checkpoint_the_one_before_is_used(
    shop: Shop, alone: dict[str, Any], run: Path, damage: str
) -> None:
    half_done(shop, run, *TRAIN)
    older, last = steps(run)[-2:]
    DAMAGES[damage](newest(run))
    said = shop.done("resume", run).err
    assert re.search(rf"^checkpoint of step {last} is damaged \(.+\): going back to step {older}$", said, re.M), said
    assert f"going on at step {older}\n" in said
    assert outcome(run) == alone["train"]


def test_none_is_whole(shop: Shop, alone: dict[str, Any], run: Path) -> None:
    """To begin again is the user's own choice: it is told how, and then comes to the same."""
    half_done(shop, run, *TRAIN)
    for state in (run / "checkpoints").glob("*/state.safetensors"):  # one may have been killed on its way out
        flip(state)
    assert "delete this folder to start from the beginning" in shop.refused("resume", run)
    shutil.rmtree(run / "checkpoints")
    assert "going on" not in shop.done("resume", run).err
    assert outcome(run) == alone["train"]


def test_notes_beyond_the_checkpoint_are_taken_back(shop: Shop, alone: dict[str, Any], run: Path) -> None:
    half_done(shop, run, *TRAIN)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "of": "a process that was killed before it sa')
    shop.done("resume", run)
    assert outcome(run) == alone["train"]


@pytest.mark.parametrize("what", ["gone", "cut", "flipped"])
def test_lost_notes_do_not_lose_the_run(shop: Shop, alone: dict[str, Any], run: Path, what: str) -> None:
    half_done(shop, run, *TRAIN, at=10)
    path = run / "metrics.jsonl"
    if what == "gone":
        path.unlink()
    elif what == "cut":
        os.truncate(path, 250)
    else:
        path.write_bytes(b"\x00" + path.read_bytes()[1:])
    said = shop.done("resume", run).err
    assert ("some notes up to step" in said) == (what != "flipped")
    notes = (run / "metrics.jsonl").read_text().splitlines()
    if what != "flipped":
        assert len(notes) == {"gone": 4, "cut": 5}[what]
        assert all(json.loads(line) for line in notes)
    shutil.copy(shop.path / "alone-train" / "metrics.jsonl", run)
    assert outcome(run) == alone["train"]


def test_killed_before_the_folder_was_its_own(shop: Shop, alone: dict[str, Any], run: Path) -> None:
    """What an unfinished write leaves behind keeps nobody out, and is swept up."""
    run.mkdir()
    for name in (".lock", ".config.json.abcd_123", ".model.safetensors.12345678"):
        (run / name).write_bytes(b"{")
    shop.done(*TRAIN, "--out", run)
    assert outcome(run) == alone["train"]
    (run / "checkpoints").mkdir()  # killed when it was finished, but had not tidied up
    shop.done("resume", run)
    assert outcome(run) == alone["train"]


def test_a_folder_of_something_else_is_left_alone(shop: Shop, run: Path) -> None:
    run.mkdir()
    (run / "thesis.tex").write_text("years of work")
    assert "not empty, and not a run's folder" in shop.refused(*TRAIN, "--out", run)
    assert [path.name for path in run.iterdir()] == ["thesis.tex"]


# -- what a run depends on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_the_weights_it_began_with_are_its_own(shop: Shop, alone: dict[str, Any], run: Path, what: str) -> None:
    """Those it was given may go, or be trained anew, before it needs them for the base's accuracy."""
    weights = run.with_name("weights.safetensors")
    shutil.copy(shop.path / "base" / "model.safetensors", weights)
    half_done(shop, run, *PRUNE, "--weights", weights)
    weights.unlink()
    if what == "replaced":
        shop.done(*TRAIN, "--model", "mynets:small", "--seed", "1", "--epochs", "1", "--out", run.with_name("other"))
        (run.with_name("other") / "model.safetensors").rename(weights)
    shop.done("resume", run)
    assert outcome(run) == alone["prune"]


def test_other_images_are_refused(shop: Shop, run: Path) -> None:
    images = run.with_name("images")
    shutil.copytree(shop.path / "images", images)
    half_done(shop, run, *TRAIN, "--data", images)
    (images / "train.npz").rename(images / "kept.npz")
    shutil.copy(images / "test.npz", images / "train.npz")
    assert re.search(
        r"data '.*': not the images that this run began with: train was 1200, is 597", shop.refused("resume", run)
    )
    (images / "kept.npz").rename(images / "train.npz")
    shop.done("resume", run)


def test_images_may_move(shop: Shop, alone: dict[str, Any], run: Path) -> None:
    """Given again with their new place the command goes on, and `resume` knows it from then on. What else is called so
    is refused: a folder of another name, or of arrays while the old one is there; a network's weights."""
    old, new = run.parent / "old", run.parent / "new"
    for name in ("images", "base"):
        shutil.copytree(shop.path / name, old / name)

    def again(images: Path, weights: Path) -> list[object]:
        return [*PRUNE, "--data", images, "--weights", weights, "--out", run]

    half_done(shop, run, *again(old / "images", old / "base"))
    shutil.copytree(old / "images", new / "images")
    assert "holds a run with --data" in shop.refused(*again(new / "images", old / "base"))
    (old / "images").rename(old / "others")
    assert "must be called as it was" in shop.refused(*again(old / "others", old / "base"))
    assert "which is not there; if they were moved, give the command that began the run" in shop.refused("resume", run)
    (old / "base").rename(new / "base")
    assert "holds a run with --weights" in shop.refused(*again(new / "images", new / "base"))
    (new / "base").rename(old / "base")
    process = shop.fork(*again(new / "images", old / "base"), *EVERY_STEP, SLOW="0.02")
    assert until(lambda: steps(run)[-1:] >= [8], process.alive)
    process.kill(signal.SIGKILL)
    process.wait()
    shop.done("resume", run)
    found, wanted = outcome(run), alone["prune"]
    assert [found[key] for key in ("network", "notes")] == [wanted[key] for key in ("network", "notes")]
    assert json.loads((run / "config.json").read_text())["data"] == str(new / "images")


def test_a_copy_of_class_folders_is_as_good_as_they_are(tmp_path: Path) -> None:
    """By the names and sizes of the images, wherever it lies and whether or not the old ones are there still."""
    old, new, run = tmp_path / "old" / "pets", tmp_path / "new" / "pets", tmp_path / "run"
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (old / split / name).mkdir(parents=True)
            (old / split / name / "0.jpg").write_bytes(b".")
    plans = [resolve("train", {"data": str(place)}) for place in (old, new, tmp_path / "copy" / "cats")]
    Folder.claim(run, plans[0]).close()
    for place in (new, tmp_path / "copy" / "cats"):
        shutil.copytree(old, place)
    cat = new / "val" / "cat" / "0.jpg"
    cat.write_bytes(b"..")
    with pytest.raises(GrowpruneError, match="holds a run with --data"):
        Folder.claim(run, plans[1])
    cat.write_bytes(b".")
    cat = cat.rename(cat.with_name("1.jpg"))
    with pytest.raises(GrowpruneError, match="holds a run with --data"):
        Folder.claim(run, plans[1])
    cat.rename(cat.with_name("0.jpg"))
    with pytest.raises(GrowpruneError, match="holds a run with --data"):
        Folder.claim(run, plans[2])
    Folder.claim(run, plans[1]).close()
    assert read_config(run)["data"] == str(new)


def test_going_on_from_another_folder(shop: Shop, alone: dict[str, Any], run: Path) -> None:
    """Images, weights and the network's module are named from where the run was started."""
    half_done(shop, run, *PRUNE)
    (run.parent / "mynets.py").write_text("raise ImportError('another module of that name')")
    assert shop.run("resume", "run", cwd=run.parent).code == 0
    assert outcome(run) == alone["prune"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["--data", "nowhere"], "data 'nowhere': no such image set"),
        (["--model", "resnt56"], "did you mean 'resnet56'?"),
        (["--model", "mynets:smal"], "did you mean 'small'?"),
        (["--model", "resnet20"], "of another network"),
        (["--weights", "nothing"], "weights 'nothing': no such file"),
        (["--prune-batch", "5000"], "--prune-batch: no batch of 5000 from 1200 images"),
        (["--batch", "5000"], "--batch: no batch of 5000 from 1200 images"),  # not after hours of pushing
        (["--ratios", "[0, 0.5]", "--tensorboard"], ""),
        (["--ignore", "nolayer", "--tensorboard"], "nolayer"),
    ],
)
def test_what_cannot_begin_leaves_nothing_behind(
    shop: Shop, alone: dict[str, Any], run: Path, command: list[str], said: str
) -> None:
    assert said in shop.refused(*PRUNE, *command, "--out", run)
    assert not run.exists()


def test_after_a_wrong_command_the_right_one_has_the_same_folder(shop: Shop, alone: dict[str, Any], run: Path) -> None:
    assert "a bug of the user's (mynets.py:" in shop.refused(*TRAIN, "--model", "mynets:broken", "--out", run)
    assert "no such image set" in shop.refused(*TRAIN, "--data", "imges", "--out", run)
    shop.done(*TRAIN, "--out", run)
    assert outcome(run) == alone["train"]


# -- numbers that are not finite -------------------------------------------------------------------------------------


def weights(run: Path) -> dict[str, Tensor]:
    found = checkpoint.latest(run / "checkpoints")
    assert found is not None
    assert not found.notices
    net: dict[str, Tensor] = found.tree["net"]
    return net


def first_bad_step(shop: Shop, rate: float, poisoned: int | None = None) -> int:
    """How many steps a plain loop does before its loss or a gradient is not finite."""
    images = data.load(str(shop.path / "images"))
    source = data.Resident(images, "cpu", 300)
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        rows = torch.arange(8) if poisoned is None else torch.randperm(8)
        layers = [nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)] if poisoned is None else [nn.Linear(64, 10)]
    net = nn.Sequential(nn.Flatten(), *layers)
    optimizer = torch.optim.SGD(net.parameters(), rate, momentum=0.9, weight_decay=5e-4)
    for step in range(100):
        x, y = source.batch_of(source.plan(0, 0, step // 4)[step % 4])
        loss = F.cross_entropy(net(source.normalized(x, torch.float32)[:, :, rows]), y)
        optimizer.zero_grad()
        loss.backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        if step == poisoned or not all(t.isfinite().all() for t in (loss, *grads)):
            return step
        optimizer.step()
    raise AssertionError("all was finite")


@pytest.mark.parametrize(
    ("model", "rate", "poisoned"), [("deep", "1e30", None), ("bad", "0.1", 5), ("bad_gradient", "0.1", 5)]
)
@pytest.mark.parametrize("save", [EVERY_STEP, NEVER], ids=["saved", "unsaved"])
def test_a_step_that_is_not_finite_is_named_and_undone(
    shop: Shop, run: Path, model: str, rate: str, poisoned: int | None, save: list[str]
) -> None:
    more = ["--model", f"mynets:{model}", "--lr", rate, "--warm-up", "0", *save]
    line = shop.refused(*TRAIN, *more, "--out", run)
    bad = first_bad_step(shop, float(rate), poisoned)
    assert f"the loss or a gradient is not finite at step {bad} (train, epoch {bad / 4:.1f})" in line
    last = steps(run)[-1]
    assert last == (bad if save is EVERY_STEP else 0)
    assert f"the checkpoint of step {last} stays: {run}" in line
    assert all(t.isfinite().all() for t in weights(run).values())
    assert not (run / "model.safetensors").exists()


def test_weights_that_an_update_made_infinite_are_not_saved(shop: Shop, run: Path) -> None:
    line = shop.refused(*TRAIN, "--lr", "1e30", "--warm-up", "0", *EVERY_STEP, "--out", run)
    assert "a weight is not finite at step 2 (train, epoch 0.5): none such was saved" in line
    assert steps(run)[-1] == 1
    assert all(t.isfinite().all() for t in weights(run).values())


def test_steps_are_counted_from_the_beginning_of_a_run(shop: Shop, run: Path) -> None:
    line = shop.refused(*PRUNE, "--lr", "1e30", "--out", run)
    pushed = 8  # steps, before fine-tuning begins
    found = re.search(r"is not finite at step (\d+) \(finetune", line)
    assert found, line
    assert pushed < int(found[1]) <= pushed + 4
