"""The network of one group of factors, and the averages that it keeps beside its weights.

Inputs are standardized by running averages (`networks.Running`). Rows have units of their own:
locations are in units of the spread of draws about the row's bias.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_nami.networks.masked import Base, MaskedMLP
from pyro_nami.networks.running import Running
from pyro_nami.parameters.conditioning import nodes_of, pooled_part
from pyro_nami.parameters.factor_groups import Factor, InputColumns, NetworkStep, dependency
from pyro_nami.parameters.spline_stack import SplineStack

__all__ = ["GroupNetwork", "TooLargeError"]

# What weights are divided beyond: where a guide is compiled on simulations, and where it is trained on data as Pyro's
# own guides are, at the rates that suit these. Simulations are few, and smooth functions serve others as well.
_COMPILED = Base(32.0, 64.0, 8.0, variances=(1 / 3, 1 / 3))
_TRAINED = Base(1.0, 8.0, 0.25, paced=True)
# of rows that are no locations: how scales move with other latents matters less, and is noisier
_SHAPE_UNIT = 0.1
# of an input, in units of its spread at the first call
_LEAST_SCALE, _LEAST_POOLED_SCALE = 1e-6, 0.1
# weights from inputs to rows; beyond, hidden units alone carry them to factors drawn in one go
_MOST_DIRECT = 2e7
_COPIES = 6  # weights, mask, masked weights, gradient and two of the optimizer's
# bytes, of guides that simulations train, and of those that data do
_MOST_MEMORY, _MOST_TRAINED = 5e8, 5e7


class GroupNetwork:
    """A group's network ``mlp``, and shift and scale of its inputs, ``running``.

    Args:
        factors: of the group, in sampling order; steps: as planned.
        latents: the nodes that are no data.
        simulated: whether the guide is trained on simulations rather than on data.
        hidden_features, options: of the network; factory: its dtype and device.
    """

    def __init__(
        self,
        factors: Sequence[Factor],
        steps: Sequence[NetworkStep],
        latents: Collection[Any],
        *,
        simulated: bool,
        hidden_features: Sequence[int],
        factory: Mapping[str, Any],
        **options: Any,
    ) -> None:
        self.factors, self.steps = tuple(factors), tuple(steps)
        columns, latents = self.columns(0, len(steps)), frozenset(latents)
        # Sources of data alone; in a group without plates they are not read where data are the same in every call.
        self.data = frozenset(
            column.source for column in columns if latents.isdisjoint(nodes_of(column.source))
        )
        self.constant = frozenset() if factors[0].batch else self.data
        # first steps
        self.head = {name: i for i, step in reversed([*enumerate(steps)]) for name in step.rows}
        self._blocks: dict[tuple[int, int], Counter] = {}
        self._first_rows, count = {}, 0
        for name, rows in self.blocks(0, len(steps)).items():
            self._first_rows[name], count = count, count + rows

        splits = [sum(column.last - column.first for column in step.columns) for step in steps]
        at_once = not any(factor.sequential or factor.coupled for factor in factors)
        one = at_once and bool(hidden_features)
        is_large = one and count * sum(splits) > _MOST_DIRECT
        options["skip"] = options.get("skip", True) and not is_large
        direct = sum(splits) if options["skip"] or not one else 0
        units = sum(hidden_features[-1:]) if sum(splits) else 0
        most = _MOST_MEMORY if simulated else _MOST_TRAINED
        _check_memory(factors, count, direct + units + 1, most, factory)
        self.reads = dependency(factors, columns)  # which columns each row reads
        base = _COMPILED if simulated else _TRAINED
        self._make_stacks(hidden_features, base, factory)
        options |= {
            "input_splits": splits,
            "output_splits": [sum(step.rows.values()) for step in steps],
            "base": base,
            **factory,
        }
        self.mlp = MaskedMLP(self.reads, hidden_features, **options)
        if not simulated:
            self.mlp.set_units(torch.full_like(self.mlp.units, _SHAPE_UNIT))
        self.running = self._standardization(columns, latents, simulated, factory)

    def _make_stacks(
        self, hidden_features: Sequence[int], base: Base, factory: Mapping[str, Any]
    ) -> None:
        """Makes the splines in sequence of factors that have some, and notes the columns that they read."""
        self.stacks: dict[Any, SplineStack] = {}
        self._read: dict[Any, Tensor] = {}
        for factor in self.factors:
            if factor.stack is None:
                continue
            read = self.reads[self._first_rows[factor.name]].nonzero().flatten()
            transforms, bins = factor.stack
            self.stacks[factor.name] = SplineStack(
                factor.num_elements,
                len(read),
                transforms=transforms,
                bins=bins,
                hidden_features=hidden_features,
                base=base,
                **factory,
            )
            self._read[factor.name] = read.to(factory.get("device"))

    def _standardization(
        self,
        columns: Sequence[InputColumns],
        latents: frozenset[Any],
        simulated: bool,
        factory: Mapping[str, Any],
    ) -> Running:
        """Returns averages of inputs: training goes on to standardize latents wholly, and data not at all."""
        floor: list[float] = []
        follows: list[bool] = []
        for source, first, last, _ in columns:
            pure = nodes_of(source) <= latents and pooled_part(source) is None
            floor += (last - first) * [_LEAST_SCALE if pure else _LEAST_POOLED_SCALE]
            follows += (last - first) * [not simulated and source not in self.data]
        follow = torch.tensor(follows, dtype=torch.bool, device=factory.get("device"))
        return Running(torch.tensor(floor, **factory), follow)

    def columns(self, begin: int, stop: int) -> list[InputColumns]:
        """Returns the columns of steps ``begin`` to ``stop - 1``."""
        return [column for step in self.steps[begin:stop] for column in step.columns]

    def blocks(self, begin: int, stop: int) -> Mapping[Any, int]:
        """Returns the factors that steps ``begin`` to ``stop - 1`` give rows for, with the number of rows of each."""
        if (begin, stop) not in self._blocks:
            sizes = self._blocks[begin, stop] = Counter()
            for step in self.steps[begin:stop]:
                sizes.update(step.rows)
        return self._blocks[begin, stop]

    def rows(self, values: Tensor, factor: Factor) -> Tensor:
        """Returns those of ``values``, one a row of the network, that are a factor's: a view ``(elements, rows)``."""
        first = self._first_rows[factor.name]
        elements = factor.num_elements
        rows = factor.num_rows
        return values[first : first + elements * rows].view(elements, rows)

    def locations(self, values: Tensor, factor: Factor) -> Tensor:
        """Returns those of the locations of a factor that has one an element, a view ``(elements,)``."""
        return self.rows(values, factor)[:, factor.locations[0]]

    def pulls(self) -> Tensor:
        """Returns zeros that move as the biases of all rows do, relative to their units."""
        biases = self.mlp.output_bias() / self.mlp.bias_units
        return biases - biases.detach()

    def set_units(self, factor: Factor, scale: float, anchor: Tensor) -> None:
        """Sets the units of a factor's locations: of biases, those of unconstrained space; else its first scale.

        Args:
            factor: of the group.
            scale: of the factor at first, in unconstrained space.
            anchor: of its prior there, ``(elements,)``.
        """
        units, bias = self.mlp.units.clone(), self.mlp.bias_units.clone()
        anchor = anchor.double().unsqueeze(-1)
        self.rows(units, factor)[:, factor.locations] = (scale / anchor).to(units)
        self.rows(bias, factor)[:, factor.locations] = (1 / anchor).to(bias)
        self.mlp.set_units(units, bias)

    def standardize(self, x: Tensor, moving: Collection[Any]) -> None:
        """Takes inputs ``(*batch, columns)`` in units of these, but for those that are all zero or one.

        What comes from encoders is left as it is, as their weights will move it: that of sets, and of ``moving`` nodes.
        """
        x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        center, scale = x.mean(0), x.std(0)
        left = ((x == 0) | (x == 1)).all(0) | ~(scale > _LEAST_SCALE)
        for source, first, last, start in self.columns(0, len(self.steps)):
            if pooled_part(source) is not None or not nodes_of(source).isdisjoint(moving):
                left[start : start + last - first] = True
        self.running.center = center.masked_fill(left, 0.0)
        self.running.scale = scale.masked_fill(left, 1.0)

    def learn(self, innovations: Mapping[Any, Tensor]) -> None:
        """Takes draws ``(*batch, elements)`` of factors, relative to their anchors, into the units of locations."""
        share = self.running.share
        bias = self.mlp.output_bias()
        units = self.mlp.units.clone()
        for factor in self.factors:
            if factor.name in innovations:
                parts = bias, units, self.mlp.bias_units
                center, unit, most = (
                    self.rows(values, factor)[:, factor.locations] for values in parts
                )
                off = innovations[factor.name].unsqueeze(-1) - center
                spread = off.reshape(-1, *unit.shape).square().mean(0)
                # No faster than a bias: draws that spread would make what spreads them faster, without end.
                learned = (unit.square() * (1 - share) + share * spread).sqrt().minimum(most)
                self.rows(units, factor)[:, factor.locations] = learned
        self.mlp.set_units(units)

    @property
    def networks(self) -> list[Any]:
        """All its perceptrons."""
        return [self.mlp, *(layer for stack in self.stacks.values() for layer in stack.layers)]

    def context(self, x: Tensor, factor: Factor) -> Tensor:
        """Returns what a factor reads, of columns ``x`` up to its first step at least."""
        return x[..., self._read[factor.name]]

    def vary(self) -> None:
        """Lets the networks learn from data that vary: weights are divided beyond other widths from now on."""
        for mlp in self.networks:
            mlp.rebase(_COMPILED)
            for flags in (mlp.pace.patient, mlp.pace.shared):
                flags.zero_()  # offsets go, and weights have to tell the data apart


