"""NaMI at work on the paper's small graphs: Table 1 and Figures 1, 2, 3 and 5 of Webb et al. 2018, with no training.

- Table 1: the algorithm's trace on Figure 3's network, as text and as pictures: at every step the induced graph (moral
  and fill-in edges apart, eliminated sites black) and the inverse as far as it has grown.
- Figure 1: a tree on which Stuhlmueller's heuristic asserts an independence that the model lacks. `verify_inverse`
  names it; NaMI's inverses are faithful and minimal.
- Figure 2: what makes an inverse natural, on A -> C <- B: no site reads its descendants, or none its ancestors.
- Figure 5: a binary tree of depth 3 and its inverses, the network read off the Pyro model of `gaussian_tree`. Beyond
  the paper: edge counts at depths 3 to 7, all elimination orders at depths 3 and 4 (some need fewer edges than the
  reverse one, which the paper calls the most compact), and the least KL that each structure allows, over trees.

The drawings are damaged in the copy of the paper that this was written from, so its words are what ours is compared
with. The edges of Figure 3 are those of the Student network that the text elaborates; rows 0 to 4 of Table 1 are
legible with the prose of section 2.2, and row 5 and the parents of S, G and L follow from the product of factors in the
first version (arXiv v1, section 4.4). The fill-in edge of step 4, which inverse of Figure 2 is which, and all
layouts are ours.

All settings do the same, but ``--smoke`` leaves out depths above 5 and the orders at depth 4. Run with::

    python examples/paper/structure.py [--smoke | --paper] [--seeds 10] [--out FOLDER]
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import networkx as nx
from experiment import Options, parse, print_table, write_results
from gaussian_tree import GaussianTree
from graph_figures import (
    FILL_COLOR,
    MISSING_COLOR,
    MORAL_COLOR,
    Edges,
    Panel,
    draw_panels,
    inverse_panel,
    network_panel,
)

from pyro_nami import (
    BayesNet,
    Inverse,
    extract_bayesnet,
    fully_connected,
    mean_field,
    nami,
    nami_steps,
    stuhlmueller,
    verify_inverse,
)
from pyro_nami.graph import d_separated, eliminate, moralize
from pyro_nami.show import render

Positions = Mapping[Hashable, tuple[float, float]]

STUDENT = BayesNet.from_edges(
    ["DG", "IG", "IS", "GL", "SJ", "LJ", "GH", "JH"], observed=["H", "J"], nodes="DIGSLJH"
)
STUDENT_AT = dict(
    zip("DIGSLJH", [(0, 3), (2, 3), (0.8, 2), (2.9, 2), (2.1, 1.1), (2.7, 0), (0.3, 0)])
)
# Step by step: the frontier (not legible at the last step), what is eliminated, and its parents.
TABLE_1 = [
    ("DI", "D", "GI"),
    ("I", "I", "GS"),
    ("GS", "S", "GJL"),
    ("G", "G", "HJL"),
    (None, "L", "HJ"),
]
MORAL = {frozenset("DI"), frozenset("SL"), frozenset("GJ")}

BRANCHES = BayesNet.from_edges(["AB", "AC", "BD", "CE"], observed=["D", "E"])
BRANCHES_AT = {"A": (1, 2), "B": (0.3, 1), "C": (1.7, 1), "D": (0.3, 0), "E": (1.7, 0)}
COLLIDER = BayesNet.from_edges(["AC", "BC"], observed=[], nodes="ABC")
COLLIDER_AT = {"A": (0, 1), "B": (1.4, 1), "C": (0.7, 0)}

INVERSIONS: dict[str, Callable[[BayesNet], Inverse]] = {
    "Stuhlmueller": stuhlmueller,
    "NaMI, forward": partial(nami, direction="forward"),
    "NaMI, reverse": partial(nami, direction="reverse"),
    "fully connected": fully_connected,
    "NaMI, min-fill alone": partial(nami, direction="free"),
    "mean field": mean_field,
}
FORWARD, REVERSE, FREE = "NaMI, forward", "NaMI, reverse", "NaMI, min-fill alone"


# What is claimed, and what the paper says.
CLAIMS = {
    "trace": (
        "Table 1: frontier, choice and parents agree at each of the five steps, as far as they are legible",
        "S: DI, I, GS, G, -; v: D, I, S, G, L; parents: GI, GS, GJL, HJL, HJ",
    ),
    "fill": (
        "Table 1: moralization adds D-I, S-L and G-J; eliminating D adds nothing, and I the edge G-S",
        "steps 0 to 2",
    ),
    "worked": ("Table 1: both modes give faithful, minimal and natural inverses", "Theorem 1"),
    "heuristic": (
        "Figure 1: Stuhlmueller's inverse makes B and C independent, the model does not; verify_inverse names the pair",
        "B and C are independent in H, and dependent in G (appendix C)",
    ),
    "branches": (
        "Figure 1: NaMI's inverses are faithful and minimal",
        "needs extra edges between the branches",
    ),
    "natural": (
        "Figure 2: H1, sampled as A, C, B, is not natural; H2 (C, B, A) and H3 (B, A, C) are",
        "H1 has an edge to a child and one to a parent",
    ),
    "inverted": (
        "Figure 5b: the heuristic inverts the tree's edges, and is not faithful",
        "simply inverts the edges",
    ),
    "formula": (
        "Figure 5c: forward NaMI has the factors q_i(x_i | x_{i+1}, ..., x_{2(i+1)})",
        "supplement E.2",
    ),
    "compact": (
        "Figure 5d: reverse NaMI has fewer edges than forward iff d > 3",
        "most compact for d > 3",
    ),
    "fewest": (
        "Figure 5d: no inverse has fewer edges where d > 3",
        "the most compact possible I-map for any d > 3",
    ),
    "natural fewest": ("Figure 5d: no natural inverse has fewer edges where d > 3", "not claimed"),
    "full": (
        "Figure 5e: the others have fewer edges than the fully connected inverse",
        "significantly fewer",
    ),
}
WHY_NOT = {
    "fewest": "Orders that are neither forward nor reverse need fewer. Min-fill alone finds one at d = 4: the root "
    "first, then from the leaves up; its inverse is faithful and minimal."
}


def claim(key: str, ours: Any, holds: bool) -> dict[str, Any]:
    """Returns a claim as the results file has it."""
    text, paper = CLAIMS[key]
    return {
        "claim": text,
        "paper": paper,
        "ours": ours,
        "holds": holds,
        "why": None if holds else WHY_NOT.get(key),
    }


def joined(names: Iterable[Hashable]) -> str:
    return ", ".join(sorted(map(str, names)))


# ---- Table 1


def moral_edges(net: BayesNet) -> set[frozenset[Hashable]]:
    """Returns the pairs that moralization joins, those of the network aside."""
    pairs = {frozenset((u, v)) for u, row in moralize(net).items() for v in row if u != v}
    return pairs - {frozenset(edge) for edge in net.edges}


def trace() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Prints Table 1; returns its rows and the claims on it."""
    steps = nami_steps(STUDENT, direction="forward")
    rows = [
        {
            "S": joined(step.frontier),
            "v": step.site,
            "fill": [*map(joined, step.fill)],
            "parents": joined(step.parents),
        }
        for step in steps
    ]
    moral = sorted(map(joined, moral_edges(STUDENT)))
    print(f"Figure 3\n{render(STUDENT)}\n\nTable 1, step 0: moralization joins {'; '.join(moral)}")
    cells = [
        [i, row["S"], row["v"], "; ".join(row["fill"]) or "-", row["parents"]]
        for i, row in enumerate(rows, 1)
    ]
    print_table(["step", "S", "v", "fill-in", "parents of v"], cells)
    made = {name: INVERSIONS[name](STUDENT) for name in (FORWARD, REVERSE)}
    print(f"\n{render(made[FORWARD])}\n  {verify_inverse(STUDENT, made[FORWARD])}")
    agree = [
        row["v"] == v and row["parents"] == joined(reads) and (s is None or row["S"] == joined(s))
        for row, (s, v, reads) in zip(rows, TABLE_1)
    ]
    added = {"moral": moral, **{row["v"]: row["fill"] for row in rows}}
    fits = moral_edges(STUDENT) == MORAL and added["D"] == [] and added["I"] == ["G, S"]
    right = {
        name: verify_inverse(STUDENT, each).minimal and natural(each) for name, each in made.items()
    }
    return rows, [
        claim("trace", rows, all(agree) and len(rows) == len(TABLE_1)),
        claim("fill", added, fits),
        claim("worked", right, all(right.values())),
    ]


