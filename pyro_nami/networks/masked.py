"""Perceptrons whose outputs depend on exactly the inputs that a boolean matrix allows, with shared hidden units.

All steps together cost about as much as one dense pass, by a blocked triangular scheme: what becomes known is added at
once to the pre-activations of the few steps that follow, and to those of later steps in one product for many steps
together, when they are first needed. Change this module to change that scheme; `masks` says who is connected to whom.
"""

from __future__ import annotations

__all__ = ["MaskedMLP"]

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_nami.networks.masks import StepPlan, check_width, layer_masks, step_plan
from pyro_nami.networks.passes import SteppedState, concatenated, expand_batch
from pyro_nami.networks.stepped import Activation, Layers, SteppedMLP

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
        device, dtype: of the parameters.

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

    def _lay_out(self, dependency: Tensor, hidden_features: Sequence[int]) -> Layers:
        dependency = dependency.cpu()
        hidden, output, last_columns = layer_masks(dependency, hidden_features)
        if not self.skip:
            check_width(dependency, (*hidden, output))
        self._plan = step_plan(self.steps, last_columns, self.skip)
        self._dense_plan = self._plan.merged()
        direct = [dependency] if self.skip and hidden else []
        masks = [F.pad(mask, (0, 1), value=True) for mask in (*hidden, torch.cat([output, *direct], 1))]
        rows = torch.arange(self.out_features, device="cpu")
        gather = F.pad(torch.arange(1, self.in_features + 1, device="cpu"), (0, 1)).unsqueeze(0)
        return Layers(masks, [tuple(mask.shape) for mask in masks], rows, gather)

    def _start(self, whole: bool) -> SteppedState:
        plan = self._dense_plan if whole else self._plan
        hidden, output, at_zero = self._weights()
        parts = [weight.t().split(sizes) for weight, sizes in zip((*hidden, output), plan.split_sizes)]
        bias = [part[-1] for part in parts]
        bias[-1] = bias[-1] - at_zero.flatten()
        weights = _MaskedWeights(plan.sources[0], plan, self.activation, tuple(part[:-1] for part in parts))
        return SteppedState(weights, 0, torch.Size(), _Memory((_Frame(0, plan.num_steps, tuple(bias)),), ()))


class _Frame(NamedTuple):
    """Pre-activations of consecutive steps, up to ``stop``, that lack what became known in steps from ``since`` on.

    ``totals`` are ``(size of the batch, units)`` for each layer, or ``(1, units)`` while nothing was added to the bias.
    """

    since: int
    stop: int
    totals: tuple[Tensor, ...]


class _Memory(NamedTuple):
    """All steps to come, as contiguous frames, the nearest last, which begins with the next step and lacks nothing.

    ``known`` is what other frames lack, as (step, (inputs, units of layer 0, ...)).
    """

    frames: tuple[_Frame, ...]
    known: tuple[tuple[int, tuple[Tensor, ...]], ...]


