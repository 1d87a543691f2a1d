"""The tree experiments of the paper: what their scripts count and build."""

import json

import pytest
from scripts import ROOT

pytest.importorskip("matplotlib")

import minimality
import trees
from gaussian_tree import GaussianTree
from tree_training import Networks, closest_width, count_parameters, network_of

from pyro_nami import nami, verify_inverse


def test_separate_networks_have_the_weights_that_a_count_by_hand_gives():
    tree = GaussianTree(3, seed=0)
    inverse = nami(network_of(tree), direction="reverse")
    for skip in (True, False):
        by_hand = sum(
            7 * (len(reads) + 1) + 7 * 8 + 2 * (7 + 1 + skip * len(reads))
            for reads in inverse.parents.values()
        )
        assert count_parameters(tree, inverse, Networks(False, 7, skip)) == by_hand


def test_the_width_found_comes_closest():
    tree = GaussianTree(3, seed=0)
    inverse = nami(network_of(tree), direction="forward")
    found = closest_width(tree, inverse, 1000, shared=True, skip=True)
    off = {
        width: abs(count_parameters(tree, inverse, Networks(True, width)) - 1000)
        for width in range(found.width - 2, found.width + 3)
    }
    assert off[found.width] == min(off.values())


def test_networks_of_the_widths_in_the_results_are_as_large_as_those_of_the_paper():
    summaries = json.loads((ROOT / "examples/paper/results/trees.json").read_text())["summaries"]
    tree = GaussianTree(5, seed=0)
    for name, system in trees.SYSTEMS.items():
        if system.paper is None:
            continue
        kept = summaries[f"{name}, paper"]
        inverse = system.inverse(network_of(tree))
        found = count_parameters(tree, inverse, Networks(system.shared, kept["width"]))
        assert found == kept["parameters"] == pytest.approx(system.paper[0], rel=0.01)


@pytest.mark.parametrize("number", [12, 16])
def test_extra_edges_are_as_many_as_told_and_all_redundant(number):
    tree = GaussianTree(minimality.DEPTH, seed=0)
    inverse = minimality.inverse_with(tree, number)
    assert inverse.num_edges == minimality.inverse_with(tree, 0).num_edges + number
    checked = verify_inverse(inverse.net, inverse)
    assert checked and set(checked.redundant) == set(minimality.extra_edges(tree, number))
