"""Coverage of held-out simulations, and guides that are too narrow by a known factor."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_nami import AutoNaMIGuide, amortize
from pyro_nami.amortize import amortizing
from pyro_nami.amortize.coverage import Coverage, measured, widen
from pyro_nami.inference import Simulator

NARROW = 0.6  # standard deviation of the latents that the guide has learned from, relative to the posterior's


def model():
    z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("x", dist.Normal(z, 0.5).to_event(1))


@pytest.fixture(scope="module")
def narrow():
    """A guide that has learned posteriors that are too narrow, and simulations that it was not trained on."""
    pyro.set_rng_seed(0)
    simulator = Simulator(model, observed=["x"])
    draws, held_out = simulator.draw(2000), simulator.draw(800)
    mean = draws.observed["x"] / 1.25  # of the exact posterior
    latents = {"z": mean + NARROW * (draws.latents["z"] - mean)}
    guide = AutoNaMIGuide(model, observed=["x"], exact=False, anchor=False)
    given = draws._replace(latents=latents)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(amortizing._Training, "_checked", lambda self, best: best)
    monkeypatch.setattr(amortizing, "REFRESHED", 0)  # the latents stay where they are
    amortize(model, observed=["x"], simulations=given, steps=200, guide=guide, progress=False)
    monkeypatch.undo()
    return simulator, guide, [simulator.batch(held_out)]


def test_a_narrow_guide_is_found_and_widened_by_the_factor_that_it_lacks(narrow):
    simulator, guide, held_out = narrow
    before = measured(simulator, guide, held_out)
    inside = 2 * dist.Normal(0.0, 1.0).cdf(torch.tensor(1.645 * NARROW)) - 1
    assert before.shares["z"] == pytest.approx(float(inside), abs=0.04)
    assert before.overconfident == ["all together", "z"]
    widened = widen(guide, held_out)
    assert widened["z"] == pytest.approx(1 / NARROW, rel=0.08)
    after = measured(simulator, guide, held_out)
    assert after.shares["z"] == pytest.approx(0.9, abs=0.03) and not after.overconfident


def test_a_widened_guide_has_the_density_of_its_draws(narrow):
    """By the Normal posterior that it then has, with and without a density of its latest draw."""
    _, guide, held_out = narrow
    widen(guide, held_out)
    draws = held_out[0].draws
    exact = (
        dist.Normal(draws.observed["x"] / 1.25, 0.2**0.5).to_event(1).log_prob(draws.latents["z"])
    )
    with torch.no_grad():
        found = guide.log_prob(draws.latents, observations=draws.observed)
        assert abs(float((exact - found).mean())) < 0.1
        trace = pyro.poutine.trace(guide).get_trace(observations={"x": torch.tensor([1.0, -1.0])})
        fresh = pyro.poutine.trace(pyro.poutine.replay(guide, trace))
        again = fresh.get_trace(observations={"x": torch.tensor([1.0, -1.0])})
        value = trace.nodes["z"]["value"].clone()
        later = again.nodes["z"]["fn"].log_prob(value)
    torch.testing.assert_close(trace.log_prob_sum(), later)
    twin = copy.deepcopy(guide)
    with torch.no_grad():
        torch.testing.assert_close(twin.log_prob(draws.latents, observations=draws.observed), found)


def test_shares_are_judged_by_chance():
    assert Coverage({"z": 0.84}, 1000).overconfident == ["z"]
    assert not Coverage({"z": 0.84}, 100).overconfident
    sized = Coverage({"z": 0.9}, 900, {"small": 0.7, "large": 0.9})
    assert sized.overconfident == ["small"] and "70% at small" in str(sized)


def test_guides_of_users_that_overfit_are_trained_anew(monkeypatch):
    rates = []
    run = amortizing._Training.run

    def noted(self, guide, rate, share=1.0, decay=0.0):
        rates.append(decay)
        return run(self, guide, rate, share, decay)

    monkeypatch.setattr(amortizing._Training, "run", noted)
    monkeypatch.setattr(amortizing._Training, "_overfits", lambda self, trained: True)
    guide = AutoNaMIGuide(model, observed=["x"], exact=False, anchor=False)
    found = amortize(model, observed=["x"], simulations=60, steps=4, guide=guide, progress=False)
    assert len(rates) == 3 and rates[0] == 0 < rates[1] < rates[2]
    assert found.guide is guide
    loss = dict(found.history.validation)[found.history.best_step]
    assert loss < 10
