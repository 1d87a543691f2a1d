"""Pseudo-observations: each instance of a set counts as an observation of a Normal factor, and precisions add.

A mean of features does not say how a posterior contracts with the number of instances; a network
would have to learn this from the logarithm of the count, at counts seen in training. Precisions of
independent observations add, so their sum contracts rightly at any count.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_nami.networks.reductions import Reduction

__all__ = ["PrecisionSums"]


class PrecisionSums(nn.Module):
    """Sums over a set of ``exp(l_n) q_n (q_n, 1, x_n)``, the canonical parameters of its pseudo-observations.

    Instance n is taken for an observation of every head v, ``q_n v = phi_n + noise of precision exp(l_n)``, with phi, q
    and l linear in its inputs x_n, l within bounds; l starts at 0 and q at 1. The parameter ``heads_weight``,
    ``(2 * heads, num_inputs + 1)``, has the rows of l, then those of q, and the bias as last column.

    Args:
        num_inputs: number of inputs of each instance.
        heads: number of elements that the instances are taken for observations of.
        max_log_precision: bound of the size of l, in nats: one instance shall not outweigh all others.
        **factory: device and dtype of the parameters.

    Example:
        >>> from pyro_nami.networks import Along
        >>> PrecisionSums(1, heads=2)(torch.tensor([[1.0], [2.0], [5.0]]), Along(-1))[0]
        tensor([[3., 3., 8.],
                [3., 3., 8.]], grad_fn=<SelectBackward0>)
    """

    def __init__(
        self, num_inputs: int, heads: int, *, max_log_precision: float = 10.0, **factory: Any
    ) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.heads = heads
        self.max_log_precision = max_log_precision
        self.heads_weight = nn.Parameter(torch.empty(2 * heads, num_inputs + 1, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets l to 0 and q to 1 for any inputs."""
        with torch.no_grad():
            self.heads_weight.zero_()[self.heads :, -1] = 1

    def weights(self) -> list[Tensor]:
        """Returns the parameters, read by attribute, for `forward`."""
        return [self.heads_weight]

    def forward(self, x: Tensor, over: Reduction, weights: list[Tensor] | None = None) -> Tensor:
        """Returns the sums of each set, ``(*sets, heads, num_inputs + 2)``; arguments as of `SetEncoder.forward`."""
        (weight,) = self.weights() if weights is None else weights
        x = x.movedim(over.axis, -1)  # products are fast where the instances are contiguous
        log_precision, slope = (weight[:, :-1] @ x + weight[:, -1:]).chunk(2, -2)
        limit = self.max_log_precision
        force = F.hardtanh(log_precision, -limit, limit).exp() * slope
        sums = over.products(force, torch.cat((x, torch.ones_like(x[..., :1, :])), -2))
        # As q is linear in the inputs; rounding may take what is next to nothing below zero.
        squares = (sums * weight[self.heads :].unsqueeze(-1)).sum(-2, keepdim=True).clamp(min=0)
        products, forces = sums.split((self.num_inputs, 1), -2)
        return torch.cat((squares, forces, products), -2).movedim(-1, over.axis - 1)
