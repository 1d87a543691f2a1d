"""Perceptrons whose outputs depend on exactly the inputs that a boolean matrix allows, computed at once or in steps.

`MaskedMLP` is one network for all rows, with shared hidden units; `SeparateMLP` gives every factor its own. Both are
used in two ways. For a density all inputs are known and ``mlp(x)`` is one dense pass. For sampling the inputs arrive
one step at a time, each drawn from rows emitted before::

    state = mlp.start()
    rows, state = state.advance(context, 1)
    rows, state = state.advance(sample(rows), 2)

A state is an immutable value, so a pass may branch, and no tensor that carries values is ever written in place.
Every hidden unit is computed once, at the step at which its inputs are complete, and all steps together cost about as
much as one dense pass. In `MaskedMLP` that takes a blocked triangular scheme (`MaskedState`): what becomes known is
added at once to the pre-activations of the few steps that follow, and to those of later steps in one product for
many steps together, when they are first needed.

Parameters are one tensor a layer with the bias as last column (optimizers that loop over tensors stay fast), and are
read by attribute at the start of every pass, so that they may be replaced by name, as Pyro does.
"""

from __future__ import annotations

__all__ = ["MaskedMLP", "MaskedState"]

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_nami.networks.masks import StepPlan, check_width, layer_masks, step_plan
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

# Steps that what becomes known is added to at once; later steps wait. More saves calls, fewer save memory traffic.
_BLOCK = 8
_LARGE = 2048  # a batch


