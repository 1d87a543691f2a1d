"""What a learning rate costs: eight schools and radon by SVI at rates far below and above the usual one.

The loss is the exact log evidence minus the ELBO, in nats, after the same number of steps at every rate: 2,500 (eight
schools) or 3,000 (radon, `examples/mixed_models.py`) steps of ClippedAdam, whose rate decays to 1% of the first, 16
particles each. Eight schools have their evidence by quadrature, radon by importance sampling of three variances.
Run with::

    python benchmarks/rates.py [--smoke] [--seeds N] [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import ClippedAdam
from svi_step import EFFECTS, ERRORS, eight_schools

from pyro_nami import AutoNaMIGuide

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import mixed_models  # noqa: E402
import quickstart  # noqa: E402
from references import exact_posterior  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "rates.json"
PARTICLES = 16


class Case(NamedTuple):
    """A model with its data, how it is trained, and the gap that its ELBO shall not exceed at any of the rates."""

    model: Callable
    args: tuple[Any, ...]
    log_evidence: float
    steps: int
    rates: tuple[float, ...]
    limit: float
    draws: int  # of one estimate of the ELBO
    estimates: int


def cases(smoke: bool) -> dict[str, Case]:
    """The two models; their evidence is computed here, by fewer proposals in a smoke run."""
    schools = torch.tensor(ERRORS), torch.tensor(EFFECTS)
    houses = mixed_models.read_radon()
    pyro.set_rng_seed(0)
    evidence = exact_posterior(mixed_models.linear_radon(*houses), 200 if smoke else 20_000).log_evidence
    found = {
        "eight_schools": Case(
            eight_schools, schools, quickstart.Exact().log_evidence, 2_500, (0.003, 0.01, 0.03, 0.1), 0.05, 2_000, 5
        ),
        "radon": Case(mixed_models.radon, houses, evidence, 3_000, (0.003, 0.01, 0.05), 0.1, 200, 20),
    }
    few = {"steps": 2, "draws": 10, "estimates": 2} if smoke else {}
    return {name: case._replace(**few) for name, case in found.items()}


def gap(case: Case, rate: float, seed: int) -> float:
    """The gap in nats after training from one seed."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = AutoNaMIGuide(case.model)
    optimizer = ClippedAdam({"lr": rate, "lrd": 0.01 ** (1 / case.steps)})
    svi = SVI(case.model, guide, optimizer, Trace_ELBO(PARTICLES, max_plate_nesting=2, vectorize_particles=True))
    for _ in range(case.steps):
        svi.step(*case.args)
    elbo = Trace_ELBO(case.draws, max_plate_nesting=2, vectorize_particles=True)
    pyro.set_rng_seed(99)
    with torch.no_grad():
        found = [-elbo.loss(case.model, guide, *case.args) for _ in range(case.estimates)]
    return case.log_evidence - statistics.mean(found)


def main() -> None:
    """Trains at all rates, prints the gaps and writes them, unless it is a smoke run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps; writes nothing")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", choices=("eight_schools", "radon"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for name, case in cases(arguments.smoke).items():
        if arguments.only not in (None, name):
            continue
        for rate in case.rates:
            gaps = [round(gap(case, rate, seed), 4) for seed in range(arguments.seeds)]
            print(f"{name:14} rate {rate:<6} gap {gaps} nats (limit {case.limit})", flush=True)
            rows.append({"model": name, "rate": rate, "steps": case.steps, "gaps": gaps, "limit": case.limit})
    if not arguments.smoke and arguments.only is None:
        versions = {"torch": torch.__version__, "pyro": pyro.__version__, "python": platform.python_version()}
        RESULTS.write_text(json.dumps({**versions, "particles": PARTICLES, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
