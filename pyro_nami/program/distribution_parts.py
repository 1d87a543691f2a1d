"""Distributions taken apart into tensors, and put together again from the tensors of many draws."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pyro.distributions import Delta
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Transform, TransformedDistribution
from torch.distributions.transforms import _InverseTransform

from pyro_nami.factors.completed import constraints_of_parameters
from pyro_nami.factors.wrappers import base_of

__all__ = ["Parts", "arguments_of"]

# Groups of parameters of which a distribution is given one.
_ONE_OF = (
    ("logits", "probs"),
    ("scale_tril", "covariance_matrix", "precision_matrix"),
    ("gate", "gate_logits"),
)


# From the parts of all draws, each with whether it varies between them, to what is made of these parts.
Make = Callable[[Any], Any]


class Parts:
    """Takes distributions apart; makes functions from the parts of all draws to the distribution of all draws.

    Batch dims of draws stand left of ``width`` dims, and of event dims. Parts that are the same for all have none.

    Example:
        >>> parts = Parts(1)
        >>> make = parts.distribution(torch.distributions.Normal(torch.zeros(3), torch.ones(3)), 2)
        >>> make([(torch.zeros(7, 3), True), (torch.ones(3), False)]).batch_shape  # draws, an idle dim, its own
        torch.Size([7, 1, 3])
    """

    def __init__(self, num_batch: int) -> None:
        self.num_batch = num_batch
        self.tensors: list[Tensor] = []

    def tensor(self, value: Any, width: int) -> Make:
        """For a tensor ``(*own)`` that is aligned right in ``width`` dims; anything else stays as it is."""
        if not isinstance(value, Tensor):
            return lambda given: value
        place, cut = len(self.tensors), self.num_batch
        idle = (1,) * (width - value.dim())
        self.tensors.append(value)

        def of(given: Any) -> Tensor:
            part, varies = given[place]
            return part.reshape(part.shape[:cut] + idle + part.shape[cut:]) if varies else part

        return of

    def distribution(self, fn: Any, width: int) -> Make:
        """For a distribution of at most ``width`` batch dims."""
        base = base_of(fn)
        if isinstance(fn, Independent):
            num = fn.reinterpreted_batch_ndims
            made = self.distribution(base, width + num)
            return lambda given: made(given).to_event(num)
        if isinstance(fn, MaskedDistribution):
            made, mask = self.distribution(base, width), self.tensor(fn._mask, width)
            return lambda given: made(given).mask(mask(given))
        if isinstance(fn, ExpandedDistribution):
            made, own = self.distribution(base, width), fn.batch_shape
            return lambda given: _expanded(made(given), own)
        if isinstance(fn, Delta):
            value = self.tensor(fn.v, width + fn.event_dim)
            log_density = self.tensor(fn.log_density, width)
            return lambda given: Delta(value(given), log_density(given), fn.event_dim)
        if type(fn).__init__ is TransformedDistribution.__init__:
            made = self.distribution(base, width + fn.event_dim - base.event_dim)
            changes = self.transforms(fn.transforms, width + fn.event_dim)
            return lambda given: type(fn)(made(given), changes(given))
        parts = {
            key: self.parameter(fn, key, value, width) for key, value in arguments_of(fn).items()
        }
        own = fn.batch_shape
        return lambda given: _expanded(type(fn)(**_made(parts, given)), own)

    def parameter(self, fn: Any, name: str, value: Any, width: int) -> Make:
        """For an argument that a distribution was made with."""
        if isinstance(value, Distribution):
            return self.distribution(value, width + len(value.batch_shape) - len(fn.batch_shape))
        constraint = constraints_of_parameters(fn).get(name)
        return self.tensor(value, width + (constraint.event_dim if constraint is not None else 0))

    def transform(self, change: Transform, width: int) -> Make:
        """For a transform of values of ``width`` dims, with its tensors, and transforms that it is made of."""
        if isinstance(change, nn.Module):
            raise NotImplementedError(
                f"Expected a transform without a network; got {type(change).__name__}."
            )
        if isinstance(change, _InverseTransform):
            inverse = self.transform(change.inv, width)
            return lambda given: inverse(given).inv
        parts: dict[str, Make] = {}
        for key, value in vars(change).items():
            if isinstance(value, Tensor):
                parts[key] = self.tensor(value, width)
            elif isinstance(value, list):
                parts[key] = self.transforms(value, width)
            elif isinstance(value, Transform) and key != "_inv":
                parts[key] = self.transform(value, width)

        def of(given: Any) -> Transform:
            made = copy.copy(change)
            vars(made).update(_made(parts, given), _inv=None, _cached_x_y=(None, None))
            return made

        return of

    def transforms(self, changes: Sequence[Transform], width: int) -> Make:
        """For transforms, one after the other."""
        made = [self.transform(each, width) for each in changes]
        return lambda given: [each(given) for each in made]


def _made(parts: dict[str, Make], given: Any) -> dict[str, Any]:
    return {key: make(given) for key, make in parts.items()}


def _expanded(fn: Any, own: torch.Size) -> Any:
    """Returns a distribution with at least its own batch dims."""
    wide = torch.broadcast_shapes(fn.batch_shape, own)
    return fn if wide == fn.batch_shape else fn.expand(wide)


def arguments_of(fn: Any) -> dict[str, Any]:
    """Returns the arguments that make a distribution, by the names in its signature.

    Raises:
        NotImplementedError: the distribution does not keep them.
    """
    kept, found = vars(fn), dict[str, Any]()
    signature = inspect.signature(type(fn).__init__).parameters
    for name, parameter in list(signature.items())[1:]:
        same = next((group for group in _ONE_OF if name in group), (name,))
        if name == "validate_args" or found.keys() & set(same):
            continue
        name = next((each for each in same if each in kept and each in signature), name)
        value = getattr(fn, name, parameter.default)
        if value is parameter.empty:
            raise NotImplementedError(
                f"Expected a distribution that keeps what it is made with; {type(fn).__name__} does not keep '{name}'."
            )
        found[name] = value
    return found
