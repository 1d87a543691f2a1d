"""Penicillin: effects of 24 plates crossed with effects of 6 samples, against NUTS and the exact posterior.

Every sample was tested on every plate, 144 measurements (Davies and Goldsmith 1972), and a measurement reads one of
each through two indices, ``a[plate] + b[sample]``. Given the data, every plate's effect therefore depends on every
sample's, and all on the mean: no order of sampling makes the plates independent before the samples are known.

With ``--sparse 300 40 1200`` the design is simulated in the manner of InstEval instead: 300 by 40 groups, 1,200
measurements of random pairs, so most pairs are empty and all groups have different numbers of rows. References and
tables are those of ``radon.py``. Run with::

    python examples/crossed.py [--sparse A B ROWS] [--smoke] [--steps 3000] [--seed 0] [--fresh] [--out out/crossed]
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from radon import Draws, Exact, Problem, Row, argument_parser, draw_normal, study
from torch import Tensor

DATA = Path(__file__).parent / "data" / "penicillin.csv"
COMMON = ("mu", "tau_a", "tau_b", "sigma")
PRIOR_SD = {"tau_a": 2.0, "tau_b": 2.0, "sigma": 2.0}


def model(first: Tensor, second: Tensor, sizes: tuple[int, int], y: Tensor | None = None) -> Tensor:
    """The centered model.

    Args:
        first, second: each measurement's plate and sample, numbered from 0, ``(rows,)``.
        sizes: numbers of plates and of samples.
        y: measurements, centered, ``(rows,)``.
    """
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau_a = pyro.sample("tau_a", dist.HalfNormal(PRIOR_SD["tau_a"]))
    tau_b = pyro.sample("tau_b", dist.HalfNormal(PRIOR_SD["tau_b"]))
    sigma = pyro.sample("sigma", dist.HalfNormal(PRIOR_SD["sigma"]))
    with pyro.plate("plates", sizes[0]):
        a = pyro.sample("a", dist.Normal(0.0, tau_a))
    with pyro.plate("samples", sizes[1]):
        b = pyro.sample("b", dist.Normal(0.0, tau_b))
    with pyro.plate("rows", len(first)):
        return pyro.sample("y", dist.Normal(mu + a[..., first] + b[..., second], sigma), obs=y)


def recentered(first: Tensor, second: Tensor, sizes: tuple[int, int], y: Tensor) -> None:
    """The same model in terms of the samples' levels mu + b, which the data determine far better than mu or b."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau_a = pyro.sample("tau_a", dist.HalfNormal(PRIOR_SD["tau_a"]))
    tau_b = pyro.sample("tau_b", dist.HalfNormal(PRIOR_SD["tau_b"]))
    sigma = pyro.sample("sigma", dist.HalfNormal(PRIOR_SD["sigma"]))
    with pyro.plate("plates", sizes[0]):
        a = pyro.sample("a", dist.Normal(0.0, tau_a))
    with pyro.plate("samples", sizes[1]):
        level = pyro.sample("level", dist.Normal(mu, tau_b))
        pyro.deterministic("b", level - mu)
    with pyro.plate("rows", len(first)):
        pyro.sample("y", dist.Normal(a[first] + level[second], sigma), obs=y)


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


def exact_posterior(first: Tensor, second: Tensor, sizes: tuple[int, int], y: Tensor) -> Exact:
    """Of any crossed design: mu and all effects are jointly Normal given the sds."""
    many, few = sizes
    rows, size = len(y), 1 + many + few
    design = torch.zeros(rows, size).double()
    for column in (torch.zeros_like(first), 1 + first, 1 + many + second):
        design[torch.arange(rows), column] = 1.0
    gram, moment, squares = design.T @ design, design.T @ y.double(), y.double().square().sum()

    def parts(sds: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Prior variances, precision and information of (mu, a, b), ``(draws, size, ...)``; and sigma^2."""
        widths = [torch.full((len(sds), 1), 25.0).double()]
        widths += [sds[:, i, None].square().expand(-1, n) for i, n in enumerate(sizes)]
        prior, variance = torch.cat(widths, -1), sds[:, 2].square()
        precision = torch.diag_embed(1 / prior) + gram / variance[:, None, None]
        return prior, precision, moment / variance[:, None], variance

    def log_likelihood(sds: Tensor) -> Tensor:
        return torch.cat([_log_likelihood(part) for part in sds.split(max(1, 3_000_000 // size**2))])

    def _log_likelihood(sds: Tensor) -> Tensor:
        prior, precision, information, variance = parts(sds)
        tril = torch.linalg.cholesky(precision)
        whitened = torch.linalg.solve_triangular(tril, information[..., None], upper=False)
        log_det = 2 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1) + prior.log().sum(-1)
        spread = squares / variance - whitened.square().sum((-1, -2))
        return -0.5 * (spread + log_det + rows * (variance.log() + math.log(2 * math.pi)))

    def conditional(sds: Tensor) -> Draws:
        drawn = []
        for part in sds.split(max(1, 3_000_000 // size**2)):
            _, precision, information, _ = parts(part)
            drawn.append(draw_normal(precision, information))
        mu, a, b = torch.cat(drawn).split([1, many, few], -1)
        return {"mu": mu[:, 0], "a": a, "b": b}

    count = 100_000 if size < 50 else 4_000
    return Exact(log_likelihood, conditional, tuple(PRIOR_SD), tuple(PRIOR_SD.values()), count)


def plot_effects(rows: list[Row], nuts: Draws, path: Path) -> None:
    """Plates and samples with 90% intervals, and the correlation that the crossing makes: a sample against the mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained", width_ratios=(3, 1.3, 2))
    shown = [("NUTS", nuts, "black"), ("AutoNormal", rows[0].draws, "tab:orange")]
    shown.append((rows[-1].name, rows[-1].draws, "tab:blue"))
    for axis, site, kind in zip(axes, ("a", "b"), ("plate", "sample")):
        order = nuts[site].mean(0).argsort()[:60]
        place = torch.arange(len(order))
        for k, (name, draws, color) in enumerate(shown):
            low, middle, high = (draws[site].quantile(q, 0)[order] for q in (0.05, 0.5, 0.95))
            axis.vlines(place + 0.25 * (k - 1), low, high, color=color, linewidth=1.5, label=f"{name}, 90% interval")
            axis.scatter(place + 0.25 * (k - 1), middle, color=color, s=11)
        axis.set(xlabel=f"{kind}, in the order of its posterior mean", ylabel=f"effect of the {kind}", xticks=[])
    axes[0].legend(frameon=False)
    for name, draws, color in shown:
        axes[2].scatter(draws["mu"][:1500], draws["b"][:1500, 0], s=4, alpha=0.4, color=color, linewidths=0, label=name)
    axes[2].set(xlabel="mu, the overall mean", ylabel="effect of the first sample")
    axes[2].set_title("what crossing couples: 1,500 draws", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Runs NUTS, trains all guides, prints the tables and writes the plots."""
    parser = argument_parser(__doc__, "out/crossed")
    parser.add_argument("--sparse", type=int, nargs=3, metavar=("A", "B", "ROWS"), help="simulate a sparse design")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pyro.set_rng_seed(arguments.seed)
    data = simulate(*arguments.sparse) if arguments.sparse else read_data()
    problem = Problem(model, recentered, data, COMMON, ("a", "b"))
    rows, nuts = study(problem, exact_posterior(*data), arguments)
    plot_effects(rows, nuts, arguments.out / "effects.png")
    print(f"\nWritten to {arguments.out}: results.json, scatter.png, effects.png, nuts.npz")


if __name__ == "__main__":
    main()
