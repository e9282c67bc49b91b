"""`growprune demo`: the whole way once, on real images, without a download or a GPU.

    train ─┬─► GReg-1: push, stabilize, remove ─► fine-tune ─┬─► compare, draw, write
           └─► one-shot: remove ────────────────► fine-tune ─┘

Both remove the same filters of the same network and are fine-tuned alike, batch for batch, so only the way the filters
go differs. As GReg-1 trains while it prunes, `longer` adds a third: one-shot with as many steps as GReg-1 has in all.
"""

from __future__ import annotations

import copy
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from growprune import __version__, ratios, report
from growprune.compact import calibrate
from growprune.errors import GrowpruneError
from growprune.measurement import latency, measure, speedup
from growprune.models import CifarResNet
from growprune.penalty import Scope
from growprune.pruner import Pruner
from growprune.report import GREG, LONGER, ONESHOT, Watch
from growprune.schedule import OVER, GReg1, OneShot, Schedule
from growprune.storage import save, write_whole


@dataclass(frozen=True)
class DemoConfig:
    """Everything the outcome depends on, as config.json keeps it.

    The schedule is the paper's, scaled to a data set 40 times smaller: λ grows to the same τ, but in 800 steps, not
    100,000, at a learning rate of 0.03, not 0.001.
    """

    seed: int = 0
    ratio: float = 0.9
    scope: Scope = "path"
    longer: bool = False
    device: str = "auto"
    train_images: int = 1200
    batch: int = 64
    weight_decay: float = 5e-4
    base_epochs: int = 20
    base_lr: float = 0.1
    delta_lambda: float = 0.0025
    tau: float = 1.0
    ku: int = 2
    ks: int = 200
    lr: float = 0.03
    finetune_epochs: int = 15

    def __post_init__(self) -> None:
        if not 0 < self.ratio < 1:
            raise GrowpruneError(f"ratio: {self.ratio} is outside (0, 1); 0.9 removes nine filters of ten")
        self.schedule  # noqa: B018 (checks its own numbers)

    @property
    def schedule(self) -> GReg1:
        return GReg1(delta_lambda=self.delta_lambda, tau=self.tau, ku=self.ku, ks=self.ks)

    @property
    def epoch(self) -> int:
        """Steps in one."""
        return self.train_images // self.batch

    @property
    def total_steps(self) -> int:
        """Of the base network and of every way from it."""
        ways = 2 + self.longer
        return (self.base_epochs + ways * self.finetune_epochs) * self.epoch + (ways - 1) * self.schedule.total_steps


def network(num_classes: int = 10) -> nn.Module:
    """The demo's network: 14 layers, residual, for grey images; also `--model growprune.demo:network --input 1x8x8`."""
    return CifarResNet(14, num_classes, in_channels=1, width=8)


# -- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """scikit-learn's digits: 1,797 handwritten ones of 8×8 pixels. The test part is never trained on."""

    train: Tensor
    labels: Tensor
    test: Tensor
    test_labels: Tensor


def digits(train_images: int, device: str) -> Images:
    """The first images for training, the others held out, in the file's order: neighbours in it are often by the same
    hand, so a random split would be too easy."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(found.target, dtype=torch.long).to(device)
    images = ((images - images[:train_images].mean()) / images[:train_images].std()).to(device)
    return Images(images[:train_images], labels[:train_images], images[train_images:], labels[train_images:])


def batches(images: Images, batch: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled anew each epoch, each image shifted by up to a pixel; the seed alone decides the order."""
    generator = torch.Generator().manual_seed(seed)
    padded = F.pad(images.train, (1, 1, 1, 1), value=float(images.train.min()))
    windows = padded.unfold(2, 8, 1).unfold(3, 8, 1).squeeze(1)
    epoch = len(windows) // batch
    for step in range(steps):
        if step % epoch == 0:
            order = torch.randperm(len(windows), generator=generator)
        chosen = order[step % epoch * batch :][:batch]
        down, right = torch.randint(0, 3, (2, batch), generator=generator)
        yield windows[chosen, down, right].unsqueeze(1), images.labels[chosen]


