"""Time of one SVI step of `AutoNaMIGuide`, against one of Pyro's own guides on the same model.

Two models: eight schools (centered), against `AutoNormal`, and a binary tree of 31 Gaussian sites with its 16 leaves
observed, against `AutoStructured`. Both guides have default settings, a step draws one particle, and one thread does
all the work. The guides take turns in one run: every round times some steps of each, and a ratio is the median over
rounds of the ratio within a round, so what slows down a whole round does not count. Run with::

    python benchmarks/svi_step.py [--smoke]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuide, AutoNormal, AutoStructured
from pyro.optim import ClippedAdam
from torch import Tensor

from pyro_nami import AutoNaMIGuide

RESULTS = Path(__file__).parent / "results" / "svi_step.json"
LIMIT = 1.5
EFFECTS = (28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0)
ERRORS = (15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0)


def eight_schools(sigma: Tensor, y: Tensor | None = None) -> Tensor:
    """Rubin's eight schools, centered; ``sigma`` and ``y`` of shape ``(8,)``."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(sigma)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        return pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def gaussian_tree(depth: int) -> tuple[Callable[[Tensor], None], tuple[Tensor]]:
    """A binary tree of ``depth`` levels with its leaves observed, and leaves ``(2 ** (depth - 1),)`` drawn from it.

    X_0 ~ N(0, 1), and X_i ~ N(w_i X_parent, 1) with every w_i drawn once from U(1/2, 2).
    """
    inner, sites = 2 ** (depth - 1) - 1, 2**depth - 1
    generator = torch.Generator().manual_seed(0)
    weights = 0.5 + 1.5 * torch.rand(sites, generator=generator)
    noise = torch.randn(sites, generator=generator)

    def model(leaves: Tensor) -> None:
        values = [pyro.sample("x_0", dist.Normal(0.0, 1.0))]
        for i in range(1, sites):
            mean = weights[i] * values[(i - 1) // 2]
            obs = None if i < inner else leaves[i - inner]
            values.append(pyro.sample(f"x_{i}", dist.Normal(mean, 1.0), obs=obs))

    drawn = [noise[0]]
    for i in range(1, sites):
        drawn.append(weights[i] * drawn[(i - 1) // 2] + noise[i])
    return model, (torch.stack(drawn[inner:]),)


def stepper(model: Callable, guide: AutoGuide, args: tuple[Tensor, ...]) -> Callable[[], None]:
    """A function that takes one SVI step."""
    svi = SVI(model, guide, ClippedAdam({"lr": 0.01}), Trace_ELBO())

    def step() -> None:
        svi.step(*args)

    return step


def time_in_turn(
    steps: Mapping[str, Callable[[], None]], rounds: int, calls: int, warmup: int
) -> dict[str, list[float]]:
    """Milliseconds a step of each function in every round, after ``warmup`` steps of each."""
    for step in steps.values():
        for _ in range(warmup):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(calls):
                step()
            times[name].append(1e3 * (time.perf_counter() - start) / calls)
    return times


def measure(
    name: str,
    model: Callable,
    args: tuple[Tensor, ...],
    baseline: type[AutoGuide],
    rounds: int,
    calls: int,
    warmup: int,
) -> dict:
    """One record: medians of both guides, and their ratio with its quartiles over rounds."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guides = {"AutoNaMIGuide": AutoNaMIGuide(model), baseline.__name__: baseline(model)}
    steps = {key: stepper(model, guide, args) for key, guide in guides.items()}
    times = time_in_turn(steps, rounds, calls, warmup)
    ratios = [
        ours / theirs for ours, theirs in zip(times["AutoNaMIGuide"], times[baseline.__name__])
    ]
    low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else 3 * ratios
    return {
        "model": name,
        "baseline": baseline.__name__,
        "milliseconds": {key: statistics.median(values) for key, values in times.items()},
        "ratio": middle,
        "ratio_quartiles": [low, high],
        "limit": LIMIT,
    }


def report(records: list[dict]) -> None:
    """Prints the table."""
    print(
        f"{'model':<22} {'AutoNaMIGuide':>14} {'Pyro guide':>24} {'ratio':>6} {'quartiles':>12}   limit"
    )
    for record in records:
        ours, theirs = (
            record["milliseconds"]["AutoNaMIGuide"],
            record["milliseconds"][record["baseline"]],
        )
        low, high = record["ratio_quartiles"]
        print(
            f"{record['model']:<22} {ours:11.2f} ms {record['baseline'] + f' {theirs:.2f} ms':>24} "
            f"{record['ratio']:6.2f} {f'{low:.2f}-{high:.2f}':>12}   {record['limit']}"
        )


def main() -> None:
    """Measures, prints and writes ``results/svi_step.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps, to see that it runs; writes no results"
    )
    parser.add_argument(
        "--rounds", type=int, default=21, help="rounds in which the guides take turns"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds, calls, warmup, depth = (
        (1, 2, 2, 3) if arguments.smoke else (arguments.rounds, 100, 200, 5)
    )
    schools = (torch.tensor(ERRORS), torch.tensor(EFFECTS))
    tree, leaves = gaussian_tree(depth)
    records = [
        measure("eight schools", eight_schools, schools, AutoNormal, rounds, calls, warmup),
        measure(f"{2**depth - 1}-site tree", tree, leaves, AutoStructured, rounds, calls, warmup),
    ]
    report(records)
    if arguments.smoke:
        return
    record = {
        "torch": torch.__version__,
        "pyro": pyro.__version__,
        "python": platform.python_version(),
        "rounds": rounds,
        "steps_a_round": calls,
        "records": records,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
