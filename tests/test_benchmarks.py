"""Scripts beside the package, as far as a CPU can tell: what they keep, skip and refuse."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import growprune as gp
import pictures
from growprune import keeping
from growprune.config import Prune

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "imagenet.py"
PUSH, TUNE = "push resnet50-1.49", "tune resnet34-1.32"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="a source archive has no benchmarks")


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., object]:
    """The script, with the paper's schedules on a network and images that are tiny; what it leaves with."""
    pictures.write(tmp_path / "images")
    gp.save(pictures.wide(3), tmp_path / "net.safetensors")
    found = runpy.run_path(str(SCRIPT))
    plan, within = found["plan"], found["main"].__globals__

    def small(*given: Any) -> Prune:
        large: Prune = plan(*given)
        weights = str(tmp_path / "net.safetensors")
        own = {"ignore": "", "ratios": "0.5", "model": "pictures:wide", "weights": weights, "resolution": pictures.SIZE}
        return replace(large, **own, threads=1, workers=0, batch=9, prune_batch=3)

    def run(*given: object, images: Path = tmp_path / "images", **instead: Any) -> object:
        within.update({"plan": small} | instead)
        try:
            found["main"](["--images", str(images), "--device", "cpu", "--steps", "2", *map(str, given)])
        except SystemExit as left:
            return left.code
        return 0

    return run


def test_rows_are_kept_as_they_come_and_not_measured_again(
    script: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pushing and fine-tuning, by real steps; the images are read once for all rows."""
    read: list[object] = []
    filled = keeping.filled
    monkeypatch.setattr(keeping, "filled", lambda *given: read.append(given[1]) or filled(*given))
    out = tmp_path / "out.json"
    assert script("--only", f"{PUSH},{TUNE}", "--out", out) == 0
    assert len(read) == 2, "train and test"
    found = json.loads(out.read_text())
    assert found["repeats"] == 2
    assert {name: row["batch"] for name, row in found["steps"].items()} == {PUSH: 3, TUNE: 9}
    assert all(row["ms"] > 0 and row["source"] == found["environment"]["source"] for row in found["steps"].values())
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith(f"{PUSH}: {found['steps'][PUSH]['ms']:.2f} ms a step on ")
    assert said[-1].endswith("; 12 at most on one H200: this is none")

    def fails(asked: Any, config: Prune, kind: str) -> Any:
        if kind == "push":
            raise RuntimeError("killed")
        return {"batch": 1, "ms": 1.0, "choice": ""}, None

    with pytest.raises(RuntimeError, match="killed"):  # in resnet50-1.49's eighth, the second that is missing
        script("--only", "resnet50-2.31,resnet50-1.49", "--out", out, measured=fails)
    after = json.loads(out.read_text())["steps"]
    assert {name: after[name] for name in (PUSH, TUNE)} == found["steps"]
    assert after.keys() - {PUSH, TUNE} == {"tune resnet50-1.49", "tune resnet50-2.31"}
    assert script("--only", "resnet50-2.31", "--out", out, measured=None) == 0
    assert json.loads(out.read_text())["steps"] == after


def test_widths_may_be_multiples(script: Callable[..., object], tmp_path: Path) -> None:
    """Of 4 filters 2 stay by half, 3 in multiples of 3: the steps are of another network, and the file says so."""
    left = []
    for multiple in (1, 3):
        out = tmp_path / f"{multiple}.json"
        assert script("--only", TUNE, "--out", out, "--multiple", multiple) == 0
        found = json.loads(out.read_text())
        assert found["multiple"] == multiple
        left.append(found["steps"][TUNE]["macs"])
    assert left[0] < left[1]
    assert script("--only", TUNE, "--out", tmp_path / "1.json", "--multiple", 3, measured=None) == 2


def test_what_cannot_be_measured_is_told_first(
    script: Callable[..., object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out := tmp_path / "out.json").write_text(before := json.dumps({"steps": {}, "repeats": 3, "environment": {}}))
    own = runpy.run_path(str(SCRIPT))["plan"]
    images = tmp_path / "images"
    for given, instead, line in (
        ((), {"plan": own}, f"--images: 27 training images in {images}, less than a batch (256)"),
        ((), {"images": tmp_path / "none"}, f"--images: no folder {tmp_path / 'none'}"),
        (
            ("--only", "push resnet50-1.5"),
            {},
            f"--only: no row 'push resnet50-1.5', did you mean '{PUSH}'?; there are ",
        ),
        (("--out", out), {}, f"{out}: measured otherwise (device None, not cpu); give another --out"),
    ):
        assert script(*given, **instead, measured=None) == 2
        printed, said = capsys.readouterr()
        assert not printed
        assert said.count("\n") == 1
        assert f": {line}" in said
    assert out.read_text() == before


def test_the_bar_is_said_of_an_h200_only() -> None:
    bar = runpy.run_path(str(SCRIPT))["bar"]
    assert bar({PUSH: {"ms": 12.0}}, "NVIDIA H200").endswith(
        "12.00 ms a step on NVIDIA H200; 12 at most on one H200: met"
    )
    assert bar({PUSH: {"ms": 12.01}}, "NVIDIA H200").endswith(": missed")
    assert bar({}, "x86_64") == f"{PUSH}: not measured"
