"""Plates whose instances form one joint block, as one sequence of elements over all instances.

The batch shape of such a site still includes its plates; the log density of an instance is given
the earlier instances.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["to_instances", "to_sequence"]


def to_sequence(x: Tensor, dims: Sequence[int], parts: int = 0) -> Tensor:
    """Moves plate dims into the elements, leaving size 1: ``(*batch, E, *parts)`` to ``(*batch, N E, *parts)``.

    Args:
        x: a tensor of elements.
        dims: negative batch dims, in order; the last becomes the slowest.
        parts: how many dims each element has.

    Example:
        >>> import torch
        >>> to_sequence(torch.arange(6).reshape(3, 2), [-1])
        tensor([[0, 1, 2, 3, 4, 5]])
    """
    for dim in dims:
        place = dim - 1 - parts
        x = x.movedim(place, -2 - parts).flatten(-2 - parts, -1 - parts).unsqueeze(place)
    return x


def to_instances(x: Tensor, dims: Sequence[int], sizes: Sequence[int], parts: int = 0) -> Tensor:
    """Undoes `to_sequence`: ``(*batch, N E, *parts)`` to ``(*batch, E, *parts)``, ``sizes`` in the dims ``dims``."""
    for dim, size in zip(reversed(dims), reversed(sizes)):
        place = dim - 1 - parts
        x = x.squeeze(place).unflatten(-1 - parts, (size, -1)).movedim(-2 - parts, place)
    return x
