"""Every objective of Pyro that a guide is trained by: it runs, it estimates the right number, and it trains."""

from __future__ import annotations

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import CASES, CHAIN, amortized, conjugate_normal, conjugate_normal_posterior, mixture, scatter
from pyro import poutine
from pyro.infer import (
    SVI,
    JitTrace_ELBO,
    JitTraceEnum_ELBO,
    JitTraceGraph_ELBO,
    JitTraceMeanField_ELBO,
    RenyiELBO,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    TraceTailAdaptive_ELBO,
    config_enumerate,
)
from pyro.optim import Adam, ClippedAdam

from pyro_nami import AutoNaMIGuide

ELBOS = {
    "trace": Trace_ELBO,
    "mean field": TraceMeanField_ELBO,
    "graph": TraceGraph_ELBO,
    "enum": TraceEnum_ELBO,
    "renyi": lambda **options: RenyiELBO(alpha=0.5, **{"num_particles": 2, **options}),
    "tail adaptive": lambda **options: TraceTailAdaptive_ELBO(
        **{"num_particles": 3, "vectorize_particles": True, **options}
    ),
}
JIT = {
    "trace": JitTrace_ELBO,
    "graph": JitTraceGraph_ELBO,
    "enum": JitTraceEnum_ELBO,
    "mean field": JitTraceMeanField_ELBO,
}
NAMES = ["collider", "eight_schools", "nested", "constrained", "coupled_instances", "barren", "with_factor"]
quiet = pytest.mark.filterwarnings(
    "ignore:Failed to verify mean field restriction", "ignore:TraceEnum_ELBO found no sample sites"
)
hidden = pytest.mark.filterwarnings("ignore:Hidden randomness")


