"""Importance sampling, compilation, wake-sleep and prediction: what uses a guide beside the ELBOs."""

from __future__ import annotations

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import (
    CASES,
    CHAIN,
    COLLIDER,
    beta_bernoulli,
    beta_bernoulli_evidence,
    conjugate_normal,
    conjugate_normal_evidence,
    conjugate_normal_posterior,
    learned,
    local_normals,
    pair,
    partly_observed,
    regression,
    scatter,
    steps,
)
from pyro import poutine
from pyro.infer import (
    CSIS,
    SVI,
    EmpiricalMarginal,
    Importance,
    MHResampler,
    Predictive,
    ReweightedWakeSleep,
    WeighedPredictive,
)
from pyro.infer.importance import psis_diagnostic, vectorized_importance_weights
from pyro.optim import Adam, ClippedAdam

from pyro_nami import AutoNaMIGuide

pytestmark = pytest.mark.filterwarnings("error")
DIRECTIONS = pytest.mark.parametrize("inverse", ["forward", "reverse"])
EXACT = pytest.mark.parametrize("exact", [True, False], ids=["exact", "networks"])


# ---- importance sampling


def standard_error(log_weights):
    """Returns the standard error of the log of a mean of weights."""
    weights = (log_weights - log_weights.max()).exp()
    return (weights.std() / weights.mean() / len(weights) ** 0.5).item()


# the latents of the first two are one, so both directions are one guide
EVIDENCES = {
    "conjugate normal": (
        conjugate_normal,
        torch.tensor([1.0, 2.0, 0.5]),
        conjugate_normal_evidence,
        1,
    ),
    "beta-Bernoulli": (
        beta_bernoulli,
        torch.tensor([1.0, 1.0, 0.0, 1.0]),
        beta_bernoulli_evidence,
        1,
    ),
    "chain": (CHAIN, torch.tensor(1.0), lambda y: CHAIN.log_evidence(y.item()), 0),
    "collider": (COLLIDER, torch.tensor(1.0), lambda y: COLLIDER.log_evidence(y.item()), 0),
}
Y = EVIDENCES["conjugate normal"][1]


def reaches(log_weights, evidence):
    """Whether weights average to the evidence, within 5 standard errors; or are it, of an exact guide."""
    log_weights = log_weights.detach()
    estimate = (log_weights.logsumexp(0) - math.log(len(log_weights))).item()
    return abs(estimate - evidence) < 5 * standard_error(log_weights) + 1e-5


@pytest.mark.parametrize(
    "name, inverse",
    [(name, "auto") for name in list(EVIDENCES)[:2]]
    + [(name, inverse) for name in list(EVIDENCES)[2:] for inverse in ("forward", "reverse")],
)
@EXACT
def test_importance_weights_average_to_the_evidence(name, inverse, exact):
    """Observed sites in the guide's trace would take the likelihood out (contract 1.2)."""
    model, y, evidence, nesting = EVIDENCES[name]
    guide = AutoNaMIGuide(model, inverse=inverse, init_scale=1.0, exact=exact)
    guide(y)
    log_weights, *_ = vectorized_importance_weights(
        model, guide, y, num_samples=4000, max_plate_nesting=nesting, normalized=False
    )
    assert reaches(log_weights, evidence(y))
    if guide.num_parameters == 0:
        assert exact and (log_weights - evidence(y)).abs().max() < 1e-4


@EXACT
@pytest.mark.parametrize("name", ["beta-Bernoulli", "collider"])
def test_importance_runs_trace_by_trace(name, exact):
    model, y, evidence, _ = EVIDENCES[name]
    posterior = Importance(
        model, AutoNaMIGuide(model, init_scale=1.0, exact=exact), num_samples=300
    ).run(y)
    log_weights = torch.stack([torch.as_tensor(w) for w in posterior.log_weights])
    assert reaches(log_weights, evidence(y))
    assert math.isclose(
        posterior.get_log_normalizer(), log_weights.logsumexp(0) - math.log(300), abs_tol=1e-4
    )
    assert 10 < posterior.get_ESS() <= 300.001


def test_an_exact_guide_has_equal_weights():
    """Set by hand: ESS = N, and every weight is the evidence."""
    mean, sd = conjugate_normal_posterior(Y)
    guide = AutoNaMIGuide(
        conjugate_normal, anchor=False, init_scale=sd, init_loc_fn=lambda site: torch.tensor(mean)
    )
    posterior = Importance(conjugate_normal, guide, num_samples=20).run(Y)
    assert abs(posterior.get_ESS() - 20) < 0.01
    assert abs(posterior.get_log_normalizer() - conjugate_normal_evidence(Y)) < 1e-4


