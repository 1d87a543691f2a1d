"""`make_plan`: from the first call to a guide's plan: what each latent reads, and by which rule it is drawn.

`find_order` comes first (`order`). Then follow the factors that networks serve (`factor_plan`), and a rule for each
latent. To serve latents by another rule, say in `_rule` when it applies; the rule itself is a class in `rules`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping

from torch.distributions import constraints

from pyro_nami.factors.bijections import peel_support, support_of
from pyro_nami.factors.family import Family
from pyro_nami.graph.inverse import Inverse
from pyro_nami.guide.factor_plan import PlannedFactors, plan_factors
from pyro_nami.guide.first_call import FirstCall, data_features
from pyro_nami.guide.plan import Plan, ProgramPlan, SamplingOrder, SitePlan
from pyro_nami.guide.rules import (
    Bounded,
    Exact,
    Learned,
    LearnedStates,
    Located,
    Prior,
    Rule,
)
from pyro_nami.messages import quoted
from pyro_nami.parameters.conditioning import covariates_of
from pyro_nami.program.first_run import allows_nan, is_transparent
from pyro_nami.program.masks import own_mask
from pyro_nami.program.plate_dims import first_instance
from pyro_nami.program.vectorized import Vectorized
from pyro_nami.reading.extraction import is_blocked

__all__ = ["make_plan"]


def make_plan(first: FirstCall, order: SamplingOrder) -> Plan:
    """Returns a guide's plan, fixed from then on, whatever data come later.

    Args:
        first: the first call.
        order: the sampling order that was found for it.

    Raises:
        ValueError: for options that name what the model lacks.
        NotImplementedError: for a site that no family covers.
    """
    nodes = first.nodes
    transparent = {name for name, site in nodes.items() if is_transparent(site)}
    emitted = transparent.union(_latents(first))
    found = plan_factors(first, order)
    used = found.read
    columns = {
        name: columns
        for name, columns in found.covariates.columns.items()
        if {name, covariates_of(name)} & used
    }
    sites = {
        name: _site_plan(first, found, name, name in emitted)
        for name in nodes
        if name in first.frames or name in emitted
    }
    program = ProgramPlan(
        names=frozenset(name for name, site in nodes.items() if site["type"] == "sample"),
        parameters=frozenset(name for name, site in nodes.items() if site["type"] == "param"),
        loops=first.program.loops,
        computed=first.program.computed,
        vectorized=isinstance(first.program.model, Vectorized),
    )
    return Plan(
        bayesnet=first.net,
        program=program,
        sampling=order._replace(groups=found.groups),
        plates=found.plates,
        sites=sites,
        rules=_rules(first, order, found, emitted),
        bounds=found.bounds,
        read=tuple(name for name in first.data if name in used),
        semi_observed=first.semi_observed,
        covariates=found.covariates._replace(columns=columns),
        map_plans=first.found.map_plans,
        factory=first.factory(order.latents),
    )


def _rules(
    first: FirstCall, order: SamplingOrder, found: PlannedFactors, emitted: Collection[str]
) -> dict[str, Rule]:
    """Returns the rule of every site that the guide emits, in program order."""
    anchored: Collection[str] = ()
    if first.options.anchor and order.interleaved:
        anchored = _anchored(first, found.families, order.inverse)
    read_masked = first.read_where_masked()
    rules = {}
    for name in (name for name in first.nodes if name in emitted):
        rule = _rule(first, name, found, name in anchored)
        mask = own_mask(first.nodes[name])
        if mask is not None and not isinstance(rule, (LearnedStates, Prior)):
            is_untold = not bool(mask.any())
            rule = dataclasses.replace(rule, is_flat=name in read_masked, is_untold=is_untold)
        rules[name] = rule
    return rules


def _rule(first: FirstCall, name: str, found: PlannedFactors, anchored: bool) -> Rule:
    """Returns the rule of one latent, without regard to its mask."""
    group = found.groups.get(name)
    if found.series is not None and name == found.series.name:
        return LearnedStates(name, series=found.series)
    if name not in found.factors:
        return Prior(name) if group is None else Exact(name, group)
    if group is None:
        return _learned(first, name, found, anchored)
    if group.form == "Bernoulli":
        before = found.reads[name].keys() & set(group.members) - {name}
        learned = _learned(first, name, found, True)
        given = {"group": group, "reads_prior": False, "before": tuple(sorted(before))}
        return Bounded(**{**vars(learned), **given})
    return Located(name, group, factor=found.factors[name], family=found.families[name])


def _site_plan(first: FirstCall, found: PlannedFactors, name: str, emitted: bool) -> SitePlan:
    site, encoding = first.nodes[name], found.families.get(name)
    of_series = () if found.series is None else found.series.data
    if encoding is None and name in first.data and name not in of_series:
        encoding = data_features(first, name)
    return SitePlan(
        plates=first.frames.get(name, frozenset()),
        event_dim=site["fn"].event_dim,
        encoding=encoding,
        initial=first_instance(site["value"], site) if emitted else None,
        allows_nan=name in first.data and allows_nan(site),
        is_masked=emitted and own_mask(site) is not None,
    )


def _latents(first: FirstCall) -> list[str]:
    latents = [name for name in first.net.latent if not first.net.sites[name].marginalized]
    if not latents and not is_blocked(first.program.model):
        observed = first.net.observed
        # no warning of Python's, as Pyro's own guides are silent here
        logging.getLogger(__name__).warning(
            "Expected a model with at least one latent sample site; got a model with %s, for which the guide is "
            "empty. To infer a site, pass it no value at the guide's first call, or name it in "
            "`blocks`.",
            "observed sites only: " + quoted(observed) if observed else "no sites",
        )
    return latents


def _learned(first: FirstCall, name: str, found: PlannedFactors, anchored: bool) -> Learned:
    """Returns the rule of a learned latent.

    In a guide that is trained on data, a factor whose prior other latents move is that prior times evidence of its own.
    """
    factor, family = found.factors[name], found.families[name]
    moved = not set(first.net.latent).isdisjoint(first.net.graph.predecessors(name))
    fits = not first.options.simulated and not factor.sequential and family.takes_evidence
    return Learned(
        name,
        reads_prior=anchored or family.varies,
        factor=factor,
        family=family,
        anchored=anchored,
        expert=anchored and moved and fits,
    )


def _anchored(
    first: FirstCall, families: Mapping[str, Family], inverse: Inverse
) -> Collection[str]:
    """Returns the latents with an anchor: their priors are functions of what their factors read.

    An inverse that drops an edge of the model (mean field) shall not get it back by the anchor. In a guide that is
    trained on data a prior that nothing moves is none if it is bounded: most of its spread in unconstrained space
    may be one tail, and scales in units of it would be noise at rates that suit Pyro's guides.
    """
    found = set()
    for name in families.keys() - first.found.hidden_randomness:
        prior, parents = first.nodes[name]["fn"], set(first.net.graph.predecessors(name))
        is_real = peel_support(support_of(prior))[0] is constraints.real
        is_read = parents.issubset((*first.net.observed, *inverse.parents[name]))
        is_steady = first.options.simulated or is_real or parents
        if is_read and is_steady and families[name].anchor(prior) is not None:
            found.add(name)
    return found
