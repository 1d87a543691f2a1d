"""A joint Normal with nearly all its mass within bounds: each element is truncated, given the earlier ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_nami.factors.joint_normal import JointNormal
from pyro_nami.factors.truncated_normal import TruncatedNormal

__all__ = ["BoxedNormal"]

_CLEAR = 8.0  # deviations: from bounds that far a Normal loses less than doubles can tell
# deviations: bounds further off are taken to be there, where bends are still numbers
_FARTHEST = 1e6


class BoxedNormal(JointNormal):
    """A `JointNormal` whose elements, in sequence, are truncated to bounds: never outside, with a density of mass 1.

    That is the Normal given that it is within the bounds, up to about the share of the Normal that is not. Where bounds
    are far from all draws, it costs as much as a `JointNormal`.

    Args:
        loc, lower, shape, event_dim, elements: as for `JointNormal`; elements of these may be `NormalElements`.
        low, high: bounds, which broadcast with ``loc`` and may be infinite.

    References:
        Geweke 1991, Efficient simulation from the multivariate Normal and Student-t distributions subject to linear
        constraints: there draws are weighted, which would make these exact.

    Example:
        >>> box = BoxedNormal(torch.zeros(2), torch.eye(2), torch.Size([2]), 0, None, torch.zeros(2), torch.ones(2))
        >>> draw = box.rsample()
        >>> bool(((draw > 0) & (draw < 1)).all()), box.log_prob(torch.tensor([0.5, 2.0]))
        (True, tensor([0.0309,   -inf]))
    """

    def __init__(
        self,
        loc: Tensor,
        lower: Tensor,
        shape: torch.Size,
        event_dim: int,
        elements: Any,
        low: Tensor,
        high: Tensor,
    ) -> None:
        super().__init__(loc, lower, shape, event_dim, elements)
        self._elements: Any = elements
        self.low, self.high = low.to(loc), high.to(loc)
        self._lost = [loc.new_zeros(())]  # shared with what this is expanded to

    @property
    def lost(self) -> Tensor:
        """Share of the Normal outside of the bounds, by the latest draw, ``(*lead)``: its mean over draws is that."""
        return self._lost[0]

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        low, high = (
            each.expand(self.loc.shape).reshape(self.loc.shape[:-1] + self._held)
            for each in self._bounds
        )
        interval = constraints.interval(low, high)
        return constraints.independent(interval, self.event_dim) if self.event_dim else interval

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        value = super().rsample(sample_shape)
        x = self._vector(value)
        below, above = self._edges(x, self._noise(x))
        if bool(((below < -_CLEAR) & (above > _CLEAR)).all()):
            self._lost[0] = self.loc.new_zeros(())
            return value
        value = self._in_turn(x.shape).reshape(value.shape)
        self._latest.keep(value)
        return value

    def log_prob(self, value: Tensor) -> Tensor:
        x = self._vector(value)
        noise = self._noise(x)
        below, above = self._edges(x, noise)
        log_prob = super().log_prob(value)
        inside = (self.low <= x) & (x <= self.high)
        clear = (below < -_CLEAR) & (above > _CLEAR)
        if bool(clear.all()):
            return log_prob
        log_mass = torch.where(
            inside, self._log_mass(self._straight(noise), below, above).to(noise), torch.inf
        )
        log_mass = log_mass.reshape(log_mass.shape[:-1] + self._held)
        return log_prob - (
            log_mass.sum(tuple(range(-self.event_dim, 0))) if self.event_dim else log_mass
        )

    def _made(self, loc: Tensor, elements: Any) -> BoxedNormal:
        other = BoxedNormal(loc, self.lower, self._held, self.event_dim, elements, *self._bounds)
        other._lost = self._lost
        return other

    @property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        return self.low, self.high

    def _edges(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the bounds of e that each element has given those before it, as they are in a vector, and unbent."""
        narrow = self.lower.diagonal(dim1=-2, dim2=-1)
        below, above = noise - narrow * (x - self.low), noise + narrow * (self.high - x)
        return self._straight(below), self._straight(above)

    def _straight(self, noise: Tensor) -> Tensor:
        """Returns the standard Normal variables that elements are made of."""
        noise = noise.clamp(-_FARTHEST, _FARTHEST)
        return noise if self._elements is None else self._elements.noise(noise)

    def _log_mass(self, noise: Tensor, below: Tensor, above: Tensor) -> Tensor:
        """Returns the log of a standard Normal's mass between two numbers; a number between these helps to tell."""
        noise = noise.double()
        below = below.double()
        above = above.double()
        zero, one = torch.zeros_like(noise), torch.ones_like(noise)
        at = torch.minimum(torch.maximum(noise, below), above)
        cut = TruncatedNormal(zero, one, below, above, validate_args=False).log_prob(at)
        return torch.distributions.Normal(zero, one, validate_args=False).log_prob(at) - cut

    def _in_turn(self, shape: torch.Size) -> Tensor:
        """Returns vectors whose elements are drawn one after another, within their bounds; tells what is lost."""
        loc, lower = self.loc.double(), self.lower.double()
        off, log_mass = loc.new_zeros(shape[:-1] + (0,)), loc.new_zeros(shape[:-1])
        for i in range(shape[-1]):
            pull = (lower[..., i, :i] * off).sum(-1)
            narrow = lower[..., i, i]
            edges = [
                narrow * (bound[..., i].double() - loc[..., i]) + pull for bound in self._bounds
            ]
            below, above = (self._of_one(i, edge, shape, straight=True) for edge in edges)
            zero, one = torch.zeros_like(below), torch.ones_like(below)
            noise = TruncatedNormal(zero, one, below, above, validate_args=False).rsample()
            log_mass = log_mass + self._log_mass(noise, below, above)
            bent = self._of_one(i, noise, shape, straight=False)
            off = torch.cat([off, ((bent - pull) / narrow).unsqueeze(-1)], -1)
        self._lost[0] = -log_mass.detach().expm1()
        low, high = self.low.nextafter(self.high), self.high.nextafter(self.low)
        return torch.minimum(torch.maximum((loc + off).to(self.loc), low), high)

    def _of_one(self, i: int, noise: Tensor, shape: torch.Size, straight: bool) -> Tensor:
        """Returns noise of the i-th element, bent or unbent."""
        noise = noise.expand(shape[:-1])
        if self._elements is None:
            return noise
        whole = noise.unsqueeze(-1).expand(shape).clamp(-_FARTHEST, _FARTHEST)
        return (self._elements.noise(whole) if straight else self._elements.at(whole))[..., i]
