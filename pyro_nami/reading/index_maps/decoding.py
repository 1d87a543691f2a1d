"""Finds the index maps of one call: through which index the sites of one plate read the latents of another.

In ``alpha[county]`` row n of plate ``obs`` reads instance ``county[n]`` of plate ``county``. Only
the model knows the index, however it is applied (indexing, ``gather``, a one-hot product), so it is
found by group testing. Instances whose number has a bit set take another value, then those that
have it clear. If exactly one of the two runs moves a row, for every bit, the row reads one
instance, and the bits spell its number. A row that reads none (``slope[county] * x`` where x is 0)
takes its index from other sites of the same row.

Which plates are read through a map is decided once, in `search`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.program.plate_dims import any_along, spread
from pyro_nami.program.runner import RunModel, Values
from pyro_nami.reading.changes import moved

__all__ = [
    "NONE",
    "SEVERAL",
    "Key",
    "MapPlan",
    "Trial",
    "along",
    "completed",
    "find_maps",
    "maps_hold",
    "moved_instances",
]

Key = tuple[str, str]  # a plate whose sites read another plate, and that other plate

# In place of an index: the row reads no instance, or more than one.
NONE, SEVERAL = -1, -2


class MapPlan(NamedTuple):
    """How to find through which index sites read one plate.

    Attributes:
        plate: the plate p that is read.
        dim: its batch dim; ``dims``: those of the plates q.
        values: for each latent in p that is read, two values of an instance, ``(*1s, *event)``, all elements apart.
        targets: for each site that reads p through an index, its plate q that the index runs over.
    """

    plate: str
    dim: int
    values: dict[str, tuple[Tensor, Tensor]]
    targets: dict[str, str]
    dims: dict[str, int]


def find_maps(run: RunModel, plans: Sequence[MapPlan], held: Values) -> dict[Key, Tensor]:
    """Returns the index map ``(size_q,)`` of each pair of plates (q, p), in 2 ceil(log2 J) + 1 runs a plan.

    Args:
        run: expands values to the shape of their sites. Sizes are those of the run, not of the plan.
        plans: what is read through an index.
        held: one value of every latent, of its first instance.

    Raises:
        ValueError: a row reads several instances, or none at any site, or two sites of a plate read different ones.
    """
    maps: dict[Key, Tensor] = {}
    for plan in plans:
        for name, index in Trial(run, plan, held).decode().items():
            key = plan.targets[name], plan.plate
            rows = along(index, plan.dims[key[0]])
            known: Any = maps.get(key, rows)
            if rows is None or not torch.equal(completed(rows, known), completed(known, rows)):
                raise ValueError(_broken(plan, name, None))
            maps[key] = completed(rows, known)
        for name, q in plan.targets.items():
            if (maps[q, plan.plate] < 0).any():
                raise ValueError(_broken(plan, name, maps[q, plan.plate]))
    return maps


def maps_hold(
    run: RunModel,
    plans: Sequence[MapPlan],
    held: Values,
    maps: Mapping[Key, Tensor],
    *,
    halves: int = 3,
) -> bool:
    """Returns whether these are still the maps that the model reads through, by 4 runs a plan.

    Random halves of the instances are changed in turn: a row must move, at one site at least, where its instance is in
    the half, and there only. A change of many rows is seen.

    Args:
        run, plans, held: as in `find_maps`.
        maps: the maps that were found.
        halves: how many are changed. A change of one single row is missed with probability ``0.5**halves``.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    for plan in plans:
        trial = Trial(run, plan, held)
        dims = {name: {q: plan.dims[q]} for name, q in plan.targets.items()}
        for _ in range(halves):
            half = torch.randperm(trial.size, generator=generator, device="cpu") < trial.size // 2
            changed = half.nonzero().flatten()
            for q, rows in moved_instances(trial.moved(half), dims).items():
                index = maps[q, plan.plate].to(rows.device)
                if not torch.equal(rows, torch.isin(index, changed.to(rows.device))):
                    return False
    return True


class Trial:
    """Runs of a model in which some instances of a plate have the second of two values; arguments as in `find_maps`.

    Attributes:
        base: the sites of the run in which all have the first.
        size: the number of instances of the plate.
    """

    def __init__(self, run: RunModel, plan: MapPlan, held: Values) -> None:
        self.run = run
        self.plan = plan
        self.held = held
        self.base = run({**held, **{name: pair[0] for name, pair in plan.values.items()}})
        self.size = max(self.base[name]["fn"].batch_shape[plan.dim] for name in plan.values)

    def moved(self, chosen: Tensor) -> dict[str, Tensor]:
        """Returns which instances ``(*batch)`` of each watched site move when the ``chosen (J,)`` ones change."""
        values = dict(self.held)
        for name, (first, second) in self.plan.values.items():
            at = spread(chosen.to(first.device), self.plan.dim - self.base[name]["fn"].event_dim)
            values[name] = torch.where(at, second, first)
        sites = self.run(values)
        return {name: moved(self.base[name], sites.get(name)) for name in self.plan.targets}

    def decode(self) -> dict[str, Tensor]:
        """Returns the number of the instance that each instance ``(*batch)`` of a watched site reads.

        It is negative where none or several are read; the search ends early if no site has a map.
        """
        device = next(iter(self.plan.values.values()))[0].device
        number = torch.arange(self.size, device=device)
        shapes = {name: self.base[name]["fn"].batch_shape for name in self.plan.targets}
        found = {name: number.new_zeros(shape) for name, shape in shapes.items()}
        for bit in range(max(self.size - 1, 0).bit_length()):
            chosen = (number >> bit) & 1 == 1
            with_it, without = self.moved(chosen), self.moved(~chosen)
            for name, index in found.items():
                on, off = with_it[name], without[name]
                read = torch.where(on & (index >= 0), index | (1 << bit), index)
                found[name] = read.masked_fill(~(on | off), NONE).masked_fill(on & off, SEVERAL)
            if all((index == SEVERAL).any() | (index == NONE).all() for index in found.values()):
                break
        return {
            name: index.masked_fill(index >= max(self.size, 1), SEVERAL)
            for name, index in found.items()
        }


def moved_instances(rows: Values, dims: Mapping[str, Mapping[str, int]]) -> dict[str, Tensor]:
    """Returns plate -> which of its instances, ``(size,)``, move at some site; ``dims``: of the plates of each site."""
    found: dict[str, Tensor] = {}
    for name, here in rows.items():
        for q, dim in dims[name].items():
            there = any_along(here, dim)
            found[q] = found.get(q, there) | there
    return found


def along(index: Tensor, dim: int) -> Tensor | None:
    """Returns an index ``(*batch)`` as one of the instances along ``dim``; None where it varies along other dims.

    Entries that read no instance go by the others in their row.
    """
    rows = index.movedim(dim, 0).unsqueeze(-1).flatten(1)
    if not rows.shape[1]:
        return rows.new_zeros(len(rows))
    first = rows.gather(1, (rows != NONE).long().argmax(1, keepdim=True))
    return first[:, 0] if bool(((rows == first) | (rows == NONE)).all()) else None


def completed(rows: Tensor, other: Tensor) -> Tensor:
    """Returns an index ``(size,)`` that is that of another site in the rows that read no instance."""
    return torch.where(rows == NONE, other, rows)


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
