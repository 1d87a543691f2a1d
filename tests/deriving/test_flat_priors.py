"""Flat priors: bounded ones that data do not touch, and improper ones; against dense algebra and reference draws."""

import math
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import ClippedAdam

from pyro_nami import AutoNaMIGuide, fit
from pyro_nami.factors.boxed_normal import BoxedNormal

REFERENCES = Path(__file__).parents[3] / "shared" / "data" / "posteriordb"
DRAWS = 4000


def wide():
    return dist.Uniform(torch.tensor(-1000.0), 1000.0)


def improper():
    return dist.ImproperUniform(constraints.real, (), ())


PRIORS = {"uniform": wide, "improper": improper}
# prior of the noise's scale -> its log density up to a constant
SCALES = {
    "half-Cauchy": (
        lambda: dist.HalfCauchy(torch.tensor(2.5)),
        lambda s: -(1 + (s / 2.5) ** 2).log(),
    ),
    "uniform": (lambda: dist.Uniform(torch.tensor(0.0), 1000.0), torch.zeros_like),
    "very wide": (lambda: dist.Uniform(torch.tensor(0.0), 1e6), torch.zeros_like),
    "improper": (lambda: dist.ImproperUniform(constraints.positive, (), ()), torch.zeros_like),
    "logarithm": (
        lambda: dist.LogNormal(torch.tensor(0.0), 10.0),
        lambda s: -s.log() - (s.log() / 10) ** 2 / 2,
    ),
}


def design(rows, kind="plain"):
    """Three covariates and an intercept, and outcomes with noise of 0.7."""
    x = torch.randn(rows, 3)
    if kind == "collinear":
        x[:, 1] = 0.99 * x[:, 0] + 0.141 * x[:, 1]
    if kind == "thousands":
        x = 500 * x + 3000
    x = torch.cat([torch.ones(rows, 1), x], -1)
    return x, x @ torch.tensor([1.0, 0.5, -0.3, 2.0]) + 0.7 * torch.randn(rows)


def as_vector(x, prior):
    b = pyro.sample("b", prior().expand([x.shape[-1]]).to_event(1))
    return (x * b).sum(-1)


def as_product(x, prior):
    return x @ pyro.sample("b", prior().expand([x.shape[-1]]).to_event(1))


def in_plate(x, prior):
    with pyro.plate("columns", x.shape[-1]):
        b = pyro.sample("b", prior())
    return x @ b


def one_by_one(x, prior):
    return sum(pyro.sample(f"b{i}", prior()) * column for i, column in enumerate(x.unbind(-1)))


STYLES = {"vector": as_vector, "product": as_product, "plate": in_plate, "sites": one_by_one}


def regression(x, prior=wide, style="vector", scale=None):
    def model(y):
        mean = STYLES[style](x, prior)
        noise = 0.7 if scale is None else pyro.sample("s", scale())
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(mean, noise), obs=y)

    return model


def coefficients(values):
    if "b" in values:
        return values["b"].reshape(-1, values["b"].shape[-1])
    names = sorted(name for name in values if name.startswith("b"))
    return torch.stack([values[name].reshape(-1) for name in names], -1)


def drawn(guide, *args, count=DRAWS):
    with torch.no_grad(), pyro.plate("draws", count, dim=-2):
        return {name: value.detach() for name, value in guide(*args).items()}


def least_squares(x, y):
    """Returns the posterior's mean, and its covariance at a noise of 1, in doubles."""
    x, y = x.double(), y.double()
    covariance = (x.mT @ x).inverse()
    return covariance @ x.mT @ y, covariance


def moments(x, y, log_prior):
    """Returns means and sds of coefficients and noise under flat priors on the former, by a fine grid of the latter."""
    mean, covariance = least_squares(x, y)
    left = len(x) - x.shape[-1]
    squares = (y.double() - x.double() @ mean).square().sum()
    log_s = (
        torch.linspace(-9, 25, 40001, dtype=torch.float64) / math.sqrt(left)
        + (squares / left).log() / 2
    )
    s = log_s.exp()
    weights = (-left * log_s - squares / (2 * s * s) + log_prior(s) + log_s).softmax(0)
    square, center = (weights * s * s).sum(), (weights * s).sum()
    means = torch.cat([mean, center[None]])
    return means, torch.cat([square * covariance.diagonal(), (square - center**2)[None]]).sqrt()


