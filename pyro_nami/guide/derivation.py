"""Derives the conditionals of a group in a call: runs the model until the group's expansion is solved.

Results that depend on the data alone are kept for later steps on the same data.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
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
from pyro_nami.guide.rules import order_of
from pyro_nami.guide.warm_starts import DataSets, Starts
from pyro_nami.messages import quoted
from pyro_nami.program.flat_priors import improper_posterior
from pyro_nami.program.isolation import forked_rng, outside_of_traces, untouched
from pyro_nami.program.many_draws import MANY_DRAWS
from pyro_nami.program.runner import RunModel, Sites, Values

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
        self.derived = current.derived
        self.plan: Plan = current.plan
        self.call: Call = current.call
        self.kept = self.call.derived.constants
        self.unkept: dict[Any, Any] = {}  # constants for this pass alone
        self.differentiable = torch.is_grad_enabled() and current.state.network.learns()

    def conditionals(self) -> Expansion:
        """Returns the conditionals: the ones kept for the data, if there are any, else newly derived ones."""
        key = self._key_of_data()
        kept: Kept | None = (self.kept or {}).get(key)
        if kept is not None and not kept.holds(self.call):
            kept = None
        if kept is None or kept.conditionals is None:
            with forked_rng():  # draws shall not depend on what was derived before
                expansion, sites = self._solved()
                if key is not None and kept is None:
                    self._keep(key, expansion, sites)
            return expansion
        self.derived.sites.update(kept.sites)
        if kept.near is not None:
            self.derived.near[self.group] = kept.near
        expansion = kept.conditionals.apart()
        return expansion

    @property
    def _is_other(self) -> bool:
        """Whether this pass may have other members than planned, or is traced in order to serve other calls."""
        return bool(self.call.lacking or self.derived.observed or torch.jit.is_tracing())

    def _key_of_data(self) -> Any:
        """Returns the key of a group whose conditionals are found once for the data of training; None for others.

        The conditionals depend on nothing that is drawn before, and the model has no parameters.
        """
        group, earlier = self.group, self.call.derived
        depends = group.needed or group.bound or self.plan.learns
        is_fixed = earlier.is_fixed and self.kept is not None and earlier.surroundings
        if depends or self._is_other or not is_fixed:
            return None
        return group, self.current.leading, "of data"

    def _keep(self, key: Any, expansion: Expansion, sites: Sites) -> None:
        """Keeps the conditionals of a group for later calls.

        In training they are derived once more, without gradients, when arguments come for the second time. A guide that
        is called once, or with a number that changes in each step, derives them no more often than it draws.
        """
        sources, kept = self.call.sources, self.kept
        assert kept is not None
        if expansion.differentiable:
            before = kept.get((key, "before"))
            kept[key, "before"] = Arguments(sources)
            is_second = before is not None and before.are(sources)
            if not (is_second and self.current.state.network.passes):
                return
        arguments = kept.get("arguments")  # one copy of them for all groups
        if arguments is None or not arguments.are(sources):
            arguments = kept["arguments"] = Arguments(sources, kept=True)
        found = Kept(arguments, surroundings=self.call.derived.surroundings)
        if expansion.differentiable:
            names = [name for name in expansion.until if name in sites]
            densities = (expansion.density(sites, name) for name in names)
            if parameters_of(*densities, but=expansion.values.values()):
                kept[key] = found
                return
            with torch.no_grad():
                expansion, sites = self._solved()
        near = self.derived.near.get(self.group)
        kept[key] = found._replace(
            conditionals=expansion.apart(),
            near=None if near is None else near.apart(),
            sites={name: sites[name] for name in self.group.members},
        )

    def _solved(self) -> tuple[Expansion, Sites]:
        """Returns the conditionals of a group, and the sites of the last run of the model for them.

        The pass is told the sites of the members.
        """
        group = self.group
        known = {
            name: value.clone() if value.is_inference() else value
            for name, value in self.current.values.items()
            if name not in group.members
        }
        expansion, sites = self._run(known)
        near: Any = self.derived.near.get(group)
        if type(expansion) is JointGaussian:
            near = expansion
        _check_decided(expansion if isinstance(expansion, JointGaussian) else near)
        if near is not None and getattr(near, "unfound", None) is None:
            self._keep_start(near)
        if isinstance(expansion, LoopStates) and not expansion.unfound:
            self.call.derived.starts[group.members, "states"] = expansion.begin_next()
        self.derived.sites.update({name: sites[name] for name in expansion.group.members})
        return expansion, sites

    def _keep_start(self, near: Any) -> None:
        """Stores the point that a search has ended at, for later searches to start from."""
        if self.kept is not None and (near.has_moved or self.group.has_mode):
            at = {name: at.detach() for name, at in near.references.items()}
            self.kept[self.group, near.leading, "at"] = at
        elif near.has_moved:
            for starts, data in self._starts():
                starts.note(data, near.references)

    def _run(self, known: Values) -> tuple[Expansion, Sites]:
        """Runs the model until an expansion of the group is solved; returns the expansion, and the last run's sites.

        An expansion is made anew where a run shows other sizes, observed members or constants than it was made for.
        """
        run = self._at(known)

        def sites_of(expansion: Expansion) -> Sites:
            sites = self._sites(expansion, run)
            if isinstance(expansion, Newton):
                self.derived.near[self.group] = expansion
            return sites

        while True:
            first = self._from_constants(known) or self._expansion()
            with suppress(Changed):
                return solved(first, sites_of(first), sites_of)

    def _at(self, known: Values) -> RunModel:
        """Returns the function that runs the model where the values of some latents are known."""
        held = {**self.call.held, **known}
        return lambda values, until: self.call.run({**held, **values}, until=until)

    def _sites(self, expansion: Expansion, run: RunModel) -> Sites:
        """Returns the sites of a run; raises `Changed` if it observes members, which the pass then knows."""
        sites = expansion.sites(run, {})
        members = [name for name in expansion.group.members if name in sites]
        observed = [name for name in members if sites[name]["is_observed"]]
        for name in observed:
            self.derived.observed.add(name)
            if name not in self.current.values:
                self.current.know(name, sites[name]["value"])
        if observed:
            raise Changed
        return sites

    def _from_constants(self, known: Values) -> FromConstants | None:
        """Returns the expansion of a Gaussian block from its constants, derived at one draw; None if it has none.

        Many draws at once pay for this derivation, and so do steps of training from the second on. Constants are kept
        for calls on the same data. Where they turn out to vary, the block is never derived from them again.
        """
        group, leading = self.group, self.current.leading
        is_plain = group.form == "Gaussian" and not group.bound
        is_one_data_set = self.plan.leading(self.call.values).numel() == 1
        if not is_plain or not is_one_data_set or self._is_other:
            return None
        kept = self.kept
        is_step = kept is not None and self.differentiable and self.current.state.network.passes
        if leading.numel() < MANY_DRAWS and not is_step:
            return None
        if kept is None or not (is_step or self.call.derived.is_fixed):
            kept = self.unkept
        # of one draw, values have the shapes that the model sees
        key = group, leading if leading.numel() == 1 else "many"
        if key not in kept:
            kept[key] = self._constants_of_one(known)
        if kept[key] is None:
            return None
        return FromConstants(
            group,
            leading,
            self.plan.plates.nesting,
            constants=kept[key],
            forget=functools.partial(kept.__setitem__, key, None),
            is_rounded=leading.numel() > 1,
        )

    def _constants_of_one(self, known: Values) -> Constants | None:
        """Returns the constants of a Gaussian block, derived at the first draw of the latents before it."""
        plan, group, first = self.plan, self.group, dict[str, Tensor]()
        for name, value in known.items():
            # in its site's own shape: a model that is written for one draw takes no other
            value = plan.first_of(name, value).detach().clone()
            first[name] = value.requires_grad_(value.is_floating_point())
        run, at = self._at(first), {name: plan.initial[name] for name in group.flat}
        nesting, sizes = plan.plates.nesting, dict(self._sizes(group))
        one = group, torch.Size((1,) * nesting), nesting
        block = JointGaussian(*one, False, sizes=sizes, at=at)
        with suppress(Changed), untouched(self.call.program.model):
            sites = self._sites(block, run)
            expansion, _ = solved(block, sites, lambda block: self._sites(block, run))
            return constants_of(*one, sizes, run, expansion.references)
        return None

    def _sizes(self, group: ConjugateGroup) -> dict[str, int]:
        """Returns the number of elements of each member, as planned or as an expansion has met them in a run."""
        sizes = dict(zip(group.members, group.elements))
        return self.derived.sizes.setdefault(group, sizes)

    def _expansion(self) -> Expansion:
        """Returns the expansion of a group at the values drawn so far; a run of the model has to solve it."""
        plan, leading = self.plan, self.current.leading
        group = self.group.without(self.call.lacking, self.derived.observed)
        options: dict[str, Any] = {"sizes": self._sizes(group)} if group.depths else {}
        if group.is_loop:
            if begin := self.call.derived.starts.get((group.members, "states")):
                options["at"] = begin
        elif group.has_mode or group.form == "Gaussian":
            options["at"] = self._start(group)
        if group.in_turn:
            rules: Any = plan.rules
            options["orders"] = {name: order_of(rules[name].factor) for name in group.members}
            options["observed"] = self.derived.observed.intersection(self.group.members)
        kind, nesting = expansion_of(group), plan.plates.nesting
        expansion = kind(group, leading, nesting, self.differentiable, **options)
        for child in group.children if group.bound == "bounded" else ():
            if child in plan.bounds:
                params = self.current.state.params(plan.bounds[child].name)
                expansion.xi[child] = softplus(params.squeeze(-1))
        return expansion

    def _start(self, group: ConjugateGroup) -> Values:
        """Returns the values that a group is expanded about first, as far as they are known."""
        members, at = set(group.members), dict[str, Tensor]()
        if self.kept and self.differentiable and not torch.jit.is_tracing():
            at = self.kept.get((group, self.current.leading, "at"), at)
        near = [each for each in self.derived.near.values() if members <= set(each.group.members)]
        if near:
            at = near[-1].means(self.current.values, group.members)
        if not at and (group.has_mode or group in self.call.derived.starts):
            for starts, data in self._starts():
                at = starts.find(data, at)
        return {**{name: self.plan.initial[name] for name in group.flat}, **at}

    def _starts(self) -> Iterator[tuple[Starts, DataSets]]:
        """Yields the warm starts for a group's mode search, and the data sets by which they are stored.

        First come the starts stored for the data sets alone. Then, if there is one draw for each data set, come the
        starts stored for the data sets and the values drawn so far.
        """
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
            yield starts.setdefault((group, "needed"), Starts()), whole


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
            "Expected a new guide for a compiled objective; this one was called before, and derives "
            f"{names} about modes that move with latents drawn earlier. Make a new guide, or one with {remedy}."
        )
    found = outside_of_traces(lambda: derive(current, group))
    one = valid_at(current.plan, current.call, names, remedy)
    current.derived.valid.update(dict.fromkeys(group.members, one))
    return found


def valid_at(plan: Plan, call: Call, names: str, remedy: str) -> Tensor:
    """Returns 1; the traced function raises ValueError for tensor arguments other than those of the trace."""
    message = (
        f"Expected the data that a compiled objective was compiled at, as {names} were derived from them; got others. "
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
