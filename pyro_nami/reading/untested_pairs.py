"""Which sites to change together, so that few runs of a model test every possible edge.

If the known parents of a site are held, one run tests the site against all changed sites at once;
such a run serves every site whose parents were held. 25 runs test a chain of 400 sites.
"""

from __future__ import annotations

import random

import numpy as np

__all__ = ["Untested"]


class Untested:
    """The pairs (site, other site) that no run has tested yet.

    Args:
        held: (sites, others), whether the other must be as it was for a run to test the site.
        worth: (sites, others), what it is worth to test the site for the other; 0 where that needs no test.

    Example:
        >>> held = np.array([[1, 1, 1], [1, 1, 1], [0, 1, 1]], dtype=bool)  # site 2 reads site 1; does it read site 0?
        >>> untested = Untested(held, np.ones((3, 3), dtype=int))
        >>> untested.plan().tolist(), untested.test(untested.plan()), untested.sites.tolist()
        ([True, False, False], [2], [False, False, False])
    """

    def __init__(self, held: np.ndarray, worth: np.ndarray) -> None:
        self.held, self.worth = held, np.where(held, 0, worth)

    @property
    def sites(self) -> np.ndarray:
        """Whether each site is still to be tested, for any other."""
        return np.any(self.worth, axis=1)

    def plan(self) -> np.ndarray:
        """Which sites to change in the next run: a choice that is worth more with each site that it takes in.

        Every site that it tests takes away from what can be changed, so sites are taken in, the most worthy first,
        as long as they bring more than they cost those that were taken in before.
        """
        changed = np.ones(self.held.shape[1], dtype=bool)
        total = np.zeros(self.held.shape[1], dtype=self.worth.dtype)
        sites = np.flatnonzero(self.sites).tolist()
        random.shuffle(sites)
        for site in sorted(sites, key=self.worth.max(1).__getitem__, reverse=True):
            rest = changed & ~self.held[site]
            if self.worth[site] @ rest > total[changed & ~rest].sum():
                changed, total = rest, total + self.worth[site]
        return changed

    def test(self, changed: np.ndarray) -> list[int]:
        """The sites that a run with these sites changed tests; from now on the pairs count as tested."""
        tested = self.sites & ~(self.held & changed).any(1)
        self.worth[np.ix_(tested, changed)] = 0
        return np.flatnonzero(tested).tolist()

    def hold(self, site: int, held: list[bool]) -> None:
        """From now on runs that test the site have to hold others."""
        self.held[site] = held
        self.worth[site] *= ~self.held[site]
