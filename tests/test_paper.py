"""`growprune reproduce`: its settings are the paper's, its runs are kept and go on, its tables say what there is.

Runs are real, at smoke scale on the CPU, each command in a process of its own. `shelf` does one row of every table.
"""

from __future__ import annotations

import html
import io
import itertools
import json
import math
import os
import re
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

import growprune as gp
from growprune import GrowpruneError, data, models, paper, recipe
from growprune.config import Prune, Train
from growprune.jobs import threads
from growprune.measurement import weight_sparsity
from growprune.outcome import environment
from growprune.paper import bars, cost, figure1, imagenet, ku, obd, random, table1, table2, table3, table4
from growprune.paper.comparison import Comparison, bars_met, compared, done_so_far, lacking, publish, words
from growprune.paper.grid import markdown, same_filters
from growprune.paper.imagenet import IMAGES
from growprune.paper.reproduce import (
    BUSY,
    Lab,
    available,
    began,
    done_without,
    forecast,
    missing,
    prune,
    repeatable,
    reproduce,
    same_images,
)
from growprune.paper.results import Found, Shelf, course
from growprune.paper.setting import CIFAR, IMAGENET, RESNET56, VGG19, Scale, Setting
from growprune.reading import fingerprint
from growprune.report import duration
from growprune.report.chart import Panel, chart
from growprune.run import in_use, lock
from growprune.several import SomeFailedError, side_by_side
from runs import Done, Shop, contents, steps, timeless, until

REPOSITORY = Path(__file__).parents[1]
ROWS = {
    "table1": "resnet56-0.9",
    "table2": "vgg19-greg1,vgg19-greg2",
    "obd": "resnet56-0.9",
    "random": "resnet56",
    "ku": "resnet56-5",
    "figure1": "resnet56",
    "scopes": "0.9",
    "causes": "resnet56-batch-0.9",
    "table3": "resnet50-3.06",
    "table4": "greg1",
}
"""What is run of each, with two seeds of `random`; rows share some runs, which are done once."""

FIFTH = "smoke-resnet56-cifar10-greg1-0_0.9_0.9_0.9-ku5-seed0"
ONCE = "smoke-resnet56-cifar10-oneshot-0_0.9_0.9_0.9-seed0"
GREG1 = "smoke-resnet56-cifar10-greg1-0_0.9_0.9_0.9-ku1-seed0"

SETTINGS = [setting for name in paper.NAMES for setting in paper.find(name).settings()]
PLAIN = [each for each in SETTINGS if each.watched is None and not each.other and each.base.recipe is CIFAR]
WAYS = ("paper", "batch", "ks", "authors")
LARGE = [each for each in SETTINGS if each.base.recipe is IMAGENET]


def command(name: str, out: Path, *more: object) -> tuple[object, ...]:
    return "reproduce", name, "--scale", "smoke", "--device", "cpu", "--out", out, *more


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    found = Shop(tmp_path_factory.mktemp("shop"), "sklearn.datasets", figures=False)
    yield found
    found.close()


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """What the commands of `shelf` printed, by name: stdout as JSON, and stderr."""
    return {}


@pytest.fixture(scope="module")
def shelf(shop: Shop, said: dict[str, Any]) -> Path:
    out = shop.path / "shelf"
    for name, rows in ROWS.items():
        seeds = 2 if name == "random" else 1
        done = shop.done(*command(name, out, "--only", rows, "--json", "--seeds", seeds))
        said[name] = json.loads(done.out), done.err
    return out


def bare(shelf: Path, place: Path, *kept: str) -> Path:
    """The base networks of a shelf alone, and the results named."""
    place.mkdir()
    shutil.copytree(shelf / "bases", place / "bases")
    for path in [*shelf.glob("base-*.json"), *(shelf / f"{key}.json" for key in kept)]:
        shutil.copy(path, place)
    return place


def test_several_tables_are_run_and_shown_by_one_command(shop: Shop, shelf: Path, tmp_path: Path) -> None:
    out = bare(shelf, tmp_path / "shelf", *(path.stem for path in shelf.glob("smoke-*.json")))
    several = "reproduce", "table2", "table4", "table2", "--scale", "smoke", "--device", "cpu", "--out", out
    left = [each["missing"] for each in json.loads(shop.done(*several, "--no-run", "--json").out)]
    assert left == [["resnet56-greg1", "resnet56-greg2"], ["oneshot", "greg2"]]
    done = shop.done(*several)
    assert "growprune: 4 runs to do" in done.err
    assert [line for line in done.out.splitlines() if line.startswith("Report:")] == [
        f"Report: {out / 'tables' / f'{name}-smoke.html'}" for name in ("table2", "table4")
    ]
    documents = json.loads(shop.done(*several, "--no-run", "--json").out)
    assert [(each["name"], each["missing"]) for each in documents] == [("table2", []), ("table4", [])]


def test_what_fails_keeps_nothing_else_from_being_run_and_shown(shop: Shop, shelf: Path, tmp_path: Path) -> None:
    """A file where a run's folder should be; the table has the other run, and the command ends with the error."""
    out = bare(shelf, tmp_path / "shelf")
    (out / "runs").mkdir()
    (out / "runs" / ONCE).touch()
    done = shop.run(*command("table1", out, "--only", "resnet56-0.9", "--json"))
    assert done.code == 2
    assert re.search(rf"^growprune: {ONCE}: .*/{ONCE}: is a file; ", done.err, re.MULTILINE), done
    assert "resnet56-0.9" in json.loads(done.out)["missing"]
    made = {path.stem for path in out.glob("smoke-*.json")}
    assert made == {"smoke-resnet56-cifar10-greg1-0_0.9_0.9_0.9-ku1-seed0"}


def test_a_base_network_that_fails_keeps_no_other_from_being_pruned(shop: Shop, shelf: Path, tmp_path: Path) -> None:
    out = bare(shelf, tmp_path / "shelf", GREG1)
    vgg = "smoke-vgg19-cifar100"
    for path in [*(out / "bases").glob(f"{vgg}*"), out / f"base-{vgg}.json"]:
        path.unlink()
    (out / "runs").mkdir()
    (out / "runs" / f"base-{vgg}").touch()
    done = shop.run(*command("table1", out, "--only", "resnet56-0.9,vgg19-0.8", "--json"))
    assert done.code == 2
    assert re.search(rf"^growprune: base-{vgg}: .*is a file; ", done.err, re.MULTILINE), done
    assert read(out, ONCE)
    assert json.loads(done.out)["missing"] == ["vgg19-0.8"]


def test_a_run_whose_options_are_damaged_fails_alone(shop: Shop, shelf: Path, tmp_path: Path) -> None:
    out = bare(shelf, tmp_path / "shelf")
    (out / "runs" / GREG1).mkdir(parents=True)
    (out / "runs" / GREG1 / "config.json").write_text("{")
    done = shop.run(*command("table1", out, "--only", "resnet56-0.9"))
    assert done.code == 2
    assert re.search(rf"^growprune: {GREG1}: .*config.json", done.err, re.MULTILINE), done
    assert read(out, ONCE)


def read(shelf: Path, key: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shelf / f"{key}.json").read_text())
    return found


def result(setting: Setting, scale: Scale = "short", seed: int = 0, **facts: Any) -> dict[str, Any]:
    """A finished run of it, as it lies on the shelf."""
    names = ("base", "before_removal", "after_removal", "final", "best")
    plan = setting.config(scale, seed, Path()).to_json()
    config = {**plan, "data": Path(plan["data"]).absolute().name, **facts.pop("config", {})}
    return {
        "accuracy": dict.fromkeys(names, 90.0), "base": {"sha256": "0", "accuracy": 90.0}, "images": {"train": 50_000},
        "environment": {"device": "cpu", "device_name": "abacus", "torch": "2", "growprune": "0"}, "speedup": 2.0,
        "sparsity": 0.0, "steps": 1, "seconds": 1.0, "course": [], "gone": "1", "config": config, **facts,
    }  # fmt: skip


def shelve(lab: Lab, setting: Setting, seed: int = 0, **facts: Any) -> Path:
    (file := lab.shelf.file(setting, seed)).parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(result(setting, lab.scale, seed, **facts)))
    return file


def line(grid: dict[str, Any], name: str) -> dict[str, str]:
    """One line of a table, by its columns."""
    return next(dict(zip(grid["head"], cells, strict=True)) for cells in grid["lines"] if cells[0] == name)


# -- the settings are the paper's ------------------------------------------------------------------------------------


def config(setting: Setting, scale: Scale) -> Prune:
    return setting.config(scale, 0, Path("base"))


def test_configurations_are_the_papers() -> None:
    wanted = {
        "batch": 256, "prune_batch": 256, "epochs": 120, "lr": "0:1e-2,60:1e-3,90:1e-4", "prune_lr": 1e-3,
        "momentum": 0.9, "weight_decay": 5e-4, "delta_lambda": 1e-4, "delta_lambda_pick": 1e-5, "tau": 1.0,
        "tau_pick": 0.01, "ks": 5000, "warm_up": 0.0, "label_smoothing": 0.0, "nesterov": False, "augment": True,
        "gamma": None, "stop_ratio": None,
    }  # fmt: skip
    for setting in PLAIN:
        for scale in ("paper", "short"):
            found = asdict(config(setting, scale))
            assert {key: found[key] for key in wanted} == wanted
            steps_between = 1 if scale == "short" and not setting.paper_scale else 10
            assert setting.schedule == "oneshot" or found["ku"] == (setting.ku or steps_between)
            assert (found["model"], found["data"]) == (setting.base.model, setting.base.data)


def test_obds_global_ratio_is_of_vgg19s_first_layer_too() -> None:
    """In the pruner's own words; ResNet56's cannot go alone."""
    for base, stem in ((RESNET56, False), (VGG19, True)):
        for setting in obd.pair(base, 0.9):
            assert recipe.ratios(config(setting, "short")) == gp.Global(0.9, stem=stem)


def test_imagenets_configurations_are_the_papers() -> None:
    wanted = {
        "batch": 256, "prune_batch": 64, "epochs": 90, "lr": "0:1e-2,30:1e-3,60:1e-4,75:1e-5", "prune_lr": 1e-3,
        "momentum": 0.9, "weight_decay": 1e-4, "delta_lambda": 1e-4, "delta_lambda_pick": 1e-5, "tau": 1.0,
        "tau_pick": 0.01, "ks": 40_000, "resolution": 224, "normalize": "imagenet", "augment": True,
    }  # fmt: skip
    assert len(LARGE) == 18
    for setting in LARGE:
        found = asdict(config(setting, "paper"))
        assert {key: found[key] for key in wanted} == wanted
        assert setting.schedule == "oneshot" or found["ku"] == 5
        base = setting.base.config("paper")
        assert base.weights == f"ResNet{base.model[-2:]}_Weights.IMAGENET1K_V1"
        assert base.epochs == 0


@lru_cache(maxsize=1)
def large(network: str) -> tuple[nn.Module, torch.Tensor, gp.Measurement]:
    net, example = models.create(f"torchvision:{network}"), torch.zeros(1, 3, 224, 224)
    return net, example, gp.measure(net, example)


@pytest.mark.parametrize("level", table3.LEVELS, ids=lambda level: f"{level.network}-{level.speedup}")
def test_table_3_has_the_papers_speed_ups(level: table3.Level) -> None:
    """Without data: FLOPs of 3.66 G and 4.09 G, and what is left of them."""
    net, example, before = large(level.network)
    ignore = [name for name in level.ignore.split(",") if name]
    pruner = gp.Pruner(net, example, gp.OneShot(), ratios=level.ratios, ignore=ignore)
    assert round(before.macs / 1e9, 2) == {"resnet34": 3.66, "resnet50": 4.09}[level.network]
    assert round(gp.speedup(before, gp.measure(pruner.compact(), example)), 2) == level.speedup


def test_table_4_has_the_papers_sparsity(tmp_path: Path) -> None:
    """25.56 M parameters, of whose weights 82.7 % go: every convolution's and the classifier's, but not the stem's. The
    file holds what is left, and a bit for each that went or stayed."""
    net = models.create("torchvision:resnet50")
    pruner = gp.Pruner(
        net, torch.zeros(1, 3, 64, 64), gp.OneShot(), ratios=float(table4.RATIO), granularity="weight"
    )  # fmt: skip
    kept = pruner.masks()
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, 2) == 25.56
    gone = sum(int((~mask).sum()) for mask in kept.values()) / sum(mask.numel() for mask in kept.values())
    assert round(100 * gone, 1) == 82.7
    assert bool(kept["conv1"].all())
    assert len(kept) == 54
    assert round(100 * weight_sparsity(pruner.compact()), 2) == 82.67  # as the table shows it
    gp.save(small := pruner.compact(), tmp_path / "sparse")
    assert (tmp_path / "sparse").stat().st_size == pytest.approx(21.3e6, rel=0.01)
    back = gp.load(tmp_path / "sparse", lambda: models.create("torchvision:resnet50")).state_dict()
    assert all(torch.equal(back[name], value) for name, value in small.state_dict().items())


