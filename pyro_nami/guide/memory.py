"""What a guide keeps between calls: the call whose data it answers for, and results derived from these data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from types import NoneType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyro_nami.guide.arguments import Arguments
from pyro_nami.guide.call import Call, Derived
from pyro_nami.guide.mode import Data, DataHistory, Mode, fingerprint
from pyro_nami.program.surroundings import Surroundings

__all__ = ["Memory"]

Context = tuple[tuple, dict, dict, dict]  # arguments, keyword arguments, indices, observed values


class Memory:
    """What a guide keeps from call to call.

    Example:
        >>> import torch
        >>> memory = Memory(Mode.FIXED)
        >>> memory.data_of({"y": torch.ones(3)}) == memory.data_of({"y": torch.ones(3, dtype=torch.double)})
        True
    """

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.history = DataHistory()
        self.context: Context | None = None  # of the call whose data the guide answers for
        # that call; None where a loaded guide has not made it of the context yet
        self.call: Call | None = None
        # what the model reads besides its arguments, at that call; None in a guide that is not fixed, or was loaded
        self.surroundings: Surroundings | None = None
        self.has_one_context = True  # whether all training steps had the same arguments
        self.derived = Derived({}, {}, {})
        # arguments and data of the latest copy, and it
        self._frozen: tuple[Arguments, Data, Call] | None = None
        # node -> value last seen, and its fingerprint
        self._fingerprints: dict[Hashable, tuple[Arguments, str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_fingerprints": {},
            "derived": Derived({}, {}, {}),
            "context": self.plain_context(),
            "call": None,
            "surroundings": None,
            "_frozen": None,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(
            copy.deepcopy(self.__getstate__(), memo),
            context=self.context,
            surroundings=self.surroundings,
        )
        return copied

    def plain_context(self) -> Context | None:
        """Returns `context` if it consists of tensors and plain values, which can be saved anywhere."""
        return self.context if _is_plain(self.context) else None

    def data_of(self, values: Mapping[Hashable, Tensor]) -> Data:
        """Returns node -> fingerprint of its value; only changed tensors are hashed anew."""
        return {node: self._fingerprint(node, value) for node, value in values.items()}

    def frozen(self, call: Call, data: Data) -> Call:
        """Returns a copy of a call, with copies of its tensors; the stored copy if the call is the same.

        Args:
            call: with its ``data``.
        """
        leaves = call.program.leaves()
        if self._frozen is not None and self._frozen[0].are(leaves) and self._frozen[1] == data:
            return self._frozen[2]
        copies: dict[int, Tensor] = {}
        parts = (
            call.program.args,
            dict(call.program.kwargs),
            dict(call.indices),
            dict(call.values),
            dict(call.held),
        )
        args, kwargs, indices, values, held = tree_map_only(
            Tensor, lambda value: copies.setdefault(id(value), value.detach().clone()), parts
        )
        held |= {name: value for name, value in values.items() if name not in call.moving}
        program = call.program._replace(args=args, kwargs=kwargs)
        frozen = replace(call, program=program, indices=indices, values=values, held=held)
        self._frozen = Arguments(leaves), data, frozen
        return frozen

    def keep(self, call: Call, surroundings: Surroundings | None) -> None:
        """Makes a frozen call the one whose data the guide answers for."""
        self.surroundings = surroundings
        if call is self.call:
            return
        before, self.call = self.call, call
        self.context = (
            call.program.args,
            dict(call.program.kwargs),
            dict(call.indices),
            dict(call.values),
        )
        if before is not None and self.history.is_trained:
            self.has_one_context = False

    def thaw(self) -> None:
        """Forgets the latest copy of a call, as the model reads other data besides its arguments."""
        self._frozen = None

    def forget_derived(self) -> None:
        """Forgets what was derived from data."""
        self.derived = Derived({}, {}, {})

    def load(self, state: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        """Loads a saved state; ``names`` maps its keys to nodes.

        The call that is kept stays where it has the data of the saved guide.
        """
        data = {names[key]: value for key, value in state.get("data", {}).items()}
        kept = (
            self._frozen[1] if self._frozen is not None and self._frozen[2] is self.call else None
        )
        if state.get("context") is not None or kept != data:
            self.context, self.call, self.surroundings = state.get("context"), None, None
        self.mode, self.history = Mode(state["mode"]), DataHistory()
        self.history.current = data if state["trained"] else None
        self.history.moving = frozenset(names[key] for key in state.get("moving", ()))
        self.has_one_context = bool(state.get("one_context", True))

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Applies ``fn`` to all tensors kept, to move them to another device."""
        self.context, self.call = tree_map_only(Tensor, fn, self.context), None
        self.surroundings = None  # its tensors are elsewhere
        self._frozen = None
        self._fingerprints.clear()

    def _fingerprint(self, node: Hashable, value: Tensor) -> str:
        kept = self._fingerprints.get(node)
        if kept is None or not kept[0].are([value]):
            kept = self._fingerprints[node] = Arguments([value]), fingerprint(value)
        return kept[1]


def _is_plain(value: Any) -> bool:
    """Whether a value is made of what ``torch.load`` reads with ``weights_only=True``."""
    if type(value) in (list, tuple, dict):
        return all(map(_is_plain, [*value, *value.values()] if isinstance(value, dict) else value))
    return isinstance(value, Tensor) or type(value) in (int, float, bool, str, NoneType)
