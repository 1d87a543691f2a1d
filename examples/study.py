"""What ``mixed_models.py`` does with each model: train all guides alike, and judge them against references.

An example brings a `Problem` and its `LinearModel` or `GeneralizedModel`; the references are in ``references.py``.
`study` does the rest.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoGaussian,
    AutoGuide,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoStructured,
)
from pyro.optim import CosineAnnealingLR
from references import Draws, GeneralizedModel, LinearModel, Problem, exact_draws, run_nuts
from torch import Tensor
from torch.optim import Adam
from tqdm import tqdm

from pyro_nami import AutoNaMIGuide

MakeGuide = Callable[[Callable], AutoGuide]

GUIDES: dict[str, MakeGuide] = {
    "AutoNormal": AutoNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoLowRankMultivariateNormal": AutoLowRankMultivariateNormal,
    "AutoGaussian": AutoGaussian,
    "AutoStructured": AutoStructured,
    "AutoNaMIGuide": AutoNaMIGuide,
    "AutoNaMIGuide, exact=False": lambda model: AutoNaMIGuide(model, exact=False),
}


# ---- guides


class Row(NamedTuple):
    """What is reported of one guide: ELBO in nats with its standard error, training time, draws."""

    elbo: float
    error: float
    seconds: float
    draws: Draws


def fit(
    problem: Problem,
    name: str,
    make: MakeGuide,
    *,
    steps: int,
    seed: int,
    chunks: int,
    size: int = 500,
    learning_rate: float = 0.02,
    particles: int = 16,
) -> tuple[AutoGuide, Row]:
    """A trained guide, and its row: the ELBO from ``chunks`` times ``size`` particles, and as many draws."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = make(problem.model)
    optimizer = CosineAnnealingLR(
        {"optimizer": Adam, "optim_args": {"lr": learning_rate}, "T_max": steps},
        clip_args={"clip_value": 10.0},
    )
    svi = SVI(problem.model, guide, optimizer, elbo(particles))
    start = time.perf_counter()
    with tqdm(range(steps), desc=f"{name:<31}", mininterval=0.2) as progress:
        for step in progress:
            loss = svi.step(*problem.arguments)
            optimizer.step()
            if step % 100 == 0:
                progress.set_postfix_str(f"loss {loss:.2f}", refresh=False)
    seconds = time.perf_counter() - start
    losses, parts = [], []
    with torch.no_grad():
        for _ in range(chunks):
            losses.append(-elbo(size).loss(problem.model, guide, *problem.arguments))
            # Predictive(parallel=True) takes no vectors outside plates
            with pyro.plate("draws", size, dim=-2):
                parts.append(guide(*problem.arguments))
    draws = {
        site: torch.cat([part[site].squeeze().double().cpu() for part in parts])
        for site in problem.sites
    }
    values = torch.tensor(losses)
    return guide, Row(values.mean().item(), values.std().item() / math.sqrt(chunks), seconds, draws)


def elbo(particles: int) -> Trace_ELBO:
    return Trace_ELBO(num_particles=particles, vectorize_particles=True, max_plate_nesting=1)


# ---- the report


