"""Draws of a guide for simulated data sets, and the ranks of true values among them."""

from __future__ import annotations

__all__ = ["below", "density_ranks", "guide_draws", "ranks_among"]

import torch
from torch import Tensor

from pyro_nami.inference.simulate import JointDraws
from pyro_nami.inference.site_messages import Sites, Values
from pyro_nami.inference.target import Extent, Target


def guide_draws(sites: Sites, num_draws: int, truth: JointDraws) -> Values:
    """Returns draws of the latents that the guide has, ``(num_draws, data sets, *plates, *event)``."""
    draws = {}
    for name, true in truth.latents.items():
        if name in sites:
            value, shape = sites[name]["value"], (num_draws, *true.shape)
            try:
                draws[name] = value.expand(shape)
            except RuntimeError:
                raise ValueError(
                    f"Expected draws of '{name}' of shape {shape} from the guide, under plates for draws and data sets "
                    f"in front of the model's own; got {tuple(value.shape)}."
                ) from None
    if not draws:
        raise ValueError(
            f"Expected a guide that draws latents of the model, {list(truth.latents)}; it has none of them."
        )
    return draws


def ranks_among(draws: Tensor, truth: Tensor, name: str) -> Tensor:
    """Returns the number of draws ``(num_draws, *shape)`` below the true values ``shape``, ties broken at random."""
    if draws.isnan().any() or truth.isnan().any():
        raise ValueError(
            f"Expected draws and densities without NaN from the guide; got some at '{name}'."
        )
    ties = (draws == truth).sum(0)
    chance = torch.rand(ties.shape, device=ties.device, dtype=torch.float64)
    return (draws < truth).sum(0) + (chance * (ties + 1)).long()


def density_ranks(
    target: Target, extent: Extent, draws: Values, truth: JointDraws, name: str
) -> Tensor:
    """Returns the number of draws of a guide of higher density than the true latents, ``(data sets,)``."""
    drawn = -target.guide_log_prob(extent, draws)
    return ranks_among(drawn, -target.guide_log_prob(extent, truth.latents), name)


def below(ranks: Tensor, level: float, num_draws: int) -> Tensor:
    """Returns the part of each rank's cell that lies below a level, so that shares are unbiased at every level."""
    return (level * (num_draws + 1) - ranks).clamp(0, 1)
