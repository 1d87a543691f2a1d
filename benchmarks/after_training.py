"""Time of what follows training: draws by `Predictive`, one after another and at once, and `quantiles`.

`AutoNaMIGuide` against `AutoNormal` on six models, both with default settings and trained for a few steps, as time does
not depend on how many. The guides take turns in one run; a ratio is the median over rounds of the ratio within a round,
on one thread. The first prediction, which derives what later ones hand out, is in the figures. Run with::

    python benchmarks/after_training.py [--smoke] [--only NAME ...]
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
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from svi_step import EFFECTS, ERRORS, eight_schools
from torch import Tensor

from pyro_nami import AutoNaMIGuide

RESULTS = Path(__file__).parent / "results" / "after_training.json"
USES = ("sequential", "parallel", "quantiles")
LIMITS = {"sequential": 5.0, "parallel": 2.0}  # times AutoNormal's
STEPS = 5  # of training
NUMBERS = torch.Generator().manual_seed(0)


class Case(NamedTuple):
    """A model, its inputs and its data."""

    model: Callable
    inputs: tuple[Tensor, ...]
    data: Tensor


def regression(x: Tensor, y: Tensor | None = None) -> Tensor:
    a, b = (pyro.sample(name, dist.Normal(0.0, 10.0)) for name in "ab")
    s = pyro.sample("s", dist.HalfNormal(1.0))
    with pyro.plate("rows", len(x)):
        return pyro.sample("y", dist.Normal(a + b * x, s), obs=y)


def intercepts(x: Tensor, group: Tensor, y: Tensor | None = None) -> Tensor:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfNormal(1.0))
    slope, s = pyro.sample("slope", dist.Normal(0.0, 5.0)), pyro.sample("s", dist.HalfNormal(1.0))
    with pyro.plate("groups", 20):
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
    with pyro.plate("rows", len(x)):
        return pyro.sample("y", dist.Normal(alpha[..., group] + slope * x, s), obs=y)


def counts(x: Tensor, group: Tensor, y: Tensor | None = None) -> Tensor:
    a, b = (pyro.sample(name, dist.Normal(0.0, 2.0)) for name in "ab")
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", 20):
        e = pyro.sample("e", dist.Normal(0.0, tau))
    with pyro.plate("rows", len(x)):
        return pyro.sample("y", dist.Poisson((a + b * x + e[..., group]).exp()), obs=y)


def mixture(x: Tensor, y: Tensor | None = None) -> Tensor:
    weight = pyro.sample("weight", dist.Beta(2.0, 2.0))
    low, high = (
        pyro.sample("low", dist.Normal(-1.0, 1.0)),
        pyro.sample("high", dist.Normal(1.0, 1.0)),
    )
    locations = torch.stack([low + x, high + x], -1)
    weights = torch.stack([1 - weight, weight], -1).expand(locations.shape)
    with pyro.plate("rows", len(x)):
        parts = dist.Normal(locations, 0.5)
        return pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weights), parts), obs=y)


def rating_scale(y: Tensor | None = None) -> Tensor:
    """60 persons answer 10 items on four ordered levels."""
    with pyro.plate("items", 10, dim=-1):
        base = pyro.sample("base", dist.Normal(0.0, 1.0))
        below, above = (pyro.sample(name, dist.LogNormal(0.0, 0.5)) for name in ("below", "above"))
    with pyro.plate("persons", 60, dim=-2):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
    cuts = torch.stack(torch.broadcast_tensors(base - below, base, base + above), -1)
    with pyro.plate("answering", 60, dim=-2), pyro.plate("answered", 10, dim=-1):
        up_to = torch.sigmoid(cuts - ability[..., None])
        none = torch.zeros(up_to.shape[:-1] + (1,))
        levels = torch.cat([up_to, none + 1], -1) - torch.cat([none, up_to], -1)
        return pyro.sample("y", dist.Categorical(levels), obs=y)


def cases() -> dict[str, Case]:
    """Returns the models by name."""
    x, group = torch.randn(200, generator=NUMBERS), torch.arange(200) % 20
    noise = torch.randn(200, generator=NUMBERS)
    counted = torch.poisson((0.5 + 0.3 * x).exp(), generator=NUMBERS)
    return {
        "eight schools": Case(eight_schools, (torch.tensor(ERRORS),), torch.tensor(EFFECTS)),
        "regression": Case(regression, (x,), 1 + 2 * x + noise / 2),
        "varying intercepts": Case(intercepts, (x, group), group / 10 + x + noise / 2),
        "counts": Case(counts, (x, group), counted),
        "mixture": Case(mixture, (x,), noise.sign() + x + noise / 4),
        "rating scale": Case(rating_scale, (), torch.randint(0, 4, (60, 10), generator=NUMBERS)),
    }


def trained(kind: Any, case: Case) -> Any:
    """Returns a guide after a few steps."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = kind(case.model)
    svi = SVI(case.model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    for _ in range(STEPS):
        svi.step(*case.inputs, case.data)
    return guide


def seconds(guide: Any, case: Case, use: str, draws: int) -> float:
    """Returns CPU seconds of one use of a trained guide."""
    start = time.process_time()
    if use == "quantiles":
        guide.quantiles([0.05, 0.5, 0.95], *case.inputs)
    else:
        Predictive(case.model, guide=guide, num_samples=draws, parallel=use == "parallel")(
            *case.inputs
        )
    return time.process_time() - start


def measure(name: str, case: Case, rounds: int, draws: int) -> list[dict[str, Any]]:
    """Returns a record for each use: medians of both guides, and their ratio."""
    guides = {kind.__name__: trained(kind, case) for kind in (AutoNaMIGuide, AutoNormal)}
    records = []
    for use in USES:
        found = {
            key: [seconds(guide, case, use, draws) for _ in range(rounds)]
            for key, guide in guides.items()
        }
        ratios = [ours / theirs for ours, theirs in zip(*found.values())]
        middle = {key: statistics.median(each) for key, each in found.items()}
        records.append(
            {
                "model": name,
                "use": use,
                "draws": draws,
                "seconds": middle,
                "ratio": statistics.median(ratios),
            }
        )
    return records


def main() -> None:
    """Measures, prints and writes ``results/after_training.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a few draws, to see that it runs; writes no results"
    )
    parser.add_argument("--only", nargs="+", help="names of models; writes no results")
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds in which the guides take turns"
    )
    parser.add_argument("--draws", type=int, default=1000, help="by one prediction")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds, draws = (1, 4) if arguments.smoke else (arguments.rounds, arguments.draws)
    names = arguments.only or (["regression"] if arguments.smoke else list(cases()))
    records = []
    print(
        f"{'model':<20} {'use':<11} {'AutoNaMIGuide':>14} {'AutoNormal':>11} {'ratio':>7}   limit"
    )
    for name in names:
        for record in measure(name, cases()[name], rounds, draws):
            ours, theirs = record["seconds"].values()
            limit = LIMITS.get(record["use"], "")
            print(
                f"{name:<20} {record['use']:<11} {ours:12.3f} s {theirs:9.3f} s {record['ratio']:7.1f}   {limit}"
            )
            records.append(record)
    if arguments.smoke or arguments.only:
        return
    versions = {
        "torch": torch.__version__,
        "pyro": pyro.__version__,
        "python": platform.python_version(),
    }
    RESULTS.write_text(
        json.dumps({**versions, "rounds": rounds, "records": records}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
