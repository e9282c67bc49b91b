"""Several processes, as torchrun starts them, on a CPU: they give what one gives, lose nothing, speak with one voice.

Run by torchrun, this file is the script that its own tests compare: see `main`.

How near is the same? Sums over a batch are taken in another order, so the last bits differ; nothing else does. A
network in double precision therefore agrees to 1e-9 after dozens of steps, masks, widths and accuracies exactly. In
single precision the first step agrees to a few hundredths of the way that the weights go (0.01 was seen): a ReLU whose
input is zero up to rounding may open in one run and stay shut in the other, and from there on they go apart, as they do
for another number of threads. (One process is the one that is further from the step in double precision: torch's own
batch norm sums in single precision, the one over all processes does not.)
"""

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import growprune.report.run as page
from growprune import criteria, distributed, jobs, train
from growprune.config import resolve
from growprune.distributed import WholeBatch, World, first_here, join
from growprune.errors import GrowpruneError, StoppedError
from growprune.models import CifarResNet
from growprune.recipe import Stage
from growprune.run import Folder
from pictures import SIZE, write
from runs import contents

HERE = Path(__file__).parent
TOLERANCE = 1e-9
PATIENCE = 120  # seconds that anything may take before it counts as hung

# -- networks ----------------------------------------------------------------------------------------------------------


class Exact(nn.Module):
    """A small network in double precision, whatever the images are in."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = CifarResNet(8, num_classes, in_channels=1, width=8).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.double())


class Active(nn.BatchNorm2d):
    """Batch norm with what follows it in one module, as some libraries have it."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input)) + 0.1 * input


