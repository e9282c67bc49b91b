"""A run from its first step to its result: train, or push, remove and fine-tune. Stops and goes on at any step.

    stages of `train`: train                 stages of `prune`: prune (pick · push · stabilize) ─► removal ─► finetune

`Job.work` is the loop. It is a generator that stops after every step, so that several jobs can share one GPU, each on
its own stream, and so that a signal is heeded between two steps. All that a job needs to go on is in `Job.tree`: the
network, momentum, the pruner's state, how far it is, what was measured and chosen. Everything else follows from the
configuration and the step's number.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import growprune.report.run as page
from growprune import choosing, distributed, evaluation, origin, outcome, recipe, scales, storage
from growprune.choosing import Measured
from growprune.config import Config, Prune
from growprune.distributed import World
from growprune.errors import GrowpruneError, StoppedError
from growprune.feeds import Images
from growprune.pruner import Pruner
from growprune.recipe import Stage
from growprune.report.events import Events
from growprune.report.progress import Progress
from growprune.run import MODEL, REPORT, RESULT, Folder
from growprune.running import tensors
from growprune.step import Choice, NonFiniteError, Step

CHECKED_EVERY = 200
"""Steps between two looks at whether all was finite, on a GPU; until then a bad step has changed nothing."""
NOTES = 50
"""Taken at ends of epochs while filters are pushed, if there are as many."""


class Job:
    """One run. `folder` is None in all processes but the first; `measured` is what jobs before this one chose."""

    def __init__(
        self,
        config: Config,
        folder: Folder | None,
        device: str,
        world: World | None = None,
        progress: Progress | None = None,
        measured: Measured | None = None,
    ) -> None:
        self.config, self.folder, self.device, self.world = config, folder, device, world or World()
        self.measured: Measured = {} if measured is None else measured
        self.progress = progress or Progress(quiet=True)
        self.cuda = device.startswith("cuda")
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        self.stages = recipe.stages(config)
        for stage in self.stages:
            self.world.check(stage.option, stage.batch)
        self.images = Images(config, device, self.world)
        self.at, self.done, self.before = 0, 0, 0  # the stage, steps done in it, steps of the stages before
        self.accuracy: dict[str, float | None] = dict.fromkeys(
            ("base", "before_removal", "after_removal", "final", "best")
        )
        self.choices: dict[str, Any] = {}
        self.kept: dict[str, list[int]] = {}
        self.seconds = 0.0
        self.stopping, self.settled, self.safe = False, True, 0  # `safe`: the step of the last checkpoint
        self.pruner: Pruner | None = None
        self.step: Step | None = None
        self.begun = self.saved = self.noted = time.perf_counter()
        self.noted_at = self.timed_at = 0
        self.events: Events | None = None
        self.net = origin.network(config, self.images, folder)
        if folder is not None and getattr(config, "weights", None):
            folder.keep_base(self.net)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def work(self) -> Iterator[None]:
        """All that is left to do, step by step."""
        for stage in self.stages:  # what the last one cannot do must be said before the first
            stage.check(self.images.sizes["train"])
        self.images.check()
        tree = self.resumed()
        while self.at < len(self.stages):
            stage = self.stages[self.at]
            self.heed()  # while others, side by side, were prepared
            step = self.enter(stage, tree)
            if tree is None:
                if stage.name == "prune":
                    accuracy = self.note(stage, "start")
                    if doubt := scales.doubt(self.net, self.images, accuracy, self.sample_batch()):
                        self.progress.say(doubt)
                self.save()
            tree = None
            while not self.over(stage):
                phase = self.phase(stage)
                self.settled = False
                self.do(step)
                self.done += 1
                self.progress.step(self.done, phase=phase, penalty=self.penalty())
                if self.due(stage, phase):
                    self.note(stage, phase)
                elif self.done % CHECKED_EVERY == 0:
                    self.check()
                yield
                if self.interrupted():
                    self.save()
                    raise StoppedError(self.before + self.done)
                if time.perf_counter() - self.saved >= self.config.save_every:
                    self.save()
            if self.done and stage is not self.stages[-1]:
                self.save()  # what ends a stage may fail, and a user's model with it: not a step is lost
            self.leave(stage)
            del step  # and with it the captured graph's memory, before the next stage takes its own
        self.finish()

    def enter(self, stage: Stage, tree: Mapping[str, Any] | None) -> Step:
        """Everything a stage needs: optimizer, pruner, and the step in the way that is fastest here."""
        config, net = self.config, self.net.train()
        if stage.name == "prune" and self.fixed and not evaluation.fix_norms(net):
            self.progress.say(
                "--prune-norm fixed: there is no batch norm in this network whose statistics could be fixed"
            )
        self.images.decide(self.choices, self.progress.say)
        feed = self.images.feed(stage.batch, stage.number)
        self.epoch = feed.epoch_steps
        if stage.name == "prune":
            self.pruner = self.made_pruner()
        self.steps = self.pruner.total_steps if self.pruner is not None else config.epochs * self.epoch
        table = recipe.rates(config, stage, self.steps, self.epoch)
        optimizer = recipe.optimizer(config, net, table, self.device)
        self.step = step = Step(
            net, optimizer, feed, table, device=self.device, seeds=(config.seed, stage.number),
            smoothing=config.label_smoothing, world=self.world,
        )  # fmt: skip
        if tree is not None:
            self.take_up(step, tree)
        step.start(self.done)
        feed.prepare(self.done)
        step.use(self.chosen(stage, step))
        pruner = self.pruner if stage.name == "prune" else None

        def attach() -> None:
            if pruner is not None and self.steps:
                pruner.attach(optimizer)

        if self.cuda and self.world.size == 1 and step.choice.captured and not self.over(stage):
            step.pruner = pruner
            step.capture(attach)
        else:
            attach()
        if self.stages[-1] is not stage:
            self.progress.total = (
                self.before + self.steps + config.epochs * (self.images.sizes["train"] // config.batch)
            )
        self.progress.begin(stage.name, self.steps, self.done, before=self.before)
        self.noted, self.timed_at = time.perf_counter(), self.done
        return step

    def leave(self, stage: Stage) -> None:
        """What ends a stage: removal after pruning, and on to the next."""
        if stage.name == "prune":
            self.remove(stage)
        elif self.done == 0:
            self.note(stage, self.phase(stage))
        self.before += self.done
        self.at, self.done, self.noted_at, self.step = self.at + 1, 0, 0, None
        self.progress.end()

    def over(self, stage: Stage) -> bool:
        return self.pruner.done if stage.name == "prune" and self.pruner is not None else self.done >= self.steps

    def phase(self, stage: Stage) -> str:
        return self.pruner.phase.value if stage.name == "prune" and self.pruner is not None else stage.name

    def penalty(self) -> float | None:
        return self.pruner.penalty().pruned if self.pruner is not None and not self.pruner.done else None

    def due(self, stage: Stage, phase: str) -> bool:
        """Is a note due: at the end of some epochs, of a phase, of the stage?"""
        every = self.config.eval_every * self.epoch
        some = self.done % every == 0
        if some and stage.name == "prune":  # long, and nobody reads 500 notes: at the first end after each fiftieth
            some = self.done * NOTES // self.steps > (self.done - every) * NOTES // self.steps
        return some or self.over(stage) or self.phase(stage) != phase

    def heed(self) -> None:
        """Where nothing is unsaved: stop, if that was asked for."""
        if self.world.size == 1 and self.settled and self.stopping:
            raise StoppedError(self.safe)

    def interrupted(self) -> bool:
        if self.world.size > 1 and self.cuda and self.done % 10:  # asking the others makes a GPU wait for its host
            return False
        return distributed.anyone(self.world, self.stopping)

    def do(self, step: Step) -> None:
        try:
            step(self.done)
        except NonFiniteError as error:  # on a CPU it is noticed at once
            raise self.not_finite(error.step) from None

    def check(self) -> None:
        """Raise if a step was not finite, or if a finite gradient has made the weights infinite."""
        assert self.step is not None
        try:
            self.step.check()
        except NonFiniteError as error:
            raise self.not_finite(error.step) from None
        if not bool(torch.stack([p.isfinite().all() for p in self.net.parameters()]).all()):
            raise self.not_finite(self.done, "a weight", "none such was saved")

    def not_finite(
        self, step: int, what: str = "the loss or a gradient", but: str = "stopped before it changed any weight"
    ) -> GrowpruneError:
        where = f"; the checkpoint of step {self.safe} stays: {self.folder.path}" if self.folder else ""
        stage, epoch = self.stages[self.at].name, step / self.epoch
        return GrowpruneError(
            f"{what} is not finite at step {self.before + step} ({stage}, epoch {epoch:.1f}): "
            f"{but}; try a lower learning rate{where}"
        )

    # -- the method --------------------------------------------------------------------------------------------------

    def made_pruner(self) -> Pruner:
        config = self.config
        assert isinstance(config, Prune)
        pruner = recipe.pruner(config, self.net, self.images)
        self.agree(pruner)
        return pruner

    def agree(self, pruner: Pruner) -> None:
        """Every process prunes what the first picked."""
        if self.world.size > 1:
            pruner.load_state_dict(distributed.from_first(self.world, pruner.state_dict()))

    # -- how it computes ---------------------------------------------------------------------------------------------

    def chosen(self, stage: Stage, step: Step) -> Choice:
        """As it was chosen before, or else by trying; on a CPU there is nothing to choose."""
        if stage.name in self.choices:
            return Choice(**self.choices[stage.name])
        left = self.steps - self.done
        if not self.cuda or self.world.size > 1 or not left:
            choice = choosing.plain(self.config, self.device)
        else:
            known = stage.name, stage.batch, self.images.shape, self.fixed
            choice, free = choosing.tried(step, self.config, left, self.progress.say, self.measured, known, self.heed)
            self.progress.say(f"{stage.name}: chose {choice}")
            if free is not None:
                self.progress.say(
                    f"{stage.name}: deterministic, {choice.ms:.2f} ms a step instead of {free.ms:.2f} (uncompiled)"
                )
                self.choices[f"{stage.name}, if not deterministic"] = free.to_json()
        self.choices[stage.name] = choice.to_json()
        return choice

    # -- tests and notes ---------------------------------------------------------------------------------------------

    def test(self, net: nn.Module, exact: bool = False) -> float:
        """Accuracy in percent; `exact`: in float32, whatever the training step computes in."""
        choice = Choice() if exact or self.step is None else self.step.choice
        return evaluation.accuracy(net, self.images, choice.kernels if choice.precision == "bf16" else None)

    @property
    def fixed(self) -> bool:
        """Does batch norm keep its statistics while the penalty grows?"""
        return isinstance(self.config, Prune) and self.config.prune_norm == "fixed"

    def pushed(self) -> nn.Module:
        """The network as it is tested while the penalty grows: if its statistics follow the weights, they lag."""
        moved = self.done and not self.fixed
        return evaluation.estimated(self.net, self.images, self.sample_batch()) if moved else self.net

    def sample_batch(self) -> int:
        return min(256, self.stages[self.at].batch if self.at < len(self.stages) else self.config.batch)

    def note(self, stage: Stage, phase: str) -> float:
        """Test, and write down how things stand; the accuracy."""
        assert self.step is not None
        self.check()
        pushing = stage.name == "prune"
        if pushing and phase == "pick" and self.phase(stage) != "pick" and self.pruner is not None:
            self.agree(self.pruner)
        accuracy = self.test(self.pushed() if pushing else self.net)
        count, timed = self.done - self.noted_at, self.done - self.timed_at
        record: dict[str, Any] = {
            "stage": stage.name,
            "phase": phase,
            "step": self.before + self.done,
            "epoch": round(self.done / self.epoch, 4),
            "accuracy": accuracy,
            "loss": float(self.step.lost) / count if count else None,
            "lr": self.step.rates[self.done - 1] if self.done else None,
            "seconds": round(self.elapsed(), 3),
            "ms": round((time.perf_counter() - self.noted) / timed * 1e3, 3) if timed else None,
        }
        if pushing and self.pruner is not None:
            pushed = self.pruner.schedule.at(self.done - 1).pruned if self.done else 0.0
            record |= {"lambda": pushed, "layers": evaluation.magnitudes(self.pruner)}
        elif stage.name == self.stages[-1].name:
            self.accuracy["best"] = max(accuracy, self.accuracy["best"] or 0.0)
        self.step.lost.zero_()
        self.write(record)
        self.progress.step(self.done, phase=phase, accuracy=accuracy, loss=record["loss"], ms=record["ms"])
        self.noted, self.noted_at, self.timed_at = time.perf_counter(), self.done, self.done
        return accuracy

    def write(self, record: Mapping[str, Any]) -> None:
        if self.folder is not None:
            self.folder.note(record)
        if self.events is not None:
            self.events.note(dict(record))

    # -- removal and result ------------------------------------------------------------------------------------------

    def remove(self, stage: Stage) -> None:
        """The smaller network in place of the pushed one."""
        pruner = self.pruner
        assert pruner is not None
        before = self.test(self.pushed(), exact=True)
        base = self.test(origin.network(self.config, self.images, self.folder), exact=True)
        fixed = self.fixed and self.done > 0
        small = recipe.removed(pruner, self.images, self.sample_batch(), fixed, self.progress.say)
        distributed.same_weights(self.world, small)  # folded and estimated by each process for itself
        after = self.test(small, exact=True)
        self.kept = pruner.widths()
        self.accuracy |= {"base": base, "before_removal": before, "after_removal": after}
        record: dict[str, Any] = {
            "stage": stage.name,
            "phase": "removal",
            "step": self.before + self.done,
            "accuracy": after,
        }
        record |= {"epoch": round(self.done / self.epoch, 4), "before": before, "loss": None, "lr": None, "ms": None}
        if pruner.groups.granularity == "filter":
            record["gone"] = {name: (~mask).nonzero().flatten().tolist() for name, mask in pruner.masks().items()}
        self.write(record | {"seconds": round(self.elapsed(), 3)})
        self.net, self.pruner = small, None

    def finish(self) -> None:
        """Write the network, the result, and what people look at; result.json last, for it means: finished."""
        final = self.test(self.net, exact=True)
        self.images.close()
        self.accuracy |= {"final": final, "best": max(final, self.accuracy["best"] or 0.0)}
        self.net.to(memory_format=torch.contiguous_format)
        base = origin.network(self.config, self.images, self.folder)
        result = {} if not self.world.first else outcome.of(
            self.config, self.images, base, self.net, self.device, accuracy=self.accuracy, steps=self.before,
            seconds=round(self.elapsed(), 3), widths=self.kept,
            choices={name: outcome.shown(choice) for name, choice in self.choices.items()},
            environment=outcome.environment(self.device, self.world.size),
        )  # fmt: skip
        if self.folder is not None:
            storage.save(self.net, self.folder.path / MODEL)
            self.folder.write(REPORT, page.page(result, self.folder.notes()).encode())
            self.folder.write(RESULT, json.dumps(result, indent=2).encode() + b"\n")
            self.folder.tidy()
        if self.events is not None:
            self.events.close()
        self.result: dict[str, Any] = distributed.from_first(self.world, result)

    # -- stopping and going on ---------------------------------------------------------------------------------------

    def elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.begun

    def save(self) -> None:
        """A checkpoint of this very step; never one of a run gone bad."""
        self.check()
        if self.folder is not None:
            self.folder.save(self.before + self.done, self.tree())
        self.saved, self.settled, self.safe = time.perf_counter(), True, self.before + self.done

    def tree(self) -> dict[str, Any]:
        assert self.step is not None
        facts, stored = storage.described(self.net)
        names = {id(p): name for name, p in self.net.named_parameters()}
        return {
            "at": self.at,
            "done": self.done,
            "before": self.before,
            "facts": facts,
            "net": stored,
            "momentum": {names[id(p)]: s["momentum_buffer"] for p, s in self.step.optimizer.state.items()},
            "pruner": None if self.pruner is None else self.pruner.state_dict(),
            "lost": self.step.lost,
            "noted_at": self.noted_at,
            "accuracy": self.accuracy,
            "choices": self.choices,
            "kept": self.kept,
            "seconds": self.elapsed(),
            "threads": torch.get_num_threads(),
            "images": self.images.known(),
        }

    def resumed(self) -> dict[str, Any] | None:
        """The last good checkpoint's tree, in every process; the network is then the one it holds."""
        loaded = self.folder.latest(self.config.to_json()) if self.folder is not None else None
        for notice in loaded.notices if loaded else ():
            self.progress.say(notice)
        if self.folder is not None and self.config.tensorboard:
            self.events = Events(self.folder.path, loaded.step + 1 if loaded else 0)
        tree: dict[str, Any] | None = distributed.from_first(self.world, loaded.tree if loaded else None)
        if tree is None:
            return None
        self.at, self.done, self.before = tree["at"], tree["done"], tree["before"]
        self.accuracy, self.choices, self.kept = tree["accuracy"], tree["choices"], tree["kept"]
        self.seconds, self.begun = tree["seconds"], time.perf_counter()
        self.safe = self.before + self.done
        self.images.recognized(tree["images"], self.progress.say)
        where = self.folder.path if self.folder else Path()
        made = origin.made(self.config, self.images)
        there = storage.rebuilt(made, tree["facts"], tree["net"], where).to(self.device)
        if self.stages[self.at].name == "prune":  # its pruner is made of the network as it began: see `take_up`
            tree["now"] = tensors(there)
        else:
            self.net = there
        if not self.cuda and tree["threads"] != torch.get_num_threads():
            torch.set_num_threads(tree["threads"])  # sums would round differently
        self.progress.say(f"going on at step {self.before + self.done}")
        return tree

    def take_up(self, step: Step, tree: Mapping[str, Any]) -> None:
        """Into a stage that was left in its middle."""
        own: dict[str, Any] = tensors(self.net)
        with torch.no_grad():
            for name, now in tree.get("now", {}).items():
                own[name].copy_(now)
        for name, momentum in tree["momentum"].items():
            step.optimizer.state[own[name]]["momentum_buffer"].copy_(momentum)
        step.lost.copy_(tree["lost"])
        self.noted_at = tree["noted_at"]
        if self.pruner is not None and tree["pruner"] is not None:
            self.pruner.load_state_dict(tree["pruner"])
