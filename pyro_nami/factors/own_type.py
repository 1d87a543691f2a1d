"""The family of the model's own distribution type: of discrete sites, and ``"match"``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import pad

from pyro_nami.factors.family import Family
from pyro_nami.factors.layout import Layout
from pyro_nami.factors.links import RANGE, within
from pyro_nami.factors.types import TYPES, Row, num_classes
from pyro_nami.factors.wrappers import innermost, through_wrappers

__all__ = ["OwnTypeFamily"]


class OwnTypeFamily(Family):
    """A factor of the prior's own type at raw parameters = the prior's + the network's: at zero it is the prior.

    So `initial` starts from the prior, whatever the value; without an anchor, from the prototype's, averaged over its
    batch. Behind the raw parameters the anchor has what the factor takes over (a total count).

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
        self.num_params = raw.shape[-1] - (self._row.given is not None)
        self.has_rsample = leaf.has_rsample
        self.layout_type = functools.partial(
            Layout,
            element_ndims=len(leaf.event_shape),
            num_classes=num_classes(leaf),
            dtype=raw.dtype,
        )
        super().__init__(name, prior, value)
        self.varies = self.varies or self._row.given is not None
        with torch.no_grad():
            anchor = self.anchor(prior)
        raw, given = self._split(anchor.reshape((-1,) + anchor.shape[-2:]))
        self._start = raw.mean(0)
        # if equal for all instances, plates may change size
        equal = len(given) and (given == given[0]).all()
        self._given = given[0] if equal else self._split(anchor)[1]

    def at(self, prior: Distribution) -> Family:
        moved: Any = super().at(prior)
        if moved is not self:
            moved._given = self._split(self.anchor(prior))[1]
        return moved

    def anchor(self, prior: Distribution) -> Tensor:
        anchor = through_wrappers(prior, self._raw_of)
        return anchor.reshape(torch.Size(prior.batch_shape) + (self.num_elements, anchor.shape[-1]))

    def initial(self, value: Tensor, scale: float | Tensor, anchor: Tensor | None = None) -> Tensor:
        start = self._start.to(device=value.device)
        return start if anchor is None else torch.zeros_like(start)

    def elements(self, params: Tensor, anchor: Tensor | None = None) -> Distribution:
        row, given = self._row, None
        anchor = self._or_default(anchor)
        if anchor is not None:
            prior, given = self._split(anchor.to(params))
            params = params + prior
        raw = [params] if row.vector else params.unbind(-1)
        parameters = {name: link.of_raw(part) for (name, link), part in zip(row.links.items(), raw)}
        if row.given is not None:
            assert given is not None
            parameters[row.given] = given.squeeze(-1)
        make: Any = row.make or self._kind
        return make(**parameters, validate_args=False)

    def _or_default(self, anchor: Tensor | None) -> Tensor | None:
        if anchor is not None or self._row.given is None:
            return anchor
        return pad(self._given, (self.num_params, 0))

    def _raw_of(self, leaf: Any) -> Tensor:
        """Returns raw parameters of a distribution of this type, then what factors take over, ``(*batch, k + 1)``."""
        row = self._row
        # in a range where a prior that excludes a value has finite gradients
        parts = [
            within(link.raw_of(getattr(leaf, name)), -RANGE, RANGE)
            for name, link in row.links.items()
        ]
        raw = parts[0] if row.vector else torch.stack(torch.broadcast_tensors(*parts), -1)
        if row.given is None:
            return raw
        given = torch.as_tensor(getattr(leaf, row.given)).to(raw).expand(leaf.batch_shape)
        return torch.cat([raw, given.unsqueeze(-1)], -1)

    def _split(self, anchor: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the raw parameters of an anchor, and what factors take over, ``(..., 1)`` or ``(..., 0)``."""
        raw, given = anchor.tensor_split([self.num_params], -1)
        return raw, given

    @property
    def _row(self) -> Row:
        return TYPES[self._kind]
