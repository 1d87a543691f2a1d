"""`Simulator`: one vectorized run of a model gives joint draws, and it says where it does not."""

import random
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from models import CASES, DIAMOND, conjugate_normal, learned_scale, pair, subsampled
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam
from pyro.poutine.messenger import Messenger

from pyro_nami.inference.simulate import JointDraws, Simulator, forked_rng

pytestmark = pytest.mark.filterwarnings("error")
FALLBACK = "one vectorized run"
UNIT = dist.Normal(0.0, 1.0)


def by_index(group):
    with pyro.plate("groups", 3):
        alpha = pyro.sample("alpha", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(group)):
        pyro.sample("y", dist.Normal(alpha[..., group], 1.0))


def wrong_by_index(group):
    with pyro.plate("groups", 3):
        alpha = pyro.sample("alpha", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(group)):
        pyro.sample("y", dist.Normal(alpha[group], 0.01))


# Runs in an outer plate without an error, and mixes the draws.
wrong_silently = pair(UNIT, lambda z: dist.Normal(z.mean(), 0.01))
wrong_by_if = pair(UNIT, lambda z: dist.Normal(1.0 if z > 0 else -1.0, 0.01))


def wrong_by_dim(size):
    with pyro.plate("data", size):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(z.sum(0), 0.01))


GROUP = torch.tensor([0, 0, 2, 1])
UNVECTORIZED = {
    "index": (wrong_by_index, (GROUP,), lambda z: z[:, GROUP], "y"),
    "mean over draws": (wrong_silently, (), lambda z: z, "log density of site 'y' differs"),
    "if": (wrong_by_if, (), torch.sign, "Boolean value"),
    "sum over the first dim": (
        *(wrong_by_dim, (4,), lambda z: z.sum(-1, keepdim=True)),
        "draws of site 'y' should be of shape",
    ),
}


@pytest.mark.parametrize("name", [name for name in CASES if name != "with_factor"])
def test_draws_have_all_plate_dims_for_every_model(name):
    case = CASES[name]
    draws = Simulator(case.model, case.arguments()).draw(7)
    assert draws.num == 7 and draws.nesting == case.nesting
    assert draws.latents.keys() >= case.shapes.keys()
    trace = poutine.trace(case.model).get_trace(*case.arguments())
    for site, value in {**draws.latents, **draws.observed}.items():
        fn = trace.nodes[site]["fn"]
        plates = (1,) * (case.nesting - len(fn.batch_shape)) + tuple(fn.batch_shape)
        assert value.shape == (7, *plates, *fn.event_shape), site


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_draws_are_of_the_joint_distribution(dtype):
    """Covariance against linear algebra: an entry's error is at most 2 C / sqrt(N); five of those are allowed."""
    torch.set_default_dtype(dtype)
    draws = Simulator(DIAMOND, (torch.tensor(5.0), torch.tensor(-9.0))).draw(20_000)
    values = torch.stack([{**draws.latents, **draws.observed}[name] for name in DIAMOND.sites])
    assert values.dtype == dtype
    exact = DIAMOND.covariance()
    assert (values.double().cov() - exact).abs().max() < 5 * 2 * exact.max() / 20_000**0.5


def test_data_that_the_model_is_given_are_resampled():
    y = torch.full((6,), 100.0)
    draws = Simulator(conjugate_normal, (y,)).draw(50)
    assert draws.observed["y"].shape == (50, 6) and draws.observed["y"].abs().max() < 50
    assert torch.equal(y, torch.full((6,), 100.0))


@pytest.mark.parametrize("conditioned", [False, True])
def test_sites_can_be_observed_by_name_or_by_condition(conditioned):
    model = poutine.condition(by_index, {"y": torch.zeros(4)}) if conditioned else by_index
    simulator = Simulator(model, (GROUP,), observed=() if conditioned else ["y"])
    assert (simulator.latent, simulator.observed, simulator.vectorized) == (
        ("alpha",),
        ("y",),
        True,
    )
    draws = simulator.draw(2000)
    assert abs((draws.observed["y"] - draws.latents["alpha"][:, GROUP]).std() - 1) < 0.05


def escaping(model):
    """The model with a value that leaves torch, as vmap does not allow."""

    class Escape(Messenger):
        def _pyro_sample(self, msg):
            if msg["name"] == "y":
                float(msg["fn"].mean.sum())

    return Escape()(model)


@pytest.mark.parametrize("name", [name for name in UNVECTORIZED if name != "if"])
def test_models_for_one_draw_are_run_for_many(name):
    model, args, right, _ = UNVECTORIZED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulator = Simulator(model, args, observed=["y"])
    assert simulator.vectorized
    check_draws(simulator, right)


@pytest.mark.parametrize("name", UNVECTORIZED)
def test_models_that_cannot_be_vectorized_are_run_one_by_one(name):
    model, args, right, reason = UNVECTORIZED[name]
    with pytest.warns(UserWarning, match=FALLBACK) as caught:
        simulator = Simulator(escaping(model), args, observed=["y"])
    assert reason in str(caught[0].message) and "alpha[..., index]" in str(caught[0].message)
    assert not simulator.vectorized
    check_draws(simulator, right)


def check_draws(simulator, right):
    draws = simulator.draw(20)
    latent = next(iter(draws.latents.values()))
    expected = right(latent)
    assert draws.observed["y"].shape == expected.shape
    assert (draws.observed["y"] - expected).abs().max() < 0.06  # six of its standard deviations


