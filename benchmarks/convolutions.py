"""Our 3×3 convolutions against cuDNN's, layer by layer: forward and backward together, as CUDA graphs, batch 256.

    python benchmarks/convolutions.py [--out results/bench/h200-convolutions.json]

The shapes are ResNet56's on CIFAR: whole (16, 32, 64 channels) and as ratio 0.9 leaves them (1, 3, 6 filters inside).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import growprune as gp
from growprune.convolutions import candidates, layer_time

SHAPES = [
    (16, 16, 32),
    (32, 32, 16),
    (64, 64, 8),
    (16, 1, 32),
    (1, 16, 32),
    (32, 3, 16),
    (3, 32, 16),
    (64, 6, 8),
    (6, 64, 8),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rows: list[dict[str, Any]] = []
    for channels, filters, side in SHAPES:
        layer = nn.Conv2d(channels, filters, 3, padding=1, bias=False).cuda().to(memory_format=torch.channels_last)
        kinds = {"cudnn": "", **{kind: kind for kind in candidates(layer)}}
        times = {name: layer_time(layer, (256, channels, side, side), kind) * 1e6 for name, kind in kinds.items()}
        rows.append(
            {"channels": channels, "filters": filters, "side": side, **{k: round(v, 1) for k, v in times.items()}}
        )
        print(rows[-1], flush=True)
    result = {
        "benchmark": "convolutions",
        "unit": "microseconds, forward and backward",
        "rows": rows,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "growprune": gp.__version__,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
