"""One thread a process: the tests' networks are too small to gain from more, and a busy machine would stall on it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
