"""`importance_sample`: importance sampling with any guide as the proposal, for all draws and data sets at once.

A draw z of the guide q has the weight p(z, x) / q(z | x), whose mean is the evidence p(x). One run
of the guide and one of the model give a chunk of draws for every data set; the first chunk is
checked against single runs. `weighted_samples` holds what is estimated from the weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyro
import torch
from pyro.infer.inspect import is_sample_site
from pyro.poutine.util import site_is_factor
from torch import Tensor

from pyro_nami.inference.observations import Observations, as_mapping
from pyro_nami.inference.site_messages import (
    Sites,
    Values,
    joined,
    plate_names,
    plate_nesting,
    values_at,
    whole,
    with_idle_dims,
)
from pyro_nami.inference.target import (
    Extent,
    Target,
    log_densities,
    per_draw,
    run_for_many,
    summed,
)
from pyro_nami.inference.weighted_samples import WeightedSamples, warn_of_bad
from pyro_nami.messages import OneByOne, check_counts, quoted, warn
from pyro_nami.program.first_run import is_delta
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.many_draws import differing_site, few_draws
from pyro_nami.program.memory import rows_in_memory
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Runner

__all__ = ["Proposal", "importance_sample", "weighted_draws"]


def importance_sample(
    model: Callable,
    guide: Callable,
    *args: Any,
    num_samples: int,
    observations: Mapping[str, Any] | None = None,
    chunk_size: int | None = None,
    defensive: float = 0.0,
    **kwargs: Any,
) -> WeightedSamples:
    """Draws from a guide and weights the draws by log p(latents, data) - log q(latents | data).

    Model and guide are run without gradients and unseen by handlers outside. The model's masks and scales count, as in
    `pyro.infer.Importance`. A model that is written for one draw is mapped over draws by `torch.vmap`, or run draw by
    draw where that fails (an `if` on a value).

    Args:
        model: a Pyro model.
        guide: a guide that samples every latent of the model.
        *args, **kwargs: the arguments of both.
        num_samples: number of draws for each data set.
        observations: observed site -> value, in place of the model's own data: of the site's shape in a single run, or
            of several data sets, ``(data sets, *site shape)``. A guide or model that takes ``observations=`` gets them.
        chunk_size: draws in memory at a time, of all data sets; by default by their bytes.
        defensive: share of the draws that are the prior's, the last ones. All draws are weighted by the density of the
            mixture, so no weight is above p(data | latents) / share (Hesterberg 1995, "Weighted average importance
            sampling and defensive mixture distributions").

    Returns:
        `WeightedSamples` with `num_samples` draws of the model's latents, for each data set if there is a batch.

    Raises:
        ValueError: an option out of range; an observation that fits no site; a latent that only one of model and guide
            has; a log density of the guide that is NaN, or half of the model's; a data set for which all weights are
            zero; a guide that is a point (AutoDelta).
        NotImplementedError: plates with random subsampling.

    Warns:
        UserWarning: k-hat above 0.7; draws one by one; draws at which the model's log density is NaN (of weight zero).

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model():
        ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...     pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(2.0))
        >>> def guide():
        ...     pyro.sample("z", dist.Normal(1.0, 0.5**0.5))  # the exact posterior
        >>> importance_sample(model, guide, num_samples=100).log_evidence
        tensor(-2.2655)
    """
    target = Target(Program(model, args, kwargs), guide, prior_share=defensive)
    result = weighted_draws(target, as_mapping(observations), num_samples, chunk_size)
    warn_of_bad(result)
    return result


@torch.no_grad()
def weighted_draws(
    target: Target, observations: Mapping[str, Any], num: int, chunk_size: int | None = None
) -> WeightedSamples:
    """Returns weighted draws of a guide, and of the prior by its share, given observed values."""
    check_counts(num_samples=num, chunk_size=chunk_size)
    ours = max(1, math.floor((1 - target.prior_share) * num))
    target = replace(target, prior_share=1 - ours / num)
    proposal = Proposal.of(target, observations)
    elements = proposal.elements * getattr(target.guide, "grid_points", 1)
    return proposal.draw(ours, num - ours, chunk_size or rows_in_memory(elements))


CHECK = "Check the site's parameters and the data that it sees."


class BadDensity(ValueError):
    """A log density that no weight can be made of; the message names the site."""


class Weighed(NamedTuple):
    """The sites of a run of the guide and of a run of the model at the guide's values, with log densities."""

    extent: Extent
    guide: Sites
    model: Sites
    log_q: Values
    log_p: Values


