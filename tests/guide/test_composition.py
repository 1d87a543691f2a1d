"""With the rest of Pyro: lists of guides, blocks, reparametrizations, interventions, masks, scales, loops, factors."""

from __future__ import annotations

import copy
import functools

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from models import (
    CASES,
    CHAIN,
    COLLIDER,
    eight_schools,
    local_normals,
    nested,
    noise,
    pair,
    partly_observed,
    steps,
    with_factor,
)
from pyro.infer import Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoNormal,
    init_to_feasible,
)
from pyro.infer.reparam import LocScaleReparam, ProjectedNormalReparam, TransformReparam

from pyro_nami import AutoNaMIGuide

pytestmark = pytest.mark.filterwarnings(
    "error",
    "ignore:Hidden randomness",
    "ignore:The exact conditional of 'u'",  # of `constrained`, at a draw of a singular matrix
)
DIRECTIONS = pytest.mark.parametrize("inverse", ["forward", "reverse"])
Y = torch.tensor(1.0)
SCHOOLS = CASES["eight_schools"].arguments()
MOST, A = poutine.block(CHAIN, hide=["a"]), poutine.block(CHAIN, expose=["a"])


def particles(count, **options):
    return Trace_ELBO(num_particles=count, vectorize_particles=True, **options)


def listed(model, *parts, **options):
    guide = AutoGuideList(model, **options)
    for part in parts:
        guide.append(part)
    return guide


# ---- lists


@pytest.mark.parametrize(
    "other, inverse",
    [*zip([AutoDelta, AutoNormal, AutoDiagonalNormal, AutoNaMIGuide], ["forward", "reverse"] * 2)],
)
def test_a_part_of_a_guide_list(other, inverse):
    guide = listed(
        eight_schools,
        AutoNaMIGuide(poutine.block(eight_schools, hide=["tau"]), inverse=inverse),
        other(poutine.block(eight_schools, expose=["tau"])),
    )
    steps(eight_schools, guide, *SCHOOLS)
    assert set(guide(*SCHOOLS)) == {"mu", "theta", "tau"}
    assert guide[0].bayesnet.latent == ("mu", "theta")
    draws = Predictive(eight_schools, guide=guide, num_samples=3)(*SCHOOLS)
    assert set(draws) >= {"mu", "theta", "tau"} or "y" in draws
    assert guide.median(*SCHOOLS)["theta"].shape == (8,)


def test_parts_share_the_plates_of_the_list():
    """Each plate is made once a call, or Pyro complains of two sites of one name."""

    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y), subsample_size=3) as indices:
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            w = pyro.sample("w", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(z + w, 1.0), obs=y[indices])

    y = torch.arange(9.0)
    guide = listed(
        model,
        AutoNaMIGuide(poutine.block(model, expose=["z", "mu"])),
        AutoNormal(poutine.block(model, expose=["w"])),
        create_plates=lambda y: pyro.plate("data", len(y), subsample_size=3),
    )
    steps(model, guide, y)
    run = poutine.trace(guide).get_trace(y)
    model_run = poutine.trace(poutine.replay(model, run)).get_trace(y)
    assert torch.equal(model_run.nodes["y"]["value"], y[run.nodes["data"]["value"]])
    for name in ("z", "w"):
        assert run.nodes[name]["value"].shape == (3,) and run.nodes[name]["scale"] == 3


def test_two_parts_of_this_class_have_parameters_of_their_own():
    guide = listed(CHAIN, AutoNaMIGuide(MOST), AutoNaMIGuide(A))
    steps(CHAIN, guide, Y)
    names = [name for name, _ in guide.named_pyro_params()]
    assert any(name.startswith("0.") for name in names) and any(
        name.startswith("1.") for name in names
    )
    assert len(set(names)) == len(names)
    stored = set(pyro.get_param_store().keys())
    assert {f"AutoGuideList.{name}" for name in names} == stored


