"""Standard against iterative inference networks: variational autoencoders of images and of titles.

Marino, Yue and Mandt 2018, Iterative Amortized Inference. A decoder and its inference network are trained together, on
the ELBO of one pass (standard: the guide alone) or on that averaged over all learned steps (iterative). Three models:

============  =====================================================================================================
single        z ~ N(0, 1), binary pixels by a network of two layers
hierarchical  top ~ N(0, 1), low ~ N(mean and scale by units that read top), binary pixels by a network that reads low
text          z ~ N(0, 1), words of a title by a softmax of a network; titles of NeurIPS papers (``--titles``) stand in
              for the paper's RCV1, which is not at hand
============  =====================================================================================================

Reported are -log p of test data in nats, by importance-weighted draws of the trained guide (for text: perplexity a
word), the ELBO after each step, beyond those of training as well, and what a training step takes. Runs are paired: at
each seed all systems start from one decoder and see the same batches. At the first seed the single-level model, as
trained, is also given to optimizers of q's parameters, at the best of several rates each. ``--paper`` is the paper's
setting: 64 latents (hierarchical: 32 and 64, with 64 units), two layers of 512 ELU units, batches of 64, Adam at 2e-4,
5,000 draws. Run with::

    python examples/iterative/vae.py [--data FOLDER] [--titles FOLDER] [--smoke | --paper] [--seeds 3] [--jobs 2]

FOLDER holds MNIST (see ``../paper/images.py``), in the default taken at half its side; without it scikit-learn's digits
of 8 by 8 stand in. Without ``--titles`` there is no text.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import pyro
import torch
from autoencoders import DEFAULT, HERE, MODELS, Setting, read, setting
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor, nn

sys.path += [str(HERE.parent / "paper"), str(HERE.parent / "noisy_or")]

from experiment import Cell, Run, mean_and_error, parse, print_table, run_cells, write_results  # noqa: E402
from refinement import AutoIterativeGuide, IterativeELBO, optimize_directly  # noqa: E402

from pyro_nami import AutoNaMIGuide  # noqa: E402

NAME = "vae"
SYSTEMS: dict[str, dict[str, Any]] = {
    "standard": {"steps": 0},
    "iterative, gradients": {"steps": 5},
    "iterative, errors": {"steps": 5, "encode": "errors"},
}
PAPER = {"single": (84.14, 83.84), "hierarchical": (82.63, 82.457), "text": (323, 285.0)}
RATES = {
    "SGD": (0.001, 0.003, 0.01),
    "momentum": (0.0003, 0.001, 0.003),
    "RMSProp": (0.01, 0.03, 0.1),
    "Adam": (0.01, 0.03, 0.1, 0.3),
}


# ---- training and measures


def run_cell(cell: Cell, run: Run) -> dict[str, Any]:
    """Trains a system on a model, and measures it on test data."""
    chosen, device = setting(run.options), run.options.device
    train, test, _ = read(run.options, cell["model"])
    torch.manual_seed(cell["seed"])
    model = MODELS[cell["model"]](chosen, train.shape[1]).to(device)
    train, test = train.to(device), test[: chosen.test].to(device)
    hidden = (chosen.units, chosen.units)
    with torch.device(device):
        base = AutoNaMIGuide(
            model,
            inverse="mean_field",
            within="independent",
            hidden_features=hidden,
            activation=nn.functional.elu,
            exact=False,
            mode="amortized",
        )
        guide = AutoIterativeGuide(base, hidden_features=hidden, **SYSTEMS[cell["system"]])
        guide(train[: chosen.batch])
    optimizer = pyro.optim.ClippedAdam(
        {"lr": chosen.rate, "clip_norm": 5.0, "lrd": 0.1 ** (1 / chosen.steps)}
    )
    svi = SVI(model, guide, optimizer, IterativeELBO(Trace_ELBO()))
    torch.manual_seed(cell["seed"] + 1000)
    batches = [torch.randint(len(train), (chosen.batch,)) for _ in range(chosen.steps)]
    start = time.perf_counter()
    for step, rows in enumerate(batches):
        svi.step(train[rows.to(device)])
        if step % 20 == 19:
            run.tell(step / chosen.steps)
    seconds = (time.perf_counter() - start) / chosen.steps
    measured = {
        **bounds(guide, test, chosen),
        "ms a step": 1e3 * seconds,
        "words": test.sum().item() / len(test),
    }
    if cell["seed"] == 0 and cell["model"] == "single" and cell["system"] == "iterative, gradients":
        measured |= {
            "optimizers": optimizers(guide, test[:50], chosen),
            "pictures": pictures(guide, model, test[:6]),
        }
    return measured


@torch.no_grad()
def bounds(guide: AutoIterativeGuide, x: Tensor, chosen: Setting) -> dict[str, Any]:
    """Returns the importance-weighted -log p, and the negative ELBO after each step, means over data in nats."""
    elbos, importance = [], []
    for part in x.split(max(1, 20_000 // chosen.draws)):
        call, estimates, *_ = guide.trajectory(part, steps=chosen.beyond * guide.steps)
        few = []
        for each in estimates:
            torch.manual_seed(0)  # the same noise for all steps
            few.append(guide.log_weights(call, each, 20).mean(0))
        weights = guide.log_weights(call, estimates[guide.steps], chosen.draws)
        elbos.append(torch.stack(few))
        importance.append(weights.logsumexp(0) - math.log(chosen.draws))
    return {
        "-log p": -torch.cat(importance).mean().item(),
        "negative ELBO": (-torch.cat(elbos, -1).mean(-1)).tolist(),
    }


def optimizers(guide: AutoIterativeGuide, x: Tensor, chosen: Setting) -> dict[str, Any]:
    """Returns curves of the negative ELBO and seconds of learned steps and of optimizers at their best rates."""

    @torch.no_grad()
    def curve(call: Any, estimates: list, every: int = 1) -> list[float]:
        found = []
        for each in estimates[::every]:
            torch.manual_seed(0)  # the same noise for all
            found.append(-guide.log_weights(call, each, 50).mean().item())
        return found

    start = time.perf_counter()
    with torch.no_grad():
        call, estimates, *_ = guide.trajectory(x, steps=10)
    found: dict[str, Any] = {
        "learned": {
            "seconds": (time.perf_counter() - start) / 10,
            "every": 1,
            "curve": curve(call, estimates),
        }
    }
    every, tail = max(1, chosen.optimizer_steps // 100), max(1, chosen.optimizer_steps // 10)
    for name, rates in RATES.items():
        for rate in rates:
            start = time.perf_counter()
            path = optimize_directly(
                guide, x, steps=chosen.optimizer_steps, lr=rate, optimizer=name
            )
            seconds = (time.perf_counter() - start) / chosen.optimizer_steps
            mean = {
                key: torch.stack([each[key] for each in path[-tail:]]).mean(0) for key in path[0]
            }
            one = {
                "rate": rate,
                "seconds": seconds,
                "every": every,
                "curve": curve(call, path, every),
            }
            one["converged"] = curve(call, [mean])[0]
            if name not in found or one["converged"] < found[name]["converged"]:
                found[name] = one
    return found


@torch.no_grad()
def pictures(guide: AutoIterativeGuide, model: Any, x: Tensor) -> list[Any]:
    """Returns images, and what the mean of draws makes of them after each step, ``(1 + steps + 1, images, pixels)``."""
    call, estimates, *_ = guide.trajectory(x)
    rows = [x]
    for estimate in estimates:
        with guide.holding(call, estimate):
            draws = [model.net(guide(x)["z"]).sigmoid() for _ in range(20)]
        rows.append(torch.stack(draws).mean(0))
    return torch.stack(rows).mul(100).round().div(100).tolist()


# ---- the report


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what is claimed, beside what was found: paired differences over seeds, in nats a datum."""
    found = {(row["model"], row["system"]): row["runs"] for row in rows}
    results = []
    for model in dict.fromkeys(model for model, _ in found):
        one, other = (found[model, system] for system in ("standard", "iterative, gradients"))
        gain, error = mean_and_error([a["-log p"] - b["-log p"] for a, b in zip(one, other)])
        holds = error is not None and gain > 2 * error
        text = f"{gain:.2f}" + (f" +- {error:.2f}" if error is not None else "")
        results.append(
            {
                "claim": f"{model}: iterative is better than standard by more than two standard errors",
                "paper": "{} and {}".format(*PAPER[model]),
                "ours": (gain, error),
                "holds": holds,
                "why": text,
            }
        )
    for (model, system), runs in found.items():
        if "iterative" in system:
            curves = torch.tensor([run["negative ELBO"] for run in runs]).mean(0)
            taken = (len(curves) - 1) // DEFAULT.beyond
            drop = (curves[taken:].max() - curves.min()).item()
            text = f"{model}, {system}: {DEFAULT.beyond} times the trained steps stay within 0.1 nats of the best"
            results.append({"claim": text, "ours": drop, "holds": drop < 0.1, "why": f"{drop:.2f}"})
    ways = next(run["optimizers"] for runs in found.values() for run in runs if "optimizers" in run)
    learned, others = (
        ways["learned"],
        {name: way for name, way in ways.items() if name != "learned"},
    )
    converged = min(way["converged"] for way in others.values())
    taken = {name: taken_to(way, converged + 0.1) for name, way in ways.items()}
    steps, adam = taken["learned"], taken["Adam"]
    reached = min(learned["curve"])
    seconds = {name: taken_to(way, reached) * way["seconds"] for name, way in ways.items()}
    fastest = min(seconds[name] for name in others)
    rows = [
        (
            "learned steps are within 0.1 nats of converged direct optimization after 10 at most",
            steps <= 10,
        ),
        (
            "Adam at its best rate takes at least ten times as many",
            steps <= 10 and adam >= 10 * steps,
        ),
        (
            "what learned steps reach they reach in less time than any optimizer",
            seconds["learned"] < fastest,
        ),
    ]
    why = f"ends at {reached:.2f}, converged {converged:.2f}; steps {taken}; seconds {seconds}"
    ours = {name: count if math.isfinite(count) else None for name, count in taken.items()}
    return results + [
        {"claim": claim, "ours": ours, "holds": holds, "why": why} for claim, holds in rows
    ]


