"""Exported files: they compute what the network does, say what it expects, and nothing else is ever written."""

from __future__ import annotations

import copy
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import growprune as gp
from growprune import cli, data, demo, exporting, formats, run
from growprune.asking import Export
from growprune.formats import FORMATS
from growprune.proof import apart
from growprune.weights import restore
from strategies import randomize
from test_cli import growprune_says

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

BOTH = [".onnx", ".pt2"]
NEAR = 1e-5
"""Of the largest output: what is allowed is ten times that, and what is seen a thirtieth."""


# -- networks --------------------------------------------------------------------------------------------------------


class Mobile(nn.Module):
    """What mobile networks have: depthwise convolutions, squeeze-and-excitation, hard activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish())
        self.widen = nn.Sequential(nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU6())
        self.depth = nn.Sequential(nn.Conv2d(24, 24, 3, 1, 1, groups=24, bias=False), nn.BatchNorm2d(24), nn.ReLU6())
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(24, 6, 1), nn.ReLU(), nn.Conv2d(6, 24, 1))
        self.narrow = nn.Sequential(nn.Conv2d(24, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.depth(self.widen(x))
        x = x + self.narrow(y * self.gate(y).sigmoid())
        return self.head(x.mean((2, 3)))


class Sight(nn.Module):
    """A small vision transformer, written as people write them: `len(x)` is a number to the quick tracer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.first, self.place = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.blocks(x)[:, 0])


class Tiny(nn.Module):
    """Takes no time to export."""

    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Any:
        x = self.bn1(self.conv1(x)).relu()
        return self.fc(self.bn2(self.conv2(x)).relu().mean((2, 3)))


class Single(Tiny):
    """Knows of one image."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.reshape(1, *x.shape[1:]))


class Parts(Tiny):
    """Gives several things, and takes whatever comes."""

    def forward(self, *x: Tensor) -> Any:
        y = super().forward(x[0])
        return {"scores": y, "more": (y.exp(), None), "best": y.argmax(1)}


class Branch(Tiny):
    """What it computes hangs on what it sees: no file can hold that."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class Bessel(Tiny):
    """ONNX has no such function."""

    def forward(self, x: Tensor) -> Any:
        return torch.special.bessel_j0(super().forward(x))


class Same(Tiny):
    def forward(self, x: Tensor) -> Any:
        return 0 * super().forward(x) + 1


class Roots(Tiny):
    def forward(self, x: Tensor) -> Any:
        return (super().forward(x) - 1000).sqrt()


class Talkative(Tiny):
    def forward(self, x: Tensor) -> Any:
        print("to stdout")
        print("to stderr", file=sys.stderr)
        warnings.warn("a warning", stacklevel=1)
        logging.getLogger("theirs").error("a log")
        return super().forward(x)


def resnet18() -> nn.Module:
    return pytest.importorskip("torchvision.models").resnet18(num_classes=5)


CASES: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
    "weights": (Tiny, "3x8x8", {"ratios": 0.7, "granularity": "weight"}),
    "mobile": (Mobile, "3x12x12", {"ratios": 0.5, "coupled": True}),
    "sight": (Sight, "3x16x16", {"ratios": 0.5}),
    "resnet18": (resnet18, "3x32x32", {"ratios": 0.9}),
    "tiny": (Tiny, "3x8x8", {}),
}
FILES = [*(f"{name}{suffix}" for name in ("weights", "mobile", "sight") for suffix in BOTH), "resnet18.onnx"]


def named(build: Callable[[], nn.Module]) -> str:
    return f"{'test_export' if build.__module__ == __name__ else build.__module__}:{build.__name__}"


def prepared(folder: Path, name: str) -> Export:
    """A network with statistics of its own, pruned, saved, and how it is asked for."""
    build, shape, how = CASES[name]
    torch.manual_seed(0)
    net = randomize(build(), torch.Generator().manual_seed(0))
    if how:
        example = torch.randn(1, *map(int, shape.split("x")))
        net = gp.Pruner(net, example, schedule=gp.OneShot(), **how).compact()
    gp.save(net, folder / f"{name}.safetensors")
    return Export(model=named(build), weights=str(folder / f"{name}.safetensors"), input=shape)


