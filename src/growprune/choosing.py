"""Which way to compute a step is fastest for this network on this GPU: found out by trying, or by rule where the same
bits are wanted each time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.utils.deterministic

from growprune import convolutions
from growprune.config import Config
from growprune.errors import GrowpruneError, line
from growprune.step import Choice, Step

WORTH_COMPILING = 200.0
"""Seconds that a stage must be going to last before compilation, which takes up to a minute and saves a quarter, is
tried."""


def nothing() -> None:
    """Of whoever has nothing to heed between two trials."""


def choose(
    step: Step, asked: Config, steps: int, say: Callable[[str], None], heed: Callable[[], None] = nothing
) -> Choice:
    """The fastest way to compute this step on this GPU, by trying; what `asked` (a Config) fixes stays fixed. `heed` is
    called before each trial, and may raise.

    Where the same bits are wanted each time, nothing may hang on the clock: then by rule, which is what mostly wins.
    """
    by_rule = torch.are_deterministic_algorithms_enabled()

    def trial(choice: Choice) -> Choice:
        heed()
        try:
            step.use(choice)
            step.capture()
            found = step.milliseconds()
        except torch.cuda.OutOfMemoryError:
            found = math.inf
        finally:
            step.graph = None
        return replace(choice, ms=found)

    def another(choice: Choice) -> Choice:
        """Instead of what works already: one that fails, for whatever reason, is not taken."""
        try:
            return trial(choice)
        except RuntimeError:
            return replace(choice, ms=math.inf)

    layouts = ["channels_last", "contiguous"] if asked.layout == "auto" else [asked.layout]
    precisions = ["bf16", "fp32"] if asked.precision == "auto" else [asked.precision]
    if by_rule:
        layouts, precisions = layouts[:1], precisions[:1]
    works, failures = tried_all(trial, [Choice(each, layouts[0]) for each in precisions])
    if not works:
        say(f"this network's step cannot be captured as a CUDA graph, so it runs eagerly: {line(failures[0])}")
        return Choice(precisions[0], layouts[0], captured=False)
    best = min(works, key=pace)
    best = min([best, *(another(Choice(best.precision, each)) for each in layouts[1:])], key=pace)
    if asked.kernels != "off" and best.precision == "bf16" and best.layout == "channels_last":
        step.use(best)  # whose weights lie as they will when it is trained
        example = step.feed.normalized(step.feed(step.count)[0], torch.bfloat16)
        found = convolutions.faster(step.net, example, by_rule or asked.kernels == "on")
        if found:
            ours = another(Choice(best.precision, best.layout, False, found))
            fixed = (by_rule or asked.kernels == "on") and pace(ours) < math.inf
            best = ours if fixed else min([best, ours], key=pace)
    long = not by_rule and steps * pace(best) / 1e3 > WORTH_COMPILING
    if pace(best) < math.inf and (asked.compile == "on" or (asked.compile == "auto" and long)):
        best = compiled(best, trial, asked.compile == "on", say)
    if pace(best) == math.inf:
        raise GrowpruneError(
            "the GPU's memory does not hold one training step: choose a smaller --batch, or "
            "--parallel where several runs share it"
        )
    return best


def tried_all(trial: Callable[[Choice], Choice], choices: Iterable[Choice]) -> tuple[list[Choice], list[RuntimeError]]:
    """What works, timed; and what the others failed of: a step that reads from the device, as with .item()."""
    works, failures = list[Choice](), list[RuntimeError]()
    for choice in choices:
        try:
            works.append(trial(choice))
        except RuntimeError as error:
            failures.append(error)
    return works, failures


def compiled(best: Choice, trial: Callable[[Choice], Choice], wanted: bool, say: Callable[[str], None]) -> Choice:
    """The same, compiled: if that is faster, or `wanted` in any case."""
    started = time.perf_counter()
    try:
        tried = trial(Choice(best.precision, best.layout, True, best.kernels))
    except Exception as error:  # no C compiler on this machine, or a network that cannot be compiled
        if wanted:
            raise GrowpruneError(f"--compile on: it cannot be done here: {line(error)}; try off") from error
        say(f"torch.compile cannot be used here: {line(error)}")
        return best
    took = time.perf_counter() - started
    say(f"compiled in {took:.0f} s: {pace(tried):.2f} ms a step instead of {pace(best):.2f}")
    return tried if wanted else min([best, tried], key=pace)


def pace(choice: Choice) -> float:
    return math.inf if choice.ms is None else choice.ms


memory: Any = torch.utils.deterministic  # its one switch is unknown to type checkers


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """The same bits each time on a GPU; else the fastest kernels that cuDNN finds by trying.

    PyTorch's switch also has new memory filled, so that whoever reads what nobody wrote gets the same each time: one
    kernel more for almost every tensor of a step. Nothing here reads such memory, so that is left off.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = memory.fill_uninitialized_memory
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    torch.use_deterministic_algorithms(wanted)
    memory.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = not wanted, wanted
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn


def plain(asked: Config, device: str) -> Choice:
    """Where there is nothing to try: on a CPU, in several processes, or with no step left."""
    cuda = device.startswith("cuda")
    precision = ("bf16" if cuda else "fp32") if asked.precision == "auto" else asked.precision
    last = asked.layout == "channels_last" or (cuda and asked.layout == "auto")
    return Choice(precision, "channels_last" if last else "contiguous", asked.compile == "on", captured=False)


Measured = dict[Hashable, tuple[Choice, Choice | None]]
"""What was found out before, by what two steps must have in common for it."""


def tried(
    step: Step,
    asked: Config,
    steps: int,
    say: Callable[[str], None],
    measured: Measured,
    known: Hashable,
    heed: Callable[[], None] = nothing,
) -> tuple[Choice, Choice | None]:
    """The fastest way, and where the same bits are wanted also that which is fastest without them. `known` says what
    the step is, besides its network and what was asked for: for the same one nothing is tried twice."""
    shapes = tuple((name, p.shape, p.requires_grad) for name, p in step.net.named_parameters())
    known = known, asked.model, asked.precision, asked.layout, asked.compile, asked.kernels, steps, shapes
    if known not in measured:
        best, free = choose(step, asked, steps, say, heed), None
        if asked.deterministic:
            with determinism(False):
                free = choose(step, replace(asked, compile="off"), steps, lambda _: None, heed)
        measured[known] = best, free
    return measured[known]
