"""Monotone maps through knots, with given slopes: those of learned flows, and of Normals bent into a derived shape."""

from __future__ import annotations

import math

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Transform, constraints

__all__ = ["KnotTransform", "bent_normal", "spline"]

_BOUND = 5.0
_SPAN = math.log(1e3)  # of log widths, log heights, and of log slopes on either side of zero


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
        t, rise = ((x - left) / width).clamp(0, 1), height / width
        rest = 1 - t
        bottom = rise + (up + down - 2 * rise) * t * rest
        y = low + height * t * (rise * t + up * rest) / bottom
        y = y - up * F.relu(left - x) + down * F.relu(x - left - width)  # with no slope at the knots themselves
        return y, _log_slope(t, rest, rise, bottom, up, down)

    def straighten(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x, and the log of dy/dx there."""
        left, width, low, height, up, down = self._bin(y, 1)
        done, rise = ((y - low) / height).clamp(0, 1), height / width
        curve = up + down - 2 * rise
        bend = done * curve
        b, c = up - bend, -rise * done
        t = 2 * c / (-b - (b * b - 4 * (rise - b) * c).clamp(min=0).sqrt())
        x = left + width * t - F.relu(low - y) / up + F.relu(y - low - height) / down
        rest = 1 - t
        return x, _log_slope(t, rest, rise, rise + curve * t * rest, up, down)

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
        knots = knots.expand(first.shape + knots.shape[-2:])
        found = knots.gather(-1, beside.expand(first.shape + (3, 2)))
        (left, low, up), (right, high, down) = (each.unbind(-1) for each in found.unbind(-1))
        return left, right - left, low, high - low, up, down


def _log_slope(t: Tensor, rest: Tensor, rise: Tensor, bottom: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return ((down * t * t + 2 * rise * t * rest + up * rest * rest) * (rise / bottom).square()).log()


def spline(params: Tensor) -> KnotTransform:
    """Returns the map of a neural spline flow, from -5 to 5; the identity beyond, and at parameters of zero.

    Args:
        params: ``(*batch, 3 bins - 1)``, any numbers: of the bins' widths and heights, and of slopes between them.

    References:
        Durkan et al. 2019, Neural Spline Flows.
    """
    bins = (params.shape[-1] + 1) // 3
    sides, slopes = params.split([2 * bins, bins - 1], -1)
    sides = sides.unflatten(-1, (2, bins))
    # A softmax, by partial sums: bounded numbers need no shift, and torch's own is slow on the CPU for rows this short.
    parts = (sides / (1 + sides.abs() * (2 / _SPAN))).exp().cumsum(-1)
    places = F.pad(2 * _BOUND * (parts / parts[..., -1:]) - _BOUND, (1, 0), value=-_BOUND)
    slopes = F.pad((slopes / (1 + slopes.abs() / _SPAN)).exp(), (1, 1), value=1.0)
    return KnotTransform(torch.cat((places, slopes.unsqueeze(-2)), -2))


def bent_normal(x: Tensor, y: Tensor, slopes: Tensor) -> dist.TransformedDistribution:
    """Returns standard Normal variables ``(*batch)`` after a `KnotTransform`."""
    normal = dist.Normal(y.new_zeros(y.shape[:-1]), y.new_ones(y.shape[:-1]), validate_args=False)
    knots = torch.stack(torch.broadcast_tensors(x, y, slopes), -2)
    return dist.TransformedDistribution(normal, [KnotTransform(knots)], validate_args=False)