@dataclass
class Lab:
    """What all ways share: the settings, the images, and the notes taken (metrics.jsonl)."""

    config: DemoConfig
    images: Images
    watch: Watch
    notes: list[dict[str, Any]] = field(default_factory=list)

    def estimate(self, net: nn.Module) -> nn.Module:
        """Batch-norm statistics anew, in place: running ones lag while filters shrink, and know nothing of removal."""
        calibrate(net, [self.images.train[:600]])
        return net

    @torch.no_grad()
    def accuracy(self, net: nn.Module) -> float:
        """On the held-out images, in percent."""
        guesses = self.estimate(copy.deepcopy(net)).eval()(self.images.test).argmax(1)
        return 100 * float((guesses == self.images.test_labels).float().mean())

    def note(self, net: nn.Module, method: str, phase: str, step: int, more: Mapping[str, Any] | None = None) -> float:
        accuracy = self.accuracy(net)
        self.notes.append({"method": method, "phase": phase, "step": step, "accuracy": accuracy, **(more or {})})
        return accuracy

    def train(
        self, net: nn.Module, method: str, phase: str, start: int, rates: list[float], pruner: Pruner | None = None
    ) -> None:
        """One training phase of `len(rates)` steps; with a pruner its penalty acts. Notes at least every epoch."""
        config = self.config
        optimizer = torch.optim.SGD(net.parameters(), rates[0], momentum=0.9, weight_decay=config.weight_decay)
        if pruner is not None:
            pruner.attach(optimizer)
        net.train()
        seed = 3 * config.seed + ("train", "prune", "fine-tune").index(phase)
        self.watch.begin(f"{method}: {phase}", len(rates))
        for step, (x, y) in enumerate(batches(self.images, config.batch, len(rates), seed), 1):
            penalty = pruner.penalty() if pruner else OVER
            optimizer.param_groups[0]["lr"] = rates[step - 1]
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            accuracy = None
            if step % config.epoch == 0 or step == len(rates) or (pruner and pruner.phase is not penalty.phase):
                more = {"lr": rates[step - 1], "loss": float(loss.detach())}
                more |= pushed(pruner, penalty.pruned) if pruner else {}
                accuracy = self.note(net, method, penalty.phase.value if pruner else phase, start + step, more)
            self.watch.step(accuracy, penalty.pruned if pruner else None)
        self.watch.end()


def pushed(pruner: Pruner, penalty: float) -> dict[str, Any]:
    """λ, and how far kept and pruned filters have come apart."""
    layers = {}
    for name, found in pruner.separation().items():
        gone = (~pruner.masks()[name]).nonzero().flatten()
        layers[name] = {key: value.tolist() for key, value in {**vars(found), "gone": gone}.items()}
    return {"lambda": penalty, "layers": layers}


def cosine(rate: float, steps: int, warm_up: int = 0) -> list[float]:
    """From `rate` down to zero along half a cosine, after a linear rise over `warm_up` steps."""
    falling = [rate * 0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]
    return [value * min(1.0, (step + 1) / max(1, warm_up)) for step, value in enumerate(falling)]


# -- the ways to remove the same filters ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What one way came to: the smaller network, the filters it kept, and what result.json says of it."""

    net: nn.Module
    kept: dict[str, Tensor]
    summary: dict[str, Any]


def remove(lab: Lab, base: nn.Module, method: str, schedule: Schedule, finetune_steps: int) -> Outcome:
    """Prune a copy of `base` by `schedule`, cut it, fine-tune it."""
    config, started = lab.config, time.perf_counter()
    net = copy.deepcopy(base)
    pruner = Pruner(net, lab.images.train[: config.batch], schedule, ratios=config.ratio, scope=config.scope)
    start = config.base_epochs * config.epoch
    lab.note(net, method, "start", start, pushed(pruner, 0.0))
    if pruner.total_steps:
        lab.train(net, method, "prune", start, [config.lr] * pruner.total_steps, pruner)
    start += pruner.total_steps
    before = lab.accuracy(net)
    small = pruner.compact()
    after = lab.note(small, method, "removal", start)
    lab.train(small, method, "fine-tune", start, cosine(config.lr, finetune_steps))
    course = [n["accuracy"] for n in lab.notes if n["method"] == method and n["phase"] == "fine-tune"]
    accuracy = {"base": lab.accuracy(base), "before_removal": before, "after_removal": after}
    accuracy |= {"final": course[-1], "best": max(course)}
    phases = {"prune": pruner.total_steps, "finetune": finetune_steps}
    summary = {"accuracy": accuracy, "phases": phases, "steps": sum(phases.values())}
    return Outcome(lab.estimate(small), pruner.masks(), summary | {"seconds": time.perf_counter() - started})


def compare(lab: Lab, base: nn.Module) -> dict[str, Outcome]:
    """Train the base network, then go every way; that all keep the same filters is checked."""
    config, schedule = lab.config, lab.config.schedule
    steps, finetune_steps = config.base_epochs * config.epoch, config.finetune_epochs * config.epoch
    lab.note(base, "base", "train", 0)
    lab.train(base, "base", "train", 0, cosine(config.base_lr, steps, warm_up=40))
    ways = {
        GREG: remove(lab, base, GREG, schedule, finetune_steps),
        ONESHOT: remove(lab, base, ONESHOT, OneShot(), finetune_steps),
    }
    if config.longer:
        ways[LONGER] = remove(lab, base, LONGER, OneShot(), schedule.total_steps + finetune_steps)
    for name, kept in ways[GREG].kept.items():
        if not all(torch.equal(way.kept[name], kept) for way in ways.values()):
            raise AssertionError(f"'{name}' lost other filters one-shot than by GReg-1: no fair comparison")
    return ways


