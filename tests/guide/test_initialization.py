"""Step 0: locations and scales are those of Pyro's AutoNormal, with anchors and without."""

from __future__ import annotations

import functools
import statistics

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import CASES, conjugate_normal, eight_schools
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.autoguide.initialization import (
    init_to_feasible,
    init_to_generated,
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_uniform,
    init_to_value,
)
from pyro.optim import Adam
from torch.distributions import biject_to

from pyro_nami import AutoNaMIGuide

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("double")]
# forward couples instances or samples in another order; everywhere the start is the same
NAMES = [
    name
    for name in CASES
    if CASES[name].reparametrized and name not in ("deterministic_and_delta", "support_parents")
]


def unconstrained_draws(guide, name, args, count=3000):
    """Returns latent -> draws of the guide in unconstrained space, ``(count, elements)``."""
    case = CASES[name]
    with (
        torch.no_grad(),
        poutine.trace() as tracer,
        pyro.plate("outer", count, dim=-1 - case.nesting),
    ):
        guide(*args)
    result = {}
    for key in case.shapes:
        site = tracer.trace.nodes[key]
        free = biject_to(site["fn"].support).inv(site["value"])
        result[key] = free.reshape(count, -1)
    return result


@pytest.mark.parametrize(
    "name, inverse, anchor",
    [
        (name, inverse, bool((i + j) % 2))
        for i, name in enumerate(NAMES)
        for j, inverse in enumerate(["forward", "reverse", "mean_field"])
    ],
)
def test_locations_and_scales_are_those_of_autonormal(name, inverse, anchor):
    """Means within 6 standard errors, sds within 10% (3,000 draws have an error of 1.3%).

    A factor that is anchored to values drawn before it moves with them, so over all draws it is somewhat wider.
    """
    case, args = CASES[name], CASES[name].arguments()
    theirs = AutoNormal(case.model)
    theirs(*args)
    expected = {}
    for key in case.shapes:
        loc, scale = theirs._get_loc_and_scale(key)
        expected[key] = loc.detach().reshape(-1), scale.detach().reshape(-1)
    pyro.clear_param_store()
    ours = AutoNaMIGuide(
        case.model, inverse=inverse, anchor=anchor, exact=False, init_loc_fn=init_to_feasible
    )
    ours(*args)
    draws = unconstrained_draws(ours, name, args)
    for key in case.shapes:
        loc, scale = expected[key]
        rule = ours._plan.learned.get(key)
        moves = anchor and rule and rule.anchored and ours.bayesnet.graph.in_degree(key)
        slack = 0.15 if moves else 6 * 0.1 / 3000**0.5
        assert ((draws[key].mean(0) - loc).abs() < slack).all(), key
        ratio = draws[key].std(0) / scale
        assert ((ratio > 0.9) & (ratio < (2.5 if moves else 1.1))).all(), key


def test_anchored_factors_start_at_the_given_scale_at_the_initial_values():
    y, sigma = CASES["eight_schools"].arguments()
    options = {"init_scale": 0.25, "init_loc_fn": init_to_feasible, "exact": False}
    guide = AutoNaMIGuide(eight_schools, inverse="reverse", **options)
    guide(y, sigma)
    prototype = {key: guide.prototype_trace.nodes[key]["value"] for key in ("mu", "tau", "theta")}
    for key in prototype:
        with torch.no_grad(), pyro.plate("outer", 4000, dim=-2):
            held = {other: value for other, value in prototype.items() if other != key}
            with poutine.trace() as tracer, poutine.condition(data=held):
                guide(y, sigma)
        site = tracer.trace.nodes[key]
        transform = biject_to(site["fn"].support)
        free = transform.inv(site["value"])
        center = transform.inv(prototype[key])
        assert ((free.mean(0) - center).abs() < 6 * 0.25 / 4000**0.5).all(), key
        assert ((free.std(0) - 0.25).abs() < 0.02).all(), key


STRATEGIES = {
    "feasible": init_to_feasible,
    "mean": init_to_mean,
    "median": init_to_median,
    "sample": init_to_sample,
    "uniform": init_to_uniform,
    "value": init_to_value(values={"mu": torch.tensor(1.5, dtype=torch.float64)}),
    "generated": functools.partial(init_to_generated, generate=lambda: STRATEGIES["value"]),
}


@pytest.mark.parametrize("anchor", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_init_loc_fn_sets_the_location(strategy, anchor):
    y = torch.ones(4)
    options = {
        "init_loc_fn": STRATEGIES[strategy],
        "init_scale": 1e-4,
        "anchor": anchor,
        "exact": False,
    }
    guide = AutoNaMIGuide(conjugate_normal, **options)
    value = guide(y)["mu"]
    assert abs(value - guide.prototype_trace.nodes["mu"]["value"]) < 1e-2
    if strategy in ("value", "generated"):
        assert abs(value - 1.5) < 1e-2
    if strategy in ("mean", "feasible"):
        assert abs(value) < 0.5


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "strategy", [init_to_sample, init_to_median(num_samples=5), init_to_uniform(radius=0.5)]
)
@pytest.mark.parametrize(
    "name, inverse",
    [
        ("constrained", "forward"),
        ("vectors", "reverse"),
        ("nested", "forward"),
        ("support_parents", "reverse"),
    ],
)
def test_strategies_that_sample_work_on_every_support(name, inverse, strategy, exact):
    case = CASES[name]
    guide = AutoNaMIGuide(case.model, inverse=inverse, init_loc_fn=strategy, exact=exact)
    assert all(value.isfinite().all() for value in guide(*case.arguments()).values())


