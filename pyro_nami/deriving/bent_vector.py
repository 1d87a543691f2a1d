"""Normal vectors that are bent along lines, and what they have to do with a density: v = center + root bend(e).

Each element of e is standard Normal, and bent to the density along a line through the center, where
that makes them nearer to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nami.deriving.gaussian_levels import times
from pyro_nami.deriving.grids import FLOOR, HALF, SIZE, LineDensity, grid_like, slope_of
from pyro_nami.deriving.nearest_normal import LOWEST, quasi_normal
from pyro_nami.factors.knots import KnotTransform

__all__ = [
    "RUN_POINTS",
    "BentVector",
    "Heights",
    "bent_along_lines",
    "effective_share",
    "reweighted",
    "tempered",
    "unbent",
]

Heights = Callable[[Tensor], Tensor]

# Points that the model is run at together, at most, as it may make a matrix of its data at each. Rough estimates take
# as many: of 4,000 draws of a capture model 3,077 are effective with 256 weighted points, 3,092 with 1,024.
RUN_POINTS = 256
# Share of weighted points that are effective after weights are raised to a power; without it, a few points far out
# have all the weight.
TEMPERED = 0.2
# Change of a slope within a step of a grid, in nats per deviation, that only the edge of a support has.
JUMP = 8.0


class BentVector(NamedTuple):
    """A bent Normal vector of each data set.

    Attributes:
        center: ``(*batch, numbers)``.
        root: ``(*batch, numbers, numbers)``, lower triangular.
        knots: of the bends, ``(*batch, numbers, 3, points)``.
    """

    center: Tensor
    root: Tensor
    knots: Tensor

    def at(self, normal: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the points ``(*lead, numbers)`` of standard Normal variables, and their log density in nats."""
        bent, log_slope = KnotTransform(self.knots).bend(normal)
        return self.center + times(self.root, bent), self._log_q(normal, log_slope)

    def at_each(self, normal: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the same for variables ``(points, numbers)`` that are those of all data sets."""
        normal = normal.reshape(len(normal), *(1,) * (self.center.dim() - 1), -1)
        return self.at(normal.to(self.center).expand(-1, *self.center.shape))

    def log_prob(self, points: Tensor) -> Tensor:
        """Returns the log density of points ``(*lead, numbers)``, in nats."""
        off = (points - self.center).unsqueeze(-1)
        bent = torch.linalg.solve_triangular(self.root, off, upper=False).squeeze(-1)
        return self._log_q(*KnotTransform(self.knots).straighten(bent))

    def _log_q(self, normal: Tensor, log_slope: Tensor) -> Tensor:
        log_q = (-normal.square() / 2 - math.log(2 * math.pi) / 2 - log_slope).sum(-1)
        return log_q - self.root.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def elbo(self, heights: Heights, normal: Tensor) -> float:
        """Returns the ELBO in nats, by an average over standard Normal variables ``(points, numbers)``."""
        points, log_q = self.at_each(normal)
        height = heights(points)
        return float((torch.maximum(height, height.amax(0) - LOWEST) - log_q).mean())


def unbent(center: Tensor, root: Tensor) -> BentVector:
    """Returns a Normal vector."""
    ends = torch.tensor([-HALF, HALF]).to(center)
    knots = torch.stack([ends, ends, torch.ones_like(ends)])
    return BentVector(center, root, knots.expand(*center.shape, 3, 2))


def bent_along_lines(heights: Heights, center: Tensor, root: Tensor) -> BentVector:
    """Returns a vector whose elements have the densities of lines through a center.

    Center and root move to the means and deviations along these, so that the bends leave mean 0 and variance 1.

    Args:
        heights: from points ``(points, *batch, numbers)`` to log densities in nats.
        center, root: the lines are those of the root's columns.
    """
    numbers = center.shape[-1]
    grid = grid_like(SIZE, center[..., 0])
    steps = torch.tensordot(grid.flatten(), root.mT.movedim(-2, 0), 0)
    table = heights((center + steps).flatten(0, 1))
    table = table.unflatten(0, (SIZE, numbers)).movedim(1, -1)
    table = torch.maximum(table, table.amax(0) - FLOOR)  # as slopes are of finite numbers
    at, slopes = LineDensity(table, _slope_beside_jumps(table)).quantiles()
    place = grid.unsqueeze(-1).expand_as(at)
    bend = KnotTransform(torch.stack([at, place, slopes], -1).movedim(0, -1))
    # moments by the trapezoidal rule, tails included
    normal = torch.linspace(-HALF, HALF, 8 * SIZE, dtype=at.dtype, device=at.device)
    weight = (-normal.square() / 2).softmax(0)
    moved = bend.bend(normal.reshape(-1, *(1,) * (at.dim() - 1)).expand(-1, *at.shape[1:]))[0]
    mean = torch.tensordot(weight, moved, 1)
    deviation = torch.tensordot(weight, (moved - mean).square(), 1).sqrt()
    center = center + times(root, mean)
    root = root * deviation[..., None, :]
    knots = [at, (place - mean) / deviation, slopes / deviation]
    return BentVector(center, root, torch.stack(knots, -1).movedim(0, -1))


def reweighted(
    heights: Heights, found: BentVector, *, count: int = 1024, enough: float = 0.9, rounds: int = 4
) -> tuple[BentVector, float]:
    """Returns a vector with mean and covariance of weighted points, bent anew; and the share that was effective.

    Args:
        heights, found: the log density, and the vector.
        count: number of points of a round; 256 leave errors of 7% in deviations.
        enough: share of effective points that ends the search.
        rounds: number of rounds, at most.
    """
    normal = quasi_normal(count, found.center.shape[-1])
    effective = 1.0
    for _ in range(rounds):
        points, log_q = found.at_each(normal)
        log_weight = heights(points) - log_q
        effective = float(effective_share(log_weight).min())
        # by how much they differ from equal ones, whose mean and covariance are known
        weights = (tempered(log_weight, TEMPERED).softmax(0) - 1 / len(points))[..., None]
        off = points - found.center
        moved = (weights * off).sum(0)
        covariance = found.root @ found.root.mT
        covariance = covariance + (weights * off).movedim(0, -1) @ off.movedim(0, -2)
        covariance = covariance - moved[..., :, None] * moved[..., None, :]
        root, failed = torch.linalg.cholesky_ex(covariance)
        if bool((failed > 0).any()):
            break
        center = found.center + moved
        found = found._replace(center=center, root=root)
        if effective > enough:
            break
        # weights tell mean and covariance better than lines
        found = bent_along_lines(heights, center, root)._replace(center=center, root=root)
    return found, effective


def _slope_beside_jumps(table: Tensor) -> Tensor:
    """Returns the slopes of log densities on a grid, at the edge of a support those of the flatter side."""
    step = 2 * HALF / (len(table) - 1)
    rise = table.diff(dim=0) / step
    left, right = torch.cat([rise[:1], rise]), torch.cat([rise, rise[-1:]])
    flatter = torch.where(left.abs() < right.abs(), left, right)
    return torch.where((left - right).abs() > JUMP, flatter, slope_of(table))


def effective_share(log_weight: Tensor) -> Tensor:
    """Returns the share of weighted points that are effective, ``(*batch)``."""
    weights = log_weight.softmax(0)
    return 1 / (len(weights) * weights.square().sum(0))


def tempered(log_weight: Tensor, share: float, *, least: float = 1e-6) -> Tensor:
    """Returns log weights ``(points, *batch)`` times a power at which a share of the points is effective.

    No power is below ``least``, at which a million nats are one.
    """
    power = torch.ones_like(log_weight[0])
    few = power > 0
    while bool(few.any()):
        # where all but a few weights are zero, no power makes more of them effective
        few = (effective_share(power * log_weight) < share) & (power > least)
        power = torch.where(few, 0.7 * power, power)
    return power * log_weight
