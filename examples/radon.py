"""Radon in 919 houses of 85 Minnesota counties: varying intercepts and slopes, against NUTS and the exact posterior.

Log radon depends on the floor of the measurement, with an intercept and a slope of each county's own: some counties
have 116 houses and some have one, so how far a county is drawn to the others differs (Gelman and Hill 2006, chapter
12; priors as in posteriordb's ``radon_variable_intercept_slope_centered``). The model is centered and reads the
counties through an index, ``alpha[county]``.

Two references: NUTS on the non-centered form of the model, run here and kept for the next time; and, as everything is
Gaussian given three standard deviations, exact draws by conjugacy and importance sampling in three dimensions. Run
with::

    python examples/radon.py [--smoke] [--steps 3000] [--seed 0] [--device cpu] [--fresh] [--out out/radon]

`Problem` and what works on it serve ``crossed.py`` as well.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoGaussian, AutoGuide, AutoMultivariateNormal, AutoNormal, AutoStructured
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from pyro.optim import ClippedAdam
from torch import Tensor
from tqdm import tqdm

from pyro_nami import AutoNaMIGuide

DATA = Path(__file__).parent / "data" / "radon_mn.csv"
GUIDES: dict[str, Callable[[Callable], AutoGuide]] = {
    "AutoNormal": AutoNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoGaussian": AutoGaussian,
    "AutoStructured": AutoStructured,
    "AutoNaMIGuide": AutoNaMIGuide,
}
LEARNING_RATE = 0.02
PARTICLES = 16

Draws = dict[str, Tensor]  # site -> (draws, *shape), in double precision on the CPU


class Problem(NamedTuple):
    """A model with its data, and what to report of it.

    Attributes:
        model, arguments: the model that the guides are for.
        other_form: the same model for NUTS, with the sites of `model` among its own (as deterministic ones).
        common, effects: sites outside all plates, and those with a value for every group.
    """

    model: Callable
    other_form: Callable
    arguments: tuple
    common: tuple[str, ...]
    effects: tuple[str, ...]

    @property
    def sites(self) -> tuple[str, ...]:
        return self.common + self.effects


class Row(NamedTuple):
    """What is reported of one guide: ELBO in nats with its standard error, training time, draws."""

    name: str
    elbo: float
    error: float
    seconds: float
    draws: Draws


# ---- the model


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


def noncentered(county: Tensor, floor: Tensor, y: Tensor) -> None:
    """The same model in terms of standardized county effects, which NUTS moves through more easily."""
    mu_a = pyro.sample("mu_a", dist.Normal(0.0, 10.0))
    mu_b = pyro.sample("mu_b", dist.Normal(0.0, 10.0))
    tau_a = pyro.sample("tau_a", dist.HalfNormal(1.0))
    tau_b = pyro.sample("tau_b", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("counties", 85):
        alpha = pyro.deterministic("alpha", mu_a + tau_a * pyro.sample("z_a", dist.Normal(0.0, 1.0)))
        beta = pyro.deterministic("beta", mu_b + tau_b * pyro.sample("z_b", dist.Normal(0.0, 1.0)))
    with pyro.plate("houses", len(county)):
        pyro.sample("y", dist.Normal(alpha[county] + beta[county] * floor, sigma), obs=y)


def read_data() -> tuple[Tensor, Tensor, Tensor]:
    """County, floor and log radon of every house, ``(919,)`` each."""
    with DATA.open() as file:
        rows = list(csv.DictReader(file))
    county = torch.tensor([int(row["county"]) - 1 for row in rows])
    floor = torch.tensor([float(row["floor"]) for row in rows])
    return county, floor, torch.tensor([float(row["radon"]) for row in rows]).log()


# ---- references


class Exact:
    """The exact posterior of a model that is linear and Gaussian given its standard deviations.

    These are drawn by importance sampling from a Student-t in log space, which three rounds of draws adapt; everything
    else is drawn from its conditional.

    Args:
        log_likelihood: log p(y | sds), ``(draws, sds)`` to ``(draws,)``, everything else integrated out.
        conditional: draws of all other sites given sds and y.
        names: of the sds, whose priors are HalfNormal with ``scales``.

    Attributes:
        log_likelihood: as given.
        log_evidence, error: log p(y) in nats and its standard error.
        share: effective share of the importance draws.
    """

    def __init__(
        self,
        log_likelihood: Callable[[Tensor], Tensor],
        conditional: Callable[[Tensor], Draws],
        names: tuple[str, ...],
        scales: tuple[float, ...],
        count: int = 100_000,
    ) -> None:
        self.log_likelihood, self._conditional, self._names = log_likelihood, conditional, names
        prior = dist.HalfNormal(torch.tensor(scales, dtype=torch.float64))
        size = len(names)
        loc, tril, freedom = torch.full((size,), -1.0).double(), torch.eye(size).double(), 5.0
        for number in (count // 10,) * 3 + (count,):
            proposal = dist.MultivariateStudentT(torch.tensor(freedom).double(), loc, tril)
            log_sd = proposal.sample((number,))
            sds = log_sd.exp()
            log_joint = torch.cat([log_likelihood(chunk) for chunk in sds.split(5000)])
            log_joint = log_joint + (prior.log_prob(sds) + log_sd).sum(-1)
            log_weight = log_joint - proposal.log_prob(log_sd)
            self._weights = log_weight.softmax(0)
            loc = self._weights @ log_sd
            tril = torch.linalg.cholesky((log_sd - loc).mT * self._weights @ (log_sd - loc) * 1.2)
        self._sds = sds
        self.log_evidence = log_weight.logsumexp(0).item() - math.log(count)
        self.share = 1 / (self._weights.square().sum().item() * count)
        self.error = math.sqrt((1 / self.share - 1) / count)

    def sample(self, count: int) -> Draws:
        sds = self._sds[torch.multinomial(self._weights, count, replacement=True)]
        return {**dict(zip(self._names, sds.unbind(-1))), **self._conditional(sds)}


def exact_posterior(county: Tensor, floor: Tensor, y: Tensor) -> Exact:
    """Of the radon model, county by county: a county's two effects are a bivariate Normal given mu and the sds."""
    design = torch.stack([torch.ones_like(floor), floor], -1).double()  # (houses, 2)
    gram = torch.zeros(85, 2, 2).double().index_add(0, county, design[:, :, None] * design[:, None])
    moment = torch.zeros(85, 2).double().index_add(0, county, design * y.double()[:, None])
    squares = y.double().square().sum()

    def solve(sds: Tensor) -> tuple[Tensor, ...]:
        """Precisions and information of the counties (given mu = 0) and of mu; and sigma^2."""
        prior = torch.diag_embed(sds[:, :2].pow(-2))
        variance = sds[:, 2].square()
        own = gram / variance[:, None, None, None] + prior[:, None]  # (draws, 85, 2, 2)
        pulled = moment / variance[:, None, None]
        # Counties integrated out: mu has precision sum_j (prior - prior own_j^-1 prior), and its own prior's.
        precision = torch.eye(2) / 100 + 85 * prior - (prior[:, None] @ torch.linalg.inv(own) @ prior[:, None]).sum(1)
        information = (prior[:, None] @ torch.linalg.solve(own, pulled[..., None]))[..., 0].sum(1)
        return prior, own, pulled, precision, information, variance

    def log_likelihood(sds: Tensor) -> Tensor:
        prior, own, pulled, precision, information, variance = solve(sds)
        gain = (pulled * torch.linalg.solve(own, pulled[..., None])[..., 0]).sum((-1, -2))
        gain = gain + (information * torch.linalg.solve(precision, information[..., None])[..., 0]).sum(-1)
        log_det = torch.logdet(own).sum(-1) - 85 * torch.logdet(prior) + torch.logdet(precision) + 2 * math.log(100)
        return -0.5 * (
            squares / variance - gain + log_det + len(y) * (variance.log() + math.log(2 * math.pi))
        )

    def conditional(sds: Tensor) -> Draws:
        prior, own, pulled, precision, information, _ = solve(sds)
        mu = draw_normal(precision, information)
        effects = draw_normal(own, pulled + (prior @ mu[..., None])[..., 0][:, None])
        return {"mu_a": mu[:, 0], "mu_b": mu[:, 1], "alpha": effects[..., 0], "beta": effects[..., 1]}

    return Exact(log_likelihood, conditional, ("tau_a", "tau_b", "sigma"), (1.0, 1.0, 1.0))


