"""Variable elimination, simulated: which sites each eliminated site leaves coupled.

Sites couple through *cliques* of the lifted moral graph. A clique is a set of sites and a batch (a
set of plates): there is one copy of it for each index of its batch, and a copy joins the instances
of its sites that agree with that index, whatever their index on other plates. Two sites of a clique
are therefore coupled across the plates that they share outside its batch. In labels of the lifted
moral graph,

    F(a, b)  =  union over cliques with a and b of  (P(a) & P(b)) - batch,        a = b allowed.

- Moralize: one clique for each site t, of t and its parents, with batch P(t).
- Eliminate v: unite the cliques that hold v, and drop v from the union. Its batch is P(v) cut down
  to the batches of all these cliques, and joint(v) = P(v) - batch = F(v, v) are the plates over
  which the instances of v form one block. Its sites are v's parents in the inverse, and v reads
  parent u across joint(v) & P(u).

The label across which v reads u, F(v, u) | (joint(v) & P(u)), needs no book-keeping of its own:
F(v, u) is within F(v, v), since a clique that couples v and u across a plate couples instances of v
across it too. A clique is stored once, however dense the graph becomes, so elimination costs what
it writes.
"""

from __future__ import annotations

__all__ = ["Elimination", "MoralGraph", "eliminate", "moralize"]

import itertools
import math
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from pyro_nami.graph.network import BayesNet
from pyro_nami.graph.sites import NO_PLATES, Plates, Reads

NOTHING: Any = frozenset()


class Elimination(NamedTuple):
    """What eliminating sites in a given order yields.

    Attributes:
        parents: for each eliminated site, its neighbours when it went, each with the shared plates read across.
        joint: for each eliminated site, the plates over which its instances form one block.
        rows: for each eliminated site and each of its neighbours, the plates in which *every* clique that joined the
            two when the site went has one copy an index: over the rows of these plates the site reads the neighbour.
            They may be more than the plates of the two (``y[obs]`` joins ``alpha[county]`` and ``beta[day]``).
    """

    parents: dict[Hashable, Reads]
    joint: dict[Hashable, Plates]
    rows: dict[Hashable, Reads]


def moralize(net: BayesNet) -> dict[Hashable, Reads]:
    """Returns the labels F(a, b) of the lifted moral graph.

    Sites a and b are adjacent iff ``b in labels[a]``, and ``labels[a][b] == labels[b][a]`` holds the shared plates
    across which their instances are coupled. A self-edge is there only where it couples distinct instances.
    """
    names = net.indexed.names
    plates = net.indexed.plates
    graph = MoralGraph(net)
    labels: dict[Hashable, Reads] = {name: {} for name in names}
    for a, name in enumerate(names):
        for b, rows in sorted(graph.rows(a).items()):
            across = (plates[a] & plates[b]) - rows
            if across or a != b:
                labels[name][names[b]] = across
    return labels


def eliminate(net: BayesNet, order: Iterable[Hashable]) -> Elimination:
    """Eliminates sites in the given order, nothing peeled off, and returns what each was joined to.

    Args:
        net: the network.
        order: distinct latent sites, first to last; sites left out stay uneliminated.

    Raises:
        ValueError: a site of the order is unknown, observed or repeated.

    Example:
        >>> net = BayesNet.from_edges(["ab", "bx"], observed=["x"])
        >>> {name: list(parents) for name, parents in eliminate(net, ["a", "b"]).parents.items()}
        {'a': ['b'], 'b': ['x']}
    """
    graph, result = MoralGraph(net), Elimination({}, {}, {})
    for name in order:
        site = net.sites.get(name)
        if site is None or site.observed or name in result.joint:
            kind = "unknown" if site is None else "observed" if site.observed else "there twice"
            raise ValueError(
                f"Expected an order of distinct latent sites; got {name!r}, which is {kind}."
            )
        v = net.indexed.position[name]
        rows = graph.rows(v)
        result.parents[name], result.joint[name] = graph.eliminate(v)
        result.rows[name] = {u: rows[net.indexed.position[u]] for u in result.parents[name]}
    return result


