"""Types of torch whose densities or draws cancel or overflow, written so that they do not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyro.distributions as dist
import torch
from torch import Tensor

__all__ = ["StableKumaraswamy", "StableVonMises"]


class StableKumaraswamy(dist.Kumaraswamy):
    """Kumaraswamy drawn and scored through logarithms: x = (1 - u^(1/b))^(1/a) with u uniform."""

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        shape, b = torch.Size(sample_shape) + self.batch_shape, self.concentration0
        minus_log_uniform = torch.empty(shape, dtype=b.dtype, device=b.device).exponential_()
        return (_log_complement(-minus_log_uniform / b) / self.concentration1).exp()

    def log_prob(self, value: Tensor) -> Tensor:
        a, b, log_value = self.concentration1, self.concentration0, value.log()
        return a.log() + b.log() + (a - 1) * log_value + (b - 1) * _log_complement(a * log_value)


class StableVonMises(dist.VonMises):
    """von Mises with a density that does not cancel at high concentrations: by k (cos d - 1) = -2 k sin(d / 2)^2."""

    def log_prob(self, value: Tensor) -> Tensor:
        fall = 2 * self.concentration * (0.5 * (value - self.loc)).sin().square()
        return -fall - torch.special.i0e(self.concentration).log() - math.log(2 * math.pi)


def _log_complement(log_x: Tensor) -> Tensor:
    """Returns log(1 - x) from log x < 0."""
    tiny = torch.finfo(log_x.dtype).tiny
    return (-log_x.clamp(max=-tiny).expm1()).log()
