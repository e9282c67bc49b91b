"""A training step on a CPU: what a plain loop computes, a guard that keeps weights whole, and the choice of the fastest
way with the clock in our hands. The same on a GPU: test_gpu_step.py."""

from __future__ import annotations

import gc
import hashlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import growprune as gp
from growprune import choosing, convolutions, evaluation, models, origin, outcome, several, train
from growprune import step as steps
from growprune.choosing import choose, determinism
from growprune.config import Config, Prune, Train
from growprune.data import Dataset, Normal, Resident, load
from growprune.distributed import World
from growprune.errors import StoppedError
from growprune.feeds import FromFiles, FromMemory, Images
from growprune.reading import Part
from growprune.report.progress import Progress
from growprune.run import Folder
from growprune.step import Choice, NonFiniteError, Step, compiled, mixed, put, repeated
from growprune.streaming import Streamed
from growprune.weights import restore

IMAGES, BATCH, SIZE, CLASSES = 40, 6, 8, 4
RATES = [0.1 / (i + 1) for i in range(24)]


def dataset() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (IMAGES, SIZE, SIZE, 3), dtype=torch.uint8, generator=generator)
    part = Part(x, torch.arange(IMAGES) % CLASSES)
    return Dataset("noise", part, part, tuple("abcd"), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), pad=1, flip=True)


class Small(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 6, 3, padding=1)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.fc(self.drop(F.relu(self.conv2(x)).mean((2, 3))))
        return out


def fresh(build: Callable[[], nn.Module] = Small) -> nn.Module:
    torch.manual_seed(0)
    return build()


def sgd(net: nn.Module, **how: Any) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), **{"lr": 0.0, "momentum": 0.9, "weight_decay": 5e-4, **how})


def made(net: nn.Module, rates: Sequence[float] = RATES, fused: bool = False, **how: Any) -> Step:
    """A step over the noise. `fused`: with the update and the guard that a GPU has, which do not ask the host; torch
    can do that on a CPU too."""
    optimizer = sgd(net, lr=torch.tensor(0.0), fused=True) if fused else sgd(net)
    feed = FromMemory(Resident(dataset(), "cpu", BATCH), 3, 1, how.get("world") or World(), "cpu")
    step = Step(net, optimizer, feed, rates, device="cpu", **how)
    if fused:
        step.cuda, step.all_rates = True, torch.tensor(rates)
    return step


def parts(step: Step) -> dict[str, Tensor]:
    """Everything that a step may change."""
    found: dict[str, Tensor] = {**dict(step.net.named_parameters()), **dict(step.net.named_buffers())}
    found |= {f"momentum {i}": s["momentum_buffer"] for i, s in enumerate(step.optimizer.state.values())}
    found |= {name: getattr(step, name) for name in ("count", "good", "bad", "lost")}
    return found


def state(step: Step) -> dict[str, Tensor]:
    """All that, copied."""
    return {name: t.detach().clone() for name, t in parts(step).items()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert list(a) == list(b)
    return [name for name in a if not torch.equal(a[name], b[name])]


# -- a plain loop -----------------------------------------------------------------------------------------------------


def by_hand(number: int, resident: Resident, set_: Dataset) -> tuple[Tensor, Tensor]:
    """A batch as the plan has it, made image by image."""
    epoch, place = divmod(number, resident.steps)
    assert isinstance(set_.train, Part)
    images, labels = [], []
    for index, top, left, flip in resident.plan(3, 1, epoch)[place].tolist():
        image = F.pad(set_.train.x[index].permute(2, 0, 1), [set_.pad] * 4)[:, top : top + SIZE, left : left + SIZE]
        images.append(image.flip(2) if flip else image)
        labels.append(set_.train.y[index])
    return Normal(set_, "cpu")(torch.stack(images)), torch.stack(labels)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("pruned", [False, True])
def test_twenty_steps_are_those_of_a_plain_loop(smoothing: float, pruned: bool) -> None:
    """Bit for bit: weights, statistics, momentum, the sum of losses. Six steps an epoch, so it goes through three."""
    schedule = gp.GReg1(delta_lambda=0.1, ku=2, ks=4)
    step, plain = made(fresh(), smoothing=smoothing), fresh()
    optimizer, total = sgd(plain), 0.0
    pruners = []
    if pruned:
        for net, each in ((step.net, step.optimizer), (plain, optimizer)):
            pruners.append(gp.Pruner(net, torch.zeros(1, 3, SIZE, SIZE), schedule))
            pruners[-1].attach(each)
    set_, resident = dataset(), Resident(dataset(), "cpu", BATCH)
    assert resident.steps == 6
    for number in range(20):
        step(number)
        x, y = by_hand(number, resident, set_)
        optimizer.param_groups[0]["lr"] = RATES[number]
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(x), y, label_smoothing=smoothing)
        loss.backward()
        optimizer.step()
        total += float(loss.detach())
    other = made(plain)
    for s, t in zip(other.optimizer.state.values(), optimizer.state.values(), strict=True):
        s["momentum_buffer"] = t["momentum_buffer"]
    assert set(differing(state(step), state(other))) == {"count", "good", "lost"}
    assert int(step.count) == int(step.good) == 20
    assert float(step.lost) == pytest.approx(total, rel=1e-12)
    if pruned:
        assert pruners[0].step_count == 20
        assert torch.equal(pruners[0]._state.pruned, pruners[1]._state.pruned)


def test_the_feed_of_one_process_of_three_is_its_third() -> None:
    source = Resident(dataset(), "cpu", BATCH)
    whole = FromMemory(source, 3, 1, World(), "cpu")
    for number in (0, 5, 6, 13):
        whole.prepare(number)
        thirds = []
        for rank in range(3):
            feed = FromMemory(source, 3, 1, World(rank, 3), "cpu")
            feed.prepare(number)
            thirds.append(feed(torch.tensor([number])))
        for one, three in zip(whole(torch.tensor([number])), zip(*thirds, strict=True), strict=True):
            assert torch.equal(one, torch.cat(three))


def test_the_learning_rate_is_the_steps_own() -> None:
    step = made(fresh(), rates=[0.3, 0.2, 0.1])
    seen = []
    for number in (0, 1, 2, 3, 9, 1):
        step(number)
        seen.append(step.optimizer.param_groups[0]["lr"])
    assert seen == [0.3, 0.2, 0.1, 0.1, 0.1, 0.2]


