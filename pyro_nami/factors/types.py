"""The table of distribution types: what is known of each, in one row. The place to add a type.

A row holds formulas: the anchor, which is location and scale of the model's own conditional in unconstrained space, and
the factor of the model's own type, which raw parameters make by link functions. A type without a row is covered by its
support alone. Rows serve the types derived from theirs as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.factors.layout import Layout, LogLayout, UnconstrainedLayout
from pyro_nami.factors.links import log, positive, raw_positive
from pyro_nami.factors.relaxed import ExpRelaxedElements, LogisticElements
from pyro_nami.factors.stable import StableKumaraswamy, StableVonMises
from pyro_nami.factors.wrappers import innermost

__all__ = ["TYPES", "DistributionType", "OwnType", "type_of"]

_EULER = 0.5772156649015329
_LOG_TWO = math.log(2.0)
_PI = math.pi

Parts = tuple[Tensor, ...]


class OwnType(NamedTuple):
    """A factor of the model's own type.

    Raw parameters come as k tensors ``(*batch, E)``; of a vector, as one, ``(*batch, E, k)``.

    Attributes:
        make: the type, called with what `parameters` gives.
        num_params: k; None for as many as a vector has entries.
        parameters: raw parameters to the type's parameters by name.
        start: an element's value ``(*batch, E, *element)`` and scale ``(*batch, E)`` in unconstrained space to raw
            parameters there. Continuous types, which have no anchor.
        of_prior: a prior to its raw parameters, which are the anchor: the network's are added. Other types.
        given: the parameter that is the prior's own.
        layout_type: of values as elements.
    """

    make: type
    num_params: int | None
    parameters: Callable[..., Mapping[str, Tensor]]
    start: Callable[[Tensor, Tensor], Parts] | None = None
    of_prior: Callable[[Any], Parts] | None = None
    given: str | None = None
    layout_type: type[Layout] = Layout


class DistributionType(NamedTuple):
    """A row of the table; what is left out is not known.

    Attributes:
        anchor: location and scale of ``bijection_to(support).inv(x)``, its mean and standard deviation where these
            exist, as functions of the parameters: gradients flow.
        own: the factor of the model's own type.
        normal: whether it is a Normal in unconstrained space, so that this is its own type.
        classes: whether its values are classes, which its support does not tell.
        hard: whether the model sees hard values of a relaxed variable, which no factor of that type would give.
    """

    anchor: Callable[[Any], tuple[Tensor, Tensor]] | None = None
    own: OwnType | None = None
    normal: bool = False
    classes: bool = False
    hard: bool = False


def type_of(prior: Distribution) -> DistributionType:
    """Returns the row of a distribution, found below its wrappers; an empty one if it has none.

    Example:
        >>> type_of(dist.Normal(torch.zeros(3), 1.0).to_event(1)).normal
        True
    """
    return next((TYPES[kind] for kind in type(innermost(prior)).__mro__ if kind in TYPES), _UNKNOWN)


# Logarithms of Gamma variables --------------------------------------------------------------------------------------


def _log_gamma(concentration: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and variance of the logarithm of a standard Gamma variable."""
    # Below 0.01 such a variable underflows in single precision anyway.
    concentration = concentration.clamp(min=0.01)
    return concentration.digamma(), torch.polygamma(1, concentration)


