"""`Target`: a model, a guide, and the arguments of one call; run for any number of draws and of data sets.

Simulation, importance sampling and annealing know a model by its `Target` alone. Draws and data
sets are in outer plates, to the left of the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_nami.factors.wrappers import innermost
from pyro_nami.inference.observations import Observations
from pyro_nami.inference.simulator_model import SimulatorModel
from pyro_nami.inference.site_messages import (
    Sites,
    Values,
    check_full_plates,
    check_latents,
    log_density,
    plate_nesting,
)
from pyro_nami.program.first_run import is_delta
from pyro_nami.program.isolation import bounded_indices
from pyro_nami.program.many_draws import for_many
from pyro_nami.program.plate_dims import own_dims
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Runner, takes_observations
from pyro_nami.program.site_values import any_value
from pyro_nami.program.vectorized import unmapped

__all__ = [
    "Extent",
    "Target",
    "bind",
    "in_one_line",
    "log_densities",
    "per_draw",
    "run_for_many",
    "summed",
]

_PLATES = ("_draws", "_data_sets")


class Extent(NamedTuple):
    """The batch of one run: a number of draws for each of some data sets, or by default one draw for one data set.

    Attributes:
        sizes: ``(draws, *data sets)``; ``()`` for one draw.
        data: observed site -> value, of the data sets.
        contexts: context managers around the run: the plates of these dims.
    """

    sizes: tuple[int, ...] = ()
    data: Mapping[str, Any] = {}
    contexts: tuple[AbstractContextManager, ...] = ()


@dataclass(frozen=True, eq=False)
class Target:
    """A model p(z, x) and a guide q(z | x), on the arguments and the data of one call.

    Args:
        program: the model with the arguments of the call.
        guide: takes the same arguments; None where none is run.
        data: observed values in place of the model's own.
        nesting: plate dims; those of draws and of data sets stand left of them.
        prior_share: share of the proposal's draws that are the prior's in place of the guide's.

    Example:
        >>> import pyro.distributions as dist
        >>> def model():
        ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...     pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(2.0))
        >>> target = Target(Program(model, (), {}), None)
        >>> sites = target.run_model(target.extent(3), Runner({"z": torch.tensor([0.0, 1.0, 2.0])}))
        >>> log_densities(sites)["x"]
        tensor([-2.9189, -1.4189, -0.9189])
    """

    program: Program
    guide: Callable | None
    data: Observations = field(default_factory=lambda: Observations({}, {}, 0))
    nesting: int = 0
    prior_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.prior_share < 1:
            raise ValueError(
                f"Expected defensive to be a share of the draws, in [0, 1); got {self.prior_share}."
            )

    def observing(self, observations: Mapping[str, Any]) -> tuple[Target, Sites]:
        """Returns the target on observed values, and the sites of the run of the model that these are checked against.

        Raises:
            ValueError, TypeError: see `Observations`.
        """

        def value(site: Any) -> Tensor | None:
            if site_is_subsample(site) or site["value"] is not None:
                return None
            return any_value(site["fn"], like, torch.zeros)

        tensors = (leaf for leaf in self.program.leaves() if isinstance(leaf, Tensor))
        like = next((leaf for leaf in tensors if leaf.is_floating_point()), None)
        sites = self.run_model(Extent(data=observations), Runner({}, choose=value))
        nesting = plate_nesting(sites.values())
        data = Observations(observations, sites, nesting)
        return replace(self, data=data, nesting=nesting), sites

    def one(self, row: int = 0) -> Extent:
        """Returns the extent of one draw for one data set."""
        return Extent(data=self.data.one(row))

    def extent(self, draws: int, rows: slice | None = None) -> Extent:
        """Returns the extent of draws for each data set of ``rows``; by default of all data sets."""
        if rows is None and self.data.num is not None:
            rows = slice(0, self.data.num)
        sizes = (draws,) if rows is None else (draws, rows.stop - rows.start)
        first = -self.nesting - len(sizes)
        with poutine.block(), own_dims():
            plates = [pyro.plate(_PLATES[i], size, dim=first + i) for i, size in enumerate(sizes)]
        return Extent(sizes, self.data.batch(rows or slice(None)), tuple(plates))

    def run_model(self, extent: Extent, runner: Runner) -> Sites:
        """Runs the model; returns its sites with densities. Observed values are in it if they are the runner's.

        Raises:
            NotImplementedError: a plate with random subsampling, or a site that has no draws (an improper prior).
            ValueError: a site whose distribution fails to be sampled.
        """
        runner.is_sampling = True
        return self._run(self.program.model, extent, runner)

    def run_guide(self, extent: Extent, runner: Runner) -> Sites:
        """Runs the guide; returns its sites with densities."""
        assert self.guide is not None
        return self._run(self.guide, extent, runner)

    def guide_log_prob(self, extent: Extent, values: Values) -> Tensor:
        """Returns the guide's log density in nats, ``extent.sizes``: by its ``log_prob``, where it has one."""
        dense = getattr(self.guide, "log_prob", None)
        if dense is not None:
            return dense(values, *self.program.args, **self._kwargs(extent, self.guide))
        return torch.stack(list(self.guide_log_probs(extent, values).values())).sum(0)

    def guide_log_probs(self, extent: Extent, values: Values) -> Values:
        """Returns the guide's log density in nats at every latent, ``extent.sizes``; scales do not count.

        Raises:
            ValueError: a latent that the guide lacks, or has too many, or that lacks dims of the extent.
        """
        run = self.run_guide(extent, Runner(values))
        sites = {
            name: {**site, "scale": 1.0}
            for name, site in run.items()
            if name in values or not is_delta(site["fn"])
        }
        check_latents("a guide with a density", sites, values)
        return per_draw(log_densities(sites), extent)

    def defended(self, log_q: Tensor, log_prior: Tensor) -> Tensor:
        """Returns the log density of the mixture of guide and prior, by the log densities of both."""
        if not self.prior_share:
            return log_q
        return torch.logaddexp(
            log_q + math.log1p(-self.prior_share), log_prior + math.log(self.prior_share)
        )

    def _kwargs(self, extent: Extent, fn: Any) -> Mapping[str, Any]:
        told = extent.data and takes_observations(fn, is_guide=fn is self.guide)
        kwargs = self.program.kwargs
        return {**kwargs, "observations": extent.data} if told else kwargs

    def _run(self, fn: Callable, extent: Extent, runner: Runner) -> Sites:
        """Runs the model or the guide within the plates of an extent."""

        def in_contexts(*args: Any, **kwargs: Any) -> None:
            with ExitStack() as stack:
                for context in extent.contexts:
                    stack.enter_context(context)
                fn(*args, **kwargs)

        program = Program(in_contexts, self.program.args, self._kwargs(extent, fn))
        try:
            try:
                sites = program.run(runner)
            except torch.linalg.LinAlgError:  # one draw is not to end the run of all
                runner.restart()
                with _Factored():
                    sites = program.run(runner)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            last = runner.last
            if last is None or last["name"] in runner.sites:  # the model's own code failed
                raise
            kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
            raise kind(
                f"Expected a site that can be sampled; got '{last['name']}', whose "
                f"{type(innermost(last['fn'])).__name__} raises {type(error).__name__}: {error}."
            ) from error
        check_full_plates(sites)
        return {name: site for name, site in sites.items() if not site_is_subsample(site)}


