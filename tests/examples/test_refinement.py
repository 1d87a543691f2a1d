"""Learned refinement: gradients and adjoints against autograd, optima against linear-Gaussian algebra."""

import copy
import math
import sys

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import steps
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from scripts import ROOT

from pyro_nami import AutoNaMIGuide

sys.path += [str(ROOT / "examples" / folder) for folder in ("iterative", "noisy_or")]

from refinement import (  # noqa: E402
    AutoIterativeGuide,
    IterativeELBO,
    amortization_gap,
    optimize_directly,
)
from refinement.estimates import run_at  # noqa: E402

SCALE = 0.5
W = torch.tensor([[1.0, 0.4], [-0.5, 1.2], [0.8, 0.7], [0.2, -0.9]])
COVARIANCE = W @ W.T + SCALE**2 * torch.eye(4)
PRECISION = torch.eye(2) + W.T @ W / SCALE**2  # of z given x


def data(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, generator=generator) @ W.T + SCALE * torch.randn(
        n, 4, generator=generator
    )


def model(x):
    with pyro.plate("n", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z @ W.T, SCALE).to_event(1), obs=x)


def made(of=model, *, steps=3, base=None, **options):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    base = {"exact": False, **(base or {})}
    return AutoIterativeGuide(
        AutoNaMIGuide(of, **base), steps=steps, hidden_features=(16,), **options
    )


def trained(of, guide, x, *, steps, rate=5e-3, batch=64):
    elbo = IterativeELBO(Trace_ELBO())
    svi = SVI(of, guide, pyro.optim.ClippedAdam({"lr": rate, "lrd": 0.1 ** (1 / steps)}), elbo)
    for _ in range(steps):
        svi.step(x[torch.randint(len(x), (batch,))])
    return guide


def random_updaters(guide, *args):
    """Lets an untrained guide's networks do something."""
    guide(*args)
    with torch.no_grad():
        for parameter in guide.updaters.parameters():
            parameter += 0.2 * torch.randn_like(parameter)


# ---- steps


def test_no_steps_are_the_guide_itself():
    guide, x = made(steps=0), data(5)
    guide(x)
    pyro.set_rng_seed(1)
    found = guide(x)["z"]
    pyro.set_rng_seed(1)
    assert torch.equal(found, guide.guide(x)["z"])


def test_steps_that_are_not_trained_change_nothing():
    guide, x = made(), data(5)
    assert all((value == 0).all() for value in guide.trajectory(x).estimates[-1].values())


def test_the_gradient_of_a_step_is_that_of_the_elbo():
    """By the closed form of the ELBO of independent Normals, through draws that are many."""
    guide, x = made(base={"within": "independent"}), data(3)
    call, (estimate,), *_ = guide.trajectory(x, steps=0)
    leaves = {name: value.clone().requires_grad_() for name, value in estimate.items()}
    (found,) = torch.autograd.grad(guide.elbo(call, leaves, 20_000), [*leaves.values()])
    draws = []
    for step in (0.0, 1e-3):  # of both elements' locations, with the same noise
        pyro.set_rng_seed(1)
        with guide.holding(
            call, {name: value + torch.tensor([step, 0.0]) for name, value in estimate.items()}
        ):
            q = poutine.trace(guide).get_trace(x).nodes["z"]["fn"]
        pyro.set_rng_seed(2)
        draws.append(q.rsample((4000,)))
    mean, moved = (each.mean(0) for each in draws)
    slope = (x - mean @ W.T) @ W / SCALE**2 - mean  # of the ELBO by the mean
    torch.testing.assert_close(found[..., 0], slope * (moved - mean) / 1e-3, rtol=0.05, atol=0.1)


