r"""The path of densities that annealing follows, from a start that can be sampled to the joint density.

.. math:: f_t(u) = f_0(z)^{1 - t} \, p(z, x)^t \, |\mathrm{d}z / \mathrm{d}u|, \qquad 0 \le t \le 1,

Here u is the unconstrained position of the latents z, and f_0 is their prior or a guide. `Start`
checks shapes and names once, so that densities along the path need not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions import LogNormal, MaskedDistribution, MultivariateNormal
from pyro.distributions.transforms import LowerCholeskyAffine
from pyro.poutine.util import site_is_factor, site_is_subsample
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    ComposeTransform,
    IndependentTransform,
    Transform,
    biject_to,
    constraints,
)

from pyro_nami.factors.wrappers import innermost, without
from pyro_nami.inference.site_messages import (
    OutsideSupport,
    Sites,
    Values,
    check_declared,
    check_latents,
    log_density,
    values_at,
    with_idle_dims,
)
from pyro_nami.inference.target import (
    Extent,
    Target,
    log_densities,
    per_draw,
    run_for_many,
)
from pyro_nami.program.first_run import is_delta
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.many_draws import differing_site
from pyro_nami.program.runner import Runner

__all__ = ["PathValue", "Start", "TemperedPath"]


class Point(NamedTuple):
    """Latents and log densities at one position, by site; log densities in nats, ``(*batch)``.

    Attributes:
        values: the latents, ``(*batch, *plates, *event)``.
        unconstrained: the latents in real space, in the same layout.
        prior: the latents' log densities.
        log_jacobian: log |dz / du| of the latents.
        likelihood: the log densities of all other sites, factors included.
    """

    values: Values
    unconstrained: Values
    prior: Values
    log_jacobian: Values
    likelihood: Values


class PathValue(NamedTuple):
    """Log densities at one position, in nats, ``(chains, data sets)``.

    Attributes:
        start: log density of the start of the path.
        ratio: log density of the end of the path, less that of its start.
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
        target: the model, and the guide to start from; without a guide, paths start from the prior.
        extent: chains and data sets.
        shapes: shapes of the unconstrained latents, right of the batch dims, in their order in a position.
        standardized: latents in units of their priors' locations and scales, which other latents may move (a
            non-centred parameterization); see `Start.scaled`.

    Example:
        >>> import pyro.distributions as dist
        >>> from pyro_nami.program.program import Program
        >>> def model():
        ...     pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 1.0), obs=torch.tensor(2.0))
        >>> path, position = Start.of(Target(Program(model, (), {}), None), {}, None).path(3, slice(0, 1))
        >>> path.gradient(torch.ones(3, 1, 1), 0.5)[0]  # at z = 1 of -z^2 / 2 - 0.5 (2 - z)^2 / 2
        tensor([[-0.5000]])
    """

    target: Target
    extent: Extent
    shapes: Mapping[str, torch.Size]
    standardized: frozenset[str] = frozenset()

    def at(self, position: Tensor) -> Point:
        """Returns the point at a position, by a run of the model.

        A latent's transform is made where the model comes to the latent, as it may depend on the latent's parents.
        """
        sizes = [shape.numel() for shape in self.shapes.values()]
        unconstrained = {
            name: part.reshape(self.extent.sizes + shape)
            for (name, shape), part in zip(self.shapes.items(), position.split(sizes, -1))
        }

        def choose(site: Any) -> Tensor | None:
            name = site["name"]
            return self._bijection(site)(unconstrained[name]) if name in unconstrained else None

        runner = Runner(self.extent.data, choose=choose)
        return self.point(self.target.run_model(self.extent, runner), unconstrained)

    def point(self, sites: Sites, unconstrained: Values | None = None) -> Point:
        """Returns the point of a run's sites, whose unconstrained values are computed where they are not given."""
        latents = {name: site for name, site in sites.items() if name in self.shapes}
        values = {name: site["value"] for name, site in latents.items()}
        transforms = {name: self._bijection(site) for name, site in latents.items()}
        if unconstrained is None:
            unconstrained = {name: transforms[name].inv(value) for name, value in values.items()}
        # A masked latent follows its prior, which integrates to one.
        prior = {
            name: log_density(site, without(site["fn"], MaskedDistribution))
            for name, site in latents.items()
        }
        log_jacobian = {
            name: transforms[name].log_abs_det_jacobian(unconstrained[name], value)
            for name, value in values.items()
        }
        others = {
            name: site
            for name, site in sites.items()
            if name not in latents
            and site["mask"] is not False
            and not site["infer"].get("_deterministic")
        }
        densities = prior, log_jacobian, log_densities(others)
        return Point(values, unconstrained, *(per_draw(part, self.extent) for part in densities))

    def _bijection(self, site: Any) -> Transform:
        """Returns the transform from real space to the support of a latent."""
        if site["name"] not in self.standardized:
            return _bijection(site)
        fn: Any = innermost(site["fn"])
        if isinstance(fn, MultivariateNormal):
            each: Transform = _Correlated(fn.loc, fn.scale_tril)
        else:
            each = ComposeTransform([AffineTransform(fn.loc, fn.scale), biject_to(fn.support)])
        return IndependentTransform(each, site["fn"].event_dim - each.domain.event_dim)

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


class _Correlated(LowerCholeskyAffine):
    """The map from standard Normal variables to a Normal vector, with log determinants for a batch of factors."""

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return self.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1).expand(x.shape[:-1])


