"""Finding the data of each call of one guide: observed values, covariates and index maps.

The sources of observed values are, in this order, ``observations=``; the model's arguments, where an observed site's
value is one of them; a run of the model at reference values of its latents, where these do not tell; and what was last
seen in training (`last_seen`). Each is a function from a call to one that knows more. Change this module to feed a
guide from elsewhere, or to change what is kept from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_nami.guide.arguments import Arguments, Look, Looks
from pyro_nami.guide.call import Call
from pyro_nami.guide.columns import covariate_values
from pyro_nami.guide.conditioning import covariates_of
from pyro_nami.guide.inputs import IndexMaps
from pyro_nami.guide.maps import MapReader
from pyro_nami.guide.memory import Memory, last_seen, same_values
from pyro_nami.guide.plan import Plan, missing_site, new_site
from pyro_nami.guide.rules import fixed_size
from pyro_nami.messages import warn
from pyro_nami.reading.first_run import is_latent, is_passing
from pyro_nami.reading.isolation import forked_rng, untouched
from pyro_nami.reading.runner import is_fixed

__all__ = ["CallReader"]

_ARGUMENTS = ("arguments of the model",)  # the node of all of them, in memory


class CallReader:
    """Finds the data of each call of one guide.

    Args:
        plan: the guide's; another one may take its place.
        covariates, index_maps: the guide's options of these names.
    """

    def __init__(self, plan: Plan, covariates: Any, index_maps: Mapping[tuple[str, str], Callable]) -> None:
        self.plan, self.covariates = plan, covariates
        self.memory = Memory(varied=bool(plan.semi_observed))
        self._maps = MapReader(plan, index_maps)
        self._looks = Looks()
        self._probed: tuple[Arguments, dict[str, Tensor]] | None = None
        self._awaited: tuple[int, Call, Any] | None = None  # passes, and a call that is training if others follow; data
        self.renewed = False  # whether training goes on with other data, which networks are yet to be centered on

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_awaited": None}

    def read(
        self,
        call: Call,
        plates: Mapping[str, pyro.plate],
        observations: Any,
        *,
        remember: bool,
        passes: int,
        draws: bool,
    ) -> Call:
        """Returns a call with its data; ValueError where a site has none, or is missing from the run.

        Args:
            call: with model and arguments.
            plates: made outside the model.
            observations: values by site; those that are no observed sites are passed over.
            remember: whether to keep what the call's own arguments bring, for calls that bring none.
            passes: those of the networks in training that gradients have come back from.
            draws: whether latents will be drawn; unless the model is run for that, it has to be run for their plates.
        """
        plan = self.plan
        leaves = [*call.args, *call.kwargs.values(), *call.kwargs]
        if any(isinstance(leaf, (dict, list, tuple)) for leaf in leaves):
            leaves = tree_leaves(leaves)
        kind = self._looks.kind(leaves)
        look = self._looks.known(kind)
        parts = {name: p.indices for name, p in plates.items() if p.subsample_size < p.size}
        call = replace(call, indices=parts) if parts else call
        call = _from_observations(call, plan, observations) if observations else call
        call = _from_arguments(call, plan, look.slots if look is not None else {})
        complete = all(name in call.values for name in plan.read)
        alone = look is not None and complete and (plan.interleaved or not draws)
        if not alone or plan.plates.subsampled or look is not None and look.varying:
            call = _from_run(call, plan, plates)
        if look is None:
            look = _look_at(call, plan)
            self._looks.note(kind, look)
        if plan.columns:
            call = replace(call, covariates=self._covariates(call, leaves))
        absent = [name for name in plan.read if name not in call.values]
        if observations or any(map(_is_data, call.sites.values())):
            absent = [name for name in absent if name not in call.lacking]
        if plan.map_plans:
            call = replace(call, maps=self._index_maps(call, leaves, absent))
        call = self._compared(call, observations, remember, passes, look.moving, leaves)
        if call.familiar and remember and draws and not call.indices:
            call = replace(call, constants=self.memory.constants)
        call = replace(call, tables=self.memory.tables, starts=self.memory.starts)
        if absent:
            call = last_seen(call, plan, self.memory, absent, self._maps.resized(call))
        _check_sizes(call, plan)
        return call

    def forget(self) -> None:
        """Forgets what was found for the arguments of earlier calls."""
        self._probed = None
        self.memory.constants.clear()
        self.memory.tables.clear()
        self.memory.starts.clear()
        self._maps.forget()

    @property
    def names(self) -> list[Any]:
        """The names under which values may be remembered."""
        return [*self.plan.sites, *map(covariates_of, self.plan.sites), *self._maps.names, _ARGUMENTS]

    def apply(self, fn: Callable[[Tensor], Tensor], plan: Plan) -> None:
        """Applies ``fn`` to all tensors kept, to move them to another device, where ``plan`` is."""
        self.plan = self._maps.plan = plan
        self.memory.apply(fn, plan.factory["device"])
        self.forget()

    def _covariates(self, call: Call, leaves: list) -> dict[str, Tensor]:
        """Returns the covariates of every site, probed anew only where the model's arguments changed."""
        if self._probed is not None and not call.indices and self._probed[0].are(leaves):
            return self._probed[1]
        with untouched(call.model), torch.no_grad(), pyro.validation_enabled(False):
            values = covariate_values(
                self.plan.covariates,
                self.covariates,
                call.args,
                call.kwargs,
                lambda reference: call.run(reference, broadcast=True),
                call.lacking,
            )
        self._probed = Arguments(leaves), values
        return values

    def _index_maps(self, call: Call, leaves: list, absent: Collection[str]) -> IndexMaps:
        plan = self.plan
        for name in [name for each in plan.map_plans for name in (*each.values, *each.targets)]:
            if name in call.lacking:
                raise ValueError(missing_site(name))
        stale = frozenset().union(*(plan.sites[name].plates for name in absent))
        return self._maps.read(call, leaves, self.memory.seen, stale)

    def settle(self, passes: int, data: Mapping[Hashable, Tensor] | None = None) -> None:
        """Takes in the last call's data, other than all before, if gradients have come back from it since.

        A look at other data is no training on them. If this call has the same ``data`` again, and as many latents as
        before, training goes on with them: they are the data now. Else data vary.
        """
        if self._awaited is not None and passes > self._awaited[0]:
            _, call, last = self._awaited
            again = data is not None and last is not None and _are_equal(data, last) and self._fits(call)
            self._take_in(call, varied=not again)
            if again:
                self.memory.renew()
                self.renewed = True
        self._awaited = None

    @property
    def waits(self) -> bool:
        """Whether it is yet to be seen if the last call's data are what training goes on with."""
        return self._awaited is not None and self._awaited[2] is not None and self._fits(self._awaited[1])

    def _fits(self, call: Call) -> bool:
        """Whether plates of latents are of the sizes that they had at first."""
        local = frozenset().union(*(self.plan.sites[name].plates for name in self.plan.rules))
        return not any(_other_sizes(call, self.plan, call.values, local))

    def _compared(
        self,
        call: Call,
        observations: Mapping[str, Any],
        remember: bool,
        passes: int,
        moving: Collection[str],
        leaves: Sequence[Any],
    ) -> Call:
        """Returns a call that knows whether its data are those of training, and remembers them if they belong there.

        Minibatches are taken to be the data seen; data given by ``observations`` are those of one call. Data that are
        ``moving`` with the model's parameters (a residual, say) are the same if the tensors of its arguments are.
        """
        plan, memory = self.plan, self.memory
        values: list[tuple[str, Hashable, Tensor]] = []
        values += [(name, name, call.values[name]) for name in plan.read if name in call.values]
        values += [(name, covariates_of(name), value) for name, value in call.covariates.items()]
        still = [each for each in values if each[0] not in moving]
        data = [(n, value) for name, n, value in still if plan.plates.subsampled.isdisjoint(plan.sites[name].plates)]
        arguments = {_ARGUMENTS: _joined(leaves)} if moving else {}
        data += arguments.items()
        given = any(observations.get(name) is not None for name in plan.read)
        self.settle(passes, dict(data))
        familiar = not memory.varied and not given and memory.holds(data)
        if remember and not familiar and not memory.varied and passes:
            self._awaited = passes, call, None if given else dict(data)
        elif remember:
            self._take_in(call, varied=not familiar)
        if remember:
            self.memory.keep(arguments, None)
        return replace(call, familiar=familiar)

    def _take_in(self, call: Call, varied: bool) -> None:
        """Remembers the data of a call that belongs to training."""
        self.memory.varied = self.memory.varied or varied
        if call.own:
            covariates = {covariates_of(name): value for name, value in call.covariates.items()}
            context = call.args, dict(call.kwargs), dict(call.indices), dict(call.values)
            kept = {**call.own, **covariates, **self._maps.state(call.maps)}
            self.memory.keep(kept, context if self.plan.groups else None)


