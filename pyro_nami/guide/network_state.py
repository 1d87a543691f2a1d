"""One pass through a guide's networks: what is known so far, and the parameters of factors given that.

Change this module to change what a pass computes, or when.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_nami.factors.joint import to_sequence
from pyro_nami.guide.conditioning import Source
from pyro_nami.guide.evidence import add_evidence, pooled_part
from pyro_nami.guide.groups import Factor, Group
from pyro_nami.guide.inputs import IndexMaps, Sources, concatenate
from pyro_nami.guide.network import InverseNetwork, Passed
from pyro_nami.networks.running import tempered

__all__ = ["NetworkState", "start_network"]


def start_network(
    network: InverseNetwork,
    maps: IndexMaps,
    *,
    learning: bool = False,
    constant: bool = False,
    indices: Mapping[str, Tensor] | None = None,
) -> NetworkState:
    """Returns the state of a pass at which nothing is known.

    Args:
        network: the networks.
        maps: the call's index maps.
        learning: whether the pass goes into the running averages if it is trained on.
        constant: whether the call's data are the same in every call.
        indices: subsampled plate -> its instances.
    """
    on_data = not network.simulated
    return NetworkState(
        network, maps, learning=learning and on_data, constant=constant and on_data, indices=indices or {}
    )


class NetworkState:
    """One pass through the networks, in the order in which values come to be known; used once.

    All parameters are read when the pass starts: what comes later may run inside the model, whose handlers (a lift,
    a block) must not see them.
    """

    def __init__(
        self, network: InverseNetwork, maps: IndexMaps, *, learning: bool, constant: bool, indices: Mapping[str, Tensor]
    ) -> None:
        self._network, self._constant, self._learning = network, constant, learning
        self._noting = learning and not torch.jit.is_tracing()  # a compiled pass runs no Python
        if self._noting:
            network.quicken()
        self._offsets = network.offsets.start(indices) if constant else {}
        self.couplings = network.couplings.start()
        self._passed = Passed([], {}) if self._noting and network.running_due() else None
        self._features: dict[Hashable, Tensor] = {}
        self._data: set[Hashable] = set()
        self._sources = Sources(self._features, network.dims, network.bound_encoders(constant), maps, self._data)
        self._evidence = network.bound_evidence(constant)
        self._states: list[Any] = [part.start() for part in network.parts[0]]
        self._levers = network.levers() if learning else []
        self._rows: dict[Hashable, Tensor] = {}

    def add(
        self, node: Hashable, features: Tensor, *, drawn: bool = False, share: Tensor | None = None
    ) -> None:
        """Makes a node's raw features ``(*left, *plates, features)`` known; leading plate dims may be left out.

        Args:
            node: a latent.
            features: raw ones.
            drawn: whether the value was drawn in this pass; ``share`` is by how much it follows its factor's biases.
        """
        features = self._network.standardize(node, features)
        if drawn and node in self._network.factors and not self._network.factors[node].joint:
            slack = self._slack(node)
            if slack is not None:
                features = features - (slack if share is None else share * slack)
        self._features[node] = tempered(features)

    def _slack(self, name: Hashable) -> Tensor | None:
        """Returns zeros that move as a factor's standardized draw does with its biases, ``(*plates, elements)``.

        What others read of a draw is centered on what it usually is, so it does not move with the biases in the end.
        Gradients that take the center for fixed would have the draw pull all those that read it along with it.
        """
        network, factor = self._network, self._network.factors[name]
        if not self._learning or len(factor.locations) != 1:
            return None
        rows, index = network.location_rows(name), network.group_of[name]
        moving = self._levers[index][rows]
        if name in self._offsets:
            offset = self._offsets[name][..., factor.locations[0]]
            moving = moving + (offset - offset.detach()) / network.parts[0][index].bias_units[rows]
        return network.scaling(name)[1] * moving

    def put(self, node: Hashable, features: Tensor) -> None:
        """Makes the features of data known, which are standardized already."""
        self._features[node] = features
        if not features.requires_grad:
            self._data.add(node)

    def params(self, name: Hashable) -> Tensor:
        """Returns the parameters of a factor, ``(*batch, elements, params)``.

        A sequential factor's need its own features known as well.
        """
        factor = self._network.factors[name]
        group = self._network.groups[self._network.group_of[name]]
        self._advance(name, group.head[name] + (factor.num_elements if factor.sequential else 1))
        raw = self._rows[name].unflatten(-1, (-1, factor.num_raw))
        raw = add_evidence(
            raw, factor.num_params, factor.evidence, self._sums(factor), *self._network.scaling(name)
        )
        return shifted(raw, self._offsets.get(name))

    def _sums(self, factor: Factor) -> list[Tensor | None]:
        """Returns the sums of a factor's evidence, ``(*batch, elements, inputs + 2)`` for each source of it.

        What never changes is left to the factor's biases.
        """
        sums: list[Tensor | None] = []
        for read in factor.evidence:
            if self._constant and self._network.is_left_out(read.source, factor.batch):
                sums.append(None)
                continue
            pooled, _ = pooled_part(read.source)
            assert pooled is not None
            total = self._sources.evidence(read.source, self._evidence[pooled])
            sums.append(read.of_elements(total, factor.num_elements))
        return sums

    def conditionals(self, name: Hashable, ndims: int) -> ElementConditionals:
        """Returns what draws a sequential factor's elements one by one; ``ndims`` are the batch dims of its site."""
        index = self._network.group_of[name]
        self._advance(name, self._network.groups[index].head[name] + 1)
        factor = self._network.factors[name]
        first = _trimmed(self._rows[name][..., : factor.num_raw], ndims)
        sums = [total if total is None else _trimmed(total, ndims + 1) for total in self._sums(factor)]
        scaling = self._network.scaling(name) if sums else ()
        inputs = functools.partial(self._inputs, index)
        offset = self._offsets.get(name)
        if offset is not None:
            offset = _trimmed(offset, ndims + 1)
        slack = self._slack(name)
        if slack is not None:
            slack = _trimmed(slack, ndims)
        return ElementConditionals(
            factor, self._network.affine(name), first, self._states[index], sums, scaling, inputs, offset, slack
        )

    def _advance(self, name: Hashable, stop: int) -> None:
        """Takes the steps before ``stop`` of the group of ``name``, whose inputs must all be known, in one advance."""
        index = self._network.group_of[name]
        group = self._network.groups[index]
        state = self._states[index]
        begin = state.step
        if begin >= stop:
            return
        parts = [self._column(column, group) for step in group.columns[begin:stop] for column in step]
        x = concatenate(parts) if parts else self._network.no_columns()
        rows, self._states[index] = state.advance(self._inputs(index, begin, stop, x), stop)
        if self._noting and rows.requires_grad:
            # Bound to no state, as a graph that holds what holds the graph is never freed.
            rows.register_hook(functools.partial(_learn, network=self._network, passed=self._passed))
            self._noting = False
        keys, sizes = group.row_blocks(begin, stop)
        for key, part in zip(keys, rows.split(sizes, -1) if len(sizes) > 1 else [rows]):
            self._rows.setdefault(key, part)  # what is there already was used to draw the factor

    def _inputs(self, index: int, begin: int, stop: int, x: Tensor) -> Tensor:
        """Returns what a group's network reads of its columns of steps ``begin`` to ``stop - 1``."""
        if not x.shape[-1]:
            return x
        bounds, running = self._network.parts[0][index].steps.columns, self._network.running[index]
        if self._passed is not None:
            self._passed.inputs.append((index, bounds[begin], bounds[stop], x.detach()))
        return running(x, bounds[begin], bounds[stop])

    def note(self, name: Hashable, elements: Tensor, anchor: Tensor | None, dims: Sequence[int]) -> None:
        """Takes note of a draw, relative to its anchor, for the running averages; ``dims`` are those of a block."""
        if self._passed is None or not self._network.factors[name].locations:
            return
        if anchor is not None:
            location, scale = anchor.detach().unbind(-1)
            elements = (elements - location) / scale
        elements = elements.detach().to(self._network.dtype)
        self._passed.innovations[name] = to_sequence(elements, dims)

    def non_finite_parameter(self) -> str | None:
        """Returns the name of a parameter that is not finite, None if all are."""
        for name, value in self._network.named_parameters():
            if not value.isfinite().all():
                return f"network.{name.removesuffix('_unconstrained')}"
        return None

    def all_inputs(self, group: Group) -> Tensor:
        """Returns what a group's network reads, ``(*batch, inputs)``, where all values are known."""
        index = self._network.groups.index(group)
        parts = [self._column(column, group) for column in group.all_columns]
        x = concatenate(parts) if parts else self._network.no_columns()
        return self._inputs(index, 0, len(group.steps), x)

    def settle(self) -> None:
        """Centers the inputs that are data on those of this call, all of which must be known."""
        for group, running in zip(self._network.groups, self._network.running):
            start = 0
            for source, first, last in group.all_columns:
                if self._network.is_data(source):
                    x = self._sources.value(source)[..., first:last]
                    running.settle(x, start, start + last - first)
                start += last - first
            running.settled = True
        self._sources.forget()

    def _column(self, column: tuple[Source, int, int], group: Group) -> Tensor:
        source, first, last = column
        if self._constant and self._network.is_left_out(source, group.factors[0].batch):
            return self._network.center(group, column)
        value = self._sources.value(source)
        return value if last - first == value.shape[-1] else value[..., first:last]


