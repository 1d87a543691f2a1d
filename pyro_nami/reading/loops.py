"""`find_loops`: the loops of a model whose sites repeat, by their names and by what provenance says they read.

Sites whose names differ in their last number are a family: ``z_0``, ``z_1``, ... The families of
states that are Normal, or discrete with a few values, are held as one site; each family of data is one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.util import site_is_factor

from pyro_nami.factors.wrappers import innermost
from pyro_nami.graph.network import BayesNet
from pyro_nami.graph.sites import NO_PLATES, Site
from pyro_nami.program.first_run import is_latent
from pyro_nami.program.loops import NO_LOOPS, Loops, LoopSites, family_of, step_of
from pyro_nami.program.masks import is_masked, log_density_of
from pyro_nami.program.plate_dims import frames_of
from pyro_nami.program.runner import Message, Sites
from pyro_nami.program.site_values import num_values

__all__ = ["find_loops", "has_loop", "loop_families", "with_loops"]

# Steps of a loop from which its sites are held as one; ten times more leave loops of a dozen steps to forms that take
# 10 s, with fewer there is nothing to save.
SHORTEST = 8
# Elements of a block of states, at most, where it holds more than half of them. At ten times more, coefficients that
# all data read are taken for states, and a call takes seconds; at ten times fewer, ten states whose sums data read are
# not.
MOST_WIDTH = 32

Parents = Mapping[str, Set[str]]
Reads = Mapping[str, Sequence[range]]  # site -> the elements of states that it reads, by state


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
    linked = {
        key: names
        for key, names in families.items()
        if any(not parents[name].isdisjoint(names) for name in names)
    }
    for chosen in (families, linked):
        members = set[str]().union(*chosen.values())
        if any(parents[name] & members for name in latents if name not in members):
            continue
        states = {name: sites[name] for name in latents if name in members}
        stems = dict.fromkeys(map(_stem, chosen))
        found = _loops_of(f"{','.join(stems)}[time]", states, sites, parents, observed, learned)
        if found:
            return _of_any_length(found, parents) if learned else found
    return NO_LOOPS


def _loops_of(
    name: str,
    states: Sites,
    sites: Sites,
    parents: Parents,
    observed: Collection[str],
    learned: bool,
) -> Loops:
    """Returns states as one site of a name, and each family of data; none if they cannot be held so."""
    counts = {num_values(site["fn"]) or 0 for site in states.values()}
    if len(counts) != 1 or not _is_uniform([*states.values()]):
        return NO_LOOPS
    places = _places_of(states)
    reads = {site: [places[each] for each in parents[site] if each in places] for site in sites}
    events = tuple(site["fn"].event_shape for site in states.values())
    whole = LoopSites(name, tuple(states), events, False, values=counts.pop())
    held = _linked(whole, places, reads, learned)
    if held is None:
        return NO_LOOPS
    data = list(_data(sites, reads, observed))
    if learned:
        data = [held for held in data if min(held.reads) >= 0 and len(held.sites) >= SHORTEST]
    names = [name, *(part.name for part in data)]
    loose = set(observed).difference(*(part.sites for part in data))
    is_loose = any(reads[site] for site in loose) or any(min(part.reads) < 0 for part in data)
    if is_loose and (held.values or learned):
        return NO_LOOPS
    if len(set(names)) < len(names) or not sites.keys().isdisjoint(names):
        return NO_LOOPS
    return Loops((held, *data))


def _places_of(states: Sites) -> dict[str, range]:
    """Returns state -> its elements in the vector of all states."""
    places, end = dict[str, range](), 0
    for name, site in states.items():
        places[name] = range(end, end + site["fn"].event_shape.numel())
        end = places[name].stop
    return places


def _linked(
    states: LoopSites, places: Mapping[str, range], reads: Reads, learned: bool
) -> LoopSites | None:
    """Returns states with how far sites read back; None if no state reads another, or some reach back too far."""
    back, span = 0, 1
    for site, read in reads.items():
        if not read:
            continue
        first = min(place.start for place in read)
        if site in places:
            back = max(back, places[site].stop - 1 - first)
        else:
            span = max(span, max(place.stop for place in read) - first)
    if not back or learned:
        return states if back else None
    width = max(back, span - 1, *map(len, places.values()))
    while any(place.start // width < (place.stop - 1) // width for place in places.values()):
        width += 1  # such that no site lies in two blocks
    is_wide = width > max(MOST_WIDTH, states.size // 2) or any(
        len(event) > 1 for event in states.events
    )
    if is_wide or states.values and (back > 1 or span > 1):
        return None
    return states._replace(width=width, back=back, span=span)


def _data(sites: Sites, reads: Reads, observed: Collection[str]) -> Iterator[LoopSites]:
    """Yields each family of data that can be held as one."""
    data = [name for name in sites if name in observed and not site_is_factor(sites[name])]
    for key, names in _families(data, 1).items():
        events = tuple(sites[name]["fn"].event_shape for name in names)
        first = tuple(min((place.start for place in reads[name]), default=-1) for name in names)
        held = LoopSites(f"{_stem(key)}[time]", tuple(names), events, True, reads=first)
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
    of: dict[Any, str] = dict(loops.wholes)
    series = {name: held.order for name, held in loops.series.items()}
    lags = series or _lags(loops, net)
    sites: dict[Any, Site] = {}
    for name, site in net.sites.items():
        whole = of.get(name, name)
        if whole not in sites:
            support = frozenset(of.get(parent, parent) for parent in site.support_parents)
            sites[whole] = replace(
                site,
                name=whole,
                plates=NO_PLATES if whole in series else site.plates,
                support_parents=support - {whole},
                lag=lags.get(whole),
            )
    rank = {name: i for i, name in enumerate(sites)}
    forward = []
    for parent, child in net.edges:
        u, v = of.get(parent, parent), of.get(child, child)
        if rank[u] < rank[v]:
            forward.append((u, v))
        elif u != v and not sites[u].observed:
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


def _is_state(site: Message, learned: bool = False) -> bool:
    """Whether a site may be a state of a loop: Normal, or discrete with few values, and drawn by guides."""
    is_drawn = site["type"] == "sample" and is_latent(site)
    if not is_drawn or is_masked(site) and not learned:
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


def _is_uniform(sites: Sequence[Message]) -> bool:
    """Whether sites are in the same vectorized plates, of one scale, and in no sequential plate."""
    frames, scale = frames_of(sites[0]), torch.as_tensor(sites[0]["scale"])
    return all(
        frames_of(site) == frames
        and len(site["cond_indep_stack"]) == len(frames)
        and bool((torch.as_tensor(site["scale"]) == scale).all())
        for site in sites
    )


def _can_be_stacked(held: LoopSites, sites: Sequence[Message]) -> bool:
    """Whether data of several steps have the log density that they have step by step."""
    try:
        whole = held.message(sites)
        together = whole["fn"].log_prob(whole["value"])
        apart = torch.broadcast_tensors(*map(log_density_of, sites))
        return torch.allclose(together, torch.stack(apart).sum(0), rtol=1e-3, atol=1e-3)
    except (NotImplementedError, RuntimeError, ValueError, TypeError):
        return False