def rules(guide):
    return {note.rule for note in guide.rules.values()}


def assert_moments(values, means, sds):
    """Of 4,000 draws means are within 0.06 sds, and sds within 4%: four errors of each."""
    found = torch.cat([coefficients(values), values["s"].reshape(-1, 1)], -1).double()
    assert ((found.mean(0) - means) / sds).abs().max() < 0.065
    assert (found.std(0) / sds - 1).abs().max() < 0.05


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("prior", PRIORS)
def test_a_known_noise_leaves_least_squares(prior, style, double):
    x, y = design(30)
    guide = AutoNaMIGuide(regression(x, PRIORS[prior], style))
    mean, covariance = least_squares(x, y)
    exact = dist.MultivariateNormal(mean, 0.49 * covariance)
    for _ in range(3):
        trace = poutine.trace(guide).get_trace(y)
        values = {
            name: site["value"].detach()
            for name, site in trace.nodes.items()
            if name.startswith("b")
        }
        torch.testing.assert_close(trace.log_prob_sum(), exact.log_prob(coefficients(values)[0]))
    assert rules(guide) == {"exact"}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("prior", PRIORS)
def test_a_scale_of_any_prior_comes_by_quadrature(prior, scale):
    x, y = design(30)
    make, log_prior = SCALES[scale]
    guide = AutoNaMIGuide(regression(x, PRIORS[prior], scale=make))
    assert_moments(drawn(guide, y), *moments(x, y, log_prior))
    assert rules(guide) == {"exact", "quadrature"}


@pytest.mark.parametrize("rows", [20, 5000])
@pytest.mark.parametrize("kind", ["plain", "collinear", "thousands"])
@pytest.mark.parametrize("prior", PRIORS)
def test_designs_of_any_kind_in_single_precision(prior, kind, rows):
    x, y = design(rows, kind)
    make, log_prior = SCALES["uniform"]
    guide = AutoNaMIGuide(regression(x, PRIORS[prior], "product", make))
    assert_moments(drawn(guide, y), *moments(x, y, log_prior))
    assert rules(guide) == {"exact", "quadrature"}


def test_a_log_scale_comes_by_quadrature():
    """Coefficients are the block, not the scale by itself."""
    x, y = design(30)

    def model(y):
        mean = in_plate(x, wide)
        s = pyro.sample("log_s", dist.Uniform(torch.tensor(-30.0), 30.0)).exp()
        with pyro.plate("rows", 30):
            pyro.sample("y", dist.Normal(mean, s), obs=y)

    values = drawn(AutoNaMIGuide(model), y)
    assert_moments(
        {"b": values["b"], "s": values["log_s"].exp()}, *moments(x, y, lambda s: -s.log())
    )


def test_flat_means_of_normal_effects_are_of_one_block(double):
    """Groups' effects about a flat mean: integrated out, each group's data are Normal with a shared mean."""
    y = torch.randn(6, 5) + torch.randn(6, 1)

    def model(y):
        m = pyro.sample("m", improper())
        with pyro.plate("groups", 6, dim=-2):
            a = pyro.sample("a", dist.Normal(m, 2.0))
            with pyro.plate("members", 5, dim=-1):
                pyro.sample("y", dist.Normal(a, 0.5), obs=y)

    guide = AutoNaMIGuide(model)
    trace = poutine.trace(guide).get_trace(y)
    sites = {name: trace.nodes[name] for name in "ma"}
    precision = 1 / (4 + 0.25 / 5)
    m, a = sites["m"]["value"], sites["a"]["value"].squeeze(-1)
    log_prob = dist.Normal(y.mean(), (6 * precision) ** -0.5).log_prob(m)
    own = 5 / 0.25 + 1 / 4
    log_prob = log_prob + dist.Normal((y.sum(-1) / 0.25 + m / 4) / own, own**-0.5).log_prob(a).sum()
    torch.testing.assert_close(trace.log_prob_sum(), log_prob)


