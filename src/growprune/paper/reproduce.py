"""`growprune reproduce`: do the runs that tables need and are not done yet, then set them beside the paper's.

The base networks come first; then every run, several at a time on a GPU. Each finished run is put on the shelf at once;
an interrupted one goes on where it was. The table can be made at any time from what is there. Of several processes the
first one looks what there is, and the others do as it says.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from growprune import data
from growprune.cifar import KINDS as CIFARS
from growprune.config import Config, Prune, differences, scaling
from growprune.distributed import anyone, foremost, launched, own, processes
from growprune.errors import GrowpruneError
from growprune.feeds import COMFORT
from growprune.jobs import run, threads, usable
from growprune.keeping import room
from growprune.outcome import environment
from growprune.paper.grid import Experiment
from growprune.paper.imagenet import IMAGES, about_as_many
from growprune.paper.lab import Lab
from growprune.paper.results import LOCAL, OLD, Ground, base_facts, run_facts
from growprune.paper.setting import IMAGENET, KINDS, Base, Setting, called
from growprune.reading import fingerprint, images_below, subfolders
from growprune.recipe import schedule
from growprune.report import duration
from growprune.run import CONFIG, RESULT, busy, in_use, read_config, read_json, saved
from growprune.several import SomeFailedError, side_by_side
from growprune.streaming import default_workers

Wanted = list[tuple[Setting, int]]
"""Settings and seeds."""
Failures = list[tuple[str, str]]
"""Runs that were not done, and why."""


def needed(lab: Lab, *experiments: Experiment, only: Sequence[str] = ()) -> dict[Setting, int]:
    """Settings, each once, and how many seeds of it these experiments ask for; `only` of these rows."""
    seeds: dict[Setting, int] = {}
    for experiment in experiments:
        for each in experiment.settings(only):
            seeds[each] = max(seeds.get(each, 0), lab.seeds or experiment.seeds)
    return seeds


def missing(lab: Lab, *experiments: Experiment, only: Sequence[str] = ()) -> Wanted:
    """The runs that are not done; the first seed of all settings comes before the second of any."""
    seeds = needed(lab, *experiments, only=only)
    there = {each: lab.look(each).seeds for each in seeds}
    runs = [(each, seed) for each, count in seeds.items() for seed in range(count) if seed not in there[each]]
    once = {each.key(lab.scale, seed): (each, seed) for each, seed in runs}  # a run may be asked for in two ways
    return sorted(once.values(), key=lambda run: run[1])


def reproduce(lab: Lab, *experiments: Experiment, only: Sequence[str] = ()) -> None:
    """Do what is missing, as far as it can be done. Of several processes the first one looks what that is, for all."""
    if lab.world.first:
        settings = list(needed(lab, *experiments, only=only))
        for damage in lab.shelf.damaged(settings):
            lab.say(f"{damage}: taken as not run, and kept as {OLD} when it is")
        for line in done_without(lab, settings):
            lab.say(line)
    wanted = lab.told(lambda: missing(lab, *experiments, only=only))
    if not wanted:
        lab.say("every run is there: nothing to do")
        return
    bases = list(dict.fromkeys(setting.base for setting, _ in wanted))
    there, lost = grounds(lab, bases)
    if len(lost) == len(bases):
        raise GrowpruneError(next(iter(lost.values())))
    for base, why in lost.items():
        lab.say(f"{base.name} is left out: {why}")
    failures = [(base.name, why) for base, why in lost.items()]
    bases = [base for base in bases if base not in lost]
    wanted = [each for each in wanted if each[0].base in bases]
    untrained = [base for base in bases if base not in there]
    for base in untrained:
        if lab.shelf.about(base).exists():
            lab.say(f"{base.name} is gone: it is trained again, and taken if it comes out the same")
    have_images(lab, bases)
    same_images(lab, bases)
    seen_by_all(lab, there, untrained)
    if foremost():  # to know how long it looks through the images
        lab.say(forecast(lab, untrained, wanted))
    failures += train(lab, untrained)
    there, _ = grounds(lab, bases)
    while ready := [each for each in wanted if each[0].base in there]:
        failures += prune(lab, ready, there, more=len(ready) < len(wanted))
        wanted = [each for each in wanted if each not in ready]
        there, _ = grounds(lab, bases)  # another process may have trained one meanwhile
    lab.last.images = None
    undone = {lab.shelf.folder(*each).name for each in missing(lab, *experiments, only=only)}
    undone |= {lab.shelf.training(base).name for base in bases if base not in there}
    if failures := [(name, why) for name, why in failures if why != BUSY or name in undone]:
        raise SomeFailedError(failures)


def grounds(lab: Lab, bases: Sequence[Base]) -> tuple[dict[Base, Ground], dict[Base, str]]:
    """The base networks that are there, as the first process finds them, each where it lies for this one; and of those
    that were and are no more, what is wrong."""
    there, lost = lab.told(lambda: looked_for(lab, bases))
    files = {base: lab.shelf.network(base, ground.facts["sha256"]) for base, ground in there.items()}
    return {base: replace(ground, file=files[base]) for base, ground in there.items()}, lost


def looked_for(lab: Lab, bases: Sequence[Base]) -> tuple[dict[Base, Ground], dict[Base, str]]:
    there: dict[Base, Ground] = {}
    lost: dict[Base, str] = {}
    for base in bases:
        try:
            ground = lab.shelf.ground(base, partial(repeatable, lab, base))
        except GrowpruneError as error:
            lost[base] = str(error)
        else:
            if ground is not None:
                there[base] = ground
    return there, lost


def repeatable(lab: Lab, base: Base, facts: Mapping[str, Any]) -> bool:
    """Would this base network, trained again here and now, have the same bits? As far as that can be known before."""
    plan, device = lab.base_config(base), usable(own(lab.device))
    now = environment(device, processes()) | {"threads": threads(plan)}
    counts = ("torch", "device", "device_name", "world", *(("threads",) if device == "cpu" else ()))
    same = all(facts["environment"].get(key) == now[key] for key in counts)
    changed = {name for name, _, _ in differences(facts["config"], plan.to_json() | {"data": called(plan.data)})}
    return same and changed <= {*LOCAL}


def done_without(lab: Lab, settings: Sequence[Setting]) -> list[str]:
    """Finished runs that were computed otherwise than is asked for now: they are not done again."""
    there = {setting: lab.look(setting) for setting in settings}
    others: dict[str, int] = {}
    if (precision := lab.options.get("precision", "auto")) != "auto":
        free = [found for setting, found in there.items() if "precision" not in dict(setting.other)]
        others[f"--precision {precision}"] = sum(len(found.runs) for found in free if found.precisions - {precision})
    if lab.options.get("deterministic"):
        runs = [run for found in there.values() for run in found.runs]
        others["--deterministic"] = sum(not run["config"].get("deterministic") for run in runs)
    return [
        f"{number} of the runs that are there were done without {what}; give another --out for it"
        for what, number in others.items()
        if number
    ]


def have_images(lab: Lab, bases: Sequence[Base]) -> None:
    """Images that are not there and cannot be downloaded, or that will not do, are missed before anything is promised.
    Under torchrun, where one process downloads for all, what can be downloaded is missed when a run begins."""
    configs = {each.data: each for each in map(lab.base_config, bases) if each.data != "digits"}.values()
    for config in configs:
        if config.data not in CIFARS and not Path(config.data).is_dir():
            raise GrowpruneError(f"--images: no folder {config.data}; give ImageNet's, which holds train/ and val/")
    for config in configs:
        if launched() and config.data in CIFARS:
            continue
        found = data.load(config.data, lab.options.get("data_dir"), scaled=scaling(config.normalize))
        data.several_classes(config.data, found)
        if (there := available(config)) < config.batch:
            raise GrowpruneError(
                f"--images: {there} training images in {config.data}, less than a batch ({config.batch})"
            )


def same_images(lab: Lab, bases: Sequence[Base]) -> None:
    """A folder is known by its name: of another one of that name, results must not be taken for this one's. It may lie
    elsewhere; a base network that does not know the names and sizes of its images is compared by their number."""
    abouts = {base: lab.shelf.about(base) for base in bases}
    found = lab.told(lambda: {base: read_json(about) for base, about in abouts.items() if about.exists()})
    for base, facts in found.items():
        config = lab.base_config(base)
        if not Path(config.data).is_dir():
            continue
        before, now = facts["images"]["train"], available(config)
        if not about_as_many(before, now):
            raise GrowpruneError(
                f"{config.data}: {now:,} training images, but {lab.out} holds runs of {base.name} on {before:,}: "
                "give another --out"
            )
        known = facts.get("fingerprint")
        if known and (these := marked(config)) and known != these:
            raise GrowpruneError(
                f"{config.data}: by names and sizes not the images that {lab.out} holds runs of {base.name} on: "
                "put those back, or give another --out"
            )


def seen_by_all(lab: Lab, there: Mapping[Base, Ground], untrained: Sequence[Base]) -> None:
    """Each process reads the base networks in its own --out: all refuse if one does not see them there, or would not
    see those that are still to be trained."""
    unseen = anyone(lab.world, not all(ground.file.exists() for ground in there.values()))
    if unseen or (untrained and not lab.shared()):
        raise GrowpruneError(
            f"--out: {lab.out} is not the same folder for all processes, and each reads the base networks in it: give "
            "one that all machines see"
        )


def marked(config: Config) -> str | None:
    """What tells a folder of images from others; None has a set that goes by its name."""
    return fingerprint(Path(config.data)) if config.data not in data.NAMES else None


def train(lab: Lab, bases: Sequence[Base]) -> Failures:
    """Base networks, each once for all runs."""
    folders = {lab.shelf.training(base): base for base in bases}
    plans = list(zip(lab.told(lambda: [*map(lab.base_config, bases)]), folders, strict=True))
    at_once = min(lab.at_once, len(plans))

    def shelve(folder: Path) -> None:
        base = folders[folder]
        lab.shelf.keep_base(base, at_once, marked(lab.base_config(base)))

    return perform(lab, plans, shelve, more=True)


def prune(lab: Lab, wanted: Wanted, there: Mapping[Base, Ground], more: bool = False) -> Failures:
    folders = {lab.shelf.folder(setting, seed): (setting, seed) for setting, seed in wanted}
    plans = [
        (lab.config(setting, seed, began(folder, there[setting.base].file)), folder)
        for folder, (setting, seed) in folders.items()
    ]

    def shelve(folder: Path) -> None:
        setting, seed = folders[folder]
        if lost := lab.shelf.keep(setting, seed, there[setting.base], min(lab.at_once, len(plans))):
            lab.say(lost)

    return perform(lab, plans, shelve, more)


def began(folder: Path, network: Path) -> Path:
    """Where the base network lay when the run in this folder began, if its name, which holds its hash, is the same:
    the shelf may have been moved since."""
    try:
        there = Path(read_config(folder).get("weights") or "") if (folder / CONFIG).exists() else network
    except GrowpruneError:  # the run itself will say so
        there = network
    return there if there.name == network.name and there.is_absolute() else network.resolve()


BUSY = "another process is at work on it; give the same command when it is done"


def perform(
    lab: Lab, plans: Sequence[tuple[Config, Path]], finished: Callable[[Path], None], more: bool = False
) -> Failures:
    """Runs, one after another or several at a time; `finished` hears of each. One that fails keeps no other from being
    done, but for torchrun's, which end with it; what another process is doing, or takes up meanwhile, is left to it."""
    if launched():
        for config, folder in plans:
            run(config, folder, label=folder.name, finished=finished, more=True, last=lab.last)
        return []
    taken = [folder.name for _, folder in plans if in_use(folder)]
    failures: Failures = []
    try:
        free = [(config, folder) for config, folder in plans if folder.name not in taken]
        side_by_side(free, lab.at_once, finished=finished, more=more, last=lab.last)
    except SomeFailedError as error:
        held = {folder.name: busy(folder) for _, folder in plans}
        failures += [(name, BUSY if why.startswith(held[name]) else why) for name, why in error.failures]
    return [*failures, *((name, BUSY) for name in taken)]


