"""Masks of a site's density, and log densities that respect them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor

from pyro_nami.factors.wrappers import layers, without
from pyro_nami.program.plate_dims import spread
from pyro_nami.program.runner import Message

__all__ = [
    "density_rounding",
    "element_mask",
    "is_masked",
    "is_masked_within",
    "log_density_of",
    "own_mask",
    "rounding_of",
    "unmasked",
    "without_gaps",
]


def own_mask(site: Message) -> Tensor | None:
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
    return _where_all_hold([(site["mask"], 0), *((layer._mask, 0) for layer in outer)])


def element_mask(site: Message) -> Tensor | None:
    """Returns which elements of a site count, ``(*batch, *plates, *event)``, each dim of 1 or whole; None: all."""
    fn = site["fn"]
    own = ((layer._mask, layer.event_dim) for layer in _masked_layers(fn))
    return _where_all_hold([(site["mask"], fn.event_dim), *own])


def _where_all_hold(masks: Iterable[tuple[Any, int]]) -> Tensor | None:
    """Returns where all masks hold; None: everywhere. Each is given with the number of event dims that it lacks."""
    tensors = []
    for mask, event_dim in masks:
        if mask is not None and mask is not True:
            tensors.append(spread(torch.as_tensor(mask), -1 - event_dim))
    return functools.reduce(torch.logical_and, tensors) if tensors else None


def unmasked(fn: Any) -> Any:
    """Returns a distribution without masks of its batch."""
    return without(fn, MaskedDistribution)


def _masked_layers(fn: Any) -> list[Any]:
    return [layer for layer in layers(fn) if isinstance(layer, MaskedDistribution)]


def is_masked_within(fn: Any) -> bool:
    """Whether a distribution masks elements of an event by themselves."""
    return bool(_masked_layers(unmasked(fn)))


def is_masked(site: Message) -> bool:
    """Whether a site's density is masked anywhere, by handlers or by its distribution."""
    return site["mask"] is not None or bool(_masked_layers(site["fn"]))


def log_density_of(
    site: Message, log_prob_of: Callable[[Any, Tensor], Tensor] | None = None
) -> Tensor:
    """Returns a site's log density, or what takes its place, as far as its mask counts it, ``(*batch, *plates)``."""
    fn, value, mask = site["fn"], without_gaps(site), site["mask"]
    log_prob = log_prob_of(fn, value) if log_prob_of else fn.log_prob(value)
    return log_prob if mask is None else torch.where(torch.as_tensor(mask), log_prob, 0.0)


def without_gaps(site: Message) -> Tensor:
    """Returns a site's value, with any number in place of NaN that a mask hides: a gradient would not be hidden."""
    fn, value = site["fn"], site["value"]
    if not is_masked(site):
        return value
    try:
        stand_in = fn.mean.detach().nan_to_num()
    except Exception:  # noqa: BLE001  whatever a distribution raises that has no mean
        stand_in = value.nan_to_num()
    return torch.where(value.isnan(), stand_in, value)


def rounding_of(site: Message) -> Tensor | None:
    """Returns the rounding error of a Normal site's values, in standard deviations; None for any other site.

    It is large where data are large beside their noise, as draws from wide priors are.
    """
    fn, value = site["fn"], without_gaps(site).detach()
    if type(fn) is not dist.Normal:
        return None
    return torch.finfo(value.dtype).eps * (value.abs() + fn.loc.detach().abs()) / fn.scale.detach()


def density_rounding(site: Message, terms: float = 4.0) -> Tensor | None:
    """Returns the rounding error of a Normal site's log density, in nats; None for any other site.

    Args:
        site: the message of the site.
        terms: the rounding error of the site's location, a sum of a few terms, in rounding errors of one value.
    """
    one_value = rounding_of(site)
    if one_value is None:
        return None
    error = terms * one_value
    distance = (site["value"] - site["fn"].loc).detach().abs() / site["fn"].scale.detach()
    return error * (1 + distance + error)
