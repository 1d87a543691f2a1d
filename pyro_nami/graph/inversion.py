"""Inverses of a Bayesian network: what each latent reads when it is sampled given the data.

`nami` builds the faithful and minimal ones of Webb et al. 2018; `stuhlmueller`, `mean_field` and `fully_connected`
are the baselines of that paper, as the same `Inverse`. A user's own inversion is any function from `BayesNet` to
`Inverse`. Change this file to add an inversion; how elimination couples sites is in `elimination.py`.
"""

from __future__ import annotations

__all__ = ["Inverse", "Step", "fully_connected", "mean_field", "nami", "nami_steps", "stuhlmueller"]

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import networkx as nx

from pyro_nami.graph.bayesnet import BayesNet, Instance, label, site_label
from pyro_nami.graph.elimination import NO_PLATES, Choice, ForbiddenOrder, search

Plates = frozenset[Hashable]
DIRECTIONS = ("auto", "forward", "reverse", "free")


@dataclass(frozen=True)
class Inverse:
    """A factorization of the posterior: in reverse elimination order, each latent given the sites it reads.

    Args:
        net: the network that is inverted.
        order: the latents in elimination order; ``reversed(order)`` is a sampling order.
        parents: for each latent, the sites it reads, and the plates shared with each that it is read *across*. On
            the other shared plates the two are aligned; plates that the parent has and the latent lacks are always
            read across, and are not listed.
        joint: for each latent, the plates over which its instances form one joint block, autoregressive inside.
            A latent that is not listed has none.
        predictive: the latents whose factor is the model's own conditional.

    Raises:
        ValueError: the order is not one of all latents (marginalized ones aside), or a latent reads a site that is
            neither observed nor sampled before it, or plates are read across that are not shared.
    """

    net: BayesNet
    order: tuple[Hashable, ...]
    parents: Mapping[Hashable, Mapping[Hashable, Plates]]
    joint: Mapping[Hashable, Plates] = field(default_factory=dict)
    predictive: Plates = NO_PLATES

    def __post_init__(self) -> None:
        order = tuple(self.order)
        _check_net(self.net)
        _check_order(self.net, order)
        parents = {v: MappingProxyType(dict(self.parents.get(v, {}))) for v in order}
        joint = {v: frozenset(self.joint.get(v, NO_PLATES)) for v in order}
        _check_parents(self.net, order, parents, joint)
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "parents", MappingProxyType(parents))
        object.__setattr__(self, "joint", MappingProxyType(joint))
        object.__setattr__(self, "predictive", frozenset(self.predictive))

    @cached_property
    def num_edges(self) -> int:
        """The number of dependencies between sites, plates counted once."""
        return sum(map(len, self.parents.values()))

    @cached_property
    def num_grounded_edges(self) -> int:
        """The number of dependencies between instances, those inside joint blocks included."""
        net = self.net
        if not net.plate_sizes:
            return self.num_edges
        total = 0
        for v, reads in self.parents.items():
            block = net.num_instances(self.joint[v])
            total += net.num_instances(net.plates[v] - self.joint[v]) * block * (block - 1) // 2
            for u, across in reads.items():
                total += net.num_instances(net.plates[u] | net.plates[v]) * net.num_instances(across)
        return total

    @cached_property
    def levels(self) -> tuple[tuple[Hashable, ...], ...]:
        """The latents in groups that can be sampled together, first to last; only latent parents are waited for."""
        level: dict[Hashable, int] = {}
        groups: list[list[Hashable]] = []
        for v in reversed(self.order):
            level[v] = max([level[u] for u in self.parents[v] if u in level], default=-1) + 1
            if level[v] == len(groups):
                groups.append([])
            groups[level[v]].append(v)
        return tuple(map(tuple, groups))

    def to_networkx(self) -> nx.DiGraph:
        """The inverse as a graph, edges from parent to latent; ``"across"`` holds the plates read across."""
        graph = nx.DiGraph()
        graph.add_nodes_from(name for name in self.net.sites if name in self.parents or name in self.net.observed)
        graph.add_edges_from(
            (u, v, {"across": across}) for v in reversed(self.order) for u, across in self.parents[v].items()
        )
        return graph

    def with_edges(self, extra: Iterable[tuple[Hashable, Hashable]]) -> Inverse:
        """Adds dependencies (Webb et al. 2018, section 3.4); a latent that gains one is no longer predictive.

        Args:
            extra: pairs ``(parent, latent)``. The two are aligned on the plates they share, those of the latent's
                joint block aside.

        Raises:
            ValueError: a parent is neither observed nor sampled before its latent.
        """
        parents = {v: dict(reads) for v, reads in self.parents.items()}
        gained = set()
        for u, v in extra:
            if v not in parents or u not in self.net.sites:
                raise ValueError(f"Expected edges from a site to a latent of the inverse; got ({u!r}, {v!r}).")
            if u not in parents[v]:
                parents[v][u] = self.joint[v] & self.net.plates[u]
                gained.add(v)
        return Inverse(self.net, self.order, parents, self.joint, self.predictive - gained)

    def ground(self) -> Inverse:
        """The inverse of ``net.ground()``: one factor an instance, the instances of a joint block in index order."""
        net, parents = self.net, {}
        for v in self.order:
            for instance in reversed(net.instances(v)):
                sources = [
                    source
                    for u, across in self.parents[v].items()
                    for source in net.aligned(u, instance, net.plates[u] - across)
                ]
                block = net.aligned(v, instance, net.plates[v] - self.joint[v])
                parents[instance] = dict.fromkeys([*sources, *block[: block.index(instance)]], NO_PLATES)
        return Inverse(
            net.ground(),
            tuple(parents),
            parents,
            predictive=frozenset(i for v in self.predictive for i in net.instances(v)),
        )

    def __hash__(self) -> int:
        return hash((self.net, self.order))

    def __reduce__(self) -> tuple[Any, ...]:
        parents = {v: dict(reads) for v, reads in self.parents.items()}
        return Inverse, (self.net, self.order, parents, dict(self.joint), self.predictive)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        grounded = f" ({self.num_grounded_edges} between instances)" if self.net.plate_sizes else ""
        yield f"Inverse: {len(self.order)} latents, {self.num_edges} edges{grounded}, {len(self.levels)} levels"
        for v in reversed(self.order):
            line = f"  {site_label(self.net, v)}"
            if self.parents[v]:
                line += " | " + ", ".join(self._reading(v, u) for u in self.parents[v])
            if self.joint[v]:
                line += f"; jointly over {_listed(self.net, self.joint[v])}"
            yield line + ("; from the model" if v in self.predictive else "")

    def _reading(self, v: Hashable, u: Hashable) -> str:
        pooled = self.pooled(v, u)
        return label(u) + (f" over {_listed(self.net, pooled)}" if pooled else "")

    def pooled(self, v: Hashable, u: Hashable) -> Plates:
        """The plates over which latent ``v`` reads all instances of ``u``: those ``v`` lacks, and those across."""
        return (self.net.plates[u] - self.net.plates[v]) | self.parents[v][u]


