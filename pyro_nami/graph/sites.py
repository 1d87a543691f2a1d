"""The sites of a network, and the conditions on sites, edges and plates.

Each check turns what a caller gave into the form that `BayesNet` keeps, or raises a `ValueError`
that names the fault.
"""

from __future__ import annotations

__all__ = [
    "NO_PLATES",
    "Edge",
    "Nesting",
    "Plates",
    "Reads",
    "Site",
    "closed_nesting",
    "names_of",
    "plate_sizes_of",
    "sites_in_order",
]

import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import networkx as nx

Plates = frozenset[Any]
NO_PLATES: Plates = frozenset()
Edge = tuple[Hashable, Hashable]  # parent, child
Nesting = Mapping[Hashable, Collection[Hashable]]  # plate -> the plates whose indices it determines
Reads = dict[Hashable, Plates]  # a site that is read -> the shared plates that it is read across


@dataclass(frozen=True)
class Site:
    """One sample site of a model.

    Args:
        name: any hashable value.
        plates: the plates the site lies in.
        observed: whether inference conditions on the site.
        support_parents: the parents that the site's *support* depends on, as ``hi`` in ``z ~ Uniform(0, hi)``. A guide
            samples them before the site.
        marginalized: whether the model sums the latent out (enumeration), so that no guide samples it.
        lag: for a site that stands for all steps of a loop. For states: how many steps back a state, or the data of
            its step, depends on other states. For data: the steps from the last state that they read to their own.

    Raises:
        ValueError: the site is both observed and marginalized.
    """

    name: Hashable
    plates: Plates = NO_PLATES
    observed: bool = False
    support_parents: frozenset[Hashable] = frozenset()
    marginalized: bool = False
    lag: int | None = None

    @property
    def kind(self) -> str:
        """ "observed", "marginalized" or "latent": what inference does with the site."""
        if self.observed:
            return "observed"
        return "marginalized" if self.marginalized else "latent"

    def __post_init__(self) -> None:
        vars(self).update(
            plates=frozenset(names_of(self.plates)),
            support_parents=frozenset(names_of(self.support_parents)),
        )
        if self.observed and self.marginalized:
            raise ValueError(
                f"Expected site {self.name!r} to be observed or marginalized; got both."
            )


def names_of(names: Iterable[Hashable]) -> Iterable[Hashable]:
    """The names, where a string stands for one name."""
    return (names,) if isinstance(names, str) else names


def sites_in_order(
    sites: Mapping[Hashable, Site] | Iterable[Site], edges: Collection[Edge]
) -> dict[Hashable, Site]:
    """The sites by name, parents first: each time the earliest one whose parents are all placed."""
    given = _by_name(sites)
    for u, t in edges:
        if u not in given or t not in given:
            unknown = t if u in given else u
            raise ValueError(
                f"Expected the edge ({u!r}, {t!r}) to join known sites; got the unknown site {unknown!r}. "
                "Add it to the sites (nodes)."
            )
    for name, site in given.items():
        for parent in site.support_parents:
            if (parent, name) not in edges:
                raise ValueError(
                    f"Expected the support parents of site {name!r} among its parents; got {parent!r}. "
                    f"Add the edge ({parent!r}, {name!r})."
                )
    return {name: given[name] for name in _parents_first(given, edges, "graph")}


def plate_sizes_of(
    sites: Mapping[Hashable, Site], sizes: Mapping[Hashable, int]
) -> dict[Hashable, int]:
    """The size of each plate that a site lies in, those that are given first."""
    for plate, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"Expected the size of plate {plate!r} to be a positive integer; got {size!r}."
            )
    names = [plate for site in sites.values() for plate in sorted(site.plates, key=repr)]
    used = dict.fromkeys(names, 2)  # the fewest instances that can differ
    return {plate: size for plate, size in {**sizes, **used, **sizes}.items() if plate in used}


def closed_nesting(sites: Mapping[Hashable, Site], nesting: Nesting) -> dict[Hashable, Plates]:
    """The nesting closed transitively; every site must lie in the plates that one of its plates determines."""
    outer = {plate: frozenset(names_of(plates)) for plate, plates in nesting.items()}
    edges = [(above, plate) for plate, plates in outer.items() for above in plates]
    known = dict.fromkeys(itertools.chain(outer, *outer.values()))
    for plate in _parents_first(known, edges, "nesting of plates"):
        direct = outer.get(plate, NO_PLATES)
        outer[plate] = direct.union(*(outer[above] for above in direct))
    for site in sites.values():
        for plate in site.plates:
            for missing in outer.get(plate, NO_PLATES) - site.plates:
                raise ValueError(
                    f"Expected site {site.name!r} in every plate that its plate {plate!r} determines; got plates "
                    f"{sorted(site.plates, key=repr)!r} without {missing!r}. Add {missing!r} to the site's plates."
                )
    return outer


def _by_name(sites: Mapping[Hashable, Site] | Iterable[Site]) -> dict[Hashable, Site]:
    values = list(sites.values() if isinstance(sites, Mapping) else sites)
    named: dict[Hashable, Site] = {}
    for site in values:
        if not isinstance(site, Site):
            raise TypeError(
                f"Expected every site to be a Site; got {type(site).__name__} {site!r}."
            )
        if site.name in named:
            count = sum(getattr(other, "name", None) == site.name for other in values)
            raise ValueError(f"Expected every site once; got {site.name!r} {count} times.")
        named[site.name] = site
    if isinstance(sites, Mapping) and list(sites) != list(named):
        raise ValueError(
            f"Expected every site under its own name; got {list(sites)!r} for {list(named)!r}."
        )
    return named


def _parents_first(names: Iterable[Hashable], edges: Iterable[Edge], what: str) -> list[Hashable]:
    """The names in topological order, and where that leaves a choice in their own."""
    names = list(names)
    rank = {name: i for i, name in enumerate(names)}
    graph = nx.DiGraph()  # of ranks: a name may be None, which cannot be a node
    graph.add_nodes_from(range(len(names)))
    graph.add_edges_from((rank[u], rank[t]) for u, t in edges)
    try:
        return [names[i] for i in nx.lexicographical_topological_sort(graph)]
    except nx.NetworkXUnfeasible:
        cycle = [names[u] for u, _ in nx.find_cycle(graph)]
        text = " -> ".join(map(repr, [*cycle, cycle[0]]))
        raise ValueError(f"Expected an acyclic {what}; got the cycle {text}.") from None
