"""`find_loops`: the loops of a model whose sites repeat, by their names and by what provenance says they read.

Sites whose names differ in their last number are a family: ``z_0``, ``z_1``, ... The families of
states that are Normal, or discrete with a few values, are held as one site; each family of data is one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.poutine.util import site_is_factor

from pyro_nami.factors.wrappers import innermost
from pyro_nami.graph.network import BayesNet
from pyro_nami.graph.sites import NO_PLATES, Site
from pyro_nami.program.loops import NO_LOOPS, Loops, LoopSites, family_of, step_of
from pyro_nami.program.masks import is_masked
from pyro_nami.program.plate_dims import frames_of
from pyro_nami.program.series_sites import SeriesSites
from pyro_nami.program.site_values import num_values

__all__ = ["find_loops", "has_loop", "loop_families", "with_loops"]

# Steps of a loop from which its sites are held as one; ten times more leave loops of a dozen steps to forms that take
# 10 s, with fewer there is nothing to save.
SHORTEST = 8
# Elements of a block of states, as a season of a month by the day takes; the cost grows with its cube.
MOST_WIDTH = 32

Sites = Mapping[str, Any]
Parents = Mapping[str, Set[str]]


def has_loop(sites: Sites, learned: bool = False) -> bool:
    """Whether latents of a run look like the steps of a loop, by their names and distributions."""
    return bool(_families([name for name, site in sites.items() if _is_state(site, learned)]))


def loop_families(names: Collection[str]) -> frozenset[str]:
    """Returns the families of names that look like the steps of a loop; see `family_of`."""
    return frozenset(_families([*names]))


def find_loops(
    sites: Sites, parents: Parents, observed: Collection[str], learned: bool = False
) -> Loops:
    """Returns the loop of a model: its states as one site, and each family of data as one; none if there is none.

    Args:
        sites: of a run of the model, in program order.
        parents: site -> the earlier sites that it reads.
        observed: the sites with data.
        learned: whether networks are to say what the states are. These may then be masked, and of any size, and the
            loop of any length; all data that read states have to be in families that follow them step by step.
    """
    latents = [name for name in sites if name not in observed]
    families = _families([name for name in latents if _is_state(sites[name], learned)])
    # others, such as coefficients that all data read, may be parents of states
    linked = {key: names for key, names in families.items() if _is_linked(names, parents)}
    for chosen in (families, linked):
        members = [name for name in latents if any(name in names for names in chosen.values())]
        others = [name for name in latents if name not in members]
        if any(not parents[name].isdisjoint(members) for name in others):
            continue
        found = _loops_of(chosen, members, sites, parents, observed, learned)
        if found:
            return _of_any_length(found, parents) if learned else found
    return NO_LOOPS


def _loops_of(
    families: Mapping[str, Sequence[str]],
    members: Sequence[str],
    sites: Sites,
    parents: Parents,
    observed: Collection[str],
    learned: bool,
) -> Loops:
    """Returns states of some families as one site, and each family of data; none if they cannot be held so."""
    counts = {num_values(sites[name]["fn"]) or 0 for name in members}
    if len(counts) != 1 or not _is_uniform([sites[name] for name in members]):
        return NO_LOOPS
    places = _Places.of(members, sites)
    stems = dict.fromkeys(map(_stem, families))
    states = _states(f"{','.join(stems)}[time]", places, sites, parents, counts.pop(), learned)
    if states is None:
        return NO_LOOPS
    data = list(_data(places, sites, parents, observed))
    if learned:
        data = [held for held in data if min(held.reads) >= 0 and len(held.sites) >= SHORTEST]
    names = [states.name, *(held.name for held in data)]
    loose = set(observed).difference(*(held.sites for held in data))
    reads_loose = any(not places.ranges.keys().isdisjoint(parents[name]) for name in loose)
    is_loose = reads_loose or any(min(held.reads) < 0 for held in data)
    if is_loose and (states.values or learned):
        return NO_LOOPS
    if len(set(names)) < len(names) or not sites.keys().isdisjoint(names):
        return NO_LOOPS
    return Loops((states, *data))


def _is_linked(names: Sequence[str], parents: Parents) -> bool:
    """Whether a site of a family reads another one of it."""
    return any(not parents[name].isdisjoint(names) for name in names)


class _Places(NamedTuple):
    """The elements of a vector of states that sites stand for, in program order, and the sites' event shapes."""

    ranges: dict[str, range]
    events: tuple[torch.Size, ...]

    @classmethod
    def of(cls, members: Sequence[str], sites: Sites) -> _Places:
        ranges, end, events = dict[str, range](), 0, []
        for name in members:
            events.append(sites[name]["fn"].event_shape)
            ranges[name] = range(end, end + events[-1].numel())
            end = ranges[name].stop
        return cls(ranges, tuple(events))

    def read_by(self, name: str, parents: Parents) -> list[range]:
        """Returns the elements that a site reads, by site."""
        return [self.ranges[each] for each in parents[name] if each in self.ranges]


