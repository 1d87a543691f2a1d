"""Large sets of data, chunk by chunk: sums over sets of what a small function makes of each row.

A plate of 100,000 rows makes every intermediate of a perceptron a fresh block of many megabytes, and to touch these
takes longer than to compute with them. Where the rows are data (no gradient flows to them, no particles in front),
`summed` goes through them in chunks that fit a cache, once forward and once backward, and keeps nothing in between.
Change this module to sum another function of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyro_nami.nn.reductions import Reduction, Segments

__all__ = ["EvidenceRows", "RowFunction", "UnitRows", "applies", "summed"]

_FEWEST = 8192

_DERIVATIVES: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    F.silu: torch.ops.aten.silu_backward,
    torch.relu: lambda gradient, z: gradient * (z > 0),
    torch.tanh: lambda gradient, z: torch.ops.aten.tanh_backward(gradient, z.tanh()),
}


class RowFunction(ABC):
    """A function of a row and a weight matrix ``(units, inputs + 1)``, with its derivative in the weight."""

    @abstractmethod
    def values(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Returns ``(rows, columns)`` from rows ``(rows, inputs + 1)``, which end in a one."""

    @abstractmethod
    def gradient(self, rows: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        """Returns the derivative in z = rows weight^T, ``(rows, units)``, from that in the values."""


class UnitRows(NamedTuple("UnitRows", [("activation", Any)]), RowFunction):
    """Units of a perceptron's only hidden layer."""

    def values(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self.activation(rows @ weight.t())

    def gradient(self, rows: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        return _DERIVATIVES[self.activation](gradient, rows @ weight.t())


class EvidenceRows(NamedTuple("EvidenceRows", [("heads", int), ("most", float)]), RowFunction):
    """The terms of `pyro_nami.nn.Evidence`, whose log precisions stay within ``most``."""

    def values(self, rows: Tensor, weight: Tensor) -> Tensor:
        _, slope, force = self._terms(rows, weight)
        inputs = rows[:, :-1].unsqueeze(1) * force.unsqueeze(2)
        return torch.cat(((force * slope).unsqueeze(2), force.unsqueeze(2), inputs), 2).flatten(1)

    def gradient(self, rows: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        log_precision, slope, force = self._terms(rows, weight)
        by_precision, by_force, by_inputs = gradient.unflatten(1, (self.heads, -1)).split(
            [1, 1, rows.shape[1] - 1], 2
        )
        by_precision = by_precision.squeeze(2)
        by_force = by_force.squeeze(2) + by_precision * slope + (by_inputs @ rows[:, :-1].unsqueeze(2)).squeeze(2)
        by_slope = by_precision * force + by_force * log_precision.clamp(-self.most, self.most).exp()
        return torch.cat((by_force * force * (log_precision.abs() < self.most), by_slope), 1)

    def _terms(self, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_precision, slope = (rows @ weight.t()).split(self.heads, 1)
        return log_precision, slope, log_precision.clamp(-self.most, self.most).exp() * slope


def applies(x: Tensor, over: Reduction, activation: Any = F.silu) -> bool:
    """Whether `summed` serves here: many rows of data on a CPU, with nothing in front, by a known activation."""
    return (
        isinstance(over, Segments)
        and not x.requires_grad
        and x.device.type == "cpu"
        and len(over.index) >= _FEWEST
        and x.numel() == len(over.index) * x.shape[-1]
        and activation in _DERIVATIVES
    )


def summed(function: RowFunction, x: Tensor, weight: Tensor, over: Any) -> Tensor:
    """Returns the sums over sets, ``(*sets, columns)``, of a function of rows ``x`` ``(*batch, inputs)``."""
    sums = _Summed.apply(function, over, over.sorted_rows(x), weight)
    return sums.reshape(x.shape[: over.axis] + (over.num_segments,) + x.shape[over.axis :][1:-1] + (-1,))


class _Summed(torch.autograd.Function):
    """Sums over sets, ``(sets, columns)``, of a function of rows that are sorted by their set."""

    @staticmethod
    def forward(ctx: Any, function: RowFunction, over: Segments, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.function, ctx.over = function, over
        ctx.save_for_backward(rows, weight)
        sums: Any = None
        for chunk in over.chunks:
            values = function.values(rows[chunk.rows], weight)
            if sums is None:
                sums = values.new_zeros(over.num_segments, values.shape[1])
            sums[chunk.sets] += F.embedding_bag(chunk.arange, values, chunk.offsets, mode="sum")
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, Tensor]:
        rows, weight = ctx.saved_tensors
        total = torch.zeros_like(weight)
        for chunk in ctx.over.chunks:
            here = rows[chunk.rows]
            gradient = gradients[0].index_select(0, chunk.segments)
            total.addmm_(ctx.function.gradient(here, weight, gradient).t(), here)
        return None, None, None, total
