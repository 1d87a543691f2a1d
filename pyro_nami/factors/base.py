"""What every family has in common: from a site's prior to parameter shapes, and from parameters to a distribution.

To write a family, subclass `Family` and give three things: the counts and the layout in ``__init__``, `elements`
(parameters to densities of one element) and `initial` (parameters to start from). Then `register_family` names it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.constraints import Constraint

from pyro_nami.factors.bijections import detached_support, has_tensor_bounds, support_of
from pyro_nami.factors.elements import Elements
from pyro_nami.factors.factor import AutoregressiveFactor, Conditionals, Factor, SiteDistribution
from pyro_nami.factors.joint import JointFactor
from pyro_nami.factors.layout import Layout

__all__ = ["Family"]


class Family(ABC):
    """Parameter shapes of one site and the distribution they make; it holds numbers and functions, no parameters.

    Args:
        name: of the site, for messages.
        prior: the model's distribution at the site in the prototype run, ``(*batch, *event)``.
        value: the site's value there.

    Attributes:
        num_elements: E, how many elements the value has in sequence.
        num_params: k, raw parameters of an element; any real numbers.
        locations: which of these are locations, in units of the anchor.
        num_features: f, what the network reads of an element.
        has_rsample: whether draws are reparameterized.
        within: ``"autoregressive"`` or ``"independent"``: how the elements of a value depend on each other.
        takes_evidence: whether `elements` takes evidence (precision, precision-weighted mean) behind the parameters.
        varies: whether the support or a count depends on the call, so that `at` must be told the current prior.
        kind: families of one kind, unless it is None, make the same `elements` of the same parameters, so that the
            elements of several sites can be taken together. Subclasses do not inherit it.
        layout: of the value as elements.
    """

    num_params: int
    locations: Sequence[int] = ()
    num_features: int = 1
    has_rsample: bool = True
    within: str = "autoregressive"
    takes_evidence: bool = False
    varies: bool = False
    kind: Hashable = None
    layout: Layout

    def __init_subclass__(cls) -> None:
        if "kind" not in cls.__dict__:
            cls.kind = None

    def __init__(self, name: str, prior: Distribution, value: Tensor) -> None:
        self.name = name
        self.event_shape = torch.Size(prior.event_shape)
        self._set_support(support_of(prior), torch.Size(prior.batch_shape), value)

    @property
    def num_elements(self) -> int:
        return self.layout.num_elements

    @property
    def autoregressive(self) -> bool:
        """Whether elements are drawn in sequence: by `autoregressive_distribution` rather than `distribution`."""
        return self.num_elements > 1 and self.within == "autoregressive"

    def at(self, prior: Distribution) -> Family:
        """Returns this family with the support and counts of the current prior, whose parents are sampled by now.

        Itself where nothing varies. Without this call the prototype's are used.
        """
        return self._moved_to(prior) if self.varies else self

    def features(self, value: Tensor) -> Tensor:
        """Returns what the network reads of a site value ``(*batch, *event)``: finite numbers ``(*batch, E, f)``."""
        return self.element_features(self.layout.elements(value))

    def element_features(self, elements: Tensor) -> Tensor:
        """Returns the features ``(*batch, E, f)`` of elements ``(*batch, E, *element)``."""
        return finite(elements).unsqueeze(-1)

    def anchor(self, prior: Distribution) -> Tensor | None:
        """Returns what the factor is parameterized relative to, ``(*batch, E, a)``, or None for nothing.

        A prior of a type without a known location and scale gives None, which stands for (0, 1).
        """
        return None

    @abstractmethod
    def initial(self, value: Tensor, scale: float | Tensor, anchor: Tensor | None = None) -> Tensor:
        """Returns raw parameters at which the factor has this location and scale.

        Args:
            value: constrained location ``(*batch, *event)``; an event alone will do.
            scale: in unconstrained space, broadcastable with ``(*batch, E)``.
            anchor: as passed to `distribution`, ``(*batch, E, a)``.

        Returns:
            ``(*batch, E, k)``; ``(E, k)`` for an event alone.
        """

    @abstractmethod
    def elements(self, params: Tensor, anchor: Tensor | None = None) -> Elements:
        """Returns the densities of single elements, from ``(*batch, E, k)`` and ``(*batch, E, a)``."""

    def distribution(self, params: Tensor, anchor: Tensor | None = None) -> Factor:
        """Returns the site's distribution with independent elements.

        Args:
            params: raw parameters ``(*batch, E, k)``.
            anchor: ``(*batch, E, a)`` or None.

        Returns:
            batch shape ``batch`` (broadcast with the anchor's) and the site's event shape.
        """
        return Factor(self.elements(params, self._complete(anchor)), self.layout)

    def autoregressive_distribution(
        self, conditionals: Conditionals, anchor: Tensor | None = None, batch_shape: torch.Size = torch.Size()
    ) -> AutoregressiveFactor:
        """Returns the site's distribution with each element given the ones before.

        Args:
            conditionals: parameters of each element, from the network.
            anchor: ``(*batch, E, a)`` or None.
            batch_shape: of the distribution; broadcast with the anchor's.
        """
        anchor = self._complete(anchor)
        if anchor is not None:
            batch_shape = torch.broadcast_shapes(batch_shape, anchor.shape[:-2])
        if self.layout.batch_shape:
            batch_shape = torch.broadcast_shapes(batch_shape, self.layout.batch_shape)
        return AutoregressiveFactor(
            conditionals,
            self.elements,
            self.element_features,
            self.layout,
            anchor=anchor,
            batch_shape=batch_shape,
            has_rsample=self.has_rsample,
        )

    def coupled_distribution(
        self, params: Tensor, anchor: Tensor | None, coupling: Tensor, dims: Sequence[int], sizes: Sequence[int]
    ) -> SiteDistribution:
        """Returns the site's distribution with linear dependencies between all elements, if the family has one."""
        raise NotImplementedError

    def joint_distribution(
        self,
        conditionals: Conditionals,
        anchor: Tensor | None,
        batch_shape: torch.Size,
        dims: Sequence[int],
        sizes: Sequence[int],
    ) -> JointFactor:
        """Returns the site's distribution with the instances of some plates drawn in sequence as well.

        Args:
            conditionals: parameters of each element of the sequence over all instances.
            anchor: ``(*batch, E, a)`` or None.
            batch_shape: of the distribution, these plates included.
            dims: negative batch dims of the plates.
            sizes: of the plates.
        """
        return JointFactor(
            conditionals,
            self.elements,
            self.element_features,
            self.layout,
            anchor=self._complete(anchor),
            batch_shape=batch_shape,
            has_rsample=self.has_rsample,
            dims=dims,
            sizes=sizes,
        )

    def _complete(self, anchor: Tensor | None) -> Tensor | None:
        """Returns the anchor, or the one to use where none is given."""
        return anchor

    def _make_layout(self, support: Constraint, batch_shape: torch.Size, value: Tensor) -> Layout:
        """Returns the layout of values on this support, whose bounds vary over `batch_shape`."""
        raise NotImplementedError

    def _set_support(self, support: Constraint, batch_shape: torch.Size, value: Tensor) -> None:
        moving = has_tensor_bounds(support)
        self.varies = self.varies or moving
        self._example = value.detach()[(0,) * (value.dim() - len(self.event_shape))].clone() if moving else None
        self.layout = self._make_layout(detached_support(support), batch_shape if moving else torch.Size(), value)

    def _moved_to(self, prior: Distribution) -> Family:
        moved = copy.copy(self)
        if self._example is not None:
            moved.layout = self._make_layout(support_of(prior), torch.Size(prior.batch_shape), self._example)
        return moved


def finite(tensor: Tensor) -> Tensor:
    """Returns `tensor` with NaN as 0 and infinities at the logarithms of the dtype's extremes (about +-88)."""
    return tensor.nan_to_num(nan=0.0, posinf=88.0, neginf=-88.0)
