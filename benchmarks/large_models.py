"""Large programs by SVI: what the first call and a step take, and the loss, beside `AutoNormal`.

A hundred thousand rows, ten thousand rows with fifty groups, tables of counts, hundreds of sites in a Python loop, and
the weights of a Bayesian neural network, at three rates of Adam. Seconds are a core's own time. Run with::

    python benchmarks/large_models.py [--smoke] [--only NAME ...] [--rates 0.005 0.05 0.5] [--steps 100] [--seed 0]
                                      [--device cuda]
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
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam
from torch import nn

from pyro_nami import AutoNaMIGuide

RESULTS = Path(__file__).parent / "results" / "large_models.json"
GUIDES = {"AutoNormal": AutoNormal, "AutoNaMIGuide": AutoNaMIGuide}
SCORED = 50  # draws
Program = tuple[Callable, tuple]


def local_effects(rows: int = 100_000) -> Program:
    """Counts with an effect of each row."""
    x = torch.randn(rows)
    y = torch.poisson((x + 0.5 * torch.randn(rows)).exp())

    def model(x: Any, y: Any) -> None:
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        with pyro.plate("rows", rows):
            z = pyro.sample("z", dist.Normal(slope * x, scale))
            pyro.sample("y", dist.Poisson(z.exp()), obs=y)

    return model, (x, y)


def gamma_regression(rows: int = 10_000, groups: int = 50) -> Program:
    """Eight regressors and an intercept of each group, written for one draw."""
    x, group = torch.randn(rows, 8), torch.arange(rows) % groups
    y = torch.distributions.Gamma(2.0, 2.0 * (-5 - x @ (0.3 * torch.randn(8))).exp()).sample()

    def model(x: Any, group: Any, y: Any) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([8]).to_event(1))
        intercept = pyro.sample("intercept", dist.Normal(0.0, 10.0))
        shape = pyro.sample("shape", dist.Gamma(1.0, 1.0))
        spread = pyro.sample("spread", dist.HalfNormal(1.0))
        with pyro.plate("groups", groups):
            u = pyro.sample("u", dist.Normal(0.0, spread))
        with pyro.plate("rows", rows):
            pyro.sample(
                "y", dist.Gamma(shape, shape * (-intercept - x @ w - u[group]).exp()), obs=y
            )

    return model, (x, group, y)


def logistic_regression(rows: int = 13_000, columns: int = 20) -> Program:
    """One whose mode is found in every step."""
    x = torch.randn(rows, columns)
    y = torch.bernoulli((x @ (0.3 * torch.randn(columns))).sigmoid())

    def model(x: Any, y: Any) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([columns]).to_event(1))
        with pyro.plate("rows", rows):
            pyro.sample("y", dist.Bernoulli(logits=(x * w.unsqueeze(-2)).sum(-1)), obs=y)

    return model, (x, y)


def table(size: int = 200) -> Program:
    """Counts with effects of rows, columns and cells."""
    y = torch.poisson(torch.full((size, size), 2.0))

    def model(y: Any) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        rows, columns = pyro.plate("rows", size, dim=-2), pyro.plate("columns", size, dim=-1)
        with rows:
            a = pyro.sample("a", dist.Normal(0.0, scale))
        with columns:
            b = pyro.sample("b", dist.Normal(0.0, scale))
        with rows, columns:
            e = pyro.sample("e", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Poisson((mean + a + b + e).exp()), obs=y)

    return model, (y,)


def ratings(users: int = 2_000, films: int = 1_500, rows: int = 20_000, rank: int = 5) -> Program:
    """Matrix factorization, of which one factor is a block."""
    user, film = torch.randint(users, (rows,)), torch.randint(films, (rows,))
    product = (0.7 * torch.randn(users, rank))[user] * (0.7 * torch.randn(films, rank))[film]
    y = product.sum(-1) + 0.3 * torch.randn(rows)

    def model(user: Any, film: Any, y: Any) -> None:
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        with pyro.plate("users", users):
            u = pyro.sample("u", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))
        with pyro.plate("films", films):
            v = pyro.sample("v", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))
        with pyro.plate("rows", rows):
            pyro.sample("y", dist.Normal((u[user] * v[film]).sum(-1), scale), obs=y)

    return model, (user, film, y)


def random_walk(length: int = 80) -> Program:
    """Counts along time, one site a step."""
    y = torch.poisson((1 + (torch.arange(length) / 30).sin()).exp())

    def model(y: Any) -> None:
        scale, x = (
            pyro.sample("scale", dist.HalfNormal(0.3)),
            pyro.sample("x_0", dist.Normal(0.0, 2.0)),
        )
        pyro.sample("y_0", dist.Poisson(x.exp()), obs=y[0])
        for t in range(1, length):
            x = pyro.sample(f"x_{t}", dist.Normal(x, scale))
            pyro.sample(f"y_{t}", dist.Poisson(x.exp()), obs=y[t])

    return model, (y,)


def bent_chain(length: int = 100) -> Program:
    """States that depend on each other in a way of which nothing is derived, one site a step."""
    y = 0.3 * torch.randn(length).cumsum(0) + torch.randn(length)

    def model(y: Any) -> None:
        scale, z = (
            pyro.sample("scale", dist.HalfNormal(1.0)),
            pyro.sample("z_0", dist.Normal(0.0, 1.0)),
        )
        for t in range(1, length):
            z = pyro.sample(f"z_{t}", dist.Normal(z.sin(), scale))
            pyro.sample(f"y_{t}", dist.StudentT(4.0, z, 1.0), obs=y[t])

    return model, (y,)


class _Network(PyroModule):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = PyroModule[nn.ModuleList]([])
        for last, size in zip(sizes, sizes[1:]):
            layer: Any = PyroModule[nn.Linear](last, size)
            layer.weight = PyroSample(
                dist.Normal(0.0, 1 / math.sqrt(last)).expand([size, last]).to_event(2)
            )
            layer.bias = PyroSample(dist.Normal(0.0, 1.0).expand([size]).to_event(1))
            self.layers.append(layer)

    def forward(self, x: Any, y: Any = None) -> None:
        for layer in self.layers[:-1]:
            x = layer(x).tanh()
        logits = self.layers[-1](x)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)


def neural_network(inputs: int = 784, units: int = 100, rows: int = 1_000) -> Program:
    """The weights of one."""
    x = torch.randn(rows, inputs)
    return _Network(inputs, units, 10), (x, x[:, :10].argmax(-1))


# with the sizes of smoke tests
PROGRAMS: dict[str, tuple[Callable[..., Program], dict[str, int]]] = {
    "local_effects": (local_effects, {"rows": 50}),
    "gamma_regression": (gamma_regression, {"rows": 20, "groups": 3}),
    "logistic_regression": (logistic_regression, {"rows": 50, "columns": 3}),
    "table": (table, {"size": 5}),
    "ratings": (ratings, {"users": 5, "films": 4, "rows": 20, "rank": 1}),
    "random_walk": (random_walk, {"length": 5}),
    "bent_chain": (bent_chain, {"length": 5}),
    "neural_network": (neural_network, {"inputs": 10, "units": 5, "rows": 20}),
}


def measure(
    make: Callable[[], Program], kind: Callable, rate: float, steps: int, seed: int
) -> dict[str, Any]:
    """Trains a guide, and returns its loss, with a standard error, and what it took."""
    pyro.set_rng_seed(0)
    model, data = make()
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = kind(model)
    svi = SVI(model, guide, Adam({"lr": rate}), Trace_ELBO(max_plate_nesting=2))
    times = [time.process_time()]
    for _ in range(1 + steps):
        svi.step(*data)
        times.append(time.process_time())
    losses = torch.tensor([svi.evaluate_loss(*data) for _ in range(SCORED)])
    rules = [note.rule for note in getattr(guide, "rules", {}).values()]
    return {
        "loss": float(losses.mean()),
        "error": float(losses.std()) / len(losses) ** 0.5,
        "first": times[1] - times[0],
        "step": (times[-1] - times[1]) / steps,
        "rules": {rule: rules.count(rule) for rule in sorted(set(rules))},
    }


def main() -> None:
    """Measures, prints and writes ``results/large_models.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="small ones, to see that it runs; writes no results"
    )
    parser.add_argument("--only", nargs="*", choices=PROGRAMS, default=[*PROGRAMS])
    parser.add_argument("--rates", nargs="*", type=float, default=[0.005, 0.05, 0.5])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cpu", help="another one's results are printed, and not written"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.device != "cpu":
        torch.set_default_device(arguments.device)
    torch.set_num_threads(1)
    # whose imports the first call shall not be told to take
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    steps = 2 if arguments.smoke else arguments.steps
    records = []
    for name in arguments.only:
        program, small = PROGRAMS[name]
        for rate in arguments.rates[: 1 if arguments.smoke else None]:
            for guide, kind in GUIDES.items():
                make = functools.partial(program, **(small if arguments.smoke else {}))
                found = measure(make, kind, rate, steps, arguments.seed)
                records.append({"program": name, "rate": rate, "guide": guide, **found})
                took = f"first {found['first']:.1f} s, a step {1e3 * found['step']:.0f} ms"
                loss = f"{found['loss']:.1f} +- {found['error']:.1f}"
                print(f"{name} {rate:g} {guide}: {loss}, {took} {found['rules']}", flush=True)
    if arguments.smoke or arguments.device != "cpu":
        return
    about = {
        "torch": torch.__version__,
        "pyro": pyro.__version__,
        "python": platform.python_version(),
    }
    found = {**about, "steps": steps, "seed": arguments.seed, "records": records}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
