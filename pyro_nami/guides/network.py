"""The networks behind a guide: from features of parents to the raw parameters of every factor.

`InverseNetwork` holds the networks of all groups of factors (see `pyro_nami.guides.groups`) with their encoders and
evidence, and `NetworkState` is one pass through them. Change this module to change what a pass computes, or when.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from pyro.nn import PyroModule, PyroParam
from pyro.nn.module import to_pyro_module_
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_nami.conditioning import Direct, Flattened, Pooled, Source
from pyro_nami.guides.evidence import EvidenceRead, add_evidence, pooled_part
from pyro_nami.guides.groups import Factor, Group
from pyro_nami.nn import Along, Evidence, Segments
from pyro_nami.sources import IndexMaps, Sources, concatenate

__all__ = ["InverseNetwork", "NetworkState", "as_pyro_module"]

_MOST_EVIDENCE_INPUTS, _MOST_EVIDENCE_ROWS = 128, 8192
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
            [Evidence(self._num_inputs(source), count, **factory) for source, count in heads.items()]
        )
        position = {factor.name: i for i, factor in enumerate(factors)}
        batches = list(dict.fromkeys(factor.batch for factor in factors))
        self.groups = [
            Group([f for f in factors if f.batch == batch], position, self._source_size) for batch in batches
        ]
        self.group_of = {row.name: i for i, group in enumerate(self.groups) for row in group.factors}
        self.networks = _ModuleList(
            [group.build(hidden_features, shared, skip, activation, factory) for group in self.groups]
        )
        for part in (self.encoders, self.evidence, self.networks):
            as_pyro_module(part)
        # Every attribute of a PyroModule that is a module takes a while to read.
        self.parts = tuple(self.networks), tuple(self.encoders), tuple(self.evidence)

    def start(self, maps: IndexMaps) -> NetworkState:
        """Returns the state of a pass at which nothing is known, in a call with these index maps."""
        return NetworkState(self, maps)

    def standardize(self, node: Hashable, features: Tensor) -> Tensor:
        """Returns features shifted and scaled as at the first call, with all plate dims: ``(*left, *plates, n)``."""
        shift, scale = self._affine[node]
        missing = self.nesting + 1 - features.dim()
        if missing > 0:
            features = features[(None,) * missing]
        return torch.addcmul(self._buffers[shift], features, self._buffers[scale])

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

    def set_initial(self, initial: Mapping[Hashable, Tensor]) -> None:
        """Writes raw parameters ``(elements, params)`` of every factor to the output biases."""
        for group, network in zip(self.groups, self.networks):
            rows = [row for step in group.steps for row in step.rows]
            values = [initial[factor.name][elements.start : elements.stop] for factor, elements in rows]
            network.set_output_bias(torch.cat([value.flatten() for value in values]).to(network.output))

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
        return factor._replace(evidence=tuple(reads))

    def bound_encoders(self) -> dict[Source, Callable]:
        """Returns pooled source -> its encoder, with its parameters read now."""
        encoders = self.parts[1]
        return {
            source: functools.partial(encoders[i].forward, weights=encoders[i].weights())
            for source, i in self._encoder_index.items()
        }

    def bound_evidence(self) -> dict[Source, Callable]:
        """Returns pooled source -> the sums of its evidence ``(*left, *plates, heads (inputs + 2))``, likewise."""
        modules = self.parts[2]
        weights = [module.weights() for module in modules]

        def sums(i: int, x: Tensor, over: Along | Segments) -> Tensor:
            return modules[i](x, over, weights[i]).flatten(-2)

        return {source: functools.partial(sums, i) for source, i in self._evidence_index.items()}


class NetworkState:
    """One pass through the networks, in the order in which values come to be known; used once.

    All parameters are read when the pass starts: what comes later may run inside the model, whose handlers (a lift,
    a block) must not see them.
    """

    def __init__(self, network: InverseNetwork, maps: IndexMaps) -> None:
        self._network = network
        self._features: dict[Hashable, Tensor] = {}
        self._data: set[Hashable] = set()
        self._sources = Sources(self._features, network.dims, network.bound_encoders(), maps, self._data)
        self._evidence = network.bound_evidence()
        self._states: list[Any] = [part.start() for part in network.parts[0]]
        self._rows: dict[Hashable, Tensor] = {}

    def add(self, node: Hashable, features: Tensor) -> None:
        """Makes a node's raw features ``(*left, *plates, features)`` known; leading plate dims may be left out."""
        self._features[node] = self._network.standardize(node, features)

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
        if not factor.evidence:
            return raw
        return add_evidence(raw, factor.num_params, self._sums(factor), *self._network.scaling(name))

    def _sums(self, factor: Factor) -> list[Tensor]:
        """Returns the sums of a factor's evidence, ``(*batch, elements, inputs + 2)`` for each source of it."""
        sums = []
        for read in factor.evidence:
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
        sums = [_trimmed(total, ndims + 1) for total in self._sums(factor)]
        scaling = self._network.scaling(name) if sums else ()
        return ElementConditionals(factor, self._network.affine(name), first, self._states[index], sums, scaling)

    def _advance(self, name: Hashable, stop: int) -> None:
        """Takes the steps before ``stop`` of the group of ``name``, whose inputs must all be known, in one advance."""
        index = self._network.group_of[name]
        group = self._network.groups[index]
        state = self._states[index]
        begin = state.step
        if begin >= stop:
            return
        parts = [self._column(column) for step in group.columns[begin:stop] for column in step]
        x = concatenate(parts) if parts else self._network.no_columns()
        rows, self._states[index] = state.advance(x, stop)
        keys, sizes = group.row_blocks(begin, stop)
        for key, part in zip(keys, rows.split(sizes, -1) if len(sizes) > 1 else [rows]):
            self._rows.setdefault(key, part)  # what is there already was used to draw the factor

    def _column(self, column: tuple[Source, int, int]) -> Tensor:
        source, first, last = column
        value = self._sources.value(source)
        return value if last - first == value.shape[-1] else value[..., first:last]


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
        sums: Sequence[Tensor],
        scaling: Sequence[Tensor],
    ) -> None:
        self._factor, self._affine, self._first, self._state = factor, affine, first, state
        self._sums, self._scaling = sums, scaling

    def first(self) -> tuple[Tensor, Callable]:
        """Returns the parameters ``(*batch, params)`` of element 0, and the function that goes on from there."""
        return self._params(self._first, 0), self._next(self._state, 0)

    def _next(self, state: Any, element: int) -> Callable:
        def following(features: Tensor) -> tuple[Tensor, Callable]:
            shift, scale = (part[element] for part in self._affine)
            rows, advanced = state.advance(torch.addcmul(shift, features, scale), state.step + 1)
            params = self._params(_trimmed(rows, features.dim() - 1), element + 1)
            return params, self._next(advanced, element + 1)

        return following

    def _params(self, raw: Tensor, element: int) -> Tensor:
        """Returns one element's parameters from its rows."""
        if not self._sums:
            return raw
        here = slice(element, element + 1)
        sums, scaling = [total[..., here, :] for total in self._sums], [part[here] for part in self._scaling]
        return add_evidence(raw.unsqueeze(-2), self._factor.num_params, sums, *scaling).squeeze(-2)

    def all(self, features: Tensor) -> Tensor:
        """Returns the parameters ``(*batch, elements, params)`` at ``features`` ``(*batch, elements, features)``."""
        count = self._factor.num_elements
        shift, scale = self._affine
        seen = torch.addcmul(shift, features, scale)[..., :-1, :]
        rows, _ = self._state.advance(seen.flatten(-2), self._state.step + count - 1)
        rows = _trimmed(rows, features.dim() - 2).unflatten(-1, (count - 1, self._factor.num_raw))
        first = self._first.unsqueeze(-2)
        raw = torch.cat([first.expand(rows.shape[:-2] + first.shape[-2:]), rows], -2)
        return add_evidence(raw, self._factor.num_params, self._sums, *self._scaling) if self._sums else raw


def _trimmed(rows: Tensor, ndims: int) -> Tensor:
    """Returns rows ``(*batch, n)`` without leading batch dims of size 1 beyond ``ndims``."""
    while rows.dim() - 1 > ndims and rows.shape[0] == 1:
        rows = rows[0]
    return rows