# -- the folder ------------------------------------------------------------------------------------------------------


def run(config: DemoConfig, out: Path, watch: Callable[[int], Watch] = Watch) -> dict[str, Any]:
    """The demo, into the folder `out`; returns what result.json says."""
    config = DemoConfig(**{**asdict(config), "device": device(config.device)})
    claim(out, config)
    started = time.perf_counter()
    with watch(config.total_steps) as progress, one_thread(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)  # the first weights are drawn on the CPU, all else by seeds
        base = network().to(config.device)
        lab = Lab(config, digits(config.train_images, config.device), progress)
        ways = compare(lab, base)
        result = outcome(lab, base, ways)
        result["seconds"] = time.perf_counter() - started
    save(ways[GREG].net, out / "model.safetensors")
    write_whole(out / "metrics.jsonl", "".join(f"{json.dumps(note)}\n" for note in lab.notes).encode())
    figures = report.draw(result, lab.notes)
    for name, png in figures.items():
        write_whole(out / f"{name}.png", png)
    write_whole(out / "report.html", report.page(result, figures).encode())
    write_whole(out / "result.json", json.dumps(result, indent=2).encode() + b"\n")
    return result


def outcome(lab: Lab, base: nn.Module, ways: dict[str, Outcome]) -> dict[str, Any]:
    """What result.json says: of the GReg-1 run; `baseline` is the one-shot one, `longer` that with more steps."""
    config, small, example = lab.config, ways[GREG].net, lab.images.test[:1]
    full, left = measure(base, example), measure(small, example)
    slow, fast = (latency(net, lab.images.test, repeats=20) for net in (base, small))
    widths = {name: [len(kept), int(kept.sum())] for name, kept in ways[GREG].kept.items()}
    return {
        **ways[GREG].summary,
        "params": {"before": full.params, "after": left.params},
        "macs": {"before": full.macs, "after": left.macs},
        "speedup": speedup(full, left),
        "sparsity": 1 - left.params / full.params,
        "latency": {"before": slow, "after": fast, "ratio": slow / fast, "batch": len(lab.images.test)},
        "model": "growprune.demo:network",
        "data": "digits of scikit-learn",
        "images": {"train": len(lab.images.train), "test": len(lab.images.test)},
        "seed": config.seed,
        "schedule": {"name": "GReg1", **asdict(config.schedule)},
        "criterion": "l1",
        "granularity": "filter",
        "scope": config.scope,
        "ratios": ratios.write(ratios.read(config.ratio)),
        "widths": widths,
        "baseline": ways[ONESHOT].summary,
        **({"longer": ways[LONGER].summary} if LONGER in ways else {}),
        "environment": environment(config.device),
    }


def environment(used: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name(used) if used.startswith("cuda") else platform.processor() or platform.machine()
    versions = {"growprune": __version__, "torch": torch.__version__, "python": platform.python_version()}
    machine = {"platform": platform.platform(), "device": used, "device_name": name, "cores": os.cpu_count()}
    return versions | machine | {"threads": torch.get_num_threads()}


def claim(out: Path, config: DemoConfig) -> None:
    """Make `out` this demo's folder; one that holds anything else is refused, and left as it is."""
    wanted, another = {"command": "demo", **asdict(config)}, "name another folder with --out"
    try:
        out.mkdir(parents=True, exist_ok=True)
        known = out / "config.json"
        found = json.loads(known.read_bytes()) if known.is_file() else {} if any(out.iterdir()) else wanted
    except ValueError:
        found = {}
    except OSError as error:
        raise GrowpruneError(f"{out}: {error.strerror}; {another}") from error
    if not isinstance(found, dict) or found.get("command") != "demo":
        raise GrowpruneError(f"{out}: not empty, and not a demo's folder; {another}")
    for key in sorted(wanted.keys() | found.keys()):
        if (there := found.get(key)) != (here := wanted.get(key)):
            raise GrowpruneError(f"{out}: holds a demo with {key} {there}, not {here}; {another}, or remove it")
    write_whole(out / "config.json", json.dumps(wanted, indent=2).encode() + b"\n")


def device(name: str) -> str:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name if name.startswith(("cpu", "cuda")) else "none")
    except (RuntimeError, AssertionError) as error:
        raise GrowpruneError(f"device: '{name}' cannot be used here; give auto, cpu or cuda") from error
    return name


@contextmanager
def one_thread() -> Iterator[None]:
    """So small a network gains nothing from more, and its numbers then depend on the seed, not on the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
