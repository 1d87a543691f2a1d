"""What one call of the guide gives: sites, shapes, order, batch dims on the left, and respect for handlers."""

from __future__ import annotations

from contextlib import ExitStack

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import CASES, CHAIN, amortized, barren, eight_schools, nested, scatter
from pyro import poutine
from pyro.util import check_model_guide_match, check_site_shape

from pyro_nami import AutoNaMIGuide

pytestmark = pytest.mark.filterwarnings("error")
INVERSES = ["auto", "forward", "reverse", "free", "stuhlmueller", "mean_field", "fully_connected"]


def guide_trace(guide, *args, **kwargs):
    trace = poutine.trace(guide).get_trace(*args, **kwargs)
    trace.compute_log_prob()
    return trace


def sampled(trace):
    return {
        name: site["value"]
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and type(site["fn"]).__name__ != "_Subsample"
    }


@pytest.mark.parametrize("name", CASES)
def test_a_call_returns_every_latent_in_model_order_with_its_shape(name):
    case = CASES[name]
    values = AutoNaMIGuide(case.model)(*case.arguments())
    assert {key: tuple(value.shape) for key, value in values.items()} == case.shapes
    assert list(values) == list(case.shapes)


@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("name", ["collider", "eight_schools", "nested", "constrained", "crossed"])
def test_shapes_and_order_do_not_depend_on_the_inverse(name, inverse):
    case = CASES[name]
    values = AutoNaMIGuide(case.model, inverse=inverse)(*case.arguments())
    assert [(key, tuple(value.shape)) for key, value in values.items()] == list(case.shapes.items())


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
@pytest.mark.parametrize("name", CASES)
def test_guide_and_model_match_as_elbos_demand(name, inverse):
    case, guide = CASES[name], AutoNaMIGuide(CASES[name].model, inverse=inverse)
    args = case.arguments()
    guide_run = guide_trace(guide, *args)
    model_run = poutine.trace(poutine.replay(case.model, guide_run)).get_trace(*args)
    model_run.compute_log_prob()
    check_model_guide_match(model_run, guide_run, case.nesting)
    guide_run, model_run = map(poutine.util.prune_subsample_sites, (guide_run, model_run))
    for run in (guide_run, model_run):
        for site in run.nodes.values():
            if site["type"] == "sample":
                check_site_shape(site, case.nesting)
    assert guide_run.log_prob_sum().isfinite() and model_run.log_prob_sum().isfinite()


@pytest.mark.parametrize("name", CASES)
def test_the_guide_emits_its_latents_and_nothing_else(name):
    case, guide = CASES[name], AutoNaMIGuide(CASES[name].model)
    trace = guide_trace(guide, *case.arguments())
    assert set(sampled(trace)) == set(case.shapes)
    assert not [key for key in trace.observation_nodes if key in case.shapes]


@pytest.mark.parametrize("outer", [(7,), (3, 7)], ids=str)
@pytest.mark.parametrize("inverse", ["forward", "reverse"])
@pytest.mark.parametrize("name", CASES)
def test_plates_around_the_guide_add_batch_dims_on_the_left(name, inverse, outer):
    """At the first call, so that no parameter may take the outer plates in (contract 3, Trace_ELBO)."""
    case, guide = CASES[name], AutoNaMIGuide(CASES[name].model, inverse=inverse)
    args = case.arguments()
    with poutine.trace() as tracer, ExitStack() as stack:
        for i, size in enumerate(reversed(outer)):
            stack.enter_context(pyro.plate(f"outer_{i}", size, dim=-1 - case.nesting - i))
        guide(*args)
    tracer.trace.compute_log_prob()
    for key, shape in case.shapes.items():
        site = tracer.trace.nodes[key]
        event_dim = site["fn"].event_dim
        own = shape[: len(shape) - event_dim]
        want = outer + (1,) * (case.nesting - len(own)) + shape
        assert tuple(site["value"].shape) == want, key
        assert tuple(site["log_prob"].shape) == want[: len(want) - event_dim], key
    inside = {key: tuple(value.shape) for key, value in guide.named_parameters()}
    fresh = AutoNaMIGuide(case.model, inverse=inverse)
    fresh(*args)
    assert inside == {key: tuple(value.shape) for key, value in fresh.named_parameters()}


