"""Extraction against models whose networks are known by construction."""

from __future__ import annotations

import math
import warnings
from contextlib import ExitStack

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from models import Counted
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, config_enumerate
from pyro.infer.autoguide import AutoNormal
from pyro.infer.reparam import LocScaleReparam
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.distributions import constraints

from pyro_nami.reading.extraction import extract, extract_bayesnet

ZERO, THREE = torch.zeros(()), torch.zeros(3)


def normal(name, loc=0.0, scale=1.0, obs=None):
    return pyro.sample(name, dist.Normal(loc, scale), obs=obs)


def vector(name="z", size=3, loc=0.0, obs=None):
    return pyro.sample(name, dist.Normal(loc, 1.0).expand([size]).to_event(1), obs=obs)


def datum(loc=0.0, scale=1.0, name="x"):
    return normal(name, loc, scale, obs=ZERO)


def bernoulli(name, p=0.5):
    return pyro.sample(name, dist.Bernoulli(p))


def edges(text):
    """ "z>x w>x" as a set of pairs."""
    return {tuple(pair.split(">")) for pair in text.split()}


# Idioms whose provenance reaches every site, and those that lose it, so that edges are found by intervention and a
# warning says so: name -> (edges, model).
TRACKED, LOST = {}, {}


def idiom(table, expected):
    def register(model):
        table[model.__name__] = expected, model
        return model

    return register


@idiom(TRACKED, "mu>theta tau>theta theta>y")
def eight_schools():
    mu, tau = normal("mu", 0.0, 5.0), pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("J", 8):
        normal("y", normal("theta", mu, tau), torch.arange(1.0, 9.0), obs=torch.zeros(8))


DATA = torch.randn(4)


@idiom(TRACKED, "w>x z>x m>x")
def mixture_in_a_plate():
    w, m, z = pyro.sample("w", dist.Dirichlet(torch.ones(2))), vector("m", 2), normal("z")
    with pyro.plate("n", 3):
        pyro.sample(
            "x", dist.MixtureSameFamily(dist.Categorical(w), dist.Normal(m + z, 1.0)), obs=THREE
        )


@idiom(TRACKED, "p>z z>x m>x")
@config_enumerate
def enumerated_mixture():
    p, m = pyro.sample("p", dist.Dirichlet(torch.ones(2))), vector("m", 2)
    with pyro.plate("n", 3):
        normal("x", m[pyro.sample("z", dist.Categorical(p))], obs=THREE)


@torch.jit.script
def scripted_double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@idiom(TRACKED, "z>x")
def copied_into_a_module():
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.copy_(normal("z").reshape(1, 1))
    datum(layer(torch.ones(1)).squeeze())


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
        y = pyro.sample(
            "y", dist.Normal(z, 1.0), obs=THREE, obs_mask=torch.tensor([True, False, True])
        )
        normal("x", y, obs=THREE)


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


PLANAR = dist.transforms.planar(2)


