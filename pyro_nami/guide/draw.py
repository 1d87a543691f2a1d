"""Draws the latents of a call, and computes their log density.

If the sampling order is the program's order, latents are drawn inside a run of the model
(`_draw_along`): plates, masks and scales are the model's own, and the prior of every latent is
known at the parents just drawn. Otherwise latents are drawn outside of a run (`_draw_detached`); a
run follows only if some latents are drawn from the model's own conditional.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.mask_messenger import MaskMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK, get_plates
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.poutine.util import is_validation_enabled, site_is_subsample
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import plate_shape
from pyro_nami.factors.distribution import Relocation
from pyro_nami.guide.call import Call, TrainedAnswer, sites_of
from pyro_nami.guide.derivation import derive, valid_at
from pyro_nami.guide.innovations import Innovations
from pyro_nami.guide.one_pass import Outside, Pass, Term, log_density_of_terms
from pyro_nami.guide.plan import Plan, missing_site, new_site, observed_latent
from pyro_nami.guide.rules import Further, LearnedStates, Prior, Rule
from pyro_nami.messages import quoted, warn
from pyro_nami.parameters.network_state import NetworkState
from pyro_nami.program.first_run import is_latent
from pyro_nami.program.isolation import constant_parameters, forked_rng
from pyro_nami.program.plate_dims import outer_sizes
from pyro_nami.program.runner import Message, Runner, Sites, Values

__all__ = [
    "densities",
    "draw",
    "draw_fresh",
    "hand_out",
    "is_predicting",
    "know_all",
    "stages_of",
    "start_pass",
]

# latents that a run of the model draws, and the group that is derived and drawn after it, if any
Stage = tuple[tuple[str, ...], ConjugateGroup | None]
_OF_THE_MODEL = frozenset({"enumerate", "_markov_scope", "_markov_depth"})


def start_pass(plan: Plan, state: NetworkState, call: Call) -> Pass:
    """Returns a pass over the latents of a call, of which nothing is known yet.

    Latents of plate rows that the call has no data for, and those that the first call did not have, are drawn from the
    model's own conditional.
    """
    private = call.target.private
    left_out = call.lacking | (call.target.hidden - private)
    rules = {**plan.rules, **{name: Prior(name) for name in call.from_prior}}
    rules = {name: rule for name, rule in rules.items() if name not in left_out}
    validate = is_validation_enabled() and not torch.jit.is_tracing()
    sizes = outer_sizes(plan.plates.nesting)
    outside = Outside(_relocation(plan), sizes, private, validate)
    current = Pass(plan, call, state, derive, rules, dict(plan.families), outside)
    # what is compiled knows of no other data set
    if call.derived.is_fixed and plan.groups and torch.jit.is_tracing():
        one = valid_at(plan, call, quoted(plan.groups), "mode='minibatches' or mode='amortized'")
        current.derived.valid.update(dict.fromkeys(plan.groups, one))
    traced = any(isinstance(handler, TraceMessenger) for handler in _PYRO_STACK)
    scored = traced and pyro.poutine.get_mask() is not False
    if private and (scored or outside.relocation is not None):
        raise NotImplementedError(
            f"Expected a call with the instances of '{min(private)}' that training had, as this guide draws other "
            "latents given them; got others, at which it has no density. `Predictive` works. For densities use another "
            f"`inverse`, which draws '{min(private)}' last, or give the data as observations=."
        )
    return current


def is_predicting() -> bool:
    """Whether the handlers outside ask for draws alone, as `pyro.infer.Predictive` does."""
    return pyro.poutine.get_mask() is False and all(map(_only_looks, _PYRO_STACK))


def _only_looks(handler: Any) -> bool:
    looks = isinstance(handler, (TraceMessenger, MaskMessenger, InitMessenger, BlockMessenger))
    return looks or isinstance(handler, ConditionMessenger) and not handler.data


def hand_out(plan: Plan, call: Call, values: Values) -> dict[str, Tensor]:
    """Samples every latent at its site, with values drawn in advance; returns the values that outside handlers give."""
    sites, found = call.sites or sites_of(call, plan), dict[str, Tensor]()
    hidden = call.lacking | call.target.hidden
    for name in [name for name in plan.rules if name in values and name not in hidden]:
        own = call.program.loops.split({name: values[name]})
        held = call.program.loops.states.get(name)
        event_dims = map(len, held.events) if held else [sites[name]["fn"].event_dim]
        with _At(sites[name]):
            for (each, value), event_dim in zip(own.items(), event_dims):
                if each not in call.target.absent:
                    found[each] = pyro.sample(each, dist.Delta(value, event_dim=event_dim))
    return found


def draw_fresh(current: Pass) -> dict[str, Tensor]:
    """Draws latents that training had no data for from the model's conditional given all others; returns the values."""
    target: TrainedAnswer = current.call.target
    if not target.fresh:
        return {}
    names = current.plan.loops.names_of(target.fresh)
    rules: dict[str, Rule] = {name: Prior(name) for name in names}
    for name, series in current.plan.loops.series.items():
        if name in target.fresh:
            (site,) = series.sites
            states: Any = current.plan.rules[name].distribution(current, torch.Size(), None)
            rules[site] = Further(site, trained=Innovations(states, series))
    outside = replace(current.outside, private=frozenset(), values={})
    follow = Pass(current.plan, target.call, current.state, derive, rules, {}, outside)
    follow.values = {
        name: value for name, value in current.values.items() if name not in target.hidden
    }
    _draw_along(follow)
    follow.check()
    return outside.values


