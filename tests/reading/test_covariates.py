"""Finding what differs between instances."""

import pyro.distributions as dist
import torch

from pyro_nami.reading.covariates import ColumnSearch, columns_of, parameters


def site(fn, mask=None):
    return {"name": "y", "fn": fn, "mask": mask}


def test_only_what_differs_between_instances_is_a_covariate():
    search = ColumnSearch(10)
    assert search.add(0, site(dist.Normal(torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 5.0]))))
    assert not search.add(1, site(dist.Normal(torch.ones(4), torch.tensor([1.0, 2.0, 3.0, 5.0]))))
    assert [column.parameter for column in search.columns] == ["scale"]


def test_a_design_of_rank_three_gives_three_columns_that_span_it():
    design = torch.randn(50, 3)
    fns = [site(dist.Normal(design @ torch.randn(3), torch.ones(50))) for _ in range(6)]
    search = ColumnSearch(10)
    assert [search.add(i, fn) for i, fn in enumerate(fns)] == [True] * 3 + [False] * 3
    found = columns_of(search.columns, fns.__getitem__)
    assert (
        found.shape == (50, 3)
        and torch.linalg.matrix_rank(torch.cat([found, design], 1), atol=1e-3) == 3
    )


def test_parameters_are_unconstrained_and_seen_through_wrappers():
    rate = torch.tensor([1.0, 10.0])
    found = parameters(dist.Poisson(rate).mask(torch.tensor(True)))
    assert torch.allclose(next(iter(found.values())).squeeze(-1), rate.log())
    assert parameters(dist.Normal(torch.zeros(2, 3), 1.0).to_event(1))["loc"].shape == (
        2,
        3,
    )


def test_what_a_distribution_computes_where_it_is_asked_to_is_a_covariate_where_it_has_not_been():
    """Probabilities of logits, which are there once somebody has validated them."""
    options = {"logits": torch.tensor([-1.0, 0.5, 2.0]), "gate": torch.tensor(0.1)}
    fns = [
        dist.ZeroInflatedNegativeBinomial(3.0, **options, validate_args=valid)
        for valid in (True, False)
    ]
    assert "probs" not in vars(fns[1].base_dist)
    search = ColumnSearch(10)
    assert search.add(0, site(fns[0]))
    found = [columns_of(search.columns, lambda _, fn=fn: site(fn)) for fn in fns]
    assert torch.equal(*found)


def test_a_mask_is_a_covariate_whatever_it_is():
    search, y = ColumnSearch(10), dist.Normal(torch.zeros(3), 1.0)
    assert search.add(0, site(y, torch.ones(3, dtype=torch.bool))) and not search.add(
        1, site(y, None)
    )
    mask = torch.tensor([True, False, True])
    assert torch.equal(
        columns_of(search.columns, lambda _: site(y, mask)).squeeze(-1), mask.float()
    )
    assert torch.equal(columns_of(search.columns, lambda _: site(y, None)), torch.ones(3, 1))


def searched(design, draws, nonlinear=False):
    """A search that has seen a few draws of a linear predictor."""
    search = ColumnSearch(64)
    for i in range(draws):
        loc = design @ torch.randn(design.shape[1]).to(design)
        search.add(i, site(dist.Normal(loc.exp() if nonlinear else loc, 1.0)))
    return search


def test_a_design_among_the_arguments_has_all_columns_at_once():
    design, other = torch.randn(300, 50), torch.randn(300, 2)
    search = searched(design, 4)
    assert search.explain([other, 3, design], 300, -1)
    found = columns_of(search.columns, None, [other, 3, design])
    assert torch.equal(found, design)


def test_arguments_that_do_not_explain_a_site_are_left_alone():
    design = torch.randn(300, 5)
    for search, argument in (
        (searched(design, 4, nonlinear=True), design),
        (searched(design, 4), torch.randn(300, 5)),
    ):
        assert not search.explain([argument], 300, -1)
        assert len(search.columns) == 4
