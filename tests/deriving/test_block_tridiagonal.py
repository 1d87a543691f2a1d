"""Block-tridiagonal systems, against dense algebra."""

import pytest
import torch

from pyro_nami.deriving.block_tridiagonal import solved_blocks


def system(n, m, batch=()):
    """Returns a positive definite matrix, dense and in blocks, and a right-hand side."""
    torch.manual_seed(n * m)
    size = n * m
    root = torch.zeros(*batch, size, size, dtype=torch.float64)
    for t in range(n):
        own = slice(t * m, (t + 1) * m)
        root[..., own, own] = torch.randn(*batch, m, m, dtype=torch.float64) + 3 * torch.eye(m)
        if t:
            root[..., own, (t - 1) * m : t * m] = torch.randn(*batch, m, m, dtype=torch.float64)
    dense = root @ root.mT
    tiles = dense.unflatten(-1, (n, m)).unflatten(-3, (n, m)).transpose(-3, -2)
    diagonal = tiles.diagonal(dim1=-4, dim2=-3).movedim(-1, -3)
    lower = tiles.diagonal(-1, dim1=-4, dim2=-3).movedim(-1, -3)
    return dense, diagonal, lower, torch.randn(*batch, n, m, dtype=torch.float64)


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 13])
def test_solution_and_inverse(n, m, batch):
    dense, diagonal, lower, right = system(n, m, batch)
    found = solved_blocks(diagonal, lower, right)
    inverse = dense.inverse()
    tiles = inverse.unflatten(-1, (n, m)).unflatten(-3, (n, m)).transpose(-3, -2)
    solution = (inverse @ right.flatten(-2).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.x.flatten(-2), solution, rtol=1e-7, atol=1e-9)
    own = tiles.diagonal(dim1=-4, dim2=-3).movedim(-1, -3)
    torch.testing.assert_close(found.diagonal, own, rtol=1e-7, atol=1e-9)
    below = tiles.diagonal(-1, dim1=-4, dim2=-3).movedim(-1, -3)
    torch.testing.assert_close(found.lower, below, rtol=1e-7, atol=1e-9)


def test_gradients():
    _, diagonal, lower, right = system(5, 2)
    inputs = [each.requires_grad_() for each in (diagonal, lower, right)]
    assert torch.autograd.gradcheck(lambda d, l, r: solved_blocks(d @ d.mT, l, r), inputs)  # noqa: E741


def test_a_matrix_that_is_not_positive_definite_gives_no_numbers():
    _, diagonal, lower, right = system(6, 1)
    diagonal[2] = -1.0
    assert solved_blocks(diagonal, lower, right).x.isnan().any()