def test_the_learning_rate_on_the_device_is_the_steps_own() -> None:
    """Looked up by the counter there; trials of a short stage run past the table's end."""
    step = made(fresh(), rates=[0.3, 0.2, 0.1], fused=True)
    seen = []
    for number in range(5):
        step(number)
        seen.append(float(step.optimizer.param_groups[0]["lr"]))
    assert seen == pytest.approx([0.3, 0.2, 0.1, 0.1, 0.1])
    step.start(1)
    step(1)
    assert float(step.optimizer.param_groups[0]["lr"]) == pytest.approx(0.2)


def test_layouts_and_precisions_compute_the_same() -> None:
    results = []
    for choice in (Choice(), Choice(layout="channels_last"), Choice("bf16"), Choice("bf16", "channels_last")):
        step = made(fresh())
        step(0)
        step.use(choice)  # in the midst of things: momentum comes along
        momentum = step.optimizer.state[step.net.conv2.weight]["momentum_buffer"]  # type: ignore[union-attr, index]
        assert momentum.is_contiguous() != (choice.layout == "channels_last")
        assert float(momentum.abs().sum()) > 0
        for number in range(1, 6):
            step(number)
        results.append(torch.cat([p.detach().flatten() for p in step.net.parameters()]))
    start = torch.cat([p.detach().flatten() for p in fresh().parameters()])
    moved = float((results[0] - start).norm())
    assert float((results[1] - results[0]).norm()) < 1e-5 * moved
    for low in results[2:]:
        assert 1e-5 * moved < float((low - results[0]).norm()) < 0.05 * moved


# -- networks of all kinds --------------------------------------------------------------------------------------------


class Outputs(NamedTuple):
    logits: Tensor
    aux: Tensor | None


