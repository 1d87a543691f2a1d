"""A monotone map through given knots, with given slopes, that bends a standard Normal into another shape."""

from __future__ import annotations

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Transform, constraints

__all__ = ["KnotTransform", "bent_normal"]


class KnotTransform(Transform):
    """y(x) through knots, by rational quadratics between them and straight lines beyond.

    Args:
        x, y: of the knots, ``(*batch, K)``, both rising.
        slopes: dy/dx there, ``(*batch, K)``, positive.

    References:
        Gregory and Delbourgo 1982, Piecewise rational quadratic interpolation to monotonic data.

    Example:
        >>> x = torch.tensor([-1.0, 0.0, 1.0])  # where it is the exponential
        >>> bend = KnotTransform(x, x.exp(), x.exp())
        >>> bend(torch.tensor(0.5)), bend.inv(torch.tensor(0.5).exp())
        (tensor(1.6528), tensor(0.4975))
    """

    domain = codomain = constraints.real
    bijective = True
    sign = 1

    def __init__(self, x: Tensor, y: Tensor, slopes: Tensor) -> None:
        super().__init__(cache_size=1)
        self._knots = x, y, slopes

    def _call(self, x: Tensor) -> Tensor:
        (left, width), (low, height), (up, down) = self._bin(x, self._knots[0])
        t, rise = ((x - left) / width).clamp(0, 1), height / width
        y = low + height * (rise * t * t + up * t * (1 - t)) / (rise + (up + down - 2 * rise) * t * (1 - t))
        return y + up * (x - left).clamp(max=0) + down * (x - left - width).clamp(min=0)

    def _inverse(self, y: Tensor) -> Tensor:
        (left, width), (low, height), (up, down) = self._bin(y, self._knots[1])
        done, rise = ((y - low) / height).clamp(0, 1), height / width
        bend = done * (up + down - 2 * rise)
        a, b, c = rise - up + bend, up - bend, -rise * done
        t = 2 * c / (-b - (b * b - 4 * a * c).clamp(min=0).sqrt())
        return left + width * t + (y - low).clamp(max=0) / up + (y - low - height).clamp(min=0) / down

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        (left, width), (_, height), (up, down) = self._bin(x, self._knots[0])
        t, rise = ((x - left) / width).clamp(0, 1), height / width
        bottom = rise + (up + down - 2 * rise) * t * (1 - t)
        return (down * t * t + 2 * rise * t * (1 - t) + up * (1 - t) ** 2).log() + 2 * (rise / bottom).log()

    def _bin(self, at: Tensor, edges: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns what the knots beside each place are: x and its change, y and its change, the two slopes."""
        shape = torch.broadcast_shapes(at.shape, edges.shape[:-1])
        inner = edges.detach()[..., 1:-1].expand(shape + (-1,))
        first = (inner <= at.detach().unsqueeze(-1)).sum(-1, keepdim=True)
        (left, right), (low, high), slopes = (
            [each.expand(shape + (-1,)).gather(-1, first + i).squeeze(-1) for i in (0, 1)] for each in self._knots
        )
        return [(left, right - left), (low, high - low), (slopes[0], slopes[1])]


def bent_normal(x: Tensor, y: Tensor, slopes: Tensor) -> dist.TransformedDistribution:
    """Returns standard Normal variables ``(*batch)`` after a `KnotTransform`."""
    normal = dist.Normal(y.new_zeros(y.shape[:-1]), y.new_ones(y.shape[:-1]), validate_args=False)
    return dist.TransformedDistribution(normal, [KnotTransform(x, y, slopes)], validate_args=False)
