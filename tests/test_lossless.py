"""No interruption loses anything: killed, stopped and resumed, a run ends with the bits of one that was left alone.

The processes are real, and so are the kills; `test_lossless_disk` has what disks and people do to a run's folder.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import growprune as gp
from growprune import jobs, several
from growprune.config import Config, Prune, Train
from growprune.errors import GrowpruneError, StoppedError
from growprune.run import Folder, in_use
from growprune.train import Job
from runs import COMMAND, Fork, Process, Shop, outcome, steps, until

SHARED = ["--data", "images", "--threads", "1"]
EVERY_STEP, SOME = ["--save-every", "0"], ["--save-every", "0.02"]
TRAIN = [
    "train", "--model", "mynets:small", *SHARED, "--epochs", "6", "--batch", "200", "--lr", "0.1", "--warm-up", "1",
]  # fmt: skip
PRUNE = [
    "prune", "--model", "mynets:small", *SHARED, "--weights", "base", "--epochs", "3", "--batch", "200", "--lr", "0.05",
    "--prune-batch", "300", "--prune-lr", "0.05", "--delta-lambda", "0.1", "--tau", "0.5", "--ku", "2", "--ks", "5",
]  # fmt: skip
GREG2 = ["--schedule", "greg2", "--delta-lambda-pick", "0.05", "--tau-pick", "0.2"]
PLANS = {
    "train": [*TRAIN, *SOME],
    "greg1": [*PRUNE, *EVERY_STEP],
    "greg2": [*PRUNE, *EVERY_STEP, *GREG2, "--criterion", "taylor"],
    # λ's ceiling is so far off that notes are rare; the rule ends pushing long before.
    "stop_ratio": [*PRUNE, *EVERY_STEP, "--delta-lambda", "0.5", "--tau", "300", "--stop-ratio", "3"],
    "oneshot": [*PRUNE, *EVERY_STEP, "--schedule", "oneshot", "--criterion", "random", "--epochs", "5"],
    "weight": [*PRUNE, *SOME, *GREG2, "--granularity", "weight", "--global-ratio", "0.6"],
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    made = Shop(tmp_path_factory.mktemp("shop"))
    made.done(*TRAIN, "--out", "base")
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(shop: Shop) -> dict[str, dict[str, Any]]:
    """What each plan gives if nobody interferes."""
    for name, plan in PLANS.items():
        shop.done(*plan, "--out", f"alone-{name}")
    return {name: outcome(shop.path / f"alone-{name}") for name in PLANS}


# -- killed ----------------------------------------------------------------------------------------------------------


@dataclass
class Killed:
    """What became of a run that was killed time and again."""

    outcome: dict[str, Any]
    kills: int = 0
    inside: int = 0  # of them, those that left a half-written checkpoint behind
    said: str = ""


@pytest.fixture(scope="module")
def killed(shop: Shop, alone: dict[str, dict[str, Any]]) -> dict[str, Killed]:
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda name: kill_often(shop, name, alone[name]["result"]["steps"]), PLANS)
        return dict(zip(PLANS, found, strict=True))


def kill_often(shop: Shop, name: str, total: int) -> Killed:
    """One plan, killed before its first checkpoint, inside saves, between them, and while it writes what came of it."""
    rng, run, found = random.Random(name), shop.path / f"killed-{name}", Killed({})

    def kill(process: Process | Fork) -> None:
        process.kill()
        done = process.wait()
        assert done.code == -signal.SIGKILL, done
        found.kills += 1
        found.said += done.err
        found.inside += any(half_written(run, process))

    process: Process | Fork = shop.start(*PLANS[name], "--out", run)
    assert until((run / "config.json").exists, process.alive)
    time.sleep(rng.uniform(0, 0.3))
    kill(process)
    moments = sorted(rng.sample(range(total * 4 // 5), 4))
    while moments:
        step = moments.pop(0)
        process = shop.fork("resume", run)
        assert until(lambda: steps(run)[-1:] >= [step], process.alive), process.said()  # noqa: B023
        if until(lambda: any(half_written(run, process)), process.alive, pause=0):  # noqa: B023
            kill(process)
        if found.inside < 2 and not moments and found.kills < 12:
            moments = [step]
    process = shop.fork("resume", run)
    if name in ("greg1", "greg2", "train"):  # between the network and the word that it is finished
        assert until((run / "model.safetensors").exists, process.alive, pause=0)
    else:
        assert until(lambda: steps(run)[-1:] >= [total * 4 // 5], process.alive)
        time.sleep(rng.uniform(0, 0.1))
    kill(process)
    done = shop.start("resume", run).wait()
    assert done.code == 0, done
    found.outcome, found.said = outcome(run), found.said + done.err
    return found


def half_written(run: Path, process: Process | Fork) -> Iterator[str]:
    """Checkpoints that this process has not finished."""
    try:
        names = os.listdir(run / "checkpoints")
    except FileNotFoundError:
        return
    yield from (name for name in names if f".new-{process.pid}-" in name)


@pytest.mark.parametrize("name", PLANS)
def test_a_killed_run_ends_with_the_same_bits(
    name: str, alone: dict[str, dict[str, Any]], killed: dict[str, Killed]
) -> None:
    assert killed[name].outcome == alone[name]


def test_kills_were_many_and_many_of_them_inside_a_save(killed: dict[str, Killed]) -> None:
    assert sum(each.kills for each in killed.values()) >= 30
    assert sum(each.inside for each in killed.values()) >= 10
    assert any("is half-written: going back to step" in each.said for each in killed.values())


def test_the_plans_have_every_phase(alone: dict[str, dict[str, Any]]) -> None:
    phases = {name: {note["phase"] for note in found["notes"]} for name, found in alone.items()}
    assert phases["train"] == {"train"}
    assert phases["greg1"] == {"start", "push", "stabilize", "removal", "finetune"}
    assert phases["greg2"] == phases["weight"] == phases["greg1"] | {"pick"}
    assert phases["oneshot"] == {"start", "removal", "finetune"}
    params = {name: found["result"]["params"] for name, found in alone.items()}
    assert params["greg1"]["after"] < params["greg1"]["before"]
    assert alone["stop_ratio"]["result"]["steps"] < 100 < 1200  # of those that λ needs to its ceiling


# -- at every step ---------------------------------------------------------------------------------------------------

SAME: dict[str, Any] = {"data": "images", "threads": 1, "device": "cpu", "save_every": 0.0, "batch": 300, "lr": "0.05"}
PUSH: dict[str, Any] = {
    **SAME, "model": "mynets:small", "weights": "base", "epochs": 1, "prune_batch": 300, "prune_lr": 0.05, "ku": 1,
    "delta_lambda": 0.5, "tau": 300.0, "ks": 6, "stop_ratio": 3.0,
}  # fmt: skip
CONFIGS: dict[str, Config] = {
    "greg1": Prune(**PUSH, criterion="obd", nesterov=True, prune_norm="fixed"),
    "greg2": Prune(**PUSH, schedule="greg2", delta_lambda_pick=0.1, tau_pick=0.2, granularity="weight"),
    "streamed": Train(**{**SAME, "data": "pictures", "batch": 8}, model="mynets:coloured", epochs=3, workers=0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_going_on_from_every_step_is_not_having_stopped(shop: Shop, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the folder at each step is what a kill at that moment would leave."""
    if name == "streamed":
        pytest.importorskip("torchvision")
        write_pictures(shop.path / "pictures")
    monkeypatch.chdir(shop.path)
    monkeypatch.syspath_prepend(shop.path)
    monkeypatch.setattr("growprune.report.run.page", lambda *_: "")  # figures would take most of the time
    config, run = CONFIGS[name], shop.path / f"steps-{name}"
    folder = Folder.claim(run, config)
    job, moments = Job(config, folder, "cpu"), []
    for _ in job.work():
        moments.append(run.with_name(f"{run.name}-{job.before + job.done}"))
        shutil.copytree(run, moments[-1])
    folder.close()
    want = outcome(run)
    assert len(moments) == want["result"]["steps"] >= 9
    later = replace(config, save_every=1000.0)
    for moment in moments:
        jobs.run(later, moment, quiet=True)
        assert outcome(moment) == want, moment


