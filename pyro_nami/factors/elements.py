"""Densities of single elements, batched: what a site's distribution draws and scores, element by element.

Densities made of Normals are in `normals`; the others, relaxed discrete types included, are here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_nami.factors.bijections import interior, support_of
from pyro_nami.factors.gumbel_softmax import gumbel_noise, gumbel_softmax, logistic_noise

__all__ = [
    "NO_DRAW",
    "Elements",
    "ExpRelaxedElements",
    "LatestDraw",
    "LogisticElements",
    "OwnElements",
    "StableKumaraswamy",
]


class LatestDraw(NamedTuple):
    """A draw, known by identity, and what was computed on the way to it: its score then costs no inverse."""

    value: Tensor | None
    tied: bool  # whether it required gradients
    recorded: bool  # whether gradients were recorded on the way
    kept: tuple[Any, ...]

    @classmethod
    def of(cls, value: Tensor, *kept: Any) -> LatestDraw:
        return cls(value, value.requires_grad, torch.is_grad_enabled(), kept)

    def recall(self, value: Tensor) -> tuple[Any, ...] | None:
        """Returns what was kept if `value` is the draw, unchanged in its tie to autograd, with all gradients wanted.

        A draw made without gradients is a constant: its score needs the path through the parameters.
        """
        same = self.value is value and self.tied == value.requires_grad
        return self.kept if same and (self.recorded or not torch.is_grad_enabled()) else None


NO_DRAW = LatestDraw(None, False, False, ())


class Elements(ABC):
    """A batch of distributions of one element, a scalar or, for simplex-like types, a vector."""

    shape: torch.Size  # ``(*batch, E)``
    has_rsample: bool = True  # whether `draw` is reparameterized
    has_enumerate_support: bool = False  # whether the values can be listed

    @abstractmethod
    def draw(self, shape: torch.Size) -> Tensor:
        """Returns a draw of ``shape + element shape``; `shape` is broadcastable from `self.shape`."""

    @abstractmethod
    def log_prob(self, x: Tensor) -> Tensor:
        """Returns log densities in nats, one per element: ``(*batch, E)``."""

    def enumerate_support(self) -> Tensor:
        """Returns all values ``(values, *ones, *element)``."""
        raise NotImplementedError(f"{type(self).__name__} cannot list its values")

    def relaxed(self, temperature: float) -> Elements:
        """Returns these with draws by the Gumbel-softmax, reparameterized; see `gumbel_softmax`."""
        raise NotImplementedError(
            f"Expected elements that can be relaxed; {type(self).__name__} has no such method"
        )


class OwnElements(Elements):
    """Elements of any torch distribution of batch shape ``(*batch, E)``."""

    def __init__(self, distribution: torch.distributions.Distribution) -> None:
        self.distribution = distribution
        self.shape = distribution.batch_shape
        self.has_rsample = distribution.has_rsample
        self.has_enumerate_support = distribution.has_enumerate_support

    def draw(self, shape: torch.Size) -> Tensor:
        expanded = self.distribution if shape == self.shape else self.distribution.expand(shape)
        x = expanded.rsample() if self.has_rsample else expanded.sample()
        return interior(support_of(self.distribution), x)

    def log_prob(self, x: Tensor) -> Tensor:
        return self.distribution.log_prob(x)

    def enumerate_support(self) -> Tensor:
        return self.distribution.enumerate_support(expand=False)

    def relaxed(self, temperature: float) -> OwnElements:
        return OwnElements(gumbel_softmax(self.distribution, temperature))


class LogisticElements(Elements):
    """The logit of a relaxed Bernoulli variable: x = (logits + logistic noise) / temperature, both ``(*batch, E)``.

    Example:
        >>> LogisticElements(torch.zeros(1), torch.ones(1)).log_prob(torch.zeros(1)).exp()
        tensor([0.2500])
    """

    def __init__(self, logits: Tensor, temperature: Tensor) -> None:
        self.logits, self.temperature = logits, temperature
        self.shape = torch.broadcast_shapes(logits.shape, temperature.shape)

    def draw(self, shape: torch.Size) -> Tensor:
        return (self.logits + logistic_noise(shape, self.logits)) / self.temperature

    def log_prob(self, x: Tensor) -> Tensor:
        gap = self.logits - self.temperature * x
        return self.temperature.log() + logsigmoid(gap) + logsigmoid(-gap)


class ExpRelaxedElements(Elements):
    """x = log softmax((logits + Gumbel noise) / temperature), scored by the density of exp(x) on the simplex.

    Logits are ``(*batch, E, classes)``, the temperature is broadcastable with ``(*batch, E)``.

    References:
        Maddison, Mnih and Teh 2017, The Concrete Distribution, eq. 10 and appendix C.

    Example:
        >>> relaxed = ExpRelaxedElements(torch.zeros(1, 2), torch.ones(1))  # uniform on the simplex
        >>> relaxed.log_prob(torch.tensor([[0.3, 0.7]]).log()).abs() < 1e-5
        tensor([True])
    """

    def __init__(self, logits: Tensor, temperature: Tensor) -> None:
        self.logits, self.temperature = logits, temperature
        self.shape = torch.broadcast_shapes(logits.shape[:-1], temperature.shape)

    def draw(self, shape: torch.Size) -> Tensor:
        noisy = self.logits + gumbel_noise(shape + self.logits.shape[-1:], self.logits)
        return (noisy / self.temperature.unsqueeze(-1)).log_softmax(-1)

    def log_prob(self, x: Tensor) -> Tensor:
        classes = x.shape[-1]
        score = (self.logits - self.temperature.unsqueeze(-1) * x).log_softmax(-1)
        return (score - x).sum(-1) + math.lgamma(classes) + (classes - 1) * self.temperature.log()


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
