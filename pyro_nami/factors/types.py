"""The table of distribution types: one row holds what is known of a type. New types are added here.

A row has a formula for the anchor, and says what factors of the model's own type are made of. It
serves derived classes as well. A type without a row is covered by its support alone.
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
from torch.distributions.utils import euler_constant

from pyro_nami.factors.bijections import NearlyIdentity
from pyro_nami.factors.elements import StableKumaraswamy
from pyro_nami.factors.links import POSITIVE, RATE, REAL, Link, log, within
from pyro_nami.factors.wrappers import innermost

__all__ = ["TYPES", "Row", "num_classes", "type_of"]

_LOG_TWO = math.log(2.0)
_PI = math.pi
_GUMBEL = _PI / math.sqrt(6.0)  # standard deviation of a Gumbel variable
_UNIFORM_LOGIT = _PI / math.sqrt(3.0)  # standard deviation of the logit of a uniform variable

Anchor = tuple[Tensor, Tensor]


class Row(NamedTuple):
    """What is known of a type; what is left out is not.

    ``anchor`` takes a prior to location and scale of ``bijection_to(support).inv(x)``: mean and standard deviation
    where these exist. ``links`` are for factors of the model's own type: how each parameter is made of raw ones,
    ``(*batch, E)``. A vector parameter is the only one of its type, and has raw ones ``(*batch, E, k)``.
    """

    anchor: Callable[[Any], Anchor] | None = None
    links: Mapping[str, Link] = {}  # name of a parameter -> its link function
    given: str | None = None  # a parameter that is the prior's own
    vector: bool = False  # whether the parameter is a vector
    make: Callable[..., td.Distribution] | None = None  # by parameters, in place of the type
    is_hard: bool = (
        False  # whether values are discrete, on a continuous support, as no factor gives them
    )


def type_of(prior: td.Distribution) -> Row:
    """Returns the row of a distribution, found below its wrappers; an empty one if it has none.

    Example:
        >>> list(type_of(dist.Gamma(torch.ones(3), 1.0).to_event(1)).links)
        ['concentration', 'rate']
    """
    return next((TYPES[kind] for kind in type(innermost(prior)).__mro__ if kind in TYPES), _UNKNOWN)


def num_classes(distribution: td.Distribution) -> int | None:
    """Returns how many classes the values of a distribution are; None where they are not classes."""
    leaf = innermost(distribution)
    return leaf.logits.shape[-1] if isinstance(leaf, td.Categorical) else None


def _scale_only(*, mean: float, deviation: float) -> Row:
    """Returns the row of a type with a scale only, by the moments of its standard form's logarithm."""

    def anchor(prior: Any) -> Anchor:
        return log(prior.scale) + mean, torch.full_like(prior.scale, deviation)

    return Row(anchor, {"scale": POSITIVE})


def _von_mises_anchor(prior: Any) -> Anchor:
    # The circular standard deviation, between that of the tangent Normal and that of a uniform angle.
    concentration = prior.concentration
    ratio = torch.special.i1e(concentration) / torch.special.i0e(concentration)
    tiny = torch.finfo(ratio.dtype).tiny
    circular = (-2 * log(ratio)).clamp(min=tiny).sqrt()
    scale = torch.maximum(circular, concentration.clamp(min=tiny).rsqrt())
    return prior.loc, scale.clamp(max=_UNIFORM_LOGIT)


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


def _weibull_anchor(prior: Any) -> Anchor:
    spread = prior.concentration.reciprocal()
    return log(prior.scale) - euler_constant * spread, spread * _GUMBEL


def _uniform_anchor(prior: Any) -> Anchor:
    if not NearlyIdentity.suits(prior.support):
        return torch.zeros_like(prior.low), torch.full_like(prior.low, _UNIFORM_LOGIT)
    # Of atanh(u) with u uniform between 0 and 1 the mean is log(2), and that of the square pi^2 / 12.
    share = prior.high / (prior.high - prior.low)
    mean = _LOG_TWO * (share * prior.high + (1 - share) * prior.low)
    square = _PI**2 / 12 * (share * prior.high.square() + (1 - share) * prior.low.square())
    return mean, (square - mean.square()).sqrt()


def _beta_anchor(prior: Any) -> Anchor:
    return _log_ratio(prior.concentration1, prior.concentration0)


def _dirichlet_anchor(prior: Any) -> Anchor:
    # Stick k is Beta(a_k, sum of the later a); torch shifts its logit by the log of the number of later entries.
    concentration = prior.concentration
    later = concentration.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    count = torch.arange(later.shape[-1], 0, -1, dtype=later.dtype, device=later.device)
    return _log_ratio(concentration[..., :-1], later, count.log())


