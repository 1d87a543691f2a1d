"""Variable elimination, simulated: which sites each eliminated site leaves coupled.

Sites couple through *factors*. A factor is a scope (a set of sites) and a batch (a set of plates): there is one
copy of it for each index of its batch, and a copy joins the instances of its scope that agree with that index,
whatever their index on other plates. Two sites a and b of a factor are therefore coupled across the plates they
share outside its batch; in the labels of the lifted moral graph,

    F(a, b)  =  union over factors with a and b in scope  of  (P(a) & P(b)) - batch,        a = b allowed.

- Moralize: one factor a site t, with scope {t} and its parents, and batch P(t).
- Eliminate v: multiply the factors that hold v and drop v from the scope. The product's batch is P(v) cut down to
  the batches of all these factors, and joint(v) = P(v) - batch = F(v, v): the plates over which the instances of v
  form one block. Its neighbours are v's parents in the inverse, and v reads parent u across joint(v) & P(u).

That is all. The label across which v reads u, F(v, u) | (joint(v) & P(u)), needs no book-keeping of its own because
F(v, u) is within F(v, v): a factor that couples v and u across a plate couples instances of v across it too.
A factor's scope is stored once, however dense the graph gets, so elimination costs what it writes.

Change this file to change what elimination joins; which site goes next is chosen in `search.py`.
"""

from __future__ import annotations

__all__ = ["Elimination", "Factors", "eliminate", "moralize"]

import itertools
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from pyro_nami.graph.bayesnet import BayesNet

NO_PLATES: frozenset[Hashable] = frozenset()
NOTHING: Any = frozenset()


class Elimination(NamedTuple):
    """What eliminating sites in a given order yields.

    Attributes:
        parents: for each eliminated site, its neighbours when it went, each with the shared plates read across.
        joint: for each eliminated site, the plates over which its instances form one block.
        rows: for each eliminated site and each of its neighbours, the plates in which *every* factor that joined the
            two when the site went has one copy an index: over the rows of these plates the site reads the neighbour.
            They may be more than the plates of the two (``y[obs]`` joins ``alpha[county]`` and ``beta[day]``).
    """

    parents: dict[Hashable, dict[Hashable, frozenset[Hashable]]]
    joint: dict[Hashable, frozenset[Hashable]]
    rows: dict[Hashable, dict[Hashable, frozenset[Hashable]]]


def moralize(net: BayesNet) -> dict[Hashable, dict[Hashable, frozenset[Hashable]]]:
    """Returns the labels F of the lifted moral graph.

    Sites a and b are adjacent iff ``b in labels[a]``, and ``labels[a][b] == labels[b][a]`` holds the shared plates
    across which their instances are coupled. A self-edge is there only where it couples distinct instances.
    """
    names, factors = net.indexed.names, Factors(net)
    labels: dict[Hashable, dict[Hashable, frozenset[Hashable]]] = {name: {} for name in names}
    for a in range(len(names)):
        for b in sorted(set().union(*(factors.scopes[i] for i in factors.touching[a]))):
            across = factors.label(a, b)
            if across or (across is not None and a != b):
                labels[names[a]][names[b]] = across
    return labels


def eliminate(net: BayesNet, order: Iterable[Hashable]) -> Elimination:
    """Eliminates sites in the given order, nothing peeled off, and returns what each was joined to.

    Args:
        net: the network.
        order: distinct latent sites, first to last; sites left out stay uneliminated.

    Raises:
        ValueError: a site of the order is unknown, observed or repeated.
    """
    names, position, factors = net.indexed.names, net.indexed.position, Factors(net)
    result = Elimination({}, {}, {})
    for name in order:
        site = net.sites.get(name)
        if site is None or site.observed or name in result.joint:
            kind = "unknown" if site is None else "observed" if site.observed else "there twice"
            raise ValueError(f"Expected an order of distinct latent sites; got {name!r}, which is {kind}.")
        rows = factors.rows(position[name])
        scope, joint = factors.eliminate(position[name])
        result.parents[name] = {names[u]: joint & factors.plates[u] for u in sorted(scope)}
        result.joint[name] = joint
        result.rows[name] = {names[u]: rows[u] for u in sorted(scope)}
    return result


