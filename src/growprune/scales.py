"""Is a network shown its images as it was trained on them? Asked before it is pruned, and when it is tested."""

from __future__ import annotations

from torch import nn

from growprune import distributed, evaluation, origin
from growprune.config import SCALED
from growprune.feeds import Images

USUAL = *SCALED, "0.5/0.5"
"""Scales that networks are trained with, to be tried."""
STRANGE = 10.0
"""Points of accuracy that a trained network may gain by another scale, or by new statistics, and not be questioned."""
ENOUGH = 2500
"""Test images to see that by; of large sets the others are left out."""


def doubt(net: nn.Module, images: Images, accuracy: float, batch: int) -> str | None:
    """In a line, if it is doubtful: by the run that trained the network; else by its batch norm, if statistics that are
    estimated anew, from batches of so many images, fit far better. A usual scale that does so too is named."""
    scale, known = images.config.normalize, origin.scaled_as(getattr(images.config, "weights", None))
    known = distributed.from_first(images.world, known)
    if known not in (None, scale):
        return f"--normalize {scale}: the run that trained this network had {known}"
    if known is not None or accuracy + STRANGE >= 100 or not evaluation.norms(net):
        return None
    few = images.fewer(ENOUGH)
    accuracy = evaluation.accuracy(net, few) if few.one_in > 1 else accuracy
    anew = evaluation.accuracy(evaluation.estimated(net, images, batch), few)
    if anew <= accuracy + STRANGE:
        return None
    found, how = anew, "batch norm's statistics estimated anew on these images"
    others = {name: evaluation.accuracy(net, few.scaled(name)) for name in USUAL if name != scale}
    best = max(others, key=lambda name: others[name])
    if others[best] > accuracy + STRANGE and others[best] + STRANGE > anew:  # else none of them is the one
        found, how = others[best], f"--normalize {best}"
    which = "some" if few.one_in > 1 else "the"
    return (
        f"the network is right on {accuracy:.1f} % of {which} test images, and on {found:.1f} % with {how}: is "
        f"--normalize {scale} as it was when the network was trained?"
    )
