"""Innovations that a model sums up along a plate or an event dim: derived as the states of a chain."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.forecast import Forecaster, ForecastingModel
from pyro.infer import SVI, Predictive, Trace_ELBO

from pyro_nami import AutoNaMIGuide, fit

STEPS = 50
NOISE = torch.randn(2, STEPS + 10, generator=torch.Generator().manual_seed(5))
LEVEL = (0.3 * NOISE[0]).cumsum(0)
Y = LEVEL + 0.5 * NOISE[1]


def level(y=Y[:STEPS], steps=STEPS, order=1, along="plate", mask=None):
    """Returns a model of a level that drifts; its scale is a latent."""
    s = pyro.sample("s", dist.HalfNormal(1.0))
    if along == "plate":
        with pyro.plate("time", steps):
            e = pyro.sample("e", dist.Normal(0.0, 1.0))
            z = s * e
            for _ in range(order):
                z = z.cumsum(-1)
            with poutine.mask(mask=True if mask is None else mask):
                pyro.sample("y", dist.Normal(z, 0.5), obs=y)
    else:
        e = pyro.sample("e", dist.Normal(0.0, 1.0).expand([steps]).to_event(1))
        z = s.unsqueeze(-1) * e
        for _ in range(order):
            z = z.cumsum(-1)
        pyro.sample("y", dist.Normal(z, 0.5).to_event(1), obs=y)


def by_hand(order, s, mask=None):
    """Returns mean and covariance of the innovations, by dense algebra, and the log evidence, given the scale."""
    sums = torch.eye(STEPS, dtype=torch.float64)
    for _ in range(order):
        sums = sums.cumsum(0)
    read = s * sums if mask is None else s * sums[mask]
    y = Y[:STEPS].double() if mask is None else Y[:STEPS][mask].double()
    data = dist.MultivariateNormal(
        torch.zeros(len(y)).double(), read @ read.T + 0.25 * torch.eye(len(y))
    )
    precision = torch.eye(STEPS) + read.T @ read / 0.25
    covariance = precision.inverse()
    return covariance @ read.T @ y / 0.25, covariance, data.log_prob(y)


@pytest.mark.parametrize("along", ["plate", "event"])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("is_masked", [False, True])
def test_density_is_that_of_dense_algebra(along, order, is_masked):
    if is_masked and along == "event":
        pytest.skip("a mask of an event covers all of it")
    mask = torch.arange(STEPS) % 3 > 0 if is_masked else None
    torch.set_default_dtype(torch.float64)
    try:
        options = {"y": Y[:STEPS].double(), "order": order, "along": along, "mask": mask}
        guide = AutoNaMIGuide(level)
        guide(**options)
        assert "e[time]" in guide.rules
        draw = {name: value.detach() for name, value in guide(**options).items()}
        log_joint = (
            poutine.trace(poutine.condition(level, draw)).get_trace(**options).log_prob_sum()
        )
        mean, covariance, evidence = by_hand(order, draw["s"], mask)
        expected = dist.MultivariateNormal(mean, covariance).log_prob(draw["e"])
        prior = dist.HalfNormal(1.0).log_prob(draw["s"])
        torch.testing.assert_close(log_joint - prior - expected, evidence)  # of the oracle itself
        trace = poutine.trace(poutine.condition(guide, draw)).get_trace(**options)
        trace.compute_log_prob()
        assert trace.nodes["e"]["fn"].batch_shape == ((STEPS,) if along == "plate" else ())
        torch.testing.assert_close(
            trace.nodes["e"]["log_prob"].sum(), expected, rtol=1e-6, atol=1e-5
        )
        assert float(
            (guide.log_prob(draw, **options) - trace.log_prob_sum()).detach()
        ) == pytest.approx(0, abs=1e-6)
    finally:
        torch.set_default_dtype(torch.float32)


def test_draws_have_the_moments_of_dense_algebra():
    model = poutine.condition(level, {"s": torch.tensor(0.4)})
    guide = AutoNaMIGuide(model)
    guide()
    with pyro.plate("draws", 4000, dim=-2):
        draws = guide()["e"].double()
    mean, covariance, _ = by_hand(1, 0.4)
    assert float(
        ((draws.mean(0) - mean) / covariance.diagonal().sqrt()).abs().max()
    ) < 5 / math.sqrt(4000)
    assert float((draws.T.cov() - covariance).abs().max()) < 0.1


@pytest.mark.parametrize("vectorized", [True, False])
def test_scale_and_innovations_are_exact_together(vectorized):
    guide = AutoNaMIGuide(level)
    elbo = Trace_ELBO(num_particles=4, vectorize_particles=vectorized, max_plate_nesting=1)
    svi = SVI(level, guide, pyro.optim.Adam({"lr": 0.01}), elbo)
    losses = [svi.step() for _ in range(5)]
    scales = torch.linspace(0.001, 5, 4000, dtype=torch.float64)
    heights = torch.stack([by_hand(1, s)[2] + dist.HalfNormal(1.0).log_prob(s) for s in scales])
    evidence = heights.logsumexp(0) + math.log(5 / 4000)
    assert losses == pytest.approx([-float(evidence)] * 5, abs=0.02)


def test_counts_are_located():
    counts = torch.poisson((1 + LEVEL).exp(), generator=torch.Generator().manual_seed(1))

    def model():
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with pyro.plate("time", len(counts)):
            e = pyro.sample("e", dist.Normal(0.0, s))
            pyro.sample("y", dist.Poisson((1 + e.cumsum(-1)).exp()), obs=counts)

    found = fit(model, seed=0, progress=False)
    assert "e[time]" in found.guide.rules
    assert found.verdict.is_trusted
    assert float(found.pareto_k) < 0.6


def test_forecast_continues_the_steps_of_training():
    guide = AutoNaMIGuide(level)
    guide()
    trained = Predictive(level, guide=guide, num_samples=2000, parallel=True)()
    with pytest.warns(UserWarning, match="This call has 60 steps of 'e', and training had 50"):
        further = Predictive(level, guide=guide, num_samples=2000, parallel=True)(None, STEPS + 10)
    last, after = ((each["s"] * each["e"].cumsum(-1)) for each in (trained, further))
    assert further["e"].shape == (2000, STEPS + 10)
    spread = last[:, -1].std()
    assert float((after[:, STEPS - 1] - last[:, -1]).mean() / spread) == pytest.approx(0, abs=0.15)
    assert float(after[:, STEPS - 1].std() / spread) == pytest.approx(1, abs=0.1)
    ahead = ((after[:, -1] - after[:, STEPS - 1]) / further["s"][:, 0]).std()
    assert float(ahead) == pytest.approx(math.sqrt(10), rel=0.1)


def test_predictions_of_a_posterior_continue_the_steps_of_the_data():
    posterior = fit(level, seed=0, progress=False)
    last = posterior["s"][:, None] * posterior["e"].cumsum(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        further = posterior.predict(None, STEPS + 10)
    after = posterior["s"][:, None] * further["e"].cumsum(-1)
    torch.testing.assert_close(after[:, :STEPS], last)
    ahead = ((after[:, -1] - after[:, STEPS - 1]) / posterior["s"]).std()
    assert float(ahead) == pytest.approx(math.sqrt(10), rel=0.1)
    variances = last[:, -1].var() + 10 * posterior["s"].square().mean() + 0.25
    torch.testing.assert_close(further["y"][:, -1].var(), variances, rtol=0.1, atol=0.0)


def test_fewer_steps_are_those_of_training():
    guide = AutoNaMIGuide(level)
    guide()
    with pytest.warns(UserWarning, match="This call has 30 steps of 'e'"):
        trace = poutine.trace(guide).get_trace(None, STEPS - 20)
    assert trace.nodes["e"]["value"].shape == (STEPS - 20,)
    assert trace.log_prob_sum().isfinite()


def test_other_data_do_not_replace_the_posterior():
    guide = AutoNaMIGuide(level)
    svi = SVI(level, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
    svi.step()
    draws = torch.stack([guide(Y[:STEPS] + 100)["e"].sum() for _ in range(50)])
    assert float(draws.mean().abs()) < 20


class LocalLevel(ForecastingModel):
    def model(self, zero_data, covariates):
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with self.time_plate:
            e = pyro.sample(
                "e", dist.Normal(zero_data, s.unsqueeze(-1) if s.dim() else s).to_event(1)
            )
        self.predict(dist.Normal(0.0, 0.5), e.cumsum(-2))


def test_pyros_forecaster_takes_the_guide():
    model, data = LocalLevel(), Y[:STEPS, None]
    guide = AutoNaMIGuide(model)
    options = {"num_steps": 3, "log_every": 0, "learning_rate": 0.01}
    forecaster = Forecaster(model, data, torch.zeros(STEPS, 0), guide=guide, **options)
    assert "e[time]" in guide.rules
    with pytest.warns(UserWarning, match="The model fails at the arguments of this call"):
        ahead = forecaster(data, torch.zeros(STEPS + 10, 0), num_samples=3000)[..., 0]
    guide = AutoNaMIGuide(level)
    guide()
    trained = Predictive(level, guide=guide, num_samples=3000, parallel=True)()
    last = trained["s"] * trained["e"].cumsum(-1)
    variances = (
        last[:, -1].var() + trained["s"][:, 0].square().mean() * torch.tensor([1, 10]) + 0.25
    )
    torch.testing.assert_close(ahead.var(0)[[0, -1]], variances, rtol=0.1, atol=0.0)
    assert float(ahead.mean()) == pytest.approx(float(last[:, -1].mean()), abs=0.1)


def rows_apart(y=Y[:STEPS]):
    with pyro.plate("time", STEPS):
        pyro.sample("y", dist.Normal(pyro.sample("e", dist.Normal(0.0, 1.0)), 0.5), obs=y)


def decaying(y=Y[:STEPS]):
    e = pyro.sample("e", dist.Normal(0.0, 1.0).expand([STEPS]).to_event(1))
    ages = torch.arange(STEPS)[:, None] - torch.arange(STEPS)
    weights = torch.where(ages >= 0, 0.99 ** ages.clamp(min=0) * (1 + ages.clamp(min=0)), 0.0)
    pyro.sample("y", dist.Normal(e @ weights.T, 0.5).to_event(1), obs=y)


@pytest.mark.parametrize("model", [rows_apart, decaying])
def test_others_are_no_series(model):
    guide = AutoNaMIGuide(model)
    guide()
    assert list(guide.rules) == ["e"]