@pytest.mark.parametrize("part", [AutoNormal, AutoNaMIGuide])
def test_a_part_that_sees_no_data_learns_all_the_same(part):
    """`expose=` hides the observed sites too; the latent still has evidence, seen by the ELBO alone."""
    guide = listed(CHAIN, AutoNormal(MOST), part(A))
    y = torch.tensor(4.0)
    steps(CHAIN, guide, y, count=150, lr=0.05, elbo=particles(4, max_plate_nesting=0))
    with torch.no_grad(), pyro.plate("draws", 200):
        draws = guide(y)["a"]
    # the posterior's mean is 1, its sd 0.87
    assert abs(draws.mean() - CHAIN.posterior(4.0)[0][0]) < 0.4


def test_only_the_list_makes_plates():
    part = AutoNaMIGuide(
        poutine.block(eight_schools, hide=["tau"]), create_plates=lambda y, sigma: []
    )
    with pytest.raises((AssertionError, ValueError), match="create_plates"):
        listed(eight_schools, part)(*SCHOOLS)


def test_parts_set_as_attributes_are_trained_copied_and_saved_with_the_list():
    guide = AutoGuideList(CHAIN)
    guide.most = AutoNaMIGuide(MOST)
    guide.append(AutoNormal(A))
    steps(CHAIN, guide, Y)
    assert guide.most.master() is guide
    result = copy.deepcopy(guide).load_state_dict(guide.state_dict())
    assert not result.missing_keys and not result.unexpected_keys


def test_a_plain_function_beside_it():
    def rest(y):
        loc = pyro.param("loc", torch.tensor(0.0))
        return {"a": pyro.sample("a", dist.Normal(loc, 1.0))}

    steps(CHAIN, listed(CHAIN, AutoNaMIGuide(MOST), rest), Y)


def test_mean_field_elbo_on_a_list():
    guide = listed(CHAIN, AutoNaMIGuide(MOST, inverse="reverse"), AutoNormal(A))
    with pytest.warns(UserWarning, match="mean field"):
        steps(CHAIN, guide, Y, count=1, elbo=TraceMeanField_ELBO())


# ---- handlers on the model


def direction(y):
    """A sphere, and a scale."""
    w = pyro.sample("w", dist.LogNormal(0.0, 1.0))
    direction = pyro.sample("direction", dist.ProjectedNormal(torch.tensor([1.0, 0.0])))
    pyro.sample("y", dist.Normal(w * direction[..., 0], 1.0), obs=y)


def two_of_which_one_is_read(y):
    pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(b, 1.0), obs=y)


def with_a_parameter(sd=1.0):
    """A model whose location is a parameter."""
    return pair(lambda: dist.Normal(pyro.param("loc", torch.tensor(0.0)), sd), noise(sd))


def with_an_empty_site(y):
    pyro.sample("empty", dist.Normal(torch.zeros(0), 1.0).to_event(1))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


VECTOR = dist.Normal(torch.zeros(3), 1.0).to_event(1)
# it is no plate
undeclared_independence = pair(VECTOR, lambda z: dist.Normal(z.cumsum(-1), 1.0).to_event(1))
NAN = torch.tensor([1.0, float("nan"), 0.5])  # legal in NanMasked likelihoods
REPARAMETRIZED = poutine.reparam(eight_schools, config={"theta": LocScaleReparam(0.0)})
SPHERES = {"w": TransformReparam(), "direction": ProjectedNormalReparam()}
HANDLED = {
    "hidden": (poutine.block(COLLIDER, hide=["a"]), (Y,), {"e": (), "c": ()}),
    "exposed": (poutine.block(COLLIDER, expose=["c"]), (Y,), {"c": ()}),
    "reparametrized": (REPARAMETRIZED, SCHOOLS, {"mu": (), "tau": (), "theta_decentered": (8,)}),
    "transforms and spheres": (
        poutine.reparam(direction, config=SPHERES),
        (Y,),
        {"w_base": (), "direction_normal": (2,)},
    ),
    "data that are masked": (
        functools.partial(local_normals, likelihood=lambda z: dist.NanMaskedNormal(z, 1.0)),
        (NAN,),
        {"mu": (), "z": (3,)},
    ),
    "lifted": (  # the model's parameters are latents, the guide's stay parameters
        poutine.lift(with_a_parameter(), prior={"loc": dist.Normal(0.0, 1.0)}),
        (Y,),
        {"loc": (), "z": ()},
    ),
    "undeclared independence": (undeclared_independence, (torch.arange(3.0),), {"z": (3,)}),
}
if hasattr(poutine, "equalize"):  # from Pyro 1.9.2 on
    HANDLED["equalized"] = (poutine.equalize(two_of_which_one_is_read, ["a", "b"]), (Y,), {"a": ()})