def taken_to(way: dict[str, Any], level: float) -> float:
    """Returns how many steps a curve of negative ELBOs takes to a level, infinity if it never gets there."""
    return next(
        (i * way["every"] for i, loss in enumerate(way["curve"]) if loss <= level), math.inf
    )


def report(rows: list[dict[str, Any]]) -> None:
    """Prints a row for each model and system."""
    table = []
    for row in rows:
        runs = row["runs"]
        mean, error = mean_and_error([run["-log p"] for run in runs])
        words = runs[0]["words"]
        perplexity = f"{math.exp(mean / words):.1f}" if row["model"] == "text" else ""
        taken = (len(runs[0]["negative ELBO"]) - 1) // DEFAULT.beyond
        elbos = [sum(run["negative ELBO"][i] for run in runs) / len(runs) for i in (0, taken, -1)]
        shown = f"{mean:.2f}" + (f" +- {error:.2f}" if error is not None else "")
        ms = min(run["ms a step"] for run in runs)
        table.append(
            [
                row["model"],
                row["system"],
                shown,
                perplexity,
                *(f"{e:.2f}" for e in elbos),
                f"{ms:.0f}",
            ]
        )
    print_table(
        [
            "",
            "",
            "-log p",
            "perplexity",
            "-ELBO at first",
            "trained steps",
            "5 times these",
            "ms a step",
        ],
        table,
    )


