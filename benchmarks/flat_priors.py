"""Linear regressions under flat priors: what is derived, how far means and sds are off, and what that costs.

The regressions of posteriordb, whose reference means and sds are those of long runs of NUTS, in several ways of writing
them: as wide `Uniform`s or `ImproperUniform`s, the coefficients as one vector, one by one, or in a plate. A row is one
program: the largest error of a mean in sds, the largest relative error of an sd, CPU seconds from the guide's making to
4,000 draws, and what is left to learn. Run with::

    python benchmarks/flat_priors.py [--smoke] [--data FOLDER]
"""

from __future__ import annotations

import functools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from posteriors import FLAT, Posterior, improper, options, posteriors
from posteriors.designs import is_regression
from posteriors.programs import Flat, noise_scale, regression
from pyro.distributions import constraints
from torch import Tensor

from pyro_nami import AutoNaMIGuide

RESULTS = Path(__file__).parent / "results" / "flat_priors.json"
DRAWS = 4000
SMOKE = ("kidiq-kidscore_momiq", "earnings-earn_height")


def vector(flat: Flat, x: Tensor, bound: float, half_cauchy: bool, y: Tensor | None = None) -> None:
    """The coefficients as one vector, and a product that no batch dim broadcasts with."""
    size = x.shape[-1]
    prior: Any = flat(bound).expand([size]).to_event(1)
    if flat is improper:
        prior = dist.ImproperUniform(constraints.real_vector, (), (size,))
    beta = pyro.sample("beta", prior)
    sigma = noise_scale(flat, bound, half_cauchy)
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def separate(
    flat: Flat, x: Tensor, bound: float, half_cauchy: bool, y: Tensor | None = None
) -> None:
    """The coefficients one by one."""
    columns = enumerate(x.unbind(-1), 1)
    terms = [pyro.sample(f"beta_{i}", flat(bound)) * column for i, column in columns]
    sigma = noise_scale(flat, bound, half_cauchy)
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(sum(terms), sigma), obs=y)


def plated(flat: Flat, x: Tensor, bound: float, half_cauchy: bool, y: Tensor | None = None) -> None:
    """The coefficients in a plate."""
    with pyro.plate("coefficients", x.shape[-1]):
        beta = pyro.sample("beta", flat(bound))
    sigma = noise_scale(flat, bound, half_cauchy)
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


STYLES: dict[str, Callable[..., None]] = {
    "vector": vector,
    "sum": regression,  # the coefficients as one vector, and a sum over them
    "separate": separate,
    "plate": plated,
}


def measured(model: Callable[..., None], posterior: Posterior) -> dict[str, Any]:
    """Returns what the guide of a program of a posterior is off by, and its cost."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    start = time.process_time()
    guide = AutoNaMIGuide(model)
    with torch.no_grad(), pyro.plate("draws", DRAWS, dim=-2):
        draws = guide(*posterior.args)
    seconds = time.process_time() - start
    if "beta_1" in draws:
        names = [name for name in draws if name.startswith("beta_")]
        draws["beta"] = torch.cat([draws[name].reshape(DRAWS, 1) for name in names], -1)
    errors = posterior.errors(draws)
    notes = guide.rules.items()
    return {
        "learned": [
            f"{name}: {note}" for name, note in notes if note.rule not in ("exact", "quadrature")
        ],
        "mean": errors.mean,
        "sd": errors.sd,
        "seconds": seconds,
    }


def main() -> None:
    """Prints the table, and writes it."""
    given = options(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.broadcast_shapes((1,), (2,))  # which imports a second's worth of torch once
    rows = []
    print(f"{'posterior':36} {'style':9} {'prior':8} {'mean':>6} {'sd':>6} {'s':>5}  learned")
    for posterior in filter(lambda each: is_regression(each.name), posteriors(given.data)):
        name = posterior.name
        if given.smoke and name not in SMOKE:
            continue
        for style, program in STYLES.items():
            for prior, flat in FLAT.items():
                row = measured(functools.partial(program, flat), posterior)
                rows.append({"posterior": name, "style": style, "prior": prior, **row})
                figures = f"{row['mean']:6.3f} {row['sd']:6.3f} {row['seconds']:5.1f}"
                print(
                    f"{name:36} {style:9} {prior:8} {figures}  {'; '.join(row['learned'])}",
                    flush=True,
                )
    if not given.smoke:
        RESULTS.write_text(
            json.dumps({"torch": torch.__version__, "draws": DRAWS, "rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
