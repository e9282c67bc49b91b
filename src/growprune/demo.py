"""`growprune demo`: the whole way once, on real images, without a download or a GPU.

    train ─┬─► GReg-1: push, stabilize, remove ─► fine-tune ─┬─► compare, draw, write
           └─► one-shot: remove ────────────────► fine-tune ─┘

Both remove the same filters of the same network and are fine-tuned alike, batch for batch, so only the way the filters
go differs. As GReg-1 trains while it prunes, `longer` adds a third: one-shot with as many steps as GReg-1 has in all.

Each is an ordinary run of `growprune train` or `prune` in a folder of its own inside the demo's, so that an interrupted
demo goes on where it was.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from growprune import report
from growprune.config import Config, Prune, Train
from growprune.errors import GrowpruneError
from growprune.jobs import run as run_job
from growprune.jobs import usable
from growprune.models import CifarResNet
from growprune.penalty import Scope
from growprune.report import GREG, LONGER, ONESHOT
from growprune.run import MODEL, NOTES, REPORT, RESULT, Folder
from growprune.schedule import GReg1

MODEL_NAME = "growprune.demo:network"
BATCH = 64
EPOCH = 1200 // BATCH
"""Steps in one: the digits' training images in batches."""


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
    base_epochs: int = 20
    base_lr: float = 0.1
    delta_lambda: float = 0.0025
    tau: float = 1.0
    ku: int = 2
    ks: int = 200
    lr: float = 0.03
    finetune_epochs: int = 15
    save_every: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.ratio < 1:
            raise GrowpruneError(f"ratio: {self.ratio} is outside (0, 1); 0.9 removes nine filters of ten")
        self.schedule  # noqa: B018 (checks its own numbers)

    @property
    def schedule(self) -> GReg1:
        return GReg1(delta_lambda=self.delta_lambda, tau=self.tau, ku=self.ku, ks=self.ks)


def network(num_classes: int = 10) -> nn.Module:
    """The demo's network: 14 layers, residual, for grey images; also `--model growprune.demo:network --input 1x8x8`."""
    return CifarResNet(14, num_classes, in_channels=1, width=8)


def parts(config: DemoConfig, out: Path) -> dict[str, tuple[Path, Config]]:
    """The runs that the demo is made of, by method, in order."""
    shared: dict[str, Any] = {
        "model": MODEL_NAME, "data": "digits", "seed": config.seed, "device": config.device, "batch": BATCH,
        "threads": 1,  # so small a network gains nothing from more, and its numbers then depend on the seed alone
        "save_every": config.save_every,
    }  # fmt: skip
    base = Train(epochs=config.base_epochs, lr=f"cosine:{config.base_lr}", warm_up=40 / EPOCH, **shared)
    greg = Prune(
        weights=str((out / "base").resolve()), ratios=str(config.ratio), scope=config.scope, schedule="greg1",
        prune_batch=BATCH, prune_lr=config.lr, delta_lambda=config.delta_lambda, tau=config.tau, ku=config.ku,
        ks=config.ks, epochs=config.finetune_epochs, lr=f"cosine:{config.lr}", **shared,
    )  # fmt: skip
    oneshot = replace(greg, schedule="oneshot")
    found: dict[str, tuple[Path, Config]] = {
        "base": (out / "base", base),
        GREG: (out / "greg1", greg),
        ONESHOT: (out / "oneshot", oneshot),
    }
    if config.longer:
        epochs = config.finetune_epochs + math.ceil(config.schedule.total_steps / EPOCH)
        found[LONGER] = (out / "longer", replace(oneshot, epochs=epochs))
    return found


def run(config: DemoConfig, out: Path, quiet: bool = False) -> dict[str, Any]:
    """The demo, or what is left of it, into the folder `out`; returns what result.json says."""
    config = replace(config, device=usable(config.device))
    folder = Folder.claim(out, {"command": "demo", **asdict(config)})
    try:
        if folder.result is not None:
            return folder.result
        results: dict[str, dict[str, Any]] = {}
        notes: list[dict[str, Any]] = []
        for method, (place, each) in parts(config, out).items():
            results[method] = run_job(each, place, quiet, label=method)
            own = [json.loads(line) for line in (place / NOTES).read_bytes().splitlines()]
            start = 0 if method == "base" else results["base"]["steps"]
            notes += [{"method": method, **note, "step": start + note["step"]} for note in own]
        agree(notes)
        result = compared(config, results)
        figures = report.draw(result, notes)
        folder.write(NOTES, "".join(f"{json.dumps(note)}\n" for note in notes).encode())
        shutil.copyfile(out / "greg1" / MODEL, out / MODEL)
        for name, png in figures.items():
            folder.write(f"{name}.png", png)
        folder.write(REPORT, report.page(result, figures).encode())
        folder.write(RESULT, json.dumps(result, indent=2).encode() + b"\n")
        return result
    finally:
        folder.close()


def agree(notes: list[dict[str, Any]]) -> None:
    """That all ways removed the same filters is what the comparison rests on: it is checked."""
    gone = {note["method"]: note["gone"] for note in notes if note["phase"] == "removal"}
    for method, theirs in gone.items():
        for name, filters in gone[GREG].items():
            if theirs[name] != filters:
                raise AssertionError(f"'{name}' lost other filters by {method} than by {GREG}: no fair comparison")


def compared(config: DemoConfig, results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What result.json says: of the GReg-1 run; `baseline` is the one-shot one, `longer` that with more steps."""
    pushed = {GREG: config.schedule.total_steps}
    ways = {}
    for method, result in results.items():
        prune = pushed.get(method, 0)
        phases = {"prune": prune, "finetune": result["steps"] - prune}
        ways[method] = {"phases": phases, **{key: result[key] for key in ("accuracy", "steps", "seconds")}}
    return {
        **results[GREG],
        **ways[GREG],
        "command": "demo",
        "data": "digits of scikit-learn",
        "seconds": sum(result["seconds"] for result in results.values()),
        "baseline": ways[ONESHOT],
        **({"longer": ways[LONGER]} if LONGER in results else {}),
    }


def read(found: Mapping[str, Any], out: Path) -> DemoConfig:
    """The configuration that a demo's folder keeps."""
    try:
        return DemoConfig(**{key: value for key, value in found.items() if key != "command"})
    except TypeError as error:
        raise GrowpruneError(f"{out}: of another version of the demo; {error}") from error
