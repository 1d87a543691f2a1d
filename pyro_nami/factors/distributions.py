"""The distributions that the guide emits at its sample sites.

A `ParallelDistribution` draws all elements of a value at once, a `SequentialDistribution` one by one, each given those
before. Both have the model's support and event shape and a real density. Neither has a registered KL divergence, on
purpose: ``TraceMeanField_ELBO`` must fall back to the sample estimate (pyro_contract, section 3). Both remember the
latest draw, so that scoring one's own draw costs no inverse transform and no network pass.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_nami.factors.elements import NO_DRAW, Elements, LatestDraw
from pyro_nami.factors.joint import to_instances, to_sequence
from pyro_nami.factors.layout import Layout

__all__ = ["Conditionals", "ParallelDistribution", "SequentialDistribution", "SiteDistribution"]

Next = Callable[[Tensor], tuple[Tensor, Any]]


class Conditionals(Protocol):
    """What the guide gives a sequential site: parameters of each element given the ones before; immutable."""

    def first(self) -> tuple[Tensor, Next]:
        """Returns the parameters ``(*batch, k)`` of element 0 and the function `next`.

        ``next(features)`` takes the features ``(*batch, f)`` of the element just drawn and returns the parameters of
        the following element and another such function.
        """

    def all(self, features: Tensor) -> Tensor:
        """Returns the parameters ``(*batch, E, k)`` from all features ``(*batch, E, f)`` in one dense pass."""


class SiteDistribution(TorchDistribution):
    """log q(value) = sum over elements of log q(element) - log |d value / d elements|.

    Subclasses draw elements and score them.

    Args:
        layout: of the value as elements.
        batch_shape: of the distribution.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(self, layout: Layout, batch_shape: torch.Size) -> None:
        self._layout = layout
        self._latest = NO_DRAW
        super().__init__(torch.Size(batch_shape), layout.event_shape)

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        return self._layout.support

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> SiteDistribution:
        wide = copy.copy(self)
        wide._batch_shape, wide._latest = torch.broadcast_shapes(tuple(batch_shape), self._batch_shape), NO_DRAW
        return wide

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Returns a reparameterized draw ``(*sample_shape, *batch, *event)``."""
        if not self.has_rsample:
            raise NotImplementedError(f"{type(self).__name__} of a discrete or non-reparameterized type has no rsample")
        return self._draw(sample_shape)

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Returns a draw ``(*sample_shape, *batch, *event)`` that carries no gradient."""
        if self.has_rsample:
            with torch.no_grad():
                return self._draw(sample_shape)
        # Elements draw without gradients themselves; the network's parameters must keep theirs for log_prob.
        return self._draw(sample_shape)

    def recall(self, value: Tensor) -> Tensor | None:
        """Returns the elements of the latest draw if `value` is it; see `LatestDraw`."""
        kept = self._latest.recall(value)
        return None if kept is None else kept[0]

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns log densities in nats ``(*batch,)``; of an instance given those before it, in a joint block."""
        kept = self._latest.recall(value)
        if kept is None:
            if self._validate_args:
                self._validate_sample(value)
            kept = self._layout.elements(value), None
        log_probs = self._score(*kept)
        log_prob = log_probs.squeeze(-1) if log_probs.shape[-1] == 1 else log_probs.sum(-1)
        log_abs_det = self._layout.log_abs_det(kept[0], value)
        if log_abs_det is not None:
            log_prob = log_prob - log_abs_det
        if log_prob.shape != self._batch_shape:
            log_prob = log_prob.expand(torch.broadcast_shapes(log_prob.shape, self._batch_shape))
        return log_prob

    def _draw(self, sample_shape: Sequence[int]) -> Tensor:
        elements, params = self._draw_elements(torch.Size(sample_shape) + self._batch_shape)
        value = self._layout.value(elements)
        self._latest = LatestDraw.of(value, elements, params)
        return value

    def _draw_elements(self, shape: torch.Size) -> tuple[Tensor, Tensor | None]:
        """Returns elements ``(*shape, E, *element)``, and what `_score` would compute of them first."""
        raise NotImplementedError

    def _score(self, elements: Tensor, params: Tensor | None) -> Tensor:
        """Returns log densities in nats ``(*batch, E)`` of elements."""
        raise NotImplementedError


class ParallelDistribution(SiteDistribution):
    """A site's distribution whose elements are drawn at once.

    Args:
        elements: of batch ``(*batch, E)``.
        layout: of the site's value.
    """

    def __init__(self, elements: Elements, layout: Layout) -> None:
        self._elements = elements
        batch_shape = elements.shape[:-1]
        if layout.batch_shape:
            batch_shape = torch.broadcast_shapes(batch_shape, layout.batch_shape)
        super().__init__(layout, batch_shape)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        return self._elements.has_rsample

    @property
    def has_enumerate_support(self) -> bool:  # type: ignore[override]
        return self._layout.num_elements == 1 and self._elements.has_enumerate_support

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Returns every value, ``(values, *batch, *event)``, with ones for the batch unless `expand`."""
        if not self.has_enumerate_support:
            raise NotImplementedError("Expected one element of a type with finite support to enumerate")
        values = self._elements.enumerate_support()
        batch = self._batch_shape if expand else torch.Size((1,) * len(self._batch_shape))
        values = values.reshape((len(values),) + (1,) * len(self._batch_shape) + self._event_shape)
        return values.expand((len(values),) + batch + self._event_shape)

    def _draw_elements(self, shape: torch.Size) -> tuple[Tensor, None]:
        return self._elements.draw(shape + (self._layout.num_elements,)), None

    def _score(self, elements: Tensor, params: Tensor | None) -> Tensor:
        return self._elements.log_prob(elements)