@pytest.mark.filterwarnings("ignore:.*nonempty")
@pytest.mark.parametrize(
    "name, inverse",
    [
        ("eight_schools", "forward"),
        ("nested", "reverse"),
        ("discrete_locals", "forward"),
        ("support_parents", "reverse"),
        ("barren", "forward"),
    ],
)
@EXACT
def test_vectorized_weights_run_with_the_first_call_inside_their_plate(name, inverse, exact):
    case = CASES[name]
    guide, args = AutoNaMIGuide(case.model, inverse=inverse, exact=exact), case.arguments()
    log_weights, model_trace, guide_trace = vectorized_importance_weights(
        case.model, guide, *args, num_samples=30, max_plate_nesting=case.nesting, normalized=False
    )
    assert log_weights.shape == (30,) and log_weights.isnan().sum() == 0
    if guide.num_parameters:
        assert len(log_weights.unique()) == 30
    else:
        assert exact and log_weights.std() < 1e-4
    assert set(case.shapes) <= set(model_trace.nodes) & set(guide_trace.nodes)


@pytest.mark.parametrize("scale, good", [(0.8, True), (0.02, False)])
def test_psis_diagnostic(scale, good):
    guide = learned(conjugate_normal, init_scale=scale)
    shape = psis_diagnostic(conjugate_normal, guide, Y, num_particles=2000, max_plate_nesting=1)
    assert (shape < 0.7) == good


def test_mh_resampler():
    guide = learned(conjugate_normal, init_scale=0.7, init_loc_fn=lambda site: torch.tensor(0.8))
    guide(Y)
    samples = MHResampler(
        WeighedPredictive(conjugate_normal, guide=guide, num_samples=500, parallel=True)
    )
    for _ in range(5):
        result = samples(Y)
    assert result.samples["mu"].numel() == 500
    assert abs(result.samples["mu"].mean() - conjugate_normal_posterior(Y)[0]) < 0.2


# ---- compilation


def with_observations(observations=None):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    given = observations or {"y1": 0.0, "y2": 0.0}  # Python numbers, as in Pyro's tutorial
    for i in (1, 2):
        pyro.sample(f"y{i}", dist.Normal(mu, 1.0), obs=torch.as_tensor(given[f"y{i}"]))


def with_optional(x, y=None):
    regression(x, y if y is not None else torch.zeros(len(x)))


