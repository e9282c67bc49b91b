"""What a run is asked to do: every option of `train` and `prune`, with its default, its help and its check.

One place for all of it. The command line is made from these fields, a TOML file may hold any of them, and the run's
folder keeps the resolved ones as config.json. Nothing of torch is imported: `growprune --help` comes through here.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from growprune.errors import GrowpruneError, nearest


def option(default: Any, text: str, **more: Any) -> Any:
    """A field of a configuration: its default, one line of help, and bounds (`min`, `above`)."""
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, kw_only=True)
class Config:
    """What `train` and `prune` share."""

    command: ClassVar[str] = ""

    model: str = option("resnet56", "resnet56, vgg19, torchvision:NAME, timm:NAME or package.module:function.")
    data: str = option("cifar10", "cifar10, cifar100, digits, or a folder: CIFAR files, .npz pair, class folders.")
    data_dir: str = option("data", "Where cifar10 and cifar100 lie, or are downloaded to.")
    seed: int = option(0, "Decides first weights, order of images, augmentation.", min=0)
    device: str = option("auto", "auto, cpu or cuda.")
    epochs: int = option(100, "Passes over the training images.", min=0)
    batch: int = option(256, "Images a step, over all processes.", min=1)
    lr: str = option("0.1", "Learning rate: 0.1, 0:1e-2,60:1e-3,90:1e-4 (by epoch), or cosine:0.1.")
    warm_up: float = option(0.0, "Epochs over which the learning rate rises to its value.", min=0)
    momentum: float = option(0.9, "SGD's momentum.", min=0)
    nesterov: bool = option(False, "Nesterov's momentum.")
    weight_decay: float = option(5e-4, "SGD's weight decay.", min=0)
    label_smoothing: float = option(0.0, "Share of the target spread over all classes.", min=0)
    augment: bool = option(True, "Random crops and flips while training.")
    normalize: Literal["own", "imagenet"] = option(
        "own", "Mean and deviation of the images: the set's own, or ImageNet's."
    )
    resolution: int = option(224, "Side of the square that larger images are cropped to.", min=8)
    workers: int = option(-1, "Processes that read larger images; -1: one a core.", min=-1)
    precision: Literal["auto", "bf16", "fp32"] = option("auto", "Of the training step; auto: the faster one here.")
    layout: Literal["auto", "channels_last", "contiguous"] = option("auto", "Of images and weights in memory.")
    compile: Literal["auto", "on", "off"] = option("auto", "torch.compile; auto: where it pays for itself.")
    kernels: Literal["auto", "on", "off"] = option("auto", "Our convolutions for few or odd channels (CUDA).")
    deterministic: bool = option(False, "The same bits each time on a GPU too; slower (it says how much).")
    threads: int = option(0, "Threads on a CPU; 0: all cores.", min=0)
    eval_every: int = option(1, "Epochs between tests.", min=1)
    save_every: float = option(60.0, "Seconds between checkpoints; 0: one a step.", min=0)
    tensorboard: bool = option(False, "Also write TensorBoard events into the run's folder.")

    HARMLESS: ClassVar[tuple[str, ...]] = ("data_dir", "workers", "save_every", "tensorboard")
    """Options that may differ when a run is resumed: they do not change what comes out."""

    def __post_init__(self) -> None:
        for each in fields(self):
            check(each, getattr(self, each.name), get_type_hints(type(self))[each.name])
        rates(self.lr, 1, 1, self.warm_up)
        if self.label_smoothing >= 1:
            raise GrowpruneError(f"label-smoothing: {self.label_smoothing} must be below 1")

    def to_json(self) -> dict[str, Any]:
        return {"command": self.command, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Train(Config):
    """`growprune train`: a network from its first weights, or from `weights` on."""

    command: ClassVar[str] = "train"

    epochs: int = option(100, "Passes over the training images.", min=0)
    lr: str = option("cosine:0.2", "Learning rate: 0.1, 0:0.1,100:0.01,150:0.001 (by epoch), or cosine:0.2.")
    warm_up: float = option(5.0, "Epochs over which the learning rate rises to its value.", min=0)
    weights: str | None = option(None, "Start from these (file or run folder) instead of fresh ones.")


@dataclass(frozen=True, kw_only=True)
class Prune(Config):
    """`growprune prune`: push, remove, fine-tune. The defaults are the paper's on CIFAR."""

    command: ClassVar[str] = "prune"

    weights: str = option("", "The trained network: a run's folder, .safetensors, or a state dict; that of train.")
    epochs: int = option(120, "Passes over the training images while fine-tuning.", min=0)
    lr: str = option("0:1e-2,60:1e-3,90:1e-4", "Learning rate of fine-tuning: a number, by epoch, or cosine:0.01.")
    schedule: Literal["greg1", "greg2", "oneshot"] = option("greg1", "How the filters go.")
    criterion: Literal["l1", "l2", "taylor", "obd", "random"] = option("l1", "Which filters go.")
    granularity: Literal["filter", "weight"] = option("filter", "What goes: whole filters, or single weights.")
    ratios: str | None = option(None, "0.5 (default), '[0, 0.5, 0.5, 0.5]' by stage, or '[0:0, 1-15:0.7]' by layer.")
    speedup: float | None = option(None, "How many times fewer MACs, instead of ratios.", above=1)
    global_ratio: float | None = option(None, "One ratio over all layers together, instead of ratios.", above=0)
    scope: Literal["filter", "path"] = option("filter", "What the penalty touches: filter (the paper) or path.")
    coupled: bool = option(False, "Also prune filters tied by residual additions, together.")
    ignore: str = option("", "Layers never touched, by name, with commas between.")
    prune_lr: float = option(1e-3, "Learning rate while the penalty grows.", above=0)
    prune_batch: int = option(256, "Images a step while the penalty grows.", min=1)
    delta_lambda: float = option(1e-4, "Growth of λ (δλ).", above=0)
    delta_lambda_pick: float = option(1e-5, "Growth of λ while GReg-2 picks.", above=0)
    tau: float = option(1.0, "λ's ceiling (τ).", above=0)
    tau_pick: float = option(0.01, "λ at which GReg-2 picks (τ').", above=0)
    ku: int = option(10, "Steps between two growths of λ (Ku).", min=1)
    ks: int = option(5000, "Steps at the ceiling, to stabilise (Ks).", min=0)
    gamma: float | None = option(None, "GReg-2's −γ for kept weights; the weight decay if not given.", min=0)
    stop_ratio: float | None = option(None, "End pushing when kept weights are so many times the pruned.", above=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("ratios", "speedup", "global_ratio") if getattr(self, name) is not None]
        if len(given) > 1:
            raise GrowpruneError(
                f"prune: give one of --ratios, --speedup and --global-ratio, not {' and '.join(map(flag, given))}"
            )
        if not given:
            object.__setattr__(self, "ratios", "0.5")
        if not self.weights:
            object.__setattr__(self, "weights", str(folder("train", self)))


