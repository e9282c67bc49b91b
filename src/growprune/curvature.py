"""How a loss curves in each parameter, as Optimal Brain Damage takes it: with Gauss and Newton, so never downwards.

J is the derivative of a network's outputs in its parameters, H = LLᵀ the Hessian of the loss in these outputs. Of JᵀHJ,
which OBD takes for the Hessian (LeCun et al., 1990, after Levenberg and Marquardt), the diagonal is the mean of (JᵀLu)²
over random signs u. So one backward pass is an estimate without bias, whatever the network, with a deviation of at most
√2 of the value; one from products with the whole Hessian drowns in what lies off the diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from growprune.errors import GrowpruneError
from growprune.running import exact

Loss = Callable[[Any, Any], Tensor]
WIDEST = 4096
"""The most outputs of a sample with a loss other than cross-entropy, for then their Hessian is made whole."""
FIRST = "criterion: OBD needs a loss that is a mean over samples, which come first in the model's outputs"


def probe(loss: Loss, output: Any, target: Any, generator: torch.Generator) -> Tensor:
    """A scalar; the squares of its gradients have the diagonal of the curvature as their mean."""
    outputs = [leaf for leaf in tree_leaves(output) if differentiable(leaf)]
    if not outputs:
        raise GrowpruneError("criterion: OBD finds no tensor to differentiate in the model's output")
    ignored = ignored_class(loss)
    if ignored is not None and isinstance(output, Tensor):
        directions = [along_softmax(output.detach(), target, ignored, random_signs(output, generator))]
    else:
        directions = along_any(loss, output, target, generator)
    return torch.stack([(out * direction).sum() for out, direction in zip(outputs, directions, strict=True)]).sum()


def differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Drawn on the CPU, so that they are the same on every device."""
    return torch.randint(0, 2, like.shape, generator=generator).to(like.device, torch.float32) * 2 - 1


def ignored_class(loss: Loss) -> int | None:
    """The class that a mean cross-entropy (or its second half, after a log-softmax) passes over; None: another loss.

    Smoothed labels do not matter: the Hessian does not know the target.
    """
    if loss in (F.cross_entropy, F.nll_loss):
        return -100
    plain = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) and loss.weight is None and loss.reduction == "mean"
    return loss.ignore_index if plain else None  # type: ignore[attr-defined]


def along_softmax(output: Tensor, target: Any, ignored: int, signs: Tensor) -> Tensor:
    """Lu of cross-entropy: with probabilities p its Hessian is diag(p) - ppᵀ for any target whose shares add up to one,
    so that L = diag(√p) - p√pᵀ. (Log-probabilities are their own logits.)"""
    if output.dim() < 2:
        raise GrowpruneError(f"{FIRST}: this one has {output.dim()} dimensions")
    p = exact(output).softmax(1)
    counted = torch.ones_like(p[:, 0])
    if not target.is_floating_point():
        counted = (target != ignored).to(p.dtype)
        if counted.shape != p[:, 0].shape or bool(((target < 0) | (target >= p.shape[1]))[counted > 0].any()):
            raise GrowpruneError(
                f"criterion: targets must be classes from 0 to {p.shape[1] - 1}, one a sample ({ignored}: not counted)"
            )
    pushed = p.sqrt() * signs
    along = pushed - p * pushed.sum(1, keepdim=True)
    return (along * (counted / counted.sum().clamp(min=1).sqrt()).unsqueeze(1)).to(output.dtype)


def along_any(loss: Loss, output: Any, target: Any, generator: torch.Generator) -> list[Tensor]:
    """Lu of any loss, by the eigenvectors of each sample's own Hessian; what bends downwards counts as flat."""
    apart = tree_map(lambda leaf: leaf.detach().requires_grad_() if differentiable(leaf) else leaf, output)
    outputs = [leaf for leaf in tree_leaves(apart) if differentiable(leaf)]
    value = loss(apart, target)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise GrowpruneError(f"criterion: the loss must give one number, not {type(value).__name__}{shape_of(value)}")
    slopes = torch.autograd.grad(value, outputs, create_graph=True, allow_unused=True)
    bent = [i for i, slope in enumerate(slopes) if slope is not None and slope.requires_grad]
    directions = [torch.zeros_like(out) for out in outputs]
    if not bent:
        return directions
    if len({tuple(outputs[i].shape[:1]) for i in bent}) > 1 or not outputs[bent[0]].dim():
        raise GrowpruneError(f"{FIRST}; here they have shapes {[list(outputs[i].shape) for i in bent]}")
    slope = flat([slopes[i] for i in bent])
    width = slope.shape[1]
    if width > WIDEST:
        raise GrowpruneError(
            "criterion: OBD with a loss other than cross-entropy on the model's output takes "
            f"{WIDEST:,} outputs a sample at most, not {width:,}"
        )

    def row(part: Tensor) -> Tensor:
        """The Hessian's row (or a sum of rows) for a part of the slope, a row a sample."""
        found = torch.autograd.grad(
            part, [outputs[i] for i in bent], retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return flat(found)

    if bool(row(slope[0].sum())[1:].any()):
        raise GrowpruneError(f"{FIRST}; this one's samples touch each other")
    hessian = torch.stack([row(column) for column in slope.sum(0)], 1)
    values, vectors = torch.linalg.eigh(exact(hessian))
    pushed = values.clamp(min=0).sqrt() * random_signs(slope, generator)
    along = (vectors @ pushed.unsqueeze(2)).squeeze(2)
    for i, part in zip(bent, along.split([flat([outputs[i]]).shape[1] for i in bent], 1), strict=True):
        directions[i] = part.reshape(outputs[i].shape).to(outputs[i].dtype)
    return directions


def flat(parts: Any) -> Tensor:
    """A row a sample, all parts side by side."""
    return torch.cat([part.reshape(len(part), -1) for part in parts], 1)


def shape_of(value: Any) -> str:
    return f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
