"""One training step: augment, forward, backward, penalty, update.

On a CPU, or with several processes, it runs eagerly. On a GPU the whole of it is captured once as a CUDA graph and
replayed; in which precision and layout, with which kernels, compiled or not, is found out by `choosing`.
Nothing in a step reads from the device, and whatever happens in it depends on the step's number alone: order of
images, crops, learning rate and random numbers are functions of (seed, stage, step), so there is no such state to save.

A step whose loss or gradient is not finite changes no weight, and no step after it does; `check` then names it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
import torch._dynamo  # optimizers load it, for a second: before signals are waited for, and processes have joined
import torch.nn.functional as F
from torch import Tensor, nn

from growprune import convolutions, distributed
from growprune.distributed import World
from growprune.errors import GrowpruneError
from growprune.pruner import Pruner
from growprune.running import all_digits, leaves


class NonFiniteError(GrowpruneError):
    """The loss or a gradient is NaN or infinite; `step` counts within the stage."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the loss or a gradient is not finite at step {step}")
        self.step = step


class Feed(Protocol):
    """Where a step's images come from."""

    def prepare(self, step: int) -> None:
        """On the host, before the step."""

    def __call__(self, count: Tensor) -> tuple[Tensor, Tensor]:
        """On the device, in the step: images (uint8) and labels."""
        ...

    def normalized(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The images as the network takes them."""
        ...


@dataclass(frozen=True)
class Choice:
    """How a step computes what it computes; `ms` is what it took when it was chosen."""

    precision: str = "fp32"
    layout: str = "contiguous"
    compiled: bool = False
    kernels: Mapping[str, str] = field(default_factory=dict)  # layer -> kind of convolution
    ms: float | None = None
    captured: bool = True  # as one CUDA graph, on a GPU

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        own = f"{len(self.kernels)} layers with other kernels than cuDNN's own" if self.kernels else ""
        parts = [self.precision, self.layout, "compiled" if self.compiled else "", own]
        return ", ".join(part for part in parts if part) + (f": {self.ms:.2f} ms a step" if self.ms else "")


class Step:
    """The training step of one network in one stage."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        feed: Feed,
        rates: Sequence[float],
        *,
        device: str,
        seeds: tuple[int, int] = (0, 0),
        smoothing: float = 0.0,
        world: World | None = None,
    ) -> None:
        self.net, self.optimizer, self.feed, self.rates = net, optimizer, feed, rates
        self.device, self.seeds, self.smoothing, self.world = device, seeds, smoothing, world or World()
        self.cuda = device.startswith("cuda")
        self.parameters = [p for p in net.parameters() if p.requires_grad]
        if not self.parameters:
            raise GrowpruneError("nothing to train: every parameter of this network is frozen")
        self.pruner: Pruner | None = None
        self.choice = Choice()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.trained: nn.Module = net
        self.blocks: list[nn.Module] = []  # that are compiled one by one
        self.loss_of: Callable[[Step, Tensor, Tensor], Tensor] = Step.loss  # unbound: no cycle keeps a graph alive
        self.all_rates = torch.tensor(rates or [0.0], device=device) if self.cuda else torch.zeros(0)
        self.random = torch.Generator(device) if self.cuda else None  # what the captured step draws from
        self.count = torch.zeros(1, dtype=torch.long, device=device)  # the next step's number in this stage
        self.good = torch.zeros((), device=device)  # steps whose numbers were all finite
        self.bad = torch.zeros((), device=device)  # 1 from the first step on that was not
        self.lost = torch.zeros((), dtype=torch.double, device=device)  # sum of losses since the last note
        for p in self.parameters:
            optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))

    # -- what a step computes --------------------------------------------------------------------------------------

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        low = self.choice.precision == "bf16"
        x = self.feed.normalized(x, torch.bfloat16 if low else torch.float32)
        last = self.choice.layout == "channels_last"
        x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        with torch.autocast(self.device.partition(":")[0], torch.bfloat16, enabled=low, cache_enabled=False):
            out = self.trained(x)
        logits = out if isinstance(out, Tensor) else next(iter(leaves(out)))  # auxiliary heads come after
        return F.cross_entropy(logits.float(), y, label_smoothing=self.smoothing)

    def once(self) -> None:
        """One step, eagerly, or into the graph that is being captured."""
        x, y = self.feed(self.count)
        digits = all_digits() if self.choice.precision == "ieee" else nullcontext()
        with digits, convolutions.swapped(self.net, self.choice.kernels), compiled(self.net, self.blocks):
            loss = self.loss_of(self, x, y)
            if self.world.size > 1:  # DistributedDataParallel averages gradients on their way into .grad
                self.optimizer.zero_grad()
                loss.backward()
            else:
                put(self.parameters, torch.autograd.grad(loss, self.parameters, allow_unused=True))
        loss = distributed.mean(self.world, loss.detach())
        self.guard(loss)
        if self.cuda:
            at = self.count.clamp(max=len(self.all_rates) - 1)  # trials may go past the end of a short stage
            self.optimizer.param_groups[0]["lr"].copy_(self.all_rates.index_select(0, at)[0])
        self.optimizer.step()
        self.count.add_(1)
        self.lost.add_(loss)

    @torch.no_grad()
    def guard(self, loss: Tensor) -> None:
        """Find out whether all gradients are finite, and see to it that the update is not done if not: on a GPU the
        fused optimizer skips it, without telling the host; on a CPU this raises."""
        norms = torch._foreach_norm([p.grad for p in self.parameters if p.grad is not None])
        norm = torch.stack([n.float() for n in norms]).sum() + loss
        self.bad.copy_(torch.maximum(self.bad, (~norm.isfinite()).float()))
        self.good.add_(1 - self.bad)
        if self.cuda:
            self.optimizer.found_inf = self.bad  # type: ignore[attr-defined]
        else:
            self.check()

    def check(self) -> None:
        """Raise if a step was not finite; waits for the device."""
        if bool(self.bad):
            raise NonFiniteError(int(self.good))

    # -- doing it ----------------------------------------------------------------------------------------------------

    def __call__(self, step: int) -> None:
        """Do step number `step` of the stage."""
        self.feed.prepare(step)
        self.seed(step)
        if self.graph is not None:
            self.graph.replay()
            if self.pruner is not None:
                self.pruner.advance()
            return
        if not self.cuda:
            self.optimizer.param_groups[0]["lr"] = self.rates[min(step, len(self.rates) - 1)]
        self.once()

    def seed(self, step: int) -> None:
        """What a network draws at random (dropout) in this step."""
        number = mixed(*self.seeds, step, self.world.rank)
        torch.default_generator.manual_seed(number)
        if self.random is not None:
            (self.default_random() if self.graph is None else self.random).manual_seed(number)

    def default_random(self) -> torch.Generator:
        return torch.cuda.default_generators[torch.device(self.device).index or 0]

    def start(self, step: int) -> None:
        """Go on at this step."""
        self.count.fill_(step)
        self.good.fill_(step)

    # -- making it fast ----------------------------------------------------------------------------------------------

    def use(self, choice: Choice) -> None:
        """Compute in this way from now on; eagerly, until `capture`."""
        self.choice, self.graph = choice, None
        last = torch.channels_last if choice.layout == "channels_last" else torch.contiguous_format
        self.net.to(memory_format=last)
        for p in self.parameters:
            state = self.optimizer.state[p]
            state["momentum_buffer"] = torch.empty_like(p).copy_(state["momentum_buffer"])
            p.grad = None
        if self.world.size > 1:
            with self.left_as_found():
                self.trained = distributed.parallel(self.net, self.device, self.tried)
        self.blocks = repeated(self.net) if choice.compiled else []
        self.loss_of = compiled_loss() if choice.compiled and not self.blocks else Step.loss

    def tried(self, net: nn.Module) -> Tensor:
        self.trained = net
        return self.loss(*self.feed(self.count))

    def capture(self, attach: Callable[[], None] = lambda: None) -> None:
        """Warm up, leave everything as it was, then record the step, with what `attach` hangs on the optimizer."""
        with self.left_as_found():
            here, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(here)
            try:
                with torch.cuda.stream(side):
                    for _ in range(3):
                        self.once()
            finally:  # memory may run out in the midst of it, and what is put back must not be overtaken
                here.wait_stream(side)
        attach()
        graph = torch.cuda.CUDAGraph()
        with self.apart(), torch.cuda.graph(graph):
            self.once()
        self.graph = graph

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A graph recorded inside has random numbers and a cuBLAS workspace of its own. Torch gives all graphs of a
        process the same ones, which those of several runs, replayed at a time, would overwrite for each other."""
        assert self.random is not None
        shared = self.default_random()
        before = shared.graphsafe_get_state()
        shared.graphsafe_set_state(self.random)
        torch._C._cuda_clearCublasWorkspaces()
        try:
            yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            shared.graphsafe_set_state(before)

    def milliseconds(self, steps: int = 10) -> float:
        """What a captured step takes: the least of four rounds; everything is left as it was."""
        assert self.graph is not None
        best = math.inf
        with self.left_as_found():
            for _ in range(4):  # the first warms up
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(steps):
                    self.graph.replay()
                torch.cuda.synchronize()
                best = min(best, (time.perf_counter() - start) / steps * 1e3)
        return best

    @contextmanager
    def left_as_found(self) -> Iterator[None]:
        """Weights, statistics, momentum and counters afterwards as before."""
        mine = [self.count, self.good, self.bad, self.lost, *self.net.parameters(), *self.net.buffers()]
        mine += [state["momentum_buffer"] for state in self.optimizer.state.values()]
        before = [t.detach().clone() for t in mine]
        try:
            yield
        finally:
            with torch.no_grad():
                for now, then in zip(mine, before, strict=True):
                    now.copy_(then)


def put(parameters: Iterable[nn.Parameter], found: Iterable[Tensor | None]) -> None:
    """Gradients into .grad as `backward` does it: each in memory of its own, laid out as its parameter is. The penalty
    is added in place, and the fused optimizer goes through gradient, weight and momentum side by side."""
    taken: set[int] = set()
    for p, grad in zip(parameters, found, strict=True):
        if grad is not None and (grad.data_ptr() in taken or not alike(p, grad)):
            grad = torch.empty_like(p).copy_(grad)
        if grad is not None:
            taken.add(grad.data_ptr())
        p.grad = grad


def alike(a: Tensor, b: Tensor) -> bool:
    """Do tensors of one shape have the same place for each entry? (A dimension of one has any stride.)"""
    return all(n == 1 or i == j for n, i, j in zip(a.shape, a.stride(), b.stride(), strict=True))


def compiled_loss() -> Callable[[Step, Tensor, Tensor], Tensor]:
    """The loss through torch.compile, once for all networks of the same shapes."""
    unlimited()
    return torch.compile(Step.loss, dynamic=False)


def unlimited() -> None:
    """After eight different shapes torch would quietly go on without compiling, so in a process of many runs the second
    run of one would not compute what the first did."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, 10_000)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 10_000)


