"""Every objective of Pyro that a guide is trained by: it runs, it estimates the right number, and it trains."""

from __future__ import annotations

import itertools
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import (
    CASES,
    CHAIN,
    amortized,
    conjugate_normal,
    conjugate_normal_posterior,
    learned,
    mixture,
    scatter,
    steps,
)
from pyro import infer, poutine
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO, config_enumerate
from pyro.optim import Adam, ClippedAdam

from pyro_nami import AutoNaMIGuide

ELBOS = {
    "trace": Trace_ELBO,
    "mean field": TraceMeanField_ELBO,
    "graph": infer.TraceGraph_ELBO,
    "enum": TraceEnum_ELBO,
    "renyi": lambda **options: infer.RenyiELBO(alpha=0.5, **{"num_particles": 2, **options}),
    "tail adaptive": lambda **options: infer.TraceTailAdaptive_ELBO(
        **{"num_particles": 3, "vectorize_particles": True, **options}
    ),
}
NAMES = [
    "collider",
    "eight_schools",
    "nested",
    "constrained",
    "coupled_instances",
    "barren",
    "with_factor",
]
INVERSES = ["forward", "reverse"]
EXACT = pytest.mark.parametrize("exact", [False, True], ids=["networks", "exact"])
Y = torch.tensor([1.0, 2.0, 0.5])
# Every pair of a model and an objective, and of either and an inverse or how particles are taken.
STEPS = [
    (name, INVERSES[(i + j) % 2], elbo, bool((i + j // 2) % 2))
    for (i, name), (j, elbo) in itertools.product(enumerate(NAMES), enumerate(ELBOS))
    if CASES[name].reparametrized or elbo not in ("mean field", "tail adaptive")  # which need it
]
# Every model once, every compiled objective, with and without vectorized particles.
COMPILED = [
    ("collider", infer.JitTrace_ELBO, True),
    ("eight_schools", infer.JitTraceMeanField_ELBO, True),
    ("nested", infer.JitTraceEnum_ELBO, False),
    ("constrained", infer.JitTraceGraph_ELBO, True),
    ("independent_locals", infer.JitTrace_ELBO, False),
]
quiet = pytest.mark.filterwarnings(
    "ignore:Failed to verify mean field restriction", "ignore:TraceEnum_ELBO found no sample sites"
)


def particles(count):
    return {"num_particles": count, "vectorize_particles": True}


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def values_of(guide):
    return flat(guide.parameters())


@quiet
@pytest.mark.filterwarnings("error")
@EXACT
@pytest.mark.parametrize(("name", "inverse", "elbo", "vectorized"), STEPS)
def test_steps_are_finite_and_move_the_parameters(name, inverse, elbo, vectorized, exact):
    """With max_plate_nesting given, so that vectorized particles are around the first call of all."""
    case = CASES[name]
    objective = ELBOS[elbo](max_plate_nesting=case.nesting, **(particles(3) if vectorized else {}))
    guide, args = AutoNaMIGuide(case.model, inverse=inverse, exact=exact), case.arguments()
    svi = SVI(case.model, guide, ClippedAdam({"lr": 0.01}), objective)
    losses = [svi.step(*args)]
    names, before = [name for name, _ in guide.named_parameters()], values_of(guide)
    losses += [svi.step(*args) for _ in range(2)]
    # which estimates no loss
    assert torch.tensor(losses).isfinite().all() or elbo == "tail adaptive"
    assert names == [name for name, _ in guide.named_parameters()]
    assert values_of(guide).isfinite().all()
    assert torch.equal(before, values_of(guide)) == (guide.num_parameters == 0)
    assert exact or guide.num_parameters > 0


@pytest.mark.filterwarnings("ignore")
@EXACT
@pytest.mark.parametrize(("name", "elbo", "vectorized"), COMPILED)
def test_compiled_objectives_run(name, elbo, vectorized, exact):
    case = CASES[name]
    options = particles(3) if vectorized else {}
    objective = elbo(max_plate_nesting=case.nesting, ignore_jit_warnings=True, **options)
    guide, args = AutoNaMIGuide(case.model, exact=exact), case.arguments()
    losses = steps(case.model, guide, *args, count=4, lr=0.02, elbo=objective)
    # minus the evidence at every draw
    if guide.num_parameters == 0 and elbo is not infer.JitTraceMeanField_ELBO:
        expected = Trace_ELBO(max_plate_nesting=case.nesting).loss(case.model, guide, *args)
        assert exact and losses == pytest.approx([expected] * 4, rel=1e-4)
    else:
        assert len(losses.unique()) == 4, "draws are frozen into the graph"


@EXACT
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_objective_reads_new_data(exact):
    """The data are an argument of the compiled function, not a constant in it."""
    guide = amortized(conjugate_normal, exact=exact)
    objective = infer.JitTrace_ELBO(ignore_jit_warnings=True, **particles(50))
    svi = SVI(conjugate_normal, guide, Adam({"lr": 1e-6}), objective)
    near, far = torch.zeros(5), torch.full((5,), 30.0)
    svi.step(near)
    for y in (near, far):
        expected = Trace_ELBO(**particles(50)).loss(conjugate_normal, guide, y)
        assert abs(svi.step(y) - expected) < 0.1 * expected


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_objective_of_a_fixed_guide_refuses_other_data():
    """It runs no Python, so the guide would not know which data it was trained on."""
    guide = AutoNaMIGuide(conjugate_normal)
    svi = SVI(
        conjugate_normal, guide, Adam({"lr": 1e-3}), infer.JitTrace_ELBO(ignore_jit_warnings=True)
    )
    losses = [svi.step(torch.zeros(5)) for _ in range(3)]
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-4)
    with pytest.raises(
        Exception, match="Expected the data that a compiled objective was compiled at"
    ):
        svi.step(torch.ones(5))


@quiet
@pytest.mark.usefixtures("double")
@EXACT
@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("name", ["collider", "eight_schools", "constrained"])
def test_all_estimate_the_same_bound(name, inverse, exact):
    """E_q[log p - log q] from plain traces; a closed-form KL used wrongly would show here (contract 3, mean field).

    Agreement within 6 standard errors of both means, over 2,000 draws each. Where all is exact, the plain bound is the
    same at every draw, to rounding, but one with a divergence in closed form is not.
    """
    case, guide = CASES[name], AutoNaMIGuide(CASES[name].model, inverse=inverse, exact=exact)
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
    for elbo in ("trace", "mean field", "graph", "enum"):
        objective = ELBOS[elbo](max_plate_nesting=case.nesting, **particles(100))
        bounds = torch.tensor([-objective.loss(case.model, guide, *args) for _ in range(20)])
        error = (bounds.var() / 20 + total.var() / 2000).sqrt()
        assert abs(bounds.mean() - total.mean()) < 6 * error + 1e-9, elbo


def assert_conjugate(guide):
    """A Normal guide is exact here; over seeds, what training ends at varies by at most 0.13 (Renyi)."""
    mean, sd = conjugate_normal_posterior(Y)
    with torch.no_grad(), pyro.plate("outer", 4000, dim=-2):
        draws = guide(Y)["mu"]
    assert abs(draws.mean() - mean) < 0.2
    assert abs(draws.std() - sd) < 0.15


@pytest.mark.parametrize("elbo", ELBOS)
def test_training_reaches_the_conjugate_posterior(elbo):
    guide = learned(conjugate_normal)
    objective = ELBOS[elbo](max_plate_nesting=1, **particles(32))
    svi = SVI(conjugate_normal, guide, ClippedAdam({"lr": 0.1, "lrd": 0.97}), objective)
    for _ in range(80):
        svi.step(Y)
    assert_conjugate(guide)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("objective", [Trace_ELBO, TraceMeanField_ELBO, TraceEnum_ELBO])
def test_elbo_modules_train(objective, local):
    with pyro.settings.context(module_local_params=local):
        guide = learned(conjugate_normal)
        elbo = objective(max_plate_nesting=1, **particles(32))(conjugate_normal, guide)
        elbo(Y)
        names = {name for name, _ in guide.named_parameters()}
        assert {name for name, _ in elbo.named_parameters()} == {f"guide.{name}" for name in names}
        optimizer = torch.optim.Adam(elbo.parameters(), lr=0.1)
        for _ in range(40):
            optimizer.zero_grad()
            elbo(Y).backward()
            optimizer.step()
        assert_conjugate(guide)


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
@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("exact", [True, False])
def test_enumeration_in_the_guide_is_exact(inverse, how, count, exact):
    guide, wet = AutoNaMIGuide(sprinkler, inverse=inverse, exact=exact), torch.tensor(1.0)
    guide(wet)
    scatter(guide)
    objective = TraceEnum_ELBO(
        max_plate_nesting=0, num_particles=count, vectorize_particles=count > 1
    )
    loss = objective.differentiable_loss(sprinkler, config_enumerate(guide, how), wet)
    bound = sprinkler_bound(guide, wet)
    assert torch.allclose(-loss, bound)
    if not exact:
        parameters = list(guide.parameters())
        ours, own = (torch.autograd.grad(value, parameters) for value in (-loss, bound))
        assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(ours, own))


@pytest.mark.parametrize("inverse, options", [("forward", {}), ("reverse", particles(4))])
def test_enumeration_in_the_guide_beside_continuous_sites(inverse, options):
    case = CASES["discrete_locals"]
    guide, args = AutoNaMIGuide(case.model, inverse=inverse), case.arguments()
    objective = TraceEnum_ELBO(max_plate_nesting=1, **options)
    losses = steps(case.model, config_enumerate(guide), *args, count=40, lr=0.1, elbo=objective)
    assert losses[-15:].mean() < losses[:15].mean()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("elbo", ["trace", "graph"])
@pytest.mark.parametrize("inverse", INVERSES)
def test_score_function_gradients_are_unbiased(inverse, elbo):
    """Sampled values must not be written in place inside the networks, which drops the score term (contract 1.7).

    The mean of 30 gradients, of 6,000 draws, lies within 5 of its standard errors of the exact gradient.
    """
    options = {"inverse": inverse, "hidden_features": (), "exact": False}
    guide, wet = amortized(sprinkler, **options), torch.tensor(1.0)
    guide(wet)
    scatter(guide)
    parameters = list(guide.parameters())
    exact = flat(torch.autograd.grad(sprinkler_bound(guide, wet), parameters))
    objective = ELBOS[elbo](max_plate_nesting=0, **particles(200))
    estimates = []
    for _ in range(30):
        guide.zero_grad()
        objective.loss_and_grads(sprinkler, guide, wet)
        estimates.append(-flat(p.grad for p in parameters))
    estimates = torch.stack(estimates)
    error = estimates.std(0) / 30**0.5
    assert (exact.abs() > 0.01).any()
    assert ((estimates.mean(0) - exact).abs() < 5 * error + 1e-8).all()


@pytest.mark.filterwarnings("ignore:Hidden randomness")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("inverse", INVERSES)
def test_enumeration_in_the_model_beside_a_guide_that_sees_through_it(inverse):
    """The loss equals the one with the discrete sites summed out by hand, at the same draws.

    y depends on the weights through the hidden k, and so do the factors.
    """
    guide = AutoNaMIGuide(poutine.block(mixture, hide=["k"]), inverse=inverse)
    y = torch.randn(6)
    guide(y)
    scatter(guide)
    assert set(guide(y)) == {"weights", "locs"}
    assert guide.bayesnet.latent == ("weights", "locs")
    assert {("weights", "y"), ("locs", "y")} <= set(guide.bayesnet.edges)
    pyro.set_rng_seed(3)
    loss = TraceEnum_ELBO(max_plate_nesting=1).loss(mixture, guide, y)
    pyro.set_rng_seed(3)
    run = poutine.trace(guide).get_trace(y)
    weights, locs = run.nodes["weights"]["value"], run.nodes["locs"]["value"]
    expected = (
        dist.Dirichlet(torch.ones(2)).log_prob(weights)
        + dist.Normal(torch.tensor([-1.0, 1.0]), 2.0).log_prob(locs).sum()
        + dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, 1.0))
        .log_prob(y)
        .sum()
        - run.log_prob_sum()
    )
    assert torch.allclose(torch.tensor(-loss), expected)


