"""Running a model on its example and leaving no trace: no gradient, no random number drawn, no state changed."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from growprune.errors import GrowpruneError, line


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a shared one under its first name only."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def unsound(model: nn.Module) -> str | None:
    """The first tensor that nothing can be computed with: none may hold NaN, and parameters and the statistics of norms
    are finite; other buffers need not be, for a mask or a bound may well be infinite."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    finite = {id(t) for t in (*model.parameters(), *(b for norm in norms for b in norm.buffers(recurse=False)))}
    for name, t in tensors(model).items():
        if not bool((t.isfinite() if id(t) in finite else ~t.isnan()).all()):
            return name
    return None


def call(model: nn.Module, example_input: Any) -> Any:
    """The model on its example (a tensor, a tuple or list of arguments, or a dict of them), moved to its device."""
    example_input = placed(model, example_input)
    if isinstance(example_input, Mapping):
        return model(**example_input)
    if isinstance(example_input, (tuple, list)):
        return model(*example_input)
    return model(example_input)


def placed(model: nn.Module, example_input: Any) -> Any:
    device = next(model.parameters()).device
    try:
        return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, example_input)
    except NotImplementedError as error:  # a meta tensor
        raise GrowpruneError(f"the example input holds no data: {line(error)}") from error


def leaves(output: Any) -> Iterable[Tensor]:
    """Every tensor in a model's output, also one level inside objects that pytree does not know."""
    for leaf in tree_leaves(output):
        inside = [leaf] if isinstance(leaf, Tensor) else tree_leaves(getattr(leaf, "__dict__", {}))
        yield from (t for t in inside if isinstance(t, Tensor))


@contextmanager
def quietly(model: nn.Module) -> Iterator[None]:
    """Without gradients, and with random numbers of its own: the same ones each time, the user's left alone."""
    device = next(model.parameters()).device
    cuda = [device.index or 0] if device.type == "cuda" else []
    plain = torch.autocast(device.type, enabled=False)  # casts would hide parameters, and blur comparisons
    with torch.no_grad(), torch.random.fork_rng(devices=cuda), plain, all_digits():
        for generator in [torch.default_generator, *(torch.cuda.default_generators[i] for i in cuda)]:
            generator.manual_seed(0)
        yield


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


def copied(model: nn.Module) -> nn.Module:
    """A deep copy. Activations kept from the last forward hang on a graph and are copied without it; objects whose
    methods are hooks stay the user's own; parameters keep the attributes that were put on them."""
    kept = tree_leaves([{k: v for k, v in vars(m).items() if not k.startswith("_")} for m in model.modules()])
    memo: dict[int, Any] = {id(t): t.detach().clone() for t in kept if isinstance(t, Tensor) and not t.is_leaf}
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            owner = getattr(hook, "__self__", None)
            if owner is not None and not isinstance(owner, nn.Module):
                memo[id(owner)] = owner
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise GrowpruneError(f"the model cannot be copied: {type(error).__name__}: {line(error)}") from error
    for old, new in zip(model.parameters(), twin.parameters(), strict=True):
        vars(new).update(vars(old))
    return twin
