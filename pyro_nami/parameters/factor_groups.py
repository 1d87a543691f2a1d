"""Groups of factors: which columns a group's network reads, which rows it gives, and in which steps.

Factors with the same batch plates form a *group*: one masked network whose weights are shared
across its plates. Columns are features of *sources* (`conditioning`), rows are parameters of
elements of factors. Both are numbered in *steps*, so that one network serves the dense pass (a
density) and the incremental one (sampling).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyro_nami.messages import warn
from pyro_nami.parameters.additions import PseudoObservations
from pyro_nami.parameters.conditioning import (
    Direct,
    Pooled,
    Source,
    flattened,
    nodes_of,
    parts_of,
    pooled_part,
)

__all__ = [
    "Dependence",
    "Factor",
    "InputColumns",
    "NetworkStep",
    "dependency",
    "num_inputs",
    "plan_steps",
    "with_pseudo_observations",
]

# inputs of an instance that is a pseudo-observation, and their number times the elements of the factor; the network has
# a row for each of the latter, so with ten times as many these are most of its weights
MAX_PSEUDO_INPUTS = 128
MAX_PSEUDO_ROWS = 8192


Dependence = Literal["independent", "sequential", "linear"] | tuple[int, int]


class Factor(NamedTuple):
    """One latent's place in the networks."""

    name: Any  # the latent's: any hashable
    batch: frozenset  # its plates that are dims of the network rather than elements of the factor
    # those that are flattened into its elements, outermost first, with batch dim and size
    joint: Mapping[str, tuple[int, int]]
    # of an instance, times the instances in ``joint``, one instance after the other
    num_elements: int
    num_params: int  # parameters an element, of its family
    num_features: int  # features an element
    sources: tuple[Source, ...]  # what it reads
    # which of an element's parameters are locations, relative to the anchor; a list
    locations: Sequence[int] = ()
    # How elements depend on each other: not at all; drawn one by one, given those before; or drawn at once, from noise
    # that a linear map couples, or splines in sequence, (how many, of how many bins).
    dependence: Dependence = "independent"
    # the pseudo-observations of it that instances of its pooled sources stand for
    pseudo: tuple[PseudoObservations, ...] = ()
    # node -> for each element of the factor, which elements of the node it reads; nodes that are not read in full
    parts: Mapping[Any, tuple[tuple[bool, ...], ...]] = {}

    @property
    def sequential(self) -> bool:
        """Whether elements are drawn one by one, given those before."""
        return self.dependence == "sequential"

    @property
    def coupled(self) -> bool:
        """Whether elements come all at once of noise that depends on each other."""
        return self.dependence not in ("independent", "sequential")

    @property
    def num_rows(self) -> int:
        """Rows an element: parameters of its family, then those of its pseudo-observations."""
        return self.num_params + sum(each.num_params for each in self.pseudo)

    @property
    def own(self) -> Source:
        """Its own elements, as the other factors of its group read them."""
        return flattened(Direct(self.name), tuple(self.joint))

    @property
    def dims(self) -> list[int]:
        """The batch dims of the plates in ``joint``."""
        return [dim for dim, _ in self.joint.values()]

    @property
    def sizes(self) -> list[int]:
        """The sizes of the plates in ``joint``."""
        return [size for _, size in self.joint.values()]


def num_inputs(source: Pooled, sizes: Mapping[Source, int]) -> int:
    """Returns the number of inputs of an instance; ``sizes``: source -> number of its features."""
    return sum(sizes[part] for part in source.inputs)


def with_pseudo_observations(
    factors: Sequence[Factor], adding: Collection[Any], sizes: Mapping[Source, int]
) -> tuple[list[Factor], dict[Pooled, int]]:
    """Returns the factors with pseudo-observations for factors in ``adding``, and pooled source -> number of heads.

    A block takes pseudo-observations from sets of its members' own only, which it reads side by side.
    """
    heads: dict[Pooled, int] = {}
    found = []
    for factor in factors:
        pseudo = []
        for source in factor.sources if factor.name in adding else ():
            pooled = pooled_part(source)
            if pooled is None or flattened(pooled, tuple(factor.joint)) not in parts_of(source):
                continue
            width, first = num_inputs(pooled, sizes), heads.get(pooled, 0)
            count = factor.num_elements * sizes[pooled] // sizes[source]
            if width <= MAX_PSEUDO_INPUTS and width * factor.num_elements <= MAX_PSEUDO_ROWS:
                heads[pooled] = first + count
                pseudo.append(PseudoObservations(source, pooled, first, count, width))
            else:
                warn(
                    f"Site '{factor.name}' takes no evidence from the instances of plate '{pooled.plate}': {width} "
                    f"inputs by {factor.num_elements} elements are more than {MAX_PSEUDO_INPUTS}, or than "
                    f"{MAX_PSEUDO_ROWS} in all. Its precision cannot follow their number; embeddings= with fewer "
                    "features would let it."
                )
        found.append(factor._replace(pseudo=tuple(pseudo)))
    return found, heads


