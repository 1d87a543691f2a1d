"""The names of guides in Pyro's parameter store, where equal names mean shared parameters.

Pyro gives two modules of one class the same name, and the second one the weights of the first,
silently. Pyro's own tests rely on this, with warnings as errors; so a second guide of that name is
logged, not warned of.
"""

from __future__ import annotations

import logging

import pyro
from pyro.nn import PyroModule
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["check_store"]

_made = WeakTensorKeyDictionary()  # parameter of a module that was checked here -> True


def check_store(module: PyroModule) -> None:
    """Compares a new module's parameters with those of their names in the store, where these are not its own.

    It logs a warning of those of another module, which both share from now on; ones that were loaded are meant for it.

    Raises:
        ValueError: for parameters that cannot be its own.
    """
    if pyro.settings.get("module_local_params"):
        return
    stored, shared = pyro.get_param_store()._params, False
    for name, value in module.named_parameters():
        other = stored.get(f"{module._pyro_name}.{name.removesuffix('_unconstrained')}", value)
        if other.shape != value.shape:
            raise ValueError(
                f"Expected parameter '{module._pyro_name}.{name}' of shape {tuple(value.shape)}; the parameter store "
                f"has one of shape {tuple(other.shape)}, from another guide. Call pyro.clear_param_store() first, or "
                "use pyro.settings.set(module_local_params=True)."
            )
        shared = shared or other is not value and other in _made
        _made[value] = True
    own = {
        f"{module._pyro_name}.{name.removesuffix('_unconstrained')}"
        for name, _ in module.named_parameters()
    }
    for name, other in stored.items():
        if name.startswith(f"{module._pyro_name}.") and name not in own and other not in _made:
            raise ValueError(
                f"Expected weights of this guide in the parameter store; got '{name}' as well, of a guide that was "
                "made from another call. Let the first call be one with the data that it was trained on."
            )
    if shared:
        logging.getLogger("pyro_nami").warning(
            "The parameter store holds the weights of another guide named '%s', so this one starts from them, and "
            "trains them: so Pyro has it. Call pyro.clear_param_store() before making a guide of its own, or use "
            "pyro.settings.set(module_local_params=True).",
            module._pyro_name,
        )