def test_a_folder_of_other_classes_gets_a_base_network_of_its_own(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pets" / "train" / name).mkdir(parents=True)
    (tmp_path / "pets" / "train" / ".ipynb_checkpoints").mkdir()
    assert imagenet.classes(str(tmp_path / "pets")) == 2
    base = imagenet.base("resnet34", str(tmp_path / "pets"))
    assert base.name == "resnet34-pets"
    found = base.config("short")
    assert (found.weights, found.epochs, found.weight_decay, found.normalize) == (None, 100, 1e-4, "imagenet")


@pytest.mark.parametrize(("name", "images", "asked"), [("imagenette", 9_469, False), ("imagenet", IMAGES - 5, True)])
def test_the_papers_accuracies_are_asked_of_imagenet_alone(tmp_path: Path, name: str, images: int, asked: bool) -> None:
    """Whether the folder is still there or not."""
    place, lab = str(tmp_path / name), Lab(tmp_path, "paper")
    for experiment in (table3.experiment(place), table4.experiment(place)):
        kinds = {verdict.bar for verdict in experiment.verdicts(lab.look)}
        assert ("accuracy" in kinds) == asked
        for setting in experiment.settings():
            shelve(lab, setting, images={"train": images})
        judged = [verdict.met for verdict in experiment.verdicts(lab.look) if verdict.bar == "accuracy"]
        assert (bool(judged), all(judged)) == (asked, True)
        for setting in experiment.settings():
            shelve(lab, setting, images={"train": 9_469})
        assert {verdict.bar for verdict in experiment.verdicts(lab.look)} == {"above"}


def test_tables_of_two_folders_have_files_of_their_own(tmp_path: Path) -> None:
    """On one shelf the second would else take the first's place; smoke runs are of no folder."""
    for scale, names in (("short", ["pets", "tools"]), ("smoke", [])):
        for folder in ("pets", "tools"):
            publish(compared(Lab(tmp_path, scale), table3.experiment(f"sets/{folder}")), tmp_path / scale)  # type: ignore[arg-type]
        wanted = {f"table3-{name}-{scale}" for name in names} or {f"table3-{scale}"}
        assert {path.stem for path in (tmp_path / scale).iterdir()} == wanted
    assert publish(compared(Lab(tmp_path), table1.EXPERIMENT), tmp_path).stem == "table1-short"


def test_images_are_counted_as_they_are_loaded(tmp_path: Path) -> None:
    """At any depth, without what is hidden or no image."""
    (deep := tmp_path / "tiny" / "train" / "cat" / "images").mkdir(parents=True)
    for name in ("a.jpg", "b.JPEG", ".c.jpg", "boxes.txt"):
        (deep / name).touch()
    (tmp_path / "tiny" / "train" / ".cache").mkdir()
    (tmp_path / "tiny" / "train" / ".cache" / "d.jpg").touch()
    assert available(imagenet.base("resnet34", str(tmp_path / "tiny")).config("short")) == 2


def test_a_set_is_called_as_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what a link points to, which may change; the folder one is in has a name too."""
    (tmp_path / "pets").mkdir()
    (tmp_path / "imagenet").symlink_to("pets")
    monkeypatch.chdir(tmp_path / "pets")
    names = [imagenet.base("resnet34", given).name for given in ("../imagenet", "../pets/", ".")]
    assert names == ["resnet34-imagenet", "resnet34-pets", "resnet34-pets"]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((), "not run here"),
        ((1_281_167, 1_281_167), "here on ImageNet"),
        ((9_469,), "here on pets (9,469 training images), not ImageNet"),
        (
            (1_281_167, 7),
            "here on pets (7 training images) or pets (1,281,167 training images), not ImageNet",
        ),
    ],
)
def test_a_title_says_on_which_images_it_was_run(numbers: tuple[int, ...], said: str) -> None:
    """By the runs: the folder may be gone, and a small one of 1,000 classes is not ImageNet."""
    facts = {"accuracy": {"final": 1.0, "best": 1.0, "base": 1.0}, "speedup": 1.0, "sparsity": 0.5}
    configs = [{"seed": seed, "data": "pets"} for seed in range(len(numbers))]
    runs = zip(numbers, configs, strict=True)
    found = Found(tuple({**facts, "images": {"train": number}, "config": config} for number, config in runs))
    assert imagenet.title([found, Found(())]) == said
    for name in ("table3", "table4"):
        assert paper.find(name, "no/such/pets").grids(lambda _: found)[0].title.endswith(f"; {said}")


def test_another_folder_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """Results are known by the folder's name."""
    base = imagenet.base("resnet34", str(tmp_path / "pets"))
    lab = Lab(tmp_path / "out", device="cpu")
    (tmp_path / "pets" / "train" / "cat").mkdir(parents=True)
    lab.out.mkdir()
    for number, refused in ((200, False), (202, False), (203, True), (197, True)):
        for i in range(200):
            (tmp_path / "pets" / "train" / "cat" / f"{i}.jpg").touch()
        lab.shelf.about(base).write_text(json.dumps({"images": {"train": number}}))
        if refused:
            with pytest.raises(GrowpruneError, match=rf"pets: 200 training images, but .*out holds .* on {number}"):
                same_images(lab, [base])
        else:
            same_images(lab, [base])
    same_images(lab, [RESNET56])


def test_another_folder_of_the_same_name_and_number_is_refused(tmp_path: Path) -> None:
    """By the names and sizes of its images, as far as the base network's file has them. The folder may move."""
    folder, lab = tmp_path / "pets", Lab(tmp_path / "out", device="cpu")
    lab.out.mkdir()
    for number, split in enumerate(("train", "val")):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            (folder / split / name / "0.jpg").write_bytes(b"." * number)
    about = lab.shelf.about(imagenet.base("resnet34", str(folder)))
    facts = {"images": {"train": 2}, "fingerprint": fingerprint(folder)}
    about.write_text(json.dumps(facts))
    (folder / "val").rename(folder / "test")
    (folder / "train" / "cat" / ".hidden.jpg").touch()
    (elsewhere := tmp_path / "elsewhere" / "pets").parent.mkdir()
    folder.rename(elsewhere)
    base = imagenet.base("resnet34", str(elsewhere))
    same_images(lab, [base])
    cat = elsewhere / "train" / "cat" / "0.jpg"
    for spoil, restore in (
        (lambda: cat.write_bytes(b"1"), lambda: cat.write_bytes(b"")),
        (lambda: cat.rename(cat.with_name("1.jpg")), lambda: cat.with_name("1.jpg").rename(cat)),
        (lambda: cat.rename(cat.parents[1] / "dog" / "1.jpg"), lambda: None),
    ):
        spoil()
        about.write_text(json.dumps(facts))
        with pytest.raises(GrowpruneError, match=r"pets: by names and sizes not the images that .*out holds runs of"):
            same_images(lab, [base])
        about.write_text(json.dumps({"images": {"train": 2}}))  # written before there was such a thing
        same_images(lab, [base])
        restore()


def test_a_base_network_knows_its_images_and_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are when it is put on the shelf: what it was trained on, and how many were at once."""
    images, kept = tmp_path / "pets", list[tuple[Any, ...]]()
    for split in ("train", "val"):
        (images / split / "cat").mkdir(parents=True)
        (images / split / "cat" / "0.jpg").touch()
    monkeypatch.setattr(Shelf, "keep_base", lambda shelf, *given: kept.append(given))
    monkeypatch.setattr(paper.reproduce, "perform", lambda lab, plans, shelve, more: [shelve(f) for _, f in plans])
    bases = [imagenet.base("resnet34", str(images)), imagenet.base("resnet50", str(images)), RESNET56]
    paper.reproduce.train(Lab(tmp_path / "out", device="cpu", parallel=2), bases)
    assert kept == [(bases[0], 1, fingerprint(images)), (bases[1], 1, fingerprint(images)), (bases[2], 1, None)]
    kept.clear()
    monkeypatch.setattr("growprune.paper.lab.usable", lambda device: "cuda")
    paper.reproduce.train(Lab(tmp_path / "out", parallel=2), bases)
    assert [parallel for _, parallel, _ in kept] == [2, 2, 2]


def test_the_short_scale_differs_by_ku_alone() -> None:
    """On ImageNet by Ks too: 40,000 steps are two passes over it, but hundreds over a smaller set."""
    for setting in SETTINGS:
        there, here = asdict(config(setting, "paper")), asdict(config(setting, "short"))
        assert {key for key in there if there[key] != here[key]} <= {"ku"} | ({"ks"} if setting in LARGE else set())
        pushed = setting.schedule == "greg1" or (setting.schedule == "greg2" and setting in LARGE)
        assert there == here or (pushed and setting.ku is None and not setting.paper_scale)


@pytest.mark.parametrize(
    ("setting", "scale", "length"),
    [
        (table1.pair(RESNET56, 0.9)[1], "paper", 105_000),
        (table1.pair(RESNET56, 0.9)[1], "short", 15_000),
        (table1.pair(RESNET56, 0.9)[0], "paper", 0),
        (table2.both(VGG19)[0], "short", 105_000),
        (table2.both(VGG19)[1], "short", 114_000),
        (table2.both(VGG19)[1], "paper", 114_000),
        *((ku.setting(VGG19, each), "paper", 10_000 * each + 5_000) for each in (1, 5, 10, 15, 20)),
        *((ku.setting(VGG19, each), "short", 10_000 * each + 5_000) for each in (1, 5, 10, 15, 20)),
    ],
)  # fmt: skip
def test_schedules_are_as_long_as_the_papers(setting: Setting, scale: Scale, length: int) -> None:
    assert recipe.schedule(config(setting, scale)).total_steps == length


def test_figure_1_ends_where_the_papers_iterations_do() -> None:
    for base in (RESNET56, VGG19):
        (setting,) = paper.find("figure1").settings([base.model])
        for scale in ("paper", "short"):
            found = config(setting, scale)
            assert recipe.schedule(found).total_steps == pytest.approx(30_000, rel=0.002)
            assert (found.ku, found.tau_pick, found.epochs) == (10, 0.03, 0)
            further = config(paper.find("figure1").settings([f"{base.model}-further"])[0], scale)
            assert recipe.schedule(further).total_steps == pytest.approx(30_000, rel=0.002)
            assert (further.ku, further.tau_pick, further.epochs) == (1, 0.3, 0)
    assert table1.ratios(VGG19, 0.7) == table2.OURS[VGG19][3] == "[0:0, 1-15:0.7]"


def test_an_option_for_all_runs_yields_to_what_a_row_is_about() -> None:
    rows = {row.name: row.settings for row in paper.find("causes").rows}
    for name, precision in (("resnet56-ieee-0.9", "ieee"), ("resnet56-batch-0.9", "bf16")):
        for setting in rows[name]:
            found = setting.config("short", 0, Path("base"), precision="bf16", kernels="on")
            assert (found.precision, found.kernels) == (precision, "on")


def test_causes_have_the_authors_settings() -> None:
    """Those of their published commands: two batches, ImageNet's normalisation for CIFAR-10 alone."""
    rows = {row.name: row.settings for row in paper.find("causes").rows}
    for name, batch, normalize, ks in (
        ("resnet56-authors-0.9", 128, "imagenet", 10_000),
        ("vgg19-base-0.7", 256, "own", 5_000),
    ):
        once, greg = (config(setting, "short") for setting in rows[name])
        trained = rows[name][0].base.config("short")
        assert (trained.batch, trained.epochs, trained.lr) == (batch, 200, "0:0.1,100:0.01,150:0.001")
        assert (once.batch, greg.batch, greg.prune_batch) == (batch, batch, batch)
        assert {trained.normalize, once.normalize, greg.normalize} == {normalize}
        assert (trained.warm_up, greg.ks, greg.ku) == (0.0, ks, 1)
    assert "resnet56-batch-0.9" in rows
    assert "vgg19-batch-0.7" not in rows


def test_causes_have_the_authors_base_network_at_the_batch_that_was_their_default() -> None:
    """Of ResNet56, whose published command has another one; all else as that has it."""
    rows = {row.name: row.settings for row in paper.find("causes").rows}
    for small, large in zip(rows["resnet56-base-0.9"], rows["resnet56-may-0.9"], strict=True):
        assert large.base.config("short") == replace(small.base.config("short"), batch=256)
        assert large.base.name == f"{small.base.name}256"
        assert replace(large, base=small.base) == small
    assert "vgg19-may-0.7" not in rows


def test_causes_have_what_the_history_of_the_authors_code_has() -> None:
    """What was fixed while pushing is nothing to one-shot: its run is table 1's."""
    rows = {row.name: row.settings for row in paper.find("causes").rows}
    for way, norm, decay in (("norm", "fixed", 5e-4), ("decay", "batch", 1e-4), ("both", "fixed", 1e-4)):
        once, greg = rows[f"resnet56-{way}-0.925"]
        assert (config(greg, "short").prune_norm, config(greg, "short").weight_decay) == (norm, decay)
        assert (config(once, "short").prune_norm, config(once, "short").weight_decay) == ("batch", decay)
    assert rows["resnet56-norm-0.925"][0] == rows["resnet56-paper-0.925"][0]
    for name in ("resnet56", "vgg19"):
        plain, fixed = (config(paper.find("figure1").settings([row])[0], "short") for row in (name, f"{name}-fixed"))
        assert replace(plain, prune_norm="fixed") == fixed


def test_causes_have_the_longer_fine_tuning_of_the_authors_file_for_greg_2() -> None:
    rows = {row.name: row.settings for row in paper.find("causes").rows}
    plain = [*rows["resnet56-paper-0.9"], *table2.both(RESNET56)]
    for usual, longer in zip(plain, (*rows["resnet56-longer-0.9"], *rows["resnet56-longer-2.55"]), strict=True):
        found = config(longer, "short")
        assert (found.epochs, found.lr) == (240, "0:2e-2,60:1e-2,120:1e-3,180:1e-4")
        assert replace(config(usual, "short"), epochs=found.epochs, lr=found.lr) == found
        assert (config(longer, "smoke").epochs, config(longer, "smoke").lr) == (4, "0:2e-2,1:1e-2,2:1e-3,3:1e-4")
    assert rows["resnet56-longer-0.9"][0].key("short", 0) == (
        "resnet56-cifar10-oneshot-0_0.9_0.9_0.9-epochs_240-lr_0_2e-2_60_1e-2_120_1e-3_180_1e-4-seed0"
    )
    assert "vgg19-longer-0.7" not in rows


def test_causes_have_other_base_networks_that_are_trained_alike() -> None:
    rows = {row.name: row.settings for row in paper.find("causes").rows}
    for seed in (1, 2):
        (base,) = {setting.base for setting in rows[f"resnet56-other{seed}-0.9"]}
        for scale in ("paper", "short", "smoke"):
            assert base.config(scale) == replace(RESNET56.config(scale), seed=seed)
        assert base.name == f"{RESNET56.name}-other{seed}"


def test_smoke_runs_differ_as_their_rows_say() -> None:
    """By numbers in proportion to smoke's own; the files' names have those that were run."""
    rows = {row.name: row.settings for row in paper.find("causes").rows}
    plain, half, twice, theirs = (config(rows[f"resnet56-{way}-0.9"][1], "smoke") for way in WAYS)
    assert [(each.batch, each.prune_batch, each.ks) for each in (plain, half, twice, theirs)] == [
        (64, 64, 10), (32, 32, 10), (64, 64, 20), (32, 32, 20),
    ]  # fmt: skip
    assert (plain.normalize, theirs.normalize) == ("own", "imagenet")
    assert rows["resnet56-authors-0.9"][1].key("smoke", 0) == (
        "smoke-resnet56-cifar10-authors-greg1-0_0.9_0.9_0.9-ku1-batch_32-prune_batch_32-ks_20-seed0"
    )
    own, other = RESNET56.config("smoke"), rows["resnet56-authors-0.9"][1].base.config("smoke")
    assert (own.batch, own.lr, own.warm_up, own.epochs) == (64, "cosine:0.1", 1.0, 4)
    assert (other.batch, other.lr, other.warm_up, other.epochs) == (32, "0:0.1,2:0.01,3:0.001", 0.0, 4)
    said = words(paper.find("causes"), "smoke")
    assert said.startswith(words(table1.EXPERIMENT, "smoke"))
    assert "A batch or Ks that a row names is in proportion" in said


def test_smoke_runs_of_figure_1_say_how_far_they_went(tmp_path: Path) -> None:
    first, further = (paper.find("figure1").settings([row])[0] for row in ("vgg19", "vgg19-further"))
    assert [config(each, "smoke").tau_pick for each in (first, further)] == [0.3, 3.0]
    assert further.key("smoke", 0) == "smoke-vgg19-cifar100-greg2-0_0_1_15_0.5-ku1-watched-until_3-seed0"
    for scale, last, most in (("smoke", "0.3", "3"), ("short", "0.03", "0.3")):
        (grid,) = paper.find("figure1").grids(Lab(tmp_path, scale).look)  # type: ignore[arg-type]
        assert grid.remarks[0].startswith(f"The last λ is {last} if nothing else is said; ")
        assert f"vgg19 on cifar100, λ to {most}, Ku = 1" in [cells[0] for cells in grid.lines]


def test_base_networks_are_trained_with_the_default_recipe_to_the_same_bits_each_time() -> None:
    usual = Train(model="resnet56", data="cifar10", epochs=100, deterministic=True)
    assert RESNET56.config("paper") == RESNET56.config("short", deterministic=False) == usual
    assert VGG19.config("paper") == Train(model="vgg19", data="cifar100", epochs=200, deterministic=True)
    assert all(base.config("smoke").deterministic for base in (RESNET56, VGG19))
    found = VGG19.config("paper")
    assert (found.lr, found.warm_up, found.batch) == ("cosine:0.2", 5.0, 256)
    assert (found.weight_decay, found.momentum) == (5e-4, 0.9)


def test_keys_are_those_that_results_are_kept_under() -> None:
    """Golden: under another key a finished run would be done again."""
    found = {setting.key(scale, 0) for setting in SETTINGS for scale in ("paper", "short", "smoke")}
    assert found >= {
        "resnet56-cifar10-oneshot-0_0.5_0.5_0.5-seed0",
        "resnet56-cifar10-greg1-0_0.925_0.925_0.925-ku10-seed0",
        "resnet56-cifar10-greg1-0_0.9_0.9_0.9-path-ku1-seed0",
        "resnet56-cifar10-greg1-0_0.9_0.9_0.9-random-ku1-seed0",
        "resnet56-cifar10-greg2-0_0.75_0.75_0.32-ku10-seed0",
        "resnet56-cifar10-greg2-0_0.5_0.5_0.5-ku10-watched-seed0",
        "vgg19-cifar100-greg1-0_0_1_15_0.7-ku20-seed0",
        "resnet56-cifar10-greg1-global0.7-obd-ku1-seed0",
        "vgg19-cifar100-oneshot-global0.95-stem-obd-seed0",
        "smoke-vgg19-cifar100-greg1-0_0_1_15_0.8-ku1-seed0",
    }


def test_a_key_is_one_run_and_a_run_one_key() -> None:
    for scales in (("paper", "short"), ("smoke",)):
        runs: dict[str, str] = {}
        for setting, scale, seed in itertools.product(SETTINGS, scales, (0, 1)):
            asked = json.dumps(setting.config(scale, seed, Path(setting.base.name)).to_json())
            assert runs.setdefault(setting.key(scale, seed), asked) == asked
        assert len(set(runs.values())) == len(runs)


def test_one_shot_is_the_same_run_at_both_scales_and_greg1_is_not() -> None:
    once, greg = table1.pair(VGG19, 0.6)
    assert once.key("short", 1) == once.key("paper", 1)
    assert greg.key("short", 1) != greg.key("paper", 1)
    assert ku.setting(VGG19, 10).key("short", 0) == table1.pair(VGG19, 0.7)[1].key("paper", 0)


# -- the paper's numbers ---------------------------------------------------------------------------------------------


def test_drops_are_those_that_the_paper_prints() -> None:
    """Tables 2 to 4 print base, pruned and drop: a number copied wrongly would not add up."""
    printed = {RESNET56: 5, VGG19: 3}  # rows of the paper, before those that came later
    drops = [
        [round((start or 0.0) - end, 2) for _, start, end, _ in table2.OTHERS[base][:count]]
        for base, count in printed.items()
    ]
    assert drops == [[1.00, 0.90, 0.23, 0.99, -0.05], [12.64, 12.68, 8.16]]
    ours = [[round(base.accuracy - end, 2) for end in table2.OURS[base][1:3]] for base in (RESNET56, VGG19)]
    assert ours == [[0.18, 0.00], [6.47, 6.27]]  # the paper prints 6.67 and 6.47 of VGG19: see the table's remark
    others = [[round(start - end, 2) for _, start, end, _ in level.others] for level in table3.LEVELS]
    assert others == [
        [1.06, 0.48], [0.92, -0.29, -0.73], [3.13, 1.54, 1.17, 1.68, 1.60, 1.06, 0.83, 0.80, 0.23, 0.18], [1.69],
        [4.53, 4.49],
    ]  # fmt: skip
    bases = [imagenet.PUBLISHED[level.network][1] for level in table3.LEVELS]
    ends = [[end for end in (level.greg1, level.greg2) if end is not None] for level in table3.LEVELS]
    assert [[round(base - end, 2) for end in those] for base, those in zip(bases, ends, strict=True)] == [
        [-0.23, -0.30], [-0.14], [0.97, 0.77], [1.28, 1.20], [2.38, 2.23],
    ]  # fmt: skip
    assert [round(start - end, 2) for _, start, end, _ in table4.OTHERS] == [1.42, 1.41, 1.40, 0.78, 0.68, 0.86]


@pytest.mark.parametrize(
    ("columns", "gains"),
    [
        (table1.columns(RESNET56), [0.09, 0.35, 2.15, 1.08, 3.18]),
        (table1.columns(VGG19), [0.01, 0.06, 1.30, 1.96, 5.73]),
        (obd.columns(RESNET56), [0.04, 0.37, 0.55, 1.22, 1.79]),
        (obd.columns(VGG19), [0.40, 0.88, 3.29, 3.69, 5.34]),
    ],
)
def test_gains_are_those_that_the_paper_prints(columns: list[Any], gains: list[float]) -> None:
    assert [column.gain for column in columns] == gains


def test_random_picks_have_the_mean_and_deviation_that_the_paper_prints() -> None:
    for base in (RESNET56, VGG19):
        for values, mean, spread in random.PAPER[base]:
            assert statistics.mean(values) == pytest.approx(mean, abs=0.0051)
            found = Found(tuple({"accuracy": {"final": value}} for value in values))
            assert found.spread() == pytest.approx(spread, abs=0.0051)
            assert statistics.stdev(values) != pytest.approx(spread, abs=0.0051)


def test_tables_agree_where_they_show_the_same_run() -> None:
    for base in (RESNET56, VGG19):
        ratio, columns, baseline = ku.PAPER[base]
        assert table1.PAPER[base][ratio][1:] == (baseline, columns[10])
        assert ratio == random.RATIO[base]


# -- what is to do ---------------------------------------------------------------------------------------------------


def test_the_first_seed_of_all_comes_before_the_second_of_any(tmp_path: Path) -> None:
    found = missing(Lab(tmp_path, seeds=3), table1.EXPERIMENT)
    assert [seed for _, seed in found] == [0] * 20 + [1] * 20 + [2] * 20
    assert [setting for setting, _ in found[:20]] == [setting for setting, _ in found[20:40]]


def test_only_picks_rows_and_what_is_there_is_not_missing(tmp_path: Path) -> None:
    lab, pair = Lab(tmp_path, seeds=2), table1.pair(VGG19, 0.8)
    assert missing(lab, table1.EXPERIMENT, only=["vgg19-0.8"]) == [(each, seed) for seed in (0, 1) for each in pair]
    shelve(lab, pair[1])
    assert missing(lab, table1.EXPERIMENT, only=["vgg19-0.8"]) == [(pair[0], 0), (pair[0], 1), (pair[1], 1)]


def test_of_several_tables_each_run_is_wanted_once(tmp_path: Path) -> None:
    """Table 1 shares a run of each network with `ku`, and their two one-shot runs; of `random` alone there are five."""
    several = [paper.find(name) for name in ("ku", "random", "table1")]
    found = missing(Lab(tmp_path), *several)
    assert len(found) == len(set(found)) == 12 + 20 + 20 - 4
    assert [seed for _, seed in found] == [0] * (12 + 4 + 20 - 4) + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert {setting for setting, seed in found if seed} == {*several[1].settings()}
    scopes, more = paper.find("scopes"), Lab(tmp_path)  # which asks for three seeds, and shares four settings
    assert len(missing(more, scopes, several[2])) == len(missing(more, several[2], scopes)) == 3 * 6 + 20 - 4
    assert [each.key("short", 0) for each, _ in found[:12]] == [each.key("short", 0) for each in several[0].settings()]


@pytest.mark.parametrize(
    ("name", "bases", "runs"),
    [
        ("table1", 2, 20),
        ("table2", 2, 4),
        ("obd", 2, 20),
        ("random", 2, 4),
        ("ku", 2, 12),
        ("figure1", 3, 7),
        ("scopes", 1, 6),
        ("causes", 7, 50),
        ("table3", 2, 15),
        ("table4", 1, 3),
    ],
)
def test_the_forecast_counts_runs_and_time(tmp_path: Path, name: str, bases: int, runs: int) -> None:
    for seeds in (1, 3):
        lab = Lab(tmp_path, seeds=seeds, device="cpu")
        wanted = missing(lab, paper.find(name))
        trained = list(dict.fromkeys(setting.base for setting, _ in wanted))
        text = forecast(lab, trained, wanted)
        what = "fetch" if name in paper.OF_IMAGES else "train"
        networks = f"{bases} base network{'s' if bases > 1 else ''} to {what} and "
        assert text.startswith(f"{networks}{runs * seeds} runs to do, one after another, about ")
        assert forecast(lab, [], wanted).startswith(f"{runs * seeds} runs to do, one after another, about ")


def test_the_forecast_goes_by_runs_that_were_done(tmp_path: Path) -> None:
    once = table1.pair(RESNET56, 0.5)[0]
    lab = Lab(tmp_path, device="cpu")
    config = {"epochs": 2, "batch": 100, "prune_batch": 50}
    facts: dict[str, Any] = {"steps": 30, "parallel": 2, "images": {"train": 1050}, "config": config}
    file = shelve(lab, once, seconds=50.0, **facts)  # 2,500 images in 25 s for each of two
    file.with_name(file.name.replace("seed0", "seed7")).write_text("{}")  # says nothing
    assert forecast(lab, [], [(once, 1)]) == "1 run to do, about 16 h 40 min on this device"  # 120 times 50,000
    shelve(lab, once, seconds=50.0, **facts, environment={**result(once)["environment"], "world": 4})  # four did that
    assert forecast(lab, [], [(once, 1)]) == "1 run to do, about 66 h 40 min on this device"


def test_the_forecast_goes_by_the_base_networks_training_where_no_run_was_done(tmp_path: Path) -> None:
    once, lab = table1.pair(RESNET56, 0.5)[0], Lab(tmp_path, device="cpu")
    facts = {
        "sha256": "", "accuracy": 90.0, "seconds": 100.0, "images": {"train": 1050}, "steps": 20,
        "environment": {"device": "cpu", "device_name": "x86_64"}, "config": {"epochs": 2, "lr": "0.1", "batch": 100},
    }  # fmt: skip
    about = lab.shelf.about(RESNET56)
    guessed = forecast(lab, [], [(once, 0)])
    for more, said in (
        ({}, "83 h 20 min"),  # 2,000 images in 100 s, and so are 120 times 50,000
        ({"parallel": 2}, "41 h 40 min"),
        ({"environment": {"device": "cuda", "device_name": "H200"}}, None),
        ({"config": facts["config"] | {"epochs": 0}}, None),  # published weights: nothing was trained
    ):
        about.write_text(json.dumps(facts | more))
        expected = guessed if said is None else f"1 run to do, about {said} on this device"
        assert forecast(lab, [], [(once, 0)]) == expected
    about.write_text(json.dumps(facts))
    shelve(lab, once, seconds=10.0, steps=20, images={"train": 1050}, config=facts["config"] | {"prune_batch": 50})
    assert forecast(lab, [], [(once, 1)]) == "1 run to do, about 8 h 20 min on this device", "a run counts more"


def test_the_forecast_goes_by_what_was_done_on_such_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may be many times slower; where none was measured it is said whose pace is guessed."""
    once, lab = table1.pair(RESNET56, 0.5)[0], Lab(tmp_path, device="cpu")
    facts: dict[str, Any] = {"steps": 30, "images": {"train": 1000}, "seconds": 20.0}
    facts["config"] = {"epochs": 2, "batch": 100, "prune_batch": 50}
    shelve(lab, once, **facts, environment={**result(once)["environment"], "device": "cuda", "device_name": "T4"})
    monkeypatch.setattr("growprune.paper.reproduce.usable", lambda device: "cuda")
    for name, said in (("T4", " on this device"), ("H200", " on this device, if it is as fast as an H200")):
        here = {"device": "cuda", "device_name": name}
        monkeypatch.setattr("growprune.paper.reproduce.environment", lambda device, world, here=here: here)
        assert forecast(lab, [], [(once, 1)]).endswith(said)


def test_the_forecast_leaves_out_what_was_done(tmp_path: Path) -> None:
    """By the newest checkpoint's name: of pushing, of 120 epochs of fine-tuning, of the base network's 100."""
    lab, greg = Lab(tmp_path, device="cpu"), table1.pair(RESNET56, 0.5)[1]
    plan = lab.config(greg, 0, Path())
    pushed, tuned = recipe.schedule(plan).total_steps * plan.prune_batch, 120 * 50_000
    run, base = lab.shelf.folder(greg, 0), lab.shelf.training(RESNET56)
    pace = 6e-3  # guessed

    def says(bases: float, runs: float) -> None:
        text = forecast(lab, [RESNET56], [(greg, 0)])
        assert text.endswith(f" about {duration(pace * (bases + runs) + 2)} on this device")

    says(100 * 50_000, pushed + tuned)
    for step in (100, 3_000):
        (run / "checkpoints" / f"step-{step:09d}").mkdir(parents=True)
    says(100 * 50_000, pushed + tuned - 3_000 * plan.prune_batch)
    (run / "checkpoints" / f"step-{recipe.schedule(plan).total_steps + 10_000:09d}").mkdir()
    says(100 * 50_000, tuned - 10_000 * plan.batch)
    (base / "checkpoints" / "step-000010000").mkdir(parents=True)
    says(100 * 50_000 - 10_000 * lab.base_config(RESNET56).batch, tuned - 10_000 * plan.batch)
    (run / "result.json").touch()  # it has only to be shelved
    says(100 * 50_000 - 10_000 * lab.base_config(RESNET56).batch, 0)


def test_the_forecast_says_how_many_advance_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--parallel is for a GPU."""
    lab = Lab(tmp_path, parallel=4, device="cpu")
    wanted = missing(lab, table1.EXPERIMENT)
    assert "20 runs to do, one after another, about " in forecast(lab, [], wanted)
    monkeypatch.setattr("growprune.paper.lab.usable", lambda device: "cuda")
    assert "20 runs to do, 4 at once, about " in forecast(lab, [], wanted)
    assert "3 runs to do, 3 at once, about " in forecast(lab, [], wanted[:3])
    assert "1 run to do, about " in forecast(lab, [], wanted[:1])


@pytest.mark.parametrize(("room", "seconds"), [(119e6, 2.3e-4), (117e6, 1 / 135 / 4)])
def test_the_forecast_knows_of_images_that_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: float, seconds: float
) -> None:
    """300 large images take 59 MB: if twice that is not there, four cores decode them, and the GPU waits."""
    (folder := tmp_path / "photographs" / "train" / "a").mkdir(parents=True)
    for number in range(300):
        (folder / f"{number}.jpg").touch()
    here = {"device": "cuda", "device_name": "one of many"}
    for name, value in (("usable", "cuda"), ("room", room), ("default_workers", 4), ("environment", here)):
        monkeypatch.setattr(f"growprune.paper.reproduce.{name}", lambda *given, value=value: value)
    base, lab = imagenet.base("resnet50", str(tmp_path / "photographs")), Lab(tmp_path / "out")
    shown = base.epochs * 300
    guessed = "on this device, if it is as fast as an H200"
    assert forecast(lab, [base], []).endswith(f" about {duration(30 + seconds * shown)} {guessed}")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert forecast(lab, [base], []).endswith(f" about {duration(30 + seconds * shown / 4)} {guessed}")


