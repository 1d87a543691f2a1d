"""`Simulator`: joint draws of a model's latents and data, for compilation and calibration.

The model is run with nothing conditioned, for all draws at once: in an outer plate, or by
`torch.vmap` if it is written for one draw. It is run in a loop where neither gives what runs of one
draw give.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.poutine.util import site_is_factor
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_nami.factors.wrappers import layers
from pyro_nami.inference.observations import observed_names
from pyro_nami.inference.simulator_model import Simulated
from pyro_nami.inference.site_messages import (
    Sites,
    Values,
    check_declared,
    joined,
    log_density,
    plate_nesting,
    plate_shape,
    values_at,
    with_idle_dims,
)
from pyro_nami.inference.target import Extent, Target, run_for_many
from pyro_nami.messages import check_counts, quoted, warn
from pyro_nami.program.first_run import is_delta
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.loops import family_of
from pyro_nami.program.many_draws import differing_site, few_draws, of_rank
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Runner
from pyro_nami.reading.loops import loop_families

__all__ = ["Batch", "JointDraws", "Simulator"]


class JointDraws(NamedTuple):
    """Draws from a model's joint distribution.

    Attributes:
        latents, observed: site -> values ``(draws, *plates, *event)``, of size 1 in plates that a site is not in.
        nesting: plate dims of the model.
        sites: of the one run that made all draws, if kept: a guide with anchors need not run the model again.
    """

    latents: Values
    observed: Values
    nesting: int
    sites: Sites | None = None

    @property
    def num(self) -> int:
        """The number of draws."""
        return len(next(iter(self.latents.values())))

    def select(self, index: Tensor) -> JointDraws:
        """Returns some of the draws, by an index or a mask over them."""
        return self._with(lambda value: value[index])

    def joined(self, others: Sequence[JointDraws]) -> JointDraws:
        """Returns these draws, and others behind them."""
        parts = [self, *others]
        latents = joined([part.latents for part in parts])
        return JointDraws(latents, joined([part.observed for part in parts]), self.nesting)

    def in_batches(self, size: int, order: Tensor | None = None) -> Iterator[JointDraws]:
        """Yields the draws in batches of a size, in the order of indices; by default in their own."""
        order = torch.arange(self.num) if order is None else order
        return map(self.select, order.split(size))

    def to(self, device: torch.device) -> JointDraws:
        """Returns the draws on a device; themselves where they are there."""
        there = next(iter(self.latents.values())).device == device
        return self if there else self._with(lambda value: value.to(device))

    def finite(self) -> tuple[JointDraws, dict[str, int]]:
        """Returns the draws whose values are all finite, and site -> how many of all draws are not, where any."""
        values = {**self.latents, **self.observed}
        bad = {
            name: ~value.isfinite().reshape(self.num, -1).all(-1) for name, value in values.items()
        }
        lost = torch.stack(list(bad.values())).any(0)
        if not lost.any():  # one transfer from the device, and rarely more
            return self, {}
        return self.select(~lost), {n: int(rows.sum()) for n, rows in bad.items() if rows.any()}

    def _with(self, change: Callable[[Tensor], Tensor]) -> JointDraws:
        latents, observed = tree_map(change, self[:2])
        return JointDraws(latents, observed, self.nesting)


class Batch(NamedTuple):
    """Simulations, and the model's arguments that they were made at."""

    args: tuple
    kwargs: Mapping[str, Any]
    draws: JointDraws

    @property
    def with_data(self) -> dict[str, Any]:
        """The keyword arguments of a guide that answers for these data."""
        return {**self.kwargs, "observations": self.draws.observed}


