"""Free parameters of a factor, beside its networks, which do not depend on data.

*Offsets* are added to the parameters that networks give, for each instance of a plate. An amortized
factor loses a little on every instance, as one network serves them all. Where data are the same in
every step, each instance is also trained by itself, so the guide contains Pyro's ``AutoNormal``.
For other data there are no offsets.

*Couplings* say how the elements of a vector, or the instances of a block, depend on each other
linearly: one lower triangular matrix for each factor (`pyro_nami.factors.normals.LinearMap`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_nami.networks.pace import Pace
from pyro_nami.program.memory import rows_in_memory

__all__ = ["MOST_COUPLED", "FreeParameters", "coupling_units"]

# elements that a linear map couples: its weights, as many as these squared, come with a gradient and two averages
MOST_COUPLED = math.isqrt(rows_in_memory(4))


class FreeParameters(PyroModule):
    """A tensor ``units * parameter`` for each of some factors, zero at first.

    Args:
        kind: prefix of the parameters' names.
        units: factor -> the units of its parameters; ``persistent`` says whether they belong to the state.
        plates: factor -> plates, with batch dims and full sizes, of which each instance has parameters of its own.
        nesting: number of plate dims.
        rest: step of parameters until steps agree, see `Pace`; by default the optimizer's own steps.

    Example:
        >>> offsets = FreeParameters("offset", {"z": torch.ones(1, 2)}, {"z": {"rows": (-1, 5)}}, nesting=1)
        >>> offsets.start({"rows": torch.tensor([4, 0])})["z"].shape
        torch.Size([2, 1, 2])
    """

    def __init__(
        self,
        kind: str,
        units: Mapping[Any, Tensor],
        plates: Mapping[Any, Mapping[str, tuple[int, int]]] | None = None,
        nesting: int = 0,
        persistent: bool = False,
        rest: float | None = None,
    ) -> None:
        super().__init__()
        self._plates = plates or {}
        self._names = {factor: (f"{kind}_{i}", f"unit_{i}") for i, factor in enumerate(units)}
        for factor, (name, unit) in self._names.items():
            sizes = [1] * nesting
            for dim, size in self._plates.get(factor, {}).values():
                sizes[dim] = size
            self.register_buffer(unit, units[factor], persistent=persistent)
            zeros = units[factor].new_zeros(*sizes, *units[factor].shape)
            setattr(self, name, PyroParam(zeros, constraints.real))
            pace = Pace(zeros, rest or 0.0)
            pace.patient.fill_(rest is not None)
            setattr(self, f"{name}_pace", pace)

    def start(self, indices: Mapping[str, Tensor] | None = None) -> dict[Any, Tensor]:
        """Returns factor -> its tensor, ``(*plates, *shape of units)``; ``indices`` are those of subsampled plates."""
        found = {}
        for factor, (name, unit) in self._names.items():
            value = getattr(self, name)
            for plate, (dim, _) in self._plates.get(factor, {}).items():
                if indices and plate in indices:
                    # `dim` is counted without the dims of the units
                    value = value.index_select(
                        dim - getattr(self, unit).dim(), indices[plate].to(value.device)
                    )
            found[factor] = value * getattr(self, unit)
        return found

    def quicken(self) -> None:
        """Adapts the speed of the parameters, after a step of the optimizer; see `Pace`."""
        for name, _ in self._names.values():
            getattr(self, f"{name}_pace").adapt(getattr(self, name))


def coupling_units(size: int, like: Tensor, *, base: float = 0.5) -> Tensor:
    """Returns the units of a coupling, ``(size, size)``: zero but below the diagonal, less in rows that read more.

    A row that reads n elements has units of 1 / max(1, n / base), as of `networks.Base`.
    """
    divisor = (torch.arange(size).to(like) / base).clamp(min=1)
    return like.new_ones(size, size).tril(-1) / divisor.unsqueeze(-1)