@pytest.mark.parametrize("objective", [TraceEnum_ELBO, infer.JitTraceEnum_ELBO])
@pytest.mark.filterwarnings("ignore")
def test_training_with_enumeration_in_the_model(objective):
    guide = AutoNaMIGuide(poutine.block(mixture, hide=["k"]))
    y = torch.cat([torch.randn(10) - 3, torch.randn(10) + 3])
    losses = steps(mixture, guide, y, count=50, lr=0.05, elbo=objective(max_plate_nesting=1))
    assert losses[-15:].mean() < losses[:15].mean() - 1


# ---- sessions


def param_sites(guide, *args):
    with poutine.trace(param_only=True) as tracer:
        guide(*args)
    return {
        name: site["value"] for name, site in tracer.trace.nodes.items() if site["type"] == "param"
    }


def test_a_second_guide_of_the_class_trains_too():
    """Plain nn.Parameters would stop here without a word (contract 1.3); the loss may be evaluated before any step."""
    y = torch.tensor(3.0)
    for first in ("evaluate_loss", "step"):
        guide = learned(CHAIN)
        svi = SVI(CHAIN, guide, Adam({"lr": 0.02}), Trace_ELBO())
        assert torch.tensor(getattr(svi, first)(y)).isfinite()
        before = values_of(guide)
        svi.step(y)
        assert not torch.equal(before, values_of(guide))
        sites = param_sites(guide, y).values()
        assert {id(p) for p in guide.parameters()} == {id(value.unconstrained()) for value in sites}


