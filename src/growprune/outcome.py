"""What a finished run says of itself: the contents of result.json."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from growprune import __version__, ratios, recipe
from growprune.config import Config, Prune
from growprune.feeds import Images
from growprune.measurement import latency, measure, speedup, weight_sparsity


def of(config: Config, images: Images, base: nn.Module, net: nn.Module, device: str, **known: Any) -> dict[str, Any]:
    """The result of a run that made `net` out of `base`; `known` is what the run itself kept count of."""
    example = images.example()
    full, left = measure(base, example), measure(net, example)
    pushed = config if isinstance(config, Prune) else None
    schedule = recipe.schedule(pushed) if pushed else None
    return {
        "command": config.command,
        "params": {"before": full.params, "after": left.params},
        "macs": {"before": full.macs, "after": left.macs},
        "speedup": speedup(full, left),
        "sparsity": weight_sparsity(net)
        if pushed and pushed.granularity == "weight"
        else 1 - left.params / full.params,
        "model": config.model,
        "data": config.data,
        "images": images.sizes,
        "shape": list(images.shape),
        "classes": images.classes,
        "normalization": {"mean": list(images.dataset.mean), "std": list(images.dataset.std)},
        "latency": times(base, net, images, device) if pushed else None,
        "seed": config.seed,
        "schedule": {"name": type(schedule).__name__, **asdict(schedule)} if schedule else None,
        "criterion": pushed.criterion if pushed else None,
        "granularity": pushed.granularity if pushed else None,
        "scope": pushed.scope if pushed else None,
        "prune_norm": pushed.prune_norm if pushed else None,
        "ratios": ratios.write(ratios.read(recipe.ratios(pushed))) if pushed else None,
        "multiple": pushed.multiple if pushed else None,
        "epochs": {"finetune" if pushed else "train": config.epochs},
        **known,
    }


TURNS = 5


def times(base: nn.Module, net: nn.Module, images: Images, device: str) -> dict[str, Any]:
    """Seconds of a forward pass before and after, in float32: in turns, and the least of each, since what else the
    machine does only ever adds to it."""
    batch = 256 if device.startswith("cuda") else 16
    x = torch.zeros(batch, *images.shape, device=device)
    turns = [[latency(each, x, repeats=3, warmup=1) for each in (base, net)] for _ in range(TURNS)]
    slow, fast = map(min, zip(*turns, strict=True))
    return {"before": slow, "after": fast, "ratio": slow / fast, "batch": batch}


def environment(device: str, world: int) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    return {
        "growprune": __version__,
        "source": source(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device.partition(":")[0],
        "device_name": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "world": world,
    }


@cache
def source() -> str:
    """Tells the code that ran from any other: a hash of this package's files, of whatever commit."""
    here = Path(__file__).parent
    files = sorted(here.rglob("*.py"))
    parts = (f"{path.relative_to(here).as_posix()}\0{path.read_text()}\0" for path in files)
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def shown(choice: Mapping[str, Any]) -> dict[str, Any]:
    """A choice as a result tells it: how many layers have our kernels, not which."""
    return {key: len(value) if key == "kernels" else value for key, value in choice.items()}