def draw(current: Pass) -> None:
    """Draws every latent of a call, at sites that the handlers outside see."""
    interleaved = current.plan.sampling.interleaved
    if not interleaved:
        _draw_detached(current)
    if interleaved or current.left():
        _draw_along(current)


def _draw_along(current: Pass) -> None:
    """Draws all latents that are left, stage by stage: in a run of the model, then from derived conditionals."""
    for drawn, group in stages_of(current.rules, current.values):
        if drawn:
            run = _DrawingRun(drawn, current)
            is_series = any(isinstance(current.rules[name], LearnedStates) for name in drawn)
            program, names = current.call.program, current.plan.program.parameters
            with constant_parameters(names, program.roots) if is_series else nullcontext():
                program.play(run)
            if run.missing:
                raise ValueError(missing_site(min(run.missing)))
            _join_states(current, drawn)
        if group is not None:
            _draw_group(group, current)


def _join_states(current: Pass, drawn: Collection[str]) -> None:
    """Takes the states of loops that a run has drawn, one by one, as the whole."""
    for name in drawn:
        if isinstance(current.rules[name], LearnedStates):
            held = current.call.program.loops.states[name]
            values = [current.values.pop(site) for site in held.sites]
            current.know(name, held.joined(values), drawn=True)


def stages_of(rules: Mapping[str, Rule], known: Collection[str]) -> Iterator[Stage]:
    """Yields the latents that one run of the model draws, and the group that is derived and drawn after it, if any.

    A group comes where its first member does, after all that its density reads.

    Args:
        rules: latent -> its rule, in program order.
        known: latents that have a value already.

    Example:
        >>> from pyro_nami.guide.rules import Exact
        >>> group = ConjugateGroup(("a",), ("x",), needed=frozenset({"c"}))
        >>> rules = {"a": Exact("a", group), "b": Prior("b"), "c": Prior("c")}
        >>> [(drawn, last is group) for drawn, last in stages_of(rules, ())]
        [(('c',), True), (('b',), False)]
    """
    done = set[Any](known)  # latents, and groups
    waiting: list[str] = []  # drawn by the next run

    def stages_up_to(name: str) -> Iterator[Stage]:
        group = rules[name].group
        if name in done or group in done:
            return
        done.add(name if group is None else group)
        if group is None:
            waiting.append(name)
            return
        needed = [each for each in rules if each in group.needed]
        for each in sorted(needed, key=lambda each: rules[each].group is None):
            yield from stages_up_to(each)
        yield tuple(waiting), group
        waiting.clear()

    for name in rules:
        yield from stages_up_to(name)
    if waiting:
        yield tuple(waiting), None


