"""What a Pruner refuses before it does anything: each check is one line that names the thing and the way out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from growprune.attached import hooked, within
from growprune.errors import GrowpruneError, warn
from growprune.grouping import LAYERS, UNREACHED
from growprune.groups import MAKERS, Groups, Layer, layer_name, owner
from growprune.holding import held
from growprune.ratios import ByName, Spec
from growprune.running import tensors, unsound
from growprune.schedule import Penalty, Phase, Schedule, is_number, is_whole


def unwrapped(model: nn.Module) -> nn.Module:
    """The module itself, if it is one that can be narrowed."""
    if not isinstance(model, nn.Module):
        raise GrowpruneError(f"model: need a torch.nn.Module, not {type(model).__name__}")
    model = itself(model)
    refuse(model)
    return model


WRAPPERS = nn.parallel.DistributedDataParallel, nn.DataParallel, torch.optim.swa_utils.AveragedModel


def itself(model: nn.Module) -> nn.Module:
    """Out of DistributedDataParallel, DataParallel, AveragedModel and torch.compile, with the same parameters."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # torch.compile
        if inner is None and isinstance(model, WRAPPERS):
            inner = model.module
        if inner is None:
            return model
        model = inner


def refuse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        at = f"'{name}'" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise GrowpruneError(f"{at} is a TorchScript module, which cannot be narrowed: prune the Python module")
        if "FullyShardedDataParallel" in type(module).__name__ or "FSDPModule" in {
            c.__name__ for c in type(module).__mro__
        }:
            raise GrowpruneError(f"{at} is sharded (FSDP), so no process sees whole filters: prune before sharding")
    devices = {p.device for p in model.parameters()}
    if not devices:
        raise GrowpruneError("the model has no parameters")
    if devices == {torch.device("meta")}:
        raise GrowpruneError("the model is on the meta device and holds no weights: load them first")
    if len(devices) > 1:
        raise GrowpruneError(
            f"the model lies on several devices ({', '.join(sorted(map(str, devices)))}): move it to one"
        )


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def not_for_inference(what: str) -> None:
    if torch.is_inference_mode_enabled():
        raise GrowpruneError(
            f"{what}: what is made in torch.inference_mode() cannot be trained; use torch.no_grad() instead"
        )


def example(given: Any) -> None:
    """Is it an input, and not what inputs come from?"""
    if not isinstance(given, (Tensor, tuple, list, Mapping)):
        raise GrowpruneError(
            "example_input: give a tensor, a tuple of arguments or a dict of keyword arguments (any other thing as "
            f"(it,)), not {full_name(type(given))}"
        )


def choices(schedule: Schedule, granularity: str, scope: str, coupled: bool, seed: int, multiple: int) -> None:
    if not isinstance(schedule, Schedule):
        raise GrowpruneError(f"schedule: give GReg1(), GReg2(), OneShot() or a Schedule of your own, not {schedule!r}")
    for name in ("total_steps", "pick_step"):
        if not is_whole(value := getattr(schedule, name)) or value < 0:
            raise GrowpruneError(f"schedule: {name} of {type(schedule).__name__} must be a whole number, not {value!r}")
    if schedule.pick_step > schedule.total_steps:
        raise GrowpruneError(
            f"schedule: {type(schedule).__name__} picks at step {schedule.pick_step}, but ends at step "
            f"{schedule.total_steps}"
        )
    for name, value, known in (
        ("granularity", granularity, ("filter", "weight")),
        ("scope", scope, ("filter", "path")),
    ):
        if value not in known:
            raise GrowpruneError(f"{name}: '{value}' is none of {', '.join(known)}")
    if not isinstance(coupled, bool):
        raise GrowpruneError(f"coupled is True or False, not {coupled!r}")
    if not is_whole(seed) or seed < 0:
        raise GrowpruneError(f"seed: a whole number from 0 on, not {seed!r}")
    if not is_whole(multiple) or multiple < 1:
        raise GrowpruneError(f"multiple: a whole number from 1 on, not {multiple!r}")
    if granularity == "weight" and multiple > 1:
        raise GrowpruneError("multiple is for filters: of single weights any number can go")
    if granularity == "weight" and scope == "path":
        raise GrowpruneError("scope: path is for filters, a single weight has none")