class WithAux(nn.Module):
    """An auxiliary head, whose output comes after the logits, as in GoogLeNet and Inception."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.aux, self.form = Small(), nn.Linear(3, CLASSES), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.body(x), self.aux(x.mean((2, 3))))


def forms() -> dict[str, Callable[[Tensor, Tensor], Any]]:
    from torchvision.models.googlenet import GoogLeNetOutputs
    from torchvision.models.inception import InceptionOutputs

    return {
        "tuple": lambda logits, aux: (logits, aux),
        "named tuple": Outputs,
        "googlenet": lambda logits, aux: GoogLeNetOutputs(logits, aux, None),
        "inception": InceptionOutputs,
        "dict": lambda logits, aux: {"out": logits, "aux": aux},
        "object": lambda logits, aux: SimpleNamespace(logits=logits, aux=aux),
    }


@pytest.mark.parametrize("form", ["tuple", "named tuple", "googlenet", "inception", "dict", "object"])
def test_auxiliary_outputs_are_left_out(form: str) -> None:
    step, plain = made(fresh(lambda: WithAux(forms()[form]))), made(fresh())
    assert isinstance(step.net, WithAux)
    before = step.net.aux.weight.detach().clone()
    for number in range(4):
        step(number)
        plain(number)
    assert not differing(dict(step.net.body.named_parameters()), dict(plain.net.named_parameters()))  # type: ignore[arg-type]
    assert torch.equal(step.net.aux.weight, before), "no gradient, no decay"
    assert float(step.lost) == float(plain.lost)


def test_frozen_parameters_stay() -> None:
    step = made(fresh())
    net = fresh()
    net.conv1.weight.requires_grad_(False)  # type: ignore[union-attr]
    frozen = made(net)
    before = net.conv1.weight.detach().clone()  # type: ignore[union-attr, operator]
    with frozen.left_as_found():
        frozen.once()
    for number in range(3):
        step(number)
        frozen(number)
    assert torch.equal(net.conv1.weight, before)  # type: ignore[arg-type]
    assert not torch.equal(net.fc.weight, fresh().fc.weight)  # type: ignore[union-attr, arg-type]
    assert len(frozen.optimizer.state) == len(step.optimizer.state) - 1
    with pytest.raises(gp.GrowpruneError, match="frozen"):
        made(net.requires_grad_(False))


def test_chance_follows_from_the_steps_number() -> None:
    """Dropout is the same in step 5 of a run whatever was drawn before, and another in any other step, stage, seed or
    process."""

    def weights(number: int, seeds: tuple[int, int] = (0, 0), noise: int = 0) -> Tensor:
        step = made(fresh(lambda: Small(0.5)), seeds=seeds)
        step.feed.prepare(0)
        torch.manual_seed(noise)
        step.seed(number)
        step.optimizer.param_groups[0]["lr"] = 0.1
        step.once()
        return step.net.fc.weight.detach().clone()  # type: ignore[union-attr, operator]

    found = weights(5)
    assert torch.equal(weights(5, noise=9), found)
    for other in (weights(6), weights(5, seeds=(1, 0)), weights(5, seeds=(0, 1))):
        assert not torch.equal(other, found)
    step = made(fresh())
    drawn = []
    for rank in (0, 1):
        step.world = World(rank, 2)
        step.seed(5)
        drawn.append(torch.rand(4))
    assert not torch.equal(drawn[0], drawn[1])


def test_a_resumed_run_drops_what_the_uninterrupted_one_drops() -> None:
    whole = made(fresh(lambda: Small(0.5)))
    for number in range(5):
        whole(number)
    middle = state(whole)
    for number in range(5, 10):
        whole(number)
    again = made(fresh(lambda: Small(0.5)))
    with torch.no_grad():
        for name, t in parts(again).items():
            t.copy_(middle[name])
    for number in range(5, 10):
        again(number)
    assert not differing(state(again), state(whole))


def test_numbers_are_mixed_well() -> None:
    digest = hashlib.sha256(b"7,1,20000,3").digest()
    assert mixed(7, 1, 20000, 3) == int.from_bytes(digest[:8], "little") // 2
    assert mixed(0, 1, 2) == 2907050525928808288
    many = {mixed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(many) == 1000
    assert all(0 <= number < 2**63 for number in many)
    assert mixed(1, 11) != mixed(11, 1) != mixed(111)


# -- gradients --------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """Two parameters whose gradient autograd hands out as one tensor, and one whose gradient it never writes out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(3, CLASSES)), nn.Parameter(torch.randn(3, CLASSES))
        self.scale = nn.Parameter(torch.ones(1, 3, SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) @ (self.left + self.right) + self.scale.sum()


def test_gradients_lie_as_backward_lays_them() -> None:
    net = fresh(Shared).to(memory_format=torch.channels_last)
    loss = net(torch.randn(2, 3, SIZE, SIZE)).square().sum()
    found = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    assert found[0] is found[1]
    assert found[2].stride() == (0, 0, 0, 0)
    put(net.parameters(), found)
    mine = [p.grad for p in net.parameters()]
    for p in net.parameters():
        p.grad = None
    loss.backward()
    for p, grad in zip(net.parameters(), mine, strict=True):
        assert grad is not None
        assert p.grad is not None
        assert torch.equal(grad, p.grad)
        assert grad.stride() == p.grad.stride() == p.stride()
    assert len({grad.data_ptr() for grad in mine if grad is not None}) == 3


def test_gradients_that_lie_well_are_not_copied() -> None:
    """A dimension of one may have any stride: of 1x1 kernels, of depthwise ones."""
    weights = [nn.Parameter(torch.randn(shape)) for shape in ((4, 8, 1, 1), (4, 1, 3, 3), (2,))]
    grads = [torch.empty_strided((4, 8, 1, 1), (8, 1, 8, 8)), torch.empty_strided((4, 1, 3, 3), (9, 1, 3, 1))]
    assert all(grad.stride() != weight.stride() for grad, weight in zip(grads, weights, strict=False))
    put(weights, [*grads, None])
    assert weights[0].grad is grads[0]
    assert weights[1].grad is grads[1]
    assert weights[2].grad is None


def test_held_weights_stay_zero_in_the_fused_update() -> None:
    """Their mask leaves the gradient in another order than channels last; the fused update goes by place in memory."""
    results = []
    for fused in (False, True):
        net = fresh()
        gp.Pruner(net, torch.zeros(1, 3, SIZE, SIZE), gp.OneShot(), ratios=0.5, granularity="weight").compact()
        step = made(net, fused=fused)
        step.use(Choice(layout="channels_last"))
        for number in range(5):
            step(number)
        results.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.equal(results[0] == 0, results[1] == 0)
    assert int((results[0] == 0).sum()) > 200
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


# -- the guard --------------------------------------------------------------------------------------------------------


class Poison(torch.autograd.Function):
    """The same forward, this instead of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, instead: float) -> Tensor:
        ctx.instead = instead
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        grad.view(-1)[0] = ctx.instead
        return grad, None


class Sick(Small):
    """Falls ill when told to: in its loss, or in one number of one gradient."""

    where, value = "", math.nan

    def forward(self, x: Tensor) -> Tensor:
        weight = self.fc.weight
        if self.where == "gradient":
            weight = Poison.apply(weight, self.value)
        out = F.linear(F.relu(self.conv2(F.relu(self.bn1(self.conv1(x))))).mean((2, 3)), weight, self.fc.bias)
        if self.where == "class":  # its images' loss is infinite, yet no gradient is
            return out.index_fill(1, torch.tensor([1]), -math.inf)
        return out * self.value if self.where == "loss" else out


ILLS = [
    ("loss", math.nan),
    ("loss", math.inf),
    ("class", math.inf),
    ("gradient", math.nan),
    ("gradient", math.inf),
    ("gradient", -math.inf),
]


@pytest.mark.parametrize(("where", "value"), ILLS)
def test_a_step_that_is_not_finite_changes_nothing(where: str, value: float) -> None:
    net = fresh(Sick)
    step = made(net)
    pruner = gp.Pruner(net, torch.zeros(1, 3, SIZE, SIZE), gp.GReg1(delta_lambda=0.1, ku=2))
    pruner.attach(step.optimizer)
    step.start(7)
    for number in (7, 8, 9):
        step(number)
    before = state(step)
    net.where, net.value = where, value  # type: ignore[assignment]
    with pytest.raises(NonFiniteError, match="not finite at step 10") as caught:
        step(10)
    assert caught.value.step == 10
    assert isinstance(caught.value, gp.GrowpruneError)
    changed = differing(state(step), before)
    assert set(changed) <= {"bad", "bn1.running_mean", "bn1.running_var", "bn1.num_batches_tracked"}
    assert pruner.step_count == 3
    with pytest.raises(NonFiniteError, match="at step 10"):
        step.check()


@pytest.mark.parametrize(("where", "value"), ILLS)
def test_on_a_device_no_step_after_it_changes_anything(where: str, value: float) -> None:
    """There the host hears of it later: the fused update sees the flag, and so do all that follow."""
    net = fresh(Sick)
    step = made(net, fused=True)
    step.start(7)
    for number in (7, 8, 9):
        step(number)
    step.check()
    before = state(step)
    net.where, net.value = where, value  # type: ignore[assignment]
    step(10)
    net.where = ""  # type: ignore[assignment]
    for number in (11, 12):
        step(number)
    now = state(step)
    kept = [name for name in before if not name.startswith("bn1.running") and "num_batches" not in name]
    moved = differing({name: before[name] for name in kept}, {name: now[name] for name in kept})
    assert set(moved) - {"lost"} == {"count", "bad"}
    with pytest.raises(NonFiniteError, match="at step 10"):
        step.check()


def test_everything_is_left_as_it_was_found() -> None:
    step = made(fresh(lambda: Small(0.5)))
    for number in range(3):
        step(number)
    before = state(step)
    with step.left_as_found():
        for _ in range(3):
            step.once()
        step.bad.fill_(1)
        assert set(before) - set(differing(state(step), before)) <= {"good"}
    assert not differing(state(step), before)
    failing = made(fresh(Sick))
    before = state(failing)
    failing.net.where = "loss"  # type: ignore[assignment]
    with pytest.raises(NonFiniteError), failing.left_as_found():
        failing.once()
    assert not differing(state(failing), before)


def test_a_step_is_gone_when_nobody_has_it() -> None:
    """Its graph holds much of a GPU's memory, which the next stage needs: no waiting for the garbage collector."""
    gc.disable()
    try:
        step = made(fresh())
        step.use(Choice(layout="channels_last"))
        step(0)
        watched = weakref.ref(step)
        del step
        assert watched() is None
    finally:
        gc.enable()


# -- compilation ------------------------------------------------------------------------------------------------------


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """torch.compile without its slow half: the graphs it finds are counted and run as they are."""
    found: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(len(inputs))
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda what, **how: compile_(what, backend=backend, **how))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):  # whoever raised it before
        yield found
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_many_networks_are_compiled_in_one_process(compilations: list[int]) -> None:
    """torch stops compiling a function after eight variants, and says so in a log only. Networks alike share one."""
    alive = []
    for hidden in (*range(3, 13), 3, 5):

        def build(hidden: int = hidden) -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Linear(192, hidden), nn.Linear(hidden, CLASSES))

        step, plain = made(fresh(build)), made(fresh(build))
        step.use(Choice(compiled=True))
        for each in (step, plain):
            each(0)
        assert not differing(state(step), state(plain))
        alive.append(step)
    assert len(compilations) == 10