@pytest.mark.parametrize(
    "name", ["kidiq-kidscore_interaction", "earnings-earn_height", "mesquite-logmesquite_logvas"]
)
@pytest.mark.parametrize("prior", PRIORS)
def test_reference_posteriors_are_met(prior, name, monkeypatch):
    """All of them, in all styles: `benchmarks/flat_priors.py`."""
    if not REFERENCES.exists():
        pytest.skip("posteriordb's summaries and data are not beside this checkout")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from posteriors import improper, posteriors, wide

    flat = wide if prior == "uniform" else improper
    posterior = next(each for each in posteriors(REFERENCES, flat) if each.name == name)
    guide = AutoNaMIGuide(posterior.model)
    with torch.no_grad(), pyro.plate("draws", 4000, dim=-2):
        errors = posterior.errors(guide(*posterior.args))
    assert guide.num_parameters == 0
    assert errors.mean < 0.1 and errors.sd < 0.1


# ---- bounds


@pytest.mark.parametrize("touching", [0.5, 3.0])
def test_a_boxed_normal_integrates_to_one_and_draws_within(touching, double):
    lower = torch.tensor([[1.0, 0.0], [0.8, 1.5]])
    low, high = torch.full((2,), -touching), torch.full((2,), touching + 1)
    box = BoxedNormal(torch.zeros(2), lower, torch.Size([2]), 1, None, low, high)
    draws = box.rsample((2000,))
    assert ((draws > low) & (draws < high)).all()
    side = torch.linspace(0, 1, 801)
    grid = torch.cartesian_prod(*[low[0] + (high - low)[0] * side] * 2)
    density = box.log_prob(grid).exp().reshape(801, 801)
    total = torch.trapezoid(torch.trapezoid(density, dx=1 / 800), dx=1 / 800) * (high - low).prod()
    assert total == pytest.approx(1, abs=1e-4)
    assert box.log_prob(high + 1) == -torch.inf


def test_bounds_that_cut_are_not_taken_for_flat(double):
    """A slope of 1.02 under Uniform(0, 1): a grid tells the exact posterior, which ends there."""
    x, noise = torch.randn(60), torch.randn(60)
    y = 1 + 1.02 * x + 0.3 * noise

    def model(y):
        a = pyro.sample("a", wide())
        b = pyro.sample("b", dist.Uniform(torch.tensor(0.0), 1.0))
        with pyro.plate("rows", 60):
            pyro.sample("y", dist.Normal(a + b * x, 0.3), obs=y)

    guide = AutoNaMIGuide(model)
    values = drawn(guide, y)
    assert values["b"].max() < 1
    mean, covariance = least_squares(torch.stack([torch.ones(60), x], -1), y)
    places = torch.linspace(0, 1, 20001)
    weights = dist.Normal(mean[1], 0.3 * covariance[1, 1].sqrt()).log_prob(places).softmax(0)
    center = (weights * places).sum()
    sd = (weights * (places - center) ** 2).sum().sqrt()
    assert values["b"].mean() == pytest.approx(float(center), abs=0.07 * float(sd))
    assert "cut off" in guide.rules["b"].reason


def test_a_vector_that_bounds_cut_stays_within_them():
    x, y = design(30)
    guide = AutoNaMIGuide(regression(x, lambda: dist.Uniform(torch.tensor(0.0), 1.0)))
    b = drawn(guide, y)["b"]
    assert ((b > 0) & (b < 1)).all() and guide.rules["b"].rule == "collapsed"


