"""Checkpoints on disks that fill up, may not be written to, or are left in the middle of a save.

The deeds are done by a second process, this file run as a script: it loads torch once and forks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from growprune import checkpoint
from growprune.checkpoint import latest, save
from growprune.errors import GrowpruneError


def tree(step: int, size: int = 10) -> dict[str, Any]:
    """What a whole checkpoint of this step holds."""
    return {"step": step, "big": torch.full((size,), float(step)), "small": torch.tensor(step)}


def assert_whole(folder: Path, *allowed: int) -> int:
    found = latest(folder)
    assert found is not None
    assert found.tree["step"] in allowed or not allowed
    step = found.tree["step"]
    assert found.tree["big"].eq(step).all()
    assert found.tree["small"].item() == step
    return found.step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def started(*arguments: object) -> subprocess.Popen[str]:
    """This file as a script, in a process of its own."""
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(*arguments: object) -> list[str]:
    with started(*arguments) as process:
        text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    return text.splitlines()


# -- killed --------------------------------------------------------------------------------------------------------

MEGABYTES = 4


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """At least ten kills within a save, as the announcements tell: after each, the last finished one or a newer."""
    rng, duration, finished, inside, halves = random.Random(0), 0.02, 0, 0, 0
    with started("loop", tmp_path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(100):
            process.stdin.write("go\n")
            process.stdin.flush()
            child = int(process.stdout.readline())
            for _ in range(rng.randrange(3)):
                assert process.stdout.readline().startswith("enter")
                begin = time.monotonic()
                finished = left(process.stdout.readline())
                duration = time.monotonic() - begin
            word = process.stdout.readline()
            time.sleep(rng.uniform(0, duration))
            os.kill(child, signal.SIGKILL)
            while word != "dead\n":
                last, word = word, process.stdout.readline()
                finished = max(finished, left(last))
            inside += last.startswith("enter")
            halves += any(".new-" in name for name in names(tmp_path))
            if finished:
                assert assert_whole(tmp_path) >= finished
            if inside >= 15:
                break
        process.stdin.close()
    assert inside >= 10
    assert halves >= 3  # and those fell into the writing
    save(tmp_path, 10**6, tree(10**6))
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def left(word: str) -> int:
    """The step whose save is announced as finished, if any."""
    assert word.startswith(("enter", "leave"))
    return int(word.split()[1]) if word.startswith("leave") else 0


def loop(folder: Path) -> None:
    """At every word from outside, a child that saves without end and says so."""
    for _ in sys.stdin:
        if child := os.fork():
            os.waitpid(child, 0)
            os.write(1, b"dead\n")
            continue
        os.write(1, b"%d\n" % os.getpid())
        found = latest(folder)
        step = found.step if found else 0
        while True:
            step += 1
            state = tree(step, MEGABYTES * 2**18)
            os.write(1, b"enter %d\n" % step)
            save(folder, step, state)
            os.write(1, b"leave %d\n" % step)


@pytest.mark.parametrize(("before", "step"), [((1, 2), 3), ((5,), 5), ((), 1)])
def test_killed_at_every_stage(tmp_path: Path, before: tuple[int, ...], step: int) -> None:
    """Killed as soon as the disk is in its first, second, ... state, of all those that a save goes through."""
    template = tmp_path / "template"
    template.mkdir()
    for earlier in before:
        save(template, earlier, tree(earlier))
    said = run("stages", template, step)
    writing = (".new()", ".new(state.safetensors:0)", ".new(state.json:", ".new(manifest.json:0,")
    for part in (*writing, f"step-00000000{step}(manifest"):
        assert any(part in stage for stage in said), part
    if step in before:  # between the two renames
        assert any("5.old(" in stage and "5.new(" in stage and "step-000000005(" not in stage for stage in said)
    if before:  # an older one half deleted
        assert any(0 < stage.split()[0].count(":") < 3 and "5.new(" not in stage.split()[0] for stage in said)


def stages(template: Path, step: int) -> None:
    """Say what each killed one left behind."""
    work, new = template.with_name("work"), step + 100  # new: what the second checkpoint of one step holds
    before = latest(template)
    for count in range(1, 1000):
        shutil.copytree(template, work)
        if (child := os.fork()) == 0:
            sys.settrace(killer(work, count))
            save(work, step, tree(new))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        check_after(work, before.tree["step"] if before else None, new, step)
        shutil.rmtree(work)
        if not os.WIFSIGNALED(status):
            assert status == 0
            break


def killer(work: Path, count: int) -> Any:
    """A trace function that looks at the disk before each line that may change it, and kills this very process
    at the given change."""
    seen, rooms = "", (checkpoint.__file__, shutil.__file__, pathlib.__file__)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count, seen
        if frame.f_code.co_filename not in rooms:
            return None
        if (now := picture(work)) != seen:
            seen, count = now, count - 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def picture(work: Path) -> str:
    """All folders there, less the process where the name is hidden, with their files' sizes."""
    found = []
    for path in sorted(work.iterdir()):
        name = path.name.rsplit("-", 2)[0] if path.name.startswith(".") else path.name
        files = ",".join(f"{file.name}:{file.stat().st_size}" for file in sorted(path.iterdir()))
        found.append(f"{name}({files})")
    return " ".join(found)


