"""Groups of factors: which columns a group's network reads, which rows it gives, and in what steps.

Factors with the same batch plates form one *group*, and a group is one masked network whose weights are shared
across its plates. Columns of that network are elements of *sources* (see `pyro_nami.guide.conditioning`), rows are
parameters of elements of factors, and both are numbered in *steps*, so that one network serves the dense pass (a
density) and the incremental one (sampling). Change this module to change what a group looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_nami.guide.conditioning import Direct, Pooled, Source, flattened, nodes_of
from pyro_nami.guide.evidence import EvidenceRead
from pyro_nami.networks.masked import MaskedMLP
from pyro_nami.networks.separate import SeparateMLP
from pyro_nami.networks.stepped import Base

__all__ = ["Factor", "Group", "pools"]

_COPIES, _MOST_MEMORY = 6, 5e8  # weights, mask, masked weights, gradient and two of the optimizer's; bytes


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
        coupled: whether it is given them by a linear map, all at once.
        sources: what it reads.
        locations: which of an element's parameters are locations, relative to the anchor.
        evidence: those sources whose instances add evidence of their own.
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
    evidence: tuple[EvidenceRead, ...] = ()

    @property
    def num_raw(self) -> int:
        """Raw parameters an element: those of its family, then those of its evidence."""
        return self.num_params + sum(read.num_params for read in self.evidence)


class _Step(NamedTuple):
    """What a group's network takes in and gives out at one step.

    Reads are (source, element), rows are (factor, elements). The element is None where a source is read as a whole.
    """

    position: int
    reads: list[tuple[Source, int | None]]
    rows: list[tuple[Factor, range]]


class Group:
    """The columns and rows of one group's network, in steps."""

    def __init__(
        self, factors: Sequence[Factor], position: Mapping[Hashable, int], size: Callable[[Source], int]
    ) -> None:
        self.factors = tuple(factors)
        self.steps = _plan_steps(factors, position)
        self.head: dict[Hashable, int] = {}
        widths: dict[Source, int] = {}
        for number, step in enumerate(self.steps):
            for factor, _ in step.rows:
                self.head.setdefault(factor.name, number)
            for source, _ in step.reads:
                widths[source] = size(source)
        self._elements: dict[Source, Factor] = {_own(f): f for f in factors}
        self._row_blocks: dict[tuple[int, int], tuple[list, list]] = {}
        self.columns = [[self._column(read, widths) for read in step.reads] for step in self.steps]
        self.starts: dict[tuple[Source, int], int] = {}  # (source, first feature) -> the first of its columns
        start = 0
        for source, first, last in self.all_columns:
            self.starts[source, first] = start
            start += last - first

    @property
    def all_columns(self) -> list[tuple[Source, int, int]]:
        """The columns of all steps, as (source, first feature, last feature + 1)."""
        return [column for step in self.columns for column in step]

    def rows_of(self, params: Callable[[Factor], Sequence[int]]) -> dict[Hashable, list[list[int]]]:
        """Returns factor -> the rows of some of each element's parameters, those that ``params`` names."""
        found: dict[Hashable, list[list[int]]] = {}
        start = 0
        for step in self.steps:
            for factor, elements in step.rows:
                for _ in elements:
                    found.setdefault(factor.name, []).append([start + param for param in params(factor)])
                    start += factor.num_raw
        return found

    def _check_memory(self, columns: int, units: int, factory: dict) -> None:
        """Raises where the output layer, which holds rows times columns, would take more memory than is sensible."""
        rows = sum(factor.num_elements * factor.num_raw for factor in self.factors)
        size = rows * (columns + units + 1) * torch.empty(0, **factory).element_size() * _COPIES
        if size <= _MOST_MEMORY:
            return
        largest = max(self.factors, key=lambda factor: factor.num_elements)
        over = " and ".join(repr(plate) for plate in largest.joint)
        what = f"a block of {largest.num_elements} elements" + (f" over plate {over}" if over else "")
        raise ValueError(
            f"Expected networks of at most {_MOST_MEMORY / 1e9:.1f} GB with their gradients and optimizer state; got "
            f"{size / 1e9:.1f} GB, most of it for site '{largest.name}', {what} that depend on each other given the "
            'data. Use within="independent", which gives these dependencies up and needs no fixed size; another '
            "`inverse` or `blocks`, so that the smaller side of a crossed design forms the block; or fewer elements."
        )

    def _column(self, read: tuple[Source, int | None], widths: Mapping[Source, int]) -> tuple[Source, int, int]:
        """Returns a read as (source, first feature, last feature + 1)."""
        source, element = read
        if element is None:
            return source, 0, widths[source]
        count = self._elements[source].num_features
        return source, element * count, (element + 1) * count

    def row_blocks(self, begin: int, stop: int) -> tuple[list[Hashable], list[int]]:
        """Returns the factors that steps ``begin`` to ``stop - 1`` give rows for, and the number of rows of each."""
        if (begin, stop) not in self._row_blocks:
            sizes: dict[Hashable, int] = {}
            for step in self.steps[begin:stop]:
                for factor, elements in step.rows:
                    sizes[factor.name] = sizes.get(factor.name, 0) + len(elements) * factor.num_raw
            self._row_blocks[begin, stop] = list(sizes), list(sizes.values())
        return self._row_blocks[begin, stop]

    def build(
        self,
        hidden_features: Sequence[int],
        shared: bool,
        skip: bool,
        activation: Callable,
        base: Base,
        factory: dict,
    ) -> nn.Module:
        columns = self.all_columns
        starts, total = [], 0
        for _, first, last in columns:
            starts.append(total)
            total += last - first
        self._check_memory(total, sum(hidden_features[-1:]), factory)
        rows: list[Tensor] = []
        blocks: list[list[int]] = []
        for step in self.steps:
            for factor, elements in step.rows:
                for element in elements:
                    row = torch.zeros(total, dtype=torch.bool)
                    unpooled = row.clone()
                    for (source, first, last), start in zip(columns, starts):
                        own = factor.sequential and source == _own(factor)
                        if source in factor.sources or own and first < element * factor.num_features:
                            row[start : start + last - first] = True
                            unpooled[start : start + last - first] = not pools(source)
                    for kind, count in ((row, factor.num_params), (unpooled, factor.num_raw - factor.num_params)):
                        if count:
                            blocks.append(list(range(len(rows), len(rows) + count)))
                            rows.extend([kind] * count)
        dependency = torch.stack(rows)
        options: dict[str, Any] = {
            "input_splits": [sum(last - first for _, first, last in step) for step in self.columns],
            "output_splits": [sum(f.num_raw * len(elements) for f, elements in step.rows) for step in self.steps],
            "skip": skip,
            "activation": activation,
            "base": base,
            **factory,
        }
        if shared:
            return MaskedMLP(dependency, hidden_features, **options)
        return SeparateMLP(dependency, hidden_features, factors=blocks, **options)


