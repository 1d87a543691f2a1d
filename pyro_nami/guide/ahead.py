"""Draws made in advance: sequential calls, as `Predictive` makes them, share one pass for many draws."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_nami.program.many_draws import FEWEST_DRAWS
from pyro_nami.program.runner import Values

__all__ = ["DrawsAhead"]

Make = Callable[[int, int], Values]  # number of draws, seed -> draws of every latent


class DrawsAhead:
    """Draws of one posterior for calls between which nobody draws random numbers, handed out once each.

    Draws are a function of the seed: a call starts a new row of draws if the random number generator has moved since.
    Passes make 3, 6, 12, ... of them, so that the first one serves the two calls for shapes that `Predictive` makes.

    Args:
        most: draws in one pass; 128 take about twice the time of 64 in models of 1,000 rows.

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

    def __init__(self, *, most: int = 64) -> None:
        self._most = most
        self._draws: Values = {}
        self._count, self._place = 0, 0  # of draws, and the next one
        self._key: Any = None
        self._left: Tensor | None = None  # state of the generator when the last call left it

    def __reduce__(self) -> Any:  # a copy has draws of its own
        return partial(DrawsAhead, most=self._most), ()

    def next(self, key: Any, make: Make) -> Values:
        """Returns the next draw of every latent of a posterior, of which ``key`` tells.

        ``make(count, seed)`` makes draws, ``(count, *site shape)`` each, and leaves the generator as it was.
        """
        left = None if key != self._key else self._left
        if left is None or not torch.equal(torch.get_rng_state(), left):
            self._key, self._count, self._place = key, 0, 0
        seed = int(torch.randint(2**31, ()))  # in every call, so that no two leave the same state
        if self._place == self._count:
            self._count, self._place = min(2 * self._count or FEWEST_DRAWS, self._most), 0
            self._draws = make(self._count, seed)
        self._place += 1
        self._left = torch.get_rng_state()
        return {name: value[self._place - 1] for name, value in self._draws.items()}
