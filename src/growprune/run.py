"""A run's folder: what was asked for, what happened, and what came of it. Nothing in it is ever lost.

    config.json          the resolved options            metrics.jsonl       a note an epoch, in order
    checkpoints/         the last two good ones          result.json         written last: the run is finished
    base.safetensors     the weights it began with       report.html         what people look at
    model.safetensors    the network                     .lock               held by one process at a time

The lock dies with its process; the file says where the run was started, for its paths are meant from there. Every file
but the notes is written beside and renamed; the notes are cut back to the checkpoint's when a run is taken up again.
Checkpoints and base.safetensors go when the run is finished.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from growprune import checkpoint
from growprune.checkpoint import Loaded
from growprune.config import CLASSES, SHAPES, Config, differences
from growprune.errors import ElsewhereError, GrowpruneError, nearest
from growprune.options import flag
from growprune.reading import fingerprint
from growprune.storage import save as save_network
from growprune.storage import write_whole

CONFIG, NOTES, RESULT, MODEL, REPORT = "config.json", "metrics.jsonl", "result.json", "model.safetensors", "report.html"
BASE, LOCK, CHECKPOINTS = "base.safetensors", ".lock", "checkpoints"
SCRAP = re.compile(r"\..+\.(json|jsonl|safetensors|html|png|onnx|pt2)\.[a-z0-9_]{8}")
"""What `write_whole` leaves behind when it is killed."""
ANOTHER = "name another folder with --out"
SAME_NAME = "a folder of images that was moved must be called as it was"
MOVED = f"if they were moved, give the command that began the run with the new --data ({SAME_NAME})"


def closed(path: Path, error: OSError) -> ElsewhereError:
    why = "is a file" if isinstance(error, FileExistsError) else error.strerror
    return ElsewhereError(f"{path}: {why}; {ANOTHER}", f"{path}: {why}; make it writable, or go on with a copy of it")


def unlike(key: str, old: Any, new: Any) -> str:
    """
    >>> unlike("seed", 0, 1), unlike("ratios", "0.5", None), unlike("gamma", None, 0.1)
    ('with --seed 0, not 1', 'with --ratios 0.5, which is not given now', 'without --gamma, which is 0.1 now')
    """
    none = (None, "")
    if old in none:
        return f"without {flag(key)}, which is {new} now"
    return f"with {flag(key)} {old}, " + ("which is not given now" if new in none else f"not {new}")


def copied(old: Path, new: Path) -> bool:
    """Do two class folders hold the same images, by names and sizes? Of arrays (.npz, CIFAR's files) these tell
    nothing."""
    found = fingerprint(old)
    return found is not None and found == fingerprint(new)


class Folder:
    """A run's folder, held by this process from `Folder.claim` to `close`."""

    def __init__(self, path: Path, lock: int, config: Mapping[str, Any]) -> None:
        self.path, self.config = path, config
        self.new = False  # begun by this process
        self._lock: int | None = lock

    @classmethod
    def claim(cls, path: Path, config: Config | Mapping[str, Any]) -> Folder:
        """Make `path` this run's folder, or go on in it if it is; whatever else it holds is refused, and left alone."""
        wanted = config.to_json() if isinstance(config, Config) else dict(config)
        try:
            path.mkdir(parents=True, exist_ok=True)
            others = (p.name for p in path.iterdir() if p.name != LOCK and not SCRAP.fullmatch(p.name))
            foreign = not (path / CONFIG).exists() and any(others)
        except OSError as error:
            raise closed(path, error) from error
        if foreign:
            raise GrowpruneError(f"{path}: not empty, and not a run's folder; {ANOTHER}")
        folder = cls(path, lock(path), wanted)
        try:
            if not (path / CONFIG).exists():
                folder.begin()
            elif folder.compare(there := read_config(path), wanted):
                folder.describe(there | {"data": wanted["data"]})
        except BaseException:
            folder.abandon()
            folder.close()
            raise
        for each in path.iterdir():
            if SCRAP.fullmatch(each.name):
                with suppress(OSError):
                    each.unlink()
        return folder

    def begin(self) -> None:
        self.new = True
        with suppress(OSError):  # it serves those only who go on from elsewhere
            os.ftruncate(self.lock, 0)
            os.pwrite(self.lock, os.fsencode(os.path.relpath(Path.cwd(), self.path.resolve())), 0)
        self.describe(self.config)

    def describe(self, config: Mapping[str, Any]) -> None:
        write_whole(self.path / CONFIG, json.dumps(config, indent=2).encode() + b"\n")

    @property
    def lock(self) -> int:
        assert self._lock is not None
        return self._lock

    @property
    def home(self) -> Path | None:
        """The folder that the run was started in, if it is known and there."""
        way = os.fsdecode(os.pread(self.lock, 2**16, 0))
        place = (self.path.resolve() / way).resolve()
        return place if way and place.is_dir() else None

    def compare(self, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
        """Refuse another run's options. Images may have moved: is it that?"""
        moved = False
        if there.get("command") != wanted.get("command"):
            raise GrowpruneError(f"{self.path}: holds a run of '{there.get('command')}'; {ANOTHER}")
        found = list(differences(there, wanted))
        for key, old, new in found:
            if not (moved := key == "data" and self.moved(old, new)):
                others = [flag(name) for name, *_ in found if name != key]
                also = f" ({', '.join(others)} {'differ' if others[1:] else 'differs'} too)" if others else ""
                same = f" ({SAME_NAME})" if key == "data" and not CLASSES.keys() & {old, new} else ""
                raise GrowpruneError(
                    f"{self.path}: holds a run {unlike(key, old, new)}{also}; {ANOTHER}, or give the old value{same}"
                )
        return moved

    def moved(self, there: Any, here: Any) -> bool:
        """May images that lay there lie here now? This folder is called the same; that one is gone, or this is a copy
        of it. Whether they are as many, of the same classes, the run finds out when it goes on."""
        if not (isinstance(there, str) and isinstance(here, str)) or CLASSES.keys() & {there, here}:
            return False
        old, new = ((self.home or Path.cwd()) / place for place in (there, here))
        return old.name == new.name and new.is_dir() and (not os.path.lexists(old) or copied(old, new))

    def images_there(self) -> None:
        """Of a run that has begun: if not, say how it goes on with them elsewhere."""
        images = str(self.config.get("data"))
        if not self.new and images not in CLASSES and not Path(images).expanduser().is_dir():
            raise GrowpruneError(f"{self.path}: its images were in '{images}', which is not there; {MOVED}")

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, step: int, tree: Mapping[str, Any]) -> None:
        """The notes reach the disk first: a checkpoint must not know of any that a power cut takes back."""
        notes, size = self.path / NOTES, 0
        try:
            with suppress(FileNotFoundError), notes.open("rb") as file:
                os.fsync(file.fileno())
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise self.unwritten(notes, error) from error
        checkpoint.save(self.path / CHECKPOINTS, step, {"notes": size, "config": self.config, **tree})

    def latest(self, config: Mapping[str, Any]) -> Loaded | None:
        """The last good checkpoint, the notes cut back to it; None: from the start.

        Notes that someone has cut or taken away are missed, and that is said; the run does not depend on them.
        """
        loaded = checkpoint.latest(self.path / CHECKPOINTS)
        if loaded is not None:
            self.compare(loaded.tree["config"], config)
        size = 0 if loaded is None else int(loaded.tree["notes"])
        if self.cut_back(size) < size and loaded is not None:
            lost = f"{NOTES} is shorter than the checkpoint remembers: some notes up to step {loaded.step} are lost"
            loaded = replace(loaded, notices=(*loaded.notices, lost))
        return loaded

    def cut_back(self, size: int) -> int:
        """The notes to so many bytes, or to the whole lines there are; how many there were."""
        path = self.path / NOTES
        try:
            with path.open("rb+") as file:
                there = file.read()
                file.truncate(size if len(there) >= size else there.rfind(b"\n") + 1)
                os.fsync(file.fileno())
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise self.unwritten(path, error) from error
        return len(there)

    # -- the weights it began with -----------------------------------------------------------------------------------

    @property
    def base(self) -> str | None:
        return str(self.path / BASE) if (self.path / BASE).is_file() else None

    def keep_base(self, net: nn.Module) -> None:
        """Whoever made them may change or delete them while this run is under way; it needs them to its end."""
        if self.base is None:
            save_network(net, self.path / BASE)

    # -- notes and result --------------------------------------------------------------------------------------------

    def note(self, record: Mapping[str, Any]) -> None:
        line = (json.dumps(record) + "\n").encode()
        path = self.path / NOTES
        try:
            with path.open("ab", buffering=0) as file:
                before = file.tell()
                if file.write(line) != len(line):
                    file.truncate(before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self.unwritten(path, error) from error

    def unwritten(self, path: Path, error: OSError) -> GrowpruneError:
        saved = f"what was saved is intact: growprune resume {self.path}"
        return GrowpruneError(f"{path}: cannot be written: {error.strerror}; {saved}")

    def notes(self) -> list[dict[str, Any]]:
        return read_notes(self.path)

    @property
    def result(self) -> dict[str, Any] | None:
        """What came out, if the run is finished."""
        path = self.path / RESULT
        return read_json(path) if path.exists() else None

    def write(self, name: str, blob: bytes) -> None:
        write_whole(self.path / name, blob)

    def tidy(self) -> None:
        """A finished run, once it is on the disk, needs no checkpoints."""
        checkpoint.settle(self.path)
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
        with suppress(OSError):
            (self.path / BASE).unlink(missing_ok=True)

    def abandon(self) -> None:
        """Leave nothing of a run that could not even begin, so that the corrected command may use the same folder."""
        if self.new and not (self.path / CHECKPOINTS).exists() and not (self.path / RESULT).exists():
            with suppress(OSError):  # where nothing can be removed either, or something else is in it
                for each in (CONFIG, NOTES, BASE, *(p.name for p in self.path.glob("events.out.*")), LOCK):
                    (self.path / each).unlink(missing_ok=True)
                self.path.rmdir()


def busy(path: Path) -> str:
    """How a refusal begins that would not be one later."""
    return f"{path}: in use by another process"


def lock(path: Path) -> int:
    """Hold the folder; the system lets go of it when the process ends, however it ends."""
    try:
        found = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise closed(path, error) from error
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(found), os.stat(path / LOCK)):  # another process has just let go of it
            raise OSError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
    except OSError as error:
        os.close(found)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT):
            wait = f"{busy(path)}; wait for it"
            raise ElsewhereError(f"{wait}, or {ANOTHER}", wait) from error
        raise GrowpruneError(f"{path}: cannot be locked: {error.strerror}; {ANOTHER}") from error
    return found


