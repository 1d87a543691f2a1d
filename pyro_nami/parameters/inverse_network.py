"""The networks of a guide: from features of parents to the parameters of every factor.

The parameters of a factor, relative to its anchor if `pyro_nami.guide.rules` gives one, are a sum
of

    rows of its group's network     (`factor_groups`, `group_network`)  amortized over data of any kind
    pseudo-observations             (`additions`)                       one for each instance of a pooled plate
    offsets                         (`free_parameters`)                 of each instance, for the training data

A group's network reads sources (`conditioning`). Their values in a call (`inputs`) are made of
standardized features of nodes, by encoders of sets. `network_state` is one pass through the
networks, and `training` what training keeps beside their weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from pyro import poutine
from pyro.nn import PyroParam
from pyro.nn.module import to_pyro_module_
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_nami.networks.precision_sums import PrecisionSums
from pyro_nami.parameters.conditioning import (
    Direct,
    Flattened,
    Plates,
    Pooled,
    Source,
    nodes_of,
    parts_of,
)
from pyro_nami.parameters.factor_groups import (
    Factor,
    num_inputs,
    plan_steps,
    with_pseudo_observations,
)
from pyro_nami.parameters.free_parameters import FreeParameters, coupling_units
from pyro_nami.parameters.group_network import GroupNetwork, PlacedFactor
from pyro_nami.parameters.inputs import Pooling
from pyro_nami.parameters.series import SeriesNetwork
from pyro_nami.parameters.training import TrainedNetworks
from pyro_nami.program.memory import rows_in_memory

__all__ = ["InverseNetwork", "as_pyro_module"]

# least and most units of a hidden layer by default, the least over plates of more than 100,000 instances; ten times as
# many take ten times the memory, and ten times fewer cannot bend what they give
MIN_UNITS = 8
MAX_UNITS = 64


def as_pyro_module(module: nn.Module) -> nn.Module:
    """Turns every parameter of a module into an unconstrained PyroParam, in place, and returns the module.

    Pyro trains no plain ``nn.Parameter`` in a second guide of a class, and finds none under ``module_local_params``.
    """
    to_pyro_module_(module)
    for owner in list(module.modules()):
        for name, value in list(owner._parameters.items()):
            if value is not None:
                delattr(owner, name)
                setattr(owner, name, PyroParam(value.detach().clone(), constraint=constraints.real))
    return module


class InverseNetwork(TrainedNetworks):
    """Parameters of all factors of an inverse, as functions of the features of their parents.

    Args:
        factors: one for each latent that has a factor, in sampling order.
        standard: node -> (shift, scale), ``(features,)`` each: features are read as shift + scale * features.
        plates: of the model.
        make_encoder: a function of (number of inputs) that builds the encoder of a pooled source.
        adding: factors that instances of pooled plates are pseudo-observations of.
        latents: all latents in sampling order, and what else networks give parameters of.
        simulated: whether the guide is trained on simulations rather than on data.
        varying: whether data that are not simulated differ from step to step, beside those of minibatches.
        hidden_features: of the groups' networks; by default one layer, in guides for data of fewer units over large
            plates, whose instances have offsets of their own.
        shared: whether factors in the same plates have one network, or one each.
        factory: dtype and device of the parameters.
        series: networks of the states of a loop, and ``series_reads`` the latents that these read.
        **options: of the groups' networks, see `GroupNetwork`.
    """

    def __init__(
        self,
        factors: Sequence[Factor],
        standard: Mapping[Hashable, tuple[Tensor, Tensor]],
        plates: Plates,
        *,
        make_encoder: Callable[[int], nn.Module],
        adding: Collection[Hashable],
        latents: Sequence[Hashable],
        simulated: bool,
        varying: bool = False,
        hidden_features: Sequence[int] | None,
        shared: bool,
        factory: Mapping[str, Any],
        series: SeriesNetwork | None = None,
        series_reads: Collection[Hashable] = (),
        **options: Any,
    ) -> None:
        sizes, encoders = _encoders(factors, standard, plates, make_encoder)
        factors, heads = with_pseudo_observations(factors, adding, sizes)
        sums = {
            source: PrecisionSums(num_inputs(source, sizes), count, **factory)
            for source, count in heads.items()
        }
        options |= {"latents": latents, "simulated": simulated, "factory": factory}
        groups = [
            _group(members, sizes, plates, varying, hidden_features, options)
            for members in _grouped(factors, apart=not shared, without_data=not simulated)
        ]
        coupled = [factor for factor in factors if factor.dependence == "linear"]
        super().__init__(groups, simulated, torch.empty(0, **factory))
        self.plates = plates
        # of which a guide's first call chooses one
        self.starts: list[Mapping[Hashable, Tensor]] = []
        self.told: frozenset[str] = frozenset()  # latents that a user was warned of
        self.places: dict[Any, PlacedFactor] = {}
        for group in groups:
            self.places.update(group.places)
        sequential = {factor.name for factor in factors if factor.sequential}
        read = [nodes_of(source) for factor in factors for source in factor.sources]
        self.read = frozenset(sequential.union(series_reads, *read))
        self._keep_standard(standard)
        parts = {
            "encoders": encoders.values(),
            "evidence": sums.values(),
            "networks": [group.mlp for group in groups],
            "stacks": [stack for group in groups for stack in group.stacks],
            "inputs": [group.running for group in groups],
        }
        for name, modules in parts.items():
            self.add_module(name, as_pyro_module(nn.ModuleList(modules)))
        self.offsets = FreeParameters("offset", {}, persistent=True)
        units = {each.name: coupling_units(each.num_elements, self.like) for each in coupled}
        self.couplings = FreeParameters("coupling", units, rest=None if simulated else 0.01)
        self.series, self.has_weights = series, bool(factors) or series is not None
        if not self.has_weights:
            self.nothing = PyroParam(self.like.new_zeros(()), constraints.real)
        # The modules once more, as every attribute of a PyroModule that is one takes a while to read.
        self._pooling = encoders, sums

    def _keep_standard(self, standard: Mapping[Hashable, tuple[Tensor, Tensor]]) -> None:
        """Registers shift and scale of each node's features as buffers."""
        self._affine = {node: (f"shift_{i}", f"scale_{i}") for i, node in enumerate(standard)}
        for node, affine in self._affine.items():
            for name, value in zip(affine, standard[node]):
                self.register_buffer(name, value)

    @functools.cached_property
    def _read(self) -> tuple[set[Source], set[Source]]:
        """The sources that are encoded, and those that are summed."""
        encoded, summed = set[Source](), set[Source]()
        for place in self.places.values():
            left = set(place.factor.sources) - place.group.constant
            encoded.update(part for source in left for part in parts_of(source))
            summed.update(each.pooled for each in place.factor.pseudo if each.source in left)
        return encoded, summed

    @property
    def num_parameters(self) -> int:
        """Number of weights that are not masked."""
        pooling = [module for modules in self._pooling for module in modules.values()]
        whole = sum(value.numel() for module in pooling for value in module.parameters())
        whole += 0 if self.series is None else self.series.num_parameters
        return whole + sum(mlp.num_parameters for group in self.groups for mlp in group.networks)

    def standard(self, node: Hashable) -> tuple[Tensor, Tensor]:
        """Returns shift and scale of a node's features, ``(features,)`` each."""
        buffers: Mapping[str, Any] = self._buffers
        shift, scale = self._affine[node]
        return buffers[shift], buffers[scale]

    def standardize(self, node: Hashable, features: Tensor) -> Tensor:
        """Returns features shifted and scaled as at the first call, with all plate dims: ``(*left, *plates, n)``."""
        shift, scale = self.standard(node)
        missing = self.plates.nesting + 1 - features.dim()
        if missing > 0:
            features = features[(None,) * missing]
        return torch.addcmul(shift, features.to(shift), scale)

    def affine(self, name: Hashable) -> tuple[Tensor, Tensor]:
        """Returns shift and scale of a factor's own features, ``(elements, features)`` each."""
        factor = self.places[name].factor
        shift, scale = (part.view(-1, factor.num_features) for part in self.standard(name))
        members = factor.num_elements // len(
            shift
        )  # of a block, each with the same shift and scale
        return shift.repeat(members, 1), scale.repeat(members, 1)

    def take_stored(self) -> None:
        """Takes the parameter store's weights for all encoders, those that no pass reads included."""
        for modules in self._pooling:
            for module in modules.values():
                module.weights()

    def pooling(self) -> tuple[Pooling, Pooling]:
        """Returns the encoders, and the sums of pseudo-observations, with their parameters read now.

        These are only those that are used, as optimizers may fail at parameters without a gradient.
        """

        def bound(modules: Mapping[Pooled, Any], used: Collection[Source]) -> Pooling:
            return {
                source: functools.partial(module.forward, weights=module.weights())
                for source, module in modules.items()
                if source in used
            }

        encoders, sums = map(bound, self._pooling, self._read)
        return encoders, sums

    # ---- where weights start

    def set_initial(self, initial: Mapping[Hashable, Tensor]) -> None:
        """Makes rows ``(elements, rows)`` of every factor those that its network gives at first."""
        for group in self.groups:
            values = torch.cat([initial[factor.name].flatten() for factor in group.factors])
            group.mlp.set_output_bias(values.to(group.mlp.output))

    def set_offsets(self, plates: Mapping[Any, Mapping[str, tuple[int, int]]]) -> None:
        """Gives each instance of some factors offsets of its own: factor -> plates with batch dims and full sizes."""
        units = {}
        for name in plates:
            place = self.places[name]
            factor, mlp = place.factor, place.group.mlp
            if mlp.pace is not None:
                place.rows(mlp.pace.shared[:, -1])[:, : factor.num_params] = True
            units[name] = self.like.new_ones(factor.num_elements, factor.num_params)
            where = factor.locations
            units[name][:, where] = place.rows(mlp.bias_units)[:, where]
        self.offsets = FreeParameters("offset", units, plates, self.plates.nesting, persistent=True)

    # ---- a guide without weights, all of whose latents are exact

    def zero(self) -> Tensor:
        """Returns zero, with a gradient where weights give none: without any, a loss has no ``backward``."""
        return self.like.new_zeros(()) if self.has_weights else 0 * torch.as_tensor(self.nothing)

    def with_gradient(self) -> AbstractContextManager:
        """Returns a context of the guide's sites in which their densities have a gradient as `zero` has."""
        if self.has_weights:
            return nullcontext()
        zero = self.zero()
        if zero.requires_grad:
            zero.register_hook(torch.zeros_like)  # whatever the densities are
        scale = 1 + zero
        self.count(scale)
        return poutine.scale(scale=scale)

    # ---- what users are told

    def tells(self, name: str) -> bool:
        """Whether something is to be told of a latent: once, for all passes of these networks."""
        told, self.told = self.told, self.told | {name}
        return name not in told

    def learns(self) -> bool:
        """Whether a parameter is to get gradients: of a guide that is frozen nothing has."""
        return any(parameter.requires_grad for parameter in self.parameters())

    def non_finite_parameter(self) -> str | None:
        """Returns the name of a parameter that is not finite, None if all are."""
        for name, value in self.named_parameters():
            if not value.isfinite().all():
                return f"network.{name.removesuffix('_unconstrained')}"
        return None


