"""Lifted elimination against two oracles: the grounded graph, and the label algebra of the lifted moral graph."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import pytest

from pyro_nami.graph import BayesNet, Site, eliminate, moralize


def random_net(
    rng: random.Random, sites: int = 6, plates: int = 3, evidence: bool = False
) -> BayesNet:
    """A random network; with ``evidence``, every site without children is observed."""
    sizes = {f"p{i}": rng.choice([2, 3]) for i in range(rng.randint(0, plates))}
    n, density = rng.randint(1, sites), rng.choice([0.2, 0.4, 0.7])
    edges = [(u, t) for t in range(n) for u in range(t) if rng.random() < density]
    bare = set(range(n)) - {u for u, _ in edges} if evidence else set()
    return BayesNet(
        [
            Site(
                i,
                plates={p for p in sizes if rng.random() < 0.5},
                observed=i in bare or rng.random() < 0.3,
            )
            for i in range(n)
        ],
        edges,
        sizes,
    )


def instances(net, site):
    plates = [p for p in net.plate_sizes if p in net.plates[site]]
    return [
        dict(zip(plates, at))
        for at in itertools.product(*(range(net.plate_sizes[p]) for p in plates))
    ]


def key(site, at):
    return site, tuple(sorted(at.items()))


def agree(at, other, plates):
    return all(at[p] == other[p] for p in plates)


def grounded_moral_graph(net):
    """Neighbours of each instance, straight from the meaning of plates."""
    neighbours = {key(s, at): set() for s in net.sites for at in instances(net, s)}
    parents = {node: {node} for node in neighbours}
    for u, t in net.edges:
        shared = net.plates[u] & net.plates[t]
        for at in instances(net, t):
            parents[key(t, at)] |= {key(u, of) for of in instances(net, u) if agree(at, of, shared)}
    for family in parents.values():
        for a, b in itertools.permutations(family, 2):
            neighbours[a].add(b)
    return neighbours


def remove(neighbours, node):
    """Eliminates a node in place and returns its neighbours."""
    around = neighbours.pop(node)
    for a in around:
        neighbours[a].discard(node)
        neighbours[a] |= around - {a}
    return around


def joint_blocks(net, v, joint):
    """The instances of a site, grouped into its joint blocks."""
    groups = {}
    for at in instances(net, v):
        groups.setdefault(key(v, {p: i for p, i in at.items() if p not in joint}), []).append(at)
    return list(groups.values())


def read(net, v, at, reads):
    """The instances that the lifted result says instance ``at`` of ``v`` reads, its own site's aside."""
    return {
        key(u, of)
        for u, across in reads.items()
        for of in instances(net, u)
        if agree(at, of, (net.plates[u] & net.plates[v]) - across)
    }


def test_lifted_elimination_is_grounded_elimination():
    rng, joint_ones = random.Random(0), 0
    for _ in range(6000):
        net = random_net(rng)
        order = rng.sample(net.latent, len(net.latent))
        lifted, neighbours = eliminate(net, order), grounded_moral_graph(net)
        for v in order:
            joint_ones += bool(lifted.joint[v])
            for block in joint_blocks(net, v, lifted.joint[v]):
                nodes = {key(v, at) for at in block}
                inside = nx.Graph((a, b) for a in nodes for b in neighbours[a] & nodes)
                inside.add_nodes_from(nodes)
                assert nx.is_connected(inside), (net.edges, order, v)
                outside = set().union(*[remove(neighbours, node) for node in nodes]) - nodes
                assert all(read(net, v, at, lifted.parents[v]) == outside for at in block), (
                    net.edges,
                    order,
                    v,
                )
    assert joint_ones > 1000


def labels_by_pairs(net, order):
    """The algebra on pairs of sites: labels F, then parents and joint blocks, by the formulas as they are written."""
    plates, labels = net.plates, {}

    def couple(a, b, across):
        if a != b or across:
            labels[frozenset((a, b))] = labels.get(frozenset((a, b)), frozenset()) | across

    for t in net.sites:
        above = [u for u, child in net.edges if child == t]
        for u in above:
            couple(u, t, frozenset())
        for a, b in itertools.combinations_with_replacement(above, 2):
            couple(a, b, (plates[a] & plates[b]) - plates[t])
    moral, parents, joints = dict(labels), {}, {}
    for v in order:
        joint = labels.pop(frozenset((v,)), frozenset())
        batch = plates[v] - joint
        around = [u for pair in labels if v in pair for u in pair - {v}]
        reads = {u: labels.pop(frozenset((u, v))) | (joint & plates[u]) for u in around}
        for a, b in itertools.combinations_with_replacement(around, 2):
            shared = plates[a] & plates[b]
            couple(a, b, (shared - batch) | (shared & reads[a]) | (shared & reads[b]))
        parents[v], joints[v] = reads, joint
    return moral, parents, joints


