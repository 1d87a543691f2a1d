from __future__ import annotations

import itertools
import random

import pytest

from pyro_nami.graph import (
    BayesNet,
    Site,
    fully_connected,
    mean_field,
    nami,
    nami_steps,
    stuhlmueller,
    verify_inverse,
)
from pyro_nami.graph.inversion_methods import DIRECTIONS, INVERSIONS

NOTHING = frozenset()


def network(sites, edges, observed="", marginalized="", supports=(), plates=None):
    """Sites and edges by letters: ``"abx"``, ``"ab bx"``; ``supports`` are edges that move the child's support."""
    return BayesNet(
        [
            Site(
                v,
                plates=(plates or {}).get(v, ()),
                observed=v in observed,
                marginalized=v in marginalized,
                support_parents={u for u, t in supports if t == v},
            )
            for v in sites
        ],
        [tuple(edge) for edge in edges.split()],
    )


# The paper's worked example (Figure 3, Table 1).
STUDENT = network("DIGSLJH", "DG IG IS GL SJ LJ GH JH", "HJ")


def binary_tree(depth):
    """The paper's binary tree, the leaves observed."""
    n = 2**depth - 1
    edges = [((i - 1) // 2, i) for i in range(1, n)]
    return BayesNet.from_edges(edges, observed=range(n // 2, n), nodes=range(n))


def chain(n, observed):
    return BayesNet.from_edges(
        [(i, i + 1) for i in range(n - 1)], observed=observed, nodes=range(n)
    )


def reads(inverse):
    return {v: set(parents) for v, parents in inverse.parents.items()}


def test_the_papers_worked_example_step_by_step():
    steps = nami_steps(STUDENT, direction="forward")
    assert [("".join(s.frontier), s.site, "".join(s.parents), s.fill, s.cost) for s in steps] == [
        ("DI", "D", "IG", (), 0),
        ("I", "I", "GS", (("G", "S"),), 1),
        ("GS", "S", "GLJ", (), 0),
        ("G", "G", "LJH", (("L", "H"),), 1),
        ("L", "L", "JH", (), 0),
    ]
    assert not any(step.joint or step.predictive for step in steps)
    inverse = nami(STUDENT, direction="forward")
    assert inverse.order == tuple("DISGL")
    assert reads(inverse) == {step.site: set(step.parents) for step in steps}


@pytest.mark.parametrize(("depth", "forward", "reverse"), [(3, 9, 10), (5, 135, 78)])
def test_edges_of_the_papers_binary_trees(depth, forward, reverse):
    net = binary_tree(depth)
    assert nami(net, direction="forward").num_edges == forward
    assert nami(net, direction="reverse").num_edges == reverse
    assert nami(net).num_edges == min(forward, reverse)


def test_the_large_binary_tree_has_the_edges_it_should():
    assert nami(binary_tree(9), direction="forward").num_edges == 32_895


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_long_chain_is_inverted_without_deep_recursion(direction):
    n = 5_000
    inverse = nami(chain(n, [n - 1]), direction=direction)
    expected = {v: {v + 1} if direction == "forward" else {v - 1, n - 1} for v in range(1, n - 1)}
    assert {v: parents for v, parents in reads(inverse).items() if v} == expected
    assert len(inverse.levels) == n - 1
    assert inverse.order == (
        tuple(range(n - 1)) if direction == "forward" else tuple(range(n - 2, -1, -1))
    )


def test_a_chain_without_data_is_predictive():
    inverse = nami(chain(5_000, []), direction="forward")
    assert inverse.predictive == set(range(5_000)) and inverse.num_edges == 4_999


def algorithm_1(net, direction):
    """Webb et al. 2018, Algorithm 1, as it is written, recounting everything; ties as we break them."""
    rank = {v: i for i, v in enumerate(net.sites)}
    parents = {v: {u for u, t in net.edges if t == v} for v in rank}
    children = {v: {t for u, t in net.edges if u == v} for v in rank}
    graph = {v: set() for v in rank}
    for v in rank:
        for a, b in itertools.permutations({v} | parents[v], 2):
            graph[a].add(b)
    upstream = {"forward": parents, "reverse": children, "free": dict.fromkeys(rank, set())}[
        direction
    ]
    left, result = set(net.latent), {}
    while left:
        free = [v for v in left if not upstream[v] & left]
        frontier = sorted(free, key=rank.get, reverse=direction != "forward")
        fill = {
            v: sum(b not in graph[a] for a, b in itertools.combinations(graph[v], 2))
            for v in frontier
        }
        v = min(frontier, key=fill.get)
        left.discard(v)
        result[v] = graph.pop(v)
        for a in result[v]:
            graph[a] |= result[v] - {a}
            graph[a].discard(v)
    return result


def random_evidenced(rng, most=25, sizes=(), hubs=0.3):
    """A random network in which every site without children is observed; with ``hubs``, one site has many children."""
    n, density = rng.randint(2, most), rng.choice([0.05, 0.1, 0.2, 0.4])
    edges = {(u, t) for u, t in itertools.combinations(range(n), 2) if rng.random() < density}
    if rng.random() < hubs:
        edges |= {(rng.choice([0, 0, 1]) % t, t) for t in range(2, n)}
    bare = set(range(n)) - {u for u, _ in edges}
    return BayesNet(
        [
            Site(
                i,
                plates={p for p in sizes if rng.random() < 0.5},
                observed=i in bare or rng.random() < 0.2,
            )
            for i in range(n)
        ],
        edges,
        {plate: rng.choice([2, 3, 7]) for plate in sizes},
    )


@pytest.mark.parametrize("direction", ["forward", "reverse", "free"])
def test_the_fast_search_makes_the_choices_of_the_algorithm_as_written(direction):
    rng = random.Random(0)
    for _ in range(400):
        net = random_evidenced(rng)
        inverse, expected = nami(net, direction=direction), algorithm_1(net, direction)
        assert inverse.order == tuple(expected), (net.edges, net.observed)
        assert reads(inverse) == expected


def coupling(net, a, b, across):
    """The number of pairs of instances of a and b that agree on the shared plates outside ``across``."""
    axes = {v: [p for p in net.plate_sizes if p in net.plates[v]] for v in (a, b)}
    at = {
        v: [
            dict(zip(axes[v], i))
            for i in itertools.product(*(range(net.plate_sizes[p]) for p in axes[v]))
        ]
        for v in (a, b)
    }
    fixed = (net.plates[a] & net.plates[b]) - across
    pairs = sum(all(i[p] == j[p] for p in fixed) for i in at[a] for j in at[b])
    return (pairs - len(at[a])) // 2 if a == b else pairs


def labelled_fill(net, labels, v):
    """The grounded edges that eliminating v adds to a labelled moral graph, and the graph after it."""
    after, plates = {pair: across for pair, across in labels.items() if v not in pair}, net.plates
    batch = plates[v] - labels.get(frozenset((v,)), NOTHING)
    around = [u for pair in labels if v in pair for u in pair - {v}]
    for a, b in itertools.combinations_with_replacement(around, 2):
        pair, across = frozenset((a, b)), (plates[a] & plates[b]) - batch
        if a != b or across:
            after[pair] = after.get(pair, NOTHING) | across

    def count(labels):
        left = {pair: label for pair, label in labels.items() if v not in pair}
        return sum(coupling(net, min(pair), max(pair), label) for pair, label in left.items())

    return count(after) - count(labels), after


@pytest.mark.parametrize("direction", ["forward", "reverse", "free"])
def test_with_plates_the_choice_has_the_least_fill_in_grounded_edges(direction):
    rng, filled = random.Random(1), 0
    for _ in range(60):
        net = random_evidenced(rng, most=7, sizes=("p", "q"), hubs=0.5)
        labels = {}
        for t in net.sites:
            above = [u for u, child in net.edges if child == t]
            labels.update(
                {frozenset((u, t)): NOTHING for u in above if frozenset((u, t)) not in labels}
            )
            for a, b in itertools.combinations_with_replacement(above, 2):
                pair, across = frozenset((a, b)), (net.plates[a] & net.plates[b]) - net.plates[t]
                if a != b or across:
                    labels[pair] = labels.get(pair, NOTHING) | across
        for step in nami_steps(net, direction=direction):
            cost = {v: labelled_fill(net, labels, v)[0] for v in step.frontier}
            ties = [v for v in step.frontier if cost[v] == min(cost.values())]
            assert step.site == ties[0 if direction == "forward" else -1]
            assert step.cost == cost[step.site]
            assert (step.cost > 0) == bool(step.fill)
            filled += step.cost > 0
            labels = labelled_fill(net, labels, step.site)[1]
    assert filled > 20


def test_the_first_frontier_holds_latents_whose_parents_are_all_observed():
    (step,) = nami_steps(network("xzy", "xz zy", "xy"))
    assert step.frontier == ("z",) and set(step.parents) == {"x", "y"}


def test_ties_follow_the_model_forward_and_run_against_it_in_reverse():
    net = network("abcxyz", "ax by cz", "xyz")
    assert nami(net, direction="forward").order == ("a", "b", "c")
    assert (
        nami(net, direction="reverse").order == nami(net, direction="free").order == ("c", "b", "a")
    )


LOCAL = BayesNet.from_edges(
    [("mu", "z"), ("z", "x")],
    observed=["x"],
    plates={"z": ["n"], "x": ["n"]},
    plate_sizes={"n": 100},
)


def test_auto_counts_instances_not_sites():
    """Per site, forward and reverse differ by little; per instance the joint block of forward is large."""
    forward, reverse = nami(LOCAL, direction="forward"), nami(LOCAL, direction="reverse")
    assert forward.num_edges == 2 and reverse.num_edges == 3
    assert (
        forward.num_grounded_edges == 100 + 100 * 99 // 2 + 100**2
        and reverse.num_grounded_edges == 300
    )
    assert nami(LOCAL) == reverse


def test_auto_breaks_ties_by_levels_then_for_reverse():
    def measure(inverse):
        return inverse.num_grounded_edges, len(inverse.levels)

    rng, tied, fewer_levels = random.Random(0), 0, 0
    for _ in range(400):
        net = random_evidenced(rng, most=7)
        forward, reverse = nami(net, direction="forward"), nami(net, direction="reverse")
        assert nami(net) == (forward if measure(forward) < measure(reverse) else reverse)
        assert [s.site for s in nami_steps(net, direction="auto")] == list(nami(net).order)
        same_edges = forward.num_edges == reverse.num_edges
        tied += measure(forward) == measure(reverse) and forward != reverse
        fewer_levels += same_edges and len(forward.levels) < len(reverse.levels)
    assert tied and fewer_levels


@pytest.mark.parametrize(
    ("net", "blocks", "expected", "predictive"),
    [
        (
            network("abwvxy", "aw bw wv ax by", "xy"),
            None,
            {"v": "w", "w": "ab", "a": "x", "b": "y"},
            "wv",
        ),
        (network("mkxl", "mk kx ml", "x", "kl"), None, {"m": "x"}, ""),
        # k couples w and x: w's conditional is not the model's own, since a guide never samples k.
        (network("mkxwv", "mk kx kw wv", "x", "k"), None, {"v": "w", "w": "mx", "m": "x"}, "v"),
        # Semi-supervised q(z | x, y) q(y | x), supplement, appendix B.
        (network("yzx", "yx zx", "x"), ["z", "y"], {"z": "xy", "y": "x"}, ""),
        (network("yzx", "yx zx", "x"), ["y", "z"], {"y": "xz", "z": "x"}, ""),
        # y has no observed descendant, but q(z | x, y) q(y | x) is what was asked for.
        (network("zyx", "zy zx", "x"), ["z", "y"], {"z": "xy", "y": "x"}, ""),
        # After z, then y, nothing is left to make b and c dependent.
        (
            network("bcyzxpq", "by cy zx bp cq", "xpq"),
            ["z", "y", "bc"],
            {"z": "x", "y": "bc", "b": "p", "c": "q"},
            "y",
        ),
        (network("hzx", "hz zx", "hx", supports=["hz"]), None, {"z": "hx"}, ""),
    ],
    ids=[
        "barren latents keep the model's conditional and leave the rest alone",
        "marginalized latents go first and emit no factor",
        "a barren latent below a marginalized one reads what that was joined to",
        "blocks are eliminated one after the other",
        "in either order",
        "a barren latent of a later block is read by the earlier ones",
        "what a barren latent coupled goes with it",
        "an observed support asks for nothing",
    ],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_who_reads_whom(net, blocks, expected, predictive, direction):
    inverse = nami(net, direction=direction, blocks=blocks and [list(block) for block in blocks])
    assert reads(inverse) == {v: {*parents} for v, parents in expected.items()}
    assert inverse.predictive == {*predictive}
    if not blocks:
        assert inverse.order[: len(predictive)] == tuple(reversed(predictive))


def test_barren_latents_read_across_no_shared_plate():
    inverse = nami(network("zxw", "zx zw", "x", plates={"z": "n", "x": "n", "w": "nm"}))
    assert inverse.parents["w"] == {"z": NOTHING} and inverse.joint["w"] == NOTHING


def test_a_time_series_can_be_filtered_block_by_block():
    edges = [(("z", t), ("z", t + 1)) for t in range(3)] + [(("z", t), ("x", t)) for t in range(4)]
    net = BayesNet.from_edges(edges, observed=[("x", t) for t in range(4)])
    inverse = nami(net, blocks=[[("z", t)] for t in range(4)])
    assert inverse.order == tuple(("z", t) for t in range(4))
    assert verify_inverse(net, inverse).minimal


# z ~ Uniform(0, h): the support of z depends on h.
BOUNDED = network("hzwx", "hz zw wx", "x", supports=["hz"])
# The support of z depends on h, and so does its parent m: forward direction wants h before m before z.
KNOTTED = network("hmzlx", "hm hz mz zl lx", "x", supports=["hz"])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_site_goes_before_those_its_support_depends_on_in_every_direction(direction):
    inverse = nami(BOUNDED, direction=direction)
    assert inverse.order.index("z") < inverse.order.index("h")
    assert verify_inverse(BOUNDED, inverse).minimal


def test_forward_keeps_its_order_where_the_support_leaves_it_free():
    assert nami(BOUNDED, direction="forward").order == ("z", "h", "w")


def test_a_support_that_one_direction_forbids_is_inverted_in_the_others():
    assert nami(KNOTTED) == nami(KNOTTED, direction="reverse")
    assert verify_inverse(KNOTTED, nami(KNOTTED, direction="free")).minimal


LATE_Z = ["hw", "z"], ValueError, "'z' to be eliminated before 'h', .* 'h' goes first"
K_MARGINALIZED = network("kzx", "kz zx", "x", "k", supports=["kz"])


@pytest.mark.parametrize(
    ("net", "direction", "blocks", "kind", "error"),
    [
        (KNOTTED, "forward", None, ValueError, "'z' goes before 'h', .* 'forward'.* Use 'reverse'"),
        *((BOUNDED, direction, *LATE_Z) for direction in DIRECTIONS),
        (
            K_MARGINALIZED,
            "auto",
            None,
            ValueError,
            "'z' to be eliminated before 'k', .* 'k' is marginalized",
        ),
        (STUDENT, "auto", ["DIGS"], ValueError, "every latent in blocks; got none for 'L'"),
        (
            STUDENT,
            "auto",
            ["DIGS", "LQ"],
            ValueError,
            "in blocks; got 'Q', which is an unknown site",
        ),
        (STUDENT, "auto", ["DIGS", "LD"], ValueError, "once in blocks; got 'D' twice"),
        (STUDENT, "auto", ["DIGS", "LH"], ValueError, "in blocks; got 'H', which is observed"),
        (STUDENT, "auto", ("DIGSL",), TypeError, "lists of site names; got the string 'DIGSL'"),
        (
            network("zkx", "zk kx", "x", "k"),
            "auto",
            ["k", "z"],
            ValueError,
            "got 'k', which is marginalized",
        ),
        (STUDENT, "up", None, ValueError, "one of auto, forward, reverse, free; got 'up'"),
    ],
)
def test_errors_of_directions_and_blocks(net, direction, blocks, kind, error):
    if isinstance(blocks, list):
        blocks = [list(block) for block in blocks]
    with pytest.raises(kind, match=error):
        nami(net, direction=direction, blocks=blocks)


def test_stuhlmueller_reads_the_markov_blankets_members_that_come_before_it_in_reverse_order():
    """By hand from Figure 3: children and co-parents that are observed or sampled by then.

    What it lacks: L and S are linked to H by way of G, and S to G by way of I, which comes after both.
    """
    inverse = stuhlmueller(STUDENT)
    assert reads(inverse) == {"D": {*"GI"}, "I": {*"GS"}, "G": {*"LHJ"}, "S": {*"LJ"}, "L": {"J"}}
    assert inverse.order == tuple("DIGSL")
    found = verify_inverse(STUDENT, inverse)
    assert set(found.missing) == {("H", "L"), ("H", "S"), ("S", "G")} and not found.redundant


def test_stuhlmueller_of_a_tree_only_inverts_the_edges():
    net = binary_tree(5)
    assert reads(stuhlmueller(net)) == {v: {2 * v + 1, 2 * v + 2} for v in range(15)}


def test_stuhlmueller_makes_a_local_latent_joint_where_a_global_child_couples_it():
    net = network("zxt", "zx zt", "xt", plates={"z": "n", "x": "n"})
    inverse = stuhlmueller(net)
    assert inverse.joint["z"] == {"n"} and inverse.parents["z"] == {"x": {"n"}, "t": NOTHING}
    assert verify_inverse(net, inverse).minimal


def test_mean_field_reads_the_data_only():
    inverse = mean_field(STUDENT)
    assert reads(inverse) == {v: {"H", "J"} for v in "DIGSL"}
    assert inverse.order == tuple(reversed(STUDENT.latent)) and len(inverse.levels) == 1


def test_fully_connected_reads_all_data_and_all_that_came_before_across_plates_too():
    inverse = fully_connected(STUDENT)
    assert reads(inverse) == {v: {*"HJ", *"DIGSL"[:i]} for i, v in enumerate("DIGSL")}
    assert verify_inverse(STUDENT, inverse)
    inverse, observed = fully_connected(LOCAL).ground(), LOCAL.ground().observed
    order = list(reversed(inverse.order))
    assert all(set(inverse.parents[v]) == {*observed, *order[:i]} for i, v in enumerate(order))


@pytest.mark.parametrize("invert", INVERSIONS.values(), ids=INVERSIONS)
def test_the_baselines_leave_marginalized_latents_out(invert):
    assert reads(invert(network("mkx", "mk kx mx", "x", "k"))) == {"m": {"x"}}


@pytest.mark.parametrize("invert", [nami, nami_steps, *INVERSIONS.values()])
def test_only_networks_are_inverted(invert):
    with pytest.raises(TypeError, match="Expected a BayesNet; got str. Build one with"):
        invert("model")