def named(model: nn.Module, spec: Spec, groups: Groups) -> None:
    """Ratios by name are for layers that have filters; a model has other modules too."""
    modules = dict(model.named_modules())
    for name in (each for each, _ in spec.ratios) if isinstance(spec, ByName) else ():
        if name in modules and name not in groups.order and name not in groups.stays:
            weight = modules[name].weight if isinstance(modules[name], LAYERS) else None
            first = next((layer_name(each) for each, t in tensors(model).items() if t is weight), name)
            if first != name:
                raise GrowpruneError(f"ratios: the weight of '{name}' is that of '{first}': name that one instead")
            inside = [f"'{layer.name}'" for layer in groups.layers if layer.name.startswith(f"{name}.") or not name]
            way = f"name those inside it, as {', '.join(inside[:2])}" if inside else "convolutions and linear layers do"
            raise GrowpruneError(f"ratios: '{name}' ({type(modules[name]).__name__}) has no filters of its own; {way}")


def weights(model: nn.Module) -> None:
    for name, t in tensors(model).items():
        if torch.nn.parameter.is_lazy(t):
            raise GrowpruneError(f"'{name}' is not initialised: run the model once first")
    if (bad := unsound(model)) is not None:
        raise GrowpruneError(
            f"'{bad}' holds NaN or infinite values; if training diverged, go back to before it did and take a lower "
            "learning rate"
        )


def unheld(model: nn.Module) -> None:
    """Single weights that were pruned are held at zero, and a layer that has them keeps its filters."""
    for name, module in model.named_modules():
        if next(held(module), None) is not None:
            raise GrowpruneError(
                f"no filter of this model can be pruned: single weights of '{name}' were, and are held at zero; "
                "prune filters first, single weights after"
            )


def trainable(model: nn.Module, groups: Groups, names: Iterable[str]) -> None:
    """All that cannot be pushed at once, in as few names as will do for ignore; or the scope that does not push it."""
    own, filters = dict(model.named_parameters()), {s.tensor for s in groups.of_role(*MAKERS)}
    frozen = [name for name in names if not own[name].requires_grad]
    training = [name for name, p in own.items() if p.requires_grad]
    if not frozen:
        return
    if not training:
        raise GrowpruneError("the whole model is frozen (requires_grad=False), so no penalty can push it: unfreeze it")
    parts = list(dict.fromkeys(apart(name, training) for name in frozen))
    named = ", ".join(f"'{part}'" for part in parts[:3]) + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")
    way = f"name {named} in the option ignore"
    if filters.isdisjoint(frozen):
        way = "take scope filter, which pushes filters' own weights alone"
    what, them = (f"'{frozen[0]}' is", "it") if len(frozen) == 1 else (f"{len(frozen)} tensors are", "them")
    raise GrowpruneError(
        f"{what} frozen (requires_grad=False), so no penalty can push {them}: unfreeze {them}, or {way}"
    )


def apart(name: str, others: Iterable[str]) -> str:
    """The largest module around a tensor that has none of the others, or the one that it hangs on.

    >>> apart("body.layer1.conv.weight", ["body.layer2.conv.weight"]), apart("a.weight", ["a.bias"])
    ('body.layer1', 'a')
    """
    part = owner(name) or name
    while (around := owner(part)) and not any(other.startswith(f"{around}.") for other in others):
        part = around
    return part


def reached(model: nn.Module, groups: Groups, losing: Iterable[Layer]) -> None:
    """Tell, once, of a layer or norm that the example does not reach and that may read, in another call, what goes.

    Whose channels it reads nobody can know. So only of one that takes in just as many as a layer makes that loses some,
    and of a module that is not reached at all only its first layer: the others read what is made there.
    """
    every = [name for name, it in model.named_modules() if isinstance(it, LAYERS) or name in groups.missed]
    missed = [name for name in every if groups.stays.get(name) == UNREACHED or name in groups.missed]
    met = [name for name in every if name not in missed]
    entries = {apart(f"{name}.weight", met): name for name in reversed(missed)}
    names = {layer.name for layer in losing}
    made = {len(s.units): layer_name(s.tensor) for s in groups.of_role("filter") if layer_name(s.tensor) in names}
    for name in reversed(entries.values()):
        layer: Any = model.get_submodule(name)
        widths = (getattr(layer, each, None) for each in ("in_features", "in_channels", "num_features", "num_channels"))
        maker = made.get(next(width for width in widths if width is not None))
        if maker is not None:
            warnings.warn(
                f"the example does not reach '{name}', which takes in as many channels as '{maker}' makes: if a call "
                f"has it read these, it will fail on the smaller network; then name '{maker}' in the option ignore",
                stacklevel=3,
            )
            return


