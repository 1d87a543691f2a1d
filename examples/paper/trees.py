"""Figure 6 of the paper: compiled guides of binary trees of Gaussian sites, by the inverse that they are built on.

X_0 ~ N(0, 1) and X_i ~ N(w_i X_parent, 1), depth 5, leaves observed (Webb et al. 2018, section 3.2 and supplement
D.2). Stuhlmueller's heuristic and reverse NaMI, the most compact inverse, have a network for every factor; the fully
connected inverse and forward NaMI have one masked network (MADE, Tree-MADE). All have about as many weights as the
paper's; masked ones do not count, and widths are those that come closest. Adam at 1e-3, a tenth of it from epoch 100;
10 fresh mini-batches of 250 an epoch; bands of 0.75 standard deviations over runs, each with weights w of its own.

Panels: KL(p(z | x) || q(z | x)) on training simulations (a) and others (b), and (c) the negative log-likelihood of
200 samples of the guide for five data sets under the exact posterior. That is shown above the posterior's entropy,
which a perfect guide would show, since the entropy differs between trees far more than the systems do. Dashed lines:
the least KL that each structure allows, exact. The least of a faithful inverse is 0.

Beyond the paper: mean field; reverse NaMI with a shared network, which the paper could not give it; and two more rows
of panels. One is without the direct ("skip") weights from inputs to outputs, which `AutoNaMIGuide` always has, and the
paper for its masked networks alone. The other is a schedule that suits these networks, whose rows move less for the
same step of Adam the wider they are: Adam at 0.01, to zero along half a cosine. Default: 5 runs, and 1
(``--more-seeds``) without skip weights and of the shared reverse guide; ``--paper``: 10 of all.

Run with::

    python examples/paper/trees.py [--smoke | --paper] [--device cpu] [--seeds 5] [--more-seeds 1] [--jobs 2]
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiment import (
    Cell,
    Options,
    Run,
    draw_band,
    mean_and_error,
    parse,
    print_table,
    run_cells,
    write_results,
)
from gaussian_tree import GaussianTree
from tree_training import Networks, Schedule, closest_width, network_of, train

from pyro_nami import BayesNet, Inverse, fully_connected, mean_field, nami, stuhlmueller

BAND = 0.75  # standard deviations
EARLY = 0.1  # nats above its limit at which a system counts as nearly there
TARGETS = {"reverse": 0.01, "forward": 0.02, "heuristic": 0.03, "mean_field": 0.03}


class System(NamedTuple):
    """One of the systems that are compared; ``paper`` says the paper's number of parameters and width."""

    label: str
    inverse: Callable[[BayesNet], Inverse]
    shared: bool
    color: str
    paper: tuple[int, int] | None = None


SYSTEMS = {
    "heuristic": System("heuristic", stuhlmueller, False, "C0", (160_545, 100)),
    "reverse": System(
        "most compact (reverse NaMI)",
        functools.partial(nami, direction="reverse"),
        False,
        "C1",
        (156_021, 97),
    ),
    "fully_connected": System("fully connected", fully_connected, True, "C2", (159_136, 501)),
    "forward": System(
        "forward NaMI", functools.partial(nami, direction="forward"), True, "C3", (159_901, 1210)
    ),
    "mean_field": System("mean field", mean_field, False, "C7"),
    "reverse_shared": System(
        "reverse NaMI, shared network", functools.partial(nami, direction="reverse"), True, "C4"
    ),
}
EXTRA_SIZE = 160_000  # parameters of the systems that the paper lacks
ROWS = {
    "paper": "the paper's schedule",
    "no skip": "the paper's schedule,\nno skip weights",
    "cosine": "cosine from 0.01",
}
# Left out by default: shared networks without skip weights, and the shared reverse guide but with the cosine.
LEFT_OUT = {("reverse_shared", "no skip"), ("forward", "no skip"), ("reverse_shared", "paper")}


def schedules(options: Options) -> dict[str, Schedule]:
    """Returns how guides are trained, by row."""
    smoke = Schedule(3, 2, batch_size=20, batches=2, final=100)
    paper = options.choose(smoke, Schedule(500), Schedule(500))
    cosine = paper._replace(decimated=None, learning_rate=1e-2)
    return {"paper": paper, "no skip": paper, "cosine": cosine}


