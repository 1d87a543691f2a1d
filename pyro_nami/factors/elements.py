"""Densities of single elements, batched: what a site's distribution draws and scores, element by element.

An `Elements` object has batch ``(*batch, E)``; its elements are scalars (or vectors for simplex-like types). A site's
distribution is built on it, so a new family needs nothing else. Location-scale types live in unconstrained space and
take an anchor ``(*batch, E, 2)`` of a prior location m and scale t there: location = m + t a, scale = t softplus(s),
with (a, s) from the network. Bent Normals are in `bent`, relaxed types in `relaxed`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.special import ndtr

from pyro_nami.factors.bijections import interior, support_of
from pyro_nami.factors.joint import to_instances, to_sequence
from pyro_nami.factors.links import relative_scale

__all__ = ["CoupledElements", "Elements", "LatestDraw", "MixtureElements", "NormalElements", "OwnElements"]

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


class LatestDraw(NamedTuple):
    """A draw, known by identity, and what was computed on the way to it: its score then costs no inverse, no network.

    Attributes:
        value: the draw.
        tied: whether it required gradients.
        recorded: whether gradients were recorded on the way.
        kept: what was computed.
    """

    value: Tensor
    tied: bool
    recorded: bool
    kept: tuple[Any, ...]

    @classmethod
    def of(cls, value: Tensor, *kept: Any) -> LatestDraw:
        return cls(value, value.requires_grad, torch.is_grad_enabled(), kept)

    def recall(self, value: Tensor) -> tuple[Any, ...] | None:
        """Returns what was kept if `value` is the draw, unchanged in its tie to autograd, with all gradients wanted.

        A draw made without gradients is a constant: its score needs the path through the parameters.
        """
        same = self.value is value and self.tied == value.requires_grad
        return self.kept if same and (self.recorded or not torch.is_grad_enabled()) else None


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
    """x = loc + scale b(e) with e standard normal: log q(x) = log N(e) - log b'(e) - log scale.

    Here b is the identity; subclasses bend, by `_bend` and `_straighten`.

    Args:
        params: ``(*batch, E, 2)``, location and raw scale.
        evidence: ``(*batch, E, 2)``, a precision and a precision-weighted mean that add to those of the parameters.
        anchor: ``(*batch, E, 2)``.

    Example:
        >>> NormalElements(torch.tensor([[1.0, 0.0]]), anchor=torch.tensor([[10.0, 2.0]])).loc
        tensor([12.])
    """

    def __init__(self, params: Tensor, evidence: Tensor | None = None, anchor: Tensor | None = None) -> None:
        location, raw = params.unbind(-1)
        self.loc, self.log_scale, self.scale = _anchored(location, raw, anchor, evidence)
        self.shape = self.loc.shape
        self._latest: LatestDraw | None = None

    def draw(self, shape: torch.Size) -> Tensor:
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        bent, log_slope = self._bend(noise)
        x = torch.addcmul(self.loc, self.scale, bent)
        self._latest = LatestDraw.of(x, noise, log_slope)
        return x

    def log_prob(self, x: Tensor) -> Tensor:
        kept = None if self._latest is None else self._latest.recall(x)
        noise, log_slope = kept or self._straighten((x - self.loc) / self.scale)
        if log_slope is None:
            return -_HALF_LOG_TWO_PI - torch.add(self.log_scale, noise * noise, alpha=0.5)
        return -_HALF_LOG_TWO_PI - 0.5 * noise * noise - log_slope - self.log_scale

    def _bend(self, noise: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the bent noise, and the logarithm of the slope there (None for zero)."""
        return noise, None

    def _straighten(self, bent: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the noise that is bent so, and the logarithm of the slope there (None for zero)."""
        return bent, None


class CoupledElements(NormalElements):
    """Jointly Normal elements, drawn all at once: x = loc + scale (I + L) e, with L strictly lower triangular.

    What a network reads of a site's own elements can be any function, and takes a step an element to draw. Where it is
    linear, one product gives them all. Element i given those before it is Normal with ``scale_i``: densities are as
    cheap.

    Args:
        params, evidence, anchor: as for `NormalElements`: of each element given those before it at their locations.
        coupling: L, ``(N E, N E)``, with the instances of plates in a row, the last plate slowest.
        dims: negative batch dims of plates whose instances are coupled as well.
        sizes: of these plates; N is their product.
    """

    def __init__(
        self,
        params: Tensor,
        evidence: Tensor | None = None,
        anchor: Tensor | None = None,
        *,
        coupling: Tensor,
        dims: Sequence[int] = (),
        sizes: Sequence[int] = (),
    ) -> None:
        super().__init__(params, evidence, anchor)
        self.coupling, self.dims, self.sizes = coupling, dims, sizes

    def _bend(self, noise: Tensor) -> tuple[Tensor, None]:
        flat = to_sequence(noise, self.dims)
        return to_instances(flat + flat @ self.coupling.mT, self.dims, self.sizes), None

    def _straighten(self, bent: Tensor) -> tuple[Tensor, None]:
        flat = to_sequence(bent, self.dims)
        rows = flat.reshape(-1, flat.shape[-1]).mT
        solved = torch.linalg.solve_triangular(self.coupling, rows, upper=False, unitriangular=True)
        return to_instances(solved.mT.reshape(flat.shape), self.dims, self.sizes), None


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
