"""What a `Posterior` is asked, against conjugate posteriors; its files, pictures, and what `amortize` returns."""

import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer import Predictive, Trace_ELBO

from pyro_nami import Posterior, amortize, fit
from pyro_nami.fit.verdict import checked
from pyro_nami.inference.weighted_samples import WeightedSamples

Y = torch.tensor([1.0, 2.0, 4.0, 0.5])
PRECISION = 1 / 9 + 4  # of the mean: prior sd 3, noise 1
MEAN, SD = float(Y.sum()) / PRECISION, PRECISION**-0.5


def normal_model(size, y=None):
    mean = pyro.sample("mean", dist.Normal(0.0, 3.0))
    with pyro.plate("rows", size):
        return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def effects(size, y=None):
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    with pyro.plate("rows", size):
        effect = pyro.sample("effect", dist.Normal(0.0, scale))
        pyro.sample("y", dist.Normal(effect, 1.0), obs=y)


@pytest.fixture
def posterior():
    return fit(normal_model, 4, Y, seed=0, progress=False)


def test_it_is_a_mapping(posterior):
    assert list(posterior) == ["mean"]
    assert "other" not in posterior
    (draws,) = dict(posterior).values()
    torch.testing.assert_close(draws, posterior["mean"])


def test_log_prob_is_the_normalized_density(posterior):
    mean = torch.linspace(-2, 4, 50)
    expected = dist.Normal(MEAN, SD).log_prob(mean)
    torch.testing.assert_close(posterior.log_prob({"mean": mean}), expected, rtol=0, atol=1e-4)
    one = posterior.log_prob({"mean": 1.0})
    assert one.shape == () and float(one) == pytest.approx(
        float(dist.Normal(MEAN, SD).log_prob(torch.tensor(1.0))), abs=1e-4
    )


def test_log_prob_refuses_what_fits_no_site(posterior):
    with pytest.raises(ValueError, match="got none of 'mean'"):
        posterior.log_prob({})
    local = fit(effects, 4, Y, seed=0, progress=False)
    with pytest.raises(ValueError, match="of one batch"):
        local.log_prob({"scale": torch.ones(3), "effect": torch.ones(2, 4)})


def test_outside_of_a_support_there_is_no_density():
    posterior = fit(robust, torch.linspace(-1.0, 1.0, 9), torch.randn(9), progress=False, seed=0)
    values = {name: value[:2].clone() for name, value in posterior.draws.items()}
    values["scale"][1] = -1.0
    inside, outside = posterior.log_prob(values)
    assert inside.isfinite() and outside == -torch.inf


def test_the_mode_is_that_of_the_density(posterior):
    assert float(posterior.map["mean"]) == pytest.approx(MEAN, abs=1e-3)
    assert not posterior.map["mean"].requires_grad


def test_where_the_density_has_no_bound_the_mode_says_so():
    local = fit(effects, 4, torch.zeros(4), seed=0, progress=False)
    with pytest.warns(UserWarning, match="No mode"):
        assert local.map["effect"].shape == (4,)


def test_predictions_are_of_the_posterior(posterior):
    drawn = posterior.predict(3)["y"]
    assert drawn.shape == (4000, 3)
    assert float(drawn.mean()) == pytest.approx(MEAN, abs=0.06)
    assert float(drawn.std()) == pytest.approx(math.hypot(SD, 1.0), rel=0.03)


def test_other_instances_are_the_models_own_and_told():
    local = fit(effects, 4, 3 * Y, seed=0, progress=False)
    same = local.predict(4)
    assert "effect" not in same
    off = (same["y"].mean(0) - local["effect"].mean(0)) / local["effect"].std(0)
    assert (off.abs() < 0.2).all()
    with pytest.warns(UserWarning, match="no draws of 'effect'"):
        other = local.predict(6)
    assert other["effect"].shape == (4000, 6)
    spread = other["effect"].std(0) / local["scale"].square().mean().sqrt()
    assert (spread - 1).abs().max() < 0.1


def test_predictions_under_an_improper_prior():
    def model(size, y=None):
        mean = pyro.sample("mean", dist.ImproperUniform(constraints.real, (), ()))
        with pyro.plate("rows", size):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    flat = fit(model, 4, Y, seed=0, progress=False)
    drawn = flat.predict(6)["y"]
    assert drawn.shape == (4000, 6)
    assert float(drawn.mean()) == pytest.approx(float(Y.mean()), abs=0.06)


