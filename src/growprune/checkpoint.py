"""A run's checkpoints: atomic, checksummed, free of pickle; and the latest good one.

A checkpoint is a folder, `step-000000123`, of three files: the tensors (`state.safetensors`), the structure that holds
them (`state.json`), and a manifest with the size and SHA-256 of both, which carries a SHA-256 of itself. It is written
under a hidden name beside, flushed, and renamed into place, so that a finished name never stands for half a checkpoint.
One save at a time may go on in a folder; any number may read. The hidden names, with the process's number:

    .step-000000123.new-4711-5e1f0a2c   half-written: never read; after a kill, removed by the next save
    .step-000000123.old-4711-5e1f0a2c   whole, set aside while a new one of the same step takes its place: still good
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from growprune.errors import GrowpruneError, line
from growprune.tree import decode, encode, word

FORMAT = 1
TENSORS, TREE, MANIFEST = "state.safetensors", "state.json", "manifest.json"
NAME = re.compile(r"step-([0-9]{9,})|\.step-([0-9]{9,})\.(new|old)-([0-9]+)-[0-9a-f]+")
_known: dict[Path, tuple[tuple[int, ...], bool]] = {}
"""What this process wrote or has read, as its stamp was then, and whether it is good: a save need not read it again."""


class DamagedError(Exception):
    """Why a checkpoint cannot be used."""


@dataclass(frozen=True)
class Loaded:
    """A whole checkpoint, and one line for each newer one that could not be used."""

    step: int
    tree: dict[str, Any]
    path: Path
    notices: tuple[str, ...]


def save(folder: Path, step: int, tree: Mapping[str, Any], keep: int = 2) -> Path:
    """Write `tree` as the checkpoint of `step`, then delete all but the last `keep` good ones.

    A tree is made of dicts with string keys, lists and tuples of None, bool, int, float, str and dense tensors. All of
    it comes back to the bit and of the same type, except that any other mapping comes back as a dict, a parameter as a
    tensor, and every tensor contiguous, on the CPU, without gradient. One tensor in two places comes back as one.
    Anything else in a tree is a TypeError that names its place.

    Whatever goes wrong, the checkpoints that were there before stay. A damaged one goes once `keep` good ones stand.
    """
    if type(step) is not int or step < 0 or keep < 1:
        raise ValueError(f"save: step must be a whole number from 0 on and keep at least 1, not {step!r} and {keep!r}")
    if not isinstance(tree, Mapping):
        raise TypeError(f"tree: a dict is needed, not {type(tree).__name__}")
    tensors: dict[str, Tensor] = {}
    layout = encode(tree, (), tensors, {})
    folder = Path(folder)
    final = folder / named(step)
    fresh = hidden(final, "new")
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            settle(folder.parent)
        sweep(folder)
        write(fresh, step, layout, tensors)
        put_in_place(fresh, final)
        settle(folder)
    except OSError as error:
        why = error.strerror or line(error)
        raise GrowpruneError(f"{final}: cannot save a checkpoint: {why}; {standing(folder)}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    with suppress(OSError):
        _known[final] = stamp(final), True
    prune(folder, step, keep)
    return final


def latest(folder: Path) -> Loaded | None:
    """The newest checkpoint that is whole; None where none was ever finished.

    Every byte is checked before it is used. Checkpoints that are there but all damaged are an error: to start again
    from nothing must be the user's own choice.
    """
    folder = Path(folder)
    try:
        found = finished(folder)
        halves = [(step, "is half-written") for step, kind, _, _ in entries(folder) if kind == "new"]
    except OSError as error:
        raise GrowpruneError(f"{folder}: cannot be searched for checkpoints: {error.strerror}") from error
    passed: list[tuple[int, str]] = []
    for step, path in found:
        try:
            tree = read(path, step)
        except Exception as error:  # whatever is wrong with this one, an older one may be good
            passed.append((step, f"is damaged ({reason(error)})"))
            continue
        passed += [half for half in halves if half[0] >= step]
        return Loaded(step, tree, path, tuple(notice(newer, what, step) for newer, what in sorted(passed)[::-1]))
    if not found:
        return None
    some = "; ".join(f"step {step} {what}" for step, what in passed[:2])
    raise GrowpruneError(
        f"{folder}: none of the checkpoints in it is whole: {some}{'; and so on' if len(passed) > 2 else ''}: "
        "put one back from a copy, or delete this folder to start from the beginning"
    )


def notice(newer: int, what: str, step: int) -> str:
    """What was passed over, and what is used instead.

    >>> notice(1200, "is half-written", 1100)
    'checkpoint of step 1200 is half-written: going back to step 1100'
    """
    way = f"going back to step {step}" if newer != step else "using an earlier one of the same step"
    return f"checkpoint of step {newer} {what}: {way}"


def reason(error: Exception) -> str:
    """Why a checkpoint cannot be used, in a few words."""
    if isinstance(error, DamagedError):
        return line(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{Path(os.fsdecode(error.filename)).name}: {error.strerror}"
    return f"its contents make no sense: {type(error).__name__}"


# -- the folder of checkpoints -------------------------------------------------------------------------------------


def named(step: int) -> str:
    return f"step-{step:09d}"


def hidden(final: Path, kind: str) -> Path:
    return final.with_name(f".{final.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")


def entries(folder: Path) -> Iterator[tuple[int, str, int, Path]]:
    """Step, kind ('' for a finished name), process and path of everything that bears a checkpoint's name."""
    with suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if match := NAME.fullmatch(name):
                digits, inner, kind, process = match.groups()
                step = int(digits or inner)
                if named(step) == f"step-{digits or inner}":  # not, say, step-0000000001
                    yield step, kind or "", int(process or 0), folder / name


