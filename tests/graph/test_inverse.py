from __future__ import annotations

import copy
import pickle
import random
from types import MappingProxyType

import pytest

from pyro_nami.graph import BayesNet, Inverse, Site, fully_connected, mean_field, nami, stuhlmueller

NOTHING = frozenset()


@pytest.fixture
def schools():
    """Eight schools with a predictive latent, in elimination order pred, theta, tau, mu."""
    net = BayesNet(
        [
            Site("mu"),
            Site("tau"),
            Site("theta", plates={"school"}),
            Site("y", plates={"school"}, observed=True),
            Site("pred", plates={"school"}),
        ],
        [("mu", "theta"), ("tau", "theta"), ("theta", "y"), ("theta", "pred")],
        {"school": 8},
    )
    return nami(net, direction="reverse")


def small():
    return BayesNet.from_edges([("a", "b"), ("b", "x"), ("a", "x")], observed=["x"])


def test_what_an_inverse_says(schools):
    assert schools.order == ("pred", "theta", "tau", "mu")
    assert {v: set(reads) for v, reads in schools.parents.items()} == {
        "pred": {"theta"},
        "theta": {"mu", "tau", "y"},
        "tau": {"mu", "y"},
        "mu": {"y"},
    }
    assert schools.predictive == {"pred"} and set(schools.joint.values()) == {NOTHING}
    assert schools.pooled("mu", "y") == {"school"} and schools.pooled("theta", "y") == NOTHING


def test_edges_are_counted_per_site_and_per_instance(schools):
    assert schools.num_edges == 1 + 3 + 2 + 1
    assert schools.num_grounded_edges == 8 + 3 * 8 + (1 + 8) + 8
    assert schools.ground().num_edges == schools.num_grounded_edges


def test_grounded_edges_are_the_edges_of_the_grounding():
    rng = random.Random(0)
    for _ in range(200):
        sizes = {p: rng.choice([1, 2, 3]) for p in "pqr"}
        sites = [
            Site(i, plates={p for p in sizes if rng.random() < 0.4}, observed=rng.random() < 0.4)
            for i in range(5)
        ]
        edges = [(i, j) for i in range(5) for j in range(i + 1, 5) if rng.random() < 0.5]
        net = BayesNet(sites, edges, sizes)
        for invert in (nami, stuhlmueller, mean_field, fully_connected):
            assert invert(net).num_grounded_edges == invert(net).ground().num_edges


def test_the_grounding_names_instances(schools):
    ground = schools.ground()
    theta = [("theta", (("school", i),)) for i in range(8)]
    y = [("y", (("school", i),)) for i in range(8)]
    assert set(ground.parents[theta[3]]) == {("mu", ()), ("tau", ()), y[3]}
    assert set(ground.parents["mu", ()]) == set(y)
    assert ground.predictive == {("pred", (("school", i),)) for i in range(8)}
    assert [v for v in reversed(ground.order) if v[0] == "theta"] == theta


def test_the_grounding_of_a_joint_block_is_autoregressive():
    net = BayesNet([Site("z", plates={"n"}), Site("sum", observed=True)], [("z", "sum")], {"n": 3})
    z = [("z", (("n", i),)) for i in range(3)]
    ground = nami(net).ground()
    assert [set(ground.parents[v]) for v in z] == [{("sum", ()), *z[:i]} for i in range(3)]


def test_levels_wait_for_latent_parents_only(schools):
    assert schools.levels == (("mu",), ("tau",), ("theta",), ("pred",))
    net = BayesNet.from_edges(
        [(0, "x0"), (1, "x1"), (0, 2), (1, 2), (2, "x2")], observed=["x0", "x1", "x2"]
    )
    assert [set(level) for level in nami(net, direction="reverse").levels] == [{0}, {1}, {2}]
    assert [set(level) for level in stuhlmueller(net).levels] == [{2}, {1}, {0}]
    assert [set(level) for level in mean_field(net).levels] == [{0, 1, 2}]
    assert nami(BayesNet([Site("x", observed=True)], [])).levels == ()


def test_as_a_networkx_graph_edges_run_from_what_is_read_to_the_latent(schools):
    graph = schools.to_networkx()
    assert set(graph.edges) == {(u, v) for v, reads in schools.parents.items() for u in reads}
    assert list(graph) == ["mu", "tau", "theta", "y", "pred"]
    assert graph.edges["y", "mu"]["across"] == NOTHING


