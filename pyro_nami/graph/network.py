"""`BayesNet`: a Bayesian network over named sites with plates, as extraction reads it off a model."""

from __future__ import annotations

__all__ = ["BayesNet", "Instance", "label", "plate_list", "site_label"]

import itertools
import math
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import networkx as nx

from pyro_nami.graph.sites import (
    NO_PLATES,
    Edge,
    Nesting,
    Plates,
    Site,
    closed_nesting,
    names_of,
    plate_sizes_of,
    sites_in_order,
)

# those of loops as well: `z[time]`, `level,slope[time]`
PLAIN_NAME = re.compile(r"[^\W\d][\w./\-]*([\w./\-,]*\[time\])?")


class Instance(NamedTuple):
    """The name of one instance of a site in a grounded network: ``(site, ((plate, index), ...))``.

    Plates come in the order of the network's ``plate_sizes``. The name equals that plain tuple.
    """

    site: Hashable
    indices: tuple[tuple[Hashable, int], ...]


class Indexed(NamedTuple):
    """A network on the integers 0, 1, ... in model order, for the algorithms of this room; parents ascend."""

    names: tuple[Hashable, ...]
    position: dict[Hashable, int]
    parents: tuple[tuple[int, ...], ...]
    children: tuple[tuple[int, ...], ...]
    plates: tuple[Plates, ...]


