"""Simulators that are no Pyro models: posteriors without weights, and what they may return."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from pyro import poutine

from pyro_nami import amortize, calibrate, from_simulator, importance_sample

PRIOR = dist.Normal(torch.zeros(2), 1.0).to_event(1)


def noisy(theta):
    """In numpy, which torch cannot follow."""
    return theta.numpy() + 0.5 * np.random.randn(*theta.shape)


def test_posteriors_are_those_of_the_simulator_and_have_no_weights():
    np.random.seed(0)
    posterior = amortize(
        from_simulator(PRIOR, noisy), observed=["x"], simulations=2000, steps=200, progress=False
    )
    found = posterior({"x": torch.tensor([[1.0, -1.0], [0.0, 2.0]])}, num_samples=4000)
    assert (found.log_weights == 0).all() and "no density" in found.verdict
    for unknown in (found.log_evidence, found.log_evidence_error, found.pareto_k):
        assert unknown.shape == (2,) and unknown.isnan().all()
    torch.testing.assert_close(
        found.mean("theta"), torch.tensor([[0.8, -0.8], [0.0, 1.6]]), atol=0.15, rtol=0
    )
    sd = found.samples["theta"].std(0)
    torch.testing.assert_close(sd, torch.full((2, 2), 0.2**0.5), atol=0.1, rtol=0)


def test_its_data_have_no_density_to_weight_by():
    posterior = amortize(
        from_simulator(PRIOR, noisy), observed=["x"], simulations=100, steps=2, progress=False
    )
    with pytest.raises(NotImplementedError, match="a density of the data"):
        importance_sample(
            posterior.model, posterior.guide, num_samples=10, observations={"x": torch.zeros(2)}
        )


def test_counts_are_numbers_and_nan_is_left_out():
    def counts(theta):
        x = torch.poisson(theta.exp()).long()
        return torch.where(x > 20, -1, x)

    def failing(theta):
        return torch.where(theta > 2.0, torch.nan, theta)

    assert from_simulator(PRIOR, counts)().dtype == torch.float32
    with pytest.warns(UserWarning, match="'x'"):
        posterior = amortize(
            from_simulator(PRIOR, failing), observed=["x"], simulations=200, steps=2, progress=False
        )
    for value in (torch.nan, torch.inf):
        with pytest.raises(
            ValueError, match="without NaN and infinite values; got some at site 'x'"
        ):
            posterior({"x": torch.tensor([0.0, value])})
    assert posterior({"x": torch.zeros(2)}, num_samples=10).mean("theta").isfinite().all()


def test_most_simulations_may_fail():
    """The posterior of the rest given finite data is that of all: exact here by a grid."""

    def failing(theta):
        x = theta + 0.5 * torch.randn_like(theta)
        return torch.where(theta < 0.5, torch.nan, x)

    model = from_simulator(dist.Normal(torch.zeros(1), 1.0).to_event(1), failing)
    with pytest.warns(UserWarning, match="of 4000 simulations are not finite, at 'x'"):
        posterior = amortize(model, observed=["x"], simulations=4000, steps=200, progress=False)
    grid = torch.linspace(0.5, 6.0, 5001)
    weights = (
        dist.Normal(0.0, 1.0).log_prob(grid) + dist.Normal(grid, 0.5).log_prob(torch.tensor(0.6))
    ).softmax(0)
    found = posterior({"x": torch.tensor([0.6])}, num_samples=4000).samples["theta"]
    assert abs(found.mean() - (weights * grid).sum()) < 0.06
    with pytest.warns(UserWarning, match="Left out"):
        assert (
            calibrate(model, posterior, num_datasets=1000, num_draws=19, seed=0).num_datasets < 500
        )


@pytest.mark.parametrize(
    "prior",
    [
        td.MultivariateNormal(torch.zeros(2), torch.eye(2)),
        td.Independent(td.Normal(torch.zeros(2), 1.0), 1),
        type("BoxNormal", (td.Independent,), {})(td.Normal(torch.zeros(2), 1.0), 1),
        dist.Independent(td.Normal(torch.zeros(2), 1.0), 1),
        td.TransformedDistribution(
            td.Independent(td.Normal(torch.zeros(2), 2.0), 1), td.AffineTransform(0.0, 0.5)
        ),
        td.MixtureSameFamily(
            td.Categorical(torch.ones(1)), td.Independent(td.Normal(torch.zeros(1, 2), 1.0), 1)
        ),
    ],
    ids=lambda prior: type(prior).__name__,
)
def test_priors_may_be_torchs(prior):
    model = from_simulator(prior, lambda theta: theta)
    site = poutine.trace(model).get_trace().nodes["theta"]
    theta = torch.tensor([0.5, -2.0])
    assert site["fn"].event_shape == (2,) and site["fn"].batch_shape == ()
    torch.testing.assert_close(site["fn"].log_prob(theta), PRIOR.log_prob(theta))
    draws = amortize(model, observed=["x"], simulations=50, steps=2, progress=False)(
        {"x": theta}, num_samples=5
    )
    assert draws.samples["theta"].shape == (5, 2)


def test_simulators_may_be_written_with_pyro():
    def own(theta):
        with pyro.plate("rows", len(theta)):
            return pyro.sample(
                "x",
                dist.Normal(pyro.sample("theta", dist.Delta(theta, event_dim=1)), 0.1).to_event(1),
            )

    posterior = amortize(
        from_simulator(PRIOR, own), observed=["x"], simulations=100, steps=2, progress=False
    )
    assert set(posterior({"x": torch.zeros(2)}, num_samples=10).samples) == {"theta"}


def test_data_of_another_shape_and_priors_of_many():
    with pytest.raises(ValueError, match="for each of 3 rows.*torch.stack"):
        from_simulator(PRIOR, lambda theta: theta.sum())
    with pytest.raises(ValueError, match="rows of parameters; it raises IndexError.*torch.stack"):
        from_simulator(PRIOR, lambda theta: theta[9])
    with pytest.raises(ValueError, match="in one tensor or in a dictionary of tensors; got str"):
        from_simulator(PRIOR, lambda theta: {"x": "theta"})
    with pytest.raises(TypeError, match="a prior of 'theta'.*sample\\(shape\\).*got int"):
        from_simulator(3, noisy)
    with pytest.raises(ValueError, match="to_event\\(1\\)"):
        from_simulator(dist.Normal(torch.zeros(2), 1.0), noisy)


def deterministic():
    theta = pyro.sample("theta", PRIOR)
    pyro.deterministic("x", theta + 0.5 * torch.randn_like(theta))


def degenerate():
    theta = pyro.sample("theta", PRIOR)
    pyro.sample("x", dist.Delta(theta + 0.5 * torch.randn_like(theta), event_dim=1))


def in_a_plate():
    with pyro.plate("elements", 2):
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        pyro.deterministic("x", theta + 0.5 * torch.randn_like(theta))


@pytest.mark.parametrize("model", [deterministic, degenerate, in_a_plate])
def test_values_are_data_without_a_density(model, recwarn):
    posterior = amortize(model, observed=["x"], simulations=1000, steps=150, progress=False)
    found = posterior({"x": torch.tensor([[1.0, -1.0], [0.0, 2.0]])}, num_samples=4000)
    assert "without weights" in repr(found)
    torch.testing.assert_close(
        found.mean("theta"), torch.tensor([[0.8, -0.8], [0.0, 1.6]]), atol=0.15, rtol=0
    )
    assert not [w for w in recwarn if "pyro_nami" in str(w.message) or "Hidden" in str(w.message)]


def test_one_value_for_all_draws_is_no_vectorized_simulation():
    def model():
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        pyro.deterministic("x", torch.tensor(theta.reshape(-1)[0].item()) + 0.5 * torch.randn(()))

    with pytest.warns(UserWarning, match="one for all"):
        posterior = amortize(model, observed=["x"], simulations=500, steps=200, progress=False)
    assert abs(posterior({"x": torch.tensor(2.0)}, num_samples=1000).mean("theta") - 1.6) < 0.25
