"""What ranks say about a posterior: tests that are exact in finite samples, and the kind of what is wrong.

A rank is the place of a true value among draws from a posterior, and is uniform where the posterior is exact.
`EcdfTest` tests that for counts of ranks, `judge` and `judge_joint` name what they find. All of it is NumPy on counts;
change this module to change what a verdict rests on.
"""

from __future__ import annotations

__all__ = [
    "BIASED",
    "CALIBRATED",
    "CONSERVATIVE",
    "EcdfTest",
    "Finding",
    "MISCALIBRATED",
    "OVERCONFIDENT",
    "binomial_interval",
    "count_ranks",
    "ecdf_test",
    "fold",
    "holm",
    "judge",
    "judge_joint",
    "rank_probabilities",
]

from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

CALIBRATED = "calibrated"
OVERCONFIDENT = "overconfident"
CONSERVATIVE = "underconfident (conservative)"
BIASED = "biased"
MISCALIBRATED = "miscalibrated"  # the test rejects, but neither location nor spread says why

_CLEAR = 3.0  # standard errors by which location or spread must be off to be named as what is wrong


class EcdfTest:
    r"""Exact test of counts of independent draws over ordered cells of known probabilities.

    The count up to cell k is :math:`X_k \sim \mathrm{Binomial}(N, z_k)`. The statistic is the smallest of their tail
    probabilities, :math:`T = 2 \min_k \min(P(X_k \le x_k), P(X_k \ge x_k))`; {T > gamma} is a simultaneous envelope
    around the empirical distribution function. Its probability is found without simulation: given their sum, counts in
    cells are independent Poisson variables, so that one pass of convolutions over the cells, cut to the envelope, gives
    it. p-values far below 1 / N are as exact as others.

    Args:
        num: number of draws N.
        probabilities: of the cells, ``(cells,)``.

    References:
        Säilynoja, Bürkner, Vehtari 2022, "Graphical test for discrete uniformity and its applications in goodness of
        fit evaluation and multiple sample comparison" (the envelope, with another recursion); Moscovich, Nadler 2017,
        "Fast calculation of boundary crossing probabilities for Poisson processes" (this one).

    Example:
        >>> test = EcdfTest(100, [0.25] * 4)
        >>> float(test.statistic(np.array([[25, 25, 25, 25]]))[0])
        1.0
        >>> [bool(test.p_value(float(test.statistic(np.array([[n, 100 - n, 0, 0]]))[0])) < 0.01) for n in (25, 60)]
        [True, True]
    """

    def __init__(self, num: int, probabilities: ArrayLike) -> None:
        self.num = num
        self.probabilities = np.asarray(probabilities, dtype=float)
        self._thresholds: dict[float, float] = {}  # level -> statistic, as `band` finds them

    @cached_property
    def levels(self) -> Array:
        """Probabilities z_k up to each cell but the last, ``(cells - 1,)``."""
        return np.cumsum(self.probabilities)[:-1]

    @cached_property
    def _tails(self) -> tuple[Array, Array]:
        """P(X_k <= x) and P(X_k >= x), each ``(cells - 1, num + 1)``."""
        pmf = _binomial_pmf(self.num, self.levels)
        below, above = pmf.cumsum(1), pmf[:, ::-1].cumsum(1)[:, ::-1]
        return np.minimum(below, 1.0), np.minimum(above, 1.0)

    def statistic(self, counts: NDArray[np.int64]) -> Array:
        """Returns T of every row of counts, ``(elements, cells)`` to ``(elements,)``."""
        below, above = self._tails
        sums = counts.cumsum(1)[:, :-1]
        cells = np.arange(sums.shape[1])
        return np.minimum(1.0, 2 * np.minimum(below[cells, sums], above[cells, sums]).min(1))

    def deviation(self, counts: NDArray[np.int64]) -> Array:
        """Returns the largest difference between empirical and expected distribution function, ``(elements,)``."""
        return np.abs(counts.cumsum(1)[:, :-1] / self.num - self.levels).max(1)

    def p_value(self, statistic: float) -> float:
        """Returns P(T <= statistic) where the cells have their probabilities."""
        if statistic >= 1:
            return 1.0
        # In one cell alone T is this small with at least half of this probability, which rounding cannot hide.
        return min(1.0, max(1.0 - self._inside(statistic), statistic / 2))

    def band(self, level: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the envelope: the smallest and largest counts up to each cell, each ``(cells - 1,)``.

        Counts leave it with a probability of at most ``level``, over all cells together.
        """
        if level not in self._thresholds:
            low, high = np.log(level / (2 * len(self.levels) + 2)), np.log(2 * level)
            while high - low > 1e-3:
                middle = (low + high) / 2
                low, high = (middle, high) if self.p_value(np.exp(middle)) <= level else (low, middle)
            self._thresholds[level] = float(np.exp(low))
        return self._bounds(self._thresholds[level])

    def _bounds(self, threshold: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The smallest and largest counts up to each cell for which T > threshold."""
        below, above = self._tails
        limit = threshold / 2 * (1 + 1e-12)  # counts at exactly the threshold are outside
        return (below <= limit).sum(1), (above > limit).sum(1) - 1

    def _inside(self, threshold: float) -> float:
        """P(T > threshold)."""
        low, high = self._bounds(threshold)
        if (low > high).any():
            return 0.0
        state, start = np.ones(1), 0
        rates = self.num * self.probabilities
        for rate, least, most in zip(rates, [*low, self.num], [*high, self.num]):
            state = np.convolve(state, _poisson_pmf(rate, most - start))[least - start : most - start + 1]
            start = least
        return float(state[0] / _poisson_pmf(self.num, self.num)[-1])


@lru_cache(maxsize=64)
def ecdf_test(num: int, num_draws: int, folded: bool = False) -> EcdfTest:
    """Returns the test of ``num`` ranks among ``num_draws`` draws; ``folded``: of how central they are, see `fold`."""
    probabilities = rank_probabilities(num_draws)
    return EcdfTest(num, fold(probabilities) if folded else probabilities)


def rank_probabilities(num_draws: int) -> Array:
    """Returns the probabilities of the ranks of an exact posterior, 0 to ``num_draws``: all equal."""
    return np.full(num_draws + 1, 1 / (num_draws + 1))


def count_ranks(ranks: NDArray[np.int64], num_draws: int) -> NDArray[np.int64]:
    """Returns how often each rank occurs, ``(data sets, elements)`` to ``(elements, num_draws + 1)``."""
    elements, cells = ranks.shape[1], num_draws + 1
    flat = ranks + cells * np.arange(elements)
    return np.bincount(flat.reshape(-1), minlength=elements * cells).reshape(elements, cells)


def fold(counts: NDArray) -> NDArray:
    """Returns counts by distance from the middle rank, nearest first: ``(*, ranks)`` to ``(*, (ranks + 1) // 2)``.

    Up to a cell, they count the true values inside a central interval.
    """
    ranks = counts.shape[-1]
    folded = (counts + counts[..., ::-1])[..., : (ranks + 1) // 2][..., ::-1].copy()
    if ranks % 2:
        folded[..., 0] = counts[..., ranks // 2]
    return folded


def binomial_interval(num: int, probabilities: ArrayLike, level: float) -> tuple[NDArray, NDArray]:
    """Returns the smallest and largest counts with tails above ``level / 2`` each, for every probability."""
    pmf = _binomial_pmf(num, np.asarray(probabilities, dtype=float))
    return (pmf.cumsum(1) <= level / 2).sum(1), (pmf[:, ::-1].cumsum(1) > level / 2).sum(1) - 1


def holm(p_values: ArrayLike) -> Array:
    """Returns p-values adjusted by Holm's method: those below a level are found at that family-wise level.

    Example:
        >>> holm([0.01, 0.04, 0.03]).tolist()
        [0.03, 0.06, 0.06]
    """
    values = np.asarray(p_values, dtype=float)
    order = values.argsort(kind="stable")
    stepped = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


class Finding(NamedTuple):
    """What the ranks of one site say.

    Attributes:
        p_value: that the ranks are uniform, over all elements and tests of the site (Bonferroni), before other sites
            are allowed for.
        kind: what is wrong, if anything is.
        element: the element (in flat order) with the smallest p-value; the rest is about it.
        deviation: largest difference between the distribution functions of its ranks and of uniform ones.
        bias: how far the truth lies above the guide's location, in sds of the guide.
        spread: sd of the truth around the guide's location, over the guide's sd.
    """

    p_value: float
    kind: str
    element: int
    deviation: float
    bias: float
    spread: float


def judge(ranks: NDArray[np.int64], num_draws: int) -> Finding:
    """Returns the finding on one site's ranks, ``(data sets, elements)``.

    Two tests an element: that ranks are uniform, and that they are as central as uniform ones, which is to say that all
    central intervals cover as they should.
    """
    num, elements = ranks.shape
    counts = count_ranks(ranks, num_draws)
    whole, central = ecdf_test(num, num_draws), ecdf_test(num, num_draws, folded=True)
    statistics = np.stack([whole.statistic(counts), central.statistic(fold(counts))])
    worst = statistics.argmin(1)
    p_values = [test.p_value(statistics[i, worst[i]]) for i, test in enumerate((whole, central))]
    better = int(np.argmin(p_values))
    element = int(worst[better])
    bias, spread = _location_and_spread(counts[element])
    off = {
        BIASED: abs(bias) * num**0.5,
        OVERCONFIDENT: (spread - 1) * (2 * num) ** 0.5,
        CONSERVATIVE: (1 - spread) * (2 * num) ** 0.5,
    }
    kind = max(off, key=lambda name: off[name])
    return Finding(
        p_value=min(1.0, 2 * elements * p_values[better]),
        kind=kind if off[kind] > _CLEAR else MISCALIBRATED,
        element=element,
        deviation=float(whole.deviation(counts[element : element + 1])[0]),
        bias=bias,
        spread=spread,
    )


def judge_joint(ranks: NDArray[np.int64], num_draws: int, *, distances: bool) -> Finding:
    """Returns the finding on ranks ``(data sets,)`` of one number that is made of all latents.

    Such ranks are high where the truth lies far out: of negative densities, always; of distances to some point
    (``distances``), where the guide is too narrow, if it does not lie to one side. Distances that are only larger or
    only smaller, on average, have no name.
    """
    num = len(ranks)
    counts = count_ranks(ranks[:, None], num_draws)
    test = ecdf_test(num, num_draws)
    location, spread = _location_and_spread(counts[0])
    far, wide = location * num**0.5, (spread - 1) * (2 * num) ** 0.5
    outward, against = (wide, far) if distances else (far, 0.0)
    kind = MISCALIBRATED
    if abs(outward) > _CLEAR and np.sign(outward) * against > -_CLEAR:
        kind = OVERCONFIDENT if outward > 0 else CONSERVATIVE
    p_value, deviation = test.p_value(float(test.statistic(counts)[0])), float(test.deviation(counts)[0])
    return Finding(p_value, kind, 0, deviation, float("nan"), float("nan"))


def _location_and_spread(counts: NDArray[np.int64]) -> tuple[float, float]:
    """Mean and sd of ranks as normal scores, in units in which those of uniform ranks are 0 and 1."""
    ranks = len(counts)
    scores = np.array([NormalDist().inv_cdf((rank + 0.5) / ranks) for rank in range(ranks)])
    scores /= max(np.sqrt((scores**2).mean()), 1e-12)
    weights = counts / counts.sum()
    mean = float(weights @ scores)
    return mean, float(np.sqrt(weights @ (scores - mean) ** 2))


def _log_factorials(num: int) -> Array:
    return np.concatenate([[0.0], np.log(np.arange(1, num + 1)).cumsum()])


def _binomial_pmf(num: int, probabilities: Array) -> Array:
    """Probabilities of 0 to ``num``, ``(*probabilities, num + 1)``; probabilities inside (0, 1)."""
    table, x = _log_factorials(num), np.arange(num + 1)
    z = probabilities[:, None]
    return np.exp(table[-1] - table - table[::-1] + x * np.log(z) + (num - x) * np.log1p(-z))


def _poisson_pmf(rate: float, most: int) -> Array:
    """Probabilities of 0 to ``most``."""
    return np.exp(np.arange(most + 1) * np.log(rate) - rate - _log_factorials(most))
