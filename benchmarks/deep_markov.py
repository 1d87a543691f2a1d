"""The deep Markov model of Pyro's tutorial: `AutoNaMIGuide` beside the tutorial's own structured guide.

The model is a gated Gaussian transition of vector states with Bernoulli emissions of 88 tones (Krishnan, Shalit and
Sontag 2017), its minibatches are ragged and masked. The peer is that paper's ST-R: a recurrent network runs backward
over a series, and a combiner takes its state and the state before. Both train by ``Trace_ELBO`` and ``ClippedAdam`` on
the same minibatches, at each of some rates; the best rate of each counts. Columns:

- ELBO of held-out series, in nats a tone column (a step of a series), by 10 particles, after each part of the training;
- CPU milliseconds of a step, in turn in one process, medians;
- weights of the guide.

Pyro's polyphonic data are downloaded at their first use. Where there is no network the series are simulated: chords of
a hidden Markov chain, of 13 to 40 steps, and ``"data"`` in the result says so. One thread. Run with::

    python benchmarks/deep_markov.py [--smoke]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule
from pyro.optim import ClippedAdam
from torch import Tensor, nn
from torch.nn.functional import softplus

from pyro_nami import AutoNaMIGuide

RESULTS = Path(__file__).parent / "results" / "deep_markov.json"
TONES = 88
CHORDS = 12  # of the simulated chain
STAY = 0.8  # probability that it stays in a chord


class Setting(NamedTuple):
    """Sizes of the model, of its peer and of the training; those of the tutorial, but for series and steps."""

    states: int = 100
    emission: int = 100
    transition: int = 200
    recurrent: int = 600
    minibatch: int = 20
    series: int = 200
    longest: int = 40
    steps: int = 300
    rates: tuple[float, ...] = (0.001, 0.003)


SMOKE = Setting(4, 8, 8, 16, 5, 10, 12, 4, (0.003,))


class Dynamics(PyroModule):
    """The model: series ``(rows, steps, tones)`` and which steps they have, ``(rows, steps)``."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        states, emission, width = setting.states, setting.emission, setting.transition
        self.start = nn.Parameter(torch.zeros(states))
        self.emitter = nn.Sequential(
            nn.Linear(states, emission),
            nn.ReLU(),
            nn.Linear(emission, emission),
            nn.ReLU(),
            nn.Linear(emission, TONES),
        )
        self.gate = nn.Sequential(
            nn.Linear(states, width), nn.ReLU(), nn.Linear(width, states), nn.Sigmoid()
        )
        self.proposal = nn.Sequential(nn.Linear(states, width), nn.ReLU(), nn.Linear(width, states))
        self.linear = nn.Linear(states, states)
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.raw_scale = nn.Linear(states, states)

    def forward(self, series: Tensor, mask: Tensor) -> None:
        pyro.module("dmm", self)
        z = self.start.expand(len(series), -1)
        with pyro.plate("series", len(series)):
            for t in pyro.markov(range(series.shape[1])):
                here = mask[:, t : t + 1]
                gate, proposal = self.gate(z), self.proposal(z)
                loc = (1 - gate) * self.linear(z) + gate * proposal
                scale = softplus(self.raw_scale(proposal.relu()))
                z = pyro.sample(f"z_{t}", dist.Normal(loc, scale).mask(here).to_event(1))
                emitted = dist.Bernoulli(logits=self.emitter(z)).mask(here).to_event(1)
                pyro.sample(f"x_{t}", emitted, obs=series[:, t])


class Recognition(PyroModule):
    """The peer: q(z_t | z_(t-1), x_t, x_(t+1), ...), a Normal of independent elements."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        states, recurrent = setting.states, setting.recurrent
        self.backward = nn.RNN(TONES, recurrent, nonlinearity="relu", batch_first=True)
        self.begin = nn.Parameter(torch.zeros(recurrent))
        self.start = nn.Parameter(torch.zeros(states))
        self.combiner = nn.Linear(states, recurrent)
        self.loc, self.raw_scale = nn.Linear(recurrent, states), nn.Linear(recurrent, states)

    def forward(self, series: Tensor, mask: Tensor) -> None:
        pyro.module("recognition", self)
        lengths = mask.sum(1)
        begin = self.begin.expand(1, len(series), -1).contiguous()
        states, _ = self.backward(_reversed(series, lengths), begin)
        states = _reversed(states, lengths)
        z = self.start.expand(len(series), -1)
        with pyro.plate("series", len(series)):
            for t in pyro.markov(range(series.shape[1])):
                both = 0.5 * (self.combiner(z).tanh() + states[:, t])
                fn = dist.Normal(self.loc(both), softplus(self.raw_scale(both)))
                z = pyro.sample(f"z_{t}", fn.mask(mask[:, t : t + 1]).to_event(1))


def _reversed(x: Tensor, lengths: Tensor) -> Tensor:
    """Returns series ``(rows, steps, features)`` with each row's own steps in reverse; the others stay."""
    steps = torch.arange(x.shape[1])
    order = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)
    return x.take_along_dim(order.unsqueeze(-1), 1)


