"""Annealed importance sampling gives the exact log evidence: conjugate and linear-Gaussian models, and quadrature.

A tolerance is three of the result's own standard errors, unless said otherwise, and `BIAS` for what the log of a mean
of few heavy-tailed weights falls short.
"""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import (
    CASES,
    CHAIN,
    COLLIDER,
    NETWORKS,
    beta_bernoulli,
    beta_bernoulli_evidence,
    conjugate_normal,
    conjugate_normal_evidence,
    conjugate_normal_guide,
    conjugate_normal_posterior,
    deterministic_and_delta,
    eight_schools,
    eight_schools_data,
    eight_schools_evidence,
    pair,
    pooled,
    subsampled,
    support_parents,
    told,
    with_factor,
)
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.reparam import LocScaleReparam
from torch import nn

from pyro_nami import AutoNaMIGuide
from pyro_nami.annealing.annealing import annealed_importance_sampling
from pyro_nami.annealing.transitions import sigmoid_temperatures
from pyro_nami.inference.importance import importance_sample

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("double")]
BIAS = 0.03


def anneal(
    model, guide, *args, num_chains=1000, num_temperatures=25, num_leapfrog_steps=5, **options
):
    options = {"num_chains": num_chains, "num_leapfrog_steps": num_leapfrog_steps, **options}
    return annealed_importance_sampling(
        model, guide, *args, num_temperatures=num_temperatures, **options
    )


def check(result, *exact):
    """Every data set's log evidence is the exact one, and known well enough for that to mean something."""
    error = result.log_evidence_error
    off = (result.log_evidence - torch.tensor(exact).reshape(error.shape)).abs()
    assert (error < 0.12).all(), error
    assert (off < 3 * error + BIAS).all(), (off, error)


def normal_log_prob(y, covariance):
    zeros = torch.zeros(len(covariance), dtype=torch.float64)
    return (
        torch.distributions.MultivariateNormal(zeros, covariance.double())
        .log_prob(y.double())
        .item()
    )


# ---- exact evidences: each gives a model, its arguments, and the log evidence


def network(name):
    y = torch.tensor([1.0, 2.0, -1.0, 0.5][: len(NETWORKS[name].observed)])
    return NETWORKS[name], y, NETWORKS[name].log_evidence(*y.tolist())


def nested_plates():
    y, same_group = torch.randn(1, 3, 4), torch.block_diag(*[torch.ones(4, 4)] * 3)
    covariance = torch.ones(12, 12) + same_group + 2 * torch.eye(12)
    return CASES["nested"].model, y, normal_log_prob(y.reshape(-1), covariance)


def crossed_plates():
    y = torch.randn(1, 3, 2)
    rows, columns = torch.block_diag(*[torch.ones(2, 2)] * 3), torch.eye(2).repeat(3, 3)
    return CASES["crossed"].model, y, normal_log_prob(y.reshape(-1), rows + columns + torch.eye(6))


def unit_interval():
    y = torch.tensor([1.0, 1.0, 0.0, 1.0])
    return beta_bernoulli, [y], beta_bernoulli_evidence(y)


def positive_support():
    y = torch.tensor([2.0, 0.0, 5.0, 3.0])
    prior = dist.Gamma(torch.tensor(3.0), torch.tensor(2.0))
    model = pair(prior, lambda rate: dist.Poisson(rate.unsqueeze(-1) * torch.ones(4)).to_event(1))
    shape = 3 + y.sum().item()  # of the posterior, at rate 6
    exact = 3 * math.log(2) - math.lgamma(3) + math.lgamma(shape) - shape * math.log(6)
    return model, [y], exact - (y + 1).lgamma().sum().item()


def simplex_in_a_plate():
    prior = torch.tensor([1.0, 2.0, 3.0])
    model = pair(
        dist.Dirichlet(prior), lambda p: dist.Multinomial(probs=p, validate_args=False), rows=2
    )
    counts = torch.tensor([[3.0, 0.0, 1.0], [0.0, 2.0, 5.0]])
    exact = dist.DirichletMultinomial(prior, counts.sum(-1), validate_args=False)
    return model, [counts], exact.log_prob(counts).sum().item()


