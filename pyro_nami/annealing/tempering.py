r"""The path of densities that annealing follows, from a start that can be sampled to the joint density.

.. math:: f_t(u) = f_0(z)^{1 - t} \, p(z, x)^t \, |\mathrm{d}z / \mathrm{d}u|, \qquad 0 \le t \le 1,

Here u is the unconstrained position of the latents z, and f_0 is their prior or a guide. `Start`
checks shapes and names once, so that densities along the path need not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions import MaskedDistribution
from pyro.poutine.util import site_is_factor, site_is_subsample
from torch import Tensor
from torch.distributions import Transform, biject_to

from pyro_nami.factors.wrappers import without
from pyro_nami.inference.site_messages import (
    OutsideSupport,
    check_declared,
    is_delta,
    log_density,
    with_idle_dims,
)
from pyro_nami.inference.target import (
    Extent,
    Target,
    in_one_line,
    log_densities,
    per_draw,
    run_for_many,
)
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.many_draws import differing_site
from pyro_nami.program.runner import Runner

__all__ = ["PathValue", "Start", "TemperedPath"]


class _NotBatched(ValueError):
    """A model does not take batch dims."""


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

    def at(self, temperature: float | Tensor) -> Tensor:
        """Returns the log density of the path at an inverse temperature: 0 is the start, 1 the joint density."""
        return self.start + temperature * self.ratio


@dataclass(frozen=True, eq=False)
class TemperedPath:
    """The densities of a path, log f_t = start + t ratio, at positions ``(chains, data sets, size)`` of all chains.

    Args:
        target: the model, and the guide to start from; without one, paths start from the prior.
        extent: chains and data sets.
        shapes: of the latents, right of the batch dims, in the order in which a position holds them.

    Example:
        >>> import pyro.distributions as dist
        >>> def model():
        ...     pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 1.0), obs=torch.tensor(2.0))
        >>> path, position = Start.of(Target(model, None, (), {}), {}, None).path(3, slice(0, 1), check=True)
        >>> path.gradient(torch.ones(3, 1, 1), 0.5)[0]  # at z = 1 of -z^2 / 2 - 0.5 (2 - z)^2 / 2
        tensor([[-0.5000]])
    """

    target: Target
    extent: Extent
    shapes: Mapping[str, torch.Size]

    def at(self, position: Tensor) -> Point:
        """Returns the point at a position, by a run of the model.

        A latent's transform is made where the model comes to it: it belongs to the present values of its parents.
        """
        parts = dict(
            zip(self.shapes, position.split([shape.numel() for shape in self.shapes.values()], -1))
        )
        unconstrained = {
            name: parts[name].reshape(self.extent.sizes + self.shapes[name]) for name in parts
        }
        point = Point({}, unconstrained, {}, {}, {})

        def choose(site: Any) -> Tensor | None:
            name = site["name"]
            return _bijection(site)(unconstrained[name]) if name in unconstrained else None

        self.target.run_model(
            self.extent, Runner(self.extent.data, choose=choose, note=partial(self.note, point))
        )
        return point

    def note(self, point: Point, site: Any) -> None:
        """Adds a site to a point as the run comes to it, in which order gradients are summed as well."""
        name, value = site["name"], site["value"]
        if name in self.shapes:
            transform, prior = _bijection(site), without(site["fn"], MaskedDistribution)
            # What a mask leaves out of a latent follows its prior, which integrates to one.
            point.prior.update(per_draw({name: log_density(site, prior)}, self.extent))
            if name not in point.unconstrained:
                point.unconstrained[name] = transform.inv(value)
            jacobian = transform.log_abs_det_jacobian(point.unconstrained[name], value)
            point.log_jacobian.update(per_draw({name: jacobian}, self.extent))
            point.values[name] = value
        elif not (
            site_is_subsample(site) or site["mask"] is False or site["infer"].get("_deterministic")
        ):
            point.likelihood.update(per_draw(log_densities({name: site}), self.extent))

    def value_of(self, point: Point) -> PathValue:
        """Returns the log densities at a point."""
        prior: Any = sum(point.prior.values())
        likelihood: Any = sum(point.likelihood.values()) + torch.zeros_like(prior)
        jacobian: Any = sum(point.log_jacobian.values())
        if self.target.guide is None:
            return PathValue(prior + jacobian, likelihood)
        start = self.target.defended(self.target.guide_log_prob(self.extent, point.values), prior)
        return PathValue(start + jacobian, prior + likelihood - start)

    @torch.no_grad()
    def value(self, position: Tensor) -> PathValue:
        """Returns the log densities at a position."""
        return self.value_of(self.at(position))

    @torch.enable_grad()
    def gradient(self, position: Tensor, temperature: float | Tensor) -> Tensor:
        """Returns the gradient of the log density at an inverse temperature, of the position's shape."""
        position = position.detach().requires_grad_()
        total = self.value_of(self.at(position)).at(temperature).sum()
        return torch.autograd.grad(total, position)[0]


