"""The training step where a GPU is: our kernels in bfloat16, a captured step against an eager one, the same bits after
a kill and beside other runs, and nothing that waits for the device."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import growprune as gp
from growprune import checkpoint, convolutions, jobs, models, several, storage
from growprune.choosing import choose, determinism
from growprune.config import Prune, Train
from growprune.distributed import World
from growprune.feeds import Images
from growprune.step import Choice, Step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch looks for it once, at the first matrix product

DEVICE = "cuda"
FAST = Choice("bf16", "channels_last")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise of CIFAR's size with a hint of its class, as an .npz pair: 2,000 images to train on, 500 to test on."""
    root = tmp_path_factory.mktemp("pictures")
    chance = np.random.default_rng(0)
    for split, count in (("train", 2000), ("test", 500)):
        y = chance.integers(0, 10, count)
        x = chance.integers(0, 200, (count, 32, 32, 3)) + 5 * y[:, None, None, None]
        np.savez(root / f"{split}.npz", x=x.astype(np.uint8), y=y, classes=np.array([f"class{i}" for i in range(10)]))
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh ResNet20's: what is pruned here need not be good."""
    path = tmp_path_factory.mktemp("weights") / "resnet20.safetensors"
    storage.save(network("resnet20").cpu(), path)
    return path


def network(name: str = "resnet20") -> nn.Module:
    torch.manual_seed(0)
    return models.create(name).to(DEVICE)


class Droppy(nn.Module):
    """Half of what it sees is dropped, twice, and a wide matrix product follows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, 2, 1)
        self.fc1, self.fc2, self.drop = nn.Linear(16 * 256, 256), nn.Linear(256, 10), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.conv(x))).flatten(1)
        out: Tensor = self.fc2(self.drop(F.relu(self.fc1(x))))
        return out


def droppy() -> nn.Module:
    torch.manual_seed(0)
    return Droppy().to(DEVICE)


def made(root: Path, net: nn.Module, rates: Sequence[float] = (0.01,) * 60, batch: int = 100, **how: Any) -> Step:
    """A step over the pictures, as a job makes it."""
    feed = Images(Train(data=str(root), device=DEVICE), DEVICE, World()).feed(batch, 0)
    rate = torch.tensor(rates[0], device=DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), rate, 0.9, weight_decay=5e-4, fused=True)
    step = Step(net.train(), optimizer, feed, rates, device=DEVICE, **how)
    feed.prepare(0)
    return step


def flat(net: nn.Module) -> Tensor:
    """Parameters and statistics, side by side."""
    every = [t for t in (*net.parameters(), *net.buffers()) if t.is_floating_point()]
    return torch.cat([t.detach().contiguous().flatten().double() for t in every])


def apart(a: Tensor, b: Tensor, start: Tensor) -> float:
    """How far two results are from each other, for one unit of what the first moved."""
    return float((a - b).norm() / (a - start).norm())


def ours(net: nn.Module) -> dict[str, str]:
    """Our kernels wherever they fit."""
    found = {name: "few" for name, module in net.named_modules() if convolutions.suits(module)}
    assert found
    return found


# -- kernels -----------------------------------------------------------------------------------------------------------

SHAPES = [
    (16, 3, 16, 32, 32, "channels_last"),
    (16, 16, 16, 32, 32, "channels_last"),
    (16, 16, 16, 32, 32, "contiguous_format"),
    (16, 32, 32, 16, 16, "channels_last"),
    (32, 64, 64, 8, 8, "channels_last"),
    (16, 16, 1, 32, 32, "channels_last"),
    (16, 1, 16, 32, 32, "channels_last"),
    (1, 20, 33, 5, 7, "channels_last"),
    (8, 33, 6, 17, 9, "contiguous_format"),
]


@pytest.mark.parametrize(("images", "channels", "filters", "height", "width", "layout"), SHAPES)
def test_a_kernel_computes_the_convolution(
    images: int, channels: int, filters: int, height: int, width: int, layout: str
) -> None:
    """In bfloat16, against float64 on the same rounded numbers. What is written as bfloat16 is rounded once, at 2⁻⁹;
    the weight's gradient stays float32."""
    torch.manual_seed(0)
    x = torch.randn(images, channels, height, width, device=DEVICE).to(
        torch.bfloat16, memory_format=torch.channels_last
    )
    weight = torch.randn(filters, channels, 3, 3, device=DEVICE).to(memory_format=getattr(torch, layout))
    weight.requires_grad_()
    grad = torch.randn(images, filters, height, width, device=DEVICE).to(torch.bfloat16)
    x.requires_grad_()
    y = convolutions.convolve(x, weight)
    found = torch.autograd.grad(y, (x, weight), grad)
    exact = [x.detach().double().requires_grad_(), weight.detach().bfloat16().double().requires_grad_()]
    right = F.conv2d(*exact, padding=1)
    wanted = torch.autograd.grad(right, exact, grad.double())
    pairs = zip((y.detach(), *found), (right.detach(), *wanted), strict=True)
    off = [float((a.double() - b).norm() / b.norm()) for a, b in pairs]
    assert y.dtype == found[0].dtype == torch.bfloat16
    assert found[1].dtype == torch.float32
    assert max(off[:2]) < 5e-3
    assert off[2] < 1e-5
    assert found[1].stride() == weight.stride()
    again = torch.autograd.grad(convolutions.convolve(x, weight), (x, weight), grad)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_the_kernels_can_be_timed() -> None:
    """None of them fails here: what fails is passed over without a word."""
    layer = nn.Conv2d(16, 6, 3, padding=1, bias=False).to(DEVICE, memory_format=torch.channels_last)
    for kind in ("", *convolutions.candidates(layer)):
        assert convolutions.layer_time(layer, (16, 16, 32, 32), kind) < 0.01
    assert convolutions.candidates(layer) == ["few", "aligned"]
    frozen = nn.Conv2d(3, 16, 3, padding=1, bias=False).to(DEVICE).requires_grad_(False)
    assert convolutions.layer_time(frozen, (16, 3, 32, 32), "few") < 0.01