def test_the_fallback_is_said_once():
    with pytest.warns(UserWarning, match=FALLBACK) as caught:
        simulator = Simulator(wrong_by_if, observed=["y"])
        simulator.draw(3)
        simulator.at().draw(3)
    assert len(caught) == 1


def test_hidden_randomness_is_no_vectorized_model():
    model = pair(UNIT, lambda z: dist.Normal(z + torch.randn(()), 0.1))
    with pytest.warns(UserWarning, match="differs from that in a run of one draw"):
        assert not Simulator(model, observed="y").vectorized


def test_what_a_reparametrization_leaves_is_no_data():
    def model():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 3):
            pyro.sample(
                "x", dist.Normal(pyro.sample("z", dist.Normal(mu, 2.0)), 1.0), obs=torch.zeros(3)
            )

    simulator = Simulator(poutine.reparam(model, config={"z": LocScaleReparam(0.0)}))
    assert (simulator.latent, simulator.observed) == (("mu", "z_decentered"), ("x",))
    draws = simulator.draw(20_000)
    torch.testing.assert_close(draws.observed["x"].var(0), torch.full((3,), 6.0), rtol=0.1, atol=0)


def test_other_arguments_bring_other_sizes():
    simulator = Simulator(conjugate_normal, (torch.zeros(3),))
    assert simulator.at(torch.zeros(9)).draw(2).observed["y"].shape == (2, 9)
    assert simulator.draw(2).observed["y"].shape == (2, 3)


def states():
    """Those of all generators of random numbers."""
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def test_nothing_else_changes():
    """Random numbers of the check, handlers outside, and the requests for gradients."""
    learned_scale()
    before = states()
    with poutine.trace() as outer:
        simulator = Simulator(learned_scale, observed=["y"])
        assert states() == before
        draws = simulator.draw(5)
    assert states()[0] != before[0] and states()[1:] == before[1:]
    assert not outer.trace.nodes.keys() - {"_INPUT", "_RETURN"}
    assert simulator.trainable == ("scale",) and not draws.latents["z"].requires_grad
    assert pyro.get_param_store().keys() == {"scale"}


def test_forked_rng_restores_all_generators():
    before = states()
    with forked_rng():
        torch.rand(3), np.random.rand(3), random.random()
    assert states() == before


def test_draws_that_are_not_finite_are_found():
    latents = {"a": torch.tensor([1.0, torch.nan, 3.0, 4.0]), "k": torch.arange(4)}
    observed = {
        "y": torch.tensor([[1.0, 2.0], [0.0, torch.inf], [1.0, 1.0], [-torch.inf, torch.inf]])
    }
    draws = JointDraws(latents, observed, 0)
    kept, counts = draws.finite()
    assert kept.latents["k"].tolist() == [0, 2] and kept.observed["y"].shape == (2, 2)
    assert counts == {"a": 1, "y": 2}
    assert kept.finite() == (kept, {})


def test_finite_draws_whose_sum_overflows_are_kept():
    draws = JointDraws({"a": torch.full((4,), 3e38)}, {"y": torch.zeros(4)}, 0)
    assert draws.finite()[0].num == 4 and draws.finite()[1] == {}


def test_factors_are_said_to_be_left_out():
    case = CASES["with_factor"]
    with pytest.warns(UserWarning, match="leave out the factor 'coupling'"):
        assert Simulator(case.model, case.arguments()).latent == ("a", "b")


# ---- errors


def test_sites_that_come_and_go_are_an_error():
    def model():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        if a.mean() > -torch.inf and model.full:
            pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(a, 1.0))

    model.full = True
    simulator = Simulator(model, observed=["y"])
    model.full = False
    with pytest.raises(ValueError, match="same sites in every run of the model; one run lacks 'b'"):
        simulator.draw(3)


DIFFUSE = dist.ImproperUniform(dist.constraints.positive, (), ())
THREE = dist.Normal(torch.zeros(3), 1.0)
GIVEN = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("model", "observed", "error", "match"),
    [
        (
            pair(DIFFUSE, lambda z: dist.Normal(0.0, z), GIVEN),
            (),
            NotImplementedError,
            "'z', whose ImproperUniform raises",
        ),
        (
            pair(UNIT, lambda z: dist.Bernoulli(2 + z * z), GIVEN),
            (),
            ValueError,
            "'y', whose Bernoulli raises",
        ),
        (
            pair(THREE, lambda z: dist.Normal(z.sum(-1), 1.0), GIVEN),
            (),
            ValueError,
            r"batch dims of site 'z' to be those of its plates; got \(3,\)",
        ),
        (
            lambda: subsampled(torch.zeros(10)),
            (),
            NotImplementedError,
            "plate 'data' holds 2 of 10",
        ),
        (
            lambda: pyro.sample("y", UNIT, obs=GIVEN),
            (),
            ValueError,
            "with latent sites; this one has none",
        ),
        (wrong_by_if, (), ValueError, "with observed sites; this one has none.*observed="),
        (wrong_by_if, ("x",), ValueError, "the model's sites, 'z', 'y', in observed; got 'x'"),
    ],
)
def test_what_cannot_be_simulated_is_named(model, observed, error, match):
    with pytest.raises(error, match=match):
        Simulator(model, observed=observed)


@pytest.mark.parametrize("num", [0, -1, 2.0])
def test_number_of_draws_is_checked(num):
    with pytest.raises((TypeError, ValueError), match="Expected num to be"):
        Simulator(DIAMOND, (torch.tensor(0.0), torch.tensor(0.0))).draw(num)
