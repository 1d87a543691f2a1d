"""Densities made of Normals in unconstrained space: single, coupled, mixed, and bent by a spline or in the tails.

All take an anchor ``(*batch, E, 2)``: prior location m and scale t. A network gives (a, s), which
stand for location m + t a and scale t softplus(s). Evidence of pooled instances is added to both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.special import ndtr

from pyro_nami.factors.elements import Elements, LatestDraw
from pyro_nami.factors.joint import to_instances, to_sequence
from pyro_nami.factors.links import RANGE, relative_scale

__all__ = [
    "Coupling",
    "LinearMap",
    "MixtureElements",
    "NormalElements",
    "SinhArcsinh",
    "Widened",
]

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


class LinearMap(NamedTuple):
    """(I + L) e with L strictly lower triangular, ``(E, E)``.

    Given the elements before it, element i is Normal with the scale that it has without a coupling.
    """

    matrix: Tensor

    def bend(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        return noise + noise @ self.matrix.mT, torch.zeros_like(noise)

    def straighten(self, bent: Tensor) -> tuple[Tensor, Tensor]:
        rows = bent.reshape(-1, bent.shape[-1]).mT
        solved = torch.linalg.solve_triangular(self.matrix, rows, upper=False, unitriangular=True)
        return solved.mT.reshape(bent.shape), torch.zeros_like(bent)


class Widened(NamedTuple):
    """s e: noise of a larger standard deviation s than 1, where a factor is known to be too narrow."""

    scale: float

    def bend(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale * noise, torch.full_like(noise, math.log(self.scale))

    def straighten(self, bent: Tensor) -> tuple[Tensor, Tensor]:
        return bent / self.scale, torch.full_like(bent, math.log(self.scale))


class Coupling(NamedTuple):
    """Noise whose elements depend on each other, over the instances of plates as well.

    Its methods map elements ``(*batch, E)``. They also return log slopes. The sum of these over all
    coupled elements is the log determinant of the Jacobian.

    Attributes:
        along: maps all that is coupled, ``(*batch, N E)``, those of the last plate slowest: a `LinearMap`, or a
            `pyro_nami.parameters.spline_stack.StackPass`.
        dims: negative batch dims of plates whose instances are coupled as well.
        sizes: of these plates; N is their product.
    """

    along: Any
    dims: Sequence[int] = ()
    sizes: Sequence[int] = ()

    def bend(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self._back(*self.along.bend(to_sequence(noise, self.dims)))

    def straighten(self, bent: Tensor) -> tuple[Tensor, Tensor]:
        return self._back(*self.along.straighten(to_sequence(bent, self.dims)))

    def _back(self, *parts: Tensor) -> tuple[Tensor, Tensor]:
        noise, slope = (to_instances(part, self.dims, self.sizes) for part in parts)
        return noise, slope


class NormalElements(Elements):
    """x = loc + scale b(c(e)) with e standard normal: log q(x) = log N(e) - log c'(e) - log b'(c(e)) - log scale.

    b bends each element, and c couples elements, where that is asked for; else they are the identity.

    Args:
        params: ``(*batch, E, 2 + n)``, location, raw scale, and n parameters of the bend.
        evidence: ``(*batch, E, 2)``, a precision and a precision-weighted mean that add to those of the parameters.
        anchor: ``(*batch, E, 2)``, the prior's location and scale.
        coupling: of the elements.
        noise_scale: standard deviation of e, in place of 1; see `Widened`.
        bend: makes b of its parameters ``(*batch, E, n)``: `knots.NeuralSpline`, or `SinhArcsinh`.

    Example:
        >>> NormalElements(torch.tensor([[1.0, 0.0]]), anchor=torch.tensor([[10.0, 2.0]])).loc
        tensor([12.])
        >>> coupling = Coupling(LinearMap(torch.tensor([[0.0, 0.0], [2.0, 0.0]])))
        >>> q = NormalElements(torch.tensor([[0.0, 0.5413], [0.0, 0.5413]]), coupling=coupling)  # scales 1
        >>> q.log_prob(torch.tensor([1.0, 2.0]))  # the second is 2 times the first, and no more
        tensor([-1.4189, -0.9189])
        >>> from pyro_nami.factors.knots import NeuralSpline
        >>> bent = NormalElements(torch.tensor([[1.0, 0.5413, *[0.0] * 5]]), bend=NeuralSpline)
        >>> bent.log_prob(torch.ones(1))  # Normal(1, 1), as parameters of zero do not bend
        tensor([-0.9189])
    """

    def __init__(
        self,
        params: Tensor,
        evidence: Tensor | None = None,
        anchor: Tensor | None = None,
        coupling: Coupling | None = None,
        bend: Callable[[Tensor], Any] | None = None,
        noise_scale: float = 1.0,
    ) -> None:
        self._maps: list[Any] = [] if noise_scale == 1.0 else [Widened(noise_scale)]
        if coupling is not None:
            self._maps.append(coupling)
        if bend is not None:
            self._maps.append(bend(params[..., 2:]))
            params = params[..., :2]
        location, raw = params.unbind(-1)
        self.loc, self.log_scale, self.scale = _anchored(location, raw, anchor, evidence)
        self._latest = LatestDraw()
        super().__init__(self.loc.shape, validate_args=False)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = self._extended_shape(sample_shape)
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        bent, log_slope = self._bend(noise)
        x = torch.addcmul(self.loc, self.scale, bent)
        self._latest.keep(x, noise, log_slope)
        return x

    def log_prob(self, value: Tensor) -> Tensor:
        noise, log_slope = self._latest.recall(value) or self._noise(value)
        log_prob = -_HALF_LOG_TWO_PI - torch.add(self.log_scale, noise * noise, alpha=0.5)
        return log_prob - log_slope if self._maps else log_prob

    def noise(self, x: Tensor) -> Tensor:
        """Returns the standard Normal variables that elements are made of."""
        return self._noise(x)[0]

    def at(self, noise: Tensor) -> Tensor:
        """Returns the elements that are made of standard Normal variables."""
        return torch.addcmul(self.loc, self.scale, self._bend(noise)[0])

    def _bend(self, noise: Tensor) -> tuple[Tensor, Any]:
        """Returns the bent noise, and the logarithm of the slope there."""
        log_slope: Any = 0.0
        for each in self._maps:
            noise, more = each.bend(noise)
            log_slope = log_slope + more
        return noise, log_slope

    def _noise(self, x: Tensor) -> tuple[Tensor, Any]:
        """Returns the noise of elements, and the logarithm of the slope there."""
        noise = (x - self.loc) / self.scale
        log_slope: Any = 0.0
        for each in reversed(self._maps):
            noise, more = each.straighten(noise)
            log_slope = log_slope + more
        return noise, log_slope


class SinhArcsinh:
    """Gives a Normal two tails of their own weight: b(e) = sinh(a(arcsinh(e))).

    Here a is a branch of a hyperbola through 0 with slopes ``2 ** tanh(left / unit)`` and ``2 ** tanh(right / unit)``
    far out: from 1/2 over 1, where the density falls off as a Normal's, to 2, as that of an exponential variable. It is
    the identity where both parameters are zero.

    Args:
        params: ``(*batch, 2)``, left and right.
        unit: of these: steps of training move tails less than the scale, which is needed first.

    References:
        Jones and Pewsey 2009, Sinh-arcsinh distributions: there a is linear, with one slope and a shift.

    Example:
        >>> heavy_right = NormalElements(torch.tensor([[0.0, 0.5413, 0.0, 8.0]]), bend=SinhArcsinh)
        >>> heavy_right.log_prob(torch.tensor([6.0])) > heavy_right.log_prob(torch.tensor([-6.0])) + 5
        tensor([True])
    """

    def __init__(self, params: Tensor, *, unit: float = 8.0) -> None:
        left, right = (params / unit).tanh().exp2().unbind(-1)
        self._mean, self._half = (left + right) / 2, (right - left) / 2

    def bend(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self._bend_at(noise.asinh())

    def _bend_at(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what sinh(w) is bent to, and the logarithm of the slope there."""
        root = (1 + w * w).sqrt()
        a = self._mean * w + self._half * (root - 1)
        log_slope = (
            (self._mean + self._half * (w / root)).log()
            + torch.logaddexp(a, -a)
            - torch.logaddexp(w, -w)
        )
        return a.sinh(), log_slope

    def straighten(self, bent: Tensor) -> tuple[Tensor, Tensor]:
        a = bent.asinh()
        c = a + self._half
        product = (self._mean - self._half) * (self._mean + self._half)
        along, root = self._mean * c, self._half * (c * c + product).sqrt()
        # A root of a quadratic equation in two ways, each without cancellation where the other has some.
        same = along * root > 0
        w = torch.where(
            same,
            a * (c + self._half) / torch.where(same, along + root, product),
            (along - root) / product,
        )
        w = w.clamp(-RANGE, RANGE)
        return w.sinh(), self._bend_at(w)[1]


