"""Families of the model's own type for discrete sites, and for their relaxations.

The raw parameters are those of the type on the real line (logits, log rates). The anchor is the prior's, and is added:
parameters = prior's + network's, so a network output of zero is the prior. `initial` therefore ignores the value and
starts from the prior (without an anchor: from the prototype's, averaged over its batch).
"""

from __future__ import annotations

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.constraints import Constraint
from torch.nn.functional import one_hot

from pyro_nami.factors.anchors import log, through_wrappers
from pyro_nami.factors.base import Family, finite
from pyro_nami.factors.bijections import bijection_to, interior
from pyro_nami.factors.elements import Elements, OwnElements, positive
from pyro_nami.factors.layout import Layout, LogLayout, OwnLayout, UnconstrainedLayout
from pyro_nami.factors.relaxed import ExpRelaxedElements, LogisticElements

__all__ = ["DISCRETE", "AdditiveFamily"]

# Far beyond what a draw can show, and finite: a prior that excludes a value keeps finite gradients.
_LOGIT_RANGE = 100.0


class AdditiveFamily(Family):
    """A family whose parameters are the prior's plus the network's."""

    has_rsample = False

    def __init__(self, name: str, prior: Distribution, value: Tensor) -> None:
        super().__init__(name, prior, value)
        with torch.no_grad():
            raw = self._prior_params(prior)
            self.dtype = raw.dtype
            carried = self._carry(prior)
        self.num_params = raw.shape[-1]
        self._start = raw.reshape((-1,) + raw.shape[-2:]).mean(0)
        self._carried = None if carried is None else _without_equal_rows(carried)

    def anchor(self, prior: Distribution) -> Tensor | None:
        raw, carried = self._prior_params(prior), self._carry(prior)
        return raw if carried is None else torch.cat([raw, carried], -1)

    def initial(self, value: Tensor, scale: float | Tensor, anchor: Tensor | None = None) -> Tensor:
        start = self._start.to(device=value.device)
        return start if anchor is None else torch.zeros_like(start)

    def elements(self, params: Tensor, anchor: Tensor | None = None) -> Elements:
        anchor = self._complete(anchor)
        if anchor is None:
            return self._build(params)
        anchor = anchor.to(params)
        return self._build(anchor[..., : self.num_params] + params, *anchor[..., self.num_params :].unbind(-1))

    def _prior_params(self, prior: Distribution) -> Tensor:
        """Returns the prior's raw parameters ``(*batch, E, k)``."""
        raw = through_wrappers(prior, self._raw).clamp(-_LOGIT_RANGE, _LOGIT_RANGE)
        return raw.reshape(torch.Size(prior.batch_shape) + (self.num_elements, raw.shape[-1]))

    def _raw(self, prior) -> Tensor:
        """Returns the raw parameters ``(*batch, k)`` of an unwrapped prior of this type."""
        raise NotImplementedError

    def _carry(self, prior: Distribution) -> Tensor | None:
        """Returns what the factor takes over from the prior as it is, ``(*batch, E, columns)``, or None."""
        return None

    def _build(self, params: Tensor, *carried: Tensor) -> Elements:
        """Returns the elements at raw parameters ``(*batch, E, k)`` and what is carried over, ``(*batch, E)`` each."""
        raise NotImplementedError

    def _complete(self, anchor: Tensor | None) -> Tensor | None:
        if anchor is not None or self._carried is None:
            return anchor
        zeros = self._carried.new_zeros(self._carried.shape[:-1] + (self.num_params,))
        return torch.cat([zeros, self._carried], -1)

    def _moved_to(self, prior: Distribution) -> Family:
        moved = super()._moved_to(prior)
        moved._carried = self._carry(prior)  # type: ignore[attr-defined]
        return moved

    def _make_layout(self, support: Constraint, batch_shape: torch.Size, value: Tensor) -> Layout:
        return OwnLayout(support, self.event_shape, batch_shape=batch_shape)


class BernoulliFamily(AdditiveFamily):
    """Bernoulli by its logit; the feature is the value."""

    def element_features(self, elements: Tensor) -> Tensor:
        return finite(elements.to(self.dtype)).unsqueeze(-1)

    def _raw(self, prior) -> Tensor:
        return prior.logits.unsqueeze(-1)

    def _build(self, params: Tensor, *carried: Tensor) -> Elements:
        return OwnElements(dist.Bernoulli(logits=params.squeeze(-1), validate_args=False))


