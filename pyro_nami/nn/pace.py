"""How fast parameters move: faster than the optimizer's rate while they go one way, at its rate once they fluctuate.

At a low rate most of a training is the way from where a factor starts to where it belongs, at a high one the noise in
the end. A parameter is multiplied by a *speed*, and divided by it where the speed changes, so that its product stays as
it is; a step of Adam then moves the product by rate times speed. The speed grows while steps agree in their direction,
up to sixteen and no further than steps of 0.05, and falls back to one when they do not. Change this module to train
faster or more steadily.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Pace"]

_EVERY = 4  # passes between two looks
_SHARE = 0.06  # of the latest look in the averages
_SLOWEST, _FASTEST = 0.1, 16.0
_LONGEST, _SHORTEST = 0.05, 0.002  # step that speeds lead to
_GROWTH = 1.25  # of a speed between two looks, at most


class Pace(nn.Module):
    """The speeds of some parameters.

    Args:
        like: a tensor of the shape of the parameters.

    Attributes:
        speed: by which each parameter is multiplied.
    """

    speed: Tensor
    _drift: Tensor
    _length: Tensor
    _last: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("speed", torch.ones_like(like))
        self.register_buffer("_drift", torch.zeros_like(like))
        self.register_buffer("_length", torch.zeros_like(like))
        self.register_buffer("_last", torch.zeros_like(like))
        self._looks = 0

    @torch.no_grad()
    def adapt(self, parameter: Tensor) -> bool:
        """Adapts the speed, and a parameter with it in place, after a step of the optimizer; whether it did."""
        factor = self.look(parameter)
        if factor is not None:
            parameter.mul_(factor)
        return factor is not None

    def get_extra_state(self) -> int:
        """Returns how often it looked."""
        return self._looks

    def set_extra_state(self, state: int) -> None:
        """Restores that."""
        self._looks = state

    def restart(self) -> None:
        """Forgets where the parameters were, as something else than the optimizer has moved them."""
        self._looks = 0

    @torch.no_grad()
    def look(self, now: Tensor) -> Tensor | None:
        """Returns what the parameters are to be multiplied by, as their speed has changed; None if it has not.

        Args:
            now: the parameters, after a step of the optimizer.
        """
        self._looks += 1
        if self._looks == 1:
            self._last = now.clone()
        if self._looks % _EVERY != 1 or self._looks == 1:
            return None
        step = (now - self._last) / _EVERY
        first = self._looks == _EVERY + 1
        self._drift = step if first else torch.lerp(self._drift, step, _SHARE)
        self._length = step.abs() if first else torch.lerp(self._length, step.abs(), _SHARE)
        agreement = (self._drift.abs() / self._length.clamp(min=1e-30)).clamp(max=1.0)
        length = self._length.clamp(min=1e-30)
        fastest = (_LONGEST / length).clamp(1.0, _FASTEST)
        slowest = (_SHORTEST / length).clamp(_SLOWEST, 1.0)
        lead = 2 * agreement - 1
        wanted = 1 + (fastest - 1) * lead.clamp(min=0.0).square()
        wanted = wanted * slowest ** (-lead).clamp(min=0.0)
        speed = torch.minimum(torch.maximum(wanted, self.speed / _GROWTH), self.speed * _GROWTH)
        factor = self.speed / speed
        self.speed = speed
        self._last = now * factor
        return factor
