"""Checkpoints: what was saved comes back bit for bit; damage of any kind is noticed, and an older one used."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import shutil
import struct
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from growprune import checkpoint
from growprune import tree as trees
from growprune.checkpoint import MANIFEST, TENSORS, TREE, latest, save
from growprune.errors import GrowpruneError

FILES = (TENSORS, TREE, MANIFEST)


def bits(t: Tensor) -> bytes:
    return t.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    """The same types and the same bits, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and bits(a) == bits(b)
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    return bool(a == b)


def back(folder: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """The tree after a journey to the disk."""
    path = save(folder, 7, tree)
    found = latest(folder)
    assert found is not None
    assert (found.step, found.path, found.notices) == (7, path, ())
    return found.tree


def small(step: int) -> dict[str, Any]:
    """A few hundred bytes, so that each of them can be damaged."""
    return {"step": step, "w": torch.arange(step, step + 6.0).view(2, 3), "n": [None, True, -0.0, "λ", {}]}


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 1100 and 1200."""
    folder = tmp_path / "checkpoints"
    for step in (1100, 1200):
        save(folder, step, small(step))
    return folder


def newest(folder: Path) -> Path:
    return folder / "step-000001200"


def assert_went_back(folder: Path, *words: str) -> None:
    found = latest(folder)
    assert found is not None
    assert found.step == 1100
    assert same(found.tree, small(1100))
    assert len(found.notices) == 1
    assert "\n" not in found.notices[0]
    for word in ("checkpoint of step 1200 is ", ": going back to step 1100", *words):
        assert word in found.notices[0]


# -- what comes back -----------------------------------------------------------------------------------------------

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


@st.composite
def some_tensors(draw: st.DrawFn) -> Tensor:
    """Any bits of any type, also NaNs with payloads; of no dimension, of no element; in any order in memory."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    count = torch.Size(shape).numel()
    wide = draw(st.integers(1, 3))  # how far apart they lie
    if dtype == torch.bool:
        values = draw(st.lists(st.booleans(), min_size=count * wide, max_size=count * wide))
        t = torch.tensor(values, dtype=dtype)
    else:
        size = count * wide * dtype.itemsize
        t = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8).view(dtype)
    t = t.view(*shape, wide)[..., 0]
    return t.permute(draw(st.permutations(range(t.dim()))))


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 2**64 - 1).map(lambda n: struct.unpack("<d", n.to_bytes(8, "little"))[0]),
    st.sampled_from([0.0, -0.0, float("inf"), -float("inf"), 5e-324, 1.7976931348623157e308, 0.1, 1e22]),
    st.text(st.characters()),  # lone surrogates too
    some_tensors(),
)
KEYS = st.one_of(
    st.text(st.characters(), max_size=4), st.sampled_from(["$tensor", "$int", "$dict", "__metadata__", "a/b"])
)
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(KEYS, inner, max_size=3),
        ),
        max_leaves=12,
    ),
    max_size=4,
)


@given(TREES)
@settings(max_examples=200, deadline=None)
def test_a_tree_comes_back(tree: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert same(back(Path(folder), tree), tree)


def test_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    payload = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_DEAD_BEEF))[0]
    tree = {"huge": 7**20_000, "small": -(2**53), "nan": [float("nan"), payload], "inf": -float("inf"), "one": (1, 1.0)}
    assert same(back(tmp_path, tree), tree)


def test_strings_that_utf8_does_not_know(tmp_path: Path) -> None:
    tree = {"\ud800\udc00": "\ud800\udc00", "\U00010000": "\U00010000", "\0": "\x7f\u2028\n\\u0041", "": "\udfff"}
    assert same(back(tmp_path, tree), tree)


def test_tensors_of_every_layout(tmp_path: Path) -> None:
    base = torch.randn(2, 3, 4, 5)
    tree = {
        "last": base.to(memory_format=torch.channels_last),
        "turned": base.permute(3, 1, 0, 2),
        "part": base[:, ::2, 1:3],
        "spread": torch.tensor([1.0, 2.0]).expand(3, 2),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "negative, contiguous": torch.tensor([1 + 2j]).conj().imag,
        "none": torch.zeros(0, 3),
        "alone": torch.tensor(3.5),
        "one of many": torch.arange(4.0)[1::4],
    }
    found = back(tmp_path, tree)
    for name, t in tree.items():
        assert found[name].is_contiguous()
        assert torch.equal(found[name], t), name
        assert (found[name].dtype, found[name].shape) == (t.dtype, t.shape)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_of_a_gpu(tmp_path: Path) -> None:
    w = torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last)
    found = back(tmp_path, {"w": w, "half": w.bfloat16(), "random": torch.cuda.get_rng_state()})
    assert same(found["w"], w.cpu())
    assert same(found["half"], w.bfloat16().cpu())


