"""Latents whose density the model masks in some instances, though other sites read them there.

A masked latent that no other site reads says nothing: the guide masks its density as well, and any draw will do. A
masked latent that another site reads has a flat prior instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pyro
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nami.program.masks import own_mask, unmasked
from pyro_nami.program.runner import RunModel
from pyro_nami.program.site_values import redraw
from pyro_nami.reading.changes import moved

__all__ = ["read_where_masked"]


def read_where_masked(
    nodes: Mapping[str, Any], latents: Collection[str], run: RunModel
) -> frozenset[str]:
    """Returns the latents whose values some other site's density moves with where the model masks their own.

    Args:
        nodes: the sites of a run of the model.
        latents: those that the model draws.
        run: runs the model with values at its latents.
    """
    found, values = set(), {name: nodes[name]["value"] for name in latents}
    masks = {name: own_mask(nodes[name]) for name in latents}
    with torch.no_grad(), pyro.validation_enabled(False):
        for name, mask in masks.items():
            if mask is None or bool(mask.all()):
                continue
            other = _moved(nodes[name], mask)
            before, after = (run({**values, name: value}) for value in (values[name], other))
            others = [u for u in before if u != name and not site_is_subsample(before[u])]
            if any(_counts(before[u], after.get(u)) for u in others):
                found.add(name)
    return frozenset(found)


def _moved(site: Mapping[str, Any], mask: Tensor) -> Tensor:
    """Returns a latent's value with another in every instance that is masked."""
    other = redraw(unmasked(site["fn"]), site["value"])
    return torch.where(mask.reshape(mask.shape + (1,) * site["fn"].event_dim), site["value"], other)


def _counts(before: Mapping[str, Any], after: Mapping[str, Any] | None) -> bool:
    """Whether a site differs between two runs in an instance that its mask does not hide."""
    rows, mask = moved(before, after, density_only=True), own_mask(before)
    return bool((rows if mask is None else rows & mask).any())
