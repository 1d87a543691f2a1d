"""Tests of ranks that are exact in finite samples, and the kind of error that a pattern of ranks shows.

A rank is the place of the true value among draws from a posterior; ranks are uniform if the
posterior is exact. Everything here is NumPy on counts of ranks.
"""

from __future__ import annotations

__all__ = [
    "EcdfTest",
    "RankVerdict",
    "count_ranks",
    "ecdf_tests",
    "judge",
    "verdicts",
]

from collections.abc import Mapping
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Counts = NDArray[np.int64]

CALIBRATED = "calibrated"
OVERCONFIDENT = "overconfident"
CONSERVATIVE = "underconfident (conservative)"
BIASED = "biased"
MISCALIBRATED = "miscalibrated"  # the test rejects, but neither location nor spread says why
JOINT_DENSITY, JOINT_TARP = "joint density", "joint TARP"  # what all latents together are ranked by


class RankVerdict(NamedTuple):
    """The result of testing the ranks of one site, or of a joint test.

    Attributes:
        verdict: ``"calibrated"``, ``"overconfident"``, ``"underconfident (conservative)"``, ``"biased"``, or
            ``"miscalibrated"`` where the ranks are not uniform but none of these says why.
        p_value: that the guide is calibrated here, adjusted for the site's elements and tests and for all other sites.
        elements: number of the site's scalar elements.
        worst: index of the element with the smallest p-value, in ``(*plates, *event)``; the rest is about it.
        deviation: largest difference between the distribution functions of its ranks and of uniform ones.
        bias: how far the truth lies above the guide's location, in sds of the guide; 0 is right. NaN for joint tests.
        spread: sd of the truth around the guide's location, in sds of the guide; 1 is right. NaN for joint tests.
    """

    verdict: str
    p_value: float
    elements: int
    worst: tuple[int, ...]
    deviation: float
    bias: float
    spread: float

    @property
    def passed(self) -> bool:
        """Whether the ranks could be uniform."""
        return self.verdict == CALIBRATED


def verdicts(ranks: Mapping[str, Counts], num_draws: int, level: float) -> dict[str, RankVerdict]:
    """Returns a verdict on the ranks of each site, and of each joint test, ``(data sets, *shape)``.

    P-values are adjusted by Bonferroni's method, for all tests of a site's elements and for all sites.

    Example:
        >>> wide, few = np.arange(1000) % 100, np.arange(1000) % 50  # ranks among 99 draws
        >>> {name: verdict.verdict for name, verdict in verdicts({"a": wide, "b": few}, 99, level=0.01).items()}
        {'a': 'calibrated', 'b': 'biased'}
    """
    found = {}
    for name, values in ranks.items():
        verdict = judge(name, values, num_draws)
        p_value = min(1.0, len(ranks) * verdict.p_value)
        kind = CALIBRATED if p_value >= level else verdict.verdict
        found[name] = verdict._replace(p_value=p_value, verdict=kind)
    return found