@dataclass(frozen=True, eq=False)
class Start:
    """What chains start from.

    Attributes:
        target: the model, the guide (None to start from the prior), and the data.
        latents: those that chains move in, as messages of a run without batch dims.
        given: latent -> draws to start from, ``(chains, *data sets, *site shape)``; None for the start's own.
    """

    target: Target
    latents: Mapping[str, Any]
    given: Mapping[str, Tensor] | None

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of unconstrained values, right of batch dims: of the latents, ``(*plates, *event)``."""
        own = {
            name: _bijection(site).inverse_shape(site["fn"].shape())
            for name, site in self.latents.items()
        }
        idle = {
            name: self.target.nesting - len(site["fn"].batch_shape)
            for name, site in self.latents.items()
        }
        return {name: torch.Size((1,) * idle[name]) + own[name] for name in own}

    @classmethod
    def of(
        cls, target: Target, observations: Mapping[str, Any], given: Mapping[str, Tensor] | None
    ) -> Start:
        """Returns the start of a model with observed values, from one run without batch dims, which is checked."""
        target, sites = target.observing(observations)
        latents = {name: site for name, site in sites.items() if _is_latent(site, observations)}
        _check_latents(latents, target.guide)
        for name, site in sites.items():
            if name not in observations and not site["infer"].get("_deterministic"):
                check_declared(site, target.nesting)
        return cls(target, latents, given)

    def checked(self, num_chains: int, rows: slice) -> Start:
        """Returns the start with a model that takes batch dims, as runs of single chains show for some data sets.

        Raises:
            ValueError: there is none, or as `path`.
        """

        def difference(target: Target) -> str | None:
            try:
                replace(self, target=target).path(num_chains, rows, check=True)
            except _NotBatched as error:
                return str(error)
            return None

        with forked_rng():
            target, reason = run_for_many(self.target, difference)
        if reason is not None:
            raise ValueError(reason)
        return replace(self, target=target)

    def path(
        self, num_chains: int, rows: slice, *, check: bool = False
    ) -> tuple[TemperedPath, Tensor]:
        """Returns the path for some data sets, and positions at its start, ``(chains, data sets, size)``.

        With ``check``, runs of single chains tell whether the model takes batch dims; it raises where it does not.
        """
        extent = self.target.extent(num_chains, rows)
        path, point = TemperedPath(self.target, extent, self.shapes), Point({}, {}, {}, {}, {})
        runner = Runner(
            {**extent.data, **self._values(extent, rows)}, note=partial(path.note, point)
        )
        try:
            sites = self.target.run_model(extent, runner)
        except (OutsideSupport, NotImplementedError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise _NotBatched(_NOT_BATCHED.format(in_one_line(error))) from error
        if check:
            self._compare(sites, extent, rows.start)
        _check_finite(point)
        if not path.value_of(point).start.isfinite().all():
            raise ValueError(
                "Expected a guide with finite log densities at its own draws; got others."
            )
        parts = [point.unconstrained[name].reshape(extent.sizes + (-1,)) for name in path.shapes]
        return path, torch.cat(parts, -1)

    def _values(self, extent: Extent, rows: slice) -> dict[str, Tensor]:
        """Returns the latents' first values, with all plate dims; none where the model is to draw them."""
        if self.given is not None:
            whose, single = "given draws", self.target.data.num is None
            given = {name: self.given[name] for name in self.latents if name in self.given}
            values = {
                name: value.unsqueeze(1) if single else value[:, rows]
                for name, value in given.items()
            }
        elif self.target.guide is None:
            return {}
        else:
            whose = "a guide with a density"
            # the model's sites tell, by name, which draws are bad
            with pyro.validation_enabled(False):
                sites = self.target.run_guide(extent, Runner({}))
            for name, site in sites.items():
                if site_is_factor(site):
                    raise NotImplementedError(
                        f"Expected a guide whose sites give its density; it has the factor '{name}' as well."
                    )
            values = {name: site["value"] for name, site in sites.items() if _is_latent(site, {})}
            if self.target.prior_share:
                prior = self.target.run_model(extent, Runner(extent.data))
                chosen = torch.rand(extent.sizes[0]) < self.target.prior_share
                for name, value in values.items():
                    here = chosen.to(value.device).view(-1, *[1] * (value.dim() - 1))
                    values[name] = prior[name]["value"].where(here, value)
        for name in sorted(self.latents.keys() ^ values.keys()):
            raise ValueError(
                f"Expected {whose} at every latent, {', '.join(map(repr, self.latents))}, and no other; got "
                + (f"'{name}' as well." if name in values else f"none at '{name}'.")
            )
        return {
            name: with_idle_dims(values[name], site, self.target.nesting, 2)
            for name, site in self.latents.items()
        }

    def _compare(self, sites: Mapping[str, Any], extent: Extent, first: int) -> None:
        """Raises where the first and the last chain have other densities in a run of their own."""

        def alone_at(index: Any) -> dict[str, Tensor]:
            one = self.target.one(first + index[1])
            values = {
                name: sites[name]["value"][index].reshape(site["fn"].shape())
                for name, site in self.latents.items()
            }
            return log_densities(self.target.run_model(one, Runner({**one.data, **values})))

        ends = {(0, 0), (extent.sizes[0] - 1, extent.sizes[1] - 1)}
        name = differing_site(log_densities(sites), ends, alone_at)
        if name is not None:
            raise _NotBatched(
                _NOT_BATCHED.format(f"site '{name}' has another log density in a run of its own")
            )


def _is_latent(site: Any, data: Mapping[str, Any]) -> bool:
    """Whether a site is one that chains move in. An unobserved Delta is none, but a name for a value."""
    return not (
        site["is_observed"]
        or site["name"] in data
        or site_is_subsample(site)
        or is_delta(site["fn"])
    )


def _bijection(site: Any) -> Transform:
    """Returns the transform from real space to the support of a latent.

    Raises:
        NotImplementedError: there is none.
    """
    name, fn = site["name"], without(site["fn"], MaskedDistribution)
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


def _check_latents(latents: Mapping[str, Any], guide: Callable | None) -> None:
    if not latents:
        raise ValueError(
            "Expected a model with latent sites; it has none. Its log density is its log evidence."
        )
    for name, site in latents.items():
        _bijection(site)
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
