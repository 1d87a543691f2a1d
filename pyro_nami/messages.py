"""What a user is told: warnings that name the user's own line, however deep in Pyro the reason is found."""

from __future__ import annotations

import sys
import warnings

__all__ = ["OneByOne", "warn"]

_PASSED_OVER = ("pyro_nami", "pyro", "torch", "contextlib")


class OneByOne(UserWarning):
    """That draws are made one by one, as not all can be made at once."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line that led here: the innermost that is outside of this package, of Pyro, and of torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PASSED_OVER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
