"""Draws made ahead: calls that follow each other at once, as `Predictive` makes them, share the work of one pass.

Change this module to make draws for more calls at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["DrawsAhead"]

_FIRST = 2  # calls in a row after which draws are made ahead: `Predictive` makes two before those that it is asked for
_LEAST, _MOST = 4, 64  # draws in one pass; 128 take about twice the time of 64 in models of 1,000 rows


class DrawsAhead:
    """Draws of one posterior for calls between which nobody draws random numbers.

    Passes make 4, 8, 16, ... draws, so not many more are made than are asked for. A call that finds the random number
    generator in another state than the last one left it begins anew, so draws are a function of the seed.

    Example:
        >>> ahead = DrawsAhead()
        >>> def make(count):
        ...     return {"z": torch.randn(count)}
        >>> def several(seed):
        ...     _ = torch.manual_seed(seed)
        ...     found = []
        ...     for _ in range(8):
        ...         is_due = ahead.is_due("a posterior")
        ...         found.append(ahead.next(make)["z"] if is_due else torch.randn(()))
        ...         ahead.leave()
        ...     return torch.stack(found)
        >>> torch.equal(several(0), several(0)), torch.equal(several(0), several(1))
        (True, False)
    """

    def __init__(self) -> None:
        self._draws: Mapping[str, Tensor] = {}
        self._count, self._place = 0, 0  # of draws, and the next one
        self._calls = 0  # in a row
        self._key: Any = None
        self._left: Tensor | None = None  # state of the generator when the last call left it

    def __getstate__(self) -> dict[str, Any]:
        return DrawsAhead().__dict__

    def is_due(self, key: Any) -> bool:
        """Whether enough calls came in a row, with this one, for the same posterior, of which ``key`` tells."""
        if self._left is None or key != self._key or not torch.equal(torch.get_rng_state(), self._left):
            self._calls = self._count = self._place = 0
        self._calls, self._key = self._calls + 1, key
        return self._calls > _FIRST

    def next(self, make: Callable[[int], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the next draw of every latent; ``make(count)`` makes more, ``(count, *site shape)`` each."""
        if self._place == self._count:
            self._count, self._place = min(2 * self._count or _LEAST, _MOST), 0
            self._draws = make(self._count)
        torch.rand(())  # so that no two calls leave the same state
        self._place += 1
        return {name: value[self._place - 1] for name, value in self._draws.items()}

    def leave(self) -> None:
        """Takes note of the generator's state at the end of a call."""
        self._left = torch.get_rng_state()
