"""What OBD's criterion leaves of ResNet56 and VGG19 under one ratio for all layers: by two curvatures, with two
floors, with and without the stem.

    python benchmarks/curvature.py RESNET56 VGG19 [--data-dir data] [--out results/curvature.json]

RESNET56 and VGG19 are the weights of table 1's base networks (`OUT/bases` of `growprune reproduce table1`). The
curvature is Gauss and Newton's (what `gp.OBD` takes), or the Hessian's own from products with random signs
(Hutchinson), on the ten training batches that `growprune prune` takes. The floor is what no layer goes below: one
filter, or a twentieth of them, and all of the stem or a twentieth of it too (ResNet56's is tied to its first stage,
and stays whole in any case). The file keeps, for each ratio of the paper's table, the speed-up and how many filters
each layer keeps, and of each curvature the share of filters that it scores below zero. A few minutes on two CPU
cores; the paper's speed-ups are printed beside.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import growprune as gp
from growprune.config import Prune
from growprune.criteria import Criterion, average
from growprune.curvature import random_signs
from growprune.distributed import World
from growprune.feeds import Images
from growprune.paper.obd import PAPER, RATIOS
from growprune.weights import restore

FLOORS: dict[str, dict[str, Any]] = {
    "one filter": {"at_most": 1.0},
    "a twentieth": {"at_most": 0.95},
    "a twentieth, of the stem too": {"at_most": 0.95, "stem": True},
}


class Hutchinson(Criterion):
    """½Σ h·w² with h = E[z ⊙ Hz], the diagonal of the Hessian itself."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def collect(self, model: nn.Module, example_input: Any) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)

        def diagonal(net: nn.Module, x: Any, y: Any) -> dict[str, Tensor]:
            named = dict(net.named_parameters())
            slopes = torch.autograd.grad(F.cross_entropy(net(x), y), list(named.values()), create_graph=True)
            signs = [random_signs(p, generator) for p in named.values()]
            products = torch.autograd.grad(slopes, list(named.values()), signs)
            return {name: sign * product for name, sign, product in zip(named, signs, products, strict=True)}

        return average(self.batches, model, example_input, diagonal)

    def score(self, weight: Tensor, extra: Tensor | None, generator: torch.Generator) -> Tensor:
        assert extra is not None
        return 0.5 * (extra * weight.square()).sum(1)


class Once(Criterion):
    """Another criterion, which collects a single time for many picks."""

    def __init__(self, criterion: Criterion, net: nn.Module, example: Tensor) -> None:
        self.criterion = criterion
        self.found = criterion.collect(net, example)
        self.below: list[Tensor] = []

    def collect(self, model: nn.Module, example_input: Any) -> dict[str, Tensor]:
        self.below = []
        return self.found

    def score(self, weight: Tensor, extra: Tensor | None, generator: torch.Generator) -> Tensor:
        found = self.criterion.score(weight, extra, generator)
        self.below.append(found < 0)
        return found


def picks(net: nn.Module, example: Tensor, criterion: Once) -> Iterator[dict[str, Any]]:
    for floor, options in FLOORS.items():
        for ratio in RATIOS:
            pruner = gp.Pruner(net, example, gp.OneShot(), criterion, gp.Global(ratio, **options))
            kept = [int(mask.sum()) for mask in pruner.masks().values()]
            times = gp.speedup(gp.measure(net, example), gp.measure(pruner.compact(), example))
            yield {"floor": floor, "ratio": ratio, "speedup": round(times, 2), "kept": kept}


def looked_at(weights: str, model: str, data: str, data_dir: str) -> dict[str, Any]:
    config = Prune(model=model, data=data, weights=weights, data_dir=data_dir)
    images = Images(config, "cpu", World())
    net = restore(model, images.classes, weights).eval()
    batches = list(images.sample(config.prune_batch))
    found: dict[str, Any] = {}
    for name, criterion in {"gauss-newton": gp.OBD(batches), "hessian": Hutchinson(batches)}.items():
        once = Once(criterion, net, images.example())
        rows = list(picks(net, images.example(), once))
        found[name] = {"below zero": round(float(torch.cat(once.below).double().mean()), 4), "picks": rows}
    return found


def table(found: Mapping[str, Any], paper: list[float]) -> Iterator[str]:
    yield f"  paper: {paper}"
    for name, curvature in found.items():
        yield f"  {name}: {100 * curvature['below zero']:.1f} % of filters below zero"
        for floor in FLOORS:
            rows = [row for row in curvature["picks"] if row["floor"] == floor]
            single = [sum(kept == 1 for kept in row["kept"]) for row in rows]
            yield f"    at least {floor}: {[row['speedup'] for row in rows]}, layers of one filter: {single}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("resnet56")
    parser.add_argument("vgg19")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    networks = {}
    for base, columns in PAPER.items():
        networks[base.model] = looked_at(vars(args)[base.model], base.model, base.data, args.data_dir)
        print(
            f"{base.model} on {base.data}, ratios {RATIOS}",
            *table(networks[base.model], [c[0] for c in columns]),
            sep="\n",
        )
    if args.out:
        versions = {"torch": torch.__version__, "growprune": gp.__version__}
        args.out.write_text(json.dumps({"benchmark": "curvature", **networks, "environment": versions}) + "\n")


if __name__ == "__main__":
    main()
