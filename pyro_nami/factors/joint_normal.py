"""A Normal over all elements of one site that depend on each other, those of its plates' instances included."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

__all__ = ["JointNormal"]


class JointNormal(TorchDistribution):
    """L (x - loc) = e with e ~ N(0, I): x is a vector whose elements a site's batch or event dims show.

    The log density of an instance is that of its own rows of e, so the sum over instances is that of x.

    Args:
        loc: the vector, ``(*lead, E)``.
        lower: L, lower triangular with a positive diagonal, ``(*lead, E, E)``.
        shape: the shape in which a site holds the elements, ``(*instances, *event)``, of E elements in all.
        event_dim: how many dims of it are the event's.

    Example:
        >>> two = JointNormal(torch.zeros(2), torch.eye(2), torch.Size([2]), 0)
        >>> two.batch_shape, two.log_prob(torch.zeros(2))
        (torch.Size([2]), tensor([-0.9189, -0.9189]))
    """

    arg_constraints: dict[str, Any] = {}
    has_rsample = True

    def __init__(self, loc: Tensor, lower: Tensor, shape: torch.Size, event_dim: int) -> None:
        self.loc, self.lower, self._held = loc, lower, shape
        lead = loc.shape[:-1]  # `torch.broadcast_shapes` takes as long as a draw
        lead = lead if lead == lower.shape[:-2] else torch.broadcast_shapes(lead, lower.shape[:-2])
        full, cut = lead + shape, len(lead + shape) - event_dim
        super().__init__(full[:cut], full[cut:], validate_args=False)

    @constraints.dependent_property
    def support(self) -> Any:
        real = constraints.real
        return constraints.independent(real, self.event_dim) if self.event_dim else real

    @property
    def mean(self) -> Tensor:
        return self.loc.reshape(self.loc.shape[:-1] + self._held).expand(self.batch_shape + self.event_shape)

    def expand(self, batch_shape: Any, _instance: Any = None) -> JointNormal:
        shape = torch.Size(batch_shape)
        cut = len(shape) - (len(self._held) - self.event_dim)
        loc = self.loc.expand(shape[:cut] + self.loc.shape[-1:])
        return JointNormal(loc, self.lower, self._held, self.event_dim)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = self._extended_shape(sample_shape)
        lead = shape[: len(shape) - len(self._held)]
        noise = torch.randn(lead + self.loc.shape[-1:], dtype=self.loc.dtype, device=self.loc.device)
        step = torch.linalg.solve_triangular(self.lower, noise.unsqueeze(-1), upper=False).squeeze(-1)
        return (self.loc + step).reshape(shape)

    def log_prob(self, value: Tensor) -> Tensor:
        full = self.batch_shape + self.event_shape
        full = full if value.shape == full else torch.broadcast_shapes(value.shape, full)
        lead = full[: len(full) - len(self._held)]
        error = value.expand(full).reshape(lead + self.loc.shape[-1:]) - self.loc
        noise = (self.lower @ error.unsqueeze(-1)).squeeze(-1)
        log_prob = self.lower.diagonal(dim1=-2, dim2=-1).log() - noise.square() / 2 - math.log(2 * math.pi) / 2
        log_prob = log_prob.expand(noise.shape).reshape(full)
        return log_prob.sum(tuple(range(-self.event_dim, 0))) if self.event_dim else log_prob
