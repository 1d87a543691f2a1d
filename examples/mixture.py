"""A Gaussian mixture amortized over data sets, and one of Old Faithful's eruptions with exact assignments.

Three components with ordered locations; which component a point is of is summed out, so all latents are continuous.
The guide never sees real data in training: every step simulates data sets of one size, drawn log-uniformly, from the
model itself, and maximizes the guide's log density of the latents that made them (the expected KL from posterior to
guide). Afterwards one pass gives the posterior of any data set of any size. It is judged beside NUTS on a new data set,
on its first 200 points and on all 2,000, ten times as many as it has ever seen.

With ``--faithful`` SVI fits three components to the times between 272 eruptions instead. Which component a time is of
is a latent of its own then, which the guide draws exactly given all else. It is judged by the log predictive density of
a point beside NUTS, and AutoNormal, with assignments summed out. Run with::

    python examples/mixture.py [--faithful] [--smoke] [--steps N] [--seed 0] [--device cpu] [--out out/mixture]
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.transforms import OrderedTransform
from pyro.infer.autoguide import AutoNormal
from pyro.ops.indexing import Vindex
from references import Draws, Problem, run_nuts
from study import argument_parser, compare, draw_intervals, fit, on_device, pyplot
from torch import Tensor
from tqdm import tqdm

from pyro_nami import AutoNaMIGuide

COMPONENTS = 3
SITES = ("weights", "locs", "scales")
TRAINING_SIZES = (20, 200)
TEST_SIZES = (200, 2000)
BATCH = 64
LEARNING_RATE = 1e-2
# What points say of three components is far from linear and Gaussian, which is what a mean of features and evidence
# that adds are made for: attention looks at the points twice, and splines take any shape.
OPTIONS: dict[str, Any] = {
    "pooling": "attention",
    "families": "flow",
    "hidden_features": (128, 128),
    "evidence": False,
}
TRUTH = {
    "weights": torch.tensor([0.45, 0.30, 0.25]),
    "locs": torch.tensor([-2.4, 0.3, 2.6]),
    "scales": torch.tensor([0.55, 0.9, 0.45]),
}


def model(y: Tensor | None = None, size: int = 200) -> Tensor:
    """The mixture with the components summed out; ``y`` of shape ``(*batch, size)``, or None to simulate it."""
    weights = pyro.sample("weights", dist.Dirichlet(torch.full((COMPONENTS,), 5.0)))
    # The first location is -2.5 +- 1, and the steps to the next ones are exp(0.9 +- 0.3), about 2.5.
    start = dist.Normal(torch.tensor([-2.5, 0.9, 0.9]), torch.tensor([1.0, 0.3, 0.3])).to_event(1)
    locs = pyro.sample("locs", dist.TransformedDistribution(start, OrderedTransform()))
    scales = pyro.sample("scales", dist.LogNormal(torch.full((COMPONENTS,), -0.4), 0.4).to_event(1))
    parts = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, scales))
    with pyro.plate("points", size if y is None else y.shape[-1]):
        return pyro.sample("y", parts, obs=y)


def density(draws: Draws, grid: Tensor) -> Tensor:
    """The density of a new point given each draw, ``(draws, len(grid))``."""
    parts = dist.Normal(draws["locs"][:, None], draws["scales"][:, None]).log_prob(grid[:, None])
    return (parts + draws["weights"][:, None].log()).exp().sum(-1)


# ---- training on simulations


def simulate(count: int, size: int) -> tuple[dict[str, Tensor], Tensor]:
    """Latents and data of ``count`` data sets, ``(count, 1, components)`` and ``(count, size)``."""
    with torch.no_grad(), pyro.plate("data sets", count, dim=-2):
        nodes = poutine.trace(model).get_trace(size=size).nodes
    return {site: nodes[site]["value"] for site in SITES}, nodes["y"]["value"]


def train(guide: AutoNaMIGuide, steps: int) -> tuple[list[float], float]:
    """Trains a guide on simulations; returns the loss per data set in nats at every step, and the seconds it took."""
    guide(simulate(1, TRAINING_SIZES[-1])[1][0])  # the first call makes the networks
    optimizer = torch.optim.Adam(guide.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    low, high = map(math.log, TRAINING_SIZES)
    losses, start = [], time.perf_counter()
    with tqdm(range(steps), desc="training on simulations", mininterval=0.2) as progress:
        for step in progress:
            size = round(math.exp(low + (high - low) * torch.rand(()).item()))
            latents, y = simulate(BATCH, size)
            loss = -guide.log_prob(latents, y).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(guide.parameters(), 10.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if step % 50 == 49:
                progress.set_postfix_str(
                    f"loss {sum(losses[-50:]) / 50:.2f} nats a data set", refresh=False
                )
    return losses, time.perf_counter() - start


@torch.no_grad()
def sample(guide: AutoNaMIGuide, y: Tensor, count: int) -> tuple[Draws, float]:
    """Draws of the latents given a data set, and the seconds they took."""
    start = time.perf_counter()
    # Predictive(parallel=True) takes no vectors outside plates
    with pyro.plate("draws", count, dim=-2):
        values = guide(y)
    seconds = time.perf_counter() - start
    return {site: values[site].reshape(count, COMPONENTS).double().cpu() for site in SITES}, seconds


# ---- calibration


@torch.no_grad()
def coverage(guide: AutoNaMIGuide, size: int, data_sets: int) -> Tensor:
    """The share of simulated data sets whose latents lie in the guide's 80% intervals, ``(9,)``; 0.8 if calibrated."""
    inside = []
    for _ in range(data_sets):
        latents, y = simulate(1, size)
        draws, _ = sample(guide, y[0], 400)
        low, high = (torch.cat([draws[site].quantile(q, 0) for site in SITES]) for q in (0.1, 0.9))
        truth = torch.cat([latents[site].flatten() for site in SITES]).cpu()
        inside.append((low < truth) & (truth < high))
    return torch.stack(inside).double().mean(0)


