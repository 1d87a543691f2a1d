"""The laws of inversion, against d-separation by brute force: every path, every block, nothing shared with the code."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import networkx as nx
import pytest

from pyro_nami.graph import (
    BayesNet,
    Inverse,
    Site,
    d_separated,
    fully_connected,
    mean_field,
    nami,
    stuhlmueller,
    verify_inverse,
)

DIRECTIONS = ("forward", "reverse", "free", "auto")


class Oracle:
    """d-separation by listing the paths between two nodes and asking of each whether it is blocked."""

    def __init__(self, nodes, edges):
        self.edges, self.known = set(edges), {}
        self.neighbours = {v: {a for e in edges if v in e for a in e} - {v} for v in nodes}
        self.below = {v: {v} for v in nodes}  # with v itself
        for _ in nodes:
            for u, t in edges:
                self.below[u] |= self.below[t]

    def paths(self, path, end):
        if path[-1] == end:
            yield path
            return
        for step in self.neighbours[path[-1]] - set(path):
            yield from self.paths([*path, step], end)

    def open(self, path, given):
        for a, b, c in zip(path, path[1:], path[2:]):
            collider = (a, b) in self.edges and (c, b) in self.edges
            if collider != bool((self.below[b] if collider else {b}) & given):
                return False
        return True

    def separated(self, x, y, given):
        question = x, y, frozenset(given)
        if question not in self.known:
            self.known[question] = not any(self.open(path, given) for path in self.paths([x], y))
        return self.known[question]


def is_faithful_and_minimal(oracle, inverse):
    """The definitions of an I-map and of a minimal one, edge by edge, on a network without plates."""
    known, faithful, minimal = set(inverse.net.observed), True, True
    for v in reversed(inverse.order):
        parents = set(inverse.parents[v])
        faithful &= all(oracle.separated(v, u, parents) for u in known - parents)
        minimal &= not any(oracle.separated(v, u, parents - {u}) for u in parents)
        known.add(v)
    return faithful, faithful and minimal


def networks(n, kinds):
    """Every network of n sites in topological order 0, ..., n - 1, with every choice of what is latent."""
    pairs = list(itertools.combinations(range(n), 2))
    for chosen in itertools.product([False, True], repeat=len(pairs)):
        edges = [pair for pair, is_edge in zip(pairs, chosen) if is_edge]
        oracle = Oracle(range(n), edges)
        for kind in itertools.product(kinds, repeat=n):
            sites = [
                Site(i, observed=k == "observed", marginalized=k == "marginalized")
                for i, k in enumerate(kind)
            ]
            yield BayesNet(sites, edges), oracle


def random_network(rng, n, density, latent=0.6, marginalized=0.0):
    edges = [pair for pair in itertools.combinations(range(n), 2) if rng.random() < density]
    sites = []
    for i in range(n):
        is_latent = rng.random() < latent
        sites.append(
            Site(i, observed=not is_latent, marginalized=is_latent and rng.random() < marginalized)
        )
    return BayesNet(sites, edges), Oracle(range(n), edges)


def random_plated_network(rng):
    sizes = {f"p{i}": rng.choice([2, 3]) for i in range(rng.randint(1, 2))}
    net, _ = random_network(rng, rng.randint(2, 6), rng.choice([0.2, 0.4, 0.7]), marginalized=0.15)
    return BayesNet(
        [
            replace(site, plates={p for p in sizes if rng.random() < 0.5})
            for site in net.sites.values()
        ],
        net.edges,
        sizes,
    )


def sampled(net):
    return [name for name in net.latent if not net.sites[name].marginalized]


def random_blocks(rng, net):
    latents = sampled(net)
    rng.shuffle(latents)
    cuts = sorted(rng.randint(0, len(latents)) for _ in range(2))
    return [latents[: cuts[0]], latents[cuts[0] : cuts[1]], latents[cuts[1] :]]


@pytest.mark.parametrize(
    ("n", "kinds"),
    [
        *((n, ("latent", "observed")) for n in (1, 2, 3, 4)),
        (3, ("latent", "observed", "marginalized")),
    ],
)
def test_every_small_network_is_inverted_faithfully_and_minimally_in_every_direction(n, kinds):
    count = 0
    for net, oracle in networks(n, kinds):
        for direction in DIRECTIONS:
            inverse = nami(net, direction=direction)
            assert set(inverse.order) == set(sampled(net))
            assert is_faithful_and_minimal(oracle, inverse) == (True, True), (str(net), direction)
            count += 1
    assert count == 4 * len(kinds) ** n * 2 ** (n * (n - 1) // 2)


def test_larger_networks_too_with_any_blocks():
    rng = random.Random(0)
    for _ in range(120):
        net, oracle = random_network(
            rng, rng.randint(5, 8), rng.choice([0.2, 0.35]), marginalized=0.15
        )
        blocks = random_blocks(rng, net)
        for direction in DIRECTIONS:
            for inverse in (
                nami(net, direction=direction),
                nami(net, direction=direction, blocks=blocks),
            ):
                assert is_faithful_and_minimal(oracle, inverse) == (True, True), (
                    str(net),
                    direction,
                    blocks,
                )


def test_d_separation_is_what_paths_say():
    rng = random.Random(1)
    for _ in range(150):
        net, oracle = random_network(rng, 6, 0.4)
        for x, y in itertools.combinations(range(6), 2):
            given = {i for i in range(6) if i not in (x, y) and rng.random() < 0.4}
            expected = oracle.separated(x, y, given)
            assert d_separated(net, x, y, given) == d_separated(net, y, x, given) == expected
            assert nx.is_d_separator(nx.DiGraph(net.graph), {x}, {y}, given) == expected


def test_verification_is_what_paths_say_of_any_inverse():
    rng, seen = random.Random(2), set()
    for _ in range(400):
        net, oracle = random_network(rng, rng.randint(2, 6), 0.4, marginalized=0.1)
        order = tuple(rng.sample(sampled(net), len(sampled(net))))
        if rng.random() < 0.5:
            inverse = rng.choice([stuhlmueller, mean_field, fully_connected, nami])(net)
        else:
            density = rng.choice([0.3, 0.6, 0.9])
            parents = {
                v: {
                    u: frozenset()
                    for u in (*net.observed, *order[i + 1 :])
                    if rng.random() < density
                }
                for i, v in enumerate(order)
            }
            inverse = Inverse(net, order, parents)
        found = verify_inverse(net, inverse)
        assert (bool(found), found.minimal) == is_faithful_and_minimal(oracle, inverse)
        seen.add((bool(found), found.minimal))
    assert seen == {(True, True), (True, False), (False, False)}


def test_what_is_missing_and_redundant_mends_the_inverse():
    rng, mended = random.Random(3), 0
    for _ in range(200):
        net, oracle = random_network(rng, 6, 0.4)
        inverse = rng.choice([stuhlmueller, mean_field, fully_connected])(net)
        found = verify_inverse(net, inverse)
        parents = {v: dict(inverse.with_edges(found.missing).parents[v]) for v in inverse.order}
        for u, v in found.redundant:
            del parents[v][u]
        assert is_faithful_and_minimal(oracle, Inverse(net, inverse.order, parents)) == (True, True)
        mended += not found.minimal
    assert mended > 100


def test_plated_networks_are_inverted_faithfully_and_minimally_with_any_blocks():
    rng, joint = random.Random(4), 0
    for _ in range(300):
        net = random_plated_network(rng)
        for direction in DIRECTIONS:
            for blocks in (None, random_blocks(rng, net)):
                inverse = nami(net, direction=direction, blocks=blocks)
                assert verify_inverse(net, inverse).minimal, (str(net), direction, blocks)
                joint += any(inverse.joint.values())
        assert verify_inverse(net, fully_connected(net)), str(net)
    assert joint > 200


@pytest.mark.parametrize(
    ("seed", "nets", "sizes"), [(5, 300, None), (6, 60, [4, 5])], ids=["2 or 3", "more"]
)
def test_a_plated_inverse_is_faithful_iff_its_grounding_is(seed, nets, sizes):
    """At any size: three instances show what more would."""
    rng, seen = random.Random(seed), set()
    for _ in range(nets):
        net = random_plated_network(rng)
        if sizes:
            net = BayesNet(
                net.sites, net.edges, {plate: rng.choice(sizes) for plate in net.plate_sizes}
            )
        inverse = rng.choice([stuhlmueller, mean_field, fully_connected, nami])(net)
        found = bool(verify_inverse(net, inverse))
        assert found == bool(verify_inverse(net.ground(), inverse.ground())), (
            str(net),
            str(inverse),
        )
        seen.add(found)
    assert seen == {True, False}


# The paper's Figure 1: a root with two branches whose leaves are observed.
TREE = BayesNet.from_edges(["ab", "ac", "bd", "ce"], observed=["d", "e"])


def test_the_heuristic_inverse_of_the_paper_lacks_the_edges_between_branches():
    found = verify_inverse(TREE, stuhlmueller(TREE))
    assert not found and not found.minimal
    assert set(found.missing) == {("d", "c"), ("c", "b")} and not found.redundant
    assert str(found).startswith("not faithful; missing: ")


def test_an_extra_edge_is_redundant():
    inverse = nami(TREE, direction="forward")
    assert (
        verify_inverse(TREE, inverse).minimal
        and str(verify_inverse(TREE, inverse)) == "minimally faithful"
    )
    found = verify_inverse(TREE, inverse.with_edges([("d", "a")]))
    assert found and not found.minimal
    assert found.redundant == {("d", "a"): frozenset()}
    assert str(found) == "faithful, not minimal; redundant: d -> a"


def test_reading_across_a_plate_without_need_is_redundant_and_the_reverse_is_missing():
    plates = {"z": ["n"], "x": ["n"]}
    net = BayesNet.from_edges(
        [("mu", "z"), ("z", "x")], observed=["x"], plates=plates, plate_sizes={"n": 50}
    )
    right = nami(net, direction="reverse")
    assert verify_inverse(net, right).minimal
    too_much = Inverse(net, right.order, {**right.parents, "z": {"mu": frozenset(), "x": {"n"}}})
    assert verify_inverse(net, too_much).redundant == {("x", "z"): {"n"}}
    joint = replace(too_much, joint={"z": {"n"}})
    # one block, which does need all of x
    assert verify_inverse(net, joint).redundant == {("z", "z"): {"n"}}
    apart = Inverse(net, ("mu", "z"), {"mu": {"z": frozenset()}, "z": {"x": frozenset()}})
    assert verify_inverse(net, apart).missing == {("x", "z"): {"n"}, ("z", "z"): {"n"}}


@pytest.mark.parametrize(
    ("check", "arguments", "kind", "error"),
    [
        (d_separated, (TREE, "a", "q", []), ValueError, "got 'q'"),
        (d_separated, (TREE, "a", "b", ["b"]), ValueError, "got 'a' and 'b' given"),
        (d_separated, (TREE, "a", "a", []), ValueError, "got 'a' and 'a'"),
        (
            verify_inverse,
            (TREE, nami(BayesNet.from_edges(["ab"], observed="b"))),
            ValueError,
            "every latent in the order; got none for 'b'",
        ),
        (verify_inverse, (nami(TREE), nami(TREE)), TypeError, "Expected a BayesNet; got Inverse"),
    ],
)
def test_errors(check, arguments, kind, error):
    with pytest.raises(kind, match=error):
        check(*arguments)
