"""The distribution that the guide emits at a sample site: densities of elements, laid out as the site's value.

`Predictive` places its plate of draws by the guide's trace alone. A guide may therefore be called
inside a plate for which its own sites leave room, but its model does not. The model then sees the
draws further to the left, and `Relocated` distributions are seen outside.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.score_parts import ScoreParts
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_nami.factors.elements import LatestDraw, draw_elements
from pyro_nami.factors.layout import Layout
from pyro_nami.factors.path_scored import PathScored

__all__ = ["Relocated", "Relocation", "SiteDistribution"]


class SiteDistribution(PathScored):
    """log q(value) = sum over elements of log q(element) - log |d value / d elements|.

    It has the model's support and event shape and a real density, but no registered KL divergence, on purpose:
    ``TraceMeanField_ELBO`` must fall back to the sample estimate. It remembers the latest
    draw, so that scoring one's own costs no inverse transform.

    Example:
        >>> from pyro_nami.factors.layout import UnconstrainedLayout
        >>> from pyro_nami.factors.normals import NormalElements
        >>> layout = UnconstrainedLayout(constraints.positive, torch.Size())
        >>> q = SiteDistribution(NormalElements(torch.tensor([[0.0, 0.5413]])), layout)  # softplus(0.5413) = 1
        >>> q.log_prob(torch.tensor(2.0)), torch.distributions.LogNormal(0.0, 1.0).log_prob(torch.tensor(2.0))
        (tensor(-1.8523), tensor(-1.8523))
    """

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(self, elements: Distribution, layout: Layout) -> None:
        self._elements = elements
        self._layout = layout
        self._latest = LatestDraw()
        self._support = layout.support
        batch_shape = elements.batch_shape[:-1]
        if layout.batch_shape:
            batch_shape = torch.broadcast_shapes(batch_shape, layout.batch_shape)
        super().__init__(batch_shape, layout.event_shape)

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        return self._support

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        return self._elements.has_rsample

    @property
    def has_enumerate_support(self) -> bool:  # type: ignore[override]
        return self._layout.num_elements == 1 and self._elements.has_enumerate_support

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> SiteDistribution:
        wide = copy.copy(self)
        wide._batch_shape = torch.broadcast_shapes(tuple(batch_shape), self._batch_shape)
        return wide

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Returns a reparameterized draw ``(*sample_shape, *batch, *event)``."""
        if not self.has_rsample:
            raise NotImplementedError(
                "A site of a discrete or non-reparameterized type has no rsample"
            )
        return self._draw(sample_shape)

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Returns a draw ``(*sample_shape, *batch, *event)`` that carries no gradient."""
        # Discrete elements have none themselves; the network's parameters must keep theirs for log_prob.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.has_rsample):
            return self._draw(sample_shape)

    def drawn(self, x: Tensor) -> Tensor | None:
        """Returns the elements of the latest draw if `x` is it; see `LatestDraw`."""
        kept = self._latest.recall(x)
        return None if kept is None else kept[0]

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns log densities in nats ``(*batch,)``; of an instance given those before it, in a joint block."""
        elements = self.drawn(value)
        if elements is None:
            if self._validate_args:
                self._validate_sample(value)
            elements = self._layout.elements(value)
        return self.log_prob_drawn(value, elements)

    def log_prob_drawn(self, x: Tensor, drawn: Tensor) -> Tensor:
        log_prob = self._elements.log_prob(drawn).sum(-1)
        log_abs_det = self._layout.log_abs_det(drawn, x)
        if log_abs_det is not None:
            log_prob = log_prob - log_abs_det
        if log_prob.shape != self._batch_shape:
            log_prob = log_prob.expand(torch.broadcast_shapes(log_prob.shape, self._batch_shape))
        return log_prob

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Returns every value, ``(values, *batch, *event)``, with ones for the batch unless `expand`."""
        if not self.has_enumerate_support:
            raise NotImplementedError(
                "Expected one element of a type with finite support to enumerate"
            )
        values = self._elements.enumerate_support(expand=False)
        ones = (1,) * len(self._batch_shape)
        values = values.reshape((-1,) + ones + self._event_shape)
        return values.expand((-1,) + (self._batch_shape if expand else ones) + self._event_shape)

    def _draw(self, sample_shape: Sequence[int]) -> Tensor:
        shape = torch.Size(sample_shape) + self._batch_shape + (self._layout.num_elements,)
        elements = draw_elements(self._elements, shape)
        value = self._layout.value(elements)
        self._latest.keep(value, elements)
        return value


class Relocation(NamedTuple):
    """Moves batch dims: outside they lie left of ``kept`` dims, inside left of ``kept + gap``, with ones between."""

    kept: int
    gap: int

    def inside(self, batch: torch.Size) -> torch.Size:
        """Returns an outside batch shape as it is inside."""
        cut = len(batch) - self.kept
        return batch if cut <= 0 else torch.Size((*batch[:cut], *(1,) * self.gap, *batch[cut:]))

    def outside(self, batch: torch.Size) -> torch.Size:
        """Returns an inside batch shape as it is outside."""
        right, left = max(len(batch) - self.kept, 0), max(len(batch) - self.kept - self.gap, 0)
        return torch.Size((*batch[:left], *batch[right:]))

    def value_inside(self, value: Tensor, event_dim: int) -> Tensor:
        """Returns an outside value ``(*batch, *event)`` as it is inside."""
        cut = value.dim() - event_dim
        return value.reshape(self.inside(value.shape[:cut]) + value.shape[cut:])


class Relocated(TorchDistribution):
    """The distribution ``base`` of inside with its batch dims outside.

    Example:
        >>> base = torch.distributions.Normal(torch.zeros(7, 1, 1, 3), 1.0)
        >>> Relocated(base, Relocation(kept=1, gap=2)).sample().shape
        torch.Size([7, 3])
    """

    arg_constraints: dict[str, constraints.Constraint] = {}

    def __init__(self, base: TorchDistribution, relocation: Relocation) -> None:
        self._base, self._relocation = base, relocation
        self._latest = LatestDraw()
        self.has_rsample = base.has_rsample
        self.has_enumerate_support = base.has_enumerate_support
        batch_shape = relocation.outside(base.batch_shape)
        super().__init__(batch_shape, base.event_shape, validate_args=False)

    @constraints.dependent_property
    def support(self) -> constraints.Constraint | None:
        return self._base.support

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Relocated:
        inside = self._relocation.inside(torch.Size(batch_shape))
        return Relocated(self._base.expand(inside), self._relocation)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        return self._out(self._base.rsample(sample_shape), len(sample_shape))

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        return self._out(self._base.sample(sample_shape), len(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        return self._outside(self._base.log_prob(self._inside(value)))

    def score_parts(self, x: Tensor, *args: Any, **kwargs: Any) -> ScoreParts:
        parts = self._base.score_parts(self._inside(x))
        return ScoreParts(*map(self._outside, parts))

    def enumerate_support(self, expand: bool = True) -> Tensor:
        values = self._base.enumerate_support(expand)
        batch = self.batch_shape if expand else torch.Size((1,) * len(self.batch_shape))
        return values.reshape(values.shape[:1] + batch + self.event_shape)

    def _out(self, inside: Tensor, sample_ndims: int) -> Tensor:
        value = inside.reshape(inside.shape[:sample_ndims] + self.batch_shape + self.event_shape)
        self._latest.keep(value, inside)
        return value

    def _inside(self, value: Tensor) -> Tensor:
        """Returns a value as the base knows it; for the latest draw, that draw itself."""
        kept = self._latest.recall(value)
        if kept is not None:
            return kept[0]
        return self._relocation.value_inside(value, len(self.event_shape))

    def _outside(self, part: Any) -> Any:
        """Returns a log density of the base with its batch dims outside; a number as it is."""
        if not isinstance(part, Tensor):
            return part
        return part.reshape(self._relocation.outside(part.shape))
