"""The location and scale of a model's own conditional in unconstrained space, which factors are relative to."""

from __future__ import annotations

import torch
from pyro.distributions import constraints
from torch import Tensor
from torch.distributions import Distribution, TransformedDistribution, transforms

from pyro_nami.factors.bijections import peel_support, peel_transform
from pyro_nami.factors.types import type_of
from pyro_nami.factors.wrappers import base_of, through_wrappers

__all__ = ["location_and_scale"]

_OF_SUPPORTS = (
    transforms.ExpTransform,
    transforms.SigmoidTransform,
    transforms.StickBreakingTransform,
)


def location_and_scale(prior: Distribution) -> Tensor | None:
    """Returns the location and scale of `prior` in unconstrained space, ``(*batch, *unconstrained event, 2)``.

    Scales are kept above the square root of the dtype's smallest number, so that they and their squares can be divided
    by. None where the type has no anchor in the table, which stands for (0, 1).

    Example:
        >>> location_and_scale(torch.distributions.LogNormal(torch.tensor(1.0), torch.tensor(2.0)))
        tensor([1., 2.])
    """
    return through_wrappers(prior, _of_leaf)


def _of_leaf(leaf: Distribution) -> Tensor | None:
    anchor = type_of(leaf).anchor
    found = _transformed(leaf) if anchor is None else anchor(leaf)
    if found is None:
        return None
    loc, scale = found
    return torch.stack((loc, scale.clamp(min=torch.finfo(scale.dtype).tiny ** 0.5)), -1)


def _transformed(leaf: Distribution) -> tuple[Tensor, Tensor] | None:
    """Returns location and scale of a real base after affine maps; None if there are other maps.

    A last map that is the bijection of its own support (exp, sigmoid, stick-breaking) drops out there.
    """
    if not isinstance(leaf, TransformedDistribution):
        return None
    base, maps = base_of(leaf), [peel_transform(each) for each in leaf.transforms]
    if maps and isinstance(maps[-1], _OF_SUPPORTS):
        maps.pop()
    real = peel_support(base.support)[0] is constraints.real
    moments = location_and_scale(base) if real else None
    if moments is None:
        return None
    loc, scale = moments.unbind(-1)
    for each in maps:
        if not isinstance(each, transforms.AffineTransform):
            return None
        slope = torch.as_tensor(each.scale, dtype=loc.dtype, device=loc.device)
        loc, scale = each.loc + slope * loc, slope.abs() * scale
    loc, scale = torch.broadcast_tensors(loc, scale)
    return loc, scale
