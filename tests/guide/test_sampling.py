"""What one call of the guide gives: sites, shapes, order, batch dims on the left, and respect for handlers."""

from __future__ import annotations

from contextlib import ExitStack

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import CASES, CHAIN, amortized, barren, learned, made_once, nested, scatter
from pyro import poutine
from pyro.util import check_model_guide_match, check_site_shape

from pyro_nami import AutoNaMIGuide

pytestmark = pytest.mark.filterwarnings("error")
DIRECTIONS = pytest.mark.parametrize("inverse", ["forward", "reverse"])
# every case; the direction and a third value alternate, so that each pair of these occurs
PAIRS = [(name, ("forward", "reverse")[i % 2], i // 2 % 2) for i, name in enumerate(CASES)]


EXACT = pytest.mark.parametrize("exact", [True, False], ids=["exact", "networks"])


@made_once
def called(name, inverse, exact):
    guide = AutoNaMIGuide(CASES[name].model, inverse=inverse, exact=exact)
    guide(*CASES[name].arguments())
    return guide


def made(name, inverse, exact=True):
    """Returns a case, its arguments, and a guide that was called once."""
    return CASES[name], CASES[name].arguments(), called(name, inverse, exact)


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


@EXACT
@DIRECTIONS
@pytest.mark.parametrize("name", CASES)
def test_guide_and_model_match_as_elbos_demand(name, inverse, exact):
    """The guide emits its latents and nothing else; `test_log_prob.py` holds their order and shapes to the case's."""
    case, args, guide = made(name, inverse, exact)
    guide_run = guide_trace(guide, *args)
    assert set(sampled(guide_run)) == set(case.shapes)
    assert not [key for key in guide_run.observation_nodes if key in case.shapes]
    model_run = poutine.trace(poutine.replay(case.model, guide_run)).get_trace(*args)
    model_run.compute_log_prob()
    check_model_guide_match(model_run, guide_run, case.nesting)
    guide_run, model_run = map(poutine.util.prune_subsample_sites, (guide_run, model_run))
    for run in (guide_run, model_run):
        for site in run.nodes.values():
            if site["type"] == "sample":
                check_site_shape(site, case.nesting)
    assert guide_run.log_prob_sum().isfinite() and model_run.log_prob_sum().isfinite()


@EXACT
@pytest.mark.parametrize("name, inverse, two", PAIRS)
def test_plates_around_the_guide_add_batch_dims_on_the_left(name, inverse, two, exact):
    """At the first call, so that no parameter may take the outer plates in (contract 3, Trace_ELBO)."""
    outer = (3, 7) if two else (7,)
    case, args, plain = made(name, inverse, exact)
    guide = AutoNaMIGuide(case.model, inverse=inverse, exact=exact)
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
    assert [(key, value.shape) for key, value in guide.named_parameters()] == [
        (key, value.shape) for key, value in plain.named_parameters()
    ]


@EXACT
@pytest.mark.parametrize(
    "name, inverse",
    [
        ("chain", "forward"),
        ("nested", "reverse"),
        ("vectors", "forward"),
        ("discrete_locals", "forward"),
        ("coupled_instances", "reverse"),
    ],
)
def test_draws_in_an_outer_plate_have_the_law_of_single_draws(name, inverse, exact):
    """Averages over 4,000 draws agree within 6 standard errors of a mean."""
    case, args, guide = made(name, inverse, exact)
    scatter(guide, 0.2)
    with torch.no_grad():
        with pyro.plate("outer", 4000, dim=-1 - case.nesting):
            batch, again = guide(*args), guide(*args)
        single = [guide(*args) for _ in range(400)]
    for key in case.shapes:
        values = batch[key].double().reshape(4000, -1)
        others = torch.stack([one[key] for one in single]).double().reshape(400, -1)
        values, others = values.clamp(-50, 50), others.clamp(-50, 50)
        error = (values.var(0) / 4000 + others.var(0) / 400).sqrt()
        assert ((values.mean(0) - others.mean(0)).abs() < 6 * error + 1e-6).all(), key
        assert not torch.equal(batch[key], again[key])


@EXACT
@DIRECTIONS
def test_the_first_call_draws_what_any_call_draws(inverse, exact):
    """Set-up leaves the random number generator alone."""
    guide, y = AutoNaMIGuide(CHAIN, inverse=inverse, exact=exact), torch.tensor(1.0)
    pyro.set_rng_seed(5)
    first = guide(y)
    pyro.set_rng_seed(5)
    second = guide(y)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_call_returns_values_sorted_by_name():
    _, args, guide = made("vectors", "reverse")
    values = []
    for function in (guide, guide.call):
        pyro.set_rng_seed(1)
        values.append(function(*args))
    assert list(values[0]) != sorted(values[0])
    assert len(values[1]) == 2 and all(
        torch.equal(values[1][i], values[0][name]) for i, name in enumerate("wz")
    )


@EXACT
@DIRECTIONS
def test_a_conditioned_guide_has_the_density_of_the_given_value(inverse, exact):
    """Auxiliary latent plus Delta would give minus infinity here (contract 1.1)."""
    _, (y,), guide = made("chain", inverse, exact)
    scatter(guide)
    given = torch.tensor(0.3)
    trace = guide_trace(poutine.condition(guide, {"b": given}), y)
    assert trace.nodes["b"]["value"] is given
    assert trace.log_prob_sum().isfinite()
    values = {name: trace.nodes[name]["value"] for name in "abc"}
    assert torch.allclose(trace.log_prob_sum(), guide.log_prob(values, y), atol=1e-5)


@EXACT
@DIRECTIONS
def test_what_a_factor_reads_moves_it_and_the_rest_does_not(inverse, exact):
    """Sampling order c, b, a with parents {y}, {c}, {b}, in the forward inverse: a's factor sees b alone."""
    _, (y,), guide = made("chain", inverse, exact)
    scatter(guide)
    base = {name: torch.tensor(0.5) for name in "abc"}

    def densities(**changed):
        trace = guide_trace(poutine.condition(guide, {**base, **changed}), y)
        return {name: trace.nodes[name]["log_prob"].item() for name in "abc"}

    before = densities()
    for moved in "abc":
        after = densities(**{moved: torch.tensor(2.0)})
        for name in set("abc") - {moved}:
            assert (before[name] != after[name]) == (moved in guide.inverse.parents[name]), (
                name,
                moved,
            )


@DIRECTIONS
def test_discrete_draws_have_no_gradient_and_continuous_ones_do(inverse):
    _, args, guide = made("discrete_locals", inverse)
    trace = guide_trace(guide, *args)
    assert trace.nodes["p"]["value"].requires_grad and trace.nodes["p"]["fn"].has_rsample
    fn = trace.nodes["k"]["fn"]
    # A conditional that is exact needs no score: its draws do not change log p - log q.
    assert not trace.nodes["k"]["value"].requires_grad and fn.has_rsample == (
        "k" in guide.conjugate
    )


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


@DIRECTIONS
def test_a_masked_guide_still_samples(inverse):
    """`Predictive` calls guides under mask(False)."""
    case, args, guide = made("eight_schools", inverse)
    with torch.no_grad(), poutine.mask(mask=False):
        trace = guide_trace(guide, *args)
    assert trace.log_prob_sum() == 0
    assert {key: tuple(trace.nodes[key]["value"].shape) for key in case.shapes} == case.shapes


def test_a_guide_first_called_without_gradients_is_trainable():
    """SVI.evaluate_loss may come first, under no_grad."""
    guide, args = learned(nested), CASES["nested"].arguments()
    with torch.no_grad():
        guide(*args)
    assert all(parameter.requires_grad for parameter in guide.parameters())
    assert guide_trace(guide, *args).log_prob_sum().requires_grad


@pytest.mark.parametrize(
    "name, inverse, shared", [pair for pair in PAIRS if CASES[pair[0]].reparametrized]
)
def test_gradient_reaches_every_parameter(name, inverse, shared):
    case = CASES[name]
    guide = amortized(case.model, inverse=inverse, shared=bool(shared), exact=False)
    args = case.arguments()
    guide(*args)
    scatter(guide)
    sum(guide_trace(guide, *args).log_prob_sum() for _ in range(3)).backward()
    missing = [
        key
        for key, value in guide.named_parameters()
        if value.grad is None or not value.grad.abs().sum() > 0
    ]
    assert not missing
