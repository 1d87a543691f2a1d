"""Distributions whose draws are scored along the path alone, which removes noise from the gradient of the ELBO.

The derivative of log q(z; parameters) by the parameters, at a fixed draw z of q, is zero on
average. Without it, the gradient has no noise once q is the posterior, at any number of particles.
Where q is much narrower than the posterior, as in the beginning, it cancels other noise. A share of
it is therefore left out, which past gradients decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.score_parts import ScoreParts
from torch import Tensor

__all__ = ["PathScored", "PathShare"]


class PathShare:
    """The share of the score to leave out, at which the gradient by a draw has the least noise.

    With a the gradient of all terms by the draw but that of its own density, b, which is zero on average, the noise of
    a + share b is least at share = -E[a b] / E[b b].

    Args:
        memory: share of the running averages that a step keeps; at 0.995 they lag behind training.

    Example:
        >>> share = PathShare()
        >>> float(share.now()), share.note(torch.tensor([-0.5, 1.0]), torch.tensor([1.0, -2.0])), float(share.now())
        (0.0, None, 0.5)
    """

    def __init__(self, *, memory: float = 0.95) -> None:
        self._memory = memory
        self._product, self._square = torch.zeros(()), torch.zeros(())

    def now(self) -> Tensor:
        """Returns the share, between 0 and 1; 0 at first."""
        share = torch.where(self._square > 0, -self._product / self._square, 0.0)
        return share.clamp(0, 1)

    def note(self, other: Tensor, own: Tensor) -> None:
        """Takes in gradients by a draw: of all other terms, and of its own density."""
        other, own = other.detach(), own.detach()
        product, square = (other * own).sum(), own.square().sum()
        finite = (product + square).isfinite()
        self._product, self._square = (
            torch.where(finite, self._memory * before.to(now) + now, before.to(now))
            for before, now in ((self._product, product), (self._square, square))
        )


class PathScored(TorchDistribution):
    """A distribution with learned parameters, whose draws ``Trace_ELBO`` may score along their path alone.

    Attributes:
        fixed: a function that makes the same distribution with detached parameters, and the share of the score to leave
            out. Where it is given, that share of a reparameterized draw's log density is taken from the detached
            distribution.

    References:
        Roeder, Wu and Duvenaud 2017, Sticking the Landing; Geffner and Domke 2018, Using large ensembles of control
        variates for variational inference.
    """

    fixed: tuple[Callable[[], Any], PathShare] | None = None

    def drawn(self, x: Tensor) -> Tensor | None:
        """Returns the elements that a value was made of, if it is the latest reparameterized draw; else None."""
        raise NotImplementedError

    def log_prob_drawn(self, x: Tensor, drawn: Tensor) -> Tensor:
        """Returns the log density in nats ``(*batch,)`` of a value, by the elements that it was made of."""
        raise NotImplementedError

    def score_parts(self, x: Tensor, *args: Any, **kwargs: Any) -> ScoreParts:
        """Returns the terms that ``Trace_ELBO`` differentiates at a value ``x``, in nats ``(*batch,)``."""
        drawn = self.drawn(x) if self.fixed is not None and self.has_rsample else None
        if self.fixed is None or drawn is None or not drawn.requires_grad or torch.jit.is_tracing():
            return super().score_parts(x, *args, **kwargs)
        make, share = self.fixed
        own = drawn.view_as(drawn)
        gradients: list[Tensor] = []
        own.register_hook(gradients.append)
        drawn.register_hook(
            lambda whole: share.note(whole - gradients[0], gradients.pop()) if gradients else None
        )
        log_prob = torch.lerp(
            self.log_prob_drawn(x, own), make().log_prob_drawn(x, own), share.now().to(own)
        )
        return ScoreParts(log_prob, 0, log_prob)  # type: ignore[arg-type]  # as Pyro's own
