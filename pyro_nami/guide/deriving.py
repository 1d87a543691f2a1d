"""Deriving the conditionals of latents in a call: by runs of the model, each at points that are found by the last.

What steps with the same data need not find again is kept. Change this module when more is to be kept.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_nami.guide.arguments import Arguments
from pyro_nami.guide.call import Call
from pyro_nami.guide.one_pass import Pass
from pyro_nami.guide.plan import Plan
from pyro_nami.reading.expansion import (
    Changed,
    ConjugateGroup,
    Expansion,
    broadcast,
    expanding,
    leading_shape,
    log_density_of,
    plate_shape,
)
from pyro_nami.reading.gaussian_constants import FromConstants, constants_of
from pyro_nami.reading.isolation import forked_rng, untouched
from pyro_nami.reading.joint_gaussian import JointGaussian
from pyro_nami.reading.marginal import Marginal, points_of
from pyro_nami.reading.newton import Newton
from pyro_nami.reading.refutation import expansion_of, parameters_of

__all__ = ["check_members", "derive", "expansion_in", "flaw_of_tables", "keep_constants"]

_DRAWS, _SPREADS, _LEAST_SPREAD = 256, 2.0, 1e-6  # of a prior, for the first grid
_MOST_AT_ONCE = 2e6  # points times rows of data in one run of the model
_MOST_TABLE = 4e6  # points times rows of data
_CHECKED, _MOST_SPREAD = 64, 0.03  # draws of a table, and by how many nats they may be off
_PASSES, _MOST_KEPT = 2, 16  # passes in training before constants are kept; blocks, and shapes of batches, with some


def derive(plan: Plan, call: Call, current: Pass, group: ConjugateGroup) -> Expansion:
    """Returns the exact conditionals of a group at what is drawn before it, by runs of the model of their own."""
    if group.form == "marginal":
        return _marginal(plan, call, current, group)
    source, kept = call.source(group), call.source(group).constants
    values = {name: value for name, value in current.values.items() if name not in group.members}
    known = {name: value.clone() if value.is_inference() else value for name, value in values.items()}
    while True:
        with suppress(Changed):
            following: Expansion | None = expansion_in(group, current, plan, call)
            while following is not None:
                expansion = following
                with expanding():
                    sites = source.run({**source.held, **known, **expansion.points}, until=expansion.until)
                check_members(expansion, sites, current)
                if source is call:
                    keep_constants(expansion, current, call, known)
                following = expansion.solve(sites)
                if isinstance(expansion, Newton):
                    current.near[group] = expansion
            break
    if group in current.near and kept is not None:
        kept[group, expansion.leading] = {name: at.detach() for name, at in current.near[group].references.items()}
    if source is call:
        current.ready.update({name: sites[name] for name in expansion.group.members})
    return expansion


def _marginal(plan: Plan, call: Call, current: Pass, group: ConjugateGroup) -> Any:
    """Returns the conditionals of what comes first, found anew where a call's data or arguments are others."""
    source = call.source(group)
    leaves = tree_leaves([source.args, source.kwargs, source.values, source.held])
    known, found = call.tables.get(group, (None, None))
    if known is None or not known.are(leaves):
        known, found = Arguments(leaves, kept=True), _tabulated(plan, source, current, group, found)
        call.tables[group] = known, found
    return found


def _tabulated(
    plan: Plan, call: Call, current: Pass, group: ConjugateGroup, near: Marginal | None = None
) -> Marginal:
    """Returns the conditionals of what comes first, from runs of the model at points of a grid."""
    leading = leading_shape(call.values, plan.event_dims, plan.plates.nesting)
    layouts = {name: plan.families[name].layout for name in group.members}
    with torch.no_grad(), pyro.validation_enabled(False), forked_rng():
        pyro.set_rng_seed(0)
        sites = call.run(call.held, until=group.members)
        middle, half = [], []
        for name in group.members:  # the spread of the prior
            draws = layouts[name].elements(sites[name]["fn"].sample((_DRAWS,))).flatten().double()
            low, center, high = draws.quantile(draws.new_tensor([0.16, 0.5, 0.84]))
            middle.append(center.expand(leading))
            half.append(_SPREADS * (high - low).clamp(min=_LEAST_SPREAD).expand(leading))
        log_density = functools.partial(_log_density, plan, call, current, leading)
        return Marginal(group, layouts, plan.initial[group.members[0]], middle, half, log_density, near)


def flaw_of_tables(plan: Plan, call: Call, current: Pass) -> str:
    """Returns what speaks against the latents that come first being found by quadrature; empty if nothing does.

    Draws by it have to have the log density that it says, all others drawn given them, up to a constant.
    """
    group = next((group for group in plan.groups.values() if group.form == "marginal"), None)
    if group is None:
        return ""
    rows = max((value.numel() for value in call.values.values()), default=1)
    if points_of(group) * rows > _MOST_TABLE:
        return "a grid for all rows of data is too large"
    leading = leading_shape(call.values, plan.event_dims, plan.plates.nesting)
    try:
        table, values = _tabulated(plan, call, current, group), dict[str, Tensor]()
        given = torch.zeros(())
        with torch.no_grad(), pyro.validation_enabled(False), forked_rng():
            pyro.set_rng_seed(1)
            for name in group.members:
                fn = table.conditional(name, values).expand((_CHECKED, *leading))
                values[name] = fn.sample()
                given = given + fn.log_prob(values[name]).double()
            off = _log_density(plan, call, current, leading, values) - given
        with torch.enable_grad():
            sites = call.run({**call.held, **{name: value[:1] for name, value in values.items()}})
            densities = [log_density_of(sites[name]) for name in (*plan.order, *plan.read) if name in sites]
        if parameters_of(*densities):
            return "the model has parameters, which are still to be learned"
        spread = float(off.std(0).max())
        return "" if spread < _MOST_SPREAD else f"by quadrature it would be off by {spread:.2g} nats"
    except Exception as error:  # noqa: BLE001  whatever a model does at values far out
        return f"quadrature fails with {type(error).__name__}: {error}"


