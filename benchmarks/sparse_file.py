"""How large a network's file is when single weights are pruned: ResNet50 as in the paper's table 4 (82.7 %), and dense.

    python benchmarks/sparse_file.py [--out results/sparse-file.json]

Pruned weights are stored as one bit each; what is read back is compared with what was written, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

import growprune as gp
from growprune import models
from growprune.paper.table4 import RATIO

NAME, CLASSES = "torchvision:resnet50", 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    net, example = models.fresh(NAME, CLASSES), torch.zeros(1, 3, 64, 64)
    with tempfile.TemporaryDirectory() as folder:
        dense, sparse = Path(folder) / "dense.safetensors", Path(folder) / "sparse.safetensors"
        gp.save(net, dense)
        pruner = gp.Pruner(net, example, gp.OneShot(), ratios=float(RATIO), granularity="weight")
        small = pruner.compact()
        gp.save(small, sparse)
        back = gp.load(sparse, lambda: models.fresh(NAME, CLASSES)).state_dict()
        same = all(torch.equal(back[name], value) for name, value in small.state_dict().items())
        result = {
            "network": NAME,
            "sparsity": gp.sparsity(small),
            "dense_bytes": dense.stat().st_size,
            "sparse_bytes": sparse.stat().st_size,
            "read_back_the_same": same,
            "torch": torch.__version__,
            "growprune": gp.__version__,
        }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
