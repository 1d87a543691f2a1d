"""`IterativeELBO`: trains all refinement steps of an iterative guide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pyro import poutine
from pyro.infer import ELBO
from relaxation import OuterELBO
from torch import Tensor

from refinement.iterative import AutoIterativeGuide

__all__ = ["IterativeELBO"]


class IterativeELBO(OuterELBO):
    """The ELBO of every step of an `AutoIterativeGuide`, averaged: what trains its networks to need few of them.

    Weights of guide and networks get the gradient of the average, parameters of the model that of the last step alone.
    The graph of an ELBO is freed before that of the next step is made; the graphs of the steps' networks are kept.
    `loss`, and so ``svi.evaluate_loss``, is that of the last step.

    Args:
        elbo: of one step, such as ``Trace_ELBO()`` or `RelaxedELBO`.
        average: over all steps, the first estimate included; otherwise the last step alone counts.

    Attributes:
        losses: the negative ELBO of each step in nats, from the first estimate on, of the latest gradient.

    Raises:
        NotImplementedError: for a model that draws the instances of a plate itself; give it minibatches, and use
            `pyro.poutine.scale`, or train with ``elbo`` itself.

    References:
        Marino, Yue and Mandt 2018, Iterative Amortized Inference, section 4.2.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> from pyro_nami import AutoNaMIGuide
        >>> def model(x):
        ...     with pyro.plate("n", len(x)):
        ...         pyro.sample("x", dist.Normal(pyro.sample("z", dist.LogNormal(0.0, 1.0)), 0.1), obs=x)
        >>> guide = AutoIterativeGuide(AutoNaMIGuide(model, exact=False), steps=2)
        >>> elbo = IterativeELBO(Trace_ELBO())
        >>> loss = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), elbo).step(torch.rand(3))
        >>> len(elbo.losses)
        3
    """

    def __init__(self, elbo: ELBO, average: bool = True) -> None:
        super().__init__(elbo)
        self.average = average
        self.losses: list[float] = []

    def loss_and_grads(self, model: Callable, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Returns the negative ELBO in nats, averaged over steps, and adds its gradient to that of each parameter."""
        if not isinstance(guide, AutoIterativeGuide):
            raise TypeError(
                f"Expected an AutoIterativeGuide; got {type(guide).__name__}. Use {self.elbo!r} itself."
            )
        trajectory = guide.trajectory(*args, **kwargs)
        if trajectory.call.indices:
            raise NotImplementedError(
                "Expected a model whose plates hold all their instances in a call, as all steps have to see the same; "
                f"got plates that draw some: {', '.join(map(repr, trajectory.call.indices))}. Give it minibatches."
            )
        estimates = trajectory.estimates if self.average else trajectory.estimates[-1:]
        own, steps = list(guide.parameters()), list[Tensor]()
        gradients: list[Tensor] = []
        self.losses = []
        for estimate in estimates:
            leaves = {name: value.detach().requires_grad_() for name, value in estimate.items()}
            tracer = poutine.trace(param_only=True)
            with tracer, guide.holding(trajectory.call, leaves):
                loss = self.elbo.differentiable_loss(model, guide, *args, **kwargs)
            self.losses.append(float(loss.detach()))
            inputs = [*own, *leaves.values()]
            last = estimate is estimates[-1]
            (loss / len(estimates)).backward(inputs=inputs, retain_graph=last)
            for name, leaf in leaves.items():
                if leaf.grad is not None and estimate[name].requires_grad:
                    steps.append(estimate[name])
                    gradients.append(leaf.grad)
        _backward_to_model(loss, tracer.trace, own)
        if steps:
            torch.autograd.backward(steps, gradients, inputs=own)
        return sum(self.losses) / len(self.losses)


def _backward_to_model(loss: Tensor, trace: Any, own: Sequence[Tensor]) -> None:
    """Adds the gradient of a loss to the parameters in a trace that are not the guide's own."""
    known = set(map(id, own))
    sites = [trace.nodes[name] for name in trace.param_nodes]
    leaves = [site["value"].unconstrained() for site in sites]
    others = [leaf for leaf in leaves if id(leaf) not in known and leaf.requires_grad]
    if others:
        loss.backward(inputs=others)
