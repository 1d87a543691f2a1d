"""Location and scale of a model's own conditional in unconstrained space: the registry behind prior anchors.

Each entry gives mean and standard deviation of ``bijection_to(support).inv(x)`` for one type (location and scale
where these do not exist). Wrappers are seen through. A type without an entry has no anchor, which stands for (0, 1).
Gradients flow to the distribution's parameters. Change this module to add a type.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.transforms import (
    AffineTransform,
    ExpTransform,
    IndependentTransform,
    SigmoidTransform,
    StickBreakingTransform,
    Transform,
)

__all__ = ["innermost", "location_and_scale", "log", "through_wrappers"]

Moments = tuple[Tensor, Tensor]

_EULER = 0.5772156649015329
_LOG_TWO = math.log(2.0)
_PI = math.pi


def location_and_scale(prior: Distribution) -> Tensor | None:
    """Returns the location and scale of `prior` in unconstrained space, ``(*batch, *unconstrained event, 2)``.

    Scales are kept above the square root of the dtype's smallest number, so that they and their squares can be divided
    by. None where the type has no entry, which stands for (0, 1).

    Example:
        >>> location_and_scale(torch.distributions.LogNormal(torch.tensor(1.0), torch.tensor(2.0)))
        tensor([1., 2.])
    """
    if _moments_of(innermost(prior)) is None:
        return None
    return through_wrappers(prior, _stacked_moments)


def innermost(prior: Distribution) -> Distribution:
    """Returns the distribution below all masked, expanded and independent wrappers."""
    while isinstance(prior, _WRAPPERS):
        prior = prior.base_dist
    return prior


def through_wrappers(prior: Distribution, function: Callable[[Distribution], Tensor]) -> Tensor:
    """Applies `function` to the innermost distribution and returns its tensor at the batch shape of `prior`.

    Args:
        prior: possibly wrapped.
        function: maps a distribution of batch shape ``(*inner)`` to a tensor ``(*inner, *rest)``.

    Returns:
        ``(*batch, *reinterpreted, *rest)``.
    """
    if isinstance(prior, ExpandedDistribution):
        tensor = through_wrappers(prior.base_dist, function)
        rest = tensor.shape[len(prior.base_dist.batch_shape) :]
        return tensor.expand(torch.Size(prior.batch_shape) + rest)
    if isinstance(prior, _WRAPPERS):
        return through_wrappers(prior.base_dist, function)
    return function(prior)


_WRAPPERS = (torch.distributions.Independent, MaskedDistribution, ExpandedDistribution)


def _stacked_moments(prior: Distribution) -> Tensor:
    moments = _moments_of(prior)
    assert moments is not None
    loc, scale = moments(prior)
    return torch.stack((loc, scale.clamp(min=torch.finfo(scale.dtype).tiny ** 0.5)), -1)


def _moments_of(prior: Distribution) -> Callable[..., Moments] | None:
    for kind in type(prior).__mro__:
        if kind in _MOMENTS:
            return _MOMENTS[kind]
    if isinstance(prior, torch.distributions.TransformedDistribution) and _affine_part(prior) is not None:
        return _transformed
    return None


def _affine_part(prior: torch.distributions.TransformedDistribution) -> list[AffineTransform] | None:
    """Returns the affine maps of a location-scale base that are left in unconstrained space, None if there are others.

    A last map that is the bijection of its own support (exp, sigmoid, stick-breaking) drops out there.
    """
    transforms = [_base_transform(transform) for transform in prior.transforms]
    if transforms and isinstance(transforms[-1], (ExpTransform, SigmoidTransform, StickBreakingTransform)):
        transforms = transforms[:-1]
    affine = [transform for transform in transforms if isinstance(transform, AffineTransform)]
    base = innermost(prior.base_dist)
    real = getattr(base.support, "base_constraint", base.support) is dist.constraints.real
    return affine if real and len(affine) == len(transforms) and _moments_of(base) is not None else None


def _base_transform(transform: Transform) -> Transform:
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    return transform


def _transformed(prior: torch.distributions.TransformedDistribution) -> Moments:
    loc, scale = through_wrappers(prior.base_dist, _stacked_moments).unbind(-1)
    for transform in _affine_part(prior) or []:
        slope = torch.as_tensor(transform.scale, dtype=loc.dtype, device=loc.device)
        loc, scale = transform.loc + slope * loc, slope.abs() * scale
    return loc.expand(torch.broadcast_shapes(loc.shape, scale.shape)), scale.expand(loc.shape)


def log(value: Tensor) -> Tensor:
    """Returns the logarithm of a nonnegative number, finite at zero."""
    return value.clamp(min=torch.finfo(value.dtype).tiny).log()


def _log_gamma(concentration: Tensor) -> Moments:
    """Returns mean and variance of the logarithm of a standard Gamma variable."""
    # Below 0.01 such a variable underflows in single precision anyway.
    concentration = concentration.clamp(min=0.01)
    return concentration.digamma(), torch.polygamma(1, concentration)


def _log_ratio(concentration1: Tensor, concentration0: Tensor) -> Moments:
    """Returns mean and standard deviation of the log ratio of two standard Gamma variables (a logit-Beta)."""
    mean1, variance1 = _log_gamma(concentration1)
    mean0, variance0 = _log_gamma(concentration0)
    return mean1 - mean0, (variance1 + variance0).sqrt()


def _loc_scale(prior) -> Moments:
    return prior.loc, prior.scale


def _laplace(prior) -> Moments:
    return prior.loc, prior.scale * math.sqrt(2.0)


def _logistic(prior) -> Moments:
    return prior.loc, prior.scale * (_PI / math.sqrt(3.0))


def _gumbel(prior) -> Moments:
    return prior.loc + _EULER * prior.scale, prior.scale * (_PI / math.sqrt(6.0))


def _von_mises(prior) -> Moments:
    # The circular standard deviation, between that of the tangent Normal and that of a uniform angle.
    concentration = prior.concentration
    ratio = torch.special.i1e(concentration) / torch.special.i0e(concentration)
    tiny = torch.finfo(ratio.dtype).tiny
    circular = (-2 * log(ratio)).clamp(min=tiny).sqrt()
    scale = torch.maximum(circular, concentration.clamp(min=tiny).rsqrt())
    return prior.loc, scale.clamp(max=_PI / math.sqrt(3.0))


def _multivariate_normal(prior) -> Moments:
    return prior.loc, prior.variance.sqrt()


def _multivariate_student_t(prior) -> Moments:
    return prior.loc, prior.scale_tril.square().sum(-1).sqrt()


def _gamma(prior) -> Moments:
    mean, variance = _log_gamma(prior.concentration)
    return mean - log(prior.rate), variance.sqrt()


def _inverse_gamma(prior) -> Moments:
    mean, variance = _log_gamma(prior.concentration)
    return log(prior.rate) - mean, variance.sqrt()


def _exponential(prior) -> Moments:
    return -_EULER - log(prior.rate), torch.full_like(prior.rate, _PI / math.sqrt(6.0))


def _half_normal(prior) -> Moments:
    return log(prior.scale) - 0.5 * (_EULER + _LOG_TWO), torch.full_like(prior.scale, _PI / math.sqrt(8.0))


def _half_cauchy(prior) -> Moments:
    return log(prior.scale), torch.full_like(prior.scale, _PI / 2)


def _weibull(prior) -> Moments:
    spread = prior.concentration.reciprocal()
    return log(prior.scale) - _EULER * spread, spread * (_PI / math.sqrt(6.0))


def _pareto(prior) -> Moments:
    # x - scale over scale is the ratio of Gamma(1) and Gamma(alpha) variables.
    mean, scale = _log_ratio(torch.ones_like(prior.alpha), prior.alpha)
    return mean + log(prior.scale), scale


def _fisher_snedecor(prior) -> Moments:
    mean, scale = _log_ratio(prior.df1 / 2, prior.df2 / 2)
    return mean + log(prior.df2) - log(prior.df1), scale


def _beta(prior) -> Moments:
    return _log_ratio(prior.concentration1, prior.concentration0)


def _uniform(prior) -> Moments:
    return torch.zeros_like(prior.low), torch.full_like(prior.low, _PI / math.sqrt(3.0))


def _dirichlet(prior) -> Moments:
    # Stick k is Beta(a_k, sum of the later a); torch shifts its logit by the log of the number of later entries.
    concentration = prior.concentration
    later = concentration.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    mean, scale = _log_ratio(concentration[..., :-1], later)
    count = torch.arange(concentration.shape[-1] - 1, 0, -1, dtype=mean.dtype, device=mean.device)
    return mean + count.log(), scale


def _lkj_cholesky(prior) -> Moments:
    # Partial correlations in column j are 2 Beta(b, b) - 1 with b = concentration + (dim - 2 - j) / 2, by the density;
    # torch's sampler departs from it above dim 2.
    column = torch.tril_indices(prior.dim, prior.dim, -1, device=prior.concentration.device)[1]
    b = prior.concentration.unsqueeze(-1) + 0.5 * (prior.dim - 2 - column)
    return torch.zeros_like(b), 0.5 * _log_ratio(b, b)[1]


_MOMENTS: dict[type, Callable[..., Moments]] = {
    torch.distributions.Normal: _loc_scale,
    torch.distributions.Cauchy: _loc_scale,
    torch.distributions.StudentT: _loc_scale,
    torch.distributions.LogNormal: _loc_scale,
    torch.distributions.Laplace: _laplace,
    dist.Logistic: _logistic,
    torch.distributions.Gumbel: _gumbel,
    torch.distributions.VonMises: _von_mises,
    torch.distributions.MultivariateNormal: _multivariate_normal,
    torch.distributions.LowRankMultivariateNormal: _multivariate_normal,
    dist.MultivariateStudentT: _multivariate_student_t,
    torch.distributions.Gamma: _gamma,
    dist.InverseGamma: _inverse_gamma,
    getattr(torch.distributions, "InverseGamma", dist.InverseGamma): _inverse_gamma,
    torch.distributions.Exponential: _exponential,
    torch.distributions.HalfNormal: _half_normal,
    torch.distributions.HalfCauchy: _half_cauchy,
    torch.distributions.Weibull: _weibull,
    torch.distributions.Pareto: _pareto,
    torch.distributions.FisherSnedecor: _fisher_snedecor,
    torch.distributions.Beta: _beta,
    dist.AffineBeta: _beta,
    torch.distributions.Uniform: _uniform,
    torch.distributions.Dirichlet: _dirichlet,
    torch.distributions.LKJCholesky: _lkj_cholesky,
}