def write_pictures(folder: Path) -> None:
    """Two classes of noise, large enough to be streamed."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 4)):
        for name in ("dark", "light"):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 128, (70, 70, 3), dtype=np.uint8) + 100 * (name == "light")
                Image.fromarray(pixels.astype(np.uint8)).save(folder / part / name / f"{i}.png")


# -- asked to stop ---------------------------------------------------------------------------------------------------


def stopped_at(line: str, run: object, lost: bool = False) -> int:
    how = r"at once, as saved at step (\d+): what was done since is lost" if lost else r"at step (\d+), all saved"
    found = re.fullmatch(rf"growprune: stopped {how}; go on with: growprune resume {run}", line)
    assert found, line
    return int(found[1])


@pytest.mark.parametrize(
    ("name", "number", "code"),
    [("train", signal.SIGINT, 130), ("greg2", signal.SIGTERM, 143)],
    ids=["SIGINT", "SIGTERM"],
)
def test_who_is_asked_to_stop_saves_first(
    shop: Shop, alone: dict[str, dict[str, Any]], name: str, number: int, code: int
) -> None:
    """No checkpoint is due for long, so what it goes on from is what it saved when it was asked."""
    run = shop.path / f"stopped-{name}"
    process = shop.start(*PLANS[name], "--save-every", "1000", "--out", run, SLOW="0.1")
    assert until(lambda: notes(run) >= 2, process.alive)
    process.kill(number)
    done = process.wait()
    assert done.code == code, done
    assert not done.out
    step = stopped_at(done.line, run)
    assert 0 < step < alone[name]["result"]["steps"]
    assert steps(run)[-1] == step
    assert f"going on at step {step}\n" in shop.done("resume", run).err
    assert outcome(run) == alone[name]


def notes(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["SIGINT", "SIGTERM", "SIGHUP"])
def test_stopped_before_it_has_done_anything(shop: Shop, alone: dict[str, dict[str, Any]], number: int) -> None:
    run = shop.path / f"early-{number}"
    process = shop.fork(*PLANS["train"], "--out", run, SLOW_START="2")
    assert until((run / "config.json").exists, process.alive)
    time.sleep(0.2)
    process.kill(number)
    done = process.wait()
    assert done.code == 128 + number, done
    assert stopped_at(done.line, run) == 0
    shop.done("resume", run)
    assert outcome(run) == alone["train"]


def test_the_second_time_it_leaves_at_once(shop: Shop) -> None:
    run = shop.path / "twice"
    process = shop.fork(*PLANS["train"], "--batch", "1200", "--save-every", "1000", "--out", run, SLOW="2")
    assert until(lambda: notes(run), process.alive)
    time.sleep(0.5)
    process.kill(signal.SIGINT)
    time.sleep(0.1)
    process.kill(signal.SIGINT)
    done = process.wait()
    assert done.code == 130, done
    assert stopped_at(done.line, run, lost=True) == 0  # it does not claim the step that was done, and not saved
    assert steps(run) == [0]


@pytest.mark.parametrize("knock", [2, 4])
def test_a_stop_is_not_taken_for_an_answer(shop: Shop, alone: dict[str, dict[str, Any]], knock: int) -> None:
    """A pruner tries out what a network survives; a signal in the midst of that is not the network's failure."""
    run = shop.path / f"knock-{knock}"
    done = shop.run(*PLANS["greg1"], "--out", run, KNOCK=str(knock))
    assert done.code == 143, done
    assert stopped_at(done.line, run) == 0
    shop.done("resume", run)
    assert outcome(run) == alone["greg1"]