KINDS: dict[str, type[Config]] = {"train": Train, "prune": Prune}


def folder(command: str, config: Config) -> Path:
    """Where a run goes if nobody says where.

    >>> str(folder("train", Train(model="torchvision:resnet50", seed=1)))
    'runs/train-torchvision-resnet50-cifar10-seed1'
    """
    words = [
        command,
        config.model,
        Path(config.data).name or config.data,
        *([f"seed{config.seed}"] if config.seed else []),
    ]
    return Path("runs", "-".join("".join(c if c.isalnum() or c in "._" else "-" for c in word) for word in words))


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# -- checks --------------------------------------------------------------------------------------------------------


def check(what: Field[Any], value: Any, kind: Any) -> None:
    """One option's value: its type, its choices, its bounds."""
    name, bounds = flag(what.name), what.metadata
    options = get_args(kind)
    if type(None) in options:
        if value is None:
            return
        kind = options[0]
    if get_origin(kind) is Literal:
        if value not in options:
            hint = nearest(str(value), options) or f"; there are {', '.join(options)}"
            raise GrowpruneError(f"{name}: unknown value '{value}'{hint}")
        return
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if not fits or (kind is float and not math.isfinite(value)):
        raise GrowpruneError(f"{name}: needs {WORDS[kind]}, not {value!r}")
    if "min" in bounds and value < bounds["min"]:
        raise GrowpruneError(f"{name}: {value} must be {bounds['min']} or more")
    if "above" in bounds and value <= bounds["above"]:
        raise GrowpruneError(f"{name}: {value} must be above {bounds['above']}")


WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


# -- where values come from ------------------------------------------------------------------------------------------


def resolve(command: str, given: Mapping[str, Any], file: Path | None = None) -> Config:
    """The options of a command: as given, else from the file, else their defaults."""
    kind = KINDS[command]
    values = {**(read_file(file, command) if file else {}), **given}
    known = [f.name for f in fields(kind)]
    for name in values:
        if name not in known:
            raise GrowpruneError(f"{command} has no option '{name}'{nearest(name, known)}")
    return kind(**values)


def read_file(path: Path, command: str) -> dict[str, Any]:
    """A TOML file: options at the top level hold for every command, those in [train] or [prune] for that one."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GrowpruneError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise GrowpruneError(f"{path}: not TOML: {error}") from error
    values: dict[str, Any] = {}
    for key, value in found.items():
        if isinstance(value, dict):
            if key not in KINDS:
                raise GrowpruneError(f"{path}: unknown table [{key}]{nearest(key, KINDS)}")
            continue
        values[key.replace("-", "_")] = value
    values |= {key.replace("-", "_"): value for key, value in found.get(command, {}).items()}
    known = {f.name: get_type_hints(KINDS[command])[f.name] for f in fields(KINDS[command])}
    for name in values:
        if name not in known:
            raise GrowpruneError(f"{path}: {command} has no option '{name}'{nearest(name, known)}")
    return {name: as_text(value, known[name]) for name, value in values.items()}


def as_text(value: Any, kind: Any) -> Any:
    """`lr = 0.1` and `ratios = [0, 0.5]` are natural in TOML; where an option is text they are written out."""
    wants_text = kind is str or str in get_args(kind)
    if wants_text and isinstance(value, (int, float, list)) and not isinstance(value, bool):
        return repr(value)
    return value


def from_json(found: Mapping[str, Any], place: Path) -> Config:
    """The configuration that a run's folder keeps."""
    kind = KINDS.get(str(found.get("command")))
    if kind is None:
        raise GrowpruneError(f"{place}: not a run of train or prune")
    return resolve(kind.command, {key: value for key, value in found.items() if key != "command"})


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Options that matter and are not the same."""
    for key in sorted({*there, *here} - {*Config.HARMLESS}):
        if there.get(key) != here.get(key):
            yield key, there.get(key), here.get(key)


def defaults(kind: type[Config]) -> dict[str, Any]:
    return {f.name: None if f.default is MISSING else f.default for f in fields(kind)}


def changed(config: Config, **values: Any) -> Any:
    return replace(config, **values)


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
        hint = nearest(kind, ["cosine"]) if kind.isalpha() else ""
        raise GrowpruneError(
            f"--lr: '{text}' is no learning rate{hint or ': write 0.1, 0:1e-2,60:1e-3 (by epoch) or cosine:0.1'}"
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
