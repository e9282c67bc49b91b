"""How groups are found: the model is run once in evaluation and once in training, and what the trace tied is sorted.

trace (the tracer's room) ─► filters: classes of tied channels, less what has to stay ─► Groups
                          └► weights: every weight of every layer
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from growprune.copying import copied
from growprune.errors import GrowpruneError, line, nearest, warn
from growprune.groups import MAKERS, TIED, Granularity, Groups, Layer, Slice, layer_name, owner
from growprune.holding import held
from growprune.rules import find_rule
from growprune.running import call, fresh, leaves, placed, switched, tensors, to_train_on, whole_operators
from growprune.trace import FIXED, INPUT, Trace, Tracer

RETURNED = "it makes what the model returns"
IGNORED = "it is ignored", "what is ignored belongs to it, or reads it"
ZEROS = "single weights of it are held at zero", "a layer with weights held at zero belongs to it, or reads it"
"""Why what is not to be touched stays, and what belongs to it."""
USED_WHOLE = "a tensor of it is used as a whole"
UNREAD = "no layer reads what it makes"
AT_ONCE = "its filters go only all at once, and something has to stay"
ONE = "it has one filter, which has to stay"
LAYERS = (_ConvNd, nn.Linear)
NORMS = (_NormBase, nn.GroupNorm)
NO_LAYERS = (nn.LayerNorm, nn.RMSNorm, nn.ParameterList, nn.ParameterDict)
COMPUTED = "its weights are computed before each use"
BUFFER = "its weight is a buffer, which nothing trains"
UNREACHED = "the example does not reach it"
NEITHER = "it is neither a convolution nor a linear layer"


def build(
    model: nn.Module,
    example_input: Any,
    granularity: Granularity = "filter",
    coupled: bool = False,
    ignore: Iterable[str | nn.Module] = (),
    stem: bool = False,
) -> Groups:
    """Trace the model and find every unit that may go.

    By default those whose removal stays inside a block: not what a residual addition ties to other layers
    (`coupled=True` lets these go too, all tied filters at once), nor the stem, the layers that read the network's
    input (`stem=True` lets them go: the user's ratios speak of them).
    """
    found = trace(model, example_input)
    if not (found.operations or found.work):
        raise GrowpruneError("the model has no convolution or linear layer that its forward uses")
    if not found.returned and granularity == "filter":
        warn(
            "the model puts out no numbers on the example (no box found, say), so there is nothing to prove a removal "
            "by: give an example on which it does"
        )
    untouched = dict.fromkeys(ignored(model, ignore), IGNORED)
    if not found.operations:  # only such as nothing cuts
        made = Groups((), (), {}, {}, {}, {}, (), granularity)
    elif granularity == "weight":
        made = weights(model, found, untouched)
    else:
        zeros = {id(m._parameters[name]) for m in model.modules() for name, _ in held(m)}
        whole = dict.fromkeys((name for name, t in tensors(model).items() if id(t) in zeros), ZEROS)
        made = filters(found, set(dict(model.named_parameters())), coupled, whole | untouched, stem)
    stays = others(model, found) | neither(model, found, made) | made.stays
    return replace(made, stays=stays, missed=passed_over(model, found))


def others(model: nn.Module, found: Trace) -> dict[str, str]:
    """Convolutions and linear layers that the trace met in no call of theirs, and why."""
    used, names = {op.weight for op in found.operations}, {id(t): name for name, t in tensors(model).items()}
    met = {name for name, _ in found.labels}
    result = {}
    for path, module in model.named_modules():
        if not isinstance(module, LAYERS):
            continue
        weight = {**module._buffers, **module._parameters}.get("weight")
        name = "" if weight is None else names[id(weight)]
        if name not in used:
            if weight is None or name in found.pinned:
                result[path] = COMPUTED
            elif name not in met:  # in training neither
                result[path] = UNREACHED
    return result


def passed_over(model: nn.Module, found: Trace) -> tuple[str, ...]:
    """Norms that did not run, while one of their kind and width beside them did: most likely one of them is chosen."""
    met, names = {name for name, _ in found.labels} | found.pinned, {id(t): name for name, t in tensors(model).items()}
    ran: dict[str, bool] = {}
    kinds: dict[str, tuple[str, type, int]] = {}
    for path, module in model.named_modules():
        own = {names[id(t)] for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
        if isinstance(module, NORMS) and own:
            width = module.num_features if isinstance(module, _NormBase) else module.num_channels
            ran[path], kinds[path] = not met.isdisjoint(own), (owner(path), type(module), width)
    chosen = {kinds[path] for path, did in ran.items() if did}
    return tuple(path for path, did in ran.items() if not did and kinds[path] in chosen)


def neither(model: nn.Module, found: Trace, made: Groups) -> dict[str, str]:
    """Layers of torch's with matrices of weights that nothing is ever cut from: recurrent ones, tables, and others."""
    known = {op.weight for op in found.operations} | {s.tensor for s in made.slices}
    names, result = {id(t): name for name, t in tensors(model).items()}, {}
    for path, module in model.named_modules():
        own = [names[id(p)] for p in module.parameters(recurse=False) if p.dim() > 1]
        ours = type(module).__module__.startswith("torch.nn.modules.") and not isinstance(module, (*LAYERS, *NO_LAYERS))
        if own and ours and known.isdisjoint(own):
            result[path or own[0]] = NEITHER
    return result


def trace(model: nn.Module, example_input: Any) -> Trace:
    """Run a copy of the model, in evaluation mode and in training mode, and return the channel identities.

    A copy, since a forward may change the model's state (a counter, a cache).
    """
    model, example_input = switched(copied(model), training=False), placed(model, example_input)
    tracer = Tracer(model, find_rule)
    tracer.pin(torch.tensor([INPUT]), "it is tied to the model's input")
    try:
        follow(tracer, model, example_input)
    except GrowpruneError:
        raise
    except Exception as error:
        raise GrowpruneError(f"the model fails on the example input: {type(error).__name__}: {line(error)}") from error
    trace_training(tracer, model, example_input)
    return tracer.trace


def follow(tracer: Tracer, model: nn.Module, example_input: Any) -> None:
    """One run, and what it returns stays."""
    example_input = fresh(example_input)
    for t in tree_leaves(example_input):
        if isinstance(t, Tensor):
            tracer.mark(t, torch.full((1,) * t.dim(), INPUT))
    with whole_operators(model), tracer:
        output = call(model, example_input)
    for t in leaves(output):
        tracer.pin(tracer.of(t), RETURNED)
        tracer.trace.returned += t.numel() if tracer.first else 0


def trace_training(tracer: Tracer, model: nn.Module, example_input: Any) -> None:
    """Training may use more than evaluation does (auxiliary heads), and return more: that run ties and pins it too.

    Of a model that cannot run so nothing is known.
    """
    tracer.first = False
    for example in to_train_on(example_input):
        with suppress(Exception):
            follow(tracer, switched(model, training=True), example)
            return


def ignored(model: nn.Module, ignore: Iterable[str | nn.Module]) -> set[str]:
    """Names of the tensors inside ignored modules."""
    paths = {id(module): name for name, module in model.named_modules()}
    names, result = dict(model.named_modules()), set()
    if not isinstance(ignore, (str, nn.Module, Iterable)):
        raise GrowpruneError(f"ignore: give names or modules, not {ignore!r}")
    entries = [ignore] if isinstance(ignore, (str, nn.Module)) else list(ignore)
    every = tensors(model)
    for entry in entries:
        name = entry if isinstance(entry, str) else paths.get(id(entry))
        if name is None or (name not in names and name not in every):
            shown = entry if isinstance(entry, str) else type(entry).__name__
            raise GrowpruneError(f"ignore: the model has no layer '{shown}'{nearest(str(shown), names)}")
        result |= {t for t in every if t == name or t.startswith(f"{name}.") or name == ""}
    return result


# -- filters -------------------------------------------------------------------------------------------------------


def filters(
    found: Trace, parameters: set[str], coupled: bool, untouched: Mapping[str, tuple[str, str]], with_stem: bool
) -> Groups:
    """Every class of tied channels that some layer makes is a unit, unless a rule above keeps it."""
    classes = found.components()
    stays = bound(found, classes, untouched)
    tied = torch.zeros(found.count, dtype=torch.bool)
    tied[tied_by_addition(found, classes)] = True
    if not coupled:
        stays |= tied
    stages = stage_of_layers(found, classes)
    unit_of = torch.full((found.count,), -1)
    layers: list[Layer] = []
    whole, reasons = dict[str, str](), found.reasons()
    start = 0
    for index, (tensor, stem) in enumerate(first_uses(found)):
        dim = made_dim(found, tensor)
        labels = found.labels[tensor, dim]
        every = torch.unique(classes[labels])
        own = every[~stays[every] & (unit_of[every] < 0)]
        alone = stem and not bool(tied[own].any())  # a stem that is part of a residual stream goes as the stream does
        if len(own) < 2 or (alone and not with_stem) or tensor not in parameters:
            stays[own] = True
            if bool((unit_of[every] < 0).all()):
                told = reasons[labels]
                softer = why_by_choice(held_back=alone and len(own) > 0, tied=bool(tied[every].any()))
                softer = AT_ONCE if len(own) == 1 else softer if tensor in parameters else BUFFER
                softer = ONE if len(labels) == 1 and softer == AT_ONCE else softer
                why = found.fixed[int(told[0])][1] if bool((told >= 0).all()) else softer
                whole[layer_name(tensor)] = untouched[tensor][0] if tensor in untouched else why
            continue
        unit_of[own] = torch.arange(start, start + len(own))
        stage = 1 if stem and not alone else stages[tensor]
        layers.append(Layer(layer_name(tensor), start, start + len(own), index, stage, alone))
        start += len(own)
    slices = (
        Slice(t, d, unit_of[classes[labels]], found.roles[t, d], (t, d) in found.read)
        for (t, d), labels in found.labels.items()
    )
    return Groups(
        layers=tuple(layers),
        slices=tuple(s for s in slices if bool((s.units >= 0).any())),
        grouped={name: unit_of[classes[labels]] for name, labels in found.grouped.items()},
        norms=found.norms,
        biases=found.biases,
        positions=positions(found),
        order=tuple(layer_name(tensor) for tensor, _ in first_uses(found)),
        granularity="filter",
        stays=whole,
        work=tuple((each.macs, unit_of[classes[each.labels]]) for each in found.work),
    )


def bound(found: Trace, classes: Tensor, untouched: Mapping[str, tuple[str, str]]) -> Tensor:
    """Classes that stay whatever is asked for; `found` notes why."""
    stays, read = torch.zeros(found.count, dtype=torch.bool), torch.zeros(found.count, dtype=torch.bool)
    stays[classes[FIXED]] = True
    for (tensor, _), labels in found.labels.items():
        if tensor in untouched or tensor in found.pinned:
            stays[classes[labels]] = True
            found.fixed.append((labels, untouched[tensor][1] if tensor in untouched else USED_WHOLE))
    for key in found.read:
        read[classes[found.labels[key]]] = True
    if bool((unread := ~read[classes]).any()):
        stays |= unread
        found.fixed.append((unread.nonzero().flatten(), UNREAD))
    return stays


def why_by_choice(held_back: bool, tied: bool) -> str:
    """Why a layer stays whose channels nothing fixes."""
    if held_back:
        return "it reads the input, and goes only by ratios in a list or by name, or a global one with the stem"
    return "it is added to what other layers make, and goes only with the option coupled" if tied else TIED


def first_uses(found: Trace) -> list[tuple[str, bool]]:
    """Every weight with whether it reads the network's input, in the order of first use."""
    return list({op.weight: (op.weight, op.reads_input) for op in reversed(found.operations)}.values())[::-1]


def made_dim(found: Trace, tensor: str) -> int:
    return 0 if found.roles.get((tensor, 0)) == "filter" else 1


def positions(found: Trace) -> dict[str, int]:
    result: dict[str, int] = {}
    for op in found.operations:
        result[op.weight] = result.get(op.weight, 0) + op.positions
    return result


def tied_by_addition(found: Trace, classes: Tensor) -> Tensor:
    """Classes in which an addition joined filters of different layers: the residual streams."""
    alone = found.components(additions=False)
    made = torch.cat([labels for key, labels in found.labels.items() if found.roles[key] in MAKERS])
    pairs = torch.unique(torch.stack([classes[made], alone[made]]), dim=1)
    streams, times = torch.unique(pairs[0], return_counts=True)
    tied: Tensor = streams[times > 1]
    return tied


def stage_of_layers(found: Trace, classes: Tensor) -> dict[str, int | None]:
    """The residual stage of every layer, from 1; 0 for the stem, None in a network without residual additions.

    A layer belongs to the stream that its block is added to: what it makes is followed from reader to reader until an
    addition takes it in; what comes after the last addition counts to the last stage. Streams of one shape (channels
    and size) are one stage, as the paper counts them.
    """
    shapes = list(dict.fromkeys(shape for labels, shape in found.streams if bool((labels > FIXED + 1).any())))
    joined = torch.full((found.count,), -1)
    for labels, shape in reversed(found.streams):
        if shape in shapes:
            joined[labels] = shapes.index(shape) + 1
    readers: dict[int, list[str]] = {}
    for (tensor, _), labels in ((k, v) for k, v in found.labels.items() if k in found.read):
        for label in torch.unique(classes[labels]).tolist():
            readers.setdefault(label, []).append(tensor)
    result: dict[str, int | None] = {}
    for tensor, stem in reversed(first_uses(found)):
        own = found.labels[tensor, made_dim(found, tensor)]
        stage = int(joined[own].max())
        if stage < 0:
            later = {t for label in torch.unique(classes[own]).tolist() for t in readers.get(label, ())}
            stage = min((s for t in later if (s := result.get(t)) is not None), default=-1)
        result[tensor] = 0 if stem else (stage if stage > 0 else len(shapes) or None)
    return result


# -- single weights ------------------------------------------------------------------------------------------------


def weights(model: nn.Module, found: Trace, untouched: Mapping[str, tuple[str, str]]) -> Groups:
    """Every weight of every convolution and linear layer is a unit, if it is a parameter."""
    own = dict(model.named_parameters())
    stages = stage_of_layers(found, found.components())
    layers: list[Layer] = []
    slices: list[Slice] = []
    whole: dict[str, str] = {}
    start = 0
    for index, (tensor, stem) in enumerate(first_uses(found)):
        if tensor in untouched or tensor not in own:
            whole[layer_name(tensor)] = untouched[tensor][0] if tensor in untouched else BUFFER
            continue
        size = own[tensor].numel()
        layers.append(Layer(layer_name(tensor), start, start + size, index, stages[tensor], stem))
        units = torch.arange(start, start + size).view(own[tensor].shape)
        slices.append(Slice(tensor, None, units, "filter"))
        start += size
    order: Sequence[str] = [layer_name(tensor) for tensor, _ in first_uses(found)]
    return Groups(tuple(layers), tuple(slices), {}, {}, {}, positions(found), tuple(order), "weight", whole)
