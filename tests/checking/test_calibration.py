"""Calibration: posteriors whose verdicts are known, and tests of ranks against enumeration, scipy and simulation."""

import contextlib
import itertools
import math
import random
import sys
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from models import learned, local_normals, minimize, noise, pair
from scipy import stats

from pyro_nami import AutoNaMIGuide, amortize
from pyro_nami.amortize import AmortizedPosterior
from pyro_nami.checking.calibration import JOINT_DENSITY, JOINT_TARP, Calibration, calibrate
from pyro_nami.checking.rank_tests import (
    BIASED,
    CALIBRATED,
    CONSERVATIVE,
    MISCALIBRATED,
    OVERCONFIDENT,
    EcdfTest,
    central_counts,
    count_ranks,
    ecdf_test,
    judge,
)
from pyro_nami.inference import History, Simulator
from pyro_nami.inference.scaled_coordinates import Coordinates, site_forms

SD = 0.5  # of the data around z


def model(y=None):
    """A mean, four values around it and a vector, all observed with noise."""
    local_normals(y, rows=4, likelihood=noise(SD))
    v = pyro.sample("v", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("w", dist.Normal(v, 1.0).to_event(1))


class ConjugateGuide:
    """The exact posterior of `model`, its sds times ``scale`` and its locations ``shift`` of its sds too high."""

    def __init__(self, scale=1.0, shift=0.0):
        self.scale, self.shift = scale, shift

    def factor(self, loc, sd):
        return dist.Normal(loc + self.shift * sd, sd * self.scale)

    def factors(self, latents, y, w):
        precision = 1 + 4 / (1 + SD**2)
        yield "mu", self.factor(y.sum(-1, keepdim=True) / (1 + SD**2) / precision, precision**-0.5)
        precision = 1 + SD**-2
        yield "z", self.factor((latents["mu"] + y * SD**-2) / precision, precision**-0.5)
        yield "v", self.factor(w / 2, 0.5**0.5).to_event(1)

    def __call__(self, observations):
        values = {}
        for name, factor in self.factors(values, **observations):
            with pyro.plate("n", 4, dim=-1) if name == "z" else contextlib.nullcontext():
                values[name] = pyro.sample(name, factor)

    def log_prob(self, latents, observations):
        return sum(
            factor.log_prob(latents[name]).sum(-1)
            for name, factor in self.factors(latents, **observations)
        )


def prior_guide(observations):
    mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("n", 4, dim=-1):
        pyro.sample("z", dist.Normal(mu, 1.0))
    pyro.sample("v", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def calibrated(guide, **options):
    return calibrate(model, guide, observed=["y", "w"], **{"seed": 0, **options})


def shapes(result):
    return {name: tuple(ranks.shape) for name, ranks in result.ranks.items()}


# ---- posteriors with known verdicts


@pytest.mark.parametrize(
    ("scale", "shift"), [(1.5, 0.0), (1.3, 0.4)], ids=["wide", "wide and biased"]
)
def test_weighted_posteriors_are_judged_by_what_they_give(scale, shift):
    def twice():
        with pyro.plate("n", 2):
            z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(z, 1.0).to_event(1))

    class Guide:
        rules: dict = {}

        def factor(self, y):
            return dist.Normal(y / 2 + shift * 0.5**0.5, scale * 0.5**0.5).to_event(1)

        def __call__(self, observations):
            with pyro.plate("n", 2):
                pyro.sample("z", self.factor(observations["y"]))

        def log_prob(self, latents, observations):
            return self.factor(observations["y"]).log_prob(latents["z"]).sum(-1)

    options = {"observed": ["y"], "num_datasets": 500, "num_draws": 49, "seed": 0}
    assert not calibrate(twice, Guide(), **options).passed
    result = calibrate(twice, AmortizedPosterior(twice, (), {}, Guide(), History()), **options)
    assert result.passed, str(result)
    assert set(result.joint) == {JOINT_TARP, JOINT_DENSITY}
    assert shapes(result) == {"z": (500, 2, 3)}


def test_posteriors_bring_arguments_and_values_for_data():
    def model(rows):
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        pyro.deterministic("x", theta[..., None] + torch.randn(theta.shape + (rows,)), event_dim=1)

    posterior = amortize(model, 3, observed=["x"], simulations=500, steps=100, progress=False)
    calibration = calibrate(model, posterior, num_datasets=100, num_draws=19, progress=False)
    assert calibration.num_datasets == 100 and set(calibration.ranks) == {"theta"}


@pytest.mark.parametrize(
    ("guide", "verdict"),
    [
        (ConjugateGuide(), CALIBRATED),
        (ConjugateGuide(scale=0.5), OVERCONFIDENT),
        (ConjugateGuide(scale=2.0), CONSERVATIVE),
        (ConjugateGuide(shift=0.5), BIASED),
    ],
    ids=["exact", "narrow", "wide", "biased"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_known_posteriors_get_their_verdicts(guide, verdict, dtype):
    torch.set_default_dtype(dtype)
    result = calibrated(guide)
    assert {result.verdicts[name].verdict for name in ("mu", "z", "v")} == {verdict}
    assert result.passed == (verdict == CALIBRATED)
    # A guide that lies to one side also has its truths too far out.
    joint = OVERCONFIDENT if verdict == BIASED else verdict
    assert result.verdicts[JOINT_DENSITY].verdict == joint
    if verdict != BIASED:
        assert result.verdicts[JOINT_TARP].verdict == verdict
    assert all(line.split()[2] != "" for line in str(result).splitlines()[2:5])


def test_bias_and_spread_are_those_of_the_guide():
    moved, narrow = calibrated(ConjugateGuide(shift=0.5)), calibrated(ConjugateGuide(scale=0.7))
    # Normal scores of 1000 ranks: standard errors 0.03 and 0.022 / 0.7.
    assert moved.verdicts["mu"].bias == pytest.approx(-0.5, abs=0.12)
    assert narrow.verdicts["mu"].spread == pytest.approx(1 / 0.7, abs=0.12)


def test_a_guide_that_ignores_the_data_is_found_by_tarp_alone():
    result = calibrated(prior_guide)
    assert result.failed == [JOINT_TARP]
    assert JOINT_DENSITY not in result.joint


def test_a_single_wrong_element_of_a_plate_is_found_and_named():
    class Guide(ConjugateGuide):
        def factor(self, loc, sd):
            return super().factor(
                loc, sd * torch.tensor([1.0, 1.0, 0.6, 1.0]) if loc.shape[-1] == 4 else sd
            )

    verdicts = calibrated(Guide()).verdicts
    assert (verdicts["z"].verdict, verdicts["z"].worst) == (OVERCONFIDENT, (2,))
    assert verdicts["mu"].verdict == verdicts["v"].verdict == CALIBRATED


def discrete_model():
    with pyro.plate("rows", 3, dim=-2):
        k = pyro.sample("k", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
        with pyro.plate("columns", 2, dim=-1):
            pyro.sample("x", dist.Normal(k.to(torch.get_default_dtype()), 1.0))
    b = pyro.sample("b", dist.Bernoulli(0.3))
    pyro.sample("c", dist.Bernoulli(0.2 + 0.6 * b))
    pyro.sample("s", dist.Dirichlet(torch.ones(3)))  # nothing is known of it


def discrete_guide(observations):
    with pyro.plate("rows", 3, dim=-2):
        log_probs = dist.Normal(torch.arange(3.0), 1.0).log_prob(observations["x"].unsqueeze(-1))
        logits = log_probs.sum(-2, keepdim=True) + torch.tensor([0.2, 0.3, 0.5]).log()
        pyro.sample("k", dist.Categorical(logits=logits))
    c = observations["c"]
    one, zero = 0.3 * torch.where(c > 0, 0.8, 0.2), 0.7 * torch.where(c > 0, 0.2, 0.8)
    pyro.sample("b", dist.Bernoulli(one / (one + zero)))
    pyro.sample("s", dist.Dirichlet(torch.ones(3)))


def test_discrete_sites_plates_and_vectors_have_uniform_ranks():
    options = {"observed": ["x", "c"], "num_datasets": 2000, "num_draws": 19, "seed": 1}
    result = calibrate(discrete_model, discrete_guide, **options)
    assert shapes(result) == {"k": (2000, 3, 1), "b": (2000,), "s": (2000, 3)}
    assert result.passed
    for ranks in result.ranks.values():
        for counts in count_ranks(ranks.reshape(2000, -1).numpy(), 19):
            # seven elements: alarms in 1 of 1400 seeds
            assert stats.chisquare(counts).pvalue > 1e-4


def test_trained_guide_passes_and_an_untrained_one_does_not():
    def line():
        slope = pyro.sample("slope", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("n", 5):
            pyro.sample("x", dist.Normal(slope * torch.arange(1.0, 6.0) / 3, 1.0))

    guide, simulator = learned(line, observed=["x"]), Simulator(line, observed=["x"])
    guide(observations={"x": torch.zeros(5)})
    options = {"observed": ["x"], "num_datasets": 500, "seed": 0}
    before = calibrate(line, guide, **options)
    draws = simulator.draw(4000)
    optimizer = torch.optim.LBFGS(guide.parameters(), max_iter=50, line_search_fn="strong_wolfe")
    minimize(optimizer, lambda: -guide.log_prob(draws.latents, observations=draws.observed).mean())
    after = calibrate(line, guide, **options)
    assert JOINT_DENSITY in after.joint
    assert (before.passed, after.passed) == (False, True)
    pyro.clear_param_store()
    # exact as it is made
    assert calibrate(line, AutoNaMIGuide(line, observed=["x"]), **options).passed


# ---- the result


def test_seed_repeats_and_outer_random_states_are_left_alone():
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first, second = (
        calibrated(ConjugateGuide(), num_datasets=50, num_draws=9, seed=s) for s in (3, 3)
    )
    other = calibrated(ConjugateGuide(), num_datasets=50, num_draws=9, seed=4)
    assert all(torch.equal(first.ranks[name], second.ranks[name]) for name in first.ranks)
    assert all(torch.equal(first.joint[name], second.joint[name]) for name in first.joint)
    assert not torch.equal(first.ranks["z"], other.ranks["z"])
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all() and states[2] == random.getstate()
    assert not pyro.get_param_store()


def test_chunks_change_nothing_but_the_random_numbers():
    sizes = []

    class Counting(ConjugateGuide):
        def __call__(self, observations):
            sizes.append(len(observations["y"]))
            super().__call__(observations)

    result = calibrated(Counting(), num_datasets=100, num_draws=9, chunk_size=32)
    assert sizes == [32, 32, 32, 4]
    assert {len(ranks) for ranks in (*result.ranks.values(), *result.joint.values())} == {100}
    assert result.passed


def test_coverage_counts_the_truths_inside_central_intervals():
    ranks = torch.tensor([0, 1, 4, 5, 6, 9])
    result = Calibration({"z": ranks, "v": ranks[:, None]}, {JOINT_TARP: ranks}, num_draws=9)
    coverage = result.coverage([0.0, 0.2, 0.4, 0.8, 1.0])
    assert torch.allclose(coverage["z"], torch.tensor([0, 2, 3, 4, 6]) / 6)
    assert torch.allclose(coverage["v"], coverage["z"][:, None])
    assert torch.allclose(coverage[JOINT_TARP], torch.tensor([0, 2, 2, 5, 6]) / 6)
    half = result.coverage([0.1])["z"]  # of the two cells in the middle
    assert torch.allclose(half, torch.tensor(1 / 6))
    with pytest.raises(ValueError, match="between 0 and 1; got .1.5"):
        result.coverage([1.5])


def test_print_shows_a_verdict_for_every_site():
    text = str(calibrated(ConjugateGuide(scale=0.5)))
    assert text.splitlines()[0] == (
        "Calibration: 1,000 data sets, 99 draws each: failed at 'mu', 'z', 'v', 'joint density' and 1 more"
    )
    rows = [line.split() for line in text.splitlines() if "overconfident" in line]
    assert [row[0].split("[")[0] for row in rows] == ["mu", "z", "v", "joint", "joint"]
    assert [row[3] for row in rows[:3]] == ["<1e-12"] * 3


# ---- exactness of the tests


def test_p_values_agree_with_enumeration():
    num, cells = 6, [0.2, 0.5, 0.3]
    test = EcdfTest(num, cells)
    tables = [
        counts for counts in itertools.product(range(num + 1), repeat=3) if sum(counts) == num
    ]
    statistics = test.statistic(np.array(tables))
    chances = np.array([stats.multinomial.pmf(counts, num, cells) for counts in tables])
    for statistic in np.unique(statistics):
        exact = chances[statistics <= statistic + 1e-12].sum()
        assert test.p_value(statistic) == pytest.approx(exact, abs=1e-12)


def test_statistic_is_the_smallest_binomial_tail():
    counts = np.random.default_rng(0).multinomial(40, [0.2] * 5, size=8)
    levels, sums = np.arange(1, 5) / 5, counts.cumsum(1)[:, :-1]
    below, above = stats.binom.cdf(sums, 40, levels), stats.binom.sf(sums - 1, 40, levels)
    expected = np.minimum(1, 2 * np.minimum(below, above).min(1))
    assert ecdf_test(40, 4).statistic(counts) == pytest.approx(expected)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("num_draws", [20, 99])
def test_envelope_holds_simultaneously(num_draws, folded):
    ranks = np.random.default_rng(1).integers(0, num_draws + 1, (200, 20_000))
    counts = count_ranks(ranks, num_draws)
    sums = (central_counts(counts) if folded else counts).cumsum(1)[:, :-1]
    low, high = ecdf_test(200, num_draws, folded).band(0.05)
    outside = ((sums < low) | (sums > high)).any(1).mean()
    error = math.sqrt(0.05 * 0.95 / 20_000)
    assert 0.04 < outside < 0.05 + 4 * error  # discreteness keeps it below 5%, by little


def test_false_alarms_are_as_rare_as_promised():
    generator, alarms, level, repeats = torch.Generator().manual_seed(0), 0, 0.2, 400
    for _ in range(repeats):
        drawn = torch.randint(0, 20, (100, 8), generator=generator)
        ranks, joint = {"a": drawn[:, :1], "b": drawn[:, 1:7]}, {JOINT_DENSITY: drawn[:, 7]}
        alarms += not Calibration(ranks, joint, num_draws=19, level=level).passed
    assert (
        stats.binom.ppf(1e-4, repeats, level / 2)
        < alarms
        < stats.binom.ppf(1 - 1e-4, repeats, level)
    )


def test_one_draw_has_a_verdict_too():
    # Its two ranks are equally far from the middle: there is nothing to test of that.
    assert calibrated(ConjugateGuide(), num_datasets=200, num_draws=1).passed
    assert not calibrated(ConjugateGuide(shift=2.0), num_datasets=200, num_draws=1).passed


def test_ranks_of_another_shape_have_no_name():
    # two, of the location and the spread of uniform ranks
    humps = np.repeat(np.r_[10:30, 70:90], 25)
    ranks = np.concatenate([humps, np.repeat(np.r_[0:8, 92:100], 4)])
    verdict = judge("z", ranks[:, None], 99)
    assert verdict.p_value < 1e-6
    assert verdict.verdict == MISCALIBRATED


# ---- coordinates


def test_coordinates_are_standardized_and_unconstrained_where_supports_are_fixed():
    def supports():
        high = pyro.sample("high", dist.LogNormal(0.0, 1.0))
        pyro.sample("below", dist.Uniform(0.0, high))
        pyro.sample("simplex", dist.Dirichlet(torch.ones(3)))
        pyro.sample("count", dist.Poisson(3.0))
        pyro.sample("y", dist.Normal(high, 1.0), obs=torch.tensor(1.0))

    simulator = Simulator(supports)
    forms, draws = site_forms(simulator), simulator.draw(4000).latents
    coordinates = Coordinates(draws, forms)
    values = coordinates(draws)
    columns = coordinates.sizes
    assert columns == {"high": 1, "below": 1, "simplex": 2, "count": 1}
    assert torch.allclose(values.quantile(0.5, 0), torch.zeros(5), atol=1e-6)
    spread = values[:, 0].std()  # log of a log-normal: se 0.011, and of the scale 0.02
    assert spread == pytest.approx(1, abs=0.06)
    assert torch.allclose(forms["below"].unconstrain(draws["below"]), draws["below"])
    far = coordinates({**draws, "high": draws["high"] * 1e30})
    assert far[:, 0].max() < 5 + math.log(1 + 80)


# ---- what goes wrong


def nan(observations):
    pyro.sample("mu", dist.Normal(torch.full((), math.nan), 1.0, validate_args=False))


def wide(observations):
    pyro.sample("mu", dist.Normal(torch.zeros(3), 1.0).to_event(1))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_draws": 0}, ValueError, "num_draws to be at least 1; got 0"),
        ({"num_datasets": -1}, ValueError, "num_datasets to be at least 1"),
        ({"chunk_size": 1.5}, TypeError, "chunk_size to be an int; got 1.5"),
        ({"level": 1.0}, ValueError, "level between 0 and 1"),
        (
            {"guide": lambda observations: None},
            ValueError,
            "draws latents of the model, .'mu', 'z', 'v'.; it has none",
        ),
        ({"guide": nan}, ValueError, "without NaN from the guide; got some at 'mu'"),
        ({"guide": wide}, ValueError, "Expected draws of 'mu' of shape"),
        ({"guide": lambda: prior_guide(None)}, TypeError, "guide that takes observations="),
    ],
)
def test_options_and_guides_that_do_not_fit_are_refused(options, error, message):
    with (
        pyro.validation_enabled(options.get("guide") is not nan),
        pytest.raises(error, match=message),
    ):
        calibrated(**{"guide": ConjugateGuide(), **options})


@pytest.mark.filterwarnings("ignore:The model cannot be simulated in one vectorized run")
def test_a_guide_of_a_model_that_takes_one_draw_at_a_time_says_what_to_do():
    def by_rows(y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        scale = 1.0 + 0.0 * float(w.sum())
        pyro.sample("y", dist.Normal(torch.eye(3, 2) @ w, scale).to_event(1), obs=y)

    with pytest.raises(ValueError, match="many draws at once.*w @ X.mT.*exact=False, anchor=False"):
        calibrate(by_rows, AutoNaMIGuide(by_rows, observed=["y"]), num_datasets=20)
    plain = AutoNaMIGuide(by_rows, observed=["y"], exact=False, anchor=False)
    assert calibrate(by_rows, plain, num_datasets=20).num_datasets == 20


def test_latents_that_the_guide_leaves_out_are_named():
    def only_v(observations):
        pyro.sample("v", dist.Normal(observations["w"] / 2, 0.5**0.5).to_event(1))

    result = calibrated(only_v)
    assert (result.absent, list(result.ranks), dict(result.joint)) == (("mu", "z"), ["v"], {})
    assert "Not drawn by the guide: mu, z." in str(result)


def test_a_guide_that_was_never_called_knows_what_it_conditions_on():
    result = calibrate(
        model, AutoNaMIGuide(model, observed=["y", "w"]), num_datasets=30, num_draws=9, seed=0
    )
    assert shapes(result) == {"mu": (30,), "z": (30, 4), "v": (30, 2)}


# Of a latent that is below 0 with probability 0.05: the location of y is NaN there, which validation refuses.
logarithm = pair(dist.Uniform(-0.05, 0.95), lambda z: dist.Normal(z.log(), 1.0))


def uniform_guide(observations):
    pyro.sample("z", dist.Uniform(0.0, 0.95).expand(observations["y"].shape))


def calibrated_logarithms(num_datasets, seeds):
    """Calibrations of a model of which a twentieth of the simulations has NaN parameters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Left out")
        options = {"observed": "y", "num_datasets": num_datasets, "num_draws": 9}
        return [calibrate(logarithm, uniform_guide, **options, seed=seed) for seed in range(seeds)]


def test_simulations_with_nan_parameters_are_left_out_whatever_the_seed():
    assert all(
        result.num_datasets == 200 - result.skipped
        for result in calibrated_logarithms(200, seeds=30)
    )


def overflowing(share):
    """A model whose data are infinite in a share of the simulations."""
    infinite = torch.tensor(math.inf)
    return pair(
        dist.Uniform(0.0, 1.0),
        lambda z: dist.Normal(torch.where(z < share, infinite, z), 1.0, validate_args=False),
    )


@pyro.validation_enabled(False)
def test_simulations_that_are_not_finite_are_left_out_or_refused():
    options = {"observed": "y", "seed": 0}
    with pytest.raises(ValueError, match="simulations are finite; got .* site 'y'"):
        calibrate(overflowing(0.99), uniform_guide, **options)
    with pytest.warns(UserWarning, match="Left out .* of 1000 simulations"):
        result = calibrate(overflowing(0.5), uniform_guide, **options)
    assert result.num_datasets == 1000 - result.skipped < 600
    assert f"infinite values: {result.skipped} simulated" in str(result)


# ---- figures


@pytest.mark.parametrize(
    ("kind", "sites"),
    [("ecdf", None), ("coverage", None), ("coverage", [JOINT_TARP])],
)
def test_figures_have_a_panel_for_every_site(kind, sites, tmp_path):
    import matplotlib.pyplot

    figure = calibrated(ConjugateGuide(), num_datasets=100, num_draws=20).plot(kind, sites=sites)
    assert len(figure.axes) == (1 if sites else 5)
    assert not matplotlib.pyplot.get_fignums()
    if sites:
        figure.savefig(tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 5000


def test_figures_name_what_they_cannot_draw(monkeypatch):
    result = calibrated(prior_guide, num_datasets=50, num_draws=9)
    titles = [axes.get_title(loc="left") for axes in result.plot(sites=["mu", "v"]).axes]
    assert [title.split(":")[0] for title in titles] == ["mu", "v"]
    with pytest.raises(ValueError, match="kind to be one of ecdf, coverage; got 'bars'"):
        result.plot("bars")
    with pytest.raises(ValueError, match="sites with ranks, .*; got 'x'"):
        result.plot(sites=["x"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install pyro-nami\[viz\]"):
        result.plot()
