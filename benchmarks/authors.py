"""Does the authors' own code make the same weights as ours, step by step?

    git clone https://github.com/MingSun-Tse/Regularization-Pruning theirs
    python benchmarks/authors.py --theirs theirs [--out results/authors.json]

Their pruner and ours prune our ResNet56 at a ratio of 0.9, each its own copy, on the same random images: after every
step of theirs ours does the same, and all λ, weights, momenta and statistics of batch norm are compared; then the
weights that are left after removal, and those after five steps of fine-tuning. λ grows to 1 in 32 steps. GReg-1 and
GReg-2 by filter, GReg-1 by single weights; in float64, for in float32 a ReLU that rounding tips over makes a step
another. Three minutes on one CPU core.

Nothing of theirs is changed: their own parser reads the options. The stand-ins are `.cuda()`, which does nothing; a
log, a checkpoint and a plot that keep nothing; a test that leaves batch norm in eval mode; and a module of another
pruner's that is not installed. What differs, whatever ours is told, is allowed for (`ways`) so as to see the rest: at
the same Ks theirs does one step more; GReg-2 ends picking at λ ≥ τ' (ours, as the paper: λ > τ'), and picks by the
norms of Ku steps before pushing begins (ours: when it begins; "later" says what that changes). Two more do not show
here: at removal ours folds what removed filters sent onward into batch norm's statistics, which training does not read;
and theirs ends pushing early where what is pushed has a thousandth of the size of what is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import runpy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from separation import keep
from torch import Tensor, nn

import growprune as gp
from growprune.weights import restore

BASE = Path(__file__).parents[1] / "results/paper/bases/resnet56-cifar10-4b5d2ed8a1013590.safetensors"
FILES = ("main.py", "option.py", "pruner/meta_pruner.py", "pruner/reg_pruner.py", "model/resnet_cifar10.py")
BATCH, TUNED = 8, 5
LR, TUNING_LR, DECAY = 0.01, 0.01, 5e-4
KU, KS, DELTA, DELTA_PICK, TAU_PICK = 2, 10, 2.0**-4, 2.0**-6, 2.0**-4
"""Powers of two, so that sums of λ are exact in float32, in which theirs adds."""
SHARED = (
    f"-a resnet56 --dataset cifar10 --wd {DECAY} --lr_prune {LR} --batch_size_prune {BATCH} "
    f"--update_reg_interval {KU} --stabilize_reg_interval {KS} --reg_granularity_prune {DELTA}"
)


@dataclass(frozen=True)
class Way:
    """The same, said to each of the two."""

    name: str
    theirs: str
    schedule: gp.Schedule
    granularity: Literal["filter", "weight"] = "filter"


@dataclass(frozen=True, kw_only=True)
class PicksEarlier(gp.Schedule):
    """GReg-2 that picks when λ of picking grows for the last time; until pushing begins all have that λ still."""

    own: gp.GReg2

    @property
    def total_steps(self) -> int:
        return self.own.total_steps

    @property
    def pick_step(self) -> int:
        return self.own.pick_step - self.own.ku

    def at(self, step: int) -> gp.Penalty:
        penalty = self.own.at(step)
        return replace(penalty, kept=penalty.pruned) if penalty.phase is gp.Phase.PICK else penalty


def ways() -> tuple[Way, ...]:
    common: dict[str, Any] = {"delta_lambda": DELTA, "ku": KU, "ks": KS + 1}
    first = gp.GReg1(**common)
    second = gp.GReg2(**common, delta_lambda_pick=DELTA_PICK, tau_pick=TAU_PICK - DELTA_PICK / 2, gamma=1e-4)
    picking = f"--reg_granularity_pick {DELTA_PICK} --reg_upper_limit_pick {TAU_PICK}"
    filters, single = "[0,0.9,0.9,0.9,0]", "[0,0.9,0.9,0.9,0.9]"
    return (
        Way("GReg-1", f"--method GReg-1 --stage_pr {filters}", first),
        Way("GReg-2", f"--method GReg-2 --stage_pr {filters} {picking}", PicksEarlier(own=second)),
        Way("GReg-1, single weights", f"--method GReg-1 --stage_pr {single} --wg weight", first, "weight"),
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Images and labels, the same for both."""
    random = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 32, 32, generator=random, dtype=torch.double)
    return images, torch.randint(10, (BATCH,), generator=random)


