"""Latents as one vector of unconstrained numbers, and a log density of that vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.program.runner import Values

__all__ = ["LatentVector", "UnconstrainedDensity"]


class LatentVector(NamedTuple):
    """The unconstrained coordinates of latents as one vector.

    Attributes:
        layouts: latent -> its map between values and unconstrained space.
        plates: latent -> the sizes of the model's plate dims at its site.
        like: a tensor of the latents' dtype and device.
    """

    layouts: Mapping[str, Any]
    plates: Mapping[str, torch.Size]
    like: Tensor

    @property
    def sizes(self) -> list[int]:
        """How many numbers each latent has."""
        return [
            self.plates[name].numel() * layout.num_elements for name, layout in self.layouts.items()
        ]

    def values(self, points: Tensor) -> dict[str, Tensor]:
        """Returns the latents' values ``(*lead, *plates, *event)`` at points ``(*lead, numbers)``."""
        parts = zip(self.layouts.items(), points.split(self.sizes, -1))
        return {
            name: layout.value(self._shown(name, part)).to(self.like)
            for (name, layout), part in parts
        }

    def points(self, values: Values) -> Tensor:
        """Returns the points ``(*lead, numbers)`` of values."""
        return torch.cat([self.numbers(name, values[name]) for name in self.layouts], -1)

    def numbers(self, name: str, value: Tensor) -> Tensor:
        """Returns a latent's numbers ``(*lead, numbers)``."""
        layout, plates = self.layouts[name], self.plates[name]
        value = value.expand(torch.broadcast_shapes(value.shape, plates + layout.event_shape))
        return layout.elements(value).flatten(-1 - len(plates)).double()

    def log_abs_det(self, points: Tensor, values: Values) -> Tensor:
        """Returns the log determinant of d value / d point, ``(*lead)``."""
        total = points.new_zeros(points.shape[:-1])
        for (name, layout), part in zip(self.layouts.items(), points.split(self.sizes, -1)):
            own = layout.log_abs_det(self._shown(name, part), values[name].double())
            if own is not None:
                own = own.expand(points.shape[:-1] + self.plates[name])
                total = total + own.reshape(*points.shape[:-1], -1).sum(-1)
        return total

    def _shown(self, name: str, part: Tensor) -> Tensor:
        return part.reshape(
            part.shape[:-1] + self.plates[name] + (self.layouts[name].num_elements,)
        )


class UnconstrainedDensity(NamedTuple):
    """The log density of latents at points in unconstrained space, in runs of the model for many points each.

    Attributes:
        coordinates: of the latents.
        log_density: function from values of the latents, ``(points, *batch, *plates, *event)`` each, to the log density
            of values and data in nats, ``(points, *batch)``, differentiable in the values.
        at_once: points of a run, at most.
    """

    coordinates: LatentVector
    log_density: Callable[[Values], Tensor]
    at_once: int

    def log_prob(self, points: Tensor) -> Tensor:
        """Returns the log density at points ``(*lead, numbers)`` in nats, ``(*lead)``."""
        values = self.coordinates.values(points)
        total = self.log_density(values).reshape(points.shape[:-1])
        total = total + self.coordinates.log_abs_det(points, values)
        return total.nan_to_num(-torch.inf, -torch.inf, -torch.inf)

    @torch.no_grad()
    def heights(self, points: Tensor) -> Tensor:
        """Returns the log density at points ``(points, *batch, numbers)``; -inf where the model raises."""
        parts = points.split(self.at_once)
        return torch.cat(
            [_where_possible(lambda at: (self.log_prob(at),), part)[0] for part in parts]
        )

    def slopes(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log density at points and its derivatives, as `pyro_nami.deriving.ascent.ascend` takes them."""
        parts = [_where_possible(self._risen, part) for part in points.split(self.at_once)]
        height, slope = map(torch.cat, zip(*parts))
        return height, slope

    def _risen(self, points: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            points = points.detach().requires_grad_()
            height = self.log_prob(points)
            (slope,) = torch.autograd.grad(height.sum(), points)
        finite = slope.isfinite().all(-1)
        height = height.detach().where(finite, -torch.inf)
        return height, slope.where(finite[..., None], 0.0)


def _where_possible(run: Callable[[Tensor], Any], points: Tensor) -> Any:
    """Returns the results of a run at points; where the model raises, log densities of -inf and slopes of zero.

    Models do at values far out, as where a matrix cannot be factorized, for all points at once.
    """
    try:
        return run(points)
    except (RuntimeError, ValueError, ArithmeticError):
        if len(points) > 1:
            halves = [_where_possible(run, half) for half in points.tensor_split(2)]
            return tuple(map(torch.cat, zip(*halves)))
        return torch.full_like(points[..., 0], -torch.inf), torch.zeros_like(points)