def factors_count_as_likelihood():
    """exp(-(a - b)^2) is sqrt(pi) Normal(a - b; 0, 1/sqrt(2)) observed at 0."""
    covariance = torch.tensor([[2.5, 1.0], [1.0, 2.0]])  # of a - b + noise, and y
    exact = normal_log_prob(torch.tensor([0.0, 1.0]), covariance) + math.log(math.pi) / 2
    return with_factor, torch.ones(1), exact


def masked_latents_integrate_to_one():
    y, mask = torch.tensor([0.5, math.nan, 2.0]), torch.tensor([True, False, True])

    def model(y):
        with pyro.plate("data", 3):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y.nan_to_num(), obs_mask=mask)

    return model, [y], normal_log_prob(y[mask], 2 * torch.eye(2))


def latents_masked_twice_integrate_to_one():
    def model():
        x = pyro.sample(
            "x",
            dist.Normal(torch.zeros(()), 1.0).mask(torch.tensor(False)).mask(torch.tensor(False)),
        )
        pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(0.5))

    return model, [], normal_log_prob(torch.tensor([0.5]), 2 * torch.eye(1))


EXACT = {
    **{name: (lambda name=name: network(name), {}) for name in NETWORKS},
    "nested plates": (nested_plates, {"num_chains": 1500, "num_temperatures": 40}),
    "crossed plates": (crossed_plates, {}),
    "unit interval": (unit_interval, {}),
    "positive": (positive_support, {}),
    "simplex in a plate": (simplex_in_a_plate, {}),
    "factors": (factors_count_as_likelihood, {}),
    "masked": (masked_latents_integrate_to_one, {}),
    "masked twice": (latents_masked_twice_integrate_to_one, {}),
    "eight schools": (
        lambda: (eight_schools, eight_schools_data(), -31.3113),
        {"num_chains": 1500, "num_temperatures": 50},
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_log_evidence_is_exact(name):
    make, options = EXACT[name]
    model, args, exact = make()
    check(anneal(model, None, *args, **options), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_precisions(dtype):
    torch.set_default_dtype(dtype)
    y = torch.randn(6) + 1
    result = anneal(conjugate_normal, None, y)
    parts = (result.log_weights, result.acceptance_rate, result.step_size, result.samples["mu"])
    assert {part.dtype for part in parts} == {dtype}
    check(result, conjugate_normal_evidence(y))


def test_support_that_moves_with_another_latent():
    """hi ~ Gamma(3, 1), z ~ Uniform(0, hi), y ~ Normal(z, 1/2): quadrature over hi, with z summed out by hand."""
    hi = torch.linspace(1e-4, 60, 400_001)
    inside = torch.special.ndtr((hi - 1) / 0.5) - torch.special.ndtr(torch.tensor(-1 / 0.5))
    density = dist.Gamma(3.0, 1.0).log_prob(hi).exp() * inside / hi
    result = anneal(support_parents, None, torch.tensor(1.0))
    check(result, torch.trapezoid(density, hi).log().item())
    assert (result.samples["z"] < result.samples["hi"]).all()


@pytest.mark.parametrize("start", ["prior", "guide"])
def test_delta_and_deterministic_sites_are_no_latents(start):
    y = torch.tensor(1.0)
    guide = AutoNaMIGuide(deterministic_and_delta, init_scale=0.5) if start == "guide" else None
    result = anneal(deterministic_and_delta, guide, y)
    assert list(result.samples) == ["a"]
    check(result, normal_log_prob(y.reshape(1), torch.tensor([[5.0]])))


def test_eight_schools_not_centered():
    model = poutine.reparam(eight_schools, {"theta": LocScaleReparam(0.0)})
    result = anneal(model, None, *eight_schools_data())
    assert list(result.samples) == ["mu", "tau", "theta_decentered"]
    check(result, eight_schools_evidence())


@pytest.mark.slow
def test_eight_schools_from_a_trained_guide():
    data, guide = eight_schools_data(), AutoNaMIGuide(eight_schools)
    optimizer = pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.1 ** (1 / 120)})
    svi = SVI(
        eight_schools, guide, optimizer, Trace_ELBO(num_particles=16, vectorize_particles=True)
    )
    for _ in range(120):
        svi.step(*data)
    result = anneal(eight_schools, guide, *data, num_chains=300, num_temperatures=12)
    assert result.log_weights.std() < 1  # from the prior it is above 100
    check(result, eight_schools_evidence())


# ---- an exact guide: the path stands still, and every weight is the evidence


def dense_guide(y):
    conjugate_normal_guide(y)


def its_log_prob(latents, y):
    return dist.Normal(*conjugate_normal_posterior(y)).log_prob(latents["mu"])[..., 0]


dense_guide.log_prob = its_log_prob


class ExactModule(nn.Module):
    forward = staticmethod(conjugate_normal_guide)


@pytest.mark.parametrize("start", [conjugate_normal_guide, dense_guide, "given", ExactModule()])
def test_weights_from_an_exact_guide_are_the_evidence(start):
    given = start == "given" or isinstance(start, nn.Module)
    start = conjugate_normal_guide if start == "given" else start
    y = torch.randn(6) + 1
    args = [torch.zeros(6)] if given else [y]
    options = {"observations": {"y": y[None]}} if given else {}
    result = anneal(conjugate_normal, start, *args, **options, num_chains=7, num_temperatures=20)
    assert torch.allclose(
        result.log_weights, torch.tensor(conjugate_normal_evidence(y)), rtol=0, atol=1e-9
    )


def test_constrained_exact_guide_for_batched_data():
    """The guide reads ``observations``, one row for each data set."""
    y = torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])

    def guide(_, observations):
        ones = observations["y"].sum(-1, keepdim=True)
        pyro.sample("p", dist.Beta(2 + ones, 7 - ones))

    result = anneal(
        beta_bernoulli, guide, y[0], observations={"y": y}, num_chains=7, num_temperatures=20
    )
    exact = torch.tensor([beta_bernoulli_evidence(row) for row in y]).expand(7, 2)
    assert torch.allclose(result.log_weights, exact, rtol=0, atol=1e-9)


