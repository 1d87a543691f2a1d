"""Latents that come first, found by quadrature with all others integrated out: against dense grids and algebra."""

import copy
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import called
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.optim import Adam

from pyro_nami import AutoNaMIGuide, importance_sample

EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
COUNTS = torch.tensor([5.0, 1.0, 5.0, 14.0, 3.0, 19.0, 1.0, 1.0, 4.0, 22.0])
TIMES = torch.tensor([94.3, 15.7, 62.9, 126.0, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5])


def schools(y, errors):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", errors.shape[-1]):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        return pyro.sample("y", dist.Normal(theta, errors), obs=y)


def pumps(counts):
    a, b = pyro.sample("a", dist.Exponential(1.0)), pyro.sample("b", dist.Gamma(0.1, 1.0))
    with pyro.plate("pumps", 10):
        rate = pyro.sample("rate", dist.Gamma(a, b))
        pyro.sample("counts", dist.Poisson(rate * TIMES), obs=counts)


def regression(x, y):
    w = pyro.sample("w", dist.Normal(x.new_zeros(x.shape[-1]), 1.0).to_event(1))
    sd = pyro.sample("sd", dist.HalfNormal(x.new_ones(())))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal((x * w).sum(-1), sd), obs=y)


def squared(y):
    """The root has two places where it may be."""
    root = pyro.sample("root", dist.Normal(0.0, 3.0))
    z = pyro.sample("z", dist.Normal(root**2, 0.5))
    pyro.sample("y", dist.Normal(z, 0.5), obs=y)


def schools_density(tau, y, errors):
    """log p(tau, y) by algebra, in doubles."""
    y, tau = y.double(), tau.double()
    inner = dist.Normal(torch.zeros_like(y), (errors.double() ** 2 + tau.unsqueeze(-1) ** 2).sqrt())
    weights = inner.variance.reciprocal()
    shared = 1 / 25.0 + weights.sum(-1)  # the mean has the prior N(0, 25)
    gain = (weights * y).sum(-1) ** 2 / shared / 2 - (25.0 * shared).log() / 2
    return inner.log_prob(y).sum(-1) + gain + dist.HalfCauchy(5.0).log_prob(tau)


def pumps_density(a, b):
    a, b = a.double().unsqueeze(-1), b.double().unsqueeze(-1)
    k, t = COUNTS.double(), TIMES.double()
    rows = torch.lgamma(a + k) - torch.lgamma(a) - torch.lgamma(k + 1)
    rows = rows + a * (b / (b + t)).log() + k * (t / (b + t)).log()
    prior = dist.Exponential(1.0).log_prob(a) + dist.Gamma(0.1, 1.0).log_prob(b)
    return rows.sum(-1) + prior.squeeze(-1)


def spread(model, guide, *args, num=2000):
    """Evidence, and standard deviation of the log weights: zero if the guide is the posterior."""
    pyro.set_rng_seed(3)
    found = importance_sample(model, guide, *args, num_samples=num)
    return float(found.log_evidence), float(found.log_weights.double().std())


def test_schools_are_those_of_a_dense_grid():
    guide = called(schools, EFFECTS, ERRORS)
    assert [guide.rules[name].rule for name in ("tau", "mu", "theta")] == [
        "quadrature",
        "exact",
        "exact",
    ]
    u = torch.linspace(-14.0, 9.0, 40001, dtype=torch.float64)
    dense = schools_density(u.exp(), EFFECTS, ERRORS) + u
    evidence = dense.logsumexp(0) + (u[1] - u[0]).log()
    places = torch.tensor([0.03, 0.5, 2.0, 4.0, 8.0, 15.0])
    fn = poutine.trace(guide).get_trace(EFFECTS, ERRORS).nodes["tau"]["fn"]
    exact = schools_density(places, EFFECTS, ERRORS) - evidence
    assert torch.allclose(fn.log_prob(places).double(), exact, atol=5e-3)
    found, sd = spread(schools, guide, EFFECTS, ERRORS)
    assert found == pytest.approx(float(evidence), abs=1e-3) and sd < 5e-3


def test_two_at_once_are_those_of_a_dense_grid():
    guide = called(pumps, COUNTS)
    line = torch.linspace(-8.0, 4.0, 1201, dtype=torch.float64)
    a, b = torch.meshgrid(line.exp(), line.exp(), indexing="ij")
    dense = pumps_density(a, b) + a.log() + b.log()
    evidence = dense.flatten().logsumexp(0) + 2 * (line[1] - line[0]).log()
    found, sd = spread(pumps, guide, COUNTS)
    assert found == pytest.approx(float(evidence), abs=2e-3) and sd < 1e-2
    at = {"a": torch.tensor([0.4, 0.7, 1.5]), "b": torch.tensor([0.5, 0.9, 2.0])}
    trace = poutine.trace(poutine.condition(guide, {"a": at["a"][1], "b": at["b"][1]})).get_trace(
        COUNTS
    )
    log_q = sum(trace.nodes[name]["fn"].log_prob(at[name][1]) for name in at)
    assert float(log_q) == pytest.approx(
        float(pumps_density(at["a"], at["b"])[1] - evidence), abs=5e-3
    )


