"""What a model's network says of its latents: which depend on each other, and the levels of a joint block."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import networkx as nx
import torch

from pyro_nami.graph.elimination import eliminate
from pyro_nami.graph.inverse import Inverse, sampled
from pyro_nami.graph.inversion_methods import nami
from pyro_nami.graph.network import BayesNet
from pyro_nami.program.runner import Sites

__all__ = ["Relations"]


class Levels(NamedTuple):
    """The levels of a joint block, in the order of elimination.

    Attributes:
        depths: latent -> its level.
        num_lifted: number of lifted levels; all latents of the last level are one dense vector.
        elements: latent -> number of its elements, of one instance where its level is lifted.
    """

    depths: dict[str, int]
    num_lifted: int
    elements: dict[str, int]

    @property
    def blocks(self) -> list[list[str]]:
        """The latents of each level."""
        depths = sorted(set(self.depths.values()))
        return [[name for name in self.depths if self.depths[name] == depth] for depth in depths]

    @property
    def dense(self) -> dict[str, int]:
        """The latents in the dense vector -> number of their elements."""
        return {
            name: self.elements[name]
            for name, depth in self.depths.items()
            if depth >= self.num_lifted
        }


@dataclass(frozen=True)
class Relations:
    """The network of a model, with the sites of a run of it.

    Args:
        net: the network.
        nodes: the sites of the run.
        frames: the plates of each site.
    """

    net: BayesNet
    nodes: Sites
    frames: Mapping[str, frozenset[str]]

    @functools.cached_property
    def predictive(self) -> set:
        """Latents without data."""
        seen = set().union(*(nx.ancestors(self.net.graph, name) for name in self.net.observed))
        return set(self.net.latent) - seen

    def fn(self, name: str) -> Any:
        """Returns a site's distribution."""
        return self.nodes[name]["fn"]

    def parents(self, name: Any) -> set:
        """Returns all parents of a site."""
        return set(self.net.graph.predecessors(name))

    def latent_parents(self, names: Sequence[str]) -> set:
        """Returns the latents that are parents of one of some sites."""
        return set().union(*map(self.parents, names)).difference(self.net.observed)

    def children(self, name: Any) -> set:
        """Returns the children of a latent that have data, or are data."""
        return set(self.net.graph.successors(name)).difference(self.predictive)

    def latent_children(self, name: Any) -> set:
        """Returns the latents among the children of a latent that have data."""
        return self.children(name).difference(self.net.observed)

    def data(self, name: Any) -> set:
        """Returns the observed children of a latent."""
        return self.children(name).intersection(self.net.observed)

    def near(self, name: Any) -> set:
        """Returns a latent's children and parents, and all parents of its data."""
        return self.children(name).union(*map(self.parents, [name, *self.data(name)]))

    def needed(self, names: Sequence[str]) -> frozenset:
        """Returns the latents that the density of some latents and their data reads."""
        data = set().union(*map(self.data, names))
        return frozenset(self.latent_parents([*names, *data]).difference(names))

    def dependencies(self, inverse: Inverse) -> dict[Any, set]:
        """Returns latent -> the sites that its posterior conditional depends on, in the order of an inverse."""
        sites = {name: site for name, site in self.net.sites.items() if name not in self.predictive}
        edges = [(parent, child) for parent, child in self.net.edges if child in sites]
        net = BayesNet(sites, edges, self.net.plate_sizes, self.net.nesting)
        hidden = [name for name in net.latent if sites[name].marginalized]
        order = [*hidden, *(name for name in inverse.order if name in sites)]
        return {name: set(parents) for name, parents in eliminate(net, order).parents.items()}

    def parts(self, first: Sequence[Sequence[str]]) -> list[list[str]]:
        """Returns blocks of all latents: the latents without data, the given blocks, and the rest."""
        taken = self.predictive.union(*first)
        barren = [name for name in sampled(self.net) if name in self.predictive]
        rest = [name for name in sampled(self.net) if name not in taken]
        return [list(part) for part in (barren, *first, rest) if part]

    def levels(self, names: Sequence[str], inverse: Inverse | None = None) -> Levels:
        """Returns the levels in which a block is eliminated.

        The plates of lifted levels lie in each other. What a dense latent depends on is dense, and so are latents whose
        instances depend on each other in the inverse, by default the one that eliminates these levels first.

        Args:
            names: the latents, each after its parents.
            inverse: the inverse.
        """
        sizes = Counter[frozenset[str]]()
        for name in names:
            sizes[self.frames[name]] += self._elements(name, is_dense=True)
        chain: list[frozenset[str]] = []
        for each in sorted(filter(None, sizes), key=lambda each: (-sizes[each], sorted(each))):
            if all(each <= other or other <= each for other in chain):
                chain.append(each)
        chain.sort(key=len, reverse=True)
        dense = {name for name in names if self.frames[name] not in chain}
        while True:
            for name in reversed(names):
                if not dense.isdisjoint(self.children(name)):
                    dense.add(name)
            levels = self._levels(names, chain, dense)
            if not levels.num_lifted:
                return levels
            given = inverse or nami(self.net, direction="reverse", blocks=self.parts(levels.blocks))
            coupled = {name for name in names if given.joint[name]} - dense
            if not coupled:
                return levels
            dense |= coupled

    def _levels(
        self, names: Sequence[str], chain: Sequence[frozenset[str]], dense: set[str]
    ) -> Levels:
        """Returns the levels of latents in the plates of a chain, given the dense ones."""
        lifted = {self.frames[name] for name in names if name not in dense}
        used = [frames for frames in chain if frames in lifted]
        depths = {
            name: len(used) if name in dense else used.index(self.frames[name]) for name in names
        }
        elements = {name: self._elements(name, name in dense) for name in names}
        return Levels(depths, len(used), elements)

    def _elements(self, name: str, is_dense: bool) -> int:
        """Returns the number of elements of a latent: of all instances where it is dense, else of one."""
        fn = self.fn(name)
        return torch.Size(fn.shape() if is_dense else fn.event_shape).numel()
