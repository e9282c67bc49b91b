"""`growprune report`: finished runs beside each other, from their folders and from reproduce's files."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes

from growprune import report
from growprune.config import Prune, Train
from growprune.errors import GrowpruneError
from growprune.finished import Ran, collected, read
from growprune.report import runs as beside
from test_cli import document, growprune_says
from test_report import Page

RESULTS = Path(__file__).parents[1] / "results" / "paper"


def folder(
    place: Path, final: float | None, course: tuple[float, ...] = (), best: float = 91.0, **options: Any
) -> Path:
    """A run's folder as it is left; not finished without a final accuracy."""
    place.mkdir()
    kind: Any = Train if options.pop("command", "prune") == "train" else Prune
    config = kind(**{"model": "resnet20", "data": "digits", **options})
    (place / "config.json").write_text(json.dumps(config.to_json()))
    notes = [{"stage": "prune", "phase": "push", "epoch": 0.5, "accuracy": 10.0}]
    notes += [{"stage": "finetune", "phase": "finetune", "epoch": i, "accuracy": a} for i, a in enumerate(course, 1)]
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps(note)}\n" for note in notes))
    if final is not None:
        accuracy = {"base": None, "before_removal": None, "after_removal": None, "final": final, "best": best}
        if kind is Prune:
            accuracy |= {"base": 93.0, "before_removal": 92.5, "after_removal": 60.25}
        result = {"accuracy": accuracy, "speedup": 2.5 if kind is Prune else 1.0, "sparsity": 0.6}
        (place / "result.json").write_text(json.dumps(result | {"environment": {"device_name": "here"}}))
    return place


def table(*places: Path) -> list[tuple[str, ...]]:
    return beside.rows(beside.lots(collected(places, print)))


def test_what_only_one_method_has_is_told_beside_the_other(tmp_path: Path) -> None:
    """GReg-1 does not pick; GReg-2's way of picking, if it is not the usual one, is what sets it apart."""
    one = folder(tmp_path / "a", 90.0, ratios="0.5", ku=2)
    other = folder(tmp_path / "b", 90.5, ratios="0.5", ku=2, schedule="greg2", delta_lambda_pick=5e-4)
    once = folder(tmp_path / "c", 88.0, ratios="0.5", schedule="oneshot")
    found = sorted(row[0] for row in table(one, other, once)[1:])
    assert found == ["GReg-1", "GReg-2, delta lambda pick 0.0005", "one-shot pruning"]
    plain = folder(tmp_path / "d", 90.5, ratios="0.5", ku=2, schedule="greg2")
    assert sorted(row[0] for row in table(one, plain)[1:]) == ["GReg-1", "GReg-2"]