def test_results_are_weighted_samples():
    """With their estimates and diagnostics; the posterior mean of every data set, and plates by name."""
    y = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]])
    model, given = pair(dist.Normal(0.0, 1.0), rows=3), {"y": y}
    result = anneal(model, None, y[0], observations=given, num_chains=400, num_temperatures=30)
    weighted = result.weighted()
    assert weighted.plates == {"z": ("data",)}
    assert torch.equal(weighted.log_evidence, result.log_evidence)
    assert torch.allclose(weighted.log_evidence_error, result.log_evidence_error)
    assert (weighted.effective_sample_size > 200).all()
    assert ((weighted.mean("z") - y / 2).abs() < 4 * (0.5 / 200) ** 0.5).all()


@pytest.mark.parametrize("dense", [True, False])
def test_networks_as_start(dense):
    """Untrained, so that the path has a way to go; with its own density and replayed."""
    data = torch.tensor([0.5])
    guide = AutoNaMIGuide(CHAIN, init_scale=0.7)
    start = guide if dense else (lambda *args: guide(*args))
    check(anneal(CHAIN, start, *data), CHAIN.log_evidence(*data.tolist()))


# ---- many data sets, chunks


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_batch_of_data_sets(chunk_size):
    y = torch.randn(3, 6) * 2 + torch.tensor([[0.0], [2.0], [-3.0]])
    result = anneal(conjugate_normal, None, y[0], observations={"y": y}, chunk_size=chunk_size)
    assert (
        result.log_weights.shape
        == result.samples["mu"].shape
        == result.acceptance_rate.shape
        == (1000, 3)
    )
    assert result.step_size.shape == (3,)
    check(result, *[conjugate_normal_evidence(row) for row in y])