# ---- the report


def print_table(
    size: int, draws: Draws, nuts: Draws, seconds: float, numbers: dict[str, float]
) -> dict[str, Any]:
    """Prints means and sds beside those of NUTS; returns what it prints."""
    shift, ratio = compare(draws, nuts, SITES)
    print(f"\n{size:,} points. Guide: {seconds:.2f} s. NUTS: ", end="")
    print(", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))
    print(
        f"{'':<12}{'truth':>9}{'NUTS':>18}{'AutoNaMIGuide':>18}{'mean off, sds':>15}{'sd ratio':>10}"
    )
    names = [f"{site}_{k + 1}" for site in SITES for k in range(COMPONENTS)]
    flat = [torch.cat([part[site] for site in SITES], -1) for part in (nuts, draws)]
    truth = torch.cat([TRUTH[site] for site in SITES])
    for i, name in enumerate(names):
        cells = [f"{part[:, i].mean():.3f} ({part[:, i].std():.3f})" for part in flat]
        print(
            f"{name:<12}{truth[i]:>9.2f}{cells[0]:>18}{cells[1]:>18}{shift[i]:>15.2f}{ratio[i]:>10.2f}"
        )
    print(
        f"largest difference of a mean {shift.abs().max():.2f} sds; sd ratios {ratio.min():.2f} to {ratio.max():.2f}"
    )
    found = {
        name: {"mean off": s, "sd ratio": r}
        for name, s, r in zip(names, shift.tolist(), ratio.tolist())
    }
    return {"latents": found, "seconds": seconds, "NUTS": numbers}


def plot(found: list[tuple[int, Tensor, Draws, Draws]], path: Path) -> None:
    """A row for each size: data with predictive densities, then intervals of locations, scales and weights."""
    plt = pyplot()
    grid = torch.linspace(-5.0, 5.0, 301).double()
    truth = density({site: value[None].double() for site, value in TRUTH.items()}, grid)[0]
    figure, axes = plt.subplots(
        2, 4, figsize=(14, 7), layout="constrained", width_ratios=(1.8, 1, 1, 1), sharey="col"
    )
    for row, (size, y, draws, nuts) in zip(axes, found):
        row[0].hist(y.cpu(), bins=50, range=(-5, 5), density=True, color="lightgray")
        low, middle, high = density(draws, grid).quantile(
            torch.tensor([0.05, 0.5, 0.95]).double(), 0
        )
        row[0].fill_between(
            grid, low, high, color="tab:blue", alpha=0.3, linewidth=0, label="guide, 90% band"
        )
        row[0].plot(grid, middle, color="tab:blue", label="guide, median")
        row[0].plot(
            grid,
            density(nuts, grid).quantile(0.5, 0),
            color="black",
            linestyle="--",
            label="NUTS, median",
        )
        row[0].plot(grid, truth, color="tab:red", linewidth=1, label="truth")
        row[0].set(title=f"density of y, {size:,} points", xlabel="y", xlim=(-5, 5))
        for axis, site in zip(row[1:], ("locs", "scales", "weights")):
            draw_intervals(
                axis, [("NUTS", nuts[site], "black"), ("AutoNaMIGuide", draws[site], "tab:blue")]
            )
            place = torch.arange(COMPONENTS)
            axis.hlines(
                TRUTH[site], place - 0.35, place + 0.35, color="tab:red", linewidth=1, label="truth"
            )
            axis.set(title=f"{site}, {size:,} points", xlabel="component", xticks=place)
            axis.set_xticklabels((1 + place).tolist())
    axes[0, 0].set_ylim(0, 1.25 * axes[0, 0].get_ylim()[1])  # room for the legend
    axes[0, 0].legend(frameon=False, ncols=2)
    figure.legend(
        *axes[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ---- Old Faithful


def components() -> tuple[Tensor, Tensor, Tensor]:
    """Weights, locations and scales of three components, in no order."""
    weights = pyro.sample("weights", dist.Dirichlet(torch.full((COMPONENTS,), 2.0)))
    locs = pyro.sample("locs", dist.Normal(torch.zeros(COMPONENTS), 1.5).to_event(1))
    scales = pyro.sample("scales", dist.LogNormal(torch.full((COMPONENTS,), -1.0), 0.7).to_event(1))
    return weights, locs, scales


def assigned(y: Tensor) -> None:
    """The mixture as it is told: every eruption is of one component."""
    weights, locs, scales = components()
    with pyro.plate("eruptions", len(y)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(Vindex(locs)[..., z], Vindex(scales)[..., z]), obs=y)


def summed(y: Tensor) -> None:
    """The same with the components summed out."""
    weights, locs, scales = components()
    with pyro.plate("eruptions", len(y)):
        pyro.sample(
            "y", dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, scales)), obs=y
        )


def read_waiting() -> Tensor:
    """Times to the next eruption, standardized, ``(272,)``."""
    with (Path(__file__).parent / "data" / "faithful.csv").open() as file:
        waiting = torch.tensor([float(row["waiting"]) for row in csv.DictReader(file)])
    return (waiting - waiting.mean()) / waiting.std()


def faithful(arguments: argparse.Namespace) -> None:
    """Prints the mean over points of the log of the mean density over draws, in nats, for NUTS and for the guides."""
    y = read_waiting()
    problem = Problem(summed, (y,), SITES, dense=True)
    nuts, numbers = run_nuts(problem, arguments.out, seed=arguments.seed, smoke=arguments.smoke)
    judged = {"NUTS": density(nuts, y.double()).mean(0).log().mean().item()}
    draws = {}
    steps, chunks = (3, 2) if arguments.smoke else (arguments.steps or 3000, 10)
    rates = (0.003, 0.01, 0.03)[2 * arguments.smoke :]
    for rate in rates:
        for seed in (arguments.seed, arguments.seed + 1):
            for make, told in ((AutoNaMIGuide, assigned), (AutoNormal, summed)):
                name = f"{make.__name__}, rate {rate}, seed {seed}"
                options: dict[str, Any] = {
                    "steps": steps,
                    "seed": seed,
                    "chunks": chunks,
                    "learning_rate": rate,
                }
                guide, row = fit(problem._replace(model=told), name, make, **options)
                judged[name] = density(row.draws, y.double()).mean(0).log().mean().item()
                draws.setdefault(make.__name__, row.draws)
                if len(judged) == 2:
                    print(guide.rules)
    print("\nNUTS: " + ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))
    print(f"\n{'':<40}{'log predictive density of a point':>36}{'less NUTS':>12}")
    for name, value in judged.items():
        print(f"{name:<40}{value:>36.4f}{value - judged['NUTS']:>12.4f}")
    (arguments.out / "results.json").write_text(json.dumps(judged, indent=1) + "\n")
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axis.hist(y, bins=40, density=True, color="lightgray")
    grid = torch.linspace(-2.5, 2.5, 301).double()
    for (name, each), color in zip(
        {"NUTS": nuts, **draws}.items(), ("black", "tab:blue", "tab:orange")
    ):
        low, middle, high = density(each, grid).quantile(
            torch.tensor([0.05, 0.5, 0.95]).double(), 0
        )
        axis.plot(grid, middle, color=color, label=f"{name}, median and 90% band")
        axis.fill_between(grid, low, high, color=color, alpha=0.2, linewidth=0)
    axis.set(title="Old Faithful: density of the time to the next eruption", xlabel="standardized")
    axis.legend(frameon=False)
    figure.savefig(arguments.out / "faithful.png", dpi=130)
    plt.close(figure)
    print(f"\nWritten to {arguments.out}: results.json, faithful.png and the draws of NUTS")


