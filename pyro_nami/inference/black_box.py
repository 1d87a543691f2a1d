"""`from_simulator`: a prior and a simulator as a Pyro model; or a prior, and simulations that were made before."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_nami.inference.observations import as_tensor
from pyro_nami.inference.priors import as_priors
from pyro_nami.inference.simulator_model import Simulated, SimulatorModel, as_floating
from pyro_nami.messages import quoted, warn
from pyro_nami.program.plate_dims import own_dims

__all__ = ["BlackBox", "from_simulations", "from_simulator"]

# Rows that fail one by one, before any succeeds, after which a simulator is taken to be wrong. At ten times more, a
# mistake in a slow simulator shows late; at ten times less, one that fails for most rows is refused.
MOST_FAILED = 30
_BY_ROWS = (
    "One that takes one row is called by lambda theta: torch.stack([simulate(row) for row in theta]); by numpy.stack "
    "where it returns arrays of numpy."
)


def from_simulator(prior: Any, simulator: Callable[[Any], Any]) -> SimulatorModel:
    """Returns a simulator as a Pyro model: ``theta`` from the prior, and ``x`` from the simulator at it.

    A guide for it is compiled as for any model: ``amortize(from_simulator(prior, simulator))``. As the density of its
    data is not known, draws have no weights, and there is no evidence; a model that is written with Pyro's
    distributions has both.

    Args:
        prior: of one draw of the parameters, with batch shape ``()``: ``Uniform(low, high).to_event(1)``, say; of
            Pyro, of ``torch.distributions``, of ``scipy.stats`` with its arguments (``gamma(2.0)``), or any object with
            ``sample(shape)`` (and ``log_prob`` and ``support``, if it has them); a list of independent distributions,
            as one of the vector of all; draws ``(draws, *event)`` alone. A dictionary of priors gives each
            parameter a name.
        simulator: from parameters ``(rows, *event)``, or a dictionary of these, to data ``(rows, *shape)``, numbers of
            any dtype, or NaN for a row that fails. A dictionary of data gives each of them a name; those of a tuple are
            ``x_0``, ``x_1``, ... One that takes one row becomes
            ``lambda theta: torch.stack([simulate(row) for row in theta])``, or ``numpy.stack`` of arrays.

    Raises:
        TypeError: a prior of another kind.
        ValueError: a prior with batch dims, or that cannot be sampled; a simulator that fails for rows of parameters;
            data that do not have the rows of the parameters, or no numbers; a name of both a parameter and data.

    Example:
        >>> import pyro.distributions as dist
        >>> prior = dist.Normal(torch.zeros(2), 1.0).to_event(1)
        >>> model = from_simulator(prior, lambda theta: theta + 0.1 * torch.randn_like(theta))
        >>> model().shape
        torch.Size([2])
    """
    priors = as_priors(prior)
    box = BlackBox(priors, isinstance(prior, Mapping), {}, simulator)
    rows = sum(each.event_shape.numel() for each in priors.values()) + 1  # not a size of one row
    with torch.random.fork_rng():
        data = box.run({name: each.sample((rows,)) for name, each in priors.items()})
    return _model(priors, box.is_named, {name: x.shape[1:] for name, x in data.items()}, simulator)


def from_simulations(prior: Any, simulations: Any) -> tuple[SimulatorModel, Any]:
    """Returns a prior and simulations as a Pyro model that cannot simulate, and the simulations by name.

    Args:
        prior: as for `from_simulator`.
        simulations: site -> values ``(rows, ...)``; or parameters and data, ``theta`` and ``x``, in a pair.

    Raises:
        TypeError: simulations of another kind.
        ValueError: no values of a parameter, or no data.
    """
    priors = as_priors(prior)
    values = getattr(simulations, "tensors", simulations)  # of a `TensorDataset`
    if isinstance(values, (list, tuple)) and len(values) == 2:
        first, last = values
        if isinstance(first, Mapping) and isinstance(last, Mapping):
            values = {**first, **last}
        elif len(priors) == 1 and not isinstance(first, Mapping):
            values = {next(iter(priors)): first, "x": last}
    if not isinstance(values, Mapping):
        raise TypeError(
            f"Expected simulations of a prior without a simulator as a mapping from {quoted(priors)} and names of data "
            f"to values; got {type(simulations).__name__}. Give a simulator by from_simulator(prior, simulator)."
        )
    missing = [name for name in priors if name not in values]
    names = [name for name in values if name not in priors]
    if missing or not names:
        raise ValueError(
            f"Expected simulations of the parameters {quoted(priors)} and of data; got {quoted(values)}. Parameters "
            "have the names of the prior's dictionary, or 'theta' if it is none."
        )
    like = next(iter(priors.values())).sample()
    data = {name: as_floating(as_tensor(name, values[name], like), like.dtype) for name in names}
    shapes = {name: x.shape[1:] for name, x in data.items()}
    return _model(priors, isinstance(prior, Mapping), shapes, None), {**values, **data}


def _model(
    priors: Mapping[str, Any],
    is_named: bool,
    shapes: Mapping[str, torch.Size],
    simulator: Callable | None,
) -> SimulatorModel:
    both = sorted(priors.keys() & shapes.keys())
    if both:
        raise ValueError(
            f"Expected names of their own for parameters and data; got {quoted(both)}."
        )
    box = BlackBox(priors, is_named, shapes, simulator)
    return SimulatorModel(box, {name: len(shape) for name, shape in shapes.items()})


@dataclass(frozen=True, eq=False)
class BlackBox:
    """A model whose parameters have priors, and whose data come from a simulator.

    Attributes:
        priors: parameter -> prior of one draw.
        is_named: whether the simulator takes a dictionary of parameters.
        shapes: data -> shape of one row.
        simulator: None where there are simulations only.
    """

    priors: Mapping[str, Any]
    is_named: bool
    shapes: Mapping[str, torch.Size]
    simulator: Callable | None

    def __call__(self) -> Any:
        values = {name: pyro.sample(name, prior) for name, prior in self.priors.items()}
        ndims = {name: len(prior.event_shape) for name, prior in self.priors.items()}
        packed = _Packed.of(values, ndims)
        shared = _Shared(self, packed)
        data = {
            name: pyro.sample(
                name, Simulated(partial(shared.take, name), packed.theta, packed.ndims, shape)
            )
            for name, shape in self.shapes.items()
        }
        return data if len(data) > 1 else next(iter(data.values()))

    def run(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns data ``(rows, *shape)`` of parameters ``(rows, *event)``, as floating-point numbers.

        Rows that fail are NaN, unless none is known to succeed.
        """
        if self.simulator is None:
            raise ValueError(
                "Expected a simulator for other data than those given: this model has a prior and simulations only. "
                "Build the model by from_simulator(prior, simulator)."
            )
        try:
            return self._checked(values)
        except ValueError as error:
            if not self.shapes:
                raise
            return self._in_halves(values, error)

    def _in_halves(self, values: Mapping[str, Tensor], error: ValueError) -> dict[str, Tensor]:
        """Returns data of rows some of which fail, which are NaN; warns of the first reason."""
        num = _rows(values)
        like = next((x for x in values.values() if x.is_floating_point()), torch.zeros(()))
        data = {name: like.new_full((num, *s), math.nan) for name, s in self.shapes.items()}
        left, failed, done = list(torch.arange(num).tensor_split(2)), 0, 0
        while left:
            if failed >= MOST_FAILED and not done:
                raise error
            rows = left.pop()
            try:
                found = self._checked({name: x[rows] for name, x in values.items()})
            except ValueError as reason:
                if len(rows) > 1:
                    left += rows.tensor_split(2)
                else:
                    failed, error = failed + 1, reason
                continue
            done += len(rows)
            for name in data:
                data[name][rows] = found[name]
        warn(f"The simulator failed for {failed} of {num} rows of parameters: {error}")
        return data

    def _checked(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert self.simulator is not None
        num = _rows(values)
        expected = (
            f"Expected the simulator to return one row of data for each of {num} rows of parameters"
        )
        with poutine.block(), own_dims():  # it may be written with Pyro
            try:
                made = self.simulator(
                    dict(values) if self.is_named else next(iter(values.values()))
                )
            except Exception as error:
                raise ValueError(
                    f"{expected}; it raises {type(error).__name__}: {error}. {_BY_ROWS}"
                ) from error
        like = next((x for x in values.values() if x.is_floating_point()), torch.zeros(()))
        data = {}
        for name, part in _named(made).items():
            try:
                x = torch.as_tensor(part, device=like.device)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"{expected}, in one tensor or in a dictionary of tensors; got {type(part).__name__}."
                ) from error
            if x.dim() == 0 or len(x) != num:
                raise ValueError(f"{expected}; got shape {tuple(x.shape)}. {_BY_ROWS}")
            if self.shapes and x.shape[1:] != self.shapes.get(name, x.shape[1:]):
                raise ValueError(
                    f"{expected}, of shape {tuple(self.shapes[name])} each, as at first; got {tuple(x.shape[1:])}."
                )
            data[name] = as_floating(x, like.dtype)
        missing = sorted(self.shapes.keys() - data.keys())
        if missing or not data:
            raise ValueError(f"{expected}; got none of {quoted(missing) or 'anything'}.")
        return data

    def __deepcopy__(self, memo: Any) -> BlackBox:
        return self  # nothing of it changes

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is pickled: all but a simulator that cannot be, which a posterior does not need."""
        try:
            pickle.dumps(self.simulator)
        except Exception:  # noqa: BLE001  whatever an object raises that was not made to be pickled
            warn(
                "The simulator is not saved, as it cannot be pickled: a posterior that is loaded answers for data, but "
                "simulates none (`predict`, `calibrate`). Define the simulator by `def` in a module."
            )
            return {**vars(self), "simulator": None}
        return vars(self)


class _Packed:
    """Parameters ``(*batch, *event)`` of several names as one tensor, which a distribution depends on."""

    def __init__(self, theta: Tensor, ndims: int, parts: list[tuple[str, torch.Size, Any]]) -> None:
        self.theta = theta
        self.ndims = ndims
        self.parts = parts

    @classmethod
    def of(cls, values: Mapping[str, Tensor], ndims: Mapping[str, int]) -> _Packed:
        """Returns the values as a vector; the value itself if there is one."""
        events = {name: x.shape[x.dim() - ndims[name] :] for name, x in values.items()}
        parts = [(name, events[name], values[name].dtype) for name in values]
        if len(values) == 1:
            name, value = next(iter(values.items()))
            return cls(value, ndims[name], parts)
        batch = torch.broadcast_shapes(*(x.shape[: x.dim() - ndims[n]] for n, x in values.items()))
        wide = [x.expand(batch + events[name]).reshape(*batch, -1) for name, x in values.items()]
        return cls(torch.cat(wide, -1), 1, parts)

    def values(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns name -> values ``(rows, *event)`` of rows ``(rows, ...)`` of the tensor."""
        if len(self.parts) == 1:
            return {self.parts[0][0]: rows}
        columns = rows.split([event.numel() for _, event, _ in self.parts], -1)
        return {
            name: part.reshape(-1, *event).to(dtype)
            for part, (name, event, dtype) in zip(columns, self.parts)
        }


@dataclass
class _Shared:
    """One run of a simulator, whose data several sites take, each once."""

    box: BlackBox
    packed: _Packed
    left: dict[str, Tensor] = field(default_factory=dict)
    num: int = -1  # rows of the run

    def take(self, name: str, rows: Tensor) -> Tensor:
        """Returns the data of a name at rows of parameters, of the latest run if these have not been taken yet."""
        if name not in self.left or len(rows) != self.num:
            self.left, self.num = self.box.run(self.packed.values(rows)), len(rows)
        return self.left.pop(name)


def _rows(values: Mapping[str, Tensor]) -> int:
    return len(next(iter(values.values())))


def _named(made: Any) -> dict[str, Any]:
    """Returns what a simulator has made by name."""
    if isinstance(made, Mapping):
        return dict(made)
    if isinstance(made, tuple):
        names = getattr(made, "_fields", [f"x_{i}" for i in range(len(made))])
        return dict(zip(names, made))
    return {"x": made}