def test_noise_that_is_large_makes_bounds_cut():
    """Of the first call's noise the bounds would be far, of the posterior's they are not."""
    x = torch.cat([torch.ones(12, 1), torch.randn(12, 3)], -1)
    y = 400 * torch.randn(12)
    guide = AutoNaMIGuide(
        regression(x, lambda: dist.Uniform(torch.tensor(-300.0), 300.0), scale=SCALES["uniform"][0])
    )
    b = drawn(guide, y)["b"]
    assert (
        b.abs().max() < 300
        and guide.rules["b"].rule == "collapsed"
        and "cut off" in guide.rules["b"].reason
    )


def test_later_data_that_reach_the_bounds_are_told_and_draws_stay_within():
    x, y = design(30)
    guide = AutoNaMIGuide(regression(x, lambda: dist.Uniform(torch.tensor(-5.0), 5.0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn(guide, y)
    with pytest.warns(UserWarning, match="'b' lies outside of the bounds.*rules={'b': 'learned'}"):
        b = drawn(guide, y + 5 * x[:, 1])["b"]
    assert b.abs().max() < 5


# ---- improper posteriors


@pytest.mark.parametrize("style", ["vector", "sites"])
def test_columns_that_add_up_are_told(style):
    x, y = design(30)
    x = torch.cat([x, x[:, 1:2] + x[:, 2:3]], -1)
    with pytest.raises(ValueError, match="whose prior is improper.*proper prior"):
        AutoNaMIGuide(regression(x, improper, style, SCALES["improper"][0]))(y)


def test_bounds_make_columns_that_add_up_proper():
    x, y = design(30)
    guide = AutoNaMIGuide(regression(torch.cat([x, x[:, 1:2]], -1), wide))
    assert drawn(guide, y)["b"].abs().max() < 1000 and guide.rules["b"].rule == "collapsed"


def test_a_latent_that_no_data_reach_is_told():
    def model(y):
        pyro.sample("b", improper())
        pyro.sample("y", dist.Normal(pyro.sample("a", improper()), 1.0), obs=y)

    with pytest.raises(ValueError, match="'b', whose prior is improper"):
        AutoNaMIGuide(model)(torch.tensor(1.0))


def test_later_arguments_that_leave_a_latent_open_are_told():
    def model(x, y):
        mean = as_vector(x, improper)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    x, y = design(30)
    guide = AutoNaMIGuide(model)
    guide(x, y)
    with pytest.raises(ValueError, match="'b', whose prior is improper"):
        guide(torch.cat([x[:, :3], x[:, 2:3]], -1), y)


def test_too_few_rows_for_a_flat_scale_are_told():
    """With as many rows as coefficients and one more, the density of a flat scale has no end."""
    x, y = design(5)
    with pytest.warns(UserWarning, match="'s' is improper, and its posterior may be, too"):
        AutoNaMIGuide(regression(x, improper, scale=SCALES["improper"][0]))(y)


# ---- modes


def logistic(x, prior):
    def model(y):
        mean = as_vector(x, prior)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=mean), obs=y)

    return model


@pytest.mark.parametrize("prior", PRIORS)
def test_a_logistic_regression_is_about_its_mode(prior):
    """With 400 rows the Normal at the mode is near the posterior; the mode is where the slopes are zero."""
    x = design(400)[0]
    y = torch.bernoulli((x @ torch.tensor([0.3, 1.0, -1.0, 0.0])).sigmoid())
    guide = AutoNaMIGuide(logistic(x, PRIORS[prior]))
    b = drawn(guide, y)["b"].reshape(DRAWS, 4).double()
    mode, x, y = torch.zeros(4, dtype=torch.float64), x.double(), y.double()
    for _ in range(20):
        p = (x @ mode).sigmoid()
        information = x.mT @ (x * (p * (1 - p)).unsqueeze(-1))
        mode = mode + torch.linalg.solve(information, x.mT @ (y - p))
    sds = information.inverse().diagonal().sqrt()
    assert ((b.mean(0) - mode) / sds).abs().max() < 0.065 and (
        b.std(0) / sds - 1
    ).abs().max() < 0.05
    assert guide.rules["b"].rule == "newton"


@pytest.mark.parametrize("prior", PRIORS)
def test_two_coefficients_of_counts_come_by_quadrature(prior):
    """log p - log q is the same at all draws."""
    x = torch.randn(40)
    counts = torch.poisson((1 + 0.5 * x).exp())

    def model(counts):
        a, b = pyro.sample("a", PRIORS[prior]()), pyro.sample("b", PRIORS[prior]())
        with pyro.plate("rows", 40):
            pyro.sample("counts", dist.Poisson((a + b * x).exp()), obs=counts)

    guide, weights = AutoNaMIGuide(model), []
    for _ in range(30):
        trace = poutine.trace(guide).get_trace(counts)
        joint = poutine.trace(poutine.replay(model, trace)).get_trace(counts).log_prob_sum()
        weights.append(float((joint - trace.log_prob_sum()).detach()))
    assert max(weights) - min(weights) < 0.02 and rules(guide) == {"quadrature"}


@pytest.mark.slow
def test_coefficients_under_heavy_tails_are_those_under_a_wide_normal_prior():
    """No conditional is exact; between far bounds steps suit the latent's own space."""
    x = torch.randn(60)
    y = 1 + 2 * x + 0.5 * dist.StudentT(4.0).sample((60,))

    def robust(prior):
        def model(y):
            a, b, s = (
                pyro.sample("a", prior()),
                pyro.sample("b", prior()),
                pyro.sample("s", dist.HalfNormal(1.0)),
            )
            with pyro.plate("rows", 60):
                pyro.sample("y", dist.StudentT(4.0, a + b * x, s), obs=y)

        return model

    found = []
    for prior in (wide, lambda: dist.Normal(0.0, 100.0)):
        pyro.clear_param_store()
        model = robust(prior)
        guide = AutoNaMIGuide(model)
        svi = SVI(model, guide, ClippedAdam({"lr": 0.05, "lrd": 0.95}), Trace_ELBO())
        for _ in range(60):
            svi.step(y)
        assert "exact" not in rules(guide)
        found.append(drawn(guide, y))
    flat, normal = found
    for name in "ab":
        sd = normal[name].std()
        assert (flat[name].mean() - normal[name].mean()).abs() < 0.25 * sd and 0.75 < flat[
            name
        ].std() / sd < 1.33


def test_outcomes_that_a_covariate_tells_apart_are_told():
    x = design(50)[0]
    with pytest.warns(UserWarning, match="'b' is improper, and its posterior may be, too"):
        AutoNaMIGuide(logistic(x, improper))((x[:, 1] > 0).float())


@pytest.mark.parametrize("together", [True, False], ids=["a vector", "two numbers"])
def test_modes_apart_under_flat_priors_are_all_found(together):
    """A place in a square, by its distances from two points: two mirror images, and a grid that tells the evidence."""
    stations, x, noise = torch.tensor([[-0.7, 0.0], [0.5, 0.0]]), torch.tensor([0.75, 0.85]), 0.05

    def density(place):
        return dist.Normal((place.unsqueeze(-2) - stations).norm(dim=-1), noise).to_event(1)

    def model(x):
        if together:
            place = pyro.sample("place", dist.Uniform(-torch.ones(2), 1.0).to_event(1))
        else:
            low = torch.tensor(-1.0)
            east = pyro.sample("east", dist.Uniform(low, 1.0))
            north = pyro.sample("north", dist.Uniform(low, 1.0))
            place = torch.stack([east, north], -1)
        pyro.sample("x", density(place), obs=x)

    line = (torch.arange(400) + 0.5) / 200 - 1
    grid = torch.cartesian_prod(line, line)
    exact = density(grid).log_prob(x).logsumexp(0) - math.log(len(grid))
    posterior = fit(model, x, seed=0, progress=False)
    assert abs(posterior.log_evidence - exact) < 0.02  # one mode alone is off by log 2
    north = posterior["place"][:, 1] if together else posterior["north"]
    assert 0.45 < (north > 0).double().mean() < 0.55  # six standard errors of a half
