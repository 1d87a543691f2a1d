"""A call's data: the values of observed sites, the covariates and the index maps, found in order from their sources.

The sources are ``observations=``; the model's arguments, where an observed site's value is one of them; a run of the
model at reference values of its latents; and what was last seen in training. Each is a function from a call to one
that knows more; what comes out is frozen. Change this module to feed a guide from elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyro
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_nami.guide.arguments import Arguments, Look, Looks
from pyro_nami.guide.columns import covariate_values
from pyro_nami.guide.conditioning import covariates_of
from pyro_nami.guide.inputs import IndexMaps
from pyro_nami.guide.maps import MapReader
from pyro_nami.guide.memory import Memory
from pyro_nami.guide.rules import fixed_size
from pyro_nami.guide.shapes import resized_plates
from pyro_nami.guide.structure import Plan, missing_site, new_site
from pyro_nami.messages import warn
from pyro_nami.reading.first_run import is_latent, is_passing
from pyro_nami.reading.forms import ConjugateGroup
from pyro_nami.reading.isolation import untouched
from pyro_nami.reading.runner import Runner, is_fixed

__all__ = ["Call", "CallReader"]


@dataclass(frozen=True)
class Call:
    """One call's data.

    Attributes:
        model, args, kwargs: the model and its arguments.
        indices: subsampled plate -> its instances.
        values: observed site -> value that the factors read; own: those of them that the model's arguments bring.
        given: values that the model is run with in place of its own.
        sites: the model's sites at reference values of the latents, where a run was needed.
        lacking: sites of the guide's first call that this one lacks, so that they are no data in it.
        new: latents that the first call lacked, which are drawn from the model's own conditional.
        covariates: site -> its covariates.
        maps: the index maps of the rows that the factors read.
        familiar: whether the data are those that the guide has been trained on in all steps so far.
        unseen: latents of rows that no data covers.
        context, derived: the last call in training, and the latents whose exact conditionals are derived from it, since
            this call lacks data of theirs.
    """

    model: Callable
    args: tuple
    kwargs: Mapping[str, Any]
    indices: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Tensor] = field(default_factory=dict)
    own: Mapping[str, Tensor] = field(default_factory=dict)
    given: Mapping[str, Tensor] = field(default_factory=dict)
    sites: Mapping[str, Any] = field(default_factory=dict)
    lacking: frozenset[str] = frozenset()
    new: tuple[str, ...] = ()
    covariates: Mapping[str, Tensor] = field(default_factory=dict)
    maps: IndexMaps = field(default_factory=lambda: IndexMaps({}, {}))
    familiar: bool = False
    unseen: frozenset[str] = frozenset()
    context: Call | None = None
    derived: frozenset[str] = frozenset()

    def argument(self, slot: int | str) -> Any:
        """Returns the model's argument at a position or of a name; None if this call has none."""
        if isinstance(slot, str):
            return self.kwargs.get(slot)
        return self.args[slot] if slot < len(self.args) else None

    @functools.cached_property
    def frames(self) -> dict[str, Any]:
        """Plate -> its frame, of the plates that `sites` are in."""
        frames = (frame for site in self.sites.values() for frame in site["cond_indep_stack"])
        return {frame.name: frame for frame in frames if frame.vectorized}

    def source(self, group: ConjugateGroup) -> Call:
        """Returns the call that the exact conditionals of some latents are derived from."""
        return self if self.context is None or self.derived.isdisjoint(group.members) else self.context

    def run(self, values: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Returns the sites of a hidden run of the model on this call's arguments and instances; see `Runner`."""
        return Runner(values, self.indices, **options).run(self.model, self.args, self.kwargs)


class CallReader:
    """Finds the data of each call of one guide.

    Args:
        plan: the guide's; another one may take its place.
        covariates, index_maps: the guide's options of these names.

    Attributes:
        memory: of the data in training.
    """

    def __init__(self, plan: Plan, covariates: Any, index_maps: Mapping[tuple[str, str], Callable]) -> None:
        self.plan, self.covariates = plan, covariates
        self.memory = Memory(varied=bool(plan.semi_observed))
        self._maps = MapReader(plan, index_maps)
        self._looks = Looks()
        self._probed: tuple[Arguments, dict[str, Tensor]] | None = None

    def read(
        self, call: Call, plates: Mapping[str, pyro.plate], observations: Any, *, remember: bool, draws: bool
    ) -> Call:
        """Returns a call with its data.

        Args:
            call: with model and arguments.
            plates: made outside the model.
            observations: values by site; those that are no observed sites are passed over.
            remember: whether to keep what the call's own arguments bring, for calls that bring none.
            draws: whether latents will be drawn; unless the model is run for that, it has to be run for their plates.

        Raises:
            ValueError: a site has no data, or is missing from the run.
        """
        plan = self.plan
        leaves = [*call.args, *call.kwargs.values(), *call.kwargs]
        if any(isinstance(leaf, (dict, list, tuple)) for leaf in leaves):
            leaves = tree_leaves(leaves)
        kind = self._looks.kind(leaves)
        look = self._looks.known(kind)
        parts = {name: p.indices for name, p in plates.items() if p.subsample_size < p.size}
        call = _given(replace(call, indices=parts), plan, observations)
        call = _from_arguments(call, plan, look.slots if look is not None else {})
        complete = all(name in call.values for name in plan.read)
        alone = look is not None and complete and (plan.interleaved or not draws)
        if not alone or plan.plates.subsampled or look is not None and look.varying:
            call = _from_run(call, plan, plates)
        if look is None:
            self._looks.note(kind, _look(call, plan))
        if plan.covariates.columns:
            call = replace(call, covariates=self._covariates(call, leaves))
        absent = [name for name in plan.read if name not in call.values]
        if observations or any(map(_is_data, call.sites.values())):
            absent = [name for name in absent if name not in call.lacking]
        if plan.map_plans:
            call = replace(call, maps=self._index_maps(call, leaves, absent))
        call = self._compared(call, observations, remember)
        if absent:
            call = _last_seen(call, plan, self.memory, absent, self._maps.resized(call))
        _check_sizes(call, plan)
        return call

    def forget(self) -> None:
        """Forgets what was found for the arguments of earlier calls."""
        self._probed = None
        self._maps.forget()

    @property
    def names(self) -> list[Any]:
        """The names under which values may be remembered."""
        return [*self.plan.sites, *map(covariates_of, self.plan.sites), *self._maps.names]

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

    def _compared(self, call: Call, observations: Mapping[str, Any], remember: bool) -> Call:
        """Returns a call that knows whether its data are those of training, and remembers them if they belong there.

        Minibatches are taken to be the data seen; data given by ``observations`` are those of one call.
        """
        plan, memory = self.plan, self.memory
        values: list[tuple[str, Hashable, Tensor]] = []
        values += [(name, name, call.values[name]) for name in plan.read if name in call.values]
        values += [(name, covariates_of(name), value) for name, value in call.covariates.items()]
        data = [(n, value) for name, n, value in values if plan.plates.subsampled.isdisjoint(plan.sites[name].plates)]
        given = any(observations.get(name) is not None for name in plan.read)
        familiar = not memory.varied and not given and memory.holds(data)
        memory.varied = memory.varied or remember and not familiar
        if remember and call.own:
            covariates = {covariates_of(name): value for name, value in call.covariates.items()}
            context = call.args, dict(call.kwargs), dict(call.indices), dict(call.values)
            kept = {**call.own, **covariates, **self._maps.state(call.maps)}
            memory.keep(kept, context if plan.groups else None)
        return replace(call, familiar=familiar)


def _look(call: Call, plan: Plan) -> Look:
    """Returns what a run of the model has shown of this call, for others of its kind."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    slots = {
        name: slot
        for name, value in call.own.items()
        for slot, argument in arguments
        if isinstance(argument, Tensor) and argument is value and not plan.plates.subsampled
    }
    own_data = any(name in call.own and name not in slots for name in plan.semi_observed)
    return Look(slots, bool(call.lacking or call.new or own_data))


def _given(call: Call, plan: Plan, observations: Mapping[str, Any]) -> Call:
    """The first source: ``observations``; what no rule reads, the model's own conditionals may."""
    known = {*plan.read, *plan.semi_observed, *plan.bayesnet.observed}
    given = {
        name: _as_tensor(value, plan)
        for name, value in observations.items()
        if name in known and value is not None
    }
    values = {name: given[name] for name in (*plan.read, *plan.semi_observed) if name in given}
    return replace(call, values=values, given=given)


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
        if name in sites and sites[name]["is_observed"] and name not in call.values
    }
    call = replace(call, indices=indices, sites=sites, lacking=plan.names - sites.keys(), new=new)
    return _with_own(call, plan, found)


