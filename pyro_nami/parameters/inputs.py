"""The values of sources in one call, as `conditioning` plans them.

Feature tensors are ``(*left, *plates, features)``, with Pyro's plate dims in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_nami.deriving.expansion import broadcast
from pyro_nami.factors.joint import to_instances, to_sequence
from pyro_nami.networks.reductions import Along, Reduction, Segments
from pyro_nami.parameters.conditioning import Direct, Flattened, Pooled, Source
from pyro_nami.reading.index_maps.nesting import routes

__all__ = ["IndexMaps", "Pooling", "Sources", "concatenate"]

# pooled source -> what reduces its sets
Pooling = Mapping[Pooled, Callable[[Tensor, Reduction], Tensor]]


class IndexMaps:
    """The index maps of one call, or of calls with the same ones.

    Args:
        maps: (plate of the rows, plate that they read) -> index of each row, ``(rows,)``.
        sizes: plate that is read -> its size.

    Example:
        >>> county, state = torch.tensor([1, 1, 0]), torch.tensor([5, 7])
        >>> IndexMaps({("obs", "county"): county, ("county", "state"): state}, {}).index("obs", "state")
        tensor([7, 7, 5])
    """

    def __init__(self, maps: Mapping[tuple[str, str], Tensor], sizes: Mapping[str, int]) -> None:
        self.maps, self.sizes = dict(maps), dict(sizes)
        self._segments: dict[Any, Segments] = {}

    def index(self, rows: str, plate: str) -> Tensor:
        """Returns the instance of ``plate`` of each row, along a chain of maps if need be."""
        if (rows, plate) not in self.maps:
            ways = routes(self.maps, rows)
            self.maps[rows, plate] = next(way.rows for way in ways if way.end == plate)
        return self.maps[rows, plate]

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


@dataclass(eq=False)
class Sources:
    """The values of sources in one call, each evaluated once, when it is first read.

    Args:
        dims: plate -> its (negative) batch dim.
        maps: the call's index maps.
        encoders: of pooled sources; sums: of the pseudo-observations that these hold.

    Example:
        >>> source = Pooled("i", (Direct("y"),))
        >>> sources = Sources({"i": -1}, IndexMaps({}, {}), {source: lambda x, over: over.mean(x)}, {})
        >>> sources.put("y", torch.tensor([[1.0], [3.0]]))
        >>> sources.value(source)
        tensor([[2.]])
    """

    dims: Mapping[str, int]
    maps: IndexMaps
    encoders: Pooling
    sums: Pooling
    _features: dict[Hashable, Tensor] = field(default_factory=dict, init=False)
    _known: dict[Any, Tensor] = field(default_factory=dict, init=False)

    def put(self, node: Hashable, features: Tensor) -> None:
        """Makes features known, of size 1 in plates that a node lacks."""
        self._features[node] = features

    def take(self, other: Sources, drawn: Collection[Hashable]) -> None:
        """Makes known what other sources know; gradients go through nodes that were ``drawn`` alone."""
        for node, features in other._features.items():
            self._features[node] = features if node in drawn else features.detach()

    def value(self, source: Source) -> Tensor:
        """Returns the features that a factor reads by a source, ``(*left, *plates, features)``."""
        return self._value(source, self.encoders)

    def total(self, source: Source) -> Tensor:
        """Returns what the instances that a factor reads by a pooled source add up to, ``(*left, *plates, sums)``."""
        return self._value(source, self.sums)

    def _value(self, source: Any, pooling: Pooling) -> Tensor:
        if isinstance(source, Direct):
            return self._features[source.node]
        key = source, pooling is self.sums
        if key not in self._known:
            if isinstance(source, Pooled):
                value = self._pool(source, pooling[source])
            elif isinstance(source, Flattened):
                dims = [self.dims[plate] for plate in source.plates]
                value = to_sequence(self._value(source.source, pooling), dims)
            else:
                value = self._gather(self._value(source.source, pooling), source)
            self._known[key] = value
        return self._known[key]

    def _pool(self, source: Pooled, reduce: Callable[[Tensor, Reduction], Tensor]) -> Tensor:
        x, dim = self._instances(source.inputs), self.dims[source.plate]
        over = self.maps.segments(source.plate, source.onto, dim) if source.onto else Along(dim)
        sets = reduce(x, over).flatten(x.dim() - 1)  # sums come head by head
        dims, sizes = self._places(source.onto)
        if dims in ([], [dim]):
            return sets
        return to_instances(sets.unsqueeze(-2).transpose(dim - 2, -2), dims, sizes, 1).squeeze(-2)

    def _instances(self, inputs: tuple[Source, ...]) -> Tensor:
        """Returns what the instances of a pooled source are encoded from, side by side."""
        if inputs not in self._known:
            self._known[inputs] = concatenate([self.value(part) for part in inputs])
        return self._known[inputs]

    def _gather(self, value: Tensor, source: Any) -> Tensor:
        dim, (dims, sizes) = self.dims[source.rows], self._places(source.plates)
        if dims != [dim]:
            shape = list(value.shape)
            for plate_dim, size in zip(dims, sizes):
                shape[plate_dim - 1] = size
            rows = to_sequence(value.expand(shape).unsqueeze(-2), dims, 1)
            value = rows.transpose(dim - 2, -2).squeeze(-2)
        return self.maps.segments(source.rows, source.plates, dim).gather(value)

    def _places(self, plates: Sequence[str]) -> tuple[list[int], list[int]]:
        """Returns dims and sizes of plates; the fastest first, where combinations of instances are in a row."""
        fastest = plates[::-1]
        return [self.dims[plate] for plate in fastest], [
            self.maps.sizes[plate] for plate in fastest
        ]


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates along the last dim after broadcasting the others."""
    if len(parts) == 1:
        return parts[0]
    batch = functools.reduce(broadcast, [part.shape[:-1] for part in parts])
    return torch.cat([part.expand(*batch, -1) for part in parts], -1)
