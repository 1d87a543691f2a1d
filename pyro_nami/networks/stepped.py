"""What the perceptrons that run in steps share: a parameter a layer with its mask, and batches that grow on the way.

Change this module to change how layers are stored or start. The passes themselves are in `masked` and `separate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_nami.networks.masks import split_steps
from pyro_nami.networks.pace import Pace

__all__ = ["Activation", "Base", "SteppedMLP", "check_advance", "concatenated", "expand_batch", "flatten", "shares"]

_MOST_PACED = 200_000  # weights of an output layer; of larger ones only the biases have speeds, for their time
Activation = Callable[[Tensor], Tensor]


class Base(NamedTuple):
    """How many inputs a unit or row may have before its weights are divided by their number in excess.

    One step of Adam at rate r moves every weight by about r, so it would move a sum over n inputs of order one by n r.
    Weights are divided by max(1, n / base), which holds a step to base r for every n (the maximal-update
    parametrization, Yang et al. 2022, "Tensor Programs V", with a base width).

    Attributes:
        inputs: of a layer that reads inputs.
        hidden: of hidden units, as inputs of further hidden layers.
        output: of hidden units, as inputs of rows.
        paced: whether the output layer's weights have speeds, see `Pace`.
    """

    inputs: float = math.inf
    hidden: float = math.inf
    output: float = math.inf
    paced: bool = False


class SteppedMLP(nn.Module):
    """What both networks share: steps, the parameter per layer with its mask, and how they start.

    Rows are ``bias_units * bias + units * (what hidden units and direct weights give)``, and hidden units are taken
    relative to what they are at inputs of zero: what is the same in every call is left to the bias.

    Attributes:
        units: of each row, ``(outputs,)``, the size that a weight of one gives to what the row reads.
        bias_units: likewise of its bias.
    """

    output: Tensor
    units: Tensor
    bias_units: Tensor
    _rows: Tensor
    _output_scale: Tensor | None

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
        self,
        shapes: Sequence[tuple[int, ...]],
        multipliers: Sequence[Tensor],
        rows: Tensor,
        paced: bool,
        **factory: Any,
    ) -> None:
        """Registers a parameter per layer, and its multipliers, which are zero for what is masked.

        Args:
            shapes: of the parameters.
            multipliers: by which each is multiplied, broadcastable to it, the bias in the last column.
            rows: which row each output is; -1 for padding.
            paced: whether the weights of the output layer have speeds.
        """
        self.register_buffer("units", torch.ones(self.out_features, **factory))
        self.register_buffer("bias_units", torch.ones(self.out_features, **factory))
        self.register_buffer("_rows", rows.to(factory.get("device")), persistent=False)
        for name, shape, multiplier in zip(self.layer_names, shapes, multipliers):
            weight = torch.empty(shape, **factory)
            self.register_parameter(name, nn.Parameter(weight))
            multiplier = multiplier.to(weight)
            plain = name != "output" and bool((multiplier == 1).all())
            self.register_buffer(f"{name}_mask", None if plain else multiplier, persistent=False)
        self.register_buffer("_output_scale", None, persistent=False)
        self._paced = slice(None) if self.output.numel() <= _MOST_PACED else slice(-1, None)
        self.pace = Pace(self.output[..., self._paced]) if paced else None
        if self.pace is not None:
            self.pace.patient[..., :-1] = True
        self.reset_parameters()

    def set_units(self, units: Tensor | None = None, bias_units: Tensor | None = None) -> None:
        """Sets the units of all rows, ``(outputs,)`` each, and leaves the parameters as they are."""
        if units is not None:
            self.units.copy_(units)
        if bias_units is not None:
            self.bias_units.copy_(bias_units)
        self._output_scale = None

    @torch.no_grad()
    def rebase(self, base: Base) -> None:
        """Divides weights beyond another base, and multiplies the parameters so that nothing else changes."""
        masks = [self._buffers[f"{name}_mask"] for name in self.layer_names]
        old = [torch.ones_like(getattr(self, n)) if m is None else m for n, m in zip(self.layer_names, masks)]
        for name, before, now in zip(self.layer_names, old, self._multipliers(old, base)):
            now = now.to(before)
            getattr(self, name).mul_(torch.where(now != 0, before / now, 1.0))
            self.register_buffer(f"{name}_mask", now, persistent=False)
        self._output_scale = None
        if self.pace is not None:
            self.pace.restart()

    def _multipliers(self, masks: Sequence[Tensor], base: Base) -> list[Tensor]:
        """Returns what weights are multiplied by, from masks (or multipliers) of all layers."""
        raise NotImplementedError

    def output_bias(self) -> Tensor:
        """Returns what the rows are where all that they read is zero, ``(outputs,)``."""
        return self._biases(self.output) * self._biases(self._scaled_output())

    def set_output_bias(self, values: Tensor) -> None:
        """Makes the rows ``values``, ``(outputs,)``, where all that they read is zero."""
        with torch.no_grad():
            self._write_biases(values / self._biases(self._scaled_output()))

    def quicken(self) -> None:
        """Adapts the speed of the output layer's weights, after a step of the optimizer; see `Pace`."""
        if self.pace is not None:
            self.pace.adapt(self.output.detach()[..., self._paced])

    def set_shared(self, rows: Tensor) -> None:
        """Says to which rows each instance adds something of its own, a boolean ``(outputs,)``; see `Pace`."""
        if self.pace is not None:
            self.pace.shared[..., -1] = torch.cat((rows, rows.new_zeros(1)))[self._rows]

    def is_trained(self) -> bool:
        """Whether rows depend on anything."""
        return bool((self.output[..., :-1] != 0).any())

    def direct_mask(self) -> Tensor:
        """Returns which inputs each row reads directly, a boolean ``(outputs, inputs)``."""
        raise NotImplementedError

    @torch.no_grad()
    def set_direct(self, row: int, columns: Tensor, slopes: Tensor) -> None:
        """Makes a row move with some inputs, that it reads directly, by these slopes."""
        where = self._direct(row, columns)
        self.output[where] = slopes / self._scaled_output()[where]

    def _direct(self, row: int, columns: Tensor) -> tuple[Any, ...]:
        """Returns the indices of the weights by which a row reads some inputs directly."""
        raise NotImplementedError

    def _biases(self, weights: Tensor) -> Tensor:
        """Returns the biases of the rows, ``(outputs,)``, of a tensor that is laid out as the output layer."""
        raise NotImplementedError

    def _write_biases(self, values: Tensor) -> None:
        """Writes the parameters that are biases of the rows."""
        raise NotImplementedError

    def _scaled_output(self) -> Tensor:
        """Returns the multipliers of the output layer with the units in."""
        if self._output_scale is None:
            mask, rows = self._buffers["output_mask"], self._rows
            assert mask is not None
            units, bias = (torch.cat((part, part.new_ones(1)))[rows] for part in (self.units, self.bias_units))
            self._output_scale = torch.cat((mask[..., :-1] * units[..., None], mask[..., -1:] * bias[..., None]), -1)
        return self._output_scale

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._output_scale = None

    def extra_repr(self) -> str:
        hidden = [getattr(self, name).shape[-2] for name in self.layer_names[:-1]]
        return f"{' -> '.join(map(str, [self.in_features, *hidden, self.out_features]))}, {self.num_parameters} weights"

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
        standardized) and 2/n above (He et al. 2015), and a bias that is uniform within 1/sqrt(n), PyTorch's default;
        all that after multiplication.
        """
        with torch.no_grad():
            for layer, name in enumerate(self.layer_names):
                weight, mask = getattr(self, name), getattr(self, f"{name}_mask")
                if name == "output":
                    weight.zero_()
                    continue
                scale = torch.ones_like(weight) if mask is None else mask.expand_as(weight)
                kept = scale != 0
                fan_in = (kept.sum(-1, keepdim=True) - 1).clamp(min=1).to(weight)
                weight.normal_().mul_((fan_in / (1 if layer == 0 else 2)).rsqrt())
                weight[..., -1:].uniform_(-1, 1).mul_(fan_in.rsqrt())
                weight.copy_(torch.where(kept, weight / scale, torch.zeros_like(weight)))

    def _weights(self) -> list[Tensor]:
        """Returns the multiplied weights, read by attribute."""
        weights = []
        for name in self.layer_names:
            mask = self._scaled_output() if name == "output" else self._buffers[f"{name}_mask"]
            weight = getattr(self, name)
            weights.append(weight if mask is None else weight * mask)
        return weights


def shares(mask: Tensor, base: float) -> Tensor:
    """Returns what a layer's weights are multiplied by, of the shape of its mask ``(*rows, inputs)``; see `Base`."""
    kept = mask.to(torch.get_default_dtype())
    return kept / (kept.sum(-1, keepdim=True) / base).clamp(min=1)


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
