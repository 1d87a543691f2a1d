"""The sites of a network, and what must hold for sites, edges and plates to make one.

Each check turns what a caller gave into the form that `BayesNet` keeps, or raises a `ValueError` that names what is
wrong. Change this module to say more about a site, or to demand more of a network.
"""

from __future__ import annotations

__all__ = [
    "Site",
    "check_nesting",
    "closed_nesting",
    "names_of",
    "parents_by_name",
    "sites_by_name",
    "sizes_of",
    "topological",
]

import heapq
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass

# The fewest instances that can differ.
DEFAULT_PLATE_SIZE = 2


@dataclass(frozen=True)
class Site:
    """One sample site of a model.

    Args:
        name: any hashable value.
        plates: the plates the site lies in.
        observed: whether inference conditions on the site.
        support_parents: the parents that the site's *support* depends on (``z ~ Uniform(0, hi)``); an inverse
            samples them before the site.
        marginalized: whether the model sums the latent out (enumeration), so that no guide samples it.

    Raises:
        ValueError: the site is both observed and marginalized.
    """

    name: Hashable
    plates: frozenset[Hashable] = frozenset()
    observed: bool = False
    support_parents: frozenset[Hashable] = frozenset()
    marginalized: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "plates", frozenset(names_of(self.plates)))
        object.__setattr__(self, "support_parents", frozenset(names_of(self.support_parents)))
        if self.observed and self.marginalized:
            raise ValueError(f"Expected site {self.name!r} to be observed or marginalized; got both.")


def names_of(names: Iterable[Hashable]) -> Iterable[Hashable]:
    """The names, where a string stands for one name."""
    return (names,) if isinstance(names, str) else names


def sites_by_name(sites: Mapping[Hashable, Site] | Iterable[Site]) -> dict[Hashable, Site]:
    """The sites by name, each once."""
    values = list(sites.values() if isinstance(sites, Mapping) else sites)
    for site in values:
        if not isinstance(site, Site):
            raise TypeError(f"Expected every site to be a Site; got {type(site).__name__} {site!r}.")
    names = [site.name for site in values]
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"Expected every site once; got {name!r} {count} times.")
    if isinstance(sites, Mapping) and list(sites) != names:
        raise ValueError(f"Expected every site under its own name; got {list(sites)!r} for {names!r}.")
    return dict(zip(names, values))


def parents_by_name(
    sites: Mapping[Hashable, Site], edges: Iterable[tuple[Hashable, Hashable]]
) -> dict[Hashable, list]:
    """The parents of each site, each once, in the order of the edges."""
    parents: dict[Hashable, dict[Hashable, None]] = {name: {} for name in sites}
    for u, t in edges:
        if u not in sites or t not in sites:
            unknown = t if u in sites else u
            raise ValueError(
                f"Expected the edge ({u!r}, {t!r}) to join known sites; got the unknown site {unknown!r}. "
                "Add it to the sites (nodes)."
            )
        parents[t][u] = None
    return {name: list(above) for name, above in parents.items()}


def sizes_of(sites: Mapping[Hashable, Site], sizes: Mapping[Hashable, int]) -> dict[Hashable, int]:
    """The size of each plate that a site lies in, those that are given first."""
    for plate, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"Expected the size of plate {plate!r} to be a positive integer; got {size!r}.")
    used = {plate: None for site in sites.values() for plate in sorted(site.plates, key=repr)}
    known = {plate: size for plate, size in sizes.items() if plate in used}
    return known | {plate: DEFAULT_PLATE_SIZE for plate in used if plate not in known}


def closed_nesting(nesting: Mapping[Hashable, Collection[Hashable]]) -> dict[Hashable, frozenset]:
    """The nesting, closed transitively."""
    outer = {plate: list(names_of(plates)) for plate, plates in nesting.items()}
    for plates in list(outer.values()):
        outer.update({plate: [] for plate in plates if plate not in outer})
    closed: dict[Hashable, frozenset] = {}
    for plate in topological(outer, outer, "nesting of plates"):
        closed[plate] = frozenset(outer[plate]).union(*(closed[q] for q in outer[plate]))
    return closed


def check_nesting(sites: Mapping[Hashable, Site], nesting: Mapping[Hashable, frozenset]) -> None:
    """Checks that sites lie in every plate that one of theirs determines; the nesting is a closed one."""
    for site in sites.values():
        for plate in site.plates:
            for outer in nesting.get(plate, frozenset()) - site.plates:
                raise ValueError(
                    f"Expected site {site.name!r} in every plate that its plate {plate!r} determines; got plates "
                    f"{sorted(site.plates, key=repr)!r} without {outer!r}. Add {outer!r} to the site's plates."
                )


def topological(
    names: Iterable[Hashable], parents: Mapping[Hashable, list], what: str = "graph"
) -> list[Hashable]:
    """The names, parents first: each time the earliest one whose parents are all placed."""
    order = list(names)
    rank = {name: i for i, name in enumerate(order)}
    waiting = {name: len(parents[name]) for name in order}
    children: dict[Hashable, list[Hashable]] = {name: [] for name in order}
    for name in order:
        for parent in parents[name]:
            children[parent].append(name)
    ready = [rank[name] for name in order if not waiting[name]]
    placed = []
    while ready:
        name = order[heapq.heappop(ready)]
        placed.append(name)
        for child in children[name]:
            waiting[child] -= 1
            if not waiting[child]:
                heapq.heappush(ready, rank[child])
    if len(placed) < len(order):
        cycle = _cycle([name for name in order if waiting[name]], parents)
        raise ValueError(f"Expected an acyclic {what}; got the cycle {' -> '.join(map(repr, cycle))}.")
    return placed


def _cycle(left: list[Hashable], parents: Mapping[Hashable, list]) -> list[Hashable]:
    """A cycle among ``left``, sites that each have a parent among ``left``."""
    members, path, seen = set(left), [left[0]], {left[0]: 0}
    while True:
        parent = next(u for u in parents[path[-1]] if u in members)
        if parent in seen:
            return [parent, *reversed(path[seen[parent] :])]
        seen[parent] = len(path)
        path.append(parent)
