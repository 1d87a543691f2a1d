"""The marginal posterior of a few latents that are sampled first, on a grid, with all other latents integrated out.

If the conditionals of the other latents z are exact, the marginal density of the first latents v is
log p(v, data) = log p(v, z, data) - log q(z | v, data), at any z. The grid starts from the spread
of the prior, and moves and stretches to where the density is near its largest value.

References:
    Rue, Martino and Chopin 2009, Approximate Bayesian inference for latent Gaussian models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import trimmed
from pyro_nami.deriving.grid_peaks import Peaks, climbed
from pyro_nami.deriving.grids import HALF, Mass, slope_of
from pyro_nami.factors.distribution import SiteDistribution
from pyro_nami.factors.knots import bent_normal
from pyro_nami.program.isolation import forked_rng

__all__ = ["MOST_MARGINAL", "Marginal", "points_of"]

MOST_MARGINAL = 2  # members
_POINTS = (33, 31)  # a side, of one member and of two
_DEPTH = 8.0  # nats below the greatest log density, to which the grid reaches
_FLOOR = 100.0  # nats below it, from where it is taken for constant
_MOST_GRIDS, _MOST_WIDENED = 40, 2
# half sides: how far a grid is moved where the log density goes on rising, so that steps grow
_FURTHER = 4.0
_COVERED = 0.5  # of a side, at least, that is less than ``_DEPTH`` deep


def points_of(group: ConjugateGroup) -> int:
    """Returns the number of points of a grid."""
    return int(_POINTS[len(group.members) - 1] ** len(group.members))


class GridBox(NamedTuple):
    """Where the points of a grid lie, in unconstrained space: ``(*batch)`` each, for each member.

    The second one's middle moves by ``slide`` with the first, from the first one's middle.
    """

    middle: Sequence[Tensor]
    half: Sequence[Tensor]
    slide: Tensor

    def places(self, grids: Sequence[Tensor]) -> list[Tensor]:
        """Returns the members' values at places between -1 and 1 that broadcast with the batch."""
        first, *second = (
            middle + half * grid for middle, half, grid in zip(self.middle, self.half, grids)
        )
        return [first, *(place + self.slide * (first - self.middle[0]) for place in second)]

    def where(self, kept: Tensor, other: GridBox) -> GridBox:
        """Returns another box but where this one is kept, ``(*batch)``."""
        middle, half = (
            [torch.where(kept, *pair) for pair in zip(now, new)]
            for now, new in zip(self[:2], other[:2])
        )
        return GridBox(middle, half, torch.where(kept, self.slide, other.slide))

    def grids(self, places: Tensor) -> Tensor:
        """Returns where values ``(members, points, *batch)`` lie: between -1 and 1 in the box."""
        off = [place - middle for place, middle in zip(places, self.middle)]
        off[1:] = [each - self.slide * off[0] for each in off[1:]]
        return torch.stack([each / half for each, half in zip(off, self.half)])


