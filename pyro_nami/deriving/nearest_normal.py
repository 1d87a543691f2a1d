"""The Normal that is nearest to a density, by Newton steps on averages over a fixed set of draws.

Among Normals it has the largest ELBO. Where a density has kinks, or is skewed, it is nearer to mean
and covariance than the curvature at the mode. With v = center + root e and e standard Normal, the
best Normal has E[slope by e] = 0 and -E[slope by e times e] = I. The first is the gradient by the
center; the second is the average curvature (Stein's identity), which takes no second derivatives.

References:
    Opper and Archambeau 2009, The variational Gaussian approximation revisited.
    Giordano, Ingram and Broderick 2023, Black box variational inference with a deterministic objective.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_nami.deriving.ascent import LONGEST, SHARES, Slopes, root_of
from pyro_nami.deriving.expansion import MAX_ERROR, MOST_RUNS
from pyro_nami.deriving.gaussian_levels import times

__all__ = ["LEAST_GAIN", "LOWEST", "nearest_normal", "normal_points", "quasi_normal"]

# Nats that a step has to gain for another one to follow.
ENOUGH = MAX_ERROR**2
# Nats that a further step would gain, where no mode, or no nearest Normal, was found. With ten times less, none is
# found of densities with kinks: the average over points has kinks, too, and no step rises from one.
LEAST_GAIN = 0.1
# Nats below the highest point: the height of all points that are lower, or have no density. With ten times less, tails
# that are no matter count.
LOWEST = 1e3


def normal_points(count: int, numbers: int) -> Tensor:
    """Returns quasi-random standard Normal variables ``(2 * count, numbers)``, whose mean is 0 and covariance I.

    Example:
        >>> points = normal_points(64, 3)
        >>> torch.allclose(points.mT @ points / 128, torch.eye(3, dtype=points.dtype))
        True
    """
    half = quasi_normal(count, numbers)
    points = torch.cat([half, -half])
    root = torch.linalg.cholesky(points.mT @ points / len(points))
    return torch.linalg.solve_triangular(root, points.mT, upper=False).mT


def quasi_normal(count: int, numbers: int) -> Tensor:
    """Returns standard Normal variables ``(count, numbers)`` from a scrambled Sobol sequence, always the same."""
    engine = torch.quasirandom.SobolEngine(numbers, scramble=True, seed=0)
    uniform = engine.draw(count, dtype=torch.float64)
    eps = torch.finfo(uniform.dtype).eps  # as rounding makes some 0 or 1
    return torch.special.ndtri(uniform.clamp(eps, 1 - eps))


def nearest_normal(
    slopes: Slopes, center: Tensor, root: Tensor, points: Tensor, *, change: float = 4.0
) -> tuple[Tensor, Tensor, bool]:
    """Returns center and root of the Normal that is nearest to a density, and whether the search has ended there.

    Args:
        slopes: as for `pyro_nami.deriving.ascent.ascend`.
        center: to begin at, ``(*batch, numbers)``.
        root: of the covariance to begin with, ``(*batch, numbers, numbers)``.
        points: of `normal_points`, more than there are numbers.
        change: factor by which a step changes the variance along an eigenvector, at most.

    Example:
        >>> slopes = lambda x: (-x.abs().sum(-1), -x.sign())  # Laplace variables: a kink, and no curvature
        >>> zero, one = torch.zeros(1, dtype=torch.float64), torch.eye(1, dtype=torch.float64)
        >>> _, root, is_found = nearest_normal(slopes, zero, one, normal_points(128, 1))
        >>> is_found, abs(float(root) - 1.2533) < 0.1  # the best has the deviation sqrt(pi / 2)
        (True, True)
    """
    points = points.to(center).reshape(len(points), *(1,) * (center.dim() - 1), -1)
    elbo, mean, curvature = _averages(slopes, center, root, points)
    rise, longest = torch.inf, LONGEST
    for _ in range(MOST_RUNS):
        values, vectors = torch.linalg.eigh(curvature)
        values = values.clamp(1 / change, change)
        along = times(vectors.mT, mean)
        gain = (along.square() / values + values - 1 - values.log()).sum(-1) / 2
        if rise < ENOUGH or bool((gain < ENOUGH).all()):
            break
        step = times(vectors, along / values)
        step = step * (longest / step.norm(dim=-1, keepdim=True)).clamp(max=1.0)
        for share in SHARES:
            wider = root @ (vectors * values[..., None, :].pow(-share / 2))
            trial = center + share * times(root, step), root_of(wider @ wider.mT)
            found = _averages(slopes, *trial, points)
            if bool((found[0] > elbo).all()):
                break
        else:
            break
        rise = float((found[0] - elbo).max())
        # longer after steps that are taken whole
        longest = 2 * longest if share == 1.0 else LONGEST
        (center, root), (elbo, mean, curvature) = trial, found
    return center, root, bool((gain < LEAST_GAIN).all())


def _averages(
    slopes: Slopes, center: Tensor, root: Tensor, points: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the ELBO of a Normal ``(*batch)``, up to a constant, its gradient by the center, and the curvature.

    Both are in units of the root.
    """
    height, slope = slopes(center + times(root, points))
    height = torch.maximum(height, height.amax(0) - LOWEST)
    slope = times(root.mT, slope)
    curvature = -(points.movedim(0, -1) @ slope.movedim(0, -2)) / len(points)
    log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return height.mean(0) + log_det, slope.mean(0), (curvature + curvature.mT) / 2
