"""What the commands besides `train` and `prune` are asked: options, each with its default, its help and its check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from growprune.config import LISTS, MODELS, MULTIPLE, PRECISIONS, SCALES, SETS, STATE, THREADS, amounts, scaling
from growprune.errors import GrowpruneError
from growprune.options import Options, option


@dataclass(frozen=True, kw_only=True)
class Demo(Options):
    """`growprune demo`."""

    out: str = option("demo", "Folder for the results; a new one, or that of the same demo.", metavar="FOLDER")
    seed: int = option(0, "Decides the first weights and the order of the images.", min=0, max=2**63 - 1)
    device: str = option("auto", "auto, cpu or cuda.", metavar="NAME")
    ratio: float = option(0.9, "The share of each layer's filters that go.", above=0, below=1)
    scope: Literal["path", "filter"] = option("path", "What the penalty touches (the paper's is filter)")
    longer: bool = option(False, "Also prune in one shot with as many steps as GReg-1 has in all.")


@dataclass(frozen=True, kw_only=True)
class Eval(Options):
    """`growprune eval`; what is not given is as in the run."""

    model: str | None = option(None, MODELS, metavar="NAME")
    weights: str | None = option(None, f"{STATE[0].upper()}{STATE[1:]}", metavar="PATH")
    data: str | None = option(None, SETS, metavar="NAME")
    data_dir: str | None = option(
        None, "Where cifar10 and cifar100 lie, or are downloaded to. [data]", metavar="FOLDER"
    )
    normalize: str | None = option(None, SCALES, metavar="SCALE", check=lambda text: scaling(text))
    resolution: int | None = option(None, "Side of the square that larger images are cropped to. [224]", min=8)
    device: str | None = option(None, "auto, cpu or cuda. [auto]", metavar="NAME")
    threads: int | None = option(None, f"{THREADS} [0]", min=0, max=1024)
    workers: int = option(-1, "Processes that read larger images; -1: one a core.", min=-1, max=1024)


@dataclass(frozen=True, kw_only=True)
class Measure(Options):
    """`growprune measure`; what is not given is as in the run whose folder --weights names."""

    model: str | None = option(None, f"{MODELS} [resnet56]", metavar="NAME")
    num_classes: int | None = option(None, "Classes it tells apart; by default the model's own number.", min=1)
    input: str | None = option(
        None, "Shape of one input. [3x32x32]", metavar="SHAPE", check=lambda text: read_shape(text)
    )
    weights: str | None = option(None, f"Of a network that was trained, or pruned: {STATE}", metavar="PATH")
    ratios: str | None = option(None, f"0.5, {LISTS}", metavar="LIST")
    speedup: float | None = option(None, "Instead of ratios: how many times fewer MACs.", above=1)
    global_ratio: float | None = option(
        None, "Instead of ratios: one over all layers together, by L1 norms; needs --weights.", above=0, below=1
    )
    global_stem: bool = option(False, "With --global-ratio: the stem is one of the layers.")
    coupled: bool = option(False, "Also prune filters tied by residual additions, together.")
    ignore: str = option("", "Layers never touched, by name, with commas between.", metavar="NAMES", empty=True)
    multiple: int = option(1, MULTIPLE, min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        amounts(self)


@dataclass(frozen=True, kw_only=True)
class Export(Options):
    """`growprune export`; what is not given is as in the run."""

    out: str | None = option(
        None, "File to write, .onnx or .pt2. [RUN/model.onnx]", metavar="FILE", check=lambda text: suffix(text)
    )
    model: str | None = option(None, MODELS, metavar="NAME")
    weights: str | None = option(None, f"{STATE[0].upper()}{STATE[1:]}", metavar="PATH")
    num_classes: int | None = option(None, "Classes it tells apart; by default the model's own number.", min=1)
    input: str | None = option(
        None, "Shape of one input, as 3x32x32.", metavar="SHAPE", check=lambda text: read_shape(text)
    )
    batch: int | None = option(None, "Inputs a call; by default any number.", min=1)
    raw: bool = option(False, "It takes pixels as they are (uint8, 0 to 255), and normalises them itself.")
    replace: bool = option(False, "A file that is there already may be replaced (RUN/model.onnx always is).")


SUFFIXES = (".onnx", ".pt2")


def suffix(text: str) -> str:
    """Of a file to export to.

    >>> suffix("small.onnx")
    '.onnx'
    """
    found = Path(text).suffix
    if found not in SUFFIXES:
        raise GrowpruneError(f"--out: '{text}' must end in .onnx (ONNX) or .pt2 (torch.export)")
    return found


@dataclass(frozen=True, kw_only=True)
class Bench(Options):
    """`growprune bench`."""

    model: str | None = option(
        None, "Networks, with commas between. [resnet56,vgg19; with --images torchvision:resnet50]", metavar="NAMES"
    )
    data: str = option("cifar10", SETS, metavar="NAME")
    data_dir: str = option("data", "Where cifar10 and cifar100 lie, or are downloaded to.", metavar="FOLDER")
    device: str = option("auto", "auto, cpu or cuda.", metavar="NAME")
    batch: int | None = option(None, "Images a step. [256; with --images 64]", min=1)
    parallel: int = option(4, "Runs at once, on a GPU.", min=1)
    steps: int = option(0, "Steps a measurement; 0: as many as are needed here.", min=0)
    compile: Literal["auto", "on", "off"] = option("auto", "torch.compile (auto is on with a GPU, else off)")
    images: str | None = option(
        None, "Instead: how far this folder of large images keeps a step fed.", metavar="FOLDER"
    )
    workers: int = option(-1, "Processes that read them; -1: one a core.", min=-1, max=1024)


@dataclass(frozen=True, kw_only=True)
class Reproduce(Options):
    """`growprune reproduce`."""

    scale: Literal["paper", "short", "smoke"] = option("short", "Ku as in the paper, Ku = 1, or minutes on a CPU")
    seeds: int | None = option(None, "Runs of each setting, at most 10. [1; random: 5, scopes: 3]", min=1, max=10)
    only: str | None = option(
        None, "Only these rows of one table, with commas between; an unknown one lists them.", metavar="ROWS"
    )
    parallel: int = option(4, "Runs at once, on a GPU.", min=1, max=64)
    data_dir: str = option("data", "Where cifar10 and cifar100 lie, or are downloaded to.", metavar="FOLDER")
    images: str | None = option(
        None, "ImageNet, for table3 and table4, or a set in its layout. [DATA_DIR/imagenet]", metavar="FOLDER"
    )
    out: str = option("runs/paper", "Folder of all that was run; what is there is not run again.", metavar="FOLDER")
    device: str = option("auto", "auto, cpu or cuda.", metavar="NAME")
    workers: int = option(-1, "Processes that read larger images; -1: one a core.", min=-1, max=1024)
    precision: Literal["auto", "bf16", "fp32", "ieee"] = option("auto", PRECISIONS)
    layout: Literal["auto", "channels_last", "contiguous"] = option("auto", "Of images and weights in memory")
    compile: Literal["auto", "on", "off"] = option("auto", "torch.compile (auto is where it pays for itself)")
    kernels: Literal["auto", "on", "off"] = option("auto", "Our convolutions for few or odd channels (CUDA)")
    deterministic: bool = option(False, "The same bits each time on a GPU too; slower.")
    run: bool = option(True, "Do what is missing; else only show what is there, and write nothing.")


def read_shape(text: str) -> tuple[int, ...]:
    """
    >>> read_shape("3x32x32")
    (3, 32, 32)
    """
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise GrowpruneError(f"--input: '{text}' is no shape; write it as 3x32x32 (channels, height, width)")
    return tuple(int(part) for part in parts)
