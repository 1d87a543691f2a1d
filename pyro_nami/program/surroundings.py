"""`Surroundings`: the data that a model reads besides its arguments, as they were at one call.

A model may read data from closures, globals, attributes of objects and items of containers. A fixed
guide answers for the data of training, wherever the model reads them, so these values are put back
while the model is run for such an answer.
"""

from __future__ import annotations

import copy
import itertools
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["Surroundings"]

MOST_PLACES = 1000  # that are looked at in every training step; ten take a microsecond
# from the model to a value: a method, its object, a dict in it and a tensor are four
MOST_STEPS = 6
LIBRARIES = frozenset({"torch", "pyro", "numpy", "pyro_nami"})  # whose code holds no data of a user
NAMESPACES = (SimpleNamespace, Namespace)  # classes of the standard library that hold data
NUMBERS = (bool, int, float, str)
MISSING = object()


class _Place(NamedTuple):
    """A place that holds a value: an item of a dict or a list, or what a closure's cell contains.

    Attributes:
        holder: the dict, list or cell.
        key: of the item; None for a cell.
        value: what the place held.
        copy: the same, or a copy of a tensor, which may be written to later.
        version: of a tensor, which counts writes; None for other values, and for buffers, which training writes.
    """

    holder: Any
    key: Any
    value: Any
    copy: Any
    version: int | None

    @classmethod
    def of(cls, holder: Any, key: Any, is_buffer: bool) -> _Place:
        """Returns a place with what it holds."""
        value = _held(holder, key)
        if not isinstance(value, Tensor):
            return cls(holder, key, value, value, None)
        version = None if is_buffer or value.is_inference() else value._version
        return cls(holder, key, value, value.detach().clone(), version)

    def is_same(self) -> bool:
        """Whether the place holds what it held, not written to since."""
        now = _held(self.holder, self.key)
        if isinstance(self.value, NUMBERS):
            return type(now) is type(self.value) and now == self.value
        return now is self.value and (self.version is None or now._version == self.version)

    def renewed(self) -> _Place:
        """Returns the place with the number that it holds now, where it held one."""
        is_number = isinstance(self.value, NUMBERS)
        return _Place.of(self.holder, self.key, False) if is_number else self

    def put(self, value: Any) -> None:
        """Puts a value there; `MISSING` takes the item away."""
        if isinstance(self.holder, CellType):
            if value is MISSING:
                del self.holder.cell_contents
            else:
                self.holder.cell_contents = value
        elif value is not MISSING:
            self.holder[self.key] = value
        elif isinstance(self.holder, dict):
            self.holder.pop(self.key, None)