# -- real runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", paper.NAMES)
def test_every_table_is_run_and_shown(shelf: Path, said: dict[str, Any], name: str) -> None:
    found, err = said[name]
    experiment = paper.find(name)
    assert (found["name"], found["scale"]) == (name, "smoke")
    done: set[Setting] = set()
    for each in paper.NAMES[: paper.NAMES.index(name) + 1]:
        done |= set(paper.find(each).settings(ROWS[each].split(",")))
    there = {setting.key("smoke", 0) for setting in done}
    left = [row for row in experiment.rows if any(each.key("smoke", 0) not in there for each in row.settings)]
    assert (found["missing"], found["unasked"]) == ([], [row.name for row in left])
    numbers = re.findall(r"\d+\.\d\d", json.dumps(found["grids"], ensure_ascii=False))
    asked = set(experiment.settings(ROWS[name].split(",")))
    grids = [grid for grid in experiment.grids(lambda setting: Found(())) if not {*grid.settings}.isdisjoint(asked)]
    unrun = [to for grid in grids or experiment.grids(lambda setting: Found(())) for to in grid.lines]
    assert len(numbers) > len(re.findall(r"\d+\.\d\d", json.dumps(unrun)))
    assert re.search(r"(?m)^growprune: .*\d+ runs? to do,.* about .* on this device$", err)


