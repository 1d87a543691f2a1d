"""Which latents have a conditional that the model gives, and in which form.

The network says who is conditioned on; probing the model says whether a form holds:

- one latent whose prior is an exponential family that its children add to (`exponential_families`);
- one discrete latent with few values, or several in the same plates (`enumeration`);
- latents that are jointly linear and Gaussian given the rest, whatever their plates
  (`joint_gaussian`);
- latents with Gaussian priors and children of concave log density: one or two single numbers by a
  grid (`quadrature`), others by Normals about the mode (`newton`);
- many binary latents, and on request Gaussian ones, by bounds on the children's log density
  (`bounded`).

All children are observed. The conditionals hold for any data and any number of instances, and are
differentiable in the latents sampled earlier. In each call they cost the derivatives of one run of
the model, or of a few runs where a mode is searched.

`Finder.block` chooses the latents to sample last, such that most are exact. `Finder.groups` says
which are exact in a given inverse. `relations` reads the network for both.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyro.distributions as dist

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.exponential_families import forms_of
from pyro_nami.deriving.grids import MOST_ON_GRID
from pyro_nami.deriving.refutation import Refutation
from pyro_nami.deriving.relations import Relations
from pyro_nami.factors.bounds import bound_for
from pyro_nami.factors.wrappers import innermost
from pyro_nami.graph.inverse import Inverse, sampled
from pyro_nami.program.flat_priors import flat_prior
from pyro_nami.program.loops import LoopSites
from pyro_nami.program.masks import is_masked_within, own_mask
from pyro_nami.program.site_values import num_values

__all__ = ["COMPILED", "Finder"]

# Elements of a joint block that are eliminated as one vector; ten times as many take 1,000 times as long.
MOST_DENSE = 500
# Latents that are tried one by one, each by several runs of the model; of more, latents of the same plates are tried
# together. Ten times more let long chains take minutes.
MOST_TRIED = 12
# States that several discrete latents have together, each a point of one run of the model: eight binary ones. At ten
# times more, a step of training takes seconds; at a tenth, only four are exact.
MOST_STATES = 256
COMPILED = "a compiled objective takes a mode for a constant, and its mode moves with what is drawn before, or learned"
# The model's own weights with which a mode moves, so that it is searched for anew in each step. At equal seconds, modes
# are as good as networks with two weights, and worse with 100 and more.
MOST_WEIGHTS = 20
WEIGHTS = (
    "its mode moves with {} weights of the model's own, and would be searched for anew in each step; "
    "rules={{site: 'located'}} does that"
)
_LATER = "its data depend on '{}', which is drawn later"


@dataclass(frozen=True, kw_only=True)
class Finder:
    """Finds latents with exact conditionals.

    Args:
        tests: the tests of a conditional's form.
        relations: the model's network, and the sites of a run.
        subsampled: plates of which a call sees a part only.
        unread: observed sites of which a call sees a part only.
        excluded: latents that are to have no exact conditional -> why.
        is_compiled: whether modes are to be constants, as in a trace; latents whose modes would move are learned.
        bounds: latents whose conditionals are to be by bounds -> "bounded" or "bound", see `ConjugateGroup`.
        located: latents whose modes the user asks for, however long the search takes.
        bent: latents whose priors are not to be taken for flat -> why.
        states: latents that are the states of a loop.

    Attributes:
        flat: latents with flat priors in the joint block; the other latents with flat priors are in ``bent`` then.
        obstacles: latent -> why it has no exact conditional, as far as the network says; found once.
    """

    tests: Refutation
    relations: Relations
    subsampled: Collection[str]
    unread: Collection[str]
    excluded: Mapping[str, str]
    is_compiled: bool = False
    bounds: Mapping[str, str] = field(default_factory=dict)
    located: frozenset[str] = frozenset()
    bent: dict[str, str] = field(default_factory=dict)
    states: Mapping[str, LoopSites] = field(default_factory=dict)
    flat: set[str] = field(default_factory=set)
    obstacles: dict[str, str] = field(default_factory=dict)

    @property
    def refused(self) -> dict[str, str]:
        """Latent -> why its conditional is not exact, as last found."""
        return self.tests.refused

    def holding(self, group: ConjugateGroup, near: bool = True) -> ConjugateGroup | None:
        """Returns the group by the first form that holds, as `Refutation.holding` does for one form."""
        name, *others = group.members
        forms = [] if others else self._forms(name)
        candidates = [*map(group.alone, forms), group]
        tested = (self.tests.holding(candidate, near) for candidate in candidates)
        held = next(filter(None, tested), None)
        reason = self._too_restless(held) if held and held.has_mode else ""
        if reason:
            self.refused.update(dict.fromkeys(group.members, reason))
        return None if reason else held

    def _too_restless(self, group: ConjugateGroup) -> str:
        """Returns why a mode is not to be searched for anew in each step; empty if it may be."""
        parameters = self.tests.parameters(group, self.tests.draws[0])
        if self.is_compiled and (group.needed or self.subsampled or parameters):
            return COMPILED
        weights = sum(each.numel() for each in parameters)
        is_asked = self.located.issuperset(group.members)
        return WEIGHTS.format(weights) if weights > MOST_WEIGHTS and not is_asked else ""

    # ---- in a given inverse

    def groups(self, inverse: Inverse, order: Sequence[str]) -> dict[str, ConjugateGroup]:
        """Returns the latents that are drawn from their exact conditional, each with its group.

        Args:
            inverse: what each latent may read.
            order: latents in sampling order.
        """
        if any(self._may_be_flat(name) and name not in self.flat for name in order):
            self.block()  # which chooses the priors that count as flat
        found: dict[str, ConjugateGroup] = {}
        exact = self.relations.dependencies(inverse)
        failed = frozenset[str]()
        halved = False
        for i, name in enumerate(order):
            members = self._members(name, order[i:]) if name not in found else []
            group = self._group(sorted(members, key=order.index), inverse)
            if group is None and len(members) > 1:
                self.refused.setdefault(name, _LATER.format(members[1]))
            halved = failed.issuperset(members) and (halved or len(failed) > MOST_TRIED)
            if group is None or halved and 2 * len(members) > len(failed):
                continue  # as to try each end of a long chain would take too many runs of the model
            # By a bound, binary latents do not depend on each other.
            apart = group.members if group.form == "Bernoulli" else ()
            unread = set().union(
                *(exact[each].difference(inverse.parents[each], apart) for each in group.members)
            )
            if unread:
                other = min(unread, key=str)
                self.refused[name] = f"the inverse does not let it read '{other}'"
            elif exact_group := self.holding(group):
                found.update({name: self._own(exact_group, name) for name in group.members})
            else:
                failed = frozenset(members)
        self.refused.update(
            {name: reason for name, reason in self.bent.items() if reason and name not in found}
        )
        return found

    def _own(self, group: ConjugateGroup, name: str) -> ConjugateGroup:
        """Returns the group that a member's conditional is derived in.

        A mode is searched for anew at each level, given the latents drawn before; a grid is made for each member.
        """
        # A compiled objective takes one mode of the whole group, as a constant.
        if not group.has_mode or group.is_loop or self.is_compiled and len(group.members) > 1:
            return group

        def rest(before: Collection[str]) -> ConjugateGroup:
            return group.without(before)._replace(needed=group.needed.union(before))

        place = group.members.index(name)
        own = rest(group.members[:place])
        small = set(own.elements) == {1} and len(own.members) <= MOST_ON_GRID
        if small and (tabulated := self.holding(own._replace(form="quadrature"))):
            return tabulated
        levels = zip(group.members, group.depths)
        return rest([other for other, depth in levels if depth > group.depths[place]])

    def _members(self, name: str, left: Sequence[str]) -> list[str]:
        """Returns the latents to be derived together with one, of those not drawn before; none if one is not able."""
        relations, members = self.relations, [name]
        for member in members:  # which grows
            if not self._is_able(member):
                if member != name:
                    self.refused.setdefault(name, _LATER.format(member))
                return []
            near = relations.near(member)
            before = relations.latent_children(member).difference(left)
            if before:
                self.refused.setdefault(
                    name, f"'{min(before)}', which depends on it, is drawn before it"
                )
                return []
            members += sorted(near.intersection(left).difference(members), key=left.index)
        return members

    # ---- for any inverse

    def block(self) -> list[list[str]]:
        """Returns blocks of all latents, to be eliminated one after another, such that most are exact; or none."""
        relations = self.relations
        if self.states and all(self._is_block([name]) for name in self.states):
            return relations.parts([list(self.states)])
        shown = set(sampled(relations.net)).intersection(relations.nodes)
        flat = {name for name in shown if self._may_be_flat(name)}
        self.flat.update(flat)
        self.flat.difference_update([name for name in flat if self._is_probability(name)])
        latents = [name for name in relations.nodes if name in shown and self._is_able(name)]
        block = self._largest([name for name in latents if self._is_normal(name)])
        self.flat.intersection_update(block)
        self.bent.update({name: self.refused.get(name, "") for name in flat - self.flat})
        self.obstacles.clear()  # they depend on which priors are flat
        taken, single = set().union(*map(relations.data, block)), []
        for name in filter(self._is_able, latents):
            data = relations.data(name)
            alone = not self._is_normal(name) and not relations.latent_children(name)
            if alone and data.isdisjoint(taken) and self._is_block([name]):
                single.append(name)
                taken |= data
        for names in self._enumerated(latents):
            data = set().union(*map(relations.data, names))
            if data.isdisjoint(taken) and self._is_block(names):
                single += names
                taken |= data
        if not block and not single:
            return []
        return relations.parts([*relations.levels(block).blocks, single])

    def _largest(self, latents: list[str]) -> list[str]:
        """Returns the largest block of latents with Normal or flat priors: Gaussian, unless one about a mode is larger.

        Latents with flat priors from zero to some number come last, as most of them are scales.
        """
        whole = self._closed(latents)
        if not whole or self._is_block(whole, near=self.flat.isdisjoint(whole)):
            return whole
        kinds: list[list[str]] = [[], [], []]
        for name in latents:
            prior = flat_prior(self.relations.fn(name)) if name in self.flat else None
            is_scale = prior is not None and bool((prior.low == 0).all())
            kinds[0 if prior is None else 1 + is_scale].append(name)
        exact: list[str] = []
        for names in kinds:
            exact = self._grown(exact, names, latents, near=False)
        most = self._grown([], kinds[0], latents, near=True)
        if exact and len(exact) >= len(most):
            return exact
        for names in kinds[1:]:
            most = self._grown(most, names, latents, near=True)
        return most

    def _grown(
        self, block: list[str], names: list[str], latents: list[str], near: bool
    ) -> list[str]:
        """Returns a block with as many of some latents as it can have: all at once, or one kind after another."""
        kinds = [[name] for name in reversed(names)]
        if len(names) > MOST_TRIED:
            frames = self.relations.frames
            plates = dict.fromkeys(frames[name] for name in reversed(names))
            kinds = [[name for name in names if frames[name] == each] for each in plates]
        for kind in (names, *kinds):
            trial = self._closed([each for each in latents if each in {*kind, *block}])
            if len(trial) > len(block) and self._is_block(trial, near):
                block = trial
        return block

    def _closed(self, names: Sequence[str]) -> list[str]:
        """Returns the latents that no latent outside of them reads, less the largest of too many in a dense vector."""
        kept = list(names)
        while True:
            reasons = {}
            for name in kept:
                outside = self.relations.latent_children(name).difference(kept)
                if outside:
                    reasons[name] = (
                        f"'{min(outside)}' depends on it, and has no conditional in closed form"
                    )
            reasons = reasons or self._too_large(kept)
            if not reasons:
                return kept
            self.refused.update(reasons)
            kept = [name for name in kept if name not in reasons]

    def _too_large(self, names: Sequence[str]) -> dict[str, str]:
        """Returns the largest latent of a dense vector that is too long -> why it is refused; else nothing."""
        sizes = self.relations.levels(names).dense
        total = sum(sizes.values())
        if total <= MOST_DENSE:
            return {}
        reason = f"a joint block of {total} elements has more than {MOST_DENSE}"
        return {max(sizes, key=sizes.__getitem__): reason}

    def _is_block(self, names: Sequence[str], near: bool = True) -> bool:
        group = self._group(names)
        return group is not None and self.holding(group, near) is not None

    def _enumerated(self, latents: Sequence[str]) -> Iterator[list[str]]:
        """Yields the groups of two and more discrete latents that hang together by data or priors."""
        left = [name for name in latents if self._form(name) == "enumeration"]
        while left:
            names = [left.pop(0)]
            for name in names:  # which grows
                near = self.relations.near(name)
                names += [other for other in left if other in near]
                left = [other for other in left if other not in near]
            outside = set().union(*map(self.relations.latent_children, names)).difference(names)
            if len(names) > 1 and not outside:
                yield sorted(names, key=latents.index)

    # ---- by the network

    def _is_able(self, name: str) -> bool:
        """Whether a latent's prior and data are such that its conditional may have a form."""
        if name in self.relations.predictive or name not in self.relations.nodes:
            return False
        if name not in self.obstacles:
            self.obstacles[name] = next(self._obstacles(name), "")
        if self.obstacles[name]:
            self.refused[name] = self.obstacles[name]
        return not self.obstacles[name]

    def _obstacles(self, name: str) -> Iterator[str]:
        """Yields the reasons, by the network and the site itself, why there is no exact conditional."""
        relations, form = self.relations, self._form(name)
        nodes, frames, fn = relations.nodes, relations.frames, relations.fn(name)
        if name in self.excluded:
            yield self.excluded[name]
        if not self._is_normal(name) and form is None:
            yield _no_form(fn)
        if is_masked_within(fn) or own_mask(nodes[name]) is not None and self._bound([name]):
            yield "it is masked"
        bounded = form == "Bernoulli"
        if self.bounds.get(name) == "bound" and not bounded:
            yield "a fixed point is found of bounds on binary latents only; 'bounded' learns the parameters of others"
        for each in sorted(relations.needed([name]), key=str):
            is_counted = each not in nodes or relations.fn(each).has_enumerate_support
            is_alike = (
                each in nodes and form in ("enumeration", "Bernoulli") and self._form(each) == form
            )
            if is_counted and not is_alike:
                yield f"its density reads '{each}', which is discrete"
        for child in sorted(relations.data(name), key=str) if bounded else ():
            fn = relations.fn(child)
            if bound_for(fn) is None:
                yield f"'{child}' has no bound; pyro_nami.register_bound gives {type(innermost(fn)).__name__} one"
        for child in sorted(relations.children(name), key=str):
            if child not in frames or child not in nodes:
                yield f"'{child}' depends on it, which is no site with a density"
            elif form == "enumeration" and not frames[name] <= frames[child]:
                yield f"'{child}' reads several of its instances"
            elif child in self.unread or frames[child].intersection(self.subsampled) - frames[name]:
                yield f"a call sees a part only of '{child}', which depends on it"

    def _is_normal(self, name: str) -> bool:
        if name in self.states:
            return False
        kinds = (dist.Normal, dist.MultivariateNormal)
        return name in self.flat or type(innermost(self.relations.fn(name))) in kinds

    def _may_be_flat(self, name: str) -> bool:
        """Whether a latent has a flat prior, with bounds that no latent moves."""
        if name in self.bent or name not in self.relations.nodes:
            return False
        is_flat = flat_prior(self.relations.fn(name)) is not None
        return is_flat and not self.relations.latent_parents([name])

    def _is_probability(self, name: str) -> bool:
        """Whether the conditional of a latent with a flat prior is a Beta distribution."""
        group = self._group([name]) if "Beta" in self._forms(name) else None
        return group is not None and self.tests.holding(group.alone("Beta")) is not None

    def _form(self, name: str) -> str | None:
        if name in self.states:
            return "states enumerated" if self.states[name].values else "states"
        fn = self.relations.fn(name)
        is_binary = isinstance(innermost(fn), dist.Bernoulli)
        if is_binary and (name in self.bounds or self._is_bounded(name)):
            return "Bernoulli"
        return "enumeration" if num_values(fn) else next(iter(self._forms(name)), None)

    def _forms(self, name: str) -> list[str]:
        """Returns the forms that a prior may have, whatever the values of other latents."""
        if name in self.states:
            return []
        moving = bool(self.relations.latent_parents([name]))
        return forms_of(self.relations.fn(name), moving=moving)

    def _is_bounded(self, name: str) -> bool:
        """Whether a binary latent is one of many that its children read, and all these have bounds."""
        fn, nodes, frames = self.relations.fn, self.relations.nodes, self.relations.frames
        children = self.relations.children(name)
        several = not num_values(fn(name)) or any(
            frames[name] - frames.get(child, frozenset()) for child in children
        )
        return several and all(child in nodes and bound_for(fn(child)) for child in children)

    def _group(self, names: Sequence[str], inverse: Inverse | None = None) -> ConjugateGroup | None:
        """Returns latents as a group; None if no form is one of such latents."""
        if not all(map(self._is_able, names)):
            return None
        children = sorted(set().union(*map(self.relations.data, names)))
        if not children:
            return None
        group = ConjugateGroup(
            tuple(names),
            tuple(children),
            needed=self.relations.needed(names),
            bound=self._bound(names),
            is_weighted=self.tests.is_weighted,
        )
        if not all(map(self._is_normal, names)):
            form, *others = set(map(self._form, names))
            if form is None or others:
                return None
            if form == "enumeration":
                return self._of_states(group)
            if len(names) > 1 and form != "Bernoulli":
                return None
            if states := self.states.get(names[0]):
                band = states.width, states.back, states.span
                return group._replace(form=form, elements=(max(1, states.values),), band=band)
            return group._replace(form=form, elements=())
        parents = self.relations.parents
        if any(parents(name).intersection(names[i:]) for i, name in enumerate(names)):
            return None  # in a block, a prior reads the members drawn before it
        depths, num_lifted, elements = levels = self.relations.levels(names, inverse)
        is_in_order = sorted(depths.values(), reverse=True) == [*depths.values()]
        if inverse is not None and not is_in_order or sum(levels.dense.values()) > MOST_DENSE:
            return None
        return group._replace(
            depths=tuple(depths.values()),
            num_lifted=num_lifted,
            elements=tuple(elements.values()),
            flat=frozenset(self.flat.intersection(names)),
        )

    def _of_states(self, group: ConjugateGroup) -> ConjugateGroup | None:
        """Returns discrete latents as a group; None if several have too many states, other plates, or masks."""
        relations, names = self.relations, group.members
        counts = tuple(num_values(relations.fn(name)) or 1 for name in names)
        if len(names) > 1:
            is_masked = any(own_mask(relations.nodes[name]) is not None for name in names)
            if len({relations.frames[name] for name in names}) > 1 or is_masked:
                return None
            if math.prod(counts) > MOST_STATES:
                reason = f"it and others have {math.prod(counts)} states, more than {MOST_STATES}"
                self.refused.update(dict.fromkeys(names, reason))
                return None
        return group._replace(form="enumeration", elements=counts)

    def _bound(self, names: Sequence[str]) -> str:
        """Returns the kind of bound on the likelihood in the conditionals of some latents; "" for no bound."""
        asked = {self.bounds[name] for name in names if name in self.bounds}
        return min(asked, default="bounded" if self._form(names[0]) == "Bernoulli" else "")


def _no_form(fn: Any) -> str:
    """Returns why a prior has no closed form: its kind, or its number of values."""
    count = num_values(fn, most=sys.maxsize)
    if count is not None and num_values(fn) is None:
        return f"it has {count} values, more than are enumerated"
    return f"no closed form is known for a prior of type {type(innermost(fn)).__name__}"
