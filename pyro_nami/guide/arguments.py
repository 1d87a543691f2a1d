"""Whether two calls have the same arguments, and which arguments they share.

Results of running the model are kept while its arguments are the same. Tensors are compared by
identity and version, arrays by content, everything else by value.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["Arguments", "Cache", "Look", "Looks", "is_array"]

T = TypeVar("T")


class Arguments:
    """The arguments of one call at the time of the call.

    With ``kept``, a copy of each tensor is held, and tensors of equal values count as the same.

    Example:
        >>> x = torch.zeros(2)
        >>> arguments = Arguments([x, 3])
        >>> arguments.are([x, 3]), arguments.are([x.add_(1.0), 3])  # the last was written to
        (True, False)
    """

    def __init__(self, leaves: Sequence[Any], kept: bool = False) -> None:
        self._leaves = [(leaf, _stamp(leaf)) for leaf in leaves]
        self._kept = [
            leaf.detach().clone() if kept and isinstance(leaf, Tensor) else None for leaf in leaves
        ]

    def are(self, leaves: Sequence[Any]) -> bool:
        """Whether a later call has the same arguments, unchanged; False in a trace, which serves other arguments."""
        return (
            not torch.jit.is_tracing()
            and len(leaves) == len(self._leaves)
            and all(
                _same(old, stamp, new) or _equal(kept, new)
                for (old, stamp), kept, new in zip(self._leaves, self._kept, leaves)
            )
        )


class Cache:
    """Results by name, each kept while the values it was made from stay the same. Copies of a cache are empty.

    Example:
        >>> cache, x = Cache(), torch.ones(2)
        >>> cache.get("sum", [x], x.sum) is cache.get("sum", [x], x.sum)
        True
        >>> cache.get("sum", [x.add_(1.0)], x.sum)
        tensor(4.)
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Arguments, Any]] = {}

    def __reduce__(self) -> Any:
        return Cache, ()

    def get(self, name: Hashable, leaves: Sequence[Any], make: Callable[[], T]) -> T:
        """Returns the result of a name that was made from ``leaves``; else what ``make`` returns, which is kept."""
        kept = self._kept.get(name)
        if kept is None or not kept[0].are(leaves):
            kept = self._kept[name] = Arguments(leaves), make()
        found: T = kept[1]
        return found

    def clear(self) -> None:
        """Forgets all results."""
        self._kept.clear()


class Look(NamedTuple):
    """What one run of the model has shown about calls of one kind."""

    # observed site -> the place among the arguments' leaves of the one that is its very value
    slots: dict[str, int]
    varying: bool  # whether calls with arguments of this kind vary in more
    # observed sites whose values move with parameters of the model
    moving: frozenset[str] = frozenset()


class Looks:
    """Table of `Look` by the kind of a call's arguments: types, shapes, numbers and strings, not values in tensors.

    Args:
        most: looks kept at calls whose arguments differ in numbers only. If all of them are equal, other numbers do
            not matter either; a number that changes in each step costs so many runs of the model.

    Example:
        >>> looks = Looks()
        >>> looks.known([torch.zeros(3)])
        >>> looks.note(Look({"y": 0}, varying=False))
        >>> looks.known([torch.ones(3)]).slots, looks.known([torch.ones(4)])
        ({'y': 0}, None)
    """

    def __init__(self, *, most: int = 8) -> None:
        self._most = most
        self._table: dict[Hashable, dict[Hashable, Look]] = {}
        # kind of the latest arguments, and their numbers
        self._latest: tuple[Hashable, Hashable] | None = None

    def known(self, leaves: Sequence[Any]) -> Look | None:
        """Returns the `Look` at arguments of this kind; in a trace, of the kind asked for last; None if there is none.

        A run with other numbers may have other sites and other data. If the looks at many numbers agree, further
        numbers are taken not to matter.
        """
        if self._latest is None or not torch.jit.is_tracing():
            self._latest = _kind_of(leaves)
        kind, numbers = self._latest
        table = self._table.setdefault(kind, {})
        if numbers in table or len(table) < self._most:
            return table.get(numbers)
        first, *others = table.values()
        return None if first.varying or any(other != first for other in others) else first

    def note(self, look: Look) -> None:
        """Stores what a run has shown of the arguments that `known` was asked for."""
        assert self._latest is not None
        kind, numbers = self._latest
        table = self._table[kind]
        table[numbers] = look
        if len(table) > self._most:
            del table[next(iter(table))]


def _kind_of(leaves: Sequence[Any]) -> tuple[Hashable, Hashable]:
    """Returns the types, shapes, flags and strings of arguments, and apart from them the numbers and objects."""
    kind: list[Any] = []
    rest: list[Hashable] = []
    for leaf in leaves:
        if hasattr(type(leaf), "shape") and hasattr(type(leaf), "dtype"):
            kind.append((tuple(leaf.shape), leaf.dtype))
        elif isinstance(leaf, (str, bool, NoneType)):
            kind.append(leaf)
        else:
            kind.append(type(leaf))
            rest.append(leaf if isinstance(leaf, Hashable) else id(leaf))
    return tuple(kind), tuple(rest)


def is_array(value: Any) -> bool:
    """Whether a value is an array or a tensor; its class is asked, as objects may make attributes of any name."""
    return hasattr(type(value), "__array__")


def _stamp(leaf: Any) -> Any:
    """Returns a stamp that changes when an argument is written to; always a new one for tensors without a version."""
    if isinstance(leaf, Tensor):
        return object() if leaf.is_inference() else leaf._version
    if not is_array(leaf):
        return None
    array = np.asarray(leaf)
    return array.shape, array.dtype, array.tobytes()


def _same(old: Any, stamp: Any, new: Any) -> bool:
    if stamp is not None or is_array(new):
        return (old is new or not isinstance(new, Tensor)) and stamp == _stamp(new)
    try:
        return old is new or bool(old == new)
    except Exception:  # whatever the comparison of a user's own objects raises
        return False


def _equal(kept: Tensor | None, new: Any) -> bool:
    """Whether a tensor is like the copy that was kept, if one was, and has its values; NaN equals NaN."""
    if kept is None or not isinstance(new, Tensor):
        return False
    is_like = kept.shape == new.shape and kept.dtype == new.dtype and kept.device == new.device
    return is_like and torch.allclose(kept, new, rtol=0, atol=0, equal_nan=True)
