"""Network inputs standardized by running averages over training.

An input that is the same in every step becomes zero: what a network makes of it is left to its
biases, and trains as a constant does. An input that varies little, as a latent with a narrow
posterior does, varies by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Running", "center_and_spread", "tempered"]


def center_and_spread(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the median of each column of ``(rows, columns)``, and half the width of its central 68%.

    Where that is no width, as of a column that is mostly one number, it is the standard deviation.

    Example:
        >>> center_and_spread(torch.arange(101.0).unsqueeze(-1))
        (tensor([50.]), tensor([34.]))
    """
    quantiles = np.quantile(rows.numpy(force=True), [0.16, 0.5, 0.84], axis=0)
    low, center, high = torch.as_tensor(quantiles).to(rows)
    spread = (high - low) / 2
    flat = ~(spread > 1e-6 * center.abs()) | ~spread.isfinite()
    return center, torch.where(flat, rows.std(0), spread)


class Running(nn.Module):
    """``tempered((x - center) / scale)``, with mean and standard deviation of what was read as running averages.

    They stay 0 and 1 unless `settle` or `update` is called.

    Args:
        floor: the least scale of each input, ``(inputs,)``.
        follows: whether an input's center and scale follow what is read, boolean ``(inputs,)``.
        min_share: least weight of a new value in the averages: they are means of all values, later of about the
            latest 1 / min_share.
        update_every: passes from one update to the next, once the averages have settled; each takes time.

    Example:
        >>> running = Running(floor=torch.zeros(1), follows=torch.ones(1).bool())
        >>> running.settle(torch.tensor([[3.0], [5.0]]), 0, 1)
        >>> running(torch.tensor([[6.0]]), 0, 1)  # (6 - 4) / 1
        tensor([[2.]])
    """

    center: Tensor
    scale: Tensor
    variance: Tensor
    floor: Tensor
    follows: Tensor

    def __init__(
        self, floor: Tensor, follows: Tensor, *, min_share: float = 0.05, update_every: int = 8
    ) -> None:
        super().__init__()
        self._min_share, self._update_every = min_share, update_every
        for name, value in (("center", 0.0), ("scale", 1.0), ("variance", 1.0)):
            self.register_buffer(name, torch.full_like(floor, value))
        self.register_buffer("floor", floor, persistent=False)
        self.register_buffer("follows", follows, persistent=False)
        # passes in training; whether inputs that are data are centered
        self.passes, self.settled = 0, False

    def forward(self, x: Tensor, first: int, last: int) -> Tensor:
        """Returns inputs ``first`` to ``last - 1``, ``(*batch, inputs)``, in these units and tempered."""
        return tempered((x - self.center[first:last]) / self.scale[first:last])

    @property
    def share(self) -> float:
        """Weight of a new value in the averages."""
        return max(1 / (2 + self.passes), self._min_share)

    @property
    def due(self) -> bool:
        """Whether the coming pass shall update the averages: every pass at first, one of several later."""
        return self.share > self._min_share or self.passes % self._update_every == 0

    @torch.no_grad()
    def settle(self, x: Tensor, first: int, last: int) -> None:
        """Centers inputs ``first`` to ``last - 1`` on their present mean."""
        self._replace("center", slice(first, last), x.reshape(-1, x.shape[-1]).mean(0))

    @torch.no_grad()
    def update(self, x: Tensor, first: int, last: int) -> None:
        """Takes inputs ``first`` to ``last - 1`` of a pass into the averages."""
        part, share = slice(first, last), self.share
        x = x.reshape(-1, x.shape[-1])
        off = x.mean(0) - self.center[part]
        seen = x.var(0, correction=0) + (1 - share) * off.square()
        variance = self.variance[part].lerp(seen, share)
        scale = torch.maximum(variance.sqrt(), self.floor[part])
        center = self.center[part] + share * off
        for name, value in (("center", center), ("variance", variance), ("scale", scale)):
            self._replace(name, part, value.where(self.follows[part], getattr(self, name)[part]))

    def _replace(self, name: str, part: slice, value: Tensor) -> None:
        """Sets a part of a buffer, in a copy, as a backward pass under way may need the old tensor."""
        whole = getattr(self, name).clone()
        whole[part] = value
        setattr(self, name, whole)

    def get_extra_state(self) -> list[int]:
        """Returns ``passes`` and ``settled``, as plain numbers."""
        return [self.passes, int(self.settled)]

    def set_extra_state(self, state: Sequence[int]) -> None:
        """Restores ``passes`` and ``settled``."""
        self.passes, self.settled = state[0], bool(state[1])


def tempered(features: Tensor, *, linear: float = 10.0) -> Tensor:
    """Returns features of order one as they are up to the size ``linear``, and beyond as fast as a logarithm grows.

    A heavy-tailed model simulates data thousands of its usual spreads away, and one of them would throw every weight.

    Example:
        >>> tempered(torch.tensor([-2.0, 10.0, 1e6])).round()
        tensor([-2., 10., 25.])
    """
    inside = features.clamp(-linear, linear)
    return inside + (features - inside).asinh()
