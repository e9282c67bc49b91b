"""Files: what was saved comes back bit for bit, or is refused in one line."""

import copy
import errno
import json
import os
import pickle
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import growprune as gp
from growprune import storage
from growprune.checks import itself
from growprune.models import create
from strategies import AT_ONCE_OR_NONE, DEAD, Case, cases, conv, randomize

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


class Tiny(nn.Module):
    """A few hundred bytes, so that every one of them can be damaged."""

    def __init__(self, width: int = 4, out: int = 3) -> None:
        super().__init__()
        self.one = conv(1, width, 1)
        self.two = conv(width, 4, 1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.two(self.one(x).relu())).mean((2, 3)))


def tiny(granularity: str = "filter") -> nn.Module:
    torch.manual_seed(0)
    model = Tiny()
    randomize(model, torch.Generator().manual_seed(0))
    example = torch.randn(2, 1, 3, 3)
    return gp.Pruner(model, example, schedule=gp.OneShot(), granularity=granularity).compact()


def assert_same(a: nn.Module, b: nn.Module) -> None:
    """Bit for bit: every tensor, its type, what is shared with what, and each module's own numbers."""
    for mine, theirs in ((a.named_parameters, b.named_parameters), (a.named_buffers, b.named_buffers)):
        left, right = list(mine(remove_duplicate=False)), list(theirs(remove_duplicate=False))
        assert [name for name, _ in left] == [name for name, _ in right]
        for (name, t), (_, u) in zip(left, right, strict=True):
            assert (t.dtype, t.shape) == (u.dtype, u.shape), name
            assert torch.equal(t.detach().view(-1).view(torch.uint8), u.detach().view(-1).view(torch.uint8)), name
    assert str(a) == str(b)


def refused(path: Path, build: Callable[[], nn.Module] = Tiny) -> str:
    with pytest.raises(gp.GrowpruneError) as caught:
        gp.load(path, build)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    assert path.name in message
    return message


def tried(path: Path) -> nn.Module | None:
    """The network, or None if the file was refused as it should be."""
    try:
        return gp.load(path, Tiny)
    except gp.GrowpruneError:
        refused(path)
        return None


def header_of(path: Path) -> dict[str, Any]:
    blob = path.read_bytes()
    return json.loads(blob[8 : 8 + struct.unpack("<Q", blob[:8])[0]])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.safetensors"
    gp.save(tiny(), path)
    return path


