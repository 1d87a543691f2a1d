"""Runs of a model for many draws at once, and whether they do what a run of each draw alone does.

A batched run stands in outer plates, left of the model's own. Simulation, importance sampling and annealing check
their first one by `differing_site`. Change this module when runs are to be batched, or compared, in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nami.inference.sites import check_full_plates
from pyro_nami.reading.runner import Runner, own_dims

__all__ = ["differing_site", "in_one_line", "outer_plates", "run_in_plates"]

_NAMES = ("_draws", "_data_sets")
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of log densities; half precision: the loosest below


def outer_plates(sizes: tuple[int, ...], nesting: int) -> tuple[pyro.plate, ...]:
    """Returns plates of draws, and of data sets, left of a model's ``nesting`` plate dims."""
    first = -nesting - len(sizes)
    with poutine.block(), own_dims():
        return tuple(pyro.plate(_NAMES[i], size, dim=first + i) for i, size in enumerate(sizes))


def run_in_plates(
    runner: Runner, fn: Callable, args: tuple, kwargs: Mapping[str, Any], plates: tuple[pyro.plate, ...] = ()
) -> dict[str, Any]:
    """Runs a model or a guide in outer plates; returns its sites with densities, as messages.

    Raises:
        NotImplementedError: a plate with random subsampling.
    """

    def in_plates(*args: Any, **kwargs: Any) -> None:
        with ExitStack() as stack:
            for plate in plates:
                stack.enter_context(plate)
            fn(*args, **kwargs)

    sites = runner.run(in_plates, args, kwargs)
    check_full_plates(sites)
    return {name: site for name, site in sites.items() if not site_is_subsample(site)}


def differing_site(
    together: Mapping[str, Tensor], index: int | tuple[int, ...], alone: Mapping[str, Tensor]
) -> str | None:
    """Returns the first site whose log densities in a batched run are not those in a run of one draw; None if none is.

    Args:
        together: site -> log densities in the batched run, ``(*batch, *plates)``.
        index: of the draw in the batch.
        alone: site -> log densities in its own run, ``(*plates)``.
    """
    for name in {**together, **alone}:
        if name not in together or name not in alone:
            return name
        here, there = together[name][index], alone[name]
        tolerance = max(_TOLERANCE.get(x.dtype, 1e-2) for x in (here, there))
        if here.numel() != there.numel() or not torch.allclose(
            here, there.reshape(here.shape).to(here), rtol=tolerance, atol=tolerance, equal_nan=True
        ):
            return name
    return None


def in_one_line(error: Exception) -> str:
    """Returns what a warning tells of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}"
