"""Mixtures of Normal vectors, with a part wherever importance weights are large.

References:
    Raftery and Bao 2010, "Estimating and projecting trends in HIV/AIDS generalized epidemics using incremental mixture
    importance sampling".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_nami.deriving.bent_vector import POINTS, BentVector, Heights, unbent
from pyro_nami.deriving.nearest_normal import quasi_normal

__all__ = ["adapted_mixture"]

MORE_POINTS = 256  # of a further part
MOST_PARTS = 12
LARGE = 3.0  # a weight, relative to the mean, about which a part is added
NEAR = 128  # points whose weighted covariance a part has
STEPS = 20  # of a fit of shares; most change within a few
LEAST_SHARE = 0.5  # of its own that a part keeps, relative to its share of the points
WIDE = 1.5  # deviations of a part that guards the tails of the first one, relative to it


def adapted_mixture(
    heights: Heights, vectors: Sequence[BentVector], fold: int = 1
) -> tuple[list[BentVector], Tensor]:
    """Returns the parts of a mixture that has no large importance weights, and the logs of their shares.

    Args:
        heights: from points ``(points, *batch, numbers)`` to log densities in nats, of one data set.
        vectors: the first parts, one about each mode.
        fold: by how many times more points weights are told than by default.

    Example:
        >>> heights = lambda x: torch.logaddexp(-x.square() / 2, -(x - 9.0).square() / 2).squeeze(-1)  # two modes
        >>> modes = [unbent(torch.tensor([x]), torch.eye(1)) for x in (0.0, 9.0)]
        >>> parts, log_shares = adapted_mixture(heights, modes)
        >>> len(parts), float(log_shares.exp().sum().round(decimals=3))
        (3, 1.0)
    """
    first = vectors[0]
    parts = [first, first._replace(root=WIDE * first.root), *vectors[1:]]
    counts = [fold * POINTS] + [fold * MORE_POINTS] * (len(parts) - 1)
    points = torch.cat([_points(part, count) for part, count in zip(parts, counts)])
    height = heights(points)
    log_q = torch.stack([part.log_prob(points) for part in parts])
    while True:
        shares = torch.tensor(counts).to(log_q) / sum(counts)
        flat = log_q.flatten(1)
        weights = (height.flatten() - _mixed(shares, flat)).softmax(0)
        if float(weights.max()) * len(weights) <= LARGE or len(parts) >= MOST_PARTS:
            return parts, _fitted(shares, flat, weights).log()
        part = _about(points, weights, first, fold * NEAR)
        more = _points(part, fold * MORE_POINTS)
        points, height = torch.cat([points, more]), torch.cat([height, heights(more)])
        log_q = torch.cat([log_q, torch.stack([each.log_prob(more) for each in parts])], 1)
        log_q = torch.cat([log_q, part.log_prob(points)[None]])
        parts.append(part)
        counts.append(fold * MORE_POINTS)


def _mixed(shares: Tensor, log_q: Tensor) -> Tensor:
    """Returns the log density of a mixture, ``(points,)``, by those of its parts, ``(parts, points)``."""
    return (shares.log()[:, None] + log_q).logsumexp(0)


def _fitted(shares: Tensor, log_q: Tensor, weights: Tensor) -> Tensor:
    """Returns shares that are nearer to the weighted points, by steps of expectation and maximization."""
    least = LEAST_SHARE * shares
    for _ in range(STEPS):
        owned = (shares.log()[:, None] + log_q - _mixed(shares, log_q)).exp() @ weights
        shares = torch.maximum(owned, least)
        shares = shares / shares.sum()
    return shares


def _points(vector: BentVector, count: int) -> Tensor:
    """Returns points of a vector, ``(count, *batch, numbers)``."""
    numbers = vector.center.shape[-1]
    normal = quasi_normal(count, numbers).to(vector.center)
    normal = normal.reshape(count, *(1,) * (vector.center.dim() - 1), numbers)
    return vector.at(normal.expand(count, *vector.center.shape))[0]


def _about(points: Tensor, weights: Tensor, first: BentVector, near: int) -> BentVector:
    """Returns a Normal about the point of the largest weight, with the covariance of those near to it."""
    center = points[int(weights.argmax())]
    off = points - center
    whitened = torch.linalg.solve_triangular(first.root, off.unsqueeze(-1), upper=False)
    nearest = whitened.flatten(1).square().sum(-1).topk(near, largest=False).indices
    share = (weights[nearest] + 1 / len(points)) / 2
    share = share / share.sum()
    off = off[nearest].reshape(near, -1)
    covariance = (share * off.mT) @ off
    covariance = covariance.reshape(first.root.shape)
    root, failed = torch.linalg.cholesky_ex(covariance)
    return unbent(center, first.root if bool((failed > 0).any()) else root)
