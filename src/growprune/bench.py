"""`growprune bench`: what a training step takes on this machine, by the trainer's own step.

Every figure is of real jobs as `growprune prune` makes them: GReg-1 at ratio 0.5 with the paper's settings, images and
augmentation included, testing and saving left out. On a GPU the step is captured and chosen by trial first.

`bench` is about the step of small images, which lie on the device; `fed` asks of a folder of large ones whether they
come as fast as the step takes them: streamed, with each decoder, and kept on the device if there is room.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from growprune import models, storage
from growprune.config import Prune
from growprune.distributed import World
from growprune.errors import GrowpruneError
from growprune.feeds import FromFiles, FromMemory, Images
from growprune.jobs import surroundings, usable
from growprune.outcome import environment
from growprune.report.progress import Progress
from growprune.step import Step
from growprune.streaming import Decode, undecodable
from growprune.train import Job

SECONDS = 3.0
"""How long the loader alone is measured."""


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
    workers: int = -1
    say: Callable[[str], None] = lambda line: None


def bench(asked: Bench) -> dict[str, Any]:
    """What a step takes, by model."""
    return measured(asked, "models", figures)


def fed(asked: Bench) -> dict[str, Any]:
    """Whether a folder's large images keep the step fed, by model."""
    if not Path(asked.data).expanduser().is_dir():
        raise GrowpruneError(f"--images: no folder {asked.data}; give one that holds train/ and val/")
    return measured(asked, "fed", feeding)


def measured(asked: Bench, what: str, figures: Callable[[Bench, Prune], dict[str, Any]]) -> dict[str, Any]:
    device = usable(asked.device)
    asked = replace(asked, device=device, steps=asked.steps or (200 if device.startswith("cuda") else 3))
    result: dict[str, Any] = {what: {}}
    with tempfile.TemporaryDirectory() as scratch:
        for name in asked.models:
            weights = Path(scratch) / "model.safetensors"
            config = plan(asked, name, weights)
            current = torch.cuda.device(device) if device.startswith("cuda") else nullcontext()
            with surroundings(config), current:  # streams are those of the current device
                images = Images(config, device, World())
                if asked.batch > (there := images.sizes["train"]):
                    raise GrowpruneError(f"--batch: no batch of {asked.batch} from {there} images; give a smaller one")
                storage.save(models.fresh(name, images.classes), weights)
                result[what][name] = figures(asked, config)
                result["environment"] = environment(device, 1)
    result |= {"data": asked.data, "batch": asked.batch, "steps": asked.steps}
    return result


def plan(asked: Bench, name: str, weights: Path) -> Prune:
    return Prune(
        model=name, data=asked.data, data_dir=asked.data_dir, weights=str(weights), ratios="0.5", device=asked.device,
        batch=asked.batch, prune_batch=asked.batch, workers=asked.workers,
        compile=asked.compile,  # type: ignore[arg-type]
    )  # fmt: skip


def figures(asked: Bench, config: Prune) -> dict[str, Any]:
    """One model: alone, beside others, and after pruning."""
    asked.say(f"{config.model}: alone, with the penalty and without")
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


def timed(
    steps: Sequence[Callable[[int], None]],
    asked: Bench,
    streams: Sequence[Any] = (None,),
    warm_up: int | None = None,
) -> float:
    """Milliseconds a model's step, all of them advancing in turn."""
    cuda = asked.device.startswith("cuda")
    first = (2 if cuda else 0) if warm_up is None else warm_up
    start = 0.0
    for number in range(first + asked.steps):
        if number == first:
            start = now(cuda)
        for step, stream in zip(steps, streams, strict=True):
            with torch.cuda.stream(stream):
                step(number)
    return (now(cuda) - start) / asked.steps / len(steps) * 1e3


def now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


# -- large images ----------------------------------------------------------------------------------------------------


def feeding(asked: Bench, config: Prune) -> dict[str, Any]:
    """One model: how it is fed by each decoder that there is here, and by the device's own memory."""
    found: dict[str, Any] = {}
    choices: dict[str, Any] = {}
    for decode in decoders(asked):
        job = Job(replace(config, decode=decode, keep="files"), None, asked.device, progress=said(asked))
        if not job.images.large:
            raise GrowpruneError(f"--images: those of {asked.data} are small and kept in memory; nothing is loaded")
        job.choices = choices  # the second takes its step as the first chose it
        asked.say(f"{config.model}: the step alone, the loader alone, and both; JPEGs on the {decode.upper()}")
        step = job.enter(job.stages[0], None)
        assert isinstance(step.feed, FromFiles)
        found[decode] = rates(asked, step, step.feed)
        found |= {"workers": step.feed.source.workers, "choice": str(step.choice)}
    if job.cuda and job.images.placed(asked.say) == "device":
        del step, job  # and with them the captured graph's memory
        found["kept"] = kept(asked, replace(config, decode="cpu", keep="device"), choices, found["cpu"]["step"])
    return found


def kept(asked: Bench, config: Prune, choices: dict[str, Any], alone: float) -> dict[str, float]:
    """The same of images that are kept on the device: `loader` is making batches of them, and nothing else."""
    job = Job(config, None, asked.device, progress=said(asked))
    job.choices = choices
    asked.say(f"{config.model}: batches alone, and with the step; the images kept on the device")
    step = job.enter(job.stages[0], None)
    assert isinstance(step.feed, FromMemory)
    loader, both = (asked.batch / timed([each], asked) * 1e3 for each in (batches(asked, step.feed), step))
    return shares(alone, loader, both)


def batches(asked: Bench, feed: FromMemory) -> Callable[[int], None]:
    """Makes a batch at each call; on a GPU by a graph, as the step does."""
    count = torch.zeros(1, dtype=torch.long, device=asked.device)
    feed.prepare(0)
    feed(count)
    if not asked.device.startswith("cuda"):
        return lambda number: feed(count) and None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        feed(count)
        count.add_(1)
    return lambda number: graph.replay()


def decoders(asked: Bench) -> list[Decode]:
    if not asked.device.startswith("cuda"):
        return ["cpu"]
    if why := undecodable(asked.device):
        asked.say(f"JPEGs cannot be decoded on the GPU ({why})")
    return ["cpu"] if why else ["cpu", "gpu"]


def rates(asked: Bench, step: Step, feed: FromFiles) -> dict[str, float]:
    """Images a second: of the step on a batch that stays where it is, of the loader, and of the step that it feeds."""
    with held(feed):
        alone = asked.batch / timed([step], asked, warm_up=2) * 1e3
    loader = feed.source.images_per_second(SECONDS)
    ahead = 2 * feed.source.workers + 2  # batches that are read before the first is used would flatter a slow loader
    both = asked.batch / timed([step], asked, warm_up=ahead) * 1e3
    feed.rest()
    return shares(alone, loader, both)


def shares(alone: float, loader: float, both: float) -> dict[str, float]:
    return {
        "step": alone, "loader": loader, "fed": both, "loader_share": loader / alone, "fed_share": both / alone
    }  # fmt: skip


@contextmanager
def held(feed: FromFiles) -> Iterator[None]:
    """No batch is read: the step takes the one that is on the device again and again."""
    feed.rest()
    feed.prepare = lambda step: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del feed.prepare
