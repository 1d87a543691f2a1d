"""Drawing the latents of one call, and their density.

Where sampling order is program order, latents are drawn inside a run of the model (`_draw_along`): plates, masks and
scales are the model's own, and every latent's prior, at the parents just drawn, is at hand. Otherwise they are drawn
outside of it first (`_draw_detached`), and a run of the model follows only where some of them are drawn from the
model's own conditional. Change this module to draw otherwise along a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyro
import torch
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK, get_plates
from pyro.poutine.util import is_validation_enabled, site_is_subsample
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.factors.distribution import Relocation
from pyro_nami.guide.call import Call
from pyro_nami.guide.network_state import NetworkState
from pyro_nami.guide.one_pass import Pass
from pyro_nami.guide.plan import Plan, missing_site, new_site
from pyro_nami.guide.rules import Prior
from pyro_nami.reading.first_run import is_latent
from pyro_nami.reading.joint_gaussian import ConjugateGroup, JointGaussian, expanding, leading_shape
from pyro_nami.reading.runner import AllSeen, Runner

__all__ = ["densities", "draw", "know_all", "start_pass"]

_OF_THE_MODEL = frozenset({"enumerate", "_markov_scope", "_markov_depth"})


def start_pass(plan: Plan, state: NetworkState, call: Call) -> Pass:
    """Returns a pass over the latents of a call, of which nothing is known yet.

    Latents of plate rows that the call has no data for, and those that the first call did not have, are drawn from the
    model's own conditional.
    """
    rules = {name: rule for name, rule in plan.rules.items() if name not in call.lacking}
    rules |= {name: Prior(name) for name in (*(rules.keys() & call.unseen), *call.new)}
    validate = is_validation_enabled() and not torch.jit.is_tracing()

    def derive(group: ConjugateGroup, values: Mapping[str, Tensor]) -> JointGaussian:
        elimination = _elimination(group, values, plan, call)
        source = call.source(group)
        with expanding():
            known = {name: value.clone() if value.is_inference() else value for name, value in values.items()}
            sites = source.run({**source.held, **known, **elimination.points}, until=elimination.until)
        elimination.solve(sites)
        if source is call:
            current.ready.update({name: sites[name] for name in elimination.members})
        return elimination

    current = Pass(rules, plan.families, state, derive, _relocation(plan), validate)
    return current


def _elimination(group: ConjugateGroup, values: Mapping[str, Tensor], plan: Plan, call: Call) -> JointGaussian:
    """Returns the elimination of a group at values of what is before it; it needs a run of the model."""
    leading = leading_shape({**call.values, **values}, plan.event_dims, plan.plates.nesting)
    if call.lacking:
        group = ConjugateGroup(*(tuple(name for name in names if name not in call.lacking) for names in group))
    return JointGaussian(group, leading, torch.is_grad_enabled())


def draw(current: Pass, plan: Plan, call: Call) -> None:
    """Draws every latent of a call, at sites that the handlers outside see."""
    if not plan.interleaved:
        _draw_detached(current, plan, call)
    if plan.interleaved or current.left():
        _draw_along(current, plan, call)


def _draw_along(current: Pass, plan: Plan, call: Call) -> None:
    """Draws all latents that are left in runs of the model.

    A run ends where an exact conditional has to be derived first, and the next one draws on from there.
    """
    while (run := _DrawingRun(current, plan, call)).gives_up():
        run.finish()
        left = current.left()
        if current.ready.keys() >= set(left):  # which needs no further run of the model
            for name in left:
                _draw_at(current, name, current.ready[name])
            return
    missing = run.missing.intersection(current.rules)
    if missing:
        raise ValueError(missing_site(min(missing)))


class _DrawingRun(Runner):
    """Runs the model with its latents drawn by the guide, on behalf of the handlers outside.

    It gives up at a latent whose exact conditionals have to be derived first. That takes the rest of a run of the
    model, with gradients: of this one, or if this has none of a further one, behind it, as a model that is a handler's
    cannot run inside its own run.
    """

    def __init__(self, current: Pass, plan: Plan, call: Call) -> None:
        values = {**call.held, **current.values}
        super().__init__(values, call.indices, until=current.left(), choose=self._point)
        self._current, self._plan, self._call = current, plan, call
        self._drawn: set[str] = set()
        self._group: ConjugateGroup | None = None  # the one that it gave up for
        self._elimination: JointGaussian | None = None
        self._gradients = torch.is_grad_enabled()

    def gives_up(self) -> bool:
        """Runs the model; whether conditionals have to be derived before it can draw on."""
        self.run(self._call.model, self._call.args, self._call.kwargs)
        return self._group is not None

    def finish(self) -> None:
        """Derives what the run gave up for."""
        assert self._group is not None
        if self._elimination is not None:
            self._elimination.solve(self.sites)
            self._current.solved[self._group] = self._elimination
            self._current.ready.update({name: self.sites[name] for name in self._elimination.members})
        self._current.derive(self._group)

    def _point(self, msg: Any) -> Tensor | None:
        """Returns the value that a latent has where its log density is expanded."""
        points = self._elimination.points if self._elimination is not None else {}
        return points[msg["name"]](msg["fn"]) if msg["name"] in points else None

    def _process_message(self, msg: Any) -> None:
        name, current = msg["name"], self._current
        ours = msg["type"] == "sample" and not site_is_subsample(msg) and name not in current.values
        ours = ours and self._group is None
        rule = current.rules.get(name)
        known = msg["is_observed"] or name in self.values
        group = None if rule is None or known else rule.group
        if ours and group is not None and group not in current.solved:
            self._expand(group)
            ours = False
        super()._process_message(msg)
        if not ours:
            return
        if rule is None:
            if name not in self._plan.names and is_latent(msg):
                raise ValueError(new_site(name))
        elif known:
            current.know(name, msg["value"])  # a semi-observed site, observed in this call
        else:
            msg["stop"] = False
            self._drawn.add(name)
            msg["infer"] = _own_infer(msg)
            msg["fn"] = current.outside(rule.distribution(current, msg["fn"].batch_shape, msg["fn"]))

    def _expand(self, group: ConjugateGroup) -> None:
        """Goes on for the exact conditionals of a group, out of sight, or ends the run."""
        self._group = group
        passed = not self._current.values.keys().isdisjoint(group.members)
        if passed or self._call.source(group) is not self._call or not (self._gradients and torch.is_grad_enabled()):
            raise AllSeen
        self._elimination = _elimination(group, self._current.values, self._plan, self._call)
        self.missing = set(self._elimination.until)

    def _postprocess_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["name"] in self._drawn and msg["value"] is not None:
            msg["value"] = self._current.take(msg["name"], msg["value"], msg["fn"])
        super()._postprocess_message(msg)


def _draw_detached(current: Pass, plan: Plan, call: Call) -> None:
    """Draws every latent whose rule takes no prior in sampling order, outside of the model."""
    for name in current.left():
        if name in call.held:
            current.know(name, call.held[name])
    for name in plan.order:
        if name in current.rules and name not in current.values and not current.rules[name].inside:
            prior = None
            if current.family(name).varies:
                prior = call.run({**call.held, **current.values}, until=[name])[name]["fn"]
            _draw_at(current, name, call.sites[name], prior)


def _draw_at(current: Pass, name: str, site: Mapping[str, Any], prior: Distribution | None = None) -> None:
    """Draws a latent at its site of a run of the model that is over: in the site's plates, at its mask and scale."""
    fn = current.rules[name].distribution(current, site["fn"].batch_shape, prior)
    with _At(site):
        current.take(name, pyro.sample(name, current.outside(fn)), fn)


