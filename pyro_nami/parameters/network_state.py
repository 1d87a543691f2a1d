"""`NetworkState`: one pass through a guide's networks, with the values known so far and parameters given these."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pyro import poutine
from torch import Tensor

from pyro_nami.factors.joint import to_sequence
from pyro_nami.factors.normals import LinearMap
from pyro_nami.factors.path_scored import PathShare
from pyro_nami.networks.running import tempered
from pyro_nami.parameters.additions import Additions
from pyro_nami.parameters.factor_groups import Factor
from pyro_nami.parameters.group_network import GroupNetwork
from pyro_nami.parameters.inputs import IndexMaps, Sources, concatenate
from pyro_nami.parameters.inverse_network import InverseNetwork, TrainingRecord, coupling_of

__all__ = ["NetworkState", "Numbers"]


class NetworkState:
    """One pass through the networks, in the order in which values come to be known; used once.

    All parameters are read when the pass starts: the model's handlers (a lift, a block) must not see them.

    Args:
        network: the networks.
        maps: the call's index maps.
        learning: whether the pass goes into averages if it is trained on.
        constant: whether the data of training are the same in every step.
        offsets: whether the call has the instances that offsets are of.
        indices: subsampled plate -> its instances.
        refinement: factor -> what is added to the parameters of this call's instances, ``(*plates, elements, params)``.

    Example:
        >>> from pyro_nami.parameters.conditioning import Direct, Plates
        >>> standard = {name: (torch.zeros(1), torch.ones(1)) for name in "yz"}
        >>> factor = Factor("z", frozenset(), (), 1, 2, 1, False, (Direct("y"),))
        >>> options = {"latents": "z", "simulated": True, "shared": True, "hidden_features": (4,), "factory": {}}
        >>> network = InverseNetwork([factor], standard, Plates(()), make_encoder=None, adding=(), **options)
        >>> network.set_initial({"z": torch.tensor([[3.0, 0.0]])})
        >>> state = NetworkState(network, IndexMaps({}, {}))
        >>> state.put("y", torch.tensor([1.0]))
        >>> state.params("z").tolist()
        [[3.0, 0.0]]
    """

    def __init__(
        self,
        network: InverseNetwork,
        maps: IndexMaps,
        *,
        learning: bool = False,
        constant: bool = False,
        offsets: bool = False,
        indices: Mapping[str, Tensor] | None = None,
        refinement: Mapping[Hashable, Tensor] | None = None,
    ) -> None:
        learning, constant = learning and not network.simulated, constant and not network.simulated
        offsets = offsets and not network.simulated
        options: dict[str, Any] = {"constant": constant, "offsets": offsets}
        options |= {"indices": indices, "refinement": refinement}
        self._remake = functools.partial(NetworkState, network, maps, **options)
        self._fixed: NetworkState | None = None
        self._drawn: set[Hashable] = set()
        self._network, self._constant = network, constant
        self._noting = learning and not torch.jit.is_tracing()  # a compiled pass runs no Python
        self._counted = False
        if self._noting:
            network.quicken()
        self._offsets = network.offsets.start(indices) if offsets else {}
        for name, added in (refinement or {}).items():
            self._offsets[name] = self._offsets[name] + added if name in self._offsets else added
        self._couplings: dict[Hashable, Any] = network.couplings.start()
        self._stacks = {
            name: each.start() for group in network.groups for name, each in group.stacks.items()
        }
        due = self._noting and network.groups and network.groups[0].running.due
        self._record = TrainingRecord([], {}) if due else None
        self._sources = Sources(network.dims, maps, *network.pooling(constant))
        self._states: dict[GroupNetwork, Any] = {
            group: group.mlp.start() for group in network.groups
        }
        self._learning, self._pulls = learning, dict[GroupNetwork, Tensor]()
        self._rows: dict[Hashable, Tensor] = {}
        # what a group's network has read so far, for stacks
        self._read: dict[GroupNetwork, Tensor] = {}

    @property
    def nesting(self) -> int:
        """The number of plate dims."""
        return self._network.nesting

    # ---- what is known

    def put(self, node: Hashable, features: Tensor) -> None:
        """Makes the features of data known, which are standardized already."""
        self._sources.put(node, features)

    def add(
        self, node: Hashable, features: Tensor, *, drawn: bool = False, share: Tensor | None = None
    ) -> None:
        """Makes a latent's raw features ``(*left, *plates, features)`` known; leading plate dims may be left out.

        ``drawn`` says whether the value was drawn in this pass, ``share`` by how much it follows its factor's biases.
        """
        features = self._network.standardize(node, features)
        if drawn:
            self._drawn.add(node)
        factor = self._network.factors.get(node)
        pull = self._pull(factor) if drawn and factor is not None and not factor.joint else None
        if pull is not None:
            features = features - (pull if share is None else share * pull)
        self._sources.put(node, tempered(features))

    def reads(self, node: Hashable) -> bool:
        """Whether any factor reads a node, its own elements included."""
        return node in self._network.read

    def _pull(self, factor: Factor) -> Tensor | None:
        """Returns zeros that move as a factor's standardized draw does with its biases, ``(*plates, elements)``.

        What others read of a draw is centered on what it usually is, so it does not move with the biases in the end.
        Gradients that take the center for fixed would have the draw pull all those that read it along with it.
        """
        if not self._learning or len(factor.locations) != 1:
            return None
        group = self._network.group_of[factor.name]
        if group not in self._pulls:
            self._pulls[group] = group.pulls()
        pull = group.locations(self._pulls[group], factor)
        if factor.name in self._offsets:
            offset = self._offsets[factor.name][..., factor.locations[0]]
            pull = pull + (offset - offset.detach()) / group.locations(group.mlp.bias_units, factor)
        return self._network.affine(factor.name)[1][:, 0] * pull

    def note(
        self, name: Hashable, elements: Tensor, anchor: Tensor | None, dims: Sequence[int]
    ) -> None:
        """Records a draw, relative to its anchor, for averages; ``dims`` are those of a block."""
        if self._record is None or not self._network.factors[name].locations:
            return
        if anchor is not None:
            location, scale = anchor.detach().unbind(-1)
            elements = (elements - location) / scale
        elements = elements.detach().to(self._network.like.dtype)
        self._record.innovations[name] = to_sequence(elements, dims)

    def learns(self) -> bool:
        """Whether a parameter is to get gradients: of a guide that is frozen nothing has."""
        return any(parameter.requires_grad for parameter in self._network.parameters())

    def passes(self) -> int:
        """Returns the number of passes that gradients have come back from."""
        return self._network.passes

    def settle(self) -> None:
        """Centers the inputs that are data on those of this call, all of which must be known, or widens their units."""
        for group in self._network.groups:
            for source, first, last, start in group.columns(0, len(group.steps)):
                if source in group.data:
                    x = self._sources.value(source)[..., first:last]
                    group.running.settle(x, start, start + last - first)
            group.running.settled = True

    def of_data(self, group: GroupNetwork) -> list[Tensor]:
        """Returns what the factors of a group read of data alone, ``(*plates, features)`` each."""
        return [self._sources.value(source) for source in sorted(group.data, key=str)]

    # ---- parameters

    def fixed(self, name: Hashable) -> NetworkState | Numbers:
        """Returns what gives a factor's parameters with those of networks as numbers, so that draws alone move them."""
        factor = self._network.factors[name]
        if not (factor.sequential or factor.coupled or self._network.reads(name, self._drawn)):
            return Numbers(self)
        if self._fixed is None:
            with poutine.block(), torch.no_grad():
                self._fixed = self._remake()
            self._fixed._sources.take(self._sources)
        return self._fixed

    def path_share(self, name: Hashable) -> PathShare:
        """Returns what share of a latent's score gradients leave out."""
        return self._network.path_shares[name]

    def params(self, name: Hashable) -> Tensor:
        """Returns the parameters of a factor, ``(*batch, elements, params)``.

        A sequential factor's need its own features known as well.
        """
        factor, group = self._network.factors[name], self._network.group_of[name]
        self._advance(group, group.head[name] + (factor.num_elements if factor.sequential else 1))
        rows = self._rows[name].unflatten(-1, (-1, factor.num_rows))
        return self._restrained(name, self._additions(factor).params(rows))

    def coupling(self, name: Hashable) -> Any:
        """Returns the map that couples the elements of a factor whose parameters have been asked for."""
        if name not in self._stacks:
            return LinearMap(self._restrained(coupling_of(name), self._couplings[name]))
        group = self._network.group_of[name]
        return self._stacks[name](group.context(self._read[group], self._network.factors[name]))

    def _restrained(self, name: Hashable, value: Tensor) -> Tensor:
        """Returns a value whose gradient is kept from being far longer than usual, where it learns from data."""
        if self._learning and value.requires_grad and not torch.jit.is_tracing():
            value.register_hook(functools.partial(self._network.restrain, name))
        return value

    def conditionals(self, name: Hashable, ndims: int) -> ElementConditionals:
        """Returns what draws a sequential factor's elements one by one; ``ndims`` are the batch dims of its site."""
        factor, group = self._network.factors[name], self._network.group_of[name]
        self._advance(group, group.head[name] + 1)
        return ElementConditionals(
            factor,
            self._network.affine(name),
            _trimmed(self._rows[name][..., : factor.num_rows], ndims),
            self._states[group],
            functools.partial(self._inputs, group),
            self._additions(factor, ndims),
            _trimmed(self._pull(factor), ndims),
        )

    def _additions(self, factor: Factor, ndims: float = math.inf) -> Additions:
        """Returns what adds to the rows of a factor; what never changes is left to its biases."""
        totals: list[Tensor | None] = []
        for each in factor.pseudo:
            if self._constant and each.source in self._network.group_of[factor.name].constant:
                totals.append(None)
            else:
                total = each.of_elements(self._sources.total(each.source), factor.num_elements)
                totals.append(_trimmed(total, ndims + 1))
        counts = [factor.num_params, *(each.num_params for each in factor.pseudo)]
        offset = _trimmed(self._offsets.get(factor.name), ndims + 1)
        return Additions(
            counts, totals, self._network.affine(factor.name) if totals else (), offset
        )

    def _advance(self, group: GroupNetwork, stop: int) -> None:
        """Takes the steps of a group before ``stop``, whose inputs must all be known, in one advance."""
        begin = self._states[group].step
        if begin >= stop:
            return
        x = self.inputs(group, begin, stop)
        rows, self._states[group] = self._states[group].advance(x, stop)
        if group.stacks:
            self._read[group] = concatenate([self._read[group], x]) if group in self._read else x
        if not self._counted and rows.requires_grad:
            self._network.count(rows)
            self._counted = True
        if self._noting and rows.requires_grad:
            # Bound to no state, as a graph that holds what holds the graph is never freed.
            rows.register_hook(functools.partial(self._network.learn, self._record))
            self._noting = False
        sizes = group.blocks(begin, stop)
        for name, part in zip(
            sizes, rows.split([*sizes.values()], -1) if len(sizes) > 1 else [rows]
        ):
            self._rows.setdefault(name, part)  # what is there already was used to draw the factor

    def inputs(self, group: GroupNetwork, begin: int, stop: int) -> Tensor:
        """Returns what a group's network reads at steps ``begin`` to ``stop - 1``, ``(*batch, inputs)``."""
        parts = []
        for source, first, last, start in group.columns(begin, stop):
            if self._constant and source in group.constant:
                center = group.running.center[start : start + last - first]
                parts.append(center.view((1,) * self._network.nesting + (-1,)))
            else:
                value = self._sources.value(source)
                parts.append(value if last - first == value.shape[-1] else value[..., first:last])
        x = (
            concatenate(parts)
            if parts
            else self._network.like.new_empty((1,) * self._network.nesting + (0,))
        )
        return self._inputs(group, begin, stop, x) if x.shape[-1] else x

    def _inputs(self, group: GroupNetwork, begin: int, stop: int, x: Tensor) -> Tensor:
        """Returns what a group's network makes of its columns of some steps."""
        first, last = group.mlp.bounds[0][begin], group.mlp.bounds[0][stop]
        if self._record is not None:
            self._record.inputs.append((group, first, last, x.detach()))
        return group.running(x, first, last)

    def tells(self, name: str) -> bool:
        """Whether something is to be told of a latent: once, for all passes of these networks."""
        told, self._network.told = self._network.told, self._network.told | {name}
        return name not in told

    def non_finite_parameter(self) -> str | None:
        """Returns the name of a parameter that is not finite, None if all are."""
        for name, value in self._network.named_parameters():
            if not value.isfinite().all():
                return f"network.{name.removesuffix('_unconstrained')}"
        return None