def check_after(work: Path, old: int | None, new: int, step: int) -> None:
    """Old or new, but whole; and the next save works, and leaves nothing of this one but what is good."""
    there = picture(work)
    print(there)
    if old is None and latest(work) is None:
        assert not any(name.startswith("step") for name in names(work))
    else:
        found = latest(work)
        assert found is not None
        assert_whole(work, *(value for value in (old, new) if value is not None))
        assert all("half-written" in line for line in found.notices), found.notices
        if found.tree["step"] != new and ".new" in there:
            assert found.notices
    save(work, step + 1, tree(step + 1))
    assert assert_whole(work) == step + 1
    assert not [name for name in names(work) if ".new-" in name]
    save(work, step + 2, tree(step + 2))
    assert names(work) == [f"step-{n:09d}" for n in (step + 1, step + 2)]


# -- leftovers -----------------------------------------------------------------------------------------------------


def test_half_written_folders_are_told_and_swept(tmp_path: Path) -> None:
    """Those of dead processes go; that of a living one stays."""
    save(tmp_path, 1, tree(1))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    living = f".step-000000009.new-{os.getppid()}-ab"
    left = [
        f".step-000000002.new-{gone.pid}-ab",
        f".step-000000001.new-{gone.pid}-ab",
        f".step-000000003.new-{10**30}-ab",
    ]
    for name in (*left, f".step-000000000.new-{os.getpid()}-ab", living):
        shutil.copytree(tmp_path / "step-000000001", tmp_path / name)
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert found.notices == (
        *(f"checkpoint of step {step} is half-written: going back to step 1" for step in (9, 3, 2)),
        "checkpoint of step 1 is half-written: using an earlier one of the same step",
    )
    save(tmp_path, 4, tree(4))
    assert names(tmp_path) == [living, "step-000000001", "step-000000004"]


def test_an_interrupt_leaves_no_scraps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at any call to the system within a save: old or new, whole, with no half-written folder."""
    save(tmp_path, 1, tree(1))
    for name in ("fsync", "mkdir", "rename", "open"):
        for count in range(1, 9):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, interrupting(getattr(os, name), count))
                with contextlib.suppress(KeyboardInterrupt):
                    save(tmp_path, 1, tree(2), keep=1)
            assert not [left for left in names(tmp_path) if ".new-" in left]
            assert_whole(tmp_path, 1, 2)
            save(tmp_path, 1, tree(1), keep=1)
            assert names(tmp_path) == ["step-000000001"]


def interrupting(really: Any, count: int) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count -= 1
        if count == 0:
            raise KeyboardInterrupt
        return really(*arguments, **named)

    return call


# -- no room, no right ---------------------------------------------------------------------------------------------


def test_full_by_a_limit_on_files(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stops the writing in the tensors, in the structure, in the manifest; never what was there."""
    save(tmp_path, 1, tree(1))
    said = run("limit", tmp_path)
    assert len(said) == 6
    for step, text in enumerate(said, 2):
        path = tmp_path / f"step-{step:09d}"
        assert text == f"{path}: cannot save a checkpoint: File too large; the one of step 1 is intact"
    assert names(tmp_path) == ["step-000000001"]
    assert_whole(tmp_path, 1)


def limit(folder: Path) -> None:
    cases = [({"t": torch.zeros(5000)}, n) for n in (1, 4096, 10_000, 20_050)]
    cases += [({"text": "x" * 50_000}, 40_000), ({}, 100)]
    for step, (state, size) in enumerate(cases, 2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        try:
            save(folder, step, state)
        except GrowpruneError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            print(error)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "mounted"
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "growprune", place], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_full_disk(mounted: Path) -> None:
    """Two of 400 kB fit, a third does not; a smaller one does."""
    folder = mounted / "checkpoints"
    with pytest.raises(
        GrowpruneError, match=r": cannot save a checkpoint: No space left on device; there is no earlier one"
    ):
        save(folder, 1, tree(1, 300_000))
    assert names(folder) == []
    for step in (1, 2):
        save(folder, step, tree(step, 100_000))
    for step in (2, 3):
        with pytest.raises(GrowpruneError) as error:
            save(folder, step, tree(9, 100_000))
        path = folder / f"step-{step:09d}"
        assert str(error.value) == (
            f"{path}: cannot save a checkpoint: No space left on device; the one of step 2 is intact"
        )
        assert names(folder) == ["step-000000001", "step-000000002"]
        assert_whole(folder, 2)
    save(folder, 3, tree(3, 100))
    assert_whole(folder, 3)


