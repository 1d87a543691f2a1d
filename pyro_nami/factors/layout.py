"""How the value of a site is laid out as a sequence of E elements, and which features a network reads of each."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from pyro.distributions import constraints
from torch import Tensor
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import ComposeTransform
from torch.nn.functional import one_hot

from pyro_nami.factors.bijections import (
    bijection_to,
    interior,
    peel_support,
    peel_transform,
    support_on,
)

__all__ = ["Layout", "NormalLayout", "ObservedLayout", "UnconstrainedLayout"]


_INDICATORS = type(constraints.boolean), type(constraints.one_hot)


class Layout:
    """A one-to-one map between values ``(*batch, *event)`` and elements ``(*batch, E, *element)``: its own entries.

    Args:
        support: of the value.
        event_shape: of the value.
        element_ndims: dims of one element: 0, or 1 for vectors that are one element.
        batch_shape: over which the support's bounds vary, ``()`` for a fixed support.
        num_classes: where the entries are classes.
        dtype: of features of discrete values.

    Example:
        >>> count = Layout(constraints.nonnegative_integer, torch.Size(), dtype=torch.float32)
        >>> count.features(torch.tensor([0.0, 3.0]))  # 0 and log(4)
        tensor([[[0.0000]],
                [[1.3863]]])
    """

    def __init__(
        self,
        support: Constraint,
        event_shape: torch.Size,
        *,
        element_ndims: int = 0,
        batch_shape: torch.Size = torch.Size(),
        num_classes: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.event_shape = torch.Size(event_shape)
        self.num_classes = num_classes
        self.dtype = dtype
        self._set_support(support, batch_shape)
        cut = len(event_shape) - element_ndims
        self.num_elements, self.element_shape = math.prod(event_shape[:cut]), self.event_shape[cut:]
        entries = self.element_shape[0] if element_ndims else 1
        # f, read of an element
        self.num_features = num_classes or max(entries - (not self.support.is_discrete), 1)
        self.marks_nan = False  # whether one of these says that it is NaN

    @property
    def is_indicator(self) -> bool:
        """Whether values are binary or one-hot."""
        # by type, as a copied guide has a copy of its supports
        return isinstance(peel_support(self.support)[0], _INDICATORS)

    def at(self, support: Constraint, batch_shape: torch.Size) -> Layout:
        """Returns this layout on a support of the same kind whose bounds vary over ``batch_shape``."""
        moved = copy.copy(self)
        moved._set_support(support, batch_shape)
        return moved

    def value(self, elements: Tensor) -> Tensor:
        """Returns the value ``(*batch, *event)`` of elements ``(*batch, E, *element)``."""
        batch = elements.shape[: elements.dim() - 1 - len(self.element_shape)]
        return elements.reshape(batch + self.event_shape)

    def elements(self, value: Tensor) -> Tensor:
        """Returns the elements ``(*batch, E, *element)`` of a value ``(*batch, *event)``, moved off the boundary."""
        batch = value.shape[: value.dim() - len(self.event_shape)]
        return interior(self.support, value).reshape(
            batch + (self.num_elements,) + self.element_shape
        )

    def log_abs_det(self, elements: Tensor, value: Tensor) -> Tensor | None:
        """Returns the log Jacobian determinant of `value` ``(*batch,)``; None where it is zero."""
        return None

    def features(self, value: Tensor) -> Tensor:
        """Returns what a network reads of a value ``(*batch, *event)``, ``(*batch, E, f)``."""
        return self.element_features(self.elements(value))

    def element_features(self, elements: Tensor) -> Tensor:
        """Returns what a network reads of elements: finite numbers ``(*batch, E, f)``.

        Classes are read as their one-hot code, counts x as sign(x) log(1 + abs(x)), other discrete values as they are,
        continuous ones by their unconstrained coordinates.
        """
        support, _ = peel_support(self.support)
        if self.num_classes is not None:
            return one_hot(elements.long(), self.num_classes).to(self.dtype)
        if not support.is_discrete:
            elements = bijection_to(support).inv(interior(support, elements))
        else:
            elements = elements.to(self.dtype)
            if not self.is_indicator:
                elements = elements.sign() * elements.abs().log1p()
        return _finite(elements if self.element_shape else elements.unsqueeze(-1))

    def _set_support(self, support: Constraint, batch_shape: torch.Size) -> None:
        self.support = support_on(support, len(self.event_shape))
        self.batch_shape = torch.Size(batch_shape)


class UnconstrainedLayout(Layout):
    """The scalars of the value's unconstrained space, by `bijection_to` of its support.

    Example:
        >>> support = torch.distributions.constraints.simplex
        >>> layout = UnconstrainedLayout(support, torch.Size([3]))
        >>> layout.num_elements, layout.value(torch.zeros(2))
        (2, tensor([0.3333, 0.3333, 0.3333]))
    """

    of_normal = False  # whether intervals are the CDF of Normal elements

    def __init__(self, support: Constraint, event_shape: torch.Size, **options: Any) -> None:
        super().__init__(support, event_shape, **options)
        self.free_shape = self.event_shape
        if self.bijection is not None:
            # with the batch shape, which a transform may have itself
            free = self.bijection.inverse_shape(self.batch_shape + self.event_shape)
            self.free_shape = torch.Size(free[len(self.batch_shape) :])
        self.num_elements = math.prod(self.free_shape)

    def value(self, elements: Tensor) -> Tensor:
        free = self._free(elements)
        return free if self.bijection is None else interior(self.support, self.bijection(free))

    def elements(self, value: Tensor) -> Tensor:
        if self.bijection is not None:
            value = self.bijection.inv(interior(self.support, value))
        if not self.free_shape:
            return value.unsqueeze(-1)
        return value.flatten(-len(self.free_shape))  # whatever its size, which another check names

    def log_abs_det(self, elements: Tensor, value: Tensor) -> Tensor | None:
        if self.bijection is None:
            return None
        log_abs_det = self.bijection.log_abs_det_jacobian(self._free(elements), value)
        extra = log_abs_det.dim() - (value.dim() - len(self.event_shape))
        return log_abs_det.flatten(-extra).sum(-1) if extra > 0 else log_abs_det

    def element_features(self, elements: Tensor) -> Tensor:
        return _finite(elements).unsqueeze(-1)

    def _set_support(self, support: Constraint, batch_shape: torch.Size) -> None:
        super()._set_support(support, batch_shape)
        bijection = bijection_to(self.support, self.of_normal)
        base = peel_transform(bijection)
        identity = isinstance(base, ComposeTransform) and not base.parts
        self.bijection = None if identity else bijection

    def _free(self, elements: Tensor) -> Tensor:
        return elements.reshape(elements.shape[:-1] + self.free_shape)


class NormalLayout(UnconstrainedLayout):
    """Unconstrained space where uniform variables are Normal, so that what is made of Normals has little to bend."""

    of_normal = True


class ObservedLayout(UnconstrainedLayout):
    """The layout of an observed value of any dtype; NaN is read as 0, and marked by a second feature if so wanted.

    Example:
        >>> y = torch.tensor([2.0, torch.nan])
        >>> ObservedLayout(constraints.real, torch.Size(), dtype=y.dtype, marks_nan=True).features(y)
        tensor([[[2., 0.]],
                [[0., 1.]]])
    """

    def __init__(self, *args: Any, dtype: torch.dtype, marks_nan: bool) -> None:
        super().__init__(*args)
        self.dtype = dtype
        self.marks_nan = marks_nan
        self.num_features = 1 + marks_nan

    def elements(self, value: Tensor) -> Tensor:
        return super().elements(value.to(self.dtype))

    def element_features(self, elements: Tensor) -> Tensor:
        features = super().element_features(elements)
        if not self.marks_nan:
            return features
        return torch.cat((features, elements.isnan().to(features).unsqueeze(-1)), -1)


def _finite(tensor: Tensor) -> Tensor:
    """Returns `tensor` with NaN as 0 and infinities at the logarithms of the dtype's extremes (about +-88)."""
    return tensor.nan_to_num(nan=0.0, posinf=88.0, neginf=-88.0)
