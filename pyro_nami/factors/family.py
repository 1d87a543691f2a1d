"""`Family`: from a site's prior to the shapes of parameters, and from parameters to a distribution."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.factors.bijections import detached_support, has_tensor_bounds, support_of
from pyro_nami.factors.distribution import SiteDistribution
from pyro_nami.factors.elements import Elements, LatestDraw, draw_elements
from pyro_nami.factors.joint import to_instances, to_sequence
from pyro_nami.factors.layout import Layout, UnconstrainedLayout

__all__ = ["Family", "SequentialElements"]


class Family(ABC):
    """The kind of distribution at one site: how many raw parameters an element has, and which density they make.

    An element is one number of the site's value in unconstrained space: a positive latent is given by its logarithm,
    and a vector has several elements. A family holds numbers and functions; networks hold the parameters.

    To add one:

    - subclass `Family`, or a similar family, and set ``num_params`` and every other attribute that differs;
    - write `elements`, which makes the distribution of one element from raw parameters, and `initial`, which returns
      the parameters to start from;
    - name it: ``register_family("name", YourFamily)``, or give it as ``families={"site": YourFamily}``.

    Args:
        name: of the site, for messages.
        prior, value: the model's distribution and value at the site in the prototype run, ``(*batch, *event)``.

    Attributes:
        coupling: how elements that depend on each other are drawn: in ``"sequence"``, each given those before it;
            at once, their noise coupled by a ``"linear"`` map (see `coupled_distribution`); or they never depend on
            each other (``"none"``). Subclasses do not inherit it.
        varies: whether the support or a count differs from call to call, so that `at` is given the current prior.
        alike: names of attributes. Two families of one type that agree in these make the same `elements` from the same
            parameters, so the elements of several sites can be computed together. Subclasses do not inherit it.
        layout: how the value is divided into elements, of type ``layout_type``.

    Example:
        >>> class Laplace(Family):
        ...     num_params = 2
        ...     def initial(self, value, scale, anchor=None):
        ...         loc = self.layout.elements(value)
        ...         return torch.stack((loc, torch.as_tensor(scale).log().expand(loc.shape)), -1)
        ...     def elements(self, params, anchor=None):
        ...         return torch.distributions.Laplace(params[..., 0], params[..., 1].exp())
        >>> family = Laplace("z", torch.distributions.Normal(0.0, 1.0), torch.tensor(3.0))
        >>> family.distribution(family.initial(torch.tensor(3.0), 1.0)).log_prob(torch.tensor(3.0)).exp()
        tensor(0.5000)
    """

    num_params: int  # k, raw parameters of an element; any real numbers
    locations: Sequence[int] = ()  # which of these are locations, in units of the anchor
    has_rsample: bool = True  # whether draws are reparameterized
    coupling: str = "sequence"
    # whether `elements` takes (precision, precision-weighted mean) behind the parameters
    takes_evidence: bool = False
    # transforms and bins of the splines that couple several elements; see `parameters.spline_stack`
    stack: tuple[int, int] | None = None
    varies: bool = False
    alike: Sequence[str] | None = None
    layout_type: Callable[..., Layout] = UnconstrainedLayout

    def __init_subclass__(cls) -> None:
        if "alike" not in cls.__dict__:
            cls.alike = None
        if "coupling" not in cls.__dict__:
            cls.coupling = "sequence"

    def __init__(self, name: str, prior: Distribution, value: Tensor) -> None:
        self.name = name
        support = support_of(prior)
        moving = has_tensor_bounds(support)
        self.varies = self.varies or moving
        batch_shape = torch.Size(prior.batch_shape) if moving else torch.Size()
        self.layout = self.layout_type(
            detached_support(support), prior.event_shape, batch_shape=batch_shape
        )

    @property
    def num_elements(self) -> int:
        """E, how many elements the value has."""
        return self.layout.num_elements

    @property
    def num_features(self) -> int:
        """f, how many numbers the network reads of an element."""
        return self.layout.num_features

    def at(self, prior: Distribution) -> Family:
        """Returns this family with the support and counts of the current prior, in place of the prototype's."""
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
    def elements(self, params: Tensor, anchor: Tensor | None = None) -> Distribution:
        """Returns a distribution of batch shape ``(*batch, E)``, from ``(*batch, E, k)`` and ``(*batch, E, a)``."""

    def distribution(self, params: Tensor, anchor: Tensor | None = None) -> SiteDistribution:
        """Returns the site's distribution with independent elements, from ``(*batch, E, k)`` and ``(*batch, E, a)``."""
        return SiteDistribution(self.elements(params, self._or_default(anchor)), self.layout)

    def autoregressive_distribution(
        self,
        conditionals: Any,
        anchor: Tensor | None = None,
        batch_shape: torch.Size = torch.Size(),
        dims: Sequence[int] = (),
        sizes: Sequence[int] = (),
    ) -> SiteDistribution:
        """Returns the site's distribution with each element given the ones before; see `SequentialElements`."""
        anchor = self._or_default(anchor)
        shapes = () if anchor is None else (anchor.shape[:-2],)
        batch_shape = torch.broadcast_shapes(batch_shape, self.layout.batch_shape, *shapes)
        elements = SequentialElements(self, conditionals, anchor, batch_shape, dims, sizes)
        return SiteDistribution(elements, self.layout)

    def coupled_distribution(
        self, params: Tensor, anchor: Tensor | None, coupling: Any
    ) -> SiteDistribution:
        """Returns the site's distribution with elements made of noise that a `Coupling` couples, if it can have one."""
        raise NotImplementedError

    def _or_default(self, anchor: Tensor | None) -> Tensor | None:
        """Returns the anchor, or what stands for one that is not given."""
        return anchor


