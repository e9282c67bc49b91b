"""The demo, run for real at a small scale: what it writes, what it may not touch, and that GReg-1 does its work."""

import base64
import json
import re
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import growprune as gp
from growprune import demo, report
from growprune.demo import DemoConfig, Images, Lab, Watch, run

SMALL = DemoConfig(device="cpu", base_epochs=6, delta_lambda=0.0125, ks=40, finetune_epochs=2)
"""The demo's own data and batches with a fifth of its steps: enough for the base network to learn."""

TINY = DemoConfig(
    device="cpu", train_images=256, base_epochs=1, delta_lambda=0.25, ks=3, finetune_epochs=1, longer=True
)
"""For tests that need a whole run but no good one."""

FILES = {"config.json", "metrics.jsonl", "result.json", "model.safetensors", "report.html"}
FIGURES = {"course", "separation", "widths"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "new" / "demo"
    run(SMALL, out)
    return out


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.fixture(scope="module")
def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_every_file_and_no_other(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES | {f"{name}.png" for name in FIGURES}
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
    assert list(dict.fromkeys(n["phase"] for n in greg)) == ["start", "push", "stabilize", "removal", "fine-tune"]
    base, pruned = SMALL.base_epochs * 18, SMALL.schedule.total_steps
    assert {n["phase"]: n["step"] for n in greg} == {  # where each phase ends
        "start": base,
        "push": base + SMALL.schedule.push_steps,
        "stabilize": base + pruned,
        "removal": base + pruned,
        "fine-tune": base + pruned + 36,
    }
    lambdas = [n["lambda"] for n in greg if "lambda" in n]
    assert lambdas == sorted(lambdas)
    assert (lambdas[0], lambdas[-1]) == (0.0, pytest.approx(1.0125))
    tuned = [n["accuracy"] for n in greg if n["phase"] == "fine-tune"]
    assert (tuned[-1], max(tuned)) == (result["accuracy"]["final"], result["accuracy"]["best"])
    first, last = greg[0]["layers"]["layer3.0.conv1"], greg[-4]["layers"]["layer3.0.conv1"]
    assert (len(first["norms"]), len(first["gone"])) == (32, 29)
    assert min(set(first["norms"]) - {first["norms"][i] for i in first["gone"]}) >= max(
        first["norms"][i] for i in first["gone"]
    )  # least L1 norm first
    assert last["pruned"] / last["kept"] < 0.01 < 0.5 < first["pruned"] / first["kept"]


def test_the_saved_network_has_the_accuracy_that_is_reported(folder: Path, result: dict[str, Any]) -> None:
    net = gp.load(folder / "model.safetensors", demo.network).eval()
    images = demo.digits(SMALL.train_images, "cpu")
    assert gp.measure(net, images.test[:1]).params == result["params"]["after"]
    right = (net(images.test).argmax(1) == images.test_labels).float().mean()
    assert 100 * float(right) == pytest.approx(result["accuracy"]["final"])


def test_the_page_holds_its_figures(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    inside = re.findall(r'<img alt="(\w+)" src="data:image/png;base64,([^"]+)"', page)
    assert {name for name, _ in inside} == FIGURES
    for name, source in inside:
        assert base64.b64decode(source) == (folder / f"{name}.png").read_bytes()
        assert base64.b64decode(source).startswith(b"\x89PNG")
    assert set(re.findall(r"(?:src|href)=(.{6})", page)) == {'"data:'}  # nothing from elsewhere


# -- what the comparison rests on ------------------------------------------------------------------------------------


def test_training_never_sees_a_test_image() -> None:
    images = demo.digits(1200, "cpu")
    assert (len(images.train), len(images.test)) == (1200, 597)
    blind = replace(images, test=torch.full_like(images.test, torch.nan), labels=torch.arange(1200))
    blank = float(images.train.min())
    for x, y in demo.batches(blind, 64, 20, seed=3):
        assert x.shape == (64, 1, 8, 8)
        for image, index in zip(x[:8], y[:8].tolist(), strict=True):
            assert any(torch.equal(image, shifted) for shifted in shifts(images.train[index], blank))


def shifts(image: Tensor, blank: float) -> list[Tensor]:
    padded = torch.full((1, 10, 10), blank)
    padded[:, 1:9, 1:9] = image
    return [padded[:, i : i + 8, j : j + 8] for i in range(3) for j in range(3)]


def test_an_epoch_shows_every_image_once_and_the_seed_decides_the_order() -> None:
    images = replace(demo.digits(256, "cpu"), labels=torch.arange(256))
    first, again, other = ([y for _, y in demo.batches(images, 64, 8, seed)] for seed in (5, 5, 6))
    assert sorted(torch.cat(first[:4]).tolist()) == sorted(torch.cat(first[4:]).tolist()) == list(range(256))
    assert torch.equal(torch.cat(first), torch.cat(again))
    assert not torch.equal(torch.cat(first), torch.cat(other))


def test_every_way_is_fine_tuned_on_the_same_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    original = demo.batches

    def watched(images: Images, batch: int, steps: int, seed: int) -> Any:
        asked.append((steps, seed))
        return original(images, batch, steps, seed)

    monkeypatch.setattr(demo, "batches", watched)
    result = run(replace(TINY, seed=1), tmp_path / "demo")
    base, prune, greg, oneshot, longer = asked
    assert greg == oneshot
    assert len({base[1], prune[1], greg[1]}) == 3
    assert longer == (prune[0] + greg[0], greg[1])
    assert result["longer"]["steps"] == result["steps"]
    assert "one-shot, longer" in (tmp_path / "demo" / "report.html").read_text()


def test_other_filters_one_shot_than_by_greg1_are_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = count()
    monkeypatch.setattr(demo, "Pruner", lambda *a, **k: gp.Pruner(*a, **k, criterion="random", seed=next(seeds)))
    with Watch(TINY.total_steps) as watch, pytest.raises(AssertionError, match="lost other filters"):
        demo.compare(Lab(TINY, demo.digits(256, "cpu"), watch), demo.network())


def test_the_same_demo_may_run_again_into_its_folder_and_the_seed_decides_everything(tmp_path: Path) -> None:
    first = run(TINY, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "course.png").unlink()
    torch.manual_seed(1234)  # what the caller has drawn must not matter, nor may the demo draw from it
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    again = run(TINY, tmp_path)
    assert (torch.get_num_threads(), torch.equal(torch.get_rng_state(), state)) == (threads, True)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == after.keys()
    timed = {"result.json", "report.html"}  # these say how long it took
    assert [name for name in before if before[name] != after[name] and name not in timed] == []
    assert all(first[key] == again[key] for key in ("accuracy", "widths", "macs"))
    assert all(first[way]["accuracy"] == again[way]["accuracy"] for way in ("baseline", "longer"))


def test_another_seed_is_another_run() -> None:
    with Watch(2 * TINY.total_steps) as watch:
        labs = [Lab(replace(TINY, seed=seed), demo.digits(256, "cpu"), watch) for seed in (0, 1)]
        for lab in labs:
            torch.manual_seed(0)
            lab.train(demo.network(), "base", "train", 0, [0.1] * 4)
    assert labs[0].notes != labs[1].notes


# -- the folder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"thesis.tex": "years of work"}, "not empty, and not a demo's folder; name another folder with --out"),
        ({"config.json": '{"command": "train"}'}, "not a demo's folder"),
        ({"config.json": "[1]"}, "not a demo's folder"),
        ({"config.json": "\x80 no json"}, "not a demo's folder"),
        ({"config.json": json.dumps({"command": "demo", **asdict(replace(TINY, seed=7))})}, "seed 7, not 0"),
        ({"config.json": json.dumps({"command": "demo", **asdict(replace(TINY, ratio=0.5))})}, "ratio 0.5, not 0.9"),
    ],
)
def test_a_folder_of_something_else_is_refused_and_left_as_it_is(
    tmp_path: Path, there: dict[str, str], said: str
) -> None:
    for name, text in there.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(gp.GrowpruneError, match=re.escape(said)):
        run(TINY, tmp_path)
    assert {path.name: path.read_text(encoding="latin-1") for path in tmp_path.iterdir()} == there


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ratio": 1.0}, "ratio: 1.0 is outside"),
        ({"ratio": 0.0}, "ratio: 0.0 is outside"),
        ({"ku": 0}, "ku must be"),
        ({"device": "tpu"}, "device: 'tpu' cannot be used here"),
        ({"device": "cuda:99"}, "device: 'cuda:99' cannot be used here"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(gp.GrowpruneError, match=re.escape(said)):
        run(replace(TINY, **change), tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


# -- progress --------------------------------------------------------------------------------------------------------


def test_progress_off_a_terminal_is_one_plain_line_a_phase(capsys: pytest.CaptureFixture[str]) -> None:
    with Watch(3) as watch:
        watch.begin("GReg-1: prune", 3)
        for step in range(3):
            watch.step(90.0 + step, 0.25)
        watch.end()
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"GReg-1: prune: 3 steps, λ 0\.250, accuracy 92\.0 %, \d+\.\d s\n", err)


def test_progress_on_a_terminal_shows_phase_penalty_accuracy_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    with Watch(4) as watch:
        watch.begin("GReg-1: prune", 4)
        for _ in range(2):
            watch.step(92.0, 0.25)
        watch.bars.refresh()
    out, err = capsys.readouterr()
    assert out == ""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", err)
    assert re.search(r"in all .* 50%", plain)
    assert re.search(r"GReg-1: prune .* 50% λ 0\.250 92\.0 % [-\d]", plain)
