"""Free offsets: what each instance of a plate adds to the parameters that the networks give it.

An amortized factor gives up a little on every instance, as its network has to serve them all. Where the data are the
same in every step, each instance also has numbers of its own, trained beside the network, so that the guide contains
the one that has nothing else (Pyro's ``AutoNormal``). Other data get none of them. Change this module to refine the
parameters of single instances otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_nami.networks.pace import Pace

__all__ = ["Offsets"]


class Offsets(PyroModule):
    """One offset for each instance, element and parameter of some factors, zero at first.

    Args:
        shapes: factor -> its plates with their batch dims and full sizes.
        units: factor -> what an offset is multiplied by, ``(elements, params)``.
        nesting: number of plate dims.
    """

    def __init__(
        self, shapes: Mapping[Any, Mapping[str, tuple[int, int]]], units: Mapping[Any, Tensor], nesting: int
    ) -> None:
        super().__init__()
        self._dims = {name: {plate: dim for plate, (dim, _) in plates.items()} for name, plates in shapes.items()}
        self._attributes = {name: (f"offset_{i}", f"unit_{i}") for i, name in enumerate(shapes)}
        for name, (offset, unit) in self._attributes.items():
            sizes = [1] * nesting
            for dim, size in shapes[name].values():
                sizes[dim] = size
            self.register_buffer(unit, units[name])
            zeros = units[name].new_zeros(*sizes, *units[name].shape)
            setattr(self, offset, PyroParam(zeros, constraints.real))
            setattr(self, f"{offset}_pace", Pace(zeros))

    def start(self, indices: Mapping[str, Tensor]) -> dict[Any, Tensor]:
        """Returns factor -> what is added to its parameters, ``(*plates, elements, params)``.

        Args:
            indices: subsampled plate -> its instances.
        """
        added = {}
        for name, (offset, unit) in self._attributes.items():
            value = getattr(self, offset)
            for plate, dim in self._dims[name].items():
                if plate in indices:
                    value = value.index_select(dim - 2, indices[plate].to(value.device))
            added[name] = value * getattr(self, unit)
        return added

    def quicken(self) -> None:
        """Adapts the speed of the offsets, after a step of the optimizer; see `Pace`."""
        for offset, _ in self._attributes.values():
            getattr(self, f"{offset}_pace").adapt(getattr(self, offset))
