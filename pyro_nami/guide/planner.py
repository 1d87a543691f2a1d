"""`make_plan`: from the first call to a guide's plan: what each latent reads, and by which rule it is drawn.

To serve latents by another rule, say in `make_plan` when it applies; the rule itself is a class in
`rules`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import networkx as nx
from torch.distributions import constraints

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.finder import Finder
from pyro_nami.deriving.refutation import OPEN
from pyro_nami.factors.bijections import peel_support, support_of
from pyro_nami.factors.family import Family
from pyro_nami.factors.registry import make_family
from pyro_nami.factors.types import type_of
from pyro_nami.factors.unconstrained import CorrectionFamily
from pyro_nami.graph.inverse import Inverse
from pyro_nami.guide.bound_factors import bound_factors, in_turn, is_corrected
from pyro_nami.guide.columns import find_covariates
from pyro_nami.guide.element_reads import element_reads
from pyro_nami.guide.first_call import FirstCall, data_features, first_instance
from pyro_nami.guide.first_latents import first_ones
from pyro_nami.guide.model_inverse import invert, plan_reads
from pyro_nami.guide.options import check_names
from pyro_nami.guide.placing import block_of, factor_of
from pyro_nami.guide.plan import Plan, SitePlan
from pyro_nami.guide.rules import Bounded, Exact, Learned, Located, Prior, Rule
from pyro_nami.parameters.conditioning import Plates, Read, covariates_of, nodes_of
from pyro_nami.parameters.factor_groups import Factor
from pyro_nami.program.first_run import allows_nan, is_transparent
from pyro_nami.program.flat_priors import improper_posterior, is_improper
from pyro_nami.program.masks import own_mask
from pyro_nami.program.vectorized import Vectorized
from pyro_nami.reading.network import is_blocked

__all__ = ["Derived", "make_plan"]


class Derived(NamedTuple):
    """What is derived of a model, whatever its networks."""

    inverse: Inverse
    order: list[str]  # of latents that are not drawn from the model, in sampling order
    interleaved: bool  # whether runs of the model can draw in that order
    groups: dict[str, ConjugateGroup]  # of latents with exact conditionals
    refused: dict[str, str]  # why others have none
    lost: set[str]  # which of these may have one, as the model cannot be run for many
    doubts: dict[str, str]  # latents with improper priors that may have no posterior -> why

    @classmethod
    def of(cls, first: FirstCall, flaw: str = "", cut: Mapping[str, str] | None = None) -> Derived:
        """Returns what the first call shows.

        Args:
            first: the call.
            flaw: why latents that come first are not found by quadrature.
            cut: latents whose priors are not to be taken for flat -> why.
        """
        options, finder = first.options, _finder(first, cut or {})
        check_names("rules", options.rules, first.net.latent, "a latent site")
        searched = finder is not None and options.inverse == "auto" and options.blocks is None
        parts = finder.block() if finder and searched else []
        # If the latents that are left come in another order than the program's, they are taken one by one.
        for each in (
            (parts, [*parts[:-1], *([name] for name in reversed(parts[-1]))]) if parts else ((),)
        ):
            inverse = invert(first.net, options.inverse, options.blocks, each)
            order = _learned_order(first, inverse)
            groups = finder.groups(inverse, order) if finder else {}
            order, interleaved, last = _program_order(first, inverse, order, groups)
            if interleaved:
                inverse = dataclasses.replace(
                    inverse, exact=tuple(v for v in inverse.order if each and v in groups)
                )
                break
        before = order if last else ()
        groups = (
            {name: _with_all_read(group, inverse, before) for name, group in groups.items()}
            if interleaved
            else {}
        )
        refused, lost = (dict(finder.refused), set(finder.lost)) if finder else ({}, set())
        if finder and (moving := sorted(finder.moving.difference(groups))):
            names = ", ".join(map(repr, moving))
            logging.getLogger(__name__).warning(
                "Learned, as the objective is compiled, where plain objectives derive modes: %s.",
                names,
            )
        marginal = first_ones(first, inverse, order, groups) if finder and interleaved else None
        if marginal:
            if flaw:
                refused.update(
                    {
                        name: f"{refused[name]}, and {flaw}"
                        for name in marginal.members
                        if name in refused
                    }
                )
                lost.update(marginal.members)
            else:
                groups.update(dict.fromkeys(marginal.members, marginal))
        exact = {name for name, group in groups.items() if group.is_exact}
        bounded = {name for name, group in groups.items() if group.bound}
        found = {"exact": exact, "bounded": bounded, "bound": bounded}
        for name in (
            name for name, rule in options.rules.items() if name not in found.get(rule, (name,))
        ):
            reason = (
                refused.get(name, "it is drawn in another order")
                if finder
                else "the options exclude it"
            )
            what = (
                "a latent with an exact conditional"
                if options.rules[name] == "exact"
                else "a latent under a bound"
            )
            raise ValueError(f"Expected {what}, as `rules` asks; got '{name}': {reason}.")
        improper = [
            name
            for name in first.net.latent
            if name in first.nodes and is_improper(first.nodes[name]["fn"])
        ]
        for name in improper:
            if name not in order or refused.get(name) == OPEN:
                raise ValueError(improper_posterior(name))
        doubts = dict.fromkeys(finder.open if finder else (), "no mode of it was found")
        if flaw and marginal:
            doubts.update(dict.fromkeys(marginal.members, flaw))
        doubts = {
            name: reason
            for name, reason in doubts.items()
            if name in improper and name not in groups
        }
        return cls(inverse, order, interleaved, groups, refused, lost, doubts)


def make_plan(first: FirstCall, derived: Derived) -> Plan:
    """Returns a guide's plan, fixed from then on, whatever data comes later.

    Args:
        first: the first call; derived: of it.

    Raises:
        ValueError: for options that name what the model lacks.
        NotImplementedError: for a site that no family covers.
    """
    net = first.net
    nodes = first.nodes
    options = first.options
    read_masked = first.read_where_masked()
    latents = _latents(first)
    inverse, order, interleaved, groups, refused, lost, doubts = derived
    near = {
        name
        for name, group in groups.items()
        if group.form == "Newton" or is_corrected(first, group)
    }
    bent = {name for name in near if groups[name].form != "Bernoulli"}
    families = {name: _family(first, name, bent) for name in order}
    check_names("embeddings", options.embeddings, first.data, "an observed site")
    encodings = {
        name: families.get(name) or data_features(first, name) for name in (*order, *first.data)
    }
    covariates = find_covariates(first)
    # A ``pyro.factor`` couples what it reads, but holds no value; and of a part no data set can be told.
    empty = {name for name in net.sites if name not in nodes or nodes[name]["value"].numel() == 0}
    reads = _in_reach(
        first, plan_reads(net, inverse, order, covariates.columns, empty | first.unread)
    )
    blocks = {
        name: block_of(first, name, inverse) if name not in bent else frozenset() for name in order
    }
    plates = first.plates._replace(fixed=frozenset().union(*blocks.values()))
    served = [name for name in order if name not in groups or name in near]
    learned = set(served) - near
    parts = element_reads(first, inverse, order) if first.options.simulated and learned else {}
    parts = {name: reads for name, reads in parts.items() if name in learned}
    factors = {
        name: factor_of(
            first, families[name], reads[name], blocks[name], plates, parts.get(name, {})
        )
        for name in served
    }
    turned = {group: in_turn(first, group, factors) for group in dict.fromkeys(groups.values())}
    groups = {name: turned[group] for name, group in groups.items()}
    anchored = (
        _anchored(first, families, inverse) if options.anchor and interleaved else frozenset()
    )
    used = {child for group in groups.values() for child in group.children if child not in empty}
    bounds = bound_factors(first, groups, reads, plates)
    networks = (*factors.values(), *bounds.values())
    used = used.union(*(nodes_of(source) for factor in networks for source in factor.sources))
    emitted = {*latents, *(name for name, site in nodes.items() if is_transparent(site))}

    def rule(name: str) -> Rule:
        made, mask = bare_rule(name), own_mask(nodes[name])
        if isinstance(made, Prior) or mask is None:
            return made
        return dataclasses.replace(
            made, is_flat=name in read_masked, is_untold=not bool(mask.any())
        )

    def bare_rule(name: str) -> Rule:
        if name in bent:
            return Located(name, groups[name], factor=factors[name], family=families[name])
        if name in near:
            learned = _learned(first, factors[name], families[name], True, plates)
            before = frozenset(groups[name].members).intersection(reads[name]) - {name}
            given = {"group": groups[name], "reads_prior": False, "before": tuple(sorted(before))}
            return Bounded(**{**vars(learned), **given})
        if name in groups:
            return Exact(name, groups[name])
        if name in factors:
            return _learned(first, factors[name], families[name], name in anchored, plates)
        return Prior(name)

    return Plan(
        bayesnet=net,
        inverse=inverse,
        plates=plates,
        sites={
            name: _site_plan(first, name, encodings.get(name), name in emitted)
            for name in nodes
            if name in first.frames or name in emitted
        },
        rules={name: rule(name) for name in nodes if name in emitted},
        order=tuple(order),
        interleaved=interleaved,
        read=tuple(name for name in first.data if name in used),
        semi_observed=first.semi_observed,
        masked=any(own_mask(nodes[name]) is not None for name in emitted),
        names=frozenset(name for name, site in nodes.items() if site["type"] == "sample"),
        covariates=covariates._replace(
            columns={
                name: found
                for name, found in covariates.columns.items()
                if {name, covariates_of(name)} & used
            }
        ),
        map_plans=first.found.map_plans,
        factory=first.factory(order),
        refused=refused,
        lost=frozenset(lost),
        doubts=doubts,
        bounds=bounds,
        vectorized=isinstance(first.model, Vectorized),
    )


def _in_reach(first: FirstCall, reads: Mapping[str, dict[Any, Read]]) -> dict[str, dict[Any, Read]]:
    """Returns what each factor reads, without latents that are too large to be read, and of these nothing but the data
    of their own instances: what is the same in every step says no more than their parameters do.
    """
    names = first.apart
    left = {
        name: {node: read for node, read in each.items() if node not in names}
        for name, each in reads.items()
    }
    for name in names.intersection(left):
        data = first.frames[name] and {*first.data, *map(covariates_of, first.data)}
        left[name] = {node: read for node, read in left[name].items() if node in data}
    return left


def _site_plan(first: FirstCall, name: str, encoding: Any, emitted: bool) -> SitePlan:
    site = first.nodes[name]
    return SitePlan(
        plates=first.frames.get(name, frozenset()),
        event_dim=site["fn"].event_dim,
        encoding=encoding,
        initial=first_instance(site["value"], site) if emitted else None,
        allows_nan=name in first.data and allows_nan(site),
    )


def _latents(first: FirstCall) -> list[str]:
    latents = [name for name in first.net.latent if not first.net.sites[name].marginalized]
    if not latents and not is_blocked(first.model):
        observed = first.net.observed
        # no warning of Python's, as Pyro's own guides are silent here
        logging.getLogger(__name__).warning(
            "Expected a model with at least one latent sample site; got a model with %s, for which the guide is "
            "empty. If a site shall be inferred, do not pass it a value at the guide's first call, or name it in "
            "`blocks`.",
            "observed sites only: " + ", ".join(map(repr, observed)) if observed else "no sites",
        )
    return latents


def _learned_order(first: FirstCall, inverse: Inverse) -> list[str]:
    """Returns the latents that are not drawn from the model, in the inverse's sampling order."""
    predictive = frozenset(inverse.predictive) - first.found.hidden_randomness
    # With blocks, factors may read some of these, which then have to be factors as well.
    read = predictive
    while read:
        learned = [name for name in inverse.order if name not in predictive]
        read = predictive.intersection(u for name in learned for u in inverse.parents[name])
        predictive -= read
    return [name for name in reversed(inverse.order) if name not in predictive]