def test_added_edges_are_read_and_end_predictiveness(schools):
    more = schools.with_edges([("mu", "pred"), ("tau", "theta"), ("y", "mu")])
    assert set(more.parents["pred"]) == {"theta", "mu"} and not more.predictive
    assert more.num_edges == schools.num_edges + 1
    assert schools.with_edges([]) == schools and schools.predictive == {"pred"}


def test_an_added_edge_is_read_across_the_joint_block():
    net = BayesNet(
        [Site("z", plates={"n"}), Site("s", observed=True), Site("c", plates={"n"}, observed=True)],
        [("z", "s")],
    )
    assert nami(net).with_edges([("c", "z")]).parents["z"]["c"] == {"n"}


@pytest.mark.parametrize(
    ("edge", "error"),
    [
        (
            ("theta", "mu"),
            r"'mu' to be observed or sampled before it; got the edge \('theta', 'mu'\)",
        ),
        (("mu", "mu"), r"'mu' to be observed or sampled before it; got the edge \('mu', 'mu'\)"),
        (("mu", "y"), r"to a latent of the inverse; got \('mu', 'y'\)"),
        (("q", "mu"), r"to a latent of the inverse; got \('q', 'mu'\)"),
    ],
)
def test_added_edges_must_fit_the_order(schools, edge, error):
    with pytest.raises(ValueError, match=error):
        schools.with_edges([edge])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"order": ("a",), "parents": {}}, "every latent in the order; got none for 'b'"),
        ({"order": ("a", "b", "x"), "parents": {}}, "in the order; got 'x', which is observed"),
        ({"order": ("a", "b", "b"), "parents": {}}, "once in the order; got 'b' twice"),
        ({"order": ("a", "b"), "parents": {"b": {"a": NOTHING}}}, r"got the edge \('a', 'b'\)"),
        (
            {"order": ("a", "b"), "parents": {}, "joint": {"a": {"n"}}},
            "'a' to be joint over plates it lies in",
        ),
    ],
)
def test_an_inverse_must_be_one_of_its_network(arguments, error):
    with pytest.raises(ValueError, match=error):
        Inverse(small(), **arguments)


def test_plates_read_across_must_be_shared():
    net = BayesNet.from_edges([("z", "x")], observed=["x"], plates={"x": ["n"]})
    with pytest.raises(
        ValueError, match="'z' to read 'x' across plates that they share; got {'n'}"
    ):
        Inverse(net, ("z",), {"z": {"x": frozenset({"n"})}})


def test_a_user_writes_an_inverse_with_plain_mappings():
    inverse = Inverse(small(), ["a", "b"], {"a": {"b": NOTHING, "x": NOTHING}})
    assert (
        inverse.order == ("a", "b") and inverse.parents["b"] == {} and inverse.joint["a"] == NOTHING
    )


def test_inverses_cannot_be_changed():
    written = {"a": {"b": NOTHING}}
    inverse = Inverse(small(), ("a", "b"), written)
    written["a"]["x"] = NOTHING
    assert set(inverse.parents["a"]) == {"b"}
    assert isinstance(inverse.parents["a"], MappingProxyType) and isinstance(
        inverse.parents, MappingProxyType
    )


def test_inverses_compare_by_value_and_survive_copies(schools):
    schools.levels  # noqa: B018  a cache is no part of the value
    for other in (pickle.loads(pickle.dumps(schools)), copy.deepcopy(schools)):
        assert other == schools and hash(other) == hash(schools) and other.levels == schools.levels
    assert schools != schools.with_edges([("mu", "pred")])


def test_the_text_says_what_each_latent_reads(schools):
    assert str(schools).splitlines() == [
        "Inverse: latents 4, edges 7 (49 between instances), levels 4",
        "  mu | y over school",
        "  tau | mu, y over school",
        "  theta[school] | mu, tau, y",
        "  pred[school] | theta; from the model",
    ]
    net = BayesNet([Site("z", plates={"n"}), Site("total", observed=True)], [("z", "total")])
    assert str(nami(net)).splitlines()[1:] == ["  z[n] | total; jointly over n"]