def test_all_parameters_are_param_sites_without_constraint():
    """Constrained ones are never updated by CSIS (contract 1.3)."""
    guide = amortized(CASES["nested"].model, exact=False)
    sites = param_sites(guide, *CASES["nested"].arguments())
    assert {id(value) for value in sites.values()} == {id(value) for value in guide.parameters()}
    assert all(value.is_leaf and value.requires_grad for value in sites.values())
    names = {f"AutoNaMIGuide.{name}" for name, _ in guide.named_pyro_params()}
    assert names == set(sites) == set(pyro.get_param_store().keys())


def test_module_local_params_keep_guides_apart():
    y = torch.tensor(3.0)
    with pyro.settings.context(module_local_params=True):
        guides = [learned(CHAIN) for _ in range(2)]
        guides[1](y)
        steps(CHAIN, guides[0], y, count=10, lr=0.05)
        assert len(pyro.get_param_store()) == 0
        assert not torch.equal(*map(values_of, guides))
        assert (guides[1].network.networks[0].output[:, :-1] == 0).all(), (
            "the other guide is where it started"
        )


def test_mean_field_elbo_warns_of_the_order_only_where_it_differs():
    """Documented: in an inverse order sites cannot come in the model's order; the value is right all the same."""
    for inverse, count in (("reverse", 0), ("forward", 1)):
        guide = learned(CHAIN, inverse=inverse)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps(CHAIN, guide, torch.tensor(1.0), count=1, elbo=TraceMeanField_ELBO())
        assert sum("mean field restriction" in str(entry.message) for entry in caught) == count


