"""Penicillin: effects of 24 plates crossed with effects of 6 samples, against NUTS and the exact posterior.

Every sample was tested on every plate, 144 measurements (Davies and Goldsmith 1972), and a measurement reads one of
each through two indices, ``a[..., plate] + b[..., sample]``. Given the data, every plate's effect therefore depends on
every sample's, and all on the mean: no order of sampling makes the plates independent before the samples are known.

With ``--sparse 300 40 1200`` the design is simulated in the manner of InstEval instead: 300 by 40 groups, 1,200
measurements of random pairs, so most pairs are empty and all groups have different numbers of rows. Run with::

    python examples/crossed.py [--sparse A B ROWS] [--smoke] [--steps 3000] [--seed 0] [--device cpu] [--out FOLDER]
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from references import LinearModel, Problem
from study import Row, argument_parser, draw_intervals, pyplot, study
from torch import Tensor
from torch.nn.functional import one_hot

DATA = Path(__file__).parent / "data" / "penicillin.csv"
COMMON = ("mu", "tau_a", "tau_b", "sigma")


def model(first: Tensor, second: Tensor, sizes: tuple[int, int], y: Tensor | None = None) -> Tensor:
    """The centered model.

    Args:
        first, second: each measurement's plate and sample, numbered from 0, ``(rows,)``.
        sizes: numbers of plates and of samples.
        y: measurements, centered, ``(rows,)``.
    """
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau_a = pyro.sample("tau_a", dist.HalfNormal(2.0))
    tau_b = pyro.sample("tau_b", dist.HalfNormal(2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("plates", sizes[0]):
        a = pyro.sample("a", dist.Normal(0.0, tau_a))
    with pyro.plate("samples", sizes[1]):
        b = pyro.sample("b", dist.Normal(0.0, tau_b))
    with pyro.plate("rows", len(first)):
        return pyro.sample("y", dist.Normal(mu + a[..., first] + b[..., second], sigma), obs=y)


def read_data() -> tuple[Tensor, Tensor, tuple[int, int], Tensor]:
    """Plate, sample and diameter of every measurement, centered at 23 mm, ``(144,)`` each."""
    with DATA.open() as file:
        table = torch.tensor([[float(cell) for cell in line[1:]] for line in list(csv.reader(file))[1:]])
    first, second = torch.cartesian_prod(torch.arange(24), torch.arange(6)).unbind(-1)
    return first, second, (24, 6), table.flatten() - 23.0


def simulate(many: int, few: int, rows: int) -> tuple[Tensor, Tensor, tuple[int, int], Tensor]:
    """A sparse crossed design with groups of very different sizes; mu 0.3, sds 0.6, 0.9 and 1."""
    first = torch.multinomial(torch.rand(many), rows, replacement=True)
    second = torch.multinomial(torch.rand(few), rows, replacement=True)
    a, b = 0.6 * torch.randn(many), 0.9 * torch.randn(few)
    return first, second, (many, few), 0.3 + a[first] + b[second] + torch.randn(rows)


def linear_model(first: Tensor, second: Tensor, sizes: tuple[int, int], y: Tensor) -> LinearModel:
    """The same model in the terms of which its exact posterior is computed."""
    terms: dict[str, tuple[Tensor, float | str]] = {
        "mu": (torch.ones(len(y), 1), 5.0),
        "a": (one_hot(first, sizes[0]), "tau_a"),
        "b": (one_hot(second, sizes[1]), "tau_b"),
    }
    return LinearModel(terms, "sigma", {"tau_a": 2.0, "tau_b": 2.0, "sigma": 2.0}, y)


def plot_effects(rows: Mapping[str, Row], path: Path) -> None:
    """Plates and samples with 90% intervals, and the correlation that the crossing makes: a sample against the mean."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained", width_ratios=(3, 1.4, 2))
    colors = {"NUTS": "black", "AutoNormal": "tab:orange", "AutoNaMIGuide": "tab:blue"}
    for axis, site, kind in zip(axes, ("a", "b"), ("plate", "sample")):
        order = rows["NUTS"].draws[site].mean(0).argsort()
        order = order[:: math.ceil(len(order) / 40)]
        draw_intervals(
            axis, [(name, rows[name].draws[site][:, order], color) for name, color in colors.items()]
        )
        axis.set(title=f"effects of {kind}s", xlabel="ordered by mean", xticks=[])
    axes[0].legend(frameon=False)
    for name in ("NUTS", "AutoNaMIGuide", "AutoNormal"):  # the narrowest on top
        draws, color = rows[name].draws, colors[name]
        axes[2].scatter(
            draws["mu"][:1500], draws["b"][:1500, 0], s=5, alpha=0.5, color=color, linewidths=0, label=name
        )
    axes[2].set(title="1,500 draws: what crossing couples", xlabel="mu", ylabel="effect of the first sample")
    axes[2].legend(frameon=False, markerscale=3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Runs NUTS, trains all guides, prints the tables and writes the plots."""
    parser = argument_parser(__doc__, "out/crossed")
    parser.add_argument(
        "--sparse", type=int, nargs=3, metavar=("A", "B", "ROWS"), help="simulate a sparse design"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pyro.set_rng_seed(arguments.seed)
    data = simulate(*arguments.sparse) if arguments.sparse else read_data()
    problem = Problem(model, data, COMMON, ("a", "b"), dense=(("mu", "b"),))
    rows = study(problem, linear_model(*data), arguments)
    plot_effects(rows, arguments.out / "effects.png")
    print(f"\nWritten to {arguments.out}: results.json, errors.png, effects.png and the draws of NUTS")


if __name__ == "__main__":
    main()
