"""Every anchor of the table of types against the moments of draws, mapped by Pyro's own bijection."""

import math

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import biject_to

from pyro_nami.factors.anchors import location_and_scale
from pyro_nami.factors.bijections import bijection_to
from pyro_nami.factors.types import TYPES


def t(*values):
    return torch.tensor(values if len(values) != 1 else values[0], dtype=torch.float64)


TRANSFORMS = dist.transforms
PRIORS = {
    "Normal": dist.Normal(t(1.0), t(2.0)),
    "LogNormal": dist.LogNormal(t(1.0), t(2.0)),
    "Laplace": dist.Laplace(t(1.0), t(2.0)),
    "Logistic": dist.Logistic(t(1.0), t(2.0)),
    "Gumbel": dist.Gumbel(t(1.0), t(2.0)),
    "MultivariateNormal": dist.MultivariateNormal(t(1.0, 2.0), t([2.0, 0.5], [0.5, 1.0])),
    "LowRankMultivariateNormal": dist.LowRankMultivariateNormal(
        t(1.0, 2.0), t([2.0], [0.5]), t(1.0, 2.0)
    ),
    "MultivariateStudentT": dist.MultivariateStudentT(
        t(1e6), t(1.0, 2.0), t([2.0, 0.0], [0.5, 1.0])
    ),
    "Gamma": dist.Gamma(t(0.7), t(3.0)),
    "Chi2": dist.Chi2(t(3.0)),
    "InverseGamma": dist.InverseGamma(t(2.0), t(3.0)),
    "torch-InverseGamma": torch.distributions.InverseGamma(t(2.0), t(3.0)),
    "Exponential": dist.Exponential(t(3.0)),
    "HalfNormal": dist.HalfNormal(t(3.0)),
    "HalfCauchy": dist.HalfCauchy(t(3.0)),
    "Weibull": dist.Weibull(t(2.0), t(1.5)),
    "Pareto": dist.Pareto(t(2.0), t(3.0)),
    "FisherSnedecor": dist.FisherSnedecor(t(3.0), t(5.0)),
    "Beta": dist.Beta(t(0.8), t(3.0)),
    "AffineBeta": dist.AffineBeta(t(0.8), t(3.0), t(-1.0), t(4.0)),
    "Uniform": dist.Uniform(-1.0, t(3.0)),
    "wide Uniform": dist.Uniform(-20.0, t(3.0)),
    "Dirichlet": dist.Dirichlet(t(1.0, 2.0, 0.5, 3.0)),
    "affine": dist.TransformedDistribution(
        dist.Normal(t(1.0), t(2.0)), [TRANSFORMS.AffineTransform(3.0, -0.5)]
    ),
    "affine-exp": dist.TransformedDistribution(
        dist.Normal(t(1.0), t(2.0)),
        [TRANSFORMS.AffineTransform(3.0, -0.5), TRANSFORMS.ExpTransform()],
    ),
    "logit-normal": dist.TransformedDistribution(
        dist.Normal(t(1.0), t(2.0)), [TRANSFORMS.SigmoidTransform()]
    ),
    "LogisticNormal": dist.LogisticNormal(t(1.0, 0.0), t(2.0, 1.0)),
    "independent": dist.Gamma(t(0.7, 2.0), t(3.0, 1.0)).to_event(1),
    "masked": dist.Gamma(t(0.7, 2.0), t(3.0, 1.0)).mask(True).to_event(1),
    "expanded": dist.HalfNormal(t(3.0)).mask(True).expand([2]).to_event(1),
}
# Without moments, or approximate, or not drawn by torch as their density says: checked below.
ELSEWHERE = {
    torch.distributions.Cauchy,
    torch.distributions.StudentT,
    torch.distributions.VonMises,
    torch.distributions.LKJCholesky,
}


@pytest.mark.parametrize("name", PRIORS)
def test_location_and_scale_are_the_moments_of_draws(name):
    prior = PRIORS[name]
    draws = bijection_to(prior.support).inv(prior.sample((100_000,)))
    anchor = location_and_scale(prior)
    assert anchor.shape == draws.shape[1:] + (2,)
    mean, scale = draws.mean(0), draws.std(0)
    kurtosis = ((draws - mean) / scale).pow(4).mean(0)
    # Five standard errors; that of a standard deviation is scale * sqrt((kurtosis - 1) / 4 n).
    assert ((anchor[..., 0] - mean).abs() < 5 * scale / math.sqrt(1e5)).all()
    assert ((anchor[..., 1] - scale).abs() < 5 * scale * ((kurtosis - 1) / 4e5).sqrt()).all()


