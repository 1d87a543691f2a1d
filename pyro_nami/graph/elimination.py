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

`search` is the loop of Webb et al. 2018, Algorithm 1, on top of this. Change this file to change *which* site is
eliminated next, or what elimination joins; what an inverse is lives in `inversion.py`.
"""

from __future__ import annotations

__all__ = ["Choice", "Elimination", "ForbiddenOrder", "eliminate", "moralize", "search"]

import heapq
import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pyro_nami.graph.bayesnet import BayesNet

NO_PLATES: frozenset[Hashable] = frozenset()


class Elimination(NamedTuple):
    """What eliminating sites in a given order yields.

    Attributes:
        parents: for each eliminated site, its neighbours when it went, each with the shared plates read across.
        joint: for each eliminated site, the plates over which its instances form one block.
    """

    parents: dict[Hashable, dict[Hashable, frozenset[Hashable]]]
    joint: dict[Hashable, frozenset[Hashable]]


class Choice(NamedTuple):
    """One elimination of `search`, in indices: what went, the sites it reads, and (traced) what was to choose from."""

    site: int
    parents: Iterable[int]
    joint: frozenset[Hashable]
    predictive: bool
    frontier: tuple[int, ...] = ()
    fill: tuple[tuple[int, int], ...] = ()
    cost: int = 0


class ForbiddenOrder(ValueError):
    """A direction or the blocks ask that a site be eliminated after one its support depends on."""


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
            if a != b or across:
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
    names, index, factors = net.indexed.names, net.indexed.index, Factors(net)
    result = Elimination({}, {})
    for name in order:
        if name not in net.sites or net.sites[name].observed or name in result.joint:
            raise ValueError(f"Expected an order of distinct latent sites; got {name!r}.")
        scope, joint = factors.eliminate(index[name])
        result.parents[name] = {names[u]: joint & factors.plates[u] for u in sorted(scope)}
        result.joint[name] = joint
    return result


class Factors:
    """The factors of a network while sites are eliminated from it.

    Args:
        net: the network.
        kept: the sites (indices) to start from, closed under parents; all by default.
        eliminated: sites to eliminate at once, in this order.
    """

    def __init__(self, net: BayesNet, kept: Iterable[int] | None = None, eliminated: Iterable[int] = ()) -> None:
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
            return set(), NO_PLATES
        batch = self._batch(v)
        self.touching[v] = set()
        product = max(ids, key=lambda i: len(self.scopes[i])) if len(ids) > 1 else next(iter(ids))
        scope = self.scopes[product]
        scope.discard(v)
        for i in ids:
            if i != product:
                part, self.scopes[i] = self.scopes[i], set()
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
        counts = {pair: self.added(*pair, batch) for pair in self._open_pairs(v, clique, rest)}
        return tuple(sorted(tuple(sorted(pair)) for pair, n in counts.items() if n)), sum(counts.values())  # type: ignore

    def disturbed(self, v: int, waiting: set[int]) -> set[int]:
        """The sites of ``waiting``, v's neighbours aside, between whose neighbours eliminating v may add an edge."""
        _, clique, rest = self._split(v)
        found: set[int] = set()
        for x in rest:
            ids = self.touching[x]
            if len(ids) <= len(clique) + len(rest):
                found.update(*(self.scopes[i] & waiting for i in ids))
                continue
            # x is a hub: look from the other ends of its new edges
            for b in itertools.chain(clique, rest):
                if b != x and b != v:
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
        spread = self.net.num_instances(across)
        if a == b:
            return self.net.num_instances(self.plates[a] - across) * spread * (spread - 1) // 2
        return self.net.num_instances(self.plates[a] | self.plates[b]) * spread


class Frontier:
    """The latents of one block that may go next, and the greedy min-fill choice among them.

    Fill is recounted only for sites whose neighbourhood changed, and for these only once a lower bound no longer
    rules them out: one elimination lowers the fill of a site by at most its degree (the edges of the eliminated
    site) plus the eliminated site's own fill (the edges added).

    Args:
        factors: the factors, which `choose` reads.
        waits: for each latent of the block, the latents of the block that must go before it.
        backwards: whether ties go to the last site in model order rather than the first.
    """

    def __init__(self, factors: Factors, waits: Mapping[int, Collection[int]], backwards: bool) -> None:
        self.factors = factors
        self.sign = -1 if backwards else 1
        self.pending = {v: len(before) for v, before in waits.items()}
        self.releases: dict[int, list[int]] = {v: [] for v in waits}
        for v, before in waits.items():
            for u in before:
                self.releases[u].append(v)
        self.ready = {v for v, count in self.pending.items() if not count}
        self.uncounted = set(self.ready)
        self.bounded: set[int] = set()
        self.bound: dict[int, int] = {}
        self.degree: dict[int, int] = {}
        self.heap: list[tuple[int, int]] = []

    def choose(self) -> int:
        """Returns the ready site of least fill; ties go by model order."""
        if len(self.ready) == 1:
            return next(iter(self.ready))
        for v in self.uncounted:
            self._count(v)
        self.uncounted.clear()
        while True:
            bound, rank = self.heap[0]
            v = abs(rank)
            if v not in self.ready or bound != self.bound.get(v):
                heapq.heappop(self.heap)
            elif v in self.bounded:
                heapq.heappop(self.heap)
                self._count(v)
            else:
                return v

    def take(self, v: int) -> tuple[set[int], frozenset[Hashable]]:
        """Eliminates v, releases what waited for it, and returns what `Factors.eliminate` does."""
        self.ready.discard(v)
        self.uncounted.discard(v)
        touched = self.factors.disturbed(v, self.ready) if self.ready else set()
        scope, joint = self.factors.eliminate(v)
        touched |= scope & self.ready
        for u in touched - self.uncounted:
            self._loosen(u, self.bound.get(v, 0), len(scope))
        for u in self.releases[v]:
            self.pending[u] -= 1
            if not self.pending[u]:
                self.ready.add(u)
                self.uncounted.add(u)
        return scope, joint

    def _count(self, v: int) -> None:
        self.bound[v], self.degree[v] = self.factors.fill(v)
        self.bounded.discard(v)
        heapq.heappush(self.heap, (self.bound[v], self.sign * v))

    def _loosen(self, u: int, fill: int, growth: int) -> None:
        bound = self.bound[u] - self.degree[u] - fill
        self.degree[u] += growth
        if bound > 0 and self.factors.uniform:
            self.bound[u] = bound
            self.bounded.add(u)
            heapq.heappush(self.heap, (bound, self.sign * u))
        else:
            self.uncounted.add(u)
            self.bound.pop(u)