def test_room_is_made_of_what_a_dead_process_left(mounted: Path) -> None:
    left = mounted / f".step-000000001.new-{os.getpid()}-ab"
    left.mkdir()
    (left / "state.safetensors").write_bytes(bytes(900_000))
    save(mounted, 1, tree(1, 100_000))
    assert names(mounted) == ["step-000000001"]


def test_a_disk_that_is_read_only(mounted: Path) -> None:
    save(mounted, 1, tree(1))
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    for step in (1, 2):
        with pytest.raises(GrowpruneError, match=r"Read-only file system; the one of step 1 is intact$"):
            save(mounted, step, tree(2))
    with pytest.raises(GrowpruneError, match=r"Read-only file system; there is no earlier one$"):
        save(mounted / "deeper", 2, tree(2))
    assert_whole(mounted, 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any folder")
def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    save(tmp_path, 1, tree(1))
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(GrowpruneError, match=r"Permission denied; the one of step 1 is intact$"):
            save(tmp_path, 2, tree(2))
        assert_whole(tmp_path, 1)
    finally:
        tmp_path.chmod(0o755)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(GrowpruneError) as error:
            save(folder, 1, tree(1))
        assert str(error.value).startswith(f"{folder / 'step-000000001'}: cannot save a checkpoint: ")
        assert str(error.value).endswith("; nothing was changed")
        assert "\n" not in str(error.value)
    assert (tmp_path / "file").read_text() == "mine"


# -- file systems of other kinds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EACCES])
def test_folders_that_cannot_be_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "fsync", failing_on_folders(os.fsync, number))
    save(tmp_path, 1, tree(1))
    assert_whole(tmp_path, 1)


def test_folders_whose_flush_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, tree(1))
    monkeypatch.setattr(os, "fsync", failing_on_folders(os.fsync, errno.EIO))
    with pytest.raises(GrowpruneError, match=r"Input/output error; the one of step 1 is intact$"):
        save(tmp_path, 2, tree(2))
    assert names(tmp_path) == ["step-000000001"]


def failing_on_folders(really: Any, number: int) -> Any:
    def fsync(handle: int) -> None:
        if os.path.isdir(f"/dev/fd/{handle}"):
            raise OSError(number, os.strerror(number))
        really(handle)

    return fsync


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, tree(1))
    really = os.rename

    def rename(source: Any, target: Any, **named: Any) -> None:
        if ".new-" in os.fspath(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really(source, target, **named)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(GrowpruneError, match=r"Input/output error; the one of step 1 is intact$"):
        save(tmp_path, 1, tree(2))
    assert names(tmp_path) == ["step-000000001"]
    assert_whole(tmp_path, 1)


def test_every_file_is_flushed_before_the_name_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    really = {name: getattr(os, name) for name in ("fsync", "rename")}

    def fsync(handle: int) -> None:
        told.append(Path(os.readlink(f"/dev/fd/{handle}")).name)
        really["fsync"](handle)

    def rename(source: Any, target: Any) -> None:
        really["rename"](source, target)
        told.append("rename")

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no way to see which file a descriptor is of")
    save(tmp_path, 1, tree(1))
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save(tmp_path, 2, tree(2))
    *files, fresh, last, parent = told[: told.index("rename") + 2]
    assert files == ["state.safetensors", "state.json", "manifest.json"]
    assert fresh.startswith(f".step-000000002.new-{os.getpid()}-")
    assert (last, parent) == ("rename", tmp_path.name)


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is told by Linux only")
def test_no_second_copy_in_memory(tmp_path: Path) -> None:
    """160 MB of tensors, not contiguous, so that each must be copied: one or two of them are held at a time.

    Where an older one must be checked, it is read whole: that is one more copy.
    """
    growth, read_again = map(float, run("memory", tmp_path))
    assert growth < 60
    assert read_again < 220


def memory(folder: Path) -> None:
    state = {str(i): torch.ones(1000, 1000).T for i in range(40)}
    save(folder, 0, {"warm": torch.ones(1)})
    for step in (1, 2):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
        before = peak()
        save(folder, step, state)
        print(peak() - before)
        checkpoint._known.clear()  # the second time, the other one must be read


def peak() -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) / 1000


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"loop": loop, "stages": stages, "limit": limit, "memory": memory}[sys.argv[1]](
        Path(sys.argv[2]), *map(int, sys.argv[3:])
    )
