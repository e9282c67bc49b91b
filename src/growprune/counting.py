"""Multiply-accumulates (MACs) of layers: a table from operator to formula, one for all who count.

`measurement` adds them up as a network runs; the tracer notes them beside what it finds, so that a speed-up is planned
by the numbers that are measured afterwards. Every weight of a layer counts once each time the layer uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

Formula = Callable[[Any, Sequence[Any]], int]
"""From an operator's result and arguments."""


def operator(func: Any) -> str:
    """`add` for aten::add_.Tensor, `package::name` for an operator from elsewhere."""
    return str(func.name()).partition(".")[0].removeprefix("aten::").rstrip("_")


def filters(weight: int) -> Formula:
    """Each output element sums over one filter: a weight (out, in/groups, *kernel), whose shape knows the groups; or
    (out, in1, in2)."""
    return lambda out, args: int(out.numel() * math.prod(args[weight].shape[1:]))


def spread(out: Tensor, args: Sequence[Any]) -> int:
    """Transposed, each input element is spread over one filter: (in, out/groups, *kernel)."""
    return int(args[0].numel() * math.prod(args[1].shape[1:]))


def convolution(out: Tensor, args: Sequence[Any]) -> int:
    return spread(out, args) if args[6] else filters(1)(out, args)


def linear(out: Tensor, args: Sequence[Any]) -> int:
    return out.numel() * int(args[1].shape[-1])


def time_first(out: Tensor, args: Sequence[Any]) -> int:
    """conv_tbc's weight: (kernel, in, out)."""
    return int(out.numel() * math.prod(args[1].shape[:2]))


def recurrent(out: Any, args: Sequence[Any]) -> int:
    """Every matrix of every layer and direction once a step; the parameters are the last list of tensors."""
    parameters = next(a for a in reversed(args) if isinstance(a, (list, tuple)))
    return rows(args[0]) * sum(int(p.numel()) for p in parameters if p.dim() == 2)


def cell(out: Any, args: Sequence[Any]) -> int:
    """One step of that: the matrices of input and hidden state come third and fourth."""
    return rows(args[0]) * int(args[2].numel() + args[3].numel())


def rows(x: Tensor) -> int:
    return x.numel() // max(1, int(x.shape[-1]))


def product(first: int) -> Formula:
    """Each output element sums over what the factors, args[first] and the next, share."""
    return lambda out, args: int(out.numel() * args[first].shape[-1])


def summed(out: Tensor, args: Sequence[Any]) -> int:
    """addbmm adds up its batch."""
    return int(out.numel() * args[1].shape[0] * args[1].shape[-1])


LAYERS: dict[str, Formula] = {
    **dict.fromkeys(("convolution", "_convolution"), convolution),  # the second is TorchScript's
    **{f"conv{n}d": filters(1) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": spread for n in (1, 2, 3)},
    "conv_tbc": time_first,
    "torchvision::deform_conv2d": filters(1),
    "linear": linear,
    "bilinear": filters(2),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), cell),
}
"""Operators that are layers by their name."""

PRODUCTS: dict[str, tuple[int, Formula]] = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), (0, product(0))),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), (1, product(1))),
    "addbmm": (1, summed),
}
"""Products, with the place of the first factor: a layer if a parameter meets an activation there."""


class Macs:
    """Tells which operators of one run are layers, and by what formula they count.

    A product is one if a parameter, or what is computed from parameters and buffers alone (a transposed or masked
    weight), meets an activation; so `follow` is shown every operator of the run, in order. Not layers are attention's
    products, of two activations, and those that make a weight, of two parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        # A cell for each tensor, shared by its views: True with a parameter in it, False with buffers alone, None once
        # something else was written into it.
        self.cells = WeakTensorKeyDictionary()
        self.cells.update({t: [True] for t in model.parameters()} | {t: [False] for t in model.buffers()})

    def of(self, t: Tensor) -> bool | None:
        found: list[bool | None] = self.cells.get(t, [None])
        return found[0]

    def formula(self, func: Any, args: Sequence[Any]) -> Formula | None:
        """None for what is no layer."""
        kind = operator(func)
        if kind in PRODUCTS:
            first, formula = PRODUCTS[kind]
            return formula if {True, None} == {self.of(t) for t in args[first : first + 2]} else None
        return LAYERS.get(kind)

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """What is computed from the model's own tensors alone is such a tensor too; what a layer makes is not."""
        inputs = list(tensors((args, kwargs)))
        kinds = {self.of(t) for t in inputs}
        kind = operator(func)
        if kind.endswith("_as"):  # only the shape, or the dtype, of the second is asked
            kinds = {self.of(inputs[0])}
        alone = bool(kinds) and None not in kinds and self.formula(func, args) is None
        shape_only = kind.endswith("_like") or kind.startswith("new_")
        own = any(kinds) if alone and not shape_only else None
        for t in tensors(out):
            if any(t is each for each in inputs):
                self.cells.get(t, [None])[0] = own
            elif own is not None:
                self.cells[t] = self.cells[inputs[0]] if getattr(func, "is_view", False) else [own]


def tensors(tree: Any) -> Iterator[Tensor]:
    return (t for t in tree_leaves(tree) if isinstance(t, Tensor))
