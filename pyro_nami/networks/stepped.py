"""Perceptrons whose inputs become known step by step: their parameters, initial values, and passes.

For a density all inputs are known, and ``mlp(x)`` is one dense pass. For sampling the inputs arrive
one step at a time, each drawn from rows emitted before::

    state = mlp.start()
    rows, state = state.advance(context, 1)
    rows, state = state.advance(sample(rows), 2)

A layer has one parameter tensor, with the bias as its last column (optimizers that loop over
tensors stay fast). Parameters are read by attribute at the start of every pass, so that they may be
replaced by name, as Pyro does. A layer is a matrix in `masked`, and a batch of matrices in
`separate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_nami.networks.masks import split_steps
from pyro_nami.networks.pace import Pace

__all__ = [
    "Activation",
    "Base",
    "Layers",
    "SteppedMLP",
    "SteppedState",
    "concatenated",
    "expand_batch",
]

# weights of an output layer; of larger ones only the biases have speeds, for their time
_MOST_PACED = 200_000
Activation = Callable[[Tensor], Tensor]


class Base(NamedTuple):
    """Divides the weights of a unit or row of n inputs by max(1, n / base).

    One step of Adam at rate r moves every weight by about r, so it would move a sum over n inputs of order one by n r.
    The division holds it to base r (the maximal-update parametrization, Yang et al. 2022, "Tensor Programs V").

    Example:
        >>> from pyro_nami.networks.masked import MaskedMLP
        >>> mlp = MaskedMLP(torch.ones(1, 4).bool(), (), base=Base(inputs=2))
        >>> mlp.output_mask  # four weights, each divided by 4 / 2, and the bias
        tensor([[0.5000, 0.5000, 0.5000, 0.5000, 1.0000]])
    """

    inputs: float = math.inf  # of a layer that reads inputs
    hidden: float = math.inf  # of hidden units, as inputs of further hidden layers
    output: float = math.inf  # of hidden units, as inputs of rows
    paced: bool = False  # whether the output layer's weights have speeds, see `Pace`
    # Of the first weights of a unit, times its inputs, in the lowest layer and above; by default 1, as inputs are
    # standardized, and that of He et al. 2015. Smaller ones start at smoother functions, as PyTorch does with 1/3.
    variances: tuple[float, float] = (1.0, 2.0)


class SteppedState(NamedTuple):
    """A pass in which the inputs of the steps before ``step`` are known, of this broadcast batch shape.

    It is immutable, so a pass may branch, and no tensor that carries values is ever written in place. ``weights`` are
    those of the pass, and ``memory`` is what these have made of the inputs so far.
    """

    weights: Any
    step: int
    batch_shape: torch.Size
    memory: Any

    def advance(self, x: Tensor, stop: int) -> tuple[Tensor, SteppedState]:
        """Returns the rows of steps ``step`` to ``stop - 1``, ``(*batch, rows)``, and the state after them.

        Args:
            x: the columns of these steps, ``(*batch, columns)``, whose batch broadcasts with those before.
            stop: the step behind the last one to take; more than one step may be taken at once.
        """
        weights, step, known_shape, memory = self
        shape = x.shape[:-1]
        if known_shape and shape != known_shape:
            shape = torch.broadcast_shapes(shape, known_shape)
            x = x.expand(*shape, x.shape[-1])
        if shape != known_shape:
            memory = weights.expanded(memory, step, known_shape, shape)
        flat = x if len(shape) == 1 else x.reshape(math.prod(shape), x.shape[-1])
        rows, memory = weights.advance(memory, flat, step, stop)
        rows = rows if len(shape) == 1 else rows.reshape(*shape, rows.shape[1])
        return rows, SteppedState(weights, stop, shape, memory)


class Layers(NamedTuple):
    """How the weights of a network are laid out; the output layer reads hidden units, then inputs."""

    # which weights there are, broadcastable to the parameters, the bias in the last column
    masks: Sequence[Tensor]
    shapes: Sequence[tuple[int, ...]]  # of the parameters, ``(*stack, units, inputs + 1)``
    # which row each place of the output layer gives, ``(*stack, places)``; -1 for padding
    rows: Tensor
    gather: Tensor  # 1 + the column that each direct weight reads, ``(stack, inputs + 1)``; else 0


class SteppedMLP(nn.Module):
    """``rows(x) = bias_units * bias + units * (W (h(x) - h(0)) + direct x)``, with h the hidden layers.

    Hidden units are taken relative to what they are at inputs of zero: what is the same in every call is left to the
    bias. Every parameter is multiplied by its *multipliers*: zero for what is masked, and what `Base` divides by.
    Arguments are those of `MaskedMLP`.

    Example:
        >>> from pyro_nami.networks.masked import MaskedMLP
        >>> mlp = MaskedMLP(torch.tensor([[1, 0]]).bool(), (4,))
        >>> mlp.set_output_bias(torch.tensor([3.0]))
        >>> mlp.set_direct(0, torch.tensor([0]), torch.tensor([2.0]))
        >>> mlp(torch.tensor([10.0, 100.0])).tolist()  # 3 + 2 * 10
        [23.0]
    """

    _buffers: dict[str, Any]
    output: Tensor
    # of each row, ``(outputs,)``, the size that a weight of one gives to what the row reads
    units: Tensor
    bias_units: Tensor  # likewise of its bias
    _rows: Tensor
    _gather: Tensor
    _positions: Tensor | None
    _output_scale: Tensor

    def __init__(
        self,
        dependency: Tensor,
        hidden_features: Sequence[int] = (64,),
        *,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        skip: bool = True,
        activation: Activation = F.silu,
        base: Base = Base(),
        **factory: Any,
    ) -> None:
        super().__init__()
        self.steps = split_steps(dependency, input_splits, output_splits)
        self.out_features, self.in_features = dependency.shape
        self.skip = skip
        self.activation = activation
        self._variances = base.variances
        if any(width < 1 for width in hidden_features):
            raise ValueError(
                f"Expected hidden_features of at least 1 each; got {list(hidden_features)}."
            )
        if not hidden_features and not skip:
            raise ValueError(
                "Expected at least one hidden layer or skip=True; got hidden_features=() and skip=False."
            )
        self.layer_names = (*(f"layer_{layer}" for layer in range(len(hidden_features))), "output")
        self._register_layers(self._lay_out(dependency, hidden_features), base, factory)
        self._paced = slice(None) if self.output.numel() <= _MOST_PACED else slice(-1, None)
        self.pace = Pace(self.output[..., self._paced]) if base.paced else None
        if self.pace is not None:
            self.pace.patient[..., :-1] = True
        self.reset_parameters()

    def _lay_out(self, dependency: Tensor, hidden_features: Sequence[int]) -> Layers:
        raise NotImplementedError

    def _register_layers(self, layers: Layers, base: Base, factory: Mapping[str, Any]) -> None:
        """Registers units, a parameter a layer, its multipliers, and where rows lie in the output layer."""
        for name in ("units", "bias_units"):
            self.register_buffer(name, torch.ones(self.out_features, **factory))
        rows = layers.rows.flatten()
        positions = rows.argsort(stable=True)[len(rows) - self.out_features :]
        in_place = torch.equal(positions, torch.arange(len(rows), device=rows.device))
        self.register_buffer("_rows", layers.rows.to(self.units.device), persistent=False)
        self.register_buffer("_gather", layers.gather.to(self.units.device), persistent=False)
        self.register_buffer(
            "_positions", None if in_place else positions.to(self.units.device), persistent=False
        )
        self._units = layers.shapes[-2][-2] if len(layers.shapes) > 1 else 0
        for name, shape, multiplier in zip(
            self.layer_names, layers.shapes, self._multipliers(layers.masks, base)
        ):
            self.register_parameter(name, nn.Parameter(self.units.new_empty(shape)))
            self.register_buffer(f"{name}_mask", multiplier.to(self.units), persistent=False)
        self.register_buffer("_output_scale", None, persistent=False)
        self._scale_output()

    def reset_parameters(self) -> None:
        """Draws the hidden layers anew and sets the output layer to zero.

        A unit with n unmasked inputs gets, after multiplication, normal weights of variance v/n and a bias uniform
        within 1/sqrt(n), as PyTorch's; see `Base.variances`.
        """
        with torch.no_grad():
            self.output.zero_()
            for layer, name in enumerate(self.layer_names[:-1]):
                weight = getattr(self, name)
                scale = self._buffers[f"{name}_mask"].expand_as(weight)
                kept = scale != 0
                fan_in = (kept.sum(-1, keepdim=True) - 1).clamp(min=1).to(weight)
                weight.normal_().mul_((fan_in / self._variances[layer > 0]).rsqrt())
                weight[..., -1:].uniform_(-1, 1).mul_(fan_in.rsqrt())
                weight.copy_(torch.where(kept, weight / scale, torch.zeros_like(weight)))

    # Passes

    def start(self, whole: bool = False) -> SteppedState:
        """Returns the state of a pass in which no input is known yet; of one step, if it is taken as a ``whole``."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Returns all rows, ``(*batch, outputs)``, from all inputs, ``(*batch, inputs)``, in one dense pass."""
        return self.start(whole=True).advance(x, 1)[0]

    def _weights(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Returns the hidden and the output layer, read by attribute and multiplied, and its bias less W h(0)."""
        hidden = [
            getattr(self, name) * self._buffers[f"{name}_mask"] for name in self.layer_names[:-1]
        ]
        output = self.output * self._output_scale
        if not hidden:
            return hidden, output, output[..., -1:]
        units = self.activation(hidden[0][..., -1:])
        product, add_product = (
            (torch.mm, torch.addmm) if units.dim() == 2 else (torch.bmm, torch.baddbmm)
        )
        for weight in hidden[1:]:
            units = self.activation(add_product(weight[..., -1:], weight[..., :-1], units))
        return hidden, output, output[..., -1:] - product(output[..., : self._units], units)

    # Multipliers

    def _multipliers(self, masks: Sequence[Tensor], base: Base) -> list[Tensor]:
        """Returns what weights are multiplied by, from masks (or multipliers) of all layers."""
        *hidden, output = (mask != 0 for mask in masks)
        limits = (base.inputs, *[base.hidden] * len(hidden))
        parts = [
            [_shares(mask[..., :-1], limit), mask[..., -1:]] for mask, limit in zip(hidden, limits)
        ]
        units, direct = output[..., : self._units], output[..., self._units : -1]
        parts.append([_shares(units, base.output), _shares(direct, base.inputs), output[..., -1:]])
        return [torch.cat(layer, -1) for layer in parts]

    def _scale_output(self) -> None:
        """Puts the units into the multipliers of the output layer."""
        mask = self._buffers["output_mask"]
        units, bias = (
            torch.cat((part, part.new_ones(1)))[self._rows]
            for part in (self.units, self.bias_units)
        )
        self._output_scale = torch.cat(
            (mask[..., :-1] * units[..., None], mask[..., -1:] * bias[..., None]), -1
        )

    @torch.no_grad()
    def rebase(self, base: Base) -> None:
        """Divides weights beyond another base, and multiplies the parameters so that nothing else changes."""
        old = [self._buffers[f"{name}_mask"] for name in self.layer_names]
        for name, before, now in zip(self.layer_names, old, self._multipliers(old, base)):
            now = now.to(before)
            getattr(self, name).mul_(torch.where(now != 0, before / now, 1.0))
            self.register_buffer(f"{name}_mask", now, persistent=False)
        self._scale_output()
        if self.pace is not None:
            self.pace.restart()

    def set_units(self, units: Tensor | None = None, bias_units: Tensor | None = None) -> None:
        """Sets the units of all rows, ``(outputs,)`` each, and leaves the parameters as they are."""
        if units is not None:
            self.units.copy_(units)
        if bias_units is not None:
            self.bias_units.copy_(bias_units)
        self._scale_output()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._scale_output()

    # What rows are made of

    def output_bias(self) -> Tensor:
        """Returns what the rows are where all that they read is zero, ``(outputs,)``."""
        return self._biases(self.output) * self._biases(self._output_scale)

    def set_output_bias(self, values: Tensor) -> None:
        """Makes the rows ``values``, ``(outputs,)``, where all that they read is zero."""
        with torch.no_grad():
            _by_place(self.output)[self._places(), -1] = values / self._biases(self._output_scale)

    @torch.no_grad()
    def set_direct(self, row: int, columns: Tensor, slopes: Tensor) -> None:
        """Makes a row move with some inputs, that it reads directly, by these slopes."""
        place = int(self._places()[row])
        read = self._gather[place // self.output.shape[-2]]
        where = place, self._units + (read == columns.unsqueeze(-1) + 1).int().argmax(-1)
        _by_place(self.output)[where] = slopes / _by_place(self._output_scale)[where]

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
        pairs = [(getattr(self, name), self._buffers[f"{name}_mask"]) for name in self.layer_names]
        return sum(int((mask != 0).expand_as(weight).sum()) for weight, mask in pairs)

    def extra_repr(self) -> str:
        hidden = [getattr(self, name).shape[-2] for name in self.layer_names[:-1]]
        return f"{' -> '.join(map(str, [self.in_features, *hidden, self.out_features]))}, {self.num_parameters} weights"

    def _biases(self, weights: Tensor) -> Tensor:
        """Returns the biases of the rows, ``(outputs,)``, of a tensor that is laid out as the output layer."""
        biases = weights[..., -1].flatten()
        return biases if self._positions is None else biases[self._positions]

    def _places(self) -> Tensor:
        """Returns where each row lies in a stack of all places of the output layer, ``(outputs,)``."""
        return (
            torch.arange(self.out_features, device=self._rows.device)
            if self._positions is None
            else self._positions
        )


def expand_batch(values: Tensor, old: torch.Size, new: torch.Size) -> Tensor:
    """Returns values of one batch shape, ``(size of old, features)``, at a larger one, ``(size of new, features)``."""
    features = values.shape[1]
    return values.reshape(*old, features).expand(*new, features).reshape(math.prod(new), features)


def concatenated(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Returns the parts as one; a single part as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


def _by_place(output: Tensor) -> Tensor:
    """Returns what is laid out as an output layer as one matrix, a view."""
    return output.view(-1, output.shape[-1])


def _shares(mask: Tensor, base: float) -> Tensor:
    """Returns what a layer's weights are multiplied by, of the shape of its mask ``(*rows, inputs)``; see `Base`."""
    kept = mask.to(torch.get_default_dtype())
    return kept / (kept.sum(-1, keepdim=True) / base).clamp(min=1)
