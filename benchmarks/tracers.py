"""Which tracer: how long each takes and which of torchvision's or timm's classifiers it covers, measured side by side.

    python benchmarks/tracers.py [--models resnet50 timm:eva02_tiny_patch14_224 ...] [--families]
                                 [--tools growprune fx export torch_pruning] [--timeout 90] [--out results/tracers.json]

`--families`: of timm's families of networks, its modules, the least network of each (parameters times width of the
image); else all of torchvision's classifiers. For every model (random weights, one image of its size, all cores) each
tool runs in a process of its own:
    growprune       build a Pruner at 50 % and compact it: trace, group, prove, cut, prove
    fx, export      torch.fx.symbolic_trace / torch.export.export alone: the graph and nothing done with it
    torch_pruning   its MagnitudePruner at 50 %, built and stepped, if that package is installed
A tool covers a model if it ends within the timeout and the smaller network runs (for growprune: is proved equal to the
masked one; the graph tools: a graph comes out).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

TOOLS = ("growprune", "fx", "export", "torch_pruning")


def made(name: str) -> tuple[nn.Module, tuple[int, int, int]]:
    """A network and the shape of its images."""
    if name.startswith("timm:"):
        import timm

        model = timm.create_model(name.removeprefix("timm:")).eval()
        return model, tuple(model.default_cfg.get("input_size", (3, 224, 224)))
    from torchvision.models import get_model

    extra = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    size = 299 if name == "inception_v3" else 224
    return get_model(name, weights=None, **extra).eval(), (3, size, size)


def families() -> list[str]:
    """The least network of every family of timm's."""
    import timm
    import torch

    def cost(name: str) -> float:
        with torch.device("meta"):
            try:
                model, shape = made(f"timm:{name}")
            except Exception:  # some cannot be made without data
                return float("inf")
        return float(sum(p.numel() for p in model.parameters()) * shape[1])

    real = {
        module: [n for n in timm.list_models(module=module) if not n.startswith("test_")]
        for module in timm.list_modules()
    }
    return [f"timm:{min(names, key=cost)}" for names in real.values() if names]


def one(tool: str, name: str) -> dict[str, object]:
    """Run one tool on one model, in this process."""
    import torch

    torch.manual_seed(0)
    model, shape = made(name)
    x = torch.randn(1, *shape)
    with torch.no_grad():
        model(x)  # first-use costs of the machine are nobody's
    found: dict[str, object] = {}
    start = time.perf_counter()
    if tool == "growprune":
        import growprune as gp

        start = time.perf_counter()
        pruner = gp.Pruner(model, x, schedule=gp.OneShot(), ratios=0.5)
        found["build"] = time.perf_counter() - start
        small = pruner.compact()
        found["seconds"] = time.perf_counter() - start
        found["speedup"] = round(gp.speedup(gp.measure(model, x), gp.measure(small, x)), 2)
        found["layers"], found["skipped"] = len(pruner.groups.layers), len(pruner.skipped)
    elif tool == "fx":
        torch.fx.symbolic_trace(model)
        found["seconds"] = time.perf_counter() - start
    elif tool == "export":
        torch.export.export(model, (x,), strict=False)
        found["seconds"] = time.perf_counter() - start
    else:
        import torch_pruning as tp

        start = time.perf_counter()
        classes = model(x).shape[1]
        kinds = {torch.nn.Linear: "out_features", torch.nn.Conv2d: "out_channels"}
        last = [m for m in model.modules() if type(m) in kinds and getattr(m, kinds[type(m)]) == classes]
        pruner = tp.pruner.MagnitudePruner(
            model, x, importance=tp.importance.MagnitudeImportance(p=1), pruning_ratio=0.5, ignored_layers=last
        )
        pruner.step()
        found["seconds"] = time.perf_counter() - start
        model(x)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--tools", nargs="*", default=TOOLS)
    parser.add_argument("--timeout", type=float, default=90)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(*args.one)))
        return
    import torch
    import torchvision

    names = args.models or (families() if args.families else torchvision.models.list_models(module=torchvision.models))
    rows: dict[str, dict[str, object]] = {}
    for name in names:
        rows[name] = {}
        for tool in args.tools:
            command = [sys.executable, "-W", "ignore", __file__, "--one", tool, name]
            try:
                ran = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout + 30)
                rows[name][tool] = json.loads(ran.stdout) if ran.returncode == 0 else ran.stderr.strip()[-160:]
            except subprocess.TimeoutExpired:
                rows[name][tool] = f"not done in {args.timeout:g} s"
        print(name, json.dumps(rows[name]), flush=True)
    covered = {t: sum(isinstance(row[t], dict) for row in rows.values()) for t in args.tools}
    result = {
        "benchmark": "tracers",
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        **({"timm": version("timm")} if args.families else {}),
        "threads": torch.get_num_threads(),
        "models": len(rows),
        "covered": covered,
        "rows": rows,
    }
    print(json.dumps(covered))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
