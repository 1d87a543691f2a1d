"""The conditional of one latent, or of two, from slopes of the log density on a grid about the mode.

A standard Normal variable is mapped to the quantiles of the density, which are known at the grid's
points. The error falls with the fourth power of the grid's step. A second latent, sampled later, is
integrated out on a grid of its own at each point of the first.

Slopes are first taken at a few Chebyshev points. If the last coefficients of the interpolating
polynomials are not small, slopes are taken at all points of an even grid.

References:
    Trefethen 2013, Approximation theory and approximation practice: coefficients of a polynomial
    tell its error.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_nami.deriving.expansion import Expansion, agree, trimmed
from pyro_nami.deriving.grids import (
    HALF,
    Mass,
    coefficients,
    grid_like,
    on_grid,
    points_like,
    slope_of,
)
from pyro_nami.factors.knots import bent_normal
from pyro_nami.program.flat_priors import flat_prior
from pyro_nami.program.masks import own_mask

__all__ = ["MOST_TABULATED", "Tabulated"]

MOST_TABULATED = 2  # members
_POINTS = 33, 17  # of the grid of one member, and of each of two
# Chebyshev points, in the place of those; with 9 counts of 20 groups often need the grid
_NODES = 13, 11
# the largest of the last coefficients that a polynomial may have, of a slope by deviations
_TAIL = 1e-2
_STEEPEST = 1e9  # slope, for those that overflow
_ERROR = 1e-2  # of a log density, in nats and relative, that integration over the grid may have


class Tabulated(Expansion):
    """The conditional of the first member, with a second one integrated out; both have one element an instance.

    Args:
        group, leading, nesting, differentiable: as for `Expansion`.
        near: has `conditional`, of Normals that are near the conditionals, and `renewed`.
        finer: what part of the usual step the grid has; 0 for Chebyshev points, which `solve` may find to be too few.

    Attributes:
        places: member -> its values at all points, ``(points, *batch, *plates)``.
    """

    def __init__(self, *args: Any, near: Any, finer: int = 0) -> None:
        super().__init__(*args)
        self._again = functools.partial(Tabulated, *args, near=near, finer=1)
        first, *second = self.group.members
        self._size: int = max(1, finer) * (_POINTS[len(second)] - 1) + 1  # of the grid
        # points of a line at which slopes are taken
        self._taken = self._size if finer else _NODES[len(second)]
        line = functools.partial(grid_like if finer else points_like, self._taken)
        fn = near.conditional(first, {})
        ones = (1,) * fn.event_dim
        self._center, self._scale = (each.reshape(fn.batch_shape) for each in (fn.mean, fn.stddev))
        place = self._center + self._scale * line(self._center)
        self.places = {first: place}
        for name in second:
            fn = near.conditional(name, {first: place.reshape(place.shape + ones)})
            center, self._inner = (each.reshape(fn.batch_shape) for each in (fn.mean, fn.stddev))
            self._slide = (center[-1:] - center[:1]) / (2 * HALF)  # by a deviation of the first
            inner = center.unsqueeze(1) + self._inner.unsqueeze(1) * line(center[0])
            outer = place.unsqueeze(1).expand(-1, self._taken, *place.shape[1:])
            self.places = {first: outer.flatten(0, 1), name: inner.flatten(0, 1)}
        self.count = self._taken ** len(self.places)

    @property
    def _middle(self) -> int:
        """The number of the point in the middle of a line, where its grid is centered."""
        return self._taken // 2

    @property
    def _third(self) -> int:
        """The number of a point off the middle, at which a run by itself is compared with that at all points."""
        return int(self.count or 0) // 3

    def start(self, name: str, prior: Any, shape: torch.Size) -> Tensor:
        place = self.places[name]
        return place.reshape(place.shape + (1,) * len(prior.event_shape)).expand(shape)

    def solve(self, sites: Mapping[str, Any]) -> Tabulated | None:
        slopes = self.joint_slopes(sites, again=self.differentiable)
        with torch.set_grad_enabled(self.differentiable):
            slope, inner = self._lines(slopes)
            few = self._taken < self._size
            if few and not (_is_told(slope, 0) and (inner is None or _is_told(inner, 1))):
                return self._again()
            slope = on_grid(slope, self._size) if few else slope
            if inner is not None:
                inner = inner.movedim(1, 0)
                mass = Mass((on_grid(inner, self._size) if few else inner).movedim(0, -1))
                gained = (mass.log_total() - mass.log_density[..., self._size // 2]).sum_to_size(
                    (self._taken, *slope.shape[1:])
                )
                slope = slope + slope_of(on_grid(gained, self._size) if few else gained)
            # A slope that is no number says nothing of its instance, nor does a grid that has left out where the mass
            # is, as for the Normals that are near.
            knots = Mass(slope.movedim(0, -1)).quantiles()
            rises = torch.cat([knots[0].diff(dim=-1), self._scale.unsqueeze(-1) * knots[1]], -1).to(
                self._center
            )
            good = ((rises > 0) & rises.isfinite()).all(-1)
            self.finite = {self.group.members[0]: good}
            mask = own_mask(sites[self.group.members[0]])  # where a draw counts
            known = good if mask is None else good & mask
            if not bool(known.all()):
                knots = Mass(
                    torch.where(known, slope, -grid_like(self._size, slope[0])).movedim(0, -1)
                ).quantiles()
            self._knots = knots
        return None

    def _lines(self, slopes: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Returns slopes by deviations: along the first grid, at the means of the second member, and along the second.

        Shapes are ``(points, *batch, *plates)`` and ``(points, points, *batch, *plates)``.
        """
        first, *second = (
            slopes[name].double().clamp(-_STEEPEST, _STEEPEST) for name in self.group.members
        )
        if not second:
            return first * self._scale, None
        outer, inner = (each.unflatten(0, (self._taken, -1)) for each in (first, *second))
        outer, middle = outer[:, self._middle], inner[:, self._middle]
        along = outer * self._scale + (middle * self._slide).sum_to_size(outer.shape)
        return along, inner * self._inner.unsqueeze(1)

    def joint_slopes(self, sites: Mapping[str, Any], again: bool = False) -> dict[str, Tensor]:
        """Returns the slopes of the joint log density at all points, ``(points, *batch, *plates)``."""
        slopes = self.take(
            sites, again=again, whole=True, parts=[*self.group.members, *self.group.children]
        )
        events = {name: len(self.priors[name].event_shape) for name in slopes}
        slopes = {
            name: slope.reshape(slope.shape[: slope.dim() - events[name]])
            for name, slope in slopes.items()
        }
        return slopes if again else {name: slope.detach() for name, slope in slopes.items()}

    def conditional(self, name: str, values: Mapping[str, Tensor], dims: int | None = None) -> Any:
        at, slopes = self._knots
        grid = grid_like(self._size, at[..., 0]).movedim(0, -1)
        center, scale = (each.unsqueeze(-1) for each in (self._center, self._scale))
        events = (1,) * len(self.priors[name].event_shape)
        batch = trimmed(at.shape[:-1], dims)
        knots = (
            each.to(center).expand(at.shape) for each in (at, center + scale * grid, scale * slopes)
        )
        x, y, slopes = (each.reshape(batch + events + at.shape[-1:]) for each in knots)
        flat, bounds = flat_prior(self.priors[name]), None
        if flat is not None and flat.is_bounded:
            bounds = flat.low.to(center), flat.high.to(center)
        return bent_normal(x, y, slopes, bounds).to_event(len(events))

    def is_finite(self) -> bool:
        return super().is_finite() and all(bool(each.isfinite().all()) for each in self._knots)

    def third(self) -> dict[str, Tensor]:
        """Returns the members' values at one of the points."""
        events = {name: (1,) * len(prior.event_shape) for name, prior in self.priors.items()}
        return {
            name: place[self._third].reshape(place.shape[1:] + events[name])
            for name, place in self.places.items()
        }

    def flaw(self, sites: Mapping[str, Any], alone: Mapping[str, Tensor], rounding: float) -> str:
        """Returns what speaks against it: slopes that a run at a point by itself does not have, or that miss something.

        Args:
            sites: of the run at all points.
            alone: slopes at the values of `third`, in a run by itself.
            rounding: by how much all log densities together may be off, in nats.
        """
        slopes = self.joint_slopes(sites)
        for name, slope in alone.items():
            found = slopes[name][self._third].reshape(slope.shape)
            if not agree(found, slope, [torch.zeros_like(slope)], torch.float32):
                return "a run at many points has other slopes than a run at one of them"
        each = [
            self.density(sites, name).detach().double()
            for name in (*self.group.members, *self.group.children)
        ]
        if any(part.dim() <= len(self.leading) for part in each):
            return "a child has no dim of the points"
        totals = torch.stack([part.flatten(1).sum(-1) for part in each]).sum(0)
        along, inner = self._lines(slopes)
        lines = [(totals, along)]
        if inner is not None:
            totals = totals.unflatten(0, (self._size, -1))
            lines = [(totals[:, self._middle], along), (totals[self._middle], inner[self._middle])]
        size = torch.stack([part.abs().flatten(1).sum(-1).mean() for part in each]).sum()
        rounding += 1000 * torch.finfo(self._center.dtype).eps * float(size)
        for total, line in lines:
            log_density = Mass(line.flatten(1).movedim(0, -1)).log_density
            moved = log_density - log_density[..., self._middle : self._middle + 1]
            off, size = (total - total[self._middle] - moved.sum(0)).abs(), moved.abs().sum(0)
            if not (off <= _ERROR * (1 + size) + rounding).all():
                return "slopes of the log density do not add up to it"
        return ""


def _is_told(slopes: Tensor, dim: int) -> bool:
    """Whether polynomials through slopes at Chebyshev points along a dim tell all slopes between these points."""
    return bool((coefficients(slopes.detach().movedim(dim, 0))[-3:].abs() <= _TAIL).all())
