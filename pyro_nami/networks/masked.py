"""`MaskedMLP`: a perceptron with shared hidden units whose outputs depend on the inputs that a boolean matrix allows.

`masks` says which units are connected, `stepped` takes a pass. A layer has one parameter tensor,
with the bias as its last column (optimizers that loop over tensors stay fast). Parameters are read
by attribute at the start of every pass, so that they may be replaced by name, as Pyro does.
"""

from __future__ import annotations

__all__ = ["Base", "MaskedMLP"]

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_nami.networks.masks import check_width, layer_masks, split_steps, unit_steps
from pyro_nami.networks.pace import Pace
from pyro_nami.networks.stepped import Activation, PassWeights, SteppedState, start_pass

# weights of an output layer; of larger ones only the biases have speeds, as these take time
MOST_PACED = 200_000


class Base(NamedTuple):
    """Divides the weights of a unit or row of n inputs by max(1, n / base).

    One step of Adam at rate r moves every weight by about r, so it would move a sum over n inputs of order one by n r.
    The division holds it to base r (the maximal-update parametrization, Yang et al. 2022, "Tensor Programs V").

    Example:
        >>> mlp = MaskedMLP(torch.ones(1, 4).bool(), (), base=Base(inputs=2))
        >>> mlp.output_mask  # four weights, each divided by 4 / 2, and the bias
        tensor([[0.5000, 0.5000, 0.5000, 0.5000, 1.0000]])
    """

    inputs: float = math.inf  # of a layer that reads inputs
    hidden: float = math.inf  # of hidden units, as inputs of further hidden layers
    output: float = math.inf  # of hidden units, as inputs of rows
    paced: bool = False  # whether the output layer's weights have speeds, see `Pace`
    patient: bool = False  # whether weights with speeds go by short steps until these agree
    # Of the first weights of a unit, times its inputs, in the lowest layer and above; by default 1, as inputs are
    # standardized, and that of He et al. 2015. Smaller ones start at smoother functions, as PyTorch does with 1/3.
    variances: tuple[float, float] = (1.0, 2.0)