def test_batch_with_all_plate_dims_and_shared_observations():
    """One site batched, one not; a site outside the plate."""

    def model():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(mu, 1.0), obs=torch.tensor(9.0))
        with pyro.plate("data", 2):
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0))

    x, y = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([1.0, -1.0])
    covariance = torch.ones(3, 3) + torch.diag(torch.tensor([1.0, 2.0, 2.0]))
    exact = [normal_log_prob(torch.cat([value.reshape(1), y]), covariance) for value in x]
    for given in (x, x.reshape(3, 1)):
        result = anneal(model, None, observations={"x": given, "y": y})
        assert result.samples["mu"].shape == (1000, 3) and result.samples["z"].shape == (1000, 3, 2)
        check(result, *exact)


def test_model_that_takes_observations():
    y = torch.tensor([0.0, 2.0])
    exact = [normal_log_prob(value.reshape(1), torch.tensor([[2.0]])) for value in y]
    check(anneal(told(pair(dist.Normal(0.0, 1.0))), None, observations={"y": y}), *exact)


# ---- laws


@pytest.mark.parametrize("target", [None, 0.65])
def test_weights_are_unbiased_at_few_temperatures(target):
    """The mean weight over many chains is the evidence; the tolerance is four Monte Carlo standard errors of it."""
    y = torch.tensor([1.0, 2.0])
    options = {"num_chains": 200_000, "num_temperatures": 4, "num_leapfrog_steps": 2}
    result = anneal(conjugate_normal, None, y, **options, step_size=0.9, target_acceptance=target)
    weights = (result.log_weights - conjugate_normal_evidence(y)).exp()
    assert weights.std() > 0.3  # or there would be nothing to see
    assert abs(weights.mean() - 1) < 4 * weights.std() / len(weights) ** 0.5


def test_resampling_keeps_chains_effective_and_the_evidence_unbiased():
    """600 data sets alike, apart from each other; tolerances are four standard errors over these."""

    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 0.03))

    x, noise = torch.tensor(1.5), 0.03**2
    exact, posterior = (
        normal_log_prob(x.reshape(1), torch.tensor([[1 + noise]])),
        (x / (1 + noise), 0.03),
    )
    options = {"observations": {"x": x.expand(600)}, "num_chains": 60, "num_temperatures": 16}
    plain, again = (anneal(model, None, **options, resample=resample) for resample in (False, True))
    assert (
        again.weighted().effective_sample_size.mean()
        > 30
        > 2 * plain.weighted().effective_sample_size.mean()
    )
    evidence = (again.log_evidence - exact).exp()
    assert abs(evidence.mean() - 1) < 4 * evidence.std() / 600**0.5 < 0.1
    means = again.weighted().mean("z", smoothed=False)
    assert abs(means.mean() - posterior[0]) < 4 * means.std() / 600**0.5
    drawn = again.weighted().resample(60)["z"]
    assert drawn.std() == pytest.approx(posterior[1], rel=0.05)
    assert len(again.samples["z"][:, 0].unique()) > 50  # transitions have parted those drawn twice


def test_chains_that_are_resampled_move_as_far_as_each_latent_is_wide():
    """One latent is a thousand times as narrow as the other; a guide puts the wide one where it is not."""

    def model():
        a, b = pyro.sample("a", dist.Normal(0.0, 1.0)), pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(a, 1e-3))
        pyro.sample("y", dist.Normal(b, 1.0))

    def guide():
        pyro.sample("a", dist.Normal(1.0, 2e-3))
        pyro.sample("b", dist.Normal(-1.0, 0.7))

    observations = {"x": torch.tensor(1.0).expand(20), "y": torch.tensor(2.0)}
    options = {
        "num_chains": 200,
        "num_temperatures": 40,
        "observations": observations,
        "resample": True,
    }
    drawn = anneal(model, guide, **options).weighted()
    assert drawn.mean("b", smoothed=False).sub(1.0).abs().max() < 0.3
    assert drawn.std("b", smoothed=False).mean() == pytest.approx(0.5**0.5, rel=0.1)


