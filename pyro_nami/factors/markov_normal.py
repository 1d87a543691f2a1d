"""`MarkovNormal`: a Normal vector in blocks, of which each depends on the one before alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.distributions import MultivariateNormal, Normal, TorchDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import pad

__all__ = ["InSequence", "MarkovNormal"]


class MarkovNormal(TorchDistribution):
    """A vector x of n blocks of m numbers, x[t] = loc[t] + A[t] (x[t-1] - loc[t-1]) + L[t] e[t] with e ~ N(0, I).

    Args:
        loc: means of the blocks, ``(*batch, n, m)``.
        along: A, by which a block moves with the one before, ``(*batch, n, m, m)``; that of the first is not read.
        lower: L, lower triangular, ``(*batch, n, m, m)``.
        size: the number of elements; those of the last block that are more are left out.

    Example:
        >>> walk = MarkovNormal(torch.zeros(3, 1), torch.ones(3, 1, 1), torch.ones(3, 1, 1), 3)
        >>> walk.event_shape, walk.log_prob(torch.tensor([0.0, 1.0, 1.0]))
        (torch.Size([3]), tensor(-3.2568))
    """

    arg_constraints: dict[str, Any] = {}
    support = constraints.real_vector
    has_rsample = True

    def __init__(self, loc: Tensor, along: Tensor, lower: Tensor, size: int) -> None:
        self.loc, self.along, self.lower = loc, along, lower
        self.size, self.width = size, loc.shape[-1]
        super().__init__(loc.shape[:-2], torch.Size((size,)), validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self._vector(self.loc)

    def expand(self, batch_shape: Any, _instance: Any = None) -> MarkovNormal:
        batch = torch.Size(batch_shape)
        loc = self.loc.expand(batch + self.loc.shape[-2:])
        along, lower = (part.expand(batch + part.shape[-3:]) for part in (self.along, self.lower))
        return MarkovNormal(loc, along, lower, self.size)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        shape = torch.Size(sample_shape) + self.loc.shape
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        steps = _times(self.lower, noise).unbind(-2)
        along = self.along.unbind(-3)
        values = [steps[0]]
        for step, matrix in zip(steps[1:], along[1:]):
            values.append(step + _times(matrix, values[-1]))
        return self._vector(self.loc + torch.stack(values, -2))

    def log_prob(self, value: Tensor) -> Tensor:
        return self.log_probs(value).sum(-1)

    def log_probs(self, value: Tensor) -> Tensor:
        """Returns the log density in nats of each element given those before it, ``(*batch, size)``."""
        missing = self.loc.shape[-2] * self.width - self.size
        # what the last block lacks is at its mean
        offset = pad(value - self.mean, (0, missing)).unflatten(-1, self.loc.shape[-2:])
        before = pad(offset[..., :-1, :], (0, 0, 1, 0))
        rest = offset - _times(self.along, before)
        if self.width == 1:
            noise = rest / self.lower[..., 0]
        else:
            noise = torch.linalg.solve_triangular(self.lower, rest.unsqueeze(-1), upper=False)
            noise = noise.squeeze(-1)
        log_scale = self.lower.diagonal(dim1=-2, dim2=-1).log()
        each = -0.5 * noise.square() - log_scale - 0.5 * math.log(2 * math.pi)
        return self._vector(each)

    def in_sequence(self) -> InSequence:
        """Returns what gives the conditional of one element after another."""
        return InSequence(self)

    def _vector(self, blocks: Tensor) -> Tensor:
        return blocks.flatten(-2)[..., : self.size]


class InSequence:
    """Gives the conditional of each element of a `MarkovNormal`, or of a few of a block, given the values before.

    Example:
        >>> walk = MarkovNormal(torch.zeros(2, 1), torch.ones(2, 1, 1), torch.ones(2, 1, 1), 2)
        >>> in_turn = walk.in_sequence()
        >>> in_turn.next().loc, in_turn.take(torch.tensor(5.0)), in_turn.next().loc
        (tensor(0.), None, tensor(5.))
    """

    def __init__(self, whole: MarkovNormal) -> None:
        self._width = whole.width
        scale = whole.lower.diagonal(dim1=-2, dim2=-1)
        self._loc, self._scale = (
            blocks.flatten(-2)[..., : whole.size].unbind(-1) for blocks in (whole.loc, scale)
        )
        # the rows of each element: by the block before, and by the noise of its own block
        self._along, self._lower = (
            matrix.flatten(-3, -2).unbind(-2) for matrix in (whole.along, whole.lower)
        )
        self._before: list[Tensor] = []  # offsets of the block before
        self._offsets: list[Tensor] = []  # and of this one, and its noise
        self._noise: list[Tensor] = []
        self._end = 0
        self._events = torch.Size()

    def next(self, event: torch.Size = torch.Size()) -> Any:
        """Returns the joint distribution of the next elements, of one by default; they lie in one block."""
        self._events, start = event, self._end
        self._end += event.numel()
        locs = [self._loc[at] + self._moved(at) for at in range(start, self._end)]
        if not event:
            return Normal(locs[0], self._scale[start].expand(locs[0].shape), validate_args=False)
        loc = torch.stack(locs, -1)
        inner = start % self._width
        rows = [
            self._lower[at][..., inner : inner + event.numel()] for at in range(start, self._end)
        ]
        return MultivariateNormal(loc, scale_tril=torch.stack(rows, -2), validate_args=False)

    def take(self, value: Tensor) -> None:
        """Takes the values of these elements."""
        parts = value.unbind(-1) if self._events else (value,)
        for at, part in enumerate(parts, self._end - len(parts)):
            offset = part - self._loc[at]
            if self._width > 1:
                self._noise.append((offset - self._moved(at)) / self._scale[at])
            self._offsets.append(offset)
            if (at + 1) % self._width == 0:
                self._before, self._offsets, self._noise = self._offsets, [], []

    def _moved(self, at: int) -> Tensor:
        along, lower = self._along[at], self._lower[at]
        terms = [along[..., j] * offset for j, offset in enumerate(self._before)]
        terms += [lower[..., j] * noise for j, noise in enumerate(self._noise)]
        return sum(terms[1:], terms[0]) if terms else torch.zeros_like(self._loc[at])


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    if matrix.shape[-1] == 1:
        return matrix[..., 0] * x
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)
