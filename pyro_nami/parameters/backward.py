"""Whether a backward pass has come back from a call, which makes the call a training step."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import Tensor

__all__ = ["Backward"]


class Backward:
    """Whether a backward pass has come back from one call, which makes the call a training step.

    Example:
        >>> import torch
        >>> backward, loss = Backward(), torch.ones((), requires_grad=True) * 2
        >>> backward.watch(loss)
        >>> backward.has_come, backward.may_come
        (False, True)
        >>> loss.backward()
        >>> backward.has_come, backward.may_come
        (True, False)
    """

    def __init__(self) -> None:
        self.has_come = False
        self._graph: Any = None  # refers to what lives as long as the graph of the call's losses

    def __reduce__(self) -> Any:  # a graph is neither copied nor pickled
        return Backward, ()

    @property
    def may_come(self) -> bool:
        """Whether a backward pass may still come: the graph is alive, and nothing has come back yet."""
        return not self.has_come and self._graph is not None and self._graph() is not None

    def watch(self, value: Tensor) -> None:
        """Waits for a gradient of a value that all losses of the call depend on."""
        hook = functools.partial(Backward._come, self)
        self._graph = weakref.ref(hook)
        value.register_hook(hook)

    def _come(self, gradient: Tensor) -> None:
        self.has_come = True
