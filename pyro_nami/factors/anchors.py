"""The location and scale of a model's own conditional in unconstrained space, which factors are relative to."""

from __future__ import annotations

import torch
from pyro.distributions import constraints
from torch import Tensor
from torch.distributions import Distribution, TransformedDistribution, transforms

from pyro_nami.factors.types import type_of
from pyro_nami.factors.wrappers import base_of, innermost, through_wrappers

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
    return through_wrappers(prior, _stacked) if _has_anchor(innermost(prior)) else None


def _has_anchor(leaf: Distribution) -> bool:
    return type_of(leaf).anchor is not None or _affine_maps(leaf) is not None


def _stacked(leaf: Distribution) -> Tensor:
    anchor = type_of(leaf).anchor
    loc, scale = _transformed(leaf) if anchor is None else anchor(leaf)
    return torch.stack((loc, scale.clamp(min=torch.finfo(scale.dtype).tiny ** 0.5)), -1)


def _affine_maps(leaf: Distribution) -> list[transforms.AffineTransform] | None:
    """Returns the affine maps of a real base that are left in unconstrained space, None if there are others.

    A last map that is the bijection of its own support (exp, sigmoid, stick-breaking) drops out there.
    """
    if not isinstance(leaf, TransformedDistribution):
        return None
    maps = list(leaf.transforms)
    for i, transform in enumerate(maps):
        while isinstance(transform, transforms.IndependentTransform):
            maps[i] = transform = transform.base_transform
    if maps and isinstance(maps[-1], _OF_SUPPORTS):
        maps.pop()
    affine = [transform for transform in maps if isinstance(transform, transforms.AffineTransform)]
    base = innermost(base_of(leaf))
    real = getattr(base.support, "base_constraint", base.support) is constraints.real
    return affine if real and len(affine) == len(maps) and _has_anchor(base) else None


def _transformed(leaf: Distribution) -> tuple[Tensor, Tensor]:
    assert isinstance(leaf, TransformedDistribution)
    loc, scale = through_wrappers(base_of(leaf), _stacked).unbind(-1)
    for transform in _affine_maps(leaf) or []:
        slope = torch.as_tensor(transform.scale, dtype=loc.dtype, device=loc.device)
        loc, scale = transform.loc + slope * loc, slope.abs() * scale
    return loc.expand(torch.broadcast_shapes(loc.shape, scale.shape)), scale.expand(loc.shape)
