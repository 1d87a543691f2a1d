"""Bijections from unconstrained space to every support that a factor can have. None is registered globally."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from pyro.distributions import constraints
from pyro.distributions.transforms import CholeskyTransform
from torch import Tensor
from torch.distributions import Distribution, biject_to, transforms
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import Transform
from torch.distributions.utils import tril_matrix_to_vec
from torch.nn.functional import pad

from pyro_nami.factors.links import within

__all__ = [
    "LogCholeskyTransform",
    "NearlyIdentity",
    "bijection_to",
    "detached_support",
    "has_tensor_bounds",
    "interior",
    "is_interval",
    "peel_support",
    "peel_transform",
    "support_of",
    "support_on",
]


def bijection_to(support: Constraint, of_normal: bool = False) -> Transform:
    """Returns a bijection from unconstrained space to `support`.

    This is Pyro's ``biject_to(support)`` where that exists, but between far bounds `NearlyIdentity`. Besides:
    ``lower_cholesky`` (and its softplus kin) by the logarithm of the diagonal, ``positive_definite`` through its
    Cholesky factor, and mixtures by the support of their components.

    Args:
        support: of the values.
        of_normal: whether intervals have the bijection that takes Normal variables to uniform ones.

    Raises:
        NotImplementedError: no bijection is known (discrete supports, spheres, ...).

    Example:
        >>> bijection_to(constraints.positive)(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 2.7183])
        >>> bijection_to(constraints.interval(0.0, 4.0), of_normal=True)(torch.tensor([-1.0, 0.0])) / 4
        tensor([0.1587, 0.5000])
    """
    base, ndims = peel_support(support)
    bijection = _base_bijection(base, of_normal)
    return transforms.IndependentTransform(bijection, ndims) if ndims else bijection


def is_interval(support: Constraint) -> bool:
    """Whether values are numbers between two bounds, or tensors of such."""
    return isinstance(
        peel_support(support)[0], (constraints.interval, constraints.half_open_interval)
    )


def peel_support(support: Constraint) -> tuple[Constraint, int]:
    """Returns the support below all ``independent`` wrappers and how many dims these reinterpret in total.

    ``positive_ordered_vector`` declares event dim 0 but takes one: the dim that a wrapper adds for it does not count.
    """
    ndims = 0
    while isinstance(support, constraints.independent):
        ndims += support.reinterpreted_batch_ndims
        support = support.base_constraint
    if type(support) is type(constraints.positive_ordered_vector):
        ndims = max(ndims - 1, 0)
    return support, ndims


def peel_transform(transform: Transform) -> Transform:
    """Returns the transform below all ``IndependentTransform`` wrappers."""
    while isinstance(transform, transforms.IndependentTransform):
        transform = transform.base_transform
    return transform


def support_of(distribution: Distribution) -> Constraint:
    """Returns the support of a distribution; raises NotImplementedError where it declares none."""
    support = distribution.support
    if support is None:
        raise NotImplementedError(
            f"Expected a distribution with a support; got {type(distribution).__name__}"
        )
    return support


def support_on(support: Constraint, event_dim: int) -> Constraint:
    """Returns `support` with wrappers such that its check takes exactly `event_dim` dims from the right."""
    base, _ = peel_support(support)
    base_dim = 1 if type(base) is type(constraints.positive_ordered_vector) else base.event_dim
    ndims = event_dim - base_dim
    return constraints.independent(base, ndims) if ndims > 0 else base


def has_tensor_bounds(support: Any) -> bool:
    """Whether a support, or a part of it, holds tensors, so that it may differ between calls (``Uniform(0, hi)``)."""
    if isinstance(support, Constraint):
        support = list(vars(support).values())
    if isinstance(support, (list, tuple)):
        return any(map(has_tensor_bounds, support))
    return isinstance(support, Tensor)


def detached_support(value: Any) -> Any:
    """Returns a support (or a part of it) with its tensors cut from autograd, so that it can be kept and pickled."""
    if not has_tensor_bounds(value):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return type(value)(map(detached_support, value))
    new = copy.copy(value)
    new.__dict__.update({key: detached_support(item) for key, item in vars(value).items()})
    return new


def interior(support: Constraint, value: Tensor) -> Tensor:
    """Returns `value` moved off the boundary of an open or half-open support, by a few units in the last place.

    There inverse transforms are finite, and so are gradients of logarithms. A distance of zero to a bound becomes one
    whose inverse is far from the dtype's largest number; values without an upper bound end at the root of that number.
    Other values stay.
    """
    base, _ = peel_support(support)
    if base is constraints.real or base.is_discrete or not value.is_floating_point():
        return value
    finfo = torch.finfo(value.dtype)
    # the latter of each for float16
    least, most = min(finfo.tiny * 2**26, finfo.eps**2), max(finfo.max**0.5, 1e4)
    if isinstance(base, type(constraints.simplex)):  # a copied guide has a copy of it
        return within(value, least)
    low, high = getattr(base, "lower_bound", None), getattr(base, "upper_bound", None)
    if low is not None:
        low = low + (finfo.eps * abs(low) + least)
    if high is not None:
        high = high - (finfo.eps * abs(high) + least)
    elif low is not None and not isinstance(low, Tensor):
        high = max(most, 2 * low)
    return within(value, low, high)


class LogCholeskyTransform(Transform):
    """Maps a real vector to a lower triangular matrix of size ``n`` with a positive diagonal.

    The vector holds the entries from the diagonal on down, row by row, but the logarithms of the diagonal. Densities of
    matrices are those of their free lower triangular entries.

    Example:
        >>> LogCholeskyTransform()(torch.tensor([0.0, 5.0, 0.0]))
        tensor([[1., 0.],
                [5., 1.]])
    """

    domain = constraints.real_vector
    codomain = constraints.lower_cholesky
    bijective = True

    def _call(self, x: Tensor) -> Tensor:
        length = x.shape[-1]
        size = round((0.25 + 2 * length) ** 0.5 - 0.5)
        # Gathered, never written in place: score-function terms follow the values.
        place = torch.full((size, size), length, device=x.device)
        row, column = torch.tril_indices(size, size, device=x.device)
        place[row, column] = torch.arange(length, device=x.device)
        lower = pad(x, (0, 1))[..., place]
        return lower.tril(-1) + lower.diagonal(dim1=-2, dim2=-1).exp().diag_embed()

    def _inverse(self, y: Tensor) -> Tensor:
        lower = y.tril(-1) + y.diagonal(dim1=-2, dim2=-1).log().diag_embed()
        return tril_matrix_to_vec(lower)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the log determinant ``(*batch,)``: the sum of the log diagonal."""
        return y.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def inverse_shape(self, shape: tuple[int, ...]) -> torch.Size:
        return torch.Size((*shape[:-2], shape[-1] * (shape[-1] + 1) // 2))


class NearlyIdentity(Transform):
    """Takes the real line to numbers between two bounds, one on either side of zero: b tanh(x / b) with the nearer b.

    Between far bounds, as those of flat priors, it leaves numbers of size one as they are. A logistic function would
    stretch them by a quarter of the width, and steps and first scales that suit unit numbers with them.

    Example:
        >>> NearlyIdentity(-1000.0, 500.0)(torch.tensor([-2.0, 0.0, 1.0, 1e6]))
        tensor([ -2.0000,   0.0000,   1.0000, 500.0000])
    """

    domain = constraints.real
    bijective, sign = True, 1

    def __init__(self, low: Any, high: Any) -> None:
        super().__init__()
        self.low, self.high = low, high
        self.codomain = constraints.interval(low, high)

    @staticmethod
    def suits(support: Any) -> bool:
        """Whether an interval holds all numbers of size one."""
        low, high = (torch.as_tensor(each) for each in (support.lower_bound, support.upper_bound))
        return bool(((low < -1) & (high > 1)).all())

    def _bound(self, x: Tensor) -> Tensor:
        low, high = (torch.as_tensor(each).to(x) for each in (self.low, self.high))
        return torch.where(x < 0, -low, high)

    def _call(self, x: Tensor) -> Tensor:
        bound = self._bound(x)
        return bound * (x / bound).tanh()

    def _inverse(self, y: Tensor) -> Tensor:
        bound = self._bound(y)
        return bound * (y / bound).atanh()

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        bound = self._bound(x)
        return transforms.TanhTransform().log_abs_det_jacobian(x / bound, y / bound)


class _NormalCDF(Transform):
    """torch's `CumulativeDistributionTransform` of a standard Normal, but right in the lower tail."""

    domain, codomain = constraints.real, constraints.unit_interval
    bijective, sign = True, 1

    def _call(self, x: Tensor) -> Tensor:
        return torch.special.ndtr(x)

    def _inverse(self, y: Tensor) -> Tensor:
        return torch.special.ndtri(y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return -0.5 * (x * x + math.log(2 * math.pi))


def _base_bijection(support: Any, of_normal: bool) -> Transform:
    if isinstance(support, type(constraints.lower_cholesky)):
        return LogCholeskyTransform()
    if isinstance(
        support, (type(constraints.positive_definite), type(constraints.positive_semidefinite))
    ):
        return transforms.ComposeTransform([LogCholeskyTransform(), CholeskyTransform().inv])
    if isinstance(support, constraints.cat):
        return transforms.CatTransform(
            [bijection_to(part) for part in support.cseq], support.dim, support.lengths
        )
    if isinstance(support, constraints.stack):
        return transforms.StackTransform([bijection_to(part) for part in support.cseq], support.dim)
    if type(support).__name__ == "MixtureSameFamilyConstraint" and not has_tensor_bounds(support):
        return bijection_to(support.base_constraint)
    if is_interval(support):
        low, high = support.lower_bound, support.upper_bound
        if of_normal:
            to_interval = transforms.AffineTransform(low, high - low)
            return transforms.ComposeTransform([_NormalCDF(), to_interval])
        if NearlyIdentity.suits(support):
            return NearlyIdentity(low, high)
    return biject_to(support)