def robust(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 3.0))
    scale = pyro.sample("scale", dist.HalfCauchy(1.0))
    freedom = pyro.sample("freedom", dist.Gamma(2.0, 0.1))
    with pyro.plate("rows", len(x)):
        return pyro.sample("y", dist.StudentT(freedom, slope * x, scale), obs=y)


def test_the_guide_answers_for_the_data_of_the_fit_whatever_it_is_called_with():
    x = torch.linspace(-1, 1, 40)
    y = 2 * x + 0.3 * torch.randn(40)
    posterior = fit(robust, x, y, seed=0, progress=False)
    guide, elbo = posterior.guide, Trace_ELBO(2000, vectorize_particles=True, max_plate_nesting=1)

    def gap():
        with torch.no_grad():
            return float(posterior.log_evidence) + elbo.loss(robust, guide, x, y)

    def predicted(size):
        held = Predictive(robust, guide=guide, num_samples=4000, parallel=True)
        return float(held(torch.ones(size))["y"].mean())

    mean = float(posterior.mean("slope"))
    assert gap() < 0.3 and guide.mode == "fixed"
    assert predicted(3) == pytest.approx(mean, abs=0.05)
    with torch.no_grad():
        elbo.loss(robust, guide, x[:10], -y[:10])  # other data are scored, and change nothing
    fit(robust, x[:20], -y[:20], seed=0, progress=False)  # nor do those of another guide
    assert predicted(5) == pytest.approx(mean, abs=0.05) and gap() < 0.3


def test_a_file_gives_the_posterior_back(posterior, tmp_path):
    posterior.save(tmp_path / "posterior.pt")
    loaded = Posterior.load(tmp_path / "posterior.pt", normal_model, 4, Y)
    assert torch.equal(loaded["mean"], posterior["mean"])
    assert loaded.verdict == posterior.verdict and loaded.verdict.kind == "exact"
    assert torch.equal(loaded.log_evidence, posterior.log_evidence)
    assert loaded.predict(2)["y"].shape == (4000, 2)
    alone = Posterior.load(tmp_path / "posterior.pt")
    assert torch.equal(alone.mean("mean"), posterior.mean("mean"))
    with pytest.raises(ValueError, match="with its model"):
        alone.predict(2)


def test_a_forecast_goes_on_from_the_draws_of_the_steps_that_were_seen(tmp_path):
    """Innovations beside a Normal start are a dense block, and yet those of a series; oracle: dense algebra."""

    def walk(y, steps):
        start = pyro.sample("start", dist.Normal(0.0, 3.0))
        e = pyro.sample("e", dist.Normal(torch.zeros(steps), 0.3).to_event(1))
        with pyro.plate("steps", steps):
            level = start.unsqueeze(-1) + e.cumsum(-1)
            pyro.sample("y", dist.Normal(level, 0.5), obs=y if steps == len(y) else None)

    seen, steps = 33, 36
    y = torch.linspace(0.0, 4.0, seen).sin() + 1.0
    found = fit(walk, y, seen, seed=0, progress=False)
    maps = torch.cat(
        [3.0 * torch.ones(steps, 1), 0.3 * torch.ones(steps, steps).tril()], -1
    ).double()
    covariance = maps @ maps.T + 0.25 * torch.eye(steps)
    gain = torch.linalg.solve(covariance[:seen, :seen], covariance[:seen, seen:]).T
    mean = gain @ y.double()
    sd = (covariance[seen:, seen:] - gain @ covariance[:seen, seen:]).diag().sqrt()
    found.save(tmp_path / "walk.pt")
    loaded = Posterior.load(tmp_path / "walk.pt", walk, y, seen)
    for each in (found, loaded):
        ahead = each.predict(y, steps)["y"][:, seen:]
        assert ((ahead.mean(0) - mean) / sd).abs().max() < 0.08  # five errors of 4,000 draws
        assert (ahead.std(0) / sd - 1).abs().max() < 0.06


def test_the_summary_tells_verdict_draws_and_by_how_much_weights_moved(posterior):
    lines = posterior.summary().splitlines()
    assert any("exact" in line for line in lines)
    name, mean, sd, *_, draws, moved = lines[-1].split()
    assert name == "mean" and float(mean) == pytest.approx(MEAN, abs=0.05)
    assert float(sd) == pytest.approx(SD, rel=0.05) and int(draws) > 3900 and float(moved) < 0.01


