"""Truncated Normal variables whose bounds may lie any number of deviations from the location."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all
from torch.special import erfcx, ndtr, ndtri

from pyro_nami.factors.links import within

__all__ = ["NEGLIGIBLE", "TruncatedNormal"]

# deviations from the mean, 8.5: a Normal density is less there than doubles can tell beside that of the mode
NEGLIGIBLE = math.sqrt(-2 * math.log(torch.finfo(torch.float64).eps))
_NO_BOUND = torch.finfo(torch.float32).max  # in place of infinity, which has no gradient


class TruncatedNormal(TorchDistribution):
    """Normal variables given that they are between two numbers, with gradients of its draws by all parameters.

    Args:
        loc, scale: of the Normal; low, high: bounds, which may be infinite. All broadcast to ``(*batch)``.

    References:
        Figurnov, Mohamed and Mnih 2018, Implicit Reparameterization Gradients.

    Example:
        >>> far = TruncatedNormal(torch.tensor(-50.0), torch.tensor(1.0), torch.tensor(0.0), torch.tensor(1.0))
        >>> far.log_prob(torch.tensor([0.0, 0.1]))  # nearly exponential, of rate 50
        tensor([ 3.9124, -1.0926])
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}  # noqa: RUF012
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        low: Tensor,
        high: Tensor,
        validate_args: bool | None = None,
    ) -> None:
        self.loc, self.scale, self.low, self.high = broadcast_all(loc, scale, low, high)
        super().__init__(self.loc.shape, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> constraints.Constraint:
        return constraints.interval(self.low, self.high)

    def expand(
        self, batch_shape: Sequence[int], _instance: TruncatedNormal | None = None
    ) -> TruncatedNormal:
        loc, scale, low, high = (
            each.expand(batch_shape) for each in (self.loc, self.scale, self.low, self.high)
        )
        return TruncatedNormal(loc, scale, low, high, validate_args=False)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        at = self._mode()
        u = torch.rand(
            self._extended_shape(sample_shape), dtype=torch.float64, device=at.scale.device
        )
        # so that draws are continuous in the parameters
        u = torch.where(at.sign > 0, u, 1 - u).clamp(min=2.0**-54)
        log_mass = (torch.lerp(at.left, torch.ones_like(at.left), u) * at.mass).log()
        with torch.no_grad():
            mills = _mills(at.place)
            log_p = log_mass - mills.log()
            t = (-log_p * mills).clamp(min=0)
            # Converges from anywhere, as the log of a distribution function is concave: six steps to double precision.
            for _ in range(6):
                t = _stepped(t, at.place, log_mass)
            t = torch.where(log_p > 0, -ndtri(log_p.exp() / 2).clamp(max=NEGLIGIBLE), t)
        value = (at.edge - at.sign * at.scale * _stepped(t, at.place, log_mass)).to(self.loc)
        with torch.no_grad():  # as a Uniform has no density at its upper bound
            low, high = self.low.nextafter(self.high), self.high.nextafter(self.low)
        return within(value, low, high)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        at = self._mode()
        t = at.sign * (at.edge - value.double()) / at.scale
        log_prob = t * (at.place - t / 2) - (at.mass * at.scale).log() - (-at.left).log1p()
        return torch.where(
            (self.low <= value) & (value <= self.high), log_prob.to(self.loc), -torch.inf
        )

    @property
    def log_mass(self) -> Tensor:
        """The log of the Normal's mass within the bounds, ``(*batch)``, in double precision."""
        at = self._mode()
        log_density = -(at.place.square() + math.log(2 * math.pi)) / 2
        return log_density + at.mass.log() + (-at.left).log1p()

    def _mode(self) -> _Mode:
        """Returns where the density is greatest, and what mass there is up to there."""
        loc, scale, low, high = (
            each.double() for each in (self.loc, self.scale, self.low, self.high)
        )
        low, high = low.clamp(min=-_NO_BOUND), high.clamp(max=_NO_BOUND)
        flipped = low + high > 2 * loc
        sign = 1 - 2 * flipped.to(loc)
        near, far = torch.where(flipped, low, high), torch.where(flipped, high, low)
        place = sign * (near - loc) / scale
        inside = place > 0
        mass = math.sqrt(2 * math.pi) * ndtr(place.clamp(0, NEGLIGIBLE))
        edge, place = torch.where(inside, loc, near), torch.where(inside, 0.0, place)
        mass = torch.where(inside, mass, _mills(place))
        t = sign * (edge - far) / scale
        left = _mills(place - t) / mass * (t * (place - t / 2)).exp()
        return _Mode(sign, scale, edge, place, mass, left)


class _Mode(NamedTuple):
    """Where a density is greatest.

    Attributes:
        sign: 1 where its upper bound is the one nearer to the location, else -1: then all that follows is of minus the
            variable.
        scale: of the Normal.
        edge: the place: that bound, or the location where this is within the bounds.
        place: the same in deviations from the location.
        mass: of the Normal up to the nearer bound, relative to its density there, in deviations.
        left: share of that mass which is beyond the farther bound.
    """

    sign: Tensor
    scale: Tensor
    edge: Tensor
    place: Tensor
    mass: Tensor
    left: Tensor


def _mills(z: Tensor) -> Tensor:
    """Returns a standard Normal's distribution function over its density."""
    return math.sqrt(math.pi / 2) * erfcx(-z / math.sqrt(2))


def _stepped(t: Tensor, place: Tensor, log_mass: Tensor) -> Tensor:
    """Returns t after one Newton step towards the solution of log(mass below ``place - t``) = ``log_mass``.

    The mass is relative to the density at ``place``. The gradient by ``place`` and ``log_mass`` is the solution's.
    """
    t = t.detach()
    mills = _mills(place - t)
    return t + mills.detach() * (mills.log() + t * (place - t / 2) - log_mass)