def in_use(path: Path) -> bool:
    """Does another process hold this folder now?"""
    if not (path / LOCK).exists():
        return False
    try:
        os.close(lock(path))
    except ElsewhereError:
        return True
    return False


def saved(path: Path) -> int:
    """The step of a run's newest checkpoint, by its name: whether it is whole is not asked."""
    with suppress(OSError):
        return max((step for step, _ in checkpoint.finished(path / CHECKPOINTS)), default=0)
    return 0


def read_notes(folder: Path) -> list[dict[str, Any]]:
    """All that can be read: a damaged line must not keep a run from its end."""
    return [note for note in noted(folder) if note is not None]


NOTED = {"stage", "phase", "accuracy"}
"""What every note says."""


def noted(folder: Path) -> list[dict[str, Any] | None]:
    """The notes line by line; None stands for a damaged one."""
    path, found = folder / NOTES, list[dict[str, Any] | None]()
    for line in path.read_bytes().splitlines() if path.exists() else ():
        note = None
        with suppress(ValueError):
            note = json.loads(line)
        found.append(note if isinstance(note, dict) and note.keys() >= NOTED else None)
    return found


def read_config(path: Path) -> dict[str, Any]:
    """What a run's folder says it was asked to do."""
    if not (path / CONFIG).is_file():
        near = [str(each.parent) for place in (path.parent, Path("runs")) for each in place.glob(f"*/{CONFIG}")]
        what = f"no such folder{nearest(str(path), near)}"
        if path.exists():
            what = f"not a run's folder: it has no {CONFIG}, which holds a run's options"
        raise GrowpruneError(f"{path}: {what}; give the folder of a run: its --out, by default in runs/")
    return read_json(path / CONFIG)


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise GrowpruneError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise GrowpruneError(f"{path}: damaged: not JSON") from error
    if not isinstance(found, dict):
        raise GrowpruneError(f"{path}: damaged: not what growprune writes")
    return found