def test_a_figure_says_at_which_scale_it_was_run(shelf: Path) -> None:
    drawn = {"figure1": "figure1-resnet56-smoke.png", "table1": "table1-smoke.png", "obd": "obd-smoke.png"}
    assert {path.name for path in (shelf / "tables").glob("*.png")} == {*drawn.values()}
    for name in drawn:
        assert "data:image/png;base64," in (shelf / "tables" / f"{name}-smoke.html").read_text()


def test_a_contest_is_drawn_as_far_as_it_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accuracy against speed-up: the paper's points and ours, a panel a network that something was run of."""
    seen: list[list[Panel]] = []
    monkeypatch.setattr("growprune.paper.grid.chart", lambda panels: seen.append(panels) or b"")
    lab, (once, greg) = Lab(tmp_path, "paper"), table1.pair(VGG19, 0.7)
    assert table1.EXPERIMENT.figures(lab.look) == {}
    for seed, accuracy in ((0, 66.0), (1, 67.0)):
        shelve(lab, once, seed, speedup=8.5 + seed, accuracy=result(once)["accuracy"] | {"final": accuracy})
    shelve(lab, greg, speedup=9.0)
    assert table1.EXPERIMENT.figures(lab.look) == {"table1": b""}
    ((panel,),) = seen
    assert panel.title == "vgg19 on cifar100"
    assert panel.ours == {
        "GReg-1, here": [None, None, (9.0, 90.0, None), None, None],
        "one-shot, here": [None, None, (9.0, 66.5, 0.5), None, None],
    }
    assert list(panel.theirs) == ["GReg-1, paper", "one-shot, paper"]
    assert (len(panel.theirs["GReg-1, paper"]), panel.theirs["one-shot, paper"][2]) == (5, (8.84, 66.05, 0.04))
    short, smoke = Lab(tmp_path), Lab(tmp_path, "smoke")
    for each in (short, smoke):
        shelve(each, greg)
        table1.EXPERIMENT.figures(each.look)
    assert [*seen[-2][0].ours] == ["GReg-1, here (Ku = 1)", "one-shot, here"]
    small = "smoke run: a small network on digits, for vgg19"
    assert (seen[-1][0].title, seen[-1][0].theirs) == (small, {})  # nothing to be compared


