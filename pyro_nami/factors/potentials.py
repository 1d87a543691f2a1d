"""`tilted`: a distribution times a potential of its value, of the distribution's own kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro.distributions as dist
from torch import Tensor

from pyro_nami.factors.wrappers import rewrapped

__all__ = ["NormalPotential", "tilted"]


class NormalPotential(NamedTuple):
    """A Normal potential, of parts that broadcast with ``(*batch, *event)``.

    Attributes:
        location: of it.
        log_precision: natural logarithm of its precision.
        low, high: bounds of the location of what it is multiplied with, whose scale is at most half of what is between.
            They keep a chain from getting lost where its transitions are learned. None: none.
    """

    location: Tensor
    log_precision: Tensor
    low: Tensor | None = None
    high: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> NormalPotential:
        """Returns the potential with each of its parts changed."""
        low, high = (None if part is None else change(part) for part in (self.low, self.high))
        return NormalPotential(change(self.location), change(self.log_precision), low, high)


def tilted(fn: Any, potential: NormalPotential | Tensor) -> Any:
    """Returns the distribution with density proportional to that of ``fn`` times a potential.

    Args:
        fn: Normal, with a Normal potential for each element; or Categorical or Bernoulli. Below masks and event dims,
            which stay.
        potential: of Normals, for each element; else the logits of all values, ``(*batch, values)``, in nats.

    Example:
        >>> import torch
        >>> from pyro_nami.factors.wrappers import innermost
        >>> prior = dist.Normal(torch.zeros(2), 1.0).to_event(1)
        >>> both = tilted(prior, NormalPotential(torch.tensor([2.0, 4.0]), torch.zeros(2)))  # precisions of 1
        >>> innermost(both).loc, innermost(both).variance
        (tensor([1., 2.]), tensor([0.5000, 0.5000]))
        >>> tilted(dist.Bernoulli(0.5), torch.tensor([0.0, 1.0])).logits
        tensor(1.)
    """
    return rewrapped(fn, functools.partial(_tilted_leaf, potential=potential))


def _tilted_leaf(leaf: Any, potential: NormalPotential | Tensor) -> Any:
    if isinstance(potential, NormalPotential):
        return _tilted_normal(leaf, potential)
    if isinstance(leaf, dist.Bernoulli):
        logits = leaf.logits + potential[..., 1] - potential[..., 0]
        return dist.Bernoulli(logits=logits, validate_args=False)
    return dist.Categorical(logits=leaf.logits + potential, validate_args=False)


def _tilted_normal(leaf: Any, potential: NormalPotential) -> Any:
    loc, scale = leaf.loc, leaf.scale
    if potential.low is not None and potential.high is not None:
        loc = loc.clamp(potential.low, potential.high)
        scale = scale.clamp(max=(potential.high - potential.low) / 2)
    # of the potential's precision to the prior's, the natural logarithm
    ratio = potential.log_precision + 2 * scale.log()
    loc = loc + ratio.sigmoid() * (potential.location - loc)
    scale = scale * (-ratio).sigmoid().sqrt()
    return dist.Normal(loc, scale, validate_args=False)
