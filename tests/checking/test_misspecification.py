"""Data unlike the simulations are found and named, and the model's own data are not."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import pair
from scipy import stats

from pyro_nami.amortize.data_distance import _Space
from pyro_nami.checking.misspecification import misspecification
from pyro_nami.inference.simulate import Simulator

PRECISION = 1 + 4  # of z, given four values of x


def model(x=None):
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("n", 4):
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    pyro.sample("k", dist.Poisson(torch.tensor(3.0)))


DATA = {"x": torch.tensor([0.5, -0.3, 1.0, 0.2]), "k": torch.tensor(2.0)}


def test_a_single_observed_site_may_be_given_as_a_string():
    noise = pair(dist.Normal(torch.zeros(()), 1.0))
    assert misspecification(noise, observed="y", observations={"y": 0.3}, seed=0).passed


def heavy(x=None, y=None):
    """Two observed sites; x has heavy tails."""
    scale = pyro.sample("scale", dist.HalfCauchy(torch.ones(())))
    with pyro.plate("n", 20):
        pyro.sample("x", dist.Normal(0.0, scale), obs=x)
        pyro.sample("y", dist.Poisson(torch.tensor(2.0)), obs=y)


def test_the_models_own_data_have_p_values_that_are_no_smaller_than_uniform():
    observed = Simulator(heavy, observed=["x", "y"]).draw(250).observed
    p_values = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(250):
            data = {name: value[i] for name, value in observed.items()}
            p_values.append(misspecification(heavy, observations=data, num_datasets=200).p_value)
    for level in (0.05, 0.1, 0.3):
        found = sum(p <= level for p in p_values)
        assert found <= stats.binom.ppf(1 - 1e-3, 250, level)
    # half of the level at least, for the test of two statistics
    assert sum(p <= 0.3 for p in p_values) >= 20


@pytest.mark.parametrize(
    ("change", "site"),
    [
        (lambda x, y: (x, y + 15), "y"),
        (lambda x, y: (x, 0 * y + 2), "y"),  # no single value is unusual, but none varies
        (lambda x, y: (x * 1e5, y), "x"),
        (lambda x, y: (x, torch.where(torch.arange(20) == 7, 60.0, y)), "y"),
    ],
    ids=["shifted", "constant", "other units", "outlier"],
)
def test_data_unlike_the_simulations_are_warned_of_and_the_site_is_named(change, site):
    observed = Simulator(heavy, observed=["x", "y"]).draw(1).observed
    good = observed["x"][0] / observed["x"][0].std(), observed["y"][0]
    assert misspecification(heavy, *good, seed=0).passed
    x, y = change(*good)
    with pytest.warns(UserWarning, match=f"far outside the model's simulations .* first: '{site}'"):
        result = misspecification(heavy, x, y, seed=0)
    assert not result.passed
    assert next(iter(result.sites)) == site
    assert result.p_value <= 2 * 2 / 501  # at most one simulation is as unusual


TWENTY = torch.zeros(20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observed": ["y"]}, "data of every observed site; got none for 'y'"),
        ({"observations": {"y": torch.zeros(3)}}, r"site 'y' of shape \(20,\), .*; got \(3,\)"),
        ({"observations": {"y": torch.zeros(2, 20)}}, "one data set; got 2 at site 'y'"),
        (
            {"observations": {"y": TWENTY / 0}},
            "without NaN and infinite values; got some at site 'y'",
        ),
        ({"y": TWENTY, "num_datasets": 3}, "num_datasets of at least 10"),
    ],
)
def test_data_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        misspecification(heavy, TWENTY, **options)


def test_shrinkage_is_ledoit_and_wolfs():
    sample = torch.randn(40, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64)
    space = _Space(sample)
    x = (sample - sample.mean(0)) / sample.std(0)
    covariance, identity = x.T @ x / 40, torch.eye(6, dtype=torch.float64)
    mean = covariance.trace() / 6
    departure = (covariance - mean * identity).square().sum()
    error = sum((torch.outer(row, row) - covariance).square().sum() for row in x) / 40**2
    share = error / departure
    expected = (1 - share) * covariance + share * mean * identity
    assert 0.01 < share < 1
    assert torch.allclose(space.factor @ space.factor.T, expected)
    distance = (x[:1] @ torch.linalg.inv(space.factor @ space.factor.T) @ x[:1].T).sqrt()
    assert torch.allclose(space.distances(sample[:1]), distance[0])
