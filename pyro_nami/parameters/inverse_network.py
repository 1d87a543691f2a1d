"""The networks of a guide: from features of parents to the parameters of every factor.

The parameters of a factor, relative to its anchor if `pyro_nami.guide.rules` gives one, are a sum
of

    rows of its group's network     (`factor_groups`, `group_network`)  amortized over data of any kind
    pseudo-observations             (`additions`)                       one for each instance of a pooled plate
    offsets                         (`free_parameters`)                 of each instance, for the training data

A group's network reads sources (`conditioning`). Their values in a call (`inputs`) are made of
standardized features of nodes, by encoders of sets. `network_state` is one pass through the
networks.
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

from pyro_nami.factors.path_scored import PathShare
from pyro_nami.networks.pace import Pace
from pyro_nami.networks.precision_sums import PrecisionSums
from pyro_nami.parameters.backward import Backward
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
from pyro_nami.parameters.group_network import GroupNetwork
from pyro_nami.parameters.inputs import Pooling

__all__ = ["InverseNetwork", "TrainingRecord", "as_pyro_module", "coupling_of"]

_COUPLING_REST = 0.01  # step of a coupling while its steps do not agree
# gradient in units of the usual one, and the share of the latest one in that
_LARGEST, _LATEST = 10.0, 0.01
_UNITS = 8, 64  # hidden ones, at least and at most
_MOST_UNITS = 2**20  # times the instances of a group
_FIRST = 10  # passes of which none is unusual


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


def coupling_of(name: Hashable) -> tuple[str, Hashable]:
    """Returns by what the coupling of a factor's elements is known."""
    return "coupling", name


class TrainingRecord(NamedTuple):
    """What a pass in training leaves for averages."""

    # group, first column, last column + 1, values
    inputs: list[tuple[GroupNetwork, int, int, Tensor]]
    # factor -> its elements ``(*batch, elements)`` relative to the anchor
    innovations: dict[Hashable, Tensor]