def test_a_chart_shows_every_line_of_every_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ticks enough to read the speed-ups off; where nothing was run there is a gap."""
    drawn: list[Any] = []
    monkeypatch.setattr("growprune.report.figures.png", lambda figure: drawn.append(figure) or b"")
    panels = []
    for base in (RESNET56, VGG19):
        theirs = {"a": [(each.speedup, *each.greg) for each in obd.columns(base)]}
        panels.append(Panel(base.model, theirs, {"b": [None, None, (5.0, 80.0, None), (6.0, 79.0, 0.5), None]}))
    chart(panels)
    drawn[0].canvas.draw()
    for axes, base in zip(drawn[0].axes, (RESNET56, VGG19), strict=True):
        low, high = axes.get_xlim()
        assert sum(low <= tick <= high for tick in axes.get_xticks()) >= 3
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
        lines = [
            line.get_xdata() for line in axes.lines if len(line.get_xdata()) == 5 and line.get_linestyle() != "None"
        ]
        assert list(lines[0]) == [each.speedup for each in obd.columns(base)]
        assert [math.isnan(x) for x in lines[1]] == [True, True, False, False, True]


def test_only_what_was_asked_for_is_run(shelf: Path, said: dict[str, Any]) -> None:
    keys = {
        setting.key("smoke", seed)
        for name, rows in ROWS.items()
        for setting in paper.find(name).settings(rows.split(","))
        for seed in range(2 if name == "random" else 1)
    }
    assert {path.stem for path in shelf.glob("smoke-*.json")} == keys
    assert {path.name for path in (shelf / "runs").iterdir()} == {
        *keys, "base-smoke-resnet56-cifar10", "base-smoke-vgg19-cifar100", "base-smoke-resnet50-imagenet",
    }  # fmt: skip
    assert "growprune: 1 base network to train and 2 runs to do" in said["table1"][1]
    assert "growprune: 1 base network to train and 2 runs to do" in said["table2"][1]
    assert "growprune: 2 runs to do" in said["obd"][1]
    assert "\ngrowprune: 1 run to do" in "\n" + said["ku"][1]  # one-shot was there


def test_a_result_says_what_was_run_on_what_and_what_came_of_it(shelf: Path) -> None:
    found = read(shelf, GREG1)
    base = read(shelf, "base-smoke-resnet56-cifar10")
    assert found["config"]["seed"] == 0
    assert {"weights", "data_dir", "device"}.isdisjoint(found["config"])
    assert {each.name for each in fields(Prune)} >= set(found["config"]) - {"command"}
    assert found["base"] == {"sha256": base["sha256"], "accuracy": base["accuracy"]}
    assert found["accuracy"]["base"] == base["accuracy"]
    assert len(found["course"]) == found["config"]["epochs"] == 2
    assert found["accuracy"]["best"] == max(*found["course"], found["accuracy"]["final"])
    assert found["course"][-1] == pytest.approx(found["accuracy"]["final"])
    assert found["seconds"] > 0
    assert found["environment"].keys() >= {"growprune", "torch", "python", "device_name"}
    assert found["pushing"][-1]["lambda"] == pytest.approx(1.1)
    assert (shelf / f"{GREG1}.json").stat().st_size < 10_000
    (network,) = (shelf / "bases").glob("smoke-resnet56-*")
    assert network.name == f"smoke-resnet56-cifar10-{base['sha256'][:16]}.safetensors"


def test_both_methods_removed_the_same_filters_of_the_same_base(shelf: Path, said: dict[str, Any]) -> None:
    for name, column in (("table1", "0.9"), ("obd", "0.9"), ("random", "pick 1"), ("random", "pick 2")):
        assert line(said[name][0]["grids"][0], "the same filters removed")[column] == "yes"
    assert line(said["ku"][0]["grids"][0], "the same filters as one-shot")["5"] == "yes"
    gone = {key: read(shelf, key)["gone"] for key in (ONCE, GREG1, FIFTH)}
    assert len(set(gone.values())) == 1
    picks = [read(shelf, f"smoke-resnet56-cifar10-oneshot-0_0.9_0.9_0.9-random-seed{seed}")["gone"] for seed in (0, 1)]
    assert len({*picks, *gone.values()}) == 3


@pytest.mark.parametrize(
    ("change", "cell"),
    [
        ({"gone": "0123"}, "NO"),
        ({"base": {"sha256": "0", "accuracy": 95.0}}, "NO: other base"),
        ({"gone": None}, "not known"),
    ],
)
def test_other_filters_or_another_base_are_told(shelf: Path, tmp_path: Path, change: dict[str, Any], cell: str) -> None:
    out = bare(shelf, tmp_path / "out", ONCE)
    (out / f"{GREG1}.json").write_text(json.dumps(read(shelf, GREG1) | change))
    found = compared(Lab(out, "smoke"), table1.EXPERIMENT)
    assert line(found.to_json()["grids"][0], "the same filters removed")["0.9"] == cell
    assert ("Warning: where it says NO" in found.markdown()) == cell.startswith("NO")


def test_table_1_says_what_share_of_the_parameters_is_gone(shelf: Path) -> None:
    """Beside the paper's; OBD's table has no such line."""
    table, _ = compared(Lab(shelf, "smoke"), table1.EXPERIMENT).to_json()["grids"]
    gone = read(shelf, GREG1)["sparsity"]
    assert line(table, "parameters gone, here")["0.9"] == f"{100 * gone:.2f} %"
    assert line(table, "parameters gone, paper")["0.9"] == "90.39 %"
    assert "parameters gone" not in compared(Lab(shelf, "smoke"), obd.EXPERIMENT).markdown()


def test_numbers_for_other_programs(shelf: Path, said: dict[str, Any]) -> None:
    """Accuracies and costs by run; and how each stands to the bars."""
    assert len(said["random"][0]["runs"]["smoke-resnet56-cifar10-greg1-0_0.9_0.9_0.9-random-ku1"]) == 2
    last, best = [], []
    for shown, _ in said.values():
        for name, values in shown["runs"].items():
            kept = [read(shelf, f"{name}-seed{seed}")["accuracy"] for seed in range(len(values))]
            assert [each["seed"] for each in values] == list(range(len(values)))
            assert [each["last"] for each in values] == [each["final"] for each in kept]
            assert [each["best"] for each in values] == [each["best"] for each in kept]
            for key in ("base", "before_removal", "after_removal"):
                assert [each[key] for each in values] == [each[key] for each in kept]
            for key in ("speedup", "sparsity"):
                assert [each[key] for each in values] == [
                    read(shelf, f"{name}-seed{n}")[key] for n in range(len(values))
                ]
            last += [each["last"] for each in values]
            best += [each["best"] for each in values]
        verdicts = paper.find(shown["name"]).verdicts(Lab(shelf, "smoke").look)  # of runs done since then too
        assert [(each["bar"], each["row"]) for each in shown["verdicts"]] == [(each.bar, each.row) for each in verdicts]
    assert last != best
    values = {verdict["bar"]: verdict["value"] for shown, _ in said.values() for verdict in shown["verdicts"]}
    assert not values["accuracy"], "digits are not set beside the paper's images"
    assert not values["gain"]


def test_seeds_add_runs_and_a_pick_a_seed(shelf: Path, said: dict[str, Any]) -> None:
    grid = said["random"][0]["grids"][0]
    runs = [read(shelf, f"smoke-resnet56-cifar10-greg1-0_0.9_0.9_0.9-random-ku1-seed{seed}") for seed in (0, 1)]
    finals = [run["accuracy"]["final"] for run in runs]
    shown = line(grid, "GReg-1, here: last epoch")
    assert [shown["pick 1"], shown["pick 2"], shown["pick 3"]] == [*(f"{final:.2f}" for final in finals), ""]
    assert shown["mean"] == f"{statistics.mean(finals):.2f} ± {statistics.pstdev(finals):.2f} (2)"
    order = [text.partition(":")[0] for text in said["random"][1].splitlines() if ": finetune: 36 steps" in text]
    assert [key[-5:] for key in order] == ["seed0", "seed0", "seed1", "seed1"]


def test_json_page_and_markdown_say_the_same(shelf: Path, said: dict[str, Any]) -> None:
    for name in paper.NAMES:
        shown, place = said[name][0], shelf / "tables" / f"{name}-smoke"
        found = json.loads(place.with_suffix(".json").read_text())
        assert [grid for grid in found["grids"] if grid in shown["grids"]] == shown["grids"] != []
        assert (found["missing"], found["unasked"]) == (shown["unasked"], [])
        plain = place.with_suffix(".md").read_text()
        page = html.unescape(place.with_suffix(".html").read_text())
        for grid in found["grids"]:
            for cells in (grid["head"], *grid["lines"]):
                assert f"| {' | '.join(cells)} |" in plain
                assert all(f">{cell}<" in page for cell in cells)
            assert all(remark in plain and remark in page for remark in [grid["title"], *grid["remarks"]])
        for row in found["missing"]:
            assert re.search(rf"missing: .*\b{re.escape(row)}[,. ]", plain)
            assert re.search(rf"missing: .*\b{re.escape(row)}[,. ]", page)


def test_only_the_tables_of_the_rows_asked_for_are_shown(shop: Shop, shelf: Path, said: dict[str, Any]) -> None:
    shown = {name: len(found["grids"]) for name, (found, _) in said.items()}
    every = {name: len(paper.find(name).grids(lambda _: Found(()))) for name in paper.NAMES}
    assert shown == {**dict.fromkeys(paper.NAMES, 1)}
    several = {"table1": 2, "table2": 2, "table3": 5, "obd": 2, "random": 2, "ku": 2, "scopes": 2, "causes": 6}
    assert every == {**shown, **several}
    words = " ".join(shop.done(*command("table1", shelf, "--no-run", "--only", "resnet56-0.9,vgg19-0.8")).out.split())
    assert words.count("Table 1: ") == 2
    assert "Not all of it was run; missing: vgg19-0.8. Not asked for, and not all run: resnet56-0.5, " in words


def test_every_grid_knows_its_settings() -> None:
    """Else it would be shown whatever is asked for; one table alone always is."""
    for name in paper.NAMES:
        experiment = paper.find(name)
        grids = experiment.grids(lambda _: Found(()))
        assert len(grids) == 1 or {each for grid in grids for each in grid.settings} == set(experiment.settings())


def test_every_title_of_a_smoke_run_says_first_that_it_is_one(shelf: Path, said: dict[str, Any]) -> None:
    """In text, Markdown, JSON and page; at other scales none does."""
    first = "Smoke run of small networks on digits, not the paper's: "
    for name in paper.NAMES:
        found = compared(Lab(shelf, "smoke"), paper.find(name))
        titles = [grid.title for grid in found.grids]
        assert [grid["title"] for grid in said[name][0]["grids"]] == [
            grid.title for grid in found.of(ROWS[name].split(",")).grids
        ]
        assert all(title.startswith(first) for title in titles)
        assert all(f"**{first}" in line for line in found.markdown().splitlines() if line.startswith("**"))
        heads = re.findall(r"<(?:h1|h2|title|figcaption)>(.*?)</", found.html())
        assert len(heads) == 2 + len(titles) + len(found.figures)
        assert all(html.unescape(head).removeprefix("growprune: ").startswith(first) for head in heads)
        assert text_of(found, 80).startswith("Smoke run of small networks on digits")
        assert "Smoke" not in compared(Lab(shelf, "short"), paper.find(name)).html()


def text_of(found: Comparison, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, _environ={})
    console.print(found.shown())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("name", paper.NAMES)
def test_no_cell_is_folded_on_a_terminal(name: str, width: int, tmp_path: Path) -> None:
    """Three runs of every setting: the widest cells there are."""
    found = compared(Lab(tmp_path), paper.find(name))
    lines = [(label, *("88.88 ± 0.88 (3)" for _ in cells)) for label, *cells in found.grids[0].lines]
    wide = replace(found, grids=[replace(grid, lines=tuple(lines)) for grid in found.grids[:1]])
    for each, cells in ((found, [cell for grid in found.grids for line in grid.lines for cell in line[1:]]),
                        (wide, ["88.88 ± 0.88 (3)"] * sum(len(line) - 1 for line in lines))):  # fmt: skip
        text = text_of(each, width)
        assert max(map(len, text.splitlines())) <= width
        for cell in set(cells) - {""}:
            assert text.count(cell) >= cells.count(cell)
    if width == 200:
        assert text.count("─ ") == 1  # where there is room it is one table


def test_images_that_cannot_be_had_are_missed_before_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(name: str, data_dir: Path) -> None:
        raise GrowpruneError(f"{name}: no download; put it into {data_dir}/")

    monkeypatch.setattr(data, "fetch", no_network)
    said: list[str] = []
    lab = Lab(tmp_path / "out", device="cpu", options={"data_dir": str(tmp_path / "data")}, say=said.append)
    with pytest.raises(GrowpruneError, match=f"cifar10: no download; put it into {tmp_path}/data/"):
        reproduce(lab, table1.EXPERIMENT)
    large = paper.find("table4", str(tmp_path / "none"))
    for several in ((large,), (table1.EXPERIMENT, large)):  # before anything is downloaded
        with pytest.raises(GrowpruneError, match=rf"--images: no folder {tmp_path}/none; give ImageNet's"):
            reproduce(lab, *several)
    monkeypatch.setattr("growprune.paper.reproduce.launched", lambda: True)
    with pytest.raises(GrowpruneError, match="--images: no folder"):
        reproduce(lab, large)
    assert (said, [*tmp_path.iterdir()]) == ([], [])


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (("train/cat", "train/dog"), "val"),
        (("train/cat", "train/dog", "val/cat", "val/cow"), "cow"),
        (("train/cat", "train/dog", "val/cat", "val/dog"), "--images: 4 training images in .*, less than a batch"),
    ],
)
def test_a_folder_that_will_not_do_is_refused_before_the_estimate(
    tmp_path: Path, parts: tuple[str, ...], said: str
) -> None:
    for part in parts:
        (tmp_path / "pets" / part).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (80, 70 + i)).save(tmp_path / "pets" / part / f"{i}.jpg")
    heard: list[str] = []
    with pytest.raises(GrowpruneError, match=said):
        reproduce(Lab(tmp_path / "out", device="cpu", say=heard.append), paper.find("table3", str(tmp_path / "pets")))
    assert not heard


def test_finished_runs_are_not_done_twice(shop: Shop, shelf: Path) -> None:
    def kept() -> dict[str, Any]:
        return {name: it for name, it in contents(shelf).items() if not name.startswith("tables/")}

    before = kept()
    done = shop.done(*command("table1", shelf, "--only", ROWS["table1"]))
    assert done.err == "growprune: every run is there: nothing to do\n"
    assert f"Report: {shelf / 'tables' / 'table1-smoke.html'}" in done.out
    assert kept() == before


def broken_off(shop: Shop, asked: tuple[object, ...], run: Path, number: int, at: int) -> Done:
    """How a command ended that got a signal once its run had come to step `at`; again if it was through by then."""
    for _ in range(5):
        working = shop.fork(*asked)
        until(lambda: [step for step in steps(run) if step >= at], working.alive)
        time.sleep(0 if at else 0.3)  # some steps on
        if working.alive():
            working.kill(number)
        if (done := working.wait()).code:
            return done
        shutil.rmtree(run)
        (run.parents[1] / f"{run.name}.json").unlink()
    raise AssertionError("it was always faster")


@pytest.mark.parametrize(("number", "at"), [(signal.SIGTERM, 0), (signal.SIGKILL, 60)])
def test_an_interrupted_run_goes_on_to_the_same_result(
    shop: Shop, shelf: Path, tmp_path: Path, number: signal.Signals, at: int
) -> None:
    """Asked to end while GReg-1 pushes; killed while it is fine-tuned."""
    out = bare(shelf, tmp_path / "out", ONCE)
    asked, run = command("ku", out, "--only", "resnet56-5"), out / "runs" / FIFTH
    done = broken_off(shop, asked, run, number, at)
    assert not (out / f"{FIFTH}.json").exists()
    if number == signal.SIGTERM:
        assert done.code == 143
        assert done.err.endswith("growprune: stopped, all saved; the same command goes on with it\n")
        assert done.out == ""  # a table would hide how to go on
    else:
        assert done.code == -signal.SIGKILL
    again = shop.done(*asked)
    (step,) = map(int, re.findall(r"going on at step (\d+)", again.err))
    assert step < 60 if number == signal.SIGTERM else step == at
    assert timeless(read(out, FIFTH)) == timeless(read(shelf, FIFTH))
    assert (run / "model.safetensors").read_bytes() == (shelf / "runs" / FIFTH / "model.safetensors").read_bytes()


def test_a_run_that_was_finished_but_not_shelved_is_shelved(shop: Shop, shelf: Path, tmp_path: Path) -> None:
    """Killed in between: nothing is trained again."""
    out = bare(shelf, tmp_path / "out", ONCE)
    shutil.copytree(shelf / "runs" / GREG1, out / "runs" / GREG1)
    notes = out / "runs" / GREG1 / "metrics.jsonl"
    notes.write_bytes(b'{"torn": \n' + notes.read_bytes())
    done = shop.done(*command("table1", out, "--only", "resnet56-0.9"))
    assert "finished before: nothing was done" in done.err
    assert read(out, GREG1) == read(shelf, GREG1)


def test_a_shelf_can_be_moved_while_a_run_is_half_done(shop: Shop, shelf: Path, tmp_path: Path) -> None:
    """Its base network then lies elsewhere; under the name of another one it is refused."""
    old = bare(shelf, tmp_path / "old", ONCE)
    broken_off(shop, command("ku", old, "--only", "resnet56-5"), old / "runs" / FIFTH, signal.SIGKILL, 60)
    new = tmp_path / "new"
    old.rename(new)
    done = shop.done(*command("ku", new, "--only", "resnet56-5"))
    assert "going on at step 60" in done.err
    assert timeless(read(new, FIFTH)) == timeless(read(shelf, FIFTH))
    network = tmp_path / "base-0123.safetensors"
    assert began(new / "runs" / FIFTH, network) == network
    assert began(tmp_path / "nothing", network) == network


def test_what_another_process_is_doing_is_left_to_it(shop: Shop, shelf: Path, tmp_path: Path) -> None:
    """All else is done, and the command says what it did not do."""
    out = bare(shelf, tmp_path / "out")
    (out / "runs" / GREG1).mkdir(parents=True)
    assert not in_use(out / "runs" / GREG1)
    held = lock(out / "runs" / GREG1)
    try:
        assert in_use(out / "runs" / GREG1)
        done = shop.run(*command("table1", out, "--only", "resnet56-0.9"))
    finally:
        os.close(held)
    assert done.code == 2
    assert done.err.splitlines()[-1] == (
        f"growprune: {GREG1}: another process is at work on it; give the same command when it is done"
    )
    assert "one-shot, here: last epoch" in done.out  # the table of what there is
    assert read(out, ONCE)
    assert not (out / f"{GREG1}.json").exists()


@pytest.mark.parametrize("when", [1, 2])
def test_what_another_process_has_done_in_the_end_is_not_named(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    """It has a base network and a run when this command comes to them, and has done them when it ends. Runs of that
    network are done here, whether it came before the others were pruned (1) or meanwhile (2)."""
    out, vgg = bare(shelf, tmp_path / "out"), "smoke-vgg19-cifar100"
    theirs = [out / path.relative_to(shelf) for path in (shelf / f"base-{vgg}.json", *shelf.glob(f"bases/{vgg}*"))]
    for path in theirs:
        path.unlink()
    held = [hold(out / "runs" / name) for name in (GREG1, f"base-{vgg}")]
    calls = itertools.count(1)

    def meanwhile(*given: Any, **more: Any) -> Any:
        if next(calls) == when:
            for path in (*theirs, out / f"{GREG1}.json"):
                shutil.copy(shelf / path.relative_to(out), path)
        return side_by_side(*given, **more)

    monkeypatch.setattr("growprune.paper.reproduce.side_by_side", meanwhile)
    try:
        lab, rows = Lab(out, "smoke", device="cpu"), ["resnet56-0.9", "vgg19-0.9"]
        reproduce(lab, table1.EXPERIMENT, only=rows)
    finally:
        for each in held:
            os.close(each)
    assert missing(lab, table1.EXPERIMENT, only=rows) == []
    assert next(calls) - 1 == when + 1  # bases, runs, and in the second case those of the late one
    assert not list(out.glob("*.old"))


def hold(folder: Path) -> int:
    folder.mkdir(parents=True)
    return lock(folder)


def test_a_run_that_another_process_takes_up_meanwhile_is_busy_too(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Free when it was looked at, held when its turn has come: told in the same words, and not as one that failed."""
    out, held = bare(shelf, tmp_path / "out", ONCE), []

    def meanwhile(*given: Any, **more: Any) -> Any:
        held.extend(hold(out / "runs" / GREG1) for _ in given[0])
        return side_by_side(*given, **more)

    monkeypatch.setattr("growprune.paper.reproduce.side_by_side", meanwhile)
    try:
        with pytest.raises(SomeFailedError) as told:
            reproduce(Lab(out, "smoke", device="cpu"), table1.EXPERIMENT, only=["resnet56-0.9"])
    finally:
        for each in held:
            os.close(each)
    assert str(told.value) == f"{GREG1}: {BUSY}"
    said = capsys.readouterr().err
    assert "in use by another process" in said
    assert "failed" not in said


