"""Learned updates: networks that read an estimate and its gradient, and give the next estimate.

A *refinement* is added to the parameters of a guide's factors for the instances of one call (see
`pyro_nami.parameters.inverse_network`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_nami.parameters.group_network import GroupNetwork

__all__ = ["ENCODINGS", "INPUTS", "Refined", "Refinement", "Updater", "encoded"]

Refinement = dict[Hashable, Tensor]  # factor -> ``(*plates, elements, params)``

ENCODINGS = "gradients", "errors"
INPUTS = "data", "estimate"


class Refined(NamedTuple):
    """The factors of one group of plates that are refined together, and the sizes of these plates in a call."""

    group: GroupNetwork
    names: tuple[Hashable, ...]
    plates: tuple[int, ...]  # sizes of all plate dims, 1 where there is none

    def joined(self, refinement: Mapping[Hashable, Tensor]) -> Tensor:
        """Returns a refinement as one tensor ``(*plates, params)``."""
        return torch.cat([refinement[name].flatten(-2) for name in self.names], -1)

    def split(self, joined: Tensor) -> Refinement:
        """Undoes `joined`."""
        shapes = {name: shape[-2:] for name, shape in self.shapes().items()}
        parts = joined.split([math.prod(shape) for shape in shapes.values()], -1)
        return {name: part.unflatten(-1, shapes[name]) for name, part in zip(shapes, parts)}

    def shapes(self) -> dict[Hashable, tuple[int, ...]]:
        """Returns the shape of each factor's refinement in the call, ``(*plates, elements, params)``."""
        factors = {factor.name: factor for factor in self.group.factors}
        return {
            n: (*self.plates, factors[n].num_elements, factors[n].num_params) for n in self.names
        }


class Updater(nn.Module):
    """One step of refinement of some factors: from an instance's estimate and features to its next estimate.

    The next estimate is g * estimate + (1 - g) * u, with g in (0, 1) and u from a perceptron whose output layer also
    reads its inputs. At first u is zero, and so is every estimate.

    Args:
        num_inputs, num_params: sizes for one instance.
        hidden_features: widths of the perceptron's layers.

    References:
        Marino, Yue and Mandt 2018, Iterative Amortized Inference.
    """

    def __init__(self, num_inputs: int, num_params: int, hidden_features: Sequence[int]) -> None:
        super().__init__()
        widths = [num_inputs, *hidden_features]
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in zip(widths, widths[1:])])
        self.out = nn.Linear(widths[-1] + num_inputs, 2 * num_params)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor]) -> Updater:
        """Returns one of the shapes of a state, as a module of Pyro's has it (parameters unconstrained)."""
        layers = sorted(key for key in state if key.startswith("layers.") and "weight" in key)
        hidden = [len(state[key]) for key in layers]
        rows, columns = state["out.weight_unconstrained"].shape
        return cls(columns - hidden[-1] if hidden else columns // 2, rows // 2, hidden)

    def forward(self, inputs: Tensor, estimate: Tensor) -> Tensor:
        """Returns the next estimate ``(*batch, params)``, from inputs ``(*batch, inputs)``."""
        hidden = inputs
        for layer in self.layers:
            hidden = F.elu(layer(hidden))
        candidate, gate = self.out(torch.cat([hidden, inputs], -1)).chunk(2, -1)
        return torch.lerp(candidate, estimate, gate.sigmoid())


def encoded(gradient: Tensor) -> Tensor:
    """Returns features of gradients ``(*batch, n)``: direction and signed log magnitudes, ``(*batch, 2 n)``.

    Gradients span orders of magnitude, over steps and instances. A layer norm shows where they point; that the last
    steps are to be small the logarithms say.
    """
    direction = gradient.sign()
    if gradient.shape[-1] > 1:
        direction = F.layer_norm(gradient, gradient.shape[-1:], eps=1e-12)
    return torch.cat([direction, gradient.sign() * gradient.abs().log1p()], -1)