def _encoders(
    factors: Sequence[Factor],
    standard: Mapping[Hashable, Any],
    plates: Plates,
    make_encoder: Callable[[int], Any],
) -> tuple[dict[Source, int], dict[Pooled, Any]]:
    """Returns the number of features of each source that factors read, and the encoders of the pooled ones."""
    sizes: dict[Source, int] = {}
    encoders: dict[Pooled, Any] = {}
    sources = dict.fromkeys(source for factor in factors for source in factor.sources)
    for part in dict.fromkeys(part for source in sources for part in parts_of(source)):
        if isinstance(part, Direct):
            sizes[part] = len(standard[part.node][0])
        elif isinstance(part, Pooled):
            encoders[part] = make_encoder(num_inputs(part, sizes))
            sizes[part] = encoders[part].num_features
        else:
            members = part.plates if isinstance(part, Flattened) else ()
            sizes[part] = sizes[part.source] * math.prod(plates.sizes[plate] for plate in members)
    return sizes, encoders


def _group(
    factors: Sequence[Factor],
    sizes: Mapping[Source, int],
    plates: Plates,
    varying: bool,
    hidden_features: Sequence[int] | None,
    options: Mapping[str, Any],
) -> GroupNetwork:
    """Returns the network of some factors in the same plates."""
    batch = factors[0].batch
    if hidden_features is None:
        units = MAX_UNITS
        if not options["simulated"]:
            instances = math.prod(plates.sizes[plate] for plate in batch)
            # a unit has four numbers an instance: what goes in, what comes out, and their gradients
            units = min(max(rows_in_memory(4 * instances), MIN_UNITS), MAX_UNITS)
        hidden_features = (units,)
    position = {name: i for i, name in enumerate(options["latents"])}
    return GroupNetwork(
        factors,
        plan_steps(factors, position, sizes),
        varying=varying or not plates.minibatched.isdisjoint(batch),
        hidden_features=hidden_features,
        **options,
    )


def _grouped(
    factors: Sequence[Factor], apart: bool, without_data: bool
) -> Collection[list[Factor]]:
    """Returns the factors of each network: those in the same plates, or one factor each if they are to be ``apart``.

    In guides for given data factors that read nothing have a network of their own.
    """
    groups: dict[Hashable, list[Factor]] = {}
    for factor in factors:
        key = factor.batch, without_data and not factor.sources, apart and factor.name
        groups.setdefault(key, []).append(factor)
    return groups.values()
