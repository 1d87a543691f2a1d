"""Linear regressions under flat priors: what is derived, how far means and sds are off, and what that costs.

The regressions of posteriordb, whose reference means and sds are those of long runs of NUTS, in several ways of writing
them: as wide `Uniform`s or `ImproperUniform`s, the coefficients as one vector, one by one, or in a plate. A row is one
program: the largest error of a mean in sds, the largest relative error of an sd, CPU seconds from the guide's making to
4,000 draws, and what is left to learn. Run with::

    python benchmarks/flat_priors.py [--smoke] [--data FOLDER]
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from posteriors import FOLDER
from posteriors.designs import Regression, is_regression, regression
from pyro.distributions import constraints
from torch import Tensor

from pyro_nami import AutoNaMIGuide

RESULTS = Path(__file__).parent / "results" / "flat_priors.json"
DRAWS = 4000
SMOKE = ("kidiq-kidscore_momiq", "earnings-earn_height")


class Reference(NamedTuple):
    """A linear regression of posteriordb with its reference means and sds."""

    name: str
    case: Regression
    summary: dict[str, Any]


def references(folder: Path) -> Iterator[Reference]:
    """Yields each linear regression of posteriordb under flat priors."""
    for path in sorted(folder.glob("*.summary.json")):
        name = path.name.removesuffix(".summary.json")
        if is_regression(name):
            summary = json.loads(path.read_text())
            file = summary.get("data_file", f"{name}.data.json")
            yield Reference(
                name, regression(name, json.loads((folder / file).read_text())), summary
            )


def flat(bound: float | None, low: float | None = None) -> Any:
    """Returns a prior that is flat up to a bound, or without one; above ``low`` 0, if that is given."""
    if bound is not None:
        return dist.Uniform(-bound if low is None else low, bound)
    return dist.ImproperUniform(constraints.real if low is None else constraints.positive, (), ())


def _scale(case: Regression, bound: float | None) -> Tensor:
    return pyro.sample("sigma", dist.HalfCauchy(2.5) if case.half_cauchy else flat(bound, low=0.0))


def vector(case: Regression, bound: float | None) -> Callable[[Tensor | None], None]:
    """The coefficients as one vector, and a product that no batch dim broadcasts with."""

    def model(y: Tensor | None = None) -> None:
        size = case.design.shape[-1]
        prior: Any = dist.ImproperUniform(constraints.real_vector, (), (size,))
        beta = pyro.sample(
            "beta", prior if bound is None else flat(bound).expand([size]).to_event(1)
        )
        sigma = _scale(case, bound)
        with pyro.plate("rows", len(case.design)):
            pyro.sample("y", dist.Normal(case.design @ beta, sigma), obs=y)

    return model


def summed(case: Regression, bound: float | None) -> Callable[[Tensor | None], None]:
    """The coefficients as one vector, and a sum over them."""

    def model(y: Tensor | None = None) -> None:
        size = case.design.shape[-1]
        beta = pyro.sample("beta", flat(bound).expand([size]).to_event(1))
        sigma = _scale(case, bound)
        with pyro.plate("rows", len(case.design)):
            pyro.sample("y", dist.Normal((case.design * beta).sum(-1), sigma), obs=y)

    return model


def separate(case: Regression, bound: float | None) -> Callable[[Tensor | None], None]:
    """The coefficients one by one."""

    def model(y: Tensor | None = None) -> None:
        columns = case.design.unbind(-1)
        terms = [
            pyro.sample(f"beta_{i}", flat(bound)) * column for i, column in enumerate(columns, 1)
        ]
        sigma = _scale(case, bound)
        with pyro.plate("rows", len(case.design)):
            pyro.sample("y", dist.Normal(sum(terms), sigma), obs=y)

    return model


def plated(case: Regression, bound: float | None) -> Callable[[Tensor | None], None]:
    """The coefficients in a plate."""

    def model(y: Tensor | None = None) -> None:
        with pyro.plate("coefficients", case.design.shape[-1]):
            beta = pyro.sample("beta", flat(bound))
        sigma = _scale(case, bound)
        with pyro.plate("rows", len(case.design)):
            pyro.sample("y", dist.Normal(case.design @ beta, sigma), obs=y)

    return model


STYLES: dict[str, Callable] = {
    "vector": vector,
    "sum": summed,
    "separate": separate,
    "plate": plated,
}


def measured(
    make: Callable, case: Regression, bound: float | None, summary: dict[str, Any]
) -> dict[str, Any]:
    """Returns what one program's guide is off by, and its cost."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = make(case, bound)
    start = time.process_time()
    guide = AutoNaMIGuide(model)
    with torch.no_grad(), pyro.plate("draws", DRAWS, dim=-2):
        draws = guide(case.outcomes)
    seconds = time.process_time() - start
    if "beta_1" in draws:
        size = case.design.shape[-1]
        beta = torch.stack([draws[f"beta_{i}"].reshape(DRAWS) for i in range(1, size + 1)], -1)
    else:
        beta = draws["beta"].reshape(DRAWS, -1)
    found = torch.cat([beta, draws["sigma"].reshape(DRAWS, 1)], -1).double()
    mean, sd = (torch.tensor(summary[key], dtype=torch.float64) for key in ("mean", "sd"))
    notes = guide.rules.items()
    return {
        "learned": [
            f"{name}: {note}" for name, note in notes if note.rule not in ("exact", "quadrature")
        ],
        "mean": float(((found.mean(0) - mean) / sd).abs().max()),
        "sd": float((found.std(0) / sd - 1).abs().max()),
        "seconds": seconds,
    }


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="two posteriors, and no file")
    parser.add_argument(
        "--data", type=Path, default=FOLDER, help="posteriordb's summaries and data"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.broadcast_shapes((1,), (2,))  # which imports a second's worth of torch once
    rows = []
    print(f"{'posterior':36} {'style':9} {'prior':8} {'mean':>6} {'sd':>6} {'s':>5}  learned")
    for name, case, summary in references(options.data):
        if options.smoke and name not in SMOKE:
            continue
        for style, make in STYLES.items():
            for bound in (case.bound, None):
                row = measured(make, case, bound, summary)
                prior = "improper" if bound is None else "uniform"
                rows.append({"posterior": name, "style": style, "prior": prior, **row})
                figures = f"{row['mean']:6.3f} {row['sd']:6.3f} {row['seconds']:5.1f}"
                print(
                    f"{name:36} {style:9} {prior:8} {figures}  {'; '.join(row['learned'])}",
                    flush=True,
                )
    if not options.smoke:
        RESULTS.write_text(
            json.dumps({"torch": torch.__version__, "draws": DRAWS, "rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
