"""`RelaxedELBO`: training through discrete latents by Gumbel-softmax draws, and the schedule of their temperature.

`gumbel_softmax` says which types are relaxed, and how.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gumbel_softmax import gumbel_softmax
from pyro.infer import (
    ELBO,
    JitTrace_ELBO,
    JitTraceEnum_ELBO,
    JitTraceGraph_ELBO,
    JitTraceMeanField_ELBO,
)
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_nami.messages import warn

__all__ = ["Drawn", "ExponentialDecay", "OuterELBO", "RelaxedELBO"]

_JIT = JitTrace_ELBO, JitTraceEnum_ELBO, JitTraceGraph_ELBO, JitTraceMeanField_ELBO


@dataclass(frozen=True)
class ExponentialDecay:
    """max(minimum, initial * exp(-rate * step)): a schedule of temperatures, say.

    Args:
        initial: value at step 0.
        minimum: value that is never passed, positive.
        rate: of the decay in a step, nonnegative.

    Example:
        >>> decay = ExponentialDecay.over(0.5, 0.2, steps=100)
        >>> [round(decay(step), 3) for step in (0, 50, 100, 1000)]
        [0.5, 0.316, 0.2, 0.2]
    """

    initial: float
    minimum: float
    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.initial < math.inf:
            raise ValueError(
                f"Expected 0 < minimum <= initial, finite; got {self.minimum} and {self.initial}"
            )
        if not 0 <= self.rate < math.inf:
            raise ValueError(f"Expected a finite rate of at least 0; got {self.rate}")

    @classmethod
    def over(cls, initial: float, minimum: float, steps: int) -> ExponentialDecay:
        """Returns the schedule that reaches ``minimum`` after a number of steps."""
        if steps < 1:
            raise ValueError(f"Expected at least one step; got {steps}")
        cls(initial, minimum, 0.0)  # which checks both
        return cls(initial, minimum, math.log(initial / minimum) / steps)

    def __call__(self, step: int) -> float:
        if step < 0:
            raise ValueError(f"Expected a step of at least 0; got {step}")
        return max(self.minimum, self.initial * math.exp(-self.rate * step))


class OuterELBO(ELBO):
    """An ELBO that differentiates another one, ``elbo``, in a way of its own; losses without gradients are its own."""

    def __init__(self, elbo: Any) -> None:
        if not isinstance(elbo, ELBO):
            raise TypeError(f"Expected an ELBO of Pyro's, an instance; got {elbo!r}")
        super().__init__(elbo.num_particles, vectorize_particles=elbo.vectorize_particles)
        self.elbo: Any = elbo

    def loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> Any:
        """Returns an estimate of the negative ELBO in nats, as ``elbo`` does."""
        return self.elbo.loss(model, guide, *args, **kwargs)

    def _get_trace(self, *args: Any) -> Any:
        return self.elbo._get_trace(*args)


class RelaxedELBO(OuterELBO):
    """An ELBO with gradients through Gumbel-softmax draws of the guide's binary and one-hot latents.

    In `loss_and_grads` and `differentiable_loss` every Bernoulli or OneHotCategorical draw of the guide is a
    reparametrized one in (0, 1), which the model gets as it is: write the model such that it can take it. Densities of
    guide and model are the discrete types' own, linear in the draw. The gradient has a bias, smaller at lower
    temperatures, and a variance that grows as they fall. `loss`, and so ``svi.evaluate_loss``, draws true discrete
    values; it estimates the ELBO itself without bias, with as many particles as ``elbo`` has.

    Left alone are latents that are observed, continuous, enumerated, integer (Categorical), or drawn from an exact
    conditional by enumeration, whose draws need no gradient.

    Args:
        elbo: the ELBO to differentiate, such as ``Trace_ELBO(num_particles=10, vectorize_particles=True)``. With
            ``TraceMeanField_ELBO`` KL divergences of hand-written guides are those of the discrete types, in closed
            form, and less biased.
        temperature: a positive number, or a function of the number of steps done. By default from 0.5 to 0.2 in 1,000
            steps.

    Attributes:
        step: how many gradients were computed so far; `state_dict` holds it.

    Raises:
        NotImplementedError: for compiled ELBOs, which would keep the temperature of their first step.

    References:
        Jang, Gu and Poole 2017, Categorical Reparameterization with Gumbel-Softmax; the temperatures are those of Yan,
        Ailem and Sha 2019, Amortized Inference of Variational Bounds for Learning Noisy-OR, section 4.1.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> def model():
        ...     z = pyro.sample("z", dist.Bernoulli(0.3))
        ...     pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(2.0))
        >>> def guide():
        ...     pyro.sample("z", dist.Bernoulli(logits=pyro.param("logit", torch.tensor(0.0))))
        >>> elbo = RelaxedELBO(Trace_ELBO(num_particles=10, vectorize_particles=True))
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), elbo)
        >>> losses = [svi.step() for _ in range(5)]
        >>> elbo.step, round(elbo.temperature, 4)
        (5, 0.4977)
    """

    def __init__(
        self,
        elbo: ELBO,
        temperature: float | Callable[[int], float] = ExponentialDecay.over(0.5, 0.2, 1000),
    ) -> None:
        super().__init__(elbo)
        if isinstance(elbo, _JIT):
            raise NotImplementedError(
                f"Expected an ELBO that is not compiled; got {type(elbo).__name__}, which would keep the temperature "
                f"of its first step for good. Use {type(elbo).__name__.removeprefix('Jit')}."
            )
        self.step = 0
        self._schedule, self._warned = temperature, False
        self.temperature  # noqa: B018  # which checks it

    @property
    def temperature(self) -> float:
        """The temperature of the next gradient."""
        now = float(self._schedule(self.step) if callable(self._schedule) else self._schedule)
        if not 0 < now < math.inf:
            raise ValueError(
                f"Expected a positive, finite temperature; got {now} at step {self.step}"
            )
        return now

    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> Any:
        """Returns the negative ELBO in nats at relaxed draws, and adds its gradient to that of each parameter."""
        return self._relaxed("loss_and_grads", model, guide, args, kwargs)

    def differentiable_loss(
        self, model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Returns the negative ELBO in nats at relaxed draws, with gradients; a step unless these are disabled."""
        return self._relaxed("differentiable_loss", model, guide, args, kwargs)  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, int]:
        """Returns the state by which `load_state_dict` goes on at the same temperature."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on at the step of a `state_dict`."""
        self.step = int(state["step"])

    def _relaxed(
        self, what: str, model: Callable, guide: Callable, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        drawn = Drawn(self.temperature)
        loss = getattr(self.elbo, what)(_Scored(drawn)(model), drawn(guide), *args, **kwargs)
        self.step += torch.is_grad_enabled()
        if not drawn.names and not self._warned:
            self._warned = True
            warn(
                "No draw of the guide was relaxed: none is Bernoulli or OneHotCategorical, without exact conditional "
                "or enumeration. Gradients are those of the plain ELBO, which can do without RelaxedELBO."
            )
        return loss


class Drawn(Messenger):
    """Relaxes a guide's discrete draws, and keeps the names of the sites that it relaxed."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.names: set[str] = set()

    def _pyro_sample(self, msg: Any) -> None:
        drawn = (
            not msg["is_observed"] and msg["value"] is None and not msg["infer"].get("enumerate")
        )
        if not drawn or getattr(msg["fn"], "has_rsample", True):
            return
        fn = gumbel_softmax(msg["fn"], self.temperature)
        if fn is not None:
            msg["fn"] = fn
            self.names.add(msg["name"])


class _Scored(Messenger):
    """Lets a model score the relaxed draws of a guide by densities that are linear in them."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self._drawn = drawn

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] or msg["name"] not in self._drawn.names:
            return
        fn = gumbel_softmax(msg["fn"], self._drawn.temperature)
        if fn is None:
            raise NotImplementedError(
                f"Expected site '{msg['name']}' to be Bernoulli or OneHotCategorical in the model, as in the guide, "
                f"to be scored at a relaxed draw; got {type(msg['fn']).__name__}. Give both one type."
            )
        msg["fn"] = fn
