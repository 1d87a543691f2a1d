"""A site whose elements are jointly Normal in unconstrained space, drawn all at once.

What a network reads of a vector's own elements can be any function, and takes a step an element to draw. Where it is
linear, all elements come from one product with a triangular matrix: x = loc + scale (I + L) e, with e standard normal
and L strictly lower triangular. Element i given those before it is Normal with ``scale_i``, so densities are as cheap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_nami.factors.elements import NormalElements
from pyro_nami.factors.factor import SiteDistribution
from pyro_nami.factors.joint import fold, unfold
from pyro_nami.factors.layout import Layout

__all__ = ["CoupledFactor"]

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


class CoupledFactor(SiteDistribution):
    """A site's distribution whose elements are jointly Normal.

    Args:
        elements: location and scale of each element given those before it at their locations, batch ``(*batch, E)``.
        layout: of the site's value.
        coupling: L, ``(E, E)``; with the instances of plates in a row, the last plate slowest.
        dims: negative batch dims of plates whose instances are coupled as well; E counts their elements too.
        sizes: of these plates.
        batch_shape: if wider than the elements' own.
    """

    has_rsample = True

    def __init__(
        self,
        elements: NormalElements,
        layout: Layout,
        coupling: Tensor,
        dims: Sequence[int] = (),
        sizes: Sequence[int] = (),
        batch_shape: torch.Size | None = None,
    ) -> None:
        self._elements, self._coupling, self._dims, self._sizes = elements, coupling, tuple(dims), tuple(sizes)
        self._noise: Tensor | None = None
        if batch_shape is None:
            batch_shape = torch.broadcast_shapes(elements.shape[:-1], layout.batch_shape)
        super().__init__(layout, batch_shape)

    def expand(self, batch_shape: Sequence[int], _instance: object = None) -> CoupledFactor:
        shape = torch.broadcast_shapes(tuple(batch_shape), self._batch_shape)
        return CoupledFactor(self._elements, self._layout, self._coupling, self._dims, self._sizes, shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns log densities in nats ``(*batch,)``, of an instance given those before it."""
        elements = self.recall(value)
        # A draw made without gradients is a constant: its score needs the path through the parameters.
        noise = None if elements is None or self._lost(value) else self._noise
        if elements is None:
            elements = self._elements_of(value)
        if noise is None:
            noise = self._solved((elements - self._elements.loc) / self._elements.scale)
        log_probs = -_HALF_LOG_TWO_PI - torch.add(self._elements.log_scale, noise * noise, alpha=0.5)
        return self._total(log_probs, elements, value)

    def _lost(self, value: Tensor) -> bool:
        parameters = self._elements.loc, self._elements.scale, self._coupling
        return not value.requires_grad and torch.is_grad_enabled() and any(p.requires_grad for p in parameters)

    def _draw_elements(self, shape: torch.Size) -> Tensor:
        loc = self._elements.loc
        noise = torch.randn(shape + (self._layout.num_elements,), dtype=loc.dtype, device=loc.device)
        self._noise = noise
        flat = self._flat(noise)
        return torch.addcmul(loc, self._elements.scale, self._unflat(flat + flat @ self._coupling.mT))

    def _solved(self, mixed: Tensor) -> Tensor:
        """Returns e from (I + L) e."""
        flat = self._flat(mixed.expand(torch.broadcast_shapes(mixed.shape, self._batch_shape + (1,))))
        rows = flat.reshape(-1, flat.shape[-1]).mT
        solved = torch.linalg.solve_triangular(self._coupling, rows, upper=False, unitriangular=True)
        return self._unflat(solved.mT.reshape(flat.shape))

    def _flat(self, x: Tensor) -> Tensor:
        return fold(x.unsqueeze(-1), self._dims).squeeze(-1) if self._dims else x

    def _unflat(self, x: Tensor) -> Tensor:
        return unfold(x.unsqueeze(-1), self._dims, self._sizes).squeeze(-1) if self._dims else x
