"""Models whose data can be drawn but have no density: simulators that are no Pyro models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution, constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Distribution, Independent, TransformedDistribution

from pyro_nami.factors.wrappers import base_of
from pyro_nami.inference.site_messages import Sites, plate_nesting
from pyro_nami.program.distribution_parts import arguments_of
from pyro_nami.program.first_run import is_delta
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.plate_dims import own_dims

__all__ = ["Simulated", "SimulatorModel", "from_simulator", "with_drawn_data"]

_BY_ROWS = "One that takes one row is called by lambda theta: torch.stack([simulate(row) for row in theta])."


class Simulated(TorchDistribution):
    """A simulator's data ``(*batch, *shape)`` given parameters ``(*batch, *event)``: a distribution without density."""

    arg_constraints: dict = {}
    has_rsample = False

    def __init__(
        self, simulator: Callable[[Tensor], Any], theta: Tensor, ndims: int, shape: torch.Size
    ) -> None:
        self.simulator = simulator
        self.theta = theta
        self._ndims = ndims
        super().__init__(theta.shape[: theta.dim() - ndims], shape, validate_args=False)

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    def expand(self, batch_shape: Any, _instance: Any = None) -> Simulated:
        event = self.theta.shape[len(self.batch_shape) :]
        theta = self.theta.expand(torch.Size(batch_shape) + event)
        return Simulated(self.simulator, theta, self._ndims, self.event_shape)

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        wide = self.expand(torch.Size(sample_shape) + self.batch_shape)
        batch = wide.batch_shape
        rows = wide.theta.reshape((-1,) + wide.theta.shape[len(batch) :])
        return _simulated(self.simulator, rows).reshape(batch + self.event_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        raise NotImplementedError(
            "Expected a density of the data; that of what a simulator makes is not known, so draws cannot be weighted. "
            "Write the simulator with Pyro's distributions if its steps have densities."
        )


class SimulatorModel(Messenger):
    """A model some of whose data can be drawn, but have no density.

    It is the handler of its own runs, which turns values at the sites of data into draws.

    Args:
        model: any; where it has values at the sites of data, a `pyro.deterministic` or a `Delta`, they become draws.
        data: site -> number of event dims.
        weighted: whether the data are part of the density that is asked for.
    """

    def __init__(self, model: Callable, data: Mapping[str, int], weighted: bool = True) -> None:
        super().__init__()
        self.model = model
        self.data = data
        self.weighted = weighted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self:
            return self.model(*args, **kwargs)

    def without_data(self) -> SimulatorModel:
        """Returns the model whose data have no density, so none is asked for."""
        return SimulatorModel(self.model, self.data, weighted=False)

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] not in self.data:
            return
        if not isinstance(msg["fn"], Simulated):
            value = msg["fn"]() if msg["value"] is None else msg["value"]
            ndims = self.data[msg["name"]]
            msg["fn"] = Simulated(Tensor.clone, value, ndims, value.shape[value.dim() - ndims :])
            msg.update(value=None, is_observed=False, done=False)
            msg["infer"] = {**msg["infer"], "_deterministic": False, "_drawn": True}
        if not self.weighted:
            msg["fn"] = msg["fn"].mask(False)


def with_drawn_data(
    model: Callable, args: tuple, kwargs: Mapping[str, Any], observed: Sequence[str]
) -> Callable:
    """Returns a model whose observed sites that are deterministic, or a `Delta`, are draws; others are unchanged."""
    if isinstance(model, SimulatorModel) or not observed:
        return model
    sites: Sites = {}
    none = suppress(NotImplementedError)  # of a site without draws, which `Simulator` tells
    with none, forked_rng(), torch.no_grad(), pyro.validation_enabled(False):  # draws may be NaN
        sites = poutine.trace(model).get_trace(*args, **kwargs).nodes
    data = {}
    for name in observed:
        site = sites.get(name, {})
        if site and is_delta(site["fn"]):
            # by default a deterministic site has all dims for events
            ndims = len(site["fn"].event_shape)
            whole = site["infer"].get("_deterministic") and ndims == site["value"].dim()
            data[name] = max(ndims - plate_nesting([site]), 0) if whole else ndims
    return SimulatorModel(model, data) if data else model


