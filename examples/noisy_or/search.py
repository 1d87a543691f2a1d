"""Options of these scripts, and random search before the runs that are reported.

Cells, tables and how results are kept are those of the paper's experiments, ``../paper/experiment.py``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "paper"))

from experiment import (  # noqa: E402
    Cell,
    Options,
    Run,
    Task,
    draw_band,
    mean_and_error,
    parse,
    print_table,
    run_cells,
    write_results,
)

__all__ = [
    "Cell",
    "Options",
    "Run",
    "draw_band",
    "mean_and_error",
    "parse_options",
    "print_table",
    "pyplot",
    "run_cells",
    "searched",
    "shown",
    "write_results",
]

# seed of the points and of the training in the search; reported runs have 0, 1, ...
SEARCHED = 1000


def parse_options(
    doc: str | None, steps: int, extra: Callable[[argparse.ArgumentParser], None] | None = None
) -> Options:
    """Reads the options; ``extra["steps"]`` and ``extra["search"]`` are numbers of steps and of settings tried."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--steps", type=int, help=f"of each training (3, {steps}, {steps})")
        parser.add_argument(
            "--search", type=int, help="settings that are tried (1, 10, 100); on a GPU 100"
        )
        if extra is not None:
            extra(parser)

    options = parse(doc, (1, 5, 5), add, HERE)
    tried = options.choose(1, 10 if options.device == "cpu" else 100, 100)
    given = {"steps": options.choose(3, steps, steps), "search": tried}
    given |= {name: value for name, value in options.extra.items() if value is not None}
    for name in ("steps", "search"):
        if given[name] < 1:
            sys.exit(f"Expected --{name} of at least 1; got {given[name]}.")
    return options._replace(extra={**options.extra, **given})


def searched(
    name: str,
    task: Task,
    conditions: Sequence[Cell],
    settings: Mapping[str, Any],
    options: Options,
    *,
    at: Callable[[Cell], Cell] = lambda condition: condition,
) -> list[list[dict[str, Any]]]:
    """Returns results by condition and seed, each condition with the setting that is best for it in a search.

    Of one setting there is nothing to search for: ``extra["only"]``, where that is given.

    Args:
        task: returns a mapping of measures for a cell: a condition, the number of a ``setting``, and a ``seed``. Where
            a setting is but tried (``cell["search"]``), it has ``"valid"``, a loss on points that are neither trained
            on nor reported. It is run in other processes, as in `run_cells`.
        at: the condition at which the search for a condition is made.
    """
    places = [dict(at(condition)) for condition in conditions]
    different = [place for i, place in enumerate(places) if place not in places[:i]]
    only = options.extra.get("only")
    tries = range(options.extra["search"]) if only is None else [only]
    settings = {**settings, "steps": options.extra["steps"]}
    losses = torch.zeros(len(different), 1)
    if len(tries) > 1:
        cells = [
            {**place, "setting": i, "seed": SEARCHED, "search": True}
            for place in different
            for i in tries
        ]
        found = run_cells(f"{name}, search", task, cells, settings, options)
        losses = torch.tensor([each["valid"] for each in found]).view(len(different), -1)
    best = losses.nan_to_num(torch.inf).argmin(-1).tolist()
    chosen = [tries[best[different.index(place)]] for place in places]
    final = [
        {**condition, "setting": i, "seed": seed, "search": False}
        for condition, i in zip(conditions, chosen)
        for seed in range(options.seeds)
    ]
    results = [
        {"setting": cell["setting"], **measured}
        for cell, measured in zip(final, run_cells(name, task, final, settings, options))
    ]
    return [results[i : i + options.seeds] for i in range(0, len(results), options.seeds)]


def shown(values: Sequence[float]) -> str:
    """Returns the mean of runs and its standard error as text."""
    mean, error = mean_and_error(values)
    return f"{mean:.2f}" + (f" +- {error:.2f}" if error is not None else "")


def pyplot() -> Any:
    """matplotlib.pyplot for files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
