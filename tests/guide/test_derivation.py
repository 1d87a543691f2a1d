"""What depends on the data of training alone is derived once, and anew where it depends on more."""

from __future__ import annotations

import math
import types

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam

from pyro_nami import AutoNaMIGuide

pytestmark = pytest.mark.filterwarnings("error")

X = torch.tensor([-1.0, 0.0, 1.0, 2.0, 3.0])
COUNTS = torch.tensor([1.0, 0.0, 2.0, 5.0, 9.0])
LABELS = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])


def coin(y):
    bias = pyro.sample("bias", dist.Beta(1.0, 1.0))
    with pyro.plate("flips", len(y)):
        pyro.sample("y", dist.Bernoulli(bias), obs=y)


def counts(y):
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("hours", len(y)):
        pyro.sample("y", dist.Poisson(rate), obs=y)


def labels(y):
    with pyro.plate("slopes", 3):
        slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(y)):
        logits = slope[..., 0:1] + X * slope[..., 1:2] + X.sin() * slope[..., 2:3]
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def cause(y):
    rains = pyro.sample("rains", dist.Bernoulli(0.3))
    with pyro.plate("streets", len(y)):
        pyro.sample("y", dist.Bernoulli(0.2 + 0.7 * rains), obs=y)


def runs_of(model, y, steps=6):
    """Returns the runs of the model in each step of SVI."""
    found, runs = [], types.SimpleNamespace(count=0)

    def counted(y):
        runs.count += 1
        model(y)

    guide = AutoNaMIGuide(counted)
    svi = SVI(counted, guide, Adam({"lr": 0.01}), Trace_ELBO())
    for _ in range(steps):
        runs.count = 0
        svi.step(y)
        found.append(runs.count)
    return found, guide


@pytest.mark.parametrize(
    ("model", "y"), [(coin, LABELS), (counts, COUNTS), (labels, LABELS), (cause, LABELS)]
)
def test_a_step_runs_the_model_for_its_draw_alone(model, y):
    runs, guide = runs_of(model, y)
    assert all(note.rule in ("exact", "newton") for note in guide.rules.values())
    assert runs[3:] == [1, 1, 1]


def test_draws_are_as_random_whether_conditionals_are_kept_or_not():
    guide = AutoNaMIGuide(labels)
    guide(LABELS)
    pyro.set_rng_seed(1)
    first = [guide(LABELS)["slope"] for _ in range(3)]
    guide._reader.memory.forget_derived()
    pyro.set_rng_seed(1)
    torch.testing.assert_close([guide(LABELS)["slope"] for _ in range(3)], first)


def test_they_follow_what_a_model_reads_besides_its_arguments():
    prior = types.SimpleNamespace(pseudo=torch.tensor(1.0))

    def model(y):
        bias = pyro.sample("bias", dist.Beta(prior.pseudo, 1.0))
        with pyro.plate("flips", len(y)):
            pyro.sample("y", dist.Bernoulli(bias), obs=y)

    guide = AutoNaMIGuide(model)
    for pseudo in (1.0, 50.0, 1.0):
        prior.pseudo = torch.tensor(pseudo)
        for _ in range(2):
            with torch.no_grad():
                fn = pyro.poutine.trace(guide).get_trace(LABELS).nodes["bias"]["fn"]
            assert fn.mean.item() == pytest.approx((pseudo + 3) / (pseudo + 6), rel=1e-4)


def test_they_follow_arguments_that_change_from_step_to_step():
    """As a weight of the likelihood does that grows in training."""

    def model(y, weight):
        bias = pyro.sample("bias", dist.Beta(1.0, 1.0))
        with pyro.plate("flips", len(y)), pyro.poutine.scale(scale=weight):
            pyro.sample("y", dist.Bernoulli(bias), obs=y)

    guide = AutoNaMIGuide(model)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    for weight in (0.1, 0.1, 0.5, 1.0, 1.0, 1.0):
        loss = svi.step(LABELS, weight)
        heads, tails = 1 + 3 * weight, 1 + 2 * weight
        evidence = math.lgamma(heads) + math.lgamma(tails) - math.lgamma(heads + tails)
        assert loss == pytest.approx(-evidence, abs=1e-3)


def test_they_are_derived_anew_where_the_model_learns_parameters():
    def model(y):
        pseudo = pyro.param("pseudo", torch.tensor(1.0), constraint=dist.constraints.positive)
        bias = pyro.sample("bias", dist.Beta(pseudo, 1.0))
        with pyro.plate("flips", len(y)):
            pyro.sample("y", dist.Bernoulli(bias), obs=y)

    heads, guide = torch.ones(5), AutoNaMIGuide(model)
    svi = SVI(model, guide, Adam({"lr": 0.05}), Trace_ELBO())
    losses = [svi.step(heads) for _ in range(60)]
    pseudo = pyro.param("pseudo").item()
    fn = pyro.poutine.trace(guide).get_trace(heads).nodes["bias"]["fn"]
    assert pseudo > 2 and fn.mean.item() == pytest.approx((pseudo + 5) / (pseudo + 6), rel=1e-4)
    # of an exact posterior each loss is minus the log evidence, B(pseudo + 5, 1) / B(pseudo, 1)
    assert losses[-1] == pytest.approx(math.log((pseudo + 5) / pseudo), abs=0.02)


def test_they_follow_parameters_that_the_model_detaches():
    def model(y):
        pseudo = pyro.param("pseudo", torch.tensor(1.0), constraint=dist.constraints.positive)
        bias = pyro.sample("bias", dist.Beta(pseudo.detach(), 1.0))
        with pyro.plate("flips", len(y)):
            pyro.sample("y", dist.Bernoulli(bias), obs=y)
        pyro.factor("penalty", -(pseudo - 5).square())

    guide = AutoNaMIGuide(model)
    svi = SVI(model, guide, Adam({"lr": 0.1}), Trace_ELBO())
    for _ in range(60):
        svi.step(LABELS)
    pseudo = pyro.param("pseudo").item()
    with torch.no_grad():
        fn = pyro.poutine.trace(guide).get_trace(LABELS).nodes["bias"]["fn"]
    assert pseudo > 3 and fn.mean.item() == pytest.approx((pseudo + 3) / (pseudo + 6), rel=1e-4)


def test_a_step_has_the_gradient_of_a_guide_that_derives_anew():
    guides = [AutoNaMIGuide(labels), AutoNaMIGuide(labels)]
    found = []
    for kept, guide in zip((True, False), guides):
        pyro.clear_param_store()
        svi = SVI(labels, guide, Adam({"lr": 0.01}), Trace_ELBO())
        losses = []
        for seed in range(5):
            pyro.set_rng_seed(seed)
            losses.append(svi.step(LABELS))
            if not kept:
                guide._reader.memory.forget_derived()
        found.append(torch.tensor(losses))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_it_costs_no_posterior_of_others():
    pyro.set_rng_seed(0)
    plain, guide = AutoNormal(coin), AutoNaMIGuide(coin)
    for each in (plain, guide):
        svi = SVI(coin, each, Adam({"lr": 0.01}), Trace_ELBO(4, vectorize_particles=True))
        for _ in range(4):
            svi.step(LABELS)
    sizes = [Trace_ELBO(count, vectorize_particles=True) for count in (1, 7)]
    losses = [elbo.loss(coin, guide, LABELS) for elbo in sizes]
    evidence = float(torch.tensor([4.0, 3.0]).lgamma().sum() - torch.tensor(7.0).lgamma())
    assert losses == pytest.approx([-evidence] * 2, abs=1e-3)