# ---- Figures 1 and 2


def counterexample() -> list[dict[str, Any]]:
    """Prints what the inverses of Figure 1 get wrong; returns the claims."""
    print("\nFigure 1: A -> B -> D and A -> C -> E, with D and E observed")
    verdicts = {
        name: verify_inverse(BRANCHES, inversion(BRANCHES))
        for name, inversion in INVERSIONS.items()
    }
    for name, verdict in verdicts.items():
        print(f"  {name:<22}{INVERSIONS[name](BRANCHES).num_edges:>3} edges, {verdict}")
    heuristic = stuhlmueller(BRANCHES)
    as_network = BayesNet.from_networkx(heuristic.to_networkx(), observed=BRANCHES.observed)
    asserted, true = d_separated(as_network, "B", "C"), d_separated(BRANCHES, "B", "C")
    ours = {
        "in H": asserted,
        "in G": true,
        **{name: str(verdict) for name, verdict in verdicts.items()},
    }
    named = ("C", "B") in verdicts["Stuhlmueller"].missing
    return [
        claim("heuristic", ours, asserted and not true and named),
        claim("branches", ours, verdicts[FORWARD].minimal and verdicts[REVERSE].minimal),
    ]


def natural(inverse: Inverse) -> bool:
    """Whether an inverse is natural (Definition 3): no latent reads its descendants, or none its ancestors.

    Edges from data are left out: latents read their observed descendants in every order.
    """
    graph = inverse.net.graph
    edges = [(u, v) for v in inverse.order for u in inverse.parents[v] if u in inverse.parents]
    down = any(u in nx.ancestors(graph, v) for u, v in edges)
    return not (down and any(u in nx.descendants(graph, v) for u, v in edges))


