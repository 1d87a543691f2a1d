"""Where annealing starts: the checks of a model and its data, and the first positions of its chains.

What is checked here once, the densities on the way need not check. Change this module when models, data or starts may
be of another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_nami.inference.site_messages import OutsideSupport, with_idle_dims
from pyro_nami.inference.target import Extent, Target, differing_site, log_densities, unsampled
from pyro_nami.inference.tempering import (
    Point,
    TemperedPath,
    bijection,
    guide_log_density,
    guide_sites,
    is_latent,
    note_site,
)
from pyro_nami.reading.runner import Runner

__all__ = ["Start"]


@dataclass(frozen=True, eq=False)
class Start:
    """What chains start from.

    Attributes:
        target: the model, the guide (None to start from the prior), and the data.
        latents: those that chains move in, as messages of a run without batch dims.
        posterior: latent -> draws to start from, ``(chains, data sets, *plates, *event)``; None for the start's own.
    """

    target: Target
    latents: Mapping[str, Any]
    posterior: Mapping[str, Tensor] | None

    @classmethod
    def of(
        cls, target: Target, observations: Mapping[str, Any], posterior: Mapping[str, Tensor] | None
    ) -> Start:
        """Returns the start of a model with observed values, from one run without batch dims.

        Raises:
            ValueError: no latents; undeclared batch dims; observations or posterior draws that do not fit.
            NotImplementedError: scaled latents, masked ones with a guide, and those without a `bijection`.
        """
        target, sites = target.observing(observations)
        latents = {name: site for name, site in sites.items() if is_latent(site, observations)}
        _check_latents(latents, target.guide)
        _check_shapes({name: site for name, site in sites.items() if name not in observations})
        if posterior is not None:
            posterior = _with_data_sets(posterior, latents, target)
        return cls(target, latents, posterior)

    def path(self, num_chains: int, rows: slice, *, check: bool) -> tuple[TemperedPath, Tensor]:
        """Returns the path for some data sets, and positions at its start, ``(chains, data sets, size)``.

        Raises:
            ValueError: the model does not take batch dims (looked into with ``check``); a log density is not finite.
        """
        extent = self.target.extent(num_chains, rows)
        point = Point()
        sites = self._run(extent, self._values(extent, rows), point)
        if check:
            self._compare(sites, extent, rows.start)
        _check_finite(point)
        if self.target.guide is not None:
            density = guide_log_density(self.target, extent, point.values)
            if not density.isfinite().all():
                raise ValueError("Expected a guide with finite log densities at its own draws; got others.")
        shapes = {name: value.shape[2:] for name, value in point.unconstrained.items()}
        position = torch.cat([value.reshape(extent.sizes + (-1,)) for value in point.unconstrained.values()], -1)
        return TemperedPath(self.target, extent, shapes), position

    def _values(self, extent: Extent, rows: slice) -> dict[str, Tensor]:
        """Returns the latents' first values, or none of them where the model is to draw them."""
        if self.posterior is not None:
            values = {name: value[:, rows] for name, value in self.posterior.items()}
        elif self.target.guide is None:
            return {}
        else:
            with pyro.validation_enabled(False):  # the model's sites tell, by name, which draws are bad
                sites = self.target.run_guide(extent, Runner({}))
            values = {name: site["value"] for name, site in guide_sites(sites).items()}
        for name, site in self.latents.items():
            if name not in values:
                raise ValueError(
                    f"Expected a guide with a density at every latent; it has none at '{name}'. Use AutoNaMIGuide, "
                    "whose sites are no Deltas, or start from the prior (guide=None)."
                )
            own = site["fn"].shape()
            shape = extent.sizes + (1,) * (self.target.nesting - len(site["fn"].batch_shape)) + own
            if values[name].shape != shape:
                raise ValueError(
                    f"Expected values of site '{name}' of shape {tuple(shape)}: batch dims, all plate dims, event; got "
                    f"{tuple(values[name].shape)}."
                )
        for name in values.keys() - self.latents.keys():
            raise ValueError(f"Expected latents {list(self.latents)} only; the guide has '{name}' as well.")
        return values

    def _run(self, extent: Extent, values: Mapping[str, Tensor], point: Point) -> dict[str, Any]:
        """Runs the model for all chains, at given values of its latents or at draws of their prior."""
        runner = Runner({**extent.data, **values}, note=partial(note_site, point, extent))
        try:
            return self.target.run_model(extent, runner)
        except OutsideSupport:
            raise
        except NotImplementedError as error:
            failed = unsampled(runner)
            if failed is None:
                raise
            raise NotImplementedError(
                f"Expected a prior that can be sampled; site '{failed['name']}' ({type(failed['fn']).__name__}) "
                "cannot. Start from a guide."
            ) from error
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            name = "" if runner.last is None else runner.last["name"]
            raise ValueError(_NOT_BATCHED.format(name, f"or behind it, the run fails ({error})")) from error

    def _compare(self, sites: Mapping[str, Any], extent: Extent, first: int) -> None:
        """Raises where the first and the last chain have other densities in a run of their own."""
        together = log_densities(sites)
        for index in {(0, 0), (extent.sizes[0] - 1, extent.sizes[1] - 1)}:
            one = self.target.one(first + index[1])
            values = {
                name: sites[name]["value"][index].reshape(site["fn"].shape())
                for name, site in self.latents.items()
            }
            alone = log_densities(self.target.run_model(one, Runner({**one.data, **values})))
            name = differing_site(together, index, alone)
            if name is not None:
                raise ValueError(_NOT_BATCHED.format(name, "the log density is another in a run of its own"))


