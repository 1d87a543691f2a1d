"""With the rest of Pyro: lists of guides, blocks, reparametrizations, interventions, masks, scales, loops, factors."""

from __future__ import annotations

import copy

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from models import CASES, CHAIN, COLLIDER, eight_schools, nested, scatter, with_factor
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoGuideList, AutoNormal
from pyro.infer.reparam import LocScaleReparam, ProjectedNormalReparam, TransformReparam
from pyro.optim import Adam

from pyro_nami import AutoNaMIGuide

pytestmark = pytest.mark.filterwarnings("error", "ignore:Hidden randomness")
DIRECTIONS = pytest.mark.parametrize("inverse", ["forward", "reverse"])


def steps(model, guide, *args, count=3, **options):
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO(**options))
    losses = torch.tensor([svi.step(*args) for _ in range(count)])
    assert losses.isfinite().all()
    return losses


# ---- lists


@DIRECTIONS
@pytest.mark.parametrize("other", [AutoDelta, AutoNormal, AutoDiagonalNormal, AutoNaMIGuide])
def test_a_part_of_a_guide_list(other, inverse):
    y, sigma = CASES["eight_schools"].arguments()
    guide = AutoGuideList(eight_schools)
    guide.append(AutoNaMIGuide(poutine.block(eight_schools, hide=["tau"]), inverse=inverse))
    guide.append(other(poutine.block(eight_schools, expose=["tau"])))
    steps(eight_schools, guide, y, sigma)
    values = guide(y, sigma)
    assert set(values) == {"mu", "theta", "tau"}
    assert guide[0].bayesnet.latent == ("mu", "theta")
    draws = Predictive(eight_schools, guide=guide, num_samples=3)(y, sigma)
    assert set(draws) >= {"mu", "theta", "tau"} or "y" in draws
    assert guide.median(y, sigma)["theta"].shape == (8,)


def test_parts_share_the_plates_of_the_list():
    """Each plate is made once a call, or Pyro complains of two sites of one name."""

    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y), subsample_size=3) as indices:
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            w = pyro.sample("w", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(z + w, 1.0), obs=y[indices])

    def create_plates(y):
        return pyro.plate("data", len(y), subsample_size=3)

    y = torch.arange(9.0)
    guide = AutoGuideList(model, create_plates=create_plates)
    guide.append(AutoNaMIGuide(poutine.block(model, expose=["z", "mu"])))
    guide.append(AutoNormal(poutine.block(model, expose=["w"])))
    steps(model, guide, y)
    run = poutine.trace(guide).get_trace(y)
    model_run = poutine.trace(poutine.replay(model, run)).get_trace(y)
    assert torch.equal(model_run.nodes["y"]["value"], y[run.nodes["data"]["value"]])
    for name in ("z", "w"):
        assert run.nodes[name]["value"].shape == (3,) and run.nodes[name]["scale"] == 3


def test_two_parts_of_this_class_have_parameters_of_their_own():
    guide = AutoGuideList(CHAIN)
    guide.append(AutoNaMIGuide(poutine.block(CHAIN, hide=["a"])))
    guide.append(AutoNaMIGuide(poutine.block(CHAIN, expose=["a"])))
    steps(CHAIN, guide, torch.tensor(1.0))
    names = [name for name, _ in guide.named_pyro_params()]
    assert any(name.startswith("0.") for name in names) and any(name.startswith("1.") for name in names)
    assert len(set(names)) == len(names)
    stored = set(pyro.get_param_store().keys())
    assert {f"AutoGuideList.{name}" for name in names} == stored


@pytest.mark.parametrize("part", [AutoNormal, AutoNaMIGuide])
def test_a_part_that_sees_no_data_learns_all_the_same(part):
    """`expose=` hides the observed sites too; the latent still has evidence, seen by the ELBO alone."""
    guide = AutoGuideList(CHAIN)
    guide.append(AutoNormal(poutine.block(CHAIN, hide=["a"])))
    guide.append(part(poutine.block(CHAIN, expose=["a"])))
    objective = Trace_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(CHAIN, guide, Adam({"lr": 0.05}), objective)
    y = torch.tensor(4.0)
    for _ in range(150):
        svi.step(y)
    with torch.no_grad():
        draws = torch.stack([guide(y)["a"] for _ in range(200)])
    assert abs(draws.mean() - CHAIN.posterior(4.0)[0][0]) < 0.4  # the posterior's mean is 1, its sd 0.87