def draw(file: Path, rows: list[dict[str, Any]]) -> None:
    """Draws ELBOs against steps, optimizers against learned steps, and pictures."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    special = next(run for row in rows for run in row["runs"] if "optimizers" in run)
    figure, axes = plt.subplots(1, 4, figsize=(17, 3.8), layout="constrained")
    for i, row in enumerate(row for row in rows if row["model"] != "text"):
        curves = torch.tensor([run["negative ELBO"] for run in row["runs"]])
        style = "o" if curves.shape[1] == 1 else "-"
        axes[0].plot(
            curves.mean(0).tolist(), style, color=f"C{i}", label=f"{row['model']}, {row['system']}"
        )
    axes[0].set(xlabel="learned steps (5 were trained)", ylabel="negative ELBO, nats an image")
    axes[0].legend(frameon=False, fontsize=7)
    for axis, timed in ((axes[1], False), (axes[2], True)):
        for name, found in special["optimizers"].items():
            unit = found["every"] * (found["seconds"] if timed else 1)
            x = [i * unit for i in range(len(found["curve"]))]
            axis.plot(
                x, found["curve"], label=name + (f", {found['rate']}" if "rate" in found else "")
            )
        axis.set(xscale="symlog" if not timed else "linear", xlabel="seconds" if timed else "steps")
        lowest = min(min(found["curve"]) for found in special["optimizers"].values())
        axis.set(
            ylabel="negative ELBO, nats an image",
            ylim=(lowest - 0.5, special["optimizers"]["learned"]["curve"][0] + 2),
        )
    axes[1].legend(frameon=False, fontsize=7)
    images = torch.tensor(special["pictures"])
    side = math.isqrt(images.shape[-1])
    axes[3].imshow(
        images.unflatten(-1, (side, side)).permute(1, 2, 0, 3).reshape(side * images.shape[1], -1),
        cmap="gray_r",
    )
    axes[3].set_title("image, reconstructions after 0, 1, ... steps", fontsize=9)
    axes[3].set(xticks=[], yticks=[])
    figure.savefig(file, dpi=120)
    plt.close(figure)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="folder of MNIST")
    parser.add_argument("--titles", type=Path, help="folder with nips_titles.csv.gz")
    parser.add_argument("--steps", type=int, help="of each training (3, 1500, 200000)")


def main() -> None:
    """Trains all systems, then prints the table and writes numbers and figure."""
    options = parse(__doc__, (1, 3, 5), add_options, HERE)
    models = [model for model in MODELS if model != "text" or options.extra["titles"] is not None]
    conditions = [
        {"model": model, "system": system}
        for model in models
        for system in SYSTEMS
        if model != "text" or "errors" not in system
    ]
    cells = [
        {**condition, "seed": seed} for condition in conditions for seed in range(options.seeds)
    ]
    found = run_cells(NAME, run_cell, cells, {"setting": list(setting(options))}, options)
    runs = [found[i : i + options.seeds] for i in range(0, len(found), options.seeds)]
    rows = [{**condition, "runs": each} for condition, each in zip(conditions, runs)]
    report(rows)
    payload = {
        "data": read(options, "single")[2],
        "settings": setting(options)._asdict(),
        "rows": rows,
        "claims": claims(rows),
    }
    draw(write_results(NAME, payload, options), rows)


if __name__ == "__main__":
    main()
