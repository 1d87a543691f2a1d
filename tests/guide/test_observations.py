"""Where a call's data come from: arguments, `observations`, the model itself, or the data last seen in training."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import (
    CASES,
    CHAIN,
    amortized,
    conjugate_normal,
    independent_locals,
    nested,
    regression,
    scatter,
)
from models import (
    ready_by_a_step as ready,
)
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.optim import Adam

pytestmark = pytest.mark.filterwarnings("error")
DIRECTIONS = pytest.mark.parametrize("inverse", ["forward", "reverse"])
ABC = {name: torch.tensor(0.4) for name in "abc"}


@DIRECTIONS
def test_new_data_in_the_arguments_are_read(inverse):
    guide = ready(CHAIN, torch.tensor(1.0), inverse=inverse)
    values = [guide.log_prob(ABC, torch.tensor(y)) for y in (1.0, 2.0)]
    assert values[0] != values[1]


@DIRECTIONS
def test_data_in_a_closure_are_read_at_every_call(inverse):
    data = [torch.tensor(1.0)]
    guide = ready(lambda: CHAIN(data[0]), inverse=inverse)
    plain = ready(CHAIN, torch.tensor(1.0), inverse=inverse)
    plain.load_state_dict(guide.state_dict())
    for y in (1.0, 2.0, -1.0):
        data[0] = torch.tensor(y)
        assert torch.equal(guide.log_prob(ABC), plain.log_prob(ABC, torch.tensor(y)))


@DIRECTIONS
def test_conditioned_data_are_read(inverse):
    guide = ready(poutine.condition(CHAIN, {"y": torch.tensor(1.5)}), inverse=inverse)
    plain = ready(CHAIN, torch.tensor(1.5), inverse=inverse)
    plain.load_state_dict(guide.state_dict())
    assert torch.equal(guide.log_prob(ABC), plain.log_prob(ABC, torch.tensor(1.5)))


@DIRECTIONS
def test_data_that_the_model_transforms_are_read_as_observed(inverse):
    """The argument is not what the model observes, so it must not be taken for it."""

    def model(y):
        CHAIN(2 * y)

    guide = ready(model, torch.tensor(1.0), inverse=inverse)
    plain = ready(CHAIN, torch.tensor(2.0), inverse=inverse)
    plain.load_state_dict(guide.state_dict())
    assert torch.equal(guide.log_prob(ABC, torch.tensor(3.0)), plain.log_prob(ABC, torch.tensor(6.0)))


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


@DIRECTIONS
def test_observations_with_a_batch_dim_on_the_left(inverse):
    """The sleep phase of wake-sleep: (particles, plate) beside (plate,)."""
    guide = ready(conjugate_normal, torch.zeros(4), inverse=inverse)
    data = torch.randn(5, 4)
    with pyro.plate("outer", 5, dim=-2):
        trace = poutine.trace(guide).get_trace(torch.zeros(4), observations={"y": data})
    trace.compute_log_prob()
    mu = trace.nodes["mu"]["value"]
    assert mu.shape == (5, 1)
    each = torch.stack([guide.log_prob({"mu": mu[i, 0]}, data[i]) for i in range(5)])
    assert torch.allclose(trace.nodes["mu"]["log_prob"].squeeze(-1), each, atol=1e-4)


@DIRECTIONS
def test_observations_of_the_first_call_name_observed_sites(inverse):
    """For a model that samples its data where none are given."""
    guide = amortized(regression, inverse=inverse)
    x = torch.randn(6, 2)
    values = guide(x, observations={"y": torch.randn(6)})
    assert set(values) == {"w", "s"} and guide.bayesnet.observed == ("y",)


@DIRECTIONS
def test_observed_names_sites_that_the_model_samples(inverse):
    guide = amortized(regression, inverse=inverse, observed=["y"])
    x, y = torch.randn(6, 2), torch.randn(6)
    values = guide(x, observations={"y": y})
    assert set(values) == {"w", "s"}
    scatter(guide)
    assert torch.equal(guide.log_prob(values, x, y), guide.log_prob(values, x, observations={"y": y}))


@DIRECTIONS
def test_without_data_the_guide_reads_what_it_was_trained_on(inverse):
    x, y = torch.randn(6, 2), torch.randn(6)
    guide = ready(regression, x, y, inverse=inverse)
    values = {"w": torch.randn(2), "s": torch.tensor(1.0)}
    guide.log_prob(values, x, y + 1)  # with gradients: data seen in training
    with torch.no_grad():
        guide.log_prob(values, x, y + 5)  # without: not
    assert torch.equal(guide.log_prob(values, x), guide.log_prob(values, x, y + 1))


@pytest.mark.parametrize("rows", [3, 9])
def test_latents_of_new_rows_come_from_the_model(rows):
    """A plate of another size without data: its locals are drawn from the model's own conditional."""

    def model(x, y=None):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(mu + x, 0.1))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    guide = ready(model, torch.randn(6), torch.randn(6), inverse="reverse")
    x = torch.linspace(-1, 1, rows)
    trace = poutine.trace(guide).get_trace(x)
    fn, mu = trace.nodes["z"]["fn"], trace.nodes["mu"]["value"]
    assert trace.nodes["z"]["value"].shape == (rows,)
    assert torch.allclose(fn.mean, mu + x) and (fn.stddev == 0.1).all()
    draws = Predictive(model, guide=guide, num_samples=4)(x)
    assert draws["y"].shape == (4, rows)