@dataclass(frozen=True, eq=False)
class BayesNet:
    """A directed acyclic graph over sites.

    An edge ``u -> t`` joins aligned instances on the plates that the two sites share, and every instance of ``u``
    on the plates that ``t`` lacks. Model order is the order of ``sites``, made topological where it is not
    (stably: the earliest site whose parents are all placed comes next).

    A plate may be *nested raggedly* in others: its index determines theirs, as a house determines its county. A site
    in the nested plate lies in the outer ones, too; its instances are those of the nested plate alone.

    Args:
        sites: the sites, as a mapping from name to `Site` or as an iterable of them.
        edges: pairs ``(parent, child)`` of site names.
        plate_sizes: the number of instances of each plate; by default 2, the fewest at which instances can differ.
        nesting: for each nested plate, the plates whose index it determines. As an attribute it is closed
            transitively, and lists only plates of the network that determine any.

    Raises:
        TypeError: something other than a `Site` is among the sites.
        ValueError: the edges or the nesting have a cycle; a site, plate or plate size is unknown, repeated or out of
            range; or a site lies in a nested plate but not in every plate that this determines.

    Example:
        >>> net = BayesNet.from_edges([("z", "x")], observed=["x"], plates={"z": ["data"], "x": ["data"]})
        >>> net.latent, net.observed
        (('z',), ('x',))
    """

    # Names are any hashables. They are read as Any, so that who names sites by strings gets strings back.
    sites: Mapping[Any, Site]
    edges: tuple[tuple[Any, Any], ...]
    plate_sizes: Mapping[Any, int] = field(default_factory=dict)
    nesting: Mapping[Any, Plates] = field(default_factory=dict)

    def __init__(
        self,
        sites: Mapping[Hashable, Site] | Iterable[Site],
        edges: Iterable[Edge],
        plate_sizes: Mapping[Hashable, int] | None = None,
        nesting: Nesting | None = None,
    ) -> None:
        pairs = dict.fromkeys((u, t) for u, t in edges)
        ordered = sites_in_order(sites, pairs)
        rank = {name: i for i, name in enumerate(ordered)}
        sizes = plate_sizes_of(ordered, plate_sizes or {})
        outer = closed_nesting(ordered, nesting or {})
        nested = {plate: outer[plate] for plate in sizes if outer.get(plate)}
        vars(self).update(
            sites=MappingProxyType(ordered),
            edges=tuple(sorted(pairs, key=lambda edge: (rank[edge[1]], rank[edge[0]]))),
            plate_sizes=MappingProxyType(sizes),
            nesting=MappingProxyType(nested),
        )

    @classmethod
    def from_edges(
        cls,
        edges: Iterable[Edge],
        *,
        observed: Iterable[Hashable],
        nodes: Iterable[Hashable] | None = None,
        plates: Mapping[Hashable, Iterable[Hashable]] | None = None,
        plate_sizes: Mapping[Hashable, int] | None = None,
        nesting: Nesting | None = None,
    ) -> BayesNet:
        """Builds a network from its edges; the arguments that are not listed are those of the class.

        Args:
            observed: the sites that inference conditions on.
            nodes: every site, in model order; by default the ends of the edges, as they first appear.
            plates: the plates of each site that lies in any.

        Raises:
            ValueError: as the class does, or a name is not among the nodes.
        """
        edges = [(u, t) for u, t in edges]
        names = dict.fromkeys(itertools.chain.from_iterable(edges) if nodes is None else nodes)
        seen, lying = frozenset(names_of(observed)), dict(plates or {})
        for what, group in (("observed site", seen), ("site in plates", lying)):
            for name in group:
                if name not in names:
                    raise ValueError(
                        f"Expected every {what} to be a node of the graph; got {name!r}. "
                        "Add it to the edges, or list it in nodes."
                    )
        sites = [
            Site(name, frozenset(names_of(lying.get(name, ()))), name in seen) for name in names
        ]
        return cls(sites, edges, plate_sizes, nesting)

    @classmethod
    def from_networkx(
        cls,
        graph: nx.DiGraph,
        *,
        observed: Iterable[Hashable],
        plates: Mapping[Hashable, Iterable[Hashable]] | None = None,
        plate_sizes: Mapping[Hashable, int] | None = None,
        nesting: Nesting | None = None,
    ) -> BayesNet:
        """Builds a network from a directed graph; the arguments are those of `from_edges`."""
        if not isinstance(graph, nx.DiGraph):
            raise TypeError(f"Expected a networkx.DiGraph; got {type(graph).__name__}.")
        return cls.from_edges(
            graph.edges,
            observed=observed,
            nodes=graph.nodes,
            plates=plates,
            plate_sizes=plate_sizes,
            nesting=nesting,
        )

    @cached_property
    def graph(self) -> nx.DiGraph:
        """The network as a frozen `networkx.DiGraph`, nodes in model order, the `Site` under ``"site"``."""
        graph = nx.DiGraph()
        graph.add_nodes_from((name, {"site": site}) for name, site in self.sites.items())
        graph.add_edges_from(self.edges)
        return nx.freeze(graph)

    @cached_property
    def latent(self) -> tuple[Any, ...]:
        """The sites that are not observed, marginalized ones included, in model order."""
        return tuple(name for name, site in self.sites.items() if not site.observed)

    @cached_property
    def observed(self) -> tuple[Any, ...]:
        """The observed sites in model order."""
        return tuple(name for name, site in self.sites.items() if site.observed)

    @cached_property
    def plates(self) -> Mapping[Any, Plates]:
        """The plates of each site."""
        return MappingProxyType({name: site.plates for name, site in self.sites.items()})

    @cached_property
    def indexed(self) -> Indexed:
        """The network on integers in model order."""
        names = tuple(self.sites)
        position = {name: i for i, name in enumerate(names)}
        parents: list[list[int]] = [[] for _ in names]
        children: list[list[int]] = [[] for _ in names]
        for u, t in self.edges:
            parents[position[t]].append(position[u])
            children[position[u]].append(position[t])
        return Indexed(
            names,
            position,
            tuple(map(tuple, parents)),
            tuple(map(tuple, children)),
            tuple(self.plates.values()),
        )

    def ground(self) -> BayesNet:
        """The network with every plate unrolled; its sites are named by `Instance`.

        Nesting is ignored: a site gets an instance for every combination of indices, as if all occurred. The ragged
        network is a part of the result, so what is independent in the result is independent in the ragged network.
        """

        def sources(parents: Iterable[Hashable], target: Instance) -> list[Instance]:
            return [source for u in parents for source in self.aligned(u, target, self.plates[u])]

        sites = [
            replace(
                site,
                name=at,
                plates=NO_PLATES,
                support_parents=frozenset(sources(site.support_parents, at)),
            )
            for name, site in self.sites.items()
            for at in self.instances(name)
        ]
        edges = (
            (source, at)
            for u, t in self.edges
            for at in self.instances(t)
            for source in sources([u], at)
        )
        return BayesNet(sites, edges)

    def instances(self, name: Hashable) -> list[Instance]:
        """The instances of a site in `ground`, in lexicographic order of their indices."""
        return self.aligned(name, Instance(name, ()), NO_PLATES)

    def aligned(self, name: Hashable, other: Instance, plates: Plates) -> list[Instance]:
        """The instances of site ``name`` that agree with instance ``other`` on those ``plates`` that both lie in."""
        fixed = {plate: i for plate, i in other.indices if plate in plates}
        axes = [
            [(plate, fixed[plate])] if plate in fixed else [(plate, i) for i in range(size)]
            for plate, size in self.plate_sizes.items()
            if plate in self.plates[name]
        ]
        return [Instance(name, indices) for indices in itertools.product(*axes)]

    def closure(self, plates: Iterable[Hashable]) -> Plates:
        """The given plates, and the plates whose index these determine."""
        plates = frozenset(plates)
        return plates.union(*(self.nesting.get(plate, ()) for plate in plates))

    def generators(self, plates: Iterable[Hashable]) -> Plates:
        """The plates among ``plates`` that no other one among them determines."""
        plates = frozenset(plates)
        return plates.difference(*(self.nesting.get(plate, ()) for plate in plates))

    def num_instances(self, plates: Iterable[Hashable]) -> int:
        """The number of instances of a site that lies in ``plates``."""
        plates = self.generators(plates) if self.nesting else plates
        return math.prod(self.plate_sizes[plate] for plate in plates)

    def num_pairs(self, a: Plates, b: Plates, across: Plates) -> int:
        """The number of pairs of an instance in plates ``a`` and one in plates ``b`` that an edge joins.

        The two instances agree on the plates that both lie in, except for those in ``across``. Instances of a nested
        plate count as if they were spread evenly.
        """
        if not self.nesting:
            return self.num_instances(a | b) * self.num_instances(across)
        first, second = self.num_instances(a), self.num_instances(b)
        return first * second // min(self.num_instances((a & b) - across), first, second)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BayesNet) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash((tuple(self.sites.values()), self.edges))

    def __reduce__(self) -> tuple[Any, ...]:
        return BayesNet, (
            tuple(self.sites.values()),
            self.edges,
            dict(self.plate_sizes),
            dict(self.nesting),
        )

    def __str__(self) -> str:
        text = f"BayesNet: {len(self.latent)} latent and {len(self.observed)} observed sites, {len(self.edges)} edges"
        for plate, size in self.plate_sizes.items():
            outer = plate_list(self, self.nesting.get(plate, NO_PLATES))
            text += f", plate {label(plate)} of {size}" + (f" within {outer}" if outer else "")
        for site, parents in zip(self.sites.values(), self.indexed.parents):
            given = ", ".join(label(self.indexed.names[u]) for u in parents)
            text += f"\n  {site_label(self, site.name)}: {site.kind}"
            text += f", given {given}" if given else ""
        return text


def label(name: Hashable) -> str:
    """A name as text: a string that reads as an identifier is left bare, anything else shows its `repr`."""
    if (
        isinstance(name, str)
        and PLAIN_NAME.fullmatch(name)
        and name not in ("None", "True", "False")
    ):
        return name
    return repr(name).replace("\n", r"\n")


def site_label(net: BayesNet, name: Hashable) -> str:
    """A site's name, and its plates in brackets."""
    plates = ", ".join(label(plate) for plate in net.plate_sizes if plate in net.plates[name])
    return f"{label(name)}[{plates}]" if plates else label(name)


def plate_list(net: BayesNet, plates: Plates) -> str:
    """Plates as text, in the order of the network's ``plate_sizes``."""
    return " and ".join(label(plate) for plate in net.plate_sizes if plate in plates)