# -- a captured step ---------------------------------------------------------------------------------------------------


def taken(step: Step, choice: Choice, captured: bool, pruner: gp.Pruner | None = None, count: int = 10) -> Tensor:
    """What so many steps make of a network."""

    def attach() -> None:
        if pruner is not None:
            pruner.attach(step.optimizer)

    step.use(choice)
    if captured:
        step.pruner = pruner
        step.capture(attach)
    else:
        attach()
    for number in range(count):
        step(number)
    step.check()
    assert int(step.count) == int(step.good) == count
    return flat(step.net)


@pytest.mark.parametrize("kind", ["fp32", "ieee", "bf16", "kernels", "penalty", "held"])
def test_a_captured_step_is_the_eager_one(pictures: Path, kind: str) -> None:
    """Weights, statistics and the sum of losses, in every way to compute; with the penalty, whose λ grows between
    replays; with single weights that are held at zero."""
    found, lost = [], []
    choice = Choice(kind, "contiguous") if kind in ("fp32", "ieee") else FAST
    for captured in (False, True):
        net, pruner = network(), None
        example = torch.ones(1, 3, 32, 32, device=DEVICE)
        if kind == "kernels":
            choice = Choice("bf16", "channels_last", kernels=ours(net))
        if kind == "penalty":
            pruner = gp.Pruner(net, example, gp.GReg1(delta_lambda=0.2, ku=2, ks=5))
        if kind == "held":
            gp.Pruner(net, example, gp.OneShot(), granularity="weight").compact()
        step = made(pictures, net)
        start = flat(net)
        with determinism(True):
            found.append(taken(step, choice, captured, pruner))
        lost.append(float(step.lost))
        assert pruner is None or pruner.step_count == 10
        if kind == "held":
            zeros = sum(int((p == 0).sum()) for p in net.parameters() if p.dim() == 4)
            assert zeros > 100_000
    assert apart(found[0], found[1], start) < 1e-3
    assert lost[1] == pytest.approx(lost[0], rel=1e-4)