def test_a_model_that_mixes_up_draws_is_not_run_for_all_of_a_grid():
    """Its runs for many would hold a number for every two of them; it is mapped over draws instead."""
    sizes = []

    def model(y):
        level, step = (
            pyro.sample("level", dist.Normal(100.0, 9.0)),
            pyro.sample("step", dist.LogNormal(0.0, 1.0)),
        )
        noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
        with pyro.plate("steps", len(y)):
            e = pyro.sample("e", dist.Normal(0.0, 1.0))
        walk = level[..., None] + (step[..., None] * e).cumsum(-1)
        sizes.append(walk.numel())
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(walk, noise), obs=y)

    y = 100.0 + torch.randn(8, generator=torch.Generator().manual_seed(0)).cumsum(0)
    guide = called(model, y)
    assert {name: note.rule for name, note in guide.rules.items() if note.rule != "exact"} == {
        "step": "quadrature",
        "noise": "quadrature",
    }
    assert max(sizes) < 10_000
    # What is left given step and noise is Gaussian.
    half, ones = (
        torch.linspace(-4.0, 3.0, 200, dtype=torch.float64),
        torch.ones(8, 8, dtype=torch.float64),
    )
    step, noise = (
        each.exp()[..., None, None] for each in torch.meshgrid(half, half, indexing="ij")
    )
    covariance = (
        81.0 * ones
        + step**2 * ones.tril() @ ones.tril().mT
        + noise**2 * torch.eye(8, dtype=torch.float64)
    )
    joint = dist.MultivariateNormal(100.0 * ones[0], covariance).log_prob(y.double())
    prior = dist.Normal(0.0, 1.0).log_prob(half)
    evidence = (joint + prior[:, None] + prior).flatten().logsumexp(0) + 2 * (
        half[1] - half[0]
    ).log()
    found, error = spread(model, guide, y)
    assert abs(found - float(evidence)) < 0.01
    assert error < 0.05


@pytest.mark.parametrize("rows", [3, 100, 3000])
def test_noise_of_a_regression(rows):
    torch.manual_seed(rows)
    x = torch.randn(rows, 4, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=torch.float64) + 0.3 * torch.randn(
        rows, dtype=torch.float64
    )
    guide = called(regression, x, y)
    assert guide.rules["sd"].rule == "quadrature" and guide.num_parameters == 0
    _, sd = spread(regression, guide, x, y, num=200)
    assert sd < 5e-3


@pytest.mark.parametrize("y", [4.0, 0.5, -3.0])
def test_all_modes_are_found(y):
    data = torch.tensor(y, dtype=torch.float64)
    guide = called(squared, data)
    assert guide.rules["root"].rule == "quadrature"
    _, sd = spread(squared, guide, data)
    assert sd < 5e-2
    with pyro.plate("draws", 1000, dim=-1), torch.no_grad():
        positive = (guide(data)["root"] > 0).double().mean()
    assert abs(positive - 0.5) < 0.07


def told(y, about):
    """As `squared`, where a second observation may tell the two places apart."""
    root = pyro.sample("root", dist.Normal(0.0, 3.0))
    z = pyro.sample("z", dist.Normal(root**2, 0.5))
    pyro.sample("y", dist.Normal(z, 0.5), obs=y)
    pyro.sample("about", dist.Normal(root, 0.3), obs=about)


def narrow(y):
    root = pyro.sample("root", dist.Normal(0.0, 3.0))
    z = pyro.sample("z", dist.Normal(root**2, 0.02))
    pyro.sample("y", dist.Normal(z, 0.02), obs=y)


@pytest.mark.parametrize("y", [4.0, 20.0])
def test_modes_that_one_grid_does_not_hold_are_not_left_out(y):
    assert "modes" in called(narrow, torch.tensor(y, dtype=torch.float64)).rules["root"].reason