def test_only_the_list_makes_plates():
    y, sigma = CASES["eight_schools"].arguments()
    guide = AutoGuideList(eight_schools)
    part = AutoNaMIGuide(poutine.block(eight_schools, hide=["tau"]), create_plates=lambda y, sigma: [])
    guide.append(part)
    with pytest.raises((AssertionError, ValueError), match="create_plates"):
        guide(y, sigma)


def test_parts_set_as_attributes():
    guide = AutoGuideList(CHAIN)
    guide.most = AutoNaMIGuide(poutine.block(CHAIN, hide=["a"]))
    guide.append(AutoNormal(poutine.block(CHAIN, expose=["a"])))
    steps(CHAIN, guide, torch.tensor(1.0))
    assert guide.most.master() is guide


def test_a_plain_function_beside_it():
    def rest(y):
        loc = pyro.param("loc", torch.tensor(0.0))
        return {"a": pyro.sample("a", dist.Normal(loc, 1.0))}

    guide = AutoGuideList(CHAIN)
    guide.append(AutoNaMIGuide(poutine.block(CHAIN, hide=["a"])))
    guide.append(rest)
    steps(CHAIN, guide, torch.tensor(1.0))


def test_lists_are_copied_and_saved_with_it():
    guide = AutoGuideList(CHAIN)
    guide.append(AutoNaMIGuide(poutine.block(CHAIN, hide=["a"])))
    guide.append(AutoNormal(poutine.block(CHAIN, expose=["a"])))
    guide(torch.tensor(1.0))
    state = guide.state_dict()
    other = copy.deepcopy(guide)
    result = other.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys


# ---- handlers on the model


@DIRECTIONS
def test_blocked_models_show_the_exposed_latents_only(inverse):
    for blocked, latent in [
        (poutine.block(COLLIDER, hide=["a"]), ("e", "c")),
        (poutine.block(COLLIDER, expose=["c"]), ("c",)),
    ]:
        pyro.clear_param_store()
        guide = AutoNaMIGuide(blocked, inverse=inverse)
        assert set(guide(torch.tensor(1.0))) == set(latent)


@DIRECTIONS
def test_conditioned_latents_are_observed(inverse):
    model = poutine.condition(CHAIN, {"b": torch.tensor(0.7)})
    guide = AutoNaMIGuide(model, inverse=inverse)
    assert set(guide(torch.tensor(1.0))) == {"a", "c"}
    assert set(guide.bayesnet.observed) == {"b", "y"}
    assert guide.inverse.parents["a"].keys() == {"b"}, "given b, a needs nothing else"
    steps(model, guide, torch.tensor(1.0))


@DIRECTIONS
def test_interventions(inverse):
    """`do` cuts b from its parents: a and b lose their evidence, and are drawn from the model."""
    model = poutine.do(CHAIN, {"b": torch.tensor(0.7)})
    guide = AutoNaMIGuide(model, inverse=inverse)
    assert list(guide(torch.tensor(1.0))) == ["a", "b", "c"]
    assert guide.inverse.predictive == {"a", "b"}
    assert set(guide.inverse.parents["c"]) >= {"y"} and not {"a", "b"} & set(guide.inverse.parents["c"])
    steps(model, guide, torch.tensor(1.0))


@DIRECTIONS
def test_reparametrized_models(inverse):
    """Eight schools, decentered: the new latent is guided, theta is deterministic."""
    y, sigma = CASES["eight_schools"].arguments()
    model = poutine.reparam(eight_schools, config={"theta": LocScaleReparam(0.0)})
    guide = AutoNaMIGuide(model, inverse=inverse)
    values = guide(y, sigma)
    assert list(values) == ["mu", "tau", "theta_decentered"] and values["theta_decentered"].shape == (8,)
    steps(model, guide, y, sigma)
    draws = Predictive(model, guide=guide, num_samples=3)(y, sigma)
    assert draws["theta"].shape[-1] == 8


