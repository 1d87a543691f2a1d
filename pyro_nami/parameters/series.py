"""`SeriesNetwork`: the recurrent networks of a guide, and the units that they read data and give messages in.

A pass reads all parameters when it starts (`SeriesPass`), as `NetworkState` does.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_nami.factors.potentials import NormalPotential
from pyro_nami.networks.recurrent import BackwardMessages, SeriesSummary
from pyro_nami.parameters.additions import FIRST_SHARE

__all__ = ["SeriesInputs", "SeriesNetwork", "SeriesPass", "SeriesSizes", "SeriesStart"]

# least and most units of the one that gives messages; in between it has as many as a step has data and states
MIN_UNITS, MAX_UNITS = 32, 256
# share of a state's variance that data tell, at least: locations are divided by it, and would start far out
MIN_TOLD = 0.05


class SeriesSizes(NamedTuple):
    """Sizes of the networks of a series.

    Attributes:
        num_families: families of data.
        num_given: features of the latents that the states depend on.
        num_outputs: elements of a step's states, or the logits of their values.
        is_normal: whether states are Normal.
        is_summarized: whether latents outside read the series.
        is_bounded: whether the chain is kept within bounds, as its transitions are learned.
    """

    num_families: int
    num_given: int
    num_outputs: int
    is_normal: bool
    is_summarized: bool
    is_bounded: bool


class SeriesStart(NamedTuple):
    """Units, and where messages about Normal states start: at the regression of a step's states on its data.

    Attributes:
        shift, scale: of a step's features, ``(features,)``: they are read as shift + scale * features.
        center, spread: of Normal states, ``(elements,)``.
        unit: their standard deviation given the states before, ``(elements,)``.
        slope: of the regression, in units of spread, ``(elements, features)``.
        left: its residuals' standard deviation, in units of spread, ``(elements,)``.
    """

    shift: Tensor
    scale: Tensor
    center: Tensor
    spread: Tensor
    unit: Tensor
    slope: Tensor
    left: Tensor


class SeriesInputs(NamedTuple):
    """What the networks of a series read of a call, steps first.

    Attributes:
        features: raw, ``(steps, *left, *plates, features)``, any numbers where there are no data.
        seen: which features are data, of the same shape, zeros and ones.
        families: which families have data, ``(steps, *left, *plates, families)``, likewise.
        exists: which steps a row has, ``(steps, *plates)``; None: all.
    """

    features: Tensor
    seen: Tensor
    families: Tensor
    exists: Tensor | None


class SeriesNetwork(PyroModule):
    """The networks of a series of any length.

    Args:
        sizes: of them.
        start: units, and where they start.
        register: turns a module's parameters into Pyro's.
        factory: device and dtype of the parameters.
        summary_units: units of the network that summarizes the series for latents outside of it.

    Attributes:
        num_features: number of features of a series' summary; 0 without one.
    """

    shift: Tensor
    scale: Tensor
    center: Tensor
    spread: Tensor
    unit: Tensor

    def __init__(
        self,
        sizes: SeriesSizes,
        start: SeriesStart,
        register: Callable[[nn.Module], nn.Module],
        factory: Mapping[str, Any],
        *,
        summary_units: int = 16,
    ) -> None:
        super().__init__()
        self.sizes, self.num_features = sizes, 0
        # the features of a summary that are learned, which come first
        self.num_learned = 3 * summary_units
        num_data = len(start.shift)
        num_inputs = 2 * num_data + sizes.num_families
        units = min(max(num_data + sizes.num_outputs, MIN_UNITS), MAX_UNITS)
        messages = BackwardMessages(
            num_data if sizes.is_normal else 0,
            num_inputs + sizes.num_given,
            units,
            sizes.num_outputs,
            **factory,
        )
        if sizes.is_normal:
            # the potential with which N(0, 1), in units of spread, has the regression as its conditional
            told = (1 - start.left.square()).clamp(min=MIN_TOLD).unsqueeze(-1)
            gained = (start.left**-2 - 1).clamp(min=0) * (start.unit / start.spread).square()
            messages.start(start.slope / told, gained.clamp(min=FIRST_SHARE).log())
        parts: dict[str, nn.Module] = {"messages": messages}
        if sizes.is_summarized:
            summary = SeriesSummary(num_inputs, summary_units, **factory)
            parts["summary"] = summary
            self.num_features = summary.num_features
        # These run with the parameters of a pass in place of their own, and are no submodules.
        self._parts = (parts,)
        for name, module in parts.items():
            self.add_module(name, register(copy.deepcopy(module)))
        for name in ("shift", "scale", "center", "spread", "unit"):
            self.register_buffer(name, getattr(start, name).to(**factory))

    @property
    def num_parameters(self) -> int:
        """Number of weights."""
        return sum(value.numel() for part in self._parts[0].values() for value in part.parameters())

    def start(self, inputs: SeriesInputs) -> SeriesPass:
        """Returns a pass over a call's data, with the parameters as they are now."""
        runs = {}
        for name, module in self._parts[0].items():
            own = getattr(self, name)
            weights = {key: attrgetter(key)(own) for key, _ in module.named_parameters()}
            runs[name] = functools.partial(torch.func.functional_call, module, weights)
        return SeriesPass(self, runs, inputs)