class TooLargeError(ValueError):
    """Raised for networks that would take more memory than is sensible.

    Attributes:
        largest: the latents without which they would not, largest first.
    """

    def __init__(self, message: str, largest: list[Any]) -> None:
        super().__init__(message)
        self.largest = largest


def _check_memory(
    factors: Sequence[Factor], rows: int, columns: int, most: float, factory: Mapping[str, Any]
) -> None:
    """Raises where the output layer, which holds rows times columns, would take more memory than is sensible."""
    unit = rows * torch.empty(0, **factory).element_size() * _COPIES
    size = unit * columns
    if size <= most:
        return
    names, left = list[Any](), columns
    for factor in sorted(factors, key=lambda factor: -factor.num_elements):
        if unit * left > most:
            names.append(factor.name)
            left -= factor.num_elements * factor.num_features
    largest = next(factor for factor in factors if factor.name == names[0])
    over = " and ".join(repr(plate) for plate in largest.joint)
    what = f"a block of {largest.num_elements} elements" + (f" over plate {over}" if over else "")
    message = (
        f"Expected networks of at most {most / 1e9:.2g} GB with their gradients and optimizer state; got "
        f"{size / 1e9:.1f} GB, most of it for site '{largest.name}', {what} that depend on each other given the "
        'data. Use within="independent", which gives these dependencies up and needs no fixed size; another '
        "`inverse` or `blocks`, so that the smaller side of a crossed design forms the block; or fewer elements."
    )
    raise TooLargeError(message, names)
