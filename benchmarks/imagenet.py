"""What a step of table 3's rows takes on one GPU: of ResNet34 and ResNet50 while filters are pushed (batch 64), and of
every smaller network while it is fine-tuned (batch 256).

    python benchmarks/imagenet.py --images FOLDER [--steps 100] [--compile on] [--out results/bench/h200-imagenet.json]
    python benchmarks/imagenet.py --images FOLDER --only resnet50-1.49,"tune resnet34-1.32"
    python benchmarks/imagenet.py --images FOLDER --multiple 8 --out results/bench/h200-imagenet-8.json

The steps are the trainer's own, penalty, crops and flips included, with the folder's images kept on the device, read
once for all rows; what the weights are does not matter to them. Two steps are also taken at an eighth of the batch, the
share of each of eight GPUs. With `--multiple` layers keep multiples of so many filters, for the paper's widths are odd,
and GPUs are slow at these. `--out` is written after every row, and the same command goes on with the rows that it
lacks. In the end stands the bar that the project is held to. `docs/tables.py` makes the cost of ImageNet of the file,
by the paper's schedule.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from growprune import models, storage
from growprune.bench import Bench, said, timed
from growprune.config import Prune
from growprune.errors import GrowpruneError, nearest
from growprune.feeds import Images
from growprune.jobs import surroundings, usable
from growprune.measurement import measure
from growprune.outcome import environment
from growprune.paper import imagenet
from growprune.paper.cost import EIGHTHS, FIRST, GPUS, STEPS, Kind, label
from growprune.paper.reproduce import available
from growprune.paper.table3 import LEVELS, settings
from growprune.run import read_json
from growprune.train import Job

Row = tuple[Kind, str, int]
"""Pushing or fine-tuning, of which row of the table, at which share of the batch."""
ROWS: dict[str, Row] = {label(*row): row for row in [*((*s, 1) for s in STEPS), *((*s, GPUS) for s in EIGHTHS)]}
HELD, MOST = label("push", FIRST["resnet50"]), 12.0
"""The bar: milliseconds at most that this step takes on one H200."""


def plan(asked: Bench, row: Row, weights: Path, multiple: int) -> Prune:
    """The run that the step is of, with a batch of 1/share."""
    kind, name, share = row
    level = next(each for each in LEVELS if f"{each.network}-{each.speedup}" == name)
    whole = settings(level, asked.data)["GReg-1" if kind == "push" else "one-shot"].config("paper", 0, weights)
    return replace(
        whole, device=asked.device, keep="device", compile=asked.compile,
        batch=whole.batch // share, prune_batch=whole.prune_batch // share, multiple=multiple,
    )  # fmt: skip


def measured(asked: Bench, config: Prune, kind: Kind) -> tuple[dict[str, Any], Images]:
    """One step, and the images it was fed: as long as somebody has them, the next row need not read them."""
    with surroundings(config):
        job = Job(config, None, asked.device, progress=said(asked))
        step = job.enter(job.stages[0], None)
        if kind == "tune":
            job.remove(job.stages[0])
            job.at = 1
            step = job.enter(job.stages[1], None)
        ms = statistics.median(timed([step], asked) for _ in range(3))
    batch = config.batch if kind == "tune" else config.prune_batch
    macs = measure(job.net, job.images.example()).macs
    return {"batch": batch, "macs": macs, "ms": ms, "choice": str(step.choice)}, job.images


def chosen(only: str | None) -> list[str]:
    """The rows to do: steps by name, or all of a row of the table."""
    if only is None:
        return list(ROWS)
    for name in (words := only.split(",")):
        known = [*ROWS, *dict.fromkeys(row for _, row, _ in ROWS.values())]
        if name not in known:
            raise GrowpruneError(f"--only: no row '{name}'{nearest(name, known)}; there are {', '.join(known)}")
    return [name for name, (_, row, _) in ROWS.items() if {name, row} & {*words}]


def begun(out: Path | None, here: Mapping[str, Any], repeats: int, multiple: int) -> dict[str, dict[str, Any]]:
    """The rows that the file has, if they were measured as these will be."""
    if out is None or not out.exists():
        return {}
    found = read_json(out)
    for what, there, now in (
        *((key, found.get("environment", {}).get(key), here[key]) for key in ("device", "device_name")),
        ("repeats", found.get("repeats"), repeats),
        ("multiple", found.get("multiple", 1), multiple),
    ):
        if there != now:
            raise GrowpruneError(f"{out}: measured otherwise ({what} {there}, not {now}); give another --out")
    rows: dict[str, dict[str, Any]] = found.get("steps", {})
    return rows


def enough(asked: Bench, names: Sequence[str]) -> None:
    """Images for the largest batch, before anything is measured."""
    if not Path(asked.data).is_dir():
        raise GrowpruneError(f"--images: no folder {asked.data}")
    plans = [plan(asked, ROWS[name], Path(), 1) for name in names]
    batch = max((max(each.batch, each.prune_batch) for each in plans), default=0)
    if plans and (there := available(plans[0])) < batch:
        raise GrowpruneError(f"--images: {there} training images in {asked.data}, less than a batch ({batch})")


def bar(rows: Mapping[str, Mapping[str, Any]], device: str) -> str:
    """The bar, and how this device stands to it."""
    if HELD not in rows:
        return f"{HELD}: not measured"
    ms = rows[HELD]["ms"]
    verdict = ("met" if ms <= MOST else "missed") if "H200" in device else "this is none"
    return f"{HELD}: {ms:.2f} ms a step on {device}; {MOST:.0f} at most on one H200: {verdict}"


def take(asked: Bench, names: Sequence[str], multiple: int, out: Path | None) -> None:
    here = environment(asked.device, 1)
    rows = begun(out, here, asked.steps, multiple)
    names = [name for name in names if name not in rows]
    enough(asked, names)
    images: Images | None = None
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            kind, row, _ = ROWS[name]
            network = row.partition("-")[0]
            weights = Path(scratch) / f"{network}.safetensors"
            if not weights.exists():
                storage.save(models.fresh(f"torchvision:{network}", imagenet.classes(asked.data)), weights)
            row_found, images = measured(asked, plan(asked, ROWS[name], weights, multiple), kind)
            rows[name] = row_found | {"source": here["source"]}  # others may have been measured by another
            print(f"{name}: {rows[name]}", flush=True)
            if out is not None:
                result = {"steps": rows, "environment": here, "repeats": asked.steps, "multiple": multiple}
                storage.write_whole(out, (json.dumps(result, indent=1) + "\n").encode())
    del images
    print(bar(rows, here["device_name"]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True, help="a folder in ImageNet's layout")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", default="on", choices=("auto", "on", "off"))
    parser.add_argument("--only", help="rows, separated by commas")
    parser.add_argument("--multiple", type=int, default=1, help="of filters that a layer keeps")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    try:
        device = usable(args.device)
        asked = Bench([], args.images, "data", device, 0, 1, args.steps, args.compile, say=print)
        take(asked, chosen(args.only), args.multiple, args.out)
    except GrowpruneError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
