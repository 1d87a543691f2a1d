"""Elements drawn in sequence, each given those before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_nami.factors.elements import NO_DRAW, Elements, LatestDraw
from pyro_nami.factors.joint import to_instances, to_sequence

__all__ = ["Conditionals", "SequentialElements"]

Next = Callable[[Tensor], tuple[Tensor, Any]]


class Conditionals(Protocol):
    """What the guide gives a sequential site: parameters of each element given the ones before; immutable."""

    def first(self) -> tuple[Tensor, Next]:
        """Returns the parameters ``(*batch, k)`` of element 0 and a function.

        It takes the features ``(*batch, f)`` of the element just drawn and returns the parameters of the following
        element and another such function.
        """

    def all(self, features: Tensor) -> Tensor:
        """Returns the parameters ``(*batch, E, k)`` from all features ``(*batch, E, f)`` in one dense pass."""


class SequentialElements(Elements):
    """q(elements) = prod q(e_i | e_1 ... e_(i-1)), the sequence running over all instances of some plates, too.

    The density of one's own draw costs no pass of the network.

    Args:
        conditionals: the network's side; with size 1 in the dims ``dims``.
        build: makes `Elements` from parameters ``(*batch, E, k)`` and an anchor ``(*batch, E, a)`` or None.
        features: what the network reads of elements: ``(*batch, E, *element)`` to ``(*batch, E, f)``.
        anchor: ``(*batch, E, a)`` or None, instance by instance.
        shape: ``(*batch, E)``, the plates ``dims`` included.
        has_rsample: whether the elements are reparameterized.
        dims: negative batch dims of the plates whose instances are drawn in sequence.
        sizes: of these plates.
    """

    def __init__(
        self,
        conditionals: Conditionals,
        build: Callable[[Tensor, Tensor | None], Elements],
        features: Callable[[Tensor], Tensor],
        anchor: Tensor | None,
        *,
        shape: torch.Size,
        has_rsample: bool,
        dims: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        self._conditionals, self._build, self._features, self._anchor = conditionals, build, features, anchor
        self.shape, self.has_rsample, self._dims, self._sizes = shape, has_rsample, dims, sizes
        self._latest = NO_DRAW

    def log_prob(self, x: Tensor) -> Tensor:
        (params,) = self._latest.recall(x) or (None,)
        if params is None:
            features = to_sequence(self._features(x), self._dims, 1)
            params = to_instances(self._conditionals.all(features), self._dims, self._sizes, 1)
        return self._build(params, self._anchor).log_prob(x)

    def draw(self, shape: torch.Size) -> Tensor:
        anchor, (*batch, count) = self._anchor, shape
        if anchor is not None and self._dims:
            anchor = to_sequence(anchor.expand(self.shape + anchor.shape[-1:]), self._dims, 1)
        for dim in self._dims:
            batch[dim] = 1
        elements, params = self._draw_sequence(torch.Size(batch), count * math.prod(self._sizes), anchor)
        x = to_instances(elements, self._dims, self._sizes, elements.dim() - len(shape))
        self._latest = LatestDraw.of(x, to_instances(params, self._dims, self._sizes, 1))
        return x

    def _draw_sequence(self, shape: torch.Size, count: int, anchor: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns ``count`` elements, drawn one by one, ``(*shape, count, *element)``, and their parameters."""
        params, advance = self._conditionals.first()
        all_params, elements = [params], []
        for index in range(count):
            here = None if anchor is None else anchor[..., index : index + 1, :]
            element = self._build(params.unsqueeze(-2), here).draw(shape + (1,))
            elements.append(element)
            if index + 1 < count:
                params, advance = advance(self._features(element).squeeze(-2))
                all_params.append(params)
        return torch.cat(elements, len(shape)), torch.stack(torch.broadcast_tensors(*all_params), -2)