def _own(factor: Factor) -> Source:
    """The source of a factor's own elements, as the other factors of its group read them."""
    return flattened(Direct(factor.name), factor.joint)


def pools(source: Source) -> bool:
    """Whether a source encodes a set."""
    return isinstance(source, Pooled) or not isinstance(source, Direct) and pools(source.source)


def _plan_steps(factors: Sequence[Factor], position: Mapping[Hashable, int]) -> list[_Step]:
    """Returns the steps of a group: as few as the order of sampling allows.

    A factor opens a step unless all it reads is known when the step before is taken; a sequential factor has one step
    an element. A source is read at the first step at which it is known.
    """
    known = {s: max((position.get(n, -1) for n in nodes_of(s)), default=-1) for f in factors for s in f.sources}
    sequential = {_own(factor): factor for factor in factors if factor.sequential}
    steps: list[_Step] = []
    head = None
    for factor in factors:
        needs = max((known[source] for source in factor.sources), default=-1)
        if factor.sequential or head is None or needs >= head.position:
            head = _Step(position[factor.name], [], [])
            steps.append(head)
        if not factor.sequential:
            head.rows.append((factor, range(factor.num_elements)))
            continue
        head.rows.append((factor, range(1)))
        for element in range(1, factor.num_elements):
            steps.append(_Step(head.position, [(_own(factor), element - 1)], [(factor, range(element, element + 1))]))
        head = None
    heads = [step for step in steps if not step.reads]
    for source, when in known.items():
        step = next(step for step in heads if when < step.position)
        if source in sequential:
            step.reads.append((source, sequential[source].num_elements - 1))
        else:
            step.reads.append((source, None))
    return steps
