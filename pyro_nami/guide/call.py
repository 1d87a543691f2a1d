"""A call's data, frozen, and the sources that bring values of observed sites.

The sources are, in this order, ``observations=``; the model's arguments, where an observed site's value is one of them;
a run of the model at reference values of its latents; and what was last seen in training (`last_seen`). Each is a
function from a call to one that knows more. Change this module to feed a guide from elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyro
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nami.guide.arguments import Look
from pyro_nami.guide.inputs import IndexMaps
from pyro_nami.guide.structure import Plan, new_site
from pyro_nami.messages import warn
from pyro_nami.reading.first_run import is_latent, is_passing
from pyro_nami.reading.joint_gaussian import ConjugateGroup
from pyro_nami.reading.runner import Runner, is_fixed

__all__ = ["Call", "from_arguments", "from_run", "given", "is_data", "look_at"]


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


def look_at(call: Call, plan: Plan) -> Look:
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


def given(call: Call, plan: Plan, observations: Mapping[str, Any]) -> Call:
    """The first source: ``observations``; what no rule reads, the model's own conditionals may."""
    known = {*plan.read, *plan.semi_observed, *plan.bayesnet.observed}
    values = {
        name: _as_tensor(value, plan)
        for name, value in observations.items()
        if name in known and value is not None
    }
    read = {name: values[name] for name in (*plan.read, *plan.semi_observed) if name in values}
    return replace(call, values=read, given=values)


def from_arguments(call: Call, plan: Plan, slots: Mapping[str, int | str]) -> Call:
    """The second source: arguments of the model that are known to be data."""
    found = {
        name: call.argument(slots[name])
        for name in (*plan.read, *plan.semi_observed)
        if name in slots and name not in call.values
    }
    return _with_own(call, plan, {name: value for name, value in found.items() if isinstance(value, Tensor)})


def from_run(call: Call, plan: Plan, plates: Mapping[str, pyro.plate]) -> Call:
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
    for name in [name for name in fresh if is_data(sites[name])][:1]:
        warn(f"{new_site(name)} Its data is not read.")
    found = {
        name: _as_tensor(sites[name]["value"], plan)
        for name in (*plan.read, *plan.semi_observed)
        if name in sites and sites[name]["is_observed"] and name not in call.values
    }
    call = replace(call, indices=indices, sites=sites, lacking=plan.names - sites.keys(), new=new)
    return _with_own(call, plan, found)


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


def is_data(site: Any) -> bool:
    """Whether a run observes a value at a site."""
    return site["is_observed"] and not is_fixed(site) and not site_is_subsample(site)
