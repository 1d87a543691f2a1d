"""Warm starts of mode searches: where a search ended when the same data set came before, in an earlier epoch say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nami.deriving.expansion import leading_shape
from pyro_nami.program.memory import rows_in_memory

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
    def of(
        cls, values: Mapping[str, Tensor], event_dims: Mapping[str, int], nesting: int
    ) -> DataSets | None:
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
        inner = self.nesting + self.event_dims[name]
        while value.dim() > len(self.batch) + inner:
            value = value[0]
        value = value.reshape((1,) * (len(self.batch) + inner - value.dim()) + value.shape)
        rest = value.shape[len(self.batch) :]
        return value.expand(self.batch + rest).reshape(-1, *rest)


class Starts:
    """Values of latents, stored by data set.

    Args:
        is_renewed: whether all are forgotten where there is no room for others, rather than these left out.

    Example:
        >>> first = DataSets.of({"x": torch.tensor([1.0, 2.0])}, {"z": 0}, 0)
        >>> starts = Starts()
        >>> starts.note(first, {"z": torch.tensor([0.5, 1.5])})
        >>> starts.find(DataSets.of({"x": torch.tensor([2.0, 3.0])}, {"z": 0}, 0))
        {'z': tensor([1.5000,    nan])}
    """

    def __init__(self, is_renewed: bool = False) -> None:
        self.is_renewed = is_renewed
        self._rows: dict[int, int] = {}
        self._kept: dict[str, Tensor] = {}

    def find(self, data: DataSets, others: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Returns the stored values ``(*batch, *plates, *event)``.

        Unknown data sets have the values of ``others``, by default NaN. If all are unknown, ``others`` are returned.
        """
        rows, found = [self._rows.get(key, -1) for key in data.keys], dict(others or {})
        if max(rows) < 0:
            return found
        unknown = [row < 0 for row in rows]
        for name, kept in self._kept.items():
            at = kept[rows]
            at[unknown] = found[name].reshape(at.shape)[unknown] if name in found else torch.nan
            found[name] = at.reshape(data.batch + kept.shape[1:])
        return found

    def note(self, data: DataSets, values: Mapping[str, Tensor]) -> None:
        """Stores values of latents."""
        new = {name: data.rows(name, value.detach()) for name, value in values.items()}
        shapes = {name: value.shape[1:] for name, value in new.items()}
        known = {name: value.shape[1:] for name, value in self._kept.items()}
        most = rows_in_memory(max((shape.numel() for shape in shapes.values()), default=1))
        is_full = self.is_renewed and len(self._rows) + len(data.keys) > most
        if is_full or not shapes.items() <= known.items():
            self._rows, self._kept = {}, {name: value[:0] for name, value in new.items()}
        for key in data.keys:
            if len(self._rows) < most:
                self._rows.setdefault(key, len(self._rows))
        places = [i for i, key in enumerate(data.keys) if key in self._rows]
        rows = [self._rows[data.keys[i]] for i in places]
        for name, value in new.items():
            kept = self._kept[name]
            more = value.new_empty((len(self._rows) - len(kept), *shapes[name]))
            self._kept[name] = torch.cat([kept, more])
            self._kept[name][rows] = value[places]
