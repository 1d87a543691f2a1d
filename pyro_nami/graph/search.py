"""Which latent is eliminated next: the loop of Webb et al. 2018, Algorithm 1.

`search` peels barren latents off, keeps the frontier of each block, and takes from it the latent of least fill. Change
this file to change the order of elimination; what an elimination joins is in `elimination.py`.
"""

from __future__ import annotations

__all__ = ["Choice", "ForbiddenOrder", "search"]

import heapq
import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pyro_nami.graph.bayesnet import BayesNet
from pyro_nami.graph.elimination import NO_PLATES, Factors


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
        precedence = Precedence(net, direction, left)
        frontier = Frontier(factors, precedence, backwards=direction != "forward")
        for _ in left:
            if not frontier.ready:
                raise ForbiddenOrder(_deadlock(net, precedence, remains.gone))
            v = frontier.choose()
            ready = tuple(sorted(frontier.ready)) if traced else ()
            fill, cost = factors.new_edges(v) if traced else ((), 0)
            parents, joint = frontier.take(v)
            remains.gone[v] = None
            yield Choice(v, sorted(parents), joint, False, ready, fill, cost)


class Precedence:
    """What must go before what among the latents of one block.

    Upstream sites go first (parents in forward, children in reverse, none in free direction), except that a site
    always goes before those that its support depends on.
    """

    def __init__(self, net: BayesNet, direction: str, block: set[int]) -> None:
        names, position, parents, children, _ = net.indexed
        nothing: Sequence[tuple[int, ...]] = ((),) * len(names)
        self.block = block
        self.upstream = {"forward": parents, "reverse": children}.get(direction, nothing)
        self.downstream = {"forward": children, "reverse": parents}.get(direction, nothing)
        self.support: dict[int, set[int]] = {}
        self.supported: dict[int, set[int]] = {}
        for site in net.sites.values() if direction != "reverse" else ():
            for parent in site.support_parents:
                self.support.setdefault(position[site.name], set()).add(position[parent])
                self.supported.setdefault(position[parent], set()).add(position[site.name])

    def before(self, v: int) -> list[int]:
        """The sites of the block that must go before v."""
        support = self.support.get(v, ())
        sites = [u for u in self.upstream[v] if u in self.block and u not in support]
        return sites + [w for w in self.supported.get(v, ()) if w in self.block]

    def after(self, v: int) -> list[int]:
        """The sites of the block that v must go before."""
        supported = self.supported.get(v, ())
        sites = [w for w in self.downstream[v] if w in self.block and w not in supported]
        return sites + [u for u in self.support.get(v, ()) if u in self.block]


class Frontier:
    """The latents of one block that may go next, and the greedy min-fill choice among them.

    Fill is recounted only for sites whose neighbourhood changed, and for these only once a lower bound no longer
    rules them out: of the pairs counted as missing between a site's neighbours, one elimination takes away at most
    those of the eliminated site (the site's degree when counted) and those it joins (the eliminated site's own fill).

    Args:
        factors: the factors, which `choose` reads.
        precedence: what must go before what in the block.
        backwards: whether ties go to the last site in model order rather than the first.
    """

    def __init__(self, factors: Factors, precedence: Precedence, backwards: bool) -> None:
        self.factors, self.precedence = factors, precedence
        self.sign = -1 if backwards else 1
        self.pending = {v: len(precedence.before(v)) for v in precedence.block}
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
            self._loosen(u, self.bound.get(v, 0))
        for u in self.precedence.after(v):
            self.pending[u] -= 1
            if not self.pending[u]:
                self.ready.add(u)
                self.uncounted.add(u)
        return scope, joint

    def _count(self, v: int) -> None:
        self.bound[v], self.degree[v] = self.factors.fill(v)
        self.bounded.discard(v)
        heapq.heappush(self.heap, (self.bound[v], self.sign * v))

    def _loosen(self, u: int, fill: int) -> None:
        bound = self.bound[u] - self.degree[u] - fill
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
        self.gone = {
            v: None for v, site in enumerate(net.sites.values()) if site.marginalized and self.kept[v]
        }

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


def _deadlock(net: BayesNet, precedence: Precedence, gone: Collection[int]) -> str:
    names, support = net.indexed.names, precedence.support
    v = min(precedence.block.difference(gone))
    seen: set[tuple[int, int]] = set()
    while True:  # follow what waits for what, into a cycle and round it to the support that closes it
        u = next(u for u in precedence.before(v) if u not in gone)
        if (v, u) in seen and v in support.get(u, ()):
            return (
                f"Expected an order in which {names[u]!r} goes before {names[v]!r}, on which its support depends; "
                f"got direction 'forward', which puts it after a descendant of {names[v]!r}. Use 'reverse'."
            )
        seen.add((v, u))
        v = u
