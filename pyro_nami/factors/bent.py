"""Normals bent by a monotone function: a spline, or two tails of their own weight."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_nami.factors.elements import NormalElements
from pyro_nami.factors.links import RANGE

__all__ = ["FlowElements", "SinhArcsinhElements"]

_TAIL_RANGE = 8.0  # raw parameters of tails move them less than that of the scale moves it, which training needs first


class FlowElements(NormalElements):
    """A standard Normal through a monotone rational-quadratic spline, then location and scale.

    The spline is the identity outside [-5, 5], and everywhere where its parameters are zero.

    Args:
        params: ``(*batch, E, 2 + 3 bins - 1)``: location, raw scale, widths, heights, derivatives.
        evidence, anchor: as for `NormalElements`, on location and scale.

    References:
        Durkan et al. 2019, Neural Spline Flows.
    """

    def __init__(self, params: Tensor, evidence: Tensor | None = None, anchor: Tensor | None = None) -> None:
        from zuko.transforms import MonotonicRQSTransform  # here, as importing it takes a while

        bins = (params.shape[-1] - 1) // 3
        params, widths, heights, derivatives = params.split([2, bins, bins, bins - 1], -1)
        self.spline = MonotonicRQSTransform(widths, heights, derivatives)
        super().__init__(params, evidence, anchor)

    def _bend(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.spline.call_and_ladj(noise)

    def _straighten(self, bent: Tensor) -> tuple[Tensor, Tensor]:
        noise = self.spline.inv(bent)
        return noise, self.spline.log_abs_det_jacobian(noise, bent)


class SinhArcsinhElements(NormalElements):
    """A standard Normal e with two tails of their own weight, then location and scale.

    bend(e) = sinh(a(arcsinh(e))), where a is a branch of a hyperbola through 0 with slopes ``2 ** tanh(left / 8)`` and
    ``2 ** tanh(right / 8)`` far out: from 1/2 over 1, where the density falls off as a Normal's, to 2, as that of an
    exponential variable. It is the identity where both parameters are zero.

    Args:
        params: ``(*batch, E, 4)``: location, raw scale, left, right.
        evidence, anchor: as for `NormalElements`, on location and scale.

    References:
        Jones and Pewsey 2009, Sinh-arcsinh distributions: there a is linear, with one slope and a shift.
    """

    def __init__(self, params: Tensor, evidence: Tensor | None = None, anchor: Tensor | None = None) -> None:
        left, right = (params[..., 2:] / _TAIL_RANGE).tanh().exp2().unbind(-1)
        self._mean, self._half = (left + right) / 2, (right - left) / 2
        super().__init__(params[..., :2], evidence, anchor)

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
        w = w.clamp(-RANGE, RANGE)
        return w.sinh(), self._bend_at(w)[1]