class MoralGraph:
    """The lifted moral graph of a network while sites (indices) are eliminated from it.

    Args:
        net: the network.
        kept: the sites to start from, closed under parents; all by default.
        gone: sites to eliminate at once, in this order.

    Example:
        >>> graph = MoralGraph(BayesNet.from_edges(["ax", "bx", "by"], observed=["x", "y"]))
        >>> graph.names, graph.fill(0)[0], graph.fill(1)[0]  # b would join y to a and x
        (('a', 'b', 'x', 'y'), 0, 2)
    """

    def __init__(
        self, net: BayesNet, kept: Iterable[int] | None = None, gone: Iterable[int] = ()
    ) -> None:
        self.net = net
        self.names = net.indexed.names
        self.plates = net.indexed.plates
        self.cliques: list[set[int]] = []
        self.batches: list[Plates] = []
        # the cliques that hold each site
        self.holding: list[set[int]] = [set() for _ in self.names]
        kept = range(len(self.names)) if kept is None else list(kept)
        # With all sites in the same plates no label ever arises, and every pair counts alike.
        self.uniform = len({self.plates[t] for t in kept}) <= 1
        for t in kept:
            if parents := net.indexed.parents[t]:
                for u in (t, *parents):
                    self.holding[u].add(len(self.cliques))
                self.cliques.append({t, *parents})
                self.batches.append(self.plates[t])
        for v in gone:
            self._unite(v)

    def eliminate(self, v: int) -> tuple[Reads, Plates]:
        """Sums v out; returns the names of its neighbours, each with the plates v reads it across, and joint(v)."""
        clique, joint = self._unite(v)
        return {self.names[u]: joint & self.plates[u] for u in sorted(clique)}, joint

    def _unite(self, v: int) -> tuple[set[int], Plates]:
        """Unites the cliques that hold v, without v, into the largest of them; returns that clique and joint(v)."""
        ids = self.holding[v]
        if not ids:
            return NOTHING, NO_PLATES
        batch = self._batch(v)
        self.holding[v] = NOTHING
        largest = max(ids, key=lambda i: len(self.cliques[i]))
        union = self.cliques[largest]
        union.discard(v)
        for i in ids:
            if i != largest:
                part, self.cliques[i] = self.cliques[i], NOTHING
                part.discard(v)
                for u in part:
                    self.holding[u].discard(i)
                    self.holding[u].add(largest)
                union |= part
        self.batches[largest] = batch
        return union, self.plates[v] - batch

    def rows(self, v: int) -> dict[int, Plates]:
        """The plates common to the batches of all cliques that join v and a site, for v and each neighbour."""
        found: dict[int, Plates] = {}
        for i in self.holding[v]:
            for u in self.cliques[i]:
                found[u] = found.get(u, self.batches[i]) & self.batches[i]
        return found

    def fill(self, v: int) -> tuple[int, float]:
        """The grounded edges that eliminating v would add, and how many of them another elimination can take away.

        The latter aside from the pairs that that one joins. Where all sites share plates, lifted edges are counted.
        """
        if not self.uniform:
            return sum(self.new_edges(v).values()), math.inf
        _, clique, rest = self._split(v)
        twice = 0
        for x in rest:
            twice += (
                2 * (len(clique) - len(self._near(x, clique)))
                + len(rest)
                - len(self._near(x, rest))
            )
        return twice // 2, len(clique) + len(rest)

    def new_edges(self, v: int) -> dict[tuple[int, int], int]:
        """The lifted pairs that eliminating v would couple, or couple further, and how many grounded edges each is."""
        batch, clique, rest = self._split(v)
        pairs = itertools.chain(
            itertools.product(rest, clique - {v}), itertools.combinations_with_replacement(rest, 2)
        )
        counts = {(min(pair), max(pair)): self._added(*pair, batch) for pair in pairs}
        return {pair: count for pair, count in counts.items() if count}

    def disturbed(self, v: int, waiting: set[int]) -> set[int]:
        """The sites of ``waiting`` whose fill eliminating v may change: neighbours of it or of a new edge's ends."""
        batch, clique, rest = self._split(v)
        found = (clique & waiting) | (rest & waiting)
        for x in rest:
            if self.uniform:
                ends = (clique - self._near(x, clique)) | (rest - self._near(x, rest))
            else:
                ends = {b for b in clique | rest if b != v and self._added(x, b, batch)}
            ids = self.holding[x]
            if len(ids) <= len(ends):  # look from the side that has fewer cliques
                found |= self._near(x, waiting)
            else:
                found.update(
                    u
                    for b in ends
                    for u in self._near(b, waiting)
                    if not ids.isdisjoint(self.holding[u])
                )
        return found

    def _batch(self, v: int) -> Plates:
        return self.plates[v].intersection(*[self.batches[i] for i in self.holding[v]])

    def _split(self, v: int) -> tuple[Plates, set[int], set[int]]:
        """Returns batch(v), the largest clique that eliminating v would leave as it is, and v's other neighbours."""
        ids, batch = self.holding[v], self._batch(v)
        clique: set[int] = set()
        for i in ids:
            if len(self.cliques[i]) > len(clique) and self.batches[i] <= batch:
                clique = self.cliques[i]
        rest = (
            set().union(*[self.cliques[i] for i in ids if self.cliques[i] is not clique]) - clique
        )
        rest.discard(v)
        return batch, clique, rest

    def _near(self, x: int, pool: set[int]) -> set[int]:
        """The sites of ``pool`` that share a clique with x."""
        ids = self.holding[x]
        if len(ids) > len(pool):
            return {b for b in pool if not ids.isdisjoint(self.holding[b])}
        return set().union(*[self.cliques[i] & pool for i in ids])

    def _added(self, a: int, b: int, batch: Plates) -> int:
        """The number of grounded edges by which coupling a and b outside ``batch`` exceeds F(a, b)."""
        shared, ids = self.plates[a] & self.plates[b], self.holding[a] & self.holding[b]
        if not ids:
            return self._num_edges(a, b, shared - batch)
        old = shared.difference(frozenset.intersection(*[self.batches[i] for i in ids]))
        new = (shared - batch) | old
        return self._num_edges(a, b, new) - self._num_edges(a, b, old) if new != old else 0

    def _num_edges(self, a: int, b: int, across: Plates) -> int:
        pairs = self.net.num_pairs(self.plates[a], self.plates[b], across)
        return (pairs - self.net.num_instances(self.plates[a])) // 2 if a == b else pairs