def test_modes_that_the_last_data_did_not_have_are_found():
    at = [torch.tensor(value, dtype=torch.float64) for value in (4.0, 2.0, 0.0, 16.0)]
    guide = called(told, at[0], at[1])
    assert guide.rules["root"].rule == "quadrature"
    u = torch.linspace(-12.0, 12.0, 40001, dtype=torch.float64)
    dense = dist.Normal(0.0, 3.0).log_prob(u) + dist.Normal(u**2, 0.5**0.5).log_prob(at[0])
    dense = dense + dist.Normal(u, 0.3).log_prob(at[2])
    found, sd = spread(told, guide, at[0], at[2], num=300)
    assert (
        found == pytest.approx(float(dense.logsumexp(0) + (u[1] - u[0]).log()), abs=5e-3)
        and sd < 5e-3
    )
    guide(at[0], at[1])
    with pytest.raises(ValueError, match="modes .* 'learned'"):
        guide(at[3], at[2])


@pytest.mark.parametrize(("scale", "shift"), [(1e-3, 0.0), (1e3, 0.0), (1.0, 300.0)])
def test_data_far_from_the_prior(scale, shift):
    y = (EFFECTS * scale + shift).double()
    _, sd = spread(
        schools, called(schools, y, ERRORS.double() * scale), y, ERRORS.double() * scale, num=500
    )
    assert sd < 2e-2


def test_an_elbo_is_the_evidence_from_the_first_step_at_any_rate():
    evidence, _ = spread(schools, called(schools, EFFECTS, ERRORS), EFFECTS, ERRORS)
    for rate in (1e-3, 0.3):
        pyro.clear_param_store()
        svi = SVI(schools, AutoNaMIGuide(schools), Adam({"lr": rate}), Trace_ELBO())
        losses = [svi.step(EFFECTS, ERRORS) for _ in range(20)]
        assert max(abs(loss + evidence) for loss in losses) < 0.1


def test_other_data_other_sizes_and_batches_of_data_sets():
    guide = AutoNaMIGuide(schools, observed=["y"])
    data = {"y": EFFECTS}
    guide(None, ERRORS, observations=data)
    for size in (3, 200):
        pyro.set_rng_seed(size)
        errors, y = torch.full((size,), 2.0), 4.0 * torch.randn(size)
        fn = poutine.trace(guide).get_trace(None, errors, observations={"y": y}).nodes["tau"]["fn"]
        u = torch.linspace(-14.0, 9.0, 20001, dtype=torch.float64)
        evidence = (schools_density(u.exp(), y, errors) + u).logsumexp(0) + (u[1] - u[0]).log()
        middle = fn.sample((50,))
        exact = schools_density(middle, y, errors) - evidence
        assert torch.allclose(fn.log_prob(middle).double(), exact, atol=2e-2)
    sets = torch.stack([EFFECTS, -2 * EFFECTS, EFFECTS / 10])
    latents = {
        "mu": torch.ones(3, 1),
        "tau": torch.tensor([[1.0], [5.0], [0.3]]),
        "theta": torch.ones(3, 8),
    }
    together = guide.log_prob(latents, None, ERRORS, observations={"y": sets})
    for i, y in enumerate(sets):
        alone = {
            name: value[i].squeeze(-1) if name != "theta" else value[i]
            for name, value in latents.items()
        }
        alone = guide.log_prob(alone, None, ERRORS, observations={"y": y})
        assert float(together[i]) == pytest.approx(float(alone), abs=1e-2)


def test_data_that_are_far_from_the_last_ones():
    guide = AutoNaMIGuide(schools, observed=["y"])
    for scale in (1.0, 1e-4, 1e4, 1e-2):
        y, errors = EFFECTS.double() * scale, ERRORS.double() * scale
        found = importance_sample(
            schools, guide, None, errors, num_samples=200, observations={"y": y}
        )
        assert float(found.log_weights.double().std()) < 2e-2


def test_data_are_looked_at_once_for_as_long_as_they_are_equal():
    runs = 0

    def counted(y, errors):
        nonlocal runs
        runs += 1
        return schools(y, errors)

    guide = called(counted, EFFECTS, ERRORS)
    counts = []
    other = EFFECTS + 1
    for y in (EFFECTS, EFFECTS, EFFECTS.clone(), other, other):
        runs = 0
        guide(y, ERRORS)
        counts.append(runs)
    # a run to look at a new tensor; one more where the count, which the model reads, is another
    assert counts[3] > counts[4] >= counts[1] and counts[2] <= counts[1] + 2
    written = EFFECTS.clone()
    first = (
        poutine.trace(guide)
        .get_trace(written, ERRORS)
        .nodes["tau"]["fn"]
        .log_prob(torch.tensor(3.0))
    )
    written.mul_(5.0)
    second = (
        poutine.trace(guide)
        .get_trace(written, ERRORS)
        .nodes["tau"]["fn"]
        .log_prob(torch.tensor(3.0))
    )
    assert abs(float(first - second)) > 0.1


