"""What `train` and `prune` are asked to do: every option with its default, its help and its check.

One place for all of it. The command line is made from these fields (`console`), a TOML file may hold any of them, and
a run's folder keeps the resolved ones as config.json, from which they come back the same. Nothing of torch is
imported: `growprune --help` comes through here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from growprune.errors import GrowpruneError, nearest
from growprune.options import Options, flag, known, option

NET, TRAIN, PRUNE, SPEED, RUN = "Network and images", "Training", "Pruning", "Speed", "The run"
MODELS = "resnet56, vgg19, torchvision:NAME, timm:NAME or package.module:function."
SETS = "cifar10, cifar100, digits, or a folder: CIFAR's files, .npz pair, class folders."
THREADS = "CPU threads; 0: OMP_NUM_THREADS, else all cores, beside a GPU one."
STATE = "a run's folder, a .safetensors file, a state dict, or torchvision's name, as ResNet50_Weights.IMAGENET1K_V1."
LISTS = "'[0, 0.5, 0.5, 0.5]' by stage, '[0:0, 1-15:0.7]' by layer, or '{layer1.0.conv1: 0.5}' by name."
MULTIPLE = "Filters that stay in a layer that loses some come in multiples of this."
SCALES = (
    "How images are scaled, as the network was trained: by their own mean and deviation, by imagenet's, none "
    "(pixels / 255), or by means/deviations of that, as 0.5/0.25 or 0.5,0.5,0.4/0.2,0.2,0.3."
)
PRECISIONS = "Of the training step (fp32 may round to TF32, ieee does not; auto is the faster of bf16 and fp32)"
CLASSES: dict[str, int] = {"digits": 10, "cifar10": 10, "cifar100": 100}
SHAPES = {"digits": (1, 8, 8), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32)}
"""Of the sets that have a name, as far as one must know before they are read."""


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    """What `train` and `prune` share."""

    command: ClassVar[str] = ""

    model: str = option("resnet56", MODELS, NET, metavar="NAME")
    data: str = option("cifar10", SETS, NET, metavar="NAME")
    data_dir: str = option("data", "Where cifar10 and cifar100 lie, or are downloaded to.", NET, metavar="FOLDER")
    seed: int = option(0, "Decides first weights, order of images, augmentation.", RUN, min=0, max=2**63 - 1)
    device: str = option("auto", "auto, cpu or cuda.", SPEED, metavar="NAME")
    epochs: int = option(100, "Passes over the training images.", TRAIN, min=0)
    batch: int = option(256, "Images a step, over all processes.", TRAIN, min=1)
    lr: str = option("0.1", "Learning rate.", TRAIN)
    warm_up: float = option(0.0, "Epochs over which the learning rate rises; half of all at most.", TRAIN, min=0)
    momentum: float = option(0.9, "SGD's momentum.", TRAIN, min=0, below=1)
    nesterov: bool = option(False, "Nesterov's momentum.", TRAIN)
    weight_decay: float = option(5e-4, "SGD's weight decay.", TRAIN, min=0)
    label_smoothing: float = option(0.0, "Share of the target spread over all classes.", TRAIN, min=0, below=1)
    augment: bool = option(True, "Random crops and flips while training.", TRAIN)
    normalize: str = option("own", SCALES, NET, metavar="SCALE", check=lambda text: scaling(text))
    resolution: int = option(224, "Side of the square that larger images are cropped to.", NET, min=8)
    workers: int = option(-1, "Processes that read larger images; -1: one a core.", SPEED, min=-1, max=1024)
    decode: Literal["auto", "cpu", "gpu"] = option(
        "auto", "What decodes larger JPEGs (auto: the GPU where it is much faster)", SPEED
    )
    keep: Literal["auto", "device", "files"] = option(
        "auto", "Where larger images stay (auto is a GPU that has room for them, else files)", SPEED
    )
    precision: Literal["auto", "bf16", "fp32", "ieee"] = option("auto", PRECISIONS, SPEED)
    layout: Literal["auto", "channels_last", "contiguous"] = option("auto", "Of images and weights in memory", SPEED)
    compile: Literal["auto", "on", "off"] = option("auto", "torch.compile (auto is where it pays for itself)", SPEED)
    kernels: Literal["auto", "on", "off"] = option("auto", "Our convolutions for few or odd channels (CUDA)", SPEED)
    deterministic: bool = option(False, "The same bits each time on a GPU too; slower, and it says how much.", SPEED)
    threads: int = option(0, THREADS, SPEED, min=0, max=1024)
    eval_every: int = option(1, "Epochs between tests.", RUN, min=1)
    save_every: float = option(60.0, "Seconds between checkpoints; 0: one a step.", RUN, min=0)
    tensorboard: bool = option(False, "Also write TensorBoard events into the run's folder.", RUN)

    HARMLESS: ClassVar[tuple[str, ...]] = ("data_dir", "workers", "save_every", "tensorboard")
    """Options that may differ when a run is resumed: they do not change what comes out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise GrowpruneError("--nesterov: needs a --momentum above 0")

    def to_json(self) -> dict[str, Any]:
        return {"command": self.command, **asdict(self)}


