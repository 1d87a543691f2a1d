"""From ``path/to/file.py:name`` to a model and its arguments.

Whatever goes wrong in a user's file ends here, as a `Failure` of one line.
"""

from __future__ import annotations

__all__ = ["Failure", "LoadedModel", "loaded", "told"]

import contextlib
import importlib
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pyro
import torch


class Failure(Exception):
    """A command that has no answer; the message says why in one line."""


class LoadedModel(NamedTuple):
    """A model with its arguments, and the file that it is from; None for one of a module."""

    model: Callable
    args: tuple
    kwargs: Mapping[str, Any]
    path: Path | None

    def failure(self, error: Exception, target: str) -> Failure:
        """Returns the failure that stands for an error of ours, or of the user's model."""
        count = len(self.args) + len(self.kwargs)
        called = f"{count} argument(s)" if count else "no arguments"
        return Failure(
            f"The model {target!r}, called with {called}, fails: {told(error, self.path)}. "
            "Give its arguments by --args."
        )


@contextlib.contextmanager
def loaded(target: str, args: str | None, kwargs: str | None, seed: int) -> Iterator[LoadedModel]:
    """Imports the target's file, and yields its model and arguments.

    The folder of a file (the current one, for a module) is on ``sys.path`` meanwhile. What importing it prints goes to
    stderr. The seed is set before import and before the block.

    Args:
        target: ``path/to/file.py:name`` or ``package.module:name``.
        args: an expression for the arguments: a tuple, or anything else for the only argument. Without one, the
            variable ``<name>_args`` of the file is taken, if there is one.
        kwargs: an expression for a dict of keyword arguments.
        seed: of all random numbers.

    Raises:
        Failure: something of this does not work.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise Failure(f"Expected path/to/file.py:name or package.module:name; got {target!r}.")
    path = Path(place).resolve() if place.endswith(".py") or len(Path(place).parts) > 1 else None
    if path is not None and not path.is_file():
        raise Failure(
            f"Expected a Python file; got {place!r}, which does not exist or is not a file."
        )
    pyro.set_rng_seed(seed)
    with _importable(path):
        with contextlib.redirect_stdout(sys.stderr):
            names = _imported(place, path)
            model = _model(names, place, name)
            positional, named = _arguments(names, name, args, kwargs)
        pyro.set_rng_seed(seed)
        yield LoadedModel(model, positional, named, path)


def _arguments(
    names: Mapping[str, Any], name: str, args: str | None, kwargs: str | None
) -> tuple[tuple, Mapping[str, Any]]:
    """Returns a model's arguments, by expressions or as its file has them."""
    given = names.get(f"{name}_args", ()) if args is None else _evaluated(args, "--args", names)
    named = {} if kwargs is None else _evaluated(kwargs, "--kwargs", names)
    if not isinstance(named, Mapping) or not all(isinstance(key, str) for key in named):
        raise Failure(f"Expected --kwargs to be a dict with names as keys; got {kwargs!r}.")
    return given if isinstance(given, tuple) else (given,), named


def told(error: BaseException, path: Path | None = None) -> str:
    """Returns an error's type, the first line of its message, and its last line in the file ``path``."""
    first = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if path is not None and Path(frame.filename) == path]
    where = f" ({path.name}, line {lines[-1]})" if path is not None and lines else ""
    return type(error).__name__ + (f": {first}" if first else "") + where


@contextlib.contextmanager
def _importable(path: Path | None) -> Iterator[None]:
    """Puts the folder of a file, or for a module the current folder, on ``sys.path`` for a block."""
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd() if path is None else path.parent))
    try:
        yield
    finally:
        sys.path[:] = before


def _imported(place: str, path: Path | None) -> Mapping[str, Any]:
    """Returns the names of a file or a module, with their values."""
    try:
        if path is None:
            return vars(importlib.import_module(place))
        return runpy.run_path(str(path), run_name="__model__")
    except (Exception, SystemExit) as error:
        raise Failure(f"Expected {place!r} to import; got {told(error, path)}.") from error


def _model(names: Mapping[str, Any], place: str, name: str) -> Callable:
    if name not in names:
        raise Failure(f"Expected a name in {place!r}; got {name!r}.")
    model = names[name]
    if callable(model) and not isinstance(model, type):
        return model
    kind = (
        "a class; make an instance in the file and name that" if callable(model) else "not callable"
    )
    raise Failure(f"Expected a model, that is a callable; got {name!r}, which is {kind}.")


def _evaluated(expression: str, option: str, names: Mapping[str, Any]) -> Any:
    try:
        return eval(expression, {"torch": torch, "numpy": numpy, "np": numpy, **names})
    except Exception as error:
        raise Failure(
            f"Expected {option} to be a Python expression; got {expression!r}: {told(error)}."
        ) from error