def _black_box(
    prior: Distribution, simulator: Callable[[Tensor], Any], shape: torch.Size
) -> Tensor:
    """The model of `from_simulator`."""
    theta = pyro.sample("theta", prior)  # type: ignore[arg-type]
    return pyro.sample("x", Simulated(simulator, theta, len(prior.event_shape), shape))


def from_simulator(prior: Distribution, simulator: Callable[[Tensor], Any]) -> SimulatorModel:
    """Returns a simulator as a Pyro model: ``theta`` from the prior, and ``x`` from the simulator at it.

    A guide for it is compiled as for any model: ``amortize(from_simulator(prior, simulator), observed=["x"])``. As the
    density of its data is not known, draws have no weights, and there is no evidence; a model that is written with
    Pyro's distributions has both.

    Args:
        prior: of one draw of the parameters, with batch shape ``()``: ``Uniform(low, high).to_event(1)``, say; of
            Pyro, or of ``torch.distributions``, as sbi's are.
        simulator: from parameters ``(rows, *event)`` to data ``(rows, *shape)``, numbers of any dtype. One that takes
            one row becomes ``lambda theta: torch.stack([simulate(row) for row in theta])``.

    Raises:
        TypeError: a prior that is no distribution.
        ValueError: a prior with batch dims; a simulator that fails for rows of parameters; data that do not have the
            rows of the parameters, or no numbers.

    Example:
        >>> import pyro.distributions as dist
        >>> prior = dist.Normal(torch.zeros(2), 1.0).to_event(1)
        >>> model = from_simulator(prior, lambda theta: theta + 0.1 * torch.randn_like(theta))
        >>> model().shape
        torch.Size([2])
    """
    prior = _of_pyro(prior)
    if prior.batch_shape:
        raise ValueError(
            f"Expected a prior of one draw, of batch shape (); got {tuple(prior.batch_shape)}. Use "
            f"prior.to_event({len(prior.batch_shape)}) or torch.distributions.Independent."
        )
    rows = prior.event_shape.numel() + 1  # a number that is not a size of one row
    with torch.random.fork_rng():
        shape = _simulated(simulator, prior.sample((rows,))).shape[1:]
    return SimulatorModel(functools.partial(_black_box, prior, simulator, shape), {"x": len(shape)})


def _simulated(simulator: Callable[[Tensor], Any], theta: Tensor) -> Tensor:
    """Returns data ``(rows, *shape)`` of parameters ``(rows, *event)``, as floating-point numbers."""
    expected = f"Expected the simulator to return one row of data for each of {len(theta)} rows of parameters"
    with poutine.block(), own_dims():  # it may be written with Pyro
        try:
            made = simulator(theta)
        except Exception as error:
            raise ValueError(
                f"{expected}; it raises {type(error).__name__}: {error}. {_BY_ROWS}"
            ) from error
    try:
        x = torch.as_tensor(made, device=theta.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{expected}, in one tensor; got {type(made).__name__}. Concatenate its parts."
        ) from error
    if x.dim() == 0 or len(x) != len(theta):
        raise ValueError(f"{expected}; got shape {tuple(x.shape)}. {_BY_ROWS}")
    return x.to(theta.dtype)


def _of_pyro(prior: Any) -> Any:
    """Returns a distribution of torch as that of Pyro's by the same name.

    Raises:
        TypeError: there is none.
    """
    if isinstance(prior, Independent):
        return _of_pyro(base_of(prior)).to_event(prior.reinterpreted_batch_ndims)
    if isinstance(prior, TorchDistributionMixin):
        return prior
    if type(prior) is TransformedDistribution:
        return pyro.distributions.TransformedDistribution(
            _of_pyro(base_of(prior)), prior.transforms
        )
    known = getattr(pyro.distributions, type(prior).__name__, None)
    if not isinstance(prior, Distribution) or known is None:
        raise TypeError(
            f"Expected a distribution of all parameters as the prior; got {type(prior).__name__}. Use "
            "pyro.distributions, such as Uniform(low, high).to_event(1)."
        )
    options = arguments_of(prior).items()
    return known(
        **{key: _of_pyro(part) if isinstance(part, Distribution) else part for key, part in options}
    )
