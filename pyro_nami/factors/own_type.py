"""Families of the model's own type, each a row of the table: for ``"match"``, discrete and relaxed sites."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.factors.elements import Elements, OwnElements
from pyro_nami.factors.family import Family
from pyro_nami.factors.features import code_of, encode
from pyro_nami.factors.types import TYPES, OwnType
from pyro_nami.factors.wrappers import innermost, through_wrappers

__all__ = ["AdditiveFamily", "OwnTypeFamily"]

# Far beyond what a draw can show, and finite: a prior that excludes a value keeps finite gradients.
_RANGE = 100.0


class OwnTypeFamily(Family):
    """A factor of the prior's own type, with parameters by the link functions of its row.

    `initial` puts the mean or the median at the value and the spread as near the scale as the type allows (see each
    ``_start`` of the table); types with one parameter keep their spread. There is no anchor.

    Raises:
        NotImplementedError: no own type is known.

    Example:
        >>> prior = torch.distributions.Gamma(torch.tensor(2.0), torch.tensor(1.0))
        >>> family = OwnTypeFamily("z", prior, torch.tensor(1.5))
        >>> family.distribution(family.initial(torch.tensor(1.5), 0.1)).event_shape, family.num_params
        (torch.Size([]), 2)
    """

    dtype: torch.dtype

    def __init__(self, name: str, prior: Distribution, value: Tensor) -> None:
        leaf = innermost(prior)
        kind = next((kind for kind in type(leaf).__mro__ if kind in TYPES and TYPES[kind].own), None)
        if kind is None:
            known = ", ".join(sorted({kind.__name__ for kind, row in TYPES.items() if row.own and row.own.start}))
            raise NotImplementedError(
                f'Expected at site "{name}" one of the types {known} for the family "match"; got '
                f'{type(leaf).__name__}. Give the site the family "normal", or add one with register_family.'
            )
        self._kind = kind  # the key, not the row: functions in it do not pickle
        self.element_ndims, self.layout_type = len(leaf.event_shape), self._own.layout_type
        super().__init__(name, prior, value)
        self._code = code_of(prior)
        self.has_rsample = leaf.has_rsample
        entries = (leaf.event_shape or leaf.logits.shape)[-1] if self._own.num_params is None else 1  # type: ignore
        self.num_params = self._own.num_params or entries
        self.num_features = entries - 1 if self._code == "real" and self.element_ndims else entries

    def element_features(self, elements: Tensor) -> Tensor:
        if self._code == "real":
            return super().element_features(elements)
        features = encode(elements, self._code, self.num_features, self.dtype)
        return features.squeeze(-1) if self.element_ndims else features  # a one-hot vector is one element

    def initial(self, value: Tensor, scale: float | Tensor, anchor: Tensor | None = None) -> Tensor:
        elements = self.layout.elements(value)
        shape = elements.shape[: elements.dim() - self.element_ndims]
        scale = torch.as_tensor(scale, dtype=value.dtype, device=value.device).expand(shape)
        assert self._own.start is not None
        return self._stacked(self._own.start(elements, scale))

    def elements(self, params: Tensor, anchor: Tensor | None = None) -> Elements:
        return self._make(params)

    def _make(self, params: Tensor, *given: Tensor) -> Elements:
        own = self._own
        parameters = dict(own.parameters(*([params] if own.num_params is None else params.unbind(-1))))
        if own.given:
            (parameters[own.given],) = given
        if issubclass(own.make, Elements):
            return own.make(**parameters)
        return OwnElements(own.make(**parameters, validate_args=False))

    def _stacked(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns raw parameters ``(*batch, E, k)`` of the tensors of a row; see `OwnType`."""
        return parts[0] if self._own.num_params is None else torch.stack(torch.broadcast_tensors(*parts), -1)

    @property
    def _own(self) -> OwnType:
        own = TYPES[self._kind].own
        assert own is not None
        return own


class AdditiveFamily(OwnTypeFamily):
    """Parameters of the own type = the prior's + the network's: a network output of zero is the prior.

    So `initial` ignores the value and starts from the prior; without an anchor, from the prototype's, averaged over its
    batch. Behind the prior's raw parameters the anchor has what the factor takes over as it is (a total count, a
    temperature).
    """

    def __init__(self, name: str, prior: Distribution, value: Tensor) -> None:
        super().__init__(name, prior, value)
        self.varies = self.varies or self._own.given is not None
        with torch.no_grad():
            raw = self._raw(prior)
            self.dtype = raw.dtype
            given = self._given(prior)
        self._start = raw.reshape((-1,) + raw.shape[-2:]).mean(0)
        self.default_anchor = None if given is None else self._with_zeros(_without_equal_rows(given))

    def at(self, prior: Distribution) -> Family:
        moved = super().at(prior)
        if moved is not self:
            given = self._given(prior)
            moved.default_anchor = None if given is None else self._with_zeros(given)
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
        return self._make(anchor[..., : self.num_params] + params, *anchor[..., self.num_params :].unbind(-1))

    def _raw(self, prior: Distribution) -> Tensor:
        """Returns the prior's raw parameters ``(*batch, E, k)``."""
        of_prior = self._own.of_prior
        assert of_prior is not None
        raw = through_wrappers(prior, lambda leaf: self._stacked(of_prior(leaf))).clamp(-_RANGE, _RANGE)
        return raw.reshape(torch.Size(prior.batch_shape) + (self.num_elements, self.num_params))

    def _given(self, prior: Distribution) -> Tensor | None:
        """Returns what the factor takes over from the prior as it is, ``(*batch, E, 1)``."""
        name = self._own.given
        if name is None:
            return None
        given = through_wrappers(prior, lambda leaf: torch.as_tensor(getattr(leaf, name)).expand(leaf.batch_shape))
        return given.reshape(torch.Size(prior.batch_shape) + (self.num_elements, 1)).to(self.dtype)

    def _with_zeros(self, given: Tensor) -> Tensor:
        """Returns the anchor ``(*batch, E, k + 1)`` that adds nothing."""
        return torch.cat([given.new_zeros(given.shape[:-1] + (self.num_params,)), given], -1)


def _without_equal_rows(given: Tensor) -> Tensor:
    """Returns ``(E, 1)`` where ``(*batch, E, 1)`` is equal over the batch: plates may then change size."""
    rows = given.reshape((-1,) + given.shape[-2:])
    return rows[0] if len(rows) and (rows == rows[0]).all() else given