class MaskedMLP(SteppedMLP):
    """A perceptron whose Jacobian's support is exactly a given dependency matrix, whatever its widths.

    Row i is a bias, plus (with ``skip``) a linear function of the inputs that it may read, plus a function of the
    hidden units whose label it contains (see `masks`). Rows that may read nothing are a bias alone. The labels are
    the distinct nonempty rows of ``dependency``, each given to the same number of units of every layer, give or take
    one, where the layer is wide enough (`masks.allot_labels` says what narrower layers do).

    Inputs and outputs come in *steps*: when the columns of step s are known, the rows of step s can be emitted.
    Columns and rows are numbered in step order. A step may have no columns, or no rows.

    Parameters are ``layer_0`` ``(units, inputs + 1)``, ``layer_1`` ``(units, units below + 1)``, ..., ``output``
    ``(outputs, units + inputs + 1)`` (without ``skip``: ``(outputs, units + 1)``). If no row reads anything, there
    are no units.

    Args:
        dependency: boolean tensor ``(outputs, inputs)``; entry (i, j) says that output i may read input j.
        hidden_features: units in each hidden layer. None at all, ``()``, makes the network linear.
        input_splits: number of columns that become known at each step; one step by default.
        output_splits: number of rows that are emitted at each step.
        skip: whether rows also read their inputs directly. Linear-Gaussian regressions are then represented exactly.
        activation: elementwise function of the hidden layers.
        base: what weights are divided beyond.
        device: device of the parameters.
        dtype: floating-point type of the parameters.

    Raises:
        ValueError: if a row reads a column of a later step; or without ``skip``, if the hidden layers are too narrow
            to carry every dependency.

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

    def __init__(
        self,
        dependency: Tensor,
        hidden_features: Sequence[int] = (64,),
        *,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        skip: bool = True,
        activation: Activation = F.silu,
        base: Base = Base(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dependency, hidden_features, input_splits, output_splits, skip, activation)
        hidden, output, last_columns = layer_masks(dependency, hidden_features)
        if not skip:
            check_width(dependency.cpu(), (*hidden, output))
        direct = [dependency.cpu()] if skip and hidden else []
        self._units = len(output[0]) if hidden and len(output) else 0
        masks = [*hidden, torch.cat([output, *direct], 1)]
        masks = [F.pad(mask.float(), (0, 1), value=1.0) for mask in masks]
        masks = self._multipliers(masks, base)
        self._plan = step_plan(self.steps, last_columns, skip)
        self._dense_plan = self._plan.merged()
        rows = torch.arange(self.out_features)
        shapes = [tuple(mask.shape) for mask in masks]
        self._add_layers(shapes, masks, rows, base.paced, device=device, dtype=dtype)

    def _multipliers(self, masks: Sequence[Tensor], base: Base) -> list[Tensor]:
        *hidden, output = (mask[:, :-1] != 0 for mask in masks)
        widths = [base.inputs, *[base.hidden] * len(hidden)]
        parts = [shares(mask, width) for mask, width in zip(hidden, widths)]
        units, direct = output[:, : self._units], output[:, self._units :]
        rows = [shares(units, base.output)] if hidden else []
        rows += [shares(direct, base.inputs)] if direct.shape[1] else []
        parts.append(torch.cat(rows, 1) if rows else units.float())
        return [F.pad(part, (0, 1), value=1.0) for part in parts]

    def direct_mask(self) -> Tensor:
        return self._buffers["output_mask"][:, self._units : -1] != 0  # type: ignore[index]

    def _direct(self, row: int, columns: Tensor) -> tuple[Any, ...]:
        return row, columns + self._units

    def _biases(self, weights: Tensor) -> Tensor:
        return weights[:, -1]

    def _write_biases(self, values: Tensor) -> None:
        self.output[:, -1] = values

    def start(self) -> MaskedState:
        """Returns the state of a pass in which no input is known yet."""
        return self._start(self._plan)

    def forward(self, x: Tensor) -> Tensor:
        """Returns all rows, ``(*batch, outputs)``, from all inputs, ``(*batch, inputs)``, in one dense pass."""
        return self._start(self._dense_plan).advance(x, 1)[0]

    def _start(self, plan: StepPlan) -> MaskedState:
        *hidden, output = self._weights()
        parts = [weight.t().split(sizes) for weight, sizes in zip((*hidden, output), plan.split_sizes)]
        bias = [part[-1] for part in parts]
        if hidden:
            # Units are taken relative to what they are at inputs of zero.
            units = self.activation(hidden[0][:, -1])
            for weight in hidden[1:]:
                units = self.activation(torch.addmv(weight[:, -1], weight[:, :-1], units))
            bias[-1] = bias[-1] - output[:, : len(units)] @ units
        run = _Run(plan, self.activation, tuple(part[:-1] for part in parts))
        return MaskedState(run, 0, torch.Size(), plan.num_steps, tuple(bias), (), ())


class MaskedState(NamedTuple):
    """A pass through a `MaskedMLP` in which the inputs of the steps before ``step`` are known.

    Pre-activations are kept as ``(size of the batch, units)``, or ``(1, units)`` while nothing was added to the bias.
    Those of steps ``step`` to ``end - 1`` are *pending*: all that is known has been added. Later steps lie in
    *frames*, innermost last, which still lack the features that became known since they were set aside. A range of
    steps is halved into a near part and a frame until `_BLOCK` steps are left, so a pass of S steps makes S / _BLOCK
    large products beside S small ones, and needs no schedule fixed in advance: any run of steps may be merged.

    Attributes:
        run: constants of the pass.
        step: the next step.
        batch_shape: broadcast shape of the batches so far.
        end: the step behind the last pending one.
        pending: per layer, pre-activations of the steps from ``step`` to ``end - 1``.
        frames: what is set aside, contiguous from ``end``, the nearest last.
        known: inputs and units since the first frame was set aside, as (step, (inputs, units of layer 0, ...)).
    """

    run: _Run
    step: int
    batch_shape: torch.Size
    end: int
    pending: tuple[Tensor, ...]
    frames: tuple[_Frame, ...]
    known: tuple[tuple[int, tuple[Tensor, ...]], ...]

    def advance(self, x: Tensor, stop: int) -> tuple[Tensor, MaskedState]:
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
        plan, activation = self.run.plan, self.run.activation
        start = self.step
        check_advance(plan.sources[0], start, x, stop)
        batch_shape, x = flatten(x, self.batch_shape)
        state = self if batch_shape == self.batch_shape else self._expand(batch_shape)
        if state.end < stop or state.end == start:
            state = state._complete(stop)
        if state.end - start > _BLOCK:
            state = state._set_aside(stop)
        end, size = state.end, len(x)
        values, pending = [x], []
        for layer, (reads, target) in enumerate(zip(plan.reads, plan.targets)):
            first, split, last = target[start], target[stop], target[end]
            total = state.pending[layer]
            if last > first:
                total = state.run.add(
                    layer, total, [values[source] for source in reads], start, stop, first, last
                )
            if stop < end:
                total, rest = total.split((split - first, last - split), 1)
                pending.append(rest)
            if total.shape[0] != size:
                total = total.expand(size, -1)
            values.append(activation(total) if split > first and layer + 1 < len(plan.targets) else total)
        *units, rows = values
        known = (*state.known, (start, tuple(units))) if state.frames else ()
        if len(batch_shape) != 1:
            rows = rows.reshape(*batch_shape, rows.shape[1])
        return rows, MaskedState(state.run, stop, batch_shape, end, tuple(pending), state.frames, known)

    def _expand(self, shape: torch.Size) -> MaskedState:
        """Returns the state at a larger batch shape, after adding all that is known at the smaller one."""
        state = self._complete(self.run.plan.num_steps) if self.frames else self
        pending = tuple(
            total if len(total) == 1 else expand_batch(total, self.batch_shape, shape)
            for total in state.pending
        )
        return state._replace(batch_shape=shape, pending=pending)

    def _complete(self, stop: int) -> MaskedState:
        """Returns the state with at least the next step, and all steps before ``stop``, pending."""
        pending, end, frames = self.pending, self.end, self.frames
        while end < stop or end == self.step:
            *rest, frame = frames
            totals = tuple(
                self._add_known(layer, total, frame.start, end, frame.stop)
                for layer, total in enumerate(frame.pending)
            )
            if end > self.step:
                totals = tuple(torch.cat(_same_size(pair), 1) for pair in zip(pending, totals))
            pending, end, frames = totals, frame.stop, tuple(rest)
        return self._replace(pending=pending, end=end, frames=frames, known=self.known if frames else ())

    def _add_known(self, layer: int, total: Tensor, since: int, start: int, stop: int) -> Tensor:
        """Adds what became known since a step to the pre-activations of steps ``start`` to ``stop - 1``."""
        target, reads = self.run.plan.targets[layer], self.run.plan.reads[layer]
        value = concatenated(
            [values[source] for source in reads for step, values in self.known if step >= since]
        )
        if value.shape[1] == 0 or target[start] == target[stop]:
            return total
        return torch.addmm(
            total, value, self.run.block(layer, since, self.step)[:, target[start] : target[stop]]
        )

    def _set_aside(self, stop: int) -> MaskedState:
        """Returns the state with no more than `_BLOCK` steps pending, or those before ``stop``."""
        bounds = [self.end]
        while bounds[0] - self.step > _BLOCK:
            middle = max(self.step + (bounds[0] - self.step + 1) // 2, stop)
            if middle == bounds[0]:
                break
            bounds.insert(0, middle)
        parts = []
        for target, total in zip(self.run.plan.targets, self.pending):
            cuts = [target[self.step], *(target[bound] for bound in bounds)]
            parts.append(total.split([after - before for before, after in pairwise(cuts)], 1))
        near, *far = zip(*parts)
        frames = [_Frame(self.step, bound, part) for bound, part in zip(bounds[1:], far)]
        return self._replace(end=bounds[0], pending=near, frames=(*self.frames, *reversed(frames)))


class _Run(NamedTuple):
    """Constants of one pass. ``blocks[layer]`` are the masked weights, transposed, ``(features, units)``, and cut.

    They are cut into the steps of the first source that the layer reads, then into those of the second.
    """

    plan: StepPlan
    activation: Activation
    blocks: tuple[tuple[Tensor, ...], ...]

    def block(self, layer: int, start: int, stop: int) -> Tensor:
        """Returns the weights from sources of steps ``start`` to ``stop - 1`` to all units."""
        blocks, count = self.blocks[layer], self.plan.num_steps
        parts = blocks[start:stop]
        if len(blocks) > count:
            parts += blocks[count + start : count + stop]
        return concatenated(parts, 0)

    def add(
        self, layer: int, total: Tensor, values: list[Tensor], start: int, stop: int, first: int, last: int
    ) -> Tensor:
        """Returns pre-activations of units ``first`` to ``last - 1``, with what sources of some steps add to them.

        A large batch is neither copied nor multiplied by a matrix of few columns row by row: both take longer than the
        products themselves.
        """
        large = len(values[0]) >= _LARGE
        if large:
            blocks, count = self.blocks[layer], self.plan.num_steps
            parts = [
                concatenated(blocks[i * count + start : i * count + stop], 0) for i in range(len(values))
            ]
        else:
            values, parts = [concatenated(values)], [self.block(layer, start, stop)]
        for value, block in zip(values, parts):
            if value.shape[1]:
                block = block if block.shape[1] == last - first else block[:, first:last]
                if large and block.shape[1] < block.shape[0]:
                    block = block.t().contiguous().t()
                total = torch.addmm(total, value, block)
        return total


class _Frame(NamedTuple):
    """Pre-activations per layer, set aside at step ``start``, of a range of steps that ends before ``stop``."""

    start: int
    stop: int
    pending: tuple[Tensor, ...]


def _same_size(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Returns both pre-activations at the size of the larger batch; one of them may be a bias still."""
    size = max(len(total) for total in pair)
    return tuple(total.expand(size, -1) for total in pair)