@pytest.mark.parametrize("dim", [3, 4])
def test_correlation_factors_have_the_moments_of_their_density(dim):
    """By importance sampling: torch's sampler does not follow its own density above dim 2."""
    prior = dist.LKJCholesky(dim, t(1.5))
    bijection = biject_to(prior.support)
    proposal = dist.StudentT(t(6.0), t(0.0), t(0.7)).expand([dim * (dim - 1) // 2]).to_event(1)
    x = proposal.sample((100_000,))
    matrix = bijection(x)
    log_weight = (
        prior.log_prob(matrix) + bijection.log_abs_det_jacobian(x, matrix) - proposal.log_prob(x)
    )
    weight = log_weight.softmax(0).unsqueeze(-1)
    anchor = location_and_scale(prior)
    assert (weight * x).sum(0).abs().max() < 0.02
    # About 40,000 effective draws: a standard deviation is known to 0.4%.
    torch.testing.assert_close(anchor[:, 1], (weight * x.square()).sum(0).sqrt(), rtol=0.02, atol=0)


def test_every_entry_is_checked():
    covered = {kind for prior in PRIORS.values() for kind in _kinds(prior)}
    assert {kind for kind, row in TYPES.items() if row.anchor} - covered - ELSEWHERE == set()


def test_heavy_tails_give_location_and_scale():
    assert location_and_scale(dist.Cauchy(t(1.0), t(2.0))).tolist() == [1.0, 2.0]
    assert location_and_scale(dist.StudentT(t(3.0), t(1.0), t(2.0))).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("concentration", [1e-3, 0.3, 1.0, 30.0])
def test_an_angle_has_about_the_spread_of_its_draws(concentration):
    prior = dist.VonMises(t(0.0), t(concentration))
    scale = prior.sample((50_000,)).std()
    assert 0.9 < location_and_scale(prior)[1] / scale < 1.15


def test_a_wider_batch_comes_from_the_wrapper():
    prior = dist.LKJCholesky(3, t(1.0)).mask(True).expand([5, 2])
    assert location_and_scale(prior).shape == (5, 2, 3, 2)


@pytest.mark.parametrize("name", PRIORS)
def test_gradient_reaches_the_parameters(name):
    prior = PRIORS[name]
    base = prior
    while not (
        set(base.arg_constraints) and all(hasattr(base, key) for key in base.arg_constraints)
    ):
        base = base.base_dist
    parameters = [
        key for key in base.arg_constraints if isinstance(base.__dict__.get(key), torch.Tensor)
    ]
    if "covariance_matrix" in parameters:
        parameters = ["loc", "covariance_matrix"]
    if name in ("Uniform", "wide Uniform", "AffineBeta") or not parameters:
        return
    kwargs = {key: getattr(base, key).clone().requires_grad_() for key in parameters}
    try:
        anchor = location_and_scale(type(base)(**kwargs))
    except TypeError:
        return
    gradients = torch.autograd.grad(anchor.sum(), list(kwargs.values()), allow_unused=True)
    assert any(gradient is not None and (gradient != 0).any() for gradient in gradients)
    assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)


@pytest.mark.parametrize(
    "prior",
    [
        dist.Normal(torch.tensor(0.0), torch.tensor(0.0), validate_args=False),
        dist.Gamma(torch.tensor(1e-30), torch.tensor(1e30), validate_args=False),
        dist.HalfCauchy(torch.tensor(0.0), validate_args=False),
        dist.Beta(torch.tensor(1e-30), torch.tensor(1e30)),
    ],
    ids=["Normal", "Gamma", "HalfCauchy", "Beta"],
)
def test_degenerate_priors_have_finite_anchors_with_positive_scale(prior):
    anchor = location_and_scale(prior)
    assert anchor.isfinite().all() and anchor[1] > 0 and anchor[1].square() > 0


def test_others_have_none():
    assert location_and_scale(dist.Wishart(t(4.0), torch.eye(2, dtype=torch.float64))) is None
    squashed = dist.TransformedDistribution(
        dist.Normal(t(0.0), t(1.0)), [TRANSFORMS.TanhTransform()]
    )
    assert location_and_scale(squashed) is None


def _kinds(prior):
    while True:
        yield from type(prior).__mro__
        if not hasattr(prior, "base_dist"):
            return
        prior = prior.base_dist
