"""Families of the model's own distribution type: of discrete and relaxed sites, and the family ``"match"``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.factors.elements import Elements, OwnElements
from pyro_nami.factors.family import Family
from pyro_nami.factors.types import TYPES, Row
from pyro_nami.factors.wrappers import innermost, through_wrappers

__all__ = ["AdditiveFamily", "OwnTypeFamily"]

# Far beyond what a draw can show, and finite: a prior that excludes a value keeps finite gradients.
_RANGE = 100.0


class OwnTypeFamily(Family):
    """A factor of the prior's own type: its parameters are link functions of raw ones. There is no anchor.

    `initial` puts mean or median at the value, and the spread near the scale unless there is but one parameter.

    Example:
        >>> prior = torch.distributions.Gamma(torch.tensor(2.0), torch.tensor(1.0))
        >>> OwnTypeFamily("z", prior, torch.tensor(1.5)).initial(torch.tensor(1.5), 0.1).shape
        torch.Size([1, 2])
    """

    def __init__(self, name: str, prior: Distribution, value: Tensor) -> None:
        leaf: Any = innermost(prior)
        kind = next(
            (kind for kind in type(leaf).__mro__ if kind in TYPES and TYPES[kind].make), None
        )
        if kind is None:
            known = ", ".join(sorted({kind.__name__ for kind, row in TYPES.items() if row.start}))
            raise NotImplementedError(
                f'Expected at site "{name}" one of the types {known} for the family "match"; got '
                f'{type(leaf).__name__}. Give the site the family "normal", or add one with register_family.'
            )
        self._kind = kind  # the key, not the row: functions in it do not pickle
        self.num_params = (
            (leaf.event_shape or leaf.logits.shape)[-1]
            if self._row.vector
            else len(self._row.links)
        )
        self.has_rsample = leaf.has_rsample
        options: dict[str, Any] = {"element_ndims": len(leaf.event_shape)}
        if leaf.support.is_discrete:
            num_classes = self.num_params if self._row.classes else None
            options.update(num_classes=num_classes, dtype=self._raw_of(leaf).dtype)
        self.layout_type = functools.partial(self._row.layout_type, **options)
        super().__init__(name, prior, value)
        self.num_features = self.layout.num_features

    def initial(self, value: Tensor, scale: float | Tensor, anchor: Tensor | None = None) -> Tensor:
        elements = self.layout.elements(value)
        shape = elements.shape[: elements.dim() - len(self.layout.element_shape)]
        scale = torch.as_tensor(scale, dtype=value.dtype, device=value.device).expand(shape)
        assert self._row.start is not None
        return self._stacked(self._row.start(elements, scale))

    def elements(self, params: Tensor, anchor: Tensor | None = None) -> Elements:
        return self._make(params)

    def _make(self, params: Tensor, *given: Tensor) -> Elements:
        row = self._row
        raw = [params] if row.vector else params.unbind(-1)
        parameters = {name: link.of_raw(part) for (name, link), part in zip(row.links.items(), raw)}
        if row.given is not None:
            (parameters[row.given],) = given
        assert row.make is not None
        if isinstance(row.make, type) and issubclass(row.make, Elements):
            return row.make(**parameters)
        return OwnElements(row.make(**parameters, validate_args=False))  # type: ignore[call-arg, arg-type]

    def _raw_of(self, leaf: Any) -> Tensor:
        """Returns the raw parameters ``(*batch, k)`` of a distribution of this type."""
        return self._stacked(
            [link.raw_of(getattr(leaf, name)) for name, link in self._row.links.items()]
        )

    def _stacked(self, raw: Sequence[Tensor]) -> Tensor:
        return raw[0] if self._row.vector else torch.stack(torch.broadcast_tensors(*raw), -1)

    @property
    def _row(self) -> Row:
        return TYPES[self._kind]


class AdditiveFamily(OwnTypeFamily):
    """A factor of the prior's own type at raw parameters = the prior's + the network's: at zero it is the prior.

    So `initial` starts from the prior, whatever the value; without an anchor, from the prototype's, averaged over its
    batch. Behind the raw parameters the anchor has what the factor takes over (a total count, a temperature).

    Example:
        >>> prior = torch.distributions.Poisson(torch.tensor(2.0))
        >>> family = AdditiveFamily("n", prior, torch.tensor(1.0))
        >>> family.elements(torch.tensor([[3.0]]).log(), family.anchor(prior)).distribution.mean.round()  # 2 * 3
        tensor([6.])
    """

    def __init__(self, name: str, prior: Distribution, value: Tensor) -> None:
        super().__init__(name, prior, value)
        self.varies = self.varies or self._row.given is not None
        with torch.no_grad():
            raw = self._raw(prior)
            self._start = raw.reshape((-1,) + raw.shape[-2:]).mean(0)
            given = self._given(prior)
        if given is not None:
            rows = given.reshape((-1,) + given.shape[-2:])
            equal = len(rows) and (rows == rows[0]).all()
            # if equal, plates may change size
            self.default_anchor = self._with_zeros(rows[0] if equal else given)

    def at(self, prior: Distribution) -> Family:
        moved = super().at(prior)
        given = self._given(prior)
        if given is not None:
            moved.default_anchor = self._with_zeros(given)
        return moved

    def anchor(self, prior: Distribution) -> Tensor:
        raw, given = self._raw(prior), self._given(prior)
        return raw if given is None else torch.cat([raw, given], -1)

    def initial(self, value: Tensor, scale: float | Tensor, anchor: Tensor | None = None) -> Tensor:
        start = self._start.to(device=value.device)
        return start if anchor is None else torch.zeros_like(start)

    def elements(self, params: Tensor, anchor: Tensor | None = None) -> Elements:
        anchor = self._or_default(anchor)
        if anchor is None:
            return self._make(params)
        anchor = anchor.to(params)
        return self._make(
            anchor[..., : self.num_params] + params, *anchor[..., self.num_params :].unbind(-1)
        )

    def _raw(self, prior: Distribution) -> Tensor:
        """Returns the prior's raw parameters ``(*batch, E, k)``."""
        raw = through_wrappers(prior, self._raw_of).clamp(-_RANGE, _RANGE)
        return raw.reshape(torch.Size(prior.batch_shape) + (self.num_elements, self.num_params))

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

    def _with_zeros(self, given: Tensor) -> Tensor:
        """Returns the anchor ``(*batch, E, k + 1)`` that adds nothing."""
        return torch.cat([given.new_zeros(given.shape[:-1] + (self.num_params,)), given], -1)
