"""Modes of a log density that is known on grids: local maxima, and where hill climbing leads from them.

A grid that moved to the highest mode may miss others, which only an earlier, coarser grid has
shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Peaks", "climbed"]

_MOST, _ROUNDS, _ACROSS = 8, 16, 5  # peaks of a grid, steps of a climb, points a side of each


class Peaks:
    """The greatest local maxima of tables on grids: where, how far their neighbours are, and how high.

    Attributes:
        places, reach: ``(sides, peaks, *batch)``.
        values: in nats, ``(peaks, *batch)``; -inf where there is no peak.

    Example:
        >>> peaks = Peaks()
        >>> peaks.note(torch.tensor([0.0, 2.0, 1.0, 3.0]), torch.arange(4.0)[None], torch.ones(1))
        >>> peaks.places[0, :2], peaks.values[:2]
        (tensor([3., 1.]), tensor([3., 2.]))
    """

    def __init__(self) -> None:
        self.places, self.reach, self.values = (torch.zeros(()) for _ in range(3))

    def note(self, table: Tensor, places: Tensor, steps: Tensor) -> None:
        """Takes in a table ``(points, ..., *batch)``, places ``(sides, points, ..., *batch)``, ``(sides, *batch)``."""
        sides, center = len(places), (1,) * len(places)
        padded = torch.nn.functional.pad(
            table, (0, 0) * (table.dim() - sides) + (1, 1) * sides, value=-torch.inf
        )
        peak = table.isfinite()
        for offset in itertools.product(range(3), repeat=sides):
            near = padded[
                tuple(slice(start, start + size) for start, size in zip(offset, table.shape))
            ]
            peak = peak & (table >= near if offset <= center else table > near)
        values = torch.where(peak, table, -torch.inf).flatten(0, sides - 1)
        values, index = values.topk(min(_MOST, len(values)), 0)
        places = places.flatten(1, sides).gather(1, index.expand((sides,) + index.shape))
        found = places, steps.unsqueeze(1).expand_as(places), values
        if self.values.dim():
            before = self.places, self.reach, self.values
            found = tuple(torch.cat(pair, -values.dim()) for pair in zip(before, found))  # type: ignore[assignment]
        self.places, self.reach, self.values = found


def climbed(
    log_density: Callable[[Tensor], Tensor], places: Tensor, reach: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns where steps upwards from places ``(sides, peaks, *batch)`` lead, and the log density there in nats.

    Args:
        log_density: from ``(sides, points, *batch)`` to ``(points, *batch)``.
        places: to start from.
        reach: how far first steps go, as ``places``.
    """
    sides = len(places)
    line = torch.linspace(-1, 1, _ACROSS, dtype=places.dtype, device=places.device)
    offsets = torch.cartesian_prod(*[line] * sides).reshape((-1, sides)).T
    offsets = offsets.reshape(offsets.shape + (1,) * (places.dim() - 1))
    values = places[0]
    for _ in range(_ROUNDS):
        tried = places.unsqueeze(1) + offsets * reach.unsqueeze(1)
        table = (
            log_density(tried.flatten(1, 2))
            .reshape(tried.shape[1:])
            .nan_to_num(-torch.inf, -torch.inf, -torch.inf)
        )
        values, best = table.max(0, keepdim=True)
        index = best.expand((sides, *best.shape))
        places, values = tried.gather(1, index).squeeze(1), values.squeeze(0)
        far = offsets.expand(tried.shape).gather(1, index).squeeze(1).abs().amax(0) == 1
        reach = torch.where(far, reach, reach / 2)
    return places, values
