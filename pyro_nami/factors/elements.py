"""Distributions of single elements: what a site's distribution draws and scores, element by element.

Any torch distribution will do. Distributions that are made of Normals are in `normals`; here are relaxed types,
and a Kumaraswamy distribution that torch has in lower precision.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.distributions.constraints import Constraint
from torch.nn.functional import logsigmoid

from pyro_nami.factors.bijections import interior, support_of

__all__ = [
    "Elements",
    "LatestDraw",
    "LogisticElements",
    "StableKumaraswamy",
    "draw_elements",
    "logistic_noise",
    "off_ends",
]


class LatestDraw:
    """The latest draw, known by identity, and what was computed on the way to it: its score then costs no inverse."""

    def __init__(self) -> None:
        self._value: Tensor | None = None
        self._kept: tuple[Any, ...] = ()
        self._requires_grad = False
        self._grad_enabled = False

    def keep(self, value: Tensor, *kept: Any) -> None:
        """Notes a draw and what to recall of it."""
        self._value, self._kept = value, kept
        self._requires_grad, self._grad_enabled = value.requires_grad, torch.is_grad_enabled()

    def recall(self, value: Tensor) -> tuple[Any, ...] | None:
        """Returns what was kept if `value` is the draw, unchanged in its tie to autograd, with all gradients wanted.

        A draw made without gradients is a constant: its score needs the path through the parameters.
        """
        if value is not self._value or value.requires_grad != self._requires_grad:
            return None
        return self._kept if self._grad_enabled or not torch.is_grad_enabled() else None


class Elements(Distribution):
    """A distribution of single elements, of batch shape ``(*batch, E)``, on the real line unless it says otherwise.

    Parameters broadcast, so an expanded one is a copy with another batch shape, which shares the latest draw.
    """

    arg_constraints: dict[str, Constraint] = {}
    support: Any = constraints.real
    has_rsample = True

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        wide = copy.copy(self)
        wide._batch_shape = torch.Size(batch_shape)
        return wide


def draw_elements(elements: Distribution, shape: torch.Size) -> Tensor:
    """Returns a draw ``(*shape, *element)`` off the boundary of the support, reparameterized where it can be.

    Args:
        elements: of a batch shape that can be expanded to ``shape``.
        shape: ``(*samples, *batch, E)``.
    """
    wide = elements if shape == elements.batch_shape else elements.expand(shape)
    return interior(support_of(elements), wide.rsample() if wide.has_rsample else wide.sample())


def logistic_noise(shape: torch.Size, like: Tensor) -> Tensor:
    """Returns standard logistic noise of a shape, finite, of the dtype and device of ``like``."""
    uniform = off_ends(torch.rand(shape, dtype=like.dtype, device=like.device))
    return uniform.log() - (-uniform).log1p()


def off_ends(unit: Tensor) -> Tensor:
    """Returns numbers of the unit interval off its ends."""
    finfo = torch.finfo(unit.dtype)
    return unit.clamp(finfo.tiny, 1 - finfo.eps)


class LogisticElements(Elements):
    """The logit of a relaxed Bernoulli variable: x = (logits + logistic noise) / temperature, both ``(*batch, E)``.

    Unlike torch's ``LogitRelaxedBernoulli`` it is exact at logits and values of any size.

    Example:
        >>> LogisticElements(torch.zeros(1), torch.ones(1)).log_prob(torch.zeros(1)).exp()
        tensor([0.2500])
    """

    def __init__(self, logits: Tensor, temperature: Tensor) -> None:
        self.logits, self.temperature = logits, temperature
        shape = torch.broadcast_shapes(logits.shape, temperature.shape)
        super().__init__(shape)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        noise = logistic_noise(self._extended_shape(sample_shape), self.logits)
        return (self.logits + noise) / self.temperature

    def log_prob(self, value: Tensor) -> Tensor:
        gap = self.logits - self.temperature * value
        return self.temperature.log() + logsigmoid(gap) + logsigmoid(-gap)


class StableKumaraswamy(dist.Kumaraswamy):
    """Kumaraswamy drawn and scored through logarithms: x = (1 - u^(1/b))^(1/a) with u uniform.

    Example:
        >>> StableKumaraswamy(torch.tensor(2.0), torch.tensor(1.0)).log_prob(torch.tensor(0.25)).exp()  # density 2 x
        tensor(0.5000)
    """

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        shape, b = torch.Size(sample_shape) + self.batch_shape, self.concentration0
        minus_log_uniform = torch.empty(shape, dtype=b.dtype, device=b.device).exponential_()
        return (_log_complement(-minus_log_uniform / b) / self.concentration1).exp()

    def log_prob(self, value: Tensor) -> Tensor:
        a = self.concentration1
        b = self.concentration0
        log_value = value.log()
        return a.log() + b.log() + (a - 1) * log_value + (b - 1) * _log_complement(a * log_value)


def _log_complement(log_x: Tensor) -> Tensor:
    """Returns log(1 - x) from log x < 0."""
    tiny = torch.finfo(log_x.dtype).tiny
    return (-log_x.clamp(max=-tiny).expm1()).log()
