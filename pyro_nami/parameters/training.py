"""What training keeps beside weights: counts of passes, averages, speeds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from pyro.nn import PyroModule
from torch import Tensor

from pyro_nami.networks.pace import Pace
from pyro_nami.parameters.backward import Backward
from pyro_nami.parameters.free_parameters import FreeParameters
from pyro_nami.parameters.group_network import GroupNetwork

__all__ = ["TrainedNetworks", "TrainingRecord"]


class TrainingRecord(NamedTuple):
    """The values of one pass in training by which averages are updated."""

    # group, first column, last column + 1, values
    inputs: list[tuple[GroupNetwork, int, int, Tensor]]
    # factor -> its elements ``(*batch, elements)`` relative to the anchor
    innovations: dict[Hashable, Tensor]


class TrainedNetworks(PyroModule):
    """Networks of groups of factors, with what training keeps beside their weights.

    Args:
        groups: of the factors.
        simulated: whether the guide is trained on simulations rather than on data.
        like: an empty tensor of dtype and device of the weights.
    """

    like: Tensor  # the model's values may have another dtype or device
    offsets: FreeParameters
    couplings: FreeParameters

    def __init__(self, groups: Sequence[GroupNetwork], simulated: bool, like: Tensor) -> None:
        super().__init__()
        self.groups = tuple(groups)
        self.simulated = simulated
        self.backward = Backward()  # from the current call
        self.passes = 0  # that gradients came back from
        self._stepped = False  # whether gradients came back since the speeds were adapted
        self.register_buffer("like", like, persistent=False)

    @property
    def settled(self) -> bool:
        """Whether inputs that are data are centered already."""
        return self.simulated or all(group.running.settled for group in self.groups)

    def renew(self) -> None:
        """Begins anew with other data: inputs are centered on those of the coming pass, and speeds are found again."""
        for group in self.groups:
            group.running.settled = False
        for module in self.modules():
            if isinstance(module, Pace):
                module.restart()
                module.speed.fill_(1.0)

    def count(self, value: Tensor) -> None:
        """Counts a pass once a gradient comes back to a value that all losses of it depend on."""
        if value.requires_grad and not torch.jit.is_tracing():  # no Python runs in what is compiled
            value.register_hook(self._count)
            self.backward.watch(value)

    def _count(self, gradient: Tensor) -> None:
        self.passes += 1

    @torch.no_grad()  # as a hook may run with gradients on
    def learn(self, record: TrainingRecord | None, gradient: Tensor) -> None:
        """Updates averages by a pass from which a gradient has come back; a hook of the networks' first rows."""
        if record is not None:
            for group, first, last, x in record.inputs:
                group.running.update(x, first, last)
            for group in self.groups:
                if not record.innovations.keys().isdisjoint(group.places):
                    group.learn(record.innovations)
            record.inputs.clear()
            record.innovations.clear()
        self._stepped = True
        for group in self.groups:
            group.running.passes += 1

    def quicken(self) -> None:
        """Adapts the speeds of parameters, if the optimizer may have taken a step since; see `networks.Pace`."""
        if self._stepped:
            self._stepped = False
            networks = (mlp for group in self.groups for mlp in group.networks)
            for part in (*networks, self.offsets, self.couplings):
                part.quicken()

    def get_extra_state(self) -> list[int]:
        """Returns the number of passes, and whether speeds are to be looked at."""
        return [self.passes, int(self._stepped)]

    def set_extra_state(self, state: Sequence[int]) -> None:
        self.passes, self._stepped = state[0], bool(state[1])
