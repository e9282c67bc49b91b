"""Pruning in other people's trainers: the code of docs/loops.md as it stands there, and the examples.

Each test is skipped where its package is not installed; none of them is among our own dependencies.
"""

from __future__ import annotations

import copy
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import growprune as gp

ROOT = Path(__file__).parents[1]
DOC = ROOT / "docs" / "loops.md"
pytestmark = [
    pytest.mark.skipif(not DOC.exists(), reason="a source archive has no docs"),
    pytest.mark.filterwarnings("ignore"),  # the frameworks' own
    pytest.mark.filterwarnings("error:.*(compact|pruner|is trained by)"),  # ours
]
SCHEDULE = gp.GReg1(delta_lambda=0.05, ku=1, ks=5)
X, Y = torch.randn(160, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(160) % 10


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10),
    )  # fmt: skip


def loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(X, Y), batch_size=16)


def code(package: str, first: str) -> str:
    """The block of docs/loops.md that has this line, where the package is installed."""
    pytest.importorskip(package)
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL) if f"\n{first}" in f"\n{b}"]
    return str(block)


def run(block: str, folder: Path, **given: Any) -> dict[str, Any]:
    scope: dict[str, Any] = {"example": X[:1], "schedule": SCHEDULE, "folder": str(folder), "loader": loader()}
    scope |= {"__name__": "loops"} | given
    exec(compile(block, str(DOC), "exec"), scope)
    return scope


def assert_pruned(pruner: gp.Pruner, small: nn.Module, tuned: bool = True) -> None:
    """Every step was counted, what goes was pushed far, and is gone; the smaller network was trained on, if `tuned`."""
    assert pruner.step_count == pruner.total_steps == 25
    assert all(layer.pruned < 0.7 * layer.kept for layer in pruner.separation().values())
    fresh = list(pruner.compact().parameters())
    assert [p.shape for p in small.parameters()] == [p.shape for p in fresh]
    assert sum(p.numel() for p in fresh) < sum(p.numel() for p in pruner.model.parameters())
    assert all(torch.equal(p.cpu(), q.cpu()) != tuned for p, q in zip(small.parameters(), fresh, strict=True))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    for name, t in one.state_dict().items():
        assert torch.equal(t, theirs[name]), name