TRACKED.update(
    plain=("z>x", lambda: datum(2 * normal("z") + 1)),
    collider=("a>c c>d e>d", lambda: datum(normal("c", normal("a")) + normal("e"), name="d")),
    prior_only=("", lambda: (normal("a"), normal("b"))),
    deterministic=(
        "z>t t>x",
        lambda: datum(normal("t", pyro.deterministic("square", normal("z") ** 2))),
    ),
    delta_latent=("z>x", lambda: datum(pyro.sample("d", dist.Delta(normal("z") + 1)))),
    factor=("z>f w>f", lambda: pyro.factor("f", -((normal("z") - normal("w")) ** 2))),
    latent_support=(
        "hi>z z>x",
        lambda: datum(
            pyro.sample("z", dist.Uniform(0.0, pyro.sample("hi", dist.LogNormal(0.0, 1.0))))
        ),
    ),
    improper=(
        "z>x",
        lambda: datum(pyro.sample("z", dist.ImproperUniform(constraints.positive, (), (2,))).sum()),
    ),
    reparametrized=(
        "loc_decentered>x mu>x",
        lambda: poutine.reparam(
            lambda: datum(normal("loc", normal("mu"), 1.0)), {"loc": LocScaleReparam(0.0)}
        )(),
    ),
    lifted=(
        "w>x",
        lambda: poutine.lift(lambda: datum(pyro.param("w", ZERO)), {"w": dist.Normal(0.0, 1.0)})(),
    ),
    masked_by_a_latent=("z>x", lambda: poutine.mask(datum, mask=bernoulli("z") > 0)()),
    scaled_by_a_latent=("z>x", lambda: poutine.scale(datum, scale=normal("z").exp())()),
    likelihood_masked_out=(
        "z>y",
        lambda: (poutine.mask(datum, mask=False)(z := normal("z")), datum(z, name="y")),
    ),
    raw_data_of_an_observed_site=(
        "x>z",
        lambda: (
            summary := DATA.mean(),
            normal("u"),
            vector("x", 4, obs=DATA),
            normal("z", summary),
        ),
    ),
    autoregression_on_raw_data=(
        "z>x0 x0>x1 z>x1 x1>x2 z>x2",
        lambda: (
            z := normal("z"),
            [normal(f"x{t}", z * DATA[t - 1] if t else z, obs=DATA[t]) for t in range(3)],
        ),
    ),
    markov_chain=(
        "z0>z1 z1>z2 z0>x0 z1>x1 z2>x2",
        lambda: (
            z := 0.0,
            [datum(z := normal(f"z{t}", z), name=f"x{t}") for t in pyro.markov(range(3))],
        ),
    ),
    sequential_plate=(
        "mu>z_0 mu>z_1 z_0>x_0 z_1>x_1",
        lambda: (
            mu := normal("mu"),
            [datum(normal(f"z_{i}", mu), name=f"x_{i}") for i in pyro.plate("seq", 2)],
        ),
    ),
    transform_without_inverse=(
        "w>z z>x",
        lambda: datum(
            pyro.sample(
                "z",
                dist.TransformedDistribution(
                    dist.Normal(normal("w") * torch.ones(2), 1.0).to_event(1), [PLANAR]
                ),
            ).sum()
        ),
    ),
    cached_transform=(
        "z>x",
        lambda: normal(
            "y",
            obs=ZERO
            + 0
            * pyro.sample(
                "x",
                dist.TransformedDistribution(
                    dist.Normal(normal("z"), 1.0), [dist.transforms.ExpTransform(cache_size=1)]
                ),
            ),
        ),
    ),
    observed_root=("x>z z>y", lambda: datum(normal("z", datum()), name="y")),
    observed_latent=("z>x", lambda: normal("x", obs=normal("z"))),
    indexed_by_category=(
        "z>x",
        lambda: datum(
            torch.tensor([-1.0, 0.0, 1.0])[pyro.sample("z", dist.Categorical(torch.ones(3)))]
        ),
    ),
    ordered_logistic=(
        "c>y eta>y",
        lambda: pyro.sample(
            "y",
            dist.OrderedLogistic(normal("eta"), vector("c", 2, torch.tensor([-4.0, 4.0]))),
            obs=torch.tensor(1),
        ),
    ),
    numel_of_shape=("z>x", lambda: datum((z := vector(size=2)).sum() / z.shape.numel())),
    scripted=("z>x", lambda: datum(scripted_double(normal("z")))),
    shape_without_values=(
        "z>y",
        lambda: (datum(torch.zeros_like(z := normal("z"))), datum(z, name="y")),
    ),
    empty_sites=("z>x", lambda: (z := normal("z"), normal("e", torch.zeros(0)), datum(z))),
    python_number_observed=("z>x", lambda: normal("x", normal("z"), obs=0.0)),
    cholesky_and_friends=(
        "z>x",
        lambda: pyro.sample(
            "x",
            dist.MultivariateNormal(
                torch.zeros(2), scale_tril=pyro.sample("z", dist.LKJCholesky(2))
            ),
            obs=torch.zeros(2),
        ),
    ),
    sampled_multinomial=(
        "z>x",
        lambda: vector("x", 3, pyro.sample("z", dist.Multinomial(4, torch.ones(3))), obs=THREE),
    ),
    conditioned_inside=(
        "a>m m>x b>x",
        lambda: poutine.condition(
            lambda: normal("x", normal("m", normal("a")) + normal("b")), {"x": ZERO}
        )(),
    ),
    intervened_by_do=(
        "y>x",
        lambda: poutine.do(lambda: datum(normal("z") + normal("y")), {"z": ZERO})(),
    ),
    bayesian_regression=("linear.weight>y linear.bias>y", lambda: Regression()()),
)


# What provenance cannot see.


