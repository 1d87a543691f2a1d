"""Tests whether an index map nests one plate in another.

A map from plate q to plate p puts every site of q into p. It is a nesting if, with everything else
redrawn, changing all sites in a part of p, with the rows of q that the map puts there, moves
nothing in the rest of p. Maps that fail are dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nami.reading.index_maps.decoding import Key
from pyro_nami.reading.interventions import Dependencies
from pyro_nami.reading.probe import ROUNDS, OutOfBudget, Place, Probe

__all__ = ["Nesting", "Route", "routes"]


class Route(NamedTuple):
    """A way by which one plate determines another: the pairs of plates on it, and the map ``(size,)`` they make up."""

    maps: tuple[Key, ...]
    rows: Tensor

    @property
    def start(self) -> str:
        """The plate that it leads from."""
        return self.maps[0][0]

    @property
    def end(self) -> str:
        """The plate that it leads to."""
        return self.maps[-1][1]


def routes(maps: Mapping[Key, Tensor], start: str) -> Iterator[Route]:
    """Yields every way from a plate to those it determines, the shorter ones first; none goes round a cycle twice.

    Example:
        >>> maps = {("house", "county"): torch.tensor([1, 0]), ("county", "state"): torch.tensor([5, 7])}
        >>> [(route.end, route.rows.tolist()) for route in routes(maps, "house")]
        [('county', [1, 0]), ('state', [7, 5])]
    """
    queue = [Route((key,), index) for key, index in maps.items() if key[0] == start]
    for route in queue:  # which grows
        yield route
        if all(route.end != plate for plate, _ in route.maps):
            on = [(key, index) for key, index in maps.items() if key[0] == route.end]
            queue += [Route((*route.maps, key), index[route.rows]) for key, index in on]


class Nesting:
    """Index maps, each taken for a way by which one plate is nested in another until it proves to be none.

    Args:
        probe: the model, whose runs count against its budget.
        found: what its sites read.

    Attributes:
        maps: the index map ``(size_q,)`` of each pair of plates (q, p).
        finished: whether the budget sufficed.
    """

    def __init__(self, probe: Probe, found: Dependencies) -> None:
        self.probe = probe
        self.parents = found.parents
        self.hidden = found.hidden
        self.maps: dict[Key, Tensor] = {}
        self.finished = True

    def drop(self, keys: Collection[Key]) -> None:
        """Drops maps."""
        for key in keys:
            self.maps.pop(key, None)

    def settle(self) -> None:
        """Drops the maps that contradict each other, or the model, until those that are left do not."""
        while bad := self._contradictions():
            self.drop(bad)
        verified: set[str] = set()
        while plates := sorted({p for _, p in self.maps} - verified):
            bad = self._violation(plates[0]) if self.probe.budget > 0 else set()
            if not bad:
                verified.add(plates[0])
            self.drop(bad)

    def _contradictions(self) -> set[Key]:
        """The maps on ways that go round in a circle, disagree, or join plates that a site lies in crossed."""
        bad: set[Key] = set()
        for end in {p for _, p in self.maps}:
            ways = self._ways_to(end)
            for start in {route.start for route in ways}:
                found = [route for route in ways if route.start == start]
                joined = any({start, end} <= plates for plates in self.probe.plates_of.values())
                disagree = any(not torch.equal(found[0].rows, route.rows) for route in found)
                if start == end or joined or disagree:
                    bad |= _keys_of(found)
        return bad

    def _violation(self, plate: str) -> set[Key]:
        """Returns the maps into a plate that align an edge that no run can test, or else one that a run refutes.

        Values of everything are redrawn, and then those of all sites in one half of the plate: nothing may move in the
        other half. The halves part every two instances. There are some at least, since a row that follows a wrong index
        may happen to follow the right one.
        """
        probe = self.probe
        inside = self._inside(plate)
        places = {
            name: Place(frame.dim, inside[frame.name])
            for name in probe.order
            for frame in probe.frames[name]
            if frame.name in inside
        }
        testable = probe.movable | probe.arguments
        aligned = self._aligned(places, inside)
        untested = {name for u, name in aligned if name in self.hidden or u not in testable}
        bad = set().union(*(self._responsible(name, plate) for name in untested))
        if bad:
            return bad
        parents = {u for u, _ in aligned}
        data = [u for u in probe.order if u in probe.arguments and u in parents]
        names = [name for name in places if name not in self.hidden]
        number = torch.arange(probe.sizes[plate], device=probe.device)
        bits = max(1, (len(number) - 1).bit_length())
        try:
            for i in range(max(ROUNDS, bits)):
                origin = probe.attempt(probe.redraw, probe.movable, probe.first)
                half = (number >> i % bits) & 1 == 1
                for changed in (half, ~half):
                    run = probe.attempt(probe.redraw_rows, origin, places, changed, data)
                    for name in names:
                        if run.strayed(origin, name, places[name], changed).any():
                            return self._responsible(name, plate)
        except (OutOfBudget, KeyError) as error:  # KeyError: the model fails at all these values
            self.finished &= isinstance(error, KeyError)
            return _keys_of(self._ways_to(plate))
        return set()

    def _inside(self, plate: str) -> dict[str, Tensor]:
        """Returns each plate in this one, itself included, with the instance ``(size,)`` in which each row lies."""
        found = {route.start: route.rows for route in self._ways_to(plate)}
        found[plate] = torch.arange(self.probe.sizes[plate])
        return {q: rows.to(self.probe.device) for q, rows in found.items()}

    def _aligned(self, places: Collection[str], inside: Collection[str]) -> list[Key]:
        """The pairs (parent, site) with places in a plate that no plate ``inside`` of it, but maps alone, aligns."""
        plates_of = self.probe.plates_of
        return [
            (u, name)
            for name in places
            for u in self.parents[name]
            if u in places and (plates_of[u] & plates_of[name]).isdisjoint(inside)
        ]

    def _ways_to(self, plate: str) -> list[Route]:
        """Returns all ways to a plate."""
        starts = {q for q, _ in self.maps}
        return [route for q in starts for route in routes(self.maps, q) if route.end == plate]

    def _responsible(self, name: str, plate: str) -> set[Key]:
        """The maps by which a site, or if it lies in the plate itself its parents, come to lie in a plate."""
        plates_of = self.probe.plates_of
        names = [name] if plate not in plates_of[name] else self.parents[name]
        inner = {q for u in names for q in plates_of[u] if plate not in plates_of[u]}
        ways = self._ways_to(plate)
        return _keys_of([route for route in ways if route.start in inner] or ways)


def _keys_of(ways: Iterable[Route]) -> set[Key]:
    """Returns the maps on some ways."""
    return {key for route in ways for key in route.maps}