def judge(name: str, ranks: Counts, num_draws: int, *, clear: float = 3.0) -> RankVerdict:
    """Returns the verdict on the ranks of a site by itself, not adjusted for other sites; never ``"calibrated"``.

    Args:
        name: of the site, or of the joint test.
        ranks: ``(data sets, *shape)``, among ``num_draws`` draws.
        num_draws: draws of the guide for each data set.
        clear: standard errors by which location or spread must be off to be named as what is wrong.
    """
    num = len(ranks)
    counts = count_ranks(ranks.reshape(num, -1), num_draws)
    whole, *_ = tests = ecdf_tests(name, num, num_draws)
    statistics = [test.statistic(counts) for test in tests]
    p_value, i = min((test.p_value(float(statistics[i].min())), i) for i, test in enumerate(tests))
    element = int(statistics[i].argmin())
    location, spread = _location_and_spread(counts[element])
    far, wide = location * num**0.5, (spread - 1) * (2 * num) ** 0.5  # in standard errors
    if name == JOINT_DENSITY:  # the truth lies further out than draws, or less far
        errors = {OVERCONFIDENT: far, CONSERVATIVE: -far}
    elif name == JOINT_TARP:
        # Distances that are only larger or only smaller, on average, have no name.
        errors = {OVERCONFIDENT: wide * (far > -clear), CONSERVATIVE: -wide * (far < clear)}
    else:
        errors = {BIASED: abs(far), OVERCONFIDENT: wide, CONSERVATIVE: -wide}
    kind, most = max(errors.items(), key=lambda item: item[1])
    return RankVerdict(
        verdict=kind if most > clear else MISCALIBRATED,
        p_value=min(1.0, len(tests) * len(counts) * p_value),
        elements=len(counts),
        worst=tuple(map(int, np.unravel_index(element, ranks.shape[1:]))),
        deviation=float(np.abs(whole.sums(counts[[element]]) / num - whole.levels).max()),
        bias=location if BIASED in errors else float("nan"),
        spread=spread if BIASED in errors else float("nan"),
    )


