"""Warnings that name the user's own line, however deep in Pyro their reason is found; tables in text."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral
from typing import Any

__all__ = ["OneByOne", "aligned", "check_counts", "once", "quoted", "warn"]

_PASSED_OVER = ("pyro_nami", "pyro", "torch", "contextlib")


_SAID: ContextVar[set[type[Warning]] | None] = ContextVar("_SAID", default=None)


class OneByOne(UserWarning):
    """Warning: draws are made one by one, as the model cannot be run for all of them at once."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line of the call stack that is outside of this package, Pyro and torch.

    Within `once`, a category of this package is warned of a single time.
    """
    said = _SAID.get()
    if said is not None and category is not UserWarning:
        if category in said:
            return
        said.add(category)
    frame, level = sys._getframe(1), 2
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").split(".")[0] in _PASSED_OVER
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


@contextmanager
def once() -> Iterator[None]:
    """A context, of one call of a user's, in which each warning category of this package is shown once."""
    token = _SAID.set(set())
    try:
        yield
    finally:
        _SAID.reset(token)


def check_counts(**counts: Any) -> None:
    """Checks that options are whole numbers of at least 1; None stands for a default.

    Raises:
        TypeError: a value that is no whole number.
        ValueError: a value below 1.
    """
    for name, value in counts.items():
        if value is None:
            continue
        if not isinstance(value, Integral):
            raise TypeError(f"Expected {name} to be an int; got {value!r}.")
        if value < 1:
            raise ValueError(f"Expected {name} to be at least 1; got {value}.")


def quoted(names: Iterable[Any]) -> str:
    """Returns names in quotes, with commas between them."""
    return ", ".join(map(repr, names))


def aligned(rows: Sequence[Sequence[str]], words: Collection[int]) -> list[str]:
    """Returns rows as lines with aligned columns: the columns ``words`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    aligned = [f"{'<' if i in words else '>'}{width}" for i, width in enumerate(widths)]
    return ["  ".join(map(format, row, aligned)).rstrip() for row in rows]
