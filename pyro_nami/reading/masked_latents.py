"""Latents whose density the model masks in some instances, though other sites read them there.

A masked latent that no other site reads says nothing: the guide masks its density as well, and any draw will do. A
masked latent that another site reads has a flat prior instead.
"""

from __future__ import annotations

from collections.abc import Collection

import pyro
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nami.program.masks import own_mask, unmasked
from pyro_nami.program.plate_dims import spread
from pyro_nami.program.runner import Message, RunModel, Sites
from pyro_nami.program.site_values import redraw
from pyro_nami.reading.changes import moved

__all__ = ["read_where_masked"]


def read_where_masked(nodes: Sites, latents: Collection[str], run: RunModel) -> frozenset[str]:
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
            for u, site in before.items():
                if u != name and not site_is_subsample(site) and _counts(site, after.get(u)):
                    found.add(name)
    return frozenset(found)


def _moved(site: Message, mask: Tensor) -> Tensor:
    """Returns a latent's value, with another one in every instance that is masked."""
    fn, value = site["fn"], site["value"]
    other = redraw(unmasked(fn), value)
    return torch.where(spread(mask, -1 - fn.event_dim), value, other)


def _counts(before: Message, after: Message | None) -> bool:
    """Whether a site differs between two runs in an instance that its mask does not hide."""
    rows, mask = moved(before, after, density_only=True), own_mask(before)
    return bool((rows if mask is None else rows & mask).any())