class Step(NamedTuple):
    """One step of `nami` (a row of Webb et al. 2018, Table 1).

    Attributes:
        frontier: the latents to choose from, in model order.
        site: the latent that is eliminated.
        parents: what it reads in the inverse, and across which shared plates.
        joint: the plates over which its instances form one block.
        fill: the pairs of sites that its elimination couples anew, or across more plates than before.
        cost: the number of grounded edges in ``fill``, which the greedy choice makes least.
        predictive: whether the latent is barren and was peeled off, with the model's own conditional.
    """

    frontier: tuple[Hashable, ...]
    site: Hashable
    parents: dict[Hashable, Plates]
    joint: Plates
    fill: tuple[tuple[Hashable, Hashable], ...]
    cost: int
    predictive: bool


def nami(
    net: BayesNet, *, direction: str = "auto", blocks: Iterable[Iterable[Hashable]] | None = None
) -> Inverse:
    """Returns a faithful and minimal inverse (Webb et al. 2018, Algorithm 1).

    Args:
        net: the network.
        direction: ``"forward"`` eliminates in topological order, ``"reverse"`` in reverse topological order (so it
            samples in the model's order), ``"free"`` by min-fill alone, and ``"auto"`` takes the one of forward and
            reverse with fewer grounded edges (ties: fewer levels, then reverse). A latent goes before one that its
            support depends on in every direction.
        blocks: an ordered partition of the latents that are not marginalized; each block is eliminated completely
            before the next, so the last one is sampled first.

    Raises:
        TypeError: ``net`` is not a `BayesNet`.
        ValueError: an unknown direction; a site unlisted, unknown or repeated in ``blocks``; or an order that
            eliminates a site after one that its support depends on.

    References:
        Webb et al. 2018, "Faithful inversion of generative models for effective amortized inference", section 2
        and appendix B. `pyro_nami.graph.elimination` says where this departs from it.

    Example:
        >>> edges = ["DG", "IG", "IS", "GL", "SJ", "LJ", "GH", "JH"]
        >>> inverse = nami(BayesNet.from_edges(edges, observed="HJ"), direction="forward")
        >>> list(inverse.parents["L"])
        ['J', 'H']
    """
    parts = _check_arguments(net, direction, blocks)
    return _best(net, direction, parts)[0]


