"""`MaskedMLP`: a perceptron with shared hidden units whose outputs depend on the inputs that a boolean matrix allows.

The units and rows of a step are computed from all inputs known by then, so all steps together
multiply as much as one dense pass. `masks` says which units are connected.
"""

from __future__ import annotations

__all__ = ["MaskedMLP"]

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_nami.networks.masks import check_width, layer_masks, unit_steps
from pyro_nami.networks.stepped import Layers, SteppedMLP, SteppedState, concatenated, expand_batch

_BLOCK = 8  # steps after which what is known is added to all that are left
Bounds = tuple[int, ...]


class MaskedMLP(SteppedMLP):
    """A perceptron whose Jacobian's support is exactly a given dependency matrix, whatever its widths.

    Row i is a bias, plus (with ``skip``) a linear function of the inputs that it may read, plus a function of the
    hidden units whose label it contains (see `masks`). If no row reads anything, there are no units.

    Inputs and outputs come in *steps*: when the columns of step s are known, the rows of step s can be emitted.
    Columns and rows are numbered in step order. A step may have no columns, or no rows.

    Parameters are ``layer_0`` ``(units, inputs + 1)``, ``layer_1`` ``(units, units below + 1)``, ..., ``output``
    ``(outputs, units + inputs + 1)`` (without ``skip``: ``(outputs, units + 1)``).

    Args:
        dependency: boolean tensor ``(outputs, inputs)``; entry (i, j) says that output i may read input j.
        hidden_features: units in each hidden layer. None at all, ``()``, makes the network linear.
        input_splits: number of columns that become known at each step; one step by default.
        output_splits: number of rows that are emitted at each step.
        skip: whether rows also read their inputs directly. Linear-Gaussian regressions are then represented exactly.
        activation: elementwise function of the hidden layers.
        base: what weights are divided beyond.
        **factory: device and dtype of the parameters.

    Raises:
        ValueError: without ``skip``, if the hidden layers are too narrow to carry every dependency.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> dependency = torch.tensor([[False, False], [True, False]])
        >>> mlp = MaskedMLP(dependency, (8,), input_splits=[0, 1, 1], output_splits=[1, 1, 0])
        >>> _ = torch.nn.init.normal_(mlp.output)
        >>> x = torch.randn(5, 2)
        >>> first, state = mlp.start().advance(x[:, :0], 1)
        >>> second, state = state.advance(x[:, :1], 2)
        >>> torch.allclose(torch.cat([first, second], -1), mlp(x))
        True
    """

    def _lay_out(self, dependency: Tensor, hidden_features: Sequence[int]) -> Layers:
        dependency = dependency.cpu()
        hidden, output, last_columns = layer_masks(dependency, hidden_features)
        if not self.skip:
            check_width(dependency, (*hidden, output))
        self._bounds = (*(unit_steps(last, self.steps) for last in last_columns), self.steps.rows)
        direct = [dependency] if self.skip and hidden else []
        masks = [
            F.pad(mask, (0, 1), value=True) for mask in (*hidden, torch.cat([output, *direct], 1))
        ]
        rows = torch.arange(self.out_features, device="cpu")
        gather = F.pad(torch.arange(1, self.in_features + 1, device="cpu"), (0, 1)).unsqueeze(0)
        return Layers(masks, [tuple(mask.shape) for mask in masks], rows, gather)

    def start(self, whole: bool = False) -> SteppedState:
        hidden, output, bias = self._weights()
        columns, *bounds = [
            (each[0], each[-1]) if whole else each for each in (self.steps.columns, *self._bounds)
        ]
        layers, depth = [layer[:, :-1] for layer in (*hidden, output)], len(hidden)
        biases = [each.t() for each in (*(layer[:, -1:] for layer in hidden), bias)]
        steps = [
            layer.split([end - start for start, end in pairwise(each)])
            for layer, each in zip(layers, bounds)
        ]
        reads = (
            *((layer,) for layer in range(depth)),
            (depth, 0) if self.skip and depth else (depth,),
        )
        weights = _MaskedWeights(columns, bounds, reads, self.activation, layers, steps)
        memory = _Memory(0, [[bias] for bias in biases], [None] * (depth + 1))
        return SteppedState(weights, 0, torch.Size(), memory)


