"""The rooms: imports point one way, and the public names are what they say."""

import ast
import subprocess
import sys
from pathlib import Path

import growprune

SOURCE = Path(growprune.__file__).parent

ORDER = [
    "errors",
    "schedule",
    "copying",
    "running",
    "counting",
    "trace",
    "motion",
    "rules",
    "holding",
    "groups",
    "grouping",
    "solving",
    "ratios",
    "curvature",
    "criteria",
    "penalty",
    "attached",
    "separation",
    "compact",
    "folding",
    "proof",
    "checks",
    "storage",
    "state",
    "pruner",
    "measurement",
    "models",
    "weights",
    "reading",
    "options",
    "config",
    "asking",
    "tree",
    "checkpoint",
    "run",
    "finished",
    "cifar",
    "data",
    "workers",
    "streaming",
    "keeping",
    "kernels",
    "convolutions",
    "distributed",
    "feeds",
    "recipe",
    "planning",
    "formats",
    "exporting",
    "evaluation",
    "origin",
    "scales",
    "step",
    "choosing",
    "report",
    "outcome",
    "train",
    "jobs",
    "several",
    "paper",
    "bench",
    "demo",
    "console",
    "cli",
]
"""Downwards from the top of the list: a room may know those before it, never those after it."""


def imported(path: Path) -> set[str]:
    """The rooms that a module imports when it is loaded or called."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "growprune":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("growprune."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("growprune.")}
    return found & set(ORDER)


def test_imports_point_one_way() -> None:
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room not in ("__init__", "__main__"):
            later = {name for name in imported(path) if ORDER.index(name) > ORDER.index(room)}
            assert not later, f"{room} knows {later}"


def test_every_public_name_is_there() -> None:
    assert sorted(name for names in growprune.HOMES.values() for name in names) == sorted(growprune.__all__)
    for name in growprune.__all__:
        assert getattr(growprune, name).__module__ == f"growprune.{home(name)}"
    assert set(growprune.__all__) <= set(dir(growprune))


def home(name: str) -> str:
    return next(home for home, names in growprune.HOMES.items() if name in names)


def test_the_package_loads_without_torch_and_the_method_without_its_compiler() -> None:
    code = (
        "import sys, growprune; assert 'torch' not in sys.modules; "
        "growprune.GReg1(); growprune.Pruner; growprune.load; assert 'torch._dynamo' not in sys.modules; print('ok')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "ok\n"
