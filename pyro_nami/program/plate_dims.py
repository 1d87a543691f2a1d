"""The batch dims of vectorized plates: which ones a site has, and values along them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pyro.poutine.runtime import _DIM_ALLOCATOR, get_plates
from torch import Tensor

__all__ = ["any_along", "first_instance", "frames_of", "outer_sizes", "own_dims", "spread"]


def frames_of(site: Mapping[str, Any]) -> list[Any]:
    """Returns the frames of the vectorized plates around a site."""
    return [frame for frame in site["cond_indep_stack"] if frame.vectorized]


def first_instance(value: Tensor, site: Mapping[str, Any]) -> Tensor:
    """Returns a value with its first instance only, size 1, in the plates of its site."""
    for frame in frames_of(site):
        dim = frame.dim - site["fn"].event_dim
        value = value.narrow(dim, 0, 1) if value.dim() >= -dim else value
    return value


def any_along(rows: Tensor, dim: int) -> Tensor:
    """Returns for which instances along ``dim`` of ``(*batch)`` any entry is True."""
    return rows.movedim(dim, 0).unsqueeze(-1).flatten(1).any(1)


def spread(rows: Tensor, dim: int) -> Tensor:
    """Returns ``(*batch, size)`` with its last dim at ``dim``, counted from the right: dims of 1 follow it."""
    return rows.reshape(rows.shape + (1,) * (-dim - 1))


@contextmanager
def own_dims() -> Iterator[None]:
    """Lets plates take the same dims as anywhere else, whatever plates are around: their messages stay hidden."""
    taken, _DIM_ALLOCATOR._stack = _DIM_ALLOCATOR._stack, []
    try:
        yield
    finally:
        _DIM_ALLOCATOR._stack = taken


def outer_sizes(nesting: int) -> torch.Size:
    """Returns the sizes of the plates around, to the left of a model's own ``nesting`` plate dims."""
    plates: list[Any] = [frame for frame in get_plates() if frame.vectorized]
    sizes = {-frame.dim: frame.size for frame in plates}
    return torch.Size(sizes.get(dim, 1) for dim in range(max(sizes, default=0), nesting, -1))
