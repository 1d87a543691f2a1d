"""What annealing finds out about a model before its first step: plates, data, and that it takes batch dims.

Checks are here, so that the densities need none. Change this module when models or data may come in other shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import Transform

from pyro_nami.inference.observations import Observations
from pyro_nami.inference.sites import (
    check_full_plate,
    plate_names,
    plate_nesting,
    unconstrained_zeros,
    with_plate_dims,
)
from pyro_nami.inference.tempering import GuideStart, SiteError, SiteReader, Slot, TemperedPath
from pyro_nami.reading.runner import takes_observations

__all__ = ["Layout"]


class Layout(NamedTuple):
    """A model with its data.

    Attributes:
        model, guide, args, kwargs: the model, the guide to start from (None for the prior), and their arguments.
        data: the observed values that are given.
        posterior: latent -> draws to start from, ``(chains, data sets, *plates, *event)``; None for the start's own.
        nesting: number of plate dims.
        shapes: site -> its shape in a run without batch dims, and ``plates`` the names of its batch dims' plates.
    """

    model: Callable
    guide: Callable | None
    args: tuple
    kwargs: Mapping[str, Any]
    data: Observations
    posterior: Mapping[str, Tensor] | None
    nesting: int
    shapes: Mapping[str, torch.Size]
    plates: Mapping[str, tuple[str | None, ...]]

    @classmethod
    def of(
        cls,
        model: Callable,
        guide: Callable | None,
        args: tuple,
        kwargs: Mapping[str, Any],
        observations: Mapping[str, Any],
        posterior: Mapping[str, Tensor] | None,
    ) -> Layout:
        """Returns the layout of a model, from one run without batch dims.

        Raises:
            ValueError: no latents; undeclared batch dims; observations or posterior draws that do not fit.
            NotImplementedError: subsampled plates, scaled latents, masked latents with a guide, and what a
                `SiteReader` does not cover.
        """
        given = {"observations": observations} if observations and takes_observations(model) else {}
        anywhere = functools.partial(_drawn_anywhere, arguments=(args, kwargs))
        reader = SiteReader((), anywhere if guide is not None else _drawn, {})
        sites = reader.run(model, args, {**kwargs, **given}).sites
        _check_sites(reader, guide, observations)
        nesting = plate_nesting(sites.values())
        data = Observations(observations, sites, nesting)
        if posterior is not None:
            missing = [name for name in reader.values if name not in posterior]
            if missing:
                raise ValueError(f"Expected posterior draws of every latent; got none of '{missing[0]}'.")
            batch = 1 if data.num is None else 2
            posterior = {
                name: with_plate_dims(posterior[name], sites[name], nesting, batch) for name in reader.values
            }
            if data.num is None:
                posterior = {name: value.unsqueeze(1) for name, value in posterior.items()}
        shapes = {name: site["fn"].shape() for name, site in sites.items()}
        plates = {name: plate_names(sites[name]) for name in reader.values}
        return cls(model, guide, args, kwargs, data, posterior, nesting, shapes, plates)

    def start(self, num_chains: int, chunk: slice, *, check: bool) -> tuple[TemperedPath, Tensor]:
        """Returns the path for a chunk of data sets, and positions at its start, ``(chains, data sets, size)``.

        Args:
            num_chains: number of chains.
            chunk: of data sets.
            check: whether to compare the run of all chains with runs of single ones.

        Raises:
            ValueError: the model does not take batch dims; a log density is not finite. The site is named.
        """
        data = self.data.batch(chunk)
        with poutine.block():
            plates = (
                pyro.plate("_chains", num_chains, dim=-2 - self.nesting),
                pyro.plate("_data_sets", chunk.stop - chunk.start, dim=-1 - self.nesting),
            )
        start = GuideStart(self.guide, self.args, self.kwargs, data) if self.guide is not None else None
        choose: Any = _drawn
        if self.posterior is not None:
            choose = _Given({name: value[:, chunk] for name, value in self.posterior.items()})
        elif start is not None:
            with pyro.validation_enabled(False):  # the model's sites tell, by name, which draws are bad
                choose = _Given(start.draw(plates))
        path = TemperedPath(self.model, self.args, self._kwargs(data), start, data, plates, {})
        reader = SiteReader(path.batch, choose, data)
        try:
            reader.run(self.model, self.args, path.kwargs, plates)
        except (SiteError, NotImplementedError):
            raise
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            problem = f"or behind it, the run fails ({error})"
            raise ValueError(_NOT_BATCHED.format(reader.last, problem)) from error
        _check_shapes(reader.sites)
        if isinstance(choose, _Given) and choose.values.keys() - reader.values.keys():
            extra = min(choose.values.keys() - reader.values.keys())
            raise ValueError(f"Expected latents {list(reader.values)} only; the guide has '{extra}' as well.")
        if check:
            self._compare(reader, chunk.start)
        path.slots, position = _flattened(reader.unconstrained)
        _check_finite(reader, path)
        return path, position

    def _kwargs(self, data: Mapping[str, Tensor]) -> Mapping[str, Any]:
        given = {"observations": data} if data and takes_observations(self.model) else {}
        return {**self.kwargs, **given}

    def _compare(self, reader: SiteReader, first: int) -> None:
        """Raises where the first and the last chain have other densities in a run of their own."""
        chains, sets = reader.batch
        for chain, index in {(0, 0), (chains - 1, sets - 1)}:
            values = {name: v[chain, index].reshape(self.shapes[name]) for name, v in reader.values.items()}
            own = self.data.one(first + index)
            single = SiteReader((), _Given(values), own).run(self.model, self.args, self._kwargs(own))
            for part, alone in ((reader.prior, single.prior), (reader.likelihood, single.likelihood)):
                for name, log_prob in part.items():
                    here, there = log_prob[chain, index], alone.get(name, torch.zeros(()))
                    tolerance = 10 * torch.finfo(here.dtype).eps ** 0.5 * (1 + there.abs())
                    if here.isfinite() and there.isfinite() and not (here - there).abs() <= tolerance:
                        problem = f"the log density is {here:.6g}, and {there:.6g} in a run of its own"
                        raise ValueError(_NOT_BATCHED.format(name, problem))


class _Given:
    """Takes a latent's value from those given."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.values = values

    def __call__(self, name: str, fn: Any, transform: Transform) -> tuple[Tensor, Tensor]:
        if name not in self.values:
            raise SiteError(
                f"Expected a guide with a density at every latent; it has none at '{name}'. Use AutoNaMIGuide, whose "
                "sites are no Deltas, or start from the prior (guide=None)."
            )
        value = self.values[name]
        if value.shape != fn.shape():
            raise SiteError(
                f"Expected values of site '{name}' of shape {tuple(fn.shape())}: batch dims, all plate dims, event; "
                f"got {tuple(value.shape)}."
            )
        return transform.inv(value), value