def penalty(given: Any, schedule: Schedule, step: int) -> Penalty:
    """What a schedule of one's own says of a step, if it can be added to weights."""
    if (
        isinstance(given, Penalty)
        and isinstance(given.phase, Phase)
        and all(map(is_number, (given.pruned, given.kept)))
    ):
        return given
    raise GrowpruneError(
        f"schedule: {type(schedule).__name__}.at({step}) must give a Penalty of a Phase and two finite numbers, not "
        f"{short(given)}"
    )


LOW = torch.half, torch.bfloat16


def shrinks(weights: Iterable[Tensor], optimizers: Mapping[torch.optim.Optimizer, bool], schedule: Schedule) -> None:
    """Tell of weights in half precision that a step takes less from than their format can tell: they never move."""
    tau = getattr(schedule, "tau", None)
    low = {id(w): w.dtype for w in weights if w.dtype in LOW}
    if not low or tau is None:
        return
    for optimizer, decoupled in optimizers.items():
        for group in optimizer.param_groups:
            if not group.get("lr"):  # 0: it warms up; None: some kinds have none
                continue
            kinds = {low[id(p)] for p in group["params"] if id(p) in low}
            faster = 1 if decoupled else 1 / (1 - min(0.999, float(group.get("momentum", 0.0))))
            share = float(group["lr"]) * tau * faster
            for kind in kinds:
                if share < (least := torch.finfo(kind).eps / 2):
                    warn(
                        f"attach: weights in {str(kind).removeprefix('torch.')} cannot shrink by lr·τ = {share:.1g} of "
                        f"themselves a step (the least is {least:.1g}), so nothing will be pushed: keep them in "
                        "float32, with autocast for speed"
                    )
                    return


def unchanged(model: nn.Module, groups: Groups, shapes: Mapping[str, torch.Size]) -> None:
    """Is of the model, as far as it is pruned, all as it was when the pruner was made?"""
    now = tensors(model)
    for name in dict.fromkeys(s.tensor for s in groups.slices):
        if name not in now or now[name].shape != shapes[name]:
            how = "is no more" if name not in now else f"has another shape, {tuple(now[name].shape)}"
            raise GrowpruneError(
                f"the model has changed since the pruner was made: '{name}' {how}; make the pruner anew"
            )


def several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def optimizers(given: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Those that are to go on with the smaller network: none, one, or several, each once."""
    own = {id(p) for p in model.parameters()}
    found = list(dict.fromkeys(within(each) for each in several(given) if each is not None))
    for each in found:
        if not isinstance(each, torch.optim.Optimizer):
            raise GrowpruneError(
                f"compact: optimizer= takes a torch optimizer, or several in a list, not {full_name(type(each))}"
            )
        if not any(id(p) in own for group in each.param_groups for p in group["params"]):
            raise GrowpruneError("compact: this optimizer holds no parameter of the model, so it cannot go on with it")
    return found


def left_out(small: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Tell of parameters that would not be trained any more: another optimizer may have done that."""
    holding = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    missed = [name for name, p in small.named_parameters() if p.requires_grad and id(p) not in holding]
    if missed:
        more = f" and {len(missed) - 1} more" if missed[1:] else ""
        warn(
            f"compact: none of the optimizers given holds '{missed[0]}'{more}: if another one trains them, give "
            "optimizer=[both], or it goes on with those of before"
        )


def carriers(given: Any) -> list[torch.optim.Optimizer]:
    """The optimizers, one or several, that are to carry a penalty; each once."""
    found = list(dict.fromkeys(optimizer(each) for each in several(given)))
    if not found:
        raise GrowpruneError("attach: give a torch optimizer, or several in a list; this one is empty")
    return found


def optimizer(given: Any) -> torch.optim.Optimizer:
    """The optimizer itself, if it is one that can carry a penalty."""
    if not isinstance(given, torch.optim.Optimizer):
        way = "; attach to the torch.optim one inside it, if there is one" if hasattr(given, "step") else ""
        raise GrowpruneError(f"attach: need a torch optimizer, not {full_name(type(given))}{way}")
    found: torch.optim.Optimizer = within(given)
    if not hooked(found):
        raise GrowpruneError(
            f"attach: {type(found).__name__} runs no hooks when it steps, so no penalty would act: "
            "attach to the optimizer that it wraps"
        )
    return found


def full_name(kind: type) -> str:
    """
    >>> full_name(int), full_name(nn.Linear)
    ('int', 'torch.nn.modules.linear.Linear')
    """
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