def _are_equal(one: Mapping[Hashable, Tensor], other: Mapping[Hashable, Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_values(value, other[node]) for node, value in one.items())


def _look_at(call: Call, plan: Plan) -> Look:
    """Returns what a run of the model has shown of this call, for others of its kind."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    slots = {
        name: slot
        for name, value in call.own.items()
        for slot, argument in arguments
        if isinstance(argument, Tensor) and argument is value and not plan.plates.subsampled
    }
    own_data = any(name in call.own and name not in slots for name in plan.semi_observed)
    made = [name for name in call.own if name not in slots] if not plan.plates.subsampled else []
    return Look(slots, bool(call.lacking or call.new or own_data), _moving(call, plan, made))


def _moving(call: Call, plan: Plan, names: Collection[str]) -> frozenset[str]:
    """Returns which of the values that the model makes for observed sites move with its parameters."""
    if not names:
        return frozenset()
    with forked_rng(), torch.enable_grad():
        sites = call.run(plan.initial, broadcast=True)
    return frozenset(name for name in names if getattr(sites[name]["value"], "requires_grad", False))


def _joined(leaves: Sequence[Any]) -> Tensor:
    """Returns all numbers of tensors among the model's arguments, as one vector that is not empty."""
    tensors = [torch.zeros(1), *(leaf.detach().flatten() for leaf in leaves if isinstance(leaf, Tensor))]
    return torch.cat([tensor.to(tensors[-1].device, torch.float64) for tensor in tensors])


def _from_observations(call: Call, plan: Plan, observations: Mapping[str, Any]) -> Call:
    """The first source: ``observations``; what no rule reads, the model's own conditionals may."""
    known = {*plan.read, *plan.semi_observed, *plan.bayesnet.observed}
    values = {
        name: _as_tensor(value, plan)
        for name, value in observations.items()
        if name in known and value is not None
    }
    read = {name: values[name] for name in (*plan.read, *plan.semi_observed) if name in values}
    return replace(call, values=read, held=values)


def _from_arguments(call: Call, plan: Plan, slots: Mapping[str, int | str]) -> Call:
    """The second source: arguments of the model that are known to be data."""
    found = {
        name: call.argument(slots[name])
        for name in (*plan.read, *plan.semi_observed)
        if name in slots and name not in call.values
    }
    return _with_own(call, plan, {name: value for name, value in found.items() if isinstance(value, Tensor)})


def _from_run(call: Call, plan: Plan, plates: Mapping[str, pyro.plate]) -> Call:
    """The third source: a run of the model at reference values of the latents, for what it observes itself."""
    subsampled = plan.plates.subsampled
    indices = {**call.indices, **{name: plate.indices for name, plate in plates.items() if name in subsampled}}
    shown = subsampled - indices.keys()
    # A semi-observed site may bring its own value.
    latents = {name: value for name, value in plan.initial.items() if name not in plan.semi_observed}
    with torch.no_grad():
        sites = replace(call, indices=indices).run(latents, shown=shown, broadcast=True)
    indices.update({name: sites[name]["value"] for name in shown if name in sites})
    fresh = [name for name in sites if name not in plan.names and not is_passing(sites[name])]
    new = tuple(name for name in fresh if is_latent(sites[name]))
    for name in new[:1]:
        warn(f"{new_site(name)} It is drawn from the model's own conditional.")
    for name in [name for name in fresh if _is_data(sites[name])][:1]:
        warn(f"{new_site(name)} Its data is not read.")
    found = {
        name: _as_tensor(sites[name]["value"], plan)
        for name in (*plan.read, *plan.semi_observed)
        if name in sites and sites[name]["is_observed"] and name not in call.values and _is_in_shape(sites[name])
    }
    call = replace(call, indices=indices, sites=sites, lacking=plan.names - sites.keys(), new=new)
    return _with_own(call, plan, found)


def _is_in_shape(site: Mapping[str, Any]) -> bool:
    """Whether a value is one for the plates of its site: a conditioned model keeps the data, whatever its arguments."""
    sizes = zip(reversed(torch.as_tensor(site["value"]).shape), reversed(site["fn"].shape()))
    return all(a == b or 1 in (a, b) for a, b in sizes)


def _with_own(call: Call, plan: Plan, found: Mapping[str, Tensor]) -> Call:
    """Returns a call with values that its own arguments bring."""
    held = {name: value for name, value in found.items() if name in plan.semi_observed}
    return replace(
        call,
        values={**call.values, **found},
        own={**call.own, **found},
        held={**call.held, **held},
    )


def _as_tensor(value: Any, plan: Plan) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value, **plan.factory)


def _is_data(site: Any) -> bool:
    """Whether a run observes a value at a site."""
    return site["is_observed"] and not is_fixed(site) and not site_is_subsample(site)


def _check_sizes(call: Call, plan: Plan) -> None:
    """Raises where a plate that the guide flattens has changed its size."""
    for plate, held in _other_sizes(call, plan, call.values.keys() & plan.read, plan.blocks.keys()):
        if held != 1:
            raise ValueError(fixed_size(plan.blocks[plate], plate, plan.plates.sizes[plate], held))


def _other_sizes(
    call: Call, plan: Plan, names: Iterable[str], plates: Collection[str]
) -> Iterator[tuple[str, int]]:
    """Yields those plates that do not have their first size in values of a call, and the size, 1 without a dim."""
    for name in names if plates else ():
        site, value = plan.sites[name], call.values[name]
        for plate in site.plates.intersection(plates):
            dim = plan.plates.dims[plate] - site.event_dim
            held = value.shape[dim] if value.dim() >= -dim else 1
            if held != plan.plates.sizes[plate]:
                yield plate, held
