"""Distributions that define little more than ``log_prob``, completed by assumptions about what they leave out.

Pyro's guides ask an observed site for its log density only, so nothing else may be required.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro.distributions import TorchDistribution, constraints
from pyro.distributions.torch_distribution import ExpandedDistribution, TorchDistributionMixin
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.constraints import Constraint

from pyro_nami.factors.bijections import support_on
from pyro_nami.factors.wrappers import base_of

__all__ = ["completed", "constraints_of_parameters", "is_support_unknown"]


def completed(fn: Any) -> Any:
    """Returns a distribution that has a support and Pyro's methods: itself if it does, else a wrapper around it.

    A support that it does not define, or raises at, is taken to be real.

    Example:
        >>> class Partial(TorchDistribution):
        ...     def log_prob(self, value):
        ...         return -value.abs()
        >>> completed(Partial(validate_args=False)).support
        Real()
    """
    if not isinstance(fn, Distribution):
        return fn
    support = _support_or_none(fn)
    return (
        fn
        if support is not None and isinstance(fn, TorchDistributionMixin)
        else _Completed(fn, support)
    )


def is_support_unknown(fn: Any) -> bool:
    """Whether the support of a completed distribution is real for want of another."""
    return isinstance(fn, _Completed) and fn.is_support_unknown


def constraints_of_parameters(fn: Distribution) -> dict[str, Any]:
    """Returns parameter -> its constraint, of the parameters that a distribution names; none if it names none."""
    try:
        return dict(fn.arg_constraints)
    except NotImplementedError:
        return {}


class _Completed(ExpandedDistribution):
    """A distribution at its own batch shape, with the support that it has or is taken to have."""

    def __init__(self, base: Distribution, support: Constraint | None) -> None:
        self.is_support_unknown = support is None
        real = support_on(constraints.real, len(base.event_shape))
        self._support = real if support is None else support
        super().__init__(base, base.batch_shape)

    @constraints.dependent_property
    def support(self) -> Constraint:
        return self._support

    # Unless it is expanded, draws and densities have the shapes that the distribution itself gives them.

    @property
    def _is_wide(self) -> bool:
        return self.batch_shape != base_of(self).batch_shape

    def _sample(
        self, sample_fn: Callable[[torch.Size], Tensor], sample_shape: torch.Size
    ) -> Tensor:
        return (
            super()._sample(sample_fn, sample_shape) if self._is_wide else sample_fn(sample_shape)
        )

    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value) if self._is_wide else base_of(self).log_prob(value)

    def score_parts(self, value: Tensor) -> Any:
        return TorchDistribution.score_parts(self, value)


def _support_or_none(fn: Distribution) -> Constraint | None:
    try:
        return fn.support
    except Exception:  # noqa: BLE001  whatever a property that nobody else reads may raise
        return None
