"""Densities on grids, and the search for where a grid is to lie: against distributions with known quantiles."""

import pyro.distributions as dist
import pytest
import torch

from pyro_nami.deriving.grid_search import Box, search
from pyro_nami.deriving.grids import SIZE, LineDensity, bent, grid_like, slope_of

ZERO = torch.zeros((), dtype=torch.float64)
GRID = grid_like(SIZE, ZERO)


@pytest.mark.parametrize("fn", [dist.Normal(ZERO, 1.0), dist.Gumbel(ZERO, 1.0)])
def test_a_density_on_a_grid_is_that_of_the_distribution(fn):
    log_density = fn.log_prob(GRID)
    found = bent(
        LineDensity(log_density, slope_of(log_density)).quantiles(), ZERO, ZERO + 1, ZERO, 0, None
    )
    places = fn.icdf(torch.linspace(0.01, 0.99, 99, dtype=torch.float64))
    torch.testing.assert_close(found.log_prob(places), fn.log_prob(places), atol=0.02, rtol=0)


def test_a_log_density_is_told_by_its_slopes():
    density = LineDensity.of_slope(-GRID)
    moved = density.log_density - density.log_density[SIZE // 2]
    torch.testing.assert_close(moved, -GRID.square() / 2)
    total = density.log_total() - density.log_density[SIZE // 2]
    assert float(total) == pytest.approx(0.5 * float(torch.tensor(2 * torch.pi).log()), abs=1e-4)


def unit(members: int) -> Box:
    one = torch.ones((), dtype=torch.float64)
    return Box.upright([0 * one] * members, [one] * members)


def test_a_box_moves_to_a_density_that_is_far_away_and_narrow():
    far = dist.Normal(torch.tensor(1e4, dtype=torch.float64), 0.1)
    box, table, found = search(lambda x: far.log_prob(x.squeeze(-1)), unit(1), "it")
    assert found and abs(float(box.center) - 1e4) < 0.1
    assert float(table[0] - table.max()) < -8.0  # nats, at its end


def test_a_box_leans_with_a_correlation():
    covariance = torch.tensor([[1.0, 0.99], [0.99, 1.0]], dtype=torch.float64)
    normal = dist.MultivariateNormal(torch.zeros(2, dtype=torch.float64), covariance)
    box, _, found = search(normal.log_prob, unit(2), "it")
    assert found and box.sides[1, 1] < 0.25 * box.sides[1, 0]


def test_a_box_holds_both_modes_that_a_coarse_grid_shows():
    def log_prob(x):
        both = [dist.Normal(ZERO + place, 1.0).log_prob(x.squeeze(-1)) for place in (-5.0, 5.0)]
        return torch.stack(both).logsumexp(0)

    box, _, _ = search(log_prob, Box.upright([ZERO + 5], [ZERO + 20]), "it")
    low, high = box.places(torch.tensor([[-1.0], [1.0]], dtype=torch.float64)).flatten()
    assert low < -6 and high > 6


def test_a_density_that_rises_for_ever_has_no_box():
    with pytest.raises(ValueError, match="it does not fall to all sides"):
        search(lambda x: x.squeeze(-1), unit(1), "it")


def test_a_data_set_without_a_box_leaves_the_others_theirs():
    fall = torch.tensor([1.0, 0.0], dtype=torch.float64)
    one = torch.ones(2, dtype=torch.float64)
    box, _, found = search(
        lambda x: x.squeeze(-1) - fall * x.squeeze(-1).square(), Box.upright([0 * one], [one]), "it"
    )
    assert found.tolist() == [True, False]
    assert box.places(-one[:, None])[0] < -2 and box.places(one[:, None])[0] > 3
