"""Runs a model without side effects: on random numbers, parameters, buffers or the modes of layers."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pyro
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = [
    "bounded_indices",
    "constant_parameters",
    "dropping",
    "forked_rng",
    "kept_store",
    "names_in",
    "on_ordinary_tensors",
    "outside_of_traces",
    "random_layers",
    "reached",
    "rng_state",
    "seed_rng",
    "set_rng_state",
    "untouched",
]

P = ParamSpec("P")
R = TypeVar("R")

# Layers that drop units in training, and those whose training mode mixes the instances of a batch.
_DROPPING = (_DropoutNd, nn.RNNBase, nn.MultiheadAttention)
_STOCHASTIC = (*_DROPPING, _NormBase)
_ATEN = torch.ops.aten
_BY_DIMS = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_}  # (values, indices of the first dims)
_ALONG_A_DIM = {_ATEN.index_select, _ATEN.gather}  # (values, dim, index); of rows: (values, index)


def random_layers(*roots: Any) -> list[nn.Module]:
    """Returns the layers of a model, and of its arguments, that draw random numbers in their present mode.

    Example:
        >>> dropout = nn.Dropout(0.5)
        >>> random_layers(dropout), random_layers(dropout.eval())
        ([Dropout(p=0.5, inplace=False)], [])
    """
    layers = [each for each in _modules(roots) if isinstance(each, _DROPPING)]
    return [each for each in layers if each.training and getattr(each, _share_of(each))]


@contextmanager
def dropping(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Sets the dropout share of layers to one half, so that two runs hardly ever drop the same units."""
    before = [(layer, layer.training, getattr(layer, _share_of(layer))) for layer in layers]
    for layer, *_ in before:
        layer.training = True
        setattr(layer, _share_of(layer), 0.5)
    try:
        yield
    finally:
        for layer, training, share in before:
            layer.training = training
            setattr(layer, _share_of(layer), share)


def _share_of(layer: nn.Module) -> str:
    """Returns the attribute in which a layer keeps its dropout share."""
    return "p" if isinstance(layer, _DropoutNd) else "dropout"


def outside_of_traces(function: Callable[[], R]) -> R:
    """Returns what a function returns, without gradients, by computations that no `torch.jit.trace` records.

    They run on a thread of their own, as a trace follows the one that began it.

    Example:
        >>> outside_of_traces(lambda: (torch.jit.is_tracing(), torch.is_grad_enabled()))
        (False, False)
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.no_grad()(function)).result()


@contextmanager
def untouched(*roots: Any) -> Iterator[None]:
    """Restores random number generators, parameter store, and modes and buffers of the modules ``roots`` use.

    Meanwhile dropout and batch normalization layers are in evaluation mode, and a GPU's sums are deterministic, and
    its `bounded_indices`.

    Args:
        roots: The model (a module, method, function, or a handler around one) and its arguments.

    Example:
        >>> with untouched():
        ...     _ = pyro.param("of_a_run", torch.rand(3))
        >>> "of_a_run" in pyro.get_param_store()
        False
    """
    modules = {module: module.training for module in _modules(roots)}
    buffers = [
        (module._buffers, key, buffer, buffer.clone())
        for module in modules
        for key, buffer in module._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]
    try:
        for module, training in modules.items():
            module.training = training and not isinstance(module, _STOCHASTIC)
        with kept_store(), forked_rng(), _deterministic(), bounded_indices():
            yield
    finally:
        for module, training in modules.items():
            module.training = training
        for place, key, buffer, saved in buffers:
            place[key] = buffer if torch.equal(buffer, saved) else buffer.copy_(saved)


@contextmanager
def kept_store() -> Iterator[None]:
    """Restores the entries of the parameter store at its end.

    Example:
        >>> with kept_store():
        ...     _ = pyro.param("of_a_run", torch.rand(3))
        >>> "of_a_run" in pyro.get_param_store()
        False
    """
    store = pyro.get_param_store()
    before = {table: dict(entries) for table, entries in vars(store).items()}
    try:
        yield
    finally:
        vars(store).update(before)


@contextmanager
def constant_parameters(names: Iterable[str], roots: Iterable[Any]) -> Iterator[None]:
    """Has runs of a model record no gradients by its parameters: by those of some names, and those of its modules.

    Example:
        >>> linear = nn.Linear(1, 1)
        >>> with constant_parameters([], [linear]):
        ...     y = linear(torch.ones(1, requires_grad=True))
        >>> y.sum().backward()
        >>> linear.weight.grad is None, linear.weight.requires_grad
        (True, True)
    """
    stored = pyro.get_param_store()._params
    found = [stored[name] for name in names if name in stored]
    found += [value for module in _modules(roots) for value in module.parameters()]
    held = [value for value in found if value.is_leaf and value.requires_grad]
    for value in held:
        value.requires_grad_(False)
    try:
        yield
    finally:
        for value in held:
            value.requires_grad_(True)


def seed_rng(seed: int) -> None:
    """Seeds the random number generators of torch, Python and numpy, as `pyro.set_rng_seed` does.

    That keeps a record for GPUs that are not in use, which takes longer than a run of many a model.

    Example:
        >>> seed_rng(3)
        >>> first = torch.rand(()), random.random(), float(np.random.rand())
        >>> pyro.set_rng_seed(3)
        >>> first == (torch.rand(()), random.random(), float(np.random.rand()))
        True
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def forked_rng() -> Iterator[None]:
    """Restores the random number generators of torch (CUDA as well), numpy and Python at its end."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def rng_state() -> dict[str, Any]:
    """Returns the states of the random number generators of torch (CUDA as well), numpy and Python, as plain data."""
    numpy_state: Any = np.random.get_state()
    kind, keys, *rest = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
        "python": random.getstate(),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Sets a result of `rng_state`; CUDA generators only where there are as many devices."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))
    random.setstate(state["python"])


@contextmanager
def _deterministic() -> Iterator[None]:
    """Has torch add up in the same order in every run, where a GPU would not: runs are compared to the bit."""
    mode = torch.get_deterministic_debug_mode()
    if mode or not torch.cuda.is_initialized():
        yield
        return
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)


@contextmanager
def bounded_indices() -> Iterator[None]:
    """Has indices that are out of bounds raise an `IndexError` on a GPU as well, where they would end the process.

    A model that is written for one draw, such as ``theta[group]``, has such when it is run for many to see whether it
    can be. Each index is waited for, so this is for runs at set-up.
    """
    with _BoundedIndices() if torch.cuda.is_initialized() else nullcontext():
        yield


class _BoundedIndices(TorchDispatchMode):
    """Looks at indices before operations do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in _BY_DIMS:
            dim = 0
            for index in args[1]:
                masks = index is not None and index.dtype in (torch.bool, torch.uint8)
                if index is not None and not masks:
                    _check_index(index, args[0].shape[dim], negative=True)
                dim += index.dim() if masks else 1
        elif packet in _ALONG_A_DIM or packet is _ATEN.embedding:
            dim, index = args[1:3] if packet in _ALONG_A_DIM else (0, args[1])
            _check_index(index, (args[0].shape or (1,))[dim])
        return func(*args, **(kwargs or {}))


