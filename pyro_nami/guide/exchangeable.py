"""The plate of minibatches: its instances are exchangeable together with the rows of the changing arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_nami.guide.call import Call
from pyro_nami.program.first_run import is_latent
from pyro_nami.program.initial_values import near_origin
from pyro_nami.program.isolation import untouched

__all__ = ["exchangeable_plates"]


def exchangeable_plates(before: Call, now: Call, names: Collection[str]) -> frozenset[str]:
    """Returns the plates in whose instances a model is exchangeable, with the rows of a minibatch's arguments.

    The arguments that differ between two calls are those of a minibatch. Their rows, and the values of latents, are
    rotated by one along each plate. The plate is one of those returned if log densities are then rotated as well.
    They are not if another argument holds a value for each instance, such as a covariate of the plate.

    Args:
        before, now: two calls, with different minibatches.
        names: the sites whose plates are tried.

    Returns:
        Plates. A plate along which the model fails on rotated arguments is one of them.
    """
    with untouched(now.model), torch.no_grad():
        try:
            sites = now.run({}, choose=_reference)
        except Exception:  # noqa: BLE001  whatever a model does near the origin
            return frozenset()
        frames = {
            frame.name: frame
            for name in names
            if name in sites
            for frame in sites[name]["cond_indep_stack"]
        }
        return frozenset(
            plate
            for plate, frame in frames.items()
            if frame.vectorized and _may_be_of(frame, before, now, sites)
        )


def _reference(site: Any) -> Tensor | None:
    """Returns a value near the origin for a continuous latent, another one for each instance; others are drawn."""
    try:
        return near_origin(site) if is_latent(site) else None
    except NotImplementedError:
        return None


def _may_be_of(frame: Any, before: Call, now: Call, sites: Mapping[str, Any]) -> bool:
    """Whether log densities are those of ``sites``, rotated along a plate, once arguments and latents are rotated."""
    values = {
        name: _along(site["value"], site, frame) for name, site in sites.items() if is_latent(site)
    }
    try:
        others = _rotated(before, now, frame).run(values)
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


def _rotated(before: Call, now: Call, frame: Any) -> Call:
    """Returns a call whose arguments are rotated by one row along a plate, if they differ from those of ``before``."""
    (old, kind), (leaves, spec) = (
        tree_flatten([each.args, dict(each.kwargs)]) for each in (before, now)
    )
    old = old if kind == spec else [None] * len(leaves)
    args, kwargs = tree_unflatten([_rotate(*pair, frame) for pair in zip(old, leaves)], spec)
    return replace(now, args=args, kwargs=kwargs)


def _rotate(old: Any, value: Any, frame: Any) -> Any:
    """Returns an argument, rotated if it differs from ``old``: along the plate's dim, or the first of its size."""
    if not isinstance(value, Tensor) or frame.size not in value.shape:
        return value
    if isinstance(old, Tensor) and torch.equal(old, value):
        return value
    at_dim = value.dim() >= -frame.dim and value.shape[frame.dim] == frame.size
    return value.roll(1, frame.dim if at_dim else value.shape.index(frame.size))
