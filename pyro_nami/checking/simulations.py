"""The simulated data sets that checks compare a guide, or real data, with."""

from __future__ import annotations

__all__ = ["finite_draws", "seeded"]

from collections.abc import Iterator
from contextlib import contextmanager

import pyro
import torch
from pyro import poutine

from pyro_nami.inference.simulate import JointDraws, Simulator
from pyro_nami.messages import warn
from pyro_nami.program.isolation import forked_rng

# share of simulations that may be NaN or infinite: those with finite data keep their posterior
_TOLERATED = 0.95


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Hides what is run from handlers and gradients, on random numbers of its own: the state outside stays."""
    with forked_rng(), torch.no_grad(), poutine.block():
        if seed is not None:
            pyro.set_rng_seed(seed)
        yield


def finite_draws(simulator: Simulator, num: int) -> tuple[JointDraws, int]:
    """Returns joint draws without those that hold NaN or infinite values, and how many had some; warns of them.

    Raises:
        ValueError: for more than 95% of them, naming the first site that has them.
    """
    kept, bad = simulator.draw(num).finite()
    skipped = num - kept.num
    if bad:
        share = f"{skipped} of {num} simulations with NaN or infinite values, first at site '{next(iter(bad))}'"
        if skipped > _TOLERATED * num:
            raise ValueError(f"Expected a model whose simulations are finite; got {share}.")
        warn(f"Left out {share}.")
    return kept, skipped
