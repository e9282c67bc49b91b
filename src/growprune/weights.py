"""Trained weights: a run's folder, a file, or torchvision's published ones by name, put into a network of `models`."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError, line, nearest
from growprune.models import BUILT_IN, fresh, package
from growprune.running import unsound
from growprune.storage import KEY, load


def restore(name: str, num_classes: int | None, weights: str | os.PathLike[str]) -> nn.Module:
    """The network called `name` with trained weights: a run's folder, a file of `growprune.save`, a state dict in
    safetensors, or one of torch.save (read without running any code in it)."""
    path = weights_file(weights, name, num_classes)
    header = safetensors_header(path)
    if f'"{KEY}"'.encode() in header:
        model = load(path, lambda: fresh(name, num_classes))
    else:
        found = state_dict(path, plain=bool(header))
        model = filled(fresh(name, num_classes), found, f"{path}: of another network than {name}")
    if (bad := unsound(model)) is not None:
        raise GrowpruneError(f"{path}: '{bad}' holds numbers that are not finite")
    return model


def filled(model: nn.Module, found: dict[str, Tensor], other: str) -> nn.Module:
    """The network with a state dict's weights, if they are for it; `other` is said if not."""
    own = model.state_dict()
    found = fitting(found, own)
    for names, what in ((set(own) - set(found), "lacks"), (set(found) - set(own), "has")):
        if names:
            raise GrowpruneError(f"{other}: it {what} '{sorted(names)[0]}'")
    for key, value in own.items():
        if found[key].shape != value.shape:
            raise GrowpruneError(f"{other}: '{key}' is {tuple(found[key].shape)}, not {tuple(value.shape)}")
    model.load_state_dict(found)
    return model


def weights_file(weights: str | os.PathLike[str], model: str = "", classes: int | None = None) -> Path:
    """The file that trained weights are in. Torchvision's published ones are downloaded, once, but not where they are
    known to be of another network than `model`, or for another number of classes."""
    path = Path(weights)
    if PUBLISHED.fullmatch(str(weights)) and not path.exists():
        return published(str(weights), model, classes)
    if path.is_dir():
        if (path / "config.json").is_file() and not (path / "model.safetensors").is_file():
            raise GrowpruneError(f"weights '{weights}': a run that is not finished: growprune resume {weights}")
        path /= "model.safetensors"
    if not path.is_file():
        raise GrowpruneError(
            f"weights '{weights}': no such file, or a folder without model.safetensors; give a run's folder, a file "
            "(as of torch.save(model.state_dict(), ...)) or torchvision's name (ResNet50_Weights.IMAGENET1K_V1)"
        )
    return path


PUBLISHED = re.compile(r"\w+_Weights\.\w+")
"""How torchvision names its weights: ResNet50_Weights.IMAGENET1K_V1."""


def published(name: str, model: str = "", classes: int | None = None) -> Path:
    """Torchvision's weights of that name, in torch's own cache."""
    library = package("torchvision").models
    kind, _, version = name.partition(".")
    kinds = {each.__name__: each for each in map(library.get_model_weights, library.list_models())}
    versions = list(kinds[kind].__members__) if kind in kinds else []
    if version not in versions:
        hint = nearest(name, [f"{kind}.{each}" for each in versions] or [f"{each}.{version}" for each in kinds])
        raise GrowpruneError(f"weights '{name}': torchvision has none of that name{hint}")
    source, _, inner = model.partition(":")
    if source in BUILT_IN or (source == "torchvision" and library.get_model_weights(inner) is not kinds[kind]):
        raise GrowpruneError(f"weights '{name}': of another network than --model {model}")
    known = len(kinds[kind][version].meta.get("categories", ()))
    if source == "torchvision" and classes is not None and known not in (0, classes):
        raise GrowpruneError(f"weights '{name}': tell {known} classes apart; the images are of {classes}")
    url = kinds[kind][version].url
    path = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    first = "".join(HASH.findall(path.stem))  # of its SHA-256
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), first, progress=False)
        except (OSError, RuntimeError) as error:  # no network, no room, or not the file it should be
            raise GrowpruneError(
                f"weights '{name}': cannot be downloaded ({line(error)}); put the file {path.name} into {path.parent} "
                "(prune and eval also take its path, with --weights)"
            ) from error
    if not digest(path).startswith(first):
        raise GrowpruneError(f"{path}: damaged, or another file of that name: its SHA-256 does not begin with {first}")
    return path


HASH = re.compile("[0-9a-f]{8,}$")
"""At the end of a published file's name."""


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def safetensors_header(path: Path) -> bytes:
    """The table at the head of a safetensors file; empty if it is none, whatever it is called."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = file.read(min(size, 1 << 26))
    except OSError as error:
        raise GrowpruneError(f"{path}: {error.strerror}") from error
    return header if header.startswith(b"{") else b""


def state_dict(path: Path, plain: bool) -> dict[str, Tensor]:
    """A state dict, out of the usual wrappings; `plain`: of safetensors."""
    try:
        if plain:
            return safetensors.torch.load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise GrowpruneError(
            f"{path}: damaged, or no state dict that can be read without running code in it; save model.state_dict(), "
            "or use growprune.save"
        ) from error
    for key in ("state_dict", "model_state_dict", "model", "net"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not found or not all(map(usual, found.values())):
        raise GrowpruneError(f"{path}: not a state dict: save model.state_dict(), or use growprune.save")
    return found


def usual(value: Any) -> bool:
    """Is it a tensor as a state dict has them?"""
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_meta or value.is_quantized)


def fitting(found: dict[str, Tensor], own: Collection[str]) -> dict[str, Tensor]:
    """Without what DataParallel and torch.compile put before every name; not so where the network itself has it."""
    while set(found) != set(own):
        prefix = next((p for p in ("module.", "_orig_mod.") if found and all(key.startswith(p) for key in found)), None)
        if prefix is None:
            break
        found = {key.removeprefix(prefix): value for key, value in found.items()}
    return found