def test_instances_do_not_see_each_other():
    guide, x = made(), data(6)
    random_updaters(guide, x)
    other = x.clone()
    other[3] += 5.0
    found = []
    for each in (x, other):
        pyro.set_rng_seed(2)
        found.append(guide.trajectory(each).estimates[-1]["z"])
    same = (found[0] == found[1]).flatten(1).all(1)
    assert same.tolist() == [True, True, True, False, True, True]


def test_refining_ends_at_the_exact_posterior_of_a_linear_gaussian_model_and_stays():
    x = data(200)
    evidence = dist.MultivariateNormal(torch.zeros(4), COVARIANCE).log_prob(x).mean()
    lost = 0.5 * (PRECISION.diagonal().log().sum() - torch.logdet(PRECISION))  # by independence
    for base, best in (
        ({}, evidence),
        ({"inverse": "mean_field", "within": "independent"}, evidence - lost),
    ):
        guide = trained(model, made(base=base), x, steps=250)
        found = guide.refine(x, steps=15, num_particles=50) / len(x)
        assert found[0] < found[3] < best + 0.01 and best - 0.05 < found[3], (found, best)
        assert (found[3:] > found.max() - 0.02).all(), found


def test_models_with_levels_and_plates_of_their_own():
    def levels(x):
        with pyro.plate("n", len(x)):
            top = pyro.sample("top", dist.Normal(0.0, 1.0))
            low = pyro.sample(
                "low", dist.Normal(top.unsqueeze(-1) * torch.ones(3), 0.5).to_event(1)
            )
            pyro.sample("x", dist.Normal(low, 0.3).to_event(1), obs=x)

    x = torch.randn(4, 3)
    for encode in ("gradients", "errors"):
        guide = made(levels, encode=encode)
        random_updaters(guide, x)
        trajectory = guide.trajectory(x)
        assert {name: value.shape for name, value in trajectory.estimates[-1].items()} == {
            "low": (4, 3, 2),
            "top": (4, 1, 2),
        }
        assert guide(x)["low"].shape == (4, 3)


def test_particles_and_predictive_see_an_ordinary_guide():
    guide, x = made(), data(5)
    elbo = Trace_ELBO(num_particles=7, vectorize_particles=True)
    assert math.isfinite(SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), elbo).step(x))
    assert Predictive(model, guide=guide, num_samples=4, parallel=True)(x)["z"].shape[0] == 4


def test_steps_beyond_the_trained_ones_average():
    guide, x = made(steps=2, inputs=()), data(5)
    random_updaters(guide, x)
    found = guide.trajectory(x, steps=5)
    for step, gain in ((2, 1 / 2), (3, 1 / 3), (4, 1 / 4)):
        whole = guide.advance(found, step, found.estimates[step])["z"]
        before = found.estimates[step]["z"]
        torch.testing.assert_close(found.estimates[step + 1]["z"], before + gain * (whole - before))


# ---- training


class Seeded(Trace_ELBO):
    """Draws the same in every loss."""

    def differentiable_loss(self, *args, **kwargs):
        pyro.set_rng_seed(5)
        return super().differentiable_loss(*args, **kwargs)


@pytest.mark.parametrize("average", [True, False])
def test_gradients_taken_back_step_by_step_are_those_of_the_whole(average):
    bias = torch.tensor(0.3)

    def shifted(x):
        shift = pyro.param("shift", bias.clone())
        with pyro.plate("n", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z @ W.T + shift, SCALE).to_event(1), obs=x)

    guide, x = made(shifted), data(6)
    random_updaters(guide, x)
    pyro.set_rng_seed(7)
    IterativeELBO(Seeded(), average=average).loss_and_grads(shifted, guide, x)
    # the guide's own leave a share of the score out, which past ones tell
    parameters = [*guide.updaters.parameters()]
    found = [parameter.grad for parameter in parameters]
    assert any(parameter.grad is not None for parameter in guide.guide.parameters())
    own = pyro.get_param_store()._params["shift"]
    model_found, own.grad = own.grad.clone(), None

    pyro.set_rng_seed(7)
    with torch.no_grad():
        whole = guide.trajectory(x)
    attached, losses = [whole.estimates[0]], []
    for step in range(guide.steps):
        attached.append(guide.advance(whole, step, attached[-1]))
    for estimate in attached:
        with guide.holding(whole.call, estimate):
            losses.append(Seeded().differentiable_loss(shifted, guide, x))
    loss = sum(losses) / len(losses) if average else losses[-1]
    expected = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    for one, other in zip(found, expected):
        torch.testing.assert_close(
            torch.zeros_like(other) if one is None else one, other, rtol=1e-4, atol=1e-4
        )
    torch.testing.assert_close(model_found, torch.autograd.grad(losses[-1], own)[0])


