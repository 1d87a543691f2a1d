"""Where a call's data come from: arguments, `observations`, the model itself, or the data last seen in training."""

from __future__ import annotations

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import (
    CHAIN,
    amortized,
    conjugate_normal,
    local_normals,
    pair,
    regression,
    scatter,
    steps,
)
from models import ready_by_a_step as ready
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO

from pyro_nami import AutoNaMIGuide
from pyro_nami.guide.observed import standardized

pytestmark = pytest.mark.filterwarnings("error")
DIRECTIONS = pytest.mark.parametrize("inverse", ["forward", "reverse"])
ABC = {name: torch.tensor(0.4) for name in "abc"}


DATA = [torch.tensor(1.0)]  # what a closure holds
# name -> a model of a number, and the number that it observes where it is called with one
WAYS = {
    "an argument": (lambda y: CHAIN(y), lambda y: y),
    "a closure": (lambda y: CHAIN(DATA[0]), lambda y: DATA[0]),
    "a condition": (
        poutine.condition(lambda y: CHAIN(torch.zeros(())), {"y": torch.tensor(1.5)}),
        lambda y: 1.5,
    ),
    "a number that the model transforms": (lambda y: CHAIN(2 * y), lambda y: 2 * y),
    "a dict": (lambda y: CHAIN(y["y"]), lambda y: y["y"]),
}


@DIRECTIONS
@pytest.mark.parametrize("way", WAYS)
def test_data_are_read_wherever_they_come_from(way, inverse):
    """By the same weights as in a guide that is called on what the model observes."""
    model, observed = WAYS[way]
    wrap = (lambda y: {"y": y}) if way == "a dict" else (lambda y: y)
    DATA[0] = torch.tensor(1.0)
    guide = ready(model, wrap(DATA[0]), inverse=inverse)
    plain = ready(CHAIN, torch.tensor(1.0), inverse=inverse)
    plain.load_state_dict(guide.state_dict())
    found = []
    for number in (1.0, 2.0, -1.0):
        y = torch.tensor(number)
        DATA[0] = y
        found.append(guide.log_prob(ABC, wrap(y)))
        assert torch.equal(found[-1], plain.log_prob(ABC, torch.as_tensor(observed(wrap(y)))))
    assert len({value.item() for value in found}) == (1 if way == "a condition" else 3)


def test_keyword_arguments_carry_data_and_what_is_changed_in_place_is_read():
    guide, values, y = amortized(conjugate_normal), {"mu": torch.tensor(0.5)}, torch.zeros(4)
    guide(y=y)
    scatter(guide)
    before = guide.log_prob(values, y=y)
    y += 1
    assert guide.log_prob(values, y=y) == guide.log_prob(values, torch.ones(4)) != before


@DIRECTIONS
def test_observations_come_before_what_the_model_observes(inverse):
    guide = ready(CHAIN, torch.tensor(1.0), inverse=inverse)
    told = guide.log_prob(ABC, torch.tensor(1.0), observations={"y": torch.tensor(2.0)})
    assert torch.equal(told, guide.log_prob(ABC, torch.tensor(2.0)))
    python = guide.log_prob(ABC, torch.tensor(1.0), observations={"y": 2.0})
    assert torch.equal(told, python)
    draws = []
    for told in ({}, {"observations": {"y": torch.tensor(2.0)}}):
        pyro.set_rng_seed(0)
        draws.append(guide(torch.tensor(1.0), **told)["c"])
    assert draws[0] != draws[1]


def test_observations_with_a_batch_dim_on_the_left():
    """The sleep phase of wake-sleep: (particles, plate) beside (plate,)."""
    guide = ready(conjugate_normal, torch.zeros(4))
    data = torch.randn(5, 4)
    with pyro.plate("outer", 5, dim=-2):
        trace = poutine.trace(guide).get_trace(torch.zeros(4), observations={"y": data})
    trace.compute_log_prob()
    mu = trace.nodes["mu"]["value"]
    assert mu.shape == (5, 1)
    each = torch.stack([guide.log_prob({"mu": mu[i, 0]}, data[i]) for i in range(5)])
    assert torch.allclose(trace.nodes["mu"]["log_prob"].squeeze(-1), each, atol=1e-4)


@DIRECTIONS
@pytest.mark.parametrize("options", [{}, {"observed": ["y"]}], ids=["observations", "observed"])
def test_observed_sites_are_named_by_an_option_or_by_the_first_call(options, inverse):
    """For a model that samples its data where none are given."""
    guide = amortized(regression, inverse=inverse, **options)
    x, y = torch.randn(6, 2), torch.randn(6)
    values = guide(x, observations={"y": y})
    assert set(values) == {"w", "s"} and guide.bayesnet.observed == ("y",)
    scatter(guide)
    assert torch.equal(
        guide.log_prob(values, x, y), guide.log_prob(values, x, observations={"y": y})
    )


@DIRECTIONS
def test_without_data_the_guide_reads_what_it_was_trained_on(inverse):
    x, y = torch.randn(6, 2), torch.randn(6)
    guide = ready(regression, x, y, inverse=inverse)
    values = {"w": torch.randn(2), "s": torch.tensor(1.0)}
    guide.log_prob(values, x, y + 1)  # with gradients: data seen in training
    with torch.no_grad():
        guide.log_prob(values, x, y + 5)  # without: not
    assert torch.equal(guide.log_prob(values, x), guide.log_prob(values, x, y + 1))


