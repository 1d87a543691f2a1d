from __future__ import annotations

import copy
import itertools
import pickle

import networkx as nx
import pytest

from pyro_nami.graph import BayesNet, Instance, Site


def test_sites_come_in_model_order_and_a_repeated_edge_counts_once():
    net = BayesNet.from_edges(
        [("a", "b"), ("b", "x")], observed=["x"], nodes=["a", "lone", "b", "x"]
    )
    assert list(net.sites) == ["a", "lone", "b", "x"]
    assert net.latent == ("a", "lone", "b") and net.observed == ("x",)
    assert net.edges == (("a", "b"), ("b", "x"))
    assert BayesNet.from_edges(["ab", "ab"], observed=[]).edges == (("a", "b"),)


def test_an_order_that_is_not_topological_is_made_so_stably():
    net = BayesNet.from_edges([("c", "a"), ("b", "d")], observed=[], nodes=["a", "b", "c", "d"])
    assert list(net.sites) == ["b", "c", "a", "d"]


def test_names_may_be_of_mixed_types_that_do_not_compare():
    names = [0, ("z", 1), "z", None, frozenset({2})]
    net = BayesNet.from_edges(
        zip(names, names[1:]), observed=[names[-1]], plates={"z": [("p", 0), 7]}
    )
    assert list(net.sites) == names
    assert net.plates["z"] == {("p", 0), 7}
    assert len(str(net).splitlines()) == 1 + len(names)


def test_networkx_round_trip():
    graph = nx.DiGraph(["zx", "wx"])
    plates = {"plates": {"x": ["data"], "z": ["data"]}, "plate_sizes": {"data": 5}}
    net = BayesNet.from_networkx(graph, observed=["x"], **plates)
    assert nx.utils.graphs_equal(nx.DiGraph(net.graph.edges), graph)
    assert net == BayesNet.from_edges(graph.edges, nodes=graph.nodes, observed=["x"], **plates)
    with pytest.raises(TypeError, match="DiGraph; got Graph"):
        BayesNet.from_networkx(nx.Graph(["ab"]), observed=[])


def test_the_graph_cannot_be_changed():
    net = BayesNet.from_edges([("z", "x")], observed=["x"])
    with pytest.raises(nx.NetworkXError, match="[Ff]rozen"):
        net.graph.add_edge("x", "y")
    with pytest.raises(TypeError):
        net.sites["y"] = Site("y")


def test_networks_compare_by_value_and_survive_copies():
    def build(observed=("x",), nodes=("w", "z", "x"), size=3):
        return BayesNet.from_edges(
            [("z", "x")],
            observed=observed,
            nodes=nodes,
            plates={"x": ["p"]},
            plate_sizes={"p": size},
        )

    net = build()
    assert net == build() and hash(net) == hash(build())
    assert (
        net != build(observed=()) and net != build(nodes=("z", "w", "x")) and net != build(size=4)
    )
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
    net = BayesNet.from_edges(
        [("z", "x")], observed=["x"], plates={"x": ["p"]}, plate_sizes={"q": 9}
    )
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


SCHOOLS = {"student": ["classroom"], "classroom": ["school"]}


def schools(nesting=SCHOOLS):
    """Twelve students in six classrooms in two schools, and three days on which all are asked."""
    plates = {
        "s": ["school"],
        "c": ["classroom", "school"],
        "y": ["student", "classroom", "school", "day"],
    }
    return BayesNet.from_edges(
        [("s", "c"), ("c", "y"), ("d", "y")],
        observed=["y"],
        plates={**plates, "d": ["day"]},
        plate_sizes={"student": 12, "classroom": 6, "school": 2, "day": 3},
        nesting=nesting,
    )


def test_nesting_is_closed_transitively():
    net = schools()
    assert dict(net.nesting) == {"student": {"classroom", "school"}, "classroom": {"school"}}
    assert net.closure(["classroom", "day"]) == {"classroom", "school", "day"}
    assert net.generators(net.plates["y"]) == {"student", "day"}
    assert (
        net.generators(["school", "day"]) == {"school", "day"} and net.generators([]) == frozenset()
    )
    assert net == schools({"student": {"classroom", "school"}, "classroom": "school"})
    with pytest.raises(TypeError):
        net.nesting["day"] = frozenset()


def test_nesting_of_plates_that_no_site_lies_in_is_dropped():
    net = BayesNet.from_edges(
        [("z", "x")], observed=["x"], plates={"x": ["p"]}, nesting={"q": ["p"]}
    )
    assert not net.nesting


def nested_instances(net, plates, maps):
    """The index combinations of plates that occur, listed one by one: outer indices follow from inner ones."""
    free = [
        p for p in plates if not any(q in plates and p in net.nesting.get(q, ()) for q in plates)
    ]
    found = set()
    for at in itertools.product(*(range(net.plate_sizes[p]) for p in free)):
        place = dict(zip(free, at))
        for inner, outer in (
            ("student", "classroom"),
            ("classroom", "school"),
            ("student", "school"),
        ):
            if inner in place and outer in plates:
                place[outer] = maps[inner, outer][place[inner]]
        found.add(tuple(sorted(place.items())))
    return found


