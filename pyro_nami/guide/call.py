"""`Call`: the arguments and the data of one call, frozen, and how it differs from the call that answers it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.guide.arguments import Arguments
from pyro_nami.guide.mode import Data
from pyro_nami.guide.plan import Plan
from pyro_nami.guide.rules import Prior
from pyro_nami.messages import quoted
from pyro_nami.parameters.inputs import IndexMaps
from pyro_nami.program.first_run import is_latent, is_passing
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.plate_dims import frames_of
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Runner, Sites, Values
from pyro_nami.program.surroundings import Surroundings

__all__ = [
    "Call",
    "Derived",
    "Kept",
    "Reading",
    "TrainedAnswer",
    "reference_values",
    "sites_of",
    "target_of",
]


class TrainedAnswer(NamedTuple):
    """A call that is answered with the posterior of the training data; by default there is none.

    Attributes:
        call: the call.
        hidden: latents of training that the call lacks, observes, or has other instances of; and latents without data.
        private: the hidden latents that other latents are drawn given.
        fresh: latents of the call that training had no data for, at the call's inputs: drawn from the model's own
            conditional.
        notice: what the user is to know of these; empty where there are none.
        absent: sites of a loop that the call, whose loop is shorter, does not have.
    """

    call: Any = None
    hidden: frozenset[str] = frozenset()
    private: frozenset[str] = frozenset()
    fresh: tuple[str, ...] = ()
    notice: str = ""
    absent: frozenset[str] = frozenset()


class Kept(NamedTuple):
    """The conditionals of a group, kept for later calls with the same data.

    Attributes:
        arguments: the arguments and data that they were derived from.
        conditionals: None if they depend on the model's parameters.
        sites: the members' sites in a run of the model.
        surroundings: what the model read in that run besides its arguments; None if that is not known.
        near: the Normal about a mode from which they were derived, if any.
        values, height: for a group that comes first, two draws of all latents, and the log density of draws and data in
            nats.
    """

    arguments: Arguments
    conditionals: Any = None
    sites: Sites = {}
    surroundings: Surroundings | None = None
    near: Any = None
    values: Values = {}
    height: Any = None

    def holds(self, call: Any) -> bool:
        """Whether a call has the same arguments and data, in the same surroundings."""
        return self.surroundings is call.derived.surroundings and self.arguments.are(call.sources)


class Derived(NamedTuple):
    """Results that earlier calls derived from data.

    Attributes:
        constants: exact conditionals at the training data; None where the call has other data.
        tables: group that comes first -> what was found for the latest call, `Kept`.
        starts: group -> the warm starts of its mode search, `Starts`.
        is_fixed: whether the data of training stay, whatever arguments later calls have.
        surroundings: what the model reads besides its arguments, the same object while that stays; None if not known.
    """

    constants: dict[Any, Any] | None
    tables: dict[Any, Any]
    starts: dict[Any, Any]
    is_fixed: bool = False
    surroundings: Surroundings | None = None


class Call(NamedTuple):
    """The arguments and data whose posterior a guide draws from.

    If the guide was called with other arguments than those of training, ``target`` is the call with these."""

    program: Program
    indices: Mapping[str, Tensor] = {}  # subsampled plate -> its instances
    # observed site -> value that the factors read
    values: Values = {}
    # what the model is run with in place of its own values
    held: Values = {}
    # of a run at reference values, where one was needed
    sites: Sites = {}
    lacking: frozenset[str] = frozenset()  # sites of the guide's first call that this one lacks
    # latents drawn from the model's own conditional: those that the first call lacked, or of rows that no data cover
    from_prior: tuple[str, ...] = ()
    covariates: Values = {}  # site -> its covariates
    # of the rows that the factors read
    maps: IndexMaps = IndexMaps({}, {})
    # observed sites whose values move with the model's parameters
    moving: frozenset[str] = frozenset()
    derived: Derived = Derived(None, {}, {})
    target: TrainedAnswer = TrainedAnswer()

    @property
    def counted(self) -> Values:
        """Loop of any length -> which elements of its states, or steps of its data, the model counts, if not all."""
        return {name: site["counted"] for name, site in self.sites.items() if "counted" in site}

    @property
    def leaves(self) -> list[Any]:
        """The leaves of the arguments, and the instances of subsampled plates."""
        return [*self.program.leaves(), *self.indices.values()]

    @property
    def sources(self) -> list[Any]:
        """The sources of results of this call: the leaves of its arguments, and the observed values."""
        known = {**self.held, **self.values}
        return [*self.program.leaves(), *(known[name] for name in sorted(known))]

    def run(self, values: Mapping[str, Any], **options: Any) -> Sites:
        """Returns the sites of a hidden run of the model on this call's arguments and instances; see `Runner`."""
        return self.program.run(Runner(values, self.indices, **options))


