"""The sites of a loop under one name: ``level`` for ``level_0``, ``level_1``, and so on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["draws_of", "sites_by_name"]


def sites_by_name(samples: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Returns name -> sites: those of a loop in the order of its steps, and each other site under its own name.

    Sites are a loop's if their names differ in the number at the end alone, no number is left out, and their values
    have one shape.

    Example:
        >>> sites_by_name(dict.fromkeys(["x_1", "sd", "x_2"], torch.zeros(3)))
        {'x': ['x_1', 'x_2'], 'sd': ['sd']}
    """
    steps: dict[str, dict[int, str]] = {}
    for site in samples:
        if parts := re.fullmatch(r"(.+?)_?(\d+)", site):
            steps.setdefault(parts[1], {})[int(parts[2])] = site
    loops = {}
    for name, numbered in steps.items():
        sites = [numbered[step] for step in sorted(numbered)]
        is_whole = 1 < len(sites) == max(numbered) - min(numbered) + 1
        if is_whole and name not in samples and len({samples[site].shape for site in sites}) == 1:
            loops[name] = sites
    owner = {site: name for name, sites in loops.items() for site in sites}
    return {
        name: loops.get(name, [name]) for name in dict.fromkeys(owner.get(s, s) for s in samples)
    }


def draws_of(
    samples: Mapping[str, Tensor], sites: Sequence[str], name: str, step_dim: int
) -> Tensor:
    """Returns the draws of a site; for the sites of a loop of this name, stacked along a dim of its steps."""
    if name in samples:
        return samples[name]
    return torch.stack([samples[site] for site in sites], step_dim)
