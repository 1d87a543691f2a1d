"""Accelerated steps: longer than the optimizer's while its steps agree, and shorter once they do not.

At a low rate most of training is the way from the initial value to the optimum; at a high rate,
noise around the optimum. Gradients, and the state of the optimizer, are unchanged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["Pace"]

# steps between two looks at the speeds, which take their mean; over ten times as many, speeds lag behind training
LOOK_EVERY = 4
# weight of the latest look in the averages: these are over about 17 looks, and with ten times the weight over two
SHARE = 0.06
# largest speed, in units of the optimizer's step; the least is its inverse
MAX_SPEED = 16.0
# bounds of the step that a speed leads to, in units of the parameter, as a mean of `LOOK_EVERY` signed steps: longer
# ones are noise around the optimum, and shorter ones do not reach it
MIN_STEP = 0.002
MAX_STEP = 0.05
# largest factor of a speed between two looks: from 1 to 16 in 50 steps, with a tenth of the growth in 450
MAX_GROWTH = 1.25
# largest step of a patient parameter, in units of its usual ones: no draw from a heavy tail moves it further
MAX_BURST = 3.0
# by default, the step of a patient parameter while its steps do not agree
REST = MIN_STEP / 2


class Pace(nn.Module):
    """``parameter += (speed - 1) * step`` after each step of the optimizer, further along it or some of the way back.

    With d and l the running means of steps and of their lengths and ``lead = 2 |d| / l - 1``, a speed tends to
    ``1 + lead^2 (0.05 / l - 1)`` where steps agree in their direction (lead > 0), to ``(0.002 / l)^-lead`` where they
    do not, within 16 and 1/16: no further than steps of 0.05, no less far than steps of 0.002. A *patient* parameter
    goes by steps of ``rest`` until they agree, and by none much longer than those before: weights, as at a high rate
    what a row reads of others is noise for long, and one draw from a heavy tail would throw them all; and a bias that
    instances *share*, each adding to it. The latter goes no further than what they leave of a step of 0.05: two that
    move alike would else take twice the optimizer's step.

    Example:
        >>> parameter = torch.zeros(1)
        >>> pace = Pace(parameter)
        >>> for _ in range(200):  # steps of an optimizer, all one way
        ...     pace.adapt(parameter.add_(0.01))
        >>> pace.speed.round()  # 0.05 / 0.01
        tensor([5.])
    """

    speed: Tensor  # of each parameter, how far it goes in units of the optimizer's step
    patient: Tensor  # which of them go by short steps until these agree, boolean; none at first
    # to which of them others are added, one by one, that have speeds as well; likewise
    shared: Tensor
    _drift: Tensor
    _length: Tensor
    _moved: Tensor
    _last: Tensor

    def __init__(self, like: Tensor, rest: float = REST) -> None:
        super().__init__()
        self._rest = rest
        self.register_buffer("speed", torch.ones_like(like))
        for name in ("_drift", "_length", "_moved", "_last"):
            self.register_buffer(name, torch.zeros_like(like))
        for name in ("patient", "shared"):
            self.register_buffer(name, torch.zeros_like(like, dtype=torch.bool), persistent=False)
        self._steps = 0
        self._version = 0
        self._changes = math.inf

    @torch.no_grad()
    def adapt(self, parameter: Tensor) -> None:
        """Takes a parameter further along the optimizer's latest step or back, in place, and adapts its speed.

        What has been changed in place more often than by a step before was set by somebody, and is left as it is.
        """
        changes, known = parameter._version - self._version, self._changes
        self._changes = min(known, changes) if changes > 0 else known
        if self._steps and 0 <= changes <= known:
            step = parameter - self._last
            self._moved += step
            usual = (MAX_BURST * self.speed * self._length).clamp(min=self._rest)
            most = torch.where(self.patient | self.shared, usual, step.abs().clamp(min=MAX_STEP))
            parameter += (step * self.speed).clamp(-most, most) - step
            if self._steps % LOOK_EVERY == 0:
                self._look(self._moved / LOOK_EVERY)
                self._moved.zero_()
        self._last.copy_(parameter)
        self._steps += 1
        self._version = parameter._version

    def _look(self, step: Tensor) -> None:
        first = self._steps == LOOK_EVERY
        share = 1.0 if first else SHARE
        self._drift.lerp_(step, share)
        self._length.lerp_(step.abs(), share)
        length = self._length.clamp(min=1e-30)
        lead = 2 * (self._drift.abs() / length).clamp(max=1.0) - 1
        rest = torch.where(self.patient | self.shared, (self._rest / length).clamp(max=1.0), 1.0)
        fastest = torch.maximum(MAX_STEP / length - self.shared.to(step), rest).clamp(max=MAX_SPEED)
        slowest = (MIN_STEP / length).clamp(1 / MAX_SPEED, 1.0)
        wanted = torch.lerp(rest, fastest, lead.clamp(min=0.0).square()) * slowest ** (-lead).clamp(
            min=0.0
        )
        if first:
            self.speed.clamp_(max=rest)
        self.speed.copy_(wanted.clamp(self.speed / MAX_GROWTH, self.speed * MAX_GROWTH))

    def restart(self) -> None:
        """Forgets where the parameters were, as something else than the optimizer has moved them."""
        self._steps = 0
        self._moved.zero_()

    def get_extra_state(self) -> int:
        """Returns the number of steps so far."""
        return self._steps

    def set_extra_state(self, state: int) -> None:
        """Restores that."""
        self._steps = state