def main() -> None:
    """Trains on simulations, then prints tables and writes plots for two sizes of one data set; or Old Faithful."""
    parser = argument_parser(__doc__, "out/mixture", steps=None)
    parser.add_argument(
        "--faithful", action="store_true", help="Old Faithful, with exact assignments"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.faithful:
        return faithful(arguments)
    steps, count, sets = (3, 50, 4) if arguments.smoke else (arguments.steps or 12000, 5000, 200)

    pyro.set_rng_seed(arguments.seed)
    data = poutine.condition(model, TRUTH)(size=TEST_SIZES[-1])
    problems = [Problem(model, (data[:size],), SITES, dense=True) for size in TEST_SIZES]
    references = [
        run_nuts(each, arguments.out, seed=arguments.seed, smoke=arguments.smoke)
        for each in problems
    ]

    pyro.clear_param_store()
    pyro.set_rng_seed(arguments.seed)
    with on_device(arguments.device):
        guide = AutoNaMIGuide(model, **OPTIONS)
        losses, seconds = train(guide, steps)
        sampled = [sample(guide, data[:size].to(arguments.device), count) for size in TEST_SIZES]
        covered = {size: coverage(guide, size, sets) for size in TEST_SIZES}
    print(guide.inverse)
    last = losses[-len(losses) // 10 :]
    loss = sum(last) / len(last)
    print(
        f"\nTrained {seconds:.0f} s on {steps * BATCH:,} data sets; loss at the end {loss:.3f} nats."
    )

    results: dict[str, Any] = {"training seconds": seconds, "loss": loss}
    for size, (draws, took), (nuts, numbers) in zip(TEST_SIZES, sampled, references):
        results[str(size)] = print_table(size, draws, nuts, took, numbers)
    print(
        f"\nShare of {sets} new data sets whose latents are in the guide's 80% intervals (0.8 is right, +- ",
        end="",
    )
    print(f"{math.sqrt(0.16 / sets):.2f}): weights, locs, scales")
    for size, shares in covered.items():
        print(
            f"{size:>6,} points: "
            + " ".join(f"{share:.2f}" for share in shares)
            + f"   mean {shares.mean():.3f}"
        )
        results[str(size)]["coverage of 80% intervals"] = shares.tolist()
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    found = [
        (size, data[:size], draws, nuts)
        for size, (draws, _), (nuts, _) in zip(TEST_SIZES, sampled, references)
    ]
    plot(found, arguments.out / "mixture.png")
    print(f"\nWritten to {arguments.out}: results.json, mixture.png and the draws of NUTS")


if __name__ == "__main__":
    main()