def as_measured(weights: str | None) -> dict[str, Any]:
    """Of a run's folder: its network, the shape of an input and the number of classes, as far as its files tell."""
    run = Path(weights or "")
    if weights is None or not (run / CONFIG).is_file():
        return {}
    tested, result = as_tested(run), read_json(run / RESULT) if (run / RESULT).is_file() else {}
    shape, number = (result.get(key, known.get(str(tested.get("data")))) for key, known in SEEN.items())
    found = {"model": tested.get("model"), "input": "x".join(map(str, shape or ())), "num_classes": number}
    return {name: value for name, value in found.items() if value}


SEEN: dict[str, Mapping[str, Any]] = {"shape": SHAPES, "classes": CLASSES}
"""What older results do not tell, by their set."""


def as_tested(run: Path) -> dict[str, Any]:
    """The options with which a run's network is tested to the very accuracy that the run found."""
    found = read_config(run)
    result = read_json(run / RESULT) if (run / RESULT).is_file() else {}
    found |= {key: value for key, value in (result.get("choices") or {}).get("images", {}).items() if key == "decode"}
    if found.get("command") == "demo":
        found = {"model": "growprune.demo:network", "data": "digits", "threads": 1, "device": found.get("device")}
    kept = {"model", "data", "data_dir", "normalize", "resolution", "threads", "decode"}
    kept |= {"device"} if found.get("device") == "cpu" else set()  # a GPU may not be here
    return {"weights": str(run), **{name: found[name] for name in kept if name in found}}
