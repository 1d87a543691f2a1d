"""The distributions that the guide emits at its sample sites.

`Factor` has independent elements, `AutoregressiveFactor` draws element by element, each given the ones before. Both
have the model's support and event shape and a real density. Neither has a registered KL divergence, on purpose:
``TraceMeanField_ELBO`` must fall back to the sample estimate (pyro_contract, section 3). Both remember the latest draw
by identity, so that scoring one's own draw costs no inverse transform and no network pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_nami.factors.elements import Elements
from pyro_nami.factors.layout import Layout

__all__ = ["AutoregressiveFactor", "Conditionals", "Factor", "SiteDistribution"]

Next = Callable[[Tensor], tuple[Tensor, Any]]


class Conditionals(Protocol):
    """What the guide gives an autoregressive site: parameters of each element given the ones before; immutable."""

    def first(self) -> tuple[Tensor, Next]:
        """Returns the parameters ``(*batch, k)`` of element 0 and the function `next`.

        ``next(features)`` takes the features ``(*batch, f)`` of the element just drawn and returns the parameters of
        the following element and another such function.
        """

    def all(self, features: Tensor) -> Tensor:
        """Returns the parameters ``(*batch, E, k)`` from all features ``(*batch, E, f)`` in one dense pass."""


class SiteDistribution(TorchDistribution):
    """What both factors share: shapes, support, and the memory of the latest draw."""

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(self, layout: Layout, batch_shape: torch.Size) -> None:
        self._layout = layout
        self._latest: tuple[Tensor, Tensor, bool] | None = None
        super().__init__(torch.Size(batch_shape), layout.event_shape)

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        return self._layout.support

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Returns a reparameterized draw ``(*sample_shape, *batch, *event)``."""
        if not self.has_rsample:
            raise NotImplementedError(f"{type(self).__name__} of a discrete or non-reparameterized type has no rsample")
        return self._draw(torch.Size(sample_shape) + self._batch_shape)

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Returns a draw ``(*sample_shape, *batch, *event)`` that carries no gradient."""
        if self.has_rsample:
            with torch.no_grad():
                return self._draw(torch.Size(sample_shape) + self._batch_shape)
        # Elements draw without gradients themselves; the network's parameters must keep theirs for log_prob.
        return self._draw(torch.Size(sample_shape) + self._batch_shape)

    def _draw(self, shape: torch.Size) -> Tensor:
        elements = self._draw_elements(shape)
        value = self._layout.value(elements)
        self._latest = (value, elements, value.requires_grad)
        return value

    def _draw_elements(self, shape: torch.Size) -> Tensor:
        raise NotImplementedError

    def recall(self, value: Tensor) -> Tensor | None:
        """Returns the elements of the latest draw if `value` is it, unchanged in its tie to autograd."""
        if self._latest is None:
            return None
        drawn, elements, tied = self._latest
        return elements if drawn is value and tied == value.requires_grad else None

    def _elements_of(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        return self._layout.elements(value)

    def _total(self, log_probs: Tensor, elements: Tensor, value: Tensor) -> Tensor:
        """Returns log densities ``(*batch,)`` of values from those of their elements ``(*batch, E)``."""
        log_prob = log_probs.squeeze(-1) if log_probs.shape[-1] == 1 else log_probs.sum(-1)
        log_abs_det = self._layout.log_abs_det(elements, value)
        if log_abs_det is not None:
            log_prob = log_prob - log_abs_det
        if log_prob.shape != self._batch_shape:
            log_prob = log_prob.expand(torch.broadcast_shapes(log_prob.shape, self._batch_shape))
        return log_prob


class Factor(SiteDistribution):
    """A site's distribution with elements independent given the factor's inputs.

    Args:
        elements: of batch ``(*batch, E)``.
        layout: of the site's value.
        batch_shape: if wider than the elements' own.
    """

    def __init__(self, elements: Elements, layout: Layout, batch_shape: torch.Size | None = None) -> None:
        self._elements = elements
        if batch_shape is None:
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

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Factor:
        return Factor(self._elements, self._layout, torch.broadcast_shapes(tuple(batch_shape), self._batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns log densities in nats ``(*batch,)``."""
        elements = self.recall(value)
        if elements is None:
            elements = self._elements_of(value)
        return self._total(self._elements.log_prob(elements), elements, value)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Returns every value, ``(values, *batch, *event)``, with ones for the batch unless `expand`."""
        if not self.has_enumerate_support:
            raise NotImplementedError("Expected one element of a type with finite support to enumerate")
        values = self._elements.enumerate_support()
        batch = self._batch_shape if expand else torch.Size((1,) * len(self._batch_shape))
        values = values.reshape((len(values),) + (1,) * len(self._batch_shape) + self._event_shape)
        return values.expand((len(values),) + batch + self._event_shape)

    def _draw_elements(self, shape: torch.Size) -> Tensor:
        return self._elements.draw(shape + (self._layout.num_elements,))


class AutoregressiveFactor(SiteDistribution):
    """A site's distribution whose elements are drawn in sequence, each given those before it.

    Args:
        conditionals: the network's side: parameters of each element.
        build: makes `Elements` from parameters ``(*batch, E, k)`` and an anchor ``(*batch, E, a)`` or None.
        features: what the network reads of elements: ``(*batch, E, *element)`` to ``(*batch, E, f)``.
        layout: of the site's value.
        anchor: ``(*batch, E, a)`` or None.
        batch_shape: of the factor.
        has_rsample: whether the elements are reparameterized.
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
    ) -> None:
        self._conditionals = conditionals
        self._build = build
        self._features = features
        self._anchor = anchor
        self._has_rsample = has_rsample
        self._latest_params: tuple[Tensor, bool] | None = None
        super().__init__(layout, batch_shape)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        return self._has_rsample

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> AutoregressiveFactor:
        return AutoregressiveFactor(
            self._conditionals,
            self._build,
            self._features,
            self._layout,
            anchor=self._anchor,
            batch_shape=torch.broadcast_shapes(tuple(batch_shape), self._batch_shape),
            has_rsample=self._has_rsample,
        )

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns log densities in nats ``(*batch,)``: one dense pass, or none for the latest draw."""
        elements = self.recall(value)
        params = None if elements is None else self._recall_params()
        if elements is None:
            elements = self._elements_of(value)
        if params is None:
            params = self._conditionals.all(self._features(elements))
        return self._total(self._build(params, self._anchor).log_prob(elements), elements, value)

    def _draw_elements(self, shape: torch.Size) -> Tensor:
        elements, params = self._draw_sequence(shape, self._layout.num_elements, self._anchor)
        self._latest_params = (params, torch.is_grad_enabled())
        return elements

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

    def _recall_params(self) -> Tensor | None:
        """Returns the parameters of the latest draw, unless they were made without the gradients wanted now."""
        assert self._latest_params is not None
        params, with_gradients = self._latest_params
        return params if with_gradients or not torch.is_grad_enabled() else None