class MixtureElements(Elements):
    """q(x) = sum_k w_k N(x; loc_k, scale_k), reparameterized by its CDF F: dx/dp = -(dF/dp) / q(x).

    These implicit gradients are exact to first order; there are no second-order ones.

    Parameters are ``(*batch, E, 3 K)``: logits, locations, raw scales. All components have one anchor.

    References:
        Figurnov, Mohamed and Mnih 2018, Implicit Reparameterization Gradients.

    Example:
        >>> params = torch.tensor([[0.0, 0.0, -1.0, 1.0, 0.5413, 0.5413]])  # logits, locations -1 and 1, raw scales
        >>> MixtureElements(params).log_prob(torch.zeros(1))  # as Normal(1, 1)
        tensor([-1.4189])
    """

    def __init__(self, params: Tensor, anchor: Tensor | None = None) -> None:
        logits, location, raw = params.chunk(3, -1)
        anchor = None if anchor is None else anchor.unsqueeze(-2)
        self.loc, self.log_scale, self.scale = _anchored(location, raw, anchor)
        self.log_weight = logits.log_softmax(-1)
        shape = torch.broadcast_shapes(self.loc.shape, logits.shape)[:-1]
        super().__init__(shape, validate_args=False)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = self._extended_shape(sample_shape)
        with torch.no_grad():
            weight = self.log_weight.exp().expand(shape + self.log_weight.shape[-1:])
            component = torch.multinomial(weight.flatten(0, -2), 1).reshape(shape + (1,))
            loc, scale = (
                part.expand(weight.shape).gather(-1, component).squeeze(-1)
                for part in (self.loc, self.scale)
            )
            x = loc + scale * torch.randn_like(loc)
        return x + self._pathwise(x) if torch.is_grad_enabled() else x

    def log_prob(self, value: Tensor) -> Tensor:
        return self._parts(value)[1].logsumexp(-1) - _HALF_LOG_TWO_PI

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the standard noise of each component, and its weighted log density but for a constant."""
        noise = (x.unsqueeze(-1) - self.loc) / self.scale
        return noise, self.log_weight - self.log_scale - 0.5 * noise * noise

    def _pathwise(self, x: Tensor) -> Tensor:
        """Returns zeros whose derivative in each parameter is that of the draw."""
        with torch.no_grad():
            noise, joint = self._parts(x)
            share = joint.softmax(-1)
            density = (joint.logsumexp(-1, keepdim=True) - _HALF_LOG_TWO_PI).exp()
            weight = self.log_weight.exp()
            # F - F_k from whichever tail is small, so that it does not cancel.
            lower, upper = ndtr(noise), ndtr(-noise)
            cdf = (weight * lower).sum(-1, keepdim=True)
            survival = (weight * upper).sum(-1, keepdim=True)
            excess = torch.where(cdf < 0.5, cdf - lower, upper - survival)
            tiny = torch.finfo(x.dtype).tiny
            by_log_weight = weight * excess / density.clamp(min=tiny)
            by_log_scale = share * noise * self.scale
        return (
            share * (self.loc - self.loc.detach())
            + by_log_scale * (self.log_scale - self.log_scale.detach())
            + by_log_weight * (self.log_weight - self.log_weight.detach())
        ).sum(-1)


def _anchored(
    location: Tensor, raw: Tensor, anchor: Tensor | None, evidence: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns location, log scale and scale, relative to the anchor and given the evidence, if there is any."""
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