@DIRECTIONS
@pytest.mark.parametrize("name", HANDLED)
def test_the_guide_has_the_latents_that_a_handler_leaves(name, inverse):
    model, args, shapes = HANDLED[name]
    guide = AutoNaMIGuide(model, inverse=inverse)
    values = guide(*args)
    assert {key: value.shape for key, value in values.items()} == shapes
    assert all(value.isfinite().all() for value in values.values())
    steps(model, guide, *args, elbo=None if inverse == "forward" else particles(2))


def test_a_site_that_is_reparametrized_is_predicted():
    guide = AutoNaMIGuide(REPARAMETRIZED)
    guide(*SCHOOLS)
    draws = Predictive(REPARAMETRIZED, guide=guide, num_samples=3)(*SCHOOLS)
    assert draws["theta"].shape[-1] == 8


@DIRECTIONS
def test_a_latent_whose_shape_comes_from_an_exact_one(inverse):
    """As those of `StableReparam` do: at several points of the exact one it would have their dim."""

    def model(y):
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
        u = pyro.sample("u", dist.Exponential(torch.ones((*z.shape, 3))).to_event(1))
        pyro.sample("y", dist.Normal(z, u.sum(-1)), obs=y)

    guide = AutoNaMIGuide(model, inverse=inverse)
    assert guide(Y)["u"].shape == (3,) and guide.log_prob(guide(Y), Y).shape == ()
    steps(model, guide, Y)


def test_sites_without_elements_are_skipped():
    guide = AutoNaMIGuide(with_an_empty_site)
    assert guide(Y)["mu"].shape == ()
    steps(with_an_empty_site, guide, Y)


@DIRECTIONS
def test_conditioned_latents_are_observed(inverse):
    model = poutine.condition(CHAIN, {"b": torch.tensor(0.7)})
    guide = AutoNaMIGuide(model, inverse=inverse)
    assert set(guide(Y)) == {"a", "c"}
    assert set(guide.bayesnet.observed) == {"b", "y"}
    assert guide.inverse.parents["a"].keys() == {"b"}, "given b, a needs nothing else"
    steps(model, guide, Y)


@DIRECTIONS
def test_interventions(inverse):
    """`do` cuts b from its parents: a and b lose their evidence, and are drawn from the model."""
    model = poutine.do(CHAIN, {"b": torch.tensor(0.7)})
    guide = AutoNaMIGuide(model, inverse=inverse)
    assert list(guide(Y)) == ["a", "b", "c"]
    assert guide.inverse.predictive == {"a", "b"}
    assert set(guide.inverse.parents["c"]) >= {"y"} and not {"a", "b"} & set(
        guide.inverse.parents["c"]
    )
    steps(model, guide, Y)


