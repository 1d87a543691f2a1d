"""`Inverse`: a factorization of the posterior over the latents of a Bayesian network.

An `Inverse` checks that it is a factorization. `verify_inverse` checks that it is faithful. The
functions that build inverses are in `inversion_methods`.
"""

from __future__ import annotations

__all__ = ["Inverse", "check_partition", "sampled"]

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import networkx as nx

from pyro_nami.graph.network import BayesNet, label, plate_list, site_label
from pyro_nami.graph.sites import NO_PLATES, Edge, Plates


@dataclass(frozen=True)
class Inverse:
    """A factorization of the posterior: the product of q(v | parents[v]) over the latents v.

    Args:
        net: the network that is inverted.
        order: the latents in elimination order; ``reversed(order)`` is a sampling order.
        parents: for each latent, the sites that it reads. Each comes with the shared plates that it is read *across*:
            all of its instances along them are read. On the other shared plates an instance reads the one with its own
            index. Plates that the latent does not lie in are always read across.
        joint: latent -> the plates over which its instances form one block, each instance given those before it.
        predictive: the latents whose factor is the model's own conditional.
        exact: the latents that were eliminated first, in this order, as their conditionals are known exactly. They
            explain the order, and do not count when inverses are compared.

    Raises:
        ValueError: the order is not one of all latents (marginalized ones aside), or a latent reads a site that is
            neither observed nor sampled before it, or plates are read across that are not shared.

    Example:
        >>> net = BayesNet.from_edges(["ab", "bx"], observed=["x"])
        >>> inverse = Inverse(net, ("a", "b"), {"a": {"b": NO_PLATES}, "b": {"x": NO_PLATES}})  # q(b | x) q(a | b)
        >>> inverse.levels, inverse.num_edges
        ((('b',), ('a',)), 2)
    """

    net: BayesNet
    order: tuple[Any, ...]
    parents: Mapping[Any, Mapping[Any, Plates]]
    joint: Mapping[Any, Plates] = field(default_factory=dict)
    predictive: Plates = NO_PLATES
    exact: tuple[Any, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        order = tuple(self.order)
        check_partition(self.net, [order], "the order")
        parents = {v: MappingProxyType(dict(self.parents.get(v, {}))) for v in order}
        joint = {v: frozenset(self.joint.get(v, NO_PLATES)) for v in order}
        vars(self).update(
            order=order,
            parents=MappingProxyType(parents),
            joint=MappingProxyType(joint),
            predictive=frozenset(self.predictive),
        )
        self._check_supports()
        self._check_parents()

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
            own = net.plates[v]
            total += (net.num_pairs(own, own, self.joint[v]) - net.num_instances(own)) // 2
            total += sum(net.num_pairs(net.plates[u], own, across) for u, across in reads.items())
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
        graph.add_nodes_from(
            name for name in self.net.sites if name in self.parents or self.net.sites[name].observed
        )
        graph.add_edges_from(
            (u, v, {"across": across})
            for v in reversed(self.order)
            for u, across in self.parents[v].items()
        )
        return graph

    def with_edges(self, extra: Iterable[Edge]) -> Inverse:
        """Adds dependencies (Webb et al. 2018, section 3.4); a latent that gains one is no longer predictive.

        Args:
            extra: pairs ``(parent, latent)``. An instance reads the parent with its own index on the plates that both
                lie in, and all instances along plates of the latent's block.

        Raises:
            ValueError: a parent is neither observed nor sampled before its latent.
        """
        parents = {v: dict(reads) for v, reads in self.parents.items()}
        gained = set()
        for u, v in extra:
            if v not in parents or u not in self.net.sites:
                raise ValueError(
                    f"Expected edges from a site to a latent of the inverse; got ({u!r}, {v!r})."
                )
            if u not in parents[v]:
                parents[v][u] = self.joint[v] & self.net.plates[u]
                gained.add(v)
        return replace(self, parents=parents, predictive=self.predictive - gained)

    def ground(self) -> Inverse:
        """The inverse of ``net.ground()``: one factor an instance, the instances of a joint block in index order."""
        net = self.net
        parents: dict[Hashable, Mapping[Hashable, Plates]] = {}
        for v in self.order:
            for instance in reversed(net.instances(v)):
                sources = [
                    source
                    for u, across in self.parents[v].items()
                    for source in net.aligned(u, instance, net.plates[u] - across)
                ]
                block = net.aligned(v, instance, net.plates[v] - self.joint[v])
                earlier = block[: block.index(instance)]
                parents[instance] = dict.fromkeys((*sources, *earlier), NO_PLATES)
        return Inverse(
            net.ground(),
            tuple(parents),
            parents,
            predictive=frozenset(i for v in self.predictive for i in net.instances(v)),
        )

    def _check_supports(self) -> None:
        place = {v: i for i, v in enumerate(self.order)}
        for z in self.order:
            for hi in self.net.sites[z].support_parents:
                if not self.net.sites[hi].observed and place.get(hi, -1) < place[z]:
                    how = "goes first" if hi in place else "is marginalized"
                    raise ValueError(
                        f"Expected {z!r} to be eliminated before {hi!r}, on which its support depends; got an order in "
                        f"which {hi!r} {how}. Change the direction or the blocks."
                    )

    def _check_parents(self) -> None:
        plates, known = self.net.plates, set(self.net.observed)
        for v in reversed(self.order):
            for u in self.parents[v].keys() - known:
                raise ValueError(
                    f"Expected the parents of {v!r} to be observed or sampled before it; got the edge ({u!r}, {v!r})."
                )
            known.add(v)
            if not self.joint[v] <= plates[v]:
                raise ValueError(
                    f"Expected {v!r} to be joint over plates it lies in; got {set(self.joint[v])!r}."
                )
            for u, across in self.parents[v].items():
                if not across <= plates[u] & plates[v]:
                    raise ValueError(
                        f"Expected {v!r} to read {u!r} across plates that they share; got {set(across)!r}."
                    )

    def __hash__(self) -> int:
        return hash((self.net, self.order))

    def __reduce__(self) -> tuple[Any, ...]:
        parents = {v: dict(reads) for v, reads in self.parents.items()}
        return Inverse, (
            self.net,
            self.order,
            parents,
            dict(self.joint),
            self.predictive,
            self.exact,
        )

    def __str__(self) -> str:
        grounded = f" ({self.num_grounded_edges} between instances)" if self.net.plate_sizes else ""
        text = f"Inverse: latents {len(self.order)}, edges {self.num_edges}{grounded}, levels {len(self.levels)}"
        for v in reversed(self.order):
            reads = self._reads(v)
            text += f"\n  {site_label(self.net, v)}" + (f" | {', '.join(reads)}" if reads else "")
            text += f"; jointly over {plate_list(self.net, self.joint[v])}" if self.joint[v] else ""
            text += "; from the model" if v in self.predictive else ""
        if self.exact:
            text += f"\nEliminated first, as the model gives their conditionals: {', '.join(map(label, self.exact))}"
        return text

    def _reads(self, v: Hashable) -> list[str]:
        """The sites that latent ``v`` reads, as text; of a loop those of one step: ``z[time - 1]``, ``y[time:]``."""
        sites = self.net.sites
        lag = sites[v].lag
        found = []
        for u in self.parents[v]:
            after = sites[u].lag if lag is not None and sites[u].observed else None
            text = label(u) if after is None else _from_step(label(u), after)
            pooled = self.pooled(v, u)
            found.append(f"{text} over {plate_list(self.net, pooled)}" if pooled else text)
        if lag:
            steps = "[time - 1]" if lag == 1 else f"[time - {lag}:time]"
            found.append(label(v).removesuffix("[time]") + steps)
        return found

    def pooled(self, v: Hashable, u: Hashable) -> Plates:
        """The plates over which latent ``v`` reads all instances of ``u``: those ``v`` lacks, and those across."""
        return (self.net.plates[u] - self.net.plates[v]) | self.parents[v][u]


def _from_step(name: str, lag: int) -> str:
    """``y[time]`` as the data from a step on."""
    start = f"time {'-' if lag < 0 else '+'} {abs(lag)}" if lag else "time"
    return f"{name.removesuffix('[time]')}[{start}:]"


def sampled(net: BayesNet) -> tuple[Any, ...]:
    """The latents that a guide samples, in model order: all but the marginalized ones.

    Raises:
        TypeError: ``net`` is not a `BayesNet`.
    """
    if not isinstance(net, BayesNet):
        raise TypeError(
            f"Expected a BayesNet; got {type(net).__name__}. Build one with BayesNet.from_edges, "
            "BayesNet.from_networkx or extract_bayesnet."
        )
    return tuple(name for name in net.latent if not net.sites[name].marginalized)


def check_partition(net: BayesNet, parts: Sequence[Sequence[Hashable]], what: str) -> None:
    """Raises ValueError unless ``parts`` together list every sampled latent once; ``what`` says what they are."""
    latents = dict.fromkeys(sampled(net))
    seen: set[Hashable] = set()
    for name in (name for part in parts for name in part):
        if name in seen:
            raise ValueError(f"Expected every latent once in {what}; got {name!r} twice.")
        if name not in latents:
            kind = net.sites[name].kind if name in net.sites else "an unknown site"
            raise ValueError(
                f"Expected latents that a guide samples in {what}; got {name!r}, which is {kind}."
            )
        seen.add(name)
    if len(seen) < len(latents):
        missing = next(name for name in latents if name not in seen)
        raise ValueError(f"Expected every latent in {what}; got none for {missing!r}. List it.")
