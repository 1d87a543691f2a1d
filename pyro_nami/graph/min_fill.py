"""Which latent is eliminated next: the loop of Webb et al. 2018, Algorithm 1.

`steps` peels off barren latents, keeps the frontier of each block, and eliminates the latent of
least fill in it. What an elimination couples is in `elimination`.
"""

from __future__ import annotations

__all__ = ["ForbiddenOrder", "Step", "steps"]

import heapq
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import networkx as nx

from pyro_nami.graph.elimination import MoralGraph
from pyro_nami.graph.network import BayesNet
from pyro_nami.graph.sites import NO_PLATES, Edge, Plates, Reads


class Step(NamedTuple):
    """One step of `nami` (a row of Webb et al. 2018, Table 1).

    Attributes:
        frontier: the latents to choose from, in model order.
        site: the latent that is eliminated.
        parents: what it reads in the inverse, and across which shared plates.
        joint: the plates over which its instances form one block.
        fill: the pairs of sites that its elimination couples anew, or across more plates than before.
        cost: the number of grounded edges in ``fill``, which the greedy choice makes least.
        predictive: whether the latent is barren and was peeled off, with the model's own conditional.
    """

    frontier: tuple[Hashable, ...]
    site: Hashable
    parents: Reads
    joint: Plates
    fill: tuple[Edge, ...]
    cost: int
    predictive: bool


class ForbiddenOrder(ValueError):
    """A direction asks that a site be eliminated after one its support depends on."""


def steps(
    net: BayesNet, direction: str, blocks: Sequence[Collection[int]], traced: bool = False
) -> Iterator[Step]:
    """Eliminates the latents, block after block, and yields each step (Webb et al. 2018, Algorithm 1).

    Departures from the paper: marginalized sites go first and are not yielded; a latent with no descendant left
    carries no evidence about its parents, so it is peeled off before the rest of its block, and what it coupled goes
    with it. So every choice is minimal in every order, barren latents (where the paper's Theorem 1 fails) included.

    Args:
        net: the network.
        direction: ``"forward"``, ``"reverse"`` or ``"free"``.
        blocks: an ordered partition of the latents that are not marginalized, in indices.
        traced: whether to report the frontier and the fill of each choice.

    Raises:
        ForbiddenOrder: the direction forbids what a support needs.
    """
    names, remains = net.indexed.names, Remains(net)
    graph: MoralGraph | None = None
    for block in blocks:
        for v in sorted(block, reverse=True):
            if not remains.num_children[v]:
                yield remains.barren_step(v)
                remains.drop(v)
                graph = None
        left = remains.kept.intersection(block)
        if not left:
            continue
        graph = graph or remains.moral_graph()
        frontier = Frontier(
            graph, _precedence(net, direction, left), backwards=direction != "forward"
        )
        for _ in left:
            v = frontier.choose()
            ready = tuple(names[u] for u in sorted(frontier.ready)) if traced else ()
            fill = graph.new_edges(v) if traced else {}
            parents, joint = frontier.take(v)
            remains.gone[v] = None
            pairs = tuple((names[a], names[b]) for a, b in sorted(fill))
            yield Step(ready, names[v], parents, joint, pairs, sum(fill.values()), False)


def _precedence(net: BayesNet, direction: str, block: set[int]) -> dict[int, set[int]]:
    """For each latent of a block, those that it must go before: downstream ones, and what its support depends on."""
    names, position, parents, children, _ = net.indexed
    downstream = {"forward": children, "reverse": parents}.get(direction)
    after = {v: block.intersection(downstream[v]) if downstream else set() for v in block}
    for z in block:
        for parent in net.sites[names[z]].support_parents:
            if (hi := position[parent]) in block:
                after[hi].discard(z)
                after[z].add(hi)
    return after


