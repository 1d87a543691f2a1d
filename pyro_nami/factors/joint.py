"""A plate whose instances form one joint block: drawn in sequence, scored instance by instance.

Where the instances of a site depend on each other given the data, its factor is one sequence of elements over all
instances, yet the site still lies in its plates. `JointFactor` is that: its batch includes the plates, and the log
density of an instance is that of its elements given those of the instances before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_nami.factors.factor import AutoregressiveFactor, Conditionals, Next

__all__ = ["JointFactor", "fold", "unfold"]


def fold(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Moves plate dims into the elements: ``(*batch, E, c)`` to ``(*batch, N E, c)`` with size 1 in their place.

    Args:
        x: a tensor with elements and their parts as its last two dims.
        dims: negative batch dims (counted without the last two), in order; the last becomes the slowest.
    """
    for dim in dims:
        x = x.movedim(dim - 2, -3).flatten(-3, -2).unsqueeze(dim - 2)
    return x


def unfold(x: Tensor, dims: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Undoes `fold`: ``(*batch, N E, c)`` to ``(*batch, E, c)`` with ``sizes`` in the dims ``dims``."""
    for dim, size in zip(reversed(dims), reversed(sizes)):
        x = x.squeeze(dim - 2).unflatten(-2, (size, -1)).movedim(-3, dim - 2)
    return x


class _Instances:
    """Conditionals of a sequence over all instances, seen instance by instance."""

    def __init__(self, sequence: Conditionals, dims: Sequence[int], sizes: Sequence[int]) -> None:
        self.sequence, self.dims, self.sizes = sequence, dims, sizes

    def first(self) -> tuple[Tensor, Next]:
        return self.sequence.first()

    def all(self, features: Tensor) -> Tensor:
        return unfold(self.sequence.all(fold(features, self.dims)), self.dims, self.sizes)


class JointFactor(AutoregressiveFactor):
    """A site's distribution whose elements are drawn in sequence over all instances of some plates.

    Args:
        conditionals: parameters ``(*batch, k)`` of each element of the sequence, with size 1 in the dims ``dims``.
        *args, **kwargs: as for `AutoregressiveFactor`; the anchor is instance by instance.
        dims: negative batch dims of the plates.
        sizes: of these plates.
    """

    _conditionals: _Instances

    def __init__(
        self, conditionals: Conditionals, *args: Any, dims: Sequence[int], sizes: Sequence[int], **kwargs: Any
    ) -> None:
        super().__init__(_Instances(conditionals, dims, sizes), *args, **kwargs)
        self._dims, self._sizes = tuple(dims), tuple(sizes)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> JointFactor:
        return JointFactor(
            self._conditionals.sequence,
            self._build,
            self._features,
            self._layout,
            anchor=self._anchor,
            batch_shape=torch.broadcast_shapes(batch_shape, self._batch_shape),
            has_rsample=self._has_rsample,
            dims=self._dims,
            sizes=self._sizes,
        )

    def _draw_elements(self, shape: torch.Size) -> Tensor:
        anchor = self._anchor
        if anchor is not None:
            anchor = fold(anchor.expand(self._batch_shape + anchor.shape[-2:]), self._dims)
        sequence_shape = list(shape)
        for dim in self._dims:
            sequence_shape[dim] = 1
        count = self._layout.num_elements
        for size in self._sizes:
            count *= size
        elements, params = self._draw_sequence(torch.Size(sequence_shape), count, anchor)
        self._latest_params = (unfold(params, self._dims, self._sizes), torch.is_grad_enabled())
        inner = len(self._layout.element_shape)
        flat = elements.flatten(-inner) if inner else elements.unsqueeze(-1)
        whole = unfold(flat, self._dims, self._sizes)
        return whole.unflatten(-1, self._layout.element_shape) if inner else whole.squeeze(-1)
