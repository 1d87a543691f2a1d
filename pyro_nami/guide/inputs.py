"""The values of sources in one call: what `pyro_nami.guide.conditioning` plans, evaluated.

Feature tensors are ``(*left, *plates, features)`` with Pyro's plate dims in place, and every source is evaluated once a
call, when it is first read. Change this module to change how a way of reading is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from pyro_nami.guide.conditioning import Direct, Flattened, Gathered, Pooled, Source
from pyro_nami.networks.reductions import Along, Segments

__all__ = ["IndexMaps", "Sources", "concatenate", "flatten"]


class IndexMaps:
    """The index maps of one call.

    Args:
        maps: (plate of the rows, plate that they read) -> index of each row, ``(rows,)``.
        sizes: plate that is read -> its size.
    """

    def __init__(self, maps: Mapping[tuple[str, str], Tensor], sizes: Mapping[str, int]) -> None:
        self.maps, self.sizes = dict(maps), dict(sizes)
        self._segments: dict[Any, Segments] = {}
        self._joined: dict[Any, tuple[list[Tensor], Tensor]] = {}

    def index(self, rows: str, plate: str) -> Tensor:
        """Returns the instance of ``plate`` of each row, along a chain of maps if need be."""
        if (rows, plate) not in self.maps:
            between = next(p for q, p in self.maps if q == rows and self._leads(p, plate))
            self.maps[rows, plate] = self.index(between, plate)[self.maps[rows, between]]
        return self.maps[rows, plate]

    def _leads(self, rows: str, plate: str) -> bool:
        return (rows, plate) in self.maps or any(self._leads(p, plate) for q, p in self.maps if q == rows)

    def segments(self, rows: str, plates: tuple[str, ...], dim: int) -> Segments:
        """Returns the rows, along ``dim``, as sets, one for each combination of instances of ``plates``."""
        key = rows, plates, dim
        if key not in self._segments:
            index, count = self.index(rows, plates[0]), self.sizes[plates[0]]
            for plate in plates[1:]:
                index = index * self.sizes[plate] + self.index(rows, plate)
                count *= self.sizes[plate]
            self._segments[key] = Segments(index, count, dim)
        return self._segments[key]


    def joined(self, key: Hashable, parts: list[Tensor]) -> Tensor:
        """Returns the parts of data concatenated, which are the same tensors in every call, and are joined once."""
        kept = self._joined.get(key)
        if kept is None or any(old is not new for old, new in zip(kept[0], parts)):
            kept = self._joined[key] = parts, concatenate(parts)
        return kept[1]


class Sources:
    """The values of sources in one call: evaluated when they are first read.

    Args:
        features: node -> features with plate dims in place (size 1 where a node lacks a plate); may grow.
        dims: plate -> its (negative) batch dim.
        encoders: pooled source -> its encoder.
        maps: the call's index maps.
        data: nodes whose features are the same tensors in other calls with the same data; may grow.
    """

    def __init__(
        self,
        features: Mapping[Hashable, Tensor],
        dims: Mapping[str, int],
        encoders: Mapping[Any, Callable[[Tensor, Along | Segments], Tensor]],
        maps: IndexMaps,
        data: AbstractSet[Hashable] = frozenset(),
    ) -> None:
        self._features, self._data = features, data
        self._dims, self._encoders, self._maps = dims, encoders, maps
        self._known: dict[Any, Tensor] = {}

    def value(self, source: Source) -> Tensor:
        """Returns the features that a factor reads from a source, ``(*left, *plates, features)``."""
        if isinstance(source, Direct):
            return self._features[source.node]
        if source not in self._known:
            if isinstance(source, Flattened):
                value = self._flatten(self.value(source.source), source)
            elif isinstance(source, Gathered):
                value = self._gather(self.value(source.source), source)
            else:
                value = self._pool(source, self._encoders[source])
            self._known[source] = value
        return self._known[source]

    def evidence(self, source: Source, encoder: Callable[[Tensor, Along | Segments], Tensor]) -> Tensor:
        """Returns what the instances of a pooled source, as read by a factor, add up to: ``(*left, *plates, sums)``."""
        key = "evidence", source
        if key not in self._known:
            if isinstance(source, Gathered):
                self._known[key] = self._gather(self.evidence(source.source, encoder), source)
            elif isinstance(source, Flattened):
                self._known[key] = self._flatten(self.evidence(source.source, encoder), source)
            else:
                assert isinstance(source, Pooled)
                self._known[key] = self._pool(source, encoder)
        return self._known[key]

    def _pool(self, source: Pooled, encoder: Callable[[Tensor, Along | Segments], Tensor]) -> Tensor:
        if source.inputs not in self._known:
            parts = [self.value(part) for part in source.inputs]
            nodes = {part.node if isinstance(part, Direct) else None for part in source.inputs}
            join = functools.partial(self._maps.joined, source.inputs) if nodes <= self._data else concatenate
            self._known[source.inputs] = join(parts)
        x, dim = self._known[source.inputs], self._dims[source.plate]
        if not source.onto:
            return encoder(x, Along(dim))
        result = encoder(x, self._maps.segments(source.plate, source.onto, dim))
        return _spread(result, dim, *self._places(source.onto))

    def forget(self) -> None:
        """Forgets what was evaluated."""
        self._known.clear()

    def _flatten(self, value: Tensor, source: Flattened) -> Tensor:
        for plate in source.plates:
            value = flatten(value, self._dims[plate] - 1)
        return value

    def _gather(self, value: Tensor, source: Gathered) -> Tensor:
        dim = self._dims[source.rows]
        segments = self._maps.segments(source.rows, source.plates, dim)
        return segments.gather(_gathered(value, dim, *self._places(source.plates)))

    def _places(self, plates: Sequence[str]) -> tuple[list[int], list[int]]:
        return [self._dims[plate] for plate in plates], [self._maps.sizes[plate] for plate in plates]


def _spread(x: Tensor, dim: int, dims: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Moves combinations of instances, ``prod(sizes)`` along ``dim``, to the dims of their plates.

    Dims are negative and counted without the features; those of the plates have size 1, ``dim`` aside.
    """
    if list(dims) == [dim]:
        return x
    x = x.unsqueeze(-2).transpose(dim - 2, -2).unflatten(-2, tuple(sizes))
    for plate_dim in reversed(dims):
        x = x.transpose(plate_dim - 1 - len(dims), -2).squeeze(-2)
        dims = dims[:-1]
    return x


