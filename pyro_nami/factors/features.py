"""What the network reads of an observed site: the same numbers as of a latent one, from its support and type alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions import NanMaskedMultivariateNormal, NanMaskedNormal, constraints
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.factors.bijections import has_tensor_bounds, support_of
from pyro_nami.factors.layout import DiscreteLayout, Layout, UnconstrainedLayout
from pyro_nami.factors.types import type_of
from pyro_nami.factors.wrappers import innermost

__all__ = ["SiteFeatures", "features_of"]


@dataclass(frozen=True)
class SiteFeatures:
    """Features of one observed site: E elements with f features each.

    Attributes:
        layout: of the value as elements.
        dtype: of the features.
        marks_nan: whether a last feature of each element says that it is NaN.
    """

    layout: Layout
    dtype: torch.dtype
    marks_nan: bool

    @property
    def num_elements(self) -> int:
        return self.layout.num_elements

    @property
    def num_features(self) -> int:
        return self.layout.num_features + self.marks_nan

    def features(self, value: Tensor) -> Tensor:
        """Returns finite features ``(*batch, E, f)`` of a value ``(*batch, *event)``; NaN is read as 0."""
        elements = self.layout.elements(value if self.layout.support.is_discrete else value.to(self.dtype))
        features = self.layout.features(elements)
        return torch.cat((features, elements.isnan().to(features).unsqueeze(-1)), -1) if self.marks_nan else features


def features_of(name: str, prior: Distribution, value: Tensor) -> SiteFeatures:
    """Returns the features of an observed site.

    Bounds that are tensors may depend on latents (``Uniform(0, hi)`` as a likelihood), so they are not used: such a
    site, and one whose support has no bijection, is read as it is.

    Args:
        name: of the site, for messages.
        prior: the distribution at the site in the prototype run.
        value: observed there, ``(*batch, *event)``.

    Raises:
        ValueError: the value does not end in the event shape.
    """
    leaf, event_shape = innermost(prior), torch.Size(prior.event_shape)
    if value.shape[value.dim() - len(event_shape) :] != event_shape:
        raise ValueError(
            f'Expected the value of site "{name}" to end in its event shape {tuple(event_shape)}; '
            f"got {tuple(value.shape)}"
        )
    dtype = value.dtype if value.is_floating_point() else _parameter_dtype(leaf)
    marks_nan = isinstance(leaf, (NanMaskedNormal, NanMaskedMultivariateNormal))
    return SiteFeatures(_layout(prior, event_shape, value, dtype), dtype, marks_nan)


def _layout(prior: Distribution, event_shape: torch.Size, value: Tensor, dtype: torch.dtype) -> Layout:
    support = support_of(prior)
    if support.is_discrete:
        leaf: Any = innermost(prior)
        num_classes = leaf.logits.shape[-1] if type_of(leaf).classes else None
        return DiscreteLayout(support, event_shape, value, num_classes=num_classes, dtype=dtype)
    if not has_tensor_bounds(support):
        try:
            return UnconstrainedLayout(support, event_shape, value)
        except NotImplementedError:
            pass
    return UnconstrainedLayout(constraints.real, event_shape, value)


def _parameter_dtype(prior: Distribution) -> torch.dtype:
    """Returns the dtype of the parameters of a discrete distribution, else the default one."""
    for parameter in getattr(prior, "arg_constraints", {}):
        candidate = prior.__dict__.get(parameter)
        if isinstance(candidate, Tensor) and candidate.is_floating_point():
            return candidate.dtype
    return torch.get_default_dtype()