class MaskedMLP(nn.Module):
    """A perceptron whose Jacobian's support is exactly a given dependency matrix, whatever its widths.

    ``rows(x) = bias_units * bias + units * (W (h(x) - h(0)) + direct x)``, with h the hidden units whose labels a row
    contains (see `masks`) and, with ``skip``, the inputs that it may read. If no row reads anything, there are no
    units. Hidden units are taken relative to what they are at inputs of zero: what is the same in every call is left to
    the bias. Every parameter is multiplied by 0 if it is masked, and else by what `Base` divides by.

    Inputs and outputs come in *steps*: when the columns of step s are known, the rows of step s can be emitted.
    Columns and rows are numbered in step order. A step may have no columns, or no rows.

    Parameters are ``layer_0`` ``(units, inputs + 1)``, ``layer_1`` ``(units, units below + 1)``, ..., ``output``
    ``(outputs, units + inputs + 1)`` (without ``skip``: ``(outputs, units + 1)``).

    Args:
        dependency: boolean tensor ``(outputs, inputs)``; entry (i, j) says that output i may read input j.
        hidden_features: units in each hidden layer. None at all, ``()``, makes the network linear.
        input_splits: number of columns that become known at each step; one step by default.
        output_splits: number of rows that are emitted at each step.
        skip: whether rows also read their inputs directly. Linear-Gaussian regressions are then represented exactly.
        activation: elementwise function of the hidden layers.
        base: what weights are divided beyond.
        **factory: device and dtype of the parameters.

    Raises:
        ValueError: without ``skip``, if the hidden layers are too narrow to carry every dependency.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> dependency = torch.tensor([[False, False], [True, False]])
        >>> mlp = MaskedMLP(dependency, (8,), input_splits=[0, 1, 1], output_splits=[1, 1, 0])
        >>> mlp.set_output_bias(torch.tensor([3.0, 4.0]))
        >>> mlp.set_direct(1, torch.tensor([0]), torch.tensor([2.0]))
        >>> mlp(torch.tensor([10.0, 100.0])).tolist()  # the second is 4 + 2 * 10
        [3.0, 24.0]
        >>> first, state = mlp.start().advance(torch.empty(0), 1)
        >>> second, state = state.advance(torch.tensor([10.0]), 2)
        >>> second.tolist()
        [24.0]
    """

    output: Tensor
    # of each row, ``(outputs,)``, the size that a weight of one gives to what the row reads
    units: Tensor
    bias_units: Tensor  # likewise of its bias

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
        if any(width < 1 for width in hidden_features):
            raise ValueError(
                f"Expected hidden_features of at least 1 each; got {list(hidden_features)}."
            )
        if not hidden_features and not skip:
            raise ValueError(
                "Expected at least one hidden layer or skip=True; got hidden_features=() and skip=False."
            )
        self.skip = skip
        self.activation = activation
        self._variances = base.variances
        dependency = dependency.cpu()
        steps = split_steps(dependency, input_splits, output_splits)
        hidden, output, last_columns = layer_masks(dependency, hidden_features)
        if not skip:
            check_width(dependency, (*hidden, output))
        # where the columns, the units of each hidden layer, and the rows of each step begin
        self.bounds = (
            steps.columns,
            *(unit_steps(last, steps) for last in last_columns),
            steps.rows,
        )
        if skip and hidden:
            output = torch.cat((output, dependency), 1)
        self.layer_names = (*(f"layer_{layer}" for layer in range(len(hidden))), "output")
        for name in ("units", "bias_units"):
            self.register_buffer(name, torch.ones(self.out_features, **factory))
        for name, multiplier in zip(self.layer_names, self._multipliers((*hidden, output), base)):
            self.register_buffer(f"{name}_mask", multiplier.to(self.units), persistent=False)
            self.register_parameter(name, nn.Parameter(self.units.new_empty(multiplier.shape)))
        self.pace = Pace(self._paced()) if base.paced else None
        if self.pace is not None:
            self.pace.patient[:, :-1] = base.patient
        self.reset_parameters()

    @property
    def in_features(self) -> int:
        """The number of inputs."""
        return self.bounds[0][-1]

    @property
    def out_features(self) -> int:
        """The number of rows."""
        return self.bounds[-1][-1]

    @property
    def _num_units(self) -> int:
        """The number of hidden units that rows read."""
        return self.bounds[-2][-1] if len(self.bounds) > 2 else 0

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the hidden layers anew and sets the output layer to zero.

        A unit with n unmasked inputs gets, after multiplication, normal weights of variance v/n and a bias uniform
        within 1/sqrt(n), as PyTorch's; see `Base.variances`.
        """
        self.output.zero_()
        for layer, name in enumerate(self.layer_names[:-1]):
            weight, scale = getattr(self, name), getattr(self, f"{name}_mask")
            kept = scale != 0
            fan_in = (kept.sum(-1, keepdim=True) - 1).clamp(min=1).to(weight)
            weight.normal_().mul_((fan_in / self._variances[layer > 0]).rsqrt())
            weight[:, -1:].uniform_(-1, 1).mul_(fan_in.rsqrt())
            weight.copy_(torch.where(kept, weight / scale, 0.0))

    # Passes

    def start(self, whole: bool = False) -> SteppedState:
        """Returns the state of a pass in which no input is known yet; of one step, if it is taken as a ``whole``."""
        scales: list[Any] = [self._buffers[f"{name}_mask"] for name in self.layer_names]
        scales[-1] = self._output_scale()
        layers = [getattr(self, name) * scale for name, scale in zip(self.layer_names, scales)]
        weights = [layer[:, :-1] for layer in layers]
        biases = [layer[:, -1:] for layer in layers]
        reads: list[tuple[int, ...]] = [(layer,) for layer in range(len(layers))]
        if len(layers) > 1:
            units = self.activation(biases[0])
            for weight, bias in zip(weights[1:-1], biases[1:]):
                units = self.activation(torch.addmm(bias, weight, units))
            biases[-1] = biases[-1] - weights[-1][:, : self._num_units] @ units
            if self.skip:
                reads[-1] += (0,)

        bounds = [(each[0], each[-1]) for each in self.bounds] if whole else self.bounds
        matrices = [
            weight.split([end - start for start, end in pairwise(each)])
            for weight, each in zip(weights, bounds[1:])
        ]
        known = PassWeights(bounds, reads, matrices, self.activation)
        return start_pass(known, [bias.t() for bias in biases])

    def forward(self, x: Tensor) -> Tensor:
        """Returns all rows, ``(*batch, outputs)``, from all inputs, ``(*batch, inputs)``, in one dense pass."""
        return self.start(whole=True).advance(x, 1)[0]

    # Multipliers

    def _multipliers(self, masks: Sequence[Tensor], base: Base) -> list[Tensor]:
        """Returns what the parameters of each layer are multiplied by; the bias, their last column, by one."""
        *hidden, output = masks
        limits = (base.inputs, *[base.hidden] * len(hidden))
        parts = [[_shares(mask, limit)] for mask, limit in zip(hidden, limits)]
        units, direct = output[:, : self._num_units], output[:, self._num_units :]
        parts.append([_shares(units, base.output), _shares(direct, base.inputs)])
        return [F.pad(torch.cat(layer, -1), (0, 1), value=1.0) for layer in parts]

    def _output_scale(self) -> Tensor:
        """Returns what the parameters of the output layer are multiplied by, its units among that."""
        mask: Any = self._buffers["output_mask"]
        return torch.cat(
            (mask[:, :-1] * self.units.unsqueeze(-1), self.bias_units.unsqueeze(-1)), -1
        )

    def set_units(self, units: Tensor, bias_units: Tensor | None = None) -> None:
        """Sets the units of all rows, ``(outputs,)`` each, and leaves the parameters as they are."""
        self.units.copy_(units)
        if bias_units is not None:
            self.bias_units.copy_(bias_units)

    # What rows are made of

    def output_bias(self) -> Tensor:
        """Returns what the rows are where all that they read is zero, ``(outputs,)``."""
        return self.output[:, -1] * self.bias_units

    @torch.no_grad()
    def set_output_bias(self, values: Tensor) -> None:
        """Makes the rows ``values``, ``(outputs,)``, where all that they read is zero."""
        self.output[:, -1] = values / self.bias_units

    @torch.no_grad()
    def set_direct(self, row: int, columns: Tensor, slopes: Tensor) -> None:
        """Makes a row move with some inputs, that it reads directly, by these slopes."""
        where = row, self._num_units + columns
        self.output[where] = slopes / self._output_scale()[where]

    def is_trained(self) -> bool:
        """Whether rows depend on anything."""
        return bool((self.output[:, :-1] != 0).any())

    def _paced(self) -> Tensor:
        """Returns the weights of the output layer that have speeds, a view."""
        output = self.output.detach()
        return output if output.numel() <= MOST_PACED else output[:, -1:]

    def quicken(self) -> None:
        """Adapts the speed of the output layer's weights, after a step of the optimizer; see `Pace`."""
        if self.pace is not None:
            self.pace.adapt(self._paced())

    @property
    def num_parameters(self) -> int:
        """Number of weights that are not masked."""
        return sum(int((getattr(self, f"{name}_mask") != 0).sum()) for name in self.layer_names)

    def extra_repr(self) -> str:
        sizes = " -> ".join(str(bounds[-1]) for bounds in self.bounds)
        return f"{sizes}, {self.num_parameters} weights"


def _shares(mask: Tensor, base: float) -> Tensor:
    """Returns what a layer's weights are multiplied by, of the shape of its mask ``(rows, inputs)``; see `Base`."""
    kept = mask.to(torch.get_default_dtype())
    return kept / (kept.sum(-1, keepdim=True) / base).clamp(min=1)
