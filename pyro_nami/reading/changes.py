"""Whether a site is another one in a second run of a model: in its distribution, mask, scale, support or data.

This is the one comparison by which interventions, index maps and element reads tell what a site depends on.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Transform
from torch.distributions.constraints import Constraint

from pyro_nami.factors.wrappers import without
from pyro_nami.program.runner import Message
from pyro_nami.reading.covariates import parameters

__all__ = ["differs", "moved", "numbers_in", "same_support"]

# What log_prob raises where a distribution has none, or has none at this value.
_NO_DENSITY = (NotImplementedError, KeyError, ValueError, RuntimeError)


def moved(
    before: Any, after: Any, *, density_only: bool = False, by_element: bool = False
) -> Tensor:
    """Returns which instances ``(*batch)`` of a site differ, to the bit, between its messages in two runs.

    Compared are its log density at the value of the first run, mask, scale, and data; and the parameters of its
    distribution, which show small changes that the log density, a sum of large terms, may absorb. All instances differ
    where the site changed its shape or kind, or did not come up (None).

    Args:
        before, after: the messages.
        density_only: whether parameters do not count if there is a log density: they also show how sums were rounded.
        by_element: whether elements that are independent by ``to_event`` are instances of their own.

    Example:
        >>> def site(loc):
        ...     fn = torch.distributions.Normal(torch.tensor(loc), 1.0)
        ...     return {"fn": fn, "value": torch.zeros(2), "mask": None, "scale": 1.0, "is_observed": False}
        >>> moved(site([0.0, 1.0]), site([0.0, 2.0]))
        tensor([False,  True])
    """
    fn = without(before["fn"], Independent) if by_element else before["fn"]
    # a copy, as transforms remember the values that they have drawn
    judged = torch.as_tensor(before["value"]).clone()
    everywhere = torch.ones(fn.batch_shape, dtype=torch.bool, device=judged.device)
    if after is None or _fixed(before) != _fixed(after):
        return everywhere
    old, new = (_readings(each, judged, density_only, by_element) for each in (before, after))
    if old.keys() != new.keys() or any(old[key].shape != new[key].shape for key in old):
        return everywhere
    result = ~everywhere
    for key, reading in old.items():
        result |= (~_equal(reading, new[key])).any(-1).to(result.device)
    return result


def differs(before: Any, after: Any) -> bool:
    """Whether a site, or its support, differs to the bit between its messages in two runs; see `moved`.

    A distribution without a density is compared by all numbers that it is made of.
    """
    if bool(moved(before, after, density_only=True).any()):
        return True
    old, new = before["fn"], after["fn"]
    has_density = _log_prob(old, torch.as_tensor(before["value"]).clone()) is not None
    return not (same_support(old, new) and (has_density or _same_numbers(old, new)))


def same_support(a: Any, b: Any) -> bool:
    """Whether the supports of two distributions are made of the same numbers."""
    return _same_numbers(a.support, b.support)


def _same_numbers(a: Any, b: Any) -> bool:
    old, new = numbers_in(a), numbers_in(b)
    if [x.shape for x in old] != [x.shape for x in new]:
        return False
    return all(bool(_equal(x, y).all()) for x, y in zip(old, new))


def numbers_in(value: Any) -> list[Tensor]:
    """Returns the numbers that a distribution, transform or constraint is made of, as tensors."""
    if isinstance(value, (Distribution, Transform, Constraint)):
        parts = vars(value).items()
        value = [part for key, part in parts if not key.startswith(("_cached", "_inv"))]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in numbers_in(part)]
    return [torch.as_tensor(value)] if isinstance(value, (Tensor, bool, int, float)) else []


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """Returns where two tensors agree to the bit, NaN with NaN."""
    return (a == b) | (a.isnan() & b.isnan())


def _log_prob(fn: Any, value: Tensor) -> Tensor | None:
    """Returns log densities; None where there are none."""
    with suppress(*_NO_DENSITY):
        return fn.log_prob(value).detach()
    return None


def _fixed(site: Message) -> list[Any]:
    """Returns the mask and the scale of a site as far as they are no tensors."""
    return [None if isinstance(site[key], Tensor) else site[key] for key in ("mask", "scale")]


def _readings(
    site: Message, value: Tensor, density_only: bool, by_element: bool
) -> dict[Any, Tensor]:
    """Returns all that decides a site's effect, ``(*batch, entries)`` each."""
    fn = without(site["fn"], Independent) if by_element else site["fn"]
    batch = fn.batch_shape
    inner = (1,) * (len(batch) - len(site["fn"].batch_shape))
    log_prob = _log_prob(fn, value)
    found: dict[Any, Any] = {} if log_prob is None else {"log_prob": log_prob.unsqueeze(-1)}
    if not found or not density_only:
        # after log_prob, which makes a distribution keep parameters of the other kind, logits or probs
        found.update(parameters(fn))
    for key in ("mask", "scale"):
        if isinstance(site[key], Tensor) and site[key].dim() + len(inner) <= len(batch):
            reading = site[key].detach().reshape(site[key].shape + inner)
            found[key, ""] = reading.expand(batch).unsqueeze(-1)
    if site["is_observed"]:
        with suppress(RuntimeError):  # data of another shape
            data = torch.as_tensor(site["value"]).detach().expand(fn.shape())
            found["data", ""] = data.unsqueeze(-1).flatten(len(batch))
    return {key: reading for key, reading in found.items() if reading.shape[:-1] == batch}
