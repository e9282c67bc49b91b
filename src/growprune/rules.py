"""What each operator does to channel labels: a table from operator to rule (see `trace.py`).

A rule is called after its operator has run, with the operator's arguments and result. An operator without a rule
is taken apart if PyTorch knows how, and otherwise pins what it touches, so a missing rule costs coverage and never
correctness.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from growprune.motion import (
    Args,
    Kwargs,
    along,
    argument,
    blank,
    chunk,
    concatenate,
    constant,
    glu,
    like,
    move,
    noise,
    pad,
    pixel_shuffle,
    pointwise,
    reduce,
    resample,
    same,
    sample,
    scatter,
    stack,
    unpool,
    within,
)
from growprune.trace import FIXED, INPUT, NONE, Role, Rule, Tracer, varying

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
    finish_layer(tracer, name, weight, bias, made, bool((read == INPUT).any()))
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
    finish_layer(tracer, name, weight, bias, made, bool((read == INPUT).any()))
    tracer.mark(out, along(made, out.dim() - 1, out.dim()))
    out._made_by = name  # type: ignore[attr-defined]


def finish_layer(tracer: Tracer, name: str, weight: Tensor, bias: Tensor | None, made: Tensor, stem: bool) -> None:
    tracer.operation(name, weight, stem)
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
    """A product of two activations: the columns of the second pass through, everything else stays.

    A vector has none, nor has what linear() takes as its weight, whose rows it makes.
    """
    tensors = [t for t in args if isinstance(t, Tensor)]
    last = tensors[-1]
    labels = tracer.of(last)
    for t in tensors[:-1]:
        tracer.pin(tracer.of(t))
    columns = last.dim() > 1 and func._overloadpacket.__name__ != "linear"
    passing = columns and varying(labels) == [last.dim() - 1]
    if varying(labels) and not passing:
        tracer.pin(labels)
    tracer.mark(out, along(labels.flatten(), out.dim() - 1, out.dim()) if passing else blank(out, NONE))


def attention(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    query, key, value = args[:3]
    result = out if isinstance(out, Tensor) else out[0]
    tracer.pin(tracer.of(query))  # the scale depends on the width of the heads, so that width stays
    tracer.pin(tracer.of(key))
    labels = tracer.of(value)
    shared = value.shape[:-2] != result.shape[:-2]  # by several heads of queries
    if shared or value.dim() - 2 in varying(labels):
        tracer.pin(labels)
        labels = blank(result, FIXED)
    tracer.mark(result, labels)


def recurrent(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    """An LSTM and its kin as a whole: what its first layer takes in may go, all else stays."""
    x, ways = args[0], 1 + argument(func, args, kwargs, "bidirectional")
    weights = argument(func, args, kwargs, "params")
    first = weights[:: len(weights) // (ways * argument(func, args, kwargs, "num_layers"))][:ways]
    names = [name for weight in first if (name := tracer.name(weight)) is not None]
    if len(names) < len(first):
        tracer.give_up(func, args, kwargs, out)
        return
    begun = argument(func, args, kwargs, "hx")  # the state that it begins with
    tracer.give_up(func, [begun], {}, out)
    read = tracer.channels(x, x.dim() - 1)
    for name, weight in zip(names, first, strict=True):
        tracer.tie(tracer.dimension(name, weight, 1, "read"), read)
        tracer.work(x.numel() // max(1, len(read)) * weight.numel(), read)


def embedding(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    name = tracer.name(args[0])
    if name is None:
        tracer.give_up(func, args, kwargs, out)
        return
    tracer.mark(out, along(tracer.dimension(name, args[0], 1, "table"), out.dim() - 1, out.dim()))


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


def prelu(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """A slope for each channel, or one for all."""
    if args[1].numel() > 1:
        ride(tracer, args[1], tracer.channels(args[0], 1), "other")
    tracer.mark(out, tracer.of(args[0]))


def table() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for rule, names in (
        (convolution, "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution"),
        (linear, "linear addmm"),
        (linear, "matmul mm"),
        (contraction, "bmm baddbmm _sparse_addmm"),
        (attention, "scaled_dot_product_attention"),
        (embedding, "embedding"),
        (batch_norm, "batch_norm instance_norm"),
        (group_norm, "group_norm"),
        (layer_norm, "layer_norm rms_norm"),
        (within, "softmax log_softmax _softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp sort topk"),
        (
            same,
            "dropout feature_dropout alpha_dropout native_dropout clone contiguous detach alias lift_fresh to "
            "_to_copy type_as float half bfloat16 fill zero",
        ),
        (
            move,
            "view reshape _unsafe_view flatten unflatten permute transpose t numpy_T movedim swapaxes squeeze "
            "unsqueeze expand expand_as slice select narrow split split_with_sizes tensor_split unbind roll "
            "flip index_select index repeat repeat_interleave pixel_unshuffle channel_shuffle "
            "view_as reshape_as unfold rot90",
        ),
        (pointwise, "hardswish mish log_sigmoid rrelu rrelu_with_noise"),  # PyTorch does not mark these
        (prelu, "prelu"),
        (recurrent, "lstm gru rnn_tanh rnn_relu"),
        (chunk, "chunk"),
        (glu, "glu"),
        (concatenate, "cat concat concatenate"),
        (stack, "stack"),
        (pixel_shuffle, "pixel_shuffle"),
        (scatter, "index_add scatter_add scatter_reduce"),
        (
            reduce,
            "mean sum amax amin max min var std var_mean std_mean prod logsumexp linalg_vector_norm norm all any "
            "argmax argmin median nanmedian kthvalue mode",
        ),
        (
            resample,
            "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d "
            "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
            "adaptive_max_pool3d _adaptive_avg_pool2d upsample_nearest1d upsample_nearest2d upsample_bilinear2d "
            "upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
            "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
            "fractional_max_pool2d",
        ),
        (sample, "grid_sampler grid_sampler_2d grid_sampler_3d roi_align roi_pool"),
        (unpool, "max_unpool2d max_unpool3d"),
        (pad, "pad constant_pad_nd"),
        (
            constant,
            "zeros ones empty full arange new_zeros new_ones new_empty new_full scalar_tensor linspace eye",
        ),
        (like, "zeros_like ones_like empty_like full_like"),
        (noise, "rand randn rand_like randn_like randint_like bernoulli uniform normal exponential random"),
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
