"""The conditional of one latent, or of two, from slopes of the log density on a grid about the mode.

The grid spans the Normals about the mode that Newton's method finds. A second latent, sampled later,
is integrated out on a grid of its own at each point of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_nami.deriving.expansion import ROUNDING, TOLERANCE, Expansion
from pyro_nami.deriving.grids import HALF, LineDensity, bent, grid_like, side_of, slope_of
from pyro_nami.program.flat_priors import flat_prior
from pyro_nami.program.masks import own_mask
from pyro_nami.program.runner import Sites, Values

__all__ = ["INACCURATE", "Tabulated"]

INACCURATE = "slopes of the log density do not add up to it"


class Tabulated(Expansion):
    """The conditional of the first member, with a second one integrated out; both have one element an instance.

    Args:
        group, leading, nesting, differentiable: as for `Expansion`.
        near: the solved `Newton` expansion, whose Normals say where the grid lies.
        finer: number by which the step of the grid is divided.

    Attributes:
        places: member -> its values at all points, ``(points, *batch, *plates)``.
    """

    def __init__(self, *args: Any, near: Any, finer: int = 1) -> None:
        super().__init__(*args)
        first, *second = self.group.members
        self._size = finer * (side_of(self.group) - 1) + 1
        fn = near.conditional(first, {})
        self._center, self._scale = (each.reshape(fn.batch_shape) for each in (fn.mean, fn.stddev))
        place = self._center + self._scale * grid_like(self._size, self._center)
        self.places = {first: place}
        for name in second:
            fn = near.conditional(name, {first: place.reshape(place.shape + (1,) * fn.event_dim)})
            center, self._inner = (each.reshape(fn.batch_shape) for each in (fn.mean, fn.stddev))
            self._slide = (center[-1:] - center[:1]) / (2 * HALF)  # by a deviation of the first
            grid = grid_like(self._size, center[0])
            inner = center.unsqueeze(1) + self._inner.unsqueeze(1) * grid
            outer = place.unsqueeze(1).expand(-1, self._size, *place.shape[1:])
            self.places = {first: outer.flatten(0, 1), name: inner.flatten(0, 1)}
        self.count = self._size ** len(self.places)

    @property
    def _middle(self) -> int:
        """The index of the middle point of a side."""
        return self._size // 2

    def start(self, name: str, prior: Any, shape: torch.Size) -> Tensor:
        place = self.places[name]
        return place.reshape(place.shape + (1,) * len(prior.event_shape)).expand(shape)

    def solve(self, sites: Sites) -> None:
        slopes = self.take(sites, again=self.differentiable, parts=self.until)
        with torch.set_grad_enabled(self.differentiable):
            slope, inner = self._lines(slopes)
            if inner is not None:
                density = LineDensity.of_slope(inner.movedim(1, 0))
                gained = density.log_total() - density.log_density[self._middle]
                slope = slope + slope_of(gained.sum_to_size((self._size, *slope.shape[1:])))
            self._quantiles = LineDensity.of_slope(slope).quantiles()
            # Instances whose slopes are not finite, or whose mass lies off the grid, keep the Normal about the mode.
            at, rise = self._quantiles
            rises = torch.cat([at.diff(dim=0), self._scale * rise]).to(self._center)
            good = ((rises > 0) & rises.isfinite()).all(0)
            self.finite = {self.first: good}
            mask = own_mask(sites[self.first])  # where a draw counts
            known = good if mask is None else good & mask
            if not bool(known.all()):
                slope = torch.where(known, slope, -grid_like(self._size, slope[0]))
                self._quantiles = LineDensity.of_slope(slope).quantiles()

    def _lines(self, slopes: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Returns slopes in nats per unit of the grid.

        The first result is along the first member's side, at the means of the second member, ``(points, *batch,
        *plates)``. The second is along the second member's side, ``(points, points, *batch, *plates)``, or None.
        """
        dims = 1 + len(self.leading)
        first, *second = (
            slopes[name].double().reshape(slopes[name].shape[:dims]) for name in self.group.members
        )
        if not second:
            return first * self._scale, None
        outer, inner = (each.unflatten(0, (self._size, -1)) for each in (first, *second))
        outer, middle = outer[:, self._middle], inner[:, self._middle]
        along = outer * self._scale + (middle * self._slide).sum_to_size(outer.shape)
        return along, inner * self._inner.unsqueeze(1)

    def conditional(self, name: str, values: Values, dims: int | None = None) -> Any:
        like, event_dim = self._center, len(self.priors[name].event_shape)
        flat, bounds = flat_prior(self.priors[name]), None
        if flat is not None and flat.is_bounded:
            bounds = flat.low.to(like), flat.high.to(like)
        fn = bent(self._quantiles, like, self._scale, like, event_dim, dims, bounds)
        return fn.to_event(event_dim)

    def flaw(self, sites: Sites, rounding: float) -> str:
        """Returns why the slopes are not to be trusted; "" if the log density itself agrees.

        Args:
            sites: the sites of the run at all points.
            rounding: bound on the rounding error of all log densities together, in nats.
        """
        parts = [self.density(sites, name).detach().double() for name in self.until]
        if any(part.dim() <= len(self.leading) for part in parts):
            return "a child has no dim of the points"
        totals: Any = sum(part.flatten(1).sum(-1) for part in parts)
        along, inner = self._lines(self.take(sites, parts=self.until))
        lines = [(totals, along)]
        if inner is not None:
            totals = totals.unflatten(0, (self._size, -1))
            lines = [(totals[:, self._middle], along), (totals[self._middle], inner[self._middle])]
        size: Any = sum(part.abs().flatten(1).sum(-1).mean() for part in parts)
        rounding += ROUNDING * torch.finfo(self._center.dtype).eps * float(size)
        for total, line in lines:
            log_density = LineDensity.of_slope(line.flatten(1)).log_density
            moved = log_density - log_density[self._middle]
            off = (total - total[self._middle] - moved.sum(-1)).abs()
            size = moved.abs().sum(-1)
            if not (off <= 10 * TOLERANCE * (1 + size) + rounding).all():
                return INACCURATE
        return ""