# -- how long --------------------------------------------------------------------------------------------------------

GUESS = {  # two CPU cores; one H200 with four runs of the small ones at once
    "cpu": {"resnet56": 6e-3, "vgg19": 8e-3, "resnet34": 0.2, "resnet50": 0.25},
    "cuda": {"resnet56": 12e-6, "vgg19": 8e-6, "resnet34": 1.7e-4, "resnet50": 2.3e-4},
}
"""Seconds an image takes in training where nothing was measured yet. A GPU's with large images are those of
results/imagenette-first, whose runs shared one by two, halved."""
SMALL = 3e-4
"""The same at smoke scale."""
BESIDES = 1.0
"""Seconds a run takes besides what it counts itself: its report, its files."""
LARGE = 30.0
"""The same of large images on a GPU: the folder is looked through, ways of computing are tried and compiled."""
DECODED = 135
"""JPEGs of ImageNet's size that a core brings in a second (results/bench/h200-loader.json)."""
KEPT = 3 * 256**2
"""Bytes of a large image that is kept on the device."""


def forecast(lab: Lab, bases: Sequence[Base], wanted: Wanted) -> str:
    """How many runs, and about how long: by what was done on such a device, less what runs have done already."""
    there = {base: available(lab.base_config(base)) for base in {*bases, *(setting.base for setting, _ in wanted)}}
    paces = {base: pace(lab, base, images) for base, images in there.items()}
    seconds = sum(paces[base][0] * left(lab.base_config(base), lab.shelf.training(base), there[base]) for base in bases)
    for setting, seed in wanted:
        plan, folder = lab.config(setting, seed, Path()), lab.shelf.folder(setting, seed)
        seconds += paces[setting.base][0] * left(plan, folder, there[setting.base])
    fetched = sum(base.weights is not None and lab.scale != "smoke" for base in bases)
    networks = "".join(
        f"{count} base network{'s' * (count > 1)} to {what} and "
        for what, count in (("fetch", fetched), ("train", len(bases) - fetched))
        if count
    )
    seconds /= processes()
    seconds += sum(besides(lab, base) for base in (*bases, *(setting.base for setting, _ in wanted)))
    runs = f"{len(wanted)} run{'s' * (len(wanted) > 1)} to do"
    if len(wanted) > 1:
        runs += f", {min(lab.at_once, len(wanted))} at once" if lab.at_once > 1 else ", one after another"
    known = all(measured for _, measured in paces.values()) or usable(lab.device) == "cpu"
    return (
        f"{networks}{runs}, about {duration(seconds)} on this device{'' if known else ', if it is as fast as an H200'}"
    )