@idiom(LOST, "k>x z>x")
def loop():
    k, z = pyro.sample("k", dist.Poisson(2.0)), normal("z")
    while k > 0:
        z, k = 2 * z, k - 1
    datum(z)


@idiom(LOST, "n>x")
def shape_from_a_latent():
    n = pyro.sample("n", dist.Categorical(torch.ones(3)))
    vector("x", int(n) + 1, obs=ZERO.expand(int(n) + 1))


LOST.update(
    item=("z>x", lambda: datum(normal("z").item())),
    failing_at_other_values=("k>x", lambda: datum([0.0][int(bernoulli("k", 1e-6))])),
    several_at_once=(
        "a>x c>x e>x",
        lambda: (
            values := {name: normal(name).item() for name in "abcdef"},
            datum(values["a"] + values["c"] * values["e"]),
        ),
    ),
    conjunction=(
        "a>x b>x",
        lambda: (
            a := bernoulli("a"),
            b := bernoulli("b"),
            normal("c"),
            normal("d"),
            datum(1.0 if a and b else 0.0),
        ),
    ),
    branch=(
        "b>x z>x",
        lambda: (b := normal("b"), z := normal("z"), datum(z if b > 0 else 2 * z + 1)),
    ),
    read_only_in_a_rare_branch=(
        "a>x b>x",
        lambda: (a := bernoulli("a", 1e-6), b := normal("b"), datum(b.item() if a else 0.0)),
    ),
    dict_index=("k>x", lambda: datum({0: 0.0, 1: 1.0}[int(bernoulli("k", 0.01))])),
    python_chain=("z>w w>x", lambda: datum(normal("w", normal("z").item()).item())),
    observed_value_in_python=("o>x", lambda: datum(normal("o", obs=torch.ones(())).item())),
)


def model_of(name):
    return {**TRACKED, **LOST}[name][1]


@pytest.mark.parametrize("expected, model", TRACKED.values(), ids=TRACKED)
def test_provenance_finds_the_network(expected, model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "To copy construct|Converting a tensor|.*torch.jit")
        assert set(extract_bayesnet(model).edges) == edges(expected)


@pytest.mark.parametrize("expected, model", LOST.values(), ids=LOST)
def test_interventions_find_what_provenance_lost(expected, model):
    with pytest.warns(UserWarning, match="found by intervention"):
        assert set(extract_bayesnet(model).edges) == edges(expected)


def test_a_model_that_fails_at_other_values_is_told_of():
    with pytest.warns(UserWarning, match="fails before site 'x'.*IndexError"):
        extract_bayesnet(model_of("failing_at_other_values"))


class TestSites:
    def test_plates_are_the_vectorized_ones_at_full_size(self):
        net = extract_bayesnet(subsampled)
        assert net.plates["z"] == net.plates["x"] == {"n"} and net.plates["mu"] == frozenset()
        assert dict(net.plate_sizes) == {"n": 10}
        assert dict(extract_bayesnet(model_of("sequential_plate")).plate_sizes) == {}
        assert extract_bayesnet(crossed_plates).plates["cell"] == {"rows", "columns"}

    def test_plate_without_a_size_takes_it_from_its_sites(self):
        def model():
            with pyro.plate("p"):
                normal("x", normal("z", THREE), obs=THREE)

        assert dict(extract_bayesnet(model).plate_sizes) == {"p": 3}

    def test_observed_and_latent_sites_come_in_model_order_and_factors_are_observed(self):
        net = extract_bayesnet(model_of("collider"))
        assert net.latent == ("a", "c", "e") and net.observed == ("d",)
        assert extract_bayesnet(model_of("factor")).observed == ("f",)

    def test_masked_out_likelihood_and_deterministic_sites_are_no_sites(self):
        assert "x" not in extract_bayesnet(model_of("likelihood_masked_out")).sites
        assert "square" not in extract_bayesnet(model_of("deterministic")).sites
        assert "d" not in extract_bayesnet(model_of("delta_latent")).sites

    def test_enumerated_sites_are_marginalized(self):
        net = extract_bayesnet(enumerated_mixture)
        assert [name for name in net.sites if net.sites[name].marginalized] == ["z"]

    def test_support_parents(self):
        net = extract_bayesnet(model_of("latent_support"))
        assert (
            net.sites["z"].support_parents == {"hi"}
            and net.sites["x"].support_parents == frozenset()
        )

    def test_support_parents_found_by_intervention(self):
        def model():
            hi, scale = (pyro.sample(name, dist.LogNormal(0.0, 1.0)) for name in ("hi", "s"))
            datum(pyro.sample("z", dist.Uniform(-hi.item(), hi.item())), scale.item())

        with pytest.warns(UserWarning, match="found by intervention"):
            net = extract_bayesnet(model)
        assert set(net.edges) == edges("hi>z z>x s>x")
        assert net.sites["z"].support_parents == {"hi"}

    def test_observed_names_a_site_that_the_model_samples(self):
        net = extract_bayesnet(model_of("prior_only"), observed=["b"])
        assert net.latent == ("a",) and net.observed == ("b",)
        with pytest.raises(ValueError, match="`observed`; got 'c'. The model's sites are: a, b"):
            extract_bayesnet(model_of("prior_only"), observed=["c"])

    def test_models_without_latents_or_without_sites(self):
        net = extract_bayesnet(datum)
        assert net.latent == () and net.observed == ("x",)
        assert not extract_bayesnet(lambda: None).sites

    def test_arguments_reach_the_model(self):
        found = extract(
            lambda x, *, y: normal("y", normal("z", x), obs=y), (ZERO,), {"y": THREE[0]}
        )
        assert set(found.bayesnet.edges) == edges("z>y")

    def test_init_gives_the_values_that_cannot_be_sampled(self):
        found = extract(model_of("improper"), init=lambda site: torch.tensor([2.0, 3.0]))
        assert found.trace.nodes["z"]["value"].tolist() == [2.0, 3.0]
        assert set(found.bayesnet.edges) == edges("z>x")

    def test_latent_without_sampler_or_bijection_is_an_error(self):
        with pytest.raises(NotImplementedError, match="got 'z' with ImproperUniform. Pass `init`"):
            extract(
                lambda: pyro.sample("z", dist.ImproperUniform(dist.constraints.sphere, (), (3,)))
            )


