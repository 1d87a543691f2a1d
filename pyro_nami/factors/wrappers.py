"""What a distribution wraps: the one place that follows ``base_dist``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor
from torch.distributions import Distribution

__all__ = ["innermost", "layers", "through_wrappers"]

_WRAPPERS = (torch.distributions.Independent, MaskedDistribution, ExpandedDistribution)


def innermost(distribution: Distribution) -> Distribution:
    """Returns the distribution below all masks, expansions and event dims."""
    while isinstance(distribution, _WRAPPERS):
        distribution = distribution.base_dist
    return distribution


def layers(distribution: Any) -> Iterator[Any]:
    """Yields the distribution and all that it wraps, the bases of transforms included; the last wraps nothing."""
    yield distribution
    while hasattr(distribution, "base_dist"):
        distribution = distribution.base_dist
        yield distribution


def through_wrappers(distribution: Distribution, function: Callable[[Distribution], Tensor]) -> Tensor:
    """Applies `function` to the innermost distribution, and returns its tensor at the batch shape of the outermost.

    It maps batch shape ``(*inner)`` to a tensor ``(*inner, *rest)``; the result is ``(*batch, *reinterpreted, *rest)``.
    """
    if not isinstance(distribution, _WRAPPERS):
        return function(distribution)
    base = distribution.base_dist
    tensor = through_wrappers(base, function)
    if isinstance(distribution, ExpandedDistribution):
        return tensor.expand(torch.Size(distribution.batch_shape) + tensor.shape[len(base.batch_shape) :])
    return tensor
