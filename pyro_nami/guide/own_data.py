"""The data that a call brings: observed values, covariates and index maps.

Observed values come from ``observations=``; else from the model's arguments, if a site's value is
one of them; else from a run of the model at reference values of its latents. Each source is a
function from a call to a call that knows more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

import pyro
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nami.guide.arguments import Cache, Look, Looks
from pyro_nami.guide.call import Call, reference_values
from pyro_nami.guide.columns import covariate_values
from pyro_nami.guide.maps import MapReader
from pyro_nami.guide.plan import Plan, missing_site, new_site
from pyro_nami.messages import warn
from pyro_nami.program.first_run import is_latent, is_passing
from pyro_nami.program.isolation import forked_rng, untouched
from pyro_nami.program.loops import NO_LOOPS, family_of
from pyro_nami.program.runner import Message, Sites, Values, is_fixed
from pyro_nami.program.site_values import first_value

__all__ = ["OwnData"]


class OwnData:
    """Finds the data that calls bring.

    Args:
        plan: the guide's.
        cache: keeps what was found for as long as the arguments are the same.
    """

    def __init__(self, plan: Plan, cache: Cache) -> None:
        self.plan, self._cache = plan, cache
        self._maps = MapReader(plan, cache)
        self._looks = Looks()

    def all_of(self, call: Call) -> Call:
        """Returns a call with its observed values, covariates and index maps."""
        return self.completed(self.values_of(call, {}, {}, draws=True))

    def values_of(
        self,
        call: Call,
        plates: Mapping[str, pyro.plate],
        observations: Mapping[str, Any],
        draws: bool,
    ) -> Call:
        """Returns a call with the observed values that it brings.

        Args:
            call: with model and arguments.
            plates: made outside the model.
            observations: values by site; those that are no observed sites are passed over.
            draws: whether latents will be drawn; unless the model is run for that, it has to be run for their plates.
        """
        plan = self.plan
        parts = {
            name: plate.indices
            for name, plate in plates.items()
            if name in plan.plates.subsampled or plate.subsample_size < plate.size
        }
        call = call._replace(indices={**call.indices, **parts})
        call = _from_observations(call, plan, observations) if observations else call
        if plan.series is not None:
            return self._of_series(call)
        leaves = call.program.leaves()
        look = self._looks.known(leaves)
        given = call.values.keys()
        if look is None:
            call = _from_run(call, plan)
            own = {name: value for name, value in call.values.items() if name not in given}
            look = _look_at(call, own, plan)
            self._looks.note(look)
            return call._replace(moving=look.moving)
        slots = look.slots.items()
        found = {name: leaves[i] for name, i in slots if name not in given}
        call = _with_own(call, plan, {k: v for k, v in found.items() if isinstance(v, Tensor)})
        lacks_data = any(name not in call.values for name in plan.read)
        places_latents = draws and not plan.sampling.interleaved
        if lacks_data or places_latents or plan.plates.subsampled or look.varying:
            call = _from_run(call, plan)
        return call._replace(moving=look.moving)

    def _of_series(self, call: Call) -> Call:
        """Returns a call with its loops and their data; it already has the values of ``observations=``."""
        plan = self.plan
        if plan.plates.subsampled or any(name not in call.values for name in plan.read):
            return _from_run(call, plan)
        # the run is the same for other data given in that way
        bare = call._replace(values={}, held={})
        found = self._cache.get("series", call.leaves, lambda: _from_run(bare, plan))
        return found._replace(
            program=call.program._replace(loops=found.program.loops),
            values={**found.values, **call.values},
            held={**found.held, **call.held},
        )

    def completed(self, call: Call) -> Call:
        """Returns a call, whose values are known, with its covariates and index maps."""
        plan = self.plan
        if plan.columns:
            found = self._cache.get("covariates", call.leaves, lambda: self._covariates(call))
            call = call._replace(covariates=found)
        for each in plan.map_plans:
            for name in (*each.values, *each.targets):
                if name in call.lacking:
                    raise ValueError(missing_site(name))
        return call._replace(maps=self._maps.read(call)) if plan.map_plans else call

    @torch.no_grad()
    def _covariates(self, call: Call) -> Values:
        """Returns the covariates of every site, by runs of the model."""
        with untouched(call.program.model), pyro.validation_enabled(False):
            return covariate_values(
                self.plan.covariates,
                call.program,
                lambda reference: call.run(reference, broadcast=True),
                call.lacking,
            )


def _look_at(call: Call, own: Values, plan: Plan) -> Look:
    """Returns what a run of the model has shown about calls of this kind. ``own`` are the values it observed."""
    leaves = enumerate(call.program.leaves())
    places = {id(leaf): i for i, leaf in leaves if not plan.plates.subsampled}
    slots = {name: places[id(value)] for name, value in own.items() if id(value) in places}
    made = own.keys() - slots.keys()
    varying = bool(call.lacking or call.from_prior or made & plan.semi_observed)
    if not made or plan.plates.subsampled:
        return Look(slots, varying)
    with forked_rng(), torch.enable_grad():
        sites = call.run(plan.initial, broadcast=True)
    moving = [name for name in made if getattr(sites[name]["value"], "requires_grad", False)]
    return Look(slots, varying, frozenset(moving))


def _from_observations(call: Call, plan: Plan, observations: Mapping[str, Any]) -> Call:
    """Returns a call with the values of ``observations``; runs of the model also hold values that no rule reads."""
    known = {*plan.read, *plan.semi_observed, *plan.bayesnet.observed}
    values = {
        name: _as_tensor(value, plan)
        for name, value in observations.items()
        if name in known and value is not None
    }
    read = {name: values[name] for name in (*plan.read, *plan.semi_observed) if name in values}
    return call._replace(values=read, held=values)


def _from_run(call: Call, plan: Plan) -> Call:
    """Returns a call with the values that the model observes, by a run at reference values of the latents."""
    shown = plan.plates.subsampled - call.indices.keys()
    # A semi-observed site may bring its own value.
    latents = {
        name: value for name, value in plan.initial.items() if name not in plan.semi_observed
    }
    # whose number of steps may be another
    latents |= {name: reference_values(plan)[name] for name in plan.loops.series}
    # a choice of instances is the user's
    with torch.no_grad(), nullcontext() if shown else forked_rng():
        if plan.series is None:
            sites = call.run(latents, shown=shown, broadcast=True)
        else:
            call, sites = _series_run(call, plan, latents, shown)
    seen = {name: sites[name]["value"] for name in shown if name in sites}
    fresh = [name for name in sites if name not in plan.names and not is_passing(sites[name])]
    new = tuple(name for name in fresh if is_latent(sites[name]))
    for name in new[:1]:
        warn(f"{new_site(name)} It is drawn from the model's own conditional.")
    data = [name for name in fresh if sites[name]["is_observed"] and not is_fixed(sites[name])]
    unread = [name for name in data if not site_is_subsample(sites[name])]
    for name in unread[:1]:
        warn(f"{new_site(name)} Its data is not read.")
    found = {}
    for name in (*plan.read, *plan.semi_observed):
        site = sites.get(name)
        if site and site["is_observed"] and name not in call.values and _is_in_shape(site):
            found[name] = _as_tensor(site["value"], plan)
    call = call._replace(
        indices={**call.indices, **seen},
        sites=sites,
        lacking=plan.names - sites.keys(),
        from_prior=new,
    )
    return _with_own(call, plan, found)


def _series_run(
    call: Call, plan: Plan, latents: Values, shown: Collection[str]
) -> tuple[Call, Sites]:
    """Returns a call with the loops that a run of the model shows, and the sites of that run."""
    apart = call._replace(program=call.program._replace(loops=NO_LOOPS))
    states = plan.loops.states
    values = {name: value for name, value in latents.items() if name not in states}
    families = {family for held in states.values() for family, _ in held.families}

    def choose(site: Message) -> Tensor | None:
        return first_value(site["fn"]) if family_of(site["name"]) in families else None

    sites = apart.run(values, shown=shown, broadcast=True, choose=choose)
    loops = plan.loops.at(sites)
    messages = loops.messages(sites)
    for held in loops.parts:
        mask = held.counted([sites[name] for name in held.sites])
        if mask is not None:
            messages[held.name]["counted"] = mask
    return call._replace(program=call.program._replace(loops=loops)), messages


def _is_in_shape(site: Message) -> bool:
    """Whether a value fits its site's shape; a conditioned model may keep data of another size than its arguments."""
    sizes = zip(reversed(torch.as_tensor(site["value"]).shape), reversed(site["fn"].shape()))
    return all(a == b or 1 in (a, b) for a, b in sizes)


def _with_own(call: Call, plan: Plan, found: Values) -> Call:
    """Returns a call with values that its own arguments bring."""
    held = {name: value for name, value in found.items() if name in plan.semi_observed}
    return call._replace(values={**call.values, **found}, held={**call.held, **held})


def _as_tensor(value: Any, plan: Plan) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value, **plan.factory)
