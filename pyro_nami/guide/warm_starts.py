"""Warm starts of mode searches: where a search ended when the same data set came before, in an earlier epoch say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nami.deriving.expansion import leading_shape
from pyro_nami.program.memory import rows_in_memory
from pyro_nami.program.runner import Values

__all__ = ["DataSets", "Starts"]


class DataSets(NamedTuple):
    """The data sets of a call: a key for each, and the batch dims in which they lie.

    Attributes:
        keys: a hash of each data set. Where two data sets have the same one, a search starts at a poor place.
        batch: sizes of the batch dims to the left of the plates.
        nesting: number of plate dims.
        event_dims: site -> number of its event dims.
    """

    keys: Sequence[int]
    batch: torch.Size
    nesting: int
    event_dims: Mapping[str, int]

    @classmethod
    def of(cls, values: Values, event_dims: Mapping[str, int], nesting: int) -> DataSets | None:
        """Returns the data sets of observed values ``(*batch, *plates, *event)``; None for a single one."""
        leading = leading_shape(values, event_dims, nesting)
        batch = leading[: len(leading) - nesting]
        if batch.numel() == 1 or torch.jit.is_tracing():
            return None
        rows = []  # of each site, (data sets, bytes)
        for name in sorted(values):
            value, inner = values[name].detach().cpu(), nesting + event_dims.get(name, 0)
            if value.dim() > inner:
                event = value.shape[value.dim() - inner :]
                rows.append(value.expand(batch + event).reshape(batch.numel(), -1).numpy())
        keys = [hash(b"".join(row.tobytes() for row in each)) for each in zip(*rows)]
        return cls(keys, batch, nesting, event_dims)

    def rows(self, name: str, value: Tensor) -> Tensor:
        """Returns values ``(*draws, *batch, *plates, *event)`` of a site as ``(data sets, *plates, *event)``.

        Of several draws these are the first one's.
        """
        dims = len(self.batch) + self.nesting + self.event_dims[name]
        value = value[(0,) * (value.dim() - dims)]
        value = value[(None,) * (dims - value.dim())]
        rest = value.shape[len(self.batch) :]
        return value.expand(self.batch + rest).reshape(-1, *rest)


class Starts:
    """Values of latents, stored by data set; all are forgotten where there is no room for others.

    Example:
        >>> first = DataSets.of({"x": torch.tensor([1.0, 2.0])}, {"z": 0}, 0)
        >>> starts = Starts()
        >>> starts.note(first, {"z": torch.tensor([0.5, 1.5])})
        >>> starts.find(DataSets.of({"x": torch.tensor([2.0, 3.0])}, {"z": 0}, 0))
        {'z': tensor([1.5000,    nan])}
    """

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, Tensor]] = {}

    def find(self, data: DataSets, others: Values | None = None) -> dict[str, Tensor]:
        """Returns the stored values ``(*batch, *plates, *event)``.

        Unknown data sets have the values of ``others``, by default NaN. If all are unknown, ``others`` are returned.
        """
        found = dict(others or {})
        known = [self._kept.get(key, {}) for key in data.keys]
        for name, like in max(known, key=len).items():
            other = found.get(name, torch.full_like(like, torch.nan))
            rest = other.expand(data.batch + like.shape).reshape(-1, *like.shape)
            rows = [each.get(name, row) for each, row in zip(known, rest)]
            found[name] = torch.stack(rows).reshape(data.batch + like.shape)
        return found

    def note(self, data: DataSets, values: Values) -> None:
        """Stores values of latents."""
        new = {name: data.rows(name, value.detach()) for name, value in values.items()}
        kept = next(iter(self._kept.values()), {})
        shapes = {name: value.shape[1:] for name, value in new.items()}
        most = rows_in_memory(max(map(torch.Size.numel, shapes.values()), default=1))
        is_full = len(self._kept) + len(data.keys) > most
        if is_full or shapes != {name: value.shape for name, value in kept.items()}:
            self._kept = {}
        for key, *rows in zip(data.keys, *new.values()):
            if key in self._kept or len(self._kept) < most:
                self._kept[key] = dict(zip(new, rows))
