"""Masks against brute force: paths in a graph, and sets of columns."""

import networkx as nx
import pytest
import torch

from pyro_nami.networks.masks import (
    allot_labels,
    check_width,
    distinct_labels,
    jacobian_support,
    layer_masks,
    split_steps,
    unit_steps,
)


def random_dependency(
    seed: int, outputs: int = 9, inputs: int = 7, density: float = 0.4
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dependency = torch.rand(outputs, inputs, generator=generator) < density
    dependency[seed % outputs] = False
    dependency[-1] = dependency[0]
    return dependency


def sets(rows: torch.Tensor) -> list[frozenset[int]]:
    return [frozenset(row.nonzero().flatten().tolist()) for row in rows]


@pytest.mark.parametrize("seed", range(10))
def test_labels_are_the_distinct_nonempty_rows_by_last_column(seed):
    dependency = random_dependency(seed)
    labels = sets(distinct_labels(dependency))
    assert len(labels) == len(set(labels))
    assert set(labels) == {row for row in sets(dependency) if row}
    assert [max(label) for label in labels] == sorted(max(label) for label in labels)


@pytest.mark.parametrize("width", [1, 2, 5, 7, 8, 20, 64])
@pytest.mark.parametrize("seed", range(5))
def test_masks_connect_a_unit_to_what_contains_its_label(seed, width):
    dependency = random_dependency(seed)
    masks = layer_masks(dependency, (width, width + 3))
    labels = distinct_labels(dependency)
    below = sets(torch.eye(dependency.shape[1], dtype=torch.bool))
    for mask, size, last in zip(masks.hidden, (width, width + 3), masks.last_columns):
        units = [sets(labels)[index] for index in allot_labels(labels, size).tolist()]
        assert last == tuple(max(unit) for unit in units) == tuple(sorted(last))
        assert mask.tolist() == [[source <= unit for source in below] for unit in units]
        below = units
    assert masks.output.tolist() == [[unit <= row for unit in below] for row in sets(dependency)]


def test_units_are_shared_out_evenly_where_there_are_enough():
    labels = distinct_labels(torch.ones(7, 7, dtype=torch.bool).tril())
    for width in (7, 10, 64, 100):
        counts = torch.bincount(allot_labels(labels, width), minlength=7)
        assert counts.max() - counts.min() <= 1
        assert counts.sum() == width


def test_a_narrow_layer_takes_labels_that_are_no_union_of_others():
    labels = distinct_labels(torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0], [1, 1, 1]]).bool())
    chosen = [sets(labels)[index] for index in allot_labels(labels, 3).tolist()]
    assert chosen == [{0}, {1}, {0, 1, 2}]
    assert len(allot_labels(labels, 2)) == 2
    assert frozenset({0, 1}) not in [
        sets(labels)[index] for index in allot_labels(labels, 2).tolist()
    ]


def test_without_dependencies_there_are_no_units():
    masks = layer_masks(torch.zeros(3, 2, dtype=torch.bool), (8, 8))
    assert [tuple(mask.shape) for mask in masks.hidden] == [(0, 2), (0, 0)]
    assert masks.output.shape == (3, 0)


@pytest.mark.parametrize("width", [1, 3, 6, 9, 30])
@pytest.mark.parametrize("seed", range(6))
def test_jacobian_support_is_reachability_and_stays_inside_the_dependency(seed, width):
    dependency = random_dependency(seed)
    masks = layer_masks(dependency, (width, width))
    graph = nx.DiGraph()
    graph.add_nodes_from((0, column) for column in range(7))
    graph.add_nodes_from((3, row) for row in range(9))
    for layer, mask in enumerate((*masks.hidden, masks.output)):
        edges = mask.nonzero().tolist()
        graph.add_edges_from(((layer, source), (layer + 1, target)) for target, source in edges)
    support = jacobian_support((*masks.hidden, masks.output))
    expected = [
        [nx.has_path(graph, (0, column), (3, row)) for column in range(7)] for row in range(9)
    ]
    assert support.tolist() == expected
    assert not (support & ~dependency).any()
    if width >= len(distinct_labels(dependency)):
        assert torch.equal(support, dependency)


@pytest.mark.parametrize("seed", range(20))
def test_the_width_named_in_the_error_is_the_least_that_is_enough(seed):
    dependency = random_dependency(seed, density=0.6)
    masks, enough = None, 0
    while masks is None or not torch.equal(
        jacobian_support((*masks.hidden, masks.output)), dependency
    ):
        enough += 1
        masks = layer_masks(dependency, (enough, enough))
    masks = layer_masks(dependency, (enough - 1, enough))
    with pytest.raises(
        ValueError, match=rf"loses \d+ of {int(dependency.sum())}\. {enough} units a layer"
    ):
        check_width(dependency, (*masks.hidden, masks.output))


def test_steps_own_neighbouring_units():
    dependency = torch.ones(6, 6, dtype=torch.bool).tril(-1)
    steps = split_steps(dependency, [0, 2, 0, 3, 1], [1, 2, 0, 3, 0])
    masks = layer_masks(dependency, (10, 5))
    for last in masks.last_columns:
        bounds = unit_steps(last, steps)
        for step in range(5):
            columns = range(steps.columns[step], steps.columns[step + 1])
            complete = [unit for unit, column in enumerate(last) if column in columns]
            assert complete == list(range(bounds[step], bounds[step + 1]))


def test_steps_default_to_one():
    assert split_steps(torch.ones(3, 2, dtype=torch.bool)) == ((0, 2), (0, 3))