class _At(Messenger):
    """Gives a message what handlers inside the model gave a site's."""

    def __init__(self, site: Mapping[str, Any]) -> None:
        super().__init__()
        self._site = site

    def _pyro_sample(self, msg: Any) -> None:
        msg["cond_indep_stack"] = self._site["cond_indep_stack"]
        msg["scale"], msg["mask"] = self._site["scale"], self._site["mask"]
        msg["infer"] = _own_infer(self._site)


def _own_infer(site: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a site's ``infer`` says to the guide: not what enumeration makes of it in the model."""
    return {key: value for key, value in site["infer"].items() if key not in _OF_THE_MODEL}


def _relocation(plan: Plan) -> Relocation | None:
    """Returns what lies where if the guide is called inside a plate whose dim the model needs for itself."""
    if not any(isinstance(handler, IndepMessenger) for handler in _PYRO_STACK):
        return None
    dims, nesting = plan.plates.dims, plan.plates.nesting
    outer: list[Any] = [frame.dim for frame in get_plates() if frame.vectorized and frame.name not in dims]
    kept = -1 - max(outer, default=-1 - nesting)
    return Relocation(kept, nesting - kept) if kept < nesting else None


def densities(
    current: Pass, plan: Plan, call: Call, values: Mapping[str, Tensor], sites: Mapping[str, Any]
) -> Iterator[Tensor]:
    """Yields log densities ``(*batch, *plates)`` in nats that add up to that of all latents, in one dense pass.

    ``sites`` are those of a run of the model at the latents' ``values``, where one was needed.
    """
    know_all(current, plan, call, values, sites)
    nothing: dict[str, Any] = {"fn": None, "mask": None}
    for name, value in values.items():
        log_prob = current.rules[name].log_prob(current, value, sites.get(name) or nothing)
        if log_prob is not None:
            yield log_prob
    yield from current.together()


def know_all(
    current: Pass, plan: Plan, call: Call, values: Mapping[str, Tensor], sites: Mapping[str, Any]
) -> None:
    """Makes the values of all latents known to a pass, with what sites of a run of the model say of their supports."""
    current.values.update(values)
    for name in plan.order:
        if name in call.held:
            current.know(name, call.held[name])
        elif name in values:
            current.family(name, sites[name]["fn"] if name in sites else None)
            current.know(name, values[name])
