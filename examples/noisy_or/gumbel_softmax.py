"""Reparametrized draws of binary and one-hot types by the Gumbel-softmax, scored by the discrete type's own density.

The discrete log density is linear in the value, so a bound at relaxed draws extends the discrete
bound. The density of the relaxed variable itself (the concrete density) is not used.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributions as td
from pyro import distributions as dist
from torch import Tensor
from torch.distributions import constraints

from pyro_nami.factors.distribution import Relocated, SiteDistribution
from pyro_nami.factors.elements import LatestDraw, logistic_noise, off_ends
from pyro_nami.factors.family import SequentialElements
from pyro_nami.factors.wrappers import innermost, rewrapped

__all__ = ["gumbel_softmax"]


@functools.singledispatch
def gumbel_softmax(fn: Any, temperature: float) -> Any:
    """Returns a distribution with draws relaxed and its density linear in them; None where its type has none such.

    ``gumbel_softmax.register(Kind)`` adds a type: a function of a distribution of it and of the temperature.

    Args:
        fn: a Bernoulli or one-hot Categorical distribution, below any masks, event dims and expansions.
        temperature: positive; draws near 0 are those of ``fn``.

    References:
        Jang, Gu and Poole 2017, Categorical Reparameterization with Gumbel-Softmax, with the bound of its section 3.

    Example:
        >>> fn = gumbel_softmax(dist.Bernoulli(torch.tensor([0.5, 0.8])).to_event(1), 0.5)
        >>> fn.has_rsample, fn.log_prob(torch.tensor([0.0, 0.25])).exp()  # 0.5 * 0.8^0.25 * 0.2^0.75
        (True, tensor(0.1414))
        >>> gumbel_softmax(dist.Categorical(torch.ones(3)), 0.5) is None
        True
    """
    inner = innermost(fn)
    return None if inner is fn else rewrapped(fn, lambda leaf: gumbel_softmax(leaf, temperature))


class _Relaxed:
    """What the relaxed types have in common; KL divergences are those of the discrete types, by inheritance."""

    has_rsample = True
    temperature: float

    @classmethod
    def of(cls, fn: Any, temperature: float) -> Any:
        """Returns the relaxed type with the parameters of a discrete distribution."""
        new: Any = cls(logits=fn.logits, validate_args=False)  # type: ignore[call-arg]
        new.temperature, new._validate_args = temperature, fn._validate_args
        return new

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Any:
        new = type(self).__new__(type(self)) if _instance is None else _instance
        new.temperature = self.temperature
        return super().expand(torch.Size(batch_shape), _instance=new)  # type: ignore[misc]

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape)  # type: ignore[attr-defined, no-any-return]


class _RelaxedBernoulli(_Relaxed, dist.Bernoulli):
    support = constraints.unit_interval

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        logits = self.logits
        noisy = logits + logistic_noise(self._extended_shape(torch.Size(sample_shape)), logits)
        return off_ends((noisy / self.temperature).sigmoid())


class _OneHotCategorical(_Relaxed, dist.OneHotCategorical):
    support = constraints.independent(constraints.unit_interval, 1)  # type: ignore[assignment]

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        logits = self.logits
        noisy = logits + gumbel_noise(self._extended_shape(torch.Size(sample_shape)), logits)
        z = off_ends((noisy / self.temperature).softmax(-1))
        return z.where(logits > -math.inf, 0.0)  # an impossible class is left out

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        logits = self.logits
        return (value * logits.masked_fill((value == 0) & logits.isneginf(), 0.0)).sum(-1)


gumbel_softmax.register(td.Bernoulli, _RelaxedBernoulli.of)
gumbel_softmax.register(td.OneHotCategorical, _OneHotCategorical.of)


@gumbel_softmax.register
def _site(fn: SiteDistribution, temperature: float) -> SiteDistribution | None:
    """Returns a factor of the guide with relaxed draws if its value is binary or one-hot, else None."""
    if not fn._layout.is_indicator:
        return None
    new = copy.copy(fn)
    new._elements, new._latest = gumbel_softmax(fn._elements, temperature), LatestDraw()
    new._support = constraints.independent(constraints.unit_interval, len(fn.event_shape))
    new.fixed = None  # at a relaxed draw the mean of the score is not zero
    return new


@gumbel_softmax.register
def _relocated(fn: Relocated, temperature: float) -> Relocated | None:
    base = gumbel_softmax(fn._base, temperature)
    return None if base is None else Relocated(base, fn._relocation)


@gumbel_softmax.register
def _sequence(fn: SequentialElements, temperature: float) -> SequentialElements:
    """Returns elements in sequence that are all relaxed, as those after them read them."""
    new, family = copy.copy(fn), copy.copy(fn._family)
    elements = family.elements
    family.elements = lambda *params: gumbel_softmax(elements(*params), temperature)
    new._family, new._latest, new.has_rsample = family, LatestDraw(), True
    return new


def gumbel_noise(shape: torch.Size, like: Tensor) -> Tensor:
    """Returns standard Gumbel noise of a shape, finite, of the dtype and device of ``like``."""
    uniform = off_ends(torch.rand(shape, dtype=like.dtype, device=like.device))
    return -(-uniform.log()).log()
