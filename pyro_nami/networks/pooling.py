"""Permutation-invariant encoders: a set of instances becomes features that do not depend on order or size.

Every instance goes through the same small network, what comes out is reduced over the set, and the logarithm of the
number of instances is put beside it, because how much is known depends on it (Zaheer et al. 2017). No parameter has
a shape that depends on the size of a set. Which instances form a set is said by a reduction (`Along`,
`Segments`). To add an encoder, subclass `SetEncoder` and name it in `encoders.py`.

References:
    Zaheer et al. 2017, "Deep Sets", theorem 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_nami.networks import rowwise
from pyro_nami.networks.reductions import Counts, Reduction, Segments

__all__ = ["Activation", "MaxEncoder", "MeanEncoder", "SetEncoder", "SumEncoder", "draw_layer"]

Activation = Callable[[Tensor], Tensor]


class SetEncoder(nn.Module):
    """An encoder of sets of instances, a module that says how in `pool`.

    Parameters are one matrix a layer, ``(units, inputs + 1)``, with the bias as last column.

    Args:
        num_inputs: number of inputs of each instance.
        num_outputs: number of features that `pool` returns.
        shapes: name -> shape of each parameter.
        device: device of the parameters.
        dtype: floating-point type of the parameters.

    Attributes:
        num_features: number of features returned, ``num_outputs + 1``.
        trained: sizes of the smallest and the largest set that gradients have come back from. What depends on a count
            outside is extrapolation, so the logarithm of the count is held within this range.
    """

    trained: Counts | None = None

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        shapes: Mapping[str, tuple[int, int]],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.num_features = num_outputs + 1
        self.layer_names = tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

    def extra_repr(self) -> str:
        return f"{self.num_inputs} -> {self.num_features}"

    def pool(self, x: Tensor, over: Reduction, weights: Sequence[Tensor]) -> Tensor:
        """Returns features of each set, ``(*sets, num_outputs)``, zeros for an empty one.

        Args:
            x: inputs of the instances, ``(*batch, num_inputs)``.
            over: which instances form a set.
            weights: the parameters, in the order of their names.
        """
        raise NotImplementedError

    def weights(self) -> list[Tensor]:
        """Returns the parameters, read by attribute, layer by layer."""
        return [getattr(self, name) for name in self.layer_names]

    def forward(self, x: Tensor, over: Reduction, weights: Sequence[Tensor] | None = None) -> Tensor:
        """Returns the features of each set of instances.

        Args:
            x: inputs of the instances, ``(*batch, num_inputs)``.
            over: which instances form a set.
            weights: what `weights` returned, to read no parameter now.

        Returns:
            ``(*sets, num_features)``, log(1 + number of instances) last (of ``trained`` the nearest). A set of no
            instances has zeros elsewhere.
        """
        if x.shape[-1] != self.num_inputs or x.dim() + over.axis < 0:
            raise ValueError(
                f"Expected x of shape (*batch, {self.num_inputs}) with a batch dim {over.dim}; got {tuple(x.shape)}."
            )
        pooled = self.pool(x, over, self.weights() if weights is None else weights)
        features = over.with_log_count(pooled, x, self.trained)
        if features.requires_grad:
            features.register_hook(functools.partial(self._train_on, over.counts(x)))
        return features

    def _train_on(self, counts: Counts, gradient: Tensor) -> None:
        """Notes that the encoder learns, as a hook of what it returned."""
        self.trained = counts if self.trained is None else self.trained.union(counts)

    def get_extra_state(self) -> list[int]:
        """Returns ``trained``, as plain numbers."""
        return list(self.trained or ())

    def set_extra_state(self, state: Sequence[int]) -> None:
        """Restores ``trained``."""
        self.trained = Counts(*state) if state else None


class _PerceptronEncoder(SetEncoder):
    """Encodes a set by a reduction of a perceptron's units and of the inputs, and a linear function of the result.

    Parameters are ``layer_0`` ``(units, num_inputs + 1)``, ..., ``output`` ``(num_outputs, units + num_inputs + 1)``,
    with the bias as last column.
    Args:
        num_inputs: number of inputs of each instance.
        num_outputs: number of features beside the logarithm of the count.
        hidden_features: units in each hidden layer.
        activation: elementwise function of the hidden layers.
        device: device of the parameters.
        dtype: floating-point type of the parameters.

    Attributes:
        num_features: number of features returned, ``num_outputs + 1``.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        hidden_features: Sequence[int] = (16,),
        *,
        activation: Activation = F.silu,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if min((num_outputs, *hidden_features)) < 1:
            raise ValueError(
                f"Expected num_outputs and hidden_features of at least 1; got {num_outputs} and {hidden_features}."
            )
        reads = [num_inputs, *hidden_features]
        shapes = {f"layer_{i}": (units, reads[i] + 1) for i, units in enumerate(hidden_features)}
        shapes["output"] = (num_outputs, sum(hidden_features[-1:]) + num_inputs + 1)
        super().__init__(num_inputs, num_outputs, shapes, device=device, dtype=dtype)
        self.activation = activation
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all layers anew, with a gain of 2 between hidden layers."""
        for name in self.layer_names:
            draw_layer(getattr(self, name), 1 if name in ("layer_0", "output") else 2)

    of_sums: Callable[[Any, Tensor], Tensor] | None = None  # `reduce` as a function of the sums, if it is one

    @staticmethod
    def reduce(over: Reduction, values: Tensor) -> Tensor:
        """Returns what is kept of the values of each set, zeros for an empty one."""
        raise NotImplementedError

    def pool(self, x: Tensor, over: Reduction, weights: Sequence[Tensor]) -> Tensor:
        """Returns a linear function of the reduced units, inputs and ones."""
        if len(weights) == 2 and self.of_sums is not None and rowwise.applies(x, over, activation=self.activation):
            units = rowwise.unit_sums(self.activation, x, weights[0], over)
            reduced = [self.of_sums(over, sums) for sums in (units, rowwise.input_sums(x, over))]
        else:
            values, units = [x, x.new_ones(*x.shape[:-1], 1)], x
            for weight in weights[:-1]:
                units = self.activation(F.linear(units, weight[:, :-1], weight[:, -1]))
            if units.requires_grad:  # that of a sum is one row for all, and activations are slow at that
                units.register_hook(_contiguous)
            values = values if len(weights) == 1 else [units, *values]
            reduced = [self.reduce(over, value) for value in values]
        return F.linear(torch.cat(reduced, -1), weights[-1])


class MeanEncoder(_PerceptronEncoder):
    """Encodes a set as the mean of its instances' features, and log(1 + number of instances).

    The features of an instance are a perceptron of its inputs plus a linear function of them, so that a mean of the
    inputs, what a linear-Gaussian posterior needs, is represented exactly. Features keep their scale at set sizes never
    trained on. The last layer is linear, so it is applied to the mean of the units below and of the inputs.

    Example:
        >>> from pyro_nami.networks import Along
        >>> MeanEncoder(3, 8)(torch.randn(10, 50, 3), Along(-1)).shape
        torch.Size([10, 1, 9])
    """

    of_sums = staticmethod(Segments.averages)

    @staticmethod
    def reduce(over: Reduction, values: Tensor) -> Tensor:
        """Returns the mean of each set."""
        return over.mean(values)


class SumEncoder(_PerceptronEncoder):
    """Encodes a set as the sum of its instances' features, those of `MeanEncoder`, and log(1 + count)."""

    @staticmethod
    def reduce(over: Reduction, values: Tensor) -> Tensor:
        """Returns the sum of each set."""
        return over.sum(values)


class MaxEncoder(_PerceptronEncoder):
    """Encodes a set by the maxima of a perceptron's units and of the inputs, in a linear layer, and log(1 + count)."""

    @staticmethod
    def reduce(over: Reduction, values: Tensor) -> Tensor:
        """Returns the maximum of each set."""
        return over.amax(values)


def draw_layer(weight: Tensor, gain: float = 1.0) -> None:
    """Draws a layer ``(units, inputs + 1)`` in place: weights normal of variance gain/n for n inputs (He et al. 2015).

    The bias, its last column, is uniform within 1/sqrt(n), PyTorch's default.
    """
    fan_in = max(weight.shape[1] - 1, 1)
    with torch.no_grad():
        weight.normal_(std=(gain / fan_in) ** 0.5)
        weight[:, -1].uniform_(-1, 1).mul_(fan_in**-0.5)


def _contiguous(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.contiguous()
