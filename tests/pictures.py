"""Folders of pictures, large for what they are, and a network that takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

SIZE = 16


def some(height: int, width: int, seed: int) -> Image.Image:
    """Smooth, as photographs are: JPEG keeps it nearly."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def write(root: Path, each: int = 9, ext: str = "jpg", **how: Any) -> None:
    """Three classes; no two pictures of a class have the same size."""
    for split, count in (("train", each), ("test", each - 4)):
        for k, name in enumerate(("ant", "bee", "cat")):
            place = root / split / name
            place.mkdir(parents=True)
            for i in range(count):
                some(30 + i, 45 - i, 100 * k + i).save(place / f"{i}.{ext}", **how)


def tiny(num_classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))


def wide(num_classes: int = 3) -> nn.Module:
    """With a layer that can be pruned."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), *tiny()[1:])