class _Draws(NamedTuple):
    """Draws ``(draws, *data sets, *site shape)``, their log weights ``(draws, *data sets)``, and why some are NaN."""

    values: Values
    log_weights: Tensor
    fault: str


@dataclass(frozen=True)
class Proposal:
    """A guide that proposes a model's latents; a run of both for one draw gives the shape of every site."""

    target: Target
    single: Weighed
    latents: tuple[str, ...]

    @classmethod
    def of(cls, target: Target, observations: Mapping[str, Any]) -> Proposal:
        """Returns the proposal of a target, on observed values; raises where guide and model do not fit."""
        if as_mapping(observations):
            target, _ = target.observing(observations)
        single = _weighed(target, target.one())
        nesting = max(plate_nesting(sites.values()) for sites in (single.guide, single.model))
        return cls(replace(target, nesting=nesting), single, _matched_latents(single))

    def on(self, observations: Mapping[str, Any]) -> Proposal:
        """Returns the proposal on other data sets, whose sites have the same shapes."""
        data = Observations(observations, self.single.model, self.target.nesting)
        return replace(self, target=replace(self.target, data=data))

    @property
    def _sites(self) -> list[Any]:
        return [*self.single.guide.values(), *self.single.model.values()]

    @property
    def elements(self) -> int:
        """The number of elements of all sites, for one draw and all data sets."""
        one = sum(site["fn"].shape().numel() for site in self._sites)
        return one * (self.target.data.num or 1)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the latents in a single run."""
        return {name: self.single.model[name]["fn"].shape() for name in self.latents}

    def draw(self, from_guide: int, from_prior: int, size: int) -> WeightedSamples:
        """Returns draws of the guide, and behind them of the prior, made in chunks of a size, or one by one."""
        with forked_rng():
            target, reason = run_for_many(self.target, self._fault)
        if reason is not None:
            warn(_LOOP.format(reason), OneByOne)
        proposal = replace(self, target=target)
        make = proposal._chunk if reason is None else proposal._one_by_one
        chunks = []
        for weigh, num in ((_weighed, from_guide), (proposal._weighed_prior, from_prior)):
            for done in range(0, num, size):
                chunks.append(make(min(size, num - done), weigh))
        values = joined([chunk.values for chunk in chunks])
        log_weights = torch.cat([chunk.log_weights for chunk in chunks])
        lost = log_weights.isnan()
        if lost.any():
            fault = f"{max(chunk.fault for chunk in chunks)} for {int(lost.sum())} of {lost.numel()} draws"
            if 2 * lost.sum() >= lost.numel():
                raise BadDensity(f"Expected {fault}. {CHECK}")
            warn(f"Expected {fault}, which have weight zero. {CHECK}")
        if (log_weights == -torch.inf).all():
            raise BadDensity(proposal._impossible())
        plates = {name: plate_names(self.single.model[name]) for name in self.latents}
        return WeightedSamples(values, torch.where(lost, -torch.inf, log_weights), plates)

    def _impossible(self) -> str:
        """Returns the message for draws that all have weight zero, with the sites that give one of them no density."""
        run = _weighed(self.target, self.target.one())
        names = [
            name for name, log_prob in run.log_p.items() if bool((log_prob == -torch.inf).any())
        ]
        where = f", as the model's density is at {quoted(names)}" if names else ""
        return (
            f"Expected at least one draw of positive weight; all weights are zero{where}. Check the data for infinite "
            "or impossible values, and the supports of latents, or draw more."
        )

    def at_once(self, num: int) -> _Draws:
        """Returns draws of one run for all; weights may be NaN."""
        return self._draws(_weighed(self.target, self.target.extent(num)), checked=False)

    def difference(self, num: int) -> str | None:
        """Returns where a run for some draws differs from runs for its first and last one; None if nowhere.

        Draws that the model has no density for say nothing. Near the edge of a support the value of a draw may not tell
        the density that it was made with. So a difference has to show in a run at the values of the draws as well.
        """
        run = _weighed(self.target, self.target.extent(num))
        self._draws(run)
        reason = self._differing(run)
        if reason is not None:
            reason = self._differing(_weighed(self.target, run.extent, _drawn(run)))
        return reason

    def log_weights(self, values: Values) -> Tensor:
        """Returns the log weights of given latents ``(draws, *data sets, *site shape)``, as those of draws."""
        extent = self.target.extent(len(values[self.latents[0]]))
        nesting, dims = self.target.nesting, len(extent.sizes)
        values = {
            name: with_idle_dims(values[name], self.single.model[name], nesting, dims)
            for name in self.latents
        }
        model = self.target.run_model(extent, Runner({**values, **extent.data}))
        return summed(log_densities(model), extent) - self.target.guide_log_prob(extent, values)

    def _fault(self, target: Target) -> str | None:
        """Returns why a few draws cannot be made at once; None if they can, or if no draws can."""
        with suppress(BadDensity):
            return replace(self, target=target).difference(few_draws(self._sites))
        return None

    def _chunk(self, num: int, weigh: Callable[..., Weighed]) -> _Draws:
        return self._draws(weigh(self.target, self.target.extent(num)))

    def _one_by_one(self, num: int, weigh: Callable[..., Weighed]) -> _Draws:
        sizes = (num,) if self.target.data.num is None else (num, self.target.data.num)
        draws = [
            self._draws(weigh(self.target, self.target.one(index[-1])))
            for index in itertools.product(*map(range, sizes))
        ]
        values, log_weights, faults = zip(*draws)
        latents = {
            name: torch.stack([value[name] for value in values]).unflatten(0, sizes)
            for name in self.latents
        }
        return _Draws(latents, torch.stack(log_weights).unflatten(0, sizes), max(faults))

    @pyro.validation_enabled(False)
    def _weighed_prior(self, target: Target, extent: Extent) -> Weighed:
        """Runs the model at its own draws, and tells the guide's density there."""
        sites = target.run_model(extent, Runner(extent.data))
        log_q = target.guide_log_prob(extent, {name: whole(sites[name]) for name in self.latents})
        log_q = torch.where(log_q.isnan(), -torch.inf, log_q)  # far out, where it draws nothing
        return Weighed(extent, {}, sites, {"all latents": log_q}, log_densities(sites))

    def _draws(self, run: Weighed, checked: bool = True) -> _Draws:
        log_q, log_p = (summed(part, run.extent) for part in (run.log_q, run.log_p))
        if self.target.prior_share:
            prior = {name: run.log_p[name] / run.model[name]["scale"] for name in self.latents}
            log_q = self.target.defended(log_q, summed(prior, run.extent))
        log_weights = log_p - log_q
        fault = _fault_of(run) if checked and not (log_weights < torch.inf).all() else ""
        values = {
            name: whole(run.model[name]).reshape(run.extent.sizes + shape)
            for name, shape in self.shapes.items()
        }
        return _Draws(values, log_weights, fault)

    def _differing(self, run: Weighed) -> str | None:
        """Returns a log density of the first or last good draw that differs in a run of its own; None if none does."""
        single = {name: self.single.guide[name] for name in _drawn(run)}

        def alone_at(index: Any) -> Values:
            values = values_at(index, run.guide, single)
            return _by_role(_weighed(self.target, self.target.one(index[-1]), values))

        good = (~summed(run.log_p, run.extent).isnan()).nonzero()
        ends = map(tuple, good[[0, -1]].tolist() if len(good) else ())
        wrong = differing_site(_by_role(run), ends, alone_at)
        return wrong and f"{wrong} differs from that in a single run"


