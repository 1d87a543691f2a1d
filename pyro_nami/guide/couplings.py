"""How the elements of a vector, or the instances of a block, depend on each other where that is linear.

One lower triangular matrix a factor, which no data change: what the data say is in locations and scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_nami.networks.pace import Pace

__all__ = ["MOST_COUPLED", "Couplings"]

MOST_COUPLED = 1024  # elements
_BASE = 0.5  # elements before it that a row may read before its weights are divided


class Couplings(PyroModule):
    """The matrix of each of some factors, zero at first; see `pyro_nami.factors.normals.CoupledElements`.

    Args:
        sizes: factor -> its number of elements.
        like: a tensor of their dtype and device.
    """

    def __init__(self, sizes: Mapping[Any, int], like: Tensor) -> None:
        super().__init__()
        self._attributes = {name: (f"coupling_{i}", f"share_{i}") for i, name in enumerate(sizes)}
        for name, (coupling, share) in self._attributes.items():
            size = sizes[name]
            before = torch.arange(size, device=like.device).to(like).clamp(min=_BASE) / _BASE
            lower = torch.ones(size, size, dtype=like.dtype, device=like.device).tril(-1)
            self.register_buffer(share, lower / before.unsqueeze(-1), persistent=False)
            setattr(self, coupling, PyroParam(torch.zeros_like(lower), constraints.real))
            setattr(self, f"{coupling}_pace", Pace(lower))

    def start(self) -> dict[Any, Tensor]:
        """Returns factor -> its matrix, ``(elements, elements)``."""
        return {
            name: getattr(self, coupling) * getattr(self, share)
            for name, (coupling, share) in self._attributes.items()
        }

    def quicken(self) -> None:
        """Adapts the speed of the matrices, after a step of the optimizer; see `Pace`."""
        for coupling, _ in self._attributes.values():
            getattr(self, f"{coupling}_pace").adapt(getattr(self, coupling))
