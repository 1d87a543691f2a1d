"""Which plate minibatches are of: the one whose rows the model exchanges with those of the arguments that moved.

Change this module when the plate of minibatches is to be told by something else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_nami.guide.call import Call
from pyro_nami.reading.first_run import is_latent
from pyro_nami.reading.isolation import untouched
from pyro_nami.reading.starts import near_origin

__all__ = ["exchangeable_plates"]


def exchangeable_plates(before: Call, now: Call, names: Collection[str]) -> frozenset[str]:
    """Returns the plates around sites ``names`` that the arguments that moved between two calls may be rows of.

    If minibatches are of a plate, the model does not tell their rows apart: with the rows of all arguments that moved
    rotated by one, and those of latents, log densities are those from before, rotated. They are not where something
    stayed that has a value for each instance, a covariate of another plate say. A model that cannot be run so says
    nothing.
    """
    with untouched(now.model), torch.no_grad():
        try:
            sites = now.run({}, choose=_reference)
        except Exception:  # noqa: BLE001  whatever a model does near the origin
            return frozenset()
        frames = {frame.name: frame for name in names if name in sites for frame in sites[name]["cond_indep_stack"]}
        return frozenset(
            plate for plate, frame in frames.items() if frame.vectorized and _may_be_of(frame, before, now, sites)
        )


def _reference(site: Any) -> Tensor | None:
    """Returns a value near the origin for a continuous latent, another one for each instance; others are drawn."""
    try:
        return near_origin(site) if is_latent(site) else None
    except NotImplementedError:
        return None


def _may_be_of(frame: Any, before: Call, now: Call, sites: Mapping[str, Any]) -> bool:
    """Whether log densities are those of ``sites``, rotated along a plate, when what moved is rotated along it."""
    values = {name: _along(site["value"], site, frame) for name, site in sites.items() if is_latent(site)}
    try:
        others = _rotated(before, now, frame).run(values)
        return all(
            torch.allclose(_along(_log_prob(site), site, frame, event_dim=0), _log_prob(others[name]), equal_nan=True)
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
    """Returns a call with the rows of those arguments rotated by one that an earlier call had others for."""
    (old, kind), (leaves, spec) = (tree_flatten([each.args, dict(each.kwargs)]) for each in (before, now))
    old = old if kind == spec else [None] * len(leaves)
    args, kwargs = tree_unflatten([_moved(*pair, frame) for pair in zip(old, leaves)], spec)
    return replace(now, args=args, kwargs=kwargs)


def _moved(old: Any, value: Any, frame: Any) -> Any:
    """Returns an argument, rotated along its dim for a plate, or else the first of the plate's size, if it moved."""
    if not isinstance(value, Tensor) or frame.size not in value.shape:
        return value
    if isinstance(old, Tensor) and torch.equal(old, value):
        return value
    at_dim = value.dim() >= -frame.dim and value.shape[frame.dim] == frame.size
    return value.roll(1, frame.dim if at_dim else value.shape.index(frame.size))
