"""Reference posteriors of posteriordb: how far a guide is off at its first call and after some steps of SVI.

A row is one posterior with flat priors written as wide `Uniform`s or as `ImproperUniform`s, and one seed: the largest
error of a mean in reference standard deviations, and the largest relative error of a standard deviation, before the
first step and after the last; CPU seconds of the first call and of a step; and what is learned. With ``--rates``, by
how many nats the ELBO after 50 steps at a constant rate is below that after all steps, at three rates. Run with::

    python benchmarks/posteriordb.py [--smoke] [--data FOLDER] [--steps 300] [--only NAME] [--seeds 1] [--rates]
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyro
import torch
from posteriors import FLAT, Posterior, options, posteriors, wide
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import ClippedAdam

from pyro_nami import AutoNaMIGuide

FOLDER = Path(__file__).parent / "results"
SMOKE = ("eight_schools-eight_schools_noncentered", "kilpisjarvi_mod-kilpisjarvi")
DRAWS, PARTICLES = 4000, 16
RATE, LAST = 0.05, 0.01  # of ClippedAdam at first, and the share of it that is left at last
SMOKE_STEPS = 5
MOST_MEAN, MOST_SD = 0.1, 0.1  # errors that a user does not see in a table
RATES, FEW_STEPS = (0.001, 0.01, 0.05), 50  # of `rate_gaps`
ELBO_DRAWS = 2000


def measured(posterior: Posterior, seed: int, steps: int) -> dict[str, Any]:
    """Returns what the guide of one posterior is off by, and its cost."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    start = time.process_time()
    guide = AutoNaMIGuide(posterior.model)
    guide(*posterior.args)
    row: dict[str, Any] = {"first_call": time.process_time() - start}
    row["learned"] = [name for name, note in guide.rules.items() if note.rule == "learned"]
    row["rules"] = sorted({note.rule for note in guide.rules.values()})
    row["first"] = _errors(posterior, guide)
    start = time.process_time()
    if guide.num_parameters and steps:
        _train(posterior, guide, RATE, steps, LAST)
        row["step"] = (time.process_time() - start) / steps
    row["last"] = _errors(posterior, guide)
    return row


def rate_gaps(posterior: Posterior, seed: int, steps: int) -> dict[str, Any]:
    """Returns the nats of the ELBO that are missing after few steps at each rate, of a guide that learns something."""
    elbos = {}
    for rate, count, last in ((RATE, steps, LAST), *((rate, FEW_STEPS, 1.0) for rate in RATES)):
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        guide = AutoNaMIGuide(posterior.model)
        guide(*posterior.args)
        if not guide.num_parameters:
            return {}
        _train(posterior, guide, rate, count, last)
        pyro.set_rng_seed(seed)
        with torch.no_grad():
            elbo = Trace_ELBO(ELBO_DRAWS, vectorize_particles=True, max_plate_nesting=2)
            elbos[rate, count] = -elbo.loss(posterior.model, guide, *posterior.args)
    final = elbos.pop((RATE, steps))
    return {str(rate): final - elbo for (rate, _), elbo in elbos.items()}


def _train(
    posterior: Posterior, guide: AutoNaMIGuide, rate: float, steps: int, last: float
) -> None:
    elbo = Trace_ELBO(PARTICLES, vectorize_particles=True, max_plate_nesting=2)
    decay = {"lr": rate, "lrd": last ** (1 / steps)}
    svi = SVI(posterior.model, guide, ClippedAdam(decay), elbo)
    for _ in range(steps):
        svi.step(*posterior.args)


def _errors(posterior: Posterior, guide: AutoNaMIGuide) -> list[Any]:
    with torch.no_grad(), pyro.plate("draws", DRAWS, dim=-3):
        return list(posterior.errors(guide(*posterior.args)))


def is_right(errors: list[Any]) -> bool:
    """Whether no mean and no standard deviation is off by more than a user sees."""
    return errors[0] <= MOST_MEAN and errors[1] <= MOST_SD


def main() -> None:
    """Prints the table, and writes it."""
    parser = options(__doc__ or "")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="posteriors whose names hold this")
    parser.add_argument("--rates", action="store_true", help="compare ELBOs after few steps")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if given.rates:
        return _compare_rates(given)
    head = ("first call", "mean", "sd", "step", "mean", "sd")
    print(f"{'posterior':44} {'prior':8}" + "".join(f"{each:>11}" for each in head))
    rows = []
    for prior, posterior in _programs(given):
        for seed in range(given.seeds):
            case = {"posterior": posterior.name, "prior": prior, "seed": seed}
            steps = SMOKE_STEPS if given.smoke else given.steps
            rows.append(case | _row(posterior, seed, steps))
            print(_line(rows[-1]), flush=True)
    for moment in ("first", "last"):
        right = sum(is_right(row[moment]) for row in rows)
        print(f"{moment}: {right} of {len(rows)} within {MOST_MEAN} sd and {MOST_SD:.0%}")
    if not (given.smoke or given.only):
        table = {"torch": torch.__version__, "draws": DRAWS, "steps": given.steps, "rows": rows}
        (FOLDER / "posteriordb.json").write_text(json.dumps(table, indent=1) + "\n")


def _compare_rates(given: argparse.Namespace) -> None:
    """Prints by how much ELBOs after few steps are lower than in the end, and writes it."""
    rows = []
    for prior, posterior in _programs(given):
        steps = SMOKE_STEPS if given.smoke else given.steps
        for seed in range(given.seeds) if prior == "uniform" else ():
            if gaps := rate_gaps(posterior, seed, steps):
                rows.append({"posterior": posterior.name, "seed": seed, "gaps": gaps})
                shown = " ".join(f"{gap:8.3f}" for gap in gaps.values())
                print(f"{posterior.name:44} {shown}", flush=True)
    if not (given.smoke or given.only):
        table = {"torch": torch.__version__, "steps": [FEW_STEPS, given.steps], "rows": rows}
        (FOLDER / "posteriordb_rates.json").write_text(json.dumps(table, indent=1) + "\n")


def _programs(given: argparse.Namespace) -> Iterator[tuple[str, Posterior]]:
    """Yields how flat priors are written, and a posterior; those without flat priors once."""
    for prior, flat in FLAT.items():
        for posterior in posteriors(given.data, flat):
            is_new = posterior.is_flat or flat is wide
            is_asked = posterior.name in SMOKE if given.smoke else given.only in posterior.name
            if is_new and is_asked:
                yield prior, posterior


def _row(posterior: Posterior, seed: int, steps: int) -> dict[str, Any]:
    """Returns the measures of one posterior; those of a program that fails are infinite."""
    try:
        return measured(posterior, seed, steps)
    except Exception as error:  # noqa: BLE001  a row that fails is a row that is wrong
        never = [math.inf] * 2
        return {"error": f"{type(error).__name__}: {error}", "first": never, "last": never}


def _line(row: dict[str, Any]) -> str:
    name = f"{row['posterior']:44} {row['prior']:8}"
    if "error" in row:
        return f"{name} {row['error']}"
    (mean, sd, _), (last_mean, last_sd, worst) = row["first"], row["last"]
    first = f"{row['first_call']:10.2f}s {mean:10.2f} {sd:10.2f}"
    step = f"{1e3 * row.get('step', 0.0):8.0f}ms"
    last = f"{last_mean:10.2f} {last_sd:10.2f}"
    return f"{name} {first} {step} {last}  {worst:12} {', '.join(row['learned'])}"


if __name__ == "__main__":
    main()