def _draw_group(group: ConjugateGroup, current: Pass) -> None:
    """Draws the members of a group from the conditionals that the model gives; these are derived first."""
    current.derive(group.drawn)
    known = current.values.keys() | current.derived.observed
    left = [name for name in group.members if name in current.rules and name not in known]
    sites: Sites = current.derived.sites
    if not sites.keys() >= set(left):
        with forked_rng():  # as draws shall not depend on what was derived before
            sites = current.run(until=left)
    for name in left:
        if name in current.plan.loops.states:
            _draw_states(current, name, sites[name])
        elif current.rules[name].group is not None:
            _draw_at(current, name, sites[name])


class _DrawingRun(Runner):
    """Runs the model with some of its latents drawn by the guide, on behalf of the handlers outside.

    Args:
        drawn: the latents, behind the last of which the run ends.
        current: as for `draw`.
    """

    def __init__(self, drawn: Collection[str], current: Pass) -> None:
        call = current.call
        super().__init__({**call.held, **current.values}, call.indices, until=drawn)
        self._current = current
        self._rules: dict[str, Rule] = {**current.rules}
        for rule in map(current.rules.__getitem__, drawn):
            if isinstance(rule, LearnedStates):
                self._rules |= rule.by_site(current)
        self._to_draw = frozenset(call.program.loops.names_of(drawn))
        self._planned = current.plan.names | current.plan.loops.wholes.keys()
        self._drawn: set[str] = set()

    def restart(self) -> None:
        super().restart()
        self.values = {**self.values, **self._current.values}  # what is drawn stays

    def _process_message(self, msg: Any) -> None:
        name, current, plan = msg["name"], self._current, self._current.plan
        super()._process_message(msg)
        if msg["type"] != "sample" or site_is_subsample(msg) or name in current.values:
            return
        rule = self._rules.get(name)
        if rule is None:
            if is_latent(msg) and name not in self._planned and name not in self.values:
                raise ValueError(new_site(name))
        elif msg["is_observed"] or name in self.values:
            predictive = plan.inverse.predictive - plan.semi_observed
            if msg["is_observed"] and name in predictive:
                raise ValueError(observed_latent(name))
            current.know(name, msg["value"])  # a semi-observed site, observed in this call
        elif name in self._to_draw:
            msg["value"] = None
            self._drawn.add(name)
            msg["infer"], msg["mask"] = _own_infer(msg), _mask(current, rule, msg)
            fn = rule.distribution(current, msg["fn"].batch_shape, msg["fn"])
            msg["stop"] = name in current.outside.private
            msg["fn"] = current.one_for_each(fn) if msg["stop"] else current.outside.see(fn)
            msg["scale"] = current.scale(msg)

    def _postprocess_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["name"] in self._drawn and msg["value"] is not None:
            name, current = msg["name"], self._current
            seen = name not in current.outside.private
            msg["value"] = current.take(name, msg["value"], msg["fn"], seen)
        super()._postprocess_message(msg)


def _draw_detached(current: Pass) -> None:
    """Draws every latent whose rule takes no prior in sampling order, outside of the model."""
    call = current.call
    for name in current.left():
        if name in call.held:
            current.know(name, call.held[name])
    left = set(current.left())
    for name in current.plan.order:
        if name in left and not isinstance(current.rules[name], Prior):
            varies = current.family(name).varies
            prior = current.run(until=[name])[name]["fn"] if varies else None
            _draw_at(current, name, call.sites[name], prior)


def _draw_at(current: Pass, name: str, site: Message, prior: Distribution | None = None) -> None:
    """Draws a latent after the run of the model that its site is from, with the site's plates, mask and scale."""
    rule = current.rules[name]
    # at points of an expansion the site has further dims
    shape = site["fn"].batch_shape if rule.group is None else plate_shape(site)
    fn = rule.distribution(current, shape, prior)
    if name in current.outside.private:
        fn = current.one_for_each(fn)
        current.take(name, fn(), fn, seen=False)
        return
    with _At({**site, "mask": _mask(current, rule, site), "scale": current.scale(site)}):
        current.take(name, pyro.sample(name, current.outside.see(fn)), fn)


