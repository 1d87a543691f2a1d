"""Eight schools: what `fit` finds of a posterior, beside Pyro's guides and Stan's reference draws.

Eight schools coached pupils for a test; ``y`` are the estimated effects and ``sigma`` their standard errors (Rubin
1981). The centered model has a funnel: where tau is small, all theta are close to mu, and where it is large they are
not. Given tau everything else is Gaussian, so evidence and posterior are known exactly by quadrature over tau, and
all are judged against them. Run with::

    python examples/quickstart.py [--smoke] [--steps 1500] [--seed 0] [--device cpu] [--out out]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoGuide, AutoMultivariateNormal, AutoNormal, AutoStructured
from references import Problem
from study import argument_parser, on_device, pyplot
from study import fit as trained
from torch import Tensor

from pyro_nami import AutoNaMIGuide, Posterior, fit
from pyro_nami.graph import BayesNet, Inverse
from pyro_nami.show.render import render

Y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
SIGMA = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

NAMES = ("mu", "tau", *(f"theta_{j}" for j in range(1, 9)))
# Means and sds of the reference draws of posteriordb, "eight_schools-eight_schools_noncentered" (10,000 draws of
# Stan's NUTS; github.com/stan-dev/posteriordb, BSD 3-clause). Order as in NAMES.
REFERENCE_MEAN = torch.tensor(
    [
        4.410518,
        3.60206,
        6.150502,
        4.939581,
        3.905906,
        4.796017,
        3.614436,
        4.051148,
        6.31717,
        4.883997,
    ]
)
REFERENCE_SD = torch.tensor(
    [
        3.309296,
        3.198478,
        5.615863,
        4.645578,
        5.280712,
        4.770938,
        4.614721,
        4.796248,
        5.002855,
        5.317692,
    ]
)

GUIDES: dict[str, Callable[[Callable], AutoGuide]] = {
    "AutoNormal": AutoNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoStructured": AutoStructured,
}
PARTICLES = 16  # of Pyro's guides, in each step


def model(sigma: Tensor, y: Tensor | None = None) -> Tensor:
    """The centered model; ``sigma`` and ``y`` of shape ``(8,)``."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(sigma)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        return pyro.sample("y", dist.Normal(theta, sigma), obs=y)


