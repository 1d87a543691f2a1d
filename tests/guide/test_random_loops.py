"""Random loops: what is read, densities against dense algebra or enumeration, particles, a step, predictions."""

import itertools
import random

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.optim import Adam

from pyro_nami import AutoNaMIGuide

STEPS = 9
SEEDS = range(8)


class Loop:
    """A random loop of Normal states: lags, several states a step, a plate, gaps, data that are read again."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.lag = draw.choice([1, 1, 2, 3])
        self.states = draw.choice([1, 1, 2])
        self.size = draw.choice([1, 1, 2])  # of each state
        self.in_plate = draw.random() < 0.3
        self.gaps = draw.random() < 0.3
        self.feeds_back = draw.random() < 0.3
        self.data = draw.choice(["Normal", "Normal", "Poisson", "Bernoulli"])
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = 0.5 * torch.randn(self.states, self.states, generator=self.generator)
        self.is_gaussian = self.data == "Normal"
        self.is_single = self.states * self.size == 1

    def __call__(self, y):
        with pyro.plate("series", 3) if self.in_plate else poutine.scale(scale=1.0):
            self.run(y)

    def state(self, name, loc):
        fn = dist.Normal(loc, 0.6)
        return pyro.sample(name, fn.to_event(1) if self.size > 1 else fn)

    def run(self, y):
        zero = torch.zeros(self.size) if self.size > 1 else torch.zeros(())
        history = [[zero] * self.states for _ in range(self.lag)]
        before = torch.zeros(())
        for t in range(STEPS):
            now = []
            for i in range(self.states):
                loc = sum(w * z for w, z in zip(self.weights[i], history[-self.lag]))
                if self.feeds_back:
                    loc = loc + 0.2 * (before.unsqueeze(-1) if self.size > 1 else before)
                now.append(self.state(f"z{i}_{t}", loc))
            history.append(now)
            total = sum(now)
            total = total.sum(-1) if self.size > 1 else total
            if not (self.gaps and t % 3 == 1):
                before = pyro.sample(f"y_{t}", self.datum(total), obs=y[t])

    def datum(self, total):
        if self.data == "Poisson":
            return dist.Poisson((total / 2).exp())
        if self.data == "Bernoulli":
            return dist.Bernoulli(logits=total)
        return dist.Normal(total, 0.8)

    def draws(self):
        """Returns data, one number a step, for each series if there are several."""
        shape = (STEPS, 3) if self.in_plate else (STEPS,)
        noise = torch.randn(shape, generator=self.generator, dtype=torch.get_default_dtype())
        if self.data == "Poisson":
            return noise.exp().round()
        return (noise > 0).to(noise) if self.data == "Bernoulli" else noise


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def total(trace):
    trace.compute_log_prob()
    sites = [site for site in trace.nodes.values() if site["type"] == "sample"]
    return sum(site["log_prob"].sum() for site in sites)


@pytest.mark.parametrize("seed", SEEDS)
def test_laws(seed):
    model = Loop(seed)
    y = model.draws()
    guide = AutoNaMIGuide(model)
    draw = guide(y)
    states = guide._plan.loops.states
    assert len(states) == 1
    assert set(draw) == {f"z{i}_{t}" for i in range(model.states) for t in range(STEPS)}
    assert {note.rule for note in guide.rules.values()} == {
        "exact" if model.is_gaussian else "newton"
    }
    shapes = {name: value.shape for name, value in draw.items()}

    def named(x):
        parts = x.split([shape.numel() for shape in shapes.values()], -1)
        return {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts)}

    trace = poutine.trace(guide).get_trace(y)
    values = {name: trace.nodes[name]["value"].detach() for name in draw}
    torch.testing.assert_close(guide.log_prob(values, y), total(trace).detach())
    if model.is_gaussian:

        def height(x):
            return total(poutine.trace(poutine.condition(model, named(x))).get_trace(y))

        at = torch.cat([value.detach().flatten() for value in draw.values()])
        precision = -torch.autograd.functional.hessian(height, at)
        mean = at + torch.linalg.solve(precision, torch.autograd.functional.jacobian(height, at))
        whole = dist.MultivariateNormal(mean, precision_matrix=precision)
        x = whole.mean + 2 * (whole.sample() - whole.mean)
        torch.testing.assert_close(guide.log_prob(named(x), y), whole.log_prob(x))
    else:
        gaps = []
        for _ in range(50):
            drawn = poutine.trace(guide).get_trace(y)
            joint = poutine.trace(poutine.replay(model, drawn)).get_trace(y)
            gaps.append(total(joint) - total(drawn))
        assert torch.stack(gaps).std() < 1.0  # nats


@pytest.mark.parametrize("seed", SEEDS[::4])
def test_particles_steps_and_predictions(seed):
    model = Loop(seed)
    y = model.draws()
    pyro.clear_param_store()
    guide = AutoNaMIGuide(model)
    nesting = 1 if model.in_plate else 0
    losses = []
    for vectorized in (False, True):
        elbo = Trace_ELBO(20, vectorize_particles=vectorized, max_plate_nesting=nesting)
        losses.append(SVI(model, guide, Adam({"lr": 0.01}), elbo).step(y))
    assert abs(losses[0] - losses[1]) < (1e-6 if model.is_gaussian else 1.5)
    found = Predictive(model, guide=guide, num_samples=4)(y)
    assert found["z0_3"].shape[0] == 4
    assert found["z0_3"].isfinite().all()


@pytest.mark.parametrize("seed", range(4))
def test_discrete_states(seed):
    generator = torch.Generator().manual_seed(seed)
    count = 2 + seed % 3
    turns = torch.rand(count, count, generator=generator, dtype=torch.float64) + 0.05
    turns = turns / turns.sum(-1, keepdim=True)
    means = 2 * torch.randn(count, generator=generator, dtype=torch.float64)
    kept = [t for t in range(STEPS) if seed % 2 == 0 or t % 3]

    def model(y):
        x = 0
        for t in range(STEPS):
            x = pyro.sample(f"x_{t}", dist.Categorical(turns[x]))
            if t in kept:
                pyro.sample(f"y_{t}", dist.Normal(means[x], 1.0), obs=y[t])

    y = torch.randn(STEPS, generator=generator, dtype=torch.float64)
    guide = AutoNaMIGuide(model)
    guide(y)
    assert guide.rules["x[time]"].rule == "exact"
    trace = poutine.trace(guide).get_trace(y)
    told = total(poutine.trace(poutine.replay(model, trace)).get_trace(y)) - total(trace)
    # the density of the data, by the sum over all states
    every = torch.tensor(list(itertools.product(range(count), repeat=STEPS)))
    before = torch.cat((torch.zeros(len(every), 1, dtype=torch.long), every[:, :-1]), 1)
    prior = turns[before, every].log().sum(1)
    data = dist.Normal(means[every[:, kept]], 1.0).log_prob(y[kept]).sum(1)
    torch.testing.assert_close(told, (prior + data).logsumexp(0), rtol=0, atol=1e-6)
