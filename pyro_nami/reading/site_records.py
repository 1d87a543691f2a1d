"""`Record`: what a site was like in one run, and whether another run changed it, to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, Transform
from torch.distributions.constraints import Constraint

from pyro_nami.reading.covariates import parameters

__all__ = ["Record", "any_along", "equal", "moved", "recorded", "same", "spread"]

# What log_prob raises where a distribution has none, or has none at this value.
_NO_DENSITY = (NotImplementedError, KeyError, ValueError, RuntimeError)


class Record(NamedTuple):
    """What one site was like in one run.

    Attributes:
        log_prob: its log density in nats, ``(*batch)``, at the value it is judged at; None if that has none.
        shape: its batch and event shape.
        inputs: what else decides its effect: mask, scale, and its value if it is observed.
        support: the tensors and numbers that its support depends on.
    """

    log_prob: Tensor | None
    shape: torch.Size
    inputs: list
    support: list


def recorded(msg: Any, value: Any, expected: Any) -> Record:
    """What the site of a message is like at a value, where log_prob may raise the ``expected`` errors."""
    fn, mask = msg["fn"], msg["mask"]
    inputs = [mask, msg["scale"], value if msg["is_observed"] else None]
    try:
        log_prob = fn.log_prob(value, *msg["args"], **msg["kwargs"])
        log_prob = torch.where(mask, log_prob, 0.0) if isinstance(mask, Tensor) else log_prob
    except expected:
        log_prob = None
        inputs += _leaves(fn)
    support = []
    with suppress(NotImplementedError, AttributeError):
        support = _leaves(fn.support)
    return Record(log_prob, fn.batch_shape + fn.event_shape, inputs, support)


def _leaves(value: Any) -> list[Any]:
    """The tensors and numbers that a distribution, transform or constraint consists of."""
    if isinstance(value, (Distribution, Transform, Constraint)):
        value = [
            part for key, part in vars(value).items() if not key.startswith(("_cached", "_inv"))
        ]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value] if isinstance(value, (Tensor, int, float)) else []


def same(a: Any, b: Any) -> bool:
    """Whether two records, or parts of them, agree to the bit."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(equal(a, b).all())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(np.all(a == b))


def equal(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors agree to the bit, NaN with NaN."""
    return (a == b) | (a.isnan() & b.isnan())


def moved(before: Any, after: Any) -> Tensor:
    """Returns which instances ``(*batch)`` of a site differ between its messages in two runs.

    All do where it changed its shape or kind, or did not come up (None).
    """
    old = _readings(before, before["value"])
    new = {} if after is None else _readings(after, before["value"])
    device = next((value.device for value in old.values()), None)
    result = torch.zeros(before["fn"].batch_shape, dtype=torch.bool, device=device)
    for key in old.keys() | new.keys():
        if key not in old or key not in new or old[key].shape != new[key].shape:
            return torch.ones_like(result)
        result |= (~equal(old[key], new[key])).any(-1).to(result.device)
    return result


def _readings(site: Mapping[str, Any], value: Any) -> dict[Any, Tensor]:
    """Returns all that decides a site's effect, ``(*batch, entries)`` each.

    The parameters of its distribution show small changes that its log density, a sum of large terms, may absorb.
    """
    fn, log_prob = site["fn"], {}
    # first, as it makes a distribution keep parameters of the other kind, logits or probs
    with suppress(*_NO_DENSITY):
        log_prob = {("log_prob", ""): fn.log_prob(value).detach().unsqueeze(-1)}
    found: dict[Any, Any] = {**parameters(fn), **log_prob}
    for key in ("mask", "scale"):
        if isinstance(site[key], Tensor) and site[key].dim() <= len(fn.batch_shape):
            found[key, ""] = site[key].detach().expand(fn.batch_shape).unsqueeze(-1)
    return {key: value for key, value in found.items() if value.shape[:-1] == fn.batch_shape}


def any_along(rows: Tensor, dim: int) -> Tensor:
    """Returns for which instances along ``dim`` of ``(*batch)`` any entry is True."""
    return rows.movedim(dim, 0).unsqueeze(-1).flatten(1).any(1)


def spread(rows: Tensor, dim: int) -> Tensor:
    """Returns ``(size,)`` with its dim at ``dim``, counted from the right."""
    return rows.reshape(rows.shape + (1,) * (-dim - 1))
