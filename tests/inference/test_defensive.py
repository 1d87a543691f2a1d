"""Draws of the prior among the guide's: bounded weights, and modes that the guide misses, against exact evidence."""

import math
import warnings
from functools import partial
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import eight_schools, eight_schools_data

from pyro_nami import AutoNaMIGuide
from pyro_nami.amortize import AmortizedPosterior
from pyro_nami.annealing import annealed_importance_sampling
from pyro_nami.inference import History, importance_sample

SD = 0.3
DATA = torch.tensor([1.5, 2.0])


def folded(observations=None):
    with pyro.plate("rows", 1):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z.abs(), SD), obs=DATA[:1])


def one_mode(observations):
    """The posterior but for the mode below zero, and for what is cut at zero."""
    share = 1 / (1 + SD**2)
    with pyro.plate("rows", 1):
        pyro.sample("z", dist.Normal(observations["x"] * share, SD * share**0.5))


def evidence():
    """log p(x) in nats, on a fine grid."""
    grid = torch.linspace(-8.0, 8.0, 8001)[:, None]
    joint = dist.Normal(0.0, 1.0).log_prob(grid) + dist.Normal(grid.abs(), SD).log_prob(DATA)
    return joint.logsumexp(0) + math.log(16.0 / 8000)


OBSERVED = {"x": DATA[:, None]}


def test_a_mode_that_the_guide_misses_is_found_by_draws_of_the_prior():
    draw = {"num_samples": 20_000, "observations": OBSERVED, "chunk_size": 6000}
    plain = importance_sample(folded, one_mode, **draw)
    assert (plain.pareto_k < 0.7).all()  # nothing shows that half of the evidence is missed
    assert (evidence() - plain.log_evidence > 0.5).all()
    with pytest.warns(UserWarning, match="unreliable"):  # two kinds of draws, and so of weights
        found = importance_sample(folded, one_mode, **draw, defensive=0.1)
    assert found.samples["z"].shape == (20_000, 2, 1)
    assert ((found.log_evidence - evidence()).abs() < 4 * found.log_evidence_error).all()
    assert (found.log_evidence_error < 0.05).all()
    assert (found.effective_sample_size < 0.3 * plain.effective_sample_size).all()
    below = (found.log_weights.softmax(0) * found.samples["z"][..., 0].lt(0)).sum(0)
    assert torch.allclose(below, torch.tensor(0.5), atol=0.06)


def test_no_weight_is_above_the_likelihood_by_the_share():

    def narrow(observations):
        with pyro.plate("rows", 1):
            pyro.sample("z", dist.Normal(observations["x"], 0.01))

    most = -math.log(SD * math.sqrt(2 * math.pi))
    given = {"num_samples": 2000, "observations": OBSERVED}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = importance_sample(folded, narrow, **given, defensive=0.25).log_weights
        assert (weights <= most + math.log(4) + 1e-4).all()
        # One draw of ten at least: its share is what they are weighted by.
        rounded = importance_sample(
            folded, narrow, num_samples=10, observations=OBSERVED, defensive=0.001
        )
        assert (rounded.log_weights <= most + math.log(10) + 1e-4).all()


def test_a_guide_without_a_density_far_out_draws_nothing_there():
    class Guide:
        def __call__(self, observations):
            one_mode(observations)

        def log_prob(self, latents, observations):
            share = 1 / (1 + SD**2)
            z = latents["z"]
            log_q = dist.Normal(observations["x"] * share, SD * share**0.5).log_prob(z).sum(-1)
            return torch.where(z[..., 0] < -1.0, torch.nan, log_q)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = importance_sample(
            folded, Guide(), num_samples=20_000, observations=OBSERVED, defensive=0.1
        )
    assert ((found.log_evidence - evidence()).abs() < 4 * found.log_evidence_error).all()


def test_chains_that_start_from_the_prior_find_the_mode():
    options = {
        "num_chains": 2000,
        "num_temperatures": 20,
        "num_leapfrog_steps": 3,
        "observations": OBSERVED,
    }
    for resample in (False, True):
        plain = annealed_importance_sampling(folded, one_mode, **options, resample=resample)
        found = annealed_importance_sampling(
            folded, one_mode, **options, resample=resample, defensive=0.2
        )
        assert (evidence() - plain.log_evidence > 0.5).all()
        assert torch.allclose(found.log_evidence, evidence(), atol=0.15)
        z = found.weighted().resample(2000)["z"]
        assert torch.allclose(z.lt(0).float().mean(0), torch.tensor(0.5), atol=0.1)


def test_models_that_are_run_draw_by_draw():
    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(1.0 if z.item() > 0 else 0.0, 1.0), obs=torch.tensor(1.0))

    def guide():
        pyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.warns(UserWarning, match="one by one"):
        found = importance_sample(model, guide, num_samples=300, defensive=0.3)
    expected = (
        0.5 * dist.Normal(torch.tensor([0.0, 1.0]), 1.0).log_prob(torch.tensor(1.0)).exp().sum()
    )
    assert abs(found.log_evidence - expected.log()) < 4 * found.log_evidence_error
    assert abs(found.log_evidence_error) < 0.05


def test_a_share_outside_of_zero_and_one_is_refused():
    for sampler in (importance_sample, annealed_importance_sampling):
        for share in (-0.1, 1.0):
            count = {"num_samples": 10} if sampler is importance_sample else {"num_chains": 10}
            with pytest.raises(ValueError, match="defensive to be a share of the draws"):
                sampler(folded, one_mode, observations=OBSERVED, **count, defensive=share)


def test_posteriors_find_modes_that_learned_guides_miss():
    guide = partial(one_mode)
    guide.rules = {"z": SimpleNamespace(rule="learned")}
    posterior = AmortizedPosterior(folded, (), {}, guide, History())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, alone = posterior(OBSERVED, 2000), posterior(OBSERVED, 2000, defensive=0)
    assert torch.allclose(found.log_evidence, evidence(), atol=0.3)
    assert (found.resample(2000)["z"].lt(0).float().mean(0) - 0.5).abs().max() < 0.15
    assert (found.effective_sample_size > 1000).all()  # they were annealed
    assert (evidence() - alone.log_evidence > 0.5).all()
    guide.rules = {"z": SimpleNamespace(rule="exact")}
    assert (evidence() - posterior(OBSERVED, 2000).log_evidence > 0.5).all()


def test_eight_schools_has_the_same_evidence_with_and_without():
    y, sds = eight_schools_data()
    guide = AutoNaMIGuide(eight_schools)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guide(y, sds)
        found = importance_sample(eight_schools, guide, y, sds, num_samples=20_000, defensive=0.3)
    assert abs(found.log_evidence + 31.3113) < 4 * found.log_evidence_error
    assert found.log_evidence_error < 0.1
