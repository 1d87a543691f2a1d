"""Densities on an even grid along a line, and distributions with these densities.

A distribution is a standard Normal variable that is mapped to the quantiles of the density at the
points of the grid. The error falls with the fourth power of the grid's step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import squeezed
from pyro_nami.factors.knots import bent_normal

__all__ = [
    "FLOOR",
    "HALF",
    "MOST_ON_GRID",
    "SIZE",
    "LineDensity",
    "bent",
    "grid_like",
    "points_of",
    "side_of",
    "slope_of",
]

HALF = 6.0  # of the length of a grid, in its own units, which are standard deviations for a Normal
SIZE = 33  # points along a side of a grid; a tenth of them would leave errors of nats
MOST_ON_GRID = 2  # latents with a joint grid; the number of its points is exponential in this
# nats below its maximum, from where a log density counts as constant
FLOOR = -math.log(torch.finfo(torch.float32).tiny)


class LineDensity(NamedTuple):
    """An unnormalized density at the points of a grid, which lie along the first dim.

    Attributes:
        log_density: in nats, up to a constant, ``(points, *batch)``.
        slope: the derivative of the log density, in nats per unit of the grid, ``(points, *batch)``.

    Example:
        >>> grid = grid_like(33, torch.zeros(()))
        >>> at, rise = LineDensity(-grid.square() / 2, -grid).quantiles()  # of a standard Normal
        >>> (at - grid)[3:-3].abs().max() < 1e-2
        tensor(True)
    """

    log_density: Tensor
    slope: Tensor

    @classmethod
    def of_slope(cls, slope: Tensor) -> LineDensity:
        """Returns the density whose log is 0 at the first point and has these slopes."""
        step, bend = _step(slope), slope_of(slope)
        rise = step * (slope[:-1] + slope[1:]) / 2 + step**2 * (bend[:-1] - bend[1:]) / 12
        return cls(torch.cat([torch.zeros_like(slope[:1]), rise.cumsum(0)]), slope)

    def log_total(self) -> Tensor:
        """Returns the log of the density's integral, ``(*batch,)``."""
        _, masses = self._masses()
        return masses.sum(0).log() + self._top().squeeze(0)

    def quantiles(self) -> tuple[Tensor, Tensor]:
        """Returns for each point the standard Normal quantile of the same probability, and d point / d quantile."""
        density, masses = self._masses()
        lower = masses.cumsum(0)[:-1]
        upper = masses.flip(0).cumsum(0).flip(0)[1:]
        total = lower + upper
        size = -torch.special.ndtri(torch.minimum(lower, upper) / total)
        normal = (-size * size / 2).exp() / math.sqrt(2 * math.pi)
        return torch.where(lower < upper, -size, size), total * normal / density

    def _top(self) -> Tensor:
        return self.log_density.detach().amax(0, keepdim=True)

    def _masses(self) -> tuple[Tensor, Tensor]:
        """Returns the density relative to its maximum; and its mass before, between and behind the points."""
        below, step = self.log_density - self._top(), _step(self.slope)
        slope = self.slope.where(below > -FLOOR, 0.0)
        below = below.clamp(min=-FLOOR)
        density = below.exp()
        # Simpson's rule, with the middle of a cell by a cubic through its ends.
        middle = (below[:-1] + below[1:]) / 2 + step / 8 * (slope[:-1] - slope[1:])
        between = step / 6 * (density[:-1] + 4 * middle.exp() + density[1:])
        # Beyond the grid the log density goes on as a straight line.
        before = density[:1] / slope[:1].clamp(min=1 / HALF)
        behind = density[-1:] / (-slope[-1:]).clamp(min=1 / HALF)
        return density, torch.cat([before, between, behind])


def side_of(group: ConjugateGroup) -> int:
    """Returns the number of points along a side of a group's grid.

    There are half as many in a joint grid of two latents, and where weights correct draws.
    """
    is_coarse = group.form == "quadrature" and (group.is_weighted or len(group.members) > 1)
    return (SIZE - 1) // 2 + 1 if is_coarse else SIZE


def points_of(group: ConjugateGroup) -> int:
    """Returns the number of points of a group's grid."""
    return int(side_of(group) ** len(group.members))


def bent(
    quantiles: tuple[Tensor, Tensor],
    center: Tensor,
    scale: Tensor,
    like: Tensor,
    event_dim: int,
    dims: int | None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> dist.TransformedDistribution:
    """Returns the distribution of a latent with one element by its quantiles at the points of a grid.

    Args:
        quantiles: result of `LineDensity.quantiles`, ``(points, *batch)`` each.
        center: the latent's value at the middle of the grid, ``(*batch)``.
        scale: the change of the latent's value per unit of the grid, ``(*batch)``.
        like: a tensor of the latent's dtype.
        event_dim: number of dims of size 1 to append to the batch shape.
        dims: number of batch dims of the result; leading ones of size 1 beyond it are dropped. None keeps all.
        bounds: least and greatest value, to which the distribution is truncated.
    """
    at, slopes = quantiles
    place = center + scale * grid_like(len(at), at[0])
    knots = (
        squeezed(each.expand(at.shape).movedim(0, -1), dims, 1)
        for each in (at, place, scale * slopes)
    )
    x, y, slopes = (
        each.reshape(*each.shape[:-1], *(1,) * event_dim, -1).to(like) for each in knots
    )
    return bent_normal(x, y, slopes, bounds)


def grid_like(size: int, like: Tensor) -> Tensor:
    """Returns an even grid from -`HALF` to `HALF` along a new first dim, to broadcast with ``like``."""
    grid = torch.linspace(-HALF, HALF, size, dtype=like.dtype, device=like.device)
    return grid.reshape((-1,) + (1,) * like.dim())


def slope_of(values: Tensor) -> Tensor:
    """Returns the derivative of values on a grid along the first dim, of fourth order but for two points at the ends.

    Example:
        >>> grid = grid_like(25, torch.zeros(()))
        >>> (slope_of(grid**4) - 4 * grid**3).abs()[2:-2].max() < 1e-2
        tensor(True)
    """
    step = _step(values)
    (slope,) = torch.gradient(values, spacing=step, dim=0, edge_order=2)
    wide = (values[4:] - values[:-4]) / (4 * step)
    return torch.cat([slope[:2], (4 * slope[2:-2] - wide) / 3, slope[-2:]])


def _step(values: Tensor) -> float:
    return 2 * HALF / (len(values) - 1)
