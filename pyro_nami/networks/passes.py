"""A pass through a perceptron, at once or step by step.

For a density all inputs are known, and ``mlp(x)`` is one dense pass. For sampling the inputs arrive one step at a time,
each drawn from rows emitted before::

    state = mlp.start()
    rows, state = state.advance(context, 1)
    rows, state = state.advance(sample(rows), 2)

A state is an immutable value, so a pass may branch, and no tensor that carries values is ever written in place. Every
hidden unit is computed once, at the step at which its inputs are complete. What it takes to do so is left to the
weights of the pass: see `masked` and `separate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["PassWeights", "SteppedState", "concatenated", "expand_batch"]


class PassWeights(Protocol):
    """The weights of one pass. ``memory`` is what a pass has made of the inputs so far."""

    @property
    def columns(self) -> Sequence[int]:
        """Where the columns of each step begin, and the number of all."""

    def advance(self, memory: Any, x: Tensor, step: int, stop: int) -> tuple[Tensor, Any]:
        """Returns the rows of some steps from their columns, ``(size of the batch, ...)`` both, and the next memory."""

    def expanded(self, memory: Any, step: int, old: torch.Size, new: torch.Size) -> Any:
        """Returns the memory at a larger batch shape."""


class SteppedState(NamedTuple):
    """A pass in which the inputs of the steps before ``step`` are known, of this broadcast batch shape."""

    weights: PassWeights
    step: int
    batch_shape: torch.Size
    memory: Any

    def advance(self, x: Tensor, stop: int) -> tuple[Tensor, SteppedState]:
        """Returns the rows of steps ``step`` to ``stop - 1``, and the state after them.

        Args:
            x: the columns of these steps, ``(*batch, columns)``. Its batch broadcasts with those before, and what
                was computed on a smaller batch is not computed again.
            stop: the step behind the last one to take; more than one step may be taken at once.

        Returns:
            Rows ``(*batch, rows)``, where batch is the broadcast shape of all batches so far, and the next state.

        Raises:
            ValueError: if ``stop`` or the number of columns does not fit.
        """
        weights, step, known_shape, memory = self
        columns, shape = weights.columns, x.shape[:-1]
        if not step < stop < len(columns):
            raise ValueError(f"Expected stop from {step + 1} to {len(columns) - 1}, the steps left; got {stop}.")
        if x.shape[-1] != columns[stop] - columns[step]:
            raise ValueError(
                f"Expected x of shape (*batch, {columns[stop] - columns[step]}), the columns of steps {step} to "
                f"{stop - 1}; got {tuple(x.shape)}."
            )
        if known_shape and shape != known_shape:
            shape = torch.broadcast_shapes(shape, known_shape)
            x = x.expand(*shape, x.shape[-1])
        if shape != known_shape:
            memory = weights.expanded(memory, step, known_shape, shape)
        flat = x if len(shape) == 1 else x.reshape(math.prod(shape), x.shape[-1])
        rows, memory = weights.advance(memory, flat, step, stop)
        rows = rows if len(shape) == 1 else rows.reshape(*shape, rows.shape[1])
        return rows, SteppedState(weights, stop, shape, memory)


def expand_batch(values: Tensor, old: torch.Size, new: torch.Size) -> Tensor:
    """Returns values of one batch shape, ``(size of old, features)``, at a larger one, ``(size of new, features)``."""
    features = values.shape[1]
    return values.reshape(*old, features).expand(*new, features).reshape(math.prod(new), features)


def concatenated(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Returns the parts as one; a single part as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)
