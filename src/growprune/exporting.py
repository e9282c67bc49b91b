"""`growprune export`: a network as a file for use elsewhere, and the proof that the file computes the same.

weights ─► plain ─┬─► written ─► read again ─► run ─┬─► alike: the file is put in its place, whole
                  └─► run ──────────────────────────┘   not: refused, and nothing of it is on the disk
"""

from __future__ import annotations

import json
import os
import statistics
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from timeit import timeit
from typing import Any, Literal

import torch
from torch import Tensor, nn

from growprune import __version__, formats, models
from growprune.asking import Export, read_shape, suffix
from growprune.errors import GrowpruneError, line
from growprune.formats import FORMATS, Format, Runs, silently
from growprune.holding import MASK, held
from growprune.measurement import measure, sparsity
from growprune.planning import advice
from growprune.proof import TOLERANCE, apart
from growprune.run import CONFIG, RESULT, as_measured, as_tested, read_json
from growprune.running import call, leaves, quietly, switched
from growprune.storage import write_whole
from growprune.weights import restore

DEFAULT = "model.onnx"
SIZES = (1, 3)
"""Batches that a file is run on if their size is free. It is traced with neither, and 1 is a tracer's special case."""
TOLERATED = TOLERANCE[torch.float]
"""How far outputs may differ, relative to the largest: float32 has seven digits, of which a deep network's sums, taken
in another order and with batch norm folded into convolutions, lose some. A wrong file differs in the first."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be written, and where."""

    model: str
    weights: str
    classes: int | None
    shape: tuple[int, ...]
    normalization: dict[str, list[float]] | None
    batch: int | None
    raw: bool
    file: Path

    @property
    def form(self) -> Format:
        return FORMATS[self.file.suffix]

    @property
    def elsewise(self) -> str:
        return f"try a {'.pt2' if self.file.suffix == '.onnx' else '.onnx'} file"

    def inputs(self, batch: int, raw: bool | None = None, draw: Literal[0, 1] = 0) -> Tensor:
        """Drawn at random, the same ones each time."""
        generator = torch.Generator().manual_seed(2 * batch + draw)
        if self.raw if raw is None else raw:
            return torch.randint(0, 256, (batch, *self.shape), generator=generator, dtype=torch.uint8)
        return torch.randn(batch, *self.shape, generator=generator)


def export(asked: Export, run: Path | None = None) -> dict[str, Any]:
    """Write the file and say what is in it; or refuse, and leave what there was."""
    order = ordered(asked, run)
    formats.needed(order.file.suffix)
    models.known(order.model)
    net = plain(restore(order.model, order.classes, order.weights))
    with silently():
        facts, costs = described(net, order)
        if order.normalization and order.raw:
            net = Raw(net, order.normalization, len(order.shape))
        blob, more = written(net, order, json.dumps(facts))
        found = checked(net, order, blob)
    write_whole(order.file, blob)
    place = {"file": str(order.file), "format": order.form.name, "bytes": len(blob), **more}
    return {**place, "weights": order.weights, **facts, **costs, **found}


# -- what is asked for -----------------------------------------------------------------------------------------------


def ordered(asked: Export, run: Path | None) -> Order:
    """Model, weights, shape of an input and normalisation: as they are given, or as a run's folder has them."""
    if run is not None and asked.weights is not None:
        raise GrowpruneError(f"export: give the folder of a run ({run}) or --weights, not both")
    if run is not None:
        as_tested(run)  # refuses what is no run
    weights = str(run) if run is not None else asked.weights
    given = {name: v for name in ("model", "input", "num_classes") if (v := getattr(asked, name)) is not None}
    known: dict[str, Any] = {**as_measured(weights), **given}
    for name, value in (("weights", weights), ("model", known.get("model")), ("input", known.get("input"))):
        if not value:
            ways = "the folder of a run, or --model, --weights and --input"
            raise GrowpruneError(f"export: give {ways} (no --{name} here)")
    assert weights is not None
    result = Path(weights) / RESULT
    scale = read_json(result).get("normalization") if result.is_file() else None
    if asked.raw and not scale:
        raise GrowpruneError("--raw: how images are normalised is known of a run's folder only; leave it out")
    return Order(
        model=known["model"], weights=weights, classes=known.get("num_classes"), shape=read_shape(known["input"]),
        normalization=scale, batch=asked.batch, raw=asked.raw, file=destination(asked, weights),
    )  # fmt: skip


