"""Loops of any length: first calls, steps and evidence of `AutoNaMIGuide` at 100, 400 and 1,600 time steps.

Five models, each a plain loop over time with unknown parameters: a local level, counts with a log link, stochastic
volatility, a level with a trend and gaps in the data, and a hidden Markov model with two states; and the local level
without a loop, as innovations in a plate that are summed up. Columns:

- CPU seconds of the first call, and runs of the model that it makes;
- CPU milliseconds of an SVI step (one particle), and its ratio to `AutoNormal`'s, in turn in one process;
- weights of the guide;
- by how much log p(states, data) - log q(states), at drawn parameters, is off the Kalman filter's or the forward
  algorithm's log density of the data, in nats: the largest of five draws. About a mode there is no such number.

With ``--fit`` also `fit` on counts: CPU seconds and verdict. One thread. Run with::

    python benchmarks/chains.py [--smoke] [--fit]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import ClippedAdam
from pyro.poutine.util import site_is_subsample
from torch import Tensor

import pyro_nami
from pyro_nami import AutoNaMIGuide

RESULTS = Path(__file__).parent / "results" / "chains.json"
LENGTHS = (100, 400, 1600)
STEPS = 5  # timed, after two


def level(y: Tensor) -> None:
    """A local level; data ``(T,)``."""
    step = pyro.sample("step", dist.HalfNormal(1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    z = torch.zeros(())
    for t in range(len(y)):
        z = pyro.sample(f"z_{t}", dist.Normal(z, step))
        pyro.sample(f"y_{t}", dist.Normal(z, noise), obs=y[t])


def counts(y: Tensor) -> None:
    """A random walk of log rates; counts ``(T,)``."""
    step = pyro.sample("step", dist.HalfNormal(0.5))
    z = torch.zeros(())
    for t in range(len(y)):
        z = pyro.sample(f"z_{t}", dist.Normal(z, step))
        pyro.sample(f"y_{t}", dist.Poisson(z.exp()), obs=y[t])


def volatility(y: Tensor) -> None:
    """Stochastic volatility; returns ``(T,)``."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    share = pyro.sample("share", dist.Uniform(-1.0, 1.0))
    step = pyro.sample("step", dist.HalfNormal(0.5))
    z = mean
    for t in range(len(y)):
        z = pyro.sample(f"z_{t}", dist.Normal(mean + share * (z - mean), step))
        pyro.sample(f"y_{t}", dist.Normal(0.0, (z / 2).exp()), obs=y[t])


def trend(y: Tensor) -> None:
    """A level with a trend, of which every third datum is missing; data ``(T,)``."""
    step = pyro.sample("step", dist.HalfNormal(1.0))
    turn = pyro.sample("turn", dist.HalfNormal(0.1))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    z, slope = torch.zeros(()), torch.zeros(())
    for t in range(len(y)):
        z = pyro.sample(f"level_{t}", dist.Normal(z + slope, step))
        slope = pyro.sample(f"slope_{t}", dist.Normal(slope, turn))
        if t % 3:
            pyro.sample(f"y_{t}", dist.Normal(z, noise), obs=y[t])


def states(y: Tensor) -> None:
    """A hidden Markov model with two states; data ``(T,)``."""
    stay = pyro.sample("stay", dist.Beta(9.0, 1.0))
    means = pyro.sample("means", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1))
    x = torch.tensor(0.0)
    for t in range(len(y)):
        x = pyro.sample(f"x_{t}", dist.Bernoulli(x * stay + (1 - x) * (1 - stay)))
        loc = means[..., 0] + x * (means[..., 1] - means[..., 0])
        pyro.sample(f"y_{t}", dist.Normal(loc, 1.0), obs=y[t])


