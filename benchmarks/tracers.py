"""Which tracer: how long each takes and which of torchvision's classifiers it covers, measured side by side.

    python benchmarks/tracers.py [--models resnet50 densenet201 ...] [--tools growprune fx export torch_pruning]
                                 [--timeout 90] [--out results/tracers.json]

For every model (random weights, one 224² image, all cores) each tool runs in a process of its own:
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
from pathlib import Path

TOOLS = ("growprune", "fx", "export", "torch_pruning")


def one(tool: str, name: str) -> dict[str, object]:
    """Run one tool on one model, in this process."""
    import torch
    from torchvision.models import get_model

    torch.manual_seed(0)
    size = 299 if name == "inception_v3" else 224
    extra = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    model, x = get_model(name, weights=None, **extra).eval(), torch.randn(1, 3, size, size)
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
        last = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 1000]
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

    names = args.models or torchvision.models.list_models(module=torchvision.models)
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