def destination(asked: Export, weights: str) -> Path:
    """Where the file goes, if it can.

    A run's own lies beside its network and can always be made again from it: it is replaced. What else has a name that
    --out gives may be anything, so that it takes a word more.
    """
    if asked.out is None:
        if not (Path(weights) / CONFIG).is_file():
            raise GrowpruneError("export: name the file to write, as --out small.onnx")
        file = Path(weights) / DEFAULT
    else:
        file = Path(asked.out).expanduser()
    suffix(str(file))
    if not file.parent.is_dir():
        raise GrowpruneError(f"--out: no folder {file.parent}; make it, or name another file")
    if not os.access(file.parent, os.W_OK):
        raise GrowpruneError(f"--out: {file.parent} may not be written to; name a file elsewhere")
    if file.is_dir():
        raise GrowpruneError(f"--out: {file} is a folder; name a file")
    own = (Path(weights) / CONFIG).is_file() and file.resolve() == (Path(weights) / DEFAULT).resolve()
    if os.path.lexists(file) and not own and not asked.replace:
        raise GrowpruneError(f"--out: {file} is there already; name another file, or add --replace")
    return file


# -- the network -----------------------------------------------------------------------------------------------------


def plain(model: nn.Module) -> nn.Module:
    """The network as it is used elsewhere: in evaluation mode and float32, without what holds single weights at zero
    while others train; they stay zero."""
    for module in switched(model, training=False).float().requires_grad_(False).modules():
        for name, _ in list(held(module)):
            delattr(module, f"{name}{MASK}")
    return model


class Raw(nn.Module):
    """A network that takes pixels as decoders give them, and normalises them itself: (x / 255 - mean) / std."""

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, normalization: dict[str, list[float]], dims: int) -> None:
        super().__init__()
        of_channels = [1, -1] + [1] * (dims - 1)
        mean, std = (torch.tensor(normalization[key], dtype=torch.double).view(of_channels) for key in ("mean", "std"))
        self.register_buffer("scale", (1 / (255 * std)).float())
        self.register_buffer("shift", (-mean / std).float())
        self.network = network
        switched(self, training=False)

    def forward(self, pixels: Tensor) -> Any:
        return self.network(torch.addcmul(self.shift, pixels.float(), self.scale))


EXPECTS = {
    "raw": "pixels as they are, 0 to 255",
    "normalised": "pixels / 255, less mean, by std",
    "unknown": "what the network was trained on",
}


def described(net: nn.Module, order: Order) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the file says of itself, and what the network costs; refused if it does not take such inputs."""
    example = order.inputs(order.batch or 1, raw=False)
    try:
        found, outputs = measure(net, example), own(net, example)
    except Exception as error:
        shape = "x".join(map(str, order.shape))
        why = str(error) if isinstance(error, GrowpruneError) else reason(error)
        raise GrowpruneError(f"--model {order.model} --input {shape}: {why}; {advice(net, order.shape)}") from error
    if any(bool(t.isnan().any()) for t in outputs):
        raise GrowpruneError(f"{order.model} puts out NaN for random numbers, so that no file of it could be proved")
    facts = {
        "growprune": __version__,
        "model": order.model,
        "input": list(order.shape),
        "type": "uint8" if order.raw else "float32",
        "batch": order.batch,
        "outputs": [{"shape": list(t.shape[1:]), "type": str(t.dtype).removeprefix("torch.")} for t in outputs],
        "classes": outputs[0].shape[1] if len(outputs) == 1 and outputs[0].dim() == 2 else order.classes,
        "normalization": order.normalization,
        "raw": order.raw,
        "expects": EXPECTS["raw" if order.raw else "normalised" if order.normalization else "unknown"],
    }
    return facts, {"params": found.params, "macs": found.macs // len(example), "zeros": sparsity(net)}


def own(net: nn.Module, x: Tensor) -> list[Tensor]:
    """The network's own outputs."""
    with quietly(net):
        return list(leaves(call(net, x)))