def collider_inverses() -> dict[str, Inverse]:
    """Figure 2's inverses of A -> C <- B, sampled as A, C, B; as C, B, A; and as B, A, C."""
    made = {
        f"H{i}": Inverse(COLLIDER, order, eliminate(COLLIDER, order).parents)
        for i, order in ((1, "BCA"), (2, "ABC"))
    }
    return {**made, "H3": nami(COLLIDER, direction="reverse")}


def naturalness() -> dict[str, Any]:
    """Returns the claim on Figure 2."""
    found = {name: natural(inverse) for name, inverse in collider_inverses().items()}
    return claim("natural", found, [*found.values()] == [False, True, True])


# ---- Figure 5


def tree_network(depth: int) -> BayesNet:
    """Returns the network of the paper's tree as it is read off the Pyro model."""
    tree = GaussianTree(depth, seed=0)
    return extract_bayesnet(tree, tree.example())


def order_counts(net: BayesNet) -> dict[str, list[int]]:
    """Returns the fewest and most edges over elimination orders: topological, the reverse of one, and others."""
    counts: dict[str, set[int]] = {"forward": set(), "reverse": set(), "other": set()}
    for order in itertools.permutations(net.latent):
        place = {v: i for i, v in enumerate(order)}
        downwards = {place[u] < place[v] for u, v in net.edges if v in place}
        kind = "other" if len(downwards) > 1 else "forward" if downwards == {True} else "reverse"
        counts[kind].add(sum(map(len, eliminate(net, order).parents.values())))
    return {kind: [min(each), max(each)] for kind, each in counts.items() if each}


