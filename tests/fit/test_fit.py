"""`fit` against posteriors that are known: exact evidences, dense grids, two modes; and what it refuses."""

import math
import re
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import scipy.stats
import torch
from models import eight_schools, eight_schools_data, robust_walk
from pyro.distributions import constraints
from pyro.infer import config_enumerate

from pyro_nami import Interrupted, Posterior, fit
from pyro_nami.annealing.tempering import Start
from pyro_nami.fit import chains, fitting
from pyro_nami.inference.target import Target
from pyro_nami.messages import OneByOne, once, warn
from pyro_nami.program.program import Program

Y, SIGMA = eight_schools_data()


def schools(sigma, y=None):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("schools", len(sigma)):
        pyro.sample("y", dist.Normal(mu, sigma), obs=y)


def fitted(model, *args, **options):
    return fit(model, *args, **{"progress": False, "seed": 0, **options})


def test_eight_schools_is_exact():
    posterior = fitted(eight_schools, Y, SIGMA)
    assert posterior.verdict.kind == "exact" and posterior.verdict.is_trusted
    assert float(posterior.log_evidence) == pytest.approx(-31.3113, abs=1e-3)  # by quadrature
    assert posterior["theta"].shape == (4000, 8)
    assert float(posterior.mean("mu")) == pytest.approx(4.41, abs=0.3)  # of reference draws
    assert float(posterior.std("tau")) == pytest.approx(3.20, abs=0.3)


def robust(y):
    """A location, a scale and degrees of freedom: three numbers without closed forms, and skewed."""
    loc = pyro.sample("loc", dist.Normal(0.0, 5.0))
    scale = pyro.sample("scale", dist.HalfCauchy(2.0))
    freedom = pyro.sample("freedom", dist.Gamma(2.0, 0.1))
    with pyro.plate("rows", y.shape[-1]):
        pyro.sample("y", dist.StudentT(freedom, loc, scale), obs=y)


def test_a_located_posterior_agrees_with_a_dense_grid():
    y = torch.tensor([0.1, 0.4, -0.3, 0.9, 1.1, 0.5, 7.0, 0.2, -0.6, 0.8])
    posterior = fitted(robust, y, draws=8000)
    assert posterior.verdict.kind == "checked"
    axes = [torch.linspace(*ends, 140, dtype=torch.float64) for ends in ((-4, 4), (-5, 3), (-4, 6))]
    loc, scale, freedom = torch.meshgrid(*axes, indexing="ij")
    values = {"loc": loc, "scale": scale.exp(), "freedom": freedom.exp()}
    log_p = (
        dist.Normal(0.0, 5.0).log_prob(loc)
        + dist.HalfCauchy(2.0).log_prob(values["scale"])
        + dist.Gamma(2.0, 0.1).log_prob(values["freedom"])
        + scale
        + freedom
    )
    for each in y.double():
        log_p = log_p + dist.StudentT(values["freedom"], loc, values["scale"]).log_prob(each)
    cell = math.prod(float(axis[1] - axis[0]) for axis in axes)
    evidence = float(log_p.flatten().logsumexp(0)) + math.log(cell)
    weights = log_p.flatten().softmax(0).reshape(log_p.shape)
    assert float(posterior.log_evidence) == pytest.approx(evidence, abs=0.05)
    for name, value in values.items():
        mean = float((weights * value).sum())
        sd = float((weights * (value - mean).square()).sum().sqrt())
        assert float(posterior.mean(name)) == pytest.approx(mean, abs=0.06 * sd), name
        assert float(posterior.std(name)) == pytest.approx(sd, rel=0.1), name


