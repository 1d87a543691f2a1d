"""Posteriors of hierarchical models at sizes of their plates between a quarter and four times of the one asked for.

Each model is amortized as a Pyro program, and as a simulator whose data have no density. The loss of the guide, -log q
in nats at new simulations, is compared with the exact one for the Normal hierarchy, whose evidence is an integral over
one number; of the other models, that of the simulator can be compared with that of the program. ``calibrate`` says at
each size whether the guide's ranks are uniform; coverage is that of its 90% intervals, of the latent that is furthest
off. Run with::

    python benchmarks/hierarchical.py [--smoke] [--simulations 2000] [--models normal,one_level] [--seed 0]
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_nami import amortize, calibrate
from pyro_nami.inference import Simulator
from pyro_nami.inference.simulator_model import with_drawn_data

RESULTS = Path(__file__).parent / "results" / "hierarchical.json"
SIZES = (0.25, 1, 4)  # times the size asked for
MEASUREMENTS = 5  # of each instance, known to have noise of standard deviation one
TAU = (
    -0.5,
    0.5,
)  # location and scale of the logarithm of the spread of groups, in the Normal hierarchy


def data(fn: Any, dense: bool) -> None:
    """The data ``y``: with a density, or as values that a simulator returns."""
    if dense:
        pyro.sample("y", fn)
    else:
        pyro.deterministic("y", fn.sample(), event_dim=fn.event_dim)


def measured(mean: Tensor) -> Any:
    """Normal measurements about a mean ``(*batch,)``."""
    return dist.Normal(mean.unsqueeze(-1).expand(*mean.shape, MEASUREMENTS), 1.0).to_event(1)


def normal(subjects: int, dense: bool = True) -> None:
    """Subjects with means about a common one."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.LogNormal(*TAU))
    with pyro.plate("subjects", subjects):
        data(measured(pyro.sample("theta", dist.Normal(mu, tau))), dense)


def one_level(trials: int, dense: bool = True) -> None:
    """Reaction times of one subject: shifted, with a skew."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.LogNormal(-0.5, 0.5))
    with pyro.plate("trials", trials):
        shape = torch.broadcast_shapes(mu.shape, (trials,))
        data(dist.LogNormal(mu.expand(shape), sigma.expand(shape)), dense)


def two_levels(subjects: int, dense: bool = True) -> None:
    """Counts of subjects, with rates that vary about a common one."""
    mu = pyro.sample("mu", dist.Normal(1.0, 0.5))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    with pyro.plate("subjects", subjects):
        log_rate = pyro.sample("log_rate", dist.Normal(mu, tau))
        rates = log_rate.exp().unsqueeze(-1).expand(*log_rate.shape, MEASUREMENTS)
        data(dist.Poisson(rates).to_event(1), dense)


def three_levels(schools: int, dense: bool = True) -> None:
    """Pupils of classes of schools."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.LogNormal(*TAU))
    with pyro.plate("schools", schools, dim=-1):
        school = pyro.sample("school", dist.Normal(mu, tau))
        with pyro.plate("classes", 3, dim=-2):
            data(measured(pyro.sample("class", dist.Normal(school, 0.5))), dense)


def item_response(students: int, dense: bool = True) -> None:
    """Answers of students to ten items: abilities crossed with difficulties."""
    spread = pyro.sample("spread", dist.LogNormal(0.0, 0.3))
    items, people = pyro.plate("items", 10, dim=-2), pyro.plate("students", students, dim=-1)
    with items:
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, 1.0))
    with people:
        ability = pyro.sample("ability", dist.Normal(0.0, spread))
    with items, people:
        data(dist.Bernoulli(logits=ability - difficulty), dense)


MODELS: dict[str, tuple[Callable, int]] = {
    "normal": (normal, 8),
    "one_level": (one_level, 16),
    "two_levels": (two_levels, 8),
    "three_levels": (three_levels, 4),
    "item_response": (item_response, 16),
}