class InverseNetwork(PyroModule):
    """Parameters of all factors of an inverse, as functions of the features of their parents.

    Args:
        factors: one for each latent that has a factor, in sampling order.
        standard: node -> (shift, scale), ``(features,)`` each: features are read as shift + scale * features.
        plates: of the model.
        make_encoder: a function of (number of inputs) that builds the encoder of a pooled source.
        adding: factors that instances of pooled plates are pseudo-observations of.
        simulated: whether the guide is trained on simulations rather than on data.
        hidden_features: of the groups' networks; by default one layer, in guides for data of fewer units over large
            plates, whose instances have offsets of their own.
        shared: whether factors in the same plates have one network, or one each.
        factory: dtype and device of the parameters.
        **options: of the groups' networks, see `GroupNetwork`.
    """

    _buffers: dict[str, Any]  # none of them is None
    usual: Tensor  # lengths of gradients, of each factor's parameters and coupling
    like: Tensor  # empty, of dtype and device of the weights; the model's values may have others

    def __init__(
        self,
        factors: Sequence[Factor],
        standard: Mapping[Hashable, tuple[Tensor, Tensor]],
        plates: Plates,
        *,
        make_encoder: Callable[[int], nn.Module],
        adding: Collection[Hashable],
        simulated: bool,
        hidden_features: Sequence[int] | None,
        shared: bool,
        factory: Mapping[str, Any],
        **options: Any,
    ) -> None:
        super().__init__()
        self.dims, self.nesting = dict(plates.dims), plates.nesting
        self.simulated = simulated
        # of which a guide's first call chooses one
        self.starts: list[Mapping[Hashable, Tensor]] = []
        self.told: frozenset[str] = frozenset()  # latents that a user was warned of
        self.backward = Backward()  # from the current call
        # that gradients came back from; whether since the speeds were looked at
        self.passes, self._stepped = 0, False
        self.register_buffer("like", torch.empty(0, **factory), persistent=False)
        self._keep_standard(standard)
        sizes, encoders = _encoders(factors, standard, plates, make_encoder)
        factors, heads = with_pseudo_observations(factors, adding, sizes)
        sums = {
            source: PrecisionSums(num_inputs(source, sizes), count, **factory)
            for source, count in heads.items()
        }
        options |= {"simulated": simulated, "factory": factory}
        self.groups = _groups(factors, plates, sizes, hidden_features, shared, options)
        self.group_of = {factor.name: group for group in self.groups for factor in group.factors}
        self.factors = {factor.name: factor for factor in factors}
        self._nodes = {f.name: frozenset().union(*map(nodes_of, f.sources)) for f in factors}
        self.path_shares = {name: PathShare() for name in self.factors}
        sequential = (factor.name for factor in factors if factor.sequential)
        self.read = frozenset().union(sequential, *self._nodes.values())

        self.encoders = as_pyro_module(nn.ModuleList(encoders.values()))
        self.evidence = as_pyro_module(nn.ModuleList(sums.values()))
        self.networks = as_pyro_module(nn.ModuleList(group.mlp for group in self.groups))
        stacks = [stack for group in self.groups for stack in group.stacks.values()]
        self.stacks = as_pyro_module(nn.ModuleList(stacks))
        self.inputs = as_pyro_module(nn.ModuleList(group.running for group in self.groups))
        self.offsets = FreeParameters("offset", {}, persistent=True)
        coupled = {
            factor.name: coupling_units(factor.num_elements, self.like)
            for factor in factors
            if factor.coupled and factor.stack is None
        }
        rest = None if simulated else _COUPLING_REST
        self.couplings = FreeParameters("coupling", coupled, rest=rest)
        restrained = (*self.factors, *map(coupling_of, coupled))
        self._index = {name: i for i, name in enumerate(restrained)}
        self.register_buffer("usual", self.like.new_zeros(len(self._index)))
        if not factors:
            self.nothing = PyroParam(self.like.new_zeros(()), constraints.real)
        # The modules once more, as every attribute of a PyroModule that is one takes a while to read.
        self._pooling = self._with_uses(encoders, sums)

    def _keep_standard(self, standard: Mapping[Hashable, tuple[Tensor, Tensor]]) -> None:
        """Registers shift and scale of each node's features as buffers."""
        self._affine = {node: (f"shift_{i}", f"scale_{i}") for i, node in enumerate(standard)}
        for node, names in self._affine.items():
            for name, value in zip(names, standard[node]):
                self.register_buffer(name, value)

    def _with_uses(
        self, encoders: dict[Pooled, Any], sums: dict[Pooled, Any]
    ) -> tuple[tuple[dict[Pooled, Any], set[Source]], tuple[dict[Pooled, Any], set[Source]]]:
        """Returns modules with the sources that are still read where data are the same in every call."""
        encoded, summed = set[Source](), set[Source]()
        for factor in self.factors.values():
            still_read = set(factor.sources) - self.group_of[factor.name].constant
            encoded.update(part for source in still_read for part in parts_of(source))
            summed.update(each.pooled for each in factor.pseudo if each.source in still_read)
        return (encoders, encoded), (sums, summed)

    @property
    def num_parameters(self) -> int:
        """Number of weights that are not masked."""
        whole = [
            value.numel() for part in (self.encoders, self.evidence) for value in part.parameters()
        ]
        return sum(whole) + sum(
            mlp.num_parameters for group in self.groups for mlp in group.networks
        )

    def standard(self, node: Hashable) -> tuple[Tensor, Tensor]:
        """Returns shift and scale of a node's features, ``(features,)`` each."""
        shift, scale = self._affine[node]
        return self._buffers[shift], self._buffers[scale]

    def standardize(self, node: Hashable, features: Tensor) -> Tensor:
        """Returns features shifted and scaled as at the first call, with all plate dims: ``(*left, *plates, n)``."""
        shift, scale = self.standard(node)
        missing = self.nesting + 1 - features.dim()
        if missing > 0:
            features = features[(None,) * missing]
        return torch.addcmul(shift, features.to(shift), scale)

    def affine(self, name: Hashable) -> tuple[Tensor, Tensor]:
        """Returns shift and scale of a factor's own features, ``(elements, features)`` each."""
        factor = self.factors[name]
        shift, scale = (part.view(-1, factor.num_features) for part in self.standard(name))
        members = factor.num_elements // len(shift)
        return (
            (shift, scale) if members == 1 else (shift.repeat(members, 1), scale.repeat(members, 1))
        )

    def reads(self, name: Hashable, nodes: Collection[Hashable]) -> bool:
        """Whether a factor reads any of some nodes."""
        return not self._nodes[name].isdisjoint(nodes)

    def pooling(self, constant: bool) -> tuple[Pooling, Pooling]:
        """Returns the encoders, and the sums of pseudo-observations, with their parameters read now.

        Where the data are ``constant``, only those that are used: optimizers may fail at parameters without a gradient.
        """

        def bound(modules: Mapping[Pooled, Any], still_read: Collection[Source]) -> Pooling:
            used = [source for source in modules if not constant or source in still_read]
            return {
                s: functools.partial(modules[s].forward, weights=modules[s].weights()) for s in used
            }

        encoders, sums = self._pooling
        return bound(*encoders), bound(*sums)

    # ---- where weights start

    def set_initial(self, initial: Mapping[Hashable, Tensor]) -> None:
        """Makes rows ``(elements, rows)`` of every factor those that its network gives at first."""
        for group in self.groups:
            values = torch.cat([initial[factor.name].flatten() for factor in group.factors])
            group.mlp.set_output_bias(values.to(group.mlp.output))

    def set_offsets(self, plates: Mapping[Any, Mapping[str, tuple[int, int]]]) -> None:
        """Gives each instance of some factors offsets of its own: factor -> plates with batch dims and full sizes."""
        factors = {name: self.factors[name] for name in plates}
        units = {
            name: self.like.new_ones(f.num_elements, f.num_params) for name, f in factors.items()
        }
        for group in self.groups:
            shared = torch.zeros_like(group.mlp.units, dtype=torch.bool)
            for factor in group.factors:
                if factor.name in units:
                    group.rows(shared, factor)[:, : factor.num_params] = True
                    where = factor.locations
                    units[factor.name][:, where] = group.rows(group.mlp.bias_units, factor)[
                        :, where
                    ]
            group.mlp.set_shared(shared)
        self.offsets = FreeParameters("offset", units, plates, self.nesting, persistent=True)

    # ---- a guide without weights, all of whose latents are exact

    def zero(self) -> Tensor:
        """Returns zero, with a gradient where weights give none: without any, a loss has no ``backward``."""
        return self.like.new_zeros(()) if self.groups else 0 * torch.as_tensor(self.nothing)

    def with_gradient(self) -> AbstractContextManager:
        """Returns a context of the guide's sites in which their densities have a gradient as `zero` has."""
        if self.groups:
            return nullcontext()
        zero = self.zero()
        if zero.requires_grad:
            zero.register_hook(torch.zeros_like)  # whatever the densities are
        scale = 1 + zero
        self.count(scale)
        return poutine.scale(scale=scale)

    # ---- what is learned beside gradients

    @property
    def settled(self) -> bool:
        """Whether inputs that are data are centered already."""
        return self.simulated or all(group.running.settled for group in self.groups)

    def renew(self) -> None:
        """Begins anew with other data: inputs are centered on those of the coming pass, and speeds are found again."""
        for group in self.groups:
            group.running.settled = False
        self.usual.zero_()
        for module in self.modules():
            if isinstance(module, Pace):
                module.restart()
                module.speed.fill_(1.0)

    def count(self, value: Tensor) -> None:
        """Counts a pass once a gradient comes back to a value that all losses of it depend on."""
        if value.requires_grad and not torch.jit.is_tracing():  # no Python runs in what is compiled
            value.register_hook(self._count)
            self.backward.watch(value)

    def _count(self, gradient: Tensor) -> None:
        self.passes += 1

    @torch.no_grad()  # as a hook may run with gradients on
    def learn(self, record: TrainingRecord | None, gradient: Tensor) -> None:
        """Takes in a pass, once, that a gradient has come back from; a hook of what its networks returned."""
        if record is not None:
            for group, first, last, x in record.inputs:
                group.running.update(x, first, last)
            for group in {self.group_of[name] for name in record.innovations}:
                group.learn(record.innovations)
            record.inputs.clear()
            record.innovations.clear()
        self._stepped = True
        for group in self.groups:
            group.running.passes += 1

    def restrain(self, name: Hashable, gradient: Tensor) -> Tensor:
        """Returns the gradient of a factor's parameters or coupling, shorter where it is far longer than usual.

        One draw far out, as of a chain that is not stable, would else stop an optimizer that divides by a mean of
        squared gradients for a thousand steps, or for good where the gradient is not finite, which so counts as none.
        """
        with torch.no_grad():  # as the gradient may have a graph of its own
            usual, length = self.usual[self._index[name]], gradient.norm()
            known = (usual > 0) & (self.passes > _FIRST)
            lost = known & ~length.isfinite()
            taken = torch.minimum(length, torch.where(known, _LARGEST * usual, torch.inf)).where(
                ~lost, usual
            )
            share = torch.where(taken < length, taken / length, 1.0)
            usual.copy_(
                usual.square().lerp(taken.square(), max(1 / (1 + self.passes), _LATEST)).sqrt()
            )
        return (gradient * share).where(~lost, 0.0)

    def quicken(self) -> None:
        """Adapts the speeds of parameters, if the optimizer may have taken a step since; see `networks.Pace`."""
        if self._stepped:
            self._stepped = False
            networks = (mlp for group in self.groups for mlp in group.networks)
            for part in (*networks, self.offsets, self.couplings):
                part.quicken()

    def vary(self, groups: Collection[GroupNetwork]) -> None:
        """Has the networks of some groups learn from data that differ from step to step."""
        for group in groups:
            group.vary()

    def get_extra_state(self) -> list[int]:
        """Returns the number of passes, and whether speeds are to be looked at."""
        return [self.passes, int(self._stepped)]

    def set_extra_state(self, state: Sequence[int]) -> None:
        self.passes, self._stepped = state[0], bool(state[1])