def _check_index(index: Tensor, size: int, negative: bool = False) -> None:
    if index.numel():
        least, most = torch.stack(index.aminmax()).tolist()
        if least < -size * negative or most >= size:
            raise IndexError(
                f"Expected indices of a dim of size {size}; got {least} to {most}, out of bounds."
            )


def on_ordinary_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that keeps tensors for later calls: in inference mode it gets, and makes, ordinary ones."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            args, kwargs = tree_map_only(
                Tensor, lambda t: t.clone() if t.is_inference() else t, (args, kwargs)
            )
            return function(*args, **kwargs)

    return wrapped


def _modules(roots: Iterable[Any]) -> list[nn.Module]:
    """The modules, and parts of these, that callables are, wrap, close over or name, up to four steps away."""
    found = [value for value in reached(roots, _parts, 4) if isinstance(value, nn.Module)]
    return list(dict.fromkeys(part for module in found for part in module.modules()))


def reached(
    roots: Iterable[Any],
    parts_of: Callable[[Any], Iterable[Any]],
    steps: int,
    most: int | None = None,
) -> list[Any]:
    """Returns objects, and what they are made of, the nearest first, each once.

    Args:
        roots: the objects.
        parts_of: object -> what it is made of.
        steps: how far the search goes, the objects themselves included.
        most: the most parts that are looked at in one step; None: all.
    """
    seen: dict[int, Any] = {}
    level = list(roots)
    for _ in range(steps):
        fresh = {id(value): value for value in level if id(value) not in seen}
        seen |= fresh
        parts = (part for value in fresh.values() for part in parts_of(value))
        level = list(itertools.islice(parts, most))
    return list(seen.values())


def _parts(value: Any) -> list[Any]:
    """What a callable (or a list) is made of; nothing for a module or for anything else."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, FunctionType):
        named = [value.__globals__.get(name) for name in names_in(value.__code__)]
        cells = [cell for cell in value.__closure__ or () if cell != CellType()]  # none is empty
        return [*(cell.cell_contents for cell in cells), *named]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__, *getattr(value.__self__, "__dict__", {}).values()]
    return [getattr(value, key, None) for key in ("fn", "__wrapped__")] if callable(value) else []


def names_in(code: CodeType) -> list[str]:
    """Returns the names that code, and the functions that it makes, may look up."""
    made = [part for part in code.co_consts if isinstance(part, CodeType)]
    return [*code.co_names, *(name for part in made for name in names_in(part))]
