"""`Innovations`: the distribution of a series' innovations, given that of its states, and of more or fewer steps."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.util import sum_rightmost
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import pad

from pyro_nami.factors.markov_normal import MarkovNormal
from pyro_nami.factors.wrappers import innermost
from pyro_nami.program.series_sites import SeriesSites

__all__ = ["Continued", "Innovations"]


class Innovations(TorchDistribution):
    """The innovations of a series, at their site. In a plate, the log density of each is that given those before it.

    Args:
        states: the distribution of the states, ``(*batch, steps)``.
        series: how states and innovations follow from each other.
    """

    arg_constraints: dict[str, Any] = {}
    has_rsample = True

    def __init__(self, states: MarkovNormal, series: SeriesSites) -> None:
        self.states, self.series = states, series
        shape = series.axis.in_place(states.mean).shape
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
        batch, dim = torch.Size(batch_shape), self.series.axis.dim
        if dim:
            batch = torch.Size((*batch[: len(batch) + dim], 1, *batch[len(batch) + dim + 1 :]))
        return Innovations(self.states.expand(batch), self.series)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        return self.series.split(self.states.rsample(sample_shape))[0]

    def log_prob(self, value: Tensor) -> Tensor:
        return sum_rightmost(self.log_probs(value), len(self.event_shape))

    def log_probs(self, value: Tensor) -> Tensor:
        """Returns the log density in nats of each innovation given those before it, in the shape of the value."""
        return self.series.axis.in_place(self.states.log_probs(self.series.joined([value])))


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
        known, further = (fn.rsample(sample_shape) for fn in (self.trained, self.prior))
        return self.trained.series.continued(known, further)

    def log_prob(self, value: Tensor) -> Tensor:
        series, steps = self.trained.series, self.trained.series.axis.last(value)
        missing = max(0, series.length - steps.shape[-1])
        first = series.axis.in_place(pad(steps[..., : series.length], (0, missing)))
        further = innermost(self.prior).log_prob(value)
        each = series.continued(self.trained.log_probs(first), further)
        return sum_rightmost(each, len(self.event_shape))
