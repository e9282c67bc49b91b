"""Where and how runs of tables are done, from what `growprune reproduce` was asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

from growprune import asking, paper
from growprune.config import Config, Prune
from growprune.distributed import World, anyone, foremost, from_first, launched
from growprune.errors import GrowpruneError
from growprune.feeds import Last
from growprune.jobs import usable
from growprune.paper.grid import Experiment
from growprune.paper.results import Found, Shelf
from growprune.paper.setting import Base, Scale, Setting

T = TypeVar("T")


@dataclass(frozen=True)
class Lab:
    """Where and how runs are done; `options` hold for all of them."""

    out: Path
    scale: Scale = "short"
    seeds: int | None = None  # as many as the experiment asks for
    parallel: int = 1
    device: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    say: Callable[[str], None] = print
    last: Last = field(default_factory=Last, compare=False)  # what of the images is still on the device
    world: World = field(default_factory=World)

    @property
    def shelf(self) -> Shelf:
        return Shelf(self.out, self.scale)

    @property
    def at_once(self) -> int:
        """Runs that advance together: on one GPU, in one process."""
        return self.parallel if usable(self.device).startswith("cuda") and not launched() else 1

    def look(self, setting: Setting) -> Found:
        return self.shelf.found(setting)

    def told(self, look: Callable[[], T]) -> T:
        """What the first process finds, in all of them: what lies on another machine may be another shelf."""
        found: T = from_first(self.world, look() if self.world.first else None)
        return found

    def shared(self) -> bool:
        """Is --out one folder for all processes? They see the file that the first one puts there for a moment."""
        if self.world.size == 1:
            return True
        with ExitStack() as moment:
            mark = self.out / self.told(lambda: put(self.out, moment))
            return not anyone(self.world, not mark.exists())

    def config(self, setting: Setting, seed: int, weights: Path) -> Prune:
        return setting.config(self.scale, seed, weights, device=self.device, **self.options)

    def base_config(self, base: Base) -> Config:
        """One that was trained before is trained again as it was computed then: else it would not be the same."""
        config = base.config(self.scale, device=self.device, **self.options)
        before = self.shelf.computed(base)
        return replace(config, **before) if before else config


def put(folder: Path, moment: ExitStack) -> str:
    """The name of a file that lies there until the moment is over."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(moment.enter_context(NamedTemporaryFile(dir=folder, prefix=".")).name).name


def commissioned(
    asked: asking.Reproduce, names: Sequence[str], world: World
) -> tuple[Lab, list[Experiment], list[str]]:
    """The laboratory, what is asked of it, and of which rows alone."""
    images = str(Path(asked.images or Path(asked.data_dir) / "imagenet").expanduser())
    experiments, only = paper.wanted(names, images, asked.only)
    found = [experiment.name for experiment in experiments]
    if asked.images is not None and not {*found} & {*paper.OF_IMAGES}:
        raise GrowpruneError(
            f"--images: only {' and '.join(paper.OF_IMAGES)} are of such images, not {', '.join(found)}"
        )
    handed = ("data_dir", "workers", "precision", "layout", "compile", "kernels", "deterministic")
    options = {key: getattr(asked, key) for key in handed}
    lab = Lab(Path(asked.out).expanduser(), asked.scale, asked.seeds, asked.parallel, asked.device, options,
              lambda line: print(f"growprune: {line}", file=sys.stderr) if foremost() else None,
              world=world)  # fmt: skip
    if asked.images is not None and asked.scale == "smoke":
        lab.say("--images: not looked at, a smoke run is on digits")
    if lab.out.exists() and not lab.out.is_dir():
        raise GrowpruneError(f"--out: {lab.out} is a file; give a folder")
    if not asked.run and not lab.out.is_dir():
        lab.say(f"--out: no folder {lab.out}: nothing was run there")
    return lab, experiments, only