def nami_steps(
    net: BayesNet, *, direction: str = "forward", blocks: Iterable[Iterable[Hashable]] | None = None
) -> list[Step]:
    """Returns the steps by which `nami` reaches its inverse; the arguments are those of `nami`.

    The first frontier is of latents with no latent parent, as in the paper; latents whose parents are all observed
    belong to it. A latent of a later block joins the frontier only when its block's turn comes.
    """
    parts = _check_arguments(net, direction, blocks)
    if direction == "auto":
        _, direction = _best(net, direction, parts)
    names = net.indexed.names
    return [
        Step(
            tuple(names[u] for u in choice.frontier),
            names[choice.site],
            _reads(net, choice),
            choice.joint,
            tuple((names[a], names[b]) for a, b in choice.fill),
            choice.cost,
            choice.predictive,
        )
        for choice in search(net, direction, parts, traced=True)
    ]


def stuhlmueller(net: BayesNet) -> Inverse:
    """Returns the heuristic inverse of Stuhlmüller et al. 2013: each latent reads its children and co-parents.

    Sampled from the last latent in model order to the first, a latent reads those of its children and of its
    children's other parents that are observed or come after it. Not faithful in general. Where a child lacks a
    plate of its parent, the parent's instances are co-parents of each other, so they form a joint block.

    References:
        Webb et al. 2018, supplement, appendix C; here observed co-parents are read wherever they come in the model.
    """
    _check_net(net)
    order = _sampled(net)
    rank = {v: i for i, v in enumerate(order)}
    names, index, parents, children, plates = net.indexed
    joint = {v: NO_PLATES.union(*(net.plates[v] - plates[t] for t in children[index[v]])) for v in order}
    reads: dict[Hashable, dict[Hashable, Plates]] = {}
    for v in order:
        family = {u for t in children[index[v]] for u in (t, *parents[t])}
        reads[v] = {
            names[u]: joint[v] & net.plates[names[u]]
            for u in sorted(family)
            if net.sites[names[u]].observed or rank.get(names[u], -1) > rank[v]
        }
    return Inverse(net, order, reads, joint)


def mean_field(net: BayesNet) -> Inverse:
    """Returns the inverse in which every latent reads all observed sites and no latent.

    Sites are aligned on the plates they share: an instance of a local latent reads its own instance of the data.
    """
    _check_net(net)
    order = _sampled(net)[::-1]
    return Inverse(net, order, {v: dict.fromkeys(net.observed, NO_PLATES) for v in order})


def fully_connected(net: BayesNet) -> Inverse:
    """Returns the inverse that assumes no independence: each latent reads all data and all earlier latents.

    Latents are sampled in model order, and every instance reads all earlier ones: each is one block over its plates.
    """
    _check_net(net)
    order = _sampled(net)[::-1]
    parents = {
        v: {u: net.plates[u] & net.plates[v] for u in (*net.observed, *reversed(order[i + 1 :]))}
        for i, v in enumerate(order)
    }
    return Inverse(net, order, parents, {v: net.plates[v] for v in order})


def _best(net: BayesNet, direction: str, blocks: Sequence[Sequence[int]]) -> tuple[Inverse, str]:
    """Returns the inverse in the given direction, or for "auto" the better one, and its direction."""
    if direction != "auto":
        return _invert(net, direction, blocks), direction
    reverse = _invert(net, "reverse", blocks)
    try:
        forward = _invert(net, "forward", blocks)
    except ForbiddenOrder:
        return reverse, "reverse"
    sizes = [(inverse.num_grounded_edges, len(inverse.levels)) for inverse in (reverse, forward)]
    return (forward, "forward") if sizes[1] < sizes[0] else (reverse, "reverse")


