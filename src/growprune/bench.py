"""`growprune bench`: what a training step takes on this machine, by the trainer's own step.

Every figure is of real jobs as `growprune prune` makes them: GReg-1 at ratio 0.5 with the paper's settings, images and
augmentation included, testing and saving left out. On a GPU the step is captured and chosen by trial first.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from growprune import models, storage
from growprune.config import Prune
from growprune.distributed import World
from growprune.errors import GrowpruneError
from growprune.feeds import Images
from growprune.jobs import surroundings, usable
from growprune.outcome import environment
from growprune.report.progress import Progress
from growprune.step import Step
from growprune.train import Job


@dataclass(frozen=True)
class Bench:
    """What is measured, and how long."""

    models: Sequence[str]
    data: str
    data_dir: str
    device: str
    batch: int
    parallel: int
    steps: int
    compile: str
    say: Callable[[str], None] = lambda line: None


def bench(asked: Bench) -> dict[str, Any]:
    """The figures, by model."""
    device = usable(asked.device)
    asked = replace(asked, device=device, steps=asked.steps or (200 if device.startswith("cuda") else 3))
    result: dict[str, Any] = {"models": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for name in asked.models:
            weights = Path(scratch) / "model.safetensors"
            config = plan(asked, name, weights)
            with surroundings(config):
                images = Images(config, device, World())
                storage.save(models.fresh(name, images.classes), weights)
                asked.say(f"{name}: alone, with the penalty and without")
                result["models"][name] = figures(asked, config)
    result["environment"] = environment(device, 1)
    result |= {"data": asked.data, "batch": asked.batch, "steps": asked.steps}
    return result


def plan(asked: Bench, name: str, weights: Path) -> Prune:
    return Prune(
        model=name, data=asked.data, data_dir=asked.data_dir, weights=str(weights), ratios="0.5", device=asked.device,
        batch=asked.batch, prune_batch=asked.batch, compile=asked.compile,  # type: ignore[arg-type]
    )  # fmt: skip


def figures(asked: Bench, config: Prune) -> dict[str, Any]:
    """One model: alone, beside others, and after pruning."""
    job = Job(config, None, asked.device, progress=said(asked))
    step = job.enter(job.stages[0], None)
    plain = Job(config, None, asked.device, progress=said(asked))
    bare = without_penalty(plain, job)
    rounds = []
    for turn in range(4):
        order = [("bare", bare), ("pushed", step)] if turn % 2 else [("pushed", step), ("bare", bare)]
        rounds.append({key: timed([each], asked) for key, each in order})
    found: dict[str, Any] = {
        "ms": statistics.median(each["pushed"] for each in rounds),
        "ms_without_penalty": statistics.median(each["bare"] for each in rounds),
        "penalty_share": 1 - statistics.median(each["bare"] / each["pushed"] for each in rounds),
        "images_per_second": 0.0,
        "choice": str(step.choice),
    }
    found["images_per_second"] = asked.batch / found["ms"] * 1e3
    if asked.parallel > 1 and job.cuda:
        asked.say(f"{config.model}: {asked.parallel} at once")
        others = [job, *(like(job, config, asked) for _ in range(asked.parallel - 1))]
        together = [each.step for each in others if each.step is not None]
        streams = [each.stream for each in others]
        found["ms_parallel"] = {str(asked.parallel): timed(together, asked, streams)}
    asked.say(f"{config.model}: fine-tuning at ratio 0.9")
    found["pruned"] = pruned(asked, config)
    found["pruned"]["ratio"] = found["pruned"]["ms"] / found["ms_without_penalty"]
    return found


def said(asked: Bench) -> Progress:
    progress = Progress(quiet=True)
    progress.say = asked.say  # type: ignore[method-assign, assignment]
    progress.end = lambda line=None: None  # type: ignore[method-assign]
    return progress


def without_penalty(plain: Job, chosen: Job) -> Step:
    """The same step of the same network, with no pruner attached."""
    plain.choices = dict(chosen.choices)
    plain.over = lambda stage: True  # type: ignore[method-assign]
    step = plain.enter(plain.stages[0], None)
    if plain.pruner is not None:
        plain.pruner.detach()
    if plain.cuda:
        step.capture()
    return step


def like(job: Job, config: Prune, asked: Bench) -> Job:
    other = Job(config, None, asked.device, progress=said(asked))
    other.choices = dict(job.choices)
    other.enter(other.stages[0], None)
    return other


def pruned(asked: Bench, config: Prune) -> dict[str, Any]:
    """Fine-tuning the network at ratio 0.9, whose widths are odd."""
    job = Job(replace(config, schedule="oneshot", ratios="0.9"), None, asked.device, progress=said(asked))
    job.enter(job.stages[0], None)
    job.remove(job.stages[0])
    job.at = 1
    step = job.enter(job.stages[1], None)
    return {"ms": min(timed([step], asked) for _ in range(3)), "choice": str(step.choice)}


def timed(steps: Sequence[Step], asked: Bench, streams: Sequence[Any] = (None,)) -> float:
    """Milliseconds a model's step, all of them advancing in turn."""
    cuda = asked.device.startswith("cuda")
    for number in range(2 if cuda else 0):
        for step, stream in zip(steps, streams, strict=True):
            with torch.cuda.stream(stream):
                step(number)
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for number in range(asked.steps):
        for step, stream in zip(steps, streams, strict=True):
            with torch.cuda.stream(stream):
                step(number)
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / asked.steps / len(steps) * 1e3


def loader(folder: str, workers: int, device: str, batch: int = 64) -> dict[str, Any]:
    """Images a second that come from a folder of large images, decoded on the CPU's cores and on the GPU."""
    from growprune import data
    from growprune.streaming import Streamed

    dataset = data.load(folder, stream=True)
    found: dict[str, Any] = {}
    for decode in ("cpu", "gpu") if device.startswith("cuda") else ("cpu",):
        source = Streamed(dataset, device, batch, None if workers < 0 else workers, decode=decode)
        found[decode] = source.images_per_second()
        found["workers"] = source.workers
        source.close()
    if not found:
        raise GrowpruneError(f"{folder}: nothing to measure")
    return found
