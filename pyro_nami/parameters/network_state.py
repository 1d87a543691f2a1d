"""`NetworkState`: one pass through a guide's networks, with the values known so far and parameters given these."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pyro import poutine
from torch import Tensor

from pyro_nami.deriving.expansion import squeezed
from pyro_nami.factors.joint import to_sequence
from pyro_nami.factors.normals import LinearMap
from pyro_nami.factors.potentials import NormalPotential
from pyro_nami.networks.running import tempered
from pyro_nami.parameters.additions import Additions
from pyro_nami.parameters.conditioning import Source
from pyro_nami.parameters.factor_groups import Factor
from pyro_nami.parameters.group_network import GroupNetwork, PlacedFactor
from pyro_nami.parameters.inputs import IndexMaps, Sources, concatenate
from pyro_nami.parameters.inverse_network import InverseNetwork
from pyro_nami.parameters.series import SeriesInputs, SeriesPass
from pyro_nami.parameters.spline_stack import StackPass
from pyro_nami.parameters.training import TrainingRecord

__all__ = ["NetworkState"]


class GroupPass:
    """One pass through the network of one group, with the rows that it gave so far."""

    def __init__(self, group: GroupNetwork) -> None:
        self.group = group
        self.state = group.mlp.start()
        self.stacks = {
            name: place.stack.start() for name, place in group.places.items() if place.stack
        }
        self.rows: dict[Hashable, Tensor] = {}
        self._read: list[Tensor] = []  # for stacks

    @functools.cached_property
    def pulls(self) -> Tensor:
        """Zeros that move as the biases of all rows do, relative to their units."""
        biases = self.group.mlp.output_bias() / self.group.mlp.bias_units
        return biases - biases.detach()

    def advance(self, x: Tensor, stop: int) -> Tensor:
        """Returns the rows of the steps up to ``stop``, whose standardized inputs are ``x``, and keeps them."""
        sizes = self.group.blocks(self.state.step, stop)
        rows, self.state = self.state.advance(x, stop)
        if self.stacks:
            self._read.append(x)
        parts = rows.split([*sizes.values()], -1) if len(sizes) > 1 else [rows]
        for name, part in zip(sizes, parts):
            self.rows.setdefault(name, part)  # what is there already was used to draw the factor
        return rows

    def stack(self, place: PlacedFactor) -> StackPass:
        """Returns the splines in sequence of a factor, given what it reads."""
        return self.stacks[place.factor.name](concatenate(self._read)[..., place.read])


class NetworkState:
    """One pass through the networks, in the order in which values come to be known; used once.

    All parameters are read when the pass starts: the model's handlers (a lift, a block) must not see them.

    Args:
        network: the networks.
        maps: the call's index maps.
        learning: whether the pass goes into averages if it is trained on.
        indices: subsampled plate -> its instances; None for a call that lacks the instances that offsets are of.
        refinement: factor -> what is added to the parameters of this call's instances, ``(*plates, elements, params)``.

    Example:
        >>> from pyro_nami.parameters.conditioning import Direct, Plates
        >>> standard = {name: (torch.zeros(1), torch.ones(1)) for name in "yz"}
        >>> factor = Factor("z", frozenset(), {}, 1, 2, 1, (Direct("y"),))
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
        indices: Mapping[str, Tensor] | None = None,
        refinement: Mapping[Hashable, Tensor] | None = None,
    ) -> None:
        self.network = network
        self._remake = functools.partial(
            NetworkState, network, maps, indices=indices, refinement=refinement
        )
        self._learning = learning and not network.simulated
        self._record: TrainingRecord | None = None
        if self._learning and not torch.jit.is_tracing():  # a compiled pass runs no Python
            network.quicken()
            if network.groups and network.groups[0].running.due:
                self._record = TrainingRecord([], {})
        self._offsets = {} if indices is None else network.offsets.start(indices)
        for name, added in (refinement or {}).items():
            self._offsets[name] = self._offsets[name] + added if name in self._offsets else added
        self._couplings = network.couplings.start()
        self._sources = Sources(network.plates.dims, maps, *network.pooling())
        self._groups = {group: GroupPass(group) for group in network.groups}
        self._drawn: set[Hashable] = set()
        self._series: SeriesPass | None = None
        self._hooked = False  # whether something was told to note gradients that come back

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
        features = self.network.standardize(node, features)
        place = self.network.places.get(node)
        if drawn:
            self._drawn.add(node)
            pull = None if place is None or place.factor.joint else self._pull(place)
            if pull is not None:
                features = features - (pull if share is None else share * pull)
        self._sources.put(node, tempered(features))

    def _pull(self, place: PlacedFactor) -> Tensor | None:
        """Returns zeros that move as a factor's standardized draw does with its biases, ``(*plates, elements)``.

        What others read of a draw is centered on what it usually is, so it does not move with the biases in the end.
        Gradients that take the center for fixed would have the draw pull all those that read it along with it.
        """
        name, locations = place.factor.name, place.factor.locations
        if not self._learning or len(locations) != 1:
            return None
        pull = place.locations(self._groups[place.group].pulls)
        if name in self._offsets:
            offset = self._offsets[name][..., locations[0]]
            pull = pull + (offset - offset.detach()) / place.locations(place.group.mlp.bias_units)
        return self.network.affine(name)[1][:, 0] * pull

    def note(self, name: Hashable, elements: Tensor, anchor: Tensor | None) -> None:
        """Records a draw, relative to its anchor, for averages."""
        factor = self.network.places[name].factor
        if self._record is None or not factor.locations:
            return
        if anchor is not None:
            location, scale = anchor.detach().unbind(-1)
            elements = (elements - location) / scale
        elements = elements.detach().to(self.network.like.dtype)
        self._record.innovations[name] = to_sequence(elements, factor.dims)

    def read_series(self, inputs: SeriesInputs, node: Hashable) -> None:
        """Takes in the data of a series, and makes its summary known as that of a node, if others read it."""
        assert self.network.series is not None
        self._series = self.network.series.start(inputs)
        if node in self.network.read:
            self._sources.put(node, self.network.standardize(node, self._series.summary()))

    def messages(self, sources: Sequence[Source]) -> NormalPotential | Tensor:
        """Returns what the data from each step on say of its states; see `SeriesPass.messages`."""
        assert self._series is not None
        values = [self._sources.value(source) for source in sources]
        found = self._series.messages(concatenate(values) if values else None)
        self.network.count(found.location if isinstance(found, NormalPotential) else found)
        return found

    def settle(self) -> None:
        """Centers the inputs that are data on those of this call, all of which must be known."""
        for group in self.network.groups:
            for column in group.columns(0, len(group.steps)):
                if column.source in group.data - group.constant:
                    x = self._sources.value(column.source)[..., column.first : column.last]
                    group.running.settle(x, column.where.start, column.where.stop)
            group.running.settled = True

    def of_data(self, group: GroupNetwork) -> list[Tensor]:
        """Returns what the factors of a group read of data alone, ``(*plates, features)`` each."""
        return [self._sources.value(source) for source in sorted(group.data, key=str)]

    # ---- parameters

    @functools.cached_property
    def fixed(self) -> NetworkState:
        """This state with the outputs of networks detached, so that gradients come through draws only."""
        with poutine.block(), torch.no_grad():
            fixed = self._remake()
        fixed._sources.take(self._sources, self._drawn)
        return fixed

    def params(self, name: Hashable) -> Tensor:
        """Returns the parameters of a factor, ``(*batch, elements, params)``.

        A sequential factor's need its own features known as well.
        """
        place = self.network.places[name]
        factor = place.factor
        self._advance(place, factor.num_elements if factor.sequential else 1)
        rows = self._groups[place.group].rows[name].unflatten(-1, (-1, factor.num_rows))
        return self._additions(place).params(rows)

    def coupling(self, name: Hashable) -> Any:
        """Returns the map that couples the elements of a factor whose parameters have been asked for."""
        place = self.network.places[name]
        if place.stack is not None:
            return self._groups[place.group].stack(place)
        return LinearMap(self._couplings[name])

    def conditionals(self, name: Hashable, ndims: int) -> ElementConditionals:
        """Returns what draws a sequential factor's elements one by one; ``ndims`` are the batch dims of its site."""
        place = self.network.places[name]
        self._advance(place, 1)
        group, pull = self._groups[place.group], self._pull(place)
        return ElementConditionals(
            place.factor,
            self.network.affine(name),
            squeezed(group.rows[name][..., : place.factor.num_rows], ndims, 1),
            group.state,
            functools.partial(self._standardized, place.group),
            self._additions(place, ndims),
            None if pull is None else squeezed(pull, ndims, 1),
        )

    def _additions(self, place: PlacedFactor, ndims: int | None = None) -> Additions:
        """Returns what adds to the rows of a factor; what never changes is left to its biases."""
        factor = place.factor
        totals: list[Tensor | None] = []
        for each in factor.pseudo:
            if each.source in place.group.constant:
                totals.append(None)
            else:
                total = each.of_elements(self._sources.total(each.source), factor.num_elements)
                totals.append(squeezed(total, ndims, 2))
        counts = [factor.num_params, *(each.num_params for each in factor.pseudo)]
        offset = self._offsets.get(factor.name)
        offset = None if offset is None else squeezed(offset, ndims, 2)
        affine = self.network.affine(factor.name) if totals else ()
        return Additions(counts, totals, affine, offset)

    def _advance(self, place: PlacedFactor, count: int) -> None:
        """Takes the steps of a group up to the first ``count`` of a factor, whose inputs must all be known."""
        group, stop = self._groups[place.group], place.step + count
        begin = group.state.step
        if begin >= stop:
            return
        rows = group.advance(self.inputs(place.group, begin, stop), stop)
        if rows.requires_grad and not self._hooked:
            self._hooked = True
            self.network.count(rows)
            if self._learning and not torch.jit.is_tracing():
                # Bound to no state, as a graph that holds what holds the graph is never freed.
                rows.register_hook(functools.partial(self.network.learn, self._record))

    def inputs(self, group: GroupNetwork, begin: int, stop: int) -> Tensor:
        """Returns what a group's network reads at steps ``begin`` to ``stop - 1``, ``(*batch, inputs)``."""
        ones = (1,) * self.network.plates.nesting
        parts = []
        for column in group.columns(begin, stop):
            if column.source in group.constant:
                parts.append(group.running.center[column.where].view(*ones, -1))
            else:
                value = self._sources.value(column.source)
                parts.append(value[..., column.first : column.last])
        if not parts:
            return self.network.like.new_empty(*ones, 0)
        return self._standardized(group, begin, stop, concatenate(parts))

    def _standardized(self, group: GroupNetwork, begin: int, stop: int, x: Tensor) -> Tensor:
        """Returns the columns of some steps as a group's network reads them, and records them for averages."""
        first, last = group.mlp.bounds[0][begin], group.mlp.bounds[0][stop]
        if self._record is not None:
            self._record.inputs.append((group, first, last, x.detach()))
        return group.running(x, first, last)


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
        stop = state.step + 1
        rows, state = state.advance(self.inputs(state.step, stop, tempered(seen)), stop)
        params = self.additions.params(squeezed(rows, features.dim() - 1, 1), element)
        return params, functools.partial(self._next, state, element + 1)

    def all(self, features: Tensor) -> Tensor:
        """Returns the parameters ``(*batch, elements, params)`` at ``features`` ``(*batch, elements, features)``."""
        begin, stop = self.state.step, self.state.step + self.factor.num_elements - 1
        seen = tempered(self._standardized(features))[..., :-1, :].flatten(-2)
        rows, _ = self.state.advance(self.inputs(begin, stop, seen), stop)
        rows = squeezed(rows, features.dim() - 2, 1)
        whole = concatenate([self.rows, rows]).unflatten(-1, (-1, self.factor.num_rows))
        return self.additions.params(whole)

    def _standardized(self, features: Tensor, at: Any = slice(None)) -> Tensor:
        shift, scale = self.affine
        return torch.addcmul(shift[at], features.to(shift.dtype), scale[at])
