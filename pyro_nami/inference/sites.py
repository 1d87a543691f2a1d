"""What a site of a run says of its values: the plates they lie in, and the shape they have beside batch dims.

Change this module when values are laid out in another way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from pyro.distributions import Delta
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_nami.factors.wrappers import innermost

__all__ = ["check_full_plate", "is_delta", "plate_names", "plate_nesting", "unconstrained_zeros", "with_plate_dims"]


def check_full_plate(name: str, fn: Any, indices: Any = None) -> None:
    """Raises NotImplementedError for a plate that holds a part of its instances: at random, or ``indices`` if given."""
    size = fn.subsample_size if indices is None else len(indices)
    if size is not None and size < fn.size:
        raise NotImplementedError(
            f"Expected the full data; plate '{name}' holds {size} of {fn.size} instances. Run the model without "
            "subsample_size."
        )


def is_delta(fn: Any) -> bool:
    """Tells whether a distribution is a Delta, below its event dims and masks."""
    return isinstance(innermost(fn), Delta)


def plate_nesting(sites: Iterable[Any]) -> int:
    """Returns the number of plate dims of a run, from its sites: Pyro's ``max_plate_nesting``."""
    frames = (frame for site in sites for frame in site["cond_indep_stack"])
    return max((-frame.dim for frame in frames if frame.vectorized), default=0)


def plate_names(site: Any) -> tuple[str | None, ...]:
    """Returns the name of the plate of each batch dim of a site; None for a dim that is no plate's."""
    names: list[str | None] = [None] * len(site["fn"].batch_shape)
    for frame in site["cond_indep_stack"]:
        if frame.vectorized:
            names[frame.dim] = frame.name
    return tuple(names)


def with_plate_dims(value: Tensor, site: Any, nesting: int, num_batch: int) -> Tensor:
    """Returns values of a site, ``(*batch, *plates, *event)`` with all plate dims of the model.

    Args:
        value: with ``num_batch`` batch dims, then the site's own shape, with or without the plates that it is not in.
        site: from a run without batch dims.
        nesting: number of plate dims of the model.
        num_batch: number of batch dims.

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


def unconstrained_zeros(shape: torch.Size, *arguments: Any) -> Tensor:
    """Returns zeros of the dtype and device of the first real tensor among a model's arguments."""
    tensors = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return next(tensors, torch.empty(0)).new_zeros(shape)
