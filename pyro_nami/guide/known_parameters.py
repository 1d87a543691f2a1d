"""The parameters of a guide in Pyro's store, by name, and in the optimizers of torch.

Equal names in the store mean shared parameters. Pyro gives two modules of one class the same name,
and the second one the weights of the first, silently. Pyro's own tests rely on this, with warnings
as errors; so a second guide of that name is logged, not warned of.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pyro
import torch
from pyro.nn import PyroModule
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["check_store", "give_to_store", "hand_over", "warn_of_other_weights"]

_made = WeakTensorKeyDictionary()  # parameter of a module that was checked here -> True


def check_store(module: PyroModule) -> None:
    """Compares a new module's parameters with those of their names in the store, where these are not its own.

    It logs a warning of those of another module, which both share from now on; ones that were loaded are meant for it.

    Raises:
        ValueError: for parameters that cannot be its own.
    """
    if pyro.settings.get("module_local_params"):
        return
    shared = False
    for name, value, other in _pairs(module):
        if other.shape != value.shape:
            raise ValueError(
                f"Expected parameter '{module._pyro_name}.{name}' of shape {tuple(value.shape)}; the parameter store "
                f"has one of shape {tuple(other.shape)}, from another guide. Call pyro.clear_param_store() first, or "
                "use pyro.settings.set(module_local_params=True)."
            )
        shared = shared or other is not value and other in _made
        _made[value] = True
    own = {_store_name(module, name) for name, _ in module.named_parameters()}
    for name, other in pyro.get_param_store()._params.items():
        if name.startswith(f"{module._pyro_name}.") and name not in own and other not in _made:
            raise ValueError(
                f"Expected weights of this guide alone in the parameter store; got '{name}' as well, from a guide with "
                "another first call. Call this guide first with the data that the stored weights were trained on."
            )
    if shared:
        logging.getLogger("pyro_nami").warning(
            "The parameter store holds the weights of another guide named '%s'. As all of Pyro's guides do, this one "
            "starts from them, and trains them. For weights of its own call pyro.clear_param_store() before the guide "
            "is made, or use pyro.settings.set(module_local_params=True).",
            module._pyro_name,
        )


def give_to_store(module: PyroModule) -> None:
    """Writes a module's weights to the tensors of their names in the store, as Pyro computes with the latter."""
    with torch.no_grad():
        for _, value, other in _pairs(module):
            if other is not value:
                other.copy_(value)


def warn_of_other_weights(module: PyroModule) -> None:
    """Logs a warning where the store has other weights under the names of a module that was unpickled."""
    if any(
        other is not value and not torch.equal(other.detach().to(value), value)
        for _, value, other in _pairs(module)
    ):
        logging.getLogger("pyro_nami").warning(
            "The parameter store holds other weights under the names of the loaded guide '%s', and Pyro computes with "
            "the weights of the store. Call pyro.clear_param_store() before the guide is loaded, or use "
            "pyro.settings.set(module_local_params=True).",
            module._pyro_name,
        )


def _pairs(module: PyroModule) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields the name and the value of each parameter, and the tensor that the store has under its name.

    The latter is the value itself where the store has none, or each module keeps parameters of its own.
    """
    local = pyro.settings.get("module_local_params")
    stored = {} if local else pyro.get_param_store()._params
    for name, value in module.named_parameters():
        yield name, value, stored.get(_store_name(module, name), value)


def _store_name(module: PyroModule, name: str) -> str:
    """Returns the name in the store of a module's parameter."""
    return f"{module._pyro_name}.{name.removesuffix('_unconstrained')}"


# parameter that a guide no longer has -> those that came in its place; optimizers keep old ones alive
_heirs = WeakTensorKeyDictionary()


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
    heirs = [*map(weakref.ref, after)]
    for each in before:
        _heirs[each] = heirs


@functools.cache  # one for all guides, as none may be removed while torch goes through them
def _register() -> Any:
    return register_optimizer_step_pre_hook(_adopt)


def _adopt(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Replaces parameters of an optimizer, before its step."""
    known = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for group in optimizer.param_groups:
        for old in [each for each in group["params"] if each in _heirs]:
            heirs = [heir() for heir in _heirs.pop(old)]
            new = [heir for heir in heirs if heir is not None and id(heir) not in known]
            known.update(map(id, new))
            group["params"][:] = [each for each in group["params"] if each is not old] + new
            optimizer.state.pop(old, None)
            if hasattr(optimizer, "_numel_cache"):  # of LBFGS
                optimizer._numel_cache = None