def elsewhere(model: nn.Module) -> nn.Module:
    """As in a new process, which knows nothing of the weights so far."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    return model


def lightning_module() -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Module()


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where it leaves its notes
    block = code("lightning", "import lightning as L\n\nimport growprune as gp\n\n\nclass Prune")
    scope = run(block, tmp_path, module=lightning_module())
    assert_pruned(scope["pruner"], scope["module"].net)


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "precision": "bf16-mixed"}]
)
def test_lightning_goes_on(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = code("lightning", "import lightning as L\n\nimport growprune as gp\n\n\nclass Prune")
    prune = run(block, tmp_path, module=lightning_module())["Prune"]
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    def fit(module: Any, checkpoint: Path | None = None) -> Any:
        pruner = gp.Pruner(module.net, X[:1], schedule=SCHEDULE)
        keep = ModelCheckpoint(tmp_path / "kept", every_n_epochs=1, save_top_k=-1, filename="{epoch}")
        trainer = L.Trainer(max_epochs=-1, callbacks=[prune(pruner)] + [keep] * (checkpoint is None), **options)
        trainer.fit(module, loader(), ckpt_path=checkpoint)
        assert pruner.step_count == trainer.global_step == pruner.total_steps
        return module

    whole = fit(lightning_module())
    assert_same(whole, fit(elsewhere(lightning_module()), tmp_path / "kept" / "epoch=1.ckpt"))


def test_fabric(tmp_path: Path) -> None:
    scope = run(code("lightning", "fabric = L.Fabric"), tmp_path, model=net())
    assert_pruned(scope["pruner"], scope["small"], tuned=False)
    gp.Pruner(net(), X[:1], schedule=SCHEDULE).load_state_dict(torch.load(tmp_path / "pushed.ckpt")["pruner"])
    pruner = gp.Pruner(scope["model"], X[:1], schedule=SCHEDULE)
    pruner.attach(scope["optimizer"])  # wrapped
    scope["optimizer"].step()
    assert pruner.step_count == 1


def bert() -> Any:
    import transformers

    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=10, **size)
    return transformers.BertForSequenceClassification(config)


WORDS = torch.randint(20, (160, 8), generator=torch.Generator().manual_seed(0))
TEXTS = [{"input_ids": words, "labels": y} for words, y in zip(WORDS, Y, strict=True)]
HARD = gp.GReg1(delta_lambda=250.0, tau=5000, ku=1, ks=5)  # AdamW, at a learning rate of 5e-5


def test_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    given = {"model": bert(), "data": TEXTS, "example": {"input_ids": WORDS[:1]}, "schedule": HARD}
    block = code("transformers", "from transformers import Trainer")
    scope = run(block, tmp_path, **given)
    whole, pruner = scope["model"], scope["pruner"]
    assert_pruned(pruner, scope["small"])

    again, arguments = elsewhere(bert()), copy.copy(scope["args"])
    second = gp.Pruner(again, given["example"], schedule=HARD)
    trainer = scope["Trainer"](again, arguments, train_dataset=TEXTS, callbacks=[scope["Prune"](second)])
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert second.step_count == trainer.state.global_step == 25
    assert_same(whole, again)


def test_hugging_face_with_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    model = bert()
    pruner = gp.Pruner(model, {"input_ids": WORDS[:1]}, schedule=SCHEDULE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner.attach(optimizer)
    args = transformers.TrainingArguments(str(tmp_path), max_steps=25, gradient_accumulation_steps=2, max_grad_norm=0.1)
    transformers.Trainer(model, args, train_dataset=TEXTS, optimizers=(optimizer, None)).train()
    assert_pruned(pruner, pruner.compact(), tuned=False)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = code("accelerate", "from accelerate import Accelerator")
    from accelerate.state import AcceleratorState

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    AcceleratorState._reset_state(True)
    scope = run(block, tmp_path, model=net())
    assert_pruned(scope["pruner"], scope["small"], tuned=False)
    assert type(gp.load(tmp_path / "small.safetensors", net)) is nn.Sequential


def test_accelerate_goes_on(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def push(model: nn.Module, stop: int | None = None, load: bool = False) -> nn.Module:
        accelerator = accelerate.Accelerator(cpu=True)
        pruner = gp.Pruner(model, X[:1], schedule=SCHEDULE)
        wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        pruner.attach(optimizer)
        accelerator.register_for_checkpointing(pruner)
        if load:
            accelerator.load_state(str(tmp_path / "kept"))
            assert pruner.step_count == 10
        while not pruner.done:
            accelerator.backward(F.cross_entropy(wrapped(X[:16]), Y[:16]))
            optimizer.step()
            optimizer.zero_grad()
            if pruner.step_count == stop:
                accelerator.save_state(str(tmp_path / "kept"))
        return model

    whole = push(net(), stop=10)
    assert_same(whole, push(elsewhere(net()), load=True))


def test_ignite(tmp_path: Path) -> None:
    block = code("ignite", "from ignite.engine")
    scope = run(block, tmp_path, model=net())
    pruner, whole = scope["pruner"], scope["model"]
    assert_pruned(pruner, scope["small"])
    assert scope["trainer"].state.iteration == 25
    going_on = block.replace(
        "trainer.run(", f"Checkpoint.load_objects(parts, torch.load('{tmp_path}/checkpoint_20.pt'))\ntrainer.run("
    )
    assert_same(whole, run(going_on, tmp_path / "again", model=elsewhere(net()))["model"])


def test_skorch(tmp_path: Path) -> None:
    scope = run(code("skorch", "from skorch import"), tmp_path, model=net(), data=(X.numpy(), Y.numpy()))
    assert_pruned(scope["prune"].pruner, scope["small"])


def test_fastai(tmp_path: Path) -> None:
    block = code("fastai", "from fastai.learner import Learner")
    from fastai.data.core import DataLoaders

    scope = run(block, tmp_path, model=net(), loaders=DataLoaders(loader(), loader()))
    assert_pruned(scope["pruner"], scope["small"])
    with pytest.raises(gp.GrowpruneError, match=r"not fastai\.optimizer\.OptimWrapper"):
        gp.Pruner(scope["model"], X[:1]).attach(scope["sgd"](list(scope["model"].parameters())))


@pytest.mark.parametrize(("package", "name"), [("lightning", "lightning_loop"), ("transformers", "huggingface_loop")])
def test_an_example(
    package: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs, and its callback is the one that the page shows."""
    pytest.importorskip(package)
    pytest.importorskip("accelerate" if package == "transformers" else package)
    script = ROOT / "examples" / f"{name}.py"
    callback = re.search(r"class Prune.*?(?=\n\n\n)", script.read_text(), re.DOTALL)
    assert callback is not None
    assert callback[0] in DOC.read_text()
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    found = dict(re.findall(r"^(trained|pushed|removed|fine-tuned) ([\d.]+) %", capsys.readouterr().out, re.MULTILINE))
    assert len(found) == 4
    assert float(found["removed"]) > float(found["pushed"]) - 2
    assert float(found["fine-tuned"]) > float(found["trained"]) - 2
