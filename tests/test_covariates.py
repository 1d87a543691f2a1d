"""Finding what differs between instances."""

import pyro.distributions as dist
import torch

from pyro_nami.covariates import ColumnSearch, columns_of, parameters


def test_only_what_differs_between_instances_is_a_covariate():
    search = ColumnSearch(10)
    assert search.add(0, dist.Normal(torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 5.0])))
    assert not search.add(1, dist.Normal(torch.ones(4), torch.tensor([1.0, 2.0, 3.0, 5.0])))
    assert [column.parameter for column in search.columns] == ["scale"]


def test_a_design_of_rank_three_gives_three_columns_that_span_it():
    torch.manual_seed(0)
    design = torch.randn(50, 3)
    fns = [dist.Normal(design @ torch.randn(3), torch.ones(50)) for _ in range(6)]
    search = ColumnSearch(10)
    assert [search.add(i, fn) for i, fn in enumerate(fns)] == [True] * 3 + [False] * 3
    found = columns_of(search.columns, fns.__getitem__)
    assert found.shape == (50, 3) and torch.linalg.matrix_rank(torch.cat([found, design], 1), atol=1e-3) == 3


def test_parameters_are_unconstrained_and_seen_through_wrappers():
    rate = torch.tensor([1.0, 10.0])
    found = parameters(dist.Poisson(rate).mask(torch.tensor(True)))
    assert torch.allclose(next(iter(found.values())).squeeze(-1), rate.log())
    assert parameters(dist.Normal(torch.zeros(2, 3), 1.0).to_event(1))["base_dist.loc"].shape == (2, 3)
