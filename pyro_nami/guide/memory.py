"""What a guide was trained on: the data last seen, and the last source of a call's data, for calls that bring none.

Rows of a plate that these data do not cover are new: their latents are drawn from the model's own conditional. Change
this module when something else of the data is to be remembered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import replace
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyro_nami.guide.arguments import Arguments
from pyro_nami.guide.call import Call
from pyro_nami.guide.conditioning import covariates_of
from pyro_nami.guide.plan import Plan
from pyro_nami.guide.rules import fixed_size
from pyro_nami.guide.shapes import resized_plates

__all__ = ["Memory", "last_seen", "same_values"]

_SAME = 1e-7  # relative error of marks of the same data
Context = tuple[tuple, dict, dict, dict]


class Memory:
    """The data that a guide was trained on.

    ``context`` has arguments, keyword arguments, instances and values of the last call in training, kept where latents
    are drawn from exact conditionals, which are derived from them.

    Example:
        >>> memory = Memory(varied=False)
        >>> memory.keep({"y": torch.ones(3)}, None)
        >>> memory.holds([("y", torch.ones(3))]), memory.holds([("y", torch.zeros(3))])
        (True, False)
    """

    def __init__(self, varied: bool) -> None:
        self.seen: dict[Any, Tensor] = {}  # observed site, its covariates, or ("index", rows, plate) -> last values
        self.marks: dict[Any, Tensor] = {}  # of those of them that a loaded guide has not seen itself, see `_mark`
        self.varied = varied  # whether data of several kinds were seen in training
        self.context: Context | None = None
        self.latest: tuple[tuple, dict] | None = None  # arguments of the latest call in training
        self.constants: dict[Hashable, Any] = {}  # of exact conditionals, of the data last seen; see `draw`
        self.tables: dict[Hashable, Any] = {}  # of latents that come first, of one call's data
        self.starts: dict[Hashable, Any] = {}  # of Newton's method, of all data
        self._equal: dict[Hashable, Arguments] = {}  # observed node -> a value that is the one seen

    def __getstate__(self) -> dict[str, Any]:
        found: dict[str, dict] = {"_equal": {}, "constants": {}, "tables": {}, "starts": {}}
        latest = self.latest if _is_plain(self.latest) else None
        return {**self.__dict__, **found, "context": self.plain_context(), "latest": latest}

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo), context=self.context, latest=self.latest)
        return copied

    def plain_context(self) -> Context | None:
        """Returns `context` if it consists of tensors and plain values, which can be saved anywhere."""
        return self.context if _is_plain(self.context) else None

    def all_marks(self) -> dict[Any, Tensor]:
        """Returns the marks of all data last seen."""
        return {**self.marks, **{name: _mark(value) for name, value in self.seen.items()}}

    def holds(self, data: Iterable[tuple[Hashable, Tensor]]) -> bool:
        """Whether data, by node, are those last seen in training, or none were seen."""
        return not (self.seen or self.marks) or all(self._was_seen(node, value) for node, value in data)

    def renew(self) -> None:
        """Forgets what was found for other data than those that are kept now."""
        for found in (self._equal, self.constants, self.tables):
            found.clear()

    def keep(self, values: Mapping[Any, Tensor], context: Context | None) -> None:
        """Takes in the data of a call in training."""
        self.seen.update({name: value.detach() for name, value in values.items()})
        if context is not None:
            self.context = _detached(context)

    def load(self, state: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        """Takes over a saved state, its keys by ``names``; data seen here stay that have the marks of those saved."""
        marks = self.marks = {names[key]: mark for key, mark in state.get("marks", {}).items()}
        own = {n: value for n, value in self.seen.items() if n in marks and _same_mark(marks[n], _mark(value))}
        self.seen = {**own, **{names[key]: value for key, value in state.get("seen", {}).items()}}
        self.context = state.get("context") or (self.context if own.keys() == marks.keys() else None)
        self.varied = bool(state.get("varied"))
        self._equal = {}

    def apply(self, fn: Callable[[Tensor], Tensor], device: Any) -> None:
        """Applies ``fn`` to all tensors kept, to move them to another device."""
        self.seen = {name: fn(value) for name, value in self.seen.items()}
        self.marks = {name: mark.to(device) for name, mark in self.marks.items()}
        self.context, self.latest = tree_map_only(Tensor, fn, (self.context, self.latest))
        self._equal = {}

    def _was_seen(self, node: Hashable, value: Tensor) -> bool:
        if node in self._equal and self._equal[node].are([value]):
            return True
        seen, mark = self.seen.get(node), self.marks.get(node)
        if same_values(seen, value) if seen is not None else mark is not None and _same_mark(mark, _mark(value)):
            self._equal[node] = Arguments([value])
            return True
        return False


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether values are the same, missing ones included."""
    return one.shape == other.shape and bool(((one == other) | (one != one)).all())


