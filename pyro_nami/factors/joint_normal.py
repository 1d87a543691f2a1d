"""A Normal over all elements of one site that depend on each other, across the instances of its plates too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_nami.factors.bijections import support_on
from pyro_nami.factors.elements import LatestDraw, draw_elements
from pyro_nami.factors.knots import KnotTransform
from pyro_nami.factors.path_scored import PathScored

__all__ = ["JointNormal", "MixedNormals", "joint_normal"]


class JointNormal(PathScored):
    """L (x - loc) = e: x is a vector whose elements a site's batch or event dims show, and e ~ N(0, I) by default.

    The log density of an instance is that of its own rows of e, so the sum over instances is that of x.

    Args:
        loc: the vector, ``(*lead, E)``.
        lower: L, lower triangular with a positive diagonal, ``(*lead, E, E)``.
        shape: the shape in which a site holds the elements, ``(*instances, *event)``, of E elements in all.
        event_dim: how many dims of it are the event's.
        elements: of e, ``(*lead, E)``, where these are not standard Normal variables.
        bend: a map of one number each that these are moved by to e; none by default.

    Example:
        >>> two = JointNormal(torch.zeros(2), torch.eye(2), torch.Size([2]), 0)
        >>> two.batch_shape, two.log_prob(torch.zeros(2))
        (torch.Size([2]), tensor([-0.9189, -0.9189]))
    """

    arg_constraints: dict[str, Any] = {}
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        lower: Tensor,
        shape: torch.Size,
        event_dim: int,
        elements: Distribution | None = None,
        bend: KnotTransform | None = None,
    ) -> None:
        self.loc = loc
        self.lower = lower
        self.held = shape
        self._elements = elements
        self._bend = bend
        self._latest = LatestDraw()
        leads = {loc.shape[:-1], lower.shape[:-2]}
        if elements is not None:
            leads.add(elements.batch_shape[:-1])
        # `torch.broadcast_shapes` takes as long as a draw
        lead = leads.pop() if len(leads) == 1 else torch.broadcast_shapes(*leads)
        full, cut = lead + shape, len(lead + shape) - event_dim
        super().__init__(full[:cut], full[cut:], validate_args=False)

    @constraints.dependent_property
    def support(self) -> Any:
        return support_on(constraints.real, self.event_dim)

    @property
    def mean(self) -> Tensor:
        return self._shown(self.loc).expand(self.shape())

    @property
    def variance(self) -> Tensor:
        variance = self.lower.inverse().square().sum(-1)
        return self._shown(variance).expand(self.shape())

    def expand(self, batch_shape: Any, _instance: Any = None) -> JointNormal:
        shape = torch.Size(batch_shape)
        cut = len(shape) - (len(self.held) - self.event_dim)
        loc = self.loc.expand(shape[:cut] + self.loc.shape[-1:])
        wide = self._made(loc, self._elements)
        wide.fixed = self.fixed
        return wide

    @property
    def lead(self) -> torch.Size:
        """The shape of the vectors."""
        full = self.batch_shape + self.event_shape
        return full[: len(full) - len(self.held)]

    def with_elements(self, elements: Distribution) -> JointNormal:
        """Returns the distribution with other elements of e."""
        return self._made(self.loc, elements)

    def vectors(self, elements: Tensor) -> Tensor:
        """Returns numbers of the event's elements, instance by instance, ``(*batch, n, k)``, as ``(*lead, E, k)``."""
        plates = len(self.held) - self.event_dim
        lead = elements.shape[: elements.dim() - 2 - plates] + self.held[:plates]
        return elements.expand(lead + elements.shape[-2:]).flatten(-2 - plates, -2)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = self._extended_shape(sample_shape)
        lead = shape[: len(shape) - len(self.held)]
        size = lead + self.loc.shape[-1:]
        if self._elements is None:
            noise = torch.randn(size, dtype=self.loc.dtype, device=self.loc.device)
        else:
            noise = draw_elements(self._elements, size)
        noise = noise if self._bend is None else self._bend.bend(noise)[0]
        value = self.at(noise).reshape(shape)
        self._latest.keep(value)
        return value

    def drawn(self, x: Tensor) -> Tensor | None:
        return None if self._latest.recall(x) is None else x

    def log_prob_drawn(self, x: Tensor, drawn: Tensor) -> Tensor:
        return self.log_prob(drawn)

    def at(self, noise: Tensor) -> Tensor:
        """Returns the vector x of e, ``(*lead, E)``."""
        return self.loc + torch.linalg.solve_triangular(
            self.lower, noise.unsqueeze(-1), upper=False
        ).squeeze(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        x = self._vector(value)
        noise = self._noise(x)
        log_prob = self._shown(self._log_probs(x, noise).expand(noise.shape))
        return log_prob.flatten(-self.event_dim).sum(-1) if self.event_dim else log_prob

    def _log_probs(self, x: Tensor, noise: Tensor) -> Tensor:
        """Returns the log density of each element given those before it, ``(*lead, E)``."""
        log_slope: Any = 0.0
        if self._bend is not None:
            noise, log_slope = self._bend.straighten(noise)
        if self._elements is None:
            log_prob = -noise.square() / 2 - math.log(2 * math.pi) / 2
        else:
            log_prob = self._elements.log_prob(noise)
        return log_prob - log_slope + self.lower.diagonal(dim1=-2, dim2=-1).log()

    def _shown(self, vector: Tensor) -> Tensor:
        """Returns a vector ``(*lead, E)`` in the shape in which the site holds it."""
        return vector.reshape(vector.shape[:-1] + self.held)

    def _vector(self, value: Tensor) -> Tensor:
        """Returns a value's elements, ``(*lead, E)``."""
        full = self.batch_shape + self.event_shape
        full = full if value.shape == full else torch.broadcast_shapes(value.shape, full)
        return value.expand(full).reshape(full[: len(full) - len(self.held)] + self.loc.shape[-1:])

    def _noise(self, x: Tensor) -> Tensor:
        """Returns e of a vector x, ``(*lead, E)``."""
        return (self.lower @ (x - self.loc).unsqueeze(-1)).squeeze(-1)

    def _made(self, loc: Tensor, elements: Distribution | None) -> JointNormal:
        """Returns the distribution with another location, and other elements of e."""
        return JointNormal(loc, self.lower, self.held, self.event_dim, elements, self._bend)


class MixedNormals(TorchDistribution):
    """A mixture of `JointNormal`s of one shape. Draws have no gradient by the shares.

    The log density of an instance is that given the instances before it, so the sum over instances is that of the
    vector.

    Args:
        log_shares: of the parts, normalized, ``(*lead, parts)``.
        parts: the Normals.

    Example:
        >>> near, far = (JointNormal(torch.tensor([x]), torch.eye(1), torch.Size([1]), 0) for x in (0.0, 9.0))
        >>> MixedNormals(torch.tensor([0.5, 0.5]).log(), [near, far]).log_prob(torch.tensor([9.0]))
        tensor([-1.6121])
    """

    arg_constraints: dict[str, Any] = {}
    has_rsample = True

    def __init__(self, log_shares: Tensor, parts: Sequence[JointNormal]) -> None:
        self.log_shares = log_shares
        self._parts = parts
        first, held = parts[0], parts[0].held
        lead = torch.broadcast_shapes(log_shares.shape[:-1], *(each.lead for each in parts))
        full = lead + held
        cut = len(full) - first.event_dim
        super().__init__(full[:cut], full[cut:], validate_args=False)

    @constraints.dependent_property
    def support(self) -> Any:
        return support_on(constraints.real, self.event_dim)

    def expand(self, batch_shape: Any, _instance: Any = None) -> MixedNormals:
        return MixedNormals(self.log_shares, [each.expand(batch_shape) for each in self._parts])

    def with_elements(self, elements: Distribution) -> MixedNormals:
        """Returns the mixture with other elements of all parts."""
        parts = [each.with_elements(elements) for each in self._parts]
        return MixedNormals(self.log_shares, parts)

    def vectors(self, elements: Tensor) -> Tensor:
        """Returns numbers of the event's elements as those of the vector; see `JointNormal.vectors`."""
        return self._parts[0].vectors(elements)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape, held = self._extended_shape(sample_shape), self._parts[0].held
        lead = shape[: len(shape) - len(held)]
        shares = self.log_shares.exp().expand(*lead, -1)
        chosen = torch.multinomial(shares.reshape(-1, shares.shape[-1]), 1)
        drawn = [
            each.expand(shape[: len(shape) - each.event_dim]).rsample() for each in self._parts
        ]
        values = torch.stack(drawn, len(lead)).reshape(len(chosen), len(drawn), -1)
        index = chosen[..., None].expand(-1, -1, values.shape[-1])
        return values.gather(1, index).reshape(shape)

    def log_prob(self, value: Tensor) -> Tensor:
        each = torch.stack([part.log_prob(value) for part in self._parts], -1)
        rows = len(self._parts[0].held) - self.event_dim
        cut = each.dim() - 1 - rows
        so_far = each.flatten(cut, -2).cumsum(-2) + self.log_shares.unsqueeze(-2)
        total = so_far.logsumexp(-1)
        before = torch.cat([torch.zeros_like(total[..., :1]), total[..., :-1]], -1)
        return (total - before).reshape(each.shape[:-1])


def joint_normal(fn: Any) -> JointNormal | MixedNormals:
    """Returns a Normal with one element as a `JointNormal`; one of these, or a mixture of them, as it is."""
    if isinstance(fn, (JointNormal, MixedNormals)):
        return fn
    loc, scale = (each.reshape(fn.batch_shape + (1,)) for each in (fn.mean, fn.stddev))
    return JointNormal(loc, scale.reciprocal().unsqueeze(-1), fn.event_shape, fn.event_dim)
