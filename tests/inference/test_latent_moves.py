"""Moves of simulations' latents: the joint distribution stays, and guides do not overfit latents."""

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_nami import AutoNaMIGuide, from_simulator
from pyro_nami.inference import InferenceCompilation, Simulator
from pyro_nami.inference.importance import Proposal
from pyro_nami.inference.latent_moves import LatentMoves

ROWS = torch.tensor([0.5, 1.0, 2.0])


def plated():
    """A global, a vector in a plate, and a discrete latent, all seen through noise."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 3):
        z = pyro.sample("z", dist.Normal(mu, ROWS))
        k = pyro.sample("k", dist.Bernoulli(0.3))
        pyro.sample("x", dist.Normal(z + 2 * k, 0.7))


def off(observations):
    """A guide that is wrong in all it draws."""
    x = observations["x"]
    pyro.sample("mu", dist.Normal(0.3 * x.mean(-1, keepdim=x.dim() > 1) + 0.2, 1.3))
    with pyro.plate("rows", 3):
        pyro.sample("z", dist.Normal(0.5 * x - 0.3, 1.2))
        pyro.sample("k", dist.Bernoulli(0.5))


def standardized(draws):
    """Numbers that are standard normal, and independent, if draws are the model's."""
    mu, z, k, x = (
        (draws.latents | draws.observed)["mu"],
        *((draws.latents | draws.observed)[n] for n in "zkx"),
    )
    return torch.cat((mu, (z - mu) / ROWS, (k - 0.3) / math.sqrt(0.21), (x - z - 2 * k) / 0.7), -1)


@pytest.mark.parametrize(("worth", "least", "most"), [(0.0, 0.3, 1.0), (1.0, 0.001, 1.0)])
def test_joint_draws_stay_joint_draws_whatever_the_guide(worth, least, most, monkeypatch):
    """By chains of three steps, and of one."""
    monkeypatch.setattr("pyro_nami.inference.latent_moves.WORTH", worth)
    simulator = Simulator(plated, observed=["x"])
    draws = simulator.draw(20_000)
    moves, now = LatentMoves(simulator, off, 3), draws
    for _ in range(10):
        before, now = now, moves(now)
        assert moves.moved == pytest.approx(
            (now.latents["mu"] != before.latents["mu"]).double().mean().item()
        )
    assert least < (now.latents["mu"] != draws.latents["mu"]).float().mean() <= most
    assert torch.equal(now.observed["x"], draws.observed["x"])
    assert_standard(now)


def test_few_draws_move_by_several_of_the_guide_made_at_once(monkeypatch):
    monkeypatch.setattr("pyro_nami.inference.latent_moves.FEW", 20_000)
    monkeypatch.setattr("pyro_nami.inference.latent_moves.WORTH", 0.0)
    counts, at_once = [], Proposal.at_once
    monkeypatch.setattr(
        Proposal,
        "at_once",
        lambda self, num: counts.append(num) or at_once(self, num),
    )
    simulator = Simulator(plated, observed=["x"])
    draws = simulator.draw(20_000)
    moves = LatentMoves(simulator, off, 3)
    moved = moves(draws)
    assert counts[-1] == 3 and counts.count(3) == 1
    assert_standard(moved)
    monkeypatch.setattr("pyro_nami.inference.latent_moves.FEW", 10_000)
    share = moves.moved
    moves(draws)
    assert moves.moved == pytest.approx(share, abs=0.02) and share > 0.05


def assert_standard(draws):
    u = standardized(draws)
    assert u.shape == (20_000, 10)
    bound = 5 / math.sqrt(20_000)  # five standard errors
    assert u.mean(0).abs().max() < bound
    # a square's sd is 1.41, a product's 1; k is skewed
    assert (u.T.cov() - torch.eye(10)).abs().max() < bound * 1.6
    assert (u[:, :4].abs() < 0.6745).float().mean(0).sub(0.5).abs().max() < bound / 2


def scaled():
    with poutine.scale(scale=2.0):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("x", dist.Normal(z, 1.0))


def with_factor():
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.factor("f", -z.square())
    pyro.sample("x", dist.Normal(z, 1.0))


def masked():
    z = pyro.sample("z", dist.Normal(0.0, 1.0).mask(False))
    pyro.sample("x", dist.Normal(z, 1.0))


def looped():
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("x", dist.Normal(z * float(z > 0), 1.0))


