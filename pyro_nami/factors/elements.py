"""One-element distributions, batched: what a factor draws and scores, element by element.

An `Elements` object has batch ``(*batch, E)``; its elements are scalars (or vectors for simplex-like types). `Factor`
and `AutoregressiveFactor` are both built on it, so a new family needs nothing else. Location-scale types live in
unconstrained space and take an anchor ``(*batch, E, 2)`` of a prior location m and scale t there:
location = m + t a, scale = t softplus(s), with (a, s) from the network. Those of relaxed types are in `relaxed`. Change
this module to add a density.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.special import ndtr

from pyro_nami.factors.bijections import interior, support_of

__all__ = [
    "Elements",
    "FlowElements",
    "MixtureElements",
    "NormalElements",
    "OwnElements",
    "SinhArcsinhElements",
    "log_positive",
    "positive",
    "raw_positive",
    "raw_scale",
    "relative_scale",
]

_RANGE = 40.0
_TAIL_RANGE = 8.0  # raw parameters of tails move them less than that of the scale moves it, which training needs first
_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


def log_positive(raw: Tensor) -> Tensor:
    """Returns the logarithm of `positive`: `raw` clamped to [-40, 40], where squares are finite."""
    return raw.clamp(-_RANGE, _RANGE)


def positive(raw: Tensor) -> Tensor:
    """Returns the positive number that a raw parameter stands for: ``exp(raw)``, finite for every finite `raw`."""
    return log_positive(raw).exp()


def raw_positive(value: Tensor) -> Tensor:
    """Returns the raw parameter at which `positive` is `value`."""
    return log_positive(value.log())


def relative_scale(raw: Tensor) -> Tensor:
    """Returns the scale that a raw parameter of a location-scale type stands for: softplus, at least 4e-18.

    It is exponential where the factor is narrow and linear where it is wide: an exponential throughout lets a wide
    factor grow without bound through the values that it is given, and training then diverges now and then.
    """
    return softplus(raw.clamp(min=-_RANGE))


def raw_scale(scale: Tensor) -> Tensor:
    """Returns the raw parameter at which `relative_scale` is ``scale``."""
    return torch.where(scale > _RANGE / 2, scale, scale.clamp(max=_RANGE / 2).expm1().log()).clamp(min=-_RANGE)


class Elements(ABC):
    """A batch of distributions of one element.

    Attributes:
        shape: ``(*batch, E)``.
        has_rsample: whether `draw` is reparameterized.
        has_enumerate_support: whether the values can be listed.
    """

    shape: torch.Size
    has_rsample: bool = True
    has_enumerate_support: bool = False

    @abstractmethod
    def draw(self, shape: torch.Size) -> Tensor:
        """Returns a draw of ``shape + element shape``; `shape` is broadcastable from `self.shape`."""

    @abstractmethod
    def log_prob(self, x: Tensor) -> Tensor:
        """Returns log densities in nats, one per element: ``(*batch, E)``."""

    def enumerate_support(self) -> Tensor:
        """Returns all values ``(values, *ones, *element)``."""
        raise NotImplementedError(f"{type(self).__name__} cannot list its values")


class NormalElements(Elements):
    """Normal in unconstrained space.

    Args:
        params: ``(*batch, E, 2)``, location and raw scale.
        evidence: ``(*batch, E, 2)``, a precision and a precision-weighted mean that add to those of the parameters.
        anchor: ``(*batch, E, 2)``.
    """

    def __init__(self, params: Tensor, evidence: Tensor | None = None, anchor: Tensor | None = None) -> None:
        location, raw = params.unbind(-1)
        self.loc, self.log_scale, self.scale = _anchored(location, raw, anchor, evidence)
        self.shape = self.loc.shape
        self._drawn: _Drawn | None = None

    def draw(self, shape: torch.Size) -> Tensor:
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        x = torch.addcmul(self.loc, self.scale, noise)
        self._drawn = _Drawn(x, x.requires_grad, (noise,))
        return x

    def log_prob(self, x: Tensor) -> Tensor:
        kept = _recall(self._drawn, x, self.loc, self.scale)
        noise = (x - self.loc) / self.scale if kept is None else kept[0]
        return -_HALF_LOG_TWO_PI - torch.add(self.log_scale, noise * noise, alpha=0.5)


class MixtureElements(Elements):
    """Mixture of K Normals in unconstrained space, reparameterized by implicit differentiation of its CDF.

    With F the CDF and f the density, a draw x moves with a parameter p as dx/dp = -(dF/dp) / f. Gradients are exact to
    first order; there are no second-order ones.

    Args:
        params: ``(*batch, E, 3 K)``: logits, locations, raw scales.
        anchor: ``(*batch, E, 2)``, common to all components.

    References:
        Figurnov, Mohamed and Mnih 2018, Implicit Reparameterization Gradients.
    """

    def __init__(self, params: Tensor, anchor: Tensor | None = None) -> None:
        logits, location, raw = params.chunk(3, -1)
        anchor = None if anchor is None else anchor.unsqueeze(-2)
        self.loc, self.log_scale, self.scale = _anchored(location, raw, anchor)
        self.log_weight = logits.log_softmax(-1)
        self.shape = torch.broadcast_shapes(self.loc.shape, logits.shape)[:-1]

    def draw(self, shape: torch.Size) -> Tensor:
        with torch.no_grad():
            weight = self.log_weight.exp().expand(shape + self.log_weight.shape[-1:])
            component = torch.multinomial(weight.reshape(-1, weight.shape[-1]), 1).reshape(shape + (1,))
            loc = self.loc.expand(weight.shape).gather(-1, component).squeeze(-1)
            scale = self.scale.expand(weight.shape).gather(-1, component).squeeze(-1)
            x = loc + scale * torch.randn(shape, dtype=loc.dtype, device=loc.device)
        return x + self._pathwise(x) if torch.is_grad_enabled() else x

    def log_prob(self, x: Tensor) -> Tensor:
        noise = (x.unsqueeze(-1) - self.loc) / self.scale
        joint = self.log_weight - self.log_scale - 0.5 * noise * noise
        return joint.logsumexp(-1) - _HALF_LOG_TWO_PI

    def _pathwise(self, x: Tensor) -> Tensor:
        """Returns zeros whose derivative in each parameter is that of the draw."""
        with torch.no_grad():
            noise = (x.unsqueeze(-1) - self.loc) / self.scale
            joint = self.log_weight - self.log_scale - 0.5 * noise * noise
            share = joint.softmax(-1)
            density = (joint.logsumexp(-1, keepdim=True) - _HALF_LOG_TWO_PI).exp()
            weight = self.log_weight.exp()
            # F - F_k from whichever tail is small, so that it does not cancel.
            lower, upper = ndtr(noise), ndtr(-noise)
            cdf, survival = (weight * lower).sum(-1, keepdim=True), (weight * upper).sum(-1, keepdim=True)
            excess = torch.where(cdf < 0.5, cdf - lower, upper - survival)
            tiny = torch.finfo(x.dtype).tiny
            by_log_weight = weight * excess / density.clamp(min=tiny)
            by_log_scale = share * noise * self.scale
        return (
            share * (self.loc - self.loc.detach())
            + by_log_scale * (self.log_scale - self.log_scale.detach())
            + by_log_weight * (self.log_weight - self.log_weight.detach())
        ).sum(-1)


class _BentElements(Elements):
    """A standard Normal e bent by a monotone function, then location and scale: x = loc + scale bend(e).

    Args:
        location, raw: ``(*batch, E)``, location and raw scale.
        evidence, anchor: as for `NormalElements`, on location and scale.
        tied: a tensor of those that the function depends on.
    """

    def __init__(
        self, location: Tensor, raw: Tensor, evidence: Tensor | None, anchor: Tensor | None, tied: Tensor
    ) -> None:
        self.loc, self.log_scale, self.scale = _anchored(location, raw, anchor, evidence)
        self.shape = self.loc.shape
        self._tied = tied
        self._drawn: _Drawn | None = None

    def draw(self, shape: torch.Size) -> Tensor:
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        bent, log_slope = self._bend(noise)
        x = torch.addcmul(self.loc, self.scale, bent)
        self._drawn = _Drawn(x, x.requires_grad, (noise, log_slope))
        return x

    def log_prob(self, x: Tensor) -> Tensor:
        kept = _recall(self._drawn, x, self.loc, self.scale, self._tied)
        noise, log_slope = self._straighten((x - self.loc) / self.scale) if kept is None else kept
        return -_HALF_LOG_TWO_PI - 0.5 * noise * noise - log_slope - self.log_scale

    @abstractmethod
    def _bend(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the bent noise, and the logarithm of the slope there."""

    @abstractmethod
    def _straighten(self, bent: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the noise that is bent so, and the logarithm of the slope there."""


class FlowElements(_BentElements):
    """A standard Normal through a monotone rational-quadratic spline, then location and scale.

    The spline is the identity outside [-5, 5], and everywhere where its parameters are zero.

    Args:
        params: ``(*batch, E, 2 + 3 bins - 1)``: location, raw scale, widths, heights, derivatives.
        evidence: ``(*batch, E, 2)``, as for `NormalElements`, on location and scale.
        anchor: ``(*batch, E, 2)``.

    References:
        Durkan et al. 2019, Neural Spline Flows.
    """

    def __init__(self, params: Tensor, evidence: Tensor | None = None, anchor: Tensor | None = None) -> None:
        bins = (params.shape[-1] - 1) // 3
        location, raw, widths, heights, derivatives = params.split([1, 1, bins, bins, bins - 1], -1)
        self.spline = _spline(widths, heights, derivatives)
        super().__init__(location.squeeze(-1), raw.squeeze(-1), evidence, anchor, self.spline.horizontal)

    def _bend(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.spline.call_and_ladj(noise)

    def _straighten(self, bent: Tensor) -> tuple[Tensor, Tensor]:
        noise = self.spline.inv(bent)
        return noise, self.spline.log_abs_det_jacobian(noise, bent)


class SinhArcsinhElements(_BentElements):
    """A standard Normal e with two tails of their own weight, then location and scale.

    bend(e) = sinh(a(arcsinh(e))), where a is a branch of a hyperbola through 0 with slopes ``2 ** tanh(left / 8)`` and
    ``2 ** tanh(right / 8)`` far out: from 1/2 over 1, where the density falls off as a Normal's, to 2, as that of an
    exponential variable. It is the identity where both parameters are zero.

    Args:
        params: ``(*batch, E, 4)``: location, raw scale, left, right.
        evidence: ``(*batch, E, 2)``, as for `NormalElements`, on location and scale.
        anchor: ``(*batch, E, 2)``.

    References:
        Jones and Pewsey 2009, Sinh-arcsinh distributions: there a is linear, with one slope and a shift.
    """

    def __init__(self, params: Tensor, evidence: Tensor | None = None, anchor: Tensor | None = None) -> None:
        location, raw = params[..., :2].unbind(-1)
        left, right = (params[..., 2:] / _TAIL_RANGE).tanh().exp2().unbind(-1)
        self._mean, self._half = (left + right) / 2, (right - left) / 2
        super().__init__(location, raw, evidence, anchor, self._mean)

    def _bend(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self._bend_at(noise.asinh())

    def _bend_at(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what sinh(w) is bent to, and the logarithm of the slope there."""
        root = (1 + w * w).sqrt()
        a = self._mean * w + self._half * (root - 1)
        log_slope = (self._mean + self._half * (w / root)).log() + torch.logaddexp(a, -a) - torch.logaddexp(w, -w)
        return a.sinh(), log_slope

    def _straighten(self, bent: Tensor) -> tuple[Tensor, Tensor]:
        a = bent.asinh()
        c = a + self._half
        product = (self._mean - self._half) * (self._mean + self._half)
        along, root = self._mean * c, self._half * (c * c + product).sqrt()
        # A root of a quadratic equation in two ways, each without cancellation where the other has some.
        same = along * root > 0
        w = torch.where(
            same, a * (c + self._half) / torch.where(same, along + root, product), (along - root) / product
        )
        w = w.clamp(-_RANGE, _RANGE)
        return w.sinh(), self._bend_at(w)[1]


class OwnElements(Elements):
    """Elements of any torch distribution of batch shape ``(*batch, E)``."""

    def __init__(self, distribution: torch.distributions.Distribution) -> None:
        self.distribution = distribution
        self.shape = distribution.batch_shape
        self.has_rsample = distribution.has_rsample
        self.has_enumerate_support = distribution.has_enumerate_support

    def draw(self, shape: torch.Size) -> Tensor:
        expanded = self.distribution if shape == self.shape else self.distribution.expand(shape)
        x = expanded.rsample() if self.has_rsample else expanded.sample()
        return interior(support_of(self.distribution), x)

    def log_prob(self, x: Tensor) -> Tensor:
        return self.distribution.log_prob(x)

    def enumerate_support(self) -> Tensor:
        return self.distribution.enumerate_support(expand=False)


class _Drawn(NamedTuple):
    x: Tensor
    tied: bool  # whether the draw required gradients when it was made
    kept: tuple[Tensor, ...]


class _Spline(Protocol):
    horizontal: Tensor

    def call_and_ladj(self, x: Tensor) -> tuple[Tensor, Tensor]: ...

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor: ...

    @property
    def inv(self): ...


def _spline(widths: Tensor, heights: Tensor, derivatives: Tensor) -> _Spline:
    try:
        from zuko.transforms import MonotonicRQSTransform
    except ImportError as error:
        raise ImportError('The "flow" family needs zuko: pip install zuko') from error
    return MonotonicRQSTransform(widths, heights, derivatives)


def _anchored(
    location: Tensor, raw: Tensor, anchor: Tensor | None, evidence: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns location, log scale and scale, relative to the anchor if there is one, and given the evidence."""
    scale = relative_scale(raw)
    if anchor is not None:
        prior_loc, prior_scale = anchor.unbind(-1)
        scale = prior_scale * scale
        location = torch.addcmul(prior_loc, prior_scale, location)
    if evidence is None:
        return location, scale.log(), scale
    precision, mean = evidence.unbind(-1)
    # Relative to the scale before, so that a scale of any size keeps its digits.
    share = 1 + precision * scale * scale
    location = location + scale * scale * (mean - precision * location) / share
    scale = scale * share.rsqrt()
    return location, scale.log(), scale


def _recall(drawn: _Drawn | None, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...] | None:
    """Returns what was kept with the draw `x`, if `x` is that draw and still carries the parameters' gradients.

    A draw made without gradients is a constant: its score needs the path through the parameters.
    """
    if drawn is None or drawn.x is not x or drawn.tied != x.requires_grad:
        return None
    lost = not drawn.tied and torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
    return None if lost else drawn.kept
