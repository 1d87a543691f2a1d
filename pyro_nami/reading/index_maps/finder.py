"""Index maps: through which index the sites of one plate read the latents of another.

In ``alpha[county]`` row n of plate ``obs`` reads instance ``county[n]`` of plate ``county``. The model alone knows the
index, however it is applied (indexing, ``gather``, a one-hot product), so it is found by group testing: instances whose
number has a bit set take another value, then those that have it clear. Where exactly one of the two runs moves a row,
for every bit, the row reads one instance, and the bits spell its number. A row that reads none (``slope[county] * x``
where x is 0) shows nothing: it goes by what other sites, or the same one along other plates, read in the same row.

Which plates are read through a map is decided once, in `map_search`; here the maps of one call are found again by the
plan that was made then. Change this module to change how an index is read off runs of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.reading.covariates import parameters
from pyro_nami.reading.probe import equal

__all__ = [
    "MapPlan",
    "Route",
    "Trial",
    "along",
    "any_along",
    "completed",
    "find_maps",
    "maps_hold",
    "moved",
    "routes",
    "spread",
]

Run = Callable[[Mapping[str, Tensor]], Mapping[str, Any]]

# In place of an index: the row reads no instance, or more than one.
NONE, SEVERAL = -1, -2
_HALVES = 3
_SEED = 0
# What log_prob raises where a distribution has none, or has none at this value.
_NO_DENSITY = (NotImplementedError, KeyError, ValueError, RuntimeError)


class MapPlan(NamedTuple):
    """How to find through which index sites read one plate.

    Attributes:
        plate: the plate p that is read.
        dim: its batch dim.
        values: for each latent in p that is read, two values of its first instance, ``(*1s, *event)``, that differ in
            every element.
        targets: for each site that reads p through an index, its plate q that the index runs over.
        dims: the batch dim of each such plate q.
    """

    plate: str
    dim: int
    values: dict[str, tuple[Tensor, Tensor]]
    targets: dict[str, str]
    dims: dict[str, int]


def find_maps(
    run: Run, plans: Sequence[MapPlan], held: Mapping[str, Tensor]
) -> dict[tuple[str, str], Tensor]:
    """Returns the index map ``(size_q,)`` of each pair of plates (q, p), in 2 ceil(log2 J) + 1 runs a plan.

    Args:
        run: runs the model with these values at its latents, expanded to the shape of their sites, and returns the
            messages of its sites.
        plans: what is read through an index. Sizes are those of the run, not of the plan.
        held: one value of every latent, of its first instance.

    Raises:
        ValueError: a row reads several instances, or none at any site, or two sites of a plate read different ones.
    """
    maps: dict[tuple[str, str], Tensor] = {}
    for plan in plans:
        for name, index in Trial(run, plan, held).decode().items():
            key = plan.targets[name], plan.plate
            rows = along(index, plan.dims[key[0]])
            if rows is None or not torch.equal(
                completed(rows, maps.get(key, rows)), completed(maps.get(key, rows), rows)
            ):
                raise ValueError(_broken(plan, name, None))
            maps[key] = completed(rows, maps.get(key, rows))
        for name, q in plan.targets.items():
            if (maps[q, plan.plate] < 0).any():
                raise ValueError(_broken(plan, name, maps[q, plan.plate]))
    return maps


def maps_hold(
    run: Run,
    plans: Sequence[MapPlan],
    held: Mapping[str, Tensor],
    maps: Mapping[tuple[str, str], Tensor],
) -> bool:
    """Returns whether these are still the maps that the model reads through, by 4 runs a plan.

    Three random halves of the instances are changed in turn: a row must move, at one site at least, where its instance
    is in the half, and there only. A change of one single row may be missed (one time in eight), one of many is not.
    """
    generator = torch.Generator("cpu").manual_seed(_SEED)
    for plan in plans:
        trial = Trial(run, plan, held)
        known = {name: maps.get((q, plan.plate)) for name, q in plan.targets.items()}
        for name, index in known.items():
            if index is None or len(index) != trial.shape(name)[plan.dims[plan.targets[name]]]:
                return False
            if len(index) and int(index.max()) >= trial.size:
                return False
        for _ in range(_HALVES if trial.size > 1 else 0):
            half = torch.randperm(trial.size, generator=generator, device="cpu") < trial.size // 2
            still: dict[str, Tensor] = {}
            for name, rows in trial.moved(half).items():
                index, q = known[name], plan.targets[name]
                assert index is not None
                changed = half.to(rows.device)[index.to(rows.device)]
                if (rows & spread(~changed, plan.dims[q])).any():
                    return False
                still[q] = still.get(q, changed) & ~any_along(rows, plan.dims[q])
            if any(rows.any() for rows in still.values()):
                return False
    return True


class Trial:
    """Runs of a model in which some instances of a plate have the second of two values.

    Args:
        run: as in `find_maps`.
        plan: the plate, its values, and the sites that are watched.
        held: one value of every latent, of its first instance.

    Attributes:
        size: the number of instances of the plate.
    """

    def __init__(self, run: Run, plan: MapPlan, held: Mapping[str, Tensor]) -> None:
        self.run, self.plan, self.held = run, plan, held
        self.base = run({**held, **{name: pair[0] for name, pair in plan.values.items()}})
        self.latents = {name: self.base[name]["fn"] for name in plan.values}
        self.size = max(fn.batch_shape[plan.dim] for fn in self.latents.values())

    def shape(self, name: str) -> torch.Size:
        """The batch shape of a site."""
        return self.base[name]["fn"].batch_shape

    def moved(self, chosen: Tensor) -> dict[str, Tensor]:
        """Returns which instances ``(*batch)`` of each watched site move when the ``chosen (J,)`` ones change."""
        values = dict(self.held)
        for name, (first, second) in self.plan.values.items():
            at = spread(chosen.to(first.device), self.plan.dim - self.latents[name].event_dim)
            values[name] = torch.where(at, second, first)
        sites = self.run(values)
        return {name: moved(self.base[name], sites.get(name)) for name in self.plan.targets}

    def decode(self) -> dict[str, Tensor]:
        """Returns the number of the instance that each instance ``(*batch)`` of a watched site reads.

        It is negative where none or several are read; the search ends early if every site has a row that reads several,
        or none that reads any.
        """
        number = torch.arange(self.size, device=self._device)
        found = {name: self._zeros(name) for name in self.plan.targets}
        for bit in range(max(self.size - 1, 0).bit_length()):
            chosen = (number >> bit) & 1 == 1
            with_it, without = self.moved(chosen), self.moved(~chosen)
            for name, index in found.items():
                on, off = with_it[name], without[name]
                read = torch.where(on, index | (1 << bit), index)
                read = torch.where(index < 0, index, read)
                found[name] = read.masked_fill(~(on | off), NONE).masked_fill(on & off, SEVERAL)
            if all((index == SEVERAL).any() | (index == NONE).all() for index in found.values()):
                break
        return {name: index.masked_fill(index >= max(self.size, 1), SEVERAL) for name, index in found.items()}

    def _zeros(self, name: str) -> Tensor:
        return torch.zeros(self.shape(name), dtype=torch.long, device=self._device)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.plan.values.values()))[0].device


def moved(before: Any, after: Any) -> Tensor:
    """Returns which instances ``(*batch)`` of a site differ between two runs; all where it changed its shape or kind.

    Args:
        before: the site's message in one run.
        after: its message in the other, None where it did not come up.
    """
    batch = before["fn"].batch_shape
    old, new = _readings(before, before["value"]), {} if after is None else _readings(after, before["value"])
    result = torch.zeros(batch, dtype=torch.bool, device=_device(old))
    for key in old.keys() | new.keys():
        if key not in old or key not in new or old[key].shape != new[key].shape:
            return torch.ones_like(result)
        result |= (~equal(old[key], new[key])).any(-1)
    return result


def _readings(site: Any, value: Any) -> dict[Any, Tensor]:
    """Returns all that decides a site's effect, ``(*batch, entries)`` each.

    The parameters of its distribution show small changes that its log density, a sum of large terms, may absorb.
    """
    fn = site["fn"]
    found: dict[Any, Any] = dict(parameters(fn))
    with suppress(*_NO_DENSITY):
        found["log_prob", ""] = fn.log_prob(value).detach().unsqueeze(-1)
    for key in ("mask", "scale"):
        if isinstance(site[key], Tensor) and site[key].dim() <= len(fn.batch_shape):
            found[key, ""] = site[key].detach().expand(fn.batch_shape).unsqueeze(-1)
    return {key: value for key, value in found.items() if value.shape[:-1] == fn.batch_shape}


def along(index: Tensor, dim: int) -> Tensor | None:
    """Returns an index ``(*batch)`` as one of the instances along ``dim``; None where it varies along other dims.

    Entries that read no instance go by the others in their row.
    """
    rows = index.movedim(dim, 0).unsqueeze(-1).flatten(1)
    if not rows.shape[1]:
        return rows.new_zeros(len(rows))
    first = rows.gather(1, (rows != NONE).long().argmax(1, keepdim=True))
    return first[:, 0] if bool(((rows == first) | (rows == NONE)).all()) else None


def any_along(rows: Tensor, dim: int) -> Tensor:
    """Returns for which instances along ``dim`` of ``(*batch)`` any entry is True."""
    return rows.movedim(dim, 0).unsqueeze(-1).flatten(1).any(1)


def completed(rows: Tensor, other: Tensor) -> Tensor:
    """Returns an index ``(size,)`` that is that of another site in the rows that read no instance."""
    return torch.where(rows == NONE, other, rows)


class Route(NamedTuple):
    """A way by which one plate determines another: the pairs of plates on it, and the map ``(size,)`` they make up."""

    maps: tuple[tuple[str, str], ...]
    rows: Tensor

    @property
    def end(self) -> str:
        """The plate that it leads to."""
        return self.maps[-1][1]


def routes(maps: Mapping[tuple[str, str], Tensor], start: str) -> Iterator[Route]:
    """Yields every way from a plate to those it determines, the shorter ones first; none goes round a cycle twice."""
    queue = [Route((key,), index) for key, index in maps.items() if key[0] == start]
    for route in queue:
        yield route
        if all(route.end != plate for plate, _ in route.maps):
            queue.extend(
                Route((*route.maps, key), index[route.rows])
                for key, index in maps.items()
                if key[0] == route.end
            )


def spread(rows: Tensor, dim: int) -> Tensor:
    """Returns ``(size,)`` with its dim at ``dim``, counted from the right."""
    return rows.reshape(rows.shape + (1,) * (-dim - 1))


def _device(readings: Mapping[Any, Tensor]) -> torch.device | None:
    return next((value.device for value in readings.values()), None)


def _broken(plan: MapPlan, name: str, rows: Tensor | None) -> str:
    latents = " and ".join(f"'{latent}'" for latent in plan.values)
    what = "an index that differs from that of another site, or along another plate"
    if rows is not None:
        row = int(rows.argmin())
        what = f"row {row} of plate '{plan.targets[name]}', which reads {'none' if rows[row] == NONE else 'several'}"
    return (
        f"Expected site '{name}' to read {latents} of plate '{plan.plate}' through an index map, one instance a row, "
        f"as at the guide's first call; got {what}. A guide's networks are fixed at its first call: make a new guide."
    )