# -- round trips -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(DEAD, AT_ONCE_OR_NONE)
@settings(deadline=None, max_examples=60, suppress_health_check=SLOW)
@given(
    case=cases(),
    kind=st.sampled_from(["filter", "coupled", "weight", "unpruned"]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    mode=st.booleans(),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, case: Case, kind: str, dtype: torch.dtype, mode: bool
) -> None:
    def build() -> nn.Module:
        return randomize(copy.deepcopy(original), torch.Generator().manual_seed(7))

    original = copy.deepcopy(case.model)
    small = case.model
    if kind != "unpruned":
        granularity = "weight" if kind == "weight" else "filter"
        try:
            pruner = gp.Pruner(
                small, case.example, schedule=gp.OneShot(), granularity=granularity, coupled=kind == "coupled"
            )
        except gp.GrowpruneError as error:
            assume("no layer of this model can be pruned" not in str(error))
            raise
        small = pruner.compact()
    small.to(dtype)
    path = tmp_path_factory.getbasetemp() / "round.safetensors"
    gp.save(small, path)
    loaded = gp.load(path, build)
    assert_same(small, loaded)
    x = case.example.to(dtype) if case.example.is_floating_point() else case.example
    assert torch.equal(small.train(mode)(x), loaded.train(mode)(x))
    shared = [n for n, _ in small.named_parameters(remove_duplicate=False)], len(list(small.parameters()))
    assert shared == ([n for n, _ in loaded.named_parameters(remove_duplicate=False)], len(list(loaded.parameters())))
    assert all(p.is_leaf and p.requires_grad for p in loaded.parameters())


def test_saving_changes_nothing(tmp_path: Path) -> None:
    small = tiny()
    before = copy.deepcopy(small)
    gp.save(small, tmp_path / "a")
    gp.save(small, str(tmp_path / "b"))
    assert_same(small, before)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_strange_numbers_come_back(tmp_path: Path) -> None:
    """Negative zero, the smallest and the largest: copied, not computed."""
    model = nn.Linear(4, 1)
    model.weight.data = torch.tensor([[-0.0, 1e-45, 3.4e38, torch.inf]])
    gp.save(model, tmp_path / "a")
    assert_same(gp.load(tmp_path / "a", lambda: nn.Linear(4, 1)), model)


def test_a_kept_weight_that_happens_to_be_zero_comes_back_and_trains(tmp_path: Path) -> None:
    """Held at zero is what the mask says, not what the value is."""
    small = tiny("weight")
    keep = (small.fc.weight != 0).nonzero()[0]
    with torch.no_grad():
        small.fc.weight[tuple(keep)] = 0.0
    gp.save(small, tmp_path / "a")
    loaded = gp.load(tmp_path / "a", Tiny)
    loaded(torch.randn(4, 1, 3, 3)).square().sum().backward()
    assert loaded.fc.weight.grad[tuple(keep)] != 0


class Masked(nn.Module):
    """Buffers whose names end as our own do, among them one beside the weight it masks (MADE, attention)."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)
        self.weight = nn.Parameter(torch.randn(2, 2))
        self.register_buffer("weight_mask", torch.rand(2, 2))
        self.register_buffer("attn_mask", torch.rand(3))
        self.register_buffer("causal_mask", torch.rand(2) > 0.5, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x * self.attn_mask).relu()) @ (self.weight * self.weight_mask)


@pytest.mark.parametrize("granularity", ["filter", "weight", "unpruned"])
def test_masks_of_the_users_own_come_back(tmp_path: Path, granularity: str) -> None:
    small = Masked()
    if granularity != "unpruned":
        ratios = {"one": 0.5} if granularity == "filter" else {"two": 0.5}
        pruner = gp.Pruner(small, torch.randn(2, 3), schedule=gp.OneShot(), granularity=granularity, ratios=ratios)
        small = pruner.compact()
    before = copy.deepcopy(small)
    gp.save(small, tmp_path / "a")
    assert_same(gp.load(tmp_path / "a", Masked), small)
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    small(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(small.weight_mask, before.weight_mask)
    assert not torch.equal(small.weight, before.weight)


def test_zeros_make_the_file_smaller(tmp_path: Path) -> None:
    model = create("resnet20")
    gp.save(model, tmp_path / "dense")
    pruner = gp.Pruner(model, torch.randn(1, 3, 32, 32), schedule=gp.OneShot(), ratios=0.9, granularity="weight")
    gp.save(pruner.compact(), tmp_path / "sparse")
    dense, sparse = ((tmp_path / name).stat().st_size for name in ("dense", "sparse"))
    assert sparse < 0.2 * dense


def test_fewer_filters_make_the_file_smaller(tmp_path: Path) -> None:
    model = create("resnet20")
    gp.save(model, tmp_path / "dense")
    small = gp.Pruner(model, torch.randn(1, 3, 32, 32), schedule=gp.OneShot(), ratios=0.9).compact()
    gp.save(small, tmp_path / "small")
    assert (tmp_path / "small").stat().st_size < 0.25 * (tmp_path / "dense").stat().st_size


def test_the_layout_is_the_builders(tmp_path: Path) -> None:
    """A file knows no layout; a network built channels-last must not lose it by loading."""

    def build() -> nn.Module:
        return create("resnet20", width=4).to(memory_format=torch.channels_last)

    small = gp.Pruner(build(), torch.randn(1, 3, 32, 32), schedule=gp.OneShot()).compact()
    gp.save(small, tmp_path / "a")
    weight = gp.load(tmp_path / "a", build).layer1[0].conv2.weight
    assert weight.shape == (4, 2, 3, 3)
    assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, lambda m: torch.compile(m, backend="eager"), torch.optim.swa_utils.AveragedModel],
    ids=["parallel", "compiled", "averaged"],
)
def test_a_wrapped_network_is_saved_and_loaded_as_itself(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    small = tiny()
    gp.save(wrap(small), tmp_path / "a")
    assert_same(gp.load(tmp_path / "a", Tiny), small)
    loaded = gp.load(tmp_path / "a", lambda: wrap(Tiny()))
    assert isinstance(loaded, type(wrap(Tiny())))
    assert_same(itself(loaded), small)


# -- damage ------------------------------------------------------------------------------------------------------------


def never() -> nn.Module:
    raise AssertionError("a damaged file was taken for a good one")


@pytest.mark.parametrize("granularity", ["filter", "weight"])
def test_every_truncation_is_refused(tmp_path: Path, granularity: str) -> None:
    path = tmp_path / "a.safetensors"
    gp.save(tiny(granularity), path)
    blob = path.read_bytes()
    for length in range(len(blob)):
        path.write_bytes(blob[:length])
        refused(path, never)
    path.write_bytes(blob + b"\0")
    refused(path, never)


@pytest.mark.parametrize("granularity", ["filter", "weight"])
def test_every_kind_of_flipped_bit_is_refused(tmp_path: Path, granularity: str) -> None:
    path = tmp_path / "a.safetensors"
    small = tiny(granularity)
    gp.save(small, path)
    blob = path.read_bytes()
    head = 8 + struct.unpack("<Q", blob[:8])[0]
    padding = range(len(blob[:head].rstrip(b" ")), head)
    random = torch.Generator().manual_seed(0)
    bits = {int(b) for b in torch.randint(0, 8 * len(blob), (500,), generator=random)} | set(range(64))
    for bit in sorted(bits):
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        loaded = tried(path)
        if loaded is not None:
            assert bit // 8 in padding
            assert_same(loaded, small)


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A file with other facts, and a digest that fits them."""
    tensors = safetensors.torch.load(path.read_bytes())
    facts = json.loads(header_of(path)["__metadata__"][storage.KEY])
    change(facts)
    facts.pop("sha256", None)
    facts["sha256"] = storage.digest(safetensors.torch.save(tensors, {storage.KEY: json.dumps(facts, sort_keys=True)}))
    path.write_bytes(safetensors.torch.save(tensors, {storage.KEY: json.dumps(facts, sort_keys=True)}))


def test_another_format_number_is_named(file: Path) -> None:
    forge(file, lambda facts: None)
    gp.load(file, Tiny)  # so it is the number that is refused below, not the forgery
    forge(file, lambda facts: facts.update(format=7))
    assert "format 7" in refused(file, never)


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.pop("numbers"),
        lambda facts: facts.pop("held"),
        lambda facts: facts.update(held={"nowhere.weight": [2, 2]}),
        lambda facts: facts.update(numbers=[1]),
        lambda facts: facts.update(numbers={"one": {"forward": 3}}),
        lambda facts: facts.update(full=[1]),
        lambda facts: facts.update(full={"one.weight": 3}),
        lambda facts: facts.update(full={"nowhere.weight": [2, 2]}),
    ],
    ids=[
        "no numbers",
        "no held",
        "held nowhere",
        "numbers a list",
        "not a number of ours",
        "full a list",
        "full a number",
        "full nowhere",
    ],
)
def test_facts_that_make_no_sense_are_refused(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    forge(file, change)
    loaded = tried(file)
    if loaded is not None:
        loaded(torch.randn(2, 1, 3, 3))  # harmless, then


# -- the wrong file ----------------------------------------------------------------------------------------------------


class More(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


class Line(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Conv1d(4, 3, 1)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (More, "extra"),
        (lambda: nn.Sequential(nn.Linear(3, 3)), "0."),
        (lambda: Tiny(width=1), "one"),
        (lambda: Tiny(out=2), "fc"),
        (Line, "fc.weight"),
    ],
    ids=["lacks a layer", "all different", "narrower", "fewer outputs", "other rank"],
)
def test_a_file_of_another_network(file: Path, build: Callable[[], nn.Module], name: str) -> None:
    message = refused(file, build)
    assert "another network" in message
    assert name in message


def test_a_file_of_another_network_that_has_more(tmp_path: Path) -> None:
    gp.save(More(), tmp_path / "a.safetensors")
    assert "extra" in refused(tmp_path / "a.safetensors", Tiny)


def test_a_file_that_is_not_ours_says_how_a_state_dict_is_loaded(tmp_path: Path) -> None:
    torch.save(Tiny().state_dict(), tmp_path / "sd.pt")
    safetensors.torch.save_file(Tiny().state_dict(), tmp_path / "sd.safetensors")
    for name in ("sd.pt", "sd.safetensors"):
        assert refused(tmp_path / name, never).endswith("; a state dict is loaded by model.load_state_dict")


def test_missing_directory_empty_and_foreign_files(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "nowhere.safetensors", never)
    (tmp_path / "folder").mkdir()
    assert "directory" in refused(tmp_path / "folder", never)
    for name, blob in {"empty": b"", "text": b"hello\n" * 50, "zeros": bytes(1000), "ones": b"\xff" * 1000}.items():
        (tmp_path / name).write_bytes(blob)
        refused(tmp_path / name, never)
    for name, more in {"plain": None, "with metadata": {"format": "pt"}, "half ours": {storage.KEY: "[]"}}.items():
        safetensors.torch.save_file({"one.weight": torch.zeros(2, 2)}, tmp_path / name, more)
        refused(tmp_path / name, never)
    torch.save(Tiny().state_dict(), tmp_path / "pickled")
    refused(tmp_path / "pickled", never)


@pytest.mark.parametrize(
    "build", [Tiny(), None, lambda: None, lambda: 3], ids=["module", "None", "gives None", "gives 3"]
)
def test_what_is_no_builder_is_refused(file: Path, build: Any) -> None:
    with pytest.raises(gp.GrowpruneError, match="build") as caught:
        gp.load(file, build)
    assert "\n" not in str(caught.value)


def test_a_builders_own_error_comes_through(file: Path) -> None:
    def build() -> nn.Module:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gp.load(file, build)


# -- writing -----------------------------------------------------------------------------------------------------------


def unwritable(path: Path) -> str:
    with pytest.raises(gp.GrowpruneError) as caught:
        gp.save(tiny(), path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return str(caught.value)


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    unwritable(tmp_path / "nowhere" / "a.safetensors")
    (tmp_path / "file").write_text("x")
    unwritable(tmp_path / "file" / "a.safetensors")
    unwritable(Path("/proc/a.safetensors"))
    (tmp_path / "folder").mkdir()
    unwritable(tmp_path / "folder")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"], "no scraps"
    assert os.listdir(tmp_path / "folder") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    unwritable(tmp_path / "a.safetensors")


@pytest.mark.parametrize("step", ["fsync", "replace", "write"])
def test_a_failed_save_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    before = file.read_bytes()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if step == "fsync":
            patch.setattr(os, "fsync", full)
        elif step == "replace":
            patch.setattr(Path, "replace", full)
            patch.setattr(os, "replace", full)
        else:
            patch.setattr(os, "fsync", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        if step == "write":
            with pytest.raises(KeyboardInterrupt):
                gp.save(tiny(), file)
        else:
            assert "No space left" in unwritable(file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name], "no scraps"
    gp.load(file, Tiny)


def test_a_file_is_replaced_whole(file: Path) -> None:
    other = tiny("weight")
    gp.save(other, file)
    assert_same(gp.load(file, Tiny), other)


# -- no pickle ---------------------------------------------------------------------------------------------------------


def test_nothing_is_pickled(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pickle")

    for module, names in ((pickle, "load loads dump dumps Unpickler Pickler"), (torch, "load save")):
        for name in names.split():
            monkeypatch.setattr(module, name, forbidden)
    gp.save(tiny(), file)
    gp.load(file, Tiny)


def test_any_safetensors_reader_can_read_it(file: Path) -> None:
    small = tiny()
    found = safetensors.torch.load_file(file)
    assert all(torch.equal(found[name], value) for name, value in small.state_dict().items())


def test_what_a_file_of_tensors_would_lose_is_refused(tmp_path: Path) -> None:
    """A quantised layer keeps its weights in an object, and a module may have a state of its own."""

    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return torch.tensor(7)

    path = tmp_path / "net"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has another way to quantise by now
        quantised = torch.ao.quantization.quantize_dynamic(
            nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 2, 1)), {nn.Linear}
        )
    for net, name in ((quantised, "0._packed_params"), (nn.Sequential(Counting(2, 2)), "0._extra_state")):
        with pytest.raises(gp.GrowpruneError, match=f"'{name}.*would be lost"):
            gp.save(net, path)
        assert not path.exists()


# -- which network a file is of --------------------------------------------------------------------------------------


def images(kernel: int = 3, inputs: int = 1, classes: int = 10, wide: int = 32) -> nn.Module:
    convs = (
        nn.Conv2d(inputs, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, wide, kernel, padding=1),
        nn.ReLU(),
        nn.Conv2d(wide, 16, 1),
    )
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))


