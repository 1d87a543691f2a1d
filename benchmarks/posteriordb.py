"""Reference posteriors of posteriordb: how far a guide is off at its first call and after some steps of SVI.

A row is one posterior with flat priors written as wide `Uniform`s or as `ImproperUniform`s, and one seed: the largest
error of a mean in reference standard deviations, and the largest relative error of a standard deviation, before the
first step and after the last; CPU seconds of the first call and of a step; and what is learned. Run with::

    python benchmarks/posteriordb.py [--smoke] [--data FOLDER] [--steps 300] [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import pyro
import torch
from posteriors import FOLDER, Posterior, improper, posteriors, wide
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import ClippedAdam

from pyro_nami import AutoNaMIGuide

RESULTS = Path(__file__).parent / "results" / "posteriordb.json"
FLAT = {"uniform": wide, "improper": improper}
SMOKE = ("eight_schools-eight_schools_noncentered", "kilpisjarvi_mod-kilpisjarvi")
DRAWS, PARTICLES, RATE, LAST = 4000, 16, 0.05, 0.01
MOST_MEAN, MOST_SD = 0.1, 0.1  # errors that a user does not see in a table


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
        decay = {"lr": RATE, "lrd": LAST ** (1 / steps)}
        elbo = Trace_ELBO(PARTICLES, vectorize_particles=True, max_plate_nesting=2)
        svi = SVI(posterior.model, guide, ClippedAdam(decay), elbo)
        for _ in range(steps):
            svi.step(*posterior.args)
        row["step"] = (time.process_time() - start) / steps
    row["last"] = _errors(posterior, guide)
    return row


def _errors(posterior: Posterior, guide: AutoNaMIGuide) -> list[Any]:
    with torch.no_grad(), pyro.plate("draws", DRAWS, dim=-3):
        return list(posterior.errors(guide(*posterior.args)))


def is_right(errors: list[Any]) -> bool:
    """Whether no mean and no standard deviation is off by more than a user sees."""
    return errors[0] <= MOST_MEAN and errors[1] <= MOST_SD


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="two posteriors, and no file")
    parser.add_argument(
        "--data", type=Path, default=FOLDER, help="posteriordb's summaries and data"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="posteriors whose names hold this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    print(
        f"{'posterior':44} {'prior':8} {'first call':>10} {'mean':>6} {'sd':>6} {'step':>6} {'mean':>6} {'sd':>6}"
    )
    for prior, flat in FLAT.items():
        for posterior in posteriors(options.data, flat):
            left_out = options.only not in posterior.name or (
                prior == "improper" and not posterior.is_flat
            )
            if left_out or (options.smoke and posterior.name not in SMOKE):
                continue
            for seed in range(options.seeds):
                case = {"posterior": posterior.name, "prior": prior, "seed": seed}
                try:
                    row = measured(posterior, seed, 5 if options.smoke else options.steps)
                except Exception as error:  # noqa: BLE001  a row that fails is a row that is wrong
                    row = {
                        "error": f"{type(error).__name__}: {str(error)[:200]}",
                        "first": [math.inf] * 2,
                        "last": [math.inf] * 2,
                    }
                rows.append(case | row)
                _show(rows[-1])
    for moment in ("first", "last"):
        right = sum(is_right(row[moment]) for row in rows)
        print(f"{moment}: {right} of {len(rows)} within {MOST_MEAN} sd and {MOST_SD:.0%}")
    if not (options.smoke or options.only):
        RESULTS.write_text(
            json.dumps(
                {"torch": torch.__version__, "draws": DRAWS, "steps": options.steps, "rows": rows},
                indent=1,
            )
            + "\n"
        )


def _show(row: dict[str, Any]) -> None:
    name = f"{row['posterior']:44} {row['prior']:8}"
    if "error" in row:
        print(f"{name} {row['error']}", flush=True)
        return
    first, last = row["first"], row["last"]
    print(
        f"{name} {row['first_call']:9.2f}s {first[0]:6.2f} {first[1]:6.2f} {1e3 * row.get('step', 0):4.0f}ms "
        f"{last[0]:6.2f} {last[1]:6.2f}  {last[2]:12} {', '.join(row['learned'])[:40]}",
        flush=True,
    )


if __name__ == "__main__":
    main()