def test_effective_draws_count_the_error_of_each_mean():
    """Weights of 0 and 2 leave half of the draws; the error of a mean is that of as many."""
    z = torch.randn(4000, dtype=torch.float64)
    weights = torch.tensor([-math.inf, math.log(2.0)], dtype=torch.float64).repeat(2000)
    weighted = Posterior({"z": z}, weights)
    assert float(weighted._effective("z")) == pytest.approx(2000, rel=0.1)


def test_unknown_sites_are_named(posterior):
    with pytest.raises(KeyError, match="'mean'.*'other'"):
        posterior["other"]


def test_pictures(posterior):
    pytest.importorskip("matplotlib")
    assert len(posterior.plot().axes) == 1
    local = fit(effects, 4, Y, seed=0, progress=False)
    assert len(local.plot(["effect"], num=3).axes) == 9


def test_arviz(posterior):
    pytest.importorskip("arviz")
    data = posterior.to_arviz()
    assert data["posterior"]["mean"].shape == (1, 4000)


def test_amortize_gives_the_same_class():
    posterior = amortize(normal_model, 4, observed=["y"], simulations=100, progress=False)({"y": Y})
    assert isinstance(posterior, Posterior) and posterior.verdict.kind == "exact"
    assert float(posterior.log_prob({"mean": 1.0})) == pytest.approx(
        float(dist.Normal(MEAN, SD).log_prob(torch.tensor(1.0))), abs=1e-3
    )
    several = amortize(normal_model, 4, observed=["y"], simulations=100, progress=False)(
        {"y": torch.stack([Y, 2 * Y])}
    )
    assert several["mean"].shape == (1000, 2)
    with pytest.raises(NotImplementedError, match="one data set"):
        several.predict(4)


@pytest.mark.parametrize(("fn", "kurtosis"), [(dist.Normal, 3.0), (dist.Laplace, 6.0)])
def test_the_verdict_tells_errors_of_deviations(fn, kurtosis):
    torch.manual_seed(0)
    drawn = WeightedSamples({"z": fn(0.0, 1.0).sample((4000,))}, torch.zeros(4000))
    verdict = checked("weights agree", drawn, 1000.0)
    # of a variance by n independent draws the relative error, squared, is (kurtosis - 1) / n
    assert verdict.spread == pytest.approx(2 * ((kurtosis - 1) / 4000) ** 0.5, rel=0.2)
    assert f"sds within {100 * verdict.spread:.2g}%." in verdict


def test_the_verdict_names_the_latent_whose_deviation_is_open():
    torch.manual_seed(0)
    draws = {"z": torch.randn(4000), "tail": dist.StudentT(3.0).sample((4000,))}
    verdict = checked("weights agree", WeightedSamples(draws, torch.zeros(4000)), 1000.0)
    assert verdict.worst == "tail" and verdict.endswith("% (worst: 'tail').")
    sure = {"z": draws["z"], "one": (torch.arange(4000) == 7).float()}
    assert checked("weights agree", WeightedSamples(sure, torch.zeros(4000)), 1000.0).worst == "z"
    kept = pickle.loads(pickle.dumps(verdict))
    assert kept == verdict and kept.worst == "tail"


def test_given_one_number_others_are_drawn_by_the_models_density():
    """A sum is observed with noise 0.5: given one summand, the other is Normal about (1.5 - 1) / 1.25."""

    def summands(x):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z.sum(-1), 0.5), obs=x)

    posterior = fit(summands, torch.tensor(1.5), seed=0, progress=False)
    pyro.set_rng_seed(0)
    drawn = posterior.conditional({"z": torch.tensor([1.0, torch.nan])}, num=4000)
    assert drawn.verdict.kind == "checked" and (drawn["z"][:, 0] == 1.0).all()
    own, sd = drawn["z"][:, 1], 0.2**0.5
    assert abs(own.mean() - 0.4) < 0.1 * sd and abs(own.std() / sd - 1) < 0.1
    with pytest.raises(ValueError, match="of the latents 'z'; got one of 'w'"):
        posterior.conditional({"w": 1.0})
    with pytest.raises(ValueError, match="got 'w'"):
        posterior.marginal("w")
