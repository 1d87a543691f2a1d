"""d-separation, and the check that an inverse is faithful and minimal.

The check knows nothing of elimination. It takes an inverse for what it says, "each latent is independent of
everything sampled before it, and of all data, given its parents", and asks d-separation on the grounded network
whether that is so. Change this file to change what counts as a right inverse.
"""

from __future__ import annotations

__all__ = ["Verification", "d_separated", "verify_inverse"]

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from pyro_nami.graph.bayesnet import BayesNet, Indexed, Instance, label
from pyro_nami.graph.inverse import Inverse

Dependency = tuple[Hashable, Hashable]
ENOUGH_INSTANCES = 3


@dataclass(frozen=True)
class Verification:
    """Whether an inverse is faithful (its truth value) and minimal.

    Attributes:
        missing: the dependencies ``(parent, latent)`` that the posterior has and the inverse lacks, with the plates
            across which instances of the two depend on each other. A latent may depend on itself across a plate.
        redundant: the dependencies of the inverse that the posterior does not have, likewise.
    """

    missing: Mapping[Dependency, frozenset[Hashable]]
    redundant: Mapping[Dependency, frozenset[Hashable]]

    def __bool__(self) -> bool:
        return not self.missing

    @property
    def minimal(self) -> bool:
        """Whether the inverse is faithful, and no longer so without any one of its edges."""
        return not self.missing and not self.redundant

    def __str__(self) -> str:
        kind = "minimally faithful" if self.minimal else "faithful, not minimal" if self else "not faithful"
        parts = [kind] + [
            f"{what}: {', '.join(_described(pair, plates) for pair, plates in pairs.items())}"
            for what, pairs in (("missing", self.missing), ("redundant", self.redundant))
            if pairs
        ]
        return "; ".join(parts)


def verify_inverse(net: BayesNet, inverse: Inverse) -> Verification:
    """Decides by d-separation on the grounded network whether an inverse is faithful and minimal.

    Along the sampling order, instance by instance (a joint block in the order of its indices), let W be the data and
    the instances sampled so far. The posterior of v given W depends on u in W iff u is not d-separated from v by
    the rest of W; an inverse is faithful iff v's parents hold all such u, and minimal iff they hold no other.

    Instances of a plate are exchangeable, so plates of more than 3 instances are cut to 3.

    Raises:
        ValueError: the inverse is one of other latents, or lies in other plates, than the network's.
    """
    if inverse.net is not net and inverse.net != net:
        # An inverse built for another network is taken over to this one, which checks that it fits.
        inverse = Inverse(net, inverse.order, inverse.parents, inverse.joint, inverse.predictive)
    small = BayesNet(
        net.sites, net.edges, {plate: min(size, ENOUGH_INSTANCES) for plate, size in net.plate_sizes.items()}
    )
    grounded = replace(inverse, net=small).ground()
    names, position, *_ = graph = grounded.net.indexed
    ancestry = _Ancestry(graph)
    known = {position[x] for x in grounded.net.observed}
    for x in known:
        ancestry.add(x)
    missing: dict[Dependency, frozenset[Hashable]] = {}
    redundant: dict[Dependency, frozenset[Hashable]] = {}
    for v in reversed(grounded.order):
        ancestry.add(position[v])
        needed = {names[u] for u in ancestry.reach(position[v], known) & known}
        read = grounded.parents[v].keys()
        for found, sources in ((missing, needed - read), (redundant, read - needed)):
            for u in sorted(sources, key=position.__getitem__):
                _note(found, u, v)
        known.add(position[v])
    return Verification(missing, redundant)


def d_separated(net: BayesNet, x: Hashable, y: Hashable, given: Iterable[Hashable] = ()) -> bool:
    """Whether sites ``x`` and ``y`` are independent given ``given`` in every model with this graph.

    Sites are taken as written: for instances, ask ``net.ground()``.

    Raises:
        ValueError: a site is unknown, or ``x`` or ``y`` is among the given.
    """
    given = list(given)
    for name in (x, y, *given):
        if name not in net.sites:
            raise ValueError(f"Expected sites of the network; got {name!r}.")
    if x in given or y in given or x == y:
        raise ValueError(f"Expected two sites and others given; got {x!r} and {y!r} given {given!r}.")
    graph = net.indexed
    known = {graph.position[name] for name in given}
    ancestry = _Ancestry(graph)
    for name in (x, y, *given):
        ancestry.add(graph.position[name])
    return graph.position[y] not in ancestry.reach(graph.position[x], known)


class _Ancestry:
    """An ancestral part of a graph, which only ever grows.

    In it, x and y are d-separated by W iff every path between them in its moral graph meets W (Lauritzen et al.
    1990): a path passes from a site to its parents, its children, and its children's other parents.
    """

    def __init__(self, graph: Indexed) -> None:
        self.graph = graph
        self.members = bytearray(len(graph.names))

    def add(self, site: int) -> None:
        """Adds a site and its ancestors."""
        stack = [site]
        while stack:
            site = stack.pop()
            if not self.members[site]:
                self.members[site] = 1
                stack.extend(self.graph.parents[site])

    def reach(self, site: int, known: set[int]) -> set[int]:
        """The sites that a path from ``site`` reaches without passing through a known one, known ends included."""
        parents, children = self.graph.parents, self.graph.children
        found, families, stack = {site}, set(), [site]
        while stack:
            inner = stack.pop()
            for family in (inner, *children[inner]):
                if self.members[family] and family not in families:
                    families.add(family)
                    new = {family, *parents[family]} - found
                    found |= new
                    stack.extend(new - known)
        return found - {site}


def _note(found: dict[Dependency, frozenset[Hashable]], u: Hashable, v: Hashable) -> None:
    assert isinstance(u, Instance) and isinstance(v, Instance)
    place = dict(v.indices)
    across = frozenset(plate for plate, i in u.indices if place.get(plate, i) != i)
    found[u.site, v.site] = found.get((u.site, v.site), frozenset()) | across


def _described(pair: Dependency, plates: frozenset[Hashable]) -> str:
    u, v = pair
    across = f" across {' and '.join(sorted(map(label, plates)))}" if plates else ""
    return f"{label(u)} -> {label(v)}{across}"