def _program_order(
    first: FirstCall, inverse: Inverse, order: list[str], groups: Mapping[str, ConjugateGroup]
) -> tuple[list[str], bool, bool]:
    """Returns latents in an order in which runs of the model can draw them, whether there is one, and whether groups
    come last in it.

    That is program order, except that members of a group come together: where the first of them does, or last.
    """
    rank = {name: i for i, name in enumerate(first.nodes)}
    observed = frozenset(first.net.observed)
    starts = {name: min(map(rank.__getitem__, group.members)) for name, group in groups.items()}
    for last in (False, True):
        of_groups = dict.fromkeys(starts, len(rank)) if last else starts
        keys = {name: (of_groups.get(name, rank[name]), order.index(name)) for name in order}
        parents = {name: set(inverse.parents[name]) - observed for name in order}
        if all(keys[parent] < keys[name] for name in order for parent in parents[name]):
            return sorted(order, key=keys.__getitem__), True, last
    return order, False, False


def _family(first: FirstCall, name: str, near: Collection[str]) -> Family:
    site, spec = first.nodes[name], first.options.families
    if name in near:
        return CorrectionFamily(name, site["fn"], site["value"])
    if isinstance(spec, Mapping):
        check_names("families", spec, first.net.latent, "a latent site")
        spec = spec.get(name)
    if spec is None and not first.options.simulated and type_of(site["fn"]).given == "temperature":
        spec = "normal"  # which has AutoNormal's among it, as a relaxed type has not
    return make_family(spec, name, site["fn"], site["value"], first.within(name))