def _encoders(
    factors: Sequence[Factor],
    standard: Mapping[Hashable, Any],
    plates: Plates,
    make_encoder: Callable[[int], Any],
) -> tuple[dict[Source, int], dict[Pooled, Any]]:
    """Returns the number of features of each source that factors read, and the encoders of the pooled ones."""
    sizes: dict[Source, int] = {}
    encoders: dict[Pooled, Any] = {}
    for part in (
        part for factor in factors for source in factor.sources for part in parts_of(source)
    ):
        if part in sizes:
            continue
        if isinstance(part, Direct):
            sizes[part] = len(standard[part.node][0])
        elif isinstance(part, Pooled):
            encoders[part] = make_encoder(num_inputs(part, sizes))
            sizes[part] = encoders[part].num_features
        else:
            members = part.plates if isinstance(part, Flattened) else ()
            sizes[part] = sizes[part.source] * math.prod(plates.sizes[plate] for plate in members)
    return sizes, encoders


def _groups(
    factors: Sequence[Factor],
    plates: Plates,
    sizes: Mapping[Source, int],
    hidden_features: Sequence[int] | None,
    shared: bool,
    options: Mapping[str, Any],
) -> tuple[GroupNetwork, ...]:
    """Returns the networks of factors in the same plates, or of each if none are ``shared``.

    In SVI factors that read nothing have their own.
    """
    simulated = options["simulated"]
    # Latents without a factor are read as well.
    position = {name: i for i, name in enumerate(options["latents"])}
    members: dict[Hashable, list[Factor]] = {}
    for factor in factors:
        key = factor.batch, not (simulated or factor.sources), shared or factor.name
        members.setdefault(key, []).append(factor)
    groups = []
    for each in members.values():
        widths = hidden_features
        if widths is None:
            least, most = _UNITS
            few = _MOST_UNITS // math.prod(plates.sizes[plate] for plate in each[0].batch)
            widths = (most if simulated else min(max(least, few), most),)
        steps = plan_steps(each, position, sizes)
        groups.append(GroupNetwork(each, steps, hidden_features=widths, **options))
    return tuple(groups)