def run_cell(cell: Cell, run: Run) -> dict[str, Any]:
    """Compiles one system on one tree."""
    tree, system = GaussianTree(cell["depth"], cell["seed"]), SYSTEMS[cell["system"]]
    inverse = system.inverse(network_of(tree))
    networks = Networks(system.shared, cell["width"], cell["row"] != "no skip")
    schedule = schedules(run.options)[cell["row"]]
    return train(tree, inverse, networks, schedule, run, data_seed=1000 + cell["seed"])


def all_cells(options: Options) -> list[Cell]:
    """Returns the cells: every system in every row, the costly ones first; fewer runs of what the paper lacks."""
    depth = options.choose(3, 5, 5)
    more = min(options.extra["more_seeds"] or options.choose(1, 1, 10), options.seeds)
    tree = GaussianTree(depth, 0)
    net = network_of(tree)
    cells: list[Cell] = []
    for row in ROWS:
        for name, system in SYSTEMS.items():
            if (name, row) in LEFT_OUT and options.setting != "paper":
                continue
            size = system.paper[0] if system.paper else EXTRA_SIZE
            skip, width = row != "no skip", 8
            if options.setting != "smoke":
                width = closest_width(
                    tree, system.inverse(net), size, shared=system.shared, skip=skip
                ).width
            beyond = row == "no skip" or name == "reverse_shared"
            for seed in range(more if beyond else options.seeds):
                cells.append(
                    {"system": name, "row": row, "seed": seed, "depth": depth, "width": width}
                )
    return sorted(
        cells, key=lambda cell: (not SYSTEMS[cell["system"]].shared, list(ROWS).index(cell["row"]))
    )


# ---- what was found

Runs = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