def test_instances_and_pairs_are_counted_as_a_balanced_nested_design_has_them():
    net = schools()
    classroom, school = [n % 6 for n in range(12)], [c % 2 for c in range(6)]
    maps = {
        ("student", "classroom"): classroom,
        ("classroom", "school"): school,
        ("student", "school"): [school[c] for c in classroom],
    }
    places = {name: nested_instances(net, net.plates[name], maps) for name in net.sites}
    assert {name: len(found) for name, found in places.items()} == {"s": 2, "c": 6, "d": 3, "y": 36}
    for a, b in itertools.product(net.sites, repeat=2):
        assert net.num_instances(net.plates[a]) == len(places[a])
        shared = net.plates[a] & net.plates[b]
        for count in range(len(shared) + 1):
            for across in map(frozenset, itertools.combinations(shared, count)):
                if net.closure(shared - across) != shared - across:
                    continue  # aligned in an inner plate is aligned in the outer one
                joined = sum(
                    all(dict(x)[p] == dict(y)[p] for p in shared - across)
                    for x, y in itertools.product(places[a], places[b])
                )
                assert net.num_pairs(net.plates[a], net.plates[b], across) == joined, (a, b, across)


def test_nested_networks_compare_by_value_and_survive_copies():
    net = schools()
    assert (
        net == schools()
        and hash(net) == hash(schools())
        and net != schools({"student": ["classroom"]})
    )
    for other in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert other == net and other.nesting == net.nesting


def test_grounding_a_nested_network_keeps_the_full_product():
    ground = schools().ground()
    assert sum(name.site == "y" for name in ground.sites) == 12 * 6 * 2 * 3 and not ground.nesting


def test_the_text_says_what_is_nested_in_what():
    first = str(schools()).splitlines()[0]
    assert first.endswith(
        "plate student of 12 within classroom and school, plate classroom of 6 within school, plate school of 2, "
        "plate day of 3"
    )


@pytest.mark.parametrize(
    ("edges", "arguments", "error"),
    [
        ("ab bc ca ad", {}, r"cycle ('\w' -> ){3}'\w'"),
        ("aa", {}, "cycle 'a' -> 'a'"),
        # the cycle named is one of the graph
        ("ra ab bc cb cd", {}, "cycle ('b' -> 'c' -> 'b'|'c' -> 'b' -> 'c')[.]"),
        ("ab", {"nodes": ["a"]}, r"edge \('a', 'b'\).* unknown site 'b'"),
        ("ab", {"nodes": ["b"]}, r"edge \('a', 'b'\).* unknown site 'a'"),
        ("ab", {"observed": ["c"]}, "observed site to be a node of the graph; got 'c'"),
        ("ab", {"plates": {"c": ["p"]}}, "site in plates to be a node of the graph; got 'c'"),
        ("ab", {"plates": {"a": ["p"]}, "plate_sizes": {"p": 0}}, "plate 'p' .* positive"),
        (
            "zy",
            {"plates": {"y": ["obs"]}, "nesting": {"obs": ["county"]}},
            r"site 'y' .* plate 'obs' determines; .* Add 'county' to",
        ),
        (
            "zy",
            {"plates": {"y": ["a", "b"]}, "nesting": {"a": "b", "b": "c"}},
            r"site 'y' .* without 'c'",
        ),
        (
            "zy",
            {"nesting": {"a": "b", "b": "a"}},
            "acyclic nesting of plates; got the cycle '.' -> '.' -> '.'",
        ),
        ("zy", {"nesting": {"a": "a"}}, "acyclic nesting of plates; got the cycle 'a' -> 'a'"),
    ],
)
def test_errors_of_from_edges(edges, arguments, error):
    with pytest.raises(ValueError, match=error):
        BayesNet.from_edges(edges.split(), **{"observed": [], **arguments})


@pytest.mark.parametrize(
    ("build", "kind", "error"),
    [
        (
            lambda: BayesNet([Site("a"), Site("a")], []),
            ValueError,
            "every site once; got 'a' 2 times",
        ),
        (lambda: BayesNet({"b": Site("a")}, []), ValueError, "under its own name"),
        (lambda: BayesNet(["a"], []), TypeError, "to be a Site; got str 'a'"),
        (
            lambda: BayesNet([Site("a"), Site("z", support_parents={"a"})], []),
            ValueError,
            r"'z' among its parents; got 'a'",
        ),
        (
            lambda: Site("k", observed=True, marginalized=True),
            ValueError,
            "'k' to be observed or marginalized; got both",
        ),
    ],
)
def test_errors_of_the_constructors(build, kind, error):
    with pytest.raises(kind, match=error):
        build()
