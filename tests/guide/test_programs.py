"""Programs whose sites are enumerated, loop, or differ from call to call: the guide covers what Pyro's own guides do.

`PROGRAMS` holds small relatives of Pyro's examples. For each of them `SVI.step` runs over several calls with the ELBO
that the program needs, the guide's latents are those of `AutoNormal`, and the loss is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import CASES, amortized, eight_schools, scatter, steps
from pyro import poutine
from pyro.contrib.forecast import Forecaster, ForecastingModel
from pyro.infer import (
    SVI,
    JitTraceEnum_ELBO,
    Predictive,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceTMC_ELBO,
    config_enumerate,
)
from pyro.infer.autoguide import AutoNormal
from pyro.infer.reparam import (
    DiscreteCosineReparam,
    HaarReparam,
    LatentStableReparam,
    LinearHMMReparam,
    LocScaleReparam,
    SplitReparam,
    StableReparam,
    StudentTReparam,
    SymmetricStableReparam,
)
from pyro.nn import PyroModule, PyroSample
from pyro.ops.indexing import Vindex
from pyro.optim import Adam
from torch import nn

from pyro_nami import AutoNaMIGuide
from pyro_nami.parameters import group_network
from pyro_nami.parameters.conditioning import nodes_of

ENUM = {"enumerate": "parallel"}
STATES = 2
GENERATOR = torch.Generator().manual_seed(0)
NUMBERS = torch.randn(8, generator=GENERATOR)
MANY = torch.randn(40, generator=GENERATOR)
PAIRS = torch.randn(5, 2, generator=GENERATOR)
BITS = torch.bernoulli(torch.full((5, 4, 3), 0.4), generator=GENERATOR)
LENGTHS = torch.tensor([4, 2, 1, 3, 2])
HISTORY = torch.bernoulli(torch.full((7, 4), 0.5), generator=GENERATOR)
WORDS = torch.randint(0, 6, (4, 7), generator=GENERATOR)


class Program(NamedTuple):
    """A model, the arguments of a few calls, and how it is trained.

    Attributes:
        model: the model.
        calls: the arguments of each call.
        elbo: the ELBO.
        part: from the model to the part of it that the guide covers.
    """

    model: Callable
    calls: list[tuple]
    elbo: Callable = Trace_ELBO
    part: Callable = lambda model: model


def enumerating(nesting: int, **options) -> Callable:
    return lambda: TraceEnum_ELBO(max_plate_nesting=nesting, **options)


def exposed(*prefixes: str) -> Callable:
    return lambda model: poutine.block(
        model, expose_fn=lambda site: site["name"].startswith(prefixes)
    )


def hidden(*prefixes: str) -> Callable:
    return lambda model: poutine.block(
        model, hide_fn=lambda site: site["name"].startswith(prefixes)
    )


# ---- hidden Markov models: examples/hmm.py, examples/mixed_hmm


def chains(bits, lengths, batch=None):
    """Sequences one after the other."""
    trans = pyro.sample("probs_x", dist.Dirichlet(torch.ones(STATES, STATES)).to_event(1))
    emit = pyro.sample("probs_y", dist.Beta(1.0, 1.0).expand([STATES, 3]).to_event(2))
    keys = pyro.plate("keys", 3, dim=-1)
    for i in pyro.plate("sequences", len(bits), batch):
        x = 0
        for t in pyro.markov(range(lengths[i])):
            x = pyro.sample(f"x_{i}_{t}", dist.Categorical(trans[x]), infer=ENUM)
            with keys:
                pyro.sample(f"y_{i}_{t}", dist.Bernoulli(emit[x.squeeze(-1)]), obs=bits[i, t])


def batched_chains(history=1):
    """Sequences side by side, of as many steps as the longest of the batch, with two hidden states."""

    def model(bits, lengths, batch=None):
        trans = pyro.sample("probs_x", dist.Dirichlet(torch.ones(STATES, STATES)).to_event(1))
        other = pyro.sample(
            "probs_w", dist.Dirichlet(torch.ones(STATES, STATES, STATES)).to_event(2)
        )
        emit = pyro.sample("probs_y", dist.Beta(1.0, 1.0).expand([STATES, STATES, 3]).to_event(3))
        keys = pyro.plate("keys", 3, dim=-1)
        with pyro.plate("sequences", len(bits), batch, dim=-2) as rows:
            ends = lengths[rows]
            x, w = torch.tensor(0), torch.tensor(0)
            for t in pyro.markov(range(int(ends.max())), history=history):
                with poutine.mask(mask=(t < ends).unsqueeze(-1)):
                    x = pyro.sample(f"x_{t}", dist.Categorical(trans[x]), infer=ENUM)
                    w = pyro.sample(f"w_{t}", dist.Categorical(Vindex(other)[x, w]), infer=ENUM)
                    with keys as key:
                        pyro.sample(
                            f"y_{t}", dist.Bernoulli(Vindex(emit)[x, w, key]), obs=bits[rows, t]
                        )

    return model


def neural_chains():
    state, before, out = nn.Linear(STATES, 8), nn.Linear(3, 8), nn.Linear(8, 3)
    network = nn.ModuleList([state, before, out])

    def model(bits, lengths, batch=None):
        pyro.module("network", network)
        trans = pyro.sample("probs_x", dist.Dirichlet(torch.ones(STATES, STATES)).to_event(1))
        with pyro.plate("sequences", len(bits), batch, dim=-2) as rows:
            ends = lengths[rows]
            x, y = 0, torch.zeros(3)
            for t in pyro.markov(range(int(ends.max()))):
                with poutine.mask(mask=(t < ends).unsqueeze(-1)):
                    x = pyro.sample(f"x_{t}", dist.Categorical(trans[x]), infer=ENUM)
                    one_hot = torch.eye(STATES)[x.squeeze(-1)].unsqueeze(-2)
                    logits = out(torch.relu(state(one_hot) + before(y).unsqueeze(-2))).squeeze(-2)
                    with pyro.plate(f"keys_{t}", 3, dim=-1):
                        y = pyro.sample(f"y_{t}", dist.Bernoulli(logits=logits), obs=bits[rows, t])

    return model


def parallel_chains(bits, lengths, batch=None):
    """The whole sequence at one site, whose event is as long as the longest of the batch."""
    trans = pyro.sample("probs_x", dist.Dirichlet(torch.ones(STATES, STATES)).to_event(1))
    emit = pyro.sample("probs_y", dist.Beta(1.0, 1.0).expand([STATES, 3]).to_event(2))
    with pyro.plate("sequences", len(bits), batch, dim=-1) as rows:
        ends = lengths[rows]
        y = bits[rows, : int(ends.max())]
        seen = torch.arange(y.size(1)) < ends.unsqueeze(-1)
        emission = dist.Bernoulli(emit).to_event(1).mask(seen.unsqueeze(-1))
        pyro.sample("y", dist.DiscreteHMM(torch.zeros(STATES), trans.log(), emission), obs=y)


def no_latents(y):
    """All that the block exposes of it is parameters."""
    with pyro.plate("data", len(y)):
        z = pyro.sample("x", dist.Bernoulli(pyro.param("probs", torch.tensor(0.5))), infer=ENUM)
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)


def effects(y, lengths):
    """Random effects of groups and individuals in the transitions."""
    theta = pyro.sample("theta", dist.Normal(0.0, 1.0).expand([STATES, STATES]).to_event(2))
    with pyro.plate("group", y.shape[1], dim=-1):
        of_group = pyro.sample("of_group", dist.Normal(0.0, 1.0))
        with pyro.plate("individual", y.shape[0], dim=-2):
            own = pyro.sample("own", dist.Normal(0.0, 1.0))
            x = torch.tensor(0)
            for t in pyro.markov(range(y.shape[-1])):
                with poutine.mask(mask=t < lengths):
                    logits = Vindex(theta)[x] + (of_group + own).unsqueeze(-1) * torch.arange(
                        STATES
                    )
                    x = pyro.sample(f"x_{t}", dist.Categorical(logits=logits), infer=ENUM)
                    pyro.sample(f"y_{t}", dist.Normal(x.float(), 1.0), obs=y[..., t])


def recaptured(history):
    """Latents between the enumerated sites of a loop: examples/capture_recapture/cjs.py."""
    mean = pyro.sample("phi_mean", dist.Normal(0.0, 1.0))
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))
    z, seen = torch.ones(len(history)), torch.zeros(len(history), dtype=torch.bool)
    animals = pyro.plate("animals", len(history), dim=-1)
    for t in pyro.markov(range(history.shape[1])):
        phi = pyro.sample(f"phi_{t}", dist.Normal(mean, 1.0)).sigmoid() if t else torch.tensor(0.5)
        with animals, poutine.mask(mask=seen):
            alive = torch.where(seen, phi * z, torch.ones(()))
            z = pyro.sample(f"z_{t}", dist.Bernoulli(alive), infer=ENUM)
            pyro.sample(f"y_{t}", dist.Bernoulli(rho * z), obs=history[:, t])
        seen = seen | history[:, t].bool()


# ---- mixtures: examples/lda.py


def topics(words, batch=None):
    with pyro.plate("topics", 3):
        weights = pyro.sample("weights", dist.Gamma(1.0, 1.0))
        vocabulary = pyro.sample("vocabulary", dist.Dirichlet(torch.ones(6)))
    with pyro.plate("documents", 7, batch) as rows:
        shares = pyro.sample("shares", dist.Dirichlet(weights))
        with pyro.plate("words", 4):
            topic = pyro.sample("topic", dist.Categorical(shares), infer=ENUM)
            pyro.sample("word", dist.Categorical(vocabulary[topic]), obs=words[:, rows])


def mixture(y, batch=None):
    share = pyro.sample("share", dist.Beta(1.0, 1.0))
    with pyro.plate("components", 2):
        loc = pyro.sample("loc", dist.Normal(0.0, 3.0))
    with pyro.plate("data", len(y), batch) as rows:
        z = pyro.sample("z", dist.Bernoulli(share)).long()
        pyro.sample("y", dist.Normal(loc[z], 1.0), obs=y[rows])


# ---- sequential plates, and sites that differ from call to call


def one_by_one(y, batch=None, local=False):
    mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    for i in pyro.plate("data", len(y), batch):
        loc = pyro.sample(f"z_{i}", dist.Normal(mu, 1.0)) if local else mu
        with pyro.plate(f"of_{i}", 2):
            pyro.sample(f"obs_{i}", dist.Normal(loc, scale), obs=y[i].expand(2))


def enumerated_one_by_one(y, batch=None):
    share = pyro.sample("share", dist.Beta(1.0, 1.0))
    loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    for i in pyro.plate("data", len(y), batch):
        z = pyro.sample(f"z_{i}", dist.Bernoulli(share), infer=ENUM).long()
        pyro.sample(f"obs_{i}", dist.Normal(loc[z], 1.0), obs=y[i])


def tables(**columns):
    """A plate and a site for each table that a call brings."""
    mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    for name, y in columns.items():
        with pyro.plate(f"rows_{name}", len(y)):
            pyro.sample(f"y_{name}", dist.Normal(mu, 1.0), obs=y)


def series(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    last = mu
    for t in pyro.markov(range(len(y))):
        last = pyro.sample(f"y_{t}", dist.Normal(0.5 * last + mu, scale), obs=y[t])


def children(y, names):
    """Groups whose exact conditional has other children in other calls."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("groups", 8):
        theta = pyro.sample("theta", dist.Normal(mu, 1.0))
        for name in names:
            pyro.sample(f"y_{name}", dist.Normal(theta, 1.0), obs=y)