# -- theirs ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_a_cpu(place: Path, dtype: torch.dtype = torch.double) -> Iterator[None]:
    """Their modules can be imported, what they put on a GPU stays where it is, and new layers are of this precision."""

    def stay(self: Any, *_: Any, **__: Any) -> Any:
        return self

    with mock.patch.object(torch.Tensor, "cuda", stay), mock.patch.object(nn.Module, "cuda", stay), imported(place):
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def imported(place: Path) -> Iterator[None]:
    """Their modules can be imported, and print nothing."""
    with mock.patch.object(sys, "path", [str(place), *sys.path]), contextlib.redirect_stdout(io.StringIO()):
        yield


def leave_in_eval_mode(net: nn.Module) -> tuple[float, float, float]:
    net.eval()
    return 0.0, 0.0, 0.0


def their_pruner(place: Path, options: str, net: nn.Module, batches: Any, test: Any = leave_in_eval_mode) -> Any:
    sys.modules.setdefault("pathos.multiprocessing", mock.MagicMock())  # of a pruner that is not used here
    from model import is_single_branch  # theirs
    from pruner import pruner_dict  # theirs

    with mock.patch.object(sys, "argv", ["main.py", *options.split()]):
        args = runpy.run_path(str(place / "option.py"))["args"]

    def nothing(*_: Any, **__: Any) -> None:
        """Into no log, and into no file."""

    printer = SimpleNamespace(logprint=nothing, accprint=nothing, netprint=nothing)
    passer = SimpleNamespace(
        test=lambda _, net, *__: test(net), test_loader=(), train_loader=batches, criterion=nn.CrossEntropyLoss(),
        save=nothing, args=args, is_single_branch=is_single_branch,
    )  # fmt: skip
    made = pruner_dict[args.method].Pruner(net, args, SimpleNamespace(log_printer=printer, ExpID=""), passer)
    made._plot_mag_ratio = nothing  # a picture of every layer at the first iteration
    return made


def their_network(net: nn.Module) -> nn.Module:
    """Their ResNet56 with our weights: the names are the same."""
    from model import model_dict  # theirs

    made: nn.Module = model_dict["resnet56"](num_classes=10)
    made.load_state_dict(net.state_dict())
    return made


# -- side by side ------------------------------------------------------------------------------------------------------


class Beside:
    """Batches for their loop. When it asks for the next one it has done a step: ours follows, and both are compared."""

    def __init__(self, way: Way, net: nn.Module) -> None:
        self.way, self.ours = way, net
        self.theirs = their_network(net)
        self.optimizer, self.pruner = pushed(way, net)
        self.their_pruner: Any = None
        self.steps = 0
        self.phase = gp.Phase.PUSH  # of the step before
        self.later: dict[str, Any] = {}
        self.course: list[dict[str, float]] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in itertools.count(self.steps):
            yield batch(step)
            self.follow()

    def follow(self) -> None:
        """Our step, after theirs."""
        self.steps += 1
        if self.pruner.done:
            return
        penalty = self.pruner.penalty()
        if penalty.phase is gp.Phase.PUSH and self.phase is gp.Phase.PICK:
            now = gp.Pruner(self.ours, batch(0)[0][:1], gp.OneShot(), ratios=0.9)
            self.later = self.picks(now.masks())
        self.phase = penalty.phase
        trained(self.ours.train(), self.optimizer, batch(self.steps - 1))
        momenta = [
            {name: optimizer.state[p]["momentum_buffer"] for name, p in net.named_parameters()}
            for net, optimizer in ((self.theirs, self.their_pruner.optimizer), (self.ours, self.optimizer))
        ]
        self.course.append(
            {
                "lambda": penalty.pruned,
                "lambda differs": self.penalties(penalty),
                "weights": apart(weights(self.theirs), weights(self.ours)),
                "momentum": apart(*momenta),
                "statistics": apart(statistics(self.theirs), statistics(self.ours)),
            }
        )

    def penalties(self, penalty: gp.Penalty) -> float:
        """The largest difference of any λ that was in force, whether a layer loses something or not."""
        masks, losing, worst = self.pruner.masks(), set(self.pruner.separation()), 0.0
        for name, theirs in self.their_pruner.reg.items():
            theirs = theirs if self.way.granularity == "weight" else theirs[:, 0]
            ours = torch.zeros_like(theirs)
            if name in losing:
                kept = masks[name].flatten() & (penalty.phase is not gp.Phase.PICK)
                ours = torch.where(kept, penalty.kept, penalty.pruned)
            worst = max(worst, float((theirs - ours).abs().max()))
        return worst

    def picks(self, masks: dict[str, Tensor]) -> dict[str, Any]:
        """How many go, and by layer how many go in one of the two only."""
        ours = {name: set((~mask).flatten().nonzero().flatten().tolist()) for name, mask in masks.items()}
        theirs = {name: {int(i) for i in gone} for name, gone in self.their_pruner.pruned_wg.items()}
        differ = {name: len(ours.get(name, set()) ^ gone) for name, gone in theirs.items()}
        return {
            "theirs": sum(map(len, theirs.values())),
            "ours": sum(map(len, ours.values())),
            "differ": {name: count for name, count in differ.items() if count},
        }