def last_seen(
    call: Call, plan: Plan, memory: Memory, absent: Collection[str], resized: Mapping[str, int]
) -> Call:
    """The last source: the data last seen in training, for sites that a call brings none for, and their covariates.

    Rows are new whose covariates are not those last seen, and those of plates ``resized`` by index maps.
    """
    for name in absent:
        if name not in memory.seen:
            raise ValueError(
                f"Expected data for the observed site '{name}'; this call brings none, and the guide has seen "
                f"none. Pass it as the model takes it, or as observations={{'{name}': value}}; a loaded guide has "
                "data of its own only if it was saved with save_data=True."
            )
    seen = {name: memory.seen[name] for name in absent}
    new_plates = dict(resized)
    for name, value in seen.items():
        site = plan.sites[name]
        frames = [call.frames[plate] for plate in site.plates & call.frames.keys()]
        new_plates.update(resized_plates(value, frames, site.event_dim))
    plates: frozenset[str] = frozenset().union(*(plan.sites[name].plates for name in absent))
    covariates = dict(call.covariates)
    for name in plan.columns:
        before, now = memory.seen.get(covariates_of(name)), call.covariates.get(name)
        shared = plates & plan.sites[name].plates
        if before is None or not shared:
            continue
        covariates[name] = before
        if now is not None and (before.shape != now.shape or not torch.equal(before, now)):
            new_plates.update({call.frames[plate].name: call.frames[plate].size for plate in shared})
    unseen = _unseen(plan, new_plates) if new_plates else frozenset()
    derived = frozenset(
        name
        for name, group in plan.groups.items()
        if name not in unseen and not set(group.children).isdisjoint(absent)
    )
    return replace(
        call,
        values={**call.values, **seen},
        held=call.held if new_plates else {**call.held, **seen},
        covariates=covariates,
        unseen=unseen,
        context=_context(call, plan, memory, absent) if derived else None,
        derived=derived,
    )


def _context(call: Call, plan: Plan, memory: Memory, absent: Collection[str]) -> Call:
    """Returns the last call in training, with the values that this one brings."""
    if memory.context is None:
        raise ValueError(
            f"Expected data for the observed site '{next(iter(absent))}': latents {', '.join(plan.groups)} are "
            "drawn from exact conditionals, derived from the arguments of the last call with data, which were not "
            "saved with the guide. Pass the data, or make the guide with exact=False."
        )
    args, kwargs, indices, values = memory.context
    values = {**values, **call.values}
    return Call(call.model, args, kwargs, indices=indices, values=values, held=values)


def _unseen(plan: Plan, new_plates: Mapping[str, int]) -> frozenset[str]:
    """Returns the latents of new plate rows; they are drawn from the model's own conditional."""
    unseen = frozenset(name for name in plan.order if plan.bayesnet.plates[name] & new_plates.keys())
    for name in plan.order:
        reads = unseen.intersection(plan.inverse.parents[name])
        if name not in unseen and reads:
            raise NotImplementedError(
                f"Expected a guide that draws '{name}' before '{min(reads)}', in order to predict new rows of "
                f"plate '{min(new_plates)}'; this one has the other order. Use inverse='reverse', or pass the "
                "plate's data."
            )
        joint = plan.learned[name].factor.joint if name in plan.learned else ()
        for plate in joint:
            if name in unseen and plate in new_plates:
                raise ValueError(fixed_size(name, plate, plan.plates.sizes[plate], new_plates[plate]))
    return unseen


def _mark(value: Tensor) -> Tensor:
    """Returns three numbers that tell data apart, to the rounding of float32, and do not tell what they are."""
    flat = value.detach().flatten().double().nan_to_num()
    place = torch.arange(1, len(flat) + 1, dtype=flat.dtype, device=flat.device)
    return torch.stack([flat.abs() @ place.log1p(), flat @ place.sin(), place.sum()])


def _same_mark(mark: Tensor, other: Tensor) -> bool:
    off = (mark - other.to(mark.device)).abs()
    return bool((off[:2] <= _SAME * mark[0]).all() and off[2] == 0)


def _detached(value: Any) -> Any:
    """Returns a value with its tensors detached; `tree_map_only` takes several times as long."""
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (list, tuple):
        return type(value)(map(_detached, value))
    if type(value) is dict:
        return {key: _detached(each) for key, each in value.items()}
    return value if type(value) in (int, float, bool, str, NoneType) else tree_map_only(Tensor, Tensor.detach, value)


def _is_plain(value: Any) -> bool:
    """Whether a value is made of what ``torch.load`` reads with ``weights_only=True``."""
    if type(value) in (list, tuple, dict):
        return all(map(_is_plain, [*value, *value.values()] if isinstance(value, dict) else value))
    return isinstance(value, Tensor) or type(value) in (int, float, bool, str, NoneType)