SIDE_BY_SIDE = """
import sys
from pathlib import Path
from growprune.config import Train
from growprune.errors import GrowpruneError, StoppedError
from growprune.several import side_by_side
same = dict(data="images", threads=1, epochs=3, batch=200, lr="0.1", save_every=1000.0, device="cpu")
configs = [Train(model=model, seed=seed, **same) for seed, model in enumerate(sys.argv[1].split(","))]
try:
    runs = [(config, Path(f"{sys.argv[2]}-{config.seed}")) for config in configs]
    side_by_side(runs, 2, finished=lambda folder: print("finished", folder))
except (StoppedError, GrowpruneError) as error:
    print(type(error).__name__, error)
"""


def beside(shop: Shop, name: str, *models: str, **environment: str) -> tuple[Process, list[Path]]:
    command = [COMMAND[0], "-c", SIDE_BY_SIDE, ",".join(f"mynets:{model}" for model in models), name]
    return Process(command, shop.path, environment), [shop.path / f"{name}-{i}" for i in range(len(models))]


@pytest.fixture(scope="module")
def undisturbed(shop: Shop) -> dict[str, Any]:
    """What the first of several gives if there is no other."""
    same = ["--data", "images", "--threads", "1", "--epochs", "3", "--batch", "200", "--lr", "0.1", "--warm-up", "5"]
    shop.done("train", "--model", "mynets:linear", *same, "--out", "undisturbed")
    return outcome(shop.path / "undisturbed")


def test_all_of_several_are_saved_when_they_are_stopped(shop: Shop, undisturbed: dict[str, Any]) -> None:
    process, runs = beside(shop, "stopped", "linear", "linear", SLOW="0.05")
    assert until(lambda: all(notes(run) for run in runs), process.alive)
    process.kill(signal.SIGTERM)
    done = process.wait()
    assert done.out.startswith("StoppedError stopped at step"), done
    assert min(steps(run)[-1] for run in runs) >= 5
    again, _ = beside(shop, "stopped", "linear", "linear")
    assert set(again.wait().out.splitlines()) == {f"finished {run.name}" for run in runs}
    assert outcome(runs[0]) == undisturbed


