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
from pyro.distributions import constraints
from torch import Tensor

from pyro_nami import AutoNaMIGuide

RESULTS = Path(__file__).parent / "results" / "flat_priors.json"
DATA = Path(__file__).parents[2] / "shared" / "data" / "posteriordb"
DRAWS = 4000
SMOKE = ("kidiq-kidscore_momiq", "earnings-earn_height")


class Regression(NamedTuple):
    """A regression of posteriordb: its design ``(rows, coefficients)``, outcomes, and how wide its priors are to be."""

    design: Tensor
    outcomes: Tensor
    bound: float
    half_cauchy: bool  # whether the noise has that prior, as in the source; else it is flat


def _columns(*columns: Any) -> Tensor:
    first = torch.as_tensor(columns[0], dtype=torch.float64)
    rows = [
        torch.ones_like(first),
        *(torch.as_tensor(each, dtype=torch.float64) for each in columns),
    ]
    return torch.stack(rows, -1).float()


def _centred(values: Any, unit: bool) -> Tensor:
    values = torch.as_tensor(values, dtype=torch.float64)
    return (values - values.mean()) / (2 * values.std() if unit else 1.0)


def _kidiq(data: dict[str, Any], kind: str) -> Tensor:
    school, iq = (torch.as_tensor(data[name], dtype=torch.float64) for name in ("mom_hs", "mom_iq"))
    if kind.startswith("interaction_"):
        school, iq = (_centred(each, kind == "interaction_z") for each in (school, iq))
    parts = {"momhs": [school], "momiq": [iq], "momhsiq": [school, iq]}
    return _columns(*parts.get(kind, [school, iq, school * iq]))


def _earnings(data: dict[str, Any], kind: str) -> Tensor:
    height = torch.as_tensor(data["height"], dtype=torch.float64)
    return (
        _columns(height.log(), data["male"])
        if kind == "logearn_logheight_male"
        else _columns(height)
    )


def _mesquite(data: dict[str, Any], kind: str) -> Tensor:
    names = ("diam1", "diam2", "canopy_height", "total_height", "density")
    one, two, canopy, total, density = (
        torch.as_tensor(data[name], dtype=torch.float64) for name in names
    )
    volume, area, shape = (one * two * canopy).log(), (one * two).log(), (one / two).log()
    if kind == "logmesquite_logvas":
        return _columns(volume, area, shape, total.log(), density.log(), data["group"])
    if kind == "logmesquite_logvolume":
        return _columns(volume)
    parts = [one, two, canopy, total, density]
    return _columns(
        *(part.log() if kind == "logmesquite" else part for part in parts), data["group"]
    )


def _nes(data: dict[str, Any]) -> Tensor:
    age = torch.as_tensor(data["age_discrete"])
    groups = ((age == each).double() for each in (2, 3, 4))
    rest = (data[name] for name in ("educ1", "gender", "income"))
    return _columns(data["real_ideo"], data["race_adj"], *groups, *rest)


def regression(folder: Path, name: str, summary: dict[str, Any]) -> Regression:
    """Returns the regression of a posterior of posteriordb."""
    data_of, kind = name.split("-")
    data = json.loads((folder / summary.get("data_file", f"{name}.data.json")).read_text())
    kind = kind.removeprefix("kidscore_")
    if data_of.startswith("kidiq"):
        return Regression(
            _kidiq(data, kind), torch.tensor(data["kid_score"]).float(), 1e3, "with" not in data_of
        )
    if data_of == "earnings":
        return _in_logs(_earnings(data, kind), data["earn"], kind, 1e6)
    if data_of == "mesquite":
        return _in_logs(_mesquite(data, kind), data["weight"], kind, 1e4)
    return Regression(_nes(data), torch.tensor(data["partyid7"]).float(), 1e3, False)


def _in_logs(design: Tensor, outcomes: Any, kind: str, bound: float) -> Regression:
    """Returns a regression of outcomes, or of their logarithms where its name says so."""
    y = torch.as_tensor(outcomes, dtype=torch.float64)
    if kind.startswith("log"):
        y, bound = y.log(), 1e3
    return Regression(design, y.float(), bound, False)


def posteriors(folder: Path) -> Iterator[tuple[str, Regression, dict[str, Any]]]:
    """Yields name, regression and reference summary of each linear regression of posteriordb."""
    for path in sorted(folder.glob("*.summary.json")):
        name = path.name.removesuffix(".summary.json")
        if name.split("-")[0].startswith(("kidiq", "earnings", "mesquite", "nes")):
            summary = json.loads(path.read_text())
            yield name, regression(folder, name, summary), summary


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
    parser.add_argument("--data", type=Path, default=DATA, help="posteriordb's summaries and data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.broadcast_shapes((1,), (2,))  # which imports a second's worth of torch once
    rows = []
    print(f"{'posterior':36} {'style':9} {'prior':8} {'mean':>6} {'sd':>6} {'s':>5}  learned")
    for name, case, summary in posteriors(options.data):
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
