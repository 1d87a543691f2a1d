"""The marginal posterior of a few latents that are sampled first, on a grid, with all other latents integrated out.

If the conditionals of the other latents z are exact, the marginal density of the first latents v is
log p(v, data) = log p(v, z, data) - log q(z | v, data), at any z. `pyro_nami.deriving.grid_search`
finds where the grid is to lie.

References:
    Rue, Martino and Chopin 2009, Approximate Bayesian inference for latent Gaussian models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_nami.deriving.bent_vector import RUN_POINTS
from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.grid_search import Box, search
from pyro_nami.deriving.grids import HALF, SIZE, LineDensity, bent, slope_of
from pyro_nami.deriving.latent_vector import LatentVector, UnconstrainedDensity
from pyro_nami.factors.distribution import SiteDistribution
from pyro_nami.messages import quoted
from pyro_nami.program.runner import Values

__all__ = ["Marginal"]


class Marginal:
    """The conditionals of one or two latents with one element and no plates, and all other latents integrated out.

    Args:
        group: the members.
        coordinates: of the members.
        box: the box in unconstrained space at which the search begins, of batch shape ``(*batch)``.
        log_density: function from values of the members, ``(points, *batch, *event)`` each, to the log density of
            values and data in nats, ``(points, *batch)``.

    Attributes:
        finite: member -> data sets with a finite log density and a box that holds it, ``(*batch)``.

    Raises:
        ValueError: if no data set has a log density that falls to all sides.
    """

    def __init__(
        self,
        group: ConjugateGroup,
        coordinates: LatentVector,
        box: Box,
        log_density: Callable[[Values], Tensor],
    ) -> None:
        self.group = group
        self._coordinates = coordinates
        density = UnconstrainedDensity(coordinates, log_density, RUN_POINTS)
        what = f"the log density of {quoted(group.members)}"
        self._box, table, found = search(density.log_prob, box, what)
        self._table = table.unflatten(0, (SIZE,) * len(group.members))
        self.finite = dict.fromkeys(group.members, found)

    def conditional(self, name: str, values: Values, dims: int | None = None) -> SiteDistribution:
        """Returns a member's conditional, as `Expansion.conditional` does."""
        index, center, sides = self.group.members.index(name), self._box.center, self._box.sides
        middle, half = center[..., index], sides[..., index, index]
        if index == 0:
            line = self._table if len(self.group.members) == 1 else self._table.logsumexp(1)
        else:
            first = self.group.members[0]
            number = self._coordinates.numbers(first, values[first]).squeeze(-1).detach()
            place = (number - center[..., 0]) / sides[..., 0, 0]
            line = _row(self._table, place)
            middle = middle + sides[..., 1, 0] * place
        quantiles = LineDensity(line, slope_of(line)).quantiles()
        fn = bent(quantiles, middle, half / HALF, self._coordinates.like, 1, dims)
        return SiteDistribution(fn, self._coordinates.layouts[name])

    def draw(self, count: int, batch: torch.Size) -> tuple[dict[str, Tensor], Tensor]:
        """Returns draws of the members, ``(count, *batch, *event)``, and their log density, ``(count, *batch)``."""
        values, log_prob = dict[str, Tensor](), torch.zeros((), dtype=torch.float64)
        for name in self.group.members:
            fn = self.conditional(name, values).expand((count, *batch))
            values[name] = fn.sample()
            log_prob = log_prob + fn.log_prob(values[name]).double()
        return values, log_prob


def _row(table: Tensor, place: Tensor) -> Tensor:
    """Returns the log density along the second side, ``(points, *batch)``, by cubic interpolation along the first.

    Args:
        table: ``(points, points, *data sets)``.
        place: of the first member, -1 to 1 in the box, ``(*batch)``.
    """
    before, behind = (3 * (a - b) + c for a, b, c in (table[:3], table.flip(0)[:3]))
    table = torch.cat([before[None], table, behind[None]])
    at = 1 + (place.clamp(-1, 1) + 1) / 2 * (len(table) - 3)
    points = torch.arange(len(table), device=place.device).reshape((-1,) + (1,) * place.dim())
    off = (at - points).abs()
    # Lagrange's cubics through the four nearest points
    near, far = (1 - off**2) * (2 - off) / 2, (1 - off) * (2 - off) * (3 - off) / 6
    weights = torch.where(off < 1, near, torch.where(off < 2, far, 0.0))
    return torch.einsum("i...,ij...->j...", weights, table)
