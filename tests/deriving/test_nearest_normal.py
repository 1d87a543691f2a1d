"""The Normal that is nearest to a density, and the bent ones beside it."""

from __future__ import annotations

import math

import pytest
import torch
from models import slopes_of
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_nami.deriving.bent_vector import bent_along_lines, reweighted, unbent
from pyro_nami.deriving.nearest_normal import nearest_normal, normal_points

pytestmark = pytest.mark.usefixtures("double")


def nearest(log_prob, numbers, center=0.0, scale=1.0, pairs=128):
    start = torch.full((numbers,), center), scale * torch.eye(numbers)
    center, root, is_found = nearest_normal(
        slopes_of(log_prob), *start, normal_points(pairs, numbers)
    )
    assert is_found
    return center, root @ root.mT


@pytest.mark.parametrize("numbers", [1, 3, 40])
def test_it_is_a_normal_itself(numbers):
    root = torch.randn(numbers, numbers).tril() + 3 * torch.eye(numbers)
    normal = MultivariateNormal(10 * torch.randn(numbers), scale_tril=root)
    center, covariance = nearest(normal.log_prob, numbers)
    found = MultivariateNormal(center, covariance)
    assert kl_divergence(found, normal) < 5e-3


def test_it_is_the_best_of_a_skewed_variables_logarithm():
    # of an Exponential variable's logarithm E[v - exp(v)] + log s is highest at s = 1 and mean -1/2
    center, covariance = nearest(lambda v: (v - v.exp()).sum(-1), 4, center=3.0, pairs=1024)
    torch.testing.assert_close(center, torch.full((4,), -0.5), atol=0.05, rtol=0.0)
    torch.testing.assert_close(covariance, torch.eye(4), atol=0.1, rtol=0.0)


def test_kinks_have_a_width():
    # of Laplace variables -s E|e| + log s is highest at s = sqrt(pi / 2), though there is no curvature
    center, covariance = nearest(lambda v: -v.abs().sum(-1), 3, center=2.0, pairs=1024)
    assert center.abs().max() < 0.1
    assert covariance.diagonal().sqrt() == pytest.approx([math.sqrt(math.pi / 2)] * 3, abs=0.1)


def test_where_there_is_no_mode_it_is_found_all_the_same():
    # the funnel of a scale exp(v) of eight effects: the density grows without bound as v falls
    def log_prob(points):
        v, effects = points[..., :1], points[..., 1:]
        data = -(effects - 1).square().sum(-1) / 2
        return (
            -v[..., 0].square() / 18
            - 8 * v[..., 0]
            - (effects / v.exp()).square().sum(-1) / 2
            + data
        )

    center, covariance = nearest(log_prob, 9)
    best = unbent(center, torch.linalg.cholesky(covariance))
    points = normal_points(4096, 9)
    heights = lambda at: log_prob(at)  # noqa: E731
    elbo = best.elbo(heights, points)
    for other in (
        unbent(center + 0.2, best.root),
        unbent(center, 1.2 * best.root),
        unbent(center, 0.8 * best.root),
    ):
        assert other.elbo(heights, points) < elbo


def test_an_improper_density_has_none():
    *_, is_found = nearest_normal(
        slopes_of(lambda v: -v[..., 0].square()),
        torch.zeros(2),
        torch.eye(2),
        normal_points(128, 2),
    )
    assert not is_found


def test_points_without_a_density_stand_for_a_low_one():
    center, _ = nearest(
        lambda v: torch.where(v[..., 0] > -3, -v.square().sum(-1) / 2, -torch.inf), 2
    )
    assert center.abs().max() < 0.3


def test_bends_are_the_densities_of_lines():
    def log_prob(points):  # Gamma(4, 1) variables' logarithms
        return (4 * points - points.exp()).sum(-1)

    bent = bent_along_lines(log_prob, torch.full((2,), math.log(4)), 0.5 * torch.eye(2))
    normal = torch.randn(50_000, 2)
    points, log_q = bent.at(normal)
    log_p = log_prob(points) - 2 * math.lgamma(4)
    assert (log_q - log_p).abs().mean() < 1e-3
    assert bent.elbo(log_prob, normal) == pytest.approx(2 * math.lgamma(4), abs=0.01)
    again, effective = reweighted(log_prob, bent)
    assert effective > 0.99
    torch.testing.assert_close(again.center, bent.center, atol=0.01, rtol=0.0)
