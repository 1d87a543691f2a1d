"""`plan_factors`: what networks give parameters for, what each of them reads, and how elements depend on each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from pyro_nami.deriving.bounded import LinearBernoulli
from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import TOLERANCE, Expansion
from pyro_nami.deriving.in_turn import InTurn
from pyro_nami.factors.bounds import bound_for
from pyro_nami.factors.family import Family
from pyro_nami.factors.registry import make_family
from pyro_nami.factors.types import type_of
from pyro_nami.factors.unconstrained import CorrectionFamily
from pyro_nami.graph.elimination import eliminate
from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.network import BayesNet
from pyro_nami.graph.sites import Site
from pyro_nami.guide.columns import find_covariates
from pyro_nami.guide.element_reads import ElementRows, element_reads, without_predictive
from pyro_nami.guide.first_call import FirstCall
from pyro_nami.guide.options import check_names
from pyro_nami.guide.plan import Covariates, SamplingOrder
from pyro_nami.guide.rules import order_of
from pyro_nami.guide.series import SeriesPlan, plan_series
from pyro_nami.messages import warn
from pyro_nami.parameters.conditioning import (
    Plates,
    Read,
    covariates_of,
    nodes_of,
    plan_sources,
    site_of,
)
from pyro_nami.parameters.factor_groups import Dependence, Factor
from pyro_nami.parameters.free_parameters import MOST_COUPLED

__all__ = ["PlannedFactors", "plan_factors"]

# Pairs of an element of the latents and one of the data, in one instance, up to which binary latents are drawn in turn.
# Each draw holds a number for each pair: with ten times more, a thousand draws take over a gigabyte; with ten times
# fewer, 50 causes of 50 symptoms are drawn without explaining each other away.
MOST_PAIRS = 2e4


class PlannedFactors(NamedTuple):
    """The factors of learned and corrected latents, and what they read."""

    families: dict[str, Family]  # of all latents in sampling order
    factors: dict[str, Factor]  # of latents whose parameters networks give, or correct
    bounds: dict[str, Factor]  # observed site -> the factor that gives its bound's parameters
    groups: dict[str, ConjugateGroup]  # derived groups, those of binary latents with their turns
    reads: dict[str, dict[Any, Read]]
    plates: Plates
    covariates: Covariates
    read: set[str]  # observed sites that some factor or group reads
    series: SeriesPlan | None = None  # of states that networks learn


def plan_factors(first: FirstCall, order: SamplingOrder) -> PlannedFactors:
    """Returns the factors of learned and corrected latents: their families, and what they read."""
    groups, inverse, loops = order.groups, order.inverse, first.program.loops
    states = loops.states.keys() if loops.is_learned else ()
    latents = [name for name in order.latents if name not in states]
    learned = [name for name in latents if name not in groups]
    corrected = {
        name
        for name, group in groups.items()
        if group.is_located and not group.is_loop or _is_corrected(first, group)
    }
    # latents whose Normals about a mode networks bend
    bent = {name for name in corrected if groups[name].form != "Bernoulli"}
    families = {name: _family(first, name, bent) for name in latents}
    check_names("embeddings", first.options.embeddings, first.data, "an observed site")
    covariates = find_covariates(first)
    # ``pyro.factor`` sites, and empty data
    empty = {
        name
        for name in first.net.sites
        if name not in first.nodes or first.nodes[name]["value"].numel() == 0
    }
    # The data of a loop are many numbers. Those of a learned loop have a summary, which the first family holds.
    unsaid = loops.parts[2:] if states else loops.parts
    unread = empty | first.unread | {held.name for held in unsaid}
    planned = _plan_reads(first.net, inverse, order.latents, covariates.columns, unread)
    reads = _in_reach(first, planned)
    blocks = {
        name: frozenset() if name in bent else _block_of(first, name, inverse) for name in latents
    }
    plates = first.plates._replace(fixed=frozenset().union(*blocks.values()))
    is_by_element = first.options.simulated and learned and not states
    parts = element_reads(first, inverse, latents) if is_by_element else {}
    factors = {
        name: _factor_of(
            first,
            families[name],
            reads[name],
            blocks[name],
            plates,
            {} if name in corrected else parts.get(name, {}),
        )
        for name in latents
        if name in corrected or name not in groups
    }
    turned = {group: _in_turn(first, group, factors) for group in dict.fromkeys(groups.values())}
    groups = {name: turned[group] for name, group in groups.items()}
    bounds = _bound_factors(first, groups, reads, plates)
    used = {child for group in groups.values() for child in group.children if child not in empty}
    for factor in (*factors.values(), *bounds.values()):
        used.update(*map(nodes_of, factor.sources))
    series = None
    for name in states:
        series = plan_series(first, reads[name], plates)
        used.update(series.data, series.given)
    return PlannedFactors(
        families, factors, bounds, groups, reads, plates, covariates, used, series
    )


def _family(first: FirstCall, name: str, near: Collection[str]) -> Family:
    site, spec = first.nodes[name], first.options.families
    if name in near:
        return CorrectionFamily(name, site["fn"], site["value"])
    if isinstance(spec, Mapping):
        check_names("families", spec, first.net.latent, "a latent site")
        spec = spec.get(name)
    if spec is None and not first.options.simulated and type_of(site["fn"]).is_hard:
        spec = "normal"  # which AutoNormal has, too
    return make_family(spec, name, site["fn"], site["value"])


def _in_reach(first: FirstCall, reads: Mapping[str, dict[Any, Read]]) -> dict[str, dict[Any, Read]]:
    """Returns what each factor reads, without latents that are too large to be read.

    Factors of such latents read the data of their own instances alone.
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


