"""Truncated Normals, against sums over fine grids, a Normal that is not cut, and laws of tails."""

import pyro.distributions as dist
import pytest
import torch

from pyro_nami.factors.truncated_normal import TruncatedNormal

INF = torch.inf
# Location, scale and bounds: the mode within, beside, far out on either side; flat, peaked, and with one bound or none.
CASES = [
    (0.2, 1.0, -1.0, 1.0), (3.0, 0.5, -1.0, 1.0), (-30.0, 1.0, 0.0, 1.0), (0.1, 1e4, -1.0, 1.0),
    (50.0, 0.01, -1.0, 1.0), (2e3, 1e3, -1.0, 1.0), (0.1, 1e-3, -1.0, 1.0), (-7.0, 1.0, 0.0, 9.0),
    (0.0, 1.0, 0.0, INF), (-40.0, 1.0, 0.0, INF), (5.0, 1.0, 0.0, INF), (40.0, 1.0, -INF, 0.0), (0.3, 1.0, -INF, INF),
]  # fmt: skip


def made(case, dtype=torch.float64):
    parameters = [torch.tensor(number, dtype=dtype, requires_grad=True) for number in case]
    return TruncatedNormal(*parameters), parameters


def grid(case):
    """Places where the mass is, evenly, and the density there but for a factor."""
    loc, scale, low, high = torch.tensor(case, dtype=torch.float64)
    mode = loc.clamp(low, high)
    reach = 12 * scale / (1 + (mode - loc).abs() / scale / 3)
    x = torch.linspace(
        max(low, mode - reach), min(high, mode + reach), 200_001, dtype=torch.float64
    )
    # less the density's own fall at the mode
    off = ((x - mode) * (x + mode - 2 * loc)) / (2 * scale**2)
    return x, (-off).exp()


@pytest.mark.parametrize("case", CASES)
def test_the_density_is_a_normals_over_its_mass(case):
    fn, _ = made(case)
    x, density = grid(case)
    expected = density.log() - torch.trapezoid(density, x).log()
    inner = slice(1, -1)
    torch.testing.assert_close(
        fn.log_prob(x[inner]).detach(), expected[inner], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("case", CASES)
def test_draws_have_the_distribution_function_of_the_density(case):
    x, density = grid(case)
    below = torch.cumulative_trapezoid(density, x)
    draws = made(case)[0].sample((40_000,)).sort().values
    place = torch.searchsorted(x, draws).clamp(1, len(below)) - 1
    ranks = (torch.arange(40_000) + 0.5) / 40_000
    # in 1 of 20,000 seeds it is not
    assert ((below / below[-1])[place] - ranks).abs().max() < 2.3 / 40_000**0.5


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_their_parameters(case):
    """Gradients of draws at the same noise, against differences."""

    def draws(parameters):
        torch.manual_seed(1)
        return TruncatedNormal(*parameters).rsample((50,)).sum()

    _, parameters = made(case)
    scale = case[1] / (1 + abs(case[0]))
    for i, gradient in enumerate(torch.autograd.grad(draws(parameters), parameters)):
        assert gradient.isfinite()
        if abs(case[i]) < INF:
            step = 1e-5 * min(1.0, scale) * max(1.0, abs(case[i])) if i else 1e-5 * case[1]
            moved = [
                [each.detach() + side * step * (i == j) for j, each in enumerate(parameters)]
                for side in (1, -1)
            ]
            difference = (draws(moved[0]) - draws(moved[1])) / (2 * step)
            torch.testing.assert_close(gradient, difference, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loc", [0.0, 10.0, -1e3, 1e6, -1e8])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_draws_are_within_what_a_uniform_prior_scores_however_far_the_location(loc, scale, dtype):
    fn, parameters = made((loc, scale, -1.0, 1.0), dtype)
    draws = fn.rsample((1000,))
    log_prob = fn.log_prob(draws)
    prior = dist.Uniform(torch.tensor(-1.0, dtype=dtype), torch.tensor(1.0, dtype=dtype))
    assert draws.dtype == log_prob.dtype == dtype
    assert log_prob.isfinite().all() and prior.log_prob(draws.detach()).isfinite().all()
    gradients = torch.autograd.grad(draws.sum() + log_prob.sum(), parameters)
    assert all(gradient.isfinite() for gradient in gradients)


def test_shapes_and_support():
    fn = TruncatedNormal(torch.zeros(3, 1), torch.tensor(1.0), torch.tensor(-1.0), torch.ones(4))
    assert fn.batch_shape == (3, 4) and fn.expand([2, 3, 4]).rsample((5,)).shape == (5, 2, 3, 4)
    assert fn.support.check(fn.sample()).all() and not fn.support.check(fn.sample() + 2).any()
    unchecked = TruncatedNormal(fn.loc, fn.scale, fn.low, fn.high, validate_args=False)
    assert (unchecked.log_prob(torch.tensor(1.5)) == -INF).all()
    with pytest.raises(ValueError, match="scale"):
        TruncatedNormal(
            torch.tensor(0.0),
            torch.tensor(-1.0),
            torch.tensor(0.0),
            torch.tensor(1.0),
            validate_args=True,
        )