def test_another_default_device(tmp_path: Path) -> None:
    checkpoint.word.cache_clear()
    tree = {"none": torch.zeros(0, 3), "some": torch.ones(2)}
    with torch.device("meta"):
        found = back(tmp_path, tree)
    assert same(found, tree)


def test_every_type_that_safetensors_holds(tmp_path: Path) -> None:
    known = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and trees.word(dtype)]
    assert set(DTYPES) <= set(known)
    blob = torch.arange(64, dtype=torch.uint8)
    tree = {str(dtype): blob.view(dtype) if dtype != torch.bool else blob > 7 for dtype in known}
    assert same(back(tmp_path, tree), tree)


def test_one_tensor_in_two_places_stays_one(tmp_path: Path) -> None:
    t = torch.randn(1000)
    found = back(tmp_path, {"a": t, "b": {"c": [t]}, "d": t.clone()})
    assert found["a"] is found["b"]["c"][0]
    assert found["a"] is not found["d"]
    assert (tmp_path / "step-000000007" / TENSORS).stat().st_size < 9000


def test_state_dicts_of_torch(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    tree = {"net": net.state_dict(), "parameters": list(net.parameters()), "random": torch.get_rng_state()}
    assert isinstance(tree["net"], OrderedDict)
    found = back(tmp_path, {**tree, "view": MappingProxyType({"a": 1})})
    assert same(found["net"], {name: t.detach() for name, t in net.state_dict().items()})
    assert same(found["parameters"], [p.detach() for p in net.parameters()])
    assert not found["parameters"][0].requires_grad
    assert same(found["view"], {"a": 1})
    torch.set_rng_state(found["random"])
    found["net"]["0.weight"].add_(1)  # what comes back can be written to


def test_the_tensors_are_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"net": {"b": torch.ones(3, dtype=torch.bfloat16), "w": torch.ones(2)}})
    found = safetensors.torch.load_file(path / TENSORS)
    assert sorted(found) == ["0/net/b", "1/net/w"]
    blob = (path / TENSORS).read_bytes()
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    for name, t in found.items():  # in its place in memory, for those who map the file
        assert (8 + size + header[name]["data_offsets"][0]) % t.element_size() == 0


