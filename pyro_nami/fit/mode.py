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


def highest(
    target: Target, draw: Mapping[str, Tensor], *, rounds: int = 10, least_gain: float = 1e-2
) -> dict[str, Tensor]:
    """Returns the values of the latents at the mode of their density, uphill from a draw.

    The density is that of the values themselves, not of their unconstrained coordinates.

    Args:
        target: the model and its data.
        draw: latent -> value, where the search begins.
        rounds: of 20 steps of L-BFGS each, at most; smooth posteriors take one or two.
        least_gain: nats; a round that gains less has found a mode.

    Raises:
        NotImplementedError: latents that are discrete, or that no bijection is known for.

    Warns:
        UserWarning: no mode was found, as where the density of a group's scale rises without bound; the draw is
            returned.
    """
    given, row = {name: value[None] for name, value in draw.items()}, slice(0, 1)
    path, position = Start.of(target, {}, given).checked(1, row).path(1, row)
    position = position.double().requires_grad_()
    optimizer = torch.optim.LBFGS([position], max_iter=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        point = path.at(position)
        value = -sum((*point.prior.values(), *point.likelihood.values())).sum()  # type: ignore[union-attr]
        value.backward()  # type: ignore[no-untyped-call]
        return value

    before, is_found = math.inf, False
    # a search that leaves the support of a distribution ends at a loss that is not finite
    with torch.enable_grad(), pyro.validation_enabled(False):
        for _ in range(rounds):
            now = float(optimizer.step(loss).detach())  # the loss before the round
            is_found = abs(before - now) < least_gain
            if is_found or not math.isfinite(now):
                break
            before = now
    if not is_found:
        warn(
            "No mode of the posterior was found: its density rises without bound, or for too many steps. The draw of "
            "the highest density is returned in its place. Means and quantiles are not affected."
        )
        return dict(draw)
    with torch.no_grad():
        values = path.at(position.detach()).values
    return {name: values[name].reshape(value.shape).to(value) for name, value in draw.items()}