def shifted(x, y=None):
    """mu, z_n | mu + x_n, y_n | z_n + x_n."""
    prior, likelihood = lambda mu: dist.Normal(mu + x, 0.1), lambda z: dist.Normal(z + x, 1.0)
    local_normals(y, rows=len(x), prior=prior, likelihood=likelihood)


@pytest.mark.parametrize("rows", [3, 6, 9])
def test_latents_of_new_rows_come_from_the_model(rows):
    """In a call without data: those of a plate of another size. Those of a plate of the same size stay."""
    x, y = torch.randn(6), torch.randn(6)
    guide = ready(shifted, x, y, inverse="reverse", exact=False)
    assert not isinstance(poutine.trace(guide).get_trace(x).nodes["z"]["fn"], dist.Normal)
    new = torch.linspace(-1, 1, rows)
    if rows == 6:
        with torch.no_grad():
            values = guide(x, y)
            assert torch.equal(guide.log_prob(values, new), guide.log_prob(values, x, y))
        return
    with pytest.warns(UserWarning, match=f"'data' has {rows} instances, 6 in training"):
        trace = poutine.trace(guide).get_trace(new)
    fn, mu = trace.nodes["z"]["fn"], trace.nodes["mu"]["value"]
    assert isinstance(fn, dist.Normal) and trace.nodes["z"]["value"].shape == (rows,)
    assert torch.allclose(fn.mean, mu + new) and (fn.stddev == 0.1).all()
    draws = Predictive(shifted, guide=guide, num_samples=4)(new)
    assert draws["y"].shape == (4, rows)


def test_an_observation_that_is_a_function_of_a_latent():
    """`obs=x` with x latent (contract 5): the factor is of x, not of its own value."""

    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("tilt", dist.Normal(1.0, 1.0), obs=x)
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    guide, y = amortized(model), torch.tensor(2.0)
    steps(
        model,
        guide,
        y,
        count=200,
        lr=0.03,
        elbo=Trace_ELBO(num_particles=8, vectorize_particles=True),
    )
    with torch.no_grad(), pyro.plate("outer", 2000, dim=-1):
        draws = guide(y)["x"]
    # posterior precision 3, mean (1 + 2) / 3; training noise is about 0.05
    assert abs(draws.mean() - 1) < 0.2 and abs(draws.std() - 3**-0.5) < 0.15


def test_missing_data_are_read_as_a_finite_value():
    """NaN in the data, under a mask: the networks stay finite."""

    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)), poutine.mask(mask=~y.isnan()):
            pyro.sample("y", dist.Normal(mu, 1.0, validate_args=False), obs=y.nan_to_num())

    steps(model, amortized(model), torch.tensor([1.0, float("nan"), 2.0]), count=1)


# ---- the scale of what the guide reads


def heavy_tailed(y=None):
    """Data of scale 100 and more: tau is half Cauchy."""
    tau = pyro.sample("tau", dist.HalfCauchy(100.0))
    with pyro.plate("data", 9):
        pyro.sample("y", dist.Normal(0.0, tau), obs=y)


def test_simulated_data_are_read_in_units_of_the_models_own_draws_and_tempered_far_outside():
    """Of `observed=` there is no value at the first call; its initial value says nothing of its scale."""
    guide = amortized(heavy_tailed, observed=["y"])
    guide(observations={"y": torch.randn(9)})
    shift, scale = guide.network.standard("y")
    assert 1e-4 < scale.item() < 2e-2 and shift.abs() < 1
    units = torch.tensor([-9.9, -1.0, 0.0, 2.0, 9.9, 50.0, 1e6, -1e6, 3.0])
    read = standardized("y", (units - shift) / scale, guide._plan, guide.network).flatten()
    near = units.abs() < 10
    assert torch.allclose(read[near], units[near], atol=1e-4)
    assert (read.abs() < 30).all() and (read.sort().indices == units.sort().indices).all()


@pytest.mark.parametrize(
    "noise", [dist.Normal, lambda mean, scale: dist.StudentT(4.0, mean, scale)]
)
def test_a_conditioned_model_of_training_predicts_rows_of_other_arguments(noise):
    """Its data do not fit new regressors: they are those seen in training, with the regressors seen there."""

    def model(x):
        slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
        with pyro.plate("rows", len(x)):
            return pyro.sample("y", noise(slope * x, 0.5))

    x, y = torch.linspace(-1.0, 1.0, 30), torch.linspace(-2.0, 2.0, 30)
    conditioned = pyro.condition(model, {"y": y})
    guide = AutoNaMIGuide(conditioned)
    steps(conditioned, guide, x, count=100, lr=0.05)
    drawn = [Predictive(model, guide=guide, num_samples=500)(each)["y"] for each in (x[:5], x)]
    assert [each.shape for each in drawn] == [(500, 5), (500, 30)]
    torch.testing.assert_close(drawn[0].mean(0), drawn[1].mean(0)[:5], atol=0.2, rtol=0)
    torch.testing.assert_close(drawn[0].mean(0), y[:5], atol=0.2, rtol=0)


def test_training_by_log_prob_on_differing_observations_is_told():
    """A guide of one data set would answer with a posterior of none of them."""
    model, x = pair(dist.Normal(0.0, 1.0)), torch.zeros(())
    guide = AutoNaMIGuide(model, exact=False)
    guide(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):  # of one data set
            guide.log_prob({"z": x}, observations={"y": x}).sum().backward()
    with pytest.warns(UserWarning, match="mode='amortized'"):
        for i in range(3):
            guide.log_prob({"z": x}, observations={"y": x + i}).sum().backward()
