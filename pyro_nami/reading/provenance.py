"""Which named values a tensor was computed from, followed through torch operations.

Names are kept for each *storage*, below autograd, `vmap` and TorchScript, so writes into buffers,
views and ``out=`` carry them, and no tensor changes its type or shape. A storage that is written in
parts, and what is stacked or computed elementwise from such storages, keeps names for each element:
a scan that fills ``buffer[t]`` step by step, or stacks its steps, leaves every step its own names.
Everywhere else a result has the names of all tensors that the operation read: perhaps too many,
never too few. New torch operations that need a rule are named below.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from typing_extensions import Self  # noqa: UP035  for Python 3.10

__all__ = ["ProvenanceTracker", "tensors_in"]

Names = frozenset[Any]

# Operations whose result takes shape and type, but no values, from their first argument.
_SHAPE_ONLY = {
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "new_empty",
    "new_empty_strided",
    "new_zeros",
    "new_ones",
    "new_full",
}
# Operations whose result is constant if their second argument is the number 0.
_VANISHING = {"mul", "pow"}
# Operations that only move the elements of their first argument.
_MOVES = {"cat", "stack", "index_select", "index", "gather", "flip", "roll", "repeat"}
# Elementwise operations that torch does not mark as such.
_POINTWISE = {"copy_", "_to_copy", "rsub"}
# In-place operations whose result does not depend on what was there before.
_OVERWRITES = {"copy_", "fill_", "zero_"}
# Functions that read numbers out of (nested lists of) tensors and put them into a new tensor.
_CONSTRUCTORS = {
    "tensor",
    "as_tensor",
    "asarray",
    "full",
    "arange",
    "linspace",
    "new_tensor",
    "new_full",
}
# Functions and operations that read numbers out of tensors for their own checks.
_CHECKS = {"one_hot", "_linalg_check_errors", "_assert_async"}
# Functions that hand a tensor's memory to Python without any torch operation.
_EXITS = {"numpy", "tolist", "__array__", "__dlpack__"}


class ProvenanceTracker(TorchDispatchMode):
    """A context in which every torch operation passes the names of its inputs on to its results.

    Attributes:
        escaped: the names whose values left torch for Python so far (``.item()``, ``if``, numpy, lists).

    Example:
        >>> a, b, buffer = torch.ones(()), torch.ones(()), torch.zeros(2)
        >>> with ProvenanceTracker() as tracker:
        ...     tracker.tag(a, {"a"})
        ...     tracker.tag(b, {"b"})
        ...     buffer[0], buffer[1] = a, a + b
        ...     sign = 1 if b > 0 else -1
        >>> sorted(tracker.provenance(buffer)), sorted(tracker.provenance(buffer[0])), sorted(tracker.escaped)
        (['a', 'b'], ['a'], ['b'])
    """

    def __init__(self) -> None:
        super().__init__()
        self.escaped: Names = frozenset()
        # Per storage a label, an index into `_sets`: ``()`` for all its elements, or one for each of them.
        self._entries: dict[StorageWeakRef, Tensor] = {}
        self._sets: list[Names] = []
        self._label_of: dict[Names, Tensor] = {}
        self._exits = _ExitWatch(self)
        compiler = sys.modules.get("torch._dynamo")  # there if the model may be compiled
        self._dispatch = self._followed if compiler is None else compiler.disable(self._followed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # for torch, which would import its compiler, for seconds, to keep it away from here
        return False

    def __enter__(self) -> Self:
        super().__enter__()
        self._exits.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exits.__exit__(*exc_info)
        super().__exit__(*exc_info)

    def tag(self, tensor: Tensor, names: Iterable[Any]) -> None:
        """Makes ``names`` the provenance of the elements of ``tensor``, in place of what it was."""
        self._write(tensor, self._label(frozenset(names)))

    def provenance(self, *values: Any) -> Names:
        """The names that reached any tensor in ``values`` (tensors, and nested lists, tuples and dicts)."""
        return frozenset().union(
            *(self._union(self._labels(tensor)) for tensor in tensors_in(values))
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._dispatch(func, args, kwargs or {})

    def _followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation, with the names of what it read."""
        result = func(*args, **kwargs)
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        name, written, overwritten = _effects(func, args, kwargs)
        if name == "set_" or not any(_storage(tensor) in self._entries for tensor in inputs):
            return result
        sources = tensors_in((args[1:], kwargs)) if name in _SHAPE_ONLY else inputs
        sources = [
            tensor for tensor in sources if not any(tensor is target for target in overwritten)
        ]
        if name in _VANISHING and any(type(arg) in (int, float) and arg == 0 for arg in args[1:]):
            sources = []
        if not outputs and not written and name not in _CHECKS:
            self.escaped |= self.provenance(sources)
        old = {_storage(tensor) for tensor in inputs}
        for target in (*written, *(tensor for tensor in outputs if _storage(tensor) not in old)):
            flow = self._flow(func, name, sources, args, kwargs, target.shape)
            self._write(target, flow, fresh=_storage(target) not in old)
        return result

    def _flow(
        self, func: Any, name: str, sources: list[Tensor], args: Any, kwargs: Any, shape: Any
    ) -> Tensor:
        """The label of what reaches a result of ``shape``, ``()`` or one for each element."""
        labels = [self._labels(tensor) for tensor in sources]
        if name not in ("cat", "stack") and all(label.dim() == 0 for label in labels):
            return self._label(self.provenance(sources))
        if name in _POINTWISE or torch.Tag.pointwise in func.tags:
            if all(_broadcasts(tensor.shape, shape) for tensor in sources):
                return self._merge(labels, shape)
        elif name in _MOVES:
            moved = tree_map_only(Tensor, lambda t: self._labels(t).expand(t.shape), args[0])
            where = tree_map_only(Tensor, Tensor.cpu, args[1:])
            others = self._label(self.provenance(args[1:], kwargs))
            return self._merge([func(moved, *where, **kwargs), others], shape)
        return self._label(self.provenance(sources))

    def _merge(self, labels: list[Tensor], shape: Any) -> Tensor:
        """The unions of the names behind labels of broadcastable shapes, element by element."""
        merged = self._label(frozenset()).expand(shape)
        for other in labels if merged.numel() else ():
            pairs = torch.stack([merged, other.expand(shape)]).reshape(2, -1)
            pairs, where = pairs.unique(dim=1, return_inverse=True)
            unions = [self._label(self._sets[a] | self._sets[b]) for a, b in zip(*pairs.tolist())]
            merged = torch.stack(unions)[where].reshape(shape)
        return merged

    def _label(self, names: Names) -> Tensor:
        if names not in self._label_of:
            # labels stay on the host, whatever they are of
            self._label_of[names] = torch.tensor(len(self._sets), device="cpu")
            self._sets.append(names)
        return self._label_of[names]

    def _labels(self, tensor: Tensor) -> Tensor:
        """The label of a tensor, ``()`` or one for each element."""
        storage = _storage(tensor)
        entry = None if storage is None else self._entries.get(storage)
        if entry is None:
            return self._label(frozenset())
        if entry.dim() and entry.numel() != _capacity(tensor):  # a view as numbers of another size
            return self._label(self._union(entry))
        return _window(entry, tensor) if entry.dim() else entry

    def _union(self, labels: Tensor) -> Names:
        indices = labels.unique().tolist() if labels.dim() else [int(labels)]
        return frozenset().union(*(self._sets[i] for i in indices))

    def _write(self, tensor: Tensor, flow: Tensor, fresh: bool = False) -> None:
        storage = _storage(tensor)
        if storage is None:
            return
        if flow.dim() and flow.numel() and (flow == flow.flatten()[0]).all():
            flow = flow.flatten()[0]
        capacity = _capacity(tensor)
        before = self._entries.get(storage, self._label(frozenset()))
        covers = fresh or (tensor.is_contiguous() and tensor.numel() == capacity)
        if flow.dim() == 0 and (covers or before.dim() == 0 and before == flow):
            self._entries[storage] = flow
            return
        if before.dim() == 0 or before.numel() != capacity:
            before = self._label(self._union(before)).repeat(capacity)
        places = _window(torch.arange(capacity, device="cpu"), tensor)
        before[places.flatten()] = flow.expand(tensor.shape).flatten()
        self._entries[storage] = before


