"""Finds the plate of minibatches: the one whose instances can be reordered together with the rows of the data."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_nami.guide.call import Reading
from pyro_nami.program.first_run import is_latent
from pyro_nami.program.initial_values import near_origin
from pyro_nami.program.isolation import untouched
from pyro_nami.program.plate_dims import frames_of
from pyro_nami.program.runner import Sites

__all__ = ["exchangeable_plates"]


def exchangeable_plates(before: Reading, now: Reading, names: Collection[str]) -> frozenset[str]:
    """Returns the plates whose instances can be reordered together with the rows of a minibatch.

    The data that differ between two calls are those of a minibatch. Their rows, and the values of latents, are rotated
    by one along each plate. The plate is one of those returned if log densities are then rotated as well. They are not
    if other data hold a value for each instance, such as a covariate of the plate. Plates of whose size a dim of all
    differing data is come before others.

    Args:
        before, now: two calls, with different minibatches.
        names: the sites whose plates are tried.

    Returns:
        Plates. A plate along which the model fails on rotated data is one of them.
    """
    with untouched(now.call.program.model), torch.no_grad():
        try:
            sites = now.sites({}, choose=_reference)
        except Exception:  # noqa: BLE001  whatever a model does near the origin
            return frozenset()
        stacks = [frames_of(sites[name]) for name in names if name in sites]
        frames = {frame.name: frame for frame in itertools.chain(*stacks)}
        sizes = {
            plate: frame.size
            for plate, frame in frames.items()
            if _may_be_of(frame, before, now, sites)
        }
    shapes: list[torch.Size] = []

    def collect(value: Tensor) -> Tensor:
        shapes.extend([value.shape] if value.dim() else [])
        return value

    _changed(before, now, collect)
    whole = {plate for plate, size in sizes.items() if all(size in shape for shape in shapes)}
    return frozenset(whole or sizes)


def _reference(site: Any) -> Tensor | None:
    """Returns a value near the origin for a continuous latent, another one for each instance; others are drawn."""
    try:
        return near_origin(site) if is_latent(site) else None
    except NotImplementedError:
        return None


def _may_be_of(frame: Any, before: Reading, now: Reading, sites: Sites) -> bool:
    """Whether rotating data and latents along a plate rotates the log densities of all ``sites``."""
    values = {
        name: _along(site["value"], site, frame) for name, site in sites.items() if is_latent(site)
    }
    try:
        rotated = _changed(before, now, functools.partial(_rotate, frame))
        others = rotated.sites(values)
        return all(
            torch.allclose(
                _along(_log_prob(site), site, frame, event_dim=0),
                _log_prob(others[name]),
                equal_nan=True,
            )
            for name, site in sites.items()
        )
    except Exception:  # noqa: BLE001  whatever a model does that refuses other orders
        return True


def _log_prob(site: Any) -> Tensor:
    return site["fn"].log_prob(site["value"])


def _along(value: Any, site: Any, frame: Any, event_dim: int | None = None) -> Any:
    """Returns a tensor of a site rotated by one along a plate, if the site is in it."""
    dim = frame.dim - (site["fn"].event_dim if event_dim is None else event_dim)
    inside = frame in site["cond_indep_stack"] and value.dim() >= -dim
    return value.roll(1, dim) if inside else value


def _changed(before: Reading, now: Reading, change: Callable[[Tensor], Tensor]) -> Reading:
    """Returns the data with ``change(value)`` in place of each tensor that differs from that in ``before``."""

    def changed(old: Any, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(old, Tensor) and torch.equal(old, value):
            return value
        return change(value)

    (old, kind), (leaves, spec) = (
        tree_flatten([each.call.program.args, dict(each.call.program.kwargs)])
        for each in (before, now)
    )
    old = old if kind == spec else [None] * len(leaves)
    args, kwargs = tree_unflatten(list(map(changed, old, leaves)), spec)
    program = now.call.program._replace(args=args, kwargs=kwargs)
    around = now.surroundings and now.surroundings.changed_from(before.surroundings, changed)
    return now._replace(call=now.call._replace(program=program), surroundings=around)


def _rotate(frame: Any, value: Tensor) -> Tensor:
    """Returns a value, rotated along the plate's dim, or the first of its size."""
    if frame.size not in value.shape:
        return value
    at_dim = value.dim() >= -frame.dim and value.shape[frame.dim] == frame.size
    return value.roll(1, frame.dim if at_dim else value.shape.index(frame.size))
