"""Structure and refinement: a noisy-OR, in which what one latent explains the others are not asked for any more.

Latents that share what they explain depend on each other once it is seen. An independent q lacks that; learned steps
find the best such q for a datum, and no better one. A faithful inverse has it, and steps start from there. The model is
the true one of ``../noisy_or`` (`worlds.patterns`, 8 latents), so that the evidence of a datum is exact. Bases:

=========  ============================================================================================
AVI        a network for each latent's logit, independent latents
ACP        independent latents, by the bound on the noisy-OR with parameters by a network
faithful   the same bound in the faithful inverse, latents in turn
=========  ============================================================================================

Each is trained alone and with 5 learned steps (`AutoIterativeGuide`) on 1,000 points, at two rates of Adam. Reported is
the mean gap of the ELBO to the log evidence on 1,000 other points in nats, by 100 true draws: at the first estimate,
after the trained steps, and after five times these. Run with::

    python examples/iterative/explaining_away.py [--smoke] [--seeds 2] [--steps 300] [--jobs 2]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from pyro.infer import Trace_ELBO

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "paper"), str(HERE.parent / "noisy_or")]

from experiment import Cell, Run, mean_and_error, parse, print_table, run_cells, write_results  # noqa: E402
from measures import exact  # noqa: E402
from refinement import AutoIterativeGuide, IterativeELBO  # noqa: E402
from relaxation import RelaxedELBO  # noqa: E402
from systems import SYSTEMS, NoisyOrModel  # noqa: E402
from worlds import patterns, split  # noqa: E402

from pyro_nami import AutoNaMIGuide  # noqa: E402

NAME = "explaining_away"
BASES = {"AVI": "AVI", "ACP": "ACP", "faithful": "faithful, bounded"}
STEPS, BEYOND, RATES, BATCH = 5, 5, (0.003, 0.01), 128


def run_cell(cell: Cell, run: Run) -> dict[str, Any]:
    """Trains a base with a number of steps; returns gaps to the exact evidence after each step, in nats."""
    count, device = run.options.extra["steps"], run.options.device
    data = split(patterns(), 1000, cell["seed"], run.options.choose(50, 1000, 1000))
    x, test = data.train.x.to(device), data.test.x.to(device)
    torch.manual_seed(cell["seed"])
    model = NoisyOrModel(patterns()).to(device)
    with torch.device(device):
        base = AutoNaMIGuide(
            model, hidden_features=(64,), mode="amortized", **SYSTEMS[BASES[cell["base"]]]
        )
        guide = AutoIterativeGuide(
            base, steps=cell["steps"], temperature=0.5, hidden_features=(64, 64)
        )
        guide(x[:BATCH])
    optimizer = torch.optim.Adam(guide.parameters(), lr=cell["rate"])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, count)
    draws = Trace_ELBO(num_particles=10, vectorize_particles=True, max_plate_nesting=1)
    elbo = IterativeELBO(RelaxedELBO(draws, temperature=0.3))
    for step in range(count):
        optimizer.zero_grad()
        elbo.loss_and_grads(model, guide, x[torch.randint(len(x), (BATCH,), device=device)])
        torch.nn.utils.clip_grad_norm_(guide.parameters(), 10.0 * BATCH)
        optimizer.step()
        scheduler.step()
        run.tell((step + 1) / count)
    log_evidence = exact(patterns(), data.test.x).log_evidence.mean().item()
    with torch.no_grad():
        call, estimates, *_ = guide.trajectory(test, steps=BEYOND * cell["steps"])
        guide.temperature = None  # true draws
        elbos = [guide.log_weights(call, each, 100).mean().item() for each in estimates]
    return {"gap": [log_evidence - each for each in elbos]}


# ---- the report


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what is claimed at each rate, beside what was found: means over seeds, differences of seeds by pairs."""
    end = {
        (row["base"], row["steps"], row["rate"]): [run["gap"][row["steps"]] for run in row["runs"]]
        for row in rows
    }
    late = {(row["base"], row["rate"]): row["runs"] for row in rows if row["steps"]}
    found = []
    for rate in RATES:
        faithful = end["faithful", STEPS, rate]
        for text, other in (
            ("learned steps improve on the faithful base alone", end["faithful", 0, rate]),
            ("the faithful base with steps improves on ACP with steps", end["ACP", STEPS, rate]),
            ("the faithful base with steps improves on AVI with steps", end["AVI", STEPS, rate]),
        ):
            gain, error = mean_and_error([b - a for a, b in zip(faithful, other)])
            holds = gain > 2 * (error or 0.0)
            shown = f"by {gain:.3f}" + (f" +- {error:.3f}" if error is not None else "")
            found.append(
                {
                    "claim": f"{text}, rate {rate}",
                    "ours": (gain, error),
                    "holds": holds,
                    "why": shown,
                }
            )
        for base in BASES:
            drops = [max(run["gap"][STEPS:]) - min(run["gap"]) for run in late[base, rate]]
            text = f"{base}: {BEYOND} times the trained steps stay within 0.1 nats of the best, rate {rate}"
            found.append(
                {
                    "claim": text,
                    "ours": drops,
                    "holds": max(drops) < 0.1,
                    "why": f"{max(drops):.3f}",
                }
            )
    return found