def _states(
    name: str, places: _Places, sites: Sites, parents: Parents, values: int, learned: bool
) -> LoopSites | None:
    """Returns the states as one site; None if they are not linked, or reach back too far."""
    back, span = 0, 1
    for site in sites:
        read = places.read_by(site, parents)
        if not read:
            continue
        first = min(place.start for place in read)
        if site in places.ranges:
            back = max(back, places.ranges[site].stop - 1 - first)
        else:
            span = max(span, max(place.stop for place in read) - first)
    ranges = places.ranges.values()
    width = max(back, span - 1, *map(len, ranges))
    while any(place.start // width < (place.stop - 1) // width for place in ranges):
        width += 1  # such that no site lies in two blocks
    if learned:
        whole = LoopSites(name, tuple(places.ranges), places.events, False, values=values)
        return whole if back else None
    is_wide = width > MOST_WIDTH or any(len(event) > 1 for event in places.events)
    if not back or is_wide or values and (back > 1 or span > 1):
        return None
    return LoopSites(name, tuple(places.ranges), places.events, False, width, back, span, values)


def _data(
    places: _Places, sites: Sites, parents: Parents, observed: Collection[str]
) -> Iterator[LoopSites]:
    """Yields each family of data that can be held as one."""
    data = [name for name in sites if name in observed and not site_is_factor(sites[name])]
    for key, names in _families(data, 1).items():
        events = tuple(sites[name]["fn"].event_shape for name in names)
        starts = [[place.start for place in places.read_by(name, parents)] for name in names]
        reads = tuple(min(each, default=-1) for each in starts)
        held = LoopSites(f"{_stem(key)}[time]", tuple(names), events, True, reads=reads)
        each = [sites[name] for name in names]
        if len(set(events)) == 1 and _is_uniform(each) and _can_be_stacked(held, each):
            yield held


def _of_any_length(loops: Loops, parents: Parents) -> Loops:
    """Returns loops that later calls may have with other steps; none if data do not follow the states step by step."""
    states, *data = loops.parts
    if not data:
        return NO_LOOPS
    steps = set(map(step_of, states.sites))
    found = [states._replace(families=tuple(_events(states).items()))]
    for held in data:
        read = {name: parents[name] & set(states.sites) for name in held.sites}
        shifts = {max(map(step_of, read[name])) - step_of(name) for name in held.sites}
        shift = shifts.pop()
        if shifts or not steps.issuperset(step_of(name) + shift for name in held.sites):
            return NO_LOOPS
        families = tuple(_events(held).items())
        found.append(held._replace(families=families, shift=shift, reads=()).at(held.sites))
    return Loops(tuple(found)) if all(map(_is_of_one_shape, found)) else NO_LOOPS


def _is_of_one_shape(held: LoopSites) -> bool:
    """Whether the sites of each family have one event shape."""
    return len(set(zip(map(family_of, held.sites), held.events))) == len(held.families)


def _events(held: LoopSites) -> dict[str, torch.Size]:
    """Returns family of names -> event shape of its sites."""
    return {family_of(name): event for name, event in zip(held.sites, held.events)}


def with_loops(net: BayesNet, loops: Loops) -> BayesNet:
    """Returns the network with the states, and the data, of loops as one site each.

    Edges within one of these are left out, and those from data to later states: given data are constants there.

    Raises:
        ValueError: states are read before the loop ends, by a latent that later ones depend on.
    """
    of: dict[Any, str] = {site: held.name for held in loops.parts for site in held.sites}
    series = {held.name: held.order for held in loops.parts if isinstance(held, SeriesSites)}
    lags = series or _lags(loops, net)
    sites: dict[Any, Site] = {}
    for name, site in net.sites.items():
        whole = of.get(name, name)
        if whole not in sites:
            support = frozenset(of.get(parent, parent) for parent in site.support_parents)
            sites[whole] = Site(
                whole,
                NO_PLATES if whole in series else site.plates,
                observed=site.observed,
                support_parents=support - {whole},
                marginalized=site.marginalized,
                lag=lags.get(whole),
            )
    rank = {name: i for i, name in enumerate(sites)}
    edges = dict.fromkeys((of.get(u, u), of.get(v, v)) for u, v in net.edges)
    between = [(u, v) for u, v in edges if u != v]
    forward = []
    for u, v in between:
        if rank[u] < rank[v]:
            forward.append((u, v))
        elif not sites[u].observed:
            raise ValueError(f"Expected '{u}' to end before '{v}' reads it.")
    return BayesNet(sites, forward, net.plate_sizes, net.nesting)


def _lags(loops: Loops, net: BayesNet) -> dict[str, int]:
    """Returns the `Site.lag` of the states, and of each family of data, of a loop."""
    steps = {site: step_of(site) for held in loops.states.values() for site in held.sites}
    together = {site: [step] for site, step in steps.items()}  # steps of states that it depends on
    for parent, site in net.edges:
        if parent in steps:
            together.setdefault(site, []).append(steps[parent])
    data = [held for held in loops.parts if held.is_observed]
    after = {
        held.name: min(step_of(name) - max(together.get(name, [0])) for name in held.sites)
        for held in data
    }
    back = max(max(found) - min(found) for found in together.values())
    return after | dict.fromkeys(loops.states, back)


def _is_state(site: Mapping[str, Any], learned: bool = False) -> bool:
    """Whether a site may be a state of a loop: Normal, or discrete with few values, and drawn by guides."""
    if site["type"] != "sample" or site["is_observed"] or is_masked(site) and not learned:
        return False
    if (site["infer"] or {}).get("enumerate") == "parallel":
        return False
    is_counted = num_values(site["fn"]) is not None and not site["fn"].event_shape
    return is_counted or type(innermost(site["fn"])) is dist.Normal


def _families(names: Sequence[str], fewest: int = SHORTEST) -> dict[str, list[str]]:
    """Returns names that differ in their last number, by what they share, if there are enough of them."""
    found = defaultdict(list)
    for name in names:
        key = family_of(name)
        if key != name:
            found[key].append(name)
    return {key: family for key, family in found.items() if len(family) >= fewest}


def _stem(key: str) -> str:
    return re.sub(r"[_\-.]*#[_\-.]*", "", key) or "state"


def _is_uniform(sites: Sequence[Mapping[str, Any]]) -> bool:
    """Whether sites are in the same vectorized plates, of one scale, and in no sequential plate."""
    frames, scale = frames_of(sites[0]), torch.as_tensor(sites[0]["scale"])
    return all(
        frames_of(site) == frames
        and len(site["cond_indep_stack"]) == len(frames)
        and bool((torch.as_tensor(site["scale"]) == scale).all())
        for site in sites
    )


def _can_be_stacked(held: LoopSites, sites: Sequence[Mapping[str, Any]]) -> bool:
    """Whether data of several steps have the log density that they have step by step."""
    try:
        whole = held.message(sites)
        apart = [
            torch.where(
                torch.as_tensor(True if site["mask"] is None else site["mask"]),
                site["fn"].log_prob(site["value"]),
                0.0,
            )
            for site in sites
        ]
        together = whole["fn"].log_prob(whole["value"])
        total = torch.stack(torch.broadcast_tensors(*apart)).sum(0)
        return bool(torch.isclose(together, total, rtol=1e-3, atol=1e-3).all())
    except (NotImplementedError, RuntimeError, ValueError, TypeError):
        return False
