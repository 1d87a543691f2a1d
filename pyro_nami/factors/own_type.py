"""The ``"match"`` families: continuous factors of the model's own type.

Each type is a row of `OWN_TYPES`: how many raw parameters it has, how they make the distribution, and at which of them
it has a given location and scale (see each ``_start`` function for what location means there). These factors take no
anchor. Change this module to add a type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.constraints import Constraint

from pyro_nami.factors.anchors import innermost
from pyro_nami.factors.base import Family, finite
from pyro_nami.factors.bijections import bijection_to
from pyro_nami.factors.discrete import simplex_features
from pyro_nami.factors.elements import Elements, OwnElements, positive, raw_positive
from pyro_nami.factors.layout import Layout, OwnLayout

__all__ = ["OWN_TYPES", "OwnTypeFamily"]

_LOG_TWO = math.log(2.0)


class OwnType(NamedTuple):
    """How raw parameters make a distribution of one type.

    Attributes:
        num_params: k; None for as many as a vector has entries.
        build: raw parameters ``(*batch, E, k)`` to a distribution of batch shape ``(*batch, E)``.
        start: an element's value ``(*batch, E, *element)`` and scale ``(*batch, E)`` in unconstrained space to raw
            parameters ``(*batch, E, k)``.
    """

    num_params: int | None
    build: Callable[[Tensor], Distribution]
    start: Callable[[Tensor, Tensor], Tensor]


class OwnTypeFamily(Family):
    """A factor of the prior's own continuous type, with parameters through positive maps.

    `initial` puts the mean or the median at the value and the spread as near the scale as the type allows; types with
    one parameter keep their spread.

    Raises:
        NotImplementedError: the type is not among those known; the site keeps the default by leaving it out.
    """

    def __init__(self, name: str, prior: Distribution, value: Tensor) -> None:
        leaf = innermost(prior)
        kind = next((kind for kind in type(leaf).__mro__ if kind in OWN_TYPES), None)
        if kind is None:
            known = ", ".join(sorted({known.__name__ for known in OWN_TYPES}))
            raise NotImplementedError(
                f'Expected at site "{name}" one of the types {known} for the family "match"; got '
                f'{type(leaf).__name__}. Give the site the family "normal", or add one with register_family.'
            )
        self._kind = kind  # the key, not the row: functions in it do not pickle
        self._element_ndims = len(leaf.event_shape)
        super().__init__(name, prior, value)
        self.num_params = self._type.num_params or leaf.event_shape[-1]
        self.num_features = self.num_params - 1 if self._element_ndims else 1
        self.has_rsample = leaf.has_rsample

    def element_features(self, elements: Tensor) -> Tensor:
        if self._element_ndims:
            return simplex_features(elements)
        return finite(bijection_to(self._element_support).inv(elements)).unsqueeze(-1)

    def initial(self, value: Tensor, scale: float | Tensor, anchor: Tensor | None = None) -> Tensor:
        elements = self.layout.elements(value)
        shape = elements.shape[: elements.dim() - self._element_ndims]
        scale = torch.as_tensor(scale, dtype=value.dtype, device=value.device).expand(shape)
        return self._type.start(elements, scale)

    def elements(self, params: Tensor, anchor: Tensor | None = None) -> Elements:
        return OwnElements(self._type.build(params))

    @property
    def _type(self) -> OwnType:
        return OWN_TYPES[self._kind]

    def _make_layout(self, support: Constraint, batch_shape: torch.Size, value: Tensor) -> Layout:
        layout = OwnLayout(support, self.event_shape, element_ndims=self._element_ndims, batch_shape=batch_shape)
        self._element_support = getattr(layout.support, "base_constraint", layout.support)
        return layout


class _StableKumaraswamy(dist.Kumaraswamy):
    """Kumaraswamy drawn and scored through logarithms, which neither cancel nor overflow."""

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        shape = torch.Size(sample_shape) + self.batch_shape
        minus_log_uniform = torch.empty(
            shape, dtype=self.concentration0.dtype, device=self.concentration0.device
        ).exponential_()
        return (_log_complement(-minus_log_uniform / self.concentration0) / self.concentration1).exp()

    def log_prob(self, value: Tensor) -> Tensor:
        one, zero, log_value = self.concentration1, self.concentration0, value.log()
        return one.log() + zero.log() + (one - 1) * log_value + (zero - 1) * _log_complement(one * log_value)


def _log_complement(log_x: Tensor) -> Tensor:
    """Returns log(1 - x) from log x < 0."""
    tiny = torch.finfo(log_x.dtype).tiny
    return (-log_x.clamp(max=-tiny).expm1()).log()


class _StableVonMises(dist.VonMises):
    """von Mises with a density that does not cancel at high concentrations."""

    def log_prob(self, value: Tensor) -> Tensor:
        fall = 2 * self.concentration * (0.5 * (value - self.loc)).sin().square()
        return -fall - torch.special.i0e(self.concentration).log() - math.log(2 * math.pi)


def _gamma(params: Tensor) -> Distribution:
    concentration, mean = positive(params).unbind(-1)
    return dist.Gamma(concentration, concentration / mean, validate_args=False)


def _gamma_start(value: Tensor, scale: Tensor) -> Tensor:
    """Mean at the value, standard deviation of the logarithm at the scale (trigamma(a) is about 1/a + 1/(2 a^2))."""
    square = scale.square()
    return torch.stack([raw_positive((1 + (1 + 2 * square).sqrt()) / (2 * square)), raw_positive(value)], -1)


def _inverse_gamma(params: Tensor) -> Distribution:
    concentration, center = positive(params).unbind(-1)
    return dist.InverseGamma(concentration, concentration * center, validate_args=False)


def _chi2(params: Tensor) -> Distribution:
    return dist.Chi2(positive(params.squeeze(-1)), validate_args=False)


def _exponential(params: Tensor) -> Distribution:
    return dist.Exponential(positive(-params.squeeze(-1)), validate_args=False)


def _half_normal(params: Tensor) -> Distribution:
    return dist.HalfNormal(positive(params.squeeze(-1)), validate_args=False)


def _half_cauchy(params: Tensor) -> Distribution:
    return dist.HalfCauchy(positive(params.squeeze(-1)), validate_args=False)


def _at_multiple(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the start of a type with a scale parameter only: this multiple of the value."""
    return lambda value, scale: raw_positive(value * factor).unsqueeze(-1)


