"""The search for the box in which a log density is near its largest value, given the values alone.

The box starts where the prior is, and moves and stretches until the density falls to all sides. Then
it is widened if there are other modes, which coarser grids on the way have shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from pyro_nami.deriving.grids import FLOOR, SIZE

__all__ = ["Box", "search"]

STEP = 2 / (SIZE - 1)  # between points, in coordinates


class Box(NamedTuple):
    """A parallelogram in unconstrained space, the image of coordinates between -1 and 1.

    Attributes:
        center: the place of coordinates 0, ``(*batch, members)``.
        sides: lower triangular, ``(*batch, members, members)``; places are center + sides @ coordinates.

    Example:
        >>> box = Box.upright([torch.tensor(5.0)], [torch.tensor(2.0)])
        >>> box.places(torch.tensor([[-1.0], [1.0]])).squeeze()
        tensor([3., 7.])
    """

    center: Tensor
    sides: Tensor

    @classmethod
    def upright(cls, center: Sequence[Tensor], half: Sequence[Tensor]) -> Box:
        """Returns a rectangle from the center and half the length of each side, ``(*batch)`` for each member."""
        return cls(torch.stack(list(center), -1), torch.stack(list(half), -1).diag_embed())

    def places(self, coordinates: Tensor) -> Tensor:
        """Returns the places at coordinates ``(points, *batch, members)``."""
        return self.center + (self.sides @ coordinates.unsqueeze(-1)).squeeze(-1)

    def coordinates(self, places: Tensor) -> Tensor:
        """Returns the coordinates of places ``(points, *batch, members)``."""
        off = (places - self.center).unsqueeze(-1)
        return torch.linalg.solve_triangular(self.sides, off, upper=False).squeeze(-1)

    def where(self, kept: Tensor, other: Box) -> Box:
        """Returns this box where ``kept``, ``(*batch)``, and the other box elsewhere."""
        center = torch.where(kept[..., None], self.center, other.center)
        return Box(center, torch.where(kept[..., None, None], self.sides, other.sides))

    def spanning(self, low: Tensor, high: Tensor) -> Box:
        """Returns the box between two corners, given by coordinates in this box, ``(*batch, members)`` each."""
        center = self.places((low + high) / 2)
        return Box(center, self.sides * ((high - low) / 2).unsqueeze(-2))


class Peaks(NamedTuple):
    """Local maxima of a log density on grids.

    Attributes:
        cells: for each maximum the box around it that reaches to the next points of its grid; of batch shape
            ``(peaks, *batch)``.
        heights: the log density in nats, ``(peaks, *batch)``; -inf if there are fewer maxima.
    """

    cells: Box
    heights: Tensor

    @classmethod
    def of_table(cls, values: Tensor, box: Box, *, most: int = 8) -> Peaks:
        """Returns the highest local maxima of the log density ``(points, *batch)`` on the grid in a box."""
        images = values.reshape(SIZE, -1, values[0].numel()).movedim(-1, 0)
        is_peak = images == max_pool2d(images, 3, stride=1, padding=1)
        is_peak = is_peak.movedim(0, -1).reshape(values.shape)
        heights, index = values.where(is_peak, -torch.inf).topk(most, 0)
        center = box.places(_grid(SIZE, box).flatten(0, -2)[index])
        sides = (box.sides * STEP).expand(*center.shape, -1)
        return cls(Box(center, sides), heights)

    def climbed(self, log_prob: Callable[[Tensor], Tensor], *, steps: int = 20) -> Peaks:
        """Returns the maxima to which steps upwards lead; a step halves if none of the points around is higher."""
        box, heights = self
        grid = _grid(5, box)  # whole and half steps to both sides
        for _ in range(steps):
            places = box.places(grid)
            values = log_prob(places.flatten(0, 1)).reshape(places.shape[:-1])
            heights, index = values.max(0)
            best = grid.flatten(0, -2)[index]
            is_inner = (best.abs().amax(-1) < 1)[..., None, None]
            box = Box(box.places(best), torch.where(is_inner, box.sides / 2, box.sides))
        return Peaks(box, heights)


class Found(NamedTuple):
    """The result of a search for each data set.

    Attributes:
        box: the box in which the log density is near its largest value, of batch shape ``(*batch)``.
        table: the log density on the grid in the box, ``(points, *batch)``; of a Normal if the search failed.
        found: whether the log density is finite and the box holds all its modes, ``(*batch)``.
    """

    box: Box
    table: Tensor
    found: Tensor


def search(
    log_prob: Callable[[Tensor], Tensor],
    first: Box,
    what: str,
    *,
    depth: float = 8.0,
    growth: float = 4.0,
    most: int = 40,
) -> Found:
    """Returns the box in which a log density is near its largest value, and a table of the density there.

    Args:
        log_prob: function from places ``(points, *batch, members)`` to a log density in nats, ``(points, *batch)``,
            which is -inf in place of NaN.
        first: the box at which the search begins, and the result for data sets for which it fails.
        what: the name of the density, for the error.
        depth: how far below its maximum the density is tabulated, in nats; a share of about exp(-depth) is left out.
        growth: by how much a box grows where the density is high at its edge, in half the length of a side.
        most: tables of the density until the search gives up; in the second half boxes grow by single points.

    Raises:
        ValueError: if no data set has a box.
    """
    grid = _grid(SIZE, first)
    normal = -2 * depth * grid.square().sum(-1)
    box, peaks = first, list[Peaks]()
    for i in range(most):
        values = log_prob(box.places(grid))
        peaks.append(Peaks.of_table(values, box))
        top = values.amax(0)
        table = torch.where(top.isfinite(), values.clamp(min=top - FLOOR), normal)
        least = table.amax(0) - depth
        # Some boxes would grow and shrink for ever.
        longest = growth if i < most // 2 else STEP
        following, fits = _moved(box, grid, table, table > least, longest)
        if bool(fits.all()):
            following, fits = _widened(box, least, log_prob, peaks)
        if bool(fits.all()):
            return Found(box, table, top.isfinite())
        box = following
    if fits.numel() == 1 or not bool(fits.any()):
        raise ValueError(
            f"{what} does not fall to all sides, or has modes that are too far apart for one grid"
        )
    return Found(box.where(fits, first), table.where(fits, normal), fits & top.isfinite())


def _moved(
    box: Box, grid: Tensor, table: Tensor, kept: Tensor, growth: float
) -> tuple[Box, Tensor]:
    """Returns the box around the kept points, and for which data sets the present box does, ``(*batch)``.

    The present box does if half of the points of each side are kept.

    Sides with kept points at the edge of the present box grow by ``growth``, in half sides.
    """
    members = grid.shape[-1]
    fits = torch.ones_like(kept[0])
    coordinates = grid.expand(*kept.shape, members)
    if members == 2:
        slope = _slope(grid, table)
        fits = slope.abs() <= 0.5  # by which the box gets narrower
        sides = box.sides.clone()
        sides[..., 1, 0] += slope * sides[..., 1, 1]
        first, second = coordinates.unbind(-1)
        box, coordinates = Box(box.center, sides), torch.stack([first, second - slope * first], -1)
    low = coordinates.where(kept[..., None], torch.inf).amin(0)
    high = coordinates.where(kept[..., None], -torch.inf).amax(0)
    by_axis = kept.unflatten(0, (SIZE,) * members)
    lines = [by_axis.movedim(i, 0).reshape(SIZE, -1, *fits.shape).any(1) for i in range(members)]
    line = torch.stack(lines, -1)
    fits = fits & ~(line[0] | line[-1] | (line.sum(0) <= SIZE // 2)).any(-1)
    low = low - torch.where(line[0], growth, STEP)
    high = high + torch.where(line[-1], growth, STEP)
    return box.where(fits, box.spanning(low, high)), fits


def _slope(grid: Tensor, table: Tensor) -> Tensor:
    """Returns the regression coefficient of the second coordinate on the first, ``(*batch)``."""
    weights = table.softmax(0)
    first, second = grid.unbind(-1)
    off = first - (weights * first).sum(0)
    variance = (weights * off.square()).sum(0)
    slope = (weights * off * second).sum(0) / variance
    return slope.where(variance > 0.5 * STEP**2, 0.0)


def _widened(
    box: Box, least: Tensor, log_prob: Callable[[Tensor], Tensor], peaks: Sequence[Peaks]
) -> tuple[Box, Tensor]:
    """Returns the box widened to modes outside of it, and for which data sets there are none, ``(*batch)``.

    Modes count from a log density of ``least`` on, ``(*batch)``.
    """
    cells = Box(*(torch.cat(each) for each in zip(*(peak.cells for peak in peaks))))
    heights = torch.cat([peak.heights for peak in peaks])
    reach = torch.linalg.solve_triangular(box.sides, cells.sides, upper=False).abs().sum(-1)
    away = ((box.coordinates(cells.center).abs() - reach) > 1).any(-1) & heights.isfinite()
    some = away.reshape(len(away), -1).any(1)
    if not bool(some.any()):
        return box, torch.ones_like(away[0])
    found = Peaks(Box(*(each[some] for each in cells)), heights[some]).climbed(log_prob)
    coordinates = box.coordinates(found.cells.center)
    away = away[some] & (coordinates.abs() > 1).any(-1)
    away = away & (found.heights > least)
    coordinates = coordinates.where(away[..., None], 0.0)
    low, high = coordinates.amin(0).clamp(max=-1), coordinates.amax(0).clamp(min=1)
    room = (high - low) / 8
    fits = ~away.any(0)
    return box.where(fits, box.spanning(low - room, high + room)), fits


def _grid(size: int, box: Box) -> Tensor:
    """Returns the coordinates of an even grid, ``(points, *batch, members)`` with size 1 in the batch dims."""
    *batch, members = box.center.shape
    line = torch.linspace(-1, 1, size, dtype=box.center.dtype, device=box.center.device)
    return torch.cartesian_prod(*[line] * members).reshape(-1, *(1,) * len(batch), members)
