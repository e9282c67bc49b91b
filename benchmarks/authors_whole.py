"""What accuracy does the authors' own code come to, from our base network?

    git clone https://github.com/MingSun-Tse/Regularization-Pruning theirs
    python benchmarks/authors_whole.py --theirs theirs --data-dir data [--work F] [--out results/authors-whole.json]

Their pruner, their ResNet56 with the weights of our base network, and real CIFAR-10, for all of GReg-1 at a ratio of
0.9 as the paper has it at Ku = 1: λ to 1 in 10,000 steps, 5,000 more, then 120 epochs of fine-tuning as in their
main.py (SGD with momentum; 0.01, from epoch 60 on 0.001, from 90 on 0.0001), in batches of 256 and in PyTorch's
float32. (Theirs stops growing λ sooner if what is pushed comes to a thousandth of what is kept: `steps` in the result
tells.) Ours from the same network, with the same filters gone, is in results/paper. Not timed yet.

Of their pruner one thing is changed, beside the stand-ins of authors.py (log, checkpoints, plot): indices of the
filters that go are Python's numbers, not a tensor on the GPU, in which theirs looks up each filter, one by one, at
every growth of λ. Images come from memory, padded, cropped and mirrored on the device as ours are; they are scaled by
CIFAR-10's own mean and deviation, as our base network knows them (their loader takes ImageNet's). What was done is kept
in `--work` after pushing and every ten epochs; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from authors import BASE, DECAY, imported, on_a_cpu, sgd, their_network, their_pruner
from torch import Tensor, nn

from growprune import data
from growprune.data import Resident, batches
from growprune.outcome import environment
from growprune.weights import restore

TUNING = {0: 1e-2, 60: 1e-3, 90: 1e-4}
OPTIONS = (
    "--method GReg-1 -a resnet56 --dataset cifar10 --stage_pr [0,0.9,0.9,0.9,0] --wd {decay} "
    "--batch_size_prune {batch} --update_reg_interval 1 --stabilize_reg_interval {ks} --reg_granularity_prune {delta}"
)


class Cifar:
    """The training images in epochs without end, as their loader gives them: shuffled, cropped and mirrored at random,
    the last batch as large as what is left."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.set = data.load("cifar10", args.data_dir)
        self.source = Resident(self.set, args.device, args.batch)
        self.test = self.set.test.to(args.device)
        self.device, self.batch, self.images = args.device, args.batch, args.images or len(self.set.train)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        places = 2 * self.set.pad + 1
        drawn = [torch.randint(limit, (self.images,)) for limit in (places, places, 2)]
        for rows in torch.stack([torch.randperm(self.images), *drawn], 1).to(self.device).split(self.batch):
            x, y = self.source.batch_of(rows)
            yield self.source.normalized(x).contiguous(), y

    @torch.no_grad()
    def accuracy(self, net: nn.Module) -> float:
        """On the test set, in percent."""
        was, right = net.training, 0
        net.eval()
        for x, y in batches(self.test, self.device, 1000):
            right += int((net(self.source.normalized(x).contiguous()).argmax(1) == y).sum())
        net.train(was)
        return 100 * right / len(self.test.y)


def pushed(args: argparse.Namespace, images: Cifar) -> tuple[nn.Module, dict[str, Any]]:
    """Their whole `prune()`: the small network, and the accuracy at each of their tests, before and after removal."""
    net = their_network(restore("resnet56", 10, str(BASE))).to(args.device)
    course: list[float] = []
    last: dict[str, float] = {}

    def test(tested: nn.Module) -> tuple[float, float, float]:
        course.append(images.accuracy(tested))
        return course[-1], 0.0, 0.0

    options = OPTIONS.format(decay=DECAY, batch=args.batch, ks=args.ks, delta=args.delta)
    pruner = their_pruner(args.theirs, options, net, images, test)
    pruner.pruned_wg = {name: [int(i) for i in gone] for name, gone in pruner.pruned_wg.items()}
    remove = pruner._prune_and_build_new_model

    def removing() -> None:
        last["before_removal"] = images.accuracy(pruner.model)
        remove()

    pruner._prune_and_build_new_model = removing
    start = time.perf_counter()
    small = pruner.prune()
    took = time.perf_counter() - start
    left = {name: len(kept) for name, kept in pruner.kept_wg.items()}
    found = {"tests": course, **last, "after_removal": images.accuracy(small), "left": left}
    return small, found | {"steps": pruner.total_iter + 1, "seconds": took}


def tuned(args: argparse.Namespace, images: Cifar, net: nn.Module, state: dict[str, Any]) -> list[float]:
    """Their main.py's loop. The accuracy after every epoch."""
    optimizer, course = sgd(net, TUNING[0]), list(state.get("course", []))
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    for epoch in range(len(course), args.epochs):
        for group in optimizer.param_groups:
            group["lr"] = TUNING[max(first for first in TUNING if first <= epoch)]
        net.train()
        for x, y in images:
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        course.append(images.accuracy(net))
        if epoch % 10 == 9:
            keep(args, net=net, pushed=state["pushed"], optimizer=optimizer.state_dict(), course=course)
    return course


def asked(args: argparse.Namespace) -> dict[str, Any]:
    return {key: getattr(args, key) for key in ("batch", "ks", "delta", "epochs", "images")}


def keep(args: argparse.Namespace, **state: Any) -> None:
    if args.work:
        args.work.mkdir(parents=True, exist_ok=True)
        torch.save({"asked": asked(args), "chance": torch.get_rng_state(), **state}, args.work / "new.pt")
        os.replace(args.work / "new.pt", args.work / "state.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--theirs", type=Path, required=True, help="a checkout of the authors' repository")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="where cifar10 lies, or is downloaded to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, help="what was done so far, to go on from")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--ks", type=int, default=5000)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--images", type=int, help="train on so many of them only, to see whether it works")
    args = parser.parse_args()
    args.theirs = args.theirs.resolve()
    torch.manual_seed(0)
    images = Cifar(args)
    near = imported(args.theirs) if args.device.startswith("cuda") else on_a_cpu(args.theirs, torch.float32)
    with contextlib.ExitStack() as stack:
        stack.enter_context(near)
        state: dict[str, Any] = {}
        if args.work and (args.work / "state.pt").is_file():  # our own file, of this command
            state = torch.load(args.work / "state.pt", map_location=args.device, weights_only=False)
            if state["asked"] != asked(args):
                parser.error(f"--work: {args.work} was begun with {state['asked']}")
            torch.set_rng_state(state["chance"].cpu())
        else:
            net, found = pushed(args, images)
            state = {"net": net, "pushed": found}
            keep(args, **state)
        course = tuned(args, images, state["net"], state)
    result = state["pushed"] | {"course": course, "final": course[-1], "best": max(course)}
    print({name: value for name, value in result.items() if isinstance(value, float)})
    if args.out:
        found = {"benchmark": "authors-whole", "asked": asked(args), **result}
        args.out.write_text(json.dumps(found | {"environment": environment(args.device, 1)}) + "\n")


if __name__ == "__main__":
    main()