def _learned(
    first: FirstCall, factor: Factor, family: Family, anchored: bool, plates: Plates
) -> Learned:
    """Returns the rule of a latent that networks serve.

    In a guide that is trained on data, a factor whose prior other latents move is that prior times evidence of its own.
    """
    moved = not set(first.net.latent).isdisjoint(first.net.graph.predecessors(factor.name))
    fits = not first.options.simulated and not factor.sequential and family.takes_evidence
    return Learned(
        factor.name,
        reads_prior=anchored or family.varies,
        factor=factor,
        family=family,
        anchored=anchored,
        expert=anchored and moved and fits,
        dims=tuple(plates.dims[plate] for plate in factor.joint),
        sizes=tuple(plates.sizes[plate] for plate in factor.joint),
    )


def _with_all_read(group: ConjugateGroup, inverse: Inverse, order: Sequence[str]) -> ConjugateGroup:
    """Returns a group that needs all latents which those that it needs are drawn from, too, and all before it in an
    order, if there is one, as steps of networks are taken in that.
    """
    first = min((order.index(name) for name in group.members if name in order), default=0)
    needed = sorted(group.needed.union(order[:first]).difference(group.members))
    for name in needed:  # which grows
        read = set(inverse.parents.get(name, ())).difference(
            inverse.net.observed, group.members, needed
        )
        needed += sorted(read)
    return group._replace(needed=frozenset(needed))


