"""How a call differs from the training call that answers it: which latents are hidden, and which are fresh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.guide.plan import Plan
from pyro_nami.guide.rules import Prior
from pyro_nami.program.first_run import is_latent, is_passing
from pyro_nami.program.isolation import forked_rng

__all__ = ["TrainedAnswer", "sites_of", "target_of"]


class TrainedAnswer(NamedTuple):
    """A call that is answered with the posterior of the training data.

    Attributes:
        call: the call.
        hidden: latents of training that the call has no place for: it lacks or observes them, or has other instances;
            and those that no data say anything of.
        private: those of them that others are drawn given.
        fresh: latents of the call that training had no data for, at the call's inputs: drawn from the model's own
            conditional.
        notice: what the user is to know of these; empty where there are none.
    """

    call: Any
    hidden: frozenset[str]
    private: frozenset[str]
    fresh: tuple[str, ...]
    notice: str


def target_of(
    call: Any, before: Mapping[str, Any], now: Mapping[str, Any], plan: Plan
) -> TrainedAnswer:
    """Returns how a call with sites ``now`` differs from the one that answers it, whose sites were ``before``."""
    latents = [name for name in plan.rules if name in before and not before[name]["is_observed"]]
    open_sites = {name for name in now if is_latent(now[name]) and not is_passing(now[name])}
    other = [
        name
        for name in latents
        if name in open_sites and _extent(now[name]) != _extent(before[name])
    ]
    new = [name for name in now if name in open_sites and name not in plan.names]
    barren = [name for name in latents if isinstance(plan.rules[name], Prior)]
    hidden = frozenset(
        name for name in latents if name not in open_sites or name in other or name in barren
    )
    fresh = tuple(
        name
        for name in now
        if name in open_sites and (name in other or name in new or name in barren)
    )
    untold = tuple(name for name in fresh if name not in barren)
    return TrainedAnswer(
        call, hidden, _read_by_others(plan, hidden), fresh, _notice(untold, before, now)
    )


def _read_by_others(plan: Plan, hidden: Collection[str]) -> frozenset[str]:
    """Returns the hidden latents that other latents are drawn given."""
    found, left = set[str](), [name for name in plan.rules if name not in hidden]
    while left:
        name = left.pop()
        needed = plan.groups[name].needed if name in plan.groups else ()
        reads = {*plan.inverse.parents.get(name, ()), *needed}.intersection(hidden).difference(
            found
        )
        found |= reads
        left += reads
    return frozenset(found)


def sites_of(call: Any, plan: Plan) -> Mapping[str, Any]:
    """Returns the sites of a run of the model on a call's arguments, at reference values of its latents."""

    def reference(name: str) -> Callable[[Any], Tensor]:
        value = plan.initial[name]

        def at(fn: Any) -> Tensor:
            is_same = value.shape[value.dim() - len(fn.event_shape) :] == fn.event_shape
            return value.expand(fn.shape()) if is_same else fn.sample()

        return at

    latents = {name: reference(name) for name in plan.initial if name not in plan.semi_observed}
    with torch.no_grad(), forked_rng():
        found: Mapping[str, Any] = call.run(latents)
    return found


def _extent(site: Mapping[str, Any]) -> tuple:
    """Returns the sizes of a site's batch dims and event dims, with full sizes of subsampled plates."""
    batch, fn = list(site["fn"].batch_shape), site["fn"]
    for frame in site["cond_indep_stack"]:
        if frame.vectorized and -frame.dim <= len(batch):
            batch[frame.dim] = frame.full_size or frame.size
    while batch and batch[0] == 1:
        batch.pop(0)
    return tuple(batch), tuple(fn.event_shape)


def _notice(fresh: tuple[str, ...], before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if not fresh:
        return ""
    sizes, trained = _plates(now, fresh), _plates(before, fresh)
    others = [
        f"plate '{plate}' has {size} instances, {trained[plate]} in training"
        for plate, size in sizes.items()
        if trained.get(plate, size) != size
    ]
    reason = f" ({'; '.join(others)})" if others else ""
    names = ", ".join(map(repr, fresh))
    return (
        f"The guide was trained on data without {names} as this call has them{reason}: they are drawn from the model's "
        "own conditional given all others, whatever data this call brings. To infer them from data, pass these as "
        "observations={site: value}, or train the guide on them."
    )


def _plates(sites: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    """Returns the plates around some sites, with their full sizes."""
    frames = [frame for name in names if name in sites for frame in sites[name]["cond_indep_stack"]]
    return {frame.name: frame.full_size or frame.size for frame in frames if frame.vectorized}