class Block(nn.Module):
    """What a network is made of, over and over."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x).relu()


def stacked(*widths: int) -> nn.Module:
    """Blocks of these widths, a plain layer before each change."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(192, widths[0])]
    for before, width in zip((widths[0], *widths), widths, strict=False):
        layers += [Block(width)] if before == width else [nn.Linear(before, width), Block(width)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))


def test_a_network_of_blocks_is_compiled_block_by_block() -> None:
    """The outermost ones of a kind that comes again and again; a network without such is compiled as a whole."""
    assert Counter(type(m).__name__ for m in repeated(models.fresh("resnet56", 10))) == {"BasicBlock": 27}
    assert Counter(type(m).__name__ for m in repeated(models.fresh("torchvision:resnet50", 10))) == {"Bottleneck": 16}
    assert repeated(models.fresh("vgg19", 10)) == []
    assert repeated(stacked(4, 4)) == [], "two are not many"
    assert len(repeated(nn.Sequential(stacked(4, 4), stacked(4)))) == 3, "wherever they are"


def steps_alike(step: Step, plain: Step, compilations: list[int], count: int) -> None:
    """Compiled into so many graphs, all in the first step, it computes what it computes otherwise."""
    step.use(Choice(compiled=True))
    for number in range(2):
        step(number)
        plain(number)
        assert not differing(state(step), state(plain))
        assert len(compilations) == count


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
def test_blocks_alike_are_compiled_once(compilations: list[int]) -> None:
    """One graph for either width; what is in one loop with them is not compiled."""
    step, plain = made(fresh(lambda: stacked(4, 4, 4, 6, 6))), made(fresh(lambda: stacked(4, 4, 4, 6, 6)))
    steps_alike(step, plain, compilations, 2)
    assert all("forward" not in vars(block) for block in step.blocks), "outside a step it is called as it was"
    assert step.net._compiled_call_impl is None
    step.use(Choice())
    assert not step.blocks


class Around(nn.Module):
    """Blocks, and layers before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(192, 4), nn.BatchNorm1d(4)
        self.middle = nn.Sequential(*(Block(4) for _ in range(3)))
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.norm(self.first(x.flatten(1))).relu()))
        return out


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
def test_what_is_around_the_blocks_is_compiled_too(compilations: list[int]) -> None:
    """One graph before them, one for the blocks, one after; a forward of the block's own is put back, and what the
    network was compiled to."""
    step, plain = made(fresh(Around)), made(fresh(Around))
    block = step.net.middle[0]
    block.forward = own = block.forward
    step.net.compile()
    before = step.net._compiled_call_impl
    steps_alike(step, plain, compilations, 3)
    assert block.forward is own
    assert step.net._compiled_call_impl is before


@pytest.mark.parametrize("fails", [0, 2, 3])
def test_what_cannot_be_compiled_is_told_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    net, tried = Around(), []

    def compile_(what: Any, **how: Any) -> Any:
        tried.append(what)
        if len(tried) > fails:
            raise RuntimeError("not on this Python")
        return what

    monkeypatch.setattr(torch, "compile", compile_)
    with pytest.raises(RuntimeError, match="not on this Python"), compiled(net, repeated(net)):
        pass
    assert not any("forward" in vars(module) for module in net.modules())
    assert net._compiled_call_impl is None
    assert net(torch.zeros(2, 192)).shape == (2, CLASSES)


def test_what_fails_inside_is_called_as_it_was_afterwards() -> None:
    net = Around()
    with pytest.raises(ZeroDivisionError), compiled(net, repeated(net)):
        raise ZeroDivisionError
    assert not any("forward" in vars(module) for module in net.modules())
    assert net._compiled_call_impl is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
def test_a_process_of_many_networks_compiles_them_all(compilations: list[int]) -> None:
    """Of blocks too, more than the eight after which PyTorch would stop."""
    for width in range(2, 13):
        step = made(fresh(lambda width=width: stacked(width, width, width)))
        step.use(Choice(compiled=True))
        step(0)
    assert len(compilations) == 11


def test_a_block_in_two_places_is_one() -> None:
    block = Block(4)
    assert len(repeated(nn.Sequential(nn.Sequential(block), nn.Sequential(block), Block(4), Block(4)))) == 3


# -- which way is fastest ---------------------------------------------------------------------------------------------


class Trial:
    """A Step whose times are given: by (precision, layout, kernels?, compiled?), or what it raises."""

    def __init__(self, times: dict[tuple[str, str, bool, bool], Any]) -> None:
        self.times, self.tried, self.net = times, [], nn.Conv2d(3, 3, 3)  # type: ignore[var-annotated]
        self.graph: Any = None
        self.count = torch.zeros(1, dtype=torch.long)
        self.feed = made(fresh()).feed

    def use(self, choice: Choice) -> None:
        assert self.graph is None, "the last trial's graph is still there"
        self.key = choice.precision, choice.layout, bool(choice.kernels), choice.compiled
        self.tried.append(self.key)

    def capture(self) -> None:
        self.graph = object()

    def milliseconds(self) -> float:
        found = self.times[self.key]
        if isinstance(found, BaseException):
            raise found
        return float(found)


def asked(**how: str) -> Any:
    return SimpleNamespace(**{"precision": "auto", "layout": "auto", "compile": "auto", "kernels": "auto", **how})


LAST, PLAIN = "channels_last", "contiguous"
NO_ROOM = torch.cuda.OutOfMemoryError("CUDA out of memory")
TIMES: dict[tuple[str, str, bool, bool], Any] = {
    ("bf16", LAST, False, False): 5.0,
    ("fp32", LAST, False, False): 9.0,
    ("bf16", PLAIN, False, False): 7.0,
    ("fp32", PLAIN, False, False): 8.0,
    ("bf16", LAST, True, False): 4.0,
    ("bf16", LAST, True, True): 3.0,
    ("bf16", LAST, False, True): 3.5,
    ("fp32", PLAIN, False, True): 2.0,
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One layer is always faster with our kernels; gives whether it was asked for by rule."""
    seen: list[bool] = []

    def faster(net: nn.Module, example: Tensor, by_rule: bool) -> dict[str, str]:
        assert example.dtype == torch.bfloat16
        assert example.shape == (BATCH, 3, SIZE, SIZE)
        seen.append(by_rule)
        return {"": "few"}

    monkeypatch.setattr(convolutions, "faster", faster)
    return seen