def test_memory_does_not_grow_with_steps(monkeypatch):
    """Of the graphs of all ELBOs, at most one is held at a time."""
    guide, x = made(steps=6), data(6)
    random_updaters(guide, x)
    held, most = set(), []
    differentiable_loss = Trace_ELBO.differentiable_loss

    def counted(*args, **kwargs):
        loss = differentiable_loss(*args, **kwargs)
        held.add(loss.grad_fn)
        loss.grad_fn.register_hook(lambda *_: held.discard(loss.grad_fn))
        most.append(len(held))
        return loss

    monkeypatch.setattr(Trace_ELBO, "differentiable_loss", counted)
    IterativeELBO(Trace_ELBO()).loss_and_grads(model, guide, x)
    assert most == [1] * 7


def test_state_copies_and_pickles():
    guide, x = made(), data(5)
    random_updaters(guide, x)
    state = guide.state_dict()
    fresh = made()
    fresh.load_state_dict(state)
    for other in (fresh, copy.deepcopy(guide)):
        pyro.set_rng_seed(3)
        found = other(x)["z"]
        pyro.set_rng_seed(3)
        torch.testing.assert_close(found, guide(x)["z"])


def test_a_second_one_in_the_store_is_told(caplog):
    x = data(5)
    with pyro.settings.context(module_local_params=False):
        random_updaters(made(), x)
        second = AutoIterativeGuide(
            AutoNaMIGuide(model, exact=False), steps=3, hidden_features=(16,)
        )
        second(x)
    assert "another guide named 'AutoIterativeGuide'" in caplog.text


# ---- errors of latent Gaussian models


def test_errors_are_those_of_the_formulas():
    guide, x = made(encode="errors"), data(4)
    guide(x)
    pyro.set_rng_seed(1)
    (code,) = guide.trajectory(x, steps=1).codes[0]
    pyro.set_rng_seed(1)
    call, (estimate,), *_ = guide.trajectory(x, steps=0)
    z = run_at(guide.guide, call, estimate, 1, None).sites["z"]["value"]
    errors = torch.cat([z, (x - z @ W.T) / SCALE**2], -1)
    torch.testing.assert_close(code[..., 6:], errors.sign() * errors.abs().log1p())


def test_errors_of_other_models_name_the_site():
    def gamma(x):
        with pyro.plate("n", len(x)):
            pyro.sample("x", dist.Gamma(2.0, pyro.sample("z", dist.Normal(0.0, 1.0)).exp()), obs=x)

    with pytest.raises(NotImplementedError, match=r"'x', Gamma. Use encode=\"gradients\""):
        made(gamma, encode="errors")(torch.ones(3))


# ---- what is left alone


def test_an_instance_without_a_finite_gradient_keeps_its_estimate():
    def root(x):
        with pyro.plate("n", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal((z * (x != 2.0)).abs().sqrt(), 1.0), obs=x)

    guide, x = made(root), torch.tensor([1.0, 2.0, 3.0])
    random_updaters(guide, x)
    guide.non_finite = 0
    with pytest.warns(
        UserWarning, match="gradients are not finite for 1 instances, which keep their estimate"
    ):
        estimate = guide.trajectory(x).estimates[-1]["z"]
    assert guide.non_finite == 3 and (estimate[1] == 0).all() and estimate.isfinite().all()


