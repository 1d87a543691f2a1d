"""d-separation, and the check that an inverse is faithful and minimal.

The check uses no elimination. An inverse states that each latent is independent of the earlier
latents and of the data given its parents; d-separation on the grounded network tells whether this
is so.
"""

from __future__ import annotations

__all__ = ["Verification", "d_separated", "verify_inverse"]

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.network import BayesNet, Instance, label
from pyro_nami.graph.sites import NO_PLATES, Edge, Plates


@dataclass(frozen=True)
class Verification:
    """Whether an inverse is faithful, which is the truth value of this object, and whether it is minimal.

    Attributes:
        missing: the dependencies ``(parent, latent)`` that the posterior has and the inverse lacks, with the plates
            across which instances of the two depend on each other. A latent may depend on itself across a plate.
        redundant: the dependencies of the inverse that the posterior does not have, likewise.
    """

    missing: Mapping[Edge, Plates]
    redundant: Mapping[Edge, Plates]

    def __bool__(self) -> bool:
        return not self.missing

    @property
    def minimal(self) -> bool:
        """Whether the inverse is faithful, and would not be without any one of its edges."""
        return not self.missing and not self.redundant

    @property
    def verdict(self) -> str:
        """Faithfulness and minimality in words."""
        if self.minimal:
            return "minimally faithful"
        return "faithful, not minimal" if self else "not faithful"

    def __str__(self) -> str:
        parts = [self.verdict]
        for what, pairs in (("missing", self.missing), ("redundant", self.redundant)):
            if pairs:
                parts.append(f"{what}: {', '.join(_described(*pair) for pair in pairs.items())}")
        return "; ".join(parts)


def verify_inverse(net: BayesNet, inverse: Inverse) -> Verification:
    """Decides by d-separation on the grounded network whether an inverse is faithful and minimal.

    Along the sampling order, instance by instance (a joint block in the order of its indices), let W be the data and
    the instances sampled so far. The posterior of v given W *needs* those u in W that are not d-separated from v by
    the rest of W. An inverse is faithful if every v reads all that it needs. A faithful inverse is minimal if each
    factor (an instance or a joint block) reads only what at least one of its instances needs, and is joint over a
    plate only if one of its instances needs another one across that plate.

    Instances of a plate are exchangeable, so plates of more than 3 instances are cut to 3.

    Raises:
        TypeError: ``net`` is not a `BayesNet`.
        ValueError: the inverse does not fit the network.

    Example:
        >>> from pyro_nami.graph.inversion_methods import mean_field, nami
        >>> net = BayesNet.from_edges(["ax", "bx"], observed="x")
        >>> print(verify_inverse(net, nami(net)))
        minimally faithful
        >>> print(verify_inverse(net, mean_field(net)))
        not faithful; missing: a -> b
    """
    inverse = replace(inverse, net=net)  # which checks that it fits
    # Exchangeable instances: the one at hand, another that is known, and one that is not.
    sizes = {plate: min(size, 3) for plate, size in net.plate_sizes.items()}
    small = BayesNet(net.sites, net.edges, sizes, net.nesting)
    read, grounded = replace(inverse, net=small).ground().parents, small.ground()
    known = _Known(grounded, grounded.observed)
    missing: dict[Edge, Plates] = {}
    redundant: dict[Edge, Plates] = {}
    for v in reversed(inverse.order):
        crossed: set[Hashable] = set()
        blocks = (
            small.aligned(v, instance, net.plates[v] - inverse.joint[v])
            for instance in small.instances(v)
        )
        for block in dict.fromkeys(map(tuple, blocks)):
            needs = {instance: known.sample(instance) for instance in block}
            needed_by_block = set().union(*needs.values(), block)
            for instance, needed in needs.items():
                _note(missing, instance, known.ordered(needed - read[instance].keys()))
                _note(redundant, instance, known.ordered(read[instance].keys() - needed_by_block))
                crossed.update(*(_across(other, instance) for other in needed.intersection(block)))
        uncrossed = frozenset(plate for plate in inverse.joint[v] - crossed if sizes[plate] > 1)
        if uncrossed:
            redundant[v, v] = uncrossed
    return Verification(missing, redundant)


def d_separated(net: BayesNet, x: Hashable, y: Hashable, given: Iterable[Hashable] = ()) -> bool:
    """Whether sites ``x`` and ``y`` are independent given ``given`` in every model with this graph.

    Sites are taken as written: for instances, ask ``net.ground()``.

    Raises:
        ValueError: a site is unknown, or ``x`` or ``y`` is among the given.

    Example:
        >>> net = BayesNet.from_edges(["ax", "bx"], observed="x")
        >>> d_separated(net, "a", "b"), d_separated(net, "a", "b", ["x"])  # the data explain one by the other
        (True, False)
    """
    given = list(given)
    for name in (x, y, *given):
        if name not in net.sites:
            raise ValueError(f"Expected sites of the network; got {name!r}.")
    if x in given or y in given or x == y:
        raise ValueError(
            f"Expected two sites and others given; got {x!r} and {y!r} given {given!r}."
        )
    return y not in _Known(net, [y, *given]).sample(x)


class _Known:
    """The sites W of a network that are known, and which of them a further site needs.

    In the ancestral part of the graph, x and y are d-separated by W iff every path between them in its moral graph
    meets W (Lauritzen et al. 1990): a path leads from a site to its parents, children, and children's other parents.
    """

    def __init__(self, net: BayesNet, names: Iterable[Hashable]) -> None:
        self.graph, self.ancestral = net.indexed, set[int]()
        self.known = {self.graph.position[name] for name in names}
        for site in self.known:
            self._include(site)

    def sample(self, name: Hashable) -> set[Any]:
        """Returns the sites of W from which the rest of W does not d-separate this one, which then joins W."""
        site = self.graph.position[name]
        self._include(site)
        found = {site}
        families = set[int]()
        stack = [site]
        while stack:
            inner = stack.pop()
            for family in (
                self.ancestral.intersection((inner, *self.graph.children[inner])) - families
            ):
                families.add(family)
                new = {family, *self.graph.parents[family]} - found
                found |= new
                stack.extend(new - self.known)
        needed = {self.graph.names[u] for u in found & self.known}
        self.known.add(site)
        return needed

    def ordered(self, names: Iterable[Any]) -> list[Any]:
        return sorted(names, key=self.graph.position.__getitem__)

    def _include(self, site: int) -> None:
        """Makes a site and its ancestors part of the ancestral graph."""
        stack = [site]
        while stack:
            site = stack.pop()
            if site not in self.ancestral:
                self.ancestral.add(site)
                stack.extend(self.graph.parents[site])


def _across(source: Instance, target: Instance) -> Plates:
    """The plates on which two instances differ."""
    place = dict(target.indices)
    return frozenset(plate for plate, i in source.indices if place.get(plate, i) != i)


def _note(found: dict[Edge, Plates], target: Instance, sources: Iterable[Instance]) -> None:
    for source in sources:
        pair = source.site, target.site
        found[pair] = found.get(pair, NO_PLATES) | _across(source, target)


def _described(pair: Edge, plates: Plates) -> str:
    across = f" across {' and '.join(sorted(map(label, plates)))}" if plates else ""
    return " -> ".join(map(label, pair)) + across
