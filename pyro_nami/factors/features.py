"""What the network reads of an observed site: the same numbers as of a latent one, from its support and type alone."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import NanMaskedMultivariateNormal, NanMaskedNormal, constraints
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.factors.bijections import has_tensor_bounds, support_of
from pyro_nami.factors.layout import Layout, UnconstrainedLayout
from pyro_nami.factors.types import type_of
from pyro_nami.factors.wrappers import innermost

__all__ = ["ObservedLayout", "features_of"]


class ObservedLayout(UnconstrainedLayout):
    """The layout of an observed value of any dtype; NaN is read as 0, and marked by a second feature if so wanted."""

    def __init__(self, *args: Any, dtype: torch.dtype, marks_nan: bool) -> None:
        super().__init__(*args)
        self.dtype, self.marks_nan, self.num_features = dtype, marks_nan, 1 + marks_nan

    def elements(self, value: Tensor) -> Tensor:
        return super().elements(value.to(self.dtype))

    def element_features(self, elements: Tensor) -> Tensor:
        features = super().element_features(elements)
        return torch.cat((features, elements.isnan().to(features).unsqueeze(-1)), -1) if self.marks_nan else features


def features_of(name: str, prior: Distribution, value: Tensor) -> Layout:
    """Returns the layout of an observed site, which says what is read of its values.

    Bounds that are tensors may depend on latents (``Uniform(0, hi)`` as a likelihood), so they are not used: such a
    site, and one whose support has no bijection, is read as it is.

    Args:
        name: of the site, for messages.
        prior: the distribution at the site in the prototype run.
        value: observed there, ``(*batch, *event)``; ValueError if it does not end in the event shape.
    """
    event_shape, support, leaf = torch.Size(prior.event_shape), support_of(prior), innermost(prior)
    if value.shape[value.dim() - len(event_shape) :] != event_shape:
        raise ValueError(
            f'Expected the value of site "{name}" to end in its event shape {tuple(event_shape)}; '
            f"got {tuple(value.shape)}"
        )
    dtype = value.dtype if value.is_floating_point() else _parameter_dtype(leaf)
    if support.is_discrete:
        num_classes = leaf.logits.shape[-1] if type_of(leaf).classes else None  # type: ignore[attr-defined]
        return Layout(support, event_shape, value, num_classes=num_classes, dtype=dtype)
    marks_nan = isinstance(leaf, (NanMaskedNormal, NanMaskedMultivariateNormal))
    try:
        support = constraints.real if has_tensor_bounds(support) else support
        return ObservedLayout(support, event_shape, value, dtype=dtype, marks_nan=marks_nan)
    except NotImplementedError:
        return ObservedLayout(constraints.real, event_shape, value, dtype=dtype, marks_nan=False)


def _parameter_dtype(prior: Distribution) -> torch.dtype:
    """Returns the dtype of the parameters of a discrete distribution, else the default one."""
    for parameter in getattr(prior, "arg_constraints", {}):
        candidate = prior.__dict__.get(parameter)
        if isinstance(candidate, Tensor) and candidate.is_floating_point():
            return candidate.dtype
    return torch.get_default_dtype()
