"""The last source of a call's data: what was last seen in training, for calls that bring none.

Rows of a plate that it does not cover are new: their latents are drawn from the model's own conditional. Change this
module to predict otherwise where there are no data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from pyro_nami.guide.call import Call
from pyro_nami.guide.conditioning import covariates_of
from pyro_nami.guide.memory import Memory
from pyro_nami.guide.rules import fixed_size
from pyro_nami.guide.shapes import resized_plates
from pyro_nami.guide.structure import Plan

__all__ = ["last_seen"]


def last_seen(
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
