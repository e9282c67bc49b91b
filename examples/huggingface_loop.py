"""Prune a transformer in Hugging Face's Trainer: digits, on a CPU. Needs `pip install transformers accelerate`.

python examples/huggingface_loop.py
"""

import tempfile
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

import growprune as gp


class Prune(TrainerCallback):
    """Pushes what goes in the pruner's network, ends the training when that is done, and is part of the checkpoints."""

    def __init__(self, pruner: gp.Pruner) -> None:
        self.pruner = pruner

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.pruner.detach()  # from the optimizer of an earlier train()
        self.pruner.attach(optimizer)
        if state.global_step:  # resume_from_checkpoint
            self.pruner.load_state_dict(torch.load(self.file(args, state)))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= self.pruner.done

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            torch.save(self.pruner.state_dict(), self.file(args, state))

    def file(self, args: Any, state: Any) -> str:
        return f"{args.output_dir}/checkpoint-{state.global_step}/pruner.pt"


def train(net: nn.Module, folder: str, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
    args = TrainingArguments(
        folder, per_device_train_batch_size=64, learning_rate=2e-3, lr_scheduler_type="constant", use_cpu=True,
        dataloader_pin_memory=False, disable_tqdm=True, report_to="none", logging_strategy="no", save_strategy="no",
        **arguments,
    )  # fmt: skip
    trainer = Trainer(net, args, train_dataset=data[:1400], callbacks=list(callbacks))
    trainer.train()
    return trainer


@torch.no_grad()
def accuracy(net: nn.Module) -> str:
    return f"{100 * (net.eval()(x[1400:]).logits.argmax(1) == y[1400:]).float().mean():.1f} %"


torch.manual_seed(0)
digits = load_digits()
x: Tensor = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
y = torch.tensor(digits.target)
data: Any = [{"pixel_values": image, "labels": label} for image, label in zip(x, y, strict=True)]
config = ViTConfig(
    image_size=8, patch_size=2, num_channels=1, hidden_size=48, intermediate_size=192, num_hidden_layers=2,
    num_attention_heads=4, num_labels=10,
)  # fmt: skip
model = ViTForImageClassification(config)

with tempfile.TemporaryDirectory() as folder:
    train(model, folder, num_train_epochs=12)
    print("trained", accuracy(model))

    example = {"pixel_values": x[:1]}
    before = gp.measure(model, example)
    # AdamW shrinks a weight by lr·λ a step: at this learning rate a λ of 1 would take thousands of steps
    schedule = gp.GReg1(delta_lambda=0.05, tau=15, ku=1, ks=50)
    pruner = gp.Pruner(model, example, schedule=schedule, ratios=0.75)
    trainer = train(model, folder, Prune(pruner), max_steps=pruner.total_steps)
    print(f"pushed {accuracy(model)}, {pruner.step_count} steps, {trainer.state.global_step} of the trainer's")

    small = pruner.compact()
    after = gp.measure(small, example)
    fewer, smaller = gp.speedup(before, after), before.params / after.params
    print(f"removed {accuracy(small)}, {fewer:.1f}x fewer MACs, {smaller:.1f}x smaller")

    train(small, folder, num_train_epochs=6)
    print("fine-tuned", accuracy(small))