CHOSEN = {"num_chains": 1000, "num_leapfrog_steps": 5, "resample": True, "conditional_ess": 0.98}


def test_temperatures_that_are_chosen_suit_every_data_set():
    """From the prior to posteriors on both sides of zero: wide ones, and two peaks of 1e-4."""

    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z.abs(), noise))

    noise = torch.tensor([10.0, 0.1, 1e-4]).repeat(6)
    x = torch.ones(18)
    found = annealed_importance_sampling(
        model, None, observations={"x": x, "noise": noise}, **CHOSEN
    )
    marginal, share = dist.Normal(0.0, (1 + noise**2).sqrt()), noise / (1 + noise**2).sqrt()
    positive = dist.Normal(0.0, 1.0).cdf(x * share / noise / noise)
    exact = (
        dist.LogNormal(0.0, 1.0).log_prob(noise) + (2 * marginal.log_prob(x).exp() * positive).log()
    )
    # 2 by 100 temperatures, which take as long
    assert (found.log_evidence - exact).square().mean().sqrt() < 0.1
    drawn = found.weighted().resample(500)["z"]
    assert drawn.gt(0).double().mean(0).sub(0.5).square().mean().sqrt() < 0.08  # 0.25
    assert drawn[:, 2::3].abs().std(0).mean() == pytest.approx(1e-4, rel=0.1)


def test_chains_move_until_their_weights_depend_little_on_where_they_were():
    """A scale nine deviations out, to which chains drift for long: the evidence by a grid, where m is zero for it."""

    def model():
        m, s = pyro.sample("m", dist.Normal(0.0, 2.0)), pyro.sample("s", dist.LogNormal(0.0, 1.0))
        pyro.sample(
            "x", dist.Logistic(m[..., None], s[..., None]).expand(s.shape + (15,)).to_event(1)
        )

    x = 1e4 * torch.randn(15, dtype=torch.float64)
    grid = torch.linspace(-4.0, 14.0, 4001, dtype=torch.float64)
    joint = dist.Normal(0.0, 1.0).log_prob(grid) + dist.Logistic(0.0, grid.exp()).log_prob(
        x[:, None]
    ).sum(0)
    chosen = {**CHOSEN, "conditional_ess": 0.95}
    found = annealed_importance_sampling(
        model, None, observations={"x": x.float().expand(10, 15)}, **chosen
    )
    off = found.log_evidence - (joint.logsumexp(0) + math.log(18 / 4000))
    # 0.54 and -0.32 by one transition at each
    assert off.square().mean().sqrt() < 0.25 and abs(off.mean()) < 0.15
    assert (off / found.log_evidence_error).square().mean().sqrt() < 1.5  # 1.7


def test_trajectories_for_which_a_model_has_no_factor_are_rejected():
    """A Gaussian process whose matrix is not positive, by rounding, where steps are wide."""
    at = torch.linspace(0.0, 6.0, 20)

    def model():
        length, scale = (
            pyro.sample("length", dist.InverseGamma(3.0, 3.0)),
            pyro.sample("scale", dist.HalfNormal(1.0)),
        )
        length, scale = (part[..., None, None] for part in (length, scale))
        kernel = scale**2 * (
            -0.5 * (at[:, None] - at).square() / length**2
        ).exp() + 1e-2 * torch.eye(20)
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(20), kernel))

    options = {"num_chains": 200, "num_temperatures": 30, "resample": True, "step_size": 20.0}
    found = annealed_importance_sampling(model, None, observations={"y": at.sin()}, **options)
    assert found.log_evidence.isfinite() and found.samples["length"].isfinite().all()


