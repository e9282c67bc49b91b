"""One thread a process: the tests' networks are too small to gain from more, and a busy machine would stall on it. And
the same random numbers in every test, whatever ran before it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def chance() -> None:
    torch.manual_seed(0)