def test_both_modes_are_drawn():
    """The sign of a slope's root is open, by symmetry; three more numbers keep it from a grid."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 30)
    y = 4.0 * x + 0.5 + 0.3 * torch.randn(30)

    def model(y):
        root = pyro.sample("root", dist.Normal(0.0, 3.0))
        shift = pyro.sample("shift", dist.Laplace(0.0, 1.0))
        noise = pyro.sample("noise", dist.HalfCauchy(1.0))
        freedom = pyro.sample("freedom", dist.Gamma(4.0, 0.2))
        with pyro.plate("rows", len(x)):
            loc = root.unsqueeze(-1).square() * x + shift.unsqueeze(-1)
            pyro.sample("y", dist.StudentT(freedom.unsqueeze(-1), loc, noise.unsqueeze(-1)), obs=y)

    posterior = fitted(model, y)
    assert posterior.verdict.is_trusted
    assert 0.45 < float((posterior["root"] > 0).double().mean()) < 0.55
    assert float(posterior["root"].abs().mean()) == pytest.approx(2.0, abs=0.1)


def test_sixteen_modes_are_drawn_alike(caplog):
    """Four slopes whose signs the data do not tell."""
    x = torch.randn(30, 4)
    y = (x * torch.tensor([1.0, 2.0, 0.5, 1.5])).sum(-1) + 0.3 * torch.randn(30)

    def model(y):
        slope = pyro.sample("slope", dist.Normal(torch.zeros(4), 2.0).to_event(1))
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        with pyro.plate("rows", 30):
            loc = (x * slope.unsqueeze(-2).abs()).sum(-1)
            pyro.sample("y", dist.Normal(loc, noise.unsqueeze(-1)), obs=y)

    posterior = fitted(model, y)
    assert posterior.verdict.is_trusted
    signs = (posterior["slope"] > 0).long() @ torch.tensor([8, 4, 2, 1])
    shares = torch.bincount(signs, minlength=16) / 4000
    assert (shares - 1 / 16).abs().max() < 0.03  # four standard errors are 0.015
    assert "several modes" not in caplog.text  # which is said of guides alone


def test_more_modes_than_searches_find_are_told():
    """Thirteen numbers whose signs the data do not tell: 8,192 modes."""
    y = 2.0 + 0.1 * torch.randn(5, 13)

    def model(y):
        number = pyro.sample("number", dist.Normal(torch.zeros(13), 2.0).to_event(1))
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        with pyro.plate("rows", 5):
            loc = number.unsqueeze(-2).abs() + 0.01 * number.unsqueeze(-2).sum(-1, True).tanh()
            scale = noise[..., None, None].expand(loc.shape)
            pyro.sample("y", dist.Normal(loc, scale).to_event(1), obs=y)

    with pytest.warns(UserWarning, match="keep finding further modes"):
        assert not fitted(model, y, draws=1000).verdict.is_trusted


def test_few_draws_and_many_of_a_model_that_is_written_for_one():
    def model(y):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        for i in range(len(y)):
            pyro.sample(f"y{i}", dist.Poisson(rate if float(rate) > 0 else rate + 1.0), obs=y[i])

    y = torch.tensor([2.0, 3.0, 1.0])
    posterior = fitted(model, y, draws=200)
    assert posterior["rate"].shape == (200,)
    assert float(posterior.mean("rate")) == pytest.approx(8 / 4, abs=0.3)  # Gamma(2 + 6, 1 + 3)


def test_double_precision_follows_the_model():
    assert fitted(eight_schools, Y.double(), SIGMA.double(), draws=100)["mu"].dtype is torch.float64


def test_a_seed_gives_the_same_draws_and_leaves_others_alone():
    pyro.set_rng_seed(7)
    expected = torch.rand(3)
    pyro.set_rng_seed(7)
    first, second = (fitted(eight_schools, Y, SIGMA, draws=50, seed=3) for _ in range(2))
    assert torch.equal(first["mu"], second["mu"])
    assert torch.equal(torch.rand(3), expected)


def test_the_parameter_store_stays_as_it_was():
    pyro.clear_param_store()
    fitted(robust, torch.randn(20), draws=100)
    fitted(robust, torch.randn(12), draws=100)
    assert not list(pyro.get_param_store().keys())


# ---- what is refused, and what is told


def test_a_model_without_data_is_told():
    with pytest.raises(ValueError, match="Expected a model with data.*'mu'"):
        fitted(schools, SIGMA)


def test_a_model_without_latents_is_told():
    def model(y):
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    with pytest.raises(ValueError, match="at least one latent"):
        fitted(model, torch.tensor(1.0))


@pytest.mark.parametrize("seed", range(3))
def test_an_improper_posterior_is_told_with_its_latent(seed):
    """Counts of zero leave the log rate without an end."""

    def model(y):
        rate = pyro.sample("rate", dist.ImproperUniform(constraints.real, (), ()))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Poisson(rate.exp()), obs=y)

    with pytest.raises(ValueError, match="improper.*'rate'|'rate'.*improper"):
        fitted(model, torch.zeros(5), seed=seed)


@pytest.mark.filterwarnings("ignore:The posterior is not to be trusted")
@pytest.mark.parametrize("seed", range(2))
def test_a_slope_that_a_line_separates_is_improper_or_not_trusted(monkeypatch, seed):
    for name in ("TRAINING", "CHAINS"):  # what takes longest makes no improper posterior proper
        monkeypatch.setattr(fitting, name, 1.0)
    flat = dist.ImproperUniform(constraints.real, (), ())

    def model(x, y):
        a, b = pyro.sample("a", flat), pyro.sample("b", flat)
        with pyro.plate("rows", len(y)):
            logits = a.unsqueeze(-1) + b.unsqueeze(-1) * x
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    x = torch.linspace(-1, 1, 20)
    try:
        verdict = fitted(model, x, (x > 0).float(), seed=seed).verdict
    except ValueError as error:
        assert "improper" in str(error) and "'b'" in str(error)
    else:
        assert not verdict.is_trusted


def test_a_density_that_is_nowhere_finite_names_its_site():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean * math.nan, 1.0), obs=y)

    with pytest.raises(ValueError, match="'y'|loc"):
        fitted(model, torch.tensor(1.0))


def test_parameters_of_the_model_are_told():
    def model(y):
        shift = pyro.param("shift", torch.tensor(1.0))
        mean = pyro.sample("mean", dist.Normal(shift, 1.0))
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    with pytest.warns(UserWarning, match="parameters of its own.*as they are"):
        posterior = fitted(model, torch.tensor(3.0))
    assert float(posterior.mean("mean")) == pytest.approx(2.0, abs=0.05)
    pyro.clear_param_store()


def test_bad_weights_are_told(monkeypatch):
    """Where nothing may be improved, draws of a bad guide are not to be trusted, and the reason is in the verdict."""
    for name in ("TRAINING", "DRAWING", "CHAINS"):
        monkeypatch.setattr(fitting, name, 0.0)
    monkeypatch.setattr(fitting._Fitting, "_run_chains", lambda self: None)
    monkeypatch.setattr(fitting._Fitting, "_trained", lambda self: self.found)

    def model(y):
        z = pyro.sample("z", dist.Bernoulli(0.5 * torch.ones(30)).to_event(1))
        pyro.sample("y", dist.Normal((z * torch.arange(1.0, 31.0).sqrt()).sum(-1), 0.01), obs=y)

    with pytest.warns(UserWarning, match="not to be trusted, because"):
        posterior = fitted(model, torch.tensor(60.0))
    assert not posterior.verdict.is_trusted and "heavy tail" in posterior.verdict


@pytest.mark.parametrize("stage, has_found", [("_check", False), ("_draw_more", True)])
def test_what_was_found_before_an_interrupt_is_in_the_error(monkeypatch, stage, has_found):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(fitting._Fitting, stage, interrupt)
    with pytest.raises(Interrupted) as caught:
        fitted(eight_schools, Y, SIGMA, draws=100)
    partial = caught.value.partial
    assert isinstance(partial, Posterior) if has_found else partial is None
    assert partial is None or not partial.verdict.is_trusted


def test_chains_mend_a_guide_that_is_off(monkeypatch):
    """Draws that are shifted by a deviation, with the weights that belong to them forgotten."""
    y = torch.randn(12) + 1.0
    posterior = fitted(robust, y, draws=2000)
    search = fitting._Fitting(posterior.target.program, 2000, fitting.tqdm(disable=True))
    search.guide = posterior.guide
    shifted = {**posterior.draws, "loc": posterior["loc"] + posterior.std("loc")}
    weights = torch.zeros(2000)
    search.found = Posterior(shifted, weights, posterior.plates, None, posterior.target)
    search._run_chains()
    assert search.found.verdict.kind == "checked" and "R-hat" in str(search.found.verdict)
    off = (search.found.mean("loc") - posterior.mean("loc")) / posterior.std("loc")
    assert abs(float(off)) < 0.15


def test_a_long_loop_takes_few_runs():
    """An autoregression of 150 steps, against the evidence of the same regression by dense algebra."""
    pyro.set_rng_seed(1)
    y = [0.0]
    for _ in range(150):
        y.append(float(dist.Normal(0.5 + 0.7 * y[-1], 1.0).sample()))
    runs = []

    def model():
        runs.append(1)
        start, slope = (pyro.sample(name, dist.Normal(0.0, 2.0)) for name in ("start", "slope"))
        for i, (before, now) in enumerate(zip(y, y[1:])):
            pyro.sample(f"y_{i}", dist.Normal(start + slope * before, 1.0), obs=torch.tensor(now))

    posterior = fitted(model)
    assert len(runs) < 120 and posterior.verdict.is_trusted
    assert "no form is tried" in posterior.guide.rules["slope"].reason
    design = torch.stack([torch.ones(150), torch.tensor(y[:-1])], -1).double()
    covariance = 4.0 * design @ design.mT + torch.eye(150)
    evidence = dist.MultivariateNormal(torch.zeros(150).double(), covariance)
    expected = evidence.log_prob(torch.tensor(y[1:]).double())
    assert float(posterior.log_evidence) == pytest.approx(float(expected), abs=0.01)


def by_a_filter(y):
    """The posterior of `robust_walk` by a filter over 400 values of the state, at 40 values of each scale.

    Returns:
        The log evidence in nats, and mean and deviation of step, noise and the last state.
    """
    places = torch.linspace(-4.0, 4.0, 400, dtype=torch.float64)
    scales = torch.linspace(0.01, 1.6, 40, dtype=torch.float64)
    turns = dist.Normal(places, scales[:, None, None]).log_prob(places[:, None]).softmax(1)
    likelihoods = [dist.StudentT(4.0, places, scales[:, None]).log_prob(v).exp() for v in y]
    state = dist.Normal(0.0, scales[:, None]).log_prob(places).exp()[:, None] * likelihoods[0]
    prior = dist.HalfNormal(0.5).log_prob(scales)
    height = prior[:, None] + prior + (places[1] - places[0]).log()
    height = height + 2 * (scales[1] - scales[0]).log()
    for likelihood in likelihoods[1:]:
        state = torch.einsum("sij,srj->sri", turns, state) * likelihood
    total = state.sum(-1)
    height = height + total.log()
    weights = height.flatten().softmax(0).reshape(height.shape)
    numbers = [
        (scales[:, None].expand(height.shape), weights),
        (scales.expand(height.shape), weights),
        (places.expand(state.shape), weights[..., None] * state / total[..., None]),
    ]
    means = [float((x * w).sum()) for x, w in numbers]
    variances = [float(((x - m).square() * w).sum()) for m, (x, w) in zip(means, numbers)]
    return height.logsumexp((0, 1)), [(m, v**0.5) for m, v in zip(means, variances)]


def test_a_robust_loop_against_a_filter_on_a_grid():
    """Student's t, whose log density is not concave, has one mode here: the loop is held as one."""
    torch.manual_seed(3)
    y = (0.3 * torch.randn(30)).cumsum(0) + 0.3 * dist.StudentT(4.0).sample((30,))
    posterior = fitted(robust_walk, y)
    assert posterior.verdict.is_trusted
    assert posterior.guide.rules["z[time]"].rule == "newton"
    evidence, expected = by_a_filter(y.double())
    assert float(posterior.log_evidence) == pytest.approx(float(evidence), abs=0.05)
    for name, (mean, deviation) in zip(("step", "noise", "z_29"), expected):
        assert float(posterior[name].mean()) == pytest.approx(mean, abs=0.1 * deviation)
        assert float(posterior[name].std()) == pytest.approx(deviation, rel=0.1)