class InputColumns(NamedTuple):
    """Columns of a network, from ``start`` on: features ``first`` to ``last - 1`` of a source."""

    source: Source
    first: int
    last: int
    start: int = 0

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.last - self.first

    @property
    def where(self) -> slice:
        """The columns' place in the network."""
        return slice(self.start, self.start + self.width)


class NetworkStep(NamedTuple):
    """What a network takes in and gives out at one step."""

    columns: list[InputColumns]
    rows: dict[Any, int]  # factor -> number of its rows


def plan_steps(
    factors: Sequence[Factor], position: Mapping[Any, int], sizes: Mapping[Source, int]
) -> list[NetworkStep]:
    """Returns the steps of a group: as few as the order of sampling allows.

    A factor opens a step unless all it reads is known when the step before is taken; a sequential factor has one step
    an element. A source is read at the first step at which it is known. The rows of a factor follow one another.
    ``position`` is that of all latents in sampling order, ``sizes`` the number of features of each source.

    Example:
        >>> y, z = Direct("y"), Direct("z")
        >>> first = Factor("z", frozenset(), {}, 1, 2, 1, (y,))
        >>> factors = [first, first._replace(name="w", sources=(y, z))]
        >>> [(step.columns[0].source, step.rows) for step in plan_steps(factors, {"z": 0, "w": 1}, {y: 3, z: 1})]
        [(Direct(node='y'), {'z': 2}), (Direct(node='z'), {'w': 2})]
    """
    known = {
        s: max((position.get(n, -1) for n in nodes_of(s)), default=-1)
        for f in factors
        for s in f.sources
    }
    steps: list[NetworkStep] = []
    heads: list[tuple[int, NetworkStep]] = []  # steps that open for a factor, with its position
    opened = False
    for factor in factors:
        needs = max((known[source] for source in factor.sources), default=-1)
        if factor.sequential or not opened or needs >= heads[-1][0]:
            steps.append(NetworkStep([], {}))
            heads.append((position[factor.name], steps[-1]))
        opened = not factor.sequential
        steps[-1].rows[factor.name] = factor.num_rows * (
            1 if factor.sequential else factor.num_elements
        )
        for element in range(factor.num_elements - 1) if factor.sequential else ():
            first, last = element * factor.num_features, (element + 1) * factor.num_features
            steps.append(
                NetworkStep([InputColumns(factor.own, first, last)], {factor.name: factor.num_rows})
            )
    # Of a sequential factor others read the last element; those before it are read as it is drawn.
    last_elements = {factor.own: factor.num_features for factor in factors if factor.sequential}
    for source, when in known.items():
        step = next(step for place, step in heads if when < place)
        size = sizes[source]
        step.columns.append(InputColumns(source, size - last_elements.get(source, size), size))
    starts = accumulate((column.width for step in steps for column in step.columns), initial=0)
    return [
        step._replace(columns=[each._replace(start=next(starts)) for each in step.columns])
        for step in steps
    ]


def dependency(factors: Sequence[Factor], columns: Sequence[InputColumns]) -> Tensor:
    """Returns which columns each row reads, boolean ``(rows, columns)``.

    Rows of pseudo-observations read no pooled features.
    """
    total = sum(column.width for column in columns)
    sizes = {column.source: column.last for column in sorted(columns, key=lambda each: each.last)}
    matrix = []
    for factor in factors:
        reads = torch.zeros(factor.num_elements, factor.num_rows, total, dtype=torch.bool)
        for column in columns:
            source, here = column.source, reads[..., column.where]
            if source in factor.sources:
                here[:, : factor.num_params if pooled_part(source) else None] = True
            elif factor.sequential and source == factor.own:
                here[column.last // factor.num_features :] = True
            if isinstance(source, Direct) and source.node in factor.parts:
                parts = torch.tensor(factor.parts[source.node])
                which = torch.arange(column.first, column.last) * parts.shape[1] // sizes[source]
                here &= parts[:, which].unsqueeze(1)
        matrix.append(reads.flatten(0, 1))
    return torch.cat(matrix)
