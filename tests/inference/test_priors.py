"""Priors as users of other packages have them: lists, classes of their own, draws; values outside of supports."""

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from scipy import stats

from pyro_nami.inference.priors import OwnPrior, as_priors

PARTS = [
    td.Uniform(torch.zeros(1), 2.0),
    td.Gamma(torch.tensor(2.0), 1.0),
    td.MultivariateNormal(torch.zeros(2), torch.eye(2)),
]


class Sampled:
    """A prior with draws only: exponential ones."""

    def sample(self, shape=torch.Size()):
        return torch.rand(*shape, 2).log().neg()


class Dense(Sampled):
    """With a density as well, which refuses values outside of the support."""

    def log_prob(self, value):
        if (value < 0).any():
            raise ValueError("negative")
        return -value.sum(-1)


def test_a_list_is_the_joint_distribution_of_its_parts():
    prior = as_priors(PARTS)["theta"]
    theta = prior.sample((500,))
    assert theta.shape == (500, 4) and prior.support.check(theta).all()
    columns = theta[:, 0], theta[:, 1], theta[:, 2:]
    expected = sum(
        part.log_prob(column.reshape(500, *part.batch_shape, *part.event_shape)).reshape(500)
        for part, column in zip(PARTS, columns)
    )
    torch.testing.assert_close(prior.log_prob(theta), expected)
    outside = theta.clone()
    outside[::2, 0] = 3.0
    found = prior.expand([500]).log_prob(outside)
    assert torch.equal(found.isneginf(), torch.arange(500) % 2 == 0)


def test_whatever_has_sample_is_a_prior():
    plain, dense = as_priors({"a": Sampled(), "b": Dense()}).values()
    value = torch.tensor([[1.0, 2.0], [-1.0, 2.0], [0.5, -0.1]])
    for prior in (plain, dense):
        assert isinstance(prior, OwnPrior) and prior.event_shape == (2,)
        assert prior.expand([3, 2]).sample((4,)).shape == (4, 3, 2, 2)
    with pytest.raises(NotImplementedError, match="has draws only"):
        plain.log_prob(value)
    assert plain.contains(value).all()
    assert dense.contains(value).tolist() == [True, False, False]
    torch.testing.assert_close(dense.log_prob(value[:1]), torch.tensor([-3.0]))


@pytest.mark.parametrize(
    ("frozen", "same"),
    [
        (stats.gamma(4.0, scale=0.5), td.Gamma(4.0, 2.0)),
        (stats.uniform(1.0, 2.0), td.Uniform(1.0, 3.0)),
        (stats.norm(1.0, 2.0), td.Normal(1.0, 2.0)),
        (
            stats.multivariate_normal([1.0, 0.0], [[2.0, 0.5], [0.5, 1.0]]),
            td.MultivariateNormal(torch.tensor([1.0, 0.0]), torch.tensor([[2.0, 0.5], [0.5, 1.0]])),
        ),
    ],
)
def test_a_distribution_of_scipy_is_that_of_torch(frozen, same):
    prior = as_priors(frozen)["theta"]
    assert prior.event_shape == same.event_shape and prior.sample().shape == same.event_shape
    value = same.sample((20,))
    torch.testing.assert_close(prior.log_prob(value), same.log_prob(value), rtol=1e-4, atol=1e-4)
    torch.manual_seed(0)
    drawn = prior.sample((4000,))
    assert prior.support.check(drawn).all()
    assert ((drawn.mean(0) - same.mean) / same.stddev).abs().max() < 4 / 4000**0.5  # four errors
    torch.manual_seed(0)
    assert torch.equal(prior.sample((4000,)), drawn)


def test_distributions_of_scipy_go_into_a_list():
    prior = as_priors([stats.gamma(4.0, scale=0.5), td.Uniform(0.0, 1.0)])["theta"]
    value = torch.tensor([[1.0, 0.5], [1.0, 2.0], [-1.0, 0.5]])
    expected = td.Gamma(4.0, 2.0).log_prob(torch.tensor(1.0))
    found = prior.expand([3]).log_prob(value)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
    assert found[1:].isneginf().all()


def test_draws_stand_for_their_distribution():
    draws = torch.arange(40.0).reshape(20, 2)
    prior = as_priors(draws)["theta"]
    drawn = prior.sample((20,))
    assert torch.equal(drawn[drawn[:, 0].argsort()], draws)  # each once
    with pytest.warns(UserWarning, match="has 20 draws, and 21 are asked for"):
        prior.sample((21,))


@pytest.mark.parametrize(
    ("prior", "error", "match"),
    [
        (stats.poisson(2.0), TypeError, "of continuous numbers; got rv_discrete_frozen"),
        (3, TypeError, "an object with sample.shape. or scipy's rvs.size.; got int"),
        ([Sampled()], TypeError, "distributions in the list of priors; got Sampled"),
        ([td.Poisson(1.0), td.Normal(0.0, 1.0)], TypeError, "a name and a distribution of Pyro"),
        (torch.arange(10), TypeError, "of continuous numbers; got torch.int64"),
        (dist.Normal(torch.zeros(2), 1.0), ValueError, "got .2,. for 'theta'. Use prior.to_event"),
        ({"a": torch.randn(5), "b": torch.randn(5)}, ValueError, "in one tensor.*'a', 'b'"),
        (torch.full((5, 1), torch.nan), ValueError, "'theta' without NaN"),
    ],
)
def test_what_is_no_prior_is_told(prior, error, match):
    with pytest.raises(error, match=match):
        as_priors(prior)


def test_a_prior_that_cannot_be_sampled_is_named():
    class Failing:
        def sample(self, shape):
            raise RuntimeError("no file")

    class Short:
        def sample(self, shape):
            return torch.randn(2)

    with pytest.raises(ValueError, match="prior of 'k'.*raises RuntimeError: no file"):
        as_priors({"k": Failing()})
    with pytest.raises(ValueError, match=r"sample\(\(3,\)\) returns 3 draws; got shape \(2,\)"):
        as_priors(Short())
