"""Names of guides in Pyro's parameter store, by which parameters are the same. Change this module to name otherwise.

Pyro gives two modules of one class the same name, and the second one the first one's weights; nothing says so. A guide
here gets a name of its own; but weights that were loaded into the store are meant for whoever has their name.
"""

from __future__ import annotations

import itertools

import pyro
from pyro.nn import PyroModule
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["check_store", "own_name"]

_made = WeakTensorKeyDictionary()  # parameter of a module that was named here -> True


def own_name(module: PyroModule) -> None:
    """Renames a module whose name in the store another one has that was named here; see `pyro.get_param_store`."""
    if pyro.settings.get("module_local_params"):
        return
    own, stored, first = {id(each) for each in module.parameters()}, pyro.get_param_store()._params, module._pyro_name
    taken = [name for name, value in stored.items() if value in _made and id(value) not in own]
    for number in itertools.count(2):
        if not any(name.startswith(f"{module._pyro_name}.") for name in taken):
            break
        _rename(module, f"{first}_{number}")
    for parameter in module.parameters():
        _made[parameter] = True


def check_store(module: PyroModule) -> None:
    """Raises ValueError where the store was loaded with parameters of a module's names that cannot be its own."""
    store = pyro.get_param_store()
    for name, value in module.named_parameters():
        full = f"{module._pyro_name}.{name.removesuffix('_unconstrained')}"
        if full in store and store[full].shape != value.shape and not pyro.settings.get("module_local_params"):
            raise ValueError(
                f"Expected parameter '{full}' of shape {tuple(value.shape)}; the parameter store has one of shape "
                f"{tuple(store[full].shape)}, from another guide. Call pyro.clear_param_store() first, or use "
                "pyro.settings.set(module_local_params=True)."
            )


def _rename(module: PyroModule, name: str) -> None:
    module._pyro_name = name
    for key, child in module._modules.items():
        if isinstance(child, PyroModule):
            _rename(child, f"{name}.{key}")
