"""Initial values of a guide: near the origin of unconstrained space, or at prior medians if data are likelier there.

At the origin scales are 1, whatever the units of the data; an informative prior knows better. A
vague prior does not, so the data decide.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import init_to_uniform
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_nami.factors.bijections import bijection_to, is_interval, peel_support
from pyro_nami.program.first_run import first_run, subsamples
from pyro_nami.program.flat_priors import is_improper
from pyro_nami.program.isolation import forked_rng, seed_rng, untouched
from pyro_nami.program.memory import rows_in_memory
from pyro_nami.program.program import Program
from pyro_nami.program.site_values import any_value

__all__ = ["PRIOR_DRAWS", "likely_start", "near_origin"]

# Draws of a prior whose median is taken; with ten times fewer, medians are off by half a standard deviation.
PRIOR_DRAWS = 101
# Shares of the way to a median; without the shorter ones, vague priors would take latents beyond the data.
SHARES = tuple(0.5**halvings for halvings in range(5))


def near_origin(site: Any) -> Tensor:
    """Returns a value near the origin of unconstrained space: by a uniform number of less than 0.05 for each element,
    and of less than half a standard deviation of a prior on the real line.
    """
    fn = site["fn"]
    if is_improper(fn):  # which Pyro's own start draws from
        value = any_value(
            fn, unconstrained=lambda *shape, **kind: 0.1 * torch.rand(*shape, **kind) - 0.05
        )
        if value is None:  # as no way is known from unconstrained space to its support
            raise NotImplementedError
    else:
        value = init_to_uniform(site, radius=0.05) * _narrowness(fn)
        if is_interval(fn.support):  # whose unconstrained space is another than Pyro's
            value = bijection_to(fn.support)(biject_to(fn.support).inv(value))
    # nobody asked for it, so a reparametrization may replace it without a warning
    value._pyro_custom_init = False
    return value


def likely_start(
    program: Program, first: poutine.Trace, scale: float, *, runs: int = 4, far: float = 0.5
) -> poutine.Trace:
    """Returns the trace of a run with every continuous latent where it starts, given one with all near the origin.

    Latents are near the origin of unconstrained space, or as near to the median of their prior, or to a place between
    that a vague prior reaches. Those of one kind, whose names differ in digits, are where data are likeliest, by
    Normals of a ``scale`` about all latents: first all or none at medians, then one kind after another, while some is
    better elsewhere. The prior has no say: a scale that suits what has yet to move only holds it.

    Args:
        program: the model and its arguments.
        first: the run with all latents near the origin.
        scale: standard deviation of the Normals about a start.
        runs: draws from these Normals; data have to be likelier in all of them.
        far: distance from the origin, in unconstrained space, from which a median is another start.
    """
    samples = {name: site for name, site in first.nodes.items() if site["type"] == "sample"}
    latent = {name: site["value"] for name, site in samples.items() if not site["is_observed"]}
    if len(latent) == len(samples):
        return first
    seen = poutine.Trace()
    for name in subsamples(first.nodes):
        seen.add_node(name, **first.nodes[name])
    model = poutine.replay(program.model, trace=seen)
    ways = _WaysToMedians(program._replace(model=model), latent, far)
    at = dict[str, float]()
    with untouched(*program.roots), torch.no_grad(), pyro.validation_enabled(False):
        here = ways.likelihoods({}, scale, runs)
        whole = ways.likelihoods(dict.fromkeys(map(_kind, latent), 1.0), scale, runs)
        if (whole > here).all():
            at, here = dict.fromkeys(ways.shares, 1.0), whole
        for kind, shares in ways.shares.items():
            for share in shares:
                if share == at.get(kind, 0.0):
                    continue
                other = {**at, kind: share}
                there = ways.likelihoods(other, scale, runs)
                if (there > here).all():
                    at, here = other, there
    return ways.run(at, 0.0) if any(at.values()) else first


class _WaysToMedians:
    """Runs of a model with latents of some kinds at shares of the way from near the origin to their prior medians.

    Args:
        program: the model, with the same subsamples in every run, and its arguments.
        latent: latent -> its value near the origin.
        far: distance of a median from the origin from which it counts.

    Attributes:
        shares: kind of latents whose medians are not at the origin -> shares of the way that its priors reach.
    """

    def __init__(self, program: Program, latent: Mapping[str, Any], far: float) -> None:
        self.shares: dict[str, tuple[float, ...]] = {}
        self._program = program
        self._latent = latent
        self._far = far

    def run(self, at: Mapping[str, float], scale: float) -> poutine.Trace:
        """Returns a run at shares of the way, kind -> share, by Normals of a ``scale`` about these places."""

        def start(site: Any) -> Tensor:
            if site["name"] not in self._latent:
                raise NotImplementedError  # and it is drawn
            transform = bijection_to(site["fn"].support)
            kind = _kind(site["name"])
            place = transform.inv(self._latent[site["name"]])
            if kind in at:
                median, nearest = _median(site["fn"], transform)
                if median.abs().max() > self._far:
                    self.shares[kind] = (0.0, *(share for share in SHARES if share >= nearest))
                place = place + at[kind] * median
            return transform(place + scale * _narrowness(site["fn"]) * torch.randn_like(place))

        return first_run(self._program, start)

    def likelihoods(self, at: Mapping[str, float], scale: float, runs: int) -> Tensor:
        """Returns the log density of the data in each of some such runs, in nats; minus infinity where a run fails."""
        found = []
        for seed in range(runs):
            seed_rng(seed)
            try:
                trace = self.run(at, scale)
                found.append(float(trace.log_prob_sum(lambda _, site: site["is_observed"])))
            except Exception:  # noqa: BLE001  whatever a model does where it is not meant to be
                found.append(-torch.inf)
        densities = torch.tensor(found, dtype=torch.float64)
        return torch.where(densities.isfinite(), densities, -torch.inf)


def _is_real(fn: Any) -> bool:
    return peel_support(fn.support)[0] is constraints.real


def _narrowness(fn: Any) -> Tensor | float:
    """Returns standard deviations of a prior on the real line, in tenths; at most 1."""
    try:
        return (10 * fn.stddev.detach()).nan_to_num(1.0).clamp(max=1.0) if _is_real(fn) else 1.0
    except (NotImplementedError, AttributeError):
        return 1.0


def _kind(name: str) -> str:
    return re.sub(r"\d+", "", name)


def _median(fn: Any, transform: Any) -> tuple[Tensor, float]:
    """Returns the median of a prior in unconstrained space, of every element, 0 where it has no draws, or too many; and
    to what share of the way there draws from the prior come near the origin, as those of vague ones do.
    """
    shape = transform.inverse_shape(fn.shape())
    num = min(PRIOR_DRAWS, rows_in_memory(shape.numel()))
    try:
        if _is_real(fn) and fn.mean.isfinite().all():
            return fn.mean.detach(), 1.0
    except (NotImplementedError, AttributeError):
        pass
    draws = None
    with forked_rng(), suppress(NotImplementedError):  # of an improper prior
        seed_rng(0)
        draws = fn.sample((num,)) if num > 1 else None
    if draws is None:
        return torch.zeros(()), 1.0
    draws = transform.inv(draws)
    # where draws are that rounding has moved to a bound
    bound = -2 * math.log(torch.finfo(draws.dtype).eps)
    draws = draws.nan_to_num(0.0, bound, -bound)
    median = draws.median(0).values
    return median, float((draws.abs().amin(0) / median.abs()).nan_to_num(1.0).max())
