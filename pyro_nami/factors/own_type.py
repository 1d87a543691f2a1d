"""The family of the model's own distribution type: of discrete and relaxed sites, and ``"match"``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.factors.family import Family
from pyro_nami.factors.links import RANGE
from pyro_nami.factors.types import TYPES, Row, num_classes
from pyro_nami.factors.wrappers import innermost, through_wrappers

__all__ = ["OwnTypeFamily"]


class OwnTypeFamily(Family):
    """A factor of the prior's own type at raw parameters = the prior's + the network's: at zero it is the prior.

    So `initial` starts from the prior, whatever the value; without an anchor, from the prototype's, averaged over its
    batch. Behind the raw parameters the anchor has what the factor takes over (a total count, a temperature).

    Example:
        >>> prior = torch.distributions.Poisson(torch.tensor(2.0))
        >>> family = OwnTypeFamily("n", prior, torch.tensor(1.0))
        >>> family.elements(torch.tensor([[3.0]]).log(), family.anchor(prior)).mean.round()  # 2 * 3
        tensor([6.])
    """

    def __init__(self, name: str, prior: Distribution, value: Tensor) -> None:
        leaf: Any = innermost(prior)
        # the key, not the row: functions in it do not pickle
        self._kind = next(kind for kind in type(leaf).__mro__ if kind in TYPES)
        raw = self._raw_of(leaf)
        self.num_params = raw.shape[-1]
        self.has_rsample = leaf.has_rsample
        self.layout_type = functools.partial(
            self._row.layout_type,
            element_ndims=len(leaf.event_shape),
            num_classes=num_classes(leaf),
            dtype=raw.dtype,
        )
        super().__init__(name, prior, value)
        self.varies = self.varies or self._row.given is not None
        with torch.no_grad():
            raw = self._raw(prior)
            self._start = raw.reshape((-1,) + raw.shape[-2:]).mean(0)
            given = self._given(prior)
        self._default_given = given
        if given is not None:
            rows = given.reshape((-1,) + given.shape[-2:])
            if len(rows) and (rows == rows[0]).all():
                self._default_given = rows[0]  # so that plates may change size

    def at(self, prior: Distribution) -> Family:
        moved: Any = super().at(prior)
        if moved is not self:
            moved._default_given = self._given(prior)
        return moved

    def anchor(self, prior: Distribution) -> Tensor:
        raw, given = self._raw(prior), self._given(prior)
        return raw if given is None else torch.cat([raw, given], -1)

    def initial(self, value: Tensor, scale: float | Tensor, anchor: Tensor | None = None) -> Tensor:
        start = self._start.to(device=value.device)
        return start if anchor is None else torch.zeros_like(start)

    def elements(self, params: Tensor, anchor: Tensor | None = None) -> Distribution:
        anchor = self._or_default(anchor)
        row, given = self._row, None
        if anchor is not None:
            own, given = anchor.to(params).tensor_split([self.num_params], -1)
            params = params + own
        raw = [params] if row.vector else params.unbind(-1)
        parameters = {name: link.of_raw(part) for (name, link), part in zip(row.links.items(), raw)}
        if row.given is not None:
            assert given is not None
            parameters[row.given] = given.squeeze(-1)
        make: Any = row.make or self._kind
        return make(**parameters, validate_args=False)

    def _raw(self, prior: Distribution) -> Tensor:
        """Returns the prior's raw parameters ``(*batch, E, k)``."""
        # a prior that excludes a value keeps finite gradients
        raw = through_wrappers(prior, self._raw_of).clamp(-RANGE, RANGE)
        return raw.reshape(torch.Size(prior.batch_shape) + (self.num_elements, self.num_params))

    def _raw_of(self, leaf: Any) -> Tensor:
        """Returns the raw parameters ``(*batch, k)`` of a distribution of this type."""
        raw = [link.raw_of(getattr(leaf, name)) for name, link in self._row.links.items()]
        return raw[0] if self._row.vector else torch.stack(torch.broadcast_tensors(*raw), -1)

    def _given(self, prior: Distribution) -> Tensor | None:
        """Returns what the factor takes over from the prior as it is, ``(*batch, E, 1)``."""
        name = self._row.given
        if name is None:
            return None
        given = through_wrappers(
            prior, lambda leaf: torch.as_tensor(getattr(leaf, name)).expand(leaf.batch_shape)
        )
        return given.reshape(torch.Size(prior.batch_shape) + (self.num_elements, 1)).to(
            self._start.dtype
        )

    def _or_default(self, anchor: Tensor | None) -> Tensor | None:
        given = self._default_given
        if anchor is not None or given is None:
            return anchor
        return torch.cat([given.new_zeros(given.shape[:-1] + (self.num_params,)), given], -1)

    @property
    def _row(self) -> Row:
        return TYPES[self._kind]