@DIRECTIONS
def test_spheres_point_to_their_reparametrization(inverse):
    """As Pyro's own guides do (tests/infer/test_autoguide.py:1289)."""

    def model(y):
        direction = pyro.sample("direction", dist.ProjectedNormal(torch.tensor([1.0, 0.0])))
        pyro.sample("y", dist.Normal(direction[..., 0], 1.0), obs=y)

    with pytest.raises(ValueError, match="(?s)direction.*ProjectedNormalReparam"):
        AutoNaMIGuide(model, inverse=inverse)(torch.tensor(1.0))


@DIRECTIONS
def test_likelihoods_that_mask_missing_data(inverse):
    """NaN is legal in NanMasked likelihoods: networks and loss stay finite (contract 5)."""

    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.NanMaskedNormal(z, 1.0), obs=y)

    y = torch.tensor([1.0, float("nan"), 0.5])
    guide = AutoNaMIGuide(model, inverse=inverse)
    steps(model, guide, y)
    assert all(value.isfinite().all() for value in guide(y).values())


@DIRECTIONS
def test_reparametrized_transforms_and_spheres(inverse):
    def model(y):
        w = pyro.sample("w", dist.LogNormal(0.0, 1.0))
        direction = pyro.sample("direction", dist.ProjectedNormal(torch.tensor([1.0, 0.0])))
        pyro.sample("y", dist.Normal(w * direction[..., 0], 1.0), obs=y)

    config = {"w": TransformReparam(), "direction": ProjectedNormalReparam()}
    reparametrized = poutine.reparam(model, config=config)
    guide = AutoNaMIGuide(reparametrized, inverse=inverse)
    assert set(guide(torch.tensor(1.0))) == {"w_base", "direction_normal"}
    steps(reparametrized, guide, torch.tensor(1.0))


@DIRECTIONS
def test_markov_loops(inverse):
    def model(y):
        x = 0.0
        for i in pyro.markov(range(len(y))):
            x = pyro.sample(f"x_{i}", dist.Normal(x, 1.0))
            pyro.sample(f"y_{i}", dist.Normal(x, 1.0), obs=y[i])

    guide = AutoNaMIGuide(model, inverse=inverse)
    y = torch.randn(4)
    steps(model, guide, y)
    assert guide.inverse.num_edges < 4 * 8  # a chain stays sparse
    assert set(guide.inverse.parents["x_0" if inverse == "forward" else "x_3"]) != set()


@DIRECTIONS
def test_equalized_sites(inverse):
    def model(y):
        pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(b, 1.0), obs=y)

    equalized = poutine.equalize(model, ["a", "b"])
    guide = AutoNaMIGuide(equalized, inverse=inverse)
    assert list(guide(torch.tensor(1.0))) == ["a"]
    steps(equalized, guide, torch.tensor(1.0))


@DIRECTIONS
def test_lifted_parameters_do_not_touch_the_guide(inverse):
    """A lift on the model turns its parameters to latents, the guide's stay parameters."""

    def model(y):
        scale = pyro.param("scale", torch.tensor(0.0))
        mu = pyro.sample("mu", dist.Normal(scale, 1.0))
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    lifted = poutine.lift(model, prior={"scale": dist.Normal(0.0, 1.0)})
    guide = AutoNaMIGuide(lifted, inverse=inverse)
    steps(lifted, guide, torch.tensor(1.0))
    assert set(guide(torch.tensor(1.0))) == {"scale", "mu"}


@DIRECTIONS
def test_parameters_of_the_model_are_learned_beside_the_guide(inverse):
    def model(y):
        loc = pyro.param("loc", torch.tensor(0.0))
        mu = pyro.sample("mu", dist.Normal(loc, 0.1))
        pyro.sample("y", dist.Normal(mu, 0.1), obs=y)

    guide = AutoNaMIGuide(model, inverse=inverse)
    svi = SVI(model, guide, Adam({"lr": 0.05}), Trace_ELBO())
    svi.step(torch.tensor(2.0))
    before = pyro.param("loc").item()
    for _ in range(20):
        svi.step(torch.tensor(2.0))
    assert pyro.param("loc").item() > before + 0.1