def robust_schools(y, sigma):
    """Effects with heavy tails under a scale: a funnel, which no Normal vector is near."""
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(sigma)):
        theta = pyro.sample("theta", dist.StudentT(4.0, mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def test_chains_draw_a_funnel():
    """Means by chains, against a grid of mean and scale on which each effect is integrated out."""
    posterior = fitted(robust_schools, Y, SIGMA)
    assert posterior.verdict.kind == "checked" and "R-hat" in posterior.verdict
    mu = torch.linspace(-15.0, 25.0, 60, dtype=torch.float64)[:, None]
    log_tau = torch.linspace(-6.0, 5.0, 60, dtype=torch.float64)
    tau = log_tau.exp()
    heights = dist.Normal(0.0, 5.0).log_prob(mu) + dist.HalfCauchy(5.0).log_prob(tau) + log_tau
    # quantiles of the effects' priors, at which likelihoods are averaged
    quantiles = torch.linspace(0.0, 1.0, 2002, dtype=torch.float64)[1:-1].numpy()
    units = torch.tensor(scipy.stats.t(4.0).ppf(quantiles))
    for y, sigma in zip(Y.double(), SIGMA.double()):
        theta = mu[..., None] + tau[:, None] * units
        heights = heights + dist.Normal(theta, sigma).log_prob(y).logsumexp(-1)
    weights = (heights - heights.logsumexp((0, 1))).exp()
    for name, value in {"mu": mu, "tau": tau}.items():
        mean = (weights * value).sum()
        sd = (weights * (value - mean).square()).sum().sqrt()
        assert abs(float(posterior.mean(name) - mean)) < 0.15 * float(sd)
        assert float(posterior.std(name) / sd) == pytest.approx(1.0, abs=0.15)


def captured(y, num):
    """Animals seen on some of a number of days, of which many were there and not seen; their odds differ."""
    share = pyro.sample("share", dist.Uniform(0.0, 1.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.5))
    with pyro.plate("animals", len(y)):
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        seen = dist.Binomial(num, logits=spread * effect).log_prob(y) + share.log()
        there = torch.where(y > 0, seen, torch.logaddexp(seen, (-share).log1p()))
        pyro.factor("y", there)


def test_effects_whose_density_is_bent_are_integrated_out_on_grids():
    """The evidence and means, against a dense grid of share and spread on which each effect is integrated out."""
    y = torch.tensor([0.0] * 25 + [1.0] * 5 + [2.0] * 4 + [3.0] * 3 + [4.0] * 2)
    posterior = fitted(captured, y, 5)
    rules = {name: note.rule for name, note in posterior.guide.rules.items()}
    assert rules["effect"] == "quadrature" and posterior.verdict.is_trusted
    share = torch.linspace(0.0, 1.0, 102, dtype=torch.float64)[1:-1, None]
    spread = torch.linspace(0.0, 8.0, 101, dtype=torch.float64)[1:]
    units, heights = dist.Normal(0.0, 1.0).icdf(torch.linspace(0, 1, 1002).double()[1:-1]), 0.0
    for count in range(5):
        seen = dist.Binomial(5, logits=spread[:, None] * units).log_prob(torch.tensor(count * 1.0))
        seen = seen.logsumexp(-1) - math.log(len(units)) + share.log()
        each = seen if count else torch.logaddexp(seen, (-share).log1p().expand_as(seen))
        heights = heights + int((y == count).sum()) * each
    heights = heights + dist.HalfNormal(1.5).log_prob(spread)
    evidence = heights.logsumexp((0, 1)) + math.log(0.08 / 101)
    assert float(posterior.log_evidence - evidence) == pytest.approx(0.0, abs=0.05)
    weights = (heights - heights.logsumexp((0, 1))).exp()
    for name, value in {"share": share, "spread": spread}.items():
        mean = (weights * value).sum()
        sd = (weights * (value - mean).square()).sum().sqrt()
        assert abs(float(posterior.mean(name) - mean)) < 0.1 * float(sd)


@pytest.mark.parametrize("noise, chosen", [(None, {"z"}), (0.01, set())])
def test_chains_take_the_coordinates_in_which_draws_are_more_normal(noise, chosen):
    """Effects that only a scale tells are in its units; effects that data tell are as the model has them."""

    def model(y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("rows", 4):
            z = pyro.sample("z", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Normal(z, noise or 100.0), obs=y)

    pyro.set_rng_seed(0)
    scale = dist.LogNormal(0.0, 1.0).sample((500,))
    z = scale[:, None] * torch.randn(500, 4)
    if noise:
        z = torch.tensor([1.0, -1.0, 0.5, 2.0]) + noise * torch.randn(500, 4)
    drawn = {"scale": scale, "z": z}
    target = Target(Program(model, (torch.zeros(4),), {}), None)
    few = {name: value[:4] for name, value in drawn.items()}
    start = Start.of(target, {}, few).checked(4, slice(0, 1))
    run = chains.Chains(replace(start, given=drawn), 16, 100, lambda: None)
    run.run()
    assert run.standardized == chosen


def correlated(y):
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(2)).to_event(1))
    corr = pyro.sample("corr", dist.LKJCholesky(2, 2.0))
    with pyro.plate("rows", 3):
        root = scale[..., None, :, None] * corr[..., None, :, :]
        z = pyro.sample("z", dist.MultivariateNormal(torch.tensor([1.0, -1.0]), scale_tril=root))
        pyro.sample("y", dist.Normal(z[..., 0], 5.0), obs=y)


def test_a_density_is_the_same_in_units_of_priors():
    """Of correlated vectors, whose coordinates are theirs divided by a root of the prior's covariance."""
    pyro.set_rng_seed(0)
    given = {
        "scale": torch.rand(40, 2) + 0.1,
        "corr": dist.LKJCholesky(2, 2.0).sample((40,)),
        "z": torch.randn(40, 3, 2),
    }
    target = Target(Program(correlated, (torch.zeros(3),), {}), None)
    few = {name: value[:4] for name, value in given.items()}
    start = replace(Start.of(target, {}, few).checked(4, slice(0, 1)), given=given)
    assert start.scaled == ["z"]
    plain, place = start.path(40, slice(0, 1))
    path, position = start.path(40, slice(0, 1), frozenset(["z"]))
    torch.testing.assert_close(path.at(position).values["z"][:, 0], given["z"], atol=1e-5, rtol=0)
    volume = (given["scale"].log().sum(-1) + given["corr"][:, 1, 1].log())[:, None] * 3
    off = path.value(position).at(1.0) - plain.value(place).at(1.0)
    torch.testing.assert_close(off, volume, atol=1e-3, rtol=0)
    root = given["scale"][..., None] * given["corr"]
    units = torch.linalg.solve(root[:, None], (given["z"] - torch.tensor([1.0, -1.0]))[..., None])
    torch.testing.assert_close(position[:, 0, -6:], units.flatten(1), atol=1e-3, rtol=1e-3)


def test_what_a_model_marks_for_enumeration_is_drawn():
    """An occupied site is seen or not: given y = 0 the odds of z = 1 are those of five misses."""

    @config_enumerate
    def occupancy(y):
        with pyro.plate("sites", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.4))
            pyro.sample("y", dist.Binomial(5, 0.2 * z), obs=y)

    posterior = fitted(occupancy, torch.tensor([0.0, 2.0]))
    missed = 0.4 * 0.8**5
    expected = torch.tensor([missed / (missed + 0.6), 1.0])
    assert posterior.verdict.kind == "exact"
    torch.testing.assert_close(posterior.mean("z"), expected, rtol=0, atol=0.02)


