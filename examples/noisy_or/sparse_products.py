"""Products with a sparse matrix, at a cost of its entries, that can be differentiated any number of times.

The backward pass of torch 2.13's own sparse product fills a dense matrix on a CPU. The two
functions here are linear in each argument, and each other's derivatives.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import embedding_bag, pad

__all__ = ["entries", "is_sparse", "sparse_linear"]

_LAYOUTS = (torch.sparse_coo, torch.sparse_csr)
CHUNK = 2**20  # numbers held at once where entries are gathered; ten times as many take 80 MB more


def is_sparse(matrix: Tensor) -> bool:
    """Returns whether `sparse_linear` takes the matrix: COO or CSR."""
    return matrix.layout in _LAYOUTS


def entries(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns values, row and column indices ``(entries,)`` of a COO or CSR matrix; gradients flow into its values."""
    if matrix.layout == torch.sparse_coo:
        matrix = matrix.coalesce()
        return matrix.values(), *matrix.indices()
    rows = torch.arange(matrix.shape[0], device=matrix.device).repeat_interleave(
        matrix.crow_indices().diff()
    )
    return matrix.values(), rows, matrix.col_indices().long()


def sparse_linear(z: Tensor, matrix: Tensor) -> Tensor:
    """Returns ``z @ matrix.T``, ``(*batch, D)``, in time and memory of batch times (entries + D + K) at most.

    Args:
        z: ``(*batch, K)``.
        matrix: ``(D, K)``, COO or CSR.

    Example:
        >>> sparse_linear(torch.tensor([1.0, 2.0]), torch.tensor([[0.0, 3.0], [1.0, 0.0]]).to_sparse())
        tensor([6., 1.])
    """
    batch = z.shape[:-1]
    columns = z.reshape(math.prod(batch), z.shape[-1]).T
    product = _Product.apply(*entries(matrix), columns, matrix.shape[0])
    return product.T.reshape(*batch, matrix.shape[0])


class _Product(Function):
    """The product ``(D, B)`` of the matrix with given entries and a dense one ``(K, B)``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, rows: Tensor, columns: Tensor, dense: Tensor, size: int) -> Tensor:
        order = rows.argsort(stable=True)
        starts = pad(rows.bincount(minlength=size).cumsum(0), (1, 0))
        options: Any = {"mode": "sum", "include_last_offset": True}
        return embedding_bag(
            columns[order], dense, starts, per_sample_weights=values[order], **options
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        values, rows, columns, dense = ctx.saved_tensors
        needs = ctx.needs_input_grad
        of_values = _Entries.apply(grad, dense, rows, columns) if needs[0] else None
        of_dense = _Product.apply(values, columns, rows, grad, dense.shape[0]) if needs[3] else None
        return of_values, None, None, of_dense, None


class _Entries(Function):
    """The entries of ``left @ right.T`` at given rows and columns; `left` is ``(D, B)``, `right` ``(K, B)``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(left: Tensor, right: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        chunks = zip(
            *(index.split(max(1, CHUNK // max(1, left.shape[1]))) for index in (rows, columns))
        )
        return torch.cat([(left[row] * right[column]).sum(-1) for row, column in chunks])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        left, right, rows, columns = ctx.saved_tensors
        needs = ctx.needs_input_grad
        of_left = _Product.apply(grad, rows, columns, right, left.shape[0]) if needs[0] else None
        of_right = _Product.apply(grad, columns, rows, left, right.shape[0]) if needs[1] else None
        return of_left, of_right, None, None