def test_the_fastest_way_is_chosen(kernels: list[bool]) -> None:
    trial, said = Trial(TIMES), []  # type: ignore[var-annotated]
    best = choose(trial, asked(), 100, said.append)  # type: ignore[arg-type]
    assert best == Choice("bf16", LAST, False, {"": "few"}, 4.0)
    assert trial.tried == [
        ("bf16", LAST, False, False),
        ("fp32", LAST, False, False),
        ("bf16", PLAIN, False, False),
        ("bf16", LAST, False, False),  # as weights lie while layers are timed
        ("bf16", LAST, True, False),
    ]
    assert not said
    assert kernels == [False]
    assert "4.00 ms a step" in str(best)
    assert Choice(**best.to_json()) == best


@pytest.mark.parametrize(
    ("changed", "right"),
    [
        ({("bf16", LAST, True, False): 6.0}, ("bf16", LAST, False)),
        ({("bf16", PLAIN, False, False): 3.0}, ("bf16", PLAIN, False)),
        ({("fp32", LAST, False, False): 1.0}, ("fp32", LAST, False)),
        ({("fp32", LAST, False, False): 4.9, ("fp32", PLAIN, False, False): 1.0}, ("fp32", PLAIN, False)),
        ({("bf16", LAST, False, False): NO_ROOM, ("bf16", LAST, True, False): NO_ROOM}, ("fp32", PLAIN, False)),
        ({("bf16", LAST, True, False): NO_ROOM}, ("bf16", LAST, False)),
        ({("bf16", LAST, True, False): RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")}, ("bf16", LAST, False)),
        ({("bf16", PLAIN, False, False): RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")}, ("bf16", LAST, True)),
        ({("fp32", LAST, False, False): RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")}, ("bf16", LAST, True)),
        ({("bf16", LAST, False, False): RuntimeError("no bfloat16 here")}, ("fp32", PLAIN, False)),
    ],
)
def test_whichever_it_is(kernels: list[bool], changed: dict[Any, Any], right: tuple[str, str, bool]) -> None:
    """Also if some of them do not fit into the GPU's memory, or do not work."""
    best = choose(Trial({**TIMES, **changed}), asked(), 100, print)  # type: ignore[arg-type]
    assert (best.precision, best.layout, bool(best.kernels)) == right


def test_between_two_trials_a_signal_is_heeded(kernels: list[bool]) -> None:
    trial, asked_to_stop = Trial(TIMES), iter([False, False, True])

    def heed() -> None:
        if next(asked_to_stop):
            raise StoppedError(7)

    with pytest.raises(StoppedError):
        choose(trial, asked(), 100, print, heed)  # type: ignore[arg-type]
    assert len(trial.tried) == 2
    job: Any = SimpleNamespace(world=World(), settled=True, stopping=False, safe=5)
    train.Job.heed(job)
    job.stopping = True
    with pytest.raises(StoppedError, match="step 5"):
        train.Job.heed(job)
    job.settled = False  # there is something to save first
    train.Job.heed(job)


@pytest.mark.parametrize(
    ("fixed", "right"),
    [
        ({"precision": "fp32"}, ("fp32", PLAIN, False)),
        ({"layout": PLAIN}, ("bf16", PLAIN, False)),
        ({"precision": "fp32", "layout": LAST}, ("fp32", LAST, False)),
        ({"kernels": "off"}, ("bf16", LAST, False)),
        ({"kernels": "on"}, ("bf16", LAST, True)),
    ],
)
def test_what_is_asked_for_stays(kernels: list[bool], fixed: dict[str, str], right: tuple[str, str, bool]) -> None:
    slower = {("bf16", LAST, True, False): 9.0} if fixed.get("kernels") == "on" else {}
    trial = Trial({**TIMES, **slower})
    best = choose(trial, asked(**fixed), 100, print)  # type: ignore[arg-type]
    assert (best.precision, best.layout, bool(best.kernels)) == right
    for place, name in enumerate(("precision", "layout")):
        if name in fixed:
            assert {key[place] for key in trial.tried} == {fixed[name]}
    assert bool(kernels) == ("bf16" in right and LAST in right and fixed.get("kernels") != "off")


def test_compilation_is_tried_where_it_pays(kernels: list[bool]) -> None:
    enough = round(choosing.WORTH_COMPILING * 1e3 / 4.0)
    for count, pays in ((enough - 1, False), (enough + 1, True)):
        trial, said = Trial(TIMES), []  # type: ignore[var-annotated]
        best = choose(trial, asked(), count, said.append)  # type: ignore[arg-type]
        assert best.compiled == pays == (trial.tried[-1][3])
        assert bool(said) == pays
    assert "3.00 ms a step instead of 4.00" in said[0]
    slower = Trial({**TIMES, ("bf16", LAST, True, True): 4.5})
    assert not choose(slower, asked(), enough + 1, print).compiled  # type: ignore[arg-type]
    assert choose(slower, asked(compile="on"), 1, print).compiled, "it was asked for"  # type: ignore[arg-type]
    assert not choose(Trial(TIMES), asked(compile="off"), 10**9, print).compiled  # type: ignore[arg-type]


def test_where_nothing_can_be_compiled_it_goes_on_without(kernels: list[bool]) -> None:
    said: list[str] = []
    trial = Trial({**TIMES, ("bf16", LAST, True, True): RuntimeError("Failed to find C compiler.\nAnd more.")})
    best = choose(trial, asked(), 10**9, said.append)  # type: ignore[arg-type]
    assert best == Choice("bf16", LAST, False, {"": "few"}, 4.0)
    assert said == ["torch.compile cannot be used here: Failed to find C compiler."]
    trial.graph = None
    with pytest.raises(gp.GrowpruneError, match=r"--compile on.*Failed to find C compiler\.; try off"):
        choose(trial, asked(compile="on"), 1, print)  # type: ignore[arg-type]


@pytest.mark.parametrize("compile_", ["auto", "on", "off"])
def test_too_little_memory_is_said_in_one_line(kernels: list[bool], compile_: str) -> None:
    trial = Trial(dict.fromkeys(TIMES, NO_ROOM))
    with pytest.raises(gp.GrowpruneError, match="memory does not hold one training step: choose a smaller --batch"):
        choose(trial, asked(compile=compile_), 10**9, print)  # type: ignore[arg-type]
    assert not any(key[3] for key in trial.tried), "there is no point in compiling it"


def test_for_the_same_bits_the_clock_is_not_asked(kernels: list[bool]) -> None:
    """Two runs, or a run and its other half after a kill, must choose alike."""
    for fast in (0.1, 99.0):
        trial = Trial({key: 0.01 if key[3] else fast if key[0] == "fp32" or key[2] else 5.0 for key in TIMES})
        with determinism(True):
            best = choose(trial, asked(), 10**9, print)  # type: ignore[arg-type]
        assert (best.precision, best.layout, bool(best.kernels), best.compiled) == ("bf16", LAST, True, False)
    assert kernels == [True, True]
    with determinism(True):
        assert choose(Trial(TIMES), asked(compile="on"), 1, print).compiled  # type: ignore[arg-type]
        best = choose(Trial({**TIMES, ("bf16", LAST, True, False): NO_ROOM}), asked(), 1, print)  # type: ignore[arg-type]
    assert not best.kernels


def test_determinism_is_put_back() -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for wanted in (True, False):
            with determinism(wanted):
                assert torch.are_deterministic_algorithms_enabled() == cudnn.deterministic == wanted
                assert cudnn.benchmark != wanted
                assert not bool(torch.empty(10_000).isnan().all()), "new memory is not filled"
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            new = torch.empty(10_000)
            assert bool(new.isnan().all()), "as it was"
            new.zero_()  # for whoever gets this memory next
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(KeyError), determinism(True):
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    assert (cudnn.benchmark, cudnn.deterministic) == before


# -- images from files ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    root = tmp_path_factory.mktemp("pictures")
    chance = np.random.default_rng(0)
    for split, count in (("train", 7), ("test", 2)):
        for name in ("a", "b"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                picture = chance.integers(0, 256, (20, 24 + i, 3), np.uint8)  # of several sizes: to be streamed
                Image.fromarray(picture).save(root / split / name / f"{i}.png")
    return root


@pytest.mark.parametrize("kind", ["files", "workers", "memory"])
def test_a_feed_goes_on_where_another_stopped(folder: Path, kind: str) -> None:
    """At the end of an epoch and in the middle of one, prepared once or twice: the batches of the uninterrupted one."""

    def feed() -> FromFiles | FromMemory:
        if kind == "memory":
            return FromMemory(Resident(dataset(), "cpu", 12), 5, 2, World(), "cpu")
        return FromFiles(streamed, 5, 2, World(), "cpu")

    streamed = Streamed(load(str(folder), stream=True), "cpu", batch=4, workers=2 * (kind == "workers"), resolution=16)

    def batches(first: int, twice: bool = False) -> list[tuple[Tensor, Tensor]]:
        source, found = feed(), []
        assert source.epoch_steps == 3
        if twice:
            source.prepare(first)
        for number in range(first, 9):
            source.prepare(number)
            x, y = source(torch.tensor([number]))
            found.append((x.clone(), y.clone()))
        return found

    whole = batches(0)
    assert len({x.sum().item() for x, _ in whole}) == 9, "no two batches alike"
    for first in range(9):
        for (x, y), (u, v) in zip(batches(first, twice=first % 2 == 0), whole[first:], strict=True):
            assert torch.equal(x, u)
            assert torch.equal(y, v)
    streamed.close()


def test_a_feed_of_files_is_one_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the epochs, and when a step is prepared again: else the workers would read in vain, or stand idle."""
    streamed, begun = Streamed(load(str(folder), stream=True), "cpu", batch=4, workers=0, resolution=16), []
    epochs = streamed.epochs
    monkeypatch.setattr(streamed, "epochs", lambda *which: begun.append(which) or epochs(*which))
    feed = FromFiles(streamed, 5, 2, World(), "cpu")
    for number in (4, 4, 5, 6, 6, 7, 8, 9):
        feed.prepare(number)
    assert begun == [(5, 2, 4, 0, 1)]
    feed.prepare(4)
    assert len(begun) == 2


def test_stages_and_samples_share_the_workers(folder: Path) -> None:
    """Pruning and fine-tuning may have batches of different sizes, and samples another."""
    images = Images(Train(data=str(folder), batch=4, workers=1, resolution=16), "cpu", World())
    first, other = images.source(4), images.source(2)
    assert isinstance(first, Streamed)
    assert isinstance(other, Streamed)
    feed = images.feed(2, 1)
    feed.prepare(0)
    processes = list(first._workers._all)
    assert len(processes) == 1
    assert len(list(images.sample(5, count=2))) == 2
    assert len(list(images.tested(1000))) == 1
    feed.prepare(1)
    assert other._workers._all == processes
    first.close()


def test_a_feed_of_files_gives_its_batches_in_one_place(folder: Path) -> None:
    """A captured step reads where the first batch lay."""
    streamed = Streamed(load(str(folder), stream=True), "cpu", batch=4, workers=0, resolution=16)
    feed = FromFiles(streamed, 0, 0, World(), "cpu")
    count = torch.zeros(1, dtype=torch.long)
    places = set()
    for number in range(7):
        feed.prepare(number)
        places.add(tuple(t.data_ptr() for t in feed(count)))
    assert len(places) == 1


# -- side by side ------------------------------------------------------------------------------------------------------


def test_one_measurement_serves_the_same_network_in_as_long_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four runs the second is like the first; the third is longer, and worth compiling, the last has other batch
    norm. All of them say and keep what was chosen, and what the same bits cost."""
    gp.save(models.fresh("growprune.demo:network", 10), weights := tmp_path / "w.safetensors")
    asked: list[int] = []

    def chosen(step: Any, config: Any, left: int, say: Any, heed: Any) -> steps.Choice:
        asked.append(left)
        return steps.Choice("bf16", "channels_last", config.compile != "off" and left > 50_000, {}, 4.0)

    monkeypatch.setattr(choosing, "choose", chosen)
    found, measured = [], dict[Any, Any]()
    norms: list[Any] = ["batch", "batch", "batch", "fixed"]
    for ku, norm in zip((1, 1, 10, 1), norms, strict=True):
        config = Prune(
            model="growprune.demo:network", data="digits", weights=str(weights), device="cpu", threads=1, batch=64,
            prune_batch=64, ku=ku, seed=len(found), deterministic=True, prune_norm=norm,
        )  # fmt: skip
        progress, said = Progress(quiet=True), list[str]()
        monkeypatch.setattr(progress, "say", said.append)
        job = train.Job(config, None, "cpu", progress=progress, measured=measured)
        job.cuda, job.pruner = True, job.made_pruner()
        job.steps = job.pruner.total_steps
        step: Any = SimpleNamespace(net=job.net)
        found.append((job.chosen(job.stages[0], step).compiled, len(said), sorted(job.choices)))
    kept = ["prune", "prune, if not deterministic"]
    assert found == [(False, 2, kept), (False, 2, kept), (True, 2, kept), (False, 2, kept)]
    assert asked == [15_000, 15_000, 105_000, 105_000, 15_000, 15_000]  # with the same bits and without


@pytest.mark.parametrize(
    ("device", "shape", "size", "many"),
    [
        ("cpu", (3, 32, 32), 1, 1000),
        ("cuda", (3, 32, 32), 1, 5461),
        ("cuda:1", (3, 32, 32), 4, 1365),  # of four processes each needs one
        ("cuda", (3, 224, 224), 1, 1000),
    ],
)
def test_as_many_are_tested_at_once_as_a_gpu_likes(device: str, shape: tuple[int, ...], size: int, many: int) -> None:
    images: Any = SimpleNamespace(device=device, shape=shape, world=World(0, size))
    assert evaluation.test_batch(images) == many


def test_a_test_computes_as_its_step_does_or_exactly() -> None:
    """An epoch's test with the step's precision and kernels; results in float32, not in TF32."""
    asked = Train(model="growprune.demo:network", data="digits", device="cpu", threads=1, batch=64)
    job = train.Job(asked, None, "cpu")
    name, conv = next((n, m) for n, m in job.net.named_modules() if type(m) is nn.Conv2d)
    seen: set[tuple[type, torch.dtype, bool, bool]] = set()
    cudnn = torch.backends.cudnn

    def watch(module: nn.Module, _: Any, out: Tensor) -> None:
        seen.add((type(module), out.dtype, module.training, cudnn.allow_tf32))

    conv.register_forward_hook(watch)
    fast, exact = (convolutions.Aligned, torch.bfloat16, False, True), (nn.Conv2d, torch.float32, False, False)
    for precision, exactly, kind in (("bf16", False, fast), ("bf16", True, exact), ("fp32", False, exact)):
        job.step = SimpleNamespace(choice=Choice(precision, kernels={name: "aligned"}))  # type: ignore[assignment]
        seen.clear()
        job.test(job.net, exactly)
        assert seen == {kind}
        assert type(conv) is nn.Conv2d


def test_the_first_process_of_a_machine_reads_weights_before_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have to download them."""
    gp.save(models.fresh("growprune.demo:network", 10), weights := tmp_path / "w.safetensors")
    heard: list[str] = []

    @contextmanager
    def first_here(world: World) -> Iterator[None]:
        heard.append("begins")
        yield
        heard.append("ends")

    def restored(*given: Any) -> nn.Module:
        heard.append("reads")
        return restore(*given)

    monkeypatch.setattr("growprune.distributed.first_here", first_here)
    monkeypatch.setattr(origin, "restore", restored)
    asked = Prune(model="growprune.demo:network", data="digits", device="cpu", threads=1, weights=str(weights))
    train.Job(asked, None, "cpu")
    assert heard == ["begins", "reads", "ends"]


@pytest.mark.parametrize(("precision", "rounds"), [("fp32", True), ("ieee", False)])
def test_a_step_in_float32_rounds_as_pytorch_lets_it_or_not(precision: str, rounds: bool) -> None:
    """To TF32, on a GPU that can: forward and backward, and what was allowed before is allowed after."""
    asked = Train(model="growprune.demo:network", data="digits", device="cpu", threads=1, batch=64, precision=precision)  # type: ignore[arg-type]
    job = train.Job(asked, None, "cpu")
    seen: list[bool] = []
    conv = next(m for m in job.net.modules() if type(m) is nn.Conv2d)
    conv.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    conv.weight.register_hook(lambda _: seen.append(torch.backends.cudnn.allow_tf32))
    job.enter(job.stages[0], None)(0)
    assert seen == [rounds, rounds]
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("granularity", ["filter", "weight"])
@pytest.mark.parametrize("norm", ["batch", "fixed"])
def test_batch_norm_follows_the_weights_or_is_fixed_while_the_penalty_grows(
    tmp_path: Path, norm: Any, granularity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is tested, and leaves the stage, with the statistics that it was pushed with; then fine-tuning moves them."""
    net = models.fresh("growprune.demo:network", 10)
    gp.save(net, weights := tmp_path / "w.safetensors")
    first = {name: value for name, value in net.named_buffers() if "running" in name}
    estimated = list[nn.Module]()
    real = evaluation.estimated
    monkeypatch.setattr(evaluation, "estimated", lambda net, *rest: estimated.append(net) or real(net, *rest))
    job = train.Job(
        Prune(
            model="growprune.demo:network", data="digits", weights=str(weights), device="cpu", threads=1, batch=64,
            prune_batch=64, ku=1, delta_lambda=0.3, ks=2, epochs=1, prune_norm=norm, granularity=granularity,
        ),
        None,
        "cpu",
    )  # fmt: skip

    def moved() -> set[str]:
        """Statistics that are not the first ones, or the first ones of what is kept."""
        now = dict(job.net.named_buffers())
        return {name for name in first if not torch.isin(now[name], first[name]).all()}

    stages = Counter[str]()
    for _ in job.work():
        if not stages:
            estimated.clear()  # before the first step it is asked how the images are scaled
        stages[stage := job.stages[job.at].name] += 1
        fixed = norm == "fixed" and stage == "prune"
        modes = {type(module): module.training for module in job.net.modules()}
        assert (modes[nn.BatchNorm2d], modes[nn.Conv2d]) == (not fixed, True)
        if stage == "prune":
            assert moved() == (set() if fixed else set(first))
    assert stages == {"prune": 5, "finetune": 18}
    assert bool(estimated) == (norm == "batch")
    assert moved() == set(first)


def test_a_run_leaves_widths_in_multiples(tmp_path: Path) -> None:
    gp.save(models.fresh("growprune.demo:network", 10), weights := tmp_path / "w.safetensors")
    config = Prune(
        model="growprune.demo:network", data="digits", weights=str(weights), device="cpu", threads=1, batch=64,
        prune_batch=64, epochs=0, schedule="oneshot", multiple=8,
    )  # fmt: skip
    job = train.Job(config, None, "cpu")
    for _ in job.work():
        pass
    widths = {(16, 8), (32, 16)}
    assert (job.result["multiple"], {tuple(each) for each in job.result["widths"].values()} - {(8, 8)}) == (8, widths)
    assert {layer.out_channels for layer in job.net.modules() if isinstance(layer, nn.Conv2d)} == {8, 16, 32}


@pytest.mark.parametrize("granularity", ["filter", "weight"])
@pytest.mark.parametrize("norm", ["batch", "fixed"])
def test_fixed_statistics_are_left_to_what_is_fine_tuned(tmp_path: Path, norm: Any, granularity: str) -> None:
    """With statistics estimated anew the network would no longer be the one that was pushed."""
    gp.save(models.fresh("growprune.demo:network", 10), weights := tmp_path / "w.safetensors")
    shared: dict[str, Any] = {"model": "growprune.demo:network", "data": "digits", "weights": str(weights)}
    shared |= {"device": "cpu", "threads": 1, "batch": 64, "prune_batch": 64, "epochs": 0, "prune_norm": norm}
    shared["granularity"] = granularity
    for more, anew in (({"ku": 1, "delta_lambda": 0.3, "ks": 2}, norm == "batch"), ({"schedule": "oneshot"}, True)):
        job = train.Job(Prune(**shared, **more), None, "cpu")
        for _ in job.work():
            pass
        variances = torch.cat([value for name, value in job.net.named_buffers() if "running_var" in name])
        assert bool((variances == 1).all()) == (not anew), more  # as they were made
        assert job.result["prune_norm"] == norm


def test_a_vanished_filter_is_folded_as_it_was_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it sends on hangs on whether batch norm was fixed; where nothing was pushed, nothing was."""
    gp.save(models.fresh("growprune.demo:network", 10), weights := tmp_path / "w.safetensors")
    told, real = list[bool](), gp.Pruner.compact

    def compact(self: gp.Pruner, fixed_norm: bool, **rest: Any) -> nn.Module:
        told.append(fixed_norm)
        return real(self, fixed_norm=fixed_norm, **rest)

    monkeypatch.setattr(gp.Pruner, "compact", compact)
    for norm, schedule in (("batch", "greg1"), ("fixed", "greg1"), ("fixed", "oneshot")):
        plan = Prune(
            model="growprune.demo:network", data="digits", weights=str(weights), device="cpu", threads=1, batch=64,
            prune_batch=64, ku=1, delta_lambda=0.3, ks=0, epochs=0, prune_norm=norm, schedule=schedule,  # type: ignore[arg-type]
        )  # fmt: skip
        for _ in train.Job(plan, None, "cpu").work():
            pass
    assert told == [False, True, False]


def test_where_there_is_no_batch_norm_to_fix_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passing = nn.BatchNorm2d(1, track_running_stats=False)  # has no statistics but the batch's
    net = nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1), passing, nn.Sequential(nn.BatchNorm1d(1)))
    assert evaluation.fix_norms(net) == 2
    assert [module.training for module in net.modules()] == [True, True, False, True, True, False]

    gp.save(models.fresh("growprune.demo:network", 10), weights := tmp_path / "w.safetensors")
    plan = Prune(
        model="growprune.demo:network", data="digits", weights=str(weights), device="cpu", threads=1, batch=64,
        prune_batch=64, prune_norm="fixed",
    )  # fmt: skip
    for count in (0, 1):
        monkeypatch.setattr(evaluation, "fix_norms", lambda net, count=count: count)
        progress, said = Progress(quiet=True), list[str]()
        monkeypatch.setattr(progress, "say", said.append)
        job = train.Job(plan, None, "cpu", progress=progress)
        job.enter(job.stages[0], None)
        assert any("no batch norm in this network" in line for line in said) == (not count)


def test_side_by_side_on_the_gpu_that_was_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run itself may go on on any."""
    seen: list[tuple[str, str]] = []

    def job(config: Config, folder: Folder, device: str, **_: Any) -> None:
        seen.append((config.device, device))
        raise gp.GrowpruneError("enough")

    monkeypatch.setattr(several, "usable", lambda name: name)
    monkeypatch.setattr(several, "surroundings", lambda _: nullcontext())
    monkeypatch.setattr(several, "Job", job)
    plan = Train(model="resnet20", data="digits", device="cuda:1")
    with pytest.raises(gp.GrowpruneError, match="enough"):
        several.side_by_side([(plan, tmp_path / "run")], 2, quiet=True)
    assert seen == [("cuda", "cuda:1")]


def test_a_result_names_the_code_that_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the package's files: their names and what is in them."""
    assert outcome.environment("cpu", 1)["source"] == outcome.source()
    (package := tmp_path / "growprune" / "paper").mkdir(parents=True)
    monkeypatch.setattr(outcome, "__file__", str(package.parent / "outcome.py"))
    found = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2"), ("b.pyc", "2")):
        (package / name).write_text(text)
        found.append(outcome.source.__wrapped__())
    assert len(set(found)) == 3
    assert found[2] == found[3]


@pytest.mark.parametrize(("epochs", "tested_every", "wanted"), [
    (0.5, 1, 2), (38, 1, 38), (50, 1, 50), (50.1, 1, 50), (76.7, 1, 50), (99.9, 1, 50), (149, 1, 50), (608, 1, 50),
    (90, 2, 45), (30, 4, 7), (2_000, 3, 50),
])  # fmt: skip
def test_notes_while_pushing_are_fifty_at_most_and_even(epochs: float, tested_every: int, wanted: int) -> None:
    """At ends of epochs; besides there is one at the end of each phase, of which the last is the stage's."""
    stage, epoch = SimpleNamespace(name="prune"), 10
    job: Any = SimpleNamespace(
        config=SimpleNamespace(eval_every=tested_every), epoch=epoch, steps=round(epochs * epoch)
    )
    job.phase = lambda _: "push" if job.done < job.steps // 3 else "stabilize"
    job.over = lambda _: job.done == job.steps
    noted, phase = [], "push"
    for done in range(1, job.steps + 1):
        job.done = done
        if train.Job.due(job, stage, phase):
            noted.append(done)
        phase = job.phase(stage)
    assert {job.steps // 3, job.steps} <= {*noted}
    ends = [done for done in noted if done % (tested_every * epoch) == 0]
    assert wanted - 1 <= len({*ends} | {job.steps}) <= wanted + 1
    assert len(noted) <= wanted + 2
    gaps = np.diff([0, *ends])
    assert len(gaps) == 0 or max(gaps) - min(gaps) <= tested_every * epoch