def sums(y: Tensor) -> None:
    """A local level, as sums of innovations in a plate; data ``(T,)``."""
    step = pyro.sample("step", dist.HalfNormal(1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    with pyro.plate("time", len(y)):
        e = pyro.sample("e", dist.Normal(0.0, step))
        pyro.sample("y", dist.Normal(e.cumsum(-1), noise), obs=y)


def data_of(model: Callable, length: int) -> Tensor:
    """Returns data like the model's, ``(T,)``."""
    torch.manual_seed(0)
    walk = (0.3 * torch.randn(length)).cumsum(0)
    noise = torch.randn(length)
    made: dict[Callable, Tensor] = {
        level: walk + 0.5 * noise,
        counts: torch.poisson((walk / 3).exp()),
        volatility: (walk / 6).exp() * noise,
        trend: walk + 0.5 * noise,
        states: walk.sign() + noise,
        sums: walk + 0.5 * noise,
    }
    return made[model]


def filtered(model: Callable, y: Tensor, at: dict[str, Tensor]) -> float | None:
    """Returns the log density of the data in nats at parameters, with all states integrated out; None if not known."""
    if model is states:
        stay = at["stay"].double()
        turns = torch.stack((stay, 1 - stay, 1 - stay, stay)).reshape(2, 2).log()
        total = turns[0]
        for t, value in enumerate(y):
            total = (total[:, None] + turns).logsumexp(0) if t else total
            total = total + dist.Normal(at["means"].double(), 1.0).log_prob(value)
        return float(total.logsumexp(0))
    if model not in (level, trend, sums):
        return None
    # the Kalman filter, with a slope of zero where there is none
    noise, step = at["noise"].double(), at["step"].double()
    turn = at.get("turn", torch.zeros(())).double()
    mean, cov = torch.zeros(2).double(), torch.zeros(2, 2).double()
    move = torch.tensor([[1.0, 1.0], [0.0, 1.0]]).double()
    both = torch.stack((step, turn)).square().diag()
    total = torch.zeros(()).double()
    for t, value in enumerate(y.double()):
        mean, cov = move @ mean, move @ cov @ move.T + both
        if model is not trend or t % 3:
            variance = cov[0, 0] + noise**2
            total = total + dist.Normal(mean[0], variance.sqrt()).log_prob(value)
            gain = cov[:, 0] / variance
            mean, cov = mean + gain * (value - mean[0]), cov - torch.outer(gain, cov[0])
    return float(total)


def evidence_gap(model: Callable, guide: AutoNaMIGuide, y: Tensor) -> float | None:
    """Returns how far weights given parameters are off the log density of the data, at most; None if not known."""
    gaps = []
    for _ in range(5):
        drawn = poutine.trace(guide).get_trace(y)
        joint = poutine.trace(poutine.replay(model, drawn)).get_trace(y)
        drawn.compute_log_prob()
        joint.compute_log_prob()
        told, at = 0.0, {}
        sites = [site for site in joint.nodes.values() if site["type"] == "sample"]
        samples = [site["name"] for site in sites if not site_is_subsample(site)]
        for name in samples:
            if not name.split("_")[-1].isdigit() and name not in ("e", "y"):
                at[name] = drawn.nodes[name]["value"].detach()
                continue
            told += float(joint.nodes[name]["log_prob_sum"].detach())
            if name in drawn.nodes:
                told -= float(drawn.nodes[name]["log_prob_sum"].detach())
        known = filtered(model, y, at)
        if known is None:
            return None
        gaps.append(abs(told - known))
    return max(gaps)


def measured(model: Callable, length: int) -> dict[str, Any]:
    """Returns a row of the table."""
    y, runs = data_of(model, length), [0]

    def counted(y: Tensor) -> None:
        runs[0] += 1
        model(y)

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoNaMIGuide(counted)
    start = time.process_time()
    guide(y)
    first, count = time.process_time() - start, runs[0]
    ours = SVI(model, guide, ClippedAdam({"lr": 0.01}), Trace_ELBO())
    guides = [ours]
    if model is not states:  # which AutoNormal does not take, as its states are discrete
        guides.append(SVI(model, AutoNormal(model), ClippedAdam({"lr": 0.01}), Trace_ELBO()))
    times: list[list[float]] = [[] for _ in guides]
    for i in range(STEPS + 2):
        for each, svi in zip(times, guides):
            start = time.process_time()
            svi.step(y)
            if i > 1:
                each.append(1e3 * (time.process_time() - start))
    return {
        "model": model.__name__,
        "length": length,
        "first_s": first,
        "runs": count,
        "step_ms": statistics.median(times[0]),
        "ratio": statistics.median(a / b for a, b in zip(*times)) if len(guides) > 1 else None,
        "weights": guide.num_parameters,
        "gap": evidence_gap(model, guide, y),
    }


def fitted(length: int, seed: int) -> dict[str, Any]:
    """Returns what `fit` takes for counts."""
    y = data_of(counts, length)
    start = time.process_time()
    posterior = pyro_nami.fit(counts, y, seed=seed, progress=False)
    seconds = time.process_time() - start
    return {"length": length, "seed": seed, "s": seconds, "verdict": str(posterior.verdict)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--smoke", action="store_true", help="short loops, nothing is written")
    parser.add_argument("--fit", action="store_true", help="also `fit` on counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("model       steps  first call   runs      step  AutoNormal's  weights  evidence off")
    for model in (level, counts, volatility, trend, states, sums):
        for length in (40,) if args.smoke else LENGTHS:
            row = measured(model, length)
            rows.append(row)
            ratio = " " * 12 if row["ratio"] is None else f"{row['ratio']:10.2f} x"
            gap = "" if row["gap"] is None else f"{row['gap']:.1g} nats"
            print(
                f"{row['model']:11} {length:5}  {row['first_s']:8.2f} s  {row['runs']:5}  {row['step_ms']:5.0f} ms  "
                f"{ratio}  {row['weights']:7}  {gap}",
                flush=True,
            )
    fits = []
    for seed in range(3) if args.fit and not args.smoke else ():
        fits.append(fitted(1000, seed))
        print("fit, counts, 1,000 steps: {s:.1f} s, {verdict}".format(**fits[-1]), flush=True)
    if not args.smoke:
        machine = {"torch": torch.__version__, "machine": platform.machine()}
        RESULTS.write_text(json.dumps({**machine, "rows": rows, "fit": fits}, indent=1) + "\n")


if __name__ == "__main__":
    main()
