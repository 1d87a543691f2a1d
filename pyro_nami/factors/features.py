"""What the network reads of a value: finite numbers, by the support of its site and, for classes, its type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pyro.distributions import NanMaskedMultivariateNormal, NanMaskedNormal, constraints
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.constraints import Constraint
from torch.nn.functional import one_hot

from pyro_nami.factors.bijections import has_tensor_bounds, peel_support, support_of
from pyro_nami.factors.family import finite
from pyro_nami.factors.layout import Layout, UnconstrainedLayout
from pyro_nami.factors.types import type_of
from pyro_nami.factors.wrappers import innermost

__all__ = ["SiteFeatures", "code_of", "encode", "features_of"]


def code_of(prior: Distribution) -> str:
    """Returns how values are read: as ``"class"``, ``"binary"``, ``"count"`` or ``"real"``."""
    support, _ = peel_support(support_of(prior))
    if type_of(prior).classes:
        return "class"
    if support is constraints.boolean or support is constraints.one_hot:
        return "binary"
    return "count" if support.is_discrete else "real"


def encode(elements: Tensor, code: str, num_classes: int, dtype: torch.dtype) -> Tensor:
    """Returns the features ``(*batch, E, f)`` of elements ``(*batch, E)``.

    A class is read as its one-hot code, a count as sign(x) log(1 + abs(x)), all else as it is; NaN is read as 0.

    Example:
        >>> encode(torch.tensor([2]), "class", 3, torch.float32)
        tensor([[0., 0., 1.]])
    """
    if code == "class":
        return one_hot(elements.long(), num_classes).to(dtype)
    elements = elements.to(dtype)
    if code == "count":
        elements = elements.sign() * elements.abs().log1p()
    return finite(elements).unsqueeze(-1)


@dataclass(frozen=True)
class SiteFeatures:
    """Features of one observed site: E elements with f features each.

    Attributes:
        num_elements: E.
        num_features: f.
        code: as from `code_of`.
        layout: of the value as elements.
        dtype: of the features.
        marks_nan: whether a last feature of each element says that it is NaN.
    """

    num_elements: int
    num_features: int
    code: str
    layout: Layout
    dtype: torch.dtype
    marks_nan: bool = False

    def features(self, value: Tensor) -> Tensor:
        """Returns finite features ``(*batch, E, f)`` of a value ``(*batch, *event)``; NaN is read as 0."""
        elements = self.layout.elements(value if self.code == "class" else value.to(self.dtype))
        features = encode(elements, self.code, self.num_features, self.dtype)
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
    leaf, event_shape, code = innermost(prior), torch.Size(prior.event_shape), code_of(prior)
    if value.shape[value.dim() - len(event_shape) :] != event_shape:
        raise ValueError(
            f'Expected the value of site "{name}" to end in its event shape {tuple(event_shape)}; '
            f"got {tuple(value.shape)}"
        )
    dtype = value.dtype if value.is_floating_point() else _parameter_dtype(leaf)
    layout = _layout(support_of(prior), event_shape, value)
    num_features = leaf.logits.shape[-1] if code == "class" else 1  # type: ignore[attr-defined]
    marks_nan = isinstance(leaf, (NanMaskedNormal, NanMaskedMultivariateNormal))
    return SiteFeatures(layout.num_elements, num_features + marks_nan, code, layout, dtype, marks_nan)


def _layout(support: Constraint, event_shape: torch.Size, value: Tensor) -> Layout:
    if support.is_discrete:
        return Layout(support, event_shape, value)
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