def ragged(y, lengths, batch=None):
    """A plate as long as the longest row of the batch."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y), batch, dim=-2) as rows:
        loc = pyro.sample("loc", dist.Normal(mu, 1.0))
        ends = lengths[rows].unsqueeze(-1)
        with pyro.plate("steps", int(ends.max()), dim=-1) as steps, poutine.mask(mask=steps < ends):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y[rows][:, steps])


# ---- networks in the model: examples/dmm.py, examples/vae


class DeepChain(nn.Module):
    def __init__(self):
        super().__init__()
        self.emit, self.transition = nn.Linear(2, 3), nn.Linear(2, 4)

    def forward(self, bits, lengths, annealing=1.0):
        pyro.module("chain", self)
        z = torch.zeros(len(bits), 2)
        with pyro.plate("batch", len(bits)):
            for t in pyro.markov(range(bits.shape[1])):
                loc, scale = self.transition(z).chunk(2, -1)
                seen = (t < lengths).unsqueeze(-1)
                prior = dist.Normal(loc, nn.functional.softplus(scale)).mask(seen).to_event(1)
                with poutine.scale(scale=annealing):
                    z = pyro.sample(f"z_{t}", prior)
                pyro.sample(
                    f"x_{t}",
                    dist.Bernoulli(logits=self.emit(z)).mask(seen).to_event(1),
                    obs=bits[:, t],
                )


def decoded():
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def model(y, batch=None):
        pyro.module("network", network)
        with pyro.plate("data", len(y), batch) as rows:
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(network(z).squeeze(-1), 1.0), obs=y[rows])

    return model


class Regression(PyroModule):
    def __init__(self):
        super().__init__()
        self.linear = PyroModule[nn.Linear](2, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def forward(self, x, y=None):
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", x.shape[-2]):
            return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


# ---- reparametrizations, forecasting


def walk(y):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
    pyro.sample("y", dist.Normal(z.cumsum(-1) * scale, 1.0).to_event(1), obs=y)


def heavy(y):
    stability = pyro.sample("stability", dist.Uniform(1.0, 2.0))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Stable(stability, 0.0))
        pyro.sample("y", dist.Stable(stability, 0.0, 1.0, z), obs=y)


def linear_chain(y):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    initial = dist.Normal(0.0, 1.0).expand([2]).to_event(1)
    step = dist.Stable(1.5, 0.0, scale).expand([len(y), 2]).to_event(1)
    noise = dist.StudentT(3.0, 0.0, 1.0).expand([len(y), 2]).to_event(1)
    matrix = torch.eye(2)
    pyro.sample("y", dist.LinearHMM(initial, matrix, step, matrix, noise, duration=len(y)), obs=y)


def overflowing(y):
    """A factor that is NaN far out in the prior."""
    shape = pyro.sample("shape", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.factor("censored", -(1e4 * (shape - 0.4).clamp(min=0.0)).exp() * (y > 9.0))
        pyro.sample("y", dist.Normal(shape * y.abs(), 1.0), obs=y)


def strict(y):
    """An error of the model's own there, at every draw."""
    shape = pyro.sample("shape", dist.Normal(torch.zeros(40), 1.0).to_event(1))
    if shape.abs().max() > 0.8:
        raise ArithmeticError("too large a shape")
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(shape.sum() * y.abs(), 1.0), obs=y)


