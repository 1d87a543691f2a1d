"""Data that a model computes from its latents: the posterior is that of the model that observes the data themselves."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.forecast import ForecastingModel
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.reparam import LocScaleReparam

from pyro_nami import AutoNaMIGuide, fit
from pyro_nami.inference import Simulator
from pyro_nami.program.computed_data import located

Y = 2.0 + torch.randn(20, generator=torch.Generator().manual_seed(3)).cumsum(0)


def level(is_residual):
    def model():
        b = pyro.sample("b", dist.Normal(0.0, 10.0))
        s = pyro.sample("s", dist.HalfNormal(2.0))
        loc, data = (0.0, Y - b) if is_residual else (b, Y)
        with pyro.plate("rows", len(Y)):
            pyro.sample("y", dist.Normal(loc, s), obs=data)

    return model


def walk(is_residual):
    def model():
        z, s = torch.zeros(()), pyro.sample("s", dist.HalfNormal(2.0))
        for t in range(len(Y)):
            z = pyro.sample(f"z_{t}", dist.Normal(z, s))
            loc, datum = (0.0, Y[t] - z) if is_residual else (z, Y[t])
            pyro.sample(f"y_{t}", dist.Normal(loc, 0.5), obs=datum)

    return model


@pytest.mark.parametrize("make", [level, walk])
def test_residuals_are_derived_as_data_are(make):
    residual, plain = (
        fit(make(is_residual), seed=0, progress=False) for is_residual in (True, False)
    )
    assert residual.verdict.kind == "exact"
    torch.testing.assert_close(residual.log_evidence, plain.log_evidence, rtol=0.0, atol=1e-3)
    torch.testing.assert_close(residual["s"], plain["s"], rtol=1e-3, atol=1e-3)


def test_minibatches_of_residuals_are_told_by_name(caplog):
    def model(y):
        b = pyro.sample("b", dist.Normal(0.0, 10.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(0.0, 1.0), obs=y - b)

    guide = AutoNaMIGuide(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
    for start in range(6):
        svi.step(Y[start : start + 10])
    assert guide.mode == "minibatches"
    assert "The data of 'y' differ from step to step" in caplog.text


class LocalLevel(ForecastingModel):
    """A level that drifts, as in Pyro's forecasting tutorial."""

    def model(self, zero_data, covariates):
        scale = pyro.sample("scale", dist.LogNormal(-1.0, 1.0))
        with self.time_plate, poutine.reparam(config={"drift": LocScaleReparam()}):
            drift = pyro.sample("drift", dist.Normal(zero_data, scale).to_event(1))
        self.predict(dist.Normal(0.0, 0.3), drift.cumsum(-2))


def test_states_of_a_forecasting_model_are_derived():
    guide = AutoNaMIGuide(LocalLevel())
    guide(Y[:, None], torch.zeros(20, 0))
    assert str(guide.rules["drift_decentered"]).startswith("exact")


@pytest.mark.parametrize(
    "fn",
    [
        dist.StudentT(4.0, 1.0, torch.ones(3)).to_event(1),
        dist.MultivariateNormal(torch.ones(3), 2 * torch.eye(3)),
        dist.Gumbel(1.0, 2.0).expand([3]).mask(torch.tensor([True, False, True])),
    ],
)
def test_density_is_the_same(fn):
    value = torch.tensor([0.5, -2.0, 3.0])
    moved = located({"fn": fn, "value": value})
    assert not moved["value"].any()
    torch.testing.assert_close(moved["fn"].log_prob(moved["value"]), fn.log_prob(value))


@pytest.mark.parametrize("fn", [dist.LogNormal(0.0, 1.0), dist.Beta(2.0, 3.0), dist.Poisson(2.0)])
def test_others_than_locations_stay_as_they_are(fn):
    assert located({"fn": fn, "value": fn.sample()}) == {}


def test_simulations_of_residuals_are_told():
    with pytest.warns(UserWarning, match="observes at 'y' depends on its latents"):
        Simulator(level(True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Simulator(level(False))