def finished(folder: Path) -> list[tuple[int, Path]]:
    """What should be whole checkpoints, the newest first; of one step, the one that was not set aside first."""
    found = [(step, kind == "", path) for step, kind, _, path in entries(folder) if kind in ("", "old")]
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def sweep(folder: Path) -> None:
    """Remove what dead processes left unfinished: it makes room, and none of it was ever the only good one."""
    for _, kind, process, path in entries(folder):
        if kind == "new" and dead(process):
            discard(path)


def dead(process: int) -> bool:
    """Our own number counts as dead: nothing of ours is under way, and containers give the same one out again."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # alive, and another user's
        return False
    return process == os.getpid()


def prune(folder: Path, step: int, keep: int) -> None:
    """Delete all but the last `keep` good ones, that of `step` among them. A damaged one does not count, and as long
    as fewer stand nothing goes but what was replaced."""
    kept, surplus = {step}, []
    with suppress(OSError):  # the new one is safe; what cannot be listed now is pruned by a later save
        for other, path in finished(folder):
            if path.name == named(step):
                continue
            if other in kept:
                discard(path)
            elif len(kept) < keep and sound(path, other):
                kept.add(other)
            else:
                surplus.append(path)
    for path in surplus if len(kept) >= keep else ():
        discard(path)


def discard(path: Path) -> None:
    """Remove a folder, or a file or link where a folder should be; what resists is tried again at the next save."""
    _known.pop(path, None)
    with suppress(OSError):
        path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)


def standing(folder: Path) -> str:
    """What there still is after a save that failed."""
    try:
        good = next((step for step, path in finished(folder) if sound(path, step)), None)
    except OSError:
        return "nothing was changed"
    return "there is no earlier one" if good is None else f"the one of step {good} is intact"


# -- writing -------------------------------------------------------------------------------------------------------


def write(path: Path, step: int, layout: Any, tensors: dict[str, Tensor]) -> None:
    """All the files of a checkpoint, each of them and the folder flushed to the disk."""
    path.mkdir()
    text = json.dumps(layout, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass")
    files = {TENSORS: fill(path / TENSORS, stored(tensors)), TREE: fill(path / TREE, [text])}
    fill(path / MANIFEST, [sealed({"format": FORMAT, "step": step, "files": files})])
    settle(path)


def fill(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, int | str]:
    """Write one file; its size and SHA-256, taken from memory and not from what the disk made of it."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        with suppress(OSError):
            # The kernel's clock ticks in milliseconds. With a finer time on the file, any later change shows.
            os.utime(file.fileno(), ns=(time.time_ns(), time.time_ns()))
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def stored(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file, piece by piece: the library would hold two copies of everything to write it."""
    order = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # keeps each one aligned
    header, at = {}, 0
    for name, t in order:
        end = at + t.numel() * t.element_size()
        header[name] = {"dtype": word(t.dtype), "shape": list(t.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > 100_000_000:  # the library reads no longer ones
        raise ValueError(f"save: {len(tensors)} tensors are too many for one file")
    yield struct.pack("<Q", len(text)) + text
    for _, t in order:
        t = t.detach().cpu().resolve_conj().resolve_neg().contiguous()
        yield t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy().data  # one element may have any stride


def sealed(facts: dict[str, Any]) -> bytes:
    """The manifest's very bytes, its own SHA-256 among them."""
    own = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**facts, "sha256": own}, indent=1, sort_keys=True) + "\n").encode()


