from __future__ import annotations

import copy
import pickle

import networkx as nx
import pytest

from pyro_nami.graph import BayesNet, Instance, Site


def test_sites_come_in_model_order():
    net = BayesNet.from_edges([("a", "b"), ("b", "x")], observed=["x"], nodes=["a", "lone", "b", "x"])
    assert list(net.sites) == ["a", "lone", "b", "x"]
    assert net.latent == ("a", "lone", "b") and net.observed == ("x",)
    assert net.edges == (("a", "b"), ("b", "x"))


def test_an_order_that_is_not_topological_is_made_so_stably():
    net = BayesNet.from_edges([("c", "a"), ("b", "d")], observed=[], nodes=["a", "b", "c", "d"])
    assert list(net.sites) == ["b", "c", "a", "d"]


def test_names_may_be_of_mixed_types_that_do_not_compare():
    names = [0, ("z", 1), "z", None, frozenset({2})]
    net = BayesNet.from_edges(zip(names, names[1:]), observed=[names[-1]], plates={"z": [("p", 0), 7]})
    assert list(net.sites) == names
    assert net.plates["z"] == {("p", 0), 7}
    assert len(str(net).splitlines()) == 1 + len(names)


def test_a_repeated_edge_counts_once():
    assert BayesNet.from_edges([("a", "b"), ("a", "b")], observed=[]).edges == (("a", "b"),)


def test_networkx_round_trip():
    graph = nx.DiGraph([("z", "x"), ("w", "x")])
    net = BayesNet.from_networkx(
        graph, observed=["x"], plates={"x": ["data"], "z": ["data"]}, plate_sizes={"data": 5}
    )
    assert nx.utils.graphs_equal(nx.DiGraph(net.graph.edges), graph)
    assert net == BayesNet.from_edges(
        graph.edges,
        nodes=graph.nodes,
        observed=["x"],
        plates={"x": ["data"], "z": ["data"]},
        plate_sizes={"data": 5},
    )


def test_the_graph_cannot_be_changed():
    net = BayesNet.from_edges([("z", "x")], observed=["x"])
    with pytest.raises(nx.NetworkXError, match="[Ff]rozen"):
        net.graph.add_edge("x", "y")
    with pytest.raises(TypeError):
        net.sites["y"] = Site("y")


def test_networks_compare_by_value_and_survive_copies():
    def build(observed=("x",), nodes=("w", "z", "x"), size=3):
        return BayesNet.from_edges(
            [("z", "x")], observed=observed, nodes=nodes, plates={"x": ["p"]}, plate_sizes={"p": size}
        )

    net = build()
    assert net == build() and hash(net) == hash(build())
    assert net != build(observed=()) and net != build(nodes=("z", "w", "x")) and net != build(size=4)
    net.graph, net.indexed  # noqa: B018  caches are no part of the value
    for other in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert other == net and list(other.sites) == list(net.sites)


def test_grounding_joins_aligned_instances_and_all_instances_of_plates_that_the_child_lacks():
    net = BayesNet(
        [
            Site("mu"),
            Site("z", plates={"i"}, support_parents={"mu"}),
            Site("w", plates={"j"}, marginalized=True),
            Site("y", plates={"i", "j"}, observed=True),
            Site("s", observed=True),
        ],
        [("mu", "z"), ("z", "y"), ("w", "y"), ("w", "s")],
        {"i": 2, "j": 3},
    )
    ground = net.ground()
    mu, s = ("mu", ()), ("s", ())
    z = [("z", (("i", i),)) for i in range(2)]
    w = [("w", (("j", j),)) for j in range(3)]
    y = {(i, j): ("y", (("i", i), ("j", j))) for i in range(2) for j in range(3)}
    assert list(ground.sites) == [mu, *z, *w, *y.values(), s]
    assert set(ground.edges) == {
        *((mu, z[i]) for i in range(2)),
        *((z[i], y[i, j]) for i, j in y),
        *((w[j], y[i, j]) for i, j in y),
        *((w[j], s) for j in range(3)),
    }
    assert ground.observed == (*y.values(), s)
    assert ground.sites[z[1]].support_parents == {mu} and ground.sites[w[0]].marginalized
    assert not ground.plate_sizes and isinstance(next(iter(ground.sites)), Instance)


