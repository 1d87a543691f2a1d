"""Logistic models: Jaakkola and Jordan's bound against Newton's rule, learned networks and Pyro's AutoNormal.

Two models with two latents each, on data simulated from them with a fixed seed: a Bayesian logistic regression, whose
latents are its weights, and a Bernoulli factor model, whose latents are each row's. So the log evidence is exact, by
quadrature on a grid, and gaps to it are in nats a data set for the regression, nats a row for the factor model. All
guides train on the same data in every step, and are judged by 10,000 draws:

====================  ============================================================================================
bound and correction  the bound's Normal as the start of a masked autoregressive network: ``rules={site: "bounded"}``
bound                 that Normal alone, with learned xi: ``inverse="mean_field"`` as well
Newton                the default: the Normal about the mode, with a learned correction
learned               networks alone: ``exact=False``
AutoNormal            Pyro's, of independent latents
====================  ============================================================================================

Run with: ``python examples/noisy_or/logistic.py [--smoke] [--seeds 2] [--jobs 2] [--device cpu]``
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from search import (
    HERE,
    Cell,
    Run,
    mean_and_error,
    parse,
    print_table,
    pyplot,
    run_cells,
    write_results,
)
from torch import Tensor

from pyro_nami import AutoNaMIGuide

NAME = "logistic"
MODELS, ROWS, OBSERVED, STEPS, PARTICLES = ("regression", "factors"), 200, 20, 1000, 10
SYSTEMS = ("bound and correction", "bound", "Newton", "learned", "AutoNormal")
RATES = (0.003, 0.01, 0.03)
NEAR = 0.01  # nats within which gaps count as tied
LEAST = 1e-4  # nats, of gaps in the figure


class Problem(NamedTuple):
    """A model with its data; `latent` is its site, and `log_evidence` in nats, of all `instances` of that."""

    model: Callable[..., None]
    data: tuple[Tensor, ...]
    latent: str
    instances: int
    log_evidence: float


def log_evidence(weights: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """Returns log p(x) in nats, ``(rows,)``, of ``x`` ``(rows, observed)``, by quadrature on a grid of 241 by 241 z.

    The two z are standard Normal, and logits weights z + bias, of ``(observed, 2)`` and ``(observed,)``.
    """
    axis = torch.linspace(-6, 6, 241, dtype=torch.float64)
    z = torch.cartesian_prod(axis, axis)
    logits = z @ weights.double().T + bias.double()
    joint = (
        x.double() @ logits.T
        - F.softplus(logits).sum(-1)
        + dist.Normal(0.0, 1.0).log_prob(z).sum(-1)
    )
    return joint.logsumexp(-1) + 2 * (axis[1] - axis[0]).log()


def problem(name: str, device: str = "cpu") -> Problem:
    """Returns a model by its name with data, the same ones in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "regression":
            x = torch.randn(ROWS, 2) @ torch.tensor([[1.0, 0.8], [0.0, 0.6]])
            y = torch.bernoulli(torch.sigmoid(x @ torch.tensor([1.5, -1.0])))
            exact = log_evidence(x, torch.zeros(ROWS), y[None])
            return Problem(regression, (x.to(device), y.to(device)), "w", 1, exact.item())
        weights, bias = 1.5 * torch.randn(OBSERVED, 2), 0.5 * torch.randn(OBSERVED)
        x = torch.bernoulli(torch.sigmoid(torch.randn(ROWS, 2) @ weights.T + bias))
    data = tuple(part.to(device) for part in (weights, bias, x))
    return Problem(factors, data, "z", ROWS, log_evidence(weights, bias, x).sum().item())


def regression(x: Tensor, y: Tensor) -> None:
    """Logistic regression of ``y`` ``(rows,)`` on ``x`` ``(rows, features)``."""
    w = pyro.sample("w", dist.Normal(torch.zeros_like(x[0]), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=(w * x).sum(-1)), obs=y)


def factors(weights: Tensor, bias: Tensor, x: Tensor) -> None:
    """Two factors for each of the rows of ``x`` ``(rows, observed)``, with ``weights`` ``(observed, 2)``."""
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros_like(weights[0]), 1.0).to_event(1))
        pyro.sample("x", dist.Bernoulli(logits=z @ weights.T + bias).to_event(1), obs=x)


def guide_of(system: str, posed: Problem) -> Any:
    """Returns the untrained guide of a system."""
    options: dict[str, dict[str, Any]] = {"Newton": {}, "learned": {"exact": False}}
    options["bound and correction"] = {"rules": {posed.latent: "bounded"}}
    options["bound"] = {**options["bound and correction"], "inverse": "mean_field"}
    return (
        AutoNaMIGuide(posed.model, **options[system])
        if system in options
        else AutoNormal(posed.model)
    )