class _ExitWatch(TorchFunctionMode):
    """Sees the ways out of torch that are no operations, and the ways back in through constructors."""

    def __init__(self, tracker: ProvenanceTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tracker = self._tracker
        before, tracker.escaped = tracker.escaped, frozenset()
        result = func(*args, **kwargs)
        left, tracker.escaped = tracker.escaped, before
        if name in _EXITS:
            left = left | tracker.provenance(args)
        elif name in _CONSTRUCTORS:
            left = tracker.provenance(args[1:] if name.startswith("new_") else args, kwargs)
        if not left or name in _CHECKS:
            return result
        if name in _CONSTRUCTORS:
            tracker.tag(result, left)
        elif name == "__getitem__":  # a view, chosen by a number that was read from a tensor
            left, result = tracker.provenance(result) | left, result.clone()
            tracker.tag(result, left)
        elif name == "__setitem__":
            tracker.tag(args[0], tracker.provenance(args[0]) | left)
        else:
            tracker.escaped |= left
        return result


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _effects(func: Any, args: Any, kwargs: Any) -> tuple[str, list[Tensor], list[Tensor]]:
    """An operation's short name, the arguments that it writes, and those of them that it does not read."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return "", [], []
    name = schema.name.split("::")[-1]
    written = []
    overwritten = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            targets = tensors_in(
                args[position] if position < len(args) else kwargs.get(argument.name)
            )
            written += targets
            overwritten += targets if argument.kwarg_only or name in _OVERWRITES else []
    return name, written, overwritten


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse and other layouts without a storage
        return None


def _capacity(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.itemsize


def _window(entry: Tensor, tensor: Tensor) -> Tensor:
    return entry.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _broadcasts(shape: Any, target: Any) -> bool:
    return len(shape) <= len(target) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(target))
    )
