"""How many draws are held in memory at a time."""

from __future__ import annotations

import torch

__all__ = ["MEMORY", "rows_in_memory"]

# Bytes that the values of all sites take at a time. Intermediate results take several times as many. At ten times less,
# runs for many draws become many short runs; at ten times more, a large model may not fit into memory.
MEMORY = 2**25


def rows_in_memory(elements: int) -> int:
    """Returns how many rows of so many elements are held in memory at a time, at least one.

    Example:
        >>> rows_in_memory(100)
        41943
    """
    return max(1, MEMORY // (torch.float64.itemsize * max(1, elements)))
