"""The index maps of a call: which instance of a plate each row of another plate reads.

A map is a function of the model's arguments. It is kept while these are the same tensors,
unchanged, and otherwise found anew: by the user's callable; else by an argument that was this map
in an earlier call and proves to be it again; else by group testing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_nami.guide.arguments import Arguments
from pyro_nami.guide.plan import Plan
from pyro_nami.parameters.inputs import IndexMaps
from pyro_nami.program.isolation import untouched
from pyro_nami.reading.index_maps.decoding import MapPlan, find_maps, maps_hold

__all__ = ["MapReader"]

Pair = tuple[str, str]


class MapReader:
    """Finds the index maps of each call of one guide; ``given`` is its option ``index_maps``."""

    def __init__(self, plan: Plan, given: Mapping[Pair, Callable]) -> None:
        self.plan = plan
        self._pairs = [(rows, each.plate) for each in plan.map_plans for rows in each.dims]
        self._given = {self._pair(*sites): function for sites, function in given.items()}
        self._slots: dict[Pair, int] = {}
        self.forget()

    def forget(self) -> None:
        """Forgets the maps of earlier calls."""
        self._kept: tuple[Arguments, IndexMaps] | None = None
        self._table: dict[Pair, Tensor] = {}
        self._table_key = Arguments()

    def read(self, call: Any, leaves: Sequence[Any]) -> IndexMaps:
        """Returns the maps of a call with arguments ``leaves``."""
        if not call.indices and self._kept is not None:
            arguments, kept = self._kept
            # where no search can run; a map that is an argument is that of later calls
            if torch.jit.is_tracing():
                return IndexMaps(
                    {**kept.maps, **{pair: leaves[i] for pair, i in self._slots.items()}},
                    kept.sizes,
                )
            if arguments.are(leaves):
                return kept
        with untouched(call.program.model), torch.no_grad(), pyro.validation_enabled(False):
            found = IndexMaps(*self._find(call, leaves, self._pairs))
        if not call.indices:
            self._kept = Arguments(leaves), found
        return found

    def _find(
        self, call: Any, leaves: Sequence[Any], pairs: Sequence[Pair]
    ) -> tuple[dict[Pair, Tensor], dict[str, int]]:
        data = {
            name: self._single(name, value) for name, value in {**call.held, **call.values}.items()
        }
        held = {**self.plan.initial, **data}

        def run(values: Mapping[str, Tensor]) -> Mapping[str, Any]:
            return call.run({**held, **values}, broadcast=True)

        sites = call.sites or run({})
        sizes = {each.plate: _size(each, sites) for each in self.plan.map_plans}
        maps = self._from_user(call, pairs, sizes) | self._from_table(call, leaves, pairs)
        slots = {
            pair: leaves[i]
            for pair, i in self._slots.items()
            if pair not in maps and i < len(leaves)
        }
        slots = {
            pair: leaf
            for pair, leaf in slots.items()
            if pair in pairs and _is_map(leaf, sizes[pair[1]])
        }
        if slots and maps_hold(run, self._plans(slots), held, slots):
            maps |= slots
        wanted = [pair for pair in pairs if pair not in maps]
        if wanted:
            maps |= find_maps(run, self._plans(wanted), held)
            self._fill_table(call, {pair: maps[pair] for pair in wanted})
            for pair in wanted:
                for i, leaf in enumerate(leaves):
                    if _equal(leaf, maps[pair]):
                        self._slots[pair] = i
        return maps, sizes

    def _single(self, name: str, value: Tensor) -> Tensor:
        """Returns the first of several data sets at a site, of the site's own shape."""
        site = self.plan.sites[name]
        extra = (
            value.dim()
            - site.event_dim
            + min((self.plan.plates.dims[plate] for plate in site.plates), default=0)
        )
        return value[(0,) * max(extra, 0)]

    def _plans(self, pairs: Collection[Pair]) -> list[MapPlan]:
        """Returns the plans of some maps alone."""
        plans = []
        for each in self.plan.map_plans:
            dims = {rows: dim for rows, dim in each.dims.items() if (rows, each.plate) in pairs}
            targets = {site: rows for site, rows in each.targets.items() if rows in dims}
            plans += [each._replace(targets=targets, dims=dims)] if dims else []
        return plans

    def _pair(self, latent: str, site: str) -> Pair:
        each = next(
            each for each in self.plan.map_plans if latent in each.values and site in each.targets
        )
        return each.targets[site], each.plate

    def _from_user(
        self, call: Any, pairs: Sequence[Pair], sizes: Mapping[str, int]
    ) -> dict[Pair, Tensor]:
        maps = {}
        for pair in self._given.keys() & set(pairs):
            rows, plate = pair
            index = self._given[pair](*call.program.args, **call.program.kwargs)
            if rows in call.indices and len(index) != len(call.indices[rows]):
                index = index[call.indices[rows]]
            if not _is_map(index, sizes[plate]):
                raise ValueError(
                    f"Expected the index map from plate '{rows}' to plate '{plate}' to hold integers from 0 to "
                    f"{sizes[plate] - 1}; got {index}. Mend the callable in `index_maps`."
                )
            maps[pair] = index.to(self.plan.factory["device"])
        return maps

    def _from_table(
        self, call: Any, leaves: Sequence[Any], pairs: Sequence[Pair]
    ) -> dict[Pair, Tensor]:
        """Returns the maps of the rows of subsampled plates, where all of them were met before.

        They are those of the full plates, so which rows a call holds is no matter.
        """
        if not call.indices:
            return {}
        rows = [id(index) for index in call.indices.values()]
        leaves = [leaf for leaf in leaves if id(leaf) not in rows]
        if not self._table_key.are(leaves):
            self._table, self._table_key = {}, Arguments(leaves)
        maps = {}
        for pair in self._table.keys() & set(pairs):
            index = self._table[pair][call.indices[pair[0]]]
            if (index >= 0).all():
                maps[pair] = index
        return maps

    def _fill_table(self, call: Any, maps: Mapping[Pair, Tensor]) -> None:
        for (rows, plate), index in maps.items():
            if rows in call.indices and plate not in call.indices:
                where = call.indices[rows]
                size = max(
                    self.plan.bayesnet.plate_sizes[rows], int(where.max()) + 1 if len(where) else 0
                )
                table = self._table.setdefault((rows, plate), index.new_full((size,), -1))
                if len(table) < size:
                    table = torch.cat((table, index.new_full((size - len(table),), -1)))
                table[where] = index
                self._table[rows, plate] = table


def _size(plan: MapPlan, sites: Mapping[str, Any]) -> int:
    """Returns the size of the plate that a map leads to."""
    return max(sites[name]["fn"].batch_shape[plan.dim] for name in plan.values)


def _is_map(index: Any, size: int) -> bool:
    if not isinstance(index, Tensor) or index.is_floating_point() or index.dim() != 1:
        return False
    return len(index) == 0 or 0 <= int(index.min()) <= int(index.max()) < size


def _equal(leaf: Any, index: Tensor) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == index.dtype and torch.equal(leaf, index)
