"""Every factor its own small network, all factors of a step evaluated as one batched product.

The alternative to `MaskedMLP` that the paper calls separate networks: nothing is shared between factors. The use is the
same, see `pyro_nami.networks.masked`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_nami.networks.masks import Steps
from pyro_nami.networks.stepped import (
    Activation,
    Base,
    SteppedMLP,
    check_advance,
    concatenated,
    expand_batch,
    flatten,
    shares,
)

__all__ = ["SeparateMLP", "SeparateState"]


class SeparateMLP(SteppedMLP):
    """A perceptron of the same use as `MaskedMLP` in which every *factor*, a group of rows, has its own small network.

    All rows of a factor read the same columns at the same step. Its network reads these columns, has hidden layers of
    the given widths, and with ``skip`` also direct weights. The networks of all factors of an advance are evaluated
    as one batched product; factors with fewer parents or rows than the largest are padded.

    Parameters, for F factors of at most P parents and R rows, with factors in the order of their steps: ``layer_0``
    ``(F, units, P + 1)``, ``layer_1`` ``(F, units, units below + 1)``, ..., ``output`` ``(F, R, units + P + 1)``
    (without ``skip``: ``(F, R, units + 1)``).

    Args:
        dependency: boolean tensor ``(outputs, inputs)``; entry (i, j) says that output i may read input j.
        hidden_features: units of each factor in each hidden layer.
        factors: the rows of each factor; every row belongs to one.
        input_splits: number of columns that become known at each step; one step by default.
        output_splits: number of rows that are emitted at each step.
        skip: whether rows also read their inputs directly.
        activation: elementwise function of the hidden layers.
        base: what weights are divided beyond.
        device: device of the parameters.
        dtype: floating-point type of the parameters.

    Raises:
        ValueError: if the factors are no partition of the rows, or the rows of one differ in columns or step.
    """

    _gather: Tensor
    _positions: Tensor | None

    def __init__(
        self,
        dependency: Tensor,
        hidden_features: Sequence[int] = (64,),
        *,
        factors: Sequence[Sequence[int]],
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        skip: bool = True,
        activation: Activation = F.silu,
        base: Base = Base(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dependency, hidden_features, input_splits, output_splits, skip, activation)
        groups = _sorted_factors(dependency, factors, self.steps)
        parents = [dependency[rows[0]].nonzero().flatten().tolist() for rows in groups]
        num_factors, num_parents = len(groups), max(map(len, parents), default=0)
        self._num_rows = max(map(len, groups), default=0)
        starts = [rows[0] for rows in groups]
        self._factor_bounds = tuple(sum(row < bound for row in starts) for bound in self.steps.rows)

        gather = torch.zeros(num_factors, num_parents + 1, dtype=torch.long)
        mask = F.pad(torch.zeros(num_factors, 1, num_parents, dtype=torch.bool), (0, 1), value=True)
        positions = torch.zeros(self.out_features, dtype=torch.long)
        for factor, (rows, columns) in enumerate(zip(groups, parents)):
            gather[factor, : len(columns)] = torch.tensor(columns, dtype=torch.long) + 1
            mask[factor, :, : len(columns)] = True
            positions[list(rows)] = factor * self._num_rows + torch.arange(len(rows))
        in_place = torch.equal(positions, torch.arange(num_factors * self._num_rows))
        self.register_buffer("_gather", gather.flatten().to(device), persistent=False)
        self.register_buffer("_positions", None if in_place else positions.to(device), persistent=False)

        widths = [num_parents, *hidden_features]
        shapes = [(num_factors, width, below + 1) for width, below in zip(widths[1:], widths)]
        reads = mask[..., :-1].any(-1, keepdim=True)  # a factor that reads nothing has no units
        self._units = widths[-1] if hidden_features else 0
        masks = [mask & reads] if hidden_features else []
        masks += [F.pad(reads.expand(-1, -1, width), (0, 1), value=True) & reads for width in hidden_features[:-1]]
        direct = mask if skip or not hidden_features else mask[..., -1:]
        masks.append(torch.cat([reads.expand(-1, -1, self._units), direct], -1))
        real = torch.arange(self._num_rows) < torch.tensor([[len(rows)] for rows in groups])
        masks[-1] = masks[-1] & real.unsqueeze(-1)
        shapes.append((num_factors, self._num_rows, masks[-1].shape[-1]))
        order = torch.full((num_factors * self._num_rows,), -1)
        order[positions] = torch.arange(self.out_features)
        rows_of = order.view(num_factors, self._num_rows)
        self._add_layers(shapes, self._multipliers(masks, base), rows_of, base.paced, device=device, dtype=dtype)

    def _multipliers(self, masks: Sequence[Tensor], base: Base) -> list[Tensor]:
        *hidden, output = (mask != 0 for mask in masks)
        widths = [base.inputs, *[base.hidden] * len(hidden)]
        parts = [self._shared(mask, width) for mask, width in zip(hidden, widths)]
        units, direct = output[..., : self._units], output[..., self._units :]
        rows = [shares(units, base.output)] if self._units else []
        rows.append(self._shared(direct, base.inputs) if direct.shape[-1] > 1 else direct.float())
        return [*parts, torch.cat(rows, -1)]

    def direct_mask(self) -> Tensor:
        mask = self._gather.new_zeros(self.out_features, self.in_features + 1, dtype=torch.bool)
        gather = self._gather.view(-1, len(self._gather) // len(self.output))
        for row, place in enumerate(self._places()):
            mask[row, gather[place // self._num_rows]] = True
        return mask[:, 1:]

    def _direct(self, row: int, columns: Tensor) -> tuple[Any, ...]:
        factor, place = divmod(self._places()[row], self._num_rows)
        gather = self._gather.view(len(self.output), -1)[factor].tolist()
        return factor, place, torch.tensor([gather.index(column + 1) + self._units for column in columns.tolist()])

    def _places(self) -> list[int]:
        """Returns where each row lies in the stack of the rows of all factors."""
        return list(range(self.out_features)) if self._positions is None else self._positions.tolist()

    @staticmethod
    def _shared(mask: Tensor, base: float) -> Tensor:
        """Returns the multipliers of a layer whose last column is the bias."""
        return torch.cat((shares(mask[..., :-1], base), mask[..., -1:].float()), -1)

    def _biases(self, weights: Tensor) -> Tensor:
        positions = slice(None) if self._positions is None else self._positions
        return weights.reshape(-1, weights.shape[-1])[positions, -1]

    def _write_biases(self, values: Tensor) -> None:
        positions = slice(None) if self._positions is None else self._positions
        self.output.view(-1, self.output.shape[-1])[positions, -1] = values

    def start(self) -> SeparateState:
        """Returns the state of a pass in which no input is known yet."""
        return self._start(self.steps, self._factor_bounds)

    def forward(self, x: Tensor) -> Tensor:
        """Returns all rows, ``(*batch, outputs)``, from all inputs, ``(*batch, inputs)``, in one dense pass."""
        steps = Steps((0, self.in_features), (0, self.out_features))
        return self._start(steps, (0, self._factor_bounds[-1])).advance(x, 1)[0]

    def _start(self, steps: Steps, factors: tuple[int, ...]) -> SeparateState:
        sizes = [end - start for start, end in pairwise(factors)]
        *hidden, output = self._weights()
        if hidden:
            # Units are taken relative to what they are at inputs of zero.
            units = self.activation(hidden[0][..., -1:])
            for weight in hidden[1:]:
                units = self.activation(torch.baddbmm(weight[..., -1:], weight[..., :-1], units))
            constant = torch.bmm(output[..., : units.shape[1]], units)
            output = torch.cat((output[..., :-1], output[..., -1:] - constant), -1)
        weights = [*hidden, output]
        blocks = tuple(weight.split(sizes) for weight in weights)
        constants = (self._num_rows, self.skip, self.activation)
        run = _SeparateRun(steps, factors, self._gather, self._positions, *constants, blocks)
        return SeparateState(run, 0, torch.Size(), weights[0].new_ones(1, 1))


class SeparateState(NamedTuple):
    """A pass through a `SeparateMLP` in which the inputs of the steps before ``step`` are known.

    Attributes:
        run: constants of the pass.
        step: the next step.
        batch_shape: broadcast shape of the batches so far.
        known: ones, and then the columns so far, ``(1 + columns, size of the batch)``.
    """

    run: _SeparateRun
    step: int
    batch_shape: torch.Size
    known: Tensor

    def advance(self, x: Tensor, stop: int) -> tuple[Tensor, SeparateState]:
        """Returns the rows of steps ``step`` to ``stop - 1``, and the state after them, as `MaskedState.advance`."""
        run, start, known = self.run, self.step, self.known
        check_advance(run.steps.columns, start, x, stop)
        batch_shape, x = flatten(x, self.batch_shape)
        if batch_shape != self.batch_shape:
            known = expand_batch(known.t(), self.batch_shape, batch_shape).t()
        if x.shape[1]:
            known = torch.cat((known, x.t()))
        rows = run.rows(known, start, stop).t()
        if len(batch_shape) != 1:
            rows = rows.reshape(*batch_shape, rows.shape[1])
        return rows, SeparateState(run, stop, batch_shape, known)


class _SeparateRun(NamedTuple):
    """Constants of one pass: ``blocks[layer][step]`` are the masked weights of the factors of a step.

    ``gather`` lists what each factor reads, as rows of `SeparateState.known` (row 0, the ones, for padding and bias);
    ``positions`` is where each output row lies in the stack of the ``num_rows`` rows of each factor, None if in order.
    """

    steps: Steps
    factors: tuple[int, ...]
    gather: Tensor
    positions: Tensor | None
    num_rows: int
    skip: bool
    activation: Activation
    blocks: tuple[tuple[Tensor, ...], ...]

    def rows(self, known: Tensor, start: int, stop: int) -> Tensor:
        """Returns the output rows of steps ``start`` to ``stop - 1``, ``(rows, size of the batch)``."""
        first, last = self.factors[start], self.factors[stop]
        if first == last:
            return known[:0]
        width = len(self.gather) // self.factors[-1]
        inputs = known.index_select(0, self.gather[first * width : last * width]).view(
            last - first, width, -1
        )
        value, ones = inputs, inputs[:, -1:]
        *hidden, output = (concatenated(blocks[start:stop], 0) for blocks in self.blocks)
        for layer, weight in enumerate(hidden, 1):
            units = self.activation(torch.bmm(weight, value))
            value = torch.cat((units, inputs if self.skip and layer == len(hidden) else ones), 1)
        rows = torch.bmm(output, value).flatten(0, 1)
        if self.positions is None:
            return rows
        positions = self.positions[self.steps.rows[start] : self.steps.rows[stop]]
        return rows.index_select(0, positions - first * self.num_rows if first else positions)


def _sorted_factors(
    dependency: Tensor, factors: Sequence[Sequence[int]], steps: Steps
) -> list[tuple[int, ...]]:
    """Returns the factors in the order of their steps, after checking that they are a partition and uniform."""
    groups = [tuple(int(row) for row in rows) for rows in factors]
    if not all(groups) or sorted(chain.from_iterable(groups)) != list(range(len(dependency))):
        raise ValueError(f"Expected factors to be a partition of the {len(dependency)} rows; got {groups}.")
    step_of = [bisect_right(steps.rows, row) - 1 for row in range(len(dependency))]
    for rows in groups:
        if any(step_of[row] != step_of[rows[0]] for row in rows):
            raise ValueError(
                f"Expected all rows of a factor in one step; got rows {rows} of several. Split it."
            )
        if (dependency[list(rows)] != dependency[rows[0]]).any():
            raise ValueError(
                f"Expected all rows of a factor to read the same columns; got rows {rows}. Split it."
            )
    return sorted(groups, key=lambda rows: step_of[rows[0]])
