"""A simulator that is no Pyro model, as one: a vector of latents with a prior, and data that can be drawn alone.

Change this module when more can be known of such a simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor
from torch.distributions import Distribution

__all__ = ["Simulated", "SimulatorModel", "from_simulator"]


class Simulated(TorchDistribution):
    """What a simulator makes of parameters ``(*batch, *event)``: draws ``(*batch, *shape)``, and no density."""

    arg_constraints: dict = {}
    has_rsample = False

    def __init__(self, simulator: Callable[[Tensor], Any], theta: Tensor, ndims: int, shape: torch.Size) -> None:
        self.simulator, self.theta, self._ndims = simulator, theta, ndims
        super().__init__(theta.shape[: theta.dim() - ndims], shape, validate_args=False)

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    def expand(self, batch_shape: Any, _instance: Any = None) -> Simulated:
        theta = self.theta.expand(torch.Size(batch_shape) + self.theta.shape[self.theta.dim() - self._ndims :])
        return Simulated(self.simulator, theta, self._ndims, self.event_shape)

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        wide = self.expand(torch.Size(sample_shape) + self.batch_shape)
        rows = wide.theta.reshape((-1,) + wide.theta.shape[wide.theta.dim() - self._ndims :])
        return _simulated(self.simulator, rows).reshape(wide.batch_shape + self.event_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        raise NotImplementedError(
            "Expected a density of the data; that of a simulator's site 'x' is not known, so draws cannot be weighted. "
            "Write the simulator as a Pyro model if its steps have densities."
        )


class SimulatorModel:
    """The model of `from_simulator`: sites ``theta``, and ``x`` to be observed.

    Attributes:
        weighted: whether the data count; without, the model is the prior alone.
    """

    def __init__(
        self, prior: Distribution, simulator: Callable[[Tensor], Any], shape: torch.Size, weighted: bool = True
    ) -> None:
        self.prior, self.simulator, self.shape, self.weighted = prior, simulator, shape, weighted

    def __call__(self) -> Tensor:
        prior: Any = self.prior
        theta = pyro.sample("theta", prior)
        fn = Simulated(self.simulator, theta, len(prior.event_shape), self.shape)
        return pyro.sample("x", fn if self.weighted else fn.mask(False))

    def without_data(self) -> SimulatorModel:
        """Returns the model whose data have no density, so none is asked for."""
        return SimulatorModel(self.prior, self.simulator, self.shape, weighted=False)


def from_simulator(prior: Distribution, simulator: Callable[[Tensor], Any]) -> SimulatorModel:
    """Returns a simulator as a Pyro model: ``theta`` from the prior, and ``x`` from the simulator at it.

    A guide for it is compiled as for any model: ``amortize(from_simulator(prior, simulator), observed=["x"])``. As the
    density of its data is not known, draws have no weights, and there is no evidence; a model that is written with
    Pyro's distributions has both.

    Args:
        prior: of one draw of the parameters, with batch shape ``()``: ``Uniform(low, high).to_event(1)``, say.
        simulator: from parameters ``(rows, *event)`` to data ``(rows, *shape)``, numbers of any dtype.

    Raises:
        ValueError: a prior with batch dims; data that do not have the rows of the parameters, or no numbers.

    Example:
        >>> import pyro.distributions as dist
        >>> prior = dist.Normal(torch.zeros(2), 1.0).to_event(1)
        >>> model = from_simulator(prior, lambda theta: theta + 0.1 * torch.randn_like(theta))
        >>> model().shape
        torch.Size([2])
    """
    if prior.batch_shape:
        raise ValueError(
            f"Expected a prior of one draw, of batch shape (); got {tuple(prior.batch_shape)}. Use "
            f"prior.to_event({len(prior.batch_shape)}) or torch.distributions.Independent."
        )
    with torch.random.fork_rng():
        shape = _simulated(simulator, prior.sample((2,))).shape[1:]
    return SimulatorModel(prior, simulator, shape)


def _simulated(simulator: Callable[[Tensor], Any], theta: Tensor) -> Tensor:
    """Returns data ``(rows, *shape)`` of parameters ``(rows, *event)``, as floating-point numbers."""
    x = torch.as_tensor(simulator(theta), device=theta.device)
    if x.dim() == 0 or len(x) != len(theta):
        raise ValueError(
            f"Expected the simulator to return one row of data for each of {len(theta)} rows of parameters; got shape "
            f"{tuple(x.shape)}."
        )
    return x.to(theta.dtype)
