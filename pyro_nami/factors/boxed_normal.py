"""A joint Normal with nearly all its mass within bounds: each element is truncated, given the earlier ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_nami.factors.bijections import support_on
from pyro_nami.factors.joint_normal import JointNormal
from pyro_nami.factors.truncated_normal import NEGLIGIBLE, TruncatedNormal

__all__ = ["BoxedNormal"]


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
        """An estimate of the share of the Normal outside of the bounds, from the latest draw, ``(*lead)``."""
        return self._lost[0]

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        low, high = (self._shown(bound.expand(self.loc.shape)) for bound in self._bounds)
        return support_on(constraints.interval(low, high), self.event_dim)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        value = super().rsample(sample_shape)
        x = self._vector(value)
        if _are_far(*self._edges(x, self._noise(x))):
            self._lost[0] = self.loc.new_zeros(())
            return value
        value = self._in_turn(x.shape).reshape(value.shape)
        self._latest.keep(value)
        return value

    def _log_probs(self, x: Tensor, noise: Tensor) -> Tensor:
        log_probs = super()._log_probs(x, noise)
        below, above = self._edges(x, noise)
        if _are_far(below, above):
            return log_probs
        log_mass = _standard(below, above).log_mass.to(noise)
        return torch.where((self.low <= x) & (x <= self.high), log_probs - log_mass, -torch.inf)

    def _made(self, loc: Tensor, elements: Any) -> BoxedNormal:
        other = BoxedNormal(loc, self.lower, self.held, self.event_dim, elements, *self._bounds)
        other._lost = self._lost
        return other

    @property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        return self.low, self.high

    def _edges(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each element's bounds given the elements before it, as standard Normal variables."""
        narrow = self.lower.diagonal(dim1=-2, dim2=-1)
        below, above = noise - narrow * (x - self.low), noise + narrow * (self.high - x)
        return self._straight(below), self._straight(above)

    def _straight(self, noise: Tensor) -> Tensor:
        """Returns the standard Normal variables of which e is made."""
        return noise if self._elements is None else self._elements.noise(_bounded(noise))

    def _in_turn(self, shape: torch.Size) -> Tensor:
        """Returns vectors whose elements are drawn one after another, within their bounds; notes what is lost."""
        loc, lower = self.loc.double(), self.lower.double()
        off, log_mass = loc.new_zeros(shape[:-1] + (0,)), loc.new_zeros(shape[:-1])
        for i in range(shape[-1]):
            pull = (lower[..., i, :i] * off).sum(-1)
            narrow = lower[..., i, i]
            edges = [
                narrow * (bound[..., i].double() - loc[..., i]) + pull for bound in self._bounds
            ]
            below, above = (self._straight(_spread(edge, shape))[..., i] for edge in edges)
            cut = _standard(below, above)
            log_mass = log_mass + cut.log_mass
            noise = cut.rsample()
            if self._elements is not None:
                noise = self._elements.at(_bounded(_spread(noise, shape)))[..., i]
            off = torch.cat([off, ((noise - pull) / narrow).unsqueeze(-1)], -1)
        self._lost[0] = -log_mass.detach().expm1()
        low, high = self.low.nextafter(self.high), self.high.nextafter(self.low)
        return torch.minimum(torch.maximum((loc + off).to(self.loc), low), high)


def _are_far(below: Tensor, above: Tensor) -> bool:
    """Whether standard Normal variables are between such bounds as good as always."""
    return bool(((below < -NEGLIGIBLE) & (above > NEGLIGIBLE)).all())


def _standard(below: Tensor, above: Tensor) -> TruncatedNormal:
    """Returns standard Normal variables between bounds, in double precision."""
    zero = below.new_zeros((), dtype=torch.float64)
    return TruncatedNormal(zero, zero + 1, below.double(), above.double(), validate_args=False)


def _bounded(noise: Tensor) -> Tensor:
    """Returns noise of a size whose bends are still numbers."""
    most = torch.finfo(noise.dtype).max ** 0.5
    return noise.clamp(-most, most)


def _spread(noise: Tensor, shape: torch.Size) -> Tensor:
    """Returns noise ``(*lead)`` of one element as that of all elements, ``(*lead, E)``."""
    return noise.expand(shape[:-1]).unsqueeze(-1).expand(shape)
