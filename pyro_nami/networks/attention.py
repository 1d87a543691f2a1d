"""An encoder in which the instances of a set attend to each other through a few inducing points.

Attention between all pairs of n instances costs n^2; through m inducing points, which read the set and are read by
every instance, it costs m an instance. Sets may be ragged: softmax over a set is a maximum and sums of its reduction.

References:
    Lee et al. 2019, "Set Transformer: A Framework for Attention-based Permutation-Invariant Neural Networks",
    equations 9 to 11 (ISAB and PMA). Departures: one head (the inducing points are several queries as it is), no layer
    normalization, learned points that are queries themselves, and the mean of the inputs beside what is read off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_nami.networks.pooling import Activation, SetEncoder
from pyro_nami.networks.reductions import Reduction

__all__ = ["AttentionEncoder"]


class AttentionEncoder(SetEncoder):
    """Encodes a set by an induced-set attention block, attention of one seed, and the mean of the inputs.

    Inducing points read the instances, every instance reads the points of its set, and a seed reads the instances;
    each time what is read is added to the reader, followed by a residual layer.

    Args:
        num_inputs, num_outputs, factory: see `SetEncoder`.
        width: features of queries, keys and values.
        inducing: number of inducing points.
        activation: elementwise function of the residual layers.

    Example:
        >>> from pyro_nami.networks import Along
        >>> AttentionEncoder(3, 8)(torch.randn(10, 50, 3), Along(-1)).shape
        torch.Size([10, 1, 9])
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        width: int = 16,
        *,
        inducing: int = 8,
        activation: Activation = F.silu,
        **factory: Any,
    ) -> None:
        layers = {
            "inducing": (inducing, width, None),
            "read_inputs": (3 * width, num_inputs + 1, 1),  # query, key and value of an instance
            "update_inducing": (width, width + 1, 1),
            "read_inducing": (2 * width, width + 1, 1),  # key and value
            "update_instances": (width, width + 1, 1),
            "seed": (1, width, None),
            "read_instances": (2 * width, width + 1, 1),
            "update_seed": (width, width + 1, 1),
            "output": (num_outputs, width + num_inputs + 1, 1),
        }
        super().__init__(num_inputs, num_outputs, layers, **factory)
        self.activation = activation

    def pool(self, x: Tensor, over: Reduction, weights: Sequence[Tensor]) -> Tensor:
        (inducing, read_inputs, update_inducing, read_inducing, update_instances) = weights[:5]
        (seed, read_instances, update_seed, output) = weights[5:]
        query, key, value = _affine(x, read_inputs).chunk(3, -1)
        points = self._updated(inducing + _read_set(inducing, key, value, over), update_inducing)
        points = over.gather(_affine(points, read_inducing).flatten(-2)).unflatten(-1, (len(inducing), -1))
        instances = self._updated(query + _read_points(query, *points.chunk(2, -1)), update_instances)
        key, value = _affine(instances, read_instances).chunk(2, -1)
        summary = self._updated(seed + _read_set(seed, key, value, over), update_seed).squeeze(-2)
        inputs = over.mean(F.pad(x, (0, 1), value=1.0))
        # The mean of ones, 0 for an empty set.
        return F.linear(torch.cat((summary * inputs[..., -1:], inputs), -1), output)

    def _updated(self, x: Tensor, weight: Tensor) -> Tensor:
        return x + self.activation(_affine(x, weight))


def _affine(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight[:, :-1], weight[:, -1])


def _read_set(queries: Tensor, key: Tensor, value: Tensor, over: Reduction) -> Tensor:
    """Returns what queries ``(queries, width)`` read of each set, ``(*sets, queries, width)``; zeros of an empty one.

    Keys and values are those of the instances, ``(*batch, width)``.
    """
    scores = F.linear(key, queries) * queries.shape[-1] ** -0.5
    weight = (scores - over.gather(over.amax(scores.detach()))).exp()
    total = over.sum((weight.unsqueeze(-1) * value.unsqueeze(-2)).flatten(-2)).unflatten(-1, (len(queries), -1))
    # The largest weight of a set is 1, so the bound concerns empty sets only.
    return total / over.sum(weight).clamp(min=1.0).unsqueeze(-1)


def _read_points(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns what queries ``(*batch, width)`` read of points with keys and values ``(*batch, points, width)``."""
    scores = (query.unsqueeze(-2) * key).sum(-1, keepdim=True) * query.shape[-1] ** -0.5
    return (scores.softmax(-2) * value).sum(-2)
