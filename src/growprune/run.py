"""A run's folder: what was asked for, what happened, and what came of it. Nothing in it is ever lost.

    config.json          the resolved options            metrics.jsonl       a note an epoch, in order
    checkpoints/         the last two good ones          result.json         written last: the run is finished
    model.safetensors    the network                     report.html         what people look at

One process holds the folder at a time (a lock that dies with the process). Every file but the notes is written beside
and renamed; the notes are cut back to the checkpoint's when a run is taken up again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from growprune import checkpoint
from growprune.checkpoint import Loaded
from growprune.config import Config, differences, flag
from growprune.errors import GrowpruneError
from growprune.storage import write_whole

CONFIG, NOTES, RESULT, MODEL, REPORT = "config.json", "metrics.jsonl", "result.json", "model.safetensors", "report.html"
ANOTHER = "name another folder with --out"


class Folder:
    """A run's folder, held by this process from `Folder.claim` to `close`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.new = False  # made by this process
        self._lock: int | None = lock

    @classmethod
    def claim(cls, path: Path, config: Config | Mapping[str, Any]) -> Folder:
        """Make `path` this run's folder, or go on in it if it is; whatever else it holds is refused, and left alone."""
        wanted = config.to_json() if isinstance(config, Config) else dict(config)
        try:
            path.mkdir(parents=True, exist_ok=True)
            foreign = not (path / CONFIG).exists() and any(p.name != ".lock" for p in path.iterdir())
        except OSError as error:
            raise GrowpruneError(f"{path}: {error.strerror}; {ANOTHER}") from error
        if foreign:
            raise GrowpruneError(f"{path}: not empty, and not a run's folder; {ANOTHER}")
        folder = cls(path, lock(path))
        try:
            if (path / CONFIG).exists():
                folder.compare(read_config(path), wanted)
            else:
                write_whole(path / CONFIG, json.dumps(wanted, indent=2).encode() + b"\n")
                folder.new = True
        except BaseException:
            folder.close()
            raise
        return folder

    def compare(self, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        if there.get("command") != wanted.get("command"):
            raise GrowpruneError(f"{self.path}: holds a run of '{there.get('command')}'; {ANOTHER}")
        for key, old, new in differences(there, wanted):
            raise GrowpruneError(
                f"{self.path}: holds a run with {flag(key)} {old}, not {new}; {ANOTHER}, or give the old value"
            )

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, step: int, tree: Mapping[str, Any]) -> None:
        notes = self.path / NOTES
        size = notes.stat().st_size if notes.exists() else 0
        checkpoint.save(self.path / "checkpoints", step, {"notes": size, "config": read_config(self.path), **tree})

    def latest(self, config: Mapping[str, Any]) -> Loaded | None:
        """The last good checkpoint, the notes cut back to it; None: from the start."""
        loaded = checkpoint.latest(self.path / "checkpoints")
        if loaded is not None:
            self.compare(loaded.tree["config"], config)
        notes, size = self.path / NOTES, 0 if loaded is None else int(loaded.tree["notes"])
        if notes.exists():
            if notes.stat().st_size < size:
                raise GrowpruneError(f"{notes}: shorter than when the checkpoint was made: was it changed?")
            with notes.open("rb+") as file:
                file.truncate(size)
                os.fsync(file.fileno())
        elif size:
            raise GrowpruneError(f"{notes}: missing, though the checkpoint speaks of it")
        return loaded

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
            raise GrowpruneError(
                f"{path}: cannot be written: {error.strerror}; what was saved is intact: growprune resume {self.path}"
            ) from error

    def notes(self) -> list[dict[str, Any]]:
        path = self.path / NOTES
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    @property
    def result(self) -> dict[str, Any] | None:
        """What came out, if the run is finished."""
        path = self.path / RESULT
        return read_json(path) if path.exists() else None

    def write(self, name: str, blob: bytes) -> None:
        write_whole(self.path / name, blob)

    def tidy(self) -> None:
        """A finished run needs no checkpoints."""
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)

    def abandon(self) -> None:
        """Leave nothing of a run that could not even begin, so that the corrected command may use the same folder."""
        if self.new and not (self.path / "checkpoints").exists():
            for name in (CONFIG, NOTES, ".lock"):
                (self.path / name).unlink(missing_ok=True)
            with suppress(OSError):  # it holds something else, or was there before
                self.path.rmdir()


def lock(path: Path) -> int:
    """Hold the folder; the system lets go of it when the process ends, however it ends."""
    try:
        found = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise GrowpruneError(f"{path}: {error.strerror}; {ANOTHER}") from error
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(found)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise GrowpruneError(f"{path}: in use by another process; wait for it, or {ANOTHER}") from error
        raise GrowpruneError(f"{path}: cannot be locked: {error.strerror}; {ANOTHER}") from error
    return found


def read_config(path: Path) -> dict[str, Any]:
    """What a run's folder says it was asked to do."""
    if not (path / CONFIG).is_file():
        what = "no such folder" if not path.exists() else "not a run's folder: it has no config.json"
        raise GrowpruneError(f"{path}: {what}")
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
