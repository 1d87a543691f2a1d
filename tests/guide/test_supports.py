"""A latent on every support that a family covers, alone, in a plate, and beside another latent."""

from __future__ import annotations

import contextlib
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import pair, scatter, steps
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide.initialization import init_to_value

from pyro_nami import AutoNaMIGuide

pytestmark = [
    pytest.mark.filterwarnings("error", "ignore:Singular sample detected"),
    pytest.mark.usefixtures("double"),
]


# name -> the prior, made when it is needed so that it has the dtype of the test
SUPPORTS = {
    "real": lambda: dist.Normal(torch.tensor(0.0), 1.0),
    "real vector": lambda: dist.MultivariateNormal(torch.zeros(2), torch.eye(2)),
    "matrix": lambda: dist.Normal(torch.zeros(2, 3), 1.0).to_event(2),
    "positive": lambda: dist.Gamma(torch.tensor(2.0), torch.tensor(1.0)),
    "nonnegative": lambda: dist.HalfCauchy(torch.tensor(1.0)),
    "greater than": lambda: dist.Pareto(torch.tensor(1.5), torch.tensor(3.0)),
    "interval": lambda: dist.Uniform(torch.tensor(-1.0), torch.tensor(2.0)),
    "unit interval": lambda: dist.Beta(torch.tensor(2.0), torch.tensor(3.0)),
    "circle": lambda: dist.VonMises(torch.tensor(0.5), torch.tensor(2.0)),
    "simplex": lambda: dist.Dirichlet(torch.ones(3)),
    "simplices": lambda: dist.Dirichlet(torch.ones(2, 3)).to_event(1),
    "correlation Cholesky": lambda: dist.LKJCholesky(3, torch.tensor(2.0)),
    "positive definite": lambda: dist.Wishart(torch.tensor(4.0), torch.eye(2)),
    "mixture": lambda: dist.MixtureSameFamily(
        dist.Categorical(torch.ones(2)), dist.Normal(torch.tensor([-2.0, 2.0]), 1.0)
    ),
    "transformed": lambda: dist.TransformedDistribution(
        dist.Normal(torch.tensor(0.0), 1.0), [dist.transforms.AffineTransform(1.0, 2.0)]
    ),
    "masked": lambda: (
        dist.Normal(torch.zeros(2), 1.0).mask(torch.tensor([True, False])).to_event(1)
    ),
    "Stable": lambda: dist.Stable(torch.tensor(1.5), torch.tensor(0.0)),
    "ordered": lambda: dist.TransformedDistribution(
        dist.Normal(torch.zeros(3), 1.0).to_event(1), [dist.transforms.OrderedTransform()]
    ),
    "lower Cholesky": lambda: dist.TransformedDistribution(
        dist.Normal(torch.zeros(3), 1.0).to_event(1), [dist.transforms.CorrCholeskyTransform()]
    ),
}


def particles(count):
    return Trace_ELBO(num_particles=count, vectorize_particles=True)


def total(z, event_dim):
    return z.reshape(z.shape[: z.dim() - event_dim] + (-1,)).sum(-1)


def one_site(prior, plate):
    """A model with a latent of this prior, one for each datum or one for all."""

    def model(y):
        scale = pyro.sample("scale", dist.LogNormal(torch.tensor(0.0), 0.3))
        data = pyro.plate("data", len(y))
        with data if plate else contextlib.nullcontext():
            z = pyro.sample("z", prior())
        with data:
            pyro.sample("y", dist.Normal(total(z, prior().event_dim), scale), obs=y)

    return model


@pytest.mark.parametrize(
    "support, inverse, plate",
    [
        (support, inverse, bool((i + j) % 2))
        for i, support in enumerate(SUPPORTS)
        for j, inverse in enumerate(["forward", "reverse"])
    ],
)
def test_every_support(support, inverse, plate):
    prior, y = SUPPORTS[support], torch.randn(3)
    model = one_site(prior, plate)
    guide = AutoNaMIGuide(model, inverse=inverse)
    steps(model, guide, y, elbo=particles(2))
    scatter(guide, 0.03)
    trace = poutine.trace(guide).get_trace(y)
    trace.compute_log_prob()
    values = {name: trace.nodes[name]["value"] for name in ("scale", "z")}
    assert prior().support.check(values["z"]).all()
    assert torch.allclose(guide.log_prob(values, y), trace.log_prob_sum(), rtol=1e-5, atol=1e-5)


