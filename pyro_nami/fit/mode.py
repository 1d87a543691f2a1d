"""The posterior mode, by a search that begins at the likeliest draw."""

from __future__ import annotations

from collections.abc import Mapping

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
        UserWarning: no mode was found, as where the density of a group's scale rises without bound.
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
    heights = [-torch.inf]

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -height()
        value.backward()
        return value

    with torch.enable_grad():
        for _ in range(MOST_STEPS // optimizer.defaults["max_iter"]):
            heights.append(-float(optimizer.step(loss)))
            if abs(heights[-1] - heights[-2]) < LEAST_GAIN:
                break
        else:
            warn(
                "No mode of the posterior was found: its density still rises after "
                f"{MOST_STEPS} steps. Means and quantiles have no such trouble."
            )
    with torch.no_grad():
        values = path.at(position).values
    return {name: values[name].reshape(draw[name].shape).to(draw[name]) for name in draw}