class Surroundings:
    """The data that a model reads besides its arguments.

    Args:
        roots: the model, and those of its arguments that are objects.
        apart: places that do not count, as `written` returns them.

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

    def __init__(self, roots: Iterable[Any], apart: Collection[tuple[int, Any]] = ()) -> None:
        self._roots = list(roots)
        self._apart = apart
        self._home = {_package_of(root) for root in self._roots}
        self._places: list[_Place] = []
        seen: dict[int, Any] = {}
        level = self._roots
        for _ in range(MOST_STEPS):
            fresh = {id(value): value for value in level if id(value) not in seen}
            seen |= fresh
            level = [part for value in fresh.values() for part in self._look_at(value)]
        self._seen = list(seen.values())  # kept alive, as places know values by identity

    def are_of(self, roots: list[Any]) -> bool:
        """Whether these are the surroundings of some model and arguments."""
        return len(roots) == len(self._roots) and all(map(_is_same_root, roots, self._roots))

    def are_current(self) -> bool:
        """Whether every place holds the data that it held. Numbers and strings do not count: they may be counters."""
        return all(
            place.is_same() for place in self._places if not isinstance(place.value, NUMBERS)
        )

    def now(self) -> Surroundings:
        """Returns the surroundings as they are now; these, if nothing has changed."""
        if not self.are_current():
            return Surroundings(self._roots, self._apart)
        if all(place.is_same() for place in self._places):
            return self
        other = copy.copy(self)
        other._places = [place.renewed() for place in self._places]
        return other

    @property
    def has_data(self) -> bool:
        """Whether there is any place with data."""
        return any(not isinstance(place.value, NUMBERS) for place in self._places)

    def written(self) -> frozenset[tuple[int, Any]]:
        """Returns the places that hold something else now: after a run of the model, those that it writes itself."""
        return frozenset((id(each.holder), each.key) for each in self._places if not each.is_same())

    def around(self, model: Callable) -> Callable:
        """Returns a model that reads these surroundings."""
        return partial(_run_within, self, model)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts every value back that has changed, numbers as well; at the end those that were there in between."""
        changed = [place for place in self._places if not place.is_same()]
        between = [_held(place.holder, place.key) for place in changed]
        for place in changed:
            place.put(place.copy)
        try:
            yield
        finally:
            for place, value in zip(reversed(changed), reversed(between)):
                place.put(value)

    # ---- finding places

    def _look_at(self, value: Any) -> list[Any]:
        """Notes the places that a value has, and returns what they hold, to be looked at next."""
        if isinstance(value, partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, MethodType):
            return [value.__func__, value.__self__]
        if isinstance(value, FunctionType):
            return self._look_at_function(value)
        if isinstance(value, tuple):
            return list(value)
        if isinstance(value, list):
            return self._note(value, range(min(len(value), MOST_PLACES)))
        if isinstance(value, dict):
            keys = list(itertools.islice(value, MOST_PLACES))
            return [*self._note(value, keys), *self._look_at_object(value)]
        if isinstance(value, nn.Module):
            buffers = self._note(value._buffers, value._buffers, are_buffers=True)
            return [*buffers, *value._modules.values(), *self._look_at_object(value)]
        return self._look_at_object(value)

    def _look_at_function(self, function: FunctionType) -> list[Any]:
        if self._is_foreign(function.__module__):
            return []
        found = [part for cell in function.__closure__ or () for part in self._note(cell, [None])]
        names = [name for name in _names(function.__code__) if name in function.__globals__]
        wrapped = getattr(function, "__wrapped__", None)
        return [*found, *self._note(function.__globals__, names), wrapped]

    def _look_at_object(self, value: Any) -> list[Any]:
        """Looks at the attributes of a user's object, and at the methods of its classes."""
        held = getattr(value, "__dict__", None)
        if isinstance(value, (type, ModuleType)) or not isinstance(held, dict):
            return []
        classes = [each for each in type(value).__mro__ if not self._is_foreign(each.__module__)]
        if not classes and not isinstance(value, NAMESPACES):
            return []
        names = [name for name in held if not name.startswith("_") and name != "training"]
        found = self._note(held, names)
        methods = [part for each in classes for part in vars(each).values()]
        return [*found, *(part for part in methods if isinstance(part, FunctionType))]

    def _note(self, holder: Any, keys: Iterable[Any], are_buffers: bool = False) -> list[Any]:
        """Notes those places of a holder that hold data, and returns what all of them hold."""
        found = []
        for key in keys:
            value = _held(holder, key)
            found.append(value)
            is_apart = (id(holder), key) in self._apart
            if _is_data(value) and not is_apart and len(self._places) < MOST_PLACES:
                self._places.append(_Place.of(holder, key, are_buffers))
        return found

    def _is_foreign(self, module: str | None) -> bool:
        """Whether a module is of a library, unless the model is of the same."""
        package = str(module).split(".")[0]
        if package in self._home or package == "__main__":
            return False
        file = getattr(sys.modules.get(package), "__file__", None) or ""
        is_installed = "site-packages" in file or "dist-packages" in file
        return is_installed or package in LIBRARIES or package in sys.stdlib_module_names


def _held(holder: Any, key: Any) -> Any:
    """Returns what a place holds now; `MISSING` if there is nothing."""
    if isinstance(holder, dict):
        return holder.get(key, MISSING)
    if isinstance(holder, list):
        return holder[key] if key < len(holder) else MISSING
    try:
        return holder.cell_contents
    except ValueError:  # empty as yet
        return MISSING


def _is_data(value: Any) -> bool:
    """Whether a value may be data: no code, and no parameter, which training moves."""
    if isinstance(value, Tensor):
        return not (value.requires_grad or is_lazy(value))
    return not callable(value) and not isinstance(value, ModuleType) or isinstance(value, dict)


def _is_same_root(new: Any, old: Any) -> bool:
    """Whether a root is the same; a bound method is another object whenever it is asked for."""
    return new is old or isinstance(new, (MethodType, *NUMBERS)) and bool(new == old)


def _run_within(surroundings: Surroundings, model: Callable, *args: Any, **kwargs: Any) -> Any:
    with surroundings.restored():
        return model(*args, **kwargs)


def _names(code: CodeType) -> list[str]:
    """Returns the names that code, and the functions that it makes, may look up."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each)]
    return [*code.co_names, *inner]


def _package_of(value: Any) -> str:
    """Returns the package of a callable, or of the class of an object."""
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).split(".")[0]
