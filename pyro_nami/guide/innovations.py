"""`Innovations`: the distribution of a series' innovations, given that of its states, and of more or fewer steps."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import pad

from pyro_nami.factors.markov_normal import MarkovNormal
from pyro_nami.factors.wrappers import innermost
from pyro_nami.program.series_sites import SeriesSites

__all__ = ["Continued", "Innovations"]


class Innovations(TorchDistribution):
    """Innovations at their site. Along a plate the log density of each is that given the innovations before it.

    Args:
        states: the distribution of the states, ``(*batch, steps)``.
        series: how states and innovations follow from each other.
    """

    arg_constraints: dict[str, Any] = {}
    has_rsample = True

    def __init__(self, states: MarkovNormal, series: SeriesSites) -> None:
        self.states, self.series = states, series
        shape = series.in_place(states.mean).shape
        event_dim = len(series.events[0])
        cut = len(shape) - event_dim
        super().__init__(shape[:cut], shape[cut:], validate_args=False)

    @property
    def support(self) -> Any:
        return constraints.independent(constraints.real, len(self.event_shape))

    @property
    def mean(self) -> Tensor:
        return self.series.split(self.states.mean)[0]

    def expand(self, batch_shape: Any, _instance: Any = None) -> Innovations:
        batch, dim = torch.Size(batch_shape), self.series.dim
        if dim:
            batch = torch.Size((*batch[: len(batch) + dim], 1, *batch[len(batch) + dim + 1 :]))
        return Innovations(self.states.expand(batch), self.series)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        return self.series.split(self.states.rsample(sample_shape))[0]

    def log_prob(self, value: Tensor) -> Tensor:
        return self.at_site(self.log_probs(self.series.along(value)))

    def at_site(self, each: Tensor) -> Tensor:
        """Returns the log density of the site, given that of each step."""
        if not self.series.dim:
            return each.sum(-1)
        found = self.series.in_place(each)
        return found.reshape(found.shape[: found.dim() - self.series.ones])

    def log_probs(self, steps: Tensor) -> Tensor:
        """Returns the log density of each step's innovation given those before it, both ``(*batch, steps)``."""
        return self.states.log_probs(self.series.sums(steps))


class Continued(TorchDistribution):
    """Innovations of a series with more steps than in training, or fewer: those of further steps are the prior's.

    Args:
        trained: the distribution of the innovations of training.
        prior: of the innovations of this series.
    """

    arg_constraints: dict[str, Any] = {}
    has_rsample = True

    def __init__(self, trained: Innovations, prior: Any) -> None:
        self.trained, self.prior = trained, prior
        super().__init__(prior.batch_shape, prior.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        return self.prior.support

    def expand(self, batch_shape: Any, _instance: Any = None) -> Continued:
        return Continued(self.trained, self.prior.expand(batch_shape))

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        further = self._along(self.prior.rsample(sample_shape))
        known = self._along(self.trained.rsample(sample_shape))
        batch = torch.broadcast_shapes(known.shape[:-1], further.shape[:-1])
        length, count = further.shape[-1], known.shape[-1]
        known, further = (each.expand(batch + each.shape[-1:]) for each in (known, further))
        steps = torch.cat((known[..., :length], further[..., count:]), -1)
        return self.trained.series.in_place(steps)

    def log_prob(self, value: Tensor) -> Tensor:
        steps = self._along(value)
        length, count = steps.shape[-1], self.trained.series.length
        known = self.trained.log_probs(pad(steps[..., :count], (0, max(0, count - length))))
        further = self._along(innermost(self.prior).log_prob(value))
        batch = torch.broadcast_shapes(known.shape[:-1], further.shape[:-1])
        known, further = (each.expand(batch + each.shape[-1:]) for each in (known, further))
        each = torch.cat((known[..., :length], further[..., count:]), -1)
        return self.trained.at_site(each)

    def _along(self, value: Tensor) -> Tensor:
        return self.trained.series.along(value)