class SequentialElements(Elements):
    """q(elements) = prod q(e_i | e_1 ... e_(i-1)), the sequence running over all instances of some plates, too.

    Args:
        family: of the elements, and of what the network reads of them.
        conditionals: the network's side, with size 1 in the dims ``dims``, immutable. Its method ``first`` gives the
            parameters ``(*batch, k)`` of element 0 and a function from features ``(*batch, f)`` of the element just
            drawn to parameters of the next and another such function; ``all`` takes all features ``(*batch, E, f)`` to
            parameters ``(*batch, E, k)``, in one dense pass.
        anchor: ``(*batch, E, a)`` or None, instance by instance.
        batch_shape: the plates ``dims`` included.
        dims, sizes: of the plates whose instances are drawn in sequence; negative batch dims.

    Example:
        >>> from types import SimpleNamespace
        >>> from pyro_nami.factors.unconstrained import NormalFamily
        >>> z = torch.tensor([1.0, 2.0])
        >>> family = NormalFamily("z", torch.distributions.Independent(torch.distributions.Normal(z, 1.0), 1), z)
        >>> walk = SimpleNamespace(all=lambda x: torch.tensor([[0.0, 0.5413], [x[0, 0], 0.5413]]))  # scales 1
        >>> SequentialElements(family, walk, None, torch.Size(), (), ()).log_prob(z)  # N(1; 0, 1) and N(2; 1, 1)
        tensor([-1.4189, -1.4189])
    """

    def __init__(
        self,
        family: Family,
        conditionals: Any,
        anchor: Tensor | None,
        batch_shape: torch.Size,
        dims: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        self._family = family
        self._conditionals = conditionals
        self._anchor = anchor
        self.has_rsample = family.has_rsample
        self._dims = dims
        self._sizes = sizes
        self._latest = LatestDraw()
        super().__init__(batch_shape + (family.num_elements,), validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        (params,) = self._latest.recall(value) or (None,)
        if params is None:
            features = to_sequence(self._family.element_features(value), self._dims, 1)
            params = to_instances(self._conditionals.all(features), self._dims, self._sizes, 1)
        return self._family.elements(params, self._anchor).log_prob(value)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = self._extended_shape(sample_shape)
        anchor, (*batch, count) = self._anchor, shape
        if anchor is not None and self._dims:
            anchor = anchor.expand(self.batch_shape + anchor.shape[-1:])
            anchor = to_sequence(anchor, self._dims, 1)
        for dim in self._dims:
            batch[dim] = 1
        elements, params = self._draw_sequence(
            torch.Size(batch), count * math.prod(self._sizes), anchor
        )
        x = to_instances(elements, self._dims, self._sizes, elements.dim() - len(shape))
        self._latest.keep(x, to_instances(params, self._dims, self._sizes, 1))
        return x

    # Of discrete elements too parameters keep their gradients, for the score.
    sample = rsample

    def _draw_sequence(
        self, shape: torch.Size, count: int, anchor: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns ``count`` elements, drawn one by one, ``(*shape, count, *element)``, and their parameters."""
        params, advance = self._conditionals.first()
        all_params, elements = [params], []
        for index in range(count):
            here = None if anchor is None else anchor[..., index : index + 1, :]
            element = draw_elements(self._family.elements(params.unsqueeze(-2), here), shape + (1,))
            elements.append(element)
            if index + 1 < count:
                params, advance = advance(self._family.element_features(element).squeeze(-2))
                all_params.append(params)
        return torch.cat(elements, len(shape)), torch.stack(
            torch.broadcast_tensors(*all_params), -2
        )