class Odd(nn.Module):
    """Things that a careless parallel version breaks: a norm of another class, and parameters that are not used."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.norm = Active(6)
        self.plain = nn.BatchNorm1d(6, affine=False, momentum=None)
        self.fc = nn.Linear(6, num_classes)
        self.unused = nn.Linear(6, num_classes)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.plain(self.norm(self.conv(x.double())).mean((2, 3))))


def unseeded(num_classes: int) -> nn.Module:
    """A network whose first weights no seed decides."""
    torch.default_generator.manual_seed(int.from_bytes(os.urandom(4), "little"))
    return Exact(num_classes)


def only_first(num_classes: int) -> nn.Module:
    """A network that cannot be made in the second process."""
    if os.environ["RANK"] == "1":
        raise GrowpruneError("this machine has no such network")
    return Exact(num_classes)


# -- runs that are compared --------------------------------------------------------------------------------------------

SHARED: dict[str, Any] = {"data": "digits", "batch": 64, "threads": 1, "device": "cpu"}
EXACT = {**SHARED, "model": "test_distributed:Exact"}
PRUNE = {
    **EXACT, "epochs": 1, "batch": 150, "prune_batch": 64, "ratios": "0.4", "lr": "0.01", "prune_lr": 0.01, "tau": 0.3,
    "delta_lambda": 0.1, "tau_pick": 0.1, "delta_lambda_pick": 0.05, "ku": 2, "ks": 5,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "train": {**EXACT, "epochs": 1, "warm_up": 0},
    "odd": {**SHARED, "model": "test_distributed:Odd", "epochs": 1, "warm_up": 0},
    "greg1 filter": {**PRUNE, "schedule": "greg1", "prune_norm": "fixed"},
    "greg2 filter": {**PRUNE, "schedule": "greg2"},
    "oneshot filter": {**PRUNE, "schedule": "oneshot"},
    "greg1 weight": {**PRUNE, "schedule": "greg1", "granularity": "weight"},
    "greg2 weight": {**PRUNE, "schedule": "greg2", "granularity": "weight"},
    "oneshot weight": {**PRUNE, "schedule": "oneshot", "granularity": "weight"},
    "greg2 taylor": {**PRUNE, "schedule": "greg2", "criterion": "taylor"},
    "oneshot obd": {**PRUNE, "schedule": "oneshot", "criterion": "obd"},
    "greg2 random": {**PRUNE, "schedule": "greg2", "criterion": "random"},
}


PRUNED = sum("schedule" in options for options in RUNS.values())


def do_run(name: str, out: Path) -> dict[str, Any]:
    options = RUNS[name]
    command = "prune" if "schedule" in options else "train"
    weights = {"weights": str(out / "train")} if command == "prune" else {}
    with patch.object(page, "page", lambda *_: ""):  # drawing takes as long as all the rest
        return jobs.run(resolve(command, {**options, **weights}), out / name.replace(" ", "-"), quiet=True)


def main(what: str, out: Path) -> None:
    """What every process of torchrun does."""
    world, _ = join("cpu")
    if what == "three":
        interrupted(out)
        return
    torch.save({name: normed(case, world) for name, case in NORMS.items()}, out / f"norms-{world.rank}.pt")
    seen = witnessed()
    for name in RUNS:
        do_run(name, out)
    if not world.first:  # left to itself, this process would pick others than the first does
        criteria.L1.score = lambda self, weight, extra, generator: -weight.abs().sum(1)  # type: ignore[method-assign]
    RUNS["picks"] = {**RUNS["greg2 filter"], "epochs": 0}
    RUNS["unseeded"] = {**RUNS["train"], "batch": 600, "model": "test_distributed:unseeded"}
    do_run("picks", out)
    do_run("unseeded", out)
    with first_here(world), (out / "order").open("a") as file:
        time.sleep(0.2 if world.first else 0.0)
        file.write(f"{world.rank} ")
    (out / f"seen-{world.rank}.json").write_text(json.dumps({"runs": seen, "errors": errors(out)}))


def errors(out: Path) -> list[list[str]]:
    """What this process says, or how it ends, when all of them have the same error."""
    distributed.PATIENCE = 0.0
    found = []
    for wrong in ({"batch": 63}, {"model": "test_distributed:nothing"}, {"lr": "1e300"}):
        with pytest.raises((GrowpruneError, SystemExit)) as caught:
            jobs.run(resolve("train", {**RUNS["train"], **wrong}), out / f"wrong-{next(iter(wrong))}", quiet=True)
        found.append([type(caught.value).__name__, str(caught.value)])
    return found


def witnessed() -> list[str]:
    """What this process itself removes and ends with, run after run."""
    seen: list[str] = []
    remove, finish = train.Job.remove, train.Job.finish

    def removed(self: train.Job, stage: Stage) -> None:
        assert self.pruner is not None
        seen.append("masks " + digest(self.pruner.masks()))
        remove(self, stage)

    def finished(self: train.Job) -> None:
        finish(self)
        seen.append("weights " + digest(self.net.state_dict()))

    train.Job.remove, train.Job.finish = removed, finished  # type: ignore[method-assign]
    return seen


def interrupted(out: Path) -> None:
    """The same run twice, the second time with a stop in between."""
    options = {**SHARED, "model": "growprune.demo:network", "batch": 150, "epochs": 1, "warm_up": 0}
    jobs.run(resolve("train", options), out / "whole", quiet=True)
    do = train.Job.do

    def stopping(self: train.Job, step: Any) -> None:
        do(self, step)
        self.stopping = self.done == 3

    train.Job.do = stopping  # type: ignore[method-assign]
    with pytest.raises((StoppedError, SystemExit)):
        jobs.run(resolve("train", options), out / "parted", quiet=True)
    train.Job.do = do  # type: ignore[method-assign]
    jobs.run(resolve("train", options), out / "parted", quiet=True)


def digest(tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors.values())).hexdigest()


# -- torchrun ----------------------------------------------------------------------------------------------------------


def torchrun(*arguments: Any, processes: int = 2, more: tuple[str, ...] = ("--standalone",)) -> subprocess.Popen[str]:
    """Start it, in a group of processes of its own, as a terminal does."""
    command = [sys.executable, "-m", "torch.distributed.run", *more, "--nproc-per-node", str(processes)]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.Popen(
        [*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code, what it printed and what it said; nothing may hang."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        for pid in (*workers(process).values(), process.pid):
            os.kill(pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"hung: {out[-2000:]}\n{err[-4000:]}")
    return process.returncode, out, err


def passed(process: subprocess.Popen[str]) -> tuple[str, str]:
    code, out, err = ended(process)
    assert code == 0, err
    return out, err


def words(options: dict[str, Any], **more: Any) -> list[str]:
    """Options as the command line has them."""
    given = {**options, **more}
    return [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def said(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("growprune:")]


def workers(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """The processes that it started, by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = re.search(r"^PPid:\t(\d+)$", (path / "status").read_text(), re.MULTILINE)
            rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", (path / "environ").read_bytes())
        except OSError:  # gone, or not ours
            continue
        if parent and int(parent[1]) == launcher.pid and rank:
            found[int(rank[1])] = int(path.name)
    return found


