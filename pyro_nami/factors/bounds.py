"""Bounds on the log density of a child, linear or quadratic in its predictor, which is linear in the latents.

With such a bound in place of the likelihood, latents have conditionals in closed form: Normal under
a logistic regression, Bernoulli under a noisy-OR (`examples/noisy_or`), whose bound is added by `register_bound`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions import Bernoulli, Distribution
from torch.nn.functional import logsigmoid

from pyro_nami.factors.wrappers import innermost, layers, through_wrappers

__all__ = [
    "Bound",
    "JaakkolaJordan",
    "bound_for",
    "log_prob_or_bound",
    "register_bound",
]


class Bound(ABC):
    """A bound log p(value | s) <= or >= constant + linear s + quadratic s^2, in nats, for each element of a child.

    The predictor s, ``(*batch, *event)``, is a linear function of the child's parents. The bound holds at all values
    of the variational parameters xi >= 0, one for each element. To add a bound:

    - write `leaf_predictor`, which returns s of a distribution of the type, without masks and other wrappers;
    - write `coefficients`, the bound itself, and `tightest`, the xi at which it is tightest; set ``side``;
    - register it: ``register_bound(YourDistribution, YourBound())``.

    Attributes:
        side: ``"lower"`` or ``"upper"``.
    """

    side: str

    @abstractmethod
    def leaf_predictor(self, leaf: Any) -> Tensor:
        """Returns s ``(*batch, *event)`` of a distribution of the registered type."""

    @abstractmethod
    def coefficients(
        self, value: Tensor, xi: Tensor
    ) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
        """Returns constant, linear and quadratic coefficients, each of the shape of `value` and `xi`, or a number."""

    @abstractmethod
    def tightest(self, value: Tensor, mean: Tensor, square: Tensor) -> Tensor:
        """Returns the xi at which the expected bound is tightest, given E s and E s^2; all ``(*batch, *event)``."""

    def predictor(self, fn: Distribution) -> Tensor:
        """Returns s of a distribution in any wrappers, ``(*fn.batch_shape, *fn.event_shape)``."""
        return through_wrappers(fn, self.leaf_predictor)

    def relevance(self, s: Tensor) -> Tensor:
        """Returns the probability, given s, of data at which xi makes a difference, of the shape of s."""
        return torch.ones_like(s)

    def log_density(self, value: Tensor, s: Tensor) -> Tensor:
        """Returns the log density of each element, in nats, as the bound where it is tight; its slope in s is right."""
        at = s.detach()
        constant, linear, quadratic = self.coefficients(
            value, self.tightest(value, at, at.square())
        )
        return constant + linear * s + quadratic * s.square()

    def log_prob_at(self, fn: Distribution, value: Tensor, s: Tensor) -> Tensor:
        """Returns what ``fn.log_prob(value)`` would be in nats if its predictor were s ``(*batch, *event)``."""
        return _summed(fn, self.log_density(value, s))

    def log_bound(self, fn: Distribution, value: Tensor, xi: Tensor) -> Tensor:
        """Returns the bound on ``fn.log_prob(value)`` in nats, ``(*batch,)``; both are zero where `fn` is masked.

        Args:
            fn: a distribution of the registered type, in any wrappers.
            value, xi: ``(*batch, *event)``.
        """
        s, (constant, linear, quadratic) = self.predictor(fn), self.coefficients(value, xi)
        return _summed(fn, constant + linear * s + quadratic * s.square())


class JaakkolaJordan(Bound):
    """The lower bound of a Bernoulli in its logits s, quadratic, with equality at s = xi and s = -xi.

    log p(x | s) >= log sigmoid(xi) + (x - 1/2) s - xi / 2 - lambda(xi) (s^2 - xi^2),
    lambda(xi) = tanh(xi / 2) / (4 xi).

    References:
        Jaakkola & Jordan 2000, Bayesian Parameter Estimation via Variational Methods, equations 6 and 7.

    Example:
        >>> fn, one = Bernoulli(logits=torch.tensor(2.0)), torch.tensor(1.0)
        >>> fn.log_prob(one), JaakkolaJordan().log_bound(fn, one, torch.tensor(2.0))
        (tensor(-0.1269), tensor(-0.1269))
    """

    side = "lower"

    def leaf_predictor(self, leaf: Bernoulli) -> Tensor:
        return leaf.logits

    def coefficients(self, value: Tensor, xi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        constant = logsigmoid(xi) - 0.5 * xi + 0.25 * xi * torch.tanh(0.5 * xi)
        near, square = xi.abs() < 1e-2, xi.square()
        series = 1 / 8 - square / 96 + square.square() / 960  # the next term is below 1e-16
        far = xi.where(~near, 1.0)
        return constant, value - 0.5, -torch.where(near, series, torch.tanh(0.5 * far) / (4 * far))

    def tightest(self, value: Tensor, mean: Tensor, square: Tensor) -> Tensor:
        return square.clamp(min=torch.finfo(square.dtype).tiny).sqrt()


def register_bound(distribution_type: type[Distribution], bound: Bound) -> None:
    """Registers a bound for a type of distribution and its subclasses, in place of an earlier bound.

    Raises:
        TypeError: the type is no distribution, or the bound is no instance of `Bound`.
        ValueError: the bound's side is neither ``"lower"`` nor ``"upper"``.
    """
    if not (isinstance(distribution_type, type) and issubclass(distribution_type, Distribution)):
        raise TypeError(
            f"Expected a type of distribution; got {distribution_type!r}. Give its class."
        )
    if not isinstance(bound, Bound):
        raise TypeError(
            f"Expected a Bound; got {bound!r}. Subclass pyro_nami.Bound, and give an instance."
        )
    side = getattr(bound, "side", None)
    if side not in ("lower", "upper"):
        raise ValueError(
            f'Expected side "lower" or "upper"; got {side!r}. Set it in {type(bound).__name__}.'
        )
    _BOUNDS[distribution_type] = bound


def bound_for(fn: Distribution) -> Bound | None:
    """Returns the bound of a distribution, found below its wrappers; None if its type has none.

    Example:
        >>> type(bound_for(Bernoulli(logits=torch.zeros(3)))).__name__
        'JaakkolaJordan'
    """
    return next((_BOUNDS[kind] for kind in type(innermost(fn)).__mro__ if kind in _BOUNDS), None)


def log_prob_or_bound(fn: Distribution, value: Tensor, xi: Tensor | None = None) -> Tensor:
    """Returns the bound on a log density in nats where its type has one, else the log density itself, ``(*batch,)``.

    `xi` are the bound's parameters, ``(*batch, elements)``; 1 by default.
    """
    bound = bound_for(fn)
    if bound is None:
        return fn.log_prob(value)
    xi = torch.ones_like(value) if xi is None else xi.reshape(xi.shape[:-1] + fn.event_shape)
    return bound.log_bound(fn, value, xi)


def _summed(fn: Distribution, density: Tensor) -> Tensor:
    """Returns a density of elements summed over the event, zero where `fn` masks."""
    for layer in layers(fn):
        if isinstance(layer, MaskedDistribution):
            mask = torch.as_tensor(layer._mask, device=density.device)
            density = density.where(mask.reshape(mask.shape + (1,) * layer.event_dim), 0.0)
    event_dim = len(fn.event_shape)
    return density.flatten(-event_dim).sum(-1) if event_dim else density


_BOUNDS: dict[type, Bound] = {Bernoulli: JaakkolaJordan()}