def test_runs_that_differ_in_their_seed_alone_are_one_row(tmp_path: Path) -> None:
    """Nor do where and how fast they were computed set them apart."""
    shared: dict[str, Any] = {"ku": 1}
    places = [
        folder(tmp_path / "a", 90.0, ratios="0.5", **shared),
        folder(tmp_path / "b", 90.5, ratios="0.5", seed=1, device="cpu", threads=3, kernels="on", **shared),
        folder(tmp_path / "c", 89.0, ratios="0.7", **shared),
        folder(tmp_path / "d", 88.0, ratios="0.5", schedule="oneshot", seed=3, ku=7, scope="path"),
        folder(tmp_path / "e", 87.0, ratios="0.5", schedule="oneshot"),
    ]
    head, *rows = table(*places)
    assert head[:4] == ("", "fewer MACs", "parameters gone", "base network")
    assert [row[0] for row in rows] == ["GReg-1, ratios 0.5", "GReg-1, ratios 0.7", "one-shot pruning, ratios 0.5"]
    assert rows[0][1:] == (
        "2.50×", "60.0 %", "93.00", "92.50 ± 0.00 (2)", "60.25 ± 0.00 (2)",
        "90.25 ± 0.25 (2)", "−2.75", "91.00 ± 0.00 (2)",
    )  # fmt: skip
    assert rows[1][-3:] == ("89.00", "−4.00", "91.00")
    assert rows[2][-3] == "87.50 ± 0.50 (2)", "of what is pushed one-shot pruning knows nothing"


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"scope": "path"}, "scope path"),
        ({"speedup": 2.5}, "speed-up 2.5×"),
        ({"global_ratio": 0.4}, "global ratio 0.4"),
        ({"ku": 1}, "ku 1"),
        ({"coupled": True}, "coupled"),
        ({"multiple": 8}, "multiple 8"),
        ({"criterion": "random"}, "criterion random"),
        ({"weights": "other"}, "from other"),
        ({"schedule": "greg2"}, "GReg-2"),
        ({"model": "vgg19"}, "vgg19"),
        ({"precision": "fp32"}, "precision fp32"),
    ],
)
def test_what_sets_a_run_apart_is_its_label(tmp_path: Path, options: dict[str, Any], label: str) -> None:
    places = [folder(tmp_path / "usual", 90.0), folder(tmp_path / "other", 90.0, **options)]
    _, usual, other = table(*places)
    assert label in other[0]
    assert label not in usual[0]
    assert usual[0] != other[0]


