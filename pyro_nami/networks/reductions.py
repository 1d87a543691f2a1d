"""Sums and maxima over sets of instances that lie along a batch dimension: all of them one set, or by an index.

An encoder does not know how the instances of a plate fall into sets; it asks a reduction for sums, maxima and counts
of the sets, and for what belongs to its set to be brought back to each instance. `Along` takes a whole plate for one
set. `Segments` takes an index that says which set an instance belongs to, as the rows of a table belong to groups.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Along", "Chunk", "Counts", "Reduction", "Segments"]

_CHUNK = 8192


class Counts(NamedTuple):
    """Numbers of instances of the smallest and the largest of some sets."""

    least: int
    most: int

    def nearest(self, count: int) -> int:
        """Returns the number in this range that is nearest to one."""
        return min(max(count, self.least), self.most)

    def union(self, other: Counts) -> Counts:
        """Returns the smallest range that holds both."""
        return Counts(min(self.least, other.least), max(self.most, other.most))


class Along:
    """All instances along a batch dimension form one set; results have size 1 there.

    Args:
        dim: the batch dimension, negative and counted without the dimension of features; -1 is the last.

    Example:
        >>> Along(-1).sum(torch.tensor([[1.0], [3.0], [5.0]]))
        tensor([[9.]])
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.axis = dim - 1

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum over each set; zeros for an empty one."""
        return x.sum(self.axis, keepdim=True)

    def mean(self, x: Tensor) -> Tensor:
        """Returns the mean over each set; zeros for an empty one."""
        return x.sum(self.axis, keepdim=True) / max(x.shape[self.axis], 1)

    def amax(self, x: Tensor) -> Tensor:
        """Returns the maximum over each set; zeros for an empty one."""
        return x.amax(self.axis, keepdim=True) if x.shape[self.axis] else self.sum(x)

    def count(self, x: Tensor) -> Tensor:
        """Returns the number of instances of each set, of shape ``(1,)``."""
        return x.new_full((1,), x.shape[self.axis])

    def spread(self, z: Tensor) -> Tensor:
        """Returns for each instance what ``z`` holds for its set, broadcastable to the instances."""
        return z

    def counts(self, x: Tensor) -> Counts:
        """Returns the numbers of instances of the smallest and the largest set of x."""
        return Counts(x.shape[self.axis], x.shape[self.axis])

    def with_log_count(self, z: Tensor, x: Tensor, within: Counts | None = None) -> Tensor:
        """Returns ``z``, ``(*sets, features)``, with log(1 + number of instances of x) as one more feature.

        Numbers outside ``within`` are taken for its nearest end.
        """
        count = x.shape[self.axis]
        return F.pad(z, (0, 1), value=math.log1p(count if within is None else within.nearest(count)))


class Chunk(NamedTuple):
    """Some rows of `Segments`, sorted by their set.

    Attributes:
        rows: which of the sorted rows.
        sets: the sets that they belong to.
        offsets: the first row of each of these sets, counted within the chunk.
        segments: the set of each row.
        arange: the numbers of the rows within the chunk.
    """

    rows: slice
    sets: slice
    offsets: Tensor
    segments: Tensor
    arange: Tensor


class Segments:
    """Instance n along a batch dimension belongs to set ``index[n]``; results have ``num_segments`` there.

    The index is checked once, here. Instances of size 1 along the dimension stand for one copy an instance.

    Args:
        index: set of each instance, integer, ``(instances,)``.
        num_segments: number of sets; those without instances are empty.
        dim: the batch dimension, negative and counted without the dimension of features; -1 is the last.

    Raises:
        TypeError: if ``index`` holds no integers.
        ValueError: if ``index`` has more than one dimension, or an entry is no set.

    Example:
        >>> Segments(torch.tensor([0, 2, 0]), 3, -1).sum(torch.tensor([[1.0], [3.0], [5.0]]))
        tensor([[6.],
                [0.],
                [3.]])
    """

    def __init__(self, index: Tensor, num_segments: int, dim: int) -> None:
        if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            raise TypeError(f"Expected an index of integers; got {index.dtype}. Convert it with .long().")
        if index.dim() != 1:
            raise ValueError(f"Expected an index of shape (instances,); got {tuple(index.shape)}.")
        if len(index):
            low, high = (int(bound) for bound in index.aminmax())
            if low < 0 or high >= num_segments:
                raise ValueError(f"Expected index from 0 to {num_segments - 1}; got {low} to {high}.")
        self.index = index.to(torch.long, copy=True)  # what is made of it is kept, whatever is written to it
        self.num_segments = num_segments
        self.dim = dim
        self.axis = dim - 1
        self._kept: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._counts: dict[torch.dtype, tuple[Tensor, Tensor, Tensor]] = {}

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum over each set; zeros for an empty one."""
        x = self._instances(x)
        return self._add(x) if torch.jit.is_tracing() else _Sum.apply(x, self)

    def mean(self, x: Tensor) -> Tensor:
        """Returns the mean over each set; zeros for an empty one."""
        return self.averages(self.sum(x))

    def averages(self, sums: Tensor) -> Tensor:
        """Returns the mean over each set, given the sums."""
        return sums * self._count_tensors(sums)[1]

    def amax(self, x: Tensor) -> Tensor:
        """Returns the maximum over each set; zeros for an empty one."""
        x = self._instances(x)
        index = self.index.view(-1, *(1,) * (-self.axis - 1)).expand(x.shape)
        zeros = x.new_zeros(self._shape(x, self.num_segments))
        return zeros.scatter_reduce(self.axis, index, x, "amax", include_self=False)

    def count(self, x: Tensor) -> Tensor:
        """Returns the number of instances of each set, ``(num_segments, ..., 1)`` with the dims from ``dim`` on."""
        return self._count_tensors(x)[0]

    def spread(self, z: Tensor) -> Tensor:
        """Returns for each instance what ``z``, ``(*sets, features)``, holds for its set."""
        if z.shape[self.axis] != self.num_segments:
            z = z.expand(self._shape(z, self.num_segments))
        return z.index_select(self.axis, self.index) if torch.jit.is_tracing() else _Spread.apply(z, self)

    def counts(self, x: Tensor) -> Counts:
        """Returns the numbers of instances of the smallest and the largest set."""
        return self._counts_range

    def with_log_count(self, z: Tensor, x: Tensor, within: Counts | None = None) -> Tensor:
        """Returns ``z``, ``(*sets, features)``, with log(1 + number of instances) as one more feature.

        Numbers outside ``within`` are taken for its nearest end.
        """
        log_count = self._count_tensors(x)[2]
        if within is not None and within.union(self._counts_range) != within:
            log_count = log_count.clamp(math.log1p(within.least), math.log1p(within.most))
        return torch.cat((z, log_count.expand(*z.shape[:-1], 1)), -1)

    def _instances(self, x: Tensor) -> Tensor:
        """Returns x with the size of the index along the dimension."""
        if x.shape[self.axis] == len(self.index):
            return x
        if x.shape[self.axis] != 1:
            raise ValueError(
                f"Expected size {len(self.index)} along dim {self.dim}, that of the index; got {x.shape[self.axis]}."
            )
        return x.expand(self._shape(x, len(self.index)))

    def _shape(self, x: Tensor, size: int) -> torch.Size:
        """Returns the shape of x with ``size`` along the dimension."""
        return x.shape[: self.axis] + (size,) + x.shape[self.axis :][1:]

    def _count_tensors(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns count, 1/count (1 where it is 0) and log(1 + count) in the dtype of x."""
        if x.dtype not in self._counts:
            count = torch.bincount(self.index, minlength=self.num_segments)
            count = count.to(x.dtype).view(-1, *(1,) * (-self.axis - 1))
            self._counts[x.dtype] = count, count.clamp(min=1).reciprocal(), count.log1p()
        return self._counts[x.dtype]

    def _add(self, x: Tensor) -> Tensor:
        """Returns sums over sets; `_Sum` has the faster gradient, but a trace knows no functions in Python.

        `torch.embedding_bag`, with instances as embeddings and sets as bags, takes a tenth of the time of
        ``index_add`` on a CPU; it has a fast kernel for single precision only.
        """
        if x.device.type != "cpu" or x.dtype != torch.float32 or not x.numel() or not self.num_segments:
            return x.new_zeros(self._shape(x, self.num_segments)).index_add(self.axis, self.index, x)
        moved = x.movedim(self.axis, 0)
        sums = F.embedding_bag(self._order, moved.reshape(len(moved), -1), self._offsets, mode="sum")
        return sums.view(self.num_segments, *moved.shape[1:]).movedim(0, self.axis)

    @cached_property
    def _counts_range(self) -> Counts:
        if not self.num_segments:
            return Counts(0, 0)
        least, most = torch.bincount(self.index, minlength=self.num_segments).aminmax()
        return Counts(int(least), int(most))

    @cached_property
    def _order(self) -> Tensor:
        """The instances, set by set."""
        return self.index.argsort(stable=True)

    @cached_property
    def _offsets(self) -> Tensor:
        """For each set the first of its instances in that order."""
        counts = torch.bincount(self.index, minlength=self.num_segments)
        return counts.cumsum(0) - counts

    @cached_property
    def chunks(self) -> list[Chunk]:
        """All rows, sorted by their set, in chunks that fit a cache."""
        index, chunks = self.sorted_index, []
        for start in range(0, len(index), _CHUNK):
            here = index[start : start + _CHUNK]
            sets = slice(int(here[0]), int(here[-1]) + 1)
            offsets = (self._offsets[sets] - start).clamp(min=0)
            rows = slice(start, start + len(here))
            chunks.append(Chunk(rows, sets, offsets, here, torch.arange(len(here), device=here.device)))
        return chunks

    @cached_property
    def sorted_index(self) -> Tensor:
        """The set of each row, of rows sorted by their set."""
        return self.index[self._order]

    @cached_property
    def bags(self) -> tuple[Tensor, Tensor]:
        """The numbers of the sorted rows, and the first of each set."""
        return torch.arange(len(self.index), device=self.index.device), self._offsets

    def sorted_rows(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows ``(instances, inputs + 1)``, set by set and with a one behind, of ``x`` ``(*batch, inputs)``.

        And the same rows as columns, contiguous, and their sums over the sets. All are kept for the next call with the
        same tensor, unchanged.
        """
        if self._kept is None or self._kept[0] is not x:
            rows = F.pad(x.reshape(-1, x.shape[-1]).index_select(0, self._order), (0, 1), value=1.0)
            arange, offsets = self.bags
            sums = F.embedding_bag(arange, rows, offsets, mode="sum")
            self._kept = x, rows, rows.t().contiguous(), sums
        return self._kept[1:]


Reduction = Along | Segments


class _Sum(torch.autograd.Function):
    """Sums over the sets of `Segments`; the adjoint of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return segments._add(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Spread.apply(gradients[0], ctx.segments), None


class _Spread(torch.autograd.Function):
    """What each instance's set holds; the adjoint of `_Sum`."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return z.index_select(segments.axis, segments.index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(gradients[0], ctx.segments), None
