"""Densities on an even grid along a line: their mass, and the quantiles that standard Normal variables are mapped to.

The error falls with the fourth power of the grid's step. `on_grid` interpolates values at fewer,
Chebyshev points by polynomials.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

__all__ = ["HALF", "Mass", "coefficients", "grid_like", "on_grid", "points_like", "slope_of"]

HALF = 6.0  # of the grid, in units of its own
_SMALLEST = 1e-9  # probability of a tail, up to which quantiles are told


class Mass:
    """A density on a grid, of which slopes are known, ``(*batch, points)``, in units of its greatest value there.

    Attributes:
        log_density: ``(*batch, points)``, relative to the first point.
    """

    def __init__(self, slope: Tensor, log_density: Tensor | None = None) -> None:
        self.step = step = 2 * HALF / (slope.shape[-1] - 1)
        if log_density is None:
            padded = torch.cat([_before(slope), slope, _before(slope.flip(-1))], -1)
            rise = 13 * (slope[..., :-1] + slope[..., 1:]) - padded[..., :-3] - padded[..., 3:]
            log_density = torch.cat(
                [torch.zeros_like(slope[..., :1]), (rise * (step / 24)).cumsum(-1)], -1
            )
        self.log_density = log_density
        self.top = self.log_density.detach().amax(-1, keepdim=True)
        self.density = density = (self.log_density - self.top).exp()
        bend = density * slope
        mass = (density[..., :-1] + density[..., 1:]) / 2 + (bend[..., :-1] - bend[..., 1:]) * (
            step / 12
        )
        self.between = (mass * step).clamp(min=0)
        # Beyond the grid the log density goes on as a straight line.
        self.before = density[..., :1] / slope[..., :1].clamp(min=1 / HALF)
        self.behind = density[..., -1:] / (-slope[..., -1:]).clamp(min=1 / HALF)

    def log_total(self) -> Tensor:
        """Returns the logarithm of the density's integral, relative to that at the first point, ``(*batch,)``."""
        parts = self.before + self.between.sum(-1, keepdim=True) + self.behind
        return (parts.log() + self.top).squeeze(-1)

    def quantiles(self) -> tuple[Tensor, Tensor]:
        """Returns standard Normal quantiles at the grid's points, and the slopes of points by these."""
        lower = torch.cat([self.before, self.between], -1).cumsum(-1)
        upper = torch.cat([self.between, self.behind], -1).flip(-1).cumsum(-1).flip(-1)
        total = lower + upper
        tail = torch.minimum(lower, upper) / total
        size = -torch.special.ndtri(tail.clamp(min=_SMALLEST))
        at = torch.where(lower < upper, -size, size)
        tiny = torch.finfo(total.dtype).tiny
        slopes = (
            total * (-at * at / 2).exp() / (math.sqrt(2 * math.pi) * self.density.clamp(min=tiny))
        )
        # Where tails are too small the map goes on as a straight line.
        known = (tail > _SMALLEST).long()
        grid = grid_like(at.shape[-1], at[..., 0]).movedim(0, -1).expand(at.shape)
        index = torch.arange(at.shape[-1], device=at.device)
        first = known.argmax(-1, keepdim=True)
        last = len(index) - 1 - known.flip(-1).argmax(-1, keepdim=True)
        for edge, beyond in ((first, index < first), (last, index > last)):
            start, place, slope = (each.gather(-1, edge) for each in (at, grid, slopes))
            at = torch.where(beyond, start + (grid - place) / slope, at)
            slopes = torch.where(beyond, slope, slopes)
        return at, slopes


def grid_like(size: int, like: Tensor) -> Tensor:
    """Returns the grid along a first dim, before those of ``like``."""
    grid = torch.linspace(-HALF, HALF, size, dtype=like.dtype, device=like.device)
    return grid.reshape((-1,) + (1,) * like.dim())


def points_like(size: int, like: Tensor) -> Tensor:
    """Returns Chebyshev points from end to end of a grid along a first dim, before those of ``like``."""
    return (HALF * _nodes(size)).to(like).reshape((-1,) + (1,) * like.dim())


def coefficients(values: Tensor) -> Tensor:
    """Returns the Chebyshev coefficients, along a first dim, of a polynomial through values at `points_like`.

    Example:
        >>> coefficients(points_like(5, torch.zeros(())).square()).round(decimals=3)  # of 36 t^2 = 18 + 18 T2(t)
        tensor([18.,  0., 18.,  0.,  0.])
    """
    to = torch.linalg.inv(_polynomials(_nodes(len(values)), len(values)))
    return torch.tensordot(to.to(values), values, 1)


def on_grid(values: Tensor, size: int) -> Tensor:
    """Returns what a polynomial through values at `points_like` is at a grid's points, along a first dim.

    Example:
        >>> points, grid = points_like(13, torch.zeros(())), grid_like(5, torch.zeros(()))
        >>> (on_grid(points.cos(), 5) - grid.cos()).abs().max() < 1e-3
        tensor(True)
    """
    return torch.tensordot(_to_grid(len(values), size).to(values), values, 1)


@functools.cache
@torch.inference_mode(False)  # as it is kept for calls with gradients
def _to_grid(count: int, size: int) -> Tensor:
    at = torch.linspace(-1, 1, size, dtype=torch.float64, device="cpu")
    return _polynomials(at, count) @ torch.linalg.inv(_polynomials(_nodes(count), count))


def _nodes(count: int) -> Tensor:
    return -torch.linspace(0, math.pi, count, dtype=torch.float64, device="cpu").cos()


def _polynomials(at: Tensor, count: int) -> Tensor:
    """Returns Chebyshev polynomials, ``(places, count)``."""
    return (at.clamp(-1, 1).acos().unsqueeze(-1) * torch.arange(count, device="cpu")).cos()


def _before(values: Tensor) -> Tensor:
    """Returns what a cubic through the first four values along the last dim has one step before them."""
    return 4 * values[..., :1] - 6 * values[..., 1:2] + 4 * values[..., 2:3] - values[..., 3:4]


def slope_of(values: Tensor) -> Tensor:
    """Returns the slope of values on a grid along the first dim."""
    step = 2 * HALF / (len(values) - 1)
    inner = (values[:-4] - values[4:] + 8 * (values[3:-1] - values[1:-3])) / (12 * step)
    start = (values[1:3] - values[:2]) / step
    end = (values[-2:] - values[-3:-1]) / step
    return torch.cat([start, inner, end])
