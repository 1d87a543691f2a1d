"""Large sets of data, in few passes over their rows: sums over sets of what a small function makes of each row.

A plate of 100,000 rows makes every intermediate of a perceptron a fresh block of many megabytes, and to touch these
takes longer than to compute with them. Where the rows are data (no gradient flows to them, no particles in front),
`unit_sums` goes through them in chunks that fit a cache, once forward and once backward, and keeps nothing in between;
`evidence_sums` needs a few numbers a row only. Products with few columns are taken in the order in which the long side
is the inner one of contiguous memory, which is up to six times as fast. Change this module to sum another function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyro_nami.networks.reductions import Reduction, Segments

__all__ = ["applies", "evidence_sums", "input_sums", "unit_sums"]

_FEWEST = 8192
_MOST_HEADS = 4

_DERIVATIVES: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    F.silu: torch.ops.aten.silu_backward,
    torch.relu: lambda gradient, z: gradient * (z > 0),
    torch.tanh: lambda gradient, z: torch.ops.aten.tanh_backward(gradient, z.tanh()),
}


def applies(x: Tensor, over: Reduction, *, activation: Any = F.silu, heads: int = 1) -> bool:
    """Whether sums are taken here: many rows of data on a CPU, nothing in front, a known activation, not in a trace."""
    return (
        isinstance(over, Segments)
        and not x.requires_grad
        and not torch.jit.is_tracing()
        and x.device.type == "cpu"
        and len(over.index) >= _FEWEST
        and x.numel() == len(over.index) * x.shape[-1]
        and activation in _DERIVATIVES
        and heads <= _MOST_HEADS
    )


def unit_sums(activation: Any, x: Tensor, weight: Tensor, over: Any) -> Tensor:
    """Returns the sums over sets ``(*sets, units)`` of a hidden layer ``(units, inputs + 1)`` of rows of ``x``."""
    rows, columns, _ = over.sorted_rows(x)
    return _in_place(_UnitSums.apply(activation, over, rows, columns, weight), x, over)


def input_sums(x: Tensor, over: Any) -> Tensor:
    """Returns the sums over sets ``(*sets, inputs + 1)`` of rows of ``x`` and of ones."""
    return _in_place(over.sorted_rows(x)[2], x, over)


def evidence_sums(x: Tensor, weight: Tensor, most: float, over: Any) -> Tensor:
    """Returns the sums of `Evidence`, ``(*sets, heads * (inputs + 2))``; log precisions within ``most``.

    Both q and the regression of phi are linear in the inputs, so that all sums follow from those of exp(l) q (x, 1).
    """
    rows, columns, _ = over.sorted_rows(x)
    return _in_place(_EvidenceSums.apply(most, over, rows, columns, weight).flatten(1), x, over)


def _in_place(sums: Tensor, x: Tensor, over: Any) -> Tensor:
    """Returns sums ``(sets, columns)`` with the batch dims of ``x``."""
    return sums.reshape(x.shape[: over.axis] + (over.num_segments,) + x.shape[over.axis :][1:-1] + (-1,))


class _UnitSums(torch.autograd.Function):
    """Sums over sets, ``(sets, units)``, of a hidden layer of rows that are sorted by their set."""

    @staticmethod
    def forward(ctx: Any, activation: Any, over: Segments, rows: Tensor, columns: Tensor, weight: Tensor) -> Tensor:
        ctx.activation, ctx.over = activation, over
        ctx.save_for_backward(rows, columns, weight)
        sums = rows.new_zeros(over.num_segments, len(weight))
        for chunk in over.chunks:
            values = activation(rows[chunk.rows] @ weight.t())
            sums[chunk.sets] += F.embedding_bag(chunk.arange, values, chunk.offsets, mode="sum")
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None, Tensor]:
        rows, columns, weight = ctx.saved_tensors
        total = weight.new_zeros(weight.shape[::-1])  # row by row, as products are fast
        for chunk in ctx.over.chunks:
            gradient = gradients[0].index_select(0, chunk.segments)
            gradient = _DERIVATIVES[ctx.activation](gradient, rows[chunk.rows] @ weight.t())
            total.addmm_(columns[:, chunk.rows], gradient)
        return None, None, None, None, total.t()


class _EvidenceSums(torch.autograd.Function):
    """Sums over sets, ``(sets, heads, inputs + 2)``, of the evidence of rows that are sorted by their set."""

    @staticmethod
    def forward(ctx: Any, most: float, over: Segments, rows: Tensor, columns: Tensor, weight: Tensor) -> Tensor:
        log_precision, slope = (weight @ columns).chunk(2)
        precision = log_precision.clamp(-most, most).exp_()
        force = precision * slope
        arange, offsets = over.bags
        sums = torch.stack(
            [
                F.embedding_bag(arange, rows, offsets, mode="sum", per_sample_weights=head.contiguous())
                for head in force
            ],
            1,
        )
        ctx.over, ctx.within = over, log_precision.abs() < most
        ctx.save_for_backward(rows, columns, weight, precision, force, sums)
        squares = (sums * weight[len(force) :]).sum(-1, keepdim=True).clamp_(min=0)  # which only rounding makes smaller
        return torch.cat((squares, sums[..., -1:], sums[..., :-1]), -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None, Tensor]:
        rows, columns, weight, precision, force, sums = ctx.saved_tensors
        heads, inputs = len(force), len(columns)
        by_squares, by_force, by_inputs = gradients[0].split([1, 1, inputs - 1], -1)
        by_sums = torch.cat((by_inputs, by_force), -1) + by_squares * weight[heads:]
        spread = by_sums.permute(1, 2, 0).reshape(heads * inputs, -1).index_select(1, ctx.over.sorted_index)
        by_row = (spread.view(heads, inputs, -1) * columns).sum(1)
        by_linear = torch.cat((by_row * force * ctx.within, by_row * precision))
        total = by_linear @ columns.t()
        total[heads:] += (by_squares * sums).sum(0)
        return None, None, None, None, total