def compare(draws: Draws, reference: Draws, sites: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Differences of means in sds of the reference, and ratios of sds, of all instances of the sites."""
    shifts, ratios = [], []
    for site in sites:
        sd = reference[site].std(0)
        shifts.append(((draws[site].mean(0) - reference[site].mean(0)) / sd).reshape(-1))
        ratios.append((draws[site].std(0) / sd).reshape(-1))
    return torch.cat(shifts), torch.cat(ratios)


def print_table(
    problem: Problem, rows: Mapping[str, Row], against: str, evidence: float
) -> dict[str, Any]:
    """Prints how far all rows are from one of them, and returns it: globals and effects apart."""
    print(
        f"\nAgainst {against}: largest difference of a mean, in posterior sds; range of sd ratios; share of the"
    )
    print(
        "unknowns with both within 0.1 sd and 10%. Gap: exact log evidence minus ELBO, in nats.\n"
    )
    kinds = {"globals": problem.common, "effects": problem.effects}
    print(f"{'':<31}{'':>28}" + "".join(f"{kind:^30}" for kind in kinds))
    print(f"{'':<31}{'gap':>19}{'seconds':>9}" + f"{'mean':>8}{'sd ratios':>13}{'within':>9}" * 2)
    results: dict[str, Any] = {}
    for name, row in rows.items():
        gap = "" if math.isnan(row.elbo) else f"{evidence - row.elbo:.3f} +- {row.error:.3f}"
        line = f"{name:<31}{gap:>19}{row.seconds:>9.0f}"
        results[name] = {"ELBO": row.elbo, "its error": row.error, "seconds": row.seconds}
        for kind, sites in kinds.items():
            shift, ratio = compare(row.draws, rows[against].draws, sites)
            off, low, high = shift.abs().max().item(), ratio.min().item(), ratio.max().item()
            within = ((shift.abs() <= 0.1) & ((ratio - 1).abs() <= 0.1)).double().mean().item()
            line += f"{off:>8.2f}{f'{low:.2f} - {high:.2f}':>13}{within:>9.1%}"
            results[name][kind] = {"mean off": off, "sd ratios": [low, high], "within": within}
        print(line)
    return results


def print_globals(problem: Problem, rows: Mapping[str, Row]) -> dict[str, Any]:
    """Prints posterior means and sds of every global number, and returns them: row -> name -> (mean, sd)."""
    results: dict[str, Any] = {}
    for name, row in rows.items():
        results[name] = {}
        for site in problem.common:
            flat = row.draws[site].reshape(len(row.draws[site]), -1)
            names = (
                [site] if flat.shape[-1] == 1 else [f"{site}[{k}]" for k in range(flat.shape[-1])]
            )
            results[name].update(zip(names, zip(flat.mean(0).tolist(), flat.std(0).tolist())))
    print(
        "\nPosterior mean (sd)\n\n"
        + " " * 31
        + "".join(f"{site:>16}" for site in results["exact draws"])
    )
    for name, marginals in results.items():
        cells = [f"{mean:.3f} ({sd:.3f})" for mean, sd in marginals.values()]
        print(f"{name:<31}" + "".join(f"{cell:>16}" for cell in cells))
    return results


def plot_errors(problem: Problem, rows: Mapping[str, Row], against: str, path: Path) -> None:
    """Errors of means and sds of all unknowns, a strip for each row; gray where they are small enough."""
    plt = pyplot()
    shown = {name: row for name, row in rows.items() if name != against}
    figure, axes = plt.subplots(
        1, 2, figsize=(11, 1.4 + 0.7 * len(shown)), sharey=True, layout="constrained"
    )
    for axis, span in zip(axes, ((-0.1, 0.1), (0.9, 1.1))):
        axis.axvspan(*span, color="lightgray", linewidth=0, label="within 0.1 sd, and 10%")
    groups: list[tuple[str, tuple[str, ...], str, str, int]] = [
        (site, (site,), color, "o", 14)
        for site, color in zip(problem.effects, ("tab:blue", "tab:orange"))
    ]
    groups.append(("globals", problem.common, "black", "D", 22))
    for k, (label, sites, color, marker, area) in enumerate(groups):
        for place, row in enumerate(shown.values()):
            for axis, errors in zip(axes, compare(row.draws, rows[against].draws, sites)):
                height = torch.full(errors.shape, place + 0.24 * (k - 1))
                axis.scatter(
                    errors,
                    height,
                    s=area,
                    color=color,
                    marker=marker,
                    alpha=0.6,
                    linewidths=0,
                    label=label,
                )
                label = "_"  # one entry in the legend
    axes[0].set(yticks=range(len(shown)), yticklabels=list(shown), ylim=(len(shown) - 0.5, -0.5))
    axes[0].set_xlabel(f"posterior mean: difference from {against}, in sds")
    axes[1].set(xlabel=f"posterior sd: ratio to {against}", xscale="log")
    ticks = [0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.4, 2.0]
    low, high = axes[1].get_xlim()
    axes[1].set_xticks([tick for tick in ticks if low < tick < high])
    axes[1].xaxis.set_major_formatter("{x:g}")
    axes[1].minorticks_off()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_intervals(axis: Any, columns: Sequence[tuple[str, Tensor, str]]) -> None:
    """90% intervals and medians of every column ``(draws, places)`` side by side, with a name and a color each."""
    for k, (name, draws, color) in enumerate(columns):
        low, middle, high = draws.quantile(torch.tensor([0.05, 0.5, 0.95]).double(), 0)
        where = torch.arange(draws.shape[-1]) + 0.25 * (k - (len(columns) - 1) / 2)
        axis.vlines(where, low, high, color=color, linewidth=1.5, label=f"{name}, 90% interval")
        axis.scatter(where, middle, color=color, s=11)


def pyplot() -> Any:
    """matplotlib.pyplot for files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


# ---- running


def on_device(name: str) -> AbstractContextManager[Any]:
    """Returns a context in which new tensors are on a device; none for the CPU, as it slows down all calls."""
    return nullcontext() if name == "cpu" else torch.device(name)


def argument_parser(
    description: str | None, out: str, steps: int | None = 3000
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps, to see that everything runs"
    )
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cpu", help="of the guides; references are computed on the CPU"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(out), help="folder for plots, results and draws of NUTS"
    )
    return parser


def study(
    problem: Problem,
    model: LinearModel | GeneralizedModel,
    arguments: argparse.Namespace,
    out: Path,
) -> dict[str, Row]:
    """Computes the references, trains the guides, and reports; returns the rows of all by name."""
    steps, chunks, size = (3, 2, 50) if arguments.smoke else (arguments.steps, 40, 500)
    out.mkdir(parents=True, exist_ok=True)
    exact = exact_draws(problem, model, out, seed=arguments.seed, smoke=arguments.smoke)
    rows = {"exact draws": Row(exact.log_evidence, exact.error, 0.0, exact.draws)}
    found: dict[str, float] = {}
    if arguments.nuts:
        draws, found = run_nuts(problem, out, seed=arguments.seed, smoke=arguments.smoke)
        rows["NUTS"] = Row(math.nan, 0.0, found["seconds"], draws)
    against = list(rows)
    with on_device(arguments.device):
        moved = problem.convert(lambda part: part.to(arguments.device))
        settings: dict[str, Any] = {
            "steps": steps,
            "seed": arguments.seed,
            "chunks": chunks,
            "size": size,
        }
        for name in arguments.guides:
            make = GUIDES[name]
            guide, rows[name] = fit(moved, name, make, learning_rate=arguments.rate, **settings)
            if make is AutoNaMIGuide:
                print(guide.inverse)
                print(guide.rules)
    if found:
        print("\nNUTS: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    print(
        f"\nExact log evidence: {exact.log_evidence:.3f} +- {exact.error:.3f} nats ({exact.share:.0%} effective)"
    )
    tables = {name: print_table(problem, rows, name, exact.log_evidence) for name in against}
    evidence = {
        "log evidence": exact.log_evidence,
        "its error": exact.error,
        "effective share": exact.share,
    }
    results = {
        "NUTS": found,
        "exact": evidence,
        "against": tables,
        "globals": print_globals(problem, rows),
    }
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    plot_errors(problem, rows, "exact draws", out / "errors.png")
    return rows
