"""growprune: neural pruning by growing regularization (GReg-1 and GReg-2, ICLR 2021), for any PyTorch model."""

from growprune.criteria import OBD, Criterion, Taylor
from growprune.errors import GrowpruneError
from growprune.measure import Measurement, latency, measure, sparsity, speedup
from growprune.pruner import Pruner, Separation
from growprune.ratios import Global, Speedup
from growprune.schedule import GReg1, GReg2, OneShot, Penalty, Phase, Schedule
from growprune.storage import load, save

__version__ = "0.1.0.dev0"

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