def test_discrete_latents_are_told_and_refined_by_relaxed_draws():
    def binary(x):
        with pyro.plate("n", len(x)):
            z = pyro.sample("z", dist.Bernoulli(torch.full((2,), 0.5)).to_event(1))
            pyro.sample("x", dist.Normal(z @ W.T, SCALE).to_event(1), obs=x)

    x = data(4)
    with pytest.warns(UserWarning, match="'z' is discrete, .* not refined .`temperature=`"):
        guide = made(binary)
        assert guide.trajectory(x).estimates[-1] == {}
    relaxed = made(binary, temperature=0.5)
    random_updaters(relaxed, x)
    assert (relaxed.trajectory(x).estimates[-1]["z"] != 0).all()
    assert set(relaxed(x)["z"].unique().tolist()) <= {0.0, 1.0}


def test_latents_in_no_plate_are_refined_when_asked():
    def globally(x):
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with pyro.plate("n", len(x)):
            pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(m, 1.0)), 1.0), obs=x)

    x = torch.randn(4)
    assert made(globally).trajectory(x).estimates[-1].keys() == {"z"}
    assert made(globally, global_latents=True).trajectory(x).estimates[-1].keys() == {"m", "z"}


def test_options_that_are_none():
    with pytest.raises(ValueError, match="encode to be one of 'gradients', 'errors'; got 'slopes'"):
        made(encode="slopes")
    with pytest.raises(ValueError, match="inputs among 'data', 'estimate'"):
        made(inputs=("gradient",))
    base = AutoNaMIGuide(model, exact=False)
    steps(model, base, data(3), count=1)
    with pytest.raises(ValueError, match="already trained on one data set.*mode='amortized'"):
        AutoIterativeGuide(base)


def test_plates_that_draw_their_instances_are_named():
    def subsampled(x):
        with pyro.plate("n", len(x), subsample_size=2) as rows:
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z @ W.T, SCALE).to_event(1), obs=x[rows])

    guide, x = made(subsampled), data(6)
    assert math.isfinite(
        SVI(subsampled, guide, pyro.optim.Adam({"lr": 1e-3}), Trace_ELBO()).step(x)
    )
    with pytest.raises(
        NotImplementedError, match="plates that draw some: 'n'. Give it minibatches"
    ):
        IterativeELBO(Trace_ELBO()).loss_and_grads(subsampled, guide, x)


# ---- what is lost


def test_direct_optimization_and_the_gap():
    x = data(20)
    guide = trained(
        model, made(base={"inverse": "mean_field", "within": "independent"}), x, steps=60
    )
    log_evidence = dist.MultivariateNormal(torch.zeros(4), COVARIANCE).log_prob(x)
    lost = float(0.5 * (PRECISION.diagonal().log().sum() - torch.logdet(PRECISION)))
    gap = amortization_gap(
        model, guide, x, optimizer_steps=300, num_particles=2000, num_temperatures=100
    )
    assert gap.refined.shape == (4, 20) and gap.optimized.shape == (20,)
    assert abs(float((log_evidence - gap.optimized).mean()) - lost) < 0.03
    assert abs(float((log_evidence - gap.importance).mean())) < 0.03
    assert gap.annealed[0] - 4 * gap.annealed[1] < log_evidence.sum() + 0.5
    assert f"{gap.optimized.mean():.3f}" in str(gap)
    for optimizer, rate in (("SGD", 1e-2), ("momentum", 1e-3), ("RMSProp", 1e-2)):
        path = optimize_directly(guide, x, steps=20, lr=rate, optimizer=optimizer)
        call = guide.trajectory(x, steps=0).call
        first, last = (guide.elbo(call, each, 200) for each in (path[0], path[-1]))
        assert last > first - 1.0
