"""Where a model masks a site's density, its log density as far as it counts, and what reads a latent that is masked.

A latent that is masked and that nothing else reads says nothing there: a guide's density is masked as well, and any
draw will do. Where something reads it, its prior is flat instead. Change this module when masks come in another way.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pyro
import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nami.factors.wrappers import layers, without
from pyro_nami.reading.changes import same
from pyro_nami.reading.draws import redraw
from pyro_nami.reading.runner import RunModel

__all__ = ["is_masked_within", "log_density_of", "own_mask", "read_where_masked", "unmasked", "without_gaps"]


def own_mask(site: Mapping[str, Any]) -> Tensor | None:
    """Returns where the density of a site's message counts, by handlers and by its distribution; None: everywhere.

    A mask broadcasts with ``(*batch, *plates)``.

    Example:
        >>> site = {"fn": pyro.distributions.Normal(0.0, 1.0).mask(torch.tensor([True, False])), "mask": None}
        >>> own_mask(site)
        tensor([ True, False])
    """
    outer = itertools.takewhile(lambda layer: isinstance(layer, MaskedDistribution), layers(site["fn"]))
    masks = [site["mask"], *(layer._mask for layer in outer)]
    found = [torch.as_tensor(mask) for mask in masks if mask is not None and mask is not True]
    return functools.reduce(torch.logical_and, found) if found else None


def unmasked(fn: Any) -> Any:
    """Returns a distribution without masks of its batch."""
    return without(fn, MaskedDistribution)


def is_masked_within(fn: Any) -> bool:
    """Whether a distribution masks elements of an event by themselves."""
    return any(isinstance(layer, MaskedDistribution) for layer in layers(unmasked(fn)))


def log_density_of(site: Mapping[str, Any], log_prob_of: Callable[[Any, Tensor], Tensor] | None = None) -> Tensor:
    """Returns a site's log density, or what takes its place, as far as its mask counts it, ``(*batch, *plates)``."""
    fn, value, mask = site["fn"], without_gaps(site), site["mask"]
    log_prob = log_prob_of(fn, value) if log_prob_of else fn.log_prob(value)
    return log_prob if mask is None else torch.where(torch.as_tensor(mask), log_prob, torch.zeros_like(log_prob))


def without_gaps(site: Mapping[str, Any]) -> Tensor:
    """Returns a site's value, with any number in place of NaN that a mask hides: a gradient would not be hidden."""
    fn, value = site["fn"], site["value"]
    if site["mask"] is None and not any(isinstance(layer, MaskedDistribution) for layer in layers(fn)):
        return value
    try:
        stand_in = fn.mean.detach().nan_to_num()
    except Exception:  # noqa: BLE001  whatever a distribution raises that has no mean
        stand_in = value.nan_to_num()
    return torch.where(value.isnan(), stand_in, value)


def read_where_masked(nodes: Mapping[str, Any], latents: Collection[str], run: RunModel) -> frozenset[str]:
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
            runs = [_densities(run({**values, name: value}), without=name) for value in (values[name], other)]
            if not same(*runs):
                found.add(name)
    return frozenset(found)


def _moved(site: Mapping[str, Any], mask: Tensor) -> Tensor:
    """Returns a latent's value with another in every instance that is masked."""
    other = redraw(unmasked(site["fn"]), site["value"])
    return torch.where(mask.reshape(mask.shape + (1,) * site["fn"].event_dim), site["value"], other)


def _densities(sites: Mapping[str, Any], without: str) -> list[Tensor]:
    others = [site for name, site in sites.items() if name != without and not site_is_subsample(site)]
    return [log_density_of(site) for site in others]