def left(plan: Config, folder: Path, images: int) -> float:
    """Images that a run has still to be shown, if it has begun in this folder, by its newest checkpoint's name."""
    if (folder / RESULT).exists():
        return 0.0
    stages = [(plan.epochs * images / plan.batch, plan.batch)]
    if isinstance(plan, Prune):
        stages.insert(0, (schedule(plan).total_steps, plan.prune_batch))
    done, shown = saved(folder), 0.0
    for steps, batch in stages:
        shown += max(0.0, steps - done) * batch
        done = max(0, done - int(steps))
    return shown


def besides(lab: Lab, base: Base) -> float:
    large = lab.scale != "smoke" and base.recipe is IMAGENET and usable(lab.device).startswith("cuda")
    return LARGE if large else BESIDES


def available(config: Config) -> int:
    """Images to train on."""
    train = Path(config.data) / "train"
    if names := subfolders(train):
        return sum(1 for name in names for _ in images_below(train / name))
    return {"digits": 1200, "imagenet": IMAGES}.get(Path(config.data).name, 50_000)


def pace(lab: Lab, base: Base, images: int) -> tuple[float, bool]:
    """Seconds an image, of so many: as runs of this network took here, else its own training, else a guess; and whether
    it was measured."""
    device = usable(lab.device).partition(":")[0]
    here = {key: environment(usable(lab.device), 1)[key] for key in ("device", "device_name")[: 1 + (device != "cpu")]}
    runs = (path for kind in KINDS for path in lab.out.glob(f"{base.named(lab.scale)}-{kind}-*.json"))
    for measured in (took(runs, run_facts, here), took([lab.shelf.about(base)], base_facts, here)):
        if measured:
            return statistics.median(measured), True
    if lab.scale == "smoke":
        return SMALL, False
    guess = GUESS[device][base.model.rpartition(":")[2]]
    if device == "cpu" or not Path(base.data).is_dir() or images * KEPT <= COMFORT * room(usable(lab.device)):
        return guess, False
    return max(guess, 1 / DECODED / default_workers()), False  # the step waits for images


def took(files: Iterable[Path], facts: Callable[[Path], dict[str, Any]], here: Mapping[str, Any]) -> list[float]:
    """Seconds an image on such a device, of each run that is one: of several that advanced at once each one's share."""
    found: list[float] = []
    for path in files:
        with suppress(GrowpruneError):
            past = facts(path)
            if here.items() <= past["environment"].items() and (shown := trained_on(past)):
                found.append(past["seconds"] / shown * past["environment"].get("world", 1) / past.get("parallel", 1))
    return found


def trained_on(result: Mapping[str, Any]) -> int:
    """How many images a run was shown."""
    config = result["config"]
    tuned = int(config["epochs"] * (result["images"]["train"] // config["batch"]))
    pushed = int(result["steps"] - tuned) * int(config["prune_batch"]) if "prune_batch" in config else 0
    return tuned * int(config["batch"]) + pushed
