r"""The path of densities that annealing follows, from a start that can be sampled to the joint density.

.. math:: f_t(u) = f_0(z)^{1 - t} \, p(z, x)^t \, |\mathrm{d}z / \mathrm{d}u|, \qquad 0 \le t \le 1,

at unconstrained positions u of the latents z; f_0 is their prior, or a guide. Change this module to change what a path
runs between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from pyro.distributions import MaskedDistribution
from pyro.poutine.util import site_is_factor, site_is_subsample
from torch import Tensor
from torch.distributions import Transform, biject_to

from pyro_nami.inference.site_messages import is_delta, log_density
from pyro_nami.inference.target import Extent, Target, log_densities, per_draw
from pyro_nami.reading.runner import Runner

__all__ = [
    "PathValue",
    "Point",
    "TemperedPath",
    "bijection",
    "guide_sites",
    "is_latent",
]


class Point(NamedTuple):
    """What `TemperedPath.note` gathers in a run of the model, by site; log densities in nats, ``(*batch)``.

    Attributes:
        values, unconstrained: of the latents, ``(*batch, *plates, *event)``.
        prior, log_jacobian: of the latents.
        likelihood: of all else, factors included.
    """

    values: dict[str, Tensor]
    unconstrained: dict[str, Tensor]
    prior: dict[str, Tensor]
    log_jacobian: dict[str, Tensor]
    likelihood: dict[str, Tensor]


class PathValue(NamedTuple):
    """Log densities at one position, in nats, ``(chains, data sets)``.

    Attributes:
        start: of the start of the path.
        ratio: of its end, less that of its start.
    """

    start: Tensor
    ratio: Tensor

    def at(self, temperature: float) -> Tensor:
        """Returns the log density of the path at an inverse temperature: 0 is the start, 1 the joint density."""
        return self.start + temperature * self.ratio


@dataclass(frozen=True, eq=False)
class TemperedPath:
    """The densities of a path, at positions ``(chains, data sets, size)`` of all chains at once.

    Args:
        target: the model, and the guide to start from; without one, paths start from the prior.
        extent: chains and data sets.
        shapes: of the latents, right of the batch dims, in the order in which a position holds them.
    """

    target: Target
    extent: Extent
    shapes: Mapping[str, torch.Size]

    def at(self, position: Tensor) -> Point:
        """Returns the point at a position, by a run of the model.

        A latent's transform is made where the model comes to it: it belongs to the present values of its parents.
        """
        parts = dict(zip(self.shapes, position.split([shape.numel() for shape in self.shapes.values()], -1)))
        unconstrained = {name: parts[name].reshape(self.extent.sizes + self.shapes[name]) for name in parts}
        point = Point({}, unconstrained, {}, {}, {})

        def choose(site: Any) -> Tensor | None:
            name = site["name"]
            return bijection(site)(unconstrained[name]) if name in unconstrained else None

        self.target.run_model(self.extent, Runner(self.extent.data, choose=choose, note=partial(self.note, point)))
        return point

    def note(self, point: Point, site: Any) -> None:
        """Adds a site to a point as the run comes to it, in which order gradients are summed as well."""
        name, value = site["name"], site["value"]
        if name in self.shapes:
            transform = bijection(site)
            # What a mask leaves out of a latent follows its prior, which integrates to one.
            point.prior.update(per_draw({name: log_density(site, _unmasked(site["fn"]))}, self.extent))
            if name not in point.unconstrained:
                point.unconstrained[name] = transform.inv(value)
            jacobian = transform.log_abs_det_jacobian(point.unconstrained[name], value)
            point.log_jacobian.update(per_draw({name: jacobian}, self.extent))
            point.values[name] = value
        elif not (site_is_subsample(site) or site["mask"] is False or site["infer"].get("_deterministic")):
            point.likelihood.update(per_draw(log_densities({name: site}), self.extent))

    def value_of(self, point: Point) -> PathValue:
        """Returns the log densities at a point."""
        prior: Any = sum(point.prior.values())
        likelihood: Any = sum(point.likelihood.values()) + torch.zeros_like(prior)
        jacobian: Any = sum(point.log_jacobian.values())
        if self.target.guide is None:
            return PathValue(prior + jacobian, likelihood)
        guide = self.target.guide_log_prob(self.extent, point.values)
        return PathValue(guide + jacobian, prior + likelihood - guide)

    @torch.no_grad()
    def value(self, position: Tensor) -> PathValue:
        """Returns the log densities at a position."""
        return self.value_of(self.at(position))

    @torch.enable_grad()
    def gradient(self, position: Tensor, temperature: float) -> Tensor:
        """Returns the gradient of the log density at an inverse temperature, of the position's shape."""
        position = position.detach().requires_grad_()
        total = self.value_of(self.at(position)).at(temperature).sum()
        return torch.autograd.grad(total, position)[0]


def is_latent(site: Any, data: Mapping[str, Any]) -> bool:
    """Whether a site is one that chains move in. An unobserved Delta is none, but a name for a value."""
    return not (
        site["is_observed"] or site["name"] in data or site_is_subsample(site) or is_delta(site["fn"])
    )


def bijection(site: Any) -> Transform:
    """Returns the transform from real space to the support of a latent.

    Raises:
        NotImplementedError: there is none.
    """
    name, fn = site["name"], _unmasked(site["fn"])
    if fn.support.is_discrete:
        raise NotImplementedError(
            f"Expected continuous latents; site '{name}' ({type(fn).__name__}) is discrete. Sum it out in the model, "
            "or use importance_sample, which takes discrete latents."
        )
    try:
        return biject_to(fn.support)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"Expected latents with a bijection from real space to their support; site '{name}' has the support "
            f"{fn.support}. Reparametrize it (poutine.reparam)."
        ) from error


def guide_sites(sites: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sites of a run of a guide that give its density, with those that it draws.

    Raises:
        NotImplementedError: it has a factor.
    """
    for name, site in sites.items():
        if site_is_factor(site):
            raise NotImplementedError(
                f"Expected a guide whose sites give its density; it has the factor '{name}' as well."
            )
    return {name: site for name, site in sites.items() if is_latent(site, {})}


def _unmasked(fn: Any) -> Any:
    return fn.base_dist if isinstance(fn, MaskedDistribution) else fn