def _gathered(x: Tensor, dim: int, dims: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Undoes `_spread`: instances of some plates to their combinations along ``dim``."""
    if list(dims) == [dim]:
        return x
    for count, plate_dim in enumerate(dims):
        x = x.unsqueeze(-2).transpose(plate_dim - 2 - count, -2)
    x = x.expand(*x.shape[: -1 - len(dims)], *sizes, x.shape[-1]).flatten(-1 - len(dims), -2)
    return x.transpose(dim - 2, -2).squeeze(-2)


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates along the last dim after broadcasting the others."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0].shape[:-1]
    if any(part.shape[:-1] != first for part in parts):
        batch = _broadcast([part.shape[:-1] for part in parts])
        parts = [part if part.shape[:-1] == batch else part.expand(batch + part.shape[-1:]) for part in parts]
    return torch.cat(list(parts), dim=-1)


def _broadcast(shapes: Sequence[torch.Size]) -> tuple[int, ...]:
    """Returns the shape that shapes broadcast to; `torch.broadcast_shapes` takes as long as a small network."""
    ndims = max(map(len, shapes))
    padded = [(1,) * (ndims - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded))


def flatten(value: Tensor, dim: int) -> Tensor:
    """Moves a plate dim into the features, instances in order, and leaves size 1 in its place."""
    moved = value.movedim(dim, -2)
    return moved.reshape(moved.shape[:-2] + (-1,)).unsqueeze(dim)
