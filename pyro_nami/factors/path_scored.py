"""Distributions whose own draws an ELBO scores along the path alone: noise goes that an exact guide would not have.

Of log q(z; parameters) at a draw z of q, the derivative by the parameters at fixed z is zero on average, and noise.
Without it the gradient of the ELBO has no noise left where q is the posterior, at any number of particles. Change this
module to estimate these gradients in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.score_parts import ScoreParts
from torch import Tensor

__all__ = ["PathScored"]


class PathScored(TorchDistribution):
    """A distribution that knows itself with its learned parameters as numbers.

    Attributes:
        fixed: makes that one. Where it is given, ``Trace_ELBO`` takes its density of a reparameterized draw.

    References:
        Roeder, Wu and Duvenaud 2017, Sticking the Landing.
    """

    fixed: Callable[[], PathScored] | None = None

    def is_draw(self, value: Tensor) -> bool:
        """Whether a value is the latest reparameterized draw."""
        raise NotImplementedError

    def log_prob_of_draw(self, fixed: Any, value: Tensor) -> Tensor:
        """Returns the log density that ``fixed`` has at the latest draw."""
        return fixed.log_prob(value)

    def score_parts(self, x: Tensor, *args: Any, **kwargs: Any) -> ScoreParts:
        """Returns what ``Trace_ELBO`` differentiates at a value ``x``, in nats ``(*batch,)``."""
        if self.fixed is None or not (self.has_rsample and self.is_draw(x)):
            return super().score_parts(x, *args, **kwargs)
        log_prob = self.log_prob_of_draw(self.fixed(), x)
        if log_prob.shape != self.batch_shape:
            log_prob = log_prob.expand(torch.broadcast_shapes(log_prob.shape, self.batch_shape))
        return ScoreParts(log_prob, 0, log_prob)  # type: ignore[arg-type]  # as Pyro's own
