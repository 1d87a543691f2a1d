"""Monotone maps through knots with given slopes, of learned flows and of Normals bent to a derived density."""

from __future__ import annotations

import math

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Transform, constraints

from pyro_nami.factors.links import within
from pyro_nami.factors.truncated_normal import TruncatedNormal

__all__ = ["KnotTransform", "NeuralSpline", "bent_normal"]

# widest ratio of two widths, two heights, or of a slope and 1
LOG_SPAN = math.log(1e3)


class KnotTransform(Transform):
    """y(x) through knots, by rational quadratics between them and straight lines beyond.

    Args:
        knots: x, y and slope dy/dx of each, ``(*batch, 3, K)``; x and y rise, slopes are positive.

    References:
        Gregory and Delbourgo 1982, Piecewise rational quadratic interpolation to monotonic data.

    Example:
        >>> x = torch.tensor([-1.0, 0.0, 1.0])  # where it is the exponential
        >>> bend = KnotTransform(torch.stack([x, x.exp(), x.exp()]))
        >>> bend(torch.tensor(0.5)), bend.inv(torch.tensor(0.5).exp())
        (tensor(1.6528), tensor(0.4975))
    """

    domain = codomain = constraints.real
    bijective = True
    sign = 1

    def __init__(self, knots: Tensor) -> None:
        super().__init__(cache_size=1)
        self._knots = knots

    def bend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns y, and the log of dy/dx."""
        left, width, low, height, up, down = self._bin(x, 0)
        at, rise = (x - left) / width, height / width
        t = within(at, 0, 1)
        rest = 1 - t
        both = t * rest
        bottom = torch.addcmul(rise, up + down - 2 * rise, both)
        slope = _slope(t, rest, both, rise, bottom, up, down)
        y = low + height * t * torch.addcmul(rise * t, up, rest) / bottom
        return torch.addcmul(y, (at - t) * width, slope), slope.log()

    def straighten(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x, and the log of dy/dx there."""
        left, width, low, height, up, down = self._bin(y, 1)
        at, rise = (y - low) / height, height / width
        done = within(at, 0, 1)
        curve = up + down - 2 * rise
        bend = done * curve
        b, c = up - bend, -rise * done
        t = 2 * c / (-b - (b * b - 4 * (rise - b) * c).clamp(min=0).sqrt())
        rest = 1 - t
        both = t * rest
        slope = _slope(t, rest, both, rise, torch.addcmul(rise, curve, both), up, down)
        return left + width * t + (at - done) * height / slope, slope.log()

    def _call(self, x: Tensor) -> Tensor:
        return self.bend(x)[0]

    def _inverse(self, y: Tensor) -> Tensor:
        return self.straighten(y)[0]

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return self.bend(x)[1]

    def _bin(self, at: Tensor, axis: int) -> tuple[Tensor, ...]:
        """Returns what the knots beside each place are: x and its change, y and its change, the two slopes."""
        knots = self._knots
        first = (knots[..., axis, 1:-1].detach() <= at.detach().unsqueeze(-1)).sum(-1)
        beside = torch.stack((first, first + 1), -1).unsqueeze(-2)
        found = _taken(knots, beside.expand(first.shape + (3, 2)))
        (left, low, up), (right, high, down) = (each.unbind(-1) for each in found.unbind(-1))
        return left, right - left, low, high - low, up, down


def _slope(
    t: Tensor, rest: Tensor, both: Tensor, rise: Tensor, bottom: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    curved = torch.addcmul(down * t * t, up, rest * rest)
    return torch.addcmul(curved, rise, both, value=2) * (rise / bottom).square()


def _taken(values: Tensor, places: Tensor) -> Tensor:
    return values.expand(*places.shape[:-1], -1).gather(-1, places)


class NeuralSpline(KnotTransform):
    """The map of a neural spline flow within bounds; the identity beyond, and at parameters of zero.

    Only what lies beside a place is made of its parameters, as much of a flow's training goes by here.

    Args:
        params: ``(*batch, 3 bins - 1)``, any numbers: of the bins' widths and heights, and of slopes between them.
        bound: the map bends between minus and plus this; much farther out, bins would miss the mass of a Normal.

    References:
        Durkan et al. 2019, Neural Spline Flows.
    """

    def __init__(self, params: Tensor, *, bound: float = 5.0) -> None:
        Transform.__init__(self, cache_size=1)
        self._bound = bound
        bins = (params.shape[-1] + 1) // 3
        sides, slopes = params.split([2 * bins, bins - 1], -1)
        sides, self._slopes = sides.unflatten(-1, (2, bins)), F.pad(slopes, (1, 1))
        # A softmax, but for the division: bounded numbers need no shift, and torch's own is slow for rows this short.
        self._sizes = (sides / (1 + sides.abs() * (2 / LOG_SPAN))).exp()
        self._ends = self._sizes.cumsum(-1)

    def _bin(self, at: Tensor, axis: int) -> tuple[Tensor, ...]:
        unit = 2 * self._bound / self._ends[..., -1]
        with torch.no_grad():
            place = ((at + self._bound) / unit[..., axis]).unsqueeze(-1).contiguous()
            inner = self._ends[..., axis, :-1]
            first = torch.searchsorted(
                inner.expand(*place.shape[:-1], -1).contiguous(), place, right=True
            )
        both = first.unsqueeze(-1).expand(*first.shape[:-1], 2, 1)
        sizes, ends = (_taken(each, both).squeeze(-1) for each in (self._sizes, self._ends))
        slopes = _taken(self._slopes, torch.cat((first, first + 1), -1))
        slopes = (slopes / (1 + slopes.abs() / LOG_SPAN)).exp()
        left, low = ((ends - sizes) * unit - self._bound).unbind(-1)
        width, height = (sizes * unit).unbind(-1)
        return left, width, low, height, *slopes.unbind(-1)


def bent_normal(
    x: Tensor, y: Tensor, slopes: Tensor, bounds: tuple[Tensor, Tensor] | None = None
) -> dist.TransformedDistribution:
    """Returns standard Normal variables ``(*batch)`` after a `KnotTransform`, given that these are within bounds."""
    zero, one = y.new_zeros(y.shape[:-1]), y.new_ones(y.shape[:-1])
    bend = KnotTransform(torch.stack(torch.broadcast_tensors(x, y, slopes), -2))
    if bounds is None:
        normal: torch.distributions.Distribution = dist.Normal(zero, one, validate_args=False)
    else:
        low, high = (bend.straighten(each.expand(zero.shape))[0] for each in bounds)
        normal = TruncatedNormal(zero, one, low, high, validate_args=False)
    return dist.TransformedDistribution(normal, [bend], validate_args=False)