class _MaskedWeights(NamedTuple):
    """Constants of one pass. ``blocks[layer]`` are the masked weights, transposed, ``(features, units)``, and cut.

    They are cut into the steps of the first source that the layer reads, then into those of the second.

    The steps that are left are halved into a near part and a frame that waits, until `_BLOCK` steps are left. A pass of
    S steps so makes S / _BLOCK large products beside S small ones, and needs no schedule fixed in advance: any run of
    steps may be taken at once.
    """

    columns: tuple[int, ...]
    plan: StepPlan
    activation: Activation
    blocks: tuple[tuple[Tensor, ...], ...]

    def advance(self, memory: _Memory, x: Tensor, step: int, stop: int) -> tuple[Tensor, _Memory]:
        *far, near = memory.frames
        if near.stop < stop or near.stop == step:
            *far, near = self._completed(memory, step, stop)
        known = memory.known if far else ()
        while near.stop - step > _BLOCK:
            middle = max(step + (near.stop - step + 1) // 2, stop)
            if middle == near.stop:
                break
            near, frame = self._cut(near, step, middle)
            far.append(frame)
        end, size, depth = near.stop, x.shape[0], len(near.totals) - 1
        values, rest = [x], []
        for layer, (total, reads, target) in enumerate(zip(near.totals, self.plan.reads, self.plan.targets)):
            first, split, last = target[step], target[stop], target[end]
            if last > first:
                total = self._add(layer, total, [[values[i]] for i in reads], step, stop, first, last)
            if stop < end:
                total, later = total.split((split - first, last - split), 1)
                rest.append(later)
            if total.shape[0] != size:
                total = total.expand(size, -1)
            values.append(self.activation(total) if split > first and layer < depth else total)
        *units, rows = values
        if far:
            known = (*known, (step, tuple(units)))
        return rows, _Memory((*far, _Frame(stop, end, tuple(rest))), known)

    def expanded(self, memory: _Memory, step: int, old: torch.Size, new: torch.Size) -> _Memory:
        """Adds all that is known at the smaller batch first."""
        if not step:
            return memory
        (near,) = self._completed(memory, step, self.plan.num_steps)
        totals = (total if len(total) == 1 else expand_batch(total, old, new) for total in near.totals)
        return _Memory((near._replace(totals=tuple(totals)),), ())

    def _completed(self, memory: _Memory, step: int, stop: int) -> list[_Frame]:
        """Returns the frames, of which the nearest holds the next step and all steps before ``stop``."""
        *far, near = memory.frames
        while near.stop < stop or near.stop == step:
            frame, totals = far.pop(), []
            for layer, (total, reads, target) in enumerate(zip(frame.totals, self.plan.reads, self.plan.targets)):
                lacking = [[values[i] for begin, values in memory.known if begin >= frame.since] for i in reads]
                bounds = target[near.stop], target[frame.stop]
                totals.append(self._add(layer, total, lacking, frame.since, step, *bounds))
            if near.stop > step:
                totals = [_joined(*pair) for pair in zip(near.totals, totals)]
            near = _Frame(step, frame.stop, tuple(totals))
        return [*far, near]

    def _cut(self, frame: _Frame, step: int, middle: int) -> tuple[_Frame, _Frame]:
        """Returns the parts of a frame that begins with a step, before and after another one."""
        parts = []
        for total, target in zip(frame.totals, self.plan.targets):
            first, split, last = target[step], target[middle], target[frame.stop]
            parts.append(total.split((split - first, last - split), 1))
        near, far = zip(*parts)
        return _Frame(step, middle, near), _Frame(step, frame.stop, far)

    def _add(
        self, layer: int, total: Tensor, sources: list[list[Tensor]], since: int, step: int, first: int, last: int
    ) -> Tensor:
        """Returns pre-activations of units ``first`` to ``last - 1`` with what became known in some steps added.

        A large batch is neither copied nor multiplied by a matrix of few columns row by row: both take longer than the
        products themselves.

        Args:
            sources: for each source that the layer reads, its features of the steps from ``since`` to ``step - 1``.
        """
        if first == last:
            return total
        blocks, count = self.blocks[layer], self.plan.num_steps
        weights = [blocks[i * count + since : i * count + step] for i in range(len(sources))]
        large = sources[0][0].shape[0] >= _LARGE
        if len(sources) > 1 and not large:
            sources, weights = [list(chain(*sources))], [tuple(chain(*weights))]
        for parts, block_parts in zip(sources, weights):
            value, block = concatenated(parts), concatenated(block_parts, 0)
            if value.shape[1]:
                block = block if block.shape[1] == last - first else block[:, first:last]
                if large and block.shape[1] < block.shape[0]:
                    block = block.t().contiguous().t()
                total = torch.addmm(total, value, block)
        return total


def _joined(near: Tensor, far: Tensor) -> Tensor:
    """Returns the pre-activations of steps side by side; some of them may be a bias still, of size 1."""
    size = max(len(near), len(far))
    return torch.cat((near.expand(size, -1), far.expand(size, -1)), 1)
