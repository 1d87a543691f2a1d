"""Where guides start: at medians of priors where these make data likelier, else near the origin."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.reparam import LatentStableReparam

from pyro_nami.program.first_run import first_run
from pyro_nami.program.initial_values import likely_start, near_origin
from pyro_nami.program.program import Program


def starts(model, *args):
    """Latent -> where it starts, with the same random numbers as `near_origin`."""
    pyro.set_rng_seed(0)
    program = Program(model, args, {})
    trace = likely_start(program, first_run(program, near_origin), 0.1)
    pyro.set_rng_seed(0)
    plain = first_run(Program(model, args, {}), near_origin)
    samples = {
        name: site["value"] for name, site in plain.nodes.items() if site["type"] == "sample"
    }
    nodes = trace.nodes
    return nodes, {
        name for name, value in samples.items() if not torch.allclose(value, nodes[name]["value"])
    }


def prices(y, scale=2e4):
    """In euros, where only the prior of the scale knows that; the location has a vague one."""
    a = pyro.sample("a", dist.Normal(0.0, 1e6))
    s = pyro.sample("s", dist.HalfCauchy(scale))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.StudentT(4.0, a, s), obs=y)


def test_a_scale_starts_at_the_median_of_its_prior_where_data_are_likelier_there():
    nodes, moved = starts(prices, 3e4 * torch.randn(40, generator=torch.Generator().manual_seed(0)))
    assert moved == {"s"}
    assert 1.5e4 < nodes["s"]["value"] < 2.7e4  # the median is 2e4, found from draws
    assert nodes["a"]["value"].abs() < 0.06


@pytest.mark.parametrize("rate", [1e-2, 1e-3])
def test_a_precision_with_a_vague_prior_starts_within_reach_of_the_data(rate):
    """Its median is about 1e-30, or zero by rounding; data are likelier there than at 1, and the likeliest between."""

    def model(y):
        a, tau = (
            pyro.sample("a", dist.Normal(0.0, 100.0)),
            pyro.sample("tau", dist.Gamma(rate, rate)),
        )
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.StudentT(4.0, a, tau.rsqrt()), obs=y)

    y = 50.0 + torch.randn(40, generator=torch.Generator().manual_seed(0))
    nodes, moved = starts(model, y)
    assert moved == {"tau"}
    assert 1e-5 < nodes["tau"]["value"] < 1e-2  # 1 / 50^2 is 4e-4


def test_a_prior_that_is_of_other_units_than_the_data_has_no_say():
    _, moved = starts(prices, torch.randn(40, generator=torch.Generator().manual_seed(0)))
    assert not moved


def test_a_scale_of_latents_does_not_shrink_to_where_they_have_yet_to_move():
    """About the origin latents are the likelier the smaller their scale is; the data do not know of that."""

    def model(y):
        tau = pyro.sample("tau", dist.HalfCauchy(0.02))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(0.0, tau))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    assert not starts(model, torch.randn(9))[1]


def test_latents_whose_names_differ_in_digits_start_alike():
    def model(y):
        x = torch.tensor(0.0)
        for t in range(len(y)):
            x = pyro.sample(f"x_{t}", dist.Normal(300.0 if t == 0 else x, 5.0))
            pyro.sample(f"y_{t}", dist.Normal(x, 1.0), obs=y[t])

    nodes, moved = starts(model, torch.tensor([290.0, 305.0, 310.0]))
    assert moved == {"x_0", "x_1", "x_2"}
    assert all(abs(nodes[name]["value"] - 300.0) < 0.2 for name in moved)


def test_latents_are_near_the_origin_where_the_model_fails_at_medians_or_has_no_data():
    def failing(y):
        s = pyro.sample("s", dist.LogNormal(8.0, 0.1))
        if s > 100.0:
            raise ArithmeticError
        pyro.sample("y", dist.Normal(0.0, s), obs=y)

    assert not starts(failing, torch.tensor(3e3))[1]
    assert not starts(lambda: pyro.sample("s", dist.LogNormal(8.0, 0.1)))[1]


def test_minibatches_stay():
    def model(y):
        s = pyro.sample("s", dist.HalfCauchy(1e4))
        with pyro.plate("rows", len(y), subsample_size=3) as rows:
            pyro.sample("y", dist.StudentT(4.0, 0.0, s), obs=y[rows])

    y = 1e4 * torch.randn(50)
    nodes, moved = starts(model, y)
    assert moved == {"s"}  # and no other rows than without
    assert not nodes["rows"]["is_observed"]


@pytest.mark.parametrize(
    "prior", [dist.Dirichlet(torch.tensor([40.0, 1.0, 1.0])), dist.Beta(30.0, 1.0)], ids=type
)
def test_other_supports(prior):
    def model(y):
        p = pyro.sample("p", prior)
        p = torch.stack([p, 1 - p]) if p.dim() == 0 else p
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Categorical(p), obs=y)

    nodes, moved = starts(model, torch.zeros(50).long())
    assert moved == {"p"}
    assert nodes["p"]["value"].flatten()[0] > 0.85


@pytest.mark.filterwarnings("error")
def test_reparametrizations_that_replace_starts_do_not_warn():
    """As nobody asked for these; under a prior that is no narrower than what it may be, too."""

    @poutine.reparam(config={"z": LatentStableReparam()})
    def model(y):
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Stable(1.5, 0.0))
        pyro.sample("y", dist.Normal(z.sum(), 1.0), obs=y.sum())

    assert "z_uniform" in starts(model, torch.randn(3))[0]