class SequentialDistribution(SiteDistribution):
    """A site's distribution whose elements are drawn in sequence, each given those before it: q = prod q(e_i | e_<i).

    The sequence may run over all instances of some plates, too.

    Args:
        conditionals: the network's side: parameters ``(*batch, k)`` of each element of the sequence, with size 1 in the
            dims ``dims``.
        build: makes `Elements` from parameters ``(*batch, E, k)`` and an anchor ``(*batch, E, a)`` or None.
        features: what the network reads of elements: ``(*batch, E, *element)`` to ``(*batch, E, f)``.
        layout: of the site's value.
        anchor: ``(*batch, E, a)`` or None, instance by instance.
        batch_shape: of the distribution, the plates ``dims`` included.
        has_rsample: whether the elements are reparameterized.
        dims: negative batch dims of the plates whose instances are drawn in sequence.
        sizes: of these plates.
    """

    def __init__(
        self,
        conditionals: Conditionals,
        build: Callable[[Tensor, Tensor | None], Elements],
        features: Callable[[Tensor], Tensor],
        layout: Layout,
        *,
        anchor: Tensor | None,
        batch_shape: torch.Size,
        has_rsample: bool,
        dims: Sequence[int] = (),
        sizes: Sequence[int] = (),
    ) -> None:
        self._conditionals, self._build, self._features = conditionals, build, features
        self._anchor, self._has_rsample = anchor, has_rsample
        self._dims, self._sizes = tuple(dims), tuple(sizes)
        super().__init__(layout, batch_shape)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        return self._has_rsample

    def _score(self, elements: Tensor, params: Tensor | None) -> Tensor:
        if params is None:
            features = to_sequence(self._features(elements), self._dims, 1)
            params = to_instances(self._conditionals.all(features), self._dims, self._sizes, 1)
        return self._build(params, self._anchor).log_prob(elements)

    def _draw_elements(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        anchor, row = self._anchor, list(shape)
        if anchor is not None and self._dims:
            anchor = to_sequence(anchor.expand(self._batch_shape + anchor.shape[-2:]), self._dims, 1)
        for dim in self._dims:
            row[dim] = 1
        count = self._layout.num_elements * math.prod(self._sizes)
        elements, params = self._draw_sequence(torch.Size(row), count, anchor)
        elements = to_instances(elements, self._dims, self._sizes, len(self._layout.element_shape))
        return elements, to_instances(params, self._dims, self._sizes, 1)

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
        stacked = torch.stack(torch.broadcast_tensors(*all_params), -2)
        return torch.cat(elements, -1 - len(self._layout.element_shape)), stacked