def test_discrete_sites_are_hidden_from_strategies_that_refuse_them():
    """feasible, uniform and value raise on discrete sites (contract 5)."""
    case = CASES["discrete_locals"]
    for strategy in STRATEGIES.values():
        pyro.clear_param_store()
        assert AutoNaMIGuide(case.model, init_loc_fn=strategy)(*case.arguments())["k"].shape == (6,)


def test_the_prototype_is_there_after_the_first_call():
    guide, y = AutoNaMIGuide(conjugate_normal), torch.ones(4)
    assert guide.prototype_trace is None
    guide(y)
    assert "mu" in guide.prototype_trace.nodes and "y" not in guide.prototype_trace.nodes


@pytest.mark.parametrize("exact", [True, False])
def test_the_initial_density_is_finite_far_from_the_prior(exact):
    """Data of any scale are standardized before they are read."""
    for scale in (1e-6, 1.0, 1e6):
        pyro.clear_param_store()
        guide, y = AutoNaMIGuide(conjugate_normal, exact=exact), torch.randn(5) * scale
        assert guide.log_prob({"mu": torch.tensor(0.1)}, y).isfinite()


def test_by_default_factor_models_leave_the_origin_sooner():
    """There loadings are zero and all is noise, and no gradient says which way to go."""
    generator = torch.Generator().manual_seed(0)
    loadings = torch.randn(2, 6, generator=generator) * torch.tensor([[2.0], [0.7]])
    x = torch.randn(50, 2, generator=generator) @ loadings + 0.3 * torch.randn(
        50, 6, generator=generator
    )

    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 6]).to_event(2))
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with pyro.plate("n", 50):
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            pyro.sample("x", dist.Normal(z @ w, s).to_event(1), obs=x)

    noise, rules = [], {"w": "learned", "s": "learned"}
    for options in ({}, {"init_loc_fn": init_to_feasible}):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        guide = AutoNaMIGuide(model, rules=rules, **options)
        svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
        for _ in range(150):
            svi.step()
        noise.append(torch.stack([guide()["s"] for _ in range(50)]).mean())
    assert noise[0] < noise[1] - 0.15, noise
    pyro.clear_param_store()
    guide = AutoNaMIGuide(model)  # which begins at a mode
    with torch.no_grad():
        found = torch.stack([guide()["s"] for _ in range(50)]).mean()
    assert found.item() == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("rate", [0.5, 0.05, 0.005])
def test_a_robust_regression_in_its_own_units_is_learned_at_any_rate(rate):
    """The scale starts at the median of its prior; at 1, the guide ended in NaN, or was behind AutoNormal."""
    generator = torch.Generator().manual_seed(11)
    years, area = (
        1950 + 70 * torch.rand(60, generator=generator),
        500 + 3000 * torch.rand(60, generator=generator),
    )
    price = 50 * area + 300 * (years - 1980) + 2e4 * torch.randn(60, generator=generator)

    def model():
        a, b = pyro.sample("a", dist.Normal(0.0, 1e6)), pyro.sample("b", dist.Normal(0.0, 1e4))
        c, s = pyro.sample("c", dist.Normal(0.0, 1e3)), pyro.sample("s", dist.HalfCauchy(1e4))
        nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
        with pyro.plate("rows", 60):
            pyro.sample("price", dist.StudentT(1 + nu, a + b * years + c * area, s), obs=price)

    losses = []
    for kind in (AutoNormal, AutoNaMIGuide):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        svi = SVI(model, kind(model), Adam({"lr": rate}), Trace_ELBO())
        losses.append([svi.step() for _ in range(60)][-20:])
    assert statistics.fmean(losses[1]) < statistics.fmean(losses[0]) - 5


@pytest.mark.parametrize("rate", [0.1, 0.01, 0.001])
def test_data_in_small_units_are_learned_at_any_rate(rate):
    """A scale of 0.1, where factors start, is a thousand standard deviations of the prior, which a step hardly leaves.

    The density of the data at the posterior is about exp(460).
    """
    y = 1e-5 * (3.0 + 2.0 * torch.randn(50, generator=torch.Generator().manual_seed(0)))

    def model():
        a, s = (
            pyro.sample("a", dist.Normal(0.0, 1e-4)),
            pyro.sample("s", dist.LogNormal(-10.0, 3.0)),
        )
        with pyro.plate("rows", 50):
            pyro.sample("y", dist.Laplace(a, s), obs=y)

    guide = AutoNaMIGuide(model)
    svi = SVI(model, guide, Adam({"lr": rate}), Trace_ELBO())
    with torch.no_grad():
        draws = torch.stack([guide()["a"] for _ in range(200)])
    assert draws.std() < 3e-4 and draws.mean().abs() < 2e-4
    assert statistics.fmean([svi.step() for _ in range(100)][-30:]) < 0.0
