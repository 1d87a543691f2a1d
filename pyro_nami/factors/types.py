"""The table of distribution types: one row holds what is known of a type. New types are added here.

A row holds formulas for the anchor and for a factor of the model's own type; it serves derived
classes as well. A type without a row is covered by its support alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_nami.factors.bijections import NearlyIdentity
from pyro_nami.factors.elements import (
    ExpRelaxedElements,
    LogisticElements,
    StableKumaraswamy,
    StableVonMises,
)
from pyro_nami.factors.layout import Layout, LogLayout, UnconstrainedLayout
from pyro_nami.factors.links import POSITIVE, RATE, REAL, Link, log, positive, raw_positive, within
from pyro_nami.factors.wrappers import innermost

__all__ = ["TYPES", "Row", "type_of"]

_EULER = 0.5772156649015329
_LOG_TWO = math.log(2.0)
_PI = math.pi

Anchor = tuple[Tensor, Tensor]
RawParameters = tuple[Tensor, ...]


class Row(NamedTuple):
    """What is known of a type; what is left out is not.

    ``anchor`` takes a prior to location and scale of ``bijection_to(support).inv(x)``: mean and standard deviation
    where these exist. ``make`` gives a factor of the model's own type (a distribution or `Elements`), from parameters
    by name. These are functions of raw ones ``(*batch, E)``, one for each link; of a vector, there is one,
    ``(*batch, E, k)``. ``start`` takes an element's value ``(*batch, E, *element)`` and scale ``(*batch, E)`` in
    unconstrained space to raw parameters there; without it these are the prior's, and the network's are added.
    """

    anchor: Callable[[Any], Anchor] | None = None
    make: Callable[..., Any] | None = None
    links: Mapping[str, Link] = {}  # name of a parameter -> its link function
    start: Callable[[Tensor, Tensor], RawParameters] | None = None
    vector: bool = False  # whether there is one parameter, a vector
    given: str | None = None  # a parameter that is the prior's own
    layout_type: type[Layout] = Layout  # of continuous values as elements
    # whether it is a Normal in unconstrained space, so that this is its own type
    normal: bool = False
    classes: bool = False  # whether its values are classes, which its support does not tell
    # whether the model draws hard values of a relaxed variable, which no factor gives
    hard: bool = False


def type_of(prior: td.Distribution) -> Row:
    """Returns the row of a distribution, found below its wrappers; an empty one if it has none.

    Example:
        >>> type_of(dist.Normal(torch.zeros(3), 1.0).to_event(1)).normal
        True
    """
    return next((TYPES[kind] for kind in type(innermost(prior)).__mro__ if kind in TYPES), _UNKNOWN)


def _location_scale(
    make: Callable, *, deviation: float, mean: float = 0.0, median: float = 0.0
) -> Row:
    """Returns the row of a type with location and scale, by the numbers of its standard form; `start` at the median."""

    def start(value: Tensor, scale: Tensor) -> RawParameters:
        own = scale / deviation
        return value - median * own, raw_positive(own)

    def anchor(prior: Any) -> Anchor:
        return prior.loc + mean * prior.scale, prior.scale * deviation

    return Row(anchor, make, {"loc": REAL, "scale": POSITIVE}, start)


def _student_t_start(value: Tensor, scale: Tensor) -> RawParameters:
    """Location and scale at the given ones, ten degrees of freedom."""
    return torch.full_like(value, math.log(10.0)), value, raw_positive(scale)


def _von_mises_anchor(prior: Any) -> Anchor:
    # The circular standard deviation, between that of the tangent Normal and that of a uniform angle.
    concentration = prior.concentration
    ratio = torch.special.i1e(concentration) / torch.special.i0e(concentration)
    tiny = torch.finfo(ratio.dtype).tiny
    circular = (-2 * log(ratio)).clamp(min=tiny).sqrt()
    scale = torch.maximum(circular, concentration.clamp(min=tiny).rsqrt())
    return prior.loc, scale.clamp(max=_PI / math.sqrt(3.0))


def _von_mises_start(value: Tensor, scale: Tensor) -> RawParameters:
    """Circular mean at the value, concentration 1 / scale^2."""
    return value, raw_positive(scale.square().reciprocal())


# Far above this, torch's rejection sampler does not end.
_CONCENTRATION = Link(lambda raw: positive(within(raw, high=math.log(1e6))), log)


def _log_ratio(one: Tensor, zero: Tensor | None = None, shift: float | Tensor = 0.0) -> Anchor:
    """Returns mean and standard deviation of a shift plus the log ratio of standard Gamma variables, or one's log."""
    one = within(one, 0.01)  # below, such a variable underflows in single precision anyway
    mean, variance = one.digamma(), torch.polygamma(1, one)
    if zero is not None:
        zero = within(zero, 0.01)
        mean, variance = mean - zero.digamma(), variance + torch.polygamma(1, zero)
    return mean + shift, variance.sqrt()