class CategoricalFamily(AdditiveFamily):
    """Categorical by its logits; the features are the one-hot code."""

    def __init__(self, name: str, prior: Distribution, value: Tensor) -> None:
        super().__init__(name, prior, value)
        self.num_features = self.num_params

    def element_features(self, elements: Tensor) -> Tensor:
        return one_hot(elements.long(), self.num_features).to(self.dtype)

    def _raw(self, prior) -> Tensor:
        return prior.logits

    def _build(self, params: Tensor, *carried: Tensor) -> Elements:
        return OwnElements(dist.Categorical(logits=params, validate_args=False))


class OneHotFamily(CategoricalFamily):
    """One-hot categorical by its logits: a vector is one element; the features are the value."""

    def element_features(self, elements: Tensor) -> Tensor:
        return finite(elements.to(self.dtype))

    def _build(self, params: Tensor, *carried: Tensor) -> Elements:
        return OwnElements(dist.OneHotCategorical(logits=params, validate_args=False))

    def _make_layout(self, support: Constraint, batch_shape: torch.Size, value: Tensor) -> Layout:
        return OwnLayout(support, self.event_shape, element_ndims=1, batch_shape=batch_shape)


class OneHotStraightThroughFamily(OneHotFamily):
    """One-hot categorical with the straight-through gradient, as in the model."""

    has_rsample = True

    def _build(self, params: Tensor, *carried: Tensor) -> Elements:
        return OwnElements(dist.OneHotCategoricalStraightThrough(logits=params, validate_args=False))


class CountFamily(AdditiveFamily):
    """A type on the counts 0, 1, ...; the feature is log1p of the value."""

    def element_features(self, elements: Tensor) -> Tensor:
        return finite(elements.to(self.dtype).clamp(min=0).log1p()).unsqueeze(-1)


class PoissonFamily(CountFamily):
    """Poisson by its log rate."""

    def _raw(self, prior) -> Tensor:
        return log(prior.rate).unsqueeze(-1)

    def _build(self, params: Tensor, *carried: Tensor) -> Elements:
        return OwnElements(dist.Poisson(positive(params.squeeze(-1)), validate_args=False))


class GeometricFamily(CountFamily):
    """Geometric by its logit."""

    def _raw(self, prior) -> Tensor:
        return prior.logits.unsqueeze(-1)

    def _build(self, params: Tensor, *carried: Tensor) -> Elements:
        return OwnElements(dist.Geometric(logits=params.squeeze(-1), validate_args=False))


class NegativeBinomialFamily(CountFamily):
    """Negative binomial by its log total count and its logit; also for Gamma-Poisson priors."""

    def _raw(self, prior) -> Tensor:
        if isinstance(prior, dist.GammaPoisson):
            return torch.stack([log(prior.concentration), -log(prior.rate)], -1)
        return torch.stack(torch.broadcast_tensors(log(prior.total_count), prior.logits), -1)

    def _build(self, params: Tensor, *carried: Tensor) -> Elements:
        log_count, logits = params.unbind(-1)
        return OwnElements(dist.NegativeBinomial(positive(log_count), logits=logits, validate_args=False))


class BinomialFamily(CountFamily):
    """Binomial by its logit. The total count is the prior's , the last anchor column; the support that of `at`."""

    varies = True

    def _carry(self, prior: Distribution) -> Tensor | None:
        count = through_wrappers(prior, lambda leaf: leaf.total_count)  # type: ignore[attr-defined]
        return count.reshape(torch.Size(prior.batch_shape) + (self.num_elements, 1)).to(self.dtype)

    def _raw(self, prior) -> Tensor:
        return prior.logits.unsqueeze(-1)

    def _build(self, params: Tensor, *carried: Tensor) -> Elements:
        logits, count = torch.broadcast_tensors(params.squeeze(-1), *carried)
        return OwnElements(dist.Binomial(count, logits=logits, validate_args=False))


