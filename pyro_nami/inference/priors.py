"""Priors as users of other packages have them, as distributions of Pyro.

A distribution of torch becomes Pyro's own of the same name. Whatever else has ``sample`` is wrapped, with its density
and its support if it has these: a list of independent distributions, draws, or a class of one's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution, constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.distributions import Distribution, Independent, TransformedDistribution, biject_to
from torch.distributions.constraints import Constraint

from pyro_nami.factors.wrappers import base_of
from pyro_nami.messages import quoted, warn
from pyro_nami.program.distribution_parts import arguments_of

__all__ = ["OwnPrior", "as_priors", "is_prior"]

# Draws by which a prior shows its event shape, or that it cannot be sampled. One would not tell rows from elements.
SHOWN = 3
_CONTINUOUS = (
    "Expected a prior of '{}' of continuous numbers; got {}. Give categories and counts a name and a distribution of "
    "Pyro each, as in {{'k': Categorical(probs), 'rate': Gamma(2.0, 1.0)}}."
)


def is_prior(value: Any) -> bool:
    """Whether a value is a prior, or several by name, and no model."""
    if isinstance(value, (Distribution, Mapping, list, tuple, Tensor, np.ndarray)):
        return True
    return (hasattr(value, "sample") or hasattr(value, "rvs")) and not callable(value)


def as_priors(prior: Any) -> dict[str, Any]:
    """Returns name -> prior of Pyro's, of one draw: the names of a mapping, and ``theta`` for anything else.

    Raises:
        TypeError: something that has no ``sample``.
        ValueError: a prior with batch dims, or that cannot be sampled; draws of several parameters by name.
    """
    if not isinstance(prior, Mapping):
        return {"theta": _as_prior("theta", prior)}
    drawn = [name for name, part in prior.items() if isinstance(part, (Tensor, np.ndarray))]
    if len(drawn) > 1:
        raise ValueError(
            f"Expected draws of all parameters in one tensor, as their rows belong together; got some for each of "
            f"{quoted(drawn)}. Use torch.cat(..., -1)."
        )
    return {name: _as_prior(name, part) for name, part in prior.items()}


def _as_prior(name: str, prior: Any) -> Any:
    if isinstance(prior, (Tensor, np.ndarray)):
        prior = _KnownDraws(torch.as_tensor(prior))
    elif isinstance(prior, (list, tuple)):
        prior = _Independents.of([_of_scipy(name, part) for part in prior])
    else:
        prior = _of_scipy(name, prior)
    found = _of_pyro(prior)
    if found is None:
        found = OwnPrior.of(name, prior)
    if found.batch_shape:
        raise ValueError(
            f"Expected a prior of one draw, of batch shape (); got {tuple(found.batch_shape)} for '{name}'. Use "
            f"prior.to_event({len(found.batch_shape)}) or torch.distributions.Independent."
        )
    return found


def _of_pyro(prior: Any) -> Any:
    """Returns a distribution of torch as that of Pyro's by the same name; None if there is none."""
    if isinstance(prior, Independent):
        base = _of_pyro(base_of(prior))
        return base and base.to_event(prior.reinterpreted_batch_ndims)
    if isinstance(prior, TorchDistributionMixin):
        return prior
    if not isinstance(prior, Distribution):
        return None
    if type(prior) is TransformedDistribution:
        base = _of_pyro(base_of(prior))
        return base and dist.TransformedDistribution(base, prior.transforms)
    known = getattr(dist, type(prior).__name__, None)
    if known is None:
        return None
    options = {
        key: _of_pyro(part) if isinstance(part, Distribution) else part
        for key, part in arguments_of(prior).items()
    }
    return known(**options)


