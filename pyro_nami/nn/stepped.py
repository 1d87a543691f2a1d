"""What the perceptrons that run in steps share: a parameter a layer with its mask, and batches that grow on the way.

Change this module to change how layers are stored or start. The passes themselves are in `masked` and `separate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyro_nami.nn.masks import split_steps

__all__ = ["Activation", "SteppedMLP", "check_advance", "concatenated", "expand_batch", "flatten"]

Activation = Callable[[Tensor], Tensor]


class SteppedMLP(nn.Module):
    """What both networks share: steps, the parameter per layer with its mask, and how they start."""

    output: Tensor

    def __init__(
        self,
        dependency: Tensor,
        hidden_features: Sequence[int],
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        skip: bool,
        activation: Activation,
    ) -> None:
        super().__init__()
        self.steps = split_steps(dependency, input_splits, output_splits)
        self.out_features, self.in_features = dependency.shape
        self.skip = skip
        self.activation = activation
        if any(width < 1 for width in hidden_features):
            raise ValueError(f"Expected hidden_features of at least 1 each; got {list(hidden_features)}.")
        if not hidden_features and not skip:
            raise ValueError(
                "Expected at least one hidden layer or skip=True; got hidden_features=() and skip=False."
            )
        self.layer_names = (*(f"layer_{layer}" for layer in range(len(hidden_features))), "output")

    def _add_layers(
        self, shapes: Sequence[tuple[int, ...]], masks: Sequence[Tensor], units: int, **factory: Any
    ) -> None:
        """Registers a parameter per layer, and its mask (broadcastable to it) where that changes anything.

        The output layer's mask also divides a row's weights from its hidden units, among the first ``units`` columns,
        by the square root of their number: a step of Adam then moves the row as far whatever the width, and a step
        size that suits the biases suits the network.
        """
        for name, shape, mask in zip(self.layer_names, shapes, masks):
            weight = torch.empty(shape, **factory)
            self.register_parameter(name, nn.Parameter(weight))
            scale = mask.to(weight)
            if name == "output" and units:
                scale[..., :units] /= scale[..., :units].sum(-1, keepdim=True).clamp(min=1).sqrt()
            self.register_buffer(f"{name}_mask", None if (scale == 1).all() else scale, persistent=False)
        self.reset_parameters()

    @property
    def num_parameters(self) -> int:
        """Number of weights that are not masked."""
        count = 0
        for name in self.layer_names:
            weight, mask = getattr(self, name), self._buffers[f"{name}_mask"]
            count += weight.numel() if mask is None else int((mask != 0).expand_as(weight).sum())
        return count

    def reset_parameters(self) -> None:
        """Draws the hidden layers anew and sets the output layer to zero.

        A unit with n unmasked inputs gets normal weights of variance 1/n in the lowest layer (its inputs are
        standardized) and 2/n above (He et al. 2015), and a bias that is uniform within 1/sqrt(n), PyTorch's default.
        """
        with torch.no_grad():
            for layer, name in enumerate(self.layer_names):
                weight, mask = getattr(self, name), getattr(self, f"{name}_mask")
                if name == "output":
                    weight.zero_()
                    continue
                kept = torch.ones_like(weight) if mask is None else mask.expand_as(weight)
                fan_in = (kept.sum(-1, keepdim=True) - 1).clamp(min=1)
                weight.normal_().mul_(kept * (fan_in / (1 if layer == 0 else 2)).rsqrt())
                weight[..., -1:].uniform_(-1, 1).mul_(fan_in.rsqrt())

    def _weights(self) -> list[Tensor]:
        """Returns the masked weights, read by attribute."""
        weights = []
        for name in self.layer_names:
            weight, mask = getattr(self, name), self._buffers[f"{name}_mask"]
            weights.append(weight if mask is None else weight * mask)
        return weights


def flatten(x: Tensor, batch_shape: torch.Size) -> tuple[torch.Size, Tensor]:
    """Returns the batch shape that ``x`` makes of a state's, and ``x`` there, as ``(size of the batch, columns)``."""
    shape = x.shape[:-1]
    if batch_shape and shape != batch_shape:
        shape = torch.broadcast_shapes(shape, batch_shape)
        x = x.expand(*shape, x.shape[-1])
    return shape, x if len(shape) == 1 else x.reshape(math.prod(shape), x.shape[-1])


def expand_batch(values: Tensor, old: torch.Size, new: torch.Size) -> Tensor:
    """Returns values of one batch shape, ``(size of old, features)``, at a larger one, ``(size of new, features)``."""
    features = values.shape[1]
    return values.reshape(*old, features).expand(*new, features).reshape(math.prod(new), features)


def concatenated(parts: list[Tensor] | tuple[Tensor, ...], dim: int = 1) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def check_advance(columns: Sequence[int], start: int, x: Tensor, stop: int) -> None:
    if not start < stop < len(columns):
        raise ValueError(f"Expected stop from {start + 1} to {len(columns) - 1}, the steps left; got {stop}.")
    if x.shape[-1] != columns[stop] - columns[start]:
        raise ValueError(
            f"Expected x of shape (*batch, {columns[stop] - columns[start]}), the columns of steps {start} to "
            f"{stop - 1}; got {tuple(x.shape)}."
        )