def test_temperatures_are_chosen_by_the_chains_that_data_leave():
    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Uniform(z, z + 0.1, validate_args=False))

    found = annealed_importance_sampling(
        model, None, observations={"x": torch.full((20,), 0.5)}, **CHOSEN
    )
    normal = dist.Normal(0.0, 1.0)
    exact = (normal.cdf(torch.tensor(0.5)) - normal.cdf(torch.tensor(0.4))).div(0.1).log()
    assert abs(found.log_evidence.mean() - exact) < 0.15  # 36 of 1,000 chains in each data set


def test_chains_that_start_from_many_draws_find_the_weights_of_modes():
    """A guide that draws one of two equal modes once in a hundred times, and is ten times too wide."""

    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z.abs(), 0.03))

    def guide(observations):
        logits, places = (
            torch.tensor([0.99, 0.01]).log(),
            observations["x"].unsqueeze(-1) * torch.tensor([1.0, -1.0]),
        )
        modes = dist.Categorical(logits=logits.expand(places.shape)), dist.Normal(places, 0.3)
        pyro.sample("z", dist.MixtureSameFamily(*modes))

    data = {"x": torch.ones(30)}
    options = {**CHOSEN, "num_chains": 300, "observations": data}
    with pytest.warns(UserWarning, match="k-hat is above 0.7"):
        draws = importance_sample(model, guide, num_samples=30_000, observations=data)
    few, many = anneal(model, guide, **options), anneal(model, guide, **options, draws=draws)
    exact = dist.Normal(0.0, (1 + 0.03**2) ** 0.5).log_prob(data["x"]) + math.log(2)
    off, before = ((each.log_evidence - exact).square().mean().sqrt() for each in (many, few))
    assert 3 * off < before
    assert 1 / 2 < off / many.log_evidence_error.mean() < 2  # of 30 data sets
    drawn = many.weighted()
    assert (
        torch.equal(drawn.log_evidence_error, many.log_evidence_error)
        and (drawn.effective_sample_size > 150).all()
    )
    assert drawn.resample(300)["z"].gt(0).double().mean(0).sub(0.5).square().mean().sqrt() < 0.1
    with pytest.raises(ValueError, match="Expected conditional_ess, and at most 30000 chains"):
        anneal(model, guide, observations=data, draws=draws, resample=True)


def test_two_temperatures_are_importance_sampling():
    y, seen = torch.tensor([1.0, 2.0]), []

    def likelihood(mu):
        seen.append(mu.detach())
        return dist.Normal(mu, 1.0)

    model = pooled(dist.Normal(0.0, 2.0), likelihood)
    result = anneal(model, None, y, num_chains=5, num_temperatures=2, target_acceptance=None)
    starts = next(value for value in seen if value.shape == (5, 1, 1))
    assert torch.allclose(result.log_weights, dist.Normal(starts[:, 0], 1.0).log_prob(y).sum(-1))


def test_chains_end_in_the_posterior():
    """Weighted moments against the exact ones; 4 standard errors for 4,000 chains."""
    y = torch.randn(6) + 1
    result = anneal(conjugate_normal, None, y, num_chains=4000)
    mean, sd = conjugate_normal_posterior(y)
    weights = result.log_weights.softmax(0)
    spread = 4 * sd / (1 / weights.square().sum()).sqrt()
    assert abs((weights * result.samples["mu"]).sum() - mean) < spread
    ratio = ((weights * (result.samples["mu"] - mean).square()).sum() / sd**2).sqrt()
    assert abs(ratio - 1) < spread / sd / 2**0.5


def test_acceptance_follows_the_target():
    """Step sizes start far off, and the average has that in it; noise is that of 40 pilots."""
    options = {"num_temperatures": 150, "num_chains": 200, "num_leapfrog_steps": 2}
    for target, first in ((0.4, 10.0), (0.65, 0.1), (0.9, 10.0)):
        options |= {"target_acceptance": target, "step_size": first}
        result = anneal(COLLIDER, None, torch.tensor(1.0), **options)
        assert abs(result.acceptance_rate.mean() - target) < 0.08, (target, first)


