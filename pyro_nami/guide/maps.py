"""The index maps of a call: which instance of a plate each row of another plate reads.

A map is a function of the model's arguments. It is kept while these are the same tensors,
unchanged, and otherwise found anew: by an argument that was this map
in an earlier call and proves to be it again; else by group testing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_nami.guide.arguments import Cache
from pyro_nami.guide.call import Call
from pyro_nami.guide.plan import Plan
from pyro_nami.parameters.inputs import IndexMaps
from pyro_nami.program.isolation import untouched
from pyro_nami.program.runner import Sites, Values
from pyro_nami.reading.index_maps.decoding import MapPlan, find_maps, maps_hold

__all__ = ["MapReader"]

Pair = tuple[str, str]


class MapReader:
    """Finds the index maps of each call of one guide."""

    def __init__(self, plan: Plan, cache: Cache) -> None:
        self.plan, self._cache = plan, cache
        self._pairs = [(rows, each.plate) for each in plan.map_plans for rows in each.dims]
        self._slots: dict[Pair, int] = {}
        self._latest: IndexMaps | None = None

    def read(self, call: Call) -> IndexMaps:
        """Returns the maps of a call."""
        if torch.jit.is_tracing() and self._latest is not None and not call.indices:
            # where no search can run; a map that is an argument is that of later calls
            leaves = call.program.leaves()
            slots = {pair: leaves[i] for pair, i in self._slots.items()}
            return IndexMaps({**self._latest.maps, **slots}, self._latest.sizes)
        self._latest = self._cache.get("index maps", call.leaves, lambda: self._find(call))
        return self._latest

    @torch.no_grad()
    def _find(self, call: Call) -> IndexMaps:
        with untouched(call.program.model), pyro.validation_enabled(False):
            return self._found(call)

    def _found(self, call: Call) -> IndexMaps:
        plan, leaves = self.plan, call.program.leaves()
        data = {**call.held, **call.values}
        first = {name: plan.first_of(name, value) for name, value in data.items()}
        held = {**plan.initial, **first}

        def run(values: Values) -> Sites:
            return call.run({**held, **values}, broadcast=True)

        sites = call.sites or run({})
        sizes = {
            each.plate: max(sites[name]["fn"].batch_shape[each.dim] for name in each.values)
            for each in plan.map_plans
        }
        maps: dict[Pair, Tensor] = {}
        known = self._rows(call, leaves)
        # maps of subsampled rows to plates with all instances -> the rows
        parts = {
            (rows, plate): call.indices[rows].tolist()
            for rows, plate in self._pairs
            if rows in call.indices and plate not in call.indices
        }
        for pair, rows in parts.items():
            instances = known.setdefault(pair, {})
            if instances.keys() >= set(rows):
                index = [instances[row] for row in rows]
                maps[pair] = torch.tensor(index, device=plan.factory["device"])
        slots = {
            pair: leaves[i]
            for pair, i in self._slots.items()
            if pair not in maps and i < len(leaves) and _is_map(leaves[i], sizes[pair[1]])
        }
        if slots and maps_hold(run, self._plans(slots), held, slots):
            maps |= slots
        wanted = [pair for pair in self._pairs if pair not in maps]
        if wanted:
            maps |= find_maps(run, self._plans(wanted), held)
            for pair, rows in parts.items():
                known[pair].update(zip(rows, maps[pair].tolist()))
            for pair in wanted:
                for i, leaf in enumerate(leaves):
                    if _equal(leaf, maps[pair]):
                        self._slots[pair] = i
        return IndexMaps(maps, sizes)

    def _plans(self, pairs: Collection[Pair]) -> list[MapPlan]:
        """Returns the plans of some maps alone."""
        plans = []
        for each in self.plan.map_plans:
            dims = {rows: dim for rows, dim in each.dims.items() if (rows, each.plate) in pairs}
            targets = {site: rows for site, rows in each.targets.items() if rows in dims}
            plans += [each._replace(targets=targets, dims=dims)] if dims else []
        return plans

    def _rows(self, call: Call, leaves: Sequence[Any]) -> dict[Pair, dict[int, int]]:
        """Returns the index maps of the rows that earlier calls on the same arguments had: row -> instance."""
        rows = [id(index) for index in call.indices.values()]
        others = [leaf for leaf in leaves if id(leaf) not in rows]
        return self._cache.get("rows of index maps", others, dict)


def _is_map(index: Any, size: int) -> bool:
    if not isinstance(index, Tensor) or index.is_floating_point() or index.dim() != 1:
        return False
    return len(index) == 0 or 0 <= int(index.min()) <= int(index.max()) < size


def _equal(leaf: Any, index: Tensor) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == index.dtype and torch.equal(leaf, index)