def data_of(setting: Setting, seed: int) -> tuple[Tensor, Tensor, str]:
    """Returns series ``(rows, steps, tones)``, their lengths, and where they are from."""
    generator = torch.Generator().manual_seed(seed)
    chords = torch.rand(CHORDS, TONES, generator=torch.Generator().manual_seed(1)) < 0.05
    probs = 0.01 + 0.8 * chords
    shape = setting.series, setting.longest
    jumps = torch.rand(shape, generator=generator) > STAY
    played = torch.randint(CHORDS, shape, generator=generator)
    for t in range(1, setting.longest):
        played[:, t] = torch.where(jumps[:, t], played[:, t], played[:, t - 1])
    lengths = torch.randint(
        setting.longest // 3, setting.longest + 1, shape[:1], generator=generator
    )
    series = torch.bernoulli(probs[played], generator=generator)
    series = series * (torch.arange(setting.longest) < lengths[:, None])[..., None]
    return series, lengths, f"simulated: {CHORDS} chords of a hidden Markov chain"


def batch_of(series: Tensor, lengths: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a minibatch as long as its longest series, and its mask."""
    own = lengths[rows]
    longest = int(own.max())
    return series[rows, :longest], torch.arange(longest) < own[:, None]


GUIDES: dict[str, Callable[[Callable, Setting], Callable]] = {
    "AutoNaMIGuide": lambda model, setting: AutoNaMIGuide(model, mode="amortized"),
    "ST-R": lambda model, setting: Recognition(setting),
}


class Run:
    """One guide in training at one rate."""

    def __init__(self, name: str, rate: float, setting: Setting) -> None:
        pyro.set_rng_seed(0)
        self.setting = setting
        self.model = Dynamics(setting)
        self.guide = GUIDES[name](self.model, setting)
        optimizer = ClippedAdam({"lr": rate, "betas": (0.96, 0.999), "clip_norm": 10.0})
        self.svi = SVI(self.model, self.guide, optimizer, Trace_ELBO())
        self.store = {"params": {}, "constraints": {}}
        self.seconds: list[float] = []
        self.first = 0.0

    def train(self, steps: range, series: Tensor, lengths: Tensor) -> None:
        """Takes some steps, each on a minibatch that its number tells, with parameters of its own."""
        self._restore()
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            rows = torch.randperm(len(series), generator=generator)[: self.setting.minibatch]
            batch = batch_of(series, lengths, rows)
            begin = time.process_time()
            self.svi.step(*batch)
            self.seconds.append(time.process_time() - begin)
            if step == 0:
                self.first = self.seconds.pop()
        self.store = pyro.get_param_store().get_state()

    @torch.no_grad()
    def elbo(self, series: Tensor, lengths: Tensor) -> float:
        """Returns the ELBO of held-out series, in nats a step of a series."""
        self._restore()
        pyro.set_rng_seed(1)
        batch = batch_of(series, lengths, torch.arange(len(series)))
        losses = [Trace_ELBO().loss(self.model, self.guide, *batch) for _ in range(10)]
        return -statistics.fmean(losses) / int(lengths.sum())

    def _restore(self) -> None:
        """Makes the parameter store that of this run."""
        pyro.clear_param_store()
        pyro.get_param_store().set_state(self.store)

    @property
    def weights(self) -> int:
        """Weights of the guide."""
        if isinstance(self.guide, AutoNaMIGuide):
            return self.guide.num_parameters
        return sum(value.numel() for value in self.guide.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="seconds in place of minutes")
    arguments = parser.parse_args()
    setting = SMOKE if arguments.smoke else Setting()
    torch.set_num_threads(1)
    series, lengths, source = data_of(setting, 0)
    held, held_lengths, _ = data_of(setting._replace(series=min(setting.series, 50)), 1)
    rows: dict[str, Any] = {}
    tried: list[dict[str, Any]] = []  # all runs, also those that failed: "-inf"
    for name in GUIDES:
        best: dict[str, Any] = {}
        for rate in setting.rates:
            run, elbos = Run(name, rate, setting), []
            parts = torch.linspace(0, setting.steps, 4).long().tolist()
            for begin, end in zip(parts, parts[1:]):
                try:
                    run.train(range(begin, end), series, lengths)
                    elbos.append(round(run.elbo(held, held_lengths), 3))
                except ValueError:  # a distribution whose parameters have got lost
                    elbos.append(float("-inf"))
                    break
            found = {
                "rate": rate,
                "elbo": elbos,
                "first_seconds": round(run.first, 2),
                "step_ms": round(1000 * statistics.median(run.seconds), 1),
                "weights": run.weights,
            }
            print(f"{name:15} {found}", flush=True)
            if not best or elbos[-1] > best["elbo"][-1]:
                best = found
            tried.append({"guide": name, **found, "elbo": [str(each) for each in elbos]})
        rows[name] = best
    if not arguments.smoke:
        result = {
            "setting": setting._asdict(),
            "data": source,
            "guides": rows,
            "runs": tried,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "pyro": pyro.__version__,
            },
        }
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