def _weibull(params: Tensor) -> Distribution:
    scale, concentration = positive(params).unbind(-1)
    return dist.Weibull(scale, concentration, validate_args=False)


def _weibull_start(value: Tensor, scale: Tensor) -> Tensor:
    """Median at the value, standard deviation of the logarithm at the scale."""
    concentration = math.pi / math.sqrt(6.0) / scale
    return torch.stack([raw_positive(value) - math.log(_LOG_TWO) / concentration, raw_positive(concentration)], -1)


def _beta(params: Tensor) -> Distribution:
    logit, log_total = params.unbind(-1)
    one = positive(log_total + torch.nn.functional.logsigmoid(logit))
    zero = positive(log_total + torch.nn.functional.logsigmoid(-logit))
    return dist.Beta(one, zero, validate_args=False)


def _beta_start(value: Tensor, scale: Tensor) -> Tensor:
    """Mean at the value, standard deviation of the logit near the scale."""
    total = 1 / (scale.square() * value * (1 - value))
    return torch.stack([value.logit(), raw_positive(total)], -1)


def _kumaraswamy(params: Tensor) -> Distribution:
    one, zero = positive(params).unbind(-1)
    return _StableKumaraswamy(one, zero, validate_args=False)


def _kumaraswamy_start(value: Tensor, scale: Tensor) -> Tensor:
    """Median at the value, logit spread near the scale.

    With w = 2^(-1/b) the median is (1 - w)^(1/a), and the density of the logit there is
    a b (1 - w) (1 - value) / (2 w), to be equated with a Normal's. It grows only with log b, so narrow factors near 0
    need a b beyond any precision: b stays below 1000, and the spread is then wider than asked.
    """
    target = 1 / (math.sqrt(2 * math.pi) * scale)
    grid = torch.linspace(math.log(0.05), math.log(1000.0), 400, dtype=value.dtype, device=value.device)
    b = grid.exp()
    log_w = -_LOG_TWO / b
    log_one_minus_w = (-log_w.expm1()).log()
    a = log_one_minus_w / value.log().unsqueeze(-1)
    log_density = a.log() + grid + log_one_minus_w + (-value).log1p().unsqueeze(-1) - _LOG_TWO - log_w
    best = (log_density - target.log().unsqueeze(-1)).abs().argmin(-1, keepdim=True)
    return torch.stack([raw_positive(a.gather(-1, best).squeeze(-1)), grid[best.squeeze(-1)]], -1)