def _lkj_anchor(prior: Any) -> Anchor:
    # Partial correlations in column j are 2 Beta(b, b) - 1 with b = concentration + (dim - 2 - j) / 2, by the density;
    # torch's sampler departs from it above dim 2.
    column = torch.tril_indices(prior.dim, prior.dim, -1, device=prior.concentration.device)[1]
    b = prior.concentration.unsqueeze(-1) + 0.5 * (prior.dim - 2 - column)
    return torch.zeros_like(b), 0.5 * _log_ratio(b, b)[1]


def _gamma_poisson(concentration: Tensor, rate: Tensor, **options: Any) -> td.Distribution:
    return td.NegativeBinomial(concentration, logits=-rate.log(), **options)


_LOC_SCALE = operator.attrgetter("loc", "scale")
_MOMENTS = operator.attrgetter("mean", "stddev")
_UNKNOWN = Row()
_LOCATION_SCALE = Row(_MOMENTS, {"loc": REAL, "scale": POSITIVE})
_CONCENTRATION_RATE = {"concentration": POSITIVE, "rate": RATE}
_CONCENTRATIONS = {"concentration1": POSITIVE, "concentration0": POSITIVE}
_LOGITS = {"logits": REAL}
_INVERSE_GAMMA = Row(_inverse_gamma_anchor, _CONCENTRATION_RATE, make=dist.InverseGamma)

TYPES: dict[type, Row] = {
    # on the real line
    td.Normal: Row(_MOMENTS),
    td.MultivariateNormal: Row(_MOMENTS),
    td.LowRankMultivariateNormal: Row(_MOMENTS),
    td.Laplace: _LOCATION_SCALE,
    dist.Logistic: _LOCATION_SCALE,
    td.Gumbel: _LOCATION_SCALE,
    td.Cauchy: Row(_LOC_SCALE, {"loc": REAL, "scale": POSITIVE}),
    td.StudentT: Row(_LOC_SCALE, {"df": POSITIVE, "loc": REAL, "scale": POSITIVE}),
    dist.MultivariateStudentT: Row(
        lambda prior: (prior.loc, prior.scale_tril.square().sum(-1).sqrt())
    ),
    td.VonMises: Row(_von_mises_anchor),
    # positive
    td.LogNormal: Row(_LOC_SCALE),
    td.Gamma: Row(_gamma_anchor, _CONCENTRATION_RATE),
    td.Chi2: Row(_gamma_anchor, {"df": POSITIVE}),
    td.InverseGamma: _INVERSE_GAMMA,
    dist.InverseGamma: _INVERSE_GAMMA,
    td.Exponential: Row(
        lambda prior: (-euler_constant - log(prior.rate), torch.full_like(prior.rate, _GUMBEL)),
        {"rate": RATE},
    ),
    td.HalfNormal: _scale_only(
        mean=-0.5 * (euler_constant + _LOG_TWO), deviation=_PI / math.sqrt(8.0)
    ),
    td.HalfCauchy: _scale_only(mean=0.0, deviation=_PI / 2),
    td.Weibull: Row(_weibull_anchor, {"scale": POSITIVE, "concentration": POSITIVE}),
    td.Pareto: Row(
        lambda prior: _log_ratio(torch.ones_like(prior.alpha), prior.alpha, log(prior.scale))
    ),
    td.FisherSnedecor: Row(
        lambda prior: _log_ratio(prior.df1 / 2, prior.df2 / 2, log(prior.df2) - log(prior.df1))
    ),
    # bounded
    td.Uniform: Row(_uniform_anchor),
    td.Beta: Row(_beta_anchor, _CONCENTRATIONS),
    dist.AffineBeta: Row(_beta_anchor),
    td.Kumaraswamy: Row(None, _CONCENTRATIONS, make=StableKumaraswamy),
    td.Dirichlet: Row(_dirichlet_anchor, {"concentration": POSITIVE}, vector=True),
    td.LKJCholesky: Row(_lkj_anchor),
    # discrete
    td.Bernoulli: Row(None, _LOGITS),
    td.Categorical: Row(None, _LOGITS, vector=True),
    td.OneHotCategorical: Row(None, _LOGITS, vector=True),
    td.OneHotCategoricalStraightThrough: Row(None, _LOGITS, vector=True),
    td.Geometric: Row(None, _LOGITS, make=dist.Geometric),  # finite far out, as torch's is not
    td.Poisson: Row(None, {"rate": POSITIVE}),
    td.NegativeBinomial: Row(None, {"total_count": POSITIVE, "logits": REAL}),
    dist.GammaPoisson: Row(None, _CONCENTRATION_RATE, make=_gamma_poisson),
    td.Binomial: Row(None, _LOGITS, given="total_count"),
    dist.BetaBinomial: Row(None, _CONCENTRATIONS, given="total_count"),
    # relaxed, with hard values
    dist.RelaxedBernoulliStraightThrough: Row(is_hard=True),
    dist.RelaxedOneHotCategoricalStraightThrough: Row(is_hard=True),
}