@quiet
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("vectorized", [False, True])
@pytest.mark.parametrize("elbo", ELBOS)
@pytest.mark.parametrize("inverse", ["forward", "reverse"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_finite_and_move_the_parameters(name, inverse, elbo, vectorized):
    """With max_plate_nesting given, so that vectorized particles are around the first call of all."""
    case = CASES[name]
    if elbo in ("mean field", "tail adaptive") and not case.reparametrized:
        pytest.skip("the objective needs reparametrized sites")
    options = {"num_particles": 3, "vectorize_particles": True} if vectorized else {}
    objective = ELBOS[elbo](max_plate_nesting=case.nesting, **options)
    guide, args = AutoNaMIGuide(case.model, inverse=inverse), case.arguments()
    svi = SVI(case.model, guide, ClippedAdam({"lr": 0.01}), objective)
    losses = [svi.step(*args)]
    before = {key: value.detach().clone() for key, value in guide.named_parameters()}
    losses += [svi.step(*args) for _ in range(2)]
    assert torch.tensor(losses).isfinite().all() or elbo == "tail adaptive"  # which estimates no loss
    after = dict(guide.named_parameters())
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert all(value.isfinite().all() for value in after.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("vectorized", [False, True])
@pytest.mark.parametrize("elbo", JIT)
@pytest.mark.parametrize("name", ["collider", "eight_schools", "nested", "constrained", "independent_locals"])
def test_compiled_objectives_run(name, elbo, vectorized):
    case = CASES[name]
    options = {"num_particles": 3, "vectorize_particles": True} if vectorized else {}
    objective = JIT[elbo](max_plate_nesting=case.nesting, ignore_jit_warnings=True, **options)
    guide, args = AutoNaMIGuide(case.model), case.arguments()
    svi = SVI(case.model, guide, Adam({"lr": 0.02}), objective)
    losses = torch.tensor([svi.step(*args) for _ in range(4)])
    assert losses.isfinite().all()
    assert len(losses.unique()) == 4, "draws are frozen into the graph"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_a_compiled_objective_reads_new_data(inverse):
    """The data are an argument of the compiled function, not a constant in it."""
    guide = AutoNaMIGuide(conjugate_normal, inverse=inverse)
    objective = JitTrace_ELBO(ignore_jit_warnings=True, num_particles=50, vectorize_particles=True)
    svi = SVI(conjugate_normal, guide, Adam({"lr": 1e-6}), objective)
    near, far = torch.zeros(5), torch.full((5,), 30.0)
    svi.step(near)
    plain = Trace_ELBO(num_particles=50, vectorize_particles=True)
    for y in (near, far):
        expected = plain.loss(conjugate_normal, guide, y)
        assert abs(svi.step(y) - expected) < 0.1 * expected


@quiet
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("elbo", ["trace", "mean field", "graph", "enum"])
@pytest.mark.parametrize("inverse", ["forward", "reverse"])
@pytest.mark.parametrize("name", ["collider", "eight_schools", "constrained"])
def test_all_estimate_the_same_bound(name, inverse, elbo):
    """E_q[log p - log q] from plain traces; a closed-form KL used wrongly would show here (contract 3, mean field).

    Agreement within 6 standard errors of both means, over 2,000 draws each.
    """
    case, guide = CASES[name], AutoNaMIGuide(CASES[name].model, inverse=inverse)
    args = case.arguments()
    guide(*args)
    scatter(guide, 0.1)
    with torch.no_grad(), pyro.plate("outer", 2000, dim=-1 - case.nesting):
        guide_run = poutine.trace(guide).get_trace(*args)
        model_run = poutine.trace(poutine.replay(case.model, guide_run)).get_trace(*args)
    total = torch.zeros(2000)
    for run, sign in ((model_run, 1), (guide_run, -1)):
        run.compute_log_prob()
        for site in run.nodes.values():
            if site["type"] == "sample" and site["log_prob"].numel() > 1:
                total = total + sign * site["log_prob"].reshape(2000, -1).sum(-1)
    objective = ELBOS[elbo](num_particles=2000, vectorize_particles=True, max_plate_nesting=case.nesting)
    loss = objective.loss(case.model, guide, *args)
    error = (2 * total.var() / 2000).sqrt()
    assert abs(-loss - total.mean()) < 6 * error


@pytest.mark.parametrize("elbo", ["trace", "mean field", "graph", "enum", "renyi", "tail adaptive"])
def test_training_reaches_the_conjugate_posterior(elbo):
    """A Normal guide is exact here; over seeds, what training ends at varies by at most 0.13 (Renyi)."""
    y = torch.tensor([1.0, 2.0, 0.5])
    mean, sd = conjugate_normal_posterior(y)
    guide = AutoNaMIGuide(conjugate_normal)
    objective = ELBOS[elbo](num_particles=8, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(conjugate_normal, guide, ClippedAdam({"lr": 0.03, "lrd": 0.99}), objective)
    for _ in range(300):
        svi.step(y)
    with torch.no_grad(), pyro.plate("outer", 4000, dim=-2):
        draws = guide(y)["mu"]
    assert abs(draws.mean() - mean) < 0.2
    assert abs(draws.std() - sd) < 0.15


# ---- discrete latents: score functions and enumeration


def sprinkler(wet):
    """Discrete only, so that every expectation is a sum over four states."""
    rain = pyro.sample("rain", dist.Bernoulli(0.3))
    sprinkler = pyro.sample("sprinkler", dist.Bernoulli(0.4 - 0.3 * rain))
    pyro.sample("wet", dist.Bernoulli(0.05 + 0.5 * rain + 0.4 * sprinkler), obs=wet)


def sprinkler_bound(guide, wet):
    """Returns E_q[log p - log q] by enumeration, differentiable in the guide's parameters."""
    rain, sprinkled = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    log_q = guide.log_prob({"rain": rain, "sprinkler": sprinkled}, wet)
    log_p = (
        dist.Bernoulli(0.3).log_prob(rain)
        + dist.Bernoulli(0.4 - 0.3 * rain).log_prob(sprinkled)
        + dist.Bernoulli(0.05 + 0.5 * rain + 0.4 * sprinkled).log_prob(wet)
    )
    assert abs(log_q.exp().sum() - 1) < 1e-6
    return (log_q.exp() * (log_p - log_q)).sum()


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("how", ["parallel", "sequential"])
@pytest.mark.parametrize("inverse", ["forward", "reverse"])
@pytest.mark.parametrize("particles", [1, 3])
def test_enumeration_in_the_guide_is_exact(inverse, how, particles):
    guide, wet = AutoNaMIGuide(sprinkler, inverse=inverse), torch.tensor(1.0)
    guide(wet)
    scatter(guide)
    objective = TraceEnum_ELBO(
        max_plate_nesting=0, num_particles=particles, vectorize_particles=particles > 1
    )
    loss = objective.differentiable_loss(sprinkler, config_enumerate(guide, how), wet)
    bound = sprinkler_bound(guide, wet)
    assert torch.allclose(-loss, bound)
    parameters = list(guide.parameters())
    ours, exact = (torch.autograd.grad(value, parameters) for value in (-loss, bound))
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(ours, exact))


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_enumeration_in_the_guide_beside_continuous_sites(inverse):
    case = CASES["discrete_locals"]
    guide, args = AutoNaMIGuide(case.model, inverse=inverse), case.arguments()
    svi = SVI(case.model, config_enumerate(guide), Adam({"lr": 0.02}), TraceEnum_ELBO(max_plate_nesting=1))
    losses = torch.tensor([svi.step(*args) for _ in range(150)])
    assert losses.isfinite().all()
    assert losses[-30:].mean() < losses[:30].mean()


@pytest.mark.slow
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("elbo", ["trace", "graph"])
@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_score_function_gradients_are_unbiased(inverse, elbo):
    """Sampled values must not be written in place inside the networks, which drops the score term (contract 1.7).

    The mean of 300 gradients lies within 5 of its standard errors of the exact gradient.
    """
    guide, wet = amortized(sprinkler, inverse=inverse, hidden_features=()), torch.tensor(1.0)
    guide(wet)
    scatter(guide)
    parameters = list(guide.parameters())
    exact = torch.cat(
        [part.flatten() for part in torch.autograd.grad(sprinkler_bound(guide, wet), parameters)]
    )
    objective = ELBOS[elbo](num_particles=20, vectorize_particles=True, max_plate_nesting=0)
    estimates = []
    for _ in range(300):
        guide.zero_grad()
        objective.loss_and_grads(sprinkler, guide, wet)
        estimates.append(-torch.cat([p.grad.flatten() for p in parameters]))
    estimates = torch.stack(estimates)
    error = estimates.std(0) / 300**0.5
    assert (exact.abs() > 0.01).any()
    assert ((estimates.mean(0) - exact).abs() < 5 * error + 1e-8).all()


@hidden
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_enumeration_in_the_model_beside_the_guide(inverse):
    """The loss equals the one with the discrete sites summed out by hand, at the same draws."""
    guide = AutoNaMIGuide(poutine.block(mixture, hide=["k"]), inverse=inverse)
    y = torch.randn(6)
    guide(y)
    scatter(guide)
    assert set(guide(y)) == {"weights", "locs"}
    pyro.set_rng_seed(3)
    loss = TraceEnum_ELBO(max_plate_nesting=1).loss(mixture, guide, y)
    pyro.set_rng_seed(3)
    run = poutine.trace(guide).get_trace(y)
    weights, locs = run.nodes["weights"]["value"], run.nodes["locs"]["value"]
    expected = (
        dist.Dirichlet(torch.ones(2)).log_prob(weights)
        + dist.Normal(torch.tensor([-1.0, 1.0]), 2.0).log_prob(locs).sum()
        + dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, 1.0)).log_prob(y).sum()
        - run.log_prob_sum()
    )
    assert torch.allclose(torch.tensor(-loss), expected)


@hidden
def test_a_guide_over_a_blocked_discrete_site_sees_through_it():
    """y depends on the weights through the hidden k, and so do the factors."""
    guide, y = AutoNaMIGuide(poutine.block(mixture, hide=["k"])), torch.randn(6)
    guide(y)
    assert guide.bayesnet.latent == ("weights", "locs")
    assert {("weights", "y"), ("locs", "y")} <= set(guide.bayesnet.edges)


@pytest.mark.parametrize("objective", [TraceEnum_ELBO, JitTraceEnum_ELBO])
@pytest.mark.filterwarnings("ignore")
def test_training_with_enumeration_in_the_model(objective):
    guide, y = (
        AutoNaMIGuide(poutine.block(mixture, hide=["k"])),
        torch.cat([torch.randn(10) - 3, torch.randn(10) + 3]),
    )
    svi = SVI(mixture, guide, Adam({"lr": 0.01}), objective(max_plate_nesting=1))
    losses = torch.tensor([svi.step(y) for _ in range(150)])
    assert losses.isfinite().all() and losses[-20:].mean() < losses[:20].mean() - 1


def test_vectorized_particles_with_enumeration_in_the_guide_and_plates():
    case = CASES["discrete_locals"]
    guide, args = AutoNaMIGuide(case.model), case.arguments()
    objective = TraceEnum_ELBO(max_plate_nesting=1, num_particles=4, vectorize_particles=True)
    svi = SVI(case.model, config_enumerate(guide), Adam({"lr": 0.02}), objective)
    assert all(torch.tensor([svi.step(*args) for _ in range(3)]).isfinite())


# ---- sessions


def test_a_second_guide_of_the_class_trains_too():
    """Plain nn.Parameters would stop here without a word (contract 1.3)."""
    y = torch.tensor(3.0)
    for _ in range(2):
        guide = AutoNaMIGuide(CHAIN)
        svi = SVI(CHAIN, guide, Adam({"lr": 0.02}), Trace_ELBO())
        svi.step(y)
        before = [value.detach().clone() for value in guide.parameters()]
        for _ in range(5):
            svi.step(y)
        assert any(not torch.equal(a, b) for a, b in zip(before, guide.parameters()))
        assert {id(p) for p in guide.parameters()} == {id(p) for p in svi_parameters(guide, y)}


def svi_parameters(guide, *args):
    with poutine.trace(param_only=True) as tracer:
        guide(*args)
    return [site["value"].unconstrained() for site in tracer.trace.nodes.values() if site["type"] == "param"]


def test_all_parameters_are_param_sites_without_constraint():
    """Constrained ones are never updated by CSIS (contract 1.3)."""
    guide, args = amortized(CASES["nested"].model), CASES["nested"].arguments()
    with poutine.trace() as tracer:
        guide(*args)
    sites = {name: site for name, site in tracer.trace.nodes.items() if site["type"] == "param"}
    assert {id(site["value"]) for site in sites.values()} == {id(value) for value in guide.parameters()}
    assert all(site["value"].is_leaf and site["value"].requires_grad for site in sites.values())
    names = {f"AutoNaMIGuide.{name}" for name, _ in guide.named_pyro_params()}
    assert names == set(sites) == set(pyro.get_param_store().keys())


def test_module_local_params_keep_guides_apart():
    y = torch.tensor(3.0)
    with pyro.settings.context(module_local_params=True):
        guides = [AutoNaMIGuide(CHAIN) for _ in range(2)]
        svi = SVI(CHAIN, guides[0], Adam({"lr": 0.05}), Trace_ELBO())
        guides[1](y)
        for _ in range(10):
            svi.step(y)
        assert len(pyro.get_param_store()) == 0
        moved = [torch.cat([p.detach().flatten() for p in guide.parameters()]) for guide in guides]
        assert not torch.equal(*moved)
        assert (guides[1].network.networks[0].output[:, :-1] == 0).all(), (
            "the other guide is where it started"
        )


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("objective", [Trace_ELBO, TraceMeanField_ELBO, TraceEnum_ELBO])
def test_elbo_modules_train(objective, local):
    y = torch.tensor([1.0, 2.0, 0.5])
    with pyro.settings.context(module_local_params=local):
        guide = AutoNaMIGuide(conjugate_normal)
        elbo = objective(num_particles=4, vectorize_particles=True, max_plate_nesting=1)(
            conjugate_normal, guide
        )
        elbo(y)
        names = {name for name, _ in guide.named_parameters()}
        assert {name for name, _ in elbo.named_parameters()} == {f"guide.{name}" for name in names}
        optimizer = torch.optim.Adam(elbo.parameters(), lr=0.03)
        for _ in range(150):
            optimizer.zero_grad()
            elbo(y).backward()
            optimizer.step()
        draws = torch.stack([guide(y)["mu"].detach() for _ in range(300)])
    assert abs(draws.mean() - conjugate_normal_posterior(y)[0]) < 0.2


def test_evaluate_loss_before_any_step():
    guide, y = AutoNaMIGuide(CHAIN), torch.tensor(1.0)
    svi = SVI(CHAIN, guide, Adam({"lr": 0.02}), Trace_ELBO())
    assert torch.isfinite(torch.tensor(svi.evaluate_loss(y)))
    before = [value.detach().clone() for value in guide.parameters()]
    svi.step(y)
    assert any(not torch.equal(a, b) for a, b in zip(before, guide.parameters()))


def test_mean_field_elbo_warns_of_the_order_only_where_it_differs():
    """Documented: in an inverse order sites cannot come in the model's order; the value is right all the same."""
    y = torch.tensor(1.0)
    for inverse, count in (("reverse", 0), ("forward", 1)):
        guide = AutoNaMIGuide(CHAIN, inverse=inverse)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            SVI(CHAIN, guide, Adam({"lr": 0.02}), TraceMeanField_ELBO()).step(y)
        assert sum("mean field restriction" in str(entry.message) for entry in caught) == count


def test_particle_gradients_differ():
    """One draw a particle: with num_particles the variance falls."""
    guide, args = AutoNaMIGuide(CASES["eight_schools"].model), CASES["eight_schools"].arguments()
    guide(*args)

    def spread(particles):
        objective = Trace_ELBO(num_particles=particles, vectorize_particles=True, max_plate_nesting=1)
        losses = torch.tensor([objective.loss(CASES["eight_schools"].model, guide, *args) for _ in range(60)])
        return losses.std()

    assert spread(64) < spread(1) / 3
