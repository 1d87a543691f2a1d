"""Which plates of a model are read through an index map: the search at a guide's first call.

A site in plate q that reads latents of a plate p that it does not lie in is a candidate. Its map is found by
`index_maps` with all else held. It is accepted if it varies along q and no other plate, and proves to be a nesting:
with everything else redrawn, changing all that lies in a part of p, sites of q at the rows that the map puts there
included, moves nothing in the rest of p. So ``mu[z]`` with ``z`` latent is no map, nor is ``alpha[m1] - alpha[m2]``;
and plate q is not taken to be nested in p where a site of p reads all of q, or a second site of q all of p.

Change this module to accept other ways of reading a plate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.index_maps import MapPlan, Route, Trial, along, check_map, moved, routes, spread
from pyro_nami.replay import Probe, Run, redraw, redraw_rows

__all__ = ["Found", "search_maps"]

Key = tuple[str, str]

# Pairs of values to try until every row moves (of ``relu(alpha)[county]`` some values may move none).
_PAIRS = 6
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


class Found(NamedTuple):
    """What `search_maps` found.

    Attributes:
        maps: the index map ``(size_q,)`` of each pair of plates (q, p), those that were given included.
        plans: how to find those that were not given in other calls.
        finished: whether the budget sufficed.
    """

    maps: dict[Key, Tensor]
    plans: tuple[MapPlan, ...]
    finished: bool


def search_maps(
    probe: Probe,
    parents: Mapping[str, Collection[str]],
    hidden: Collection[str],
    budget: int,
    given: Mapping[Key, Any],
) -> Found:
    """Finds the index maps of a model whose edges are known.

    Args:
        probe: the model, whose runs count against the budget.
        parents: the parents of each site.
        hidden: the sites that differ between runs by themselves.
        budget: the most runs of the probe, those before this call included.
        given: maps that the user knows, by pair ``(latent, site)``; these pairs are not tested.

    Raises:
        TypeError: a given map is not a tensor of integers.
        ValueError: a given map names no latent and site, points outside its plate, or contradicts the model.
    """
    search = _Search(probe, parents, hidden, budget, _by_plates(probe, given))
    if budget > 0:
        search.find()
    search.settle()
    return Found(search.maps, search.plans(), search.finished)


class _OutOfBudget(Exception):
    """Ends the search where the budget does."""


class _Search:
    """The maps found so far; `find` adds candidates, `settle` takes away what is no nesting."""

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
        self.candidates: dict[str, MapPlan] = {}
        self.finished = True

    def find(self) -> None:
        """Finds candidate maps into every plate, as far as the budget goes."""
        try:
            for plate, frame in self.probe.plates.items():
                if self.probe.plate_size(frame) > 1:
                    self._find(plate, frame.dim)
        except _OutOfBudget:
            self.finished = False

    def settle(self) -> None:
        """Drops the maps that contradict each other, or the model, until those that are left do not."""
        while bad := self._contradictions():
            self._drop(bad)
        for plate in sorted({p for _, p in self.maps}):
            self._drop(self._untestable(plate))
        verified: set[str] = set()
        while plates := sorted({p for _, p in self.maps.keys() - self.given.keys()} - verified):
            bad = self._violation(plates[0])
            if bad <= self.given.keys():
                verified.add(plates[0])
            self._drop(bad)

    def plans(self) -> tuple[MapPlan, ...]:
        """The plans of the maps that are left; those that were given are never to be tested, but have a place."""
        plans = {}
        for plate, plan in self.candidates.items():
            found = self.maps.keys() - self.given.keys()
            targets = {name: q for name, q in plan.targets.items() if (q, plate) in found}
            if targets:
                read = {u for name in targets for u in self.parents[name]}
                values = {name: pair for name, pair in plan.values.items() if name in read}
                dims = {q: plan.dims[q] for q in targets.values()}
                plans[plate] = plan._replace(values=values, targets=targets, dims=dims)
        for (latent, site), (q, plate) in self.pairs.items():
            old = plans.get(plate, MapPlan(plate, self.probe.plates[plate].dim, {}, {}, {}))
            plans[plate] = old._replace(
                values={latent: self._pair(latent), **old.values},
                targets={**old.targets, site: q},
                dims={**old.dims, q: self.probe.plates[q].dim},
            )
        return tuple(plans.values())

    def _drop(self, keys: Collection[Key]) -> None:
        for key in keys:
            if key not in self.given:
                self.maps.pop(key, None)

    def _find(self, plate: str, dim: int) -> None:
        inside = [u for u in self.probe.order if u in self.latents and plate in self._plates(u)]
        targets = [name for name in self.probe.order if self._is_target(name, plate, inside)]
        latents = [u for u in inside if any(u in self.parents[name] for name in targets)]
        plan = self._moving_plan(plate, dim, latents, targets) if targets else None
        if plan is not None:
            for name, index in Trial(self._sites, plan, self._held(latents)).decode().items():
                self._accept(plan, name, index)

    def _plates(self, name: str) -> frozenset[str]:
        return self.probe.plate_names(name)

    def _is_target(self, name: str, plate: str, latents: Collection[str]) -> bool:
        if name in self.hidden or plate in self._plates(name) or not self._plates(name):
            return False
        return any(u in self.parents[name] and (u, name) not in self.pairs for u in latents)

    def _moving_plan(self, plate: str, dim: int, latents: list[str], targets: list[str]) -> MapPlan | None:
        """Returns a plan whose two values move every row of its targets, as many targets as can be had."""
        best: MapPlan | None = None
        for _ in range(_PAIRS):
            values = {name: self._pair(name) for name in latents}
            plan = MapPlan(plate, dim, values, dict.fromkeys(targets, ""), {})
            try:
                trial = Trial(self._sites, plan, self._held(latents))
                rows = trial.moved(torch.ones(trial.size, dtype=torch.bool))
            except KeyError:  # the model fails at these values, so that sites are missing
                continue
            moving = [name for name in targets if rows[name].numel() and rows[name].all()]
            if len(moving) > (0 if best is None else len(best.targets)):
                best = plan._replace(targets=dict.fromkeys(moving, ""))
            if len(moving) == len(targets):
                break
        return best

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        fn = self.probe.trace.nodes[name]["fn"]
        first = redraw(fn, self.probe.base[name])
        return _first_instance(first, fn), _first_instance(redraw(fn, first), fn)

    def _held(self, latents: Collection[str]) -> dict[str, Tensor]:
        nodes = self.probe.trace.nodes
        return {
            name: _first_instance(self.probe.base[name], nodes[name]["fn"])
            for name in self.probe.order
            if name in self.latents and name not in latents
        }

    def _sites(self, values: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Runs the model with values that are expanded to the shape of their sites."""
        full = {name: value.expand(self.probe.base[name].shape) for name, value in values.items()}
        return self._completed(lambda: self.probe.run(full)).sites

    def _completed(self, run: Callable[[], Run]) -> Run:
        """Runs the model, and again if it fails at the values that were drawn."""
        for _ in range(_ATTEMPTS):
            if self.probe.runs >= self.budget:
                raise _OutOfBudget
            result = run()
            if result.error is None:
                break
        return result

    def _accept(self, plan: MapPlan, name: str, index: Tensor) -> None:
        """Takes what a target reads for a map, if it is one: one instance a row, varying along one plate only."""
        dims = {frame.name: frame.dim for frame in self.probe.frames(name)}
        rows = {q: along(index, dim) for q, dim in dims.items()}
        varying = {q: row for q, row in rows.items() if row is not None and (row != row[0]).any()}
        if index.numel() == 1:
            varying = {q: row for q, row in rows.items() if row is not None}
        if len(varying) != 1 or bool((index < 0).any()):
            return
        q, row = next(iter(varying.items()))
        key = q, plan.plate
        if key in self.given and not torch.equal(self.given[key], row):
            raise ValueError(self._not_as_given(name, key, row))
        self.maps.setdefault(
            key, row
        )  # of a target with another one `_violation` shows that it is read otherwise
        before = self.candidates.get(plan.plate, plan._replace(targets={}))
        self.candidates[plan.plate] = before._replace(
            targets={**before.targets, name: q}, dims={**before.dims, q: dims[q]}
        )

    def _not_as_given(self, name: str, key: Key, row: Tensor) -> str:
        pair = next(pair for pair, plates in self.pairs.items() if plates == key)
        at = int((self.given[key] != row).nonzero()[0])
        return (
            f"Expected site '{name}' to read plate '{key[1]}' through the index map given for {pair!r}; got instance "
            f"{int(row[at])} in row {at}, where the map has {int(self.given[key][at])}. Correct it, or leave it out."
        )

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

    def _keys(self, inner: Collection[str], plate: str) -> set[Key]:
        ways = (route for q in inner for route in routes(self.maps, q))
        return {key for route in ways if route.end == plate for key in route.maps}

    def _places(self, plate: str) -> dict[str, Place]:
        """For each site that lies in a plate, itself or by maps: a batch dim, and the index in the plate along it."""
        ways = {q: route.rows for q, _ in self.maps for route in routes(self.maps, q) if route.end == plate}
        ways[plate] = torch.arange(self.probe.plate_size(self.probe.plates[plate]))
        return {
            name: Place(frame.dim, ways[frame.name].cpu())
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
        try:
            for number in range(rounds):
                origin = self._origin(number)
                for half in _halves(self.probe.plate_size(self.probe.plates[plate]), every=number == 0):
                    run = self._change(origin, plate, places, half)
                    for name in (name for name in places if name not in self.hidden):
                        dim, index = places[name]
                        rows = moved(origin.sites[name], run.sites.get(name))
                        if (rows & spread(~half[index], dim).to(rows.device)).any():
                            return self._responsible(name, plate)
        except (_OutOfBudget, KeyError) as error:  # KeyError: the model fails at all these values
            self.finished &= isinstance(error, KeyError)
            return self._keys({q for q, _ in self.maps}, plate)
        return set()

    def _origin(self, number: int) -> Run:
        """A run at other values of all latents; in the first of a plate, discrete ones are sure to differ from base."""
        probe = self.probe
        return self._completed(lambda: probe.sample() if number else probe.redraw(self.latents, probe.first))

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
        return self._completed(lambda: self.probe.run({**held, **data}, draw))


def _halves(size: int, every: bool) -> Iterator[Tensor]:
    """Halves of a plate's instances, each with the other half after it, that part every two instances, or most."""
    bits = (size - 1).bit_length()
    every = every or bits <= _BITS
    number = torch.arange(size) if every else torch.randperm(size)
    for bit in range(bits if every else _BITS):
        half = (number >> bit) & 1 == 1
        yield half
        yield ~half


def _first_instance(value: Tensor, fn: Any) -> Tensor:
    """The value of the first instance in every plate, as ``(*1s, *event)``."""
    return value[(slice(0, 1),) * (value.dim() - fn.event_dim)]


def _by_plates(probe: Probe, given: Mapping[Key, Any]) -> dict[Key, dict[Key, Tensor]]:
    """Checks the maps that a user gave by pair ``(latent, site)``, and returns them by plates (q, p)."""
    found: dict[Key, dict[Key, Tensor]] = {}
    for pair, index in given.items():
        latent, name = pair
        for site, kind, sites in ((latent, "latent", probe.latent), (name, "sample site", probe.order)):
            if site not in sites:
                raise ValueError(
                    f"Expected pairs (latent, site) of the model in `index_maps`; got {pair!r}, where {site!r} is no "
                    f"{kind}. The model's sites are: {', '.join(probe.order)}."
                )
        outer = sorted(probe.plate_names(latent) - probe.plate_names(name))
        if len(outer) != 1:
            raise ValueError(
                f"Expected '{latent}' in one plate that '{name}' is not in, for the index map of {pair!r} to point "
                f"into; got {outer or 'none'}. Leave the pair out of `index_maps`."
            )
        size = probe.plate_size(probe.plates[outer[0]])
        rows = check_map(pair, index, outer[0], size).to(probe.base[latent].device)
        inner = [
            frame.name
            for frame in probe.frames(name)
            if frame.name not in probe.plate_names(latent) and probe.plate_size(frame) == len(rows)
        ]
        if len(inner) != 1:
            raise ValueError(
                f"Expected the index map of {pair!r} to have the length of one plate of '{name}' that '{latent}' is "
                f"not in; got {len(rows)} rows, the length of {inner or 'none'}. Give one index a row of '{name}'."
            )
        pairs = found.setdefault((inner[0], outer[0]), {})
        for other, same in pairs.items():
            if not torch.equal(rows, same):
                raise ValueError(
                    f"Expected one index map from plate '{inner[0]}' to plate '{outer[0]}'; got different ones for "
                    f"{other!r} and {pair!r}. Leave one of them out of `index_maps`."
                )
        pairs[pair] = rows
    return found
