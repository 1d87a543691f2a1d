"""A model, a guide, and what one call gives them; run for any number of draws and of data sets.

A `Target` is all that importance sampling and annealing know of a model, and both are functions of it. Change this
module when model and guide are to be run in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import pyro
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nami.inference.observations import Observations
from pyro_nami.inference.sites import any_value, log_density, plate_nesting
from pyro_nami.inference.vectorization import outer_plates, run_in_plates
from pyro_nami.reading.runner import Runner, takes_observations

__all__ = ["Extent", "Target", "log_densities", "per_draw"]


class Extent(NamedTuple):
    """What one run is for: a number of draws for each of some data sets, or one draw for one of them.

    Attributes:
        sizes: ``(draws, *data sets)``; ``()`` for one draw.
        plates: of these dims.
        data: observed site -> value, of the data sets.
    """

    sizes: tuple[int, ...]
    plates: tuple[pyro.plate, ...]
    data: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Target:
    """A model p(z, x) and a guide q(z | x), on the arguments and the data of one call.

    Args:
        model, guide: as Pyro takes them; the guide is None where none is run.
        args, kwargs: arguments of both.
        data: observed values in place of the model's own.
        nesting: plate dims; those of draws and of data sets stand left of them.

    Example:
        >>> import pyro.distributions as dist, torch
        >>> def model():
        ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...     pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(2.0))
        >>> target = Target(model, None, (), {})
        >>> extent = target.extent(3)
        >>> sites = target.run_model(extent, Runner({"z": torch.tensor([0.0, 1.0, 2.0])}))
        >>> per_draw(log_densities(sites), extent)["x"]
        tensor([-2.9189, -1.4189, -0.9189])
    """

    model: Callable
    guide: Callable | None
    args: tuple
    kwargs: Mapping[str, Any]
    data: Observations = field(default_factory=lambda: Observations({}, {}, 0))
    nesting: int = 0

    def observing(self, observations: Mapping[str, Any]) -> tuple[Target, dict[str, Any]]:
        """Returns the target on observed values, and the sites of the run of the model that these are checked against.

        Raises:
            ValueError, TypeError: see `Observations`.
            NotImplementedError: plates with random subsampling.
        """

        def value(site: Any) -> Tensor | None:
            if site_is_subsample(site) or site["value"] is not None:
                return None
            return any_value(site["fn"], (self.args, self.kwargs))

        sites = self.run_model(Extent((), (), observations), Runner({}, choose=value))
        nesting = plate_nesting(sites.values())
        return replace(self, data=Observations(observations, sites, nesting), nesting=nesting), sites

    def extent(self, draws: int, rows: slice | None = None) -> Extent:
        """Returns the extent of draws for each data set of ``rows``; by default of all there are, if there is a dim."""
        if rows is None and self.data.num is not None:
            rows = slice(0, self.data.num)
        sizes = (draws,) if rows is None else (draws, rows.stop - rows.start)
        data = self.data.batch(rows or slice(None))
        return Extent(sizes, outer_plates(sizes, self.nesting), data)

    def one(self, row: int = 0) -> Extent:
        """Returns the extent of one draw for one data set."""
        return Extent((), (), self.data.one(row))

    def run_model(self, extent: Extent, runner: Runner) -> dict[str, Any]:
        """Runs the model; returns its sites with densities. Observed values are in it if they are the runner's."""
        kwargs = self._with_data(extent, self._takes_observations[0])
        return run_in_plates(runner, self.model, self.args, kwargs, extent.plates)

    def run_guide(self, extent: Extent, runner: Runner) -> dict[str, Any]:
        """Runs the guide; returns its sites with densities."""
        assert self.guide is not None
        return run_in_plates(runner, self.guide, self.args, self.guide_kwargs(extent), extent.plates)

    def guide_kwargs(self, extent: Extent) -> Mapping[str, Any]:
        """Returns the guide's keyword arguments."""
        return self._with_data(extent, self._takes_observations[1])

    @cached_property
    def _takes_observations(self) -> tuple[bool, bool]:
        guide = self.guide is not None and takes_observations(self.guide, is_guide=True)
        return takes_observations(self.model), guide

    def _with_data(self, extent: Extent, taken: bool) -> Mapping[str, Any]:
        return {**self.kwargs, "observations": extent.data} if taken and extent.data else self.kwargs


def log_densities(sites: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns each site's log density in nats, with its scale and mask, ``(*batch, *plates)``.

    Raises:
        OutsideSupport: a value that its distribution refuses.
    """
    return {
        name: scale_and_mask(log_density(site), site["scale"], site["mask"]) for name, site in sites.items()
    }


def per_draw(log_probs: Mapping[str, Tensor], extent: Extent) -> dict[str, Tensor]:
    """Returns each site's log density summed over its plates, ``extent.sizes``.

    Raises:
        ValueError: a site that lacks dims of the extent.
    """
    for name, log_prob in log_probs.items():
        if log_prob.shape[: len(extent.sizes)] != extent.sizes:
            raise ValueError(
                f"Expected batch dims {extent.sizes} at site '{name}'; got {tuple(log_prob.shape)}."
            )
    return {name: log_prob.reshape(extent.sizes + (-1,)).sum(-1) for name, log_prob in log_probs.items()}
