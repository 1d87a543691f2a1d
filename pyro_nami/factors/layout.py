"""How the value of a site is laid out as E elements in sequence.

A factor works on elements; a site's value is an event of any shape. Two layouts: `UnconstrainedLayout`, whose elements
are the scalars of the value's unconstrained space (Normal, sinh-arcsinh, mixture and flow factors), and `OwnLayout`,
whose elements are the value's own entries (factors of the model's own type). Change this module when a value is to be
cut differently.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import ComposeTransform, IndependentTransform, Transform

from pyro_nami.factors.bijections import bijection_to, interior, support_on

__all__ = ["Layout", "LogLayout", "OwnLayout", "UnconstrainedLayout"]


class Layout:
    """A one-to-one map between values ``(*batch, *event)`` and elements ``(*batch, E, *element)``.

    Attributes:
        support: of the site's value, its check taking all event dims.
        event_shape: of the site's value.
        num_elements: E.
        element_shape: of one element; ``()`` or, for vectors that are one element, ``(classes,)``.
        batch_shape: over which the support's bounds vary, ``()`` for a fixed support.
    """

    def __init__(
        self,
        support: Constraint,
        event_shape: torch.Size,
        *,
        element_ndims: int = 0,
        batch_shape: torch.Size = torch.Size(),
    ) -> None:
        self.support = support_on(support, len(event_shape))
        self.event_shape = torch.Size(event_shape)
        self.batch_shape = torch.Size(batch_shape)
        cut = len(event_shape) - element_ndims
        self.num_elements = math.prod(event_shape[:cut])
        self.element_shape = self.event_shape[cut:]

    def value(self, elements: Tensor) -> Tensor:
        """Returns the value ``(*batch, *event)`` of elements ``(*batch, E, *element)``."""
        raise NotImplementedError

    def elements(self, value: Tensor) -> Tensor:
        """Returns the elements ``(*batch, E, *element)`` of a value ``(*batch, *event)``, moved off the boundary."""
        raise NotImplementedError

    def log_abs_det(self, elements: Tensor, value: Tensor) -> Tensor | None:
        """Returns the log Jacobian determinant of `value` ``(*batch,)``; None where it is zero."""
        return None


class OwnLayout(Layout):
    """The value's own entries, reshaped."""

    def value(self, elements: Tensor) -> Tensor:
        if elements.shape[-len(self.element_shape) - 1 :] == self.event_shape:
            return elements
        batch = elements.shape[: elements.dim() - 1 - len(self.element_shape)]
        return elements.reshape(batch + self.event_shape)

    def elements(self, value: Tensor) -> Tensor:
        batch = value.shape[: value.dim() - len(self.event_shape)]
        value = interior(self.support, value)
        return value.reshape(batch + (self.num_elements,) + self.element_shape)


class LogLayout(OwnLayout):
    """The logarithms of the value's entries; the density stays that of the value (relaxed one-hot vectors)."""

    def value(self, elements: Tensor) -> Tensor:
        return super().value(elements.exp())

    def elements(self, value: Tensor) -> Tensor:
        return super().elements(value).log()


class UnconstrainedLayout(Layout):
    """The scalars of the value's unconstrained space, by `bijection_to` of its support.

    Args:
        value: any value of the site; it tells the shape of unconstrained space.

    Raises:
        NotImplementedError: the support has no bijection.
    """

    def __init__(
        self, support: Constraint, event_shape: torch.Size, value: Tensor, *, batch_shape: torch.Size = torch.Size()
    ) -> None:
        super().__init__(support, event_shape, batch_shape=batch_shape)
        self.bijection = _none_if_identity(bijection_to(self.support))
        batch = torch.broadcast_shapes(value.shape[: value.dim() - len(self.event_shape)], batch_shape)
        value = value.expand(batch + self.event_shape)  # bounds need not have all of these dims
        free = value if self.bijection is None else self.bijection.inv(interior(self.support, value))
        self.free_shape = free.shape[len(batch) :]
        self.num_elements = math.prod(self.free_shape)

    def value(self, elements: Tensor) -> Tensor:
        free = self._free(elements)
        return free if self.bijection is None else interior(self.support, self.bijection(free))

    def elements(self, value: Tensor) -> Tensor:
        if self.bijection is not None:
            value = self.bijection.inv(interior(self.support, value))
        if not self.free_shape:
            return value.unsqueeze(-1)
        return value.flatten(-len(self.free_shape)) if len(self.free_shape) > 1 else value

    def log_abs_det(self, elements: Tensor, value: Tensor) -> Tensor | None:
        if self.bijection is None:
            return None
        log_abs_det = self.bijection.log_abs_det_jacobian(self._free(elements), value)
        extra = log_abs_det.dim() - (value.dim() - len(self.event_shape))
        return log_abs_det.flatten(-extra).sum(-1) if extra > 0 else log_abs_det

    def _free(self, elements: Tensor) -> Tensor:
        if not self.free_shape:
            return elements.squeeze(-1)
        return elements.unflatten(-1, self.free_shape) if len(self.free_shape) > 1 else elements


def _none_if_identity(bijection: Transform) -> Transform | None:
    base = bijection
    while isinstance(base, IndependentTransform):
        base = base.base_transform
    return None if isinstance(base, ComposeTransform) and not base.parts else bijection
