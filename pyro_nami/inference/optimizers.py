"""One interface to torch's and Pyro's optimizers, as functions of parameters that a first call makes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

__all__ = ["Optimization", "optimization_of"]


def optimization_of(
    optim: Any, scheduler: Any, clip_norm: float | None
) -> Callable[..., Optimization]:
    """Returns the function from parameters to their `Optimization`; raises for options that it does not take."""
    if isinstance(optim, torch.optim.Optimizer) or not callable(optim):  # a PyroOptim is callable
        raise TypeError(
            "Expected an optimizer of Pyro's or a function from parameters to one of torch's, such as "
            f"`lambda params: torch.optim.Adam(params, lr=1e-3)`; got {type(optim).__name__}."
        )
    if scheduler is not None and (isinstance(optim, PyroOptim) or not callable(scheduler)):
        raise TypeError(
            "Expected a scheduler as a function from a torch optimizer to one of torch's schedulers, and optim a "
            f"function that makes a torch optimizer; got {type(scheduler).__name__} with {type(optim).__name__}. "
            "Pyro's schedulers are optimizers: pass them as optim."
        )
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"Expected clip_norm > 0; got {clip_norm}.")
    return functools.partial(
        Optimization, optim, scheduler, math.inf if clip_norm is None else clip_norm
    )


class Optimization:
    """Steps of one optimizer, and of its scheduler, over parameters whose gradients together are at most ``clip_norm``.

    A scheduler steps once a step, as does one of Pyro's; `ReduceLROnPlateau` once a validation.

    Example:
        >>> weight = torch.tensor(1.0, requires_grad=True)
        >>> optimization = Optimization(functools.partial(torch.optim.SGD, lr=0.5), None, 1.0, [weight])
        >>> optimization.backward(4 * weight).item()  # clipped to 1
        4.0
        >>> optimization.step()
        >>> round(weight.item(), 3)
        0.5
    """

    def __init__(
        self, optim: Any, scheduler: Any, clip_norm: float, parameters: list[Tensor]
    ) -> None:
        self.parameters, self.clip_norm = parameters, clip_norm
        self.parts: dict[str, Any] = {}
        if isinstance(optim, PyroOptim):
            self.parts["pyro"] = _PyroOptimizer(optim, parameters)
        else:
            self.parts["torch"] = optim(parameters)
        if scheduler is not None:
            self.parts["scheduler"] = scheduler(self.parts["torch"])

    def backward(self, loss: Tensor) -> Tensor:
        """Computes the clipped gradients; returns their norm before that, a scalar."""
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward(inputs=self.parameters)  # none for the model's own
        return torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)

    def step(self) -> None:
        """Moves the parameters, and the learning rate by its schedule."""
        for part in self.parts.values():
            if not isinstance(part, ReduceLROnPlateau):
                part.step()

    def validated(self, loss: float) -> None:
        """Tells a scheduler that waits for plateaus a validation loss."""
        for part in self.parts.values():
            if isinstance(part, ReduceLROnPlateau):
                part.step(loss)


class _PyroOptimizer:
    """A `PyroOptim` over given parameters, with the methods of torch's."""

    def __init__(self, optim: PyroOptim, parameters: list[Tensor]) -> None:
        self.optim, self.parameters = optim, parameters

    def step(self) -> None:
        self.optim([parameter for parameter in self.parameters if parameter.grad is not None])
        if isinstance(self.optim, PyroLRScheduler):
            self.optim.step()