def _learn(gradient: Tensor, network: InverseNetwork, passed: Passed | None) -> None:
    """Learns from a pass, once, as a hook of what its networks returned."""
    if passed is not None:
        network.learn(passed)
        passed.inputs.clear()
        passed.innovations.clear()
    network.count_pass()


class ElementConditionals:
    """Parameters of a sequential factor's elements, one by one or all at once; immutable.

    Features come raw, and are standardized by ``affine``, shift and scale of shape ``(elements, features)``.
    """

    def __init__(
        self,
        factor: Factor,
        affine: tuple[Tensor, Tensor],
        first: Tensor,
        state: Any,
        sums: Sequence[Tensor | None],
        scaling: Sequence[Tensor],
        inputs: Callable[[int, int, Tensor], Tensor],
        offset: Tensor | None,
        slack: Tensor | None,
    ) -> None:
        self._factor, self._affine, self._first, self._state = factor, affine, first, state
        self._sums, self._scaling, self._inputs, self._offset = sums, scaling, inputs, offset
        self._slack = slack

    def first(self) -> tuple[Tensor, Callable]:
        """Returns the parameters ``(*batch, params)`` of element 0, and the function that goes on from there."""
        return self._params(self._first, 0), self._next(self._state, 0)

    def _next(self, state: Any, element: int) -> Callable:
        def following(features: Tensor) -> tuple[Tensor, Callable]:
            shift, scale = (part[element] for part in self._affine)
            seen = torch.addcmul(shift, features.to(shift.dtype), scale)
            if self._slack is not None:
                seen = seen - self._slack[..., element : element + 1]
            seen = tempered(seen)
            rows, advanced = state.advance(self._inputs(state.step, state.step + 1, seen), state.step + 1)
            params = self._params(_trimmed(rows, features.dim() - 1), element + 1)
            return params, self._next(advanced, element + 1)

        return following

    def _params(self, raw: Tensor, element: int) -> Tensor:
        """Returns one element's parameters from its rows."""
        if not self._sums and self._offset is None:
            return raw
        return self._whole(raw.unsqueeze(-2), slice(element, element + 1)).squeeze(-2)

    def _whole(self, raw: Tensor, part: slice) -> Tensor:
        """Returns the parameters ``(*batch, elements, params)`` of some elements from their rows."""
        if self._sums:
            sums = [total if total is None else total[..., part, :] for total in self._sums]
            scaling = [each[part] for each in self._scaling]
            raw = add_evidence(raw, self._factor.num_params, self._factor.evidence, sums, *scaling)
        return shifted(raw, None if self._offset is None else self._offset[..., part, :])

    def all(self, features: Tensor) -> Tensor:
        """Returns the parameters ``(*batch, elements, params)`` at ``features`` ``(*batch, elements, features)``."""
        count = self._factor.num_elements
        shift, scale = self._affine
        seen = tempered(torch.addcmul(shift, features.to(shift.dtype), scale))[..., :-1, :].flatten(-2)
        step = self._state.step
        rows, _ = self._state.advance(self._inputs(step, step + count - 1, seen), step + count - 1)
        rows = _trimmed(rows, features.dim() - 2).unflatten(-1, (count - 1, self._factor.num_raw))
        first = self._first.unsqueeze(-2)
        raw = torch.cat([first.expand(rows.shape[:-2] + first.shape[-2:]), rows], -2)
        return self._whole(raw, slice(None))


def shifted(params: Tensor, offset: Tensor | None) -> Tensor:
    """Returns parameters ``(*batch, elements, n)`` with an offset added to the first of them."""
    return params if offset is None else params + F.pad(offset, (0, params.shape[-1] - offset.shape[-1]))


def _trimmed(rows: Tensor, ndims: int) -> Tensor:
    """Returns rows ``(*batch, n)`` without leading batch dims of size 1 beyond ``ndims``."""
    while rows.dim() - 1 > ndims and rows.shape[0] == 1:
        rows = rows[0]
    return rows
