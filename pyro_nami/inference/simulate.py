"""Joint draws of a model's latents and data: what compilation trains on and calibration checks against.

A `Simulator` runs the model with nothing conditioned, all draws at once in an outer plate. Once, when it is made, it
replays such draws one by one to see that the vectorized run is right, and it falls back to a loop where it is not.
Change this module when simulations come out of a model in another way.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_factor, site_is_subsample
from torch import Tensor

from pyro_nami.inference.sites import check_full_plate, plate_nesting, with_plate_dims

__all__ = ["JointDraws", "Simulator", "forked_rng"]

_CHECKED = 5  # draws that are replayed one by one, at least
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of log densities; half precision: the loosest below


class JointDraws(NamedTuple):
    """Draws from a model's joint distribution.

    Attributes:
        latents, observed: site -> values ``(draws, *plates, *event)``, with ``nesting`` plate dims at every site, of
            size 1 where the site is not in the plate.
        nesting: plate dims of the model.
        sites: the sites of the one run that made all draws, if it was asked to be kept: so a guide that is relative to
            the model's conditionals need not run the model again.
    """

    latents: dict[str, Tensor]
    observed: dict[str, Tensor]
    nesting: int
    sites: Mapping[str, Any] | None = None

    @property
    def num(self) -> int:
        """The number of draws."""
        return len(next(iter(self.latents.values())))

    def select(self, index: Tensor) -> JointDraws:
        """Returns some of the draws, by an index or a mask over them."""
        latents, observed = ({name: v[index] for name, v in part.items()} for part in self[:2])
        return JointDraws(latents, observed, self.nesting)

    def to(self, device: torch.device) -> JointDraws:
        """Returns the draws on a device; themselves where they are there."""
        if next(iter(self.latents.values())).device == device:
            return self
        latents, observed = ({name: v.to(device) for name, v in part.items()} for part in self[:2])
        return JointDraws(latents, observed, self.nesting)

    def finite(self) -> tuple[JointDraws, dict[str, int]]:
        """Returns the draws whose values are all finite, and site -> how many of all draws are not, where any."""
        sites = {name: v for name, v in {**self.latents, **self.observed}.items() if v.is_floating_point()}
        # A sum is finite only if all terms are (not the reverse): one transfer from the device, and rarely more.
        total = (
            torch.stack([value.detach().sum().double() for value in sites.values()]).sum() if sites else 0.0
        )
        if math.isfinite(total):
            return self, {}
        bad = {name: ~value.isfinite().reshape(self.num, -1).all(-1) for name, value in sites.items()}
        counts = {name: int(rows.sum()) for name, rows in bad.items()}
        return self.select(~torch.stack(list(bad.values())).any(0)), {
            name: n for name, n in counts.items() if n
        }


class Simulator:
    """Draws from the joint distribution of a model's latents and data.

    Data that the model is given are resampled. Random numbers are Pyro's; the check when it is made uses none of them.

    Args:
        model: a Pyro model.
        args, kwargs: its arguments.
        observed: sites that the model samples in this call, but that inference will condition on. Those that the
            model observes itself are observed anyway.

    Attributes:
        nesting: plate dims of the model.
        latent, observed: names of the sites, in model order.
        vectorized: whether one run of the model gives all draws; False: one run a draw.
        trainable: names of parameters that the model reads and that require gradients.

    Raises:
        ValueError: an unknown name in ``observed``, no latent or no observed site, batch dims outside plates, or a
            site whose distribution fails to be sampled.
        NotImplementedError: a site that cannot be sampled (an improper prior), or a plate with random subsampling.
    """

    def __init__(
        self,
        model: Callable,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        observed: Sequence[str] = (),
    ) -> None:
        self.model, self.args, self.kwargs = model, tuple(args), dict(kwargs or {})
        with forked_rng(), pyro.validation_enabled(False):  # draws may be NaN
            first = self._run()
            sites = {name: site for name, site in first.sites.items() if not site_is_factor(site)}
            given = (observed,) if isinstance(observed, str) else tuple(observed)
            for name in given:
                if name not in sites:
                    known = ", ".join(map(repr, sites))
                    raise ValueError(
                        f"Expected names of the model's sites, {known}, in observed; got '{name}'."
                    )
            self.nesting = plate_nesting(sites.values())
            is_observed = {name: name in given or name in first.observed for name in sites}
            self.observed = tuple(name for name, seen in is_observed.items() if seen)
            self.latent = tuple(name for name, seen in is_observed.items() if not seen)
            self.trainable = tuple(first.trainable)
            self._check_sites(first.sites)
            reason = self._difference(first.sites)
        self.vectorized = reason is None
        if reason is not None:
            warnings.warn(
                f"The model cannot be simulated in one vectorized run: {reason}. Simulations are drawn one by one, "
                "which is slow. Write the model for batch dims on the left: `alpha[..., index]` for `alpha[index]`, "
                "dims counted from the right, `torch.where` for `if`.",
                stacklevel=2,
            )

    def draw(self, num: int, *, keep_sites: bool = False) -> JointDraws:
        """Returns ``num`` joint draws, without gradients; values that are not finite are in them as drawn.

        Args:
            num: number of draws.
            keep_sites: whether they come with their ``sites``, where one run of the model gives all of them.

        Raises:
            ValueError: naming a site whose distribution fails to be sampled (a `Categorical` with NaN for
                probabilities, say), or that is not in every run, or not of the shape of its plates.
        """
        if not (isinstance(num, int) and num > 0):
            raise ValueError(f"Expected a positive number of draws; got {num!r}.")
        kept = None
        if self.vectorized:
            sites = self._run(num).sites
            kept = sites if keep_sites else None
            for name, site in sites.items():
                if site["fn"].batch_shape != _plate_shape(site, self.nesting, num):
                    raise ValueError(_BATCH_SHAPE.format(name, tuple(site["fn"].batch_shape), num))
            draws = {name: site["value"] for name, site in sites.items()}
        else:
            runs = [self._run().sites for _ in range(num)]
            for sites in runs:
                self._check_names(sites)
            draws = {
                name: torch.stack(
                    [with_plate_dims(sites[name]["value"], sites[name], self.nesting, 0) for sites in runs]
                )
                for name in (*self.latent, *self.observed)
            }
        self._check_names(draws)
        return JointDraws(
            {name: draws[name] for name in self.latent},
            {name: draws[name] for name in self.observed},
            self.nesting,
            kept,
        )

    def at(self, *args: Any, **kwargs: Any) -> Simulator:
        """Returns a simulator of the same model at other arguments (other plate sizes, say), not checked again."""
        other = copy.copy(self)
        other.args, other.kwargs = args, kwargs
        return other

    def sites(self) -> dict[str, Any]:
        """Returns the sites of a single run, with nothing observed, as messages."""
        return self._run().sites

    # ---- runs of the model

    def _run(self, num: int | None = None, values: Mapping[str, Tensor] | None = None) -> _Collector:
        """Runs the model out of sight, in an outer plate if ``num`` is given, with ``values`` at its sites."""
        collector = _Collector(values or {})
        with torch.no_grad(), pyro.validation_enabled(False), poutine.block(), collector:
            try:
                if num is None:
                    self.model(*self.args, **self.kwargs)
                else:
                    with pyro.plate("_draws", num, dim=-1 - self.nesting):
                        self.model(*self.args, **self.kwargs)
            except Exception as error:
                if collector.current is None:  # not the distribution's: the model's own
                    raise
                name, fn = collector.current
                kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
                raise kind(
                    f"Expected a site that can be sampled; got '{name}', whose {type(fn).__name__} raises "
                    f"{type(error).__name__}: {error}. Simulations need a proper distribution at every site."
                ) from error
        return collector

    def _check_sites(self, sites: Mapping[str, Any]) -> None:
        """Raises for what no simulation can be made of."""
        for role, names in (("latent", self.latent), ("observed", self.observed)):
            if not names:
                raise ValueError(
                    f"Expected a model with {role} sites; this one has none in this call. Sites that it samples but "
                    "that inference will condition on are named by observed=[...]."
                )
        for name, site in sites.items():
            shape = site["fn"].batch_shape
            if torch.Size((1,) * (self.nesting - len(shape))) + shape != _plate_shape(site, self.nesting):
                raise ValueError(
                    f"Expected the batch dims of site '{name}' to be those of its plates; got {tuple(shape)}. Declare "
                    "them by .to_event() or pyro.plate."
                )
            if site_is_factor(site):
                warnings.warn(
                    f"Simulations know nothing of the factor '{name}': they are of the model without it.",
                    stacklevel=3,
                )

    def _check_names(self, sites: Mapping[str, Any]) -> None:
        for name in (*self.latent, *self.observed):
            if name not in sites:
                raise ValueError(
                    f"Expected the same sites in every run of the model; one run lacks '{name}'."
                )

    def _difference(self, first: Mapping[str, Any]) -> str | None:
        """Returns where a vectorized run goes wrong, found by replaying its draws one by one; None if nowhere."""
        sizes = {size for site in first.values() for size in site["fn"].shape()}
        num = next(n for n in range(_CHECKED, _CHECKED + len(sizes) + 1) if n not in sizes)
        try:
            batch = self._run(num).sites
            for name, site in first.items():
                if name not in batch:
                    return f"site '{name}' is not in every run"
                shape = _plate_shape(site, self.nesting, num) + site["fn"].event_shape
                if batch[name]["fn"].shape() != shape:
                    got = tuple(batch[name]["fn"].shape())
                    return f"{num} draws of site '{name}' should be of shape {tuple(shape)}, but are of shape {got}"
            log_probs = {name: _log_prob(site) for name, site in batch.items()}
            for draw in range(num):
                values = {
                    name: batch[name]["value"][draw].reshape(site["fn"].shape())
                    for name, site in first.items()
                    if not site_is_factor(site)
                }
                for name, site in self._run(values=values).sites.items():
                    alone, together = _log_prob(site), log_probs.get(name)
                    if alone is not None and together is not None and not _close(alone, together[draw]):
                        return f"the log density of site '{name}' differs from that in a run of one draw"
        except Exception as error:  # noqa: BLE001  whatever a model does with batch dims that it was not written for
            return f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}"
        return None


class _Collector(Messenger):
    """Keeps the sample sites of a run, with nothing observed, and knows the site that is being sampled.

    Unlike `poutine.uncondition` it leaves deterministic sites as they are: sampled in a plate, they would be expanded.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values
        self.sites: dict[str, Any] = {}
        self.observed: set[str] = set()
        self.trainable: dict[str, None] = {}
        self.current: tuple[str, Any] | None = None

    def _pyro_sample(self, msg: Any) -> None:
        self.current = msg["name"], msg["fn"]
        if msg["is_observed"] and not (
            _is_deterministic(msg) or site_is_factor(msg) or site_is_subsample(msg)
        ):
            msg["is_observed"], msg["value"], msg["done"] = False, None, False
            self.observed.add(msg["name"])
        if msg["name"] in self.values:
            msg["value"], msg["done"] = self.values[msg["name"]], True

    def _pyro_post_sample(self, msg: Any) -> None:
        self.current = None
        if site_is_subsample(msg):
            check_full_plate(msg["name"], msg["fn"])
        elif not _is_deterministic(msg):
            self.sites[msg["name"]] = msg

    def _pyro_post_param(self, msg: Any) -> None:
        value = msg["value"]
        unconstrained = value.unconstrained() if hasattr(value, "unconstrained") else value
        if unconstrained.requires_grad:
            self.trainable[msg["name"]] = None


