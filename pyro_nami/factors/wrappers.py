"""What a distribution wraps: the one module that follows ``base_dist``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor
from torch.distributions import Distribution

__all__ = [
    "base_of",
    "innermost",
    "layers",
    "named_layers",
    "rewrapped",
    "through_wrappers",
    "without",
]

_MaybeTensor = TypeVar("_MaybeTensor", Tensor, Tensor | None)
_WRAPPERS = (torch.distributions.Independent, MaskedDistribution, ExpandedDistribution)


def base_of(distribution: Any) -> Any:
    """Returns what a distribution wraps; None where it wraps nothing."""
    base = getattr(distribution, "base_dist", None)
    return base if isinstance(base, Distribution) else None


def innermost(distribution: Distribution) -> Distribution:
    """Returns the distribution below all masks, expansions and event dims."""
    return without(distribution, *_WRAPPERS)


def without(distribution: Any, *kinds: type) -> Any:
    """Returns the outermost of the distribution and what it wraps that is of none of some kinds."""
    return next(layer for layer in layers(distribution) if not isinstance(layer, kinds))


def layers(distribution: Any) -> Iterator[Any]:
    """Yields the distribution and all that it wraps, the bases of transforms included; the last wraps nothing."""
    while distribution is not None:
        yield distribution
        distribution = base_of(distribution)


def named_layers(distribution: Any) -> Iterator[tuple[str, Any]]:
    """Yields the `layers`, each behind the path to it: ``""``, ``"base_dist."``, ``"base_dist.base_dist."``.

    Masks, expansions and event dims do not count: a call that masks a site finds the parameters of one that does not.
    """
    path = ""
    for layer in layers(distribution):
        yield path, layer
        path += "" if isinstance(layer, _WRAPPERS) else "base_dist."


def through_wrappers(
    distribution: Distribution, function: Callable[[Distribution], _MaybeTensor]
) -> _MaybeTensor:
    """Applies `function` to the innermost distribution, and returns its tensor at the batch shape of the outermost.

    It maps batch shape ``(*inner)`` to a tensor ``(*inner, *rest)``; the result is ``(*batch, *reinterpreted, *rest)``.
    None stays None.
    """
    if not isinstance(distribution, _WRAPPERS):
        return function(distribution)
    base = base_of(distribution)
    tensor = through_wrappers(base, function)
    if tensor is not None and isinstance(distribution, ExpandedDistribution):
        return tensor.expand(
            torch.Size(distribution.batch_shape) + tensor.shape[len(base.batch_shape) :]
        )
    return tensor


def rewrapped(distribution: Any, function: Callable[[Any], Any]) -> Any:
    """Returns `function` of the innermost distribution in the same wrappers; None where it returns None.

    Batch dims that `function` adds on the left stay.
    """
    if not isinstance(distribution, _WRAPPERS):
        return function(distribution)
    base = rewrapped(base_of(distribution), function)
    if base is None:
        return None
    if isinstance(distribution, ExpandedDistribution):
        return base.expand(torch.broadcast_shapes(base.batch_shape, distribution.batch_shape))
    if isinstance(distribution, MaskedDistribution):
        return base.mask(distribution._mask)
    return base.to_event(distribution.reinterpreted_batch_ndims)
