"""Systems with a symmetric, positive definite, block-tridiagonal matrix, in a number of steps that grows as log n.

Every second block is eliminated, all of them at once (cyclic reduction), until one is left. On the
way back each block gets its part of the solution, and of the inverse those blocks that lie where
the matrix has some.

References:
    Golub and Van Loan 2013, Matrix Computations, section 4.5 (block cyclic reduction).
    Rue and Martino 2007, Approximate Bayesian inference for hierarchical Gaussian Markov random field models (selected
    inversion).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Solved", "solved_blocks"]


class Solved(NamedTuple):
    """The solution of a system, and blocks of the inverse of its matrix.

    Attributes:
        x: the solution, ``(*batch, n, m)``.
        diagonal: blocks (t, t) of the inverse, ``(*batch, n, m, m)``.
        lower: blocks (t + 1, t) of the inverse, ``(*batch, n - 1, m, m)``.
    """

    x: Tensor
    diagonal: Tensor
    lower: Tensor


def solved_blocks(diagonal: Tensor, lower: Tensor, right: Tensor) -> Solved:
    """Solves a system of n blocks of m numbers; entries are no numbers where the matrix is not positive definite.

    Args:
        diagonal: blocks (t, t) of the matrix, ``(*batch, n, m, m)``.
        lower: its blocks (t + 1, t), ``(*batch, n - 1, m, m)``.
        right: the right-hand side, ``(*batch, n, m)``.

    Example:
        >>> two = torch.tensor([2.0, 2.0, 2.0]).reshape(3, 1, 1)
        >>> solved_blocks(two, -torch.ones(2, 1, 1), torch.tensor([[1.0], [0.0], [1.0]])).x.flatten()
        tensor([1., 1., 1.])
    """
    n = diagonal.shape[-3]
    if n == 1:
        inverse = _inverse(diagonal)
        return Solved(_times(inverse, right), inverse, lower)
    even, odd = slice(0, None, 2), slice(1, None, 2)
    inverse = _inverse(diagonal[..., odd, :, :])
    # blocks (odd, even before) and (even after, odd); the last odd block may have none after it
    before, after = lower[..., even, :, :], lower[..., odd, :, :]
    from_before = -inverse @ before
    count = after.shape[-3]
    from_after = -inverse[..., :count, :, :] @ after.mT
    alone = _times(inverse, right[..., odd, :])
    # what elimination adds to the even blocks before and after each odd block
    left = _Sums(diagonal[..., even, :, :], right[..., even, :])
    left.add(slice(0, inverse.shape[-3]), before.mT @ from_before, -_times(before.mT, alone))
    left.add(slice(1, count + 1), after @ from_after, -_times(after, alone[..., :count, :]))
    between = after @ from_before[..., :count, :, :]
    rest = solved_blocks(left.matrix, between, left.vector)

    x, cov = rest.x, rest.diagonal
    m = inverse.shape[-3]
    x_odd = alone + _times(from_before, x[..., :m, :])
    x_odd = _added(x_odd, _times(from_after, x[..., 1 : count + 1, :]))
    with_before = from_before @ cov[..., :m, :, :]
    with_before = _added(with_before, from_after @ rest.lower[..., :count, :, :], 3)
    with_after = (
        from_before[..., :count, :, :] @ rest.lower[..., :count, :, :].mT
        + from_after @ cov[..., 1 : count + 1, :, :]
    )
    own = inverse + with_before @ from_before.mT
    own = _added(own, with_after @ from_after.mT, 3)
    return Solved(
        _interleaved(x, x_odd, -2),
        _interleaved(cov, own, -3),
        _interleaved(with_before, with_after.mT, -3),
    )


class _Sums:
    """Blocks of a matrix and a vector to which others are added, at a range of places."""

    def __init__(self, matrix: Tensor, vector: Tensor) -> None:
        self.matrix, self.vector = matrix, vector

    def add(self, place: slice, matrix: Tensor, vector: Tensor) -> None:
        count = self.matrix.shape[-3]
        before, after = place.start, count - place.stop
        pad = torch.nn.functional.pad
        self.matrix = self.matrix + pad(matrix, (0, 0, 0, 0, before, after))
        self.vector = self.vector + pad(vector, (0, 0, before, after))


def _added(total: Tensor, first: Tensor, dims: int = 2) -> Tensor:
    """Returns blocks to the first of which others are added."""
    missing = total.shape[-dims] - first.shape[-dims]
    if not missing:
        return total + first
    return total + torch.nn.functional.pad(first, (0, 0) * (dims - 1) + (0, missing))


def _interleaved(even: Tensor, odd: Tensor, dim: int) -> Tensor:
    """Returns blocks that lie in turn along a dim, the first of which is an even one."""
    count = odd.shape[dim]
    pairs = torch.stack((even.narrow(dim, 0, count), odd), dim).flatten(dim - 1, dim)
    rest = even.shape[dim] - count
    return torch.cat((pairs, even.narrow(dim, count, rest)), dim) if rest else pairs


def _inverse(matrix: Tensor) -> Tensor:
    if matrix.shape[-1] == 1:
        return torch.where(matrix > 0, matrix, torch.nan).reciprocal()
    lower, failed = torch.linalg.cholesky_ex(matrix)
    lower = torch.where((failed > 0)[..., None, None], torch.nan, lower)
    return torch.cholesky_inverse(lower)


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    if matrix.shape[-1] == 1:
        return matrix[..., 0] * x
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)