def _check_latents(latents: Mapping[str, Any], guide: Callable | None) -> None:
    if not latents:
        raise ValueError(
            "Expected a model with latent sites; it has none. Its log density is its log evidence."
        )
    for name, site in latents.items():
        bijection(site)
        if isinstance(site["scale"], Tensor) or site["scale"] != 1:
            raise NotImplementedError(
                f"Expected a latent without scale at site '{name}': its prior is no density then."
            )
        if guide is not None and site["mask"] is not None and site["mask"] is not True:
            raise NotImplementedError(
                f"Expected no mask at the latent '{name}' where chains start from a guide; start from the prior "
                "(guide=None)."
            )


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


def _with_data_sets(
    posterior: Mapping[str, Tensor], latents: Mapping[str, Any], target: Target
) -> dict[str, Tensor]:
    """Returns posterior draws with a dim of data sets and all plate dims."""
    batch = 1 if target.data.num is None else 2
    result = {}
    for name, site in latents.items():
        if name not in posterior:
            raise ValueError(f"Expected posterior draws of every latent; got none of '{name}'.")
        value = with_idle_dims(posterior[name], site, target.nesting, batch)
        result[name] = value.unsqueeze(1) if batch == 1 else value
    return result


def _check_finite(point: Point) -> None:
    for name, value in point.unconstrained.items():
        if not value.isfinite().all():
            raise ValueError(
                f"Expected draws of site '{name}' inside its support; got some on its edge, where the unconstrained "
                "value is not finite. Use float64, or a prior with less mass at the edge."
            )
    for name, log_prob in {**point.prior, **point.likelihood}.items():
        bad = ~log_prob.isfinite()
        # A chain may start where the data are impossible, and weighs nothing; but not all chains of a data set.
        excused = (log_prob == -torch.inf) & (~bad).any(0) & (name in point.likelihood)
        if (bad & ~excused).any():
            raise ValueError(
                f"Expected a finite log density at site '{name}' where the chains start; got "
                f"{log_prob[bad & ~excused][0].item()} in {int(bad.sum())} of {bad.numel()} chains."
            )


_NOT_BATCHED = (
    "Expected a model that takes batch dims of chains and data sets, left of its plates; at site '{}', {}. Count dims "
    "from the right: z[..., i], z.sum(-1), torch.stack([a, b], -1)."
)