def test_factors_say_what_the_labels_of_pairs_say():
    rng = random.Random(1)
    for _ in range(1000):
        net = random_net(rng, sites=8)
        order = rng.sample(net.latent, len(net.latent))
        moral, parents, joint = labels_by_pairs(net, order)
        labels = moralize(net)
        assert {frozenset((a, b)): label for a in labels for b, label in labels[a].items()} == moral
        result = eliminate(net, order)
        assert (result.parents, result.joint) == (parents, joint)


def rows_by_factor_lists(net, order):
    """The batches common to all factors of a pair, with every factor an explicit entry of a list of products."""
    factors = [({t, *(u for u, v in net.edges if v == t)}, [net.plates[t]]) for t in net.sites]
    rows = {}
    for v in order:
        joining = [factor for factor in factors if v in factor[0]]
        around = set().union(*(scope for scope, _ in joining)) - {v}
        rows[v] = {
            u: frozenset.intersection(
                *(frozenset.intersection(*batches) for scope, batches in joining if u in scope)
            )
            for u in around
        }
        batches = [batch for _, parts in joining for batch in parts]
        factors = [factor for factor in factors if v not in factor[0]]
        factors.append((around, [*batches, net.plates[v]]))
    return rows


def test_rows_are_the_batches_common_to_all_factors_that_join_a_pair():
    rng, smaller, larger = random.Random(2), 0, 0
    for _ in range(1000):
        net = random_net(rng, sites=8)
        order = rng.sample(net.latent, len(net.latent))
        rows = eliminate(net, order).rows
        assert rows == rows_by_factor_lists(net, order), (net.edges, order)
        pairs = [(v, u) for v in order for u in rows[v]]
        smaller += sum(rows[v][u] < net.plates[v] for v, u in pairs)
        larger += sum(not rows[v][u] <= net.plates[v] | net.plates[u] for v, u in pairs)
    assert smaller > 1000 and larger > 50


CROSSED = BayesNet.from_edges(
    [("mu", "alpha"), ("alpha", "y"), ("beta", "y")],
    observed=["y"],
    plates={"alpha": ["county"], "beta": ["day"], "y": ["obs", "county", "day"]},
    plate_sizes={"obs": 12, "county": 4, "day": 3},
    nesting={"obs": ["county", "day"]},
)
VARYING = BayesNet.from_edges(
    [("mu", "alpha"), ("alpha", "y"), ("sigma", "y")],
    observed=["y"],
    plates={"alpha": ["county"], "y": ["obs", "county"]},
    nesting={"obs": ["county"]},
)
LOCAL = BayesNet.from_edges(
    [("mu", "z"), ("z", "x")], observed=["x"], plates={"z": ["data"], "x": ["data"]}
)


@pytest.mark.parametrize(
    ("net", "order", "parents", "joint"),
    [
        (CROSSED, "alpha beta mu", {"alpha": {"mu": "", "beta": "", "y": ""}}, {"beta": "day"}),
        (VARYING, "alpha mu sigma", {}, {}),
        (LOCAL, "z mu", {"z": {"mu": "", "x": ""}, "mu": {"x": ""}}, {}),
        (LOCAL, "mu z", {"mu": {"z": ""}, "z": {"x": "data"}}, {"z": "data"}),
        (BayesNet.from_edges(["ab", "bc"], observed=[]), "b", {"b": {"a": "", "c": ""}}, {}),
    ],
    ids=[
        "crossed effects read each other, and the second ones are joint",
        "varying effects of one nested plate stay independent given the globals",
        "a parent outside the plate of its child stays one and local latents stay local",
        "eliminating a global site first makes the local ones joint",
        "an order may leave latents out",
    ],
)
def test_who_reads_whom_and_what_is_joint(net, order, parents, joint):
    found = eliminate(net, order.split())
    for v, expected in parents.items():
        assert found.parents[v] == {u: set(across.split()) for u, across in expected.items()}
    assert found.joint == {v: set(joint.get(v, "").split()) for v in order.split()}
    assert set(found.parents) == set(order.split())


def test_crossed_effects_read_each_other_at_the_rows_of_their_data():
    obs = frozenset({"obs", "county", "day"})
    assert eliminate(CROSSED, ["alpha", "beta", "mu"]).rows["alpha"] == {
        "mu": {"county"},
        "beta": obs,
        "y": obs,
    }


@pytest.mark.parametrize(
    ("order", "error"),
    [
        ("w", "'w', which is unknown"),
        ("x", "'x', which is observed"),
        ("zz", "'z', which is there twice"),
    ],
)
def test_an_order_is_one_of_distinct_latents(order, error):
    with pytest.raises(ValueError, match=error):
        eliminate(BayesNet.from_edges(["zx"], observed=["x"]), order)