def draw(file: Path, rows: list[dict[str, Any]]) -> None:
    """Draws gaps against steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(RATES), figsize=(5 * len(RATES), 3.6), sharey=True, layout="constrained"
    )
    for axis, rate in zip(axes, RATES):
        for i, base in enumerate(BASES):
            for row in (row for row in rows if row["base"] == base and row["rate"] == rate):
                gaps = torch.tensor([run["gap"] for run in row["runs"]]).mean(0).tolist()
                if row["steps"]:
                    axis.plot(gaps, ".-", color=f"C{i}", label=f"{base}, with learned steps")
                else:
                    axis.axhline(gaps[0], color=f"C{i}", linestyle="--", label=f"{base}, alone")
        axis.axvline(STEPS, color="lightgray", zorder=0)
        axis.set(xlabel=f"learned steps ({STEPS} were trained), rate {rate}", yscale="log")
    axes[0].set_ylabel("gap to the evidence, nats a datum")
    axes[0].legend(frameon=False, fontsize=7)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="of each training (3, 300, 3000)")


def main() -> None:
    """Trains all, then prints the table and writes numbers and figure."""
    options = parse(__doc__, (1, 2, 5), add_options, HERE)
    given = options.extra["steps"]
    options = options._replace(
        extra={"steps": options.choose(3, 300, 3000) if given is None else given}
    )
    conditions = [
        {"base": base, "steps": n, "rate": rate}
        for rate in RATES
        for base in BASES
        for n in (0, STEPS)
    ]
    cells = [
        {**condition, "seed": seed} for condition in conditions for seed in range(options.seeds)
    ]
    found = run_cells(NAME, run_cell, cells, options.extra, options)
    rows = [
        {**condition, "runs": found[i * options.seeds : (i + 1) * options.seeds]}
        for i, condition in enumerate(conditions)
    ]
    table = []
    for row in rows:
        for name, at in {"first": 0, "trained": row["steps"], "beyond": -1}.items():
            row[name] = mean_and_error([run["gap"][at] for run in row["runs"]])[0]
        shown = [f"{row[name]:.3f}" for name in ("first", "trained", "beyond")]
        table.append([row["base"], row["rate"], row["steps"], *shown])
    print_table(["", "rate", "steps", "gap at first", "trained steps", "5 times these"], table)
    payload = {"training steps": options.extra["steps"], "rows": rows, "claims": claims(rows)}
    draw(write_results(NAME, payload, options), rows)


if __name__ == "__main__":
    main()
