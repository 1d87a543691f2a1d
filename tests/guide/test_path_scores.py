"""Gradients of the ELBO by draws' paths alone: right on average, and without noise where the guide is the posterior."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam

from pyro_nami import AutoNaMIGuide
from pyro_nami.factors.path_scored import PathScored, PathShare

DATA = torch.tensor([0.5, -1.0, 2.0, 0.3])


def pair(y):
    pyro.sample("y", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 1.0), obs=y[0])


def vector(y):
    z = pyro.sample("z", dist.MultivariateNormal(torch.zeros(3), torch.eye(3) + 0.9).mask(True))
    pyro.sample("y", dist.Normal(z[..., :2].exp(), 1.0).to_event(1), obs=y[:2])


def local(y):
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("rows", 4):
        z = pyro.sample("z", dist.StudentT(4.0, 0.0, scale.clamp(min=0.05)))
        pyro.sample("y", dist.Normal(z, 0.5), obs=y)


def mixed(y):
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    kind = pyro.sample("kind", dist.Bernoulli(torch.sigmoid(z)))
    w = pyro.sample("w", dist.Normal(kind, 1.0))
    pyro.sample("y", dist.StudentT(3.0, w * z, 1.0), obs=y[0])


def counts(y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", 4):
        rate = (w[..., :1] + w[..., 1:] * torch.arange(4.0)).exp()
        pyro.sample("y", dist.Poisson(rate.clamp(max=1e4)), obs=y.abs().round())


MODELS = [
    (pair, {"exact": False}),
    (vector, {"exact": False}),
    (vector, {"exact": False, "families": "flow"}),
    (local, {"exact": False}),
    (local, {"exact": False, "inverse": "reverse"}),
    (mixed, {}),
    (counts, {}),
]


def gradients(model, guide, particles):
    """Gradients of one estimate of the loss, in one vector."""
    elbo = Trace_ELBO(num_particles=particles, vectorize_particles=True, max_plate_nesting=1)
    parameters = [p for p in guide.parameters() if p.requires_grad]
    loss = elbo.differentiable_loss(model, guide, DATA)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([each.flatten() for each in found])


def trained(model, steps=30, rate=0.02, **options):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoNaMIGuide(model, **options)
    elbo = Trace_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(model, guide, Adam({"lr": rate}), elbo)
    for _ in range(steps):
        svi.step(DATA)
    return guide


@pytest.mark.parametrize(("model", "options"), MODELS)
def test_they_are_those_of_the_whole_score_on_average(model, options, monkeypatch):
    guide = trained(model, **options)
    monkeypatch.setattr(PathShare, "now", lambda self: torch.ones(()))
    differences = []
    for seed in range(80):
        both = []
        for score_parts in (PathScored.score_parts, TorchDistribution.score_parts):
            with monkeypatch.context() as patch:
                patch.setattr(PathScored, "score_parts", score_parts)
                pyro.set_rng_seed(seed)
                both.append(gradients(model, guide, 100))
        differences.append(both[0] - both[1])
    off = torch.stack(differences).double()
    error = off.std(0) / len(off) ** 0.5
    assert (off.std(0) > 1e-4).any(), "the two estimates are the same"
    worst = (off.mean(0).abs() / (error + 1e-6)).max()
    assert worst < 5.0


@pytest.mark.parametrize(("model", "options"), MODELS)
def test_nothing_left_out_is_the_whole_score(model, options, monkeypatch):
    """Draw by draw: what was drawn before moves the density once."""
    guide = trained(model, **options)
    monkeypatch.setattr(PathShare, "now", lambda self: torch.zeros(()))
    both = []
    for score_parts in (PathScored.score_parts, TorchDistribution.score_parts):
        with monkeypatch.context() as patch:
            patch.setattr(PathScored, "score_parts", score_parts)
            pyro.set_rng_seed(1)
            both.append(gradients(model, copy.deepcopy(guide), 3))  # as averages go on
    torch.testing.assert_close(*both, rtol=1e-3, atol=1e-4)


def test_there_is_no_noise_where_the_guide_is_the_posterior(monkeypatch):
    guide = trained(pair, 600, exact=False)
    for rate in (0.003, 0.0003):
        svi = SVI(pair, guide, Adam({"lr": rate}), Trace_ELBO())
        for _ in range(300):
            svi.step(DATA)

    def noise():
        found = []
        for seed in range(30):
            pyro.set_rng_seed(seed)
            found.append(gradients(pair, guide, 1))
        return torch.stack(found).std(0).norm()

    with monkeypatch.context() as patch:
        patch.setattr(PathScored, "score_parts", TorchDistribution.score_parts)
        whole = noise()
    assert noise() < 0.02 * whole


def test_only_own_draws_are_scored_so():
    guide = trained(pair, 1, exact=False)
    fn = poutine.trace(guide).get_trace(DATA).nodes["z"]["fn"]

    def moved(log_prob):
        options = {"retain_graph": True, "materialize_grads": True, "allow_unused": True}
        found = torch.autograd.grad(log_prob, [*guide.parameters()], **options)
        return torch.cat([each.flatten() for each in found])

    for make, same in ((fn.rsample, False), (lambda: torch.tensor(0.3), True), (fn.sample, True)):
        value = make()
        parts = fn.score_parts(value)
        assert parts.score_function == 0 and torch.allclose(
            parts.log_prob, fn.log_prob(value), atol=1e-5
        )
        assert torch.equal(moved(parts.entropy_term), moved(fn.log_prob(value))) == same


def test_gradients_with_a_graph_of_their_own_leave_none_behind():
    pyro.clear_param_store()
    guide = AutoNaMIGuide(local, exact=False)
    guide(DATA)
    optimizer = torch.optim.SGD(guide.parameters(), 0.01)
    # what is kept of one step's graph would be gone through at the next, after steps in place
    for _ in range(3):
        loss = Trace_ELBO().differentiable_loss(local, guide, DATA)
        parameters = [p for p in guide.parameters() if p.requires_grad]
        options = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
        for parameter, found in zip(parameters, torch.autograd.grad(loss, parameters, **options)):
            parameter.grad = found.detach()
        optimizer.step()
    assert all(value.isfinite().all() for value in guide.parameters())
    share, ones = PathShare(), torch.ones(2, requires_grad=True)
    share.note(-ones, ones / 2)
    assert float(share.now()) == 1.0 and not share.now().requires_grad