class TestInterventions:
    def test_escaped_values_are_named(self):
        with pytest.warns(UserWarning, match="'x' depends on 'z'"):
            assert extract(model_of("item")).escaped == {"z"}
        assert extract(model_of("plain")).escaped == frozenset()

    def test_harmless_escapes_add_no_edge(self):
        assert extract_bayesnet(lambda: math.isfinite(normal("z").item()) and datum()).edges == ()

    def test_without_checks_what_escaped_reaches_every_later_site(self):
        def model():
            z, w = normal("z"), normal("w")
            str(z.item())
            datum(w), datum(name="y")

        assert set(extract_bayesnet(model, checks=0).edges) == edges("z>x w>x z>y")

    def test_budget_is_kept_and_reported(self):
        model = Counted(lambda: [datum(normal(f"z{i}"), name=f"x{i}") for i in range(20)])
        assert extract(model).checked == 40
        before = model.runs
        found = extract(model, checks=5)
        assert model.runs <= before + 9 and found.checked < 40
        assert set(found.bayesnet.edges) == {(f"z{i}", f"x{i}") for i in range(20)}

    def test_an_exhausted_budget_errs_on_the_safe_side(self):
        with pytest.warns(UserWarning, match="found by intervention"):
            found = extract(model_of("several_at_once"), checks=2)
        assert set(found.bayesnet.edges) >= edges("a>x c>x e>x")

    def test_raw_argument_read_through_python(self):
        with pytest.warns(UserWarning, match="'z' depends on 'x'"):
            net = extract_bayesnet(
                lambda x: (vector("x", obs=x), normal("z", x.mean().item())), torch.ones(3)
            )
        assert set(net.edges) == edges("x>z")

    def test_data_dependent_prior_makes_no_cycle(self):
        net = extract_bayesnet(
            lambda x: vector("x", 3, normal("z", x.mean()).expand(3), obs=x), torch.ones(3)
        )
        assert set(net.edges) == edges("z>x")

    @pytest.mark.parametrize(
        ("model", "named"),
        [
            (lambda: normal("extra") if bernoulli("b", 1e-6) else None, "'extra'"),
            (
                lambda: [
                    normal(f"z{i}")
                    for i in pyro.plate("p", 1 + int(pyro.sample("n", dist.Poisson(3.0))))
                ],
                "'z",
            ),
        ],
        ids=["in a branch", "a number of sites"],
    )
    def test_sites_that_appear_with_a_latent_are_an_error_that_names_them(self, model, named):
        with pytest.raises(ValueError, match=f"same sites in every run of the model; got {named}"):
            extract_bayesnet(model)

    def test_hidden_randomness_is_reported_and_couples_everything_before(self):
        def model():
            a, b = normal("a"), normal("b")
            datum(a), datum(b + torch.randn(()), name="y")

        with pytest.warns(UserWarning, match="Hidden randomness: 'y' differ"):
            found = extract(model)
        assert found.hidden_randomness == {"y"}
        assert set(found.bayesnet.edges) == edges("a>x a>y b>y")

    def test_sites_blocked_on_purpose_are_hidden_randomness_without_a_warning(self):
        def model():
            w = normal("w")
            datum(w + normal("a")), datum(w, name="y")

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
                return extract(model_of("several_at_once"))

        first, second = run(), run()
        assert first.bayesnet.edges == second.bayesnet.edges
        assert first.trace.nodes["a"]["value"] == second.trace.nodes["a"]["value"]


