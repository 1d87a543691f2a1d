"""A pass through a perceptron whose inputs become known step by step.

For a density all inputs are known, and ``mlp(x)`` is one dense pass. For sampling the inputs arrive
one step at a time, each drawn from rows emitted before::

    state = mlp.start()
    rows, state = state.advance(context, 1)
    rows, state = state.advance(sample(rows), 2)

Each unit and row is a sum over what it reads. An advance adds what it makes known to the sums of
all later steps, so all steps together multiply as much as one dense pass.
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
    """The weights of one pass, between layers: the inputs are layer 0, then come the hidden units, then the rows."""

    bounds: Sequence[Sequence[int]]  # of each layer, where its features of each step begin
    # layer -> the layers that read it, each with its weights ``(units, features)`` of the features of each step
    readers: Sequence[Sequence[tuple[int, Sequence[Tensor]]]]
    activation: Activation


class SteppedState(NamedTuple):
    """A pass in which the inputs of the steps before ``step`` are known, of this broadcast batch shape.

    It is immutable, so a pass may branch, and no tensor that carries values is ever written in place.
    """

    weights: PassWeights
    step: int
    batch_shape: torch.Size
    # Of each layer behind the inputs, the sums of its units of later steps over what is known: ``(size of the batch,
    # units)``, or ``(1, units)`` of the biases alone.
    sums: Sequence[Tensor]

    def advance(self, x: Tensor, stop: int) -> tuple[Tensor, SteppedState]:
        """Returns the rows of steps ``step`` to ``stop - 1``, ``(*batch, rows)``, and the state after them.

        Args:
            x: the columns of these steps, ``(*batch, columns)``, whose batch broadcasts with those before.
            stop: the step behind the last one to take; more than one step may be taken at once.
        """
        weights, step, known_shape, known = self
        shape, sums = x.shape[:-1], list(known)
        if known_shape and shape != known_shape:
            shape = torch.broadcast_shapes(shape, known_shape)
            x = x.expand(*shape, x.shape[-1])
        if shape != known_shape:
            sums = [
                each if len(each) == 1 else _expanded(each, known_shape, shape) for each in sums
            ]
        value = x.reshape(math.prod(shape), x.shape[-1])
        for layer, bounds in enumerate(weights.bounds):
            if layer:
                count = bounds[stop] - bounds[step]
                value, sums[layer - 1] = sums[layer - 1].split(
                    (count, bounds[-1] - bounds[stop]), 1
                )
                value = value.expand(math.prod(shape), -1)
                if count and layer < len(sums):
                    value = weights.activation(value)
            for reader, steps in weights.readers[layer] if value.shape[1] else ():
                weight = concatenated(steps[step:stop])
                if step:
                    weight = weight[weights.bounds[reader][step] :]
                sums[reader - 1] = torch.addmm(sums[reader - 1], value, weight.t())
        return value.reshape(*shape, value.shape[1]), SteppedState(weights, stop, shape, sums)


def concatenated(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Returns the parts as one; a single part as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


def _expanded(values: Tensor, old: torch.Size, new: torch.Size) -> Tensor:
    """Returns values of one batch shape, ``(size of old, features)``, at a larger one, ``(size of new, features)``."""
    features = values.shape[1]
    return values.reshape(*old, features).expand(*new, features).reshape(math.prod(new), features)
