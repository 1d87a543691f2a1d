"""`SeparateMLP`: a small network for every factor, all factors of a step evaluated as one batched product.

The alternative to `MaskedMLP` that Webb et al. 2018 call separate networks: factors share nothing.
A factor picks its columns by an index, so only the padding is masked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_nami.networks.masks import Steps
from pyro_nami.networks.stepped import Layers, SteppedMLP, SteppedState, concatenated, expand_batch

__all__ = ["SeparateMLP"]


class SeparateMLP(SteppedMLP):
    """A perceptron of the same use as `MaskedMLP` in which every *factor*, a group of rows, has its own small network.

    All rows of a factor read the same columns at the same step. Its network reads these columns, has hidden layers of
    the given widths, and with ``skip`` also direct weights. The networks of all factors of an advance are evaluated
    as one batched product; factors with fewer parents or rows than the largest are padded.

    Parameters, for F factors in step order of at most P parents and R rows: ``layer_0`` ``(F, units, P + 1)``,
    ..., ``output`` ``(F, R, units + P + 1)`` (without ``skip``: ``(F, R, units + 1)``).

    Args:
        factors: the rows of each factor; every row belongs to one. Others are those of `MaskedMLP`.
        hidden_features: units of each factor in each hidden layer.

    Example:
        >>> dependency = torch.tensor([[0, 0], [1, 1]]).bool()
        >>> mlp = SeparateMLP(dependency, (8,), factors=[[0], [1]])
        >>> _ = torch.nn.init.normal_(mlp.output)
        >>> torch.autograd.functional.jacobian(mlp, torch.randn(2)) != 0
        tensor([[False, False],
                [ True,  True]])
    """

    def __init__(
        self,
        dependency: Tensor,
        hidden_features: Sequence[int] = (64,),
        *,
        factors: Sequence[Sequence[int]],
        **options: Any,
    ) -> None:
        self._factors = factors
        super().__init__(dependency, hidden_features, **options)

    def _lay_out(self, dependency: Tensor, hidden_features: Sequence[int]) -> Layers:
        factors = sorted(self._factors, key=lambda rows: bisect_right(self.steps.rows, rows[0]))
        self._factor_bounds = tuple(
            sum(rows[0] < bound for rows in factors) for bound in self.steps.rows
        )
        rows = _padded(factors, -1)
        columns = [(dependency[rows[0]].nonzero().flatten() + 1).tolist() for rows in factors]
        gather = F.pad(_padded(columns, 0), (0, 1))
        mask = F.pad(gather[:, :-1] > 0, (0, 1), value=True).unsqueeze(1)
        reads = mask[..., :-1].any(-1, keepdim=True)  # a factor that reads nothing has no units
        sources = [mask, *(mask.new_ones(1, 1, width + 1) for width in hidden_features)]
        hidden = [source & reads for source in sources[:-1]]
        units = [sources[-1][..., :-1] & reads] if hidden else []
        output = torch.cat((*units, mask if self.skip else mask[..., -1:]), -1) & (
            rows >= 0
        ).unsqueeze(-1)
        shapes = [
            (len(rows), width, each.shape[-1]) for width, each in zip(hidden_features, hidden)
        ]
        return Layers([*hidden, output], [*shapes, tuple(output.shape)], rows, gather)

    def start(self, whole: bool = False) -> SteppedState:
        steps, factors = self.steps, self._factor_bounds
        if whole:
            steps, factors = Steps(*((bounds[0], bounds[-1]) for bounds in steps)), (0, factors[-1])
        hidden, output, bias = self._weights()
        output = torch.cat((output[..., :-1], bias), -1)
        sizes = [end - start for start, end in pairwise(factors)]
        blocks = tuple(weight.split(sizes) for weight in (*hidden, output))
        gather = self._gather.flatten()
        weights = _SeparateWeights(
            *steps,
            factors,
            gather,
            self._positions,
            output.shape[1],
            self.skip,
            self.activation,
            blocks,
        )
        return SteppedState(weights, 0, torch.Size(), output.new_ones(1, 1))


class _SeparateWeights(NamedTuple):
    """Constants of one pass, which remembers ones, and then the columns so far, ``(1 + columns, size of the batch)``.

    ``columns``, ``rows`` and ``factors`` say where those of each step begin, ``blocks`` are the masked weights of its
    factors, layer by layer. ``gather`` is what each factor reads, one after the other, as rows of what is remembered:
    row 0, the ones, for padding and bias. ``positions`` is where each output row lies in the stack of the ``num_rows``
    rows of each factor, None if in order.
    """

    columns: tuple[int, ...]
    rows: tuple[int, ...]
    factors: tuple[int, ...]
    gather: Tensor
    positions: Tensor | None
    num_rows: int
    skip: bool
    activation: Callable[[Tensor], Tensor]
    blocks: tuple[tuple[Tensor, ...], ...]

    def advance(self, memory: Tensor, x: Tensor, step: int, stop: int) -> tuple[Tensor, Tensor]:
        known = torch.cat((memory, x.t())) if x.shape[1] else memory
        first, last = self.factors[step], self.factors[stop]
        if first == last:
            return known[:0].t(), known
        width = len(self.gather) // self.factors[-1]
        inputs = known.index_select(0, self.gather[first * width : last * width]).view(
            last - first, width, -1
        )
        value, ones = inputs, inputs[:, -1:]
        *hidden, output = (concatenated(blocks[step:stop], 0) for blocks in self.blocks)
        for layer, weight in enumerate(hidden, 1):
            units = self.activation(torch.bmm(weight, value))
            value = torch.cat((units, inputs if self.skip and layer == len(hidden) else ones), 1)
        rows = torch.bmm(output, value).flatten(0, 1)
        if self.positions is not None:
            positions = self.positions[self.rows[step] : self.rows[stop]]
            rows = rows.index_select(0, positions - first * self.num_rows if first else positions)
        return rows.t(), known

    def expanded(self, memory: Tensor, step: int, old: torch.Size, new: torch.Size) -> Tensor:
        return expand_batch(memory.t(), old, new).t()


def _padded(lists: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Returns lists of integers as the rows of a matrix, ``(lists, longest)``."""
    width = max(map(len, lists), default=0)
    rows = [[*each, *[fill] * (width - len(each))] for each in lists]
    return torch.tensor(rows, dtype=torch.long, device="cpu").reshape(len(lists), width)
