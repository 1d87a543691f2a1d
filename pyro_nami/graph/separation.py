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
from pyro_nami.graph.inverse import Inverse, check_net

Dependency = tuple[Hashable, Hashable]
Plates = frozenset[Hashable]
ENOUGH_INSTANCES = 3


@dataclass(frozen=True)
class Verification:
    """Whether an inverse is faithful (its truth value) and minimal.

    Attributes:
        missing: the dependencies ``(parent, latent)`` that the posterior has and the inverse lacks, with the plates
            across which instances of the two depend on each other. A latent may depend on itself across a plate.
        redundant: the dependencies of the inverse that the posterior does not have, likewise.
    """

    missing: Mapping[Dependency, Plates]
    redundant: Mapping[Dependency, Plates]

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
    the instances sampled so far. The posterior of v given W *needs* those u in W that are not d-separated from v by
    the rest of W. An inverse is faithful iff every v reads all it needs. It is minimal iff besides that a factor (an
    instance or a joint block) reads nothing that none of its instances needs, and a block is joint over no plate
    across which none of its instances needs another.

    Instances of a plate are exchangeable, so plates of more than 3 instances are cut to 3.

    Raises:
        TypeError: ``net`` is not a `BayesNet`.
        ValueError: the inverse does not fit the network.
    """
    check_net(net)
    sizes = {plate: min(size, ENOUGH_INSTANCES) for plate, size in net.plate_sizes.items()}
    small = BayesNet(net.sites, net.edges, sizes, net.nesting)
    read = replace(inverse, net=small).ground().parents
    posterior = _Posterior(small.ground())
    missing: dict[Dependency, Plates] = {}
    redundant: dict[Dependency, Plates] = {}
    for v in reversed(inverse.order):
        crossed: set[Hashable] = set()
        for block in _blocks(small, v, inverse.joint[v]):
            needed_by_block = set()
            for instance in block:
                needed = posterior.sample(instance)
                needed_by_block |= needed
                _note(missing, instance, posterior.ordered(needed - read[instance].keys()))
                crossed.update(*(_across(other, instance) for other in needed.intersection(block)))
            for instance in block:
                idle = read[instance].keys() - needed_by_block - set(block)
                _note(redundant, instance, posterior.ordered(idle))
        uncrossed = frozenset(p for p in inverse.joint[v] - crossed if small.plate_sizes[p] > 1)
        if uncrossed:
            redundant[v, v] = uncrossed
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


class _Posterior:
    """What each latent needs when the latents of a grounded network are sampled one by one given the data."""

    def __init__(self, net: BayesNet) -> None:
        self.names, self.position = net.indexed.names, net.indexed.position
        self.ancestry = _Ancestry(net.indexed)
        self.known = {self.position[name] for name in net.observed}
        for i in self.known:
            self.ancestry.add(i)

    def ordered(self, names: Iterable[Hashable]) -> list[Hashable]:
        return sorted(names, key=self.position.__getitem__)

    def sample(self, name: Hashable) -> set[Hashable]:
        """The data and earlier latents that this latent depends on given the rest of them; it is known from now on."""
        i = self.position[name]
        self.ancestry.add(i)
        needed = self.ancestry.reach(i, self.known) & self.known
        self.known.add(i)
        return {self.names[u] for u in needed}


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


def _blocks(net: BayesNet, name: Hashable, joint: Plates) -> list[list[Instance]]:
    batches: dict[Hashable, list[Instance]] = {}
    for instance in net.instances(name):
        batches.setdefault(tuple(at for at in instance.indices if at[0] not in joint), []).append(instance)
    return list(batches.values())


def _across(source: Hashable, target: Instance) -> Plates:
    """The plates on which two instances differ."""
    assert isinstance(source, Instance)
    place = dict(target.indices)
    return frozenset(plate for plate, i in source.indices if place.get(plate, i) != i)


def _note(found: dict[Dependency, Plates], target: Instance, sources: Iterable[Hashable]) -> None:
    for source in sources:
        assert isinstance(source, Instance)
        pair = (source.site, target.site)
        found[pair] = found.get(pair, frozenset()) | _across(source, target)


def _described(pair: Dependency, plates: Plates) -> str:
    u, v = pair
    across = f" across {' and '.join(sorted(map(label, plates)))}" if plates else ""
    return f"{label(u)} -> {label(v)}{across}"
