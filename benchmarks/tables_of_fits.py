"""Tables of the benchmark page about one data set: `fit`, and guides in SVI.

Each function is a table, as lines of cells divided by ``|``; the header comes first.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from results_text import (
    Row,
    grouped,
    is_within,
    load,
    loss,
    percent,
    settings_as_good,
    span,
    spread,
)
from tables_of_simulations import TASKS, sbibm_row

__all__ = ["TABLES"]


def summary() -> list[str]:
    """The table of the README: what the package is compared with, one row each."""
    rows = load("fit")["rows"]
    times = sorted(row["stan"]["seconds"] / row["seconds"] for row in rows)
    within = sum(is_within(row["errors"]) for row in rows)
    of_stan = sum(is_within(row["stan"]["errors"]) for row in rows)
    mean = math.exp(statistics.fmean(map(math.log, times)))
    ours = [sbibm_row(task, 10_000, "amortize") for task in TASKS]
    nsf = [sbibm_row(task, 10_000, "nsf") for task in TASKS]
    lower = [theirs["loss"] - own["loss"] for own, theirs in zip(ours, nsf)]
    share = [own["seconds"] / theirs["seconds"] for own, theirs in zip(ours, nsf)]
    return [
        "Against | On | Found | Command",
        f"Stan (NUTS, four chains of 1,000 after 1,000) | 32 posteriors of posteriordb, {len(rows)} fits"
        f" | within 0.1 sd (means) and 10% (sds): {within}, Stan's draws {of_stan}; less CPU time in"
        f" {sum(time > 1 for time in times)}; Stan takes {mean:.1f} times as long in the geometric mean"
        f" ({times[0]:.2f} to {times[-1]:.0f}) | `fit.py --seeds 3 --posteriordb FOLDER`",
        "Pyro's `AutoNormal` and `AutoMultivariateNormal` | Pyro's own examples, rates 0.001, 0.01, 0.05, 300 steps"
        f" | ELBO as good as the better of the two in {settings_as_good('pyro_examples')} settings"
        " | `pyro_examples.py --rates 0.001 0.01 0.05 --steps 300`",
        "the same | the same, 6 CPU seconds a guide"
        f" | as good in {settings_as_good('pyro_examples_seconds')}"
        " | `pyro_examples.py --rates 0.001 0.01 0.05 --cpu-seconds 6`",
        f"sbi (NPE with a neural spline flow) | {len(TASKS)} tasks of sbibm, 10,000 simulations"
        f" | held-out loss {min(lower):.2f} to {max(lower):.1f} nats lower, in {percent(min(share))} to"
        f" {percent(max(share))} of its time; C2ST of draws {span(row['c2st'][-1] for row in ours)}, sbi's"
        f" {span(row['c2st'][-1] for row in nsf)} (0.5 is best) | `sbibm.py`",
    ]


def fit() -> list[str]:
    """By verdict: how many fits, their errors and seconds, and Stan's."""
    rows = load("fit")["rows"]
    lines = [_fits(verdict, of_one) for verdict, of_one in grouped(rows, "verdict").items()]
    header = "Verdict | fits | means off by, sd | sds off by | CPU s | Stan: CPU s | Stan: within 0.1 sd and 10%"
    return [f"{header} | less time than Stan", *lines, _fits("all", rows)]


def _fits(verdict: str, rows: Sequence[Row]) -> str:
    own, stan = [row["seconds"] for row in rows], [row["stan"]["seconds"] for row in rows]
    mean, sd = (max(row["errors"][of] for row in rows) for of in (0, 1))
    within = sum(is_within(row["stan"]["errors"]) for row in rows)
    sooner = sum(other > time for time, other in zip(own, stan))
    errors = f"at most {mean:.2f} | at most {percent(sd)}"
    return (
        f"{verdict} | {len(rows)} | {errors} | {spread(own)} | {spread(stan)} | {within} | {sooner}"
    )


def behind_stan() -> list[str]:
    """The posteriors on which Stan is ahead by most."""
    times = []
    for name, rows in grouped(load("fit")["rows"], "posterior").items():
        own = statistics.fmean(row["seconds"] for row in rows)
        stan = statistics.fmean(row["stan"]["seconds"] for row in rows)
        times.append((own / stan, name.split("-")[-1], f"{own:.2g}", f"{stan:.2g}"))
    _, names, own, stan = zip(*sorted(times, reverse=True)[:6])
    return [
        f"CPU s | {' | '.join(names)}",
        f"`fit` | {' | '.join(own)}",
        f"Stan | {' | '.join(stan)}",
    ]


def posteriordb() -> list[str]:
    results = load("posteriordb")
    rows = results["rows"]
    within = {key: sum(is_within(row[key]) for row in rows) for key in ("first", "last")}
    learned = load("posteriordb_rates")["rows"]
    below = max(gap for row in learned for gap in row["gaps"].values())
    return [
        "Asked | found",
        f"within 0.1 sd and 10% before any step | {within['first']} of {len(rows)}",
        f"after {results['steps']} steps | {within['last']} of {len(rows)}",
        f"CPU s of the first call | {spread([row['first_call'] for row in rows])}",
        f"ELBO after 50 steps at 0.001, 0.01 and 0.05, below that after 300, on the {len(learned)} that learn anything"
        f" | at most {below:.3f} nats",
    ]