class Factors:
    """The factors of a network while sites are eliminated from it.

    Args:
        net: the network.
        kept: the sites (indices) to start from, closed under parents; all by default.
        eliminated: sites to eliminate at once, in this order.
    """

    def __init__(
        self, net: BayesNet, kept: Iterable[int] | None = None, eliminated: Iterable[int] = ()
    ) -> None:
        names, _, parents, _, self.plates = net.indexed
        self.net = net
        kept = range(len(names)) if kept is None else list(kept)
        self.scopes: list[set[int]] = []
        self.batches: list[frozenset[Hashable]] = []
        self.touching: list[set[int]] = [set() for _ in names]
        # With all sites in the same plates no label ever arises, and every pair counts alike.
        self.uniform = len({self.plates[t] for t in kept}) <= 1
        for t in kept:
            if parents[t]:
                for u in (t, *parents[t]):
                    self.touching[u].add(len(self.scopes))
                self.scopes.append({t, *parents[t]})
                self.batches.append(self.plates[t])
        for v in eliminated:
            self.eliminate(v)

    def eliminate(self, v: int) -> tuple[set[int], frozenset[Hashable]]:
        """Sums v out; returns its neighbours (a live set: read it before the next call) and joint(v)."""
        ids = self.touching[v]
        if not ids:
            return NOTHING, NO_PLATES
        batch = self._batch(v)
        self.touching[v] = NOTHING
        product = max(ids, key=lambda i: len(self.scopes[i])) if len(ids) > 1 else next(iter(ids))
        scope = self.scopes[product]
        scope.discard(v)
        for i in ids:
            if i != product:
                part, self.scopes[i] = self.scopes[i], NOTHING
                part.discard(v)
                for u in part:
                    self.touching[u].discard(i)
                    self.touching[u].add(product)
                scope |= part
        self.batches[product] = batch
        return scope, self.plates[v] - batch

    def label(self, a: int, b: int) -> frozenset[Hashable] | None:
        """F(a, b), or None where a and b share no factor."""
        ids = self.touching[a] & self.touching[b]
        if not ids:
            return None
        return (self.plates[a] & self.plates[b]).difference(
            frozenset.intersection(*(self.batches[i] for i in ids))
        )

    def rows(self, v: int) -> dict[int, frozenset[Hashable]]:
        """The plates common to the batches of all factors that join v and a neighbour, for each neighbour."""
        found: dict[int, frozenset[Hashable]] = {}
        for i in self.touching[v]:
            batch = self.batches[i]
            for u in self.scopes[i]:
                found[u] = found[u] & batch if u in found else batch
        found.pop(v, None)
        return found

    def fill(self, v: int) -> tuple[int, int]:
        """Returns the number of grounded edges that eliminating v would add, and a bound on v's degree.

        Where every site lies in the same plates, lifted edges are counted: each stands for as many grounded ones.
        """
        batch, clique, rest = self._split(v)
        if not self.uniform:
            return sum(self.added(a, b, batch) for a, b in self._open_pairs(v, clique, rest)), 0
        twice = 0
        for x in rest:
            twice += 2 * (len(clique) - len(self._near(x, clique))) + len(rest) - len(self._near(x, rest))
        return twice // 2, len(clique) + len(rest)

    def added(self, a: int, b: int, batch: frozenset[Hashable]) -> int:
        """The number of grounded edges by which coupling a and b outside ``batch`` exceeds F(a, b)."""
        old, shared = self.label(a, b), self.plates[a] & self.plates[b]
        new = (shared - batch) | (old or NO_PLATES)
        if new == old:
            return 0
        return self._num_edges(a, b, new) - (0 if old is None else self._num_edges(a, b, old))

    def new_edges(self, v: int) -> tuple[tuple[tuple[int, int], ...], int]:
        """Returns the lifted pairs that eliminating v would couple, or couple further, and their grounded edges."""
        batch, clique, rest = self._split(v)
        counts = {
            (min(a, b), max(a, b)): self.added(a, b, batch) for a, b in self._open_pairs(v, clique, rest)
        }
        return tuple(sorted(pair for pair, count in counts.items() if count)), sum(counts.values())

    def disturbed(self, v: int, waiting: set[int]) -> set[int]:
        """The sites of ``waiting``, v's neighbours aside, between whose neighbours eliminating v may add an edge."""
        batch, clique, rest = self._split(v)
        found: set[int] = set()
        for x in rest:
            ids = self.touching[x]
            if self.uniform:
                ends = (clique - self._near(x, clique)) | (rest - self._near(x, rest))
            else:
                ends = {b for b in clique | rest if b != v and self.added(x, b, batch)}
            # A disturbed site touches both ends of a new edge: look from the side that has fewer factors.
            if len(ids) <= len(ends):
                found.update(*(self.scopes[i] & waiting for i in ids))
                continue
            for b in ends:
                for i in self.touching[b]:
                    found.update(u for u in self.scopes[i] & waiting if not ids.isdisjoint(self.touching[u]))
        return found

    def _batch(self, v: int) -> frozenset[Hashable]:
        return self.plates[v].intersection(*(self.batches[i] for i in self.touching[v]))

    def _split(self, v: int) -> tuple[frozenset[Hashable], set[int], set[int]]:
        """Returns batch(v), the largest scope that eliminating v would leave as it is, and v's other neighbours."""
        ids, batch = self.touching[v], self._batch(v)
        clique: set[int] = set()
        for i in ids:
            if len(self.scopes[i]) > len(clique) and self.batches[i] <= batch:
                clique = self.scopes[i]
        rest = set().union(*(self.scopes[i] for i in ids if self.scopes[i] is not clique)) - clique
        rest.discard(v)
        return batch, clique, rest

    def _near(self, x: int, pool: set[int]) -> set[int]:
        """The sites of ``pool`` that share a factor with x."""
        ids = self.touching[x]
        if len(ids) > len(pool):
            return {b for b in pool if not ids.isdisjoint(self.touching[b])}
        return set().union(*[self.scopes[i] & pool for i in ids])

    def _open_pairs(self, v: int, clique: set[int], rest: set[int]) -> Iterator[tuple[int, int]]:
        """The pairs of v's neighbours that are not both in ``clique``, a site with itself included."""
        others = sorted(rest)
        yield from ((x, b) for x in others for b in clique if b != v)
        yield from itertools.combinations_with_replacement(others, 2)

    def _num_edges(self, a: int, b: int, across: frozenset[Hashable]) -> int:
        pairs = self.net.num_pairs(self.plates[a], self.plates[b], across)
        return (pairs - self.net.num_instances(self.plates[a])) // 2 if a == b else pairs