class Marginal:
    """The conditionals of one or two latents with one element and no plates, and all other latents integrated out.

    Args:
        group: the members.
        layouts: member -> how its value is laid out in unconstrained space.
        like: a tensor of the members' type, on their device.
        middle, half: of a first box.
        near: what was found at other data, whose box is the first one then, of one data set.
        log_density: from values of the members, ``(points, *batch, *event)`` each, to the log density in nats of these
            and the data, ``(points, *batch)``.

    Attributes:
        finite: member -> whether there is a finite log density, and a box that it fits, ``(*batch)``.

    Raises:
        ValueError: where the log density does not fall to all sides, for one data set or all of them.
    """

    def __init__(
        self,
        group: ConjugateGroup,
        layouts: Mapping[str, Any],
        like: Tensor,
        middle: Sequence[Tensor],
        half: Sequence[Tensor],
        log_density: Callable[[Mapping[str, Tensor]], Tensor],
        near: Marginal | None = None,
    ) -> None:
        self.group = group
        self._layouts = layouts
        self._like = like
        self._log_density = log_density
        count = len(group.members)
        self._size, self._ndims = _POINTS[count - 1], middle[0].dim()
        grid = torch.linspace(-1, 1, self._size, dtype=torch.float64, device=middle[0].device)
        self._grids = [
            grid.reshape((-1,) + (1,) * (count - 1 - i + self._ndims)) for i in range(count)
        ]
        first = GridBox(
            [each.double() for each in middle],
            [each.double() for each in half],
            middle[0].double() * 0,
        )
        self.box, self._fits = first, torch.ones_like(first.slide, dtype=torch.bool)
        self._peaks = Peaks()
        again = (
            near is not None
            and near.box.middle[0].shape == middle[0].shape
            and middle[0].numel() == 1
        )
        if near is not None and again:
            # what is drawn on the near box's grid is then the same at the same data
            with forked_rng():
                self._tabulated()
            self.box = near.box
        flaw = self._search()
        if flaw and again:
            self.box, self._peaks = first, Peaks()
            flaw = self._search()
        if flaw:
            self._give_up(first, flaw)
        line = self._table if count == 1 else self._table.logsumexp(1)
        self._knots = self._quantiles(line)

    def _search(self) -> str:
        """Moves the box to where the log density is great, and makes the table; returns what speaks against that."""
        widened = 0
        for _ in range(_MOST_GRIDS):
            self._table = self._tabulated()
            following = self._moved()
            if following is None:
                following, widened = self._widened(), widened + 1
                if following is None:
                    return ""
            if widened > _MOST_WIDENED:
                return "has modes that are too narrow for one grid"
            self.box = following
        self._table = self._tabulated()
        self._moved()
        return "does not fall to all sides, or has modes far apart"

    def _tabulated(self) -> Tensor:
        """Returns the log density at all points, ``(points, *batch)`` or ``(points, points, *batch)``, in doubles."""
        places = torch.broadcast_tensors(*self.box.places(self._grids))
        sides = len(self.group.members)
        table = self._log_prob(torch.stack(places).flatten(1, sides))
        table = table.reshape(places[0].shape).nan_to_num(-torch.inf, -torch.inf, -torch.inf)
        steps = torch.stack(torch.broadcast_tensors(*self.box.half)) * 2 / (self._size - 1)
        self._peaks.note(table, torch.stack(places), steps.reshape((sides, *table.shape[sides:])))
        top = table.amax(tuple(range(sides)), keepdim=True)
        self.finite = dict.fromkeys(self.group.members, top.isfinite().reshape(top.shape[sides:]))
        return torch.where(top.isfinite(), table.clamp(min=top - _FLOOR), self._nothing())

    def _nothing(self) -> Tensor:
        """Returns the table where a density is no number, or fits no box: the first box stands for the prior."""
        return -2 * _DEPTH * torch.stack(torch.broadcast_tensors(*self._grids)).square().sum(0)

    def _give_up(self, first: GridBox, flaw: str) -> None:
        """Takes what fits a box, of several data sets."""
        fits = self._fits
        if fits.numel() == 1 or not bool(fits.any()):
            raise ValueError(
                f"the log density of {', '.join(map(repr, self.group.members))} {flaw}"
            )
        self.box = self.box.where(fits, first)
        self._table = torch.where(fits, self._table, self._nothing())
        self.finite = {name: each & fits for name, each in self.finite.items()}

    def _log_prob(self, places: Tensor) -> Tensor:
        """Returns the log density in nats at places in unconstrained space ``(members, points, *batch)``."""
        layouts = [self._layouts[name] for name in self.group.members]
        elements = places.unsqueeze(-1)
        at = [layout.value(each.to(self._like)) for layout, each in zip(layouts, elements)]
        total = self._log_density(dict(zip(self.group.members, at)))
        for layout, each, value in zip(layouts, elements, at):
            log_abs_det = layout.log_abs_det(each, value.double())
            total = total if log_abs_det is None else total + log_abs_det
        return total

    def _moved(self) -> GridBox | None:
        """Returns the next box, None if this one fits."""
        box = self.box
        table = self._table
        axes = tuple(range(len(self.group.members)))
        kept = table > table.amax(axes, keepdim=True) - _DEPTH
        slide, fits = self._slide() if len(axes) == 2 else (box.slide, torch.ones_like(self._fits))
        middle = []
        half = []
        shift = torch.zeros_like(slide)
        step = 2 / (self._size - 1)
        for axis, grid in enumerate(self._grids):
            # What of the second one's place the first does not tell, at points that are kept.
            off = box.half[axis] * grid + (
                axis * (box.slide - slide) * box.half[0] * self._grids[0]
            )
            line = kept.any(1 - axis) if len(axes) == 2 else kept
            fits = fits & ~line[0] & ~line[-1] & (line.sum(0) >= _COVERED * self._size)
            below, above = (
                torch.where(edge, _FURTHER, step) * box.half[axis] for edge in (line[0], line[-1])
            )
            low = torch.where(kept, off, torch.inf).amin(axes) - below
            high = torch.where(kept, off, -torch.inf).amax(axes) + above
            middle.append(box.middle[axis] + slide * shift + (low + high) / 2)
            half.append((high - low) / 2)
            shift = (low + high) / 2
        self._fits = fits
        return None if bool(fits.all()) else self.box.where(fits, GridBox(middle, half, slide))

    def _widened(self) -> GridBox | None:
        """Returns a box that has room for modes outside of this one, None if there are none."""
        places, reach = self._peaks.places, self._peaks.reach
        near = reach.clone()
        near[1:] += self.box.slide.abs() * reach[0]
        near = torch.stack([each / half for each, half in zip(near, self.box.half)])
        apart = ((self.box.grids(places).abs() - near) > 1).any(0) & self._peaks.values.isfinite()
        some = apart.flatten(1).any(1) if apart.dim() > 1 else apart
        if not bool(some.any()):
            return None
        places, values = climbed(self._log_prob, places[:, some], reach[:, some])
        grids, sides = self.box.grids(places), len(places)
        apart = (
            apart[some]
            & (grids.abs() > 1).any(0)
            & (values > self._table.amax(tuple(range(sides))) - _DEPTH)
        )
        if not bool(apart.any()):
            return None
        self._fits = ~apart.any(0)
        low = torch.where(apart, grids, -1.0).amin(1).clamp(max=-1.0)
        high = torch.where(apart, grids, 1.0).amax(1).clamp(min=1.0)
        room = (high - low) / 8
        shift = [half * (above + below) / 2 for half, above, below in zip(self.box.half, high, low)]
        middle = [each + moved for each, moved in zip(self.box.middle, shift)]
        middle[1:] = [each + self.box.slide * shift[0] for each in middle[1:]]
        half = [
            each * (width / 2 + more) for each, width, more in zip(self.box.half, high - low, room)
        ]
        return self.box.where(self._fits, GridBox(middle, half, self.box.slide))

    def _slide(self) -> tuple[Tensor, Tensor]:
        """Returns by how much the second moves with the first, and whether no grid that does so is much narrower."""
        weights = self._table.flatten(0, 1).softmax(0).reshape(self._table.shape)
        first, second = self.box.places(self._grids)
        mean = [(weights * place).sum((0, 1)) for place in (first, second)]
        off = first - mean[0]
        variance = (weights * off.square()).sum((0, 1))
        step = 2 * self.box.half[0] / (self._size - 1)
        told = variance > 0.5 * step.square()
        slide = (weights * off * (second - mean[1])).sum((0, 1)) / variance.clamp(
            min=torch.finfo(off.dtype).tiny
        )
        slide = torch.where(told, slide, self.box.slide)
        narrower = (slide - self.box.slide).abs() * self.box.half[0] > 0.25 * self.box.half[1]
        return slide, ~narrower

    def _quantiles(self, line: Tensor) -> tuple[Tensor, Tensor]:
        """Returns standard Normal quantiles at the points of a line, and slopes by these, ``(*batch, points)``."""
        return Mass(slope_of(line).movedim(0, -1), line.movedim(0, -1)).quantiles()

    def conditional(
        self, name: str, values: Mapping[str, Tensor], dims: int | None = None
    ) -> SiteDistribution:
        """Returns a member's conditional, as `Expansion.conditional` does."""
        if name == self.group.members[0]:
            (at, slopes), middle, half = self._knots, self.box.middle[0], self.box.half[0]
        else:
            first = (
                self._layouts[self.group.members[0]]
                .elements(values[self.group.members[0]])
                .squeeze(-1)
            )
            off = first.detach().double() - self.box.middle[0]
            at, slopes = self._quantiles(self._row(off / self.box.half[0]))
            middle, half = self.box.middle[1] + self.box.slide * off, self.box.half[1]
        grid = torch.linspace(-1, 1, self._size, dtype=at.dtype, device=at.device)
        places = middle.unsqueeze(-1) + half.unsqueeze(-1) * grid
        batch = trimmed(at.shape[:-1], dims)
        knots = (at, places, slopes * half.unsqueeze(-1) / HALF)
        x, y, rise = (
            each.expand(at.shape).reshape(batch + (1,) + at.shape[-1:]).to(self._like)
            for each in knots
        )
        return SiteDistribution(bent_normal(x, y, rise), self._layouts[name])

    def _row(self, place: Tensor) -> Tensor:
        """Returns the log density along the second side, at places of the first between -1 and 1, by cubics."""
        at = (place.clamp(-1, 1) + 1) / 2 * (self._size - 1)
        start = at.floor().clamp(1, self._size - 3)
        t = at - start
        weights = (
            -t * (t - 1) * (t - 2) / 6,
            (t + 1) * (t - 1) * (t - 2) / 2,
            -(t + 1) * t * (t - 2) / 2,
            (t + 1) * t * (t - 1) / 6,
        )
        more = (1,) * (at.dim() - self._ndims)
        shape = torch.broadcast_shapes(at.shape, self._table.shape[2:])
        table = self._table.reshape(self._table.shape[:2] + more + self._table.shape[2:]).expand(
            (-1, -1) + shape
        )
        index = start.long().expand(shape)[None, None].expand((1, self._size) + shape)
        rows = [w * table.gather(0, index + k).squeeze(0) for k, w in enumerate(weights, -1)]
        return torch.stack(rows).sum(0)
