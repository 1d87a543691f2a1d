"""Derives the conditionals of a group in a call: runs the model until the group's expansion is solved.

Results that depend on the data alone are kept for later steps on the same data.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import (
    Changed,
    Expansion,
    leading_shape,
    parameters_of,
    solved,
)
from pyro_nami.deriving.gaussian_constants import Constants, FromConstants, constants_of
from pyro_nami.deriving.joint_gaussian import JointGaussian
from pyro_nami.deriving.newton import Newton
from pyro_nami.deriving.refutation import expansion_of
from pyro_nami.guide.arguments import Arguments
from pyro_nami.guide.call import Call
from pyro_nami.guide.first_latents import first_conditionals
from pyro_nami.guide.one_pass import Pass
from pyro_nami.guide.plan import Plan
from pyro_nami.guide.warm_starts import DataSets, Starts
from pyro_nami.program.flat_priors import improper_posterior
from pyro_nami.program.isolation import forked_rng, outside_of_traces, untouched
from pyro_nami.program.many_draws import MANY_DRAWS
from pyro_nami.program.surroundings import Surroundings

__all__ = ["derive", "valid_at"]


def derive(plan: Plan, call: Call, current: Pass, group: ConjugateGroup) -> Any:
    """Returns the conditionals of a group given the latents drawn so far; the model is run for them."""
    if group.has_mode and torch.jit.is_tracing():
        return _as_constants(plan, call, current, group)
    if group.comes_first:
        return first_conditionals(plan, call, current, group)
    key, constants = _key_of_data(plan, call, current, group), call.derived.constants or {}
    kept: Any = constants.get(key)
    is_kept = kept is not None and kept.holds(call)
    if key is None or not is_kept or kept.expansion is None:
        with forked_rng():  # as draws shall not depend on what was derived before
            expansion, sites = _derived(plan, call, current, group)
            if key is not None and not is_kept:
                _keep(key, expansion, sites, plan, call, current)
        return expansion
    current.derived.sites.update(kept.sites)
    if kept.near is not None:
        current.derived.near[group] = kept.near
    return kept.expansion.apart()


class _OfData(NamedTuple):
    """The conditionals of a group that depend on the data alone.

    Attributes:
        arguments: all that they were found from.
        surroundings: what the model read besides these.
        expansion: the derived group; None if its conditionals depend on the model's parameters.
        near: the Normal about a mode that they were found from, if they were.
        sites: of the members.
    """

    arguments: Arguments
    surroundings: Surroundings | None
    expansion: Expansion | None = None
    near: Newton | None = None
    sites: Mapping[str, Any] = {}

    def holds(self, call: Call) -> bool:
        """Whether a call has the same arguments and data, in the same surroundings."""
        return self.surroundings is call.derived.surroundings and self.arguments.are(call.sources)


def _key_of_data(plan: Plan, call: Call, current: Pass, group: ConjugateGroup) -> Any:
    """Returns the key of a group whose conditionals are found once for the data of training; None for others.

    They depend on nothing that is drawn before, and the model states no parameters.
    """
    derived = call.derived
    depends = group.needed or group.bound or group.in_turn or plan.learns
    changes = call.lacking or current.derived.observed or torch.jit.is_tracing()
    is_fixed = derived.is_fixed and derived.constants is not None and derived.surroundings
    if depends or changes or not is_fixed:
        return None
    leading = leading_shape({**call.values, **current.values}, plan.event_dims, plan.plates.nesting)
    return group, leading, "of data"


def _keep(
    key: Any,
    expansion: Expansion,
    sites: Mapping[str, Any],
    plan: Plan,
    call: Call,
    current: Pass,
) -> None:
    """Keeps the conditionals of a group for later calls.

    In training they are derived once more, without gradients, when arguments come for the second time. A guide that is
    called once, or with a number that changes in each step, derives them no more often than it draws.
    """
    group, around = key[0], call.derived.surroundings
    constants: Any = call.derived.constants
    if expansion.differentiable:
        before, constants[key, "before"] = constants.get((key, "before")), Arguments(call.sources)
        is_first = before is None or not before.are(call.sources)
        if is_first or not current.state.network.passes:
            return
    others = (each for each in constants.values() if isinstance(each, _OfData))
    arguments = next((each.arguments for each in others if each.holds(call)), None)
    arguments = arguments or Arguments(call.sources, kept=True)
    if expansion.differentiable:
        densities = (expansion.density(sites, name) for name in expansion.until if name in sites)
        if parameters_of(*densities, but=expansion.values.values()):
            constants[key] = _OfData(arguments, around)
            return
        with torch.no_grad():
            expansion, sites = _derived(plan, call, current, group)
    near = current.derived.near.get(group)
    members = {name: sites[name] for name in group.members}
    near = None if near is None else near.apart()
    constants[key] = _OfData(arguments, around, expansion.apart(), near, members)


def _derived(
    plan: Plan, call: Call, current: Pass, group: ConjugateGroup
) -> tuple[Expansion, Mapping[str, Any]]:
    """Returns the conditionals of a group, and the sites of the last run of the model for them.

    The pass is told the sites of the members.
    """
    kept = call.derived.constants
    values = {name: value for name, value in current.values.items() if name not in group.members}
    known = {
        name: value.clone() if value.is_inference() else value for name, value in values.items()
    }
    solved = None
    if (from_one := _from_one(group, current, plan, call, known)) is not None:
        solved = _solved(from_one, group, current, call, known)
    while solved is None:
        expansion = _expansion_in(group, current, plan, call)
        solved = _solved(expansion, group, current, call, known)
    expansion, sites = solved
    near: Any = expansion if type(expansion) is JointGaussian else current.derived.near.get(group)
    _check_decided(expansion if isinstance(expansion, JointGaussian) else near)
    if getattr(near, "unfound", None) is not None:
        pass  # where no mode was found, no other search is to begin
    elif near is not None and kept is not None and (near.has_moved or group.has_mode):
        kept[group, expansion.leading, "at"] = {
            name: at.detach() for name, at in near.references.items()
        }
    elif near is not None and near.has_moved:
        for starts, data in _starts(group, current, plan, call):
            starts.note(data, near.references)
    current.derived.sites.update({name: sites[name] for name in expansion.group.members})
    return expansion, sites


def _solved(
    expansion: Expansion,
    group: ConjugateGroup,
    current: Pass,
    call: Call,
    known: Mapping[str, Tensor],
) -> tuple[Expansion, Mapping[str, Any]] | None:
    """Runs the model until the expansion of a group is solved.

    Returns:
        The solved expansion, and the sites of the last run. None where a run shows other sizes or observed members than
        the expansion was made for, or where constants of the group are known from now on.
    """

    def run(expansion: Expansion) -> Mapping[str, Any]:
        sites = expansion.sites(call.run, {**call.held, **known})
        if _has_observed(expansion, sites, current) or _keeps_constants(
            expansion, current, call, known
        ):
            raise Changed
        if isinstance(expansion, Newton):
            current.derived.near[group] = expansion
        return sites

    with suppress(Changed):
        return solved(expansion, run(expansion), run)
    return None


def _from_one(
    group: ConjugateGroup, current: Pass, plan: Plan, call: Call, known: Mapping[str, Tensor]
) -> FromConstants | None:
    """Returns the expansion of a Gaussian block for many draws, from constants that are derived at one of the draws.

    None for few draws, where there is no such thing, and where it is known from steps before. A call on the data of
    training keeps it.
    """
    nesting = plan.plates.nesting
    leading = leading_shape({**call.values, **current.values}, plan.event_dims, nesting)
    of_data = leading_shape(call.values, plan.event_dims, nesting)
    if (
        leading.numel() < MANY_DRAWS
        or of_data.numel() > 1
        or group.form != "Gaussian"
        or group.bound
        or group.in_turn
    ):
        return None
    if (
        call.lacking
        or current.derived.observed
        or torch.jit.is_tracing()
        or (call.derived.constants or {}).get((group, leading))
    ):
        return None
    kept: dict[Any, Any] = (
        call.derived.constants
        if call.derived.is_fixed and call.derived.constants is not None
        else {}
    )
    key = group, "one"
    if key not in kept:
        kept[key] = _constants_of_one(group, current, plan, call, known)
    if kept[key] is None:
        return None
    options: dict[str, Any] = {"forget": functools.partial(kept.pop, key, None), "is_rounded": True}
    return FromConstants(group, leading, nesting, constants=kept[key], **options)


def _constants_of_one(
    group: ConjugateGroup, current: Pass, plan: Plan, call: Call, known: Mapping[str, Tensor]
) -> Constants | None:
    """Returns the constants of a Gaussian block, derived at the first of many draws of the latents before it."""
    nesting = plan.plates.nesting
    # Of their sites' own shapes, as a model that is written for one draw takes no others.
    first = {name: plan.first_of(name, value).detach().clone() for name, value in known.items()}
    first = {name: value.requires_grad_(value.is_floating_point()) for name, value in first.items()}
    sizes = current.derived.sizes.setdefault(group, dict(zip(group.members, group.elements)))
    at = {name: plan.initial[name] for name in group.flat}

    def run(values: Mapping[str, Any], until: Collection[str]) -> dict[str, Any]:
        return call.run({**call.held, **first, **values}, until=until)

    def sites_of(expansion: Expansion) -> Mapping[str, Any]:
        sites = expansion.sites(run, {})
        if _has_observed(expansion, sites, current):
            raise Changed
        return sites

    one = group, torch.Size((1,) * nesting), nesting
    block = JointGaussian(*one, False, sizes=dict(sizes), at=at)
    with suppress(Changed), untouched(call.program.model):
        expansion, _ = solved(block, sites_of(block), sites_of)
        return constants_of(*one, dict(sizes), run, expansion.references)
    return None


def _check_decided(solved: Any) -> None:
    """Raises ValueError for a latent of a solved block that has an improper prior and no data that determine it."""
    flat = isinstance(solved, JointGaussian) and solved.group.flat
    for name in solved.undecided() if flat and not torch.jit.is_tracing() else ():
        if not solved.flat[name].is_bounded:
            raise ValueError(improper_posterior(name))


def _as_constants(plan: Plan, call: Call, current: Pass, group: ConjugateGroup) -> Any:
    """Returns the conditionals of a group as constants of a trace; the traced function raises for other data.

    A trace does not say how many steps lead to a mode, and its second derivatives cannot be traced.
    """
    names = ", ".join(map(repr, group.members))
    if group.needed:
        raise NotImplementedError(
            f"Expected a guide that a compiled objective calls first; got one that was called before, and derives "
            f"{names} about modes that depend on what is drawn before. Make the guide anew, or with "
            f"rules={dict.fromkeys(group.members, 'learned')}."
        )
    found = outside_of_traces(lambda: derive(plan, call, current, group))
    one = valid_at(plan, call, names, f"rules={dict.fromkeys(group.members, 'learned')}")
    current.derived.valid.update(dict.fromkeys(group.members, one))
    return found


def valid_at(plan: Plan, call: Call, names: str, remedy: str) -> Tensor:
    """Returns 1; the traced function raises ValueError for tensor arguments other than those of the trace."""
    message = (
        f"Expected the data that a compiled objective was compiled at, from which it has {names}; got others. "
        f"Where data change, make the guide with {remedy}."
    )
    leaves = [leaf for leaf in call.program.leaves() if isinstance(leaf, Tensor)]
    one = torch.ones((), dtype=plan.factory["dtype"], device=plan.factory["device"])
    kept = outside_of_traces(lambda: [each.clone() for each in leaves])
    for leaf, then in zip(leaves, kept):
        one = _scripted()(leaf, then, one, message)
    return one


@functools.cache
def _scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(_if_same)  # whose branch a trace keeps


def _if_same(value: Tensor, then: Tensor, result: Tensor, message: str) -> Tensor:
    """Returns the result if the value is the earlier one; raises ValueError otherwise."""
    if value.shape != then.shape or not bool(
        ((value == then) | ((value != value) & (then != then))).all()
    ):
        raise ValueError(message)
    return result


def _expansion_in(group: ConjugateGroup, current: Pass, plan: Plan, call: Call) -> Expansion:
    """Returns the expansion of a group at the values drawn so far; a run of the model has to solve it."""
    nesting = plan.plates.nesting
    leading = leading_shape({**call.values, **current.values}, plan.event_dims, nesting)
    observed = current.derived.observed.intersection(group.members)
    group = group.without(call.lacking, current.derived.observed)
    options: dict[str, Any] = {}
    if group.depths:
        options["sizes"] = current.derived.sizes.setdefault(
            group, dict(zip(group.members, group.elements))
        )
    differentiable = torch.is_grad_enabled() and current.state.network.learns()
    kept = (call.derived.constants if differentiable and not torch.jit.is_tracing() else None) or {}
    constants = kept.get((group, leading))
    if constants is not None:
        forget = functools.partial(kept.__setitem__, (group, leading), None)
        return FromConstants(group, leading, nesting, constants=constants, forget=forget)
    if group.has_mode or group.form == "Gaussian":
        wider = [
            each
            for each in current.derived.near.values()
            if set(group.members) <= set(each.group.members)
        ]
        at = (
            wider[-1].means(current.values, group.members)
            if wider
            else kept.get((group, leading, "at"))
        )
        if not at and (group.has_mode or group in call.derived.starts):
            for starts, data in _starts(group, current, plan, call):
                at = starts.find(data, at or {})
        # where to start
        options["at"] = {**{name: plan.initial[name] for name in group.flat}, **(at or {})}
    if group.in_turn:
        rules: Any = plan.rules
        options |= {
            "orders": {name: rules[name].order for name in group.members},
            "observed": observed,
        }
    expansion = expansion_of(group)(group, leading, nesting, differentiable, **options)
    for child in group.children if group.bound == "bounded" else ():
        if child in plan.bounds:
            expansion.xi[child] = softplus(
                current.state.params(plan.bounds[child].name).squeeze(-1)
            )
    return expansion


def _starts(
    group: ConjugateGroup, current: Pass, plan: Plan, call: Call
) -> Iterator[tuple[Starts, DataSets]]:
    """Yields the warm starts for a group's mode search, and the data sets by which they are stored.

    First those stored for the data sets alone. Then, if there is one draw for each data set, those stored for the data
    sets and the values drawn so far."""
    data = DataSets.of(call.values, plan.event_dims, plan.plates.nesting)
    if data is None:
        return
    yield call.derived.starts.setdefault(group, Starts()), data
    before = {name: current.values[name] for name in group.needed if name in current.values}
    whole = (
        DataSets.of({**call.values, **before}, plan.event_dims, plan.plates.nesting)
        if before
        else None
    )
    if whole is not None and len(whole.keys) == len(data.keys):
        yield call.derived.starts.setdefault((group, "needed"), Starts(is_renewed=True)), whole


def _keeps_constants(
    expansion: Any, current: Pass, call: Call, values: Mapping[str, Tensor]
) -> bool:
    """Stores constants of a Gaussian block for later steps on the same data; returns whether there are new ones."""
    kept, key = call.derived.constants, (expansion.group, expansion.leading)
    if kept is None or key in kept or not current.state.network.passes:
        return False  # many guides are called once
    if not expansion.differentiable or torch.jit.is_tracing():
        return False
    if type(expansion) is not JointGaussian or expansion.xi:  # bounds change from step to step
        return False
    known, sizes = {**call.held, **values}, expansion.sizes
    with untouched(call.program.model):
        kept[key] = constants_of(
            *key, expansion.nesting, sizes, lambda at, until: call.run({**known, **at}, until=until)
        )
    return kept[key] is not None


def _has_observed(expansion: Expansion, sites: Mapping[str, Any], current: Pass) -> bool:
    """Makes members that a run observes known to the pass; returns whether there are some."""
    observed = [
        name for name in expansion.group.members if name in sites and sites[name]["is_observed"]
    ]
    current.derived.observed.update(observed)
    for name in observed:
        if name not in current.values:
            current.know(name, sites[name]["value"])
    return bool(observed)
