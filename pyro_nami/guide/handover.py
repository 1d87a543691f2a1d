"""Hands new parameters of a guide to the torch optimizers that know its old ones."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

__all__ = ["hand_over"]

# Old and new parameters of guides whose optimizers have not taken a step since; optimizers keep old ones alive.
_waiting: list[tuple[list[weakref.ref], list[weakref.ref]]] = []


def hand_over(before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Has the next optimizer that steps and knows parameters ``before`` take ``after`` in their place.

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
    _register()
    _waiting.append((list(map(weakref.ref, before)), list(map(weakref.ref, after))))


@functools.cache  # one for all guides, as none may be removed while torch goes through them
def _register() -> Any:
    return register_optimizer_step_pre_hook(_adopt)


def _adopt(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Replaces parameters of an optimizer, before its step."""
    for waiting in list(_waiting):
        old, new = map(_alive, waiting)
        known = {id(each) for group in optimizer.param_groups for each in group["params"]}
        is_known = not known.isdisjoint(map(id, old))
        if not new or not known.isdisjoint(map(id, new)):
            _waiting.remove(waiting)
        elif is_known:
            _waiting.remove(waiting)
            _replace(optimizer, old, new)


def _alive(references: Sequence[weakref.ref]) -> list[Tensor]:
    return [value for reference in references if (value := reference()) is not None]


def _replace(optimizer: Optimizer, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    gone = set(map(id, old))
    is_first = True
    for group in optimizer.param_groups:
        kept = [each for each in group["params"] if id(each) not in gone]
        if is_first and len(kept) < len(group["params"]):
            kept += new
            is_first = False
        group["params"][:] = kept
    for parameter in old:
        optimizer.state.pop(parameter, None)
    if hasattr(optimizer, "_numel_cache"):  # of LBFGS
        optimizer._numel_cache = None
