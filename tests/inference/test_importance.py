"""Weights and evidence against conjugate models, quadrature, and Pyro's own importance samplers."""

import itertools
import math
import re
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from models import (
    conjugate_normal,
    conjugate_normal_evidence,
    conjugate_normal_guide,
    conjugate_normal_posterior,
    drawn_normal,
    eight_schools,
    eight_schools_data,
    nested,
    noise,
    pair,
    pooled,
    subsampled,
    told,
    with_factor,
)
from pyro import poutine
from pyro.distributions import transforms
from pyro.distributions.constraints import real
from pyro.infer import SVI, Importance, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalMessenger,
)
from pyro.infer.importance import vectorized_importance_weights
from pyro.optim import ClippedAdam

from pyro_nami import AutoNaMIGuide
from pyro_nami.inference.importance import importance_sample
from pyro_nami.messages import OneByOne
from pyro_nami.program.isolation import untouched

Y = [0.3, -1.2, 2.0, 0.7]
DATA_SETS = [[0.3, -1.2, 2.0, 0.7], [1.0, 1.5, 0.5, 2.5], [-4.0, -3.0, -3.5, -2.0]]
EIGHT_SCHOOLS = -31.3113  # nats, by quadrature
WIDE = dist.Normal(0.0, 2.0)


def normal(mu, sd):
    """A guide of `conjugate_normal` with one normal."""

    def guide(y):
        pyro.sample("mu", dist.Normal(mu, sd))

    return guide


prior_guide = normal(0.0, 2.0)


def conjugate_draws(guide, num_samples, *, y=Y, model=conjugate_normal, **options):
    """Draws for one data set, or with ``y=DATA_SETS`` for several."""
    if y is DATA_SETS:
        options["observations"], y = {"y": torch.tensor(y)}, torch.zeros(4)
    return importance_sample(model, guide, torch.as_tensor(y), num_samples=num_samples, **options)


def exact_answers():
    """Log evidence, and posterior mean and sd, of every data set."""
    y = torch.tensor(DATA_SETS)
    evidence = torch.tensor([conjugate_normal_evidence(row) for row in y])
    return evidence, *torch.tensor([conjugate_normal_posterior(row) for row in y]).T


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---- exact answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exact_guide_gives_constant_weights_and_the_exact_evidence(dtype, no_warnings):
    y = torch.tensor(Y, dtype=dtype)
    torch.set_default_dtype(dtype)
    draws = importance_sample(conjugate_normal, conjugate_normal_guide, y, num_samples=1000)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert float(draws.log_evidence) == pytest.approx(conjugate_normal_evidence(y), abs=tolerance)
    assert (
        float(draws.log_weights.std()) < tolerance and float(draws.log_evidence_error) < tolerance
    )
    assert (
        float(draws.effective_sample_size) == pytest.approx(1000, rel=1e-4)
        and float(draws.pareto_k) < 0.5
    )
    assert draws.log_weights.dtype == dtype and draws.samples["mu"].shape == (1000,)
    mean, sd = conjugate_normal_posterior(y)
    assert float(draws.mean("mu")) == pytest.approx(mean, abs=4 * sd / math.sqrt(1000))
    assert float(draws.std("mu")) == pytest.approx(sd, rel=4 / math.sqrt(2000))


def test_exact_guide_on_a_batch_of_data_sets(double, no_warnings):
    draws = conjugate_draws(conjugate_normal_guide, 500, y=DATA_SETS)
    assert draws.log_weights.shape == (500, 3) and draws.samples["mu"].shape == (500, 3)
    exact, mean, sd = exact_answers()
    torch.testing.assert_close(draws.log_weights, exact.expand(500, 3))
    assert ((draws.mean("mu") - mean).abs() < 4 * sd / math.sqrt(500)).all()


def test_prior_as_proposal_is_within_its_standard_errors():
    draws = conjugate_draws(prior_guide, 20_000, y=DATA_SETS)
    exact, mean, sd = exact_answers()
    assert (draws.log_evidence_error < 0.1).all() and (draws.log_evidence_error > 1e-3).all()
    assert ((draws.log_evidence - exact).abs() < 4 * draws.log_evidence_error).all()
    assert ((draws.mean("mu") - mean).abs() < 4 * sd / draws.effective_sample_size.sqrt()).all()


