"""Link functions from raw parameters (any real numbers) to scales and probabilities, with bounded slopes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

__all__ = [
    "POSITIVE",
    "RANGE",
    "RATE",
    "REAL",
    "Link",
    "log",
    "positive",
    "raw_scale",
    "relative_scale",
    "within",
]

RANGE = 40.0  # of raw parameters: squares of what they stand for are finite


def within(
    value: Tensor, low: float | Tensor | None = None, high: float | Tensor | None = None
) -> Tensor:
    """Returns `value`, or the bound that it lies beyond; the slope by `value` is 1 on a bound, as it is inside.

    ``Tensor.clamp`` has slope 0 or 1/2 on a bound from torch 2.14 on, and a parameter that starts there would stay.

    Args:
        value: of any shape.
        low, high: numbers, or tensors that broadcast to `value`; None for no bound.
    """
    if low is not None:
        value = torch.where(value < low, low, value)
    return value if high is None else torch.where(value > high, high, value)


def positive(raw: Tensor) -> Tensor:
    """Returns ``exp(raw)`` with `raw` clamped to [-40, 40]: the positive number that a raw parameter stands for."""
    return within(raw, -RANGE, RANGE).exp()


def relative_scale(raw: Tensor) -> Tensor:
    """Returns softplus(raw), at least 4e-18: the scale that a raw parameter of a location-scale type stands for.

    It is exponential where the factor is narrow and linear where it is wide: an exponential throughout lets a wide
    factor grow without bound through the values that it is given, and training then diverges now and then.

    Example:
        >>> relative_scale(torch.tensor([0.5413, 100.0]))
        tensor([  1.0000, 100.0000])
    """
    return softplus(within(raw, -RANGE))


def raw_scale(scale: Tensor) -> Tensor:
    """Returns the raw parameter at which `relative_scale` is ``scale``."""
    return within(
        torch.where(scale > RANGE / 2, scale, within(scale, high=RANGE / 2).expm1().log()), -RANGE
    )


def log(value: Tensor) -> Tensor:
    """Returns the logarithm of a nonnegative number, finite at zero."""
    return value.clamp(min=torch.finfo(value.dtype).tiny).log()


class Link(NamedTuple):
    """A parameter as a function of a raw one, and the raw one as a function of a prior's parameter."""

    of_raw: Callable[[Tensor], Tensor]
    raw_of: Callable[[Tensor], Tensor]


REAL = Link(lambda raw: raw, lambda value: value)
POSITIVE = Link(positive, log)
RATE = Link(lambda raw: positive(-raw), lambda rate: -log(rate))
