"""Mixtures of Normal vectors, with a part wherever importance weights are large.

References:
    Raftery and Bao 2010, "Estimating and projecting trends in HIV/AIDS generalized epidemics using incremental mixture
    importance sampling".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nami.deriving.ascent import Ascent, Slopes, measured, polish, root_of
from pyro_nami.deriving.bent_vector import RUN_POINTS, BentVector, Heights, unbent
from pyro_nami.deriving.expansion import NEGLIGIBLE
from pyro_nami.deriving.nearest_normal import LEAST_GAIN, quasi_normal

__all__ = ["Modes", "adapted_mixture", "modes_of", "shares_of"]

# Deviations of a part that guards the tails of a part about a mode, relative to the deviations of the latter. At 2
# radon's weights have k-hat 0.97, at 1.5 they have no tail.
WIDE = 1.5


def adapted_mixture(
    heights: Heights,
    vectors: Sequence[BentVector],
    *,
    count: int = 1024,
    large: float = 3.0,
    most_added: int = 12,
) -> tuple[list[BentVector], Tensor]:
    """Returns the parts of a mixture that has no large importance weights, and the logs of their shares.

    Args:
        heights: from points ``(points, *batch, numbers)`` to log densities in nats, of one data set.
        vectors: the first parts, one about each mode.
        count: number of points of the first part.
        large: importance weight, relative to the mean, about which a part is added.
        most_added: number of parts that are added, at most; more of them, each with few of the draws, waste draws.

    Example:
        >>> heights = lambda x: torch.logaddexp(-x.square() / 2, -(x - 9.0).square() / 2).squeeze(-1)  # two modes
        >>> modes = [unbent(torch.tensor([x]), torch.eye(1)) for x in (0.0, 9.0)]
        >>> parts, log_shares = adapted_mixture(heights, modes)
        >>> len(parts), float(log_shares.exp().sum().round(decimals=3))
        (4, 1.0)
    """
    first = vectors[0]
    parts = [*vectors, *(each._replace(root=WIDE * each.root) for each in vectors)]
    most = most_added + len(parts)
    counts = [count] + [RUN_POINTS] * (len(parts) - 1)
    points = torch.cat([_points(part, count) for part, count in zip(parts, counts)])
    height = heights(points)
    log_q = torch.stack([part.log_prob(points) for part in parts])
    while True:
        shares = torch.tensor(counts).to(log_q) / sum(counts)
        flat = log_q.flatten(1)
        log_weights = height.flatten() - _mixed(shares, flat)
        weights = log_weights.softmax(0)
        shares = _fitted(shares, flat, weights)
        log_total = log_weights.logsumexp(0) - math.log(len(weights))
        relative = height.flatten() - _mixed(shares, flat) - log_total  # log weights of the result
        if float(relative.max()) <= math.log(large) or len(parts) >= most:
            return parts, shares.log()
        part = _about(points, int(relative.argmax()), weights, first)
        more = _points(part, RUN_POINTS)
        points, height = torch.cat([points, more]), torch.cat([height, heights(more)])
        log_q = torch.cat([log_q, torch.stack([each.log_prob(more) for each in parts])], 1)
        log_q = torch.cat([log_q, part.log_prob(points)[None]])
        parts.append(part)
        counts.append(RUN_POINTS)


class Modes(NamedTuple):
    """Modes that searches have found, of one data set.

    Attributes:
        vectors: a Normal about each that may count, the highest first.
        lower: by how many nats there is less mass about each than about the one with most.
        unseen: the share of searches that would lead to other ones: that of modes which one search alone has found, if
            there are several (Good 1953, "The population frequencies of species").
    """

    vectors: list[BentVector]
    lower: list[float]
    unseen: float


def modes_of(heights: Heights, slopes: Slopes, ends: Ascent) -> Modes:
    """Returns the modes at which searches from several starts, ``(starts, *batch)``, have ended.

    Two have ended at one mode if there is no valley between them. Of several modes the curvatures are measured, as
    those that searches have estimated tell masses badly.
    """
    found, counts = _apart(heights, ends)
    if len(counts) > 1:
        nearer = [polish(slopes, measured(heights, each))[0] for each in found]
        found, counts = _apart(heights, Ascent(*map(torch.stack, zip(*nearer))), counts)
    vectors = [unbent(each.place, root_of(each.inverse)) for each in found]
    masses = shares_of(heights, vectors).tolist() if vectors else []
    counting = [k for k, mass in enumerate(masses) if mass > max(masses) - NEGLIGIBLE]
    singles = sum(counts[k] == 1 for k in counting) if len(counting) > 1 else 0
    lower = [max(masses) - masses[k] for k in counting]
    return Modes([vectors[k] for k in counting], lower, singles / max(1, sum(counts)))


def _apart(
    heights: Heights, ends: Ascent, counts: Sequence[int] = ()
) -> tuple[list[Ascent], list[int]]:
    """Returns ends of searches with valleys between them, the highest first, and how many searches led to each.

    ``counts`` are those of each end, by default 1.
    """
    height = ends.height.flatten()
    left = height.argsort(descending=True)
    left = left[((ends.gain < LEAST_GAIN) & ends.height.isfinite()).flatten()[left]]
    each = torch.tensor(counts or [1] * len(height))
    found: list[Ascent] = []
    led: list[int] = []
    while len(left):
        best = ends.at(int(left[0]))
        between = heights((best.place + ends.place[left]) / 2).flatten()
        is_same = between > height[left] - 1.0  # a valley is a nat deep at least
        is_same[0] = True
        found.append(best)
        led.append(int(each[left[is_same].cpu()].sum()))
        left = left[~is_same]
    return found, led


def shares_of(heights: Heights, vectors: Sequence[BentVector]) -> Tensor:
    """Returns the logs of the shares of the mass about modes, ``(modes,)``, by the density at each and its Normal."""
    height = heights(torch.stack([each.center for each in vectors])).flatten()
    log_q = torch.stack([each.log_prob(each.center).sum() for each in vectors])
    return (height - log_q).log_softmax(0)


def _mixed(shares: Tensor, log_q: Tensor) -> Tensor:
    """Returns the log density of a mixture, ``(points,)``, by those of its parts, ``(parts, points)``."""
    return (shares.log()[:, None] + log_q).logsumexp(0)


def _fitted(shares: Tensor, log_q: Tensor, weights: Tensor, *, kept: float = 0.5) -> Tensor:
    """Returns shares that are nearer to the weighted points, by expectation maximization.

    Each part keeps a share of its points: at 0.2 the tails of the weights of GLMM_Poisson have k-hat 0.72, at 0.5 0.50.
    """
    least = kept * shares
    for _ in range(20):  # most change within a few steps
        owned = (shares.log()[:, None] + log_q - _mixed(shares, log_q)).exp() @ weights
        shares = torch.maximum(owned, least)
        shares = shares / shares.sum()
    return shares


def _points(vector: BentVector, count: int) -> Tensor:
    """Returns points of a vector, ``(count, *batch, numbers)``."""
    return vector.at_each(quasi_normal(count, vector.center.shape[-1]))[0]


def _about(points: Tensor, index: int, weights: Tensor, first: BentVector) -> BentVector:
    """Returns a Normal about one of several weighted points, with the covariance of those near to it."""
    center = points[index]
    off = points - center
    whitened = torch.linalg.solve_triangular(first.root, off.unsqueeze(-1), upper=False)
    near = RUN_POINTS // 2  # points that say how wide the density is there
    nearest = whitened.flatten(1).square().sum(-1).topk(near, largest=False).indices
    share = (weights[nearest] + 1 / len(points)) / 2
    share = share / share.sum()
    off = off[nearest].flatten(1)
    covariance = ((share * off.mT) @ off).reshape(first.root.shape)
    root, failed = torch.linalg.cholesky_ex(covariance)
    return unbent(center, first.root if bool((failed > 0).any()) else root)
