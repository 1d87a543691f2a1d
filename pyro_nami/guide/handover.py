"""Hands new parameters of a guide to the torch optimizers that know its old ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

__all__ = ["hand_over"]


def hand_over(before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Has an optimizer that knows the parameters ``before`` take ``after`` in their place, at its next step.

    Optimizers of `torch.optim` know the parameters that a guide had when they were made. Pyro's look for parameters in
    every step.

    Example:
        >>> import torch
        >>> old, new = (torch.nn.Parameter(torch.ones(n)) for n in (2, 3))
        >>> optimizer = torch.optim.SGD([old], lr=0.5)
        >>> hand_over([old], [new])
        >>> new.sum().backward()
        >>> optimizer.step()
        >>> new.tolist()
        [0.5, 0.5, 0.5]
    """
    old = set(map(id, before))
    new = set(map(id, after))

    def adopt(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        groups = optimizer.param_groups
        known = {id(parameter) for group in groups for parameter in group["params"]}
        if known.isdisjoint(old | new):
            return
        handle.remove()
        if known.isdisjoint(new):
            first = next(group for group in groups if not old.isdisjoint(map(id, group["params"])))
            first["params"].extend(after)
            for group in groups:
                group["params"][:] = [each for each in group["params"] if id(each) not in old]
            for parameter in before:
                optimizer.state.pop(parameter, None)

    handle = register_optimizer_step_pre_hook(adopt)