@pytest.mark.parametrize(
    ("leaf", "says"),
    [
        (object(), "tree['a'][1]['b']: builtins.object"),
        ({1, 2}, "tree['a'][1]['b']: builtins.set"),
        (b"x", "builtins.bytes"),
        (1j, "builtins.complex"),
        (torch.Size([1]), "torch.Size"),
        (torch.float32, "torch.dtype"),
        ({3: 1}, "tree['a'][1]['b']: the key 3 is not a string"),
        ({None: 1}, "the key None is not a string"),
        (torch.ones(2, device="meta"), "tree['a'][1]['b']: a tensor (meta"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(1, dtype=torch.complex128), "torch.complex128"),
        (type("Mine", (float,), {})(1.0), "Mine"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, leaf: Any, says: str) -> None:
    with pytest.raises(TypeError) as error:
        save(tmp_path, 1, {"a": [0, {"b": leaf}]})
    assert says in str(error.value)
    assert not list(tmp_path.iterdir())


def test_nesting_has_an_end(tmp_path: Path) -> None:
    deep = functools.reduce(lambda inner, _: [inner], range(98), 1)
    tree = {"deep": deep}
    assert same(back(tmp_path, tree), tree)
    ring: list[Any] = []
    ring.append(ring)
    for bad in ([[deep]], ring):
        with pytest.raises(TypeError, match=r"tree\['deep'\]\[0\]\[0\]\.\.\.: nested more than 100 deep"):
            save(tmp_path, 1, {"deep": bad})


def test_arguments(tmp_path: Path) -> None:
    for step, keep in ((-1, 2), (True, 2), (1.0, 2), (1, 0)):
        with pytest.raises(ValueError, match="step must be"):
            save(tmp_path, step, {}, keep)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tree: a dict is needed, not list"):
        save(tmp_path, 1, [])  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_nothing_there(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "missing") is None
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-0000000012").mkdir()
    (tmp_path / ".step-000000012.new-1-ab").mkdir()  # killed within its first save: nothing was ever finished
    assert latest(tmp_path) is None


# -- damage --------------------------------------------------------------------------------------------------------


def flipped(blob: bytes, bit: int) -> bytes:
    found = bytearray(blob)
    found[bit // 8] ^= 1 << bit % 8
    return bytes(found)


def test_random_bit_flips(two: Path) -> None:
    """All of 500, over all the bytes of all the files alike: none is harmless here."""
    rng = random.Random(0)
    whole = {name: (newest(two) / name).read_bytes() for name in FILES}
    all_bits = [(name, bit) for name, blob in whole.items() for bit in range(8 * len(blob))]
    hit = set()
    for name, bit in rng.sample(all_bits, 500):
        (newest(two) / name).write_bytes(flipped(whole[name], bit))
        assert_went_back(two, "is damaged (")
        (newest(two) / name).write_bytes(whole[name])
        hit.add(name)
    assert hit == set(FILES)
    found = latest(two)
    assert found is not None
    assert (found.step, found.notices) == (1200, ())


def test_every_bit_of_a_manifest(two: Path) -> None:
    path = newest(two) / MANIFEST
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        path.write_bytes(flipped(whole, bit))
        with pytest.raises(Exception):  # noqa: B017, PT011
            checkpoint.checked(newest(two), 1200)
    path.write_bytes(whole)
    checkpoint.checked(newest(two), 1200)


def test_every_truncation(two: Path) -> None:
    for name in FILES:
        path = newest(two) / name
        whole = path.read_bytes()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            assert_went_back(two, "is damaged (")
        path.write_bytes(whole + b"\n")
        assert_went_back(two, "is damaged (")
        path.write_bytes(whole)


def test_the_reason_is_told(two: Path) -> None:
    path = newest(two) / TENSORS
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"x")
    found = latest(two)
    assert found is not None
    assert found.notices == (
        "checkpoint of step 1200 is damaged (state.safetensors: SHA-256 does not fit): going back to step 1100",
    )
    path.write_bytes(whole[:-1])
    assert_went_back(two, f"({TENSORS}: {len(whole) - 1} bytes, not {len(whole)})")
    (newest(two) / MANIFEST).write_bytes(b" " * 100_000)
    assert_went_back(two, "(manifest.json: 100000 bytes, not a few hundred)")


def forge(path: Path, contents: dict[str, bytes] | None = None, **changes: Any) -> None:
    """Contents of another's making, under a manifest that fits them."""
    facts = json.loads((path / MANIFEST).read_bytes())
    del facts["sha256"]
    for name, blob in (contents or {}).items():
        (path / name).write_bytes(blob)
        facts["files"][name] = {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
    (path / MANIFEST).write_bytes(checkpoint.sealed({**facts, **changes}))


def replaced(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Something else in a file's place."""

    def act(path: Path) -> None:
        (path / name).rename(path.parent / "taken")
        make(path / name)

    return act


def renamed(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-000001100"), path)


def linked(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"x")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**42)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty folder": lambda path: [file.unlink() for file in path.iterdir()],
    "a file for a folder": a_file,
    "a link for a folder": linked,
    "another step's name": renamed,
    **{f"{name} missing": replaced(name, lambda path: None) for name in FILES},
    **{f"{name} a folder": replaced(name, lambda path: path.mkdir()) for name in FILES},
    **{f"{name} a pipe": replaced(name, os.mkfifo) for name in FILES},
    **{f"{name} a link": replaced(name, lambda path: path.symlink_to(path.parent.parent / "taken")) for name in FILES},
    **{f"{name} a link to itself": replaced(name, lambda path: path.symlink_to(path)) for name in FILES},
    **{f"{name} of 4 TB": replaced(name, sparse) for name in FILES},
    **{
        f"manifest {text[:12]!r}": replaced(MANIFEST, lambda path, text=text: path.write_bytes(text))  # type: ignore[misc]
        for text in (b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 60_000, b"1" * 5000, b'{"a":NaN}', b'"\\ud800"')
    },
    "format 2": lambda path: forge(path, format=2),
    "step of another": lambda path: forge(path, step=1100),
    "files elsewhere": lambda path: forge(path, {"../../x": b"x"}),
    **{
        f"files {value!r}"[:40]: lambda path, value=value: forge(path, files=value)
        for value in (
            *(None, 7, {}),
            [TREE, TENSORS],
            {TREE: 1, TENSORS: 2},
            {TREE: {}, TENSORS: {}},
            {TREE: {"bytes": 10**400, "sha256": ""}, TENSORS: {"bytes": -1, "sha256": None}},
        )
    },
    **{
        f"tree {text[:14]!r}": lambda path, text=text: forge(path, {TREE: text})
        for text in (
            *(b"", b"{", b"7", b"[]", b"\xff", b"[" * 10**6, b'{"a":' * 10**5, b"1" * 10**4, b'{"$tuple": []}'),
            *(b'{"a": {"$tensor": "no"}}', b'{"$int": "zz"}', b'{"a": {"$int": "zz"}}', b'{"a": {"$float": "00"}}'),
        )
    },
    **{
        f"tensors {text[:14]!r}": lambda path, text=text: forge(path, {TENSORS: text})
        for text in (
            *(b"", b"\xff" * 8, b"\xff" * 800, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 2) + b"{}x"),
            struct.pack("<Q", 64) + b'{"x":{"dtype":"F32","shape":[%d],"data_offsets":[0,4]}}' % 2**62,
            struct.pack("<Q", 64) + b'{"0/w":{"dtype":"F4","shape":[0,9],"data_offsets":[0,0]}}'.ljust(64),
        )
    },
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_of_every_kind(two: Path, what: str) -> None:
    DAMAGE[what](newest(two))
    assert_went_back(two, "is damaged (")
    save(two, 1300, small(1300))  # and a later save keeps the good one for it
    names = {path.name for path in two.iterdir() if path.name.startswith("step")}
    assert names == {"step-000001100", "step-000001300"}


@given(st.sampled_from([TREE, TENSORS]), st.data())
@settings(max_examples=150, deadline=None)
def test_forged_contents_never_crash(name: str, data: st.DataObject) -> None:
    """Garbage under a manifest that fits it: the parsers' own errors stay inside."""
    blob = base()[name]
    at = data.draw(st.integers(0, len(blob)))
    garbage = blob[:at] + data.draw(st.binary(max_size=12)) + blob[data.draw(st.integers(at, len(blob))) :]
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), 1, small(1))
        forge(path, {name: garbage})
        with contextlib.suppress(GrowpruneError):
            found = latest(Path(folder))
            assert found is not None
            assert found.step == 1


@functools.cache
def base() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), 1, small(1))
        return {name: (path / name).read_bytes() for name in FILES}


