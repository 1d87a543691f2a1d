"""The networks behind a guide: from features of parents to the raw parameters of every factor.

`InverseNetwork` holds the networks of all groups of factors (see `pyro_nami.guide.groups`) with their encoders and
evidence, and what constants, offsets and averages go with them; `network_state` is one pass through them. Change this
module to change what a guide's weights are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroParam
from pyro.nn.module import to_pyro_module_
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_nami.guide.conditioning import Direct, Flattened, Pooled, Source, nodes_of
from pyro_nami.guide.couplings import Couplings
from pyro_nami.guide.evidence import EvidenceRead, pooled_part
from pyro_nami.guide.groups import Factor, Group, pools
from pyro_nami.guide.offsets import Offsets
from pyro_nami.messages import warn
from pyro_nami.networks.precision_sums import PrecisionSums
from pyro_nami.networks.reductions import Along, Segments
from pyro_nami.networks.running import Running
from pyro_nami.networks.stepped import Base

__all__ = ["InverseNetwork", "Passed", "as_pyro_module"]

_MOST_EVIDENCE_INPUTS, _MOST_EVIDENCE_ROWS = 128, 8192
# What weights are divided beyond: where a guide is compiled on simulations, and where it is trained on data as Pyro's
# own guides are, at the rates that suit these.
_COMPILED, _TRAINED = Base(32.0, 64.0, 8.0), Base(1.0, 8.0, 0.25, paced=True)
_SHAPE_UNIT = 0.1  # of rows that are no locations: how scales move with other latents matters less, and is noisier
_LEAST_SCALE, _LEAST_POOLED_SCALE = 1e-6, 0.1  # of an input, in units of its spread at the first call
_ModuleList: Any = PyroModule[nn.ModuleList]  # made by Pyro's metaclass, which type checkers do not follow


def as_pyro_module(module: nn.Module) -> nn.Module:
    """Turns every parameter of a module into an unconstrained PyroParam, in place, and returns the module.

    Pyro neither trains a plain ``nn.Parameter`` in a second guide of the same class nor finds one under
    ``module_local_params``.
    """
    to_pyro_module_(module)
    for owner in list(module.modules()):
        for name, value in list(owner._parameters.items()):
            if value is not None:
                delattr(owner, name)
                setattr(owner, name, PyroParam(value.detach().clone(), constraint=constraints.real))
    return module


class InverseNetwork(PyroModule):
    """Raw parameters of all factors of an inverse, as functions of the features of their parents.

    Args:
        factors: one for each latent that has a factor, in sampling order.
        standard: node -> (shift, scale), ``(features,)`` each: features are read as shift + scale * features.
        dims: plate -> its (negative) batch dim.
        sizes: plate -> size, of plates that are flattened.
        hidden_features: widths of the hidden layers.
        shared: one network for a group of factors; otherwise a small one for every factor.
        skip: whether networks also read their inputs directly.
        make_encoder: a function of (number of inputs) that builds the encoder of a pooled source.
        takes_evidence: whether a factor takes evidence from one of its pooled sources.
        latents: the nodes that are no data.
        simulated: whether the guide is trained on simulations rather than on data.
        activation: of the hidden layers.
        device, dtype: of the parameters.
    """

    _buffers: dict[str, Any]  # none of them is None

    def __init__(
        self,
        factors: Sequence[Factor],
        standard: Mapping[Hashable, tuple[Tensor, Tensor]],
        dims: Mapping[str, int],
        sizes: Mapping[str, int],
        *,
        hidden_features: Sequence[int],
        shared: bool,
        skip: bool,
        make_encoder: Callable[[int], Any],
        takes_evidence: Callable[[Factor, Source], bool],
        latents: Collection[Hashable],
        simulated: bool,
        activation: Callable[[Tensor], Tensor],
        **factory: Any,
    ) -> None:
        super().__init__()
        self.dims = dict(dims)
        self.nesting = -min(self.dims.values(), default=0)
        self._affine = {}
        for i, (node, (shift, scale)) in enumerate(standard.items()):
            self._affine[node] = f"shift_{i}", f"scale_{i}"
            self.register_buffer(f"shift_{i}", shift)
            self.register_buffer(f"scale_{i}", scale)
        self.latents, self.simulated = frozenset(latents), simulated
        self.varied = simulated
        self._node_sizes: dict[Hashable, int] = {node: len(shift) for node, (shift, _) in standard.items()}
        self._plate_sizes = dict(sizes)
        self.register_buffer("_like", torch.empty(0, **factory), persistent=False)
        self._encoder_index: dict[Source, int] = {}
        encoders: list[nn.Module] = []
        for factor in factors:
            for source in factor.sources:
                self._add_encoders(source, make_encoder, encoders)
        self.encoders = _ModuleList(encoders)
        heads: dict[Pooled, int] = {}
        factors = [self._with_evidence(factor, heads, takes_evidence) for factor in factors]
        self.factors = {factor.name: factor for factor in factors}
        self._evidence_index = {source: i for i, source in enumerate(heads)}
        self.evidence = _ModuleList(
            [PrecisionSums(self._num_inputs(source), count, **factory) for source, count in heads.items()]
        )
        position = {factor.name: i for i, factor in enumerate(factors)}
        batches = list(dict.fromkeys(factor.batch for factor in factors))
        self.groups = [
            Group([f for f in factors if f.batch == batch], position, self._source_size) for batch in batches
        ]
        self.group_of = {row.name: i for i, group in enumerate(self.groups) for row in group.factors}
        base = _COMPILED if simulated else _TRAINED
        self.networks = _ModuleList(
            [group.build(hidden_features, shared, skip, activation, base, factory) for group in self.groups]
        )
        self._idle = not factors
        if self._idle:
            self.nothing = PyroParam(self._like.new_zeros(()), constraints.real)
        self._find_still_read()
        self.inputs = _ModuleList([self._running(group, factory) for group in self.groups])
        for part in (self.encoders, self.evidence, self.networks, self.inputs):
            as_pyro_module(part)
        # Every attribute of a PyroModule that is a module takes a while to read.
        self.parts = tuple(self.networks), tuple(self.encoders), tuple(self.evidence)
        self.running = tuple(self.inputs)
        if not simulated:
            for network in self.networks:
                network.set_units(torch.full_like(network.units, _SHAPE_UNIT))
        self.offsets = Offsets({}, {}, 0)
        coupled = {factor.name: factor.num_elements for factor in factors if factor.coupled}
        self.couplings = Couplings(coupled, self._like)
        self._stepped = False  # whether gradients have come back since the speeds were looked at
        self._locations: dict[Hashable, list[list[int]]] = {}
        for group in self.groups:
            self._locations.update(group.rows_of(lambda factor: factor.locations))
        for i, rows in enumerate(self._locations.values()):
            self.register_buffer(f"rows_{i}", torch.tensor(rows, device=self._like.device), persistent=False)
        self._rows = {name: f"rows_{i}" for i, name in enumerate(self._locations)}

    def quicken(self) -> None:
        """Adapts the speeds of parameters, if the optimizer may have taken a step since; see `networks.Pace`."""
        if self._stepped:
            self._stepped = False
            for part in (*self.parts[0], self.offsets, self.couplings):
                part.quicken()

    def center(self, group: Group, column: tuple[Source, int, int]) -> Tensor:
        """Returns the center of a column, with all plate dims."""
        first = group.starts[column[:2]]
        center = self.running[self.groups.index(group)].center[first : first + column[2] - column[1]]
        return center.view((1,) * self.nesting + (-1,))

    def taking_part(self) -> AbstractContextManager:
        """Returns a context of the sites of a guide without weights, by which their density has a gradient: zero.

        Without any, a loss has no ``backward``, and an optimizer no parameters, where all latents are exact.
        """
        return poutine.scale(scale=1 + self.zero()) if self._idle else nullcontext()

    def zero(self) -> Tensor:
        """Returns zero; with a gradient, where nothing else has one."""
        return 0 * torch.as_tensor(self.nothing) if self._idle else self._like.new_zeros(())

    @property
    def settled(self) -> bool:
        """Whether inputs that are data are centered already."""
        return self.simulated or all(running.settled for running in self.running)

    def running_due(self) -> bool:
        """Whether the coming pass in training goes into the running averages."""
        return bool(self.running) and self.running[0].due

    def standardize(self, node: Hashable, features: Tensor) -> Tensor:
        """Returns features shifted and scaled as at the first call, with all plate dims: ``(*left, *plates, n)``."""
        shift, scale = self._affine[node]
        missing = self.nesting + 1 - features.dim()
        if missing > 0:
            features = features[(None,) * missing]
        if features.dtype != self.dtype:
            features = features.to(self.dtype)
        return torch.addcmul(self._buffers[shift], features, self._buffers[scale])

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights; the model's values may have others."""
        return self._like.dtype

    @property
    def num_parameters(self) -> int:
        """Number of weights that are not masked."""
        networks, *others = self.parts
        whole = sum(value.numel() for part in others for module in part for value in module.parameters())
        return whole + sum(network.num_parameters for network in networks)

    def num_features(self, node: Hashable) -> int:
        """Returns the number of features of a node."""
        return self._node_sizes[node]

    def affine(self, name: Hashable) -> tuple[Tensor, Tensor]:
        """Returns shift and scale of a factor's own features, ``(elements, features)``."""
        factor = self.factors[name]
        parts = (self._buffers[part].view(-1, factor.num_features) for part in self._affine[name])
        shift, scale = (
            part if len(part) == factor.num_elements else part.repeat(factor.num_elements // len(part), 1)
            for part in parts
        )
        return shift, scale

    def scaling(self, name: Hashable) -> tuple[Tensor, Tensor]:
        """Returns shift and scale of a factor with one feature an element, ``(elements,)``."""
        shift, scale = self.affine(name)
        return shift[:, 0], scale[:, 0]

    def no_columns(self) -> Tensor:
        """Returns the input of steps that read nothing."""
        return self._like.new_empty((1,) * self.nesting + (0,))

    def is_data(self, source: Source) -> bool:
        """Whether a source is made of data alone."""
        return self.latents.isdisjoint(nodes_of(source))

    def _running(self, group: Group, factory: dict) -> Running:
        """Returns how a group's inputs are standardized as training goes on: data not at all, latents wholly."""
        floor, follows = [], []
        for source, first, last in group.all_columns:
            data, pure = self.is_data(source), nodes_of(source) <= self.latents
            floor += (last - first) * [_LEAST_SCALE if pure and not pools(source) else _LEAST_POOLED_SCALE]
            follows += (last - first) * [not data and not self.simulated]
        device = factory.get("device")
        return Running(torch.tensor(floor, **factory), torch.tensor(follows, dtype=torch.bool, device=device))

    @torch.no_grad()
    def learn(self, passed: Passed) -> None:
        """Takes a pass in training into the running averages."""
        for index, first, last, x in passed.inputs:
            self.running[index].update(x, first, last)
        for name, innovations in passed.innovations.items():
            index = self.group_of[name]
            network, rows = self.parts[0][index], getattr(self, self._rows[name])
            off = innovations.unsqueeze(-1) - network.output_bias()[rows]
            spread = off.reshape(-1, *rows.shape).square().mean(0)
            share, units = self.running[index].share, network.units.clone()
            units[rows] = (units[rows].square() * (1 - share) + share * spread).sqrt()
            network.set_units(units)

    def count_pass(self) -> None:
        """Counts a pass that gradients have come back from."""
        self._stepped = True
        for running in self.running:
            running.passes += 1

    def vary(self) -> None:
        """Lets the networks learn from data that vary: their weights are divided beyond other widths from now on."""
        self.varied = True
        for network in self.parts[0]:
            network.rebase(_COMPILED)
            for flags in (network.pace.patient, network.pace.shared):
                flags.zero_()  # offsets go, and weights have to tell the data apart

    def get_extra_state(self) -> list[int]:
        """Returns whether the data varied in training, and whether speeds are to be looked at."""
        return [int(self.varied), int(self._stepped)]

    def set_extra_state(self, state: Sequence[int]) -> None:
        """Restores what `vary` did, and the rest."""
        if state[0] and not self.varied:
            self.vary()
        self._stepped = bool(state[1])

    def location_rows(self, name: Hashable) -> slice:
        """Returns the rows of a factor that has one location an element."""
        factor, (first, *_) = self.factors[name], self._locations[name][0]
        return slice(first, first + factor.num_elements * factor.num_raw, factor.num_raw)

    def set_initial(self, initial: Mapping[Hashable, Tensor]) -> None:
        """Writes raw parameters ``(elements, params)`` of every factor to the output biases."""
        for group, network in zip(self.groups, self.networks):
            rows = [row for step in group.steps for row in step.rows]
            values = [initial[factor.name][elements.start : elements.stop] for factor, elements in rows]
            network.set_output_bias(torch.cat([value.flatten() for value in values]).to(network.output))

    def levers(self) -> list[Tensor]:
        """Returns zeros that move as the biases of each network's rows do, relative to their units."""
        biases = [network.output_bias() / network.bias_units for network in self.parts[0]]
        return [bias - bias.detach() for bias in biases]

    def set_offsets(self, shapes: Mapping[Any, Mapping[str, tuple[int, int]]]) -> None:
        """Gives each instance of some factors offsets of its own; see `Offsets`."""
        units = {}
        for name in shapes:
            factor, network = self.factors[name], self.parts[0][self.group_of[name]]
            units[name] = network.bias_units.new_ones(factor.num_elements, factor.num_params)
            for locations, row in zip(self._locations[name], units[name]):
                row[list(factor.locations)] = network.bias_units[locations]
        self.offsets = Offsets(shapes, units, self.nesting)
        for group, network in zip(self.groups, self.parts[0]):
            shared = torch.zeros_like(network.units, dtype=torch.bool)
            for name, rows in group.rows_of(lambda factor: range(factor.num_params)).items():
                shared[torch.as_tensor(rows, device=shared.device)] = name in shapes
            network.set_shared(shared)

    def set_units(self, name: Hashable, scale: float, anchor: Tensor) -> None:
        """Sets the units of a factor's locations: of its bias, those of unconstrained space; else its first scale.

        Args:
            name: of the factor.
            scale: of the factor at first, in unconstrained space.
            anchor: of its prior there, ``(elements,)``.
        """
        network, rows = self.parts[0][self.group_of[name]], self._locations[name]
        units, bias = network.units.clone(), network.bias_units.clone()
        for row, each in zip(rows, anchor.tolist()):
            units[row], bias[row] = scale / each, 1 / each
        network.set_units(units, bias)

    def _add_encoders(self, source: Source, make_encoder: Callable, encoders: list) -> None:
        if isinstance(source, Direct) or source in self._encoder_index:
            return
        if not isinstance(source, Pooled):
            self._add_encoders(source.source, make_encoder, encoders)
            return
        for part in source.inputs:
            self._add_encoders(part, make_encoder, encoders)
        self._encoder_index[source] = len(encoders)
        encoders.append(make_encoder(self._num_inputs(source)))
        self._node_sizes[source] = encoders[-1].num_features

    def _num_inputs(self, source: Pooled) -> int:
        return sum(map(self._source_size, source.inputs))

    def _source_size(self, source: Source) -> int:
        if isinstance(source, Direct):
            return self._node_sizes[source.node]
        if isinstance(source, Pooled):
            return self._node_sizes[source]
        size = self._source_size(source.source)
        if isinstance(source, Flattened):
            size *= math.prod(self._plate_sizes[plate] for plate in source.plates)
        return size

    def _with_evidence(
        self, factor: Factor, heads: dict[Pooled, int], takes: Callable[[Factor, Source], bool]
    ) -> Factor:
        """Returns a factor that takes evidence from its pooled sources, and counts the heads that this needs."""
        members = math.prod(self._plate_sizes[plate] for plate in factor.joint)
        reads = []
        for source in factor.sources:
            pooled, _ = pooled_part(source)
            if pooled is None or not takes(factor, source):
                continue
            width, count = self._num_inputs(pooled), factor.num_elements // members
            if width <= _MOST_EVIDENCE_INPUTS and width * factor.num_elements <= _MOST_EVIDENCE_ROWS:
                first = heads.get(pooled, 0)
                heads[pooled] = first + count
                reads.append(EvidenceRead(source, first, count, width))
            else:
                warn(
                    f"Site '{factor.name}' takes no evidence from the instances of plate '{pooled.plate}': "
                    f"{width} inputs by {factor.num_elements} elements are more than {_MOST_EVIDENCE_INPUTS}, or than "
                    f"{_MOST_EVIDENCE_ROWS} in all. Its precision cannot follow their number; embeddings= with fewer "
                    "features would let it."
                )
        return factor._replace(evidence=tuple(reads))

    def is_left_out(self, source: Source, batch: Collection[str]) -> bool:
        """Whether factors in plates ``batch`` do not read a source where the data are the same in every call."""
        return not batch and self.is_data(source)

    def bound_encoders(self, constant: bool) -> dict[Source, Callable]:
        """Returns pooled source -> its encoder, with its parameters read now.

        Where the data are ``constant``, only those that are used: optimizers may fail at parameters without a gradient.
        """
        encoders = self.parts[1]
        return {
            source: functools.partial(encoders[i].forward, weights=encoders[i].weights())
            for source, i in self._encoder_index.items()
            if not constant or source in self._still_pooled
        }

    def bound_evidence(self, constant: bool) -> dict[Source, Callable]:
        """Returns pooled source -> the sums of its evidence ``(*left, *plates, heads (inputs + 2))``, likewise."""
        modules = self.parts[2]

        def sums(i: int, weights: list[Tensor], x: Tensor, over: Along | Segments) -> Tensor:
            return modules[i](x, over, weights).flatten(-2)

        return {
            source: functools.partial(sums, i, modules[i].weights())
            for source, i in self._evidence_index.items()
            if not constant or source in self._still_summed
        }

    def _find_still_read(self) -> None:
        """Finds the sources that are pooled, and summed for evidence, where the data are the same in every call."""
        self._still_pooled: set[Source] = set()
        self._still_summed: set[Source] = set()

        def add(source: Source) -> None:
            if isinstance(source, Pooled):
                self._still_pooled.add(source)
                for part in source.inputs:
                    add(part)
            elif not isinstance(source, Direct):
                add(source.source)

        for factor in self.factors.values():
            for source in factor.sources:
                if not self.is_left_out(source, factor.batch):
                    add(source)
            for read in factor.evidence:
                pooled, _ = pooled_part(read.source)
                if pooled is not None and not self.is_left_out(read.source, factor.batch):
                    self._still_summed.add(pooled)
                    for part in pooled.inputs:
                        add(part)


class Passed(NamedTuple):
    """What a pass in training leaves for the running averages.

    Attributes:
        inputs: of networks, each as (index of the group, first column, last column + 1, values).
        innovations: factor -> its elements ``(*batch, elements)`` relative to the anchor.
    """

    inputs: list[tuple[int, int, int, Tensor]]
    innovations: dict[Hashable, Tensor]
