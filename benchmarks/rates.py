"""What a learning rate costs: eight schools and radon by SVI at rates far below and above the usual one.

The loss is the exact log evidence minus the ELBO, in nats, after the same number of steps at every rate: 2,500 (eight
schools) or 3,000 (radon, `examples/mixed_models.py`) steps of ClippedAdam, whose rate decays to 1% of the first, 16
particles each. Eight schools have their evidence by quadrature, radon by importance sampling of three variances.

With ``--learned`` it is what learned factors lose: pumps, seeds and radon with rules off (``exact=False``), with
offsets for the plates' instances (the default) and without; the loss is to the family's own optimum, the best ELBO of
all runs, among them one of each five times as long. Run with::

    python benchmarks/rates.py [--smoke] [--seeds N] [--only NAME] [--learned]
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
from example_models import pump_failures, pumps
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import ClippedAdam
from svi_step import EFFECTS, ERRORS, eight_schools

from pyro_nami import AutoNaMIGuide

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import mixed_models  # noqa: E402
import quickstart  # noqa: E402
from references import exact_posterior  # noqa: E402

RESULTS = Path(__file__).parent / "results"
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
    evidence = exact_posterior(
        mixed_models.linear_radon(*houses), 200 if smoke else 20_000
    ).log_evidence
    found = {
        "eight_schools": Case(
            eight_schools,
            schools,
            quickstart.Exact().log_evidence,
            2_500,
            (0.003, 0.01, 0.03, 0.1),
            0.05,
            2_000,
            5,
        ),
        "radon": Case(
            mixed_models.radon, houses, evidence, 3_000, (0.003, 0.01, 0.05), 0.1, 200, 20
        ),
    }
    return few_steps(found, smoke)


def learned_cases(smoke: bool) -> dict[str, Case]:
    """Models to be learned without rules, whose family has an optimum that is not known."""
    found = {}
    for name, model, args in (
        ("pumps", pumps, pump_failures()),
        ("seeds", mixed_models.seeds, mixed_models.read_seeds()),
        ("radon", mixed_models.radon, mixed_models.read_radon()),
    ):
        found[name] = Case(model, args, 0.0, 1_000, (0.003, 0.01, 0.03), 0.05, 200, 20)
    return few_steps(found, smoke)


def few_steps(found: dict[str, Case], smoke: bool) -> dict[str, Case]:
    """The cases, cut short for a smoke run."""
    few = {"steps": 2, "draws": 10, "estimates": 2} if smoke else {}
    return {name: case._replace(**few) for name, case in found.items()}


def gap(case: Case, rate: float, seed: int, **options: Any) -> float:
    """The gap in nats after training from one seed, of a guide with some options."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = AutoNaMIGuide(case.model, **options)
    optimizer = ClippedAdam({"lr": rate, "lrd": 0.01 ** (1 / case.steps)})
    svi = SVI(
        case.model,
        guide,
        optimizer,
        Trace_ELBO(PARTICLES, max_plate_nesting=2, vectorize_particles=True),
    )
    for _ in range(case.steps):
        svi.step(*case.args)
    elbo = Trace_ELBO(case.draws, max_plate_nesting=2, vectorize_particles=True)
    pyro.set_rng_seed(99)
    with torch.no_grad():
        found = [-elbo.loss(case.model, guide, *case.args) for _ in range(case.estimates)]
    return case.log_evidence - statistics.mean(found)


def learned(case: Case, seeds: int) -> list[dict[str, Any]]:
    """Rows of both ways at all rates, and five times as long at the middle one; gaps to the best ELBO of all."""
    long = case._replace(steps=5 * case.steps)
    rows = []
    for mode in ("auto", "amortized"):
        for rate, tried in ((case.rates[1], long), *((rate, case) for rate in case.rates)):
            elbos = [-gap(tried, rate, seed, exact=False, mode=mode) for seed in range(seeds)]
            rows.append({"mode": mode, "rate": rate, "steps": tried.steps, "elbos": elbos})
    best = max(max(row["elbos"]) for row in rows)
    return [{**row, "gaps": [round(best - elbo, 4) for elbo in row.pop("elbos")]} for row in rows]


def main() -> None:
    """Trains at all rates, prints the gaps and writes them, unless it is a smoke run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a few steps; writes nothing")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", choices=("eight_schools", "radon", "pumps", "seeds"))
    parser.add_argument(
        "--learned", action="store_true", help="without rules, against the family's optimum"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for name, case in (learned_cases if arguments.learned else cases)(arguments.smoke).items():
        if arguments.only not in (None, name):
            continue
        if arguments.learned:
            found = learned(case, arguments.seeds)
        else:
            gaps = {
                rate: [gap(case, rate, n) for n in range(arguments.seeds)] for rate in case.rates
            }
            found = [
                {"rate": rate, "steps": case.steps, "gaps": [round(each, 4) for each in values]}
                for rate, values in gaps.items()
            ]
        for row in found:
            told = f", mode={row['mode']!r}" if arguments.learned else ""
            print(
                f"{name:14} rate {row['rate']:<6} {row['steps']} steps{told} gap {row['gaps']} nats "
                f"(limit {case.limit})",
                flush=True,
            )
            rows.append({"model": name, **row, "limit": case.limit})
    if not arguments.smoke and arguments.only is None:
        versions = {
            "torch": torch.__version__,
            "pyro": pyro.__version__,
            "python": platform.python_version(),
        }
        file = RESULTS / ("learned_rates.json" if arguments.learned else "rates.json")
        file.write_text(
            json.dumps({**versions, "particles": PARTICLES, "rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
