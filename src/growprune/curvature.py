"""How a loss curves in each parameter, as Optimal Brain Damage takes it: with Gauss and Newton, so never downwards.

J is the derivative of a network's outputs in its parameters, H = LLᵀ the Hessian of the loss in these outputs. Of JᵀHJ,
which OBD takes for the Hessian (LeCun et al., 1990, after Levenberg and Marquardt), the diagonal is the mean of (JᵀLu)²
over random signs u. So one backward pass is an estimate without bias, whatever the network; each is as wrong as it is
large, where an estimate from products with the Hessian itself drowns in what lies off the diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from growprune.errors import GrowpruneError

Loss = Callable[[Any, Any], Tensor]
WIDEST = 4096
"""Outputs of a sample; their Hessian is made whole for losses other than cross-entropy."""
IGNORED = -100
"""The target that F.cross_entropy passes over."""


def probe(loss: Loss, output: Any, target: Any, generator: torch.Generator) -> Tensor:
    """A scalar; the squares of its gradients have the diagonal of the curvature as their mean.

    `loss` is a mean (or a sum) over samples, which come first in every output.
    """
    outputs = [leaf for leaf in tree_leaves(output) if differentiable(leaf)]
    if not outputs:
        raise GrowpruneError(
            f"criterion: OBD needs outputs that are tensors, in lists, tuples or dicts, not {type(output).__name__}"
        )
    if loss is F.cross_entropy and isinstance(output, Tensor) and output.dim() > 1:
        directions = [along_softmax(output.detach(), target, random_signs(output, generator))]
    else:
        directions = along_any(loss, output, target, generator)
    return torch.stack([(out * direction).sum() for out, direction in zip(outputs, directions, strict=True)]).sum()


def differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, like.shape, generator=generator).to(like.device, like.dtype) * 2 - 1


def along_softmax(output: Tensor, target: Tensor, signs: Tensor) -> Tensor:
    """Lu of cross-entropy: with probabilities p its Hessian is diag(p) - ppᵀ, whatever the target, so that
    L = diag(√p) - p√pᵀ."""
    p = output.softmax(1)
    pushed = p.sqrt() * signs
    along = pushed - p * pushed.sum(1, keepdim=True)
    counted = torch.ones_like(p[:, 0]) if target.is_floating_point() else (target != IGNORED).to(p.dtype)
    return along * (counted / counted.sum().sqrt()).unsqueeze(1)


def along_any(loss: Loss, output: Any, target: Any, generator: torch.Generator) -> list[Tensor]:
    """Lu of any loss, by the eigenvectors of each sample's own Hessian; what bends downwards counts as flat."""
    apart = tree_map(lambda leaf: leaf.detach().requires_grad_() if differentiable(leaf) else leaf, output)
    outputs = [leaf for leaf in tree_leaves(apart) if differentiable(leaf)]
    slopes = torch.autograd.grad(loss(apart, target), outputs, create_graph=True, allow_unused=True)
    bent = [i for i, slope in enumerate(slopes) if slope is not None and slope.requires_grad]
    directions = [torch.zeros_like(out) for out in outputs]
    if not bent:
        return directions
    slope = torch.cat([flat(slopes[i]) for i in bent], 1)
    width = slope.shape[1]
    if width > WIDEST:
        raise GrowpruneError(
            "criterion: OBD with a loss other than F.cross_entropy takes "
            f"{WIDEST:,} outputs a sample at most, not {width:,}"
        )
    rows = []
    for column in slope.sum(0):  # samples do not touch each other, so a sum over them is a row of each one's Hessian
        found = torch.autograd.grad(
            column, [outputs[i] for i in bent], retain_graph=True, allow_unused=True, materialize_grads=True
        )
        rows.append(torch.cat([flat(part) for part in found], 1))
    hessian = torch.stack(rows, 1)
    values, vectors = torch.linalg.eigh(hessian.to(torch.promote_types(hessian.dtype, torch.float32)))
    signs = random_signs(slope, generator)
    along = (vectors @ (values.clamp(min=0).sqrt() * signs).unsqueeze(2)).squeeze(2).to(slope.dtype)
    for i, part in zip(bent, along.split([flat(outputs[i]).shape[1] for i in bent], 1), strict=True):
        directions[i] = part.reshape(outputs[i].shape)
    return directions


def flat(output: Tensor) -> Tensor:
    """A row a sample."""
    return output.reshape(len(output), -1)