class Numbers(NamedTuple):
    """The parameters of factors that read nothing that was drawn."""

    state: NetworkState

    def params(self, name: Hashable) -> Tensor:
        """Returns the parameters of a factor, ``(*batch, elements, params)``, as numbers."""
        return self.state.params(name).detach()


class ElementConditionals(NamedTuple):
    """Parameters of a sequential factor's elements, one by one or all at once. Features come raw."""

    factor: Factor
    # shift and scale that standardize features, ``(elements, features)``
    affine: tuple[Tensor, Tensor]
    rows: Tensor  # of element 0
    state: Any  # of the network, at which element 0 is to come
    inputs: Callable[[int, int, Tensor], Tensor]
    additions: Additions
    pull: Tensor | None

    def first(self) -> tuple[Tensor, Callable]:
        """Returns the parameters ``(*batch, params)`` of element 0, and the function that goes on from there."""
        return self.additions.params(self.rows, 0), functools.partial(self._next, self.state, 1)

    def _next(self, state: Any, element: int, features: Tensor) -> tuple[Tensor, Callable]:
        """Returns an element's parameters from the features of the one before, and how to go on."""
        seen = self._standardized(features, element - 1)
        if self.pull is not None:
            seen = seen - self.pull[..., element - 1 : element]
        rows, state = state.advance(
            self.inputs(state.step, state.step + 1, tempered(seen)), state.step + 1
        )
        params = self.additions.params(_trimmed(rows, features.dim() - 1), element)
        return params, functools.partial(self._next, state, element + 1)

    def all(self, features: Tensor) -> Tensor:
        """Returns the parameters ``(*batch, elements, params)`` at ``features`` ``(*batch, elements, features)``."""
        begin, stop = self.state.step, self.state.step + self.factor.num_elements - 1
        seen = tempered(self._standardized(features))[..., :-1, :].flatten(-2)
        rows, _ = self.state.advance(self.inputs(begin, stop, seen), stop)
        rows = _trimmed(rows, features.dim() - 2).unflatten(-1, (-1, self.factor.num_rows))
        first = self.rows.unsqueeze(-2)
        return self.additions.params(
            torch.cat([first.expand(rows.shape[:-2] + first.shape[-2:]), rows], -2)
        )

    def _standardized(self, features: Tensor, at: Any = slice(None)) -> Tensor:
        shift, scale = self.affine
        return torch.addcmul(shift[at], features.to(shift.dtype), scale[at])


def _trimmed(rows: Any, ndims: float) -> Any:
    """Returns rows ``(*batch, n)``, if there are any, without leading batch dims of size 1 beyond ``ndims``."""
    while rows is not None and rows.dim() - 1 > ndims and rows.shape[0] == 1:
        rows = rows[0]
    return rows
