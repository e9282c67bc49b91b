"""The demo, run for real at a small scale: what it writes, what it may not touch, and that GReg-1 does its work."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import growprune as gp
from growprune import cli, data, demo, report
from growprune.demo import DemoConfig, run

SMALL = DemoConfig(device="cpu", base_epochs=6, delta_lambda=0.0125, ks=40, finetune_epochs=2)
"""The demo's own data and batches with a fifth of its steps: enough for the base network to learn."""

TINY = DemoConfig(device="cpu", base_epochs=1, delta_lambda=0.25, ks=3, finetune_epochs=1, longer=True)
"""For tests that need a whole run but no good one."""

FILES = {"config.json", "metrics.jsonl", "result.json", "model.safetensors", "report.html", ".lock"}
FOLDERS = {"base", "greg1", "oneshot"}
FIGURES = {"course", "separation", "widths"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "new" / "demo"
    run(SMALL, out, quiet=True)
    return out


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.fixture(scope="module")
def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_every_file_and_no_other(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES | FOLDERS | {f"{name}.png" for name in FIGURES}
    assert json.loads((folder / "config.json").read_text()) == {"command": "demo", **asdict(SMALL)}


def test_the_result_keeps_the_contract(result: dict[str, Any]) -> None:
    promised = [
        "accuracy",
        "params",
        "macs",
        "speedup",
        "sparsity",
        "model",
        "data",
        "latency",
        "steps",
        "seconds",
        "seed",
        "schedule",
        "criterion",
        "granularity",
        "ratios",
        "environment",
        "baseline",
    ]
    assert set(promised) <= set(result)
    for way in (result, result["baseline"]):
        assert set(way["accuracy"]) == {"base", "before_removal", "after_removal", "final", "best"}
        assert all(0 <= value <= 100 for value in way["accuracy"].values())
        assert way["accuracy"]["best"] >= way["accuracy"]["final"]
        assert way["steps"] == sum(way["phases"].values())
    assert "longer" not in result
    assert result["params"] == {"before": 43_490, "after": 4_478}
    assert result["speedup"] == pytest.approx(result["macs"]["before"] / result["macs"]["after"])
    assert result["sparsity"] == pytest.approx(1 - 4_478 / 43_490)
    assert result["latency"]["ratio"] == pytest.approx(result["latency"]["before"] / result["latency"]["after"])
    assert result["schedule"] == {"name": "GReg1", **asdict(SMALL.schedule)}
    assert result["phases"] == {"prune": SMALL.schedule.total_steps, "finetune": 2 * 18}
    assert result["widths"]["layer1.0.conv1"] == [8, 1]
    assert result["widths"]["layer3.1.conv1"] == [32, 3]


def test_greg1_comes_to_removal_with_what_one_shot_has_lost(result: dict[str, Any]) -> None:
    greg, oneshot = result["accuracy"], result["baseline"]["accuracy"]
    assert greg["base"] == oneshot["base"] == oneshot["before_removal"] > 90
    assert greg["after_removal"] > oneshot["after_removal"] + 30
    assert greg["final"] > oneshot["final"]


def test_the_notes_tell_the_course(result: dict[str, Any], notes: list[dict[str, Any]]) -> None:
    greg = [note for note in notes if note["method"] == report.GREG]
    assert list(dict.fromkeys(n["phase"] for n in greg)) == ["start", "push", "stabilize", "removal", "finetune"]
    base, pruned = SMALL.base_epochs * 18, SMALL.schedule.total_steps
    assert {n["phase"]: n["step"] for n in greg} == {  # where each phase ends
        "start": base,
        "push": base + SMALL.schedule.push_steps,
        "stabilize": base + pruned,
        "removal": base + pruned,
        "finetune": base + pruned + 36,
    }
    lambdas = [n["lambda"] for n in greg if "lambda" in n]
    assert lambdas == sorted(lambdas)
    assert (lambdas[0], lambdas[-1]) == (0.0, pytest.approx(1.0125))
    tuned = [n["accuracy"] for n in greg if n["phase"] == "finetune"]
    assert (tuned[-1], max(tuned)) == (result["accuracy"]["final"], result["accuracy"]["best"])
    first, last = greg[0]["layers"]["layer3.0.conv1"], greg[-4]["layers"]["layer3.0.conv1"]
    assert (len(first["norms"]), len(first["gone"])) == (32, 29)
    assert min(set(first["norms"]) - {first["norms"][i] for i in first["gone"]}) >= max(
        first["norms"][i] for i in first["gone"]
    )  # least L1 norm first
    assert last["pruned"] / last["kept"] < 0.01 < 0.5 < first["pruned"] / first["kept"]


def test_the_saved_network_has_the_accuracy_that_is_reported(folder: Path, result: dict[str, Any]) -> None:
    net = gp.load(folder / "model.safetensors", demo.network).eval()
    digits = data.load("digits")
    assert isinstance(digits.test, data.Part)
    images = data.Normal(digits, "cpu")(digits.test.x.permute(0, 3, 1, 2))
    assert gp.measure(net, images[:1]).params == result["params"]["after"]
    right = (net(images).argmax(1) == digits.test.y).float().mean()
    assert 100 * float(right) == pytest.approx(result["accuracy"]["final"], abs=1e-3)


def test_the_page_holds_its_figures(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    inside = re.findall(r'<img alt="(\w+)" src="data:image/png;base64,([^"]+)"', page)
    assert {name for name, _ in inside} == FIGURES
    for name, source in inside:
        assert base64.b64decode(source) == (folder / f"{name}.png").read_bytes()
        assert base64.b64decode(source).startswith(b"\x89PNG")
    assert set(re.findall(r"(?:src|href)=(.{6})", page)) == {'"data:'}  # nothing from elsewhere


# -- what the comparison rests on ------------------------------------------------------------------------------------


def test_every_way_is_fine_tuned_alike_and_longer_has_as_many_steps(tmp_path: Path) -> None:
    result = run(replace(TINY, seed=1), tmp_path / "demo", quiet=True)
    configs = {
        name: json.loads((tmp_path / "demo" / name / "config.json").read_text()) for name in FOLDERS | {"longer"}
    }
    differ = {key for key in configs["greg1"] if configs["greg1"][key] != configs["oneshot"][key]}
    assert differ == {"schedule"}
    assert {key for key in configs["oneshot"] if configs["oneshot"][key] != configs["longer"][key]} == {"epochs"}
    assert result["steps"] <= result["longer"]["steps"] < result["steps"] + demo.EPOCH
    assert "one-shot, longer" in (tmp_path / "demo" / "report.html").read_text()


def test_other_filters_one_shot_than_by_greg1_are_no_comparison() -> None:
    removals = [
        {"method": report.GREG, "phase": "removal", "gone": {"conv": [1, 2]}},
        {"method": report.ONESHOT, "phase": "removal", "gone": {"conv": [1, 3]}},
    ]
    with pytest.raises(AssertionError, match="'conv' lost other filters by one-shot"):
        demo.agree(removals)
    demo.agree([removals[0], {**removals[1], "gone": {"conv": [1, 2]}}])


def test_the_seed_decides_everything_and_the_caller_is_left_alone(tmp_path: Path) -> None:
    first = run(TINY, tmp_path / "a", quiet=True)
    torch.manual_seed(1234)  # what the caller has drawn must not matter, nor may the demo draw from it
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    again = run(TINY, tmp_path / "b", quiet=True)
    assert (torch.get_num_threads(), torch.equal(torch.get_rng_state(), state)) == (threads, True)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert all(first[key] == again[key] for key in ("accuracy", "widths", "macs"))
    assert all(first[way]["accuracy"] == again[way]["accuracy"] for way in ("baseline", "longer"))
    other = run(replace(TINY, seed=2), tmp_path / "c", quiet=True)
    assert other["accuracy"] != first["accuracy"]


def test_its_page_can_be_made_anew(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["report", str(folder), "--out", str(tmp_path / "page.html")])
    assert (left.value.code, capsys.readouterr().err) == (0, "")
    assert (tmp_path / "page.html").read_text() == (folder / "report.html").read_text()


def test_a_finished_demo_is_not_done_twice(folder: Path, result: dict[str, Any]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert run(SMALL, folder, quiet=True) == result
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_a_killed_demo_is_resumed_to_the_same_bits(folder: Path, result: dict[str, Any], tmp_path: Path) -> None:
    """kill -9 while GReg-1 pushes, then `growprune resume`: the same network, bit for bit."""
    out = tmp_path / "demo"
    settings = {**asdict(SMALL), "save_every": 0.0}
    code = (
        f"from growprune.demo import *; from pathlib import Path; run(DemoConfig(**{settings!r}), Path({str(out)!r}))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not list((out / "greg1" / "checkpoints").glob("step-*5")) and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not (out / "greg1" / "result.json").exists()
    done = subprocess.run(
        [sys.executable, "-m", "growprune", "resume", str(out), "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["accuracy"] == result["accuracy"]
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert "going on at step" in done.stderr


# -- the folder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"thesis.tex": "years of work"}, "not empty, and not a run's folder; name another folder with --out"),
        ({"config.json": '{"command": "train"}'}, "holds a run of 'train'; name another folder with --out"),
        ({"config.json": "[1]"}, "damaged: not what growprune writes"),
        ({"config.json": "\x80 no json"}, "damaged: not JSON"),
        (
            {"config.json": json.dumps({"command": "demo", **asdict(replace(TINY, seed=7))})},
            "holds a run with --seed 7, not 0",
        ),
        (
            {"config.json": json.dumps({"command": "demo", **asdict(replace(TINY, ratio=0.5))})},
            "holds a run with --ratio 0.5, not 0.9",
        ),
    ],
)
def test_a_folder_of_something_else_is_refused_and_left_as_it_is(
    tmp_path: Path, there: dict[str, str], said: str
) -> None:
    for name, text in there.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(gp.GrowpruneError, match=re.escape(said)):
        run(TINY, tmp_path)
    left = {path.name: path.read_text(encoding="latin-1") for path in tmp_path.iterdir() if path.name != ".lock"}
    assert left == there


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ratio": 1.0}, "ratio: 1.0 is outside"),
        ({"ratio": 0.0}, "ratio: 0.0 is outside"),
        ({"ku": 0}, "ku must be"),
        ({"device": "tpu"}, "device: 'tpu' cannot be used here"),
        ({"device": "cuda:99"}, "--device cuda:99: no "),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(gp.GrowpruneError, match=re.escape(said)):
        run(replace(TINY, **change), tmp_path / "demo")
    assert not (tmp_path / "demo").exists()