def with_extras(y):
    """Deterministic and factor sites reach `observations` as well; conditioning on them would leak latents."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    twice = pyro.deterministic("twice", 2 * a)
    pyro.factor("tilt", -(a**2))
    pyro.sample("y", dist.Normal(twice, 1.0), obs=y)


COMPILED = {
    "observations": (
        with_observations,
        (),
        {"observations": {"y1": torch.ones(()), "y2": torch.zeros(())}},
    ),
    "positional": (conjugate_normal, (torch.ones(4),), {}),
    "optional": (with_optional, (torch.randn(5, 2),), {}),
    "condition": (poutine.condition(CHAIN, {"y": torch.tensor(1.0)}), (), {}),
    "extras": (with_extras, (torch.tensor(1.0),), {}),
    **{
        name: (CASES[name].model, CASES[name].arguments(), {})
        for name in ("eight_schools", "nested", "coupled_instances", "discrete_locals", "barren")
    },
}


def compile_steps(model, guide, steps, args, **options):
    csis = CSIS(
        model, guide, Adam({"lr": 0.01}), num_inference_samples=20, training_batch_size=4, **options
    )
    if options:
        csis.set_validation_batch(*args)
    losses = [csis.step(*args) for _ in range(steps)]
    assert torch.tensor(losses).isfinite().all()
    return csis


def parameters_of(guide):
    return torch.cat([value.detach().flatten() for value in guide.parameters()])


@pytest.mark.parametrize("name, inverse", [*zip(COMPILED, ["forward", "reverse"] * len(COMPILED))])
def test_compilation_trains_and_infers(name, inverse):
    model, args, kwargs = COMPILED[name]
    guide = learned(model, inverse=inverse)
    csis = compile_steps(model, guide, 2, args, validation_batch_size=3)
    before = parameters_of(guide)
    compile_steps(model, guide, 2, args)
    assert not torch.equal(parameters_of(guide), before)
    validation = csis.validation_loss(*args)
    assert math.isfinite(validation) and validation == csis.validation_loss(*args)
    posterior = csis.run(*args, **kwargs)
    assert EmpiricalMarginal(posterior, guide.bayesnet.latent[0]).mean.isfinite().all()
    assert torch.isfinite(torch.as_tensor(posterior.get_log_normalizer()))


def test_compilation_reads_the_simulated_observations():
    """The loss is -log q of the simulated latents given the simulated data, not given the data of the call."""
    model, args, kwargs = COMPILED["positional"]
    guide = learned(model)
    csis = compile_steps(model, guide, 1, args, validation_batch_size=5)
    scatter(guide)
    losses = []
    for trace in csis.validation_batch:
        values = {name: trace.nodes[name]["value"] for name in ("mu", "y")}
        losses.append(-guide.log_prob({"mu": values["mu"]}, *args, observations={"y": values["y"]}))
    assert math.isclose(
        csis.validation_loss(*args), torch.stack(losses).mean().item(), rel_tol=1e-5
    )


@EXACT
def test_compilation_does_not_read_deterministic_and_factor_sites(exact):
    model, args, _ = COMPILED["extras"]
    guide = AutoNaMIGuide(model, exact=exact)
    compile_steps(model, guide, 1, args)
    scatter(guide)
    values, extras = {"a": torch.tensor(0.3)}, {"twice": torch.tensor(7.0), "tilt": torch.empty(0)}
    told = guide.log_prob(values, *args, observations={"y": args[0], **extras})
    assert torch.equal(guide.log_prob(values, *args), told)


@EXACT
@DIRECTIONS
def test_compilation_with_partly_observed_sites(inverse, exact):
    """`observations` then holds the merged site `n`, the unobserved part included; it must not leak (contract 3)."""
    args = torch.randn(4), torch.tensor([True, True, False, True])
    guide = AutoNaMIGuide(partly_observed, inverse=inverse, exact=exact)
    compile_steps(partly_observed, guide, 3, args)
    values = {"mu": torch.tensor(0.3), "n_unobserved": torch.randn(4)}
    one, other = (
        guide.log_prob(values, *args, observations={"n_observed": args[0], "n": merged})
        for merged in (args[0], args[0] + 1)
    )
    assert one == other


@EXACT
@DIRECTIONS
def test_compilation_with_minibatches(inverse, exact):
    """The model's instances are replayed into the guide's plate of the same name, and its scale applies."""
    y = torch.arange(9.0)
    guide = AutoNaMIGuide(local_normals, inverse=inverse, exact=exact)
    compile_steps(local_normals, guide, 3, (y, 3))
    model_run = poutine.trace(poutine.uncondition(local_normals)).get_trace(y, 3)
    observations = {"y": model_run.nodes["y"]["value"]}
    run = poutine.trace(poutine.replay(guide, model_run)).get_trace(y, 3, observations=observations)
    assert run.nodes["z"]["value"] is model_run.nodes["z"]["value"] and run.nodes["z"]["scale"] == 3


@EXACT
def test_compilation_with_data_of_varying_size(exact):
    """As many data as the model pleases, another number in every trace."""

    def model(observations=None):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        count = int(torch.randint(2, 9, ())) if observations is None else len(observations["y"])
        with pyro.plate("data", count):
            obs = torch.zeros(count) if observations is None else observations["y"]
            pyro.sample("y", dist.Normal(mu, 1.0), obs=obs)

    guide = AutoNaMIGuide(model, exact=exact)
    guide(observations={"y": torch.zeros(4)})
    csis = compile_steps(model, guide, 3, ())
    assert EmpiricalMarginal(csis.run(observations={"y": torch.randn(7)}), "mu").mean.isfinite()


def test_observations_do_not_reach_a_model_that_does_not_take_them():
    seen = []

    def model(y, observations=None):
        seen.append(observations)
        CHAIN(y)

    y = torch.tensor(1.0)
    for one in (CHAIN, model):
        AutoNaMIGuide(one)(y, observations={"y": torch.tensor(5.0)})
    assert seen[-1] == {"y": torch.tensor(5.0)}


def test_compilation_learns_the_posterior_for_all_data():
    """After 120 steps mean and sd are right at data never trained on; the posterior's sd is 0.67."""
    model, *_ = COMPILED["observations"]
    guide = learned(model, hidden_features=(), init_scale=1.0)
    csis = CSIS(model, guide, ClippedAdam({"lr": 0.06, "lrd": 0.98}), training_batch_size=10)
    for _ in range(120):
        csis.step()
    for y1, y2 in ((2.0, 1.0), (-1.5, 0.5)):
        given = {"y1": torch.tensor(y1), "y2": torch.tensor(y2)}
        with torch.no_grad(), pyro.plate("outer", 2000, dim=-1):
            draws = guide(observations=given)["mu"]
        assert abs(draws.mean() - (y1 + y2) / 2.25) < 0.3
        assert abs(draws.std() - 2.25**-0.5) < 0.3  # 0.23 at seed 10


# ---- wake-sleep


SLEEPERS = [
    "observations",
    "condition",
    "positional",
    "eight_schools",
    "discrete_locals",
    "coupled_instances",
]