# ---- masks, scales


@DIRECTIONS
def test_masks_reach_the_guides_sites(inverse):
    """Else the scale of masked-out entries diverges (contract 5, obs_mask)."""
    mask = torch.tensor([True, False, True])

    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3), poutine.mask(mask=mask):
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    guide, y = AutoNaMIGuide(model, inverse=inverse), torch.randn(3)
    steps(model, guide, y)
    trace = poutine.trace(guide).get_trace(y)
    trace.compute_log_prob()
    assert (trace.nodes["z"]["log_prob"] != 0).tolist() == mask.tolist()
    with pyro.plate("outer", 5, dim=-2):
        trace = poutine.trace(guide).get_trace(y)
    trace.compute_log_prob()
    assert ((trace.nodes["z"]["log_prob"] != 0) == mask).all() and trace.nodes["z"]["log_prob"].shape == (
        5,
        3,
    )


@DIRECTIONS
def test_masked_entries_do_not_diverge(inverse):
    """After training, the log scale of the unobserved part has not grown."""

    def model(y, observed):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("n", dist.Normal(mu, 1.0), obs=y, obs_mask=observed)

    y, observed = torch.randn(4), torch.tensor([True, True, False, True])
    guide = AutoNaMIGuide(model, inverse=inverse)
    svi = SVI(model, guide, Adam({"lr": 0.05}), Trace_ELBO(num_particles=4, vectorize_particles=True))
    losses = torch.tensor([svi.step(y, observed) for _ in range(150)])
    values = guide(y, observed)
    assert set(values) == {"mu", "n_unobserved"}
    assert losses.isfinite().all() and losses[-30:].mean() < losses[:10].mean() + 1
    draws = torch.stack([guide(y, observed)["n_unobserved"] for _ in range(50)])
    assert draws.std(0).max() < 10


@DIRECTIONS
def test_scales_reach_the_guides_sites(inverse):
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3), poutine.scale(scale=0.5):
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    guide, y = AutoNaMIGuide(model, inverse=inverse), torch.randn(3)
    steps(model, guide, y)
    trace = poutine.trace(guide).get_trace(y)
    assert trace.nodes["mu"]["scale"] == 1 and trace.nodes["z"]["scale"] == 0.5


@DIRECTIONS
def test_scales_around_guide_and_model(inverse):
    """`poutine.scale` on both, as for tempering: each site once."""
    guide, y = AutoNaMIGuide(CHAIN, inverse=inverse), torch.tensor(1.0)
    trace = poutine.trace(poutine.scale(guide, scale=0.1)).get_trace(y)
    assert all(abs(trace.nodes[name]["scale"] - 0.1) < 1e-9 for name in "abc")


# ---- special sites


@DIRECTIONS
def test_a_factor_couples_what_it_reads_and_is_no_input(inverse):
    guide, y = AutoNaMIGuide(with_factor, inverse=inverse), torch.tensor(1.0)
    guide(y)
    assert "b" in guide.inverse.parents["a"] or "a" in guide.inverse.parents["b"]
    assert "coupling" not in guide._plan.read
    steps(with_factor, guide, y)


@DIRECTIONS
def test_deterministic_and_delta_sites_are_passed_through(inverse):
    model = CASES["deterministic_and_delta"].model
    guide, y = AutoNaMIGuide(model, inverse=inverse), torch.tensor(1.0)
    trace = poutine.trace(guide).get_trace(y)
    trace.compute_log_prob()
    assert "twice" not in trace.nodes
    assert (
        trace.nodes["same"]["value"] == 2 * trace.nodes["a"]["value"] and trace.nodes["same"]["log_prob"] == 0
    )
    steps(model, guide, y)


@DIRECTIONS
def test_a_deterministic_site_in_a_plate_is_none(inverse):
    """Without event_dim Pyro takes the plate's dim for its event, and a draw of it would have the dim twice."""

    def model(y, named=True):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            mean = pyro.deterministic("mean", 2 * z) if named else 2 * z
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    y = torch.tensor([0.3, -1.0, 2.5])
    guides = [AutoNaMIGuide(model, inverse=inverse), AutoNaMIGuide(lambda y: model(y, False), inverse=inverse)]
    for guide in guides:
        guide(y)
    assert str(guides[0].inverse) == str(guides[1].inverse) and guides[0].conjugate == guides[1].conjugate
    steps(model, guides[0], y)