# Where distributions refuse draws, the model's log density is NaN or minus infinity, so that a weight tells.
@pyro.validation_enabled(False)
def _weighed(target: Target, extent: Extent, values: Values | None = None) -> Weighed:
    """Runs the guide, at its own draws or at given values, and the model at the guide's."""
    guide = target.run_guide(extent, Runner(values or {}))
    # What the guide observes is no part of its density, but what it weights by a factor is.
    guide = {
        name: site
        for name, site in guide.items()
        if not site["is_observed"] or site_is_factor(site)
    }
    drawn = {name: site["value"] for name, site in guide.items() if not site["is_observed"]}
    model = target.run_model(extent, Runner({**drawn, **extent.data}))
    return Weighed(extent, guide, model, log_densities(guide), log_densities(model))


def _fault_of(run: Weighed) -> str:
    """Returns where the model's log density is NaN.

    Raises:
        BadDensity: it is +inf, or the guide's is NaN, or infinite where it drew.
    """
    roles = {"guide": per_draw(run.log_q, run.extent), "model": per_draw(run.log_p, run.extent)}
    fault = ""
    for kind, bad in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        for role, log_probs in roles.items():
            for name, log_prob in log_probs.items():
                found = int(bad(log_prob).sum())
                told = f"a finite log density at site '{name}' of the {role}; got {kind}"
                if found and (kind, role) == ("NaN", "model"):
                    fault = fault or told
                elif found and not (kind == "-inf" and (role == "model" or not run.guide)):
                    raise BadDensity(
                        f"Expected {told} for {found} of {log_prob.numel()} draws. {CHECK}"
                    )
    return fault


