"""The demo over seeds: does GReg-1 hold against one-shot, and against one-shot trained as long?

    python benchmarks/demo_seeds.py [--seeds 5] [--scopes path filter] [--jobs 2] [--out results/demo-seeds.json]

Each run is `growprune demo --longer` as anyone would start it, in a folder of its own; the file keeps every run's
accuracies and their means.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def run(seed: int, scope: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "growprune", "demo", "--json", "--longer"]
        command += ["--seed", str(seed), "--scope", scope, "--out", str(Path(folder, "run"))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    methods = {"greg1": result, "oneshot": result["baseline"], "longer": result["longer"]}
    return {
        "seed": seed,
        "scope": scope,
        "seconds": result["seconds"],
        "speedup": result["speedup"],
        "environment": {k: v for k, v in result["environment"].items() if k != "platform"},
        "accuracy": {name: found["accuracy"] for name, found in methods.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scopes", nargs="*", default=["path", "filter"])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    jobs = [(seed, scope) for scope in args.scopes for seed in range(args.seeds)]
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = list(pool.map(lambda job: run(*job), jobs))
    means = {
        scope: {
            name: round(statistics.mean(r["accuracy"][name]["final"] for r in runs if r["scope"] == scope), 2)
            for name in ("greg1", "oneshot", "longer")
        }
        for scope in args.scopes
    }
    for r in runs:
        print(r["scope"], r["seed"], {name: found["final"] for name, found in r["accuracy"].items()})
    print(json.dumps(means))
    if args.out:
        args.out.write_text(
            json.dumps({"benchmark": "demo over seeds", "final_means": means, "runs": runs}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
