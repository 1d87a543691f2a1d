"""The processes that train one guide together: gradients are averaged by `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import pyro
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Processes"]

T = TypeVar("T")


class Processes:
    """The processes of the `DistributedDataParallel` in a module; without one, this process alone.

    Every method must be called by all of them. Tensors that pass between them are on ``device``.

    Attributes:
        rank, size: number of this process, from 0, and how many there are.
        first: whether this process is the one that speaks for all.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self.rank = 0
        self.size = 1
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):
                self.group: Any = part.process_group
                self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
                break
        self.first = self.rank == 0

    def sum(self, values: Iterable[float]) -> list[float]:
        """Returns the sums of numbers over the processes."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.group)
        return total.tolist()

    def mean(self, value: float) -> float:
        """Returns the mean of a number over the processes, the same to the bit in all."""
        return self.sum([value])[0] / self.size

    def any(self, value: bool) -> bool:
        """Returns whether something holds in any of the processes."""
        return self.sum([value])[0] > 0

    def gather(self, value: T) -> list[T]:
        """Returns the values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def of_first(self, value: T) -> T:
        """Returns the value of the first process."""
        return self.gather(value)[0]

    def part(self) -> None:
        """Seeds every process but the first anew, by a number that the first draws: scripts seed all alike."""
        if self.size > 1:
            seed = self.of_first(int(torch.randint(2**31, ())))
            if not self.first:
                pyro.set_rng_seed(seed + self.rank)
