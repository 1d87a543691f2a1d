"""What the network reads of an observed site: the same numbers as of a latent one, from the support alone."""

from __future__ import annotations

from dataclasses import dataclass

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import one_hot

from pyro_nami.factors.anchors import innermost
from pyro_nami.factors.base import finite
from pyro_nami.factors.bijections import has_tensor_bounds, support_of
from pyro_nami.factors.layout import Layout, OwnLayout, UnconstrainedLayout

__all__ = ["SiteFeatures", "features_of"]


@dataclass(frozen=True)
class SiteFeatures:
    """Features of one observed site: E elements with f features each.

    Attributes:
        num_elements: E.
        num_features: f.
        kind: ``"real"`` (unconstrained), ``"class"`` (one-hot code), ``"binary"`` or ``"count"`` (signed log1p).
        layout: of the value as elements.
        dtype: of the features.
        marks_nan: whether a last feature of each element says that it is NaN.
    """

    num_elements: int
    num_features: int
    kind: str
    layout: Layout
    dtype: torch.dtype
    marks_nan: bool = False

    def features(self, value: Tensor) -> Tensor:
        """Returns finite features ``(*batch, E, f)`` of a value ``(*batch, *event)``; NaN is read as 0."""
        if self.kind == "class":
            return one_hot(self.layout.elements(value).long(), self.num_features).to(self.dtype)
        elements = self.layout.elements(value.to(self.dtype))
        if self.kind == "count":
            elements = elements.sign() * elements.abs().log1p()
        features = finite(elements).unsqueeze(-1)
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
    leaf, support, event_shape = innermost(prior), support_of(prior), torch.Size(prior.event_shape)
    _check_shape(name, event_shape, value)
    plain = OwnLayout(support, event_shape)
    dtype = value.dtype if value.is_floating_point() else _parameter_dtype(leaf)
    if isinstance(leaf, torch.distributions.Categorical):
        return SiteFeatures(plain.num_elements, leaf.logits.shape[-1], "class", plain, dtype)
    base = support
    while isinstance(base, dist.constraints.independent):
        base = base.base_constraint
    if base.is_discrete:
        binary = base is dist.constraints.boolean or base is dist.constraints.one_hot
        return SiteFeatures(plain.num_elements, 1, "binary" if binary else "count", plain, dtype)
    if not has_tensor_bounds(support):
        try:
            layout = UnconstrainedLayout(support, event_shape, value)
        except NotImplementedError:
            pass
        else:
            marks_nan = isinstance(leaf, (dist.NanMaskedNormal, dist.NanMaskedMultivariateNormal))
            return SiteFeatures(layout.num_elements, 1 + marks_nan, "real", layout, dtype, marks_nan)
    free = UnconstrainedLayout(dist.constraints.real, event_shape, value)
    return SiteFeatures(free.num_elements, 1, "real", free, dtype)


def _check_shape(name: str, event_shape: torch.Size, value: Tensor) -> None:
    if value.shape[value.dim() - len(event_shape) :] != event_shape:
        raise ValueError(
            f'Expected the value of site "{name}" to end in its event shape {tuple(event_shape)}; '
            f"got {tuple(value.shape)}"
        )


def _parameter_dtype(prior: Distribution) -> torch.dtype:
    """Returns the dtype of the parameters of a discrete distribution, else the default one."""
    for parameter in getattr(prior, "arg_constraints", {}):
        candidate = prior.__dict__.get(parameter)
        if isinstance(candidate, Tensor) and candidate.is_floating_point():
            return candidate.dtype
    return torch.get_default_dtype()