class Frontier:
    """The latents of one block that may go next, and the greedy min-fill choice among them.

    Fill is counted only for the site at the top of a heap, and again only after its neighbourhood changed and a lower
    bound brought it back: of the pairs that miss between a site's neighbours, one elimination takes away at most those
    of the eliminated site (the site's degree when counted) and those it joins (the eliminated site's own fill).

    Args:
        graph: the moral graph, which the eliminations change.
        after: for each latent of the block, those that it must go before.
        backwards: whether ties go to the last site in model order rather than the first.

    Example:
        >>> graph = MoralGraph(BayesNet.from_edges(["ax", "ay", "bx"], observed=["x", "y"], nodes="abxy"))
        >>> Frontier(graph, {0: set(), 1: set()}, backwards=False).choose()  # a would join y to b and x
        1
    """

    def __init__(self, graph: MoralGraph, after: dict[int, set[int]], backwards: bool) -> None:
        self.graph, self.after = graph, after
        self.sign = -1 if backwards else 1
        self.ready: set[int] = set()
        # a bound on the fill, the rank, whether it is exact
        self.bounds: dict[int, tuple[float, int, bool]] = {}
        self.slack: dict[int, float] = {}
        self.heap: list[tuple[float, int, bool]] = []
        self.pending = Counter(chain.from_iterable(after.values()))
        for v in after:
            if not self.pending[v]:
                self._release(v)

    def choose(self) -> int:
        """Returns the ready site of least fill; ties go by model order."""
        if not self.ready:
            raise ForbiddenOrder(_deadlock(self.graph.net, self.after))
        if len(self.ready) == 1:
            return next(iter(self.ready))
        while True:
            _, rank, exact = top = self.heap[0]
            v = abs(rank)
            current = self.bounds.get(v) == top
            if current and exact:
                return v
            heapq.heappop(self.heap)
            if current:
                fill, self.slack[v] = self.graph.fill(v)
                self._bound(v, fill, True)

    def take(self, v: int) -> tuple[Reads, Plates]:
        """Eliminates v, releases what waited for it, and returns what `MoralGraph.eliminate` does."""
        self.ready.discard(v)
        fill, _, _ = self.bounds.pop(v)
        touched = self.graph.disturbed(v, self.ready) if self.ready else ()
        read = self.graph.eliminate(v)
        for u in touched:
            self._bound(u, max(0, self.bounds[u][0] - self.slack.get(u, 0) - fill), False)
        for u in self.after[v]:
            self.pending[u] -= 1
            if not self.pending[u]:
                self._release(u)
        return read

    def _release(self, v: int) -> None:
        self.ready.add(v)
        self._bound(v, 0, False)

    def _bound(self, v: int, fill: float, exact: bool) -> None:
        bound = fill, self.sign * v, exact
        if self.bounds.get(v) != bound:
            self.bounds[v] = bound
            heapq.heappush(self.heap, bound)


def _deadlock(net: BayesNet, after: dict[int, set[int]]) -> str:
    """What to say of latents of which each must go before the next, and the last before the first."""
    names = net.indexed.names
    cycle = nx.find_cycle(nx.DiGraph((u, w) for u, later in after.items() for w in later))
    pairs = [(names[u], names[w]) for u, w in cycle]
    z, hi = next((z, hi) for z, hi in pairs if hi in net.sites[z].support_parents)
    return (
        f"Expected an order in which {z!r} goes before {hi!r}, on which its support depends; "
        f"got direction 'forward', which puts it after a descendant of {hi!r}. Use 'reverse'."
    )


class Remains:
    """The part of a network that still bears on the latents not yet eliminated: it is closed under parents.

    Args:
        net: the network. Marginalized sites count as eliminated from the start.
    """

    def __init__(self, net: BayesNet) -> None:
        self.net, self.parents = net, net.indexed.parents
        self.num_children = list(map(len, net.indexed.children))
        self.kept = set(range(len(self.parents)))
        # in this order
        self.gone = {v: None for v, site in enumerate(net.sites.values()) if site.marginalized}
        for v in self.gone:
            if not net.indexed.children[v]:
                self.drop(v)

    def moral_graph(self) -> MoralGraph:
        """The moral graph of what is kept, after the eliminations so far."""
        return MoralGraph(self.net, sorted(self.kept), [v for v in self.gone if v in self.kept])

    def barren_step(self, v: int) -> Step:
        """Eliminates a latent without children: it keeps the model's own conditional unless a parent is gone."""
        names = self.net.indexed.names
        if not self.gone.keys().isdisjoint(self.parents[v]):
            return Step((names[v],), names[v], *self.moral_graph().eliminate(v), (), 0, False)
        parents = dict.fromkeys([names[u] for u in self.parents[v]], NO_PLATES)
        return Step((names[v],), names[v], parents, NO_PLATES, (), 0, True)

    def drop(self, v: int) -> None:
        """Drops a site without children, and the eliminated sites that are then left without any."""
        stack = [v]
        while stack:
            v = stack.pop()
            self.kept.remove(v)
            for u in self.parents[v]:
                self.num_children[u] -= 1
                if not self.num_children[u] and u in self.gone:
                    stack.append(u)