# -- the file --------------------------------------------------------------------------------------------------------


def written(net: nn.Module, order: Order, facts: str) -> tuple[bytes, dict[str, Any]]:
    """The file's bytes. Where they cannot be had for any number of inputs, it is tried whether they can for one."""
    form, weights = order.form, sum(t.numel() * t.element_size() for t in net.state_dict().values())
    if form.limit is not None and weights >= form.limit:
        size = f"{weights / 1e9:.1f} GB of weights"
        raise GrowpruneError(f"--out: no {form.name} file can hold {size}, only 2 GB; name a .pt2 file")

    def made(batch: int | None) -> tuple[bytes, dict[str, Any]]:
        return form.write(formats.traced(net, order.inputs(batch or 2), free=batch is None), facts)

    try:
        return made(order.batch)
    except Exception as error:
        why, way = reason(error), f"; {order.elsewise}"
        with suppress(Exception):
            made(1)
            way = ", but for one input at a time: give --batch 1"
        raise GrowpruneError(f"{order.model} cannot be exported to {order.file.suffix}{way} ({why})") from error


def reason(error: BaseException) -> str:
    """What an exporter's error comes from, in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {line(error)}"


def checked(net: nn.Module, order: Order, blob: bytes) -> dict[str, Any]:
    """The file's bytes, read again and run: how far its outputs are from the network's own, and how fast it is."""
    form, sizes = order.form, [order.batch] if order.batch else list(SIZES)
    examples = [order.inputs(size) for size in sizes]
    try:
        runs = form.read(blob)
        if runs is None:
            return {"proof": None, "unproved": f"written, not run: pip install {form.runner}", "latency": None}
        off = [apart(runs(x), own(net, x)) for x in examples]
    except Exception as error:
        raise GrowpruneError(
            f"{order.file}: not written: it does not run ({reason(error)}); {order.elsewise}"
        ) from error
    for each in off:
        if each <= TOLERATED:  # NaN is not
            continue
        raise GrowpruneError(
            f"{order.file}: not written: its outputs are {each:.1e} of the largest away from the network's own, "
            f"more than rounding ({TOLERATED:.0e}); {order.elsewise}{'' if order.batch else ', or give --batch 1'}"
        )
    told: dict[str, Any] = {
        "proof": {"by": form.runner, "batches": sizes, "difference": max(off), "tolerance": TOLERATED},
        "unproved": None,
    }
    if apart(own(net, order.inputs(sizes[0], draw=1)), own(net, examples[0])) <= TOLERATED:
        told = {"proof": None, "unproved": "run, but the network puts out the same whatever goes in: no proof"}
    return {**told, "latency": times(net, runs, examples[0], form.runner) if form.runner != "torch" else None}


SECONDS, MOST, LEAST = 1.0, 20, 3
"""That may go into measuring, and how often each is then run."""


def times(net: nn.Module, runs: Runs, x: Tensor, runner: str) -> dict[str, Any]:
    """Seconds of a forward pass here and elsewhere: by turns in one go, on one thread each, medians."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with torch.no_grad():
            first = sum(timeit(f, number=1) for f in (lambda: net(x), lambda: runs(x)))
            rounds = max(LEAST, min(MOST, int(SECONDS / first)))
            pairs = [(timeit(lambda: net(x), number=1), timeit(lambda: runs(x), number=1)) for _ in range(rounds)]
    finally:
        torch.set_num_threads(threads)
    here, there = (statistics.median(each) for each in zip(*pairs, strict=True))
    return {"torch": here, runner: there, "ratio": here / there, "batch": len(x), "rounds": rounds}
