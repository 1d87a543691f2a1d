"""Conversion between the guide's batch dims and the shapes that users see.

Inside the guide every tensor has its batch dims to the left of all plate dims; outside, a site has
only its own plate dims.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_nami.guide.plan import Plan

__all__ = ["left_of_plates", "own_shape", "quantiles_of", "resized_plates", "sum_plates"]


def left_of_plates(
    latents: Mapping[str, Tensor], plan: Plan, known: Collection[str]
) -> dict[str, Tensor]:
    """Returns every latent's value with batch dims left of the plate dims; see `AutoNaMIGuide.log_prob`."""
    nesting = plan.plates.nesting
    wanted = [name for name in plan.rules if name not in known and name in plan.bayesnet.sites]
    for name in wanted:
        if name not in latents:
            raise ValueError(f"Expected a value for every latent, {wanted}; got none for '{name}'.")
    own_dims = {
        name: {plan.plates.dims[plate] for plate in plan.sites[name].plates} for name in wanted
    }

    def fits(name: str) -> bool:
        value = latents[name]
        batch = value.shape[: value.dim() - plan.sites[name].event_dim]
        return all(
            batch[dim] == 1
            for dim in range(-min(len(batch), nesting), 0)
            if dim not in own_dims[name]
        )

    if all(map(fits, wanted)):
        return {name: latents[name] for name in wanted}
    values = {}
    for name in wanted:
        value, depth = latents[name], -min(own_dims[name], default=0)
        cut = value.dim() - plan.sites[name].event_dim - depth
        if cut != 1:
            raise ValueError(
                f"Expected latent '{name}' of shape (*batch, *plates, *event), batch dims left of {nesting} "
                f"plate dims, or with one batch dim in front of its own shape; got {tuple(value.shape)}."
            )
        values[name] = value.reshape(value.shape[:1] + (1,) * (nesting - depth) + value.shape[1:])
    return values


def sum_plates(log_prob: Tensor, nesting: int) -> Tensor:
    """Sums over the plate dims, the rightmost ``nesting``."""
    if nesting == 0:
        return log_prob
    log_prob = log_prob[(None,) * max(0, nesting - log_prob.dim())]
    return log_prob.sum(tuple(range(-nesting, 0)))


def own_shape(value: Tensor, count: int, site: Mapping[str, Any]) -> Tensor:
    """Returns draws ``(count, *site shape)`` from values with the draws left of all plate dims."""
    event_dim = site["fn"].event_dim
    nesting = max((-frame.dim for frame in site["cond_indep_stack"] if frame.vectorized), default=0)
    cut = value.dim() - event_dim - nesting
    return value.expand((count,) + value.shape[1:]).reshape((count,) + value.shape[cut:])


def quantiles_of(value: Tensor, quantiles: Sequence[float]) -> Tensor:
    ordered = value.sort(0).values
    last = len(ordered) - 1
    return torch.stack([ordered[min(last, max(0, math.floor(q * last + 0.5)))] for q in quantiles])


def resized_plates(value: Tensor, frames: Iterable[Any], event_dim: int) -> dict[str, int]:
    """Returns the plates of a site, with their sizes now, in which ``value`` has another size."""
    batch = value.shape[: value.dim() - event_dim]
    return {
        frame.name: frame.size
        for frame in frames
        if len(batch) >= -frame.dim and batch[frame.dim] != frame.size
    }