def test_one_that_fails_keeps_no_other_from_its_end(shop: Shop, undisturbed: dict[str, Any]) -> None:
    """Neither one that diverges nor one that cannot even begin, of which nothing is left."""
    process, runs = beside(shop, "failing", "linear", "bad", "nowhere", "linear")
    done = process.wait()
    *finished, last = done.out.splitlines()
    assert sorted(finished) == ["finished failing-0", "finished failing-3"], done
    failing = r"SomeFailedError failing-1: the loss or a gradient .*; 1 more not done: failing-2"
    assert re.fullmatch(failing, last), done
    assert re.search(r"^failing-1: failed: the loss or a gradient", done.err, re.MULTILINE)
    assert re.search(r"^failing-2: failed: .*nowhere", done.err, re.MULTILINE)
    assert [run.exists() for run in runs] == [True, True, False, True]
    assert outcome(runs[0]) == undisturbed


def test_a_dead_process_holds_no_folder(shop: Shop, alone: dict[str, dict[str, Any]]) -> None:
    """While it lives nobody else gets in, and it is not disturbed; once it is dead there is no lock to remove."""
    run = shop.path / "held"
    first = shop.fork(*PLANS["train"], "--out", run, SLOW="0.1")
    assert until(lambda: steps(run), first.alive)
    for command, end in (
        ([*PLANS["train"], "--out", str(run)], "; wait for it, or name another folder with --out"),
        (["resume", str(run)], "; wait for it"),
    ):
        assert shop.refused(*command).endswith(f": in use by another process{end}")
    first.kill()
    first.wait()
    assert (run / ".lock").exists()
    second = shop.fork("resume", run, SLOW="0.02")
    time.sleep(0.2)
    assert "in use by another process" in shop.refused("resume", run)
    assert second.wait().code == 0
    assert outcome(run) == alone["train"]


# -- what fails of itself ----------------------------------------------------------------------------------------------


def test_a_removal_that_fails_loses_no_step(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushing took hours, and the user's model does not survive its removal: mended, the run goes on from there."""
    monkeypatch.chdir(shop.path)
    monkeypatch.syspath_prepend(shop.path)
    config, run, done = replace(CONFIGS["greg1"], save_every=1000.0), shop.path / "fails", list[int]()
    do = Job.do
    monkeypatch.setattr(Job, "do", lambda job, step: (done.append(job.at), do(job, step))[1])

    def fails(*_: object, **__: object) -> None:
        raise GrowpruneError("no")

    with monkeypatch.context() as broken:
        broken.setattr(gp.Pruner, "compact", fails)
        with pytest.raises(GrowpruneError, match="no"):
            jobs.run(config, run, quiet=True)
    pushed = len(done)
    assert pushed > 2
    result = jobs.run(config, run, quiet=True)
    assert len(done) == result["steps"]
    assert done == [0] * pushed + [1] * (len(done) - pushed)


# -- several runs one after another, and what one leaves to the next ---------------------------------------------------


def bad(seed: int) -> Train:
    return replace(short(seed), lr="1e30", warm_up=0.0)


def test_what_has_failed_is_let_go_at_once(tmp_path: Path) -> None:
    """Its folder, while the others still run: it may be mended there."""
    failed, free = tmp_path / "bad", list[bool]()
    with pytest.raises(several.SomeFailedError, match="bad: the loss or a gradient"):
        several.side_by_side(
            [(bad(0), failed), (short(1), tmp_path / "good")], 1, True, lambda _: free.append(not in_use(failed))
        )
    assert free == [True]


@pytest.mark.parametrize("parallel", [1, 2])
def test_what_is_over_is_held_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: int) -> None:
    """Neither a failed network nor a finished one is there when the next begins."""
    make, before = Job.__init__, list[weakref.ref[Any]]()

    def made(job: Job, *given: Any, **options: Any) -> None:
        over = len(before) - (parallel - 1)
        assert [network() for network in before[: max(over, 0)]] == [None] * over
        make(job, *given, **options)
        before.append(weakref.ref(job.net))
        vars(job.net)["itself"] = [job.net]  # as many a network does, by its hooks

    monkeypatch.setattr(Job, "__init__", made)
    plans = [(plan, tmp_path / str(n)) for n, plan in enumerate([bad(0), short(1), short(2)])]
    with pytest.raises(several.SomeFailedError):
        several.side_by_side(plans, parallel, quiet=True)
    assert len(before) == 3