def _last_seen(
    call: Call, plan: Plan, memory: Memory, absent: Collection[str], resized: Mapping[str, int]
) -> Call:
    """The last source: the data last seen in training, for sites that a call brings none for, and their covariates.

    Rows whose covariates are others than those last seen are new rows, as are those of plates ``resized`` by index
    maps.
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
    for name in plan.covariates.columns:
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
        given=call.given if new_plates else {**call.given, **seen},
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
            "saved with the guide. Pass the data, or make the guide with conjugate=False."
        )
    args, kwargs, indices, values = memory.context
    values = {**values, **call.values}
    return Call(call.model, args, kwargs, indices=indices, values=values, given=values)


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


def _check_sizes(call: Call, plan: Plan) -> None:
    """Raises where a plate that the guide flattens has changed its size."""
    for name in call.values.keys() & plan.read if plan.blocks else ():
        site = plan.sites[name]
        for plate in site.plates & plan.blocks.keys():
            value, dim, size = call.values[name], plan.plates.dims[plate] - site.event_dim, plan.plates.sizes[plate]
            if value.dim() >= -dim and value.shape[dim] not in (1, size):
                raise ValueError(fixed_size(plan.blocks[plate], plate, size, value.shape[dim]))


def _with_own(call: Call, plan: Plan, found: Mapping[str, Tensor]) -> Call:
    """Returns a call with values that its own arguments bring."""
    held = {name: value for name, value in found.items() if name in plan.semi_observed}
    return replace(
        call,
        values={**call.values, **found},
        own={**call.own, **found},
        given={**call.given, **held},
    )


def _as_tensor(value: Any, plan: Plan) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value, **plan.factory)


def _is_data(site: Any) -> bool:
    """Whether a run observes a value at a site."""
    return site["is_observed"] and not is_fixed(site) and not site_is_subsample(site)