def wait_for(launcher: subprocess.Popen[str], sight: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and launcher.poll() is None:
        if sight():
            return
        time.sleep(0.01)
    _, printed, err = ended(launcher)
    pytest.fail(f"it never came to that: {printed}\n{err}")


def saved(out: Path) -> int:
    """The step of the last checkpoint."""
    return max((int(path.name[5:]) for path in (out / "checkpoints").glob("step-*")), default=-1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script in two processes."""
    out = tmp_path_factory.mktemp("pair")
    passed(torchrun(__file__, "pair", out))
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The same runs in this process, each when it is asked for."""
    out = tmp_path_factory.mktemp("alone")

    def done(name: str) -> Path:
        if RUNS[name].get("schedule"):
            done("train")
        if not (out / name.replace(" ", "-") / "result.json").exists():
            do_run(name, out)
        return out / name.replace(" ", "-")

    return done


# -- one is as good as two ---------------------------------------------------------------------------------------------


def notes_of(out: Path) -> list[dict[str, Any]]:
    notes = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in note.items() if key not in ("seconds", "ms")} for note in notes]


def result_of(out: Path) -> dict[str, Any]:
    result = json.loads((out / "result.json").read_text())
    return {key: value for key, value in result.items() if key not in ("seconds", "latency", "environment")}


