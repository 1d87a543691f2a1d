"""Families whose elements live in unconstrained space: Normal, sinh-arcsinh, mixture, flow, relaxed.

All but the relaxed one are of location and scale. They share the anchor, and start at the initial
value and scale, as ``AutoNormal`` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.factors.anchors import location_and_scale
from pyro_nami.factors.bijections import is_interval
from pyro_nami.factors.distribution import SiteDistribution
from pyro_nami.factors.elements import LogisticElements
from pyro_nami.factors.family import Family
from pyro_nami.factors.knots import NeuralSpline
from pyro_nami.factors.layout import NormalLayout
from pyro_nami.factors.links import raw_scale, relative_scale
from pyro_nami.factors.normals import (
    Coupling,
    MixtureElements,
    NormalElements,
    SinhArcsinh,
)

__all__ = [
    "BUILT_IN",
    "CorrectionFamily",
    "FlowFamily",
    "MixtureFamily",
    "NormalFamily",
    "RelaxedFamily",
    "SinhArcsinhFamily",
    "flow",
    "mixture",
    "relaxed",
]


class NormalFamily(Family):
    """z = T(loc + scale e): a Normal pushed through T, `bijection_to` of the support. Parameters: location, raw scale.

    Subclasses bend it by ``bend``: their parameters are these two, then the bend's, which are zero at `initial`.

    Attributes:
        noise_scale: standard deviation of e; above 1 where held-out simulations say that the factor is too narrow.

    Example:
        >>> prior = torch.distributions.LogNormal(torch.tensor(0.0), torch.tensor(1.0))
        >>> family = NormalFamily("z", prior, torch.tensor(1.0))
        >>> family.distribution(torch.zeros(5, 1, 2)).rsample().shape
        torch.Size([5])
    """

    bend: Callable[[Tensor], Any] | None = None
    num_params = 2
    locations: Sequence[int] = (0,)
    takes_evidence = True
    coupling = "linear"
    noise_scale: float = 1.0
    alike: Sequence[str] = ("noise_scale",)

    def anchor(self, prior: Distribution) -> Tensor | None:
        moments = location_and_scale(prior)
        if moments is None:
            return None
        return moments.reshape(torch.Size(prior.batch_shape) + (self.num_elements, 2))

    def initial(self, value: Tensor, scale: float | Tensor, anchor: Tensor | None = None) -> Tensor:
        location = self.features(value).squeeze(-1)
        relative = torch.as_tensor(scale, dtype=location.dtype, device=location.device)
        if anchor is not None:
            prior_loc, prior_scale = anchor.detach().unbind(-1)
            location = (location - prior_loc) / prior_scale
            relative = relative / prior_scale
        params = torch.stack(torch.broadcast_tensors(location, raw_scale(relative)), -1)
        return F.pad(params, (0, self.num_params - 2))

    def elements(self, params: Tensor, anchor: Tensor | None = None) -> Distribution:
        own = self._split(params)
        return NormalElements(*own, anchor, bend=self.bend, noise_scale=self.noise_scale)

    def coupled_distribution(
        self, params: Tensor, anchor: Tensor | None, coupling: Coupling
    ) -> SiteDistribution:
        own = self._split(params)
        elements = NormalElements(*own, anchor, coupling, self.bend, self.noise_scale)
        return SiteDistribution(elements, self.layout)

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns own parameters, and the evidence behind them if there is any."""
        own, evidence = params.tensor_split([self.num_params], -1)
        return own, evidence if evidence.shape[-1] else None


class MixtureFamily(NormalFamily):
    """A mixture of Normals in unconstrained space. Parameters: K logits, K locations, K raw scales.

    At `initial` mean and sd are the given ones; components lie side by side, as equal ones would stay equal.

    Example:
        >>> family = mixture(2)("z", torch.distributions.Normal(0.0, 1.0), torch.tensor(3.0))
        >>> family.initial(torch.tensor(3.0), 1.0)[..., 2:4].mean().round()  # of the two locations
        tensor(3.)
    """

    takes_evidence = False
    alike = ()

    def __init__(
        self, name: str, prior: Distribution, value: Tensor, *, components: int = 3
    ) -> None:
        self.components = components
        self.num_params = 3 * components
        self.locations = range(components, 2 * components)
        super().__init__(name, prior, value)

    def initial(self, value: Tensor, scale: float | Tensor, anchor: Tensor | None = None) -> Tensor:
        location, raw = super().initial(value, scale, anchor)[..., :2].split(1, -1)
        relative = relative_scale(raw)
        offset, within = torch.zeros_like(location), relative
        if self.components > 1:
            # Half of the variance lies between the components, half within.
            offset = torch.linspace(-1, 1, self.components).to(location)
            offset, within = offset / offset.square().mean().mul(2).sqrt(), relative * 0.5**0.5
        locations = location + relative * offset
        return torch.cat(
            [torch.zeros_like(locations), locations, raw_scale(within).expand_as(locations)], -1
        )

    def elements(self, params: Tensor, anchor: Tensor | None = None) -> Distribution:
        return MixtureElements(params, anchor)