def test_sigmoid_temperatures():
    values = sigmoid_temperatures(11)
    assert values[0] == 0 and values[-1] == 1 and (values.diff() > 0).all()
    assert torch.allclose(values + values.flip(0), torch.ones(11, dtype=torch.float64))
    logistic = [1 / (1 + math.exp(-x)) for x in (-4, -3.2, 4)]
    expected = (logistic[1] - logistic[0]) / (logistic[2] - logistic[0])
    assert abs(values[1] - expected) < 1e-12


def test_impossible_starts_have_no_weight():
    """y ~ Uniform(0, z): starts below y have zero likelihood; p(y) = exp(-y) E1(y) style integral by quadrature."""

    model = pair(
        dist.Exponential(torch.tensor(1.0)),
        lambda z: dist.Uniform(torch.zeros_like(z), z, validate_args=False),
    )
    z = torch.linspace(1, 40, 400_001, dtype=torch.float64)
    exact = torch.trapezoid((-z).exp() / z, z).log().item()
    result = anneal(model, None, torch.tensor(1.0), num_chains=2000, num_temperatures=10)
    dead = (result.log_weights == -torch.inf).float().mean()
    assert abs(dead - (1 - math.exp(-1))) < 0.04  # 3.7 standard errors
    check(result, exact)


def test_leaves_everything_as_it_was():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))

        def forward(self, y):
            mu = pyro.sample("mu", dist.Normal(pyro.param("prior", torch.tensor(0.0)), 1.0))
            pyro.sample("y", dist.Normal(mu + self.layer(torch.ones(1))[0], 1.0), obs=y)

    model = Model()
    with poutine.trace() as outside:
        result = anneal(model, None, torch.tensor(1.0), num_chains=4, num_temperatures=4)
    assert list(outside.trace.nodes) == []
    assert result.log_weights.shape == (4,) and not result.log_weights.requires_grad
    assert model.training and model.layer[1].training and model.layer[0].weight.grad is None
    assert not pyro.get_param_store().keys()


def test_single_chain():
    result = anneal(
        conjugate_normal, None, torch.randn(3), num_chains=1, num_temperatures=3, progress=True
    )
    assert result.log_evidence == result.log_weights[0] and result.log_evidence_error == math.inf


# ---- what is refused

ONE = torch.ones(3)
UNIT = dist.Normal(0.0, 1.0)
REAL = dist.constraints.real


