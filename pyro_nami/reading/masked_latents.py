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

from pyro_nami.program.masks import log_density_of, own_mask, unmasked
from pyro_nami.program.runner import RunModel
from pyro_nami.program.site_values import redraw
from pyro_nami.reading.site_records import same

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
            runs = [
                _densities(run({**values, name: value}), without=name)
                for value in (values[name], other)
            ]
            if not same(*runs):
                found.add(name)
    return frozenset(found)


def _moved(site: Mapping[str, Any], mask: Tensor) -> Tensor:
    """Returns a latent's value with another in every instance that is masked."""
    other = redraw(unmasked(site["fn"]), site["value"])
    return torch.where(mask.reshape(mask.shape + (1,) * site["fn"].event_dim), site["value"], other)


def _densities(sites: Mapping[str, Any], without: str) -> list[Tensor]:
    others = [
        site for name, site in sites.items() if name != without and not site_is_subsample(site)
    ]
    return [log_density_of(site) for site in others]