def _draw_states(current: Pass, name: str, site: Message) -> None:
    """Draws the states of a loop one after another, each at its own site; the innovations of a series at theirs."""
    held = current.plan.loops.states[name]
    fn: Any = current.rules[name].distribution(current, plate_shape(site), None)
    if name in current.plan.loops.series:
        innovations = Innovations(fn, held)
        with _At({**site, "mask": None, "scale": current.scale(site)}):
            value = pyro.sample(held.sites[0], current.outside.see(innovations))
        current.outside.values[held.sites[0]] = value
        value = current.outside.inside(value, len(innovations.event_shape))
        current.know(name, held.joined([value]), drawn=True)
        return
    in_turn, values = fn.in_sequence(), []
    around = {**site, "mask": None, "scale": current.scale(site)}
    for each, event in zip(held.sites, held.events):
        own = in_turn.next(event)
        if each in current.call.target.absent:
            values.append(own.rsample())
        else:
            with _At(around):
                value = pyro.sample(each, current.outside.see(own))
            current.outside.values[each] = value
            values.append(current.outside.inside(value, len(event)))
        in_turn.take(values[-1])
    current.know(name, held.joined(values), drawn=True)


def _mask(current: Pass, rule: Rule, site: Message) -> Tensor | None:
    """Returns the mask of a latent's density; warns if all of the latent was masked at the first call."""
    mask = rule.mask(site)
    untold = rule.is_untold and mask is not None and not torch.jit.is_tracing() and bool(mask.any())
    if untold and current.state.network.tells(f"{rule.name}, masked"):
        warn(
            f"All of '{rule.name}' was masked at the guide's first call, so that call did not show how data depend on "
            "it, and its conditional may be wrong now. Make a new guide, and call it first with data where not all of "
            "it is masked."
        )
    return mask


class _At(Messenger):
    """Gives a message the plates, scale, mask and ``infer`` of a site of the model."""

    def __init__(self, site: Message) -> None:
        super().__init__()
        self._site = site

    def _pyro_sample(self, msg: Any) -> None:
        msg["cond_indep_stack"] = self._site.get("stack", self._site["cond_indep_stack"])
        msg["scale"], msg["mask"] = self._site["scale"], self._site["mask"]
        msg["infer"] = _own_infer(self._site)


def _own_infer(site: Message) -> dict[str, Any]:
    """Returns a site's ``infer`` without the entries that enumeration adds in the model."""
    return {key: value for key, value in site["infer"].items() if key not in _OF_THE_MODEL}


def _relocation(plan: Plan) -> Relocation | None:
    """Returns how batch dims move if the guide is called inside a plate whose dim the model needs; None otherwise."""
    if not any(isinstance(handler, IndepMessenger) for handler in _PYRO_STACK):
        return None
    dims, nesting = plan.plates.dims, plan.plates.nesting
    outer: list[Any] = [
        frame.dim for frame in get_plates() if frame.vectorized and frame.name not in dims
    ]
    kept = -1 - max(outer, default=-1 - nesting)
    return Relocation(kept, nesting - kept) if kept < nesting else None


def densities(
    current: Pass,
    values: Values,
    sites: Sites,
    names: Collection[str],
) -> Iterator[Tensor]:
    """Yields terms ``(*batch, *plates)`` in nats whose sum is the log density of the latents in ``names``.

    ``sites`` are those of a run of the model at all latents' ``values``, where one was needed.
    """
    know_all(current, values, sites)
    nothing: dict[str, Any] = {"fn": None, "mask": None}
    alike: dict[tuple, list[Term]] = {}
    for name in filter(names.__contains__, values):
        site = sites.get(name) or nothing
        found = current.rules[name].log_prob(current, values[name], site)
        if isinstance(found, Tensor):
            yield found
            continue
        alike.setdefault(found.key(), []).append(found)
        if found.log_abs_det is not None:
            yield -found.log_abs_det
    yield from map(log_density_of_terms, alike.values())


def know_all(current: Pass, values: Values, sites: Sites) -> None:
    """Makes the values of all latents known to a pass. Their supports are told from the sites of a run of the model."""
    held = current.call.held
    current.values.update(values)
    for name in current.plan.order:
        if name in held:
            current.know(name, held[name])
        elif name in values and name in current.plan.loops_learned:
            current.know(name, values[name])
        elif name in values:
            current.family(name, sites[name]["fn"] if name in sites else None)
            current.know(name, values[name])
