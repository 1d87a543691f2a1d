"""The path that annealing follows: from a start that can be sampled to the joint density, in unconstrained space.

`SiteReader` is one run of a model at chosen values, `GuideStart` the density of a guide, and `TemperedPath` makes a
density of both, for the positions of all chains and data sets at once. Change this module to change what a path runs
between, or how a model is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.distributions import MaskedDistribution
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_factor, site_is_subsample
from torch import Tensor
from torch.distributions import Transform, biject_to

from pyro_nami.inference.sites import is_delta
from pyro_nami.reading.runner import takes_observations

__all__ = ["GuideStart", "PathValue", "SiteError", "SiteReader", "Slot", "TemperedPath"]

# Site, its distribution and its transform -> its unconstrained and its constrained value.
Choose = Callable[[str, Any, Transform], tuple[Tensor, Tensor]]


class SiteError(ValueError):
    """What is wrong with a site, which the message names."""


class SiteReader(Messenger):
    """Runs a model with chosen values of its latents, and reads the log density of every site.

    A latent's transform is made where the model comes to it, so it belongs to the present values of its parents.

    Args:
        batch: the shape of the batch dims.
        choose: gives every latent its unconstrained and its constrained value.
        data: observed site -> value, in place of the model's own.

    Attributes:
        values, unconstrained: latent -> ``(*batch, *plates, *event)``.
        prior, likelihood, log_jacobian: site -> log density in nats, ``(*batch)``. Factors belong to the likelihood.
        sites: all sites but plates, as messages, and ``subsamples`` the plates' distributions and indices.
        last: the site that the run came to last.
    """

    def __init__(self, batch: tuple[int, ...], choose: Choose, data: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.batch, self.choose, self.data = batch, choose, data
        self.values: dict[str, Tensor] = {}
        self.unconstrained: dict[str, Tensor] = {}
        self.prior: dict[str, Tensor] = {}
        self.likelihood: dict[str, Tensor] = {}
        self.log_jacobian: dict[str, Tensor] = {}
        self.sites: dict[str, Any] = {}
        self.subsamples: dict[str, Any] = {}
        self.last = ""

    def run(
        self, model: Callable, args: tuple, kwargs: Mapping[str, Any], plates: tuple[pyro.plate, ...] = ()
    ) -> SiteReader:
        """Runs the model inside of plates, unseen by the handlers outside; returns the reader."""
        with ExitStack() as stack:
            for context in (poutine.block(), self, *plates):
                stack.enter_context(context)
            model(*args, **kwargs)
        return self

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if site_is_subsample(msg):
            self.subsamples[name] = fn, msg["value"]
            return
        self.last, self.sites[name] = name, msg
        if name in self.data:
            msg["value"], msg["is_observed"] = self.data[name], True
        elif not msg["is_observed"] and is_delta(fn):
            msg["value"] = fn.rsample()  # not a latent: a name for a value
        if msg["value"] is None:
            self._choose_latent(name, fn, msg)
        elif msg["mask"] is not False and not msg["infer"].get("_deterministic"):
            log_prob = _log_prob(name, fn, msg["value"])
            self.likelihood[name] = self._total(name, scale_and_mask(log_prob, msg["scale"], msg["mask"]))

    def _choose_latent(self, name: str, fn: Any, msg: Any) -> None:
        if isinstance(fn, MaskedDistribution):
            fn = fn.base_dist
        transform = _transform(name, fn)
        self.unconstrained[name], msg["value"] = self.choose(name, fn, transform)
        self.values[name] = msg["value"]
        # What a mask leaves out of a latent follows its prior, which integrates to one.
        self.prior[name] = self._total(name, _log_prob(name, fn, msg["value"]))
        jacobian = transform.log_abs_det_jacobian(self.unconstrained[name], msg["value"])
        self.log_jacobian[name] = self._total(name, jacobian)

    def _total(self, name: str, log_prob: Tensor) -> Tensor:
        """Returns a log density summed over all but the batch dims."""
        if log_prob.shape[: len(self.batch)] != self.batch:
            raise SiteError(
                f"Expected batch dims {self.batch} at site '{name}'; got {tuple(log_prob.shape)}."
            )
        return log_prob.reshape(self.batch + (-1,)).sum(-1)


class GuideStart:
    """A guide as the start of a path: its draws, and its density at any values.

    Args:
        guide: a guide; its ``log_prob(latents, *args, observations=...)`` is used where it has one, else it is
            replayed.
        args, kwargs: the model's arguments.
        observations: as given by the user; reaches guides that take it.
    """

    def __init__(
        self, guide: Callable, args: tuple, kwargs: Mapping[str, Any], observations: Mapping[str, Tensor]
    ) -> None:
        self.guide, self.args, self.kwargs = guide, args, dict(kwargs)
        self.density = getattr(guide, "log_prob", None)
        if observations and takes_observations(guide, is_guide=True):
            self.kwargs["observations"] = observations

    def draw(self, plates: tuple[pyro.plate, ...]) -> dict[str, Tensor]:
        """Returns a draw at every site with a density, ``(*batch, *plates, *event)``."""
        return _GuideReader({}).run(self, plates).values

    def log_prob(self, values: Mapping[str, Tensor], plates: tuple[pyro.plate, ...]) -> Tensor:
        """Returns the log density of values in nats, ``(*batch)``."""
        if self.density is not None:
            return self.density(values, *self.args, **self.kwargs)
        batch = tuple(plate.size for plate in plates)
        log_probs = _GuideReader(values).run(self, plates).log_probs
        return torch.stack([value.reshape(batch + (-1,)).sum(-1) for value in log_probs]).sum(0)


class _GuideReader(Messenger):
    """Runs a guide, with given values at its sites, or with its own draws."""

    def __init__(self, given: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.given, self.values, self.log_probs = given, dict(given), list[Tensor]()

    def run(self, start: GuideStart, plates: tuple[pyro.plate, ...]) -> _GuideReader:
        with ExitStack() as stack:
            for context in (poutine.block(), self, *plates):
                stack.enter_context(context)
            start.guide(*start.args, **start.kwargs)
        return self

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if site_is_factor(msg):
            raise NotImplementedError(
                f"Expected a guide whose sites give its density; it has the factor '{name}' as well."
            )
        if site_is_subsample(msg) or msg["is_observed"] or is_delta(fn):
            return
        if self.given:
            msg["value"] = self.given[name]
            self.log_probs.append(scale_and_mask(fn.log_prob(msg["value"]), mask=msg["mask"]))
        else:
            msg["value"] = self.values[name] = fn.sample()


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


class Slot(NamedTuple):
    """Where a latent is in a position: its part of the last dim, and its shape right of the batch dims."""

    first: int
    last: int
    shape: torch.Size


class TemperedPath:
    """The densities of the geometric path from prior, or guide, to the joint density of latents and data.

    At the inverse temperature t the density is start^(1 - t) joint^t, times the Jacobian of the transform to the
    latents' supports. Positions are unconstrained, ``(chains, data sets, size)``.

    Args:
        model, args, kwargs: the model and its arguments.
        start: the guide to start from; None for the prior.
        data: observed site -> value, batched over data sets at dim ``-1 - nesting``.
        plates: the plates of chains and of data sets.
        slots: where each latent is in a position.
    """

    def __init__(
        self,
        model: Callable,
        args: tuple,
        kwargs: Mapping[str, Any],
        start: GuideStart | None,
        data: Mapping[str, Tensor],
        plates: tuple[pyro.plate, ...],
        slots: Mapping[str, Slot],
    ) -> None:
        self.model, self.args, self.kwargs, self.start, self.data = model, args, kwargs, start, data
        self.plates, self.slots = plates, slots
        self.batch = tuple(plate.size for plate in plates)

    def read(self, position: Tensor) -> SiteReader:
        """Returns a run of the model at a position."""

        def choose(name: str, fn: Any, transform: Transform) -> tuple[Tensor, Tensor]:
            slot = self.slots[name]
            value = position[..., slot.first : slot.last].reshape(self.batch + slot.shape)
            return value, transform(value)

        reader = SiteReader(self.batch, choose, self.data)
        return reader.run(self.model, self.args, self.kwargs, self.plates)

    def value_of(self, reader: SiteReader) -> PathValue:
        """Returns the log densities at the values of a run."""
        prior: Any = sum(reader.prior.values())
        likelihood: Any = sum(reader.likelihood.values()) + torch.zeros_like(prior)
        jacobian: Any = sum(reader.log_jacobian.values())
        if self.start is None:
            return PathValue(prior + jacobian, likelihood)
        guide = self.start.log_prob(reader.values, self.plates)
        return PathValue(guide + jacobian, prior + likelihood - guide)

    @torch.no_grad()
    def value(self, position: Tensor) -> PathValue:
        """Returns the log densities at a position."""
        return self.value_of(self.read(position))

    @torch.enable_grad()
    def gradient(self, position: Tensor, temperature: float) -> Tensor:
        """Returns the gradient of the log density at an inverse temperature, of the position's shape."""
        position = position.detach().requires_grad_()
        total = self.value_of(self.read(position)).at(temperature).sum()
        return torch.autograd.grad(total, position)[0]


def _log_prob(name: str, fn: Any, value: Tensor) -> Tensor:
    try:
        return fn.log_prob(value).to(value.device)  # an improper prior's zeros are anywhere
    except ValueError as error:  # of Pyro's validation, which names no site
        raise SiteError(f"Expected a value of site '{name}' in its support; {error}") from error


def _transform(name: str, fn: Any) -> Transform:
    """Returns the transform from real space to the support of a latent."""
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