def test_improper_prior_starts_from_a_guide():
    model = pair(dist.ImproperUniform(REAL, (), ()))
    check(anneal(model, lambda y: pyro.sample("z", dist.Normal(0.0, 2.0)), torch.tensor(1.0)), 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_chains": 0}, "num_chains to be at least 1"),
        ({"num_temperatures": 1}, "num_temperatures >= 2"),
        ({"num_leapfrog_steps": 0}, "num_leapfrog_steps to be at least 1"),
        ({"step_size": 0.0}, "step_size > 0"),
        ({"target_acceptance": 1.0}, "target_acceptance between 0 and 1"),
        ({"chunk_size": 0}, "chunk_size to be at least 1"),
        ({"conditional_ess": 0.9}, "conditional_ess between 0 and 1, with resample=True"),
        (
            {"conditional_ess": 1.0, "resample": True},
            "conditional_ess between 0 and 1, with resample=True",
        ),
        ({"observations": {"x": ONE}}, "the model's sites.*'x'"),
        ({"observations": {"y": torch.ones(4)}}, r"site 'y' of shape \(3,\)"),
        ({"observations": {"y": torch.ones(0, 3)}}, "'y'"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        anneal(conjugate_normal, None, ONE, **{"num_temperatures": 3, **options})


def sums_over_chains(y):
    with pyro.plate("data", 3):
        z = pyro.sample("z", UNIT)
    pyro.sample("y", dist.Normal(z.sum() + 0.0 * float(z.sum()), 1.0), obs=y[0])


def on_the_edge(y):
    z = pyro.sample("z", UNIT)
    pyro.sample(
        "u", dist.TransformedDistribution(dist.Normal(z, 1e4), dist.transforms.ExpTransform())
    )
    pyro.sample("y", dist.Normal(z, 1.0), obs=y[0])


def around_the_sum(prior):
    return pair(prior, lambda z: dist.Normal(z.sum(), 1.0))


def with_a_factor(y):
    pyro.factor("f", 2 * pyro.sample("mu", UNIT))


def with_another_latent(y):
    conjugate_normal_guide(y)
    pyro.sample("other", UNIT)


def reading_nan(y, observations):
    pyro.sample("mu", dist.Normal(observations["y"].sum(), 1.0))


THREE, DIFFUSE, FIRST = dist.Normal(torch.zeros(3), 1.0), dist.ImproperUniform(REAL, (), ()), ONE[0]
infinite = pair(UNIT, lambda z: dist.Normal(z * math.nan, 1.0, validate_args=False))


@pytest.mark.parametrize(
    ("model", "y", "error", "message"),
    [
        (
            around_the_sum(dist.Bernoulli(0.5)),
            FIRST,
            NotImplementedError,
            "site 'z' .Bernoulli. is discrete",
        ),
        (
            around_the_sum(dist.ProjectedNormal(ONE)),
            FIRST,
            NotImplementedError,
            "bijection.*site 'z'",
        ),
        (around_the_sum(DIFFUSE), FIRST, NotImplementedError, "can be sampled; got 'z'"),
        (subsampled, ONE, NotImplementedError, "plate 'data' holds 2 of 3"),
        (
            poutine.scale(conjugate_normal, 2.0),
            ONE,
            NotImplementedError,
            "no scale at the latent 'mu'",
        ),
        (lambda y: pyro.sample("y", UNIT, obs=y), FIRST, ValueError, "latent sites"),
        (
            pair(THREE, lambda z: dist.Normal(z, 1.0).to_event(1)),
            ONE,
            ValueError,
            r"site 'z' .* got \(3,\)",
        ),
        (sums_over_chains, ONE, ValueError, "batch dims.*site 'y'"),
        (
            pair(THREE.to_event(1), lambda z: dist.Normal(float(z[2]), 1.0)),
            FIRST,
            ValueError,
            "batch dims",
        ),
        (infinite, FIRST, ValueError, "finite log density at site 'y'"),
        (on_the_edge, ONE, ValueError, "site 'u' in its support"),
        (
            pair(UNIT, lambda z: dist.Gamma(z.exp(), 1.0)),
            -FIRST,
            ValueError,
            "site 'y' in its support",
        ),
    ],
)
def test_models_that_cannot_be_annealed(model, y, error, message):
    with pytest.raises(error, match=message):
        anneal(model, None, y, num_temperatures=3)


@pytest.mark.parametrize(
    ("guide", "error", "message"),
    [
        (AutoNormal(conjugate_normal), ValueError, "density at every latent, .*; got none at 'mu'"),
        (with_a_factor, NotImplementedError, "the factor 'f'"),
        (reading_nan, ValueError, "site 'mu' in its support"),
        (with_another_latent, ValueError, "'mu', and no other; got 'other'"),
    ],
)
def test_guides_that_cannot_start_a_path(guide, error, message):
    given = {"observations": {"y": ONE * math.nan}} if guide is reading_nan else {}
    with pytest.raises(error, match=message):
        anneal(conjugate_normal, guide, ONE, num_temperatures=3, **given)


def test_masked_latents_are_refused_with_a_guide():
    with pytest.raises(NotImplementedError, match="latent 'mu'"):
        anneal(poutine.mask(conjugate_normal, torch.tensor(False)), conjugate_normal_guide, ONE)


def test_draws_on_the_edge_are_found_without_validation():
    with (
        pyro.validation_enabled(False),
        pytest.raises(ValueError, match="site 'u' inside its support"),
    ):
        anneal(on_the_edge, None, ONE, num_temperatures=3)
