"""Masks of a site's density, and log densities that respect them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor

from pyro_nami.factors.wrappers import layers, without

__all__ = [
    "is_masked",
    "is_masked_within",
    "log_density_of",
    "own_mask",
    "rounding_of",
    "unmasked",
    "without_gaps",
]


def own_mask(site: Mapping[str, Any]) -> Tensor | None:
    """Returns where the density of a site's message counts, by handlers and by its distribution; None: everywhere.

    A mask broadcasts with ``(*batch, *plates)``.

    Example:
        >>> site = {"fn": dist.Normal(0.0, 1.0).mask(torch.tensor([True, False])), "mask": None}
        >>> own_mask(site)
        tensor([ True, False])
    """
    outer = itertools.takewhile(
        lambda layer: isinstance(layer, MaskedDistribution), layers(site["fn"])
    )
    masks = [site["mask"], *(layer._mask for layer in outer)]
    found = [torch.as_tensor(mask) for mask in masks if mask is not None and mask is not True]
    return functools.reduce(torch.logical_and, found) if found else None


def unmasked(fn: Any) -> Any:
    """Returns a distribution without masks of its batch."""
    return without(fn, MaskedDistribution)


def is_masked_within(fn: Any) -> bool:
    """Whether a distribution masks elements of an event by themselves."""
    return any(isinstance(layer, MaskedDistribution) for layer in layers(unmasked(fn)))


def is_masked(site: Mapping[str, Any]) -> bool:
    """Whether a site's density is masked anywhere, by handlers or by its distribution."""
    masked = (isinstance(layer, MaskedDistribution) for layer in layers(site["fn"]))
    return site["mask"] is not None or any(masked)


def log_density_of(
    site: Mapping[str, Any], log_prob_of: Callable[[Any, Tensor], Tensor] | None = None
) -> Tensor:
    """Returns a site's log density, or what takes its place, as far as its mask counts it, ``(*batch, *plates)``."""
    fn, value, mask = site["fn"], without_gaps(site), site["mask"]
    log_prob = log_prob_of(fn, value) if log_prob_of else fn.log_prob(value)
    return log_prob if mask is None else torch.where(torch.as_tensor(mask), log_prob, 0.0)


def without_gaps(site: Mapping[str, Any]) -> Tensor:
    """Returns a site's value, with any number in place of NaN that a mask hides: a gradient would not be hidden."""
    fn, value = site["fn"], site["value"]
    if not is_masked(site):
        return value
    try:
        stand_in = fn.mean.detach().nan_to_num()
    except Exception:  # noqa: BLE001  whatever a distribution raises that has no mean
        stand_in = value.nan_to_num()
    return torch.where(value.isnan(), stand_in, value)


def rounding_of(site: Mapping[str, Any]) -> Tensor | None:
    """Returns by how many of its deviations rounding moves a Normal site's values; None of another one.

    That is much where data are large beside their noise, as draws from wide priors are.
    """
    fn, value = site["fn"], without_gaps(site).detach()
    if type(fn) is not dist.Normal:
        return None
    return torch.finfo(value.dtype).eps * (value.abs() + fn.loc.detach().abs()) / fn.scale.detach()
