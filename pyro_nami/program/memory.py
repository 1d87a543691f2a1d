"""How many draws are held in memory at a time."""

from __future__ import annotations

__all__ = ["MEMORY", "rows_in_memory"]

# Bytes that the values of all sites take at a time. Intermediate results take several times as many. At ten times less,
# runs for many draws become many short runs; at ten times more, a large model may not fit into memory.
MEMORY = 2**25
BYTES_OF_A_NUMBER = 8  # in double precision, the widest


def rows_in_memory(elements: int) -> int:
    """Returns how many rows of so many elements are held in memory at a time, at least one.

    Example:
        >>> rows_in_memory(100)
        41943
    """
    return max(1, MEMORY // (BYTES_OF_A_NUMBER * max(1, elements)))
