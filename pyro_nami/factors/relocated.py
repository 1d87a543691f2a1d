"""A distribution seen at other batch dims.

A guide may be called inside a plate that its own sites leave room for but its model does not: `Predictive` looks at
the guide's trace alone to place its plate of draws. Inside, the model then has to see the draws further to the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_nami.factors.elements import NO_DRAW, LatestDraw

__all__ = ["Relocated", "Relocation"]


class Relocation(NamedTuple):
    """Moves batch dims: outside they lie left of ``kept`` dims, inside left of ``kept + gap``, with ones between."""

    kept: int
    gap: int

    def inside(self, batch: torch.Size) -> torch.Size:
        """Returns an outside batch shape as it is inside."""
        cut = len(batch) - self.kept
        return batch if cut <= 0 else torch.Size((*batch[:cut], *(1,) * self.gap, *batch[cut:]))

    def outside(self, batch: torch.Size) -> torch.Size:
        """Returns an inside batch shape as it is outside."""
        right, left = max(len(batch) - self.kept, 0), max(len(batch) - self.kept - self.gap, 0)
        return torch.Size((*batch[:left], *batch[right:]))

    def value_inside(self, value: Tensor, event_dim: int) -> Tensor:
        """Returns an outside value ``(*batch, *event)`` as it is inside."""
        cut = value.dim() - event_dim
        return value.reshape(self.inside(value.shape[:cut]) + value.shape[cut:])


class Relocated(TorchDistribution):
    """The distribution ``base`` of inside with its batch dims outside."""

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(self, base: TorchDistribution, relocation: Relocation) -> None:
        self._base, self._relocation = base, relocation
        self._latest = NO_DRAW
        super().__init__(relocation.outside(base.batch_shape), base.event_shape, validate_args=False)

    @constraints.dependent_property
    def support(self) -> constraints.Constraint | None:
        return self._base.support

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        return self._base.has_rsample

    @property
    def has_enumerate_support(self) -> bool:  # type: ignore[override]
        return self._base.has_enumerate_support

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Relocated:
        return Relocated(self._base.expand(self._relocation.inside(torch.Size(batch_shape))), self._relocation)

    def rsample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = torch.Size()) -> Tensor:
        return self._out(self._base.rsample(sample_shape), len(sample_shape))

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = torch.Size()) -> Tensor:
        return self._out(self._base.sample(sample_shape), len(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        log_prob = self._base.log_prob(self._inside(value))
        return log_prob.reshape(self._relocation.outside(log_prob.shape))

    def enumerate_support(self, expand: bool = True) -> Tensor:
        values = self._base.enumerate_support(expand)
        batch = self.batch_shape if expand else torch.Size((1,) * len(self.batch_shape))
        return values.reshape(values.shape[:1] + batch + self.event_shape)

    def _out(self, inside: Tensor, sample_ndims: int) -> Tensor:
        value = inside.reshape(inside.shape[:sample_ndims] + self.batch_shape + self.event_shape)
        self._latest = LatestDraw.of(value, inside)
        return value

    def _inside(self, value: Tensor) -> Tensor:
        """Returns a value as the base knows it; for the latest draw, that draw itself."""
        kept = self._latest.recall(value)
        return self._relocation.value_inside(value, len(self.event_shape)) if kept is None else kept[0]
