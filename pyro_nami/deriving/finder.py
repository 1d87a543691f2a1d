"""Which latents have a conditional that the model gives, and in which form.

The network says who is conditioned on; probing the model says whether a form holds:

- one latent whose prior is an exponential family that its children add to (`exponential_families`);
- one discrete latent with few values (`enumeration`);
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
which are exact in a given inverse.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import pyro.distributions as dist
import torch

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.exponential_families import forms_of
from pyro_nami.deriving.grids import MOST_ON_GRID
from pyro_nami.deriving.refutation import Refutation
from pyro_nami.factors.bounds import bound_for
from pyro_nami.factors.wrappers import innermost
from pyro_nami.graph.elimination import eliminate
from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.inversion_methods import nami
from pyro_nami.graph.network import BayesNet
from pyro_nami.program.flat_priors import flat_prior
from pyro_nami.program.loops import LoopSites
from pyro_nami.program.masks import is_masked_within, own_mask
from pyro_nami.program.site_values import num_values

__all__ = ["COMPILED", "MOST_DENSE", "Finder"]

# Elements of a joint block that are eliminated as one vector; ten times as many take 1,000 times as long.
MOST_DENSE = 500
# Latents that are tried one by one, each by several runs of the model; of more, latents of the same plates are tried
# together. Ten times more let long chains take minutes.
MOST_TRIED = 12
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
        tests: of the forms that conditionals may have.
        net: the model's network.
        nodes: the sites of a run of the model, and ``frames`` the plates of each.
        subsampled: plates of which a call sees a part only.
        unread: observed sites of which a call sees a part only.
        excluded: latents that are to have no exact conditional -> why.
        is_compiled: whether modes are to be constants, as in a trace; latents whose modes would move are learned.
        bounds: latents whose conditionals are to be by bounds -> "bounded" or "bound", see `ConjugateGroup`.
        located: latents whose modes are asked for, whatever these take.
        bent: latents whose priors are not to be taken for flat -> why.
        states: latents that are the states of a loop.

    Attributes:
        flat: latents with flat priors that are in the joint block; those that are not are in ``bent`` then.
        obstacles: latent -> what speaks against it, if anything; found once.
    """

    tests: Refutation
    net: BayesNet
    nodes: Mapping[str, Any]
    frames: Mapping[str, frozenset[str]]
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

    @functools.cached_property
    def predictive(self) -> set:
        """Latents without data."""
        seen = set().union(*(nx.ancestors(self.net.graph, name) for name in self.net.observed))
        return set(self.net.latent) - seen

    @property
    def refused(self) -> dict[str, str]:
        """Latent -> why its conditional is not exact, as last found."""
        return self.tests.refused

    def holding(self, group: ConjugateGroup, near: bool = True) -> ConjugateGroup | None:
        """Returns the group by the first form that holds, as `Refutation.holding` does for one form."""
        name, *others = group.members
        # of one latent a truncated Normal, say, which bounds may cut anywhere
        forms = [] if others else self._forms(name)
        for candidate in (*map(group.alone, forms), group):
            held = self.tests.holding(candidate, near)
            if held is not None:
                break
        reason = self._too_restless(held) if held is not None and held.has_mode else ""
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
            self.block()  # which tells what is to be taken for flat
        found: dict[str, ConjugateGroup] = {}
        exact = self._dependencies(inverse)
        failed = frozenset[str]()
        halved = False
        for i, name in enumerate(order):
            members = self._members(name, order[i:]) if name not in found else []
            group = self._group(sorted(members, key=order.index), inverse) if members else None
            if group is None and len(members) > 1:
                self.refused.setdefault(name, _LATER.format(members[1]))
            halved = failed.issuperset(members) and (halved or len(failed) > MOST_TRIED)
            if group is None or halved and 2 * len(members) > len(failed):
                continue  # as to try each end of a long chain would take too many runs of the model
            # By a bound, binary latents do not depend on each other.
            apart = set(group.members) if group.form == "Bernoulli" else set()
            unread = [
                exact[each].difference(inverse.parents[each], apart) for each in group.members
            ]
            if any(unread):
                other = min(set().union(*unread), key=str)
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

        By Newton's method this is done anew at each level, given what is drawn before; by quadrature for each member.
        """
        # of which one mode is constant
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

    def _dependencies(self, inverse: Inverse) -> dict[Any, set]:
        """Returns what the posterior's conditional of each latent depends on, in the order of an inverse."""
        sites = {name: site for name, site in self.net.sites.items() if name not in self.predictive}
        edges = [edge for edge in self.net.edges if sites.keys() >= set(edge)]
        net = BayesNet(sites, edges, self.net.plate_sizes, self.net.nesting)
        hidden = [name for name in net.latent if sites[name].marginalized]
        order = [*hidden, *(name for name in inverse.order if name in sites)]
        return {name: set(parents) for name, parents in eliminate(net, order).parents.items()}

    def _members(self, name: str, left: Sequence[str]) -> list[str]:
        """Returns the latents whose conditionals hang together with one's, of those not drawn before; or none."""
        members = [name]
        for member in members:  # which grows
            if not self._is_able(member):
                if member != name:
                    self.refused.setdefault(name, _LATER.format(member))
                return []
            near = self._children(member).union(*map(self._parents, [member, *self._data(member)]))
            before = self._children(member).difference(self.net.observed, left)
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
        if self.states and all(self._is_block([name]) for name in self.states):
            return self._parts([list(self.states)])
        shown = [
            name
            for name in self.net.latent
            if name in self.nodes and not self.net.sites[name].marginalized
        ]
        flat = {name for name in shown if self._may_be_flat(name)}
        self.flat.update(flat)
        self.flat.difference_update([name for name in flat if self._is_probability(name)])
        latents = [name for name in self.nodes if name in shown and self._is_able(name)]
        block = self._largest([name for name in latents if self._is_normal(name)])
        self.flat.intersection_update(block)
        self.bent.update({name: self.refused.get(name, "") for name in flat - self.flat})
        self.obstacles.clear()  # as these are priors of another kind then
        latents = [name for name in latents if self._is_able(name)]
        taken, single = {child for name in block for child in self._data(name)}, []
        for name in latents:
            data = self._data(name)
            alone = not self._is_normal(name) and self._children(name) == self._data(name)
            if alone and data.isdisjoint(taken) and self._is_block([name]):
                single.append(name)
                taken |= data
        depths = dict(zip(block, self._levels(block)[0]))
        return self._parts([*_by_depth(depths), single]) if block or single else []

    def _largest(self, latents: list[str]) -> list[str]:
        """Returns the largest block of latents with Normal or flat priors: Gaussian, unless one about a mode is larger.

        Flat ones between zero and some number come last, as these mostly are scales.
        """
        whole = self._closed(latents)
        if not whole or self._is_block(whole, near=self.flat.isdisjoint(whole)):
            return whole
        kinds: list[list[str]] = [[], [], []]
        for name in latents:
            prior = flat_prior(self.nodes[name]["fn"]) if name in self.flat else None
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
            frames = dict.fromkeys(self.frames[name] for name in reversed(names))
            kinds = [[name for name in names if self.frames[name] == each] for each in frames]
        for kind in (names, *kinds):
            trial = self._closed([each for each in latents if each in {*kind, *block}])
            if len(trial) > len(block) and self._is_block(trial, near):
                block = trial
        return block

    def _parts(self, first: Sequence[Sequence[str]]) -> list[list[str]]:
        """Returns blocks of all latents: those without data, some that come first, and the rest."""
        taken = set(self.predictive).union(*first)
        barren = [name for name in self.net.latent if name in self.predictive]
        rest = [name for name in self.net.latent if name not in taken]
        shown = [
            [name for name in part if not self.net.sites[name].marginalized]
            for part in (barren, *first, rest)
        ]
        return [part for part in shown if part]

    def _closed(self, names: Sequence[str]) -> list[str]:
        """Returns latents without those that latents outside of them depend on, and without the largest of too many."""
        kept = list(names)
        while True:
            outside = {
                name: self._children(name).difference(self._data(name), kept) for name in kept
            }
            reasons = {
                name: f"'{min(each)}' depends on it, which has no such conditional"
                for name, each in outside.items()
                if each
            }
            reasons = reasons or self._too_large(kept)
            if not reasons:
                return kept
            self.refused.update(reasons)
            kept = [name for name in kept if name not in reasons]

    def _too_large(self, names: Sequence[str]) -> dict[str, str]:
        """Returns the largest latent of a dense vector that is too long -> why it is refused; else nothing."""
        depths, lifted = self._levels(names)
        sizes = {
            name: self._elements(name, False)
            for name, depth in zip(names, depths)
            if depth >= lifted
        }
        total = sum(sizes.values())
        if total <= MOST_DENSE:
            return {}
        reason = f"a joint block of {total} elements has more than {MOST_DENSE}"
        return {max(sizes, key=sizes.__getitem__): reason}

    def _is_block(self, names: Sequence[str], near: bool = True) -> bool:
        group = self._group(names)
        return group is not None and self.holding(group, near) is not None

    # ---- what the network says

    def _is_able(self, name: str) -> bool:
        """Whether a latent's prior and data are such that its conditional may have a form."""
        if name in self.predictive or name not in self.nodes:
            return False
        if name not in self.obstacles:
            self.obstacles[name] = next(self._obstacles(name), "")
        if self.obstacles[name]:
            self.refused[name] = self.obstacles[name]
        return not self.obstacles[name]

    def _obstacles(self, name: str) -> Iterator[str]:
        """Yields what the network and the site itself say against an exact conditional."""
        site, data = self.nodes[name], self._data(name)
        if name in self.excluded:
            yield self.excluded[name]
        if not self._is_normal(name) and self._form(name) is None:
            yield f"its prior, {type(innermost(site['fn'])).__name__}, is of no such form"
        if is_masked_within(site["fn"]) or own_mask(site) is not None and self._bound([name]):
            yield "it is masked"
        bounded = self._form(name) == "Bernoulli"
        if self.bounds.get(name) == "bound" and not bounded:
            yield "a fixed point is found of bounds on binary latents only; 'bounded' learns the parameters of others"
        for each in sorted(self._needed([name]), key=str):
            is_counted = each not in self.nodes or self.nodes[each]["fn"].has_enumerate_support
            is_bounded = bounded and each in self.nodes and self._form(each) == "Bernoulli"
            if is_counted and not is_bounded:
                yield f"its density reads '{each}', which is discrete"
        for child in sorted(data, key=str) if bounded else ():
            fn = self.nodes[child]["fn"]
            if bound_for(fn) is None:
                yield f"'{child}' has no bound; pyro_nami.register_bound gives {type(innermost(fn)).__name__} one"
        for child in sorted(self._children(name), key=str):
            if child not in self.frames or child not in self.nodes:
                yield f"'{child}' depends on it, which is no site with a density"
            elif self._form(name) == "enumeration" and not self.frames[name] <= self.frames[child]:
                yield f"'{child}' reads several of its instances"
            elif (
                child in self.unread
                or not self.frames[child].intersection(self.subsampled) <= self.frames[name]
            ):
                yield f"a call sees a part only of '{child}', which depends on it"

    def _is_normal(self, name: str) -> bool:
        if name in self.states:
            return False
        kinds = (dist.Normal, dist.MultivariateNormal)
        return name in self.flat or type(innermost(self.nodes[name]["fn"])) in kinds

    def _may_be_flat(self, name: str) -> bool:
        """Whether a latent has a flat prior, with bounds that no latent moves."""
        flat = name in self.nodes and flat_prior(self.nodes[name]["fn"]) is not None
        return flat and name not in self.bent and self._parents(name) <= set(self.net.observed)

    def _is_probability(self, name: str) -> bool:
        """Whether the conditional of a latent with a flat prior is a Beta distribution."""
        group = self._group([name]) if "Beta" in self._forms(name) else None
        return group is not None and self.tests.holding(group.alone("Beta")) is not None

    def _form(self, name: str) -> str | None:
        if name in self.states:
            return "states enumerated" if self.states[name].values else "states"
        fn = self.nodes[name]["fn"]
        if isinstance(innermost(fn), dist.Bernoulli) and (
            name in self.bounds or self._is_bounded(name)
        ):
            return "Bernoulli"
        return "enumeration" if num_values(fn) else next(iter(self._forms(name)), None)

    def _forms(self, name: str) -> list[str]:
        """Returns the forms that a prior may have, whatever the values of other latents."""
        if name in self.states:
            return []
        return forms_of(
            self.nodes[name]["fn"], moving=not self._parents(name) <= set(self.net.observed)
        )

    def _is_bounded(self, name: str) -> bool:
        """Whether a binary latent is one of many that its children read, and all these have bounds."""
        children = self._children(name)
        several = not num_values(self.nodes[name]["fn"])
        several = several or any(
            not self.frames[name] <= self.frames.get(child, frozenset()) for child in children
        )
        return several and all(
            child in self.nodes and bound_for(self.nodes[child]["fn"]) for child in children
        )

    def _parents(self, name: Any) -> set:
        return set(self.net.graph.predecessors(name))

    def _children(self, name: Any) -> set:
        return set(self.net.graph.successors(name)).difference(self.predictive)

    def _data(self, name: Any) -> set:
        return self._children(name).intersection(self.net.observed)

    def _needed(self, names: Sequence[str]) -> frozenset:
        """Returns the latents that the density of some latents and their data reads."""
        data = set().union(*map(self._data, names))
        read = set().union(*map(self._parents, {*names, *data}))
        return frozenset(read.difference(names, self.net.observed))

    def _group(self, names: Sequence[str], inverse: Inverse | None = None) -> ConjugateGroup | None:
        """Returns latents as a group; None if no form is one of such latents."""
        if not all(map(self._is_able, names)):
            return None
        children = sorted(set().union(*map(self._data, names)))
        if not children:
            return None
        group = ConjugateGroup(tuple(names), tuple(children), needed=self._needed(names))
        group = group._replace(bound=self._bound(names), is_weighted=self.tests.is_weighted)
        if not all(map(self._is_normal, names)):
            form, *others = set(map(self._form, names))
            if form is None or others or len(names) > 1 and form != "Bernoulli":
                return None
            if states := self.states.get(names[0]):
                band = states.width, states.back, states.span
                return group._replace(form=form, elements=(max(1, states.values),), band=band)
            count = num_values(self.nodes[names[0]]["fn"]) if form == "enumeration" else None
            return group._replace(form=form, elements=(count,) if count else ())
        if any(self._parents(name).intersection(names[i:]) for i, name in enumerate(names)):
            return None  # of a block each prior is given what is drawn before it
        depths, lifted = self._levels(names, inverse)
        if inverse is not None and depths != sorted(depths, reverse=True):
            return None
        elements = [self._elements(name, depth < lifted) for name, depth in zip(names, depths)]
        if sum(n for n, depth in zip(elements, depths) if depth >= lifted) > MOST_DENSE:
            return None
        flat = frozenset(name for name in names if name in self.flat)
        return group._replace(
            depths=tuple(depths), num_lifted=lifted, elements=tuple(elements), flat=flat
        )

    def _bound(self, names: Sequence[str]) -> str:
        """Returns what stands for likelihoods in the conditionals of some latents; "" for these themselves."""
        asked = {self.bounds[name] for name in names if name in self.bounds}
        return min(asked, default="bounded" if self._form(names[0]) == "Bernoulli" else "")

    def _elements(self, name: str, lifted: bool) -> int:
        fn = self.nodes[name]["fn"]
        return torch.Size(fn.event_shape if lifted else fn.shape()).numel()

    def _levels(
        self, names: Sequence[str], inverse: Inverse | None = None
    ) -> tuple[list[int], int]:
        """Returns the level of each latent in the order of elimination, and the number of lifted levels.

        Plates of lifted levels lie in each other. What a dense latent depends on is dense, and so are instances that
        depend on each other in the inverse, by default the one that eliminates these levels first.
        """
        frames = {name: self.frames[name] for name in names}
        sizes: dict[frozenset[str], int] = {}
        for name in names:
            sizes[frames[name]] = sizes.get(frames[name], 0) + self._elements(name, False)
        chain: list[frozenset[str]] = []
        for each in sorted(filter(None, sizes), key=lambda each: (-sizes[each], sorted(each))):
            if all(each <= other or other <= each for other in chain):
                chain.append(each)
        chain.sort(key=len, reverse=True)
        dense = {name for name in names if frames[name] not in chain}
        dense |= {name for name in names if inverse is not None and inverse.joint[name]}
        while True:
            while more := {
                name for name in names if name not in dense and self._children(name) & dense
            }:
                dense |= more
            used = [
                each
                for each in chain
                if any(frames[name] == each and name not in dense for name in names)
            ]
            depths = {
                name: len(used) if name in dense else used.index(frames[name]) for name in names
            }
            coupled = set()
            if inverse is None and used:
                blocks = self._parts(_by_depth(depths))
                joint = nami(self.net, direction="reverse", blocks=blocks).joint
                coupled = {name for name in names if name not in dense and joint[name]}
            if not coupled:
                return [depths[name] for name in names], len(used)
            dense |= coupled


def _by_depth(depths: Mapping[str, int]) -> list[list[str]]:
    return [
        [name for name in depths if depths[name] == depth] for depth in sorted(set(depths.values()))
    ]