@DIRECTIONS
def test_markov_loops(inverse):
    def model(y):
        x = 0.0
        for i in pyro.markov(range(len(y))):
            x = pyro.sample(f"x_{i}", dist.Normal(x, 1.0))
            pyro.sample(f"y_{i}", dist.Normal(x, 1.0), obs=y[i])

    guide = AutoNaMIGuide(model, inverse=inverse)
    steps(model, guide, torch.randn(4))
    assert guide.inverse.num_edges < 4 * 8  # a chain stays sparse
    assert set(guide.inverse.parents["x_0" if inverse == "forward" else "x_3"]) != set()


def test_parameters_of_the_model_are_learned_beside_the_guide():
    model = with_a_parameter(0.1)
    guide = AutoNaMIGuide(model)
    steps(model, guide, torch.tensor(2.0), count=1, lr=0.05)
    before = pyro.param("loc").item()
    steps(model, guide, torch.tensor(2.0), count=20, lr=0.05)
    assert pyro.param("loc").item() > before + 0.1


# ---- masks, scales


@DIRECTIONS
def test_masks_reach_the_guides_sites(inverse):
    """Else the scale of masked-out entries diverges (contract 5, obs_mask)."""
    mask, y = torch.tensor([True, False, True]), torch.randn(3)
    model = functools.partial(local_normals, around=poutine.mask(mask=mask))
    guide = AutoNaMIGuide(model, inverse=inverse)
    steps(model, guide, y)
    for particles in ((), (5,)):
        with pyro.plate_stack("outer", particles, rightmost_dim=-2):
            trace = poutine.trace(guide).get_trace(y)
        trace.compute_log_prob()
        log_prob = trace.nodes["z"]["log_prob"]
        assert ((log_prob != 0) == mask).all() and log_prob.shape == (*particles, 3)


def test_masked_entries_do_not_diverge():
    """After training, the log scale of the unobserved part has not grown."""
    args = torch.randn(4), torch.tensor([True, True, False, True])
    guide = AutoNaMIGuide(partly_observed)
    losses = steps(partly_observed, guide, *args, count=150, lr=0.05, elbo=particles(4))
    assert set(guide(*args)) == {"mu", "n_unobserved"}
    assert losses[-30:].mean() < losses[:10].mean() + 1
    with pyro.plate("draws", 50, dim=-2):
        assert guide(*args)["n_unobserved"].std(0).max() < 10


@DIRECTIONS
def test_scales_reach_the_guides_sites(inverse):
    model = functools.partial(local_normals, around=poutine.scale(scale=0.5))
    guide, y = AutoNaMIGuide(model, inverse=inverse), torch.randn(3)
    steps(model, guide, y)
    trace = poutine.trace(guide).get_trace(y)
    assert trace.nodes["mu"]["scale"] == 1 and trace.nodes["z"]["scale"] == 0.5


def test_scales_around_guide_and_model():
    """`poutine.scale` on both, as for tempering: each site once."""
    trace = poutine.trace(poutine.scale(AutoNaMIGuide(CHAIN), scale=0.1)).get_trace(Y)
    assert all(abs(trace.nodes[name]["scale"] - 0.1) < 1e-9 for name in "abc")


# ---- special sites


@DIRECTIONS
def test_a_factor_couples_what_it_reads_and_is_no_input(inverse):
    guide = AutoNaMIGuide(with_factor, inverse=inverse)
    guide(Y)
    assert "b" in guide.inverse.parents["a"] or "a" in guide.inverse.parents["b"]
    assert "coupling" not in guide._plan.read
    steps(with_factor, guide, Y)


def test_deterministic_and_delta_sites_are_passed_through():
    model = CASES["deterministic_and_delta"].model
    guide = AutoNaMIGuide(model)
    trace = poutine.trace(guide).get_trace(Y)
    trace.compute_log_prob()
    assert "twice" not in trace.nodes
    same = trace.nodes["same"]
    assert same["value"] == 2 * trace.nodes["a"]["value"] and same["log_prob"] == 0
    steps(model, guide, Y)