def loaded(file: Path) -> Callable[[Tensor], list[Tensor]]:
    """An exported file as whoever gets it would run it."""
    if file.suffix == ".pt2":
        module = torch.export.load(file).module()
        return lambda x: [t for t in torch.utils._pytree.tree_leaves(module(x)) if t is not None]
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda x: [torch.from_numpy(each) for each in session.run(None, {"input": x.numpy()})]


def facts(file: Path) -> dict[str, Any]:
    if file.suffix == ".pt2":
        torch.export.load(file, extra_files=(extra := {"growprune.json": ""}))
        return json.loads(extra["growprune.json"])
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return json.loads(session.get_modelmeta().custom_metadata_map["growprune"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def tiny(place: Path) -> Export:
    return prepared(place, "tiny")


@pytest.fixture(scope="module")
def made(place: Path) -> Callable[[str], tuple[Path, dict[str, Any], nn.Module]]:
    """A file of `FILES`, what was told of it, and the network: each is exported once."""

    @cache
    def of(name: str) -> tuple[Path, dict[str, Any], nn.Module]:
        order = replace(prepared(place, name.partition(".")[0]), out=str(place / name))
        return place / name, exporting.export(order), network(order)

    return of


def network(order: Export) -> nn.Module:
    return restore(order.model or "", order.num_classes, order.weights or "").eval().requires_grad_(False)


# -- what the file computes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_the_file_computes_what_the_network_does(made: Any, name: str) -> None:
    """For any number of inputs; and it is whole, in one file, and says nothing of the machine that made it."""
    file, result, net = made(name)
    runs = loaded(file)
    for batch in (1, 2, 5):
        x = torch.randn(batch, *result["input"])
        assert apart(runs(x), [net(x)]) < NEAR
    assert (result["file"], result["bytes"]) == (str(file), file.stat().st_size)
    assert result["params"] == sum(p.numel() for p in net.parameters())
    assert (result["proof"]["batches"], result["proof"]["difference"] < NEAR) == ([1, 3], True)
    assert result["proof"]["by"] == ("torch" if file.suffix == ".pt2" else "onnxruntime")
    assert facts(file).items() <= result.items()
    assert not [path for path in file.parent.iterdir() if path.name.startswith((f".{name}", f"{name}."))]
    blob = file.read_bytes()
    assert not [word for word in (b".py", b"pkg.", str(Path.home()).encode(), bytes(file.parent)) if word in blob]
    if file.suffix == ".onnx":
        graph = onnx.load(file, load_external_data=False).graph
        assert {each.data_location for each in graph.initializer} == {onnx.TensorProto.DEFAULT}
        assert [each.name for each in (*graph.input, *graph.output)] == ["input", "output"]


@pytest.mark.parametrize("suffix", BOTH)
def test_weights_that_were_pruned_are_zero_in_the_file_and_cost_nothing_more(made: Any, suffix: str) -> None:
    """What holds them at zero is for training: it goes into no file."""
    file, result, net = made(f"weights{suffix}")
    zeros = sum(int((m.weight == 0).sum()) for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear))
    if suffix == ".pt2":
        program = torch.export.load(file)
        assert set(program.state_dict) == set(Tiny().state_dict())
        assert program.constants == {}
        found = sum(int((t == 0).sum()) for name, t in program.state_dict.items() if t.dim() > 1)
    else:
        stored = [onnx.numpy_helper.to_array(each) for each in onnx.load(file).graph.initializer]
        found = sum(int((each == 0).sum()) for each in stored if each.ndim > 1)
    assert found == zeros > 0.4 * result["params"]
    assert result["zeros"] == zeros / result["params"]


@pytest.mark.parametrize("suffix", BOTH)
def test_the_size_of_a_batch_can_be_fixed(tiny: Export, tmp_path: Path, suffix: str) -> None:
    result = exporting.export(replace(tiny, out=str(tmp_path / f"fixed{suffix}"), batch=2))
    runs, x = loaded(tmp_path / f"fixed{suffix}"), torch.randn(3, 3, 8, 8)
    assert apart(runs(x[:2]), [network(tiny)(x[:2])]) < NEAR
    assert (result["batch"], result["proof"]["batches"]) == (2, [2])
    assert result["macs"] == gp.measure(network(tiny), x[:1]).macs
    with pytest.raises(Exception, match=r"(?i)expected|guard failed"):
        runs(x)


def test_a_network_of_coarse_numbers_is_written_in_float32(tiny: Export, tmp_path: Path) -> None:
    net = network(tiny).bfloat16()
    gp.save(net, tmp_path / "coarse.safetensors")
    order = replace(tiny, weights=str(tmp_path / "coarse.safetensors"), out=str(tmp_path / "coarse.pt2"))
    assert exporting.export(order)["outputs"] == [{"shape": [4], "type": "float32"}]
    x = torch.randn(2, 3, 8, 8)
    assert apart(loaded(tmp_path / "coarse.pt2")(x), [net.float()(x)]) < NEAR


@pytest.mark.parametrize("suffix", BOTH)
def test_several_outputs_keep_their_order(tiny: Export, tmp_path: Path, suffix: str) -> None:
    order, x = replace(tiny, model="test_export:Parts", out=str(tmp_path / f"parts{suffix}")), torch.randn(5, 3, 8, 8)
    result, wanted = exporting.export(order), network(order)(x)
    found = loaded(tmp_path / f"parts{suffix}")(x)
    for own, theirs in zip((wanted["scores"], wanted["more"][0], wanted["best"]), found, strict=True):
        assert apart([theirs], [own]) < NEAR
    assert result["outputs"] == [
        {"shape": [4], "type": "float32"}, {"shape": [4], "type": "float32"}, {"shape": [], "type": "int64"}
    ]  # fmt: skip
    if suffix == ".onnx":
        graph = onnx.load(tmp_path / "parts.onnx").graph
        assert [each.name for each in (*graph.input, *graph.output)] == ["input", "output0", "output1", "output2"]
        shapes = [each.type.tensor_type.shape.dim for each in (*graph.input, *graph.output)]
        sizes = [[dim.dim_param or dim.dim_value for dim in shape] for shape in shapes]
        assert sizes == [["batch", 3, 8, 8], ["batch", 4], ["batch", 4], ["batch"]]


# -- a run, by command -----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the demo's network, pruned."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    gp.save(demo.network(), folder / "first.safetensors")
    code, _, err = growprune_says(
        "prune", "--data", "digits", "--model", demo.MODEL_NAME, "--device", "cpu", "--threads", 1,
        "--weights", folder / "first.safetensors", "--batch", 64, "--lr", 0.05, "--epochs", 2, "--prune-batch", 64,
        "--delta-lambda", 0.25, "--ku", 1, "--ks", 2, "--out", folder / "run", "--json",
    )  # fmt: skip
    assert code == 0, err
    return folder / "run"


def test_a_runs_network_goes_into_its_folder_and_tells_pictures_as_well_as_the_run_says(
    finished: Path,
) -> None:
    """Given the images as the run normalised them."""
    code, out, err = growprune_says("export", finished, "--json")
    assert (code, err) == (0, "")
    result, ran = json.loads(out), json.loads((finished / "result.json").read_text())
    file = finished / "model.onnx"
    assert (result["file"], result["model"], result["input"]) == (str(file), demo.MODEL_NAME, [1, 8, 8])
    assert (result["classes"], result["normalization"]) == (10, ran["normalization"])
    assert (result["params"], result["macs"]) == (ran["params"]["after"], ran["macs"]["after"])
    assert result["latency"]["ratio"] == result["latency"]["torch"] / result["latency"]["onnxruntime"]
    assert facts(file).items() <= result.items()
    digits: Any = data.load("digits").test
    mean, std = (torch.tensor(facts(file)["normalization"][key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    scores = loaded(file)((digits.x.permute(0, 3, 1, 2) / 255 - mean) / std)[0]
    right = 100 * float((scores.argmax(1) == digits.y).double().mean())
    assert right == pytest.approx(ran["accuracy"]["final"], abs=0.2), "but for one image"
    assert right > 30


def test_a_demos_folder_is_a_run_and_its_own_file_is_replaced(finished: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "result.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"command": "demo", "seed": 0}))
    (tmp_path / "model.onnx").write_bytes(b"of another time")
    with chdir(tmp_path.parent):
        code, out, err = growprune_says("export", tmp_path.name)
    assert (code, err) == (0, "")
    found, ran = facts(tmp_path / "model.onnx"), json.loads((finished / "result.json").read_text())
    assert (found["model"], found["normalization"]) == (demo.MODEL_NAME, ran["normalization"])
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    for said in (
        f"{demo.MODEL_NAME} in {tmp_path.name}/model.onnx ", " file ONNX, opset ",
        f" parameters {ran['params']['after']:,} ", " input float32, N x 1x8x8 ", " output float32, N x 10 ",
        " run by onnxruntime, batch 1 and 3 off by ", " time on one thread, torch ",
        " expects pixels / 255, less mean, by std ", f" mean {found['normalization']['mean'][0]:.4f} ",
    ):  # fmt: skip
        assert said in words


@pytest.mark.parametrize("suffix", BOTH)
def test_a_raw_file_normalises_pixels_as_the_trainer_does(tiny: Export, tmp_path: Path, suffix: str) -> None:
    """Each channel by its own numbers."""
    scale = {"mean": [0.1, 0.5, 0.9], "std": [0.2, 0.3, 0.4]}
    (tmp_path / "model.safetensors").write_bytes(Path(tiny.weights or "").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"command": "train", "model": tiny.model, "data": "pets"}))
    (tmp_path / "result.json").write_text(json.dumps({"shape": [3, 8, 8], "classes": 4, "normalization": scale}))
    code, out, err = growprune_says("export", tmp_path, "--raw", "--out", tmp_path / f"raw{suffix}", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["type"], result["raw"], result["normalization"]) == ("uint8", True, scale)
    assert facts(tmp_path / f"raw{suffix}")["expects"] == "pixels as they are, 0 to 255"
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    normal = data.Normal(SimpleNamespace(**scale), "cpu")  # type: ignore[arg-type]
    assert apart(loaded(tmp_path / f"raw{suffix}")(images), [network(tiny)(normal(images))]) < NEAR


def test_what_a_killed_export_leaves_in_a_run_is_swept_up(finished: Path) -> None:
    for name in (".model.onnx.ab12_xyz", ".model.pt2.ab12_xyz"):
        assert run.SCRAP.fullmatch(name)
    assert not run.SCRAP.fullmatch("model.onnx")


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "export: give the folder of a run, or --model, --weights and --input (no --weights here)"),
        ("--weights W --input 3x8x8 --out a.onnx", "(no --model here)"),
        ("--weights W --model M --out a.onnx", "(no --input here)"),
        ("nowhere", "nowhere: no such folder; give the folder of a run: its --out, by default in runs/"),
        ("RUN --weights W", "export: give the folder of a run (RUN) or --weights, not both"),
        ("RUN --out net.pth", "--out: 'net.pth' must end in .onnx (ONNX) or .pt2 (torch.export)"),
        ("RUN --out net", "--out: 'net' must end in .onnx (ONNX) or .pt2 (torch.export)"),
        ("RUN --out none/net.onnx", "--out: no folder none; make it, or name another file"),
        ("RUN --out FILE/net.onnx", "--out: no folder FILE; make it, or name another file"),
        ("RUN --out folder.pt2", "--out: folder.pt2 is a folder; name a file"),
        ("RUN --out there.onnx", "--out: there.onnx is there already; name another file, or add --replace"),
        ("RUN --out link.pt2", "--out: link.pt2 is there already; name another file, or add --replace"),
        ("RUN --batch 0", "--batch: 0 must be 1 or more"),
        ("RUN --input 3x", "--input: '3x' is no shape"),
        ("RUN --input 3x8x8 --out a.pt2", "--model growprune.demo:network --input 3x8x8: the model fails on the exam"),
        ("RUN --input 3x8x8 --out a.pt2", "; its first convolution takes 1 channel: give --input 1x8x8\n"),
        ("RUN --model vgg91", "did you mean 'vgg19'?"),
        ("RUN --model resnet20 --out a.pt2", "of another network: the file lacks 'layer1.2."),
        ("unfinished", "weights 'unfinished': a run that is not finished: growprune resume unfinished"),
        ("--weights W --model M --input 3x8x8", "export: name the file to write, as --out small.onnx"),
        ("--weights W --model M --input 3x8x8 --out a.onnx --raw", "--raw: how images are normalised is known of a"),
        ("--weights FILE --model M --input 3x8x8 --out a.onnx", "FILE: damaged, or no state dict that can be read"),
        ("--weights none --model M --input 3x8x8 --out a.onnx", "weights 'none': no such file"),
        ("--weights CUT --model M --input 3x8x8 --out a.onnx", "CUT: cut short"),
        ("--weights W --model test_export:Roots --input 3x8x8 --out a.pt2", "puts out NaN for random numbers"),
        ("--weights W --model test_export:Branch --input 3x8x8 --out a.pt2", "cannot be exported to .pt2; try a .onnx"),
        ("--weights W --model test_export:Bessel --input 3x8x8 --out a.onnx", "to .onnx; try a .pt2 file (DispatchErr"),
        ("--weights W --model test_export:Single --input 3x8x8 --out a.pt2",
         "cannot be exported to .pt2, but for one input at a time: give --batch 1 (RuntimeError: shape '[1, 3"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_leaves_nothing(
    finished: Path, tiny: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = Path(tiny.weights or "").read_bytes()
    for name, blob in (("W", weights), ("CUT", weights[:-9]), ("FILE", b"precious"), ("there.onnx", b"precious")):
        (tmp_path / name).write_bytes(blob)
    (tmp_path / "link.pt2").symlink_to("nowhere")
    (tmp_path / "folder.pt2").mkdir()
    for name, files in (("RUN", ("config.json", "result.json", "model.safetensors")), ("unfinished", ("config.json",))):
        (tmp_path / name).mkdir()
        for each in files:
            (tmp_path / name / each).write_bytes((finished / each).read_bytes())
    before = {path: path.read_bytes() if path.is_file() else None for path in tmp_path.rglob("*")}
    code, out, err = growprune_says("export", *(tiny.model if word == "M" else word for word in arguments.split()))
    assert (code, out) == (2, "")
    assert re.fullmatch(r"growprune: [^\n]+\n", err)
    assert said in err
    assert {path: path.read_bytes() if path.is_file() else None for path in tmp_path.rglob("*")} == before


def refused(order: Export, words: str, *others: str) -> None:
    """In one line; and of the file nothing is there, or what was there before."""
    file = Path(order.out or "")
    before = sorted((path, path.read_bytes()) for path in file.parent.iterdir() if path.is_file())
    with pytest.raises(gp.GrowpruneError) as caught:
        exporting.export(order)
    assert "\n" not in str(caught.value)
    for each in (words, *others):
        assert each in str(caught.value)
    assert sorted((path, path.read_bytes()) for path in file.parent.iterdir() if path.is_file()) == before


def absent(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    for name in packages:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("packages", "said"),
    [(("onnx",), "needs the package onnx, which is not installed; run: pip install onnx onnxruntime ("),
     (("onnxscript",), "needs the package onnxscript, which is not installed; run: pip install onnxscript onnxruntime"),
     (("onnx", "onnxscript"), "needs onnx and onnxscript, which are not installed; run: pip install onnx onnxscript")],
)  # fmt: skip
def test_missing_packages_are_named(
    tiny: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: tuple[str, ...], said: str
) -> None:
    """Before the network is made; a .pt2 file needs none of them."""
    absent(monkeypatch, *packages)
    exporting.export(replace(tiny, out=str(tmp_path / "net.pt2")))
    monkeypatch.setattr(exporting, "restore", lambda *_: pytest.fail("the network was made"))
    refused(replace(tiny, out=str(tmp_path / "net.onnx")), said)


def test_without_a_runtime_the_file_is_checked_and_said_not_to_have_run(
    made: Any, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent(monkeypatch, "onnxruntime")
    file, told, _ = made("weights.onnx")
    blobs = [file.read_bytes(), file.read_bytes(), file.read_bytes()[:-1]]
    ready = replace(FORMATS[".onnx"], write=lambda *_: (blobs.pop(0), {"opset": told["opset"]}))
    monkeypatch.setitem(FORMATS, ".onnx", ready)
    order = replace(prepared(place, "weights"), out=str(tmp_path / "net.onnx"))
    asked = ("--model", order.model, "--weights", order.weights, "--input", order.input, "--out", order.out)
    code, out, err = growprune_says("export", *asked)
    assert (code, err) == (0, "")
    assert out.endswith("\nwritten, not run: pip install onnxruntime\n")
    assert (tmp_path / "net.onnx").read_bytes() == file.read_bytes()
    result = exporting.export(replace(order, replace=True))
    assert (result["proof"], result["latency"]) == (None, None)
    refused(replace(order, replace=True), "net.onnx: not written: it does not run (", "; try a .pt2 file")


def test_a_folder_that_may_not_be_written_to_is_refused(
    tiny: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any work; root may write anywhere, so the answer is given here."""
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    monkeypatch.setattr(exporting, "restore", lambda *_: pytest.fail("the network was made"))
    refused(replace(tiny, out=str(tmp_path / "net.pt2")), f"--out: {tmp_path} may not be written to; name a file else")


def test_a_full_disk_leaves_what_was_there(tiny: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "net.pt2").write_bytes(b"of another time")
    monkeypatch.setattr("os.fsync", full)
    refused(replace(tiny, out=str(tmp_path / "net.pt2"), replace=True), "net.pt2: cannot be written: No space left on")


def test_a_network_too_large_for_onnx_is_refused_before_it_is_traced(
    tiny: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FORMATS[".onnx"].limit == 2**31 - 1
    monkeypatch.setitem(FORMATS, ".onnx", replace(FORMATS[".onnx"], limit=2000))
    monkeypatch.setattr(formats, "traced", lambda *_, **__: pytest.fail("it was traced"))
    refused(replace(tiny, out=str(tmp_path / "net.onnx")), "--out: no ONNX file can hold ", "only 2 GB; name a .pt2")


def test_a_network_of_one_image_is_exported_for_one(tiny: Export, tmp_path: Path) -> None:
    order = replace(tiny, model="test_export:Single", out=str(tmp_path / "one.pt2"), batch=1)
    x = torch.randn(1, 3, 8, 8)
    exporting.export(order)
    assert apart(loaded(tmp_path / "one.pt2")(x), [network(order)(x)]) < NEAR


# -- the proof -------------------------------------------------------------------------------------------------------


def damage(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], nn.Module]:
    """Another network: one weight is not what it was."""

    def spoilt(net: nn.Module) -> nn.Module:
        net = copy.deepcopy(net)
        weight = net.get_parameter(name)
        with torch.no_grad():
            weight.view(-1)[3] = value(weight.view(-1)[3])
        return net

    return spoilt


class Cut(nn.Module):
    """Gives one score less."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net.eval()
        self.training = False

    def forward(self, x: Tensor) -> Any:
        return self.net(x)[:, 1:]


@pytest.mark.parametrize(
    ("spoilt", "how"),
    [
        (damage("conv1.weight", lambda w: w + 0.01), "e-04"),
        (damage("fc.weight", lambda w: -w), "e-0[12]"),
        (damage("fc.weight", lambda w: w * torch.nan), "nan"),
        (damage("fc.weight", lambda w: w * torch.inf), "(nan|inf)"),
        (Cut, "inf"),
        (lambda net: copy.deepcopy(net).train(), "e-0[12]"),
    ],
    ids=["a hundredth", "a sign", "NaN", "infinite", "shape", "training mode"],
)
def test_a_file_that_computes_something_else_is_refused(
    tiny: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: Any, how: str
) -> None:
    traced = formats.traced
    monkeypatch.setattr(formats, "traced", lambda net, *more, **how: traced(spoilt(net), *more, **how))
    order, file = replace(tiny, out=str(tmp_path / "net.pt2")), tmp_path / "net.pt2"
    with pytest.raises(gp.GrowpruneError) as caught:
        exporting.export(order)
    assert re.match(rf"{re.escape(str(file))}: not written: its outputs are \S*{how}\S* of the largest away from the "
                    r"network's own, more than rounding \(1e-04\); try a \.onnx file, or give --batch 1$",
                    str(caught.value))  # fmt: skip
    assert [*tmp_path.iterdir()] == []


def test_it_is_the_files_bytes_that_are_proved(tiny: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one weight, the largest of its exponent, changed after the exporter was done."""

    def flipped(program: Any, facts: str) -> tuple[bytes, dict[str, Any]]:
        blob, more = formats.to_onnx(program, facts)
        model = onnx.load_from_string(blob)
        weight = next(each for each in model.graph.initializer if each.name == "fc.weight")
        raw = bytearray(weight.raw_data)
        raw[3] ^= 0x40
        weight.raw_data = bytes(raw)
        return model.SerializeToString(), more

    (tmp_path / "net.onnx").write_bytes(b"of another time")
    monkeypatch.setitem(FORMATS, ".onnx", replace(FORMATS[".onnx"], write=flipped))
    refused(replace(tiny, out=str(tmp_path / "net.onnx"), replace=True), "not written: its outputs are ")


def test_every_batch_counts(tiny: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is right for one input alone."""
    read = FORMATS[".pt2"].read

    def wrong(blob: bytes) -> Any:
        runs = read(blob)
        return lambda x: [t * (1 + (len(x) > 1)) for t in runs(x)]  # type: ignore[misc]

    monkeypatch.setitem(FORMATS, ".pt2", replace(FORMATS[".pt2"], read=wrong))
    refused(replace(tiny, out=str(tmp_path / "net.pt2")), "its outputs are 1.0e+00 of the largest away")


def test_a_network_that_always_says_the_same_proves_nothing(tiny: Export, tmp_path: Path) -> None:
    """As one whose head is still all zeros; that is said, and no difference is claimed."""
    order = replace(tiny, model="test_export:Same", out=str(tmp_path / "net.pt2"))
    code, out, err = growprune_says(
        "export", "--model", order.model, "--weights", order.weights, "--input", order.input, "--out", order.out
    )
    assert (code, err) == (0, "")
    assert out.endswith("\nrun, but the network puts out the same whatever goes in: no proof\n")
    assert exporting.export(replace(order, replace=True))["proof"] is None


# -- manners ---------------------------------------------------------------------------------------------------------


def test_what_exporters_and_networks_say_is_not_heard(
    tiny: Export, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """stdout is JSON and nothing else; and afterwards all is as it was."""
    threads, out = torch.get_num_threads(), tmp_path / "net.onnx"
    asked = ("--model", "test_export:Talkative", "--weights", tiny.weights, "--input", "3x8x8", "--out", out)
    logging.getLogger("theirs").addHandler(handler := logging.StreamHandler(sys.stderr))  # torch's own has such a one
    torch.set_num_threads(2)
    torch.backends.mha.set_fastpath_enabled(True)
    try:
        with pytest.raises(SystemExit) as left:
            cli.main([str(each) for each in ("export", *asked, "--json")])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
        logging.getLogger("theirs").removeHandler(handler)
    said = capfd.readouterr()
    assert (left.value.code, said.err) == (0, "")
    assert json.loads(said.out)["file"] == str(out)
    assert logging.root.manager.disable == 0
    assert torch.backends.mha.get_fastpath_enabled()
    with pytest.warns(UserWarning, match="a warning"):
        Talkative()(torch.randn(1, 3, 8, 8))
