"""The cost of computations as a count of tensor elements, which unlike a time is reproducible."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyro_nami.inference.importance import Proposal

__all__ = ["Count", "elements_of_a_draw"]


class Count(TorchDispatchMode):
    """Counts tensor operations, and the elements that they compute."""

    elements = 0
    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.operations += 1
        self.elements += sum(
            each.numel() for each in tree_leaves(found) if isinstance(each, Tensor)
        )
        return found


def elements_of_a_draw(proposal: Proposal) -> float:
    """Returns how many tensor elements one more draw for one data set, with its weight, takes to compute."""
    counts = []
    for num in (1, 2):
        with Count() as count:
            proposal.at_once(num)
        counts.append(count.elements)
    return max(1.0, (counts[1] - counts[0]) / (proposal.target.data.num or 1))