@DIRECTIONS
def test_a_deterministic_site_in_a_plate_is_none(inverse):
    """Without event_dim Pyro takes the plate's dim for its event, and a draw of it would have the dim twice."""
    named, unnamed = (
        functools.partial(local_normals, likelihood=likelihood)
        for likelihood in (
            lambda z: dist.Normal(pyro.deterministic("mean", 2 * z), 1.0),
            lambda z: dist.Normal(2 * z, 1.0),
        )
    )
    y = torch.tensor([0.3, -1.0, 2.5])
    guides = [AutoNaMIGuide(model, inverse=inverse) for model in (named, unnamed)]
    for guide in guides:
        guide(y)
    assert (
        str(guides[0].inverse) == str(guides[1].inverse)
        and guides[0].conjugate == guides[1].conjugate
    )
    steps(named, guides[0], y)


@DIRECTIONS
def test_no_observed_sites_make_everything_predictive(inverse):
    model = pair(dist.Normal(0.0, 1.0))
    guide = AutoNaMIGuide(model, inverse=inverse)
    trace = poutine.trace(guide).get_trace()
    assert guide.inverse.predictive == {"z", "y"}
    fn = trace.nodes["y"]["fn"]
    assert isinstance(fn, dist.Normal) and fn.loc == trace.nodes["z"]["value"]
    assert steps(model, guide).abs().max() < 1e-5, "the guide is the prior, so the bound is zero"


# ---- summaries


@pytest.mark.parametrize(
    "name, inverse",
    [
        ("nested", "forward"),
        ("constrained", "reverse"),
        ("eight_schools", "reverse"),
        ("coupled_instances", "forward"),
        ("discrete_locals", "reverse"),
    ],
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


@pytest.mark.parametrize("looks", [False, True], ids=["mapped", "one by one"])
def test_median_of_a_model_that_is_written_for_one_draw(looks):
    """Run for all draws at once it would mix them up, in tensors with a number for every two of them."""
    sizes = []

    def model(y):
        s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
        z = pyro.sample("z", dist.Normal(torch.zeros(6), 1.0).to_event(1))
        if looks and s < 0.0:
            raise ValueError
        total = s.sqrt() * z
        sizes.append(total.numel())
        with pyro.plate("rows", 6):
            pyro.sample("y", dist.Poisson(total.exp()), obs=y)

    guide = AutoNaMIGuide(model)
    y = torch.tensor([0.0, 1.0, 0.0, 7.0, 2.0, 9.0])
    found = guide.quantiles([0.16, 0.5, 0.84], y, num_samples=100)
    with torch.no_grad():
        draws = [guide(y) for _ in range(100)]
    for name, value in found.items():
        alone = torch.stack([draw[name] for draw in draws])
        for share, quantile in zip([0.16, 0.5, 0.84], value):
            below = (alone <= quantile).double().mean(0)
            assert (below - share).abs().max() < 0.25  # five standard errors of both
    assert max(sizes) < 2000


def test_median_of_a_known_law():
    """At step 0 mu ~ Normal(0, 0.1) in the guide; 1,000 draws have a median error of 0.004."""
    guide = AutoNaMIGuide(nested, anchor=False, init_scale=0.1, init_loc_fn=init_to_feasible)
    args = CASES["nested"].arguments()
    assert guide.median(*args)["top"].abs() < 0.02
    low, high = guide.quantiles([0.1587, 0.8413], *args)["top"]
    assert abs((high - low) / 2 - 0.1) < 0.02


def test_summaries_leave_the_random_numbers_alone():
    guide = AutoNaMIGuide(CHAIN)
    guide(Y)
    state = torch.get_rng_state()
    first, second = guide.median(Y), guide.median(Y)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_printing_names_every_site():
    guide = AutoNaMIGuide(eight_schools)
    guide(*SCHOOLS)
    for text in (str(guide.bayesnet), str(guide.inverse)):
        assert all(name in text for name in ("mu", "tau", "theta"))