class FlowFamily(NormalFamily):
    """A monotone rational-quadratic spline under location and scale. Parameters: these two, then the spline's.

    With further ``transforms`` the elements of a vector, if there are several, depend on each other by these, in place
    of each reading those before it; see `parameters.spline_stack`. Numbers within bounds are then a Normal variable's
    CDF, by which uniform ones need no bends, up to their edges, where without it logits start as ``AutoNormal``'s.
    """

    bend = NeuralSpline
    alike = ("noise_scale",)

    def __init__(
        self, name: str, prior: Distribution, value: Tensor, *, bins: int = 8, transforms: int = 0
    ) -> None:
        self.num_params = 2 + 3 * bins - 1
        if transforms:
            self.stack, self.layout_type = (transforms, bins), NormalLayout
        super().__init__(name, prior, value)

    def anchor(self, prior: Distribution) -> Tensor | None:
        of_logit = self.stack is not None and is_interval(self.layout.support)
        return None if of_logit else super().anchor(prior)


class SinhArcsinhFamily(NormalFamily):
    """A Normal with two tails of their own weight. Parameters: location, raw scale, left, right.

    The default for a scale and other single bounded numbers, as the posterior of a logarithm is skewed.
    """

    bend = SinhArcsinh
    num_params = 4
    alike = ("noise_scale",)


class CorrectionFamily(SinhArcsinhFamily):
    """A correction of a standard Normal variable, none at first. Parameters: as of `SinhArcsinhFamily`."""

    locations = ()
    takes_evidence = False
    coupling = "none"
    alike = ("noise_scale",)

    def anchor(self, prior: Distribution) -> None:
        return None

    def initial(self, value: Tensor, scale: float | Tensor, anchor: Tensor | None = None) -> Tensor:
        unit = raw_scale(torch.ones_like(self.layout.elements(value)))
        return F.pad(unit.unsqueeze(-1), (1, self.num_params - 2))


class RelaxedFamily(Family):
    """x = (logit + logistic noise) / temperature, in unconstrained space. Parameter: the logit.

    On the unit interval that is a relaxed Bernoulli; on the real line, a relaxed Bernoulli's logit. `initial` has the
    location at the value; the scale is the inverse temperature. The network reads the relaxed value, as -1 to 1.

    References:
        Maddison, Mnih and Teh 2017, The Concrete Distribution, appendix C.3.

    Example:
        >>> family = relaxed(0.5)("z", torch.distributions.Uniform(0.0, 1.0), torch.tensor(0.5))
        >>> family.features(torch.tensor(0.5)), family.distribution(torch.zeros(1, 1)).support
        (tensor([[0.]]), Interval(lower_bound=0.0, upper_bound=1.0))
    """

    num_params = 1
    alike = ("temperature",)

    def __init__(
        self, name: str, prior: Distribution, value: Tensor, *, temperature: float = 2 / 3
    ) -> None:
        self.temperature = temperature
        super().__init__(name, prior, value)

    def initial(self, value: Tensor, scale: float | Tensor, anchor: Tensor | None = None) -> Tensor:
        return self.layout.features(value) * self.temperature

    def elements(self, params: Tensor, anchor: Tensor | None = None) -> Distribution:
        return LogisticElements(params.squeeze(-1), params.new_tensor(self.temperature))

    def element_features(self, elements: Tensor) -> Tensor:
        return (2 * elements.sigmoid() - 1).unsqueeze(-1)


def relaxed(temperature: float) -> Callable[[str, Distribution, Tensor], Family]:
    """Returns the family of relaxed Bernoulli variables at this temperature, for ``families={"z": relaxed(2 / 3)}``.

    Raises ValueError for one that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"Expected a positive temperature; got {temperature}")
    return functools.partial(RelaxedFamily, temperature=temperature)


def mixture(components: int) -> Callable[[str, Distribution, Tensor], Family]:
    """Returns the family of mixtures with this many Normals, for ``families={"z": mixture(5)}``.

    Raises ValueError for fewer than one.
    """
    if components < 1:
        raise ValueError(f"Expected at least 1 component; got {components}")
    return functools.partial(MixtureFamily, components=components)


def flow(bins: int, transforms: int = 0) -> Callable[[str, Distribution, Tensor], Family]:
    """Returns the family of splines with this many bins, for ``families={"z": flow(16)}``.

    By default an element of a vector reads the elements before it. With ``transforms``, noise goes through that many
    autoregressive splines, which read the vector from alternating ends, and then through a spline for each element;
    a draw takes as many more steps. Numbers within bounds are then the CDF of Normal numbers, not a logistic function.

    Raises ValueError for fewer than two bins, or fewer than no transforms.
    """
    if bins < 2:
        raise ValueError(f"Expected at least 2 bins; got {bins}")
    if transforms < 0:
        raise ValueError(f"Expected no or more transforms; got {transforms}")
    return functools.partial(FlowFamily, bins=bins, transforms=transforms)


BUILT_IN = {
    "normal": NormalFamily,
    "sinh_arcsinh": SinhArcsinhFamily,
    "mixture": MixtureFamily,
    "flow": FlowFamily,
}
