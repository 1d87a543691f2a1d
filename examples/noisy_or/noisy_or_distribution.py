"""The noisy-OR of binary causes: an effect is absent if each active cause, and the leak, fails to bring it about."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from sparse_products import entries, is_sparse, sparse_linear
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import logsigmoid

from pyro_nami import Bound, register_bound

__all__ = ["NoisyOr", "NoisyOrDual"]


class NoisyOr(TorchDistribution):
    """Binary x given causes z: log p(x_i = 0 | z) = -a_i in nats, with rates a_i = leak_i + sum_k weights_ik z_k.

    A weight is -log(1 - p) where cause k alone, without leak, brings x_i about with probability p. Gradients flow into
    weights, leak and z, which may be relaxed. Sparse weights cost time and memory by their entries, not by D times K.
    Where x_i = 1 and a_i is zero (below the smallest normal number), log p is -inf, with gradient zero.

    Args:
        weights: ``(*batch, D, K)``, nonnegative: dense; or ``(D, K)``, a sparse COO or CSR tensor. Of values that learn
            make a COO tensor: torch's own derivative of making a CSR tensor fills a dense one.
        leak: ``(*batch, D)``, nonnegative.
        z: ``(*batch, K)``, in [0, 1].
        validate_args: whether to check these and values; None for torch's default.

    Attributes:
        rates: a, ``(*batch, D)``; `batch_shape` is what the batch shapes of the arguments broadcast to.

    Raises:
        ValueError: with validation, for negative weights or leak, z outside [0, 1] and shapes that do not match;
            by `log_prob` for values outside {0, 1}.

    References:
        Yan, Ailem & Sha 2019, Amortized Inference of Variational Bounds for Learning Noisy-OR, equations 4 to 6.

    Example:
        >>> x = NoisyOr(torch.tensor([[1.0, 0.0], [2.0, 3.0]]), torch.tensor([0.1, 0.2]), torch.tensor([0.0, 1.0]))
        >>> x.rates, x.log_prob(torch.tensor([0.0, 0.0]))
        (tensor([0.1000, 3.2000]), tensor(-3.3000))
    """

    # Of rates alone: they are what differs between instances, and weights may be sparse.
    arg_constraints = {"rates": constraints.independent(constraints.nonnegative, 1)}
    support = constraints.independent(constraints.boolean, 1)
    has_rsample = False
    rates: Tensor

    def __init__(
        self, weights: Tensor, leak: Tensor, z: Tensor, *, validate_args: bool | None = None
    ) -> None:
        if self._validate_args if validate_args is None else validate_args:
            _check(weights, leak, z)
        self.weights = weights
        self.leak = leak
        self.z = z
        z = z.to(weights.dtype)
        if is_sparse(weights):
            self.rates = leak + sparse_linear(z, weights)
        else:
            self.rates = leak + torch.einsum("...dk,...k->...d", weights, z)
        super().__init__(self.rates.shape[:-1], self.rates.shape[-1:], validate_args=validate_args)

    def __reduce__(self) -> Any:
        # Rates carry gradients, so they can be neither copied nor pickled; a copy has those of its own arguments.
        make = functools.partial(type(self), validate_args=False)
        return make, (self.weights, self.leak, self.z), {"_validate_args": self._validate_args}

    def __deepcopy__(self, memo: dict[int, Any]) -> NoisyOr:
        # which torch 2.13 cannot copy
        if self.weights.layout == torch.sparse_csr and self.weights.is_leaf:
            weights = self.weights.detach().clone().requires_grad_(self.weights.requires_grad)
            memo.setdefault(id(self.weights), weights)
        make, args, state = self.__reduce__()
        new = memo[id(self)] = make(*copy.deepcopy(args, memo))
        vars(new).update(state)
        return new

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> NoisyOr:
        new = self._get_checked_instance(NoisyOr, _instance)
        batch_shape = torch.Size(batch_shape)
        new.weights, new.leak, new.z = (
            self.weights,
            self.leak,
            self.z.expand(batch_shape + self.z.shape[-1:]),
        )
        new.rates = self.rates.expand(batch_shape + self.event_shape)
        super(NoisyOr, new).__init__(batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        """p(x_i = 1 | z), ``(*batch, D)``."""
        return -torch.expm1(-self.rates)

    @property
    def variance(self) -> Tensor:
        """p(x_i = 1 | z) p(x_i = 0 | z), ``(*batch, D)``."""
        return self.mean * torch.exp(-self.rates)

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Returns a draw ``(*sample_shape, *batch, D)``."""
        with torch.no_grad():
            return torch.bernoulli(self.mean.expand(self._extended_shape(torch.Size(sample_shape))))

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns log p(value | z) in nats, ``(*batch,)``."""
        if self._validate_args:
            self._validate_sample(value)
        present, possible = value != 0, self.rates >= torch.finfo(self.rates.dtype).tiny
        log_present = _log1mexp(self.rates.where(possible, 1.0))
        return torch.where(present, log_present.where(possible, -math.inf), -self.rates).sum(-1)

    def _validate_sample(self, value: Tensor) -> None:
        if value.shape[-1:] != self.event_shape:
            raise ValueError(
                f"Expected x of shape (*batch, {self.event_shape[0]}), as weights has rows; got {tuple(value.shape)}"
            )
        if not ((value == 0) | (value == 1)).all():
            raise ValueError(
                "Expected x in {0, 1}; got other numbers. Give counts as (x > 0), and 0 under a mask."
            )
        super()._validate_sample(value)


def _log1mexp(a: Tensor) -> Tensor:
    """Returns log(1 - exp(-a)) of positive normal numbers: to full precision, with finite gradients."""
    near = a < math.log(2.0)
    far_away = torch.log1p(-torch.exp(-a.where(~near, 1.0)))
    return torch.where(near, torch.log(-torch.expm1(-a.where(near, 1.0))), far_away)


def _check(weights: Tensor, leak: Tensor, z: Tensor) -> None:
    sparse = is_sparse(weights)
    is_dense = weights.layout == torch.strided and weights.dim() >= 2
    if not is_dense and not (sparse and weights.dim() == 2):
        raise ValueError(
            "Expected weights to be a dense tensor (*batch, D, K), or a sparse COO or CSR tensor (D, K); "
            f"got {weights.layout} of shape {tuple(weights.shape)}"
        )
    for name, tensor, axis, size in (
        ("leak", leak, "rows", weights.shape[-2]),
        ("z", z, "columns", weights.shape[-1]),
    ):
        if tensor.shape[-1:] != (size,):
            raise ValueError(
                f"Expected {name} of shape (*batch, {size}), as weights of shape {tuple(weights.shape)} has {axis}; "
                f"got {tuple(tensor.shape)}"
            )
    batches = [weights.shape[:-2], leak.shape[:-1], z.shape[:-1]]
    try:
        torch.broadcast_shapes(*batches)
    except RuntimeError:
        raise ValueError(
            "Expected batch shapes of weights, leak and z that broadcast; got "
            f"{', '.join(str(tuple(batch)) for batch in batches)}. Insert dims of size 1 for plates that one lacks."
        ) from None
    for name, tensor in ("weights", entries(weights)[0] if sparse else weights), ("leak", leak):
        if not (tensor >= 0).all():
            raise ValueError(
                f"Expected nonnegative {name}; got a negative number or NaN. Use softplus, or clamp them."
            )
    if not ((z >= 0) & (z <= 1)).all():
        raise ValueError(
            "Expected z in [0, 1]; got other numbers. Use a Bernoulli or relaxed Bernoulli z, or sigmoid."
        )


class NoisyOrDual(Bound):
    """The upper bound of a noisy-OR by its conjugate dual; s are the rates, and xi is psi, its slope.

    log(1 - exp(-s)) <= psi s - g(psi), g(psi) = (psi + 1) log(psi + 1) - psi log psi, with equality at
    psi = 1 / (exp(s) - 1). Where x = 0, log p is -s whatever psi. A psi below the smallest normal number counts as it.

    References:
        Jaakkola & Jordan 1999, Variational Probabilistic Inference and the QMR-DT Network; Yan, Ailem & Sha 2019,
        Amortized Inference of Variational Bounds for Learning Noisy-OR, equations 7 and 8.

    Example:
        >>> fn = NoisyOr(torch.zeros(1, 1), torch.tensor([0.5]), torch.zeros(1))
        >>> one, s = torch.ones(1), fn.rates
        >>> fn.log_prob(one), NoisyOrDual().log_bound(fn, one, NoisyOrDual().tightest(one, s, s**2))
        (tensor(-0.9328), tensor(-0.9328))
    """

    side = "upper"

    def leaf_predictor(self, leaf: NoisyOr) -> Tensor:
        return leaf.rates

    def coefficients(self, value: Tensor, xi: Tensor) -> tuple[Tensor, Tensor, float]:
        psi, present = xi.clamp(min=torch.finfo(xi.dtype).tiny), value != 0
        # log(psi + 1) - log psi is -logsigmoid(log psi)
        dual = psi.log1p() - psi * logsigmoid(psi.log())
        return torch.where(present, -dual, 0.0), torch.where(present, psi, -1.0), 0.0

    def relevance(self, s: Tensor) -> Tensor:
        return -torch.expm1(-s)

    def log_density(self, value: Tensor, s: Tensor) -> Tensor:
        present = torch.expm1(-s.clamp(min=torch.finfo(s.dtype).tiny ** 0.5)).neg().log()
        return torch.where(value != 0, present, -s)

    def tightest(self, value: Tensor, mean: Tensor, square: Tensor) -> Tensor:
        # so that the slope is finite as well
        s = mean.clamp(min=torch.finfo(mean.dtype).tiny ** 0.5)
        return torch.exp(-s) / -torch.expm1(-s)


register_bound(NoisyOr, NoisyOrDual())
