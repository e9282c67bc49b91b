"""growprune: neural pruning by growing regularization (GReg-1 and GReg-2, ICLR 2021), for any PyTorch model.

The public names, nothing else. They load when first asked for, so that `growprune --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from growprune.criteria import OBD, Criterion, Taylor
    from growprune.errors import GrowpruneError
    from growprune.measurement import Measurement, latency, measure, sparsity, speedup
    from growprune.pruner import Pruner
    from growprune.ratios import Global, Speedup
    from growprune.schedule import GReg1, GReg2, OneShot, Penalty, Phase, Schedule
    from growprune.separation import Separation
    from growprune.storage import load, save

__version__ = "0.1.0.dev0"

HOMES = {
    "criteria": ("OBD", "Criterion", "Taylor"),
    "errors": ("GrowpruneError",),
    "measurement": ("Measurement", "latency", "measure", "sparsity", "speedup"),
    "pruner": ("Pruner",),
    "separation": ("Separation",),
    "ratios": ("Global", "Speedup"),
    "schedule": ("GReg1", "GReg2", "OneShot", "Penalty", "Phase", "Schedule"),
    "storage": ("load", "save"),
}

__all__ = [
    "OBD",
    "Criterion",
    "GReg1",
    "GReg2",
    "Global",
    "GrowpruneError",
    "Measurement",
    "OneShot",
    "Penalty",
    "Phase",
    "Pruner",
    "Schedule",
    "Separation",
    "Speedup",
    "Taylor",
    "latency",
    "load",
    "measure",
    "save",
    "sparsity",
    "speedup",
]


def __getattr__(name: str) -> Any:
    for home, names in HOMES.items():
        if name in names:
            value = getattr(import_module(f"growprune.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'growprune' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