def test_no_run_shows_what_is_there_and_does_nothing(shop: Shop, shelf: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    done = shop.done(*command("table1", empty, "--no-run"))
    assert done.err == f"growprune: --out: no folder {empty}: nothing was run there\n"
    assert "not run" in done.out
    words = " ".join(done.out.split())
    assert f"missing: {', '.join(row.name for row in table1.EXPERIMENT.rows)}." in words
    assert not empty.exists()
    assert "Report: " not in done.out
    out = bare(shelf, tmp_path / "out", ONCE, GREG1)
    found = json.loads(shop.done(*command("table1", out, "--no-run", "--json")).out)
    assert "resnet56-0.9" not in found["missing"]
    assert len(found["missing"]) == 9
    shown = line(found["grids"][0], "GReg-1, here: last epoch")
    assert shown["0.9"] == f"{read(shelf, GREG1)['accuracy']['final']:.2f}"
    assert shown["0.5"] == "not run"
    assert not [path for path in out.iterdir() if path.name in ("runs", "tables")]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("", "damaged: not JSON"),
        ("{}", "not a run's result (no accuracy)"),
        ({"accuracy": {"base": 1.0}}, "not a run's result (no accuracy.before_removal)"),
        ({"speedup": math.nan}, "not a run's result (no speedup)"),
        ({"course": None}, "not a run's result (no course)"),
        ({"course": [90.0, "x"]}, "not a run's result (no course)"),
        ({"config": {"epochs": 40}}, "another run's result (epochs 40, not 120)"),
        ({"config": {"data": "cifar100"}}, "another run's result (data cifar100, not cifar10)"),
        ({"config": {"ratios": "0.5"}}, "another run's result (ratios 0.5, not [0, 0.5, 0.5, 0.5])"),
        ({"config": {"seed": 1}}, "another run's result (seed 1, not 0)"),
    ],
)
def test_a_file_that_is_no_result_is_named_and_the_others_are_shown(
    shop: Shop, tmp_path: Path, change: str | dict[str, Any], why: str
) -> None:
    """Taken as not run: it is nobody's run, or another's."""
    lab, (once, greg) = Lab(tmp_path), table1.pair(RESNET56, 0.5)
    shelve(lab, greg)
    file = shelve(lab, once, **(change if isinstance(change, dict) else {}))
    if isinstance(change, str):
        file.write_text(change)
    done = shop.done("reproduce", "table1", "--no-run", "--json", "--out", tmp_path)
    found = json.loads(done.out)
    cells = [line(found["grids"][0], f"{name}, here: last epoch")["0.5"] for name in ("one-shot", "GReg-1")]
    assert cells == ["not run", "90.00"]
    assert (found["missing"][0], found["unread"]) == ("resnet56-0.5", [f"{file}: {why}"])
    text = shop.done("reproduce", "table1", "--no-run", "--out", tmp_path).out
    assert f"Not read: {file}: {why}.".replace(" ", "") in "".join(text.split())
    comparison = compared(lab, table1.EXPERIMENT)
    assert f"Not read: {file}: {why}.\n" in comparison.markdown()
    assert "missing: resnet56-0.5 (oneshot), resnet56-0.7, " in comparison.markdown()
    assert (once, 0) in missing(lab, table1.EXPERIMENT)


def test_a_damaged_result_comes_back_from_its_run(shop: Shop, shelf: Path, tmp_path: Path) -> None:
    shutil.copytree(shelf, out := tmp_path / "out")
    (file := out / f"{ONCE}.json").write_text("{")
    done = shop.done(*command("table1", out, "--only", "resnet56-0.9"))
    said = f"growprune: {file}: damaged: not JSON: taken as not run, and kept as .json.old when it is\n"
    assert said in done.err
    assert file.with_suffix(".json.old").read_text() == "{"
    assert timeless(read(out, ONCE)) == timeless(read(shelf, ONCE))
    file.write_text("{")
    (folder := out / "runs" / ONCE).joinpath("result.json").write_text("{}")
    failed = shop.run(*command("table1", out, "--only", "resnet56-0.9"))
    assert failed.code == 2
    why = "not a run's result (no accuracy): delete the folder, and it is run again"
    assert f"{folder / 'result.json'}: {why}" in failed.err
    assert file.read_text() == "{"  # there is nothing to put in its place


def test_what_damaged_notes_lose_is_told_and_the_run_is_kept(shop: Shop, shelf: Path, tmp_path: Path) -> None:
    """The hours it took are not lost for a line of its notes; where these are the result, as in figure 1, they are."""
    shutil.copytree(shelf, out := tmp_path / "out")
    whole, notes = read(shelf, ONCE), out / "runs" / ONCE / "metrics.jsonl"
    lines = notes.read_bytes().splitlines(keepends=True)
    removal = next(line for line in lines if b'"removal"' in line)
    for text, lost in (
        (b"".join(lines)[:-20], {"course": whole["course"][:-1]}),
        (b"".join(line for line in lines if line != removal), {"gone": None}),
        (b"".join([*lines[:1], b"{}\n", *lines[1:]]), {}),
    ):
        (out / f"{ONCE}.json").unlink()
        notes.write_bytes(text)
        said = shop.done(*command("table1", out, "--only", "resnet56-0.9")).err
        assert f"{notes}: damaged: {ONCE}.json lacks some of the run's course, or which filters went" in said
        assert timeless(read(out, ONCE)) == timeless(whole | lost)


def test_figure_1_has_nothing_to_draw_of_damaged_notes(tmp_path: Path) -> None:
    """What of them is whole is drawn; if that is nothing, the run is refused."""
    (watched,) = paper.find("figure1").settings(["resnet56"])
    note = {"stage": "prune", "phase": "push", "step": 9, "accuracy": 90.0, "lambda": 0.01, "loss": 1.0}
    layers = {"layer2.3.conv1": {"spread": 0.25, "norms": [1.0, 2.0]}}
    (notes := tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [note, note | {"layers": layers}])))
    drawn = [{"step": 9, "lambda": 0.01, "spread": {"layer2.3.conv1": 0.25}, "norms": [1.0, 2.0]}]
    assert course(tmp_path, watched)["separation"] == drawn
    notes.write_text(json.dumps(note))
    with pytest.raises(GrowpruneError, match=r"metrics.jsonl: damaged: nothing is left to draw of: delete the folder"):
        course(tmp_path, watched)
    assert len(course(tmp_path, replace(watched, watched=None))["pushing"]) == 1


def test_of_single_weights_no_filters_are_missed(shop: Shop, shelf: Path, tmp_path: Path) -> None:
    """Which weights went is not noted; that alone damages nothing."""
    shutil.copytree(shelf, out := tmp_path / "out")
    run = out / "runs" / ONCE
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if '"removal"' not in line))
    (setting, *_) = table1.pair(RESNET56, 0.9)
    kept = Shelf(out, "smoke")
    ground = kept.ground(RESNET56)
    assert ground is not None
    told = [kept.keep(each, 7, ground, 1) for each in aliases(kept, setting)]
    assert [bool(each) for each in told] == [True, False]


def aliases(shelf: Shelf, setting: Setting) -> Iterator[Setting]:
    """The same run's folder as that of seed 7, of filters and of single weights."""
    for granularity in ("filter", "weight"):
        other = replace(setting, granularity=granularity)
        shutil.copytree(shelf.folder(setting, 0), shelf.folder(other, 7))
        yield other


def test_a_run_that_another_process_has_shelved_meanwhile_is_left_as_it_is(shelf: Path, tmp_path: Path) -> None:
    """It was missing when this command looked; `.json.old` is for what is damaged."""
    shutil.copytree(shelf, out := tmp_path / "out")
    lab, once = Lab(out, "smoke", device="cpu"), table1.pair(RESNET56, 0.9)[0]
    file, ground = lab.shelf.file(once, 0), lab.shelf.ground(RESNET56)
    assert ground is not None
    file.write_text(json.dumps(read(out, ONCE) | {"parallel": 8}))
    before, number = contents(out), file.stat().st_ino
    assert prune(lab, [(once, 0)], {RESNET56: ground}) == []
    assert (contents(out), file.stat().st_ino) == (before, number)


def test_tables_say_so_if_runs_began_from_several_base_networks(tmp_path: Path) -> None:
    """Of one name; that two networks have two is no news."""
    lab, (once, greg) = Lab(tmp_path), table1.pair(RESNET56, 0.9)

    def said() -> list[str]:
        return [each for each in compared(lab, table1.EXPERIMENT).remarks if " began from " in each]

    shelve(lab, once, base={"sha256": "a" * 64, "accuracy": 93.5})
    shelve(lab, table1.pair(VGG19, 0.7)[0], base={"sha256": "b" * 64, "accuracy": 74.0})
    assert said() == []
    shelve(lab, greg, base={"sha256": "c" * 64, "accuracy": 93.456})
    shelve(lab, greg, seed=1, base={"sha256": "c" * 64, "accuracy": 93.456})
    first, second = f"2 from {'c' * 16} (93.46 %)", f"1 from {'a' * 16} (93.50 %)"
    assert said() == [f"Runs of resnet56-cifar10 began from 2 base networks: {first}, {second}."]


def test_tables_say_on_what_their_runs_were_made(tmp_path: Path) -> None:
    """As many as are shown, the most frequent place first; a file that does not say it is a run's all the same."""
    lab, (once, greg) = Lab(tmp_path), table1.pair(RESNET56, 0.9)

    def said(*only: str) -> list[str]:
        return [each for each in compared(lab, table1.EXPERIMENT).of(only).remarks if " on " in each]

    assert said() == []
    shelve(lab, greg)
    for seed in (0, 1):
        shelve(lab, once, seed, environment={"device": "cuda", "device_name": "loom", "torch": "3", "world": 2})
    loom, abacus = "2 × loom, torch 3, growprune not known", "abacus, torch 2, growprune 0"
    assert said() == said("resnet56-0.9") == [f"2 runs on {loom}; 1 run on {abacus}."]
    assert said("resnet56-0.5") == []
    shown = compared(lab, table1.EXPERIMENT).to_json()["runs"]
    assert [run["made_on"] for runs in shown.values() for run in runs] == [loom, loom, abacus]


def test_means_and_differences_say_over_what_they_are(tmp_path: Path) -> None:
    """One-shot with three seeds, GReg-1 with one: its gain is over that one; nor are precisions mixed in silence."""
    lab, (once, greg) = Lab(tmp_path, "paper"), table1.pair(RESNET56, 0.9)
    shelve(lab, greg)
    assert compared(lab, table1.EXPERIMENT).notes == ()
    shelve(lab, once)
    assert compared(lab, table1.EXPERIMENT).notes == ()
    for seed, precision in ((0, "bf16"), (1, "fp32"), (2, "bf16")):
        shelve(lab, once, seed, choices={"finetune": {"precision": precision}, "prune": {"precision": "bf16"}})
    assert compared(lab, table1.EXPERIMENT).notes == (
        "± is the deviation over so many runs as stand in brackets.",
        "Differences between methods are over the seeds that both have, from the same base network.",
        "Means over runs of different precision: resnet56-cifar10-oneshot-0_0.9_0.9_0.9.",
    )
    assert "Differences" not in "".join(compared(lab, paper.find("scopes")).notes)  # of the same runs: it shows none
    shelve(lab, greg, 1, choices={"finetune": {"precision": "fp32"}})
    shelve(lab, greg, 2, choices={"finetune": {"precision": "bf16"}})
    assert compared(lab, table1.EXPERIMENT).notes[-1].endswith("greg1-0_0.9_0.9_0.9-ku10.")
    for seed in (1, 2):
        lab.shelf.file(greg, seed).unlink()
    (row,) = (
        words
        for name, words in lacking(Lab(tmp_path, "paper", seeds=3), table1.EXPERIMENT).items()
        if name == "resnet56-0.9"
    )
    assert row == "resnet56-0.9 (greg1 seed 1, 2)"


def test_of_several_runs_figure_1_shows_the_first_and_says_so(shelf: Path) -> None:
    (found,) = compared(lab := Lab(shelf, "smoke"), paper.find("figure1")).grids
    (about,) = found.remarks

    def twice(setting: Setting) -> Found:
        once = lab.look(setting)
        return replace(once, runs=(*once.runs, *({**run, "separation": run["separation"][:1]} for run in once.runs)))

    (grid,) = paper.find("figure1").grids(twice)
    assert grid.remarks == (about, "Of several runs the first is shown.")
    assert grid.lines == found.lines


