"""Prune a network in a training loop of one's own: handwritten digits, on a CPU.

python examples/loop.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import growprune as gp

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
y = torch.tensor(digits.target)
train, test = torch.arange(len(x))[:1400], torch.arange(len(x))[1400:]

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


def epoch(net: nn.Module, pruner: gp.Pruner | None = None) -> None:
    net.train()
    for batch in train[torch.randperm(len(train))].split(64):
        optimizer.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
        if pruner is not None and pruner.done:
            break


@torch.no_grad()
def accuracy(net: nn.Module) -> str:
    return f"{100 * (net.eval()(x[test]).argmax(1) == y[test]).float().mean():.1f} %"


for _ in range(8):
    epoch(model)
print("trained", accuracy(model))

example = x[:1]
before = gp.measure(model, example)
pruner = gp.Pruner(model, example, schedule=gp.GReg1(delta_lambda=5e-3, ku=1, ks=44), ratios=0.75, scope="path")
pruner.attach(optimizer)
while not pruner.done:
    epoch(model, pruner)
print(f"pushed {accuracy(model)}, {pruner.step_count} steps")

small = pruner.compact(optimizer=optimizer)
after = gp.measure(small, example)
fewer, smaller = gp.speedup(before, after), before.params / after.params
print(f"removed {accuracy(small)}, {fewer:.1f}x fewer MACs, {smaller:.1f}x smaller")

for _ in range(8):
    epoch(small)
print("fine-tuned", accuracy(small))