@DIRECTIONS
def test_sites_without_elements_are_skipped(inverse):
    def model(y):
        pyro.sample("empty", dist.Normal(torch.zeros(0), 1.0).to_event(1))
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    guide, y = AutoNaMIGuide(model, inverse=inverse), torch.tensor(1.0)
    assert guide(y)["mu"].shape == ()
    steps(model, guide, y)


@DIRECTIONS
def test_no_observed_sites_make_everything_predictive(inverse):
    def model():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("b", dist.Normal(a, 1.0))

    guide = AutoNaMIGuide(model, inverse=inverse)
    trace = poutine.trace(guide).get_trace()
    assert guide.inverse.predictive == {"a", "b"}
    assert (
        isinstance(trace.nodes["b"]["fn"], dist.Normal)
        and trace.nodes["b"]["fn"].loc == trace.nodes["a"]["value"]
    )
    assert steps(model, guide).abs().max() < 1e-5, "the guide is the prior, so the bound is zero"


@DIRECTIONS
def test_undeclared_independence_of_a_vector_is_no_plate(inverse):
    def model(y):
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        pyro.sample("y", dist.Normal(z.cumsum(-1), 1.0).to_event(1), obs=y)

    guide = AutoNaMIGuide(model, inverse=inverse)
    assert guide(torch.randn(3))["z"].shape == (3,)
    steps(model, guide, torch.randn(3), num_particles=2, vectorize_particles=True)


# ---- summaries


@DIRECTIONS
@pytest.mark.parametrize(
    "name", ["nested", "constrained", "eight_schools", "coupled_instances", "discrete_locals"]
)
def test_median_and_quantiles(name, inverse):
    case, args = CASES[name], CASES[name].arguments()
    guide = AutoNaMIGuide(case.model, inverse=inverse)
    median = guide.median(*args)
    quantiles = guide.quantiles([0.1, 0.5, 0.9], *args)
    for key, shape in case.shapes.items():
        assert tuple(median[key].shape) == shape and not median[key].requires_grad
        assert tuple(quantiles[key].shape) == (3,) + shape
        assert torch.allclose(median[key], quantiles[key][1], atol=1e-5)
        assert (quantiles[key][0] <= quantiles[key][2]).all()


def test_median_of_a_known_law():
    """At step 0 mu ~ Normal(0, 0.1) in the guide; 1,000 draws have a median error of 0.004."""
    guide = AutoNaMIGuide(nested, anchor=False, init_scale=0.1)
    args = CASES["nested"].arguments()
    assert guide.median(*args)["top"].abs() < 0.02
    low, high = guide.quantiles([0.1587, 0.8413], *args)["top"]
    assert abs((high - low) / 2 - 0.1) < 0.02


def test_summaries_leave_the_random_numbers_alone():
    guide, y = AutoNaMIGuide(CHAIN), torch.tensor(1.0)
    guide(y)
    state = torch.get_rng_state()
    first, second = guide.median(y), guide.median(y)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_mean_field_elbo_on_a_list():
    guide = AutoGuideList(CHAIN)
    guide.append(AutoNaMIGuide(poutine.block(CHAIN, hide=["a"]), inverse="reverse"))
    guide.append(AutoNormal(poutine.block(CHAIN, expose=["a"])))
    with pytest.warns(UserWarning, match="mean field"):
        loss = SVI(CHAIN, guide, Adam({"lr": 0.01}), TraceMeanField_ELBO()).step(torch.tensor(1.0))
    assert torch.tensor(loss).isfinite()


def test_printing():
    guide = AutoNaMIGuide(eight_schools)
    guide(*CASES["eight_schools"].arguments())
    scatter(guide)
    for text in (str(guide.bayesnet), str(guide.inverse)):
        assert all(name in text for name in ("mu", "tau", "theta"))