def test_what_is_left_of_a_filter_without_any_loss_is_what_the_optimizer_leaves() -> None:
    found = config(paper.find("figure1").settings(["vgg19"])[0], "paper")
    weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], found.prune_lr, found.momentum, weight_decay=found.weight_decay)
    for step in range(250):
        weight.grad = found.delta_lambda_pick * (step // found.ku + 1) * weight.detach()
        optimizer.step()
    assert figure1.untouched(asdict(found), 250) == pytest.approx(weight.item(), rel=1e-12)


def test_figure_1_draws_the_papers_layers() -> None:
    """VGG19's of index 3, counted from 0; ResNet56's of the name that ResNet50's has."""
    watched = {setting.base.model: setting.watched for setting in paper.find("figure1").settings()}
    layers = [name for name, module in models.fresh("vgg19", 100).named_modules() if isinstance(module, nn.Conv2d)]
    assert watched == {"resnet56": "layer2.3.conv1", "vgg19": layers[3]}
    assert "layer2.3.conv1" in dict(models.fresh("resnet56", 10).named_modules())


def test_figure_1_tells_what_the_penalty_did_to_the_norms(tmp_path: Path) -> None:
    """Deviations at λ = 0, at a third of the way, at the end; layers where it grew; filters still among the least."""
    further = paper.find("figure1").settings(["vgg19-further"])[0]
    assert further.key("short", 0) == "vgg19-cifar100-greg2-0_0_1_15_0.5-ku1-watched-until_0.3-seed0"

    def note(step: int, spread: tuple[float, float], norms: list[float]) -> dict[str, Any]:
        return {"step": step, "lambda": step * 1e-5, "spread": dict(zip("ab", spread, strict=True)), "norms": norms}

    notes = [
        note(0, (0.1, 0.3), [1.0, 2.0, 3.0, 4.0]),
        note(10_000, (0.1, 0.4), [2.0, 1.0, 3.0, 4.0]),
        note(12_000, (0.9, 0.9), [4.0, 3.0, 2.0, 1.0]),
        note(20_000, (0.9, 0.9), [4.0, 3.0, 2.0, 1.0]),
        note(30_000, (0.1, 0.5), [1.0, 3.0, 2.0, 4.0]),
    ]
    shelve(lab := Lab(tmp_path), further, watched="a", separation=notes)
    (grid,) = compared(lab, paper.find("figure1")).grids
    cells = ("0.200", "0.250", "0.300", "1 of 2", "0.500 to 2.000 (0.006)", "2 and 1 of 2")
    assert {line[0]: line[1:] for line in grid.lines}["vgg19 on cifar100, λ to 0.3, Ku = 1"] == cells
    assert [line[1] for line in grid.lines].count("not run") == 6


def test_runs_that_were_computed_otherwise_are_told(tmp_path: Path) -> None:
    """By what they computed with, not by what was asked for then; where a row names its precision, that is meant."""
    (once, greg), tuned = table1.pair(RESNET56, 0.9), {"finetune": {"precision": "bf16"}}
    lab = Lab(tmp_path, options={"precision": "bf16", "deterministic": True})
    shelve(lab, once, config={"deterministic": True}, choices=tuned)
    assert done_without(lab, [once, greg]) == []
    shelve(lab, greg, choices={"finetune": {"precision": "fp32"}})
    told = "1 of the runs that are there were done without --{}; give another --out for it"
    assert done_without(lab, [once, greg]) == [told.format("precision bf16"), told.format("deterministic")]
    assert done_without(Lab(tmp_path), [once, greg]) == []
    assert done_without(lab, [once, *table1.pair(VGG19, 0.5)]) == []


def test_a_row_that_names_its_precision_has_no_other(tmp_path: Path) -> None:
    lab, causes = Lab(tmp_path), paper.find("causes")
    once, greg = causes.settings(["resnet56-fp32-0.9"])
    shelve(lab, once)
    file = shelve(lab, greg, config={"precision": "bf16"})
    assert lab.shelf.damaged(causes.settings()) == [f"{file}: another run's result (precision bf16, not fp32)"]
    assert (lab.look(once).seeds, lab.look(greg).seeds) == ({0}, set())


def test_a_network_whose_base_is_gone_keeps_no_other_from_being_run(shop: Shop, shelf: Path, tmp_path: Path) -> None:
    shutil.copytree(shelf, out := tmp_path / "out", ignore=shutil.ignore_patterns("runs"))
    (network,) = (out / "bases").glob("smoke-vgg19-*")
    network.unlink()
    elsewhere(out, "smoke-vgg19-cifar100")
    key = "smoke-resnet56-cifar10-oneshot-0_0.7_0.7_0.7-seed0"
    (out / f"{key}.json").unlink(missing_ok=True)
    shutil.rmtree(out / "tables")
    (out / "tables").write_text("in the way")
    said = shop.run(*command("table1", out, "--only", "resnet56-0.7,vgg19-0.9"))
    assert said.code == 2
    assert said.err.startswith(f"growprune: vgg19-cifar100 is left out: {network}: the base network of the runs in ")
    *_, before, last = said.err.splitlines()
    assert str(out / "tables") in before
    assert f"vgg19-cifar100: {network}: the base network of the runs in {out} is gone" in last
    assert (out / f"{key}.json").exists()


def test_the_table_is_shown_where_it_cannot_be_kept(shop: Shop, shelf: Path, tmp_path: Path) -> None:
    shutil.copytree(shelf, out := tmp_path / "out", ignore=shutil.ignore_patterns("runs", "tables"))
    (out / "tables").write_text("in the way")
    said = shop.run(*command("table1", out, "--only", "resnet56-0.9"))
    assert said.code == 2
    assert "Table 1: resnet56" in said.out
    assert str(out / "tables") in said.err
    refused = shop.refused(*command("table1", out / "tables", "--no-run"))
    assert refused == f"growprune: --out: {out / 'tables'} is a file; give a folder"


def elsewhere(out: Path, network: str) -> None:
    """As if its base network had been trained with another PyTorch."""
    facts = json.loads((about := out / f"base-{network}.json").read_text())
    facts["environment"]["torch"] = "1.0"
    about.write_text(json.dumps(facts))


@pytest.mark.parametrize("state", ["is gone", "has changed"])
def test_another_base_network_is_refused(shop: Shop, shelf: Path, tmp_path: Path, state: str) -> None:
    out = bare(shelf, tmp_path / "out")
    (network,) = (out / "bases").glob("smoke-resnet56-*")
    if state == "is gone":
        elsewhere(out, "smoke-resnet56-cifar10")
        network.unlink()
    else:
        network.write_bytes(network.read_bytes()[:-1] + b"\x7f")
    before = contents(out)
    said = shop.refused(*command("table1", out, "--only", "resnet56-0.9"))
    assert said == (
        f"growprune: {network}: the base network of the runs in {out} {state}: put it back, or give another --out"
    )
    assert contents(out) == before


@pytest.mark.parametrize(("text", "why"), [("{", "damaged: not JSON"), ("{}", "not a base network's (no sha256)")])
def test_a_base_networks_file_that_is_damaged_is_refused_with_a_way_out(
    shop: Shop, shelf: Path, tmp_path: Path, text: str, why: str
) -> None:
    out = bare(shelf, tmp_path / "out")
    (about := out / "base-smoke-resnet56-cifar10.json").write_text(text)
    before = contents(out)
    said = shop.refused(*command("table1", out, "--only", "resnet56-0.9"))
    assert said == f"growprune: {about}: {why}: put it back, or give another --out"
    assert contents(out) == before


def test_a_base_network_that_is_gone_is_trained_again_to_the_same_bits(shop: Shop, shelf: Path, tmp_path: Path) -> None:
    out = bare(shelf, tmp_path / "out")
    (network,) = (out / "bases").glob("smoke-resnet56-*")
    before, about = network.read_bytes(), (out / "base-smoke-resnet56-cifar10.json").read_bytes()
    network.unlink()
    said = shop.run(*command("table1", out, "--only", "resnet56-0.9"))
    assert said.code == 0
    assert "1 base network to train and 2 runs to do" in said.err
    assert "resnet56-cifar10 is gone: it is trained again, and taken if it comes out the same" in said.err
    assert (network.read_bytes(), (out / "base-smoke-resnet56-cifar10.json").read_bytes()) == (before, about)
    assert timeless(read(out, ONCE)) == timeless(read(shelf, ONCE))


def test_a_base_network_that_comes_out_otherwise_is_not_taken_for_the_lost_one(
    shop: Shop, shelf: Path, tmp_path: Path
) -> None:
    out = bare(shelf, tmp_path / "out")
    (network,) = (out / "bases").glob("smoke-resnet56-*")
    network.unlink()
    facts = json.loads((about := out / "base-smoke-resnet56-cifar10.json").read_text())
    sha256 = facts["sha256"]
    about.write_text(json.dumps(facts | {"sha256": "0" * 64}))
    before = about.read_bytes()
    why = f"it is not the base network that the runs in {out} began from ({sha256[:16]}, not {'0' * 16})"
    for _ in range(2):  # the second time it need not be trained
        said = shop.run(*command("table1", out, "--only", "resnet56-0.9"))
        assert said.code == 2
        assert f"{why}: give another --out, or delete that folder" in said.err.splitlines()[-1]
    assert about.read_bytes() == before
    assert not list((out / "bases").glob("smoke-resnet56-*"))


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("environment", "torch", "1.0"),
        ("environment", "device", "cuda"),
        ("environment", "device_name", "Z80"),
        ("environment", "world", 2),
        ("environment", "threads", 99),
        ("config", "deterministic", False),
        ("config", "lr", "cosine:0.3"),
        ("config", "precision", "bf16"),
    ],
)
def test_a_base_network_can_be_trained_again_where_its_bits_come_back(
    shelf: Path, where: str, key: str, value: object
) -> None:
    lab = Lab(shelf, "smoke", device="cpu")
    facts = json.loads(lab.shelf.about(RESNET56).read_text())
    assert facts["config"][key] != value if where == "config" else facts[where][key] != value
    assert repeatable(lab, RESNET56, facts)
    assert not repeatable(lab, RESNET56, {**facts, where: {**facts[where], key: value}})


def test_a_base_network_is_trained_again_as_it_was_computed(shelf: Path, tmp_path: Path) -> None:
    """Whatever is asked for now: else its bits would not come back, and its runs could not go on."""
    lab = Lab(tmp_path, "smoke", device="cpu")
    facts = json.loads(Lab(shelf, "smoke").shelf.about(RESNET56).read_text())
    then = {"precision": "bf16", "layout": "channels_last", "compile": "on", "kernels": "on"}
    facts["config"] |= then
    assert {key: getattr(lab.base_config(RESNET56), key) for key in then} == dict.fromkeys(then, "auto")
    lab.shelf.about(RESNET56).write_text(json.dumps(facts))
    for options in ({}, {"precision": "fp32", "compile": "off"}):
        again = replace(lab, options=options)
        assert {key: getattr(again.base_config(RESNET56), key) for key in then} == then
        assert repeatable(again, RESNET56, facts)
    lab.shelf.about(RESNET56).write_text("{")  # whoever needs it will say so
    assert lab.base_config(RESNET56).precision == "auto"


def test_only_runs_with_one_and_the_same_luck_are_paired() -> None:
    """The seed, and the base network."""

    def ran(*runs: tuple[int, str]) -> Found:
        return Found(tuple({"config": {"seed": seed}, "base": {"sha256": base}} for seed, base in runs))

    one, two = ran((0, "a"), (1, "a"), (2, "b")).paired(ran((0, "a"), (1, "c"), (2, "b"), (3, "a")))
    assert one.runs == two.runs
    assert one.seeds == {0, 2}


