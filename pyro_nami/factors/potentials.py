"""`tilted`: a distribution times a potential of its value, of the distribution's own kind."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions import Independent

from pyro_nami.factors.wrappers import base_of, innermost

__all__ = ["NormalPotential", "tilted"]

# location and natural logarithm of the precision of a Normal potential, each `(*batch, *event)`
NormalPotential = tuple[Tensor, Tensor]


def tilted(fn: Any, potential: NormalPotential | Tensor) -> Any:
    """Returns the distribution with density proportional to that of ``fn`` times a potential.

    Args:
        fn: Normal, with a Normal potential for each element; or Categorical or Bernoulli. Below masks and event dims,
            which stay.
        potential: of Normals, location and log precision, each broadcasting with ``(*batch, *event)``; else the logits
            of all values, ``(*batch, values)``, in nats.

    Example:
        >>> import torch
        >>> prior = dist.Normal(torch.zeros(2), 1.0).to_event(1)
        >>> both = tilted(prior, (torch.tensor([2.0, 4.0]), torch.zeros(2)))  # precisions of 1, both of them
        >>> innermost(both).loc, innermost(both).variance
        (tensor([1., 2.]), tensor([0.5000, 0.5000]))
        >>> tilted(dist.Bernoulli(0.5), torch.tensor([0.0, 1.0])).logits
        tensor(1.)
    """
    base: Any = innermost(fn)
    if not isinstance(potential, tuple):
        if isinstance(base, dist.Bernoulli):
            logits = base.logits + potential[..., 1] - potential[..., 0]
            return _wrapped(fn, dist.Bernoulli(logits=logits, validate_args=False))
        return _wrapped(fn, dist.Categorical(logits=base.logits + potential, validate_args=False))
    location, log_precision = potential
    # of the potential's precision to the prior's, the natural logarithm
    ratio = log_precision + 2 * base.scale.log()
    loc = base.loc + ratio.sigmoid() * (location - base.loc)
    scale = base.scale * (-ratio).sigmoid().sqrt()
    return _wrapped(fn, dist.Normal(loc, scale, validate_args=False))


def _wrapped(fn: Any, base: Any) -> Any:
    """Returns a distribution in the masks and event dims of another one."""
    inner = base_of(fn)
    if inner is None:
        return base
    within = _wrapped(inner, base)
    if isinstance(fn, MaskedDistribution):
        return within.mask(fn._mask)
    if isinstance(fn, Independent):
        return within.to_event(fn.reinterpreted_batch_ndims)
    return within