def test_particle_gradients_differ():
    """One draw a particle: with num_particles the variance falls."""
    model, args = CASES["eight_schools"].model, CASES["eight_schools"].arguments()
    guide = AutoNaMIGuide(model, exact=False)
    guide(*args)

    def spread(count):
        objective = Trace_ELBO(max_plate_nesting=1, **particles(count))
        return torch.tensor([objective.loss(model, guide, *args) for _ in range(40)]).std()

    assert spread(64) < spread(1) / 3


# ---- modes and quadrature in compiled objectives


def log_rate(y):
    b = pyro.sample("b", dist.Normal(torch.tensor(0.0), 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(b.exp()), obs=y)


def log_odds(y):
    a, b = (pyro.sample(name, dist.Normal(torch.tensor(0.0), 1.0)) for name in "ab")
    with pyro.plate("data", len(y)):
        pyro.sample(
            "y",
            dist.Bernoulli(logits=a + b * torch.linspace(-1.0, 2.0, len(y))),
            obs=y.clamp(max=1),
        )


def groups_of_counts(y):
    t = pyro.sample("t", dist.LogNormal(torch.tensor(-1.0), 0.3))
    with pyro.plate("data", len(y)):
        a = pyro.sample("a", dist.Normal(torch.tensor(0.0), t))
        pyro.sample("y", dist.Poisson(a.exp()), obs=y)


COUNTS = torch.tensor([1.0, 0.0, 3.0, 2.0, 0.0])
COMPILERS = pytest.mark.parametrize(
    "elbo", [infer.JitTrace_ELBO, infer.JitTraceGraph_ELBO, infer.JitTraceMeanField_ELBO]
)
PARTICLES = pytest.mark.parametrize("vectorized", [False, True], ids=["one by one", "at once"])


def in_a_compiled(elbo, model, guide, vectorized, count=3):
    objective = elbo(
        ignore_jit_warnings=True, max_plate_nesting=1, **particles(2) if vectorized else {}
    )
    return steps(model, guide, COUNTS, count=count, lr=0.02, elbo=objective)


@quiet
@COMPILERS
@PARTICLES
def test_a_conditional_about_a_mode_is_a_constant_of_a_compiled_objective(elbo, vectorized):
    """By quadrature every draw gives minus the evidence, compiled or not."""
    guide = AutoNaMIGuide(log_rate)
    losses = in_a_compiled(elbo, log_rate, guide, vectorized)
    assert guide.rules["b"].rule == "quadrature"
    grid = torch.linspace(-6.0, 6.0, 20_001)[:, None].double()
    joint = dist.Normal(0.0, 1.0).log_prob(grid[:, 0]) + dist.Poisson(grid.exp()).log_prob(
        COUNTS
    ).sum(-1)
    evidence = float(joint.logsumexp(0) + (grid[1] - grid[0]).log())
    torch.testing.assert_close(losses, torch.full((3,), -evidence), rtol=0, atol=1e-3)


@quiet
@PARTICLES
def test_a_block_about_a_mode_is_a_constant_and_its_members_depend_on_each_other(vectorized):
    guides = AutoNaMIGuide(log_odds), AutoNaMIGuide(log_odds)
    in_a_compiled(infer.JitTrace_ELBO, log_odds, guides[0], vectorized, count=200)
    steps(log_odds, guides[1], COUNTS)
    assert {note.rule for note in guides[0].rules.values()} == {"newton"}
    with torch.no_grad():
        elbos = [
            -Trace_ELBO(**particles(500), max_plate_nesting=1).loss(log_odds, guide, COUNTS)
            for guide in guides
        ]
    assert elbos[0] == pytest.approx(elbos[1], abs=0.05)


@quiet
@COMPILERS
def test_what_depends_on_draws_is_learned_in_a_compiled_objective_as_a_log_line_says(elbo, caplog):
    guide = AutoNaMIGuide(groups_of_counts)
    in_a_compiled(elbo, groups_of_counts, guide, True)
    assert guide.rules["a"].rule == "learned"
    assert any(
        "'a'" in record.getMessage() and "compiled" in record.getMessage()
        for record in caplog.records
    )


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_objective_refuses_data_that_its_constants_do_not_hold_for():
    guide = AutoNaMIGuide(log_rate)
    svi = SVI(log_rate, guide, Adam({"lr": 0.01}), infer.JitTrace_ELBO(ignore_jit_warnings=True))
    first = svi.step(COUNTS)
    for other in (COUNTS + 1, COUNTS[:3], COUNTS + 1):
        with pytest.raises(
            torch.jit.Error, match="data that a compiled objective was compiled at.*'b'"
        ):
            svi.step(other)
        assert svi.step(COUNTS.clone()) == pytest.approx(first, abs=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_a_guide_that_derives_what_a_trace_cannot_says_so():
    guide = AutoNaMIGuide(groups_of_counts)
    guide(COUNTS)
    svi = SVI(
        groups_of_counts, guide, Adam({"lr": 0.01}), infer.JitTrace_ELBO(ignore_jit_warnings=True)
    )
    with pytest.raises(
        NotImplementedError, match="new guide for a compiled objective; this one.*'a'"
    ):
        svi.step(COUNTS)
