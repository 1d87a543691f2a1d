"""Priors that are flat: of constant density between two bounds, or everywhere.

A Gaussian block, or a mode search, takes such a prior as one without precision, in the latent's own
coordinates. This is right where almost no mass of the result lies outside of the bounds.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor

from pyro_nami.factors.bijections import is_interval, peel_support
from pyro_nami.factors.wrappers import innermost

__all__ = ["CUT", "MOST_LOST", "Flat", "flat_prior", "improper_posterior", "is_improper"]

# Share of a Normal that may lie outside of the bounds: it moves means by less than 4e-4 sds, sds by less than 0.1%,
# and log densities by 1e-4 nats. Ten times as much would show in 10,000 draws.
MOST_LOST = 1e-4
CUT = "the bounds of its flat prior cut off {:.1g} of what data leave"


class Flat(NamedTuple):
    """A flat prior: bounds, which broadcast to the shape of its values and may be infinite."""

    low: Tensor
    high: Tensor

    def center(self, shape: torch.Size) -> Tensor:
        """Returns the middle between the bounds, zero where there are none, as values of a shape."""
        middle = torch.where((self.high - self.low).isfinite(), (self.low + self.high) / 2, 0.0)
        return middle.expand(shape)

    def step(self, share: float = 0.05) -> Tensor:
        """Returns the length of a unit offset: 1, or less where bounds are near to each other.

        Args:
            share: the most of the interval that a unit offset takes; offsets of half the interval would leave it.
        """
        return (share * (self.high - self.low)).clamp(max=1.0).amin()

    def within(self, value: Tensor) -> Tensor:
        """Returns values moved to where the density is that of the prior, off the bounds by a thousandth."""
        width = self.high - self.low
        off = 1e-3 * torch.where(width.isfinite(), width, 0.0)
        return value.clamp((self.low + off).to(value), (self.high - off).to(value))

    def room(self, center: Tensor, way: Tensor) -> float:
        """Returns how many times a way may be gone from a center, to both sides, within the bounds."""
        return float((torch.minimum(center - self.low, self.high - center) / way.abs()).amin())

    def log_prob(self, value: Tensor, event_dim: int) -> Tensor:
        """Returns the log density ``(*batch)`` relative to that within the bounds: 0 there, else minus infinity."""
        inside = (self.low <= value) & (value <= self.high)
        inside = inside.flatten(-event_dim).all(-1) if event_dim else inside
        return torch.where(inside, 0.0, -torch.inf).to(value.dtype)

    @property
    def is_bounded(self) -> bool:
        """Whether there are bounds, at some element at least."""
        return bool((self.low.isfinite() | self.high.isfinite()).any())


def flat_prior(fn: Any) -> Flat | None:
    """Returns the bounds of a flat prior on numbers, or on tensors of such; None of any other distribution.

    Half-flat ones, on positive numbers say, are none: these are priors of scales.
    """
    base: Any = innermost(fn)
    if type(base) not in (dist.Uniform, dist.ImproperUniform):
        return None
    support, _ = peel_support(base.support)
    if type(support) is type(constraints.real):
        return Flat(torch.tensor(-math.inf), torch.tensor(math.inf))
    if is_interval(support):
        low, high = (torch.as_tensor(each) for each in (support.lower_bound, support.upper_bound))  # type: ignore[attr-defined]
        return Flat(low.detach(), high.detach())
    return None


def is_improper(fn: Any) -> bool:
    """Whether a distribution is an improper prior, which has no draws."""
    return type(innermost(fn)) is dist.ImproperUniform


def improper_posterior(name: str) -> str:
    """Returns the message for a latent with an improper prior, of which data say too little."""
    return (
        f"Expected data that tell '{name}', whose prior is improper; they leave it, or a sum of it and other latents, "
        f"open, so there is no posterior. Give '{name}' a proper prior (a wide Normal, or a Uniform), or leave out "
        "columns of a design that others add up to; center and scale covariates that nearly do, or take doubles."
    )
