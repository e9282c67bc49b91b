"""Small networks for the tests, and the plain training loop they share."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TwoConvs(nn.Module):
    """Two batch-normalised convolutions, flattened into a linear layer: 4 places of each channel are read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 5, 3, bias=True)
        self.bn2 = nn.BatchNorm2d(5)
        self.fc = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.bn1(self.conv1(x)))
        x = torch.tanh(self.bn2(self.conv2(x)))
        out: Tensor = self.fc(x.flatten(1))
        return out


class MLP(nn.Module):
    """Three linear layers, smooth everywhere."""

    def __init__(self, sizes: tuple[int, int, int, int] = (5, 7, 6, 3)) -> None:
        super().__init__()
        self.fc1 = nn.Linear(sizes[0], sizes[1])
        self.fc2 = nn.Linear(sizes[1], sizes[2])
        self.fc3 = nn.Linear(sizes[2], sizes[3])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))
        return out


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same float64 network every time; batch norm's scale and shift are not left at their dull 1 and 0."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = build().double()
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.uniform_(module.bias, -0.5, 0.5)
    return net


def batch(shape: tuple[int, ...], classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random inputs and targets, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.double)
    return x, torch.randint(classes, shape[:1], generator=generator)


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """One step as any loop has it."""
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