def _finder(first: FirstCall, cut: Mapping[str, str]) -> Finder | None:
    """Returns what finds exact conditionals, unless the options say that there shall be none."""
    options = first.options
    given = options.families or {}
    if not (options.anchor and options.exact and isinstance(given, Mapping)):
        return None
    hidden = first.found.hidden_randomness
    learned = [name for name, rule in options.rules.items() if rule == "learned"]
    own = {name: first.nodes[name]["value"] for name in first.net.sites if name in first.nodes}
    seen = set().union(*(nx.ancestors(first.net.graph, name) for name in first.net.observed))
    return Finder(
        net=first.net,
        nodes=first.nodes,
        frames=first.frames,
        nesting=first.plates.nesting,
        subsampled=first.plates.partial,
        unread=first.unread,
        excluded=first.semi_observed.union(hidden, first.passing, learned, given),
        predictive=set(first.net.latent) - seen,
        read_masked=first.read_where_masked(),
        is_compiled=first.is_compiled,
        bounds={name: rule for name, rule in options.rules.items() if rule in ("bounded", "bound")},
        cut=cut,
        run=first.run,
        draws=[own, *first.draws[:6]],
    )


def _anchored(
    first: FirstCall, families: Mapping[str, Family], inverse: Inverse
) -> Collection[str]:
    """Returns the latents whose prior the guide knows when it draws them: a function of what their factor reads.

    An inverse that drops an edge of the model (mean field) shall not get it back by the anchor. In a guide that is
    trained on data a prior that nothing moves is none if it is bounded: most of its spread in unconstrained space
    may be one tail, and scales in units of it would be noise at rates that suit Pyro's guides.
    """
    given = frozenset(first.net.observed)

    def known(name: str) -> bool:
        parents = frozenset(first.net.graph.predecessors(name))
        real = peel_support(support_of(first.nodes[name]["fn"]))[0] is constraints.real
        return (first.options.simulated or real or bool(parents)) and parents <= given.union(
            inverse.parents[name]
        )

    return {
        name
        for name, family in families.items()
        if name not in first.found.hidden_randomness
        and not isinstance(family, CorrectionFamily)
        and known(name)
        and family.anchor(first.nodes[name]["fn"]) is not None
    }