class Remains:
    """The part of a network that still bears on the latents not yet eliminated: it is closed under parents.

    Args:
        net: the network. Marginalized sites count as eliminated from the start.
    """

    def __init__(self, net: BayesNet) -> None:
        self.net, self.parents = net, net.indexed.parents
        self.children_left = [0] * len(self.parents)
        self.kept = bytearray(len(self.parents))
        for v, site in reversed(list(enumerate(net.sites.values()))):
            if self.children_left[v] or not site.marginalized:
                self.kept[v] = 1
                for u in self.parents[v]:
                    self.children_left[u] += 1
        self.gone = {v: None for v, site in enumerate(net.sites.values()) if site.marginalized and self.kept[v]}

    def factors(self) -> Factors:
        """The factors of what is kept, after the eliminations so far."""
        kept = itertools.compress(range(len(self.kept)), self.kept)
        return Factors(self.net, kept, (v for v in self.gone if self.kept[v]))

    def drop(self, v: int) -> None:
        """Drops a site without children, and the eliminated sites that are then left without any."""
        stack = [v]
        while stack:
            v = stack.pop()
            self.kept[v] = 0
            for u in self.parents[v]:
                self.children_left[u] -= 1
                if not self.children_left[u] and u in self.gone:
                    stack.append(u)


def search(
    net: BayesNet, direction: str, blocks: Sequence[Collection[int]], traced: bool = False
) -> Iterator[Choice]:
    """Eliminates the latents, block after block, and yields each choice (Webb et al. 2018, Algorithm 1).

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
    remains = Remains(net)
    factors: Factors | None = None
    for block in blocks:
        for v in sorted(block, reverse=True):
            if not remains.children_left[v]:
                parents: Collection[int] = remains.parents[v]
                joint, predictive = NO_PLATES, remains.gone.keys().isdisjoint(parents)
                if not predictive:
                    parents, joint = remains.factors().eliminate(v)
                yield Choice(v, sorted(parents), joint, predictive, (v,) if traced else ())
                remains.drop(v)
                factors = None
        left = {v for v in block if remains.kept[v]}
        if not left:
            continue
        factors = factors or remains.factors()
        waits = _waits(net, direction, left)
        frontier = Frontier(factors, waits, backwards=direction != "forward")
        for _ in left:
            if not frontier.ready:
                raise ForbiddenOrder(_deadlock(net, direction, waits, remains.gone))
            v = frontier.choose()
            ready = tuple(sorted(frontier.ready)) if traced else ()
            fill, cost = factors.new_edges(v) if traced else ((), 0)
            parents, joint = frontier.take(v)
            remains.gone[v] = None
            yield Choice(v, sorted(parents), joint, False, ready, fill, cost)


def _supports(net: BayesNet) -> dict[int, set[int]]:
    index = net.indexed.index
    return {index[s.name]: {index[u] for u in s.support_parents} for s in net.sites.values() if s.support_parents}


def _waits(net: BayesNet, direction: str, block: set[int]) -> dict[int, list[int]]:
    """For each latent of a block, those of the block that go before it: upstream ones, and all it gives support to."""
    _, _, parents, children, _ = net.indexed
    support = _supports(net)
    waits = {}
    for v in sorted(block):
        below = (w for w in children[v] if w in block and (direction == "reverse" or v in support.get(w, ())))
        above = (u for u in parents[v] if u in block and u not in support.get(v, ()))
        waits[v] = [*(above if direction == "forward" else ()), *below]
    return waits


def _deadlock(net: BayesNet, direction: str, waits: Mapping[int, Sequence[int]], gone: Collection[int]) -> str:
    names, support = net.indexed.names, _supports(net)
    v = next(v for v in waits if v not in gone)
    seen: set[tuple[int, int]] = set()
    while True:  # follow what waits for what, into a cycle and round it to the support that closes it
        u = next(u for u in waits[v] if u not in gone)
        if (v, u) in seen and v in support.get(u, ()):
            return (
                f"Expected an order in which {names[u]!r} goes before {names[v]!r}, on which its support depends; "
                f"got direction {direction!r}, which puts it after a descendant of {names[v]!r}. "
                'Use direction "reverse".'
            )
        seen.add((v, u))
        v = u
