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

from pyro_nami.reading.network import extract, extract_bayesnet

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


PLANAR = dist.transforms.planar(2)


@idiom(TRACKED, "w>z z>x")
def transform_without_inverse():
    z = dist.TransformedDistribution(dist.Normal(normal("w") * torch.ones(2), 1.0).to_event(1), [PLANAR])
    normal("x", pyro.sample("z", z).sum(), obs=ZERO)


@idiom(TRACKED, "z>x")
def cached_transform():
    base = dist.Normal(normal("z"), 1.0)
    x = pyro.sample("x", dist.TransformedDistribution(base, [dist.transforms.ExpTransform(cache_size=1)]))
    normal("y", obs=ZERO + 0 * x)


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


@idiom(LOST, "a>x b>x")
def read_only_in_a_rare_branch():
    a, b = pyro.sample("a", dist.Bernoulli(1e-6)), normal("b")
    normal("x", b.item() if a else 0.0, obs=ZERO)


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


def test_a_model_that_fails_at_other_values_is_told_of():
    with pytest.warns(UserWarning, match="fails before site 'x'.*IndexError"):
        extract_bayesnet(failing_at_other_values)


class TestSites:
    def test_plates_are_the_vectorized_ones_at_full_size(self):
        net = extract_bayesnet(subsampled)
        assert net.plates["z"] == net.plates["x"] == {"n"} and net.plates["mu"] == frozenset()
        assert dict(net.plate_sizes) == {"n": 10}
        assert dict(extract_bayesnet(sequential_plate).plate_sizes) == {}
        assert extract_bayesnet(crossed_plates).plates["cell"] == {"rows", "columns"}

    def test_plate_without_a_size_takes_it_from_its_sites(self):
        def model():
            with pyro.plate("p"):
                normal("x", pyro.sample("z", dist.Normal(THREE, 1.0)), obs=THREE)

        assert dict(extract_bayesnet(model).plate_sizes) == {"p": 3}

    def test_observed_and_latent_sites_come_in_model_order(self):
        net = extract_bayesnet(collider)
        assert net.latent == ("a", "c", "e") and net.observed == ("d",)

    def test_factor_is_observed(self):
        assert extract_bayesnet(factor).observed == ("f",)

    def test_masked_out_likelihood_and_deterministic_sites_are_no_sites(self):
        assert "x" not in extract_bayesnet(likelihood_masked_out).sites
        assert "square" not in extract_bayesnet(through_deterministic_only_when_read).sites
        assert "d" not in extract_bayesnet(delta_latent).sites

    def test_enumerated_sites_are_marginalized(self):
        net = extract_bayesnet(enumerated_mixture)
        assert [name for name in net.sites if net.sites[name].marginalized] == ["z"]

    def test_support_parents(self):
        net = extract_bayesnet(latent_support)
        assert net.sites["z"].support_parents == {"hi"} and net.sites["x"].support_parents == frozenset()

    def test_support_parents_found_by_intervention(self):
        def model():
            hi, scale = (
                pyro.sample("hi", dist.LogNormal(0.0, 1.0)),
                pyro.sample("s", dist.LogNormal(0.0, 1.0)),
            )
            z = pyro.sample("z", dist.Uniform(-hi.item(), hi.item()))
            pyro.sample("x", dist.Normal(z, scale.item()), obs=ZERO)

        with pytest.warns(UserWarning, match="found by intervention"):
            net = extract_bayesnet(model)
        assert set(net.edges) == edges("hi>z z>x s>x")
        assert net.sites["z"].support_parents == {"hi"}

    def test_observed_names_a_site_that_the_model_samples(self):
        net = extract_bayesnet(prior_only, observed=["b"])
        assert net.latent == ("a",) and net.observed == ("b",)

    def test_unknown_observed_name_is_an_error(self):
        with pytest.raises(ValueError, match="`observed`; got 'c'. The model's sites are: a, b"):
            extract_bayesnet(prior_only, observed=["c"])

    def test_model_without_latents(self):
        net = extract_bayesnet(lambda: normal("x", obs=ZERO))
        assert net.latent == () and net.observed == ("x",)

    def test_model_without_sites(self):
        assert not extract_bayesnet(lambda: None).sites

    def test_arguments_reach_the_model(self):
        def model(x, *, y):
            normal("y", normal("z", x), obs=y)

        found = extract(model, (ZERO,), {"y": THREE[0]})
        assert set(found.bayesnet.edges) == edges("z>y")

    def test_init_gives_the_values_that_cannot_be_sampled(self):
        found = extract(improper, init=lambda site: torch.tensor([2.0, 3.0]))
        assert found.trace.nodes["z"]["value"].tolist() == [2.0, 3.0]
        assert set(found.bayesnet.edges) == edges("z>x")

    def test_latent_without_sampler_or_bijection_is_an_error(self):
        def model():
            pyro.sample("z", dist.ImproperUniform(dist.constraints.sphere, (), (3,)))

        with pytest.raises(NotImplementedError, match="got 'z' with ImproperUniform. Pass `init`"):
            extract(model)


