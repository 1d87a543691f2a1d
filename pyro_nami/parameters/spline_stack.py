"""`SplineStack`: autoregressive splines in sequence, for vectors whose elements depend on each other in any way.

A single autoregressive spline gives an element one shape given the elements before it; further
ones, in alternating order, bend what it leaves.
"""

from __future__ import annotations

__all__ = ["SplineStack", "StackPass"]

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_nami.factors.knots import NeuralSpline
from pyro_nami.networks.masked import Base, MaskedMLP
from pyro_nami.networks.stepped import SteppedState


class SplineStack(nn.Module):
    """A one-to-one map between noise and vectors of ``size`` features, given a context; first the identity or a turn.

    From vector to noise there are ``transforms`` layers. In each, feature i goes through a monotone rational-quadratic
    spline whose parameters a `MaskedMLP` makes of the context and the features before i; the order is reversed from
    layer to layer. Noise to vector costs a step a feature and layer, the other way a dense pass a layer.

    Args:
        size: features of a vector; context: features of what it is given.
        transforms, bins: layers, and bins of the splines, which are the identity beyond 5.
        hidden_features, base: of the networks; factory: device and dtype of their parameters.

    References:
        Durkan et al. 2019, Neural Spline Flows; Papamakarios et al. 2017, Masked Autoregressive Flow.

    Example:
        >>> stack = SplineStack(3, 2, transforms=2, bins=4, hidden_features=(8,), dtype=torch.double)
        >>> _ = [torch.nn.init.normal_(layer.output) for layer in stack.layers]
        >>> context, noise = torch.randn(5, 5, dtype=torch.double).split([2, 3], -1)
        >>> given = stack.start()(context)
        >>> vector, log_slope = given.bend(noise)
        >>> same, again = given.straighten(vector)
        >>> torch.allclose(same, noise), torch.allclose(log_slope.sum(-1), again.sum(-1))
        (True, True)
    """

    def __init__(
        self,
        size: int,
        context: int,
        *,
        transforms: int,
        bins: int,
        hidden_features: Sequence[int],
        base: Base = Base(),
        **factory: Any,
    ) -> None:
        super().__init__()
        rows = 3 * bins - 1
        before = torch.ones(size, size - 1).tril(-1).bool()
        reads = torch.cat((torch.ones(size, context).bool(), before), 1).repeat_interleave(rows, 0)
        make = functools.partial(
            MaskedMLP,
            reads,
            hidden_features,
            input_splits=[context] + [1] * (size - 1),
            output_splits=[rows] * size,
            # Without direct weights, where units alone reach every feature, noise is learned less.
            skip=min(hidden_features, default=0) < size,
            base=base,
            **factory,
        )
        self.layers = nn.ModuleList(make() for _ in range(transforms))

    def start(self) -> Callable[[Tensor], StackPass]:
        """Returns what makes of a context ``(*batch, context)`` the map, with the weights as they are now."""
        states = [layer.start() for layer in self.layers]  # type: ignore[operator]
        return functools.partial(StackPass, states)


class StackPass(NamedTuple):
    """The map of a `SplineStack` given a context."""

    states: list[SteppedState]
    context: Tensor

    def bend(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns vectors ``(*batch, size)``, and as many log slopes, which add up to the log Jacobian determinant."""
        context, noise = self._broadcast(noise)
        total = torch.zeros_like(noise)
        for layer, state in reversed([*enumerate(self.states)]):
            rows, state = state.advance(context, 1)  # once for draws that share it
            bent, slopes = list[Tensor](), list[Tensor]()
            for each in noise.split(1, -1):
                if bent:
                    rows, state = state.advance(bent[-1], state.step + 1)
                y, log_slope = NeuralSpline(rows.unsqueeze(-2)).straighten(each)
                bent.append(y)
                slopes.append(log_slope)
            vector = torch.cat(bent, -1)
            total = total - torch.cat(slopes, -1)
            noise = vector.flip(-1) if layer else vector
        return noise, total

    def straighten(self, bent: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the noise of vectors ``(*batch, size)``, and log slopes as `bend` does."""
        context, bent = self._broadcast(bent)
        total = torch.zeros_like(bent)
        for layer, state in enumerate(self.states):
            bent = bent.flip(-1) if layer else bent
            context = context.expand(bent.shape[:-1] + context.shape[-1:])
            rows, _ = state.advance(torch.cat((context, bent[..., :-1]), -1), bent.shape[-1])
            bent, log_slope = NeuralSpline(rows.unflatten(-1, (bent.shape[-1], -1))).bend(bent)
            total = total - log_slope
        return bent, total

    def _broadcast(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the context, less ones in front that ``x`` lacks, and vectors of the batch shape of both."""
        context = self.context
        while context.dim() > x.dim() and context.shape[0] == 1:
            context = context[0]
        batch = torch.broadcast_shapes(context.shape[:-1], x.shape[:-1])
        return context, x.expand(batch + x.shape[-1:])
