"""The arguments of a call: whether a later call has the same, and what calls with others have in common.

What was found by runs of the model is kept for as long as its arguments are the same. Tensors are told apart by
identity and version, arrays by what they hold, all else by value. Change this module for arguments of other types.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Arguments", "Kind", "kind_of", "version_of"]

Kind = tuple[Hashable, Hashable]


class Arguments:
    """The arguments of one call, as they were then."""

    def __init__(self, leaves: Sequence[Any] = ()) -> None:
        self._leaves = [(leaf, _stamp(leaf)) for leaf in leaves]

    def are(self, leaves: Sequence[Any]) -> bool:
        """Whether the arguments of a later call are the same ones, unchanged; never in a trace, which is for others."""
        return not torch.jit.is_tracing() and len(leaves) == len(self._leaves) and all(
            _same(old, stamp, new) for (old, stamp), new in zip(self._leaves, leaves)
        )


def version_of(tensor: Tensor) -> Any:
    """Returns what is equal as long as a tensor is not written to; never for one that does not keep count."""
    return object() if tensor.is_inference() else tensor._version


def kind_of(leaves: Sequence[Any]) -> Kind:
    """Returns what a call's arguments have in common with those of others: all but what tensors hold; and numbers."""
    kind: list[Any] = []
    rest: list[Hashable] = []
    for leaf in leaves:
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            kind.append((tuple(leaf.shape), leaf.dtype))
        elif isinstance(leaf, (str, bool, NoneType)):
            kind.append(leaf)
        else:
            kind.append(type(leaf))
            rest.append(leaf if isinstance(leaf, Hashable) else id(leaf))
    return tuple(kind), tuple(rest)


def _stamp(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return version_of(leaf)
    if not hasattr(leaf, "__array__"):
        return None
    array = np.asarray(leaf)
    return array.shape, array.dtype, array.tobytes()


def _same(old: Any, stamp: Any, new: Any) -> bool:
    if stamp is not None or isinstance(new, Tensor) or hasattr(new, "__array__"):
        return (old is new or not isinstance(new, Tensor)) and stamp == _stamp(new)
    try:
        return old is new or bool(old == new)
    except Exception:  # whatever the comparison of a user's own objects raises
        return False
