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
from pyro_nami.graph.inversions import DIRECTIONS, INVERSIONS

NOTHING = frozenset()


@pytest.fixture
def student():
    """The paper's worked example (Figure 3, Table 1)."""
    edges = ["DG", "IG", "IS", "GL", "SJ", "LJ", "GH", "JH"]
    return BayesNet.from_edges(edges, observed=["H", "J"], nodes="DIGSLJH")


def binary_tree(depth):
    """The paper's binary tree, the leaves observed."""
    n = 2**depth - 1
    edges = [((i - 1) // 2, i) for i in range(1, n)]
    return BayesNet.from_edges(edges, observed=range(n // 2, n), nodes=range(n))


def chain(n, observed):
    return BayesNet.from_edges([(i, i + 1) for i in range(n - 1)], observed=observed, nodes=range(n))


def reads(inverse):
    return {v: set(parents) for v, parents in inverse.parents.items()}


def test_the_papers_worked_example_step_by_step(student):
    steps = nami_steps(student, direction="forward")
    assert [("".join(s.frontier), s.site, "".join(s.parents), s.fill, s.cost) for s in steps] == [
        ("DI", "D", "IG", (), 0),
        ("I", "I", "GS", (("G", "S"),), 1),
        ("GS", "S", "GLJ", (), 0),
        ("G", "G", "LJH", (("L", "H"),), 1),
        ("L", "L", "JH", (), 0),
    ]
    assert not any(step.joint or step.predictive for step in steps)


def test_the_papers_worked_example(student):
    inverse = nami(student, direction="forward")
    assert reads(inverse) == {"D": {*"IG"}, "I": {*"GS"}, "S": {*"GLJ"}, "G": {*"LJH"}, "L": {*"JH"}}
    assert inverse.order == tuple("DISGL")


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
    assert inverse.order == (tuple(range(n - 1)) if direction == "forward" else tuple(range(n - 2, -1, -1)))


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
    upstream = {"forward": parents, "reverse": children, "free": dict.fromkeys(rank, set())}[direction]
    left, result = set(net.latent), {}
    while left:
        frontier = sorted(
            (v for v in left if not upstream[v] & left), key=rank.get, reverse=direction != "forward"
        )
        v = min(
            frontier, key=lambda v: sum(b not in graph[a] for a, b in itertools.combinations(graph[v], 2))
        )
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
            Site(i, plates={p for p in sizes if rng.random() < 0.5}, observed=i in bare or rng.random() < 0.2)
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
        v: [dict(zip(axes[v], i)) for i in itertools.product(*(range(net.plate_sizes[p]) for p in axes[v]))]
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
        return sum(
            coupling(net, min(pair), max(pair), label) for pair, label in labels.items() if v not in pair
        )

    return count(after) - count(labels), after


@pytest.mark.parametrize("direction", ["forward", "reverse", "free"])
def test_with_plates_the_choice_has_the_least_fill_in_grounded_edges(direction):
    rng, filled = random.Random(1), 0
    for _ in range(60):
        net = random_evidenced(rng, most=7, sizes=("p", "q"), hubs=0.5)
        labels = {}
        for t in net.sites:
            above = [u for u, child in net.edges if child == t]
            labels.update({frozenset((u, t)): NOTHING for u in above if frozenset((u, t)) not in labels})
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
    net = BayesNet.from_edges([("x", "z"), ("z", "y")], observed=["x", "y"])
    (step,) = nami_steps(net)
    assert step.frontier == ("z",) and set(step.parents) == {"x", "y"}


def test_ties_follow_the_model_forward_and_run_against_it_in_reverse():
    net = BayesNet.from_edges([(z, ("x", z)) for z in "abc"], observed=[("x", z) for z in "abc"], nodes=[
        *"abc", *(("x", z) for z in "abc")
    ])  # fmt: skip
    assert nami(net, direction="forward").order == ("a", "b", "c")
    assert nami(net, direction="reverse").order == nami(net, direction="free").order == ("c", "b", "a")


def test_auto_counts_instances_not_sites():
    # Per site, forward and reverse tie or differ by little; per instance the joint block of forward is large.
    plates = {"z": ["n"], "x": ["n"]}
    net = BayesNet.from_edges(
        [("mu", "z"), ("z", "x")], observed=["x"], plates=plates, plate_sizes={"n": 100}
    )
    forward, reverse = nami(net, direction="forward"), nami(net, direction="reverse")
    assert forward.num_edges == 2 and reverse.num_edges == 3
    assert forward.num_grounded_edges == 100 + 100 * 99 // 2 + 100**2 and reverse.num_grounded_edges == 300
    assert nami(net) == reverse


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


def test_barren_latents_keep_the_models_conditional_and_leave_the_rest_alone():
    net = BayesNet.from_edges(
        [("a", "w"), ("b", "w"), ("w", "v"), ("a", "x"), ("b", "y")], observed=["x", "y"]
    )
    for direction in DIRECTIONS:
        inverse = nami(net, direction=direction)
        assert inverse.predictive == {"w", "v"} and inverse.order[:2] == ("v", "w")
        assert reads(inverse) == {"v": {"w"}, "w": {"a", "b"}, "a": {"x"}, "b": {"y"}}


def test_barren_latents_read_across_no_shared_plate():
    net = BayesNet(
        [Site("z", plates={"n"}), Site("x", plates={"n"}, observed=True), Site("new", plates={"n", "m"})],
        [("z", "x"), ("z", "new")],
    )
    inverse = nami(net)
    assert inverse.parents["new"] == {"z": NOTHING} and inverse.joint["new"] == NOTHING


def test_marginalized_latents_go_first_and_emit_no_factor():
    net = BayesNet(
        [Site("mu"), Site("k", marginalized=True), Site("x", observed=True), Site("lost", marginalized=True)],
        [("mu", "k"), ("k", "x"), ("mu", "lost")],
    )
    for direction in DIRECTIONS:
        assert reads(nami(net, direction=direction)) == {"mu": {"x"}}


def test_a_barren_latent_below_a_marginalized_one_reads_what_that_was_joined_to():
    # k couples w and x: w's conditional is not the model's own, since a guide never samples k.
    net = BayesNet(
        [Site("mu"), Site("k", marginalized=True), Site("x", observed=True), Site("w"), Site("v")],
        [("mu", "k"), ("k", "x"), ("k", "w"), ("w", "v")],
    )
    inverse = nami(net)
    assert reads(inverse) == {"v": {"w"}, "w": {"mu", "x"}, "mu": {"x"}}
    assert inverse.predictive == {"v"}


def test_blocks_are_eliminated_one_after_the_other():
    # Semi-supervised q(z | x, y) q(y | x), supplement, appendix B.
    net = BayesNet.from_edges([("y", "x"), ("z", "x")], observed=["x"])
    for direction in DIRECTIONS:
        assert reads(nami(net, direction=direction, blocks=[["z"], ["y"]])) == {"z": {"x", "y"}, "y": {"x"}}
        assert reads(nami(net, direction=direction, blocks=[["y"], ["z"]])) == {"y": {"x", "z"}, "z": {"x"}}


def test_a_barren_latent_of_a_later_block_is_read_by_the_earlier_ones():
    # y has no observed descendant, but q(z | x, y) q(y | x) is what was asked for.
    net = BayesNet.from_edges([("z", "y"), ("z", "x")], observed=["x"])
    inverse = nami(net, blocks=[["z"], ["y"]])
    assert reads(inverse) == {"z": {"x", "y"}, "y": {"x"}} and not inverse.predictive


def test_what_a_barren_latent_coupled_goes_with_it():
    # After z, then y, nothing is left to make b and c dependent.
    net = BayesNet.from_edges(
        [("b", "y"), ("c", "y"), ("z", "x"), ("b", "bx"), ("c", "cx")], observed=["x", "bx", "cx"]
    )
    inverse = nami(net, blocks=[["z"], ["y"], ["b", "c"]])
    assert reads(inverse) == {"z": {"x"}, "y": {"b", "c"}, "b": {"bx"}, "c": {"cx"}}
    assert inverse.predictive == {"y"}


def test_a_time_series_can_be_filtered_block_by_block():
    edges = [(("z", t), ("z", t + 1)) for t in range(3)] + [(("z", t), ("x", t)) for t in range(4)]
    net = BayesNet.from_edges(edges, observed=[("x", t) for t in range(4)])
    inverse = nami(net, blocks=[[("z", t)] for t in range(4)])
    assert inverse.order == tuple(("z", t) for t in range(4))
    assert verify_inverse(net, inverse).minimal


@pytest.fixture
def bounded():
    """z ~ Uniform(0, hi): the support of z depends on hi."""
    return BayesNet(
        [Site("hi"), Site("z", support_parents={"hi"}), Site("w"), Site("x", observed=True)],
        [("hi", "z"), ("z", "w"), ("w", "x")],
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_site_goes_before_those_its_support_depends_on_in_every_direction(bounded, direction):
    inverse = nami(bounded, direction=direction)
    assert inverse.order.index("z") < inverse.order.index("hi")
    assert verify_inverse(bounded, inverse).minimal


def test_forward_keeps_its_order_where_the_support_leaves_it_free(bounded):
    assert nami(bounded, direction="forward").order == ("z", "hi", "w")


@pytest.fixture
def knotted():
    """The support of z depends on hi, and so does its parent m: forward direction wants hi before m before z."""
    return BayesNet(
        [Site("hi"), Site("m"), Site("z", support_parents={"hi"}), Site("low"), Site("x", observed=True)],
        [("hi", "m"), ("hi", "z"), ("m", "z"), ("z", "low"), ("low", "x")],
    )


def test_a_direction_that_forbids_a_support_says_which(knotted):
    with pytest.raises(ValueError, match="'z' goes before 'hi', .* 'forward'.* Use 'reverse'"):
        nami(knotted, direction="forward")
    assert nami(knotted) == nami(knotted, direction="reverse")
    assert verify_inverse(knotted, nami(knotted, direction="free")).minimal


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_blocks_that_forbid_a_support_say_which(bounded, direction):
    with pytest.raises(ValueError, match="'z' to be eliminated before 'hi', .* 'hi' goes first"):
        nami(bounded, direction=direction, blocks=[["hi", "w"], ["z"]])


def test_a_support_cannot_depend_on_a_latent_that_is_never_sampled():
    net = BayesNet(
        [Site("k", marginalized=True), Site("z", support_parents={"k"}), Site("x", observed=True)],
        [("k", "z"), ("z", "x")],
    )
    with pytest.raises(ValueError, match="'z' to be eliminated before 'k', .* 'k' is marginalized"):
        nami(net)


def test_an_observed_support_asks_for_nothing():
    net = BayesNet(
        [Site("hi", observed=True), Site("z", support_parents={"hi"}), Site("x", observed=True)],
        [("hi", "z"), ("z", "x")],
    )
    assert reads(nami(net, direction="forward")) == {"z": {"hi", "x"}}


def test_stuhlmueller_reads_the_markov_blankets_members_that_come_before_it_in_reverse_order(student):
    """By hand from Figure 3: children and co-parents that are observed or sampled by then.

    What it lacks: L and S are linked to H by way of G, and S to G by way of I, which comes after both.
    """
    inverse = stuhlmueller(student)
    assert reads(inverse) == {"D": {*"GI"}, "I": {*"GS"}, "G": {*"LHJ"}, "S": {*"LJ"}, "L": {"J"}}
    assert inverse.order == tuple("DIGSL")
    found = verify_inverse(student, inverse)
    assert set(found.missing) == {("H", "L"), ("H", "S"), ("S", "G")} and not found.redundant


def test_stuhlmueller_of_a_tree_only_inverts_the_edges():
    net = binary_tree(5)
    assert reads(stuhlmueller(net)) == {v: {2 * v + 1, 2 * v + 2} for v in range(15)}


def test_stuhlmueller_makes_a_local_latent_joint_where_a_global_child_couples_it():
    net = BayesNet(
        [Site("z", plates={"n"}), Site("x", plates={"n"}, observed=True), Site("total", observed=True)],
        [("z", "x"), ("z", "total")],
    )
    inverse = stuhlmueller(net)
    assert inverse.joint["z"] == {"n"} and inverse.parents["z"] == {"x": {"n"}, "total": NOTHING}
    assert verify_inverse(net, inverse).minimal


def test_mean_field_reads_the_data_only(student):
    inverse = mean_field(student)
    assert reads(inverse) == {v: {"H", "J"} for v in "DIGSL"}
    assert inverse.order == tuple(reversed(student.latent)) and len(inverse.levels) == 1


def test_fully_connected_reads_all_data_and_all_that_came_before(student):
    inverse = fully_connected(student)
    assert reads(inverse) == {v: {*"HJ", *"DIGSL"[:i]} for i, v in enumerate("DIGSL")}
    assert verify_inverse(student, inverse)


def test_fully_connected_assumes_no_independence_across_plates_either():
    net = BayesNet.from_edges(
        [("mu", "z"), ("z", "x")], observed=["x"], plates={"z": ["n"], "x": ["n"]}, plate_sizes={"n": 3}
    )
    inverse = fully_connected(net)
    order = list(reversed(inverse.ground().order))
    for i, v in enumerate(order):
        assert set(inverse.ground().parents[v]) == {*net.ground().observed, *order[:i]}


@pytest.mark.parametrize("invert", INVERSIONS.values(), ids=INVERSIONS)
def test_the_baselines_leave_marginalized_latents_out(invert):
    net = BayesNet(
        [Site("mu"), Site("k", marginalized=True), Site("x", observed=True)],
        [("mu", "k"), ("k", "x"), ("mu", "x")],
    )
    assert reads(invert(net)) == {"mu": {"x"}}


@pytest.mark.parametrize("invert", [nami, nami_steps, *INVERSIONS.values()])
def test_only_networks_are_inverted(invert):
    with pytest.raises(TypeError, match="Expected a BayesNet; got str. Build one with"):
        invert("model")


@pytest.mark.parametrize(
    ("blocks", "kind", "error"),
    [
        ([["D", "I", "G", "S"]], ValueError, "every latent in blocks; got none for 'L'"),
        ([["D", "I", "G", "S"], ["L", "Q"]], ValueError, "in blocks; got 'Q', which is an unknown site"),
        ([["D", "I", "G", "S"], ["L", "D"]], ValueError, "once in blocks; got 'D' twice"),
        ([["D", "I", "G", "S"], ["L", "H"]], ValueError, "in blocks; got 'H', which is observed"),
        (["DIGSL"], TypeError, "lists of site names; got the string 'DIGSL'"),
    ],
)
def test_errors_of_blocks(student, blocks, kind, error):
    with pytest.raises(kind, match=error):
        nami(student, blocks=blocks)


def test_a_marginalized_latent_has_no_place_in_blocks():
    net = BayesNet(
        [Site("z"), Site("k", marginalized=True), Site("x", observed=True)], [("z", "k"), ("k", "x")]
    )
    with pytest.raises(ValueError, match="in blocks; got 'k', which is marginalized"):
        nami(net, blocks=[["k"], ["z"]])


def test_an_unknown_direction_is_an_error(student):
    with pytest.raises(ValueError, match="one of auto, forward, reverse, free; got 'up'"):
        nami(student, direction="up")