def _gamma_anchor(prior: Any) -> Anchor:
    return _log_ratio(prior.concentration, shift=-log(prior.rate))


def _inverse_gamma_anchor(prior: Any) -> Anchor:
    mean, scale = _gamma_anchor(prior)
    return -mean, scale


def _gamma(concentration: Tensor, mean: Tensor, **options: Any) -> td.Distribution:
    return dist.Gamma(concentration, concentration / mean, **options)


def _inverse_gamma(concentration: Tensor, center: Tensor, **options: Any) -> td.Distribution:
    return dist.InverseGamma(concentration, concentration * center, **options)


def _gamma_start(value: Tensor, scale: Tensor) -> RawParameters:
    """Mean at the value, standard deviation of the logarithm at the scale (trigamma(a) is about 1/a + 1/(2 a^2))."""
    square = scale.square()
    return raw_positive((1 + (1 + 2 * square).sqrt()) / (2 * square)), raw_positive(value)


def _scale_only(make: Callable, log_mean: float, log_deviation: float, *, median: float) -> Row:
    """Returns the row of a type with a scale only, by the numbers of its standard form."""

    def anchor(prior: Any) -> Anchor:
        return log(prior.scale) + log_mean, torch.full_like(prior.scale, log_deviation)

    return Row(anchor, make, {"scale": POSITIVE}, _median_at_value(median))


def _median_at_value(median: float) -> Callable[[Tensor, Tensor], RawParameters]:
    """Returns the start of a type with one parameter, by the median of its standard form."""
    return lambda value, scale: (raw_positive(value * (1 / median)),)


def _exponential_anchor(prior: Any) -> Anchor:
    return -_EULER - log(prior.rate), torch.full_like(prior.rate, _PI / math.sqrt(6.0))


def _weibull_anchor(prior: Any) -> Anchor:
    spread = prior.concentration.reciprocal()
    return log(prior.scale) - _EULER * spread, spread * (_PI / math.sqrt(6.0))


def _weibull_start(value: Tensor, scale: Tensor) -> RawParameters:
    """Median at the value, standard deviation of the logarithm at the scale."""
    concentration = _PI / math.sqrt(6.0) / scale
    return raw_positive(value) - math.log(_LOG_TWO) / concentration, raw_positive(concentration)


def _uniform_anchor(prior: Any) -> Anchor:
    if not NearlyIdentity.suits(prior.support):
        return torch.zeros_like(prior.low), torch.full_like(prior.low, _PI / math.sqrt(3.0))
    # Of atanh(u) with u uniform between 0 and 1 the mean is log(2), and that of the square pi^2 / 12.
    share = prior.high / (prior.high - prior.low)
    mean = _LOG_TWO * (share * prior.high + (1 - share) * prior.low)
    square = _PI**2 / 12 * (share * prior.high.square() + (1 - share) * prior.low.square())
    return mean, (square - mean.square()).sqrt()


def _beta_anchor(prior: Any) -> Anchor:
    return _log_ratio(prior.concentration1, prior.concentration0)


def _beta(logit: Tensor, log_total: Tensor, **options: Any) -> td.Distribution:
    one, zero = positive(log_total + logsigmoid(logit)), positive(log_total + logsigmoid(-logit))
    return dist.Beta(one, zero, **options)


def _beta_start(value: Tensor, scale: Tensor) -> RawParameters:
    """Mean at the value, standard deviation of the logit near the scale."""
    return value.logit(), raw_positive(1 / (scale.square() * value * (1 - value)))


