"""Simulated data sets, to compare a guide or real data with."""

from __future__ import annotations

__all__ = ["finite_draws", "guide_and_arguments", "seeded"]

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pyro import poutine

from pyro_nami.amortize.posterior import AmortizedPosterior
from pyro_nami.inference.simulate import JointDraws, Simulator
from pyro_nami.messages import warn
from pyro_nami.program.isolation import forked_rng, seed_rng


def guide_and_arguments(
    guide: Callable | AmortizedPosterior, args: tuple, kwargs: dict[str, Any]
) -> tuple[Callable, tuple, dict[str, Any]]:
    """Returns a guide and the model's arguments, by default those of a posterior of `amortize`."""
    if isinstance(guide, AmortizedPosterior):
        return guide.guide, args or guide.args, {**guide.kwargs, **kwargs}
    return guide, args, kwargs


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Runs a block without handlers and gradients, and leaves the random state outside as it was."""
    with forked_rng(), torch.no_grad(), poutine.block():
        if seed is not None:
            seed_rng(seed)
        yield


def finite_draws(simulator: Simulator, num: int, *, most: float = 0.95) -> tuple[JointDraws, int]:
    """Returns joint draws without those that hold NaN or infinite values, and how many had some; warns of them.

    Draws with finite data keep their posterior, however many others there are.

    Raises:
        ValueError: a share of the draws above ``most`` holds such values; names the first site that has them.
    """
    kept, bad = simulator.draw(num).finite()
    skipped = num - kept.num
    if bad:
        share = f"{skipped} of {num} simulations with NaN or infinite values, first at site '{next(iter(bad))}'"
        if skipped > most * num:
            raise ValueError(f"Expected a model whose simulations are finite; got {share}.")
        warn(f"Left out {share}.")
    return kept, skipped