class BetaBinomialFamily(BinomialFamily):
    """Beta-binomial by its two log concentrations. The total count is the prior's, as for `BinomialFamily`."""

    def _raw(self, prior) -> Tensor:
        return torch.stack([log(prior.concentration1), log(prior.concentration0)], -1)

    def _build(self, params: Tensor, *carried: Tensor) -> Elements:
        one, zero, count = torch.broadcast_tensors(*positive(params).unbind(-1), *carried)
        return OwnElements(dist.BetaBinomial(one, zero, count, validate_args=False))


class RelaxedBernoulliFamily(AdditiveFamily):
    """Relaxed Bernoulli by its logit, as a logistic variable on the logit scale. The temperature is the prior's.

    Scored on the logit scale, so the density is stable at both ends.
    """

    has_rsample = True
    varies = True

    def _carry(self, prior: Distribution) -> Tensor | None:
        temperature = through_wrappers(prior, lambda leaf: _temperature(leaf).expand(leaf.batch_shape))
        return temperature.reshape(torch.Size(prior.batch_shape) + (self.num_elements, 1)).to(self.dtype)

    def _raw(self, prior) -> Tensor:
        return prior.logits.unsqueeze(-1)

    def _build(self, params: Tensor, *carried: Tensor) -> Elements:
        return LogisticElements(params.squeeze(-1), *carried)

    def _make_layout(self, support: Constraint, batch_shape: torch.Size, value: Tensor) -> Layout:
        return UnconstrainedLayout(support, self.event_shape, value, batch_shape=batch_shape)


class RelaxedOneHotFamily(RelaxedBernoulliFamily):
    """Relaxed one-hot vector by its logits, drawn and scored by its logarithm. A vector is one element.

    The features are its stick-breaking coordinates, one fewer than classes.
    """

    def __init__(self, name: str, prior: Distribution, value: Tensor) -> None:
        super().__init__(name, prior, value)
        self.num_features = self.num_params - 1

    def element_features(self, elements: Tensor) -> Tensor:
        return simplex_features(elements.exp())

    def _raw(self, prior) -> Tensor:
        return prior.logits

    def _build(self, params: Tensor, *carried: Tensor) -> Elements:
        return ExpRelaxedElements(params, *carried)

    def _make_layout(self, support: Constraint, batch_shape: torch.Size, value: Tensor) -> Layout:
        return LogLayout(support, self.event_shape, element_ndims=1, batch_shape=batch_shape)


def simplex_features(value: Tensor) -> Tensor:
    """Returns the unconstrained coordinates ``(*batch, classes - 1)`` of a simplex vector ``(*batch, classes)``."""
    simplex = dist.constraints.simplex
    return finite(bijection_to(simplex).inv(interior(simplex, value)))


def _temperature(prior: Distribution) -> Tensor:
    return torch.as_tensor(prior.temperature)  # type: ignore[attr-defined]


def _without_equal_rows(carried: Tensor) -> Tensor:
    """Returns ``(E, columns)`` where ``(*batch, E, columns)`` is equal over the batch: plates may then change size."""
    rows = carried.flatten(0, -3) if carried.dim() > 2 else carried.unsqueeze(0)
    return rows[0] if len(rows) and (rows == rows[0]).all() else carried


# The first type in a prior's MRO decides. None: the model sees hard values, which a relaxed factor would not give.
DISCRETE: dict[type, type[Family] | None] = {
    dist.RelaxedBernoulliStraightThrough: None,
    dist.RelaxedOneHotCategoricalStraightThrough: None,
    torch.distributions.Bernoulli: BernoulliFamily,
    torch.distributions.Categorical: CategoricalFamily,
    torch.distributions.OneHotCategoricalStraightThrough: OneHotStraightThroughFamily,
    torch.distributions.OneHotCategorical: OneHotFamily,
    torch.distributions.Binomial: BinomialFamily,
    dist.BetaBinomial: BetaBinomialFamily,
    torch.distributions.Poisson: PoissonFamily,
    torch.distributions.Geometric: GeometricFamily,
    torch.distributions.NegativeBinomial: NegativeBinomialFamily,
    dist.GammaPoisson: NegativeBinomialFamily,
    torch.distributions.RelaxedBernoulli: RelaxedBernoulliFamily,
    torch.distributions.RelaxedOneHotCategorical: RelaxedOneHotFamily,
}
