"""`Mode`: which data a guide answers for. This is decided here alone.

A guide is *fixed* unless it is asked to be *amortized*. The `DataHistory` of its training steps
says when a fixed guide moves to another data set, and when the data turn out to be *minibatches*,
which happens once.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Hashable, Mapping

from torch import Tensor

__all__ = ["Change", "Data", "DataHistory", "Mode", "fingerprint"]

Data = Mapping[Hashable, str]  # node -> the fingerprint of its value


class Mode(enum.Enum):
    """What a guide answers for.

    Attributes:
        FIXED: the one data set that it is trained on, whatever arguments later calls have.
        MINIBATCHES: a data set of which each training step sees another part.
        AMORTIZED: the data of each call.
    """

    FIXED = "fixed"
    MINIBATCHES = "minibatches"
    AMORTIZED = "amortized"


class Change(enum.Enum):
    """What a training step says about the data of training."""

    NONE = enum.auto()  # they are the same
    VISIT = enum.auto()  # this step had others; it is to be seen whether these stay
    MOVED = enum.auto()  # others have come to stay
    MINIBATCHES = enum.auto()  # they differ from step to step


class DataHistory:
    """The data of the training steps of a fixed guide.

    Args:
        most_changes: changes between data sets that do not stay, after which data are minibatches; with 1, data of a
            warm-up would be taken for a minibatch.
        steps_to_stay: steps in a row on one data set, after which earlier changes are forgotten. They are more than
            the passes of one step, of which each particle makes one.

    Example:
        >>> history = DataHistory()
        >>> [history.step({"y": data}).name for data in "AABB"]
        ['NONE', 'NONE', 'VISIT', 'MOVED']
        >>> [history.step({"y": data}).name for data in "CD"]
        ['VISIT', 'MINIBATCHES']
    """

    def __init__(self, *, most_changes: int = 3, steps_to_stay: int = 100) -> None:
        self._most_changes, self._steps_to_stay = most_changes, steps_to_stay
        self.current: Data | None = None  # of training; None before the first step
        self.moving: frozenset[Hashable] = frozenset()  # nodes whose values differed between steps
        self._visited: Data | None = None  # of the latest step, where these were others
        self._changes, self._stay = 0, 0

    @property
    def is_trained(self) -> bool:
        """Whether there was a training step."""
        return self.current is not None

    def step(self, data: Data) -> Change:
        """Takes in the data of a step that a backward pass came back from."""
        latest = self._visited or self.current or data
        if data != latest:
            self.moving |= {
                node for node in data.keys() | latest.keys() if data.get(node) != latest.get(node)
            }
            self._changes, self._stay = self._changes + 1, 0
            if self._changes >= self._most_changes:
                return Change.MINIBATCHES
        self._stay += 1
        if self._stay >= self._steps_to_stay:
            self._changes = 0
        if self.current is not None and data not in (self.current, self._visited):
            self._visited = data
            return Change.VISIT
        change = Change.MOVED if data == self._visited else Change.NONE
        self.current, self._visited = data, None
        return change


def fingerprint(value: Tensor) -> str:
    """Returns a hash of a tensor's shape and values, the same in float32 as in float64, from which none can be read."""
    array = value.detach().to("cpu").float().contiguous().numpy()
    return hashlib.blake2b(array.tobytes() + repr(array.shape).encode(), digest_size=16).hexdigest()