def exact(latents: dict[str, Tensor], y: Tensor) -> Tensor:
    """log p(latents | y) of the Normal hierarchy in nats, ``(data sets,)``, by a grid over log tau."""
    mu, tau = (latents[name].double().reshape(-1, 1) for name in ("mu", "tau"))
    theta, mean = latents["theta"].double().reshape(len(y), -1), y.double().mean(-1)
    variance = 1 / MEASUREMENTS
    joint = dist.Normal(0.0, 1.0).log_prob(mu) + dist.LogNormal(*TAU).log_prob(tau)
    joint = joint.squeeze(-1) + dist.Normal(mu, tau).log_prob(theta).sum(-1)
    joint = joint + dist.Normal(theta, variance**0.5).log_prob(mean).sum(-1)
    grid = torch.linspace(TAU[0] - 7 * TAU[1], TAU[0] + 7 * TAU[1], 2001, dtype=torch.double)
    spread, num = (2 * grid).exp() + variance, mean.shape[1]
    precision, total = num / spread + 1, mean.sum(-1, keepdim=True) / spread
    likelihood = -0.5 * (num * (2 * math.pi * spread).log() + precision.log())
    likelihood = likelihood - 0.5 * mean.square().sum(-1, keepdim=True) / spread
    likelihood = likelihood + 0.5 * total.square() / precision
    evidence = (likelihood + dist.Normal(*TAU).log_prob(grid)).logsumexp(-1)
    return joint - evidence - (grid[1] - grid[0]).log()


def at_size(posterior: Any, model: Callable, name: str, size: int, num: int) -> dict[str, Any]:
    """Loss at new simulations of a size, nats above the exact one if it is known, and calibration."""
    simulator = Simulator(with_drawn_data(model, (size,), {}, ["y"]), (size,), observed=["y"])
    draws = simulator.draw(num)
    with torch.no_grad():
        log_q = posterior.guide.log_prob(draws.latents, size, observations=draws.observed)
    ranks = calibrate(
        model, posterior.guide, size, observed=["y"], num_datasets=num, progress=False
    )
    shares = {site: float(share.mean()) for site, share in ranks.coverage([0.9]).items()}
    worst = max(shares, key=lambda site: abs(shares[site] - 0.9))
    row = {
        "size": size,
        "loss": -float(log_q.mean()),
        "calibrated": ranks.passed,
        "failed": list(ranks.failed),
        "coverage": shares[worst],
    }
    if name == "normal":
        above = exact(draws.latents, draws.observed["y"]) - log_q.double()
        row["above_exact"] = float(above.mean())
    return row


def measure(name: str, dense: bool, simulations: int, num: int, seed: int) -> dict[str, Any]:
    """Amortizes a model, and measures it at three sizes."""
    fn, middle = MODELS[name]
    model = functools.partial(fn, dense=dense)
    functools.update_wrapper(model, fn)
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = amortize(model, middle, observed=["y"], simulations=simulations, progress=False)
        seconds = time.process_time() - start
        rows = [at_size(posterior, model, name, round(middle * each), num) for each in SIZES]
    widened = dict(posterior.coverage.widened) if posterior.coverage else {}
    return {
        "model": name,
        "density": dense,
        "seconds": seconds,
        "simulations": simulations,
        "widened": widened,
        "sizes": rows,
    }


def show(row: dict[str, Any]) -> None:
    """Prints a line for each size."""
    kind = "program" if row["density"] else "simulator"
    for at in row["sizes"]:
        above = f", {at['above_exact']:+.3f} nats above exact" if "above_exact" in at else ""
        verdict = "calibrated" if at["calibrated"] else f"off at {', '.join(at['failed'])}"
        print(
            f"{row['model']:<14}{kind:<10}{at['size']:>4}  loss {at['loss']:8.3f}{above}; 90% holds "
            f"{at['coverage']:.1%}; {verdict}; {row['seconds']:.0f} s",
            flush=True,
        )


def main() -> None:
    """Measures, prints and writes ``results/hierarchical.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="one model, 100 simulations; writes no results"
    )
    parser.add_argument("--simulations", type=int, default=2000)
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    simulations, num = (100, 50) if arguments.smoke else (arguments.simulations, 400)
    rows = []
    for name in ["normal"] if arguments.smoke else arguments.models.split(","):
        for dense in (False, True):
            rows.append(measure(name, dense, simulations, num, arguments.seed))
            show(rows[-1])
            if not arguments.smoke:
                record = {
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                    "seed": arguments.seed,
                    "rows": rows,
                }
                RESULTS.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