class _Factored(TorchFunctionMode):
    """Returns NaN for the Cholesky factor of a matrix that is not positive definite."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.linalg.cholesky:
            return func(*args, **(kwargs or {}))
        factor, info = torch.linalg.cholesky_ex(*args, **(kwargs or {}))
        return factor.where((info == 0)[..., None, None], math.nan)


@bounded_indices()
def run_for_many(
    target: Target,
    difference: Callable[[Target], str | None],
    raised: tuple[type[Exception], ...] = (torch.OutOfMemoryError,),
) -> tuple[Target, str | None]:
    """Returns a target that is run for many draws, and None; or the target as it is, and why this fails.

    The model, and the guide's, are in `Vectorized` where they can only be run for many draws so.

    Args:
        target: a model and a guide.
        difference: from a target to where its batched runs differ from single ones; None if nowhere. An error is a
            difference too: a model may do anything with batch dims that it was not written for.
        raised: errors that are raised all the same.
    """

    def at(program: Program) -> Target:
        bind(target.guide, program.model)
        return replace(target, program=program)

    def difference_at(program: Program) -> str | None:
        try:
            return difference(at(program))
        except raised:
            raise
        except Exception as error:  # noqa: BLE001  see above
            return in_one_line(error)

    if isinstance(target.program.model, SimulatorModel):  # mapped, it may draw at no site
        return target, difference_at(target.program)
    program, reason = for_many(target.program, target.nesting, difference_at)
    return at(program), reason


def bind(guide: Any, model: Callable) -> None:
    """Has another guide of the model map it over draws where this guide does."""
    if hasattr(guide, "bind") and unmapped(guide.model) is unmapped(model):
        guide.bind(model)


# ---- what the sites of a run say


def log_densities(sites: Sites) -> Values:
    """Returns each site's log density in nats, with its scale and mask, ``(*batch, *plates)``.

    Raises:
        OutsideSupport: a value that its distribution refuses.
    """
    return {
        name: scale_and_mask(log_density(site), site["scale"], site["mask"])
        for name, site in sites.items()
    }


def per_draw(log_probs: Values, extent: Extent) -> Values:
    """Returns each site's log density summed over its plates, ``extent.sizes``.

    Raises:
        ValueError: a site that lacks dims of the extent.
    """
    for name, log_prob in log_probs.items():
        if log_prob.shape[: len(extent.sizes)] != extent.sizes:
            raise ValueError(
                f"Expected batch dims {extent.sizes} at site '{name}'; got {tuple(log_prob.shape)}."
            )
    return {
        name: log_prob.reshape(extent.sizes + (-1,)).sum(-1) for name, log_prob in log_probs.items()
    }


def summed(log_probs: Values, extent: Extent) -> Tensor:
    """Returns the log density of all sites together, ``extent.sizes``."""
    total: Any = sum(per_draw(log_probs, extent).values())
    return total


def in_one_line(error: Exception) -> str:
    """Returns an error as one line of a warning."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}"
