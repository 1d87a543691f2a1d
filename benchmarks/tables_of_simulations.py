"""Tables of the benchmark page about guides for any data.

Each function is a table, as lines of cells divided by ``|``; the header comes first.
"""

from __future__ import annotations

import statistics

from results_text import Row, grouped, load, seconds

__all__ = ["TABLES", "TASKS", "sbibm_row"]

TASKS = (
    "two_moons",
    "gaussian_mixture",
    "slcp",
    "gaussian_linear",
    "gaussian_linear_uniform",
    "bernoulli_glm",
    "sir",
    "lotka_volterra",
)
SIMULATIONS = (1_000, 10_000, 100_000)  # sizes of a training set that the page shows


def sbibm_row(task: str, simulations: int, method: str) -> Row:
    """Returns a method's row at seed 0; empty where it was not run."""
    by_setting = grouped(load("sbibm")["rows"], "task", "simulations", "method", "seed")
    rows = by_setting.get((task, simulations, method, 0), [{}])
    return rows[0]


def sbibm() -> list[str]:
    losses = [f"loss by {simulations:,}" for simulations in SIMULATIONS]
    by_most = "C2ST: guide, **draws**; nsf's | calibrated | CPU s; nsf's"
    lines = [" | ".join(["Task", "exact", *losses, by_most])]
    for task in TASKS:
        ours, nsf = sbibm_row(task, 10_000, "amortize"), sbibm_row(task, 10_000, "nsf")
        exact = "" if ours["exact"] is None else f"{ours['exact']:.2f}"
        guide, draws = ours["c2st"]
        c2st = f"{guide:.2f}, **{draws:.2f}**; {nsf['c2st'][-1]:.2f}"
        calibrated = ", ".join("yes" if passed else "no" for passed in ours["calibrated"])
        times = f"{seconds(ours['seconds'])}; {seconds(nsf['seconds'])}"
        of_size = [_losses(task, simulations) for simulations in SIMULATIONS]
        lines.append(" | ".join([task, exact, *of_size, c2st, calibrated, times]))
    return lines


def _losses(task: str, simulations: int) -> str:
    rows = [sbibm_row(task, simulations, method) for method in ("amortize", "nsf")]
    return "; ".join(f"{row['loss']:.2f}" if row else "not run" for row in rows)


def compilation() -> list[str]:
    lines = ["Inverse | KL to the exact posterior, nats | least that it allows | weights"]
    for name, trees in load("compilation")["tree"]["trees"].items():
        divergence, limit = (
            statistics.fmean(tree[key] for tree in trees) for key in ("kl", "limit")
        )
        weights = trees[0]["parameters"]
        lines.append(
            f"{name.replace('_', ' ')} | {divergence:.4f} | {abs(limit):.3f} | {weights:,}"
        )
    return lines


TABLES = {table.__name__: table for table in (sbibm, compilation)}