def run_cell(cell: Cell, run: Run) -> dict[str, float]:
    """Trains a guide; losses are means of 10 estimates, and a step's time is the median, in ms."""
    posed, steps = problem(cell["model"], run.options.device), run.options.choose(3, STEPS, STEPS)
    with torch.device(run.options.device):
        guide = guide_of(cell["system"], posed)
        guide(*posed.data)
    elbo = Trace_ELBO(num_particles=PARTICLES, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(posed.model, guide, pyro.optim.Adam({"lr": cell["rate"]}), elbo)
    times = [time.perf_counter()]
    for step in range(steps):
        svi.step(*posed.data)
        times.append(time.perf_counter())
        run.tell((step + 1) / steps)
    elbo.num_particles = run.options.choose(100, 1000, 1000)
    with torch.no_grad():
        loss, error = mean_and_error(
            [elbo.loss(posed.model, guide, *posed.data) for _ in range(10)]
        )
    gap, error = (value / posed.instances for value in (loss + posed.log_evidence, error or 0.0))
    taken = 1e3 * statistics.median(b - a for a, b in zip(times, times[1:]))
    return {"negative ELBO": loss, "gap": gap, "error of the gap": error, "ms a step": taken}


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what is claimed of each model at every rate, beside what was found: differences of mean gaps."""
    found: list[dict[str, Any]] = []
    bounded, bound, newton, learned, normal = SYSTEMS
    comparisons = (
        ("Newton's rule is the best or within 0.01 nats", newton, SYSTEMS, NEAR),
        (
            "the bound with its correction is within 0.01 nats of Newton's rule",
            bounded,
            [newton],
            NEAR,
        ),
        ("it is better than networks alone or within 0.01 nats", bounded, [learned], NEAR),
        ("it is better than the bound alone", bounded, [bound], 0.0),
        ("the bound alone is better than AutoNormal", bound, [normal], 0.0),
    )
    for model, (text, one, others, slack) in itertools.product(MODELS, comparisons):
        gap = {(row["system"], row["rate"]): row["gap"] for row in rows if row["model"] == model}
        over = {rate: gap[one, rate] - min(gap[other, rate] for other in others) for _, rate in gap}
        holds = max(over.values()) <= slack
        why = "" if holds else ", ".join(f"at {rate}: {value:+.4f}" for rate, value in over.items())
        record = {"claim": f"{model}: {text}, at every rate", "paper": "not in the paper"}
        found.append({**record, "ours": over, "holds": holds, "why": why})
    return found


def report(rows: list[dict[str, Any]], exact: dict[str, float]) -> None:
    """Prints a row for each model, system and rate, with the gap at each seed."""
    table: list[list[Any]] = [
        [model, "exact", "", f"{exact[model]:.3f}", "0", "", ""] for model in exact
    ]
    for row in rows:
        gaps = " ".join(f"{run['gap']:.4f}" for run in row["runs"])
        error = max(run["error of the gap"] for run in row["runs"])
        numbers = f"{row['negative ELBO']:.3f}", gaps, f"{error:.4f}", f"{row['ms a step']:.1f}"
        table.append([row["model"], row["system"], row["rate"], *numbers])
    print_table(["", "", "rate", "negative ELBO", "gap by seed", "their error", "ms a step"], table)


def draw(file: Path, rows: list[dict[str, Any]]) -> None:
    """Draws gaps against rates for each model, a line a seed; then the least time of a step."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for place, system in enumerate(SYSTEMS):
        for axis, (model, of) in zip(axes, zip(MODELS, ("data set", "row"))):
            own = [row for row in rows if (row["model"], row["system"]) == (model, system)]
            gaps = [[max(run["gap"], LEAST) for run in row["runs"]] for row in own]
            axis.plot([row["rate"] for row in own], gaps, "o-", color=f"C{place}", markersize=4)
            axis.set(title=f"{model}, a line a seed", xscale="log", yscale="log", xlabel="rate")
            axis.set_ylabel(f"gap, nats a {of} (less than {LEAST} as {LEAST})")
            axis.set_xticks(RATES, [str(rate) for rate in RATES])
            axis.minorticks_off()
            at, least = MODELS.index(model) + place / 6, min(row["ms a step"] for row in own)
            axes[2].bar(
                at, least, 0.15, color=f"C{place}", label=system if model == MODELS[0] else ""
            )
    axes[2].set(xticks=[1 / 3, 4 / 3], xticklabels=MODELS, ylabel="ms a step, least of runs")
    axes[2].legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def main() -> None:
    """Trains all guides, then prints the table and writes numbers and figure."""
    options = parse(__doc__, (1, 2, 5), folder=HERE)
    places = itertools.product(MODELS, SYSTEMS, options.choose((0.01,), RATES, RATES))
    rows: list[dict[str, Any]] = [dict(zip(("model", "system", "rate"), each)) for each in places]
    cells = [{**row, "seed": seed} for row in rows for seed in range(options.seeds)]
    found = run_cells(NAME, run_cell, cells, {"steps": STEPS}, options)
    for i, row in enumerate(rows):
        runs = row["runs"] = found[i * options.seeds : (i + 1) * options.seeds]
        row |= {key: statistics.fmean(run[key] for run in runs) for key in ("negative ELBO", "gap")}
        row["ms a step"] = min(run["ms a step"] for run in runs)  # other work slows the rest
    exact = {model: -problem(model).log_evidence for model in MODELS}
    report(rows, exact)
    settings = {"steps": options.choose(3, STEPS, STEPS), "particles": PARTICLES}
    payload = {
        "settings": settings,
        "negative log evidence": exact,
        "rows": rows,
        "claims": claims(rows),
    }
    draw(write_results(NAME, payload, options), rows)


if __name__ == "__main__":
    main()