def test_new_rows_are_told_from_old_ones_by_their_covariates():
    """Other inputs of the same size are new rows too."""

    def model(x, y=None):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(mu + x, 0.1))
            pyro.sample("y", dist.Normal(z + x, 1.0), obs=y)

    x, y = torch.randn(6), torch.randn(6)
    guide = ready(model, x, y, inverse="reverse", conjugate=False)
    old = poutine.trace(guide).get_trace(x)
    new = poutine.trace(guide).get_trace(x + 1)
    assert not isinstance(old.nodes["z"]["fn"], dist.Normal)
    assert isinstance(new.nodes["z"]["fn"], dist.Normal)


@DIRECTIONS
@pytest.mark.parametrize("size", [1, 3, 12])
def test_another_plate_size_with_data(inverse, size):
    guide = ready(independent_locals, torch.randn(5, 2), inverse=inverse)
    y = torch.randn(size, 2)
    trace = poutine.trace(guide).get_trace(y)
    trace.compute_log_prob()
    assert trace.nodes["z"]["value"].shape == (size, 2)
    assert torch.allclose(
        guide.log_prob({"z": trace.nodes["z"]["value"]}, y), trace.log_prob_sum(), rtol=1e-4
    )


@DIRECTIONS
def test_keyword_arguments_carry_data(inverse):
    guide = amortized(conjugate_normal, inverse=inverse)
    guide(y=torch.zeros(4))
    scatter(guide)
    values = {"mu": torch.tensor(0.5)}
    assert guide.log_prob(values, y=torch.ones(4)) == guide.log_prob(values, torch.ones(4))
    assert guide.log_prob(values, y=torch.ones(4)) != guide.log_prob(values, y=torch.zeros(4))


@DIRECTIONS
def test_data_inside_an_argument_are_read(inverse):
    """A dict of tensors is no tensor argument: the model is run to see its data."""

    def model(batch):
        conjugate_normal(batch["y"])

    guide = amortized(model, inverse=inverse)
    guide({"y": torch.zeros(4)})
    scatter(guide)
    values = {"mu": torch.tensor(0.5)}
    assert guide.log_prob(values, {"y": torch.ones(4)}) != guide.log_prob(values, {"y": torch.zeros(4)})


@DIRECTIONS
def test_data_changed_in_place_are_read(inverse):
    y = torch.zeros(3, 4)
    guide = ready(nested, y, inverse=inverse)
    values = {key: torch.zeros(shape) for key, shape in CASES["nested"].shapes.items()}
    before = guide.log_prob(values, y)
    y += 1
    assert guide.log_prob(values, y) != before


@DIRECTIONS
def test_an_observation_that_is_a_function_of_a_latent(inverse):
    """`obs=x` with x latent (contract 5): the factor is of x, not of its own value."""

    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("tilt", dist.Normal(1.0, 1.0), obs=x)
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    guide = amortized(model, inverse=inverse)
    svi = SVI(model, guide, Adam({"lr": 0.03}), Trace_ELBO(num_particles=8, vectorize_particles=True))
    for _ in range(200):
        svi.step(torch.tensor(2.0))
    with torch.no_grad(), pyro.plate("outer", 2000, dim=-1):
        draws = guide(torch.tensor(2.0))["x"]
    # posterior precision 3, mean (1 + 2) / 3; training noise is about 0.05
    assert abs(draws.mean() - 1) < 0.2 and abs(draws.std() - 3**-0.5) < 0.15


@DIRECTIONS
def test_missing_data_are_read_as_a_finite_value(inverse):
    """NaN in the data, under a mask: the networks stay finite."""

    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)), poutine.mask(mask=~y.isnan()):
            pyro.sample("y", dist.Normal(mu, 1.0, validate_args=False), obs=y.nan_to_num())

    y = torch.tensor([1.0, float("nan"), 2.0])
    guide = amortized(model, inverse=inverse)
    assert torch.isfinite(torch.tensor(SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO()).step(y)))


# ---- the scale of what the guide reads


def heavy_tailed(y=None):
    """Data of scale 100 and more: tau is half Cauchy."""
    tau = pyro.sample("tau", dist.HalfCauchy(100.0))
    with pyro.plate("data", 9):
        pyro.sample("y", dist.Normal(0.0, tau), obs=y)


def test_simulated_data_are_read_in_units_of_the_models_own_draws():
    """Of `observed=` there is no value at the first call; its initial value says nothing of its scale."""
    guide = amortized(heavy_tailed, observed=["y"])
    guide(observations={"y": torch.randn(9)})
    shift, scale = guide.network.standard("y")
    assert 1e-4 < scale.item() < 2e-2 and shift.abs() < 1


def test_data_far_outside_are_tempered_and_others_are_not():
    guide = amortized(heavy_tailed, observed=["y"])
    guide(observations={"y": torch.randn(9)})
    shift, scale = guide.network.standard("y")
    units = torch.tensor([-9.9, -1.0, 0.0, 2.0, 9.9, 50.0, 1e6, -1e6, 3.0])
    read = guide._observed.features("y", (units - shift) / scale, guide._plan, guide.network).flatten()
    near = units.abs() < 10
    assert torch.allclose(read[near], units[near], atol=1e-4)
    assert (read.abs() < 30).all() and (read.sort().indices == units.sort().indices).all()
