"""Torch's and Pyro's optimizers behind one interface.

A guide's parameters exist only after its first call, so a torch optimizer comes as a function of them. Change this
module for another kind of optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

__all__ = ["Optimization", "check_optimizer"]


def check_optimizer(optim: Any, scheduler: Any, clip_norm: Any) -> None:
    """Raises for options that `Optimization` does not take."""
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


class Optimization:
    """Steps of one optimizer over named parameters.

    Args:
        optim: a `PyroOptim`, or a function from a list of parameters to a torch optimizer.
        scheduler: None, or a function from that to a torch scheduler. It steps once a step, as does a scheduler of
            Pyro's; `ReduceLROnPlateau` once a validation.
        clip_norm: largest norm of all gradients together.
        parameters: leaves by name.
    """

    def __init__(
        self,
        optim: PyroOptim | Callable[[list[Tensor]], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], Any] | None,
        clip_norm: float | None,
        parameters: Mapping[str, Tensor],
    ) -> None:
        self.parameters = list(parameters.values())
        self.clip_norm = math.inf if clip_norm is None else clip_norm
        self.pyro = optim if isinstance(optim, PyroOptim) else None
        made: Any = None if self.pyro is not None else optim(self.parameters)
        self.torch, self.scheduler = made, None if scheduler is None else scheduler(made)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def clip(self) -> Tensor:
        """Clips the gradients; returns their norm before, a scalar."""
        return torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)

    def step(self) -> None:
        """Moves the parameters, and the learning rate by its schedule."""
        if self.pyro is not None:
            self.pyro([parameter for parameter in self.parameters if parameter.grad is not None])
            if isinstance(self.pyro, PyroLRScheduler):
                self.pyro.step()
            return
        self.torch.step()
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()

    def validated(self, loss: float) -> None:
        """Tells a scheduler that waits for plateaus a validation loss."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)

    def state(self) -> dict[str, Any]:
        """Returns the state of optimizer and scheduler."""
        if self.pyro is not None:
            if pyro.settings.get("module_local_params"):
                raise NotImplementedError(
                    "Expected parameters in Pyro's store for a checkpoint of a Pyro optimizer; they are local to "
                    "modules (module_local_params). Use an optimizer of torch's."
                )
            return {"pyro": self.pyro.get_state()}
        state = {"torch": self.torch.state_dict()}
        return state if self.scheduler is None else {**state, "scheduler": self.scheduler.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads what `state` returned.

        Raises:
            ValueError: for the state of an optimizer of another kind.
        """
        expected = (
            {"pyro"} if self.pyro is not None else {"torch"} | ({"scheduler"} if self.scheduler else set())
        )
        if state.keys() != expected:
            raise ValueError(
                f"Expected a checkpoint with the state of {' and '.join(sorted(expected))}; got one with "
                f"{' and '.join(sorted(state))}. Resume with the optimizer and scheduler of the run."
            )
        if self.pyro is not None:
            self.pyro.optim_objs.clear()
            self.pyro.grad_clip.clear()
            self.pyro.set_state(state["pyro"])
            return
        self.torch.load_state_dict(state["torch"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