REPEATED = 3
"""Modules of one kind that make it worth to compile each by itself: all of the same shapes are then compiled once."""


def repeated(net: nn.Module) -> list[nn.Module]:
    """The blocks of a network that is made of them: the outermost modules of a kind that occurs several times."""
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    kinds = Counter(type(m) for m in net.modules() if next(m.children(), None) and not isinstance(m, containers))
    found: list[nn.Module] = []
    todo = [net]
    while todo:
        for child in todo.pop().children():
            (found if kinds[type(child)] >= REPEATED else todo).append(child)
    return list(dict.fromkeys(found))


@contextmanager
def compiled(net: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, these blocks are called through torch.compile, each by itself, and so is what the network's own forward
    calls around them."""
    if not blocks:
        yield
        return
    unlimited()
    with ExitStack() as stack:
        for block in blocks:
            stack.callback(put_back, block, "forward", vars(block).get("forward"))
            block.forward = uninlined(torch.compile(block.forward, dynamic=False))
        stack.callback(put_back, net, "_compiled_call_impl", net._compiled_call_impl)
        net._compiled_call_impl = torch.compile(net._call_impl, dynamic=False)  # as net.compile() does it
        yield


def put_back(module: nn.Module, name: str, value: Any) -> None:
    """What a module had of its own, or that it had nothing."""
    vars(module).pop(name, None)
    if value is not None:
        setattr(module, name, value)


def uninlined(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, not to be drawn into a compilation around it."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    alone: Callable[..., Any] = torch.compiler.disable(called)
    return alone


def mixed(*numbers: int) -> int:
    """One number of 63 bits out of several.

    >>> mixed(0, 1, 2)
    2907050525928808288
    """
    digest = hashlib.sha256(",".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
