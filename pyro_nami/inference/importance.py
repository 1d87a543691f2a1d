"""`importance_sample`: importance sampling with any guide as the proposal, for all draws and data sets at once.

A draw z of the guide q has the weight p(z, x) / q(z | x), whose mean is the evidence p(x). One run
of the guide and one of the model give a chunk of draws for every data set; the first chunk is
checked against single runs. `weighted_samples` holds what is estimated from the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions.util import scale_and_mask
from pyro.infer.inspect import is_sample_site
from pyro.poutine.util import site_is_factor
from torch import Tensor

from pyro_nami.inference.observations import Observations, as_mapping
from pyro_nami.inference.site_messages import (
    is_delta,
    log_density,
    plate_names,
    plate_nesting,
    with_idle_dims,
)
from pyro_nami.inference.target import (
    Extent,
    Target,
    in_one_line,
    log_densities,
    run_for_many,
)
from pyro_nami.inference.weighed_run import (
    CHECK,
    BadDensity,
    Weighed,
    fault_of,
    lost_draws,
    summed,
    weighed_run,
    whole,
)
from pyro_nami.inference.weighted_samples import WeightedSamples, warn_of_bad
from pyro_nami.messages import OneByOne, warn
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.many_draws import differing_site, few_draws
from pyro_nami.program.runner import Runner

__all__ = ["Proposal", "importance_sample"]

_ELEMENTS = 2**20  # of all sites' values, of one chunk by default
_LOST = 0.5  # share of draws at which the model may have no density


@torch.no_grad()
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

    Model and guide are run without gradients and unseen by handlers outside; parameters are used as they are. The
    model's masks and scales count, as in `pyro.infer.Importance`. A model that is written for one draw is mapped over
    draws by `torch.vmap`; what that cannot run either (an `if` on a value) is run draw by draw.

    Args:
        model: a Pyro model.
        guide: a guide that samples every latent of the model.
        *args, **kwargs: the arguments of both.
        num_samples: number of draws for each data set.
        observations: observed site -> value, in place of what the model observes itself. Of the site's shape in a
            single run of the model, it is one data set; with one dim more in front, ``(data sets, *site shape)``, it
            is a batch of them (also with all plate dims of the model, as in `JointDraws`). Sites without that dim are
            the same in all data sets. Passed on as ``observations=`` to a guide and a model that take it.
        chunk_size: draws of all data sets in memory at a time; by default about a million elements of all sites.
        defensive: share of the draws that are the prior's, the last ones; the density of the mixture is what all are
            weighted by, so no weight is above p(data | latents) / share, wherever the guide is too narrow, and what it
            misses can be found (Hesterberg 1995, "Weighted average importance sampling and defensive mixture
            distributions").

    Returns:
        `WeightedSamples` with `num_samples` draws of the model's latents, for each data set if there is a batch.

    Raises:
        ValueError: ``num_samples`` or ``chunk_size`` below 1; ``defensive`` outside [0, 1); observations of an unknown
            site or of a wrong shape; a latent that only one of model and guide has; a log density that is NaN, at some
            draw of the guide, or at half of the draws of the model (the message names the site); a data set for which
            all weights are zero; a guide that is a point (AutoDelta).
        NotImplementedError: plates with random subsampling.

    Warns:
        UserWarning: k-hat above 0.7; draws one by one; draws at which the model's log density is NaN, as numbers
            overflow say, which have weight zero.

    Example:
        >>> import pyro
        >>> import pyro.distributions as dist
        >>> def model():
        ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...     pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(2.0))
        >>> def guide():
        ...     pyro.sample("z", dist.Normal(1.0, 0.5**0.5))  # the exact posterior
        >>> importance_sample(model, guide, num_samples=100).log_evidence
        tensor(-2.2655)
    """
    _check_counts(num_samples, chunk_size)
    target = Target(model, guide, args, kwargs, prior_share=defensive)
    ours = max(1, math.floor((1 - defensive) * num_samples))
    target = replace(target, prior_share=1 - ours / num_samples)
    proposal = Proposal.of(target, as_mapping(observations))
    size = min(num_samples, chunk_size or max(1, _ELEMENTS // proposal.elements))
    result = proposal.draw(
        *([min(size, num - i) for i in range(0, num, size)] for num in (ours, num_samples - ours))
    )
    warn_of_bad(result)
    return result


def _check_counts(num_samples: int, chunk_size: int | None) -> None:
    counts = {"num_samples": num_samples, "chunk_size": 1 if chunk_size is None else chunk_size}
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"Expected {name} to be an int; got {value!r}.")
        if value < 1:
            raise ValueError(f"Expected {name} to be at least 1; got {value}.")


class _Draws(NamedTuple):
    """Draws ``(draws, *data sets, *site shape)``, their log weights ``(draws, *data sets)``, and why some are NaN."""

    values: dict[str, Tensor]
    log_weights: Tensor
    fault: str = ""


@dataclass(frozen=True)
class Proposal:
    """A guide that draws what a model has; a run of both for one draw gives every site its own shape."""

    target: Target
    single: Weighed
    latents: tuple[str, ...]

    @classmethod
    def of(cls, target: Target, observations: Mapping[str, Any]) -> Proposal:
        if observations:
            target, _ = target.observing(observations)
        single = weighed_run(target, target.one())
        nesting = max(plate_nesting(sites.values()) for sites in (single.guide, single.model))
        return cls(replace(target, nesting=nesting), single, _matched_latents(single))

    def on(self, observations: Mapping[str, Any]) -> Proposal:
        """Returns the proposal on other data sets, at which sites have the same shapes."""
        data = Observations(observations, self.single.model, self.target.nesting)
        return replace(self, target=replace(self.target, data=data))

    @property
    def elements(self) -> int:
        """The number of elements of all sites, for one draw and all data sets."""
        sites = [*self.single.guide.values(), *self.single.model.values()]
        return max(1, sum(site["fn"].shape().numel() for site in sites)) * (
            self.target.data.num or 1
        )

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the latents in a single run."""
        return {name: self.single.model[name]["fn"].shape() for name in self.latents}

    def draw(self, counts: Sequence[int], from_prior: Sequence[int] = ()) -> WeightedSamples:
        """Returns draws of the guide, and behind them of the prior, in chunks, joined."""
        chunks = self._chunks(counts, from_prior)
        plates = {name: plate_names(self.single.model[name]) for name in self.latents}
        values = {name: torch.cat([chunk.values[name] for chunk in chunks]) for name in plates}
        log_weights = torch.cat([chunk.log_weights for chunk in chunks])
        lost = log_weights.isnan()
        if lost.any():
            fault = f"{max(chunk.fault for chunk in chunks)} for {int(lost.sum())} of {lost.numel()} draws"
            if lost.double().mean() >= _LOST:
                raise BadDensity(f"Expected {fault}. {CHECK}")
            warn(f"Expected {fault}, which have weight zero. {CHECK}")
        return WeightedSamples(values, torch.where(lost, -torch.inf, log_weights), plates)

    def at_once(self, num: int, *, checked: bool = True) -> tuple[_Draws, str | None]:
        """Returns draws of one run for all, and where this differs from single runs; None if nowhere.

        If not ``checked``, nothing is, and weights may be NaN.
        """
        run = weighed_run(self.target, self.target.extent(num))
        return self._draws(run, checked), self._difference(run) if checked else None

    def log_weights(self, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the log weights of given latents ``(draws, *data sets, *site shape)``, as those of draws."""
        extent = self.target.extent(len(values[self.latents[0]]))
        nesting, dims = self.target.nesting, len(extent.sizes)
        values = {
            name: with_idle_dims(values[name], self.single.model[name], nesting, dims)
            for name in self.latents
        }
        model = self.target.run_model(extent, Runner({**values, **extent.data}))
        return summed(log_densities(model), extent) - self.target.guide_log_prob(extent, values)

    def _chunks(self, counts: Sequence[int], from_prior: Sequence[int]) -> list[_Draws]:
        """Returns chunks of draws: each at once, or all one by one where this goes wrong for a few."""
        with forked_rng():
            target, reason = run_for_many(self.target, self._fault)
        proposal = replace(self, target=target)
        draws = [(proposal._guide_draws, num) for num in counts] + [
            (proposal._prior_draws, num) for num in from_prior
        ]
        if reason is not None:
            warn(_LOOP.format(reason), OneByOne)
            return [proposal._one_by_one(draw, num) for draw, num in draws]
        return [draw(target.extent(num)) for draw, num in draws]

    def _fault(self, target: Target) -> str | None:
        """Returns why a few draws cannot be made at once; None if they can, or if no draws can."""
        num = few_draws([*self.single.guide.values(), *self.single.model.values()])
        try:
            return replace(self, target=target).at_once(num)[1]
        except BadDensity:
            return None
        except torch.OutOfMemoryError:
            raise
        except (
            Exception
        ) as error:  # whatever a model does with batch dims that it was not written for
            return in_one_line(error)

    def _one_by_one(self, draw: Callable[[Extent], _Draws], count: int) -> _Draws:
        num = self.target.data.num
        rows = [row for _ in range(count) for row in range(num or 1)]
        draws = [draw(self.target.one(row)) for row in rows]
        sizes = (count,) if num is None else (count, num)

        def stacked(parts: list[Tensor]) -> Tensor:
            return torch.stack(parts).reshape(sizes + parts[0].shape)

        values = {name: stacked([draw.values[name] for draw in draws]) for name in self.latents}
        return _Draws(
            values, stacked([draw.log_weights for draw in draws]), max(draw.fault for draw in draws)
        )

    def _guide_draws(self, extent: Extent) -> _Draws:
        return self._draws(weighed_run(self.target, extent))

    def _prior_draws(self, extent: Extent) -> _Draws:
        return self._draws(weighed_run(self.target, extent, weigh=self._weighed_prior))

    def _weighed_prior(
        self, target: Target, extent: Extent, values: Mapping[str, Tensor]
    ) -> Weighed:
        sites = target.run_model(extent, Runner({**values, **extent.data}))
        log_q = target.guide_log_prob(extent, {name: whole(sites[name]) for name in self.latents})
        log_q = torch.where(log_q.isnan(), -torch.inf, log_q)  # far out, where it draws nothing
        return Weighed(extent, {}, sites, {"all latents": log_q}, log_densities(sites))

    def _draws(self, run: Weighed, checked: bool = True) -> _Draws:
        log_q, log_p = (summed(part, run.extent) for part in (run.log_q, run.log_p))
        if self.target.prior_share:
            sites = {name: run.model[name] for name in self.latents}
            # the model's log density is NaN where it refuses a draw
            with pyro.validation_enabled(False):
                prior = {
                    name: scale_and_mask(log_density(site), mask=site["mask"])
                    for name, site in sites.items()
                }
            log_q = self.target.defended(log_q, summed(prior, run.extent))
        log_weights = log_p - log_q
        fault = fault_of(run) if checked and not (log_weights < torch.inf).all() else ""
        sizes = run.extent.sizes
        values = {
            name: whole(run.model[name]).reshape(sizes + shape)
            for name, shape in self.shapes.items()
        }
        return _Draws(values, log_weights, fault)

    def _difference(self, run: Weighed) -> str | None:
        """Returns where a run for many draws differs from runs for its first and last one; None if nowhere.

        Draws that the model has no density for say nothing. Near the edge of a support the value of a draw may not tell
        the density that it was made with; where a difference is found, both are told by the values.
        """
        drawn = [name for name, site in run.guide.items() if not site["is_observed"]]
        reason = self._differing(run, drawn)
        if reason is not None:
            values = {name: whole(run.guide[name]) for name in drawn}
            reason = self._differing(weighed_run(self.target, run.extent, values), drawn)
        return reason

    def _differing(self, run: Weighed, drawn: Sequence[str]) -> str | None:
        good = (~lost_draws(run)).nonzero()
        shapes = {name: self.single.guide[name]["fn"].shape() for name in drawn}

        def alone_at(index: Any) -> dict[str, Tensor]:
            values = {name: whole(run.guide[name])[index].reshape(shapes[name]) for name in drawn}
            return _by_role(weighed_run(self.target, self.target.one(index[-1]), values))

        indices = map(tuple, good[[0, -1]].tolist() if len(good) else ())
        wrong = differing_site(_by_role(run), indices, alone_at)
        return wrong and f"{wrong} differs from that in a single run"


def _by_role(run: Weighed) -> dict[str, Tensor]:
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
    drawn = {
        n: site
        for n, site in single.guide.items()
        if not site["is_observed"] and n not in auxiliary
    }
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
            what = "observed" if name in sites else "none of its sites"
            raise ValueError(
                f"Expected a guide that samples latents of the model; it samples '{name}', which is {what} there."
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