def test_a_row_is_named_even_if_nothing_sets_it_apart(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", 90.0)
    assert [row[0] for row in table(one)[1:]] == [str(one)]
    two = folder(tmp_path / "two", 90.0, ku=1)
    assert [row[0] for row in table(one, two)[1:]] == ["as usual", "ku 1"]
    trained = folder(tmp_path / "three", 93.0, command="train", epochs=7)
    assert [row[0] for row in table(two, trained)[1:]] == ["GReg-1, ratios 0.5", "trained"]
    assert table(two, trained)[2][1:4] == ("", "", ""), "a network that was trained has lost nothing"


def test_an_option_that_only_some_have_is_told_where_these_differ_in_it(tmp_path: Path) -> None:
    ways = [{"ku": 1}, {"schedule": "oneshot"}, {"ku": 2}, {"schedule": "greg2", "gamma": 0.1}, {"schedule": "greg2"}]
    labels = [row[0] for row in table(*(folder(tmp_path / str(i), 90.0, **way) for i, way in enumerate(ways)))[1:]]
    assert labels == ["GReg-1, ku 1", "GReg-1, ku 2", "one-shot pruning", "GReg-2, gamma 0.1", "GReg-2"]


def test_networks_trained_with_other_seeds_are_one_row_too(tmp_path: Path) -> None:
    """As `train --seed 1` and `prune --seed 1` leave them; not so if another was given."""
    own = [folder(tmp_path / str(seed), 90.0, seed=seed) for seed in (0, 1)]
    other = folder(tmp_path / "other", 90.0, seed=1, weights="runs/train-resnet20-digits")
    assert [row[0] for row in table(*own, other)[1:]] == ["as usual", "from runs/train-resnet20-digits"]


def test_what_goes_with_the_network_is_not_told_beside_it(tmp_path: Path) -> None:
    """Two networks are trained from two base networks, and with two learning rates."""
    own = {"resnet20": {"weights": "a", "lr": "0.1"}, "vgg19": {"weights": "b", "lr": "0.2"}}
    places = [
        folder(tmp_path / f"{m}{s}", 90.0, model=m, schedule=s, **own[m]) for m in own for s in ("greg1", "oneshot")
    ]
    labels = [row[0] for row in table(*places)[1:]]
    assert labels == [f"{model}, {way}" for model in own for way in ("GReg-1", "one-shot pruning")]


def test_a_base_network_is_known_by_its_hash(tmp_path: Path) -> None:
    """Wherever its file lay."""
    places = [folder(tmp_path / str(i), 90.0, seed=i, weights=w) for i, w in enumerate(("here", "there", "there"))]
    for place, known in zip(places, ("1" * 64, "1" * 64, "2" * 64), strict=True):
        found = json.loads((place / "result.json").read_text())
        (place / "result.json").write_text(json.dumps(found | {"base": {"sha256": known}}))
    assert [row[0] for row in table(*places)[1:]] == [f"from {'1' * 8}", f"from {'2' * 8}"]


def test_an_option_that_there_was_not_yet_had_its_default(tmp_path: Path) -> None:
    old, new = folder(tmp_path / "old", 90.0), folder(tmp_path / "new", 91.0, seed=1)
    config = json.loads((old / "config.json").read_text())
    del config["multiple"], config["prune_norm"]
    (old / "config.json").write_text(json.dumps(config))
    assert len(table(old, new)) == 2


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_means_and_deviations(values: list[float]) -> None:
    runs = [Ran(str(i), {"seed": i}, {"accuracy": {"final": v}, "speedup": 1}) for i, v in enumerate(values)]
    (lot,) = beside.lots(runs)
    assert lot.accuracies("final") == values
    said = report.mean(values)
    assert said.startswith(f"{statistics.mean(values):.2f}")
    assert ("±" in said) == (len(values) > 1)
    assert len(values) == 1 or said.endswith(f" ± {statistics.pstdev(values):.2f} ({len(values)})")


def test_one_that_is_not_finished_is_named_and_left_out(tmp_path: Path) -> None:
    done, begun = folder(tmp_path / "done", 90.0), folder(tmp_path / "begun", None)
    heard: list[str] = []
    assert [run.name for run in collected([done, begun, begun / ".." / "done"], heard.append)] == [str(done)]
    assert heard == [f"{begun}: not finished, left out; go on with: growprune resume {begun}"]
    with pytest.raises(GrowpruneError, match="none of these is a finished run"):
        collected([begun], heard.append)


def test_what_is_no_run_is_left_out_beside_others(tmp_path: Path) -> None:
    """As base networks' files beside those of runs, or the folder of a demo."""
    run, file, demo = folder(tmp_path / "run", 90.0), tmp_path / "base.json", tmp_path / "demo"
    file.write_text('{"accuracy": 93.0}')
    demo.mkdir()
    (demo / "config.json").write_text('{"command": "demo"}')
    heard: list[str] = []
    found = collected([file, run / "result.json", demo, tmp_path], heard.append)
    assert [each.name for each in found] == [str(run)]
    assert [line.split(": ")[0] for line in heard] == [str(file), str(demo), str(tmp_path)]
    assert all(line.endswith("; left out") for line in heard)


def test_a_seed_counts_once(tmp_path: Path) -> None:
    """A copy of a run is no second one, nor is the same one done again, elsewhere or on more threads, whose bits and so
    whose end are others."""
    ways: list[dict[str, Any]] = [{}, {}, {"threads": 2}, {"device": "cuda", "decode": "gpu", "workers": 3}]
    places = [folder(tmp_path / str(i), 90.0 + i // 2, **way) for i, way in enumerate(ways)]
    places.insert(1, folder(tmp_path / "seed", 91.5, seed=1, threads=2, tensorboard=True, save_every=1.0))
    (lot,) = beside.lots(collected(places, print))
    assert (lot.accuracies("final"), lot.repeats) == ([90.0, 91.5], 3)
    said = "3 of a seed that is there already, not counted: of each seed the first one given is."
    assert said in beside.remarks([lot])
    (lot,) = beside.lots([lot.runs[0], replace(lot.runs[0])])  # the same file, kept in two folders
    assert (len(lot.runs), lot.repeats) == (1, 1)


def test_where_large_images_were_is_told_by_what_was_done(tmp_path: Path) -> None:
    """On the device they are cropped otherwise. What was asked for says less: small images know no difference."""
    asked = ("auto", "files", "device", "auto", "device")
    places = [folder(tmp_path / str(i), 90.0 + i, seed=i, keep=keep) for i, keep in enumerate(asked)]
    for place in places[3:]:
        found = json.loads((place / "result.json").read_text())
        choices = {"images": {"keep": "device", "decode": "cpu"}}
        (place / "result.json").write_text(json.dumps(found | {"choices": choices}))
    lots = beside.lots(collected(places, print))
    assert [(lot.label, lot.accuracies("final")) for lot in lots] == [
        ("as usual", [90.0, 91.0, 92.0]), ("keep device", [93.0, 94.0]),
    ]  # fmt: skip


def test_what_all_share_is_one_number_else_their_mean(tmp_path: Path) -> None:
    places = [folder(tmp_path / str(i), 90.0, seed=i) for i in range(3)]
    for place, speedup, base in zip(places, (2.5, 2.5, 2.6), (93.0, 93.0, 93.6), strict=True):
        found = json.loads((place / "result.json").read_text())
        found["speedup"], found["accuracy"]["base"] = speedup, base
        (place / "result.json").write_text(json.dumps(found))
    row = table(*places)[1]
    assert (row[1], row[3], row[-2]) == ("2.53× ± 0.05 (3)", "93.20 ± 0.28 (3)", "−3.20")
    row = table(*places[:2])[1]
    assert (row[1], row[3]) == ("2.50×", "93.00")


def test_rows_come_network_by_network_way_by_way_and_by_how_much_goes(tmp_path: Path) -> None:
    ways = [("vgg19", "greg1", 3.0), ("resnet20", "oneshot", 9.0), ("vgg19", "oneshot", 2.0), ("vgg19", "greg1", 2.0)]
    places = []
    for model, schedule, speedup in ways:
        places.append(folder(tmp_path / f"{len(places)}", 90.0, model=model, schedule=schedule, speedup=speedup))
        found = json.loads((places[-1] / "result.json").read_text())
        (places[-1] / "result.json").write_text(json.dumps(found | {"speedup": speedup}))
    assert [row[0] for row in table(*places)[1:]] == [
        "vgg19, GReg-1, speed-up 2×",
        "vgg19, GReg-1, speed-up 3×",
        "vgg19, one-shot pruning, speed-up 2×",
        "resnet20, one-shot pruning, speed-up 9×",
    ]


def test_the_remarks_tell_what_all_have_and_where_they_were_made(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"epochs": 3, "ku": 1}
    places = [folder(tmp_path / way, 90.0, schedule=way, **shared) for way in ("greg1", "oneshot")]
    said = beside.remarks(beside.lots(collected(places, print)))
    assert {*said} >= {"All that were pruned: epochs 3.", "All that were pushed: ku 1."}
    assert not [line for line in said if "different devices" in line]
    found = json.loads((places[0] / "result.json").read_text())
    (places[0] / "result.json").write_text(json.dumps(found | {"environment": None}))
    assert "The runs were made on different devices: ?, here." in beside.remarks(beside.lots(collected(places, print)))


def test_a_page_ends_in_html(tmp_path: Path) -> None:
    """So that a glob after --out costs no result."""
    run = folder(tmp_path / "run", 90.0)
    before = (run / "result.json").read_bytes()
    code, out, err = growprune_says("report", "--out", run / "result.json", run, run)
    assert (code, out, err.endswith("must end in .html\n")) == (2, "", True)
    assert (run / "result.json").read_bytes() == before


def test_notes_and_names_may_hold_anything(tmp_path: Path) -> None:
    run = folder(tmp_path / "a$b$c", 90.0, (80.0, 85.0, 90.0), model="my.$nets$:one")
    with (run / "metrics.jsonl").open("a") as notes:
        notes.write('{"stage": "finetune", "accuracy": "much", "epoch": 4}\n{"stage": "finetune", "accuracy": 5}\n')
    (lot,) = beside.lots(collected([run], print))
    assert len(lot.runs[0].course) == 3
    assert list(beside.figures([lot])) == ["speedup", "courses"]
    for bad in ({"accuracy": {"final": "90"}}, {"base": "x"}, {"speedup": "2"}):
        found = json.loads((run / "result.json").read_text())
        (tmp_path / "bad.json").write_text(json.dumps({**found, "config": {}, **bad}))
        with pytest.raises(GrowpruneError, match="no run's result"):
            read(tmp_path / "bad.json")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", 90.0)
    (file := tmp_path / "table.json").write_text('{"rows": []}')
    for place, why in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path, "not a run's folder"),
        (file, "no run's result"),
    ):
        with pytest.raises(GrowpruneError, match=why):
            read(place)
    (run / "result.json").write_text('{"accuracy": {"base": 1}}')
    with pytest.raises(GrowpruneError, match="no run's result"):
        read(run)
    (run / "result.json").write_text("{")
    with pytest.raises(GrowpruneError, match="not JSON"):
        read(run)
    (run / "config.json").write_text('{"command": "demo"}')
    with pytest.raises(GrowpruneError, match="a demo's folder"):
        read(run)


def test_the_command_prints_a_table_and_leaves_a_page(tmp_path: Path) -> None:
    ways = [("greg1", "0.5", (80.0, 90.0)), ("greg1", "0.8", (70.0, 80.0)), ("oneshot", "0.5", (60.0, 85.0))]
    places = [
        folder(tmp_path / f"{schedule}-{ratio}", course[-1], course, schedule=schedule, ratios=ratio)
        for schedule, ratio, course in ways
    ]
    page = tmp_path / "page.html"
    code, out, err = growprune_says("report", *places, "--out", page)
    assert (code, err) == (0, "")
    assert out.startswith("3 runs: resnet20 on digits\n")
    assert f"Report: {page}" in out
    shown = Page(page.read_text())
    assert shown.row("GReg-1, ratios 0.8")[-3] == "80.00"
    assert [figure for figure in ("speedup", "courses") if f'alt="{figure}"' in page.read_text()] == [
        "speedup",
        "courses",
    ]
    assert shown.row("one-shot pruning, ratios 0.5")[1] == "2.50×"
    code, out, err = growprune_says("report", *places, "--out", page, "--json")
    found = document(out)
    assert (code, err) == (0, "")
    assert [row["label"] for row in found["rows"]] == [f"GReg-1, ratios {r}" for r in (0.5, 0.8)] + [
        "one-shot pruning, ratios 0.5"
    ]
    assert found["rows"][1]["accuracy"]["final"] == {"mean": 80.0, "deviation": 0.0, "runs": [80.0]}
    assert found["runs"][str(places[0])]["config"]["ratios"] == "0.5"


def test_of_one_run_its_own_page_is_made_anew(tmp_path: Path) -> None:
    """And one that is not finished says how to."""
    run = tmp_path / "run"
    config = {"model": "growprune.demo:network", "data": "digits", "epochs": 1, "out": run, "device": "cpu"}
    assert growprune_says("train", *(word for key, value in config.items() for word in (f"--{key}", value)))[0] == 0
    before = (run / "report.html").read_text()
    (run / "report.html").unlink()
    code, out, err = growprune_says("report", run)
    assert (code, err, "trained" in out) == (0, "", True)
    assert out.endswith(f"Report: {run / 'report.html'}\n")
    assert Page((run / "report.html").read_text()).rows == Page(before).rows
    assert document(growprune_says("report", run, "--json")[1])["command"] == "train"
    assert growprune_says("report", run, "--out", tmp_path / "other.html")[0] == 0
    assert (tmp_path / "other.html").read_text() == (run / "report.html").read_text()
    (run / "result.json").unlink()
    code, out, err = growprune_says("report", run)
    assert (code, out, err) == (2, "", f"growprune: {run}: not finished; go on with: growprune resume {run}\n")


def test_courses_are_averaged_as_far_as_all_have_come(tmp_path: Path) -> None:
    places = [folder(tmp_path / "a", 90.0, (80.0, 90.0)), folder(tmp_path / "b", 92.0, (82.0, 88.0, 92.0), seed=1)]
    (lot,) = beside.lots(collected(places, print))
    assert beside.averaged([run.course for run in lot.runs]) == [(1, 81.0), (2, 89.0)]


def test_pictures_of_one_row_and_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is drawn, as long as one can tell them apart."""
    one = beside.lots(collected([folder(tmp_path / "one", 90.0, (80.0, 90.0))], print))
    assert list(beside.figures(one)) == ["speedup", "courses"]
    many = [folder(tmp_path / str(i), 90.0, (80.0, 90.0), ku=i + 11) for i in range(beside.MANY + 1)]
    assert list(beside.figures(beside.lots(collected(many, print)))) == []
    drawn: list[str] = []
    whole = Axes.errorbar
    monkeypatch.setattr(Axes, "errorbar", lambda *given, **how: [drawn.append(how["label"]), whole(*given, **how)][1])
    assert list(beside.figures(beside.lots(collected(many[1:], print)))) == ["speedup", "courses"]
    assert drawn == [f"GReg-1, ku {i + 12}" for i in range(beside.MANY)]


def test_a_line_is_a_way_of_pruning_at_whatever_ratio(tmp_path: Path) -> None:
    options = [
        {"ratios": "0.5"},
        {"ratios": "0.7"},
        {"ratios": "0.7", "scope": "path"},
        {"speedup": 2.0, "model": "vgg19"},
    ]
    places = [folder(tmp_path / str(i), 90.0 - i, **each) for i, each in enumerate(options)]
    panels = beside.by_speedup(beside.lots(collected(places, print)))
    assert [(panel.title, {way: len(line) for way, line in panel.ours.items()}) for panel in panels] == [
        ("resnet20 on digits", {"GReg-1": 2, "GReg-1, scope path": 1}), ("vgg19 on digits", {"GReg-1": 1}),
    ]  # fmt: skip
    assert panels[0].ours["GReg-1"] == [(2.5, 89.0, None), (2.5, 90.0, None)]


@pytest.mark.skipif(not RESULTS.exists(), reason="a source archive has no results")
def test_files_of_reproduce_are_runs_too(tmp_path: Path) -> None:
    """The figures are those of docs/reproduction.md."""
    ways = {way: sorted(RESULTS.glob(f"resnet56-cifar10-{way}-0_0.9_0.9_0.9-{more}seed*.json"))
            for way, more in (("oneshot", ""), ("greg1", "ku1-"))}  # fmt: skip
    code, out, err = growprune_says(
        "report", *ways["oneshot"], *ways["greg1"], "--out", tmp_path / "page.html", "--json"
    )
    assert (code, err) == (0, "")
    once, greg = document(out)["rows"]
    assert (once["label"], greg["label"], len(once["runs"]), len(greg["runs"])) == (
        "one-shot pruning",
        "GReg-1",
        3,
        3,
    )
    assert f"{once['accuracy']['final']['mean']:.2f}" == "87.48"
    assert f"{greg['accuracy']['final']['mean']:.2f}" == "88.93"


def test_a_run_without_a_speedup_is_told_all_the_same(tmp_path: Path) -> None:
    """As one that was counted by nobody."""
    place = folder(tmp_path / "a", 90.0)
    found = json.loads((place / "result.json").read_text())
    (place / "result.json").write_text(json.dumps(found | {"speedup": None}))
    lots = beside.lots(collected([place], print))
    assert beside.to_json(lots)["rows"][0]["speedup"] is None
    assert "fewer MACs" not in beside.rows(lots)[0]
    assert "<table" in beside.page(lots)
