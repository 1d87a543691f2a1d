"""`Innovations`: the distribution of a series' innovations, given that of its states."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_nami.factors.markov_normal import MarkovNormal
from pyro_nami.program.series_sites import SeriesSites, in_place

__all__ = ["Innovations"]


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
        shape = in_place(states.mean, series.dim).shape
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
        each = self.states.log_probs(self.series.joined([value]))
        return in_place(each, self.series.dim) if self.series.dim else each.sum(-1)
