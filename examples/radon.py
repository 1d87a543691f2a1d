"""Radon in 919 houses of 85 Minnesota counties: varying intercepts and slopes, against NUTS and the exact posterior.

Log radon depends on the floor of the measurement, with an intercept and a slope of each county's own: some counties
have 116 houses and some have one, so how far a county is drawn to the others differs (Gelman and Hill 2006, chapter
12; priors as in posteriordb's ``radon_variable_intercept_slope_centered``). The model is centered and reads the
counties through an index, ``alpha[..., county]``. Run with::

    python examples/radon.py [--smoke] [--steps 3000] [--seed 0] [--device cpu] [--out out/radon]
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from references import LinearModel, Problem
from study import GUIDES, Row, argument_parser, draw_intervals, pyplot, study
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_nami import AutoNaMIGuide

DATA = Path(__file__).parent / "data" / "radon_mn.csv"
COMMON = ("mu_a", "mu_b", "tau_a", "tau_b", "sigma")
LEARNED = "AutoNaMIGuide, exact=False"


def model(county: Tensor, floor: Tensor, y: Tensor | None = None) -> Tensor:
    """The centered model; ``county`` holds numbers from 0; all arguments of shape ``(houses,)``."""
    mu_a = pyro.sample("mu_a", dist.Normal(0.0, 10.0))
    mu_b = pyro.sample("mu_b", dist.Normal(0.0, 10.0))
    tau_a = pyro.sample("tau_a", dist.HalfNormal(1.0))
    tau_b = pyro.sample("tau_b", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("counties", 85):
        alpha = pyro.sample("alpha", dist.Normal(mu_a, tau_a))
        beta = pyro.sample("beta", dist.Normal(mu_b, tau_b))
    with pyro.plate("houses", len(county)):
        mean = alpha[..., county] + beta[..., county] * floor
        return pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def read_data() -> tuple[Tensor, Tensor, Tensor]:
    """County, floor and log radon of every house, ``(919,)`` each."""
    with DATA.open() as file:
        rows = list(csv.DictReader(file))
    county = torch.tensor([int(row["county"]) - 1 for row in rows])
    floor = torch.tensor([float(row["floor"]) for row in rows])
    return county, floor, torch.tensor([float(row["radon"]) for row in rows]).log()


def linear_model(county: Tensor, floor: Tensor, y: Tensor) -> LinearModel:
    """The same model in the terms of which its exact posterior is computed."""
    own = one_hot(county).double()
    terms: dict[str, tuple[Tensor, float | str]] = {
        "mu_a": (torch.ones_like(floor)[:, None], 10.0),
        "mu_b": (floor[:, None], 10.0),
        "alpha": (own, "tau_a"),
        "beta": (own * floor[:, None], "tau_b"),
    }
    priors = {"tau_a": 1.0, "tau_b": 1.0, "sigma": 1.0}
    return LinearModel(terms, "sigma", priors, y, around={"alpha": "mu_a", "beta": "mu_b"})


def plot_counties(rows: Mapping[str, Row], county: Tensor, floor: Tensor, y: Tensor, path: Path) -> None:
    """The intercepts of counties from small to large, beside the average of each county's own basements."""
    plt = pyplot()
    size, basement = county.bincount(), floor == 0
    order = size.argsort(stable=True)
    raw = torch.zeros(85).index_add(0, county[basement], y[basement]) / county[basement].bincount(
        minlength=85
    )
    figure, axis = plt.subplots(figsize=(12, 5), layout="constrained")
    label = "average of the county's own basements"
    axis.scatter(range(85), raw[order], marker="x", s=22, color="tab:gray", label=label)
    colors = {"NUTS": "black", "AutoNaMIGuide": "tab:blue"}
    draw_intervals(
        axis, [(name, rows[name].draws["alpha"][:, order], color) for name, color in colors.items()]
    )
    axis.set_xticks(range(0, 85, 4), [str(number) for number in size[order][::4].tolist()])
    axis.set(xlabel="houses in the county", ylabel="alpha: log radon in the basement", xlim=(-1, 85))
    axis.set_title("County intercepts: the fewer houses, the closer to the state's mean")
    axis.set_ylim(top=axis.get_ylim()[1] + 0.25)  # room for the legend
    axis.legend(frameon=False, loc="upper left", ncols=3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Runs NUTS, trains all guides, prints the tables and writes the plots."""
    arguments = argument_parser(__doc__, "out/radon").parse_args()
    torch.set_num_threads(1)
    data = read_data()
    problem = Problem(model, data, COMMON, ("alpha", "beta"), noncentered=("alpha", "beta"))
    guides = {**GUIDES, LEARNED: lambda model: AutoNaMIGuide(model, exact=False)}
    rows = study(problem, linear_model(*data), arguments, guides)
    plot_counties(rows, *data, arguments.out / "counties.png")
    print(f"\nWritten to {arguments.out}: results.json, errors.png, counties.png and the draws of NUTS")


if __name__ == "__main__":
    main()