def unsized(y):
    """A plate whose size only the data know."""
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows"):
        pyro.sample("y", dist.StudentT(4.0, loc, scale), obs=y)


def repeated(y):
    """A scalar observed for a vector."""
    loc = pyro.sample("loc", dist.Gamma(torch.full((3,), 2.0), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(loc, 0.1).to_event(1), obs=y)


class Drift(ForecastingModel):
    def model(self, zero_data, covariates):
        scale = pyro.sample("scale", dist.LogNormal(-2.0, 1.0)).unsqueeze(-1)
        with self.time_plate, poutine.reparam(config={"drift": LocScaleReparam()}):
            drift = pyro.sample("drift", dist.Normal(zero_data, scale).to_event(1))
        self.predict(dist.Normal(torch.zeros(1), scale).to_event(1), drift.cumsum(-2))


def reparametrized(model, **config):
    return poutine.reparam(model, config)


MARKOV = hidden("x_", "w_")
GLOBAL = exposed("probs_")
PROGRAMS = {
    "chains, exposed": Program(chains, [(BITS, LENGTHS, 2)] * 3, enumerating(1), GLOBAL),
    "chains, hidden": Program(chains, [(BITS, LENGTHS, 2)] * 3, enumerating(1), MARKOV),
    "batched chains, exposed": Program(
        batched_chains(), [(BITS, LENGTHS, 2)] * 3, enumerating(2), GLOBAL
    ),
    "batched chains, hidden": Program(
        batched_chains(), [(BITS[:3], LENGTHS[:3], 1)] * 4, enumerating(2), MARKOV
    ),
    "batched chains of changing size": Program(
        batched_chains(), [(BITS, LENGTHS), (BITS[1:3, :2], LENGTHS[1:3])], enumerating(2), MARKOV
    ),
    "longer memory": Program(batched_chains(2), [(BITS, LENGTHS, 2)], enumerating(2), GLOBAL),
    "compiled": Program(
        batched_chains(),
        [(BITS[:, :2], LENGTHS.clamp(max=2))] * 2,
        lambda: JitTraceEnum_ELBO(max_plate_nesting=2, ignore_jit_warnings=True),
        GLOBAL,
    ),
    "tensor Monte Carlo": Program(
        poutine.infer_config(
            batched_chains(),
            lambda site: (
                {"num_samples": 3, "expand": False}
                if site["infer"].get("enumerate") == "parallel"
                else {}
            ),
        ),
        [(BITS, LENGTHS, 2)] * 2,
        lambda: TraceTMC_ELBO(max_plate_nesting=2),
        GLOBAL,
    ),
    "neural chains": Program(neural_chains(), [(BITS, LENGTHS, 2)] * 3, enumerating(2), MARKOV),
    "parallel chains": Program(parallel_chains, [(BITS, LENGTHS, 2)] * 4, enumerating(2), GLOBAL),
    "parallel chains, unblocked": Program(
        parallel_chains, [(BITS, LENGTHS, 2)] * 4, enumerating(2)
    ),
    "no latents": Program(no_latents, [(NUMBERS,)] * 2, enumerating(1), GLOBAL),
    "random effects": Program(
        effects,
        [(MANY[:24].view(2, 3, 4), LENGTHS[:3]), (MANY[:12].view(2, 3, 2), LENGTHS[:3])],
        enumerating(2),
        MARKOV,
    ),
    "recaptured, exposed": Program(
        recaptured, [(HISTORY,)] * 2, enumerating(1), exposed("phi", "rho")
    ),
    "recaptured, particles": Program(
        recaptured,
        [(HISTORY,)] * 2,
        enumerating(1, num_particles=3, vectorize_particles=True),
        hidden("z_"),
    ),
    "topics": Program(topics, [(WORDS, 3)] * 2, enumerating(2), hidden("topic")),
    "mixture, configured": Program(
        config_enumerate(mixture), [(NUMBERS,), (NUMBERS, 3)], enumerating(1), hidden("z")
    ),
    "mixture, exposed": Program(
        config_enumerate(mixture), [(NUMBERS, 3)] * 2, enumerating(1), exposed("share", "loc")
    ),
    "one by one": Program(one_by_one, [(NUMBERS,)] * 2),
    "one by one, a part": Program(one_by_one, [(MANY, 3)] * 3),
    "enumerated one by one, a part": Program(
        enumerated_one_by_one, [(MANY, 3)] * 3, enumerating(0), hidden("z_")
    ),
    "local one by one, a part": Program(
        one_by_one, [(MANY, 3, True)] * 3, part=exposed("mu", "scale")
    ),
    "tables": Program(
        lambda names: tables(**{name: NUMBERS[: 3 + i] for i, name in enumerate(names)}),
        [("ab",), ("a",), ("b",), ("",), ("cb",), ("c",)],
    ),
    "series": Program(series, [(NUMBERS,), (NUMBERS[:3],), (MANY[:12],)]),
    "children": Program(
        children, [(NUMBERS, "abc"), (NUMBERS, "b"), (NUMBERS, ""), (NUMBERS, "da")]
    ),
    "ragged": Program(ragged, [(MANY[:20].view(5, 4), LENGTHS, 2)] * 4),
    "deep chain": Program(DeepChain(), [(BITS, LENGTHS), (BITS, LENGTHS, 0.5)]),
    "decoded": Program(decoded(), [(NUMBERS, 3)] * 2),
    "regression": Program(Regression(), [(PAIRS, NUMBERS[:5])] * 2),
    "location and scale": Program(
        reparametrized(eight_schools, theta=LocScaleReparam()),
        [CASES["eight_schools"].arguments()] * 2,
    ),
    "cosine": Program(reparametrized(walk, z=DiscreteCosineReparam()), [(NUMBERS,)] * 2),
    "haar": Program(reparametrized(walk, z=HaarReparam()), [(NUMBERS,)] * 2),
    "split": Program(reparametrized(walk, z=SplitReparam([3, 5], -1)), [(NUMBERS,)] * 2),
    "stable": Program(
        reparametrized(heavy, z=LatentStableReparam(), y=StableReparam()), [(NUMBERS,)] * 2
    ),
    "linear chain": Program(
        reparametrized(
            linear_chain, y=LinearHMMReparam(trans=SymmetricStableReparam(), obs=StudentTReparam())
        ),
        [(PAIRS,)] * 2,
    ),
    "forecast": Program(Drift(), [(NUMBERS.unsqueeze(-1), torch.zeros(8, 0))] * 2),
    "overflowing": Program(overflowing, [(NUMBERS,)] * 2),
    "strict": Program(strict, [(NUMBERS,)] * 2),
    "repeated": Program(repeated, [(torch.tensor(4.0),)] * 2),
    "unsized": Program(unsized, [(NUMBERS,)] * 2),
    "unsized, of other sizes": Program(unsized, [(NUMBERS,), (NUMBERS[:3],)]),
}


def trained(program: Program, kind: Callable, **options):
    """The guide of a program after a step for each call, and the losses."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = kind(program.part(program.model), **options)
    svi = SVI(program.model, guide, Adam({"lr": 1e-3}), program.elbo())
    return guide, [svi.step(*args) for args in program.calls]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_a_program_trains_with_the_latents_of_pyros_own_guide(name):
    program = PROGRAMS[name]
    guide, losses = trained(program, AutoNaMIGuide)
    assert all(map(math.isfinite, losses))
    own, _ = trained(program, AutoNormal)
    for args in program.calls:
        assert guide(*args).keys() == own(*args).keys()


@pytest.mark.parametrize(
    "name", ["recaptured, exposed", "topics", "tables", "regression", "forecast"]
)
@pytest.mark.filterwarnings("ignore")
def test_a_program_predicts(name):
    program = PROGRAMS[name]
    guide, _ = trained(program, AutoNaMIGuide)
    drawn = Predictive(program.model, guide=guide, num_samples=2)(*program.calls[0])
    assert all(value.isfinite().all() for value in drawn.values())


def test_a_forecaster_takes_the_guide_on_the_steps_that_have_data():
    model, y = Drift(), NUMBERS.unsqueeze(-1)
    guide = AutoNaMIGuide(model)

    def seen(data, covariates):
        return guide(data, covariates[: len(data)])

    forecaster = Forecaster(model, y, torch.zeros(8, 0), guide=seen, num_steps=2, log_every=0)
    assert forecaster(y, torch.zeros(11, 0), num_samples=2).shape == (2, 3, 1)


# ---- what a call lacks


@pytest.mark.parametrize("inverse", ["forward", "reverse", "mean_field"])
def test_a_call_without_a_site_conditions_on_the_others_alone(inverse):
    """What is no data in a call has no influence, whatever it was before; with zeros for data it would have one."""
    guide = amortized(tables, inverse=inverse)
    y = NUMBERS

    def mean(**columns):
        pyro.set_rng_seed(1)
        return guide(**columns)["mu"].item()

    with torch.no_grad():
        guide(a=y[:5], b=y[:3])
        scatter(guide, 0.1)
        alone = mean(a=y[:5])
        mean(a=y[:5], b=y[3:6])
        assert mean(a=y[:5]) == alone
        assert mean(a=y[:4]) != alone


def growing(count, y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    last = mu
    for i in range(count):
        last = pyro.sample(f"z_{i}", dist.Normal(last, 1.0))
        pyro.sample(f"y_{i}", dist.Normal(last, 1.0), obs=y + i)


@pytest.mark.parametrize("inverse", ["forward", "reverse", "mean_field"])
@pytest.mark.filterwarnings("error")
def test_a_latent_that_disappears_is_not_drawn(inverse):
    y = torch.tensor(1.0)
    guide = AutoNaMIGuide(growing, inverse=inverse)
    for count in (3, 1, 2, 3):
        steps(growing, guide, count, y, count=1, lr=1e-3)
        latents = guide(count, y)
        assert list(latents) == ["mu", "z_0", "z_1", "z_2"][: count + 1]
        assert guide.log_prob(latents, count, y).isfinite()


@pytest.mark.parametrize("inverse", ["forward", "reverse", "mean_field"])
def test_a_latent_that_appears_is_drawn_from_the_models_own_conditional(inverse):
    y = torch.tensor(1.0)
    guide = AutoNaMIGuide(growing, inverse=inverse)
    guide(1, y)
    with pytest.warns(UserWarning, match="new site 'z_1'.*the model's own conditional"):
        trace = poutine.trace(guide).get_trace(2, y)
    fn, value = trace.nodes["z_1"]["fn"], trace.nodes["z_0"]["value"]
    assert torch.equal(fn.log_prob(y), dist.Normal(value, 1.0).log_prob(y))
    with pytest.raises(ValueError, match="new site 'z_1'.*new guide"):
        guide.log_prob({"mu": y, "z_0": y, "z_1": y}, 2, y)


def test_data_of_a_new_site_is_not_read_and_the_guide_says_so():
    guide = AutoNaMIGuide(tables)
    guide(a=NUMBERS)
    with pytest.warns(UserWarning, match="new site 'y_b'.*not read"):
        guide(a=NUMBERS, b=NUMBERS)


@pytest.mark.parametrize("exact", [True, False])
def test_a_call_without_any_data_predicts_from_the_data_last_seen(exact):
    def model(n, y=None):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        if y is not None:
            with pyro.plate("data", n):
                pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    guide = AutoNaMIGuide(model, exact=exact)
    steps(model, guide, 8, NUMBERS, count=1, lr=1e-3)
    values = torch.zeros(1), torch.ones(1)
    seen, predicted = ([guide.log_prob({"mu": v}, 8, *y) for v in values] for y in ((NUMBERS,), ()))
    assert seen == predicted


def test_latents_of_a_sequential_plate_that_is_subsampled():
    guide = AutoNaMIGuide(one_by_one)
    with pytest.raises(
        NotImplementedError, match="'z_.*sequential plate.*vectorized.*poutine.block"
    ):
        guide(NUMBERS, 3, True)


def test_a_site_with_an_index_map_that_disappears():
    group = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])

    def model(y, second):
        with pyro.plate("groups", 3):
            theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        for name in ("a", "b")[: 1 + second]:
            with pyro.plate(f"rows_{name}", len(y)):
                pyro.sample(f"y_{name}", dist.StudentT(3.0, theta[group]), obs=y)

    guide = AutoNaMIGuide(model)
    guide(NUMBERS, True)
    with pytest.raises(ValueError, match="lacks 'y_b'.*new guide"):
        guide(NUMBERS, False)


def test_latents_too_large_for_networks_are_drawn_as_by_auto_normal():
    """The weights of a Bayesian neural network, and the instances of a block, are more than networks can relate."""
    inputs = torch.randn(50, 100)

    def model(x, y=None):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        first = pyro.sample("first", dist.Normal(0.0, 0.1).expand([100, 100]).to_event(2))
        second = pyro.sample(
            "second", dist.Normal(0.0, scale.unsqueeze(-1)).expand([100]).to_event(1)
        )
        mean = (torch.tanh(x @ first) * second.unsqueeze(-2)).sum(-1)
        with pyro.plate("rows", len(x)):
            return pyro.sample("y", dist.StudentT(3.0, mean, 0.1), obs=y)

    guide, normal, y = AutoNaMIGuide(model), AutoNormal(model), inputs[:, 0].sin()
    with pytest.warns(UserWarning, match="'first' depend on all else would take too much memory"):
        guide(inputs, y)
    trained = [SVI(model, each, Adam({"lr": 0.05}), Trace_ELBO()) for each in (guide, normal)]
    for _ in range(60):
        for svi in trained:
            assert math.isfinite(svi.step(inputs, y))
    ours, theirs = (sum(svi.evaluate_loss(inputs, y) for _ in range(50)) / 50 for svi in trained)
    assert ours < theirs
    trace = poutine.trace(guide).get_trace(inputs, y)
    values = {name: trace.nodes[name]["value"] for name in ("scale", "first", "second")}
    torch.testing.assert_close(guide.log_prob(values, inputs, y), trace.log_prob_sum())
    factors = {name: guide.network.places[name].factor for name in values}
    reads = {name: frozenset().union(*map(nodes_of, factors[name].sources)) for name in values}
    assert not any("first" in nodes for nodes in reads.values())
    assert "scale" in reads["second"] or "second" in reads["scale"]


def test_what_is_too_large_is_told_before_it_is_made(monkeypatch):
    """A table of which weight reads which took 12 GB for the weights of a network with 78,500 of them."""
    made = group_network.dependency

    def table(factors, columns):
        rows = sum(factor.num_elements * factor.num_rows for factor in factors)
        assert rows * sum(column.last - column.first for column in columns) < 1e7
        return made(factors, columns)

    monkeypatch.setattr(group_network, "dependency", table)

    def model(y):
        first = pyro.sample("first", dist.StudentT(3.0, torch.zeros(80, 30), 0.1).to_event(2))
        second = pyro.sample("second", dist.StudentT(3.0, torch.zeros(3000), 0.1).to_event(1))
        pyro.sample("y", dist.Normal(first.sum() * second.sum(), 1.0), obs=y)

    with pytest.warns(UserWarning, match="would take too much memory"):
        AutoNaMIGuide(model)(torch.tensor(1.0))


@pytest.mark.filterwarnings("ignore:Site")
def test_blocks_too_large_for_networks_are_drawn_instance_by_instance():
    users, movies = torch.arange(3000) % 1000, torch.arange(3000) * 7 % 1100

    def model(y=None):
        with pyro.plate("users", 1000):
            u = pyro.sample("u", dist.StudentT(5.0, 0.0, 1.0))
        with pyro.plate("movies", 1100):
            v = pyro.sample("v", dist.StudentT(5.0, 0.0, 1.0))
        with pyro.plate("rows", 3000):
            pyro.sample("y", dist.StudentT(5.0, u[..., users] * v[..., movies], 0.5), obs=y)

    guide, y = AutoNaMIGuide(model), torch.randn(3000)
    with pytest.warns(UserWarning, match="would take too much memory"):
        first = SVI(model, guide, Adam({"lr": 0.05}), Trace_ELBO()).step(y)
    svi = SVI(model, guide, Adam({"lr": 0.05}), Trace_ELBO())
    assert min(svi.step(y) for _ in range(40)) < first
    with pytest.raises(ValueError, match="block of 1[01]00 elements over plate"):
        AutoNaMIGuide(model, observed=["y"])()