def _log_density(
    plan: Plan, call: Call, current: Pass, leading: torch.Size, at: Mapping[str, Tensor]
) -> Tensor:
    """Returns the log density in nats of latents and data, ``(points, *batch, 1...)``, all others integrated out."""
    rows = max((value.numel() for value in call.values.values()), default=1)
    count = max(1, int(_MOST_AT_ONCE / rows))
    names = list(at)
    parts = [dict(zip(names, each)) for each in zip(*(value.split(count) for value in at.values()))]
    return torch.cat([_log_weight(plan, call, current, leading, part) for part in parts])


def _log_weight(plan: Plan, call: Call, current: Pass, leading: torch.Size, at: Mapping[str, Tensor]) -> Tensor:
    inner = current.beside(plan.rules, functools.partial(derive, plan, call), at)
    nesting, total = plan.plates.nesting, torch.zeros((), dtype=torch.float64)
    total = total.to(next(iter(at.values())).device)
    passed = {*at, *call.lacking, *call.unseen, *call.held}
    for name in (name for name in plan.order if name not in passed):
        fn = inner.rules[name].distribution(inner, torch.Size(), None)
        fn = fn.expand(broadcast(fn.batch_shape, plate_shape(inner.ready[name])))
        value = inner.values[name] = fn.rsample() if fn.has_rsample else fn.sample()
        total = total - _summed(fn.log_prob(value), nesting)
    sites = call.run({**call.held, **inner.values})
    for name, site in sites.items():
        if name in inner.values or name in plan.bayesnet.observed:
            total = total + _summed(log_density_of(site), nesting)
    return total.expand((len(next(iter(at.values()))), *leading[: len(leading) - nesting])).reshape((-1, *leading))


def _summed(log_prob: Tensor, nesting: int) -> Tensor:
    """Returns log densities summed over plates, in doubles, as ``(*batch)``."""
    dims = tuple(range(-min(nesting, log_prob.dim()), 0))
    return log_prob.double().sum(dims) if dims else log_prob.double()


def expansion_in(group: ConjugateGroup, current: Pass, plan: Plan, call: Call, draws: bool = False) -> Expansion:
    """Returns the expansion of a group at values of what is before it; it needs a run of the model.

    ``draws`` says that some of these are drawn in that run.
    """
    nesting = plan.plates.nesting
    leading = leading_shape({**call.values, **current.values}, plan.event_dims, nesting)
    if draws:  # what is drawn on the way will have the batch dims of plates outside
        leading = broadcast(leading, current.outer + (1,) * nesting)
    lacking = call.source(group).lacking
    group = group.without(lacking, current.observed) if lacking or current.observed else group
    options: dict[str, Any] = {}
    if group.depths:
        options["sizes"] = current.sizes.setdefault(group, dict(zip(group.members, group.elements)))
    differentiable = torch.is_grad_enabled() and current.state.learns()
    kept = (call.source(group).constants if differentiable and not torch.jit.is_tracing() else None) or {}
    constants = kept.get((group, leading))
    if group.has_mode:
        wider = [each for each in current.near.values() if set(group.members) <= set(each.group.members)]
        options["at"] = wider[-1].means(current.values, group.members) if wider else constants  # where to start
    elif constants is not None:
        forget = functools.partial(kept.__setitem__, (group, leading), None)
        return FromConstants(group, leading, nesting, constants=constants, forget=forget)
    return expansion_of(group)(group, leading, nesting, differentiable, **options)


def keep_constants(expansion: Expansion, current: Pass, call: Call, values: Mapping[str, Tensor]) -> None:
    """Keeps, in training, what steps with the same data need not derive again, and raises `Changed`; tries once."""
    kept, key = call.constants, (expansion.group, expansion.leading)
    if kept is None or key in kept or len(kept) >= _MOST_KEPT or current.state.passes() < _PASSES:
        return
    if not expansion.differentiable or torch.jit.is_tracing() or type(expansion) is not JointGaussian:
        return
    sizes = expansion.sizes  # what was drawn shows by its gradients what depends on it
    drawn = {name: v.detach().requires_grad_(v.is_floating_point()) for name, v in values.items()}
    known = {**call.held, **drawn}
    with untouched(call.model):
        kept[key] = constants_of(
            *key, expansion.nesting, sizes, lambda at, until: call.run({**known, **at}, until=until)
        )
    if kept[key] is not None:
        raise Changed


def check_members(expansion: Expansion, sites: Mapping[str, Any], current: Pass) -> None:
    """Raises `Changed` where members turn out to be observed in a run."""
    observed = [name for name in expansion.group.members if name in sites and sites[name]["is_observed"]]
    if observed:
        current.observed.update(observed)
        raise Changed
