"""What a recurrent network says of the states of a series, given the data from each step on.

All run backward over the steps, in torch alone: a `BackwardGRU`, a `SeriesSummary` of fixed size, and
`BackwardMessages`, one for each step. None has a weight whose number depends on the steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BackwardGRU", "BackwardMessages", "SeriesSummary", "backward_sums"]


def backward_sums(terms: Tensor, decay: Tensor) -> Tensor:
    """Returns ``sums[t] = terms[t] + decay[t] * sums[t + 1]`` along the first dim, in log2(steps) rounds.

    Example:
        >>> backward_sums(torch.ones(3), torch.full((3,), 0.5))
        tensor([1.7500, 1.5000, 1.0000])
    """
    step = 1
    while step < len(terms):
        terms = torch.cat(
            (torch.addcmul(terms[:-step], decay[:-step], terms[step:]), terms[-step:])
        )
        decay = torch.cat((decay[:-step] * decay[step:], decay[-step:]))
        step *= 2
    return terms


class BackwardGRU(nn.Module):
    """A gated recurrent unit that reads a series from its last step to its first.

    Args:
        num_inputs: of each step.
        num_units: of its state, which is zero before the last step.
        **factory: device and dtype of the parameters.

    Example:
        >>> gru = BackwardGRU(2, 3)
        >>> x = torch.randn(5, 4, 2)
        >>> short = gru(x[:2])
        >>> torch.allclose(gru(x, torch.tensor([1, 1, 0, 0, 0]).bool()[:, None].expand(5, 4))[:2], short)
        True
    """

    def __init__(self, num_inputs: int, num_units: int, **factory: Any) -> None:
        super().__init__()
        self.num_units = num_units
        bound = num_units**-0.5  # as `nn.GRU` starts

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, **factory).uniform_(-bound, bound))

        self.inputs_weight = parameter(3 * num_units, num_inputs)
        self.state_weight = parameter(3 * num_units, num_units)
        self.inputs_bias = parameter(3 * num_units)
        self.state_bias = parameter(3 * num_units)

    def forward(self, x: Tensor, exists: Tensor | None = None) -> Tensor:
        """Returns the state at each step, ``(steps, rows, units)``, after the inputs of that step and all later ones.

        Args:
            x: inputs ``(steps, rows, inputs)``.
            exists: which steps a row has, ``(steps, rows)``; the state passes by others as it is. None: all.
        """
        x = x.flip(0)
        if exists is None:
            return self._run(x).flip(0)
        seen = exists.flip(0)
        # the steps that exist come first, in their order
        order = seen.to(torch.uint8).argsort(dim=0, descending=True, stable=True).unsqueeze(-1)
        states = self._run(x.take_along_dim(order, 0))
        states = torch.cat((torch.zeros_like(states[:1]), states))
        return states.take_along_dim(seen.cumsum(0).unsqueeze(-1), 0).flip(0)

    def _run(self, x: Tensor) -> Tensor:
        weights: Any = [self.inputs_weight, self.state_weight, self.inputs_bias, self.state_bias]
        start = x.new_zeros(1, x.shape[1], self.num_units)
        return torch.gru(x, start, weights, True, 1, 0.0, False, False, False)[0]


class SeriesSummary(nn.Module):
    """Features of a whole series, of a fixed number.

    They are a `BackwardGRU`'s first state, the mean over steps of a hidden layer after it, and, as these take long to
    learn them, means and log mean squares of the inputs, and the log of the steps' number.

    Args:
        num_inputs: of each step.
        num_units: of the unit's state; the hidden layer has twice as many.
        min_square: added to mean squares of standardized inputs, below which their size is taken for rounding.
        **factory: device and dtype of the parameters.
    """

    def __init__(
        self, num_inputs: int, num_units: int, *, min_square: float = 1e-4, **factory: Any
    ) -> None:
        super().__init__()
        self.min_square = min_square
        self.num_features = 3 * num_units + 2 * num_inputs + 1
        self.gru = BackwardGRU(num_inputs, num_units, **factory)
        self.hidden = nn.Linear(num_units + num_inputs, 2 * num_units, **factory)

    def forward(self, x: Tensor, exists: Tensor | None = None) -> Tensor:
        """Returns the features ``(rows, features)``; arguments as of `BackwardGRU.forward`."""
        states = self.gru(x, exists)
        weight = torch.ones_like(x[..., :1]) if exists is None else exists.unsqueeze(-1).to(x)
        count = weight.sum(0).clamp(min=1)
        hidden = F.silu(self.hidden(torch.cat((states, x), -1)))
        mean, square = (
            (weight * each).sum(0) / count for each in (torch.cat((hidden, x), -1), x.square())
        )
        return torch.cat((states[0], mean, (square + self.min_square).log(), count.log()), -1)


class BackwardMessages(nn.Module):
    """What data from each step on say of the elements of that step's state: Normal potentials, or logits.

    A Normal potential has location m and precision l of weighted sums over later steps::

        l[t] = exp(a[t]) + c[t] f[t]^2 l[t + 1],   l m[t] = exp(a[t]) u[t] + c[t] f[t] l m[t + 1],

    with u linear in the data of a step, and a, c between 0 and 1, and f between -1 and 1 functions of a `BackwardGRU`'s
    state. Kalman's backward recursion for an autoregression with coefficient f is of that form; so locations follow
    data however far out these are. A further output is added to m, and another to log l; they are zero at first, where
    f = 0.987 is near 1, as of random walks, and still has a gradient. Logits are outputs themselves.

    Args:
        num_data: features of a step's data that u is linear in; 0 for logits.
        num_inputs: of a step to the network.
        num_units: of the unit's state, and of a hidden layer after it.
        num_outputs: elements of a step's state, or logits.
        max_log_precision: bound of a message's log precision relative to the unit, in nats, beyond which a step says no
            more; at ten times as many, differences of numbers so large are lost to rounding.
        **factory: device and dtype of the parameters.
    """

    def __init__(
        self,
        num_data: int,
        num_inputs: int,
        num_units: int,
        num_outputs: int,
        *,
        max_log_precision: float = 12.0,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.max_log_precision = max_log_precision
        self.is_normal, self.num_outputs = num_data > 0, num_outputs
        self.gru = BackwardGRU(num_inputs, num_units, **factory)
        self.hidden = nn.Linear(num_units + num_inputs, num_units, **factory)
        self.output = _zero_map(num_units, num_outputs * (5 if self.is_normal else 1), **factory)
        if self.is_normal:
            self.location = _zero_map(num_data, num_outputs, **factory)
            nn.init.constant_(self.output.bias[2 * num_outputs : 3 * num_outputs], 2.5)  # of f

    @torch.no_grad()
    def start(self, slope: Tensor, log_precision: Tensor) -> None:
        """Has u begin as a regression with slope ``(elements, data)`` and log precision a ``(elements,)``."""
        self.location.weight.copy_(slope)
        self.output.bias[: self.num_outputs] = log_precision

    def forward(
        self, data: Tensor, inputs: Tensor, seen: Tensor, exists: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Returns locations and log precisions, or logits, each ``(steps, rows, outputs)``.

        Args:
            data: what u is linear in, ``(steps, rows, data)``.
            inputs: of the network, ``(steps, rows, inputs)``.
            seen: which steps have data, ``(steps, rows)``.
            exists: which steps a row has, see `BackwardGRU.forward`.
        """
        states = self.gru(inputs, exists)
        hidden = F.silu(self.hidden(torch.cat((states, inputs), -1)))
        output = self.output(hidden)
        if not self.is_normal:
            return output
        log_weight, decay, factor, shift, more = output.chunk(5, -1)
        limit = self.max_log_precision
        weight = log_weight.clamp(-limit, limit).exp() * seen.unsqueeze(-1)
        decay, factor = decay.sigmoid(), factor.tanh()
        if exists is not None:
            there = exists.unsqueeze(-1)
            weight = weight * there
            decay, factor = (part.where(there, 1.0) for part in (decay, factor))
        both = torch.cat((weight * self.location(data), weight), -1)
        both = backward_sums(both, torch.cat((decay * factor, decay * factor.square()), -1))
        force, precision = both.chunk(2, -1)
        # where there are no data, a location of zero by zero is zero
        precision = precision + torch.finfo(precision.dtype).eps ** 2
        return force / precision + shift, (precision.log() + more).clamp(-3 * limit, limit)


def _zero_map(num_inputs: int, num_outputs: int, **factory: Any) -> nn.Linear:
    """Returns a linear map that gives zeros at first."""
    linear = nn.Linear(num_inputs, num_outputs, **factory)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return linear