def _log_ratio(concentration1: Tensor, concentration0: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation of the log ratio of two standard Gamma variables (a logit-Beta)."""
    mean1, variance1 = _log_gamma(concentration1)
    mean0, variance0 = _log_gamma(concentration0)
    return mean1 - mean0, (variance1 + variance0).sqrt()


def _gamma_anchor(prior: Any) -> tuple[Tensor, Tensor]:
    mean, variance = _log_gamma(prior.concentration)
    return mean - log(prior.rate), variance.sqrt()


def _gamma_start(value: Tensor, scale: Tensor) -> Parts:
    """Mean at the value, standard deviation of the logarithm at the scale (trigamma(a) is about 1/a + 1/(2 a^2))."""
    square = scale.square()
    return raw_positive((1 + (1 + 2 * square).sqrt()) / (2 * square)), raw_positive(value)


def _inverse_gamma_anchor(prior: Any) -> tuple[Tensor, Tensor]:
    mean, variance = _log_gamma(prior.concentration)
    return log(prior.rate) - mean, variance.sqrt()


def _beta_anchor(prior: Any) -> tuple[Tensor, Tensor]:
    return _log_ratio(prior.concentration1, prior.concentration0)


def _beta_parameters(logit: Tensor, log_total: Tensor) -> dict[str, Tensor]:
    logsigmoid = torch.nn.functional.logsigmoid
    return {
        "concentration1": positive(log_total + logsigmoid(logit)),
        "concentration0": positive(log_total + logsigmoid(-logit)),
    }


def _beta_start(value: Tensor, scale: Tensor) -> Parts:
    """Mean at the value, standard deviation of the logit near the scale."""
    return value.logit(), raw_positive(1 / (scale.square() * value * (1 - value)))


def _pareto_anchor(prior: Any) -> tuple[Tensor, Tensor]:
    # x - scale over scale is the ratio of Gamma(1) and Gamma(alpha) variables.
    mean, scale = _log_ratio(torch.ones_like(prior.alpha), prior.alpha)
    return mean + log(prior.scale), scale


def _fisher_snedecor_anchor(prior: Any) -> tuple[Tensor, Tensor]:
    mean, scale = _log_ratio(prior.df1 / 2, prior.df2 / 2)
    return mean + log(prior.df2) - log(prior.df1), scale


def _dirichlet_anchor(prior: Any) -> tuple[Tensor, Tensor]:
    # Stick k is Beta(a_k, sum of the later a); torch shifts its logit by the log of the number of later entries.
    concentration = prior.concentration
    later = concentration.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    mean, scale = _log_ratio(concentration[..., :-1], later)
    count = torch.arange(concentration.shape[-1] - 1, 0, -1, dtype=mean.dtype, device=mean.device)
    return mean + count.log(), scale


def _dirichlet_start(value: Tensor, scale: Tensor) -> Parts:
    """Mean at the value, total concentration by the mean over entries of the Beta rule."""
    total = (1 / (value * (1 - value)).clamp(min=torch.finfo(value.dtype).eps)).mean(-1) / scale.square()
    return (raw_positive(value * total.unsqueeze(-1)),)


def _lkj_anchor(prior: Any) -> tuple[Tensor, Tensor]:
    # Partial correlations in column j are 2 Beta(b, b) - 1 with b = concentration + (dim - 2 - j) / 2, by the density;
    # torch's sampler departs from it above dim 2.
    column = torch.tril_indices(prior.dim, prior.dim, -1, device=prior.concentration.device)[1]
    b = prior.concentration.unsqueeze(-1) + 0.5 * (prior.dim - 2 - column)
    return torch.zeros_like(b), 0.5 * _log_ratio(b, b)[1]


# Locations and scales -----------------------------------------------------------------------------------------------


def _loc_and_scale(prior: Any) -> tuple[Tensor, Tensor]:
    return prior.loc, prior.scale


def _location_scale(
    make: type, *, deviation: float, mean: float = 0.0, median: float = 0.0
) -> DistributionType:
    """Returns the row of a type with location and scale, by the numbers of its standard form; `start` at the median."""

    def anchor(prior: Any) -> tuple[Tensor, Tensor]:
        return prior.loc + mean * prior.scale, prior.scale * deviation

    def parameters(loc: Tensor, raw: Tensor) -> dict[str, Tensor]:
        return {"loc": loc, "scale": positive(raw)}

    def start(value: Tensor, scale: Tensor) -> Parts:
        own = scale / deviation
        return value - median * own, raw_positive(own)

    return DistributionType(anchor, OwnType(make, 2, parameters, start))


def _scale_only(
    make: type, *, log_mean: float, log_deviation: float, median: float
) -> DistributionType:
    """Returns the row of a positive type with a scale only, by the numbers of its standard form."""

    def anchor(prior: Any) -> tuple[Tensor, Tensor]:
        return log(prior.scale) + log_mean, torch.full_like(prior.scale, log_deviation)

    def parameters(raw: Tensor) -> dict[str, Tensor]:
        return {"scale": positive(raw)}

    return DistributionType(anchor, OwnType(make, 1, parameters, _median_at_value(median)))


def _median_at_value(median: float) -> Callable[[Tensor, Tensor], Parts]:
    """Returns the start of a positive type with one parameter, by the median of its standard form."""
    return lambda value, scale: (raw_positive(value * (1 / median)),)


def _exponential_anchor(prior: Any) -> tuple[Tensor, Tensor]:
    return -_EULER - log(prior.rate), torch.full_like(prior.rate, _PI / math.sqrt(6.0))


def _weibull_anchor(prior: Any) -> tuple[Tensor, Tensor]:
    spread = prior.concentration.reciprocal()
    return log(prior.scale) - _EULER * spread, spread * (_PI / math.sqrt(6.0))


def _weibull_start(value: Tensor, scale: Tensor) -> Parts:
    """Median at the value, standard deviation of the logarithm at the scale."""
    concentration = _PI / math.sqrt(6.0) / scale
    return raw_positive(value) - math.log(_LOG_TWO) / concentration, raw_positive(concentration)


def _kumaraswamy_start(value: Tensor, scale: Tensor) -> Parts:
    """Median at the value, logit spread near the scale.

    With w = 2^(-1/b) the median is (1 - w)^(1/a), and the density of the logit there is
    a b (1 - w) (1 - value) / (2 w), to be equated with a Normal's. It grows only with log b, so narrow factors near 0
    need a b beyond any precision: b stays below 1000, and the spread is then wider than asked.
    """
    target = 1 / (math.sqrt(2 * _PI) * scale)
    grid = torch.linspace(math.log(0.05), math.log(1000.0), 400, dtype=value.dtype, device=value.device)
    log_w = -_LOG_TWO / grid.exp()
    log_one_minus_w = (-log_w.expm1()).log()
    a = log_one_minus_w / value.log().unsqueeze(-1)
    log_density = a.log() + grid + log_one_minus_w + (-value).log1p().unsqueeze(-1) - _LOG_TWO - log_w
    best = (log_density - target.log().unsqueeze(-1)).abs().argmin(-1, keepdim=True)
    return raw_positive(a.gather(-1, best).squeeze(-1)), grid[best.squeeze(-1)]


def _student_t_start(value: Tensor, scale: Tensor) -> Parts:
    """Location and scale at the given ones, ten degrees of freedom."""
    return torch.full_like(value, math.log(10.0)), value, raw_positive(scale)


def _multivariate_student_t_anchor(prior: Any) -> tuple[Tensor, Tensor]:
    return prior.loc, prior.scale_tril.square().sum(-1).sqrt()


def _von_mises_anchor(prior: Any) -> tuple[Tensor, Tensor]:
    # The circular standard deviation, between that of the tangent Normal and that of a uniform angle.
    concentration = prior.concentration
    ratio = torch.special.i1e(concentration) / torch.special.i0e(concentration)
    tiny = torch.finfo(ratio.dtype).tiny
    circular = (-2 * log(ratio)).clamp(min=tiny).sqrt()
    scale = torch.maximum(circular, concentration.clamp(min=tiny).rsqrt())
    return prior.loc, scale.clamp(max=_PI / math.sqrt(3.0))


def _von_mises_parameters(loc: Tensor, raw: Tensor) -> dict[str, Tensor]:
    # Far above this, torch's rejection sampler does not end.
    return {"loc": loc, "concentration": positive(raw.clamp(max=math.log(1e6)))}


def _von_mises_start(value: Tensor, scale: Tensor) -> Parts:
    """Circular mean at the value, concentration 1 / scale^2."""
    return value, raw_positive(scale.square().reciprocal())


def _uniform_anchor(prior: Any) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(prior.low), torch.full_like(prior.low, _PI / math.sqrt(3.0))


# Discrete types -----------------------------------------------------------------------------------------------------


def _by_logits(make: type, num_params: int | None, **options: Any) -> OwnType:
    """Returns the own type of a discrete distribution, or of its relaxation, whose raw parameters are the logits."""

    def parameters(logits: Tensor) -> dict[str, Tensor]:
        return {"logits": logits}

    return OwnType(make, num_params, parameters, of_prior=lambda prior: (prior.logits,), **options)


def _negative_binomial(of_prior: Callable[[Any], Parts]) -> DistributionType:
    def parameters(log_count: Tensor, logits: Tensor) -> dict[str, Tensor]:
        return {"total_count": positive(log_count), "logits": logits}

    return DistributionType(own=OwnType(dist.NegativeBinomial, 2, parameters, of_prior=of_prior))


# The table ----------------------------------------------------------------------------------------------------------

_UNKNOWN = DistributionType()
_NORMAL = DistributionType(_loc_and_scale, normal=True)
_MULTIVARIATE_NORMAL = DistributionType(lambda prior: (prior.loc, prior.variance.sqrt()), normal=True)
_INVERSE_GAMMA = DistributionType(
    _inverse_gamma_anchor,
    OwnType(
        dist.InverseGamma,
        2,
        lambda a, center: {"concentration": positive(a), "rate": positive(a) * positive(center)},
        _gamma_start,
    ),
)

TYPES: dict[type, DistributionType] = {
    # real
    td.Normal: _NORMAL,
    td.MultivariateNormal: _MULTIVARIATE_NORMAL,
    td.LowRankMultivariateNormal: _MULTIVARIATE_NORMAL,
    td.Laplace: _location_scale(dist.Laplace, deviation=math.sqrt(2.0)),
    dist.Logistic: _location_scale(dist.Logistic, deviation=_PI / math.sqrt(3.0)),
    td.Cauchy: _location_scale(dist.Cauchy, deviation=1.0),
    td.Gumbel: _location_scale(
        dist.Gumbel, deviation=_PI / math.sqrt(6.0), mean=_EULER, median=-math.log(_LOG_TWO)
    ),
    td.StudentT: DistributionType(
        _loc_and_scale,
        OwnType(
            dist.StudentT,
            3,
            lambda log_df, loc, raw: {"df": positive(log_df), "loc": loc, "scale": positive(raw)},
            _student_t_start,
        ),
    ),
    dist.MultivariateStudentT: DistributionType(_multivariate_student_t_anchor),
    td.VonMises: DistributionType(
        _von_mises_anchor, OwnType(StableVonMises, 2, _von_mises_parameters, _von_mises_start)
    ),
    # positive
    td.LogNormal: _NORMAL,
    td.Gamma: DistributionType(
        _gamma_anchor,
        OwnType(
            dist.Gamma,
            2,
            lambda a, mean: {"concentration": positive(a), "rate": positive(a) / positive(mean)},
            _gamma_start,
        ),
    ),
    td.Chi2: DistributionType(
        _gamma_anchor, OwnType(dist.Chi2, 1, lambda raw: {"df": positive(raw)}, _median_at_value(1.0))
    ),
    td.InverseGamma: _INVERSE_GAMMA,
    dist.InverseGamma: _INVERSE_GAMMA,
    td.Exponential: DistributionType(
        _exponential_anchor,
        OwnType(dist.Exponential, 1, lambda raw: {"rate": positive(-raw)}, _median_at_value(_LOG_TWO)),
    ),
    td.HalfNormal: _scale_only(
        dist.HalfNormal,
        log_mean=-0.5 * (_EULER + _LOG_TWO),
        log_deviation=_PI / math.sqrt(8.0),
        median=0.6744897501960817,
    ),
    td.HalfCauchy: _scale_only(dist.HalfCauchy, log_mean=0.0, log_deviation=_PI / 2, median=1.0),
    td.Weibull: DistributionType(
        _weibull_anchor,
        OwnType(
            dist.Weibull, 2, lambda raw, a: {"scale": positive(raw), "concentration": positive(a)}, _weibull_start
        ),
    ),
    td.Pareto: DistributionType(_pareto_anchor),
    td.FisherSnedecor: DistributionType(_fisher_snedecor_anchor),
    # bounded
    td.Uniform: DistributionType(_uniform_anchor),
    td.Beta: DistributionType(
        _beta_anchor, OwnType(dist.Beta, 2, _beta_parameters, _beta_start)
    ),
    dist.AffineBeta: DistributionType(_beta_anchor),
    td.Kumaraswamy: DistributionType(
        own=OwnType(
            StableKumaraswamy,
            2,
            lambda a, b: {"concentration1": positive(a), "concentration0": positive(b)},
            _kumaraswamy_start,
        )
    ),
    td.Dirichlet: DistributionType(
        _dirichlet_anchor,
        OwnType(dist.Dirichlet, None, lambda raw: {"concentration": positive(raw)}, _dirichlet_start),
    ),
    td.LKJCholesky: DistributionType(_lkj_anchor),
    # discrete
    td.Bernoulli: DistributionType(own=_by_logits(dist.Bernoulli, 1)),
    td.Categorical: DistributionType(own=_by_logits(dist.Categorical, None), classes=True),
    td.OneHotCategorical: DistributionType(own=_by_logits(dist.OneHotCategorical, None)),
    td.OneHotCategoricalStraightThrough: DistributionType(
        own=_by_logits(dist.OneHotCategoricalStraightThrough, None)
    ),
    td.Geometric: DistributionType(own=_by_logits(dist.Geometric, 1)),
    td.Binomial: DistributionType(own=_by_logits(dist.Binomial, 1, given="total_count")),
    dist.BetaBinomial: DistributionType(
        own=OwnType(
            dist.BetaBinomial,
            2,
            lambda one, zero: {"concentration1": positive(one), "concentration0": positive(zero)},
            of_prior=lambda prior: (log(prior.concentration1), log(prior.concentration0)),
            given="total_count",
        )
    ),
    td.Poisson: DistributionType(
        own=OwnType(
            dist.Poisson, 1, lambda raw: {"rate": positive(raw)}, of_prior=lambda prior: (log(prior.rate),)
        )
    ),
    td.NegativeBinomial: _negative_binomial(
        lambda prior: (log(prior.total_count), prior.logits)
    ),
    dist.GammaPoisson: _negative_binomial(lambda prior: (log(prior.concentration), -log(prior.rate))),
    # relaxed
    td.RelaxedBernoulli: DistributionType(
        own=_by_logits(LogisticElements, 1, given="temperature", layout_type=UnconstrainedLayout)
    ),
    td.RelaxedOneHotCategorical: DistributionType(
        own=_by_logits(ExpRelaxedElements, None, given="temperature", layout_type=LogLayout)
    ),
    dist.RelaxedBernoulliStraightThrough: DistributionType(hard=True),
    dist.RelaxedOneHotCategoricalStraightThrough: DistributionType(hard=True),
}
