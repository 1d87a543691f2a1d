"""Systems with a symmetric, positive definite, block-tridiagonal matrix, in a number of steps that grows as log n.

Every second block is eliminated, all of them at once (cyclic reduction), until one is left. On the
way back each block gets its part of the solution, and the blocks of the inverse that lie where the
matrix has some.

References:
    Golub and Van Loan 2013, Matrix Computations, section 4.5 (block cyclic reduction).
    Rue and Martino 2007, Approximate Bayesian inference for hierarchical Gaussian Markov random field models (selected
    inversion).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyro_nami.deriving.gaussian_levels import cholesky, times

__all__ = ["Solved", "inverse_of_blocks", "root_of_blocks", "solved_blocks"]


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
    """Solves a system of n blocks of m numbers; entries are NaN where the matrix is not positive definite.

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
        inverse = inverse_of_blocks(diagonal)
        return Solved(times(inverse, right), inverse, lower)
    even, odd = slice(0, None, 2), slice(1, None, 2)
    # Blocks of zeros at the end, if n is even: then each odd block lies between two even ones.
    added = 1 - n % 2
    inverse = _padded(inverse_of_blocks(diagonal[..., even, :, :]), 0, added)
    alone = times(inverse, pad(right[..., even, :], (0, 0, 0, added)))
    lower = _padded(lower, 0, added)
    # Each even block is moved by the odd ones before and after it; the first has none before, the last none after.
    by_before = -inverse @ _padded(lower[..., odd, :, :], 1, 0)
    by_after = -inverse @ _padded(lower[..., even, :, :].mT, 0, 1)
    # Each odd block reads the even ones before and after it.
    before, after = lower[..., even, :, :], lower[..., odd, :, :].mT
    rest = solved_blocks(
        diagonal[..., odd, :, :]
        + before @ by_after[..., :-1, :, :]
        + after @ by_before[..., 1:, :, :],
        before[..., 1:, :, :] @ by_before[..., 1:-1, :, :],
        right[..., odd, :] - times(before, alone[..., :-1, :]) - times(after, alone[..., 1:, :]),
    )

    x_before, x_after = pad(rest.x, (0, 0, 1, 0)), pad(rest.x, (0, 0, 0, 1))
    x = alone + times(by_before, x_before) + times(by_after, x_after)
    # covariances of each even block with the odd ones before and after it, and of both of these
    own_before, own_after = _padded(rest.diagonal, 1, 0), _padded(rest.diagonal, 0, 1)
    across = _padded(rest.lower, 1, 1)
    with_before = by_before @ own_before + by_after @ across
    with_after = by_before @ across.mT + by_after @ own_after
    own = inverse + with_before @ by_before.mT + with_after @ by_after.mT
    return Solved(
        _interleaved(x, rest.x, -2)[..., :n, :],
        _interleaved(own, rest.diagonal, -3)[..., :n, :, :],
        _interleaved(with_after.mT, with_before[..., 1:, :, :], -3)[..., : n - 1, :, :],
    )


def root_of_blocks(matrix: Tensor) -> Tensor:
    """Returns the Cholesky factors of blocks ``(*batch, m, m)``; NaN where one is not positive definite."""
    root, failed = cholesky(matrix)
    return torch.where(failed[..., None, None], torch.nan, root)


def inverse_of_blocks(matrix: Tensor) -> Tensor:
    """Returns the inverses of blocks ``(*batch, m, m)``; NaN where one is not positive definite."""
    if matrix.shape[-1] == 1:  # many times as fast
        return torch.where(matrix > 0, matrix, torch.nan).reciprocal()
    return torch.cholesky_inverse(root_of_blocks(matrix))


def _padded(blocks: Tensor, before: int, after: int) -> Tensor:
    """Returns blocks ``(*batch, n, m, m)`` with zeros before and after them."""
    return pad(blocks, (0, 0, 0, 0, before, after))


def _interleaved(even: Tensor, odd: Tensor, dim: int) -> Tensor:
    """Returns blocks that alternate along a dim; of even ones there is one more."""
    count = odd.shape[dim]
    pairs = torch.stack((even.narrow(dim, 0, count), odd), dim).flatten(dim - 1, dim)
    return torch.cat((pairs, even.narrow(dim, count, 1)), dim)
