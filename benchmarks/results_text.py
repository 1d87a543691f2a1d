"""The JSON files under `results/`, and how the tables of the benchmark page write what is in them."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def load(name: str) -> dict[str, Any]:
    """Returns the results of ``benchmarks/NAME.py``."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def grouped(rows: Iterable[Row], *keys: str) -> dict[Any, list[Row]]:
    """Returns rows by their values of `keys`, in the order of the file."""
    groups = defaultdict(list)
    for row in rows:
        values = tuple(row[key] for key in keys)
        groups[values if len(keys) > 1 else values[0]].append(row)
    return groups


def is_within(errors: Iterable[Any]) -> bool:
    """Whether means are off by at most 0.1 reference deviations, and deviations by at most 10%."""
    mean, sd, *_ = errors
    return mean <= 0.1 and sd <= 0.1


def settings_as_good(name: str, key: str = "as_best") -> str:
    """Returns in how many settings that `AutoNormal` trains the guide's ELBO is as good, less two standard errors."""
    judged = [row for row in load(name)["verdicts"] if row[key] is not None]
    return f"{sum(row[key] for row in judged)} of {len(judged)}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}%"


def spread(values: list[float]) -> str:
    """Returns the median, and in brackets the least and the largest."""
    return f"{statistics.median(values):.2g} ({min(values):.2g} to {max(values):.2g})"


def span(values: Iterable[float]) -> str:
    values = list(values)
    return f"{min(values):.2f} to {max(values):.2f}"


def seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def loss(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e4 else f"{value:,.1f}"
