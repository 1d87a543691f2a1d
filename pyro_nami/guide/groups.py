"""Groups of factors: which columns a group's network reads, which rows it gives, and in what steps.

Factors with the same batch plates form one *group*, and a group is one masked network whose weights are shared
across its plates. Columns of that network are features of *sources* (see `pyro_nami.guide.conditioning`), rows are
parameters of elements of factors, and both are numbered in *steps*, so that one network serves the dense pass (a
density) and the incremental one (sampling). Change this module to change what a group's network reads and gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.guide.conditioning import Direct, Source, flattened, nodes_of, pooled_part
from pyro_nami.guide.pseudo_observations import PseudoObservations

__all__ = ["Column", "Factor", "Step", "dependency", "plan_steps"]


class Factor(NamedTuple):
    """One latent's place in the networks.

    Attributes:
        name: the latent.
        batch: its batch plates, those that are dims of the network rather than elements of the factor.
        joint: its plates that are flattened into its elements, outermost first.
        num_elements: elements of the factor (those of its instances in ``joint``, one after the other).
        num_params: parameters an element, of its family.
        num_features: features an element.
        sequential: whether element e is drawn given elements before e, one by one.
        sources: what it reads.
        locations: which of an element's parameters are locations, relative to the anchor.
        coupled: whether an element is given those before it by a linear map, all at once.
        pseudo: the pseudo-observations that instances of its pooled sources are of it.
    """

    name: Any  # a site's: any hashable
    batch: frozenset
    joint: tuple[str, ...]
    num_elements: int
    num_params: int
    num_features: int
    sequential: bool
    sources: tuple[Source, ...]
    locations: tuple[int, ...] = ()
    coupled: bool = False
    pseudo: tuple[PseudoObservations, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows an element: parameters of its family, then those of its pseudo-observations."""
        return self.num_params + sum(each.num_params for each in self.pseudo)

    @property
    def where(self) -> slice | list[int]:
        """Its locations among the rows of an element; a slice, by which a tensor gives a view, where there is one."""
        first, last = (self.locations[0], self.locations[-1]) if self.locations else (0, -1)
        return slice(first, last + 1) if len(self.locations) == last + 1 - first else list(self.locations)

    @property
    def own(self) -> Source:
        """Its own elements, as the other factors of its group read them."""
        return flattened(Direct(self.name), self.joint)


class Column(NamedTuple):
    """Columns of a network, from ``start`` on: features ``first`` to ``last - 1`` of a source."""

    source: Source
    first: int
    last: int
    start: int = 0


class Step(NamedTuple):
    """What a network takes in and gives out at one step: columns, and the rows of some elements of factors."""

    columns: list[Column]
    rows: list[tuple[Factor, int]]


def plan_steps(factors: Sequence[Factor], position: Mapping[Any, int], sizes: Mapping[Source, int]) -> list[Step]:
    """Returns the steps of a group: as few as the order of sampling allows.

    A factor opens a step unless all it reads is known when the step before is taken; a sequential factor has one step
    an element. A source is read at the first step at which it is known. The rows of a factor follow one another.

    Args:
        factors: of the group, in sampling order.
        position: of each factor in sampling order.
        sizes: source -> number of its features.
    """
    known = {s: max((position.get(n, -1) for n in nodes_of(s)), default=-1) for f in factors for s in f.sources}
    sequential = {factor.own: factor for factor in factors if factor.sequential}
    steps: list[Step] = []
    heads: list[tuple[int, Step]] = []  # the first steps of their factors, with the first's position
    opened = False
    for factor in factors:
        needs = max((known[source] for source in factor.sources), default=-1)
        if factor.sequential or not opened or needs >= heads[-1][0]:
            steps.append(Step([], []))
            heads.append((position[factor.name], steps[-1]))
        opened = not factor.sequential
        steps[-1].rows.append((factor, 1 if factor.sequential else factor.num_elements))
        ends = [factor.num_features * element for element in range(1, factor.num_elements)]
        for end in ends if factor.sequential else ():
            steps.append(Step([Column(factor.own, end - factor.num_features, end)], [(factor, 1)]))
    for source, when in known.items():
        # The other elements of a sequential factor are read as they are drawn.
        first = sizes[source] - sequential[source].num_features if source in sequential else 0
        step = next(step for place, step in heads if when < place)
        step.columns.append(Column(source, first, sizes[source]))
    starts = accumulate((column.last - column.first for step in steps for column in step.columns), initial=0)
    return [step._replace(columns=[each._replace(start=next(starts)) for each in step.columns]) for step in steps]


def dependency(factors: Sequence[Factor], columns: Sequence[Column]) -> tuple[Tensor, list[list[int]]]:
    """Returns which columns each row reads, boolean ``(rows, columns)``, and the rows that read the same, in lists.

    Rows of pseudo-observations read no pooled features.
    """
    total = max((column.start + column.last - column.first for column in columns), default=0)
    rows: list[Tensor] = []
    blocks: list[list[int]] = []
    for factor in factors:
        reads = torch.zeros(factor.num_elements, 2, total, dtype=torch.bool)
        for source, first, last, start in columns:
            here = slice(start, start + last - first)
            if source in factor.sources:
                reads[:, 0, here] = True
                reads[:, 1, here] = pooled_part(source) is None
            elif factor.sequential and source == factor.own:
                reads[last // factor.num_features :, :, here] = True
        for element in reads:
            for kind, count in zip(element, (factor.num_params, factor.num_rows - factor.num_params)):
                if count:
                    blocks.append(list(range(len(rows), len(rows) + count)))
                    rows.extend([kind] * count)
    return torch.stack(rows), blocks
