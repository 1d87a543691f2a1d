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

from pyro_nami.inference.site_messages import OutsideSupport, check_declared, with_idle_dims
from pyro_nami.inference.target import Extent, Target, differing_site, in_one_line, log_densities
from pyro_nami.inference.tempering import Point, TemperedPath, bijection, guide_sites, is_latent
from pyro_nami.reading.runner import Runner

__all__ = ["Start"]


@dataclass(frozen=True, eq=False)
class Start:
    """What chains start from.

    Attributes:
        target: the model, the guide (None to start from the prior), and the data.
        latents: those that chains move in, as messages of a run without batch dims.
        posterior: latent -> draws to start from, ``(chains, *data sets, *site shape)``; None for the start's own.
    """

    target: Target
    latents: Mapping[str, Any]
    posterior: Mapping[str, Tensor] | None

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of unconstrained values, right of batch dims: of the latents, ``(*plates, *event)``."""
        own = {name: bijection(site).inverse_shape(site["fn"].shape()) for name, site in self.latents.items()}
        idle = {name: self.target.nesting - len(site["fn"].batch_shape) for name, site in self.latents.items()}
        return {name: torch.Size((1,) * idle[name]) + own[name] for name in own}

    @classmethod
    def of(
        cls, target: Target, observations: Mapping[str, Any], posterior: Mapping[str, Tensor] | None
    ) -> Start:
        """Returns the start of a model with observed values, from one run without batch dims, which is checked."""
        target, sites = target.observing(observations)
        latents = {name: site for name, site in sites.items() if is_latent(site, observations)}
        _check_latents(latents, target.guide)
        for name, site in sites.items():
            if name not in observations and not site["infer"].get("_deterministic"):
                check_declared(site, target.nesting)
        return cls(target, latents, posterior)

    def path(self, num_chains: int, rows: slice, *, check: bool) -> tuple[TemperedPath, Tensor]:
        """Returns the path for some data sets, and positions at its start, ``(chains, data sets, size)``.

        With ``check``, runs of single chains tell whether the model takes batch dims.
        """
        extent = self.target.extent(num_chains, rows)
        path, point = TemperedPath(self.target, extent, self.shapes), Point({}, {}, {}, {}, {})
        runner = Runner({**extent.data, **self._values(extent, rows)}, note=partial(path.note, point))
        try:
            sites = self.target.run_model(extent, runner)
        except (OutsideSupport, NotImplementedError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ValueError(_NOT_BATCHED.format(in_one_line(error))) from error
        if check:
            self._compare(sites, extent, rows.start)
        _check_finite(point)
        if not path.value_of(point).start.isfinite().all():
            raise ValueError("Expected a guide with finite log densities at its own draws; got others.")
        parts = [point.unconstrained[name].reshape(extent.sizes + (-1,)) for name in path.shapes]
        return path, torch.cat(parts, -1)

    def _values(self, extent: Extent, rows: slice) -> dict[str, Tensor]:
        """Returns the latents' first values, with all plate dims; none where the model is to draw them."""
        if self.posterior is not None:
            whose, single = "posterior draws", self.target.data.num is None
            given = {name: self.posterior[name] for name in self.latents if name in self.posterior}
            values = {name: value.unsqueeze(1) if single else value[:, rows] for name, value in given.items()}
        elif self.target.guide is None:
            return {}
        else:
            whose = "a guide with a density"
            with pyro.validation_enabled(False):  # the model's sites tell, by name, which draws are bad
                sites = self.target.run_guide(extent, Runner({}))
            values = {name: site["value"] for name, site in guide_sites(sites).items()}
        for name in sorted(self.latents.keys() ^ values.keys()):
            raise ValueError(
                f"Expected {whose} at every latent, {', '.join(map(repr, self.latents))}, and no other; got "
                + (f"'{name}' as well." if name in values else f"none at '{name}'.")
            )
        return {
            name: with_idle_dims(values[name], site, self.target.nesting, 2) for name, site in self.latents.items()
        }

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
                raise ValueError(_NOT_BATCHED.format(f"site '{name}' has another log density in a run of its own"))


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
    "Expected a model that takes batch dims of chains and data sets, left of its plates; {}. Count dims from the "
    "right: z[..., i], z.sum(-1), torch.stack([a, b], -1)."
)
