"""The network of one group of factors, and the averages that it keeps beside its weights.

Inputs are standardized by running averages (`networks.Running`). Rows have units of their own:
locations are in units of the spread of draws about the row's bias.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pyro_nami.factors.path_scored import PathShare
from pyro_nami.networks.masked import Base, MaskedMLP
from pyro_nami.networks.running import Running
from pyro_nami.parameters.conditioning import nodes_of, pooled_part
from pyro_nami.parameters.factor_groups import Factor, InputColumns, NetworkStep, dependency
from pyro_nami.parameters.spline_stack import SplineStack

__all__ = ["GroupNetwork", "PlacedFactor", "TooLargeError"]

# What weights are divided beyond: where a guide is compiled on simulations; where it is trained on one data set as
# Pyro's own guides are, at the rates that suit these; and where it is, but data vary, which weights have to tell apart.
# Simulations are few, and smooth functions serve others as well.
_COMPILED = Base(32.0, 64.0, 8.0, variances=(1 / 3, 1 / 3))
_TRAINED = Base(1.0, 8.0, 0.25, paced=True, patient=True)
_VARYING = Base(32.0, 64.0, 8.0, paced=True)
# least scale of an input, in units of its spread at the first call: of a single latent, and of what is pooled
MIN_SCALE = torch.finfo(torch.float32).eps
MIN_POOLED_SCALE = 0.1
# bytes of an output layer with its copies where simulations train it; where one data set does, at rates that suit small
# networks, a tenth: blocks of 1000 elements that depend on each other. With ten times fewer, it is blocks of 320.
MAX_BYTES = 5e8


@dataclass(frozen=True, eq=False)
class PlacedFactor:
    """A factor's place in the network of its group."""

    factor: Factor
    group: GroupNetwork
    step: int  # at which the factor's first rows come
    first_row: int
    stack: SplineStack | None  # splines in sequence that couple its elements
    read: Tensor | None  # columns that the splines read
    path_share: PathShare = field(default_factory=PathShare)

    def rows(self, values: Tensor) -> Tensor:
        """Returns the factor's part of ``values``, one a row of the network: a view ``(elements, rows)``."""
        count = self.factor.num_elements * self.factor.num_rows
        return values[self.first_row : self.first_row + count].view(-1, self.factor.num_rows)

    def locations(self, values: Tensor) -> Tensor:
        """Returns the location rows' part of ``values``, of a factor with one an element: a view ``(elements,)``."""
        return self.rows(values)[:, self.factor.locations[0]]

    def set_units(self, scale: float, anchor: Tensor) -> None:
        """Sets the units of locations: of biases, the unit of unconstrained space; else the factor's first scale.

        Args:
            scale: of the factor at first, in unconstrained space.
            anchor: of its prior there, ``(elements,)``.
        """
        mlp, where = self.group.mlp, self.factor.locations
        anchor = anchor.double().unsqueeze(-1)
        self.rows(mlp.units)[:, where] = (scale / anchor).to(mlp.units)
        self.rows(mlp.bias_units)[:, where] = (1 / anchor).to(mlp.units)