def _invert(net: BayesNet, direction: str, blocks: Sequence[Sequence[int]]) -> Inverse:
    names = net.indexed.names
    parents, joint, predictive = {}, {}, set()
    for choice in search(net, direction, blocks):
        name = names[choice.site]
        parents[name] = _reads(net, choice)
        joint[name] = choice.joint
        if choice.predictive:
            predictive.add(name)
    return Inverse(net, tuple(parents), parents, joint, frozenset(predictive))


def _reads(net: BayesNet, choice: Choice) -> dict[Hashable, Plates]:
    names, plates = net.indexed.names, net.indexed.plates
    if not choice.joint:
        return dict.fromkeys([names[u] for u in choice.parents], NO_PLATES)
    return {names[u]: choice.joint & plates[u] for u in choice.parents}


def _sampled(net: BayesNet) -> tuple[Hashable, ...]:
    return tuple(name for name in net.latent if not net.sites[name].marginalized)


def _listed(net: BayesNet, plates: Plates) -> str:
    return " and ".join(label(plate) for plate in net.plate_sizes if plate in plates)


def _check_order(net: BayesNet, order: Sequence[Hashable]) -> None:
    place = {v: i for i, v in enumerate(order)}
    _check_partition(net, [order], "the order")
    for z in order:
        for hi in net.sites[z].support_parents:
            if not net.sites[hi].observed and place.get(hi, -1) < place[z]:
                how = "goes first" if hi in place else "is marginalized"
                raise ValueError(
                    f"Expected {z!r} to be eliminated before {hi!r}, on which its support depends; got an order in "
                    f"which {hi!r} {how}. Change the direction or the blocks."
                )


def _check_parents(
    net: BayesNet,
    order: Sequence[Hashable],
    parents: Mapping[Hashable, Mapping[Hashable, Plates]],
    joint: Mapping[Hashable, Plates],
) -> None:
    known = set(net.observed)
    for v in reversed(order):
        if not parents[v].keys() <= known:
            u = next(u for u in parents[v] if u not in known)
            raise ValueError(
                f"Expected the parents of {v!r} to be observed or sampled before it; got the edge ({u!r}, {v!r})."
            )
        known.add(v)
        if not joint[v] <= net.plates[v]:
            raise ValueError(f"Expected {v!r} to be joint over plates it lies in; got {set(joint[v])!r}.")
        for u, across in parents[v].items() if net.plate_sizes else ():
            if not across <= net.plates[u] & net.plates[v]:
                raise ValueError(
                    f"Expected {v!r} to read {u!r} across plates that they share; got {set(across)!r}."
                )


def _check_partition(net: BayesNet, parts: Sequence[Sequence[Hashable]], what: str) -> None:
    latents = dict.fromkeys(_sampled(net))
    seen: set[Hashable] = set()
    for name in (name for part in parts for name in part):
        if name in seen:
            raise ValueError(f"Expected every latent once in {what}; got {name!r} twice.")
        if name not in latents:
            site = net.sites.get(name)
            kind = "an unknown site" if site is None else "observed" if site.observed else "marginalized"
            raise ValueError(f"Expected latents that a guide samples in {what}; got {name!r}, which is {kind}.")
        seen.add(name)
    if len(seen) < len(latents):
        missing = next(name for name in latents if name not in seen)
        raise ValueError(f"Expected every latent in {what}; got none for {missing!r}. List it.")


def _check_net(net: BayesNet) -> None:
    if not isinstance(net, BayesNet):
        raise TypeError(
            f"Expected a BayesNet; got {type(net).__name__}. Build one with BayesNet.from_edges, "
            "BayesNet.from_networkx or extract_bayesnet."
        )


def _check_arguments(
    net: BayesNet, direction: str, blocks: Iterable[Iterable[Hashable]] | None
) -> list[list[int]]:
    """Returns the blocks in indices."""
    _check_net(net)
    if direction not in DIRECTIONS:
        raise ValueError(f"Expected direction to be one of {', '.join(DIRECTIONS)}; got {direction!r}.")
    if blocks is None:
        parts: list[list[Hashable]] = [list(_sampled(net))]
    else:
        blocks = list(blocks)
        for block in blocks:
            if isinstance(block, str):
                raise TypeError(f"Expected blocks to be lists of site names; got the string {block!r}.")
        parts = [list(block) for block in blocks]
        _check_partition(net, parts, "blocks")
    return [[net.indexed.index[name] for name in part] for part in parts]
