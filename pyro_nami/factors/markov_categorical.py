"""`MarkovCategorical`: a vector of discrete variables, of which each depends on the one before alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

__all__ = ["MarkovCategorical"]


class MarkovCategorical(TorchDistribution):
    """A chain of variables with K values each.

    Args:
        first: log-probabilities of the first variable's values, ``(*batch, K)``.
        logits: of each other one's, given each value of the one before, ``(*batch, T - 1, K, K)``.
        values: the values, ``(K,)``.
        make: makes the distribution of one variable from log-probabilities ``(*batch, K)``.

    Example:
        >>> from pyro.distributions import Categorical
        >>> flip = torch.eye(2).log().expand(2, 2, 2)  # each is the one before
        >>> chain = MarkovCategorical(torch.zeros(2), flip, torch.arange(2), lambda p: Categorical(logits=p))
        >>> chain.log_prob(torch.tensor([[1, 1, 1], [0, 1, 1]]))
        tensor([-0.6931,    -inf])
    """

    arg_constraints: dict[str, Any] = {}
    support = constraints.independent(constraints.real, 1)
    # log p(states, data) - log q(states) is the same for all states, so nothing has to tell them apart by a score
    has_rsample = True

    def __init__(
        self, first: Tensor, logits: Tensor, values: Tensor, make: Callable[[Tensor], Any]
    ) -> None:
        self.first, self.logits, self.values = first.log_softmax(-1), logits, values
        self.make = make
        size = logits.shape[-3] + 1
        super().__init__(first.shape[:-1], torch.Size((size,)), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> MarkovCategorical:
        batch = torch.Size(batch_shape)
        first = self.first.expand(batch + self.first.shape[-1:])
        logits = self.logits.expand(batch + self.logits.shape[-3:])
        return MarkovCategorical(first, logits, self.values, self.make)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = torch.Size(sample_shape) + self.batch_shape
        in_turn, drawn = self.in_sequence(), []
        for _ in range(self.event_shape[0]):
            drawn.append(in_turn.next().expand(shape).sample())
            in_turn.take(drawn[-1])
        return torch.stack(drawn, -1)

    def log_prob(self, value: Tensor) -> Tensor:
        place = self.place_of(value)
        shape = torch.broadcast_shapes(place.shape[:-1], self.batch_shape)
        place = place.expand(shape + place.shape[-1:])
        count = self.first.shape[-1]
        first = self.first.expand(shape + (count,)).gather(-1, place[..., :1]).squeeze(-1)
        logits = self.logits.expand(shape + self.logits.shape[-3:]).flatten(-2)
        pairs = place[..., :-1] * count + place[..., 1:]
        return first + logits.gather(-1, pairs.unsqueeze(-1)).squeeze(-1).sum(-1)

    def place_of(self, value: Tensor) -> Tensor:
        """Returns which of the values each of some is."""
        return (value.unsqueeze(-1) == self.values).to(torch.uint8).argmax(-1)

    def in_sequence(self) -> _InSequence:
        """Returns what gives the conditional of one variable after another."""
        return _InSequence(self)


class _InSequence:
    """Gives the conditional of each variable, given the value of the one before."""

    def __init__(self, whole: MarkovCategorical) -> None:
        self._whole = whole
        self._logits = whole.logits.unbind(-3)
        self._next = 0
        self._now = whole.first

    def next(self, event: torch.Size = torch.Size()) -> Any:
        """Returns the distribution of the next variable."""
        return self._whole.make(self._now)

    def take(self, value: Tensor) -> None:
        """Takes the value of that variable."""
        if self._next < len(self._logits):
            logits, place = self._logits[self._next], self._whole.place_of(value)
            shape = torch.broadcast_shapes(place.shape, logits.shape[:-2])
            place = place.expand(shape)[..., None, None].expand(shape + (1, logits.shape[-1]))
            self._now = logits.expand(shape + logits.shape[-2:]).gather(-2, place).squeeze(-2)
        self._next += 1
