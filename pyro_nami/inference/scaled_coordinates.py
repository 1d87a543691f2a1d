"""Unconstrained, standardized coordinates, in which distances between latents or data sets are comparable."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import biject_to

from pyro_nami.factors.completed import is_support_unknown
from pyro_nami.inference.simulate import Simulator
from pyro_nami.inference.site_messages import Values
from pyro_nami.networks.running import center_and_spread

__all__ = ["Coordinates", "SiteForm", "site_forms"]


class SiteForm(NamedTuple):
    """A site's own shape ``(*plates, *event)``, and a map to unconstrained space, the same for all values."""

    shape: torch.Size
    event_dim: int
    unconstrain: Callable[[Tensor], Tensor]


def site_forms(simulator: Simulator) -> dict[str, SiteForm]:
    """Returns the form of every site of a model; discrete sites and sites of varying support keep their values."""
    runs = [simulator.sites() for _ in range(2)]
    forms = {}
    for name in (*simulator.latent, *simulator.observed):
        value, fn = runs[0][name]["value"], runs[0][name]["fn"]
        maps = [_unconstraining(run[name]["fn"]) for run in runs]
        fixed = torch.equal(*(unconstrain(value).nan_to_num() for unconstrain in maps))
        forms[name] = SiteForm(value.shape, fn.event_dim, maps[0] if fixed else _as_float)
    return forms


def _unconstraining(fn: Any) -> Callable[[Tensor], Tensor]:
    try:
        if not (fn.support.is_discrete or is_support_unknown(fn)):
            return biject_to(fn.support).inv
    except NotImplementedError:  # no bijection to it
        pass
    return _as_float


def _as_float(value: Tensor) -> Tensor:
    return value if value.is_floating_point() else value.to(torch.get_default_dtype())


class Coordinates:
    """Unconstrained coordinates of all elements of some sites, (x - median) / (half the width of the central 68%).

    They are logarithmic beyond a bound, so that heavy tails count for little.

    Args:
        values: site -> ``(batch, ...)``, a sample that they are standardized by.
        forms: of the sites.
        linear: the bound, in spreads.

    Attributes:
        sizes: site -> the number of its coordinates, in their order.

    Example:
        >>> coordinates = Coordinates({"z": torch.arange(101.0)}, {"z": SiteForm(torch.Size(), 0, lambda value: value)})
        >>> coordinates({"z": torch.tensor([16.0, 50.0, 84.0])}).flatten().round()
        tensor([-1.,  0.,  1.])
    """

    def __init__(
        self, values: Values, forms: Mapping[str, SiteForm], *, linear: float = 5.0
    ) -> None:
        self.linear = linear
        self._maps = {name: forms[name].unconstrain for name in values}
        parts = self._parts(values, 1)
        self.sizes = {name: part.shape[1] for name, part in parts.items()}
        self._center, spread = center_and_spread(torch.cat(list(parts.values()), -1))
        self._scale = torch.where(spread > 0, spread, torch.ones_like(spread))

    def __call__(self, values: Values, batch_dims: int = 1) -> Tensor:
        """Returns the coordinates of values with some batch dims, ``(*batch, coordinates)``."""
        raw = torch.cat(list(self._parts(values, batch_dims).values()), -1)
        standard = (raw - self._center) / self._scale
        beyond = (standard.abs() - self.linear).clamp(min=0)
        return standard.clamp(-self.linear, self.linear) + standard.sign() * beyond.log1p()

    def _parts(self, values: Values, batch_dims: int) -> Values:
        parts = {}
        for name, unconstrain in self._maps.items():
            value = unconstrain(_as_float(values[name]))
            value = value.reshape(*value.shape[:batch_dims], -1)
            huge = math.sqrt(torch.finfo(value.dtype).max)  # whose square is finite
            parts[name] = value.nan_to_num(nan=0.0, posinf=huge, neginf=-huge)
        return parts
