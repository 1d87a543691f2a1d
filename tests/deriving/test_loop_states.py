"""Derivatives of states along a band, against all derivatives one by one."""

import pytest
import torch

from pyro_nami.deriving.gaussian_levels import FEWEST_TOGETHER
from pyro_nami.deriving.loop_states import banded_derivatives

SIZE, WIDTH = 24, 8


class Doubled(torch.autograd.Function):
    """An operation that vmap does not know."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, slope):
        return 2 * slope


def sums(x, reach, double):
    """Sums of squares over the last few elements, each weighted by how long ago it is."""
    x = double(x)
    return torch.stack(
        [sum(x[s] ** 2 / (1 + t - s) for s in range(max(0, t - reach), t + 1)) for t in range(SIZE)]
    )


@pytest.mark.parametrize("double", [lambda x: 2 * x, Doubled.apply], ids=["plain", "not mapped"])
@pytest.mark.parametrize("reach", [1, FEWEST_TOGETHER, WIDTH])
def test_a_band_has_the_derivatives_of_the_whole(reach, double):
    torch.manual_seed(0)
    x = torch.randn(SIZE, dtype=torch.float64, requires_grad=True)
    whole = torch.autograd.functional.jacobian(lambda x: sums(x, reach, double), x)
    found = banded_derivatives(sums(x, reach, double), x, (0, reach), WIDTH, graph=False)
    apart = whole.unflatten(0, (-1, WIDTH)).unflatten(-1, (-1, WIDTH)).movedim(2, 1)
    torch.testing.assert_close(found.diagonal, apart.diagonal().movedim(-1, 0))
    torch.testing.assert_close(found.lower, apart.diagonal(-1).movedim(-1, 0))