class Exact:
    """The exact posterior: a grid over log tau, and conjugate Gaussians given tau.

    With v_j = sigma_j^2 + tau^2, the data are y_j ~ N(mu, v_j), and mu ~ N(0, 25) integrates out.

    Attributes:
        log_evidence: log p(y) in nats.
    """

    def __init__(self, cells: int = 8001) -> None:
        self.log_tau = torch.linspace(-12.0, 8.0, cells, dtype=torch.float64)
        mean, precision, log_likelihood = self._given(self.log_tau.exp())
        log_joint = (
            log_likelihood + dist.HalfCauchy(5.0).log_prob(self.log_tau.exp()) + self.log_tau
        )
        log_mass = log_joint + math.log(self.log_tau[1] - self.log_tau[0])
        self.log_evidence = log_mass.logsumexp(0).item()
        self._weights = (log_mass - self.log_evidence).exp()

    def _given(self, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and precision of mu given tau and y, and log p(y | tau), each of the shape of ``tau``."""
        variance = SIGMA.double() ** 2 + tau[..., None] ** 2
        precision = (1 / variance).sum(-1) + 1 / 25
        mean = (Y / variance).sum(-1) / precision
        spread = (Y**2 / variance).sum(-1) - mean**2 * precision
        log_det = variance.log().sum(-1) + math.log(25) + precision.log()
        return mean, precision, -0.5 * (spread + log_det + 8 * math.log(2 * math.pi))

    def _theta_given(self, tau: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of every theta given tau and mu, ``(*batch, 8)``."""
        variance = 1 / (1 / tau[..., None] ** 2 + 1 / SIGMA.double() ** 2)
        return variance * (mu[..., None] / tau[..., None] ** 2 + Y / SIGMA.double() ** 2), variance

    def sample(self, count: int) -> Tensor:
        """Exact draws, ``(count, 10)``, columns as in `NAMES`."""
        cell = torch.multinomial(self._weights, count, replacement=True)
        jitter = (torch.rand(count, dtype=torch.float64) - 0.5) * (
            self.log_tau[1] - self.log_tau[0]
        )
        tau = (self.log_tau[cell] + jitter).exp()
        mean, precision, _ = self._given(tau)
        mu = torch.normal(mean, precision.rsqrt())
        theta_mean, theta_variance = self._theta_given(tau, mu)
        return torch.cat(
            [mu[:, None], tau[:, None], torch.normal(theta_mean, theta_variance.sqrt())], -1
        )

    def density(self, theta_1: Tensor) -> Tensor:
        """Posterior density of theta_1 and log tau on a grid, ``(cells, len(theta_1))``, up to a constant."""
        tau = self.log_tau.exp()
        mean, precision, _ = self._given(tau)
        theta_mean, theta_variance = (part[:, 0] for part in self._theta_given(tau, mean))
        slope = theta_variance / tau**2  # d E[theta_1 | tau, mu] / d mu
        sd = (theta_variance + slope**2 / precision).sqrt()
        return (
            self._weights[:, None]
            * dist.Normal(theta_mean[:, None], sd[:, None]).log_prob(theta_1).exp()
        )


class Result(NamedTuple):
    """What is reported of a posterior. ``gap`` in nats, with its standard error; ``draws (count, 10)``."""

    name: str
    gap: float
    error: float
    seconds: float
    draws: Tensor


def fitted(exact: Exact, arguments: argparse.Namespace) -> tuple[Result, Posterior]:
    """Fits the posterior; returns what is reported of it as well."""
    start = time.perf_counter()
    device = arguments.device
    posterior = fit(model, SIGMA.to(device), Y.to(device), seed=arguments.seed)
    seconds = time.perf_counter() - start
    gap = exact.log_evidence - float(posterior.log_evidence)
    draws = [posterior[name].reshape(len(posterior[name]), -1) for name in ("mu", "tau", "theta")]
    together = torch.cat(draws, -1).double().cpu()
    error = float(posterior.log_evidence_error)
    return Result("pyro_nami.fit", gap, error, seconds, together), posterior


def judge(name: str, exact: Exact, arguments: argparse.Namespace) -> Result:
    """Trains one of Pyro's guides and compares it with the exact posterior; the same settings for all."""
    problem = Problem(model, (SIGMA, Y), ("mu", "tau", "theta")).convert(
        lambda part: part.to(arguments.device)
    )
    steps, chunks = (3, 4) if arguments.smoke else (arguments.steps, 200)
    settings = {
        "steps": steps,
        "seed": arguments.seed,
        "chunks": chunks,
        "learning_rate": 0.05,
        "particles": PARTICLES,
    }
    with on_device(arguments.device):
        _, row = trained(problem, name, GUIDES[name], **settings)
    draws = torch.cat([part.reshape(500 * chunks, -1) for part in row.draws.values()], -1)
    return Result(name, exact.log_evidence - row.elbo, row.error, row.seconds, draws)


def print_table(rows: list[Result], exact: Exact, exact_draws: Tensor) -> None:
    """ELBO gaps and marginals; deviations are in sds of the reference draws."""
    print(
        "\nGap: exact log evidence minus ELBO, of `fit` minus its log evidence, in nats, +- standard error."
    )
    print(
        "Then posterior mean and sd, and the largest deviation of a mean and of an sd over all ten unknowns,"
    )
    print("in sds of the reference draws.\n")
    names = ("mu", "tau", "theta_1")
    heads = "".join(f"{name:>15}" for name in names)
    print(f"{'':<31}{'gap':>17}{heads}{'off by: mean':>15}{'sd':>6}{'seconds':>9}")
    columns = [NAMES.index(name) for name in names]

    def line(name: str, gap: str, mean: Tensor, sd: Tensor, seconds: str) -> None:
        cells = "".join(f"{f'{mean[i]:.2f} ({sd[i]:.2f})':>15}" for i in columns)
        off = [((mean - REFERENCE_MEAN) / REFERENCE_SD), ((sd - REFERENCE_SD) / REFERENCE_SD)]
        worst = [part.abs().max().item() for part in off]
        print(f"{name:<31}{gap:>17}{cells}{worst[0]:>15.2f}{worst[1]:>6.2f}{seconds:>9}")

    line("reference draws (NUTS)", "", REFERENCE_MEAN, REFERENCE_SD, "")
    line(f"{len(exact_draws):,} exact draws", "0", exact_draws.mean(0), exact_draws.std(0), "")
    for row in rows:
        gap = f"{abs(row.gap):.3f} +- {row.error:.3f}"
        line(row.name, gap, row.draws.mean(0), row.draws.std(0), f"{row.seconds:.1f}")
    print(f"\nExact log evidence by quadrature over tau: {exact.log_evidence:.4f} nats.")


def plot_funnels(rows: list[Result], exact: Exact, exact_draws: Tensor, path: Path) -> None:
    """tau against theta_1: the draws of each, over the exact posterior's 50% and 90% regions."""
    plt = pyplot()
    theta = torch.linspace(-14.0, 30.0, 221, dtype=torch.float64)
    density = exact.density(theta)
    ordered = density.flatten().sort(descending=True).values
    mass = ordered.cumsum(0) / ordered.sum()
    levels = [ordered[(mass < share).sum()].item() for share in (0.9, 0.5)]
    panels = [("exact posterior", "exact draws", exact_draws)]
    panels += [(row.name, f"gap {abs(row.gap):.3f} nats", row.draws) for row in rows]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(14.0, 3.8), sharex=True, sharey=True, layout="constrained"
    )
    for axis, (name, note, draws) in zip(axes.flat, panels):
        color = "tab:gray" if name == "exact posterior" else "tab:blue"
        points = draws[:2000]
        axis.scatter(
            points[:, 2], points[:, 1], s=4, alpha=0.35, color=color, linewidths=0, rasterized=True
        )
        axis.contour(theta, exact.log_tau.exp(), density, levels, colors="black", linewidths=1.1)
        axis.set(yscale="log", xlim=(-14, 30), ylim=(0.03, 40))
        axis.set_title(f"{name}\n{note}", fontsize=10)
    figure.supxlabel(r"$\theta_1$, effect in school 1")
    figure.supylabel(r"$\tau$, spread between schools (log scale)")
    figure.suptitle(
        "Eight schools: 2,000 draws of each; lines: 50% and 90% regions of the exact posterior"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write_networks(guide: AutoNaMIGuide, folder: Path) -> list[Path]:
    """The network and its inverse: drawn here, and as Mermaid text."""
    parts: dict[str, BayesNet | Inverse] = {"network": guide.bayesnet, "inverse": guide.inverse}
    paths = [folder / "network.png", folder / "network.md"]
    plot_networks(guide, paths[0])
    paths[1].write_text(
        "\n".join(
            f"## {name}\n\n```mermaid\n{render(part, 'mermaid')}\n```\n"
            for name, part in parts.items()
        )
    )
    return paths


def plot_networks(guide: AutoNaMIGuide, path: Path) -> None:
    """The model's network and its inverse side by side, sites in the same places."""
    from matplotlib.patches import FancyBboxPatch

    plt = pyplot()
    net, inverse = guide.bayesnet, guide.inverse
    places = {"mu": (-1.0, 2.4), "tau": (1.0, 2.4), "theta": (0.0, 1.2), "y": (0.0, 0.0)}
    modelled = set(net.edges) | {(child, parent) for parent, child in net.edges}
    found = inverse.to_networkx().edges
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 4.8), layout="constrained")
    titles = (
        f"the model: {len(net.edges)} edges",
        f"its inverse, which the guide follows: {len(found)} edges",
    )
    for axis, title, edges in zip(axes, titles, (net.edges, found)):
        plate = FancyBboxPatch(
            (-0.62, -0.6), 1.24, 2.35, boxstyle="round,pad=0.05", fill=False, color="gray"
        )
        axis.add_patch(plate)
        axis.text(0.6, -0.58, "schools (8)", ha="right", va="bottom", color="gray", fontsize=9)
        for parent, child in edges:
            added = (parent, child) not in modelled
            side = places[child][0] if parent == "y" else 0.0
            style = {
                "arrowstyle": "-|>",
                "mutation_scale": 16,
                "shrinkA": 19,
                "shrinkB": 19,
                "linewidth": 1.4,
                "color": "tab:orange" if added else "black",
                "linestyle": "--" if added else "-",
                "connectionstyle": f"arc3,rad={0.55 * side}",
            }
            axis.annotate("", places[child], places[parent], arrowprops=style)
        for name, place in places.items():
            color = "lightgray" if net.sites[name].observed else "white"
            axis.scatter(*place, s=1150, color=color, edgecolors="black", linewidths=1.2, zorder=3)
            axis.text(*place, name, ha="center", va="center", zorder=4)
        axis.set(xlim=(-2.1, 2.1), ylim=(-0.85, 2.9), aspect="equal", title=title)
        axis.axis("off")
    figure.supxlabel(
        "gray: observed.   dashed: dependence that inversion adds.   box: repeated for every school",
        fontsize=9,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Fits the posterior, trains Pyro's guides, prints the table and writes the plots."""
    arguments = argument_parser(__doc__, "out", steps=1500).parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)

    exact = Exact()
    result, posterior = fitted(exact, arguments)
    guide = posterior.guide
    print(f"The model's network\n{guide.bayesnet}\n")
    print(f"What the guide of the posterior samples, in order\n{guide.inverse}\n")
    print(posterior.summary())
    written = write_networks(guide, arguments.out)
    rows = [result, *(judge(name, exact, arguments) for name in GUIDES)]
    pyro.set_rng_seed(arguments.seed)
    exact_draws = exact.sample(len(rows[-1].draws))
    print_table(rows, exact, exact_draws)
    written.append(arguments.out / "funnels.png")
    plot_funnels(rows, exact, exact_draws, written[-1])
    print(f"Written: {', '.join(map(str, written))}")


if __name__ == "__main__":
    main()