def test_no_good_one_left(two: Path) -> None:
    for path in two.iterdir():
        (path / TREE).unlink()
    with pytest.raises(GrowpruneError) as error:
        latest(two)
    words = (
        "none of the checkpoints in it is whole: step 1200 is damaged (state.json: No such file",
        "delete this folder",
    )
    assert all(word in str(error.value) for word in (str(two), *words))
    assert "\n" not in str(error.value)


def test_a_file_that_may_not_be_read(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.open

    def refusing(path: Any, *rest: Any, **named: Any) -> int:
        if Path(path) == newest(two) / TREE:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return really(path, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    assert_went_back(two, "(state.json: Permission denied)")


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(GrowpruneError, match="file: cannot be searched for checkpoints: Not a directory"):
        latest(tmp_path / "file")


def test_what_is_checked_is_what_is_parsed(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is opened once."""
    opened: list[str] = []
    really = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(Path(path).name) or really(path, *rest))
    latest(two)
    assert sorted(opened) == sorted(FILES)


# -- how many are kept ---------------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    assert not list(folder.glob(".*"))
    return sorted(int(path.name[5:]) for path in folder.iterdir())


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints whose contents were read."""
    found: list[str] = []
    really = checkpoint.checked
    monkeypatch.setattr(checkpoint, "checked", lambda path, step: found.append(path.name) or really(path, step))
    return found


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_are_kept(tmp_path: Path, keep: int, hashed: list[str]) -> None:
    for step in range(1, 8):
        save(tmp_path, 10 * step, small(step), keep)
        assert steps(tmp_path) == [10 * s for s in range(max(1, step - keep + 1), step + 1)]
    assert hashed == []  # those of our own making are not read again


def test_a_damaged_newest_is_not_kept_for_a_good_one(two: Path) -> None:
    path = newest(two) / TENSORS
    path.write_bytes(flipped(path.read_bytes(), 100))  # at once: within the same tick of the kernel's clock
    save(two, 1300, small(1300))
    assert steps(two) == [1100, 1300]
    save(two, 1400, small(1400))
    assert steps(two) == [1300, 1400]


def test_files_bear_a_finer_time_than_the_kernel_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else damage within a few milliseconds of the saving would pass for what was saved."""
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_123_456_789)
    path = save(tmp_path, 1, small(1))
    assert {(path / name).stat().st_mtime_ns for name in FILES} == {1_700_000_000_123_456_789}


def test_a_run_that_went_back(two: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[str]) -> None:
    """A new process reads each one at most once, and the damaged one ahead of it goes with its first save."""
    monkeypatch.setattr(checkpoint, "_known", {})
    (newest(two) / TREE).write_bytes(b"{}")
    assert_went_back(two)
    save(two, 1150, small(1150))
    assert steps(two) == [1100, 1150]
    assert hashed.count("step-000001100") == 1
    save(two, 1200, small(1200))
    assert steps(two) == [1150, 1200]


def test_damaged_ones_stay_until_enough_are_good(two: Path) -> None:
    for step in (1100, 1200):
        (two / f"step-{step:09d}" / TREE).write_bytes(b"{}")
    save(two, 1300, small(1300))
    assert steps(two) == [1100, 1200, 1300]
    save(two, 1400, small(1400))
    assert steps(two) == [1300, 1400]


def test_others_are_checked_before_they_count(two: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[str]) -> None:
    """Saved by another process, and never read by this one."""
    monkeypatch.setattr(checkpoint, "_known", {})
    save(two, 1300, small(1300))
    assert hashed == ["step-000001200"]
    assert steps(two) == [1200, 1300]


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-best").mkdir()
    for step in range(4):
        save(tmp_path, step, small(step), keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "step-best", "step-000000003"}


def test_the_same_step_again(tmp_path: Path) -> None:
    for step, value in ((1, 1), (2, 2), (2, 3), (2, 4), (1, 5)):
        save(tmp_path, step, small(value))
    assert steps(tmp_path) == [1, 2]
    assert same(checkpoint.read(tmp_path / "step-000000001", 1), small(5))
    found = latest(tmp_path)
    assert found is not None
    assert same(found.tree, small(4))


def test_the_same_step_alone(tmp_path: Path) -> None:
    for value in (1, 2):
        assert same(back(tmp_path, small(value)), small(value))
    assert steps(tmp_path) == [7]


def test_the_same_step_over_what_is_none(tmp_path: Path) -> None:
    (tmp_path / "step-000000007").write_text("a file")
    assert same(back(tmp_path, small(1)), small(1))
    assert steps(tmp_path) == [7]


def test_one_set_aside_is_found(two: Path) -> None:
    """A process was killed between setting the old one aside and giving the new one its name."""
    newest(two).rename(two / ".step-000001200.old-4711-ab")
    found = latest(two)
    assert found is not None
    assert (found.step, found.notices, same(found.tree, small(1200))) == (1200, (), True)
    (newest(two)).mkdir()
    found = latest(two)
    assert found is not None
    assert found.step == 1200
    assert found.notices[0].endswith("No such file or directory): using an earlier one of the same step")
    save(two, 1300, small(1300))
    assert [path.name for path in sorted(two.iterdir())] == [".step-000001200.old-4711-ab", "step-000001300"]
    save(two, 1400, small(1400))
    assert steps(two) == [1300, 1400]


def test_it_is_quick(tmp_path: Path) -> None:
    """No byte is handled by Python: 40 MB in a moment, twice."""
    tree = {"w": torch.zeros(10_000_000)}
    save(tmp_path, 0, {"w": torch.zeros(1)})
    start = time.process_time()
    save(tmp_path, 1, tree)
    latest(tmp_path)
    assert time.process_time() - start < 2