class GroupNetwork:
    """A group's network ``mlp``, and shift and scale of its inputs, ``running``.

    Args:
        factors: of the group, in sampling order.
        steps: as planned.
        latents: the nodes that are no data.
        simulated: whether the guide is trained on simulations rather than on data.
        varying: whether data differ from step to step, without being simulated.
        hidden_features, skip, options: of the network.
        factory: its dtype and device.
        shape_unit: unit of rows that are no locations, of guides that data train: how scales move with other latents
            matters less, and is noisier.
    """

    def __init__(
        self,
        factors: Sequence[Factor],
        steps: Sequence[NetworkStep],
        latents: Collection[Any],
        *,
        simulated: bool,
        varying: bool,
        hidden_features: Sequence[int],
        factory: Mapping[str, Any],
        skip: bool = True,
        shape_unit: float = 0.1,
        **options: Any,
    ) -> None:
        self.factors, self.steps = tuple(factors), tuple(steps)
        columns, latents = self.columns(0, len(steps)), frozenset(latents)
        # Sources of data alone. Where data are the same in every call, a group without plates does not read them.
        self.data = frozenset(
            column.source for column in columns if latents.isdisjoint(nodes_of(column.source))
        )
        is_varied = simulated or varying or bool(factors[0].batch)
        self.constant = frozenset() if is_varied else self.data
        rows = sum(factor.num_elements * factor.num_rows for factor in factors)
        inputs = sum(column.width for column in columns)
        # six numbers a weight: itself, its mask, the product, the gradient, and two averages of the optimizer
        column_bytes = 6 * rows * torch.empty(0, **factory).element_size()
        most = MAX_BYTES if simulated else MAX_BYTES / 10
        # Hidden units alone carry many inputs to factors that are drawn in one go.
        at_once = not any(factor.sequential or factor.coupled for factor in factors)
        if simulated and at_once and hidden_features and inputs * column_bytes > most:
            skip = False
        units = sum(hidden_features[-1:]) if inputs else 0
        _check_memory(factors, (inputs if skip else 0) + units + 1, column_bytes, most)
        self.reads = dependency(factors, columns)  # which columns each row reads
        base = _COMPILED if simulated else _VARYING if varying else _TRAINED
        self.places = self._places(hidden_features, base, factory)
        self.mlp = MaskedMLP(
            self.reads,
            hidden_features,
            skip=skip,
            input_splits=[sum(column.width for column in step.columns) for step in steps],
            output_splits=[sum(step.rows.values()) for step in steps],
            base=base,
            **options,
            **factory,
        )
        if not simulated:
            self.mlp.set_units(torch.full_like(self.mlp.units, shape_unit))
        self.running = self._standardization(columns, latents, simulated)

    def _places(
        self, hidden_features: Sequence[int], base: Base, factory: Mapping[str, Any]
    ) -> dict[Any, PlacedFactor]:
        """Returns factor -> its place, with splines in sequence where it has some."""
        head = {name: i for i, step in reversed([*enumerate(self.steps)]) for name in step.rows}
        counts = (factor.num_elements * factor.num_rows for factor in self.factors)
        places = {}
        for factor, first in zip(self.factors, accumulate(counts, initial=0)):
            stack = read = None
            if isinstance(factor.dependence, tuple):
                transforms, bins = factor.dependence
                read = self.reads[first].nonzero().flatten().to(factory.get("device"))
                stack = SplineStack(
                    factor.num_elements,
                    len(read),
                    transforms=transforms,
                    bins=bins,
                    hidden_features=hidden_features,
                    base=base,
                    **factory,
                )
            places[factor.name] = PlacedFactor(factor, self, head[factor.name], first, stack, read)
        return places

    def _standardization(
        self, columns: Sequence[InputColumns], latents: frozenset[Any], simulated: bool
    ) -> Running:
        """Returns the running averages of inputs: those of latents follow training, and those of data do not."""
        floor: list[float] = []
        follows: list[bool] = []
        for column in columns:
            source, width = column.source, column.width
            pure = nodes_of(source) <= latents and pooled_part(source) is None
            floor += width * [MIN_SCALE if pure else MIN_POOLED_SCALE]
            follows += width * [not simulated and source not in self.data]
        units = self.mlp.units
        return Running(units.new_tensor(floor), torch.tensor(follows).bool().to(units.device))

    def columns(self, begin: int, stop: int) -> list[InputColumns]:
        """Returns the columns of steps ``begin`` to ``stop - 1``."""
        return [column for step in self.steps[begin:stop] for column in step.columns]

    def blocks(self, begin: int, stop: int) -> Mapping[Any, int]:
        """Returns factor -> the number of rows that steps ``begin`` to ``stop - 1`` give it."""
        sizes = Counter[Any]()
        for step in self.steps[begin:stop]:
            sizes.update(step.rows)
        return sizes

    def standardize(self, x: Tensor, moving: Collection[Any]) -> None:
        """Standardizes inputs by the mean and standard deviation of ``x``, ``(*batch, columns)``, of simulations.

        Columns of zeros and ones are left as they are, and so are columns that encoders give, whose weights will move
        them: features of sets, and of ``moving`` nodes.
        """
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        center, scale = x.mean(0), x.std(0)
        left = ((x == 0) | (x == 1)).all(0) | ~(scale > MIN_SCALE)
        for column in self.columns(0, len(self.steps)):
            source = column.source
            if pooled_part(source) is not None or not nodes_of(source).isdisjoint(moving):
                left[column.where] = True
        self.running.center = center.masked_fill(left, 0.0)
        self.running.scale = scale.masked_fill(left, 1.0)

    def learn(self, innovations: Mapping[Any, Tensor]) -> None:
        """Updates the units of locations by draws ``(*batch, elements)`` of factors, relative to their anchors."""
        share = self.running.share
        bias = self.mlp.output_bias()
        for name in self.places.keys() & innovations.keys():
            place = self.places[name]
            where = place.factor.locations
            units = place.rows(self.mlp.units)
            unit = units[:, where]
            off = innovations[name].unsqueeze(-1) - place.rows(bias)[:, where]
            spread = off.reshape(-1, *unit.shape).square().mean(0)
            learned = unit.square().lerp(spread, share).sqrt()
            # No faster than a bias: draws that spread would make what spreads them faster, without end.
            most = place.rows(self.mlp.bias_units)[:, where]
            units[:, where] = learned.minimum(most)

    @property
    def stacks(self) -> list[SplineStack]:
        """The splines in sequence of its factors."""
        return [place.stack for place in self.places.values() if place.stack is not None]

    @property
    def networks(self) -> list[Any]:
        """All its perceptrons."""
        return [self.mlp, *(layer for stack in self.stacks for layer in stack.layers)]


class TooLargeError(ValueError):
    """Raised for networks that would take more memory than is sensible.

    Attributes:
        largest: the latents to leave out, so that the other networks fit; largest first.
    """

    def __init__(self, message: str, largest: list[Any]) -> None:
        super().__init__(message)
        self.largest = largest


def _check_memory(factors: Sequence[Factor], columns: int, column_bytes: int, most: float) -> None:
    """Raises where the output layer's columns would take more memory than is sensible, ``most`` bytes."""
    left, names = columns, list[Any]()
    ordered = sorted(factors, key=lambda factor: -factor.num_elements)
    for factor in ordered:
        if left * column_bytes > most:
            names.append(factor.name)
            left -= factor.num_elements * factor.num_features
    if not names:
        return
    largest = ordered[0]
    over = " and ".join(repr(plate) for plate in largest.joint)
    what = f"a block of {largest.num_elements} elements" + (f" over plate {over}" if over else "")
    message = (
        f"Expected networks of at most {most / 1e9:.2g} GB with their gradients and optimizer state; got "
        f"{columns * column_bytes / 1e9:.1f} GB, most of it for site '{largest.name}', {what} that depend on each "
        'other given the data. Use within="independent", which gives these dependencies up and needs no fixed size; '
        "another `inverse` or `blocks`, so that the smaller side of a crossed design forms the block; or fewer "
        "elements."
    )
    raise TooLargeError(message, names)