def csis_guide(observations):
    pyro.sample("z", dist.Normal(observations["y"] / 2, 0.5**0.5))


def improper_guide(observations):
    pyro.sample("z", dist.Normal(observations["y"], 1.0))


def two_of_four(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(y), subsample=torch.tensor([0, 2])) as index:
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y[index])


X, MU = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 1.5])
TWICE = torch.tensor(Y)[[0, 0, 2, 2]]  # two of four instances count double
# name -> model, guide, arguments, observations, the log evidence of every data set
CONSTANT = {
    "a latent that is given is data": (
        *(conjugate_normal, lambda y: None, [torch.tensor(Y)], {"mu": MU}),
        dist.Normal(0.0, 2.0).log_prob(MU)
        + dist.Normal(MU, 1.0).log_prob(torch.tensor(Y)[:, None]).sum(0),
    ),
    "CSIS": (
        told(pair(dist.Normal(0.0, 1.0))),
        csis_guide,
        [],
        {"y": X},
        dist.Normal(0.0, 2**0.5).log_prob(X),
    ),
    "improper prior": (
        pair(dist.ImproperUniform(real, (), ()), default=torch.zeros(())),
        *(improper_guide, [], {"y": torch.tensor([1.0, 7.0])}, torch.zeros(2)),
    ),
    "a chosen part of the data": (
        *(two_of_four, lambda _: conjugate_normal_guide(TWICE), [torch.tensor(Y)], None),
        torch.tensor(conjugate_normal_evidence(TWICE)),
    ),
    "a guide with keywords only": (
        *(
            conjugate_normal,
            lambda y, **kwargs: conjugate_normal_guide(y, **kwargs),
            [torch.zeros(4)],
        ),
        *({"y": torch.tensor(DATA_SETS)}, exact_answers()[0]),
    ),
    "numpy": (
        *(conjugate_normal, conjugate_normal_guide, [torch.zeros(4)]),
        *({"y": np.array(DATA_SETS)}, exact_answers()[0]),
    ),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_weights_of_exact_posteriors_are_the_evidence_whatever_the_signature(name, no_warnings):
    model, guide, args, observations, exact = CONSTANT[name]
    draws = importance_sample(model, guide, *args, num_samples=30, observations=observations)
    assert draws.log_weights.dtype == torch.float32
    torch.testing.assert_close(
        draws.log_weights, exact.expand(30, *exact.shape), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(draws.log_evidence, exact, rtol=1e-5, atol=1e-5)


# ---- the same weights as Pyro's


def masked_and_scaled(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(y)), poutine.mask(mask=y > 0), poutine.scale(scale=3.0):
        z = pyro.sample("z", dist.Normal(mu, 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)
    pyro.deterministic("twice", 2 * mu)


def masked_guide(y):
    pyro.sample("mu", dist.Normal(0.5, 1.0))
    with pyro.plate("data", len(y)), poutine.mask(mask=y > 0), poutine.scale(scale=3.0):
        pyro.sample("z", dist.Normal(y, 1.5))


def nested_guide(y):
    top = pyro.sample("top", dist.Normal(0.1, 0.8))
    with pyro.plate("groups", y.shape[0], dim=-2):
        group = pyro.sample("group", dist.Normal(top, 0.9))
        with pyro.plate("members", y.shape[1], dim=-1):
            pyro.sample("member", dist.Normal(group, 0.7))


def factor_guide(y):
    a = pyro.sample("a", dist.Normal(0.1, 0.8))
    pyro.sample("b", dist.Normal(a, 0.9))


PAIRS = {
    "masked": (masked_and_scaled, masked_guide, torch.tensor(Y), 1),
    "nested": (nested, nested_guide, torch.arange(12.0).reshape(3, 4) / 6, 2),
    "factor": (with_factor, factor_guide, torch.tensor(0.4), 0),
}


@pytest.mark.filterwarnings("ignore:The importance weights")
@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("name", PAIRS)
def test_weights_are_those_of_pyros_importance(name, chunk_size):
    model, guide, y, _ = PAIRS[name]
    draws = importance_sample(model, guide, y, num_samples=25, chunk_size=chunk_size)
    count = itertools.count()

    def scripted(y):
        trace, index = poutine.Trace(), next(count)
        for site, value in draws.samples.items():
            trace.add_node(
                site, name=site, type="sample", is_observed=False, value=value[index], infer={}
            )
        return poutine.replay(guide, trace=trace)(y)

    theirs = Importance(model, scripted, num_samples=25).run(y)
    torch.testing.assert_close(
        draws.log_weights, torch.stack(theirs.log_weights), rtol=1e-5, atol=1e-4
    )
    torch.testing.assert_close(
        draws.log_evidence, theirs.get_log_normalizer(), rtol=1e-5, atol=1e-4
    )
    torch.testing.assert_close(draws.effective_sample_size, theirs.get_ESS(), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The importance weights")
@pytest.mark.parametrize("name", PAIRS)
def test_weights_are_those_of_vectorized_importance_weights(name):
    model, guide, y, nesting = PAIRS[name]

    def seeded(y):
        torch.manual_seed(3)
        return guide(y)

    draws = importance_sample(model, seeded, y, num_samples=25)
    theirs = vectorized_importance_weights(
        model, seeded, y, num_samples=25, max_plate_nesting=nesting
    )[0]
    torch.testing.assert_close(draws.log_weights, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("make", [AutoNormal, AutoMultivariateNormal, AutoNormalMessenger])
def test_pyros_own_guides_serve_as_proposals(make):
    y = torch.tensor(Y)
    guide = make(conjugate_normal)
    svi = SVI(conjugate_normal, guide, ClippedAdam({"lr": 0.05}), Trace_ELBO())
    for _ in range(200):
        svi.step(y)
    draws = importance_sample(conjugate_normal, guide, y, num_samples=2000)
    assert float(draws.log_evidence_error) < 0.05
    error = 4 * float(draws.log_evidence_error) + 1e-4
    assert float(draws.log_evidence) == pytest.approx(conjugate_normal_evidence(y), abs=error)


# ---- amortized guides and batches


@pytest.fixture(scope="module")
def schools_guide():
    """An `AutoNaMIGuide` of eight schools after some hundred steps."""
    with untouched():
        pyro.set_rng_seed(1)
        guide, steps = AutoNaMIGuide(eight_schools), 600
        optim = ClippedAdam({"lr": 0.05, "lrd": 0.02 ** (1 / steps)})
        svi = SVI(
            eight_schools, guide, optim, Trace_ELBO(num_particles=32, vectorize_particles=True)
        )
        for _ in range(steps):
            svi.step(*eight_schools_data())
    return guide


def test_trained_guide_gives_the_evidence_of_eight_schools(schools_guide):
    draws = importance_sample(
        eight_schools, schools_guide, *eight_schools_data(), num_samples=10_000
    )
    assert float(draws.effective_sample_size) > 9000 and float(draws.pareto_k) < 0.7
    # Weights that are all the same have no standard error; 28 densities are added, each rounded to single precision.
    rounding = 28 * torch.finfo(torch.float32).eps * abs(EIGHT_SCHOOLS)
    error = 5 * float(draws.log_evidence_error) + rounding
    assert float(draws.log_evidence) == pytest.approx(EIGHT_SCHOOLS, abs=error) and error < 0.05
    # Stan's reference draws: 4.41 (3.31), 3.60 (3.20).
    assert float(draws.mean("mu")) == pytest.approx(4.41, abs=0.25)
    assert float(draws.mean("tau")) == pytest.approx(3.60, abs=0.25)
    assert float(draws.std("mu")) == pytest.approx(3.31, abs=0.25)
    assert float(draws.std("tau")) == pytest.approx(3.20, abs=0.35)


@pytest.mark.filterwarnings("ignore:The importance weights")
def test_a_batch_of_data_sets_has_the_weights_of_each_alone():
    """With networks that read the data: those of a guide trained on one data set are for that one."""
    y, sigma = eight_schools_data()
    schools_guide = AutoNaMIGuide(eight_schools, mode="amortized")
    batch = torch.stack([y, -y, y.flip(0)])
    draws = importance_sample(
        eight_schools,
        schools_guide,
        y,
        sigma,
        num_samples=40,
        observations={"y": batch},
        chunk_size=16,
    )
    assert draws.samples["theta"].shape == (40, 3, 8) and draws.log_weights.shape == (40, 3)
    for index, row in enumerate(batch):
        values = {name: value[:, index] for name, value in draws.samples.items()}
        log_q = schools_guide.log_prob(values, row, sigma)
        mu, tau, theta = (values[name] for name in ("mu", "tau", "theta"))
        log_p = dist.Normal(0.0, 5.0).log_prob(mu) + dist.HalfCauchy(5.0).log_prob(tau)
        log_p = log_p + dist.Normal(mu[:, None], tau[:, None]).log_prob(theta).sum(-1)
        log_p = log_p + dist.Normal(theta, sigma).log_prob(row).sum(-1)
        # Far out single precision leaves no more of them.
        torch.testing.assert_close(draws.log_weights[:, index], log_p - log_q, rtol=1e-4, atol=3e-2)


def test_observations_in_place_of_the_models_own_data(schools_guide):
    y, sigma = eight_schools_data()
    direct = importance_sample(eight_schools, schools_guide, y, sigma, num_samples=4000)
    given = importance_sample(
        eight_schools, schools_guide, torch.zeros(8), sigma, num_samples=4000, observations={"y": y}
    )
    assert given.log_weights.shape == (4000,)
    error = math.hypot(float(direct.log_evidence_error), float(given.log_evidence_error))
    assert float(direct.log_evidence) == pytest.approx(float(given.log_evidence), abs=4 * error)


@pytest.mark.filterwarnings("ignore:The importance weights")
def test_observations_with_all_plate_dims_and_shared_ones(double):
    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("s", dist.Normal(z, 1.0), obs=torch.tensor(0.0))
        with pyro.plate("rows", 2, dim=-2):
            pyro.sample("r", dist.Normal(z, 1.0), obs=torch.zeros(2, 1))
            with pyro.plate("columns", 3, dim=-1):
                pyro.sample("x", dist.Normal(z, 1.0), obs=torch.zeros(2, 3))

    def guide():
        pyro.sample("z", dist.Normal(0.5, 1.0))

    def weighted(**observations):
        return importance_sample(model, guide, num_samples=6, observations=observations)

    s, r, x = torch.randn(5), torch.randn(5, 2, 1), torch.randn(2, 3)
    narrow = weighted(s=s, r=r, x=x)
    z = narrow.samples["z"]
    assert z.shape == (6, 5)
    unit = dist.Normal(0.0, 1.0)
    expected = (
        unit.log_prob(z) + unit.log_prob(s - z) + unit.log_prob(r[..., 0] - z[..., None]).sum(-1)
    )
    expected = (
        expected + unit.log_prob(x - z[..., None, None]).sum((-1, -2)) - unit.log_prob(z - 0.5)
    )
    torch.testing.assert_close(narrow.log_weights, expected)
    assert weighted(s=s.reshape(5, 1, 1), r=r.tolist(), x=x).log_weights.shape == (6, 5)


def test_plates_name_the_dims_of_arviz():
    pytest.importorskip("arviz")
    draws = importance_sample(nested, nested_guide, torch.zeros(3, 4), num_samples=60)
    assert draws.samples["group"].shape == (60, 3, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = draws.to_arviz()["posterior"]
    assert posterior["group"].dims == ("chain", "draw", "groups")
    assert posterior["member"].dims == ("chain", "draw", "groups", "members")


# ---- chunks, and runs one by one


def counted(guide):
    def run(*args, **kwargs):
        run.calls += 1
        return guide(*args, **kwargs)

    run.calls = 0
    return run


def test_chunks_follow_the_same_law_as_one_pass():
    whole, parts = (conjugate_draws(prior_guide, 5000, chunk_size=size) for size in (None, 600))
    assert parts.log_weights.shape == (5000,) and len(parts.samples["mu"].unique()) > 4900
    error = math.hypot(float(whole.log_evidence_error), float(parts.log_evidence_error))
    assert float(whole.log_evidence) == pytest.approx(float(parts.log_evidence), abs=4 * error)


@pytest.mark.parametrize(("chunk_size", "chunks"), [(None, 1), (10, 3), (25, 1), (1000, 1)])
def test_a_chunk_is_one_run_of_the_guide(chunk_size, chunks):
    guide, model = counted(conjugate_normal_guide), counted(conjugate_normal)
    importance_sample(model, guide, torch.tensor(Y), num_samples=25, chunk_size=chunk_size)
    # shapes; a few draws and two of them alone, as a check
    assert guide.calls == model.calls == 1 + 3 + chunks


def test_the_default_chunk_is_made_for_the_number_of_elements(monkeypatch):
    monkeypatch.setattr("pyro_nami.program.memory.MEMORY", 120 * 8)
    # 6 elements a draw and data set: mu in both, and y in four parts
    guide = counted(conjugate_normal_guide)
    data = {"y": torch.tensor(DATA_SETS[:2])}
    importance_sample(conjugate_normal, guide, torch.zeros(4), num_samples=25, observations=data)
    assert guide.calls == 1 + 3 + 3


VECTOR = WIDE.expand([1]).to_event(1)
branching = pooled(WIDE, lambda mu: dist.Normal(mu, 1.0 if mu < 100 else 2.0))
summing = pooled(WIDE, lambda mu: dist.Normal(mu.sum() + 0.0 * float(mu.sum()), 1.0))
indexing = pooled(VECTOR, lambda mu: dist.Normal(mu[0] + 0.0 * float(mu.sum()), 1.0))


@pytest.mark.parametrize(
    ("model", "guide", "reason"),
    [
        (branching, prior_guide, "RuntimeError: Boolean value"),
        (summing, prior_guide, "the model's log density of site 'y' differs"),
        (indexing, lambda y: pyro.sample("mu", VECTOR), "site 'y'|RuntimeError|ValueError"),
    ],
    ids=["branching", "summing", "indexing"],
)
def test_what_cannot_be_vectorized_runs_one_by_one_and_says_so_once(model, guide, reason):
    y = torch.tensor(Y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draws = importance_sample(model, guide, y, num_samples=400, chunk_size=150)
    messages = [str(entry.message) for entry in caught if "one by one" in str(entry.message)]
    assert len(messages) == 1 and re.search(reason, messages[0])
    assert caught[0].filename == __file__
    assert draws.log_weights.shape == (400,)
    error = 4 * float(draws.log_evidence_error)
    assert (
        float(draws.log_evidence) == pytest.approx(conjugate_normal_evidence(y), abs=error)
        and error < 1
    )


def test_one_by_one_over_data_sets():
    y = torch.tensor(DATA_SETS[:2])
    with pytest.warns(UserWarning, match="one by one"):
        draws = importance_sample(
            branching, prior_guide, y[0], num_samples=50, observations={"y": y}
        )
    mu = draws.samples["mu"]
    assert mu.shape == (50, 2)
    torch.testing.assert_close(
        draws.log_weights, dist.Normal(mu[..., None], 1.0).log_prob(y).sum(-1)
    )


# ---- what is left as it was


@pytest.mark.filterwarnings("ignore:The importance weights")
def test_nothing_is_seen_outside_and_nothing_requires_gradients(schools_guide):
    before = {name: value.clone() for name, value in schools_guide.named_parameters()}
    store = set(pyro.get_param_store())
    with poutine.trace() as outer:
        draws = importance_sample(
            eight_schools, schools_guide, *eight_schools_data(), num_samples=10
        )
    assert not outer.trace.nodes and store <= set(pyro.get_param_store())
    assert not draws.log_weights.requires_grad and not draws.samples["mu"].requires_grad
    for name, value in schools_guide.named_parameters():
        assert torch.equal(value, before[name]) and value.requires_grad


# ---- warnings and errors


def test_a_heavy_tail_is_warned_of_with_the_number_of_data_sets_and_advice():
    with pytest.warns(
        UserWarning, match="unreliable: k-hat is above 0.7 for 1 of 3 data sets"
    ) as caught:
        # posterior means 0.4, 1.3 and -2.9; sd 0.49
        conjugate_draws(normal(0.9, 0.6), 2000, y=DATA_SETS)
    message = str(caught[0].message)
    assert "families='flow'" in message and "Resampling cannot help" in message
    assert caught[0].filename == __file__


def test_zero_weights_are_legal_unless_all_are_zero(double):
    def model(low):
        pair(dist.Uniform(low, 1.0, validate_args=False))(torch.tensor(0.0))

    def guide(low):
        pyro.sample("z", dist.Uniform(0.0, 1.0))

    draws = importance_sample(model, guide, 0.5, num_samples=4000)
    zero = draws.samples["z"] < 0.5
    assert torch.equal(draws.log_weights == -math.inf, zero) and 0 < int(zero.sum()) < 4000
    unit = torch.distributions.Normal(torch.zeros(()), 1.0)
    exact = float((2 * (unit.cdf(torch.ones(())) - unit.cdf(torch.tensor(0.5)))).log())
    assert float(draws.log_evidence) == pytest.approx(
        exact, abs=4 * float(draws.log_evidence_error)
    )
    with pytest.raises(ValueError, match="all weights are zero"):
        importance_sample(model, guide, 0.99999999, num_samples=20)


def scaled(y, scale=1.0):
    pooled(WIDE, noise(scale))(y)


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guide": normal(torch.tensor(math.nan), 1.0)}, "site 'mu' of the guide; got NaN"),
        (
            {"guide": lambda y, scale: prior_guide(y), "scale": torch.tensor(math.nan)},
            "site 'y' of the model; got NaN",
        ),
        ({"y": [0.0, math.nan, 1.0, 2.0]}, "site 'y' of the model"),
    ],
)
def test_nan_names_the_site_that_it_comes_from(options, message, validate):
    with pyro.validation_enabled(validate), pytest.raises(ValueError, match=message):
        conjugate_draws(**{"guide": prior_guide, "num_samples": 20, "model": scaled, **options})


@pytest.mark.parametrize("by_one", [False, True])
@pytest.mark.parametrize("validate", [True, False])
def test_draws_at_which_the_models_density_is_nan_weigh_nothing(validate, by_one):
    """One run gives all of them nevertheless, if the model can be run so, and others are checked."""

    def model(y):
        mu = pyro.sample("mu", WIDE)
        if by_one:
            float(mu)
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(torch.where(mu > 0.5, math.nan, mu), 1.0), obs=y)

    y, grid = torch.tensor(Y), torch.linspace(-9.0, 0.5, 2001)
    log_joint = WIDE.log_prob(grid) + dist.Normal(grid, 1.0).log_prob(y[:, None]).sum(0)
    expected = torch.trapezoid(log_joint.exp(), grid).log()
    with pyro.validation_enabled(validate), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = importance_sample(
            model, normal(0.0, 1.0), y, num_samples=300 if by_one else 5000, defensive=0.1
        )
    about = [str(each.message) for each in told if "weight zero" in str(each.message)]
    assert len(about) == 1 and "site 'y' of the model; got NaN for" in about[0]
    assert (found.samples["mu"][found.log_weights.isfinite()] <= 0.5).all()
    assert abs(found.log_evidence - expected) < 4 * found.log_evidence_error


def test_latents_that_rounding_takes_out_of_their_support_weigh_nothing():
    """Also where all draws of a run are such: an ordered vector is refused once two elements are one number."""
    base = dist.Normal(torch.tensor([1.0, -12.0, 0.0]), torch.tensor([0.1, 6.0, 1.0])).to_event(1)

    def ordered(cached):
        return dist.TransformedDistribution(base, [transforms.OrderedTransform(cache_size=cached)])

    def model(y):
        cuts = pyro.sample("cuts", ordered(0))
        pyro.sample("y", dist.Normal(cuts[..., 0], 0.1), obs=y)

    def guide(y):
        pyro.sample("cuts", ordered(1))  # which knows what it has drawn, as guides of ours do

    with pytest.warns(UserWarning, match="site 'cuts' of the model; got NaN for .* weight zero"):
        found = importance_sample(
            model, guide, torch.tensor(1.0), num_samples=300, chunk_size=1, defensive=0.1
        )
    tied = found.samples["cuts"].diff(dim=-1).eq(0).any(-1)
    assert 30 < tied.sum() < 120 and found.log_weights.isneginf().equal(tied)


def test_draws_that_a_distribution_refuses_and_that_have_no_density_weigh_nothing():
    """A Beta of which one side has underflown to 0 is refused, and its log density is minus infinity, and not NaN."""
    y = torch.tensor([0.6, 0.7, 0.9])

    def prior(y):
        return pyro.sample("z", dist.Normal(torch.zeros(()), 30.0))

    def sides(z):
        return 10 * z.sigmoid(), 10 * (1 - z.sigmoid())

    def model(y):
        parameters = sides(prior(y))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Beta(*parameters), obs=y)

    grid = torch.linspace(-12.0, 12.0, 24_001, dtype=torch.float64)
    beta = dist.Beta(*sides(grid.unsqueeze(-1))).log_prob(y.double()).sum(-1)
    expected = torch.trapezoid((beta + dist.Normal(0.0, 30.0).log_prob(grid)).exp(), grid).log()
    found = importance_sample(model, prior, y, num_samples=20_000)
    assert 0.2 < found.log_weights.isneginf().double().mean() < 0.4
    assert all((side > 0).all() for side in sides(found.samples["z"][found.log_weights.isfinite()]))
    assert abs(found.log_evidence - expected) < 4 * found.log_evidence_error


def more(y):
    prior_guide(y)
    pyro.sample("nu", dist.Normal(0.0, 1.0))


def data_too(y):
    prior_guide(y)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(0.0, 1.0))


def local(y):
    with pyro.plate("data", len(y)):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_samples": 0}, ValueError, "num_samples to be at least 1; got 0"),
        ({"num_samples": 2.5}, TypeError, "num_samples to be an int; got 2.5"),
        ({"chunk_size": 0}, ValueError, "chunk_size to be at least 1; got 0"),
        (
            {"observations": {"x": torch.zeros(4)}},
            ValueError,
            "model's sites, 'mu', 'y'; got one of 'x'",
        ),
        ({"observations": {"data": torch.zeros(4)}}, ValueError, "got one of 'data'"),
        (
            {"observations": {"y": torch.zeros(2, 3, 4)}},
            ValueError,
            r"\(data sets, 4\); got \(2, 3, 4\)",
        ),
        (
            {"model": lambda y: drawn_normal(len(y))},
            ValueError,
            "it does not sample 'y'. If 'y' is data",
        ),
        ({"guide": lambda y: None}, ValueError, "it does not sample 'mu'"),
        ({"guide": more}, ValueError, "it samples 'nu', which is no site of the model"),
        ({"guide": data_too}, ValueError, "it samples 'y', which is observed"),
        ({"model": local}, ValueError, r"sample 'mu' of the model's shape, \(4,\); got \(\)"),
        # random subsampling shows every draw other data, and exp(scaled log density) has another mean
        ({"model": subsampled}, NotImplementedError, "plate 'data' holds 2 of 4 instances"),
        # the weights of a point are all equal, and looked like those of an exact guide
        (
            {"guide": AutoDelta(conjugate_normal)},
            ValueError,
            "density at every .*; it is a point at 'mu'",
        ),
        (
            {"guide": AutoLaplaceApproximation(conjugate_normal)},
            ValueError,
            "it is a point at 'mu'",
        ),
    ],
)
def test_what_cannot_be_weighted_is_an_error(options, error, message):
    with pytest.raises(error, match=message):
        conjugate_draws(**{"guide": prior_guide, "num_samples": 5, **options})


def test_draws_at_the_edge_of_a_support_are_made_at_once():
    """Where the value of a draw, rounded, no longer tells the density that it was made with."""

    def model():
        z = pyro.sample("z", dist.Uniform(torch.zeros(2) - 1, 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z, 1.0).to_event(1), obs=torch.ones(2))

    def guide():
        bounded = [
            transforms.SigmoidTransform(cache_size=1),
            transforms.AffineTransform(-1.0, 2.0, cache_size=1),
        ]
        pyro.sample(
            "z",
            dist.TransformedDistribution(
                dist.Normal(torch.full((2,), 20.0), 1.0), bounded
            ).to_event(1),
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error", OneByOne)
        importance_sample(model, guide, num_samples=50)