def gaps(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns how far every run ended above its structure's limit, in nats."""
    return [run["kl"] - run["limit"] for run in runs]


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns means and standard errors over runs."""
    early = [
        next((i + 1 for i, kl in enumerate(run["train_kl"]) if kl < run["limit"] + EARLY), None)
        for run in runs
    ]
    excess = [run["nll"][-1] - run["entropy"] for run in runs]
    return {
        "runs": len(runs),
        "kl": mean_and_error([run["kl"] for run in runs]),
        "limit": mean_and_error([run["limit"] for run in runs]),
        "gap": mean_and_error(gaps(runs)),
        "nll_above_entropy": mean_and_error(excess),
        "nll_sd_over_runs": statistics.stdev(excess) if len(runs) > 1 else None,
        "epochs_to_0.1": None if None in early else statistics.mean(map(float, early)),  # type: ignore[arg-type]
        "parameters": runs[0]["parameters"],
        "width": runs[0]["width"],
        "edges": runs[0]["edges"],
        "cpu_minutes_a_run": statistics.mean(run["cpu_seconds"] for run in runs) / 60,
    }


def difference(runs: Runs, row: str, worse: str, better: str) -> tuple[float, float | None]:
    """Returns mean and standard error of how much higher the KL of ``worse`` is, over the trees that both have."""
    return mean_and_error([a["kl"] - b["kl"] for a, b in zip(runs[worse, row], runs[better, row])])


def claims(runs: Runs) -> list[dict[str, Any]]:
    """Returns the paper's claims and the issue's targets, with what was found."""
    return [each for row in ("paper", "cosine") for each in claims_of(runs, row)] + claims_of_paper(
        runs
    )


def claims_of(runs: Runs, row: str) -> list[dict[str, Any]]:
    """Returns the claims on where the systems of a row end."""
    found = []
    words = {"paper": "with the paper's schedule", "cosine": "with the cosine"}[row]
    for name, target in TARGETS.items():
        mean, error = mean_and_error(gaps(runs[name, row]))
        other = mean_and_error(gaps(runs[name, "cosine" if row == "paper" else "paper"]))[0]
        text = (
            f"{words}, {SYSTEMS[name].label} ends at most {target} nats above its structure's limit"
        )
        if name in ("reverse", "forward"):
            said = "a faithful inverse recovers the posterior"
        else:
            said = "an inverse that is not faithful cannot recover the posterior"
        why = f"it ends {mean:.4f} above; with the other schedule {other:.4f}"
        if other <= target:
            why += ", so that the schedule is what it lacks"
        found.append(
            claim(
                text,
                said,
                {"gap": [mean, error], "runs": len(runs[name, row]), "other_schedule": other},
                mean <= target,
                why,
            )
        )
    for name in ("reverse", "forward"):
        more = difference(runs, row, "fully_connected", name)
        text = f"{words}, fully connected ends worse than {SYSTEMS[name].label}"
        why = f"it ends {-more[0]:.4f} nats better"
        found.append(claim(text, "yes, on average", {"kl_difference": more}, more[0] > 0, why))
    if ("reverse_shared", row) in runs:
        more = difference(runs, row, "reverse", "reverse_shared")
        text = f"{words}, reverse NaMI ends better with a shared network than with separate ones of the same size"
        why = f"the shared network ends {-more[0]:.4f} nats worse"
        found.append(claim(text, "not possible there", {"kl_difference": more}, more[0] > 0, why))
    more = difference(runs, row, "reverse", "forward")
    text = (
        f"{words}, forward NaMI (shared network) ends better than reverse NaMI (separate networks)"
    )
    why = f"reverse ends {-more[0]:.4f} nats better"
    said = "yes; perhaps since the reverse could not share weights"
    found.append(claim(text, said, {"kl_difference": more}, more[0] > 0, why))
    return found


def claims_of_paper(runs: Runs) -> list[dict[str, Any]]:
    """Returns the claims on the paper's schedule alone."""
    found = []
    faithful = ("reverse", "forward", "fully_connected")
    epochs = {name: summary(runs[name, "paper"])["epochs_to_0.1"] for name in faithful}
    reached = [math.inf if value is None else value for value in epochs.values()]
    text = "convergence is faster with fewer edges: reverse, then forward, then fully connected"
    why = (
        ", ".join(f"{name} {value}" for name, value in epochs.items()) + f" epochs to {EARLY} nats"
    )
    holds = reached[0] < reached[1] <= reached[2]
    found.append(claim(text, "yes", {"epochs_to_0.1": epochs}, holds, why))
    spread = {
        name: summary(runs[name, "paper"])["nll_sd_over_runs"] for name in (*faithful, "heuristic")
    }
    if None not in spread.values():
        holds = max(spread[name] for name in faithful) < spread["heuristic"]
        text = "samples of faithful inverses vary less between runs than the heuristic's"
        why = ", ".join(f"{name} {value:.2f}" for name, value in spread.items()) + " nats"
        found.append(claim(text, "yes, significantly", {"nll_sd_over_runs": spread}, holds, why))
    sizes = {
        name: [runs[name, "paper"][0]["parameters"], system.paper[0]]
        for name, system in SYSTEMS.items()
        if system.paper
    }
    off = max(abs(ours / theirs - 1) for ours, theirs in sizes.values())
    text = "as many weights as the paper's, within 1%"
    said = ", ".join(f"{theirs:,}" for _, theirs in sizes.values())
    found.append(claim(text, said, {"parameters": sizes}, off <= 0.01, f"off by {off:.1%}"))
    return found


def claim(text: str, paper: str, ours: Any, holds: bool, why: str) -> dict[str, Any]:
    """Returns a claim; ``why`` only where it does not hold."""
    return {
        "claim": text,
        "paper": paper,
        "ours": ours,
        "holds": holds,
        **({} if holds else {"why": why}),
    }


# ---- the figure


def draw(runs: Runs, options: Options, file: Path) -> None:
    """Draws the three panels, in three rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(3, 3, figsize=(13, 10.5), sharey="col")
    for panels, (row, words) in zip(rows, ROWS.items()):
        epochs = range(1, schedules(options)[row].epochs + 1)
        for name, system in SYSTEMS.items():
            if (name, row) not in runs:
                continue
            mine = runs[name, row]
            style = {"sds": BAND, "color": system.color, "lw": 1.2}
            for axes, key in zip(panels, ("train_kl", "test_kl")):
                draw_band(axes, epochs, [smooth(run[key]) for run in mine], system.label, **style)
                if name in ("heuristic", "mean_field"):
                    limit = statistics.mean(run["limit"] for run in mine)
                    axes.axhline(limit, color=system.color, ls="--", lw=1)
            excess = [[nll - run["entropy"] for nll in run["nll"]] for run in mine]
            draw_band(panels[2], mine[0]["nll_epochs"], excess, system.label, **style)
        for axes in panels[:2]:
            axes.set_yscale("log")
            axes.set_ylim(1e-3, 50)
        panels[0].set_ylabel(f"{words}\n\nKL(p(z|x) || q(z|x)), nats")
        panels[2].axhline(0, color="k", ls="--", lw=1)
        panels[2].set_yscale("symlog", linthresh=0.5)
        panels[2].set_ylabel("NLL of samples $-$ posterior entropy, nats")
    for axes, title in zip(
        rows[0], ("(a) training simulations", "(b) test simulations", "(c) samples, 5 data sets")
    ):
        axes.set_title(title)
    for axes in rows[2]:
        axes.set_xlabel("epochs")
    drawn = {
        label: handle for row in rows for handle, label in zip(*row[0].get_legend_handles_labels())
    }
    figure.legend(drawn.values(), drawn.keys(), loc="lower center", ncol=6, frameon=False)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(file, dpi=130)


def smooth(curve: Sequence[float], width: int = 5) -> list[float]:
    """Returns running means over epochs, floored so that a log scale can show them."""
    means = [statistics.mean(curve[max(0, i - width + 1) : i + 1]) for i in range(len(curve))]
    return [max(mean, 1e-3) for mean in means]


def table(summaries: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    """Prints what every system reached beside the paper's sizes."""
    header = ["system", "runs", "KL (se)", "above limit (se)", "limit", "NLL - H"]
    header += ["weights", "paper", "width", "paper", "CPU min"]
    for row, words in ROWS.items():
        lines = []
        for name, system in SYSTEMS.items():
            if (name, row) not in summaries:
                continue
            found = summaries[name, row]
            errors = [
                f"{m:.4f} ({'-' if e is None else f'{e:.4f}'})"
                for m, e in (found["kl"], found["gap"])
            ]
            size, width = (f"{value:,}" for value in system.paper) if system.paper else "--"
            limit, excess = f"{found['limit'][0]:.3f}", f"{found['nll_above_entropy'][0]:.3f}"
            ours = [
                f"{found['parameters']:,}",
                size,
                found["width"],
                width,
                f"{found['cpu_minutes_a_run']:.1f}",
            ]
            lines.append([system.label, found["runs"], *errors, limit, excess, *ours])
        print(f"\n{words.replace(chr(10), ' ')}:", end="")
        print_table(header, lines)


def more_seeds(parser: argparse.ArgumentParser) -> None:
    """Adds the script's own option."""
    parser.add_argument(
        "--more-seeds",
        type=int,
        help="runs without skip weights, and of the shared reverse guide (1, 1, 10)",
    )


def main() -> None:
    """Runs what is missing; prints, draws and writes what was found."""
    options = parse(__doc__, (1, 5, 10), more_seeds)
    cells = all_cells(options)
    plans = {row: schedule._asdict() for row, schedule in schedules(options).items()}
    settings = {"schedules": plans, "device": options.device}
    results = run_cells("trees", run_cell, cells, settings, options)
    runs: dict[tuple[str, str], list[Any]] = {}
    for cell, result in zip(cells, results):
        runs.setdefault((cell["system"], cell["row"]), []).append({"seed": cell["seed"], **result})
    summaries = {key: summary(mine) for key, mine in runs.items()}
    table(summaries)
    made = claims(runs)
    payload = {
        "settings": {**settings, "depth": cells[0]["depth"], "band_sds": BAND},
        "summaries": {f"{name}, {row}": found for (name, row), found in summaries.items()},
        "claims": made,
        "runs": {f"{name}, {row}": mine for (name, row), mine in runs.items()},
    }
    draw(runs, options, write_results("trees", payload, options))


if __name__ == "__main__":
    main()