def _kumaraswamy_start(value: Tensor, scale: Tensor) -> RawParameters:
    """Median at the value, logit spread near the scale.

    With w = 2^(-1/b) the median is (1 - w)^(1/a), and the density of the logit there is
    a b (1 - w) (1 - value) / (2 w), to be equated with a Normal's. It grows only with log b, so narrow factors near 0
    need a b beyond any precision: b stays below 1000, and the spread is then wider than asked.
    """
    target = 1 / (math.sqrt(2 * _PI) * scale)
    grid = torch.linspace(
        math.log(0.05), math.log(1000.0), 400, dtype=value.dtype, device=value.device
    )
    log_w = -_LOG_TWO / grid.exp()
    log_one_minus_w = (-log_w.expm1()).log()
    a = log_one_minus_w / value.log().unsqueeze(-1)
    log_density = (
        a.log() + grid + log_one_minus_w + (-value).log1p().unsqueeze(-1) - _LOG_TWO - log_w
    )
    best = (log_density - target.log().unsqueeze(-1)).abs().argmin(-1, keepdim=True)
    return raw_positive(a.gather(-1, best).squeeze(-1)), grid[best.squeeze(-1)]


def _dirichlet_anchor(prior: Any) -> Anchor:
    # Stick k is Beta(a_k, sum of the later a); torch shifts its logit by the log of the number of later entries.
    concentration = prior.concentration
    later = concentration.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    count = torch.arange(later.shape[-1], 0, -1, dtype=later.dtype, device=later.device)
    return _log_ratio(concentration[..., :-1], later, count.log())


def _dirichlet_start(value: Tensor, scale: Tensor) -> RawParameters:
    """Mean at the value, total concentration by the mean over entries of the Beta rule."""
    total = (1 / (value * (1 - value)).clamp(min=torch.finfo(value.dtype).eps)).mean(
        -1
    ) / scale.square()
    return (raw_positive(value * total.unsqueeze(-1)),)


def _lkj_anchor(prior: Any) -> Anchor:
    # Partial correlations in column j are 2 Beta(b, b) - 1 with b = concentration + (dim - 2 - j) / 2, by the density;
    # torch's sampler departs from it above dim 2.
    column = torch.tril_indices(prior.dim, prior.dim, -1, device=prior.concentration.device)[1]
    b = prior.concentration.unsqueeze(-1) + 0.5 * (prior.dim - 2 - column)
    return torch.zeros_like(b), 0.5 * _log_ratio(b, b)[1]


def _gamma_poisson(concentration: Tensor, rate: Tensor, **options: Any) -> td.Distribution:
    return dist.NegativeBinomial(concentration, logits=-rate.log(), **options)


_LOC_SCALE = operator.attrgetter("loc", "scale")
_UNKNOWN = Row()
_NORMAL = Row(_LOC_SCALE, normal=True)
_MULTIVARIATE_NORMAL = Row(lambda prior: (prior.loc, prior.variance.sqrt()), normal=True)
_BY_CONCENTRATIONS = {"concentration1": POSITIVE, "concentration0": POSITIVE}
_BY_LOGITS = {"logits": REAL}
_INVERSE_GAMMA = Row(
    _inverse_gamma_anchor,
    _inverse_gamma,
    {"concentration": POSITIVE, "center": POSITIVE},
    _gamma_start,
)

