"""Extraction against models whose networks are known by construction."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, config_enumerate
from pyro.infer.autoguide import AutoNormal
from pyro.infer.reparam import LocScaleReparam
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.distributions import constraints

from pyro_nami.extraction import extract, extract_bayesnet

ZERO, THREE = torch.zeros(()), torch.zeros(3)


@pytest.fixture(autouse=True)
def _fresh():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)


def normal(name, loc=0.0, scale=1.0, obs=None):
    return pyro.sample(name, dist.Normal(loc, scale), obs=obs)


def edges(text):
    """ "z>x w>x" as a set of pairs."""
    return {tuple(pair.split(">")) for pair in text.split()}


# Idioms whose provenance reaches every site: name -> (model, edges).
TRACKED = {}
# Idioms that lose it, so that edges are found by intervention and a warning says so.
LOST = {}


def idiom(table, expected):
    def register(model):
        table[model.__name__] = model, edges(expected)
        return model

    return register


@idiom(TRACKED, "z>x")
def plain():
    normal("x", 2 * normal("z") + 1, obs=ZERO)


@idiom(TRACKED, "a>c c>d e>d")
def collider():
    a = normal("a")
    normal("d", normal("c", a) + normal("e"), obs=ZERO)


@idiom(TRACKED, "")
def prior_only():
    normal("a"), normal("b")


@idiom(TRACKED, "mu>theta tau>theta theta>y")
def eight_schools():
    mu, tau = normal("mu", 0.0, 5.0), pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("J", 8):
        normal("y", normal("theta", mu, tau), torch.arange(1.0, 9.0), obs=torch.zeros(8))


@idiom(TRACKED, "z>t t>x")
def through_deterministic_only_when_read():
    z = normal("z")
    square = pyro.deterministic("square", z**2)
    normal("x", normal("t", square), obs=ZERO)


@idiom(TRACKED, "z>x")
def delta_latent():
    d = pyro.sample("d", dist.Delta(normal("z") + 1))
    normal("x", d, obs=ZERO)


@idiom(TRACKED, "z>f w>f")
def factor():
    pyro.factor("f", -((normal("z") - normal("w")) ** 2))


@idiom(TRACKED, "x>z z>y")
def observed_root():
    x = normal("x", obs=ZERO)
    normal("y", normal("z", x), obs=ZERO)


DATA = torch.randn(4)


@idiom(TRACKED, "x>z")
def raw_data_of_an_observed_site():
    summary = DATA.mean()
    normal("u")
    pyro.sample("x", dist.Normal(0.0, 1.0).expand([4]).to_event(1), obs=DATA)
    normal("z", summary)


@idiom(TRACKED, "z>x0 x0>x1 z>x1 x1>x2 z>x2")
def autoregression_on_raw_data():
    z = normal("z")
    for t in range(3):
        normal(f"x{t}", z * DATA[t - 1] if t else z, obs=DATA[t])


@idiom(TRACKED, "z>x")
def observed_latent():
    normal("x", obs=normal("z"))


@idiom(TRACKED, "z>x")
def masked_by_a_latent():
    z = pyro.sample("z", dist.Bernoulli(0.5))
    with poutine.mask(mask=z > 0):
        normal("x", obs=ZERO)


@idiom(TRACKED, "z>x")
def scaled_by_a_latent():
    with poutine.scale(scale=normal("z").exp()):
        normal("x", obs=ZERO)


@idiom(TRACKED, "z>y")
def likelihood_masked_out():
    z = normal("z")
    with poutine.mask(mask=False):
        normal("x", z, obs=ZERO)
    normal("y", z, obs=ZERO)


@idiom(TRACKED, "hi>z z>x")
def latent_support():
    hi = pyro.sample("hi", dist.LogNormal(0.0, 1.0))
    normal("x", pyro.sample("z", dist.Uniform(0.0, hi)), obs=ZERO)


@idiom(TRACKED, "z>x")
def indexed_by_category():
    z = pyro.sample("z", dist.Categorical(torch.ones(3)))
    normal("x", torch.tensor([-1.0, 0.0, 1.0])[z], obs=ZERO)


@idiom(TRACKED, "w>x z>x m>x")
def mixture_in_a_plate():
    w = pyro.sample("w", dist.Dirichlet(torch.ones(2)))
    m = pyro.sample("m", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    z = normal("z")
    with pyro.plate("n", 3):
        pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(w), dist.Normal(m + z, 1.0)), obs=THREE)


@idiom(TRACKED, "p>z z>x m>x")
@config_enumerate
def enumerated_mixture():
    p = pyro.sample("p", dist.Dirichlet(torch.ones(2)))
    m = pyro.sample("m", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with pyro.plate("n", 3):
        normal("x", m[pyro.sample("z", dist.Categorical(p))], obs=THREE)


@idiom(TRACKED, "c>y eta>y")
def ordered_logistic():
    c = pyro.sample("c", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1))
    pyro.sample("y", dist.OrderedLogistic(normal("eta"), c), obs=torch.tensor(1))


@idiom(TRACKED, "z>x")
def numel_of_shape():
    z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    normal("x", z.sum() / z.shape.numel(), obs=ZERO)


@idiom(TRACKED, "z>x")
def vmapped():
    z = pyro.sample("z", dist.Normal(THREE, 1.0).to_event(1))
    pyro.sample("x", dist.Normal(torch.func.vmap(lambda v: v * 2)(z), 1.0).to_event(1), obs=THREE)


@torch.jit.script
def scripted_double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@idiom(TRACKED, "z>x")
def scripted():
    normal("x", scripted_double(normal("z")), obs=ZERO)


@idiom(TRACKED, "z>x")
def rebuilt_tensor():
    z = normal("z")
    normal("x", torch.tensor([z, 1.0]).sum(), obs=ZERO)


@idiom(TRACKED, "z>x")
def filled_tensor():
    pyro.sample("x", dist.Normal(torch.full((3,), normal("z")), 1.0).to_event(1), obs=THREE)


@idiom(TRACKED, "z>x")
def written_with_out():
    loc = torch.zeros(())
    torch.mul(normal("z"), 2.0, out=loc)
    normal("x", loc, obs=ZERO)


@idiom(TRACKED, "z>x")
def copied_into_a_module():
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.copy_(normal("z").reshape(1, 1))
    normal("x", layer(torch.ones(1)).squeeze(), obs=ZERO)


@idiom(TRACKED, "z>y")
def shape_without_values():
    z = normal("z")
    normal("x", torch.zeros_like(z), obs=ZERO)
    normal("y", z, obs=ZERO)


@idiom(TRACKED, "z0>z1 z1>z2 z0>x0 z1>x1 z2>x2")
def buffer_scan():
    state = torch.zeros(2, 3)
    for t in range(3):
        state[:, t] = pyro.sample(
            f"z{t}", dist.Normal(state[:, t - 1] if t else state[:, 0], 1.0).to_event(1)
        )
    for t in range(3):
        pyro.sample(f"x{t}", dist.Normal(state[:, t], 1.0).to_event(1), obs=torch.zeros(2))


@idiom(TRACKED, "z0>x0 z1>x1 z2>x2")
def stacked_then_transformed():
    loc = 1 + torch.stack([normal(f"z{t}") for t in range(3)]).exp()
    for t in range(3):
        normal(f"x{t}", loc[t], obs=ZERO)


@idiom(TRACKED, "z0>z1 z1>z2 z0>x0 z1>x1 z2>x2")
def markov_chain():
    z = 0.0
    for t in pyro.markov(range(3)):
        z = normal(f"z{t}", z)
        normal(f"x{t}", z, obs=ZERO)


@idiom(TRACKED, "mu>z_0 mu>z_1 z_0>x_0 z_1>x_1")
def sequential_plate():
    mu = normal("mu")
    for i in pyro.plate("seq", 2):
        normal(f"x_{i}", normal(f"z_{i}", mu), obs=ZERO)


@idiom(TRACKED, "mu>z z>x")
def subsampled():
    mu = normal("mu")
    with pyro.plate("n", 10, subsample_size=3) as i:
        normal("x", normal("z", mu), obs=torch.arange(10.0)[i])


@idiom(TRACKED, "alpha>y")
def index_map_into_another_plate():
    with pyro.plate("county", 3):
        alpha = normal("alpha")
    with pyro.plate("house", 5):
        normal("y", alpha[torch.tensor([0, 1, 2, 0, 1])], obs=torch.zeros(5))


@idiom(TRACKED, "r>x c>x cell>x")
def crossed_plates():
    rows, columns = pyro.plate("rows", 2, dim=-2), pyro.plate("columns", 3, dim=-1)
    with rows:
        r = normal("r")
    with columns:
        c = normal("c")
    with rows, columns:
        normal("x", r + c + normal("cell"), obs=torch.zeros(2, 3))


@idiom(TRACKED, "y_observed>x y_unobserved>x z>y_observed z>y_unobserved")
def partly_observed():
    z = normal("z")
    with pyro.plate("n", 3):
        y = pyro.sample("y", dist.Normal(z, 1.0), obs=THREE, obs_mask=torch.tensor([True, False, True]))
        normal("x", y, obs=THREE)


@idiom(TRACKED, "z>x")
def improper():
    z = pyro.sample("z", dist.ImproperUniform(constraints.positive, (), (2,)))
    normal("x", z.sum(), obs=ZERO)


@idiom(TRACKED, "z>x")
def empty_sites():
    z = normal("z")
    normal("e", torch.zeros(0))
    normal("x", z, obs=ZERO)


@idiom(TRACKED, "z>x")
def python_number_observed():
    normal("x", normal("z"), obs=0.0)


@idiom(TRACKED, "z>x")
def cholesky_and_friends():
    z = pyro.sample("z", dist.LKJCholesky(2))
    pyro.sample("x", dist.MultivariateNormal(torch.zeros(2), scale_tril=z), obs=torch.zeros(2))


@idiom(TRACKED, "z>x")
def sampled_multinomial():
    z = pyro.sample("z", dist.Multinomial(4, torch.ones(3)))
    pyro.sample("x", dist.Normal(z, 1.0).to_event(1), obs=THREE)


@idiom(TRACKED, "a>m m>x b>x")
def conditioned_inside():
    a = normal("a")
    poutine.condition(lambda: normal("x", normal("m", a) + normal("b")), {"x": ZERO})()


@idiom(TRACKED, "loc_decentered>x mu>x")
def reparametrized():
    def model():
        normal("x", normal("loc", normal("mu"), 1.0), obs=ZERO)

    poutine.reparam(model, {"loc": LocScaleReparam(0.0)})()


@idiom(TRACKED, "y>x")
def intervened_by_do():
    def model():
        z = normal("z")
        normal("x", z + normal("y"), obs=ZERO)

    poutine.do(model, {"z": ZERO})()


@idiom(TRACKED, "w>x")
def lifted():
    poutine.lift(lambda: normal("x", pyro.param("w", ZERO), obs=ZERO), {"w": dist.Normal(0.0, 1.0)})()


class Regression(PyroModule):
    def __init__(self):
        super().__init__()
        self.linear = PyroModule[nn.Linear](2, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
        self.linear.bias = PyroSample(lambda self: dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        self.act = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Dropout(0.5))

    def forward(self):
        loc = self.act(self.linear(torch.ones(3, 2))).squeeze(-1)
        with pyro.plate("n", 3):
            normal("y", loc, obs=THREE)


@idiom(TRACKED, "linear.weight>y linear.bias>y")
def bayesian_regression():
    Regression()()


# What provenance cannot see.


@idiom(LOST, "z>x")
def item():
    normal("x", normal("z").item(), obs=ZERO)


@idiom(LOST, "z>x")
def math_function():
    normal("x", math.exp(normal("z")), obs=ZERO)


@idiom(LOST, "z>x")
def through_numpy():
    normal("x", torch.as_tensor(np.sin(normal("z").numpy())), obs=ZERO)


@idiom(LOST, "z>x")
def through_list():
    z = pyro.sample("z", dist.Normal(THREE, 1.0).to_event(1))
    normal("x", sum(z.tolist()), obs=ZERO)


@idiom(LOST, "b>x z>x")
def branch():
    b, z = normal("b"), normal("z")
    normal("x", z if b > 0 else 2 * z + 1, obs=ZERO)


@idiom(LOST, "k>x z>x")
def loop():
    k, z = pyro.sample("k", dist.Poisson(2.0)), normal("z")
    while k > 0:
        z, k = 2 * z, k - 1
    normal("x", z, obs=ZERO)


@idiom(LOST, "k>x")
def list_index():
    k = pyro.sample("k", dist.Categorical(torch.ones(4)))
    normal("x", [0.0, 1.0, 2.0, 3.0][k], obs=ZERO)


@idiom(LOST, "k>x")
def dict_index():
    k = pyro.sample("k", dist.Bernoulli(0.01))
    normal("x", {0: 0.0, 1: 1.0}[int(k)], obs=ZERO)


@idiom(LOST, "a>x b>x")
def conjunction():
    a, b = pyro.sample("a", dist.Bernoulli(0.5)), pyro.sample("b", dist.Bernoulli(0.5))
    normal("c"), normal("d")
    normal("x", 1.0 if a and b else 0.0, obs=ZERO)


@idiom(LOST, "z>w w>x")
def python_chain():
    normal("x", normal("w", normal("z").item()).item(), obs=ZERO)


@idiom(LOST, "a>x c>x e>x")
def several_at_once():
    values = {name: normal(name).item() for name in "abcdef"}
    normal("x", values["a"] + values["c"] * values["e"], obs=ZERO)


@idiom(LOST, "o>x")
def observed_value_in_python():
    normal("x", normal("o", obs=torch.ones(())).item())


@idiom(LOST, "n>x")
def shape_from_a_latent():
    n = pyro.sample("n", dist.Categorical(torch.ones(3)))
    pyro.sample("x", dist.Normal(torch.zeros(int(n) + 1), 1.0).to_event(1), obs=ZERO.expand(int(n) + 1))


@idiom(LOST, "k>x")
def failing_at_other_values():
    k = pyro.sample("k", dist.Bernoulli(1e-6))
    normal("x", [0.0][int(k)], obs=ZERO)


@pytest.mark.parametrize("model, expected", TRACKED.values(), ids=TRACKED)
def test_provenance_finds_the_network(model, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "To copy construct|Converting a tensor|.*torch.jit")
        assert set(extract_bayesnet(model).edges) == expected


@pytest.mark.parametrize("model, expected", LOST.values(), ids=LOST)
def test_interventions_find_what_provenance_lost(model, expected):
    with pytest.warns(UserWarning, match="found by intervention"):
        assert set(extract_bayesnet(model).edges) == expected


@idiom(TRACKED, "z>x")
def cached_transform():
    base = dist.Normal(normal("z"), 1.0)
    x = pyro.sample("x", dist.TransformedDistribution(base, [dist.transforms.ExpTransform(cache_size=1)]))
    normal("y", obs=ZERO + 0 * x)
