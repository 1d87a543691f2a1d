"""When `fit` should stop training: its own rule, RABVI's and DADVI's (`stopping_rules.py`), on the same guides.

A row is one model (`stopping_models.py`), one rule and one seed: CPU seconds of the training alone, steps (evaluations
of DADVI's objective), ELBO in nats (1,000 fresh draws), k-hat, and the effective share of 4,000 weighted draws, 5% of
them the prior's as in `fit`. For RABVI how many rates there were is told, for DADVI by how many nats its objective is
better than the ELBO of fresh draws. The rule ``none`` is the guide before it is trained. All rules start at the same
weights and have the same most seconds. Run with::

    python benchmarks/stopping.py [--smoke] [--only NAME] [--seeds 3] [--seconds 60]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyro
import torch
from stopping_models import cases
from stopping_rules import DRAWS, RULES, Training, weighed

from pyro_nami.inference.importance import BadDensity

RESULTS = Path(__file__).parent / "results" / "stopping.json"
FRESH = 10_000  # added to a seed, for the random numbers of what is measured


def measured(name: str, case: tuple[Callable, tuple], seed: int, seconds: float) -> Iterator[dict]:
    """Yields a row for each rule."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    training = Training.of(*case, seconds)
    first = copy.deepcopy(training.guide.state_dict())
    for rule, trained in RULES.items():
        training.guide.load_state_dict(first)
        pyro.set_rng_seed(seed)
        training.begin()
        row = {"model": name, "rule": rule, "seed": seed, **trained(training, seed)}
        row["seconds"] = training.spent
        pyro.set_rng_seed(seed + FRESH)
        yield row | _quality(training)


def _quality(training: Training) -> dict[str, float]:
    """Returns how good a guide is; one whose log density is NaN somewhere is as bad as can be."""
    try:
        elbo, drawn = training.elbo(), weighed(training.target, DRAWS)
    except BadDensity:
        return {"elbo": -math.inf, "pareto_k": math.inf, "effective": 0.0}
    effective = float(drawn.effective_sample_size) / DRAWS
    return {"elbo": elbo, "pareto_k": float(drawn.pareto_k), "effective": effective}


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="one model, a second each")
    parser.add_argument("--only", default="", help="models whose names hold this")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, at most")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seconds = 1.0 if given.smoke else given.seconds
    only = "effects" if given.smoke else given.only
    rows = []
    print(f"{'model':10} {'rule':6} seed      s  steps      ELBO  k-hat  effective")
    for seed in range(1 if given.smoke else given.seeds):
        for name, case in cases().items():
            for row in measured(name, case, seed, seconds) if only in name else ():
                rows.append(row)
                print(_line(row), flush=True)
        if not (given.smoke or given.only):
            table = {"torch": torch.__version__, "seconds": seconds, "rows": rows}
            RESULTS.write_text(json.dumps(table, indent=1) + "\n")


def _line(row: Mapping[str, Any]) -> str:
    line = (
        f"{row['model']:10} {row['rule']:6} {row['seed']:4} {row['seconds']:6.1f} {row['steps']:6}"
    )
    line += f" {row['elbo']:9.2f} {row['pareto_k']:6.2f} {row['effective']:9.1%}"
    more = [f"{key} {row[key]:.3g}" for key in ("rates", "overfit") if key in row]
    return "  ".join([line, *more])


if __name__ == "__main__":
    main()