def one(observations):
    pyro.sample("z", dist.Normal(observations["x"] / 2, 1.0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", [scaled, with_factor, masked, looped])
def test_what_simulations_do_not_follow_is_left_as_it_is(model):
    simulator = Simulator(model, observed=["x"])
    draws = simulator.draw(20)
    assert LatentMoves(simulator, one, 2)(draws) is draws


def test_a_simulator_without_a_density_is_left_as_it_is():
    model = from_simulator(
        dist.Normal(torch.zeros(1), 1.0).to_event(1), lambda z: z + torch.randn_like(z)
    )
    simulator = Simulator(model, observed=["x"])
    draws = simulator.draw(20)
    guide = AutoNaMIGuide(model, observed=["x"])
    assert LatentMoves(simulator, guide, 2)(draws) is draws


def test_a_draw_at_which_the_density_underflows_moves_or_stays():
    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1e-3))

    simulator = Simulator(model, observed=["x"])
    draws = simulator.draw(100)
    draws.latents["z"].fill_(1e30)  # of density zero, as are all of the guide's but a few
    moved = LatentMoves(simulator, one, 2)(draws)
    assert moved.latents["z"].isfinite().all()


@pytest.mark.parametrize("fails", [True, False])
def test_draws_at_which_the_model_is_no_number_or_fails_are_not_taken(fails, monkeypatch):
    monkeypatch.setattr("pyro_nami.inference.latent_moves.WORTH", 0.0)

    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        if fails and z.dim() and (z.abs() > 20).any():
            raise ValueError("too far")
        pyro.sample("x", dist.Normal(torch.where(z.abs() > 20, torch.nan, z), 1.0))

    def far(observations):
        pyro.sample(
            "z",
            dist.Normal(
                observations["x"] / 2, 0.5 if len(observations["x"].reshape(-1)) < 10 else 50.0
            ),
        )

    simulator = Simulator(model, observed=["x"])
    draws = simulator.draw(200)
    moved = LatentMoves(simulator, far, 5)(draws).latents["z"]
    assert (moved.abs() < 20).all()
    assert torch.equal(moved, draws.latents["z"]) == fails


def test_what_takes_long_to_draw_moves_rarely():
    """Two latents on a grid of grids, in each of eight groups of 25 rows, take longer than steps do."""

    def model():
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        s = pyro.sample("s", dist.Uniform(0.5, 1.0))
        with pyro.plate("groups", 8):
            z = pyro.sample("z", dist.Normal(m, s))
            pyro.sample(
                "x", dist.Poisson(z.exp().unsqueeze(-1) * torch.full((25,), 0.2)).to_event(1)
            )

    simulator = Simulator(model, observed=["x"])
    draws = simulator.draw(20)
    # so that moves are accepted
    guide = AutoNaMIGuide(model, observed=["x"], rules={"s": "learned"}, init_scale=1.0)
    guide(observations={"x": draws.observed["x"][0]})
    assert {guide.rules[name].rule for name in "mz"} == {"quadrature"}
    moves, moved = LatentMoves(simulator, guide, 1), 0
    for _ in range(300):
        before, draws = draws, moves(draws)
        moved += not torch.equal(before.latents["s"], draws.latents["s"])
    assert 0 < moved < 150


def test_a_guide_that_cannot_be_checked_at_first_is_checked_again(monkeypatch):
    """As where its first draws are so far off that a batch of them has another density by rounding."""
    simulator = Simulator(plated, observed=["x"])
    draws, calls = simulator.draw(100), []
    difference = Proposal.difference

    def failing(self, num):
        calls.append(num)
        if len(calls) < 5:
            raise ValueError("too far")
        return difference(self, num)

    monkeypatch.setattr(Proposal, "difference", failing)
    moves = LatentMoves(simulator, off, 3)
    found = [moves(draws) is not draws for _ in range(6)]
    assert found == [False] * 4 + [True] * 2


def test_guides_do_not_learn_few_latents_by_heart():
    def model():
        z = pyro.sample("z", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z.cumsum(-1).sin(), 0.3).to_event(1))

    pyro.set_rng_seed(0)
    simulator = Simulator(model, observed=["x"])
    draws, test = simulator.draw(200), simulator.draw(1000)
    losses = []
    for refresh in (0, 2):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = AutoNaMIGuide(model, observed=["x"], exact=False)
        compilation = InferenceCompilation(
            model,
            guide,
            functools.partial(torch.optim.Adam, lr=0.01),
            batch_size=50,
            observed=["x"],
        )
        compilation.fit(600, data=draws, refresh=refresh, progress=False)
        with torch.no_grad():
            losses.append(-guide.log_prob(test.latents, observations=test.observed).mean())
    assert losses[1] < losses[0] - 0.3, losses


@pytest.mark.parametrize("data", [None, [{"z": torch.zeros(2), "x": torch.zeros(2)}]])
def test_only_data_given_all_at_once_are_refreshed(data):
    def model():
        pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 1.0))

    compilation = InferenceCompilation(
        model, AutoNaMIGuide(model, observed=["x"]), torch.optim.Adam, batch_size=5, observed=["x"]
    )
    with pytest.raises(ValueError, match="all at once"):
        compilation.fit(1, data=data, refresh=1)
    with pytest.raises(ValueError, match="arguments that vary"):
        compilation.fit(
            1, lambda step: ((), {}), data={"z": torch.zeros(2), "x": torch.zeros(2)}, refresh=1
        )