X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
SMALLER = {"2": 0.5, "4": 0.25}


@pytest.mark.parametrize(
    "other",
    [{"kernel": 5}, {"inputs": 3}, {"classes": 20}, {"wide": 48}, {"wide": 16}],
    ids=lambda other: next(iter(other)),
)
def test_a_smaller_networks_file_knows_its_full_size(tmp_path: Path, other: dict[str, int]) -> None:
    small = gp.Pruner(images(), X, gp.OneShot(), ratios=SMALLER).compact()
    gp.save(small, tmp_path / "small")
    again = gp.load(tmp_path / "small", images)
    assert torch.equal(again(X), small(X))
    gp.save(copy.deepcopy(again), tmp_path / "again")  # it still knows it
    for name in ("small", "again"):
        with pytest.raises(
            gp.GrowpruneError, match=r"of another network: '\d\.weight' was .* before it was pruned, it is"
        ):
            gp.load(tmp_path / name, lambda: images(**other))


def test_what_was_changed_since_is_of_the_size_that_it_is(tmp_path: Path) -> None:
    """Pruned twice, the classifier replaced, single weights pruned as well."""
    net = images()
    for ratios in (SMALLER, {"2": 0.5}):
        net = gp.Pruner(net, X, gp.OneShot(), ratios=ratios).compact()
    net[7] = nn.Linear(net[7].in_features, 7)
    net = gp.Pruner(net, X, gp.OneShot(), ratios=0.5, granularity="weight").compact()
    gp.save(net, tmp_path / "file")
    again = gp.load(tmp_path / "file", lambda: images(classes=7))
    assert torch.equal(again(X), net(X))
    assert (again[2].out_channels, float((again[4].weight == 0).float().mean())) == (8, 0.5)
    with pytest.raises(gp.GrowpruneError, match=r"'2\.weight' was \(32, 32, 3, 3\) before it was pruned"):
        gp.load(tmp_path / "file", lambda: images(classes=7, kernel=5))