@dataclass(frozen=True, eq=False)
class Start:
    """The distribution that chains start from.

    Attributes:
        target: the model, the guide (None to start from the prior), and the data.
        latents: the sites that chains move in, as messages of a run without batch dims.
        given: latent -> draws to start from, ``(chains, *data sets, *site shape)``; None to draw from guide or prior.
    """

    target: Target
    latents: Sites
    given: Values | None

    @classmethod
    def of(cls, target: Target, observations: Mapping[str, Any], given: Values | None) -> Start:
        """Returns the start of a model with observed values, from one run without batch dims, which is checked."""
        target, sites = target.observing(observations)
        latents = {name: site for name, site in sites.items() if _is_latent(site, observations)}
        _check_latents(latents, target.guide)
        for name, site in sites.items():
            if name not in observations and not site["infer"].get("_deterministic"):
                check_declared(site, target.nesting)
        return cls(target, latents, given)

    @property
    def scaled(self) -> list[str]:
        """The latents whose priors have locations and scales, with a support that these do not move."""
        found = []
        for name, site in self.latents.items():
            fn = innermost(site["fn"])
            is_real = fn.support is constraints.real and hasattr(fn, "loc") and hasattr(fn, "scale")
            if is_real or isinstance(fn, (LogNormal, MultivariateNormal)):
                found.append(name)
        return found

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The latents' shapes in real space, right of the batch dims, ``(*plates, *event)``."""
        shapes = {}
        for name, site in self.latents.items():
            fn = site["fn"]
            idle = (1,) * (self.target.nesting - len(fn.batch_shape))
            shapes[name] = torch.Size(idle) + _bijection(site).inverse_shape(fn.shape())
        return shapes

    def checked(self, num_chains: int, rows: slice) -> Start:
        """Returns the start with a model that takes batch dims, as runs of single chains show for some data sets.

        Raises:
            ValueError: the model takes no batch dims.
        """
        with forked_rng():
            target, reason = run_for_many(
                self.target,
                lambda target: replace(self, target=target)._difference(num_chains, rows),
                raised=(OutsideSupport, NotImplementedError, torch.OutOfMemoryError),
            )
        if reason is not None:
            raise ValueError(
                f"Expected a model that takes batch dims of chains and data sets, left of its plates; {reason}. Count "
                "dims from the right: z[..., i], z.sum(-1), torch.stack([a, b], -1)."
            )
        return replace(self, target=target)

    def path(
        self, num_chains: int, rows: slice, standardized: frozenset[str] = frozenset()
    ) -> tuple[TemperedPath, Tensor]:
        """Returns the path for some data sets, and positions at its start, ``(chains, data sets, size)``.

        Args:
            num_chains, rows: how many chains, and which data sets.
            standardized: see `TemperedPath`.

        Raises:
            ValueError: a log density or an unconstrained value that is not finite there.
        """
        path, sites = self._run(num_chains, rows, standardized)
        point = path.point(sites)
        _check_finite(point)
        if not path.value_of(point).start.isfinite().all():
            raise ValueError(
                "Expected a guide with finite log densities at its own draws; got others."
            )
        parts = [
            point.unconstrained[name].reshape(path.extent.sizes + (-1,)) for name in path.shapes
        ]
        return path, torch.cat(parts, -1)

    def _run(
        self, num_chains: int, rows: slice, standardized: frozenset[str] = frozenset()
    ) -> tuple[TemperedPath, Sites]:
        """Returns the path for some data sets, and the sites of a run of the model at its start."""
        extent = self.target.extent(num_chains, rows)

        def note(site: Any) -> None:  # a latent outside its support, before other sites fail at it
            if site["name"] in self.latents:
                log_density(site)

        runner = Runner({**extent.data, **self._values(extent, rows)}, note=note)
        path = TemperedPath(self.target, extent, self.shapes, standardized)
        return path, self.target.run_model(extent, runner)

    def _difference(self, num_chains: int, rows: slice) -> str | None:
        """Returns where the first and the last chain differ from runs of one chain; None if nowhere."""
        path, sites = self._run(num_chains, rows)
        path.point(sites)

        def alone_at(index: Any) -> Values:
            one = self.target.one(rows.start + index[1])
            values = values_at(index, sites, self.latents)
            return log_densities(self.target.run_model(one, Runner({**one.data, **values})))

        chains, data_sets = path.extent.sizes
        ends = {(0, 0), (chains - 1, data_sets - 1)}
        name = differing_site(log_densities(sites), ends, alone_at)
        return name and f"site '{name}' has another log density in a run of its own"

    def _values(self, extent: Extent, rows: slice) -> Values:
        """Returns the latents' first values, with all plate dims; none where the model is to draw them."""
        if self.given is not None:
            single, whose = self.target.data.num is None, "given draws"
            values = {
                name: value.unsqueeze(1) if single else value[:, rows]
                for name, value in self.given.items()
                if name in self.latents
            }
        elif self.target.guide is not None:
            values, whose = self._guide_draws(extent), "a guide with a density"
        else:
            return {}
        check_latents(whose, values, self.latents)
        return {
            name: with_idle_dims(values[name], site, self.target.nesting, 2)
            for name, site in self.latents.items()
        }

    def _guide_draws(self, extent: Extent) -> dict[str, Tensor]:
        """Returns draws of the guide, or in part of the prior, by `Target.prior_share`."""
        with pyro.validation_enabled(False):  # the model's sites tell, by name, which draws are bad
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
        return values


def _is_latent(site: Any, data: Mapping[str, Any]) -> bool:
    """Whether chains move in a site. An unobserved Delta is no latent, but a name for a value."""
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


def _check_latents(latents: Sites, guide: Callable | None) -> None:
    if not latents:
        raise ValueError(
            "Expected a model with latent sites; it has none. Its log density is its log evidence."
        )
    for name, site in latents.items():
        _bijection(site)
        if isinstance(site["scale"], Tensor) or site["scale"] != 1:
            raise NotImplementedError(
                f"Expected no scale at the latent '{name}': a scaled prior is no density."
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