class TestInterventions:
    def test_escaped_values_are_named(self):
        with pytest.warns(UserWarning, match="'x' depends on 'z'"):
            assert extract(item).escaped == {"z"}
        assert extract(plain).escaped == frozenset()

    def test_harmless_escapes_add_no_edge(self):
        def model():
            z = normal("z")
            assert math.isfinite(z.item())
            normal("x", obs=ZERO)

        assert extract_bayesnet(model).edges == ()

    def test_without_checks_what_escaped_reaches_every_later_site(self):
        def model():
            z, w = normal("z"), normal("w")
            str(z.item())
            normal("x", w, obs=ZERO), normal("y", obs=ZERO)

        assert set(extract_bayesnet(model, checks=0).edges) == edges("z>x w>x z>y")

    def test_budget_is_kept_and_reported(self):
        runs = 0

        def model():
            nonlocal runs
            runs += 1
            for i in range(20):
                normal(f"x{i}", normal(f"z{i}"), obs=ZERO)

        assert extract(model).checked == 40
        runs = 0
        found = extract(model, checks=5)
        assert runs <= 9 and found.checked < 40
        assert set(found.bayesnet.edges) == {(f"z{i}", f"x{i}") for i in range(20)}

    def test_an_exhausted_budget_errs_on_the_safe_side(self):
        with pytest.warns(UserWarning, match="found by intervention"):
            found = extract(several_at_once, checks=2)
        assert set(found.bayesnet.edges) >= edges("a>x c>x e>x")

    def test_raw_argument_read_through_python(self):
        def model(x):
            mean = x.mean().item()
            pyro.sample("x", dist.Normal(THREE, 1.0).to_event(1), obs=x)
            normal("z", mean)

        with pytest.warns(UserWarning, match="'z' depends on 'x'"):
            assert set(extract_bayesnet(model, torch.ones(3)).edges) == edges("x>z")

    def test_data_dependent_prior_makes_no_cycle(self):
        def model(x):
            z = normal("z", x.mean())
            pyro.sample("x", dist.Normal(z.expand(3), 1.0).to_event(1), obs=x)

        assert set(extract_bayesnet(model, torch.ones(3)).edges) == edges("z>x")

    def test_appearing_site_is_an_error_that_names_it(self):
        def model():
            if pyro.sample("b", dist.Bernoulli(1e-6)):
                normal("extra")

        with pytest.raises(ValueError, match="same sites in every run of the model; got 'extra'"):
            extract_bayesnet(model)

    def test_number_of_sites_from_a_latent_is_an_error(self):
        def model():
            for i in pyro.plate("p", 1 + int(pyro.sample("n", dist.Poisson(3.0)))):
                normal(f"z{i}")

        with pytest.raises(ValueError, match="same sites in every run of the model; got 'z"):
            extract_bayesnet(model)

    def test_hidden_randomness_is_reported_and_couples_everything_before(self):
        def model():
            a, b = normal("a"), normal("b")
            normal("x", a, obs=ZERO)
            normal("y", b + torch.randn(()), obs=ZERO)

        with pytest.warns(UserWarning, match="Hidden randomness: 'y' differ"):
            found = extract(model)
        assert found.hidden_randomness == {"y"}
        assert set(found.bayesnet.edges) == edges("a>x a>y b>y")

    def test_sites_blocked_on_purpose_are_hidden_randomness_without_a_warning(self):
        def model():
            w = normal("w")
            normal("x", w + normal("a"), obs=ZERO), normal("y", w, obs=ZERO)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = extract(poutine.block(model, hide=["w"]))
        assert found.hidden_randomness == {"x", "y"} and "w" not in found.bayesnet.sites
        assert set(found.bayesnet.edges) == edges("a>x a>y x>y")

    def test_same_seed_same_result(self):
        def run():
            pyro.set_rng_seed(1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return extract(several_at_once)

        first, second = run(), run()
        assert first.bayesnet.edges == second.bayesnet.edges
        assert first.trace.nodes["a"]["value"] == second.trace.nodes["a"]["value"]


class TestPlates:
    @pytest.mark.parametrize("size", [2, 7])
    def test_coupling_of_a_plate_declared_independent_is_an_error(self, size):
        def model():
            with pyro.plate("p", size):
                normal("w")
                z = normal("z")
                normal("x", z.cumsum(-1), obs=torch.zeros(size))

        with pytest.raises(ValueError, match="'x', declared independent in plate 'p'; .* instances of 'z'"):
            extract_bayesnet(model)

    def test_coupling_along_one_of_two_plates(self):
        def model():
            with pyro.plate("rows", 3, dim=-2), pyro.plate("columns", 4, dim=-1):
                z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
                normal("x", z.sum(-1).mean(-2, keepdim=True), obs=torch.zeros(3, 4))

        with pytest.raises(ValueError, match="plate 'rows'"):
            extract_bayesnet(model)

    def test_coupling_by_a_discrete_latent(self):
        def model():
            with pyro.plate("p", 4):
                z = pyro.sample("z", dist.Bernoulli(0.5))
                normal("x", z.sum(), obs=torch.zeros(4))

        with pytest.raises(ValueError, match="plate 'p'"):
            extract_bayesnet(model)

    def test_reading_a_plate_from_outside_is_no_coupling(self):
        def model():
            with pyro.plate("p", 4):
                z = normal("z")
            normal("s", z.sum())
            with pyro.plate("q", 3):
                normal("x", z[:3], obs=THREE)

        assert set(extract_bayesnet(model).edges) == edges("z>s z>x")


class TestLeavesNothingBehind:
    def test_random_number_generators(self):
        state = torch.get_rng_state(), np.random.get_state()[1].tolist()
        extract_bayesnet(eight_schools)
        assert torch.equal(torch.get_rng_state(), state[0])
        assert np.random.get_state()[1].tolist() == state[1]

    def test_parameter_store(self):
        kept = pyro.param("kept", torch.ones(()), constraint=constraints.positive)
        unconstrained = kept.unconstrained()

        def model():
            normal("x", pyro.param("kept") + pyro.param("new", torch.randn(())), obs=ZERO)

        extract_bayesnet(model)
        store = pyro.get_param_store()
        assert list(store.keys()) == ["kept"]
        assert store["kept"].unconstrained() is unconstrained and kept.unconstrained() is unconstrained

    def test_modules_in_training_mode(self):
        model = Regression()
        norm, before = model.act[1], model.act[1].running_mean.clone()
        net = extract_bayesnet(model)
        assert set(net.edges) == edges("linear.weight>y linear.bias>y")
        assert all(module.training for module in model.modules())
        assert torch.equal(norm.running_mean, before) and norm.num_batches_tracked == 0

    @pytest.mark.parametrize("wrap", [lambda f: f, poutine.trace, config_enumerate])
    def test_modules_that_a_function_closes_over(self, wrap):
        norm = nn.BatchNorm1d(1)

        def model():
            pyro.module("norm", norm)
            normal("x", norm(normal("z") + torch.randn(5, 1)).mean().detach(), obs=ZERO)

        with pytest.warns(UserWarning, match="Hidden randomness"):
            extract_bayesnet(wrap(model))
        assert norm.num_batches_tracked == 0 and norm.training

    def test_handlers_outside_see_nothing(self):
        with poutine.trace() as tracer, pyro.plate("particles", 7, dim=-3):
            found = extract(eight_schools)
        assert [name for name in tracer.trace.nodes if name != "particles"] == []
        assert found.trace.nodes["theta"]["value"].shape == (8,)
        assert found.bayesnet.plates["mu"] == frozenset()

    def test_validation_and_gradient_modes(self):
        extract_bayesnet(plain)
        assert torch.is_grad_enabled()
        with pytest.raises(ValueError, match="constraint"):
            dist.Normal(0.0, -1.0)

    def test_state_is_restored_after_an_error(self):
        state, store = torch.get_rng_state(), pyro.get_param_store()

        def model():
            pyro.param("p", ZERO)
            raise RuntimeError("broken")

        with pytest.raises(RuntimeError, match="broken"):
            extract_bayesnet(model)
        assert torch.equal(torch.get_rng_state(), state) and not list(store.keys())
        assert torch.is_grad_enabled()

    def test_parameters_of_the_model_still_train(self):
        model = Regression()
        extract_bayesnet(model)
        guide = AutoNormal(model)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
        before = model.act[0].weight.detach().clone()
        svi.step(), svi.step()
        assert not torch.equal(model.act[0].weight, before)

    def test_trace_has_plain_values(self):
        trace = extract(eight_schools).trace
        assert all(
            type(site["value"]) is torch.Tensor and not site["value"].requires_grad
            for site in trace.nodes.values()
            if site["type"] == "sample" and site["value"] is not None
        )