def test_plates_without_a_size_count_two_instances_and_unused_sizes_are_dropped():
    net = BayesNet.from_edges([("z", "x")], observed=["x"], plates={"x": ["p"]}, plate_sizes={"q": 9})
    assert dict(net.plate_sizes) == {"p": 2}


def test_the_text_says_what_was_found():
    net = BayesNet(
        [Site("mu"), Site("k", marginalized=True), Site("x y", plates={"data"}, observed=True)],
        [("mu", "x y"), ("k", "x y")],
        {"data": 50},
    )
    assert str(net).splitlines() == [
        "BayesNet: 2 latent and 1 observed sites, 2 edges, plate data of 50",
        "  mu: latent",
        "  k: marginalized",
        "  'x y'[data]: observed, given mu, k",
    ]


def test_names_that_look_alike_are_told_apart_in_text():
    names = [1, "1", None, "None", ("a",), "('a',)", "a\nb"]
    net = BayesNet.from_edges([], observed=[], nodes=names)
    lines = str(net).splitlines()[1:]
    assert len(lines) == len(set(lines)) == len(names)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"edges": [("a", "b"), ("b", "c"), ("c", "a"), ("a", "d")]}, r"cycle ('\w' -> ){3}'\w'"),
        ({"edges": [("a", "a")]}, "cycle 'a' -> 'a'"),
        ({"edges": [("a", "b")], "nodes": ["a"]}, r"edge \('a', 'b'\).* unknown site 'b'"),
        ({"edges": [("a", "b")], "nodes": ["b"]}, r"edge \('a', 'b'\).* unknown site 'a'"),
        ({"edges": [("a", "b")], "observed": ["c"]}, "observed site to be a node of the graph; got 'c'"),
        (
            {"edges": [("a", "b")], "plates": {"c": ["p"]}},
            "site in plates to be a node of the graph; got 'c'",
        ),
        ({"edges": [("a", "b")], "plates": {"a": ["p"]}, "plate_sizes": {"p": 0}}, "plate 'p' .* positive"),
    ],
)
def test_errors_of_from_edges(arguments, error):
    with pytest.raises(ValueError, match=error):
        BayesNet.from_edges(**{"observed": [], **arguments})


def test_the_cycle_named_is_one_of_the_graph():
    edges = [("r", "a"), ("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]
    with pytest.raises(ValueError, match="cycle ('b' -> 'c' -> 'b'|'c' -> 'b' -> 'c')[.]"):
        BayesNet.from_edges(edges, observed=[])


@pytest.mark.parametrize(
    ("sites", "edges", "kind", "error"),
    [
        ([Site("a"), Site("a")], [], ValueError, "every site once; got 'a' 2 times"),
        ({"b": Site("a")}, [], ValueError, "under its own name"),
        (["a"], [], TypeError, "to be a Site; got str 'a'"),
        ([Site("a"), Site("z", support_parents={"a"})], [], ValueError, r"'z' among its parents; got 'a'"),
    ],
)
def test_errors_of_the_constructor(sites, edges, kind, error):
    with pytest.raises(kind, match=error):
        BayesNet(sites, edges)


def test_a_site_is_not_both_observed_and_marginalized():
    with pytest.raises(ValueError, match="'k' to be observed or marginalized; got both"):
        Site("k", observed=True, marginalized=True)


def test_only_directed_graphs_are_taken():
    with pytest.raises(TypeError, match="DiGraph; got Graph"):
        BayesNet.from_networkx(nx.Graph([("a", "b")]), observed=[])