def _plan_reads(
    net: BayesNet,
    inverse: Inverse,
    order: Sequence[str],
    columns: Collection[str],
    empty: Collection[str],
) -> dict[str, dict[Hashable, Read]]:
    """Returns factor -> what it reads: its parents in the inverse, and covariates that elimination connects it with.

    Covariates are observed roots with an edge to their site, so the algebra of the inverse says who reads them. Latents
    come in sampling order, ``columns`` are sites with covariates, ``empty`` those without values to read.
    """
    kept, eliminated = without_predictive(net, inverse, order)
    sites, edges = dict(kept.sites), list(kept.edges)
    for name in columns:
        if name in kept.sites:
            node = covariates_of(name)
            sites[node] = Site(node, plates=kept.sites[name].plates, observed=True)
            edges.append((node, name))
    parents, _, rows = eliminate(BayesNet(sites, edges, net.plate_sizes, net.nesting), eliminated)
    reads = {}
    for name in order:
        found = {u: label for u, label in parents[name].items() if u not in net.sites}
        own = {u: label for u, label in inverse.parents[name].items() if u not in empty}
        reads[name] = {
            u: Read(label, rows[name].get(u, frozenset())) for u, label in {**own, **found}.items()
        }
    return reads


def _block_of(first: FirstCall, name: str, inverse: Inverse) -> frozenset[str]:
    """Returns the plates of a site whose instances depend on each other given the data, and are drawn as one block.

    A plate that another of the site's plates determines adds nothing: instances of that one lie in it already.
    """
    block = frozenset(inverse.joint[name]) & first.frames[name]
    if not block or first.within(name) != "independent":
        return block
    if name not in first.apart:
        plates = " and ".join(map(repr, sorted(block)))
        warn(
            f"The instances of '{name}' in plate {plates} depend on each other given the data; "
            'within="independent" gives this up, and draws each given its own data alone.'
        )
    return frozenset()


def _factor_of(
    first: FirstCall,
    family: Family,
    reads: Mapping[Any, Read],
    joint: frozenset[str],
    plates: Plates,
    parts: Mapping[Any, ElementRows],
) -> Factor:
    """Returns the factor of a latent: what its network reads, and how its elements depend on each other.

    Args:
        reads: what it reads, and ``parts`` which elements of that, see `element_reads`.
        joint: plates whose instances form one block; ``plates`` are the model's.
    """
    name = family.name
    frames = {node: first.frames[site_of(node)] for node in reads}
    batch = plates.closure(first.frames[name] - joint)
    flattened = plates.sort(joint)
    elements = family.num_elements * math.prod(plates.sizes[plate] for plate in flattened)
    # What the block couples, its members read across.
    coupled = plates.closure(joint)
    reads = {
        node: read._replace(across=read.across | (coupled & plates.closure(frames[node])) - batch)
        for node, read in reads.items()
    }
    return Factor(
        name,
        batch,
        {plate: (plates.dims[plate], plates.sizes[plate]) for plate in flattened},
        elements,
        family.num_params,
        family.num_features,
        plan_sources(batch, reads, frames, plates, joint),
        list(family.locations),
        _dependence(first, family, elements, parts),
        parts=parts,
    )


