"""Prune a network in Lightning's Trainer: handwritten digits, on a CPU. Needs `pip install lightning`.

python examples/lightning_loop.py
"""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import growprune as gp


class Prune(L.Callback):
    """Pushes what goes in the pruner's network, ends the fit when that is done, and is part of the checkpoints."""

    def __init__(self, pruner: gp.Pruner) -> None:
        self.pruner = pruner

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.pruner.detach()  # each fit makes its own optimizer
        self.pruner.attach(trainer.optimizers[0])

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop |= self.pruner.done

    def state_dict(self) -> dict[str, Any]:
        return self.pruner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pruner.load_state_dict(state_dict)


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


def trainer(epochs: int, *callbacks: L.Callback) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=list(callbacks), enable_checkpointing=False, **quiet
    )


@torch.no_grad()
def accuracy(net: nn.Module) -> str:
    return f"{100 * (net.eval()(x[1400:]).argmax(1) == y[1400:]).float().mean():.1f} %"


L.seed_everything(0)
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
y = torch.tensor(digits.target)
loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=64, shuffle=True)

module = Digits()
trainer(8).fit(module, loader)
print("trained", accuracy(module.net))

example = x[:1]
before = gp.measure(module.net, example)
pruner = gp.Pruner(module.net, example, schedule=gp.GReg1(delta_lambda=5e-3, ku=1, ks=44), ratios=0.75, scope="path")
module.train()  # accuracy() put it into evaluation mode, and Lightning leaves modes as they are
pushing = trainer(-1, Prune(pruner))  # as many epochs as it takes
pushing.fit(module, loader)
print(f"pushed {accuracy(module.net)}, {pruner.step_count} steps, {pushing.global_step} of the trainer's")

module.net = pruner.compact()
after = gp.measure(module.net, example)
fewer, smaller = gp.speedup(before, after), before.params / after.params
print(f"removed {accuracy(module.net)}, {fewer:.1f}x fewer MACs, {smaller:.1f}x smaller")

module.train()
trainer(8).fit(module, loader)
print("fine-tuned", accuracy(module.net))