def test_a_capture_and_a_trial_leave_everything_as_it_was(pictures: Path) -> None:
    """Also where a trial's forty replays run past the end of a stage of five steps."""
    step = made(pictures, network(), rates=[0.01, 0.02, 0.03, 0.04, 0.05])
    before = flat(step.net)
    for choice in (FAST, Choice("fp32", "contiguous")):
        step.use(choice)
        step.capture()
        assert 0 < step.milliseconds() < 100
        assert torch.equal(flat(step.net), before)
        assert [int(t) for t in (step.count, step.good, step.bad)] == [0, 0, 0]
        assert not any(float(s["momentum_buffer"].abs().sum()) for s in step.optimizer.state.values())
    for number in range(5):
        step(number)
        assert float(step.optimizer.param_groups[0]["lr"]) == pytest.approx(step.rates[number])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_replayed_step_waits_for_the_device(pictures: Path) -> None:
    net = network()
    pruner = gp.Pruner(net, torch.ones(1, 3, 32, 32, device=DEVICE), gp.GReg1(delta_lambda=0.1, ku=2, ks=50))
    step = made(pictures, net)
    step.use(FAST)
    step.pruner = pruner
    step.capture(lambda: pruner.attach(step.optimizer))
    step(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(1, 18):  # an epoch has twenty
            step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.check()
    assert pruner.step_count == 18


def test_a_steps_memory_is_given_back(pictures: Path) -> None:
    """When nobody has the step any more, and without the garbage collector."""

    def held() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    gc.collect()
    net = network()
    before = held()
    gc.disable()
    try:
        step = made(pictures, net, batch=500)
        step.use(FAST)
        step.capture()
        step(0)
        assert held() - before > 128 << 20
        del step
        for p in net.parameters():
            p.grad = None
        assert held() - before < 64 << 20
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore")  # torch.compile gives advice
def test_compiled_steps_compute_the_same(pictures: Path) -> None:
    """With our kernels inside, over five steps: up to what bfloat16 rounds away at other places."""
    found = []
    for compiled in (False, True):
        net = network()
        step = made(pictures, net)
        start = flat(net)
        found.append(taken(step, Choice("bf16", "channels_last", compiled, ours(net)), captured=True, count=5))
        found.append(step.lost.clone())
    assert apart(found[0], found[2], start) < 0.1
    assert float(found[3]) == pytest.approx(float(found[1]), rel=1e-2)


# -- chance ------------------------------------------------------------------------------------------------------------


class Same:
    """One batch for ever, so that only what a network draws at random differs from step to step."""

    def __init__(self, feed: Any) -> None:
        self.batch = feed(torch.zeros(1, dtype=torch.long, device=DEVICE))
        self.normalized = feed.normalized

    def prepare(self, step: int) -> None:
        pass

    def __call__(self, count: Tensor) -> tuple[Tensor, Tensor]:
        return self.batch


def test_a_replay_drops_by_the_steps_number(pictures: Path) -> None:
    """The same in each run, as in an eager step, another in each step and for each seed."""

    def dropped(numbers: Sequence[int], seed: int = 0, captured: bool = True) -> Tensor:
        net = droppy()
        step = made(pictures, net, seeds=(seed, 0))
        step.feed = Same(step.feed)
        step.use(FAST)
        if captured:
            step.capture()
        torch.cuda.manual_seed(int(time.time()))
        for number in numbers:
            step(number)
        step.check()
        return flat(net)

    with determinism(True):
        start, first = flat(droppy()), dropped([3])
        assert torch.equal(dropped([3]), first)
        assert apart(first, dropped([3], captured=False), start) < 1e-3
        for other in (dropped([4]), dropped([3], seed=1)):
            assert apart(first, other, start) > 0.01
        assert torch.equal(dropped([3, 4, 5]), dropped([3, 4, 5]))
        assert not torch.equal(dropped([3, 4, 5]), dropped([3, 3, 3]))


def test_steps_side_by_side_do_not_disturb_each_other(pictures: Path) -> None:
    """Graphs of several runs in flight at a time, with dropout and large matrix products: each on a stream of its own
    gives what it gives alone."""

    def ready(seed: int) -> Step:
        step = made(pictures, droppy(), seeds=(seed, 0))
        step.use(FAST)
        step.capture()
        return step

    with determinism(True):
        alone = []
        for seed in range(4):
            step = ready(seed)
            for number in range(18):
                step(number)
            alone.append(flat(step.net))
        together = [ready(seed) for seed in range(4)]
        streams = [torch.cuda.Stream() for _ in together]
        torch.cuda.synchronize()
        for number in range(18):
            for step, stream in zip(together, streams, strict=True):
                with torch.cuda.stream(stream):
                    step(number)
        torch.cuda.synchronize()
        assert len({float(each.sum()) for each in alone}) == 4
        for step, right in zip(together, alone, strict=True):
            assert torch.equal(flat(step.net), right)


# -- whole runs --------------------------------------------------------------------------------------------------------

SHORT: dict[str, Any] = {
    "model": "resnet20",
    "delta_lambda": 0.1,
    "delta_lambda_pick": 0.005,
    "ku": 2,
    "ks": 20,
    "batch": 100,
    "prune_batch": 100,
    "epochs": 2,
    "lr": "0.01",
    "precision": "bf16",
    "layout": "channels_last",
    "compile": "off",
    "device": DEVICE,
    "deterministic": True,
}


def words(config: Prune) -> list[str]:
    """A configuration as a command line has it."""
    found = []
    for key, value in config.to_json().items():
        if value == getattr(Prune(), key) or key == "command":
            continue
        found += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return found


def kill_at(command: list[str], out: Path, step: int) -> str:
    """Start a run and kill it, -9, when a checkpoint of that step or a later one is there; gives its stderr."""
    log = out.with_suffix(".log")
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        until = time.monotonic() + 240
        while process.poll() is None and max([-1, *(s for s, _ in checkpoint.finished(out / "checkpoints"))]) < step:
            assert time.monotonic() < until
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, log.read_text()
    assert not (out / "result.json").exists()
    return log.read_text()


@pytest.mark.parametrize(("schedule", "step", "kernels"), [("greg1", 12, "auto"), ("greg2", 55, "off")])
def test_a_killed_run_ends_with_the_same_bits(
    pictures: Path, weights: Path, tmp_path: Path, schedule: Any, step: int, kernels: Any
) -> None:
    """With --deterministic: killed while pushing, or while fine-tuning, and taken up by another process. What that
    costs is said."""
    config = Prune(**SHORT, schedule=schedule, kernels=kernels, data=str(pictures), weights=str(weights))
    growprune = [sys.executable, "-m", "growprune"]
    out = tmp_path / "killed"
    said = kill_at([*growprune, "prune", *words(config), "--save-every", "0", "--out", str(out)], out, step)
    assert re.search(r"deterministic, \d+\.\d+ ms a step instead of \d+\.\d+", said)
    again = subprocess.run([*growprune, "resume", str(out)], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "going on at step" in again.stderr
    whole = jobs.run(config, tmp_path / "whole", quiet=True)
    assert whole["steps"] == 80 + 4 * (schedule == "greg2")
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert json.loads((out / "result.json").read_text())["accuracy"] == whole["accuracy"]


@pytest.mark.parametrize("model", ["resnet20", "vgg19", "torchvision:resnet50"])
def test_trained_twice_by_two_processes_a_network_has_the_same_bits(pictures: Path, tmp_path: Path, model: str) -> None:
    """With --deterministic: a base network that is lost can be trained again."""
    options = ["--model", model, "--data", str(pictures), "--epochs", "2", "--batch", "100", "--deterministic"]
    found = []
    for out in (tmp_path / "once", tmp_path / "again"):
        command = [sys.executable, "-m", "growprune", "train", *options, "--device", DEVICE, "--out", out]
        subprocess.run(command, check=True, capture_output=True)
        found.append((out / "model.safetensors").read_bytes())
    assert found[0] == found[1]


def test_runs_side_by_side_give_what_each_gives_alone(pictures: Path, weights: Path, tmp_path: Path) -> None:
    plans = [
        Prune(**SHORT, kernels="off", data=str(pictures), weights=str(weights), seed=seed, schedule=schedule)  # type: ignore[arg-type]
        for seed, schedule in enumerate(("greg1", "greg2", "greg1"))
    ]
    for number, plan in enumerate(plans):
        jobs.run(plan, tmp_path / f"alone{number}", quiet=True)
    results = several.side_by_side([(plan, tmp_path / f"beside{i}") for i, plan in enumerate(plans)], 3, quiet=True)
    found = [(tmp_path / f"beside{i}" / "model.safetensors").read_bytes() for i in range(3)]
    assert [result["seed"] for result in results] == [0, 1, 2]
    assert len(set(found)) == 3
    for number, each in enumerate(found):
        assert each == (tmp_path / f"alone{number}" / "model.safetensors").read_bytes()


def test_a_run_that_goes_bad_stops_and_keeps_what_was_good(pictures: Path, tmp_path: Path) -> None:
    """A learning rate beyond all measure: step 0 is finite, what follows is not, and no weight takes part in it."""
    config = Train(
        model="resnet20", data=str(pictures), epochs=3, batch=100, lr="1e30", warm_up=0, compile="off", kernels="off",
        device=DEVICE,
    )  # fmt: skip
    out = tmp_path / "bad"
    with pytest.raises(gp.GrowpruneError, match=r"not finite at step [1-9] \(train, epoch 0\.\d\)") as caught:
        jobs.run(config, out, quiet=True)
    assert "\n" not in str(caught.value)
    found = checkpoint.latest(out / "checkpoints")
    assert found is not None
    tree = found.tree
    assert all(bool(t.isfinite().all()) for t in (*tree["net"].values(), *tree["momentum"].values()))


def test_a_pruned_network_trains_no_slower(pictures: Path) -> None:
    """ResNet56 at ratio 0.9, whose inner widths are 1, 3 and 6, against the whole one, each in its fastest way."""
    asked = Train(data=str(pictures), compile="off", device=DEVICE)

    def pace(make: Callable[[], nn.Module]) -> Choice:
        step = made(pictures, make(), batch=256)
        with determinism(False):
            return choose(step, asked, 100, print)

    def pruned() -> nn.Module:
        example = torch.ones(1, 3, 32, 32, device=DEVICE)
        return gp.Pruner(network("resnet56"), example, gp.OneShot(), ratios=0.9).compact()

    whole, small = pace(lambda: network("resnet56")), pace(pruned)
    print(f"whole: {whole}; pruned: {small}")
    assert whole.ms is not None
    assert small.ms is not None
    assert small.ms <= 1.05 * whole.ms
