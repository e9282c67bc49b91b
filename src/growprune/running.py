"""Running a model on its example and leaving no trace: no gradient, no random number drawn, no state changed."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from growprune.errors import GrowpruneError, line

COMPRESSED = torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc
"""Layouts of sparse tensors whose numbers are their values()."""
NO_OUTPUT = type, nn.Module, ModuleType, FunctionType, MethodType, BuiltinFunctionType, functools.partial
"""What an output may hold, but puts nothing out."""


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a shared one under its first name only."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def exact(value: Tensor) -> Tensor:
    """In float32 at least: squares and sums of half-precision numbers vanish or overflow."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def unsound(model: nn.Module) -> str | None:
    """The first tensor that nothing can be computed with: none may hold NaN, and parameters and the statistics of norms
    are finite; other buffers need not be, for a mask or a bound may well be infinite."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    finite = {id(t) for t in (*model.parameters(), *(b for norm in norms for b in norm.buffers(recurse=False)))}
    for name, t in tensors(model).items():
        told = ends(t)
        if not bool((told.isfinite() if id(t) in finite else ~told.isnan()).all()):
            return name
    return None


def ends(t: Tensor) -> Tensor:
    """The least and the largest of a tensor's numbers, NaN if any is, in one pass; or, where that cannot be, all. Of a
    sparse one those that it holds."""
    if t.layout == torch.sparse_coo:
        t = t.detach()._values()
    elif t.layout in COMPRESSED:
        t = t.detach().values()
    usual = type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and t.numel() > 0
    kinds = torch.float, torch.double, torch.half, torch.bfloat16
    return torch.stack(t.detach().aminmax()) if usual and t.dtype in kinds else t


def call(model: nn.Module, example_input: Any) -> Any:
    """The model on its example (a tensor, a tuple or list of arguments, or a dict of them), moved to its device."""
    example_input = placed(model, example_input)
    if isinstance(example_input, Mapping):
        return model(**example_input)
    if isinstance(example_input, (tuple, list)):
        return model(*example_input)
    return model(example_input)


def plain(example_input: Any) -> Any:
    """A dict for whatever mapping an example is (transformers' BatchEncoding, say), which pytree looks into."""
    return dict(example_input) if isinstance(example_input, Mapping) else example_input


def fresh(example_input: Any) -> Any:
    """A copy, for a forward may change its input in place."""
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, plain(example_input))


def to_train_on(example_input: Any) -> Iterator[Any]:
    """The example, and twice the example: batch norm refuses to train on one value."""
    yield example_input
    with suppress(Exception):  # of sparse tensors not all can be put one after the other
        yield tree_map(lambda t: torch.cat([t, t]) if isinstance(t, Tensor) and t.dim() else t, example_input)


def placed(model: nn.Module, example_input: Any) -> Any:
    device, example_input = next(model.parameters()).device, plain(example_input)
    try:
        return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, example_input)
    except NotImplementedError as error:  # a meta tensor
        raise GrowpruneError(f"the example input holds no data: {line(error)}") from error


def leaves(output: Any) -> Iterable[Tensor]:
    """Every tensor in a model's output, also inside objects that pytree does not know."""
    seen, inside = set[int](), [iter(tree_leaves(output))]  # how deep objects may lie in each other nobody says
    while inside:
        for leaf in inside[-1]:
            if isinstance(leaf, Tensor):
                yield leaf
            elif id(leaf) not in seen and not isinstance(leaf, NO_OUTPUT):
                seen.add(id(leaf))
                inside.append(iter(tree_leaves(attributes(leaf))))
                break
        else:
            inside.pop()


def attributes(thing: Any) -> dict[str, Any]:
    """What an object holds by name, in its dict or in slots."""
    slots = (vars(kind).get("__slots__", ()) for kind in type(thing).__mro__)
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    found = {name: getattr(thing, name) for name in names if name != "__weakref__" and hasattr(thing, name)}
    own = getattr(thing, "__dict__", {})
    return found | (own if isinstance(own, dict) else {})


def switched(model: nn.Module, training: bool) -> nn.Module:
    """The model, in training mode or not: set on each module by hand, as `nn.Module.train` does, for a model's own
    `train()` may do more (start a training run, merge weights) or less (keep norms fixed)."""
    for module in model.modules():
        module.training = training
    return model


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """`switched` for a while; afterwards each module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        switched(model, training)
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def quietly(model: nn.Module) -> Iterator[None]:
    """Without gradients, and with random numbers of its own: the same ones each time, the user's left alone."""
    device = next(model.parameters()).device
    cuda = [device.index or 0] if device.type == "cuda" else []
    plain = torch.autocast(device.type, enabled=False)  # casts would hide parameters, and blur comparisons
    with torch.no_grad(), torch.random.fork_rng(devices=cuda), other_generators(), plain, all_digits():
        for generator in [torch.default_generator, *(torch.cuda.default_generators[i] for i in cuda)]:
            generator.manual_seed(0)
        yield


@contextmanager
def other_generators() -> Iterator[None]:
    """Python's random numbers and numpy's, if that is in use, start anew, and go on afterwards where they were."""
    numpy: Any = sys.modules.get("numpy")
    found = random.getstate(), numpy and numpy.random.get_state()
    random.seed(0)
    if numpy:
        numpy.random.seed(0)
    try:
        yield
    finally:
        random.setstate(found[0])
        if numpy:
            numpy.random.set_state(found[1])


@contextmanager
def all_digits() -> Iterator[None]:
    """float32 with all its digits. In TF32 wide layers are rounded and narrow ones are not, so that a network and its
    smaller self differ by thousandths. Torch has two names for this: the older one must agree, for a forward may use it
    (`cudnn.flags`), unless a user has mixed them already; what is set by the newer is then put back as it was."""
    backends: Any = torch.backends
    cudnn, mkldnn, whole = backends.cudnn, backends.mkldnn, backends.fp32_precision
    kinds = (backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    found = [kind.fp32_precision for kind in kinds]
    try:
        older = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:
        older = None
    try:
        if older:
            torch.set_float32_matmul_precision("highest")
            cudnn.allow_tf32 = False
        for kind in kinds:
            kind.fp32_precision = "ieee"
        yield
    finally:
        if older:
            torch.set_float32_matmul_precision(older[0])
            cudnn.allow_tf32 = older[1]
        for kind, precision in zip(kinds, found, strict=True):
            kind.fp32_precision = "none" if precision == whole else precision  # "none": what holds for the whole


@contextmanager
def whole_operators(model: nn.Module) -> Iterator[None]:
    """Below autograd, where linear layers and norms arrive whole. Inference mode would do that too, but what a forward
    or a hook keeps of it could not be trained on. The fused encoder of torch.nn would hide its linear layers."""
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with quietly(model), torch._C._AutoDispatchBelowAutograd():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
