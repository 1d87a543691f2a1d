"""Quasi-Newton searches from several starts at once."""

from __future__ import annotations

import pytest
import torch
from models import slopes_of

from pyro_nami.deriving.ascent import ascend, curvature_at, measured, polish

EPS = torch.finfo(torch.float64).eps
pytestmark = pytest.mark.usefixtures("double")


def normal(scales, correlation):
    """A Normal of five numbers with mean 1, 2, ..., these deviations, and one correlation."""
    matrix = torch.full((5, 5), correlation) + (1 - correlation) * torch.eye(5)
    scale = torch.tensor(scales)
    covariance = scale[:, None] * matrix * scale
    mean = scale * torch.arange(1.0, 6.0)
    return mean, covariance, torch.distributions.MultivariateNormal(mean, covariance).log_prob


@pytest.mark.parametrize(
    "scales, correlation",
    [([1.0] * 5, 0.0), ([1e-3, 1.0, 1e3, 1.0, 1.0], 0.5), ([1.0, 10.0, 0.1, 1.0, 2.0], 0.99)],
)
def test_the_mode_and_the_curvature_of_a_normal_are_found(scales, correlation):
    mean, covariance, log_prob = normal(scales, correlation)
    slopes, start = slopes_of(log_prob), torch.randn(3, 5)
    found = ascend(slopes, start, torch.ones(5), EPS)
    best = found.at(int(found.height.argmax()))
    mode, values = polish(slopes, measured(log_prob, best))
    off = (mode.place - mean) / covariance.diagonal().sqrt()
    assert off.abs().max() < 1e-3 and (values > 0).all()
    torch.testing.assert_close(mode.inverse, covariance, rtol=1e-4, atol=1e-8)


def test_each_start_climbs_its_own_hill():
    def log_prob(x):
        return torch.logsumexp(torch.stack([-(x - 5).square(), -(x + 5).square()]), 0).sum(-1)

    found = ascend(slopes_of(log_prob), torch.tensor([[4.0], [-7.0]]), torch.ones(1), EPS)
    torch.testing.assert_close(found.place, torch.tensor([[5.0], [-5.0]]), rtol=0, atol=0.1)


def test_a_curved_valley_is_followed():
    """Rosenbrock's function, whose minimum is at 1, 1, to a tenth of what would be a deviation there."""

    def log_prob(x):
        return -(1 - x[..., 0]).square() - 100 * (x[..., 1] - x[..., 0].square()).square()

    slopes = slopes_of(log_prob)
    found = ascend(slopes, torch.tensor([[-1.2, 1.0]]), torch.ones(2), EPS).at(0)
    mode, _ = polish(slopes, found)
    assert (mode.place - 1).abs()[0] < 0.07 and (mode.place - 1).abs()[1] < 0.14


def test_steps_stay_where_the_density_is_finite():
    def log_prob(x):
        return (3 * x.log() - x).sum(-1).nan_to_num(-torch.inf, -torch.inf, -torch.inf)

    found = ascend(slopes_of(log_prob), torch.tensor([[0.1], [40.0]]), 10 * torch.ones(1), EPS)
    torch.testing.assert_close(found.place, torch.full((2, 1), 3.0), rtol=0, atol=0.3)


def test_a_start_without_a_density_stays_and_others_go_on():
    def log_prob(x):
        return torch.where(x < 10, -(x - 3).square() / 2, -torch.inf).sum(-1)

    found = ascend(slopes_of(log_prob), torch.tensor([[0.0], [20.0]]), torch.ones(1), EPS)
    assert found.height[1] == -torch.inf and found.place[1] == 20.0
    assert abs(found.place[0] - 3) < 0.2


def test_a_saddle_shows_in_the_eigenvalues():
    def log_prob(x):
        return x[..., 0].square() / 2 - x[..., 1].square() / 2

    curvature = curvature_at(slopes_of(log_prob), torch.zeros(2), torch.eye(2))
    torch.testing.assert_close(curvature, torch.diag(torch.tensor([-1.0, 1.0])))


def test_data_sets_along_a_batch_dim_are_searched_by_themselves():
    means = torch.tensor([[1.0, 2.0], [-3.0, 40.0]])
    slopes = slopes_of(lambda x: -(x - means).square().sum(-1) / 2)
    found = ascend(slopes, torch.zeros(4, 2, 2), torch.ones(2), EPS)
    torch.testing.assert_close(found.place, means.expand(4, 2, 2), rtol=0, atol=0.2)
    mode, _ = polish(slopes, found.at(0))
    torch.testing.assert_close(mode.place, means, rtol=0, atol=1e-3)


def test_a_search_that_ends_low_does_not_end_a_higher_one():
    """A curved ridge takes dozens of steps, the quadratic beside it two; the ridge is higher all along."""

    def log_prob(x):
        a, b = x.unbind(-1)
        ridge = 1e5 - a**4 / 4 - 100 * (b - 0.1 * a.square()).square()
        return torch.where(a < 20, ridge, -(x - 50).square().sum(-1))

    starts = torch.tensor([[15.0, 10.0], [49.0, 51.0], [50.0, 50.1]])
    found = ascend(slopes_of(log_prob), starts, torch.ones(2), EPS)
    assert float(found.height[0]) == pytest.approx(1e5, abs=0.1)