def rate(default: str, text: str) -> Any:
    return option(default, text, TRAIN, metavar="RATE", check=lambda lr: rates(lr, 1, 1), also=(int, float))


@dataclass(frozen=True, kw_only=True)
class Train(Config):
    """`growprune train`: a network from its first weights, or from `weights` on."""

    command: ClassVar[str] = "train"

    lr: str = rate("cosine:0.2", "Learning rate: 0.1, 0:0.1,100:0.01 (by epoch) or cosine:0.2.")
    warm_up: float = option(5.0, "Epochs over which the learning rate rises; half of all at most.", TRAIN, min=0)
    weights: str | None = option(None, f"Start from these instead of fresh ones: {STATE}", NET, metavar="PATH")


@dataclass(frozen=True, kw_only=True)
class Prune(Config):
    """`growprune prune`: push, remove, fine-tune. The defaults are the paper's on CIFAR."""

    command: ClassVar[str] = "prune"

    weights: str = option("", f"The trained network: {STATE} [train's]", NET, metavar="PATH", empty=True)
    epochs: int = option(120, "Passes over the training images while fine-tuning.", TRAIN, min=0)
    lr: str = rate("0:1e-2,60:1e-3,90:1e-4", "Learning rate of fine-tuning: 0.01, cosine:0.01, or by epoch as here:")
    schedule: Literal["greg1", "greg2", "oneshot"] = option("greg1", "How they go", PRUNE)
    criterion: Literal["l1", "l2", "taylor", "obd", "random"] = option("l1", "Which go", PRUNE)
    granularity: Literal["filter", "weight"] = option("filter", "What goes, whole filters or single weights", PRUNE)
    ratios: str | None = option(
        None, f"How much goes: 0.5 (the default), {LISTS}", PRUNE, metavar="LIST", also=(int, float, list, dict),
    )  # fmt: skip
    speedup: float | None = option(None, "Instead of ratios: how many times fewer MACs.", PRUNE, above=1)
    global_ratio: float | None = option(
        None, "Instead of ratios: one over all layers together (at most 95 % of any).", PRUNE, above=0, below=1
    )
    global_stem: bool = option(False, "With --global-ratio: the stem is one of the layers.", PRUNE)
    scope: Literal["filter", "path"] = option("filter", "What the penalty touches (the paper's is filter)", PRUNE)
    coupled: bool = option(False, "Also prune filters tied by residual additions, together.", PRUNE)
    ignore: str = option(
        "", "Layers never touched, by name, with commas between.", PRUNE, metavar="NAMES", empty=True, also=(list,)
    )
    multiple: int = option(1, MULTIPLE, PRUNE, min=1)
    prune_lr: float = option(1e-3, "Learning rate while the penalty grows.", PRUNE, above=0)
    prune_batch: int = option(256, "Images a step while the penalty grows.", PRUNE, min=1)
    prune_norm: Literal["batch", "fixed"] = option(
        "batch", "Batch norm's statistics while the penalty grows: of each batch, or fixed as they were", PRUNE
    )
    delta_lambda: float = option(1e-4, "Growth of λ (δλ).", PRUNE, above=0)
    delta_lambda_pick: float = option(1e-5, "Growth of λ while GReg-2 picks.", PRUNE, above=0)
    tau: float = option(1.0, "λ's ceiling (τ).", PRUNE, above=0)
    tau_pick: float = option(0.01, "λ at which GReg-2 picks (τ').", PRUNE, above=0)
    ku: int = option(10, "Steps between two growths of λ (Ku).", PRUNE, min=1)
    ks: int = option(5000, "Steps at the ceiling, to stabilise (Ks).", PRUNE, min=0)
    gamma: float | None = option(None, "GReg-2's −γ for kept weights; by default the weight decay.", PRUNE, min=0)
    stop_ratio: float | None = option(
        None, "End pushing when kept weights are so many times the pruned.", PRUNE, above=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not amounts(self):
            object.__setattr__(self, "ratios", "0.5")
        if not self.weights:
            object.__setattr__(self, "weights", str(folder("train", self)))


AMOUNTS = "ratios", "speedup", "global_ratio"
"""Ways to say how much goes, of which there can be one."""


def amounts(asked: Any) -> list[str]:
    """Which of these are given; refused if they contradict each other."""
    given = [name for name in AMOUNTS if getattr(asked, name) is not None]
    if len(given) > 1:
        ways = " and ".join(map(flag, given))
        raise GrowpruneError(f"give one of --ratios, --speedup and --global-ratio, not {ways}")
    if asked.global_stem and asked.global_ratio is None:
        raise GrowpruneError("--global-stem: only with --global-ratio; a list of ratios has one for the stem")
    return given


KINDS: dict[str, type[Config]] = {"train": Train, "prune": Prune}


def folder(command: str, config: Config) -> Path:
    """Where a run goes if nobody says where.

    >>> str(folder("train", Train(model="torchvision:resnet50", seed=1)))
    'runs/train-torchvision-resnet50-cifar10-seed1'
    """
    words = [command, config.model, Path(config.data).name or config.data]
    words += [f"seed{config.seed}"] if config.seed else []
    return Path("runs", "-".join("".join(c if c.isalnum() or c in "._" else "-" for c in word) for word in words))


# -- where values come from ------------------------------------------------------------------------------------------


def resolve(command: str, given: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> Config:
    """The options of a command: as given, else as in `base` (what a file holds), else their defaults."""
    kind = KINDS[command]
    below = dict(base or {})
    if any(given.get(name) is not None for name in AMOUNTS):
        replaced = {*AMOUNTS, *(() if given.get("global_ratio") is not None else ("global_stem",))}
        below = {name: value for name, value in below.items() if name not in replaced}
    values = {**below, **given}
    for name in values:
        if name not in known(kind):
            raise GrowpruneError(f"{command} has no option '{name}'{nearest(name, known(kind))}")
    return kind(**values)


def from_json(found: Mapping[str, Any], place: Path) -> Config:
    """The configuration that a run's folder keeps."""
    kind = KINDS.get(str(found.get("command")))
    if kind is None:
        raise GrowpruneError(f"{place}: not a run of train or prune")
    try:
        return resolve(kind.command, {key: value for key, value in found.items() if key != "command"})
    except GrowpruneError as error:
        raise GrowpruneError(f"{place}: its config.json: {error}") from None


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Options that matter and are not the same; one that there was not yet had its default."""
    kind = KINDS.get(str(here.get("command")))
    usual = {each.name: each.default for each in fields(kind)} if kind else {}
    for key in sorted({*there, *here} - {*Config.HARMLESS}):
        old, new = (side.get(key, usual.get(key)) for side in (there, here))
        if old != new and not (key in PLACES and same_place(old, new)):
            yield key, old, new


PUSHING = (
    "scope", "prune_lr", "prune_batch", "prune_norm", "delta_lambda", "tau", "ku", "ks", "stop_ratio",
)  # fmt: skip
PICKING = ("delta_lambda_pick", "tau_pick", "gamma")


def saying_nothing(schedule: str | None) -> tuple[str, ...]:
    """Options without effect: of one-shot pruning those of pushing, of all but GReg-2 those of its pick."""
    return (*(PUSHING if schedule == "oneshot" else ()), *(PICKING if schedule != "greg2" else ()))


def idle(config: Config) -> list[str]:
    """Of a run's options those that were changed and have no effect, each in a line."""
    if not isinstance(config, Prune):
        return []
    usual = {each.name: each.default for each in fields(config)}
    return [
        f"{flag(name)} {getattr(config, name)}: it has no effect with --schedule {config.schedule}"
        for name in saying_nothing(config.schedule)
        if getattr(config, name) != usual[name]
    ]


PLACES = ("data", "weights")
"""Options that may name a file or folder, which has many names."""


def same_place(one: Any, other: Any) -> bool:
    """Do two paths lead to the same? A set that is known by name is no path."""
    try:
        return not CLASSES.keys() & {one, other} and os.path.samefile(one, other)
    except (OSError, TypeError):
        return False


# -- how images are scaled -------------------------------------------------------------------------------------------

Scaling = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and deviation of each channel, of pixels / 255; a single one stands for all channels."""
IMAGENET: Scaling = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SCALED: Mapping[str, Scaling | None] = {"own": None, "imagenet": IMAGENET, "none": ((0.0,), (1.0,))}
"""What `--normalize` knows by name; None is the images' own."""


def scaling(text: str) -> Scaling | None:
    """What `--normalize` says.

    >>> scaling("own"), scaling("none"), scaling("0.5/0.25"), scaling("0.5,0.4/0.2,0.3")
    (None, ((0.0,), (1.0,)), ((0.5,), (0.25,)), ((0.5, 0.4), (0.2, 0.3)))
    """
    if text in SCALED:
        return SCALED[text]
    means, _, deviations = text.partition("/")
    try:
        mean, std = tuple(map(float, means.split(","))), tuple(map(positive, deviations.split(",")))
        if len(mean) != len(std) or not all(map(math.isfinite, mean)):
            raise ValueError
        return mean, std
    except ValueError:
        raise GrowpruneError(
            f"--normalize: cannot read '{text}'{nearest(text, SCALED)}; give own, imagenet, none, or means/deviations "
            "of pixels / 255, as 0.5/0.25 or 0.5,0.5,0.4/0.2,0.2,0.3"
        ) from None


# -- learning rates --------------------------------------------------------------------------------------------------


def rates(text: str, epochs: int, epoch: int, warm_up: float = 0.0) -> list[float]:
    """The learning rate of every step, for `epochs` of `epoch` steps each.

    >>> rates("0.1", 1, 2), rates("0:1e-2,1:1e-3", 2, 1), [round(r, 3) for r in rates("cosine:0.1", 2, 2)]
    ([0.1, 0.1], [0.01, 0.001], [0.1, 0.085, 0.05, 0.015])
    """
    steps = epochs * epoch
    kind, colon, peak = text.partition(":")
    try:
        if kind == "cosine" and colon:
            found = [positive(peak) * 0.5 * (1 + math.cos(math.pi * i / steps)) for i in range(steps)]
            positive(peak)
        elif not colon:
            found = [positive(text)] * steps
        else:
            found = list(staircase(text, epochs, epoch))
    except ValueError:
        hint = nearest(kind, ["cosine"]) if kind != "cosine" else ""
        raise GrowpruneError(
            f"--lr: '{text}' is no learning rate{hint} (write 0.1, 0:1e-2,60:1e-3 by epoch, or cosine:0.1)"
        ) from None
    rise = warm_up * epoch
    return [rate * min(1.0, (i + 1) / rise) if rise else rate for i, rate in enumerate(found)]


def staircase(text: str, epochs: int, epoch: int) -> Iterator[float]:
    stairs = [part.split(":") for part in text.split(",")]
    starts = [int(start) for start, _ in stairs]
    values = [positive(value) for _, value in stairs]
    if starts[0] != 0 or starts != sorted(set(starts)):
        raise ValueError
    for i in range(epochs):
        current = max(n for n, start in enumerate(starts) if start <= i)
        yield from [values[current]] * epoch


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value