def test_a_defect_of_ours_spoils_nothing_that_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    do = Job.do

    def breaks(job: Job, step: Any) -> None:
        if job.config.seed == 1:
            raise RuntimeError("a defect")
        do(job, step)

    monkeypatch.setattr(Job, "do", breaks)
    with pytest.raises(RuntimeError, match="a defect"):
        several.side_by_side([(short(seed), tmp_path / str(seed)) for seed in range(2)], 1, quiet=True)
    assert {"config.json", "metrics.jsonl", "result.json"} <= {path.name for path in (tmp_path / "0").iterdir()}
    assert jobs.run(short(0), tmp_path / "0", quiet=True)["steps"] == 2


def test_a_result_that_cannot_be_shelved_is_not_lost(tmp_path: Path) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device", "shelf")

    plans = [(short(seed), tmp_path / str(seed)) for seed in range(2)]
    told = "0: shelf: No space left on device; 1 more not done: 1"
    with pytest.raises(several.SomeFailedError, match=f"^{told}$"):
        several.side_by_side(plans, 1, True, full)
    heard: list[Path] = []
    assert len(several.side_by_side(plans, 1, True, heard.append)) == 2
    assert heard == [out for _, out in plans]
    assert (tmp_path / "0" / "metrics.jsonl").exists()


def test_each_has_its_own_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is taken up again has those it began with, the next one those of today."""
    old, new = (replace(short(seed), threads=0) for seed in range(2))
    with monkeypatch.context() as yesterday:
        yesterday.setenv("OMP_NUM_THREADS", "2")
        yesterday.setattr(Job, "interrupted", lambda job: True)
        with pytest.raises(StoppedError):
            jobs.run(old, tmp_path / "old", quiet=True)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    results = several.side_by_side([(old, tmp_path / "old"), (new, tmp_path / "new")], 1, quiet=True)
    assert [result["environment"]["threads"] for result in results] == [2, 1]


def test_when_one_is_asked_to_stop_so_are_the_others(tmp_path: Path) -> None:
    """The signal came while it was being prepared, and its handler knew of no other."""
    folders = [Folder.claim(tmp_path / str(seed), short(seed)) for seed in range(2)]
    first, second = (Job(short(seed), folder, "cpu") for seed, folder in enumerate(folders))
    second.stopping = True
    with pytest.raises(StoppedError):
        list(jobs.together([first, second], 2))
    assert first.stopping
    assert first.done < first.steps
    for folder in folders:
        folder.close()


# -- a signal that comes too late --------------------------------------------------------------------------------------


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when all steps are done, and only the result is to be written."""
    finish = Job.finish

    def interrupted(job: Job) -> None:
        signal.raise_signal(signal.SIGINT)
        finish(job)

    monkeypatch.setattr(Job, "finish", interrupted)


def short(seed: int) -> Train:
    return Train(
        model="growprune.demo:network", data="digits", epochs=1, batch=600, device="cpu", threads=1, seed=seed
    )  # fmt: skip


@pytest.mark.usefixtures("late")
def test_a_late_signal_stops_what_follows(tmp_path: Path) -> None:
    """The run itself is finished and heard of; alone it gives its result."""
    heard: list[Path] = []
    assert jobs.run(short(0), tmp_path / "alone", quiet=True, finished=heard.append)["steps"] == 2
    with pytest.raises(StoppedError) as stopped:
        jobs.run(short(0), tmp_path / "first", quiet=True, finished=heard.append, more=True)
    assert stopped.value.signal == signal.SIGINT
    assert heard == [tmp_path / "alone", tmp_path / "first"]
    assert (tmp_path / "first" / "result.json").exists()


@pytest.mark.usefixtures("late")
def test_a_late_signal_begins_no_other_run_side_by_side(tmp_path: Path) -> None:
    heard: list[Path] = []
    runs = [(short(seed), tmp_path / str(seed)) for seed in range(2)]
    with pytest.raises(StoppedError) as stopped:
        several.side_by_side(runs, 1, quiet=True, finished=heard.append)
    assert stopped.value.signal == signal.SIGINT
    assert heard == [tmp_path / "0"]
    assert not (tmp_path / "1").exists()
    assert len(several.side_by_side(runs[1:], 1, quiet=True)) == 1


@pytest.mark.usefixtures("late")
def test_a_late_signal_begins_nothing_more(tmp_path: Path) -> None:
    """Base networks are followed by what is pruned of them."""
    with pytest.raises(StoppedError):
        several.side_by_side([(short(0), tmp_path / "run")], 1, quiet=True, more=True)
    assert (tmp_path / "run" / "result.json").exists()
