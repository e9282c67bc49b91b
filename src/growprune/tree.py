"""A tree of plain values and tensors as JSON and a table of tensors, and back, exactly.

A dict with a single key of these stands for what JSON cannot say: {"$tensor": name}, {"$tuple": list}, {"$int": hex},
{"$float": its bits}, {"$dict": a dict with keys that themselves begin with $}.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

DEPTH = 100
"""Trees nested deeper are refused: what was saved must also be readable from deep inside a program."""


def encode(node: Any, where: tuple[str | int, ...], tensors: dict[str, Tensor], names: dict[int, str]) -> Any:
    """One node as JSON can hold it. Its tensors go to `tensors`; `names` has those met before, by identity."""
    if len(where) > DEPTH:
        raise TypeError(f"{place(where[:3])}...: nested more than {DEPTH} deep")
    kind = type(node)
    if node is None or kind in (bool, str):
        return node
    if kind is int:  # beyond it other readers of JSON lose digits, and Python refuses very many
        return node if abs(node) < 2**53 else {"$int": hex(node)}
    if kind is float:
        return node if math.isfinite(node) else {"$float": struct.pack(">d", node).hex()}
    if kind in (Tensor, nn.Parameter):
        return {"$tensor": entered(node, where, tensors, names)}
    if kind in (list, tuple):
        items = [encode(item, (*where, i), tensors, names) for i, item in enumerate(node)]
        return items if kind is list else {"$tuple": items}
    if isinstance(node, Mapping):
        for key in node:
            if type(key) is not str:
                raise TypeError(f"{place(where)}: the key {key!r} is not a string")
        pairs = {key: encode(item, (*where, key), tensors, names) for key, item in node.items()}
        return {"$dict": pairs} if any(key.startswith("$") for key in pairs) else pairs
    raise TypeError(f"{place(where)}: {kind.__module__}.{kind.__qualname__} cannot be saved in a checkpoint")


def entered(t: Tensor, where: tuple[str | int, ...], tensors: dict[str, Tensor], names: dict[int, str]) -> str:
    """The name of a tensor in the file: a number makes it unique, its place is for people who look in."""
    if t.layout is not torch.strided or t.is_meta or t.is_nested or word(t.dtype) is None:
        raise TypeError(f"{place(where)}: a tensor ({t.device.type}, {t.layout}, {t.dtype}) that cannot be saved")
    if id(t) not in names:
        path = "/".join(map(str, where)).encode("ascii", "replace").decode()[:200]
        names[id(t)] = f"{len(tensors)}/{path}"
        tensors[names[id(t)]] = t
    return names[id(t)]


def place(where: tuple[str | int, ...]) -> str:
    """A node's place, for error messages.

    >>> place(("optimizer", "groups", 0))
    "tree['optimizer']['groups'][0]"
    """
    return "tree" + "".join(f"[{key!r}]" for key in where)


def decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `encode`."""
    if isinstance(node, list):
        return [decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    match node:
        case {"$tensor": str(name), **rest} if not rest:
            return tensors[name]
        case {"$tuple": list(items), **rest} if not rest:
            return tuple(decode(item, tensors) for item in items)
        case {"$int": str(digits), **rest} if not rest:
            return int(digits, 16)
        case {"$float": str(bits), **rest} if not rest:
            return struct.unpack(">d", bytes.fromhex(bits))[0]
        case {"$dict": dict(pairs), **rest} if not rest:
            node = pairs
    return {key: decode(item, tensors) for key, item in node.items()}


@functools.cache
def word(dtype: torch.dtype) -> str | None:
    """safetensors' word for a type of numbers; None for one that it does not bring back.

    >>> word(torch.bfloat16)
    'BF16'
    """
    try:
        blob = safetensors.torch.save({"t": torch.empty(1, dtype=dtype, device="cpu")})
        back = safetensors.torch.load(blob)["t"]
        facts = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
        return str(facts["t"]["dtype"]) if (back.dtype, back.shape) == (dtype, (1,)) else None
    except Exception:  # each kind of trouble has an error of its own there
        return None