@pytest.mark.filterwarnings("ignore:.*model_has_params")
@pytest.mark.parametrize(
    "name, insomnia, vectorized, inverse",
    [
        (name, insomnia, (i + j) % 2 == 0, ("forward", "reverse")[(i // 2 + j) % 2])
        for i, name in enumerate(SLEEPERS)
        for j, insomnia in enumerate((1.0, 0.0, 0.5))
    ],
)
def test_reweighted_wake_sleep(name, insomnia, vectorized, inverse):
    """Each pair of values occurs."""
    model, args, kwargs = COMPILED[name]
    nesting = {"observations": 0, "condition": 0}.get(name, 1)
    guide = learned(model, inverse=inverse)
    objective = ReweightedWakeSleep(
        num_particles=4,
        vectorize_particles=vectorized,
        insomnia=insomnia,
        # Pyro passes the second particle's model `observations`
        num_sleep_particles=3 if vectorized else 1,
        max_plate_nesting=nesting,
        model_has_params=False,
    )
    svi = SVI(model, guide, Adam({"lr": 0.01}), objective)
    losses = [svi.step(*args, **kwargs)]
    before = parameters_of(guide)
    losses += [svi.step(*args, **kwargs) for _ in range(2)]
    assert torch.tensor(losses).isfinite().all()
    assert not torch.equal(parameters_of(guide), before)


# ---- prediction


# Pyro's parallel mode misplaces vectors outside a plate, with its guides too
VECTORS = ("constrained", "regression")


@EXACT
@pytest.mark.parametrize("name, inverse", [*zip(CASES, ["forward", "reverse"] * len(CASES))])
def test_predictive_draws_every_latent(name, inverse, exact):
    case = CASES[name]
    guide, args = AutoNaMIGuide(case.model, inverse=inverse, exact=exact), case.arguments()
    guide(*args)
    for parallel in (False,) if name in VECTORS else (False, True):
        draws = Predictive(
            case.model,
            guide=guide,
            num_samples=7,
            parallel=parallel,
            return_sites=list(case.shapes),
        )(*args)
        for key, shape in case.shapes.items():
            assert draws[key].numel() == 7 * math.prod(shape)
            assert draws[key].shape[0] == 7
            assert key in ("c", "k") or len(draws[key].reshape(7, -1).unique(dim=0)) == 7


def line(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(slope * x, s), obs=y)


@EXACT
@DIRECTIONS
def test_predictive_without_data_uses_the_data_last_seen_in_training(inverse, exact):
    """At the same inputs, and at others of another size: global latents still read the training data."""
    x, y, new = torch.randn(6), torch.randn(6), torch.randn(9)
    # whose networks read data
    guide = AutoNaMIGuide(line, inverse=inverse, exact=exact, mode="amortized")
    steps(line, guide, x, y, count=1)
    scatter(guide)
    for parallel in (False, True):
        for inputs in (x, new):
            draws = Predictive(line, guide=guide, num_samples=5, parallel=parallel)(inputs)
            assert (
                draws["y"].reshape(5, -1).shape == (5, len(inputs)) and draws["slope"].numel() == 5
            )
            assert len(draws["y"].reshape(5, -1).unique(dim=0)) == 5
            values = guide(x, y)
            assert torch.allclose(guide.log_prob(values, inputs), guide.log_prob(values, x, y))
    assert not torch.allclose(guide.log_prob(values, x), guide.log_prob(values, x, y + 1))


@EXACT
def test_predictive_without_arguments(exact):
    """As tests/infer/test_predictive.py::test_deterministic calls it: the data are in the model."""
    twice = functools.partial(pyro.deterministic, "twice", event_dim=0)
    model = pair(dist.Normal(0.0, 1.0), lambda z: dist.Normal(twice(2 * z), 1.0), rows=3)
    guide = AutoNaMIGuide(model, exact=exact)
    steps(model, guide, torch.tensor([4.0, 4.0, 4.0]), count=1)
    draws = Predictive(model, guide=guide, num_samples=7)()
    assert draws["y"].shape == (7, 3) and torch.equal(draws["twice"], 2 * draws["z"])


@EXACT
@pytest.mark.parametrize("parallel", [False, True])
def test_weighed_predictive(parallel, exact):
    guide = AutoNaMIGuide(conjugate_normal, init_scale=1.0, exact=exact)
    guide(Y)
    result = WeighedPredictive(conjugate_normal, guide=guide, num_samples=200, parallel=parallel)(Y)
    assert reaches(result.log_weights, conjugate_normal_evidence(Y))
    assert result.get_ESS() > 20


@EXACT
def test_a_predictive_is_scripted_by_sites_only(exact):
    """Every site of the guide's trace becomes a posterior draw, so it must hold no observed or deterministic site."""
    case = CASES["deterministic_and_delta"]
    guide, args = AutoNaMIGuide(case.model, exact=exact), case.arguments()
    guide(*args)
    draws = Predictive(case.model, guide=guide, num_samples=4)(*args)
    assert torch.equal(draws["twice"], 2 * draws["a"]) and torch.equal(
        draws["same"], draws["twice"]
    )
