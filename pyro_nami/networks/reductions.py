"""Sums and maxima over sets of instances along a batch dim: all of them one set, or sets given by an index.

Set encoders leave everything that concerns sets to a reduction. `Along` takes a whole plate as one
set. `Segments` takes an index that says which set each instance belongs to, as rows of a table
belong to groups. Instances ``(*batch, features)`` become sets ``(*sets, features)``, with
derivatives of any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Along", "Reduction", "Segments"]


class Along:
    """All instances along a batch dimension form one set; results have size 1 there.

    Args:
        dim: the batch dimension, negative and counted without the dimension of features; -1 is the last.

    Example:
        >>> Along(-1).sum(torch.tensor([[1.0], [3.0], [5.0]]))
        tensor([[9.]])
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.axis = dim - 1

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum over each set; zeros for an empty one."""
        return x.sum(self.axis, keepdim=True)

    def mean(self, x: Tensor) -> Tensor:
        """Returns the mean over each set; zeros for an empty one."""
        return self.sum(x) / max(x.shape[self.axis], 1)

    def amax(self, x: Tensor) -> Tensor:
        """Returns the maximum over each set; zeros for an empty one."""
        return x.amax(self.axis, keepdim=True) if x.shape[self.axis] else self.sum(x)

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns sums of outer products, ``(*batch, m, n, sets)``, of ``(*batch, m | n, instances)``."""
        return (left @ right.mT).unsqueeze(-1)

    def gather(self, z: Tensor) -> Tensor:
        """Returns for each instance what ``z`` holds for its set, broadcastable to the instances."""
        return z

    def count(self, x: Tensor) -> Tensor:
        """Returns the number of instances of each set, of shape ``(1,)``."""
        return x.new_full((1,), x.shape[self.axis])


class Segments(Along):
    """Instance n along a batch dimension belongs to set ``index[n]``; results have ``num_segments`` there.

    Instances of size 1 along the dimension stand for one copy an instance. Sets without instances are empty.

    Example:
        >>> Segments(torch.tensor([0, 2, 0]), 3, -1).sum(torch.tensor([[1.0], [3.0], [5.0]]))
        tensor([[6.],
                [0.],
                [3.]])
    """

    def __init__(self, index: Tensor, num_segments: int, dim: int) -> None:
        with torch.inference_mode(False):  # a call in training may use it again
            # what is made of it is kept, whatever is written to it
            self.index = index.to(torch.long, copy=True)
            sizes = torch.bincount(self.index, minlength=num_segments)
        super().__init__(dim)
        self.num_segments = num_segments
        self._sizes = sizes.view(-1, *(1,) * (-self.axis - 1))

    def sum(self, x: Tensor) -> Tensor:
        return self._sum(self._instances(x, self.axis), self.axis)

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) * self.count(x).clamp(min=1).reciprocal()

    def amax(self, x: Tensor) -> Tensor:
        x = self._instances(x, self.axis)
        index = self.index.view(-1, *(1,) * (-self.axis - 1)).expand(x.shape)
        zeros = x.new_zeros(_resized(x, self.axis, self.num_segments))
        return zeros.scatter_reduce(self.axis, index, x, "amax", include_self=False)

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = self._instances(left, -1), self._instances(right, -1)
        return self._sum(left.unsqueeze(-2) * right.unsqueeze(-3), -1)

    def gather(self, z: Tensor) -> Tensor:
        if z.shape[self.axis] != self.num_segments:
            z = z.expand(_resized(z, self.axis, self.num_segments))
        return z.index_select(self.axis, self.index)

    def count(self, x: Tensor) -> Tensor:
        """Returns the number of instances of each set, ``(num_segments, ..., 1)`` with the dims from ``dim`` on."""
        return self._sizes.to(x.dtype)

    def _sum(self, x: Tensor, axis: int) -> Tensor:
        return x.new_zeros(_resized(x, axis, self.num_segments)).index_add(axis, self.index, x)

    def _instances(self, x: Tensor, axis: int) -> Tensor:
        """Returns x with the size of the index along an axis."""
        if x.shape[axis] == len(self.index):
            return x
        if x.shape[axis] != 1:
            raise ValueError(
                f"Expected size {len(self.index)} along dim {self.dim}, that of the index; got {x.shape[axis]}."
            )
        return x.expand(_resized(x, axis, len(self.index)))


Reduction = Along


def _resized(x: Tensor, axis: int, size: int) -> torch.Size:
    """Returns the shape of x with another size along an axis."""
    return x.shape[:axis] + (size,) + x.shape[axis:][1:]
