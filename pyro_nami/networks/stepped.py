"""A pass through a perceptron whose inputs become known step by step.

For a density all inputs are known, and ``mlp(x)`` is one dense pass. For sampling the inputs arrive
one step at a time, each drawn from rows emitted before::

    state = mlp.start()
    rows, state = state.advance(context, 1)
    rows, state = state.advance(sample(rows), 2)

Each unit and row is computed once, from all that it reads, so all steps together multiply as much
as one dense pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Activation", "PassWeights", "SteppedState", "concatenated", "start_pass"]

Activation = Callable[[Tensor], Tensor]


class PassWeights(NamedTuple):
    """The weights of one pass. Layer 0 is the inputs, then come the layers of hidden units, then the rows."""

    bounds: Sequence[Sequence[int]]  # of each layer, where its features of each step begin
    # of each layer but the inputs, the layers that it reads, whose features lie side by side in its columns
    reads: Sequence[Sequence[int]]
    # of each layer but the inputs, the weights ``(features, columns)`` of each step's features
    matrices: Sequence[Sequence[Tensor]]
    activation: Activation

    @property
    def block(self) -> int:
        """Steps after which the sums of all later steps are brought up to date, at about the least cost of n steps."""
        return 1 + math.isqrt(len(self.bounds[0]))


def start_pass(weights: PassWeights, biases: Sequence[Tensor]) -> SteppedState:
    """Returns a pass in which no input is known, from the biases of each layer but the inputs, ``(1, features)``."""
    sums = [
        _in_steps(bias, bounds, 0, weights.block)
        for bias, bounds in zip(biases, weights.bounds[1:])
    ]
    return SteppedState(weights, sums, [()] * len(sums))


class SteppedState(NamedTuple):
    """A pass in which the inputs of the steps before ``step`` are known, of this broadcast batch shape.

    It is immutable, so a pass may branch, and no tensor that carries values is ever written in place.
    """

    weights: PassWeights
    # Of each layer but the inputs, the sums of its features over what is known from steps before ``since``,
    # ``(size of the batch, features)``: one tensor for each of some steps from ``since`` on, and the last for all later
    # steps. Sums of the biases alone have a batch of size 1.
    sums: Sequence[Sequence[Tensor]]
    # of each layer but the rows, its features of the steps ``since`` to ``step - 1``, ``(size of the batch, features)``
    known: Sequence[Sequence[Tensor]]
    step: int = 0
    since: int = 0
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
        state = self
        grown = bool(self.step) and shape != self.batch_shape
        if grown or stop - self.since >= len(self.sums[0]):
            state = self._gathered(max(stop, self.step + self.weights.block), shape)
        size, known = math.prod(shape), list(state.known)
        value = x.reshape(size, x.shape[-1])
        for layer in range(len(known)):
            known[layer] = (*known[layer], value)
            value = state._sum(layer, known, stop)
            if len(value) != size:
                value = value.expand(size, -1)
            if layer < len(known) - 1:
                value = self.weights.activation(value)
        rows = value.reshape(*shape, value.shape[1])
        return rows, state._replace(known=known, step=stop, batch_shape=shape)

    def _gathered(self, stop: int, shape: torch.Size) -> SteppedState:
        """Returns this state with all that is known in its sums, those of the steps before ``stop`` one by one."""
        sums: list[Sequence[Tensor]] = []
        for layer, bounds in enumerate(self.weights.bounds[1:]):
            total = self._sum(layer, self.known, len(bounds) - 1)
            if shape != self.batch_shape and len(total) > 1:
                total = _expanded(total, self.batch_shape, shape)
            sums.append(_in_steps(total, bounds, self.step, stop))
        return self._replace(sums=sums, known=[()] * len(sums), since=self.step)

    def _sum(self, layer: int, known: Sequence[Sequence[Tensor]], stop: int) -> Tensor:
        """Returns the sums of features of steps ``step`` to ``stop - 1`` over all that is known, one layer above."""
        bounds, reads, matrices, _ = self.weights
        total = concatenated(self.sums[layer][self.step - self.since : stop - self.since])
        weight = concatenated(matrices[layer][self.step : stop], 0)
        first = 0
        for source in reads[layer]:
            values = [value for value in known[source] if value.shape[1]]
            if values and len(weight):
                value = concatenated(values)
                start = first + bounds[source][self.since]
                total = torch.addmm(total, value, weight[:, start : start + value.shape[1]].t())
            first += bounds[source][-1]
        return total


def concatenated(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Returns the parts as one; a single part as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


def _in_steps(values: Tensor, bounds: Sequence[int], begin: int, stop: int) -> Sequence[Tensor]:
    """Returns features of the steps from ``begin`` on: a tensor for each step before ``stop``, and one for the rest."""
    ends = [*bounds[begin : stop + 1], bounds[-1]]
    return values.split([end - start for start, end in pairwise(ends)], 1)


def _expanded(values: Tensor, old: torch.Size, new: torch.Size) -> Tensor:
    """Returns values of one batch shape, ``(size of old, features)``, at a larger one, ``(size of new, features)``."""
    features = values.shape[1]
    return values.reshape(*old, features).expand(*new, features).reshape(math.prod(new), features)