class Reading(NamedTuple):
    """The data that a model reads in one call.

    Attributes:
        call: with arguments.
        data: the fingerprints of the data, by which they are compared with those of other calls.
        surroundings: globals and attributes that the model reads; None if these are not known.
    """

    call: Call
    data: Data | None = None
    surroundings: Surroundings | None = None

    def sites(self, values: Mapping[str, Any], **options: Any) -> Sites:
        """Returns the sites of a run of the model on these data."""
        with self.surroundings.restored() if self.surroundings else nullcontext():
            return self.call.run(values, **options)


def target_of(call: Any, before: Sites, now: Sites, plan: Plan) -> TrainedAnswer:
    """Returns how a call with sites ``now`` differs from the call that answers it, with sites ``before``."""
    latents = [name for name in plan.rules if name in before and not before[name]["is_observed"]]
    open_sites = {name for name in now if is_latent(now[name]) and not is_passing(now[name])}
    shared = [name for name in latents if name in open_sites]
    other = {name for name in shared if _sizes(now, name) != _sizes(before, name)}
    barren = {name for name in latents if isinstance(plan.rules[name], Prior)}
    hidden = frozenset({*latents} - open_sites | other | barren)
    new = open_sites - plan.names | open_sites & (other | barren)
    fresh = tuple(name for name in now if name in new)
    untold = tuple(name for name in fresh if name not in barren)
    absent = set[str]()
    for name, held in plan.loops.states.items():
        if name in now:
            absent.update(set(held.sites).difference(now[name]["part"].sites))
    notice = _notice(untold, before, now)
    private = _read_by_others(plan, hidden)
    return TrainedAnswer(call, hidden, private, fresh, notice, frozenset(absent))


def _read_by_others(plan: Plan, hidden: Collection[str]) -> frozenset[str]:
    """Returns the hidden latents that other latents are drawn given."""
    found, left = set[str](), [name for name in plan.rules if name not in hidden]
    while left:
        name = left.pop()
        needed = plan.groups[name].needed if name in plan.groups else ()
        reads = {*plan.inverse.parents.get(name, ()), *needed}.intersection(hidden) - found
        found |= reads
        left += reads
    return frozenset(found)


def sites_of(call: Any, plan: Plan) -> Sites:
    """Returns the sites of a run of the model on a call's arguments, at reference values of its latents."""
    with torch.no_grad(), forked_rng():
        found: Mapping[str, Any] = call.run(reference_values(plan))
    return found


def reference_values(plan: Plan) -> dict[str, Any]:
    """Returns latent -> a function of its prior that gives its initial value, or a draw where it has another shape."""

    def reference(value: Tensor, fn: Any) -> Tensor:
        is_same = value.shape[value.dim() - len(fn.event_shape) :] == fn.event_shape
        return value.expand(fn.shape()) if is_same else fn.sample()

    return {
        name: functools.partial(reference, value)
        for name, value in plan.initial.items()
        if name not in plan.semi_observed
    }


def _sizes(sites: Sites, name: str) -> tuple[dict[str, int], torch.Size]:
    """Returns the plates around a site, and its event shape; none of the sites of a loop, whose length may differ."""
    site = sites[name]
    is_of_any_length = "part" in site and "stack" not in site
    event = torch.Size() if is_of_any_length else site["fn"].event_shape
    return _plates(sites, (name,)), event


def _notice(fresh: tuple[str, ...], before: Sites, now: Sites) -> str:
    if not fresh:
        return ""
    trained = _plates(before, fresh)
    others = [
        f"plate '{plate}' has {size} instances, {trained[plate]} in training"
        for plate, size in _plates(now, fresh).items()
        if trained.get(plate, size) != size
    ]
    reason = f" ({'; '.join(others)})" if others else ""
    for site in (now[name] for name in fresh if "stack" in now[name]):
        (count,), series = site["fn"].event_shape, site["part"]
        return (
            f"This call has {count} steps of '{series.sites[0]}', and training had {series.length}. Steps of training "
            "are drawn as in training; further steps are drawn from the model's own conditional given all others, and "
            "data of this call do not change them. To infer further steps from data, train a guide on these data."
        )
    return (
        f"The guide was trained on data without {quoted(fresh)} as this call has them{reason}: they are drawn from the "
        "model's own conditional given all others, and data of this call do not change them. To infer them from data, "
        "pass the data as observations={site: value}, or train the guide on them."
    )


def _plates(sites: Sites, names: tuple[str, ...]) -> dict[str, int]:
    """Returns the plates around some sites, with their full sizes."""
    frames = [frame for name in names if name in sites for frame in frames_of(sites[name])]
    return {frame.name: frame.full_size or frame.size for frame in frames}