@pytest.mark.parametrize("name", ["chain", "nested", "vectors", "discrete_locals", "coupled_instances"])
@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_draws_in_an_outer_plate_have_the_law_of_single_draws(name, inverse):
    """Averages over 4,000 draws agree within 6 standard errors of a mean."""
    case, guide = CASES[name], AutoNaMIGuide(CASES[name].model, inverse=inverse)
    args = case.arguments()
    guide(*args)
    scatter(guide, 0.2)
    with torch.no_grad():
        with pyro.plate("outer", 4000, dim=-1 - case.nesting):
            batch = guide(*args)
        with pyro.plate("outer", 4000, dim=-1 - case.nesting):
            again = guide(*args)
        single = [guide(*args) for _ in range(400)]
    for key in case.shapes:
        values = batch[key].double().reshape(4000, -1)
        others = torch.stack([one[key] for one in single]).double().reshape(400, -1)
        values, others = values.clamp(-50, 50), others.clamp(-50, 50)
        error = (values.var(0) / 4000 + others.var(0) / 400).sqrt()
        assert ((values.mean(0) - others.mean(0)).abs() < 6 * error + 1e-6).all(), key
        assert not torch.equal(batch[key], again[key])


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_the_first_call_draws_what_any_call_draws(inverse):
    """Set-up leaves the random number generator alone."""
    guide, y = AutoNaMIGuide(CHAIN, inverse=inverse), torch.tensor(1.0)
    pyro.set_rng_seed(5)
    first = guide(y)
    pyro.set_rng_seed(5)
    second = guide(y)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_call_returns_values_sorted_by_name():
    def model():
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        a = pyro.sample("a", dist.Normal(b, 1.0))
        pyro.sample("y", dist.Normal(a, 1.0), obs=torch.tensor(1.0))

    guide = AutoNaMIGuide(model)
    pyro.set_rng_seed(1)
    values = guide()
    pyro.set_rng_seed(1)
    assert guide.call() == (values["a"], values["b"])


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
@pytest.mark.parametrize("name", ["collider", "eight_schools", "vectors", "coupled_instances", "barren"])
def test_replayed_values_have_the_density_of_drawn_ones(name, inverse):
    """No reliance on a cache of what was drawn: clones have the same density."""
    case, guide = CASES[name], AutoNaMIGuide(CASES[name].model, inverse=inverse)
    args = case.arguments()
    guide(*args)
    scatter(guide)
    trace = guide_trace(guide, *args)
    expected = trace.log_prob_sum()
    for key in case.shapes:
        trace.nodes[key]["value"] = trace.nodes[key]["value"].detach().clone()
    again = guide_trace(poutine.replay(guide, trace), *args)
    assert torch.allclose(again.log_prob_sum(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_a_conditioned_guide_has_the_density_of_the_given_value(inverse):
    """Auxiliary latent plus Delta would give minus infinity here (contract 1.1)."""
    guide, y = AutoNaMIGuide(CHAIN, inverse=inverse), torch.tensor(1.0)
    guide(y)
    scatter(guide)
    given = torch.tensor(0.3)
    trace = guide_trace(poutine.condition(guide, {"b": given}), y)
    assert trace.nodes["b"]["value"] is given
    assert trace.log_prob_sum().isfinite()
    values = {name: trace.nodes[name]["value"] for name in "abc"}
    assert torch.allclose(trace.log_prob_sum(), guide.log_prob(values, y), atol=1e-5)


def test_what_a_factor_reads_moves_it_and_the_rest_does_not():
    """Sampling order c, b, a with parents {y}, {c}, {b}: a's factor sees b alone."""
    guide, y = AutoNaMIGuide(CHAIN, inverse="forward"), torch.tensor(1.0)
    guide(y)
    scatter(guide)
    base = {name: torch.tensor(0.5) for name in "abc"}

    def locs(**changed):
        trace = guide_trace(poutine.condition(guide, {**base, **changed}), changed.get("y", y))
        return {name: trace.nodes[name]["log_prob"].item() for name in "abc"}

    order = list(reversed(guide.inverse.order))
    reads = {name: set(guide.inverse.parents[name]) for name in order}
    for moved in "abc":
        before, after = locs(), locs(**{moved: torch.tensor(2.0)})
        for name in set("abc") - {moved}:
            assert (before[name] != after[name]) == (moved in reads[name]), (name, moved)


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_discrete_draws_have_no_gradient_and_continuous_ones_do(inverse):
    case, guide = CASES["discrete_locals"], AutoNaMIGuide(CASES["discrete_locals"].model, inverse=inverse)
    trace = guide_trace(guide, *case.arguments())
    assert trace.nodes["p"]["value"].requires_grad and trace.nodes["p"]["fn"].has_rsample
    assert not trace.nodes["k"]["value"].requires_grad and not trace.nodes["k"]["fn"].has_rsample


def test_barren_latents_come_from_the_models_own_conditional():
    guide, y = AutoNaMIGuide(barren), torch.tensor(1.0)
    trace = guide_trace(guide, y)
    assert guide.inverse.predictive == {"b", "c"}
    fn = trace.nodes["b"]["fn"]
    assert isinstance(fn, dist.Normal) and fn.loc == trace.nodes["a"]["value"] and fn.scale == 2
    model_run = poutine.trace(poutine.replay(barren, trace)).get_trace(y)
    model_run.compute_log_prob()
    for name in ("b", "c"):
        assert torch.equal(model_run.nodes[name]["log_prob"], trace.nodes[name]["log_prob"])


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_a_masked_guide_still_samples(inverse):
    """`Predictive` calls guides under mask(False)."""
    case, guide = CASES["eight_schools"], AutoNaMIGuide(eight_schools, inverse=inverse)
    with torch.no_grad(), poutine.mask(mask=False):
        trace = guide_trace(guide, *case.arguments())
    assert trace.log_prob_sum() == 0
    assert {key: tuple(trace.nodes[key]["value"].shape) for key in case.shapes} == case.shapes


def test_a_guide_first_called_without_gradients_is_trainable():
    """SVI.evaluate_loss may come first, under no_grad."""
    guide, args = AutoNaMIGuide(nested), CASES["nested"].arguments()
    with torch.no_grad():
        guide(*args)
    assert all(parameter.requires_grad for parameter in guide.parameters())
    assert guide_trace(guide, *args).log_prob_sum().requires_grad


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].reparametrized])
@pytest.mark.parametrize("shared", [True, False])
def test_gradient_reaches_every_parameter(name, inverse, shared):
    case = CASES[name]
    guide = amortized(case.model, inverse=inverse, shared=shared)
    args = case.arguments()
    guide(*args)
    scatter(guide)
    model_and_guide = [guide_trace(guide, *args) for _ in range(3)]
    sum(trace.log_prob_sum() for trace in model_and_guide).backward()
    missing = [
        key for key, value in guide.named_parameters() if value.grad is None or not value.grad.abs().sum() > 0
    ]
    assert not missing
