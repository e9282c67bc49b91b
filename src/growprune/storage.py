"""Save and load of a smaller network: one safetensors file, no pickle.

The file holds every tensor, the few numbers that shapes do not tell (groups of convolutions and norms), and a SHA-256
over all of it. Weights that are held at zero are stored as their mask, one bit each, and the others' values. Loading
builds the original architecture and narrows it to the file's shapes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from growprune.checks import itself, unwrapped
from growprune.compact import BEFORE, places, put, refit, shapes_before
from growprune.errors import GrowpruneError
from growprune.groups import owner
from growprune.holding import MASK, held, keep_zero
from growprune.running import tensors

KEY = "growprune"
FORMAT = 1
VALUES, BITS = "::values", "::mask"
EXTRA = "_extra_state"
"""What torch calls the state of a module that is no tensor."""
NUMBERS = ("groups", "num_groups", "num_features")
OTHER = "; load takes what growprune.save wrote; a state dict is loaded by model.load_state_dict"


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a network (compacted, or any other) to `path`; a file already there is replaced only by a whole one."""
    facts, stored = described(model)
    facts["format"] = FORMAT
    unsigned = safetensors.torch.save(stored, {KEY: json.dumps(facts, sort_keys=True)})
    facts["sha256"] = digest(unsigned)
    write_whole(Path(path), safetensors.torch.save(stored, {KEY: json.dumps(facts, sort_keys=True)}))