def follows_formula(inverse: Inverse) -> bool:
    """Whether an inverse is the product of q_i(x_i | x_{i+1}, ..., x_{2(i+1)}) of supplement E.2."""
    reads = inverse.parents
    return all(
        set(reads[f"x_{i}"]) == {f"x_{j}" for j in range(i + 1, 2 * i + 3)}
        for i in range(len(reads))
    )


def trees(
    depths: Sequence[int], searched: Sequence[int], seeds: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Prints edges and least KL by depth, and all orders at those searched; returns both, and the claims."""
    nets = {depth: tree_network(depth) for depth in depths}
    made = {
        name: {depth: inversion(net) for depth, net in nets.items()}
        for name, inversion in INVERSIONS.items()
    }
    edges = {
        name: {depth: inverse.num_edges for depth, inverse in each.items()}
        for name, each in made.items()
    }
    limits = {
        name: {
            depth: [GaussianTree(depth, seed).limit(inverse) for seed in range(seeds)]
            for depth, inverse in each.items()
        }
        for name, each in made.items()
    }
    orders = {depth: order_counts(nets[depth]) for depth in searched}
    print("\nFigure 5: binary trees with their leaves observed; edges by depth")
    print_table(["inverse", *depths], [[name, *each.values()] for name, each in edges.items()])
    print(f"\nLeast KL of the structure, nats, mean (sd) over {seeds} trees, by depth")
    print_table(
        ["inverse", *depths],
        [
            [
                name,
                *(f"{statistics.mean(v):.3f} ({statistics.pstdev(v):.3f})" for v in each.values()),
            ]
            for name, each in limits.items()
        ],
    )
    for depth, counts in orders.items():
        print(f"\nAll elimination orders at depth {depth}, fewest and most edges: {counts}")
    inverted = {
        depth: {*inverse.to_networkx().edges} == {(v, u) for u, v in nets[depth].edges}
        and not verify_inverse(nets[depth], inverse)
        for depth, inverse in made["Stuhlmueller"].items()
    }
    formula = {depth: follows_formula(inverse) for depth, inverse in made[FORWARD].items()}
    forward, reverse, deep = (
        edges[FORWARD],
        edges[REVERSE],
        [depth for depth in searched if depth > 3],
    )
    least = {depth: {kind: low for kind, (low, _) in orders[depth].items()} for depth in searched}
    ours = {
        depth: {**least[depth], FREE: edges[FREE][depth], REVERSE: reverse[depth]}
        for depth in searched
    }
    ours |= {
        "min-fill alone": [
            str(verify_inverse(nets[depth], made[FREE][depth])) for depth in searched
        ]
    }
    others = ("Stuhlmueller", FORWARD, REVERSE)
    return {"edges": edges, "limits": limits, "all orders": orders}, [
        claim("inverted", inverted, all(inverted.values())),
        claim("formula", formula, all(formula.values())),
        claim("compact", edges, all((reverse[d] < forward[d]) == (d > 3) for d in depths)),
        claim("fewest", ours, all(min(least[d].values()) == reverse[d] for d in deep)),
        claim(
            "natural fewest",
            ours,
            all(min(least[d]["forward"], least[d]["reverse"]) == reverse[d] for d in deep),
        ),
        claim(
            "full",
            edges,
            all(edges[name][d] < edges["fully connected"][d] for name in others for d in depths),
        ),
    ]


# ---- pictures


def step_panels() -> tuple[list[Panel], list[Panel]]:
    """The induced graph and the inverse after each step, the first column with the model and its inverse."""
    inverse, steps = nami(STUDENT, direction="forward"), nami_steps(STUDENT, direction="forward")
    induced = [network_panel("Figure 3: the model", STUDENT, STUDENT_AT)]
    grown = [inverse_panel("the inverse", inverse, STUDENT_AT)]
    for i in range(len(steps) + 1):
        title = (
            f"step {i}: S = {{{joined(steps[i - 1].frontier)}}}, v = {steps[i - 1].site}"
            if i
            else "step 0"
        )
        kinds = [
            Edges(STUDENT.edges, arrow="-"),
            Edges(moral_edges(STUDENT), MORAL_COLOR, arrow="-"),
        ]
        kinds.append(
            Edges([pair for step in steps[:i] for pair in step.fill], FILL_COLOR, "--", "-")
        )
        induced.append(Panel(title, STUDENT, STUDENT_AT, kinds, inverse.order[:i]))
        grown.append(inverse_panel("", inverse, STUDENT_AT, inverse.order[:i]))
    return induced, grown


def tree_positions(depth: int) -> dict[Hashable, tuple[float, float]]:
    """Level by level; inner levels a little wider than centred, so that no edge passes through a site."""
    at: dict[Hashable, tuple[float, float]] = {}
    for level in range(depth):
        width = 2 ** (depth - 1) * (1.2 if level < depth - 1 else 1.0)
        at |= {
            f"x_{2**level - 1 + i}": (width * ((i + 0.5) / 2**level - 0.5), depth - level)
            for i in range(2**level)
        }
    return at


def draw_figures(path: Path) -> None:
    """Writes Table 1 with Figure 3 to ``path``, and Figures 1, 2 and 5 beside it."""
    draw_panels(path, step_panels(), (17, 6), "oemf")
    beside = {
        name: path.with_name(f"{path.stem}_{name}.png")
        for name in ("counterexample", "natural", "trees")
    }
    print(f"Also: {', '.join(file.name for file in beside.values())}")

    row = [network_panel("(a) the model", BRANCHES, BRANCHES_AT)]
    for letter, name in zip("bcd", INVERSIONS):
        inverse = INVERSIONS[name](BRANCHES)
        verdict = verify_inverse(BRANCHES, inverse)
        panel = inverse_panel(
            f"({letter}) {name}: {str(verdict).split(';')[0]}", inverse, BRANCHES_AT
        )
        row.append(panel._replace(edges=[*panel.edges, Edges(verdict.missing, MISSING_COLOR, ":")]))
    draw_panels(beside["counterexample"], [row], (12, 3.8), "ofx")

    row = [network_panel("the model", COLLIDER, COLLIDER_AT)]
    for name, inverse in collider_inverses().items():
        row.append(
            inverse_panel(
                f"{name}: {'natural' if natural(inverse) else 'not natural'}", inverse, COLLIDER_AT
            )
        )
    draw_panels(beside["natural"], [row], (9, 2.6), "f")

    net, at = tree_network(3), tree_positions(3)
    row = [network_panel(f"(a) the model: {len(net.edges)} edges", net, at)]
    for letter, name in zip("bcde", INVERSIONS):
        inverse = INVERSIONS[name](net)
        row.append(inverse_panel(f"({letter}) {name}: {inverse.num_edges} edges", inverse, at))
    draw_panels(beside["trees"], [row], (17, 3.6), "of")


def experiment(options: Options) -> None:
    """Prints tables and traces, writes numbers and figures."""
    depths, searched = options.choose(
        ([3, 4, 5], [3]), ([3, 4, 5, 6, 7], [3, 4]), ([3, 4, 5, 6, 7], [3, 4])
    )
    steps, on_steps = trace()
    record, on_trees = trees(depths, searched, options.seeds)
    claims = [*on_steps, *counterexample(), naturalness(), *on_trees]
    settings = {"depths": depths, "searched": searched, "trees": options.seeds}
    payload = {"settings": settings, "table_1": steps, "figure_5": record, "claims": claims}
    draw_figures(write_results("structure", payload, options))


if __name__ == "__main__":
    experiment(parse(__doc__, seeds=(2, 10, 10)))
