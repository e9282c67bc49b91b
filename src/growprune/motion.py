"""What operators that compute no channels of their own do to labels: element by element, moving, reducing, resampling.

The rules of layers and norms, and the table of all of them, are in `rules.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from growprune.trace import FIXED, NONE, Tracer, compressed, varying

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


def blank(t: Tensor, label: int) -> Tensor:
    return torch.full((1,) * t.dim(), label)


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
    """The value passes unchanged (a dropout at rest, a clone, another dtype); a parameter's stays the parameter's."""
    name = None if hasattr(args[0], "_labels") else tracer.name(args[0])
    for t in tree_leaves(out):
        if isinstance(t, Tensor) and t is not args[0]:
            if name is not None:
                tracer.also(t, name)
                continue
            tracer.mark(t, tracer.of(args[0]))
            if hasattr(args[0], "_made_by"):
                t._made_by = args[0]._made_by  # type: ignore[attr-defined]


def move(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Labels move as the data does: the same operator is run on them.

    A channel dimension may be carried along whole, or flattened together with others; one that is split, sliced or
    reordered has boundaries written into the model's code, so its channels stay.
    """
    x = args[0]
    if out is x and not func._schema.is_mutable:  # flatten() of what is flat, say, is its input itself
        return
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


def chunk(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Into so many parts, however wide all of it is: the channels may go where the parts are equal."""
    x, count = args[0], argument(func, args, kwargs, "chunks")
    parts = equal_parts(tracer, tracer.of(x), count, argument(func, args, kwargs, "dim") % x.dim())
    if parts is None:
        move(tracer, func, args, kwargs, out)
        return
    for t, labels in zip(out, parts, strict=True):
        tracer.mark(t, compressed(labels))


def glu(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """One half of the channels times the sigmoid of the other."""
    labels, dim = tracer.of(args[0]), argument(func, args, kwargs, "dim") % args[0].dim()
    halves = equal_parts(tracer, labels, 2, dim)
    if halves is None and dim in varying(labels):
        tracer.give_up(func, args, kwargs, out)
        return
    tracer.mark(out, labels if halves is None else compressed(halves[0]))


def equal_parts(tracer: Tracer, labels: Tensor, count: int, dim: int) -> tuple[Tensor, ...] | None:
    """Labels of the parts of the channel dimension, tied: to stay equal they lose the same places. None: of no such."""
    if varying(labels) != [dim] or labels.shape[dim] % count:
        return None
    first, *others = torch.where(labels == NONE, FIXED, labels).chunk(count, dim)  # what is no channel cannot go either
    for part in others:
        tracer.tie(first, part)
    return labels.chunk(count, dim)


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


def stack(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Side by side in a new dimension, as concatenation along one without channels: they are tied."""
    dim = argument(func, args, kwargs, "dim") % out.dim()
    merged, *others = map(tracer.of, args[0])
    for labels in others:
        merged = meet(tracer, merged, labels, [], by_addition=True)
    tracer.mark(out, merged.unsqueeze(dim))


def pixel_shuffle(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """So many channels that become one channel's pixels go together."""
    rank, factor = out.dim(), argument(func, args, kwargs, "upscale_factor")
    parts = tracer.channels(args[0], rank - 3).view(-1, factor**2)
    tracer.tie(parts, parts[:, :1])
    tracer.mark(out, along(parts[:, 0], rank - 3, rank))


def scatter(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Rows added to rows (of a graph's nodes, say); along the other dimensions the channels meet one to one. Nothing is
    asked of the target if it is a constant: one of a fixed width is found by trial."""
    target, dim, rows = args[0], args[1] % out.dim(), args[3]
    constant = not hasattr(target, "_labels") and tracer.name(target) is None
    labels = [tracer.of(rows)] if constant else [tracer.of(target), tracer.of(rows)]
    merged = torch.full((1,) * out.dim(), NONE)
    for each in labels:
        if dim in varying(each):
            tracer.pin(each)
        merged = meet(tracer, merged, each.narrow(dim, 0, 1), [], by_addition=True)
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


def sample(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """The same, at places that the second argument says: those are no channels that could go."""
    tracer.pin(tracer.of(args[1]))
    resample(tracer, func, args, kwargs, out)


def unpool(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Back to where the maxima were: every channel with its own places."""
    tracer.tie(tracer.channels(args[0], 1), tracer.channels(args[1], 1), by_addition=True)
    resample(tracer, func, args, kwargs, out)


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


def within(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    """What happens along one dimension, for each place of the others by itself: a softmax, a running sum, a sorting."""
    x, labels = args[0], tracer.of(args[0])
    if argument(func, args, kwargs, "dim") % x.dim() in varying(labels):
        tracer.pin(labels)
        labels = blank(x, FIXED)
    for t in tree_leaves(out):
        if isinstance(t, Tensor):
            tracer.mark(t, labels)


def like(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """A new tensor as wide as an activation: it gets narrower as that does."""
    if hasattr(args[0], "_labels"):
        tracer.mark(out, tracer.of(args[0]))


def noise(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Tensor) -> None:
    """Random numbers. A narrower tensor draws others, so that no proof could hold: what meets them stays. Of training
    nothing is proved: there they are as wide as what they are drawn for (a dropout by hand), or of no account."""
    labelled = not tracer.first and isinstance(args[0], Tensor) and hasattr(args[0], "_labels")
    tracer.mark(out, tracer.of(args[0]) if labelled else blank(out, FIXED if tracer.first else NONE))


def constant(tracer: Tracer, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    """A new tensor that holds nothing of its arguments: left unmarked, as any constant is."""
