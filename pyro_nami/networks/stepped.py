"""Perceptrons whose inputs come to be known step by step: their parameters, and how these are scaled and start.

Parameters are one tensor a layer with the bias as last column (optimizers that loop over tensors stay fast), and are
read by attribute at the start of every pass, so that they may be replaced by name, as Pyro does. A layer is a matrix in
`masked`, a batch of matrices in `separate`; these say which weights there are, and how a pass multiplies by them.
Change this module to change how layers are stored, scaled or started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_nami.networks.masks import split_steps
from pyro_nami.networks.pace import Pace
from pyro_nami.networks.passes import PassWeights, SteppedState

__all__ = ["Activation", "Base", "SteppedMLP"]

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
    """``rows(x) = bias_units * bias + units * (W (h(x) - h(0)) + direct x)``, with h the hidden layers.

    Hidden units are taken relative to what they are at inputs of zero: what is the same in every call is left to the
    bias. Every parameter is multiplied by its *multipliers*: zero for what is masked, and what `Base` divides by.

    Attributes:
        steps: the columns and the rows of each step.
        units: of each row, ``(outputs,)``, the size that a weight of one gives to what the row reads.
        bias_units: likewise of its bias.
    """

    output: Tensor
    units: Tensor
    bias_units: Tensor
    _rows: Tensor
    _positions: Tensor | None
    _gather: Tensor
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
        masks: Sequence[Tensor],
        shapes: Sequence[tuple[int, ...]],
        rows: Tensor,
        gather: Tensor,
        base: Base,
        **factory: Any,
    ) -> None:
        """Registers a parameter a layer, and its multipliers.

        Args:
            masks: which weights there are, boolean and broadcastable to the parameters, the bias in the last column;
                the output layer reads hidden units, and then inputs.
            shapes: of the parameters, ``(*stack, units, inputs + 1)``.
            rows: which row each place of the output layer gives, ``(*stack, places)``; -1 for padding.
            gather: 1 + the column that each direct weight reads, 0 for padding and for the bias, ``(stack, inputs + 1)``.
            base: what weights are divided beyond.
            factory: device and dtype.
        """
        device = factory.get("device")
        self.register_buffer("units", torch.ones(self.out_features, **factory))
        self.register_buffer("bias_units", torch.ones(self.out_features, **factory))
        self.register_buffer("_rows", rows.to(device), persistent=False)
        self.register_buffer("_gather", gather.to(device), persistent=False)
        positions = rows.flatten().argsort(stable=True)[rows.numel() - self.out_features :]
        in_place = len(positions) == rows.numel() and torch.equal(positions, torch.arange(len(positions)))
        self.register_buffer("_positions", None if in_place else positions.to(device), persistent=False)
        self._units = shapes[-2][-2] if len(shapes) > 1 else 0
        for name, shape, multiplier in zip(self.layer_names, shapes, self._multipliers(masks, base)):
            weight = torch.empty(shape, **factory)
            self.register_parameter(name, nn.Parameter(weight))
            multiplier = multiplier.to(weight)
            plain = name != "output" and bool((multiplier == 1).all())
            self.register_buffer(f"{name}_mask", None if plain else multiplier, persistent=False)
        self.register_buffer("_output_scale", None, persistent=False)
        self._paced = slice(None) if self.output.numel() <= _MOST_PACED else slice(-1, None)
        self.pace = Pace(self.output[..., self._paced]) if base.paced else None
        if self.pace is not None:
            self.pace.patient[..., :-1] = True
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the hidden layers anew and sets the output layer to zero.

        A unit with n unmasked inputs gets normal weights of variance 1/n in the lowest layer (its inputs are
        standardized) and 2/n above (He et al. 2015), and a bias that is uniform within 1/sqrt(n), PyTorch's default;
        all that after multiplication.
        """
        with torch.no_grad():
            self.output.zero_()
            for layer, name in enumerate(self.layer_names[:-1]):
                weight, mask = getattr(self, name), self._buffers[f"{name}_mask"]
                scale = torch.ones_like(weight) if mask is None else mask.expand_as(weight)
                kept = scale != 0
                fan_in = (kept.sum(-1, keepdim=True) - 1).clamp(min=1).to(weight)
                weight.normal_().mul_((fan_in / (1 if layer == 0 else 2)).rsqrt())
                weight[..., -1:].uniform_(-1, 1).mul_(fan_in.rsqrt())
                weight.copy_(torch.where(kept, weight / scale, torch.zeros_like(weight)))

    # Passes

    def start(self) -> SteppedState:
        """Returns the state of a pass in which no input is known yet."""
        return SteppedState(self._pass_weights(False), 0, torch.Size(), None)

    def forward(self, x: Tensor) -> Tensor:
        """Returns all rows, ``(*batch, outputs)``, from all inputs, ``(*batch, inputs)``, in one dense pass."""
        return SteppedState(self._pass_weights(True), 0, torch.Size(), None).advance(x, 1)[0]

    def _pass_weights(self, whole: bool) -> PassWeights:
        """Returns the weights of one pass, in whose first step the ``whole`` may be taken, or in steps."""
        raise NotImplementedError

    def _weights(self) -> list[Tensor]:
        """Returns the multiplied weights, read by attribute."""
        weights = []
        for name in self.layer_names:
            mask = self._scaled_output() if name == "output" else self._buffers[f"{name}_mask"]
            weight = getattr(self, name)
            weights.append(weight if mask is None else weight * mask)
        return weights

    # Multipliers

    def _multipliers(self, masks: Sequence[Tensor], base: Base) -> list[Tensor]:
        """Returns what weights are multiplied by, from masks (or multipliers) of all layers."""
        *hidden, output = (mask != 0 for mask in masks)
        limits = (base.inputs, *[base.hidden] * len(hidden))
        parts = [[_shares(mask[..., :-1], limit), mask[..., -1:]] for mask, limit in zip(hidden, limits)]
        units, direct = output[..., : self._units], output[..., self._units : -1]
        parts.append([_shares(units, base.output), _shares(direct, base.inputs), output[..., -1:]])
        return [torch.cat(layer, -1) for layer in parts]

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

    def set_units(self, units: Tensor | None = None, bias_units: Tensor | None = None) -> None:
        """Sets the units of all rows, ``(outputs,)`` each, and leaves the parameters as they are."""
        if units is not None:
            self.units.copy_(units)
        if bias_units is not None:
            self.bias_units.copy_(bias_units)
        self._output_scale = None

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

    # What rows are made of

    def output_bias(self) -> Tensor:
        """Returns what the rows are where all that they read is zero, ``(outputs,)``."""
        return self._biases(self.output) * self._biases(self._scaled_output())

    def set_output_bias(self, values: Tensor) -> None:
        """Makes the rows ``values``, ``(outputs,)``, where all that they read is zero."""
        with torch.no_grad():
            _by_place(self.output)[self._places(), -1] = values / self._biases(self._scaled_output())

    def direct_mask(self) -> Tensor:
        """Returns which inputs each row reads directly, a boolean ``(outputs, inputs)``."""
        places = self._places()
        mask = _by_place(self._scaled_output())[places, self._units :] != 0
        columns = self._gather[places // self.output.shape[-2], -mask.shape[1] :]
        return mask.new_zeros(self.out_features, self.in_features + 1).scatter(1, columns, mask)[:, 1:]

    @torch.no_grad()
    def set_direct(self, row: int, columns: Tensor, slopes: Tensor) -> None:
        """Makes a row move with some inputs, that it reads directly, by these slopes."""
        place = int(self._places()[row])
        read = self._gather[place // self.output.shape[-2]]
        where = place, self._units + (read == columns.unsqueeze(-1) + 1).int().argmax(-1)
        _by_place(self.output)[where] = slopes / _by_place(self._scaled_output())[where]

    def is_trained(self) -> bool:
        """Whether rows depend on anything."""
        return bool((self.output[..., :-1] != 0).any())

    def quicken(self) -> None:
        """Adapts the speed of the output layer's weights, after a step of the optimizer; see `Pace`."""
        if self.pace is not None:
            self.pace.adapt(self.output.detach()[..., self._paced])

    def set_shared(self, rows: Tensor) -> None:
        """Says to which rows each instance adds something of its own, a boolean ``(outputs,)``; see `Pace`."""
        if self.pace is not None:
            self.pace.shared[..., -1] = torch.cat((rows, rows.new_zeros(1)))[self._rows]

    @property
    def num_parameters(self) -> int:
        """Number of weights that are not masked."""
        count = 0
        for name in self.layer_names:
            weight, mask = getattr(self, name), self._buffers[f"{name}_mask"]
            count += weight.numel() if mask is None else int((mask != 0).expand_as(weight).sum())
        return count

    def extra_repr(self) -> str:
        hidden = [getattr(self, name).shape[-2] for name in self.layer_names[:-1]]
        return f"{' -> '.join(map(str, [self.in_features, *hidden, self.out_features]))}, {self.num_parameters} weights"

    def _biases(self, weights: Tensor) -> Tensor:
        """Returns the biases of the rows, ``(outputs,)``, of a tensor that is laid out as the output layer."""
        biases = weights[..., -1].flatten()
        return biases if self._positions is None else biases[self._positions]

    def _places(self) -> Tensor:
        """Returns where each row lies in a stack of all places of the output layer, ``(outputs,)``."""
        return torch.arange(self.out_features, device=self._rows.device) if self._positions is None else self._positions


def _by_place(output: Tensor) -> Tensor:
    """Returns what is laid out as an output layer as one matrix, a view."""
    return output.view(-1, output.shape[-1])


def _shares(mask: Tensor, base: float) -> Tensor:
    """Returns what a layer's weights are multiplied by, of the shape of its mask ``(*rows, inputs)``; see `Base`."""
    kept = mask.to(torch.get_default_dtype())
    return kept / (kept.sum(-1, keepdim=True) / base).clamp(min=1)