def pushed(way: Way, net: nn.Module) -> tuple[torch.optim.Optimizer, gp.Pruner]:
    """Our pruner at work, as in a loop of one's own."""
    optimizer = sgd(net, LR)
    pruner = gp.Pruner(net, batch(0)[0][:1], way.schedule, ratios=0.9, granularity=way.granularity)
    pruner.attach(optimizer)
    return optimizer, pruner


def sgd(net: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr, momentum=0.9, weight_decay=DECAY)


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, images: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    F.cross_entropy(net(images[0]), images[1]).backward()
    optimizer.step()


def weights(net: nn.Module) -> dict[str, nn.Parameter]:
    return dict(net.named_parameters())


def statistics(net: nn.Module) -> dict[str, Tensor]:
    return {name: b for name, b in net.named_buffers() if name.rpartition(".")[2] in ("running_mean", "running_var")}


@torch.no_grad()
def apart(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> float:
    """The largest difference in any tensor, as a share of the largest value in it."""
    assert theirs.keys() == ours.keys()
    shares = [(a - ours[name]).abs().max() / a.abs().max().clamp(min=1e-30) for name, a in theirs.items()]
    return float(f"{float(torch.stack(shares).max()):.3g}")


def after(beside: Beside, theirs: nn.Module) -> dict[str, float]:
    """What is left of each, and what some steps of fine-tuning with a new optimizer make of it."""
    ours, masks = beside.pruner.compact(), getattr(beside.their_pruner, "mask", {})
    zero(theirs, masks)
    found = {"weights": apart(weights(theirs), weights(ours))}
    pair = [(net.train(), sgd(net, TUNING_LR)) for net in (theirs, ours)]
    for step in range(TUNED):
        for net, optimizer in pair:
            trained(net, optimizer, batch(beside.steps + step))
        zero(theirs, masks)
    return found | {"weights, fine-tuned": apart(weights(theirs), weights(ours))}


@torch.no_grad()
def zero(net: nn.Module, masks: dict[str, Tensor]) -> None:
    """As their main.py does it before fine-tuning and after each of its steps."""
    for name, mask in masks.items():
        net.get_submodule(name).get_parameter("weight").mul_(mask)


def compared(place: Path, way: Way) -> dict[str, Any]:
    net = restore("resnet56", 10, str(BASE)).double()
    with on_a_cpu(place):
        beside = Beside(way, net)
        theirs = beside.their_pruner = their_pruner(place, f"{SHARED} {way.theirs}", beside.theirs, beside)
        small = theirs.prune()
        beside.follow()
        found: dict[str, Any] = {"way": way.name, "picks": beside.picks(beside.pruner.masks())}
        found |= {"later": beside.later} if beside.later else {}
        found["steps"] = {"theirs": beside.steps, "ours": len(beside.course)}
        found["after"] = after(beside, small)
    names = [name for name in beside.course[0] if name != "lambda"]
    worst = {name: max(step[name] for step in beside.course) for name in names}
    return found | {"worst": worst, "course": beside.course}


def growths(delta: float, tau: float) -> int:
    """After how many growths λ > τ, if it is summed up in float32 as theirs is."""
    total, count = torch.zeros((), dtype=torch.float32), 0
    while total <= tau:
        total, count = total + delta, count + 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--theirs", type=Path, required=True, help="a checkout of the authors' repository")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not (args.theirs / "pruner" / "reg_pruner.py").is_file():
        parser.error(f"--theirs: no pruner/reg_pruner.py in {args.theirs}; give a checkout of the authors' repository")
    runs = []
    for way in ways():
        runs.append(one := compared(args.theirs.resolve(), way))
        print(one["way"])
        for key, value in one.items():
            if key not in ("way", "course"):
                print(f"  {key}: {value}")
    summed = growths(1e-4, 1.0)
    print(f"growths of λ by 1e-4 to τ = 1, in their sums: {summed}")
    files = {name: hashlib.sha256((args.theirs / name).read_bytes()).hexdigest()[:16] for name in FILES}
    keep(args.out, benchmark="authors", theirs=files, growths=summed, runs=runs)


if __name__ == "__main__":
    main()