class EcdfTest:
    r"""Exact test of counts of independent draws over ordered cells of known probabilities.

    The count up to cell k is :math:`X_k \sim \mathrm{Binomial}(N, z_k)`. The statistic is the smallest of their tail
    probabilities, :math:`T = 2 \min_k \min(P(X_k \le x_k), P(X_k \ge x_k))`; {T > gamma} is a simultaneous envelope
    around the empirical distribution function. Given their sum, counts in cells are independent Poisson variables, so
    one pass of convolutions over the cells, cut to the envelope, gives its probability, however small.

    Args:
        num: number of draws N.
        probabilities: of the cells, ``(cells,)``.
        central: whether the cells are those of `central_counts`; the methods take counts of ranks, as for other tests.

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

    def __init__(self, num: int, probabilities: ArrayLike, *, central: bool = False) -> None:
        self.num, self.central = num, central
        self.probabilities = np.asarray(probabilities, dtype=float)

    @cached_property
    def levels(self) -> Array:
        """Probabilities z_k up to each cell but the last, ``(cells - 1,)``."""
        return np.cumsum(self.probabilities)[:-1]

    @cached_property
    def _tails(self) -> tuple[Array, Array]:
        """P(X_k <= x) and P(X_k >= x), each ``(cells - 1, num + 1)``."""
        table, x = _log_factorials(self.num), np.arange(self.num + 1)
        z = self.levels[:, None]
        log_pmf = table[-1] - table - table[::-1] + x * np.log(z) + x[::-1] * np.log1p(-z)
        pmf = np.exp(log_pmf)
        return pmf.cumsum(1), pmf[:, ::-1].cumsum(1)[:, ::-1]

    def sums(self, counts: Counts) -> Counts:
        """Returns the counts up to each cell but the last, ``(elements, cells)`` to ``(elements, cells - 1)``."""
        return (central_counts(counts) if self.central else counts).cumsum(1)[:, :-1]

    def statistic(self, counts: Counts) -> Array:
        """Returns T of every row of counts, ``(elements, cells)`` to ``(elements,)``."""
        below, above = self._tails
        sums = self.sums(counts)
        cells = np.arange(sums.shape[1])
        return np.minimum(1.0, 2 * np.minimum(below[cells, sums], above[cells, sums]).min(1))

    def p_value(self, statistic: float) -> float:
        """Returns P(T <= statistic) where the cells have their probabilities."""
        if statistic >= 1:
            return 1.0
        # In one cell alone T is this small with at least half of this probability, which rounding cannot hide.
        return min(1.0, max(1.0 - self._inside(statistic), statistic / 2))

    def band(self, level: float) -> tuple[Counts, Counts]:
        """Returns the envelope: the smallest and largest counts up to each cell, each ``(cells - 1,)``.

        Counts leave it with a probability of at most ``level``, over all cells together.
        """
        return _above(_threshold(self, level), *self._tails)

    def _inside(self, threshold: float) -> float:
        """P(T > threshold)."""
        low, high = _above(threshold, *self._tails)
        if (low > high).any():
            return 0.0
        state, start = np.ones(1), 0
        rates = self.num * self.probabilities
        for rate, least, most in zip(rates, [*low, self.num], [*high, self.num]):
            state = np.convolve(state, _poisson_pmf(rate, most - start))
            state = state[least - start : most - start + 1]
            start = least
        return float(state[0] / _poisson_pmf(self.num, self.num)[-1])


@lru_cache
def _threshold(test: EcdfTest, level: float) -> float:
    """Returns the largest statistic with a p-value of at most ``level``, within a thousandth."""
    low, high = np.log(level / (2 * len(test.levels) + 2)), np.log(2 * level)
    while high - low > 1e-3:
        middle = (low + high) / 2
        if test.p_value(np.exp(middle)) <= level:
            low = middle
        else:
            high = middle
    return float(np.exp(low))


@lru_cache
def ecdf_test(num: int, num_draws: int, central: bool = False) -> EcdfTest:
    """Returns the test that ``num`` ranks among ``num_draws`` draws are uniform; ``central``: as central as uniform."""
    uniform = np.full(num_draws + 1, 1 / (num_draws + 1))
    return EcdfTest(num, central_counts(uniform) if central else uniform, central=central)


def ecdf_tests(name: str, num: int, num_draws: int) -> list[EcdfTest]:
    """Returns the tests of a site's ranks, or of a joint test's; the last says whether regions cover as they should."""
    # both ranks of one draw are as central
    whole_only = name in (JOINT_DENSITY, JOINT_TARP) or num_draws == 1
    kinds = (False,) if whole_only else (False, True)
    return [ecdf_test(num, num_draws, central) for central in kinds]


def count_ranks(ranks: Counts, num_draws: int) -> Counts:
    """Returns how often each rank occurs, ``(data sets, elements)`` to ``(elements, num_draws + 1)``."""
    elements, cells = ranks.shape[1], num_draws + 1
    places = ranks + cells * np.arange(elements)
    return np.bincount(places.reshape(-1), minlength=elements * cells).reshape(elements, cells)


def central_counts(counts: NDArray) -> NDArray:
    """Returns counts by distance from the middle rank, nearest first: ``(*, ranks)`` to ``(*, (ranks + 1) // 2)``.

    Up to a cell, they count the true values inside a central interval.
    """
    ranks = counts.shape[-1]
    central = (counts + counts[..., ::-1])[..., (ranks - 1) // 2 :: -1]
    if ranks % 2:
        central[..., 0] = counts[..., ranks // 2]
    return central


def _location_and_spread(counts: Counts) -> tuple[float, float]:
    """Returns the mean and sd of ranks as normal scores; of uniform ranks, 0 and 1."""
    ranks = len(counts)
    scores = np.array([NormalDist().inv_cdf((rank + 0.5) / ranks) for rank in range(ranks)])
    scores /= max(np.sqrt((scores**2).mean()), 1e-12)
    weights = counts / counts.sum()
    mean = float(weights @ scores)
    return mean, float(np.sqrt(weights @ (scores - mean) ** 2))


def _log_factorials(num: int) -> Array:
    return np.concatenate([[0.0], np.log(np.arange(1, num + 1)).cumsum()])


def _above(threshold: float, below: Array, above: Array) -> tuple[Counts, Counts]:
    """Returns the smallest and largest counts with both tails above half a threshold."""
    limit = threshold / 2 * (1 + 1e-12)
    return (below <= limit).sum(1), (above > limit).sum(1) - 1


def _poisson_pmf(rate: float, most: int) -> Array:
    """Returns the probabilities of the counts 0 to ``most``."""
    return np.exp(np.arange(most + 1) * np.log(rate) - rate - _log_factorials(most))
