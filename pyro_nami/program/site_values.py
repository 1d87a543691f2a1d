"""Values for a site: one within its support, for any distribution, and one that differs from a given value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Independent
from torch.distributions.constraints import Constraint

from pyro_nami.factors.bijections import bijection_to
from pyro_nami.factors.wrappers import innermost, without
from pyro_nami.program.plate_dims import spread

__all__ = ["any_value", "drawn", "first_value", "num_values", "redraw"]

_COUNTED = (dist.Categorical, dist.OneHotCategorical, dist.Bernoulli)


def drawn(fn: Any) -> Any:
    """A draw; None from a distribution that has none (``ImproperUniform``)."""
    try:
        return fn()
    except NotImplementedError:
        return None


def any_value(
    fn: Any, like: Tensor | None = None, unconstrained: Callable[..., Tensor] = torch.randn
) -> Any:
    """A value of shape ``fn.shape()`` in the support: a draw, or the image of a point in unconstrained space.

    Args:
        fn: the distribution.
        like: of the point's dtype and device; where no bijection is known, it is returned if it has the shape.
        unconstrained: makes the point, from ``(shape, dtype=, device=)``: ``torch.randn``, ``torch.zeros``.

    Example:
        >>> from pyro.distributions import ImproperUniform, constraints
        >>> any_value(ImproperUniform(constraints.positive, (), (2,)), unconstrained=torch.zeros)
        tensor([1., 1.])
    """
    value = drawn(fn)
    if value is not None:
        return value
    try:
        transform = bijection_to(fn.support)
    except NotImplementedError:
        if like is not None and like.shape != fn.shape():
            raise
        return like
    kind = next(_bounds_of(fn.support), torch.empty(0)) if like is None else like
    return transform(
        unconstrained(transform.inverse_shape(fn.shape()), dtype=kind.dtype, device=kind.device)
    )


def _bounds_of(constraint: Any) -> Iterator[Tensor]:
    """Yields the bounds of a support that are tensors: its values have their dtype and device."""
    for value in vars(constraint).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Constraint):
            yield from _bounds_of(value)


def first_value(fn: Any) -> Tensor:
    """Returns zeros of the shape of a distribution over real numbers, or its first value, of the draws' dtype.

    Example:
        >>> first_value(dist.Normal(torch.ones(2), 1.0)), first_value(dist.Categorical(torch.ones(3)))
        (tensor([0., 0.]), tensor(0))
    """
    base: Any = innermost(fn)
    if base.has_enumerate_support:
        return base.enumerate_support(expand=False).flatten()[0].expand(fn.shape())
    return torch.zeros_like(base.loc).new_zeros(fn.shape())


def redraw(fn: Any, base: Tensor, *, tries: int = 20) -> Tensor:
    """A draw from ``fn`` that differs from ``base`` in every element, where ``fn`` has another value.

    Args:
        fn: the distribution.
        base: a value of its shape, or of another one, which any draw differs from.
        tries: draws to find a value that differs, where the support cannot be enumerated: of a Poisson with rate 0.1,
            all are zero with probability 0.9^20 = 0.12.

    Example:
        >>> import pyro.distributions as dist
        >>> redraw(dist.Bernoulli(torch.full((3,), 0.5)), torch.tensor([0.0, 1.0, 1.0]))
        tensor([1., 0., 0.])
    """
    value, fn = any_value(fn, base), without(fn, Independent)
    for _ in range(tries if value.shape == base.shape else 0):
        stuck = _whole_event(value == base, fn.event_dim)
        if not stuck.any():
            break
        other = _other_value(fn, base) if fn.has_enumerate_support else any_value(fn, base)
        value = torch.where(stuck, other, value)
    return value.to(base.dtype)


def _other_value(fn: Any, base: Tensor) -> Tensor:
    """A draw from ``fn`` given that it is not ``base``; ``base`` where it can be nothing else."""
    try:
        support = fn.enumerate_support()
    except NotImplementedError:
        return fn()
    log_prob = fn.log_prob(support)
    score = spread(log_prob - torch.empty_like(log_prob).exponential_().log(), -1 - fn.event_dim)
    same = _whole_event(support == base, fn.event_dim)
    best, index = score.masked_fill(same, -torch.inf).max(0, keepdim=True)
    return torch.where(best.isfinite(), support.gather(0, index.expand((1,) + base.shape)), base)[0]


def _whole_event(equal: Tensor, event_dim: int) -> Tensor:
    return spread(equal.flatten(-event_dim).all(-1), -1 - event_dim) if event_dim else equal


def num_values(prior: Any, *, most: int = 64) -> int | None:
    """Returns how many values a latent has that can be enumerated; None if it cannot be.

    Args:
        prior: its distribution.
        most: the most values that are enumerated; a run of the model has a batch dim of so many.
    """
    base: Any = innermost(prior)
    if type(base) not in _COUNTED or prior.event_shape != base.event_shape:
        return None
    count = 2 if isinstance(base, dist.Bernoulli) else base.probs.shape[-1]
    return count if count <= most else None
