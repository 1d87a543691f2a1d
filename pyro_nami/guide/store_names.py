"""Names of guides in Pyro's parameter store, by which parameters are the same. Change this module to name otherwise.

Pyro gives two modules of one class the same name, and the second one the first one's weights; nothing says so. A guide
here gets a name of its own; but weights that were loaded into the store are meant for whoever has their name.
"""

from __future__ import annotations

import itertools

import pyro
from pyro.nn import PyroModule
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["own_name"]

_made = WeakTensorKeyDictionary()  # parameter of a module that was named here -> True


def own_name(module: PyroModule) -> None:
    """Renames a module whose name in the store another one has that was named here; see `pyro.get_param_store`."""
    own, stored, first = {id(each) for each in module.parameters()}, pyro.get_param_store()._params, module._pyro_name
    taken = [name for name, value in stored.items() if value in _made and id(value) not in own]
    for number in itertools.count(2):
        if not any(name.startswith(f"{module._pyro_name}.") for name in taken):
            break
        _rename(module, f"{first}_{number}")
    for parameter in module.parameters():
        _made[parameter] = True


def _rename(module: PyroModule, name: str) -> None:
    module._pyro_name = name
    for key, child in module._modules.items():
        if isinstance(child, PyroModule):
            _rename(child, f"{name}.{key}")
