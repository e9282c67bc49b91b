"""What each operator does to channel labels: a table from operator to rule (see `trace.py`).

A rule is called after its operator has run, with the operator's arguments and result. An operator without a rule
is taken apart if PyTorch knows how, and otherwise pins what it touches, so a missing rule costs coverage and never
correctness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from growprune.trace import FIXED, INPUT, NONE, Operation, Role, Rule, Tracer, compressed, varying

Args = Sequence[Any]
Kwargs = Mapping[str, Any]


def argument(func: Any, args: Args, kwargs: Kwargs, name: str) -> Any:
    """An operator's argument by its name in the schema, its default if it was not given."""
    for position, spec in enumerate(func._schema.arguments):
        if spec.name == name:
            return args[position] if position < len(args) else kwargs.get(name, spec.default_value)
    raise KeyError(name)


def along(labels: Tensor, dim: int, rank: int) -> Tensor:
    """One label an index of dimension `dim` of a tensor of rank `rank`."""
    shape = [1] * rank
    shape[dim] = -1
    return labels.view(shape)


# -- layers: they read channels and make new ones -----------------------------------------------------------------


def convolution(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """weight: filters × channels read (the other way round when transposed)."""
    x, weight, bias = args[0], args[1], argument(func, args, kwargs, "bias")
    transposed = "transpose" in func._schema.name or ("transposed" in str(func._schema) and args[6])
    groups: int = argument(func, args, kwargs, "groups")
    dim = x.dim() - weight.dim() + 1
    read = tracer.channels(x, dim)
    name = tracer.name(weight)
    if name is None or (transposed and groups > 1):
        tracer.give_up(func, args, kwargs, out)
        return
    made_dim, read_dim = (1, 0) if transposed else (0, 1)
    made = tracer.dimension(name, weight, made_dim, "filter")
    if groups == 1:
        tracer.tie(tracer.dimension(name, weight, read_dim, "read"), read)
    else:
        grouped_convolution(tracer, name, weight, read, made, groups)
    positions = out.numel() // out.shape[dim] if not transposed else x.numel() // x.shape[dim]
    finish_layer(tracer, name, bias, made, positions, bool((read == INPUT).any()))
    tracer.mark(out, along(made, dim, out.dim()))
    out._made_by = name  # type: ignore[attr-defined]


def grouped_convolution(tracer: Tracer, name: str, weight: Tensor, read: Tensor, made: Tensor, groups: int) -> None:
    """The groups must stay of one size: whole groups go, or the same places of every group, whichever is finer."""
    width = weight.shape[1]
    tracer.trace.grouped[name] = read
    if groups >= width:
        first = read.view(groups, width)[:, 0]
        tracer.tie(read, first.repeat_interleave(width))
        tracer.tie(made, first.repeat_interleave(len(made) // groups))
    else:
        places = tracer.dimension(name, weight, 1, "read")
        tracer.tie(read.view(groups, width), places)
        tracer.tie(made.view(groups, -1), made.view(groups, -1)[0])


def linear(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """linear(x, W, b), and x @ W or addmm(b, x, W) with the weight the other way round."""
    kind = func._overloadpacket.__name__
    if kind == "addmm":
        bias, x, weight = args[0], args[1], args[2]
    else:
        x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
    name = tracer.name(weight)
    if name is None or weight.dim() != 2 or (kind == "addmm" and tracer.name(bias) is None):
        contraction(tracer, func, args, kwargs, out)
        return
    made_dim, read_dim = (0, 1) if kind == "linear" else (1, 0)
    read = tracer.channels(x, x.dim() - 1)
    made = tracer.dimension(name, weight, made_dim, "filter")
    tracer.tie(tracer.dimension(name, weight, read_dim, "read"), read)
    finish_layer(tracer, name, bias, made, x.numel() // max(1, x.shape[-1]), bool((read == INPUT).any()))
    tracer.mark(out, along(made, out.dim() - 1, out.dim()))
    out._made_by = name  # type: ignore[attr-defined]


def finish_layer(tracer: Tracer, name: str, bias: Tensor | None, made: Tensor, positions: int, stem: bool) -> None:
    if tracer.first:
        tracer.trace.operations.append(Operation(name, positions, stem))
    if bias is not None:
        ride(tracer, bias, made, "shift")
        tracer.trace.biases[name] = tracer.name(bias) or ""


def ride(tracer: Tracer, t: Tensor | None, labels: Tensor, role: Role) -> None:
    """A vector with one entry a channel; one that is no parameter or buffer cannot be cut, so its channels stay."""
    name = tracer.name(t)
    if t is not None and name is not None:
        tracer.tie(tracer.dimension(name, t, 0, role), labels)
    elif t is not None:
        tracer.pin(labels)


def contraction(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """A product of two activations: the columns of the second pass through, everything else stays."""
    tensors = [t for t in args if isinstance(t, Tensor)]
    last = tensors[-1]
    labels = tracer.of(last)
    for t in tensors[:-1]:
        tracer.pin(tracer.of(t))
    if varying(labels) and varying(labels) != [last.dim() - 1]:
        tracer.pin(labels)
    passing = varying(labels) == [last.dim() - 1]
    tracer.mark(out, along(labels.flatten(), out.dim() - 1, out.dim()) if passing else blank(out, NONE))


def attention(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    query, key, value = args[:3]
    result = out if isinstance(out, Tensor) else out[0]
    tracer.pin(tracer.of(query))  # the scale depends on the width of the heads, so that width stays
    tracer.pin(tracer.of(key))
    labels = tracer.of(value)
    if value.dim() - 2 in varying(labels) or value.dim() != result.dim():
        tracer.pin(labels)
        labels = blank(result, FIXED)
    tracer.mark(result, labels)


def embedding(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    name = tracer.name(args[0])
    if name is None:
        tracer.give_up(func, args, kwargs, out)
        return
    tracer.mark(out, along(tracer.dimension(name, args[0], 1, "table"), out.dim() - 1, out.dim()))


def blank(t: Tensor, label: int) -> Tensor:
    return torch.full((1,) * t.dim(), label)


# -- normalisation -------------------------------------------------------------------------------------------------


def batch_norm(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    x, weight, bias, mean, variance = args[:5]
    result = out if isinstance(out, Tensor) else out[0]
    labels = tracer.channels(x, 1)
    ride(tracer, weight, labels, "scale")
    ride(tracer, bias, labels, "shift")
    ride(tracer, mean, labels, "mean")
    ride(tracer, variance, labels, "other")
    made_by, name = getattr(x, "_made_by", None), tracer.name(mean)
    if made_by is not None and name is not None:
        tracer.trace.norms.setdefault(made_by, name)
    tracer.mark(result, along(labels, 1, result.dim()))


def group_norm(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """A group's statistics mix its channels, so whole groups go; without a scale nothing says whose groups."""
    x, groups = args[0], args[1]
    weight, bias = argument(func, args, kwargs, "weight"), argument(func, args, kwargs, "bias")
    labels = tracer.channels(x, 1)
    name = tracer.name(weight)
    if name is None:
        tracer.pin(labels)
    else:
        width = len(labels) // groups
        tracer.tie(labels, labels.view(groups, width)[:, 0].repeat_interleave(width))
        ride(tracer, weight, labels, "scale")
        ride(tracer, bias, labels, "shift")
        tracer.trace.grouped[name] = labels
    tracer.mark(out, along(labels, 1, out.dim()))


def layer_norm(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Its statistics mix all channels: taking one away would change what the others say, so they stay."""
    labels = tracer.of(args[0])
    if any(dim >= args[0].dim() - len(args[1]) for dim in varying(labels)):
        tracer.pin(labels)
    tracer.mark(out, labels)


def softmax(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    labels = tracer.of(args[0])
    if args[1] % args[0].dim() in varying(labels):
        tracer.pin(labels)
    tracer.mark(out, labels)


# -- element by element, moving, reducing --------------------------------------------------------------------------


def pointwise(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Operands that meet element by element tie their channels: a product as a gate does, the rest as an addition."""
    result = next(t for t in tree_leaves(out) if isinstance(t, Tensor))
    rank, gate = result.dim(), func._overloadpacket.__name__.rstrip("_") in ("mul", "div")
    operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    acts = sorted((t for t in operands if hasattr(t, "_labels")), key=lambda t: -tracer.of(t).numel())
    merged = torch.full((1,) * rank, NONE)
    for t in acts:
        labels = tracer.of(t).view((1,) * (rank - t.dim()) + tuple(tracer.of(t).shape))
        merged = meet(tracer, merged, labels, spread(t, result), by_addition=not gate)
    if not acts:
        merged = torch.full((1,) * rank, FIXED)
    for t in operands:
        if not hasattr(t, "_labels"):
            merged = meet_constant(tracer, merged, t, result, gate)
    if not gate and len(acts) > 1 and tracer.first:
        met = torch.cat([tracer.of(t).flatten() for t in acts])
        tracer.trace.streams.append((torch.unique(met), tuple(result.shape[1:])))
    for t in tree_leaves(out):
        if isinstance(t, Tensor):
            tracer.mark(t, merged)


def prelu(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """A slope for each channel, or one for all."""
    if args[1].numel() > 1:
        ride(tracer, args[1], tracer.channels(args[0], 1), "other")
    tracer.mark(out, tracer.of(args[0]))


def spread(t: Tensor, result: Tensor) -> list[int]:
    """The result's dimensions along which `t` is one number repeated."""
    lead = result.dim() - t.dim()
    return [d for d in range(result.dim()) if result.shape[d] > 1 and (d < lead or t.shape[d - lead] == 1)]


def meet(tracer: Tracer, merged: Tensor, labels: Tensor, repeated: list[int], by_addition: bool) -> Tensor:
    """Tie two operands' labels; one repeated across the other's channels (a spatial gate) belongs to none of them."""
    if any(d in repeated for d in varying(merged)) and not any(d not in repeated for d in varying(labels)):
        tracer.pin(labels)
        return merged
    tracer.tie(merged, labels, by_addition)
    a, b = torch.broadcast_tensors(merged, labels)
    return torch.where(a != NONE, a, b)


def meet_constant(tracer: Tracer, merged: Tensor, t: Tensor, result: Tensor, gate: bool) -> Tensor:
    """A parameter or buffer is cut along the one dimension where the channels vary; a plain constant cannot be."""
    lead = result.dim() - t.dim()
    meets = [d for d in varying(merged) if d >= lead and t.shape[d - lead] > 1]
    name = tracer.name(t)
    if not meets or name is None or len(meets) > 1:
        if meets:
            tracer.pin(merged)
        if name is not None and t.numel() > 1:
            tracer.trace.pinned.add(name)
        return merged
    own = tracer.dimension(name, t, meets[0] - lead, "scale" if gate else "shift")
    tracer.tie(along(own, meets[0], result.dim()), merged)
    return merged


def same(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    """The value passes unchanged (a dropout at rest, a clone, another dtype)."""
    for t in tree_leaves(out):
        if isinstance(t, Tensor) and t is not args[0]:
            tracer.mark(t, tracer.of(args[0]))
            if hasattr(args[0], "_made_by"):
                t._made_by = args[0]._made_by  # type: ignore[attr-defined]


def move(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Labels move as the data does: the same operator is run on them.

    A channel dimension may be carried along whole, or flattened together with others; one that is split, sliced or
    reordered has boundaries written into the model's code, so its channels stay.
    """
    x = args[0]
    if out is x:  # squeeze_ and its like: the shape before is gone
        tracer.give_up(func, args, kwargs, out)
        return
    before = tracer.of(x)
    run = torch.ops.aten.reshape.default if func._overloadpacket.__name__ in ("view", "_unsafe_view") else func
    rest = tree_map(lambda a: a.cpu() if isinstance(a, Tensor) else a, (list(args[1:]), dict(kwargs)))
    moved = run(before.expand(x.shape), *rest[0], **{k: v for k, v in rest[1].items() if k != "memory_format"})
    results = [moved] if isinstance(moved, Tensor) else list(moved)
    for t, labels in zip((t for t in tree_leaves(out) if isinstance(t, Tensor)), results, strict=True):
        after = compressed(labels)
        if varying(before) and not whole(before, after):
            tracer.pin(before)
        tracer.mark(t, after)


def whole(before: Tensor, after: Tensor) -> bool:
    """Does the one channel dimension come through with every channel, in order, each repeated alike?"""
    if len(varying(before)) != 1 or len(varying(after)) != 1:
        return False
    old, new = before.flatten(), after.flatten()
    times = len(new) // len(old)
    return torch.equal(new, old.repeat(times)) or torch.equal(new, old.repeat_interleave(times))


def concatenate(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Along the channels the labels line up one after another; along another dimension the channels are tied."""
    parts = [t for t in args[0] if t.numel()]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
    labels = [tracer.of(t) for t in parts]
    if all(d == dim for piece in labels for d in varying(piece)):
        shapes = [[t.shape[dim] if d == dim else 1 for d in range(out.dim())] for t in parts]
        tracer.mark(out, compressed(torch.cat([p.expand(s) for p, s in zip(labels, shapes, strict=True)], dim)))
        return
    merged = labels[0]
    for piece in labels:
        if dim in varying(piece):
            tracer.pin(piece)
        merged = meet(tracer, merged.narrow(dim, 0, 1), piece.narrow(dim, 0, 1), [], by_addition=True)
    tracer.mark(out, merged)


def reduce(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    """A mean, sum or maximum over dimensions in which the channels do not vary."""
    x, labels = args[0], tracer.of(args[0])
    has_dim = any(spec.name == "dim" for spec in func._schema.arguments)
    dims = argument(func, args, kwargs, "dim") if has_dim else None
    given = [dims] if isinstance(dims, int) else dims
    over = {d % x.dim() for d in given} if given else set(range(x.dim()))
    if any(d in over for d in varying(labels)):
        tracer.pin(labels)
        labels = blank(x, NONE)
    for t in tree_leaves(out):
        if isinstance(t, Tensor):
            shape = labels.shape if t.dim() == x.dim() else [n for d, n in enumerate(labels.shape) if d not in over]
            tracer.mark(t, labels.reshape(shape))


def resample(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Pooling and interpolation: every channel by itself, in dimension 1."""
    labels = along(tracer.channels(args[0], 1), 1, args[0].dim())
    for t in tree_leaves(out):
        if isinstance(t, Tensor):
            tracer.mark(t, compressed(labels))


def pad(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Channels added as padding are written into the model's code: they stay, and so does what they meet."""
    labels = tracer.of(args[0])
    for step in range(len(args[1]) // 2):
        dim, (low, high) = out.dim() - 1 - step, args[1][2 * step : 2 * step + 2]
        if dim in varying(labels) and (low or high):
            if low < 0 or high < 0:
                tracer.pin(labels)
            one = torch.full_like(labels.narrow(dim, 0, 1), FIXED)
            labels = torch.cat([one] * max(low, 0) + [labels] + [one] * max(high, 0), dim)
    if any(n not in (1, m) for n, m in zip(labels.shape, out.shape, strict=True)):
        labels = blank(out, FIXED)
    tracer.mark(out, labels)


def constant(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    """A new tensor that holds nothing of its arguments but their shape: left unmarked, as any constant is."""


def table() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for rule, names in (
        (convolution, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution"),
        (linear, "linear addmm"),
        (linear, "matmul mm"),
        (contraction, "bmm baddbmm"),
        (attention, "scaled_dot_product_attention"),
        (embedding, "embedding"),
        (batch_norm, "batch_norm instance_norm"),
        (group_norm, "group_norm"),
        (layer_norm, "layer_norm rms_norm"),
        (softmax, "softmax log_softmax _softmax _log_softmax"),
        (
            same,
            "dropout feature_dropout alpha_dropout native_dropout clone contiguous detach alias lift_fresh to "
            "_to_copy type_as float half bfloat16 fill zero",
        ),
        (
            move,
            "view reshape _unsafe_view flatten unflatten permute transpose t numpy_T movedim swapaxes squeeze "
            "unsqueeze expand expand_as slice select narrow split split_with_sizes chunk tensor_split unbind roll "
            "flip index_select index repeat repeat_interleave pixel_shuffle pixel_unshuffle channel_shuffle "
            "view_as reshape_as unfold",
        ),
        (pointwise, "hardswish mish log_sigmoid rrelu rrelu_with_noise"),  # PyTorch does not mark these
        (prelu, "prelu"),
        (concatenate, "cat concat concatenate"),
        (reduce, "mean sum amax amin max min var std prod logsumexp linalg_vector_norm norm all any argmax"),
        (
            resample,
            "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d "
            "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
            "adaptive_max_pool3d _adaptive_avg_pool2d upsample_nearest1d upsample_nearest2d upsample_bilinear2d "
            "upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
            "fractional_max_pool2d",
        ),
        (pad, "pad constant_pad_nd"),
        (
            constant,
            "zeros ones empty full arange new_zeros new_ones new_empty new_full zeros_like ones_like "
            "empty_like full_like rand_like randn_like rand randn scalar_tensor linspace eye",
        ),
    ):
        rules.update(dict.fromkeys(names.split(), rule))
    return rules


RULES = table()


def find_rule(func: Any) -> Rule | None:
    """The rule of an operator, its in-place form included; PyTorch itself marks what works element by element."""
    name = func._overloadpacket.__name__
    if func._overloadname == "other":  # max(a, b) and min(a, b): taken apart into maximum and minimum
        return None
    found = RULES.get(name) or RULES.get(name.rstrip("_"))
    if found is None and torch.Tag.pointwise in func.tags:
        return pointwise
    return found
