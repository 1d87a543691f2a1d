"""What every family has in common: from a site's prior to parameter shapes, and from parameters to a distribution."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.factors.bijections import detached_support, has_tensor_bounds, support_of
from pyro_nami.factors.distribution import SiteDistribution
from pyro_nami.factors.elements import Elements
from pyro_nami.factors.layout import Layout, UnconstrainedLayout
from pyro_nami.factors.sequential import Conditionals, SequentialElements

__all__ = ["Family"]


class Family(ABC):
    """Parameter shapes of one site and the distribution they make; it holds numbers and functions, no parameters.

    To add one:

    - subclass `Family`, or one that comes near, with ``num_params`` (and what else of the attributes differs);
    - write `elements`, from raw parameters to densities of one element, and `initial`, to parameters to start from;
    - name it: ``register_family("name", YourFamily)``, or give it as ``families={"site": YourFamily}``.

    Args:
        name: of the site, for messages.
        prior: the model's distribution at the site in the prototype run, ``(*batch, *event)``.
        value: the site's value there.

    Attributes:
        num_params: k, raw parameters of an element; any real numbers.
        locations: which of these are locations, in units of the anchor.
        num_features: f, what the network reads of an element.
        has_rsample: whether draws are reparameterized.
        within: ``"autoregressive"`` or ``"independent"``: how the elements of a value depend on each other.
        takes_evidence: whether `elements` takes evidence (precision, precision-weighted mean) behind the parameters.
        varies: whether the support or a count depends on the call, so that `at` must be told the current prior.
        kind: families of one kind, unless it is None, make the same `elements` of the same parameters, so that the
            elements of several sites can be taken together. Subclasses do not inherit it.
        default_anchor: what stands for an anchor that is not given.
        layout: of the value as elements, of type ``layout_type``.
    """

    num_params: int
    locations: Sequence[int] = ()
    num_features: int = 1
    has_rsample: bool = True
    within: str = "autoregressive"
    takes_evidence: bool = False
    varies: bool = False
    kind: Hashable = None
    default_anchor: Tensor | None = None
    layout_type: Callable[..., Layout] = UnconstrainedLayout

    def __init_subclass__(cls) -> None:
        if "kind" not in cls.__dict__:
            cls.kind = None

    def __init__(self, name: str, prior: Distribution, value: Tensor) -> None:
        self.name, self.event_shape = name, torch.Size(prior.event_shape)
        support = support_of(prior)
        moving = has_tensor_bounds(support)
        self.varies = self.varies or moving
        batch_shape = torch.Size(prior.batch_shape) if moving else torch.Size()
        self.layout = self.layout_type(detached_support(support), self.event_shape, value, batch_shape=batch_shape)

    @property
    def num_elements(self) -> int:
        """E, how many elements the value has in sequence."""
        return self.layout.num_elements

    @property
    def autoregressive(self) -> bool:
        """Whether elements are drawn in sequence: by `autoregressive_distribution` rather than `distribution`."""
        return self.num_elements > 1 and self.within == "autoregressive"

    def at(self, prior: Distribution) -> Family:
        """Returns this family with the support and counts of the current prior, whose parents are sampled by now.

        Itself where nothing varies. Without this call the prototype's are used.
        """
        if not self.varies:
            return self
        moved = copy.copy(self)
        support = support_of(prior)
        if has_tensor_bounds(support):
            moved.layout = self.layout.at(support, torch.Size(prior.batch_shape))
        return moved

    def features(self, value: Tensor) -> Tensor:
        """Returns what the network reads of a site value ``(*batch, *event)``: finite numbers ``(*batch, E, f)``."""
        return self.element_features(self.layout.elements(value))

    def element_features(self, elements: Tensor) -> Tensor:
        """Returns the features ``(*batch, E, f)`` of elements ``(*batch, E, *element)``."""
        return self.layout.element_features(elements)

    def anchor(self, prior: Distribution) -> Tensor | None:
        """Returns what the factor is parameterized relative to, ``(*batch, E, a)``, or None for nothing."""
        return None

    @abstractmethod
    def initial(self, value: Tensor, scale: float | Tensor, anchor: Tensor | None = None) -> Tensor:
        """Returns raw parameters ``(*batch, E, k)`` at which the factor has this location and scale.

        Args:
            value: constrained location ``(*batch, *event)``; an event alone will do.
            scale: in unconstrained space, broadcastable with ``(*batch, E)``.
            anchor: as passed to `distribution`, ``(*batch, E, a)``.
        """

    @abstractmethod
    def elements(self, params: Tensor, anchor: Tensor | None = None) -> Elements:
        """Returns the densities of single elements, from ``(*batch, E, k)`` and ``(*batch, E, a)``."""

    def distribution(self, params: Tensor, anchor: Tensor | None = None) -> SiteDistribution:
        """Returns the site's distribution with independent elements, from ``(*batch, E, k)`` and ``(*batch, E, a)``."""
        return SiteDistribution(self.elements(params, self._or_default(anchor)), self.layout)

    def autoregressive_distribution(
        self,
        conditionals: Conditionals,
        anchor: Tensor | None = None,
        batch_shape: torch.Size = torch.Size(),
        dims: Sequence[int] = (),
        sizes: Sequence[int] = (),
    ) -> SiteDistribution:
        """Returns the site's distribution with each element given the ones before; see `SequentialElements`.

        Its batch shape is ``batch_shape``, broadcast with the anchor's.
        """
        anchor = self._or_default(anchor)
        shapes = () if anchor is None else (anchor.shape[:-2],)
        elements = SequentialElements(
            conditionals,
            self.elements,
            self.element_features,
            anchor,
            shape=torch.broadcast_shapes(batch_shape, self.layout.batch_shape, *shapes) + (self.num_elements,),
            has_rsample=self.has_rsample,
            dims=dims,
            sizes=sizes,
        )
        return SiteDistribution(elements, self.layout)

    def coupled_distribution(
        self, params: Tensor, anchor: Tensor | None, coupling: Tensor, dims: Sequence[int], sizes: Sequence[int]
    ) -> SiteDistribution:
        """Returns the site's distribution with linear dependencies between all elements, if the family has one."""
        raise NotImplementedError

    def _or_default(self, anchor: Tensor | None) -> Tensor | None:
        return self.default_anchor if anchor is None else anchor
