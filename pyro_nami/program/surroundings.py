"""`Surroundings`: the data that a model reads besides its arguments, as they were at one call.

A model may read data from globals, closures, attributes of objects, classes and modules, and items of lists and dicts.
A fixed guide answers for the data of training, wherever the model reads them, so these are put back while the model is
run for such an answer. Attributes count if their names occur in code that the model reaches.

Not seen are data inside objects of libraries (a data frame that is written to), containers of more than 1,000 items,
arrays of more than 65,536 numbers that are written to in place, and tensors that are, where `functools.partial` binds
them. While data are put back, other threads see them.
"""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import (
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pyro_nami.program.isolation import names_in, reached

__all__ = ["PLAIN", "Surroundings"]

# Items of a container, and places in all; to compare 1,000 takes a millisecond of each training step.
MOST_ITEMS = 1000
# Numbers of an array whose content is compared, which takes 0.1 ms of each training step; larger arrays that are
# written to in place are not seen.
MOST_ARRAY = 2**16
LIBRARIES = frozenset({"torch", "pyro", "numpy", "pyro_nami"})  # whose code holds no data of a user
NAMESPACES = (SimpleNamespace, Namespace)  # classes of the standard library that hold data
NUMBERS = (bool, int, float, str)
PLAIN = (*NUMBERS, NoneType)
# attributes that torch sets on modules
OWN_NAMES = frozenset({"training", "_parameters", "_buffers", "_modules"})
MISSING, ALL = object(), object()


class _Place(NamedTuple):
    """Where a value is found: an item of a list or dict, an attribute, or all items of a list or dict.

    Attributes:
        holder: the list, dict or object.
        key: of the item or attribute; `ALL` for all items.
        value: what the place held.
        copy: the same with copies of tensors and arrays, which may be written to later.
        stamp: of `value`: another one once it is written to.
    """

    holder: Any
    key: Any
    value: Any
    copy: Any
    stamp: Hashable

    def replaced(self, value: Any) -> _Place:
        """Returns the place with another value; the place itself if that is the same."""
        return self if value is self.copy else self._replace(value=value, copy=value, stamp=None)

    def has_changed(self) -> bool:
        """Whether the place holds something else now; of all items, whether there are more."""
        now = _read(self.holder, self.key)
        if isinstance(now, _Items):
            return bool(now.keys() - self.value.keys())
        if self.is_number or isinstance(now, NUMBERS):
            return type(now) is not type(self.value) or bool(now != self.value)
        return now is not self.copy and (now is not self.value or _stamp(now) != self.stamp)

    @property
    def is_number(self) -> bool:
        """Whether it held a number, a flag or a string."""
        return isinstance(self.value, NUMBERS)


class _Items(dict):
    """What a list or dict holds, by index or key."""


class Surroundings:
    """The data that a model reads besides its arguments.

    Args:
        roots: the model, and those of its arguments that are objects.
        apart: keys of places that do not count, as `changed` returns them.
        steps: the most steps from the model to a value: a method, its object, a dict in it and a tensor are four.

    Example:
        >>> import torch
        >>> data = {"x": torch.tensor(1.0)}
        >>> def model():
        ...     return data["x"].item()
        >>> then = Surroundings([model])
        >>> data["x"] = torch.tensor(2.0)
        >>> then.are_current(), then.around(model)(), model()
        (False, 1.0, 2.0)
    """

    def __init__(
        self, roots: Iterable[Any], apart: Collection[Hashable] = (), *, steps: int = 6
    ) -> None:
        self._roots = list(roots)
        self._apart = apart
        self._home = {_package_of(root) for root in self._roots}
        self._names = {"forward", "__call__"}  # that occur in code
        before = 0
        while len(self._names) > before:  # as code may name attributes of what was looked at before
            before = len(self._names)
            self._places: dict[Hashable, _Place] = {}
            # kept alive, as places are known by the identity of their holders
            self._seen = reached(self._roots, self._parts, steps, 10 * MOST_ITEMS)

    # ---- then and now

    def are_of(self, roots: list[Any]) -> bool:
        """Whether these are the surroundings of some model and arguments."""
        return len(roots) == len(self._roots) and all(map(_is_same_root, roots, self._roots))

    def are_current(self) -> bool:
        """Whether all data are what they were; numbers, flags and strings do not count, as they may be counters."""
        return not any(
            place.has_changed() for place in self._places.values() if not place.is_number
        )

    def changed(self) -> frozenset[Hashable]:
        """Returns the keys of all places that hold something else now."""
        return frozenset(key for key, place in self._places.items() if place.has_changed())

    def now(self) -> Surroundings:
        """Returns the surroundings as they are now; these, if nothing has changed."""
        return Surroundings(self._roots, self._apart) if self.changed() else self

    @property
    def has_data(self) -> bool:
        """Whether there is any place that holds more than a number, a flag or a string."""
        return any(not place.is_number for place in self._places.values())

    def around(self, model: Callable) -> Callable:
        """Returns a model that reads these surroundings."""
        return partial(_run_within, self, model)

    def changed_from(
        self, before: Surroundings | None, change: Callable[[Any, Any], Any]
    ) -> Surroundings:
        """Returns surroundings with ``change(old, value)`` in place of each value.

        Args:
            before: other surroundings, whose value at a place is the old one; None where they lack the place.
            change: returns the value itself where it is to stay.
        """
        other = copy.copy(self)
        places = {} if before is None else before._places
        other._places = {
            key: place.replaced(change(places[key].copy if key in places else None, place.copy))
            for key, place in self._places.items()
        }
        return other

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts back all values that have changed; at the end those that were there in between."""
        changed = [place for place in self._places.values() if place.has_changed()]
        between = [(place, _read(place.holder, place.key)) for place in changed]
        try:
            for place in changed:
                _write(place.holder, place.key, place.copy)
            yield
        finally:
            for place, value in reversed(between):
                _write(place.holder, place.key, value)

    # ---- places

    def _parts(self, value: Any) -> list[Any]:
        """Notes the places of a value, and returns what they hold, to be looked at next."""
        with suppress(Exception):  # whatever objects of others raise that are looked at
            return [part for part in self._parts_of(value) if type(part) not in PLAIN]
        return []

    def _parts_of(self, value: Any) -> list[Any]:
        if isinstance(value, (Tensor, np.ndarray)):
            return []
        if isinstance(value, partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, MethodType):
            return [value.__func__, value.__self__]
        if isinstance(value, FunctionType):
            return self._parts_of_function(value)
        if isinstance(value, tuple):
            return list(value[:MOST_ITEMS])
        if isinstance(value, list):
            return self._items(value)
        if isinstance(value, dict):
            return [*self._items(value), *self._attributes(value)]
        return self._attributes(value)

    def _items(self, holder: list | dict) -> list[Any]:
        """Notes the items of a list or dict, and which there are; nothing of a long one."""
        if max(len(holder), len(self._places)) > MOST_ITEMS:
            return []
        found = [self._note(holder, key) for key in _read(holder, ALL)]
        self._note(holder, ALL)
        return found

    def _parts_of_function(self, function: FunctionType) -> list[Any]:
        if self._is_foreign(function.__module__):
            return []
        names = names_in(function.__code__)
        self._names.update(names)
        cells = [self._note(cell, "cell_contents") for cell in function.__closure__ or ()]
        wrapped = getattr(function, "__wrapped__", None)
        return [*cells, *self._note_names(function.__globals__, names), wrapped]

    def _attributes(self, value: Any) -> list[Any]:
        """Returns attributes and methods of a user's object, class or module, as far as code names them."""
        if isinstance(value, ModuleType):
            foreign = self._is_foreign(value.__name__)
            return [] if foreign else self._note_names(vars(value), self._names)
        kind = value if isinstance(value, type) else type(value)
        own = [each for each in kind.__mro__ if not self._is_foreign(each.__module__)]
        if not own and not isinstance(value, NAMESPACES):
            return []
        found: list[Any] = []
        for each in own:
            for name in sorted(self._names & vars(each).keys()):
                held = vars(each)[name]
                if isinstance(held, (staticmethod, classmethod)):
                    found.append(held.__func__)
                elif isinstance(held, property):
                    found.append(held.fget)
                elif isinstance(held, MemberDescriptorType):
                    found += [] if value is kind else [self._note(value, name)]
                elif isinstance(held, FunctionType) or not hasattr(type(held), "__get__"):
                    found.append(self._note(each, name))
        own_names = vars(value) if hasattr(value, "__dict__") and value is not kind else {}
        found += self._note_names(own_names, self._names - OWN_NAMES)
        if isinstance(value, nn.Module):
            found += self._note_names(value._buffers, self._names)
            found += [part for name, part in value._modules.items() if name in self._names]
        return found

    def _note_names(self, holder: dict[str, Any], names: Iterable[str]) -> list[Any]:
        """Notes names of a namespace, and returns what they stand for."""
        found = sorted(name for name in holder.keys() & set(names) if not name.startswith("_pyro"))
        return [self._note(holder, name) for name in found]

    def _note(self, holder: Any, name: Any) -> Any:
        """Notes a place if it holds data; returns what it holds."""
        key, value = (id(holder), name), _read(holder, name)
        with suppress(Exception):  # whatever copies of others' objects raise
            if key not in self._apart and len(self._places) <= MOST_ITEMS and _is_data(value):
                place = _Place(holder, name, value, _copied(value), _stamp(value))
                self._places.setdefault(key, place)
        return value

    def _is_foreign(self, module: str | None) -> bool:
        """Whether a module is of a library, unless the model is of the same."""
        package = str(module).split(".")[0]
        if package in self._home or package == "__main__":
            return False
        file = getattr(sys.modules.get(package), "__file__", None) or ""
        is_installed = "site-packages" in file or "dist-packages" in file
        return is_installed or package in LIBRARIES or package in sys.stdlib_module_names


def _is_data(value: Any) -> bool:
    """Whether a value may be data: no code, and no parameter, which training moves."""
    if isinstance(value, Tensor):
        return not (value.requires_grad or is_lazy(value))
    is_code = callable(value) and not isinstance(value, dict) or isinstance(value, ModuleType)
    return value is not MISSING and not is_code


def _copied(value: Any) -> Any:
    """Returns a value with copies of the tensors and arrays that it is, or that a tuple holds."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is tuple and len(value) <= MOST_ITEMS:
        return tuple(map(_copied, value))
    return value


def _stamp(value: Any) -> Hashable:
    """Returns a value that changes when a tensor, or an array that is not large, is written to."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.size <= MOST_ARRAY and value.dtype != object else None
    is_short = type(value) is tuple and len(value) <= MOST_ITEMS
    return tuple(map(_stamp, value)) if is_short else None


def _is_same_root(new: Any, old: Any) -> bool:
    """Whether a root is the same; a bound method is another object whenever it is asked for."""
    return new is old or isinstance(new, MethodType) and bool(new == old)


def _run_within(surroundings: Surroundings, model: Callable, *args: Any, **kwargs: Any) -> Any:
    with surroundings.restored():
        return model(*args, **kwargs)


def _read(holder: Any, key: Any) -> Any:
    """Returns what a place holds: an item, all items, or an attribute (a class's own one); `MISSING` for nothing."""
    if key is ALL:
        return _Items(enumerate(holder) if isinstance(holder, list) else dict.items(holder))
    if isinstance(holder, list):
        return holder[key] if key < len(holder) else MISSING
    if isinstance(holder, dict):
        return dict.get(holder, key, MISSING)
    if isinstance(holder, type):
        return vars(holder).get(key, MISSING)
    with suppress(AttributeError, ValueError):  # the latter of an empty cell
        return getattr(holder, key)
    return MISSING


def _write(holder: Any, key: Any, value: Any) -> None:
    """Puts a value in a place, or takes it away; not by methods of a user's class, which may do something else."""
    if key is ALL:
        now = _read(holder, ALL)
        for more in reversed([key for key in now if key not in value]):
            _write(holder, more, MISSING)
        for lost in [key for key in value if key not in now]:
            _write(holder, lost, value[lost])
    elif isinstance(holder, list):
        holder[key : key + 1] = [] if value is MISSING else [value]
    elif isinstance(holder, dict):
        kind = OrderedDict if isinstance(holder, OrderedDict) else dict
        if value is not MISSING:
            kind.__setitem__(holder, key, value)
        elif key in holder:
            kind.__delitem__(holder, key)
    elif value is MISSING:
        delattr(holder, key)
    else:
        setattr(holder, key, value)


def _package_of(value: Any) -> str:
    """Returns the package of a callable, or of the class of an object."""
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).split(".")[0]