def described(model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What is needed to build this network again: the facts that shapes do not tell, and the tensors."""
    model = unwrapped(model)
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or name.endswith(EXTRA):
            raise GrowpruneError(
                f"'{name}' of this model's state is not a parameter or buffer, and would be lost in a file of tensors"
            )
    stored, sparse = pack(model)
    numbers = {
        name: {key: getattr(module, key) for key in NUMBERS if isinstance(getattr(module, key, None), int)}
        for name, module in model.named_modules()
    }
    facts = {"numbers": {name: found for name, found in numbers.items() if found}, "held": sparse}
    if full := shapes_before(model):
        facts["full"] = {name: list(shape) for name, shape in full.items()}
    return facts, stored


def load(path: str | os.PathLike[str], build: Callable[[], nn.Module]) -> nn.Module:
    """The network saved at `path`; `build` makes the original, full-size architecture.

    A file cut short, changed since it was saved, or of another network is refused.
    """
    with torch.inference_mode(False):  # else what is made could not be trained
        facts, stored = read(Path(path))
        model = build() if callable(build) and not isinstance(build, nn.Module) else None
        if not isinstance(model, nn.Module):
            raise GrowpruneError("load: build must be a function that makes the original, full-size network")
        rebuilt(itself(model), facts, stored, Path(path))
    return model


def rebuilt(model: nn.Module, facts: dict[str, Any], stored: dict[str, Tensor], path: Path) -> nn.Module:
    """The full-size `model` narrowed to what `described` saw, with its values; `path` is for messages."""
    values, own = unpack(facts, stored), tensors(model)
    full = {name: tuple(shape) for name, shape in facts.get("full", {}).items() if name in own}
    for name in set(values) - set(own):  # biases that folding gave
        take_bias(model, name, values[name])
    compare(model, values, full, path)
    where, old = places(model), tensors(model)
    for name, value in values.items():
        put(where[name], old[name], like(old[name], value))
    for name, module in model.named_modules():
        for key, number in facts["numbers"].get(name, {}).items():
            setattr(module, key, number)
        refit(module)
    for name in facts["held"]:
        for module, attribute in where[name]:
            keep_zero(module, attribute, unpack_bits(stored[f"{name}{BITS}"], values[name].shape))
    if full:
        vars(model)[BEFORE] = {name: (shape, tuple(values[name].shape)) for name, shape in full.items()}
    return model


def take_bias(model: nn.Module, name: str, value: Tensor) -> None:
    """A bias that folding gave to a layer without one has its place made; anything else is refused later."""
    module = dict(model.named_modules()).get(owner(name))
    if name.endswith(".bias") and isinstance(module, (_ConvNd, nn.Linear)) and module.bias is None:
        module.register_parameter("bias", nn.Parameter(torch.zeros_like(value, device=module.weight.device)))


def like(old: Tensor, value: Tensor) -> Tensor:
    """On the same device and in the same layout; one without data (meta) stands for the CPU."""
    last = old.dim() == 4 and not old.is_contiguous() and old.is_contiguous(memory_format=torch.channels_last)
    device = value.device if old.is_meta else old.device
    return value.to(device, memory_format=torch.channels_last if last else torch.contiguous_format)


# -- tensors as they are stored ------------------------------------------------------------------------------------


def pack(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """The tensors to store, and the shapes of those that are stored by mask and values."""
    masks: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, mask in held(module):
            masks[f"{prefix}.{name}" if prefix else name] = mask
    stored: dict[str, Tensor] = {}
    sparse: dict[str, list[int]] = {}
    for name, t in tensors(model).items():
        t = t.detach().cpu()
        if name in masks:
            keep = masks[name].cpu()
            stored[f"{name}{VALUES}"] = t[keep]
            stored[f"{name}{BITS}"] = pack_bits(keep)
            sparse[name] = list(t.shape)
        elif not name.endswith(MASK):
            stored[name] = t.contiguous().clone()
    return stored, sparse


def unpack(facts: dict[str, Any], stored: dict[str, Tensor]) -> dict[str, Tensor]:
    values = {name: t for name, t in stored.items() if not name.endswith((VALUES, BITS))}
    for name, shape in facts["held"].items():
        kept = stored[f"{name}{VALUES}"]
        full = torch.zeros(shape, dtype=kept.dtype)
        full[unpack_bits(stored[f"{name}{BITS}"], torch.Size(shape))] = kept
        values[name] = full
    return values


def pack_bits(mask: Tensor) -> Tensor:
    """Eight booleans a byte, the first in the lowest bit.

    >>> pack_bits(torch.tensor([True, False, True])).tolist()
    [5]
    """
    flat = mask.flatten().to(torch.uint8)
    flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)]).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def unpack_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten()[: shape.numel()].bool().view(shape)


# -- the file ------------------------------------------------------------------------------------------------------


def digest(blob: bytes) -> str:
    """SHA-256 over the file's data, its table of tensors, and its facts less the digest itself."""
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    facts = json.loads(header["__metadata__"].pop(KEY))
    facts.pop("sha256", None)
    found = hashlib.sha256(json.dumps([facts, header], sort_keys=True).encode())
    found.update(memoryview(blob)[8 + size :])
    return found.hexdigest()


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise GrowpruneError(f"{path}: {error.strerror}") from error
    size = int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or len(blob) < 8 + size:
        raise GrowpruneError(f"{path}: not a growprune file, or cut short ({len(blob)} bytes){OTHER}")
    try:
        header = json.loads(blob[8 : 8 + size])
        facts: dict[str, Any] = json.loads(header["__metadata__"][KEY])
        end = 8 + size + max((t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"), default=0)
        right, known = facts.get("sha256") == digest(blob), facts.get("format")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise GrowpruneError(f"{path}: not a growprune file, or its header is damaged{OTHER}") from error
    if len(blob) < end:
        raise GrowpruneError(f"{path}: cut short: {len(blob)} of {end} bytes")
    if not right:
        raise GrowpruneError(f"{path}: damaged or changed since it was saved (its SHA-256 does not fit)")
    if known != FORMAT:
        raise GrowpruneError(f"{path}: format {known}; this version of growprune reads {FORMAT}")
    stored = safetensors.torch.load(blob)
    if not sensible(facts, stored):
        raise GrowpruneError(f"{path}: its facts make no sense: was it written by another program?")
    return facts, stored


def sensible(facts: dict[str, Any], stored: dict[str, Tensor]) -> bool:
    """Are the facts what `save` writes?"""
    numbers, held, full = facts.get("numbers"), facts.get("held"), facts.get("full", {})
    return (
        isinstance(numbers, dict)
        and isinstance(held, dict)
        and isinstance(full, dict)
        and all(isinstance(shape, list) and (name in stored or name in held) for name, shape in full.items())
        and all(isinstance(n, dict) and set(n) <= set(NUMBERS) for n in numbers.values())
        and all(f"{name}{end}" in stored for name in held for end in (VALUES, BITS))
    )


def compare(model: nn.Module, values: dict[str, Tensor], full: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Is this a file of that architecture, each tensor of the size that it had before anything was cut? Where the file
    does not say that, no larger than the original, and different only where filters can have gone."""
    own = {name: t for name, t in tensors(model).items() if not name.endswith(MASK)}
    for names, what in ((set(own) - set(values), "lacks"), (set(values) - set(own), "has")):
        if names:
            raise GrowpruneError(f"{path}: of another network: the file {what} '{sorted(names)[0]}'")
    modules, before = dict(model.named_modules()), shapes_before(model)  # what is built may be smaller already
    for name, t in own.items():
        there, here = tuple(values[name].shape), tuple(t.shape)
        if name in full and before.get(name, here) != full[name]:
            raise GrowpruneError(
                f"{path}: of another network: '{name}' was {full[name]} before it was pruned, it is {here} in the model"
            )
        if len(there) != len(here) or any(a > b for a, b in zip(there, here, strict=True)):
            raise GrowpruneError(f"{path}: of another network: '{name}' is {there} in the file, {here} in the model")
        fixed = uncut(modules.get(owner(name)), len(here))
        if any(there[d] != here[d] for d in fixed):
            raise GrowpruneError(f"{path}: of another network: '{name}' is {there} in the file, {here} in the model")


def uncut(module: nn.Module | None, dims: int) -> range:
    """The dimensions of a standard module's tensor along which no filter lies: a kernel's, a table's rows."""
    if isinstance(module, _ConvNd):
        return range(2, dims)
    return range(min(1, dims)) if isinstance(module, (nn.Embedding, nn.RNNBase)) else range(0)


def write_whole(path: Path, blob: bytes) -> None:
    """Write beside, flush, rename: a reader never sees half a file, and a failure leaves no scraps. What is no file (a
    device, a pipe) is not replaced by one."""
    temporary: Path | None = None
    if path.exists() and not path.is_file() and not path.is_dir():
        raise GrowpruneError(f"{path}: cannot be written: not a file")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
        temporary = None
    except OSError as error:
        raise GrowpruneError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