# constraint, number of event dims, a value to start from
IMPROPER = {
    "real": (constraints.real, 0, 0.5),
    "positive": (constraints.positive, 0, 0.5),
    "ordered": (constraints.ordered_vector, 1, [-1.0, 0.5, 2.0]),
    "positive ordered": (constraints.positive_ordered_vector, 1, [0.3, 0.5, 2.0]),
    "lower Cholesky": (constraints.lower_cholesky, 2, [[1.0, 0.0], [0.5, 2.0]]),
    "half open": (constraints.half_open_interval(0.0, 1.0), 0, 0.5),
    "softplus positive": (constraints.softplus_positive, 0, 0.5),
}


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
@pytest.mark.parametrize("name", IMPROPER)
def test_improper_priors_need_no_sampling(name, inverse):
    """`ImproperUniform.sample` raises: nothing may call it, given a strategy that does not (contract 5)."""
    constraint, event_dim, start = IMPROPER[name]
    start, y = torch.tensor(start), torch.tensor(1.0)
    prior = dist.ImproperUniform(constraint, torch.Size(), start.shape)
    model = pair(prior, lambda z: dist.Normal(total(z, event_dim), 1.0))
    strategy = init_to_value(values={"z": start})
    guide = AutoNaMIGuide(
        model, inverse=inverse, init_loc_fn=strategy, init_scale=1e-4, exact=False
    )
    assert torch.allclose(guide(y)["z"], start, atol=1e-2)
    steps(model, guide, y, count=2, elbo=particles(2))
    pyro.clear_param_store()
    # the latter by its own strategy
    for value in (guide(y)["z"], AutoNaMIGuide(model, inverse=inverse)(y)["z"]):
        assert constraint.check(value).all() and value.shape == start.shape


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_a_support_that_moves_with_another_latent_and_with_data(inverse):
    """Bounds from a latent, from an argument, and both at once."""

    def model(low, y):
        width = pyro.sample("width", dist.Gamma(torch.tensor(3.0), torch.tensor(1.0)))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Uniform(low, low + width))
            pyro.sample("y", dist.Normal(z, 0.5), obs=y)

    guide = AutoNaMIGuide(model, inverse=inverse)
    for low in (torch.zeros(4), torch.tensor([5.0, -5.0, 0.0, 100.0])):
        y = low + 1
        steps(model, guide, low, y, count=2, elbo=particles(3))
        values = guide(low, y)
        assert ((values["z"] > low) & (values["z"] < low + values["width"])).all()


def moving_bounds(y):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Uniform(a.sin(), a.sin() + 2))
    with pyro.plate("groups", 3):
        low = (a + b).unsqueeze(-1)  # without the plate's dim, and of one element
        z = pyro.sample("z", dist.Uniform(low, low + torch.tensor([1.0, 2.0])).to_event(1))
        c = pyro.sample("c", dist.Normal(z.sum(-1), 1.0))
        pyro.sample("y", dist.Normal(c * z[..., 0], 1.0), obs=y)


@pytest.mark.parametrize("families", [None, "mixture"])
@pytest.mark.parametrize("within", ["autoregressive", "independent"])
@pytest.mark.parametrize("inverse", ["forward", "reverse", "fully_connected"])
def test_a_draw_on_a_moving_support_has_the_density_that_it_is_replayed_with(
    inverse, within, families, double
):
    """Others read it in one set of coordinates, whether it was drawn, replayed or scored."""
    y = torch.tensor([0.3, -0.2, 1.0])
    guide = AutoNaMIGuide(moving_bounds, inverse=inverse, within=within, families=families)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # independent instances, where they are not
        guide(y)
    scatter(guide)
    trace = poutine.trace(guide).get_trace(y)
    values = {name: node["value"].detach().clone() for name, node in trace.iter_stochastic_nodes()}
    values = {name: value for name, value in values.items() if name != "groups"}
    expected = trace.log_prob_sum()
    replayed = poutine.trace(poutine.condition(guide, values)).get_trace(y)
    assert torch.allclose(replayed.log_prob_sum(), expected, rtol=1e-8)
    assert torch.allclose(guide.log_prob(values, y), expected, rtol=1e-8)
    assert (values["z"][:, 0] != values["z"][:, 1]).all()