def draw_normal(precision: Tensor, information: Tensor) -> Tensor:
    """A draw from the Normal of mean precision^-1 information, ``(*batch, size)``."""
    tril = torch.linalg.cholesky(precision)
    mean = torch.cholesky_solve(information[..., None], tril)
    noise = torch.randn(information.shape, dtype=torch.float64)[..., None]
    return (mean + torch.linalg.solve_triangular(tril.mT, noise, upper=True))[..., 0]


def run_nuts(
    problem: Problem, path: Path, *, seed: int, chains: int, warmup: int, kept: int, fresh: bool
) -> tuple[Draws, dict[str, float]]:
    """NUTS draws in double precision, and their diagnostics; read from ``path`` if they were drawn before."""
    full_mass = sum(math.prod(size) for size in shapes_of(problem)) < 20  # worth its cost where few
    arguments = each_tensor(lambda part: part.double() if part.is_floating_point() else part, problem.arguments)
    sums = [round(part.double().sum().item(), 6) for part in arguments if isinstance(part, Tensor)]
    settings = [seed, chains, warmup, kept, full_mass, *sums]
    if path.exists() and not fresh:
        with np.load(path) as stored:
            if stored["settings"].tolist() == settings:
                print(f"NUTS draws of an earlier run, from {path} (--fresh draws anew)")
                numbers = {name: float(stored[f"diagnostic {name}"]) for name in DIAGNOSTICS}
                return {site: torch.from_numpy(stored[site]) for site in problem.sites}, numbers
    found: dict[str, list[Tensor]] = {site: [] for site in problem.sites}
    divergences, start, before = 0, time.perf_counter(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for chain in range(chains):
            pyro.clear_param_store()
            pyro.set_rng_seed(seed + chain)
            print(f"NUTS, chain {chain + 1} of {chains}")
            options = {"jit_compile": True, "ignore_jit_warnings": True, "target_accept_prob": 0.9}
            kernel = NUTS(problem.other_form, full_mass=full_mass, **options)
            mcmc = MCMC(kernel, num_samples=kept, warmup_steps=warmup)
            mcmc.run(*arguments)
            divergences += sum(map(len, mcmc.diagnostics()["divergences"].values()))
            with torch.no_grad():
                values = Predictive(problem.other_form, mcmc.get_samples(), parallel=False)(*arguments)
            values = {**mcmc.get_samples(), **values}
            for site in problem.sites:
                found[site].append(values[site].reshape(kept, *values[site].shape[1:]).squeeze())
    finally:
        torch.set_default_dtype(before)
    stacked = {site: torch.stack(parts) for site, parts in found.items()}
    every = torch.cat([part.reshape(chains, kept, -1) for part in stacked.values()], -1)
    r_hat, ess = split_gelman_rubin(every, 0, 1), effective_sample_size(every, 0, 1)
    numbers = dict(
        zip(DIAGNOSTICS, (r_hat.max().item(), ess.min().item(), divergences, time.perf_counter() - start))
    )
    draws = {site: part.flatten(0, 1) for site, part in stacked.items()}
    stored = {f"diagnostic {name}": np.array(value) for name, value in numbers.items()}
    np.savez(path, settings=np.array(settings), **stored, **{site: part.numpy() for site, part in draws.items()})
    return draws, numbers


DIAGNOSTICS = ("largest R-hat", "least effective draws", "divergences", "seconds")


def shapes_of(problem: Problem) -> list[torch.Size]:
    """The shapes of all sites of a problem."""
    nodes = poutine.trace(problem.model).get_trace(*problem.arguments).nodes
    return [nodes[site]["value"].shape for site in problem.sites]


def each_tensor(change: Callable[[Tensor], Tensor], arguments: tuple) -> tuple:
    return tuple(change(part) if isinstance(part, Tensor) else part for part in arguments)


# ---- guides


def elbo(particles: int) -> Trace_ELBO:
    return Trace_ELBO(num_particles=particles, vectorize_particles=True, max_plate_nesting=1)


def train(problem: Problem, name: str, steps: int, seed: int) -> tuple[AutoGuide, float]:
    """A trained guide, and the seconds it took; the same settings for all."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = GUIDES[name](problem.model)
    optimizer = ClippedAdam({"lr": LEARNING_RATE, "lrd": 0.01 ** (1 / steps)})
    svi = SVI(problem.model, guide, optimizer, elbo(PARTICLES))
    start = time.perf_counter()
    with tqdm(range(steps), desc=f"{name:<23}", mininterval=0.2) as progress:
        for step in progress:
            loss = svi.step(*problem.arguments)
            if step % 100 == 0:
                progress.set_postfix_str(f"loss {loss:.2f}", refresh=False)
    return guide, time.perf_counter() - start


@torch.no_grad()
def judge(problem: Problem, name: str, guide: AutoGuide, seconds: float, chunks: int) -> Row:
    """The ELBO from ``chunks`` times 500 particles, and 500 draws for each chunk."""
    losses, parts = [], []
    for _ in range(chunks):
        losses.append(elbo(500).loss(problem.model, guide, *problem.arguments))
        sampler = Predictive(problem.model, guide=guide, num_samples=500, return_sites=problem.sites, parallel=True)
        parts.append({site: value.squeeze().double().cpu() for site, value in sampler(*problem.arguments).items()})
    draws = {site: torch.cat([part[site] for part in parts]) for site in problem.sites}
    values = torch.tensor(losses)
    return Row(name, -values.mean().item(), values.std().item() / math.sqrt(chunks), seconds, draws)


# ---- the report


def compare(draws: Draws, reference: Draws, sites: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Differences of means in sds of the reference, and ratios of sds, of all instances of the sites."""
    shifts, ratios = [], []
    for site in sites:
        sd = reference[site].std(0)
        shifts.append(((draws[site].mean(0) - reference[site].mean(0)) / sd).reshape(-1))
        ratios.append((draws[site].std(0) / sd).reshape(-1))
    return torch.cat(shifts), torch.cat(ratios)


def summarize(draws: Draws, reference: Draws, problem: Problem) -> dict[str, float]:
    """How far draws are from the reference, in the terms of the table."""
    found = {}
    for kind, sites in (("globals", problem.common), ("effects", problem.effects)):
        shift, ratio = compare(draws, reference, sites)
        found[f"{kind}: mean off"] = shift.abs().max().item()
        found[f"{kind}: least sd ratio"] = ratio.min().item()
        found[f"{kind}: largest sd ratio"] = ratio.max().item()
        found[f"{kind}: within"] = ((shift.abs() <= 0.1) & ((ratio - 1).abs() <= 0.1)).double().mean().item()
    return found


def report(
    problem: Problem,
    rows: list[Row],
    nuts: Draws,
    numbers: Mapping[str, float],
    exact: Exact,
    exact_draws: Draws,
    path: Path,
) -> None:
    """Prints the tables, and writes what is in them as JSON."""
    print("\nNUTS: " + ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))
    print(f"Exact log evidence: {exact.log_evidence:.3f} +- {exact.error:.3f} nats ({exact.share:.0%} effective)")
    effects = sum(nuts[site][0].numel() for site in problem.effects)
    print(f"\nAgainst NUTS, over {len(problem.common)} globals and {effects} effects: the largest difference of a mean")
    print("in posterior sds, the range of sd ratios, and the share with both within 0.1 sd and 10%.\n")
    heads = ("ELBO, nats", "gap", "seconds", "mean", "sd ratios", "within", "mean", "sd ratios", "within")
    widths = (20, 8, 9, 8, 13, 8, 8, 13, 8)
    print(" " * 23 + " " * sum(widths[:3]) + f"{'globals':^29}{'effects':^29}")
    print(" " * 23 + "".join(f"{head:>{width}}" for head, width in zip(heads, widths)))
    lines = [(row.name, f"{row.elbo:.3f} +- {row.error:.3f}", exact.log_evidence - row.elbo, row.seconds, row.draws)
             for row in rows]  # fmt: skip
    results: dict[str, Any] = {}
    for name, bound, gap, seconds, draws in (("exact draws", "", 0.0, 0.0, exact_draws), *lines):
        found = summarize(draws, nuts, problem)
        cells = [bound, f"{gap:.2f}", f"{seconds:.0f}" if seconds else ""]
        for kind in ("globals", "effects"):
            ratios = f"{found[f'{kind}: least sd ratio']:.2f} - {found[f'{kind}: largest sd ratio']:.2f}"
            cells += [f"{found[f'{kind}: mean off']:.2f}", ratios, f"{found[f'{kind}: within']:.1%}"]
        print(f"{name:<23}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths)))
        results[name] = {"gap": gap, "seconds": seconds, **found}
    columns = {"NUTS": nuts, "exact draws": exact_draws, **{row.name: row.draws for row in rows}}
    print("\nPosterior mean (sd)\n\n" + " " * 23 + "".join(f"{site:>16}" for site in problem.common))
    for name, draws in columns.items():
        marginals = {site: (draws[site].mean().item(), draws[site].std().item()) for site in problem.common}
        print(f"{name:<23}" + "".join(f"{f'{mean:.3f} ({sd:.3f})':>16}" for mean, sd in marginals.values()))
        results.setdefault(name, {})["mean and sd"] = marginals
    results["NUTS"].update(numbers)
    results["log evidence"] = {"value": exact.log_evidence, "error": exact.error}
    path.write_text(json.dumps(results, indent=1) + "\n")


def plot_scatter(problem: Problem, rows: list[Row], nuts: Draws, path: Path) -> None:
    """Means and sds of all effects: each guide's against those of NUTS."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shape = (2, len(problem.effects))
    figure, axes = plt.subplots(*shape, figsize=(9, 8), layout="constrained", squeeze=False)
    styles = {"AutoNormal": ("tab:orange", "s"), "AutoStructured": ("tab:green", "^")}
    styles["AutoNaMIGuide"] = ("tab:blue", "o")
    for j, site in enumerate(problem.effects):
        for i, (kind, statistic) in enumerate((("mean", torch.mean), ("sd", torch.std))):
            axis, truth = axes[i, j], statistic(nuts[site], 0)
            for row in rows:
                if row.name in styles:
                    color, marker = styles[row.name]
                    axis.scatter(truth, statistic(row.draws[site], 0), s=14, alpha=0.7, color=color, marker=marker,
                                 label=row.name, linewidths=0)  # fmt: skip
            axis.axline((truth[0].item(), truth[0].item()), slope=1, color="black", linewidth=0.8)
            axis.set(title=f"{site}: posterior {kind}", xlabel="NUTS", ylabel="guide")
    axes[0, 0].legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_effects(groups: list[tuple[str, Draws, str]], site: str, size: Tensor, raw: Tensor, path: Path) -> None:
    """One site's groups from small to large, with 90% intervals, beside each group's own average."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    order = size.argsort(stable=True)
    place = torch.arange(len(order))
    figure, axis = plt.subplots(figsize=(12, 5), layout="constrained")
    axis.scatter(place, raw[order], marker="x", s=22, color="tab:gray", label="average of the county's own basements")
    for k, (name, draws, color) in enumerate(groups):
        low, middle, high = (draws[site].quantile(q, 0)[order] for q in (0.05, 0.5, 0.95))
        where = place + 0.3 * (k - (len(groups) - 1) / 2)
        axis.vlines(where, low, high, color=color, linewidth=1.3, label=f"{name}, 90% interval")
        axis.scatter(where, middle, color=color, s=10)
    shown = list(range(0, len(order), 4))
    axis.set_xticks(shown, [str(size[order[i]].item()) for i in shown])
    axis.set(xlabel="houses in the county", ylabel=f"{site}: log radon in the basement", xlim=(-1, len(order)))
    axis.set_title("County intercepts: the fewer houses, the closer to the state's mean")
    axis.set_ylim(top=axis.get_ylim()[1] + 0.25)  # room for the legend
    axis.legend(frameon=False, loc="upper left", ncols=3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def argument_parser(description: str | None, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that everything runs")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="of the guides; NUTS stays on the CPU")
    parser.add_argument("--fresh", action="store_true", help="draw with NUTS anew")
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for plots, results and NUTS draws")
    return parser


def study(problem: Problem, exact: Exact, arguments: argparse.Namespace) -> tuple[list[Row], Draws]:
    """Runs NUTS and all guides, and reports; returns the guides' rows and the draws of NUTS."""
    steps, chunks = (3, 2) if arguments.smoke else (arguments.steps, 40)
    chains, warmup, kept = (2, 10, 10) if arguments.smoke else (4, 500, 1000)
    arguments.out.mkdir(parents=True, exist_ok=True)
    nuts, numbers = run_nuts(
        problem, arguments.out / "nuts.npz", seed=arguments.seed, chains=chains, warmup=warmup, kept=kept,
        fresh=arguments.fresh,
    )  # fmt: skip
    exact_draws = exact.sample(500 * chunks)
    if arguments.device != "cpu":
        torch.set_default_device(arguments.device)
        problem = problem._replace(
            arguments=each_tensor(lambda part: part.to(arguments.device), problem.arguments)
        )
    rows = []
    for name in GUIDES:
        guide, seconds = train(problem, name, steps, arguments.seed)
        rows.append(judge(problem, name, guide, seconds, chunks))
        if isinstance(guide, AutoNaMIGuide):
            print(guide.inverse)
    torch.set_default_device("cpu")
    report(problem, rows, nuts, numbers, exact, exact_draws, arguments.out / "results.json")
    plot_scatter(problem, rows, nuts, arguments.out / "scatter.png")
    return rows, nuts


def main() -> None:
    """Runs NUTS, trains all guides, prints the tables and writes the plots."""
    arguments = argument_parser(__doc__, "out/radon").parse_args()
    torch.set_num_threads(1)
    pyro.set_rng_seed(arguments.seed)
    county, floor, y = read_data()
    problem = Problem(
        model, noncentered, (county, floor, y), ("mu_a", "mu_b", "tau_a", "tau_b", "sigma"), ("alpha", "beta")
    )
    rows, nuts = study(problem, exact_posterior(county, floor, y), arguments)
    size = county.bincount()
    basement = floor == 0
    raw = torch.zeros(85).index_add(0, county[basement], y[basement]) / county[basement].bincount(minlength=85)
    groups = [("NUTS", nuts, "black"), *((row.name, row.draws, "tab:blue") for row in rows[-1:])]
    plot_effects(groups, "alpha", size, raw, arguments.out / "counties.png")
    print(f"\nWritten to {arguments.out}: results.json, scatter.png, counties.png, nuts.npz")


if __name__ == "__main__":
    main()
