"""Diagnosis and misspecification: what is wrong is found and named, and the model's own data are not."""

import warnings
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import pair
from scipy import stats

from pyro_nami import amortize, from_simulator
from pyro_nami.amortize.data_distance import _Space
from pyro_nami.checking.calibration import JOINT_TARP
from pyro_nami.checking.diagnosis import diagnose
from pyro_nami.checking.misspecification import misspecification
from pyro_nami.inference.simulate import Simulator

PRECISION = 1 + 4  # of z, given four values of x


def model(x=None):
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("n", 4):
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    pyro.sample("k", dist.Poisson(torch.tensor(3.0)))


class Guide:
    """The exact posterior of `model`, its sd times ``scale``."""

    def __init__(self, scale=1.0):
        self.model, self.scale = model, scale

    def __call__(self, x=None, observations=None):
        loc = observations["x"].sum(-1) / PRECISION
        pyro.sample(
            "z", dist.Normal(loc.unsqueeze(-1) if loc.dim() else loc, self.scale * PRECISION**-0.5)
        )


SMALL = {
    "num_datasets": 400,
    "num_weighted": 20,
    "num_samples": 300,
    "seed": 0,
    "observed": ["x", "k"],
}
DATA = {"x": torch.tensor([0.5, -0.3, 1.0, 0.2]), "k": torch.tensor(2.0)}


def test_an_exact_guide_passes_with_all_draws_effective():
    history = SimpleNamespace(losses=[3.0, 2.0] + [1.0] * 18, validation=[(10, 1.5), (20, 1.25)])
    result = diagnose(Guide(), history=history, observations=DATA, **SMALL)
    assert result.passed and not result.problems
    assert torch.allclose(result.effective_sample_size, torch.tensor(300.0), rtol=1e-3)
    assert (result.pareto_k < 0.7).all()
    text = str(result)
    assert text.startswith("Diagnosis: passed. Median effective sample size 100% of the draws.")
    assert (
        "Loss: 1.000 nats over the last 2 of 20 steps, 1.000 over as many before; held out 1.250, "
        in text
    )
    assert "held out 1.250, at best 1.250." in text
    assert "The data lie inside the model's simulations" in text
    titles = [axes.get_title(loc="left") for axes in result.plot().axes]
    assert (len(titles), titles[0], titles[-1]) == (6, "Loss", "Data against simulations")


def test_a_narrow_guide_and_strange_data_are_problems():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a diagnosis says it itself
        result = diagnose(Guide(scale=0.4), observations={**DATA, "k": torch.tensor(40.0)}, **SMALL)
    assert not result.passed
    assert list(result.problems) == [
        f"calibration of 'z', '{JOINT_TARP}'",
        f"importance weights (k-hat above 0.7 for {result.unreliable:.0%} of data sets)",
        "data far outside the simulations",
    ]
    assert "- data far outside the simulations: The guide extrapolates" in str(result)


def test_without_history_and_data_a_diagnosis_has_less():
    result = diagnose(Guide(), **SMALL)
    assert (result.losses, result.misspecification) == (None, None)
    assert len(result.plot().axes) == 4
    assert "Loss" not in str(result) and "The data" not in str(result)


def test_a_posterior_brings_model_history_and_data():
    def rows():
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z, 1.0).to_event(1))

    few = {"num_datasets": 50, "num_draws": 9, "num_weighted": 10, "num_samples": 100, "seed": 0}
    posterior = amortize(rows, observed=["x"], simulations=100, progress=False)
    result = diagnose(posterior, observations={"x": torch.tensor([0.3, 9.0])}, **few)
    assert list(result.problems) == ["data far outside the simulations"]
    assert result.losses is None and not posterior.history.losses
    assert torch.allclose(result.effective_sample_size, torch.tensor(100.0), rtol=1e-3)  # exact

    model = from_simulator(
        dist.Normal(torch.zeros(2), 1.0).to_event(1), lambda z: z + torch.randn_like(z)
    )
    posterior = amortize(model, observed=["x"], simulations=200, steps=3, progress=False)
    result = diagnose(posterior, **few)
    assert result.losses == posterior.history.losses and len(result.losses) == 3
    assert (result.effective_sample_size, result.pareto_k) == (None, None)
    assert result.calibration.num_datasets == 50
    assert "no density" in result.summary and "Importance sampling" not in str(result)


def test_a_guide_without_a_model_is_refused():
    with pytest.raises(TypeError, match="guide with a model, or model="):
        diagnose(lambda observations: None)


def test_what_a_guide_was_built_for_need_not_be_repeated():
    guide = Guide()
    guide.observed = ("x", "k")
    result = diagnose(guide, **{**SMALL, "observed": ()})
    assert result.passed


def test_a_single_observed_site_may_be_given_as_a_string():
    noise = pair(dist.Normal(torch.zeros(()), 1.0))

    def guide(observations):
        pyro.sample("z", dist.Normal(observations["y"] / 2, 0.5**0.5))

    small = {"num_datasets": 200, "num_weighted": 5, "num_samples": 100, "seed": 0}
    assert diagnose(guide, model=noise, observed="y", **small).passed
    assert misspecification(noise, observed="y", observations={"y": 0.3}, seed=0).passed


def test_data_that_do_not_fit_are_found_before_anything_is_run():
    guide = Guide()
    guide.__class__ = type(
        "Uncalled", (Guide,), {"__call__": lambda *args, **kwargs: pytest.fail("was run")}
    )
    with pytest.raises(ValueError, match=r"site 'x' of shape \(4,\), .*; got \(3,\)"):
        diagnose(guide, observations={**DATA, "x": torch.zeros(3)}, **SMALL)


def test_few_simulations_that_are_not_finite_leave_a_diagnosis_alone():
    """The share is judged where calibration draws many, not among those that are weighted."""

    logarithm = pair(dist.Uniform(-0.05, 0.95), lambda z: dist.Normal(z.log(), 1.0))

    def guide(observations):
        pyro.sample("z", dist.Uniform(0.0, 0.95).expand(observations["y"].shape))

    small = {"num_datasets": 200, "num_weighted": 5, "num_samples": 30}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Left out")
        results = [
            diagnose(guide, model=logarithm, observed="y", seed=i, **small) for i in range(12)
        ]
    assert {len(result.pareto_k) for result in results} > {5}


# ---- misspecification


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
