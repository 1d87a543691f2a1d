"""Whether plates that are read through an index map are nested by it, as the maps that are kept are taken to say.

A map from plate q to plate p puts every site of q into p. That holds if, with everything else redrawn, changing all
that lies in a part of p, sites of q at the rows that the map puts there included, moves nothing in the rest of p. Maps
that fail are dropped; where only maps that the user gave can be to blame, that is an error.

Change this module to test more of what a nesting says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.reading.index_maps.finder import Route, moved, routes, spread
from pyro_nami.reading.probe import Probe, Run, redraw_rows

__all__ = ["Nesting", "OutOfBudget"]

Key = tuple[str, str]

# Rounds of verification: rows times rounds. An index that follows the sign of a latent changes with probability 1/2.
_ENOUGH_ROWS = 20
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 10
# Bits of the instances' numbers that are looked at in a round, but for the first round, which looks at all.
_BITS = 2
# Runs to try where the model fails at values that are drawn anew (a matrix that is not positive definite, say).
_ATTEMPTS = 3


class Place(NamedTuple):
    """Where a site lies in a plate: the index there ``(size,)`` of its rows along a batch dim."""

    dim: int
    rows: Tensor


class OutOfBudget(Exception):
    """Ends what runs the model where the budget does."""


class Nesting:
    """Index maps, each taken for a way by which one plate is nested in another until it proves to be none.

    Args:
        probe: the model, whose runs count against the budget.
        parents: the parents of each site.
        hidden: the sites that differ between runs by themselves.
        budget: the most runs of the probe, those before this one included.
        given: maps that the user knows, by plates (q, p), and for these by pair ``(latent, site)``.

    Attributes:
        maps: the index map ``(size_q,)`` of each pair of plates (q, p).
        given: those that the user gave, and ``pairs`` the plates of each pair of sites that they were given for.
        latents: the latents that can be changed.
        finished: whether the budget sufficed.
    """

    def __init__(
        self,
        probe: Probe,
        parents: Mapping[str, Collection[str]],
        hidden: Collection[str],
        budget: int,
        given: Mapping[Key, Mapping[Key, Tensor]],
    ) -> None:
        self.probe, self.parents, self.hidden, self.budget = probe, parents, frozenset(hidden), budget
        self.pairs = {pair: key for key, pairs in given.items() for pair in pairs}
        self.given = {key: next(iter(pairs.values())) for key, pairs in given.items()}
        self.maps: dict[Key, Tensor] = dict(self.given)
        self.latents = probe.latent & probe.changeable
        self.finished = True

    def settle(self) -> None:
        """Drops the maps that contradict each other, or the model, until those that are left do not."""
        while bad := self._contradictions():
            self.drop(bad)
        for plate in sorted({p for _, p in self.maps}):
            self.drop(self._untestable(plate))
        verified: set[str] = set()
        while plates := sorted({p for _, p in self.maps if self._is_open(p)} - verified):
            bad = self._violation(plates[0])
            if bad <= self.given.keys():
                verified.add(plates[0])
            self.drop(bad)

    def _is_open(self, plate: str) -> bool:
        """Whether maps align sites in a plate that the user did not say are."""
        if any(p == plate for _, p in self.maps.keys() - self.given.keys()):
            return True
        places = self._places(plate) if self.budget > 0 else {}
        return any(
            (u, name) not in self.pairs and self._aligned_by_maps(u, name, plate, places)
            for name in places
            for u in self.parents[name]
        )

    def drop(self, keys: Collection[Key]) -> None:
        """Drops maps, but none that was given."""
        for key in keys:
            if key not in self.given:
                self.maps.pop(key, None)

    def completed(self, run: Callable[[], Run]) -> Run:
        """Runs the model, and again if it fails at the values that were drawn."""
        for _ in range(_ATTEMPTS):
            if self.probe.runs >= self.budget:
                raise OutOfBudget
            result = run()
            if result.error is None:
                break
        return result

    def _plates(self, name: str) -> frozenset[str]:
        return self.probe.plate_names(name)

    def _contradictions(self) -> set[Key]:
        """The maps on ways that go round in a circle, disagree, or join plates that a site lies in crossed."""
        bad: set[Key] = set()
        for start in {q for q, _ in self.maps}:
            ways: dict[str, list[Route]] = {}
            for route in routes(self.maps, start):
                ways.setdefault(route.end, []).append(route)
            for end, found in ways.items():
                crossed = end == start or any({start, end} <= self._plates(name) for name in self.probe.order)
                if crossed or any(not torch.equal(found[0].rows, route.rows) for route in found):
                    keys = {key for route in found for key in route.maps}
                    if keys <= self.given.keys():
                        raise ValueError(
                            f"Expected index maps by which plate '{start}' determines plate '{end}'; got maps that "
                            f"disagree, or plates that are crossed. Leave {sorted(keys)!r} out of `index_maps`."
                        )
                    bad |= keys
        return bad

    def _untestable(self, plate: str) -> set[Key]:
        """The maps that would align a plate of sites whose edge no run of the model can test."""
        bad: set[Key] = set()
        places = self._places(plate)
        for name in places:
            for u in self.parents[name]:
                known = u in self.latents or u in self.probe.arguments
                if (name in self.hidden or not known) and self._aligned_by_maps(u, name, plate, places):
                    bad |= self._responsible(name, plate)
        return bad

    def _aligned_by_maps(self, u: str, name: str, plate: str, places: Mapping[str, Place]) -> bool:
        """Whether maps alone say that two sites are aligned in a plate."""
        shared = self._plates(u) & self._plates(name)
        return u in places and not any(plate in (q, *self._outer(q)) for q in shared)

    def _outer(self, plate: str) -> set[str]:
        return {route.end for route in routes(self.maps, plate)}

    def _responsible(self, name: str, plate: str) -> set[Key]:
        """The maps by which a site, or if it lies in the plate itself its parents, come to lie in a plate."""
        names = [name] if plate not in self._plates(name) else self.parents[name]
        inner = {q for u in names for q in self._plates(u) if plate not in self._plates(u)}
        return self._keys(inner, plate) or self._keys({q for q, _ in self.maps}, plate)

    def _erring(self, name: str, plate: str) -> set[Key]:
        """The maps that err where a site reads other instances of a plate than its own; given ones are an error."""
        keys = self._responsible(name, plate)
        if keys <= self.given.keys():
            pairs = sorted(pair for pair, key in self.pairs.items() if key in keys)
            raise ValueError(
                f"Expected site '{name}' to read plate '{plate}' row by row, through the index maps given for "
                f"{pairs!r}; got a row that changes with other instances. Leave these maps out of `index_maps`."
            )
        return keys

    def _keys(self, inner: Collection[str], plate: str) -> set[Key]:
        ways = (route for q in inner for route in routes(self.maps, q))
        return {key for route in ways if route.end == plate for key in route.maps}

    def _places(self, plate: str) -> dict[str, Place]:
        """For each site that lies in a plate, itself or by maps: a batch dim, and the index in the plate along it."""
        ways = {q: route.rows for q, _ in self.maps for route in routes(self.maps, q) if route.end == plate}
        ways[plate] = torch.arange(self.probe.plate_size(self.probe.plates[plate]), device=self.probe.device)
        return {
            name: Place(frame.dim, ways[frame.name].to(self.probe.device))
            for name in self.probe.order
            for frame in self.probe.frames(name)
            if frame.name in ways
        }

    def _violation(self, plate: str) -> set[Key]:
        """Changes all sites in one part of a plate; returns the maps that err if anything moves in the other part.

        Every two instances of the plate are parted once; values of everything else are redrawn, and in further rounds
        again, since a row that follows a wrong index may happen to follow the right one.
        """
        places = self._places(plate)
        fewest = min(len(index) for name, (_, index) in places.items() if plate not in self._plates(name))
        rounds = min(max(_FEWEST_ROUNDS, math.ceil(_ENOUGH_ROWS / max(fewest, 1))), _MOST_ROUNDS)
        size = self.probe.plate_size(self.probe.plates[plate])
        names = [name for name in places if name not in self.hidden]
        try:
            for number in range(rounds):
                origin = self._origin(number)
                for half in _halves(size, every=number == 0, device=self.probe.device):
                    run = self._change(origin, plate, places, half)
                    erring = [self._errs(name, places[name], half, origin, run) for name in names]
                    if erring and torch.stack(erring).any():
                        return self._erring(next(name for name, errs in zip(names, erring) if errs), plate)
        except (OutOfBudget, KeyError) as error:  # KeyError: the model fails at all these values
            self.finished &= isinstance(error, KeyError)
            return self._keys({q for q, _ in self.maps}, plate)
        return set()

    @staticmethod
    def _errs(name: str, place: Place, half: Tensor, origin: Run, run: Run) -> Tensor:
        """Whether a site moves outside of the half of a plate that was changed, boolean, ``()``."""
        rows = moved(origin.sites[name], run.sites.get(name))
        return (rows & spread(~half[place.rows], place.dim)).any()

    def _origin(self, number: int) -> Run:
        """A run at other values of all latents; in the first of a plate, discrete ones are sure to differ from base."""
        probe = self.probe
        return self.completed(lambda: probe.sample() if number else probe.redraw(self.latents, probe.first))

    def _change(self, origin: Run, plate: str, places: Mapping[str, Place], half: Tensor) -> Run:
        """Repeats a run with fresh values for all that lies in half of a plate."""

        def other(name: str, fn: Any) -> Tensor:
            dim, index = places[name]
            return redraw_rows(fn, origin.values[name], dim, ~half[index])

        def draw(msg: Any) -> Any:
            return other(msg["name"], msg["fn"]) if msg["name"] in inside else None

        inside = self.latents & places.keys()
        data = {
            u: other(u, origin.sites[u]["fn"])
            for u in self.probe.arguments & places.keys()
            if any(
                u in self.parents[name] and self._aligned_by_maps(u, name, plate, places) for name in places
            )
        }
        held = {name: value for name, value in origin.chosen.items() if name not in inside}
        return self.completed(lambda: self.probe.run({**held, **data}, draw))


def _halves(size: int, every: bool, device: torch.device) -> Iterator[Tensor]:
    """Halves of a plate's instances, each with the other half after it, that part every two instances, or most."""
    bits = (size - 1).bit_length()
    every = every or bits <= _BITS
    number = torch.arange(size, device=device) if every else torch.randperm(size, device=device)
    for bit in range(bits if every else _BITS):
        half = (number >> bit) & 1 == 1
        yield half
        yield ~half