def test_what_a_model_reads_beside_its_arguments_may_change():
    errors = ERRORS.clone()

    def model(y):
        return schools(y, errors)

    guide = called(model, EFFECTS)
    for factor in (0.1, 10.0):
        errors.mul_(factor)
        _, sd = spread(model, guide, EFFECTS, num=300)
        assert guide.rules["tau"].rule == "quadrature" and sd < 2e-2


def test_copies_and_predictions_have_the_same_posterior():
    guide = called(schools, EFFECTS, ERRORS)
    pyro.set_rng_seed(0)
    svi = SVI(schools, guide, Adam({"lr": 0.01}), Trace_ELBO())
    svi.step(EFFECTS, ERRORS)
    for each in (guide, copy.deepcopy(guide)):
        pyro.set_rng_seed(0)
        found = Predictive(schools, guide=each, num_samples=300)(None, ERRORS)
        assert found["y"].shape == (300, 8) and 2.0 < float(found["tau"].median()) < 5.5


def with_parameter(y, errors):
    tau, center = pyro.sample("tau", dist.HalfCauchy(5.0)), pyro.param("center", torch.tensor(0.0))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(center, tau))
        pyro.sample("y", dist.Normal(theta, errors), obs=y)


def three(y, errors):
    df = pyro.sample("rate", dist.Gamma(2.0, 2.0))
    with poutine.mask(mask=torch.tensor(True)):
        tau, more = (
            pyro.sample("tau", dist.HalfCauchy(df)),
            pyro.sample("more", dist.HalfCauchy(1.0)),
        )
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(0.0, tau))
        pyro.sample("y", dist.Normal(theta, errors + more), obs=y)


def scaled(y, errors):
    with poutine.scale(scale=0.5):
        schools(y, errors)


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (with_parameter, {}, "parameters"),
        (three, {}, ""),
        (scaled, {}, ""),
        (schools, {"rules": {"tau": "learned"}}, ""),
        (schools, {"exact": False}, ""),
        (schools, {"inverse": "mean_field"}, ""),
        (schools, {"families": {"tau": "normal"}}, ""),
    ],
)
def test_what_is_not_found_by_quadrature_is_learned(model, options, reason):
    pyro.clear_param_store()
    note = called(model, EFFECTS, ERRORS, **options).rules["tau"]
    assert note.rule == "learned" and reason in note.reason


def test_nothing_finite_leaves_the_prior():
    guide = called(schools, EFFECTS, ERRORS)
    with pytest.warns(UserWarning, match="not finite"):
        value = guide(torch.full((8,), math.inf), ERRORS)["tau"]
    assert value.isfinite()


@pytest.mark.filterwarnings("ignore:.*not finite")
def test_a_data_set_that_fits_no_grid_leaves_the_others_theirs():
    y, about = (
        torch.tensor(values, dtype=torch.float64) for values in ([4.0, 16.0, 4.0], [2.0, 0.0, 0.0])
    )
    guide = called(told, y[0], about[0])
    with pytest.raises(ValueError, match="modes .* 'learned'"):
        guide(y[1], about[1])
    latents = {
        "root": torch.tensor([1.9, 3.9, 0.1], dtype=torch.float64),
        "z": torch.zeros(3, dtype=torch.float64),
    }
    found = guide.log_prob(latents, None, None, observations={"y": y, "about": about})
    for i in (0, 2):
        one = {name: value[i] for name, value in latents.items()}
        assert float(found[i]) == pytest.approx(
            float(guide.log_prob(one, y[i], about[i])), abs=1e-2
        )
    assert found.isfinite().all()


def test_a_time_of_change_is_found_on_a_grid_that_is_off():
    """Its density has steps, about which no search for a mode is made; networks find none of its modes."""
    time = torch.arange(60.0)
    y = torch.where(time < 23, 2.0, 5.0) + torch.randn(60)

    def model(y):
        change = pyro.sample("change", dist.Uniform(torch.tensor(0.0), 60.0))
        before, after = (pyro.sample(name, dist.Normal(0.0, 10.0)) for name in ("before", "after"))
        with pyro.plate("rows", 60):
            mean = torch.where(time < change, before, after)
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    guide = AutoNaMIGuide(model)
    guide(y)
    note = guide.rules["change"]
    assert note.rule in ("quadrature", "collapsed") and note.reason
    with torch.no_grad(), pyro.plate("draws", 1000, dim=-2):
        change = guide(y)["change"]
    assert abs(change.mean() - 22.5) < 1.5 and change.std() < 3
