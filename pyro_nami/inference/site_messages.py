"""What the messages of a run's sites say: plates, the layout of values, and log densities."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nami.messages import quoted
from pyro_nami.program.plate_dims import frames_of

__all__ = [
    "OutsideSupport",
    "Sites",
    "Values",
    "check_declared",
    "check_full_plates",
    "check_latents",
    "joined",
    "log_density",
    "plate_names",
    "plate_nesting",
    "plate_shape",
    "values_at",
    "whole",
    "with_idle_dims",
]


Sites = Mapping[str, Any]  # site -> its message in a run
Values = Mapping[str, Tensor]  # site -> its values


class OutsideSupport(ValueError):
    """A value that its distribution refuses; the message names the site."""


def check_full_plates(sites: Sites) -> None:
    """Raises NotImplementedError for a plate that holds a part of its instances, chosen at random."""
    for name, site in sites.items():
        if site_is_subsample(site):
            held, size = site["fn"].subsample_size, site["fn"].size
            if held is not None and held < size:
                raise NotImplementedError(
                    f"Expected the full data; plate '{name}' holds {held} of {size} instances. Run the model without "
                    "subsample_size."
                )


def check_latents(whose: str, found: Collection[str], latents: Collection[str]) -> None:
    """Raises ValueError where the sites of a guide, or of given draws, are not the model's latents."""
    for name in sorted(set(found) ^ set(latents)):
        raise ValueError(
            f"Expected {whose} at every latent, {quoted(latents)}, and no other; got "
            + (f"'{name}' as well." if name in found else f"none at '{name}'.")
        )


def plate_nesting(sites: Iterable[Any]) -> int:
    """Returns the number of plate dims of a run, from its sites: Pyro's ``max_plate_nesting``."""
    return max((-frame.dim for site in sites for frame in frames_of(site)), default=0)


def plate_names(site: Any) -> tuple[str | None, ...]:
    """Returns the name of the plate of each batch dim of a site; None for a dim that is no plate's."""
    names: list[str | None] = [None] * len(site["fn"].batch_shape)
    for frame in frames_of(site):
        names[frame.dim] = frame.name
    return tuple(names)


def plate_shape(site: Any, nesting: int) -> tuple[int, ...]:
    """Returns the batch shape that a site's plates give it, ``(*plates,)``."""
    shape = [1] * nesting
    for frame in frames_of(site):
        if -frame.dim <= nesting:
            shape[frame.dim] = frame.size if frame.size >= 0 else site["fn"].batch_shape[frame.dim]
    return tuple(shape)


def check_declared(site: Any, nesting: int) -> None:
    """Raises ValueError for a site with batch dims that belong to no plate."""
    shape = site["fn"].batch_shape
    if (1,) * (nesting - len(shape)) + shape != plate_shape(site, nesting):
        raise ValueError(
            f"Expected the batch dims of site '{site['name']}' to be those of its plates; got {tuple(shape)}. Declare "
            "them by .to_event() or pyro.plate."
        )


def joined(parts: Sequence[Values], dim: int = 0) -> dict[str, Tensor]:
    """Returns the values of several runs in one tensor a site, one behind the other along a dim."""
    return {name: torch.cat([part[name] for part in parts], dim) for name in parts[0]}


def whole(site: Any) -> Tensor:
    """Returns a site's value at the full shape of its distribution."""
    return site["value"].expand(site["fn"].shape())


def values_at(index: Any, sites: Sites, single: Sites) -> Values:
    """Returns the values of one draw of a run for many, of the shapes that the sites have in a single run.

    Args:
        index: of the draw, in the batch dims.
        sites: of the run for many.
        single: the sites that are wanted, from a single run.
    """
    return {
        name: whole(sites[name])[index].reshape(site["fn"].shape()) for name, site in single.items()
    }


def with_idle_dims(value: Tensor, site: Any, nesting: int, num_batch: int) -> Tensor:
    """Returns values of a site, ``(*batch, *plates, *event)``, with dims of size 1 for plates that it is not in.

    Args:
        value: with ``num_batch`` batch dims, then the site's own shape, with or without these dims.
        site: from a run without batch dims, of a model with ``nesting`` plate dims.

    Raises:
        ValueError: another shape.
    """
    own, batch = site["fn"].shape(), value.shape[:num_batch]
    wide = (1,) * (nesting - len(site["fn"].batch_shape)) + own
    if len(batch) < num_batch or value.shape[num_batch:] not in (own, wide):
        raise ValueError(
            f"Expected values of site '{site['name']}' of shape {tuple(own)}"
            + (f" behind {num_batch} batch dims" if num_batch else "")
            + f"; got {tuple(value.shape)}."
        )
    return value.reshape(batch + wide)


def log_density(site: Any, fn: Any = None) -> Tensor:
    """Returns the log density of a site's value in nats, ``(*batch, *plates)``, without scale and mask.

    Raises:
        OutsideSupport: the distribution refuses the value.
    """
    value = site["value"]
    try:
        log_prob = (fn or site["fn"]).log_prob(value)
    except ValueError as error:  # of Pyro's validation, which names no site
        raise OutsideSupport(
            f"Expected a value of site '{site['name']}' in its support; {error}"
        ) from error
    # an improper prior's are anywhere
    return log_prob.to(value.device) if isinstance(value, Tensor) else log_prob