@dataclass(frozen=True, eq=False)
class SeriesPass:
    """One pass of the networks of a series over the data of a call.

    Args:
        network: whose pass this is.
        runs: name of a module -> a function of its arguments, as one tuple.
        inputs: of the call.
    """

    network: SeriesNetwork
    runs: Mapping[str, Callable[[tuple], Any]]
    inputs: SeriesInputs

    def summary(self) -> Tensor:
        """Returns the features of the series as a whole, ``(*left, *plates, features)``."""
        batch = self._batch()
        exists = self._rows_that_exist(batch)
        found = self.runs["summary"]((_rows(self._read[1], batch), exists))
        return found.reshape(*batch, -1)

    def messages(self, given: Tensor | None, *, reach: float = 4.0) -> NormalPotential | Tensor:
        """Returns the potentials of each step's states, ``(*left, *plates, steps, outputs)`` each.

        Args:
            given: features of the latents that the states depend on, ``(*left, *plates, given)``.
            reach: how far learned transitions may lead from where messages and the first call's draws have states, in
                units of the spread of these draws. With 10 a deep Markov model explodes in some steps of SVI, and
                without bounds is lost in dozens; with 0.4 the states of a random walk would be cut.
        """
        network, (data, read) = self.network, self._read
        batch, seen = self._batch(given), self.inputs.families
        if given is not None:
            given = given.expand(len(read), *given.shape)
            read = _joined(*(_aligned(part, len(batch)) for part in (read, given)))
        exists = self._rows_that_exist(batch)
        arguments = (_rows(data, batch), _rows(read, batch), _rows(seen, batch).amax(-1), exists)
        found = self.runs["messages"](arguments)
        if not network.sizes.is_normal:
            return found.reshape(-1, *batch, found.shape[-1]).movedim(0, -2)
        location, log_precision = (
            part.reshape(-1, *batch, part.shape[-1]).movedim(0, -2) for part in found
        )
        location = torch.addcmul(network.center, location, network.spread)
        whole = NormalPotential(location, log_precision - 2 * network.unit.log())
        if not network.sizes.is_bounded:
            return whole
        near, margin = location.detach(), reach * network.spread
        low = torch.minimum(near, network.center) - margin
        high = torch.maximum(near, network.center) + margin
        return whole._replace(low=low, high=high)

    @functools.cached_property
    def _read(self) -> tuple[Tensor, Tensor]:
        """What locations are linear in, and the inputs of networks: levels, changes, and what is there."""
        network, inputs = self.network, self.inputs
        data = torch.addcmul(network.shift, inputs.features.to(network.shift), network.scale)
        data = torch.where(inputs.seen > 0, data, 0.0)
        both = inputs.seen[:-1] * inputs.seen[1:]
        changes = torch.cat(((data[:-1] - data[1:]) * both, torch.zeros_like(data[:1])))
        read = torch.cat((_bounded(data), _bounded(changes), inputs.families), -1)
        return data, read

    def _batch(self, given: Tensor | None = None) -> torch.Size:
        parts = [self.inputs.features[0], *([] if given is None else [given])]
        shapes = [part.shape[:-1] for part in parts]
        if self.inputs.exists is not None:
            shapes.append(self.inputs.exists.shape[1:])
        return torch.broadcast_shapes(*shapes)

    def _rows_that_exist(self, batch: torch.Size) -> Tensor | None:
        exists = self.inputs.exists
        return None if exists is None else _rows(exists.unsqueeze(-1), batch).squeeze(-1)


def _bounded(x: Tensor, size: float = 3.0) -> Tensor:
    """Returns features near zero as they are, and others within a size: longer series wander further out.

    With ten times the size, in units of spread, a guide of random walks of 60 steps loses 0.2 nats a step at 500 steps;
    with a third of it, data that lie apart would be taken for the same.
    """
    return size * (x / size).tanh()


def _rows(x: Tensor, batch: torch.Size) -> Tensor:
    """Returns ``(steps, *batch, features)`` as ``(steps, rows, features)``."""
    x = _aligned(x, len(batch)).expand(len(x), *batch, x.shape[-1])
    return x.reshape(len(x), math.prod(batch), x.shape[-1])


def _aligned(x: Tensor, ndims: int) -> Tensor:
    """Returns ``(steps, *batch, features)`` with this many batch dims, of size 1 where there were none."""
    return x.reshape(len(x), *(1,) * (ndims + 2 - x.dim()), *x.shape[1:])


def _joined(x: Tensor, y: Tensor) -> Tensor:
    """Returns features side by side, each repeated along the batch dims of the other."""
    batch = torch.broadcast_shapes(x.shape[:-1], y.shape[:-1])
    return torch.cat((x.expand(*batch, x.shape[-1]), y.expand(*batch, y.shape[-1])), -1)
