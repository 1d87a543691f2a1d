"""Models whose data can be drawn but have no density: simulators that are no Pyro models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution, constraints
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_nami.inference.priors import OwnPrior
from pyro_nami.inference.site_messages import Sites, plate_nesting
from pyro_nami.program.first_run import is_delta
from pyro_nami.program.isolation import forked_rng

__all__ = ["Simulated", "SimulatorModel", "as_floating", "is_simulated", "with_drawn_data"]


class Simulated(TorchDistribution):
    """A simulator's data ``(*batch, *shape)`` given parameters ``(*batch, *event)``: a distribution without density.

    Args:
        simulator: from parameters ``(rows, *event)`` to data ``(rows, *shape)``.
        theta: the parameters.
        ndims: their event dims.
        shape: of the data of one row.
    """

    arg_constraints: dict = {}
    has_rsample = False
    has_density = False

    def __init__(
        self, simulator: Callable[[Tensor], Tensor], theta: Tensor, ndims: int, shape: torch.Size
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
        return self.simulator(rows).reshape(batch + self.event_shape)

    def blank(self) -> Simulated:
        """Returns data of zeros, which take no run of the simulator."""
        shape = self.event_shape
        return Simulated(partial(_zeros, shape=shape), self.theta, self._ndims, shape)

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
        drawn: whether the simulator of `from_simulator` is run for them; else they are zeros.
    """

    def __init__(
        self,
        model: Callable,
        data: Mapping[str, int],
        weighted: bool = True,
        drawn: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.data = data
        self.weighted = weighted
        self.drawn = drawn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self:
            return self.model(*args, **kwargs)

    def undrawn(self) -> SimulatorModel:
        """Returns the model for runs that show its sites and shapes alone, without runs of its simulator."""
        return SimulatorModel(self.model, self.data, self.weighted, drawn=False)

    def without_data(self) -> SimulatorModel:
        """Returns the model whose data have no density, so that none is asked for, and are not simulated."""
        return SimulatorModel(self.model, self.data, weighted=False, drawn=False)

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] not in self.data:
            if not self.weighted and isinstance(msg["fn"], OwnPrior):  # it may have no density
                msg["fn"] = msg["fn"].mask(False)
            return
        if isinstance(msg["fn"], Simulated):
            msg["fn"] = msg["fn"] if self.drawn else msg["fn"].blank()
        else:
            value = as_floating(msg["fn"]() if msg["value"] is None else msg["value"])
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


def is_simulated(fn: Any) -> bool:
    """Whether a site's values come from a simulator, and are numbers, of any dtype."""
    return isinstance(fn, Simulated)


def as_floating(value: Tensor, like: torch.dtype | None = None) -> Tensor:
    """Returns numbers of any dtype as floating-point numbers, of a dtype if that is floating-point as well."""
    if like is not None and like.is_floating_point:
        return value.to(like)
    return value if value.is_floating_point() else value.to(torch.get_default_dtype())


def _zeros(rows: Tensor, shape: torch.Size) -> Tensor:
    return as_floating(rows.new_zeros(len(rows), *shape))