TYPES: dict[type, Row] = {
    # on the real line
    td.Normal: _NORMAL,
    td.MultivariateNormal: _MULTIVARIATE_NORMAL,
    td.LowRankMultivariateNormal: _MULTIVARIATE_NORMAL,
    td.Laplace: _location_scale(dist.Laplace, deviation=math.sqrt(2.0)),
    dist.Logistic: _location_scale(dist.Logistic, deviation=_PI / math.sqrt(3.0)),
    td.Gumbel: _location_scale(
        dist.Gumbel, deviation=_PI / math.sqrt(6.0), mean=_EULER, median=-math.log(_LOG_TWO)
    ),
    td.Cauchy: _location_scale(dist.Cauchy, deviation=1.0),
    td.StudentT: Row(
        _LOC_SCALE,
        dist.StudentT,
        {"df": POSITIVE, "loc": REAL, "scale": POSITIVE},
        _student_t_start,
    ),
    dist.MultivariateStudentT: Row(
        lambda prior: (prior.loc, prior.scale_tril.square().sum(-1).sqrt())
    ),
    td.VonMises: Row(
        _von_mises_anchor,
        StableVonMises,
        {"loc": REAL, "concentration": _CONCENTRATION},
        _von_mises_start,
    ),
    # positive
    td.LogNormal: _NORMAL,
    td.Gamma: Row(
        _gamma_anchor, _gamma, {"concentration": POSITIVE, "mean": POSITIVE}, _gamma_start
    ),
    td.Chi2: Row(_gamma_anchor, dist.Chi2, {"df": POSITIVE}, _median_at_value(1.0)),
    td.InverseGamma: _INVERSE_GAMMA,
    dist.InverseGamma: _INVERSE_GAMMA,
    td.Exponential: Row(
        _exponential_anchor, dist.Exponential, {"rate": RATE}, _median_at_value(_LOG_TWO)
    ),
    td.HalfNormal: _scale_only(
        dist.HalfNormal, -0.5 * (_EULER + _LOG_TWO), _PI / math.sqrt(8.0), median=0.6744897501960817
    ),
    td.HalfCauchy: _scale_only(dist.HalfCauchy, 0.0, _PI / 2, median=1.0),
    td.Weibull: Row(
        _weibull_anchor,
        dist.Weibull,
        {"scale": POSITIVE, "concentration": POSITIVE},
        _weibull_start,
    ),
    td.Pareto: Row(
        lambda prior: _log_ratio(torch.ones_like(prior.alpha), prior.alpha, log(prior.scale))
    ),
    td.FisherSnedecor: Row(
        lambda prior: _log_ratio(prior.df1 / 2, prior.df2 / 2, log(prior.df2) - log(prior.df1))
    ),
    # bounded
    td.Uniform: Row(_uniform_anchor),
    td.Beta: Row(_beta_anchor, _beta, {"logit": REAL, "log_total": REAL}, _beta_start),
    dist.AffineBeta: Row(_beta_anchor),
    td.Kumaraswamy: Row(None, StableKumaraswamy, _BY_CONCENTRATIONS, _kumaraswamy_start),
    td.Dirichlet: Row(
        _dirichlet_anchor,
        dist.Dirichlet,
        {"concentration": POSITIVE},
        _dirichlet_start,
        vector=True,
    ),
    td.LKJCholesky: Row(_lkj_anchor),
    # discrete
    td.Bernoulli: Row(None, dist.Bernoulli, _BY_LOGITS),
    td.Categorical: Row(None, dist.Categorical, _BY_LOGITS, vector=True, classes=True),
    td.OneHotCategorical: Row(None, dist.OneHotCategorical, _BY_LOGITS, vector=True),
    td.OneHotCategoricalStraightThrough: Row(
        None, dist.OneHotCategoricalStraightThrough, _BY_LOGITS, vector=True
    ),
    td.Geometric: Row(None, dist.Geometric, _BY_LOGITS),
    td.Poisson: Row(None, dist.Poisson, {"rate": POSITIVE}),
    td.NegativeBinomial: Row(
        None, dist.NegativeBinomial, {"total_count": POSITIVE, "logits": REAL}
    ),
    dist.GammaPoisson: Row(None, _gamma_poisson, {"concentration": POSITIVE, "rate": RATE}),
    td.Binomial: Row(None, dist.Binomial, _BY_LOGITS, given="total_count"),
    dist.BetaBinomial: Row(None, dist.BetaBinomial, _BY_CONCENTRATIONS, given="total_count"),
    # relaxed
    td.RelaxedBernoulli: Row(
        None, LogisticElements, _BY_LOGITS, given="temperature", layout_type=UnconstrainedLayout
    ),
    td.RelaxedOneHotCategorical: Row(
        None,
        ExpRelaxedElements,
        _BY_LOGITS,
        vector=True,
        given="temperature",
        layout_type=LogLayout,
    ),
    dist.RelaxedBernoulliStraightThrough: Row(given="temperature", hard=True),
    dist.RelaxedOneHotCategoricalStraightThrough: Row(given="temperature", hard=True),
}