def _drawn(name: str, fn: Any, transform: Transform) -> tuple[Tensor, Tensor]:
    """Draws a latent from the prior."""
    try:
        value = fn.sample()
    except NotImplementedError as error:
        raise NotImplementedError(
            f"Expected a prior that can be sampled; site '{name}' ({type(fn).__name__}) cannot. Start from a guide."
        ) from error
    return transform.inv(value), value


def _drawn_anywhere(name: str, fn: Any, transform: Transform, arguments: Any) -> tuple[Tensor, Tensor]:
    """Draws a latent from the prior, or takes some value in its support where that is improper."""
    try:
        return _drawn(name, fn, transform)
    except NotImplementedError:
        value = unconstrained_zeros(transform.inverse_shape(fn.shape()), arguments)
        return value, transform(value)


def _check_sites(reader: SiteReader, guide: Callable | None, given: Mapping[str, Any]) -> None:
    if not reader.values:
        raise ValueError(
            "Expected a model with latent sites; it has none. Its log density is its log evidence."
        )
    for name, (fn, indices) in reader.subsamples.items():
        check_full_plate(name, fn, indices)
    for name in reader.values:
        site = reader.sites[name]
        if isinstance(site["scale"], Tensor) or site["scale"] != 1:
            raise NotImplementedError(
                f"Expected a latent without scale at site '{name}': its prior is no density then."
            )
        if guide is not None and site["mask"] is not None and site["mask"] is not True:
            raise NotImplementedError(
                f"Expected no mask at the latent '{name}' where chains start from a guide; start from the prior "
                "(guide=None)."
            )
    _check_shapes({name: site for name, site in reader.sites.items() if name not in given})


def _check_shapes(sites: Mapping[str, Any]) -> None:
    """Raises for a site with batch dims that belong to no plate."""
    for name, site in sites.items():
        fn, value = site["fn"], site["value"]
        frames = {frame.dim: frame.size for frame in site["cond_indep_stack"] if frame.vectorized}
        own = value.shape[: value.dim() - fn.event_dim] if isinstance(value, Tensor) else ()
        for i, size in enumerate(reversed(torch.broadcast_shapes(fn.batch_shape, own))):
            expected = frames.get(-1 - i, 1)
            if size != expected and expected >= 0 and not site["infer"].get("_deterministic"):
                raise ValueError(
                    f"Expected size {expected} at batch dim {-1 - i} of site '{name}'; got {size}. Declare dims by "
                    "plates or .to_event()."
                )


def _flattened(unconstrained: Mapping[str, Tensor]) -> tuple[dict[str, Slot], Tensor]:
    """Returns the slots of latents, in model order, and the position that holds them."""
    slots, first = {}, 0
    for name, value in unconstrained.items():
        slots[name] = Slot(first, first + prod(value.shape[2:]), value.shape[2:])
        first = slots[name].last
    return slots, torch.cat([value.reshape(value.shape[:2] + (-1,)) for value in unconstrained.values()], -1)


def _check_finite(reader: SiteReader, path: TemperedPath) -> None:
    for name, value in reader.unconstrained.items():
        if not value.isfinite().all():
            raise ValueError(
                f"Expected draws of site '{name}' inside its support; got some on its edge, where the unconstrained "
                "value is not finite. Use float64, or a prior with less mass at the edge."
            )
    for name, log_prob in {**reader.prior, **reader.likelihood}.items():
        bad = ~log_prob.isfinite()
        # A chain may start where the data are impossible, and weighs nothing; but not all chains of a data set.
        excused = (log_prob == -torch.inf) & (~bad).any(0) & (name in reader.likelihood)
        if (bad & ~excused).any():
            raise ValueError(
                f"Expected a finite log density at site '{name}' where the chains start; got "
                f"{log_prob[bad & ~excused][0].item()} in {int(bad.sum())} of {bad.numel()} chains."
            )
    if path.start is not None:
        density = path.start.log_prob(reader.values, path.plates)
        if not density.isfinite().all():
            raise ValueError("Expected a guide with finite log densities at its own draws; got others.")


_NOT_BATCHED = (
    "Expected a model that takes batch dims of chains and data sets, left of its plates; at site '{}', {}. Count dims "
    "from the right: z[..., i], z.sum(-1), torch.stack([a, b], -1)."
)