def put_in_place(fresh: Path, final: Path) -> None:
    """Rename; one that has the name already is set aside first, where `latest` still finds it."""
    aside = hidden(final, "old")
    try:
        with suppress(FileNotFoundError):
            final.rename(aside)
        fresh.rename(final)
    finally:
        if not os.path.lexists(final):
            with suppress(FileNotFoundError):
                aside.rename(final)


def settle(folder: Path) -> None:
    """Flush a folder's names to the disk, where its file system knows how to."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise


# -- reading -------------------------------------------------------------------------------------------------------


def read(path: Path, step: int) -> dict[str, Any]:
    """The tree of a checkpoint."""
    mark = stamp(path)
    _known[path] = mark, False
    structure, tensors = checked(path, step)
    with torch.device("cpu"):  # whatever the program's default is
        tree = decode(json.loads(structure.decode("utf-8", "surrogatepass")), safetensors.torch.load(tensors))
    if not isinstance(tree, dict):
        raise DamagedError(f"{TREE}: not a tree of ours")
    _known[path] = mark, True
    return tree


def sound(path: Path, step: int) -> bool:
    """Is it whole? Its files are read only if this process does not know them as they are now."""
    try:
        mark = stamp(path)
        if _known.get(path, ((), False))[0] != mark:
            _known[path] = mark, False
            checked(path, step)
            _known[path] = mark, True
        return _known[path][1]
    except Exception:  # whatever is wrong with it
        return False


def stamp(path: Path) -> tuple[int, ...]:
    """Numbers that change when any file of the checkpoint is written to, replaced or cut."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise DamagedError("not a folder")
    found = [os.lstat(path / name) for name in (MANIFEST, TREE, TENSORS)]
    return tuple(n for s in found for n in (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns))


def checked(path: Path, step: int) -> tuple[bytes, bytes]:
    """Structure and tensors, if every byte is as it was saved. What is parsed later is what was checked here."""
    blob = content(path / MANIFEST)
    facts = json.loads(blob)
    if not isinstance(facts, dict) or sealed({k: v for k, v in facts.items() if k != "sha256"}) != blob:
        raise DamagedError(f"{MANIFEST}: SHA-256 does not fit")
    if facts["format"] != FORMAT:
        raise DamagedError(f"{MANIFEST}: format {facts['format']!r}; this version of growprune reads {FORMAT}")
    if facts["step"] != step:
        raise DamagedError(f"{MANIFEST}: of step {facts['step']!r}")
    if set(facts["files"]) != {TREE, TENSORS}:
        raise DamagedError(f"{MANIFEST}: names other files than ours")
    return content(path / TREE, facts["files"][TREE]), content(path / TENSORS, facts["files"][TENSORS])


def content(path: Path, facts: Mapping[str, Any] | None = None) -> bytes:
    """All of a plain file, if it is what the manifest says; the manifest itself, if it is not absurdly long.

    Links are not followed, and a pipe is not waited for.
    """
    with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise DamagedError(f"{path.name}: not a file")
        if found.st_size > 2**16 if facts is None else found.st_size != facts["bytes"]:
            raise DamagedError(
                f"{path.name}: {found.st_size} bytes, not {facts['bytes'] if facts else 'a few hundred'}"
            )
        blob = file.read()
    if facts is not None and hashlib.sha256(blob).hexdigest() != facts["sha256"]:
        raise DamagedError(f"{path.name}: SHA-256 does not fit")
    return blob