class OwnPrior(TorchDistribution):
    """A prior that has ``sample``, and perhaps ``log_prob`` and ``support``, as a distribution of Pyro.

    Without a support of its own that a bijection is known to, it is taken to be real. Where its density is zero,
    `contains` tells so.

    Args:
        prior: with ``sample(shape)``, which returns ``(*shape, *event)`` for a shape of one number.
        batch_shape: of this distribution.
        like: draws ``(rows, *event)``, for their shape, dtype and device.
    """

    arg_constraints: dict = {}
    has_rsample = False

    def __init__(self, prior: Any, batch_shape: torch.Size, like: Tensor) -> None:
        self.prior = prior
        self._like = like[:0]
        self._support = _support(prior, like)
        super().__init__(batch_shape, like.shape[1:], validate_args=False)

    @classmethod
    def of(cls, name: str, prior: Any) -> OwnPrior:
        """Returns the prior of one draw, after a check that it can be sampled.

        Raises:
            TypeError: it has no ``sample``, or its draws are no floating-point numbers.
            ValueError: it cannot be sampled, or returns other numbers of draws than it is asked for.
        """
        if not hasattr(prior, "sample"):
            raise TypeError(
                f"Expected a prior of '{name}': a distribution, a list of these, draws, or an object with "
                f"sample(shape) or scipy's rvs(size); got {type(prior).__name__}."
            )
        with torch.random.fork_rng():
            draws = _sampled(name, prior, SHOWN)
        if draws.isnan().any():
            raise ValueError(f"Expected draws of the prior of '{name}' without NaN; got some.")
        if _is_discrete(prior):
            raise TypeError(_CONTINUOUS.format(name, type(prior).__name__))
        if isinstance(prior, Distribution) and prior.batch_shape:
            raise ValueError(
                f"Expected a prior of one draw, of batch shape (); got {tuple(prior.batch_shape)} for '{name}'. Use "
                f"torch.distributions.Independent(prior, {len(prior.batch_shape)})."
            )
        return cls(prior, torch.Size(), draws)

    @constraints.dependent_property
    def support(self) -> Constraint:
        return self._support

    def expand(self, batch_shape: Any, _instance: Any = None) -> OwnPrior:
        wide = copy.copy(self)
        wide._batch_shape = torch.Size(batch_shape)
        return wide

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = torch.Size(sample_shape) + self.batch_shape
        draws = _sampled("theta", self.prior, shape.numel()).to(self._like)
        return draws.reshape(shape + self.event_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns the prior's log density, ``(*batch)``, in nats; minus infinity outside of its support.

        Raises:
            NotImplementedError: it has none.
        """
        if not hasattr(self.prior, "log_prob"):
            raise NotImplementedError("Expected a prior with log_prob; this one has draws only.")
        batch = value.shape[: value.dim() - len(self.event_shape)]
        rows = value.reshape(-1, *self.event_shape)
        inside = self._support.check(rows)
        if not inside.any():
            return rows.new_full((len(rows),), -torch.inf).reshape(batch)
        # where a prior validates values, it is asked about values in its support alone
        held = torch.where(inside.reshape(-1, *(1,) * len(self.event_shape)), rows, rows[inside][0])
        found = torch.as_tensor(self.prior.log_prob(held)).reshape(-1).to(value)
        return found.where(inside, -torch.inf).reshape(batch)

    def contains(self, value: Tensor) -> Tensor:
        """Returns whether the prior's density is positive at values ``(*batch, *event)``, as far as it tells."""
        inside = self._support.check(value)
        if not hasattr(self.prior, "log_prob"):
            return inside
        try:
            return self.log_prob(value) > -torch.inf
        except ValueError:  # it refuses values outside of its support: one at a time tells which
            rows = value.reshape(-1, *self.event_shape)
            return torch.stack([self._contains_one(row) for row in rows]).reshape(inside.shape)

    def _contains_one(self, row: Tensor) -> Tensor:
        try:
            return self.log_prob(row) > -torch.inf
        except ValueError:
            return torch.tensor(False, device=row.device)


def _sampled(name: str, prior: Any, num: int) -> Tensor:
    """Returns draws of a prior, ``(num, *event)``, as floating-point numbers."""
    expected = f"Expected a prior of '{name}' of which sample(({num},)) returns {num} draws"
    try:
        made = prior.sample(torch.Size((num,)))
    except Exception as error:
        raise ValueError(f"{expected}; it raises {type(error).__name__}: {error}") from error
    try:
        draws = torch.as_tensor(made)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{expected}, in one tensor; got {type(made).__name__}.") from error
    if draws.dim() == 0 or len(draws) != num:
        raise ValueError(f"{expected}; got shape {tuple(draws.shape)}.")
    if not draws.is_floating_point():
        raise TypeError(_CONTINUOUS.format(name, draws.dtype))
    # numpy makes doubles of everything
    return draws if isinstance(made, Tensor) else draws.to(torch.get_default_dtype())


def _is_discrete(prior: Any) -> bool:
    """Whether a distribution, or one of a list, has discrete values, as far as it tells."""
    parts: Sequence[Any] = prior.parts if isinstance(prior, _Independents) else [prior]
    try:
        return any(part.support.is_discrete for part in parts)
    except Exception:  # noqa: BLE001  whatever a property that nobody else reads may raise
        return False


def _support(prior: Any, draws: Tensor) -> Constraint:
    """Returns the support that a prior has, if a bijection to it is known and draws lie in it; else all numbers."""
    real = constraints.independent(constraints.real, draws.dim() - 1)
    try:
        support = prior.support
        inside = support.check(draws)
        value = biject_to(support).inv(draws)
    except Exception:  # noqa: BLE001  whatever a class that nobody has tested may raise
        return real
    is_whole = value.shape == draws.shape and inside.shape == draws.shape[:1]
    return support if is_whole and bool(inside.all()) else real


def _of_scipy(name: str, prior: Any) -> Any:
    """Returns a distribution of scipy with its arguments fixed as one that has ``sample``; any other prior as it is."""
    if not hasattr(prior, "rvs") or hasattr(prior, "sample"):
        return prior
    if not hasattr(prior, "logpdf"):
        raise TypeError(_CONTINUOUS.format(name, type(prior).__name__))
    return _Scipy(prior, torch.Size(np.shape(prior.rvs(size=SHOWN, random_state=0))[1:]))


class _Scipy(NamedTuple):
    """A continuous distribution of scipy with its arguments fixed, such as ``scipy.stats.gamma(2.0, scale=0.5)``.

    Attributes:
        frozen: the distribution of scipy.
        event_shape: of a draw.
    """

    frozen: Any
    event_shape: torch.Size

    @property
    def batch_shape(self) -> torch.Size:
        return torch.Size()

    @property
    def support(self) -> Constraint:
        """The bounds of a single number; scipy tells none of vectors."""
        low, high = self.frozen.support() if hasattr(self.frozen, "support") else (-np.inf, np.inf)
        if np.isfinite(low) and np.isfinite(high):
            return constraints.interval(float(low), float(high))
        if np.isfinite(low):
            return constraints.greater_than(float(low))
        return constraints.less_than(float(high)) if np.isfinite(high) else constraints.real

    def sample(self, shape: torch.Size) -> Tensor:
        """Returns draws ``(*shape, *event)``, which Pyro's seed determines."""
        seed = int(torch.randint(2**31, ()))
        draws = self.frozen.rvs(size=shape.numel(), random_state=seed)
        values = torch.as_tensor(draws).to(torch.get_default_dtype())
        return values.reshape(shape + self.event_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns the log density, ``(*batch)``, in nats."""
        batch = value.shape[: value.dim() - len(self.event_shape)]
        density = self.frozen.logpdf(value.detach().double().cpu().numpy())
        return torch.as_tensor(density).to(value).reshape(batch)


class _KnownDraws(NamedTuple):
    """Draws ``(draws, *event)`` that stand for the distribution that they were made by."""

    values: Tensor

    def sample(self, shape: torch.Size) -> Tensor:
        """Returns some of the draws in random order; repeated ones only where more are asked for than there are."""
        num = shape.numel()
        if num <= len(self.values):
            return self.values[torch.randperm(len(self.values))[:num]]
        warn(
            f"The prior has {len(self.values)} draws, and {num} are asked for: some are repeated, so that a posterior "
            "may be too narrow about them. Simulate no more than there are draws, or give the prior itself."
        )
        return self.values[torch.randint(len(self.values), (num,))]


class _Independents(NamedTuple):
    """Independent distributions, as one of a vector that holds the values of all."""

    parts: Sequence[Any]
    sizes: Sequence[int]

    @classmethod
    def of(cls, parts: Sequence[Any]) -> _Independents:
        for part in parts:
            if not isinstance(part, (Distribution, _Scipy)):
                raise TypeError(
                    f"Expected distributions in the list of priors; got {type(part).__name__}."
                )
        shapes = [part.batch_shape + part.event_shape for part in parts]
        for shape in shapes:
            if len(shape) > 1:
                raise ValueError(
                    f"Expected priors of numbers or vectors in the list; got one of shape {tuple(shape)}."
                )
        return cls(parts, [shape.numel() for shape in shapes])

    def sample(self, shape: torch.Size) -> Tensor:
        draws = [part.sample(shape).reshape(*shape, -1) for part in self.parts]
        return torch.cat(draws, -1)

    def log_prob(self, value: Tensor) -> Tensor:
        total = value.new_zeros(value.shape[:-1])
        for part, own in zip(self.parts, value.split(self.sizes, -1)):
            rows = own.reshape(*total.shape, *part.batch_shape, *part.event_shape)
            total = total + part.log_prob(rows).reshape(*total.shape, -1).sum(-1)
        return total

    @property
    def support(self) -> Constraint:
        supports = [
            each.base_constraint if isinstance(each, constraints.independent) else each
            for each in (part.support for part in self.parts)
        ]
        return constraints.independent(constraints.cat(supports, -1, self.sizes), 1)