class Simulator:
    """Draws from the joint distribution of a model's latents and data.

    Data that the model is given are resampled. Random numbers are Pyro's; the check when it is made uses none of them.

    Args:
        model: a Pyro model.
        args, kwargs: its arguments.
        observed: sites that inference will condition on, beside those that the model observes itself.

    Attributes:
        program: the model and its arguments; the model is in `Vectorized` where only so one run gives all draws.
        nesting: plate dims of the model.
        latent, observed: names of the sites, in model order.
        single: latent or observed site -> its message in a run of one draw.
        loops: families of sites that are the steps of loops, of which other arguments may have other numbers.
        data: observed site, or factor -> the value that the model has there itself.
        vectorized: whether one run of the model gives all draws; False: one run a draw.
        trainable: names of parameters that the model reads and that require gradients.

    Raises:
        ValueError: an unknown name, no latent or no observed site, batch dims outside plates, sampling that fails.
        NotImplementedError: a site that cannot be sampled (an improper prior), or a plate with random subsampling.

    Example:
        >>> import pyro.distributions as dist
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> draws = Simulator(model, (torch.zeros(3),)).draw(5)
        >>> draws.latents["mu"].shape, draws.observed["y"].shape
        (torch.Size([5, 1]), torch.Size([5, 3]))
    """

    def __init__(
        self,
        model: Callable,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        observed: Sequence[str] = (),
    ) -> None:
        self.program = Program(model, tuple(args), dict(kwargs or {}))
        self.nesting = 0
        self.single: Sites = {}
        self.loops: frozenset[str] = frozenset()
        self.data: dict[str, Any] = {}

        def note(site: Any) -> None:
            if site["is_observed"]:
                self.data[site["name"]] = site["value"]

        with forked_rng(), pyro.validation_enabled(False):  # draws may be NaN
            params = poutine.trace(param_only=True)
            sites = self.sites(Extent(contexts=(params,)), choose=note)
            self.nesting = plate_nesting(sites.values())
            self.single = {n: site for n, site in sites.items() if not site_is_factor(site)}
            given = set(observed_names(observed))
            self.observed = tuple(name for name in self.single if name in {*self.data, *given})
            self.latent = tuple(name for name in self.single if name not in self.observed)
            both = {*map(family_of, self.observed)} & {*map(family_of, self.latent)}
            self.loops = loop_families(self.single) - both
            self._check_sites(sites, given)
            self._check_data()
            target, reason = run_for_many(
                self.target, lambda target: self._of(target.program)._difference(sites)
            )
        parameters = params.trace.nodes.items()
        self.trainable = tuple(name for name, site in parameters if _is_trained(site))
        self.program = target.program
        self.vectorized = reason is None
        if reason is not None:
            warn(
                f"The model cannot be simulated in one vectorized run: {reason}. Simulations are drawn one by one, "
                "which is slow. Write the model for batch dims on the left: `alpha[..., index]` for `alpha[index]`, "
                "`w @ X.mT` for `X @ w`, dims counted from the right, `torch.where` for `if`."
            )

    def _check_data(self) -> None:
        """Warns of data that the model computes from its latents, by one more run of the model."""

        def note(site: Any) -> None:
            known, value = self.data.get(site["name"]), site["value"]
            if known is None or value is known or not site["is_observed"] or is_delta(site["fn"]):
                return
            if not torch.allclose(torch.as_tensor(known), torch.as_tensor(value), equal_nan=True):
                moved.append(site["name"])

        moved: list[str] = []
        if self.data:
            self.sites(Extent(), choose=note)
        for name in moved[:1]:
            warn(
                f"The value that the model observes at '{name}' depends on its latents, as in `obs=y - z`. Simulations "
                "draw the value itself, so that it tells nothing of the latents. Observe `y`, with a location that the "
                "latents move."
            )

    @property
    def model(self) -> Callable:
        """The model as it is run: as given, or `Vectorized`."""
        return self.program.model

    @property
    def enumerates(self) -> bool:
        """Whether the model marks sites for enumeration, which are drawn here."""
        return any(site["infer"].get("enumerate") == "parallel" for site in self.single.values())

    @property
    def device(self) -> torch.device:
        """The device of the first latent."""
        return self.single[self.latent[0]]["value"].device

    def draw(
        self, num: int, *, keep_sites: bool = False, latents: Values | None = None
    ) -> JointDraws:
        """Returns ``num`` joint draws, without gradients; values that are not finite are in them as drawn.

        Args:
            num: number of draws.
            keep_sites: whether they come with their ``sites``, where one run of the model gives all of them.
            latents: values that the model is to have, ``(num, *plates, *event)``, as in `JointDraws`.

        Raises:
            ValueError: naming a site whose distribution fails to be sampled (a `Categorical` with NaN for
                probabilities, say), or that is not in every run, or not of the shape of its plates.
        """
        check_counts(num=num)
        if self.vectorized:
            sites = self._batch(num, latents)
            values = {name: sites[name]["value"] for name in self._names_in(sites)}
            return self.joint(values)._replace(sites=sites if keep_sites else None)
        given = [{name: value[i] for name, value in (latents or {}).items()} for i in range(num)]
        runs = [self.sites(values=values) for values in given]
        return self.joint(
            {
                name: torch.stack(
                    [with_idle_dims(run[name]["value"], run[name], self.nesting, 0) for run in runs]
                )
                for name in self._names_in(runs[0])
            }
        )

    def joint(self, values: Values) -> JointDraws:
        """Returns values of all latents and observed sites as joint draws."""
        roles = {self._kind(name) for name in self.observed}
        observed = {name: value for name, value in values.items() if self._kind(name) in roles}
        latents = {name: value for name, value in values.items() if name not in observed}
        return JointDraws(latents, observed, self.nesting)

    def batch(self, draws: JointDraws) -> Batch:
        """Returns joint draws with the model's arguments."""
        return Batch(self.program.args, self.program.kwargs, draws)

    def at(self, *args: Any, **kwargs: Any) -> Simulator:
        """Returns a simulator of the same model at other arguments, not checked again.

        Plates may have other sizes, and loops more steps or fewer.
        """
        return self._of(self.program._replace(args=args, kwargs=kwargs))

    def of(self, model: Callable) -> Simulator:
        """Returns a simulator of another model with the same sites, not checked again."""
        return self._of(self.program._replace(model=model))

    # ---- runs of the model

    @property
    def target(self) -> Target:
        """The model on these arguments, without a guide."""
        return Target(self.program, None, nesting=self.nesting)

    def sites(
        self,
        extent: Extent = Extent(),
        values: Values | None = None,
        choose: Callable[[Any], None] | None = None,
    ) -> Sites:
        """Runs the model, by default for one draw, with nothing observed; returns its sites but deterministic ones."""
        note = of_rank(self.nesting + 1) if extent.sizes else None
        runner = Runner(values or {}, simulated=True, choose=choose, note=note)
        # Draws may be NaN. Only the global switch keeps distributions that the model makes from refusing them.
        with torch.no_grad(), pyro.validation_enabled(False):
            sites = self.target.run_model(extent, runner)
        present = set(map(self._kind, sites))
        for name in self.single:
            if self._kind(name) not in present:
                raise ValueError(
                    f"Expected the same sites in every run of the model; one run lacks '{name}'."
                )
        return {name: site for name, site in sites.items() if not _is_name(site)}

    def _names_in(self, sites: Sites) -> list[str]:
        """Returns the latents and observed sites of a run, in model order; loops may have other steps."""
        kinds = set(map(self._kind, self.single))
        return [
            name
            for name, site in sites.items()
            if self._kind(name) in kinds and not site_is_factor(site)
        ]

    def _kind(self, name: str) -> str:
        """Returns the family of a loop's step, else the name."""
        family = family_of(name)
        return family if family in self.loops else name

    def _batch(self, num: int, latents: Values | None = None) -> Sites:
        """Returns the sites of one run for all draws."""
        sites = self.sites(self.target.extent(num), latents)
        for name, site in sites.items():
            shape, expected = site["fn"].batch_shape, (num, *plate_shape(site, self.nesting))
            if shape != expected:
                raise ValueError(
                    f"Expected batch dims on the left: {num} draws of site '{name}' should be of shape {expected}, but "
                    f"are of shape {tuple(shape)}, their event dims aside."
                )
            # no density would show it
            if isinstance(site["fn"], Simulated) and site["fn"].theta.stride(0) == 0:
                raise ValueError(
                    f"Expected a value of site '{name}' for each of {num} draws; got one for all."
                )
        return sites

    def _check_sites(self, sites: Sites, given: set[str]) -> None:
        """Raises where no simulations can be made, or a name that a user has given is no site's."""
        for name in sorted(given - self.single.keys()):
            raise ValueError(
                f"Expected names of the model's sites, {quoted(self.single)}, in observed; got '{name}'. "
                "`amortize` also takes deterministic sites, and a Delta, as data."
            )
        for role, names in (("latent", self.latent), ("observed", self.observed)):
            if not names:
                raise ValueError(
                    f"Expected a model with {role} sites; this one has none in this call. Sites that it samples but "
                    "that inference will condition on are named by observed=[...]."
                )
        for name, site in sites.items():
            check_declared(site, self.nesting)
            if site_is_factor(site):
                warn(
                    f"Simulations leave out the factor '{name}': they are draws of the model without it."
                )

    def _of(self, program: Program) -> Simulator:
        """Returns a simulator of another program, with the same sites."""
        other = copy.copy(self)
        other.program = program
        return other

    def _difference(self, sites: Sites) -> str | None:
        """Returns where a vectorized run goes wrong, found by replaying its draws one by one; None if nowhere."""
        num = few_draws(sites.values())
        batch = self._batch(num)

        def alone_at(draw: int) -> Values:
            return _log_densities(self.sites(values=values_at(draw, batch, self.single)))

        wrong = differing_site(_log_densities(batch), range(num), alone_at)
        return wrong and f"the log density of site '{wrong}' differs from that in a run of one draw"


def _log_densities(sites: Sites) -> Values:
    """Returns the log densities of the sites that have one, in nats; errors name the site."""
    found = {}
    for name, site in sites.items():
        with suppress(NotImplementedError):
            found[name] = log_density(site)
    return found


def _is_trained(param: Any) -> bool:
    value = param["value"]
    return bool((value.unconstrained() if hasattr(value, "unconstrained") else value).requires_grad)


def _is_name(site: Mapping[str, Any]) -> bool:
    """Whether a site only names a value: a deterministic site, or the Delta that a reparametrization leaves."""
    left = is_delta(site["fn"]) and any(
        getattr(layer, "_mask", None) is False for layer in layers(site["fn"])
    )
    return left or bool(site["infer"].get("_deterministic"))