class _Memory(NamedTuple):
    """What a pass knows.

    ``totals`` are the pre-activations of each layer with what was known before step ``since``, ``(size of the batch,
    units)``, or ``(1, units)`` of the biases alone: step by step of some steps, and then of all others. ``known`` is
    what came since, of the inputs and of the units of each hidden layer, ``(size of the batch, features)``.
    """

    since: int
    totals: Sequence[Sequence[Tensor]]
    known: Sequence[Tensor | None]


class _MaskedWeights(NamedTuple):
    """Constants of one pass.

    ``columns`` and ``bounds`` say where the inputs, and the units of each layer, of a step begin. ``reads`` says for
    each layer what it reads, 0 the inputs and l the units of hidden layer l - 1, side by side in the columns of
    ``layers``, the masked weights ``(units, features)``; ``steps`` are those of each step.
    """

    columns: Bounds
    bounds: Sequence[Bounds]
    reads: Sequence[tuple[int, ...]]
    activation: Callable[[Tensor], Tensor]
    layers: Sequence[Tensor]
    steps: Sequence[Sequence[Tensor]]

    def advance(self, memory: _Memory, x: Tensor, step: int, stop: int) -> tuple[Tensor, _Memory]:
        near, count = stop - memory.since, len(memory.totals[0])
        if near >= count and memory.since + count < len(self.columns) - 1:
            memory = self._gathered(memory, step, max(stop, step + _BLOCK))
        value, known = x, list(memory.known)
        for layer in range(len(self.layers)):
            before = known[layer]
            known[layer] = value if before is None else torch.cat((before, value), 1)
            value = self._total(layer, memory._replace(known=known), step, stop)
            if value.shape[0] != x.shape[0]:
                value = value.expand(x.shape[0], -1)
            if layer + 1 < len(self.layers) and value.shape[1]:
                value = self.activation(value)
        return value, memory._replace(known=known)

    def expanded(self, memory: _Memory, step: int, old: torch.Size, new: torch.Size) -> _Memory:
        """Adds all that is known at the smaller batch first."""
        if not step:
            return memory
        memory = self._gathered(memory, step, step)
        totals = [
            [total if len(total) == 1 else expand_batch(total, old, new)]
            for (total,) in memory.totals
        ]
        return memory._replace(totals=totals)

    def _gathered(self, memory: _Memory, step: int, stop: int) -> _Memory:
        """Returns the memory with all that is known in the totals, and these cut up to ``stop`` into steps."""
        totals, count = [], len(self.columns) - 1
        for layer, bounds in enumerate(self.bounds):
            total, ends = self._total(layer, memory, step, count), bounds[step : stop + 1]
            ends = ends if stop >= count else (*ends, bounds[-1])
            totals.append(total.split([end - start for start, end in pairwise(ends)], 1))
        return _Memory(step, totals, [None] * len(memory.known))

    def _total(self, layer: int, memory: _Memory, step: int, stop: int) -> Tensor:
        """Returns the pre-activations of a layer's units of some steps, with all that is known."""
        since = memory.since
        first = 0
        bounds = self.bounds[layer]
        parts = memory.totals[layer][step - since :]
        total = concatenated(parts[: stop - step] if stop - step < len(parts) else parts)
        weight = (
            self.steps[layer][step]
            if stop == step + 1
            else self.layers[layer][bounds[step] : bounds[stop]]
        )
        for source in self.reads[layer]:
            value = memory.known[source]
            starts = self.bounds[source - 1] if source else self.columns
            if value is not None and value.shape[1] and len(weight):
                column = first + starts[since]
                total = torch.addmm(total, value, weight[:, column : column + value.shape[1]].t())
            first += starts[-1]
        return total
