"""What a guide keeps between calls: the call whose data it answers for, and results derived from these data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyro_nami.guide.arguments import Cache
from pyro_nami.guide.call import Call, Derived, Reading
from pyro_nami.guide.mode import Data, DataHistory, Mode, fingerprint
from pyro_nami.program.surroundings import PLAIN, Surroundings

__all__ = ["Memory"]

Context = tuple[tuple, dict, dict, dict]  # arguments, keyword arguments, indices, observed values


class Memory:
    """What a guide keeps from call to call; ``cache`` is for copies of arguments and for fingerprints.

    Example:
        >>> import torch
        >>> memory = Memory(Mode.FIXED, Cache())
        >>> memory.data_of({"y": torch.ones(3)}) == memory.data_of({"y": torch.ones(3, dtype=torch.double)})
        True
    """

    def __init__(self, mode: Mode, cache: Cache) -> None:
        self.mode = mode
        self.cache = cache
        self.history = DataHistory()
        # the call whose data the guide answers for, and what it read, without surroundings in a guide that is not
        # fixed, or was loaded; None where a loaded guide has not made it of the loaded context yet
        self.kept: Reading | None = None
        self._loaded: Context | None = None
        self.has_one_context = True  # whether all training steps had the same arguments
        self.derived = Derived({}, {}, {})

    def __getstate__(self) -> dict[str, Any]:
        lost = {"derived": Derived({}, {}, {}), "kept": None}
        return {**self.__dict__, **lost, "_loaded": self.plain_context()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(
            copy.deepcopy(self.__getstate__(), memo), _loaded=self._loaded, kept=self.kept
        )
        return copied

    @property
    def context(self) -> Context | None:
        """The arguments and observed values of the call whose data the guide answers for."""
        if self.kept is None:
            return self._loaded
        call = self.kept.call
        program = call.program
        return program.args, dict(program.kwargs), dict(call.indices), dict(call.values)

    @property
    def surroundings(self) -> Surroundings | None:
        """What the model read besides its arguments in the kept call; None if that is not known."""
        return self.kept.surroundings if self.kept else None

    def plain_context(self) -> Context | None:
        """Returns `context` if it consists of tensors and plain values, which can be saved anywhere."""
        return self.context if _is_plain(self.context) else None

    def data_of(self, values: Mapping[Hashable, Tensor]) -> Data:
        """Returns node -> fingerprint of its value; only changed tensors are hashed anew."""
        return {
            node: self.cache.get(("fingerprint", node), [value], partial(fingerprint, value))
            for node, value in values.items()
        }

    def frozen(self, call: Call, data: Data) -> Call:
        """Returns a copy of a call and its tensors; the same copy while the arguments and ``data`` stay the same."""
        leaves = [*call.program.leaves(), data]
        return self.cache.get("frozen", leaves, lambda: self._copied(call))

    def _copied(self, call: Call) -> Call:
        copies: dict[int, Tensor] = {}
        program = call.program
        parts = program.args, program.kwargs, call.indices, call.values, call.held
        args, kwargs, indices, values, held = tree_map_only(
            Tensor, lambda value: copies.setdefault(id(value), value.detach().clone()), parts
        )
        held |= {name: values[name] for name in values.keys() - call.moving}
        program = program._replace(args=args, kwargs=kwargs)
        return call._replace(program=program, indices=indices, values=values, held=held)

    def keep(self, reading: Reading) -> None:
        """Makes a frozen call, with its data, the one whose data the guide answers for."""
        before, self.kept = self.kept, reading
        is_other = before is not None and before.call is not reading.call
        if is_other and self.history.is_trained:
            self.has_one_context = False

    def forget_derived(self) -> None:
        """Forgets what was derived from data."""
        self.derived = Derived({}, {}, {})

    def load(self, state: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        """Loads a saved state; ``names`` maps its keys to nodes.

        The call that is kept stays where it has the data of the saved guide.
        """
        data = {names[key]: value for key, value in state.get("data", {}).items()}
        if state.get("context") is not None or self.kept is None or self.kept.data != data:
            self._loaded, self.kept = state.get("context"), None
        self.mode, self.history = Mode(state["mode"]), DataHistory()
        self.history.current = data if state["trained"] else None
        self.history.moving = frozenset(names[key] for key in state.get("moving", ()))
        self.has_one_context = bool(state.get("one_context", True))

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Applies ``fn`` to all tensors kept, to move them to another device."""
        self._loaded, self.kept = tree_map_only(Tensor, fn, self.context), None


def _is_plain(value: Any) -> bool:
    """Whether a value is made of what ``torch.load`` reads with ``weights_only=True``."""
    if type(value) in (list, tuple, dict):
        return all(map(_is_plain, [*value, *value.values()] if isinstance(value, dict) else value))
    return isinstance(value, Tensor) or type(value) in PLAIN