def _dependence(
    first: FirstCall, family: Family, elements: int, parts: Mapping[Any, Any]
) -> Dependence:
    """Returns how the elements of a latent depend on each other given the data; see `_factor_of`."""
    name = family.name
    is_plain = first.within(name) != "autoregressive" or family.coupling == "none"
    if is_plain or elements < 2 or not any(map(any, parts.get(name, [[True]]))):
        return "independent"
    if family.stack is not None and name not in parts:
        return family.stack  # splines in sequence make all elements depend on each other
    if first.options.simulated or family.coupling != "linear":
        return "sequential"
    if elements <= MOST_COUPLED:
        return "linear"
    warn(
        f"Site '{name}' has {elements} elements that depend on each other given the data. As these are more than "
        f"{MOST_COUPLED}, they are drawn independently, without their correlations."
    )
    return "independent"


def _bound_factors(
    first: FirstCall,
    groups: Mapping[str, ConjugateGroup],
    reads: Mapping[str, Mapping[Any, Read]],
    plates: Plates,
) -> dict[str, Factor]:
    """Returns observed child -> the factor whose network gives its bound's parameters, one for each element.

    They read what all latents read whose conditionals are by that bound.
    """
    found = {}
    for group in groups.values():
        for child in group.children if group.bound == "bounded" else ():
            fn = first.nodes[child]["fn"]
            members = [name for name in group.members if first.net.graph.has_edge(name, child)]
            nodes = set.intersection(*(set(reads[name]) for name in members)) - set(group.members)
            if bound_for(fn) is None:
                continue
            batch = plates.closure(first.frames[child])
            frames = {node: first.frames[site_of(node)] for node in nodes}
            sources = plan_sources(batch, {node: Read() for node in nodes}, frames, plates)
            found[child] = Factor(
                ("bound", child), batch, {}, fn.event_shape.numel(), 1, 1, sources
            )
    return found


def _is_corrected(first: FirstCall, group: ConjugateGroup) -> bool:
    """Whether networks correct conditionals by a bound: where the inverse lets latents depend on each other."""
    options = first.options
    return (
        group.bound == "bounded"
        and options.inverse != "mean_field"
        and options.within == "autoregressive"
    )


def _in_turn(
    first: FirstCall, group: ConjugateGroup, factors: Mapping[str, Factor]
) -> ConjugateGroup:
    """Returns the group with its binary members drawn in turn, if the conditions below hold; else the group as it is.

    Conditionals have to be corrected, instances to be told apart where children tell them apart, elements and data to
    be few enough, and the model to run at all unit vectors at once, with predictors linear in them.
    """
    if group.form != "Bernoulli" or not _is_corrected(first, group):
        return group
    frames, own = first.frames, [factors[name] for name in group.members]
    apart = all(
        frames[factor.name] - set(factor.joint) <= frames[child]
        and frames[child].isdisjoint(factor.joint)
        for factor in own
        for child in group.children
    )
    events = sum(first.nodes[child]["fn"].event_shape.numel() for child in group.children)
    if not apart or events * sum(factor.num_elements for factor in own) > MOST_PAIRS:
        return group
    orders = {factor.name: order_of(factor) for factor in own}
    nesting, draw = first.plates.nesting, first.draws[0]
    bounded: Expansion = LinearBernoulli(group, (1,) * nesting, nesting, False, orders=orders)
    try:
        units = bounded.solve(bounded.sites(first.run, draw))
        assert isinstance(units, InTurn)
        units.solve(units.sites(first.run, draw))
        return group._replace(in_turn=units.error() < TOLERANCE)
    except Exception:  # noqa: BLE001  whatever a model does at several points
        return group
