"""Derives the conditionals of a group in a call: runs the model until the group's expansion is solved.

Results that depend on the data alone are kept for later steps on the same data.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import Changed, Expansion, parameters_of, solved
from pyro_nami.deriving.gaussian_constants import Constants, FromConstants, constants_of
from pyro_nami.deriving.joint_gaussian import JointGaussian
from pyro_nami.deriving.loop_states import LoopStates
from pyro_nami.deriving.newton import Newton
from pyro_nami.deriving.refutation import expansion_of
from pyro_nami.guide.arguments import Arguments
from pyro_nami.guide.call import Call, Kept
from pyro_nami.guide.first_latents import first_conditionals
from pyro_nami.guide.one_pass import Pass
from pyro_nami.guide.plan import Plan
from pyro_nami.guide.warm_starts import DataSets, Starts
from pyro_nami.messages import quoted
from pyro_nami.program.flat_priors import improper_posterior
from pyro_nami.program.isolation import forked_rng, outside_of_traces, untouched
from pyro_nami.program.many_draws import MANY_DRAWS
from pyro_nami.program.runner import Sites, Values

__all__ = ["derive", "valid_at"]


def derive(current: Pass, group: ConjugateGroup) -> Any:
    """Returns the conditionals of a group given the latents drawn so far; the model is run for them."""
    if group.has_mode and torch.jit.is_tracing():
        return _as_constants(current, group)
    if group.comes_first:
        return first_conditionals(current, group)
    return _Derivation(current, group).conditionals()


class _Derivation:
    """How the conditionals of one group are derived in a pass; what is kept is shared by all calls on the same data."""

    def __init__(self, current: Pass, group: ConjugateGroup) -> None:
        self.current, self.group = current, group
        self.plan: Plan = current.plan
        self.call: Call = current.call
        self.kept = self.call.derived.constants

    def conditionals(self) -> Expansion:
        """Returns the conditionals: those kept for the data, if there are some and they depend on nothing else."""
        derived, key = self.current.derived, self._key_of_data()
        kept: Kept | None = (self.kept or {}).get(key)
        is_kept = kept is not None and kept.holds(self.call)
        if kept is None or not is_kept or kept.conditionals is None:
            with forked_rng():  # as draws shall not depend on what was derived before
                expansion, sites = self._solved()
                if key is not None and not is_kept:
                    self._keep(key, expansion, sites)
            return expansion
        derived.sites.update(kept.sites)
        if kept.near is not None:
            derived.near[self.group] = kept.near
        expansion = kept.conditionals.apart()
        return expansion

    @property
    def _is_other(self) -> bool:
        """Whether this pass may have other members than planned, or is to serve other calls, in which it is traced."""
        tracing = torch.jit.is_tracing()
        return bool(self.call.lacking or self.current.derived.observed or tracing)

    def _key_of_data(self) -> Any:
        """Returns the key of a group whose conditionals are found once for the data of training; None for others.

        They depend on nothing that is drawn before, and the model states no parameters.
        """
        group, derived = self.group, self.call.derived
        depends = group.needed or group.bound or group.in_turn or self.plan.learns
        is_fixed = derived.is_fixed and self.kept is not None and derived.surroundings
        if depends or self._is_other or not is_fixed:
            return None
        return group, self.current.leading, "of data"

    def _keep(self, key: Any, expansion: Expansion, sites: Sites) -> None:
        """Keeps the conditionals of a group for later calls.

        In training they are derived once more, without gradients, when arguments come for the second time. A guide that
        is called once, or with a number that changes in each step, derives them no more often than it draws.
        """
        derived, sources, kept = self.current.derived, self.call.sources, self.kept
        assert kept is not None
        if expansion.differentiable:
            before, kept[key, "before"] = kept.get((key, "before")), Arguments(sources)
            is_first = before is None or not before.are(sources)
            if is_first or not self.current.state.network.passes:
                return
        others = (each for each in kept.values() if isinstance(each, Kept))
        arguments = next((each.arguments for each in others if each.holds(self.call)), None)
        arguments = arguments or Arguments(sources, kept=True)
        found = Kept(arguments, surroundings=self.call.derived.surroundings)
        if expansion.differentiable:
            names = [name for name in expansion.until if name in sites]
            densities = (expansion.density(sites, name) for name in names)
            if parameters_of(*densities, but=expansion.values.values()):
                kept[key] = found
                return
            with torch.no_grad():
                expansion, sites = self._solved()
        near = derived.near.get(self.group)
        kept[key] = found._replace(
            conditionals=expansion.apart(),
            near=None if near is None else near.apart(),
            sites={name: sites[name] for name in self.group.members},
        )

    def _solved(self) -> tuple[Expansion, Sites]:
        """Returns the conditionals of a group, and the sites of the last run of the model for them.

        The pass is told the sites of the members.
        """
        group, derived, kept = self.group, self.current.derived, self.kept
        known = {
            name: value.clone() if value.is_inference() else value
            for name, value in self.current.values.items()
            if name not in group.members
        }
        from_one = self._from_one(known)
        solved = None if from_one is None else self._run(from_one, known)
        while solved is None:
            solved = self._run(self._expansion(), known)
        expansion, sites = solved
        near: Any = expansion if type(expansion) is JointGaussian else derived.near.get(group)
        _check_decided(expansion if isinstance(expansion, JointGaussian) else near)
        if getattr(near, "unfound", None) is not None:
            pass  # where no mode was found, no other search is to begin
        elif near is not None and kept is not None and (near.has_moved or group.has_mode):
            kept[group, expansion.leading, "at"] = {
                name: at.detach() for name, at in near.references.items()
            }
        elif near is not None and near.has_moved:
            for starts, data in self._starts():
                starts.note(data, near.references)
        if isinstance(expansion, LoopStates) and not expansion.unfound:
            self.call.derived.starts[group.members, "states"] = expansion.begin_next()
        derived.sites.update({name: sites[name] for name in expansion.group.members})
        return expansion, sites

    def _run(self, expansion: Expansion, known: Values) -> tuple[Expansion, Sites] | None:
        """Runs the model until an expansion of the group is solved.

        Returns:
            The solved expansion, and the sites of the last run. None where a run shows other sizes or observed members
            than the expansion was made for, or where constants of the group are known from now on.
        """
        held = {**self.call.held, **known}

        def run(expansion: Expansion) -> Sites:
            sites = self._sites(expansion, self.call.run, held)
            if self._keeps_constants(expansion, held):
                raise Changed
            if isinstance(expansion, Newton):
                self.current.derived.near[self.group] = expansion
            return sites

        with suppress(Changed):
            return solved(expansion, run(expansion), run)
        return None

    def _sites(self, expansion: Expansion, run: Any, held: Mapping[str, Any]) -> Sites:
        """Returns the sites of a run; raises `Changed` if it observes members, which are known to the pass then."""
        sites = expansion.sites(run, held)
        members = [name for name in expansion.group.members if name in sites]
        observed = [name for name in members if sites[name]["is_observed"]]
        self.current.derived.observed.update(observed)
        for name in observed:
            if name not in self.current.values:
                self.current.know(name, sites[name]["value"])
        if observed:
            raise Changed
        return sites

    def _from_one(self, known: Values) -> FromConstants | None:
        """Returns the expansion of a Gaussian block for many draws, from constants derived at one of the draws.

        None for few draws, where there is no such thing, and where it is known from steps before. A call on the data of
        training keeps it.
        """
        group, leading = self.group, self.current.leading
        all_kept = {} if self.kept is None else self.kept
        is_plain = group.form == "Gaussian" and not group.bound and not group.in_turn
        is_one_data_set = self.plan.leading(self.call.values).numel() == 1
        if leading.numel() < MANY_DRAWS or not is_plain or not is_one_data_set:
            return None
        if self._is_other or all_kept.get((group, leading)):
            return None
        kept = all_kept if self.call.derived.is_fixed else {}
        key = group, "one"
        if key not in kept:
            kept[key] = self._constants_of_one(known)
        if kept[key] is None:
            return None
        forget = functools.partial(kept.pop, key, None)
        one = group, leading, self.plan.plates.nesting
        return FromConstants(*one, constants=kept[key], forget=forget, is_rounded=True)

    def _constants_of_one(self, known: Values) -> Constants | None:
        """Returns the constants of a Gaussian block, derived at the first of many draws of the latents before it."""
        plan, call, group = self.plan, self.call, self.group
        nesting = plan.plates.nesting
        # Of their sites' own shapes, as a model that is written for one draw takes no others.
        first = {name: plan.first_of(name, value).detach() for name, value in known.items()}
        first = {
            name: value.clone().requires_grad_(value.is_floating_point())
            for name, value in first.items()
        }
        sizes = self._sizes(group)
        at = {name: plan.initial[name] for name in group.flat}

        def run(values: Mapping[str, Any], until: Collection[str]) -> Sites:
            return call.run({**call.held, **first, **values}, until=until)

        def sites_of(expansion: Expansion) -> Sites:
            return self._sites(expansion, run, {})

        one = group, torch.Size((1,) * nesting), nesting
        block = JointGaussian(*one, False, sizes=dict(sizes), at=at)
        with suppress(Changed), untouched(call.program.model):
            expansion, _ = solved(block, sites_of(block), sites_of)
            return constants_of(*one, dict(sizes), run, expansion.references)
        return None

    def _sizes(self, group: ConjugateGroup) -> dict[str, int]:
        """Returns the number of elements of each member; a run may show others than planned, which are kept here."""
        sizes = dict(zip(group.members, group.elements))
        return self.current.derived.sizes.setdefault(group, sizes)

    def _expansion(self) -> Expansion:
        """Returns the expansion of a group at the values drawn so far; a run of the model has to solve it."""
        plan, call, derived, values = (
            self.plan,
            self.call,
            self.current.derived,
            self.current.values,
        )
        nesting, leading = plan.plates.nesting, self.current.leading
        observed = derived.observed.intersection(self.group.members)
        group = self.group.without(call.lacking, derived.observed)
        options: dict[str, Any] = {"sizes": self._sizes(group)} if group.depths else {}
        differentiable = torch.is_grad_enabled() and self.current.state.network.learns()
        kept = (self.kept if differentiable and not torch.jit.is_tracing() else None) or {}
        constants = kept.get((group, leading))
        if constants is not None:
            forget = functools.partial(kept.__setitem__, (group, leading), None)
            return FromConstants(group, leading, nesting, constants=constants, forget=forget)
        if group.is_loop:
            if begin := call.derived.starts.get((group.members, "states")):
                options["at"] = begin
        elif group.has_mode or group.form == "Gaussian":
            # where to start
            members = set(group.members)
            near = [each for each in derived.near.values() if members <= set(each.group.members)]
            at: Values = kept.get((group, leading, "at"), {})
            if near:
                at = near[-1].means(values, group.members)
            if not at and (group.has_mode or group in call.derived.starts):
                for starts, data in self._starts():
                    at = starts.find(data, at)
            options["at"] = {**{name: plan.initial[name] for name in group.flat}, **at}
        if group.in_turn:
            rules: Any = plan.rules
            orders = {name: rules[name].order for name in group.members}
            options |= {"orders": orders, "observed": observed}
        expansion = expansion_of(group)(group, leading, nesting, differentiable, **options)
        for child in group.children if group.bound == "bounded" else ():
            if child in plan.bounds:
                params = self.current.state.params(plan.bounds[child].name)
                expansion.xi[child] = softplus(params.squeeze(-1))
        return expansion

    def _starts(self) -> Iterator[tuple[Starts, DataSets]]:
        """Yields the warm starts for a group's mode search, and the data sets by which they are stored.

        First those stored for the data sets alone. Then, if there is one draw for each data set, those stored for the
        data sets and the values drawn so far."""
        values, starts, group = self.call.values, self.call.derived.starts, self.group
        kind = self.plan.event_dims, self.plan.plates.nesting
        data = DataSets.of(values, *kind)
        if data is None:
            return
        yield starts.setdefault(group, Starts()), data
        drawn = self.current.values
        before = {name: drawn[name] for name in group.needed if name in drawn}
        whole = DataSets.of({**values, **before}, *kind) if before else None
        if whole is not None and len(whole.keys) == len(data.keys):
            yield starts.setdefault((group, "needed"), Starts(is_renewed=True)), whole

    def _keeps_constants(self, expansion: Any, known: Values) -> bool:
        """Stores constants of a Gaussian block for later steps on the same data; returns whether there are new ones."""
        kept, key, call = self.kept, (expansion.group, expansion.leading), self.call
        if kept is None or key in kept or not self.current.state.network.passes:
            return False  # many guides are called once
        if not expansion.differentiable or torch.jit.is_tracing():
            return False
        if type(expansion) is not JointGaussian or expansion.xi:  # bounds change from step to step
            return False

        def run(at: Mapping[str, Any], until: Collection[str]) -> Sites:
            return call.run({**known, **at}, until=until)

        with untouched(call.program.model):
            kept[key] = constants_of(*key, expansion.nesting, expansion.sizes, run)
        return kept[key] is not None


def _check_decided(solved: Any) -> None:
    """Raises ValueError for a latent of a solved block that has an improper prior and no data that determine it."""
    flat = isinstance(solved, JointGaussian) and solved.group.flat
    for name in solved.undecided() if flat and not torch.jit.is_tracing() else ():
        if not solved.flat[name].is_bounded:
            raise ValueError(improper_posterior(name))


def _as_constants(current: Pass, group: ConjugateGroup) -> Any:
    """Returns the conditionals of a group as constants of a trace; the traced function raises for other data.

    A trace does not say how many steps lead to a mode, and its second derivatives cannot be traced.
    """
    names, remedy = quoted(group.members), f"rules={dict.fromkeys(group.members, 'learned')}"
    if group.needed:
        raise NotImplementedError(
            f"Expected a guide that a compiled objective calls first; got one that was called before, and derives "
            f"{names} about modes that depend on what is drawn before. Make the guide anew, or with {remedy}."
        )
    found = outside_of_traces(lambda: derive(current, group))
    one = valid_at(current.plan, current.call, names, remedy)
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