def test_a_warning_of_a_category_comes_up_once_in_a_call():
    for _ in range(2):
        with pytest.warns(UserWarning) as caught, once():
            warn("the first stage runs draw by draw", OneByOne)
            warn("and the second one", OneByOne)
            warn("something else")
        assert [each.category for each in caught] == [OneByOne, UserWarning]


@pytest.mark.slow
def test_an_unknown_start_of_the_data_ends_in_a_verdict(monkeypatch):
    """Waiting times from an unknown start on: most draws are outside of the support of the data."""

    def waits(y):
        start, rate = (
            pyro.sample("start", dist.Normal(0.0, 1.0)),
            pyro.sample("rate", dist.Gamma(2.0, 2.0)),
        )
        shift = dist.transforms.AffineTransform(start, 1.0)
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.TransformedDistribution(dist.Exponential(rate), shift), obs=y)

    monkeypatch.setattr(fitting, "CHAINS", 0.1)
    monkeypatch.setattr(fitting, "TRAINING", 0.5)
    posterior = fitted(waits, torch.tensor([1.0, 5.0, 2.5]))
    assert posterior.verdict.is_trusted or "because" in posterior.verdict


@pytest.mark.parametrize(
    "model, args, words",
    [
        (schools, (SIGMA, Y), "all conditionals are in closed form"),
        (eight_schools, (Y, SIGMA), r"in closed form, or by quadrature \('tau'\)"),
    ],
)
def test_a_verdict_tells_closed_forms_from_grids(model, args, words):
    verdict = fitted(model, *args, draws=1000).verdict
    assert re.match(f"exact: .*{words}, and log weights agree to .* nats", verdict)


def test_a_verdict_on_discrete_latents_tells_no_error_of_their_sds():
    def two(y):
        z = pyro.sample("z", dist.Categorical(torch.ones(3) / 3))
        pyro.sample("y", dist.Normal(1.0 * z, 1.0), obs=y)

    assert "sds" not in fitted(two, torch.tensor(1.0)).verdict


def test_modes_that_cannot_be_searched_for_are_told(monkeypatch):
    """A mixture whose components may change places, by a model that takes no further batch dims."""

    def mixture(y):
        with pyro.plate("components", 2):
            loc = pyro.sample("loc", dist.Normal(0.0, 5.0))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(2) / 2))
            own = loc[z] if loc.dim() == 1 else loc.gather(-1, z)
            pyro.sample("y", dist.Normal(own, 1.0), obs=y)

    monkeypatch.setattr(fitting, "CHAINS", 0.1)
    monkeypatch.setattr(fitting, "TRAINING", 0.1)
    with pytest.warns(UserWarning, match="No further modes of 'loc' were looked for"):
        fitted(mixture, torch.tensor([-3.0, -2.5, 3.0, 4.0]), draws=1000)