def pyro_examples() -> list[str]:
    """The settings in which the guide is behind the better of two of Pyro's, and by how many nats."""
    lines = [
        "Each guide has | as good as `AutoNormal` | as good as the better of both | behind it, by nats"
    ]
    for label, name in (("300 steps", "pyro_examples"), ("6 CPU s", "pyro_examples_seconds")):
        behind = [row for row in load(name)["verdicts"] if row["as_best"] is False]
        told = ", ".join(f"{row['example']} at {row['rate']:g} {_behind(row)}" for row in behind)
        lines.append(
            f"{label} | {settings_as_good(name, 'as_baseline')} | {settings_as_good(name)} | {told}"
        )
    return lines


def _behind(row: Row) -> str:
    nats = -row["over_best"]
    return f"({nats:.1f})" if nats < 1e6 else f"(a breakdown of {row['best']}'s scale)"


def large_models() -> list[str]:
    lines = [
        "Program | `AutoNormal`: loss | `AutoNaMIGuide`: loss | first call, s | ms a step: `AutoNormal`, ours"
    ]
    for program, rows in grouped(load("large_models")["records"], "program").items():
        normal, ours = (grouped(rows, "guide")[guide] for guide in ("AutoNormal", "AutoNaMIGuide"))
        losses = " | ".join(", ".join(loss(row["loss"]) for row in of) for of in (normal, ours))
        first = statistics.median(row["first"] for row in ours)
        steps = ", ".join(
            f"{1e3 * statistics.median(row['step'] for row in of):.0f}" for of in (normal, ours)
        )
        lines.append(f"{program} | {losses} | {first:.1f} | {steps}")
    return lines


def chains() -> list[str]:
    lines = [
        "Loop | first call, CPU s | runs of the model in it | a step, times `AutoNormal`'s | off by, nats"
    ]
    for model, rows in grouped(load("chains")["rows"], "model").items():
        first = ", ".join(f"{row['first_s']:.1f}" for row in rows)
        runs = ", ".join(str(row["runs"]) for row in rows)
        ratios = ", ".join(f"{row['ratio']:.1f}" for row in rows if row["ratio"] is not None)
        gaps = [abs(row["gap"]) for row in rows if row["gap"] is not None]
        off = f"at most {max(gaps):.1g}" if gaps else "no exact value"
        lines.append(
            f"{model} | {first} | {runs} | {ratios or 'none, as states are discrete'} | {off}"
        )
    return lines


def deep_markov() -> list[str]:
    lines = ["Guide | rate | ELBO after 100, 200, 300 steps | ms a step | weights"]
    for row in load("deep_markov")["runs"]:
        elbo = ", ".join(
            f"{float(value):.2f}" for value in row["elbo"] if math.isfinite(float(value))
        )
        lines.append(
            f"{row['guide']} | {row['rate']:g} | {elbo or 'not finite'} | {row['step_ms']:.0f} | {row['weights']:,}"
        )
    return lines


def after_training() -> list[str]:
    lines = ["Model | one after another | all at once | `quantiles`, s"]
    for model, rows in grouped(load("after_training")["records"], "model").items():
        of_use = {row["use"]: row for row in rows}
        one, all_at_once = (of_use[use]["ratio"] for use in ("sequential", "parallel"))
        quantiles = of_use["quantiles"]["seconds"]["AutoNaMIGuide"]
        lines.append(f"{model} | {one:.1f} | {all_at_once:.1f} | {quantiles:.2g}")
    return lines


def stopping() -> list[str]:
    keys = {
        "CPU s": "seconds",
        "ELBO": "elbo",
        "k-hat": "pareto_k",
        "effective share of draws": "effective",
    }
    lines = [f"Model; rounds, RABVI, DADVI | {' | '.join(keys)}"]
    for model, rows in grouped(load("stopping")["rows"], "model").items():
        by_rule = grouped(rows, "rule")
        of_rules = [by_rule[rule] for rule in ("rounds", "rabvi", "dadvi")]
        means = {
            key: [statistics.fmean(row[key] for row in of) for of in of_rules]
            for key in keys.values()
        }
        bounds = (f"{elbo:.1f}" if elbo > -1e6 else "diverged" for elbo in means["elbo"])
        told = (
            ", ".join(f"{time:.0f}" for time in means["seconds"]),
            ", ".join(bounds),
            ", ".join(f"{k:.2f}" for k in means["pareto_k"]),
            ", ".join(percent(share, 1) for share in means["effective"]),
        )
        lines.append(" | ".join([model, *told]))
    return lines


TABLES = {
    table.__name__: table
    for table in (
        summary,
        fit,
        behind_stan,
        posteriordb,
        pyro_examples,
        large_models,
        chains,
        deep_markov,
        after_training,
        stopping,
    )
}