class TestPlates:
    @pytest.mark.parametrize(
        ("read", "sizes", "latent"),
        [
            (lambda z: z.cumsum(-1), [2], normal),
            (lambda z: z.cumsum(-1), [7], normal),
            (lambda z: z.sum(), [4], bernoulli),
            (lambda z: z.mean(-2, keepdim=True), [3, 4], normal),
            (lambda z: z.sum(-1).mean(-2, keepdim=True), [3, 4], lambda name: vector(name, 2)),
        ],
        ids=["two", "seven", "discrete", "one of two plates", "vectors in one of two plates"],
    )
    def test_coupling_of_a_plate_declared_independent_is_an_error(self, read, sizes, latent):
        def model():
            with ExitStack() as stack:
                for i, size in enumerate(sizes):
                    stack.enter_context(pyro.plate(f"p{i}", size, dim=i - len(sizes)))
                normal("w")
                normal("x", read(latent("z")), obs=torch.zeros(sizes))

        with pytest.raises(
            ValueError, match="'x', declared independent in plate 'p0'; .* instances of 'z'"
        ):
            extract_bayesnet(model)

    def test_changes_of_binary_instances_that_cancel_hide_no_coupling(self):
        def model():
            with pyro.plate("p", 4):
                z = bernoulli("z")
                normal("x", z.sum(), obs=torch.zeros(4))

        for seed in range(10):
            pyro.set_rng_seed(seed)
            with pytest.raises(ValueError, match="declared independent in plate 'p'"):
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

        extract_bayesnet(lambda: datum(pyro.param("kept") + pyro.param("new", torch.randn(()))))
        store = pyro.get_param_store()
        assert list(store.keys()) == ["kept"]
        assert (
            store["kept"].unconstrained() is unconstrained and kept.unconstrained() is unconstrained
        )

    def test_modules_in_training_mode(self):
        model = Regression()
        norm, before = model.act[1], model.act[1].running_mean.clone()
        assert set(extract_bayesnet(model).edges) == edges("linear.weight>y linear.bias>y")
        assert all(module.training for module in model.modules())
        assert torch.equal(norm.running_mean, before) and norm.num_batches_tracked == 0

    @pytest.mark.parametrize("wrap", [lambda f: f, poutine.trace, config_enumerate])
    def test_modules_that_a_function_closes_over(self, wrap):
        norm = nn.BatchNorm1d(1)

        def model():
            pyro.module("norm", norm)
            datum(norm(normal("z") + torch.randn(5, 1)).mean().detach())

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
        extract_bayesnet(model_of("plain"))
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


@pytest.mark.parametrize("part", [slice(None), slice(1, None), slice(None, None, 2)])
def test_data_of_two_sites_from_one_argument_are_no_dependence(part):
    """Changes of the argument, by which what reads it is found, are no changes of the other site's data."""

    def model(y):
        z, scale = normal("z"), pyro.sample("scale", dist.HalfNormal(1.0))
        with pyro.plate("n", len(y)):
            normal("a", z, obs=y)
        with pyro.plate("m", len(y[part])):
            normal("b", z, scale, obs=y[part])

    def reading(y):
        model(y)
        with pyro.plate("k", len(y) - 1):
            normal("c", y[:-1], obs=y[1:])

    y = torch.randn(6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(extract_bayesnet(model, y).edges) == {("z", "a"), ("z", "b"), ("scale", "b")}
    assert ("a", "c") in extract_bayesnet(reading, y).edges  # whose location reads the data
