"""Which plates of a model are read through an index map: the search at a guide's first call.

A site in plate q that reads latents of a plate p that it does not lie in is a candidate. Its map is found by
`index_maps` with all else held. It is accepted if it varies along q and no other plate, and proves to be a nesting
(`nesting`). So ``mu[z]`` with ``z`` latent is no map, nor is ``alpha[m1] - alpha[m2]``; and plate q is not taken to be
nested in p where a site of p reads all of q, or a second site of q all of p.

Change this module to accept other ways of reading a plate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.reading.index_maps.finder import NONE, SEVERAL, MapPlan, Trial, along, any_along, completed
from pyro_nami.reading.index_maps.given import given_by_plates
from pyro_nami.reading.index_maps.nesting import Nesting, OutOfBudget
from pyro_nami.reading.probe import Probe, redraw

__all__ = ["Found", "search_maps"]

Key = tuple[str, str]

# Pairs of values to try until every row moves (of ``relu(alpha)[county]`` some values may move none).
_PAIRS = 6


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
        given: maps that the user knows, by pair ``(latent, site)``; these pairs are not tested, unless other sites come
            to lie in the same plate by them.

    Raises:
        TypeError: a given map is not a tensor of integers.
        ValueError: a given map names no latent and site, points outside its plate, or contradicts the model.
    """
    nesting = Nesting(probe, parents, hidden, budget, given_by_plates(probe, given))
    search = _Search(nesting)
    if budget > 0:
        search.find()
    nesting.settle()
    return Found(nesting.maps, search.plans(), nesting.finished)


class _Search:
    """Adds the maps that it finds to those of a nesting, and plans how to find again what the nesting keeps."""

    def __init__(self, nesting: Nesting) -> None:
        self.nesting, self.probe, self.parents = nesting, nesting.probe, nesting.parents
        self.maps, self.given, self.pairs = nesting.maps, nesting.given, nesting.pairs
        self.candidates: dict[str, MapPlan] = {}

    def find(self) -> None:
        """Finds candidate maps into every plate, as far as the budget goes."""
        try:
            for plate, frame in self.probe.plates.items():
                if self.probe.plate_size(frame) > 1:
                    self._find(plate, frame.dim)
        except OutOfBudget:
            self.nesting.finished = False

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

    def _find(self, plate: str, dim: int) -> None:
        inside = [u for u in self.probe.order if u in self.nesting.latents and plate in self._plates(u)]
        targets = [name for name in self.probe.order if self._is_target(name, plate, inside)]
        latents = [u for u in inside if any(u in self.parents[name] for name in targets)]
        plan = self._moving_plan(plate, dim, latents, targets) if targets else None
        if plan is not None:
            for name, index in Trial(self._sites, plan, self._held(latents)).decode().items():
                self._accept(plan, name, index)
        self.nesting.drop([key for key, rows in self.maps.items() if (rows < 0).any()])

    def _plates(self, name: str) -> frozenset[str]:
        return self.probe.plate_names(name)

    def _is_target(self, name: str, plate: str, latents: Collection[str]) -> bool:
        if name in self.nesting.hidden or plate in self._plates(name) or not self._plates(name):
            return False
        return any(u in self.parents[name] and (u, name) not in self.pairs for u in latents)

    def _moving_plan(self, plate: str, dim: int, latents: list[str], targets: list[str]) -> MapPlan | None:
        """Returns a plan whose two values move every row of its targets' plates, as many targets as can be had."""
        best: MapPlan | None = None
        for _ in range(_PAIRS):
            values = {name: self._pair(name) for name in latents}
            plan = MapPlan(plate, dim, values, dict.fromkeys(targets, ""), {})
            try:
                trial = Trial(self._sites, plan, self._held(latents))
                rows = trial.moved(torch.ones(trial.size, dtype=torch.bool))
            except KeyError:  # the model fails at these values, so that sites are missing
                continue
            full = self._moving_plates(rows)
            moving = [name for name in targets if rows[name].any() and full & self._plates(name)]
            if len(moving) > (0 if best is None else len(best.targets)):
                best = plan._replace(targets=dict.fromkeys(moving, ""))
            if len(moving) == len(targets):
                break
        return best

    def _moving_plates(self, rows: Mapping[str, Tensor]) -> set[str]:
        """The plates of which every instance moves at some site; where none does the others show what is read."""
        moving: dict[str, Tensor] = {}
        for name, here in rows.items():
            for frame in self.probe.frames(name):
                there = any_along(here, frame.dim)
                moving[frame.name] = moving.get(frame.name, there) | there
        return {q for q, instances in moving.items() if instances.all()}

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        fn = self.probe.trace.nodes[name]["fn"]
        first = redraw(fn, self.probe.base[name])
        return _first_instance(first, fn), _first_instance(redraw(fn, first), fn)

    def _held(self, latents: Collection[str]) -> dict[str, Tensor]:
        nodes = self.probe.trace.nodes
        return {
            name: _first_instance(self.probe.base[name], nodes[name]["fn"])
            for name in self.probe.order
            if name in self.nesting.latents and name not in latents
        }

    def _sites(self, values: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Runs the model with values that are expanded to the shape of their sites."""
        full = {name: value.expand(self.probe.base[name].shape) for name, value in values.items()}
        return self.nesting.completed(lambda: self.probe.run(full)).sites

    def _accept(self, plan: MapPlan, name: str, index: Tensor) -> None:
        """Takes what a target reads for a map, or a part of one: one instance a row, varying along one plate only.

        In a site of one plate it need not vary: a minibatch may have rows of one instance alone.
        """
        dims = {frame.name: frame.dim for frame in self.probe.frames(name)}
        rows = {q: along(index, dim) for q, dim in dims.items()}
        varying = {
            q: row
            for q, row in rows.items()
            if row is not None and (len(dims) == 1 or index.numel() == 1 or len(row[row != NONE].unique()) > 1)
        }
        if len(varying) != 1 or bool((index == SEVERAL).any()):
            return
        q, row = next(iter(varying.items()))
        key = q, plan.plate
        if key in self.given:
            row = completed(row, self.given[key])
            if not torch.equal(self.given[key], row):
                raise ValueError(self._not_as_given(name, key, row))
        # Of a target that reads other instances `_violation` shows that it does.
        self.maps[key] = completed(self.maps.get(key, row), row)
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


def _first_instance(value: Tensor, fn: Any) -> Tensor:
    """The value of the first instance in every plate, as ``(*1s, *event)``."""
    return value[(slice(0, 1),) * (value.dim() - fn.event_dim)]