def assert_near(a: Any, b: Any, tolerance: float, where: str = "") -> None:
    """Numbers with a fraction within a tolerance, all else the same."""
    if isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_near(a[key], b[key], tolerance, f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_near(x, y, tolerance, f"{where}[{i}]")
    elif isinstance(a, float):
        assert b == pytest.approx(a, rel=tolerance, abs=tolerance), where
    else:
        assert a == b, where


def assert_same_bits(one: Path, other: Path) -> None:
    """To the bit, in all that is written but times."""
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    assert notes_of(one) == notes_of(other)
    assert result_of(one) == result_of(other)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_give_what_one_gives(name: str, pair: Path, alone: Callable[[str], Path]) -> None:
    one, two = alone(name), pair / name.replace(" ", "-")
    first, second = result_of(one), result_of(two)
    assert first == second  # accuracies, widths, sizes
    assert_near(notes_of(one), notes_of(two), 1e-4)  # they hold norms to five digits, and the loss in single precision
    if name not in ("train", "odd"):
        removed = next(note for note in notes_of(two) if note["phase"] == "removal")
        assert removed.get("gone") == next(note for note in notes_of(one) if note["phase"] == "removal").get("gone")
        assert sum(kept for _, kept in second["widths"].values()) < sum(full for full, _ in second["widths"].values())
    weights, others = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert weights.keys() == others.keys()
    for key, weight in weights.items():
        assert (weight - others[key]).abs().max() <= TOLERANCE, key
        assert torch.equal(weight == 0, others[key] == 0), key


def test_every_process_removes_the_same_and_ends_the_same(pair: Path) -> None:
    first, second = (json.loads((pair / f"seen-{rank}.json").read_text())["runs"] for rank in range(2))
    assert first == second
    assert [line.split()[0] for line in first] == ["weights"] * 2 + ["masks", "weights"] * (PRUNED + 1) + ["weights"]
    assert len(set(first)) > PRUNED


def test_the_first_process_picks_for_all(pair: Path) -> None:
    """Also where another would pick otherwise: there the second process had the opposite criterion."""
    removals = [
        next(note["gone"] for note in notes_of(pair / name) if note["phase"] == "removal")
        for name in ("picks", "greg2-filter")
    ]
    assert removals[0] == removals[1]


def test_one_process_writes(pair: Path) -> None:
    for name in RUNS:
        out = pair / name.replace(" ", "-")
        files = {path.name for path in out.iterdir()}
        assert files == {"config.json", "metrics.jsonl", "model.safetensors", "report.html", "result.json", ".lock"}
        notes = [(note["phase"], note["step"]) for note in notes_of(out)]
        assert len(notes) == len(set(notes)), f"{name}: a note is there twice"
        assert notes


# -- the command -------------------------------------------------------------------------------------------------------

PLAIN = {**SHARED, "model": "growprune.demo:network", "batch": 1200, "epochs": 1, "warm_up": 0}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """`growprune train` in single precision: one step, in two processes."""
    out = tmp_path_factory.mktemp("plain") / "run"
    return out, *passed(torchrun("-m", "growprune", "train", *words(PLAIN), "--out", out, "--json"))


def test_one_process_speaks(plain: tuple[Path, str, str]) -> None:
    out, printed, err = plain
    result = json.loads(printed)
    assert result == json.loads((out / "result.json").read_text())
    assert result["environment"]["world"] == 2
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("train: 1 steps, accuracy")


def test_single_precision(plain: tuple[Path, str, str], tmp_path: Path) -> None:
    """The weights end in the same place, but for a few hundredths of the way they went."""
    for epochs in (0, 1):
        jobs.run(resolve("train", {**PLAIN, "epochs": epochs}), tmp_path / str(epochs), quiet=True)
    start, one, two = (load_file(out / "model.safetensors") for out in (tmp_path / "0", tmp_path / "1", plain[0]))
    for key in one:
        assert (one[key] - two[key]).float().norm() <= 0.05 * (one[key] - start[key]).float().norm(), key
    assert [note["loss"] for note in notes_of(tmp_path / "1")] == pytest.approx(
        [note["loss"] for note in notes_of(plain[0])], rel=1e-5
    )


def test_large_images_kept_by_each_process_give_what_one_gives(tmp_path: Path) -> None:
    """Read by both, cropped on their device, each its share of a batch; tested batch by batch in turn."""
    write(tmp_path / "images")
    options = {
        **SHARED, "model": "test_distributed:coloured", "data": str(tmp_path / "images"), "batch": 6, "epochs": 2,
        "keep": "device", "resolution": SIZE, "workers": 1,
    }  # fmt: skip
    out, err = passed(torchrun("-m", "growprune", "train", *words(options), "--out", tmp_path / "two", "--json"))
    one, two = jobs.run(resolve("train", options), tmp_path / "one", quiet=True), json.loads(out)
    assert (two["environment"]["world"], two["accuracy"]) == (2, one["accuracy"])
    assert two["choices"]["images"] == {"keep": "device", "decode": "cpu"}
    assert err.startswith("reading 42 images, to keep them on the device")
    here, there = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for key in here:
        assert torch.allclose(here[key].double(), there[key].double(), rtol=0, atol=TOLERANCE), key


def coloured(num_classes: int) -> nn.Module:
    class Doubled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.double())

    layers = [nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Doubled(*layers, nn.Linear(6, num_classes)).double()


def two_machines(command: list[Any], *outs: Path) -> list[subprocess.Popen[str]]:
    """The same command on each, with a folder of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        torchrun(
            "-m", "growprune", *command, "--out", out, "--json", processes=1,
            more=("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", str(port)),
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip


def test_two_machines_give_what_one_gives(plain: tuple[Path, str, str], tmp_path: Path) -> None:
    launchers = two_machines(["train", *words(PLAIN)], tmp_path / "run", tmp_path / "run")
    (first, _), (second, silence) = (passed(launcher) for launcher in launchers)
    assert json.loads(first)["environment"]["world"] == 2
    assert second == ""
    assert not said(silence)
    assert_same_bits(plain[0], tmp_path / "run")


def test_three_processes_go_on_with_the_same_bits(tmp_path: Path) -> None:
    """A sum of three depends on its order, that of two does not."""
    passed(torchrun(__file__, "three", tmp_path, processes=3))
    assert_same_bits(tmp_path / "whole", tmp_path / "parted")


# -- killed, stopped, refused ------------------------------------------------------------------------------------------


def pruning(pair: Path, out: Path, save_every: int = 0) -> list[Any]:
    """The command of a run that the script has done too; it saves at every step if not told otherwise."""
    options = words(RUNS["greg2 filter"], weights=pair / "train", save_every=save_every)
    return ["-m", "growprune", "prune", *options, "--out", out]


def test_a_killed_process_costs_nothing(pair: Path, tmp_path: Path) -> None:
    """First the second one, while λ grows, then the one that writes, in fine-tuning; torchrun starts both anew."""
    out = tmp_path / "run"
    launcher = torchrun(*pruning(pair, out), more=("--standalone", "--max-restarts", "2"))
    killed: list[int] = []
    for rank, step in ((1, 3), (0, 15)):
        wait_for(launcher, lambda step=step: saved(out) >= step)  # type: ignore[misc]
        killed.append(workers(launcher)[rank])
        os.kill(killed[-1], signal.SIGKILL)
    _, err = passed(launcher)
    went_on = [int(step) for step in re.findall(r"going on at step (\d+)", err)]
    assert len(went_on) == 2
    assert went_on[0] >= 3
    assert went_on[1] >= 15
    lost = [line for line in said(err) if "lost touch" in line]
    assert len(lost) == len(said(err)) <= 2
    compare_to(pair, out)


def compare_to(pair: Path, out: Path) -> None:
    assert_same_bits(pair / "greg2-filter", out)
    assert not (out / "checkpoints").exists()


def test_stopped_and_gone_on_with(pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    # As a cluster does: to all processes, so that torchrun's own get it twice, at times of their own.
    launcher = torchrun(*pruning(pair, out, save_every=600))
    notes = out / "metrics.jsonl"
    wait_for(launcher, lambda: notes.exists() and notes.read_text().count("\n") > 1)
    for pid in (*workers(launcher).values(), launcher.pid):
        os.kill(pid, signal.SIGINT)
    first = stopped(launcher, out)
    assert first > 0, "the stop itself has saved"
    # To torchrun alone.
    launcher = torchrun(*pruning(pair, out))
    wait_for(launcher, lambda: saved(out) >= 15)
    os.kill(launcher.pid, signal.SIGTERM)
    second = stopped(launcher, out)
    assert second >= 15
    printed, err = passed(torchrun(*pruning(pair, out)))
    assert f"going on at step {second}" in err
    assert "Report:" in printed
    compare_to(pair, out)


def stopped(launcher: subprocess.Popen[str], out: Path) -> int:
    """At which step it has stopped, as it says in one line, and has saved."""
    code, printed, err = ended(launcher)  # beyond 30 s torchrun kills them, and there is no such line
    assert code != 0
    assert printed == ""
    lines = said(err)
    assert len(lines) == 1, err
    found = re.search(r"stopped at step (\d+), all saved", lines[0])
    assert found, err
    assert int(found[1]) == saved(out)
    return saved(out)


def refused(launcher: subprocess.Popen[str]) -> str:
    """The one line that it says; torchrun adds its own report, with the exit code."""
    began = time.monotonic()
    code, printed, err = ended(launcher)
    assert time.monotonic() - began < 60
    assert code != 0
    assert printed == ""
    lines = said(err)
    assert len(lines) == 1, err
    assert re.search(r"exitcode *: 2 ", err), err
    assert "growprune/" not in err, f"a traceback of ours: {err}"
    return lines[0]


def test_an_error_that_all_have_is_said_once(pair: Path) -> None:
    first, second = (json.loads((pair / f"seen-{rank}.json").read_text())["errors"] for rank in range(2))
    assert [kind for kind, _ in first] == ["GrowpruneError"] * 3
    for (_, text), expected in zip(first, ("--batch: 63", "nothing", "not finite at step"), strict=True):
        assert expected in text
    assert second == [["SystemExit", "2"]] * 3
    assert str(pair / "wrong-lr") in first[2][1]
    assert [path.name for path in pair.glob("wrong-*")] == ["wrong-lr"], "the other two have not even begun"


def test_the_first_of_a_machine_goes_first(pair: Path) -> None:
    assert (pair / "order").read_text() == "0 1 "


def test_an_error_before_they_come_together_is_said_once() -> None:
    assert "--bath" in refused(torchrun("-m", "growprune", "train", "--bath", 63))


def test_unknown_data_is_refused(tmp_path: Path) -> None:
    """The first process of a machine looks for them, the second waits for it meanwhile."""
    out = tmp_path / "run"
    line = refused(torchrun("-m", "growprune", "train", *words(RUNS["train"], data="digit"), "--out", out))
    assert "did you mean 'digits'?" in line
    assert not out.exists()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """The first process alone knows."""
    out = tmp_path / "run"
    with closing(Folder.claim(out, resolve("train", RUNS["train"]))):
        line = refused(torchrun("-m", "growprune", "train", *words(RUNS["train"]), "--out", out))
        assert "in use by another process" in line
        assert (out / "config.json").exists()


def test_an_error_of_the_second_process_ends_both(tmp_path: Path) -> None:
    out, options = tmp_path / "run", words(RUNS["train"], model="test_distributed:only_first")
    assert refused(torchrun("-m", "growprune", "train", *options, "--out", out)).endswith("has no such network")
    left = {path.name for path in out.glob("*")}  # torchrun may end the first process before it has tidied up
    assert left <= {"config.json", ".lock"}


# -- batch norm over the whole batch -----------------------------------------------------------------------------------

Case = tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, int], torch.dtype]
NORMS: dict[str, Case] = {
    "2d": (lambda: nn.BatchNorm2d(3), (6, 3, 4, 5), (3, 3), torch.float),
    "2d double": (lambda: nn.BatchNorm2d(3), (6, 3, 4, 5), (3, 3), torch.double),
    "2d bfloat16": (lambda: nn.BatchNorm2d(3), (6, 3, 4, 5), (3, 3), torch.bfloat16),
    "2d shares of an odd batch": (lambda: nn.BatchNorm2d(3), (5, 3, 4, 5), (3, 2), torch.double),
    "1d": (lambda: nn.BatchNorm1d(4), (6, 4), (3, 3), torch.double),
    "1d one image each": (lambda: nn.BatchNorm1d(4), (2, 4), (1, 1), torch.double),
    "1d of sequences": (lambda: nn.BatchNorm1d(4), (6, 4, 7), (3, 3), torch.double),
    "3d": (lambda: nn.BatchNorm3d(2), (6, 2, 2, 3, 4), (3, 3), torch.double),
    "without scale": (lambda: nn.BatchNorm2d(3, affine=False), (6, 3, 4, 5), (3, 3), torch.double),
    "momentum None": (lambda: nn.BatchNorm2d(3, momentum=None), (6, 3, 4, 5), (3, 3), torch.double),
    "without statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (6, 3, 4, 5), (3, 3), torch.double),
    "of another class": (lambda: Active(3), (6, 3, 4, 5), (3, 3), torch.double),
    "not in training": (lambda: nn.BatchNorm2d(3).eval(), (6, 3, 4, 5), (3, 3), torch.double),
    "far from zero": (lambda: nn.Sequential(Shift(), nn.BatchNorm2d(3)), (6, 3, 4, 5), (3, 3), torch.float),
}


class Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1000.0


def batches_of(case: Case) -> Iterator[tuple[Tensor, Tensor]]:
    """Three batches, and what the loss makes of each value."""
    _, shape, _, dtype = case
    generator = torch.Generator().manual_seed(1)
    for number in range(3):
        x = torch.randn(shape, generator=generator, dtype=torch.double) * (number + 1) + number
        yield x.to(dtype), torch.randn(shape, generator=generator, dtype=torch.double).to(dtype)


def made(case: Case) -> nn.Module:
    torch.manual_seed(0)
    module = case[0]()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, dtype=torch.double))
    return module.double() if case[3] == torch.double else module


def normed(case: Case, world: World) -> dict[str, list[Tensor]]:
    """What this process gets for its share: gradients of the mean of the processes' losses, as in training."""
    module, (first, _) = made(case), case[2]
    mine = slice(0, first) if world.first else slice(first, None)
    if world.size == 1:
        mine = slice(None)
    found: dict[str, list[Tensor]] = {"out": [], "input": [], "parameter": [], "buffer": []}
    for x, g in batches_of(case):
        x, g = x[mine].clone().requires_grad_(), g[mine]
        if world.size > 1:
            with WholeBatch():
                out = module(x)
        else:
            out = module(x)
        loss = (out * g).sum() * world.size
        gradients = torch.autograd.grad(loss, [x, *module.parameters()])
        found["out"].append(out.detach())
        found["input"].append(gradients[0] / world.size)
        for grad in gradients[1:]:
            if world.size > 1:
                dist.all_reduce(grad)
            found["parameter"].append(grad / world.size)
        found["buffer"] += [buffer.clone() for buffer in module.buffers()]
    return found


@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_over_all_is_batch_norm_of_all(name: str, pair: Path) -> None:
    case = NORMS[name]
    whole = normed(case, World())
    parts = [torch.load(pair / f"norms-{rank}.pt")[name] for rank in range(2)]
    near = {torch.double: 1e-12, torch.float: 1e-3 if name == "far from zero" else 1e-5, torch.bfloat16: 2e-2}[case[3]]
    for key in ("out", "input"):
        for i, expected in enumerate(whole[key]):
            torch.testing.assert_close(torch.cat([part[key][i] for part in parts]), expected, rtol=near, atol=near)
    for key in ("parameter", "buffer"):
        assert len(whole[key]) == len(parts[0][key])
        for i, expected in enumerate(whole[key]):
            assert torch.equal(parts[0][key][i], parts[1][key][i]), f"{key} {i} differs between the processes"
            torch.testing.assert_close(parts[0][key][i], expected, rtol=near, atol=near)


# -- small things ------------------------------------------------------------------------------------------------------


def test_a_share_of_a_batch() -> None:
    shares = [World(rank, 4).share(256) for rank in range(4)]
    assert [index for share in shares for index in range(256)[share]] == list(range(256))
    World(0, 4).check("--batch", 256)
    said = "--batch: 254 images cannot be shared evenly by 4 processes; give 256, or start another number of them"
    with pytest.raises(GrowpruneError, match=f"^{said}$"):
        World(3, 4).check("--batch", 254)


def test_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert distributed.neighbours() == 4
    assert [distributed.own(device) for device in ("cpu", "auto", "cuda", "cuda:0")] == [
        "cpu",
        "auto",
        "cuda:1",
        "cuda:1",
    ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(GrowpruneError, match="4 processes, but 2 GPUs on this machine"):
        join("cuda")


def test_alone_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert join("cpu") == (World(), "cpu")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join("cuda") == (World(), "cuda")


# -- tables ------------------------------------------------------------------------------------------------------------

TABLE = ["reproduce", "table1", *words({"scale": "smoke", "only": "resnet56-0.9", "device": "cpu"})]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A row of two runs, in two processes, and what was printed and said."""
    out = tmp_path_factory.mktemp("table") / "paper"
    return out, *passed(torchrun("-m", "growprune", *TABLE, "--out", out, "--json"))


def done(out: Path) -> list[Path]:
    return sorted(out.glob("smoke-*.json"))


def test_a_table_is_reproduced_by_several_processes(table: tuple[Path, str, str]) -> None:
    """Each run by both of them; one puts it on the shelf and shows the table."""
    out, printed, err = table
    assert json.loads(printed)["name"] == "table1"
    assert err.count(" runs to do, one after another, about ") == 1
    found = [json.loads(path.read_text()) for path in done(out)]
    assert [run["environment"]["world"] for run in found] == [2, 2]
    assert len({run["gone"] for run in found}) == 1
    assert len(list((out / "bases").iterdir())) == 1
    assert {path.name for path in out.iterdir()} == {
        "bases", "runs", "tables", "base-smoke-resnet56-cifar10.json", *(path.name for path in done(out)),
    }  # fmt: skip


def test_the_first_process_looks_what_is_done(table: tuple[Path, str, str], tmp_path: Path) -> None:
    """The other machine has a folder of its own, in which all runs are there, and waits for none of them."""
    first, second = tmp_path / "first", tmp_path / "second"
    for out in (first, second):
        shutil.copytree(table[0], out, ignore=shutil.ignore_patterns("runs", "tables"))
    lost = [path.rename(tmp_path / path.name) for path in done(first)]
    before = contents(second)
    (printed, err), (nothing, silence) = (passed(launcher) for launcher in two_machines(TABLE, first, second))
    assert not json.loads(printed)["missing"]
    assert "2 runs to do" in err
    for path, old in zip(done(first), lost, strict=True):
        found, then = (json.loads(each.read_text()) for each in (path, old))
        assert (found["environment"]["world"], found["accuracy"]) == (2, then["accuracy"])
    assert (nothing, said(silence)) == ("", [])
    assert contents(second) == before
    (printed, err), _ = (passed(launcher) for launcher in two_machines(TABLE, first, tmp_path / "nothing"))
    assert "nothing to do" in err, "what the other one has not done is not asked"


@pytest.mark.parametrize("trained", [True, False])
def test_base_networks_that_another_machine_does_not_see_are_missed_by_all(
    table: tuple[Path, str, str], tmp_path: Path, trained: bool
) -> None:
    """Those that are there, and those that would have to be trained first."""
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(table[0], second, ignore=shutil.ignore_patterns("bases"))
    if trained:
        shutil.copytree(table[0], first, ignore=shutil.ignore_patterns("runs", "tables", "smoke-*.json"))
    ends = [ended(launcher) for launcher in two_machines(TABLE, first, second)]
    lines = [line for _, _, err in ends for line in said(err)]
    assert lines, ends
    for line in lines:  # the other one says it too if it hears no more from torchrun on the first machine
        assert re.fullmatch(
            "growprune: --out: .* is not the same folder for all processes, and each reads the base networks in it: "
            "give one that all machines see",
            line,
        )
    for code, printed, err in ends:
        assert code != 0
        assert printed == ""
        assert re.search(r"exitcode *: 2 ", err), err
    assert {path.name for path in first.iterdir()} <= {"bases", "base-smoke-resnet56-cifar10.json"}


@pytest.mark.parametrize("command", ["train", "reproduce"])
def test_what_is_wrong_on_one_machine_alone_ends_both(tmp_path: Path, command: str) -> None:
    """Before a run: weights are not there, which one that has begun does not look for; or --out is a file."""
    first, second = tmp_path / "first", tmp_path / "second"
    asked, wrong = TABLE, f"--out: {second} is a file; give a folder"
    if command == "train":
        options = {**PLAIN, "weights": "none"}
        asked, wrong = ["train", *words(options)], "weights 'none': no such file"
        Folder.claim(first, resolve("train", options)).close()
    else:
        second.touch()
    (code, printed, err), (_, _, refusal) = map(ended, two_machines(asked, first, second))
    (line,) = said(refusal)
    assert line.startswith(f"growprune: {wrong}")
    assert code != 0
    assert (printed, said(err)) == ("", [])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
