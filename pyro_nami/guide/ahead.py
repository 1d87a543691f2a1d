"""Draws made in advance: sequential calls, as `Predictive` makes them, share one pass for many draws."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["DrawsAhead"]

# calls in a row that `Predictive` makes before those that it is asked for, for shapes
CALLS_FOR_SHAPES = 2
# draws in one pass; 128 take about twice the time of 64 in models of 1,000 rows
MOST_DRAWS = 64

Make = Callable[[int, int], Mapping[str, Tensor]]  # number of draws, seed -> draws of every latent


class _Stock:
    """Draws that are handed out once each; passes make 1, 2, 4, ... of them."""

    def __init__(self) -> None:
        self._draws: Mapping[str, Tensor] = {}
        self._count, self._place = 0, 0  # of draws, and the next one

    def next(self, make: Make, seed: Callable[[], int]) -> dict[str, Tensor]:
        """Returns the next draw of every latent; where none is left ``make`` makes more."""
        if self._place == self._count:
            self._count, self._place = min(2 * self._count or 1, MOST_DRAWS), 0
            self._draws = make(self._count, seed())
        self._place += 1
        return {name: value[self._place - 1] for name, value in self._draws.items()}


class DrawsAhead:
    """Draws of one posterior for calls between which nobody draws random numbers.

    Draws are a function of the seed: a call starts a new row of draws if the random number generator has moved since.
    `Predictive` makes two calls for shapes first. These two get draws of a stock of their own, which stays
    from row to row.

    Example:
        >>> def make(count, seed):
        ...     return {"z": torch.randn(count, generator=torch.Generator().manual_seed(seed))}
        >>> ahead = DrawsAhead()
        >>> def several(seed):
        ...     _ = torch.manual_seed(seed)
        ...     return torch.stack([ahead.next("a posterior", make)["z"] for _ in range(8)])[2:]
        >>> torch.equal(several(0), several(0)), torch.equal(several(0), several(1))
        (True, False)
    """

    def __init__(self) -> None:
        self._spare, self._row = _Stock(), _Stock()
        self._seeds = itertools.count()  # of the spare ones
        self._calls = 0  # in a row
        self._key: Any = None
        self._left: Tensor | None = None  # state of the generator when the last call left it

    def __reduce__(self) -> Any:  # a copy has draws of its own
        return DrawsAhead, ()

    def next(self, key: Any, make: Make) -> dict[str, Tensor]:
        """Returns the next draw of every latent of a posterior, of which ``key`` tells.

        ``make(count, seed)`` makes draws, ``(count, *site shape)`` each, and leaves the generator as it was.
        """
        if key != self._key:
            self._spare = _Stock()
            self._seeds = itertools.count()
            self._key = key
            self._left = None
        if self._left is None or not torch.equal(torch.get_rng_state(), self._left):
            self._calls, self._row = 0, _Stock()
        self._calls += 1
        is_spare = self._calls <= CALLS_FOR_SHAPES
        seed = int(torch.randint(2**31, ()))  # in every call, so that no two leave the same state
        found = (
            self._spare.next(make, self._seeds.__next__)
            if is_spare
            else self._row.next(make, lambda: seed)
        )
        self._left = torch.get_rng_state()
        return found