def test_on_a_gpu_threads_do_not_count_and_of_processes_their_number_does(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(shelf, "smoke", device="cuda")
    facts = json.loads(lab.shelf.about(RESNET56).read_text())
    gpu = {"torch": "2", "device": "cuda", "device_name": "H200"}
    facts["environment"] |= gpu | {"threads": 99, "world": 2}
    monkeypatch.setattr("growprune.paper.reproduce.usable", lambda device: device)
    monkeypatch.setattr("growprune.paper.reproduce.environment", lambda device, world: {**gpu, "world": world})
    assert not repeatable(lab, RESNET56, facts)
    monkeypatch.setattr("growprune.paper.reproduce.processes", lambda: 2)
    assert repeatable(lab, RESNET56, facts)


def test_a_base_network_that_is_gone_is_found_where_it_was_trained(shop: Shop, shelf: Path, tmp_path: Path) -> None:
    out = bare(shelf, tmp_path / "out")
    elsewhere(out, "smoke-resnet56-cifar10")
    (network,) = (out / "bases").glob("smoke-resnet56-*")
    before = network.read_bytes()
    network.unlink()
    folder = "runs/base-smoke-resnet56-cifar10"
    shutil.copytree(shelf / folder, out / folder)
    said = shop.done(*command("table1", out, "--only", "resnet56-0.9"))
    assert "base network" not in said.err
    assert network.read_bytes() == before


@pytest.mark.parametrize(
    ("scale", "reached", "kept"), [("short", 0.1, False), ("short", 60.0, True), ("smoke", 9.0, True)]
)
def test_published_weights_that_know_nothing_of_the_images_are_refused(
    tmp_path: Path, scale: Scale, reached: float, kept: bool
) -> None:
    """A thousand folders in another order than ImageNet's: else they would be pruned for days."""
    lab, base = Lab(tmp_path, scale), imagenet.base("resnet50", "sets/imagenet")
    folder = lab.shelf.training(base)
    folder.mkdir(parents=True)
    facts = dict.fromkeys(
        ("speedup", "sparsity", "params", "macs", "steps", "seconds", "images", "choices", "environment")
    )
    (folder / "result.json").write_text(json.dumps(facts | {"accuracy": {"final": reached}}))
    (folder / "config.json").write_text(json.dumps({"data": "sets/imagenet"}))
    (folder / "model.safetensors").write_bytes(b"weights")
    said = (
        r"^ResNet50_Weights.IMAGENET1K_V1: right on 0.10 % of these images, on ImageNet on 76.13 %: are the folders of "
    )
    with nullcontext() if kept else pytest.raises(GrowpruneError, match=said):
        lab.shelf.keep_base(base)
    assert lab.shelf.about(base).exists() == (tmp_path / "bases").exists() == kept


def test_a_base_network_trained_on_images_that_have_moved_can_be_trained_again(tmp_path: Path) -> None:
    there, here = tmp_path / "there" / "pets", tmp_path / "here" / "pets"
    before, lab = Lab(tmp_path), Lab(tmp_path, device="cpu")
    config = before.base_config(imagenet.base("resnet34", str(there))).to_json() | {"data": "pets"}
    moved = imagenet.base("resnet34", str(here))
    env = environment("cpu", 1) | {"threads": threads(lab.base_config(moved))}
    assert repeatable(lab, moved, {"config": config, "environment": env})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("tabel1",), "reproduce: no 'tabel1', did you mean 'table1'?"),
        (("xyz",), f"reproduce: no 'xyz'; there are {', '.join(paper.NAMES)}"),
        (
            ("table1", "--only", "resnet56-.9"),
            "--only: table1 has no row 'resnet56-.9', did you mean 'resnet56-0.9'? "
            "(there are resnet56-0.5, resnet56-0.7, resnet56-0.9, resnet56-0.925, resnet56-0.95, vgg19-0.5, ",
        ),
        (("scopes", "--only", "x"), "--only: scopes has no row 'x'; there are 0.7, 0.9"),
        (
            ("scopes", "--no-run", "--only", "0.7,0.8"),
            "--only: scopes has no row '0.8', did you mean '0.9'? (there are 0.7, 0.9)",
        ),
        (("table1", "--seeds", "11"), "--seeds"),
        (("table1", "--only", ","), "--only: names no row"),
        (("table1", "--only", ""), "--only: is empty"),
        (("obd", "--images", "pets"), "--images: only table3 and table4 are of such images, not obd"),
        (("obd", "ku", "--images", "pets"), "--images: only table3 and table4 are of such images, not obd, ku"),
        (("obd", "tabel1"), "reproduce: no 'tabel1', did you mean 'table1'?"),
        (("table1", "obd", "--only", "resnet56-0.9"), "--only: the rows of one table; table1, obd are 2"),
        (("table1", "--scale", "papr"), "--scale"),
    ],
)
def test_what_there_is_not_is_refused(shop: Shop, tmp_path: Path, given: tuple[str, ...], said: str) -> None:
    assert said in shop.refused("reproduce", *given, "--device", "cpu", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- bars ------------------------------------------------------------------------------------------------------------


def of(*values: float) -> Found:
    return Found(
        tuple({"accuracy": {"final": value, "best": value}, "config": {"seed": i}} for i, value in enumerate(values))
    )


@pytest.mark.parametrize(
    ("verdict", "text", "met"),
    [
        (bars.accuracy("", of(92.7), 93.0), "−0.30", True),
        (bars.accuracy("", of(92.69), 93.0), "−0.31 ✗", False),
        (bars.accuracy("", of(92.4, 93.4), 93.0), "−0.10", True),
        (bars.accuracy("", of(), 93.0), "", None),
        (bars.gain("", of(90.0), of(91.0), 2.0), "0.50", True),
        (bars.gain("", of(90.0), of(90.99), 2.0), "0.49 ✗", False),
        (bars.gain("", of(90.0), of(90.0), 0.0001), "0.00 ✗", False),
        (bars.gain("", of(90.0), of(), 2.0), "", None),
        (bars.order("", of(93.3), of(93.2)), "−0.10", True),
        (bars.order("", of(93.3), of(93.19)), "−0.11 ✗", False),
        (bars.order("", of(), of(93.19)), "", None),
        (bars.gain("", of(90.0, 99.0), of(91.0), 2.0), "0.50", True),  # of the seed that both have
        (bars.order("", of(93.3), of(93.2, 80.0)), "−0.10", True),
        (bars.above("", of(93.0), of(93.01)), "+0.01", True),
        (bars.above("", of(93.0), of(93.0, 99.0)), "+0.00 ✗", False),
        (bars.above("", of(93.0), of()), "", None),
        (bars.accuracy("", Found(of(80.0).runs, "short"), 93.0), "−13.00", None),
    ],
)
def test_bars(verdict: bars.Verdict, text: str, met: bool | None) -> None:
    assert (verdict.text, verdict.met) == (text, met)
    assert not verdict.value or math.isfinite(float(verdict.value))  # as a program reads it


def test_what_people_read_has_one_minus_sign() -> None:
    """In the tables of all that was run here and in the words under them."""
    experiments = [paper.find(name, "imagenette") for name in paper.NAMES]
    for scale in ("paper", "short"):
        lab = Lab(REPOSITORY / "results" / "paper", scale)  # type: ignore[arg-type]
        grids = [bars_met(lab, experiments), *(grid for each in experiments for grid in each.grids(lab.look))]
        said = "\n".join(map(markdown, grids))
        assert re.search(r"−\d", said)
        assert not re.findall(r"(?<![\w.-])-\d+\.\d", said)


def test_bars_are_asked_of_the_rows_they_are_for(tmp_path: Path) -> None:
    asked = {name: [verdict.bar for verdict in paper.find(name).verdicts(lambda _: of())] for name in paper.NAMES}
    kinds = ("accuracy", "gain", "order", "above")
    count = {name: [bar.count(each) for each in kinds] for name, bar in asked.items() if bar}
    assert count == {
        "table1": [20, 7, 0, 0], "table2": [4, 0, 2, 0], "obd": [0, 10, 0, 0], "random": [4, 2, 0, 0],
        "ku": [12, 0, 0, 0], "table3": [9, 0, 0, 4], "table4": [2, 0, 0, 2],
    }  # fmt: skip
    for scale, near in (("paper", "51"), ("short", "28")):  # Ku = 1: one-shot, table 2 and Ku's own rows are left
        grid = bars_met(Lab(tmp_path, scale), [paper.find(name) for name in paper.NAMES])  # type: ignore[arg-type]
        assert [cells[1:] for cells in grid.lines] == [(n, "0", "0", n) for n in (near, "19", "2", "6")]


def test_a_mark_is_explained_by_the_bars_that_were_asked() -> None:
    """Not by those of other tables: an accuracy that is not judged must not read as met."""
    missed, met = bars.gain("", of(90.0), of(90.0), 2.0), bars.accuracy("", of(93.0), 93.0)
    first = "✗ marks a missed bar: "
    assert bars.marked([missed]) == (f"{first}less than half the paper's gain, at ratios of 0.7 and more.",)
    assert bars.marked([met]) == (f"{first}at the paper's settings more than 0.3 below its mean.",)
    assert len(bars.marked([missed, met])[0].split(", or ")) == 2
    shown = bars.accuracy("", Found(of(1.0).runs, "short"), 93.0)
    (said,) = bars.marked(iter([met, shown]))
    assert said == f"{bars.marked([met])[0]} Accuracies at other settings (Ku = 1) are shown and not judged."
    assert bars.marked([bars.gain("", of(), of(), 2.0), bars.accuracy("", Found(of(1.0).runs, "short"), 93.0)]) == ()
    small = Found(of(1.0).runs, "smoke")
    assert bars.marked([bars.gain("", small, small, 2.0), bars.order("", small, small)]) == ()


def test_the_document_begins_with_what_was_run(shelf: Path) -> None:
    grid = done_so_far(Lab(shelf, "smoke"), [paper.find(name) for name in paper.NAMES])
    found = {cells[0]: cells[2:] for cells in grid.lines}
    assert found["table1"] == ("3 of 20", "0 met, 0 missed")  # one of them is table 2's
    assert found["random"] == ("4 of 20", "0 met, 0 missed")
    assert found["scopes"][1] == "none"


@pytest.mark.parametrize(
    ("name", "scale", "said"),
    [
        ("table1", "paper", "The paper's settings."),
        ("table1", "short", "Ku = 1, everything else as the paper."),
        ("table2", "short", "The paper's settings."),
        ("ku", "short", "The paper's settings, apart from what each row names."),
        ("scopes", "paper", "The paper's settings, apart from what each row names."),
        ("causes", "short", "Ku = 1, everything else as the paper, apart from what each row names."),
        ("table3", "short", "Ku = 1 and Ks = 4,000 instead of 40,000, everything else as the paper."),
    ],
)
def test_a_table_says_how_it_stands_to_the_papers_settings(name: str, scale: Scale, said: str) -> None:
    assert words(paper.find(name), scale) == said


def test_a_missed_bar_is_marked_where_it_is_meant() -> None:
    """At ratio 0.5 nothing is asked of the gain, which is marked at 0.9; nor of OBD's accuracies."""

    def look(setting: Setting) -> Found:
        facts = {
            "speedup": 2.0,
            "sparsity": 0.9,
            "config": {"seed": 0},
            "base": {"sha256": "", "accuracy": 93.0},
            "gone": "a",
        }
        return Found(({"accuracy": {"final": 80.0, "best": 80.0}, **facts},))

    grid = compared_grid(table1.EXPERIMENT.grids(look)[0])
    assert list(line(grid, "gain here / gain paper").values())[1:] == ["", *["0.00 ✗"] * 4]
    assert line(grid, "one-shot − paper")["0.95"] == "−2.79 ✗"
    other = compared_grid(obd.EXPERIMENT.grids(look)[0])
    assert line(other, "GReg-1 − paper")["0.95"] == "−8.69"
    assert line(other, "gain here / gain paper")["0.7"] == "0.00 ✗"


def compared_grid(grid: Any) -> dict[str, Any]:
    return {"head": grid.head, "lines": grid.lines}


def test_filters_are_compared_seed_by_seed() -> None:
    def run(seed: int, gone: str) -> dict[str, Any]:
        return {"config": {"seed": seed}, "base": {"sha256": ""}, "gone": gone}

    one = Found((run(0, "a"), run(1, "b")))
    assert same_filters(one, Found((run(1, "b"),))) == "yes"
    assert same_filters(one, Found((run(0, "a"), run(1, "c")))) == "NO"
    assert same_filters(one, Found((run(2, "a"),))) == ""


def test_an_unknown_experiment_is_an_error() -> None:
    with pytest.raises(GrowpruneError, match="did you mean 'figure1'"):
        paper.find("figure")


# -- docs/reproduction.md --------------------------------------------------------------------------------------------


SCRIPT = REPOSITORY / "docs" / "tables.py"


def tables(*arguments: object) -> object:
    """What the script leaves with."""
    main = runpy.run_path(str(SCRIPT))["main"]
    try:
        main([str(each) for each in arguments])
    except SystemExit as left:
        return left.code
    return 0


@pytest.mark.skipif(not SCRIPT.exists(), reason="a source archive has no docs")
def test_the_document_says_what_the_results_give() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not SCRIPT.exists(), reason="a source archive has no docs")
def test_the_document_is_made_from_results(shelf: Path, tmp_path: Path) -> None:
    """Smoke results under the keys of real ones: every section takes what is there, and draws figures."""
    (out := tmp_path / "paper").mkdir()
    for path in shelf.glob("base-smoke-*.json"):
        shutil.copy(path, out / path.name.replace("smoke-", ""))
    for setting in {each for name in paper.NAMES for each in paper.find(name).settings()}:
        if (path := shelf / f"{setting.key('smoke', 0)}.json").exists():
            facts = json.loads(path.read_text()) | {"config": result(setting)["config"]}
            (out / f"{setting.key('short', 0)}.json").write_text(json.dumps(facts))
    document = tmp_path / "reproduction.md"
    kinds = ("table1 short", "table1 paper", "figure1 paper", "bars short", "bases short")
    document.write_text(
        "Before.\n\n" + "".join(f"<!-- {kind} -->\nold\n<!-- end -->\n\n" for kind in kinds) + "After.\n"
    )
    given = ("--results", out, "--document", document)
    said = f"{document}: not what {out} gives: run make tables"
    assert tables("--check", *given) == said
    assert "old" in document.read_text()
    assert tables(*given) == 0
    text = document.read_text()
    assert text.startswith("Before.\n\n<!-- table1 short -->\n\n**Table 1")
    assert text.endswith("<!-- end -->\n\nAfter.\n")
    assert "old" not in text
    final = f"{read(shelf, GREG1)['accuracy']['final']:.2f}"
    short, long = text.split("<!-- table1 paper -->")
    assert f"| {final} |" in short
    assert "| GReg-1, here: last epoch | not run | not run | not run |" in long
    assert "(figures/figure1-resnet56-paper.png)" in long
    assert (tmp_path / "figures" / "figure1-resnet56-paper.png").read_bytes()[:4] == b"\x89PNG"
    assert re.search(r"Missed: table1 resnet56-0.9 one-shot \(accuracy: −\d", long)
    assert read(shelf, "base-smoke-vgg19-cifar100")["sha256"][:16] in long
    assert tables("--check", *given) == 0
    document.write_text(text.replace(final, "89.49"))
    assert tables("--check", *given) == said


@pytest.mark.skipif(not SCRIPT.exists(), reason="a source archive has no docs")
def test_the_readme_shows_a_row_or_two_of_each_network(tmp_path: Path) -> None:
    """At the paper's settings: GReg-1 with Ku = 1 is not among them."""
    lab, (once, greg) = Lab(tmp_path, "paper"), table1.pair(RESNET56, 0.9)
    for seed, accuracy in ((0, 87.0), (1, 88.0)):
        shelve(lab, once, seed, accuracy=result(once)["accuracy"] | {"final": accuracy})
    shelve(Lab(tmp_path), greg)
    (document := tmp_path / "README.md").write_text("<!-- headline paper -->\n<!-- end -->\n")
    wanted = "| resnet56 on cifar10 |{} | 87.50 ± 0.50 (2) (paper 87.34) | {} (paper 89.49) |  |\n"
    assert tables("--results", tmp_path, "--document", document) == 0
    assert wanted.format("  | ", "not run") in document.read_text()
    shelve(lab, greg)
    assert tables("--results", tmp_path, "--document", document) == 0
    assert wanted.format(" 2.00× | 90.00 (paper 93.36)", "90.00") in document.read_text()


@pytest.mark.skipif(not SCRIPT.exists(), reason="a source archive has no docs")
def test_what_imagenet_costs_is_the_measured_steps_times_the_schedule(tmp_path: Path) -> None:
    """90,000 steps of pushing (Ku τ / δλ + Ks), 90 epochs of 5,004 steps."""
    (bench := tmp_path / "bench").mkdir()
    (results := tmp_path / "paper").mkdir()
    took = {f"{kind} {name}": {"ms": 20.0 if kind == "push" else 40.0} for kind, name in cost.STEPS}
    took["tune resnet50-3.06"] = {"ms": 24.0}
    took |= {cost.label(kind, name, 8): {"ms": 5.0 if kind == "push" else 6.0} for kind, name in cost.EIGHTHS}
    loader = {"workers": 16, "cpu": {"fed": 4000.0}}
    (bench / "h200-imagenet.json").write_text(json.dumps({"steps": took}))
    (bench / "h200-loader.json").write_text(json.dumps({"fed": {"torchvision:resnet50": loader}}))
    documents = [tmp_path / "a.md", tmp_path / "b.md"]
    for document in documents:
        document.write_text("<!-- cost paper -->\n<!-- end -->\n")
    assert tables("--results", results, "--document", documents[0], "--document", documents[1]) == 0
    text = documents[1].read_text()
    assert documents[0].read_text() == text
    assert "| pruning, 90,000 steps | fine-tuning, 450,360 steps |" in text
    pushed, tuned, small = 90_000 * 0.020, 450_360 * 0.040, 450_360 * 0.024
    images = 450_360 * 256
    eight = (pushed * 2 + small * 2) / 8  # an eighth takes a quarter of the time
    hours = [pushed, small, pushed + small, pushed + images / 4000, eight]  # what is pushed does not wait
    assert f"| resnet50 3.06× | {' | '.join(f'{s / 3600:.1f}' for s in hours)} |" in text
    assert f"| resnet34 1.32× | 0.5 | {tuned / 3600:.1f} | {(pushed + tuned) / 3600:.1f} | " in text
    assert "takes 25 % of the whole batch's time while filters are pushed and 25 % in" in text
    (bench / "h200-imagenet.json").write_text(json.dumps({"steps": took | {"tune resnet50-3.06": {"ms": 48.0}}}))
    assert tables("--check", "--results", results, "--document", documents[0]) != 0
    (file := bench / "h200-imagenet.json").write_text(json.dumps({"steps": {}}))
    given = ("--results", results, "--document", documents[0])
    step = cost.label(*cost.EIGHTHS[0], 8)
    assert tables(*given) == f"{bench}: lacks '{step}' for what ImageNet costs: see benchmarks/imagenet.py"
    file.unlink()
    assert tables(*given) == tables("--check", *given) == f"{file}: No such file or directory"
    assert documents[0].read_text() == text