class Dense(nn.Module):
    """Its last layer has no bias, and reads what a norm and an activation make of what vanished."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Conv2d(1, 8, 1), nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16)
        self.c, self.o = nn.Conv2d(16, 8, 1, bias=False), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.b(self.a(x).relu())) + 1.0
        return self.o(self.c(h.sigmoid()).relu())


def test_a_bias_that_folding_gave_comes_back_after_a_second_pruning(tmp_path: Path) -> None:
    net: nn.Module = Dense()
    for _ in range(2):
        net = gp.Pruner(net, X, gp.OneShot(), ratios={"b": 0.25, "c": 0.25}).compact()
    assert net.c.bias.shape == (4,)
    gp.save(net, tmp_path / "file")
    assert torch.equal(gp.load(tmp_path / "file", Dense)(X), net(X))
    assert torch.equal(gp.load(tmp_path / "file", lambda: copy.deepcopy(net))(X), net(X))  # smaller already


def test_a_smaller_network_inside_another_is_known_too(tmp_path: Path) -> None:
    small = gp.Pruner(images(), X, gp.OneShot(), ratios=SMALLER).compact()
    whole = nn.Sequential(small, nn.Linear(10, 3))
    gp.save(whole, tmp_path / "once")
    whole = gp.Pruner(whole, X, gp.OneShot(), ratios={"0.2": 0.5}).compact()
    gp.save(whole, tmp_path / "twice")
    for name in ("once", "twice"):
        gp.load(tmp_path / name, lambda: nn.Sequential(images(), nn.Linear(10, 3)))
        with pytest.raises(gp.GrowpruneError, match=r"'0\.2\.weight' was \(32, 32, 3, 3\) before it was pruned"):
            gp.load(tmp_path / name, lambda: nn.Sequential(images(wide=80), nn.Linear(10, 3)))


class Tables(nn.Module):
    def __init__(self, rows: int = 20, hidden: int = 12) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(rows, 8), nn.LSTM(8, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.words(x))[0].mean((1, 2))


@pytest.mark.parametrize("other", [{"rows": 30}, {"hidden": 16}])
def test_other_files_differ_only_where_filters_lie(tmp_path: Path, other: dict[str, int]) -> None:
    """A kernel's size, a table's rows, a recurrent layer's units are none."""
    gp.save(Tables(), tmp_path / "file")
    with pytest.raises(gp.GrowpruneError, match="of another network"):
        gp.load(tmp_path / "file", lambda: Tables(**other))
    gp.save(images(), tmp_path / "file")
    with pytest.raises(gp.GrowpruneError, match="of another network"):
        gp.load(tmp_path / "file", lambda: images(kernel=5))


def test_a_builder_need_not_hold_data(tmp_path: Path) -> None:
    small = gp.Pruner(images(), X, gp.OneShot(), ratios=SMALLER).compact()
    gp.save(small, tmp_path / "file")

    def bare() -> nn.Module:
        with torch.device("meta"):
            return images()

    assert torch.equal(gp.load(tmp_path / "file", bare)(X), small(X))


def test_what_is_loaded_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    gp.save(images(), tmp_path / "file")
    with torch.inference_mode():
        net = gp.load(tmp_path / "file", images)
    net(X).sum().backward()
    assert net[0].weight.grad is not None


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(gp.GrowpruneError, match="pipe: cannot be written: not a file"):
        gp.save(images(), tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