def _is_deterministic(site: Any) -> bool:
    return bool(site["infer"].get("_deterministic", False))


def _plate_shape(site: Any, nesting: int, num: int | None = None) -> torch.Size:
    """Returns the batch shape that a site's plates give it: ``(num, *plates)``, or without ``num`` ``(*plates,)``."""
    shape = [1] * nesting
    own = site["fn"].batch_shape
    for frame in site["cond_indep_stack"]:
        if frame.vectorized and -frame.dim <= nesting:
            shape[frame.dim] = frame.size if frame.size >= 0 else own[frame.dim]
    return torch.Size(shape if num is None else [num, *shape])


def _log_prob(site: Any) -> Tensor | None:
    try:
        return site["fn"].log_prob(site["value"])
    except NotImplementedError:
        return None


def _close(alone: Tensor, together: Tensor) -> bool:
    tolerance = _TOLERANCE.get(alone.dtype, 1e-2)
    return torch.allclose(
        alone.reshape(together.shape), together, rtol=tolerance, atol=tolerance, equal_nan=True
    )


@contextmanager
def forked_rng() -> Iterator[None]:
    """Restores the random number generators of torch (CUDA as well), numpy and Python at its end."""
    state = pyro.util.get_rng_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(list(devices)):
            yield
    finally:
        pyro.util.set_rng_state(state)


_BATCH_SHAPE = (
    "Expected site '{0}' to have the batch dims of {2} draws and of its plates; got {1}. Write the model for batch "
    "dims on the left."
)
