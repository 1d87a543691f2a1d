"""A pass through a perceptron whose inputs become known step by step.

For a density all inputs are known, and ``mlp(x)`` is one dense pass. For sampling the inputs arrive
one step at a time, each drawn from rows emitted before::

    state = mlp.start()
    rows, state = state.advance(context, 1)
    rows, state = state.advance(sample(rows), 2)

What is known is added to the sums of all later units and rows, so all steps together multiply as much
as one dense pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Activation", "PassWeights", "SteppedState", "concatenated"]

Activation = Callable[[Tensor], Tensor]


class PassWeights(NamedTuple):
    """The weights of one pass. Layer 0 is the inputs, then come the layers of hidden units, then the rows."""

    bounds: Sequence[Sequence[int]]  # of each layer, where its features of each step begin
    # of each layer but the inputs, the layers that it reads, whose features lie side by side in its columns
    reads: Sequence[Sequence[int]]
    matrices: Sequence[Tensor]  # of each layer but the inputs, ``(features, columns)``
    activation: Activation


class SteppedState(NamedTuple):
    """A pass in which the inputs of the steps before ``step`` are known, of this broadcast batch shape.

    It is immutable, so a pass may branch, and no tensor that carries values is ever written in place.
    """

    weights: PassWeights
    # Of each layer but the inputs, the sums over all that is known of its features of the steps from ``step`` on,
    # ``(size of the batch, features)``; at first those of the biases, of a batch of size 1.
    sums: Sequence[Tensor]
    step: int = 0
    batch_shape: torch.Size = torch.Size()

    def advance(self, x: Tensor, stop: int) -> tuple[Tensor, SteppedState]:
        """Returns the rows of steps ``step`` to ``stop - 1``, ``(*batch, rows)``, and the state after them.

        Args:
            x: the columns of these steps, ``(*batch, columns)``, whose batch broadcasts with those before.
            stop: the step behind the last one to take; more than one step may be taken at once.
        """
        shape = x.shape[:-1]
        if self.batch_shape and shape != self.batch_shape:
            shape = torch.broadcast_shapes(shape, self.batch_shape)
            x = x.expand(*shape, x.shape[-1])
        size, later = math.prod(shape), []
        known = [x.reshape(size, x.shape[-1])]
        for layer, bounds in enumerate(self.weights.bounds[1:]):
            total = self._sum(layer, known, shape)
            count = bounds[stop] - bounds[self.step]
            value = total[:, :count]
            if layer < len(self.sums) - 1:
                value = self.weights.activation(value)
            known.append(value.expand(size, -1))
            later.append(total[:, count:])
        rows = known[-1].reshape(*shape, known[-1].shape[1])
        return rows, SteppedState(self.weights, later, stop, shape)

    def _sum(self, layer: int, known: Sequence[Tensor], shape: torch.Size) -> Tensor:
        """Returns the sums of a layer with what layers below have come to know in these steps."""
        bounds, reads, matrices, _ = self.weights
        total = self.sums[layer]
        if shape != self.batch_shape and len(total) > 1:
            total = _expanded(total, self.batch_shape, shape)
        weight = matrices[layer][bounds[layer + 1][self.step] :]
        first = 0
        for source in reads[layer]:
            value = known[source]
            if value.shape[1] and len(weight):
                start = first + bounds[source][self.step]
                total = torch.addmm(total, value, weight[:, start : start + value.shape[1]].t())
            first += bounds[source][-1]
        return total


def concatenated(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Returns the parts as one; a single part as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


def _expanded(values: Tensor, old: torch.Size, new: torch.Size) -> Tensor:
    """Returns values of one batch shape, ``(size of old, features)``, at a larger one, ``(size of new, features)``."""
    features = values.shape[1]
    return values.reshape(*old, features).expand(*new, features).reshape(math.prod(new), features)