def _dirichlet(params: Tensor) -> Distribution:
    return dist.Dirichlet(positive(params), validate_args=False)


def _dirichlet_start(value: Tensor, scale: Tensor) -> Tensor:
    """Mean at the value, total concentration by the mean over entries of the Beta rule."""
    total = (1 / (value * (1 - value)).clamp(min=torch.finfo(value.dtype).eps)).mean(-1) / scale.square()
    return raw_positive(value * total.unsqueeze(-1))


def _student_t(params: Tensor) -> Distribution:
    log_df, loc, raw = params.unbind(-1)
    return dist.StudentT(positive(log_df), loc, positive(raw), validate_args=False)


def _student_t_start(value: Tensor, scale: Tensor) -> Tensor:
    """Location and scale at the given ones, ten degrees of freedom."""
    return torch.stack([torch.full_like(value, math.log(10.0)), value, raw_positive(scale)], -1)


def _loc_scale(kind: Callable[..., Distribution]) -> Callable[[Tensor], Distribution]:
    def build(params: Tensor) -> Distribution:
        loc, raw = params.unbind(-1)
        return kind(loc, positive(raw), validate_args=False)

    return build


def _loc_scale_start(spread: float, offset: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the start with the median at the value, where a unit scale has this spread and minus this median."""

    def start(value: Tensor, scale: Tensor) -> Tensor:
        own = scale / spread
        return torch.stack([value + offset * own, raw_positive(own)], -1)

    return start


def _von_mises(params: Tensor) -> Distribution:
    loc, raw = params.unbind(-1)
    # Far above this, torch's rejection sampler does not end.
    return _StableVonMises(loc, positive(raw.clamp(max=math.log(1e6))), validate_args=False)


def _von_mises_start(value: Tensor, scale: Tensor) -> Tensor:
    """Circular mean at the value, concentration 1 / scale^2."""
    return torch.stack([value, raw_positive(scale.square().reciprocal())], -1)


OWN_TYPES: dict[type, OwnType] = {
    torch.distributions.Chi2: OwnType(1, _chi2, _at_multiple(1.0)),
    torch.distributions.Gamma: OwnType(2, _gamma, _gamma_start),
    dist.InverseGamma: OwnType(2, _inverse_gamma, _gamma_start),
    getattr(torch.distributions, "InverseGamma", dist.InverseGamma): OwnType(2, _inverse_gamma, _gamma_start),
    torch.distributions.Exponential: OwnType(1, _exponential, _at_multiple(1 / _LOG_TWO)),
    torch.distributions.HalfNormal: OwnType(1, _half_normal, _at_multiple(1 / 0.6744897501960817)),
    torch.distributions.HalfCauchy: OwnType(1, _half_cauchy, _at_multiple(1.0)),
    torch.distributions.Weibull: OwnType(2, _weibull, _weibull_start),
    torch.distributions.Beta: OwnType(2, _beta, _beta_start),
    torch.distributions.Kumaraswamy: OwnType(2, _kumaraswamy, _kumaraswamy_start),
    torch.distributions.Dirichlet: OwnType(None, _dirichlet, _dirichlet_start),
    torch.distributions.StudentT: OwnType(3, _student_t, _student_t_start),
    torch.distributions.VonMises: OwnType(2, _von_mises, _von_mises_start),
    torch.distributions.Laplace: OwnType(2, _loc_scale(dist.Laplace), _loc_scale_start(math.sqrt(2.0))),
    dist.Logistic: OwnType(2, _loc_scale(dist.Logistic), _loc_scale_start(math.pi / math.sqrt(3.0))),
    torch.distributions.Cauchy: OwnType(2, _loc_scale(dist.Cauchy), _loc_scale_start(1.0)),
    torch.distributions.Gumbel: OwnType(
        2, _loc_scale(dist.Gumbel), _loc_scale_start(math.pi / math.sqrt(6.0), math.log(_LOG_TWO))
    ),
}
