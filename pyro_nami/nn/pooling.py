"""Permutation-invariant encoders: a plate of instances becomes features that do not depend on order or size.

Every instance goes through the same small network; its features are averaged over the plate, and the logarithm of
the number of instances is put beside them, because how much is known depends on it (Zaheer et al. 2017, with the
mean in place of the sum, so that features keep their scale at sizes never trained on). No parameter has a shape that
depends on the size of the plate. `PoolingEncoder` pools a batch dimension, `segment_mean` a ragged index map.

References:
    Zaheer et al. 2017, "Deep Sets", theorem 2.
"""

from __future__ import annotations

__all__ = ["PoolingEncoder", "segment_mean"]

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PoolingEncoder(nn.Module):
    """Encodes a set of instances as the mean of their features, and log(1 + number of instances).

    The features of an instance are a perceptron of its inputs plus a linear function of them, so that a mean of the
    inputs, what a linear-Gaussian posterior needs, is represented exactly.

    Parameters are ``layer_0`` ``(units, num_inputs + 1)``, ..., ``output`` ``(num_outputs, units + num_inputs + 1)``,
    with the bias as last column.

    Args:
        num_inputs: number of inputs of each instance.
        num_outputs: number of features that are averaged.
        hidden_features: units in each hidden layer.
        device: device of the parameters.
        dtype: floating-point type of the parameters.

    Attributes:
        num_features: number of features returned, ``num_outputs + 1``.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> encoder = PoolingEncoder(3, 8)
        >>> x = torch.randn(10, 50, 3)
        >>> encoder(x, dim=-1).shape
        torch.Size([10, 1, 9])
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        hidden_features: Sequence[int] = (32,),
        *,
        activation: Callable[[Tensor], Tensor] = F.silu,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min((num_outputs, *hidden_features)) < 1:
            raise ValueError(
                f"Expected num_outputs and hidden_features of at least 1; got {num_outputs} and {hidden_features}."
            )
        self.num_inputs = num_inputs
        self.num_features = num_outputs + 1
        self.activation = activation
        self.layer_names = (*(f"layer_{layer}" for layer in range(len(hidden_features))), "output")
        reads = [num_inputs, *hidden_features]
        if hidden_features:
            reads[-1] += num_inputs
        for name, units, below in zip(self.layer_names, (*hidden_features, num_outputs), reads):
            weight = torch.empty(units, below + 1, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(weight))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all layers anew, for units with n inputs.

        Weights are normal of variance 1/n, and 2/n between hidden layers (He et al. 2015); biases are uniform within
        1/sqrt(n), PyTorch's default.
        """
        with torch.no_grad():
            for name in self.layer_names:
                weight = getattr(self, name)
                fan_in = max(weight.shape[1] - 1, 1)
                gain = 1 if name in ("layer_0", "output") else 2
                weight.normal_(std=(gain / fan_in) ** 0.5)
                weight[:, -1].uniform_(-1, 1).mul_(fan_in**-0.5)

    def weights(self) -> list[Tensor]:
        """Returns the parameters, read by attribute, layer by layer."""
        return [getattr(self, name) for name in self.layer_names]

    def instance_features(self, x: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
        """Returns the features of each instance before pooling, ``(*batch, num_outputs)``.

        Args:
            x: inputs ``(*batch, num_inputs)``.
            weights: what `weights` returned, to read no parameter now.
        """
        if x.shape[-1] != self.num_inputs:
            raise ValueError(f"Expected x of shape (*batch, {self.num_inputs}); got {tuple(x.shape)}.")
        weights = self.weights() if weights is None else weights
        inputs = F.pad(x, (0, 1), value=1.0)
        value = inputs
        for layer, weight in enumerate(weights[:-1], 1):
            units = self.activation(F.linear(value, weight))
            value = torch.cat((units, inputs if layer == len(weights) - 1 else inputs[..., -1:]), -1)
        return F.linear(value, weights[-1])

    def forward(
        self, x: Tensor, dim: int, mask: Tensor | None = None, weights: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Returns the features of the set of instances along ``dim``.

        Args:
            x: inputs of the instances, ``(*batch, num_inputs)``.
            dim: the batch dimension to pool, negative and counted without the dimension of inputs; -1 is the last.
            mask: which instances count, boolean, ``(*batch,)`` or broadcastable to it; all by default. What the
                others hold, NaN included, has no influence.
            weights: what `weights` returned, to read no parameter now.

        Returns:
            Features of the shape of x with size 1 at ``dim``, and ``num_features`` in place of ``num_inputs``. A set
            of no instances has zeros.
        """
        batch_shape = x.shape[:-1]
        if not -len(batch_shape) <= dim < 0:
            raise ValueError(
                f"Expected dim from {-len(batch_shape)} to -1, a batch dimension of x; got {dim}."
            )
        if mask is None:
            size = batch_shape[dim]
            mean = self.instance_features(x, weights).sum(dim - 1, keepdim=True) / max(size, 1)
            return F.pad(mean, (0, 1), value=math.log1p(size))
        mask = _checked_mask(mask, batch_shape)
        features = self.instance_features(torch.where(mask, x, 0.0), weights)
        total = torch.where(mask, features, 0.0).sum(dim - 1, keepdim=True)
        return _with_count(total, mask.sum(dim - 1, keepdim=True).to(x))


def segment_mean(features: Tensor, index: Tensor, num_segments: int, *, mask: Tensor | None = None) -> Tensor:
    """Returns the mean of the features in each segment, and log(1 + number of instances).

    The segmented form of `PoolingEncoder.forward`, for a plate in which instance n belongs to segment ``index[n]``.

    Args:
        features: features of the instances, ``(*batch, instances, features)``.
        index: segment of each instance, integer, ``(instances,)``.
        num_segments: number of segments; those without instances get zeros.
        mask: which instances count, boolean, ``(*batch, instances)`` or broadcastable to it; all by default.

    Returns:
        ``(*batch, num_segments, features + 1)``.

    Raises:
        ValueError: if the shape of ``index`` does not fit, or an entry is no segment.

    Example:
        >>> segment_mean(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 2]), 3)[:, 0]
        tensor([2., 0., 5.])
    """
    if features.dim() < 2 or index.shape != features.shape[-2:-1]:
        raise ValueError(
            f"Expected features (*batch, instances, features) and index (instances,); got {tuple(features.shape)} "
            f"and {tuple(index.shape)}."
        )
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < num_segments:
        raise ValueError(
            f"Expected index from 0 to {num_segments - 1}; got {int(index.min())} to {int(index.max())}."
        )
    counted = features.new_ones(len(index), 1)
    if mask is not None:
        mask = _checked_mask(mask, features.shape[:-1])
        features, counted = torch.where(mask, features, 0.0), mask.to(features)
    return _with_count(
        _segment_sum(features, index, num_segments), _segment_sum(counted, index, num_segments)
    )


def _segment_sum(values: Tensor, index: Tensor, num_segments: int) -> Tensor:
    """Returns sums over segments, ``(*batch, num_segments, features)``, of ``(*batch, instances, features)``."""
    zeros = values.new_zeros(*values.shape[:-2], num_segments, values.shape[-1])
    return zeros.index_add(-2, index, values)


def _with_count(total: Tensor, count: Tensor) -> Tensor:
    """Returns means from totals ``(*batch, features)`` and counts, followed by log(1 + count)."""
    size = count.log1p().expand(*total.shape[:-1], 1)
    return torch.cat((total / count.clamp(min=1), size), -1)


def _checked_mask(mask: Tensor, batch_shape: torch.Size) -> Tensor:
    """Returns the mask with a last dimension of 1, expanded to the batch shape."""
    if mask.dtype != torch.bool:
        raise TypeError(f"Expected a boolean mask; got {mask.dtype}. Convert it with .bool().")
    try:
        return mask.expand(batch_shape).unsqueeze(-1)
    except RuntimeError as error:
        message = f"Expected a mask that broadcasts to {tuple(batch_shape)}; got {tuple(mask.shape)}."
        raise ValueError(message) from error