def _drawn(run: Weighed) -> Values:
    """Returns the values of all sites that the guide draws."""
    return {name: whole(site) for name, site in run.guide.items() if not site["is_observed"]}


def _by_role(run: Weighed) -> Values:
    """Returns the log densities of a run's sites, by names that tell guide and model apart."""
    roles = {"guide": run.log_q, "model": run.log_p}
    return {
        f"the {role}'s log density of site '{name}'": log_prob
        for role, log_probs in roles.items()
        for name, log_prob in log_probs.items()
    }


def _matched_latents(single: Weighed) -> tuple[str, ...]:
    """Returns the latents, and raises where the guide's and the model's differ."""
    sites, data = single.model, single.extent.data
    latents = [name for name, site in sites.items() if not site["is_observed"] and name not in data]
    auxiliary = {name for name, site in single.guide.items() if site["infer"].get("is_auxiliary")}
    drawn = {name: single.guide[name] for name in _drawn(single) if name not in auxiliary}
    for name in latents:
        if name not in drawn and is_sample_site(sites[name]):
            raise ValueError(
                f"Expected a guide that samples every latent of the model; it does not sample '{name}'. If '{name}' "
                "is data, pass it as an argument or by observations=."
            )
    # A Delta of the guide has a density only if it is a function of an auxiliary site, or says so.
    made = any(
        site_is_factor(site) or (name in auxiliary and not is_delta(site["fn"]))
        for name, site in single.guide.items()
    )
    for name, site in drawn.items():
        if name not in latents:
            what = "observed in the model" if name in sites else "no site of the model"
            raise ValueError(
                f"Expected a guide that samples latents of the model only; it samples '{name}', which is {what}."
            )
        own, fn = sites[name]["fn"], site["fn"]
        if fn.shape() != own.shape():
            raise ValueError(
                f"Expected the guide to sample '{name}' of the model's shape, {tuple(own.shape())}; got "
                f"{tuple(fn.shape())}."
            )
        if not made and is_delta(fn) and not is_delta(own) and not single.log_q[name].any():
            raise ValueError(
                f"Expected a guide with a density at every latent; it is a point at '{name}'. Use AutoNaMIGuide, or "
                "another guide that draws."
            )
    return tuple(name for name in latents if name in drawn)


_LOOP = (
    "The model and the guide cannot be run for all draws at once: {}. Draws are made one by one, which is slow. Write "
    "both for batch dims on the left: `alpha[..., index]` for `alpha[index]`, `w @ X.mT` for `X @ w`, dims counted "
    "from the right, `torch.where` for `if`."
)
