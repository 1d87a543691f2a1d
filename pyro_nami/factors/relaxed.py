"""One-element distributions of relaxed discrete types: logits of Bernoulli and logarithms of one-hot variables."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_nami.factors.elements import Elements

__all__ = ["ExpRelaxedElements", "LogisticElements"]


class LogisticElements(Elements):
    """The logit of a relaxed Bernoulli variable: x = (logits + logistic noise) / temperature.

    Args:
        logits: ``(*batch, E)``.
        temperature: positive, broadcastable.
    """

    def __init__(self, logits: Tensor, temperature: Tensor) -> None:
        self.logits, self.temperature = logits, temperature
        self.shape = torch.broadcast_shapes(logits.shape, temperature.shape)

    def draw(self, shape: torch.Size) -> Tensor:
        uniform = _open_uniform(shape, self.logits)
        return (self.logits + uniform.log() - (-uniform).log1p()) / self.temperature

    def log_prob(self, x: Tensor) -> Tensor:
        gap = self.logits - self.temperature * x
        return self.temperature.log() + logsigmoid(gap) + logsigmoid(-gap)


class ExpRelaxedElements(Elements):
    """The logarithm of a relaxed one-hot vector, scored by the density of the vector on the simplex.

    Args:
        logits: ``(*batch, E, classes)``.
        temperature: positive, broadcastable with ``(*batch, E)``.

    References:
        Maddison, Mnih and Teh 2017, The Concrete Distribution, eq. 10 and appendix C.
    """

    def __init__(self, logits: Tensor, temperature: Tensor) -> None:
        self.logits, self.temperature = logits, temperature
        self.shape = torch.broadcast_shapes(logits.shape[:-1], temperature.shape)

    def draw(self, shape: torch.Size) -> Tensor:
        uniform = _open_uniform(shape + self.logits.shape[-1:], self.logits)
        return ((self.logits - (-uniform.log()).log()) / self.temperature.unsqueeze(-1)).log_softmax(-1)

    def log_prob(self, x: Tensor) -> Tensor:
        classes = x.shape[-1]
        score = (self.logits - self.temperature.unsqueeze(-1) * x).log_softmax(-1)
        return (score - x).sum(-1) + math.lgamma(classes) + (classes - 1) * self.temperature.log()


def _open_uniform(shape: torch.Size, like: Tensor) -> Tensor:
    finfo = torch.finfo(like.dtype)
    return torch.rand(shape, dtype=like.dtype, device=like.device).clamp(finfo.tiny, 1 - finfo.eps)
