"""`find_order`: the inverse that a guide samples by, and which latents have derived conditionals in it.

`search_forms` finds these; then `find_order` says which of the others come first.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.finder import COMPILED, Finder
from pyro_nami.deriving.refutation import OPEN, Refutation
from pyro_nami.deriving.relations import Relations
from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.inversion_methods import DIRECTIONS, INVERSIONS, nami
from pyro_nami.graph.network import BayesNet
from pyro_nami.guide.first_call import FirstCall
from pyro_nami.guide.first_latents import first_ones
from pyro_nami.guide.options import check_names
from pyro_nami.guide.plan import SamplingOrder
from pyro_nami.messages import quoted
from pyro_nami.program.flat_priors import improper_posterior, is_improper

__all__ = ["Search", "find_order", "invert", "search_forms"]


class Search(NamedTuple):
    """What a search for derived conditionals has found, before it is known which latents come first.

    Attributes:
        finder: that has found them; None if the options exclude it.
        order: by which latents would be sampled.
    """

    finder: Finder | None
    order: SamplingOrder


def find_order(first: FirstCall, search: Search, flaws: Mapping[str, str]) -> SamplingOrder:
    """Returns the sampling order that the first call and the options give.

    Args:
        first: the first call.
        search: what was found of it.
        flaws: form -> why the latents that come first are not to be found by it.

    Raises:
        ValueError: for a latent that ``rules`` asks an exact conditional of and that has none, or whose improper prior
            has no posterior.
    """
    finder, found_order = search
    inverse, order, interleaved, groups, *_ = found_order
    groups = dict(groups)
    refused = dict(finder.tests.refused) if finder else {}
    lost = set(finder.tests.lost) if finder else set()
    compiled = [name for name in refused if refused[name] == COMPILED and name not in groups]
    if compiled:
        logging.getLogger(__name__).warning(
            "These latents are learned, as the objective is compiled; without compilation modes are derived: %s.",
            quoted(sorted(compiled)),
        )
    if finder and interleaved:
        local = {name: group for name, group in groups.items() if not _integrates(first, group)}
        found = first_ones(first, inverse, order, local, flaws)
        if first.options.is_weighted and found is not None and found.form == "collapsed":
            groups = local
        else:
            found = first_ones(first, inverse, order, groups, flaws)
        rest = found.members if found else [name for name in order if name not in groups]
        groups.update(dict.fromkeys(found.members, found) if found else {})
        for flaw in flaws.values():
            told = refused.keys() & set(rest)
            refused.update({name: f"{refused[name]}, and {flaw}" for name in told})
            lost.update(rest)
    _check_rules(first, groups, refused if finder else None)
    improper = [
        name
        for name in first.net.latent
        if name in first.nodes and is_improper(first.nodes[name]["fn"])
    ]
    for name in improper:
        if name not in order or refused.get(name) == OPEN:
            raise ValueError(improper_posterior(name))
    doubts = dict.fromkeys(finder.tests.open if finder else (), "no mode of it was found")
    for flaw in flaws.values():
        doubts.update(dict.fromkeys(order, flaw))
    doubts = {name: doubts[name] for name in improper if name in doubts and name not in groups}
    return found_order._replace(groups=groups, refused=refused, lost=lost, doubts=doubts)


def _integrates(first: FirstCall, group: ConjugateGroup) -> bool:
    """Whether a latent outside of plates has a conditional that integrates over others in plates about their mode."""
    name, *others = group.members
    local = [other for other in others if first.frames[other]]
    return group.has_mode and not first.frames[name] and bool(local)


def search_forms(first: FirstCall, cut: Mapping[str, str], skipped: Mapping[str, str]) -> Search:
    """Returns the inverse with most derived conditionals, and these.

    Args:
        first: the first call.
        cut: latents whose priors are not to be taken as flat -> why.
        skipped: latents of which no form is tried -> why.
    """
    options = first.options
    check_names("rules", options.rules, first.net.latent, "a latent site")
    finder = _finder(first, cut, skipped)
    is_free = options.inverse == "auto" and options.blocks is None
    block = finder.block() if finder and is_free else []
    candidates: list[Sequence[Sequence[str]]] = [block]
    if first.program.loops.is_learned:
        # states are drawn in a run of the model, and so all latents are
        candidates = [[[name] for name in reversed([*first.nodes]) if name in first.net.latent]]
    if block:
        # If the latents that are left come in another order than the program's, they are taken one by one.
        candidates.append([*block[:-1], *([name] for name in reversed(block[-1]))])
    for blocks in candidates:
        inverse = invert(first.net, options.inverse, options.blocks, blocks)
        order = _learned_order(first, inverse)
        groups = finder.groups(inverse, order) if finder else {}
        order, interleaved, is_last = _program_order(first, inverse, order, groups)
        if interleaved:
            break
    if not interleaved:
        return Search(finder, SamplingOrder(inverse, tuple(order), False, {}))
    exact = tuple(name for name in inverse.order if block and name in groups)
    inverse = dataclasses.replace(inverse, exact=exact)
    before = order if is_last else ()
    groups = {name: _with_all_read(group, inverse, before) for name, group in groups.items()}
    return Search(finder, SamplingOrder(inverse, tuple(order), True, groups))


def invert(
    net: BayesNet,
    inverse: Any,
    blocks: Sequence[Sequence[str]] | None,
    parts: Sequence[Sequence[str]] = (),
) -> Inverse:
    """Returns the inverse that an option ``inverse`` stands for.

    ``parts`` are blocks that ``"auto"`` prefers, as more conditionals are known exactly then.
    """
    if parts:
        return nami(net, direction="reverse", blocks=parts)
    if isinstance(inverse, str) and inverse in DIRECTIONS:
        return nami(net, direction=inverse, blocks=blocks)
    if blocks is not None:
        raise ValueError(
            f"Expected an inverse that honours `blocks`, one of {quoted(DIRECTIONS)}; got {inverse!r}."
        )
    if isinstance(inverse, str):
        if inverse not in INVERSIONS:
            names = quoted((*DIRECTIONS, *INVERSIONS))
            raise ValueError(
                f"Expected `inverse` to be one of {names}, an Inverse or a callable; got {inverse!r}."
            )
        return INVERSIONS[inverse](net)
    result = inverse if isinstance(inverse, Inverse) else inverse(net)
    if not isinstance(result, Inverse):
        raise TypeError(
            f"Expected `inverse` to be, or to return, an Inverse; got {type(result).__name__}."
        )
    missing = set(net.latent).symmetric_difference(result.net.latent)
    if missing:
        raise ValueError(
            f"Expected an inverse over the model's latent sites {list(net.latent)}; got one that differs in "
            f"{sorted(map(str, missing))}. Invert `extract_bayesnet(model, ...)` of the same model."
        )
    return result


def _check_rules(
    first: FirstCall, groups: Mapping[str, ConjugateGroup], refused: Mapping[str, str] | None
) -> None:
    """Raises where ``rules`` asks for a conditional that was not derived; ``refused`` is None if none is searched."""
    exact = {name for name, group in groups.items() if group.is_exact}
    bounded = {name for name, group in groups.items() if group.bound}
    found = {"exact": exact, "bounded": bounded, "bound": bounded}
    for name, rule in first.options.rules.items():
        if rule not in found or name in found[rule]:
            continue
        reason = "the options exclude it"
        if refused is not None:
            reason = refused.get(name, "it is drawn in another order")
        asked = "an exact conditional" if rule == "exact" else "a bound"
        with_or_under = "with" if rule == "exact" else "under"
        raise ValueError(
            f"Expected a latent {with_or_under} {asked}, as `rules` asks; got '{name}': {reason}."
        )


def _finder(first: FirstCall, cut: Mapping[str, str], skipped: Mapping[str, str]) -> Finder | None:
    """Returns the finder of derived conditionals; None if the options exclude them."""
    options = first.options
    given = options.families or {}
    is_plain = options.anchor and options.exact and isinstance(given, Mapping)
    if not is_plain or first.program.loops.is_learned:
        return None
    own = {name: first.nodes[name]["value"] for name in first.net.sites if name in first.nodes}
    return Finder(
        tests=Refutation(
            first.plates.nesting,
            first.run,
            [own, *first.draws[:6]],
            is_given=not options.simulated,
            is_weighted=options.is_weighted,
        ),
        relations=Relations(first.net, first.nodes, first.frames),
        subsampled=first.plates.partial,
        unread=first.unread,
        excluded={**_excluded(first), **skipped},
        is_compiled=first.is_compiled,
        bounds={name: rule for name, rule in options.rules.items() if rule in ("bounded", "bound")},
        located=frozenset(name for name, rule in options.rules.items() if rule == "located"),
        bent=dict(cut),
        states=first.program.loops.states,
    )


def _excluded(first: FirstCall) -> dict[str, str]:
    """Returns latent -> reason, for latents that options or hidden randomness exclude from derivation."""
    options, hidden = first.options, first.found.hidden_randomness
    found = {
        latent: f"the density of '{site}' is random at equal values of all sites, as with dropout"
        for site in sorted(hidden)
        for latent in first.net.graph.predecessors(site)
    }
    learned = [name for name, rule in options.rules.items() if rule == "learned"]
    reasons = {
        **dict.fromkeys(hidden, "its density is random at equal values, as with dropout"),
        **dict.fromkeys(first.passing, "other calls may lack it"),
        **dict.fromkeys(first.semi_observed, "it may be data in other calls, or `blocks` names it"),
        **dict.fromkeys(options.families or {}, "`families` says how it is learned"),
        **dict.fromkeys(learned, "`rules` asks for that"),
    }
    masked = dict.fromkeys(
        first.read_where_masked(), "its prior is masked where something reads it"
    )
    for name, reason in reasons.items():
        if name not in first.net.graph:
            continue  # options are checked elsewhere
        drawn = [data for data in first.net.graph.successors(name) if _is_drawn(first, data)]
        masked[name] = f"data '{min(drawn)}' have no density" if drawn else reason
    return found | masked


def _is_drawn(first: FirstCall, name: Any) -> bool:
    """Whether a site's data come from a simulator, which says that it has no density."""
    return name in first.nodes and not getattr(first.nodes[name]["fn"], "has_density", True)


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
    """Returns the latents in an order in which runs of the model can draw them.

    Also whether there is such an order, and whether groups come last in it.

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


def _with_all_read(group: ConjugateGroup, inverse: Inverse, order: Sequence[str]) -> ConjugateGroup:
    """Returns a group whose ``needed`` is complete: with the latents that needed ones are drawn from.

    With an ``order``, also with all latents before the group, as networks take their steps in that order.
    """
    first = min((order.index(name) for name in group.members if name in order), default=0)
    needed = sorted(group.needed.union(order[:first]).difference(group.members))
    for name in needed:  # which grows
        read = set(inverse.parents.get(name, ())).difference(
            inverse.net.observed, group.members, needed
        )
        needed += sorted(read)
    return group._replace(needed=frozenset(needed))
