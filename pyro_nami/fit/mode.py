"""The posterior mode, by a search that begins at the likeliest draw."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pyro
import torch
from torch import Tensor

from pyro_nami.annealing.tempering import Start
from pyro_nami.inference.target import Target
from pyro_nami.messages import warn

__all__ = ["highest"]

MOST_STEPS = 200  # of a search by L-BFGS; smooth posteriors take tens
LEAST_GAIN = 1e-2  # nats that the last steps may still gain at a mode


def highest(target: Target, draw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the values of the latents at the mode of their density, uphill from a draw.

    The density is that of the values themselves, not of their unconstrained coordinates.

    Raises:
        NotImplementedError: latents that are discrete, or that no bijection is known for.

    Warns:
        UserWarning: no mode was found, as where the density of a group's scale rises without bound; the draw is
            returned.
    """
    given = {name: value[None] for name, value in draw.items()}
    start = Start.of(target, {}, given).checked(1, slice(0, 1))
    path, position = start.path(1, slice(0, 1))
    position = position.double().requires_grad_()

    def height() -> Tensor:
        point = path.at(position)
        total: Tensor = sum((*point.prior.values(), *point.likelihood.values()))  # type: ignore[assignment]
        return total.sum()

    optimizer = torch.optim.LBFGS([position], line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -height()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    before, is_found = math.inf, False
    # a search that leaves the support of a distribution is told by its height
    with torch.enable_grad(), pyro.validation_enabled(False):
        for _ in range(MOST_STEPS // optimizer.defaults["max_iter"]):
            now = float(optimizer.step(loss).detach())  # at its beginning
            is_found = abs(before - now) < LEAST_GAIN
            if is_found or not math.isfinite(now):
                break
            before = now
    if not is_found:
        warn(
            "No mode of the posterior was found: its density rises without bound, or for too long, so that the "
            "likeliest draw stands for it. Means and quantiles have no such trouble."
        )
        return dict(draw)
    with torch.no_grad():
        values = path.at(position).values
    return {name: values[name].reshape(draw[name].shape).detach().to(draw[name]) for name in draw}
